"""What each kernel family can compute, found by asking the families; the tables in README.md and docs/ are printed here."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from . import dispatch
from .arrays import contiguous_strides
from .dispatch import CPU, BackwardLayouts, Device, Layout, Layouts
from .kernels.blocks import layout
from .problem import (
    DIFFERENTIABLE_OPTIONS,
    DTYPES,
    FEATURES,
    ITEMSIZE,
    MAX_CACHE_HEAD_DIM,
    MAX_HEAD_DIM,
    NEEDS,
    OPTIONS,
    PACKED,
    PACKED_FEATURE,
    Problem,
    make_decode_problem,
    make_problem,
)

CAPABILITIES = ((5, 0), (6, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
_SM_COUNTS = {(8, 0): 108, (9, 0): 132, (10, 0): 148}

NUMBERS = ("scale", "softcap", "dropout")
"""Options that are numbers and may change which kernel is needed, beside ``causal`` and ``window``."""

ABSENT_IN_PACKED = ("mask", "block_mask", "bias", "seqlens_q", "seqlens_k")
"""Arrays that packed sequences do not take."""

OTHER = -1
"""Stands for the next head dim that the family has."""

COLUMNS = {
    "causal": {"causal": True},
    "causal top_left": {"causal": "top_left"},
    "window": {"window": (128, 32)},
    "GQA, MQA": {"kv_heads": 2},
    "D != Dv": {"head_dim_v": OTHER},
    "no keys": {"seqlen_k": 0},
}
"""Columns of the table: an option's name and how it changes the plain problem."""


CACHE_COLUMNS = {
    "pages": {"paged": True},
    "pages of 1": {"paged": True, "page_size": 1},
    "several queries, causal": {"seqlen_q": 16, "causal": True},
    "window": {"window": (128, 0)},
    "softcap": {"softcap": 30.0},
    "ALiBi": {"alibi_slopes": True},
    "sinks": {"sinks": True},
    "GQA, MQA": {"kv_heads": 2},
    "D != Dv": {"head_dim_v": OTHER},
}
"""The same of `numbaflash.decode`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One family and dtype: head dims it computes (D = Dv), and for each column "yes", "no" or "some head dims"."""

    family: str
    devices: str
    dtype: str
    head_dims: str
    options: tuple[str, ...]


ASSUMED = "assumed"
"""What the name of a GPU says that need not be there."""


def assumed_device(arch: str) -> Device:
    """A GPU that need not be there, by architecture: "sm_90" is compute capability 9.0.

    Raises
    ------
    ValueError
        When `arch` is not an architecture.
    """
    found = re.fullmatch(r"sm_(\d+)(\d)a?", arch)
    if found is None:
        raise ValueError(f"a GPU architecture looks like sm_90; got {arch!r}")
    capability = (int(found[1]), int(found[2]))
    sm_count = _SM_COUNTS.get(capability, 100)
    return Device("cuda", 0, capability, sm_count, f"sm_{found[1]}{found[2]} ({ASSUMED}, {sm_count} multiprocessors)")


def contiguous_layouts(problem: Problem, *, lse: bool = True) -> Layouts:
    """Layouts of C-contiguous, aligned operands of a problem."""
    names = ("q", "k", "v", "out", *(("lse",) if lse else ()), *problem.options)
    return Layouts(**{name: _contiguous(problem, name) for name in names})


def contiguous_backward_layouts(problem: Problem, needs: tuple[str, ...] = NEEDS) -> BackwardLayouts:
    """The same of a backward call for the gradients of ``needs``, without a gradient of the LSE."""
    names = ("dout", "q", "k", "v", "out", "lse", *(f"d{name}" for name in needs), *problem.options)
    return BackwardLayouts(**{name: _contiguous(problem, name) for name in names})


def described_options(given: Mapping, shapes, dtype: str) -> dict:
    """Options in the words of `numbaflash.problem.make_problem`, where each array may be told by True: the usual one.

    Parameters
    ----------
    given : mapping
        Numbers as `numbaflash.forward` takes them. An array (of `OPTIONS`) is (shape, dtype), a dtype of None being the usual one, or True for one
        that serves all heads and batch entries: mask and bias (seqlen_q, seqlen_k), the bias of the dtype of q; a block mask without partial blocks;
        ``alibi_slopes`` and ``sinks`` (heads,); lengths (batch,) of int32. What is None or False is left out.
    shapes : sequence of tuple of int
        Of q, k and v: with 4 axes, or with 3 for packed sequences, which take less than that.
    dtype : str
        Of q, k and v.

    Raises
    ------
    TypeError
        For a name that is no option, and for an array that is told in another way.
    ValueError
        For an option that packed sequences do not have.
    """
    q_shape, k_shape = tuple(shapes[0]), tuple(shapes[1])
    packed = len(q_shape) == 3
    batch, seqlen_q, seqlen_k = (0, 0, 0) if packed else (q_shape[0], q_shape[1], k_shape[1])
    heads = (q_shape[-2],)
    usual = {
        "mask": ((seqlen_q, seqlen_k), "bool"),
        "block_mask": ((1, 1, layout.words(seqlen_q, seqlen_k, 0)), "int32"),
        "bias": ((seqlen_q, seqlen_k), dtype),
        "alibi_slopes": (heads, "float32"),
        "sinks": (heads, "float64" if dtype == "float64" else "float32"),
        "seqlens_q": ((batch,), "int32"),
        "seqlens_k": ((batch,), "int32"),
    }
    found = {}
    for name, value in given.items():
        if name not in usual and name not in NUMBERS:
            raise TypeError(f"options must be of {', '.join((*NUMBERS, *usual))}; got {name!r}")
        if value is None or value is False:
            continue
        if packed and name in ABSENT_IN_PACKED:
            raise ValueError(f"packed sequences have no {name.removeprefix('block_')}; leave it out")
        if name in usual and value is not True:
            try:
                shape, own = value
                value = tuple(operator.index(n) for n in shape), usual[name][1] if own is None else str(own)
            except (TypeError, ValueError):
                raise TypeError(f"{name} must be True or a pair (shape, dtype); got {value!r}") from None
        found[name] = usual[name] if name in usual and value is True else value
    return found


def _contiguous(problem, operand) -> Layout:
    shape = problem.shape_of(operand)
    strides = contiguous_strides(shape, ITEMSIZE[problem.dtype_of(operand)])
    if operand in OPTIONS + PACKED:  # broadcast along axes of one element
        strides = tuple(0 if n == 1 else step for n, step in zip(shape, strides, strict=True))
    return Layout(shape, strides)


def rows(direction: str = "forward") -> list[Row]:
    """The support table of "forward" (and gradients) or "decode", the preferred family first."""
    problem, columns, most = _TABLES[direction]
    table = []
    for name in dispatch.FAMILIES:
        supports = dispatch.family(name, direction).supports
        for dtype in DTYPES:
            device, devices = _devices(supports, problem, dtype)
            if device is not None:
                dims = [d for d in range(1, most + 1) if not supports(problem(dtype, d), device)]
                options = tuple(_option(supports, problem, device, dtype, dims, change) for change in columns.values())
                table.append(Row(name, devices, dtype, dims_text(dims), options))
    return table


def markdown(direction: str = "forward") -> str:
    """The support table in Markdown, rows that differ only in dtype joined."""
    joined: dict[Row, list[str]] = {}
    for row in rows(direction):
        joined.setdefault(replace(row, dtype=""), []).append(row.dtype)
    head = ("family", "runs on", "dtype", "head dims", *_TABLES[direction][1])
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row, dtypes in joined.items():
        lines.append("| " + " | ".join((f"`{row.family}`", row.devices, ", ".join(dtypes), row.head_dims, *row.options)) + " |")
    return "\n".join(lines)


def features() -> dict[str, dict[str, str]]:
    """Each option of the score with what the families have of it: "yes", "forward" (no gradients), "gradients" (no forward) or "no"."""
    names = {(True, True): "yes", (True, False): "forward", (False, True): "gradients", (False, False): "no"}
    packages = {name: [dispatch.family(name, direction) for direction in ("forward", "backward")] for name in dispatch.FAMILIES}
    every = (*FEATURES, PACKED_FEATURE)
    return {each: {name: names[tuple(each in package.FEATURES for package in pair)] for name, pair in packages.items()} for each in every}


def features_markdown() -> str:
    """`features` in Markdown; those with a gradient of their own are marked."""
    lines = ["| option | " + " | ".join(f"`{name}`" for name in dispatch.FAMILIES) + " |", "|" + " --- |" * (1 + len(dispatch.FAMILIES))]
    for name, cells in features().items():
        gradient = ", with its gradient" if name in DIFFERENTIABLE_OPTIONS else ""
        name = {PACKED_FEATURE: name, "block_mask": "`mask` that is a `BlockMask`"}.get(name, f"`{name}`")
        lines.append(f"| {name}{gradient} | " + " | ".join(cells.values()) + " |")
    return "\n".join(lines)


def dims_text(dims: list[int]) -> str:
    """Head dims in words: "1 to 256", "multiples of 8 from 8 to 256", or a list."""
    if not dims:
        return "none"
    low, high = dims[0], dims[-1]
    for step in (1, 2, 4, 8, 16, 32, 64):
        if dims == list(range(low, high + 1, step)) and low % step == 0 and len(dims) > 2:
            return f"{low} to {high}" if step == 1 else f"multiples of {step} from {low} to {high}"
    return ", ".join(map(str, dims))


def _problem(dtype, head_dim, *, kv_heads=4, seqlen_k=256, head_dim_v=None, **options) -> Problem:
    k_shape = (1, seqlen_k, kv_heads, head_dim)
    return make_problem((1, 256, 4, head_dim), k_shape, (*k_shape[:3], head_dim_v or head_dim), (dtype,) * 3, **options)


def _cache_problem(dtype, head_dim, *, kv_heads=4, head_dim_v=None, seqlen_q=1, paged=False, page_size=16, **options) -> Problem:
    leading = (16, page_size) if paged else (1, 256)
    shapes = (1, seqlen_q, 4, head_dim), (*leading, kv_heads, head_dim), (*leading, kv_heads, head_dim_v or head_dim)
    band = {name: options.pop(name) for name in ("causal", "window") if name in options}
    told = described_options(options | {"seqlens_k": True}, shapes, dtype)
    return make_decode_problem(*shapes, (dtype,) * 3, **band, **told, **({"page_table": ((1, 256 // page_size), "int32")} if paged else {}))


_TABLES = {"forward": (_problem, COLUMNS, MAX_HEAD_DIM), "decode": (_cache_problem, CACHE_COLUMNS, MAX_CACHE_HEAD_DIM)}


def _devices(supports, problem, dtype):
    """A device the family computes this dtype on, and every such device in words."""
    if any(not supports(problem(dtype, d), CPU) for d in (64, 128)):
        return CPU, "CPU"
    able = [c for c in CAPABILITIES if any(not supports(problem(dtype, d), Device("cuda", 0, c, 100, "gpu")) for d in (64, 128))]
    if not able:
        return None, "nothing"
    device = Device("cuda", 0, able[-1], 100, "gpu")
    names = [f"sm_{major}{minor}" for major, minor in able]
    if able[-1] == CAPABILITIES[-1] and able == list(CAPABILITIES[-len(able) :]):
        return device, "every GPU" if len(able) == len(CAPABILITIES) else f"GPUs from {names[0]} on"
    return device, ", ".join(names)


def _option(supports, problem, device, dtype, dims, change) -> str:
    tried = []
    for d, after in zip(dims, dims[1:] + dims[:1], strict=True):
        options = {name: after if value == OTHER else value for name, value in change.items()}
        tried.append(not supports(problem(dtype, d, **options), device))
    return "yes" if all(tried) else "some head dims" if any(tried) else "no"


if __name__ == "__main__":
    print(markdown(), features_markdown(), markdown("decode"), sep="\n\n")
