"""CPU seconds and peak memory of quantizing one model with this tool and with others, on the same calibration tokens.

    python scripts/bench_peers.py measure MODEL --text FILE --work DIR [--nsamples 64] [--seqlen 512] [--asym]
        [--peer llmcompressor=PYTHON] [--peer gptqmodel=PYTHON] [--peer autoround=PYTHON]

PYTHON is the interpreter of an environment that has the peer (their requirements conflict, so one environment each).
Everyone quantizes every linear layer of the decoder to 4 bits, group 64, symmetric (with --asym, asymmetric), in
float32 on the CPU with the same number of threads, from the same tokens. Figures are of whole processes, from the
kernel's accounting (wait4), imports included. Outputs stay in DIR, to be scored with `scripts/quality.py --rows
PATH`; those that exist are not made again.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any


def run_llmcompressor(model: str, tokens: Any, output: str, symmetric: bool) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    loaded, tokenizer = _loaded(model)
    rows = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": tokens.ne(-1).long().tolist()})
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": symmetric}}
    oneshot(
        model=loaded,
        dataset=rows,
        recipe=[GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"])],
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
        shuffle_calibration_samples=False,
        batch_size=1,
    )
    loaded.save_pretrained(output, save_compressed=True)
    tokenizer.save_pretrained(output)


def run_gptqmodel(model: str, tokens: Any, output: str, symmetric: bool) -> None:
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig

    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in tokens]
    config = QuantizeConfig(bits=4, group_size=64, sym=symmetric)
    loaded = GPTQModel.load(model, config, device="cpu", dtype=torch.float32)
    loaded.quantize(rows, batch_size=1)
    loaded.save(output)


def run_autoround(model: str, tokens: Any, output: str, symmetric: bool) -> None:
    import torch
    from auto_round import AutoRound

    loaded, tokenizer = _loaded(model)
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in tokens]
    rounding = AutoRound(
        loaded, tokenizer, bits=4, group_size=64, sym=symmetric, iters=0, nsamples=len(tokens), seqlen=tokens.shape[1],
        dataset=rows, batch_size=8, device_map="cpu", amp=False,
    )  # fmt: skip
    rounding.quantize_and_save(output, format="auto_gptq")


PEERS = {"llmcompressor": run_llmcompressor, "gptqmodel": run_gptqmodel, "autoround": run_autoround}


def _loaded(model: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), AutoTokenizer.from_pretrained(model)


def run_peer(args: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(args.threads)
    tokens = torch.tensor(json.loads(args.tokens.read_text()))
    model, output = str(Path(args.model).resolve()), Path(args.output).resolve()
    os.chdir(output.parent)  # some leave logs where they are started
    PEERS[args.peer](model, tokens, str(output), not args.asym)


def measure(args: argparse.Namespace) -> None:
    from quantforge.calibration import build_calibration
    from quantforge.model.tokenizer import load_tokenizer

    args.work.mkdir(parents=True, exist_ok=True)
    tokens = args.work / "tokens.json"
    calibration = build_calibration(
        load_tokenizer(Path(args.model)), dataset=args.text, nsamples=args.nsamples, seqlen=args.seqlen, bos="never"
    )
    tokens.write_text(json.dumps(calibration.tokens.tolist()))
    asym = ["--asym"] * args.asym
    ours = [
        *(sys.executable, "-m", "quantforge", "quantize", args.model, "--output", str(args.work / "quantforge")),
        *("--bits", "4", "--group-size", "64", "--dataset", args.text, "--nsamples", str(args.nsamples)),
        *("--seqlen", str(args.seqlen), "--bos", "never", *asym),
    ]
    commands = {"quantforge": ours}
    for peer in args.peer:
        name, _, python = peer.partition("=")
        commands[name] = [
            *(python, __file__, "run-peer", name, args.model, "--tokens", str(tokens)),
            *("--output", str(args.work / name), "--threads", str(args.threads), *asym),
        ]
    print("| tool | CPU s | peak RSS MB | wall s |\n|---|---|---|---|")
    for name, command in commands.items():
        output, log = args.work / name, args.work / f"{name}.log"
        if output.exists():
            print(f"| {name} | {output} exists, skipped | | |", flush=True)
            continue
        status, peak, cpu, wall = process_cost(command, log, args.threads)
        if status:
            shutil.rmtree(output, ignore_errors=True)  # or the next call would take it for finished
            print(f"| {name} | failed with status {status}, see {log} | | |", flush=True)
        else:
            print(f"| {name} | {cpu:.0f} | {peak / 1e3:.0f} | {wall:.0f} |", flush=True)


def process_cost(command: list[str], log: Path, threads: int) -> tuple[int, int, float, float]:
    """(exit status, peak resident kB, CPU seconds, wall seconds) of a whole process, children included."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GPTQMODEL_CPU_WORKERS": str(max(2, threads)),
        "HF_HUB_OFFLINE": "1",
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [(os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o644), (os.POSIX_SPAWN_DUP2, 1, 2)]
    started = time.monotonic()
    pid = os.posix_spawn(command[0], command, environment, file_actions=actions)
    _, status, usage = os.wait4(pid, 0)
    return (
        os.waitstatus_to_exitcode(status),
        usage.ru_maxrss,
        usage.ru_utime + usage.ru_stime,
        time.monotonic() - started,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    outer = verbs.add_parser("measure")
    outer.add_argument("model")
    outer.add_argument("--text", required=True)
    outer.add_argument("--work", type=Path, required=True)
    outer.add_argument("--nsamples", type=int, default=64)
    outer.add_argument("--seqlen", type=int, default=512)
    outer.add_argument("--threads", type=int, default=2)
    outer.add_argument("--asym", action="store_true")
    outer.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    outer.set_defaults(run=measure)
    inner = verbs.add_parser("run-peer")
    inner.add_argument("peer", choices=PEERS)
    inner.add_argument("model")
    inner.add_argument("--tokens", type=Path, required=True)
    inner.add_argument("--output", required=True)
    inner.add_argument("--threads", type=int, required=True)
    inner.add_argument("--asym", action="store_true")
    inner.set_defaults(run=run_peer)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
