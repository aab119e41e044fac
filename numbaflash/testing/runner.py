"""Run a case and watch everything: the result, what was written where, and that the inputs are as they were."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .. import dispatch
from .accuracy import Accuracy, AccuracyError, GradientAccuracy, check_backward, check_forward
from .ahead import plan_of
from .cases import BackwardCase, Case, DecodeCase
from .exact import Expected, ExpectedGradients, expected, expected_gradients, spread_nonfinite
from .libraries import Operands, device_of, to_numpy
from .values import SENTINEL

REFERENCE_ON_GPU = 2**22  # scores from which torch's GPU computes the reference


class WriteError(AssertionError):
    """A call wrote where it must not, or left part of its result unwritten."""


def run_case(
    case: Case, family: str | None = None, library: str = "numpy", *, kernel: Callable | None = None, device: int = 0, known: Expected | None = None
) -> Accuracy:
    """Run a case and check all that can be checked.

    ``out`` and ``lse``, and the memory around every operand, hold NaN before the call. Afterwards

    * every element of ``out`` and ``lse`` has been written, and nothing around them,
    * the inputs and the memory around them are unchanged, bit for bit,
    * results handed in are the results returned; results allocated are of the inputs' library, of the right shape and dtype,
    * `check_forward` holds; for a family that says ``NONFINITE_VALUES_SPREAD``, as `spread_nonfinite` has it.

    Parameters
    ----------
    case : Case
    family : str, optional
        Kernel family to force; None lets the dispatcher choose.
    library : str
        One of `LIBRARIES`.
    kernel : callable, optional
        ``kernel(q, k, v, scale=..., causal=..., window=...)``, with the options that the case has by keyword (boundaries of packed sequences
        among them), returning ``out`` or ``(out, lse)`` (lse natural, (batch, heads, seqlen_q)), checked instead of `numbaflash.forward`, or
        `numbaflash.forward_varlen`. ``out=`` and ``lse=`` are not handed to it.
    device : int
        CUDA device ordinal for libraries on the GPU.
    known : Expected, optional
        What `expected` returns for this case, when it has been computed already.

    Returns
    -------
    Accuracy

    Raises
    ------
    AccuracyError
        When a result is wrong.
    WriteError
        When memory was written that must not be, or was not written that must be.
    UnsupportedError
        When no kernel (of the family) can compute the case.
    """
    return _run(case, family, library, kernel, device, known)


def _run(case, family, library, kernel, device, known):
    operands = Operands(case, library, device)
    q, k, v = operands.arrays["q"], *case.keys_and_values(operands.arrays)
    options = case.handed(operands.arrays)
    given = {}
    if kernel is None and case.give_out and "out" in operands.arrays:
        given = {name: operands.arrays[name] for name in ("out", "lse")[: 1 + case.return_lse]}
    with dispatch.use_family(family):
        result = _forward(case, q, k, v, given | options) if kernel is None else kernel(q, k, v, **case.options, **options)
    out, lse = result if isinstance(result, tuple) else (result, None)
    if kernel is None:
        _check_kind(case, given, q, out, lse)
    known = known or _expected(case, operands)
    v = operands.memory["v"].decoded()
    if kernel is None and not np.isfinite(v).all() and _values_spread(case, family, library, device):
        known = spread_nonfinite(known, case.problem, v, **case.given_options(operands.memory))
    accuracy = check_forward(case, out, lse, known=known)
    _check_memory(operands, given)
    return accuracy


def run_decode_case(
    case: DecodeCase,
    family: str | None = None,
    library: str = "numpy",
    *,
    kernel: Callable | None = None,
    device: int = 0,
    known: Expected | None = None,
) -> Accuracy:
    """Run a case of decoding and check all that can be checked, as `run_case` does.

    Parameters
    ----------
    case : DecodeCase
    family : str, optional
        Kernel family to force; None lets the dispatcher choose.
    library : str
        One of `LIBRARIES`.
    kernel : callable, optional
        ``kernel(q, k_cache, v_cache, seqlens_k=..., scale=..., causal=..., window=...)``, with ``page_table``, ``softcap``, ``alibi_slopes`` and
        ``sinks`` by keyword where the case has them, returning ``out`` or ``(out, lse)``, checked instead of `numbaflash.decode`.
    device : int
        CUDA device ordinal for libraries on the GPU.
    known : Expected, optional
        What `expected` returns for this case, when it has been computed already.

    Returns
    -------
    Accuracy

    Raises
    ------
    AccuracyError, WriteError, UnsupportedError
        As `run_case`.
    """
    return _run(case, family, library, kernel, device, known)


def run_backward_case(
    case: BackwardCase,
    family: str | None = None,
    library: str = "numpy",
    *,
    kernel: Callable | None = None,
    device: int = 0,
    known: ExpectedGradients | None = None,
) -> GradientAccuracy:
    """Run a backward case and check all that can be checked; the counterpart of `run_case`.

    The gradients, and the memory around every operand, hold NaN before the call. Afterwards every element of the gradients has been written
    and nothing around them, the inputs are unchanged, gradients that nobody needs are None, `check_backward` holds, and a deterministic case
    gives the same bits a second time.

    Parameters
    ----------
    case : BackwardCase
    family : str, optional
        Kernel family to force; None lets the dispatcher choose.
    library : str
        One of `LIBRARIES` but jax, whose arrays `numbaflash.backward` does not take.
    kernel : callable, optional
        ``kernel(dout, q, k, v, out, lse, scale=..., causal=..., window=..., dlse=..., deterministic=..., needs=...)``, with the options that
        the case has by keyword, returning (dq, dk, dv) and those of dbias and dsinks that are needed, checked instead of
        `numbaflash.backward`. Places for the gradients are not handed to it.
    device : int
        CUDA device ordinal for libraries on the GPU.
    known : ExpectedGradients, optional
        What `expected_gradients` returns for this case, when it has been computed already.

    Returns
    -------
    GradientAccuracy

    Raises
    ------
    AccuracyError
        When a result is wrong, or not the same again where it must be.
    WriteError
        When memory was written that must not be, or was not written that must be.
    UnsupportedError
        When no kernel (of the family) can compute the case.
    """
    if library == "jax" and kernel is None:
        raise ValueError("library must not be jax: numbaflash.backward takes no JAX arrays. Hand in a kernel that differentiates")
    operands = Operands(case, library, device)
    arrays = operands.arrays
    inputs = [arrays[name] for name in ("dout", "q", "k", "v", "out", "lse")]
    options = case.options | case.handed(arrays)
    options |= {"dlse": arrays.get("dlse"), "deterministic": case.deterministic, "needs": case.needs}
    given = {}
    if kernel is None and case.give_out:
        given = {name: arrays[name] for name in case.results if name in arrays}
    with dispatch.use_family(family):
        backward = kernel or _own(case)
        result = backward(*inputs, **options, **given)
        results = dict(zip(case.results, result, strict=True))
        if kernel is None:
            _check_gradients(case, given, inputs[1], results)
        if case.deterministic:
            _check_repeats(results, backward(*inputs, **options))
    if known is None:
        exact = {name: _exact(case, operands, name) for name in ("dout", *"qkv", "dlse") if name in operands.memory}
        known = expected_gradients(case.problem, **exact, **case.given_options(operands.memory))
    accuracy = check_backward(case, **results, known=known)
    _check_memory(operands, given)
    return accuracy


def _own(case):
    """The function of numbaflash that computes a case."""
    import numbaflash

    return getattr(numbaflash, case.direction if case.packed is None else f"{case.direction}_varlen")


def _check_gradients(case, given, q, results):
    for name, array in results.items():
        if (array is None) != (name[1:] not in case.needs):
            raise AccuracyError(f"needs={case.needs} must decide whether {name} is computed; got {type(array).__name__}")
        _check_array(name, array, given, q, case.problem.dtype_of(name))


def _check_repeats(first, second):
    for (name, a), b in zip(first.items(), second, strict=True):
        if a is not None:
            a, b = (to_numpy(x) for x in (a, b))
            different = (a != b) & ~(np.isnan(a) & np.isnan(b))
            if different.any():
                raise AccuracyError(f"{name} must be the same every time; {int(different.sum())} of {a.size} elements differed the second time")


def _forward(case, q, k, v, more):
    if case.direction == "decode":
        more = more | {"num_splits": case.num_splits}
    return _own(case)(q, k, v, return_lse=case.return_lse, **case.options, **more)


def _expected(case, operands):
    return expected(case.problem, *(_exact(case, operands, name) for name in "qkv"), **case.given_options(operands.memory))


def _exact(case, operands, name):
    """The values of an operand: where torch's GPU computes the reference, the array there."""
    if operands.library == "torch-cuda" and case.work >= REFERENCE_ON_GPU and case.direction != "decode":
        return operands.arrays[name]
    return operands.memory[name].decoded()


def _values_spread(case, family, library, device) -> bool:
    """Whether the family that computes the case says so of itself."""
    if case.problem.is_empty:
        return False
    plan = plan_of(case, device_of(library, device), family, library)
    return getattr(dispatch.family(plan.family, case.direction), "NONFINITE_VALUES_SPREAD", False)


def _check_kind(case, given, q, out, lse):
    if case.return_lse != (lse is not None):
        raise AccuracyError(f"return_lse={case.return_lse} must decide whether lse is returned; got {type(lse).__name__}")
    for name, array in (("out", out), ("lse", lse)):
        _check_array(name, array, given, q, case.problem.dtype_of(name))


def _check_array(name, array, given, q, dtype):
    if name in given and array is not given[name]:
        raise AccuracyError(f"{name} returned must be the {name} handed in; got another {type(array).__name__}")
    if array is not None and type(array) is not type(q):
        raise AccuracyError(f"{name} must be of the inputs' type {type(q).__name__}; got {type(array).__name__}")
    if array is not None and str(array.dtype).removeprefix("torch.") != dtype:
        raise AccuracyError(f"{name} must have dtype {dtype}; got {array.dtype}")


def _check_memory(operands, given):
    for name in operands.arrays:
        memory, bits = operands.memory[name], operands.bits(name)
        if name in given:
            changed = (bits != memory.bits) & memory.outside()
            if changed.any():
                raise WriteError(f"{_listing(changed, memory)} outside {name} (shape {memory.shape}, strides {memory.strides}) were written")
            unwritten = memory.view(bits) == SENTINEL[memory.dtype]
            if unwritten.any():
                at = tuple(int(x) for x in np.argwhere(unwritten)[0])
                raise WriteError(f"{int(unwritten.sum())} of {unwritten.size} elements of {name} were never written, the first at {at}")
        elif (bits != memory.bits).any():
            raise WriteError(f"{_listing(bits != memory.bits, memory)} of {name}, which must stay as it is, were written")


def _listing(changed, memory):
    at = np.flatnonzero(changed) - memory.first
    return f"{at.size} elements (the first {int(at[0])}, the last {int(at[-1])} elements from its first)"
