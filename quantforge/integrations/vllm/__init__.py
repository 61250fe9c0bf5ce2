"""vLLM's plug-in: its servers run checkpoints on the kernels here where they have none of their own.

vLLM calls `register`, an entry point of the group ``vllm.general_plugins``, once in each of its processes. It adds a
kernel to those that vLLM chooses from for weights of a few bits (`kernel.py`), and a reading of gptq for the grids that
vLLM's own refuses on a CPU (`gptq.py`). Nothing of vLLM is replaced; see ``docs/runtime.md`` for what becomes of which
checkpoint. Importing this imports neither vLLM nor torch.
"""

import logging
import os
from typing import Any

SWITCH = "QUANTFORGE_VLLM"
"""Environment variable, read when vLLM loads its plug-ins and when it chooses a kernel."""

MISSING, PREFER, OFF = "missing", "prefer", "off"
MODES = {
    MISSING: "where vLLM on a CPU has no kernel (the default)",
    PREFER: "before vLLM's own kernels; on a GPU as well",
    OFF: "never",
}
UNVERIFIED = "UNVERIFIED: nobody has yet run it in vLLM on a GPU, compare its answers before use"


def mode() -> str:
    """What `SWITCH` asks for, `MISSING` where it is not set; ValueError for anything but `MODES`."""
    asked = os.environ.get(SWITCH) or MISSING
    if asked not in MODES:
        raise ValueError(f"{SWITCH}={asked!r} is none of {', '.join(MODES)}")
    return asked


def register() -> None:
    """Add what this package has for vLLM; may be called again, and in every process.

    Says what it added, or why nothing, in one line of vLLM's log. It never fails: a vLLM that is not built as expected
    is left as it is, with a warning.
    """
    logger = logging.getLogger("vllm.quantforge")  # it has vLLM's handlers, and needs no import of vLLM
    level, said = logging.INFO, []
    for add in (_add_kernel, _add_gptq):
        try:
            said.append(add())
        except Exception as error:  # what another vLLM may raise is not known, and its server must go on
            level = logging.WARNING
            said.append(f"{add.__name__[5:]} not added, vLLM does without: {type(error).__name__}: {error}")
    if any(UNVERIFIED in each for each in said):
        level = logging.WARNING
    logger.log(level, "quantforge: %s", "; ".join(dict.fromkeys(filter(None, said))))


def _add_kernel() -> str:
    """Add the kernel where platform and switch call for it; what was done, in words."""
    if (asked := mode()) == OFF:
        return f"nothing added: {SWITCH}={OFF}"
    from vllm.platforms import PlatformEnum, current_platform

    platform: Any = current_platform._enum
    if platform not in (PlatformEnum.CPU, PlatformEnum.CUDA, PlatformEnum.ROCM):
        return f"nothing added: it has kernels for CPUs and for NVIDIA and AMD GPUs, not for {platform.name}"
    on_cpu = platform == PlatformEnum.CPU
    if not on_cpu and asked != PREFER:
        return f"nothing added: on a GPU only {SWITCH}={PREFER} adds its kernel, which nobody has yet run in vLLM there"
    from quantforge.integrations.vllm import kernel

    place = kernel.add(platform, first=asked == PREFER)
    return f"kernel added {place}{'' if on_cpu else f'; {UNVERIFIED}'}"


def _add_gptq() -> str:
    """Add the reading of gptq on a CPU, unless switched off; empty where it is not for the platform."""
    if mode() == OFF:
        return ""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return ""
    from quantforge.integrations.vllm import gptq

    gptq.add()
    return f"gptq of 8 bits, or asymmetric, is read as {gptq.NAME}"
