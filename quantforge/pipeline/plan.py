"""What a run will do, decided from config.json and tensor headers before any weight is read; every problem at once."""

import fnmatch
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantforge.errors import PlanError, UsageError
from quantforge.formats import SiteShape, load_format
from quantforge.methods import Method, OptionValue
from quantforge.model.packed import quantization_config
from quantforge.model.shards import DTYPES
from quantforge.model.sites import EXPERT, LinearSite, ModelLayout
from quantforge.model.source import Checkpoint, open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline.method import choose_method, refuse_floating_inputs
from quantforge.recipe import Recipe, default_output
from quantforge.spec import QuantSpec, ScaleDtype
from quantforge.transforms import Transform

GROUP_SIZES = (128, 64, 32)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
OFFERED_GROUP_SIZES = (256, 128, 96, 64, 48, 32, 16)
SHOWN_TENSORS = 20


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything `run.quantize` needs.

    Attributes:
        streamed: the model's skeleton over its checkpoint; no weights are loaded.
        transforms: applied to each layer, in order, before its sites are solved.
        sites: the sites to quantize, all with `spec`.
        kept: parameter -> why it stays in floating point.
        notes: what was decided for the user and should be announced; `warnings` are those that deserve attention.
    """

    checkpoint: Checkpoint
    streamed: StreamedModel
    spec: QuantSpec
    solver: Method
    options: dict[str, OptionValue]
    formats: tuple[str, ...]
    output: Path
    sites: tuple[LinearSite, ...]
    kept: dict[str, str]
    kept_linears: tuple[str, ...]
    notes: tuple[str, ...]
    transforms: tuple[Transform, ...] = ()
    activation_bits: int | None = None

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
        return "+".join([*(transform.name for transform in self.transforms), self.solver.name])

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
    def bits_per_weight(self) -> float:
        """Mean stored bits of a quantized weight, scales and zeros included."""
        return sum(
            self.spec.bits_per_weight(site.in_features) * site.out_features * site.in_features for site in self.sites
        ) / max(1, self.weights)

    @property
    def estimated_bytes(self) -> int:
        """Tensor bytes of one export: quantized sites at their stored bits, everything else as it is."""
        replaced = {f"{site.name}.weight" for site in self.sites}
        rest = sum(info.total_bytes for key, info in self.checkpoint.tensors.items() if key not in replaced)
        return rest + round(self.bits_per_weight * self.weights / 8)

    def output_of(self, format_name: str) -> Path:
        """Where an export goes: the output directory itself, or with several formats a directory each inside it."""
        return self.output if len(self.formats) == 1 else self.output / format_name

    def to_json(self) -> dict[str, Any]:
        return {
            "model_type": self.model_type,
            "method": self.method,
            "transforms": [transform.name for transform in self.transforms],
            "options": self.options,
            "spec": self.spec.label(),
            "bits": self.spec.bits,
            "group_size": self.spec.group_size,
            "symmetric": self.spec.symmetric,
            "scale_dtype": self.spec.scale_dtype,
            "formats": list(self.formats),
            "output": str(self.output),
            "layers": self.layers,
            "sites": [
                {"name": s.name, "layer": s.layer, "out_features": s.out_features, "in_features": s.in_features}
                for s in self.sites
            ],
            "kept": self.kept,
            "notes": list(self.notes),
            "source_bytes": self.source_bytes,
            "estimated_bytes": self.estimated_bytes,
            "bits_per_weight": self.bits_per_weight,
        }


def make_plan(recipe: Recipe) -> Plan:
    """Decide everything that can be decided without weights; raises PlanError with every problem found."""
    chosen = choose_method(recipe)
    refuse_floating_inputs(chosen, None)
    formats = tuple(load_format(name) for name in recipe.formats)
    if len(set(recipe.formats)) != len(recipe.formats):
        raise UsageError(f"a format is given twice: {', '.join(recipe.formats)}")
    checkpoint = open_checkpoint(recipe.model, allow_pickle=recipe.allow_pickle)
    if (quantized := quantization_config(checkpoint)) is not None:
        method = quantized.get("quant_method", "unknown")
        raise PlanError([f"{checkpoint.path} is already quantized ({method}); start from the original checkpoint"])
    device = choose_device(recipe.device)
    streamed = StreamedModel(checkpoint, device, trust_remote_code=recipe.trust_remote_code)
    layout = streamed.layout

    problems = list(_misfits(streamed, checkpoint))
    notes: list[str] = []
    sites, ignored = _apply_ignore(layout, recipe.ignore, problems)
    group_size = _choose_group_size(recipe.group_size, sites, problems, notes) if sites else None
    scale_dtype = _choose_scale_dtype(recipe, checkpoint, notes)
    spec = QuantSpec(recipe.bits, group_size, recipe.symmetric, scale_dtype)
    if not sites:
        problems.append(f"nothing to quantize: {len(layout.sites)} linear layers found, all of them ignored")
    if not problems:
        shapes = [SiteShape(s.name, s.out_features, s.in_features, s.kind) for s in sites]
        for target in formats:
            problems += [f"{target.name}: {problem}" for problem in target.problems(spec, shapes)]
    if problems:
        raise PlanError(problems)
    if device != "cpu":
        notes.append(f"computing on {device}")
    _note_unusual(layout, notes)
    _note_unused(streamed, checkpoint, notes)
    _note_ties(streamed, notes)
    notes += _split_fused(sites, ignored)
    if "compressed-tensors" in recipe.formats and EXPERT in layout.kept.values():
        notes.append(
            "warning: transformers cannot open a compressed-tensors checkpoint whose experts stay in floating point; "
            "--format gptq can be opened"
        )
    checkpoint = replace(
        checkpoint, tensors={k: v for k, v in checkpoint.tensors.items() if k not in streamed.duplicates}
    )
    return Plan(
        checkpoint=checkpoint,
        streamed=streamed,
        spec=spec,
        solver=chosen.solver,
        options=chosen.options,
        formats=recipe.formats,
        output=Path(recipe.output or default_output(recipe, group_size)),
        sites=tuple(sites),
        kept=layout.kept | {f"{site.module}.weight": "ignored by the recipe" for site in ignored},
        kept_linears=tuple(
            dict.fromkeys([*layout.kept_linears, *(name for site in ignored for name in (site.name, site.module))])
        ),
        notes=tuple(notes),
        transforms=chosen.transforms,
    )


def _misfits(streamed: StreamedModel, checkpoint: Checkpoint) -> Iterator[str]:
    """Tensors that are not what the model described by config.json needs."""
    state = streamed.model.state_dict()
    wrong = []
    for target, key in streamed.keys.plain.items():
        info, needed = checkpoint.tensors[key], state[target]
        if info.shape != tuple(needed.shape):
            wrong.append(f"  {key}: {list(info.shape)}, needed {list(needed.shape)}")
        elif needed.is_floating_point() and not DTYPES[info.dtype].is_floating_point:
            wrong.append(f"  {key}: {info.dtype}, needed a floating point dtype")
    aliases: dict[int, list[str]] = defaultdict(list)  # tied parameters are one object with several names
    for name, parameter in streamed.model.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    filled = streamed.keys.plain.keys() | streamed.keys.converted.keys()
    inside = f"{streamed.layout.stack}."  # the layers' own were looked for when the layout was read
    missing = [names[0] for names in aliases.values() if not names[0].startswith(inside) and not filled & set(names)]
    if missing:
        yield f"{checkpoint.path}: no tensor for {len(missing)} parameters: {', '.join(missing[:SHOWN_TENSORS])}"
    if wrong:
        more = [f"  ... and {len(wrong) - SHOWN_TENSORS} more"] if len(wrong) > SHOWN_TENSORS else []
        yield "\n".join(
            [f"{checkpoint.path}: {len(wrong)} tensors do not fit config.json", *wrong[:SHOWN_TENSORS], *more]
        )


def choose_device(name: str) -> str:
    """``auto`` becomes cuda or mps when torch can use one, else cpu; a device that is not there is a UsageError."""
    import torch

    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if available[device])
    if not available[name]:
        raise UsageError(f"--device {name}: torch {torch.__version__} sees no such device; use --device cpu or auto")
    return name


def matches(pattern: str, name: str) -> bool:
    """True when a site name fits a pattern: a shell pattern, or a regular expression after ``re:``."""
    if pattern.startswith("re:"):
        try:
            return re.search(pattern[3:], name) is not None
        except re.error as error:
            raise UsageError(f"--ignore {pattern}: not a regular expression: {error}") from error
    return fnmatch.fnmatchcase(name, pattern)


def _apply_ignore(
    layout: ModelLayout, patterns: Iterable[str], problems: list[str]
) -> tuple[list[LinearSite], list[LinearSite]]:
    ignored: set[str] = set()
    everything = [site.name for site in layout.sites] + list(layout.kept_linears)
    for pattern in patterns:
        found = {name for name in everything if matches(pattern, name)}
        if not found:
            problems.append(
                f"--ignore {pattern} matches no linear layer; names look like {everything[0] if everything else '-'}"
            )
        ignored |= found
    sites = [site for site in layout.sites if site.name not in ignored]
    return sites, [site for site in layout.sites if site.name in ignored]


def _choose_group_size(asked: int | str, sites: list[LinearSite], problems: list[str], notes: list[str]) -> int | None:
    """The group size in force; None is one scale a row. One that is given is obeyed or refused, never changed."""
    widths = Counter(site.in_features for site in sites)
    if asked == "auto":
        fitting = [size for size in GROUP_SIZES if all(width % size == 0 for width in widths)]
        if fitting:
            notes.append(f"group size {fitting[0]}: {_why_chosen(fitting[0], widths)}")
            return fitting[0]
        problems.append(
            f"no group size of {', '.join(map(str, GROUP_SIZES))} divides every site's input width "
            f"({', '.join(map(str, sorted(widths)))}). {_alternatives(widths)}"
        )
        return None
    size = int(asked)
    if size == -1:
        return None
    offending = [site for site in sites if site.in_features % size]
    if offending:
        lines = [f"  {line}" for line in _by_kind(offending)]
        problems.append(
            f"group size {size} does not divide the input width of {len(offending)} sites. {_alternatives(widths)}\n"
            + "\n".join(lines)
        )
    return size


def _by_kind(sites: list[LinearSite]) -> list[str]:
    """Sites with their input width, one line for all that differ in the layer only."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for site in sites:
        kind = site.name.replace(f".{site.layer}.", ".*.", 1)
        kinds.setdefault((kind, site.in_features), []).append(site.layer)
    return [
        f"{kind} ({len(layers)} layers, {layers[0]} to {layers[-1]}): {width} inputs"
        for (kind, width), layers in kinds.items()
    ]


def _why_chosen(size: int, widths: Counter[int]) -> str:
    larger = [s for s in GROUP_SIZES if s > size]
    if not larger:
        return "it divides every site's input width"
    blockers = sorted(width for width in widths if width % larger[-1])
    return f"{larger[-1]} does not divide an input width of {', '.join(map(str, blockers[:3]))}"


def _alternatives(widths: Counter[int]) -> str:
    fitting = [size for size in OFFERED_GROUP_SIZES if all(width % size == 0 for width in widths)]
    offers = "".join(f" --group-size {size}," for size in fitting)
    return f"These fit all sites:{offers} or --group-size -1 (one scale per output channel)."


def _choose_scale_dtype(recipe: Recipe, checkpoint: Checkpoint, notes: list[str]) -> ScaleDtype:
    """Scales in the model's own 16-bit dtype; float32 models are served in float16, so float16 for them."""
    if recipe.scale_dtype != "auto":
        return recipe.scale_dtype
    text = checkpoint.config.get("text_config")
    text = text if isinstance(text, dict) else {}
    dtype = next(
        (str(c[key]) for c in (checkpoint.config, text) for key in ("dtype", "torch_dtype") if c.get(key)), "float32"
    )
    return "bfloat16" if dtype == "bfloat16" else "float16"


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


def _split_fused(sites: list[LinearSite], ignored: list[LinearSite]) -> Iterator[str]:
    """Servers fuse some matrices and refuse a set of which only a part is quantized."""
    left = {site.name for site in ignored}
    for site in sites:
        parent, _, leaf = site.name.rpartition(".")
        for parts in FUSED:
            split = [part for part in parts if f"{parent}.{part}" in left]
            if leaf in parts and split:
                yield (
                    f"warning: {parent}.{split[0]} is ignored and {site.name} is not; vLLM and SGLang fuse "
                    f"{', '.join(parts)} and refuse such a checkpoint: ignore all of them or none"
                )
                return


def _note_unused(streamed: StreamedModel, checkpoint: Checkpoint, notes: list[str]) -> None:
    """Tensors of no parameter may be rightly there (a draft head), or a sign of a config with too few layers."""
    used = set(streamed.keys.plain.values()).union(*streamed.keys.converted.values())
    unused = [key for key in checkpoint.tensors if key not in used]
    if unused:
        notes.append(
            f"{len(unused)} tensors belong to no parameter of the model config.json describes and are copied as they "
            f"are: {', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}"
        )
