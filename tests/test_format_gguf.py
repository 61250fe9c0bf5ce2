"""GGUF: blocks byte for byte, the order of rows, and what is refused."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from quantforge.errors import NumericsError
from quantforge.formats import CheckpointFacts, SiteShape, load_format
from quantforge.formats.gguf.architecture import add_hyperparameters, config_problems, rope_factors, row_order
from quantforge.formats.gguf.blocks import block_type, pack_blocks
from quantforge.formats.gguf.file import model_problems
from quantforge.formats.gguf.vocabulary import LLAMA3, QWEN2, TEKKEN, pre_tokenizer_name, vocabulary_problems
from quantforge.model.source import open_checkpoint
from quantforge.quantized import SCALE_DTYPES, QuantizedWeight
from quantforge.spec import QuantSpec

FORMAT = load_format("gguf")
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
}


def weight_of(spec: QuantSpec, codes: Any, scale: Any, zero: Any = None) -> QuantizedWeight:
    grid = torch.tensor(scale).to(SCALE_DTYPES[spec.scale_dtype])
    zeros = torch.full(grid.shape, spec.symmetric_zero) if zero is None else torch.tensor(zero)
    return QuantizedWeight(spec, torch.as_tensor(codes).to(torch.uint8), grid, zeros.to(torch.uint8))


def random_weight(spec: QuantSpec, out_features: int, in_features: int) -> QuantizedWeight:
    """Codes with both ends, scales of both signs that leave room for minima in float16, zeros with both ends."""
    groups = spec.groups(in_features)
    codes = torch.randint(0, spec.code_max + 1, (out_features, in_features))
    codes[0, :2] = torch.tensor([0, spec.code_max])
    scale = torch.randint(1, 128, (out_features, groups)) * torch.where(torch.rand(out_features, groups) > 0.5, 1, -1)
    zero = torch.randint(0, spec.code_max + 1, (out_features, groups))
    zero[0, 0], zero[-1, -1] = 0, spec.code_max
    return weight_of(spec, codes, (scale / 4096).tolist(), None if spec.symmetric else zero.tolist())


RAMP = [*range(16), *reversed(range(16))]
NIBBLES = bytes(low | (15 - low) << 4 for low in range(16))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (weight_of(QuantSpec(4, 32), [RAMP], [[0.5]]), b"\x00\x38" + NIBBLES),
        (weight_of(QuantSpec(4, 32), [RAMP], [[-0.5]]), b"\x00\xb8" + NIBBLES),
        (weight_of(QuantSpec(4, 32, False), [RAMP], [[0.25]], [[3]]), b"\x00\x34\x00\xba" + NIBBLES),
        (weight_of(QuantSpec(4, 32, False), [RAMP], [[0.25]], [[0]]), b"\x00\x34\x00\x80" + NIBBLES),
        (weight_of(QuantSpec(4, 32, False), [RAMP], [[0.25]], [[15]]), b"\x00\x34\x80\xc3" + NIBBLES),
        (
            weight_of(QuantSpec(8, 32), [[0, 1, 127, 128, 129, 255, *[128] * 26]], [[2.0]]),
            b"\x00\x40\x80\x81\xff\x00\x01\x7f" + bytes(26),
        ),
    ],
)
def test_golden_bytes_of_a_block_of_each_type(weight: QuantizedWeight, expected: bytes) -> None:
    assert pack_blocks(weight, "x").numpy().tobytes() == expected


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
@pytest.mark.parametrize(
    ("out_features", "in_features", "group"), [(1, 32, 32), (3, 96, 96), (5, 192, 64), (7, 160, None)]
)
def test_the_package_gguf_dequantizes_blocks_to_the_very_weights(
    bits: int, symmetric: bool, out_features: int, in_features: int, group: int | None
) -> None:
    weight = random_weight(QuantSpec(bits, group, symmetric, "float16"), out_features, in_features)
    kind = gguf.GGMLQuantizationType[str(block_type(weight.spec))]
    found = gguf.quants.dequantize(pack_blocks(weight, "x").numpy(), kind)
    assert torch.equal(torch.from_numpy(found), weight.dequantize())


def test_groups_that_float16_cannot_hold_are_never_encoded() -> None:
    tiny = weight_of(QuantSpec(4, 32), torch.zeros(1, 96), [[2.0**-26, 2.0**-20, 70000.0]])
    odd = weight_of(QuantSpec(4, 32, False), torch.zeros(1, 96), [[255 / 256, 255 / 256, 254 / 256]], [[9, 7, 9]])
    facts = CheckpointFacts({"x": odd.spec}, (), has_zero_zero=False)
    with pytest.raises(NumericsError, match="x: 2 of 3 scales cannot be stored in float16 exactly"):
        FORMAT.encode("x", tiny, facts)
    with pytest.raises(NumericsError, match="x, minima of its groups: 1 of 3 scales cannot be stored"):
        FORMAT.encode("x", odd, facts)  # 255 * 9 takes 12 bits


@pytest.mark.parametrize(
    ("spec", "in_features", "said"),
    [
        (QuantSpec(3, 32), 64, "no block type holds 3 bits, group 32, symmetric exactly"),
        (QuantSpec(8, 32, False), 64, "no block type holds 8 bits, group 32, asymmetric exactly"),
        (QuantSpec(4, 16), 64, "groups must be a multiple of 32, the weights of a block; 16: a"),
        (QuantSpec(4, None), 80, "in_features must be a multiple of 32, which [out, in] is not at a [8, 80]"),
    ],
)
def test_grids_that_no_blocks_hold_are_refused_with_the_sites(spec: QuantSpec, in_features: int, said: str) -> None:
    [problem] = FORMAT.problems({"a": spec}, [SiteShape("a", 8, in_features)])
    assert said in problem


def test_grids_that_blocks_hold_are_not_refused() -> None:
    specs = {"a": QuantSpec(4, 96), "b": QuantSpec(8, None), "c": QuantSpec(4, 32, False)}
    assert FORMAT.problems(specs, [SiteShape(name, 5, 96) for name in specs]) == []


# ------------------------------------------------------------------------------------------------ architecture


@pytest.mark.parametrize("module", ["q_proj", "k_proj"])
def test_reordered_rows_turned_as_neighbors_are_the_rows_turned_as_halves(module: str) -> None:
    order = row_order(LLAMA, f"model.layers.0.self_attn.{module}.weight")
    heads, size = (4 if module == "q_proj" else 2), 16
    assert order is not None and sorted(order.tolist()) == list(range(heads * size))
    rows = torch.randn(heads * size, dtype=torch.float64)
    angle = torch.rand(size // 2, dtype=torch.float64)

    def turn(pairs: torch.Tensor) -> torch.Tensor:  # [heads, size / 2, 2]
        a, b = pairs.unbind(-1)
        return torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    halves = turn(rows.reshape(heads, 2, size // 2).transpose(1, 2)).transpose(1, 2).flatten()
    neighbors = turn(rows[order].reshape(heads, size // 2, 2)).flatten()
    assert torch.equal(halves[order], neighbors)


def test_only_q_and_k_of_llama_are_reordered() -> None:
    assert row_order(LLAMA, "model.layers.0.self_attn.v_proj.weight") is None
    assert row_order({**LLAMA, "model_type": "qwen2"}, "model.layers.0.self_attn.q_proj.weight") is None
    bias = row_order({**LLAMA, "model_type": "mistral"}, "model.layers.0.self_attn.k_proj.bias")
    assert bias is not None and bias[:4].tolist() == [0, 8, 1, 9]


def test_llama3_factors_are_what_transformers_divides_frequencies_by() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = {**LLAMA, "head_dim": 128, "rope_parameters": rope}
    assert list(config_problems(config)) == []
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    plain = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    factors = rope_factors(config)
    assert factors is not None and factors[0] == 1.0 and factors[-1] == 8.0
    torch.testing.assert_close(plain / factors, scaled, rtol=1e-5, atol=0)
    assert rope_factors(LLAMA) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not known to this writer; it knows llama, mistral, qwen2, "),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; llama.cpp computes these models with silu"),
        ({"rms_norm_eps": None, "vocab_size": None}, "config.json does not say rms_norm_eps, vocab_size"),
        ({"model_type": "qwen3"}, "config.json does not say head_dim"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "llama.cpp attends to everything in Qwen models"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not known to this writer for"),
        ({"rope_parameters": {"rope_type": "linear"}}, "do not say factor, which rope_type 'linear' needs"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "does not know for rope_type 'default': partial_rotary"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0}},
            "rope parameters that this writer does not know for rope_type 'yarn': mscale",
        ),
    ],
)
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(change: dict[str, Any], said: str) -> None:
    [problem] = config_problems({**LLAMA, **change})
    assert said in problem


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": ["llama"]}, "model_type ['llama'] is not known to this writer"),
        ({"hidden_size": "64"}, "hidden_size is '64'; a whole number above 0 is needed"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; a whole number above 0 is needed"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776; a whole number above 0 is needed"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; a whole number above 0 is needed"),
        ({"num_key_value_heads": 1.5}, "num_key_value_heads is 1.5; a whole number above 0 is needed"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; a number above 0 is needed"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf; a number above 0 is needed"),
        ({"num_attention_heads": 3, "num_key_value_heads": 1}, "3 heads do not divide hidden_size 64"),
        ({"head_dim": 15}, "heads have 15 dimensions, which rotary embeddings turn in pairs"),
        ({"model_type": "mistral", "sliding_window": "4k"}, "sliding_window is '4k'; a whole number above 0 is needed"),
        ({"rope_theta": "large"}, "rope_theta is 'large'; a number above 0 is needed"),
        ({"rope_theta": 0}, "rope_theta is 0; a number above 0 is needed"),
        ({"rope_parameters": {"rope_theta": [1e4]}}, "rope_theta is [10000.0]; a number above 0 is needed"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; an object is needed"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]; an object is needed"),
        ({"rope_scaling": {"type": ["linear"]}}, "rope_type ['linear'] is not known to this writer"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'; a number above 0 is needed"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings is 0.5; a whole number above 0 is needed",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention is {'rope_theta': 1000000.0}; "),
    ],
)
def test_values_that_are_none_of_their_kind_are_problems_and_no_tracebacks(change: dict[str, Any], said: str) -> None:
    [problem] = config_problems({**LLAMA, **change})
    assert said in problem


def test_llama3_factors_without_a_range_between_them_are_refused() -> None:
    rope = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    [problem] = config_problems({**LLAMA, "rope_parameters": rope})
    assert problem == "high_freq_factor 4.0 must be above low_freq_factor 4.0"


class Fields:
    """Stands for a GGUFWriter: every ``add_*`` call is kept."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.said.update({name.removeprefix("add_"): value})


def test_hyperparameters_are_those_of_the_config_old_and_new() -> None:
    old = {**LLAMA, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {**LLAMA, "rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}, "head_dim": 32}
    first, second = Fields(), Fields()
    add_hyperparameters(first, old)
    add_hyperparameters(second, {**new, "model_type": "mistral", "sliding_window": 128})
    shared = {
        "block_count": 1, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96, "head_count": 4,
        "head_count_kv": 2, "layer_norm_rms_eps": 1e-6, "vocab_size": 256, "rope_freq_base": 1e6,
        "rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 2.0,
    }  # fmt: skip
    assert first.said == {**shared, "rope_dimension_count": 16}
    wide = {"rope_dimension_count": 32, "key_length": 32, "value_length": 32, "sliding_window": 128}
    assert second.said == {**shared, **wide}


def test_yarn_is_written_with_its_own_parameters() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0}
    fields = Fields()
    add_hyperparameters(fields, {**LLAMA, "rope_scaling": yarn})
    said = {key: value for key, value in fields.said.items() if key.startswith("rope_scaling")}
    assert said == {
        "rope_scaling_type": gguf.RopeScalingType.YARN,
        "rope_scaling_factor": 4.0,
        "rope_scaling_orig_ctx_len": 128,
        "rope_scaling_yarn_beta_fast": 32.0,
    }


# ------------------------------------------------------------------------------------------------ vocabulary

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(expression: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, BYTES]}


@pytest.mark.parametrize(
    ("steps", "ignore_merges", "name"),
    [
        ({**BYTES, "use_regex": True}, False, "gpt-2"),
        ({**BYTES, "use_regex": True, "add_prefix_space": True}, False, None),
        (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3), False, "dbrx"),
        (split(QWEN2), False, "qwen2"),
        (split(QWEN2), True, None),
        (split(TEKKEN), True, "tekken"),
        (split(r"\w+"), False, None),
        (BYTES, False, None),
        (
            {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}],
            },
            False,
            "smollm",
        ),
        (None, False, None),
    ],
)
def test_pre_tokenizers_are_known_by_their_structure(steps: Any, ignore_merges: bool, name: str | None) -> None:
    assert pre_tokenizer_name({"pre_tokenizer": steps, "model": {"ignore_merges": ignore_merges}}) == name


def test_the_regular_expressions_are_those_of_transformers_own_tables() -> None:
    table = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    assert [table[name] for name in ("llama-bpe", "dbrx", "qwen2", "tekken")] == [LLAMA3, LLAMA3, QWEN2, TEKKEN]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"type": "Unigram", "vocab": {}}}, "holds a 'Unigram' model; this writer knows BPE, byte-level or"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "fuse_unk": True}}, "sets fuse_unk of its model"),
        ({"normalizer": {"type": "Lowercase"}}, "has a Lowercase normalizer; llama.cpp normalizes no text"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "list (dbrx, gpt-2, llama-bpe, qwen2, smollm, tekken): "),
        ({"added_tokens": [{"id": 300, "content": "x"}]}, "has a token 300, the embedding only 256 rows"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "dropout": 0.1}}, "sets dropout of its model"),
    ],
)
def test_tokenizers_that_llama_cpp_has_no_name_for_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    plain = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "pre_tokenizer": {**BYTES, "use_regex": True}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    assert list(vocabulary_problems(tmp_path, 256)) == []
    (tmp_path / "tokenizer.json").write_text(json.dumps({**plain, **change}))
    [problem] = vocabulary_problems(tmp_path, 256)
    assert said in problem
    (tmp_path / "tokenizer.json").unlink()
    [problem] = vocabulary_problems(tmp_path, 256)
    assert "has no tokenizer.json, and a GGUF file holds its tokenizer" in problem


# ------------------------------------------------------------------------------------------------ the model


def test_tensors_without_a_place_are_refused_by_name(tiny_llama: Path) -> None:
    source = open_checkpoint(tiny_llama)
    assert model_problems(source, [], []) == []
    source.tensors["model.extra.weight"] = source.tensors["lm_head.weight"]
    [problem] = model_problems(source, [], [])
    assert problem == "llama.cpp's llama has no place for 1 tensors: model.extra.weight"


def test_a_missing_package_is_named_with_its_extra(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    [problem] = model_problems(open_checkpoint(tiny_llama), [], [])
    assert problem == (
        "--format gguf needs the package gguf, which is not installed: pip install 'quantforge-llm[gguf]'"
    )
