"""Linear layers with INT8 weights and INT8 activations, on a GPU."""

from torch import Tensor

from quantforge.kernels.launch import int8_linear


def w8a8_linear_triton(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """``x`` [..., in], rounded per token to INT8, times an INT8 matrix in the layout of `rows.pack`, + bias.

    Two launches, or three when the inputs are split. See `launch.int8_linear` for dtypes and errors.
    """
    return int8_linear(x, weight, scales, bias, out_features=out_features)
