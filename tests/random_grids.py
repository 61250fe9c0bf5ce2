"""Quantized weights and shared locations for the format tests."""

import os
from pathlib import Path

import torch

from quantforge.formats import CheckpointFacts, SiteShape
from quantforge.quantized import SCALE_DTYPES, QuantizedWeight
from quantforge.spec import QuantSpec

SITE = "model.layers.0.mlp.up_proj"


def random_weight(spec: QuantSpec, out_features: int, in_features: int, lowest_zero: int = 0) -> QuantizedWeight:
    """Random codes, scales of many magnitudes, and zeros from `lowest_zero` up; both ends occur when asymmetric.

    Symmetric grids have scales of both signs.
    """
    generator = torch.Generator().manual_seed(out_features * 1009 + in_features * 31 + spec.bits)
    groups = spec.groups(in_features)

    def draw(low: int, shape: tuple[int, int]) -> torch.Tensor:
        return torch.randint(low, spec.code_max + 1, shape, generator=generator, dtype=torch.uint8)

    zero = draw(lowest_zero, (out_features, groups))
    zero[0, 0], zero[-1, -1] = lowest_zero, spec.code_max
    if spec.symmetric:
        zero.fill_(spec.symmetric_zero)
    exponent = torch.randint(-9, 0, (out_features, groups), generator=generator)
    mantissa = torch.randint(0, 128, (out_features, groups), generator=generator) / 128  # exact in bfloat16 and float16
    scale = ((1 + mantissa) * 2.0**exponent).to(SCALE_DTYPES[spec.scale_dtype])
    codes = draw(0, (out_features, in_features))
    if spec.symmetric:
        turned = torch.rand((out_features, groups), generator=generator) < 0.5
        turned[0, 0] = True
        scale = torch.where(turned, -scale, scale)
    return QuantizedWeight(spec, codes, scale, zero)


def facts_for(weight: QuantizedWeight, kept: tuple[str, ...] = ("lm_head",)) -> CheckpointFacts:
    return CheckpointFacts({SITE: weight.spec}, kept, bool((weight.zero == 0).any()))


def alike(spec: QuantSpec, *sites: SiteShape) -> tuple[dict[str, QuantSpec], list[SiteShape]]:
    """What a format's `problems` takes, for sites on one grid."""
    return {site.name: spec for site in sites}, list(sites)


def parts_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of `SITE` by suffix; every key must belong to it."""
    assert all(key.startswith(f"{SITE}.") for key in tensors)
    return {key.removeprefix(f"{SITE}."): value for key, value in tensors.items()}


def words(*unsigned: int) -> torch.Tensor:
    """int32 with these 32-bit patterns."""
    return torch.tensor([value - (1 << 32) if value >> 31 else value for value in unsigned], dtype=torch.int32)


def shared_folder() -> Path:
    """Where checkpoints written by other tools lie, when they are at hand."""
    beside_repository = Path(__file__).resolve().parents[2] / "shared"
    return Path(os.environ.get("QUANTFORGE_SHARED", beside_repository))
