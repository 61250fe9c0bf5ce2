"""What a model takes to serve: its weights, and the cache of keys and values of every layer, from its config alone.

Attention with heads of its own for keys and values stores ``2 * kv_heads * head_dim`` numbers a token and layer (fewer
heads than queries: GQA, one: MQA). Latent attention (DeepSeek-V2, arXiv 2405.04434) stores the compressed latent and
the shared rotary key instead, ``kv_lora_rank + qk_rope_head_dim`` numbers. A layer with a sliding window stores its
last `window` tokens. Linear attention has a state of constant size per sequence (gated delta rule: arXiv 2412.06464).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KV_BITS = (16, 8, 4)
STATE_BYTES = 4
"""Recurrent states of linear attention are kept in float32."""

WINDOWED = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
FULL = "full_attention"
ATTENTION = {"attention": FULL, "full_attention": FULL, "hybrid": FULL, "*": FULL} | {kind: kind for kind in WINDOWED}
LINEAR = "linear_attention"
WITHOUT = ("mlp", "moe")
"""Layers of hybrid stacks that hold no mixer, and so no cache."""


@dataclass(frozen=True)
class LayerCache:
    """What layers of one kind keep on each device.

    Attributes:
        label: the kind in words, such as ``8 key-value heads of 128``.
        layers: how many there are.
        numbers: stored a token and layer; 0 when nothing grows with the context.
        window: the most tokens that are kept; None for all.
        state_bytes: kept a sequence and layer, whatever its length.
        counted: False when the config does not say how much it is, and nothing was counted.
    """

    label: str
    layers: int
    numbers: int
    window: int | None = None
    state_bytes: int = 0
    counted: bool = True

    def bytes_for(self, context: int, batch: int, bits: int) -> int:
        """Bytes for `batch` sequences of `context` tokens, numbers of `bits` bits (their scales not counted)."""
        tokens = context if self.window is None else min(context, self.window)
        return self.layers * batch * (tokens * self.numbers * bits // 8 + self.state_bytes)


def layer_caches(config: Any, tensor_parallel: int = 1) -> list[LayerCache]:
    """The caches of a model, layers of one kind together.

    Args:
        config: the text part of a transformers config, or anything with its attributes.
        tensor_parallel: over how many devices heads are split; fewer heads than devices are repeated, and latents and
            states of linear attention are taken to be whole on each.
    """
    return [_cache(kind, layers, config, tensor_parallel) for kind, layers in Counter(_kinds(config)).items()]


def cache_bytes(caches: list[LayerCache], context: int, batch: int, bits: int) -> int:
    """Bytes of all caches together."""
    return sum(cache.bytes_for(context, batch, bits) for cache in caches)


def caching_layers(config: Any) -> list[int]:
    """Which layers keep keys and values of their own; none when it is a latent that they keep."""
    attention = (FULL, *WINDOWED)
    return [] if is_latent(config) else [i for i, kind in enumerate(_every_kind(config)) if kind in attention]


def kv_heads(config: Any) -> int:
    """Key and value heads; some configs say only that there is one (``multi_query``)."""
    if getattr(config, "multi_query", False) is True and getattr(config, "new_decoder_architecture", False) is not True:
        return 1
    named = _number(config, "num_key_value_heads") or _number(config, "num_kv_heads")
    return named or _number(config, "num_attention_heads")


def is_latent(config: Any) -> bool:
    """Whether attention keeps a compressed latent."""
    return _number(config, "kv_lora_rank") > 0


def _kinds(config: Any) -> Iterator[str]:
    """The kind of each layer that keeps a cache of its own, as transformers names it."""
    return (kind for kind in _every_kind(config) if kind not in WITHOUT)


def _every_kind(config: Any) -> Iterator[str]:
    """The kind of each layer, without the last ones where these read the caches of layers before them."""
    count = _number(config, "num_hidden_layers")
    listed = next((list(v) for key in ("layer_types", "layers_block_type") if (v := getattr(config, key, None))), None)
    kinds = listed if listed is not None and len(listed) == count else None
    if kinds is None and _number(config, "num_attention_heads") == 0:
        kinds = [str(getattr(config, "model_type", "unknown"))] * count
    if kinds is None:
        windowed = _number(config, "sliding_window") and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if windowed else FULL] * count
    shared = _number(config, "num_kv_shared_layers")
    yield from (ATTENTION.get(kind, kind) for kind in kinds[: count - shared])


def _cache(kind: str, layers: int, config: Any, tensor_parallel: int) -> LayerCache:
    if kind == LINEAR and (state := _linear_state(config)):
        return LayerCache("linear attention, a state of constant size", layers, 0, None, state)
    if kind != FULL and kind not in WINDOWED:
        return LayerCache(kind.replace("_", " "), layers, 0, counted=False)
    window = _number(config, WINDOWED[kind]) or None if kind in WINDOWED else None
    within = f", the last {window} tokens" if window else ""
    rank = _number(config, "kv_lora_rank")
    if rank:
        rotary = _number(config, "qk_rope_head_dim")
        return LayerCache(f"latent of {rank} + {rotary}{within}", layers, rank + rotary, window)
    queries = _number(config, "num_attention_heads")
    heads = kv_heads(config)
    head_dim = _number(config, "head_dim") or _number(config, "hidden_size") // max(1, queries)
    value_dim = _number(config, "v_head_dim") or head_dim
    own = -(-heads // tensor_parallel)
    split = f" ({own} on each device)" if tensor_parallel > 1 else ""
    size = f"{head_dim}" if value_dim == head_dim else f"{head_dim} and {value_dim}"
    return LayerCache(f"{heads} key-value heads of {size}{split}{within}", layers, own * (head_dim + value_dim), window)


def _linear_state(config: Any) -> int:
    """Bytes of a layer's state for one sequence: a matrix a value head, and what its convolution looks back on."""
    keys, values = _number(config, "linear_num_key_heads"), _number(config, "linear_num_value_heads")
    key_dim, value_dim = _number(config, "linear_key_head_dim"), _number(config, "linear_value_head_dim")
    channels = 2 * keys * key_dim + values * value_dim
    return STATE_BYTES * (values * key_dim * value_dim + channels * _number(config, "linear_conv_kernel_dim"))


def _number(config: Any, name: str) -> int:
    """A whole number of the config; 0 where it has none."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
