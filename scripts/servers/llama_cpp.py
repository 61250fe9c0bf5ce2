"""Compare llama.cpp on one of our GGUF exports with our own reading of the file.

    python scripts/servers/llama_cpp.py EXPORT [--model ORIGINAL] [--node DIRECTORY] [--json FILE] [--count 24]

Needs Python with quantforge[gguf], and node and npm. llama.cpp comes as built binaries in the npm package node-llama-
cpp, which is installed into DIRECTORY the first time. llama.cpp tokenizes the prompts of live.py and continues them
greedily; the tokens that it chose are then scored in float32 on the weights that we read from the file. Twice: with the
file as it is, where llama.cpp rounds activations to 8 bits before each product with blocks, so that probabilities are
near at best (apart above a mean of 0.3 nats); and with a copy whose tensors are all float32, where nothing is rounded,
so that names, order of rows, hyperparameters and vocabulary must give the same to a hundredth of a nat. With --model
the original is asked, too, which shows what other weights look like.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from live import (
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
)

from quantforge.model.gguf_file import gguf_files
from quantforge.model.tokenizer import load_tokenizer

PACKAGE = "node-llama-cpp@3.22.1"
LIMITS = {"blocks": 0.3, "float32 copy": 0.01}


def install(node: Path) -> None:
    """The npm package with its built binaries; nothing is compiled."""
    if not (node / "node_modules" / "node-llama-cpp").is_dir():
        node.mkdir(parents=True, exist_ok=True)
        (node / "package.json").write_text('{"private": true}\n')
        subprocess.run(["npm", "install", "--ignore-scripts", PACKAGE], cwd=node, check=True, stdout=sys.stderr)


def float_copy(file: Path, target: Path) -> Path:
    """The same file with every tensor in float32."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name != "general.architecture" and not name.startswith("GGUF."):
            items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=items)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), 4 * tensor.n_elements)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    writer.close()
    return target


def continued(node: Path, file: Path, count: int, threads: int) -> tuple[dict[str, Any] | None, str]:
    """What llama.cpp writes after the prompts, or None and its error."""
    script = Path(__file__).with_suffix(".mjs").resolve()
    command = ["node", str(script), str(file.resolve()), json.dumps(PROMPTS), str(count), str(threads)]
    ran = subprocess.run(command, cwd=node, capture_output=True, text=True)
    refuse_interruption(ran.returncode, script.name)
    if ran.returncode:
        return None, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found, ""


def answer_of(found: dict[str, Any]) -> Answer:
    first = {token: math.log(share) for token, share in found["first"]}
    return Answer(found["prompt"], found["tokens"], [math.log(share) for share in found["confidences"]], first)


def row_of(arithmetic: str, file: Path, asked: argparse.Namespace) -> Row:
    """Ask llama.cpp for `file`, the export's own or a copy, and compare."""
    about = describe(asked.export) | {"server": "llama-cpp", "arithmetic": arithmetic, "cpu": cpu()}
    name, _, version = PACKAGE.partition("@")
    found, log = continued(asked.node, file, asked.count, asked.threads)
    if found is None:
        print(log, file=sys.stderr)
        return Row(**about, versions={name: version}, outcome=REFUSED, error=reason(log))
    about["versions"] = {name: version, "llama.cpp": found["llama_cpp"]}
    answers = [answer_of(each) for each in found["answers"]]
    about |= compared(answers, asked.export, asked.model, LIMITS[arithmetic])
    tokenizer = load_tokenizer(asked.export)
    if [answer.prompt for answer in answers] != [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]:
        about |= {"outcome": APART, "error": "the ids of the prompts differ from those of the checkpoint's tokenizer"}
    return Row(**about)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("export", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--node", type=Path, default=Path("node-llama-cpp"))
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    leave_with_children()
    install(asked.node)
    [file] = gguf_files(asked.export)
    plain = float_copy(file, asked.node / "float32.gguf")
    rows = [row_of("blocks", file, asked), row_of("float32 copy", plain, asked)]
    plain.unlink()
    sys.exit(max(finish(row, asked.json) for row in rows))


if __name__ == "__main__":
    main()
