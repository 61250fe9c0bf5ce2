"""Run in an environment with vLLM and this package: our kernel, as vLLM loads and calls it, against plain arithmetic.

    TRITON_INTERPRET=1 python tests/vllm_grids.py

For every type of integer, with zeros and without, in groups and whole rows, in both orientations of the tensors; on the
layout for GPUs as well, whose kernels are run by Triton's interpreter. Prints one line for each and a last one.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.scalar_type import scalar_types

from quantforge.integrations.vllm import kernel
from quantforge.kernels import launch
from quantforge.numerics.bits import pack_codes

OUT, IN, TOKENS = 96, 128, 3


def parameter(data: torch.Tensor, rows: bool, packed: int | None = None) -> Parameter:
    """A tensor [out, in] as vLLM's loader leaves it, so or transposed; `packed` is 0 for out, 1 for in."""
    found: Any = Parameter(data if rows else data.t(), requires_grad=False)
    found.output_dim, found.input_dim = (0, 1) if rows else (1, 0)
    if packed is not None:
        found.packed_dim = packed if rows else 1 - packed
    return found


def difference(bits: int, asymmetric: bool, group: int, rows: bool, on_gpu: bool) -> float:
    """The largest difference from float64 arithmetic, as a share of the largest output."""
    count = IN // group if group > 0 else 1
    codes = torch.randint(0, 1 << bits, (OUT, IN), dtype=torch.uint8)
    zeros = torch.randint(0, 1 << bits, (OUT, count), dtype=torch.uint8)
    dtype = torch.float16 if on_gpu else torch.float32
    scales = (torch.rand(OUT, count) + 0.5).to(dtype)
    name = f"uint{bits}" if asymmetric else f"uint{bits}b{1 << bits - 1}"
    asked = MPLinearLayerConfig((IN, OUT), (IN, OUT), getattr(scalar_types, name), dtype, group, asymmetric)
    layer = Module()
    layer.register_parameter("q", parameter(pack_codes(codes, bits, 1), rows, 1))
    layer.register_parameter("s", parameter(scales, rows))
    if asymmetric:
        layer.register_parameter("z", parameter(pack_codes(zeros, bits, 0), rows, 0))
    else:
        zeros.fill_(1 << bits - 1)
    assert on_gpu or kernel.QuantforgeLinearKernel.can_implement(asked) == (True, None)
    found = kernel.QuantforgeLinearKernel.__new__(kernel.QuantforgeLinearKernel)
    found.config, found.w_q_name, found.w_s_name, found.w_zp_name = asked, "q", "s", "z"
    found.process_weights_after_loading(layer)
    x, bias = torch.randn(TOKENS, IN).to(dtype), torch.randn(OUT).to(dtype)
    if on_gpu:
        sizes = {"bits": 4 if bits <= 4 else 8, "group_size": group, "out_features": OUT}
        y = launch.planar_linear(x, layer.q, layer.s, layer.z, bias, **sizes)
    else:
        y = found.apply_weights(layer, x, bias)
    each = IN // count
    weight = (codes.double() - zeros.double().repeat_interleave(each, 1)) * scales.double().repeat_interleave(each, 1)
    right = x.double() @ weight.t() + bias.double()
    return float((y.double() - right).abs().max() / right.abs().max())


def main() -> None:
    torch.manual_seed(0)
    kernel.left_to_vllm = lambda c: None
    for on_gpu, limit in ((False, 5e-6), (True, 2e-3)):
        kernel.current_platform = SimpleNamespace(is_cpu=lambda on_gpu=on_gpu: not on_gpu)
        for bits, asymmetric, group, rows in product((2, 3, 4, 8), (False, True), (32, -1), (False, True)):
            apart = difference(bits, asymmetric, group, rows, on_gpu)
            print(bits, asymmetric, group, rows, on_gpu, apart)
            assert apart < limit, "further than arithmetic explains"
    print("all as they should be")


if __name__ == "__main__":
    main()
