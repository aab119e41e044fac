"""Decoding by the simt kernels without a GPU: tiles and parts, which entries of the table of pages are read, compiled code. Results are in
`test_simt_simulator`."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from test_simt_kernel import A10, A100, H200, LATER, T4, V100, check_invariants, innermost_loops

from numbaflash import toolchain
from numbaflash.dispatch import CPU
from numbaflash.kernels.simt import config as forward
from numbaflash.kernels.simt import decoding
from numbaflash.kernels.simt.decoding import config as tuning
from numbaflash.kernels.simt.decoding import paging, parts
from numbaflash.problem import ITEMSIZE, make_decode_problem
from numbaflash.ptx.simulated import simulated
from numbaflash.support import contiguous_layouts
from numbaflash.toolchain.launch import check_launch

DEVICES = (V100, T4, A100, A10, H200, LATER)
DTYPES = ("float32", "float64")


def problem(head_dim=128, head_dim_v=None, *, batch=6, seqlen_q=1, heads=8, kv_heads=2, capacity=8192, page_size=0, dtype="float32", **options):
    cache = (batch * 8, page_size, kv_heads) if page_size else (batch, capacity, kv_heads)
    return make_decode_problem(
        (batch, seqlen_q, heads, head_dim),
        (*cache, head_dim),
        (*cache, head_dim_v or head_dim),
        [dtype] * 3,
        seqlens_k=((batch,), options.pop("lengths", "int32")),
        page_table=((batch, -(-capacity // page_size)), "int32") if page_size else None,
        **options,
    )


def plan(p, device=H200, num_splits=None, **layouts):
    assert not decoding.supports(p, device)
    return decoding.plan(p, contiguous_layouts(p, **layouts), device, num_splits)


# ---- choices


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: "sm_{}{}".format(*device.capability))
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_fit(device, dtype):
    limit = forward.shared_limit(device)
    for d, rows in itertools.product((*range(1, 577, 23), 64, 128, 256, 512, 576), (1, 3, 8, 64, 100)):
        for dv in {d, 1, 512}:
            p = problem(d, dv, heads=2 * rows, dtype=dtype)
            if decoding.supports(p, device):
                assert dtype == "float64" and max(d, dv) > 256, "float32 is always at home"
                continue
            config = plan(p, device).config
            check_invariants(config, d, dv)
            assert config.kv_tile % config.step == 0, "p v takes whole turns"
            assert config.shared_bytes <= limit
            smaller = [tile for tile in (4, 8, 16, 32, 64) if rows <= tile < config.q_tile]
            assert not smaller or dv > 256 or d > 256 or dtype == "float64", "no more rows than needed"


def test_what_fits_nowhere_is_refused():
    (reason,) = decoding.supports(problem(576, 512, dtype="float64"), T4)
    assert "head_dim 576 and head_dim_v 512 in float64" in reason and "64 KiB" in reason
    assert not decoding.supports(problem(576, 512, dtype="float64"), H200)
    assert any("must be at most" in reason for reason in decoding.supports(problem(batch=2**20, heads=64), H200))


def test_heads_of_one_query_are_rows_of_a_tile():
    p = problem(heads=16, alibi_slopes=((6, 16), "float32"), sinks=((16,), "float32"), page_size=16)
    seen, layouts = tuning.stacked(p, contiguous_layouts(p))
    assert (seen.seqlen_q, seen.heads, seen.kv_heads, seen.group) == (8, 2, 2, 1)
    assert layouts.q.shape == (6, 8, 2, 128) and layouts.q.strides == (16 * 512, 512, 8 * 512, 4)
    assert layouts.out.strides == layouts.q.strides
    assert layouts.lse.shape == (6, 2, 8) and layouts.lse.strides == (64, 32, 4)
    assert layouts.alibi_slopes.shape == (6, 2, 8) and layouts.alibi_slopes.strides == (64, 32, 4)
    assert layouts.sinks.shape == (2, 8) and layouts.sinks.strides == (32, 4)
    assert layouts.page_table == contiguous_layouts(p).page_table
    wanted = plan(p, num_splits=1)
    assert wanted.config.options.stacked and wanted.config.q_tile == 8 and wanted.grid == (12,)
    for other in (problem(seqlen_q=2), problem(heads=2)):
        assert tuning.stacked(other, contiguous_layouts(other)) == (other, contiguous_layouts(other))
        assert not plan(other).config.options.stacked


def test_the_number_of_parts():
    for n in (1, 2, 7, 64):
        assert plan(problem(), num_splits=n).grid == (12 * n,)
    config = plan(problem()).config
    assert plan(problem(capacity=100), num_splits=256).grid == (12 * -(-100 // config.kv_tile),), "others would have no keys"
    assert plan(problem(capacity=0)).grid == plan(problem(capacity=1), num_splits=9).grid == (12,)
    for device, batch, capacity in itertools.product(DEVICES, (1, 2, 6, 50, 300, 5000), (1, 127, 1000, 8192, 131072)):
        p = problem(batch=batch, capacity=capacity)
        wanted = plan(p, device)
        count = wanted.grid[0] // (2 * batch)
        assert 1 <= count <= max(1, capacity // 128) and count <= 128
        assert count >= min(128, capacity // 4096), "no block has very many keys"
        slots = device.sm_count * tuning.resident_blocks(wanted.config.shared_bytes, wanted.config.warps, forward.shared_limit(device))
        assert wanted.grid[0] >= 0.6 * slots or count >= 0.85 * min(128, capacity // 128), "the GPU is full, or no part could be shorter"
        assert count == max(1, -(-capacity // 4096)) or wanted.grid[0] <= 4 * slots, "a few waves of blocks fill it well enough"


def test_a_plan_describes_its_launches():
    whole, split = (plan(problem(sinks=((8,), "float32")), num_splits=n) for n in (1, 3))
    ((main, _, blocks, threads, shared_bytes),) = decoding.launches(whole)
    assert (blocks, threads, shared_bytes) == (*whole.grid, whole.threads, whole.shared_bytes) and whole.workspace_bytes == 0
    assert main.config.options.sinks and main.config.write_lse and not main.config.options.split
    assert (whole.direction, whole.num_splits, split.num_splits) == ("decode", 1, 3) and not split.copies
    main, merge = decoding.launches(split)
    assert not (main[0].config.options.sinks or main[0].config.write_lse), "the merge sees to both"
    assert merge[0].config.sinks and merge[0].config.write_lse and merge[2] == 6 * 8
    assert split.workspace_bytes == 3 * 6 * 8 * (128 + 2) * 4
    for _, parameters, *_ in (main, merge):
        for array in parameters:
            if isinstance(array, toolchain.Array) and array.operand == "workspace":
                size = int(np.prod(array.shape)) * ITEMSIZE[array.dtype]
                assert array.offset % 16 == 0 and array.offset + size <= split.workspace_bytes
    assert not decoding.launches(plan(problem(), num_splits=2, lse=False))[1][0].config.write_lse


def test_kernels_depend_on_no_size():
    """But those of heads and pages, and on whether there are parts."""
    few, many = (plan(problem(batch=b, capacity=n, page_size=16)) for b, n in ((2, 9000), (9, 50000)))
    assert few.config == many.config and decoding.requests(few) == decoding.requests(many)
    assert plan(problem(), num_splits=2).config == plan(problem(batch=1), num_splits=100).config


# ---- bodies as Python functions of one thread


@pytest.fixture
def bodies(monkeypatch):
    for module in (paging, parts):
        monkeypatch.setattr(module, "straight_line", lambda result, argtypes, body: simulated(argtypes, body))


class Table:
    """A page table that remembers which entries were read."""

    dtype = np.dtype(np.int32)

    def __init__(self, values):
        self.values, self.read = values, set()

    def __getitem__(self, at):
        self.read.add(at)
        return self.values[at]


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 40, 64])
def test_entries_that_nobody_needs_are_not_read(bodies, page_size):
    config = plan(problem(page_size=page_size, capacity=400, window=(100, 0)), num_splits=2).config
    find_pages, pages = paging.find_pages(config), 50
    values = np.random.default_rng(0).integers(-100, 100, (1, -(-400 // page_size)), np.int32)
    step = config.threads // paging.copy_width(config, config.kv_tile)
    for begin, end in ((0, 400), (0, 1), (37, 203), (64, 65), (5, 5), (0, 0)):
        table = Table(values)
        named = {name: np.int32(0) for name, *_ in config.options.parameters("float32")} | {"page_table": table}
        for first_row in range(begin // config.kv_tile * config.kv_tile, end + config.kv_tile, config.kv_tile):
            for thread_row in range(step):
                *found, first, last = find_pages(0, first_row, thread_row, begin, end, pages, tuple(named.values()))
                assert (first, last) == (begin, end)
                rows = first_row + thread_row + np.arange(0, config.kv_tile, step)
                needed = (rows >= begin) & (rows < end)
                if len(found) == 1 and page_size % config.kv_tile == 0:
                    needed, rows = needed.any() and needed[:1] | True, rows[:1]
                want = np.where(needed, np.clip(values[0, np.minimum(rows, 399) // page_size], 0, pages - 1), -1)
                if np.any(needed) or len(found) > 1:
                    assert [*found] == [*np.atleast_1d(want)]
        assert table.read == {(0, key // page_size) for key in range(begin, end)}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_parts_are_all_the_tiles(bodies, count):
    config = plan(problem(), num_splits=2).config
    tile_of_block, tiles_of_part = parts.tile_of_block(config), parts.tiles_of_part(config)
    options = tuple(np.int32(count) for _ in config.options.parameters("float32"))
    assert [tuple(tile_of_block(n, options)) for n in range(2 * count)] == [(n // count, n % count) for n in range(2 * count)]
    for first, stop in ((0, 0), (0, 1), (3, 30), (5, 5), (7, 2), (0, 101)):
        ranges = [tiles_of_part(first, stop, n, options) for n in range(count)]
        assert [tile for begin, end in ranges for tile in range(begin, end)] == list(range(first, stop))
        sizes = [max(0, end - begin) for begin, end in ranges]
        assert max(sizes) == -(-max(0, stop - first) // count), "equal, but for the last ones"


# ---- compiled code

EVERYTHING = {"softcap": 20.0, "window": (100, 0), "alibi_slopes": ((8,), "float32"), "sinks": ((8,), "float32")}
COMPILED = {
    "D 128": plan(problem()),
    "D 128, one part": plan(problem(), num_splits=1),
    "D 128, pages of 16": plan(problem(page_size=16)),
    "D 128, pages of 1, int64": plan(problem(page_size=1, lengths="int64")),
    "D 128, pages of 7, bfloat16": plan(problem(page_size=7, dtype="bfloat16")),
    "D 64, pages of 16, no groups": plan(problem(64, page_size=16, heads=2)),
    "D 256, pages of 64, 16 queries, causal": plan(problem(256, page_size=64, seqlen_q=16, causal=True)),
    "D 256, pages of 1, 64 queries, bfloat16": plan(problem(256, page_size=1, seqlen_q=64, dtype="bfloat16")),
    "D 576, D v 512, 16 heads a group": plan(problem(576, 512, page_size=64, heads=32)),
    "D 576, D v 512, no groups": plan(problem(576, 512, page_size=64, heads=2)),
    "D 37, D v 5": plan(problem(37, 5, page_size=16)),
    "D 128, every option": plan(problem(**EVERYTHING, page_size=16)),
    "D 128, every option, 4 queries, one part": plan(problem(**EVERYTHING, seqlen_q=4, causal=True), num_splits=1),
    "float64, D 128": plan(problem(dtype="float64", page_size=16)),
    "float64, D 256, 16 queries": plan(problem(256, seqlen_q=16, dtype="float64")),
    "float64, D 512, sm_86": plan(problem(576, 512, page_size=16, heads=32, dtype="float64"), A10),
    "float16, D 128, sm_75": plan(problem(page_size=16, dtype="float16"), T4),
    "float16, D 128, sm_75, contiguous": plan(problem(dtype="float16"), T4),
    "float16, D 576, sm_75": plan(problem(576, 512, page_size=16, heads=32, dtype="float16"), T4),
    "bfloat16, D 128, sm_80": plan(problem(page_size=16, dtype="bfloat16", heads=16), A100),
    "D 128, 64 queries, sm_80": plan(problem(page_size=7, seqlen_q=64, causal=True), A100),
    "bfloat16, D 128, sm_120": plan(problem(page_size=16, dtype="bfloat16"), LATER),
}


def most_spilled(config):
    """Bytes that a thread may spill: 128 registers are the output of 512 columns in float64, twice as many as elsewhere."""
    return 48 if config.compute == "float64" and config.dim_v >= 512 else 0


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_kernels(name):
    wanted = COMPILED[name]
    limit = forward.shared_limit(wanted.device)
    for n, (request, parameters, blocks, threads, shared_bytes) in enumerate(decoding.launches(wanted)):
        ptx = toolchain.compile_ptx(request)
        check_launch(ptx, tuple(parameters), (blocks,), threads, shared_bytes, limit)
        try:
            report = toolchain.ptxas_report(ptx, request.arch)
            loops = innermost_loops(toolchain.sass(ptx, request.arch))
        except toolchain.ToolMissingError as error:
            pytest.skip(str(error))
        assert max(report.spill_stores, report.spill_loads) <= (0 if n else most_spilled(wanted.config)) and not report.notes
        if n:
            continue
        assert report.registers * threads * tuning.resident_blocks(shared_bytes, wanted.config.warps, limit) <= 65536
        config = wanted.config
        multiply = "DFMA" if config.compute == "float64" else "FFMA"
        products = [loop for loop in loops if loop[multiply] % (forward.UNITS * config.rows * config.columns * config.vector) == 0 and loop[multiply]]
        assert any(loop["LDS.128"] and not (loop["LDL"] or loop["STL"]) for loop in products), f"no loop of q k in {loops}"


def test_offsets_of_pages_are_computed_in_64_bits():
    """Pages lie anywhere in memory: every global address is a 64-bit base plus 64-bit products."""
    import re

    text = toolchain.compile_ptx(decoding.requests(plan(problem(37, 5, page_size=3, dtype="bfloat16"), num_splits=1))[0]).text
    addresses = re.findall(r"ld\.global\.u16 %\w+, \[(%\w+)\]", text)
    made_by = {to: by for by, to in re.findall(r"(\S+) \t(%rd\d+), ", text)}
    assert len(addresses) > 10 and {made_by[address] for address in addresses} <= {"add.s64", "mad.lo.s64"}


def test_the_simulator_keeps_the_invariants():
    for d, dv in ((1, 1), (33, 7), (576, 512)):
        p = problem(d, dv)
        layouts = contiguous_layouts(p)
        for split in (False, True):
            config = tuning.choose_config(p, layouts, CPU, split)
            assert config.warp_size == 8 and config.threads == 16
            check_invariants(config, d, dv)
        assert replace(config, write_lse=True, options=tuning.choose_config(p, layouts, CPU, False).options) == tuning.choose_config(
            p, layouts, CPU, False
        )
