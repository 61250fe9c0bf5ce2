"""Packages that only some features need, each installed by an extra of this distribution."""

import importlib
from typing import Any

from quantforge.errors import UsageError


def need(package: str, feature: str) -> Any:
    """Import an optional package, whose extra has its name; UsageError saying how to install it when it is missing."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(
            f"{feature} needs the package {package}, which is not installed: pip install 'quantforge-llm[{package}]'"
        ) from error
