"""Finished layers on disk, so that a run that dies can be carried on by giving the same command again.

Layout of the directory: ``fingerprint.json``, ``lock``, ``layer-00012.safetensors`` (codes, scales, zeros, and under
``float:<key>`` tensors that a transform changed, under ``cache:<module>`` scales of a cache; the grid of each site is
in the metadata), ``layer-00012.json`` (its report; its presence means that the layer is done),
``hidden-00013.safetensors`` (the input of the next layer),
``allocation.json`` (the bits chosen for a budget), ``token-weights.safetensors``, ``sampled-tokens.safetensors`` (and
in its metadata what they were sampled for), ``tuning.safetensors`` (unfinished) and ``tuned.safetensors`` (scales, and
under ``float:<key>`` gains). Each file is written under a temporary name, flushed to the disk and renamed; the report
comes last.
"""

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from quantforge.errors import QuantforgeError, WorkspaceError
from quantforge.numerics.bits import pack_codes, unpack_codes
from quantforge.pipeline.files import write_atomically
from quantforge.quantized import CacheScales, QuantizedWeight
from quantforge.report import Allocation, LayerReport, TuneReport
from quantforge.spec import QuantSpec

FINGERPRINT_FILE = "fingerprint.json"
ALLOCATION_FILE = "allocation.json"
WEIGHTS_FILE = "token-weights.safetensors"
TUNING_FILE = "tuning.safetensors"
TUNED_FILE = "tuned.safetensors"
TOKENS_FILE = "sampled-tokens.safetensors"
SCRATCH = "scratch"
FIRST_FILES = {"lock", FINGERPRINT_FILE, f"{FINGERPRINT_FILE}.tmp"}
"""All that a run has written when it is killed before its first layer."""

FLOAT, CACHE = "float:", "cache:"


@dataclass(frozen=True, eq=False)
class TuningState:
    """Tuning, under way.

    Attributes:
        step: steps done.
        kl_before: of the held-out sequences, before the first step.
        tensors: factors and moments, by site and part.
    """

    step: int
    kl_before: float
    tensors: Mapping[str, torch.Tensor]


class Workspace:
    """The work directory of one run; hold it open with `with Workspace.open(...)`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    @contextmanager
    def open(path: Path, fingerprint: Mapping[str, Any]) -> Iterator["Workspace"]:
        """Create the directory or continue in it; WorkspaceError when another process or another run owns it.

        A directory that no run has made is left alone: what is in it would be lost when the run has finished.
        """
        path.mkdir(parents=True, exist_ok=True)
        if not owned(path) and (strangers := sorted({entry.name for entry in path.iterdir()} - FIRST_FILES)):
            raise WorkspaceError(
                f"{path} is needed for unfinished work, but holds {len(strangers)} other files "
                f"({', '.join(strangers[:3])}) and no {FINGERPRINT_FILE}; move it away or choose another --output"
            )
        with open(path / "lock", "a", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise WorkspaceError(f"{path} is in use by another quantforge process") from error
            workspace = Workspace(path)
            workspace._check_fingerprint(json.loads(json.dumps(fingerprint)))
            for leftover in path.glob("*.tmp"):
                leftover.unlink()
            try:
                yield workspace
            except OSError:  # half-written output is of no use, and its space may be what is missing
                shutil.rmtree(path / "output", ignore_errors=True)
                raise

    def _check_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        file = self.path / FINGERPRINT_FILE
        if not file.exists():
            write_atomically(file, json.dumps(fingerprint, indent=1, sort_keys=True).encode())
            return
        was, now = _flat(self._read_json(file)), _flat(fingerprint)
        differing = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
        if differing:
            lines = [f"  {key}: was {was.get(key)!r}, now {now.get(key)!r}" for key in differing]
            raise WorkspaceError(
                f"{self.path} holds the unfinished layers of a different run. Give the earlier settings to carry it "
                "on, delete the directory to start again, or choose another --output.\n" + "\n".join(lines)
            )

    # -------------------------------------------------------------------------------------------- layers

    def done(self) -> int:
        """How many layers, from the first, are committed."""
        count = 0
        while (self.path / f"layer-{count:05d}.json").exists():
            count += 1
        return count

    def commit(
        self,
        layer: int,
        weights: Mapping[str, QuantizedWeight],
        report: LayerReport,
        hidden: torch.Tensor | None,
        floats: Mapping[str, torch.Tensor] = MappingProxyType({}),
        cache: Mapping[str, CacheScales] = MappingProxyType({}),
    ) -> None:
        """Make one layer durable: tensors, then the next layer's input, then the report.

        `floats` are tensors that are not quantized but differ from the source's, by checkpoint key; `cache` are scales
        of what attention modules cache, by their names in the checkpoint.
        """
        tensors = {f"{FLOAT}{key}": tensor.contiguous() for key, tensor in floats.items()}
        for module, scales in cache.items():
            tensors |= {f"{CACHE}{module}.k": scales.k.contiguous(), f"{CACHE}{module}.v": scales.v.contiguous()}
        for name, weight in weights.items():
            tensors[f"{name}.codes"] = pack_codes(weight.codes.cpu(), weight.spec.bits, 1)
            tensors[f"{name}.scale"] = weight.scale.cpu().contiguous()
            if not weight.spec.symmetric:
                tensors[f"{name}.zero"] = weight.zero.cpu().contiguous()
        specs = {name: json.dumps(asdict(weight.spec), sort_keys=True) for name, weight in weights.items()}
        write_atomically(self._layer_file(layer), save(tensors, specs or None))  # {} gives a broken header
        if hidden is not None:
            write_atomically(self._hidden_file(layer + 1), *_as_file(hidden))
        write_atomically(self.path / f"layer-{layer:05d}.json", json.dumps(report.to_json()).encode())
        self._hidden_file(layer).unlink(missing_ok=True)

    def allocation(self) -> Allocation | None:
        """The bits that were chosen, if they were."""
        file = self.path / ALLOCATION_FILE
        if not file.exists():
            return None
        try:
            return Allocation.from_json(self._read_json(file))
        except (KeyError, TypeError) as error:
            raise self._damaged(file, error) from error

    def keep_allocation(self, allocation: Allocation) -> None:
        """Make a choice of bits durable."""
        write_atomically(self.path / ALLOCATION_FILE, json.dumps(allocation.to_json()).encode())

    def token_weights(self) -> dict[str, torch.Tensor] | None:
        """The weights of calibration tokens, by module path, if they are known."""
        file = self.path / WEIGHTS_FILE
        if not file.exists():
            return None
        with self._tensors(file) as tensors:
            return {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118

    def keep_token_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Make the weights of calibration tokens durable."""
        write_atomically(self.path / WEIGHTS_FILE, save(dict(weights)))

    def tuning(self) -> TuningState | None:
        """How far the tuning was, if it was begun."""
        file = self.path / TUNING_FILE
        if not file.exists():
            return None
        with self._tensors(file) as tensors:
            known = tensors.metadata() or {}
            kept = {name: tensors.get_tensor(name).clone() for name in tensors.keys()}  # noqa: SIM118
            return TuningState(int(known["step"]), float.fromhex(known["kl_before"]), kept)

    def keep_tuning(self, state: TuningState) -> None:
        """Make the state of the tuning durable."""
        known = {"step": str(state.step), "kl_before": state.kl_before.hex()}
        write_atomically(self.path / TUNING_FILE, save(dict(state.tensors), known))

    def tuned(self) -> TuneReport | None:
        """What came of the tuning, if it is finished."""
        file = self.path / TUNED_FILE
        if not file.exists():
            return None
        with self._tensors(file) as tensors:
            return TuneReport(**json.loads((tensors.metadata() or {})["report"]))

    def keep_tuned(
        self, report: TuneReport, scales: Mapping[str, torch.Tensor], floats: Mapping[str, torch.Tensor]
    ) -> None:
        """Finish the tuning: from now on `weight` has these scales, by site, and `floats` these tensors, by key."""
        tensors = dict(scales) | {f"{FLOAT}{key}": tensor for key, tensor in floats.items()}
        write_atomically(self.path / TUNED_FILE, save(tensors, {"report": json.dumps(asdict(report))}))
        (self.path / TUNING_FILE).unlink(missing_ok=True)

    def _tuned_scale(self, name: str) -> torch.Tensor | None:
        file = self.path / TUNED_FILE
        if not file.exists():
            return None
        with self._tensors(file) as tensors:
            return tensors.get_tensor(name).clone() if name in tensors.keys() else None  # noqa: SIM118

    def keep_sampled_tokens(self, tokens: torch.Tensor, request: str) -> None:
        """Make sampled calibration tokens durable; `sampled_tokens` finds them for the same request."""
        if sampled_tokens(self.path, request) is None:
            write_atomically(self.path / TOKENS_FILE, save({"tokens": tokens.contiguous()}, {"request": request}))

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """An empty directory for files of no lasting use, removed afterwards."""
        path = self.path / SCRATCH
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def reports(self) -> list[LayerReport]:
        """The reports of the committed layers."""
        reports = []
        for file in [self.path / f"layer-{layer:05d}.json" for layer in range(self.done())]:
            try:
                reports.append(LayerReport.from_json(self._read_json(file)))
            except (KeyError, TypeError) as error:
                raise self._damaged(file, error) from error
        return reports

    def weight(self, layer: int, name: str, in_features: int) -> QuantizedWeight:
        """One committed site."""
        tuned = self._tuned_scale(name)
        with self._tensors(self._layer_file(layer)) as tensors:
            spec = QuantSpec(**json.loads((tensors.metadata() or {})[name]))
            codes = unpack_codes(tensors.get_tensor(f"{name}.codes"), spec.bits, 1, in_features)
            scale = tensors.get_tensor(f"{name}.scale").clone() if tuned is None else tuned
            zero = (
                torch.full(scale.shape, spec.symmetric_zero, dtype=torch.uint8)
                if spec.symmetric
                else tensors.get_tensor(f"{name}.zero").clone()
            )
            return QuantizedWeight(spec, codes, scale, zero)

    def floats(self) -> dict[str, Path]:
        """Checkpoint keys whose tensors are not quantized but were changed, each with the file that has it now."""
        files = [self._layer_file(layer) for layer in range(self.done())] + [self.path / TUNED_FILE]
        found: dict[str, Path] = {}
        for file in files[:-1] if self.tuned() is None else files:
            with self._tensors(file) as tensors:
                names = tensors.keys()
            found |= {name.removeprefix(FLOAT): file for name in names if name.startswith(FLOAT)}
        return found

    def float_tensor(self, file: Path, key: str) -> torch.Tensor:
        """One of the tensors of `floats`, in its stored dtype."""
        with self._tensors(file) as tensors:
            tensor: torch.Tensor = tensors.get_tensor(f"{FLOAT}{key}").clone()
            return tensor

    def cache_scales(self) -> dict[str, CacheScales]:
        """Scales of what the committed layers cache, by attention module."""
        found: dict[str, CacheScales] = {}
        for layer in range(self.done()):
            with self._tensors(self._layer_file(layer)) as tensors:
                for key in [key for key in tensors.keys() if key.startswith(CACHE) and key.endswith(".k")]:  # noqa: SIM118
                    k, v = (tensors.get_tensor(f"{key[:-1]}{part}").clone() for part in "kv")
                    found[key.removeprefix(CACHE)[:-2]] = CacheScales(k, v)
        return found

    def hidden(self, layer: int) -> torch.Tensor:
        """The committed input of a layer, in freshly allocated (aligned) memory so that results do not change."""
        with self._tensors(self._hidden_file(layer)) as tensors:
            hidden: torch.Tensor = tensors.get_tensor("hidden").clone()
            return hidden

    @contextmanager
    def _tensors(self, file: Path) -> Iterator[Any]:
        """A file of tensors, open; whatever is wrong with it, or with what it should hold, is a WorkspaceError."""
        try:
            with safe_open(file, "pt") as tensors:
                yield tensors
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, QuantforgeError) as error:
            raise self._damaged(file, error) from error

    def _read_json(self, file: Path) -> dict[str, Any]:
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._damaged(file, error) from error
        if not isinstance(content, dict):
            raise self._damaged(file, TypeError(f"a {type(content).__name__}, not an object"))
        return content

    def _damaged(self, file: Path, error: Exception) -> WorkspaceError:
        return WorkspaceError(f"{file} is missing or damaged ({error}); delete {self.path} to start again")

    def _layer_file(self, layer: int) -> Path:
        return self.path / f"layer-{layer:05d}.safetensors"

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
        discard(self.path)


def work_directory(output: Path) -> Path:
    """Where the unfinished work on an output is kept: beside it."""
    return output.parent / f"{output.name}.partial"


def sampled_tokens(path: Path, request: str) -> torch.Tensor | None:
    """The tokens [samples, length] that a run kept in its work directory for this request, if there are any.

    A damaged file is as good as none: what it held can be sampled again.
    """
    try:
        with safe_open(path / TOKENS_FILE, "pt") as tensors:
            if (tensors.metadata() or {}).get("request") != request:
                return None
            tokens: torch.Tensor = tensors.get_tensor("tokens").clone()
            return tokens
    except (SafetensorError, OSError):
        return None


def discard(path: Path) -> None:
    """Remove a work directory, its fingerprint last: killed halfway, it is still known for what it is."""
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != FINGERPRINT_FILE:
            entry.unlink()
    shutil.rmtree(path)


def owned(path: Path) -> bool:
    """True when a directory is the workspace of some run."""
    return (path / FINGERPRINT_FILE).is_file()


def _flat(fingerprint: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields under dotted names, so that a difference is told by its field."""
    flat: dict[str, Any] = {}
    for key, value in fingerprint.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


# ------------------------------------------------------------------------------------------------ writing


def _as_file(hidden: torch.Tensor) -> tuple[bytes, memoryview]:
    """A safetensors file of one float32 tensor, ``hidden``, without another copy of it in memory."""
    data = hidden.contiguous().reshape(-1).view(torch.uint8).numpy().data
    entry = {"dtype": "F32", "shape": list(hidden.shape), "data_offsets": [0, data.nbytes]}
    header = json.dumps({"hidden": entry}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header, data
