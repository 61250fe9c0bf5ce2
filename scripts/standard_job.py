"""The standard job: quantize one model several ways, score each on two corpora with one evaluator, print a table.

    python scripts/standard_job.py MODEL --data DIR --out rows.json [--rows rtn-4-sym,gptq-4-sym,...]

DIR holds c4/c4.calib.txt, c4/c4.eval.txt and wikitext-2-raw/wiki.test.raw. Calibration is 64 sequences of 512 tokens of
the first, evaluation 16 windows of 2048 tokens spread evenly over each of the others. Rows already in the output file
are kept and not computed again, so the job can be stopped and carried on. Checkpoints it makes are removed once scored.
"""

import argparse
import json
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from quantforge.evaluate.divergence import evaluate_windows
from quantforge.evaluate.protocol import build_windows, load_rows
from quantforge.model.packed import open_any
from quantforge.model.streamed import StreamedModel, StreamedPass
from quantforge.model.tokenizer import load_tokenizer
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import CalibrationRecipe, Recipe
from quantforge.report import RunFinished

ROWS = [f"{method}-{bits}-{grid}" for bits in (4, 3, 8) for grid in ("sym", "asym") for method in ("rtn", "gptq")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--rows", default=",".join(["fp", *ROWS]), help="METHOD-BITS-sym|asym, fp, or a checkpoint path"
    )
    parser.add_argument("--work", type=Path, default=Path("standard-job.partial"))
    parser.add_argument("--calibration", help="instead of DIR/c4/c4.calib.txt; builtin for the embedded text")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def hidden_states(model: str, tokens: torch.Tensor) -> StreamedPass:
    run = StreamedModel(open_any(model)).begin(tokens)
    run.run_all()
    return run


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def make(row: str, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Quantize one row; the checkpoint's path and what it cost."""
    method, bits, grid = row.split("-")
    output = args.work / row
    recipe = Recipe(
        model=args.model,
        output=str(output),
        method=method,
        bits=int(bits),
        group_size=args.group_size,
        symmetric=grid == "sym",
        calibration=CalibrationRecipe(
            dataset=args.calibration or str(args.data / "c4/c4.calib.txt"), nsamples=64, seqlen=512
        ),
    )
    started, cpu = time.monotonic(), cpu_seconds()
    plan = make_plan(recipe)
    *_, last = quantize(recipe, plan)
    assert isinstance(last, RunFinished)
    cost = {"wall_seconds": time.monotonic() - started, "cpu_seconds": cpu_seconds() - cpu}
    return str(output), cost | {"bits_per_weight": plan.bits_per_weight, "bytes": last.report.outputs[0].total_bytes}


def main() -> None:
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
    for row in args.rows.split(","):
        if row in done:
            continue
        made = row != "fp" and not Path(row).is_dir()  # a checkpoint that was given is left alone, wherever it lies
        checkpoint, entry = make(row, args) if made else (args.model if row == "fp" else row, {})
        for name, tokens in windows.items():
            if name not in references:
                references[name] = hidden_states(args.model, tokens.tokens)
            run = references[name] if row == "fp" else hidden_states(checkpoint, tokens.tokens)
            entry[name] = evaluate_windows(tokens, run, references[name]).to_json()
        done[row] = entry
        args.out.write_text(json.dumps(done, indent=1))
        if made:
            shutil.rmtree(checkpoint)
        print(table({row: entry}), flush=True)
    print(table(done))


def table(rows: dict[str, Any]) -> str:
    """Markdown, one line a row and corpus."""
    lines = ["| row | corpus | ppl | KL (SE) | top-1 | bits/weight | CPU s |", "|---|---|---|---|---|---|---|"]
    for row, entry in rows.items():
        for name in ("wikitext", "c4"):
            score = entry[name]
            gap = score["divergence"]
            lines.append(
                f"| {row} | {name} | {score['ppl']:.3f} | {gap['kl']:.4f} ({gap['kl_se_window']:.4f}) | "
                f"{gap['top1']:.4f} | {entry.get('bits_per_weight', 0):.3f} | {entry.get('cpu_seconds', 0):.0f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
