"""The tensor memory accelerator: bulk copies of tiles between global and shared memory, addressed by tensor maps.

Coordinates count elements of the tensor map's axes, innermost first. What lies outside the tensor reads as zero and is
not written. Loads complete on an mbarrier, stores in bulk groups of the issuing thread.
"""

from __future__ import annotations

from llvmlite import ir

from . import pipeline
from .inline import I32, U32, U64, VOID, emit, instruction, llvm_i32, make_intrinsic


def load_panels(rank, panels, panel_bytes, rows=1, stage_bytes=None, arrives=True):
    """``load(stages, place, map, ring, row, coordinates...)`` of a tile into a stage of a ring, as panels of 64 columns.

    ``row`` counts tiles of so many ``rows``, along the axis that the first coordinate belongs to; the other coordinates are those of the axes
    after it. Stages are as large as the tile, or ``stage_bytes``. Lets the barrier of the place in the ring wait for the bytes, and arrives
    there, unless another load of the same place, later, does that.
    """
    names = ", ".join(f"${3 + i}" for i in range(rank))
    stage_bytes = panels * panel_bytes if stage_bytes is None else stage_bytes
    expect = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;" if arrives else "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;"
    text = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {{{names}}}], [$2];"

    def generate(builder, args, _):
        stages, place, tensor, ring, row, *coordinates = args
        barrier, shared = pipeline.barrier_at(builder, ring, place), pipeline.slot_at(builder, stages, place, stage_bytes)
        coordinates = [builder.mul(row, ir.Constant(llvm_i32, rows)), *coordinates]
        expected = ir.Constant(llvm_i32, panels * panel_bytes)
        emit(builder, ir.VoidType(), [barrier, expected], expect, "r,r,~{memory}")
        for panel in range(panels):
            at = builder.add(shared, ir.Constant(llvm_i32, panel * panel_bytes))
            values = [at, tensor, barrier, ir.Constant(llvm_i32, 64 * panel), *coordinates]
            emit(builder, ir.VoidType(), values, text, "r,l,r," + ",".join(["r"] * rank) + ",~{memory}")

    return make_intrinsic(VOID, (U32, pipeline.PLACE, U64, U32, *(I32,) * (rank - 1)), generate)


def store_panels(rank, first_panel, panels, panel_bytes):
    """``store(map, shared, coordinates...)`` of panels of a tile, the first of which lies at ``shared``, as one bulk group."""
    names = ", ".join(f"${2 + i}" for i in range(rank))
    text = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [$0, {{{names}}}], [$1];"

    def generate(builder, args, _):
        tensor, shared, *coordinates = args
        for panel in range(panels):
            at = builder.add(shared, ir.Constant(llvm_i32, panel * panel_bytes))
            values = [tensor, at, ir.Constant(llvm_i32, 64 * (first_panel + panel)), *coordinates]
            emit(builder, ir.VoidType(), values, text, "l,r," + ",".join(["r"] * rank) + ",~{memory}")
        emit(builder, ir.VoidType(), [], "cp.async.bulk.commit_group;", "~{memory}")

    return make_intrinsic(VOID, (U64, U32, *(I32,) * (rank - 1)), generate)


prefetch_map = instruction("prefetch.tensormap [$0];", VOID, U64)
"""Bring a tensor map into the descriptor cache."""

wait_stores_read = instruction("cp.async.bulk.wait_group.read 0;", VOID)
"""Wait until all committed stores have read their shared memory, which may then be written again."""

fence_async = instruction("fence.proxy.async.shared::cta;", VOID)
"""Make this thread's ordinary writes to shared memory visible to the copy engine and the tensor cores."""
