"""Linear layers with 8-bit weights and 16-bit activations, on a GPU."""

from torch import Tensor

from quantforge.kernels.launch import planar_linear


def w8a16_linear_triton(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out_features: int,
) -> Tensor:
    """``x`` [..., in] times a 8-bit matrix in the planar layout (`planar.pack`), + bias: [..., out_features].

    `group_size` -1 is one scale per out feature. Several matrices that read the same input are one launch when their
    codes are stacked along the out features before packing. See `launch.planar_linear` for dtypes and errors.
    """
    return planar_linear(x, weight, scales, zeros, bias, bits=8, group_size=group_size, out_features=out_features)


def w8a16_gated_triton(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, group_size: int, out_features: int
) -> Tensor:
    """``silu(gate(x)) * up(x)``, [..., out_features / 2], in one launch over both matrices.

    Their out features alternate, gate first, in what was packed (`planar.interleave`); `out_features` counts both.
    """
    return planar_linear(
        x, weight, scales, zeros, None, bits=8, group_size=group_size, out_features=out_features, gated=True
    )
