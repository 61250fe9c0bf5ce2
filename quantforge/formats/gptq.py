"""GPTQ, versions 1 and 2: the layout of AutoGPTQ and GPTQModel.

Per site (specification: GPTQModel's ``qlinear`` packers; bits 2, 3, 4, 8):

| tensor | shape | dtype | content |
|---|---|---|---|
| qweight | [in * bits / 32, out] | int32 | codes, a dense bit stream along the input |
| qzeros | [groups, out * bits / 32] | int32 | zeros, a stream along the output |
| scales | [groups, out] | float16 | scales |
| g_idx | [in] | int32 | group of each input: ``i // group_size``, unless the grid has an order of its own |

Version 1 stores zero - 1, which a zero of 0 would wrap; a checkpoint that has one is written as version 2
(``checkpoint_format: gptq_v2``), which stores the zero itself.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quantforge import __version__
from quantforge.formats import CheckpointFacts, Format, SiteShape, as_float16, ragged, sites_by_spec
from quantforge.numerics.bits import pack_codes, period
from quantforge.patterns import FUSED, covering
from quantforge.quantized import QuantizedWeight
from quantforge.spec import QuantSpec


def problems(specs: Mapping[str, QuantSpec], sites: list[SiteShape]) -> list[str]:
    """Sites whose packed rows (in_features) or packed zeros (out_features) do not fill whole 32-bit words."""
    found = []
    for spec, own in sites_by_spec(specs, sites).items():
        multiple, _ = period(spec.bits)
        for which in ("in_features", "out_features"):
            found += ragged("gptq", which, spec.bits, multiple, own)
    return found


def encode(name: str, weight: QuantizedWeight, facts: CheckpointFacts) -> dict[str, torch.Tensor]:
    """The tensors of one site, by checkpoint key. Raises NumericsError for scales that float16 cannot hold exactly."""
    spec = weight.spec
    zero = weight.zero
    if not facts.has_zero_zero:
        if not bool(zero.all()):
            raise ValueError(f"{name}: a zero of 0 in a checkpoint said to have none; gptq version 1 cannot hold it")
        zero = zero - 1
    group_index = weight.group_index
    if group_index is None:
        group_index = torch.arange(weight.in_features) // (spec.group_size or weight.in_features)
    return {
        f"{name}.qweight": pack_codes(weight.codes, spec.bits, dim=1).t().contiguous(),
        f"{name}.qzeros": pack_codes(zero, spec.bits, dim=0).t().contiguous(),
        f"{name}.scales": as_float16(weight.scale, name).t().contiguous(),
        f"{name}.g_idx": group_index.to(torch.int32),
    }


def config(facts: CheckpointFacts) -> dict[str, Any]:
    """The same for config.json and quantize_config.json; ``dynamic`` when not all modules but a head are alike.

    The commonest grid is that of the whole, and ``+:`` rules give the sites of others theirs. ``-:`` rules name what is
    kept. GPTQModel, vLLM and SGLang take the first rule that `re.match` finds for a module, under its fused name too.

    Keys that tell how the codes were found (``damp_percent``, ``true_sequential``, ``static_groups``) are left out:
    loaders do without them, and a format does not know the method.
    """
    grids = facts.by_spec()
    first, *others = grids
    quantized = [name for names in grids.values() for name in names]
    grid = _grid(first)
    settings: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": grid["bits"],
        "group_size": grid["group_size"],
        "desc_act": facts.act_order,
        "sym": grid["sym"],
        "lm_head": any(_is_head(name) for name in quantized),
        "checkpoint_format": "gptq_v2" if facts.has_zero_zero else "gptq",
        "meta": {"quantizer": [f"quantforge:{__version__}"]},
    }
    kept = [name for name in facts.kept if not _is_head(name)]
    dynamic: dict[str, Any] = {f"-:{rule}": {} for rule in _rules(kept, quantized)}
    for spec in others:
        own = _with_fused(grids[spec])
        rest = _with_fused([*(name for name in quantized if name not in own), *facts.kept])
        rules = covering([name for name in own if name not in rest], rest)
        dynamic |= {f"+:{rule}": _grid(spec) for rule in rules}
    if dynamic:
        settings["dynamic"] = dynamic
    return settings


def _grid(spec: QuantSpec) -> dict[str, Any]:
    return {
        "bits": spec.bits,
        "group_size": -1 if spec.group_size is None else spec.group_size,
        "sym": spec.symmetric,
    }


def side_files(facts: CheckpointFacts) -> dict[str, dict[str, Any]]:
    """quantize_config.json, which older loaders read instead of config.json."""
    return {"quantize_config.json": config(facts)}


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def _rules(kept: Iterable[str], quantized: Iterable[str]) -> list[str]:
    """Regular expressions that match all `kept` module names, also as servers fuse them, and none of the `quantized`.

    Names that differ in numbers only share one expression where that catches no quantized module.
    """
    taken = _with_fused(quantized)
    lines = "\n".join(taken)
    safe: dict[str, bool] = {}
    rules: dict[str, None] = {}
    for name in _with_fused(kept):
        if name in taken:
            continue  # a fused module of which some parts are quantized
        exact = f"^{re.escape(name)}$"
        general = re.sub(r"(?<=\.)\d+(?=\\\.|\$)", r"\\d+", exact)
        if general not in safe:
            safe[general] = re.search(general, lines, re.MULTILINE) is None
        rules[general if safe[general] else exact] = None
    return list(rules)


def _with_fused(names: Iterable[str]) -> dict[str, None]:
    """`names`, the fused modules all of whose parts are among them, and the containers of their experts, in order."""
    known = dict.fromkeys(names)
    for name in list(known):
        parent, dot, leaf = name.rpartition(".")
        for fused, parts in FUSED.items():
            if leaf == parts[0] and all(f"{parent}{dot}{part}" in known for part in parts):
                known[f"{parent}{dot}{fused}"] = None
        known[re.sub(r"(\.experts)\.\d+\..*", r"\1", name)] = None
    return known


FORMAT = Format(
    name="gptq",
    summary="GPTQ v1, or v2 where a zero is 0: vLLM, SGLang, GPTQModel, transformers",
    problems=problems,
    encode=encode,
    config=config,
    side_files=side_files,
    scale_dtype="float16",
    group_index=True,
)
