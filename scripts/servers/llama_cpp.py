"""Compare llama.cpp on one of our GGUF exports with the same dequantized weights in transformers.

    python scripts/servers/llama_cpp.py EXPORT [--model ORIGINAL] [--node DIRECTORY] [--prompt TEXT] [--count 24]

Needs Python with quantforge[gguf], and node and npm. llama.cpp comes as built binaries in the npm package
node-llama-cpp, which is installed into DIRECTORY the first time. Both start from the same text, for which both
tokenizers must give the same ids. llama.cpp then continues greedily, and the tokens that it chose are scored in transformers, in
float32, on the weights that we read from the file: as they are, and once more with activations rounded where llama.cpp
rounds them (to 8 bits in blocks of 32 before each quantized matrix, to bfloat16 before the head). With --model the
original is asked, too, which shows what other weights look like. Exit status 1: other ids, or a mean difference above
0.05 nats with rounded activations.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quantforge.model.gguf_file import gguf_files, open_gguf
from quantforge.model.source import TensorSource, open_checkpoint
from quantforge.model.tokenizer import load_tokenizer

PACKAGE = "node-llama-cpp@3.22.1"
LIMIT = 0.05


def install(node: Path) -> None:
    """The npm package with its built binaries; nothing is compiled."""
    if not (node / "node_modules" / "node-llama-cpp").is_dir():
        node.mkdir(parents=True, exist_ok=True)
        (node / "package.json").write_text('{"private": true}\n')
        subprocess.run(["npm", "install", "--ignore-scripts", PACKAGE], cwd=node, check=True, stdout=sys.stderr)


def continued(node: Path, file: Path, prompt: str, count: int, threads: int) -> dict[str, Any]:
    """What llama.cpp writes after `prompt`."""
    script = Path(__file__).with_suffix(".mjs").resolve()
    command = ["node", str(script), str(file.resolve()), prompt, str(count), str(threads)]
    ran = subprocess.run(command, cwd=node, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def q8_blocks(x: torch.Tensor) -> torch.Tensor:
    """Activations as llama.cpp multiplies them with blocks: signed bytes and a float16 scale for 32 of them."""
    blocks = x.unflatten(-1, (-1, 32))
    most = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(most > 0, 127 / most, 0)).round()
    return (codes * (most / 127).half().float()).flatten(-2)


def logprobs(source: TensorSource, ids: list[int], *, rounded: bool = False) -> torch.Tensor:
    """Log probabilities of every next token, [tokens, vocabulary]; `rounded` as in the module's docstring."""
    config = AutoConfig.from_pretrained(source.path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {key: source.read(key).float() for key in source.keys()}  # noqa: SIM118
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    for name, module in model.named_modules():
        if rounded and isinstance(module, torch.nn.Linear):
            key = f"{name}.weight"
            blocks = key in state and source.is_packed(key)
            act = q8_blocks if blocks else lambda x: x.bfloat16().float()
            module.register_forward_pre_hook(lambda _, inputs, act=act: (act(inputs[0]),))
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def compare(label: str, rows: torch.Tensor, tokens: list[int], theirs: torch.Tensor) -> float:
    """Print how near the chosen tokens' probabilities are; returns their mean distance in nats."""
    ours = rows[torch.arange(len(tokens)), torch.tensor(tokens)]
    best = int((rows.argmax(-1) == torch.tensor(tokens)).sum())
    apart = (ours - theirs).abs()
    print(
        f"{label}: {best} of {len(tokens)} tokens are its first choice too; log probabilities differ by "
        f"{float(apart.mean()):.4f} nats in the mean, {float(apart.max()):.4f} at most; the first token: "
        f"{float(theirs[0]):.4f} in llama.cpp, {float(ours[0]):.4f} here"
    )
    return float(apart.mean())


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
    found = continued(asked.node, file, asked.prompt, asked.count, asked.threads)
    tokenizer = load_tokenizer(asked.export)
    expected = tokenizer(asked.prompt)["input_ids"]
    print(f"{PACKAGE}, llama.cpp {found['llama_cpp']}; {file.name}: {tokenizer.decode(found['tokens'])!r}")
    print(f"prompt ids {found['prompt']}, those of the checkpoint's tokenizer {expected}")
    ids = [*found["prompt"], *found["tokens"]]
    steps = slice(len(found["prompt"]) - 1, len(ids) - 1)
    theirs = torch.tensor([math.log(value) for value in found["confidences"]])
    ours = open_gguf(asked.export)
    compare("our dequantized weights", logprobs(ours, ids)[steps], found["tokens"], theirs)
    rounded = logprobs(ours, ids, rounded=True)[steps]
    apart = compare("the same, activations rounded", rounded, found["tokens"], theirs)
    if asked.model:
        compare("the original weights", logprobs(open_checkpoint(asked.model), ids)[steps], found["tokens"], theirs)
    sys.exit(found["prompt"] != expected or apart > LIMIT)


if __name__ == "__main__":
    main()
