"""The tokenizer of a checkpoint."""

from pathlib import Path
from typing import Any

from quantforge.errors import SourceError


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """A transformers tokenizer from a checkpoint directory; SourceError when there is none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise SourceError(f"{path} has no tokenizer that can be read: {error}") from error
