"""The warpgroup that computes dQ beside the consumers of `by_keys`.

dQ = dS K sums over the keys of all consumers. They write dS to shared memory and go on; this warpgroup multiplies it by K, two parts of
64 x 64 a step, stages them in turn and adds them to the sum in global memory by bulk copies.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda.types import UniTuple, int32, uint64

from ....ptx import bulk, fragment, pipeline, tma, warp, wgmma
from ....ptx.straight import straight_line
from .config import BackwardConfig, SharedMemory

inline = cuda.jit(device=True, inline="always")

STAGED = 2  # named barrier of the warpgroup
PARTS = 2


def gatherer(config: BackwardConfig, memory: SharedMemory):
    """(step, settle) of a configuration.

    ``step(owed, place, number, due, thread, s_k, s_ds, s_dq, ds_full, ds_empty, sums, turns) -> owed``: dQ of block ``number`` from the dS at a
    place. A deterministic sum waits until each part's counter says that it is ``due``, and counts it up when the next part is ready: ``owed`` is
    the address of that counter, 0 at first. ``settle(owed, thread)`` pays it, and waits until everything has been added.
    """
    by_rows, deterministic, columns = config.q_block > 64, config.deterministic, config.part_columns
    ds_part_bytes, k_part_bytes = (memory.kv_panel_bytes, 0) if by_rows else (0, memory.kv_panel_bytes)
    part_of_dq = wgmma.product_shared(  # (64, 64) = dS (64, kv_tile) K (kv_tile, 64)
        columns, config.kv_tile, config.element, wgmma.mn_major_steps(config.kv_tile), wgmma.mn_major_steps(config.kv_tile),
        a_transposed=True, b_transposed=True,
    )  # fmt: skip
    ds_operand, k_operand, only = wgmma.operand(memory.ds_bytes), wgmma.operand(0, memory.kv_panel_bytes), pipeline.start(0)
    wait, put, add = wgmma.wait(0, columns), fragment.store_plain(columns), bulk.add(memory.part_bytes)

    def make_places(part):
        """(dS and K of the part, where it is staged, its place in the sum, its counter)."""

        def body(ops, s_k, s_ds, s_dq):
            return [s_ds + part * ds_part_bytes, s_k + part * k_part_bytes, s_dq + part * memory.part_bytes]

        def of_part(ops, sums, turns, number):
            place = ops.wide(number) * PARTS + part
            return [sums + place * memory.part_bytes, turns + place * 4]

        return straight_line(UniTuple(int32, 3), (int32,) * 3, body), straight_line(UniTuple(uint64, 2), (uint64, uint64, int32), of_part)

    places = [make_places(part) for part in range(PARTS)]
    lane_of = straight_line(int32, (int32,), lambda ops, thread: thread & 31)

    def make_part(part):
        shared_places, global_places = places[part]
        last = part == PARTS - 1

        @inline
        def compute(owed, place, number, due, thread, s_k, s_ds, s_dq, ds_empty, sums, turns):
            ds, k, staged = shared_places(s_k, s_ds, s_dq)
            target, counter = global_places(sums, turns, number)
            dq = wait(part_of_dq(ds_operand(ds, place), k_operand(k, only())))
            if last:
                pipeline.release(ds_empty, place, lane_of(thread))
            put(dq, staged, thread)
            tma.fence_async()
            if thread == 0:
                pay(owed)
            warp.barrier_sync(STAGED, 128)  # all of the part is staged, and the other part has left its place
            if thread == 0:
                if deterministic:
                    bulk.wait_turn(counter, due)
                add(target, staged)
            return counter

        return compute

    @inline
    def pay(owed):
        """The part before has been read, or with turns has been added."""
        if deterministic:
            if owed != 0:
                bulk.wait_done()
                bulk.end_turn(owed)
        else:
            tma.wait_stores_read()

    first_part, second_part = make_part(0), make_part(1)

    @inline
    def step(owed, place, number, due, thread, s_k, s_ds, s_dq, ds_full, ds_empty, sums, turns):
        pipeline.wait(ds_full, place)
        owed = first_part(owed, place, number, due, thread, s_k, s_ds, s_dq, ds_empty, sums, turns)
        return second_part(owed, place, number, due, thread, s_k, s_ds, s_dq, ds_empty, sums, turns)

    @inline
    def settle(owed, thread):
        if thread == 0:
            pay(owed)
            bulk.wait_done()

    return step, settle
