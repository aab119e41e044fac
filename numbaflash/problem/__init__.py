"""What is computed: one frozen description of an attention problem, and every check of the user's arguments.

Arrays are known here only by shape and dtype name, so that the same checks and the same messages serve every array
library. The alignment of ``causal`` and ``window`` is settled here too: a kernel sees only the band

    ``i + offset - left <= j <= i + offset + right``

of keys ``j`` that query ``i`` may see, where a bound that excludes nothing is ``None``.

**Alignment.** Query i stands beside key ``i + offset``: causal, window and ALiBi all count from there. The last query of a batch entry stands
beside its last key, ``offset = length_k - length_q``, so that a query sees the same keys whether or not padding follows; only
``causal="top_left"`` stands the first query beside the first key, ``offset = 0``. The lengths are ``seqlen_q`` and ``seqlen_k``, or those that
``seqlens_q`` and ``seqlens_k`` hold for the entry: then each entry has an offset of its own, which only the device knows
(`Problem.offset_per_entry`). A length above the capacity of the array counts as the capacity, a negative one as 0.

**Packed sequences** lie one after the other, without padding: sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. Each is a batch entry
whose length is that difference, so everything said of entries holds for them. Rows before the first sequence and after the last belong to nobody:
their results are 0 (LSE: -inf). Numbers below 0 count as 0, numbers beyond the rows as their count; where the numbers are then not in ascending
order, there is no sequence at all.

**Caches** hold the keys of each sequence up to its length, that of the present queries included, and anything in the slots after it. Those of paged
caches lie in pages, in the order of a table (`Problem.pages`); entries of it that no key is read through may hold anything, too.

``plain``, ``packed`` and ``decoding`` make problems of checked arguments, ``description`` is what they make; ``checks`` are those of single
arguments, ``shapes`` those of arrays, and ``names`` what all of it is called.
"""

from __future__ import annotations

from .checks import (
    check_causal,
    check_dropout,
    check_flag,
    check_max_seqlen,
    check_needed,
    check_needs,
    check_num_splits,
    check_scale,
    check_seed,
    check_softcap,
    check_window,
    gradient_missing,
    no_dropout,
)
from .decoding import check_cache_lengths, check_page_numbers, make_decode_problem
from .description import Problem, trim_keys
from .names import (
    CONSTANT_OPTIONS,
    DECODE_FEATURES,
    DIFFERENTIABLE,
    DIFFERENTIABLE_OPTIONS,
    DROPOUT_STEPS,
    DTYPES,
    FEATURES,
    FORWARD_OPTIONS,
    GRANULE,
    ITEMSIZE,
    LENGTH_DTYPES,
    MASKS,
    MAX_CACHE_HEAD_DIM,
    MAX_HEAD_DIM,
    MAX_NEW_TOKENS,
    MAX_SEQLEN,
    NEEDS,
    OPTIONS,
    PACKED,
    PACKED_FEATURE,
    PAGE_TABLE,
    UnsupportedError,
)
from .packed import check_boundaries, make_packed_problem
from .plain import make_problem
from .shapes import check_result, check_saved

__all__ = [
    "CONSTANT_OPTIONS",
    "DECODE_FEATURES",
    "DIFFERENTIABLE",
    "DIFFERENTIABLE_OPTIONS",
    "DROPOUT_STEPS",
    "DTYPES",
    "FEATURES",
    "FORWARD_OPTIONS",
    "GRANULE",
    "ITEMSIZE",
    "LENGTH_DTYPES",
    "MASKS",
    "MAX_CACHE_HEAD_DIM",
    "MAX_HEAD_DIM",
    "MAX_NEW_TOKENS",
    "MAX_SEQLEN",
    "NEEDS",
    "OPTIONS",
    "PACKED",
    "PACKED_FEATURE",
    "PAGE_TABLE",
    "Problem",
    "UnsupportedError",
    "check_boundaries",
    "check_cache_lengths",
    "check_causal",
    "check_dropout",
    "check_flag",
    "check_max_seqlen",
    "check_needed",
    "check_needs",
    "check_num_splits",
    "check_page_numbers",
    "check_result",
    "check_saved",
    "check_scale",
    "check_seed",
    "check_softcap",
    "check_window",
    "gradient_missing",
    "make_decode_problem",
    "make_packed_problem",
    "make_problem",
    "no_dropout",
    "trim_keys",
]
