"""Peak memory of the quantize command on a model and on a synthetic one of the same layers, four times as many.

    python scripts/memory_flat.py MODEL --text FILE --work DIR [--times 4] [--nsamples 8]

The synthetic model repeats the real layers' tensors under new names; everything else is the same. Prints peak resident
memory (kB from the kernel's own accounting) and seconds of both whole processes.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import sys
import time
from pathlib import Path


def deepen(model: Path, target: Path, times: int) -> None:
    """Write a copy of a Llama-like checkpoint with its decoder layers repeated `times` times."""
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True)
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    tensors = load_file(model / "model.safetensors")
    repeated = {}
    for key, tensor in tensors.items():
        found = re.match(r"(model\.layers\.)(\d+)(\..*)", key)
        copies = range(times) if found else range(1)
        for copy in copies:
            name = f"{found[1]}{int(found[2]) + copy * layers}{found[3]}" if found else key
            repeated[name] = tensor.clone()
    save_file(repeated, target / "model.safetensors", metadata={"format": "pt"})
    config["num_hidden_layers"] = layers * times
    (target / "config.json").write_text(json.dumps(config))
    for file in model.glob("*token*"):
        shutil.copy(file, target)


def measure(model: Path, output: Path, args: argparse.Namespace) -> tuple[int, float, float]:
    """(peak resident kB, CPU seconds, wall seconds) of one quantize command."""
    command = [
        *(sys.executable, "-m", "quantforge", "quantize", str(model), "--output", str(output), "--quiet"),
        *("--group-size", "64", "--dataset", args.text, "--nsamples", str(args.nsamples)),
    ]
    started = time.monotonic()
    pid = os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    )
    _, status, usage = os.wait4(pid, 0)
    if status:
        sys.exit(f"quantize failed with status {status}")
    return usage.ru_maxrss, usage.ru_utime + usage.ru_stime, time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--nsamples", type=int, default=8)
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    # in a process of its own: the kernel starts a child's peak at what its parent had resident
    worker = multiprocessing.get_context("spawn").Process(
        target=deepen, args=(args.model, args.work / "deep", args.times)
    )
    worker.start()
    worker.join()
    if worker.exitcode:
        sys.exit("the deeper model could not be written")
    print("| model | weights MB | peak RSS MB | CPU s | wall s |\n|---|---|---|---|---|")
    for name, model in (("as it is", args.model), (f"{args.times} x the layers", args.work / "deep")):
        peak, cpu, wall = measure(model, args.work / f"out-{model.name}", args)
        size = (model / "model.safetensors").stat().st_size
        print(f"| {name} | {size / 1e6:.0f} | {peak / 1e3:.0f} | {cpu:.0f} | {wall:.0f} |", flush=True)


if __name__ == "__main__":
    main()
