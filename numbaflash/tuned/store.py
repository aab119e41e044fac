"""Tables of tuned choices in files: one JSON file a model of GPU or processor.

Those of the user lie in ``NUMBAFLASH_TUNE_DIR``, else ``$XDG_CONFIG_HOME/numbaflash/tuned``, else ``~/.config/numbaflash/tuned``.
``NUMBAFLASH_TUNE=0`` leaves all of them out, and those of the package too. A process reads a file once. Each entry names a digest of the kernels that
were measured: once they are others it is not used any more, and the log says so. A file that cannot be read is left out in the same way.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ..toolchain.cache import lock_file, write_whole
from ..toolchain.log import logger

FORMAT = 1
_PACKAGE = Path(__file__).resolve().parent.parent
SHIPPED = _PACKAGE / "tuned"
"""Folder of the tables that come with the package."""


class TableError(ValueError):
    """A file that is no table; the message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A choice that was measured to be faster than the family's own.

    Attributes
    ----------
    family, direction, key : str
        Where it is used; the key is that of `numbaflash.tuned.keys.key_of`.
    config : dict
        The fields of the config in which candidates differ.
    seconds, default_seconds : float
        Medians of the two.
    problem : str
        What was measured.
    date : str
        Of the measurement, in UTC: 2026-12-01T04:20:09Z.
    sources : str
        `sources_of` the family.
    version : str
        Of numbaflash.
    """

    family: str
    direction: str
    key: str
    config: dict
    seconds: float
    default_seconds: float
    problem: str
    date: str
    sources: str
    version: str

    @property
    def place(self) -> tuple[str, str, str]:
        """What no other entry of a table has."""
        return self.family, self.direction, self.key

    @property
    def is_stale(self) -> bool:
        """Other kernels were measured than there are now."""
        return self.sources != sources_of(self.family)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the config of a plan comes from, when it is not its family's own choice.

    Attributes
    ----------
    file : str
    date : str
        Of the measurement.
    speedup : float
        Time of the family's own choice by that of this one, as measured then.
    """

    file: str
    date: str
    speedup: float

    def __str__(self):
        return f"{self.speedup:.2f} times as fast as the family's own choice on {self.date[:10]}, says {self.file}"


def directory() -> Path:
    """Folder of the user's tables (it need not exist)."""
    chosen = os.environ.get("NUMBAFLASH_TUNE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    with suppress(RuntimeError):  # no home folder
        return (Path(base) if base else Path.home() / ".config") / "numbaflash" / "tuned"
    return Path(tempfile.gettempdir()) / f"numbaflash-tuned-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def is_off() -> bool:
    """Whether ``NUMBAFLASH_TUNE=0`` leaves all tables out."""
    return os.environ.get("NUMBAFLASH_TUNE", "1") in ("", "0")


def path_of(model: str, folder: Path | None = None) -> Path:
    """File of a model's table."""
    return (folder or directory()) / (re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") + ".json")


def table_of(model: str) -> dict[tuple[str, str, str], tuple[Entry, Origin]]:
    """What dispatch may use on a device, by `Entry.place`: entries of the user, else of the package. Stale ones are left out."""
    return {} if is_off() else _table(model, path_of(model), path_of(model, SHIPPED))


@functools.lru_cache(maxsize=64)
def _table(model, *paths):
    found = {}
    for path in reversed(paths):
        try:
            entries = read(path, model)
        except FileNotFoundError:
            continue
        except (OSError, TableError) as error:
            logger.warning("the tuned choices in %s are not used: %s", path, error)
            continue
        stale = sorted({entry.family for entry in entries if entry.is_stale})
        if stale:
            logger.warning(
                "choices for %s in %s were tuned with other kernels than these and are not used; numbaflash tune measures anew",
                ", ".join(stale),
                path,
            )
        for entry in entries:
            if not entry.is_stale:
                found[entry.place] = entry, Origin(str(path), entry.date, entry.default_seconds / entry.seconds)
    return found


def forget() -> None:
    """Read every file anew when it is needed next."""
    _table.cache_clear()


def read(path: Path, model: str | None = None) -> list[Entry]:
    """The entries of a file, stale ones too.

    Raises
    ------
    TableError
        For a file that is no table of this format, or one of another model.
    OSError
        For a file that cannot be read.
    """
    return _parsed(path.read_bytes(), model)[1]


def model_in(path: Path) -> str:
    """The model whose table a file is; TableError or OSError as `read`."""
    return _parsed(path.read_bytes(), None)[0]


def _parsed(data: bytes, model: str | None) -> tuple[str, list[Entry]]:
    try:
        told = json.loads(data)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise TableError(f"it is damaged, no JSON: {error}") from None
    if not isinstance(told, dict) or not isinstance(told.get("device"), str) or not isinstance(told.get("entries"), list):
        raise TableError("it must be a JSON object with format, device and entries")
    if told.get("format") != FORMAT:
        raise TableError(f"its format is {told.get('format')!r}, this version of numbaflash reads {FORMAT}")
    if model is not None and told["device"] != model:
        raise TableError(f"it is of {told['device']}, not of {model}")
    return told["device"], [_entry(each, n) for n, each in enumerate(told["entries"])]


_WORDS = ("family", "direction", "key", "problem", "date", "sources", "version")


def _entry(told, n) -> Entry:
    names = {field.name for field in fields(Entry)}
    if not isinstance(told, dict) or set(told) != names:
        raise TableError(f"entry {n} must have {', '.join(sorted(names))}")
    for name in _WORDS:
        if not isinstance(told[name], str):
            raise TableError(f"{name} of entry {n} must be text; got {told[name]!r}")
    for name in ("seconds", "default_seconds"):
        if isinstance(told[name], bool) or not isinstance(told[name], (int, float)) or not 0 < told[name] < float("inf"):
            raise TableError(f"{name} of entry {n} must be a positive number; got {told[name]!r}")
    if not isinstance(told["config"], dict):
        raise TableError(f"config of entry {n} must be an object; got {told['config']!r}")
    return Entry(**told | {"config": {name: tuple(x) if isinstance(x, list) else x for name, x in told["config"].items()}})


def store(model: str, entries: Iterable[Entry], drop: Iterable[tuple[str, str, str]] = (), folder: Path | None = None) -> Path:
    """Add entries to a model's table, in the place of older ones with the same key, and drop those of other keys that are named.

    What other processes store meanwhile is kept. A file that is no table is moved aside.

    Raises
    ------
    OSError
        When the file cannot be written.
    """
    path, added = path_of(model, folder), list(entries)
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(path.with_suffix(".lock")):
        kept = {entry.place: entry for entry in _read_or_move(path, model)}
        for place in drop:
            kept.pop(place, None)
        kept |= {entry.place: entry for entry in added}
        _write(path, model, kept.values())
    forget()
    return path


def clear(path: Path, wanted=lambda entry: True) -> int:
    """Delete the entries of a file that are wanted away, and the file when none is left; returns how many those were.

    Raises
    ------
    TableError, OSError
        As `read`; a file that is no table is left as it is.
    """
    with lock_file(path.with_suffix(".lock")):
        model, entries = _parsed(path.read_bytes(), None)
        kept = [entry for entry in entries if not wanted(entry)]
        if kept:
            _write(path, model, kept)
        else:
            path.unlink()
    forget()
    return len(entries) - len(kept)


def _read_or_move(path, model):
    try:
        return read(path, model)
    except FileNotFoundError:
        return []
    except TableError as error:
        aside = path.with_suffix(".damaged")
        os.replace(path, aside)
        logger.warning("%s was moved to %s: %s", path, aside, error)
        return []


def _write(path, model, entries):
    told = {"format": FORMAT, "device": model, "entries": [asdict(entry) for entry in sorted(entries, key=lambda entry: entry.place)]}
    write_whole(path, (json.dumps(told, indent=1) + "\n").encode())


@functools.cache
def sources_of(family: str) -> str:
    """Digest of what decides how fast a family's configs are: its own folder, what the families share, and the instructions. "" where there is no
    such family."""
    from ..dispatch import FAMILIES

    if family not in FAMILIES:
        return ""
    kernels, digest = _PACKAGE / "kernels", hashlib.sha256()
    others = [kernels / name for name in FAMILIES if name != family]
    for folder in (kernels, _PACKAGE / "ptx"):
        for path in sorted(folder.rglob("*.py")):
            if not any(path.is_relative_to(other) for other in others):
                data = path.read_bytes()
                digest.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]


def now() -> str:
    """The date of an entry."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
