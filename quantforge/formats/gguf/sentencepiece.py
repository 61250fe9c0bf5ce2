"""SentencePiece BPE with byte fallback (Llama 2, Mistral 7B) in GGUF's words: a score for each token, no merges.

llama.cpp joins the two neighbors whose joined text is the token of the highest score, the leftmost of equal ones
(src/llama-vocab.cpp, `llm_tokenizer_spm_session`); tokenizer.json lists the joins that are allowed, the best first.
Both do the same where every way to split a token is in that list, and all joins to one token stand before all joins to
the next: a token's score is then minus its place. What remains different are texts that begin with a space, or follow
a special token: llama.cpp puts the sign for a space before them too, tokenizers with a ``Metaspace`` step may not.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

SPACE = "\u2581"
BYTES = dict.fromkeys(f"<0x{value:02X}>" for value in range(256))

_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}


def is_sentencepiece(tokenizer: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json holds a BPE whose unknown characters become tokens of their bytes."""
    model = tokenizer.get("model") or {}
    return model.get("type") == "BPE" and bool(model.get("byte_fallback"))


def sentencepiece_problems(tokenizer: Mapping[str, Any], file: str) -> Iterator[str]:
    """What llama.cpp would do otherwise than a tokenizer.json of this kind."""
    model = tokenizer["model"]
    vocabulary, merges = model.get("vocab") or {}, _merges(model)
    if model.get("ignore_merges"):
        yield f"{file} sets ignore_merges of its model, and llama.cpp joins the pieces of a SentencePiece model"
    if lost := [token for token in BYTES if token not in vocabulary]:
        yield f"{file} has byte_fallback, and {len(lost)} of 256 bytes are no tokens, such as {lost[0]}"
    if space_prefix(tokenizer) is None:
        yield (
            f"{file} prepares texts otherwise than by writing spaces as {SPACE}, which is all that llama.cpp does for "
            f"a SentencePiece model: normalizer {tokenizer.get('normalizer')}, pre_tokenizer "
            f"{tokenizer.get('pre_tokenizer')}"
        )
    runs = Counter(token for token, _ in groupby(left + right for left, right in merges))
    if torn := [token for token, count in runs.items() if count > 1]:
        yield f"the merges of {file} that give {torn[0]!r} stand apart; llama.cpp has one score for a token"
    splits = ((token[:cut], token[cut:]) for token in vocabulary for cut in range(1, len(token)))
    absent = [pair for pair in splits if pair[0] in vocabulary and pair[1] in vocabulary and pair not in merges]
    if absent:
        left, right = absent[0]
        yield (
            f"{file} lacks {len(absent)} merges that llama.cpp would make, as it joins any two tokens to a third: such "
            f"as {left!r} and {right!r}"
        )


def sentencepiece_scores(tokenizer: Mapping[str, Any]) -> dict[str, float]:
    """The score of each token that is joined from others: 0, -1, -2, ... in the order of the merges."""
    joined = dict.fromkeys(left + right for left, right in _merges(tokenizer["model"]))
    return {token: -float(place) for place, token in enumerate(joined)}


def space_prefix(tokenizer: Mapping[str, Any]) -> bool | None:
    """Whether texts get the sign for a space in front; None when they are prepared in another way altogether."""
    normalizer, before = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
    if normalizer is None and before and before.get("type") == "Metaspace":
        plain = before.get("replacement") == SPACE and before.get("split") is False
        return before.get("prepend_scheme", "always") != "never" if plain else None
    if normalizer is None or before is not None:
        return None
    steps = normalizer.get("normalizers") if normalizer.get("type") == "Sequence" else [normalizer]
    return True if steps == [_PREPEND, _REPLACE] else False if steps == [_REPLACE] else None


def _merges(model: Mapping[str, Any]) -> dict[tuple[str, str], None]:
    """Pairs in their order; older files write a pair as one string."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or [])
    return dict.fromkeys((left, right) for left, right in pairs)
