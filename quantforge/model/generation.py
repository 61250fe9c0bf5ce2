"""What transformers thinks of generation settings."""

from collections.abc import Mapping
from typing import Any


def generation_problem(settings: Mapping[str, Any]) -> str | None:
    """Why transformers would refuse to save a generation_config.json, in one line; None when it would not."""
    from transformers import GenerationConfig, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        GenerationConfig.from_dict(dict(settings)).validate(strict=True)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        lines = [line.strip("- ") for line in str(error).splitlines() if line.startswith("- ")]
        return "; ".join(lines) or str(error).strip().partition("\n")[0]
    return None
