"""From a recipe to published files: contents, verification, several formats, resume, and independent loaders."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantforge.errors import QuantforgeError, VerifyError, WorkspaceError
from quantforge.model.observe import unobserved
from quantforge.model.packed import PackedCheckpoint, open_any
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.pipeline import calibrate as calibrate_module
from quantforge.pipeline import layers as layers_module
from quantforge.pipeline import run as run_module
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import quantize
from quantforge.pipeline.score import evaluate_checkpoint
from quantforge.recipe import CalibrationRecipe, Recipe
from quantforge.report import Event, LayerDone, RunFinished, RunReport

TOKENS = torch.randint(3, 200, (2, 40), generator=torch.Generator().manual_seed(3))


def recipe_for(model: Path, output: Path, text: Path, **changes: Any) -> Recipe:
    settings: dict[str, Any] = dict(
        model=str(model),
        output=str(output),
        group_size=64,
        calibration=CalibrationRecipe(dataset=str(text), nsamples=16, seqlen=64),
    )
    return Recipe(**(settings | changes))


def finish(recipe: Recipe) -> RunReport:
    *_, last = quantize(recipe, make_plan(recipe))
    assert isinstance(last, RunFinished)
    return last.report


def contents(directory: Path) -> dict[str, bytes]:
    return {str(f.relative_to(directory)): f.read_bytes() for f in sorted(directory.rglob("*")) if f.is_file()}


def hidden_of(model: Path) -> torch.Tensor:
    run = StreamedModel(open_any(model)).begin(TOKENS)
    run.run_all()
    return torch.stack([run.logits(sample) for sample in range(len(TOKENS))])


# ------------------------------------------------------------------------------------------------ contents


def test_a_checkpoint_holds_packed_sites_and_untouched_rest(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    report = finish(recipe_for(tiny_llama, tmp_path / "out", text))
    source, written = load_file(tiny_llama / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    sites = {site.name for layer in report.layers for site in layer.sites}
    assert len(sites) == 14 and all("proj" in name for name in sites)
    for key, tensor in source.items():
        if key.removesuffix(".weight") in sites:
            assert key not in written
            assert f"{key}_packed" in written and f"{key}_scale" in written
        else:
            assert torch.equal(written[key], tensor), key
    assert len(written) == len(source) + 2 * len(sites)  # packed, scale and shape instead of the weight
    assert not (tmp_path / "out.partial").exists()
    for name in ("tokenizer.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tiny_llama / name).read_bytes()


def test_gptq_beats_round_to_nearest_on_every_site(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    report = finish(recipe_for(tiny_llama, tmp_path / "out", text))
    for layer in report.layers:
        for site in layer.sites:
            assert site.loss is not None and site.rtn_loss is not None
            assert 0 < site.loss <= site.rtn_loss
            assert site.tokens == 16 * 64 and site.fallback is None and site.damping == 0.01
    assert report.layers[0].loss_ratio is not None and report.layers[0].loss_ratio < 0.9


def test_tied_embeddings_stay_tied_and_are_written_once(tiny_llama_tied: Path, text: Path, tmp_path: Path) -> None:
    finish(recipe_for(tiny_llama_tied, tmp_path / "out", text, formats=("compressed-tensors", "gptq")))
    for name in ("compressed-tensors", "gptq"):
        written = load_file(tmp_path / "out" / name / "model.safetensors")
        assert [key for key in written if "lm_head" in key] == []
        assert sum(key == "model.embed_tokens.weight" for key in written) == 1
        assert json.loads((tmp_path / "out" / name / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (8, 32), (3, -1), (2, 64)])
def test_every_format_of_one_run_dequantizes_to_the_same_weights(
    tiny_llama: Path, text: Path, tmp_path: Path, bits: int, group_size: int, symmetric: bool
) -> None:
    recipe = recipe_for(
        tiny_llama, tmp_path / "out", text, formats=("compressed-tensors", "gptq"), bits=bits, group_size=group_size,
        symmetric=symmetric,
    )  # fmt: skip
    finish(recipe)
    one, other = (open_any(tmp_path / "out" / name) for name in recipe.formats)
    assert isinstance(one, PackedCheckpoint) and one.sites.keys() == open_sites(other)
    for site in one.sites:
        assert torch.equal(one.read(f"{site}.weight"), other.read(f"{site}.weight"))
    assert torch.equal(hidden_of(tmp_path / "out" / "gptq"), hidden_of(tmp_path / "out" / "compressed-tensors"))


def open_sites(source: Any) -> Any:
    return source.sites.keys()


def test_the_estimate_of_the_plan_is_the_size_of_the_export(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "out", text)
    plan = make_plan(recipe)
    finish(recipe)
    actual = sum(t.numel() * t.element_size() for t in load_file(tmp_path / "out" / "model.safetensors").values())
    assert abs(plan.estimated_bytes - actual) <= 0.01 * actual


def test_shards_are_bounded_and_the_index_is_exact(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    finish(recipe_for(tiny_llama, tmp_path / "one", text))
    finish(recipe_for(tiny_llama, tmp_path / "many", text, max_shard_size="100KB"))
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    assert [shard.name for shard in shards] == sorted(set(index["weight_map"].values()))
    merged = {}
    for shard in shards:
        tensors = load_file(shard)
        stored = sum(t.numel() * t.element_size() for t in tensors.values())
        assert stored <= 100_000 or len(tensors) == 1
        assert all(index["weight_map"][key] == shard.name for key in tensors)
        merged |= tensors
    whole = load_file(tmp_path / "one" / "model.safetensors")
    assert merged.keys() == whole.keys() and all(torch.equal(merged[key], whole[key]) for key in whole)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in whole.values())
    assert torch.equal(hidden_of(tmp_path / "many"), hidden_of(tmp_path / "one"))


def test_a_source_in_many_shards_gives_the_same_weights(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sharded = tmp_path / "sharded"
    shutil.copytree(tiny_llama, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    finish(recipe_for(tiny_llama, tmp_path / "a", text))
    finish(recipe_for(sharded, tmp_path / "b", text))
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_ignored_sites_are_byte_identical_to_the_source(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_for(
        tiny_llama, tmp_path / "out", text, ignore=("*down_proj",), formats=("compressed-tensors", "gptq")
    )
    report = finish(recipe)
    source = load_file(tiny_llama / "model.safetensors")
    for name in recipe.formats:
        written = load_file(tmp_path / "out" / name / "model.safetensors")
        for layer in range(2):
            key = f"model.layers.{layer}.mlp.down_proj.weight"
            assert torch.equal(written[key], source[key])
            assert report.kept[key] == "ignored by the recipe"
    config = json.loads((tmp_path / "out" / "compressed-tensors" / "config.json").read_text())
    assert "model.layers.1.mlp.down_proj" in config["quantization_config"]["ignore"]


def test_rtn_needs_no_calibration(tiny_llama: Path, tmp_path: Path) -> None:
    report = finish(recipe_for(tiny_llama, tmp_path / "out", tmp_path / "there-is-no-such-file.txt", method="rtn"))
    assert report.calibration == {} and all(site.loss is None for layer in report.layers for site in layer.sites)


# ------------------------------------------------------------------------------------------------ independent loaders


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (8, True), (4, False)])
def test_transformers_loads_the_compressed_tensors_export_with_our_logits(
    tiny_llama: Path, text: Path, tmp_path: Path, bits: int, symmetric: bool
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    finish(recipe_for(tiny_llama, tmp_path / "out", text, bits=bits, symmetric=symmetric))
    scales = [t for key, t in load_file(tmp_path / "out" / "model.safetensors").items() if key.endswith("weight_scale")]
    assert any(bool((scale < 0).any()) for scale in scales) == (symmetric and bits == 4)
    # the library cannot load packed zeros into an uncompressed skeleton, so asymmetric files are expanded on loading
    extra = {} if symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **extra)
    with torch.no_grad():
        theirs = loaded(TOKENS, use_cache=False).logits
    # that way also rounds the weights to the scale's dtype, 8 bits of mantissa: up to 2^-9 relative
    assert torch.allclose(theirs, hidden_of(tmp_path / "out"), rtol=0, atol=1e-4 if symmetric else 5e-3)
    distance = (theirs - hidden_of(tiny_llama)).abs().max()
    assert distance > (1e-3 if bits == 8 else 2e-2)  # so the comparison above can tell them apart


def test_conv1d_models_export_to_gptq_with_the_transposed_weights(text: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.conftest import _build_tokenizer

    torch.manual_seed(2)
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=256, n_positions=128))
    model.save_pretrained(tmp_path / "gpt2")
    _build_tokenizer().save_pretrained(tmp_path / "gpt2")
    report = finish(recipe_for(tmp_path / "gpt2", tmp_path / "out", text, formats=("gptq",), bits=8))
    shapes = {s.name.split(".")[-1]: (s.out_features, s.in_features) for s in report.layers[0].sites}
    assert shapes == {"c_attn": (192, 64), "c_proj": (64, 256), "c_fc": (256, 64)}
    with torch.no_grad():
        expected = model.eval()(TOKENS % 256, use_cache=False).logits
    run = StreamedModel(open_any(tmp_path / "out")).begin(TOKENS % 256)
    run.run_all()
    ours = torch.stack([run.logits(sample) for sample in range(len(TOKENS))])
    assert (ours - expected).abs().max() < 0.05 * expected.abs().max()


def test_experts_are_kept_as_they_are_and_listed(text: Path, tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    from tests.conftest import _build_tokenizer

    torch.manual_seed(2)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=256, max_position_embeddings=128,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "moe")
    _build_tokenizer().save_pretrained(tmp_path / "moe")
    report = finish(recipe_for(tmp_path / "moe", tmp_path / "out", text))
    source, written = (
        load_file(tmp_path / "moe" / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    experts = [key for key in source if "expert" in key]
    assert experts and all(torch.equal(source[key], written[key]) for key in experts)
    assert {s.name.split(".")[-1] for s in report.layers[0].sites} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {reason for reason in report.kept.values()} == {
        "embedding", "output head", "router", "expert tensor: not quantized yet",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ calibration


def test_by_group_each_input_group_is_observed_after_the_earlier_ones_were_quantized(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[tuple[tuple[str, ...], torch.Tensor]]] = {"layer": [], "group": []}
    original = layers_module.solve_sites

    for mode in ("layer", "group"):

        def spy(plan: Plan, sites: Any, modules: Any, group: Any, mode: str = mode) -> Any:
            seen[mode].append((tuple(site.name for site in sites), group.gram.clone()))
            return original(plan, sites, modules, group)

        monkeypatch.setattr(layers_module, "solve_sites", spy)
        finish(recipe_for(tiny_llama, tmp_path / mode, text, sequential=mode, bits=3))
    names = [name for name, _ in seen["layer"]]
    assert names == [name for name, _ in seen["group"]]
    assert [len(name) for name in names] == [3, 1, 2, 1] * 2  # q k v, o, gate up, down
    same = [torch.equal(a, b) for (_, a), (_, b) in zip(seen["layer"], seen["group"], strict=True)]
    assert same[0] and not any(same[1:4])  # only the first group of the first layer sees the same inputs


def test_the_gram_of_a_group_is_the_mean_outer_product_of_the_plain_models_inputs(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    grams: list[torch.Tensor] = []
    calibration: list[torch.Tensor] = []
    original, original_begin = layers_module.solve_sites, StreamedModel.begin

    def spy(plan: Plan, sites: Any, modules: Any, group: Any) -> Any:
        grams.append(group.gram.double())
        return original(plan, sites, modules, group)

    def spy_begin(self: StreamedModel, tokens: torch.Tensor) -> Any:
        calibration.append(tokens)
        return original_begin(self, tokens)

    monkeypatch.setattr(layers_module, "solve_sites", spy)
    monkeypatch.setattr(StreamedModel, "begin", spy_begin)
    finish(recipe_for(tiny_llama, tmp_path / "out", text, token_weights="none"))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    inputs: list[torch.Tensor] = []
    layer = model.model.layers[0]
    for module in (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj):
        module.register_forward_pre_hook(lambda _m, args: inputs.append(args[0].flatten(0, 1).double()))
    with torch.no_grad():
        model(calibration[0], use_cache=False)
    for gram, rows in zip(grams[:4], inputs, strict=True):
        assert torch.allclose(gram, rows.T @ rows / len(rows), rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------------ verify


def tamper(file: Path, key: str, change: Any) -> None:
    with safe_open(file, "pt") as tensors:
        held = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    held[key] = change(held[key])
    save_file(held, file, metadata={"format": "pt"})


def flip_one_bit(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8).reshape(-1)[7] ^= 1
    return changed


@pytest.mark.parametrize("format_name", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("what", ["codes", "scale", "copied", "lost", "extra"])
def test_verify_refuses_a_checkpoint_that_differs_in_one_bit_and_publishes_nothing(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, format_name: str
) -> None:
    packed = format_name == "compressed-tensors"
    site = "model.layers.1.self_attn.k_proj"
    key = {
        "codes": f"{site}.{'weight_packed' if packed else 'qweight'}",
        "scale": f"{site}.{'weight_scale' if packed else 'scales'}",
        "copied": "model.norm.weight",
    }.get(what)
    original = run_module.write_checkpoint

    def damaged(directory: Path, *args: Any) -> Any:
        written = original(directory, *args)
        file = directory / "model.safetensors"
        if key is not None:
            tamper(file, key, flip_one_bit)
        else:
            held = load_file(file)
            if what == "lost":
                del held["model.norm.weight"]
            else:
                held["model.layers.0.self_attn.q_proj.stray"] = torch.ones(2)
            save_file(held, file, metadata={"format": "pt"})
        return written

    monkeypatch.setattr(run_module, "write_checkpoint", damaged)
    named = key.removesuffix(".qweight") if key else ("norm" if what == "lost" else "stray")
    with pytest.raises(VerifyError, match=site if what in ("codes", "scale") else named):
        finish(recipe_for(tiny_llama, tmp_path / "out", text, formats=(format_name,)))
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    finish(recipe_for(tiny_llama, tmp_path / "out", text, formats=(format_name,)))  # the layers were kept
    assert (tmp_path / "out" / "model.safetensors").exists()


# ------------------------------------------------------------------------------------------------ resume


def test_stopped_after_any_layer_and_rerun_the_output_is_byte_identical(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    finish(recipe_for(tiny_llama, tmp_path / "a" / "out", text))
    recipe = recipe_for(tiny_llama, tmp_path / "b" / "out", text)
    events: Iterator[Event] = quantize(recipe, make_plan(recipe))
    for event in events:
        if isinstance(event, LayerDone):
            break
    events.close()  # type: ignore[attr-defined]
    assert (tmp_path / "b" / "out.partial" / "layer-00000.json").exists()
    assert not (tmp_path / "b" / "out").exists()
    finish(recipe)
    assert contents(tmp_path / "a" / "out") == contents(tmp_path / "b" / "out")


def test_rerunning_a_finished_job_changes_nothing_and_another_job_is_refused(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    first = finish(recipe_for(tiny_llama, tmp_path / "out", text, formats=("gptq", "compressed-tensors")))
    before = contents(tmp_path / "out")
    again = finish(recipe_for(tiny_llama, tmp_path / "out", text, formats=("gptq", "compressed-tensors")))
    assert contents(tmp_path / "out") == before
    assert again.layers == first.layers
    with pytest.raises(WorkspaceError, match="already exists"):
        finish(recipe_for(tiny_llama, tmp_path / "out", text, formats=("gptq", "compressed-tensors"), bits=8))
    assert contents(tmp_path / "out") == before


def test_killed_with_sigkill_at_random_moments_and_rerun_the_output_is_byte_identical(
    tmp_path: Path, text: Path
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.conftest import _build_tokenizer

    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=10, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    _build_tokenizer().save_pretrained(tmp_path / "model")

    def command(output: Path) -> list[str]:
        return [
            sys.executable, "-m", "quantforge", "quantize", str(tmp_path / "model"), "--output", str(output),
            "--group-size", "64", "--dataset", str(text), "--nsamples", "48", "--seqlen", "128", "--quiet",
        ]  # fmt: skip

    subprocess.run(command(tmp_path / "a" / "out"), check=True, capture_output=True)
    partial = tmp_path / "b" / "out.partial"
    kills = 0
    for stop_at in (0, 3, 6, 9):  # kill as soon as that layer's file appears, or a little later
        process = subprocess.Popen(
            command(tmp_path / "b" / "out"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not (partial / f"layer-{stop_at:05d}.safetensors").exists():
            time.sleep(0.001)
        time.sleep(0.02 * kills)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 3
    subprocess.run(command(tmp_path / "b" / "out"), check=True, capture_output=True)
    assert contents(tmp_path / "a" / "out") == contents(tmp_path / "b" / "out")


# ------------------------------------------------------------------------------------------------ memory and scores


def test_real_parameters_never_exceed_the_outer_tensors_plus_one_layer(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "out", text)
    plan = make_plan(recipe)
    for _ in quantize(recipe, plan):
        real = sum(p.numel() for p in plan.streamed.model.parameters() if not p.is_meta)
        assert real <= sum(p.numel() for p in plan.streamed.layers[0].parameters())
    outer = 2 * 256 * 128 + 128
    layer = sum(p.numel() for p in plan.streamed.layers[0].parameters())
    assert layer < plan.streamed.peak_elements <= outer + layer


def test_scores_of_a_packed_checkpoint_are_those_of_its_dequantized_weights(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    finish(recipe_for(tiny_llama, tmp_path / "out", text, bits=3))
    packed = open_any(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    assert isinstance(packed, PackedCheckpoint)
    for site in packed.sites:
        model.get_submodule(site).weight.data.copy_(packed.read(f"{site}.weight"))
    result = evaluate_checkpoint(str(tmp_path / "out"), reference=str(tiny_llama), text=str(text), window=64, windows=4)
    from quantforge.evaluate.protocol import build_windows, load_rows
    from quantforge.model.tokenizer import load_tokenizer

    windows = build_windows(load_rows(text), load_tokenizer(tiny_llama), source="t", window=64, windows=4)
    original = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        log_q = model(windows.tokens, use_cache=False).logits[:, :-1].double().log_softmax(-1)
        log_p = original(windows.tokens, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    nll = -log_q.gather(-1, windows.tokens[:, 1:, None]).mean()
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    assert result.divergence is not None
    assert result.nll == pytest.approx(float(nll), abs=1e-6)
    assert result.divergence.kl == pytest.approx(float(kl), rel=1e-3)
    assert result.divergence.kl > 0


def test_a_source_checkpoint_reads_like_the_safetensors_library(tiny_llama: Path) -> None:
    ours, theirs = open_checkpoint(tiny_llama), load_file(tiny_llama / "model.safetensors")
    assert set(ours.keys()) == set(theirs)
    assert all(torch.equal(ours.read(key), theirs[key]) for key in theirs)


def test_weights_edited_between_two_runs_are_noticed_wherever_they_lie(
    tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    recipe = recipe_for(model, tmp_path / "out", text)
    events: Iterator[Event] = quantize(recipe, make_plan(recipe))
    next(event for event in events if isinstance(event, LayerDone))
    events.close()  # type: ignore[attr-defined]
    file = model / "model.safetensors"
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1))
    with pytest.raises(WorkspaceError, match=r"files\.model\.safetensors: was \[\d+, \d+\]"):
        finish(recipe)


def test_strict_also_refuses_a_finished_output_that_had_warnings(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    few = CalibrationRecipe(dataset=str(text), nsamples=1, seqlen=64)
    recipe = recipe_for(tiny_llama, tmp_path / "out", text, calibration=few)
    first = finish(recipe)
    assert any("64 calibration tokens for 128 inputs" in warning for warning in first.warnings)
    again = finish(recipe)
    assert (again.warnings, again.calibration) == (first.warnings, first.calibration)
    with pytest.raises(QuantforgeError, match="--strict"):
        finish(recipe.model_copy(update={"strict": True}))


def test_a_site_that_no_token_reaches_falls_back_to_rounding_and_is_listed(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = layers_module.observe

    def blind(run: Any, index: int, modules: Any, weights: Any) -> Any:
        seen = {name: module for name, module in modules.items() if not name.endswith("down_proj")}
        return original(run, index, seen, weights=weights) + [unobserved(name) for name in modules if name not in seen]

    monkeypatch.setattr(layers_module, "observe", blind)
    report = finish(recipe_for(tiny_llama, tmp_path / "out", text))
    assert [site.name for site in report.fallbacks] == [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    assert report.fallbacks[0].fallback == "gptq: no calibration token reached it; rounded to nearest"
    assert sum("no calibration token reached it" in warning for warning in report.warnings) == 2
    monkeypatch.setattr(layers_module, "observe", lambda *args, **_: [unobserved(name) for name in args[2]])
    with pytest.raises(QuantforgeError, match="14 of 14 sites fell back to rtn"):
        finish(recipe_for(tiny_llama, tmp_path / "blind", text))
    assert not (tmp_path / "blind").exists()


def test_a_model_can_be_calibrated_on_what_it_samples_itself(tiny_llama: Path, tmp_path: Path) -> None:
    calibration = CalibrationRecipe(dataset="self", nsamples=6, seqlen=32)
    state = torch.random.get_rng_state()
    first = finish(recipe_for(tiny_llama, tmp_path / "a", tiny_llama, calibration=calibration))
    second = finish(recipe_for(tiny_llama, tmp_path / "b", tiny_llama, calibration=calibration))
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.calibration["source"].startswith("sampled from the model itself")
    assert (first.calibration["delivered"], first.calibration["seqlen"]) == (6, 32)
    assert first.calibration["fingerprint"] == second.calibration["fingerprint"]
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_sampled_tokens_follow_the_models_own_distribution(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    from quantforge.model.sampling import sample_sequences

    told: list[tuple[int, int]] = []
    tokens = sample_sequences(tiny_llama, 96, 24, seed=1, progress=lambda *steps: told.append(steps))
    assert told == [(step, 3 * 23) for step in range(1, 3 * 23 + 1)]  # 32 sequences at once
    assert tokens.shape == (96, 24) and tokens.dtype == torch.int64
    assert len(tokens[:, 0].unique()) > 60  # the first is uniform over 256
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.no_grad():
        log_p = model(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    nll = -log_p.gather(-1, tokens[:, 1:, None]).mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    assert abs(float(nll - entropy)) < 0.1  # the surprise of a sample is the entropy, if it is sampled from the model


def test_by_default_a_model_is_calibrated_on_its_own_samples_unless_it_is_too_large_to_load(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = CalibrationRecipe(nsamples=4, seqlen=32)
    own = finish(recipe_for(tiny_llama, tmp_path / "own", tiny_llama, calibration=few))
    assert own.calibration["source"].startswith("sampled from the model itself")
    monkeypatch.setattr(calibrate_module, "memory_bytes", lambda device: 3_000_000)  # the model takes 1.9 MB
    text = finish(recipe_for(tiny_llama, tmp_path / "text", tiny_llama, calibration=few))
    assert text.calibration["source"].startswith("builtin")
    assert "0.0 GB whole, too much of 0.0 GB" in text.calibration["notes"][0]
