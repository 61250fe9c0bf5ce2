"""Continue prompts greedily with `from_pretrained`, in an environment without quantforge; for transformers_loader.py.

    python from_pretrained.py CHECKPOINT COUNT {default,dequantize,gguf:FILE} < prompts.json

Prints one JSON object as its last line: token ids, log probabilities, and which modules did the work. Float32, CPU.
"""

import json
import sys
import time
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig


@torch.no_grad()
def continued(model: Any, prompt: list[int], count: int) -> dict[str, Any]:
    """`count` tokens, one by one, with the cache of keys and values."""
    tokens: list[int] = []
    logprobs: list[float] = []
    first: list[tuple[int, float]] = []
    given, cache = torch.tensor([prompt]), None
    while len(tokens) < count:
        output = model(given, past_key_values=cache, use_cache=True)
        cache, scores = output.past_key_values, output.logits[0, -1].float().log_softmax(-1)
        if not first:
            likeliest = scores.topk(10)
            first = list(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores[tokens[-1]]))
        given = torch.tensor([tokens[-1:]])
    return {"prompt": prompt, "tokens": tokens, "logprobs": logprobs, "first": first}


def main() -> None:
    checkpoint, count, way = sys.argv[1:]
    prompts = json.load(sys.stdin)
    kind, _, file = way.partition(":")
    source = {"gguf_file": file} if kind == "gguf" else {}
    settings = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if kind == "dequantize" else {}
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **source)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, device_map="cpu", **source, **settings
    ).eval()
    loaded = time.monotonic()
    answers = [continued(model, tokenizer(prompt)["input_ids"], int(count)) for prompt in prompts]
    modules = Counter(type(module).__name__ for module in model.modules() if "Linear" in type(module).__name__)
    seconds = {"load_seconds": round(loaded - started, 1), "answer_seconds": round(time.monotonic() - loaded, 1)}
    print(json.dumps({"modules": dict(modules), **seconds, "answers": answers}))


if __name__ == "__main__":
    main()
