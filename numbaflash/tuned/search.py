"""Measure the candidates of a family for some calls, and keep those that win.

For each call: what the family's own choice computes is judged by the accuracy rule, and each candidate's results by those, before anything is timed.
All candidates take turns in a few rounds, and the fastest of them, with the family's own, in many more. One has won when three quarters of its times
are below three quarters of the own choice's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from .. import call as road
from .. import dispatch
from .._version import __version__
from ..cli.measure import seconds_text
from ..dispatch import use_config, use_family
from ..problem import UnsupportedError
from ..testing.accuracy import AccuracyError
from ..verify import meaning, memory, timing
from ..verify.blas import one_thread
from ..verify.inputs import Inputs, difference
from ..verify.order import workspace_of
from ..verify.places import Place
from ..verify.shapes import Call, without_pages
from . import store, values_of
from .keys import key_of, model_of

FINALISTS = 5
"""Candidates beside the family's own choice that are timed in many rounds."""
LEAST_GAIN = 0.02
"""Of the own choice's time: less is not worth an entry."""
FIRST_SHARE = 0.5
"""Of a call's time, for building, checking and the first rounds."""

TUNED, KEPT, WRONG, SKIPPED = "tuned", "own choice", "WRONG", "skipped"


@dataclass
class Trial:
    """A candidate.

    Attributes
    ----------
    config : object
    values : dict
        The fields in which candidates differ.
    seconds : tuple of float or None
        Quartiles of the last rounds that it was in.
    rounds : int
    why_not : str
        Why it was left out; "" where it was not.
    wrong : bool
        It computed something else.
    """

    config: Any
    values: dict[str, Any]
    seconds: tuple[float, float, float] | None = None
    rounds: int = 0
    why_not: str = ""
    wrong: bool = False


@dataclass
class Outcome:
    """What was found for a call.

    Attributes
    ----------
    call : Call
    status : str
        `TUNED`, `KEPT` (nothing was measurably faster), `WRONG` (the family's own choice is), or `SKIPPED`.
    text : str
    family, key : str
    trials : list of Trial
        The family's own choice first.
    entry : Entry or None
        What a table is to have.
    file : str
        Where it was stored; "" where it was not.
    """

    call: Call
    status: str = SKIPPED
    text: str = ""
    family: str = ""
    key: str = ""
    trials: list[Trial] = field(default_factory=list)
    entry: store.Entry | None = None
    file: str = ""

    @property
    def wrong(self) -> bool:
        """Something computed a wrong result."""
        return self.status == WRONG or any(trial.wrong for trial in self.trials)


def tune(
    calls: list[Call],
    place: Place,
    seconds: float,
    *,
    family: str | None = None,
    directions: tuple[str, ...] = ("forward", "backward", "decode"),
    folder=None,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Tune some calls, one after the other, and store each that is won at once.

    Parameters
    ----------
    calls : list of Call
    place : Place
        Of NumPy, CuPy or PyTorch.
    seconds : float
        For checking and timing; building kernels comes on top. What is under way is finished; calls that nothing is left for are skipped.
    family : str, optional
        Kernel family; by default the best that can compute each call.
    directions : tuple of str
        Calls of others are left out.
    folder : Path, optional
        Where tables are stored; by default that of the user.
    dry_run : bool
        Store nothing.
    say : callable
        Gets lines of text as the work goes on.

    Returns
    -------
    list of Outcome

    Raises
    ------
    ValueError
        For arrays of JAX, whose programs choose by themselves when they run.
    OSError
        When a table cannot be written.
    """
    if place.library == "jax":
        raise ValueError("library must be numpy, cupy or torch: calls of JAX use the same tables")
    calls = [call for call in calls if call.direction in directions]
    outcomes, seen = [], set()
    try:
        with nullcontext() if place.on_gpu else one_thread():
            for n, call in enumerate(calls):
                say(f"[{n + 1}/{len(calls)}] {call}")
                search = _Search(call, place, family, seconds / (len(calls) - n), say)
                outcome = search.run(seen)
                seconds = max(0.0, seconds - search.spent)
                if not dry_run:
                    _keep(outcome, place, folder)
                say(f"  {outcome.status}: {outcome.text}")
                outcomes.append(outcome)
                place.release()
    finally:
        road.forget()
    return outcomes


def _keep(outcome, place, folder):
    """Store what was won. Where nothing was, an older entry that has lost, or is wrong, is dropped, and one of the package overruled."""
    model = model_of(place.device)
    path, at = store.path_of(model, folder), (outcome.family, outcome.call.direction, outcome.key)
    if outcome.entry is not None:
        outcome.file = str(store.store(model, [outcome.entry], folder=folder))
        return
    wrong = [trial.values for trial in outcome.trials if trial.wrong]
    untimed = [trial.values for trial in outcome.trials if trial.seconds is None]

    def has_lost(entry):
        return entry.place == at and (entry.config in wrong or (outcome.status == KEPT and entry.config not in untimed))

    if any(has_lost(entry) for entry in _entries(path, model)):
        store.store(model, [], drop=[at], folder=folder)
        outcome.text += f"; the older entry was removed from {path}"
    for entry in _entries(store.path_of(model, store.SHIPPED), model):
        if has_lost(entry) and not entry.is_stale and path.parent != store.SHIPPED:
            own = replace(entry, config=outcome.trials[0].values, seconds=entry.default_seconds, date=store.now(), problem=str(outcome.call))
            outcome.file = str(store.store(model, [own], folder=folder))
            outcome.text += f"; {outcome.file} has it in the place of the package's"


def _entries(path, model) -> list[store.Entry]:
    try:
        return store.read(path, model)
    except (OSError, store.TableError):
        return []


class _Search:
    def __init__(self, call: Call, place: Place, family: str | None, seconds: float, say):
        self.call, self.place, self.family, self.seconds, self.say = call, place, family, seconds, say
        self.began = None

    @property
    def spent(self) -> float:
        """Seconds since kernels were built."""
        return 0.0 if self.began is None else time.monotonic() - self.began

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the call's time is over."""
        return share * self.seconds - self.spent

    def run(self, seen: set) -> Outcome:
        outcome = Outcome(self.call)
        reason = meaning.supported(self.call, self.place, self.family)
        if reason is not None and "page_table" in self.call.arrays:
            plain = without_pages(self.call)
            if meaning.supported(plain, self.place, self.family) is None:
                self.say("  no kernel has pages here; contiguous caches instead")
                self.call = outcome.call = plain
                reason = None
        if reason is not None:
            outcome.text = f"no kernel can compute it: {reason}"
        elif self.left() <= 0:
            outcome.text = "no time left (--budget)"
        elif self.call.numbers.get("num_splits") is not None:
            outcome.text = "its number of parts was given, and results of it must not depend on a table"
        else:
            try:
                memory.check_fits([self.call], self.place, lambda call: workspace_of(call, self.place, self.family))
                self._search(outcome, seen)
            except (UnsupportedError, memory.TooLargeError) as error:
                outcome.text = " ".join(str(error).split())
        return outcome

    def _search(self, outcome, seen):
        with use_family(self.family):
            self.inputs = inputs = Inputs.of(self.call, self.place)
            plan = inputs.explain().plan
        if plan is None:
            outcome.text = "nothing is launched"
            return
        self.plan, self.package = plan, dispatch.family(plan.family, plan.direction)
        how = {"forward": (), "backward": (self.call.deterministic,), "decode": (None,)}[plan.direction]
        outcome.family, outcome.key = plan.family, key_of(plan.problem, plan.layouts, plan.device, how)
        if (outcome.family, plan.direction, outcome.key) in seen:
            outcome.text = "tuned already: it shares its choice with a call before"
            return
        seen.add((outcome.family, plan.direction, outcome.key))
        if not hasattr(self.package, "candidates"):
            outcome.text = f"the family {plan.family} has one choice alone"
            return
        configs = self.package.candidates(plan.problem, plan.layouts, plan.device, *how)
        outcome.trials = [Trial(config, values_of(self.package, config)) for config in configs]
        if len(configs) < 2:
            outcome.text = f"the family {plan.family} has one candidate alone"
            return
        self.say(f"  {plan.family}: {len(configs)} candidates for {outcome.key}")
        own, *others = outcome.trials
        self._build(outcome.trials, how)
        if own.why_not:
            outcome.text = f"the family's own choice cannot be built: {own.why_not}"
            return
        self.began = time.monotonic()
        if not self._judge_own(own, outcome):
            return
        self._check(others)
        for trial in others:
            if trial.why_not:
                self.say(f"  {'WRONG, ' if trial.wrong else ''}left out: {_words(trial.values)}: {trial.why_not}")
        self._measure(own, others, outcome)

    def _build(self, trials, how):
        """All kernels; those of a GPU in parallel, of which those that spill where the family's own choice does not are left out."""
        if not self.place.on_gpu:
            self.package.build_kernels(self.plan)
            return
        from ..toolchain import CompileError, ToolMissingError
        from ..toolchain.warmup import WarmupError, warm_plans

        p = self.plan
        self.say(f"  building {len(trials)} candidates")
        plans = [self.package.plan(p.problem, p.layouts, p.device, *how, config=trial.config) for trial in trials]
        try:
            warm_plans(plans, load=False)
        except WarmupError as error:
            self.say(f"  {len(error.report.failed)} kernels could not be built")
        spilt = {}
        for n, (trial, plan) in enumerate(zip(trials, plans, strict=True)):
            try:
                spilt[n] = self.package.resources(plan).get("spill_bytes", 0)
            except ToolMissingError:
                return
            except (CompileError, RuntimeError) as error:
                trial.why_not = f"not built: {' '.join(str(error).split())}"
                continue
            if spilt[n] > spilt.get(0, 0):
                trial.why_not = f"spills {spilt[n]} bytes"

    def _runner(self, trial):
        """The call with a config."""
        make, family, direction = self._call(self.inputs), self.plan.family, self.plan.direction

        def run():
            with use_config(family, direction, trial.config):
                return make()

        return run

    def _call(self, inputs):
        if self.call.direction != "backward":
            return inputs.forward
        saved = self.saved
        return lambda: inputs.backward(*saved)

    def _judge_own(self, own, outcome) -> bool:
        """What the family's own choice computes, by the accuracy rule."""
        if self.call.direction == "backward":
            with use_family(self.family):
                self.saved = self.inputs.forward()
        try:
            self.wanted = self._named(self._runner(own)())
            self._sample(self.wanted)
        except AccuracyError as error:
            outcome.status, outcome.text, own.wrong = WRONG, f"the family's own choice: {error}", True
            return False
        self.largest = {name: meaning.largest_of(self.inputs, x) for name, x in self.wanted.items()}
        return True

    def _named(self, results) -> dict[str, Any]:
        return {f"d{name}": x for name, x in results.items()} if isinstance(results, dict) else dict(zip(("out", "lse"), results, strict=True))

    def _sample(self, results):
        if self.call.direction == "backward":
            meaning.sampled(self.inputs, *self.saved, {name[1:]: x for name, x in results.items()})
        else:
            meaning.sampled(self.inputs, results["out"], results["lse"])

    def _check(self, trials):
        """Compare all that each computes with what the family's own choice does; what is not written is NaN before."""
        for trial in trials:
            if trial.why_not:
                continue
            if self.left(FIRST_SHARE) <= 0:
                trial.why_not = "no time left (--budget)"
                continue
            given = {name: _nan_like(x) for name, x in self.wanted.items()}
            inputs = Inputs(self.call, self.place, self.inputs.arrays | given, self.inputs.values)
            try:
                with use_config(self.plan.family, self.plan.direction, trial.config):
                    found = self._named(self._call(inputs)())
                self._compare(found)
            except AccuracyError as error:
                trial.why_not, trial.wrong = str(error), True
            except Exception as error:  # of a driver, a compiler, or for want of memory
                trial.why_not = f"{type(error).__name__}: {' '.join(str(error).split())}"

    def _compare(self, found):
        wide = self.call.dtype == "float64"
        for name, x in found.items():
            scale = (1e-10 if wide else 1e-4) if name == "lse" else 16 * meaning.ROUNDING[self.call.dtype] * self.largest[name]
            apart = difference(self.place, x, self.wanted[name], scale)
            if not apart <= 1.0:
                raise AccuracyError(f"{name} differs from that of the family's own choice by {apart:.3g} times of what rounding allows")

    def _measure(self, own, others, outcome):
        """A few rounds of all, many of the fastest."""
        running = [own, *(trial for trial in others if not trial.why_not)]
        if len(running) < 2:
            outcome.text = f"none of the other candidates can be timed: {others[0].why_not}"
            return
        names = {str(n): trial for n, trial in enumerate(running)}
        one, _ = self.place.seconds(self._runner(own))
        most = max(2, int(max(0.0, self.left(FIRST_SHARE)) / max(1e-9, timing.LEAST_ROUNDS * one)))
        for name in list(names)[most:]:
            names.pop(name).why_not = "no time left (--budget)"
        self._time(names, lambda: 0.0)
        ranked = sorted((name for name in names if name != "0"), key=lambda name: names[name].seconds[1])
        finalists = {name: names[name] for name in ["0", *ranked[:FINALISTS]]}
        self.say(
            f"  {len(names)} of {len(running)} measured in {timing.LEAST_ROUNDS} rounds; the fastest {len(finalists) - 1} and the own choice go on"
        )
        self._time(finalists, self.left)
        low, middle, _ = own.seconds
        outcome.status = KEPT
        outcome.text = f"nothing is faster than the family's own choice, {seconds_text(middle)}, by more than the spread"
        for trial in sorted((trial for trial in finalists.values() if trial is not own), key=lambda trial: trial.seconds[1]):
            if trial.seconds[2] >= low or trial.seconds[1] > (1 - LEAST_GAIN) * middle:
                continue
            try:
                self._sample(self._named(self._runner(trial)()))
            except AccuracyError as error:
                trial.why_not, trial.wrong = str(error), True
                self.say(f"  WRONG, left out: {_words(trial.values)}: {error}")
                continue
            outcome.status = TUNED
            outcome.text = f"{middle / trial.seconds[1]:.2f} times as fast as the family's own choice with {changes(own.values, trial.values)}"
            outcome.entry = store.Entry(
                family=self.plan.family,
                direction=self.plan.direction,
                key=outcome.key,
                config=trial.values,
                seconds=trial.seconds[1],
                default_seconds=middle,
                problem=str(self.call),
                date=store.now(),
                sources=store.sources_of(self.plan.family),
                version=__version__,
            )
            return

    def _time(self, trials, left):
        times = timing.measure(self.place, {name: self._runner(trial) for name, trial in trials.items()}, left)
        for name, trial in trials.items():
            trial.seconds, trial.rounds = timing.quartiles(times[name]["seconds"]), len(times[name]["seconds"])


def changes(own: dict, other: dict) -> str:
    """What a candidate has in another way than the family's own choice."""
    return ", ".join(f"{name} {own[name]} -> {x}" for name, x in other.items() if x != own[name])


def _words(values: dict) -> str:
    return ", ".join(f"{name} {x}" for name, x in values.items())


def _nan_like(x):
    """An array of this kind whose every bit is 1: NaN in each floating-point type."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        made = torch.empty_like(x, memory_format=torch.contiguous_format)
        made.view(torch.uint8).fill_(255)
        return made
    made = sys.modules[type(x).__module__.partition(".")[0]].empty(x.shape, x.dtype)
    if prod(x.shape):
        made.view("uint8")[...] = 255
    return made


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as text, a line a call."""
    rows = [("call", "family", "own choice", "best", "speed", "found")]
    for outcome in outcomes:
        timed = [trial for trial in outcome.trials if trial.seconds is not None and not trial.wrong]
        if not timed:
            rows.append((outcome.call.name, outcome.family or "-", "-", "-", "-", f"{outcome.status}: {outcome.text}"))
            continue
        own, best = timed[0], min(timed, key=lambda trial: trial.seconds[1])
        found = changes(own.values, best.values) if outcome.entry is not None else outcome.status
        wrong = sum(trial.wrong for trial in outcome.trials)
        found += f"; {wrong} candidates WRONG" if wrong else ""
        ratio = f"{own.seconds[1] / best.seconds[1]:.2f}"
        rows.append((outcome.call.name, outcome.family, _spread(own), _spread(best), ratio, found))
    widths = [max(len(row[n]) for row in rows) for n in range(5)]
    return "\n".join("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip() for row in rows)


def _spread(trial) -> str:
    low, middle, high = (seconds_text(t) for t in trial.seconds)
    return f"{middle} ({low} to {high})"
