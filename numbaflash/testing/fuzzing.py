"""Random search for cases that a kernel gets wrong, on the present machine, and their replay."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ..dispatch import FAMILIES
from ..problem import DTYPES
from . import ahead
from .cases import BackwardCase, Case, DecodeCase
from .libraries import LIBRARIES, device_of, gpu_libraries, numpy_dtype
from .memory import Placement
from .runner import run_backward_case, run_case, run_decode_case

DIRECTIONS = ("forward", "backward", "both", "decode")
REPORT_SECONDS = 5.0
SHRINK_SECONDS = {"cpu": 60.0, "cuda": 180.0}  # a smaller case may need another kernel, which takes seconds to compile for a GPU
ROUND = 200  # cases drawn with one Hypothesis seed, their GPU kernels built together


def fuzz(
    minutes: float = 1.0,
    family: str | None = None,
    seed: int | None = None,
    *,
    direction: str = "forward",
    library: str | None = None,
    kernel: Callable | None = None,
    device: int = 0,
    dtypes=None,
    head_dims=None,
    max_seqlen: int = 400,
    work: int | None = None,
    options=(),
    failure: str = "numbaflash-fuzz.json",
    file=None,
) -> int:
    """Search for a failing case; print progress, and a minimal failing case that can be replayed.

    Parameters
    ----------
    minutes : float
        Time to search. After a failure, up to a minute more (three on a GPU) is spent on making the case smaller.
    family : str, optional
        Kernel family to force; None lets the dispatcher choose.
    seed : int, optional
        Of the search, so that it can be repeated; drawn and printed when None.
    direction : str
        "forward", "backward", "both" of these, or "decode".
    library : str, optional
        One of `LIBRARIES`; by default the quickest one that reaches a GPU, NumPy without a GPU and for the cpu family. Not jax for gradients.
    kernel : callable, optional
        Your own kernel of one direction to search instead of that of numbaflash, as `run_case`, `run_backward_case` or `run_decode_case` takes it.
        Cases for which it raises NotImplementedError are passed over.
    device : int
        CUDA device ordinal.
    dtypes, head_dims : sequence, optional
        Restrict the search; by default all that the family has.
    max_seqlen, work : int, optional
        Bounds of a case, as `problems` takes them; ``work`` is 2**18 on the CPU and 2**21 on a GPU.
    options : sequence of str
        Options that about half of the cases each have, as `problems` (for "decode" `decode_problems`) takes them; none by default.
    failure : str
        File for a failing case. While a case runs it stands in ``failure + ".running"``, which is left over when the process dies.
    file : text file, optional
        Where to print, stdout by default.

    Returns
    -------
    int
        Exit status: 0 when no case failed, 1 otherwise.

    Raises
    ------
    ValueError
        For a wrong argument, or a family that cannot run here.
    """
    if not minutes > 0:
        raise ValueError(f"minutes must be positive; got {minutes}")
    if max_seqlen < 1:
        raise ValueError(f"max_seqlen must be at least 1; got {max_seqlen}")
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)} or None; got {family!r}")
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}; got {direction!r}")
    library = _library(library, family)
    if direction in ("backward", "both") and library == "jax":
        raise ValueError('library must not be jax for gradients: numbaflash.backward takes no JAX arrays. Use direction="forward" or "decode"')
    if direction == "both" and kernel is not None:
        raise ValueError('direction must be "forward", "backward" or "decode" for a kernel of your own; got "both"')
    where = device_of(library, device)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    search = _Search(minutes, direction, family, library, kernel, where, failure, file or sys.stdout)
    try:
        search.run(_strategy(direction, library, family if kernel is None else None, where, dtypes, head_dims, max_seqlen, work, options), seed)
    finally:
        search.running.unlink(missing_ok=True)
    return search.finish()


def replay(path, family: str | None = None, library: str | None = None, *, kernel: Callable | None = None, device: int = 0, file=None) -> int:
    """Run the case of a failure file (or of any file that holds the JSON of a `Case`) again.

    Parameters
    ----------
    path : path
    family, library : str, optional
        Instead of those in the file.
    kernel : callable, optional
        As in `fuzz`.
    device : int
    file : text file, optional
        Where to print, stdout by default.

    Returns
    -------
    int
        0 when the case passes, 1 when it fails.

    Raises
    ------
    OSError
        When the file cannot be read.
    ValueError
        When it holds no case.
    """
    file = file or sys.stdout
    case, recorded = load(path)
    family = family or recorded.get("family")
    library = library or recorded.get("library") or _library(None, family)
    print(case.snippet(family=family, library=library), file=file)
    try:
        accuracy = _run(case, family, library, kernel=kernel, device=device)
    except AssertionError as error:
        print(f"{type(error).__name__}: {error}", file=file)
        return 1
    worst = (f"{'not checked' if value is None else format(value, '.3g')} in {name}" for name, value in asdict(accuracy).items())
    print(f"passes: error / tolerance {', '.join(worst)}", file=file)
    return 0


def _run(case, *arguments, **options):
    run = {"forward": run_case, "backward": run_backward_case, "decode": run_decode_case}[case.direction]
    return run(case, *arguments, **options)


def load(path) -> tuple[Case, dict]:
    """The case in a failure file, and what else stands there (direction, family, library, error).

    The JSON of a `BackwardCase` alone needs ``{"direction": "backward", "case": ...}`` around it, that of a `DecodeCase` "decode".
    """
    try:
        data = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no case: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds no case: expected a JSON object, got {type(data).__name__}")
    if "case" not in data:
        data = {"case": data}
    direction = data.get("direction", "forward")
    kind = {"forward": Case, "backward": BackwardCase, "decode": DecodeCase}.get(direction if isinstance(direction, str) else None)
    if kind is None:
        raise ValueError(f'{path} holds no case: direction must be "forward", "backward" or "decode"; got {direction!r}')
    try:
        case = kind.from_json(json.dumps(data["case"]))
        case.problem  # noqa: B018  whether its fields make one
        return case, data
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} holds no case: {error}") from None


def _library(library, family) -> str:
    if library is not None:
        if library not in LIBRARIES:
            raise ValueError(f"library must be one of {', '.join(LIBRARIES)}; got {library!r}")
        return library
    if family == "cpu":
        return "numpy"
    found = gpu_libraries()
    if not found and family is not None:
        raise ValueError(f"family {family} needs a CUDA device and CuPy, PyTorch or numba-cuda to reach it; none was found")
    return found[0] if found else "numpy"


def _strategy(direction, library, family, where, dtypes, head_dims, max_seqlen, work, options=()):
    from hypothesis import strategies as st

    from .strategies import problems_for

    dtypes = list(DTYPES if dtypes is None else dtypes)
    if library in ("numpy", "cupy"):
        try:
            numpy_dtype("bfloat16")
        except ImportError:
            dtypes = [d for d in dtypes if d != "bfloat16"]
    missing = {"numba": "bfloat16", "jax": "float64"}.get(library)
    dtypes = [d for d in dtypes if d != missing]
    if not dtypes:
        raise ValueError(f"dtypes must hold one that {library} has here; got {missing}")
    work = work or (2**18 if where.kind == "cpu" else 2**21)
    bounds = {"dtypes": tuple(dtypes), "head_dims": head_dims, "max_seqlen": max_seqlen, "work": work, "options": tuple(options)}
    ways = ("forward", "backward") if direction == "both" else (direction,)
    return st.one_of(*(problems_for(family, where, way, **bounds) for way in ways))


class _Over(KeyboardInterrupt):
    """The search is over; the one kind of exception that Hypothesis lets through at once."""


class _Search:
    """The state of one search. Calling it runs one case."""

    def __init__(self, minutes, direction, family, library, kernel, where, failure, file):
        self.direction, self.family, self.library, self.kernel, self.where, self.file = direction, family, library, kernel, where, file
        self.failure, self.running = Path(failure), Path(f"{failure}.running")
        self.began = self.reported = time.monotonic()
        self.until = self.began + 60 * minutes
        self.cases = 0
        self.seen = Counter()
        self.failing: Case | None = None
        self.error: Exception | None = None
        self.fatal = False

    def run(self, strategy, seed):
        import hypothesis as hy

        self._print(f"fuzz: {self.direction}, {self.family or 'any family'}, {self.library}, seed {seed}")
        number = seed
        while not self._over():
            if self.where.kind == "cuda" and self.kernel is None:
                ahead.build(ahead.draw(strategy, number, ROUND), self.where, self.family, self.library)

            @hy.seed(number)
            @hy.settings(ahead.search_settings(), max_examples=ROUND)
            @hy.given(strategy)
            def search(case):
                self(case)

            try:
                search()
            except _Over:
                return
            except Exception:  # the failure itself, or Hypothesis' word that it does not repeat
                if self.failing is None:
                    raise
                return
            number += 1

    def __call__(self, case):
        if self._over():
            raise _Over
        self.running.write_text(self._record(case))
        try:
            _run(case, self.family if self.kernel is None else None, self.library, kernel=self.kernel, device=self.where.index)
        except NotImplementedError:
            self.seen["unsupported"] += 1
        except Exception as error:
            if self.failing is None:
                self.until = time.monotonic() + SHRINK_SECONDS[self.where.kind]
                self.fatal = not isinstance(error, AssertionError) and self.where.kind == "cuda"
                todo = "which may have cost the device; stopping" if self.fatal else "making it smaller"
                self._print(f"case {self.cases + 1} fails ({type(error).__name__}); {todo}")
            elif type(error) is not type(self.error):
                return
            self.failing, self.error = case, error
            self.cases += 1
            raise
        else:
            self.cases += 1
            self._count(case)
        if time.monotonic() - self.reported >= REPORT_SECONDS:
            self._report()

    def _over(self):
        """Time is over, or the device is lost: after a CUDA error nothing that follows in this process means anything."""
        return self.fatal or time.monotonic() >= self.until

    def _count(self, case):
        self.seen[case.dtype] += 1
        options = {
            "causal": bool(case.causal),
            "window": case.window is not None,
            "grouped": case.heads > case.kv_heads > 0,
            "backward": case.direction == "backward",
            "strided": any(getattr(case, name) != Placement() for name in "qkv"),
            "nan/inf hidden": case.hidden != "finite",
            "no keys": case.problem.rows_k == 0,
        }
        if case.direction == "decode":
            cache = case.cache
            options |= {"several tokens": case.seqlen_q > 1, "empty sequences": 0 in cache.lengths, "shared pages": cache.shared > 0}
            options |= {"latent": case.latent, "num_splits": case.num_splits is not None}
        self.seen.update(name for name, present in options.items() if present)
        self.seen.update(case.problem.features)

    def _report(self):
        self.reported = time.monotonic()
        seconds = self.reported - self.began
        counts = ", ".join(f"{name} {n}" for name, n in self.seen.most_common())
        self._print(f"{seconds:6.0f} s  {self.cases} cases  {self.cases / seconds:.1f}/s  {counts}")

    def finish(self) -> int:
        self._report()
        if self.failing is None:
            self._print("no case failed")
            return 0
        self.failure.write_text(self._record(self.failing))
        family = f" --family {self.family}" if self.family else ""
        again = f"numbaflash fuzz{family} --replay {self.failure}"
        if self.kernel is not None:  # of which the command line knows nothing
            again = f'numbaflash.testing.replay("{self.failure}", kernel=...)'
        self._print(f"\n{type(self.error).__name__}: {self.error}\n\n{self.failing.snippet(family=self.family, library=self.library)}\n{again}")
        return 1

    def _record(self, case):
        data = {"direction": case.direction, "case": json.loads(case.to_json()), "family": self.family, "library": self.library}
        if self.error is not None:
            data["error"] = f"{type(self.error).__name__}: {self.error}"
        return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items()) + "\n}\n"

    def _print(self, text):
        print(text, file=self.file, flush=True)
