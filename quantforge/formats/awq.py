"""AWQ, version ``gemm``: the layout of AutoAWQ. 4 bits, one grid for the whole checkpoint.

Per site (specification: AutoAWQ's ``WQLinear_GEMM``; vLLM 0.32 auto_awq.py: `_convert_awq_to_standard_format`):

| tensor | shape | dtype | content |
|---|---|---|---|
| qweight | [in, out / 8] | int32 | codes of 8 outputs a word |
| qzeros | [groups, out / 8] | int32 | zeros, likewise, as they are |
| scales | [groups, out] | float16 | scales |

Nibble j of a word, from the lowest, belongs to output ``8 * word + ORDER[j]``.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from quantforge.formats import CheckpointFacts, Format, SiteShape, as_float16, conv1d, ragged
from quantforge.numerics.bits import pack_codes
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec, label_of

BITS = 4
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
HEAD = "lm_head"


def problems(specs: Mapping[str, QuantSpec], sites: list[SiteShape]) -> list[str]:
    """Grids of other bits or of several kinds, sites that are no Linear modules, outputs that do not fill words."""
    grids = [specs[site.name] for site in sites]
    found = conv1d("awq", sites)
    if other := Counter(spec.bits for spec in grids if spec.bits != BITS):
        counts = ", ".join(f"{count} sites have {bits}" for bits, count in sorted(other.items()))
        found.append(f"awq holds {BITS} bits only, and {counts}; use --format gptq or compressed-tensors")
    elif len({(spec.group_size, spec.symmetric) for spec in grids}) > 1:
        found.append(
            f"awq has one grid for all sites, and these have several ({label_of(grids)}); use --format gptq or "
            "compressed-tensors"
        )
    return found + ragged("awq", "out_features", BITS, len(ORDER), sites)


def encode(name: str, weight: QuantizedWeight, facts: CheckpointFacts) -> dict[str, torch.Tensor]:
    """The tensors of one site, by checkpoint key. Raises NumericsError for scales that float16 cannot hold exactly."""
    return {
        f"{name}.qweight": _pack(weight.codes.t()),
        f"{name}.qzeros": _pack(weight.zero.t()),
        f"{name}.scales": as_float16(weight.scale, name).t().contiguous(),
    }


def _pack(rows: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, out] -> int32 [rows, out / 8]."""
    blocks = rows.reshape(rows.shape[0], -1, len(ORDER))
    return pack_codes(blocks[:, :, ORDER].flatten(1), BITS, dim=1)


def config(facts: CheckpointFacts) -> dict[str, Any]:
    """One grid, and under ``modules_to_not_convert`` the modules that are kept.

    vLLM, SGLang and AutoAWQ skip a module whose name contains an entry, transformers one that an entry, taken as a
    regular expression, names to its end. Where the name of a kept module is the beginning of a quantized one's
    (``mlp.gate`` and ``mlp.gate_proj``), a ``$`` keeps them apart for both.
    """
    (spec,) = facts.by_spec()
    taken = "\n".join(facts.specs)
    kept = [f"{name}$" if name in taken else name for name in facts.kept]
    settings: dict[str, Any] = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": spec.bits,
        "group_size": -1 if spec.group_size is None else spec.group_size,
        "zero_point": not spec.symmetric,
        "modules_to_not_convert": kept or None,
    }
    if any(name.rpartition(".")[2] == HEAD for name in facts.specs):
        settings["lm_head"] = True
    return settings


def side_files(facts: CheckpointFacts) -> dict[str, dict[str, Any]]:
    """None: everything is in config.json."""
    return {}


FORMAT = Format(
    name="awq",
    summary="AWQ gemm, 4 bits: vLLM, SGLang, TGI, transformers with gptqmodel",
    problems=problems,
    encode=encode,
    config=config,
    side_files=side_files,
    scale_dtype="float16",
)
