"""Reading checkpoints and running their decoder layers one at a time. No class per architecture: everything is probed."""
