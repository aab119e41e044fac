"""One attention problem with everything that decides a run: shapes, options, memory layouts and values.

A `Case` is plain data. The same case gives the same bits on every machine and in every array library, so a failure found
anywhere can be replayed anywhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace

import numpy as np

from ..dispatch import OPERANDS
from ..problem import DTYPES, Problem, make_problem
from .values import BITS, HIDDEN, RECIPES, SENTINEL, decode, encode, fill

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
    """A complete attention problem, ready to be run.

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
        if 0 in self.out.step or 0 in self.lse.step:
            raise ValueError("out and lse must not be broadcast: a step of 0 makes several results share one element")

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
    def work(self) -> int:
        """Scores in the problem: what the time of the reference is proportional to."""
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k

    def memory(self) -> dict[str, Memory]:
        """The memory of every operand, keyed by its name: inputs filled, outputs and all surroundings set to `SENTINEL`."""
        problem = self.problem
        memory = {}
        for name in OPERANDS:
            shape = getattr(problem, f"{name}_shape")
            dtype = problem.lse_dtype if name == "lse" else self.dtype
            memory[name] = Memory.filled(dtype, shape, getattr(self, name), SENTINEL[dtype])
        inputs = [memory[name] for name in "qkv"]
        rng = np.random.default_rng(self.seed)
        shapes = [tuple(1 if s == 0 else n for n, s in zip(m.shape, m.strides, strict=True)) for m in inputs]
        values = fill(self.values, self.dtype, rng, *shapes)
        garbage = {"finite": 3000.0, "nan": np.nan, "inf": np.inf}[self.hidden]
        queries, keys = touched(problem)
        for m, x, rows in zip(inputs, values, (queries, keys, keys), strict=True):
            m.bits[:] = encode(garbage, self.dtype)
            m.view()[...] = encode(x, self.dtype)
            if self.hidden != "finite" and m.strides[1] != 0:
                m.view()[:, ~rows] = encode(garbage, self.dtype)
        return memory

    def to_json(self) -> str:
        """One line of JSON; `from_json` is its inverse."""
        plain = asdict(Placement())
        data = {name: value for name, value in asdict(self).items() if value != _DEFAULTS[name]}
        for name in set(OPERANDS) & set(data):
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
        unknown = set(data) - set(_DEFAULTS)
        if unknown:
            raise ValueError(f"not a case: unknown fields {', '.join(sorted(unknown))}")
        try:
            for name in OPERANDS:
                if name in data:
                    data[name] = Placement(**{key: tuple(x) if isinstance(x, list) else x for key, x in data[name].items()})
            if data.get("window") is not None:
                data["window"] = tuple(data["window"])
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
        return f"Case({', '.join(shown)})"

    def _repr_pretty_(self, printer, cycle):
        """What Hypothesis and IPython print."""
        printer.text(repr(self))

    def snippet(self, *, family=None, library="numpy") -> str:
        """Python source that runs the case again."""
        return f"from numbaflash.testing import Case, Placement, run_case\n\nrun_case({self!r}, family={family!r}, library={library!r})\n"


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


_DEFAULTS = asdict(Case())
