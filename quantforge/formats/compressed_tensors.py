"""compressed-tensors, as written by llm-compressor: ``pack-quantized``, and ``int-quantized`` with INT8 activations.

Per site of ``pack-quantized`` (specification: vllm-project/compressed-tensors, ``PackedQuantizationCompressor``):

| tensor | shape | dtype | content |
|---|---|---|---|
| weight_packed | [out, in * bits / 32] | int32 | codes, a dense bit stream along the input |
| weight_scale | [out, groups] | scale dtype of the grid | scales |
| weight_shape | [2] | int64 | [out, in] |
| weight_zero_point | [out * bits / 32, groups] | int32 | zeros, a stream along the output; asymmetric grids only |

Scales of a cache of keys and values are ``k_scale`` and ``v_scale`` of each attention module, [1], or of strategy
``attn_head`` [heads, 1, 1]; ``kv_cache_scheme`` says what they mean.

``int-quantized`` (W8A8) keeps ``weight``, int8 [out, in], and ``weight_scale``; inputs are quantized at run time.

Every loader reads 4 bits, most read 8. At 2 and 3 bits the stream is the one that compressed-tensors 0.20, and
transformers with it, unpack exactly; servers may have no kernel for them, and compressed-tensors 0.17 laid 3 bits out
differently (10 values a word).
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from quantforge.formats import CheckpointFacts, Format, SiteShape, conv1d, ragged, sites_by_spec
from quantforge.numerics.bits import pack_codes, period
from quantforge.patterns import covering
from quantforge.quantized import CacheScales, QuantizedWeight
from quantforge.spec import ActivationSpec, KvCacheSpec, QuantSpec

_EXPERT = re.compile(r".*\.experts(\..*)?")
_ALL_EXPERTS = r"re:.*\.experts(\..*)?$"
"""One entry stands for all experts of all layers: named one by one they would fill the config."""


def problems(specs: Mapping[str, QuantSpec], sites: list[SiteShape]) -> list[str]:
    """Sites that are no Linear modules, and sites whose rows (or packed zeros) do not fill whole 32-bit words."""
    found = conv1d("compressed-tensors", sites)
    for spec, own in sites_by_spec(specs, sites).items():
        multiple, _ = period(spec.bits)
        found += ragged("compressed-tensors", "in_features", spec.bits, multiple, own)
        if not spec.symmetric:
            advice = ", or make the grid symmetric (no zeros to pack)"
            found += ragged("compressed-tensors", "out_features", spec.bits, multiple, own, advice)
    return found


def encode(name: str, weight: QuantizedWeight, facts: CheckpointFacts) -> dict[str, torch.Tensor]:
    """The tensors of one site, by checkpoint key."""
    spec = weight.spec
    if facts.activations is not None:
        signed = weight.codes.to(torch.int16) - spec.symmetric_zero
        return {f"{name}.weight": signed.to(torch.int8), f"{name}.weight_scale": weight.scale.contiguous()}
    tensors = {
        f"{name}.weight_packed": pack_codes(weight.codes, spec.bits, dim=1),
        f"{name}.weight_scale": weight.scale.contiguous(),
        f"{name}.weight_shape": torch.tensor([weight.out_features, weight.in_features], dtype=torch.int64),
    }
    if not spec.symmetric:
        tensors[f"{name}.weight_zero_point"] = pack_codes(weight.zero, spec.bits, dim=0)
    return tensors


def encode_cache(module: str, scales: CacheScales, spec: KvCacheSpec) -> dict[str, torch.Tensor]:
    """The two tensors of one attention module."""
    shape = (-1, 1, 1) if spec.per_head else (1,)
    return {f"{module}.k_scale": scales.k.reshape(shape), f"{module}.v_scale": scales.v.reshape(shape)}


def config(facts: CheckpointFacts) -> dict[str, Any]:
    """One config group a grid; kept modules are listed in ``ignore``.

    One grid is that of every ``Linear``. Of several, each names its sites: loaders differ in whether a class or a name
    goes first (vLLM looks for a class name before it looks for the parts of a fused module), so no class is named.
    """
    layout = "pack-quantized" if facts.activations is None else "int-quantized"
    grids = facts.by_spec()
    every = [name for names in grids.values() for name in names]
    groups = {}
    for number, (spec, names) in enumerate(grids.items()):
        others = [*(set(every) - set(names)), *facts.kept]
        targets = ["Linear"] if len(grids) == 1 else [f"re:{expression}" for expression in covering(names, others)]
        groups[f"group_{number}"] = {
            "targets": targets,
            "weights": _weights(spec),
            "input_activations": None if facts.activations is None else _inputs(facts.activations),
            "output_activations": None,
            "format": layout,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None if facts.kv_cache is None else _cache(facts.kv_cache),
        "ignore": list(dict.fromkeys(_ALL_EXPERTS if _EXPERT.fullmatch(name) else name for name in facts.kept)),
        "config_groups": groups,
    }


def _weights(spec: QuantSpec) -> dict[str, Any]:
    return {
        "num_bits": spec.bits,
        "type": "int",
        "symmetric": spec.symmetric,
        "strategy": "channel" if spec.group_size is None else "group",
        "group_size": spec.group_size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def _inputs(activations: ActivationSpec) -> dict[str, Any]:
    return {
        "num_bits": activations.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "group_size": None,
        "dynamic": True,
        "actorder": None,
        "block_structure": None,
        "observer": None,
        "observer_kwargs": {},
    }


def _cache(spec: KvCacheSpec) -> dict[str, Any]:
    return {
        "num_bits": spec.bits,
        "type": "float" if spec.kind == "fp8" else "int",
        "symmetric": True,
        "strategy": "attn_head" if spec.per_head else "tensor",
        "group_size": None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def side_files(facts: CheckpointFacts) -> dict[str, dict[str, Any]]:
    """None: everything is in config.json."""
    return {}


FORMAT = Format(
    name="compressed-tensors",
    summary="compressed-tensors, packed or W8A8: vLLM, SGLang, transformers",
    problems=problems,
    encode=encode,
    config=config,
    side_files=side_files,
    activations=True,
    encode_cache=encode_cache,
)
