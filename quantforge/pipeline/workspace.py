"""Finished layers on disk, so that a run that dies can be carried on by giving the same command again.

Layout of the directory: ``fingerprint.json``, ``lock``, ``layer-00012.safetensors`` (codes, scales, zeros),
``layer-00012.json`` (its report; its presence means that the layer is done), ``hidden-00013.safetensors`` (the input of
the next layer). Each file is written under a temporary name, flushed to the disk and renamed; the report comes last.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quantforge.errors import WorkspaceError
from quantforge.numerics.bits import pack_codes, unpack_codes
from quantforge.quantized import QuantizedWeight
from quantforge.report import LayerReport
from quantforge.spec import QuantSpec


class Workspace:
    """The work directory of one run; hold it open with `with Workspace.open(...)`."""

    def __init__(self, path: Path, spec: QuantSpec) -> None:
        self.path = path
        self.spec = spec

    @staticmethod
    @contextmanager
    def open(path: Path, spec: QuantSpec, fingerprint: Mapping[str, Any]) -> Iterator["Workspace"]:
        """Create the directory or continue in it; WorkspaceError when another process or another run owns it."""
        path.mkdir(parents=True, exist_ok=True)
        with open(path / "lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise WorkspaceError(f"{path} is in use by another quantforge process") from error
            workspace = Workspace(path, spec)
            workspace._check_fingerprint(json.loads(json.dumps(fingerprint)))
            for leftover in path.glob("*.tmp"):
                leftover.unlink()
            yield workspace

    def _check_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        file = self.path / "fingerprint.json"
        if not file.exists():
            if any(self.path.glob("layer-*")):
                raise WorkspaceError(f"{self.path} holds layers but no fingerprint.json; delete it to start again")
            write_atomically(file, json.dumps(fingerprint, indent=1, sort_keys=True).encode())
            return
        known = json.loads(file.read_text(encoding="utf-8"))
        differing = [key for key in sorted(known.keys() | fingerprint.keys()) if known.get(key) != fingerprint.get(key)]
        if differing:
            lines = [f"  {key}: was {known.get(key)!r}, now {fingerprint.get(key)!r}" for key in differing]
            raise WorkspaceError(
                f"{self.path} holds the unfinished layers of a different run. Give the earlier settings to carry it on, "
                f"delete the directory to start again, or choose another --output.\n" + "\n".join(lines)
            )

    # -------------------------------------------------------------------------------------------- layers

    def done(self) -> int:
        """How many layers, from the first, are committed."""
        count = 0
        while (self.path / f"layer-{count:05d}.json").exists():
            count += 1
        return count

    def commit(
        self, layer: int, weights: Mapping[str, QuantizedWeight], report: LayerReport, hidden: torch.Tensor | None
    ) -> None:
        """Make one layer durable: tensors, then the next layer's input, then the report."""
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            tensors[f"{name}.codes"] = pack_codes(weight.codes.cpu(), self.spec.bits, 1)
            tensors[f"{name}.scale"] = weight.scale.cpu().contiguous()
            if not self.spec.symmetric:
                tensors[f"{name}.zero"] = weight.zero.cpu().contiguous()
        write_atomically(self.path / f"layer-{layer:05d}.safetensors", save(tensors))
        if hidden is not None:
            write_atomically(self._hidden_file(layer + 1), save({"hidden": hidden.contiguous()}))
        write_atomically(self.path / f"layer-{layer:05d}.json", json.dumps(report.to_json()).encode())
        self._hidden_file(layer).unlink(missing_ok=True)

    def reports(self) -> list[LayerReport]:
        """The reports of the committed layers."""
        return [
            LayerReport.from_json(json.loads((self.path / f"layer-{layer:05d}.json").read_text(encoding="utf-8")))
            for layer in range(self.done())
        ]

    def weight(self, layer: int, name: str, in_features: int) -> QuantizedWeight:
        """One committed site."""
        file = self.path / f"layer-{layer:05d}.safetensors"
        try:
            with safe_open(file, "pt") as tensors:
                codes = unpack_codes(tensors.get_tensor(f"{name}.codes"), self.spec.bits, 1, in_features)
                scale = tensors.get_tensor(f"{name}.scale").clone()
                zero = (
                    torch.full(scale.shape, self.spec.symmetric_zero, dtype=torch.uint8)
                    if self.spec.symmetric
                    else tensors.get_tensor(f"{name}.zero").clone()
                )
        except (SafetensorError, OSError) as error:
            raise WorkspaceError(f"{file} is damaged ({error}); delete {self.path} to start again") from error
        return QuantizedWeight(self.spec, codes, scale, zero)

    def hidden(self, layer: int) -> torch.Tensor:
        """The committed input of a layer, in freshly allocated (aligned) memory so that results do not change."""
        file = self._hidden_file(layer)
        try:
            with safe_open(file, "pt") as tensors:
                return tensors.get_tensor("hidden").clone()
        except (SafetensorError, OSError) as error:
            raise WorkspaceError(
                f"{file} is missing or damaged ({error}); delete {self.path} to start again"
            ) from error

    def _hidden_file(self, layer: int) -> Path:
        return self.path / f"hidden-{layer:05d}.safetensors"

    # -------------------------------------------------------------------------------------------- output

    def fresh_output(self) -> Path:
        """An empty directory to build the output in."""
        path = self.path / "output"
        if path.exists():
            shutil.rmtree(path)
        path.mkdir()
        return path

    def discard(self) -> None:
        """Remove the directory; the output has been published."""
        shutil.rmtree(self.path)


def write_atomically(file: Path, data: bytes) -> None:
    """Write under a temporary name, flush to the disk, rename. A full disk leaves no partial file behind."""
    temporary = file.with_name(file.name + ".tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise WorkspaceError(
                f"the disk is full: {file} needs {len(data)} bytes. Committed layers are kept; free some space and run "
                "the same command again."
            ) from error
        raise
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
