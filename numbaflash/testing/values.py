"""Element bits of every dtype, and the recipes that fill q, k and v of a case."""

from __future__ import annotations

import numpy as np

BITS = {"float16": np.dtype(np.uint16), "bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.uint32), "float64": np.dtype(np.uint64)}
"""Memory is kept as unsigned integers, so that bfloat16 needs no further package and NaN patterns survive every copy."""

SENTINEL = {"float16": 0x7E5A, "bfloat16": 0x7FDA, "float32": 0x7FC5A5A5, "float64": 0x7FF8A5A5A5A5A5A5}
"""A NaN that no computation yields: it marks output elements, and the memory around them, that nobody has written."""

RECIPES = ("normal", "big", "constant", "tiny", "subnormal", "negative", "ascending", "peaky", "nan")
"""What q, k and v hold.

normal
    Standard normal numbers.
big
    Scores in the hundreds or thousands, values in the hundreds.
constant
    All keys of a head are the same, so every weight is the same.
tiny
    Numbers near 2**-10: scores close to 0.
subnormal
    Numbers below the smallest normal one of the dtype.
negative
    Every score is far below 0, and so is the log-sum-exp.
ascending
    Scores that grow along the keys: the running maximum changes in every block.
peaky
    One key a head is huge: the softmax is one-hot, or that key is as good as masked.
nan
    Normal numbers, with a few NaN that queries do see.
"""

HIDDEN = ("finite", "nan", "inf")
"""What lies where no visible pair touches: in masked keys and values, in queries that see no key, and around the arrays."""

_SUBNORMAL_EXPONENT = {"float16": -18, "bfloat16": -130, "float32": -135, "float64": -1035}


def encode(values, dtype: str) -> np.ndarray:
    """Bits of float64 values, rounded to nearest even."""
    with np.errstate(over="ignore", under="ignore"):
        if dtype != "bfloat16":
            return np.ascontiguousarray(np.asarray(values).astype(dtype)).view(BITS[dtype])
        wide = np.ascontiguousarray(np.asarray(values).astype(np.float32))
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)


def decode(bits, dtype: str) -> np.ndarray:
    """float64 values of bits."""
    bits = np.ascontiguousarray(bits, dtype=BITS[dtype])
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(dtype).astype(np.float64)


def rounded(values, dtype: str) -> np.ndarray:
    """float64 values rounded to what the dtype can hold."""
    return decode(encode(values, dtype), dtype)


def fill(recipe: str, dtype: str, rng: np.random.Generator, q_shape, k_shape, v_shape):
    """q, k and v (float64) of a recipe; a broadcast axis has length 1 in its shape."""
    q, k, v = (rng.standard_normal(shape) for shape in (q_shape, k_shape, v_shape))
    if recipe == "big":
        q, k, v = 16 * q, 16 * k, 256 * v
    elif recipe == "constant":
        k = np.broadcast_to(k[:, :1], k.shape).copy()
    elif recipe == "tiny":
        q, k, v = (x * 2.0**-10 for x in (q, k, v))
    elif recipe == "subnormal":
        q, k, v = (x * 2.0 ** _SUBNORMAL_EXPONENT[dtype] for x in (q, k, v))
    elif recipe == "negative":
        q[..., 0], k[..., 0] = 64, -64
    elif recipe == "ascending":
        q[..., 0] = 4
        k[..., 0] = np.linspace(-8, 8, k.shape[1])[:, None]
    elif recipe == "peaky" and k.shape[1]:
        k[:, rng.integers(k.shape[1])] *= 64
    elif recipe == "nan":
        for x in (q, k, v)[rng.integers(3) :]:
            if x.size:
                x.flat[rng.integers(x.size, size=1 + x.size // 4096)] = np.nan
    return q, k, v


def fill_gradient(recipe: str, dtype: str, rng: np.random.Generator, shape):
    """dout or dlse (float64) of a recipe."""
    x = rng.standard_normal(shape)
    if recipe == "big" and dtype == "float16":
        x = x * 2.0**-4  # dout @ v stays below 65504
    elif recipe == "tiny":
        x = x * 2.0**-10
    elif recipe == "subnormal":
        x = x * 2.0 ** _SUBNORMAL_EXPONENT[dtype]
    elif recipe == "nan" and x.size and rng.integers(2):
        x.flat[rng.integers(x.size, size=1 + x.size // 4096)] = np.nan
    return x
