"""``import quantforge.transformers``: from then on transformers runs quantized checkpoints on their packed weights.

It calls `quantforge.runtime.register`, which see. Importing ``quantforge`` alone imports no transformers and changes
nothing in it.
"""

from quantforge.runtime import register, unregister

register()

__all__ = ["register", "unregister"]
