"""Conversion between formats: the same codes, scales and zeros, or a refusal that says why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade import edit_config, edit_quantization, in_other_order, pack, quantization_of
from random_grids import random_weight, shared_folder
from safetensors.torch import load_file, save_file

from quantforge import Recipe, convert_checkpoint, make_plan, quantize
from quantforge.cli import main
from quantforge.errors import PlanError, SourceError, UsageError, VerifyError, WorkspaceError
from quantforge.model.packed import PackedCheckpoint, open_any
from quantforge.pipeline import convert as convert_module
from quantforge.quantized import QuantizedWeight
from quantforge.readers import DecodedWeight
from quantforge.spec import ActivationSpec, QuantSpec

ASYMMETRIC = QuantSpec(4, 64, symmetric=False)
SYMMETRIC = QuantSpec(4, 64)
Q_PROJ = "model.layers.0.self_attn.q_proj"
FOREIGN = shared_folder() / "foreign"


def opened(path: Path) -> PackedCheckpoint:
    found = open_any(path)
    assert isinstance(found, PackedCheckpoint)
    return found


def grids_of(path: Path) -> dict[str, DecodedWeight]:
    packed = opened(path)
    return {name: packed.decode(name) for name in packed.sites}


def assert_same_grids(path: Path, weights: dict[str, QuantizedWeight]) -> None:
    found = grids_of(path)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name].codes, weight.codes), name
        assert torch.equal(found[name].zero, weight.zero), name
        assert torch.equal(found[name].scale.float(), weight.scale.float()), name
        assert torch.equal(found[name].dequantize(), weight.dequantize()), name


def left_in(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def refusal(source: Path, format_name: str, output: Path) -> str:
    """The message with which a conversion is refused; nothing is left behind."""
    with pytest.raises(PlanError) as error:
        convert_checkpoint(source, format_name, output)
    assert not output.exists() and not output.with_name(f"{output.name}.partial").exists()
    return str(error.value)


# ------------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_round_through_every_format_gives_the_same_bytes_again(
    tiny_llama: Path, tmp_path: Path, symmetric: bool
) -> None:
    weights = pack(tiny_llama, tmp_path / "0", "gptq", replace(ASYMMETRIC, symmetric=symmetric), lowest_zero=1)
    path = ["gptq", "awq", "compressed-tensors", "gptq-v2", "gptq"]
    for step, name in enumerate(path[1:], 1):
        done = convert_checkpoint(tmp_path / str(step - 1), name, tmp_path / str(step))
        assert_same_grids(tmp_path / str(step), weights)
        assert (done.source_format, done.format, done.sites) == (path[step - 1].removesuffix("-v2"), name, 14)
    assert quantization_of(tmp_path / "3")["checkpoint_format"] == "gptq_v2"
    first, last = load_file(tmp_path / "0" / "model.safetensors"), load_file(tmp_path / "4" / "model.safetensors")
    assert first.keys() == last.keys() and all(torch.equal(first[key], last[key]) for key in first)
    assert quantization_of(tmp_path / "0") == quantization_of(tmp_path / "4")


def test_awq_zeros_of_0_become_gptq_version_2_and_none_wraps(tiny_llama: Path, tmp_path: Path) -> None:
    weights = pack(tiny_llama, tmp_path / "awq", "awq", ASYMMETRIC, lowest_zero=0)
    convert_checkpoint(tmp_path / "awq", "gptq", tmp_path / "gptq")
    assert quantization_of(tmp_path / "gptq")["checkpoint_format"] == "gptq_v2"
    assert_same_grids(tmp_path / "gptq", weights)
    stored = load_file(tmp_path / "gptq" / "model.safetensors")[f"{Q_PROJ}.qzeros"]
    nibbles = torch.stack([stored >> shift & 15 for shift in range(0, 32, 4)], dim=-1).flatten(1)
    assert torch.equal(nibbles.t().to(torch.uint8), weights[Q_PROJ].zero) and int(nibbles.min()) == 0


def test_act_order_is_kept_as_g_idx_in_gptq_and_refused_elsewhere(tiny_llama: Path, tmp_path: Path) -> None:
    def make(name: str, rows: int, columns: int) -> QuantizedWeight:
        weight = random_weight(ASYMMETRIC, rows, columns)
        return in_other_order(weight) if name == Q_PROJ else weight

    weights = pack(tiny_llama, tmp_path / "in", "gptq", make)
    convert_checkpoint(tmp_path / "in", "gptq-v2", tmp_path / "out")
    assert_same_grids(tmp_path / "out", weights)
    assert quantization_of(tmp_path / "out")["desc_act"] is True
    index = load_file(tmp_path / "out" / "model.safetensors")[f"{Q_PROJ}.g_idx"]
    assert index.dtype == torch.int32 and index.tolist() == [0, 1] * 64
    for name in ("awq", "compressed-tensors"):
        said = refusal(tmp_path / "in", name, tmp_path / "refused")
        assert f"inputs of 1 sites are in an order of their own (act-order, g_idx): {Q_PROJ}" in said
        assert said.endswith("no such problem with --format gptq, gptq-v2")


def test_a_short_last_group_is_kept_in_gptq_and_refused_elsewhere(tiny_llama: Path, tmp_path: Path) -> None:
    def make(name: str, rows: int, columns: int) -> QuantizedWeight:
        spec = QuantSpec(4, 96, symmetric=False)  # 384 is 4 groups, 128 is 96 + 32
        if columns == 384:
            return random_weight(spec, rows, columns)
        longer = random_weight(spec, rows, 192)
        codes = longer.codes[:, :columns].contiguous()
        return QuantizedWeight(spec, codes, longer.scale, longer.zero, torch.arange(columns) // 96)

    weights = pack(tiny_llama, tmp_path / "in", "gptq", make)
    edit_quantization(tmp_path / "in", desc_act=False)
    convert_checkpoint(tmp_path / "in", "gptq-v2", tmp_path / "out")
    assert_same_grids(tmp_path / "out", weights)
    assert quantization_of(tmp_path / "out")["desc_act"] is False
    said = refusal(tmp_path / "in", "awq", tmp_path / "refused")
    assert "awq needs a group size that divides the inputs, and the last group is short at 12 sites" in said


def test_scales_change_dtype_only_where_every_one_is_exact(tiny_llama: Path, tmp_path: Path) -> None:
    """bfloat16 scales between 2**-14 and 2**16 are float16 scales too; smaller ones lose digits."""

    def make(name: str, rows: int, columns: int) -> QuantizedWeight:
        weight = random_weight(SYMMETRIC, rows, columns)
        if name == Q_PROJ:
            weight.scale[:3, 0] = 1.2578125 * 2.0**-20
        return weight

    weights = pack(tiny_llama, tmp_path / "exact", "compressed-tensors", SYMMETRIC)
    done = convert_checkpoint(tmp_path / "exact", "gptq", tmp_path / "out")
    assert done.scale_dtype == "float16"
    assert_same_grids(tmp_path / "out", weights)
    pack(tiny_llama, tmp_path / "small", "compressed-tensors", make)
    count = sum(weight.scale.numel() for weight in weights.values())
    said = refusal(tmp_path / "small", "gptq", tmp_path / "refused")
    assert (
        f"gptq stores scales in float16, which cannot hold 3 of {count} scales exactly, at 1 sites: {Q_PROJ} (3)"
        in said
    )
    assert said.endswith("no such problem with --format compressed-tensors")


def test_scales_take_the_models_dtype_where_the_format_leaves_the_choice(tiny_llama: Path, tmp_path: Path) -> None:
    pack(tiny_llama, tmp_path / "gptq", "gptq", SYMMETRIC)
    edit_config(tmp_path / "gptq", dtype="bfloat16")
    assert convert_checkpoint(tmp_path / "gptq", "compressed-tensors", tmp_path / "ct").scale_dtype == "bfloat16"
    assert load_file(tmp_path / "ct" / "model.safetensors")[f"{Q_PROJ}.weight_scale"].dtype == torch.bfloat16


def test_mixed_grids_go_to_formats_that_have_rules_for_them(tiny_llama: Path, tmp_path: Path) -> None:
    def make(name: str, rows: int, columns: int) -> QuantizedWeight:
        return random_weight(QuantSpec(3, 32) if name.endswith("down_proj") else QuantSpec(8, None), rows, columns)

    weights = pack(tiny_llama, tmp_path / "in", "compressed-tensors", make)
    convert_checkpoint(tmp_path / "in", "gptq", tmp_path / "out")
    assert_same_grids(tmp_path / "out", weights)
    assert (quantization_of(tmp_path / "out")["bits"], len(quantization_of(tmp_path / "out")["dynamic"])) == (8, 1)
    said = refusal(tmp_path / "in", "awq", tmp_path / "refused")
    assert "awq holds 4 bits only, and 2 sites have 3, 12 sites have 8" in said


def test_quantized_activations_go_to_compressed_tensors_only(tiny_llama: Path, tmp_path: Path) -> None:
    grid, spec = QuantSpec(8, None), ActivationSpec()
    weights = pack(tiny_llama, tmp_path / "in", "compressed-tensors", grid, activations=spec)
    convert_checkpoint(tmp_path / "in", "compressed-tensors", tmp_path / "out")
    assert_same_grids(tmp_path / "out", weights)
    assert quantization_of(tmp_path / "out") == quantization_of(tmp_path / "in")
    said = refusal(tmp_path / "in", "gptq", tmp_path / "refused")
    assert "gptq cannot say that inputs are quantized, and those of 14 sites are (8-bit activations per token)" in said


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors"])
def test_a_quantized_head_stays_quantized(tiny_llama: Path, tmp_path: Path, name: str) -> None:
    weights = pack(tiny_llama, tmp_path / "in", "gptq-v2", SYMMETRIC, head=True)
    done = convert_checkpoint(tmp_path / "in", name, tmp_path / "out")
    assert_same_grids(tmp_path / "out", weights)
    config = quantization_of(tmp_path / "out")
    assert done.sites == 15
    assert config.get("lm_head", True) is True and "lm_head" not in str(config.get("ignore"))
    assert config.get("modules_to_not_convert") is None


def test_conv1d_sites_stay_in_gptq(tiny_gpt2: Path, tmp_path: Path) -> None:
    weights = pack(tiny_gpt2, tmp_path / "in", "gptq", ASYMMETRIC, lowest_zero=1)
    convert_checkpoint(tmp_path / "in", "gptq-v2", tmp_path / "out")
    assert_same_grids(tmp_path / "out", weights)
    for name in ("awq", "compressed-tensors"):
        said = refusal(tmp_path / "in", name, tmp_path / "refused")
        assert f"{name} quantizes Linear modules only, and 4 sites are Conv1D: " in said


def test_a_converted_export_of_a_run_is_the_one_the_run_would_have_written(tiny_llama: Path, tmp_path: Path) -> None:
    formats = ("gptq", "awq", "gptq-v2", "compressed-tensors")
    recipe = Recipe(
        model=str(tiny_llama), output=str(tmp_path / "run"), method="rtn", group_size=64, symmetric=False,
        formats=formats,
    )  # fmt: skip
    assert list(quantize(recipe, make_plan(recipe)))
    for one, other in zip(formats, (*formats[1:], formats[0]), strict=True):
        convert_checkpoint(tmp_path / "run" / one, other, tmp_path / other)
        for file in ("model.safetensors", "config.json"):
            assert (tmp_path / other / file).read_bytes() == (tmp_path / "run" / other / file).read_bytes(), other


# ------------------------------------------------------------------------------------------------ everything else


def test_other_tensors_and_files_are_carried_over_into_shards(tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "in"
    pack(tiny_llama, source, "gptq", SYMMETRIC)
    biases = {f"{Q_PROJ}.bias": torch.arange(128.0)}
    save_file(load_file(source / "model.safetensors") | biases, source / "model.safetensors", {"format": "pt"})
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "quantization_config.json").write_text("{}")
    (source / "quantforge.json").write_text('{"method": "rtn", "fingerprint": {"model": "x"}}')
    convert_checkpoint(source, "awq", tmp_path / "out", max_shard_size=100_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3 and all((tmp_path / "out" / shard).stat().st_size < 200_000 for shard in shards)
    before, after = opened(source), opened(tmp_path / "out")
    floats = [key for key in before.keys() if not before.is_packed(key)]  # noqa: SIM118
    assert set(floats) >= {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", *biases}
    assert all(torch.equal(before.read(key), after.read(key)) for key in floats)
    names = left_in(tmp_path / "out")
    assert {"chat_template.jinja", "tokenizer.json", "generation_config.json"} <= set(names)
    assert not {"quantize_config.json", "quantization_config.json"} & set(names)
    report = json.loads((tmp_path / "out" / "quantforge.json").read_text())
    assert report["method"] == "rtn" and "fingerprint" not in report
    assert (report["converted"]["from"], report["converted"]["to"]) == ("gptq", "awq")
    config, was = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", source))
    assert {**config, "quantization_config": None} == {**was, "quantization_config": None}


def test_a_tied_head_is_written_no_time_and_a_repeated_one_once(tiny_llama_tied: Path, tmp_path: Path) -> None:
    pack(tiny_llama_tied, tmp_path / "in", "gptq", SYMMETRIC)
    done = convert_checkpoint(tmp_path / "in", "awq", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "lm_head.weight" not in tensors and done.notes == ()
    save_file(
        load_file(tmp_path / "in" / "model.safetensors") | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
        tmp_path / "in" / "model.safetensors",
        {"format": "pt"},
    )
    again = convert_checkpoint(tmp_path / "in", "awq", tmp_path / "again")
    assert again.notes == ("lm_head.weight repeats the tensor it is tied to and is written once",)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def test_a_config_that_multimodal_models_nest_is_rewritten_where_it_was(tmp_path: Path) -> None:
    from quantforge.pipeline.carried import without_quantization

    config = {"a": 1, "quantization_config": {}, "text_config": {"b": 2, "quantization_config": {}}}
    assert without_quantization(config) == {"a": 1, "text_config": {"b": 2}}
    assert "quantization_config" in config["text_config"]  # type: ignore[operator]


# ------------------------------------------------------------------------------------------------ refused or failed


def test_what_headers_tell_is_said_before_any_weight_is_read(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(tiny_llama, tmp_path / "in", "gptq", QuantSpec(8, 64))
    edit_quantization(tmp_path / "in", activation={"bits": 8})

    def read(self: PackedCheckpoint, site: str) -> DecodedWeight:
        raise AssertionError(f"{site} was read")

    monkeypatch.setattr(PackedCheckpoint, "decode", read)
    lines = refusal(tmp_path / "in", "awq", tmp_path / "out").splitlines()
    assert lines[0].endswith("in cannot be converted to awq exactly:")
    assert lines[1:] == [
        "activation is {'bits': 8} in its quantization_config, which a conversion would lose",
        "awq holds 4 bits only, and 14 sites have 8; use --format gptq or compressed-tensors",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is {'num_bits': 8}"),
        ({"transform_config": {"config_groups": 1}}, "transform_config is {'config_groups': 1}"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is {'format': 'sparse-24-bitmask'}"),
    ],
)
def test_settings_that_a_conversion_would_lose_are_refused(
    tiny_llama: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    pack(tiny_llama, tmp_path / "in", "compressed-tensors", SYMMETRIC)
    edit_quantization(tmp_path / "in", **change)
    assert message in refusal(tmp_path / "in", "gptq", tmp_path / "out")


def test_a_wrong_version_label_is_refused_and_not_carried_over(tiny_llama: Path, tmp_path: Path) -> None:
    pack(tiny_llama, tmp_path / "in", "gptq-v2", SYMMETRIC)
    edit_quantization(tmp_path / "in", checkpoint_format="gptq")
    with pytest.raises(SourceError, match="these are gptq_v2 zeros: set checkpoint_format to it"):
        convert_checkpoint(tmp_path / "in", "awq", tmp_path / "out")
    assert left_in(tmp_path) == ["in"]


def test_float_checkpoints_unknown_formats_and_taken_outputs_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    assert "is not quantized, so there is nothing to convert" in refusal(tiny_llama, "awq", tmp_path / "out")
    with pytest.raises(
        UsageError, match="unknown format 'exl3'; known formats: awq, compressed-tensors, gguf, gptq, gptq-v2"
    ):
        convert_checkpoint(tiny_llama, "exl3", tmp_path / "out")
    pack(tiny_llama, tmp_path / "in", "gptq", SYMMETRIC)
    with pytest.raises(WorkspaceError, match="in already exists; choose another --output or remove it"):
        convert_checkpoint(tmp_path / "in", "awq", tmp_path / "in")


def test_a_conversion_that_is_interrupted_or_does_not_read_back_leaves_nothing(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(tiny_llama, tmp_path / "in", "gptq", SYMMETRIC)

    def stop(what: str, done: int, total: int) -> None:
        if what == "writing" and done == 7:
            assert left_in(tmp_path) == ["in", "out.partial"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(tmp_path / "in", "awq", tmp_path / "out", progress=stop)
    assert left_in(tmp_path) == ["in"]
    original = convert_module.write_checkpoint

    def damaged(directory: Path, *args: Any) -> Any:
        written = original(directory, *args)
        tensors = load_file(directory / "model.safetensors")
        tensors[f"{Q_PROJ}.qweight"][0, 0] ^= 1
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return written

    monkeypatch.setattr(convert_module, "write_checkpoint", damaged)
    with pytest.raises(VerifyError, match=f"{Q_PROJ}: 1 of 16384 codes differ"):
        convert_checkpoint(tmp_path / "in", "awq", tmp_path / "out")
    assert left_in(tmp_path) == ["in"]


def test_the_unfinished_work_of_a_run_is_left_alone(tiny_llama: Path, tmp_path: Path) -> None:
    pack(tiny_llama, tmp_path / "in", "gptq", SYMMETRIC)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "fingerprint.json").write_text('{"bits": 4}')
    (tmp_path / "out.partial" / "layer-00000.json").write_text("{}")
    with pytest.raises(WorkspaceError, match="holds the unfinished layers of a different run"):
        convert_checkpoint(tmp_path / "in", "awq", tmp_path / "out")
    assert {"fingerprint.json", "layer-00000.json"} <= set(left_in(tmp_path / "out.partial"))


# ------------------------------------------------------------------------------------------------ command line


def test_the_verb_prints_facts_or_json_and_exits_0_1_and_2(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pack(tiny_llama, tmp_path / "in", "gptq", SYMMETRIC)
    assert main(["convert", "in", "--format", "awq", "--json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["output"], found["sites"], found["notes"]) == ("in-awq", 14, [])
    assert main(["convert", "in-awq", "--format", "gptq-v2", "-o", "back"]) == 0
    printed = capsys.readouterr()
    assert "output      back (gptq-v2, 63 tensors, equal to the source's)" in printed.out
    assert "writing 14/14" in printed.err and "verifying 14/14" in printed.err
    assert main(["convert", "in", "--format", "awq", "-o", "back"]) == 1
    assert "error: back already exists" in capsys.readouterr().err
    assert main(["convert", "in", "--format", "int4"]) == 2
    assert main(["convert", "in"]) == 2
    assert left_in(tmp_path) == ["back", "in", "in-awq"]


# ------------------------------------------------------------------------------------------------ other tools

NAMES = [
    ("gptqmodel-gptq-sym", "awq"),
    ("gptqmodel-gptq-asym", "awq"),
    ("gptqmodel-gptq-sym-descact", "gptq-v2"),
    ("autoround-auto_gptq", "compressed-tensors"),
    ("autoround-auto_round", "gptq"),
    ("llmcompressor-gptq-sym", "compressed-tensors"),
    ("llmcompressor-gptq-asym", "compressed-tensors"),
    ("llmcompressor-rtn-asym", "compressed-tensors"),
    ("llmcompressor-w8a8", "compressed-tensors"),
]


@pytest.mark.skipif(
    not (FOREIGN / "source").is_dir(), reason=f"no foreign checkpoints in {FOREIGN}; set QUANTFORGE_SHARED"
)
@pytest.mark.parametrize(("name", "format_name"), NAMES)
def test_checkpoints_of_other_tools_convert_to_the_same_weights(name: str, format_name: str, tmp_path: Path) -> None:
    convert_checkpoint(FOREIGN / name, format_name, tmp_path / "out")
    before, after = grids_of(FOREIGN / name), grids_of(tmp_path / "out")
    assert len(before) == 14 and before.keys() == after.keys()
    for site, grid in before.items():
        assert torch.equal(after[site].dequantize(), grid.dequantize()), site


@pytest.mark.skipif(
    not (FOREIGN / "source").is_dir(), reason=f"no foreign checkpoints in {FOREIGN}; set QUANTFORGE_SHARED"
)
def test_float32_scales_of_llm_compressor_are_refused_by_formats_of_float16(tmp_path: Path) -> None:
    said = refusal(FOREIGN / "llmcompressor-gptq-sym", "awq", tmp_path / "out")
    assert "awq stores scales in float16, which cannot hold 4269 of 4608 scales exactly, at 14 sites" in said
