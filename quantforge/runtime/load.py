"""A checkpoint as a transformers model that runs on its packed weights."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantforge.errors import SourceError, UsageError
from quantforge.kernels.linear import Activations
from quantforge.model.gguf_file import gguf_files, is_gguf_file
from quantforge.model.packed import quantization_config
from quantforge.model.source import Checkpoint, open_checkpoint
from quantforge.readers import reader_names
from quantforge.runtime.packing import NAMED, packed_layers
from quantforge.runtime.quantizer import can_run, registered

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    activations: Activations = "float",
    trust_remote_code: bool = False,
    **settings: Any,
) -> Any:
    """Load a checkpoint directory (or hub id), quantized by any tool whose format is read here, or not quantized.

    The model is built without memory, then filled tensor by tensor: packed sites go from their stored form to that of
    the kernels, one at a time. It takes what its files take, plus padding.

    Args:
        dtype: what everything else is kept and computed in: auto (as config.json says), float32, bfloat16, float16.
        device: auto (a GPU if there is one), or a torch device.
        activations: ``int8-group`` rounds the inputs of 4-bit sites to 8 bits, for speed on the CPU; a checkpoint's
            own rounding of activations is done in any case.
        settings: handed to ``from_pretrained``, such as ``attn_implementation``.

    Returns:
        The transformers model in eval mode; ``save_pretrained`` writes the checkpoint's own format again.

    Raises:
        SourceError: no checkpoint, damaged, or quantized in a way that cannot be run.
        UsageError: an unknown dtype or device, or ``int8-group`` on a GPU or without a layer that it is for.
    """
    from transformers import AutoModelForCausalLM

    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
    try:
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r}: {error}") from error
    if activations == "int8-group" and place.type != "cpu":
        raise UsageError(f"int8-group (--int8-activations) runs on the CPU only, and device is {place}: device='cpu'")
    checkpoint = runnable(model)
    asked = quantization_config(checkpoint)
    if asked is not None and not can_run(asked):
        raise SourceError(
            f"{checkpoint.path}: quantized by {asked.get('quant_method')!r} in a way that cannot be run packed; "
            f"runnable are {', '.join(reader_names())} with integer weights"
        )
    if asked is not None and asked.get("kv_cache_scheme"):
        warnings.warn(
            f"{checkpoint.path}: scales of its cache are not used; keys and values are not rounded", stacklevel=2
        )
    try:
        with registered(activations), _quiet_transformers():
            found: Any = AutoModelForCausalLM.from_pretrained(
                str(checkpoint.path),
                dtype=DTYPES.get(dtype, "auto"),
                device_map={"": place},
                trust_remote_code=trust_remote_code,
                **settings,
            )
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise SourceError(
            f"{checkpoint.path}: the model needs code of its own; trust_remote_code=True (--trust-remote-code) runs it"
        ) from error
    if activations == "int8-group":
        _say_not_rounded(found, checkpoint.path)
    return found


def runnable(model: str | Path) -> Checkpoint:
    """Open a checkpoint that `load` takes; SourceError for none, and for GGUF, with what makes one of it."""
    path = Path(model)
    files = [path] if is_gguf_file(path) else gguf_files(path) if path.is_dir() else []
    if files and not any(path.glob("*.safetensors")):
        raise SourceError(
            f"{files[0]} is GGUF, which is not run here. Where its blocks are grids (Q4_0, Q8_0, Q4_1), they are the "
            f"same numbers in another format: quantforge convert {files[0]} --config DIR --format gptq, DIR being "
            "where config.json and the tokenizer are"
        )
    return open_checkpoint(model)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and only errors from transformers while this is open; as before afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _say_not_rounded(model: nn.Module, path: Path) -> None:
    """Which packed layers ``int8-group`` does nothing for; UsageError when it does nothing at all."""
    layers = dict(packed_layers(model))
    left = [name for name, layer in layers.items() if not layer.rounds_groups]
    if len(left) == len(layers):
        raise UsageError(
            f"{path}: int8-group (--int8-activations) rounds inputs of 4-bit layers, and none of {len(layers)} packed "
            "layers is one whose kernel does; leave it out"
        )
    if left:
        more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
        warnings.warn(
            f"{path}: int8-group rounds inputs of 4-bit layers; it does nothing for {len(left)} of {len(layers)} "
            f"packed layers: {', '.join(left[:NAMED])}{more}",
            stacklevel=3,
        )
