"""What the live comparisons share: prompts, what a server answered, our own scoring of it, and one row of the table.

A server continues a few prompts greedily and tells the log probability of every token it chose. The same tokens are
then scored in float32 on the weights that we read from the packed files, with activations rounded where config.json
asks for it. Where every chosen token of a prompt is our first choice too, our greedy continuation is the same, token
for token.
"""

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantforge.contracts import Subject, all_verdicts
from quantforge.model.packed import open_any
from quantforge.model.stored import as_stored
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline.subject import subject_of

PROMPTS = (
    "The capital of France is",
    "A model that has been rounded to four bits is",
    "Once upon a time, in a village by the sea,",
    "def mean(values):\n    return",
)
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16")
"""What decides which of a server's kernels for CPUs runs."""

ACTIVATIONS_LIMIT = 0.3
"""Mean difference in nats that is allowed where activations are rounded to 8 bits. A rounding that falls to the other
side changes all that follows: SmolLM2 as W8A8, run here twice, the second time with embeddings times 1 + 1e-6 noise,
gives log probabilities that are 0.19 nats apart in the mean (4 bits with activations as they are: 0.000004)."""

ALIKE, APART, REFUSED = "alike", "apart", "refused"
EXIT = {ALIKE: 0, APART: 3, REFUSED: 3}
"""Exit status 3: the row was written, and it is not a good one. Any other failure wrote none."""


@dataclass(frozen=True)
class Answer:
    """One continued prompt.

    Attributes:
        prompt: token ids, as the server saw them.
        tokens: the ids it chose.
        logprobs: their natural log probabilities.
        first: log probabilities of the likeliest first tokens, by id.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    first: dict[int, float]


@dataclass(frozen=True)
class Score:
    """How near a server is to one checkpoint; distances in nats.

    Attributes:
        tokens: how many it chose.
        best: how many of these are the checkpoint's first choice.
        same: prompts of which all are, so that greedy continuations are equal.
        mean: mean difference of the chosen tokens' log probabilities.
        largest: the largest of them.
        first: the largest difference among the likeliest first tokens.
    """

    tokens: int
    best: int
    same: int
    mean: float
    largest: float
    first: float


@dataclass(frozen=True)
class Row:
    """One cell of the table. `original` is the distance from the unquantized model, which shows what apart looks like.

    Attributes:
        format: of the files; ``float`` when they are not quantized.
        grid: the grid in words.
        arithmetic: what the server computed in.
        outcome: ``alike``, ``apart`` (it answers, with other numbers than ours) or ``refused``.
        error: what the server said when it refused.
        limit: the mean difference above which it counts as apart.
        verdicts: for each of our contracts the kernel that it expects for this checkpoint, None for a refusal.
    """

    server: str
    format: str
    grid: str
    arithmetic: str
    outcome: str
    versions: dict[str, str]
    verdicts: dict[str, str | None]
    cpu: dict[str, Any]
    error: str = ""
    ours: Score | None = None
    original: Score | None = None
    limit: float | None = None
    remarks: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, ...]:
        return self.format, self.grid, self.server, self.arithmetic


def logits_of(checkpoint: str | Path, sequences: Sequence[list[int]]) -> list[torch.Tensor]:
    """Float32 logits [length, vocabulary] of each sequence, from the files of any checkpoint that we read."""
    longest = max(map(len, sequences))
    tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in sequences])  # no token sees those after it
    streamed = StreamedModel(open_any(checkpoint))
    with as_stored(streamed):
        run = streamed.begin(tokens)
        run.run_all()
        return [run.logits(number)[: len(ids)] for number, ids in enumerate(sequences)]


def score(answers: Sequence[Answer], checkpoint: str | Path) -> Score:
    """Score what a server answered on the weights of `checkpoint`."""
    apart, first = [], []
    best = same = 0
    logits = logits_of(checkpoint, [answer.prompt + answer.tokens for answer in answers])
    for answer, own in zip(answers, logits, strict=True):
        logprobs = own[len(answer.prompt) - 1 : -1].log_softmax(-1)  # [tokens, vocabulary]
        chosen = torch.tensor(answer.tokens)
        equal = logprobs.argmax(-1) == chosen
        best, same = best + int(equal.sum()), same + bool(equal.all())
        apart.append((logprobs[torch.arange(len(chosen)), chosen] - torch.tensor(answer.logprobs)).abs())
        first += [abs(float(logprobs[0, token]) - value) for token, value in answer.first.items()]
    difference = torch.cat(apart)
    return Score(len(difference), best, same, float(difference.mean()), float(difference.max()), max(first))


def compared(answers: Sequence[Answer], checkpoint: Path, original: str | None, limit: float) -> dict[str, Any]:
    """The measured fields of a row."""
    ours = score(answers, checkpoint)
    rest = None if original is None else score(answers, original)
    outcome = ALIKE if ours.mean <= limit else APART
    return {"outcome": outcome, "ours": ours, "original": rest, "limit": limit}


def describe(checkpoint: str | Path) -> dict[str, Any]:
    """Format and grid of a checkpoint in words, and what our contracts say of it."""
    subject = subject_of(open_any(checkpoint))
    verdicts = {verdict.server: verdict.kernel for verdict in all_verdicts(subject)}
    return {"format": _format(subject), "grid": _grid(subject), "verdicts": verdicts}


def _format(subject: Subject) -> str:
    if subject.quant_method is None:
        return "float"
    variants = {site.variant for site in subject.sites.values()}
    return "gptq-v2" if variants == {"gptq_v2"} else subject.quant_method


def _grid(subject: Subject) -> str:
    if not subject.sites:
        return str(subject.config.get("dtype") or subject.config.get("torch_dtype"))
    grids = set()
    for site in subject.sites.values():
        group = "per channel" if site.group_size is None else f"group {site.group_size}"
        blocks = f" ({site.variant})" if subject.quant_method == "gguf" else ""
        inputs = f", {site.activation_bits}-bit activations" if site.activation_bits else ""
        grids.add(f"{site.bits} bits {'' if site.symmetric else 'a'}symmetric, {group}{inputs}{blocks}")
    return "; ".join(sorted(grids))


def cpu() -> dict[str, Any]:
    """The model and those of `FLAGS` that it has."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else ""
    name = re.search(r"^model name\s*: (.*)$", text, re.M)
    has = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.M)
    flags = set(has[1].split()) if has else set()
    return {"model": name[1] if name else platform.machine(), "flags": [flag for flag in FLAGS if flag in flags]}


def versions(python: str | Path, names: Sequence[str]) -> dict[str, str]:
    """Versions of those distributions that the environment of an interpreter itself has."""
    code = (
        "import importlib.metadata, json\n"
        "first = reversed([*importlib.metadata.distributions()])  # what stands first on the path is what is imported\n"
        "print(json.dumps({each.name: each.version for each in first}))"
    )
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([str(python), "-P", "-c", code], env=own, check=True, stdout=subprocess.PIPE, text=True)
    found = {re.sub("[-_.]+", "-", name).lower(): version for name, version in json.loads(ran.stdout).items()}
    return {name: found[name] for name in names if name in found}


def leave_with_children() -> None:
    """From now on SIGTERM ends this script like an error, so that what it started is ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def reason(log: str, wrappers: Sequence[str] = ()) -> str:
    """The error that a log ends in: its last exception with the lines it goes on for, without folders.

    Exceptions that hold one of the `wrappers` are passed over, unless there are no others.
    """
    lines = [re.sub(r"^\([^)]*\) ?(?:ERROR \S+ \S+ \[[^\]]*\] ?)?", "", line) for line in log.splitlines()]
    starts = [n for n, line in enumerate(lines) if re.match(r"[\w.]*(?:Error|Exception|Interrupt)\b", line)]
    chosen = [n for n in starts if not any(text in lines[n] for text in wrappers)] or starts
    if not chosen:
        return "\n".join(lines[-15:])
    end = next((n for n in range(chosen[-1] + 1, len(lines)) if not lines[n].startswith(" ")), len(lines))
    text = " ".join(" ".join(lines[chosen[-1] : end]).split())[:600]
    text = re.sub(r"(?<![:/])(?:/[\w.+-]+){2,}/", "", text)  # where files were is of no interest
    return re.split(r" \[type=| For further information", text)[0]  # what pydantic appends


def refuse_interruption(status: int, what: str) -> None:
    """Leave with an error and no row when `what` did not end by itself: an exit status of a signal from outside."""
    if -status in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        sys.exit(
            f"{what} was ended by {signal.Signals(-status).name}, which says nothing of the checkpoint; no row is kept"
        )


def finish(row: Row, file: Path | None) -> int:
    """Print a row and put it into `file`, in place of one with its key; returns the exit status."""
    print(line(row), flush=True)
    if file is not None:
        rows = json.loads(file.read_text()) if file.is_file() else []
        stored = json.loads(json.dumps(asdict(row)))
        keys = ("format", "grid", "server", "arithmetic")
        rows = [old for old in rows if tuple(old[key] for key in keys) != row.key] + [stored]
        rows.sort(key=lambda each: [each[key] for key in keys])
        temporary = file.with_name(f"{file.name}.tmp")
        temporary.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        os.replace(temporary, file)
    return EXIT[row.outcome]


def line(row: Row) -> str:
    """One line of Markdown."""
    cells = [row.server, row.format, row.grid, row.arithmetic, row.outcome]
    if row.ours is None:
        return f"| {' | '.join(cells)} | {row.error} |"
    cells.append(
        f"{row.ours.best} of {row.ours.tokens} greedy tokens are ours, {row.ours.same} of {len(PROMPTS)} prompts "
        f"wholly; log probabilities {row.ours.mean:.4f} nats apart in the mean, {row.ours.largest:.4f} at most, "
        f"{row.ours.first:.4f} at first tokens"
    )
    if row.original is not None:
        cells[-1] += f"; the original: {row.original.best}, {row.original.mean:.4f}"
    return f"| {' | '.join(cells)} |"
