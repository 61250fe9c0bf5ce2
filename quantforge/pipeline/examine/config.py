"""What the JSON files of a checkpoint say: how it is quantized, and what servers want beside the weights."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantforge.errors import SourceError
from quantforge.model.generation import generation_problem
from quantforge.pipeline.examine.files import Files
from quantforge.pipeline.examine.findings import Finding, error, listed, warning
from quantforge.readers import Reader, load_reader

SIDE_CONFIGS = ("quantize_config.json", "quantization_config.json")
COMPARED = (
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "lm_head", "dynamic",
    "zero_point", "version", "packing_format", "extra_config",
)  # fmt: skip
GPTQ_LAYOUT, AWQ_LAYOUT, COMPRESSED_LAYOUT = "gptq", "awq", "compressed-tensors"
LAYOUTS = {"gptq": GPTQ_LAYOUT, "awq": AWQ_LAYOUT, "compressed-tensors": COMPRESSED_LAYOUT}
PACKED_SUFFIXES = (".qweight", ".weight_packed")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "tekken.json")
FIVE_ONLY_CLASS, OLDER_CLASS = "TokenizersBackend", "PreTrainedTokenizerFast"
CHAT_MARKERS = (
    "<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|start_of_turn|>", "<|assistant|>", "<|user|>",
    "[INST]", "<\uff5cAssistant\uff5c>", "<|start_of_role|>", "<|START_OF_TURN_TOKEN|>", "<|turn>", "<|start|>",
)  # fmt: skip


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized, as its config says, or as its tensors show where the config does not say it.

    Attributes:
        settings: the quantization_config; None for a float checkpoint, or when there is none that could be used.
        method: its quant_method, or the one inferred.
        reader: reads its sites; None when there is none for the method.
        sites: site -> {suffix: key} of its packed tensors.
    """

    settings: dict[str, Any] | None = None
    method: str | None = None
    reader: Reader | None = None
    sites: dict[str, dict[str, str]] = field(default_factory=dict)


def find_quantization(files: Files) -> tuple[Quantization, list[Finding]]:
    """Where the settings are, whether they name the method of the tensors that are there, and who reads them."""
    findings: list[Finding] = []
    layout = packed_layout(files)
    settings = _settings(files, layout, findings)
    if settings is None:
        return Quantization(method=layout), findings
    method = settings.get("quant_method")
    if method == "gguf" and layout is None:
        return Quantization(method=method), findings  # the file itself says how
    inferred = inferred_method(settings, layout)
    if not isinstance(method, str):
        says = "has no quant_method" if method is None else f"has the quant_method {str(method)[:80]}"
        advice = f"; by its tensors and keys it is {inferred}" if inferred else ""
        findings.append(
            error("quant-method", "config.json", f"quantization_config {says}, so no loader reads it{advice}")
        )
        method = inferred
    elif layout is not None and LAYOUTS.get(method, layout) != layout:
        text = f"quant_method is {method}, and the packed tensors are those of {layout}"
        findings.append(error("quant-method", "config.json", f"{text}; set it to {inferred}"))
        method = inferred
    if method is None:
        return Quantization(settings), findings
    try:
        reader = load_reader(method)
    except SourceError as fault:
        findings.append(error("unknown-method", "config.json", f"the packed tensors cannot be read: {fault}"))
        return Quantization(settings, method), findings
    sites = reader.group_keys(files.checkpoint.keys())
    if not sites and files.whole:
        text = f"quantization_config says {method}, and nothing is packed; remove it, or restore the packed weights"
        findings.append(error("not-packed", "config.json", text))
    return Quantization(settings, method, reader, sites), findings


def packed_layout(files: Files) -> str | None:
    """Whose packed tensors these are, by their names and shapes; None when nothing is packed."""
    tensors = files.checkpoint.tensors
    for key, info in tensors.items():
        site, _, suffix = key.rpartition(".")
        if suffix == "weight_packed" or (
            suffix == "weight" and info.dtype == "I8" and f"{site}.weight_scale" in tensors
        ):
            return COMPRESSED_LAYOUT
        zeros = tensors.get(f"{site}.qzeros")
        if suffix == "qweight" and zeros is not None:
            return AWQ_LAYOUT if info.shape[1:] == zeros.shape[1:] else GPTQ_LAYOUT
    return None


def inferred_method(settings: Mapping[str, Any], layout: str | None) -> str | None:
    """The quant_method that goes with the tensors, and with the keys of the settings."""
    if layout in (GPTQ_LAYOUT, AWQ_LAYOUT) and str(settings.get("packing_format", "")).startswith("auto_round"):
        return "auto-round"
    return layout


def _settings(files: Files, layout: str | None, findings: list[Finding]) -> dict[str, Any] | None:
    config = files.checkpoint.config
    text = config.get("text_config")
    nested = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config")
    if found is not None and not isinstance(found, dict):
        kind = type(found).__name__
        findings.append(error("quant-config", "config.json", f"quantization_config is a {kind}, not an object"))
    if isinstance(found, dict):
        return found
    if isinstance(nested, dict):
        advice = "transformers looks for it at the top only and would load packed tensors as nothing; --fix moves it"
        findings.append(error("quant-place", "config.json", f"quantization_config is inside text_config: {advice}"))
        return nested
    if layout is None:
        return None
    for name in SIDE_CONFIGS:
        if name in files.objects:
            says = f"the tensors are packed ({layout}) and config.json has no quantization_config, only {name} has it"
            findings.append(error("quant-config", "config.json", f"{says}; --fix copies it"))
            return dict(files.objects[name])
    says = f"the tensors are packed ({layout}) and no quantization_config says how; take it from where they were made"
    findings.append(error("quant-config", "config.json", says))
    return None


def check_side_configs(files: Files, settings: Mapping[str, Any] | None) -> Iterator[Finding]:
    """A copy of the settings that loaders read in place of config.json, and that says something else."""
    for name in SIDE_CONFIGS:
        copy = files.objects.get(name)
        if copy is None:
            continue
        if settings is None:
            yield error("side-config", name, f"{name} is there, and config.json has no quantization_config")
            continue
        differ = [key for key in COMPARED if key in copy and key in settings and copy[key] != settings[key]]
        if differ:
            pairs = [f"{key} {str(copy[key])[:60]} here, {str(settings[key])[:60]} there" for key in differ]
            yield error("side-config", name, f"{name} contradicts config.json: {'; '.join(pairs)}")


def check_side_files(files: Files) -> Iterator[Finding]:
    """Generation settings, tokenizer, chat template."""
    generation = files.objects.get("generation_config.json")
    if generation is not None and (problem := generation_problem(generation)) is not None:
        yield warning("generation", "generation_config.json", f"transformers would not save it again: {problem}")
    if not any(name in files.names for name in TOKENIZER_FILES) and not any(
        n.endswith(".tiktoken") for n in files.names
    ):
        text = f"there is no tokenizer ({listed(TOKENIZER_FILES)}); servers need one beside the weights"
        yield warning("tokenizer-missing", "tokenizer.json", text)
        return
    settings = files.objects.get("tokenizer_config.json", {})
    if settings.get("tokenizer_class") == FIVE_ONLY_CLASS:
        text = f"tokenizer_class is {FIVE_ONLY_CLASS}, a name that a server with transformers before 5 does not know"
        advice = f"{OLDER_CLASS} is the same class, known to both, and can be put in its place"
        yield warning("tokenizer-class", "tokenizer_config.json", f"{text}; {advice}")
    if has_chat_template(files):
        return
    markers = [marker for marker in CHAT_MARKERS if marker in set(_special_tokens(files))]
    if markers:
        text = f"the tokenizer is a chat model's (it has {listed(markers)}) and there is no chat template"
        yield warning("chat-template", "chat_template.jinja", f"{text}; copy it from the original model")


def has_chat_template(files: Files) -> bool:
    return (
        any(name in files.names for name in ("chat_template.jinja", "chat_template.json"))
        or bool(files.objects.get("tokenizer_config.json", {}).get("chat_template"))
        or (files.path / "additional_chat_templates").is_dir()
    )


def _special_tokens(files: Files) -> Iterator[str]:
    """Contents of special and added tokens, wherever tokenizers keep them."""
    settings = files.objects.get("tokenizer_config.json", {})
    added = settings.get("added_tokens_decoder")
    more = files.objects.get("tokenizer.json", {}).get("added_tokens")
    values = [*settings.values(), *(added.values() if isinstance(added, dict) else ())]
    for value in [*values, *(more if isinstance(more, list) else ())]:
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            yield content
