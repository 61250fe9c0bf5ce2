"""The standard job: quantize one model by several methods, score each on two corpora with one evaluator, print tables.

    python scripts/quality.py MODEL --data DIR --out rows.json [--rows default-4-sym,gptq-4-sym,peer-4-sym=DIR,...]
    python scripts/quality.py table rows.json [more.json ...] [--into docs/quality.md]

DIR holds c4/c4.calib.txt, c4/c4.eval.txt and wikitext-2-raw/wiki.test.raw. Calibration is 64 sequences of 512 tokens of
the first, evaluation 16 windows of 2048 tokens spread evenly over each of the others. A row is METHOD-BITS-GRID, GRID
being sym, asym, or with -pc at the end one scale per channel; METHOD-w8a8; fp; or NAME-BITS-GRID=PATH for a checkpoint
that `quantforge eval` reads, such as another tool's. METHODS has the settings behind the names. Rows already in the
output file are kept and not computed again, so the job can be stopped and carried on. Checkpoints it makes are removed
once scored. Token weights are made once, and their CPU seconds counted for each row that uses them.

`table` prints one table a grid, with each row's KL as a share of the best peer's, or of plain gptq's where no peer was
scored; with --into it replaces what stands between two marks in a file.
"""

import argparse
import json
import resource
import shutil
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from quantforge.evaluate.divergence import EvalResult, evaluate_windows
from quantforge.evaluate.protocol import build_windows, load_rows
from quantforge.model.packed import open_any
from quantforge.model.stored import as_stored
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.model.tokenizer import load_tokenizer
from quantforge.pipeline.calibrate import calibrate
from quantforge.pipeline.influence import token_weights
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import fingerprint_of, open_job, quantize
from quantforge.reading import load_recipe
from quantforge.recipe import Recipe
from quantforge.report import RunFinished

PLAIN: dict[str, Any] = {"token_weights": "none", "options": {"grid": "minmax", "sweeps": 0}}
METHODS: dict[str, dict[str, Any]] = {
    "fp": {},
    "rtn": {"method": "rtn"},
    "gptq": {"method": "gptq"} | PLAIN,
    "awq": {"method": "awq", "token_weights": "none"},
    "awq+gptq": {"method": "awq+gptq"} | PLAIN,
    "smoothquant": {"method": "smoothquant", "token_weights": "none"},
    "smoothquant+gptq": {"method": "smoothquant+gptq"},
    "default": {},
    "best": {"preset": "best"},
    # one thing at a time, between gptq and default, and beyond it
    "gptq+search": {"token_weights": "none", "options": {"sweeps": 0}},
    "gptq+search+weights": {"options": {"sweeps": 0}},
    "default+refit": {"options": {"refits": 2}},
    "default+original": {"sequential": "none"},
    "default+tuning": {"tune_epochs": 2},
    "awq+default": {"method": "awq+gptq"},
}
"""``gptq`` is the plain method, min-max grids and equal tokens; ``default`` is what the command does on its own."""

CORPORA = {"wikitext": "WikiText-2", "c4": "C4"}
MARKS = ("<!-- tables: scripts/quality.py -->", "<!-- end of tables -->")
MAIN = ("rtn", "gptq", "awq", "awq+gptq", "default", "best")

ROWS = [f"{method}-{grid}" for grid in ("4-sym", "4-asym", "3-sym") for method in MAIN]
ROWS += [f"{method}-{grid}" for grid in ("4-sym-pc", "8-sym") for method in ("gptq", "default")]
ROWS += ["rtn-w8a8", "smoothquant-w8a8", "smoothquant+gptq-w8a8"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(["fp", *ROWS]), help="see above")
    parser.add_argument("--work", type=Path, default=Path("quality.partial"))
    parser.add_argument("--calibration", help="instead of DIR/c4/c4.calib.txt; builtin for the embedded text")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def hidden_states(model: str, tokens: torch.Tensor) -> StreamedPass:
    """What goes into the head, with activations and caches rounded where the checkpoint says so."""
    streamed = StreamedModel(open_any(model))
    with as_stored(streamed):
        run = streamed.begin(tokens)
        run.run_all()
    return run


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def settings_of(row: str, group_size: int) -> dict[str, Any]:
    """A row's name in the recipe's words."""
    method, *grid = row.split("-")
    if grid == ["w8a8"]:
        return METHODS[method] | {"bits": 8, "group_size": -1, "activation_bits": 8}
    bits, symmetry, *per_channel = grid
    size = -1 if per_channel == ["pc"] else group_size
    return METHODS[method] | {"bits": int(bits), "symmetric": symmetry == "sym", "group_size": size}


def make(row: str, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Quantize one row; the checkpoint's path and what it cost."""
    output = args.work / row
    settings = {
        "model": args.model,
        "output": str(output),
        "dataset": args.calibration or str(args.data / "c4/c4.calib.txt"),
        "nsamples": 64,
        "seqlen": 512,
    }
    recipe = load_recipe(None, settings | settings_of(row, args.group_size))
    cpu = cpu_seconds()
    plan = make_plan(recipe)
    weighing = share_weighing(recipe, plan, args.work / "token-weights.safetensors")
    *_, last = quantize(recipe, plan)
    assert isinstance(last, RunFinished)
    cost = {"cpu_seconds": cpu_seconds() - cpu + weighing}
    return str(output), cost | {"bits_per_weight": plan.bits_per_weight, "bytes": last.report.outputs[0].total_bytes}


def share_weighing(recipe: Recipe, plan: Plan, file: Path) -> float:
    """Give a run that weighs its tokens the weights in `file`, which are made if there is none.

    They depend on the model and the tokens alone. Returns the CPU seconds to charge the run with: those of making them,
    less those spent just now.
    """
    if recipe.token_weights == "none" or not plan.needs_gram:
        return 0.0
    before = cpu_seconds()
    calibration = result_of(calibrate(recipe, plan, []))
    if not file.exists():
        modules = {site.module for site in plan.sites}
        weights = result_of(token_weights(plan.streamed, modules, calibration.tokens, None))
        save_file(weights, file, {"cpu_seconds": str(cpu_seconds() - before)})
    with safe_open(file, "pt") as kept:
        weights = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118  (not a dict)
        made = float(kept.metadata()["cpu_seconds"])
    with open_job(recipe, plan, calibration, fingerprint_of(recipe, plan, calibration)) as job:
        job.workspace.keep_token_weights(weights)
    return made - (cpu_seconds() - before)


def result_of(steps: Generator[Any, None, Any]) -> Any:
    """What a generator returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def main() -> None:
    if sys.argv[1:2] == ["table"]:
        show_tables(sys.argv[2:])
        return
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(exist_ok=True)
    done: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    tokenizer = load_tokenizer(Path(args.model))
    corpora = {"wikitext": args.data / "wikitext-2-raw/wiki.test.raw", "c4": args.data / "c4/c4.eval.txt"}
    windows = {
        name: build_windows(load_rows(file), tokenizer, source=name, window=2048, windows=args.windows)
        for name, file in corpora.items()
    }
    references: dict[str, StreamedPass] = {}
    for wanted in args.rows.split(","):
        row, given, path = wanted.partition("=")
        if row in done:
            continue
        made = row != "fp" and not given  # a checkpoint that was given is left alone, wherever it lies
        checkpoint, entry = make(row, args) if made else (path or args.model, {"peer": True} if given else {})
        for name, tokens in windows.items():
            if name not in references:
                references[name] = hidden_states(args.model, tokens.tokens)
            run = references[name] if row == "fp" else hidden_states(checkpoint, tokens.tokens)
            entry[name] = score(evaluate_windows(tokens, run, references[name]))
        done[row] = entry
        args.out.write_text(json.dumps(done, indent=1))
        if made:
            shutil.rmtree(checkpoint)
        print(line(row, entry), flush=True)
    print(tables(done))


def score(result: EvalResult) -> dict[str, float]:
    """What the tables show of one corpus; the standard error of KL is the larger of over tokens and over windows."""
    gap = result.divergence
    assert gap is not None
    error = max(gap.kl_se or 0.0, gap.kl_se_window or 0.0)
    return {"ppl": result.ppl, "kl": gap.kl, "kl_se": error, "top1": gap.top1}


def show_tables(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path, nargs="+")
    parser.add_argument("--into", type=Path)
    args = parser.parse_args(arguments)
    text = tables({row: entry for file in args.rows for row, entry in json.loads(file.read_text()).items()})
    if args.into is None:
        print(text)
        return
    before, _, rest = args.into.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    args.into.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}")


def tables(rows: dict[str, Any]) -> str:
    """Markdown: a table for each grid, in the order of ROWS; rows of one grid in the order of METHODS, peers first."""
    order = list(dict.fromkeys(grid_of(row) for row in [*ROWS, *rows]))
    methods = list(METHODS)
    parts = []
    for grid in order:
        own = {row: entry for row, entry in rows.items() if grid_of(row) == grid}
        if not own:
            continue
        peers = [row for row, entry in own.items() if entry.get("peer")]
        ours = sorted((row for row in own if row not in peers), key=lambda row: methods.index(method_of(row)))
        against = peers or [row for row in ours if method_of(row) == "gptq"]
        best = {name: min((own[row][name]["kl"] for row in against), default=0.0) for name in CORPORA}
        whose = "the best peer" if peers else "gptq" if against else None
        shares = [f"KL / {whose}, {title}" for title in CORPORA.values()] if whose else []
        columns = [
            f"`{grid}`",
            *(f"{title} {what}" for title in CORPORA.values() for what in ("PPL", "KL (SE)", "top-1")),
        ]
        columns += [*shares, "bits/weight", "CPU s"]
        found = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        parts.append("\n".join([*found, *(line(row, own[row], best if whose else {}) for row in [*peers, *ours])]))
    return "\n\n".join(parts)


def line(row: str, entry: dict[str, Any], best: Mapping[str, float] = MappingProxyType({})) -> str:
    """One row of Markdown; `best` has the KL to divide by, by corpus."""
    cells = [f"{method_of(row)}{' (peer)' * bool(entry.get('peer'))}"]
    for name in CORPORA:
        own = entry[name]
        cells += [f"{own['ppl']:.3f}", f"{own['kl']:.4f} ({own['kl_se']:.4f})", f"{own['top1']:.4f}"]
    cells += [f"{entry[name]['kl'] / limit:.2f}" for name, limit in best.items()]
    cells += [f"{entry['bits_per_weight']:.3f}" if "bits_per_weight" in entry else ""]
    cells += [f"{entry['cpu_seconds']:.0f}" if "cpu_seconds" in entry else ""]
    return f"| {' | '.join(cells)} |"


def method_of(row: str) -> str:
    return row.partition("-")[0]


def grid_of(row: str) -> str:
    return row.partition("-")[2] or "the original"


if __name__ == "__main__":
    main()
