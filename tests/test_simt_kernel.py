"""The simt kernels: tile choice, compiled code without a GPU, results and bounds on a GPU. `test_simt_simulator` has results without one."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import simulator_cases

import numbaflash
from numbaflash import dispatch, testing, toolchain
from numbaflash.dispatch import CPU, BackwardLayouts, Device, Layout, Layouts
from numbaflash.kernels import simt
from numbaflash.kernels.simt import backward
from numbaflash.kernels.simt import config as tuning
from numbaflash.kernels.simt.backward import config as backward_tuning
from numbaflash.kernels.simt.backward import walk
from numbaflash.kernels.simt.tiles import copy_width, element_copy_width
from numbaflash.problem import DTYPES, ITEMSIZE, PACKED, make_packed_problem, make_problem
from numbaflash.ptx.simulated import SimulatorOps
from numbaflash.support import contiguous_backward_layouts, contiguous_layouts
from numbaflash.testing import BackwardCase, Case

H200 = Device("cuda", 0, (9, 0), 132, "H200")
T4 = Device("cuda", 0, (7, 5), 40, "T4")
A10 = Device("cuda", 0, (8, 6), 72, "A10")
V100, A100, LATER = (replace(T4, capability=c, sm_count=n) for c, n in (((7, 0), 80), ((8, 0), 108), ((12, 0), 170)))


def option_layouts(problem, *names):
    """Row-major layouts of the options that are arrays, and of what else is named, with strides of 0 along broadcast axes."""
    found = {}
    for name in (*problem.options, *names):
        plain = contiguous(problem.shape_of(name), ITEMSIZE[problem.dtype_of(name)])
        found[name] = replace(plain, strides=tuple(0 if n == 1 else step for n, step in zip(plain.shape, plain.strides, strict=True)))
    return found


def contiguous(shape, itemsize):
    return Layout(shape, tuple(itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))))


def make_plan(device=H200, *, seqlen=4096, dtype="float32", head_dim=64, head_dim_v=None, heads=16, lse=True, aligned=True, **options):
    q, k = (1, seqlen, heads, head_dim), (1, seqlen, heads // 2, head_dim)
    problem = make_problem(q, k, (*k[:3], head_dim_v or head_dim), (dtype,) * 3, **options)
    shapes = (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape)
    layouts = [contiguous(shape, ITEMSIZE[dtype]) for shape in shapes]
    layouts.append(contiguous(problem.lse_shape, ITEMSIZE[problem.lse_dtype]) if lse else None)
    if not aligned:
        layouts[1] = replace(layouts[1], alignment=ITEMSIZE[dtype])
    return simt.plan(problem, Layouts(*layouts, **option_layouts(problem)), device)


def make_backward_plan(device=H200, *, needs="qkv", deterministic=True, dlse=True, aligned=True, seqlen=4096, heads=16, **options):
    problem = make_plan(device, seqlen=seqlen, heads=heads, **options).problem
    itemsize, lse = ITEMSIZE[problem.dtype], contiguous(problem.lse_shape, ITEMSIZE[problem.lse_dtype])
    q, k, v, out = (contiguous(shape, itemsize) for shape in (problem.q_shape, problem.k_shape, problem.v_shape, problem.out_shape))
    dout = out if aligned else replace(out, alignment=itemsize)
    gradients = (layout if aligned else replace(layout, alignment=itemsize) for layout in (q, k, v))
    wanted = (layout if name in needs else None for name, layout in zip("qkv", gradients, strict=True))
    options = option_layouts(problem, *(f"d{name}" for name in problem.gradients[3:] if name in needs))
    return backward.plan(problem, BackwardLayouts(dout, q, k, v, out, lse, lse if dlse else None, *wanted, **options), device, deterministic)


def packed_problem(*, dtype="float32", head_dim=64, heads=16, total=65536, batch=16, **options):
    boundaries = {name: ((batch + 1,), "int32") for name in PACKED}
    return make_packed_problem((total, heads, head_dim), *[(total, heads // 2, head_dim)] * 2, (dtype,) * 3, **boundaries, **options)


def packed_plan(device=H200, **options):
    problem = packed_problem(**options)
    return simt.plan(problem, contiguous_layouts(problem), device)


def packed_backward_plan(device=H200, *, deterministic=True, **options):
    problem = packed_problem(**options)
    return backward.plan(problem, contiguous_backward_layouts(problem), device, deterministic)


# ---- choice of tiles


@pytest.mark.parametrize("device", [V100, T4, A100, A10, H200, LATER], ids=lambda device: "sm_{}{}".format(*device.capability))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_head_dim_has_a_tile_that_fits(device, dtype):
    for head_dim in range(1, 257):
        for head_dim_v in {head_dim, 1, 256}:
            for tile in tuning.fitting_tiles(dtype, head_dim, head_dim_v, tuning.shared_limit(device)):
                dim, dim_v = tuning.padded_dims(tile, dtype, head_dim, head_dim_v)
                config = replace(make_plan(dtype=dtype).config, dim=dim, dim_v=dim_v, **fields_of(tile))
                check_invariants(config, head_dim, head_dim_v)
                assert config.shared_bytes <= tuning.shared_limit(device)


def fields_of(tile):
    return {name: getattr(tile, name) for name in ("warps", "lanes_m", "rows", "columns", "min_blocks")}


def check_copies(config, dim, *tiles):
    """Threads that copy rows of a tile together never write past it."""
    for rows, vectors in itertools.product(tiles, (False, True)):
        either = replace(config, vectors=vectors)
        for width, unit in ((copy_width(either, rows), config.vector if vectors else 1), (element_copy_width(either, rows), 1)):
            assert dim % (width * unit) == 0 and rows % (config.threads // width) == 0


def check_invariants(config, head_dim, head_dim_v):
    """What the kernel takes for granted."""
    assert config.dim >= head_dim and config.dim_v >= head_dim_v
    for dim, tiles in ((config.dim, (config.q_tile, config.kv_tile)), (config.dim_v, (config.kv_tile,))):
        assert dim % (8 * config.vector) == 0, "a row is swizzled over 8 units"
        check_copies(config, dim, *tiles)
    assert config.dim_v % (config.lanes_n * config.vector) == 0, "each lane has whole units of the output"
    units = config.kv_tile // config.vector
    assert units and units & (units - 1) == 0, "keys of p are permuted by XOR"
    for n in (config.lanes_m, config.lanes_n):
        assert n & (n - 1) == 0
    assert config.lanes_m * config.lanes_n == config.warp_size


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_simulator_config_keeps_the_invariants(dtype):
    for head_dim in (1, 33, 64, 250, 256):
        config = make_plan(CPU, dtype=dtype, head_dim=head_dim, head_dim_v=257 - head_dim).config
        assert config.warp_size == 8 and config.threads == 16
        check_invariants(config, head_dim, 257 - head_dim)


def test_small_problems_get_small_tiles():
    assert make_plan(seqlen=16384).config.q_tile == 128
    assert make_plan(seqlen=1024, heads=4).config.q_tile == 32, "4 heads x 8 tiles of 128 leave most multiprocessors without work"
    assert make_plan(seqlen=1, heads=512).config.q_tile == 32


def test_vectors_need_aligned_contiguous_rows():
    assert make_plan().config.vectors
    assert not make_plan(aligned=False).config.vectors
    assert not make_plan(head_dim=62).config.vectors
    layout = contiguous((2, 5, 1, 64), 4)
    assert tuning.rows_in_vectors(layout, 4, 4)
    assert tuning.rows_in_vectors(replace(layout, strides=(0, -256, 3, 4)), 4, 4), "the stride of an axis of length 1 does not matter"
    assert not tuning.rows_in_vectors(replace(layout, strides=(0, 260, 256, 4)), 4, 4)
    assert not tuning.rows_in_vectors(replace(layout, strides=(1280, 256, 256, 8)), 4, 4)


def test_a_plan_describes_its_launch():
    plan = make_plan(seqlen=1000, heads=64, window=(100, 0))
    assert plan.grid == (64 * -(-1000 // plan.config.q_tile),)
    assert (plan.threads, plan.shared_bytes) == (plan.config.threads, plan.config.shared_bytes)
    assert not plan.copies, "every stride is read as it is"
    assert plan.config.bounded_left and plan.config.bounded_right
    assert simt.request(plan).arch == (9, 0)
    values = [p.value for p in simt.parameters(plan) if isinstance(p, toolchain.Scalar)]
    assert values[1:3] == [-100, 0], "first and last key of query 0"
    assert values[3:] == [plan.grid[0] // 64, 64, 2, 64], "q tiles, heads, group, heads that run together"


def test_configs_depend_on_neither_lengths_nor_heads():
    plans = [make_plan(seqlen=n, heads=h, causal=True) for n, h in ((5000, 16), (8192, 32), (9999, 48))]
    assert len({plan.config for plan in plans}) == 1


def test_supports():
    problem = make_plan().problem
    assert simt.supports(problem, H200) == ()
    assert "7.0" in simt.supports(problem, Device("cuda", 0, (6, 1), 20, "P4"))[0]
    assert "needs an NVIDIA GPU" in simt.supports(problem, CPU)[0]
    huge = replace(problem, batch=2**28, heads=64, kv_heads=64)
    assert "at most" in simt.supports(huge, H200)[0]
    endless = replace(problem, seqlen_q=2**30, seqlen_k=2**30, right=2**30 - 2)
    assert "int32" in simt.supports(endless, H200)[0]


@pytest.mark.parametrize("device", [V100, T4, A100, A10, H200, LATER], ids=lambda device: "sm_{}{}".format(*device.capability))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_head_dim_has_gradient_tiles_that_fit(device, dtype):
    plain, limit = make_backward_plan(dtype=dtype).config, tuning.shared_limit(device)
    for head_dim in (*range(1, 257, 9), *range(32, 257, 32)):
        for head_dim_v in {head_dim, 1, 256}:
            for tile in backward_tuning.fitting_tiles(dtype, head_dim, head_dim_v, limit):
                dim, dim_v = backward_tuning.padded_dims(tile, dtype, head_dim, head_dim_v)
                sizes = {name: getattr(tile, name) for name in ("warps", "q_tile", "kv_tile", "min_blocks")}
                config = replace(plain, dim=dim, dim_v=dim_v, **sizes)
                check_backward_invariants(config, head_dim, head_dim_v)
                assert config.shared_bytes <= limit
                kept = (config.dk.rows * config.dk.columns + config.dv.rows * config.dv.columns) * config.vector
                passing = config.vector * max(config.dq.rows * config.dq.columns, 2 * config.scores.rows * config.scores.columns)
                assert (kept + passing) // config.vector * ITEMSIZE[dtype] // 4 <= 216, "registers of a thread beside addresses and what it reads"


def check_backward_invariants(config, head_dim, head_dim_v):
    """What the kernels take for granted."""
    vector, lanes_m, lanes_n = config.vector, config.lanes_m, config.lanes_n
    assert config.dim >= head_dim and config.dim_v >= head_dim_v
    for dim in (config.dim, config.dim_v):
        assert dim % (8 * vector) == 0, "a row is swizzled over 8 units"
        check_copies(config, dim, config.q_tile, config.kv_tile)
    assert config.q_tile % config.step == 0 and config.kv_tile % config.step == 0, "products take whole turns of queries and keys"
    assert config.step % lanes_m == 0 and config.kv_tile // vector >= lanes_m, "rows of p and ds are swizzled over lanes_m units"
    for share, m, n in (
        (config.scores, config.q_tile, config.kv_tile),
        (config.dq, config.q_tile, config.dim),
        (config.dk, config.kv_tile, config.dim),
        (config.dv, config.kv_tile, config.dim_v),
    ):
        assert share.warps_m * share.lanes_m * share.rows == m and share.warps_n * share.lanes_n * share.columns == n, "everything is computed"
        assert config.warps % (share.warps_m * share.warps_n) == 0
        if share != config.scores:
            assert share.columns % vector == 0, "each lane has whole units"
    assert lanes_m * lanes_n == config.warp_size


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_simulator_config_keeps_the_gradients_invariants(dtype):
    for head_dim in (1, 33, 64, 250, 256):
        config = make_backward_plan(CPU, dtype=dtype, head_dim=head_dim, head_dim_v=257 - head_dim).config
        assert config.warp_size == 8 and config.threads == 16
        check_backward_invariants(config, head_dim, 257 - head_dim)


def test_a_backward_plan_describes_its_launches():
    plan = make_backward_plan(seqlen=1000, heads=64, window=(100, 0))
    config = plan.config
    q_tiles, kv_tiles = -(-1000 // config.q_tile), -(-1000 // config.kv_tile)
    assert plan.direction == "backward" and plan.deterministic and plan.grid == (32 * kv_tiles,)
    assert not plan.copies, "every stride is read as it is"
    before, products, after = backward.launches(plan)
    assert [blocks for _, _, blocks, _ in (before, products, after)] == [64 * q_tiles, 32 * kv_tiles, 64 * q_tiles]
    assert [request.build.rpartition(".")[2] for request in backward.requests(plan)] == ["rows:build_delta", "gradients:build", "rows:build_dq"]
    values = [p.value for p in products[1] if isinstance(p, toolchain.Scalar)]
    assert values[1:4] == [plan.problem.scale, -100, 0], "factor of dk, first and last visible key of query 0"
    assert values[4:] == [q_tiles, kv_tiles, 32, 2, 10], "q tiles, k tiles, key/value heads, group, key/value heads that run together"


def test_the_workspace_holds_what_is_needed():
    rows = 16 * 4096
    delta, sums, turns = 4 * rows, 4 * rows * 64, -(-4 * (1 + rows // make_backward_plan().config.q_tile) // 256) * 256
    assert make_backward_plan().workspace_bytes == delta + sums + turns
    assert make_backward_plan(deterministic=False).workspace_bytes == delta + sums
    assert make_backward_plan(needs="k").workspace_bytes == delta
    assert make_backward_plan(needs="v").workspace_bytes == 0
    for plan in (make_backward_plan(), make_backward_plan(dtype="float64", head_dim=33, seqlen=1001)):
        for _, parameters, _, _ in backward.launches(plan):
            for array in parameters:
                if isinstance(array, toolchain.Array) and array.operand == "workspace":
                    size = np.prod(array.shape, dtype=np.int64) * np.dtype(array.dtype).itemsize
                    assert array.offset % 256 == 0 and array.offset + size <= plan.workspace_bytes


def test_what_nobody_needs_is_not_launched():
    def builds(**options):
        return [request.build.rpartition(":")[2] for request in backward.requests(make_backward_plan(**options))]

    assert builds(needs="v") == ["build"]
    assert builds(needs="kv") == builds(needs="k") == ["build_delta", "build"]
    assert builds(needs="q") == ["build_delta", "build", "build_dq"]
    assert builds(seqlen=0, needs="q") == ["build_delta", "build_dq"], "no block has keys"
    config = make_backward_plan(needs="v").config
    assert not (config.with_dq or config.with_dk or config.with_ds or config.ordered)


def test_gradients_are_ordered_only_where_blocks_share_dq():
    assert make_backward_plan().config.ordered
    assert not make_backward_plan(deterministic=False).config.ordered
    assert not make_backward_plan(needs="kv").config.ordered
    assert not make_backward_plan(seqlen=32).config.ordered, "one block adds to each tile"


WINDOWS = ((50, 20), (70, None), (None, 9), (33, 0), (0, 20), (1, None), (None, 1))
BANDS = ({}, {"causal": True}, {"causal": "top_left"}, *({"window": window} for window in WINDOWS))


@pytest.mark.parametrize("options", BANDS, ids=str)
@pytest.mark.parametrize(("q_tile", "kv_tile"), [(128, 128), (64, 128), (32, 64), (64, 32)])
def test_deterministic_steps_and_turns(monkeypatch, options, q_tile, kv_tile):
    """Each block comes to the tiles of queries that see its keys, in turn, and never sooner than a block before it that starts with it."""
    monkeypatch.setattr(walk, "straight_line", lambda result, argtypes, body: functools.partial(body, SimulatorOps))
    for seqlen_q, seqlen_k in ((1, 200), (256, 256), (200, 330), (330, 200), (129, 511), (640, 257)):
        plan = make_backward_plan(seqlen=max(seqlen_q, seqlen_k), heads=6, **options)
        problem = make_problem((2, seqlen_q, 6, 64), *[(2, seqlen_k, 2, 64)] * 2, ("float32",) * 3, **options)
        config = replace(plan.config, q_tile=q_tile, kv_tile=kv_tile, ordered=True)
        assert config.walks_down == bool(options)
        for column, defined in enumerate(simulator_cases.defined_steps(problem, q_tile, kv_tile)):
            soonest = {}
            for n, steps in itertools.groupby(defined, key=lambda step: step[0]):
                steps = list(steps)
                found = list(itertools.islice(walked(config, problem, column, n, *bounds_of(steps, problem, config)), len(steps) + 1))
                assert found == steps
                for at, (_, _, number) in enumerate(steps):
                    assert at >= soonest.get(number, 0), "the blocks before have been here"
                    soonest[number] = at


def bounds_of(steps, problem, config):
    """First of the tiles of queries that a block comes to, and one past the last."""
    blocks = [number % -(-problem.seqlen_q // config.q_tile) for _, _, number in steps]
    return min(blocks), max(blocks) + 1


def walked(config, problem, column, n, first, stop):
    """Steps of a block as the kernel makes them, between the bounds; as `simulator_cases.defined_steps`."""
    q_tiles, group = -(-problem.seqlen_q // config.q_tile), problem.group
    batch, kv_head = divmod(column, problem.kv_heads)
    step_up, step_down, turn = walk.step_up(config), walk.step_down(config), walk.turn(config)
    band_first, band_last = (0 if bound is None else problem.offset + sign * bound for sign, bound in ((-1, problem.left), (1, problem.right)))
    head, stop_head, before = kv_head * group, (kv_head + 1) * group, batch * problem.heads
    block = stop - 1 if config.walks_down else first
    while head < stop_head:
        number, first_q = (before + head) * q_tiles + block, block * config.q_tile
        yield n, int(turn(*map(np.int32, (n, first_q, band_first)))), number
        if config.walks_down:
            following = step_down(*map(np.int32, (number, first_q, q_tiles, before, stop_head, group, n * config.kv_tile, band_last)))
        else:
            following = step_up(*map(np.int32, (head, block, first, stop)))
        head, block = map(int, following)


def test_supports_gradients():
    problem = make_plan().problem
    assert backward.supports(problem, H200) == ()
    assert "7.0" in backward.supports(problem, Device("cuda", 0, (6, 1), 20, "P4"))[0]
    endless = replace(problem, seqlen_q=2**30, seqlen_k=2**30, left=2**30 - 2)
    assert any("last key's last query" in reason for reason in backward.supports(endless, H200))
    assert any("seqlen_q / 4" in reason for reason in backward.supports(replace(problem, batch=2**27, heads=32, kv_heads=32), H200))
    assert any("seqlen_k / 8" in reason for reason in backward.supports(replace(problem, batch=2**27, seqlen_q=1), H200))


# ---- options

OPTIONS = {
    "mask": {"mask": ((1, 1, 4096, 4096), "bool")},
    "bias": {"bias": ((16, 4096, 4096), "float32")},
    "bias of keys": {"bias": ((1, 1, 1, 4096), "bfloat16")},
    "alibi": {"alibi_slopes": ((16,), "float32")},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": ((16,), "float32")},
    "lengths": {"seqlens_q": ((1,), "int32"), "seqlens_k": ((1,), "int64")},
    "dropout": {"dropout": 0.1},
}
EVERY_OPTION = {name: value for each in OPTIONS.values() for name, value in each.items()}
NEEDS = ("q", "k", "v", "bias", "sinks")


def test_absent_options_add_nothing():
    assert not make_plan().config.options and not make_backward_plan().config.options
    assert len(simt.parameters(make_plan())) == 12
    for name, option in OPTIONS.items():
        plan = make_plan(**option)
        assert plan.config.options and len(simt.parameters(plan)) > 12, name
        assert replace(plan.config, options=make_plan().config.options) == make_plan().config, "the tile is that of the plain kernel"


def test_values_are_no_part_of_a_kernel():
    for one, other in (({"dropout": 0.1}, {"dropout": 0.7}), ({"softcap": 1.0}, {"softcap": 50.0})):
        assert simt.request(make_plan(**one)) == simt.request(make_plan(**other))
        assert simt.parameters(make_plan(**one)) != simt.parameters(make_plan(**other))


def test_packed_sequences_are_no_option():
    """Within a sequence, a kernel is the plain one; the grid knows no boundaries, and every block has a place in the workspace."""
    plan, gradients = packed_plan(causal=True), packed_backward_plan(causal=True)
    assert not plan.config.options and plan.config.options.packed and plan.config.options.per_entry
    assert plan.grid == (16 * (65536 // plan.config.q_tile + 16 + 2),)
    assert gradients.grid == (8 * (65536 // gradients.config.kv_tile + 16 + 2),)
    before, products, after = backward.launches(gradients)
    assert before[2] == after[2] == 16 * (65536 // gradients.config.q_tile + 16 + 2)
    assert gradients.workspace_bytes >= before[2] * gradients.config.q_tile * 64 * 4
    expected = packed_plan(max_seqlen_q=100, max_seqlen_k=100)
    assert expected.config.q_tile <= 128 and packed_plan(max_seqlen_q=3).config.q_tile < plan.config.q_tile


def test_sinks_leave_the_products_as_they_are():
    plain, (before, products, after, dsinks) = (
        backward.requests(make_backward_plan()),
        backward.requests(make_backward_plan(needs=NEEDS, **OPTIONS["sinks"])),
    )
    assert plain == [before, products, after]
    assert dsinks.build.endswith("rows:build_dsinks")


def test_the_gradient_of_a_bias_needs_no_workspace():
    with_bias = make_backward_plan(needs=NEEDS, **OPTIONS["bias"])
    assert with_bias.workspace_bytes == make_backward_plan(needs=("q", "k", "v"), **OPTIONS["bias"]).workspace_bytes
    config, last = with_bias.config, backward.launches(with_bias)[-1]
    assert last[0].build.endswith("bias:build") and last[2] == 16 * (4096 // config.q_tile) * (4096 // config.kv_tile)
    of_keys = backward.launches(make_backward_plan(needs=("bias",), **OPTIONS["bias of keys"]))
    assert [request.build.rpartition(".")[2] for request, *_ in of_keys] == ["rows:build_delta", "bias:build"]
    assert of_keys[-1][2] == 4096 // make_backward_plan(**OPTIONS["bias of keys"]).config.kv_tile


def test_each_entry_with_an_offset_of_its_own():
    lengths = OPTIONS["lengths"]
    assert make_plan(causal=True, **lengths).config.options.per_entry
    assert not make_plan(causal="top_left", **lengths).config.options.per_entry
    values = [p.value for p in simt.parameters(make_plan(window=(100, 7), **lengths)) if isinstance(p, toolchain.Scalar)]
    assert values[1:3] == [-100, 7]


# ---- compiled code

COMPILED = {
    "D 64": make_plan(),
    "D 64, band": make_plan(window=(100, 0)),
    "D 64, causal, any strides": make_plan(causal=True, aligned=False),
    "D 64, short": make_plan(seqlen=256),
    "D 128": make_plan(head_dim=128),
    "D 128, band": make_plan(head_dim=128, window=(100, 0)),
    "D 96, band, any strides": make_plan(head_dim=96, window=(100, 0), aligned=False),
    "D 256, band": make_plan(head_dim=256, window=(100, 0)),
    "D 80, D v 200, band": make_plan(head_dim=80, head_dim_v=200, window=(100, 0)),
    "D 64, sm_75": make_plan(T4, causal=True),
    "D 128, sm_75": make_plan(T4, head_dim=128),
    "D 256, sm_86": make_plan(A10, head_dim=256),
    "D 128, sm_80": make_plan(A100, head_dim=128, causal=True),
    "float64, D 64": make_plan(dtype="float64", causal=True),
    "float64, D 256": make_plan(dtype="float64", head_dim=256, window=(100, 0)),
    "bfloat16, D 128, sm_80": make_plan(A100, dtype="bfloat16", head_dim=128, causal=True),
    "float16, D 64, sm_75": make_plan(T4, dtype="float16"),
}


COMPILED |= {f"D {head_dim}, {name}": make_plan(head_dim=head_dim, **option) for name, option in OPTIONS.items() for head_dim in (64, 128)}
COMPILED |= {
    "D 256, band, mask": make_plan(head_dim=256, window=(100, 0), **OPTIONS["mask"]),
    "D 64, causal, lengths": make_plan(causal=True, **OPTIONS["lengths"]),
    "float64, D 64, dropout": make_plan(dtype="float64", **OPTIONS["dropout"]),
    "bfloat16, D 64, sm_75, bias": make_plan(T4, dtype="bfloat16", **OPTIONS["bias"]),
    "D 64, causal, every option": make_plan(causal=True, **EVERY_OPTION),
    "D 128, every option": make_plan(head_dim=128, **EVERY_OPTION),
    "D 64, packed": packed_plan(),
    "D 128, causal, packed": packed_plan(head_dim=128, causal=True),
    "D 64, causal, packed, softcap, sinks": packed_plan(causal=True, softcap=30.0, sinks=((16,), "float32")),
}


def most_spilled(plan):
    """Bytes that a thread may spill. Addresses of any strides may not all fit beside the accumulators, nor what is known of a mask before the
    scores: some reloads a tile, of some 2000 instructions and more, none in the products. The rows of a sequence lie at addresses of registers, those
    of a whole batch at parameters."""
    options = plan.config.options
    if options.packed:
        return 128
    if options.mask and options.dropout:
        return 256
    return 96 if options.mask else 0 if plan.config.vectors else 64


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_kernel(name):
    plan = COMPILED[name]
    request = simt.request(plan)
    try:
        report = toolchain.ptxas_report(toolchain.compile_ptx(request), request.arch)
        loops = innermost_loops(toolchain.sass(toolchain.compile_ptx(request), request.arch))
    except toolchain.ToolMissingError as error:
        pytest.skip(str(error))
    assert max(report.spill_stores, report.spill_loads) <= most_spilled(plan)
    assert not report.notes
    assert report.registers * plan.threads * plan.config.min_blocks <= 65536
    multiply = "DFMA" if plan.config.compute == "float64" else "FFMA"
    config = plan.config
    products = {"q k": config.rows * config.columns * config.vector, "p v": config.rows * config.dim_v // config.lanes_n * config.vector}
    # ptxas unrolls small ones further. Loops with selects or comparisons of floats are not the products, but for what is masked.
    plain = [loop for loop in loops if loop[multiply] and not loop["FSEL"] and not loop["FSETP"] and not loop["DSETP"]]
    shares = {}
    for product, count in products.items():
        found = [loop for loop in plain if loop[multiply] % (tuning.UNITS * count) == 0]
        assert found, f"no loop of {tuning.UNITS} x {count} {multiply} for {product} in {loops}"
        assert all(loop["LDS.128"] and not loop["LDL"] and not loop["STL"] for loop in found)
        shares[product] = max(loop[multiply] / loop.total() for loop in found)
    least = 0.85 if config.rows == 8 else 0.65 if config.rows * config.columns >= 8 else 0.5
    assert min(shares.values()) >= least, f"{multiply}: {shares} of the instructions in {plain}"


BACKWARD_COMPILED = {
    "D 64": make_backward_plan(deterministic=False),
    "D 64, causal, dq alone": make_backward_plan(causal=True, needs="q"),
    "D 64, band, any strides": make_backward_plan(window=(100, 0), aligned=False),
    "D 64, dv alone": make_backward_plan(needs="v"),
    "D 128": make_backward_plan(head_dim=128, deterministic=False),
    "D 128, causal": make_backward_plan(head_dim=128, causal=True),
    "D 128, band, any strides": make_backward_plan(head_dim=128, window=(100, 0), aligned=False),
    "D 128, band, short": make_backward_plan(head_dim=128, window=(100, 0), seqlen=1100),
    "D 256, band": make_backward_plan(head_dim=256, window=(100, 0)),
    "D 80, D v 200, band": make_backward_plan(head_dim=80, head_dim_v=200, window=(100, 0)),
    "D 96, causal, dk and dv": make_backward_plan(head_dim=96, causal=True, needs="kv"),
    "D 64, sm_75": make_backward_plan(T4, causal=True),
    "D 256, sm_75": make_backward_plan(T4, head_dim=256),
    "D 256, sm_80": make_backward_plan(A100, head_dim=256, causal=True),
    "D 128, sm_86": make_backward_plan(A10, head_dim=128),
    "D 256, sm_86": make_backward_plan(A10, head_dim=256),
    "float16, D 64, sm_120": make_backward_plan(LATER, dtype="float16"),
    "bfloat16, D 128, sm_80": make_backward_plan(A100, dtype="bfloat16", head_dim=128, causal=True),
    "float64, D 64": make_backward_plan(dtype="float64", causal=True),
    "float64, D 256": make_backward_plan(dtype="float64", head_dim=256, window=(100, 0)),
    "float64, D 256, sm_75": make_backward_plan(T4, dtype="float64", head_dim=256),
}


BACKWARD_COMPILED |= {
    f"D {head_dim}, {name}": make_backward_plan(needs=NEEDS, head_dim=head_dim, **option)
    for name, option in OPTIONS.items()
    for head_dim in (64, 128)
}
BACKWARD_COMPILED |= {
    "D 256, band, mask": make_backward_plan(head_dim=256, window=(100, 0), **OPTIONS["mask"]),
    "float64, D 64, dropout": make_backward_plan(dtype="float64", **OPTIONS["dropout"]),
    "bfloat16, D 64, sm_75, bias": make_backward_plan(T4, needs=NEEDS, dtype="bfloat16", **OPTIONS["bias"]),
    "D 64, causal, every option": make_backward_plan(needs=NEEDS, causal=True, **EVERY_OPTION),
    "D 128, every option": make_backward_plan(needs=NEEDS, head_dim=128, **EVERY_OPTION),
    "D 64, packed": packed_backward_plan(deterministic=False),
    "D 128, causal, packed": packed_backward_plan(head_dim=128, causal=True),
    "D 64, causal, packed, softcap": packed_backward_plan(causal=True, softcap=30.0),
}


@pytest.mark.parametrize("name", BACKWARD_COMPILED)
def test_compiled_gradients(name):
    plan = BACKWARD_COMPILED[name]
    config = plan.config
    multiply = "DFMA" if config.compute == "float64" else "FFMA"
    for request in backward.requests(plan):
        of_products = request.build.endswith("gradients:build")
        try:
            ptx = toolchain.compile_ptx(request)
            report = toolchain.ptxas_report(ptx, request.arch)
            loops = innermost_loops(toolchain.sass(ptx, request.arch)) if of_products else []
        except toolchain.ToolMissingError as error:
            pytest.skip(str(error))
        packed_rows = 16 if config.options.packed else 0  # addresses of a sequence's rows: once a tile
        assert max(report.spill_stores, report.spill_loads) <= packed_rows
        assert not report.notes
        if ".simt." in request.build:  # not what makes lists of blocks
            assert report.registers * plan.threads * request.config.min_blocks <= 65536
        if not of_products:
            continue
        wanted = {"scores": config.scores.rows * config.scores.columns * config.step}
        for gradient, length in (("dq", config.kv_tile), ("dk", config.q_tile), ("dv", config.q_tile)):
            if getattr(config, f"with_{gradient}") and length > 2 * config.step:  # else the compilers leave no loop
                share = getattr(config, gradient)
                wanted[gradient] = share.rows * share.columns * config.step
        plain = [loop for loop in loops if loop[multiply] and not loop["FSEL"] and not loop["FSETP"] and not loop["DSETP"]]
        for product, count in wanted.items():
            found = [loop for loop in plain if loop[multiply] % count == 0]
            assert found, f"no loop of {count} {multiply} for {product} in {loops}"
            assert all((loop["LDS.128"] or loop["LDS"]) and not loop["LDL"] and not loop["STL"] for loop in found)
            if config.compute == "float32" and config.kv_tile >= 64:
                least = 0.8 if config.scores.rows * config.scores.columns >= 16 else 0.65
                share = max(loop[multiply] / loop.total() for loop in found)
                assert share >= least, f"{product}: {multiply} is {share:.2f} of the instructions in {found}"


def innermost_loops(listing):
    """Instructions of each loop that holds no other, by opcode (LDS with its width)."""
    instructions, labels, loops = [], {}, []
    for line in listing.splitlines():
        label = re.match(r"(\.L_x_\d+):", line.strip())
        if label:
            labels[label[1]] = len(instructions)
            continue
        found = re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)(.*)", line)
        if found:
            instructions.append((found[1], found[2]))
    for end, (opcode, rest) in enumerate(instructions):
        target = re.search(r"\.L_x_\d+", rest)
        start = labels.get(target[0], end) if opcode.startswith("BRA") and target else end
        if start < end and not any(start <= other and last <= end for other, last in loops):
            loops.append((start, end))
    return [Counter(short(opcode) for opcode, _ in instructions[start : end + 1]) for start, end in loops]


def short(opcode):
    parts = opcode.split(".")
    return "LDS.128" if parts[0] == "LDS" and "128" in parts else parts[0]


def test_offsets_are_computed_in_64_bits():
    """Every global address is a 64-bit base plus 64-bit products of an index and a stride."""
    text = toolchain.compile_ptx(simt.request(make_plan(aligned=False))).text
    addresses = re.findall(r"(?:ld|st)\.global\.\w+ (?:%\w+, )?\[(%\w+)\]|cp\.async\.\w+\.shared\.global \[%\w+\], \[(%\w+)\]", text)
    made_by = {to: by for by, to in re.findall(r"(\S+) \t(%rd\d+), ", text)}
    assert len(addresses) > 100
    for address in (a or b for a, b in addresses):
        assert made_by[address] in ("add.s64", "mad.lo.s64"), f"{address} is made by {made_by[address]}"


# ---- the GPU

LARGE = {
    "D 64": Case(seqlen_q=300, seqlen_k=333, heads=4, kv_heads=2),
    "D 64, full tiles": Case(batch=2, seqlen_q=1024, seqlen_k=1024, heads=80, kv_heads=40),
    "D 128, full tiles, causal": Case(seqlen_q=2048, seqlen_k=2048, heads=16, kv_heads=16, head_dim=128, head_dim_v=128, causal=True),
    "D 256, window": Case(seqlen_q=1500, seqlen_k=1700, heads=12, kv_heads=4, head_dim=256, head_dim_v=256, window=(200, 30)),
    "D 96, D v 200": Case(seqlen_q=700, seqlen_k=700, heads=8, kv_heads=1, head_dim=96, head_dim_v=200, causal=True),
    "D 1": Case(seqlen_q=260, seqlen_k=200, heads=3, kv_heads=3, head_dim=1, head_dim_v=1),
    "hidden NaN, causal": Case(seqlen_q=300, seqlen_k=290, heads=2, kv_heads=2, causal=True, hidden="nan", window=(70, None)),
    "NaN among what is seen": Case(seqlen_q=300, seqlen_k=290, heads=2, kv_heads=2, causal=True, values="nan"),
    "big scores": Case(seqlen_q=300, seqlen_k=290, heads=2, kv_heads=2, values="big"),
    "more queries than keys": Case(seqlen_q=500, seqlen_k=100, heads=2, kv_heads=1, causal=True),
    "no keys": Case(seqlen_q=130, seqlen_k=0, heads=2, kv_heads=1),
    "one query": Case(seqlen_q=1, seqlen_k=5000, heads=8, kv_heads=2),
}


def run_on_gpu(case):
    library = next(iter(testing.gpu_libraries()))
    return testing.run_case(case, "simt", library)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGE)
def test_gpu(name, dtype):
    run_on_gpu(replace(LARGE[name], dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gpu_every_tile(dtype, head_dim, monkeypatch):
    """Each tile of the tables that fits, also those that this GPU would not choose, on a problem with borders."""
    tiles = tuning.fitting_tiles(dtype, head_dim, head_dim, tuning.shared_limit(toolchain.device(0)))
    for number, tile in enumerate(tiles):
        monkeypatch.setattr(tuning, "choose_tile", lambda problem, device, tile=tile: tile)
        kind = {
            "dtype": dtype,
            "head_dim": head_dim,
            "head_dim_v": head_dim,
            "seqlen_q": 200 + number,
        }  # a kind of call of its own, so that it is planned anew
        run_on_gpu(Case(**kind, seqlen_k=230, heads=2, kv_heads=2, window=(90, 40), hidden="nan"))


OPTION_SCORES = (2, 4, 300, 333)
OPTION_LARGE = {
    "mask": {"mask_shape": OPTION_SCORES, "hidden": "nan"},
    "mask of blocks, causal": {"mask_shape": (300, 333), "mask_values": "blocks", "causal": True, "hidden": "inf"},
    "bias": {"bias_shape": OPTION_SCORES},
    "bias of lowest numbers, broadcast": {"bias_shape": (4, 300, 1), "bias_values": "lowest", "bias_dtype": "float32"},
    "bias of keys, -inf": {"bias_shape": (2, 1, 1, 333), "bias_values": "infinite", "hidden": "nan"},
    "bias of heads": {"bias_shape": (4, 1, 1)},
    "alibi, lengths": {"alibi_shape": (4,), "lengths_q": "random", "lengths_k": "random", "hidden": "nan"},
    "softcap": {"softcap": 1.0},
    "sinks, causal": {"with_sinks": True, "causal": True},
    "lengths at the edges": {"lengths_q": "edges", "lengths_k": "edges", "lengths_dtype": "int64", "causal": True, "hidden": "nan"},
    "lengths, window": {"lengths_q": "random", "lengths_k": "random", "window": (50, 20), "hidden": "inf"},
    "dropout": {"dropout": 0.3, "dropout_seed": 2**63 + 5},
    "every option": {
        "causal": True,
        "softcap": 3.0,
        "mask_shape": (300, 333),
        "bias_shape": (4, 1, 333),
        "alibi_shape": (2, 4),
        "with_sinks": True,
        "dropout": 0.3,
        "lengths_q": "random",
        "lengths_k": "random",
        "hidden": "nan",
    },
}
OPTION_BASE = {"batch": 2, "seqlen_q": 300, "seqlen_k": 333, "heads": 4, "kv_heads": 2}


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTION_LARGE)
def test_gpu_options(name, dtype, head_dim):
    run_on_gpu(Case(dtype=dtype, head_dim=head_dim, head_dim_v=head_dim, **OPTION_BASE, **OPTION_LARGE[name]))


BACKWARD_LARGE = {
    "D 64": {"seqlen_q": 300, "seqlen_k": 333, "heads": 4, "kv_heads": 2, "with_dlse": True},
    "D 64, full tiles": {"batch": 2, "seqlen_q": 512, "seqlen_k": 512, "heads": 40, "kv_heads": 20},
    "D 128, full tiles, causal": {
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 128,
        "head_dim_v": 128,
        "causal": True,
    },
    "D 256, window": {"seqlen_q": 700, "seqlen_k": 900, "heads": 4, "kv_heads": 4, "head_dim": 256, "head_dim_v": 256, "window": (200, 30)},
    "D 96, D v 200": {"seqlen_q": 500, "seqlen_k": 500, "heads": 8, "kv_heads": 1, "head_dim": 96, "head_dim_v": 200, "causal": True},
    "D 1": {"seqlen_q": 260, "seqlen_k": 200, "heads": 3, "kv_heads": 3, "head_dim": 1, "head_dim_v": 1},
    "hidden NaN, causal": {"seqlen_q": 300, "seqlen_k": 290, "heads": 2, "kv_heads": 2, "causal": True, "hidden": "nan", "window": (70, None)},
    "NaN among what is seen": {"seqlen_q": 300, "seqlen_k": 290, "heads": 2, "kv_heads": 2, "causal": True, "values": "nan"},
    "big scores": {"seqlen_q": 300, "seqlen_k": 290, "heads": 2, "kv_heads": 2, "values": "big"},
    "more queries than keys": {"seqlen_q": 500, "seqlen_k": 100, "heads": 2, "kv_heads": 1, "causal": True, "hidden": "inf"},
    "no keys": {"seqlen_q": 130, "seqlen_k": 0, "heads": 2, "kv_heads": 1},
    "one query": {"seqlen_q": 1, "seqlen_k": 5000, "heads": 8, "kv_heads": 2},
    "dq alone": {"seqlen_q": 300, "seqlen_k": 333, "heads": 4, "kv_heads": 2, "causal": True, "needs": ("q",)},
    "dk alone": {"seqlen_q": 300, "seqlen_k": 333, "heads": 4, "kv_heads": 2, "causal": True, "needs": ("k",)},
    "dv alone": {"seqlen_q": 300, "seqlen_k": 333, "heads": 4, "kv_heads": 2, "causal": True, "needs": ("v",)},
}


def run_gradients_on_gpu(case):
    return testing.run_backward_case(case, "simt", next(iter(testing.gpu_libraries())))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKWARD_LARGE)
def test_gpu_gradients(name, dtype, deterministic):
    run_gradients_on_gpu(BackwardCase(dtype=dtype, deterministic=deterministic, **BACKWARD_LARGE[name]))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTION_LARGE)
def test_gpu_gradients_of_options(name, dtype, head_dim):
    option = OPTION_LARGE[name]
    needs = ("q", "k", "v", *(("bias",) if "bias_shape" in option else ()), *(("sinks",) if "with_sinks" in option else ()))
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim}
    run_gradients_on_gpu(BackwardCase(dtype=dtype, needs=needs, with_dlse=True, deterministic=True, **sizes, **OPTION_BASE, **option))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gpu_every_gradient_tile(dtype, head_dim, monkeypatch):
    """As `test_gpu_every_tile`."""
    tiles = backward_tuning.fitting_tiles(dtype, head_dim, head_dim, tuning.shared_limit(toolchain.device(0)))
    for number, tile in enumerate(tiles):
        monkeypatch.setattr(backward_tuning, "choose_tile", lambda problem, device, tile=tile: tile)
        kind = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim, "seqlen_q": 200 + number}
        run_gradients_on_gpu(BackwardCase(**kind, seqlen_k=230, heads=2, kv_heads=2, window=(90, 40), hidden="nan", deterministic=True))


@pytest.mark.gpu
def test_gpu_deterministic_gradients_are_the_same_bits_100_times():
    """Many more blocks than run at once, which wait for each other."""
    torch = pytest.importorskip("torch")
    if "torch-cuda" not in testing.gpu_libraries():
        pytest.skip("torch sees no GPU")
    q, k, v, dout = (torch.randn(2, 2048, 8, 64, device="cuda") for _ in range(4))
    with dispatch.use_family("simt"):
        out, lse = numbaflash.forward(q, k, v, causal=True, return_lse=True)
        first = numbaflash.backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
        for _ in range(100):
            again = numbaflash.backward(dout, q, k, v, out, lse, causal=True, deterministic=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
def test_gpu_blocks_beyond_the_limit_of_grid_y():
    """70000 heads over the batch: a grid of one axis."""
    run_on_gpu(Case(batch=700, seqlen_q=2, seqlen_k=3, heads=100, kv_heads=50, head_dim=4, head_dim_v=4))
    run_gradients_on_gpu(BackwardCase(batch=1400, seqlen_q=2, seqlen_k=3, heads=100, kv_heads=50, head_dim=4, head_dim_v=4))


@pytest.mark.gpu
def test_gpu_offsets_beyond_32_bits():
    """Batch entries of k and v that lie 2**32 bytes and more apart."""
    torch = pytest.importorskip("torch")
    if "torch-cuda" not in testing.gpu_libraries():
        pytest.skip("torch sees no GPU")
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free device memory")
    q, k, v = (torch.randn(2, 100, 2, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    apart = 2**31 + 2**16  # elements
    memory = torch.empty(apart + 2 * k[0].numel(), device="cuda", dtype=torch.float16)
    far_k, far_v = (memory[start:].as_strided(k.shape, (apart, *k.stride()[1:])) for start in (0, k[0].numel()))
    far_k.copy_(k)
    far_v.copy_(v)
    with dispatch.use_family("simt"):
        assert torch.equal(numbaflash.forward(q, far_k, far_v), numbaflash.forward(q, k, v))
        out, lse = numbaflash.forward(q, k, v, return_lse=True)
        near, far = (numbaflash.backward(out, q, *kv, out, lse, deterministic=True) for kv in ((k, v), (far_k, far_v)))
        assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))
