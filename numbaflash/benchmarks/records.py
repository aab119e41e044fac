"""Results on disk: one JSON object a line, with the same fields from every benchmark."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).parents[2]
RESULTS = _CHECKOUT / "bench" / "results"
"""Where the project's own benchmarks keep what they have measured."""

FIELDS = {
    "bench": str,
    "gpu": str,
    "direction": str,
    "dtype": str,
    "batch": int,
    "seqlen_q": int,
    "seqlen_k": int,
    "heads": int,
    "kv_heads": int,
    "head_dim": int,
    "head_dim_v": int,
    "causal": (bool, str),
    "library": str,
    "version": str,
    "ms": (int, float, type(None)),
    "tflops": (int, float, type(None)),
}
"""Fields that every record has; further ones say more. ``ms`` is null only beside ``skipped`` (why there is none) or
``quantity`` (what else was measured)."""

CELL = ("dtype", "batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v", "causal")
"""Fields that say what was computed."""

BEYOND = ("lengths", "page_size", "option")
"""Fields that say more of it, where there is more to say."""


def cell_of(fields) -> tuple:
    """What was computed, of a record or of the fields of a cell."""
    return tuple(fields[name] for name in CELL) + tuple(fields.get(name) for name in BEYOND)


def fields_of(cell: tuple) -> dict:
    """The fields that `cell_of` made a tuple of."""
    return dict(zip(CELL + BEYOND, cell, strict=True))


def check(record: dict) -> dict:
    """Return the record, or raise a ValueError that names the field that is missing or wrong."""
    for name, kind in FIELDS.items():
        if name not in record:
            raise ValueError(f"record has no field {name!r}: {record}")
        value = record[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"field {name!r} of a record must be {_kind_name(kind)}; got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"field {name!r} of a record must be finite; got {value!r}")
    if record["ms"] is None and not (record.get("skipped") or record.get("quantity")):
        raise ValueError(f"a record without ms must say why in 'skipped', or what else it holds in 'quantity': {record}")
    return record


def _kind_name(kind) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("null" if k is type(None) else k.__name__ for k in kinds)


def write(path, records) -> Path:
    """Write all records to a file, replacing it at once, so that a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(json.dumps(check(record), allow_nan=False) + "\n" for record in records))
    temporary.replace(path)
    return path


def read(*paths) -> list[dict]:
    """Records of one or more files, in order, each checked."""
    records = []
    for path in paths:
        try:
            text = Path(path).read_text()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} holds no records: {error}") from None
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    record = json.loads(line)
                    if not isinstance(record, dict):
                        raise ValueError("a line must hold one JSON object")
                    records.append(check(record))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None
    return records


def digest(recs) -> str:
    """A short name of records, by which a picture that was drawn of them is known."""
    lines = sorted(json.dumps(record, sort_keys=True) for record in recs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def slug(name: str) -> str:
    """A machine's name for a file name: "NVIDIA H200" is "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\b(nvidia|geforce|\(r\)|\(tm\))", "", name.lower())).strip("-") or "unknown"


def result_path(gpu: str, bench: str, out=None, date=None) -> Path:
    """``<out>/<date>-<gpu>-<bench>.jsonl``, with a number where a run of that day is there already."""
    folder = RESULTS if out is None else Path(out)
    stem = f"{date or datetime.date.today().isoformat()}-{slug(gpu)}-{bench}"
    path, n = folder / f"{stem}.jsonl", 1
    while path.exists():
        n += 1
        path = folder / f"{stem}-{n}.jsonl"
    return path


def run_fields(commit=None) -> dict:
    """Fields that are the same in every record of a run: when, by which command, from which commit, on which host software."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, "-m", _module(), *sys.argv[1:]]),
        "commit": commit or git_commit(),
        "python": platform.python_version(),
    }


def _module() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).stem


def git_commit() -> str | None:
    """Short hash of the checkout, with "+" when tracked files differ from it; None where the package is not in one of its own."""

    def git(*words, check):
        return subprocess.run(["git", *words], cwd=_CHECKOUT, capture_output=True, text=True, timeout=10, check=check)

    try:
        git("ls-files", "--error-unmatch", str(Path(__file__).relative_to(_CHECKOUT)), check=True)
        head = git("rev-parse", "--short", "HEAD", check=True).stdout.strip()
        dirty = git("diff", "--quiet", "HEAD", "--", "numbaflash", "bench", check=False).returncode
    except (OSError, subprocess.SubprocessError):
        return None
    return head + "+" * bool(dirty)


def gpu_fields() -> dict:
    """GPU, driver and CUDA of the current device, by way of torch."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
