"""Checkpoints that GPTQModel, llm-compressor and AutoRound wrote, against their float source and their own library.

The checkpoints are not part of the project: the environment variable QUANTFORGE_SHARED names the folder that has them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from random_grids import shared_folder
from safetensors.torch import load_file

from quantforge.errors import SourceError
from quantforge.readers import ActivationScheme, DecodedWeight, Reader, Scheme, load_reader

FOREIGN = shared_folder() / "foreign"
pytestmark = pytest.mark.skipif(
    not (FOREIGN / "source").is_dir(), reason=f"no foreign checkpoints in {FOREIGN}; set QUANTFORGE_SHARED"
)

GPTQ = ["gptqmodel-gptq-sym", "gptqmodel-gptq-asym", "gptqmodel-gptq-sym-descact", "autoround-auto_gptq"]
GPTQ_LAYOUT = [*GPTQ, "autoround-auto_round"]
PACKED = ["llmcompressor-gptq-sym", "llmcompressor-gptq-asym", "llmcompressor-rtn-asym"]
INT8 = "llmcompressor-w8a8"
SITES = {
    f"model.layers.{layer}.{leaf}_proj"
    for layer in (0, 1)
    for leaf in (*(f"self_attn.{part}" for part in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
}


@cache
def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return load_file(FOREIGN / name / "model.safetensors")


@cache
def config_of(name: str) -> dict[str, Any]:
    found = json.loads((FOREIGN / name / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    assert isinstance(found, dict)
    return found


def reader_of(name: str) -> Reader:
    return load_reader(config_of(name)["quant_method"])


def parts_of(name: str) -> dict[str, dict[str, torch.Tensor]]:
    """{site: {suffix: tensor}}"""
    tensors = tensors_of(name)
    keys = reader_of(name).group_keys(tensors)
    return {site: {suffix: tensors[key] for suffix, key in found.items()} for site, found in keys.items()}


def decode(name: str, site: str, **change: Any) -> DecodedWeight:
    """One site, read with its own scheme or, with `change`, deliberately otherwise."""
    reader = reader_of(name)
    return reader.decode(parts_of(name)[site], replace(reader.scheme(config_of(name), site), **change), site)


def distance(weight: torch.Tensor, source: torch.Tensor) -> float:
    """Relative Frobenius error."""
    return float((weight - source).norm() / source.norm())


def source_of(site: str) -> torch.Tensor:
    return tensors_of("source")[f"{site}.weight"].to(torch.float32)


@pytest.mark.parametrize("name", [*GPTQ_LAYOUT, *PACKED, INT8])
def test_exactly_the_quantized_sites_are_found(name: str) -> None:
    assert set(parts_of(name)) == SITES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gptqmodel-gptq-sym-descact", Scheme(4, 64, True, "gptq")),
        ("gptqmodel-gptq-asym", Scheme(4, 64, False, "gptq")),
        ("autoround-auto_round", Scheme(4, 64, True, "gptq")),
        ("llmcompressor-gptq-asym", Scheme(4, 64, False, "pack-quantized")),
        (INT8, Scheme(8, None, True, "int-quantized", ActivationScheme(8, "int", "token", True, True))),
    ],
)
def test_schemes_are_what_the_tools_were_asked_for(name: str, expected: Scheme) -> None:
    assert {reader_of(name).scheme(config_of(name), site) for site in SITES} == {expected}


@pytest.mark.parametrize("name", [*GPTQ_LAYOUT, *PACKED])
def test_4_bit_weights_are_close_to_their_source(name: str) -> None:
    errors = {site: distance(decode(name, site).dequantize(), source_of(site)) for site in SITES}
    assert max(errors.values()) < 0.15, errors


@pytest.mark.parametrize("name", GPTQ_LAYOUT)
def test_reading_version_1_zeros_as_version_2_is_far_from_the_source(name: str) -> None:
    for site in SITES:
        right = distance(decode(name, site).dequantize(), source_of(site))
        wrong = distance(decode(name, site, checkpoint_format="gptq_v2", symmetric=False).dequantize(), source_of(site))
        assert wrong > 2.5 * right, (site, right, wrong)


def test_a_version_2_header_over_version_1_zeros_is_refused() -> None:
    with pytest.raises(SourceError, match="these are gptq zeros"):
        decode("gptqmodel-gptq-sym", "model.layers.0.mlp.up_proj", checkpoint_format="gptq_v2")


def test_ignoring_the_order_of_an_act_order_file_loses_the_weights() -> None:
    for site in SITES:
        decoded = decode("gptqmodel-gptq-sym-descact", site)
        regular = torch.arange(len(decoded.group_index)) // 64
        assert not torch.equal(decoded.group_index, regular)
        right = distance(decoded.dequantize(), source_of(site))
        wrong = distance(replace(decoded, group_index=regular).dequantize(), source_of(site))
        assert wrong > 1.25 * right, (site, right, wrong)  # random weights: scales of groups differ little


def test_the_two_gptq_layouts_of_auto_round_hold_the_same_weights() -> None:
    for site in SITES:
        one, other = decode("autoround-auto_gptq", site), decode("autoround-auto_round", site)
        assert torch.equal(one.dequantize(), other.dequantize())


@pytest.mark.parametrize("name", [*PACKED, INT8])
def test_weights_equal_those_of_the_compressed_tensors_library_bit_for_bit(name: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.QuantizationConfig.model_validate(config_of(name)).config_groups["group_0"]
    compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
    for site, parts in parts_of(name).items():
        expected = compressor.decompress(parts, scheme)["weight"]
        assert expected.dtype == torch.float32
        assert torch.equal(decode(name, site).dequantize(), expected), site


def test_smoothed_8_bit_weights_are_the_source_times_what_the_norms_lost() -> None:
    tensors, source = tensors_of(INT8), tensors_of("source")
    fed_by = {"input_layernorm": [f"self_attn.{part}_proj" for part in "qkv"]}
    fed_by["post_attention_layernorm"] = ["mlp.gate_proj", "mlp.up_proj"]
    for layer in ("model.layers.0", "model.layers.1"):
        for norm, leaves in fed_by.items():
            smoothing = source[f"{layer}.{norm}.weight"].float() / tensors[f"{layer}.{norm}.weight"].float()
            for site in (f"{layer}.{leaf}" for leaf in leaves):
                assert distance(decode(INT8, site).dequantize(), source_of(site) * smoothing) < 0.02
        for site in (f"{layer}.self_attn.o_proj", f"{layer}.mlp.down_proj"):
            assert distance(decode(INT8, site).dequantize(), source_of(site)) < 0.02


@pytest.mark.parametrize("name", [*GPTQ_LAYOUT, *PACKED, INT8])
def test_a_site_with_any_tensor_missing_is_refused_by_name(name: str) -> None:
    site = "model.layers.1.self_attn.k_proj"
    reader, parts = reader_of(name), parts_of(name)[site]
    for suffix in set(parts) - {"g_idx"}:
        rest: Mapping[str, torch.Tensor] = {key: value for key, value in parts.items() if key != suffix}
        with pytest.raises(SourceError, match=f"{site}: tensor {suffix} is missing"):
            reader.decode(rest, reader.scheme(config_of(name), site), site)
