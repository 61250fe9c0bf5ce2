"""What is used of a tokenizer: ids of a text, and the special tokens that go before one."""

from collections.abc import Mapping
from typing import Any, Protocol

from quantforge.errors import CalibrationError, UsageError

BOS_POLICIES = ("auto", "always", "never")


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], *, tokenize: bool) -> Any: ...


def tokenize(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Token ids of `text`. ``verbose=False``: a text longer than the model's context is no reason for a warning."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can hold one; tokenizers fail on it with a message about types
        near = ascii(text[max(0, error.start - 20) : error.end + 20])
        raise CalibrationError(f"half a surrogate pair is not text; repair the data set, near {near}") from error
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def leading_tokens(tokenizer: Tokenizer, bos: str) -> list[int]:
    """Special tokens that `bos` puts before a text.

    ``auto``: those the tokenizer itself adds in front of one (BOS, or nothing); ``always``: BOS; ``never``: none.
    """
    if bos not in BOS_POLICIES:
        raise UsageError(f"--bos must be one of {', '.join(BOS_POLICIES)}; got {bos!r}")
    if bos == "never":
        return []
    if bos == "always":
        if tokenizer.bos_token_id is None:
            raise CalibrationError("--bos always: the tokenizer has no BOS token; set --bos auto or --bos never")
        return [tokenizer.bos_token_id]
    plain = tokenize(tokenizer, "a")
    special = tokenize(tokenizer, "a", add_special_tokens=True)
    starts = range(len(special) - len(plain) + 1)
    return special[: next((i for i in starts if special[i : i + len(plain)] == plain), 0)]
