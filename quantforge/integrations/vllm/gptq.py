"""A reading of gptq for vLLM on a CPU, where its own takes 4 bits symmetric in groups of 32, 64, 128 or whole rows.

Imported in processes of vLLM only. Registered by vLLM's own means as another kind of quantization, which says of a
checkpoint that it is its own where vLLM would refuse it; all others stay with vLLM. Layers then go to whichever kernel
vLLM chooses. Zeros are read as their version has them: version 1 stores them less one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.kernels.linear import MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override, get_linear_quant_method
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_repeat_scales_on_all_ranks
from vllm.model_executor.parameter import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
)
from vllm.scalar_type import scalar_types

from quantforge.numerics.bits import pack_codes, unpack_codes

NAME = "quantforge_gptq"
OWN_GRID = (4, True)
OWN_GROUPS = (-1, 32, 64, 128)
"""Bits, symmetry and group sizes that vLLM's own reading takes on a CPU."""


class GPTQConfig(AutoGPTQConfig):
    """What config.json says of a gptq checkpoint; rules for single layers (``dynamic``) are vLLM's own."""

    TYPE_MAP = {  # noqa: RUF012  (as vLLM has it)
        (4, True): scalar_types.uint4b8,
        (8, True): scalar_types.uint8b128,
        (4, False): scalar_types.uint4,
        (8, False): scalar_types.uint8,
    }

    @classmethod
    def get_name(cls) -> str:
        """As vLLM's log calls it."""
        return NAME

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Mapping[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """`NAME` for checkpoints that only this class takes, unless ``--quantization`` asks for another."""
        if str(hf_quant_cfg.get("quant_method", "")).lower() != "gptq" or user_quant not in (None, "gptq", NAME):
            return None
        grids = list(_grids(hf_quant_cfg))
        refused = any(grid != OWN_GRID or group not in OWN_GROUPS for grid, group in grids)
        return NAME if refused and all(grid in cls.TYPE_MAP for grid, _ in grids) else None

    def get_quant_method(self, layer: Module, prefix: str) -> Any:
        """Linear layers; experts of these grids are refused."""
        if isinstance(layer, RoutedExperts) and get_dynamic_override(self, layer_name=prefix) is not False:
            raise ValueError(f"{prefix}: experts in gptq of 8 bits or asymmetric are not taken on a CPU")
        if isinstance(layer, RoutedExperts):
            return super().get_quant_method(layer, prefix)
        return get_linear_quant_method(self, layer, prefix, GPTQLinearMethod)


def _grids(config: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, Any], Any]]:
    """((bits, symmetric), group size): of all sites, then of each rule that gives some sites others."""
    own = config.get("bits"), config.get("sym"), config.get("group_size")
    yield own[:2], own[2]
    for pattern, changed in (config.get("dynamic") or {}).items():
        if not pattern.startswith("-:"):
            yield (
                (changed.get("bits", own[0]), changed.get("sym", own[1])),
                changed.get("group_size", own[2]),
            )


class GPTQLinearMethod(LinearMethodBase):
    """One linear layer in gptq: loaded as the files have it, multiplied by the kernel that vLLM chooses."""

    def __init__(self, quant_config: GPTQConfig) -> None:
        self.quant_config = quant_config
        self.input_dtype: torch.dtype | None = None  # vLLM's readings of gptq have it

    def create_weights(
        self,
        layer: Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Empty tensors, with what vLLM's loader has to know of each to split it among devices and fuse matrices."""
        asked, inputs, outputs = self.quant_config, input_size_per_partition, sum(output_partition_sizes)
        loader, codes = extra_weight_attrs.get("weight_loader"), asked.pack_factor
        settings = MPLinearLayerConfig(
            full_weight_shape=(input_size, output_size),
            partition_weight_shape=(inputs, outputs),
            weight_type=asked.quant_type,
            act_type=params_dtype,
            group_size=asked.group_size,
            zero_points=not asked.is_sym,
        )
        chosen = choose_mp_linear_kernel(settings)
        whole = marlin_repeat_scales_on_all_ranks(asked.group_size, input_size != inputs)
        group = input_size if asked.group_size == -1 else asked.group_size
        if inputs % codes or outputs % codes or (not whole and inputs % group):
            raise ValueError(
                f"{inputs} inputs and {outputs} outputs of {asked.weight_bits} bits in groups of {group}: both must be "
                f"multiples of {codes}, and inputs of the group size"
            )
        groups = (input_size if whole else inputs) // group
        words = torch.empty(inputs // codes, outputs, dtype=torch.int32)
        scales = torch.empty(groups, outputs, dtype=params_dtype)
        zeros = torch.empty(groups, outputs // codes, dtype=torch.int32)
        by_row: dict[str, Any] = {"input_dim": 0, "output_dim": 1, "weight_loader": loader}
        by_column: dict[str, Any] = {"output_dim": 1, "weight_loader": loader}
        packed = {"packed_dim": 1, "packed_factor": codes}
        layer.register_parameter(
            "qweight", PackedvLLMParameter(data=words, packed_dim=0, packed_factor=codes, **by_row)
        )
        if whole:
            layer.register_parameter("scales", ChannelQuantScaleParameter(data=scales, **by_column))
            layer.register_parameter("qzeros", PackedColumnParameter(data=zeros, **packed, **by_column))
        else:
            layer.register_parameter("scales", GroupQuantScaleParameter(data=scales, **by_row))
            layer.register_parameter("qzeros", PackedvLLMParameter(data=zeros, **packed, **by_row))
        self.kernel = chosen(settings, w_q_param_name="qweight", w_s_param_name="scales", w_zp_param_name="qzeros")

    def process_weights_after_loading(self, layer: Module) -> None:
        """Zeros become those of version 2; then the chosen kernel brings all into its own layout."""
        if not self.quant_config.is_sym and self.quant_config.full_config.get("checkpoint_format") != "gptq_v2":
            bits, stored = self.quant_config.weight_bits, cast(Tensor, layer.qzeros)
            zeros = unpack_codes(stored.data, bits, 1, stored.shape[1] * self.quant_config.pack_factor)
            stored.data = pack_codes((zeros + 1) & ((1 << bits) - 1), bits, 1)
        self.kernel.process_weights_after_loading(layer)

    def apply(self, layer: Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] -> [..., out]."""
        return cast(Tensor, self.kernel.apply_weights(layer, x, bias))


def add() -> None:
    """Make `NAME` one of vLLM's kinds of quantization, once; TypeError for a vLLM whose layers have more to be told."""
    given = {"full_weight_shape", "partition_weight_shape", "weight_type", "act_type", "group_size", "zero_points"}
    needed = {each.name for each in fields(MPLinearLayerConfig) if each.default is each.default_factory is MISSING}
    if needed - given:
        raise TypeError(f"its layers want {', '.join(sorted(needed - given))} as well")
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(GPTQConfig)
