"""The tensor memory accelerator: bulk copies of tiles between global and shared memory, addressed by tensor maps.

Coordinates count elements of the tensor map's axes, innermost first. What lies outside the tensor reads as zero and is
not written. Loads complete on an mbarrier, stores in bulk groups of the issuing thread.
"""

from __future__ import annotations

from .inline import I32, U32, U64, VOID, instruction


def load(rank):
    """``load(shared, map, coordinates..., barrier)`` of a tile of a tensor of that rank."""
    coordinates = ", ".join(f"${2 + i}" for i in range(rank))
    return instruction(
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {{{coordinates}}}], [${2 + rank}];",
        VOID,
        *(U32, U64, *(I32,) * rank, U32),
    )


def store(rank):
    """``store(map, coordinates..., shared)`` of a tile; joins the thread's open bulk group."""
    coordinates = ", ".join(f"${1 + i}" for i in range(rank))
    return instruction(
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [$0, {{{coordinates}}}], [${1 + rank}];",
        VOID,
        *(U64, *(I32,) * rank, U32),
    )


prefetch_map = instruction("prefetch.tensormap [$0];", VOID, U64)
"""Bring a tensor map into the descriptor cache."""

commit_stores = instruction("cp.async.bulk.commit_group;", VOID)
"""Close the thread's bulk group."""

wait_stores_read = instruction("cp.async.bulk.wait_group.read 0;", VOID)
"""Wait until all committed stores have read their shared memory, which may then be written again."""

fence_async = instruction("fence.proxy.async.shared::cta;", VOID)
"""Make this thread's ordinary writes to shared memory visible to the copy engine and the tensor cores."""
