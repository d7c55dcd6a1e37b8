"""Tests that malicious or damaged torch files give tensors or one line, and never run code."""

import io
import json
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.checkpoints.files import torch_files
from jspec.checkpoints.files.model_files import open_tensors
from tests.hostile.junk import few, refused

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.int8)}


def archive(program, records=None, stored=zipfile.ZIP_STORED):
    """Return a file in torch's format with a pickle program and storage records."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", stored) as file:
        file.writestr("x/data.pkl", program)
        for name, content in (records or {"0": bytes(24)}).items():
            file.writestr(f"x/data/{name}", content)
    return out.getvalue()


def error_of(path, content):
    """Return the message of the reader for a file with this content; None if it works."""
    path.write_bytes(content)
    return refused(torch_files.read, path)


@pytest.fixture
def complete(tmp_path):
    torch_files.write(tmp_path / "complete.bin", TENSORS)
    return (tmp_path / "complete.bin").read_bytes()


def test_truncated_files_raise(tmp_path, complete):
    for size in range(len(complete)):
        assert error_of(tmp_path / "truncated", complete[:size])


@few(60)
@given(data=st.data())
def test_files_with_changed_bytes_are_read_or_raise(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    torch_files.write(folder / "complete.bin", TENSORS)
    content = bytearray((folder / "complete.bin").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    error_of(folder / "changed.bin", bytes(content))


class Exploit:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": x}, lambda x: [x], lambda x: (x,)])
def test_code_in_a_pickle_is_never_run(tmp_path, protocol, wrap):
    mark = tmp_path / "ran"
    for exploit in (
        Exploit(os.system, f"touch {mark}"),
        Exploit(open, str(mark), "w"),
        Exploit(eval, f"open({str(mark)!r}, 'w')"),
    ):
        program = pickle.dumps(wrap(exploit), protocol)
        assert error_of(tmp_path / "x.bin", archive(program))
        assert not mark.exists()
    pickle.loads(program)  # shows that the exploit works
    assert mark.exists()


def test_a_bare_pickle_raises(tmp_path):
    mark = tmp_path / "ran"
    for protocol in range(6):
        exploit = pickle.dumps(Exploit(os.system, f"touch {mark}"), protocol)
        assert "not a whole file" in error_of(tmp_path / "x.bin", exploit)
    assert not mark.exists()


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


TUPLES_OF_TUPLES = b")" + b"q\x00h\x00\x86" * 100  # 2^100 tuples, if printed or hashed
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x06tQ"


def tensor(shape, strides, offset=b"K\x00", storage=STORAGE):
    return TENSOR + b"(" + storage + offset + shape + strides + b"\x89N" + b"tR"


@pytest.mark.parametrize(
    "value",
    [
        TUPLES_OF_TUPLES,
        TENSOR + TUPLES_OF_TUPLES + b"R",
        TENSOR + b"(" + TUPLES_OF_TUPLES + b"tR",
        TUPLES_OF_TUPLES + b")R",
        TUPLES_OF_TUPLES + b"Q",
        b"(" + TUPLES_OF_TUPLES + b"K\x01K\x01K\x01K\x01tQ",
        b"}" + TUPLES_OF_TUPLES + b"K\x01s",
        TUPLES_OF_TUPLES + text("x") + b"\x93",
        tensor(TUPLES_OF_TUPLES, b"K\x01\x85"),
        tensor(b"K\x06\x85", TUPLES_OF_TUPLES),
        b"}q\x00" + text("a") + b"h\x00s",  # contains itself
    ],
)
def test_exponential_structures_raise_quickly(tmp_path, value):
    program = b"\x80\x02}" + text("a") + value + b"s."
    assert error_of(tmp_path / "x.bin", archive(program))


HUGE = b"\x8a\x08" + struct.pack("<q", 2**62)
NEGATIVE = b"\x8a\x01\xff"


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        (b"K\x07\x85", b"K\x01\x85", b"K\x00"),
        (b"K\x06\x85", b"K\x02\x85", b"K\x00"),
        (b"K\x06\x85", b"K\x01\x85", b"K\x01"),
        (b"K\x01\x85", b"K\x01\x85", b"K\x06"),
        (b"K\x06\x85", NEGATIVE + b"\x85", b"K\x05"),
        (NEGATIVE + b"\x85", b"K\x01\x85", b"K\x00"),
        (b"K\x06\x85", b"K\x01\x85", NEGATIVE),
        (HUGE + b"\x85", b"K\x00\x85", b"K\x00"),
        (HUGE + HUGE + b"\x86", b"K\x00K\x00\x86", b"K\x00"),
        (b"K\x02\x85", HUGE + b"\x85", b"K\x00"),
        (b"K\x01\x85", HUGE + b"\x85", b"K\x00"),
        (b"K\x06\x85", b")", b"K\x00"),
        (b"(" + b"K\x01" * 100 + b"t", b"(" + b"K\x01" * 100 + b"t", b"K\x00"),
        (b"(" + HUGE * 10_000 + b"t", b"(" + HUGE * 10_000 + b"t", b"K\x00"),
        (text("abc"), text("abc"), b"K\x00"),
        (STORAGE, b"K\x01\x85", b"K\x00"),
        (b"}", b"}", b"K\x00"),
        (b"\x88\x85", b"K\x01\x85", b"K\x00"),
        (b"N", b"N", b"K\x00"),
    ],
)
def test_tensors_that_exceed_their_storage_raise(tmp_path, shape, strides, offset):
    program = b"\x80\x02}" + text("a") + tensor(shape, strides, offset) + b"s."
    message = error_of(tmp_path / "x.bin", archive(program))
    if message is None:
        (read,) = torch_files.read(tmp_path / "x.bin").values()
        assert read.nbytes <= 24 and not np.array(read).any()


@pytest.mark.parametrize("count", [b"K\x07", b"K\x05", NEGATIVE, HUGE, b"N", text("6"), b"\x88"])
def test_storages_with_a_wrong_size_raise(tmp_path, count):
    storage = STORAGE.replace(b"K\x06tQ", count + b"tQ")
    program = b"\x80\x02}" + text("a") + tensor(b"K\x01\x85", b"K\x01\x85", storage=storage) + b"s."
    assert error_of(tmp_path / "x.bin", archive(program))


@pytest.mark.parametrize("key", ["../data.pkl", "/etc/passwd", "", "1", "0\0", "x" * 5000])
def test_storage_keys_must_be_records_of_the_archive(tmp_path, key):
    storage = STORAGE.replace(text("0"), text(key))
    program = b"\x80\x02}" + text("a") + tensor(b"K\x01\x85", b"K\x01\x85", storage=storage) + b"s."
    assert error_of(tmp_path / "x.bin", archive(program))


OPCODES = b"()}].0Na\x85\x86\x87q\x00h\x94\x88\x89K\x01Rtsub\x80Q\x8a"
CODES = [bytes([code]) for code in OPCODES]
PIECES = [
    STORAGE,
    TENSOR,
    text("a"),
    text("storage"),
    b"K\x06",
    b"K\x01",
    b"ccollections\nOrderedDict\n)R",
    tensor(b"K\x06\x85", b"K\x01\x85"),
    b"q\x00",
    b"h\x00",
]


@few(200)
@given(st.lists(st.sampled_from(CODES + PIECES) | st.binary(max_size=2), max_size=30))
def test_random_pickle_programs_are_read_or_raise(tmp_path_factory, pieces):
    error_of(tmp_path_factory.getbasetemp() / "random.bin", archive(b"".join(pieces) + b"."))


def test_too_long_programs_raise(tmp_path):
    assert "too long" in error_of(
        tmp_path / "x.bin", archive(b"\x80\x02" + b"K\x01" * 1_100_000 + b".")
    )


def test_compressed_records_raise_without_being_unpacked(tmp_path):
    bomb = archive(b"\x80\x02}.", {"0": bytes(50_000_000)}, zipfile.ZIP_DEFLATED)
    assert len(bomb) < 100_000
    assert "compressed" in error_of(tmp_path / "x.bin", bomb)


def test_reading_time_is_linear_in_the_records(tmp_path):
    records = {str(index): b"" for index in range(3000)}
    program = (
        b"\x80\x02}("
        + b"".join(
            text(name)
            + tensor(
                b"K\x00\x85",
                b"K\x01\x85",
                storage=STORAGE.replace(text("0"), text(name)).replace(b"K\x06tQ", b"K\x00tQ"),
            )
            for name in records
        )
        + b"u."
    )
    assert error_of(tmp_path / "x.bin", archive(program, records)) is None


@pytest.mark.parametrize("name", ["../x.bin", "/x.bin", "..", "a/../x.bin", ""])
def test_an_index_of_torch_files_must_not_leave_its_folder(tmp_path, name):
    torch_files.write(tmp_path / "x.bin", TENSORS)
    folder = tmp_path / "model"
    folder.mkdir()
    index = json.dumps({"weight_map": {"a": name, "b": name}})
    (folder / "pytorch_model.bin.index.json").write_text(index)
    assert refused(open_tensors, folder)
