"""GPTQ export: golden words, our reader, and a naive decoder written as loops over bits."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_grids import SITE, alike, facts_for, parts_of, random_weight, words

from quantforge.errors import NumericsError, SourceError
from quantforge.formats import CheckpointFacts, SiteShape, load_format
from quantforge.quantized import QuantizedWeight
from quantforge.readers import DecodedWeight, load_reader
from quantforge.spec import QuantSpec

FORMAT = load_format("gptq")
READER = load_reader("gptq")


def export(weight: QuantizedWeight) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    facts = facts_for(weight)
    return parts_of(FORMAT.encode(SITE, weight, facts)), FORMAT.config(facts)


def read_back(weight: QuantizedWeight) -> DecodedWeight:
    parts, config = export(weight)
    return READER.decode(parts, READER.scheme(config, SITE), SITE)


def assert_same(decoded: DecodedWeight, weight: QuantizedWeight) -> None:
    assert torch.equal(decoded.codes, weight.codes)
    assert torch.equal(decoded.scale, weight.scale.to(torch.float16)) and decoded.scale.dtype == torch.float16
    assert torch.equal(decoded.zero, weight.zero)
    assert torch.equal(decoded.dequantize(), weight.dequantize())


def naive_dequantize(parts: dict[str, torch.Tensor], bits: int, version: str) -> torch.Tensor:
    """Float32 [out, in], one value at a time from integers of unbounded size."""

    def value(stream: list[int], k: int) -> int:
        return sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(stream)) >> (k * bits) & ((1 << bits) - 1)

    qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    out = torch.empty(qweight.shape[1], len(parts["g_idx"]))
    for column, group in enumerate(parts["g_idx"].tolist()):
        for row in range(out.shape[0]):
            zero = value(qzeros[group].tolist(), row)
            if version == "gptq":
                zero = (zero + 1) % (1 << bits)
            out[row, column] = (value(qweight[:, row].tolist(), column) - zero) * float(scales[group, row])
    return out


# -------------------------------------------------------------------------------------------------- golden words

GOLDEN = {  # a row of codes, also the zeros of the rows; packed codes; packed zeros in version 2, in version 1
    2: ([3, 2, 1, 1] * 4, [0x5B5B5B5B], [0x5B5B5B5B], [0x06060606]),
    3: (
        [1, 1, 2, 3, 4, 5, 6, 7] * 4,
        *[[0x89FAC689, 0xC689FAC6, 0xFAC689FA]] * 2,
        [0x40D63440, 0x3440D634, 0xD63440D6],
    ),
    4: ([1, *range(1, 16)], *[[0x76543211, 0xFEDCBA98]] * 2, [0x65432100, 0xEDCBA987]),
    8: ([1, 2, 3, 255, 9, 128, 127, 254], *[[0xFF030201, 0xFE7F8009]] * 2, [0xFE020100, 0xFD7E7F08]),
}


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", GOLDEN)
def test_packed_weight_and_zeros_equal_words_written_out_by_hand(bits: int, version: str) -> None:
    row, packed, zeros_v2, zeros_v1 = GOLDEN[bits]
    size = len(row)
    zero = torch.tensor(row, dtype=torch.uint8).reshape(-1, 1)
    scale = torch.arange(1, size + 1).reshape(-1, 1).to(torch.bfloat16)
    weight = QuantizedWeight(QuantSpec(bits, None, False), torch.tensor([row] * size, dtype=torch.uint8), scale, zero)
    facts = CheckpointFacts({SITE: weight.spec}, (), has_zero_zero=version == "gptq_v2")
    parts = parts_of(FORMAT.encode(SITE, weight, facts))
    assert FORMAT.config(facts)["checkpoint_format"] == version
    assert sorted(parts) == ["g_idx", "qweight", "qzeros", "scales"]
    assert torch.equal(parts["qweight"], words(*packed).reshape(-1, 1).repeat(1, size))
    assert torch.equal(parts["qzeros"], words(*(zeros_v2 if version == "gptq_v2" else zeros_v1)).reshape(1, -1))
    assert torch.equal(parts["scales"], torch.arange(1, size + 1).reshape(1, -1).to(torch.float16))
    assert torch.equal(parts["g_idx"], torch.zeros(size, dtype=torch.int32))
    assert all(tensor.is_contiguous() for tensor in parts.values())


@pytest.mark.parametrize(("bits", "word"), [(2, 0x55555555), (4, 0x77777777), (8, 0x7F7F7F7F)])
def test_symmetric_zeros_are_the_word_every_loader_knows(bits: int, word: int) -> None:
    parts, _ = export(random_weight(QuantSpec(bits, 32), 32, 64))
    assert torch.equal(parts["qzeros"], words(word).expand(2, bits))


def test_a_negative_scale_is_stored_as_it_is_and_reaches_one_step_further_up() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(8, 1)
    scale = torch.tensor([[-0.5, 0.25]], dtype=torch.bfloat16).repeat(8, 1)
    weight = QuantizedWeight(QuantSpec(4, 8), codes, scale, torch.full((8, 2), 8, dtype=torch.uint8))
    parts, config = export(weight)
    assert torch.equal(parts["qweight"], words(0x76543210, 0xFEDCBA98).reshape(2, 1).repeat(1, 8))
    assert torch.equal(parts["qzeros"], words(0x77777777).expand(2, 1)) and config["checkpoint_format"] == "gptq"
    assert parts["scales"].view(torch.int16).tolist() == [[0xB800 - 0x10000] * 8, [0x3400] * 8]
    values = [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75]
    for found in (weight.dequantize(), read_back(weight).dequantize(), naive_dequantize(parts, 4, "gptq")):
        assert found.tolist() == [values] * 8


# --------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("in_features", [64, 96, 128, 768])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_reader_returns_the_exact_codes_scales_and_zeros(bits: int, in_features: int, symmetric: bool) -> None:
    for group_size in (32, None):
        for lowest_zero in (0, 1):  # version 2 and version 1 when asymmetric
            weight = random_weight(QuantSpec(bits, group_size, symmetric), 64, in_features, lowest_zero)
            parts, config = export(weight)
            assert parts["qweight"].shape == (in_features * bits // 32, 64)
            assert config["checkpoint_format"] == ("gptq_v2" if lowest_zero == 0 and not symmetric else "gptq")
            assert_same(read_back(weight), weight)


@settings(max_examples=40)
@given(
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([8, 16, 32, None]),
    st.booleans(),
    st.integers(0, 1),
)
def test_every_loadable_shape_reads_back_exactly(
    bits: int, out_blocks: int, in_blocks: int, group_size: int | None, symmetric: bool, lowest_zero: int
) -> None:
    weight = random_weight(QuantSpec(bits, group_size, symmetric), 32 * out_blocks, 32 * in_blocks, lowest_zero)
    assert FORMAT.problems(*alike(weight.spec, SiteShape(SITE, weight.out_features, weight.in_features))) == []
    assert_same(read_back(weight), weight)


@pytest.mark.parametrize("lowest_zero", [0, 1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_naive_decoder_finds_the_weights_that_were_measured(bits: int, lowest_zero: int) -> None:
    for symmetric in (True, False):
        weight = random_weight(QuantSpec(bits, 32, symmetric), 32, 96, lowest_zero)
        parts, config = export(weight)
        assert torch.equal(naive_dequantize(parts, bits, config["checkpoint_format"]), weight.dequantize())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_groups_of_one_sign_with_zeros_at_either_end_read_back_exactly(bits: int) -> None:
    spec = QuantSpec(bits, 32, symmetric=False)
    zero = torch.tensor([[0, spec.code_max]] * 32, dtype=torch.uint8)  # all weights >= 0, then all <= 0
    weight = replace(random_weight(spec, 32, 64), zero=zero)
    decoded = read_back(weight)
    assert torch.equal(decoded.zero, zero)
    assert bool((decoded.dequantize()[:, :32] >= 0).all()) and bool((decoded.dequantize()[:, 32:] <= 0).all())


def test_group_index_is_input_over_group_size() -> None:
    parts, _ = export(random_weight(QuantSpec(4, 32), 32, 96))
    assert parts["g_idx"].tolist() == [0] * 32 + [1] * 32 + [2] * 32
    assert parts["g_idx"].dtype == torch.int32


# ----------------------------------------------------------------------------------------- zeros and versions 1 and 2


def test_one_zero_of_0_makes_the_whole_checkpoint_version_2() -> None:
    spec = QuantSpec(4, 32, symmetric=False)
    facts = CheckpointFacts({SITE: spec}, (), has_zero_zero=True)
    weight = random_weight(spec, 32, 64, lowest_zero=1)
    assert FORMAT.config(facts)["checkpoint_format"] == "gptq_v2"
    parts = parts_of(FORMAT.encode(SITE, weight, facts))
    assert_same(READER.decode(parts, READER.scheme(FORMAT.config(facts), SITE), SITE), weight)


def test_a_zero_of_0_is_never_written_as_version_1() -> None:
    weight = random_weight(QuantSpec(4, 32, symmetric=False), 32, 64)
    with pytest.raises(ValueError, match=f"{SITE}: a zero of 0"):
        FORMAT.encode(SITE, weight, CheckpointFacts({SITE: weight.spec}, (), has_zero_zero=False))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_wrapped_zero_of_a_version_1_file_reads_as_0_and_not_as_16(bits: int) -> None:
    weight = replace(random_weight(QuantSpec(bits, 32, False), 32, 32), zero=torch.zeros(32, 1, dtype=torch.uint8))
    parts, config = export(weight)
    parts["qzeros"] = torch.full_like(parts["qzeros"], -1)  # 0 - 1 in `bits` bits is all ones
    decoded = READER.decode(parts, READER.scheme({**config, "checkpoint_format": "gptq"}, SITE), SITE)
    assert_same(decoded, weight)


@pytest.mark.parametrize(("holds", "says"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_header_that_names_the_other_version_is_refused_for_symmetric_grids(bits: int, holds: str, says: str) -> None:
    weight = random_weight(QuantSpec(bits, 32), 32, 64)
    facts = CheckpointFacts({SITE: weight.spec}, (), has_zero_zero=holds == "gptq_v2")
    parts = parts_of(FORMAT.encode(SITE, weight, facts))
    with pytest.raises(SourceError, match=f"{SITE}: checkpoint_format says {says}, .* these are {holds} zeros"):
        READER.decode(parts, READER.scheme({**FORMAT.config(facts), "checkpoint_format": says}, SITE), SITE)


def test_a_symmetric_config_over_other_zeros_is_refused() -> None:
    parts, config = export(random_weight(QuantSpec(4, 32, symmetric=False), 64, 64))
    with pytest.raises(SourceError, match=r"symmetric \(zero 8\), but the file holds zeros \[0, 1, 2"):
        READER.decode(parts, READER.scheme({**config, "sym": True}, SITE), SITE)


# -------------------------------------------------------------------------------------------------------- scales


def test_scales_that_float16_cannot_hold_are_refused_with_an_example() -> None:
    weight = random_weight(QuantSpec(4, 32), 32, 64)
    weight.scale[5, 1] = 3e-8
    with pytest.raises(NumericsError, match=rf"{SITE}: 1 of 64 scales .*3\.0\d*e-08, which would become 5\.96\d*e-08"):
        FORMAT.encode(SITE, weight, facts_for(weight))


def test_float16_scales_are_stored_as_they_are() -> None:
    weight = random_weight(QuantSpec(4, 32, scale_dtype="float16"), 32, 64)
    weight.scale[0, 0] = 0.1  # more mantissa than bfloat16 has
    assert_same(read_back(weight), weight)


# -------------------------------------------------------------------------------------------------------- config


def test_config_and_side_file_hold_what_a_loader_needs_and_nothing_about_the_solving() -> None:
    facts = CheckpointFacts({SITE: QuantSpec(4, 64)}, ("lm_head",), False)
    config = FORMAT.config(facts)
    quantizer = config.pop("meta")["quantizer"]
    assert len(quantizer) == 1 and quantizer[0].startswith("quantforge:")
    assert config == {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 64,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    assert FORMAT.side_files(facts) == {"quantize_config.json": FORMAT.config(facts)}


@pytest.mark.parametrize("spec", [QuantSpec(4, 64), QuantSpec(8, None, symmetric=False)])
def test_transformers_parses_the_config_and_takes_every_setting_from_it(spec: QuantSpec) -> None:
    from transformers import GPTQConfig

    written = FORMAT.config(CheckpointFacts({SITE: spec}, ("lm_head",), not spec.symmetric))
    parsed = GPTQConfig.from_dict(written)
    assert (parsed.bits, parsed.group_size) == (spec.bits, spec.group_size or -1)
    assert (parsed.sym, parsed.desc_act) == (spec.symmetric, False)
    assert parsed.format == written["checkpoint_format"] == ("gptq" if spec.symmetric else "gptq_v2")


def test_a_scale_per_row_is_group_size_minus_1() -> None:
    assert FORMAT.config(CheckpointFacts({SITE: QuantSpec(4, None)}, (), False))["group_size"] == -1


def left_alone(config: dict[str, Any], module: str) -> bool:
    """The rule of GPTQModel, vLLM and SGLang: `re.match` against what follows the sign."""
    return any(re.match(rule.removeprefix("-:"), module) for rule in config["dynamic"] if rule.startswith("-:"))


def test_kept_modules_are_left_alone_and_no_other() -> None:
    kept = [f"model.layers.{i}.mlp.gate" for i in range(12)] + ["model.layers.1.self_attn.q_proj", "lm_head"]
    quantized = [f"model.layers.{i}.{leaf}" for i in range(12) for leaf in ("mlp.gate_proj", "self_attn.o_proj")]
    quantized += [f"model.layers.{i}.self_attn.q_proj" for i in range(12) if i != 1]
    config = FORMAT.config(CheckpointFacts(dict.fromkeys(quantized, QuantSpec(4, 64)), tuple(kept), False))
    assert config["dynamic"] == {
        r"-:^model\.layers\.\d+\.mlp\.gate$": {},
        r"-:^model\.layers\.1\.self_attn\.q_proj$": {},
    }
    assert all(left_alone(config, module) for module in kept if module != "lm_head")
    assert not any(left_alone(config, module) for module in quantized)


def test_kept_modules_are_left_alone_under_the_names_servers_fuse_them_to() -> None:
    leaves = [f"self_attn.{leaf}_proj" for leaf in "qkv"] + ["mlp.experts.0.up_proj", "mlp.experts.1.up_proj"]
    kept, quantized = ([f"model.layers.{i}.{leaf}" for leaf in leaves] for i in (0, 1))
    config = FORMAT.config(CheckpointFacts(dict.fromkeys(quantized, QuantSpec(4, 64)), tuple(kept), False))
    for fused in ("self_attn.qkv_proj", "mlp.experts"):
        assert left_alone(config, f"model.layers.0.{fused}")
        assert not left_alone(config, f"model.layers.1.{fused}")


def test_a_module_of_which_some_parts_are_quantized_is_not_left_alone() -> None:
    facts = CheckpointFacts({"m.experts.0.up_proj": QuantSpec(4, 64)}, ("m.experts.1.up_proj",), False)
    assert FORMAT.config(facts)["dynamic"] == {r"-:^m\.experts\.1\.up_proj$": {}}


# ------------------------------------------------------------------------------------------------------ problems


@pytest.mark.parametrize(("bits", "multiple"), [(2, 16), (3, 32), (4, 8), (8, 4)])
def test_features_that_end_inside_a_word_are_refused_naming_every_site(bits: int, multiple: int) -> None:
    odd = multiple + 2
    sites = [
        SiteShape("good", 64, 64),
        SiteShape("tall", odd, 64),
        SiteShape("wide", 64, odd),
        SiteShape("both", odd, odd),
    ]
    of_in, of_out = FORMAT.problems(*alike(QuantSpec(bits, None), *sites))
    assert f"in_features to be a multiple of {multiple} at {bits} bits" in of_in
    assert f"wide [64, {odd}], both [{odd}, {odd}]" in of_in and "tall" not in of_in
    assert f"out_features to be a multiple of {multiple} at {bits} bits" in of_out
    assert f"tall [{odd}, 64], both [{odd}, {odd}]" in of_out and "wide" not in of_out
    assert "good" not in of_in + of_out


def test_conv1d_sites_are_accepted() -> None:
    assert FORMAT.problems(*alike(QuantSpec(4, 64), SiteShape("h.0.attn.c_attn", 192, 64, "conv1d"))) == []
