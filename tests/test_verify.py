"""What `verify` infers: each test takes a good checkpoint, does one damage, and asks for one finding at its place."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import edit, found, settings, tensors
from safetensors.torch import load_file, save_file

from quantforge.errors import UsageError
from quantforge.model.shards import INDEX_FILE, SINGLE_FILE
from quantforge.pipeline.convert import convert_checkpoint
from quantforge.pipeline.examine import examine
from quantforge.pipeline.manifest import FILES_KEY, REPORT_FILE
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import Recipe

Q = "model.layers.0.self_attn.q_proj"
SITES = {f"model.layers.0.{leaf}_proj" for leaf in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o")}
SITES |= {f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"

# ------------------------------------------------------------------------------------------------ sound ones


@pytest.mark.parametrize("name", ["source", "gptq", "gptq-asym", "sharded", "packed", "w8a8"])
def test_a_good_checkpoint_has_no_findings(name: str, tiny_exports: dict[str, Path]) -> None:
    assert found(tiny_exports[name]) == set()
    if name != "source":
        examination = examine(tiny_exports[name], tiny_exports["source"])
        assert {f.code for f in examination.findings} == {"tokenizer-missing"}
        assert examination.errors_by_site.keys() == SITES
        assert max(examination.errors_by_site.values()) < (0.01 if name == "w8a8" else 0.12)


def test_a_directory_of_several_outputs_names_them(tiny_exports: dict[str, Path]) -> None:
    finding = examine(tiny_exports["gptq"].parent).findings[0]
    assert finding.code == "several" and "gptq, gptq-asym, packed" in finding.text


# ------------------------------------------------------------------------------------------------ files


def test_missing_shards_are_named(take: Callable[..., Path]) -> None:
    path = take("sharded")
    (path / TWO).unlink()
    assert found(path) == {("error", "shard-missing", TWO)}
    (path / INDEX_FILE).unlink()
    assert found(path) == {("error", "shard-missing", TWO), ("error", "index-missing", INDEX_FILE)}


def test_truncated_files_are_found_all_at_once(take: Callable[..., Path]) -> None:
    path = take("sharded")
    for name in (ONE, TWO):
        (path / name).write_bytes((path / name).read_bytes()[:-7])
    assert found(path) == {("error", "truncated", ONE), ("error", "truncated", TWO)}


def test_overlapping_tensors_are_found(take: Callable[..., Path]) -> None:
    path = take("source")
    raw = (path / SINGLE_FILE).read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header[EMBEDDING]["data_offsets"] = header[HEAD]["data_offsets"]
    changed = json.dumps(header).encode()
    (path / SINGLE_FILE).write_bytes(struct.pack("<Q", len(changed)) + changed + raw[8 + length :])
    assert found(path) == {("error", "offsets", SINGLE_FILE)}


def test_a_stale_index_is_told_tensor_by_tensor(take: Callable[..., Path]) -> None:
    path = take("sharded")
    key = f"{Q}.qweight"

    def change(index: dict[str, Any]) -> None:
        index["weight_map"][NORM] = ONE if index["weight_map"][NORM] == TWO else TWO
        index["weight_map"]["gone"] = ONE
        del index["weight_map"][key]
        index["metadata"]["total_size"] += 1

    edit(path / INDEX_FILE, change)
    stale = {("error", "index-stale", where) for where in (NORM, "gone", key)}
    assert found(path) == stale | {("warning", "index-size", INDEX_FILE)}


def test_files_that_nothing_reads_are_warnings(take: Callable[..., Path]) -> None:
    path = take("sharded")
    shutil.copy(path / ONE, path / "more.safetensors")
    assert found(path) == {("warning", "unread-file", "more.safetensors")}
    single = take("source")
    shutil.copy(single / SINGLE_FILE, single / "more.safetensors")
    assert found(single) == {("warning", "unread-file", "more.safetensors")}


def test_one_file_beside_an_index_is_an_error(take: Callable[..., Path]) -> None:
    path = take("sharded")
    save_file(load_file(path / ONE) | load_file(path / TWO), path / SINGLE_FILE)
    assert ("error", "two-sources", SINGLE_FILE) in found(path)


@pytest.mark.parametrize(("differ", "code"), [(False, "tensor-twice"), (True, "tensor-conflict")])
def test_a_tensor_in_two_shards_is_told_with_whether_the_copies_are_equal(
    take: Callable[..., Path], differ: bool, code: str
) -> None:
    path = take("sharded")
    copied = load_file(path / ONE)[EMBEDDING] + differ
    tensors(path, lambda content: content.update({EMBEDDING: copied}), TWO)
    assert found(path) - {("warning", "index-size", INDEX_FILE)} == {("error", code, EMBEDDING)}


def test_an_index_that_leaves_the_directory_is_refused(take: Callable[..., Path]) -> None:
    path = take("sharded")
    shutil.copy(path / ONE, path.parent / "outside.safetensors")
    edit(path / INDEX_FILE, lambda index: index["weight_map"].update({NORM: "../outside.safetensors"}))
    assert ("error", "index-path", "../outside.safetensors") in found(path)


@pytest.mark.parametrize("target", ["../outside", "nowhere", SINGLE_FILE])
def test_links_out_of_the_directory_are_not_followed(take: Callable[..., Path], target: str) -> None:
    path = take("source")
    shutil.copy(path / SINGLE_FILE, path.parent / "outside")
    (path / SINGLE_FILE).unlink()
    os.symlink(target, path / SINGLE_FILE)
    expected = {("error", "no-weights", SINGLE_FILE)}
    assert found(path) == (expected | {("error", "link", SINGLE_FILE)} if target.startswith("..") else expected)


def test_links_of_the_hubs_cache_are_followed(take: Callable[..., Path], tmp_path: Path) -> None:
    path, cache = take("source"), tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "main").mkdir(parents=True)
    for file in path.iterdir():
        shutil.copy(file, cache / "blobs" / f"of-{file.name}")
        os.symlink(f"../../blobs/of-{file.name}", cache / "snapshots" / "main" / file.name)
    assert found(cache / "snapshots" / "main") == set()


def test_pickles_alone_are_no_weights(take: Callable[..., Path]) -> None:
    path = take("source")
    (path / SINGLE_FILE).rename(path / "pytorch_model.bin")
    finding = next(finding for finding in examine(path).findings if finding.severity == "error")
    assert finding.code == "no-weights" and "pytorch_model.bin" in finding.text


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "quantize_config.json"])
def test_damaged_json_is_found(take: Callable[..., Path], name: str) -> None:
    path = take("gptq")
    (path / name).write_text("{")
    assert ("error", "json", name) in found(path)


# ------------------------------------------------------------------------------------------------ the manifest


def test_any_changed_byte_of_an_export_is_found_without_a_reference(take: Callable[..., Path]) -> None:
    path = take("sharded", report=True)
    hashes = json.loads((path / REPORT_FILE).read_text())[FILES_KEY]
    assert hashes.keys() == {file.name for file in path.iterdir()} - {REPORT_FILE}
    for name in hashes:
        before = (path / name).read_bytes()
        (path / name).write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
        assert ("error", "changed", name) in found(path)
        (path / name).write_bytes(before)
    assert found(path) == set()


def test_weights_added_to_an_export_and_files_lost_from_it_are_found(take: Callable[..., Path]) -> None:
    path = take("gptq", report=True)
    shutil.copy(path / SINGLE_FILE, path / "more.safetensors")
    (path / "generation_config.json").unlink()
    expected = {("error", "added", "more.safetensors"), ("error", "lost", "generation_config.json")}
    assert found(path) == expected | {("warning", "unread-file", "more.safetensors")}


# ------------------------------------------------------------------------------------------------ the config


def test_a_wrong_version_of_symmetric_gptq_is_inferred_from_its_zeros(take: Callable[..., Path]) -> None:
    path = take("gptq")
    settings(path, checkpoint_format="gptq_v2")
    assert found(path) == {("error", "version", site) for site in SITES}
    text = next(finding.text for finding in examine(path).findings if finding.where == Q)
    assert "every zero then reads 7 where a symmetric 4-bit grid has 8" in text


def test_a_wrong_version_of_asymmetric_gptq_is_inferred_from_where_its_weights_lie(take: Callable[..., Path]) -> None:
    path = take("gptq-asym")
    assert "agrees with the zeros" in " ".join(examine(path).notes)
    settings(path, checkpoint_format="gptq_v2")
    assert found(path) == {("error", "version", "config.json")}


def test_a_version_that_cannot_be_told_is_told_by_a_reference(
    take: Callable[..., Path], tiny_exports: dict[str, Path]
) -> None:
    path = take("gptq-asym")
    settings(path, checkpoint_format="gptq_v2")

    def spread(content: dict[str, torch.Tensor]) -> None:  # zeros of every second site a step further
        for site in sorted(SITES)[::2]:
            content[f"{site}.qzeros"] += 0x11111111 * 2

    tensors(path, spread)
    examination = examine(path)
    assert not examination.errors
    assert "cannot be told" in " ".join(examination.notes)
    told = {where for _, code, where in found(path, tiny_exports["source"]) if code == "version"}
    assert told == set(sorted(SITES)[1::2])


def test_a_zero_of_0_in_version_1_is_a_warning(take: Callable[..., Path]) -> None:
    path = take("gptq-asym")

    def wrap(content: dict[str, torch.Tensor]) -> None:
        content[f"{Q}.qzeros"][0, 0] |= 15

    tensors(path, wrap)
    assert found(path) == {("warning", "version-wrap", "config.json")}


def test_a_config_without_quant_method_is_found_and_the_method_inferred(take: Callable[..., Path]) -> None:
    for name, method in (("gptq", "gptq"), ("packed", "compressed-tensors"), ("w8a8", "compressed-tensors")):
        path = take(name)
        edit(path / "config.json", lambda config: config["quantization_config"].pop("quant_method"))
        assert found(path) == {("error", "quant-method", "config.json")}
        assert examine(path).quant_method == method


def test_another_methods_name_over_the_tensors_is_found(take: Callable[..., Path]) -> None:
    path = take("packed")
    settings(path, quant_method="gptq")
    assert found(path) == {("error", "quant-method", "config.json")}


def test_a_quantization_config_inside_text_config_is_found(take: Callable[..., Path]) -> None:
    path = take("gptq")
    edit(path / "config.json", lambda c: c.update(text_config={"quantization_config": c.pop("quantization_config")}))
    assert ("error", "quant-place", "config.json") in found(path)


def test_packed_tensors_without_a_config_are_found(take: Callable[..., Path]) -> None:
    path = take("gptq")
    edit(path / "config.json", lambda config: config.pop("quantization_config"))
    assert found(path) == {("error", "quant-config", "config.json")}
    (path / "quantize_config.json").unlink()
    findings = examine(path).findings
    assert [finding.code for finding in findings if finding.where == "config.json"] == ["quant-config"]


def test_a_quantization_config_over_floats_is_found(take: Callable[..., Path], tiny_exports: dict[str, Path]) -> None:
    path = take("source")
    own = json.loads((tiny_exports["packed"] / "config.json").read_text())["quantization_config"]
    edit(path / "config.json", lambda config: config.update(quantization_config=own))
    assert ("error", "not-packed", "config.json") in found(path)


def test_a_method_that_nothing_reads_is_an_error(take: Callable[..., Path]) -> None:
    path = take("source")
    edit(path / "config.json", lambda config: config.update(quantization_config={"quant_method": "other"}))
    assert found(path) == {("error", "unknown-method", "config.json")}


def test_a_quantize_config_that_contradicts_config_json_is_found(take: Callable[..., Path]) -> None:
    path = take("gptq")
    edit(path / "quantize_config.json", lambda config: config.update(bits=8, sym=False))
    assert found(path) == {("error", "side-config", "quantize_config.json")}


def test_a_grid_that_the_shapes_do_not_fit_is_told_for_every_site(take: Callable[..., Path]) -> None:
    path = take("gptq")
    settings(path, group_size=32)
    assert found(path) == {("error", "shape", site) for site in SITES}
    settings(path, group_size=16, bits=5)
    assert found(path) == {("error", "quant-config", site) for site in SITES}


def test_packed_modules_that_are_ignored_and_floats_that_are_not_are_found(take: Callable[..., Path]) -> None:
    path = take("packed")
    settings(path, ignore=[Q])
    assert found(path) == {("error", "ignored", Q), ("error", "unlisted", HEAD)}


def test_generation_settings_that_transformers_refuses_to_save_are_a_warning(take: Callable[..., Path]) -> None:
    path = take("source")
    edit(path / "generation_config.json", lambda config: config.update(do_sample=False, temperature=0.9))
    assert found(path) == {("warning", "generation", "generation_config.json")}


def test_a_chat_model_without_a_chat_template_is_a_warning(take: Callable[..., Path]) -> None:
    path = take("source")
    (path / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|im_start|>"}]}')
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    assert found(path) == {
        ("warning", "chat-template", "chat_template.jinja"),
        ("warning", "tokenizer-class", "tokenizer_config.json"),
    }
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "tokenizer_config.json").write_text("{}")
    assert found(path) == set()


# ------------------------------------------------------------------------------------------------ tensors


def test_a_site_with_a_part_missing_is_named(take: Callable[..., Path]) -> None:
    for name, suffix in (("gptq", "scales"), ("packed", "weight_shape")):
        path = take(name)
        tensors(path, lambda content, lost=suffix: content.pop(f"{Q}.{lost}"))
        assert found(path) == {("error", "part-missing", Q)}


@pytest.mark.parametrize(("key", "value"), [(f"{Q}.scales", float("nan")), (NORM, float("inf"))])
def test_values_that_are_no_numbers_are_found(take: Callable[..., Path], key: str, value: float) -> None:
    path = take("gptq")
    tensors(path, lambda content: content[key].view(-1)[3:5].fill_(value))
    assert found(path) == {("error", "not-finite", key.removesuffix(".scales"))}


def test_scales_of_zero_are_a_warning_and_an_error_when_all_are(take: Callable[..., Path]) -> None:
    path = take("gptq")
    tensors(path, lambda content: content[f"{Q}.scales"][0, 0].zero_())
    assert found(path) == {("warning", "zero-scale", Q)}
    tensors(path, lambda content: content[f"{Q}.scales"].zero_())
    assert found(path) == {("error", "zero-scale", Q)}


@pytest.mark.parametrize("value", [7, 0])
def test_a_g_idx_that_is_none_is_found(take: Callable[..., Path], value: int) -> None:
    path = take("gptq")
    tensors(path, lambda content: content[f"{Q}.g_idx"][-1].fill_(value))
    assert found(path) == {("error", "order", Q)}


def test_an_order_of_its_own_under_desc_act_false_is_found(take: Callable[..., Path]) -> None:
    path = take("gptq")
    tensors(path, lambda content: content.update({f"{Q}.g_idx": content[f"{Q}.g_idx"].flip(0).contiguous()}))
    assert found(path) == {("error", "order", Q)}
    settings(path, desc_act=True)
    assert found(path) == set()


def test_fused_groups_that_are_not_alike_are_a_warning(
    take: Callable[..., Path], tiny_exports: dict[str, Path]
) -> None:
    path = take("packed")
    original = load_file(tiny_exports["source"] / SINGLE_FILE)[f"{Q}.weight"]

    def keep(content: dict[str, torch.Tensor]) -> None:
        for key in [key for key in content if key.startswith(f"{Q}.")]:
            del content[key]
        content[f"{Q}.weight"] = original

    tensors(path, keep)
    settings(path, ignore=["lm_head", Q])
    assert found(path) == {("warning", "fused", Q)}


# ------------------------------------------------------------------------------------------------ the model


def test_parameters_without_a_tensor_and_tensors_without_a_parameter_are_named(take: Callable[..., Path]) -> None:
    path = take("gptq")
    tensors(path, lambda content: content.update({"model.nrom.weight": content.pop(NORM)}))
    assert found(path) == {("error", "tensor-missing", NORM), ("warning", "tensor-unused", "model.nrom.weight")}


def test_a_number_of_layers_that_is_not_the_checkpoints_is_found(take: Callable[..., Path]) -> None:
    path = take("gptq")
    edit(path / "config.json", lambda config: config.update(num_hidden_layers=2))
    assert found(path) == {("error", "layers", "model.layers.1")}
    edit(path / "config.json", lambda config: config.update(num_hidden_layers=1))

    def another(content: dict[str, torch.Tensor]) -> None:
        content |= {key.replace("layers.0", "layers.1"): t.clone() for key, t in content.items() if "layers.0" in key}

    tensors(path, another)
    assert found(path) == {("error", "layers", "model.layers.1")}


def test_shapes_that_config_json_does_not_describe_are_found(take: Callable[..., Path]) -> None:
    path = take("gptq")
    edit(path / "config.json", lambda config: config.update(vocab_size=40, num_key_value_heads=4))
    shapes = {("error", "model-shape", key) for key in (EMBEDDING, HEAD)}
    keys = (f"model.layers.0.self_attn.{leaf}_proj.weight" for leaf in "kv")
    assert found(path) == shapes | {("error", "model-shape", key) for key in keys}


def test_a_config_that_describes_no_model_is_found_without_taking_memory(take: Callable[..., Path]) -> None:
    path = take("gptq")
    for key in ("num_hidden_layers", "head_dim", "hidden_size"):
        edit(path / "config.json", lambda config, key=key: config.update({key: 10**12}))
        assert found(path) == {("error", "model", "config.json")}
        edit(path / "config.json", lambda config: config.update(num_hidden_layers=1, head_dim=8, hidden_size=32))


def test_a_lost_head_is_told_apart_from_a_tied_one(take: Callable[..., Path]) -> None:
    path = take("source")
    tensors(path, lambda content: content.pop(HEAD))
    assert found(path) == {("error", "head-missing", HEAD)}
    edit(path / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert found(path) == set()


def test_a_second_copy_of_a_tied_head_is_a_warning_and_another_head_an_error(take: Callable[..., Path]) -> None:
    path = take("source")
    edit(path / "config.json", lambda config: config.update(tie_word_embeddings=True))
    assert found(path) == {("error", "head-untied", HEAD)}
    tensors(path, lambda content: content.update({HEAD: content[EMBEDDING].clone()}))
    assert found(path) == {("warning", "head-duplicate", HEAD)}


# ------------------------------------------------------------------------------------------------ a reference


def test_one_changed_value_of_a_kept_tensor_is_found_by_the_reference(
    take: Callable[..., Path], tiny_exports: dict[str, Path]
) -> None:
    path = take("packed")
    tensors(path, lambda content: content[NORM][5].mul_(1.01))
    assert found(path) == set()
    assert found(path, tiny_exports["source"]) == {("error", "changed", NORM)}


@pytest.mark.parametrize("change", ["codes", "scales"])
def test_other_weights_in_a_site_are_found_by_the_reference(
    take: Callable[..., Path], tiny_exports: dict[str, Path], change: str
) -> None:
    path = take("gptq")

    def other(content: dict[str, torch.Tensor]) -> None:
        if change == "codes":
            content[f"{Q}.qweight"] = content[f"{Q}.qweight"].flip(0).contiguous()
        else:
            content[f"{Q}.scales"] *= 2

    tensors(path, other)
    assert found(path) == set()
    assert found(path, tiny_exports["source"]) == {("error", "far", Q)}
    assert examine(path, tiny_exports["source"]).errors_by_site[Q] > 0.9


def test_folded_scales_are_told_apart_from_changed_weights(
    take: Callable[..., Path], tiny_exports: dict[str, Path]
) -> None:
    path, source = take("source"), tiny_exports["source"]
    norm, readers = "model.layers.0.post_attention_layernorm.weight", ("gate_proj", "up_proj")
    scales = 2.0 ** (torch.arange(32) % 4)

    def fold(content: dict[str, torch.Tensor]) -> None:
        content[norm] = (content[norm] / scales).to(torch.bfloat16)
        for leaf in readers:
            content[f"model.layers.0.mlp.{leaf}.weight"] *= scales.to(torch.bfloat16)

    tensors(path, fold)
    output = path.parent / "folded"
    recipe = Recipe(model=str(path), output=str(output), method="rtn", group_size=16)
    assert list(quantize(recipe, make_plan(recipe)))
    sites = {("warning", "folded", f"model.layers.0.mlp.{leaf}") for leaf in readers}
    assert found(output, source) == sites | {("warning", "folded", norm)}
    tensors(output, lambda content: content[norm].mul_(3))
    codes = {(severity, code) for severity, code, where in found(output, source) if where != SINGLE_FILE}
    assert codes == {("error", "far"), ("error", "changed")}


def test_tensors_lost_from_the_reference_are_named(take: Callable[..., Path], tiny_exports: dict[str, Path]) -> None:
    path = take("packed")
    tensors(path, lambda content: content.pop(NORM))
    assert found(path, tiny_exports["source"]) == {("error", "tensor-missing", NORM), ("error", "lost", NORM)}


def test_a_quantized_reference_is_a_usage_error(tiny_exports: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="is quantized itself"):
        examine(tiny_exports["gptq"], tiny_exports["packed"])


def test_converted_exports_record_hashes_of_their_own(tiny_exports: dict[str, Path], tmp_path: Path) -> None:
    convert_checkpoint(str(tiny_exports["packed"]), "gptq", str(tmp_path / "out"))
    assert found(tmp_path / "out", tiny_exports["source"]) == set()
    assert json.loads((tmp_path / "out" / REPORT_FILE).read_text())[FILES_KEY].keys() == {
        file.name for file in (tmp_path / "out").iterdir()
    } - {REPORT_FILE}
