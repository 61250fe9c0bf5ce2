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


def likeliest(scores: torch.Tensor) -> list[tuple[int, float]]:
    """The ten tokens with the highest scores [vocab], with these."""
    top = scores.topk(10)
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


@torch.no_grad()
def continued(model: Any, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    """Each prompt by `count` tokens, all in one batch, padded on the left, with the cache of keys and values."""
    width = max(map(len, prompts))
    lacks = [width - len(prompt) for prompt in prompts]
    given = torch.tensor([[prompt[0]] * lack + prompt for prompt, lack in zip(prompts, lacks, strict=True)])
    mask = torch.tensor([[0] * lack + [1] * (width - lack) for lack in lacks])
    tokens, logprobs, first, cache = [], [], None, None
    while len(tokens) < count:
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -given.shape[1] :]
        output = model(given, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
        cache, scores = output.past_key_values, output.logits[:, -1].float().log_softmax(-1)
        first = first or [likeliest(row) for row in scores]
        given = scores.argmax(-1, keepdim=True)
        tokens.append(given)
        logprobs.append(scores.gather(-1, given))
        mask = torch.cat([mask, torch.ones_like(given)], dim=1)
    chosen, chances = torch.cat(tokens, dim=1).tolist(), torch.cat(logprobs, dim=1).tolist()
    return [
        {"prompt": prompt, "tokens": own, "logprobs": chance, "first": start}
        for prompt, own, chance, start in zip(prompts, chosen, chances, first or [], strict=True)
    ]


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
    answers = continued(model, [tokenizer(prompt)["input_ids"] for prompt in prompts], int(count))
    modules = Counter(type(module).__name__ for module in model.modules() if "Linear" in type(module).__name__)
    seconds = {"load_seconds": round(loaded - started, 1), "answer_seconds": round(time.monotonic() - loaded, 1)}
    print(json.dumps({"modules": dict(modules), **seconds, "answers": answers}))


if __name__ == "__main__":
    main()
