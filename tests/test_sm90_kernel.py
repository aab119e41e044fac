"""The Hopper kernel without a GPU: every configuration fits the hardware, the main ones compile without spills."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from numbaflash import toolchain
from numbaflash.dispatch import Device, Layout, Layouts
from numbaflash.kernels import schedule, sections, sm90
from numbaflash.kernels.sm90.config import MAX_SHARED, SharedMemory, forward_config, kv_blocks
from numbaflash.problem import make_problem, trim_keys
from numbaflash.ptx.simulated import SimulatorOps

H200 = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")


def problem(head_dim=128, head_dim_v=None, *, seqlen_q=512, seqlen_k=512, heads=8, kv_heads=8, batch=2, dtype="bfloat16", **options):
    q, k, v = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, kv_heads, head_dim), (batch, seqlen_k, kv_heads, head_dim_v or head_dim)
    return make_problem(q, k, v, [dtype] * 3, **options)


def layout(shape, itemsize=2, **changes):
    strides = itemsize * np.cumprod((1, *shape[:0:-1]))[::-1]
    return Layout(shape, tuple(strides.tolist()), **changes)


def layouts(p, **changes):
    given = {name: layout(getattr(p, f"{name}_shape")) for name in ("q", "k", "v", "out")} | {"lse": layout(p.lse_shape, 4)}
    return Layouts(**given | changes)


def plan(*args, **options):
    p = problem(*args, **options)
    return sm90.plan(p, layouts(p), H200)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 50)}, {"seqlen_k": 8192}], ids=str)
def test_every_head_dim_fits_shared_memory_and_registers(options):
    for d, dv in itertools.product(range(8, 257, 8), repeat=2):
        config = forward_config(problem(d, dv, **options))
        assert SharedMemory.of(config).total <= MAX_SHARED, (d, dv, config)
        # Scores, packed P and the accumulator of a consumer thread leave room for addresses, m and l.
        live = config.kv_block // 2 + config.kv_block // 4 + config.padded_head_dim_v // 2
        assert live <= config.registers[1] - 24, (d, dv, config)
        assert config.kv_block % 16 == 0 and config.q_tile % 64 == 0 and config.hold <= config.kv_block // 4


KERNELS = [
    ((64,), {}),
    ((64,), {"causal": True}),
    ((128,), {}),
    ((128,), {"causal": True, "kv_heads": 2, "dtype": "float16"}),
    ((128,), {"window": (100, 50), "scale": -0.1}),
    ((128,), {"seqlen_k": 8192}),
    ((256,), {}),
    ((256,), {"causal": True}),
    ((256,), {"seqlen_k": 8192}),
    ((192, 128), {}),
    ((192,), {"causal": True}),
    ((256, 64), {"window": (100, 50)}),
    ((72, 40), {"causal": True}),
    ((96,), {"seqlen_k": 8192}),
    ((80,), {"causal": True, "kv_heads": 2}),
]


@pytest.mark.parametrize(("dims", "options"), KERNELS, ids=str)
def test_kernels_compile_to_tensor_core_code_without_spills(dims, options):
    request = sm90.request(plan(*dims, **options))
    ptx = toolchain.compile_ptx(request)
    report = toolchain.ptxas_report(ptx, request.arch)
    assert (report.stack_bytes, report.spill_stores, report.spill_loads) == (0, 0, 0)
    assert report.notes == ()
    opcodes = toolchain.count_opcodes(toolchain.sass(ptx, request.arch))
    config = request.config
    products = config.padded_head_dim // 16 + config.kv_block // 16
    assert opcodes["HGMMA"] >= 2 * products, "the first block and the main loop"
    assert opcodes["UTMALDG"] >= 3 and opcodes["UTMASTG"] >= 1


def test_masking_costs_nothing_where_there_is_none():
    masked = {}
    for causal in (False, True):
        wanted = plan(64, causal=causal)
        text = toolchain.compile_ptx(sm90.request(wanted)).text
        masked[causal] = len(re.findall(r"selp\.f32\s+%f\d+, 0fFF800000", text)) / (wanted.config.kv_block // 2)
    assert round(masked[False]) == 1, "the block that may reach past the last key"
    assert round(masked[True]) == 2, "that one, and the loop over blocks at the border"


def test_the_cost_of_tiles_is_what_the_band_needs():
    p = problem(128, seqlen_q=700, seqlen_k=900, window=(100, 20))
    config = forward_config(p)
    for tile, blocks in enumerate(kv_blocks(p, config)):
        queries = range(tile * config.q_tile, min(p.seqlen_q, (tile + 1) * config.q_tile))
        first = min(p.key_range(i)[0] for i in queries) // config.kv_block
        end = max(-(-p.key_range(i)[1] // config.kv_block) for i in queries)
        assert blocks == end - first


@pytest.mark.parametrize(("q_blocks", "columns", "blocks"), [(4, 512, 132), (43, 7, 132), (1, 5, 3), (16, 33, 8)])
def test_the_schedule_runs_every_tile_once(q_blocks, columns, blocks):
    costs = tuple(float(i + 1) for i in range(q_blocks))
    section = sections.choose_section(costs, columns, blocks, 1 << 20, 1 << 25, 1.1, 4)
    tiles, seen = q_blocks * columns, set()
    for block in range(blocks):
        for turn in range(tiles // blocks + 2):
            tile = schedule.snake(SimulatorOps, np.int32(turn), np.int32(block), np.int32(blocks))
            if tile < tiles:
                seen.add(tuple(int(x) for x in schedule.order(SimulatorOps, tile, *map(np.int32, (q_blocks, columns, section)))))
            else:
                break
    assert seen == set(itertools.product(range(q_blocks), range(columns)))


def test_the_section_balances_causal_tiles():
    costs = np.array([2.0, 3, 4, 5])
    section = sections.choose_section(tuple(costs), 512, 132, 1 << 18, 36 << 20, 1.1, 4)
    even = costs.sum() * 512 / 132
    assert sections._longest_block(costs, 512, 132, section) < 1.02 * even
    assert sections._longest_block(costs, 512, 132, 64) > 1.3 * even, "else the search has nothing to find"


def test_sections_past_the_cache_are_taken_where_enough_blocks_share_a_head():
    """Uneven tiles of 16 heads, of which the cache holds 2: all heads together even out best."""
    costs = tuple(float(n) for n in range(128, 0, -1))
    free = sections.choose_section(costs, 16, 132, 1 << 20, 1 << 30, 1.5, 8)
    assert free > 2, "else there is nothing to choose"
    assert sections.choose_section(costs, 16, 132, 1 << 20, 2 << 20, 1.5, 132 / free) == free, "the sections are shared by enough"
    assert sections.choose_section(costs, 16, 132, 1 << 20, 2 << 20, 1e9, 133) <= 2, "never, at that price"


def test_heads_in_step_have_an_even_number_of_blocks_each():
    for columns, q_blocks in ((256, 32), (64, 64), (1024, 4)):
        costs = tuple(q_blocks - n + 1.5 for n in range(q_blocks))
        section = sections.choose_section(costs, columns, 132, 4 << 20, 36 << 20, 1.15, 4, in_step=True)
        assert 132 % (2 * section) == 0 or section == columns
        assert sections._longest_block(np.array(costs[::-1]), columns, 132, section) < 1.04 * sum(costs) * columns / 132
    free, odd = (sections.choose_section(costs, columns, 33, 1, 36 << 20, 1.15, 4, in_step=given) for given in (False, True))
    assert odd == free, "no section has an even number of 33 blocks"


@pytest.mark.parametrize(("columns", "most", "section"), [(64, 9, 8), (16, 2, 2), (8, 1, 1), (7, 100, 7), (5, 0, 1), (1, 3, 1)])
def test_fitting_sections_fit_and_are_even(columns, most, section):
    assert sections.fitting_section(columns, 1 << 20, most << 20) == section


def test_equal_tiles_go_head_by_head():
    assert sections.choose_section((3.0, 3.0), 100, 132, 1, 1, 1.1, 4) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strides": (524288, 2048, 256, 4)}, "contiguous head dim"),
        ({"alignment": 8}, "multiple of 16 bytes"),
        ({"strides": (1048576, -2048, 256, 2)}, "not negative"),
        ({"strides": (1048576, 2056, 256, 2)}, "multiples of 16"),
    ],
)
def test_operands_that_tma_cannot_read_are_copied(changes, reason):
    p = problem()
    shape = p.k_shape
    k = Layout(shape, changes.get("strides", layout(shape).strides), changes.get("alignment", 16))
    made = sm90.plan(p, layouts(p, k=k), H200)
    assert set(made.copies) == {"k"} and reason in made.copies["k"]
    assert made.layouts.k == layout(shape)


def test_transposed_and_broadcast_views_are_read_in_place():
    p = problem()
    b, s, h, d = p.k_shape
    k = Layout(p.k_shape, (2 * h * s * d, 2 * d, 2 * s * d, 2))
    v = Layout(p.v_shape, (0, 2 * d, 0, 2))
    assert not sm90.plan(p, layouts(p, k=k, v=v), H200).copies


def test_lse_that_is_not_row_major_goes_through_a_copy():
    p = problem()
    lse = Layout(p.lse_shape, (4 * p.heads * p.seqlen_q * 2, 8 * p.seqlen_q, 8))
    assert set(sm90.plan(p, layouts(p, lse=lse), H200).copies) == {"lse"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float32"}, "float16 and bfloat16"),
        ({"head_dim": 100}, "head_dim must be a multiple of 8"),
        ({"head_dim_v": 12}, "head_dim_v must be a multiple of 8"),
        ({"seqlen_k": 0}, "no query sees a key"),
        ({"seqlen_q": 4, "seqlen_k": 600, "causal": "top_left", "window": (0, 0), "heads": 8}, ""),
    ],
)
def test_supports_says_why_not(options, reason):
    reasons = sm90.supports(problem(**options), H200)
    assert any(reason in r for r in reasons) if reason else not reasons


def test_supports_names_other_devices():
    assert "8.0" in sm90.supports(problem(), Device("cuda", 0, (8, 0), 108, "A100"))[0]
    assert "CPU" in sm90.supports(problem(), Device("cpu"))[0]


def test_keys_that_nobody_sees_are_left_out_of_the_tensor_maps():
    p = problem(seqlen_q=100, seqlen_k=900, causal="top_left")
    trimmed, first = trim_keys(p)
    assert (trimmed.seqlen_k, first) == (100, 0)
    parameters = sm90.parameters(sm90.plan(p, layouts(p), H200))
    assert parameters[1].shape[1] == 100 and parameters[2].shape[1] == 100
    p = problem(seqlen_q=100, seqlen_k=900, window=(50, 50))
    trimmed, first = trim_keys(p)
    assert (trimmed.seqlen_k, first, trimmed.offset) == (150, 750, 50)


def test_a_scale_of_zero_does_not_touch_masked_scores():
    parameters = sm90.parameters(plan(128, scale=0.0, causal=True))
    assert parameters[-1].value > 0, "-inf * 0 would be NaN"


def test_packed_heads_share_a_tile_where_that_wastes_less():
    assert forward_config(problem(kv_heads=2, seqlen_q=5)).pack == 4
    assert forward_config(problem(kv_heads=2, seqlen_q=512)).pack == 1
    assert forward_config(problem(kv_heads=2, seqlen_q=512, causal=True)).pack == 4
    four = {"heads": 32, "kv_heads": 8}
    assert forward_config(problem(64, seqlen_q=4096, seqlen_k=4096, **four)).pack == 4, "86 tiles of 192 rows for four heads, apart 88"
    assert forward_config(problem(64, seqlen_q=8192, seqlen_k=8192, **four)).pack == 1, "171 for four heads, apart 172: not worth it"
    assert forward_config(problem(heads=24, kv_heads=2, seqlen_q=1)).pack == 4, "the power of two in a group of 12"


def test_parameters_are_listed_as_the_kernel_takes_them():
    request = sm90.request(plan(64))
    ptx = toolchain.compile_ptx(request)
    assert len(re.findall(r"\.param ", ptx.text.split("{")[0])) == len(sm90.parameters(plan(64)))
