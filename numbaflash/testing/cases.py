"""One attention problem with everything that decides a run: shapes, options, memory layouts and values.

A `Case` is plain data. The same case gives the same bits on every machine and in every array library, so a failure found
anywhere can be replayed anywhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from typing import ClassVar

import numpy as np

from .. import reference
from ..call import RESULTS
from ..dispatch import BACKWARD_OPERANDS, OPERANDS
from ..problem import DTYPES, NEEDS, Problem, check_needs, make_problem
from .values import BITS, HIDDEN, RECIPES, SENTINEL, decode, encode, fill, fill_gradient

GUARD = 64  # elements before and after every operand, watched for stray writes


@dataclass(frozen=True, slots=True)
class Placement:
    """How an operand lies in memory. An empty tuple means the plain contiguous choice.

    Attributes
    ----------
    order : tuple of int
        Axes in memory, the slowest first: ``(0, 2, 1, 3)`` is a (B, H, S, D) array passed as a transposed view.
    step : tuple of int
        Every step-th element of an axis is used. Negative runs backwards, 0 repeats one element (inputs only).
    pad : tuple of int
        Unused elements at the end of each axis.
    offset : int
        Elements between an address aligned to 64 bytes and the operand.
    """

    order: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    pad: tuple[int, ...] = ()
    offset: int = 0

    def resolve(self, shape):
        """(elements of memory, first element, strides in elements) of an operand of this shape, guards not counted."""
        rank = len(shape)
        order = self.order or tuple(range(rank))
        step = self.step or (1,) * rank
        pad = self.pad or (0,) * rank
        if sorted(order) != list(range(rank)) or len(step) != rank or len(pad) != rank or min(pad) < 0 or self.offset < 0:
            raise ValueError(f"{self} does not fit an operand of {rank} axes")
        if 0 in shape:  # no element to lay out; NumPy accepts few strides here
            return self.offset, self.offset, (1,) * rank
        size, first, strides = 1, self.offset, [0] * rank
        for axis in reversed(order):
            n = shape[axis]
            strides[axis] = step[axis] * size
            if step[axis] < 0:
                first += (n - 1) * -step[axis] * size
            size *= (1 if step[axis] == 0 else n * abs(step[axis])) + pad[axis]
        return size + self.offset, first, tuple(strides)

    def without_negative(self) -> Placement:
        """The same memory walked forwards, for libraries that have no negative strides."""
        return replace(self, step=tuple(abs(s) for s in self.step))


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one operand: a flat array of bits, and the view of it that is the operand."""

    dtype: str
    bits: np.ndarray
    shape: tuple[int, ...]
    first: int
    strides: tuple[int, ...]

    @classmethod
    def filled(cls, dtype, shape, placement, pattern) -> Memory:
        size, first, strides = placement.resolve(shape)
        itemsize = BITS[dtype].itemsize
        room = np.empty((size + 2 * GUARD) * itemsize + 64, np.uint8)
        skip = -room.ctypes.data % 64
        bits = room[skip : skip + (size + 2 * GUARD) * itemsize].view(BITS[dtype])
        bits[:] = pattern
        return cls(dtype, bits, tuple(shape), GUARD + first, strides)

    def view(self, bits=None, dtype=None) -> np.ndarray:
        """The operand as a strided view of its bits (or of another flat array of the same size)."""
        bits = self.bits if bits is None else bits
        itemsize = bits.itemsize
        return np.ndarray(
            self.shape, dtype or bits.dtype, buffer=bits, offset=self.first * itemsize, strides=tuple(s * itemsize for s in self.strides)
        )

    def outside(self) -> np.ndarray:
        """Boolean, flat: elements that do not belong to the operand."""
        mask = np.ones(self.bits.size, bool)
        self.view(mask)[...] = False
        return mask

    def decoded(self) -> np.ndarray:
        """The operand's values in float64."""
        return decode(self.view(), self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A complete forward problem, ready to be run.

    Attributes
    ----------
    dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v
        As in `numbaflash.problem.Problem`.
    scale, causal, window
        As `numbaflash.forward` takes them.
    values : str
        Recipe for q, k and v: one of `RECIPES`.
    hidden : str
        What lies where no visible pair touches: one of `HIDDEN`.
    q, k, v, out, lse : Placement
        Memory layout of each operand.
    give_out : bool
        Whether ``out=`` and ``lse=`` are handed in (laid out as above) or left to the library to allocate.
    return_lse : bool
    seed : int
        Of the values.

    Examples
    --------
    >>> case = Case(dtype="float32", seqlen_q=3, seqlen_k=5, head_dim=8, head_dim_v=8, causal=True)
    >>> case.problem.right, case.memory()["q"].shape
    (0, (1, 3, 1, 8))
    >>> Case.from_json(case.to_json()) == case
    True
    """

    direction: ClassVar[str] = "forward"
    operands: ClassVar[tuple[str, ...]] = OPERANDS
    """Names of the arrays that have a `Placement`, inputs first."""

    dtype: str = "float32"
    batch: int = 1
    seqlen_q: int = 64
    seqlen_k: int = 64
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    scale: float | None = None
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    values: str = "normal"
    hidden: str = "finite"
    q: Placement = field(default_factory=Placement)
    k: Placement = field(default_factory=Placement)
    v: Placement = field(default_factory=Placement)
    out: Placement = field(default_factory=Placement)
    lse: Placement = field(default_factory=Placement)
    give_out: bool = True
    return_lse: bool = True
    seed: int = 0

    def __post_init__(self):
        for name, value, allowed in (("dtype", self.dtype, DTYPES), ("values", self.values, RECIPES), ("hidden", self.hidden, HIDDEN)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        for name in dict.fromkeys(("out", "lse", *self.results)):
            if 0 in getattr(self, name).step:
                raise ValueError(f"{name} must not be broadcast: a step of 0 makes several results share one element")

    @property
    def problem(self) -> Problem:
        """The validated problem; raises what `numbaflash.forward` would raise for it."""
        return make_problem(
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            (self.batch, self.seqlen_k, self.kv_heads, self.head_dim),
            (self.batch, self.seqlen_k, self.kv_heads, self.head_dim_v),
            (self.dtype,) * 3,
            **self.options,
        )

    @property
    def options(self) -> dict:
        """The keyword arguments of `numbaflash.forward` that say what is computed."""
        return {"scale": self.scale, "causal": self.causal, "window": self.window}

    @property
    def results(self) -> tuple[str, ...]:
        """Operands that the call writes."""
        return RESULTS[self.direction]

    @property
    def present(self) -> tuple[str, ...]:
        """Operands that take part."""
        return self.operands

    @property
    def work(self) -> int:
        """Scores in the problem: what the time of the reference is proportional to."""
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k

    def memory(self) -> dict[str, Memory]:
        """The memory of every operand, keyed by its name: inputs filled, results and all surroundings set to `SENTINEL`."""
        problem, memory = self.problem, {}
        for name in self.present:
            dtype = problem.dtype_of(name)
            memory[name] = Memory.filled(dtype, problem.shape_of(name), getattr(self, name), SENTINEL[dtype])
        queries, keys = touched(problem)
        shapes = [_distinct(memory[name]) for name in "qkv"]
        values = fill(self.values, self.dtype, np.random.default_rng(self.seed), *shapes)
        for name, x, rows in zip("qkv", values, (queries, keys, keys), strict=True):
            self._fill_input(memory[name], x, ~rows)
        return memory

    def _fill_input(self, memory, values, unseen, axis=1):
        """Values in an operand, garbage around it and, if `hidden` says so, in its rows that take no part."""
        garbage = encode({"finite": 3000.0, "nan": np.nan, "inf": np.inf}[self.hidden], memory.dtype)
        memory.bits[:] = garbage
        memory.view()[...] = encode(values, memory.dtype)
        if self.hidden != "finite" and memory.strides[axis] != 0:
            memory.view()[(slice(None),) * axis + (unseen,)] = garbage

    def to_json(self) -> str:
        """One line of JSON; `from_json` is its inverse."""
        plain, defaults = asdict(Placement()), _defaults(type(self))
        data = {name: value for name, value in asdict(self).items() if value != defaults[name]}
        for name in set(self.operands) & set(data):
            data[name] = {key: value for key, value in data[name].items() if value != plain[key]}
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Build a case from the text of `to_json`. Fields that are left out keep their defaults."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a case: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"not a case: expected a JSON object, got {type(data).__name__}")
        unknown = set(data) - set(_defaults(cls))
        if unknown:
            raise ValueError(f"not a case: unknown fields {', '.join(sorted(unknown))}")
        try:
            for name in cls.operands:
                if name in data:
                    data[name] = Placement(**{key: tuple(x) if isinstance(x, list) else x for key, x in data[name].items()})
            for name in ("window", "needs"):
                if data.get(name) is not None:
                    data[name] = tuple(data[name])
            return cls(**data)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a case: {error}") from None

    def __repr__(self) -> str:
        """A Python expression that makes the case again, defaults left out."""
        shown = []
        for f in fields(self):
            value = getattr(self, f.name)
            plain = f.default_factory() if callable(f.default_factory) else f.default
            if value != plain:
                shown.append(f"{f.name}={_placement_repr(value) if isinstance(value, Placement) else repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer, cycle):
        """What Hypothesis and IPython print."""
        printer.text(repr(self))

    def snippet(self, *, family=None, library="numpy") -> str:
        """Python source that runs the case again."""
        run = "run_case" if self.direction == "forward" else "run_backward_case"
        return f"from numbaflash.testing import {type(self).__name__}, Placement, {run}\n\n{run}({self!r}, family={family!r}, library={library!r})\n"


@dataclass(frozen=True, slots=True, repr=False)
class BackwardCase(Case):
    """A complete backward problem, ready to be run.

    ``out`` and ``lse`` are inputs here: what the float64 reference computes, rounded. In rows that see no key, ``dout``, ``dlse`` and ``out``
    hold what `hidden` says, as q does.

    Attributes
    ----------
    dout, dlse, dq, dk, dv : Placement
        Memory layouts beyond those of a `Case`, whose attributes are meant as there; `return_lse` has no meaning.
    give_out : bool
        Whether ``dq=``, ``dk=`` and ``dv=`` are handed in or left to the library to allocate.
    with_dlse : bool
        Whether there is a gradient of the LSE.
    deterministic : bool
        As `numbaflash.backward` takes it.
    needs : tuple of str
        As `numbaflash.backward` takes it, in the order q, k, v.

    Examples
    --------
    >>> case = BackwardCase(seqlen_q=3, seqlen_k=5, head_dim=8, head_dim_v=8, needs=("q",))
    >>> case.present
    ('dout', 'q', 'k', 'v', 'out', 'lse', 'dq')
    """

    direction: ClassVar[str] = "backward"
    operands: ClassVar[tuple[str, ...]] = BACKWARD_OPERANDS[:-1]

    dout: Placement = field(default_factory=Placement)
    dlse: Placement = field(default_factory=Placement)
    dq: Placement = field(default_factory=Placement)
    dk: Placement = field(default_factory=Placement)
    dv: Placement = field(default_factory=Placement)
    with_dlse: bool = False
    deterministic: bool = False
    needs: tuple[str, ...] = NEEDS

    def __post_init__(self):
        Case.__post_init__(self)
        if self.needs != check_needs(self.needs):
            raise ValueError(f"needs must be a tuple in the order q, k, v; got {self.needs!r}")

    @property
    def present(self) -> tuple[str, ...]:
        absent = {f"d{name}" for name in NEEDS if name not in self.needs} | ({"dlse"} if not self.with_dlse else set())
        return tuple(name for name in self.operands if name not in absent)

    def memory(self) -> dict[str, Memory]:
        memory = Case.memory(self)
        problem, (queries, _) = self.problem, touched(self.problem)
        rng = np.random.default_rng((self.seed, 1))
        for name, axis in (("dout", 1), ("dlse", 2)):
            if name in memory:
                values = fill_gradient(self.values, self.dtype, rng, _distinct(memory[name]))
                self._fill_input(memory[name], values, ~queries, axis)
        out, lse = reference.forward(problem, *(memory[name].decoded() for name in "qkv"))
        self._fill_input(memory["out"], out, ~queries)
        self._fill_input(memory["lse"], lse, np.zeros(problem.seqlen_q, bool), 2)  # -inf in rows without keys is what tells them
        return memory


def _distinct(memory):
    """Shape of the values that a strided operand can hold: 1 along an axis that repeats one element."""
    return tuple(1 if s == 0 else n for n, s in zip(memory.shape, memory.strides, strict=True))


def touched(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Boolean (seqlen_q,) and (seqlen_k,): queries that see a key, keys that a query sees."""
    i = np.arange(problem.seqlen_q) + problem.offset
    lo = np.zeros_like(i) if problem.left is None else np.maximum(i - problem.left, 0)
    hi = np.full_like(i, problem.seqlen_k) if problem.right is None else np.minimum(i + problem.right + 1, problem.seqlen_k)
    sees = hi > lo
    edges = np.zeros(problem.seqlen_k + 1, np.int64)
    np.add.at(edges, lo[sees], 1)
    np.add.at(edges, hi[sees], -1)
    return sees, np.cumsum(edges)[: problem.seqlen_k] > 0


def _placement_repr(placement) -> str:
    plain = Placement()
    shown = [f"{f.name}={getattr(placement, f.name)!r}" for f in fields(placement) if getattr(placement, f.name) != getattr(plain, f.name)]
    return f"Placement({', '.join(shown)})"


@cache
def _defaults(kind) -> dict:
    return asdict(kind())
