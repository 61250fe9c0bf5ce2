"""Checkpoints run on their packed weights: the logits of the dequantized model, and the same files when saved again."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2LMHeadModel, GPTQConfig, LlamaForCausalLM
from transformers.quantizers import auto
from transformers.utils import logging

import quantforge
from quantforge.errors import SourceError, UsageError
from quantforge.kernels.linear import Grid, PackedLinear
from quantforge.model.packed import open_any
from quantforge.numerics.activations import quantize_tokens
from quantforge.runtime import register, unregister
from quantforge.runtime.load import _say_not_rounded
from quantforge.runtime.quantizer import PackedQuantizer, can_run
from quantforge.spec import ActivationSpec

AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
TOKENS = torch.arange(1, 25).reshape(2, 12)
EXPORTS = ("gptq", "gptq-asym", "sharded", "packed", "awq", "w8a8", "auto-round", "act-order")


@pytest.fixture(scope="module")
def exports(tiny_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The small exports, and others made of them: awq, auto-round's config, act-order."""
    from quantforge import convert_checkpoint

    awq = tmp_path_factory.mktemp("awq") / "awq"
    convert_checkpoint(tiny_exports["gptq-asym"], "awq", awq)
    auto_round, act_order = (awq.parent / name for name in ("auto-round", "act-order"))
    for path, own in ((auto_round, AUTO_ROUND), (act_order, {"desc_act": True})):
        shutil.copytree(tiny_exports["gptq"], path)
        tensors = load_file(path / "model.safetensors")
        for key in [key for key in tensors if key.endswith("g_idx")]:
            if path is auto_round:
                del tensors[key]
            else:
                tensors[key] = tensors[key][torch.randperm(len(tensors[key]))]
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] |= own
        (path / "config.json").write_text(json.dumps(config))
    return tiny_exports | {"awq": awq, "auto-round": auto_round, "act-order": act_order}


@pytest.fixture
def registered() -> Iterator[None]:
    register()
    yield
    unregister()


def expected(path: Path) -> torch.Tensor:
    """Logits of a float model whose weights were dequantized one by one, its activations rounded where asked for."""
    source = open_any(path)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = LlamaForCausalLM(config).float().eval()
    model.load_state_dict({key: source.read(key).float() for key in source.keys()}, strict=False)  # noqa: SIM118
    for name, scheme in source.schemes.items():
        if scheme.activations is not None:
            model.get_submodule(name).register_forward_pre_hook(rounding)
    with torch.no_grad():
        return model(TOKENS).logits


def rounding(module: torch.nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (quantize_tokens(args[0], ActivationSpec(8)),)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.parametrize("name", EXPORTS)
def test_logits_are_those_of_the_dequantized_model(name: str, exports: dict[str, Path]) -> None:
    model = quantforge.load(exports[name], dtype="float32", device="cpu")
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(packed) == 7 and all(layer.layout == "panels" for layer in packed)
    assert not any(p.numel() == 32 * 64 for p in model.parameters())  # no float copy of a matrix
    assert torch.allclose(logits(model), expected(exports[name]), atol=2e-5)


@pytest.mark.parametrize("name", EXPORTS)
def test_from_pretrained_and_saving_give_back_every_byte(
    name: str, exports: dict[str, Path], registered: None, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(exports[name])
    assert isinstance(model.hf_quantizer, PackedQuantizer) and model.dtype == torch.bfloat16
    assert sum(isinstance(m, PackedLinear) for m in model.modules()) == 7
    model.save_pretrained(tmp_path)
    before = {k: v for file in exports[name].glob("*.safetensors") for k, v in load_file(file).items()}
    after = load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    asked, kept = (json.loads((path / "config.json").read_text()) for path in (exports[name], tmp_path))
    assert kept["quantization_config"] == asked["quantization_config"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_conv1d_and_biases_run_packed_too(tiny_gpt2: Path, tmp_path: Path) -> None:
    from quantforge.pipeline.plan import make_plan
    from quantforge.pipeline.run import quantize

    plain = GPT2LMHeadModel.from_pretrained(tiny_gpt2).eval()
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    plain.save_pretrained(tmp_path / "source")
    settings = {"model": str(tmp_path / "source"), "output": str(tmp_path / "out"), "method": "rtn", "group_size": 32}
    recipe = quantforge.Recipe.model_validate(settings | {"formats": ("gptq",), "symmetric": False})
    assert list(quantize(recipe, make_plan(recipe)))
    model = quantforge.load(tmp_path / "out", dtype="float32", device="cpu")
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len(layers) == 4 and all(layer.bias is not None and layer.bias.any() for layer in layers)
    source = open_any(tmp_path / "out")
    for site in source.sites:
        plain.get_parameter(f"{site}.weight").data = source.decode(site).dequantize().t().contiguous()
    assert torch.allclose(logits(model), logits(plain), atol=2e-5)


def test_generate_and_compile(exports: dict[str, Path]) -> None:
    model = quantforge.load(exports["gptq-asym"], dtype="float32", device="cpu")
    found = model.generate(TOKENS[:1], max_new_tokens=5, do_sample=False, eos_token_id=None)
    tokens = TOKENS[:1]
    for _ in range(5):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, tokens)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(TOKENS, use_cache=False).logits, logits(model), atol=1e-5)


def test_rounded_inputs_are_an_option_that_changes_little(exports: dict[str, Path]) -> None:
    plain = logits(quantforge.load(exports["gptq"], dtype="float32", device="cpu"))
    model = quantforge.load(exports["gptq"], dtype="float32", device="cpu", activations="int8-group")
    distance = float((logits(model) - plain).norm() / plain.norm())
    assert 1e-5 < distance < 5e-2


def test_int8_group_is_refused_or_said_where_it_does_nothing(exports: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match=r"int8-group .* none of 7 packed layers"):
        quantforge.load(exports["w8a8"], device="cpu", activations="int8-group")
    model = torch.nn.ModuleDict()
    for name, bits, group in (("four", 4, 32), ("eight", 8, 32), ("odd", 4, 12)):
        model[name] = PackedLinear(64, 16, bits=bits, activations="int8-group")
        index = torch.arange(64) // group
        corners = torch.full((16, int(index.max()) + 1), 8, dtype=torch.uint8)
        model[name].fill(Grid(torch.ones(16, 64, dtype=torch.uint8), corners.half(), corners, index))
    with pytest.warns(UserWarning, match=r"it does nothing for 2 of 3 packed layers: eight, odd$"):
        _say_not_rounded(model, exports["w8a8"])
    x = torch.randn(2, 64)
    assert torch.allclose(model["odd"](x), x @ model["odd"].dequantize().t(), atol=1e-3)


def test_loading_is_quiet_and_leaves_transformers_as_talkative_as_it_was(
    exports: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = logging.get_verbosity()
    try:
        logging.set_verbosity_info()
        assert logging.is_progress_bar_enabled()
        quantforge.load(exports["gptq"], device="cpu")
        assert capsys.readouterr().err == ""
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        quantforge.load(exports["gptq"], device="cpu")
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


@pytest.mark.slow
def test_the_default_compiler_of_torch_gives_the_same_tokens(exports: dict[str, Path]) -> None:
    if not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("inductor compiles with g++ or clang++, and neither is here")
    model = quantforge.load(exports["gptq-asym"], dtype="float32", device="cpu")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        found, plain = compiled(TOKENS, use_cache=False).logits, logits(model)
    assert torch.allclose(found, plain, atol=1e-5) and torch.equal(found.argmax(-1), plain.argmax(-1))


def test_a_float_checkpoint_loads_as_it_is(exports: dict[str, Path]) -> None:
    model = quantforge.load(exports["source"], device="cpu")
    assert model.dtype == torch.bfloat16 and not any(isinstance(m, PackedLinear) for m in model.modules())


def test_what_cannot_be_run_is_refused(exports: dict[str, Path], take: Any) -> None:
    with pytest.raises(UsageError, match=r"dtype 'int4' is none of auto"):
        quantforge.load(exports["gptq"], dtype="int4")
    with pytest.raises(UsageError, match="device 'abacus'"):
        quantforge.load(exports["gptq"], device="abacus")
    path = take("gptq")
    (path / "own.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        SourceError, match=r"own\.gguf is GGUF.*quantforge convert .*own\.gguf --config DIR --format gptq"
    ):
        quantforge.load(path / "own.gguf")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(SourceError, match="'hqq' in a way that cannot be run packed; runnable are auto-round, awq"):
        quantforge.load(path)


def test_a_damaged_site_is_named(take: Any) -> None:
    path = take("gptq")
    tensors = load_file(path / "model.safetensors")
    key = next(key for key in tensors if key.endswith("up_proj.scales"))
    tensors[key][0, 0] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"up_proj: 1 of .* not finite"):
        quantforge.load(path, device="cpu")


def test_registering_is_undone_and_leaves_others_alone(exports: dict[str, Path]) -> None:
    before = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    quantforge.load(exports["gptq"], device="cpu")
    assert before == (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    register()
    register()  # twice is once
    try:
        fp8 = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}}
        assert not can_run(fp8) and can_run({"quant_method": "gptq", "bits": 4})
        assert isinstance(auto.AutoQuantizationConfig.from_dict({"quant_method": "gptq", "bits": 4}).settings, dict)
        assert auto.AUTO_QUANTIZER_MAPPING["fp8"] is before[0]["fp8"]
        assert isinstance(GPTQConfig(bits=4), GPTQConfig)
    finally:
        unregister()
    assert before == (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)


def test_importing_quantforge_transformers_registers() -> None:
    code = (
        "import quantforge, sys; assert 'transformers' not in sys.modules; import quantforge.transformers; "
        "from transformers.quantizers import auto; print(type(auto.AUTO_QUANTIZER_MAPPING['gptq']).__name__)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.split() == ["function"], ran.stderr
