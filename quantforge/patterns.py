"""Names of modules: which ones servers fuse, and regular expressions for them as configs of checkpoints hold them.

Loaders use `re.match`.
"""

import re
from collections.abc import Iterable

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names under which servers fuse modules of one parent, and so ask whether a module is quantized, with the parts."""


def covering(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Few expressions that match every one of `names` and none of `others`, which must be different names.

    Names that differ in their numbers only share one: with any number, or where that catches one of the others, with
    the numbers there are. What comes before the last part in front of the first number (``model.`` of
    ``model.layers.0.mlp.up_proj``) is left open, because loaders put other prefixes there; again, where that catches
    none of the others.
    """
    lines = "\n".join(dict.fromkeys(others))
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        kinds.setdefault(_kind(name), []).append(name)
    found: dict[str, None] = {}
    for members in kinds.values():
        # the general ones first; the last two differ from the names themselves in nothing
        candidates = [[_general(members[0], True)], _listed(members, True), _listed(members, False)]
        exact = [f"^{re.escape(name)}$" for name in members]
        safe = (
            expressions
            for expressions in candidates
            if not any(re.search(f"^(?:{expression})", lines, re.MULTILINE) for expression in expressions)
        )
        found |= dict.fromkeys(next(safe, exact))
    return list(found)


def _kind(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _split(name: str, open_prefix: bool) -> tuple[str, list[str]]:
    """(expression of the prefix, the other parts of the name)."""
    parts = name.split(".")
    first = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
    return (r"(.*\.)?", parts[first - 1 :]) if open_prefix and first else ("^", parts)


def _general(name: str, open_prefix: bool) -> str:
    prefix, parts = _split(name, open_prefix)
    return prefix + r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in parts) + "$"


def _listed(names: list[str], open_prefix: bool) -> list[str]:
    """One expression that lists the numbers, when the names have just one each; else one expression a name."""
    prefix, parts = _split(names[0], open_prefix)
    if sum(part.isdigit() for part in parts) != 1 or len(names) == 1:
        return [
            _split(name, open_prefix)[0] + re.escape(".".join(_split(name, open_prefix)[1])) + "$" for name in names
        ]
    numbers = "|".join(part for name in names for part in name.split(".") if part.isdigit())
    return [prefix + r"\.".join(f"({numbers})" if part.isdigit() else re.escape(part) for part in parts) + "$"]
