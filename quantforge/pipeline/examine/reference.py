"""A checkpoint against the float model it was made from: kept tensors byte for byte, sites by their distance.

Transforms such as AWQ and SmoothQuant change both, and leave what a layer computes as it was: columns of a site are
multiplied by what the norm before them, or the rows of the matrix before them, are divided by. Such pairs are looked
for, so that a folded scale is told apart from a weight that somebody changed.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from quantforge.errors import SourceError
from quantforge.model.shards import DTYPES
from quantforge.model.source import Checkpoint
from quantforge.pipeline.examine.files import Files
from quantforge.pipeline.examine.findings import Finding, error, refused, same_bytes, warning
from quantforge.readers import DecodedWeight, Scheme

FARTHEST = 5.0
"""How many times the error of rounding to nearest a site may be from the original."""

LIMIT = 1.0
"""And no further than this: a matrix of zeros is as far, an unrelated one 1.4."""

ALIKE = 0.05
"""Median deviation up to which two vectors of scales are the same."""

_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class _Fit:
    """Scales [in] of columns and [out] of rows that bring the original closest to a site."""

    columns: torch.Tensor
    rows: torch.Tensor


class Comparison:
    """Gathers what differs from `reference`; give it every site, then the rest.

    Attributes:
        errors: ``|w - original| / |original|`` of each site; of one that was folded, with its scales undone.
    """

    def __init__(self, reference: Checkpoint) -> None:
        self.reference = reference
        self.errors: dict[str, float] = {}
        self._fits: dict[str, dict[str, _Fit]] = defaultdict(dict)  # layer -> site -> its fit
        self._far: dict[str, tuple[str, float]] = {}  # sites that are close to the original only when scaled

    def site(self, name: str, scheme: Scheme, decoded: DecodedWeight) -> Iterator[Finding]:
        """Findings of one decoded site; whether a far one was folded is decided by `rest`."""
        key = f"{name}.weight"
        weight = decoded.dequantize()
        try:
            original = self._read(key)
        except SourceError as fault:
            yield refused(fault, name)
            return
        if original.shape != weight.shape and original.t().shape == weight.shape:
            original = original.t()
        if original.shape != weight.shape:
            text = f"{name} is {list(weight.shape)}, {key} of the reference {list(original.shape)}"
            yield error("reference", name, text)
            return
        if original.shape[0] == original.shape[1] and distance(weight, original.t()) < distance(weight, original):
            original = original.t()  # stored [in, out], as GPT-2 does
        self.errors[name] = found = distance(weight, original)
        rounding = rounding_error(original, scheme)
        limit = min(LIMIT, FARTHEST * rounding)
        if found > 2 * rounding and (other := _of_other_version(decoded, scheme, original)) is not None:
            version, corrected = other
            text = f"{name} is {found:.3f} from the original, and {corrected:.3f} with {version} zeros"
            yield error("version", name, f"{text}: set checkpoint_format to {version}")
            return
        if found <= limit / 2 and layer_of(name) is None:
            return
        fit, fitted = _fitted(weight, original)
        self._fits[layer_of(name) or ""][name] = fit
        if found > limit:
            text = f"{name} is {found:.3f} from the original (relative); rounding to nearest would be {rounding:.3f}"
            if fitted <= limit:
                self._far[name] = (f"{text}; with its columns and rows scaled it is {fitted:.3f}", fitted)
            else:
                yield error("far", name, f"{text}: these are not its weights")

    def rest(self, files: Files, packed: set[str], sites: set[str]) -> Iterator[Finding]:
        """Findings of every tensor that is not packed, of tensors lost, and of sites that may have been folded."""
        ratios: dict[str, list[torch.Tensor]] = defaultdict(list)  # layer -> what its norms were divided by
        for key in files.checkpoint.tensors:
            if key not in packed:
                yield from self._kept(key, files.checkpoint, ratios)
        for name, (text, fitted) in self._far.items():
            layer = layer_of(name) or ""
            if self._is_folded(name, layer, ratios[layer]):
                self.errors[name] = fitted
                yield warning(
                    "folded", name, f"{text}; those scales are made up for elsewhere in the layer (a transform)"
                )
            else:
                yield error("far", name, f"{text}; but nothing in the layer makes up for those scales")
        here = files.checkpoint.tensors.keys() | {f"{site}.weight" for site in sites}
        for key in self.reference.tensors.keys() - here:
            if files.whole and not self._is_tied(key):
                yield error("lost", key, f"{key} is in the reference and not here")

    def _kept(self, key: str, checkpoint: Checkpoint, ratios: dict[str, list[torch.Tensor]]) -> Iterator[Finding]:
        """A tensor in floating point, which should be the reference's own."""
        if key not in self.reference.tensors:
            yield error("reference", key, f"{key} is not in the reference {self.reference.path}")
            return
        now, before = checkpoint.read(key), self.reference.read(key)
        if same_bytes(now, before):
            return
        floats = now.is_floating_point() and now.shape == before.shape
        if floats and torch.equal(now, before.to(now.dtype)):
            yield warning(
                "dtype-changed", key, f"{key} is {now.dtype}, {before.dtype} in the reference; the same values"
            )
            return
        layer = layer_of(key)
        if layer is not None and floats and now.ndim == 1:
            found = [before.float() / now.float(), (1 + before.float()) / (1 + now.float())]  # some norms add 1
            ratios[layer] += found
            if any(self._explains(layer, ratio) for ratio in found):
                yield warning("folded", key, f"{key} was divided by the scales of a site's columns (a transform)")
                return
        yield error("changed", key, _difference(key, now, before))

    def _read(self, key: str) -> torch.Tensor:
        info = self.reference.tensors.get(key)
        if info is None or not DTYPES[info.dtype].is_floating_point:
            raise SourceError(f"{key} is not a float tensor of the reference {self.reference.path}", "reference")
        return self.reference.read(key).to(torch.float32)

    def _explains(self, layer: str, ratio: torch.Tensor) -> bool:
        """Whether the columns of some site of the layer are multiplied by `ratio`, or its rows divided by it."""
        fits = self._fits[layer].values()
        return any(_alike(fit.columns, ratio) or _alike(1 / fit.rows, ratio) for fit in fits)

    def _is_folded(self, name: str, layer: str, ratios: list[torch.Tensor]) -> bool:
        """Whether a norm or rows make up for the scales of a site's columns, and columns for those of its rows."""
        own = self._fits[layer][name]
        others = [fit for site, fit in self._fits[layer].items() if site != name]
        sources = [*ratios, *(1 / fit.rows for fit in others)]
        columns = _is_one(own.columns) or any(
            _alike(own.columns, one) for source in sources for one in _repeats(source, own)
        )
        targets = [fit for fit in others if not _is_one(fit.columns)]
        rows = _is_one(own.rows) or any(
            _alike(fit.columns, one) for fit in targets for one in _repeats(1 / own.rows, fit)
        )
        return columns and rows

    def _is_tied(self, key: str) -> bool:
        """A second copy of the embedding, which need not be kept."""
        if not self.reference.config.get("tie_word_embeddings", True):
            return False
        own = self.reference.tensors[key]
        others = [
            k for k, i in self.reference.tensors.items() if k != key and i.shape == own.shape and len(i.shape) == 2
        ]
        return any(same_bytes(self.reference.read(key), self.reference.read(other)) for other in others)


def layer_of(key: str) -> str | None:
    """The part of a name up to the number of its layer."""
    match = _LAYER.match(key)
    return match[1] if match else None


def distance(weight: torch.Tensor, original: torch.Tensor) -> float:
    """Relative Frobenius distance; that of two matrices of zeros is 0."""
    apart, norm = float((weight - original).norm()), float(original.norm())
    return apart / norm if norm else float(apart > 0)


def rounding_error(original: torch.Tensor, scheme: Scheme) -> float:
    """What rounding [out, in] to nearest on such a grid is expected to cost: a step over the square root of 12."""
    energy = 0.0
    for group in torch.split(original, scheme.group_size or original.shape[1], dim=1):
        low, high = group.amin(dim=1).clamp(max=0), group.amax(dim=1).clamp(min=0)
        span = 2 * torch.maximum(high, -low) if scheme.symmetric else high - low
        step = span / ((1 << scheme.bits) - 1)
        energy += float(step.square().sum()) / 12 * group.shape[1]
    norm = float(original.norm())
    return energy**0.5 / norm if norm else 0.0


def _of_other_version(decoded: DecodedWeight, scheme: Scheme, original: torch.Tensor) -> tuple[str, float] | None:
    """(version, distance) when zeros of the other gptq version bring a site much closer to the original."""
    if scheme.checkpoint_format not in ("gptq", "gptq_v2"):
        return None
    version, shift = ("gptq_v2", -1) if scheme.checkpoint_format == "gptq" else ("gptq", 1)
    zero = (decoded.zero.to(torch.int16) + shift) & ((1 << scheme.bits) - 1)
    other = distance(replace(decoded, zero=zero.to(torch.uint8)).dequantize(), original)
    return (version, other) if other < distance(decoded.dequantize(), original) / 2 else None


def _fitted(weight: torch.Tensor, original: torch.Tensor) -> tuple[_Fit, float]:
    """The best scales of columns, then of rows, and how far the original scaled by them is from the weight."""
    columns = _scales(original, weight, dim=0)
    scaled = original * columns
    rows = _scales(scaled, weight, dim=1)
    return _Fit(columns, rows), distance(scaled * rows[:, None], weight)


def _scales(original: torch.Tensor, weight: torch.Tensor, dim: int) -> torch.Tensor:
    return (original * weight).sum(dim) / original.square().sum(dim).clamp(min=torch.finfo(torch.float32).tiny)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same scales, none of them all ones, up to what rounding makes of them."""
    return one.shape == other.shape and not _is_one(other) and float(_apart(one, other).median()) < ALIKE


def _is_one(scales: torch.Tensor) -> bool:
    return float(_apart(scales, torch.ones_like(scales)).median()) < ALIKE


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num((one / other - 1).abs(), nan=float("inf"))


def _repeats(scales: torch.Tensor, fit: _Fit) -> Iterator[torch.Tensor]:
    """The scales, and, where several query heads share a value head, repeated for each: of any width of a head."""
    yield scales
    count, wanted = len(scales), len(fit.columns)
    if wanted > count and wanted % count == 0:
        widths = [width for width in range(1, count + 1) if count % width == 0]
        yield from (scales.view(-1, width).repeat_interleave(wanted // count, dim=0).reshape(-1) for width in widths)


def _difference(key: str, now: torch.Tensor, before: torch.Tensor) -> str:
    if now.shape != before.shape or now.dtype != before.dtype:
        return f"{key} is {now.dtype} {list(now.shape)}, {before.dtype} {list(before.shape)} in the reference"
    count = int((now != before).sum())
    return f"{key} differs from the reference in {count} of {now.numel()} values"
