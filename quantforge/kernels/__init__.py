"""Linear layers that multiply by packed weights, behind operators of torch.

`reference.py` says what is computed. A layout (`panels.py` on the CPU) says how codes lie in memory; `ops.py`
registers the operators; `linear.py` is the module that takes the place of a `torch.nn.Linear`. Nothing is compiled,
asked or loaded when these are imported.
"""
