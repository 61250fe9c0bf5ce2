"""Presets: named sets of recipe values that lie between the defaults and what a file or flags say."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantforge.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """`settings` has the keys and values of a recipe."""

    name: str
    summary: str
    settings: Mapping[str, Any]


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "fast",
            "fewer calibration tokens, which count alike: quicker, and further from the original",
            {"token_weights": "none", "nsamples": 32},
        ),
        Preset("balanced", "the defaults", {}),
        Preset(
            "best",
            "channels are scaled first, codes are chosen again for fitted scales, and scales and norms tuned at last: "
            "slower, to come closer to the original",
            {"tune_epochs": 2, "method": "awq+gptq", "options": {"refits": 2}},
        ),
    )
}


def find_preset(name: Any) -> Preset:
    """The preset of that name, in upper or lower case; raises UsageError naming the nearest and all."""
    known = ", ".join(PRESETS)
    if not isinstance(name, str):
        raise UsageError(f"preset must be one of {known}; got {name!r}")
    wanted = name.strip().lower()
    if wanted not in PRESETS:
        close = difflib.get_close_matches(wanted, PRESETS, n=1)
        raise UsageError(f"unknown preset {name!r}; {f'did you mean {close[0]!r}? ' if close else ''}presets: {known}")
    return PRESETS[wanted]
