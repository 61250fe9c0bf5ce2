"""What each server takes, takes slowly, or refuses, against what its sources say and what was measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quantforge.contracts import SiteGrid, Subject, Verdict, all_verdicts, contract_names, load_contract
from quantforge.contracts._rules import matrices

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": True}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {}}}
SETTINGS = {"gptq": GPTQ, "awq": AWQ, "compressed-tensors": CT, "gguf": {}}
VARIANTS = {"gptq": "gptq", "awq": "gemm", "compressed-tensors": "pack-quantized", "gguf": "Q4_0"}
LEAVES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def subject(
    method: str | None,
    *,
    hidden: int = 256,
    kv: int = 128,
    inter: int = 512,
    heads: int = 4,
    kv_heads: int = 2,
    layers: int = 2,
    kept: tuple[str, ...] = ("lm_head",),
    settings: dict[str, Any] | None = None,
    own: dict[str, dict[str, Any]] | None = None,
    tp: int = 1,
    tied: bool = False,
    **grid: Any,
) -> Subject:
    """A Llama whose sites all have one grid; `own` changes that of sites by the last part of their name."""
    shapes = {
        "q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden),
        "gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter),
    }  # fmt: skip
    config: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config["tie_word_embeddings"] = tied
    sites = {}
    if method is not None:
        config["quantization_config"] = SETTINGS[method] if settings is None else settings
        values = {"bits": 4, "group_size": 128, "symmetric": True, "variant": VARIANTS[method]} | grid
        for layer in range(layers):
            for name in (*LEAVES, *MLP):
                leaf = name.rpartition(".")[2]
                out_features, in_features = shapes[leaf]
                site = SiteGrid(out_features, in_features, **(values | (own or {}).get(leaf, {})))
                sites[f"model.layers.{layer}.{name}"] = site
    return Subject(config, method, sites, kept, "float16", tp)


def verdict(server: str, given: Subject) -> Verdict:
    return load_contract(server).check(given)


def refusal(server: str, given: Subject) -> str:
    """All its reasons; every one names where it is written."""
    found = verdict(server, given)
    assert not found.loads and found.kernel is None
    assert all(problem.source and problem.text for problem in found.problems)
    return "\n".join(problem.text for problem in found.problems)


# ------------------------------------------------------------------------------------------------ the table

W8A8 = {"bits": 8, "group_size": None, "variant": "int-quantized", "activation_bits": 8}
TAKEN = [  # server, method, what is out of the ordinary, kernel
    ("vllm", None, {}, "unquantized"),
    ("vllm", "gptq", {}, "Marlin"),
    ("vllm", "gptq", {"bits": 8, "group_size": None}, "Marlin"),
    ("vllm", "gptq", {"variant": "gptq_v2"}, "Marlin"),
    ("vllm", "awq", {"symmetric": False}, "Marlin"),
    ("vllm", "compressed-tensors", {"symmetric": False, "group_size": 32}, "Marlin"),
    ("vllm", "compressed-tensors", {"bits": 8, "symmetric": False}, "Machete"),
    ("vllm", "compressed-tensors", {"group_size": 256}, "TritonW4A16"),
    ("vllm", "compressed-tensors", W8A8, "CUTLASS INT8"),
    ("vllm-cpu", "gptq", {"group_size": 32}, "CPUWNA16"),
    ("vllm-cpu", "awq", {"symmetric": False}, "CPUWNA16"),
    ("vllm-cpu", "compressed-tensors", {"symmetric": False}, "CPUWNA16"),
    ("vllm-cpu", "compressed-tensors", W8A8, "oneDNN INT8"),
    ("sglang", "gptq", {"bits": 8}, "Marlin"),
    ("sglang", "gptq", {"act_order": True}, "Marlin"),
    ("sglang", "compressed-tensors", {"symmetric": False}, "Marlin"),
    ("sglang", "compressed-tensors", W8A8, "CUTLASS INT8"),
    ("transformers", "gptq", {"bits": 3, "symmetric": False}, "GPTQModel"),
    ("transformers", "gptq", {"act_order": True, "variant": "gptq_v2"}, "GPTQModel"),
    ("transformers", "awq", {"symmetric": False}, "GPTQModel"),
    ("transformers", "compressed-tensors", {"bits": 8}, "torch (dequantized)"),
    ("transformers", "compressed-tensors", W8A8, "torch (dequantized)"),
    ("tgi", "gptq", {}, "Marlin"),
    ("tgi", "gptq", {"symmetric": False}, "Exllama"),
    ("tgi", "gptq", {"bits": 2}, "Triton"),
    ("tgi", "awq", {"symmetric": False}, "Marlin"),
    ("tgi", "compressed-tensors", {"bits": 8, "group_size": None}, "Marlin"),
    ("tensorrt-llm", None, {}, "unquantized"),
    ("llama-cpp", "gguf", {"group_size": 32}, "ggml: Q4_0"),
    ("llama-cpp", "gguf", {"group_size": 32, "bits": 8, "variant": "Q8_0"}, "ggml: Q8_0"),
]


@pytest.mark.parametrize(("server", "method", "changes", "kernel"), TAKEN)
def test_what_is_taken_and_by_which_kernel(
    server: str, method: str | None, changes: dict[str, Any], kernel: str
) -> None:
    found = verdict(server, subject(method, **changes))
    assert (found.problems, found.kernel) == ((), kernel)


REFUSED = [  # server, method, what is out of the ordinary, what is said
    ("vllm", "gptq", {"symmetric": False}, "symmetric with 4 or 8 bits only"),
    ("vllm", "gptq", {"bits": 3}, "symmetric with 4 or 8 bits only"),
    ("vllm", "gptq", {"act_order": True}, "desc_act (g_idx) is no longer taken"),
    ("vllm", "gptq", {"group_size": 16}, "group sizes are 32, 64, 128 or -1"),
    ("vllm", "gptq", {"hidden": 192, "kv": 192}, "must divide the inputs"),
    ("vllm", "awq", {"bits": 8}, "4 bits only"),
    ("vllm", "compressed-tensors", {"bits": 3}, "no kernel that comes with it"),
    ("vllm", "compressed-tensors", {"act_order": True}, "actorder group"),
    ("vllm", "compressed-tensors", {**W8A8, "activation_bits": None}, "need quantized activations"),
    ("vllm", "gguf", {"group_size": 32}, "quant_method gguf"),
    ("vllm-cpu", "gptq", {"bits": 8}, "symmetric with 4 bits only"),
    ("vllm-cpu", "gptq", {"symmetric": False}, "symmetric with 4 bits only"),
    ("vllm-cpu", "compressed-tensors", {"bits": 8}, "4 bits only"),
    ("vllm-cpu", "compressed-tensors", {"hidden": 192, "kv": 192}, "must divide the inputs"),
    ("vllm-cpu", "compressed-tensors", {"kv": 40, "group_size": 32}, "multiples of 32"),
    ("sglang", "gptq", {"symmetric": False}, "symmetric with 4 or 8 bits only"),
    ("sglang", "compressed-tensors", {"bits": 8, "symmetric": False}, "no kernel for 8-bit asymmetric"),
    ("sglang", "compressed-tensors", {"bits": 2}, "4 or 8 bits"),
    ("sglang", "gptq", {"inter": 96, "group_size": 32}, "outputs in 64s with inputs in 128s"),
    ("sglang", "compressed-tensors", {"kv": 48}, "outputs in 64s with inputs in 128s"),
    ("transformers", "compressed-tensors", {"symmetric": False}, "dequantize=True"),
    ("transformers", "compressed-tensors", {"act_order": True}, "has been removed"),
    ("transformers", "compressed-tensors", {"hidden": 192, "kv": 192}, "must divide the inputs"),
    ("transformers", "gptq", {"group_size": 48}, "powers of two"),
    ("transformers", "awq", {"bits": 8}, "4 bits only"),
    ("tgi", "compressed-tensors", {"symmetric": False}, "under a name (qzeros)"),
    ("tgi", "gptq", {"symmetric": False, "variant": "gptq_v2"}, "one too high"),
    ("tgi", "gptq", {"bits": 3}, "2, 4 or 8 bits"),
    ("tgi", "gguf", {"group_size": 32}, "llama.cpp backend"),
    ("tensorrt-llm", "gptq", {}, "quant_method gptq"),
    ("tensorrt-llm", "compressed-tensors", {}, "no branch"),
    ("tensorrt-llm", "compressed-tensors", W8A8, "taken for FP8"),
    ("llama-cpp", "gptq", {}, "GGUF files only"),
    ("llama-cpp", "gguf", {"group_size": 64}, "groups of 32"),
    ("llama-cpp", "gguf", {"group_size": 32, "inter": 80}, "multiple of 32 long"),
]


@pytest.mark.parametrize(("server", "method", "changes", "said"), REFUSED)
def test_what_is_refused_and_why(server: str, method: str, changes: dict[str, Any], said: str) -> None:
    assert said in refusal(server, subject(method, **changes))


PLUGGED = [  # what vLLM on a CPU refuses: method, what is out of the ordinary, whether our plug-in has it serve it
    ("gptq", {"bits": 8}, True),
    ("gptq", {"bits": 8, "symmetric": False}, True),
    ("gptq", {"symmetric": False, "variant": "gptq_v2"}, True),
    ("gptq", {"group_size": 16}, True),
    ("gptq", {"bits": 3}, False),
    ("gptq", {"act_order": True}, False),
    ("awq", {"kv": 40, "group_size": 32}, True),
    ("compressed-tensors", {"bits": 8, "symmetric": False}, True),
    ("compressed-tensors", {"bits": 3}, True),
    ("compressed-tensors", {"bits": 8, "activation_bits": 8}, False),
    ("compressed-tensors", {"bits": 8, "group_size": 2}, False),
    ("compressed-tensors", {"hidden": 192, "kv": 192}, False),
    ("gguf", {"group_size": 32}, False),
]


@pytest.mark.parametrize(("method", "changes", "served"), PLUGGED)
def test_what_the_plug_in_has_vllm_serve_is_named_beside_the_refusal(
    method: str, changes: dict[str, Any], served: bool
) -> None:
    found = verdict("vllm-cpu", subject(method, **changes))
    assert not found.loads and (found.remedy is not None) == served
    assert not served or "quantforge-llm installed beside vLLM" in str(found.remedy)


SLOW = [
    ("vllm", "gptq", {"hidden": 576, "kv": 192, "group_size": 64}, "Marlin pads shapes"),
    ("vllm", "compressed-tensors", {"kv": 48}, "Marlin pads shapes"),
    ("vllm", "awq", {"settings": AWQ | {"zero_point": False}}, "AWQ's own GEMM"),
    ("vllm", "compressed-tensors", {"group_size": 128}, "on Hopper: Machete"),
    ("vllm", "compressed-tensors", {"bits": 8, "symmetric": False}, "on Hopper (compute capability 9.0) only"),
    ("vllm-cpu", "gptq", {}, "needs a CPU with AVX-512"),
    ("vllm-cpu", "compressed-tensors", W8A8, "without VNNI"),
    ("vllm-cpu", "compressed-tensors", {"activation_bits": 8}, "quantization of activations is ignored"),
    ("tgi", "gptq", {"symmetric": False}, "slower: Exllama"),
    ("sglang", "awq", {"inter": 576, "group_size": 64, "symmetric": False}, "AWQ's own kernel"),
]


@pytest.mark.parametrize(("server", "method", "changes", "said"), SLOW)
def test_what_is_taken_but_slowly_is_said(server: str, method: str, changes: dict[str, Any], said: str) -> None:
    found = verdict(server, subject(method, **changes))
    assert found.loads and said in "\n".join(found.notes)


@pytest.mark.parametrize("server", ["vllm", "vllm-cpu", "sglang"])
def test_scales_wider_than_a_server_keeps_them_are_remarked(server: str) -> None:
    given = subject("compressed-tensors")
    assert not any("second time" in note for note in verdict(server, given).notes)
    wide = verdict(server, replace(given, scale_dtype="float32"))
    assert wide.loads and any("rounded a second time" in note for note in wide.notes)


# ------------------------------------------------------------------------------------------------ fused matrices


@pytest.mark.parametrize("server", ["vllm", "vllm-cpu", "sglang", "tgi"])
@pytest.mark.parametrize("own", [{"q_proj": {"bits": 8}}, {"gate_proj": {"group_size": 64}}])
def test_parts_of_a_fused_matrix_on_different_grids_are_refused_with_both_grids(
    server: str, own: dict[str, dict[str, Any]]
) -> None:
    text = refusal(server, subject("compressed-tensors", own=own))
    assert "fused matrices need one grid for all parts" in text
    leaves = "self_attn.q_proj/k_proj/v_proj" if "q_proj" in own else "mlp.gate_proj/up_proj"
    assert f"model.layers.*.{leaves} (2x)" in text


@pytest.mark.parametrize("server", ["vllm", "vllm-cpu", "sglang", "tgi"])
def test_a_fused_matrix_that_is_quantized_in_part_is_refused(server: str) -> None:
    whole = subject("compressed-tensors")
    name = "model.layers.0.self_attn.q_proj"
    sites = {key: grid for key, grid in whole.sites.items() if key != name}
    text = refusal(server, replace(whole, sites=sites, kept=(name, "lm_head")))
    assert "q_proj in floating point" in text and "ignore all or none" in text
    assert verdict("transformers", replace(whole, sites=sites, kept=(name, "lm_head"))).loads


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_experts_of_one_layer_must_be_alike(server: str) -> None:
    grid = SiteGrid(256, 256, 4, 128, True, "gptq")
    names = [f"model.layers.0.mlp.experts.{number}.down_proj" for number in range(3)]
    given = replace(subject("gptq"), sites=dict(zip(names, (grid, grid, replace(grid, bits=8)), strict=True)))
    assert "experts of one layer need one grid" in refusal(server, given)
    partly = replace(given, sites={names[0]: grid, names[1]: grid}, kept=(names[2],))
    assert "floating point" in refusal(server, partly)


def test_fused_matrices_are_as_wide_as_their_parts_together() -> None:
    found = {m.name: (m.out_features, m.in_features) for m in matrices(subject("gptq", layers=1))}
    assert found == {
        "model.layers.0.self_attn.qkv_proj": (512, 256),
        "model.layers.0.self_attn.o_proj": (256, 256),
        "model.layers.0.mlp.gate_up_proj": (1024, 256),
        "model.layers.0.mlp.down_proj": (256, 512),
    }


# ------------------------------------------------------------------------------------------------ tensor parallel


def test_outputs_are_split_for_some_matrices_and_inputs_for_others_and_few_key_heads_are_repeated() -> None:
    found = {m.name.rpartition(".")[2]: m for m in matrices(subject("gptq", layers=1, tp=4))}
    assert {leaf: (m.out_local, m.in_local) for leaf, m in found.items()} == {
        "qkv_proj": (256 // 4 + 64 + 64, 256),  # 2 key heads of 64 for 4 devices: one each
        "o_proj": (256, 64),
        "gate_up_proj": (1024 // 4, 256),
        "down_proj": (256, 128),
    }


@pytest.mark.parametrize("server", ["vllm", "sglang", "tgi"])
def test_a_group_that_straddles_two_devices_is_refused_with_the_numbers(server: str) -> None:
    assert verdict(server, subject("compressed-tensors", tp=2)).loads
    text = refusal(server, subject("compressed-tensors", tp=4))
    assert "the group size must divide the inputs on each device" in text
    assert "o_proj [256, 256], [256, 64] on each device, 4 bits, group 128" in text
    assert "down_proj" not in text  # 128 inputs on each device


@pytest.mark.parametrize("server", ["vllm", "vllm-cpu", "sglang", "tgi"])
def test_heads_that_devices_cannot_share_are_refused(server: str) -> None:
    text = refusal(server, subject("compressed-tensors", heads=9, kv_heads=3, tp=2))
    assert "9 attention heads cannot be split over 2 devices" in text
    assert "3 key and value heads can be neither split over nor repeated on 2 devices" in text


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    ("server", "method", "missing", "said"),
    [
        ("vllm", "gptq", ("desc_act", "sym"), "no desc_act, sym"),
        ("sglang", "gptq", ("sym",), "no sym"),
        ("vllm", "awq", ("zero_point",), "no zero_point"),
        ("vllm", "compressed-tensors", ("config_groups",), "no config_groups"),
        ("transformers", "gptq", ("bits",), "no bits"),
        ("tgi", "gptq", ("group_size",), "no group_size"),
        ("vllm", "gptq", ("quant_method",), "names no quant_method"),
    ],
)
def test_keys_that_a_server_asks_for_are_named_when_they_are_missing(
    server: str, method: str, missing: tuple[str, ...], said: str
) -> None:
    settings = {key: value for key, value in SETTINGS[method].items() if key not in missing}
    assert said in refusal(server, subject(method, settings=settings))


def test_a_config_inside_text_config_is_found_by_vllm_and_not_by_tgi() -> None:
    given = subject("gptq")
    config = dict(given.config)
    inner = {"text_config": {key: config.pop(key) for key in list(config)}}
    assert verdict("vllm", replace(given, config=inner)).loads
    assert "top of config.json" in refusal("tgi", replace(given, config=inner))


@pytest.mark.parametrize("server", ["transformers", "tgi"])
def test_loaders_that_know_one_grid_for_all_refuse_mixtures_and_kept_layers(server: str) -> None:
    assert "one grid" in refusal(server, subject("gptq", own={"down_proj": {"bits": 8}}))
    given = subject("gptq")
    name = "model.layers.1.mlp.down_proj"
    partly = replace(given, sites={k: v for k, v in given.sites.items() if k != name}, kept=(name, "lm_head"))
    assert "taken for quantized" in refusal(server, partly)
    assert verdict("vllm", partly).loads


@pytest.mark.parametrize("server", ["vllm", "vllm-cpu", "sglang", "tgi"])
def test_a_quantized_embedding_is_refused(server: str) -> None:
    given = subject("gptq", tied=True)
    grid = SiteGrid(1024, 256, 4, 128, True, "gptq")
    text = refusal(server, replace(given, sites={**given.sites, "model.embed_tokens": grid}))
    assert "model.embed_tokens (1x) is quantized; it is read in floating point only" in text


def test_a_quantized_head_needs_the_key_that_says_so_and_no_tie() -> None:
    grid = SiteGrid(1024, 256, 4, 128, True, "gptq")
    given = subject("gptq", kept=())
    given = replace(given, sites={**given.sites, "lm_head": grid})
    assert "lm_head (1x) is quantized" in refusal("vllm", given)
    said = replace(given, config={**given.config, "quantization_config": GPTQ | {"lm_head": True}})
    assert verdict("vllm", said).loads
    tied = replace(said, config={**said.config, "tie_word_embeddings": True})
    assert any("may be left unread" in note for note in verdict("vllm", tied).notes)


def test_experts_in_floating_point_stop_transformers_in_one_format_and_not_in_the_other() -> None:
    kept = ("model.layers.0.mlp.experts.0.down_proj", "model.layers.0.mlp.gate", "lm_head")
    assert "experts that stay in floating point" in refusal("transformers", subject("compressed-tensors", kept=kept))
    assert verdict("transformers", subject("gptq", kept=kept)).loads


# ------------------------------------------------------------------------------------------------ all of them


def test_every_server_is_a_file_and_says_whether_it_was_run() -> None:
    names = contract_names()
    assert names == ["llama-cpp", "sglang", "tensorrt-llm", "tgi", "transformers", "vllm", "vllm-cpu"]
    found = all_verdicts(subject("gptq"))
    assert [one.server for one in found] == names
    contracts = [load_contract(name) for name in names]
    assert [one.name for one in contracts if one.tried] == ["llama-cpp", "transformers", "vllm-cpu"]
    assert all("run" in one.versions or "read" in one.versions or "paper" in one.versions for one in contracts)


def test_a_float_checkpoint_is_refused_by_none_but_the_one_that_reads_another_format() -> None:
    assert [one.server for one in all_verdicts(subject(None)) if not one.loads] == ["llama-cpp"]


# ------------------------------------------------------------------------------------------------ docs/servers.md

DOCUMENTED: dict[str, tuple[str | None, dict[str, Any]]] = {
    "float": (None, {}),
    "gptq, 4 bits symmetric": ("gptq", {}),
    "gptq, 8 bits symmetric": ("gptq", {"bits": 8}),
    "gptq, 4 bits asymmetric": ("gptq", {"symmetric": False}),
    "gptq, 3 bits symmetric": ("gptq", {"bits": 3}),
    "gptq, 2 bits symmetric": ("gptq", {"bits": 2}),
    "gptq, 4 bits symmetric, act-order": ("gptq", {"act_order": True}),
    "awq, 4 bits asymmetric": ("awq", {"symmetric": False}),
    "compressed-tensors, 4 bits symmetric": ("compressed-tensors", {}),
    "compressed-tensors, 4 bits asymmetric": ("compressed-tensors", {"symmetric": False}),
    "compressed-tensors, 8 bits symmetric": ("compressed-tensors", {"bits": 8}),
    "compressed-tensors, 8 bits asymmetric": ("compressed-tensors", {"bits": 8, "symmetric": False}),
    "compressed-tensors, 3 bits symmetric": ("compressed-tensors", {"bits": 3}),
    "compressed-tensors, W8A8": ("compressed-tensors", W8A8),
    "gguf, Q4_0": ("gguf", {"group_size": 32}),
}


def documented_table() -> list[str]:
    """The table of docs/servers.md, from the contracts: group 128 (W8A8: per channel), shapes that fit every kernel."""
    names = contract_names()
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for what, (method, changes) in DOCUMENTED.items():
        cells = [one.kernel or "no" for one in all_verdicts(subject(method, **changes))]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return lines


def test_the_documented_table_is_what_the_contracts_say() -> None:
    written = (Path(__file__).parent.parent / "docs" / "servers.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(written) if line.startswith("| | llama-cpp"))
    table = documented_table()
    assert written[start : start + len(table)] == table


def test_the_document_names_every_server_with_the_version_of_its_rules() -> None:
    text = (Path(__file__).parent.parent / "docs" / "servers.md").read_text(encoding="utf-8")
    for name in contract_names():
        contract = load_contract(name)
        assert f"| {name} | {contract.summary} | {contract.versions} |" in text
