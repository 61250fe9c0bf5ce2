"""Rules of a recipe: another grid for some of the sites, or none."""

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from quantforge.errors import UsageError
from quantforge.spec import Bits

BITS_HELP = f"one of {', '.join(map(str, get_args(Bits)))}"


class Rule(BaseModel):
    """The grid of the sites whose names fit `match`; what is None is as the recipe says. `skip`: not quantized.

    `match` is a shell pattern or, after ``re:``, a regular expression, as in `Recipe.ignore`. Of several rules that fit
    a site the first counts. `group_size` -1 is one scale per output channel. Descriptions end error messages.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    match: str = Field(min_length=1, description="a pattern of site names")
    bits: int | None = Field(default=None, description=BITS_HELP)
    group_size: int | None = Field(
        default=None, description="a positive integer, or -1 for one scale per output channel"
    )
    symmetric: bool | None = Field(default=None, description="true or false")
    skip: bool = Field(default=False, description="true or false, and alone beside match when it is true")

    @field_validator("bits")
    @classmethod
    def _known_bits(cls, bits: int | None) -> int | None:
        return None if bits is None else checked_bits(bits)

    @field_validator("group_size")
    @classmethod
    def _possible_group(cls, group_size: int | None) -> int | None:
        return None if group_size is None else checked_group_size(group_size)

    @field_validator("skip")
    @classmethod
    def _real_skip(cls, skip: bool, info: ValidationInfo) -> bool:
        if skip and any(info.data.get(name) is not None for name in ("bits", "group_size", "symmetric")):
            raise ValueError("a grid for sites that are left alone")
        return skip

    def label(self) -> str:
        """As on the command line: ``*.down_proj=bits:8``."""
        given = self.model_dump(exclude={"match"}, exclude_none=True)
        settings = [f"{key}:{str(value).lower()}" for key, value in given.items() if key != "skip"]
        return f"{self.match}={'skip' if self.skip else ','.join(settings)}"


def checked_bits(bits: int) -> int:
    """`bits` itself; ValueError when no grid has so many."""
    if bits not in get_args(Bits):
        raise ValueError("unknown number of bits")
    return bits


def checked_group_size(group_size: int) -> int:
    """`group_size` itself; ValueError when it is neither -1 nor positive."""
    if group_size != -1 and group_size < 1:
        raise ValueError("impossible group size")
    return group_size


def nearest_field(key: str) -> str:
    """What a message says of a key that no rule has."""
    close = difflib.get_close_matches(key.replace("-", "_").lower(), Rule.model_fields, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(Rule.model_fields)}"


def parse_rule(text: str) -> dict[str, str]:
    """``PATTERN=key:value,key:value`` or ``PATTERN=skip`` as a mapping of unread strings; UsageError on anything else.

    The last equals sign ends the pattern.
    """
    pattern, equals, settings = text.rpartition("=")
    if pattern and settings.strip() == "skip":
        return {"match": pattern, "skip": "true"}
    parts = [part.partition(":") for part in settings.split(",")]
    if not pattern or not equals or not all(key.strip() and colon and value.strip() for key, colon, value in parts):
        raise UsageError(f"--rule takes PATTERN=bits:8,group_size:64 or PATTERN=skip; got {text!r}")
    if len({key.strip() for key, _, _ in parts}) != len(parts):
        raise UsageError(f"--rule {text!r} sets one key twice; keep one")
    return {"match": pattern} | {key.strip(): value.strip() for key, _, value in parts}


def explain_rule(location: tuple[Any, ...], kind: str, found: Any) -> str:
    """One finding of pydantic about ``rules`` in our words; `location` is (rule number, field)."""
    number, name = location
    got = "it is missing" if kind == "missing" else f"got {found!r}"
    return f"rules[{number}].{name} must be {Rule.model_fields[name].description}; {got}"


def is_rules(value: Any) -> bool:
    """True for a list of mappings; anything else is left to the recipe to refuse."""
    return isinstance(value, list | tuple) and all(isinstance(rule, Mapping) for rule in value)
