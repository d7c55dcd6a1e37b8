"""jspec's safetensors reader and writer against the library's, and on damaged files."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jspec.checkpoints.files import safetensors_files

PLAIN = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.array(7, np.int64),
    "c": np.zeros((0, 4), np.float16),
    "d": np.array([True, False]),
}


def save(path, tensors):
    layout = [(name, array.shape, array.dtype) for name, array in tensors.items()]
    safetensors_files.write(path, layout, iter(tensors.values()))


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_the_library_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    path = tmp_path / "x.safetensors"
    save(path, PLAIN)
    theirs = safetensors.numpy.load_file(path)
    safetensors.numpy.save_file(theirs, path)
    ours = safetensors_files.read(path)
    assert set(ours) == set(theirs) == set(PLAIN)
    for name, array in PLAIN.items():
        assert ours[name].dtype == theirs[name].dtype == array.dtype
        np.testing.assert_array_equal(ours[name], array)
        np.testing.assert_array_equal(theirs[name], array)


@pytest.mark.parametrize("code", safetensors_files.DTYPES)
def test_every_dtype_survives(tmp_path, code):
    array = np.array([0, 1, 2, 1]).astype(safetensors_files.DTYPES[code])
    save(tmp_path / "x", {"a": array[:3], "b": array})  # an odd size misaligns the next tensor
    again = safetensors_files.read(tmp_path / "x")
    assert again["b"].dtype == array.dtype
    np.testing.assert_array_equal(again["b"].astype(np.float32), array.astype(np.float32))


def test_a_read_tensor_is_a_view_of_the_file_and_cannot_be_written(tmp_path):
    save(tmp_path / "x", PLAIN)
    with pytest.raises(ValueError, match="read-only"):
        safetensors_files.read(tmp_path / "x")["a"][0] = 1


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path):
    path = tmp_path / "x.safetensors"
    save(path, PLAIN)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"x\.safetensors is not a whole safetensors file"):
            safetensors_files.read(path)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{no", b"", "its header is not JSON"),
        (b"\xff\xfe", b"", "its header is not JSON"),
        ([], b"", "its header is not a JSON object"),
        ({"a": 3}, b"", "entry of a is malformed: 3"),
        ({"a": {"dtype": "F32"}}, b"", "entry of a is malformed"),
        ({"a": entry(shape=(-1,))}, bytes(4), "entry of a is malformed"),
        ({"a": entry(shape=(1.5,))}, bytes(4), "entry of a is malformed"),
        ({"a": entry(dtype=["F32"])}, bytes(4), "entry of a is malformed"),
        ({"a": entry(dtype="F4")}, bytes(4), "a has dtype 'F4'; known: BOOL"),
        ({"a": entry(shape=(2,))}, bytes(4), r"a F32\[2\] does not fill its 4 bytes"),
        ({"a": entry(offsets=(4, 0))}, bytes(4), "does not fill its -4 bytes"),
        ({"a": entry()}, bytes(3), "it is truncated: a ends at byte 4 of the data, 3 are there"),
        ({"a": entry(), "b": entry()}, bytes(4), "b at bytes 0 to 4 overlaps its neighbour"),
        ({"a": entry(offsets=(4, 8))}, bytes(8), "a at bytes 4 to 8 leaves a gap before it"),
        ({"a": entry()}, bytes(6), "2 bytes follow its last tensor"),
    ],
)
def test_a_damaged_header_is_named(tmp_path, header, data, message):
    raw_file(tmp_path / "x", header, data)
    with pytest.raises(ValueError, match=message) as error:
        safetensors_files.read(tmp_path / "x")
    assert str(tmp_path / "x") in str(error.value) and "\n" not in str(error.value)


def test_a_header_longer_than_the_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="its header claims 9223372036854775808 bytes"):
        safetensors_files.read(tmp_path / "x")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.safetensors does not exist"):
        safetensors_files.read(tmp_path / "nothing.safetensors")


def test_a_tensor_that_breaks_its_layout_is_refused(tmp_path):
    layout = [("a", (2,), np.dtype(np.float32))]
    with pytest.raises(ValueError, match=r"tensor a is float32\[3\], its layout says float32\[2\]"):
        safetensors_files.write(tmp_path / "x", layout, iter([np.zeros(3, np.float32)]))
    layout = [("a", (2,), np.dtype(ml_dtypes.int4))]
    with pytest.raises(ValueError, match="tensor a is int4, which a safetensors file cannot hold"):
        safetensors_files.write(tmp_path / "x", layout, iter([]))
