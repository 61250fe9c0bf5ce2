"""Hundreds of damaged checkpoints: reading them never crashes, hangs, leaves the directory or takes all memory, and an
export of ours whose weights changed never passes."""

import json
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quantforge.model.streamed
import quantforge.pipeline.examine.model
from quantforge.errors import QuantforgeError
from quantforge.model.packed import open_any
from quantforge.model.skeleton import build_skeleton
from quantforge.pipeline.describe import describe_checkpoint
from quantforge.pipeline.examine import examine
from quantforge.pipeline.manifest import REPORT_FILE

SECONDS = 60  # a machine that does other things must not decide
SPARE_BYTES = 4 << 30  # what reading some kB may take besides what is there, address space included
SECRET = "secret.safetensors"
OUTSIDE = ("../" + SECRET, "..", "", ".", "/etc/passwd", "a/../../" + SECRET, "\0", "x" * 300, "sub/file")
HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 8, 16, 63, 2**31, 2**63, 10**30, 0.5, 4.0, 1e308, float("nan"), "", "x", "re:(",
    "re:a{99999999999}", [], {}, [1, 2], ["re:.*"], {"a": 1}, {"+:.*": {"bits": 8}}, {"-:.*": {}}, [[]], "gptq", "awq",
    "compressed-tensors", "gptq_v2", "F64", "I8", "BF16", "Linear", *OUTSIDE,
)  # fmt: skip

Draw = Callable[[st.SearchStrategy[Any]], Any]
Contents = dict[str, bytes | Path | None]  # of a file; a target of a link; None for a directory
Damage = Callable[[Contents, Draw], None]


# ------------------------------------------------------------------------------------------------ ways to damage


def flip(files: Contents, draw: Draw) -> None:
    """Bytes changed anywhere, the beginning of files (lengths and headers) as often as the rest."""
    name, data = some_file(files, draw, draw(st.sampled_from((".safetensors", ".safetensors", ""))))
    for _ in range(draw(st.integers(1, 4))):
        end = draw(st.sampled_from((8, 64, 2048, len(data))))
        if data:
            place = draw(st.integers(0, min(end, len(data)) - 1))
            data = data[:place] + bytes([data[place] ^ draw(st.integers(1, 255))]) + data[place + 1 :]
    files[name] = data


def cut(files: Contents, draw: Draw) -> None:
    """A file cut short, emptied, or with bytes behind it."""
    name, data = some_file(files, draw)
    files[name] = data[: draw(st.integers(0, len(data)))] + draw(st.sampled_from((b"", b"", b"\0" * 8, b"{}")))


def lose(files: Contents, draw: Draw) -> None:
    """A file that is gone, that is a directory, or that is there under another name too."""
    name, data = some_file(files, draw)
    how = draw(st.sampled_from(("lost", "directory", "copied", "swapped")))
    other = draw(st.sampled_from((*files, "model.safetensors", "model-00003-of-00003.safetensors", "x.safetensors")))
    if how in ("lost", "directory"):
        del files[name]
        if how == "directory":
            files[name] = None
    elif how == "copied":
        files[other] = data
    elif isinstance(files.get(other), bytes):
        files[name], files[other] = files[other], data


def link(files: Contents, draw: Draw) -> None:
    """A link in place of a file: out of the directory, to itself, to nothing, to another file."""
    name, _ = some_file(files, draw)
    targets = ("../" + SECRET, name, "nowhere", "config.json", "/dev/zero", ".", "..")
    files[name] = Path(draw(st.sampled_from(targets)))


def lengthen(files: Contents, draw: Draw) -> None:
    """A header that says it is petabytes long, or any other length."""
    name, data = some_file(files, draw, ".safetensors")
    length = draw(st.sampled_from((0, 1, 2, 8, len(data), len(data) - 8, 10**8, 2**40, 2**63, 2**64 - 1)))
    files[name] = struct.pack("<Q", length) + data[8:]


def rewrite_header(files: Contents, draw: Draw) -> None:
    """Keys renamed, dropped or given twice; shapes, dtypes and offsets changed; data where it was."""
    name, data = some_file(files, draw, ".safetensors")
    length = struct.unpack("<Q", data[:8])[0] if len(data) > 8 else 0
    try:
        header = json.loads(data[8 : 8 + length])
        key = draw(st.sampled_from(sorted(header)))
        other = draw(st.sampled_from(sorted(header)))
        how = draw(st.sampled_from(("rename", "drop", "swap", "dtype", "shape", "offsets", "value", "offsets swapped")))
        if how == "rename":
            header[draw(st.sampled_from((other, key + "x", "", "a." + key, "é\n", "..", key.replace("0", "7"))))] = (
                header.pop(key)
            )
        elif how == "drop":
            del header[key]
        elif how == "swap":
            header[key], header[other] = header[other], header[key]
        elif how == "offsets swapped":
            one, two = header[key], header[other]
            one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
        elif how == "dtype":
            header[key]["dtype"] = draw(
                st.sampled_from(("F16", "BF16", "I16", "I32", "U32", "F8_E4M3", "BOOL", "?", None))
            )
        elif how == "shape":
            sizes = st.sampled_from((0, 1, 2, 8, 32, 64, -1, 2**31, 2**62, 10**40))
            header[key]["shape"] = draw(st.one_of(st.lists(sizes, max_size=4), st.just(header[key]["shape"][::-1])))
        elif how == "offsets":
            header[key]["data_offsets"] = draw(
                st.lists(st.sampled_from((0, 8, 64, 10**15, -8, 2**63, 10**400)), max_size=3)
            )
        else:
            header[key] = draw(st.sampled_from(HOSTILE))
        raw = json.dumps(header, ensure_ascii=False).encode()
    except (ValueError, LookupError, TypeError, AttributeError):
        return  # damaged already
    files[name] = struct.pack("<Q", len(raw)) + raw + data[8 + length :]


def rewrite_json(files: Contents, draw: Draw) -> None:
    """One value of a config, an index or a report replaced, dropped or moved."""
    name, data = some_file(files, draw, ".json")
    try:
        content = json.loads(data)
    except ValueError:
        return
    parent, key = content, None
    for _ in range(draw(st.integers(1, 5))):
        options = sorted(parent, key=str) if isinstance(parent, dict) else range(len(parent))
        if not options:
            break
        key = draw(st.sampled_from(options))
        if not isinstance(parent[key], dict | list) or not parent[key]:
            break
        parent, key = (parent[key], None) if draw(st.booleans()) else (parent, key)
        if key is not None:
            break
    if key is None or not isinstance(parent, dict | list):
        return
    how = draw(st.sampled_from(("replace", "replace", "drop", "huge", "add")))
    if how == "drop":
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        parent[
            draw(st.sampled_from(("quantization_config", "text_config", "dynamic", "ignore", "x", "layer_types")))
        ] = draw(st.sampled_from(HOSTILE))
    else:
        old = parent[key]
        huge = old * 10**9 if type(old) is int else old
        parent[key] = huge if how == "huge" else draw(st.sampled_from(HOSTILE))
    files[name] = json.dumps(content).encode()


EXAMPLES = {flip: 20, cut: 10, lose: 12, link: 10, lengthen: 8, rewrite_header: 35, rewrite_json: 35}
"""How often each is tried on each of the five exports: 650 checkpoints in all, half of them damaged a second time."""


def some_file(files: Contents, draw: Draw, suffix: str = "") -> tuple[str, bytes]:
    """A file and its bytes; an empty one of a new name when there is none left of the suffix."""
    found = {name: data for name, data in files.items() if isinstance(data, bytes) and name.endswith(suffix)}
    return draw(st.sampled_from(sorted(found.items()))) if found else ("new" + suffix, b"")


# ------------------------------------------------------------------------------------------------ what must hold


class Watch:
    """Files opened while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.opened: list[str] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event == "open" and isinstance(arguments[0], str):
            self.opened.append(arguments[0])


WATCH = Watch()


@pytest.fixture(scope="module")
def patches() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(autouse=True, scope="module")
def _skeletons_once(patches: pytest.MonkeyPatch) -> None:
    """The model of one config is built once: it has no weights, and most damages leave the config alone."""
    built: dict[bytes, torch.nn.Module] = {}

    def build(path: Path, **options: Any) -> torch.nn.Module:
        config = (path / "config.json").read_bytes() + str(options).encode()
        if config not in built:
            built[config] = build_skeleton(path, **options)
        return built[config]

    patches.setattr(quantforge.pipeline.examine.model, "build_skeleton", build)
    patches.setattr(quantforge.model.streamed, "build_skeleton", build)


@pytest.fixture(autouse=True)
def _bounded_memory_and_time() -> Iterator[None]:
    """A wild allocation fails, and a hang ends."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def too_slow(number: int, frame: object) -> None:
    raise AssertionError(f"reading took more than {SECONDS} seconds")


@pytest.fixture(scope="module")
def pristine(tiny_exports: dict[str, Path]) -> dict[str, tuple[Contents, dict[str, torch.Tensor]]]:
    """Of each export: its files, and its weights as they are used."""
    found = {}
    for name in ("gptq", "gptq-asym", "sharded", "packed", "w8a8"):
        files: Contents = {file.name: file.read_bytes() for file in sorted(tiny_exports[name].iterdir())}
        source = open_any(tiny_exports[name])
        found[name] = (files, {key: source.read(key) for key in source.keys()})  # noqa: SIM118
    return found


def write(path: Path, files: Contents) -> None:
    for name, content in files.items():
        if content is None:
            (path / name).mkdir()
        elif isinstance(content, Path):
            (path / name).symlink_to(content)
        else:
            (path / name).write_bytes(content)


def attempt(action: Callable[[], Any]) -> Any:
    """What it gives, or None when it is refused; anything but a QuantforgeError comes through."""
    try:
        return action()
    except QuantforgeError:
        return None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and links of Linux")
@pytest.mark.parametrize("name", ["gptq", "gptq-asym", "sharded", "packed", "w8a8"])
@pytest.mark.parametrize("damage", EXAMPLES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_or_read_as_it_was(
    name: str, damage: Damage, pristine: dict[str, tuple[Contents, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    original, weights = pristine[name]
    (tmp_path / SECRET).write_bytes(
        bytes(original.get("model.safetensors") or original["model-00001-of-00002.safetensors"])
    )
    counted = 0

    @settings(max_examples=EXAMPLES[damage], suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal counted
        counted += 1
        files = dict(original)
        damage(files, data.draw)
        if data.draw(st.booleans()):
            data.draw(st.sampled_from(list(EXAMPLES)))(files, data.draw)
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        (tmp_path / "x").mkdir()
        write(tmp_path / "x", files)
        signal.signal(signal.SIGALRM, too_slow)
        signal.alarm(SECONDS)
        WATCH.opened.clear()
        WATCH.on = True
        try:
            source = attempt(lambda: open_any(tmp_path / "x"))
            attempt(lambda: describe_checkpoint(str(tmp_path / "x")))
            found = examine(tmp_path / "x")
        finally:
            WATCH.on = False
            signal.alarm(0)
        assert not [path for path in WATCH.opened if Path(path).resolve() == (tmp_path / SECRET).resolve()]
        if found.ok and files.get(REPORT_FILE) == original[REPORT_FILE]:
            assert source is not None
            assert set(source.keys()) == weights.keys()
            assert all(torch.equal(source.read(key), tensor) for key, tensor in weights.items())

    check()
    assert counted >= EXAMPLES[damage]
