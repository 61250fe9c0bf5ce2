"""The classic perplexity protocol of the GPTQ and AWQ papers: a text becomes windows of tokens, and a name for them.

Numbers of different protocols are never comparable, so `Windows.protocol` is printed beside every number. The rules:

1. Rows. A ``.txt`` or ``.raw`` file is read by the WikiText convention, whatever it holds: each line is a row; a line
   of only white space is the row ``''``, every other keeps its newline. Of other sources a row is a column's value.
2. Rows are joined with two newlines and tokenized once.
3. BOS, if any, stands once, at the very start of the stream: what the tokenizer itself adds, unless told otherwise.
4. Non-overlapping windows from the start; the tail is dropped. Within a window the first token is not predicted.
5. N of `total` windows are those at floor(i * total / N), i = 0 .. N-1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quantforge.documents import TEXT_SUFFIXES, read_corpus, read_text
from quantforge.errors import CalibrationError, UsageError
from quantforge.text import Tokenizer, leading_tokens, tokenize

ROW_SEPARATOR = "\n\n"
WINDOW = 2048


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows to be scored.

    Attributes:
        tokens: int64 [N, window].
        indices: position of each window among the `total` of the text.
        protocol: the name of how these windows came to be.
        source: what text they were cut from, in words.
    """

    tokens: torch.Tensor
    indices: tuple[int, ...]
    total: int
    protocol: str
    source: str
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens.dtype != torch.int64 or self.tokens.ndim != 2 or self.tokens.shape[0] != len(self.indices):
            found = f"{self.tokens.dtype} {list(self.tokens.shape)} for {len(self.indices)} indices"
            raise UsageError(f"window tokens must be int64 [N, window], one row for each index; got {found}")
        if self.tokens.shape[0] < 1 or self.tokens.shape[1] < 2:
            raise UsageError(f"need at least one window of two tokens; got {list(self.tokens.shape)}")

    @property
    def count(self) -> int:
        return self.tokens.shape[0]

    @property
    def window(self) -> int:
        return self.tokens.shape[1]


def split_rows(text: str) -> list[str]:
    """Rows of `text` as the hub's WikiText has them: ``''`` for a line of only white space, else line and newline."""
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]  # what follows the last newline has none
    if not lines[-1]:
        lines.pop()
    return [line if line.strip() else "" for line in lines]


def load_rows(text_file: str | Path) -> list[str]:
    """Rows of a UTF-8 ``.txt`` or ``.raw`` file (rule 1); CalibrationError when it is not one."""
    path = Path(text_file).expanduser()
    if not path.is_file():
        raise CalibrationError(f"no such file: {text_file}; set --text or --dataset to an existing one")
    if path.suffix.lower() not in TEXT_SUFFIXES:
        raise CalibrationError(
            f"{path.name}: unknown extension {path.suffix!r}; --text reads {', '.join(TEXT_SUFFIXES)}; "
            "use --dataset for files with columns"
        )
    return split_rows(read_text(path))


def parse_dataset(spec: str) -> tuple[str, str | None, str | None]:
    """``ID``, ``ID:subset`` or ``ID:subset:split`` (either may be empty) as (id, subset, split)."""
    if Path(spec).expanduser().exists():
        return spec, None, None
    name, *rest = spec.split(":")
    if not name or len(rest) > 2:
        raise UsageError(f"--dataset {spec!r}: write ID, ID:subset or ID:subset:split")
    subset, split = (*rest, "", "")[:2]
    return name, subset or None, split or None


def load_dataset_rows(
    dataset: str, *, subset: str | None = None, split: str | None = None, column: str | None = None
) -> list[str]:
    """Rows of text of a hub data set, a file or a folder; `split` is ``test`` unless given.

    Raises:
        CalibrationError: unreadable, or the column does not hold text.
    """
    if dataset != "builtin" and Path(dataset).suffix.lower() in TEXT_SUFFIXES:
        return load_rows(dataset)
    rows = []
    for document in read_corpus(dataset, split=split or "test", subset=subset, column=column).documents:
        if not isinstance(document.content, str):
            raise CalibrationError(f"{document.where} holds messages; perplexity needs plain text; set --column")
        rows.append(document.content)
    return rows


def build_windows(
    rows: Sequence[str],
    tokenizer: Tokenizer,
    *,
    source: str,
    window: int = WINDOW,
    windows: int | None = None,
    bos: str = "auto",
) -> Windows:
    """Join, tokenize and cut `rows` (rules 2 to 5).

    Args:
        source: what the rows are, in words; kept beside the numbers.
        window: tokens in a window; window - 1 are predicted.
        windows: how many to score, spread evenly; None, or more than there are, for all.
        bos: ``auto``, what the tokenizer itself puts in front of a text; ``always``, BOS; ``never``, nothing.

    Raises:
        CalibrationError: the text is shorter than one window.
        UsageError: `window`, `windows` or `bos` make no sense.
    """
    if window < 2 or (windows is not None and windows < 1):
        raise UsageError(f"--window must be at least 2 and --windows at least 1; got {window} and {windows}")
    text = ROW_SEPARATOR.join(rows)
    lead = leading_tokens(tokenizer, bos)
    ids = lead + tokenize(tokenizer, text)
    total = len(ids) // window
    if total == 0:
        shorter = f"set --window {len(ids)} or less, or " if len(ids) >= 2 else ""
        raise CalibrationError(
            f"{source}: {len(rows)} rows, {len(text)} characters, {len(ids)} tokens: shorter than one window of "
            f"{window}; {shorter}pass a longer text (--text, --dataset)"
        )
    indices = spread(total, windows or total)
    notes = [f"--windows {windows}: the text has {total}; all are scored"] if windows and windows > total else []
    start = (
        "none" if not lead else "at the start" if lead == [tokenizer.bos_token_id] else f"tokens {lead} at the start"
    )
    protocol = (
        f"classic-ppl/{window} (rows joined by \\n\\n, one tokenization, non-overlapping, tail dropped, BOS {start}, "
        f"{len(indices)} of {total} windows)"
    )
    cut = torch.tensor(ids[: total * window], dtype=torch.int64).reshape(total, window)
    return Windows(cut[list(indices)].clone(), indices, total, protocol, source, tuple(notes))


def spread(total: int, count: int) -> tuple[int, ...]:
    """floor(i * total / count) for i = 0 .. count-1; all of them when `count` is `total` or more."""
    count = min(count, total)
    return tuple(i * total // count for i in range(count))
