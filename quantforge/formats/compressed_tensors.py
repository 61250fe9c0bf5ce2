"""compressed-tensors, ``pack-quantized``: weight-only integers, as written by llm-compressor.

Per site (specification: vllm-project/compressed-tensors, ``PackedQuantizationCompressor``):

| tensor | shape | dtype | content |
|---|---|---|---|
| weight_packed | [out, in * bits / 32] | int32 | codes, a dense bit stream along the input |
| weight_scale | [out, groups] | scale dtype of the grid | scales |
| weight_shape | [2] | int64 | [out, in] |
| weight_zero_point | [out * bits / 32, groups] | int32 | zeros, a stream along the output; asymmetric grids only |

Every loader reads 4 bits, most read 8. At 2 and 3 bits the stream is the one that compressed-tensors 0.20, and
transformers with it, unpack exactly; servers may have no kernel for them, and compressed-tensors 0.17 laid 3 bits out
differently (10 values a word).
"""

import re
from typing import Any

import torch

from quantforge.formats import CheckpointFacts, Format, SiteShape
from quantforge.numerics.bits import pack_codes, period
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec

NAMED_SITES = 3


_EXPERT = re.compile(r".*\.experts(\..*)?")
_ALL_EXPERTS = r"re:.*\.experts(\..*)?$"
"""One entry stands for all experts of all layers: named one by one they would fill the config."""


def problems(spec: QuantSpec, sites: list[SiteShape]) -> list[str]:
    """Sites that are no Linear modules, and sites whose rows (or packed zeros) do not fill whole 32-bit words."""
    found = []
    conv1d = [site.name for site in sites if site.kind != "linear"]
    if conv1d:
        named = ", ".join(conv1d[:NAMED_SITES]) + (
            f" and {len(conv1d) - NAMED_SITES} more" * (len(conv1d) > NAMED_SITES)
        )
        found.append(
            f"compressed-tensors quantizes Linear modules only, and {len(conv1d)} sites are Conv1D: {named}; "
            "use --format gptq"
        )
    multiple, _ = period(spec.bits)
    ragged_in = [site for site in sites if site.in_features % multiple]
    if ragged_in:
        found.append(_ragged("in_features", spec, ragged_in))
    ragged_out = [site for site in sites if site.out_features % multiple]
    if ragged_out and not spec.symmetric:
        found.append(_ragged("out_features", spec, ragged_out) + ", or make the grid symmetric (no zeros to pack)")
    return found


def _ragged(which: str, spec: QuantSpec, sites: list[SiteShape]) -> str:
    multiple, _ = period(spec.bits)
    shapes = ", ".join(f"{site.name} [{site.out_features}, {site.in_features}]" for site in sites)
    return (
        f"compressed-tensors needs {which} to be a multiple of {multiple} at {spec.bits} bits (whole 32-bit words), "
        f"which [out, in] is not at {shapes}; add these to ignore"
    )


def encode(name: str, weight: QuantizedWeight, facts: CheckpointFacts) -> dict[str, torch.Tensor]:
    """The tensors of one site, by checkpoint key."""
    spec = weight.spec
    tensors = {
        f"{name}.weight_packed": pack_codes(weight.codes, spec.bits, dim=1),
        f"{name}.weight_scale": weight.scale.contiguous(),
        f"{name}.weight_shape": torch.tensor([weight.out_features, weight.in_features], dtype=torch.int64),
    }
    if not spec.symmetric:
        tensors[f"{name}.weight_zero_point"] = pack_codes(weight.zero, spec.bits, dim=0)
    return tensors


def config(facts: CheckpointFacts) -> dict[str, Any]:
    """One config group for all Linear modules; the kept ones are listed in ``ignore``."""
    spec = facts.spec
    weights = {
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
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": "pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": list(dict.fromkeys(_ALL_EXPERTS if _EXPERT.fullmatch(name) else name for name in facts.kept)),
        "config_groups": {"group_0": group},
    }


def side_files(facts: CheckpointFacts) -> dict[str, dict[str, Any]]:
    """None: everything is in config.json."""
    return {}


FORMAT = Format(
    name="compressed-tensors",
    summary="compressed-tensors pack-quantized: vLLM, SGLang, transformers",
    problems=problems,
    encode=encode,
    config=config,
    side_files=side_files,
)
