"""The checks, in their order."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from .. import dispatch
from ..dispatch import make_backward_plan, make_decode_plan, make_plan, use_family
from ..problem import UnsupportedError
from ..support import contiguous_backward_layouts, contiguous_layouts
from ..testing import ahead
from . import accuracy, dispatching, meaning, memory, serving, timing
from .blas import one_thread
from .findings import FAIL, INFO, SKIP, Report
from .inputs import Inputs
from .places import Place
from .shapes import Call, without_pages

SHARES = {"meaning": 0.45, "dispatch": 0.5, "time": 0.65, "memory": 0.67, "accuracy": 0.85, "service": 1.0}
"""Part of the whole time by which each check ends; what one leaves over is the next one's."""


def verify(calls: list[Call], place: Place, report: Report, *, family: str | None = None, checks=tuple(SHARES)) -> Report:
    """Check the calls, one check after the other.

    Parameters
    ----------
    calls : list of Call
    place : Place
    report : Report
        Where findings go; it says how much time there is.
    family : str, optional
        Kernel family to force.
    checks : sequence of str
        Those of `SHARES` to make.

    Returns
    -------
    Report

    Raises
    ------
    TooLargeError
        Before anything is allocated, where a call has no room on the device.
    """
    calls = _possible(calls, place, family, report)
    memory.check_fits(calls, place, lambda call: workspace_of(call, place, family))
    with use_family(family), nullcontext() if place.on_gpu else one_thread():
        _Verification(calls, place, report, family, checks).run()
    return report


def _possible(calls, place, family, report) -> list[Call]:
    """Those that a kernel computes; decoding of pages goes on without pages where none does."""
    found = []
    for call in calls:
        reason = meaning.supported(call, place, family)
        if reason is not None and "page_table" in call.arrays:
            plain = without_pages(call)
            if meaning.supported(plain, place, family) is None:
                report.add("dispatch", call.name, SKIP, f"no kernel has pages here ({reason}); contiguous caches instead")
                call, reason = plain, None
        if reason is not None:
            report.add("dispatch", call.name, FAIL, f"no kernel can compute it: {reason}")
        else:
            found.append(call)
    return found


def workspace_of(call, place, family) -> int:
    """Bytes, by the plan of contiguous arrays."""
    problem = call.problem
    try:
        with use_family(family):
            if call.direction == "backward":
                if problem.sees_nothing:
                    return 0
                return make_backward_plan(problem, contiguous_backward_layouts(problem, call.needs), place.device, call.deterministic).workspace_bytes
            if problem.is_empty:
                return 0
            make = make_decode_plan if call.direction == "decode" else make_plan
            return make(problem, contiguous_layouts(problem), place.device).workspace_bytes
    except UnsupportedError:
        return 0


class _Verification:
    def __init__(self, calls, place, report, family, checks):
        self.calls, self.place, self.report, self.family, self.checks = calls, place, report, family, checks
        self.seconds: dict[str, float] = {}

    def run(self):
        if "meaning" in self.checks:
            self._meaning()
        if {"dispatch", "time", "memory"} & set(self.checks):
            self._on_real_arrays()
        if "accuracy" in self.checks:
            self._accuracy()
        if "service" in self.checks:
            self._service()

    def _meaning(self):
        self.report.share(SHARES["meaning"])
        self._build([meaning.case_of(call, self.place) for call in self.calls if call.direction != "decode"])
        for n, call in enumerate(self.calls):
            self.report.step("meaning", f"{call.name}, smaller", lambda call=call: meaning.small(call, self.place, self.family), needed=n < 4)
        for n, call in enumerate(self.calls):
            self._real_size(call, needed=n < 4)

    def _build(self, cases):
        """Build the kernels of a GPU in parallel before they are needed; on the CPU the first call of each compiles it."""
        if self.place.on_gpu:
            ahead.build(cases, self.place.device, self.family, self.place.testing_library)

    def _real_size(self, call, needed):
        """Samples of it, and all of it in other parts."""
        made = {}

        def sample():
            made["inputs"] = inputs = Inputs.of(call, self.place)
            made["results"] = results = inputs.forward()
            if call.direction == "backward":
                made["gradients"] = inputs.backward(*results)
            return meaning.sampled(inputs, *results, made.get("gradients"))

        report = self.report
        report.step("meaning", f"{call.name}, samples", sample, needed=needed)
        if "results" in made and self.place.library != "jax":

            def parts():
                return meaning.in_parts(made["inputs"], *made["results"], made.get("gradients"))

            report.step("meaning", f"{call.name}, in parts", parts, needed=needed)
        self.place.release()

    def _on_real_arrays(self):
        """Dispatch, time and memory, each call on its own arrays."""
        runs = {}
        room = self.place.free_bytes()
        for call in self.calls:
            if room is not None:
                room -= call.input_bytes + call.cache_bytes + 2 * call.result_bytes
                if room < 0 and runs:
                    self.report.add("time", call.name, SKIP, "no room beside the arrays of the calls before it; verify it alone")
                    continue
            try:
                runs[call.name] = self._runner(call)
            except Exception as error:
                self.report.add("dispatch", call.name, FAIL, f"{type(error).__name__}: {' '.join(str(error).split())}")
        self.report.share(SHARES["dispatch"])
        for call in self.calls:
            if call.name in runs and "dispatch" in self.checks:
                self.report.step("dispatch", call.name, lambda call=call: dispatching.dispatched(*runs[call.name]), needed=True)
        self.report.share(SHARES["time"])
        if "time" in self.checks:
            self._time(runs)
        self.report.share(SHARES["memory"])
        for call in self.calls:
            if call.name in runs and "memory" in self.checks:
                inputs, run = runs[call.name]
                self.report.step("memory", call.name, lambda inputs=inputs, run=run: memory.split(inputs, run), needed=True)
        runs.clear()
        self.place.release()

    def _runner(self, call):
        """(inputs, the call by itself)."""
        inputs = Inputs.of(call, self.place)
        if call.direction != "backward":
            return inputs, inputs.forward
        results = inputs.forward()
        return inputs, lambda: inputs.backward(*results)

    def _time(self, runs):
        known = {call.name: call for call in self.calls}
        try:
            times = timing.measure(self.place, {name: run for name, (_, run) in runs.items()} | self._peers(runs, known), self.report.left)
        except Exception as error:
            self.report.add("time", "all calls", FAIL, f"{type(error).__name__}: {' '.join(str(error).split())}")
            return
        for name, measured in times.items():
            ours = name in known
            text, figures = timing.summary(known[name if ours else name.removesuffix(PEER)], measured)
            self.report.add("time", name, INFO, text, figures | {"clock": self.place.clock})
            if ours:
                self.seconds[name] = figures["seconds"]

    def _peers(self, runs, known) -> dict:
        """torch's own attention of the same arrays, where it has such a thing."""
        if self.place.library != "torch":
            return {}
        import torch

        found = {}
        for name, (inputs, _) in runs.items():
            call = known[name]
            if call.direction != "forward" or call.arrays or set(_given(call)) - {"causal", "scale"} or call.numbers.get("causal") == "top_left":
                continue
            q, k, v = (inputs.arrays[operand].transpose(1, 2) for operand in "qkv")
            causal = call.numbers.get("causal") is True
            if causal and q.shape[2] != k.shape[2]:
                continue
            options = {"is_causal": causal, "scale": call.numbers.get("scale"), "enable_gqa": q.shape[1] != k.shape[1]}

            def peer(q=q, k=k, v=v, options=options):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

            try:
                peer()
            except Exception as error:  # whatever it is, it is torch's
                self.report.add("time", name + PEER, SKIP, f"left out, {type(error).__name__}: {' '.join(str(error).split())}")
            else:
                found[name + PEER] = peer
        return found

    def _seconds(self, call) -> float:
        """What a call takes, also where it has not been timed."""
        if call.name not in self.seconds:
            _, run = self._runner(call)
            run()
            self.seconds[call.name], _ = self.place.seconds(run)
        return self.seconds[call.name]

    def _accuracy(self):
        self.report.share(SHARES["accuracy"])
        place, report = self.place, self.report
        seen, long = set(), []
        for call in self.calls:
            plain = set(call.arrays) <= {"alibi_slopes", "sinks", "seqlens_k", "page_table"} and not call.latent and not call.numbers.get("dropout")
            kind = (call.direction, str(_given(call)))
            if call.direction == "backward" or not plain or kind in seen:
                continue
            seen.add(kind)
            long.append(call)
        for call in long:

            def look(call=call):
                keys = accuracy.longest(call, place, report.left() / (2 * len(long) + 1), self._seconds(call))
                return accuracy.very_long(accuracy.longer(call, keys), place, self.family)

            report.step("accuracy", f"very long: {call.name}", look)
            place.release()
        late, cases = [], accuracy.special_cases(self.calls)
        if report.left() > 0:
            self._build([case for _, case in cases])
        for name, case in cases:
            reasons = self.family is not None and dispatch.family(self.family, case.direction).supports(case.problem, place.device)
            if reasons:
                report.add("accuracy", f"special: {name}", SKIP, f"{self.family}: {'; '.join(reasons)}")
            elif report.left() <= 0:
                late.append(name)
            else:
                report.step("accuracy", f"special: {name}", lambda case=case: accuracy.special(case, place, self.family))
        if late:
            report.add("accuracy", f"special: {len(late)} more", SKIP, f"no time left (--budget) for {'; '.join(late)}")

    def _service(self):
        report = self.report
        report.share(SHARES["service"])
        reason = serving.why_not(self.calls, report.left())
        if reason is not None:
            report.add("service", "a small server", SKIP, reason)
            return

        def left_out(engine, why):
            report.add("service", f"a small server with {engine}", SKIP, f"left out, {why}")

        report.step("service", "a small server", lambda: serving.serve(self.calls, self.place, left_out), needed=True)


PEER = ", torch's attention"


def _given(call) -> dict:
    return {name: x for name, x in call.numbers.items() if x not in (None, False, 0.0)}


def same_kinds(calls: list[Call]) -> list[Call]:
    """Calls of one kind once, with their counts added, whichever function made them."""
    found: dict[str, Call] = {}
    for call in calls:
        kind = repr(replace(call, name="", count=0))
        if kind in found:
            found[kind] = replace(found[kind], count=found[kind].count + call.count)
        else:
            found[kind] = call
    return sorted(found.values(), key=lambda call: -call.count)
