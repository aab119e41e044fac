"""The jitted operations that a program holds: forward, backward, and the reverse-mode derivative that ties them."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import jax
import jax.ffi
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from .. import recording
from ..call import MAX_CALLS
from ..problem import CONSTANT_OPTIONS, DIFFERENTIABLE, UnsupportedError, gradient_missing
from .launches import backward_plan, forward_plan, inputs_of, operands_of, problem_of, read_options, workspace_bytes
from .serving import TARGETS, register
from .shards import varying_alike

FORWARD_ONLY = (
    "numbaflash.forward cannot be differentiated; call numbaflash.attention, which can, or keep its arguments out of the derivative with "
    "jax.lax.stop_gradient"
)
DECODING = "numbaflash.decode cannot be differentiated; keep its arguments out of the derivative with jax.lax.stop_gradient"
_ONLY_ONCE = "the gradients of numbaflash.attention cannot be differentiated again (second derivatives, as for a gradient penalty or a Hessian)"


@functools.lru_cache(MAX_CALLS)
def differentiable(options: str, seed: int, with_lse: bool):
    """The forward operation with its reverse-mode derivative."""
    names = inputs_of(options)

    @jax.custom_vjp
    def attention(*arrays):
        return operation(options, seed, with_lse, _ONLY_ONCE)(*arrays)

    def save(*primals):
        needs = tuple(name for name, x in zip(names, primals, strict=True) if x.perturbed)
        for name in needs:
            if name in CONSTANT_OPTIONS:
                raise gradient_missing(name, f"jax.lax.stop_gradient({name})")
        arrays = tuple(x.value for x in primals)
        out, lse = operation(options, seed, True, _ONLY_ONCE)(*arrays)
        return (out, lse) if with_lse else out, (_Needs(tuple(name for name in DIFFERENTIABLE if name in needs)), arrays, out, lse)

    def differentiate(saved, cotangents):
        needs, arrays, out, lse = saved
        dout, dlse = cotangents if with_lse else (cotangents, None)
        if isinstance(dlse, SymbolicZero):
            dlse = None
        if isinstance(dout, SymbolicZero):
            dout, _ = varying_alike(jnp.zeros_like(out), out)
        if (recorder := recording.active) is not None:
            numbers = {name: x for name, x in read_options(options).items() if name not in ("arrays", "workspace", "family")}
            given = {"dout": dout, "out": out, "lse": lse, "dlse": dlse} | dict(zip(names, arrays, strict=True))
            recorder.note("backward", given | numbers | {"seed": seed, "needs": needs.names})
        told = options if dlse is None else json.dumps(read_options(options) | {"dlse": True})
        compute = _gradients(told, seed, needs.names)
        gradients = compute(dout, *arrays[:3], out, lse, *(() if dlse is None else (dlse,)), *arrays[3:])
        found = dict(zip(needs.names, gradients, strict=True))
        return tuple(found.get(name) for name in names)

    attention.defvjp(save, differentiate, symbolic_zeros=True)
    return attention


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Needs:
    """The inputs that are differentiated: known when the forward is traced, used when the backward is."""

    names: tuple[str, ...]


@functools.lru_cache(MAX_CALLS)
def operation(options: str, seed: int, with_lse: bool, refusal: str):
    """The jitted forward operation of an option set; ``refusal`` is what a derivative of it says."""

    def attention(*arrays):
        problem = problem_of(options, *_kind(*arrays))
        results = [(problem.shape_of(name), problem.dtype_of(name)) for name in ("out", "lse")[: 1 + with_lse]]
        if problem.is_empty:
            found = _zeros(results, arrays[0])
        else:
            size = workspace_bytes(forward_plan, options, with_lse, *_kind(*arrays))
            told = json.dumps(read_options(options) | {"workspace": True}) if size else options
            found = _call("forward", results + ([((size,), "uint8")] if size else []), arrays, told, seed)
        return tuple(found[:2]) if with_lse else found[0]

    return jax.jit(_refusing(attention, refusal))


@functools.lru_cache(MAX_CALLS)
def _gradients(options: str, seed: int, needs: tuple[str, ...]):
    """The jitted backward operation: of dout, q, k, v, out, lse, dlse where there is one, and the options."""
    told = json.dumps(read_options(options) | {"needs": needs})
    names = operands_of("backward", told)

    def gradients(*arrays):
        given = dict(zip(names, arrays, strict=True))
        shapes, dtypes = _kind(*(given[name] for name in inputs_of(options)))
        results = [(given[name].shape, given[name].dtype) for name in needs]
        if not needs or problem_of(options, shapes, dtypes).sees_nothing:
            return _zeros(results, arrays[0])
        size = workspace_bytes(backward_plan, told, shapes, dtypes)
        workspace = [((size,), "uint8")] if size else []
        return _call("backward", results + workspace, arrays, told, seed)[: len(needs)]

    return jax.jit(_refusing(gradients, _ONLY_ONCE))


def _refusing(function, refusal):
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def differentiate(primals, tangents):
        raise UnsupportedError(refusal)

    return guarded


def _kind(*arrays):
    return tuple(tuple(x.shape) for x in arrays), tuple(jnp.dtype(x.dtype).name for x in arrays)


def _zeros(results, like):
    return tuple(varying_alike(jnp.zeros(*each), like)[0] for each in results)


def _call(direction, results, arrays, options, seed):
    register()
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in results)
    told = read_options(options)
    # Options are not to be expanded: XLA would write them out.
    method = "expand_dims" if told["arrays"] or told["dropout"] else "broadcast_all"
    attributes = {"options": options} | ({"seed": str(seed)} if told["dropout"] else {})
    results = jax.ffi.ffi_call(TARGETS[direction], results, vmap_method=method)(*arrays, **attributes)
    return tuple(varying_alike(x, arrays[0])[0] for x in results)
