"""Checks of single arguments, as far as they can be without a look at the arrays."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Set

from .names import DIFFERENTIABLE, DIFFERENTIABLE_OPTIONS, DROPOUT_STEPS, MAX_SCALE, MAX_SPLITS, MIN_SOFTCAP, NEEDS, UnsupportedError


def check_scale(scale, head_dim) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):  # an array is refused: reading it could wait for a device
        raise TypeError(f"scale must be a real number or None (1/sqrt(head_dim)); got {scale!r}")
    try:
        value = float(scale)
    except OverflowError:  # without its digits, which Python may refuse to print
        raise ValueError("scale must be finite; got a number beyond the range of float64") from None
    if not math.isfinite(value):
        raise ValueError(f"scale must be finite; got {scale!r}")
    return value


def check_range(scale: float, dtype: str) -> float:
    """Kernels hold scale * log2(e) in the dtype of the scores."""
    scores = "float64" if dtype == "float64" else "float32"
    most = MAX_SCALE[scores]
    if abs(scale) > most:
        raise ValueError(f"scale must be from -{most:.4g} to {most:.4g} for {dtype}, whose scores are computed in {scores}; got {scale!r}")
    return scale


def check_causal(causal):
    if isinstance(causal, str):
        if causal == "top_left":
            return causal
    elif isinstance(causal, bool) or type(causal).__name__ in ("bool_", "bool"):
        return bool(causal)
    raise ValueError(f'causal must be False, True (bottom-right) or "top_left"; got {causal!r}')


def check_window(window):
    if window is None:
        return None, None
    try:
        if isinstance(window, (bytes, bytearray, Set, Mapping)):  # pairs of integers to Python, but never meant as one
            raise TypeError
        left, right = window
    except (TypeError, ValueError):
        raise TypeError(f"window must be None or a pair (left, right); got {window!r}") from None
    sides = []
    for side, value in (("left", left), ("right", right)):
        if value is not None:
            try:
                if isinstance(value, bool):
                    raise TypeError
                value = operator.index(value)
            except TypeError:
                raise TypeError(f"window {side} must be an integer or None (unbounded); got {value!r}") from None
            if value < 0:
                raise ValueError(f"window {side} must not be negative (None is unbounded, (w, 0) sees w + 1 keys); got {value}")
        sides.append(value)
    return tuple(sides)


def check_softcap(softcap) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap must be a real number or None (no cap); got {softcap!r}")
    try:
        value = float(softcap)
    except OverflowError:
        raise ValueError("softcap must be finite and positive; got a number beyond the range of float64") from None
    if not (math.isfinite(value) and value > 0):
        hint = ". None is no cap" if value == 0 else ""
        raise ValueError(f"softcap must be finite and positive; got {softcap!r}{hint}")
    return value


def check_softcap_range(softcap, scale, dtype):
    if softcap is None or dtype == "float64":
        return softcap
    most = MAX_SCALE["float32"]
    if not MIN_SOFTCAP <= softcap <= most:
        raise ValueError(f"softcap must be from {MIN_SOFTCAP:.4g} to {most:.4g} for {dtype}, whose scores are computed in float32; got {softcap!r}")
    if abs(scale) / softcap > most:
        raise ValueError(f"scale / softcap must be at most {most:.4g} for {dtype}; got scale {scale!r} and softcap {softcap!r}")
    return softcap


def check_dropout(dropout) -> float:
    """The probability as it is drawn: the nearest multiple of 2**-14 that is neither 0 nor 1, and 0 for 0."""
    if isinstance(dropout, bool) or not isinstance(dropout, numbers.Real):
        raise TypeError(f"dropout must be a real number, the probability of a weight to be dropped; got {dropout!r}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1; got {dropout!r}")
    return min(max(round(float(dropout) * DROPOUT_STEPS), 1), DROPOUT_STEPS - 1) / DROPOUT_STEPS if dropout else 0.0


def no_dropout(dropout) -> bool:
    """Whether it is the number 0. Not so for False or an array of 0, whose truth could wait for a device: `check_dropout` refuses them."""
    return type(dropout) in (float, int) and dropout == 0


def check_seed(seed, dropout: float) -> int:
    """The 64-bit seed of a dropout mask; without dropout it may be None.

    Raises
    ------
    TypeError
        For anything but an integer on the host: reading an array could wait for a device.
    ValueError
        For one that has no 64 bits, and for None with dropout.
    """
    if seed is None:
        if dropout:
            raise ValueError("dropout needs a seed, an integer that is a new one for each call and the same for its backward; got seed=None")
        return 0
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be an integer; got {seed!r}")
    value = int(seed)
    if not 0 <= value < 2**64:
        raise ValueError(f"seed must be at least 0 and below 2**64; got {seed!r}")
    return value


def check_max_seqlen(name: str, value) -> int | None:
    """How long the longest sequence is, as far as the caller knows."""
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer or None (not known); got {value!r}") from None
    if number < 0:
        raise ValueError(f"{name} must not be negative (None is not known); got {number}")
    return number


def check_num_splits(num_splits) -> int | None:
    """Into how many parts the keys of a sequence are divided; None leaves it to the kernel."""
    if num_splits is None:
        return None
    try:
        if isinstance(num_splits, bool):
            raise TypeError
        value = operator.index(num_splits)
    except TypeError:
        raise TypeError(f"num_splits must be an integer or None (the library chooses); got {num_splits!r}") from None
    if not 1 <= value <= MAX_SPLITS:
        raise ValueError(f"num_splits must be from 1 to {MAX_SPLITS} (None lets the library choose); got {value}")
    return value


def check_flag(name, value) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise TypeError(f"{name} must be True or False; got {value!r}")


def check_needs(needs, options=()) -> tuple[str, ...]:
    """The inputs whose gradients are wanted, in the order q, k, v, bias, sinks. The last two only where they are among the options of the call."""
    if isinstance(needs, (str, bytes, Mapping)):
        raise TypeError(f'needs must be a tuple of "q", "k" and "v"; got {needs!r}')
    try:
        names = list(needs)
    except TypeError:
        raise TypeError(f'needs must be a tuple of "q", "k" and "v"; got {needs!r}') from None
    allowed = tuple(name for name in DIFFERENTIABLE if name in NEEDS or name in options)
    for name in names:
        if isinstance(name, str) and name in DIFFERENTIABLE_OPTIONS and name not in allowed:
            raise ValueError(f'needs holds "{name}", but no {name} was given; got needs={needs!r}')
        if not isinstance(name, str) or name not in allowed:
            listed = ", ".join(f'"{each}"' for each in allowed[:-1])
            raise ValueError(f'needs must hold nothing but {listed} and "{allowed[-1]}"; got {name!r}')
    return tuple(name for name in allowed if name in names)


def check_needed(name: str, needs: tuple[str, ...]) -> None:
    """A gradient that the caller gives an array for (``dq=``, ...) must be one that is wanted."""
    if name not in needs:
        raise ValueError(f'd{name} was given, but "{name}" is not in needs; got needs={needs!r}. Add it, or leave d{name} out')


def gradient_missing(name: str, instead: str) -> UnsupportedError:
    """The error for an array that would be differentiated and has no gradient; ``instead`` is what to pass in its place."""
    return UnsupportedError(f"{name} requires a gradient, which numbaflash.attention does not compute. Pass {instead}")
