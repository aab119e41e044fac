"""Arrays in files: q, k, v and options from ``.npz``, ``.npy`` or ``.safetensors``, results back into one.

NumPy's own formats have no bfloat16: NumPy writes such an array as 2-byte "void" items. They are read back here as
bfloat16, since no other 2-byte element type is written that way. Pickled objects are never loaded.
"""

from __future__ import annotations

import json
import operator
import os
import struct
import tempfile
import tokenize
import zipfile
import zlib
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np

from .problem import DTYPES, FORWARD_OPTIONS, LENGTH_DTYPES

OPERANDS = ("q", "k", "v")
OPTIONS = tuple(name for name in FORWARD_OPTIONS if name != "block_mask")
"""Those that files hold."""

_OPTION_DTYPES = {
    "mask": ("bool",),
    "bias": DTYPES,
    "alibi_slopes": ("float32",),
    "sinks": ("float32", "float64"),
    "seqlens_q": LENGTH_DTYPES,
    "seqlens_k": LENGTH_DTYPES,
}
_SAFETENSORS_NAMES = {"BOOL": "bool", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "I32": "int32", "I64": "int64"}
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors format itself
_DAMAGE = (
    *(ValueError, EOFError, OSError, MemoryError, NotImplementedError, RuntimeError, OverflowError, SyntaxError),
    *(tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)
"""What NumPy, zipfile and the parsers below them raise for bytes that make no sense: versions, sizes and headers of any kind."""


class FileError(ValueError):
    """A file that cannot be read or written as asked; the message names it."""


def load(paths) -> dict[str, np.ndarray]:
    """Read q, k and v, and the options that are arrays.

    Parameters
    ----------
    paths : sequence of path
        One ``.npz`` or ``.safetensors`` that holds ``q``, ``k`` and ``v``, and options of `numbaflash.forward` by their names; or ``.npy`` files:
        q, k and v in that order, whatever their names, then options, each file named after its option (``mask.npy``).

    Returns
    -------
    dict of str to ndarray
        "q", "k" and "v": native byte order, dtype float16, bfloat16 (needs ``ml_dtypes``), float32 or float64. Those of "mask", "bias",
        "alibi_slopes", "sinks", "seqlens_q" and "seqlens_k" that are there, of the dtypes that `numbaflash.forward` takes. Other arrays are not
        read.

    Raises
    ------
    FileError
        When a file is missing, damaged, of another kind, lacks an array or holds another dtype.
    """
    paths = [Path(p) for p in paths]
    suffixes = {p.suffix.lower() for p in paths}
    if len(paths) >= 3 and suffixes == {".npy"}:
        places = dict(zip(OPERANDS, paths, strict=False)) | _option_files(paths[3:])
        return {name: _checked(_read_npy(path), name, path) for name, path in places.items()}
    if len(paths) == 1 and suffixes == {".npz"}:
        arrays = _read_npz(paths[0])
    elif len(paths) == 1 and suffixes == {".safetensors"}:
        arrays = read_safetensors(paths[0])
    else:
        names = ", ".join(str(p) for p in paths)
        raise FileError(
            "input must be one .npz or .safetensors file with q, k and v, or three .npy files (q, k, v in that order) and further ones named after "
            f"options (mask.npy); got {names}"
        )
    return {name: _checked(array, name, paths[0]) for name, array in arrays.items()}


def _option_files(paths) -> dict[str, Path]:
    found = {}
    for path in paths:
        if path.stem not in OPTIONS:
            raise FileError(f"{path}: a .npy file after those of q, k and v must be named after an option: {', '.join(f'{o}.npy' for o in OPTIONS)}")
        if path.stem in found:
            raise FileError(f"{path}: there is a second file of {path.stem}, {found[path.stem]}")
        found[path.stem] = path
    return found


def check_output(path, *, inputs=(), want_lse: bool) -> Path:
    """Check before the computation that its result can be written to `path`.

    Raises
    ------
    FileError
        For an unknown suffix, a ``.npy`` that shall hold two arrays, an input, a folder, or a place that cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".npz", ".npy", ".safetensors"):
        raise FileError(f"--out must end in .npz, .npy or .safetensors; got {path}")
    if suffix == ".npy" and want_lse:
        raise FileError(f"--out {path}: a .npy file holds one array; write out and lse to a .npz or .safetensors file")
    if path.is_dir():
        raise FileError(f"--out {path} is a folder; name a file")
    folder = path.parent
    if not folder.is_dir():
        raise FileError(f"--out {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise FileError(f"--out {path}: the folder {folder} is not writable")
    for source in inputs:
        if path.exists() and Path(source).exists() and path.samefile(source):
            raise FileError(f"--out {path} would overwrite an input; name another file")
    return path


def save(path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays to ``.npz``, ``.npy`` (one array) or ``.safetensors``.

    The file appears complete or not at all: it is written beside its place and moved there.

    Raises
    ------
    FileError
        When it cannot be written.
    """
    path = Path(path)
    write = {".npz": _write_npz, ".npy": _write_npy, ".safetensors": _write_safetensors}[path.suffix.lower()]
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".part", delete=False) as file:
            temporary = file.name
            write(file, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def bfloat16() -> np.dtype:
    """NumPy's bfloat16 dtype, which the package ml_dtypes adds."""
    try:
        import ml_dtypes
    except ImportError:
        raise FileError("bfloat16 in NumPy needs the package ml_dtypes: pip install ml_dtypes") from None
    return np.dtype(ml_dtypes.bfloat16)


def dtype_of(name: str) -> np.dtype:
    """NumPy dtype of a dtype name of the contract."""
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def _checked(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
        array = array.view(bfloat16())
    _check_dtype(array.dtype.name, name, path)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def _check_dtype(dtype: str, name: str, path: Path) -> None:
    allowed = _OPTION_DTYPES.get(name, DTYPES)
    if dtype not in allowed:
        expected = " or ".join(filter(None, (", ".join(allowed[:-1]), allowed[-1])))
        hint = ". Numbers that are added to the scores are a bias" if name == "mask" and "float" in dtype else ""
        raise FileError(f"{path}: {name} must be {expected}; got dtype {dtype}{hint}")


def _opened(path: Path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error


def _read_npy(path: Path, file=None, member: str = "") -> np.ndarray:
    where = f"{path}: array {member}" if member else str(path)
    with file or _opened(path) as handle:
        try:
            return np.lib.format.read_array(handle, allow_pickle=False)
        except _DAMAGE as error:
            if "allow_pickle" in str(error):
                raise FileError(f"{where} holds pickled Python objects, which are never loaded; save it as a float array") from None
            raise FileError(f"{where} is damaged or not a NumPy array: {error}") from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with _opened(path) as file:
        try:
            archive = zipfile.ZipFile(file)
        except _DAMAGE as error:
            raise FileError(f"{path} is damaged or not a .npz archive: {error}") from error
        with archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            return {name: _read_npy(path, _member(path, archive, name), name) for name in _members(path, names)}


def _member(path: Path, archive: zipfile.ZipFile, name: str):
    try:
        return archive.open(f"{name}.npy")
    except (KeyError, *_DAMAGE) as error:  # RuntimeError: encrypted
        raise FileError(f"{path}: array {name} is damaged or not a NumPy array: {error}") from error


def _members(path: Path, names) -> list[str]:
    """The arrays of the file that are to be read."""
    missing = [name for name in OPERANDS if name not in names]
    if missing:
        found = ", ".join(sorted(names)) or "nothing"
        raise FileError(f"{path} must hold arrays named q, k and v; {', '.join(missing)} missing, found {found}")
    return [name for name in (*OPERANDS, *OPTIONS) if name in names]


def read_safetensors(path) -> dict[str, np.ndarray]:
    """Read q, k, v and options of a ``.safetensors`` file (an 8-byte header length, a JSON header, the raw bytes)."""
    path = Path(path)
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise FileError(f"{path} is damaged or not a .safetensors file: no valid header length")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path} is damaged or not a .safetensors file: its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise FileError(f"{path} is damaged or not a .safetensors file: its header is not a JSON object")
        header.pop("__metadata__", None)
        return {name: _safetensor(path, file, name, header[name], 8 + length, size) for name in _members(path, header)}


def _safetensor(path: Path, file, name: str, entry, start: int, size: int) -> np.ndarray:
    try:
        code, shape, (begin, end) = entry["dtype"], [operator.index(n) for n in entry["shape"]], map(operator.index, entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise FileError(f"{path}: the header entry of {name} is damaged ({error!r})") from error
    _check_dtype(_SAFETENSORS_NAMES.get(code, code) if isinstance(code, str) else str(code), name, path)
    dtype = dtype_of(_SAFETENSORS_NAMES[code]).newbyteorder("<")
    if min(shape, default=0) < 0 or not 0 <= begin <= end <= size - start or end - begin != prod(shape) * dtype.itemsize:
        raise FileError(f"{path} is damaged or cut short: the data of {name} (shape {tuple(shape)}, bytes {begin} to {end}) does not fit it")
    file.seek(start + begin)
    try:
        array = np.empty(shape, dtype)
    except (ValueError, MemoryError) as error:  # more axes or a larger size than NumPy knows
        raise FileError(f"{path}: {name} cannot be read: {error}") from error
    if file.readinto(array.reshape(-1).view(np.uint8)) != array.nbytes:
        raise FileError(f"{path}: the file ended while {name} was read")
    return array


def _write_npz(file, arrays) -> None:
    np.savez(file, **arrays)


def _write_npy(file, arrays) -> None:
    (array,) = arrays.values()
    np.save(file, array, allow_pickle=False)


def _write_safetensors(file, arrays) -> None:
    codes = {name: code for code, name in _SAFETENSORS_NAMES.items()}
    header, offset = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": codes[array.dtype.name], "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for array in arrays.values():
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
