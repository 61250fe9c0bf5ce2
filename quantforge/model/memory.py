"""How much memory a device has."""

import os

import torch


def memory_bytes(device: torch.device) -> int:
    """All memory of the device, free or not, so that the answer does not change between two runs."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
