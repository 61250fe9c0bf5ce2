"""AWQ export: golden words, our reader, a naive decoder written as loops, and the packing code of other tools."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_grids import SITE, alike, facts_for, parts_of, random_weight, words

from quantforge.errors import NumericsError, SourceError
from quantforge.formats import CheckpointFacts, SiteShape, load_format
from quantforge.quantized import QuantizedWeight
from quantforge.readers import DecodedWeight, Scheme, load_reader
from quantforge.spec import QuantSpec

FORMAT = load_format("awq")
READER = load_reader("awq")
ASYMMETRIC = QuantSpec(4, 32, symmetric=False)


def export(weight: QuantizedWeight) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    facts = facts_for(weight)
    return parts_of(FORMAT.encode(SITE, weight, facts)), FORMAT.config(facts)


def read_back(weight: QuantizedWeight) -> DecodedWeight:
    parts, config = export(weight)
    return READER.decode(parts, READER.scheme(config, SITE), SITE)


def naive_dequantize(parts: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """Float32 [out, in], one nibble at a time: output o is nibble 0, 4, 1, 5, 2, 6, 3, 7 of word o // 8."""
    qweight, qzeros, scales = (parts[key].tolist() for key in ("qweight", "qzeros", "scales"))

    def nibble(row: list[int], output: int) -> int:
        return row[output // 8] >> 4 * (output % 8 // 2 + 4 * (output % 2)) & 15

    return torch.tensor(
        [
            [
                (nibble(row, output) - nibble(qzeros[i // group_size], output)) * scales[i // group_size][output]
                for i, row in enumerate(qweight)
            ]
            for output in range(len(scales[0]))
        ]
    )


# -------------------------------------------------------------------------------------------------- golden words


def test_packed_weight_and_zeros_equal_words_written_out_by_hand() -> None:
    column = torch.arange(16, dtype=torch.uint8)
    codes = torch.stack([column, 15 - column], dim=1)
    scale = torch.arange(1, 17).reshape(-1, 1).to(torch.bfloat16)
    weight = QuantizedWeight(QuantSpec(4, None, False), codes, scale, column.reshape(-1, 1))
    parts, _ = export(weight)
    assert sorted(parts) == ["qweight", "qzeros", "scales"]
    assert torch.equal(parts["qweight"], words(0x75316420, 0xFDB9ECA8, 0x8ACE9BDF, 0x02461357).reshape(2, 2))
    assert torch.equal(parts["qzeros"], words(0x75316420, 0xFDB9ECA8).reshape(1, 2))
    assert torch.equal(parts["scales"], torch.arange(1, 17).reshape(1, -1).to(torch.float16))
    assert all(tensor.is_contiguous() for tensor in parts.values())


def test_symmetric_zeros_are_8_as_they_are() -> None:
    parts, config = export(random_weight(QuantSpec(4, 32), 16, 64))
    assert torch.equal(parts["qzeros"], words(0x88888888).expand(2, 2))
    assert config["zero_point"] is False


# --------------------------------------------------------------------------------------------------- round trips


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([1, 2, 24, 32, None]), st.booleans())
def test_reader_and_loops_return_the_exact_grid_at_ragged_shapes(
    blocks: int, groups: int, group_size: int | None, symmetric: bool
) -> None:
    in_features = groups * (group_size or 7)
    weight = random_weight(QuantSpec(4, group_size, symmetric), 8 * blocks, in_features)
    parts, _ = export(weight)
    decoded = read_back(weight)
    assert parts["qweight"].shape == (in_features, blocks)
    assert torch.equal(decoded.codes, weight.codes) and torch.equal(decoded.zero, weight.zero)
    assert torch.equal(decoded.scale, weight.scale.to(torch.float16)) and decoded.scale.dtype == torch.float16
    assert torch.equal(decoded.dequantize(), weight.dequantize())
    assert torch.equal(naive_dequantize(parts, group_size or in_features), weight.dequantize())


@pytest.mark.parametrize("zero", [0, 15])
def test_groups_of_one_sign_keep_their_zero_at_either_end(zero: int) -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(8, 2)
    scale = torch.full((8, 2), 0.5, dtype=torch.float16)
    spec = QuantSpec(4, 16, symmetric=False, scale_dtype="float16")
    weight = QuantizedWeight(spec, codes, scale, torch.full((8, 2), zero, dtype=torch.uint8))
    parts, config = export(weight)
    assert torch.equal(parts["qzeros"], words(0x11111111 * zero).expand(2, 1)) and config["zero_point"] is True
    found = read_back(weight).dequantize()
    assert found[0, :16].tolist() == [0.5 * (code - zero) for code in range(16)]
    assert bool((found >= 0).all() if zero == 0 else (found <= 0).all())


# --------------------------------------------------------------------------------------------------- other tools


def test_gptqmodel_unpacks_the_same_weights_and_packs_the_same_words() -> None:
    reason = "gptqmodel, whose AWQ packing code this compares with, is not installed"
    theirs = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils", reason=reason)
    for out_features, in_features in ((8, 32), (40, 96), (64, 128)):
        weight = random_weight(ASYMMETRIC, out_features, in_features)
        parts, _ = export(weight)
        found = theirs.dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, 32)
        assert torch.equal(found.t(), weight.dequantize())
        qweight, qzeros = theirs.pack_awq(weight.codes.t().int(), weight.zero.t().int(), 4)
        assert torch.equal(parts["qweight"], qweight) and torch.equal(parts["qzeros"], qzeros)


def test_auto_round_packs_the_same_words() -> None:
    reason = "auto_round, whose AWQ packing code this compares with, is not installed"
    theirs = pytest.importorskip("auto_round.export.export_to_awq.utils", reason=reason)
    for out_features, in_features in ((8, 32), (40, 96), (64, 128)):
        weight = random_weight(ASYMMETRIC, out_features, in_features)
        parts, _ = export(weight)
        linear = torch.nn.Linear(in_features, out_features, bias=False)
        linear.weight.data = weight.dequantize()
        packed = theirs.WQLinear_GEMM.from_linear(
            linear, 4, 32, scales=weight.scale.float().t(), zeros=weight.zero.t(), device="cpu"
        )
        for name, tensor in parts.items():
            assert torch.equal(getattr(packed, name), tensor), name


# ------------------------------------------------------------------------------------------------ config, problems


def test_config_has_the_keys_loaders_read() -> None:
    facts = facts_for(random_weight(QuantSpec(4, None, symmetric=False), 8, 8), kept=("lm_head", "model.layers.0.gate"))
    assert FORMAT.config(facts) == {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": -1, "zero_point": True,
        "modules_to_not_convert": ["lm_head", "model.layers.0.gate"],
    }  # fmt: skip
    assert FORMAT.side_files(facts) == {}
    assert FORMAT.config(facts_for(random_weight(ASYMMETRIC, 8, 32), kept=()))["modules_to_not_convert"] is None


def test_a_kept_module_whose_name_begins_a_quantized_ones_is_told_apart() -> None:
    specs = {"a.mlp.gate_proj": ASYMMETRIC, "lm_head": ASYMMETRIC}
    config = FORMAT.config(CheckpointFacts(specs, ("a.mlp.gate", "a.other"), False))
    assert config["modules_to_not_convert"] == ["a.mlp.gate$", "a.other"] and config["lm_head"] is True


def test_everything_awq_cannot_hold_is_a_problem_with_its_numbers() -> None:
    shapes = [SiteShape("a", 64, 64), SiteShape("b", 64, 64), SiteShape("c", 20, 64), SiteShape("d", 64, 64, "conv1d")]
    four, eight = QuantSpec(4, 32), QuantSpec(8, 32)
    assert FORMAT.problems(*alike(four, *shapes[:2])) == []
    conv1d, bits, ragged = FORMAT.problems({"a": four, "b": eight, "c": four, "d": QuantSpec(3, 32)}, shapes)
    assert "1 sites are Conv1D: d" in conv1d
    assert "awq holds 4 bits only, and 1 sites have 3, 1 sites have 8" in bits
    assert "out_features to be a multiple of 8" in ragged and "c [20, 64]" in ragged
    (mixed,) = FORMAT.problems({"a": four, "b": QuantSpec(4, 64)}, shapes[:2])
    assert "4 bits, group 32, symmetric: 1 sites; 4 bits, group 64, symmetric: 1 sites" in mixed


def test_scales_that_float16_cannot_hold_are_refused_with_their_count() -> None:
    weight = random_weight(QuantSpec(4, 32), 8, 64)
    weight.scale[0, 0] = 1e38
    with pytest.raises(NumericsError, match="1 of 16 scales cannot be stored in float16"):
        FORMAT.encode(SITE, weight, facts_for(weight))


# ------------------------------------------------------------------------------------------------------- reader


@pytest.mark.parametrize(
    "config",
    [
        {"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True},
        {"bits": 4, "group_size": 32, "checkpoint_format": "gemm", "format": "gemm", "sym": False},
        {"bits": 4, "group_size": 32},
    ],
    ids=["transformers", "autoawq", "gptqmodel", "defaults"],
)
def test_settings_are_read_under_the_names_other_tools_give_them(config: dict[str, Any]) -> None:
    assert READER.scheme(config, SITE) == Scheme(4, 32, False, "gemm")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": "gemv"}, "AWQ version 'gemv'"),
        ({"backend": "llm-awq"}, "backend 'llm-awq'"),
        ({"zero_point": "no"}, "zero_point is 'no'"),
        ({"bits": None}, "bits is None"),
        ({"dynamic": {"-:.*up_proj": {}}}, "says it is not quantized"),
    ],
)
def test_an_invalid_config_is_refused_naming_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError) as error:
        READER.scheme({"bits": 4, "group_size": 32, "version": "gemm", "zero_point": True} | change, SITE)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("suffix", "replacement", "message"),
    [
        ("qzeros", None, "qzeros is missing"),
        ("qweight", torch.zeros(64, 4), "qweight is torch.float32"),
        ("qweight", torch.zeros(60, 4, dtype=torch.int32), "group size 32 does not divide 60"),
        ("qzeros", torch.zeros(2, 3, dtype=torch.int32), "qzeros has shape [2, 3], expected [2, 4]"),
        ("scales", torch.ones(32, 2), "scales has shape [32, 2], expected [2, 32]"),
        ("scales", torch.full((2, 32), torch.inf), "64 of 64 values of scales are not finite"),
    ],
)
def test_wrong_tensors_are_refused_naming_the_site_and_the_numbers(
    suffix: str, replacement: torch.Tensor | None, message: str
) -> None:
    parts, config = export(random_weight(ASYMMETRIC, 32, 64))
    del parts[suffix]
    if replacement is not None:
        parts[suffix] = replacement
    with pytest.raises(SourceError) as error:
        READER.decode(parts, READER.scheme(config, SITE), SITE)
    assert SITE in str(error.value) and message in str(error.value)


def test_zeros_that_contradict_a_symmetric_config_and_other_bits_are_refused() -> None:
    parts, config = export(random_weight(ASYMMETRIC, 32, 64))
    with pytest.raises(SourceError, match=r"the config says symmetric \(zero 8\), but the file holds zeros \[0, "):
        READER.decode(parts, READER.scheme(config | {"zero_point": False}, SITE), SITE)
    with pytest.raises(SourceError, match="AWQ of 8 bits cannot be read, only of 4"):
        READER.decode(parts, READER.scheme(config | {"bits": 8}, SITE), SITE)


def test_sites_are_found_by_their_codes_and_biases_are_left_alone() -> None:
    keys = [f"a.b.{suffix}" for suffix in ("qweight", "qzeros", "scales", "bias")] + ["c.scales", "d.weight"]
    assert READER.group_keys(keys) == {"a.b": {s: f"a.b.{s}" for s in ("qweight", "qzeros", "scales")}}


def test_auto_round_checkpoints_packed_as_awq_are_read() -> None:
    weight = random_weight(ASYMMETRIC, 32, 64)
    reader = load_reader("auto-round")
    config = {"packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 32, "sym": False}
    decoded = reader.decode(export(weight)[0], reader.scheme(config, SITE), SITE)
    assert torch.equal(decoded.dequantize(), weight.dequantize())
