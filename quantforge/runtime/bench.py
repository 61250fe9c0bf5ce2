"""How fast a checkpoint runs here: whole model and single layers, packed and as dense matrices of the same shapes."""

import gc
import inspect
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quantforge.errors import UsageError
from quantforge.kernels import native
from quantforge.kernels.linear import PackedLinear
from quantforge.runtime.load import DTYPES, load
from quantforge.runtime.packing import packed_layers

LAYERS_AT_MOST = 8
"""Layers of one shape that take turns, so that weights come from memory and not from a cache."""

Progress = Callable[[str, int, int], None]


@dataclass
class Speed:
    """One way to run the model. Times are the least of some repeats."""

    name: str
    weight_bytes: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@dataclass
class LayerTime:
    """Layers of one shape, `tokens` at a time; seconds for one layer, the least of some repeats.

    `read_seconds` is what torch needs to add up the bytes of the codes, on the CPU: near what memory allows.
    `peak_share` is, on a GPU that tells its memory's speed, how much of it the packed bytes took.
    """

    out_features: int
    in_features: int
    bits: int
    group_size: int
    layers: int
    tokens: int
    packed_seconds: float
    dense_seconds: dict[str, float]
    packed_bytes: int
    read_seconds: float | None
    peak_share: float | None


@dataclass
class Benchmark:
    """Everything that was measured, and on what."""

    checkpoint: str
    machine: dict[str, Any]
    prompt_tokens: int
    new_tokens: int
    models: list[Speed] = field(default_factory=list)
    layers: list[LayerTime] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def machine(device: torch.device) -> dict[str, Any]:
    """Processor or GPU, threads, versions, the kernel in use and how busy the machine is."""
    import transformers

    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["memory_bytes_per_second"] = memory_speed(torch.cuda.get_device_properties(device))
    else:
        status = native.status()
        found["kernel"] = status.level or f"none ({status.reason})"
    return found


def memory_speed(properties: Any) -> float | None:
    """Bytes a second that a GPU's memory delivers at most, by its driver; None where torch does not pass that on.

    Both edges of a clock in kHz, on a bus of so many bits.
    """
    clock, width = (getattr(properties, f"memory_{name}", 0) for name in ("clock_rate", "bus_width"))
    return 2 * clock * 1e3 * width / 8 or None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def benchmark(
    checkpoint: str,
    *,
    prompt_tokens: int = 128,
    new_tokens: int = 16,
    repeats: int = 3,
    device: str = "auto",
    dense: bool = True,
    trust_remote_code: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Benchmark:
    """Measure a packed checkpoint, in bfloat16 and float32, against dense models of the same shapes.

    Dense models have random weights and are built after the packed one is gone; float32 takes 4 bytes a parameter.

    Args:
        prompt_tokens: tokens of a prefill.
        new_tokens: tokens decoded one by one after it.
        repeats: of everything; the least time counts.
        dense: measure dense models and layers as well.

    Raises:
        UsageError: nothing is packed, or a count that is not positive.
        SourceError: as `load`.
    """
    if min(prompt_tokens, repeats) < 1 or new_tokens < 2:
        raise UsageError("a benchmark needs a token to fill in, two to decode and one repeat at least")
    model = load(checkpoint, dtype="bfloat16", device=device, trust_remote_code=trust_remote_code)
    if not any(True for _ in packed_layers(model)):
        raise UsageError(f"{checkpoint}: nothing is packed; bench compares a quantized checkpoint with dense models")
    place, config = model.device, model.config
    found = Benchmark(checkpoint, machine(place), prompt_tokens, new_tokens)
    steps, done = 2 + 2 * dense + 1, 0

    def measured(name: str, tried: Any) -> None:
        nonlocal done
        prefill, decode = _speeds(tried, prompt_tokens, new_tokens, repeats)
        found.models.append(Speed(name, _bytes(tried), prefill, decode))
        done += 1
        progress("models and layers", done, steps)

    measured("packed, bfloat16", model)
    found.layers = list(_layer_times(model, (1, prompt_tokens), repeats, dense=dense))
    done += 1
    measured("packed, float32", nn.Module.float(model))
    del model
    for name in ("bfloat16", "float32") if dense else ():
        gc.collect()
        measured(f"dense, {name}", dense_model(config, DTYPES[name], place, trust_remote_code=trust_remote_code))
    return found


def dense_model(config: Any, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False) -> Any:
    """The model of a config with random weights in `dtype`, made one tensor after another."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    plain = type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "quantization_config"})
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            plain, dtype=dtype, trust_remote_code=trust_remote_code
        )
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.empty(parameter.shape, dtype=dtype, device=device).uniform_(-0.02, 0.02)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
    model.tie_weights()
    return model.to(device).eval()


def _bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, shared ones once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@torch.inference_mode()
def _speeds(model: Any, prompt: int, new: int, repeats: int) -> tuple[float, float]:
    """Tokens a second of a prefill and of decoding, batch 1, the best of some repeats."""
    from transformers import DynamicCache

    tokens = torch.arange(prompt, device=model.device).remainder_(model.config.get_text_config().vocab_size)[None]
    prefill = decode = float("inf")
    named = inspect.signature(model.forward).parameters  # transformers is about to rename it
    keyword = "cache" if "cache" in named else "past_key_values"
    for _ in range(repeats):
        cache = {keyword: DynamicCache(config=model.config)}
        began = _now(model.device)
        found = model(tokens, use_cache=True, logits_to_keep=1, **cache)
        prefill = min(prefill, _now(model.device) - began)
        for _ in range(new):
            began = _now(model.device)
            last = found.logits[:, -1:].argmax(-1)
            found = model(last, use_cache=True, **cache)
            decode = min(decode, _now(model.device) - began)
    return prompt / prefill, 1 / decode


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.inference_mode()
def _layer_times(model: nn.Module, counts: tuple[int, ...], repeats: int, *, dense: bool) -> Iterator[LayerTime]:
    shapes: dict[tuple[int, int, int, int], list[PackedLinear]] = {}
    for _, layer in packed_layers(model):
        shapes.setdefault((layer.out_features, layer.in_features, layer.bits, layer.group_size), []).append(layer)
    for (out, inp, bits, group), layers in shapes.items():
        some = layers[:LAYERS_AT_MOST]
        assert some[0].weight is not None
        device = some[0].weight.device
        matrices = {
            name: [torch.empty(out, inp, dtype=DTYPES[name], device=device).uniform_(-0.02, 0.02) for _ in some[:4]]
            for name in (("bfloat16", "float32") if dense else ())
        }
        speed = memory_speed(torch.cuda.get_device_properties(device)) if device.type == "cuda" else None
        read = None
        if device.type == "cpu":
            words = [layer.weight.view(torch.int64) for layer in some if layer.weight is not None]
            read = least([partial(torch.sum, word) for word in words], repeats, device)
        for tokens in counts:
            x = torch.randn(tokens, inp, dtype=torch.bfloat16, device=device)
            packed = least([partial(layer, x) for layer in some], repeats, device)
            times = {}
            for name, own in matrices.items():
                value = x.to(DTYPES[name])
                times[name] = least([partial(functional.linear, value, w) for w in own], repeats, device)
            size = some[0].packed_bytes
            share = None if speed is None else size / packed / speed
            yield LayerTime(out, inp, bits, group, len(layers), tokens, packed, times, size, read, share)


def least(calls: list[Callable[[], Any]], repeats: int, device: torch.device) -> float:
    """Seconds of the fastest of the calls, which take turns."""
    least = float("inf")
    for _ in range(repeats):
        for call in calls:
            began = _now(device)
            call()
            least = min(least, _now(device) - began)
    return least
