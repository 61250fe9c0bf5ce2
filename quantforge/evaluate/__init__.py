"""How far a quantized model is from the original: perplexity and divergence, each under a protocol that is named.

`protocol` cuts a text into windows; `divergence` scores windows with anything that gives their logits.
"""
