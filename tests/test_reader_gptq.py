"""The GPTQ and AutoRound readers on files of other shapes than ours, and on files that are wrong."""

from typing import Any

import pytest
import torch
from random_grids import SITE, facts_for, parts_of, random_weight

from quantforge.errors import SourceError
from quantforge.formats import load_format
from quantforge.quantized import QuantizedWeight
from quantforge.readers import Scheme, load_reader
from quantforge.spec import QuantSpec

READER = load_reader("gptq")


def export(weight: QuantizedWeight) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    facts, gptq = facts_for(weight), load_format("gptq")
    return parts_of(gptq.encode(SITE, weight, facts)), gptq.config(facts)


# ------------------------------------------------------------------------------------------------ reader: g_idx


def test_columns_follow_the_group_index_of_the_file() -> None:
    weight = random_weight(QuantSpec(4, 2, symmetric=False), 8, 8)
    parts, config = export(weight)
    parts["g_idx"] = torch.tensor([3, 0, 1, 2, 0, 3, 2, 1], dtype=torch.int32)
    decoded = READER.decode(parts, READER.scheme({**config, "desc_act": True}, SITE), SITE)
    for column, owner in enumerate(parts["g_idx"].tolist()):
        offset = weight.codes[:, column].float() - weight.zero[:, owner].float()
        assert torch.equal(decoded.dequantize()[:, column], offset * weight.scale[:, owner].float())


def test_a_file_without_group_index_has_contiguous_groups() -> None:
    weight = random_weight(QuantSpec(4, 32, symmetric=False), 32, 96)
    parts, config = export(weight)
    del parts["g_idx"]
    decoded = READER.decode(parts, READER.scheme(config, SITE), SITE)
    assert torch.equal(decoded.dequantize(), weight.dequantize())


def test_the_last_group_may_be_short() -> None:
    weight = random_weight(QuantSpec(4, 32, symmetric=False), 32, 96)
    parts, config = export(weight)
    parts["qweight"], parts["g_idx"] = parts["qweight"][:10], parts["g_idx"][:80]
    decoded = READER.decode(parts, READER.scheme(config, SITE), SITE)
    assert torch.equal(decoded.dequantize(), weight.dequantize()[:, :80])


# ---------------------------------------------------------------------------------------------- reader: refusals


@pytest.mark.parametrize(
    ("suffix", "replacement", "message"),
    [
        ("qweight", None, "qweight is missing"),
        ("qzeros", None, "qzeros is missing"),
        ("scales", None, "scales is missing"),
        ("qweight", torch.zeros(7, 64, dtype=torch.int32), "qweight has shape [7, 64], expected [8, 64]"),
        ("qweight", torch.zeros(8, 64, dtype=torch.int64), "qweight is torch.int64, expected torch.int32"),
        ("qweight", torch.zeros(8, dtype=torch.int32), "shape [8], expected 2 dims"),
        ("qzeros", torch.zeros(3, 8, dtype=torch.int32), "qzeros has shape [3, 8], expected [2, 8]"),
        ("scales", torch.ones(64, 2), "scales has shape [64, 2], expected [2, 64]"),
        ("scales", torch.full((2, 64), torch.nan), "128 of 128 values of scales are not finite"),
        ("g_idx", torch.full((64,), -1, dtype=torch.int32), "-1 to -1; 2 groups are numbered 0 to 1"),
        ("g_idx", torch.arange(64, dtype=torch.int32) // 16, "0 to 3; 2 groups are numbered 0 to 1"),
        ("g_idx", torch.zeros(64, dtype=torch.int32), "gives group 0 64 inputs instead of 32"),
    ],
)
def test_wrong_tensors_are_refused_naming_the_site_and_the_numbers(
    suffix: str, replacement: torch.Tensor | None, message: str
) -> None:
    parts, config = export(random_weight(QuantSpec(4, 32, symmetric=False), 64, 64))
    del parts[suffix]
    if replacement is not None:
        parts[suffix] = replacement
    with pytest.raises(SourceError) as error:
        READER.decode(parts, READER.scheme(config, SITE), SITE)
    assert SITE in str(error.value) and message in str(error.value)


PLAIN = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits is 5"),
        ({"bits": True}, "bits is True"),
        ({"bits": None}, "bits is None"),
        ({"bits": 4.0}, "bits is 4.0"),
        ({"group_size": 10**30}, "group_size is 1000000"),
        ({"dynamic": {"a{99999999999999999999}": {}}}, "not a regular expression"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": "64"}, "group_size is '64'"),
        ({"sym": None}, "sym is None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"dynamic": {"-:.*up_proj": {}}}, "dynamic rule '-:.*up_proj' says it is not quantized"),
        ({"dynamic": {"+:(": {}}}, "not a regular expression"),
        ({"dynamic": ["up_proj"]}, "expected a mapping"),
        ({"dynamic": {".*": 8}}, f"the settings for {SITE} are 8"),
    ],
)
def test_an_invalid_config_is_refused_naming_the_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SourceError) as error:
        READER.scheme(PLAIN | change, SITE)
    assert message in str(error.value)


def test_the_first_matching_dynamic_rule_changes_a_sites_settings() -> None:
    rules = {"-:lm_head": {}, r"+:.*layers\.1\..*": {"bits": 8, "group_size": -1}, ".*up_proj": {"sym": False}}
    config = {**PLAIN, "dynamic": rules}
    assert READER.scheme(config, "model.layers.1.mlp.up_proj") == Scheme(8, None, True, "gptq")
    assert READER.scheme(config, "model.layers.2.mlp.up_proj") == Scheme(4, 32, False, "gptq")
    assert READER.scheme(config, "model.layers.2.mlp.down_proj") == Scheme(4, 32, True, "gptq")


def test_auto_round_settings_of_one_site_win_over_the_general_ones() -> None:
    scheme = load_reader("auto-round").scheme
    extra = {SITE: {"bits": 8}, r"model\.layers\.\d+\.mlp\..*": {"group_size": -1}}
    config = {**PLAIN, "packing_format": "auto_round:auto_gptq", "extra_config": extra}
    assert scheme(config, SITE) == Scheme(8, 32, True, "gptq")
    assert scheme(config, "model.layers.7.mlp.up_proj") == Scheme(4, None, True, "gptq")
    assert scheme({**config, "packing_format": "auto_round:auto_awq"}, "a") == Scheme(4, 32, True, "gemm")
    with pytest.raises(SourceError, match="'auto_round:fp8' cannot be read"):
        scheme({**config, "packing_format": "auto_round:fp8"}, SITE)


def test_quantized_sites_are_found_and_other_tensors_are_left_alone() -> None:
    keys = [f"a.b.{suffix}" for suffix in ("qweight", "qzeros", "scales", "g_idx", "bias")] + ["c.scales", "d.weight"]
    assert READER.group_keys(keys) == {"a.b": {s: f"a.b.{s}" for s in ("qweight", "qzeros", "scales", "g_idx")}}
