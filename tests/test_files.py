"""Array files: what is read, what is refused with which words, and that a result is never half there."""

from __future__ import annotations

import json
import os
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from numbaflash import files

DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def arrays(dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((2, 5, 3, 4)).astype(dtype) for name in "qkv"}


def same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].dtype.isnative
        np.testing.assert_array_equal(got[name].view(np.uint8), want[name].view(np.uint8))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_saved_is_loaded(tmp_path, suffix, dtype):
    files.save(tmp_path / f"x{suffix}", arrays(dtype))
    same(files.load([tmp_path / f"x{suffix}"]), arrays(dtype))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".npy"])
def test_options_are_loaded_by_name(tmp_path, suffix):
    given = {
        "mask": np.eye(5, dtype=bool),
        "bias": np.ones(5, ml_dtypes.bfloat16),
        "seqlens_k": np.array([5, 3]),
        "seqlens_q": np.array([1, 5], np.int32),
    }
    want = arrays() | given | {"sinks": np.ones(3, np.float32), "alibi_slopes": np.ones((2, 3), np.float32)}
    if suffix == ".npy":
        for name, array in want.items():
            np.save(tmp_path / f"{name}.npy", array)
        same(files.load([tmp_path / f"{name}.npy" for name in want]), want)
    else:
        files.save(tmp_path / f"x{suffix}", want)
        same(files.load([tmp_path / f"x{suffix}"]), want)


def test_three_npy_files_in_order(tmp_path):
    want = arrays(np.float16)
    for name, array in want.items():
        np.save(tmp_path / f"{name}.npy", array)
    same(files.load([tmp_path / "q.npy", tmp_path / "k.npy", tmp_path / "v.npy"]), want)


def test_compressed_npz_big_endian_and_fortran_order(tmp_path):
    want = arrays(np.float64)
    stored = {name: np.asfortranarray(array.astype(">f8")) for name, array in want.items()}
    np.savez_compressed(tmp_path / "x.npz", **stored, other=np.arange(3))
    got = files.load([tmp_path / "x.npz"])
    for name in want:
        assert got[name].dtype == np.float64 and got[name].dtype.isnative
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors_agrees_with_its_own_package(tmp_path, dtype):
    safetensors = pytest.importorskip("safetensors.numpy")
    want = arrays(dtype)
    files.save(tmp_path / "ours.safetensors", want)
    theirs = safetensors.load_file(tmp_path / "ours.safetensors")
    same({name: theirs[name] for name in "qkv"}, want)
    safetensors.save_file(want, tmp_path / "theirs.safetensors", metadata={"made": "by hand"})
    same(files.load([tmp_path / "theirs.safetensors"]), want)


def test_empty_arrays(tmp_path):
    want = {name: np.zeros((1, 0, 2, 4), np.float32) for name in "qkv"}
    for suffix in (".npz", ".safetensors"):
        files.save(tmp_path / f"x{suffix}", want)
        same(files.load([tmp_path / f"x{suffix}"]), want)


def refused(paths, words):
    with pytest.raises(files.FileError, match=words) as caught:
        files.load(paths)
    assert str(paths[0]) in str(caught.value)


def test_missing_files_and_wrong_kinds(tmp_path):
    refused([tmp_path / "no.npz"], "cannot read .*No such file")
    refused([tmp_path / "no.safetensors"], "cannot read .*No such file")
    refused([tmp_path / "x.csv"], "input must be one .npz or .safetensors file")
    refused([tmp_path / "q.npy"], "three .npy files")
    refused([tmp_path / "a.npz", tmp_path / "b.npz"], "input must be one")
    (tmp_path / "folder.npz").mkdir()
    refused([tmp_path / "folder.npz"], "cannot read .*directory")


def test_damaged_npz(tmp_path):
    path = tmp_path / "x.npz"
    path.write_bytes(b"")
    refused([path], "damaged or not a .npz archive")
    path.write_bytes(b"not a zip file at all" * 100)
    refused([path], "damaged or not a .npz archive")
    np.savez(path, **arrays())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused([path], "damaged or not a .npz archive")
    flipped = bytearray(whole)
    flipped[whole.index(b"\x93NUMPY") + 200] ^= 0xFF
    path.write_bytes(flipped)
    refused([path], "array q is damaged or not a NumPy array: .*CRC")
    with zipfile.ZipFile(path, "w") as archive:
        for name in "qkv":
            archive.writestr(f"{name}.npy", b"no NumPy header")
    refused([path], "array q is damaged or not a NumPy array")


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': ((((((((",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999999, 2, 3, 8), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999, 9999999, 3, 8), }",
        b"\xff\xfe",
    ],
)
def test_damaged_npy_headers(tmp_path, header):
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header.ljust(117) + b"\n")
    refused([path] * 3, "x.npy is damaged or not a NumPy array")


def test_npz_of_an_unknown_zip_version(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, **arrays())
    content = bytearray(path.read_bytes())
    content[content.index(b"PK\1\2") + 6] = 255  # the version needed to extract
    path.write_bytes(content)
    refused([path], "damaged or not a .npz archive: zip file version")


def test_missing_names(tmp_path):
    np.savez(tmp_path / "x.npz", q=np.zeros(3), keys=np.zeros(3))
    refused([tmp_path / "x.npz"], "k, v missing, found keys, q")
    files.save(tmp_path / "x.safetensors", {"q": np.zeros(3, np.float32)})
    refused([tmp_path / "x.safetensors"], "k, v missing, found q")


def test_pickled_objects_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    bad = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "x.npz", **(arrays() | {"v": bad}))
    refused([tmp_path / "x.npz"], "array v holds pickled Python objects, which are never loaded")
    np.save(tmp_path / "q.npy", bad)
    refused([tmp_path / "q.npy"] * 3, "holds pickled Python objects")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, bool, "U3", "V4", "longdouble"])
def test_other_dtypes(tmp_path, dtype):
    np.savez(tmp_path / "x.npz", **(arrays() | {"k": np.zeros((1, 2), dtype)}))
    refused([tmp_path / "x.npz"], "k must be float16, bfloat16, float32 or float64; got dtype")


def test_safetensors_of_other_dtype(tmp_path):
    header = {name: {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]} for name in "qkv"}
    write_raw(tmp_path / "x.safetensors", header, b"\0" * 4)
    refused([tmp_path / "x.safetensors"], "q must be .*; got dtype int32")


def write_raw(path, header, data):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (GOOD | {"data_offsets": [0, 4]}, "does not fit"),
        (GOOD | {"data_offsets": [0, 80]}, "does not fit"),
        (GOOD | {"data_offsets": [-8, 0]}, "does not fit"),
        (GOOD | {"data_offsets": [8, 0]}, "does not fit"),
        (GOOD | {"shape": [-2]}, "does not fit"),
        (GOOD | {"shape": [-1, -2]}, "does not fit"),
        (GOOD | {"shape": "x"}, "header entry of q is damaged"),
        (GOOD | {"shape": [2.5]}, "header entry of q is damaged"),
        (GOOD | {"data_offsets": [0, float("inf")]}, "header entry of q is damaged"),
        (GOOD | {"dtype": ["F32"]}, "q must be float16"),
        (GOOD | {"shape": [1] * 70 + [2]}, "q cannot be read"),
        (GOOD | {"shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}, "q cannot be read"),
        (GOOD | {"data_offsets": 5}, "header entry of q is damaged"),
        ({"shape": [2]}, "header entry of q is damaged"),
        (["F32"], "header entry of q is damaged"),
        (GOOD | {"shape": [2**62, 2**62]}, "does not fit"),
    ],
)
def test_damaged_safetensors_entries(tmp_path, entry, words):
    path = tmp_path / "x.safetensors"
    write_raw(path, {"q": entry, "k": GOOD, "v": GOOD}, b"\0" * 8)
    refused([path], words)


@pytest.mark.parametrize(
    "content",
    [b"", b"\1\2", struct.pack("<Q", 2**60), struct.pack("<Q", 500) + b"{}", struct.pack("<Q", 4) + b"[1]]", b"\3" + b"\0" * 7 + b"[1]"]
    + [pytest.param(struct.pack("<Q", 10**5) + b"[" * 10**5, id="nested")],
)
def test_damaged_safetensors_headers(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    refused([path], "is damaged or not a .safetensors file")


def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.npz"
    files.save(path, {"out": np.ones(3)})
    before = path.read_bytes()

    def full_disk(file, **arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full_disk)
    with pytest.raises(files.FileError, match="cannot write .*out.npz: No space left"):
        files.save(path, {"out": np.zeros(3)})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["out.npz"]


def test_output_is_checked_before_the_work(tmp_path):
    (tmp_path / "in.npz").write_bytes(b"")
    (tmp_path / "d.npz").mkdir()

    def check(path, words, **options):
        with pytest.raises(files.FileError, match=words):
            files.check_output(path, **({"want_lse": False} | options))

    check(tmp_path / "out.txt", "must end in .npz, .npy or .safetensors")
    check(tmp_path / "out.npy", "holds one array", want_lse=True)
    check(tmp_path / "d.npz", "is a folder")
    check(tmp_path / "no" / "out.npz", "there is no folder")
    check(tmp_path / "in.npz", "would overwrite an input", inputs=[tmp_path / "in.npz"])
    assert files.check_output(tmp_path / "out.npy", want_lse=False) == tmp_path / "out.npy"


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        files.save(tmp_path / "out.npy", {"out": np.ones(2)})
    finally:
        os.umask(old)
    assert (tmp_path / "out.npy").stat().st_mode & 0o777 == 0o640
