"""What caches of keys and values take, against numbers counted by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from quantforge.pipeline.serving import cache_bytes, layer_caches


def config(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**({"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512} | values))


def bytes_of(given: SimpleNamespace, context: int, batch: int = 1, bits: int = 16, tp: int = 1) -> int:
    return cache_bytes(layer_caches(given, tp), context, batch, bits)


def test_every_head_of_its_own_grouped_and_shared_by_all() -> None:
    assert bytes_of(config(), 10) == 4 * 10 * 2 * 8 * 64 * 2
    assert bytes_of(config(num_key_value_heads=2), 10) == 4 * 10 * 2 * 2 * 64 * 2
    assert bytes_of(config(num_key_value_heads=1, head_dim=96), 10) == 4 * 10 * 2 * 96 * 2
    assert bytes_of(config(multi_query=True), 10) == 4 * 10 * 2 * 1 * 64 * 2


def test_a_70b_llama_takes_327680_bytes_a_token() -> None:
    llama = config(num_hidden_layers=80, num_attention_heads=64, hidden_size=8192, num_key_value_heads=8)
    assert bytes_of(llama, 1) == 327_680
    assert bytes_of(llama, 8192, batch=8) == 8192 * 8 * 327_680  # 21.5 GB
    assert bytes_of(llama, 8192, batch=8, bits=8) == 8192 * 4 * 327_680
    assert bytes_of(llama, 8192, batch=8, bits=4) == 8192 * 2 * 327_680


def test_devices_share_heads_and_repeat_them_when_there_are_too_few() -> None:
    grouped = config(num_key_value_heads=4)
    assert bytes_of(grouped, 10, tp=2) == bytes_of(grouped, 10) // 2
    assert bytes_of(grouped, 10, tp=8) == bytes_of(grouped, 10) // 4
    assert layer_caches(grouped, 8)[0].label == "4 key-value heads of 64 (1 on each device)"


def test_latent_attention_keeps_the_latent_and_the_rotary_key_once_whatever_the_devices() -> None:
    latent = config(
        num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512, qk_rope_head_dim=64,
        v_head_dim=128,
    )  # fmt: skip
    assert bytes_of(latent, 1) == 61 * 576 * 2 == 70_272
    assert bytes_of(latent, 1, tp=8) == 70_272


def test_windowed_layers_keep_their_window_and_the_others_everything() -> None:
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    mixed = config(layer_types=kinds, sliding_window=128, num_key_value_heads=2)
    token = 2 * 2 * 64 * 2
    assert bytes_of(mixed, 1000) == 3 * 128 * token + 1000 * token
    assert bytes_of(mixed, 100) == 4 * 100 * token
    assert bytes_of(config(sliding_window=128, num_key_value_heads=2), 1000) == 4 * 128 * token
    unused = config(sliding_window=128, use_sliding_window=False, num_key_value_heads=2)
    assert bytes_of(unused, 1000) == 4 * 1000 * token
    chunked = config(layer_types=["chunked_attention"] * 4, attention_chunk_size=256, num_key_value_heads=2)
    assert bytes_of(chunked, 1000) == 4 * 256 * token


def test_linear_attention_has_a_state_of_the_same_size_at_every_length() -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    hybrid = config(
        layer_types=kinds, num_key_value_heads=2, linear_value_head_dim=32, linear_conv_kernel_dim=4, **linear
    )
    state = 4 * (4 * 16 * 32 + 4 * (2 * 2 * 16 + 4 * 32))
    token = 2 * 2 * 64 * 2
    assert bytes_of(hybrid, 10, batch=3) == 3 * (3 * state + 10 * token)
    assert bytes_of(hybrid, 20, batch=3) == 3 * (3 * state + 20 * token)


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({"layers_block_type": ["mamba", "attention", "mamba", "mamba"]}, 3),
        ({"num_attention_heads": None, "model_type": "mamba2"}, 4),
    ],
)
def test_states_of_unknown_size_are_listed_and_not_made_up(values: dict[str, Any], layers: int) -> None:
    uncounted = [cache for cache in layer_caches(config(**values)) if not cache.counted]
    assert [cache.layers for cache in uncounted] == [layers]
    assert uncounted[0].bytes_for(1000, 8, 16) == 0


def test_layers_without_a_mixer_and_layers_that_share_a_cache_take_nothing() -> None:
    token = 2 * 8 * 64 * 2
    assert bytes_of(config(layers_block_type=["attention", "mlp", "moe", "attention"]), 10) == 2 * 10 * token
    assert bytes_of(config(num_kv_shared_layers=3), 10) == 10 * token
