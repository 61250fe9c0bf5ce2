"""Compare transformers' loaders on one of our exports with our own reading of its files.

    python scripts/servers/transformers_loader.py EXPORT --python VENV/bin/python [--model ORIGINAL] [--json FILE]

VENV has transformers and what the format needs: compressed-tensors, or gptqmodel and optimum for gptq and awq, or gguf
(requirements in transformers.txt and gptqmodel.txt beside this script). It loads the export in float32 and continues
the prompts of live.py greedily. Its tokens are scored on our own dequantized weights: all must be our first choice too,
but for ties, with log probabilities that are the same to a hundredth of a nat (0.3 nats where activations are rounded
to 8 bits). With --dequantize compressed-tensors are loaded with `CompressedTensorsConfig(dequantize=True)`, which
computes in the checkpoint's own 16 bits' rounding.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from live import (
    ACTIVATIONS_LIMIT,
    APART,
    PROMPTS,
    REFUSED,
    Answer,
    Row,
    compared,
    cpu,
    describe,
    finish,
    leave_with_children,
    reason,
    refuse_interruption,
    versions,
)

from quantforge.model.gguf_file import gguf_files
from quantforge.model.tokenizer import load_tokenizer

LIMITS = {"default": 0.01, "dequantize": 0.1, "gguf": 0.01}
NEEDS = {
    "float": (),
    "compressed-tensors": ("compressed-tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "gptq-v2": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "gguf": ("gguf",),
}


def ask(python: Path, export: Path, way: str, count: int, threads: int) -> tuple[dict[str, Any] | None, str]:
    """What from_pretrained.py printed, or None and its error."""
    script = Path(__file__).with_name("from_pretrained.py")
    # TORCHDYNAMO_DISABLE: GPTQModel compiles its kernels, which takes longer than the few tokens wanted here.
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    command = [str(python), str(script), str(export.resolve()), str(count), way]
    ran = subprocess.run(command, input=json.dumps(PROMPTS), env=environment, capture_output=True, text=True)
    refuse_interruption(ran.returncode, script.name)
    if ran.returncode:
        return None, ran.stderr
    found: dict[str, Any] = json.loads(next(each for each in reversed(ran.stdout.splitlines()) if each.startswith("{")))
    return found, ""


def mismatch(log: str) -> str:
    """The first by name of the tensors that transformers reports, in no fixed order, as of shapes not its own."""
    shapes = sorted(" ".join(line.split()) for line in log.splitlines() if "| MISMATCH |" in line)
    return f"; {shapes[0]}" if shapes else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("export", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    leave_with_children()
    about = describe(asked.export)
    kind = "gguf" if about["format"] == "gguf" else "dequantize" if asked.dequantize else "default"
    way = f"gguf:{gguf_files(asked.export)[0].name}" if kind == "gguf" else kind
    found, log = ask(asked.python, asked.export, way, asked.count, asked.threads)
    about |= {
        "server": "transformers",
        "arithmetic": "float32" + (", dequantize=True" if asked.dequantize else ""),
        "versions": versions(asked.python, ("transformers", *NEEDS[about["format"]], "torch")),
        "cpu": cpu(),
    }
    if found is None:
        print(log, file=sys.stderr)
        sys.exit(finish(Row(**about, outcome=REFUSED, error=reason(log) + mismatch(log)), asked.json))
    answers = [Answer(**each | {"first": dict(each["first"])}) for each in found["answers"]]
    limit = ACTIVATIONS_LIMIT if "activations" in about["grid"] else LIMITS[kind]
    about |= compared(answers, asked.export, asked.model, limit)
    about["remarks"] = {name: found[name] for name in ("modules", "load_seconds", "answer_seconds")}
    tokenizer = load_tokenizer(asked.export)
    if [answer.prompt for answer in answers] != [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]:
        about |= {"outcome": APART, "error": "the ids of the prompts differ from those of the checkpoint's tokenizer"}
    sys.exit(finish(Row(**about), asked.json))


if __name__ == "__main__":
    main()
