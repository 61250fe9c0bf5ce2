"""TensorRT-LLM's PyTorch backend, on paper: what its loader of Hugging Face checkpoints does with integer weights."""

from quantforge.contracts import Contract, Problem, Subject, Verdict

VERSION = "TensorRT-LLM, main of 2026"
CONFIG = f"{VERSION}, tensorrt_llm/_torch/model_config.py, ModelConfig.load_hf_quant_config"
GROUPS = f"{VERSION}, tensorrt_llm/models/quant_config_utils.py, _quant_config_from_config_group"
MODELOPT = "; its integer weights are those ModelOpt writes (hf_quant_config.json, W4A16_AWQ), which is no format here"


def check(subject: Subject) -> Verdict:
    """What TensorRT-LLM does with a checkpoint: unquantized ones are served, these integer formats are not."""
    problems: list[Problem] = []
    match subject.quant_method:
        case None:
            pass
        case "compressed-tensors" if any(grid.activation_bits for grid in subject.sites.values()):
            text = "8-bit weights per channel with activations per token are taken for FP8, whatever their type"
            problems.append(Problem(text + MODELOPT, GROUPS))
        case "compressed-tensors":
            text = "integer weights without quantized activations have no branch in its compressed-tensors reader"
            problems.append(Problem(text + MODELOPT, GROUPS))
        case method:
            problems.append(Problem(f"quant_method {method} is not one it knows{MODELOPT}", CONFIG))
    notes = ("tensor parallelism was not looked at",) if subject.tensor_parallel > 1 else ()
    return Verdict("tensorrt-llm", None if problems else "unquantized", tuple(problems), notes)


CONTRACT = Contract(
    name="tensorrt-llm",
    summary="TensorRT-LLM, PyTorch backend",
    versions="main of 2026, on paper",
    tried=False,
    check=check,
)
