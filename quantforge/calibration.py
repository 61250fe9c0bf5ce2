"""Calibration tokens: documents in stored order, packed into full sequences, no padding ever.

Each document is tokenized by itself without special tokens; documents are joined with EOS and the stream is cut, in
order, into sequences. A ``.txt`` file is one document, so its sequences are plainly the first tokens of its text.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from quantforge.documents import Corpus, Document, read_corpus
from quantforge.errors import CalibrationError, UsageError
from quantforge.text import Tokenizer, leading_tokens, tokenize

SAMPLES = 128
SEQLEN = 512
LOW_TOKENS = 4096
"""Below this a Gram matrix as wide as a common hidden size is singular, and a warning is noted."""

_PREFIX_MARGIN = 64


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Sequences a model is calibrated on.

    Attributes:
        tokens: int64 [delivered, seqlen], every one a token of the text, EOS between documents, or the leading BOS.
        source: what they were cut from, in words.
        asked: sequences asked for; `delivered` is how many there are.
        bos: each sequence begins with BOS (or whatever special tokens the tokenizer puts in front of a text).
        fingerprint: SHA-256 (hex) of shape and tokens, little-endian.
        notes: what a user should know; those that begin with ``warning:`` deserve attention.
    """

    tokens: torch.Tensor
    source: str
    asked: int
    bos: bool
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens.dtype != torch.int64 or self.tokens.ndim != 2 or self.tokens.numel() == 0:
            found = f"{self.tokens.dtype} {list(self.tokens.shape)}"
            raise CalibrationError(f"calibration tokens must be int64 [samples, seqlen], not empty; got {found}")

    @property
    def delivered(self) -> int:
        return self.tokens.shape[0]

    @property
    def seqlen(self) -> int:
        return self.tokens.shape[1]

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.delivered}x{self.seqlen}:".encode())
        digest.update(self.tokens.cpu().contiguous().numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(note for note in self.notes if note.startswith("warning:"))

    def to_json(self) -> dict[str, Any]:
        """Everything but the tokens themselves."""
        return {
            "source": self.source,
            "asked": self.asked,
            "delivered": self.delivered,
            "seqlen": self.seqlen,
            "bos": self.bos,
            "fingerprint": self.fingerprint,
            "notes": list(self.notes),
        }


@dataclass
class _Stream:
    """Tokens gathered so far, and what was read to get them."""

    ids: list[int]
    documents: int = 0
    empty: int = 0
    characters: int = 0


def build_calibration(
    tokenizer: Tokenizer,
    *,
    dataset: str | None = None,
    nsamples: int = SAMPLES,
    seqlen: int = SEQLEN,
    split: str | None = None,
    column: str | None = None,
    subset: str | None = None,
    bos: str = "auto",
    max_position: int | None = None,
) -> CalibrationSet:
    """Read `dataset` (see `quantforge.documents`) until `nsamples` sequences of `seqlen` tokens are full.

    Documents are taken in order and nothing is drawn at random: the same call gives the same tokens. Only as much is
    read as is needed. Fewer sequences than asked is a note, a warning when a given `dataset` fills less than half of
    them, and none at all is an error.

    Args:
        bos: ``auto``, each sequence begins with the special tokens the tokenizer itself puts in front of a text
            (usually BOS or nothing); ``always``, with BOS; ``never``, with none. They count towards `seqlen`.
        max_position: longest sequence of the model; `seqlen` is capped to it, with a note.

    Raises:
        CalibrationError: nothing to read, unreadable, or too short for one sequence; with counts and the flag to set.
        UsageError: `nsamples`, `seqlen` or `bos` make no sense.
    """
    if nsamples < 1 or seqlen < 2:
        raise UsageError(f"--nsamples must be at least 1 and --seqlen at least 2; got {nsamples} and {seqlen}")
    notes = []
    if max_position is not None and seqlen > max_position:
        notes.append(f"--seqlen {seqlen} is capped to {max_position}, the longest sequence the model's config allows")
        seqlen = max_position
    lead = leading_tokens(tokenizer, bos)
    if seqlen <= len(lead):
        raise UsageError(f"--seqlen {seqlen} leaves no room after {len(lead)} leading special tokens; raise it")
    corpus = read_corpus(dataset, split=split, subset=subset, column=column)
    stream = _read(tokenizer, corpus, nsamples * seqlen)
    sequences = _pack(stream.ids, nsamples, seqlen, lead)
    if not sequences:
        raise _too_short(corpus.source, stream, seqlen, len(lead))
    notes.append(_bos_note(tokenizer, bos, lead))
    given = dataset not in (None, "builtin")
    notes += _count_notes(stream, nsamples, len(sequences), seqlen, given=given)
    if stream.documents > 1 and tokenizer.eos_token_id is None:
        notes.append("documents are joined with nothing between them: the tokenizer has no EOS")
    return CalibrationSet(torch.tensor(sequences, dtype=torch.int64), corpus.source, nsamples, bool(lead), tuple(notes))


def _read(tokenizer: Tokenizer, corpus: Corpus, needed: int) -> _Stream:
    """Tokens of whole documents joined with EOS, at least `needed` unless the corpus has fewer."""
    stream = _Stream([])
    eos = tokenizer.eos_token_id
    for document in corpus.documents:
        text = _text(tokenizer, document)
        if not text.strip():
            stream.empty += 1
            continue
        if stream.ids and eos is not None and stream.ids[-1] != eos:
            stream.ids.append(eos)
        stream.documents += 1
        stream.characters += len(text)
        stream.ids += _first_tokens(tokenizer, text, needed - len(stream.ids))
        if len(stream.ids) >= needed:
            break
    if not stream.documents:
        raise CalibrationError(
            f"{corpus.source}: no text at all ({stream.empty} empty documents); set another --dataset or --column"
        )
    return stream


def _text(tokenizer: Tokenizer, document: Document) -> str:
    """The document as text; a conversation is rendered with the tokenizer's chat template."""
    if isinstance(document.content, str):
        return document.content
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(
            f"{document.where} holds messages, and this tokenizer has no chat template to render them with; "
            "set --column to a column of plain text, or pass another --dataset"
        )
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(document.content, tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise CalibrationError(f"{document.where}: the chat template refuses these messages: {error}") from error


def _first_tokens(tokenizer: Tokenizer, text: str, needed: int) -> list[int]:
    """Tokens of `text`, all of them or at least `needed`; the first `needed` are those of the whole text.

    A prefix of a huge text is tokenized and grown until it holds a margin beyond `needed`, because only tokens near the
    cut can differ. A tokenizer's peak memory is about a hundred bytes a token.
    """
    length = 8 * needed + 1024
    while length < len(text):
        ids = tokenize(tokenizer, text[:length])
        if len(ids) >= needed + _PREFIX_MARGIN:
            return ids[:needed]
        length *= 2
    return tokenize(tokenizer, text)


def _pack(ids: list[int], nsamples: int, seqlen: int, lead: list[int]) -> list[list[int]]:
    """Full sequences cut in order. A piece that begins with `lead` already (chat templates do) gets no second one."""
    sequences: list[list[int]] = []
    position = 0
    while len(sequences) < nsamples:
        front = [] if ids[position : position + len(lead)] == lead else lead
        end = position + seqlen - len(front)
        if end > len(ids):
            break
        sequences.append(front + ids[position:end])
        position = end
    return sequences


def _bos_note(tokenizer: Tokenizer, bos: str, lead: list[int]) -> str:
    if lead:
        name = "BOS" if lead == [tokenizer.bos_token_id] else "special tokens"
        reason = "the tokenizer adds it itself" if bos == "auto" else "as asked"
        return f"each sequence begins with {name} (token {', '.join(map(str, lead))}): --bos {bos}, {reason}"
    reason = "the tokenizer adds none itself" if bos == "auto" else "as asked"
    return f"no BOS is added to the sequences: --bos {bos}, {reason}"


def _count_notes(stream: _Stream, asked: int, delivered: int, seqlen: int, *, given: bool) -> list[str]:
    """What the counts call for; `given` when a user chose the text, and so may have meant another."""
    notes = []
    if delivered < asked:
        warning = "warning: " if given and 2 * delivered < asked else ""
        notes.append(
            f"{warning}delivered {delivered} of the {asked} sequences asked for: {stream.documents} documents hold "
            f"{len(stream.ids)} tokens, {asked * seqlen} are needed; pass a longer --dataset or a smaller --nsamples"
        )
    if stream.empty:
        notes.append(f"{stream.empty} empty documents were skipped")
    if delivered * seqlen < LOW_TOKENS:
        notes.append(
            f"warning: {delivered * seqlen} calibration tokens are few; statistics of inputs wider than that are "
            f"singular. Use {LOW_TOKENS} or more: raise --nsamples or --seqlen, or pass a longer --dataset"
        )
    return notes


def _too_short(source: str, stream: _Stream, seqlen: int, lead: int) -> CalibrationError:
    found = len(stream.ids)
    shorter = f"--seqlen {found + lead} or less, or " if found + lead >= 2 else ""
    return CalibrationError(
        f"{source}: too short for one sequence: {stream.documents} documents, {stream.characters} characters, {found} "
        f"tokens found, {seqlen - lead} needed; pass {shorter}a longer --dataset"
    )
