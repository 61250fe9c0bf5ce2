"""Checkpoint directories that are missing, damaged or hostile: each is a SourceError that says what and where."""

import io
import json
import os
import pickle
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantforge.errors import SourceError
from quantforge.model.pickles import PICKLE_INDEX_FILE, PICKLE_SINGLE_FILE
from quantforge.model.shards import DTYPES, INDEX_FILE, SINGLE_FILE
from quantforge.model.source import Checkpoint, open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.bfloat16)}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def directory(path: Path, config: Any = CONFIG) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of one file with the tensors `a` (24 bytes) and `b` (8 bytes)."""
    path = directory(tmp_path / "single")
    save_file(TENSORS, path / SINGLE_FILE)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """`a` in the first shard, `b` in the second."""
    path = directory(tmp_path / "sharded")
    save_file({"a": TENSORS["a"]}, path / ONE)
    save_file({"b": TENSORS["b"]}, path / TWO)
    index(path, {"a": ONE, "b": TWO})
    return path


def index(path: Path, weight_map: Any) -> None:
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A checkpoint whose only shard has this header (any JSON value, or bytes) and these data bytes."""
    directory(path)
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE_FILE).write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets) if isinstance(offsets, tuple) else offsets}


def refusal(path: Path | str, **options: Any) -> str:
    """The message of the SourceError that opening a checkpoint gives; any other outcome fails the test."""
    with pytest.raises(SourceError) as caught:
        open_checkpoint(path, **options)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ reading


def samples() -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        count = 5 * dtype.itemsize
        bits = (torch.arange(count, dtype=torch.uint8) * 37 + 11) % (2 if dtype == torch.bool else 251)
        made[f"{name}.row"] = bits.view(dtype)
        made[f"{name}.scalar"] = bits[: dtype.itemsize].clone().view(dtype).reshape(())
        made[f"{name}.nothing"] = torch.empty(0, 3, dtype=dtype)
        made[f"{name}.cube"] = bits[: 4 * dtype.itemsize].clone().view(dtype).reshape(2, 1, 2)
    return made


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


@pytest.fixture(scope="module")
def every_dtype(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = directory(tmp_path_factory.mktemp("dtypes") / "model")
    save_file(samples(), path / SINGLE_FILE)
    return path


def test_every_dtype_reads_as_the_safetensors_library_reads_it(every_dtype: Path) -> None:
    checkpoint = open_checkpoint(every_dtype)
    expected = load_file(every_dtype / SINGLE_FILE)
    assert set(checkpoint.keys()) == set(expected) and len(expected) == 4 * len(DTYPES)
    for key, tensor in expected.items():
        assert same(checkpoint.read(key), tensor), key
        assert checkpoint.tensors[key].shape == tuple(tensor.shape)


def test_copied_bytes_are_the_tensors_bytes(every_dtype: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantforge.model.source.COPY_CHUNK_BYTES", 3)
    checkpoint = open_checkpoint(every_dtype)
    for key, tensor in load_file(every_dtype / SINGLE_FILE).items():
        copy = io.BytesIO()
        checkpoint.copy_bytes(key, copy)
        assert copy.getvalue() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), key


def test_shards_are_read_through_their_index(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert all(same(checkpoint.read(key), tensor) for key, tensor in TENSORS.items())
    assert checkpoint.tensors["b"].file == TWO and checkpoint.total_bytes == 32


def test_one_file_wins_over_an_index_as_in_transformers(sharded: Path) -> None:
    save_file({"a": torch.zeros(1)}, sharded / SINGLE_FILE)
    assert open_checkpoint(sharded).tensors["a"].file == SINGLE_FILE


# ------------------------------------------------------------------------------------------------ the directory


def test_a_path_that_is_not_there_is_named() -> None:
    assert refusal("./no/such/place") == "no checkpoint directory at ./no/such/place"
    assert refusal("/no/such/place") == "no checkpoint directory at /no/such/place"


@pytest.mark.parametrize("model", ["a\0b", "x" * 5000, "x" * 300, "..", "a/b/c", "org/", "/"])
def test_a_path_that_cannot_be_a_model_is_refused(model: str) -> None:
    assert model[:40] in refusal(model)


def test_a_file_in_place_of_a_directory_is_refused(single: Path) -> None:
    file = single / SINGLE_FILE
    assert f"{file} is a file; MODEL is a checkpoint directory or a hub id" in refusal(file)


@pytest.mark.parametrize("model", ["org/model", "org/a..b", "-org/model"])
def test_a_hub_id_out_of_reach_is_refused_quickly(model: str) -> None:
    started = time.monotonic()
    message = refusal(model)
    assert f"no checkpoint directory at {model}, and the hub has no reachable model of that id" in message
    assert "download the model first" in message
    assert time.monotonic() - started < 10


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    assert refusal(path) == f"{path} holds no {SINGLE_FILE} and no {INDEX_FILE}"
    (path / "adapter_model.bin").write_bytes(b"")
    assert "found ['adapter_model.bin']" in refusal(path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "is not valid JSON: Expecting property name"),
        ("", "is not valid JSON"),
        ("[1]", "holds a list, not an object"),
        ("{}", "names neither architectures nor model_type"),
        ('{"architectures": [], "hidden_size": 4}', "names neither architectures nor model_type"),
        ('{"model_type": "llama", "model_type": "opt"}', "key 'model_type' is given twice"),
        ('{"model_type": "\\ud800"}', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_config_that_says_nothing_of_a_model_is_refused(single: Path, config: str, says: str) -> None:
    (single / "config.json").write_text(config)
    message = refusal(single)
    assert str(single / "config.json") in message and says in message


def test_a_config_that_is_not_utf8_is_refused(single: Path) -> None:
    (single / "config.json").write_bytes(b'{"model_type": "\xff"}')
    assert "config.json is not valid JSON" in refusal(single)


def test_a_missing_config_is_named(single: Path) -> None:
    (single / "config.json").unlink()
    assert refusal(single) == f"{single / 'config.json'} is missing"


def test_a_file_the_system_refuses_to_open_is_named(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Any, *rest: Any, **more: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(file))

    checkpoint = open_checkpoint(single)
    monkeypatch.setattr("builtins.open", refuse)
    assert refusal(single) == f"{single / 'config.json'} cannot be read: Permission denied"
    for use in (lambda: checkpoint.read("a"), checkpoint.fingerprint, lambda: checkpoint.copy_bytes("a", io.BytesIO())):
        with pytest.raises(SourceError, match=f"{SINGLE_FILE} cannot be read: Permission denied"):
            use()


# ------------------------------------------------------------------------------------------------ the index


def test_missing_shards_are_counted_and_named(sharded: Path) -> None:
    (sharded / TWO).unlink()
    assert refusal(sharded) == f"{sharded}: 1 of 2 shards are missing: {TWO}"


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/outside.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", ".", "", "a\0b"],
)
def test_an_index_naming_anything_but_a_file_beside_it_is_refused(sharded: Path, file: str) -> None:
    save_file({"b": TENSORS["b"]}, sharded.parent / "outside.safetensors")
    (sharded / "a").mkdir()
    save_file({"b": TENSORS["b"]}, sharded / "a" / "b.safetensors")
    index(sharded, {"a": ONE, "b": file})
    message = refusal(sharded)
    assert f"{sharded / INDEX_FILE} must name files that lie beside it; 1 do not: {file!r}" in message


@pytest.mark.parametrize("file", ["x" * 300 + ".safetensors", "\ud800.safetensors"])
def test_an_index_naming_a_file_that_cannot_exist_is_refused(sharded: Path, file: str) -> None:
    index(sharded, {"a": ONE, "b": file})
    assert str(sharded) in refusal(sharded)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("no json", "is not valid JSON"),
        ("[]", "holds a list, not an object"),
        ("{}", "has no weight_map of tensor names to file names"),
        ('{"weight_map": ["a"]}', "has no weight_map of tensor names to file names"),
        ('{"weight_map": {"a": 1}}', "has no weight_map of tensor names to file names"),
        ('{"weight_map": {"a": null}}', "has no weight_map of tensor names to file names"),
        ('{"weight_map": {}}', "has an empty weight_map"),
    ],
)
def test_an_index_without_a_weight_map_is_refused(sharded: Path, content: str, says: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    message = refusal(sharded)
    assert str(sharded / INDEX_FILE) in message and says in message


def test_an_index_listing_a_tensor_no_shard_holds_is_refused(sharded: Path) -> None:
    index(sharded, {"a": ONE, "b": TWO, "c": TWO})
    message = refusal(sharded)
    assert f"{INDEX_FILE} lists 1 tensors that are not where it says: c (said to be in {TWO}, is nowhere)" in message


def test_an_index_listing_a_tensor_in_the_wrong_shard_is_refused(sharded: Path) -> None:
    index(sharded, {"a": TWO, "b": ONE})
    message = refusal(sharded)
    assert "lists 2 tensors" in message and f"a (said to be in {TWO}, is in {ONE})" in message


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    save_file(TENSORS, sharded / TWO)
    assert refusal(sharded) == f"{sharded}: a is in both {ONE} and {TWO}"


# ------------------------------------------------------------------------------------------------ one file


def test_a_file_of_no_bytes_is_refused(single: Path) -> None:
    (single / SINGLE_FILE).write_bytes(b"")
    assert f"{single / SINGLE_FILE} is truncated or no safetensors file: 0 bytes" in refusal(single)


@pytest.mark.parametrize("lost", [1, 8, 31])
def test_a_file_that_lost_bytes_of_its_tensors_is_refused(single: Path, lost: int) -> None:
    file = single / SINGLE_FILE
    size = file.stat().st_size
    os.truncate(file, size - lost)
    assert refusal(single) == f"{file} is truncated: its tensors end at byte {size}, the file has {size - lost}"


def test_a_file_that_lost_a_kilobyte_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    save_file({"a": torch.zeros(1000)}, path / SINGLE_FILE)
    size = (path / SINGLE_FILE).stat().st_size
    os.truncate(path / SINGLE_FILE, size - 1000)
    assert f"its tensors end at byte {size}, the file has {size - 1000}" in refusal(path)


def test_a_file_cut_in_its_header_is_refused(single: Path) -> None:
    for size in (1, 7, 8, 9, 40):
        save_file(TENSORS, single / SINGLE_FILE)
        os.truncate(single / SINGLE_FILE, size)
        assert f"is truncated or no safetensors file: {size} bytes, header of" in refusal(single)


def test_a_file_with_bytes_after_its_last_tensor_is_refused(single: Path) -> None:
    with open(single / SINGLE_FILE, "ab") as handle:
        handle.write(b"12345")
    assert "the file has 5 more" in refusal(single)


def test_a_file_cut_after_opening_is_refused_when_read(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    info = checkpoint.tensors["a"]
    os.truncate(single / SINGLE_FILE, info.start + 10)
    with pytest.raises(SourceError, match=f"{SINGLE_FILE}: a ends after 10 of 24 bytes"):
        checkpoint.read("a")
    with pytest.raises(SourceError, match=f"{SINGLE_FILE}: a ends 14 bytes early"):
        checkpoint.copy_bytes("a", io.BytesIO())


def test_a_git_lfs_pointer_is_told_apart_from_damage(single: Path) -> None:
    (single / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a Git LFS pointer" in refusal(single) and "git lfs pull" in refusal(single)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**31, 1000, 1, 0])
def test_a_header_length_the_file_cannot_have_is_refused(single: Path, length: int) -> None:
    raw = (single / SINGLE_FILE).read_bytes()
    (single / SINGLE_FILE).write_bytes(struct.pack("<Q", length) + raw[8:])
    assert f"{len(raw)} bytes, header of {length}" in refusal(single)


@pytest.mark.parametrize("value", [[], [1, 2], "text", 17, None])
def test_a_header_that_is_json_but_no_object_is_refused(tmp_path: Path, value: Any) -> None:
    path = raw_file(tmp_path / "model", value)
    assert refusal(path) == f"{path / SINGLE_FILE}: the header holds a {type(value).__name__}, not an object"


@pytest.mark.parametrize(
    "header",
    [b"not json at all", b'{"a": \xff}', b'{"a": 1, "a": 2}', b"[" * 50_000, b'{"a": ' + b"1" * 6000 + b"}",
     b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'],
)  # fmt: skip
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, header: bytes) -> None:
    path = raw_file(tmp_path / "model", header)
    assert f"{path / SINGLE_FILE}: the header is not valid JSON" in refusal(path)


@pytest.mark.parametrize(
    "broken",
    [
        entry(shape=(-2,)),
        entry(shape=(-1, -2)),
        entry(shape=(2.0,)),
        entry(shape=(True, 2)),
        entry(shape="12"),
        entry(shape=None),
        entry(shape=("2",)),
        entry(offsets=(-8, 0)),
        entry(offsets=(0,)),
        entry(offsets=(0, 4, 8)),
        entry(offsets=(0, 8.0)),
        entry(offsets=None),
        entry(dtype=7),
        entry(dtype=None),
        {"dtype": "F32"},
        {},
        [],
        "text",
        None,
        float("inf"),
        entry(shape=(float("inf"),)),
    ],
)
def test_a_damaged_entry_of_a_header_is_refused(tmp_path: Path, broken: Any) -> None:
    path = raw_file(tmp_path / "model", {"layer.weight": broken}, bytes(8))
    message = refusal(path)
    assert f"{path / SINGLE_FILE}: the header's entry of layer.weight is damaged: " in message
    assert str(broken)[:60] in message.replace("Infinity", "inf")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "f32", "int7", ""])
def test_an_unknown_dtype_is_refused(tmp_path: Path, dtype: str) -> None:
    path = raw_file(tmp_path / "model", {"a": entry(dtype=dtype)}, bytes(8))
    assert f"{path / SINGLE_FILE}: a has dtype {dtype}, which is not supported; known are F64, F32" in refusal(path)


@pytest.mark.parametrize(
    ("shape", "offsets"), [((3,), (0, 8)), ((2**62, 2**62), (0, 8)), ((2,), (8, 0)), ((0,), (0, 8)), ((2,), (0, 2**70))]
)
def test_offsets_that_do_not_fit_the_shape_are_refused(tmp_path: Path, shape: Any, offsets: Any) -> None:
    path = raw_file(tmp_path / "model", {"a": entry(shape=shape, offsets=offsets)}, bytes(8))
    needed = 4
    for dim in shape:
        needed *= dim
    expected = (
        f"a F32 {list(shape)} takes {needed} bytes, its offsets {list(offsets)} are {offsets[1] - offsets[0]} apart"
    )
    assert expected in refusal(path)


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (2**70, 0)])
def test_an_empty_tensor_too_large_for_any_tensor_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = raw_file(tmp_path / "model", {"a": entry(shape=shape, offsets=(0, 0))})
    assert f"a has the shape {list(shape)}, which no tensor can have" in refusal(path)


@pytest.mark.parametrize("shape", [(2**62,) * 300, (10**4000, 10**4000)])
def test_sizes_too_large_to_be_printed_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = raw_file(tmp_path / "model", {"a": entry(shape=shape)})
    assert "the header's entry of a is damaged" in refusal(path)


@pytest.mark.parametrize("name", [SINGLE_FILE, "config.json"])
def test_a_link_out_of_the_directory_is_not_followed(single: Path, name: str) -> None:
    (single / name).rename(single.parent / "outside")
    os.symlink("../outside", single / name)
    assert f"{single / name} is a link to {single.parent / 'outside'}, which is outside" in refusal(single)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    header = {"a": entry(offsets=(0, 8)), "b": entry(offsets=(4, 12))}
    path = raw_file(tmp_path / "model", header, bytes(12))
    start = 8 + len(json.dumps(header))
    expected = f"b overlaps the tensor before it: it starts at byte {start + 4}, not at {start + 8}"
    assert expected in refusal(path)


def test_two_tensors_in_the_same_bytes_are_refused(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model", {"a": entry(), "b": entry()}, bytes(8))
    assert "b overlaps the tensor before it" in refusal(path)


def test_a_hole_between_tensors_is_refused(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model", {"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20))
    assert "b leaves a hole before it" in refusal(path)


def test_offsets_beyond_the_end_of_the_file_are_refused(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model", {"a": entry(shape=(1000,), offsets=(0, 4000))}, bytes(8))
    size = (path / SINGLE_FILE).stat().st_size
    assert f"is truncated: its tensors end at byte {size + 3992}, the file has {size}" in refusal(path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "model", {"__metadata__": {"format": "pt"}})
    assert refusal(path) == f"{path}: {SINGLE_FILE} holds no tensor"


# ------------------------------------------------------------------------------------------------ pickles


def pickled(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, directory(path) / PICKLE_SINGLE_FILE, **options)
    return path


class Malicious:
    """Unpickled by an ordinary unpickler it would create the file `witness`."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.witness),)


def test_pickles_are_refused_without_the_opt_in(tmp_path: Path) -> None:
    message = refusal(pickled(tmp_path / "model", TENSORS))
    assert f"holds pickle weights ({PICKLE_SINGLE_FILE}), which can run code when loaded" in message
    assert "--allow-pickle" in message


def holds(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> bool:
    for key, tensor in tensors.items():
        copy = io.BytesIO()
        checkpoint.copy_bytes(key, copy)
        if copy.getvalue() != tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes():
            return False
        if not same(checkpoint.read(key), tensor):
            return False
    return set(checkpoint.keys()) == set(tensors)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_are_read_with_the_opt_in(tmp_path: Path, zipped: bool) -> None:
    tensors = TENSORS | {
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = pickled(tmp_path / "model", tensors, _use_new_zipfile_serialization=zipped)
    checkpoint = open_checkpoint(path, allow_pickle=True)
    assert holds(checkpoint, {key: tensor.detach() for key, tensor in tensors.items()})
    assert not checkpoint.read("parameter").requires_grad
    checkpoint.read("a").zero_()
    assert holds(checkpoint, {key: tensor.detach() for key, tensor in tensors.items()})


def test_safetensors_win_over_pickles_beside_them(single: Path) -> None:
    torch.save({"a": torch.zeros(1)}, single / PICKLE_SINGLE_FILE)
    assert holds(open_checkpoint(single, allow_pickle=True), TENSORS)


def test_pickle_shards_are_read_through_their_index(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    torch.save({"a": TENSORS["a"]}, path / "one.bin")
    torch.save({"b": TENSORS["b"]}, path / "two.bin")
    write = (path / PICKLE_INDEX_FILE).write_text
    write(json.dumps({"weight_map": {"a": "one.bin", "b": "two.bin"}}))
    assert holds(open_checkpoint(path, allow_pickle=True), TENSORS)
    write(json.dumps({"weight_map": {"a": "one.bin", "b": "one.bin"}}))
    assert "b (said to be in one.bin, is nowhere)" in refusal(path, allow_pickle=True)
    write(json.dumps({"weight_map": {"a": "one.bin", "b": "../two.bin"}}))
    assert "'../two.bin'" in refusal(path, allow_pickle=True)
    torch.save(TENSORS, path / "two.bin")
    write(json.dumps({"weight_map": {"a": "one.bin", "b": "two.bin"}}))
    assert "a is in both one.bin and two.bin" in refusal(path, allow_pickle=True)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path, zipped: bool) -> None:
    witness = tmp_path / "witness"
    content = TENSORS | {"c": Malicious(witness)}
    path = pickled(tmp_path / "model", content, _use_new_zipfile_serialization=zipped)
    message = refusal(path, allow_pickle=True)
    assert str(path / PICKLE_SINGLE_FILE) in message and "mkdir" in message
    assert "weights_only" not in message  # torch's advice is to switch the protection off
    assert not witness.exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_pickle_is_refused(tmp_path: Path, zipped: bool) -> None:
    path = pickled(tmp_path / "model", {"a": torch.zeros(1000)}, _use_new_zipfile_serialization=zipped)
    file = path / PICKLE_SINGLE_FILE
    whole = file.read_bytes()
    for size in (0, 1, 5, 100, len(whole) // 2, len(whole) - 1000, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert f"{file} ({size} bytes) is damaged" in refusal(path, allow_pickle=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([torch.zeros(1)], "holds a list, not a dict of names to tensors"),
        (torch.zeros(1), "holds a Tensor, not a dict of names to tensors"),
        ({"state_dict": TENSORS}, "'state_dict' is a dict"),
        ({"epoch": 3}, "'epoch' is a int"),
        ({1: torch.zeros(1)}, "1 is a Tensor"),
        ({"a": torch.zeros(2, 2).to_sparse()}, "a is torch.float32, torch.sparse_coo, which is not supported"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "a is torch.complex128, torch.strided, which is not supported"),
        ({}, "holds no tensor"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: Any, says: str) -> None:
    message = refusal(pickled(tmp_path / "model", content), allow_pickle=True)
    assert says in message and PICKLE_SINGLE_FILE in message


def test_a_plain_pickle_of_python_objects_is_refused(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    (path / PICKLE_SINGLE_FILE).write_bytes(pickle.dumps({"a": [1.0, 2.0]}, protocol=2))
    assert PICKLE_SINGLE_FILE in refusal(path, allow_pickle=True)


# ------------------------------------------------------------------------------------------------ fingerprint


def test_the_fingerprint_is_the_same_wherever_the_files_lie(sharded: Path, tmp_path: Path) -> None:
    shutil.copytree(sharded, tmp_path / "elsewhere")
    assert open_checkpoint(sharded).fingerprint() == open_checkpoint(tmp_path / "elsewhere").fingerprint()


def test_the_fingerprint_changes_with_one_byte_a_name_or_the_config(single: Path) -> None:
    seen = [open_checkpoint(single).fingerprint()]

    def changed() -> bool:
        seen.append(open_checkpoint(single).fingerprint())
        return seen[-1] not in seen[:-1]

    weights = single / SINGLE_FILE
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert changed()
    save_file({"a": TENSORS["a"], "c": TENSORS["b"]}, weights)
    assert changed()
    save_file({"a": TENSORS["a"].reshape(3, 2), "b": TENSORS["b"]}, weights)
    assert changed()
    weights.write_bytes(whole)
    (single / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-6}))
    assert changed()


def test_the_fingerprint_of_a_large_file_sees_its_ends_and_samples_between(tmp_path: Path) -> None:
    path = directory(tmp_path / "model")
    save_file({"a": torch.zeros(1 << 20)}, path / SINGLE_FILE)
    size = (path / SINGLE_FILE).stat().st_size
    before = open_checkpoint(path).fingerprint()
    for position in (size - 1, size - (1 << 16), 7 * (size - (1 << 16)) // 15 + 5):
        with open(path / SINGLE_FILE, "r+b") as handle:
            handle.seek(position)
            handle.write(b"\x01")
        assert open_checkpoint(path).fingerprint() != before
        save_file({"a": torch.zeros(1 << 20)}, path / SINGLE_FILE)
