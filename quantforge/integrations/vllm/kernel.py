"""The linear kernel that vLLM gets to choose from: packing and operators of `quantforge.kernels`.

Imported in processes of vLLM only. vLLM asks each kernel of a platform, in order, whether it takes a layer
(`can_implement`), loads the layer's tensors and has the kernel it chose bring them into its own layout. All integer
weights without rounded activations come this way: compressed-tensors ``pack-quantized``, gptq, awq.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import CPUWNA16LinearKernel, MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.layers.quantization.utils import replace_parameter
from vllm.model_executor.parameter import permute_param_layout_
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types

from quantforge.integrations.vllm import PREFER, SWITCH, mode
from quantforge.kernels import gpu, launch, native, ops, panels, planar
from quantforge.numerics.bits import unpack_codes

logger = init_logger("vllm.quantforge")

OPERATOR = "cpu_gemm_wna16"
"""What vLLM's own kernel for CPUs multiplies with; builds for AVX2 do not have it."""

OPERATOR_FLOATS = (torch.float16, torch.bfloat16)
"""Activations that it takes. The kernel accepts layers in float32 too, and fails at the first forward."""

OTHER_TYPES = "uint8 uint8b128 uint2 uint2b2 uint3 uint3b4".split()  # before 0.32, vLLM has some of them only
TYPES = (
    *(scalar_types.uint4, scalar_types.uint4b8),
    *(getattr(scalar_types, name) for name in OTHER_TYPES if hasattr(scalar_types, name)),
)
"""Integers with zeros of their own, or with the middle code for all."""


class QuantforgeLinearKernel(MPLinearKernel):
    """Multiplies by codes of 4 or 8 bits and never rounds activations, whatever the processor and their dtype."""

    @classmethod
    def get_min_capability(cls) -> int:
        """None here: `can_implement` asks for the kernels themselves."""
        return -1

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Whether this kernel takes a layer, and why not: its grid has no place here, or vLLM's own kernel takes it."""
        reason = unsupported(c) or left_to_vllm(c)
        return reason is None, reason

    def process_weights_after_loading(self, layer: Module) -> None:
        """From words along the inputs, in whichever orientation they were loaded, to the layout of the kernels."""
        if getattr(getattr(layer, "scheme", None), "input_quant", None) is not None:
            raise ValueError(
                f"{type(self).__name__} keeps activations as they are, and this checkpoint asks for rounded ones "
                f"(input_activations); serve it without quantforge: {SWITCH}=off"
            )
        in_features, out_features = self.config.partition_weight_shape
        bits, stored = _bits(self.config)
        words, scales, zero_words = self._tensors(layer)
        permute_param_layout_(words, input_dim=1, output_dim=0, packed_dim=1)
        permute_param_layout_(scales, input_dim=1, output_dim=0)
        codes = unpack_codes(words.data.contiguous(), bits, 1, in_features)
        if self.config.zero_points:
            permute_param_layout_(zero_words, input_dim=1, output_dim=0, packed_dim=0)
            zeros = unpack_codes(zero_words.data.contiguous(), bits, 0, out_features)
        else:
            zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8, device=codes.device)
        plain = bool((zeros == 1 << (stored - 1)).all())
        layout = panels if current_platform.is_cpu() else planar
        packed = layout.pack(
            codes, scales.data, None if plain else zeros, bits=stored, group_size=self.config.group_size
        )
        replace_parameter(layer, self.w_q_name, packed[0])
        replace_parameter(layer, self.w_s_name, packed[1])
        self.w_zp_name: str = self.w_zp_name or "weight_zero_point"
        kept = None if packed[2] is None else Parameter(packed[2], requires_grad=False)
        layer.register_parameter(self.w_zp_name, kept)
        if current_platform.is_cpu():
            _prepare()

    def _tensors(self, layer: Module) -> tuple[Any, Any, Any]:
        """Weights, scales and zeros of a layer, as loaded or as packed."""
        return getattr(layer, self.w_q_name), getattr(layer, self.w_s_name), getattr(layer, self.w_zp_name or "", None)

    def apply_weights(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out], in the dtype of x."""
        weight, scales, zeros = self._tensors(layer)
        operators = torch.ops.quantforge
        operator = operators.w4a16_linear if _bits(self.config)[1] == 4 else operators.w8a16_linear
        found: Tensor = operator(
            x, weight, scales, zeros, bias, self.config.group_size, self.config.partition_weight_shape[1]
        )
        return found


def _bits(c: MPLinearLayerConfig) -> tuple[int, int]:
    """Bits of a code in the files and in memory."""
    bits = int(c.weight_type.size_bits)
    return bits, 4 if bits <= 4 else 8


def unsupported(c: MPLinearLayerConfig) -> str | None:
    """Why the kernels here cannot multiply by a layer's weights, or None."""
    if c.weight_type not in TYPES or (c.zero_points and c.weight_type.has_bias()):
        return f"it takes {', '.join(map(str, TYPES))}, not {c.weight_type}{' with zero points' * c.zero_points}"
    if getattr(c, "has_g_idx", False):  # up to some version before 0.32
        return "it takes no inputs in groups by an order of their own (g_idx)"
    floats = tuple(native.TYPES) if current_platform.is_cpu() else launch.FLOATS
    if c.act_type not in floats:
        return f"it takes activations of {', '.join(map(str, floats))}, not {c.act_type}"
    stored, in_features = _bits(c)[1], c.partition_weight_shape[0]
    if current_platform.is_cpu():
        if not panels.fits(in_features, c.group_size, stored):
            return f"groups of {c.group_size} inputs do not end where 32-bit words of {stored}-bit codes do"
        return None
    if planar.whole_group(c.group_size, in_features) != planar.WHOLE_ROW and c.group_size % 16:
        return f"groups of {c.group_size} inputs are no multiple of 16"
    return gpu.no_kernel(torch.device("cuda"))


def left_to_vllm(c: MPLinearLayerConfig) -> str | None:
    """Why a layer stays with vLLM's own kernel for CPUs, which is asked itself, or None."""
    own = CPUWNA16LinearKernel
    runs = hasattr(torch.ops._C, OPERATOR) and c.act_type in OPERATOR_FLOATS
    if mode() == PREFER or not runs or own.__name__ in envs.VLLM_DISABLED_KERNELS:
        return None
    return f"{own.__name__} takes it; {SWITCH}={PREFER} has this one instead" if own.can_implement(c)[0] else None


def _prepare() -> None:
    """Build our own kernel now, not at the first request, and say which it is.

    vLLM's attention uses AMX in bfloat16 without asking the system for it: its kernels for weights have done so before.
    In their place, this asks.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    status = native.status()
    if status.level is None:
        logger.warning_once("quantforge: no compiled CPU kernel, which is slow: %s", status.reason)
    else:
        logger.info_once("quantforge: CPU kernel %s, activations as they are", status.level)


def add(platform: PlatformEnum, *, first: bool) -> str:
    """Put the kernel among those of a platform, once: first of all, or right before vLLM's own for CPUs.

    Returns where it stands, in words. Raises TypeError or ValueError for a vLLM that is built another way, and leaves
    it alone then.
    """
    assert ops.SCHEMAS  # the operators are registered
    if missing := QuantforgeLinearKernel.__abstractmethods__:
        raise TypeError(f"its kernels have to define {', '.join(sorted(missing))} as well")
    if lacking := {"partition_weight_shape", "weight_type", "act_type", "group_size", "zero_points"} - set(
        MPLinearLayerConfig.__dataclass_fields__
    ):
        raise TypeError(f"its layers do not tell {', '.join(sorted(lacking))}")
    kernels: list[type[MPLinearKernel]] = linear._POSSIBLE_KERNELS[platform]
    if not first and CPUWNA16LinearKernel not in kernels:
        raise ValueError(f"{CPUWNA16LinearKernel.__name__} is not among its kernels for {platform}")
    if QuantforgeLinearKernel not in kernels:
        kernels.insert(0 if first else kernels.index(CPUWNA16LinearKernel), QuantforgeLinearKernel)
    if first:
        return f"before vLLM's own for {platform.name}"
    has = hasattr(torch.ops._C, OPERATOR)
    return f"for what {CPUWNA16LinearKernel.__name__} refuses" if has else f"for all layers: no {OPERATOR} in this vLLM"
