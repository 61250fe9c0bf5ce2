"""A folder as a registry: each file in it defines one constant, and is found by its name."""

import importlib
import pkgutil
from collections.abc import Iterable
from typing import TypeVar

from quantforge.errors import QuantforgeError

Entry = TypeVar("Entry")


def names_in(folder: Iterable[str]) -> list[str]:
    """Names of the modules of a package (its ``__path__``), underscores read as dashes; private ones do not count."""
    names = (module.name for module in pkgutil.iter_modules(folder))
    return sorted(name.replace("_", "-") for name in names if not name.startswith("_"))


def load(
    package: str, folder: Iterable[str], name: str, constant: str, kind: type[Entry], error: type[QuantforgeError]
) -> Entry:
    """The `constant`, a `kind`, of the module called `name`; raises `error` with the known names when there is none."""
    known = names_in(folder)
    what = package.rpartition(".")[2].removesuffix("s")
    if name not in known:
        raise error(f"unknown {what} {name!r}; known {what}s: {', '.join(known)}")
    entry = getattr(importlib.import_module(f"{package}.{name.replace('-', '_')}"), constant)
    assert isinstance(entry, kind)
    return entry
