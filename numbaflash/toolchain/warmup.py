"""Building many kernels ahead, in parallel processes (Numba's compiler holds one lock a process).

The workers are plain subprocesses that speak pickle over pipes, not multiprocessing's, so that a script needs no
``if __name__ == "__main__"`` to warm up.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

from .. import dispatch
from ..dispatch import Device, Plan
from ..problem import (
    DECODE_FEATURES,
    NEEDS,
    PACKED,
    Problem,
    check_flag,
    check_needs,
    check_num_splits,
    make_decode_problem,
    make_packed_problem,
    make_problem,
)
from ..support import contiguous_backward_layouts, contiguous_layouts, described_options
from .compile import CompileError, KernelRequest, adopt, compile_ptx, is_cached
from .log import logger

_MOST_WORKERS = 16  # each takes about 300 MB


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warm-up did.

    Attributes
    ----------
    plans : int
        Distinct plans that were looked at.
    built, cached : tuple of str
        Kernels compiled now, and kernels that were there already.
    loaded : int
        Kernels loaded, counted on each device.
    failed : dict of str to str
        Kernel and its plan, and the error.
    seconds : float
    """

    plans: int = 0
    built: tuple[str, ...] = ()
    cached: tuple[str, ...] = ()
    loaded: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self):
        words = f"{len(self.built)} kernels built, {len(self.cached)} in the cache, {self.loaded} loaded, in {self.seconds:.1f} s"
        return words + "".join(f"\nfailed: {name}\n  {error}" for name, error in self.failed.items())


class WarmupError(CompileError):
    """Some kernels could not be built or loaded; all others were. ``report`` is the `WarmupReport`."""

    def __init__(self, report: WarmupReport):
        super().__init__(f"{len(report.failed)} kernels failed to warm up: {report}")
        self.report = report


def warmup(
    examples: Iterable[Problem | Plan] | Problem | Plan | None = None,
    *,
    dtypes=("float16", "bfloat16"),
    head_dims=(64, 128),
    causal=(False, True),
    windows=(None,),
    heads=((16, 16),),
    seqlens=None,
    totals=(),
    max_seqlens=(None,),
    caches=(),
    page_sizes=(None,),
    new_tokens=(1,),
    num_splits=None,
    batch: int = 1,
    options=({},),
    return_lse=(False, True),
    directions=("forward",),
    deterministic: bool = False,
    needs=NEEDS,
    device=0,
    workers: int | None = None,
    load: bool = True,
) -> WarmupReport:
    """Build kernels before they are needed: in parallel, into the disk cache, and load them.

    Which kernel a call needs is decided by its plan, so a warm-up is told problems: either `examples`, or every
    combination of the options.

    Parameters
    ----------
    examples : Problem or Plan, or several, optional
        Exactly these problems: ``numbaflash.explain(...).plan`` is the `Plan` of arrays, and keeps their strides,
        device and direction, and so is that of a `numbaflash.DecodePlan`. The lists up to ``options`` are then not used; a `Problem` stands for
        contiguous arrays.
    dtypes : sequence of str
    head_dims : sequence of int or (int, int)
        head_dim, or (head_dim, head_dim_v).
    causal, windows : sequence
        Values of `numbaflash.forward`'s options.
    heads : sequence of (int, int)
        (query heads, key/value heads).
    seqlens : sequence of int or (int, int), optional
        seqlen, or (seqlen_q, seqlen_k): tiles are chosen by length. By default 512, 4096 and 16384, or none where there are totals or caches.
    totals : sequence of int or (int, int)
        Packed sequences, as `numbaflash.forward_varlen` takes them: tokens of all of them, or (total_q, total_k).
    max_seqlens : sequence of None, int or (int, int)
        Of packed sequences: ``max_seqlen_q`` and ``max_seqlen_k``; None is not told.
    caches : sequence of int
        Keys that the cache of a sequence has room for, as `numbaflash.decode` takes it. Such kernels are built whatever ``directions`` says.
    page_sizes : sequence of None or int
        Of caches: keys of a page; None is a contiguous cache.
    new_tokens : sequence of int
        Of caches: queries of a sequence.
    num_splits : int, optional
        Of caches, as `numbaflash.decode` takes it.
    batch : int
        Batch entries; of packed sequences, how many there are.
    options : dict, or sequence of dict
        Further options of `numbaflash.forward` by name, each dict a combination: ``softcap``, ``dropout`` and ``scale`` as they are, and for an
        array (``mask``, ``bias``, ``alibi_slopes``, ``sinks``, ``seqlens_q``, ``seqlens_k``) its (shape, dtype), or True for a usual one: mask and
        bias (seqlen_q, seqlen_k), the bias of the dtype of q, slopes and sinks (heads,), lengths (batch,) of int32. ``block_mask=True`` stands
        for a mask that is a `numbaflash.BlockMask`. Packed sequences have no mask, bias and lengths; caches neither, nor dropout.
    return_lse : sequence of bool
        Values of `numbaflash.forward`'s option: kernels of some families differ. Gradients need the LSE.
    directions : sequence of "forward", "backward" and "decode"
        Attention, its gradients, or both; "decode" for examples that are problems of caches.
    deterministic, needs
        As `numbaflash.backward` takes them.
    device : int, "cpu", Device, or a sequence of these
        For a GPU that this machine does not have (to fill the cache of a container image), hand in a
        `numbaflash.dispatch.Device` and ``load=False``.
    workers : int, optional
        Compiler processes; by default one a CPU core, 16 at most.
    load : bool
        Load the kernels on the device, so that the first call in this process launches at once.

    Returns
    -------
    WarmupReport

    Raises
    ------
    TypeError, ValueError
        For a wrong argument.
    UnsupportedError
        When no kernel computes one of the problems.
    WarmupError
        When kernels failed; the others are built nevertheless.

    Examples
    --------
    >>> import numbaflash as nf
    >>> lists = {"dtypes": ("float32",), "head_dims": (64,), "causal": (True,), "heads": ((8, 2),)}
    >>> report = nf.warmup(**lists, totals=(4096,), batch=16, options={"softcap": 30.0, "alibi_slopes": True}, device="cpu")
    >>> report.plans, report.failed
    (2, {})
    """
    if examples is None:
        options = (options,) if isinstance(options, Mapping) else options
        seqlens = seqlens if seqlens is not None else () if totals or caches else (512, 4096, 16384)
        lists = {"dtypes": dtypes, "head_dims": head_dims, "causal": causal, "windows": windows, "heads": heads, "options": options}
        problems, plans = _combinations(lists | {"seqlens": seqlens, "totals": totals, "max_seqlens": max_seqlens}, batch), []
        of_caches = _cache_combinations(lists | {"caches": caches, "page_sizes": page_sizes, "new_tokens": new_tokens}, batch)
    else:
        of_caches = []
        examples = [examples] if isinstance(examples, (Problem, Plan)) else list(examples)
        for example in examples:
            if not isinstance(example, (Problem, Plan)):
                raise TypeError(f"examples must be Problem or Plan objects (numbaflash.explain(...).plan is one); got {type(example).__name__}")
        plans = [example for example in examples if isinstance(example, Plan)]
        problems = [example for example in examples if isinstance(example, Problem)]
    wanted = problems or of_caches
    devices = [_device(one) for one in (device if isinstance(device, (list, tuple)) else [device])] if wanted else []  # plans have theirs
    num_splits = check_num_splits(num_splits)
    kinds = _kinds(return_lse, directions, check_flag("deterministic", deterministic), needs)
    plans += [_plan(problem, on, *kind, num_splits) for on in devices for problem in problems for kind in kinds if _is_launched(problem, *kind)]
    kinds = _kinds(return_lse, ("decode",), False, NEEDS)
    plans += [_plan(problem, on, *kind, num_splits) for on in devices for problem in of_caches for kind in kinds if _is_launched(problem, *kind)]
    return warm_plans(plans, workers=workers, load=load)


def _device(one) -> Device:
    if isinstance(one, Device):
        return one
    if one == "cpu":
        return dispatch.CPU
    if isinstance(one, int) and not isinstance(one, bool):
        from .driver import device

        return device(one)
    raise TypeError(f'device must be an index, "cpu", a Device, or a sequence of these; got {one!r}')


def _pair(name, value):
    if isinstance(value, int):
        return value, value
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise TypeError(f"{name} must hold integers or pairs of integers; got {value!r}")
    return value


def _listed(name, values):
    if isinstance(values, (str, Mapping)) or not isinstance(values, (list, tuple, set, frozenset, range)):
        raise TypeError(f"{name} must be a sequence of values; got {values!r}")
    return values


def _combinations(lists, batch) -> list[Problem]:
    for name, values in lists.items():
        _listed(name, values)
    for one in lists["options"]:
        if not isinstance(one, Mapping):
            raise TypeError(f"options must be a dict of options, or a sequence of such; got {one!r}")
    lengths = [(None, *_pair("seqlens", pair)) for pair in lists.pop("seqlens")]
    longest = [(None, None) if value is None else _pair("max_seqlens", value) for value in lists.pop("max_seqlens")]
    lengths += [(told, *_pair("totals", pair)) for pair, told in product(lists.pop("totals"), longest)]
    found = []
    for dtype, dims, is_causal, window, head_pair, options, (told, rows, keys) in product(*lists.values(), lengths):
        (dim, dim_v), (query_heads, kv_heads) = _pair("head_dims", dims), _pair("heads", head_pair)
        leading = ((batch, rows), (batch, keys)) if told is None else ((rows,), (keys,))
        shapes = (*leading[0], query_heads, dim), (*leading[1], kv_heads, dim), (*leading[1], kv_heads, dim_v)
        more = {"causal": is_causal, "window": window} | described_options(options, shapes, dtype)
        if told is None:
            found.append(make_problem(*shapes, (dtype,) * 3, **more))
        else:
            more |= {"max_seqlen_q": told[0], "max_seqlen_k": told[1]} | dict.fromkeys(PACKED, ((batch + 1,), "int32"))
            found.append(make_packed_problem(*shapes, (dtype,) * 3, **more))
    return found


def _cache_combinations(lists, batch) -> list[Problem]:
    lists = {name: _listed(name, values) for name, values in lists.items()}
    for name in ("caches", "page_sizes", "new_tokens"):
        for n in lists[name]:
            if not (name == "page_sizes" and n is None) and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
                raise TypeError(f"{name} must hold positive integers{' and None' if name == 'page_sizes' else ''}; got {n!r}")
    found = []
    for dtype, dims, is_causal, window, head_pair, options, capacity, page_size, tokens in product(*lists.values()):
        (dim, dim_v), (query_heads, kv_heads) = _pair("head_dims", dims), _pair("heads", head_pair)
        leading, more = (batch, capacity), {}
        if page_size is not None:
            entries = -(-capacity // page_size)
            leading, more = (batch * entries, page_size), {"page_table": ((batch, entries), "int32")}
        shapes = (batch, tokens, query_heads, dim), (*leading, kv_heads, dim), (*leading, kv_heads, dim_v)
        told = described_options(options | {"seqlens_k": options.get("seqlens_k") or True}, shapes, dtype)
        told = {name: value for name, value in told.items() if name != "dropout" or value}
        if others := set(told) - {*DECODE_FEATURES, "scale"}:
            raise ValueError(f"caches have no {', '.join(sorted(others))}; leave {'them' if len(others) > 1 else 'it'} out")
        found.append(make_decode_problem(*shapes, (dtype,) * 3, causal=is_causal, window=window, **told, **more))
    return found


def _kinds(return_lse, directions, deterministic, needs):
    """(direction, with an LSE, deterministic, needs) of each call that a problem stands for."""
    kinds = []
    for direction in _listed("directions", directions):
        if direction not in ("forward", "backward", "decode"):
            raise ValueError(f'directions must hold nothing but "forward", "backward" and "decode"; got {direction!r}')
        asked = (True,) if direction == "backward" else (check_flag("return_lse", one) for one in _listed("return_lse", return_lse))
        kinds += [(direction, with_lse, deterministic, needs) for with_lse in asked]
    return kinds


def _is_launched(problem, direction, with_lse, deterministic, needs):
    return not (problem.sees_nothing or not needs if direction == "backward" else problem.is_empty)


def _plan(problem, on, direction="forward", with_lse=True, deterministic=False, needs=NEEDS, num_splits=None) -> Plan:
    """The plan of contiguous arrays."""
    if direction == "forward":
        return dispatch.make_plan(problem, contiguous_layouts(problem, lse=with_lse), on)
    if direction == "decode":
        return dispatch.make_decode_plan(problem, contiguous_layouts(problem, lse=with_lse), on, num_splits)
    needs = check_needs(needs, problem.gradients)
    return dispatch.make_backward_plan(problem, contiguous_backward_layouts(problem, needs), on, deterministic)


def warm_plans(plans: Iterable[Plan], *, workers: int | None = None, load: bool = True) -> WarmupReport:
    """Build and load what plans need. Kernels that nobody requests are built here, by the family's ``build_kernels`` or else ``prepare``."""
    start = time.perf_counter()
    wanted: dict[KernelRequest, Plan] = {}
    here: dict[str, bool] = {}  # what was built without a request, and whether it was there already
    failed, loads, count = {}, {}, 0
    for plan in plans:
        count += 1
        family = dispatch.family(plan.family, plan.direction)
        if plan.device.kind == "cpu" or not hasattr(family, "requests"):
            label = _describe(plan)
            try:
                if plan.device.kind == "cuda" and not load:
                    raise CompileError(f"family {plan.family} cannot build a kernel without loading it; use load=True")
                if hasattr(family, "build_kernels"):
                    here = family.build_kernels(plan) | here
                else:
                    family.prepare(plan)
                    here[label] = False
            except Exception as error:
                failed[label] = f"{type(error).__name__}: {error}"
            continue
        for request in family.requests(plan):
            wanted.setdefault(request, plan)
            loads.setdefault((request, plan.device.index), None)
    report = build_all(wanted, workers=workers)
    failed.update({f"{request}; {_describe(wanted[request])}": error for request, error in report.failures.items()})
    loaded = 0
    if load:
        for request, index in loads:
            if request not in report.failures:
                try:
                    _load(request, index)
                    loaded += 1
                except Exception as error:
                    failed[f"{request}; {_describe(wanted[request])}; device {index}"] = f"{type(error).__name__}: {error}"
    built = (*(name for name, was_there in here.items() if not was_there), *map(str, report.built))
    cached = (*(name for name, was_there in here.items() if was_there), *map(str, report.cached))
    result = WarmupReport(count, built, cached, loaded, failed, time.perf_counter() - start)
    logger.info("warmup: %s", result)
    if failed:
        raise WarmupError(result)
    return result


def _describe(plan):
    problem = plan.problem
    return f"plan of {plan.family} on {plan.device.name} for {problem}"


def _load(request, index):
    from .driver import load

    load(request, index)


@dataclass(slots=True)
class Builds:
    """Outcome of `build_all`, by request."""

    built: list[KernelRequest] = field(default_factory=list)
    cached: list[KernelRequest] = field(default_factory=list)
    failures: dict[KernelRequest, str] = field(default_factory=dict)


def build_all(requests: Iterable[KernelRequest], *, workers: int | None = None) -> Builds:
    """Compile kernels, each once, in as many processes as `workers` says. Failures are returned, not raised."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"workers must be a positive integer or None; got {workers!r}")
    outcome, missing = Builds(), []
    for request in dict.fromkeys(requests):
        (outcome.cached if is_cached(request) else missing).append(request)
    workers = min(workers or min(_cores(), _MOST_WORKERS), len(missing)) if sys.executable else 1
    queue, lock = list(reversed(missing)), threading.Lock()

    def serve():
        worker = None
        while True:
            with lock:
                if not queue:
                    break
                request = queue.pop()
            try:
                if workers == 1 or _is_of_main(request):
                    compile_ptx(request)
                else:
                    worker = worker or _Worker()
                    adopt(request, worker.build(request))
                outcome.built.append(request)
            except Exception as error:
                outcome.failures[request] = str(error) if isinstance(error, (WorkerError, CompileError)) else f"{type(error).__name__}: {error}"
                if worker is not None and worker.has_ended():
                    worker = None
        if worker is not None:
            worker.close()

    if workers == 1:
        serve()
    else:
        threads = [threading.Thread(target=serve, name=f"numbaflash-warmup-{i}") for i in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return outcome


def _cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_of_main(request):
    """Another process cannot import what the user's script defines."""
    return request.build.startswith("__main__:") or type(request.config).__module__ == "__main__"


class WorkerError(RuntimeError):
    """A compiler process failed; the message is the error's there."""


_BOOT = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from numbaflash.toolchain.warmup import serve_builds; serve_builds()"


class _Worker:
    def __init__(self):
        self._process = subprocess.Popen([sys.executable, "-c", _BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        pickle.dump(sys.path, self._process.stdin)

    def build(self, request):
        try:
            pickle.dump(pickle.dumps(request), self._process.stdin)
            self._process.stdin.flush()
            ok, answer = pickle.load(self._process.stdout)
        except (OSError, EOFError) as error:
            code = self._process.wait()
            raise WorkerError(f"the compiler process ended with return code {code}" + (" (out of memory?)" if code == -9 else "")) from error
        if not ok:
            raise WorkerError(answer)
        return answer

    def has_ended(self):
        return self._process.poll() is not None

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def serve_builds() -> None:
    """Main loop of a compiler process: requests come on stdin, answers go to what was stdout (prints go to stderr)."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            message = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:  # the request's own bytes apart: a class that cannot be imported here does not break the stream
            answer = True, compile_ptx(pickle.loads(message))
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()
