"""Compare llama.cpp on one of our GGUF exports with the same dequantized weights in transformers.

    python scripts/servers/llama_cpp.py EXPORT [--model ORIGINAL] [--node DIRECTORY] [--prompt TEXT] [--count 24]

Needs Python with quantforge[gguf], and node and npm. llama.cpp comes as built binaries in the npm package
node-llama-cpp, which is installed into DIRECTORY the first time. llama.cpp tokenizes the prompt and continues it
greedily; the tokens that it chose are then scored in transformers, in float32, on the weights that we read from the
file. Twice: with the file as it is, where llama.cpp rounds activations to 8 bits before each product with blocks, so
that probabilities are near at best; and with a copy whose tensors are all float32, where nothing is rounded, so that
names, order of rows, hyperparameters and vocabulary must give the same to a hundredth of a nat. With --model the
original is asked, too, which shows what other weights look like. Exit status 1: other ids of the prompt, a mean
difference above 0.3 nats with blocks, or one above 0.01 anywhere with the float32 copy.
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
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantforge.model.gguf_file import gguf_files, open_gguf
from quantforge.model.source import TensorSource, open_checkpoint
from quantforge.model.tokenizer import load_tokenizer

PACKAGE = "node-llama-cpp@3.22.1"
MEAN_LIMIT = 0.3
FLOAT_LIMIT = 0.01


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


def continued(node: Path, file: Path, prompt: str, count: int, threads: int) -> dict[str, Any]:
    """What llama.cpp writes after `prompt`."""
    script = Path(__file__).with_suffix(".mjs").resolve()
    command = ["node", str(script), str(file.resolve()), prompt, str(count), str(threads)]
    ran = subprocess.run(command, cwd=node, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def model_of(source: TensorSource) -> Any:
    """A transformers model in float32 with the weights of `source`."""
    config = AutoConfig.from_pretrained(source.path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {key: source.read(key).float() for key in source.keys()}  # noqa: SIM118
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    return model


def compare(label: str, model: Any, found: dict[str, Any]) -> torch.Tensor:
    """Print how near the chosen tokens' log probabilities are; returns their distances in nats."""
    prompt, tokens = found["prompt"], torch.tensor(found["tokens"])
    with torch.no_grad():
        logits = model(torch.tensor([prompt + found["tokens"]])).logits[0, len(prompt) - 1 : -1]
    ours = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens]
    theirs = torch.tensor([math.log(value) for value in found["confidences"]])
    best, apart = int((logits.argmax(-1) == tokens).sum()), (ours - theirs).abs()
    print(
        f"{label}: {best} of {len(tokens)} tokens are its first choice too; log probabilities differ by "
        f"{float(apart.mean()):.4f} nats in the mean, {float(apart.max()):.4f} at most; first token "
        f"{float(theirs[0]):.4f} in llama.cpp, {float(ours[0]):.4f} here",
        flush=True,
    )
    return apart


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("export", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--node", type=Path, default=Path("node-llama-cpp"))
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    install(asked.node)
    [file] = gguf_files(asked.export)
    plain = float_copy(file, asked.node / "float32.gguf")
    blocks, floats = (continued(asked.node, f, asked.prompt, asked.count, asked.threads) for f in (file, plain))
    plain.unlink()
    tokenizer = load_tokenizer(asked.export)
    expected = tokenizer(asked.prompt)["input_ids"]
    print(f"{PACKAGE}, llama.cpp {blocks['llama_cpp']}; {file.name}: {tokenizer.decode(blocks['tokens'])!r}")
    print(f"prompt ids {blocks['prompt']}, those of the checkpoint's tokenizer {expected}")
    model = model_of(open_gguf(asked.export))
    near = compare("blocks, against our dequantized weights", model, blocks)
    exact = compare("float32 copy, against our dequantized weights", model, floats)
    if asked.model:
        compare("blocks, against the original weights", model_of(open_checkpoint(asked.model)), blocks)
    same = blocks["prompt"] == floats["prompt"] == expected
    sys.exit(not same or float(near.mean()) > MEAN_LIMIT or float(exact.max()) > FLOAT_LIMIT)


if __name__ == "__main__":
    main()
