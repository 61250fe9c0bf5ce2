"""What a format makes of a site, in bytes, without the site: the format itself is asked, with small matrices."""

from functools import cache
from math import lcm

import torch

from quantforge.formats import CheckpointFacts, Format, load_format
from quantforge.quantized import SCALE_DTYPES, QuantizedWeight
from quantforge.spec import ActivationSpec, QuantSpec

STEP = 32
"""Outputs and inputs of the small matrices are multiples of it, so that packed words are filled at every width."""


def site_bytes(
    chosen: Format, spec: QuantSpec, out_features: int, in_features: int, activations: ActivationSpec | None = None
) -> int:
    """Bytes of all tensors that hold a site of [out_features, in_features].

    Tensors of a site have a size in proportion to outputs, inputs, both, or neither; so four matrices tell all sizes.
    """
    step = lcm(spec.group_size or STEP, STEP)
    at = _corners(chosen.name, spec, activations)
    more_out, more_in = out_features - STEP, in_features - step
    both = at[1, 1] - at[1, 0] - at[0, 1] + at[0, 0]
    scaled = (at[1, 0] - at[0, 0]) * more_out * step + (at[0, 1] - at[0, 0]) * more_in * STEP
    return at[0, 0] + (scaled + both * more_out * more_in) // (STEP * step)


@cache
def _corners(name: str, spec: QuantSpec, activations: ActivationSpec | None) -> dict[tuple[int, int], int]:
    """Bytes of sites of one or two steps of outputs and inputs."""
    chosen, step = load_format(name), lcm(spec.group_size or STEP, STEP)
    found = {}
    for outputs, inputs in ((0, 0), (0, 1), (1, 0), (1, 1)):
        out_features, in_features = STEP * (1 + outputs), step * (1 + inputs)
        grid = (out_features, spec.groups(in_features))
        blank = QuantizedWeight(
            spec,
            torch.zeros(out_features, in_features, dtype=torch.uint8),
            torch.ones(grid, dtype=SCALE_DTYPES[spec.scale_dtype]),
            torch.full(grid, spec.symmetric_zero, dtype=torch.uint8),
        )
        facts = CheckpointFacts({"site": spec}, (), has_zero_zero=False, activations=activations)
        tensors = chosen.encode("site", blank, facts).values()
        found[outputs, inputs] = sum(t.numel() * t.element_size() for t in tensors)
    return found
