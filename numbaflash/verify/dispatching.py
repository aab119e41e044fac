"""The second check: which kernel really ran, whether `numbaflash.explain` says the same, and why none that is preferred to it did."""

from __future__ import annotations

from .. import call as road
from ..dispatch import FAMILIES
from .inputs import Inputs


def dispatched(inputs: Inputs, run):
    """Compare the plan that a call used with the one that `explain` tells.

    Parameters
    ----------
    inputs : Inputs
    run : callable
        Makes the call.
    """
    told = inputs.explain()
    plan = told.plan
    if plan is None:
        return "nothing is launched", {"family": None}
    road.forget()
    run()
    used = [each.plan for each in road._prepared.values() if each.direction == inputs.call.direction and each.plan is not None]
    if used and (used[-1].family, used[-1].config, used[-1].grid) != (plan.family, plan.config, plan.grid):
        ran = used[-1]
        raise AssertionError(f"explain tells {plan.family} with {plan.config}, and {ran.family} with {ran.config} ran")
    faster = {name: told.families[name] for name in FAMILIES[: FAMILIES.index(plan.family)] if name in told.families}
    text = plan.family + ("" if used else " (as explained; this library tells no more)")
    text += (
        f", {' x '.join(map(str, plan.grid))} blocks of {plan.threads} threads"
        if inputs.place.on_gpu
        else f", {plan.threads} thread{'s' * (plan.threads != 1)}"
    )
    if plan.tuned:
        text += f"; tuned, {plan.tuned}"
    if plan.copies:
        text += f"; copies: {'; '.join(f'{name}, as {reason}' for name, reason in plan.copies.items())}"
    text += "".join(f"; not {name}: {', '.join(reasons)}" for name, reasons in faster.items())
    figures = {
        "family": plan.family,
        "config": repr(plan.config),
        "grid": list(plan.grid),
        "threads": plan.threads,
        "shared_bytes": plan.shared_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "copies": dict(plan.copies),
        "not": {name: list(reasons) for name, reasons in told.families.items()},
        "resources": {name: str(x) for name, x in told.resources.items()},
        "confirmed": bool(used),
    }
    return text, figures
