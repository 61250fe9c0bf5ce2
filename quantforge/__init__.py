"""Post-training quantization of language models, with exports that are checked before they leave.

The package is imported lazily: ``import quantforge`` pulls in no torch. See ``docs/architecture.md``.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("quantforge-llm")
except PackageNotFoundError:  # running from a source tree that was never installed
    __version__ = "0.0.0+source"

__all__ = ["__version__"]
