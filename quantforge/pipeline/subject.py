"""What servers are asked about: a planned export, or a checkpoint that exists, from its config and headers alone."""

import re
from collections import Counter
from collections.abc import Mapping

from quantforge.contracts import SiteGrid, Subject
from quantforge.errors import SourceError
from quantforge.formats import CheckpointFacts, load_format
from quantforge.formats.gguf.blocks import BLOCK, block_type
from quantforge.model.gguf_file import GgufCheckpoint
from quantforge.model.packed import PackedCheckpoint, quantization_config
from quantforge.model.shards import DTYPES, TensorInfo
from quantforge.model.source import Checkpoint, TensorSource
from quantforge.pipeline.plan import Plan
from quantforge.readers import Scheme
from quantforge.spec import QuantSpec

_LAYER = re.compile(r"\.\d+\.")
_HEADS = ("lm_head", "embed_out")
_SHORT = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


def facts_of(plan: Plan, *, has_zero_zero: bool = False) -> CheckpointFacts:
    """What the config of an export depends on; whether a zero is 0 is known when all sites are solved."""
    return CheckpointFacts(
        specs=plan.specs,
        kept=plan.kept_linears,
        has_zero_zero=has_zero_zero,
        modules={site.name: site.module for site in plan.sites if site.module != site.name},
        activations=plan.activations,
        kv_cache=plan.kv_cache,
    )


def planned_subject(plan: Plan, format_name: str, tensor_parallel: int = 1) -> Subject:
    """The export that `plan` will write in one format. The bits of a plan with a budget must be settled."""
    chosen = load_format(format_name)
    settings = chosen.config(facts_of(plan))
    activation_bits = None if plan.activations is None else plan.activations.bits
    sites = {
        site.name: SiteGrid(
            out_features=site.out_features,
            in_features=site.in_features,
            bits=spec.bits,
            group_size=spec.group_size if chosen.container is None else BLOCK,
            symmetric=spec.symmetric,
            variant=_variant(format_name, settings, spec),
            activation_bits=activation_bits,
        )
        for site in plan.sites
        for spec in [plan.specs[site.name]]
    }
    return Subject(
        config={**plan.checkpoint.config, "quantization_config": settings},
        quant_method=str(settings.get("quant_method", format_name)),
        sites=sites,
        kept=plan.kept_linears,
        scale_dtype=chosen.scale_dtype or plan.spec.scale_dtype,
        tensor_parallel=tensor_parallel,
    )


def subject_of(source: TensorSource, tensor_parallel: int = 1) -> Subject:
    """A checkpoint that exists, whatever it is; see `model.packed.open_any`."""
    if isinstance(source, PackedCheckpoint):
        return checkpoint_subject(source, tensor_parallel)
    if isinstance(source, GgufCheckpoint):
        return gguf_subject(source, tensor_parallel)
    assert isinstance(source, Checkpoint)
    return float_subject(source, tensor_parallel)


def float_subject(checkpoint: Checkpoint, tensor_parallel: int = 1) -> Subject:
    """A checkpoint that is not quantized."""
    return Subject(checkpoint.config, None, {}, _kept(checkpoint, {}), None, tensor_parallel)


def checkpoint_subject(source: PackedCheckpoint, tensor_parallel: int = 1) -> Subject:
    """A quantized checkpoint, ours or another tool's; SourceError naming a site whose tensors have no 2-D shape."""
    checkpoint = source.checkpoint
    settings = quantization_config(checkpoint) or {}
    sites = {}
    scale_dtypes: Counter[str] = Counter()
    for name, keys in source.sites.items():
        parts = {suffix: checkpoint.tensors[key] for suffix, key in keys.items()}
        scheme = source.schemes[name]
        out_features, in_features = _shape(name, parts, scheme, str(settings.get("quant_method")))
        sites[name] = SiteGrid(
            out_features=out_features,
            in_features=in_features,
            bits=scheme.bits,
            group_size=scheme.group_size,
            symmetric=scheme.symmetric,
            variant=scheme.checkpoint_format,
            activation_bits=None if scheme.activations is None else scheme.activations.bits,
            act_order="weight_g_idx" in parts or ("g_idx" in parts and settings.get("desc_act") is True),
        )
        scale_dtypes.update(
            _SHORT.get(parts[s].dtype, parts[s].dtype) for s in ("scales", "weight_scale") if s in parts
        )
    return Subject(
        config=checkpoint.config,
        quant_method=str(settings.get("quant_method")),
        sites=sites,
        kept=_kept(checkpoint, source.sites),
        scale_dtype=scale_dtypes.most_common(1)[0][0] if scale_dtypes else None,
        tensor_parallel=tensor_parallel,
    )


def gguf_subject(source: GgufCheckpoint, tensor_parallel: int = 1) -> Subject:
    """A GGUF file beside a config.json; every block is a group, types whose name ends in 1 have minima."""
    sites = {}
    for key, tensor in source.tensors.items():
        if source.is_packed(key) and len(tensor.shape) == 2:
            bits, symmetric = int(re.sub(r"\D.*", "", tensor.kind.lstrip("ITQ")) or 0), not tensor.kind.endswith("_1")
            sites[key.removesuffix(".weight")] = SiteGrid(*tensor.shape, bits, BLOCK, symmetric, tensor.kind)
    kept = [key.removesuffix(".weight") for key, tensor in source.tensors.items() if len(tensor.shape) == 2]
    inside = tuple(name for name in kept if name not in sites and (_LAYER.search(name) or name in _HEADS))
    return Subject(source.config, "gguf", sites, inside, "float16", tensor_parallel)


def _variant(format_name: str, settings: Mapping[str, object], spec: QuantSpec) -> str:
    """The layout of one site, in the words of `contracts.SiteGrid`."""
    if load_format(format_name).container is not None:
        return block_type(spec) or spec.label()
    named = next((settings[key] for key in ("checkpoint_format", "format", "version") if key in settings), format_name)
    return str(named)


def _shape(name: str, parts: Mapping[str, TensorInfo], scheme: Scheme, quant_method: str) -> tuple[int, int]:
    """[out, in] of a site from the shapes of its packed tensors."""
    packed = next((parts[suffix] for suffix in ("qweight", "weight_packed", "weight") if suffix in parts), None)
    if packed is None or len(packed.shape) != 2:
        found = None if packed is None else list(packed.shape)
        raise SourceError(f"{name}: packed weights have shape {found}, expected two dims; present: {', '.join(parts)}")
    rows, columns = packed.shape
    if "qweight" in parts and quant_method == "awq":
        return columns * 32 // scheme.bits, rows
    if "qweight" in parts:
        index = parts.get("g_idx")
        return columns, rows * 32 // scheme.bits if index is None or len(index.shape) != 1 else index.shape[0]
    if "weight_packed" not in parts:
        return rows, columns
    room = columns * 32 // scheme.bits  # the last word may have codes to spare
    scale = parts.get("weight_scale")
    if scheme.group_size is not None and scale is not None and len(scale.shape) == 2:
        room = min(room, scale.shape[1] * scheme.group_size)
    return rows, room


def _kept(checkpoint: Checkpoint, sites: Mapping[str, object]) -> tuple[str, ...]:
    """Matrices of layers that are stored in floating point, and the output head."""
    names = [
        key.removesuffix(".weight")
        for key, info in checkpoint.tensors.items()
        if key.endswith(".weight") and len(info.shape) == 2 and DTYPES[info.dtype].is_floating_point
    ]
    head = tuple(name for name in names if name.rpartition(".")[2] in _HEADS)
    return tuple(name for name in names if _LAYER.search(name) and name not in sites) + head
