"""Time vLLM's own kernel for packed weights on a CPU beside ours: one layer, one thread, processor time.

    OMP_NUM_THREADS=1 .servers/vllm-plugin/bin/python scripts/servers/vllm_kernel_times.py

Runs in an environment with vLLM and this package. 4 bits asymmetric, group 64, a 4096 x 4096 matrix in four copies that
take turns; the least time counts. Prints lines of a Markdown table.
"""

import os
import time
from typing import Any

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel, MPLinearLayerConfig
from vllm.scalar_type import scalar_types

from quantforge.integrations.vllm.kernel import QuantforgeLinearKernel
from quantforge.numerics.bits import pack_codes

SIZE, GROUP, COPIES, REPEATS = 4096, 64, 4, 14
WAYS = ((torch.float16, "0"), (torch.bfloat16, "0"), (torch.bfloat16, "1"))
"""Dtype of activations, and whether vLLM may round them where the processor has AMX (VLLM_CPU_INT4_W4A8)."""


def parameter(data: torch.Tensor, packed: int | None = None) -> Parameter:
    """A tensor [out, in] as vLLM's loader of compressed-tensors leaves it."""
    found: Any = Parameter(data, requires_grad=False)
    found.output_dim, found.input_dim = 0, 1
    if packed is not None:
        found.packed_dim = packed
    return found


def made(kind: type, dtype: torch.dtype) -> tuple[Any, Module]:
    """A kernel and a layer that it has packed."""
    layer, groups = Module(), SIZE // GROUP
    layer.bias = None
    codes = torch.randint(0, 16, (SIZE, SIZE), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (SIZE, groups), dtype=torch.uint8)
    layer.register_parameter("q", parameter(pack_codes(codes, 4, 1), 1))
    layer.register_parameter("s", parameter((torch.rand(SIZE, groups) * 0.01).to(dtype)))
    layer.register_parameter("z", parameter(pack_codes(zeros, 4, 0), 0))
    found: Any = object.__new__(kind)
    found.config = MPLinearLayerConfig((SIZE, SIZE), (SIZE, SIZE), scalar_types.uint4, dtype, GROUP, True)
    found.w_q_name, found.w_s_name, found.w_zp_name = "q", "s", "z"
    found.process_weights_after_loading(layer)
    return found, layer


def milliseconds(copies: list[tuple[Any, Module]], x: torch.Tensor) -> float:
    least = float("inf")
    for _ in range(REPEATS):
        for kernel, layer in copies:
            began = time.process_time()
            kernel.apply_weights(layer, x)
            least = min(least, time.process_time() - began)
    return least * 1000


def main() -> None:
    torch.set_num_threads(1)
    print("| activations | tokens | CPUWNA16, ms | ours, ms |", "|---|---|---|---|", sep="\n")
    for dtype, rounds in WAYS:
        os.environ["VLLM_CPU_INT4_W4A8"] = rounds
        ours, own = (
            [made(kind, dtype) for _ in range(COPIES)] for kind in (QuantforgeLinearKernel, CPUWNA16LinearKernel)
        )
        for tokens in (1, 4, 32, 128):
            x = torch.randn(tokens, SIZE).to(dtype)
            said = f"{str(dtype)[6:]}, VLLM_CPU_INT4_W4A8={rounds}"
            print(f"| {said} | {tokens} | {milliseconds(own, x):.2f} | {milliseconds(ours, x):.2f} |", flush=True)


if __name__ == "__main__":
    main()
