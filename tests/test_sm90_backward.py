"""The Hopper backward kernels without a GPU: every configuration fits the hardware, the index arithmetic is that of the definition, the main
kernels compile without spills."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from numbaflash import reference, toolchain
from numbaflash.dispatch import BackwardLayouts, Device, Layout, contiguous_strides
from numbaflash.kernels import bands, schedule
from numbaflash.kernels.sm90 import backward
from numbaflash.kernels.sm90.backward.config import SharedMemory, q_blocks_of_tiles, visible_queries
from numbaflash.kernels.sm90.config import MAX_SHARED
from numbaflash.problem import make_problem
from numbaflash.ptx.simulated import SimulatorOps

H200 = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")
BANDS = ({}, {"causal": True}, {"causal": "top_left"}, {"window": (50, 20)}, {"window": (70, None)}, {"window": (None, 9)}, {"window": (33, 0)})


def layout(shape, itemsize=2):
    return Layout(shape, contiguous_strides(shape, itemsize))


def make_plan(head_dim, head_dim_v=None, *, seqlen_q=512, seqlen_k=700, heads=8, kv_heads=2, needs="qkv", deterministic=False, **options):
    shapes = (2, seqlen_q, heads, head_dim), (2, seqlen_k, kv_heads, head_dim), (2, seqlen_k, kv_heads, head_dim_v or head_dim)
    problem = make_problem(*shapes, ("bfloat16",) * 3, **options)
    gradients = {f"d{name}": layout(shape) if name in needs else None for name, shape in zip("qkv", shapes, strict=True)}
    operands = {name: layout(problem.shape_of(name)) for name in ("dout", "q", "k", "v", "out")}
    return backward.plan(problem, BackwardLayouts(**operands, lse=layout(problem.lse_shape, 4), **gradients), H200, deterministic)


def test_every_head_dim_fits():
    for head_dim, head_dim_v in itertools.product(range(8, 257, 8), repeat=2):
        plan = make_plan(head_dim, head_dim_v)
        config, memory = plan.config, SharedMemory.of(plan.config)
        assert plan.shared_bytes <= MAX_SHARED
        producer, consumer = config.registers
        assert 128 * producer + 256 * consumer <= 168 * config.threads, "what the block starts with must cover what its warpgroups ask for"
        for offset in (memory.v, memory.q, memory.dout, memory.ds):
            assert offset % 1024 == 0, "the swizzle repeats every 1024 bytes"
        for name, columns in (("part_columns", head_dim), ("part_columns_v", head_dim_v)):
            if config.columns_apart:
                assert 2 * getattr(config, name) >= columns, "two consumers have all columns"


def call(function, *arguments):
    """A straight-line body on int32, as the kernel has it: built for the simulator, whatever runs here."""
    return function(SimulatorOps, *arguments)


def walk(band, onward, tile, group, bounds):
    """(block, whether it is plain) of each step of a tile."""
    block, plain, border, end = (int(x) for x in call(band.walk(), *map(np.int32, (tile, group, onward)), bounds))
    assert 0 <= plain <= border <= end
    steps, member = [], 0
    for step in range(end):
        steps.append((block, plain <= step < border))
        block, member = (int(x) for x in call(schedule.member_after, *map(np.int32, (block, member, group, onward))))
    return steps


@pytest.fixture
def bodies(monkeypatch):
    """`bands` whose functions are plain bodies."""
    monkeypatch.setattr(bands, "straight_line", lambda result, argtypes, body: body)
    return bands


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(("kv_tile", "q_block"), [(128, 64), (128, 128), (64, 64)])
def test_index_arithmetic(bodies, options, kv_tile, q_block):
    """Blocks, plain blocks, limits and turns against the mask of the definition."""
    for seqlen_q, seqlen_k in ((1, 1), (64, 64), (200, 330), (330, 200), (129, 511), (640, 257)):
        problem = make_problem((1, seqlen_q, 1, 8), *[(1, seqlen_k, 1, 8)] * 2, ("float16",) * 3, **options)
        seen = reference.visible(problem)
        band = bodies.KeyBand(kv_tile, q_block, problem.left is not None, problem.right is not None)
        bounds = [np.int32(n) for n in (seqlen_q, seqlen_k, problem.offset, problem.left or 0, problem.right or 0)]
        tiles, blocks = -(-seqlen_k // kv_tile), -(-seqlen_q // q_block)
        visits = {m: [] for m in range(blocks)}
        for n in range(tiles):
            walks = [walk(band, onward, n, group, bounds) for onward, group in ((1, 1), (-1, 1), (1, 3), (-1, 3))]
            plain = dict(walks[0])
            for m in range(blocks):
                part = seen[m * q_block : (m + 1) * q_block, n * kv_tile : (n + 1) * kv_tile]
                assert m in plain or not part.any()
                if plain.get(m):
                    assert part.all() and part.shape[1] == kv_tile
                if m in plain:
                    visits[m].append(n)
            assert all(0 <= m < blocks for m in plain) and list(plain) == sorted(plain)
            assert walks[1] == walks[0][::-1], "the same blocks, the last ones first"
            for alone, of_three in zip(walks[:2], walks[2:], strict=True):
                assert of_three == [step for step in alone for _ in range(3)], "each block once for each head of the group"
            for key in (0, 9, kv_tile - 9):
                found = [int(x) for x in call(band.seen(), np.int32(n * kv_tile + key), bounds)]
                assert found == [int(j < seqlen_k and bool(seen[:, j].any())) for j in (n * kv_tile + key, n * kv_tile + key + 8)]
            for key, column in itertools.product((0, 9, kv_tile - 9), (0, 6)):
                limits = [int(x) for x in call(band.limits(), np.int32(n * kv_tile + key), np.int32(column), bounds)]
                for row, (low, high) in enumerate(zip(limits[:2], limits[2:], strict=True)):
                    j = n * kv_tile + key + 8 * row
                    for i in range(column, seqlen_q, 7):
                        inside = i - column >= low and (problem.left is None or i - column <= high)
                        assert inside == (j < seqlen_k and bool(seen[i, j]))
        for last_first in (False, True):
            for m, order in visits.items():
                turns = [int(call(band.turn(last_first), np.int32(n), np.int32(m), bounds, np.int32(tiles))) for n in order]
                if last_first == (problem.right is not None):  # the order that the kernels use
                    assert sorted(turns) == list(range(len(order)))
                    assert turns == sorted(turns, reverse=last_first)


@pytest.mark.parametrize("group", [1, 3])
def test_tiles_of_a_head_read_the_same_block_at_the_same_time(bodies, group):
    """Causal tiles of one head, as many as blocks, in the two turns of a persistent block: whoever is at work is at the same block."""
    tiles, blocks = 16, 8
    band = bodies.KeyBand(64, 64, False, True)
    bounds = [np.int32(n) for n in (64 * tiles, 64 * tiles, 0, 0, 0)]
    timelines = []
    for block in range(blocks):
        timeline = []
        for turn in (0, 1):
            tile = int(schedule.snake(SimulatorOps, *map(np.int32, (turn, block, blocks))))
            timeline += [m for m, _ in walk(band, schedule.walk_step(SimulatorOps, np.int32(turn)), tile, group, bounds)]
        timelines.append((len(list(walk(band, 1, block, group, bounds))), timeline))
    assert len({len(timeline) for _, timeline in timelines}) == 1, "long and short tiles even out"
    for time in range(len(timelines[0][1])):
        for first in (True, False):
            assert len({timeline[time] for length, timeline in timelines if (time < length) == first}) <= 1


@pytest.mark.parametrize("options", BANDS, ids=str)
def test_what_is_trimmed_and_what_tiles_cost(bodies, options):
    for seqlen_q, seqlen_k in ((200, 330), (700, 200), (129, 511)):
        plan = make_plan(64, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **options)
        first, count = visible_queries(plan.problem)
        seeing = np.flatnonzero(reference.visible(plan.problem).any(axis=1))
        assert (seeing == np.arange(first, first + count)).all()
        config, problem = plan.config, plan.problem
        band = bodies.KeyBand(config.kv_tile, config.q_block, config.left, config.right)
        bounds = [np.int32(n) for n in (seqlen_q, seqlen_k, problem.offset, problem.left or 0, problem.right or 0)]
        for n, cost in enumerate(q_blocks_of_tiles(problem, config)):
            assert cost == len(walk(band, 1, n, 1, bounds))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (50, 20)}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_compiled_code(head_dim, options):
    """No spills, no notes; tensor cores and bulk copies at work."""
    plan = make_plan(head_dim, **options)
    found = backward.resources(plan)
    assert not found["notes"]
    assert found["registers"] <= 168
    assert not found["spill_bytes"]
    ptx = toolchain.compile_ptx(backward.requests(plan)[1])
    products = 5 if not options.get("causal") and "window" not in options else 10
    assert len(re.findall("wgmma.commit_group", ptx.text)) >= products
    assert "cp.async.bulk.tensor" in ptx.text
    assert ("cp.reduce.async.bulk" if head_dim <= 128 else "red.global.add.v4.f32") in ptx.text
    assert ("atom" in ptx.text) == plan.config.deterministic


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "kv"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_only_what_is_needed_is_computed(head_dim, needs):
    whole, part = make_plan(head_dim), make_plan(head_dim, needs=needs)

    def products(plan):
        text = toolchain.compile_ptx(backward.requests(plan)[1]).text
        return len(re.findall(r"wgmma\.mma_async", text))

    assert products(part) < products(whole)
    assert part.workspace_bytes < whole.workspace_bytes or "q" in needs
    assert len(backward.requests(part)) == 2 + ("q" in needs)
    assert not backward.resources(part)["notes"]


@pytest.mark.parametrize(
    ("head_dim", "heads", "options", "last_keys_first", "step"),
    [
        (256, (8, 8), {"causal": True}, True, 1),  # what is in flight fits in the L2 cache
        (128, (16, 16), {"causal": True}, True, 1),
        (256, (32, 8), {"causal": True}, False, -1),  # it does not
        (128, (32, 8), {"causal": True}, False, -1),
        (256, (32, 8), {}, False, 1),  # without a right bound all tiles begin at the first block
    ],
)
def test_deterministic_order(head_dim, heads, options, last_keys_first, step):
    lengths = dict(seqlen_q=2048, seqlen_k=2048, heads=heads[0], kv_heads=heads[1])
    config = make_plan(head_dim, deterministic=True, **lengths, **options).config
    assert (config.last_keys_first, config.deterministic_step) == (last_keys_first, step)
    assert not make_plan(head_dim, **lengths, **options).config.last_keys_first


EVERY_LANE = """
import sys
import sanitizer_cases, test_sm90_backward
from numbaflash import toolchain
if "every" in sys.argv:
    sanitizer_cases.let_every_lane_arrive()
for head_dim in (64, 256):
    print(str(toolchain.compile_ptx(test_sm90_backward.backward.requests(test_sm90_backward.make_plan(head_dim))[1])).count("@p mbarrier.arrive"))
"""


def test_every_lane_arrives_for_racecheck():
    """What `sanitizer_cases --every-lane` builds has no arrival of lane 0 for its warp; the kernels that ship have several."""

    def arrivals(*arguments):
        tests = Path(__file__).parent
        here = os.environ | {"PYTHONPATH": os.pathsep.join((str(tests), str(tests.parent)))}
        done = subprocess.run([sys.executable, "-c", EVERY_LANE, *arguments], env=here, capture_output=True, text=True, check=True)
        return [int(line) for line in done.stdout.split()]

    assert min(arrivals()) > 0
    assert arrivals("every") == [0, 0]
