"""From a recipe to a verified checkpoint: plan, run, write, verify; and scoring and describing finished ones."""
