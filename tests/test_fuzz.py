"""Hundreds of damaged checkpoints: reading them never crashes, hangs, leaves the directory or takes all memory, and an
export of ours whose weights changed never passes."""

import json
import os
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quantforge.model.streamed
import quantforge.pipeline.examine.model
from quantforge.errors import QuantforgeError
from quantforge.model.packed import open_any
from quantforge.model.skeleton import build_skeleton
from quantforge.pipeline.convert import convert_checkpoint
from quantforge.pipeline.describe import describe_checkpoint
from quantforge.pipeline.examine import examine
from quantforge.pipeline.manifest import REPORT_FILE
from quantforge.pipeline.plan import make_plan
from quantforge.pipeline.run import quantize
from quantforge.recipe import Recipe

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

GGUF = "small.gguf"
NUMBERS = (0, 1, 2, 3, 7, 8, 9, 31, 33, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 32, 2**64 - 1)
NAMES = (
    b"blk.0.attn_q.weight", b"blk.0.attn_k.weight", b"blk.7.attn_q.weight", b"blk.0.ffn_up.bias", b"output.weight",
    b"rope_freqs.weight", b"token_embd.weight", b"blk.-1.attn_v.weight", b"", b"\xff\xfe", b"x" * 64, b"a\0b", b"..",
    b"general.alignment", b"general.architecture", b"llama.attention.head_count",
)  # fmt: skip


def flip_gguf(files: Contents, draw: Draw) -> None:
    """Bytes changed anywhere in the file, its header as often as the weights."""
    data = bytearray(gguf_bytes(files))
    for _ in range(draw(st.integers(1, 4))):
        end = draw(st.sampled_from((32, 512, 6000, len(data))))
        if data:
            data[draw(st.integers(0, min(end, len(data)) - 1))] ^= draw(st.integers(1, 255))
    files[GGUF] = bytes(data)


def recount(files: Contents, draw: Draw) -> None:
    """A count, a length, a size, a type or an offset of the header replaced, most often by one that is huge."""
    data = gguf_bytes(files)
    places = [4, 8, 16, *range(24, 200), *(place for _, _, numbers in spots(data) for place in numbers)]
    for _ in range(draw(st.integers(1, 3))):
        code, place = draw(st.sampled_from(("<I", "<Q"))), draw(st.sampled_from(places))
        raw = struct.pack(code, draw(st.sampled_from(NUMBERS)) & (2 ** (8 * struct.calcsize(code)) - 1))
        data = data[:place] + raw + data[place + len(raw) :]
    files[GGUF] = data


def rename(files: Contents, draw: Draw) -> None:
    """The name of a key or a tensor replaced by another one, of another length or of the same."""
    data = gguf_bytes(files)
    if found := spots(data):
        place, name, _ = draw(st.sampled_from(found))
        other = draw(st.sampled_from((*NAMES, *(one for _, one, _ in found))))
        if draw(st.booleans()):
            other = other[: len(name)].ljust(len(name), b"x")
        data = data[:place] + struct.pack("<Q", len(other)) + other + data[place + 8 + len(name) :]
    files[GGUF] = data


GGUF_EXAMPLES = {flip_gguf: 40, cut: 20, lose: 10, link: 10, recount: 80, rename: 40, rewrite_json: 30}
"""How often each is tried on a GGUF file: 230 in all, half of them damaged a second time."""


def gguf_bytes(files: Contents) -> bytes:
    data = files.get(GGUF)
    return data if isinstance(data, bytes) else b"GGUF"


def spots(data: bytes) -> list[tuple[int, bytes, list[int]]]:
    """(place, name, places of the numbers behind it) of the keys and tensors that are where the pristine ones were."""
    return [(place, name, numbers) for place, name, numbers in SPOTS if data[place + 8 :].startswith(name)]


SPOTS: list[tuple[int, bytes, list[int]]] = []


def locate(file: Path) -> Iterator[tuple[int, bytes, list[int]]]:
    """`spots` of a whole file, by the package gguf: type and first values of a key; dims, type, offset of a tensor."""
    reader = gguf.GGUFReader(file)
    described = [(field.offset, field.name) for field in reader.fields.values() if field.name[:5] != "GGUF."]
    described += [(tensor.field.offset, tensor.name) for tensor in reader.tensors]
    for place, name in described:
        behind = place + 8 + len(name)
        yield place, name.encode(), [place, *range(behind, behind + 36, 4)]


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


LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and links of Linux")


@LINUX
@pytest.mark.parametrize("name", ["gptq", "gptq-asym", "sharded", "packed", "w8a8"])
@pytest.mark.parametrize("damage", EXAMPLES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_or_read_as_it_was(
    name: str, damage: Damage, pristine: dict[str, tuple[Contents, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    original, weights = pristine[name]
    survive(original, weights, damage, EXAMPLES, tmp_path)


@pytest.fixture(scope="module")
def pristine_gguf(tiny_exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF export of a few kB with blocks of two types."""
    folder = tmp_path_factory.mktemp("gguf")
    source = shutil.copytree(tiny_exports["source"], folder / "source")
    vocabulary = {chr(97 + index): index for index in range(26)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    recipe = Recipe.model_validate(
        {
            "model": str(source), "output": str(folder / "small"), "method": "rtn", "group_size": 32,
            "formats": ("gguf",), "rules": ({"match": "re:(q|k|v)_proj", "bits": 8},),
        }
    )  # fmt: skip
    assert list(quantize(recipe, make_plan(recipe)))
    return folder / "small"


@LINUX
@pytest.mark.parametrize("damage", GGUF_EXAMPLES, ids=lambda damage: damage.__name__)
def test_a_damaged_gguf_file_is_refused_or_read_as_it_was(damage: Damage, pristine_gguf: Path, tmp_path: Path) -> None:
    original: Contents = {file.name: file.read_bytes() for file in sorted(pristine_gguf.iterdir())}
    source = open_any(pristine_gguf)
    weights = {key: source.read(key) for key in source.keys()}  # noqa: SIM118
    assert {tensor.kind for tensor in source.tensors.values()} == {"Q4_0", "Q8_0", "BF16", "F32"}
    SPOTS[:] = locate(pristine_gguf / GGUF)
    assert len(SPOTS) > 30 and spots(gguf_bytes(original)) == SPOTS
    survive(original, weights, damage, GGUF_EXAMPLES, tmp_path)


@LINUX
@pytest.mark.parametrize("damage", [flip_gguf, recount, rename], ids=lambda damage: damage.__name__)
def test_a_damaged_gguf_file_is_converted_as_it_is_or_refused(
    damage: Damage, pristine_gguf: Path, tmp_path: Path
) -> None:
    original: Contents = {file.name: file.read_bytes() for file in sorted(pristine_gguf.iterdir())}
    SPOTS[:] = locate(pristine_gguf / GGUF)
    outcomes = {"refused": 0, "converted": 0}

    @settings(max_examples=25, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        files = dict(original)
        damage(files, data.draw)
        for name in ("x", "out"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        (tmp_path / "x").mkdir()
        write(tmp_path / "x", files)
        signal.signal(signal.SIGALRM, too_slow)
        signal.alarm(SECONDS)
        try:
            done = attempt(lambda: convert_checkpoint(tmp_path / "x", "gptq", tmp_path / "out"))
        finally:
            signal.alarm(0)
        outcomes["refused" if done is None else "converted"] += 1
        assert (tmp_path / "out").exists() == (done is not None) and not (tmp_path / "out.partial").exists()
        if done is not None:
            before, after = open_any(tmp_path / "x"), open_any(tmp_path / "out")
            assert sorted(before.keys()) == sorted(after.keys())
            for key in before.keys():  # noqa: SIM118
                one, other = before.read(key).float(), after.read(key).float()
                assert torch.allclose(one, other, rtol=0, atol=0, equal_nan=True), key

    check()
    assert outcomes["refused"] > 0 and sum(outcomes.values()) >= 25
    assert outcomes["converted"] > 0 or damage is not flip_gguf


def survive(
    original: Contents, weights: dict[str, torch.Tensor], damage: Damage, examples: dict[Damage, int], tmp_path: Path
) -> None:
    """Every damaged copy is refused, or is found wrong, or holds the same weights; nothing else comes of it."""
    weight_file = next(name for name in sorted(original) if name.endswith((".safetensors", ".gguf")))
    (tmp_path / SECRET).write_bytes(bytes(original[weight_file]))
    counted = 0

    @settings(max_examples=examples[damage], suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        nonlocal counted
        counted += 1
        files = dict(original)
        damage(files, data.draw)
        if data.draw(st.booleans()):
            data.draw(st.sampled_from(list(examples)))(files, data.draw)
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
        secret = os.path.realpath(tmp_path / SECRET)
        assert not [path for path in WATCH.opened if os.path.realpath(path) == secret]
        if found.ok and files.get(REPORT_FILE) == original[REPORT_FILE]:
            assert source is not None
            assert set(source.keys()) == weights.keys()
            assert all(torch.equal(source.read(key), tensor) for key, tensor in weights.items())

    check()
    assert counted >= examples[damage]
