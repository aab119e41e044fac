"""NVTX ranges: with ``NUMBAFLASH_NVTX=1`` each launch stands in a range named after its plan, which Nsight Systems and Nsight Compute show."""

from __future__ import annotations

from .dispatch import Launch, Plan
from .problem import PACKED_FEATURE, PAGE_TABLE
from .switches import is_on

DOMAIN = "numbaflash"
"""NVTX domain of all ranges."""

_COLOURS = {"forward": "green", "backward": "orange", "decode": "blue"}
_SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}


def in_range(plan: Plan, launch: Launch) -> Launch:
    """The launch in a range named after its plan, where ``NUMBAFLASH_NVTX`` asks for it; else the launch itself, so that nothing is added to a call.

    Raises
    ------
    ImportError
        When ranges are asked for and the package nvtx is not installed.
    """
    if not is_on("NUMBAFLASH_NVTX"):
        return launch
    try:
        import nvtx
    except ImportError as error:
        raise ImportError("NUMBAFLASH_NVTX=1 needs the package nvtx; pip install 'numbaflash[profile]', or unset the variable") from error
    domain = nvtx.get_domain(DOMAIN)
    attributes = domain.get_event_attributes(message=range_name(plan), color=_COLOURS[plan.direction])

    def ranged(addresses, stream):
        domain.push_range(attributes)
        try:
            launch(addresses, stream)
        finally:
            domain.pop_range()

    return ranged


def range_name(plan: Plan) -> str:
    """A plan in a few words: direction, family, dtype, sizes (of queries x of keys and values where they differ), and what it has beyond.

    There is none of the characters in it that the filters of Nsight Compute give a meaning to.
    """
    p = plan.problem
    lengths = f"T{_pair(p.total_q, p.total_k)}" if p.packed else f"S{_pair(p.seqlen_q, p.seqlen_k)}"
    words = [
        plan.direction,
        plan.family,
        _SHORT[p.dtype],
        f"B{p.batch}",
        lengths,
        f"H{_pair(p.heads, p.kv_heads)}",
        f"D{_pair(p.head_dim, p.head_dim_v)}",
    ]
    words += _band(p)
    if p.packed:
        words.append("packed")
    if p.paged:
        words.append(f"pages of {p.page_size}")
    of_course = (PACKED_FEATURE, PAGE_TABLE, *(("seqlens_k",) if plan.direction == "decode" else ()))
    words += [name for name in p.features if name not in of_course]
    if plan.deterministic:
        words.append("deterministic")
    return " ".join(words)


def _pair(one, other) -> str:
    return str(one) if one == other else f"{one}x{other}"


def _band(p):
    if p.left is None and p.right is None:
        return
    if p.left is None and p.right == 0:
        yield "causal"
    else:
        yield "window"
        yield from (f"{side}{n}" for side, n in (("left", p.left), ("right", p.right)) if n is not None)
    if not p.offset_per_entry and p.offset != p.seqlen_k - p.seqlen_q:
        yield "top_left"
