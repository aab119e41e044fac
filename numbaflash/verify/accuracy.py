"""The fifth check: accuracy where it is hardest, very long inputs and special masks."""

from __future__ import annotations

from dataclasses import replace

from ..dispatch import use_family
from ..testing import BackwardCase, Case, Packed
from . import meaning
from .inputs import Inputs
from .shapes import Call

LONGEST = {"cpu": 2**17, "cuda": 2**20}
"""Keys of a very long input at most."""

SPECIAL = {
    "window of one key": {"causal": True, "window": (0, 0)},
    "window to both sides": {"window": (33, 65)},
    "causal at the top left, more queries than keys": {"causal": "top_left", "seqlen_k": 77},
    "causal, queries that see no key": {"causal": True, "seqlen_k": 77, "hidden": "nan"},
    "documents, rows of nothing": {"mask_shape": (), "mask_values": "documents", "hidden": "nan"},
    "mask that hides whole rows": {"mask_shape": (), "mask_values": "rows", "hidden": "inf"},
    "mask by blocks": {"mask_shape": (), "mask_values": "blocks", "as_blocks": True},
    "bias of the lowest numbers": {"bias_shape": (), "bias_values": "lowest"},
    "padded batch, lengths at the edges": {
        "batch": 9,
        "lengths_q": "edges",
        "lengths_k": "edges",
        "causal": True,
        "hidden": "nan",
        "seqlen_q": 70,
        "seqlen_k": 99,
    },
    "packed sequences, some empty": {"packed": ((70, 0, 33, 1), (64, 5, 0, 130)), "causal": True, "hidden": "nan"},
    "softcap, ALiBi and sinks": {"softcap": 30.0, "alibi_shape": (), "with_sinks": True, "causal": True},
    "scores in the thousands": {"values": "big"},
    "one key that outweighs all": {"values": "peaky", "causal": True},
    "keys and values of NaN that nobody sees": {"causal": True, "seqlen_q": 129, "seqlen_k": 65, "hidden": "nan", "window": (20, None)},
}
"""Changes of a plain case; empty shapes are filled in."""


def special_cases(calls: list[Call]) -> list[tuple[str, Case]]:
    """Special masks with the dtype, the head dims and the grouping of the first call that is attention or its gradients."""
    first = next((call for call in calls if call.direction != "decode"), None)
    if first is None:
        return []
    p = first.problem
    kv_heads = min(2, p.kv_heads)
    heads = kv_heads * min(p.group, 4)
    plain = {
        "dtype": first.dtype,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v,
        "seqlen_q": 161,
        "seqlen_k": 161,
    }
    backward, found = any(call.direction == "backward" for call in calls), []
    for name, changes in SPECIAL.items():
        fields = plain | changes
        shapes = {
            "mask_shape": (fields["seqlen_q"], fields["seqlen_k"]),
            "bias_shape": (heads, fields["seqlen_q"], fields["seqlen_k"]),
            "alibi_shape": (heads,),
        }
        fields |= {key: shape for key, shape in shapes.items() if key in fields}
        if "packed" in fields:
            fields["packed"] = Packed(*fields["packed"], after=(3, 0))
        found.append((name, Case(**fields)))
        if backward and fields.get("values") is None:
            found.append((f"gradients, {name}", BackwardCase(**fields)))
    return [each for each in found if not each[0].startswith("gradients")] + [each for each in found if each[0].startswith("gradients")]


def special(case: Case, place, family):
    """One of them, all of its elements and the memory around them."""
    worst = meaning.judged(case, place, family)
    return meaning._shown(worst), {"errors": worst}


def longer(call: Call, seqlen: int) -> Call:
    """The same attention of one sequence of another length, for one key head."""
    p = call.problem
    sizes = {"alibi_slopes": (p.group,), "sinks": (p.group,), "seqlens_k": (1,)}
    arrays = {name: (sizes[name], dtype) for name, (_, dtype) in call.arrays.items() if name in sizes}
    rows = p.seqlen_q if call.direction == "decode" else seqlen
    return replace(
        call,
        q=(1, rows, p.group, call.q[-1]),
        k=(1, seqlen, 1, call.k[-1]),
        v=(1, seqlen, 1, call.v[-1]),
        arrays=arrays,
        strides={},
    )


def longest(call: Call, place, seconds: float, known_seconds: float) -> int:
    """As long as the device and the time allow, by what a call of a known length takes.

    Parameters
    ----------
    call : Call
    place : Place
    seconds : float
        That the call and its samples may take.
    known_seconds : float
        What ``call`` takes.
    """
    p, free = call.problem, place.free_bytes()
    seqlen = max(p.seqlen_k, 1)
    rate = known_seconds / max(1, p.batch * p.kv_heads)
    while 2 * seqlen <= LONGEST[place.device.kind]:
        more = longer(call, 2 * seqlen)
        grows = 2 if call.direction == "decode" or (call.numbers.get("window") or (None,))[0] is not None else 4
        if rate * grows > seconds / 4 or (free is not None and 3 * (more.input_bytes + more.cache_bytes + more.result_bytes) > free / 2):
            break
        seqlen, rate = 2 * seqlen, rate * grows
    return seqlen


def very_long(call: Call, place, family):
    """Samples of a very long input."""
    inputs = Inputs.of(call, place)
    with use_family(family):
        out, lse = inputs.forward()
    text, figures = meaning.sampled(inputs, out, lse, number=5)
    return f"{call.problem.seqlen_k} keys, {text}", figures | {"keys": call.problem.seqlen_k}
