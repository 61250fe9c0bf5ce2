"""Sites on different grids: rules, what servers fuse, and mixed checkpoints that every reader resolves alike."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_grids import random_weight
from safetensors.torch import load_file
from test_pipeline import TOKENS, finish, hidden_of, recipe_for
from torch import nn

from quantforge.errors import PlanError, UsageError, VerifyError, WorkspaceError
from quantforge.formats import CheckpointFacts, load_format
from quantforge.model.observe import InputGroup
from quantforge.model.packed import PackedCheckpoint, open_any
from quantforge.patterns import covering
from quantforge.pipeline import run as run_module
from quantforge.pipeline.describe import describe_checkpoint
from quantforge.pipeline.plan import Plan, make_plan
from quantforge.pipeline.run import quantize
from quantforge.pipeline.solve import solve_sites
from quantforge.pipeline.workspace import Workspace
from quantforge.readers import load_reader
from quantforge.recipe import Recipe
from quantforge.report import LayerDone, LayerReport
from quantforge.spec import QuantSpec

MIXED = (
    {"match": "*.down_proj", "bits": 8, "group_size": 32, "symmetric": False},
    {"match": r"re:layers\.1\.self_attn\.[qkv]_proj$", "bits": 3},
    {"match": "model.layers.0.self_attn.o_proj", "skip": True},
)
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def plan_of(model: Path, **changes: Any) -> Plan:
    return make_plan(Recipe(**{"model": str(model), "output": "out", "method": "rtn", "group_size": 64} | changes))


def problems_of(model: Path, **changes: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        plan_of(model, **changes)
    return list(caught.value.problems)


def build_gpt2(path: Path) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


# ------------------------------------------------------------------------------------------------ plan


def test_the_first_rule_that_fits_decides_and_what_it_leaves_open_is_the_recipes(tiny_llama: Path) -> None:
    rules = ({"match": "*layers.0.*", "group_size": 32}, {"match": "*.down_proj", "bits": 8, "group_size": -1})
    plan = plan_of(tiny_llama, rules=rules)
    assert plan.spec == QuantSpec(4, 64, scale_dtype="float16")
    assert plan.specs["model.layers.0.mlp.down_proj"] == QuantSpec(4, 32, scale_dtype="float16")
    assert plan.specs["model.layers.1.mlp.down_proj"] == QuantSpec(8, None, scale_dtype="float16")
    assert plan.specs["model.layers.1.mlp.up_proj"] == plan.spec
    assert list(plan.specs) == [site.name for site in plan.sites]
    assert plan.label == (
        "4 bits, group 32, symmetric: 7 sites; 4 bits, group 64, symmetric: 6 sites; 8 bits, per channel, "
        "symmetric: 1 sites"
    )
    sizes = {site.name: site.out_features * site.in_features for site in plan.sites}
    bits = sum(
        size * (4.5 if ".0." in name else 8 + 16 / 384 if "down" in name else 4.25) for name, size in sizes.items()
    )
    assert plan.bits_per_weight == pytest.approx(bits / sum(sizes.values()))
    site = next(s for s in plan.to_json()["sites"] if s["name"] == "model.layers.1.mlp.down_proj")
    assert (site["bits"], site["group_size"], site["symmetric"]) == (8, None, True)


def test_skipped_sites_are_kept_with_the_rule_as_their_reason(tiny_llama: Path) -> None:
    plan = plan_of(tiny_llama, rules=({"match": "*.down_proj", "skip": True},))
    assert len(plan.specs) == len(plan.sites) == 12
    assert plan.kept["model.layers.1.mlp.down_proj.weight"] == "skipped by the rule *.down_proj"
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"} <= set(plan.kept_linears)


def test_a_group_size_is_chosen_for_each_grid(tmp_path: Path) -> None:
    from conftest import _build_llama

    plan = plan_of(_build_llama(tmp_path / "m", tied=False), group_size="auto")
    assert {spec.group_size for spec in plan.specs.values()} == {128}
    gpt2 = build_gpt2(tmp_path / "gpt2")  # inputs of 64, and of 256 in mlp.c_proj
    plan = plan_of(gpt2, group_size="auto", formats=("gptq",), rules=({"match": "*.mlp.c_proj", "bits": 8},))
    groups = {name.rpartition("h.0.")[2]: spec.group_size for name, spec in plan.specs.items() if "h.0." in name}
    assert groups == {"attn.c_attn": 64, "attn.c_proj": 64, "mlp.c_fc": 64, "mlp.c_proj": 128}
    chosen = [note for note in plan.notes if "group size" in note]
    assert chosen == [
        "at 4 bits, symmetric: group size 64: 128 does not divide an input width of 64",
        "at 8 bits, symmetric: group size 128: it divides every site's input width",
    ]


def test_every_group_size_that_does_not_fit_is_told_at_once(tiny_llama: Path) -> None:
    found = problems_of(tiny_llama, group_size=96, rules=({"match": "*.down_proj", "bits": 8, "group_size": 256},))
    assert [problem.partition(" sites")[0] for problem in found] == [
        "at 4 bits, symmetric: group size 96 does not divide the input width of 12",
        "at 8 bits, symmetric: group size 256 does not divide the input width of 2",
    ]


def test_a_rule_for_no_site_is_a_problem_and_one_that_comes_too_late_a_warning(tiny_llama: Path) -> None:
    (problem,) = problems_of(tiny_llama, rules=({"match": "*.dwon_proj", "bits": 8},))
    assert problem.startswith("--rule *.dwon_proj=bits:8 matches no site that is quantized; names look like model.")
    rules = ({"match": "*.down_proj", "bits": 8}, {"match": "*layers.0.mlp.down_proj", "bits": 2})
    warnings = plan_of(tiny_llama, rules=rules).warnings
    assert warnings == (
        "warning: --rule *layers.0.mlp.down_proj=bits:2 has no effect: earlier rules match all its 1 sites",
    )
    with pytest.raises(UsageError, match=r"--rule re:\[: not a regular expression"):
        plan_of(tiny_llama, rules=({"match": "re:[", "bits": 8},))


def test_matrices_that_servers_fuse_need_one_grid_and_every_breach_is_told(tiny_llama: Path) -> None:
    rules = ({"match": "*.q_proj", "bits": 8}, {"match": "*layers.1.mlp.up_proj", "symmetric": False})
    attention, mlp = problems_of(tiny_llama, rules=rules)
    assert attention.startswith("vLLM and SGLang fuse q_proj, k_proj, v_proj and need one grid for all of them")
    assert "--rule 're:\\.(q_proj|k_proj|v_proj)$=bits:8'" in attention
    grid = "4 bits, group 64, symmetric"
    assert attention.splitlines()[1:] == [
        f"  model.layers.*.self_attn: q_proj 8 bits, group 64, symmetric; k_proj {grid}; v_proj {grid} "
        "(2 layers, 0 to 1)"
    ]
    assert mlp.splitlines()[1:] == [
        f"  model.layers.1.mlp: gate_proj {grid}; up_proj 4 bits, group 64, asymmetric".replace(".1.", ".*.")
        + " (1 layers, 1 to 1)"
    ]
    together = r"re:\.(q_proj|k_proj|v_proj)$"
    assert (
        plan_of(tiny_llama, rules=({"match": together, "bits": 8},)).specs["model.layers.0.self_attn.q_proj"].bits == 8
    )


def test_a_fused_set_that_is_skipped_in_part_is_warned_about_as_before(tiny_llama: Path) -> None:
    (warning,) = plan_of(tiny_llama, rules=({"match": "*.k_proj", "skip": True},)).warnings
    assert "vLLM and SGLang fuse q_proj, k_proj, v_proj" in warning
    assert plan_of(tiny_llama, rules=({"match": "re:[qkv]_proj$", "skip": True},)).warnings == ()


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"rules": MIXED[:1]}, True),
        ({"rules": MIXED[:1], "formats": ("gptq",)}, False),
        ({"rules": MIXED[1:]}, False),
        ({"symmetric": False}, False),
    ],
)
def test_a_mixture_that_transformers_cannot_open_is_warned_about(
    tiny_llama: Path, changes: dict[str, Any], warned: bool
) -> None:
    found = plan_of(tiny_llama, **changes).warnings
    assert [("several grids when one of them is asymmetric" in warning) for warning in found] == [True] * warned


def test_sites_that_share_an_input_on_different_grids_are_solved_apart(tiny_llama: Path) -> None:
    plan = plan_of(tiny_llama)
    sites = [site for site in plan.sites if site.layer == 0 and "self_attn" in site.name][:3]
    specs = dict(
        zip((site.name for site in sites), (QuantSpec(4, 64), QuantSpec(8, 32), QuantSpec(4, 64)), strict=True)
    )
    plan.streamed.load_layer(0)
    modules = {site.module: plan.streamed.model.get_submodule(site.module) for site in sites}
    group = InputGroup(tuple(modules), torch.eye(128), 128)
    solved = solve_sites(replace(plan, specs=specs), sites, modules, group)
    assert {site.name: weight.spec for site, weight, _ in solved} == specs
    for site, weight, report in solved:
        ((_, alone, _),) = solve_sites(replace(plan, specs=specs), [site], modules, group)
        assert torch.equal(weight.codes, alone.codes) and torch.equal(weight.scale, alone.scale)
        assert report.bits == specs[site.name].bits and report.name == site.name


def test_a_committed_site_carries_its_own_grid(tmp_path: Path) -> None:
    weights = {
        f"site{number}": random_weight(spec, 32, 64)
        for number, spec in enumerate((QuantSpec(3, 32, symmetric=False), QuantSpec(8, None, scale_dtype="float16")))
    }
    with Workspace.open(tmp_path / "work", {"a": 1}) as workspace:
        workspace.commit(0, weights, LayerReport(0, ()), None)
        for name, weight in weights.items():
            stored = workspace.weight(0, name, 64)
            assert stored.spec == weight.spec
            assert all(torch.equal(getattr(stored, part), getattr(weight, part)) for part in ("codes", "scale", "zero"))


# ------------------------------------------------------------------------------------------------ patterns


def names(*layers: int, leaf: str = "mlp.down_proj", stem: str = "model.layers") -> list[str]:
    return [f"{stem}.{layer}.{leaf}" for layer in layers]


@pytest.mark.parametrize(
    ("mine", "others", "expected"),
    [
        (names(0, 1, 2), names(0, 1, leaf="mlp.up_proj"), [r"(.*\.)?layers\.\d+\.mlp\.down_proj$"]),
        (names(0, 29), names(2), [r"(.*\.)?layers\.(0|29)\.mlp\.down_proj$"]),
        (names(1), names(11, 10), [r"(.*\.)?layers\.1\.mlp\.down_proj$"]),
        (names(0, 1), names(1, stem="vision.layers"), [r"^model\.layers\.(0|1)\.mlp\.down_proj$"]),
        (["h.0.attn.c_attn"], ["h.0.attn.c_proj"], [r"(.*\.)?h\.\d+\.attn\.c_attn$"]),
        (["lm_head"], names(0), [r"^lm_head$"]),
        (
            ["m.layers.0.experts.1.up", "m.layers.0.experts.2.up"],
            ["m.layers.0.experts.3.up"],
            [r"(.*\.)?layers\.0\.experts\.1\.up$", r"(.*\.)?layers\.0\.experts\.2\.up$"],
        ),
    ],
)
def test_few_patterns_cover_all_names_and_no_other(mine: list[str], others: list[str], expected: list[str]) -> None:
    found = covering(mine, others)
    assert found == expected
    assert all(any(re.match(pattern, name) for pattern in found) for name in mine)
    assert not any(re.match(pattern, name) for pattern in found for name in others)


# ------------------------------------------------------------------------------------------------ the whole way


@pytest.fixture(scope="module")
def mixed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both formats of a checkpoint with 3, 4 and 8 bits, asymmetric grids and a site that is skipped."""
    folder = tmp_path_factory.mktemp("mixed")
    file = folder / "text.txt"
    file.write_text("layers groups scale column quick brown fox every own place stop start read back " * 200)
    finish(recipe_for(tiny_llama, folder / "out", file, rules=MIXED, formats=("compressed-tensors", "gptq")))
    return folder / "out"


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq"])
def test_a_mixed_checkpoint_verifies_and_reads_back_from_its_config_alone(mixed: Path, name: str) -> None:
    source = open_any(mixed / name)
    assert isinstance(source, PackedCheckpoint)
    grids = {site: (s.bits, s.group_size, s.symmetric) for site, s in source.schemes.items()}
    assert len(grids) == 13 and "model.layers.0.self_attn.o_proj" not in grids
    for site, grid in grids.items():
        leaf = site.rpartition(".")[2]
        three = "layers.1" in site and leaf in ("q_proj", "k_proj", "v_proj")
        assert grid == ((8, 32, False) if leaf == "down_proj" else (3, 64, True) if three else (4, 64, True)), site


def test_both_formats_of_a_mixed_checkpoint_hold_the_same_model(mixed: Path) -> None:
    assert torch.equal(hidden_of(mixed / "compressed-tensors"), hidden_of(mixed / "gptq"))


def test_inspect_counts_the_sites_of_each_grid(mixed: Path) -> None:
    found = describe_checkpoint(str(mixed / "compressed-tensors"))
    assert found.scheme == (
        "4 bits, group 64, symmetric (pack-quantized): 8 sites; 3 bits, group 64, symmetric (pack-quantized): 3 sites; "
        "8 bits, group 32, asymmetric (pack-quantized): 2 sites"
    )


def test_a_mixed_gpt2_round_trips_in_gptq(tmp_path: Path) -> None:
    rules = ({"match": "*.mlp.c_proj", "bits": 8}, {"match": "*h.0.attn.c_attn", "bits": 3, "symmetric": False})
    recipe = Recipe(
        model=str(build_gpt2(tmp_path / "gpt2")), output=str(tmp_path / "out"), method="rtn", group_size=32,
        formats=("gptq",), rules=rules,  # type: ignore[arg-type]
    )  # fmt: skip
    assert list(quantize(recipe, make_plan(recipe)))
    source = open_any(tmp_path / "out")
    assert isinstance(source, PackedCheckpoint)
    bits = {site.removeprefix("transformer."): scheme.bits for site, scheme in source.schemes.items()}
    assert bits == {
        f"h.{layer}.{leaf}": 8 if leaf == "mlp.c_proj" else 3 if (layer, leaf) == (0, "attn.c_attn") else 4
        for layer in (0, 1)
        for leaf in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["bits"] == 4 and sorted(config["dynamic"]) == [
        r"+:(.*\.)?h\.0\.attn\.c_attn$",
        r"+:(.*\.)?h\.\d+\.mlp\.c_proj$",
    ]


def test_other_rules_on_unfinished_work_are_refused_naming_them(tiny_llama: Path, tmp_path: Path) -> None:
    def recipe(*rules: dict[str, Any]) -> Recipe:
        return Recipe(
            model=str(tiny_llama), output=str(tmp_path / "out"), method="rtn", group_size=64, rules=rules,  # type: ignore[arg-type]
        )  # fmt: skip

    first = recipe({"match": "*.down_proj", "bits": 8})
    run = quantize(first, make_plan(first))
    while not isinstance(next(run), LayerDone):
        pass
    run.close()  # type: ignore[attr-defined]
    second = recipe({"match": "*.down_proj", "bits": 3})
    with pytest.raises(WorkspaceError, match=r"rules: was \['\*\.down_proj=bits:8'\], now \['\*\.down_proj=bits:3'\]"):
        list(quantize(second, make_plan(second)))
    assert list(quantize(first, make_plan(first)))
    assert describe_checkpoint(str(tmp_path / "out")).scheme.count("8 bits") == 1


def test_a_config_that_gives_a_site_another_grid_is_caught_before_publishing(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = run_module.write_checkpoint

    def tampered(directory: Path, *args: Any) -> Any:
        result = original(directory, *args)
        file = directory / "config.json"
        file.write_text(file.read_text().replace(r"layers\\.\\d+\\.mlp\\.down_proj", r"layers\\.1\\.mlp\\.down_proj"))
        return result

    monkeypatch.setattr(run_module, "write_checkpoint", tampered)
    recipe = Recipe(
        model=str(tiny_llama), output=str(tmp_path / "out"), method="rtn", group_size=64,
        rules=({"match": "*.down_proj", "bits": 8},),  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(VerifyError, match=r"no config group targets model\.layers\.0\.mlp\.down_proj"):
        list(quantize(recipe, make_plan(recipe)))
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------- other programs' reading


def config_of(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert isinstance(found, dict)
    return found


def test_compressed_tensors_resolves_and_decompresses_every_site_to_our_weights(mixed: Path, tiny_llama: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from transformers import AutoModelForCausalLM

    directory = mixed / "compressed-tensors"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    quantization.apply_quantization_config(model, quantization.QuantizationConfig.model_validate(config_of(directory)))
    source, tensors = open_any(directory), load_file(directory / "model.safetensors")
    assert isinstance(source, PackedCheckpoint)
    schemes = {
        name: module.quantization_scheme
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    assert schemes.keys() == source.sites.keys()
    for site, keys in source.sites.items():
        parts = {suffix: tensors[key] for suffix, key in keys.items()}
        parts["weight_scale"] = parts["weight_scale"].float()  # it computes in the scale's dtype
        compressor = compressors.BaseCompressor.get_value_from_registry(schemes[site].format)
        assert torch.equal(compressor.decompress(parts, schemes[site])["weight"], source.read(f"{site}.weight")), site


def test_transformers_computes_our_logits_from_a_mixed_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    rules = ({"match": "*.down_proj", "bits": 8, "group_size": 32}, {"match": "*layers.0.self_attn*", "bits": 3})
    recipe = Recipe(
        model=str(tiny_llama), output=str(tmp_path / "out"), method="rtn", group_size=64, rules=rules,  # type: ignore[arg-type]
    )  # fmt: skip
    assert list(quantize(recipe, make_plan(recipe)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(TOKENS, use_cache=False).logits
    assert float((logits - hidden_of(tmp_path / "out")).abs().max()) < 1e-4


def vllm_group(config: dict[str, Any], layer: str, kind: str) -> dict[str, Any] | None:
    """The config group of a layer by vLLM's rules: name, then class (as a part of it), then all parts of a fused one.

    Written from vllm/model_executor/layers/quantization/compressed_tensors/utils.py (`find_matched_target`).
    """
    targets = {target: group for group in config["config_groups"].values() for target in group["targets"]}

    def first(value: str, contains: bool = False) -> str | None:
        for target in targets:
            if target.startswith("re:"):
                if re.match(target[3:], value):
                    return target
            elif target == value or (contains and target.lower() in value.lower()):
                return target
        return None

    parent, _, leaf = layer.rpartition(".")
    found = first(layer) or first(kind, contains=True)
    if found is None and leaf in FUSED:
        parts = [first(f"{parent}.{part}") for part in FUSED[leaf]]
        found = parts[0] if all(parts) else None
    return None if found is None else targets[found]


def test_vllm_finds_the_grid_of_plain_and_of_fused_layers(mixed: Path) -> None:
    config = config_of(mixed / "compressed-tensors")
    for layer in (0, 1):
        for name, kind, bits in (
            ("self_attn.qkv_proj", "QKVParallelLinear", 3 if layer == 1 else 4),
            ("mlp.gate_up_proj", "MergedColumnParallelLinear", 4),
            ("mlp.down_proj", "RowParallelLinear", 8),
        ):
            group = vllm_group(config, f"model.layers.{layer}.{name}", kind)
            assert group is not None and group["weights"]["num_bits"] == bits, (layer, name)
    assert "model.layers.0.self_attn.o_proj" in config["ignore"]
    group = vllm_group(config, "language_model.model.layers.1.self_attn.qkv_proj", "QKVParallelLinear")
    assert group is not None and group["weights"]["num_bits"] == 3


def dynamic(config: dict[str, Any], layer: str) -> dict[str, Any] | None:
    """A layer's settings by the rule of GPTQModel, vLLM and SGLang (`get_dynamic_override`); None: not quantized."""
    for rule, settings in config["dynamic"].items():
        if re.match(rule[2:], layer):
            return None if rule.startswith("-:") else config | settings
    return config


def test_gptq_loaders_find_the_grid_of_plain_and_of_fused_layers(mixed: Path) -> None:
    config = config_of(mixed / "gptq")
    assert config == json.loads((mixed / "gptq" / "quantize_config.json").read_text())
    assert (config["bits"], config["group_size"], config["sym"]) == (4, 64, True)

    def grid(layer: str) -> tuple[Any, ...] | None:
        found = dynamic(config, layer)
        return None if found is None else (found["bits"], found["group_size"], found["sym"])

    for leaf in ("qkv_proj", "q_proj", "k_proj", "v_proj"):
        assert grid(f"model.layers.1.self_attn.{leaf}") == (3, 64, True)
        assert grid(f"model.layers.0.self_attn.{leaf}") == (4, 64, True)
    for layer in (0, 1):
        assert grid(f"model.layers.{layer}.mlp.down_proj") == (8, 32, False)
        assert grid(f"model.layers.{layer}.mlp.gate_up_proj") == (4, 64, True)
    assert grid("model.layers.0.self_attn.o_proj") is None
    assert grid("model.layers.1.self_attn.o_proj") == (4, 64, True)


@pytest.mark.parametrize("name", ["compressed-tensors", "gptq"])
def test_grids_dealt_out_at_random_are_read_back_under_checkpoint_and_module_names(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    grids = [QuantSpec(4, 64), QuantSpec(8, None), QuantSpec(3, 32, symmetric=False), QuantSpec(2, 32)]
    leaves = ("attn.q", "attn.o", "mlp.experts.0.up", "mlp.experts.1.up")
    sites = [f"model.layers.{layer}.{leaf}" for layer in range(12) for leaf in leaves]
    picks = torch.randint(0, len(grids), (len(sites),), generator=generator).tolist()
    specs = {site: grids[pick] for site, pick in zip(sites, picks, strict=True)}
    modules = {site: site.replace("model.layers", "model.language_model.blocks") for site in sites}
    facts = CheckpointFacts(specs, ("lm_head", "model.layers.3.mlp.router"), True, modules)
    config, reader = load_format(name).config(facts), load_reader(name)
    for site, spec in specs.items():
        for known in (site, modules[site]):
            found = reader.scheme(config, known)
            assert (found.bits, found.group_size, found.symmetric) == (spec.bits, spec.group_size, spec.symmetric)


def test_compressed_tensors_takes_the_same_group_whatever_the_order_of_its_targets() -> None:
    match = pytest.importorskip("compressed_tensors.utils.match")
    specs = {site: QuantSpec(8 if layer in (0, 7) else 4, 64) for layer in range(8) for site in names(layer)}
    config = load_format("compressed-tensors").config(CheckpointFacts(specs, ("lm_head",), False))
    targets = [target for group in config["config_groups"].values() for target in group["targets"]]
    assert "Linear" not in targets
    for site in specs:
        assert len(match.match_targets(site, nn.Linear(1, 1), targets)) == 1
