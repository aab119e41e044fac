"""The Hopper kernels that decode, without a GPU: who computes what is right for any lengths, and the kernels compile without spills."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numbaflash import toolchain
from numbaflash.dispatch import Device, Layout, Layouts, contiguous_strides
from numbaflash.kernels.sm90 import decoding
from numbaflash.kernels.sm90.config import MAX_SHARED
from numbaflash.kernels.sm90.decoding import loading, schedule
from numbaflash.kernels.sm90.decoding.config import SharedMemory, Workspace, decode_config, items, row_tiles
from numbaflash.problem import ITEMSIZE, make_decode_problem
from numbaflash.ptx.simulated import simulated
from numbaflash.toolchain.launch import check_launch

H200 = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")
PER_SM = 227 * 1024
"""Bytes of shared memory of a multiprocessor, of which each block takes 1 KiB more than it asks for."""


def problem(head_dim=128, head_dim_v=None, *, batch=6, seqlen_q=1, heads=8, kv_heads=2, capacity=1024, page_size=0, dtype="bfloat16", **options):
    cache = (batch * 8, page_size, kv_heads) if page_size else (batch, capacity, kv_heads)
    table = ((batch, -(-capacity // page_size)), "int32") if page_size else None
    return make_decode_problem(
        (batch, seqlen_q, heads, head_dim),
        (*cache, head_dim),
        (*cache, head_dim_v or head_dim),
        [dtype] * 3,
        seqlens_k=((batch,), options.pop("lengths", "int32")),
        page_table=table,
        **options,
    )


def plan(p, num_splits=None, device=H200):
    given = {}
    for name in ("q", "k", "v", "out", "lse", *p.options):
        shape = p.shape_of(name)
        given[name] = Layout(shape, contiguous_strides(shape, ITEMSIZE[p.dtype_of(name)]))
    assert not decoding.supports(p, device)
    return decoding.plan(p, Layouts(**given), device, num_splits)


@pytest.mark.parametrize("rows", [(1, 1), (1, 4), (1, 16), (1, 32), (16, 4), (64, 8), (5, 7)])
def test_every_head_dim_fits_a_multiprocessor(rows):
    seqlen_q, group = rows
    for d, dv in itertools.product((*range(8, 257, 8), 320, 512, 576), repeat=2):
        config = decode_config(problem(d, dv, seqlen_q=seqlen_q, heads=2 * group))
        total = SharedMemory.of(config).total
        assert total <= MAX_SHARED and config.blocks * (total + 1024) <= PER_SM, (d, dv, config)
        assert config.keys % 16 == 0 and config.stages >= 2
        # The output and the scores of a thread leave room for the rest.
        live = config.warp_columns // 2 + config.keys // 2 + (0 if config.shared_q else config.depth // 4)
        assert live <= 65536 // (config.threads * config.blocks) - 40 and live <= 200, (d, dv, config)


KERNELS = [
    ((128,), {}, None),
    ((128,), {"page_size": 16, "dtype": "float16"}, None),
    ((128,), {"page_size": 1, "lengths": "int64"}, None),
    ((128,), {"page_size": 7, "batch": 300}, None),
    ((128,), {}, 4),
    ((64,), {"page_size": 16}, None),
    ((256,), {"page_size": 16}, None),
    ((192, 128), {}, None),
    ((576, 512), {"page_size": 64, "heads": 32, "kv_heads": 2}, None),
    ((72, 40), {"heads": 14}, None),
    ((128,), {"heads": 64}, None),
    ((128,), {"seqlen_q": 16, "causal": True}, None),
    ((256,), {"seqlen_q": 64, "causal": True, "page_size": 3}, None),
    ((128,), {"seqlen_q": 4, "causal": True, "window": (100, 0), "softcap": 20.0, "sinks": ((8,), "float32")}, None),
    ((128,), {"seqlen_q": 2, "causal": True, "alibi_slopes": ((8,), "float32"), "scale": -0.1}, 2),
]


@pytest.mark.parametrize(("dims", "options", "num_splits"), KERNELS, ids=str)
def test_kernels_compile_without_spills(dims, options, num_splits):
    wanted = plan(problem(*dims, **options), num_splits)
    config = wanted.config
    for n, (request, parameters, grid, threads, shared_bytes) in enumerate(decoding.launches(wanted)):
        ptx = toolchain.compile_ptx(request)
        check_launch(ptx, tuple(parameters), grid, threads, shared_bytes, MAX_SHARED)
        report = toolchain.ptxas_report(ptx, request.arch)
        assert (report.stack_bytes, report.spill_stores, report.spill_loads, report.notes) == (0, 0, 0, ())
        assert n or report.registers * threads * config.blocks <= 65536
        if n == 0:
            opcodes = toolchain.count_opcodes(toolchain.sass(ptx, request.arch))
            products = config.keys // 8 * (config.depth // 16) + config.keys // 16 * (config.warp_columns // 8)
            assert opcodes["HMMA"] == products, "the main loop, not unrolled"
            assert opcodes["LDGSTS"] >= config.stages, "keys and values come by asynchronous copies"


def test_a_plan_that_keeps_its_workspace_is_one_kernel():
    for options, num_splits in (({}, None), ({"page_size": 16, "seqlen_q": 4, "causal": True, "sinks": ((8,), "float32")}, None), ({}, 4)):
        wanted = plan(problem(**options), num_splits)
        kept = decoding.keep_workspace(wanted)
        ((request, parameters, grid, threads, shared_bytes),) = decoding.launches(kept)
        ptx = toolchain.compile_ptx(request)
        check_launch(ptx, tuple(parameters), grid, threads, shared_bytes, MAX_SHARED)
        report = toolchain.ptxas_report(ptx, request.arch)
        assert (report.stack_bytes, report.spill_stores, report.notes) == (0, 0, ()) and report.registers * threads * kept.config.blocks <= 65536
        config = kept.config
        assert kept.workspace_bytes == Workspace.of(config, grid[0], items(kept.problem, config), num_splits or 1).total
    many = plan(problem(batch=1, kv_heads=1, capacity=100_000))
    assert decoding.keep_workspace(many) == many, "more parts than one block should merge"
    whole = plan(problem(), 1)
    assert decoding.keep_workspace(whole) == whole


def test_without_a_split_there_is_nothing_to_merge():
    assert len(decoding.launches(plan(problem(), 1))) == 1 and plan(problem(), 1).workspace_bytes == 0
    assert len(decoding.launches(plan(problem(), 2))) == 2


def test_reasons_name_what_is_missing():
    device = Device("cuda", 0, (8, 0), 108, "A100")
    assert "Hopper" in decoding.supports(problem(), device)[0]
    assert "float32" in decoding.supports(problem(dtype="float32"), H200)[0]
    assert "multiple of 8" in decoding.supports(problem(100), H200)[0]


# ---- who computes what


class Bodies:
    """The straight-line bodies of the schedule as Python functions of one thread."""

    def __init__(self, monkeypatch):
        self.merged = {}
        for module in (schedule, loading):
            monkeypatch.setattr(module, "straight_line", lambda result, argtypes, body: simulated(argtypes, body))

    def parts(self, p, config, lengths, blocks, splits):
        """(slot, entry, head, tile of queries, first tile of keys, one past the last) of all parts, and what blocks have found."""
        shares = schedule.Shares(config)
        options = (lengths.ctypes.data, np.int64(lengths.itemsize))
        bounds = tuple(np.int32(n) for n in (p.seqlen_q, p.seqlen_k, p.offset, p.left or 0, p.right or 0))
        sizes = tuple(np.int32(n) for n in (p.batch, p.kv_heads, row_tiles(p, config), splits or 1))
        costs, place_in, entry_at, part_at, found = shares.costs(), shares.place_in(), shares.entry(), shares.part(), shares.found()
        parts_of = shares.parts()
        parts, told = [], []
        if splits:
            fixed = shares.fixed_part()
            for unit in map(np.int32, range(items(p, config) * splits)):
                entry = unit // (sizes[1] * sizes[2] * sizes[3])
                own, _ = entry_at(entry, bounds, sizes, options)
                head, row_tile, first, last, slot, *_ = fixed(unit, own, sizes)
                parts.append((int(slot), int(entry), int(head), int(row_tile), int(first), int(last)))
            return parts, told, None
        lanes = [costs(np.int32(lane), np.int32(0), bounds, sizes, options) for lane in range(32)]
        assert p.batch <= 128, "one walk"
        total = np.int32(sum(map(sum, lanes)))
        blocks = min(blocks, int(total))
        spans = []
        for block in map(np.int32, range(blocks)):
            place, stop = (int(total) * int(n) // blocks for n in (block, block + 1))
            spans.append(stop - place)
            before = 0
            for lane, mine in enumerate(lanes):
                if before + sum(mine) > place:
                    number, start = place_in(np.int32(place), np.int32(before), mine)
                    entry = lane * schedule.ENTRIES + int(number)
                    break
                before += sum(mine)
            begins, words = 0, None
            while place < stop:
                own, (cost, whole) = entry_at(np.int32(entry), bounds, sizes, options)
                if place >= start + whole:
                    start += whole
                    entry += 1
                    continue
                part = part_at(np.int32(place), np.int32(stop), np.int32(start), cost, block, own, sizes)
                head, row_tile, first, last, slot, end, _ = map(int, part)
                parts.append((slot, entry, head, row_tile, first, last))
                begins, words = found(part, np.int32(entry), block, np.int32(blocks), total, sizes)
                if begins:
                    told.append(tuple(map(int, words)))
                if slot >= 0:
                    self.merged[slot] = tuple(map(int, parts_of(part, np.int32(entry), block, np.int32(blocks), total, cost, sizes)))
                place = end
        return parts, told, spans


@pytest.fixture
def bodies(monkeypatch):
    return Bodies(monkeypatch)


LENGTHS = st.lists(st.sampled_from([0, 0, 1, 5, 63, 64, 65, 200, 999, 1024, 5000, -3]), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    blocks=st.integers(1, 40),
    splits=st.sampled_from([None, None, 1, 2, 7]),
    seqlen_q=st.sampled_from([1, 3, 40]),
    window=st.sampled_from([None, (100, 0), (0, 0)]),
    dtype=st.sampled_from(["int32", "int64"]),
)
def test_parts_cover_all_keys_once(lengths, blocks, splits, seqlen_q, window, dtype):
    with pytest.MonkeyPatch.context() as patch:
        p = problem(batch=len(lengths), seqlen_q=seqlen_q, lengths=dtype, causal=True, window=window)
        config = decode_config(p, num_splits=splits)
        values = np.array(lengths, dtype)
        bodies = Bodies(patch)
        parts, told, spans = bodies.parts(p, config, values, blocks, splits)
    keys, slots = defaultdict(list), defaultdict(list)
    for slot, entry, head, row_tile, first, last in parts:
        keys[entry, head, row_tile] += range(first, last)
        slots[entry, head, row_tile].append(slot)
    assert set(keys) == set(itertools.product(range(p.batch), range(p.kv_heads), range(row_tiles(p, config)))), "each item has a result"
    for (entry, *_), tiles in keys.items():
        length = min(max(lengths[entry], 0), p.seqlen_k)
        first = 0 if window is None else max(0, length - seqlen_q - window[0]) // config.tile
        assert sorted(tiles) == list(range(first, max(first, -(-length // config.tile)))), "every tile of keys once"
    used = [slot for found in slots.values() for slot in found if slot >= 0]
    assert len(used) == len(set(used)), "no slot is written twice"
    if splits is None:
        assert max(spans) - min(spans) <= 1, "equal shares"
        assert sorted(number for *_, number, _ in told) == list(range(items(p, config))), "each item is begun once"
        for count, block, number, _ in told:
            entry, rest = divmod(number, p.kv_heads * row_tiles(p, config))
            mine = slots[(entry, *divmod(rest, row_tiles(p, config)))]
            assert mine == ([-1] if count == 0 else [2 * (block + n) + (n == 0) for n in range(count)]), "where the merge looks for them"
            assert all(bodies.merged[slot] == (block, count, number) for slot in mine if slot >= 0), "what each knows of the others"
    elif splits > 1:
        for number, mine in enumerate(slots.values()):
            assert mine == [number * splits + n for n in range(splits)]


def test_pages_are_looked_up_for_keys_that_are_seen_and_clamped(bodies):
    for page_size in (1, 3, 16, 64):
        p = problem(page_size=page_size)
        loads = loading.Loads(decode_config(p))
        find = loads.find_pages()
        needed = -(-100 // page_size)
        table = np.arange(100, 100 + needed, dtype=np.int32)  # nothing may be read past its end
        table[0], table[-1] = -5, 1000
        given = (table.ctypes.data, np.int64(4), np.int32(150))
        for step, lane in itertools.product(range(0, 9), range(32)):
            found = find(np.int32(step), np.int32(lane), (np.int32(0), np.int32(100)), given)
            for turn, page in enumerate(found):
                key = step * 16 + (0 if len(found) == 1 else (lane >> 3) + 4 * turn)
                if key < 100:
                    assert page == min(max(int(table[key // page_size]), 0), 149)


def test_the_workspace_holds_what_is_told():
    """The formula of docs/decoding.md."""
    p = problem(batch=64, heads=32, kv_heads=8, capacity=8192)
    config = decode_config(p)
    where = Workspace.of(config, 264, items(p, config))
    assert where.slot_bytes == 8 * 128 * 4 + 512 + (8 * 128 * 4 - 4096), "8 rows of 128 columns in float32, m and l"
    assert plan(p).workspace_bytes == where.total == 264 * 16 + 2 * 264 * where.slot_bytes
