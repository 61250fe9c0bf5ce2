"""Reading checkpoints and running their decoder layers one at a time, without a class per architecture."""
