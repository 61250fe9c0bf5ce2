"""What the contracts share: matrices as a server holds them, and the words of its refusals.

Servers put q, k and v of a layer side by side into one matrix, and gate and up; with tensor parallelism a matrix is
split by its outputs (column-parallel) or by its inputs (row-parallel), by the name of its module.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantforge.contracts import Problem, SiteGrid, Subject
from quantforge.patterns import FUSED

ROW_PARALLEL = frozenset(
    ("o_proj", "down_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "c_proj", "w2", "wo", "linear_out")
)
REPLICATED = frozenset(("q_a_proj", "kv_a_proj_with_mqa", "kv_a_proj"))
"""Down-projections of latent attention, which every device holds whole."""

HEADS = ("lm_head", "embed_out")
ROUTERS = ("gate", "router", "shared_expert_gate")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
SHOWN = 4
FP8 = "8-bit float, symmetric"
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Matrix:
    """What one multiplication of a server works on, a site or several side by side.

    Attributes:
        name: the site's name, or that of the fused module.
        parts: the sites it consists of.
        grid: their grid.
        out_features, in_features: of the whole matrix.
        out_local, in_local: on each device; rounded down where the split is not even.
        split: by what it is split over devices.
    """

    name: str
    parts: tuple[str, ...]
    grid: SiteGrid
    out_features: int
    in_features: int
    out_local: int
    in_local: int
    split: Literal["outputs", "inputs", "none"]

    @property
    def groups_fit(self) -> bool:
        """Whether groups tile the inputs of each device."""
        group_size = self.grid.group_size
        return group_size is None or self.in_local % group_size == 0

    def label(self) -> str:
        local = "" if self.split == "none" else f", [{self.out_local}, {self.in_local}] on each device"
        return f"[{self.out_features}, {self.in_features}]{local}, {label_of(self.grid)}"


def label_of(grid: SiteGrid) -> str:
    """``4 bits, group 64, symmetric``, with what is out of the ordinary."""
    group = "per channel" if grid.group_size is None else f"group {grid.group_size}"
    extra = "" if grid.activation_bits is None else f", {grid.activation_bits}-bit activations"
    order = ", act-order" if grid.act_order else ""
    return f"{grid.bits} bits, {group}, {'symmetric' if grid.symmetric else 'asymmetric'}{extra}{order}"


# ------------------------------------------------------------------------------------------------ matrices


def matrices(subject: Subject) -> list[Matrix]:
    """The quantized matrices as vLLM, SGLang and TGI hold them: fused where all parts are there and alike."""
    found: list[Matrix] = []
    done: set[str] = set()
    for name in subject.sites:
        if name in done:
            continue
        parent, dot, leaf = name.rpartition(".")
        fused, leaves = next(((key, parts) for key, parts in FUSED.items() if leaf in parts), (leaf, (leaf,)))
        parts = tuple(f"{parent}{dot}{part}" for part in leaves)
        grids = [subject.sites.get(part) for part in parts]
        if len({None if grid is None else label_of(grid) for grid in grids}) > 1:
            fused, parts = leaf, (name,)
        done.update(parts)
        found.append(_matrix(f"{parent}{dot}{fused}", parts, subject))
    return found


def _matrix(name: str, parts: tuple[str, ...], subject: Subject) -> Matrix:
    grids = [subject.sites[part] for part in parts]
    out_features, in_features = sum(grid.out_features for grid in grids), grids[0].in_features
    devices = subject.tensor_parallel
    leaf = parts[0].rpartition(".")[2]
    out_local, in_local = out_features, in_features
    split: Literal["outputs", "inputs", "none"] = "none"
    if devices > 1 and leaf not in REPLICATED:
        split = "inputs" if leaf in ROW_PARALLEL else "outputs"
    if split == "inputs":
        in_local = in_features // devices
    elif split == "outputs":
        out_local = sum(_outputs(part, subject) for part in parts)
    return Matrix(name, parts, grids[0], out_features, in_features, out_local, in_local, split)


def _outputs(part: str, subject: Subject) -> int:
    """Outputs of a column-parallel site on each device; key and value heads are repeated where devices outnumber."""
    out_features, devices = subject.sites[part].out_features, subject.tensor_parallel
    heads = kv_heads(subject)
    if part.endswith(("k_proj", "v_proj")) and heads and devices > heads and out_features % heads == 0:
        return out_features // heads
    return out_features // devices


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def kv_heads(subject: Subject) -> int | None:
    """Key and value heads of a layer, None where the config does not say."""
    config = text_config(subject.config)
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    return heads if isinstance(heads, int) else None


# ------------------------------------------------------------------------------------------------ refusals


def refusals(found: Iterable[Matrix], unfit: Callable[[Matrix], bool], text: str, source: str) -> Iterator[Problem]:
    """One problem about all matrices that are `unfit`, if any: the text, then which they are."""
    offending = [matrix for matrix in found if unfit(matrix)]
    if offending:
        yield Problem(f"{text}: {listed(offending)}", source)


def listed(found: Iterable[Matrix]) -> str:
    """Matrices with their shapes and grids, those that differ in the layer only counted together."""
    kinds: dict[tuple[str, str], int] = {}
    for matrix in found:
        kind = (_LAYER.sub("*", matrix.name), matrix.label())
        kinds[kind] = kinds.get(kind, 0) + 1
    return _shown(f"{name} {label} ({count}x)" for (name, label), count in kinds.items())


def names_listed(names: Iterable[str]) -> str:
    """Site names, those that differ in the layer only counted together."""
    kinds: dict[str, int] = {}
    for name in names:
        kind = _LAYER.sub("*", name)
        kinds[kind] = kinds.get(kind, 0) + 1
    return _shown(f"{name} ({count}x)" for name, count in kinds.items())


def _shown(lines: Iterable[str]) -> str:
    every = list(lines)
    more = f"; and {len(every) - SHOWN} more kinds" if len(every) > SHOWN else ""
    return "; ".join(every[:SHOWN]) + more


def missing_keys(subject: Subject, needed: Iterable[tuple[str, ...]], source: str) -> Iterator[Problem]:
    """A problem for all keys of quantization_config that are not there; each entry holds names that are as good."""
    settings = settings_of(subject)
    absent = [" or ".join(names) for names in needed if not any(name in settings for name in names)]
    if absent:
        yield Problem(f"quantization_config has no {', '.join(absent)}: add what the tensors were made with", source)


def settings_of(subject: Subject) -> Mapping[str, Any]:
    """quantization_config, at the top or where multimodal models keep it."""
    for config in (subject.config, text_config(subject.config)):
        found = config.get("quantization_config")
        if isinstance(found, Mapping):
            return found
    return {}


@dataclass(frozen=True)
class CacheScheme:
    """What a config says of cached keys and values. Attributes: `grid` in words, ``8-bit float, symmetric``; the rest
    as compressed-tensors has it."""

    grid: str
    strategy: str
    dynamic: bool

    @property
    def is_fp8(self) -> bool:
        return self.grid == FP8

    def label(self) -> str:
        return f"{self.grid}, {self.strategy}, {'dynamic' if self.dynamic else 'static'}"


def cache_scheme(subject: Subject) -> CacheScheme | None:
    """``kv_cache_scheme`` with the library's defaults; None where the cache is left alone."""
    found = settings_of(subject).get("kv_cache_scheme")
    if not isinstance(found, Mapping):
        return None
    zeros = "symmetric" if found.get("symmetric", True) is True else "asymmetric"
    grid = f"{found.get('num_bits', 8)}-bit {found.get('type', 'int')}, {zeros}"
    return CacheScheme(grid, str(found.get("strategy") or "tensor"), bool(found.get("dynamic", False)))


def unequal_parts(subject: Subject, source: str) -> Iterator[Problem]:
    """Fused matrices whose parts differ in their grid, or of which some are quantized and some are not."""
    mixed: dict[str, list[str]] = {}
    split: dict[str, list[str]] = {}
    kept = set(subject.kept)
    for name in subject.sites:
        parent, dot, leaf = name.rpartition(".")
        leaves = next((parts for parts in FUSED.values() if leaf in parts), ())
        parts = [f"{parent}{dot}{part}" for part in leaves]
        present = {part: subject.sites[part] for part in parts if part in subject.sites}
        if name != next(iter(present), None):
            continue
        if len({label_of(grid) for grid in present.values()}) > 1:
            said = ", ".join(f"{part.rpartition('.')[2]} {label_of(grid)}" for part, grid in present.items())
            mixed.setdefault(said, []).append(f"{parent}{dot}" + "/".join(leaves))
        if left := [part for part in parts if part in kept]:
            said = f"{', '.join(part.rpartition('.')[2] for part in left)} in floating point"
            split.setdefault(said, []).append(f"{parent}{dot}" + "/".join(leaves))
    for said, names in mixed.items():
        yield Problem(f"fused matrices need one grid for all parts; {said} in {names_listed(names)}", source)
    for said, names in split.items():
        text = f"fused matrices are quantized whole or not at all; {said} in {names_listed(names)}: ignore all or none"
        yield Problem(text, source)


def unequal_experts(subject: Subject, source: str) -> Iterator[Problem]:
    """Experts of one layer that differ in their grid, or of which some are quantized and some are not."""
    layers: dict[str, set[str]] = {}
    for name, grid in subject.sites.items():
        if _EXPERT.search(name):
            layers.setdefault(_EXPERT.split(name)[0], set()).add(label_of(grid))
    for name in subject.kept:
        if _EXPERT.search(name) and _EXPERT.split(name)[0] in layers:
            layers[_EXPERT.split(name)[0]].add("floating point")
    wrong = {layer: said for layer, said in layers.items() if len(said) > 1}
    if wrong:
        said = " and ".join(sorted(next(iter(wrong.values()))))
        yield Problem(
            f"experts of one layer need one grid; {said} in {names_listed(f'{n}.experts' for n in wrong)}", source
        )


def uneven_split(subject: Subject, found: Iterable[Matrix], source: str) -> Iterator[Problem]:
    """What `tensor_parallel` devices cannot share evenly: attention heads, inputs, outputs."""
    devices = subject.tensor_parallel
    if devices == 1:
        return
    heads = text_config(subject.config).get("num_attention_heads")
    if isinstance(heads, int) and heads % devices:
        yield Problem(f"{heads} attention heads cannot be split over {devices} devices", source)
    shared = kv_heads(subject)
    if shared and max(shared, devices) % min(shared, devices):
        yield Problem(
            f"{shared} key and value heads can be neither split over nor repeated on {devices} devices", source
        )
    sizes = {"inputs": "in_features", "outputs": "out_features"}
    yield from refusals(
        found,
        lambda m: (
            m.split != "none"
            and len(m.parts) == 1
            and getattr(m, sizes[m.split]) % devices != 0
            and not m.name.endswith(("k_proj", "v_proj"))
        ),
        f"{devices} devices cannot split these evenly",
        source,
    )


def straddling(found: Iterable[Matrix], source: str) -> Iterator[Problem]:
    """Matrices whose groups do not tile the inputs that a device holds."""
    yield from refusals(
        found,
        lambda m: not m.groups_fit,
        "the group size must divide the inputs on each device; use a smaller group size, -1, or fewer devices",
        source,
    )


def packed_outer(subject: Subject, leaves: Iterable[str], source: str) -> Iterator[Problem]:
    """Embeddings or heads, by the last part of their name, that are quantized where only a float matrix is read."""
    packed = [name for name in subject.sites if name.rpartition(".")[2] in leaves]
    if packed:
        yield Problem(f"{names_listed(packed)} is quantized; it is read in floating point only: leave it alone", source)


def tied_head_notes(subject: Subject) -> Iterator[str]:
    """A quantized head of a model whose config says that the embedding is the head."""
    tied = text_config(subject.config).get("tie_word_embeddings", subject.config.get("tie_word_embeddings"))
    heads = [name for name in subject.sites if name.rpartition(".")[2] in HEADS]
    if tied is True and heads:
        yield f"tie_word_embeddings is true, so the quantized {', '.join(heads)} may be left unread"


def cast_scale_notes(subject: Subject) -> Iterator[str]:
    """Scales of packed weights that are stored wider than the server keeps them."""
    if subject.scale_dtype == "float32" and any(grid.variant != "int-quantized" for grid in subject.sites.values()):
        yield "scales are stored in float32 and kept in the model's 16-bit dtype: weights are rounded a second time"


def kept_inside(subject: Subject) -> list[str]:
    """Kept linear layers of decoder layers that a loader would take for quantized: no heads, routers or experts."""
    return [
        name
        for name in subject.kept
        if name.rpartition(".")[2] not in (*HEADS, *ROUTERS) and ".experts" not in name and _LAYER.search(name)
    ]


def grids_of(subject: Subject) -> set[str]:
    """The distinct grids, in words."""
    return {label_of(grid) for grid in subject.sites.values()}
