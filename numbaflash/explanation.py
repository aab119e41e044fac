"""Say how a call would run, without running it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from . import dispatch
from .arrays import one_library
from .block_mask import BlockMask
from .call import RESULTS, called, check_apart, describe, device_of, plan_backward_call, plan_call, plan_decode_call
from .problem import DIFFERENTIABLE_OPTIONS, NEEDS, OPTIONS, PACKED, PACKED_FEATURE, Problem, check_flag, check_needed, check_needs
from .support import ASSUMED


@dataclass(frozen=True)
class Explanation:
    """How `forward`, `backward` or `decode` would run a problem; print it.

    Attributes
    ----------
    problem : Problem
    device : Device
    plan : Plan or None
        None when nothing is launched: no result has an element, or no query sees a key and every gradient is 0.
    resources : dict
        Registers, spills and the like of the kernel, as its family counts them; "error" alone where that needs a tool that is missing.
    families : dict of str to tuple of str
        Every other family with the reasons why it was not chosen.
    mask : BlockMask or None
        The mask, where it is one.
    """

    problem: Problem
    device: dispatch.Device
    plan: dispatch.Plan | None
    resources: dict[str, Any] = field(default_factory=dict)
    families: dict[str, tuple[str, ...]] = field(default_factory=dict)
    mask: BlockMask | None = None

    def __str__(self):
        p, plan = self.problem, self.plan
        placeless = self.device.kind == "cpu" or f"({ASSUMED}," in self.device.name
        where = self.device.name if placeless else f"{self.device.name} (cuda:{self.device.index})"
        lines = [
            ("problem", f"{p.dtype}, q {p.q_shape}, k {p.k_shape}, v {p.v_shape}"),
            ("band", _band(p)),
            ("scale", f"{p.scale:.6g}"),
            *_options(p, self.mask),
            ("device", where),
        ]
        if plan is None:
            lines.append(("kernel", f"none: {self._why_none()}"))
        else:
            if plan.direction == "backward":
                lines.append(("direction", "backward, deterministic" if plan.deterministic else "backward"))
            lines += [
                ("family", plan.family),
                ("config", _config(plan.config)),
            ]
            if self.device.kind == "cuda":
                lines.append(
                    ("grid", f"{' x '.join(map(str, plan.grid))} blocks of {plan.threads} threads, {plan.shared_bytes} bytes of shared memory each")
                )
            else:
                lines.append(("threads", str(plan.threads)))
            if plan.num_splits:
                lines.append(("num_splits", str(plan.num_splits)))
            if plan.workspace_bytes or plan.direction == "backward":
                lines.append(("workspace", f"{plan.workspace_bytes} bytes"))
            lines += [
                ("resources", ", ".join(f"{name} {value}" for name, value in self.resources.items()) or "not counted"),
                ("copies", "; ".join(f"{name}: {reason}" for name, reason in plan.copies.items()) or "none"),
            ]
        lines += [(f"not {name}", "; ".join(reasons)) for name, reasons in self.families.items()]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)

    def _why_none(self):
        if self.problem.is_empty:
            return "the result has no element"
        return "no query sees a key, so every gradient is 0" if self.problem.sees_nothing else "no gradient is needed"


def _band(p: Problem) -> str:
    if p.left is None and p.right is None:
        return "none: every query sees every key"
    offset = 0 if p.offset_per_entry else p.offset
    low = "" if p.left is None else f"{_term(p, offset - p.left)} <= "
    high = "" if p.right is None else f" <= {_term(p, offset + p.right)}"
    return f"query i sees keys {low}j{high}"


def _term(p, n) -> str:
    place = "i"
    if p.offset_per_entry:  # whatever is not given is the same for each entry
        length_k, length_q = "seqlens_k" if p.seqlens_k else f"{p.seqlen_k}", "seqlens_q" if p.seqlens_q else f"{p.seqlen_q}"
        if p.packed:
            length_k, length_q = "length_k", "length_q"
        place = f"i + {length_k} - {length_q}"
    return place if n == 0 else f"{place} {'+' if n > 0 else '-'} {abs(n)}"


def _options(p: Problem, mask: BlockMask | None):
    """What the problem has beyond q, k, v and a band, by the names of the arguments."""
    for name in (*(name for name in p.features if name != PACKED_FEATURE), *(PACKED if p.packed else ())):
        if name == "block_mask":
            yield "mask", "BlockMask" if mask is None else f"{mask!r}{_share(mask)}"
        elif name in OPTIONS + PACKED:
            yield name, f"{p.dtype_of(name)} {p.shape_of(name)}"
        else:
            yield name, f"{getattr(p, name):.6g}"


def _share(mask: BlockMask) -> str:
    """How much of it there is to compute, as far as that is known without a look at it."""
    counts = mask._counts
    return f", {(counts.full + counts.partial) / sum(counts):.1%} not empty" if counts and sum(counts) else ""


def _config(config) -> str:
    if config is None:
        return "none"
    if is_dataclass(config):
        return ", ".join(f"{f.name} {getattr(config, f.name)}" for f in fields(config))
    return str(config)


def explain(arrays: dict, gradients: dict, options: dict, *, direction, return_lse, deterministic, needs, mask=None, num_splits=None) -> Explanation:
    """See `numbaflash.explain`.

    Parameters
    ----------
    arrays : dict
        The arrays that were given, by argument, but for those of the backward alone.
    gradients : dict
        Those of the backward alone.
    options : dict
        Those that are numbers, as `numbaflash.problem.make_problem` takes them.
    direction, return_lse, deterministic, needs, mask, num_splits
        The caller's.
    """
    if direction not in RESULTS:
        raise ValueError(f'direction must be "forward", "backward" or "decode"; got {direction!r}')
    with_lse = check_flag("return_lse", return_lse) or "lse" in arrays
    deterministic = check_flag("deterministic", deterministic)
    backward = direction == "backward"
    needs = check_needs(needs, [name for name in DIFFERENTIABLE_OPTIONS if name in arrays])
    if not backward and (gradients or needs != NEEDS):
        given = ", ".join((*gradients, *(("needs",) if needs != NEEDS else ())))
        raise ValueError(f'{given}: for the backward alone; pass direction="backward" as well')
    for name in RESULTS["backward"]:
        if name in gradients:
            check_needed(name.removeprefix("d"), needs)
    arrays = gradients | arrays
    library = one_library(**{called(name, direction): x for name, x in arrays.items()})
    facts, problem = describe(library, arrays, options, direction)
    check_apart(facts, {name: each.address for name, each in facts.items()}, direction)
    device, mask = device_of(facts["q"]), mask if isinstance(mask, BlockMask) else None
    if backward:
        if problem.sees_nothing or not needs:
            return Explanation(problem, device, None, mask=mask)
        return explain_plan(plan_backward_call(problem, facts, needs, deterministic, device), mask)
    if problem.is_empty:
        return Explanation(problem, device, None, mask=mask)
    if direction == "decode":
        return explain_plan(plan_decode_call(problem, facts, with_lse, num_splits, device))
    return explain_plan(plan_call(problem, facts, with_lse, device), mask)


def explain_plan(plan: dispatch.Plan, mask: BlockMask | None = None) -> Explanation:
    """Explain a plan, whether or not its device is here."""
    families = {}
    for name in dispatch.FAMILIES:
        if name != plan.family:
            reasons = plan.rejected.get(name) or dispatch.family(name, plan.direction).supports(plan.problem, plan.device)
            families[name] = tuple(reasons) or (f"{plan.family} is preferred",)
    return Explanation(plan.problem, plan.device, plan, _resources(plan), families, mask)


def _resources(plan: dispatch.Plan) -> dict[str, Any]:
    """What the family counts; the reason under "error" where ptxas or the compiler is not installed."""
    from .toolchain import CompileError, ToolMissingError

    try:
        return dispatch.family(plan.family, plan.direction).resources(plan)
    except (CompileError, ToolMissingError) as error:
        return {"error": " ".join(str(error).split())}
