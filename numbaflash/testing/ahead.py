"""Build the kernels of many cases in parallel before they run: on a GPU, compiling takes far longer than a case."""

from __future__ import annotations

from ..arrays import Facts
from ..call import plan_backward_call, plan_call, plan_decode_call
from ..dispatch import Device, Plan, contiguous_strides, use_family
from ..problem import UnsupportedError
from .cases import Case
from .libraries import laid_out


def plan_of(case: Case, device: Device, family: str | None = None, library: str = "torch-cuda") -> Plan:
    """The plan that `run_case`, `run_backward_case` or `run_decode_case` will use, without any array.

    Raises
    ------
    UnsupportedError
        When no kernel (of the family) can compute the case.
    """
    case, problem, facts = laid_out(case, library), case.problem, {}
    absent = () if case.give_out else case.results
    if case.direction != "backward" and not case.return_lse:
        absent = (*absent, "lse")
    for name in case.present:
        if name not in absent:
            if name == "mask" and case.as_blocks:
                shape = problem.shape_of("block_mask")
                facts["block_mask"] = Facts(256, shape, contiguous_strides(shape, 4), "int32", device.kind, device.index)
                continue
            address, strides = case.place_of(name)
            facts[name] = Facts(address, case.shape_of(name), strides, problem.dtype_of(name), device.kind, device.index)
    with use_family(family):
        if case.direction == "forward":
            return plan_call(problem, facts, case.return_lse, device)
        if case.direction == "decode":
            return plan_decode_call(problem, facts, case.return_lse, case.num_splits, device)
        return plan_backward_call(problem, facts, case.needs, case.deterministic, device)


def build(cases, device: Device, family: str | None = None, library: str = "torch-cuda") -> None:
    """Build the kernels of these cases. What cannot be built is left for the case itself to report."""
    from ..toolchain.warmup import WarmupError, warm_plans

    plans = []
    for case in cases:
        if not (case.problem.sees_nothing or not case.needs if case.direction == "backward" else case.problem.is_empty):
            try:
                plans.append(plan_of(case, device, family, library))
            except UnsupportedError:
                continue
    try:
        warm_plans(plans)
    except WarmupError:
        return


def draw(strategy, seed: int, number: int) -> list[Case]:
    """The cases that a Hypothesis test over this strategy is going to get, when it has this seed and this number of examples."""
    import hypothesis as hy

    cases = []

    @hy.seed(seed)
    @hy.settings(search_settings(), max_examples=number, phases=(hy.Phase.generate,))
    @hy.given(strategy)
    def note(case):
        cases.append(case)

    note()
    return cases


def search_settings():
    """Hypothesis settings under which nothing but the seed decides."""
    import hypothesis as hy

    return hy.settings(
        database=None,
        deadline=None,
        derandomize=False,
        phases=(hy.Phase.generate, hy.Phase.shrink),
        suppress_health_check=list(hy.HealthCheck),
        report_multiple_bugs=False,
        verbosity=hy.Verbosity.quiet,
    )
