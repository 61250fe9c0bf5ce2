"""`verify --fix`: what is mended, what is refused, and that a copy holds the same weights and passes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damage import edit, found, same, settings, tensors, weights
from safetensors.torch import load_file

from quantforge.cli import main
from quantforge.errors import UsageError, VerifyError
from quantforge.model.shards import INDEX_FILE, SINGLE_FILE
from quantforge.pipeline.examine import examine
from quantforge.pipeline.manifest import REPORT_FILE
from quantforge.pipeline.repair import Repaired, repair

Q = "model.layers.0.self_attn.q_proj"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Take = Callable[..., Path]


def repaired(path: Path, reference: Path | None = None) -> Repaired:
    """The repair of a damaged checkpoint; the copy is sound, and the original is as it was."""
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    done = repair(examine(path), path.parent / "out", reference)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert done.path == str(path.parent / "out")
    assert found(Path(done.path)) == set()
    assert not (path.parent / "out.partial").exists()
    return done


@pytest.mark.parametrize("name", ["gptq", "gptq-asym"])
def test_a_wrong_version_is_relabelled(take: Take, tiny_exports: dict[str, Path], name: str) -> None:
    path = take(name)
    settings(path, checkpoint_format="gptq_v2")
    done = repaired(path)
    assert "checkpoint_format gptq_v2 -> gptq" in done.repairs[0]
    assert same(weights(Path(done.path)), weights(tiny_exports[name]))
    assert json.loads((Path(done.path) / "quantize_config.json").read_text())["checkpoint_format"] == "gptq"


def test_an_export_whose_label_was_changed_is_restored_to_its_bytes(take: Take, tiny_exports: dict[str, Path]) -> None:
    path = take("gptq", report=True)
    settings(path, checkpoint_format="gptq_v2")
    assert ("error", "changed", "config.json") in found(path)
    done = repaired(path)
    for file in tiny_exports["gptq"].iterdir():
        assert (Path(done.path) / file.name).read_bytes() == file.read_bytes()


def test_an_index_is_written_anew(take: Take, tiny_exports: dict[str, Path]) -> None:
    for damage in ("lost", "stale", "damaged"):
        path = take("sharded")
        if damage == "lost":
            (path / INDEX_FILE).unlink()
        elif damage == "damaged":
            (path / INDEX_FILE).write_text('{"weight_map": 3}')
        else:
            edit(path / INDEX_FILE, lambda index: index["weight_map"].update({f"{Q}.qweight": TWO, "gone": ONE}))
        done = repaired(path)
        written, original = (
            json.loads((p / INDEX_FILE).read_text()) for p in (Path(done.path), tiny_exports["sharded"])
        )
        assert written == original
        shutil.rmtree(path)
        shutil.rmtree(done.path)


def test_a_second_copy_of_a_tensor_is_dropped(take: Take, tiny_exports: dict[str, Path]) -> None:
    path = take("sharded")
    copied = load_file(path / ONE)[EMBEDDING]
    tensors(path, lambda content: content.update({EMBEDDING: copied}), TWO)
    done = repaired(path)
    assert EMBEDDING not in load_file(Path(done.path) / TWO)
    assert same(weights(Path(done.path)), weights(tiny_exports["sharded"]))


def test_a_second_copy_of_a_tied_head_is_dropped(take: Take) -> None:
    path = take("source")
    edit(path / "config.json", lambda config: config.update(tie_word_embeddings=True))
    tensors(path, lambda content: content.update({HEAD: content[EMBEDDING].clone()}))
    done = repaired(path)
    expected = load_file(path / SINGLE_FILE)
    del expected[HEAD]
    assert done.repairs == (f"{HEAD} stored once",)
    assert same(load_file(Path(done.path) / SINGLE_FILE), expected)


def test_the_quantization_config_is_put_in_its_place(take: Take, tiny_exports: dict[str, Path]) -> None:
    path = take("gptq")
    original = json.loads((path / "config.json").read_text())["quantization_config"]
    edit(path / "config.json", lambda c: c.update(text_config={"quantization_config": c.pop("quantization_config")}))
    assert "quantization_config moved" in repaired(path).repairs[0]
    shutil.rmtree(path.parent / "out")
    edit(path / "config.json", lambda config: config.pop("text_config"))
    assert ("error", "quant-config", "config.json") in found(path)
    done = repaired(path)
    assert done.repairs == ("quantization_config copied from quantize_config.json into config.json",)
    assert json.loads((Path(done.path) / "config.json").read_text())["quantization_config"] == original


def test_a_missing_quant_method_is_filled_in_and_a_contradicting_copy_made_the_same(take: Take) -> None:
    path = take("gptq")
    edit(path / "config.json", lambda config: config["quantization_config"].pop("quant_method"))
    edit(path / "quantize_config.json", lambda config: config.update(bits=8))
    done = repaired(path)
    own = json.loads((Path(done.path) / "config.json").read_text())["quantization_config"]
    assert (own["quant_method"], own["bits"]) == ("gptq", 4)
    assert json.loads((Path(done.path) / "quantize_config.json").read_text()) == own


def test_desc_act_follows_the_order_in_the_file(take: Take) -> None:
    path = take("gptq")
    tensors(path, lambda content: content.update({f"{Q}.g_idx": content[f"{Q}.g_idx"].flip(0).contiguous()}))
    done = repaired(path)
    assert json.loads((Path(done.path) / "config.json").read_text())["quantization_config"]["desc_act"] is True


def test_warnings_of_side_files_are_mended(take: Take, tiny_exports: dict[str, Path]) -> None:
    path, reference = take("gptq", report=True), take("source")
    edit(path / "generation_config.json", lambda config: config.update(do_sample=False, temperature=0.9, top_p=0.8))
    for folder in (path, reference):
        (folder / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|im_start|>"}]}')
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    (reference / "chat_template.jinja").write_text("{{ messages }}")
    edit(path / REPORT_FILE, lambda report: report.pop("files"))
    done = repaired(path, reference)
    assert len(done.repairs) == 3
    assert (Path(done.path) / "chat_template.jinja").read_text() == "{{ messages }}"
    assert "temperature" not in json.loads((Path(done.path) / "generation_config.json").read_text())
    tokenizer = json.loads((Path(done.path) / "tokenizer_config.json").read_text())
    assert tokenizer == {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_a_repaired_file_of_an_export_gets_a_new_hash(take: Take) -> None:
    path = take("sharded", report=True)
    report = json.loads((path / REPORT_FILE).read_text())
    edit(path / "generation_config.json", lambda config: config.update(do_sample=False, temperature=0.9))
    import hashlib

    report["files"]["generation_config.json"] = hashlib.sha256(
        (path / "generation_config.json").read_bytes()
    ).hexdigest()
    (path / REPORT_FILE).write_text(json.dumps(report))
    done = repaired(path)
    assert done.repairs == ("temperature taken out of generation_config.json: without do_sample they do nothing",)


def test_weights_added_to_an_export_are_left_out(take: Take, tiny_exports: dict[str, Path]) -> None:
    path = take("sharded", report=True)
    shutil.copy(path / ONE, path / SINGLE_FILE)
    done = repaired(path)
    assert not (Path(done.path) / SINGLE_FILE).exists()
    assert same(weights(Path(done.path)), weights(tiny_exports["sharded"]))


def test_what_cannot_be_repaired_is_refused_by_name_and_nothing_is_written(take: Take) -> None:
    path = take("sharded", report=True)
    raw = (path / ONE).read_bytes()
    (path / ONE).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    (path / TWO).write_bytes(b"")
    with pytest.raises(VerifyError) as caught:
        repair(examine(path), path.parent / "out")
    assert "1 errors cannot be repaired" in str(caught.value) and f"{TWO}: " in str(caught.value)
    (path / TWO).unlink()
    (path / INDEX_FILE).unlink()
    with pytest.raises(VerifyError, match=f"{TWO} is missing"):
        repair(examine(path), path.parent / "out")
    assert sorted(file.name for file in path.parent.iterdir()) == ["sharded"]


def test_changed_weights_are_not_made_to_pass(take: Take) -> None:
    path = take("gptq", report=True)
    settings(path, checkpoint_format="gptq_v2")
    tensors(path, lambda content: content["model.norm.weight"].mul_(2))
    with pytest.raises(VerifyError, match=rf"{SINGLE_FILE} is not what was written"):
        repair(examine(path), path.parent / "out")
    assert sorted(file.name for file in path.parent.iterdir()) == ["gptq"]


def test_an_output_that_exists_is_a_usage_error(take: Take) -> None:
    path = take("gptq")
    with pytest.raises(UsageError, match="exists"):
        repair(examine(path), path)


# ------------------------------------------------------------------------------------------------ the command


def test_the_verb_exits_with_1_on_errors_only(
    take: Take, tiny_exports: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tiny_exports["gptq"])]) == 0
    assert "result      errors: 0, warnings: 1" in capsys.readouterr().out
    path = take("gptq")
    settings(path, checkpoint_format="gptq_v2")
    assert main(["verify", str(path), "--reference", str(tiny_exports["source"])]) == 1
    out = capsys.readouterr().out
    assert "error       version: model.layers.0." in out and "and 4 more (--json has all)" in out
    assert main(["verify", str(path), "--fix", str(path.parent / "out")]) == 0
    assert "repaired    checkpoint_format gptq_v2 -> gptq" in capsys.readouterr().out
    assert main(["verify", str(path), "--fix", str(path.parent / "out")]) == 2
    assert main(["verify", str(path.parent / "none")]) == 1


def test_json_holds_every_finding(take: Take, capsys: pytest.CaptureFixture[str]) -> None:
    path = take("gptq")
    settings(path, checkpoint_format="gptq_v2")
    assert main(["verify", str(path), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert not content["ok"] and content["sites"] == 0
    assert [finding["code"] for finding in content["findings"]].count("version") == 7
    assert main(["verify", str(path), "--json", "--fix", str(path.parent / "out")]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["after"]["ok"] and len(content["repairs"]) == 1 and not content["before"]["ok"]


def test_names_in_files_do_not_steer_the_terminal(take: Take, capsys: pytest.CaptureFixture[str]) -> None:
    path = take("source")
    tensors(path, lambda content: content.update({"a\x1b[2Jb": torch.zeros(2)}))
    assert main(["verify", str(path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"a\x1b[2Jb" in out
