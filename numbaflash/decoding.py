"""Decoding: attention of a few new queries of each sequence over the keys and values in its cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from . import recording
from .api import forward, merge
from .arrays import LIBRARIES, in_torch_compile, one_library
from .arrays import library as library_of
from .call import aligned_workspace, apart_of, called, check_apart, decode_call, device_of, run
from .dispatch import contiguous_strides
from .explanation import Explanation, explain_plan
from .problem import (
    ITEMSIZE,
    UnsupportedError,
    check_cache_lengths,
    check_causal,
    check_flag,
    check_num_splits,
    check_page_numbers,
    check_result,
    check_scale,
    check_softcap,
    check_window,
)
from .problem.shapes import check_axes, check_equal
from .switches import values_are_checked

__all__ = ["DecodePlan", "cascade", "decode", "plan_decode"]

REQUIRED = ("q", "k", "v", "k_prefix", "v_prefix")
"""Arrays that no call can do without."""

MOST_KINDS_OF_RESULTS = 16
"""Kinds of results, given by the caller, that a plan remembers."""
MOST_LOOKS = 16
"""How often a plan learns what its arrays look like: torch's modes (inference, no gradients) are part of that."""


def decode(
    q,
    k_cache,
    v_cache,
    seqlens_k,
    page_table=None,
    *,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    out=None,
    lse=None,
    num_splits=None,
    stream=None,
):
    """Attention of a few queries of each sequence over a cache of its keys and values, contiguous or paged.

    The keys of a sequence are computed in parts at once, which the block merge of the online softmax puts together: "Flash-Decoding" (Dao, Haziza,
    Massa and Sizov, 2023). Pages are those of Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads, head_dim)
        The last ``seqlen_q`` tokens of each sequence, 0 to 64. Libraries, dtypes and strides as in `forward`.
    k_cache : array, (batch, capacity, kv_heads, head_dim), or (pages, page_size, kv_heads, head_dim) with ``page_table``
        Same library, device and dtype; head dims are 1 to 576. Any page size from 1 up. Slots after the length of a sequence hold anything.
    v_cache : array, (batch, capacity, kv_heads, head_dim_v), or (pages, page_size, kv_heads, head_dim_v)
        May be a view of ``k_cache``, as in a latent cache, whose values are the first part of its keys.
    seqlens_k : array of int32 or int64, (batch,)
        Valid keys of each sequence, those of the present q included, on the arrays' device; the host does not read them. A length above the capacity
        counts as the capacity, a negative one as 0.
    page_table : array of int32, (batch, max_pages), optional
        Key j of sequence b lies in row ``j % page_size`` of page ``page_table[b, j // page_size]``, so the capacity is ``max_pages * page_size``.
        Pages may come in any order and belong to several sequences. Entries that no key of the sequence is in hold anything; a number that is used
        and no page counts as the nearest one. ``NUMBAFLASH_CHECK=1`` in the environment checks lengths and page numbers in each call, at the price
        of waiting for the device.
    scale, softcap, sinks, alibi_slopes
        As in `forward`.
    causal : bool or "top_left", optional
        True: query i sees key j where ``j <= i + seqlens_k[b] - seqlen_q``. No matter with one query, which stands beside the last key.
    window : (int or None, int or None), optional
        As in `forward`, counted from the same place.
    return_lse : bool, optional
        Also return the logarithm of the sum of exponentiated scores, sinks included.
    out : array, (batch, seqlen_q, heads, head_dim_v), optional
        Where to write the result, as in `forward`. Not for JAX.
    lse : array, (batch, heads, seqlen_q), optional
        Where to write the LSE, as in `forward`. Not for JAX.
    num_splits : int, optional
        Into how many equal parts the keys of each sequence are divided, 1 to 256. None lets the library choose, on a GPU so that all of it is busy
        whatever the lengths are. The same inputs and number give the same bits; with a number given, a sequence's do not depend on the others.
    stream : stream of CuPy, torch, Numba or CUDA Python, or int handle, optional
        CUDA stream to work on, as in `forward`.

    Returns
    -------
    out : array, (batch, seqlen_q, heads, head_dim_v)
        q's library, dtype and device, row-major if it is new. 0 in a row that sees no key.
    lse : array, (batch, heads, seqlen_q), only with ``return_lse``
        Natural logarithm; float32 (float64 for float64); -inf in such a row.

    Raises
    ------
    TypeError
        For a wrong kind or dtype.
    ValueError
        For a wrong shape or value; with ``NUMBAFLASH_CHECK=1`` for lengths beyond the capacity and numbers that are no page, too.
    UnsupportedError
        For a legal problem that no kernel family can compute; the message gives each one's reason.

    See Also
    --------
    forward : for more queries, of caches without pages: its ``seqlens_k`` means the same.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = rng.standard_normal((2, 6, 16, 2, 64), dtype=np.float32)  # six pages of 16 keys
    >>> pages = np.array([[4, 0, 5], [2, 4, -1]], np.int32)  # page 4 is shared; -1 is not used
    >>> q = rng.standard_normal((2, 1, 8, 64), dtype=np.float32)
    >>> out = nf.decode(q, k_cache, v_cache, np.array([40, 32]), pages)
    >>> out.shape
    (2, 1, 8, 64)
    >>> k, v = (x[[4, 0, 5]].reshape(1, 48, 2, 64)[:, :40] for x in (k_cache, v_cache))
    >>> bool(np.allclose(out[:1], nf.forward(q[:1], k, v), atol=1e-6))
    True
    """
    if in_torch_compile():
        from .torch import decoding as compiled

        options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks}
        more = {"return_lse": return_lse, "num_splits": num_splits, "out": out, "lse": lse, "stream": stream}
        return compiled.decode(q, k_cache, v_cache, seqlens_k, page_table, **options, **more)
    if recording.active is not None and recording.is_outermost():
        return recording.noted(decode, locals())
    arrays = {"q": q, "k": k_cache, "v": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
    arrays |= {"alibi_slopes": alibi_slopes, "sinks": sinks}
    library = _library(arrays | {"out": out, "lse": lse})
    options = _options(scale, causal, window, softcap)
    return_lse, num_splits = check_flag("return_lse", return_lse), check_num_splits(num_splits)
    _check_values(arrays)
    if library.decode is not None:
        more = {"seqlens_k": seqlens_k, "page_table": page_table, "alibi_slopes": alibi_slopes, "sinks": sinks, "num_splits": num_splits}
        return library.decode(q, k_cache, v_cache, **more, **options, return_lse=return_lse, out=out, lse=lse, stream=stream)
    wanted = ("out", "lse") if return_lse else ("out",)
    found = run("decode", library, arrays, {"out": out, "lse": lse}, wanted, options, stream, num_splits=num_splits)
    return (found["out"], found["lse"]) if return_lse else found["out"]


def plan_decode(
    q,
    k_cache,
    v_cache,
    seqlens_k,
    page_table=None,
    *,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    num_splits=None,
):
    """A plan for many calls of `decode` with arrays of one kind, as in a loop that generates tokens.

    Everything that `decode` decides and allocates is decided and allocated here. What the arrays hold is not read: lengths may grow from run to run.

    Parameters
    ----------
    q, k_cache, v_cache, seqlens_k, page_table, scale, causal, window, softcap, return_lse, num_splits
        As `decode` takes them. Arrays that only lend their memory (DLPack, ``__cuda_array_interface__``, Numba) are borrowed anew in each run. There
        are no plans of JAX arrays.
    alibi_slopes, sinks : array, optional
        As `decode` takes them. The plan keeps them, and each run reads what they hold then.

    Returns
    -------
    DecodePlan

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As `decode`; TypeError for JAX arrays, ValueError for arrays that a kernel could read from a copy only.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> k_cache, v_cache = np.zeros((2, 4, 100, 2, 64), np.float32)
    >>> q, lengths = np.ones((4, 1, 8, 64), np.float32), np.full(4, 7)
    >>> plan = nf.plan_decode(q, k_cache, v_cache, lengths)
    >>> for _ in range(3):
    ...     lengths += 1
    ...     out = plan.run(q, k_cache, v_cache, lengths)
    >>> out.shape
    (4, 1, 8, 64)
    """
    arrays = {"q": q, "k": k_cache, "v": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
    arrays |= {"alibi_slopes": alibi_slopes, "sinks": sinks}
    library = _library(arrays)
    if library.no_plans:
        raise TypeError(f"q must not be an array of {library.name} in a plan: {library.no_plans}")
    options = _options(scale, causal, window, softcap)
    more = {"return_lse": check_flag("return_lse", return_lse), "num_splits": check_num_splits(num_splits)}
    arrays = {name: x for name, x in arrays.items() if x is not None}
    if not library.lends:
        if library.decode is not None:
            return library.untraced(DecodePlan)(library, arrays, options, **more)
        return DecodePlan(library, arrays, options, **more)
    with library.borrowed({called(name, "decode"): x for name, x in arrays.items()}) as (lent, _):
        arrays = {name: lent[called(name, "decode")] for name in arrays}
        return DecodePlan(LIBRARIES[type(arrays["q"])], arrays, options, **more, lender=library)


class DecodePlan:
    """What `plan_decode` returns: call `run`, again and again.

    Results and workspace belong to the plan: the next run overwrites what the last one returned, so runs must follow each other on one stream, or
    wait. Keep the plan until its work is done. Making one waits for the device, once. Runs can be captured in a CUDA graph, and replayed while the
    lengths grow.

    Attributes
    ----------
    plan : Plan or None
        How it is computed; None where no result has an element.
    out : array, (batch, seqlen_q, heads, head_dim_v)
        Where a run writes that is not told another place.
    lse : array, (batch, heads, seqlen_q), or None
        Likewise; None without ``return_lse``.
    """

    def __init__(self, library, arrays, options, *, return_lse, num_splits, lender=None):
        call, out, lse = _with_results(library, arrays, options, return_lse, num_splits)
        if call.plan is not None and call.plan.copies:
            told = "; ".join(f"{called(name, 'decode')}: {reason}" for name, reason in call.plan.copies.items())
            raise ValueError(f"a plan allocates nothing when it runs, so its arrays must be readable where they lie; copy them first ({told})")
        self.plan, self.out, self.lse = call.plan, out, lse
        self._library, self._call, self._lender = library, call, lender
        self._launch, self._current_stream = call.launch, call.current_stream
        self._workspace = None if call.workspace is None else _zeroed(library, call.workspace(None))
        self._at_q, self._at_k, self._at_v, self._at_lengths = (library.same_kind(arrays[name]) for name in ("q", "k", "v", "seqlens_k"))
        self._paged, self._type = "page_table" in arrays, type(arrays["q"])
        self._at_table = library.same_kind(arrays["page_table"]) if self._paged else None
        self._at, self._looks = None, MOST_LOOKS
        self._look_at_once(*(arrays.get(name) for name in ("q", "k", "v", "seqlens_k", "page_table")))
        self._options = [(name, arrays[name], library.same_kind(arrays[name])) for name in ("alibi_slopes", "sinks") if name in arrays]
        self._out_at, self._lse_at = library.address(out), library.address(lse) if return_lse else 0
        self._workspace_at = aligned_workspace(library.address(self._workspace)) if call.workspace is not None else 0
        self._checked = values_are_checked()
        self._apart = {}  # of kinds of results that callers gave
        self._told = options | {name: arrays.get(name) for name in ("alibi_slopes", "sinks")} | {"return_lse": return_lse, "num_splits": num_splits}

    def run(self, q, k_cache, v_cache, seqlens_k, page_table=None, *, out=None, lse=None, stream=None):
        """`decode` with arrays of the planned kind: library, shapes, strides, dtypes, device and alignment.

        Nothing is allocated, and the host does not wait for the device.

        Parameters
        ----------
        q, k_cache, v_cache, seqlens_k, page_table
            As `decode` takes them.
        out : array, (batch, seqlen_q, heads, head_dim_v), optional
            Where to write the result, row-major, instead of the plan's own array.
        lse : array, (batch, heads, seqlen_q), optional
            Likewise; only for a plan with ``return_lse``.
        stream
            As in `decode`.

        Returns
        -------
        out : array, (batch, seqlen_q, heads, head_dim_v)
            The plan's own, which the next run overwrites, or the one given.
        lse : array, (batch, heads, seqlen_q), only for a plan with ``return_lse``

        Raises
        ------
        TypeError, ValueError
            For an array of another kind than planned; the message says in what it differs.
        """
        if recording.active is not None and recording.is_outermost():
            return recording.noted(DecodePlan.run, locals(), self._told)
        library, kind = self._library, LIBRARIES.get
        if library.decode is not None:  # torch records
            return library.untraced(self.run)(q, k_cache, v_cache, seqlens_k, page_table, out=out, lse=lse, stream=stream)
        paged, at = self._paged, self._at
        found = None if at is None else at(q, k_cache, v_cache, seqlens_k, page_table)
        if found is not None:
            q_at, k_at, v_at, lengths_at, table_at = found
        else:
            table_at, as_planned = 0, False
            if type(q) is type(k_cache) is type(v_cache) is type(seqlens_k) is self._type:
                q_at, k_at, v_at, lengths_at = self._at_q(q), self._at_k(k_cache), self._at_v(v_cache), self._at_lengths(seqlens_k)
                as_planned = q_at and k_at and v_at and lengths_at
                if paged:
                    table_at = self._at_table(page_table) if type(page_table) is self._type else 0
                    as_planned = as_planned and table_at
                elif page_table is not None:
                    as_planned = False
            if not as_planned:
                if self._lender is not None and kind(type(q)) is not library:
                    return self._run_lent(q, k_cache, v_cache, seqlens_k, page_table, out, lse, stream)
                arrays = {"q": q, "k": k_cache, "v": v_cache, "seqlens_k": seqlens_k, "page_table": page_table}
                q_at, k_at, v_at, lengths_at, table_at = self._addresses(arrays)
            if at is not None:
                self._look_at_once(q, k_cache, v_cache, seqlens_k, page_table)
        if self._checked:
            _check_values({"k": k_cache, "seqlens_k": seqlens_k, "page_table": page_table})
        if q_at == self._out_at != 0 and out is None:
            raise ValueError("q must not be the plan's own result, which the run writes; pass a copy of it, or out=")
        if library.moves and (library.address(self.out) != self._out_at or (self.lse is not None and library.address(self.lse) != self._lse_at)):
            raise ValueError("out or lse of the plan was given other memory (.data, set_ or resize_); make another plan with numbaflash.plan_decode")
        place, handle = (None, self._current_stream()) if stream is None else self._call.on(stream)
        table = (table_at,) if paged else ()
        options = self._addresses_of_options() if self._options else ()
        addresses = q_at, k_at, v_at, self._out_at, self._lse_at, *options, lengths_at, *table, self._workspace_at
        if out is not None or lse is not None:
            addresses = self._with_places(out, lse, addresses)
        if self._launch is not None:
            self._launch(addresses, handle)
        if place is not None:
            used = (q, k_cache, v_cache, seqlens_k, page_table, out, lse, self.out, self.lse, self._workspace)
            library.used_on(place, [x for x in used if x is not None])
        out = self.out if out is None else out
        library.written(out)
        if self.lse is None:
            return out
        lse = self.lse if lse is None else lse
        library.written(lse)
        return out, lse

    def _look_at_once(self, *arrays):
        """From now on, all arrays are looked at together, where the library can: of the kind of these, in the modes that it is in now."""
        if self._looks:
            self._looks -= 1
            self._at = self._library.same_kinds(arrays)

    def _run_lent(self, q, k_cache, v_cache, seqlens_k, page_table, out, lse, stream):
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "seqlens_k": seqlens_k, "page_table": page_table, "out": out, "lse": lse}
        for name, x in given.items():
            if x is not None:
                _check_library(name, x, self._lender)
        with self._lender.borrowed(given, stream) as (lent, stream):
            out_lent, lse_lent = lent.pop("out"), lent.pop("lse")
            self.run(**lent, out=out_lent, lse=lse_lent, stream=stream)
        out = self.out if out is None else out
        return out if self.lse is None else (out, self.lse if lse is None else lse)

    def _addresses_of_options(self):
        """Of the arrays that the plan keeps, which their owner may have given other memory (``parameter.data = ...``)."""
        return [address(x) or self._addresses({name: x})[0] for name, x, address in self._options]

    def _addresses(self, arrays):
        """Addresses of arrays that are not just what was planned; an error where that matters."""
        found = []
        for name, x in arrays.items():
            argument, planned = called(name, "decode"), self._call.facts.get(name)
            if (x is None) != (planned is None):
                told = ("none", "one") if planned is None else ("one", "none")
                raise ValueError(f"{argument}: the plan has {told[0]}; got {told[1]}. Make another plan with numbaflash.plan_decode")
            if x is None:
                found.append(0)
                continue
            _check_library(argument, x, self._library)
            facts = self._library.describe(x, argument)
            for what, got, want in (
                ("shape", facts.shape, planned.shape),
                ("dtype", facts.dtype, planned.dtype),
                ("device", facts.place, planned.place),
                ("strides", facts.strides, planned.strides),
            ):
                if got != want and (what != "strides" or _strides_differ(facts, planned)):
                    raise ValueError(f"{argument} must have the planned {what} {want}; got {got}. Make another plan with numbaflash.plan_decode")
            if 0 not in facts.shape:
                alignment = min(16, planned.address & -planned.address)
                if not facts.address:
                    raise ValueError(f"{argument} has no memory: it was deleted or released before the call")
                if facts.address % alignment:
                    raise ValueError(f"{argument} must lie at an address that {alignment} bytes divide, as planned; copy it first")
            found.append(facts.address)
        return found

    def _with_places(self, out, lse, addresses):
        """The addresses with those of the results that the caller gave."""
        library, kinds, places = self._library, [], dict(zip(self._call.operands, addresses, strict=True))
        for name, x in (("out", out), ("lse", lse)):
            if x is not None:
                _check_library(name, x, library)
                places[name], kind = library.inspect_result(x)
                kinds.append((name, kind))
        facts, apart = self._apart.get(tuple(kinds), (None, None))
        if apart is None:
            facts = self._call.facts | {name: self._place(name, x) for name, x in (("out", out), ("lse", lse)) if x is not None}
            apart = apart_of(facts, self._call.problem, "decode")
            if len(self._apart) >= MOST_KINDS_OF_RESULTS:
                self._apart.clear()
            self._apart[tuple(kinds)] = facts, apart
        addresses = tuple(places.values())
        if not apart(*addresses):
            check_apart(facts, places, "decode")
        return addresses

    def _place(self, name, x):
        """Facts of a result that the caller gave, which must lie as the plan's own does."""
        problem, facts, planned = self._call.problem, self._library.describe(x, name), self._call.facts["q"].place
        if name == "lse" and self.lse is None:
            raise ValueError("lse was given, and the plan computes none; make it with return_lse=True")
        check_result(name, facts.shape, facts.dtype, want_shape=problem.shape_of(name), want_dtype=problem.dtype_of(name), readonly=facts.readonly)
        if facts.place != planned:
            raise ValueError(f"{name} must lie on {planned}, as planned; got {facts.place}")
        row_major = replace(facts, strides=contiguous_strides(facts.shape, ITEMSIZE[facts.dtype]))
        if 0 not in facts.shape and (facts.address & 15 or _strides_differ(facts, row_major)):
            raise ValueError(f"{name} must be row-major and lie at an address that 16 bytes divide; got strides {facts.strides} (bytes)")
        return facts

    def explain(self) -> Explanation:
        """How it is computed, as `numbaflash.explain` says it."""
        return Explanation(self._call.problem, device_of(self._call.facts["q"]), None) if self.plan is None else explain_plan(self.plan)

    def __repr__(self):
        problem = self._call.problem
        how = "nothing to compute" if self.plan is None else f"{self.plan.family} on {self.plan.device.name}"
        pages = f", {problem.max_pages} pages of {problem.page_size} each" if problem.paged else ""
        return f"DecodePlan({how}: {problem.dtype}, q {problem.q_shape}, k {problem.k_shape}, v {problem.v_shape}{pages})"


def _with_results(library, arrays, options, return_lse, num_splits):
    """(call, out, lse): the call as plans of new results are made, or of these where they lie otherwise."""
    call = decode_call(library, arrays, options, return_lse, num_splits, keeps_workspace=True)
    out, lse = call.new["out"](None), call.new["lse"](None) if return_lse else None
    results = {name: x for name, x in (("out", out), ("lse", lse)) if x is not None}
    if any(library.address(x) & 15 for x in results.values()):  # less than every plan takes for granted
        call = decode_call(library, arrays | results, options, return_lse, num_splits, keeps_workspace=True)
    return call, out, lse


def _zeroed(library, workspace):
    """All 0 for whatever stream the first run is on: the host waits for it, this once."""
    library.clear(workspace, None)
    library.values(workspace)
    return workspace


def _strides_differ(facts, planned):
    """Along axes of more than one element, where there are any."""
    return 0 not in facts.shape and any(n > 1 and a != b for n, a, b in zip(facts.shape, facts.strides, planned.strides, strict=True))


def _check_library(argument, x, planned):
    """A type that has not been met before, `torch.nn.Parameter` say, may still be one of the library's."""
    if library_of(x, argument) is not planned:
        raise TypeError(f"{argument} must be an array of {planned.name}, as planned; got {type(x).__name__}")


def cascade(
    q,
    k_prefix,
    v_prefix,
    k_cache,
    v_cache,
    seqlens_k,
    page_table=None,
    *,
    scale=None,
    causal=False,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    num_splits=None,
):
    """`decode` of sequences that all begin with the same keys, which are read once for the batch and not once for each sequence.

    The prefix is attended by the queries of all sequences as rows of one problem, the rest of each sequence by `decode`, and `merge` puts the two
    together: the cascade of Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding" (2024).

    Parameters
    ----------
    q : array, (batch, seqlen_q, heads, head_dim)
        As `decode` takes it, with head dims from 1 to 256, of NumPy, CuPy, PyTorch or JAX.
    k_prefix : array, (prefix, kv_heads, head_dim)
        The keys that every sequence begins with.
    v_prefix : array, (prefix, kv_heads, head_dim_v)
    k_cache, v_cache, seqlens_k, page_table
        As `decode` takes them: the keys that follow the prefix, and how many. The present q's are among them, so each query sees the whole prefix.
    scale, softcap, sinks, num_splits
        As in `decode`.
    causal : bool, optional
        As in `decode`.
    window : (None, int or None), optional
        As in `decode`, without a bound to the left: which part of the prefix it leaves out depends on lengths that only the device knows.
    alibi_slopes : None
        Not supported, for the same reason: distances from the prefix depend on lengths.
    return_lse : bool, optional
        Also return the logarithm of the sum of exponentiated scores, sinks included.

    Returns
    -------
    out : array, (batch, seqlen_q, heads, head_dim_v)
        What `decode` would return of caches that hold the prefix before each sequence; in 16-bit dtypes the two parts are rounded before they are
        merged.
    lse : array, (batch, heads, seqlen_q), only with ``return_lse``

    Raises
    ------
    TypeError, ValueError
        As `decode`.
    UnsupportedError
        As `decode`, and for ALiBi, a window with a bound to the left, and arrays of other libraries.

    Examples
    --------
    >>> import numpy as np
    >>> import numbaflash as nf
    >>> rng = np.random.default_rng(0)
    >>> k_prefix, v_prefix = rng.standard_normal((2, 50, 2, 64), dtype=np.float32)
    >>> k_cache, v_cache = rng.standard_normal((2, 3, 20, 2, 64), dtype=np.float32)
    >>> q, lengths = rng.standard_normal((3, 1, 8, 64), dtype=np.float32), np.array([20, 1, 7])
    >>> out = nf.cascade(q, k_prefix, v_prefix, k_cache, v_cache, lengths)
    >>> flat = [np.concatenate([np.broadcast_to(p, (3, *p.shape)), c], axis=1) for p, c in ((k_prefix, k_cache), (v_prefix, v_cache))]
    >>> bool(np.allclose(out, nf.decode(q, *flat, lengths + 50), atol=1e-6))
    True
    """
    if in_torch_compile():
        from .torch import decoding as compiled

        options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "sinks": sinks}
        more = {"return_lse": return_lse, "num_splits": num_splits}
        return compiled.cascade(q, k_prefix, v_prefix, k_cache, v_cache, seqlens_k, page_table, **options, **more)
    prefix = {"k_prefix": k_prefix, "v_prefix": v_prefix}
    cache = {"q": q, "k": k_cache, "v": v_cache, "seqlens_k": seqlens_k, "page_table": page_table, "sinks": sinks, "alibi_slopes": alibi_slopes}
    library = _library(cache | prefix)
    if library.lends:
        raise UnsupportedError(f"cascade takes arrays of NumPy, CuPy, PyTorch or JAX, whose axes it can rearrange; got arrays of {library.name}")
    return_lse, window = check_flag("return_lse", return_lse), check_cascade(causal, window, alibi_slopes)
    if library.cascade is not None:
        options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "sinks": sinks, "num_splits": num_splits}
        return library.cascade(q, k_prefix, v_prefix, k_cache, v_cache, seqlens_k, page_table, return_lse=return_lse, **options)
    shape, facts = library.describe(q, "q").shape, {name: library.describe(x, name) for name, x in prefix.items()}
    check_axes("q", shape, "(batch, seqlen_q, heads, head_dim)")
    check_prefix(facts, library.describe(k_cache, "k_cache"), library.describe(v_cache, "v_cache"))
    batch, seqlen_q, heads, _ = shape
    alike = {"scale": scale, "softcap": softcap, "return_lse": True}
    rest = decode(q, k_cache, v_cache, seqlens_k, page_table, causal=causal, window=window, sinks=sinks, num_splits=num_splits, **alike)
    rows = q.reshape(1, batch * seqlen_q, *shape[2:])
    out, lse = forward(rows, k_prefix[None], v_prefix[None], **alike)
    first = out.reshape(batch, seqlen_q, *out.shape[2:]), library.namespace.swapaxes(lse.reshape(heads, batch, seqlen_q), 0, 1)
    out, lse = merge([first[0], rest[0]], [first[1], rest[1]])
    return (out, lse) if return_lse else out


def check_cascade(causal, window, alibi_slopes):
    """The window of a cascade, after the checks of what `decode` takes and a cascade does not."""
    left, right = check_window(window)
    if check_causal(causal) == "top_left":
        raise ValueError('causal must be False or True (bottom-right) in a cascade, whose queries stand at the end; got "top_left"')
    if left is not None:
        raise UnsupportedError(f"a window with a bound to the left may cut the shared prefix at another key for each sequence; got window={window!r}")
    if alibi_slopes is not None:
        raise UnsupportedError(
            "alibi_slopes in a cascade would need distances from the shared prefix, which depend on seqlens_k; call numbaflash.decode"
        )
    return None, right


def check_prefix(prefix, k_cache, v_cache):
    """The prefix, by the facts of its arrays, must fit the caches; whatever else there is to check, `forward` does."""
    for name, each in prefix.items():
        check_axes(name, each.shape, f"(prefix, kv_heads, head_dim{'_v' if name[0] == 'v' else ''})")
    for name, cache in (("k", k_cache), ("v", v_cache)):
        given, other = prefix[f"{name}_prefix"], f"{name}_cache"
        if given.dtype != cache.dtype:
            raise TypeError(f"{name}_prefix must have the dtype of {other}, {cache.dtype}; got {given.dtype}")
        if given.shape[1:] != cache.shape[2:]:
            raise ValueError(f"{name}_prefix must have the heads and head dim of {other}, {tuple(cache.shape[2:])}; got {given.shape[1:]}")
    check_equal("length (axis 0)", "v_prefix", prefix["v_prefix"].shape[0], "k_prefix", prefix["k_prefix"].shape[0])


def _options(scale, causal, window, softcap):
    """Options that are numbers, checked as far as they can be without a look at the arrays."""
    return {
        "scale": None if scale is None else check_scale(scale, 1),
        "causal": check_causal(causal),
        "window": check_window(window),
        "softcap": check_softcap(softcap),
    }


def _library(arrays):
    needed = (*REQUIRED, "seqlens_k")
    first = LIBRARIES.get(type(arrays["q"]))
    if first is not None and all(LIBRARIES.get(type(x)) is first for name, x in arrays.items() if x is not None or name in needed):
        return first  # the usual case, without names for people
    if arrays["seqlens_k"] is None:
        raise TypeError("seqlens_k must be an array of int32 or int64, (batch,): the valid keys of each sequence; got None")
    return one_library(**{called(name, "decode"): x for name, x in arrays.items() if x is not None or name in REQUIRED})


def _check_values(arrays):
    """Check lengths and page numbers where ``NUMBAFLASH_CHECK`` asks for it and their values are there: not in a trace."""
    if not values_are_checked():
        return
    cache = LIBRARIES[type(arrays["k"])].describe(arrays["k"], "k_cache").shape
    lengths, table = (_values(arrays[name], axes) for name, axes in (("seqlens_k", 1), ("page_table", 2)))
    if len(cache) != 4 or lengths is None or (table is None) != (arrays["page_table"] is None):
        return  # said when the call is prepared
    check_cache_lengths(lengths, cache[1] * (1 if table is None else table.shape[1]))
    if table is not None and len(table) == len(lengths):
        check_page_numbers(table, lengths, cache[1], cache[0])


def _values(x, axes):
    """What an array of integers holds; None where that is not known, or it is another array."""
    values = None if x is None else LIBRARIES[type(x)].values(x)
    return values if values is not None and values.ndim == axes and np.issubdtype(values.dtype, np.integer) else None
