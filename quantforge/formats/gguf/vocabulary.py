"""tokenizer.json in GGUF's words: byte-level BPE, recognized by the structure of its pre-tokenizer, or SentencePiece.

llama.cpp splits texts by code of its own, chosen by a name, so a tokenizer is written only if it is known to be that of
a name (src/llama-vocab.cpp of llama.cpp, `llm_tokenizer_bpe` and the names in `llama_vocab::impl::load`).
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantforge.formats.gguf.architecture import gguf_package
from quantforge.formats.gguf.sentencepiece import (
    BYTES,
    is_sentencepiece,
    sentencepiece_problems,
    sentencepiece_scores,
    space_prefix,
)

FILE = "tokenizer.json"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PIECES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"

LLAMA3 = rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}|{_PIECES}"
QWEN2 = rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}|{_PIECES}"
TEKKEN = (
    rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

NAMES = {  # (steps of the pre-tokenizer, whether whole words in the vocabulary skip the merges) -> llama.cpp's name
    (("gpt2",), False): "gpt-2",
    (("digits", "gpt2"), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
    ((TEKKEN,), True): "tekken",
}


def vocabulary_problems(path: Path, vocab_size: int) -> Iterator[str]:
    """Why the tokenizer of a checkpoint directory cannot be written; `vocab_size` is the embedding's."""
    if not (path / FILE).is_file():
        other = " (transformers makes one of tokenizer.model: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
        other *= (path / "tokenizer.model").is_file()
        yield f"{path} has no {FILE}, and a GGUF file holds its tokenizer{other}"
        return
    tokenizer = _read(path)
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE":
        yield f"{FILE} holds a {model.get('type')!r} model; this writer knows BPE, byte-level or with byte_fallback"
        return
    pieces = is_sentencepiece(tokenizer)
    foreign = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", *(["fuse_unk"] * (not pieces)))
    if unusual := [key for key in foreign if model.get(key)]:
        yield f"{FILE} sets {', '.join(unusual)} of its model, which llama.cpp has no counterpart for"
    yield from sentencepiece_problems(tokenizer, FILE) if pieces else _byte_level_problems(tokenizer)
    highest = max([*model.get("vocab", {}).values(), *(token["id"] for token in tokenizer.get("added_tokens") or [])])
    if highest >= vocab_size:
        yield f"{FILE} has a token {highest}, the embedding only {vocab_size} rows"


def _byte_level_problems(tokenizer: Mapping[str, Any]) -> Iterator[str]:
    if (tokenizer.get("normalizer") or {"type": "NFC"}).get("type") != "NFC":
        yield f"{FILE} has a {tokenizer['normalizer'].get('type')} normalizer; llama.cpp normalizes no text"
    if pre_tokenizer_name(tokenizer) is None:
        known = ", ".join(sorted(set(NAMES.values())))
        yield (
            f"the pre_tokenizer of {FILE} is not one that llama.cpp has a name for in this writer's list ({known}): "
            f"{json.dumps(tokenizer.get('pre_tokenizer'))}, ignore_merges "
            f"{bool((tokenizer.get('model') or {}).get('ignore_merges'))}"
        )


def pre_tokenizer_name(tokenizer: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer splits a text before merging; None when it is not known."""
    found = tokenizer.get("pre_tokenizer") or {}
    steps = tuple(map(_step, found["pretokenizers"] if found.get("type") == "Sequence" else [found]))
    if len(steps) > 1 and steps[-1] == "bytes":
        steps = steps[:-1]
    ignores = bool((tokenizer.get("model") or {}).get("ignore_merges"))
    return NAMES.get((steps, ignores))  # type: ignore[arg-type]


def _step(step: Mapping[str, Any]) -> str | None:
    """``gpt2`` or ``bytes`` (byte level with or without GPT-2's splits), ``digits``, or a regular expression."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space"):
        return "gpt2" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        expression = (step.get("pattern") or {}).get("Regex")
        return expression if isinstance(expression, str) else None
    return None


def add_vocabulary(writer: Any, path: Path, vocab_size: int) -> None:
    """Tokens, their types, merges or scores, special tokens and chat template, into a ``gguf.GGUFWriter``.

    Rows of the embedding that have no token get ``[PAD<id>]``, of the type for unused ones.
    """
    gguf = gguf_package()
    tokenizer = _read(path)
    pieces = is_sentencepiece(tokenizer)
    tokens = {index: (token, gguf.TokenType.NORMAL) for token, index in tokenizer["model"]["vocab"].items()}
    if pieces:
        tokens |= {index: (token, gguf.TokenType.BYTE) for index, (token, _) in tokens.items() if token in BYTES}
    for added in tokenizer.get("added_tokens") or []:
        kind = gguf.TokenType.CONTROL if added.get("special") else gguf.TokenType.USER_DEFINED
        if pieces and added["content"] == tokenizer["model"].get("unk_token"):
            kind = gguf.TokenType.UNKNOWN
        tokens[added["id"]] = (added["content"], kind)
    listed = [tokens.get(index, (f"[PAD{index}]", gguf.TokenType.UNUSED)) for index in range(vocab_size)]
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else pre_tokenizer_name(tokenizer))
    writer.add_token_list([token for token, _ in listed])
    if pieces:
        scores = sentencepiece_scores(tokenizer)
        writer.add_token_scores([scores.get(token, 0.0) for token, _ in listed])
    writer.add_token_types([kind for _, kind in listed])
    special = gguf.SpecialVocab(path, load_merges=not pieces, n_vocab=vocab_size)
    special.add_special_token = {"bos": False, "eos": False} | special.add_special_token
    special.add_to_gguf(writer, quiet=True)
    writer.add_add_space_prefix(pieces and space_prefix(tokenizer) is True)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / FILE).read_text(encoding="utf-8"))
    return content
