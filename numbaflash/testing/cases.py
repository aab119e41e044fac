"""One attention problem with everything that decides a run: shapes, options, memory layouts and values.

A `Case` is plain data. The same case gives the same bits on every machine and in every array library, so a failure found
anywhere can be replayed anywhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import cache
from math import prod
from typing import ClassVar

import numpy as np

from .. import reference
from ..block_mask import BlockMask
from ..dispatch import BACKWARD_OPERANDS
from ..kernels.blocks.layout import words
from ..problem import (
    DIFFERENTIABLE_OPTIONS,
    DTYPES,
    FORWARD_OPTIONS,
    ITEMSIZE,
    LENGTH_DTYPES,
    NEEDS,
    PACKED,
    PAGE_TABLE,
    Problem,
    check_needs,
    check_num_splits,
    make_decode_problem,
    make_packed_problem,
    make_problem,
)
from .memory import GUARD, Memory, Placement
from .plain import short_repr
from .sequences import Cache, Packed
from .values import (
    BIASES,
    HIDDEN,
    LENGTHS,
    MASKS,
    RECIPES,
    SENTINEL,
    encode,
    fill,
    fill_bias,
    fill_gradient,
    fill_lengths,
    fill_mask,
    fill_sinks,
    fill_slopes,
    garbage,
)
from .visibility import rows_within_lengths, taking_part, visible_pairs

ARRAYS = (*(name for name in FORWARD_OPTIONS if name != "block_mask"), *PACKED)
"""Options and boundaries that a caller has as arrays."""


@dataclass(frozen=True, slots=True)
class Case:
    """A complete forward problem, ready to be run.

    Attributes
    ----------
    dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v
        As in `numbaflash.problem.Problem`; of packed sequences, ``batch`` and the two lengths have no meaning.
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
    softcap : float or None
    dropout, dropout_seed : float, int
        The ``dropout`` and ``seed`` that `numbaflash.forward` takes.
    mask_shape, bias_shape, alibi_shape : tuple of int or None
        Shapes as the caller has them; None for no such array.
    bias_dtype : str or None
        None is `dtype`.
    with_sinks : bool
    as_blocks : bool
        The mask is handed over as a `numbaflash.BlockMask`.
    mask_values, bias_values : str
        Recipes: one of `MASKS`, one of `BIASES`.
    lengths_q, lengths_k : str or None
        Recipes for ``seqlens_q`` and ``seqlens_k``, of `LENGTHS`; None for no such array.
    lengths_dtype : str
    packed : Packed or None
        The sequences of a `numbaflash.forward_varlen` call. There is no mask, no bias and no ``lengths_q`` then, and a batch entry of the others is a
        sequence.
    mask, bias, alibi_slopes, sinks, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k : Placement

    Examples
    --------
    >>> case = Case(dtype="float32", seqlen_q=3, seqlen_k=5, head_dim=8, head_dim_v=8, causal=True)
    >>> case.problem.right, case.memory()["q"].shape
    (0, (1, 3, 1, 8))
    >>> Case.from_json(case.to_json()) == case
    True
    """

    direction: ClassVar[str] = "forward"
    operands: ClassVar[tuple[str, ...]] = ("q", "k", "v", *ARRAYS, "out", "lse")
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
    softcap: float | None = None
    dropout: float = 0.0
    dropout_seed: int = 0
    mask_shape: tuple[int, ...] | None = None
    bias_shape: tuple[int, ...] | None = None
    alibi_shape: tuple[int, ...] | None = None
    bias_dtype: str | None = None
    with_sinks: bool = False
    as_blocks: bool = False
    mask_values: str = "random"
    bias_values: str = "normal"
    lengths_q: str | None = None
    lengths_k: str | None = None
    lengths_dtype: str = "int32"
    packed: Packed | None = None
    mask: Placement = field(default_factory=Placement)
    bias: Placement = field(default_factory=Placement)
    alibi_slopes: Placement = field(default_factory=Placement)
    sinks: Placement = field(default_factory=Placement)
    seqlens_q: Placement = field(default_factory=Placement)
    seqlens_k: Placement = field(default_factory=Placement)
    cu_seqlens_q: Placement = field(default_factory=Placement)
    cu_seqlens_k: Placement = field(default_factory=Placement)

    def __post_init__(self):
        for name, allowed in (
            ("dtype", DTYPES),
            ("values", RECIPES),
            ("hidden", HIDDEN),
            ("mask_values", MASKS),
            ("bias_values", BIASES),
            ("bias_dtype", (None, *DTYPES)),
            ("lengths_q", (None, *LENGTHS)),
            ("lengths_k", (None, *LENGTHS)),
            ("lengths_dtype", LENGTH_DTYPES),
        ):
            value = getattr(self, name)
            if value not in allowed:
                allowed = [str(each) for each in allowed]
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        for name in dict.fromkeys(("out", "lse", *self.results)):
            if 0 in getattr(self, name).step:
                raise ValueError(f"{name} must not be broadcast: a step of 0 makes several results share one element")
        if self.packed is not None:
            for name in ("mask_shape", "bias_shape", "lengths_q", "lengths_k"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} must be None for packed sequences; got {getattr(self, name)!r}")

    @property
    def problem(self) -> Problem:
        """The validated problem; raises what `numbaflash.forward`, or `numbaflash.forward_varlen`, would raise for it."""
        options = {name: value for name, value in self.options.items() if name != "seed"}
        if self.packed is not None:
            total_q, total_k = self.packed.totals
            return make_packed_problem(
                (total_q, self.heads, self.head_dim),
                (total_k, self.kv_heads, self.head_dim),
                (total_k, self.kv_heads, self.head_dim_v),
                (self.dtype,) * 3,
                **options,
                **self._arrays_of_problem,
            )
        return make_problem(
            (self.batch, self.seqlen_q, self.heads, self.head_dim),
            (self.batch, self.seqlen_k, self.kv_heads, self.head_dim),
            (self.batch, self.seqlen_k, self.kv_heads, self.head_dim_v),
            (self.dtype,) * 3,
            **options,
            **self._arrays_of_problem,
        )

    @property
    def options(self) -> dict:
        """The keyword arguments of `numbaflash.forward`, but arrays, that say what is computed. Those beyond scale, causal and window only where
        they say something."""
        options = {"scale": self.scale, "causal": self.causal, "window": self.window}
        if self.packed is not None:
            options |= {f"max_seqlen_{name}": n for name, n in zip("qk", self.packed.max_seqlens, strict=True) if n is not None}
        if self.softcap is not None:
            options["softcap"] = self.softcap
        return options | ({"dropout": self.dropout, "seed": self.dropout_seed} if self.dropout else {})

    @property
    def _option_arrays(self) -> dict:
        """(shape, dtype) of those of `ARRAYS` that the case has, as the caller has them."""
        softmax_dtype = "float64" if self.dtype == "float64" else "float32"
        found = {
            "mask": self.mask_shape is not None and (self.mask_shape, "bool"),
            "bias": self.bias_shape is not None and (self.bias_shape, self.bias_dtype or self.dtype),
            "alibi_slopes": self.alibi_shape is not None and (self.alibi_shape, "float32"),
            "sinks": self.with_sinks and ((self.heads,), softmax_dtype),
            "seqlens_q": self.lengths_q is not None and ((self.batch,), self.lengths_dtype),
            "seqlens_k": self.lengths_k is not None and ((self.batch,), self.lengths_dtype),
            "cu_seqlens_q": self.packed is not None and ((self.packed.batch + 1,), self.packed.dtypes[0]),
            "cu_seqlens_k": self.packed is not None and ((self.packed.batch + 1,), self.packed.dtypes[1]),
        }
        return {name: each for name, each in found.items() if each}

    @property
    def _arrays_of_problem(self) -> dict:
        """The same as a problem has them: a `numbaflash.BlockMask` by its words, of which it does not matter how many there are."""
        found = self._option_arrays
        if self.as_blocks and "mask" in found:
            shape, _ = found.pop("mask")
            own = (1,) * (4 - len(shape)) + tuple(shape)
            found["block_mask"] = ((*own[:2], words(self.seqlen_q, self.seqlen_k, 1)), "int32")
        return found

    @property
    def option_arrays(self) -> tuple[str, ...]:
        """Those of `ARRAYS` that the case has."""
        return tuple(self._option_arrays)

    def shape_of(self, operand: str) -> tuple[int, ...]:
        """Shape of an operand as the caller has it: options and their gradients may have fewer axes than those of the problem."""
        name = operand if operand in ARRAYS else operand.removeprefix("d")
        return self._option_arrays[name][0] if name in ARRAYS else self.problem.shape_of(operand)

    def place_of(self, operand: str) -> tuple[int, tuple[int, ...]]:
        """(bytes from an address aligned to 64 to the first element, strides in bytes) of an operand."""
        _, first, strides = getattr(self, operand).resolve(self.shape_of(operand))
        itemsize = ITEMSIZE[self.problem.dtype_of(operand)]
        return (GUARD + first) * itemsize, tuple(s * itemsize for s in strides)

    @property
    def results(self) -> tuple[str, ...]:
        """Operands that the call writes."""
        return ("out", "lse")

    @property
    def present(self) -> tuple[str, ...]:
        """Operands that take part."""
        return tuple(name for name in self.operands if name not in ARRAYS or name in self._option_arrays)

    @property
    def work(self) -> int:
        """Scores in the problem, of packed sequences in the padded one: what the time of the reference is proportional to."""
        if self.packed is not None:
            return self.packed.batch * self.heads * prod(self.packed.longest)
        return self.batch * self.heads * self.seqlen_q * self.seqlen_k

    def memory(self) -> dict[str, Memory]:
        """The memory of every operand, keyed by its name: inputs filled, results and all surroundings set to `SENTINEL`."""
        problem, memory = self.problem, {}
        for name in self.present:
            dtype = "bool" if name == "mask" else problem.dtype_of(name)
            memory[name] = Memory.filled(dtype, self.shape_of(name), getattr(self, name), SENTINEL.get(dtype, 0))
        self._fill_options(memory)
        queries, keys = taking_part(problem, **self.given_options(memory))
        shapes = [_distinct(memory[name]) for name in "qkv"]
        values = fill(self.values, self.dtype, np.random.default_rng(self.seed), *self._as_sequences(*shapes))
        for name, x, shape, rows in zip("qkv", values, shapes, (queries, keys, keys), strict=True):
            self._fill_input(memory[name], x.reshape(shape), ~rows[..., None])
        return memory

    def _as_sequences(self, *shapes):
        """Shapes of q, k and v with a batch axis."""
        return shapes if self.packed is None else [(1, *shape) for shape in shapes]

    def given_options(self, memory) -> dict:
        """The options as `numbaflash.reference.forward` takes them, out of the memory of the case: the arrays decoded, and the seed of dropout."""
        arrays = {name: memory[name].decoded() for name in self.option_arrays}
        if self.as_blocks and "mask" in arrays:
            arrays["block_mask"] = arrays.pop("mask")
        return arrays | ({"seed": self.dropout_seed} if self.dropout else {})

    def handed(self, arrays: dict) -> dict:
        """Options that are arrays as the caller hands them over, of the arrays of a case in any library."""
        found = {name: arrays[name] for name in self.option_arrays}
        if self.as_blocks and "mask" in found:
            found["mask"] = BlockMask.from_mask(found["mask"], seqlen_q=self.seqlen_q, seqlen_k=self.seqlen_k)
        return found

    def keys_and_values(self, arrays: dict) -> tuple:
        """Keys and values as the caller hands them over, of the arrays of a case in any library."""
        return arrays["k"], arrays["v"]

    def _fill_options(self, memory):
        rng = np.random.default_rng((self.seed, 2))
        boundaries = {} if self.packed is None else dict(zip(PACKED, self.packed.numbers, strict=True))
        capacity = {"seqlens_q": self.seqlen_q, "seqlens_k": self.seqlen_k}
        recipes = {"seqlens_q": self.lengths_q, "seqlens_k": self.lengths_k}
        bias = None
        for name in self.option_arrays:
            shape, dtype = _distinct(memory[name]), memory[name].dtype
            if name == "mask":
                values = fill_mask(self.mask_values, rng, shape)
            elif name == "bias":
                values = bias = fill_bias(self.bias_values, dtype, rng, shape)
            elif name == "alibi_slopes":
                values = fill_slopes(rng, shape)
            elif name == "sinks":
                values = fill_sinks(rng, shape)
            elif name in boundaries:
                values = np.array(boundaries[name])
            else:
                values = fill_lengths(recipes[name], dtype, rng, shape, capacity[name])
            self._fill_input(memory[name], values)
        if bias is not None and self.hidden != "finite":
            seen = visible_pairs(self.problem, **self.given_options(memory))
            broadcast = tuple(axis for axis, n in enumerate(self.problem.bias) if n == 1)
            unseen = ~seen.any(axis=broadcast, keepdims=True).reshape(self.bias_shape)
            self._fill_input(memory["bias"], bias, unseen)

    def _fill_input(self, memory, values, unseen=None):
        """Values in an operand, garbage around it and, if `hidden` says so, in its elements that take no part."""
        memory.bits[:] = garbage(self.hidden, memory.dtype)
        memory.view()[...] = encode(values, memory.dtype)
        if unseen is not None and self.hidden != "finite":
            for axis, step in enumerate(memory.strides):
                if step == 0 and unseen.shape[axis] > 1:
                    unseen = unseen.all(axis=axis, keepdims=True)  # one element that stands for several
            memory.view()[np.broadcast_to(unseen, memory.shape)] = garbage(self.hidden, memory.dtype)

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
            for name in ("window", "needs", "mask_shape", "bias_shape", "alibi_shape"):
                if data.get(name) is not None:
                    data[name] = tuple(data[name])
            if data.get("packed") is not None:
                data["packed"] = Packed.from_json(data["packed"])
            if "cache" in data:
                data["cache"] = Cache.from_json(data["cache"])
            return cls(**data)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a case: {error}") from None

    def __repr__(self) -> str:
        """A Python expression that makes the case again, defaults left out."""
        return short_repr(self)

    def _repr_pretty_(self, printer, cycle):
        """What Hypothesis and IPython print."""
        printer.text(repr(self))

    def snippet(self, *, family=None, library="numpy") -> str:
        """Python source that runs the case again."""
        run = {"forward": "run_case", "backward": "run_backward_case", "decode": "run_decode_case"}[self.direction]
        further = ("Cache",) if self.direction == "decode" else ("Packed",) if self.packed is not None else ()
        names = ", ".join((type(self).__name__, *further, "Placement", run))
        return f"from numbaflash.testing import {names}\n\n{run}({self!r}, family={family!r}, library={library!r})\n"


@dataclass(frozen=True, slots=True, repr=False)
class BackwardCase(Case):
    """A complete backward problem, ready to be run.

    ``out`` and ``lse`` are inputs here: what the float64 reference computes, rounded. In rows that see no key, ``dout``, ``dlse`` and ``out``
    hold what `hidden` says, as q does; where there are sinks, which such rows do see, only in those beyond their lengths.

    Attributes
    ----------
    dout, dlse, dq, dk, dv, dbias, dsinks : Placement
        Memory layouts beyond those of a `Case`, whose attributes are meant as there; `return_lse` has no meaning.
    give_out : bool
        Whether ``dq=``, ``dk=`` and ``dv=`` are handed in or left to the library to allocate.
    with_dlse : bool
        Whether there is a gradient of the LSE.
    deterministic : bool
        As `numbaflash.backward` takes it.
    needs : tuple of str
        As `numbaflash.backward` takes it, in the order q, k, v, bias, sinks.

    Examples
    --------
    >>> case = BackwardCase(seqlen_q=3, seqlen_k=5, head_dim=8, head_dim_v=8, needs=("q",))
    >>> case.present
    ('dout', 'q', 'k', 'v', 'out', 'lse', 'dq')
    """

    direction: ClassVar[str] = "backward"
    operands: ClassVar[tuple[str, ...]] = (*BACKWARD_OPERANDS[:-1], *ARRAYS, *(f"d{name}" for name in DIFFERENTIABLE_OPTIONS))

    dout: Placement = field(default_factory=Placement)
    dlse: Placement = field(default_factory=Placement)
    dq: Placement = field(default_factory=Placement)
    dk: Placement = field(default_factory=Placement)
    dv: Placement = field(default_factory=Placement)
    dbias: Placement = field(default_factory=Placement)
    dsinks: Placement = field(default_factory=Placement)
    with_dlse: bool = False
    deterministic: bool = False
    needs: tuple[str, ...] = NEEDS

    def __post_init__(self):
        Case.__post_init__(self)
        if self.needs != check_needs(self.needs, self.option_arrays):
            raise ValueError(f"needs must be a tuple in the order q, k, v, bias, sinks; got {self.needs!r}")

    @property
    def results(self) -> tuple[str, ...]:
        """What the call returns: dq, dk and dv, needed or not, and the gradients of options that are needed."""
        return tuple(f"d{name}" for name in (*NEEDS, *(name for name in DIFFERENTIABLE_OPTIONS if name in self.needs)))

    @property
    def present(self) -> tuple[str, ...]:
        absent = {f"d{name}" for name in (*NEEDS, *DIFFERENTIABLE_OPTIONS) if name not in self.needs} | ({"dlse"} if not self.with_dlse else set())
        return tuple(name for name in Case.present.fget(self) if name not in absent)

    def memory(self) -> dict[str, Memory]:
        memory = Case.memory(self)
        problem, options = self.problem, self.given_options(memory)
        dead = ~rows_within_lengths(problem, **options) if problem.sinks else ~taking_part(problem, **options)[0]
        by_head = np.moveaxis(dead, -1, -2)
        rng = np.random.default_rng((self.seed, 1))
        for name, unseen in (("dout", dead[..., None]), ("dlse", by_head)):
            if name in memory:
                self._fill_input(memory[name], fill_gradient(self.values, self.dtype, rng, _distinct(memory[name])), unseen)
        out, lse = reference.forward(problem, *(memory[name].decoded() for name in "qkv"), **options)
        self._fill_input(memory["out"], out, dead[..., None])
        self._fill_input(memory["lse"], lse)  # -inf in rows without keys is what tells them
        return memory


@dataclass(frozen=True, slots=True, repr=False)
class DecodeCase(Case):
    """A complete problem of `numbaflash.decode`, ready to be run.

    The fields of a `Case` are meant as there, with three exceptions: ``seqlen_k`` is the capacity, a multiple of the page size where there are pages;
    ``k`` and ``v`` are the layouts of the caches; there are as many sequences as ``cache`` has lengths, and ``batch`` has no meaning. There is no
    mask, bias, dropout, recipe of lengths or packed sequence.

    Attributes
    ----------
    cache : Cache
    page_table : Placement
    latent : bool
        The values are the first part of the keys' memory, and have no layout of their own.
    num_splits : int or None
        As `numbaflash.decode` takes it.

    Examples
    --------
    >>> case = DecodeCase(seqlen_q=1, seqlen_k=48, head_dim=8, head_dim_v=8, cache=Cache((40, 0), page_size=16))
    >>> case.present
    ('q', 'k', 'v', 'seqlens_k', 'page_table', 'out', 'lse')
    >>> case.problem.k_shape, case.problem.max_pages
    ((3, 16, 1, 8), 3)
    """

    direction: ClassVar[str] = "decode"
    operands: ClassVar[tuple[str, ...]] = ("q", "k", "v", "alibi_slopes", "sinks", "seqlens_k", PAGE_TABLE, "out", "lse")

    seqlen_q: int = 1
    page_table: Placement = field(default_factory=Placement)
    cache: Cache = field(default_factory=Cache)
    latent: bool = False
    num_splits: int | None = None

    def __post_init__(self):
        Case.__post_init__(self)
        for name in ("mask_shape", "bias_shape", "lengths_q", "lengths_k", "packed"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} must be None in decoding; got {getattr(self, name)!r}")
        if self.dropout:
            raise ValueError(f"dropout must be 0 in decoding; got {self.dropout}")
        if self.cache.page_size is not None and self.seqlen_k % self.cache.page_size:
            raise ValueError(f"seqlen_k, the capacity, must be a multiple of page_size, {self.cache.page_size}; got {self.seqlen_k}")
        if self.latent and self.head_dim_v > self.head_dim:
            raise ValueError(f"head_dim_v must be at most head_dim where values are part of the keys; got {self.head_dim_v} and {self.head_dim}")
        check_num_splits(self.num_splits)

    @property
    def problem(self) -> Problem:
        """The validated problem; raises what `numbaflash.decode` would raise for it."""
        size, batch = self.cache.page_size, self.cache.batch
        rows = (batch, self.seqlen_k) if size is None else (self.cache.pages(self.seqlen_k), size)
        return make_decode_problem(
            (batch, self.seqlen_q, self.heads, self.head_dim),
            (*rows, self.kv_heads, self.head_dim),
            (*rows, self.kv_heads, self.head_dim_v),
            (self.dtype,) * 3,
            **self.options,
            **self._option_arrays,
        )

    @property
    def _option_arrays(self) -> dict:
        batch, size = self.cache.batch, self.cache.page_size
        found = {name: each for name, each in Case._option_arrays.fget(self).items() if name in ("alibi_slopes", "sinks")}
        found["seqlens_k"] = ((batch,), self.lengths_dtype)
        return found | ({} if size is None else {PAGE_TABLE: ((batch, self.seqlen_k // size), "int32")})

    def shape_of(self, operand: str) -> tuple[int, ...]:
        found = self._option_arrays.get(operand)
        return self.problem.shape_of(operand) if found is None else found[0]

    def place_of(self, operand: str) -> tuple[int, tuple[int, ...]]:
        return Case.place_of(self, "k" if operand == "v" and self.latent else operand)

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(name for name in self.operands if name not in (*ARRAYS, PAGE_TABLE) or name in self._option_arrays)

    @property
    def work(self) -> int:
        """Scores in the problem, those of slots without a key among them."""
        return self.cache.batch * self.heads * self.seqlen_q * self.seqlen_k

    def memory(self) -> dict[str, Memory]:
        """The memory of every operand, as that of a `Case`. Slots that no query sees hold what `hidden` says."""
        memory = Case.memory(self)
        if self.latent:
            k = memory["k"]
            memory["v"] = Memory(k.dtype, k.bits, memory["v"].shape, k.first, k.strides)
        return memory

    def handed(self, arrays: dict) -> dict:
        return {name: arrays[name] for name in self.option_arrays}

    def keys_and_values(self, arrays: dict) -> tuple:
        k = arrays["k"]
        return k, k[..., : self.head_dim_v] if self.latent else arrays["v"]

    def _as_sequences(self, *shapes):
        """Pages are filled as one sequence, in the order in which they lie."""
        q, *caches = shapes
        return [q, *(x if self.cache.page_size is None else (1, x[0] * x[1], *x[2:]) for x in caches)]

    def _fill_options(self, memory):
        rng = np.random.default_rng((self.seed, 2))
        for name in self.option_arrays:
            shape = _distinct(memory[name])
            if name == "alibi_slopes":
                values = fill_slopes(rng, shape)
            elif name == "sinks":
                values = fill_sinks(rng, shape)
            elif name == "seqlens_k":
                values = np.array(self.cache.lengths, np.int64)
            else:
                values = self.cache.table(self.seqlen_k, rng)
            self._fill_input(memory[name], values)


def _distinct(memory):
    """Shape of the values that a strided operand can hold: 1 along an axis that repeats one element."""
    return tuple(1 if s == 0 else n for n, s in zip(memory.shape, memory.strides, strict=True))


@cache
def _defaults(kind) -> dict:
    return asdict(kind())
