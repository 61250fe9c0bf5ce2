"""Decode speed on the CPU: packed against dense models of transformers, and against GPTQModel, in one run, as ratios.

    python scripts/bench_cpu.py run --model ./SmolLM2-135M-w4g64-gptq --gptqmodel-python ./gptqmodel/bin/python
    python scripts/bench_cpu.py make ./llama-1b-w4g64        # a synthetic Llama of the 1B class, 4 bits, group 64
    python scripts/bench_cpu.py memory ./llama-1b-w4g64      # peak memory of loading it and decoding, against its files
    python scripts/bench_cpu.py layer                        # one layer of 4096 x 4096, against reading its codes

Each contender is a process of its own that loads once and then decodes a token whenever it is asked to. They take turns
of some tokens, in an order that is drawn anew each round, so that whatever else the machine does hits all alike; the
first token of a turn does not count, for it finds the caches and the waiting threads of another. The least time of each
counts. On a machine that is busy with other things, `--clock cpu --threads 1` counts processor time instead. GPTQModel
runs in an environment of its own, in bfloat16, as its CPU kernels want it.
"""

import argparse
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
PROMPT = 16
TURN = 4
"""Tokens that a contender decodes before it is the next one's turn."""
CONTENDERS = "packed-bfloat16 packed-float32 packed_a8-float32 dense-bfloat16 dense-float32 gptqmodel".split()


def make(path: Path, layers: int | None) -> None:
    """Write a Llama of random codes, one layer after another: GPTQ of 4 bits, group 64, symmetric."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from quantforge.formats import CheckpointFacts
    from quantforge.formats.gptq import FORMAT
    from quantforge.quantized import QuantizedWeight
    from quantforge.spec import QuantSpec

    settings = LLAMA_1B | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(architectures=["LlamaForCausalLM"], dtype="bfloat16", **settings)
    hidden, inter = config.hidden_size, config.intermediate_size
    narrow = hidden // config.num_attention_heads * config.num_key_value_heads
    attention = {"q_proj": (hidden, hidden), "k_proj": (narrow, hidden), "v_proj": (narrow, hidden)}
    sites = {f"self_attn.{name}": shape for name, shape in (attention | {"o_proj": (hidden, hidden)}).items()}
    sites |= {f"mlp.{name}_proj": (inter, hidden) for name in ("gate", "up")} | {"mlp.down_proj": (hidden, inter)}
    spec = QuantSpec(4, 64, True, "float16")
    facts = CheckpointFacts({"site": spec}, ("lm_head",), has_zero_zero=False)
    path.mkdir(parents=True)
    torch.manual_seed(0)
    weight_map, norm = {}, torch.ones(hidden, dtype=torch.bfloat16)

    def written(file: str, tensors: dict[str, Any]) -> None:
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    outer = {name: torch.empty(config.vocab_size, hidden, dtype=torch.bfloat16).normal_(0, 0.02)
             for name in ("model.embed_tokens.weight", "lm_head.weight")}  # fmt: skip
    written("outer.safetensors", outer | {"model.norm.weight": norm})
    for layer in range(config.num_hidden_layers):
        tensors = {f"model.layers.{layer}.{n}_layernorm.weight": norm.clone() for n in ("input", "post_attention")}
        for name, (rows, columns) in sites.items():
            weight = QuantizedWeight(
                spec,
                torch.randint(0, 16, (rows, columns), dtype=torch.uint8),
                torch.full((rows, columns // 64), 0.02 / 4.6).half(),
                torch.full((rows, columns // 64), 8, dtype=torch.uint8),
            )
            tensors |= FORMAT.encode(f"model.layers.{layer}.{name}", weight, facts)
        written(f"layer-{layer:03}.safetensors", tensors)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config.quantization_config = FORMAT.config(facts)
    config.save_pretrained(path)


def contender(kind: str, model: str, threads: int, clock: str) -> None:
    """Load, then decode a token for each line on stdin, and answer with its seconds."""
    import torch
    from transformers import DynamicCache

    torch.set_num_threads(threads)
    now = time.process_time if clock == "cpu" else time.perf_counter
    if kind == "gptqmodel":
        from transformers import AutoModelForCausalLM

        found: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, device_map="cpu").eval()
    elif kind.startswith("dense"):
        from transformers import AutoConfig

        from quantforge.runtime.bench import dense_model

        config = AutoConfig.from_pretrained(model)
        found = dense_model(config, getattr(torch, kind.removeprefix("dense-")), torch.device("cpu"))
    else:
        import quantforge

        how, _, dtype = kind.partition("-")
        found = quantforge.load(
            model, dtype=dtype, device="cpu", activations="int8-group" if how == "packed_a8" else "float"
        )
    with torch.inference_mode():
        tokens = torch.arange(PROMPT)[None]
        keyword = "cache" if "cache" in inspect.signature(found.forward).parameters else "past_key_values"
        cache = {keyword: DynamicCache()}
        state = found(tokens, use_cache=True, **cache)
        print("ready", flush=True)
        for _ in sys.stdin:
            began = now()
            last = state.logits[:, -1:].argmax(-1)
            state = found(last, use_cache=True, **cache)
            print(now() - began, flush=True)


def run(
    models: list[str], kinds: list[str], python: str | None, rounds: int, threads: int, clock: str
) -> dict[str, Any]:
    """Every dense model, and GPTQModel, one at a time beside all packed ones: memory holds no more at once."""
    import torch

    from quantforge.runtime.bench import machine

    packed = [kind for kind in kinds if kind.startswith("packed")]
    others = [kind for kind in kinds if kind not in packed]
    results: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "threads": threads,
        "clock": clock,
        "models": {},
    }
    for model in models:
        results["models"][model] = {}
        with tempfile.TemporaryFile("w+") as log:
            running = {kind: _start(kind, model, sys.executable, threads, clock, log) for kind in packed}
            try:
                for other in others:
                    interpreter = python or sys.executable if other == "gptqmodel" else sys.executable
                    opponent = _start(other, model, interpreter, threads, clock, log)
                    try:
                        found = _in_turn(running | {other: opponent}, rounds)
                    finally:
                        _stop(opponent)
                    rates = {kind: round(1 / seconds, 2) for kind, seconds in found.items()}
                    ratios = {kind: round(found[other] / found[kind], 2) for kind in packed}
                    row = {"tokens_per_second": rates, f"times as fast as {other}": ratios, "load": os.getloadavg()[0]}
                    print(f"{model}: {json.dumps(row)}", file=sys.stderr, flush=True)
                    results["models"][model][other] = row
            except (BrokenPipeError, ValueError):
                log.seek(0)
                print(log.read()[-3000:], file=sys.stderr)
                raise
            finally:
                for process in running.values():
                    _stop(process)
    return results


def _in_turn(running: "dict[str, subprocess.Popen[str]]", rounds: int) -> dict[str, float]:
    """The least seconds of a token of each."""
    least = dict.fromkeys(running, float("inf"))
    order = random.Random(0)
    for _ in range(rounds):
        for kind in order.sample(list(running), len(running)):
            times = [_ask(running[kind]) for _ in range(TURN)]
            least[kind] = min(least[kind], *times[1:])
    return least


def _stop(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def _start(kind: str, model: str, python: str, threads: int, clock: str, log: Any) -> "subprocess.Popen[str]":
    """A contender, once it has loaded."""
    command = [python, __file__, "contender", kind, model, "--threads", str(threads), "--clock", clock]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    while (line := process.stdout.readline()) and line.strip() != "ready":
        pass
    return process


def _ask(process: "subprocess.Popen[str]") -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def memory(model: str) -> dict[str, Any]:
    """Peak resident memory of a process that loads a checkpoint and decodes, less that of one that only imports."""
    code = (
        "import sys, resource, torch, transformers, quantforge.runtime\n"
        "from transformers.models.llama import modeling_llama\n"
        "if sys.argv[1]:\n"
        "    import quantforge\n"
        "    m = quantforge.load(sys.argv[1], device='cpu')\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "    m.generate(torch.arange(16)[None], max_new_tokens=2, do_sample=False)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    peaks = []
    for argument in ("", model):
        ran = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, check=True)
        peaks.append([int(line) * 1024 for line in ran.stdout.split()])
    files = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    loaded, decoded = (peak - peaks[0][0] for peak in peaks[1])
    return {
        "file_bytes": files,
        "imports_bytes": peaks[0][0],
        "loaded_bytes": loaded,
        "decoded_bytes": decoded,
        "loaded_to_file": round(loaded / files, 3),
        "decoded_to_file": round(decoded / files, 3),
    }


def layer(threads: int, rounds: int) -> dict[str, Any]:
    """Milliseconds of layers of 4096 x 4096, 4 bits asymmetric, group 64, one token: each level that runs here.

    Eight layers take turns, so that codes come from memory; `read` is what torch needs to add up the codes of one.
    """
    import torch

    from quantforge.kernels import native
    from quantforge.kernels.linear import Grid, PackedLinear
    from quantforge.runtime.bench import least, machine

    torch.set_num_threads(threads)
    size, groups = 4096, 64
    found: dict[str, Any] = {"machine": machine(torch.device("cpu")), "threads": threads}
    codes = torch.randint(0, 16, (size, size), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (size, groups), dtype=torch.uint8)
    grid = Grid(codes, torch.rand(size, groups).half(), zeros, torch.arange(size) // (size // groups))
    x = torch.randn(1, size, dtype=torch.bfloat16)

    def milliseconds(calls: list[Any]) -> float:
        return round(least(calls, rounds, x.device) * 1e3, 3)

    for level in native.LEVELS:
        try:
            library = native.load(level)
        except RuntimeError:
            continue
        if not library.supported():
            continue
        status = native.Status(level, "", library)
        native.status = lambda chosen=status: chosen  # type: ignore[assignment]
        for activations in ("float", "int8-group"):
            layers = [PackedLinear(size, size, bits=4, activations=activations) for _ in range(8)]
            for each in layers:
                each.fill(grid)
            with torch.inference_mode():
                found[f"{level}, {activations}"] = milliseconds([partial(each, x) for each in layers])
                words = [each.weight.view(torch.int64) for each in layers if each.weight is not None]
                read = milliseconds([partial(torch.sum, word) for word in words])
                found["read"] = min(found.get("read", read), read)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("make")
    making.add_argument("path", type=Path)
    making.add_argument("--layers", type=int)
    runs = verbs.add_parser("run")
    runs.add_argument("--model", action="append", required=True)
    runs.add_argument("--gptqmodel-python")
    runs.add_argument("--contenders", default=",".join(CONTENDERS))
    runs.add_argument("--rounds", type=int, default=20)
    runs.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    runs.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    one = verbs.add_parser("contender")
    one.add_argument("kind")
    one.add_argument("model")
    one.add_argument("--threads", type=int, required=True)
    one.add_argument("--clock", required=True)
    alone = verbs.add_parser("layer")
    alone.add_argument("--threads", type=int, default=1)
    alone.add_argument("--rounds", type=int, default=40)
    remembering = verbs.add_parser("memory")
    remembering.add_argument("model")
    chosen = parser.parse_args()
    if chosen.verb == "make":
        make(chosen.path, chosen.layers)
    elif chosen.verb == "contender":
        contender(chosen.kind, chosen.model, chosen.threads, chosen.clock)
    elif chosen.verb == "memory":
        print(json.dumps(memory(chosen.model), indent=2))
    elif chosen.verb == "layer":
        print(json.dumps(layer(chosen.threads, chosen.rounds), indent=2))
    else:
        kinds = [kind for kind in chosen.contenders.split(",") if kind != "gptqmodel" or chosen.gptqmodel_python]
        found = run(chosen.model, kinds, chosen.gptqmodel_python, chosen.rounds, chosen.threads, chosen.clock)
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
