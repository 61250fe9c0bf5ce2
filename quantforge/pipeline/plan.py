"""What a run will do, decided from config.json and tensor headers before any weight is read; every problem at once."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from quantforge.errors import PlanError, UsageError
from quantforge.formats import load_format
from quantforge.methods import Method, OptionValue
from quantforge.model.outline import is_outline
from quantforge.model.packed import quantization_config
from quantforge.model.sites import EXPERT, LinearSite, ModelLayout
from quantforge.model.source import Checkpoint, TensorSource, config_dtype, open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline.budget import Unit, plan_units
from quantforge.pipeline.bundle import bundle_problems
from quantforge.pipeline.cache import cache_problems, scale_bytes
from quantforge.pipeline.disk import plan_weighing
from quantforge.pipeline.grids import choose_grids, split_fused
from quantforge.pipeline.method import Chosen, choose_method, refuse_floating_inputs
from quantforge.pipeline.obstacles import container_problems, misfits, too_large_to_tune, untunable
from quantforge.pipeline.stored import site_bytes
from quantforge.recipe import Recipe, default_output
from quantforge.spec import ActivationSpec, KvCacheSpec, QuantSpec, ScaleDtype, label_of
from quantforge.transforms import Transform


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything `run.quantize` needs.

    Attributes:
        streamed: the model's skeleton over its checkpoint; no weights are loaded.
        spec: the recipe's own grid.
        specs: the grid of each site, by its name; where `units` have a choice, its bits are not settled yet.
        units: with a budget, the sets of sites that get the same bits; else none.
        activations: the grid of the sites' inputs, None when they stay in floating point.
        transforms: applied to each layer, in order, before its sites are solved.
        sites: the sites to quantize.
        kept: parameter -> why it stays in floating point.
        notes: what was decided for the user and should be announced; `warnings` are those that deserve attention.
        scratch_bytes: temporary disk for weighing calibration tokens, at most; 0 when that is not, or no longer, done.
        kv_cache: the grid of cached keys and values, for which there will be scales; None without them.
    """

    checkpoint: Checkpoint
    streamed: StreamedModel
    spec: QuantSpec
    specs: Mapping[str, QuantSpec]
    activations: ActivationSpec | None
    solver: Method
    options: dict[str, OptionValue]
    formats: tuple[str, ...]
    output: Path
    sites: tuple[LinearSite, ...]
    kept: dict[str, str]
    kept_linears: tuple[str, ...]
    notes: tuple[str, ...]
    transforms: tuple[Transform, ...] = ()
    units: tuple[Unit, ...] = ()
    scratch_bytes: int = 0
    kv_cache: KvCacheSpec | None = None

    @property
    def needs_gram(self) -> bool:
        """Whether the inputs of the sites must be observed."""
        return bool(self.transforms) or self.solver.wants_gram(self.options)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(note for note in self.notes if note.startswith("warning:"))

    @property
    def method(self) -> str:
        """``awq+gptq``: transforms, then the solver."""
        return Chosen(self.transforms, self.solver, self.options).label

    @property
    def model_type(self) -> str:
        return str(self.checkpoint.config.get("model_type", "unknown"))

    @property
    def layers(self) -> int:
        return self.streamed.layout.layers

    @property
    def source_bytes(self) -> int:
        return self.checkpoint.total_bytes

    @property
    def weights(self) -> int:
        """Weights that will be quantized."""
        return sum(site.out_features * site.in_features for site in self.sites)

    @property
    def settled(self) -> bool:
        """False while bits are still to be chosen for a budget; estimates of sizes then mean nothing."""
        return all(len(unit.bits) == 1 for unit in self.units)

    @property
    def label(self) -> str:
        """All grids in words, with the number of sites of each when there are several."""
        if not self.settled:
            candidates = ", ".join(map(str, sorted({bits for unit in self.units for bits in unit.bits})))
            return f"bits to be chosen from {candidates}, {self.spec.label().partition(', ')[2]}"
        return label_of(self.specs.values(), self.activations)

    @property
    def bits_per_weight(self) -> float:
        """Mean stored bits of a quantized weight, scales and zeros included."""
        return sum(self._stored_bits(site) for site in self.sites) / max(1, self.weights)

    def _stored_bits(self, site: LinearSite) -> float:
        """Of one site, in the largest export."""
        spec = self.specs[site.name]
        containers = [load_format(name).container for name in self.formats]
        own = [spec.bits_per_weight(site.in_features) if c is None else c.bits_per_weight(spec) for c in containers]
        return max(own) * site.out_features * site.in_features

    @property
    def rest_bytes(self) -> int:
        """Bytes of the tensors that are not quantized, and of the scales of a cache."""
        return _rest_bytes(self.checkpoint, self.sites) + scale_bytes(self.streamed.text_config, self.kv_cache)

    @property
    def estimated_bytes(self) -> int:
        """Tensor bytes of one export, of the largest when there are several formats."""
        return max(map(self.export_bytes, self.formats))

    def export_bytes(self, format_name: str) -> int:
        """Tensor bytes of the export in one format: what it makes of quantized sites, everything else as it is."""
        return self.rest_bytes + sum(self.site_bytes(format_name, site) for site in self.sites)

    def site_bytes(self, format_name: str, site: LinearSite) -> int:
        """Bytes of the tensors that hold a site in one format."""
        spec = self.specs[site.name]
        return site_bytes(load_format(format_name), spec, site.out_features, site.in_features, self.activations)

    def sites_of(self, layer: int) -> dict[str, LinearSite]:
        """The sites of one layer, by module path."""
        return {site.module: site for site in self.sites if site.layer == layer}

    def modules_of(self, layer: int) -> dict[str, nn.Module]:
        """Their modules, by path."""
        return {name: self.streamed.model.get_submodule(name) for name in self.sites_of(layer)}

    def output_of(self, format_name: str) -> Path:
        """Where an export goes: the output directory itself, or with several formats a directory each inside it."""
        return self.output if len(self.formats) == 1 else self.output / format_name

    def to_json(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "method": self.method,
            "transforms": [transform.name for transform in self.transforms],
            "options": self.options,
            "spec": self.label,
            "bits": self.spec.bits,
            "group_size": self.spec.group_size,
            "symmetric": self.spec.symmetric,
            "scale_dtype": self.spec.scale_dtype,
            "activation_bits": None if self.activations is None else self.activations.bits,
            "kv_cache": None if self.kv_cache is None else self.kv_cache.label(),
            "formats": list(self.formats),
            "output": str(self.output),
            "layers": self.layers,
            "sites": [
                {
                    "name": site.name,
                    "layer": site.layer,
                    "out_features": site.out_features,
                    "in_features": site.in_features,
                    "bits": self.specs[site.name].bits if self.settled else None,
                    "group_size": self.specs[site.name].group_size,
                    "symmetric": self.specs[site.name].symmetric,
                }
                for site in self.sites
            ],
            "units": [
                {"name": unit.name, "sites": [site.name for site in unit.sites], "bits": list(unit.bits)}
                for unit in self.units
            ],
            "kept": self.kept,
            "notes": list(self.notes),
            "scratch_bytes": self.scratch_bytes,
            "source_bytes": self.source_bytes,
            "estimated_bytes": self.estimated_bytes if self.settled else None,
            "bits_per_weight": self.bits_per_weight if self.settled else None,
        }


def make_plan(recipe: Recipe, streamed: StreamedModel | None = None, *, elsewhere: bool = False) -> Plan:
    """Decide everything that can be decided without weights; raises PlanError with every problem found.

    `streamed` is that of another plan for the same model, device and permissions, which saves building it again. With
    `elsewhere` the run may be another machine's: too little memory or disk here is a remark.
    """
    chosen = choose_method(recipe)
    refuse_floating_inputs(chosen, recipe.activation_bits)
    formats = tuple(load_format(name) for name in recipe.formats)
    if len(set(recipe.formats)) != len(recipe.formats):
        raise UsageError(f"a format is given twice: {', '.join(recipe.formats)}")
    checkpoint = streamed.source if streamed is not None else None
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(recipe.model, allow_pickle=recipe.allow_pickle)
    if (quantized := quantization_config(checkpoint)) is not None:
        method = quantized.get("quant_method", "unknown")
        raise PlanError([f"{checkpoint.path} is already quantized ({method}); start from the original checkpoint"])
    device = choose_device(recipe.device)
    streamed = streamed or StreamedModel(checkpoint, device, trust_remote_code=recipe.trust_remote_code)
    layout = streamed.layout

    problems = list(misfits(streamed, checkpoint))
    notes: list[str] = []
    minima = [target.name for target in formats if target.minima]
    grids = choose_grids(recipe, layout, _choose_scale_dtype(recipe, checkpoint), problems, notes, minima)
    activations = None if recipe.activation_bits is None else ActivationSpec(recipe.activation_bits)
    if activations is not None:
        unfit = [target.name for target in formats if not target.activations]
        problems += [f"--format {name} cannot hold quantized activations; use compressed-tensors" for name in unfit]
    kv_cache = KvCacheSpec.named(recipe.kv_cache)
    problems += cache_problems(recipe, streamed, formats)
    problems += bundle_problems(recipe.bundle_kernels, formats)
    checkpoint = replace(
        checkpoint, tensors={k: v for k, v in checkpoint.tensors.items() if k not in streamed.duplicates}
    )
    short: list[str] = []  # of what this machine has: memory, disk, files beside a config
    (short if is_outline(checkpoint) else problems).extend(container_problems(formats, checkpoint, grids))
    units: tuple[Unit, ...] = ()
    if not problems and recipe.budget is not None:
        rest_bytes = _rest_bytes(checkpoint, grids.sites) + scale_bytes(streamed.text_config, kv_cache)
        units = plan_units(recipe, grids.sites, grids.specs, formats, rest_bytes, problems, notes)
    elif not problems:
        shapes = [site.shape for site in grids.sites]
        for target in formats:
            problems += [f"{target.name}: {problem}" for problem in target.problems(grids.specs, shapes)]
    if recipe.tune_epochs:
        problems += untunable(activations)
        short += too_large_to_tune(streamed, grids, recipe.calibration.seqlen)
    output = Path(recipe.output or default_output(recipe, grids.base.group_size))
    weighs = recipe.token_weights == "gradient" and (chosen.transforms or chosen.solver.wants_gram(chosen.options))
    scratch_bytes = plan_weighing(recipe, streamed, output, short, notes) if weighs else 0
    if elsewhere:
        notes += [f"warning: on this machine: {problem}" for problem in short]
    else:
        problems += short
    if problems:
        raise PlanError(problems)
    if device != "cpu":
        notes.append(f"computing on {device}")
    _note_unusual(layout, notes)
    _note_unused(streamed, checkpoint, notes)
    _note_ties(streamed, notes)
    left = [site for site, _ in grids.left]
    notes += split_fused(grids.sites, left)
    several = set(grids.specs.values())
    if "compressed-tensors" in recipe.formats and len(several) > 1 and not all(spec.symmetric for spec in several):
        notes.append(
            "warning: transformers (with compressed-tensors 0.20.1) cannot open a compressed-tensors checkpoint of "
            "several grids when one of them is asymmetric; --sym can be opened"
        )
    if "compressed-tensors" in recipe.formats and EXPERT in layout.kept.values():
        notes.append(
            "warning: transformers cannot open a compressed-tensors checkpoint whose experts stay in floating point; "
            "--format gptq can be opened"
        )
    return Plan(
        checkpoint=checkpoint,
        streamed=streamed,
        spec=grids.base,
        specs=grids.specs,
        activations=activations,
        solver=chosen.solver,
        options=chosen.options,
        formats=recipe.formats,
        output=output,
        sites=grids.sites,
        kept=layout.kept | {f"{site.module}.weight": reason for site, reason in grids.left},
        kept_linears=tuple(
            dict.fromkeys([*layout.kept_linears, *(name for site in left for name in (site.name, site.module))])
        ),
        notes=tuple(notes),
        transforms=chosen.transforms,
        units=units,
        scratch_bytes=scratch_bytes,
        kv_cache=kv_cache,
    )


def _rest_bytes(checkpoint: Checkpoint, sites: Iterable[LinearSite]) -> int:
    replaced = {f"{site.name}.weight" for site in sites}
    return sum(info.total_bytes for key, info in checkpoint.tensors.items() if key not in replaced)


def choose_device(name: str) -> str:
    """``auto`` becomes cuda or mps when torch can use one, else cpu; a device that is not there is a UsageError."""
    import torch

    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if available[device])
    if not available[name]:
        raise UsageError(f"--device {name}: torch {torch.__version__} sees no such device; use --device cpu or auto")
    return name


def _choose_scale_dtype(recipe: Recipe, checkpoint: Checkpoint) -> ScaleDtype:
    return scale_dtype_of(checkpoint) if recipe.scale_dtype == "auto" else recipe.scale_dtype


def scale_dtype_of(checkpoint: TensorSource) -> ScaleDtype:
    """The model's own 16-bit dtype; float32 models are served in float16, so float16 for them."""
    return "bfloat16" if config_dtype(checkpoint.config) == "bfloat16" else "float16"


def _note_unusual(layout: ModelLayout, notes: list[str]) -> None:
    reasons = Counter(layout.kept.values())
    for reason, count in sorted(reasons.items()):
        if reason not in ("embedding", "output head"):
            notes.append(f"{count} tensors kept as they are: {reason}")


def _note_ties(streamed: StreamedModel, notes: list[str]) -> None:
    if streamed.duplicates:
        notes.append(f"{', '.join(streamed.duplicates)} repeats the tensor it is tied to and is written once")
    if streamed.untied:
        notes.append(
            f"warning: config.json ties {', '.join(streamed.untied)}, but the checkpoint holds other values for it; "
            "both are kept, and servers differ in which one they use"
        )


def _note_unused(streamed: StreamedModel, checkpoint: Checkpoint, notes: list[str]) -> None:
    """Tensors of no parameter may be rightly there (a draft head), or a sign of a config with too few layers."""
    used = set(streamed.keys.plain.values()).union(*streamed.keys.converted.values())
    unused = [key for key in checkpoint.tensors if key not in used]
    if unused:
        notes.append(
            f"{len(unused)} tensors belong to no parameter of the model config.json describes and are copied as they "
            f"are: {', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}"
        )
