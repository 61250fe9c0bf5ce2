"""The tokenizer of a checkpoint."""

from pathlib import Path
from typing import Any

from quantforge.errors import SourceError


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """A transformers tokenizer from a checkpoint directory; SourceError when there is none that can be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises Exception itself
        hint = "" if trust_remote_code else " (a tokenizer with its own code needs --trust-remote-code)"
        reason = str(error) or type(error).__name__
        raise SourceError(f"{path} has no tokenizer that can be read{hint}: {reason}") from error
