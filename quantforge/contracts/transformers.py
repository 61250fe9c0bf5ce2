"""transformers, run as 5.24.0: with compressed-tensors 0.20.1, and with optimum 2.3.0 and GPTQModel 7.7.0."""

from collections.abc import Iterator

from quantforge.contracts import Contract, Problem, Subject, Verdict
from quantforge.contracts._rules import (
    Matrix,
    cache_scheme,
    grids_of,
    kept_inside,
    listed,
    matrices,
    missing_keys,
    names_listed,
    refusals,
    settings_of,
)

TORCH = "GPTQModel 7.7.0, gptqmodel/nn_modules/qlinear/torch.py, TorchLinear"
TORCH_AWQ = "GPTQModel 7.7.0, gptqmodel/nn_modules/qlinear/torch_awq.py, AwqTorchLinear"
OPTIMUM = "optimum 2.3.0, optimum/gptq/quantizer.py, GPTQQuantizer.convert_model; measured"
PACKING = "compressed-tensors 0.20.1, compressors/pack_quantized/base.py, PackedQuantizationCompressor.compress"
SCHEMES = "compressed-tensors 0.20.1, quantization/quant_args.py, QuantizationArgs"
APPLY = "compressed-tensors 0.20.1, quantization/lifecycle/forward_helpers.py"
GPTQ_GROUPS = (None, 16, 32, 64, 128, 256, 512, 1024)
AWQ_GROUPS = (None, 16, 32, 64, 128)
CACHE_IGNORED = "scales of the cache are ignored, and it keeps the model's dtype (measured)"
DEQUANTIZE = "from_pretrained(..., quantization_config=CompressedTensorsConfig(dequantize=True))"


def check(subject: Subject) -> Verdict:
    """What `from_pretrained` does with a checkpoint on one device (tensor parallelism is not looked at)."""
    found = matrices(subject)
    problems: list[Problem] = []
    notes: list[str] = []
    kernel = "torch"
    match subject.quant_method:
        case None:
            pass
        case "gptq":
            problems += _gptq_problems(subject, found)
            kernel = "GPTQModel"
            notes.append(
                "needs optimum and gptqmodel; 8 bits and groups over 256 run on its plain torch kernel on a CPU"
            )
        case "awq":
            problems += _awq_problems(subject, found)
            kernel = "GPTQModel"
            notes.append("needs gptqmodel and accelerate")
        case "compressed-tensors":
            problems += _compressed_tensors_problems(subject, found)
            kernel = "torch (dequantized)"
            notes.append("weights are dequantized at the first forward pass: no memory is saved while it runs")
            if cache_scheme(subject) is not None:
                notes.append(CACHE_IGNORED)
            if any(m.grid.activation_bits for m in found):
                notes.append("quantized activations are simulated in floating point")
        case "gguf":
            kernel = "torch (dequantized)"
            notes.append(
                "needs gguf and from_pretrained(..., gguf_file=...); weights are dequantized when they are loaded"
            )
        case "auto-round":
            kernel = "auto-round's"
            notes.append("needs auto-round; not tried")
        case method:
            problems.append(
                Problem(
                    f"quant_method {method} is not one it knows",
                    "transformers 5.24.0, quantizers/auto.py, AUTO_QUANTIZATION_CONFIG_MAPPING",
                )
            )
    if subject.tensor_parallel > 1:
        notes.append("tensor parallelism was not looked at")
    return Verdict("transformers", None if problems else kernel, tuple(problems), tuple(notes))


def _gptq_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    config = "transformers 5.24.0, utils/quantization_config.py, GPTQConfig"
    yield from missing_keys(subject, [("bits",)], config)
    yield from refusals(
        found, lambda m: m.grid.bits not in (2, 3, 4, 8), "gptq is taken with 2, 3, 4 or 8 bits", config
    )
    yield from refusals(
        found,
        lambda m: m.grid.group_size not in (*GPTQ_GROUPS, m.in_features),
        "group sizes are 16 to 1024 in powers of two, or -1",
        f"{TORCH}.SUPPORTS_GROUP_SIZE",
    )
    chosen = settings_of(subject).get("modules_in_block_to_quantize") is not None
    grids = grids_of(subject)
    if len(grids) > 1:
        text = f"all linear layers get one grid, dynamic rules are not read, and there are {len(grids)}: "
        yield Problem(text + "; ".join(sorted(grids)) + "; GPTQModel's own loader reads them", OPTIMUM)
    if (kept := kept_inside(subject)) and not chosen:
        text = "all linear layers of decoder layers are taken for quantized, dynamic rules are not read"
        yield Problem(
            f"{text}, and these are not: {names_listed(kept)}; name those that are in modules_in_block_to_quantize, or "
            "use GPTQModel's own loader",
            OPTIMUM,
        )


def _awq_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    yield from missing_keys(
        subject, [("bits", "w_bit")], "transformers 5.24.0, utils/quantization_config.py, AwqConfig"
    )
    yield from refusals(found, lambda m: m.grid.bits != 4, "awq in gemm layout is tried with 4 bits only", TORCH_AWQ)
    yield from refusals(
        found,
        lambda m: m.grid.group_size not in AWQ_GROUPS,
        "group sizes are 16, 32, 64, 128 or -1",
        f"{TORCH_AWQ}.SUPPORTS_GROUP_SIZE",
    )
    yield from refusals(
        found,
        lambda m: m.out_features % 8 != 0,
        "outputs must come in 8s",
        f"{TORCH_AWQ}.SUPPORTS_OUT_FEATURES_DIVISIBLE_BY",
    )


def _compressed_tensors_problems(subject: Subject, found: list[Matrix]) -> Iterator[Problem]:
    yield from missing_keys(subject, [("config_groups",)], SCHEMES)
    packed = [m for m in found if m.grid.variant == "pack-quantized"]
    asymmetric = [m for m in packed if not m.grid.symmetric]
    if asymmetric:
        way = f"load it with {DEQUANTIZE}"
        if len(grids_of(subject)) > 1:
            way = f"{DEQUANTIZE} takes one grid only and there are several: use --sym"
        yield Problem(
            f"packed zero points have another shape than its loader expects; {way}: {listed(asymmetric)}", PACKING
        )
    yield from refusals(found, lambda m: m.grid.act_order, "actorder group (weight_g_idx) has been removed", SCHEMES)
    yield from refusals(
        found,
        lambda m: m.grid.group_size is not None and m.in_features % m.grid.group_size != 0,
        "the group size must divide the inputs",
        APPLY,
    )
    experts = [name for name in subject.kept if ".experts" in name]
    if experts and found:
        yield Problem(
            f"experts that stay in floating point cannot be opened beside packed layers: {names_listed(experts)}; "
            "--format gptq can",
            "transformers 5.24.0, core_model_loading.py, convert_and_load_state_dict_in_model; measured",
        )


CONTRACT = Contract(
    name="transformers",
    summary="transformers, on any device",
    versions="5.24.0 with compressed-tensors 0.20.1, or optimum 2.3.0 and gptqmodel 7.7.0; run on a CPU",
    tried=True,
    check=check,
)
