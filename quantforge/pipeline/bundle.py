"""Kernels beside the weights: which ones a checkpoint needs (`kernels.bundle` compiles and writes them)."""

import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from quantforge.formats import Format
from quantforge.kernels.aot import TARGETS
from quantforge.kernels.bundle import FOLDER, Matrix, write_bundle
from quantforge.kernels.matrix import Dtype
from quantforge.model.source import config_dtype
from quantforge.pipeline.contents import Contents
from quantforge.pipeline.files import sync_file


def bundle_problems(targets: Sequence[str], formats: Iterable[Format]) -> Iterator[str]:
    """What forbids ``--bundle-kernels``."""
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        yield f"--bundle-kernels: no kernels for {', '.join(unknown)}; there are {', '.join(TARGETS)}"
    if targets and importlib.util.find_spec("triton") is None:
        yield "--bundle-kernels compiles with triton, which is not installed: pip install 'quantforge-llm[kernels]'"
    if targets:
        own = [chosen.name for chosen in formats if chosen.container is not None]
        yield from (f"--bundle-kernels: {name} files are read by kernels of their own" for name in own)


def bundle_kernels(directory: Path, contents: Contents, targets: Sequence[str]) -> None:
    """Compile the kernels of a checkpoint's own shapes into `directory`; QuantforgeError when the compiler fails."""
    dtype: Dtype = "bf16" if config_dtype(contents.config) == "bfloat16" else "fp16"
    matrices = Counter(
        Matrix(
            shape.out_features,
            shape.in_features,
            spec.bits,
            -1 if spec.group_size is None else spec.group_size,
            spec.symmetric,
            bias=f"{name}.bias" in contents.source.tensors,
            integers=contents.activations is not None,
        )
        for name, shape in contents.shapes.items()
        for spec in [contents.specs[name]]
    )
    write_bundle(directory / FOLDER, matrices, targets, dtype)
    for file in sorted((directory / FOLDER).rglob("*")):
        if file.is_file():
            sync_file(file)
