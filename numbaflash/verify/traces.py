"""The calls of a program, from the trace that `numbaflash.record` wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..problem import DTYPES, LENGTH_DTYPES, NEEDS
from ..recording import FORMAT
from .shapes import NUMBERS, Call

ARRAYS = ("mask", "block_mask", "bias", "alibi_slopes", "sinks", "seqlens_q", "seqlens_k", "cu_seqlens_q", "cu_seqlens_k", "page_table")
OPERANDS = {"forward": ("q", "k", "v"), "backward": ("dout", "q", "k", "v", "out", "lse"), "decode": ("q", "k_cache", "v_cache", "seqlens_k")}
FIELDS = ("function", "direction", "library", "device", "arrays", "options", "count")


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file and the line."""


def read_trace(path) -> list[Call]:
    """The kinds of calls in a trace, each with how often it was made, the most frequent first.

    Raises
    ------
    TraceError
        For a file that is no trace, or has a line that is no call, shapes that do not fit, or counts that do not follow each other.
    OSError
        When there is no such file.
    """
    path = Path(path)
    found: dict[str, Call] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                told = _object(line)
                if number == 1:
                    if told.get("trace") != FORMAT:
                        raise TraceError(f'must begin with a line {{"numbaflash": ..., "trace": {FORMAT}}}, as numbaflash.record writes it')
                    continue
                count = told.pop("count", None)
                kind = json.dumps(told, sort_keys=True)
                if kind not in found:
                    found[kind] = _call(told, number)
                    found[kind].problem  # noqa: B018  whether the shapes fit
                    expected = 1
                else:
                    expected = found[kind].count + 1
                if isinstance(count, bool) or count != expected:
                    raise TraceError(
                        f"count must be {expected}, one more than the last of its kind; got {count!r}. Lines are missing or were changed"
                    )
                found[kind] = replace(found[kind], count=count)
            except (TypeError, ValueError) as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
    if not found:
        raise TraceError(f"{path} has no call: nothing was called while it was recorded")
    return sorted(found.values(), key=lambda call: -call.count)


def _object(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise TraceError("the line does not end; the file was cut off")
    try:
        told = json.loads(line)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TraceError(f"no JSON: {error}") from None
    if not isinstance(told, dict):
        raise TraceError(f"must be a JSON object; got {type(told).__name__}")
    return told


def _call(told: dict[str, Any], number: int) -> Call:
    unknown, absent = set(told) - set(FIELDS), set(FIELDS) - {"count"} - set(told)
    if unknown or absent:
        raise TraceError(
            f"must have the fields {', '.join(FIELDS)}; {', '.join(sorted(unknown | absent))} {'is unknown' if unknown else 'is missing'}"
        )
    direction = told["direction"]
    if direction not in OPERANDS:
        raise TraceError(f"direction must be one of {', '.join(OPERANDS)}; got {direction!r}")
    arrays, options = told["arrays"], told["options"]
    if not isinstance(arrays, dict) or not isinstance(options, dict):
        raise TraceError("arrays and options must be JSON objects")
    described = {name: _array(name, each) for name, each in arrays.items()}
    missing = [name for name in OPERANDS[direction] if name not in described]
    if missing:
        raise TraceError(f"a {direction} call has {', '.join(OPERANDS[direction])}; {', '.join(missing)} is missing")
    names = ("q", "k_cache", "v_cache") if direction == "decode" else NEEDS
    dtypes = {described[name][1] for name in names}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise TraceError(f"q, k and v must have one dtype of {', '.join(DTYPES)}; got {', '.join(sorted(map(str, dtypes)))}")
    numbers = {name: _value(options[name]) for name in NUMBERS[direction] if options.get(name) is not None}
    if numbers.get("dropout") == 0:
        del numbers["dropout"]
    if numbers.get("window") == (None, None):
        del numbers["window"]
    needs = options.get("needs", list(NEEDS))
    if not isinstance(needs, list):
        raise TraceError(f"needs must be a list of names; got {needs!r}")
    given = {name: _usual(*described[name]) for name in ARRAYS if name in described}
    function = told["function"] if isinstance(told["function"], str) else direction
    return Call(
        name=f"{function} (line {number})",
        direction=direction,
        q=described[names[0]][0],
        k=described[names[1]][0],
        v=described[names[2]][0],
        dtype=dtypes.pop(),
        numbers=numbers,
        arrays=given,
        strides={name: described[name][2] for name in ("dout", *names) if name in described},
        deterministic=options.get("deterministic") is True,
        needs=tuple(needs),
        count=0,
    )


def _array(name, told):
    if not isinstance(told, dict) or not isinstance(told.get("shape"), list):
        raise TraceError(f"{name} must be an object with a shape; got {told!r}")
    shape = told["shape"]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
        raise TraceError(f"the shape of {name} must hold numbers of elements; got {shape!r}")
    return tuple(shape), told.get("dtype"), str(told.get("strides", "unknown"))


def _usual(shape, dtype, strides):
    if dtype is not None and dtype not in (*DTYPES, *LENGTH_DTYPES, "bool"):
        raise TraceError(f"dtype must be one of {', '.join((*DTYPES, *LENGTH_DTYPES))} or bool; got {dtype!r}")
    return shape, dtype or "bool"  # a BlockMask tells none


def _value(x):
    return tuple(x) if isinstance(x, list) else x
