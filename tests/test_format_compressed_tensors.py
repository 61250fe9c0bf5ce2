"""compressed-tensors export: golden words, our reader, and the compressed-tensors library as a foreign reader."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_grids import SITE, alike, facts_for, parts_of, random_weight, words

from quantforge.errors import SourceError
from quantforge.formats import CheckpointFacts, SiteShape, load_format
from quantforge.quantized import QuantizedWeight
from quantforge.readers import DecodedWeight, Scheme, load_reader
from quantforge.spec import QuantSpec

FORMAT = load_format("compressed-tensors")
READER = load_reader("compressed-tensors")
CONFIG_KEYS = [
    "quant_method",
    "format",
    "quantization_status",
    "global_compression_ratio",
    "kv_cache_scheme",
    "ignore",
    "config_groups",
]


def export(weight: QuantizedWeight) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    facts = facts_for(weight)
    return parts_of(FORMAT.encode(SITE, weight, facts)), FORMAT.config(facts)


def read_back(weight: QuantizedWeight) -> DecodedWeight:
    parts, config = export(weight)
    return READER.decode(parts, READER.scheme(config, SITE), SITE)


def assert_same(decoded: DecodedWeight, weight: QuantizedWeight) -> None:
    assert torch.equal(decoded.codes, weight.codes)
    assert torch.equal(decoded.scale, weight.scale) and decoded.scale.dtype == weight.scale.dtype
    assert torch.equal(decoded.zero, weight.zero)
    assert torch.equal(decoded.dequantize(), weight.dequantize())


# -------------------------------------------------------------------------------------------------- golden words

GOLDEN_ROWS = {
    2: ([0, 1, 2, 3] * 4, [0xE4E4E4E4]),
    3: (list(range(8)) * 4, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
    4: (list(range(16)), [0x76543210, 0xFEDCBA98]),
    8: ([1, 2, 3, 255, 0, 128, 127, 254], [0xFF030201, 0xFE7F8000]),
}


@pytest.mark.parametrize("bits", GOLDEN_ROWS)
def test_packed_weight_and_zeros_equal_words_written_out_by_hand(bits: int) -> None:
    row, expected = GOLDEN_ROWS[bits]
    codes = torch.tensor([row] * len(row), dtype=torch.uint8)
    zero = torch.tensor(row, dtype=torch.uint8).reshape(-1, 1)
    spec = QuantSpec(bits, None, symmetric=False)
    parts, _ = export(QuantizedWeight(spec, codes, torch.full((len(row), 1), 0.5, dtype=torch.bfloat16), zero))
    assert sorted(parts) == ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"]
    assert torch.equal(parts["weight_packed"], words(*expected).repeat(len(row), 1))
    assert torch.equal(parts["weight_zero_point"], words(*expected).reshape(-1, 1))
    assert torch.equal(parts["weight_shape"], torch.tensor([len(row), len(row)]))
    assert parts["weight_shape"].dtype == torch.int64
    assert torch.equal(parts["weight_scale"], torch.full((len(row), 1), 0.5, dtype=torch.bfloat16))


def test_a_negative_scale_is_stored_as_it_is_and_reaches_one_step_further_up() -> None:
    codes = torch.tensor([list(range(16))], dtype=torch.uint8)
    zero = torch.full((1, 2), 8, dtype=torch.uint8)
    weight = QuantizedWeight(QuantSpec(4, 8), codes, torch.tensor([[-0.5, 0.25]], dtype=torch.bfloat16), zero)
    parts, _ = export(weight)
    assert sorted(parts) == ["weight_packed", "weight_scale", "weight_shape"]
    assert torch.equal(parts["weight_packed"], words(0x76543210, 0xFEDCBA98).reshape(1, 2))
    assert parts["weight_scale"].view(torch.int16).tolist() == [[0xBF00 - 0x10000, 0x3E80]]
    values = [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    assert read_back(weight).dequantize().tolist() == weight.dequantize().tolist() == [values]


# --------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("in_features", [64, 96, 128, 768])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_reader_returns_the_exact_codes_scales_and_zeros(bits: int, in_features: int, symmetric: bool) -> None:
    for group_size in (32, None):
        weight = random_weight(QuantSpec(bits, group_size, symmetric), 64, in_features)
        assert_same(read_back(weight), weight)


@settings(max_examples=40)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([8, 16, 32, None]),
    st.booleans(),
    st.sampled_from(["bfloat16", "float16"]),
)
def test_every_loadable_shape_reads_back_exactly(
    bits: int, out_blocks: int, in_blocks: int, group_size: int | None, symmetric: bool, dtype: Any
) -> None:
    weight = random_weight(QuantSpec(bits, group_size, symmetric, dtype), 32 * out_blocks, 32 * in_blocks)
    assert FORMAT.problems(*alike(weight.spec, SiteShape(SITE, weight.out_features, weight.in_features))) == []
    assert_same(read_back(weight), weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_groups_of_one_sign_with_zeros_at_either_end_read_back_exactly(bits: int) -> None:
    spec = QuantSpec(bits, 32, symmetric=False)
    zero = torch.tensor([[0, spec.code_max]] * 32, dtype=torch.uint8)  # all weights >= 0, then all <= 0
    weight = replace(random_weight(spec, 32, 64), zero=zero)
    decoded = read_back(weight)
    assert torch.equal(decoded.zero, zero)
    assert bool((decoded.dequantize()[:, :32] >= 0).all()) and bool((decoded.dequantize()[:, 32:] <= 0).all())


# ------------------------------------------------------------------------- the compressed-tensors library as reader


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors_library_unpacks_the_same_codes_zeros_and_weights(bits: int, symmetric: bool) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    half = 1 << (bits - 1)
    for group_size in (32, None):
        weight = random_weight(QuantSpec(bits, group_size, symmetric), 96, 192)
        parts, config = export(weight)
        signed = compressors.unpack_from_int32(parts["weight_packed"], bits, torch.Size([96, 192]))
        assert torch.equal(signed.to(torch.int16) + half, weight.codes.to(torch.int16))
        if not symmetric:
            zero = compressors.unpack_from_int32(parts["weight_zero_point"], bits, weight.zero.shape, packed_dim=0)
            assert torch.equal(zero.to(torch.int16) + half, weight.zero.to(torch.int16))
        scheme = quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
        exact = {**parts, "weight_scale": parts["weight_scale"].to(torch.float32)}  # it computes in the scale's dtype
        weights = compressors.PackedQuantizationCompressor.decompress(exact, scheme)["weight"]
        assert torch.equal(weights, weight.dequantize())
        rounded = compressors.PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        assert torch.equal(rounded, weight.dequantize().to(torch.bfloat16))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors_library_packs_the_same_words(bits: int) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors.pack_quantized")
    weight = random_weight(QuantSpec(bits, 32, symmetric=False), 64, 96)
    parts, _ = export(weight)
    half = 1 << (bits - 1)
    signed = (weight.codes.to(torch.int16) - half).to(torch.int8)
    assert torch.equal(parts["weight_packed"], compressors.pack_to_int32(signed, bits))
    zero = (weight.zero.to(torch.int16) - half).to(torch.int8)
    assert torch.equal(parts["weight_zero_point"], compressors.pack_to_int32(zero, bits, packed_dim=0))


# -------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(("group_size", "strategy"), [(128, "group"), (None, "channel")])
def test_config_has_exactly_the_keys_servers_were_seen_to_load(group_size: int | None, strategy: str) -> None:
    facts = CheckpointFacts({SITE: QuantSpec(4, group_size, symmetric=False)}, ("model.router", "lm_head"), True)
    config = FORMAT.config(facts)
    assert list(config) == CONFIG_KEYS
    assert config["ignore"] == ["model.router", "lm_head"]
    assert config["config_groups"] == {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": strategy,
                "group_size": group_size,
                "dynamic": False,
                "actorder": None,
                "block_structure": None,
                "observer": "minmax",
                "observer_kwargs": {},
            },
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    }
    assert FORMAT.side_files(facts) == {}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors_library_validates_the_config(bits: int) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for group_size in (64, None):
        facts = CheckpointFacts({SITE: QuantSpec(bits, group_size)}, ("lm_head",), False)
        parsed = quantization.QuantizationConfig.model_validate(FORMAT.config(facts))
        weights = parsed.config_groups["group_0"].weights
        assert (weights.num_bits, weights.group_size, weights.symmetric) == (bits, group_size, True)
        assert parsed.ignore == ["lm_head"]


# ------------------------------------------------------------------------------------------------------ problems


def test_conv1d_sites_are_refused_naming_three_of_them_and_the_format_that_takes_them() -> None:
    sites = [SiteShape(f"h.{i}.attn.c_attn", 192, 64, "conv1d") for i in range(5)]
    (problem,) = FORMAT.problems(*alike(QuantSpec(4, 64), *sites))
    assert "5 sites are Conv1D: h.0.attn.c_attn, h.1.attn.c_attn, h.2.attn.c_attn and 2 more" in problem
    assert "--format gptq" in problem


@pytest.mark.parametrize(("bits", "multiple"), [(2, 16), (3, 32), (4, 8), (8, 4)])
def test_rows_that_end_inside_a_word_are_refused_naming_every_site(bits: int, multiple: int) -> None:
    good, bad = SiteShape("good", 64, 2 * multiple), [SiteShape(f"bad{i}", 64, multiple + 2) for i in range(4)]
    (problem,) = FORMAT.problems(*alike(QuantSpec(bits, None), good, *bad))
    assert f"in_features to be a multiple of {multiple} at {bits} bits" in problem
    assert all(f"{site.name} [64, {multiple + 2}]" in problem for site in bad)
    assert "good" not in problem


def test_outputs_that_end_inside_a_word_matter_only_when_zeros_are_packed() -> None:
    sites = [SiteShape("site", 60, 64)]
    assert FORMAT.problems(*alike(QuantSpec(4, 64), *sites)) == []
    (problem,) = FORMAT.problems(*alike(QuantSpec(4, 64, symmetric=False), *sites))
    assert "out_features to be a multiple of 8" in problem and "site [60, 64]" in problem and "symmetric" in problem


# -------------------------------------------------------------------------------------------------- reader: config


def config_with(**groups: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [], "config_groups": groups}


def group(bits: int, *targets: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return {"targets": list(targets), "weights": weights | more}


def test_an_exact_name_beats_a_pattern_and_a_pattern_beats_a_class() -> None:
    config = config_with(a=group(4, "Linear"), b=group(8, r"re:.*mlp\..*"), c=group(2, SITE, "model.other"))
    assert READER.scheme(config, SITE).bits == 2
    assert READER.scheme(config, "model.layers.1.mlp.up_proj").bits == 8
    assert READER.scheme(config, "model.layers.1.self_attn.q_proj") == Scheme(4, 32, True, "pack-quantized")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"config_groups": {}}, "config_groups is missing or empty"),
        (config_with(a=group(4, "re:.*attn.*")), f"no config group targets {SITE}"),
        (config_with(a=group(4, "re:(")), "not a regular expression"),
        (config_with(a={"targets": "Linear"}), "expected a list of strings"),
        ({**config_with(a=group(4, "Linear")), "ignore": ["re:.*up_proj"]}, "ignore says it is not quantized"),
        ({**config_with(a=group(4, "Linear")), "format": "marlin-24"}, "format 'marlin-24' cannot be read"),
        (config_with(a=group(8, "Linear", type="float")), "weights are 'float' of 8 bits"),
        (config_with(a=group(4, "Linear", strategy="block")), "strategy 'block' cannot be read"),
        (config_with(a=group(4, "Linear", group_size=0)), "group_size is 0"),
        (config_with(a={"targets": ["Linear"], "weights": None}), "weights is None"),
    ],
)
def test_an_invalid_config_is_refused_naming_the_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError) as error:
        READER.scheme(config, SITE)
    assert message in str(error.value)


def test_quantized_sites_are_found_and_float_weights_are_left_alone() -> None:
    keys = [f"a.b.{suffix}" for suffix in ("weight_packed", "weight_scale", "weight_shape", "bias")]
    keys += ["c.weight", "c.weight_scale", "c.input_scale", "norm.weight", "attn.k_scale"]
    assert READER.group_keys(keys) == {
        "a.b": {suffix: f"a.b.{suffix}" for suffix in ("weight_packed", "weight_scale", "weight_shape")},
        "c": {suffix: f"c.{suffix}" for suffix in ("weight", "weight_scale", "input_scale")},
    }


# ------------------------------------------------------------------------------------------------- reader: tensors


@pytest.mark.parametrize(
    ("suffix", "replacement", "message"),
    [
        ("weight_packed", None, "weight_packed is missing"),
        ("weight_scale", None, "weight_scale is missing"),
        ("weight_shape", None, "weight_shape is missing"),
        ("weight_zero_point", None, "weight_zero_point is missing"),
        ("weight_packed", torch.zeros(64, 7, dtype=torch.int32), "shape [64, 7], expected [64, 8]"),
        ("weight_packed", torch.zeros(64, 8), "weight_packed is torch.float32, expected torch.int32"),
        ("weight_scale", torch.ones(64, 1), "shape [64, 1], expected [64, 2]"),
        ("weight_scale", torch.full((64, 2), torch.inf), "128 of 128 values of weight_scale are not finite"),
        ("weight_zero_point", torch.zeros(2, 64, dtype=torch.int32), "shape [2, 64], expected [8, 2]"),
        ("weight_zero_point", torch.full((64, 2), 9, dtype=torch.int8), "9 to 9; 4 bits reach from -8 to 7"),
        ("weight_shape", torch.tensor([64, 60]), "group size 32 does not divide 60"),
        ("weight_shape", torch.tensor([64, -64]), "holds [64, -64]"),
        ("weight_g_idx", torch.full((64,), -1, dtype=torch.int32), "-1 to -1; 2 groups are numbered 0 to 1"),
        ("weight_g_idx", torch.zeros(64, dtype=torch.int32), "gives group 0 64 inputs instead of 32"),
    ],
)
def test_wrong_tensors_are_refused_naming_the_site_and_the_numbers(
    suffix: str, replacement: torch.Tensor | None, message: str
) -> None:
    parts, config = export(random_weight(QuantSpec(4, 32, symmetric=False), 64, 64))
    parts.pop(suffix, None)
    if replacement is not None:
        parts[suffix] = replacement
    with pytest.raises(SourceError) as error:
        READER.decode(parts, READER.scheme(config, SITE), SITE)
    assert SITE in str(error.value) and message in str(error.value)


def test_a_symmetric_config_over_other_zeros_is_refused() -> None:
    parts, config = export(random_weight(QuantSpec(4, 32, symmetric=False), 64, 64))
    scheme = replace(READER.scheme(config, SITE), symmetric=True)
    with pytest.raises(SourceError, match=r"symmetric \(zero 8\), the file holds \[0, 1, 2"):
        READER.decode(parts, scheme, SITE)


def test_int8_weights_and_zeros_read_as_value_plus_128() -> None:
    parts = {
        "weight": torch.tensor([[-128, 0], [127, 1]], dtype=torch.int8),
        "weight_scale": torch.tensor([[0.5], [2.0]]),
        "weight_zero_point": torch.tensor([[-128], [127]], dtype=torch.int8),
    }
    decoded = READER.decode(parts, Scheme(8, None, False, "int-quantized"), SITE)
    assert decoded.codes.tolist() == [[0, 128], [255, 129]] and decoded.zero.tolist() == [[0], [255]]
    assert decoded.dequantize().tolist() == [[0.0, 64.0], [0.0, -252.0]]


def test_one_scale_for_a_whole_tensor_serves_every_row() -> None:
    parts = {"weight": torch.tensor([[-2, 1], [3, 0]], dtype=torch.int8), "weight_scale": torch.tensor([0.25])}
    decoded = READER.decode(parts, Scheme(8, None, True, "int-quantized"), SITE)
    assert decoded.dequantize().tolist() == [[-0.5, 0.25], [0.75, 0.0]]


def test_columns_follow_a_group_order_of_the_file() -> None:
    weight = random_weight(QuantSpec(4, 2, symmetric=False), 8, 8)
    parts, config = export(weight)
    order = torch.tensor([3, 0, 1, 2, 0, 3, 2, 1], dtype=torch.int32)
    decoded = READER.decode({**parts, "weight_g_idx": order}, READER.scheme(config, SITE), SITE)
    for column, owner in enumerate(order.tolist()):
        offset = weight.codes[:, column].float() - weight.zero[:, owner].float()
        assert torch.equal(decoded.dequantize()[:, column], offset * weight.scale[:, owner].float())
