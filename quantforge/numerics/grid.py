"""Scales and zeros that can be stored, and the codes nearest to a weight on such a grid.

The scale is rounded to its stored dtype first; zeros and codes are then chosen against that value, so what is measured
is what a file holds. A grid rule is a choice of ranges: it hands ``low`` and ``high`` per group to `grid_from_range`.
"""

import math

import torch
from torch import Tensor

from quantforge.errors import NumericsError
from quantforge.numerics.metrics import all_finite
from quantforge.quantized import SCALE_DTYPES, QuantizedWeight
from quantforge.spec import QuantSpec

SMALLEST_SCALE = 2.0**-24
"""Smallest positive float16, exact in bfloat16 too."""

LARGEST_SCALE = {"float16": 65504.0, "bfloat16": 65280.0}
"""Largest finite float16, and the largest bfloat16 that float16 can hold."""

SHRINKS = tuple(1 - step / 50 for step in range(31))
"""Range shrink factors tried by `searched_grid`, 1.0 to 0.4; on ties the earlier, wider one stays."""

TURNED_BITS = 4
"""Up to here symmetric grids are also tried with a negative scale: of 16 steps one more end is worth having."""

SEARCH_ELEMENTS = 1 << 16
"""Weights searched at a time, so that the temporaries stay in cache."""


def store_scale(scale: Tensor, spec: QuantSpec) -> Tensor:
    """Round `scale` to the stored dtype of `spec`, saturating at the ends: positive, finite and a float16 number.

    A bfloat16 scale is rounded to float16 on the way: fewer significant bits of a float16 number are still one. Where
    the spec wants exact minima, its code_max times a scale is a float16 number as well.
    Raises NumericsError when a scale is not finite.
    """
    if not all_finite(scale):
        raise NumericsError(f"{int((~torch.isfinite(scale)).sum())} of {scale.numel()} scales are not finite")
    scale = scale.clamp(SMALLEST_SCALE, largest_scale(spec))
    if _rounds_further(spec):
        mantissa, exponent = torch.frexp(scale)  # in [0.5, 1)
        whole = (mantissa * 2.0**spec.scale_digits).round()
        scale = torch.ldexp(whole, exponent - spec.scale_digits)
    return scale.to(torch.float16).to(SCALE_DTYPES[spec.scale_dtype])


def store_signed_scale(scale: Tensor, spec: QuantSpec) -> Tensor:
    """`store_scale` of a turned grid's scale too: its magnitude is rounded, its sign kept."""
    return store_scale(scale.abs(), spec) * scale.sign().to(SCALE_DTYPES[spec.scale_dtype])


def largest_scale(spec: QuantSpec) -> float:
    """The largest scale that can be stored."""
    if not _rounds_further(spec):
        return LARGEST_SCALE[spec.scale_dtype]
    mantissa, exponent = math.frexp(LARGEST_SCALE["float16"] / spec.code_max)
    return math.ldexp(math.floor(math.ldexp(mantissa, spec.scale_digits)), exponent - spec.scale_digits)


def _rounds_further(spec: QuantSpec) -> bool:
    """Whether scales have fewer significant bits than their dtype."""
    return spec.exact_minima and not spec.symmetric


def _next_scale(stored: Tensor, spec: QuantSpec) -> Tensor:
    """The next larger storable scale (the largest one stays)."""
    present = stored.to(torch.float32)
    step = torch.ldexp(torch.ones_like(present), torch.frexp(present).exponent - spec.scale_digits)
    larger = present + step.clamp(min=SMALLEST_SCALE)  # float16 subnormals are this far apart
    return store_scale(larger.clamp(max=largest_scale(spec)), spec)


def grid_from_range(low: Tensor, high: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The grid of each range, extended to include 0.

    A symmetric grid spans ``2 * max(high, -low)``, an asymmetric one ``high - low``, both in 2^bits - 1 steps. A scale
    that rounding made so small that the range no longer fits takes the next larger storable value. Everything inside
    the range is then at most one scale from its code: half a step of rounding, half a step of clipping.

    Args:
        low, high: [out, groups], finite, float32 or float64.
    Returns:
        scale [out, groups] in the stored dtype, zero uint8 [out, groups]. A range of width 0 gets scale 1, which
        reproduces zeros exactly.
    Raises:
        NumericsError: a range is not finite, or too wide for the largest storable scale.
    """
    low, high = low.clamp(max=0), high.clamp(min=0)
    span = 2 * torch.maximum(high, -low) if spec.symmetric else high - low
    scale = store_scale(span / spec.code_max, spec)
    too_short = span / scale.to(span.dtype) > spec.code_max + 0.5
    scale = torch.where(too_short, _next_scale(scale, spec), scale)
    scale = scale.masked_fill(span == 0, 1.0)
    unstored = span / scale.to(span.dtype) > spec.code_max + 0.5
    if bool(unstored.any()):
        raise NumericsError(
            f"{int(unstored.sum())} groups span up to {float(span.max()):.4g}; a {spec.bits}-bit grid with "
            f"{spec.scale_dtype} scales reaches {spec.code_max * largest_scale(spec):.4g}"
        )
    if spec.symmetric:
        return scale, torch.full_like(scale, spec.symmetric_zero, dtype=torch.uint8)
    zero = (-low / scale.to(low.dtype)).round().clamp(0, spec.code_max)
    return scale, zero.to(torch.uint8)


def minmax_grid(weight: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The grid that covers the smallest to the largest weight of each group.

    Args:
        weight: [out, in], finite, any floating dtype; `in` a multiple of the group size.
    Returns:
        scale [out, groups] in the stored dtype, zero uint8 [out, groups]; see `grid_from_range`.
    """
    out_features, in_features = weight.shape
    grouped = weight.detach().reshape(out_features, spec.groups(in_features), -1)  # [out, groups, group]
    low, high = grouped.aminmax(dim=-1)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return grid_from_range(low.to(dtype), high.to(dtype), spec)


def searched_grid(weight: Tensor, spec: QuantSpec, importance: Tensor) -> tuple[Tensor, Tensor]:
    """The grid of each group that rounds its weights with the least weighted squared error, of several narrower ranges.

    Candidates are the min-max range shrunk by each of SHRINKS; clipping a few outliers often buys everyone else a finer
    step. The weighting by the inputs' mean square is that of AWQ's clipping search (arXiv 2306.00978). A symmetric grid
    of few bits reaches one step further down than up, so the same ranges are tried with a negative scale too, which
    turns the grid round; readers multiply by the scale, whatever its sign.

    Args:
        weight: [out, in], finite, float32 or float64.
        importance: [in], not negative; the inputs' mean squares.
    Returns:
        scale [out, groups] in the stored dtype, negative where that is better; zero uint8 [out, groups]. The min-max
        grid where nothing is better.
    """
    out_features, in_features = weight.shape
    grouped = weight.detach().reshape(out_features, spec.groups(in_features), -1)  # [out, groups, group]
    importance = importance.to(weight.dtype).reshape(grouped.shape[1:])  # [groups, group]
    low, high = grouped.aminmax(dim=-1)
    candidates = [grid_from_range(low * shrink, high * shrink, spec) for shrink in SHRINKS]
    if spec.symmetric and spec.bits <= TURNED_BITS:
        candidates += [(-scale, zero) for scale, zero in candidates]
    best_scale, best_zero = (tensor.clone() for tensor in candidates[0])
    rows = max(1, SEARCH_ELEMENTS // in_features)
    for start in range(0, out_features, rows):
        part = slice(start, start + rows)
        least = torch.full_like(low[part], torch.inf)
        for scale, zero in candidates:
            step = scale[part].to(weight.dtype).unsqueeze(-1)
            offset = zero[part].to(weight.dtype).unsqueeze(-1)
            exact = grouped[part] / step
            missed = torch.clamp(exact.round(), -offset, spec.code_max - offset).sub_(exact)
            error = missed.square_().mul_(importance).sum(dim=-1) * step.squeeze(-1).square()  # [rows, groups]
            better = error < least
            least = torch.where(better, error, least)
            best_scale[part] = torch.where(better, scale[part], best_scale[part])
            best_zero[part] = torch.where(better, zero[part], best_zero[part])
    return best_scale, best_zero


def importance_of(mean_square: Tensor, damping: float = 0.01) -> Tensor:
    """Weights [in] for `searched_grid`: the inputs' mean squares, evened out a little so that none is worth nothing.

    Args:
        mean_square: [in], the diagonal of the gram.
        damping: what is added, relative to the mean.
    """
    return mean_square + damping * mean_square.mean()


def offset_bounds(weight: Tensor, zero: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The least and the largest ``code - zero`` of each group, [groups, out] in the dtype of `weight` [out, in].

    A group of zeros has no scale of its own to correct others with, and stays zero. `zero` is [out, groups].
    """
    empty = (weight == 0).reshape(*zero.shape, -1).all(dim=2)  # [out, groups, group] -> [out, groups]
    low = (-zero.to(weight.dtype)).masked_fill_(empty, 0)
    high = (spec.code_max - zero.to(weight.dtype)).masked_fill_(empty, 0)
    return low.t().contiguous(), high.t().contiguous()


def choose_codes(weight: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec) -> Tensor:
    """The nearest code of every weight, uint8 [out, in]: ``clamp(round(w / scale) + zero)``, ties to even.

    Computed in the dtype of `weight` [out, in], which must be finite; `scale` and `zero` are [out, groups].
    """
    out_features, in_features = weight.shape
    grouped = weight.detach().reshape(out_features, scale.shape[1], -1)  # [out, groups, group]
    steps = (grouped / scale.to(weight.dtype).unsqueeze(-1)).round_()
    codes = steps.add_(zero.unsqueeze(-1)).clamp_(0, spec.code_max)
    return codes.to(torch.uint8).reshape(out_features, in_features)


def nearest_on_grid(weight: Tensor, spec: QuantSpec, importance: Tensor | None = None) -> QuantizedWeight:
    """Every weight rounded to the nearest code of the min-max grid, or with `importance` [in] of the searched one."""
    scale, zero = minmax_grid(weight, spec) if importance is None else searched_grid(weight, spec, importance)
    return QuantizedWeight(spec, choose_codes(weight, scale, zero, spec), scale, zero)
