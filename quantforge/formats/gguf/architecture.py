"""What llama.cpp must be told of a Llama or Qwen model: names of tensors, order of rows, hyperparameters.

Specification: the package ``gguf`` (its tables of tensor names and keys) and llama.cpp's loaders (src/models/llama.cpp,
qwen2.cpp, qwen3.cpp).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from quantforge.extras import need

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type of config.json -> architecture of llama.cpp."""

NEEDED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
DEFAULT_THETA = 10000.0
"""Of all these model types, for configs that name none."""

SCALINGS = {  # rope types, each with the parameters that can be written down
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"},
}
ROPE_SIZES = {"original_max_position_embeddings"}
SHOWN = 40
UNSCALED_SUFFIX = "rotary_emb.inv_freq"
"""Computed from the config; some old checkpoints store it as well."""


def gguf_package() -> Any:
    return need("gguf", "--format gguf")


def config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Everything in config.json that llama.cpp computes otherwise, or that the file has no words for."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        yield f"model_type {model_type!r} is not known to this writer; it knows {', '.join(ARCHITECTURES)}"
        return
    needed = [*NEEDED, *(["num_key_value_heads"] * (model_type != "llama")), *(["head_dim"] * (model_type == "qwen3"))]
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        yield f"config.json does not say {', '.join(missing)}, which a GGUF file states"
    sizes = {*needed, "num_key_value_heads", "head_dim", *(["sliding_window"] * (model_type == "mistral"))}
    odd = [*_no_sizes(config, sizes - {"rms_norm_eps"}), *_no_numbers(config, {"rms_norm_eps"})]
    yield from odd
    if not missing and not odd:
        yield from _head_problems(config)
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {config['hidden_act']!r}; llama.cpp computes these models with silu"
    if config.get("use_sliding_window") and model_type != "mistral":
        yield "use_sliding_window is true; llama.cpp attends to everything in Qwen models"
    yield from _rope_problems(config, model_type)


def _rope_problems(config: Mapping[str, Any], model_type: str) -> Iterator[str]:
    """What cannot be said of rotary embeddings."""
    if odd := list(_odd(config, ("rope_scaling", "rope_parameters"), "an object", lambda v: isinstance(v, Mapping))):
        yield from odd
        return
    rope = rope_parameters(config)
    kind = rope["rope_type"]
    known = isinstance(kind, str) and kind in SCALINGS
    if not known or (kind == "llama3" and ARCHITECTURES[model_type] != "llama"):
        yield f"rope_type {kind!r} is not known to this writer for {model_type}; it knows {', '.join(SCALINGS)}"
        return
    numbers = {"rope_theta", *SCALINGS[kind]} - ROPE_SIZES
    odd = [*_no_sizes(rope, SCALINGS[kind] & ROPE_SIZES), *_no_numbers(rope, numbers)]
    odd += _odd(rope, rope.keys() - numbers, "a plain value", lambda value: not isinstance(value, Mapping))
    if odd:
        yield from odd
        return
    needed = SCALINGS[kind] - {"beta_fast", "beta_slow"}
    if lacking := sorted(key for key in needed if rope.get(key) is None):
        yield f"the rope parameters do not say {', '.join(lacking)}, which rope_type {kind!r} needs"
    elif kind == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        yield f"high_freq_factor {rope['high_freq_factor']} must be above low_freq_factor {rope['low_freq_factor']}"
    meant = {key for key, value in rope.items() if value is not None} - SCALINGS[kind] - {"rope_type", "rope_theta"}
    if rope.get("partial_rotary_factor") in (1, None):
        meant -= {"partial_rotary_factor"}
    if kind == "default":
        meant &= {"partial_rotary_factor"}  # the others mean nothing without a scaling
    if meant:
        yield f"rope parameters that this writer does not know for rope_type {kind!r}: {', '.join(sorted(meant))}"


def _head_problems(config: Mapping[str, Any]) -> Iterator[str]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if not config.get("head_dim") and hidden % heads:
        yield f"{heads} heads do not divide hidden_size {hidden}, and there is no head_dim"
    elif head_size(config) % 2:
        yield f"heads have {head_size(config)} dimensions, which rotary embeddings turn in pairs"


def _no_sizes(values: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    return _odd(values, keys, "a whole number above 0", lambda value: type(value) is int and 0 < value < 1 << 31)


def _no_numbers(values: Mapping[str, Any], keys: Iterable[str]) -> Iterator[str]:
    return _odd(values, keys, "a number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf)


def _odd(values: Mapping[str, Any], keys: Iterable[str], wanted: str, fits: Callable[[Any], bool]) -> Iterator[str]:
    """A problem for each value that is there and is not what is wanted."""
    for key in sorted(keys):
        if (value := values.get(key)) is not None and not fits(value):
            yield f"{key} is {repr(value)[:SHOWN]}; {wanted} is needed"


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, or what older configs called ``rope_theta`` and ``rope_scaling``, under today's names."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.pop("type", None)
    thetas = (rope.get("rope_theta"), config.get("rope_theta"), DEFAULT_THETA)
    return {
        **rope,
        "rope_type": rope.get("rope_type") or kind or "default",
        "rope_theta": next(theta for theta in thetas if theta is not None),
    }


def head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def add_hyperparameters(writer: Any, config: Mapping[str, Any]) -> None:
    """Everything about the model's shape and arithmetic, into a ``gguf.GGUFWriter``."""
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] == "mistral" and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    rope = rope_parameters(config)
    writer.add_rope_dimension_count(head_size(config))
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] in ("linear", "yarn"):
        kinds = gguf_package().RopeScalingType
        writer.add_rope_scaling_type(kinds.LINEAR if rope["rope_type"] == "linear" else kinds.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("beta_fast") is not None:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        if rope.get("beta_slow") is not None:
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def rope_factors(config: Mapping[str, Any]) -> torch.Tensor | None:
    """What llama.cpp divides rotary frequencies by, float32 [head_dim / 2]; None unless the rope type is llama3.

    Wavelengths beyond ``original / low_freq_factor`` are stretched by `factor`, those under ``original /
    high_freq_factor`` stay, and frequencies between go over smoothly (transformers, modeling_rope_utils.py,
    `_compute_llama3_parameters`).
    """
    rope = rope_parameters(config)
    if rope["rope_type"] != "llama3":
        return None
    size = head_size(config)
    frequency = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    factors: torch.Tensor = 1 / (kept + (1 - kept) / rope["factor"])
    return factors.to(torch.float32)


def tensor_names(config: Mapping[str, Any], keys: list[str]) -> dict[str, str | None]:
    """Each checkpoint key's name in the file; None where the architecture has no such tensor."""
    gguf = gguf_package()
    wanted = ARCHITECTURES[config["model_type"]]
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)
    table = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    return {
        key: table.get_name(key, try_suffixes=(".weight", ".bias")) for key in keys if not key.endswith(UNSCALED_SUFFIX)
    }


def row_order(config: Mapping[str, Any], key: str) -> torch.Tensor | None:
    """Which row of q_proj or k_proj, or entry of their bias, goes where in the file, int64 [out]; None elsewhere.

    Llama's rotary halves (i, i + size / 2) become neighbors (2 i, 2 i + 1), which is how llama.cpp turns them for this
    architecture. Qwen models keep their order.
    """
    module = key.rpartition(".")[0].rpartition(".")[2]
    if ARCHITECTURES[config["model_type"]] != "llama" or module not in ("q_proj", "k_proj"):
        return None
    heads = config["num_attention_heads"]
    if module == "k_proj":
        heads = config.get("num_key_value_heads") or heads
    size = head_size(config)
    return torch.arange(heads * size).reshape(heads, 2, size // 2).transpose(1, 2).flatten()
