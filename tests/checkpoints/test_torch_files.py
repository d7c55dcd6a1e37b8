"""Torch's files without torch: tensors are read exactly, and nothing is run."""

import collections
import io
import os
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest

from jspec.checkpoints.files import torch_files

DTYPES = (
    np.float32,
    np.float16,
    ml_dtypes.bfloat16,
    np.float64,
    np.int64,
    np.int32,
    np.int16,
    np.int8,
    np.uint8,
    np.bool_,
)


def sample():
    """Return one tensor of each dtype, a scalar and an empty one."""
    rng = np.random.default_rng(0)
    tensors = {np.dtype(d).name: (rng.normal(size=(2, 3)) * 3).astype(d) for d in DTYPES}
    return tensors | {"scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 4), np.float32)}


def assert_same(tensors, expected):
    assert list(tensors) == list(expected)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape
        np.testing.assert_array_equal(tensors[name], tensor)


def archive(path, program, records=(), **options):
    """Write a file with the given pickle."""
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("x/data.pkl", program)
        for name, content in records:
            file.writestr(f"x/{name}", content)
    return path


# Exchange with torch.


def test_written_files_are_read_back(tmp_path):
    torch_files.write(tmp_path / "a.pt", sample())
    assert_same(torch_files.read(tmp_path / "a.pt"), sample())
    with pytest.raises(ValueError, match="tensor x is complex64, which torch has no storage for"):
        torch_files.write(tmp_path / "b.pt", {"x": np.zeros(2, np.complex64)})


def test_torch_reads_written_files(tmp_path):
    torch = pytest.importorskip("torch")
    torch_files.write(tmp_path / "a.pt", sample())
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    for name, tensor in sample().items():
        assert str(loaded[name].dtype).removeprefix("torch.") in (tensor.dtype.name, "bool")
        assert tuple(loaded[name].shape) == tensor.shape
        wide = loaded[name].to(torch.float64).numpy()
        np.testing.assert_array_equal(wide, tensor.astype(np.float64))


@pytest.mark.parametrize("protocol", [2, 4])
def test_files_of_torch_are_read_exactly(tmp_path, protocol):
    torch = pytest.importorskip("torch")
    names = [np.dtype(d).name for d in DTYPES if d is not np.bool_]
    grid = torch.arange(24.0).reshape(4, 6)
    tensors = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names}
    tensors |= {
        "bool": torch.tensor([True, False]),
        "whole": grid,
        "turned": grid.T[1:3],
        "every second": grid[1:, ::2],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "repeated": torch.ones(1).expand(3, 4),
    }
    torch.save(tensors, tmp_path / "a.bin", pickle_protocol=protocol)
    with zipfile.ZipFile(tmp_path / "a.bin") as file:  # four names, one storage
        storages = [name for name in file.namelist() if "/data/" in name]
    assert len(storages) == len(tensors) - 2
    loaded = torch_files.read(tmp_path / "a.bin")
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype.name == str(tensor.dtype).removeprefix("torch.")
        assert loaded[name].shape == tuple(tensor.shape)
        expected = tensor.detach().to(torch.float64).numpy()
        np.testing.assert_array_equal(loaded[name].astype(np.float64), expected)
    with pytest.raises(ValueError, match="read-only"):
        loaded["whole"][0, 0] = 1


def test_state_dicts_of_modules_are_read(tmp_path):
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(2, 3)
    torch.save(module.state_dict(), tmp_path / "a.bin")
    loaded = torch_files.read(tmp_path / "a.bin")
    np.testing.assert_array_equal(loaded["weight"], module.weight.detach().numpy())
    assert list(loaded) == ["weight", "bias"]


# Hostile and wrong files.


class Hostile:
    """An object that runs a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("position", ["the whole", "a value", "a name", "attributes"])
@pytest.mark.parametrize("function", [os.system, eval, exec])
def test_nothing_in_a_file_is_run(tmp_path, position, function):
    marker = tmp_path / "marker"
    text = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w')"
    bomb = Hostile(function, text)
    content = {"the whole": bomb, "a value": {"weight": bomb}, "a name": {(bomb,): 1}}.get(position)
    if position == "attributes":
        content = collections.OrderedDict()
        content._metadata = bomb
    program = pickle.dumps(content, protocol=2)
    path = archive(tmp_path / "a.bin", program)
    with pytest.raises(ValueError, match="nothing of it was run") as error:
        torch_files.read(path)
    assert "\n" not in str(error.value) and not marker.exists()
    pickle.loads(program)  # the bomb works
    assert marker.exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"\x80\x02cbuiltins\nexec\n.", "asks for builtins.exec"),
        (b"\x80\x02ctorch\nload\n.", "asks for torch.load"),
        (b"\x80\x02ctorch.serialization\n_get_restore_location\n.", "asks for torch.serialization"),
        (b"(ios\nsystem\n.", "the instruction INST"),
        (b"(cos\nsystem\no.", "asks for os.system"),
        (b"\x80\x02]q\x00.", "the instruction EMPTY_LIST"),
        (b"\x80\x02ccollections\nOrderedDict\nK\x01b}.", "of something that is no dict"),
        (b"\x80\x02ccollections\nOrderedDict\nX\x01\x00\x00\x00aK\x01s.", "that is no dict"),
        (b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.", "it calls"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "damaged"),
        (b"\x80\x02X\x01\x00\x00\x00aQ.", "damaged"),
        (b"\x80\x02(X\x06\x00\x00\x00module\x89\x89\x89\x89tQ.", "the persistent object"),
        (b"\x80\x02}X\x01\x00\x00\x00aK\x01s.", "its entry 'a' is a int, not a tensor"),
        (b"\x80\x02}X\x01\x00\x00\x00a}s.", "its entry 'a' is a dict, not a tensor"),
        (b"\x80\x02K\x01.", "it holds a int, not a dict"),
        (b"\x80\x02}}.", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02t.", "damaged"),
        (b"\x80\x02}", "damaged"),
        (b"", "damaged"),
    ],
)
def test_pickles_that_are_no_dict_of_tensors_are_refused(tmp_path, program, message):
    with pytest.raises(ValueError, match=message) as error:
        torch_files.read(archive(tmp_path / "a.bin", program))
    assert str(tmp_path / "a.bin") in str(error.value) and "\n" not in str(error.value)


def edited(path, old, new):
    """Write the file with other bytes in its pickle."""
    with zipfile.ZipFile(path) as file:
        names = [(name, file.read(name)) for name in file.namelist()]
    with zipfile.ZipFile(path, "w") as file:
        for name, content in names:
            changed = content.replace(old, new, 1) if name.endswith("data.pkl") else content
            assert not name.endswith("data.pkl") or changed != content
            file.writestr(name, changed)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"\x8a\x01\x02\x8a\x01\x03t", b"\x8a\x01\x03\x8a\x01\x03t", "past its storage"),
        (b"\x8a\x01\x03\x8a\x01\x01t", b"\x8a\x01\x04\x8a\x01\x01t", "past its storage"),
        (b"\x8a\x01\x00(", b"\x8a\x01\x01(", "past its storage"),
        (b"\x8a\x01\x00(", b"\x8a\x01\xff(", "invalid shape"),
        (b"\x8a\x01\x03\x8a\x01\x01t", b"\x8a\x01\x03t", "invalid shape"),
        (b"\x8a\x01\x06tQ", b"\x8a\x01\x05tQ", "holds 24 bytes, not 5 float32"),
        (b"FloatStorage", b"DoubleStorage", "holds 24 bytes, not 6 float64"),
        (b"FloatStorage", b"QInt8Storage", "asks for torch.QInt8Storage"),
        (b"X\x01\x00\x00\x000X", b"X\x01\x00\x00\x009X", "lacks the record 'data/9'"),
    ],
)
def test_tensors_that_reach_past_their_storage_are_refused(tmp_path, old, new, message):
    path = tmp_path / "a.pt"
    torch_files.write(path, {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    edited(path, old, new)
    with pytest.raises(ValueError, match=message):
        torch_files.read(path)


def test_files_that_are_not_torchs_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a.bin does not exist"):
        torch_files.read(tmp_path / "a.bin")
    (tmp_path / "a.bin").write_bytes(pickle.dumps({}, protocol=2))
    with pytest.raises(ValueError, match=r"is not a whole file of torch 1.6 or later"):
        torch_files.read(tmp_path / "a.bin")
    packed = archive(tmp_path / "b.bin", b"\x80\x02}.", compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"'data.pkl' is compressed or damaged"):
        torch_files.read(packed)
    with zipfile.ZipFile(tmp_path / "c.bin", "w") as file:
        file.writestr("readme.txt", "")
    with pytest.raises(ValueError, match=r"a zip archive without a data.pkl"):
        torch_files.read(tmp_path / "c.bin")
    big = archive(tmp_path / "d.bin", b"\x80\x02}.", [("byteorder", "big")])
    with pytest.raises(ValueError, match="not little endian"):
        torch_files.read(big)


def test_files_from_before_torch_1_6_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(2)}, tmp_path / "a.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"is not a whole file of torch 1.6 or later"):
        torch_files.read(tmp_path / "a.bin")


def test_truncated_and_damaged_files_raise_only_value_errors(tmp_path):
    torch_files.write(tmp_path / "a.pt", {"a": np.arange(6.0), "b": np.ones((2, 2), np.int8)})
    whole = (tmp_path / "a.pt").read_bytes()
    rng = np.random.default_rng(1)
    path = tmp_path / "b.pt"
    for length in rng.integers(0, len(whole), 60):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"b\.pt"):
            torch_files.read(path)
    refused = 0
    for position in rng.integers(0, len(whole), 600):
        damaged = bytearray(whole)
        damaged[position] = rng.integers(0, 256)
        path.write_bytes(bytes(damaged))
        try:
            torch_files.read(path)
        except ValueError:
            refused += 1
    assert refused > 100


def test_an_endless_program_and_a_huge_memo_index_cost_nothing(tmp_path):
    out = io.BytesIO()
    out.write(b"\x80\x02}r\xff\xff\xff\x7f.")  # memo index 2147483647
    assert torch_files.read(archive(tmp_path / "a.bin", out.getvalue())) == {}
