"""What `plan` says, against real exports and numbers counted by hand."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from quantforge.cli import main
from quantforge.errors import PlanError, UsageError
from quantforge.formats import load_format
from quantforge.model.packed import open_any
from quantforge.model.source import Checkpoint, open_checkpoint
from quantforge.pipeline import outlook
from quantforge.pipeline.estimate import estimate
from quantforge.pipeline.outlook import Load, Outlook, look_ahead
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.pipeline.stored import site_bytes
from quantforge.pipeline.subject import float_subject, planned_subject, subject_of
from quantforge.recipe import Recipe
from quantforge.report import RunFinished
from quantforge.spec import QuantSpec

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "dtype": "bfloat16", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "num_local_experts": 8, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "dtype": "bfloat16", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "first_k_dense_replace": 3, "tie_word_embeddings": False,
}  # fmt: skip


def config_only(path: Path, config: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def looked(model: str | Path, load: Load | None = None, **settings: Any) -> Outlook:
    return look_ahead(Recipe(model=str(model), **settings), load or Load())[1]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Checkpoint, key: str) -> None:
        raise AssertionError(f"{key} was read")

    monkeypatch.setattr(Checkpoint, "read", read)


# ------------------------------------------------------------------------------------------------ against exports


@pytest.mark.parametrize(
    ("formats", "settings"),
    [
        (("compressed-tensors", "gptq", "gptq-v2", "awq"), {"group_size": 32}),
        (("compressed-tensors", "gptq"), {"bits": 3, "symmetric": False, "group_size": 64}),
        (("gguf",), {"group_size": 64}),
        (("compressed-tensors",), {"bits": 8, "group_size": -1, "activation_bits": 8}),
    ],
)
def test_sizes_are_those_of_the_exports_and_servers_are_asked_about_what_is_then_written(
    tiny_llama: Path, tmp_path: Path, formats: tuple[str, ...], settings: dict[str, Any]
) -> None:
    recipe = Recipe(model=str(tiny_llama), output=str(tmp_path / "out"), method="rtn", formats=formats, **settings)
    plan = make_plan(recipe)
    report = next(event.report for event in quantize(recipe, plan) if isinstance(event, RunFinished))
    assert {output.format: output.tensor_bytes for output in report.outputs} == {
        name: plan.export_bytes(name) for name in formats
    }
    for name in formats:
        written, planned = subject_of(open_any(plan.output_of(name))), planned_subject(plan, name)
        variants = {"variant"} if not plan.spec.symmetric else set()  # gptq is version 2 where a zero is 0
        for site, grid in planned.sites.items():
            own = vars(written.sites[site])
            assert {k: v for k, v in vars(grid).items() if k not in variants} == {
                k: v for k, v in own.items() if k not in variants
            }
        assert (written.quant_method, set(written.kept)) == (planned.quant_method, set(planned.kept))
        assert written.scale_dtype == planned.scale_dtype


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq", "awq"])
def test_the_size_of_a_site_is_counted_by_hand(name: str) -> None:
    spec = QuantSpec(4, 128, symmetric=False)
    codes, scales, zeros = 8192 * 28672 // 2, 8192 * 224 * 2, 8192 * 224 // 2
    extra = {"compressed-tensors": 16, "gptq": 4 * 28672, "awq": 0}[name]  # the shape; the group of each input
    assert site_bytes(load_format(name), spec, 8192, 28672) == codes + scales + zeros + extra


def test_a_float_checkpoint_is_a_subject_with_all_its_linear_layers_kept(tiny_llama: Path) -> None:
    found = float_subject(open_checkpoint(tiny_llama))
    assert (found.quant_method, dict(found.sites)) == (None, {})
    assert len(found.kept) == 2 * 7 + 1 and "model.layers.1.mlp.up_proj" in found.kept and "lm_head" in found.kept


# ------------------------------------------------------------------------------------------------ configs alone


def test_a_70b_config_takes_141_gb_at_16_bits_and_39_at_4_with_embeddings_and_head_as_they_are(tmp_path: Path) -> None:
    found = looked(config_only(tmp_path / "llama", LLAMA_70B), formats=("compressed-tensors", "gptq"))
    per_layer = 8192 * (8192 + 1024 + 1024 + 8192 + 3 * 28672)
    outer = 2 * 128256 * 8192
    norms = (2 * 80 + 1) * 8192
    assert found.outline and found.parameters == 80 * per_layer + outer + norms == 70_553_706_496
    as_it_is, packed, gptq = found.variants
    assert as_it_is.total_bytes == 2 * 70_553_706_496
    codes, scales, shapes = 80 * per_layer // 2, 80 * per_layer // 128 * 2, 560 * 16
    assert codes == 34_225_520_640
    assert packed.total_bytes == codes + scales + shapes + 2 * (outer + norms) == 39_500_407_552
    assert packed.total_bytes < gptq.total_bytes < 1.01 * packed.total_bytes
    assert packed.stored_bits == pytest.approx(4.125, abs=1e-5)
    assert found.kv_bytes == 8 * 8192 * 327_680
    loading = {verdict.server for verdict in packed.verdicts if verdict.loads}
    assert loading == {"sglang", "tgi", "transformers", "vllm", "vllm-cpu"}


def test_devices_share_matrices_and_heads(tmp_path: Path) -> None:
    found = looked(config_only(tmp_path / "llama", LLAMA_70B), Load(tensor_parallel=8, kv_bits=8))
    norms = 2 * (2 * 80 + 1) * 8192
    as_it_is, packed = found.variants
    assert as_it_is.weight_bytes == norms + (as_it_is.total_bytes - norms) // 8
    assert packed.weight_bytes == pytest.approx(norms + (packed.total_bytes - norms) / 8, abs=8)
    assert found.kv_bytes == 8 * 8192 * 327_680 // 8 // 2


def test_experts_are_counted_whole_and_said_to_stay_as_they_are(tmp_path: Path) -> None:
    found = looked(config_only(tmp_path / "mixtral", MIXTRAL), formats=("gptq",))
    attention = 32 * 4096 * (4096 + 1024 + 1024 + 4096)
    experts = 32 * 8 * 3 * 4096 * 14336
    rest = 2 * 32000 * 4096 + 32 * 8 * 4096 + (2 * 32 + 1) * 4096
    assert found.parameters == attention + experts + rest == 46_702_792_704
    assert found.plan.weights == attention
    assert "64 tensors kept as they are: expert tensor: not quantized yet" in found.plan.notes
    assert found.variants[1].total_bytes > 2 * experts


def test_latent_attention_and_256_experts(tmp_path: Path) -> None:
    found = looked(config_only(tmp_path / "deepseek", DEEPSEEK), Load(tensor_parallel=8), formats=("gptq",))
    assert found.variants[0].total_bytes / 1e12 == pytest.approx(1.342, abs=0.001)
    assert found.kv_bytes == 61 * 576 * 2 * 8 * 8192
    assert [cache.label for cache in found.caches] == ["latent of 512 + 64"]
    assert sum(reason == "router" for reason in found.plan.kept.values()) == 58
    assert sum(reason.startswith("expert tensor") for reason in found.plan.kept.values()) == 2 * 58


def test_a_config_file_is_a_model_and_its_folder_names_the_output(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "llama-70b", LLAMA_70B)
    recipe, found = look_ahead(Recipe(model=f"{folder}/config.json", group_size=64), Load())
    assert (recipe.model, found.plan.output.name) == (folder, "llama-70b-w4g64-gptq")
    assert any("on this machine: weighing the calibration tokens takes up to 171.8 GB" in n for n in found.plan.notes)


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    folder = config_only(tmp_path / "llama", LLAMA_70B | {"intermediate_size": 28680})
    with pytest.raises(PlanError) as raised:
        looked(folder, group_size=128, ignore=("*.nothing",))
    assert "group size 128 does not divide" in str(raised.value) and "--ignore *.nothing" in str(raised.value)


# ------------------------------------------------------------------------------------------------ headers


@pytest.mark.usefixtures("no_weights")
def test_headers_say_the_same_as_the_config_and_no_weight_is_read(tiny_llama: Path) -> None:
    stored = looked(tiny_llama, method="rtn")
    alone = looked(tiny_llama / "config.json", method="rtn")
    assert not stored.outline and alone.outline
    assert [v.total_bytes for v in stored.variants] == [v.total_bytes for v in alone.variants]
    assert [site.name for site in stored.plan.sites] == [site.name for site in alone.plan.sites]


@pytest.mark.usefixtures("no_weights")
def test_a_budget_shows_each_of_its_bits_and_which_of_them_servers_refuse(tiny_llama: Path) -> None:
    found = looked(tiny_llama, avg_bits=3.5, group_size=64)
    assert [variant.name for variant in found.variants[1:]] == [f"compressed-tensors, {b} bits" for b in (3, 4, 8)]
    loads = {v.name[-6]: {s.server for s in v.verdicts if s.loads} for v in found.variants[1:]}
    assert "vllm" not in loads["3"] and "vllm" in loads["4"] and "vllm" in loads["8"]


def test_stages_of_memory_follow_the_recipe(tiny_llama: Path) -> None:
    rounding = looked(tiny_llama, method="rtn").estimate
    assert [what for what, _ in rounding.stages] == [
        "loading embeddings and head",
        "reading the output back",
        "rounding a layer",
    ]
    plain = Recipe(model=str(tiny_llama), token_weights="none", calibration={"dataset": "builtin"})
    solving = estimate(plain, make_plan(plain))
    assert {what for what, _ in solving.stages} >= {"running the first layer", "solving a layer"}
    assert "weighing calibration tokens" in {what for what, _ in looked(tiny_llama).estimate.stages}
    assert rounding.operations < solving.operations < looked(tiny_llama).estimate.operations


def test_tuning_holds_every_layers_activations_of_a_sequence(tiny_llama: Path) -> None:
    """Counted by hand: sites 128 x (128, 128 / 2 twice, 128), (384, 384) x 128 and 128 x 384, two layers."""

    def tuning_bytes(**fields: Any) -> int:
        stages = dict(looked(tiny_llama, method="rtn", tune_epochs=1, **fields).estimate.stages)
        return stages["tuning"] - stages["reading the output back"]

    widths = 2 * (128 + 128) + 2 * (64 + 128) + 3 * (384 + 128)
    token = 2 * (widths + 2 * 128) + 6 * 256
    short, long = ({"dataset": "builtin", "nsamples": 4, "seqlen": seqlen} for seqlen in (64, 256))
    assert tuning_bytes(calibration=long) - tuning_bytes(calibration=short) == 4 * 192 * token
    weights = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128)
    fewer = tuning_bytes(calibration=long, group_size=64) - tuning_bytes(calibration=long, group_size=128)
    assert fewer == 24 * (weights // 64 - weights // 128)


def sampling_bytes(model: Path, nsamples: int) -> int:
    calibration = {"dataset": "self", "nsamples": nsamples, "seqlen": 128}
    stages = dict(looked(model, calibration=calibration).estimate.stages)
    return stages["sampling calibration tokens from the whole model"] - stages["reading the output back"]


def test_no_more_sequences_are_counted_than_are_sampled_at_once(tiny_llama: Path) -> None:
    config = json.loads((tiny_llama / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    cached = config["num_hidden_layers"] * 128 * 2 * heads * 4
    chances = 4 * config["vocab_size"] * 4
    assert sampling_bytes(tiny_llama, 20) - sampling_bytes(tiny_llama, 4) == 16 * (cached + chances)
    assert sampling_bytes(tiny_llama, 64) == sampling_bytes(tiny_llama, 32)


# ------------------------------------------------------------------------------------------------ the verb


def test_the_verb_prints_sizes_caches_and_servers(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", str(tiny_llama), "--method", "rtn", "--group-size", "32", "--context", "100", "--batch", "2"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "cache       2 layers: 2 key-value heads of 32" in out
    assert "cache       2 sequences of 100 tokens, 16 bits a number" in out
    assert "vllm          Marlin" in out and "llama-cpp     refuses" in out
    assert "refused     llama-cpp: it reads GGUF files only" in out and "[llama.cpp, ggml/src/gguf.cpp" in out


def test_the_verb_as_json_is_all_of_stdout(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_llama), "--method", "rtn", "--group-size", "32", "--tp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["load"] == {"context": 8192, "batch": 8, "kv_bits": 16, "tensor_parallel": 2}
    assert found["kv_bytes"] == 2 * 8 * 8192 * 2 * 1 * 32 * 2
    float_one, packed = found["exports"]
    assert float_one["total_bytes"] == found["plan"]["source_bytes"] and float_one["servers"] == []
    assert packed["total_bytes"] == found["plan"]["estimated_bytes"]
    assert packed["serving_bytes_per_device"] == packed["weight_bytes_per_device"] + found["kv_bytes"]
    vllm = next(server for server in packed["servers"] if server["server"] == "vllm")
    assert vllm["loads"] and vllm["kernel"] == "Marlin"


def test_nothing_is_collected_while_plan_imports_and_looks(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[bool] = []

    def fails(*_: Any) -> None:
        seen.append(gc.isenabled())
        raise UsageError("looked")

    monkeypatch.setattr(outlook, "look_ahead", fails)
    assert gc.isenabled() and main(["plan", str(tiny_llama)]) == 2
    assert seen == [False] and gc.isenabled() and "looked" in capsys.readouterr().err


def test_several_variants_are_a_usage_error(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_llama), "--bits", "4,8"]) == 2
    assert "one variant at a time" in capsys.readouterr().err
