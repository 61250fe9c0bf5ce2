"""Quantized checkpoints run on their packed weights, through transformers' own models.

`load` gives a transformers model; `register` makes ``AutoModelForCausalLM.from_pretrained`` do the same for
everybody in this process. See ``docs/runtime.md``.
"""

from quantforge.runtime.load import load
from quantforge.runtime.quantizer import register, unregister

__all__ = ["load", "register", "unregister"]
