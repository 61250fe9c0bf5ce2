"""Scales for a cache of keys and values: calibrated, stored, read back, and simulated as a server would use them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_architectures import build
from test_contracts import CT, refusal, subject, verdict
from test_outlook import config_only, looked
from test_pipeline import TOKENS, contents, finish, recipe_for
from torch import nn
from transformers import AutoConfig, DynamicCache, LlamaForCausalLM

from quantforge.cli import main
from quantforge.errors import NumericsError, PlanError, SourceError, UsageError, VerifyError
from quantforge.model.kv_cache import cache_spec, cache_takers, observe_cache, rounded_cache, stored_cache
from quantforge.model.packed import open_any
from quantforge.model.source import open_checkpoint
from quantforge.model.streamed import StreamedModel
from quantforge.numerics.activations import cache_scale, round_cached
from quantforge.pipeline import verify as verify_module
from quantforge.pipeline.calibrate import calibrate
from quantforge.pipeline.convert import convert_checkpoint
from quantforge.pipeline.describe import describe_checkpoint
from quantforge.pipeline.examine import examine
from quantforge.pipeline.outlook import Load
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import quantize
from quantforge.pipeline.score import evaluate_checkpoint
from quantforge.pipeline.serving import caching_layers
from quantforge.quantized import CacheScales
from quantforge.readers import ActivationScheme, load_reader
from quantforge.reading import read_recipe
from quantforge.recipe import Recipe, variant_name
from quantforge.report import LayerDone
from quantforge.spec import KvCacheSpec, kv_cache_name

FP8, INT8 = KvCacheSpec("fp8"), KvCacheSpec("int8")
SPECS = {"fp8": FP8, "int8": INT8, "fp8_per_head": KvCacheSpec("fp8", True), "int8_per_head": KvCacheSpec("int8", True)}
E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[E4M3.isfinite()]


@pytest.fixture(scope="module")
def exports(tiny_llama: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """W8A16, rounded to nearest, with each kind of cache. Read only."""
    root = tmp_path_factory.mktemp("kv-cache")
    for name in SPECS:
        finish(recipe_for(tiny_llama, root / name, text, method="rtn", bits=8, kv_cache=name))
    return {name: root / name for name in SPECS}


def copy_of(directory: Path, target: Path) -> Path:
    shutil.copytree(directory, target)
    return target


def edit_tensors(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def edit_config(directory: Path, **settings: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= settings
    (directory / "config.json").write_text(json.dumps(config))


def by_hand(states: torch.Tensor, scale: torch.Tensor, spec: KvCacheSpec) -> torch.Tensor:
    """The nearest number of the grid, by looking at all of them."""
    scale = scale.float().flatten()
    result = torch.empty_like(states)
    for head in range(states.shape[1]):
        own = scale[head if len(scale) > 1 else 0]
        grid = (E4M3 if spec.kind == "fp8" else torch.arange(-128.0, 128.0)) * own
        result[:, head] = grid[(states[:, head, :, :, None] - grid).abs().argmin(dim=-1)]
    return result


class HandRounded(DynamicCache):
    """A transformers cache that keeps what `by_hand` makes of keys and values, and remembers the largest ones."""

    def __init__(self, stored: dict[int, CacheScales], spec: KvCacheSpec) -> None:
        super().__init__()
        self.stored, self.spec = stored, spec
        self.largest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):  # type: ignore[no-untyped-def]
        own = self.stored[layer_idx]
        self.largest[layer_idx] = (key_states.abs().amax(dim=(0, 2, 3)), value_states.abs().amax(dim=(0, 2, 3)))
        kept = by_hand(key_states, own.k, self.spec), by_hand(value_states, own.v, self.spec)
        return super().update(*kept, layer_idx, *args, **kwargs)


def plain_model(export: Path) -> nn.Module:
    """transformers' own model with the weights that an export dequantizes to."""
    source = open_any(export)
    config = json.loads((export / "config.json").read_text())
    del config["quantization_config"]
    model = LlamaForCausalLM(AutoConfig.for_model(**config)).eval()
    model.load_state_dict({key: source.read(key).float() for key in source.keys()})  # noqa: SIM118
    return model


def stored_scales(export: Path) -> dict[int, CacheScales]:
    tensors = load_file(export / "model.safetensors")
    names = ["k_scale", "v_scale"]
    return {n: CacheScales(*(tensors[f"model.layers.{n}.self_attn.{name}"] for name in names)) for n in range(2)}


def tokens_of(recipe: Recipe, plan: Plan) -> torch.Tensor:
    steps = calibrate(recipe, plan, [])
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        tokens: torch.Tensor = stop.value.tokens
        return tokens


# ------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("name", SPECS)
def test_keys_are_rounded_and_scaled_as_compressed_tensors_does_bit_for_bit(name: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    spec = SPECS[name]
    strategy = "attn_head" if spec.per_head else "tensor"
    args = quantization.QuantizationArgs(
        num_bits=8, type="float" if spec.kind == "fp8" else "int", strategy=strategy, symmetric=True
    )
    values = torch.randn(2, 3, 50, 8) * torch.tensor([0.01, 1.0, 30.0]).reshape(3, 1, 1)
    largest = values.abs().amax(dim=(0, 2, 3))
    theirs, zero = calculate_qparams(-(m := largest if spec.per_head else largest.amax().reshape(1)), m, args)
    scale = cache_scale(largest, spec)
    assert scale.dtype == torch.bfloat16 and torch.equal(scale, theirs.to(torch.bfloat16))
    shaped = scale.float().reshape(-1, 1, 1) if spec.per_head else scale.float()
    expected = fake_quantize(2 * values, shaped, zero.reshape(shaped.shape), args)  # a half of it is beyond the grid
    assert torch.equal(round_cached(2 * values, scale, spec), expected)
    assert torch.allclose(by_hand(values, scale, spec), round_cached(values, scale, spec), rtol=1e-6, atol=0)


def test_scales_of_nothing_are_one_and_halves_stay_halves() -> None:
    assert cache_scale(torch.zeros(2), SPECS["fp8_per_head"]).tolist() == [1.0, 1.0]
    assert cache_scale(torch.tensor([0.0, 448.0]), SPECS["fp8_per_head"]).tolist() == [1.0, 1.0]
    assert cache_scale(torch.tensor([255.0, 1.0]), INT8).tolist() == [2.0]
    halves = torch.tensor([1.0, -300.0, 0.3]).to(torch.bfloat16).reshape(1, 1, 3, 1)
    rounded = round_cached(halves, torch.tensor([2.0]), INT8)
    assert rounded.dtype == torch.bfloat16 and rounded.flatten().tolist() == [0.0, -256.0, 0.0]


# ------------------------------------------------------------------------------------------------ observing


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon", "mpt", "gemma3_text", "opt", "qwen3_moe"])
def test_what_layers_cache_is_what_a_plain_forward_pass_leaves_in_its_cache(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    tokens = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(2))
    cache = DynamicCache()  # keeps all tokens, sliding window or not
    with torch.no_grad():
        model(tokens, past_key_values=cache, use_cache=True)
    streamed = StreamedModel(open_checkpoint(tmp_path))
    run = streamed.begin(tokens)
    for index in range(len(streamed.layers)):
        streamed.load_layer(index)
        [found] = observe_cache(run, index)
        expected = [
            states.abs().amax(dim=(0, 2, 3)) for states in (cache.layers[index].keys, cache.layers[index].values)
        ]
        assert torch.allclose(found.k, expected[0], rtol=1e-5) and torch.allclose(found.v, expected[1], rtol=1e-5)
        assert found.tokens == 48 and found.module.startswith(f"{streamed.layout.stack}.{index}.")
        run.advance(index)
        streamed.drop_layer(index)


def test_ranges_are_over_all_batches_and_change_nothing(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantforge.model import streamed as streamed_module

    ranges = []
    for batch_tokens in (4096, 40):  # one batch, and one for each sequence
        monkeypatch.setattr(streamed_module, "TOKENS_PER_BATCH", batch_tokens)
        streamed = StreamedModel(open_checkpoint(tiny_llama))
        run = streamed.begin(TOKENS)
        assert len(run.calls[0]) == (1 if batch_tokens == 4096 else 2)
        streamed.load_layer(0)
        before = run.hidden.clone()
        [found] = observe_cache(run, 0)
        assert torch.equal(run.hidden, before) and found.tokens == TOKENS.numel()
        assert found.module == "model.layers.0.self_attn"
        ranges.append(found)
    assert torch.allclose(ranges[0].k, ranges[1].k, rtol=1e-6) and torch.allclose(ranges[0].v, ranges[1].v, rtol=1e-6)
    streamed.layers[0].self_attn.k_proj.weight.data[0] = torch.inf
    with pytest.raises(NumericsError, match=r"layers\.0\.self_attn: keys that are not finite"):
        observe_cache(run, 0)


def test_layers_of_linear_attention_keep_no_keys_and_values(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_next", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=96, vocab_size=128, num_experts=0, moe_intermediate_size=32, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, shared_expert_intermediate_size=32,
        mlp_only_layers=[0, 1, 2, 3], max_position_embeddings=128,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    streamed = StreamedModel(open_checkpoint(tmp_path))
    run = streamed.begin(TOKENS % 128)
    found = []
    for index in range(4):
        streamed.load_layer(index)
        found.append([one.module for one in observe_cache(run, index)])
        run.advance(index)
    assert found == [[], [], [], ["model.layers.3.self_attn"]] and caching_layers(config) == [3]


class Keeper(nn.Module):
    """A module that asks its cache for what a test says."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, hidden_states: torch.Tensor, past_key_value: Any = None) -> torch.Tensor:
        if past_key_value is not None:
            self.ask(past_key_value)
        return hidden_states


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda cache: cache.update_conv_state(1), "asks its cache for update_conv_state"),
        (lambda cache: cache[0], r"asks its cache for \[0\]"),
        (lambda cache: cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 1, 3, 4), 0), r"\[1, 2, 3, 4\] and \[1, 1,"),
        (lambda cache: cache.update(torch.ones(1, 3, 4), torch.ones(1, 3, 4), 0), r"\[1, 3, 4\]"),
    ],
)
def test_what_is_no_cache_of_keys_and_values_is_told(ask: Any, says: str) -> None:
    takers = cache_takers(Keeper(ask), "layers.3.mixer")
    assert list(takers) == ["layers.3.mixer"]
    scales = {"layers.3.mixer": CacheScales(torch.ones(1), torch.ones(1))}
    with rounded_cache(takers, scales, FP8), pytest.raises(SourceError, match=says):
        takers["layers.3.mixer"](torch.ones(1, 3, 8))
    assert torch.equal(takers["layers.3.mixer"](torch.ones(1)), torch.ones(1)), "afterwards nothing is given"


# ------------------------------------------------------------------------------------------------ export


@pytest.mark.parametrize("name", SPECS)
def test_scales_are_those_of_the_largest_keys_and_values_that_the_quantized_model_caches(
    name: str, exports: dict[str, Path], tiny_llama: Path, text: Path
) -> None:
    recipe = recipe_for(tiny_llama, exports[name], text, method="rtn", bits=8, kv_cache=name)
    tokens = tokens_of(recipe, make_plan(recipe))
    stored, spec = stored_scales(exports[name]), SPECS[name]
    cache = HandRounded(stored, spec)
    with torch.no_grad():
        plain_model(exports[name])(tokens, past_key_values=cache, use_cache=True)
    reports = json.loads((exports[name] / "quantforge.json").read_text())["layers"]
    for layer, own in stored.items():
        for scale, largest in zip((own.k, own.v), cache.largest[layer], strict=True):
            assert scale.dtype == torch.bfloat16 and scale.shape == ((2, 1, 1) if spec.per_head else (1,))
            wanted = (largest if spec.per_head else largest.amax().reshape(1)) / spec.top
            assert torch.allclose(scale.float().flatten(), wanted, rtol=2**-8, atol=0)
        [report] = reports[layer]["cache"]
        assert report["name"] == f"model.layers.{layer}.self_attn" and report["tokens"] == tokens.numel()
        assert report["k_scale"] == own.k.flatten().tolist() and report["v_scale"] == own.v.flatten().tolist()
        assert torch.allclose(torch.tensor(report["k_max"]), cache.largest[layer][0], rtol=1e-4)


def test_the_rest_of_an_export_is_that_without_a_cache(
    exports: dict[str, Path], tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    finish(recipe_for(tiny_llama, tmp_path / "plain", text, method="rtn", bits=8))
    plain, cached = load_file(tmp_path / "plain" / "model.safetensors"), load_file(exports["fp8"] / "model.safetensors")
    names = {f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"}
    assert cached.keys() - plain.keys() == names and plain.keys() <= cached.keys()
    assert all(torch.equal(plain[key], cached[key]) for key in plain)


@pytest.mark.parametrize("name", SPECS)
def test_the_config_is_read_by_compressed_tensors_own_class(name: str, exports: dict[str, Path]) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    settings = json.loads((exports[name] / "config.json").read_text())["quantization_config"]
    scheme = quantization.QuantizationConfig.model_validate(settings).kv_cache_scheme
    spec = SPECS[name]
    assert (scheme.num_bits, scheme.symmetric, scheme.dynamic) == (8, True, False)
    assert scheme.type == ("float" if spec.kind == "fp8" else "int")
    assert scheme.strategy == ("attn_head" if spec.per_head else "tensor")
    assert kv_cache_name(settings["kv_cache_scheme"]) == name


def test_a_run_that_died_after_its_first_layer_gives_the_same_bytes(
    exports: dict[str, Path], tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    recipe = recipe_for(tiny_llama, tmp_path / "fp8", text, method="rtn", bits=8, kv_cache="fp8")
    run = quantize(recipe, make_plan(recipe))
    next(event for event in run if isinstance(event, LayerDone))
    run.close()
    with pytest.raises(Exception, match="kv_cache: was 'fp8', now 'int8'"):
        finish(recipe.model_copy(update={"kv_cache": "int8"}))
    finish(recipe)
    assert contents(tmp_path / "fp8") == contents(exports["fp8"])


def test_a_changed_scale_does_not_verify(
    tiny_llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = verify_module._Files.tensor

    def other(self: Any, key: str) -> torch.Tensor:
        tensor = read(self, key)
        return tensor * 2 if key.endswith("layers.1.self_attn.v_scale") else tensor

    monkeypatch.setattr(verify_module._Files, "tensor", other)
    with pytest.raises(VerifyError, match=r"layers\.1\.self_attn: scales of its cache are .*, calibrated were"):
        finish(recipe_for(tiny_llama, tmp_path / "out", text, method="rtn", kv_cache="fp8"))
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ simulation


@pytest.mark.parametrize("name", SPECS)
def test_rounding_is_that_of_decoding_token_by_token_out_of_a_cache_rounded_by_hand(
    name: str, exports: dict[str, Path]
) -> None:
    model, cache = plain_model(exports[name]), HandRounded(stored_scales(exports[name]), SPECS[name])
    with torch.no_grad():
        steps = [model(TOKENS[:, n : n + 1], past_key_values=cache, use_cache=True).logits for n in range(40)]
        without = model(TOKENS).logits
    expected = torch.cat(steps, dim=1)
    streamed = StreamedModel(open_any(exports[name]))
    run = streamed.begin(TOKENS)
    with stored_cache(streamed) as said:
        run.run_all()
    assert said == f"{SPECS[name].label()}, in 2 layers"
    logits = torch.stack([run.logits(sample) for sample in range(2)])
    distance = (logits - expected).norm() / (without - expected).norm()
    assert distance < 0.05, "beside what rounding the cache does, the two are the same"
    run = streamed.begin(TOKENS)
    run.run_all()
    assert torch.allclose(torch.stack([run.logits(sample) for sample in range(2)]), without, atol=1e-5)


def test_evaluation_rounds_the_cache_and_says_so(
    exports: dict[str, Path], tiny_llama: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"text": str(text), "window": 64, "windows": 4}
    without = copy_of(exports["int8"], tmp_path / "without")
    edit_config(without, kv_cache_scheme=None)
    edit_tensors(without, lambda t: [t.pop(key) for key in list(t) if key.endswith(("k_scale", "v_scale"))])
    plain, rounded = (
        evaluate_checkpoint(str(p), reference=str(tiny_llama), **asked) for p in (without, exports["int8"])
    )
    assert plain.kv_cache is None and rounded.kv_cache == "INT8 keys and values, scales per layer, in 2 layers"
    assert plain.divergence is not None and rounded.divergence is not None
    assert rounded.divergence.kl > 1.1 * plain.divergence.kl
    assert main(["eval", str(exports["int8"]), "--text", str(text), "--window", "64", "--windows", "2"]) == 0
    assert "cache       rounded: INT8 keys and values, scales per layer, in 2 layers" in capsys.readouterr().out
    again = evaluate_checkpoint(str(tiny_llama), reference=str(exports["fp8"]), **asked)
    assert "the reference has FP8 (E4M3) keys and values, scales per layer, in 2 layers" in again.notes


def test_a_cache_that_cannot_be_simulated_is_refused(exports: dict[str, Path], tmp_path: Path) -> None:
    lacking = copy_of(exports["fp8"], tmp_path / "lacking")
    edit_tensors(lacking, lambda t: [t.pop(f"model.layers.1.self_attn.{part}_scale") for part in "kv"])
    streamed = StreamedModel(open_any(lacking))
    run = streamed.begin(TOKENS)
    with stored_cache(streamed), pytest.raises(SourceError, match=r"layers\.1\.self_attn caches .* and has no scales"):
        run.run_all()
    edit_tensors(lacking, lambda t: [t.pop(f"model.layers.0.self_attn.{part}_scale") for part in "kv"])
    with (
        pytest.raises(SourceError, match="static scales, and there are none"),
        stored_cache(StreamedModel(open_any(lacking))),
    ):
        pass
    dynamic = copy_of(exports["fp8"], tmp_path / "dynamic")
    edit_config(dynamic, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True})
    with (
        pytest.raises(SourceError, match="8-bit float keys and values, per tensor, dynamic"),
        stored_cache(StreamedModel(open_any(dynamic))),
    ):
        pass
    good = ActivationScheme(8, "int", "attn_head", False, True)
    assert cache_spec(good) == SPECS["int8_per_head"]


# ------------------------------------------------------------------------------------------------ checkpoints


def test_inspect_tells_of_the_cache_and_counts_no_parameters_for_it(
    exports: dict[str, Path], tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = describe_checkpoint(str(exports["fp8_per_head"]))
    assert found.kv_cache == "8-bit float keys and values, per attn_head, static, symmetric: scales of 2 layers"
    assert found.parameters == describe_checkpoint(str(tiny_llama)).parameters
    assert main(["inspect", str(exports["fp8"])]) == 0
    said = "cache       8-bit float keys and values, per tensor, static, symmetric: scales of 2 layers"
    assert said in capsys.readouterr().out


def test_a_sound_export_is_found_sound(exports: dict[str, Path], tiny_llama: Path) -> None:
    for path in exports.values():
        found = examine(path, reference=tiny_llama)
        assert found.ok and {finding.code for finding in found.findings} <= {"tokenizer-class"}, found.findings


def _set(key: str, value: torch.Tensor | None) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value

    return change


K1 = "model.layers.1.self_attn.k_scale"


@pytest.mark.parametrize(
    ("value", "code", "says"),
    [
        (torch.tensor([float("nan")]), "not-finite", "1 of 1 values of k_scale are not finite"),
        (torch.tensor([-0.5]), "zero-scale", "k_scale holds -0.5; scales are positive"),
        (torch.tensor([0.0]), "zero-scale", "k_scale holds 0; scales are positive"),
        (torch.ones(2, 1, 1), "shape", r"k_scale is torch.float32 \[2, 1, 1\]; expected floats \[1\]"),
        (torch.ones(1, dtype=torch.int32), "shape", "k_scale is torch.int32"),
        (None, "missing", "k_scale is missing; present: v_scale"),
    ],
)
def test_scales_that_cannot_be_meant_are_found(
    value: torch.Tensor | None, code: str, says: str, exports: dict[str, Path], tmp_path: Path
) -> None:
    broken = copy_of(exports["fp8"], tmp_path / "broken")
    edit_tensors(broken, _set(K1, value))
    findings = [finding for finding in examine(broken).errors if finding.code == code]
    assert [finding.where for finding in findings] == ["model.layers.1.self_attn"]
    with pytest.raises(SourceError, match=says) as raised:
        open_any(broken).cache_scales()  # type: ignore[attr-defined]
    assert str(raised.value) == findings[0].text


def test_layers_without_scales_and_scales_without_a_scheme_are_found(exports: dict[str, Path], tmp_path: Path) -> None:
    lacking = copy_of(exports["fp8"], tmp_path / "lacking")
    edit_tensors(lacking, lambda t: [t.pop(f"model.layers.0.self_attn.{part}_scale") for part in "kv"])
    [finding] = [finding for finding in examine(lacking).errors if finding.code == "cache-scale"]
    assert finding.where == "model.layers.0" and "there is no k_scale of layer 0" in finding.text
    unsaid = copy_of(exports["fp8"], tmp_path / "unsaid")
    edit_config(unsaid, kv_cache_scheme=None)
    found = [finding for finding in examine(unsaid).findings if finding.code == "cache-scheme"]
    assert [finding.where for finding in found] == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    odd = copy_of(exports["fp8"], tmp_path / "odd")
    edit_config(odd, kv_cache_scheme="fp8")
    assert any("kv_cache_scheme is 'fp8'; expected settings" in finding.text for finding in examine(odd).errors)


def test_scales_with_other_shapes_and_zero_points_of_other_tools_are_read() -> None:
    reader = load_reader("compressed-tensors").cache
    assert reader is not None
    keys = ["a.attn.k_scale", "a.attn.v_scale", "a.attn.k_zero_point", "a.attn.q_scale", "a.proj.weight_scale"]
    parts = {name.rpartition(".")[2]: name for name in keys[:3]}
    assert reader.group_keys(keys) == {"a.attn": parts}
    scheme = reader.scheme({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}})
    assert scheme == ActivationScheme(8, "float", "attn_head", False, True)
    tensors = {"k_scale": torch.ones(3, 1, 1), "v_scale": torch.tensor([2.0, 3.0, 4.0]), "k_zero_point": torch.zeros(3)}
    k, v = reader.decode(tensors, scheme, "a.attn")
    assert k.tolist() == [1.0, 1.0, 1.0] and v.tolist() == [2.0, 3.0, 4.0]
    with pytest.raises(SourceError, match=r"a\.attn: kv_cache_scheme is symmetric, and k_zero_point is not 0"):
        reader.decode(tensors | {"k_zero_point": torch.ones(3)}, scheme, "a.attn")
    assert reader.scheme({"kv_cache_scheme": None}) is None


def test_conversion_carries_scales_bit_for_bit_or_refuses(exports: dict[str, Path], tmp_path: Path) -> None:
    for name in ("fp8", "int8_per_head"):
        convert_checkpoint(exports[name], "compressed-tensors", tmp_path / name)
        before, after = (load_file(path / "model.safetensors") for path in (exports[name], tmp_path / name))
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        configs = [json.loads((path / "config.json").read_text()) for path in (exports[name], tmp_path / name)]
        assert configs[0] == configs[1]
    with pytest.raises(PlanError) as raised:
        convert_checkpoint(exports["fp8"], "gptq", tmp_path / "gptq")
    assert "gptq cannot hold scales of a cache, and 2 modules have them (FP8 (E4M3) keys and values" in str(
        raised.value
    )
    assert "no such problem with --format compressed-tensors" in str(raised.value)
    unsaid = copy_of(exports["fp8"], tmp_path / "unsaid")
    edit_config(unsaid, kv_cache_scheme=None)
    with pytest.raises(PlanError, match="2 modules have scales of a cache, and no kv_cache_scheme says"):
        convert_checkpoint(unsaid, "compressed-tensors", tmp_path / "again")


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_transformers_with_compressed_tensors_ignores_the_scales_as_its_contract_says(
    name: str, exports: dict[str, Path]
) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(exports[name], dtype=torch.float32).eval()
    with torch.no_grad():
        logits, plain = model(TOKENS, use_cache=True).logits, plain_model(exports[name])(TOKENS).logits
        cache = HandRounded(stored_scales(exports[name]), SPECS[name])
        rounded = plain_model(exports[name])(TOKENS, past_key_values=cache, use_cache=True).logits
    assert torch.allclose(logits, plain, atol=1e-4) and (rounded - plain).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------ recipe and plan


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("fp8", "fp8"), ("FP8_E4M3", "fp8"), ("fp8-per-head", "fp8_per_head"), ("auto", "none"), (None, "none"),
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}, "fp8"),
        ({"num_bits": 8}, "int8"), ({"type": "int", "strategy": "attn_head"}, "int8_per_head"),
    ],
)  # fmt: skip
def test_a_cache_has_the_names_that_servers_and_tools_give_it(given: Any, meant: str) -> None:
    for key in ("kv_cache", "kv_cache_dtype", "kv_cache_scheme"):
        assert read_recipe(None, {"model": "m", key: given}).recipe.kv_cache == meant


@pytest.mark.parametrize(
    "given",
    ["fp8_e5m2", 8, True, "int4", {"num_bits": 4}, {"dynamic": True}, {"strategy": "token"}, {"symmetric": False}],
)
def test_other_caches_are_refused_with_those_that_there_are(given: Any) -> None:
    with pytest.raises(UsageError, match=r"kv_cache must be none, fp8 \(E4M3\), int8, fp8_per_head or int8_per_head"):
        read_recipe(None, {"model": "m", "kv_cache": given})


def test_the_flag_under_a_servers_name_is_planned_and_named(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["quantize", str(tiny_llama), "--method", "rtn", "--group-size", "64", "--dry-run"]
    assert main([*argv, "--kv-cache-dtype", "fp8_e4m3"]) == 0
    shown = capsys.readouterr()
    assert "--kv-cache-dtype is read as --kv-cache" in shown.out + shown.err
    assert "cache       scales for FP8 (E4M3) keys and values, scales per layer" in shown.out
    assert "output      tiny-llama-w4g64-rtn-kvfp8 (not written" in shown.out
    assert variant_name(Recipe(model="m", kv_cache="int8_per_head"), 64) == "w4g64-gptq-kvint8-per-head"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"formats": ("gptq", "awq")}, ["--format gptq cannot hold scales", "--format awq cannot hold scales"]),
        ({"sequential": "none"}, ["--sequential none never runs; use --sequential layer or group"]),
        ({"tune_epochs": 1}, ["use --tune-epochs 0 with --kv-cache"]),
    ],
)
def test_what_cannot_go_with_a_cache_is_refused_by_the_plan(
    changes: dict[str, Any], says: list[str], tiny_llama: Path, text: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanError) as raised:
        make_plan(recipe_for(tiny_llama, tmp_path / "out", text, kv_cache="fp8", **changes))
    assert all(text in str(raised.value) for text in says)


def test_latent_attention_and_models_without_a_cache_are_refused_from_their_config(tmp_path: Path) -> None:
    latent = dict(
        model_type="deepseek_v3", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=96, vocab_size=128, q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1,
        first_k_dense_replace=1, n_shared_experts=1, architectures=["DeepseekV3ForCausalLM"],
    )  # fmt: skip
    with pytest.raises(PlanError, match="latent attention caches a compressed latent"):
        looked(config_only(tmp_path / "latent", latent), kv_cache="fp8", group_size=-1)
    mamba = dict(
        model_type="mamba2", hidden_size=64, num_hidden_layers=2, vocab_size=128, num_heads=8, head_dim=16,
        state_size=16, n_groups=1, expand=2, architectures=["Mamba2ForCausalLM"],
    )  # fmt: skip
    with pytest.raises(PlanError, match="no layer of this model caches keys and values"):
        looked(config_only(tmp_path / "mamba", mamba), kv_cache="fp8", group_size=-1)


def test_the_outlook_of_an_8_bit_cache_is_half_of_that_at_16_bits(tiny_llama: Path) -> None:
    load = Load(context=100, batch=2)
    plain, cached = (looked(tiny_llama, load, method="rtn", group_size=32, kv_cache=name) for name in ("none", "fp8"))
    assert cached.variants[1].total_bytes == plain.variants[1].total_bytes + 2 * 2 * 2  # one bfloat16 each
    assert [variant.kv_bits for variant in cached.variants] == [16, 8]
    assert plain.kv_bytes == cached.variants[0].kv_bytes == 2 * 2 * 100 * 2 * 2 * 32 * 2
    assert cached.kv_bytes == plain.kv_bytes // 2
    export = cached.variants[1]
    assert export.serving_bytes == export.weight_bytes + cached.kv_bytes
    assert looked(tiny_llama, Load(kv_bits=4), method="rtn", group_size=32, kv_cache="fp8").variants[1].kv_bits == 4


# ------------------------------------------------------------------------------------------------ servers


def with_cache(**changes: Any) -> Any:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    return subject("compressed-tensors", settings=CT | {"kv_cache_scheme": scheme | changes})


def test_servers_take_fp8_scales_per_layer() -> None:
    for server in ("vllm", "vllm-cpu", "sglang", "tgi", "transformers"):
        found = verdict(server, with_cache())
        assert found.loads and any("cache" in note for note in found.notes), server
    assert "with the scales in the file" in " ".join(verdict("vllm", with_cache()).notes)
    assert "with scales of 1" in " ".join(verdict("vllm", with_cache(dynamic=True)).notes)


def test_vllm_refuses_int8_and_asymmetric_caches_and_others_ignore_them() -> None:
    for server in ("vllm", "vllm-cpu"):
        said = refusal(server, with_cache(type="int"))
        assert "not as 8-bit int, symmetric, tensor, static" in said and "--kv-cache fp8 or none" in said
        assert "asymmetric" in refusal(server, with_cache(symmetric=False))
    assert any("kv_cache_scheme is ignored" in note for note in verdict("sglang", with_cache(type="int")).notes)
    assert any("not used" in note for note in verdict("tgi", with_cache(type="int")).notes)


def test_scales_per_head_need_a_server_that_has_them() -> None:
    per_head = with_cache(strategy="attn_head")
    assert any("FlashAttention 3" in note for note in verdict("vllm", per_head).notes)
    assert "per head are not taken on a CPU" in refusal("vllm-cpu", per_head)
    assert "per head are not taken; --kv-cache fp8 has one a layer" in refusal("tgi", per_head)
    assert any("kv_cache_scheme is ignored" in note for note in verdict("sglang", per_head).notes)
