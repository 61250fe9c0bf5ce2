"""Schemes: the short names under which grids are known, such as W4A16_ASYM, as settings of a recipe."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.errors import UsageError


@dataclass(frozen=True)
class Scheme:
    """What a name means.

    Attributes:
        name: in capitals.
        settings: what the name says, in keys of a recipe; other values for these keys contradict it.
        defaults: what goes with it where neither a file nor flags say otherwise.
    """

    name: str
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def label(self) -> str:
        """``bits 4, asymmetric``; without `defaults`."""
        return ", ".join(in_words(key, value) for key, value in self.settings.items() if value is not None)

    def contradicts(self, key: str, value: Any) -> bool:
        """Whether `value` is another than the name says; a group size left to the plan is none."""
        return key in self.settings and value != self.settings[key] and not (key == "group_size" and value == "auto")


def in_words(key: str, value: Any) -> str:
    """A setting as a phrase: ``bits 4``, ``asymmetric``."""
    if key == "symmetric" and isinstance(value, bool):
        return "symmetric" if value else "asymmetric"
    return f"{key} {value}"


def _weights_only(bits: int, symmetric: bool) -> Scheme:
    settings = {"bits": bits, "symmetric": symmetric, "activation_bits": None}
    return Scheme(f"W{bits}A16{'' if symmetric else '_ASYM'}", settings)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        *(_weights_only(bits, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)),
        Scheme(
            "W8A8",
            {"bits": 8, "symmetric": True, "activation_bits": 8, "group_size": -1},
            {"method": "smoothquant+gptq"},
        ),
    )
}

OTHER_NAMES = {"INT8": "W8A8", "INT8_W8A8": "W8A8", "INT8_SQ": "W8A8", "INT4": "W4A16"}

_UNSUPPORTED = (
    (
        r"(FP|NVFP|MXFP|NF|BF)\d.*|FPW\d.*|W\d+A(FP|F)\d+.*",
        "its numbers are floating-point; grids are of integers here",
    ),
    (r"(GGUF:)?(I?Q|TQ)\d.*", "it is a type of GGUF files"),
    (r"INT4_AWQ", "a scheme is a grid; say scheme W4A16 and method awq+gptq"),
    (r"W\d+A\d+.*", "weights have 2, 3, 4 or 8 bits beside 16-bit activations, and 8 bits beside 8-bit ones"),
)
"""Patterns of names that are known elsewhere, and why there is no such scheme."""


def find_scheme(name: Any) -> Scheme:
    """The scheme of that name, in upper or lower case; raises UsageError naming the nearest and all."""
    if not isinstance(name, str):
        raise UsageError(f"scheme must be a name such as W4A16; got {name!r}")
    wanted = name.strip().upper().replace("-", "_")
    wanted = OTHER_NAMES.get(wanted, wanted)
    if wanted in SCHEMES:
        return SCHEMES[wanted]
    reason = next((reason for pattern, reason in _UNSUPPORTED if re.fullmatch(pattern, wanted)), None)
    start = f"unknown scheme {name!r}" if reason is None else f"scheme {name} is not supported: {reason}"
    close = difflib.get_close_matches(wanted, [*SCHEMES, *OTHER_NAMES], n=1)
    nearest = f"did you mean {close[0]}? " if close and (reason is None or wanted.startswith("W")) else ""
    raise UsageError(f"{start}; {nearest}schemes: {', '.join(SCHEMES)}, and INT8 for W8A8")


def contradictions(scheme: Scheme, given: Mapping[str, Any], budgets: tuple[str, ...]) -> Iterator[str]:
    """What of `given` (settings of the same file, or flags) cannot be meant together with `scheme`."""
    wrong = {key: value for key, value in given.items() if scheme.contradicts(key, value)}
    meant = {**scheme.settings, **given}.items()
    fitting = [other.name for other in SCHEMES.values() if not any(other.contradicts(*setting) for setting in meant)]
    instead = f", or take scheme {fitting[0]}" if fitting else ""
    for key, value in wrong.items():
        yield (
            f"scheme {scheme.name} has {key} {_plain(scheme.settings[key])}, and {key} {_plain(value)} is given too; "
            f"keep one{instead}"
        )
    for key in budgets:
        if given.get(key) is not None:
            yield f"scheme {scheme.name} has bits {scheme.settings['bits']}, and {key} has the bits chosen; keep one"


def _plain(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
