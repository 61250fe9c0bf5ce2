"""A checkpoint as a transformers model that runs on its packed weights."""

import warnings
from pathlib import Path
from typing import Any

import torch

from quantforge.errors import SourceError, UsageError
from quantforge.kernels.linear import Activations
from quantforge.model.packed import quantization_config
from quantforge.model.source import open_checkpoint
from quantforge.readers import reader_names
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
        UsageError: an unknown dtype or device, or ``int8-group`` on a GPU.
    """
    import transformers
    from transformers import AutoModelForCausalLM

    if dtype != "auto" and dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
    try:
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r}: {error}") from error
    if activations == "int8-group" and place.type != "cpu":
        raise UsageError(f"int8-group (--int8-activations) runs on the CPU only, and device is {place}: device='cpu'")
    checkpoint = open_checkpoint(model)
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
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with registered(activations):
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
    return found
