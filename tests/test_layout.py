"""What the layout makes of unusual checkpoints, and what observation makes of unusual layers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quantforge.errors import NumericsError, PlanError, SourceError
from quantforge.model.observe import observe
from quantforge.model.packed import open_any
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import LayerCall, StreamedModel
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import Recipe

TOKENS = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(3))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def logits_of(path: Path, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    run = StreamedModel(open_any(path)).begin(tokens)
    run.run_all()
    return torch.stack([run.logits(sample) for sample in range(len(tokens))])


def plain_logits(path: Path, tokens: torch.Tensor = TOKENS, **settings: Any) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).eval()
    with torch.no_grad():
        result: torch.Tensor = model(tokens, use_cache=False).logits
    return result


def rtn(model: Path, output: Path, **changes: Any) -> Recipe:
    recipe = Recipe(model=str(model), output=str(output), method="rtn", group_size=32, **changes)
    for _ in quantize(recipe, make_plan(recipe)):
        pass
    return recipe


def with_tensors(source: Path, target: Path, change: Any) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


# ------------------------------------------------------------------------------------------------ tied weights


def test_a_tied_checkpoint_that_holds_only_the_head_is_read_like_transformers_reads_it(
    tiny_llama_tied: Path, tmp_path: Path
) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors.pop(EMBEDDING)

    model = with_tensors(tiny_llama_tied, tmp_path / "model", rename)
    assert torch.allclose(logits_of(model), plain_logits(tiny_llama_tied), atol=1e-6)
    rtn(model, tmp_path / "out")
    assert [key for key in load_file(tmp_path / "out" / "model.safetensors") if key in (HEAD, EMBEDDING)] == [HEAD]


def test_tied_tensors_that_are_both_stored_and_equal_are_written_once(tiny_llama_tied: Path, tmp_path: Path) -> None:
    model = with_tensors(tiny_llama_tied, tmp_path / "model", lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    rtn(model, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert EMBEDDING in written and HEAD not in written
    assert any(HEAD in note and "written once" in note for note in make_plan(Recipe(model=str(model))).notes)


def test_tensors_that_config_ties_but_the_file_holds_apart_stay_apart_with_a_warning(
    tiny_llama_tied: Path, tmp_path: Path
) -> None:
    model = with_tensors(tiny_llama_tied, tmp_path / "model", lambda t: t.update({HEAD: t[EMBEDDING] * 1.5}))
    expected = plain_logits(model)
    assert not torch.allclose(expected, plain_logits(tiny_llama_tied), atol=0.1)
    assert torch.allclose(logits_of(model), expected, atol=1e-6)
    plan = make_plan(Recipe(model=str(model)))
    assert "config.json ties lm_head.weight" in plan.warnings[0]
    assert plan.kept[HEAD] == "output head"


# ------------------------------------------------------------------------------------------------ kept layers


def build(kind: str, path: Path) -> tuple[Path, torch.Tensor]:
    import transformers

    torch.manual_seed(3)
    text = dict(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128, head_dim=16,
    )  # fmt: skip
    vision = dict(
        hidden_size=48, intermediate_size=60, num_hidden_layers=2, num_attention_heads=4, image_size=28, patch_size=14
    )
    if kind == "gemma3":
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        config = transformers.Qwen3MoeConfig(**text, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
        model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(path)
    return path, TOKENS


def test_the_export_of_a_multimodal_model_opens_in_transformers_with_our_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model, tokens = build("gemma3", tmp_path / "model")
    rtn(model, tmp_path / "out")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = loaded(input_ids=tokens, use_cache=False).logits
    assert torch.allclose(theirs, logits_of(tmp_path / "out"), atol=1e-4)
    plan = make_plan(Recipe(model=str(model), group_size=32))
    assert {site.layer for site in plan.sites} == {0, 1} and all("language_model" in s.module for s in plan.sites)
    vision = {name: reason for name, reason in plan.kept.items() if "vision_tower" in name}
    assert "outside the decoder layers" in vision.values()


def test_routers_and_experts_are_named_as_kept_and_the_trouble_is_told(tmp_path: Path) -> None:
    model, _ = build("qwen3_moe", tmp_path / "model")
    plan = make_plan(Recipe(model=str(model), group_size=32))
    assert {"model.layers.0.mlp.gate", "model.layers.1.mlp.experts.3.down_proj"} <= set(plan.kept_linears)
    assert any("experts stay in floating point" in warning for warning in plan.warnings)
    gptq = make_plan(Recipe(model=str(model), group_size=32, formats=("gptq",)))
    assert gptq.warnings == ()


def test_a_partly_ignored_fused_group_is_a_warning(tiny_llama: Path) -> None:
    plan = make_plan(Recipe(model=str(tiny_llama), group_size=32, ignore=("*.q_proj",)))
    assert "q_proj is ignored and model.layers.0.self_attn.k_proj is not" in plan.warnings[0]
    assert make_plan(Recipe(model=str(tiny_llama), group_size=32, ignore=("*.self_attn.*",))).warnings == ()


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(SourceError, match="encoder-decoder"):
        make_plan(Recipe(model=str(tmp_path)))


def test_a_group_size_error_is_a_plan_error_with_the_flag_to_paste(tiny_llama: Path) -> None:
    with pytest.raises(PlanError, match="--group-size 128, --group-size 64"):
        make_plan(Recipe(model=str(tiny_llama), group_size=100))


# ------------------------------------------------------------------------------------------------ observation


class Layer(nn.Module):
    """A layer whose sites are called as `route` says for each batch."""

    def __init__(self, route: Any) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.route = route
        self.batch = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.batch += 1
        return self.route(self, self.batch, hidden)  # type: ignore[no-any-return]


def watched(layer: Layer, batches: list[torch.Tensor]) -> Any:
    calls = [(LayerCall((None,), {}, 0), batch) for batch in batches]
    run: Any = SimpleNamespace(
        owner=SimpleNamespace(layers=[layer]),
        batches=lambda index: iter(calls),
        hidden=torch.stack(batches),
        batch_size=1,
    )
    return {group.names: group for group in observe(run, 0, {"a": layer.a, "b": layer.b, "c": layer.c})}


def mean_gram(*rows: torch.Tensor) -> torch.Tensor:
    stacked = torch.cat(rows)
    return stacked.T @ stacked / len(stacked)


def test_sites_reached_in_some_batches_only_get_the_statistics_of_those() -> None:
    def route(layer: Layer, batch: int, x: torch.Tensor) -> torch.Tensor:
        order = {1: "ab", 2: "acb", 3: "abc"}[batch]
        return sum(getattr(layer, name)(x + position) for position, name in enumerate(order))  # type: ignore[return-value]

    batches = [torch.randn(5, 4) for _ in range(3)]
    groups = watched(Layer(route), batches)
    x, y, z = batches
    assert {names: group.tokens for names, group in groups.items()} == {("a",): 15, ("b",): 15, ("c",): 10}
    assert torch.allclose(groups["b",].gram, mean_gram(x + 1, y + 2, z + 1), atol=1e-5)
    assert torch.allclose(groups["c",].gram, mean_gram(y + 1, z + 2), atol=1e-5)


def test_a_tensor_written_into_between_two_sites_is_not_a_shared_input() -> None:
    def route(layer: Layer, batch: int, x: torch.Tensor) -> torch.Tensor:
        shared = x * 1
        first = layer.a(shared) + layer.b(shared)
        return first + layer.c(shared.mul_(3))  # type: ignore[no-any-return]

    batch = torch.randn(6, 4)
    groups = watched(Layer(route), [batch, batch])
    assert set(groups) == {("a", "b"), ("c",)}
    assert torch.allclose(groups["c",].gram, 9 * groups["a", "b"].gram, rtol=1e-4)


def test_inputs_shared_for_some_tokens_only_are_refused() -> None:
    def route(layer: Layer, batch: int, x: torch.Tensor) -> torch.Tensor:
        return layer.a(x) + layer.b(x if batch == 1 else x + 1) + layer.c(x + 2)  # type: ignore[no-any-return]

    with pytest.raises(NumericsError, match="b shares its input with a for some"):
        watched(Layer(route), [torch.randn(3, 4), torch.randn(3, 4)])


def test_a_site_that_is_never_called_comes_back_without_tokens() -> None:
    groups = watched(Layer(lambda layer, batch, x: layer.a(x) + layer.b(x)), [torch.randn(3, 4)])
    assert groups["c",].tokens == 0 and groups["a", "b"].tokens == 3


def test_the_largest_stack_of_the_language_model_is_taken_even_when_another_is_larger(tmp_path: Path) -> None:
    model, _ = build("gemma3", tmp_path / "model")
    assert StreamedModel(open_checkpoint(model)).layout.stack == "model.language_model.layers"


def test_all_experts_are_one_entry_of_a_compressed_tensors_config(tmp_path: Path) -> None:
    model, _ = build("qwen3_moe", tmp_path / "model")
    rtn(model, tmp_path / "out")
    config = open_checkpoint(tmp_path / "out").config["quantization_config"]
    experts = [entry for entry in config["ignore"] if "experts" in entry]
    assert experts == [r"re:.*\.experts(\..*)?$"]
    assert "model.layers.0.mlp.gate" in config["ignore"] and "lm_head" in config["ignore"]


def test_files_left_behind_are_named_in_the_report(tiny_llama: Path, tmp_path: Path) -> None:
    model = with_tensors(tiny_llama, tmp_path / "model", lambda tensors: None)
    (model / "training.bin").write_bytes(b"x")
    recipe = Recipe(model=str(model), output=str(tmp_path / "out"), method="rtn", group_size=32)
    *_, last = quantize(recipe, make_plan(recipe))
    assert last.report.notes == ("not copied from the source: training.bin",)  # type: ignore[union-attr]
    assert not (tmp_path / "out" / "training.bin").exists()
