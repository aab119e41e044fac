"""What arrays, dtypes and features are called, the limits of sizes and numbers, and the error for what no kernel has."""

from __future__ import annotations

import math
import sys

DTYPES = ("float16", "bfloat16", "float32", "float64")
NEEDS = ("q", "k", "v")
"""Inputs that always have gradients."""

FORWARD_OPTIONS = ("mask", "block_mask", "bias", "alibi_slopes", "sinks", "seqlens_q", "seqlens_k")
"""Arrays that a problem of `make_problem` may have beyond q, k and v. ``block_mask`` is what a `numbaflash.BlockMask` holds, which users pass as
``mask``."""

PAGE_TABLE = "page_table"
"""The array that says where the keys of a paged cache lie."""

OPTIONS = (*FORWARD_OPTIONS, PAGE_TABLE)
"""Arrays that a problem may have beyond q, k and v."""

MASKS = ("mask", "block_mask")
"""Those that hide pairs one by one; a problem has one of them at most."""

PACKED = ("cu_seqlens_q", "cu_seqlens_k")
"""Arrays that packed sequences bring."""

DIFFERENTIABLE_OPTIONS = ("bias", "sinks")
"""Those of `OPTIONS` that have gradients."""

DIFFERENTIABLE = NEEDS + DIFFERENTIABLE_OPTIONS
"""Inputs that may have gradients."""

CONSTANT_OPTIONS = tuple(name for name in FORWARD_OPTIONS if name not in DIFFERENTIABLE_OPTIONS)
"""Arrays that have none."""

FEATURES = ("softcap", *FORWARD_OPTIONS, "dropout")
"""What a problem may have beyond q, k, v and a band, by the names of the arguments."""

PACKED_FEATURE = "packed sequences"
"""What a problem of `make_packed_problem` has beyond that."""

DECODE_FEATURES = ("softcap", "alibi_slopes", "sinks", "seqlens_k", PAGE_TABLE)
"""What a problem of `make_decode_problem` may have."""

GRANULE = 64
"""Queries, and keys, of the smallest block that a `numbaflash.BlockMask` tells apart."""

MAX_HEAD_DIM = 256
MAX_CACHE_HEAD_DIM = 576
"""Of `make_decode_problem`: 512 and 64 are those of a latent cache with its rotary part."""
MAX_NEW_TOKENS = 64
"""Queries of a sequence in `make_decode_problem`."""
MAX_PAGES = 2**31 - 1
MAX_SEQLEN = 2**30  # row and key numbers, and their sums with the offset, stay within int32
MAX_SCALE = {"float32": (2 - 2**-23) * 2.0**127 / math.log2(math.e), "float64": math.nextafter(sys.float_info.max / math.log2(math.e), 0)}
"""By the dtype that scores are computed in."""
MIN_SOFTCAP = 2.0**-126  # kernels hold softcap * log2(e) and scale / softcap in float32, but for float64
DROPOUT_STEPS = 2**14
"""Dropout draws 14 bits for each pair, so the probability is a multiple of ``1 / DROPOUT_STEPS``."""

MAX_SPLITS = 256
"""Parts of the keys of a sequence in decoding: the memory of partial results grows with them."""

LENGTH_DTYPES = ("int32", "int64")
ITEMSIZE = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}


class UnsupportedError(NotImplementedError):
    """A legal problem that no kernel family can compute; the message names each family and its reason."""
