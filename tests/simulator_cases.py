"""Cases for the simt kernels in Numba's CUDA simulator: ``python tests/simulator_cases.py`` prints a JSON line for each.

A process of its own, because numba decides for the simulator when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from unittest import mock

SMALL = {"seqlen_q": 19, "seqlen_k": 23, "head_dim": 8, "head_dim_v": 8}
SCORES = (2, 2, 19, 23)
EVERYTHING = {
    "batch": 2,
    "heads": 2,
    "causal": True,
    "softcap": 3.0,
    "mask_shape": (19, 23),
    "bias_shape": (2, 1, 23),
    "alibi_shape": (2,),
    "with_sinks": True,
    "dropout": 0.3,
    "dropout_seed": 2**63 + 12345,
    "lengths_q": "random",
    "lengths_k": "random",
    "hidden": "nan",
}
"""A case with every option."""


def option_cases(base, strided):
    """Named cases for what options do, forward and backward."""
    wide = replace(base, batch=2, heads=2)
    named = {
        "mask": replace(wide, mask_shape=SCORES),
        "mask, rows without a key, hidden NaN": replace(wide, mask_shape=(2, 1, 19, 23), mask_values="rows", hidden="nan", causal=True),
        "mask, blocks without a key": replace(base, seqlen_q=70, seqlen_k=70, mask_shape=(70, 70), mask_values="blocks", hidden="nan"),
        "mask of keys, hidden infinities": replace(wide, mask_shape=(2, 1, 1, 23), hidden="inf"),
        "mask of queries, any strides": replace(wide, mask_shape=(2, 2, 19, 1), mask=strided),
        "mask, NaN among what is seen": replace(wide, mask_shape=(19, 23), values="nan", hidden="nan"),
        "block mask": replace(wide, mask_shape=SCORES, as_blocks=True, hidden="nan"),
        "block mask, documents, causal": replace(
            base, seqlen_q=70, seqlen_k=130, mask_shape=(70, 130), mask_values="documents", as_blocks=True, hidden="nan", causal=True
        ),
        "block mask, window, lengths": replace(
            base, batch=3, seqlen_q=70, seqlen_k=70, mask_shape=(70, 70), mask_values="sliding", as_blocks=True, lengths_k="random", causal=True
        ),
        "block mask and every option": replace(base, **EVERYTHING, as_blocks=True),
        "lengths": replace(base, batch=3, lengths_q="random", lengths_k="random", hidden="nan"),
        "lengths at the edges, causal, int64": replace(
            base, batch=6, lengths_q="edges", lengths_k="edges", lengths_dtype="int64", causal=True, hidden="nan"
        ),
        "lengths, window": replace(base, batch=4, lengths_q="random", lengths_k="random", window=(3, 2), hidden="inf"),
        "lengths, top left": replace(base, batch=4, lengths_q="edges", lengths_k="random", causal="top_left", hidden="nan"),
        "lengths of keys": replace(base, batch=4, lengths_k="edges", hidden="nan"),
        "lengths of queries, more queries than keys": replace(base, batch=4, seqlen_q=30, seqlen_k=11, lengths_q="random", causal=True, hidden="nan"),
        "bias": replace(wide, bias_shape=SCORES),
        "bias of keys": replace(wide, bias_shape=(2, 1, 1, 23)),
        "bias of queries": replace(wide, bias_shape=(19, 1), causal=True, hidden="nan"),
        "bias of heads": replace(wide, bias_shape=(2, 1, 1)),
        "bias, any strides": replace(wide, bias_shape=SCORES, bias=strided),
        "bias of lowest numbers": replace(wide, bias_shape=(2, 19, 23), bias_values="lowest"),
        "bias of lowest float32, float16": replace(wide, dtype="float16", bias_shape=(2, 19, 23), bias_values="lowest", bias_dtype="float32"),
        "bias of -inf, hidden NaN": replace(wide, bias_shape=(2, 19, 1), bias_values="infinite", hidden="nan", values="nan"),
        "bias in bfloat16, float64": replace(wide, dtype="float64", bias_shape=(19, 23), bias_dtype="bfloat16"),
        "alibi": replace(wide, alibi_shape=(2, 2)),
        "alibi, lengths": replace(wide, alibi_shape=(2,), lengths_q="random", lengths_k="random", hidden="nan"),
        "alibi, top left, float64": replace(wide, dtype="float64", alibi_shape=(2,), causal="top_left"),
        "softcap": replace(base, softcap=0.25),
        "softcap, float64": replace(base, softcap=0.25, dtype="float64"),
        "softcap, bfloat16, scale 0": replace(base, softcap=2.0, dtype="bfloat16", scale=0.0),
        "sinks": replace(wide, with_sinks=True),
        "sinks, rows without keys": replace(wide, with_sinks=True, seqlen_q=30, seqlen_k=11, causal=True, lengths_q="edges", batch=4, hidden="nan"),
        "sinks, no keys": replace(wide, with_sinks=True, seqlen_k=0),
        "dropout": replace(wide, dropout=0.3, dropout_seed=7),
        "dropout, many tiles": replace(base, dropout=0.9, seqlen_q=40, seqlen_k=70, dropout_seed=2**64 - 1),
        "dropout, hidden NaN": replace(wide, dropout=0.5, mask_shape=(19, 23), values="nan", hidden="nan"),
    }
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        named[f"every option, {dtype}"] = replace(base, dtype=dtype, **EVERYTHING)
    return {f"option: {name}": case for name, case in named.items()}


def cases():
    """Named cases, each for one thing that the kernel does."""
    from numbaflash.testing import Case, Placement

    base = Case(**SMALL)
    strided = {"order": (0, 2, 1, 3), "step": (1, -1, 2, 1)}
    named = {
        "contiguous": base,
        "float64": replace(base, dtype="float64"),
        "float16": replace(base, dtype="float16"),
        "bfloat16": replace(base, dtype="bfloat16"),
        "odd head dims": replace(base, head_dim=7, head_dim_v=33),
        "odd head dims, float64": replace(base, dtype="float64", head_dim=17, head_dim_v=3),
        "odd head dims, bfloat16": replace(base, dtype="bfloat16", head_dim=33, head_dim_v=9),
        "largest head dims": replace(base, seqlen_q=3, seqlen_k=10, head_dim=256, head_dim_v=256),
        "grouped heads, batch": replace(base, batch=2, heads=4, kv_heads=2),
        "causal": replace(base, causal=True),
        "causal, top left": replace(base, causal="top_left"),
        "more queries than keys": replace(base, seqlen_q=30, seqlen_k=11, causal=True),
        "window": replace(base, window=(3, 2)),
        "left window": replace(base, seqlen_k=40, window=(5, None)),
        "hidden NaN in shared tiles": replace(base, seqlen_q=9, seqlen_k=40, window=(2, 1), hidden="nan"),
        "hidden infinities, causal": replace(base, seqlen_q=20, seqlen_k=20, causal="top_left", window=(4, 0), hidden="inf"),
        "NaN among what is seen": replace(base, values="nan", causal=True, seed=1),
        "big scores": replace(base, values="big", scale=-3.0),
        "scale 0": replace(base, scale=0.0),
        "no keys": replace(base, seqlen_k=0),
        "one query": replace(base, seqlen_q=1),
        "no lse": replace(base, return_lse=False),
        "any strides": replace(base, heads=2, kv_heads=2, **{name: Placement(**strided) for name in ("q", "k", "v", "out")}),
        "broadcast keys": replace(base, heads=2, kv_heads=2, k=Placement(step=(1, 1, 0, 1)), v=Placement(step=(1, 1, 0, 1))),
    }
    return named | option_cases(base, Placement(**strided))


def backward_cases():
    """The same for the gradients."""
    from numbaflash.testing import BackwardCase, Placement

    base = BackwardCase(**SMALL)
    strided = Placement(order=(0, 2, 1, 3), step=(1, -1, 2, 1))
    named = {
        "contiguous": base,
        "deterministic": replace(base, deterministic=True),
        "gradient of the LSE": replace(base, with_dlse=True),
        "float64": replace(base, dtype="float64", with_dlse=True),
        "float16": replace(base, dtype="float16", with_dlse=True),
        "bfloat16": replace(base, dtype="bfloat16"),
        "odd head dims": replace(base, head_dim=7, head_dim_v=33),
        "odd head dims, float64": replace(base, dtype="float64", head_dim=17, head_dim_v=3),
        "odd head dims, bfloat16": replace(base, dtype="bfloat16", head_dim=33, head_dim_v=9),
        "largest head dims": replace(base, seqlen_q=3, seqlen_k=10, head_dim=256, head_dim_v=256),
        "grouped heads, batch, deterministic": replace(base, batch=2, heads=4, kv_heads=2, deterministic=True),
        "causal": replace(base, causal=True),
        "causal, top left, deterministic": replace(base, causal="top_left", deterministic=True),
        "more queries than keys": replace(base, seqlen_q=30, seqlen_k=11, causal=True),
        "window": replace(base, window=(3, 2)),
        "causal, grouped heads, deterministic": replace(base, seqlen_q=26, seqlen_k=26, causal=True, heads=3, deterministic=True),
        "left window, deterministic": replace(base, seqlen_k=40, window=(5, None), deterministic=True),
        "hidden NaN, causal, deterministic": replace(base, seqlen_q=26, seqlen_k=20, causal=True, hidden="nan", deterministic=True),
        "narrow window, grouped heads, deterministic": replace(base, seqlen_q=40, seqlen_k=40, window=(2, 0), heads=2, deterministic=True),
        "hidden NaN in shared tiles": replace(base, seqlen_q=9, seqlen_k=40, window=(2, 1), hidden="nan", with_dlse=True),
        "hidden NaN, rows without keys": replace(base, seqlen_q=30, seqlen_k=11, causal=True, hidden="nan"),
        "hidden infinities, causal": replace(base, seqlen_q=20, seqlen_k=20, causal="top_left", window=(4, 0), hidden="inf"),
        "NaN among what is seen": replace(base, values="nan", causal=True, seed=1),
        "big scores": replace(base, values="big", scale=-3.0),
        "scale 0": replace(base, scale=0.0),
        "no keys": replace(base, seqlen_k=0),
        "one query": replace(base, seqlen_q=1),
        "one key": replace(base, seqlen_k=1, deterministic=True),
        "any strides": replace(base, heads=2, kv_heads=2, with_dlse=True, **dict.fromkeys(("dout", "q", "k", "v", "out", "dq", "dk", "dv"), strided)),
        "broadcast dout": replace(base, dout=Placement(step=(0, 0, 0, 0))),
    }
    for needs in (("q",), ("k",), ("v",), ("q", "v"), ("k", "v")):
        named[f"gradient of {', '.join(needs)} alone"] = replace(base, needs=needs, causal=True, deterministic=True)
    for n, (name, case) in enumerate(option_cases(base, strided).items()):
        gradients = (*(("bias",) if case.bias_shape else ()), *(("sinks",) if case.with_sinks else ()))
        named[name] = replace(case, needs=("q", "k", "v", *gradients), deterministic=n % 2 == 0, with_dlse=n % 3 == 0)
    for needs in (("bias",), ("sinks",), ("q",), ("v", "bias")):
        named[f"option: every option, gradient of {', '.join(needs)} alone"] = replace(base, **EVERYTHING, needs=needs)
    return named


def check_lists(case, q_size, k_size, heads, of_keys, descending):
    """Make the lists of a case's tiles, and compare them, and the turns of tiles of keys, with the definition."""
    import numpy as np

    from numbaflash import BlockMask, reference
    from numbaflash.dispatch import Layout
    from numbaflash.kernels.blocks import layout
    from numbaflash.kernels.blocks.launch import Lists
    from numbaflash.toolchain import simulator

    memory, problem = case.memory(), case.problem
    given = case.given_options(memory)
    arrays = {name: memory[name].view() for name in case.option_arrays}
    if case.as_blocks:
        mask = arrays.pop("mask").astype(bool)
        arrays["block_mask"] = BlockMask.from_mask(mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k).words
    layouts = dict.fromkeys(("mask", "block_mask", "seqlens_q", "seqlens_k"))
    for name, x in arrays.items():
        own = (1,) * (len(problem.shape_of(name)) - x.ndim) + x.shape
        strides = (0,) * (len(own) - x.ndim) + x.strides
        layouts[name] = Layout(own, tuple(0 if n == 1 else step for n, step in zip(own, strides, strict=True)), 1)
    lists = Lists(problem, problem, q_size, k_size, heads, of_keys=of_keys, descending=descending, ranked=of_keys, last_first=descending)
    workspace = np.full(lists.end // 4, -7, np.int32)
    names = (*arrays, "workspace")
    for request, parameters, blocks, threads in lists.launches(type("Layouts", (), layouts), (9, 0), True):
        run = simulator.prepare(request, parameters, grid=(blocks,), threads=threads, operands=names)
        run(tuple(x.ctypes.data for x in (*arrays.values(), workspace)), 0)
    found = workspace[lists.lists_at // 4 :][: lists.entries * lists.columns * lists.tiles * lists.words].reshape(-1, lists.tiles, lists.words)
    ranks = workspace[lists.ranks_at // 4 :][: found.shape[0] * lists.k_blocks * lists.q_blocks] if of_keys else None
    dense = reference.check_options(problem, given)["block_mask" if case.as_blocks else "mask"]
    dense = np.broadcast_to(dense, (*dense.shape[:2], case.seqlen_q, case.seqlen_k))
    others = {name: x for name, x in given.items() if name not in ("mask", "block_mask")}
    banded = [reference.visible(replace(problem, mask=None, block_mask=None), batch, 0, **others) for batch in range(problem.batch)]
    shared = (problem.mask or problem.block_mask)[1] == 1
    for number in range(found.shape[0]):
        batch, column = divmod(number, lists.columns)
        group = [0] if shared else range(column * heads, (column + 1) * heads)
        seen = [reference.visible(problem, batch, head, **given) for head in group]
        rank = np.zeros(lists.q_blocks, int)
        for tile in range(lists.tiles)[:: -1 if descending and of_keys else 1]:
            at = layout.LIST_START
            count = found[number, tile, 0]
            entries = found[number, tile, at : at + count]
            assert (found[number, tile, [at - 1, at + count, at + count + 1]] == -1).all()
            assert (np.diff(entries // 2) < 0).all() if descending else (np.diff(entries // 2) > 0).all()
            partial = dict(zip(entries // 2, entries % 2, strict=True))
            for block in range(lists.q_blocks if of_keys else lists.k_blocks):
                m, n = (block, tile) if of_keys else (tile, block)
                part = [each[m * q_size : (m + 1) * q_size, n * k_size : (n + 1) * k_size] for each in seen]
                some = any(each.any() for each in part)
                length_q = reference.lengths(problem, batch, **given)[0]
                every = all(each[: max(0, length_q - m * q_size)].all() and each.shape[1] == k_size for each in part)
                assert block in partial or not some, "what is seen must be listed"
                assert not (block in partial and partial[block] == 0) or every, "a block of which something is hidden must be partial"
                if of_keys and problem.seqlens_q and (m + 1) * q_size > length_q:
                    assert partial.get(block) != 0, "gradients look for padding of queries in partial blocks only"
                around = tuple(slice(i * size // 64 * 64, -(-(i + 1) * size // 64) * 64) for i, size in ((m, q_size), (n, k_size)))
                near = any(dense[batch % len(dense), head % dense.shape[1]][around].any() for head in group)
                in_band = banded[batch][m * q_size : (m + 1) * q_size, n * k_size : (n + 1) * k_size].any()
                assert block not in partial or (near and in_band), "blocks of nothing must be left out"
                if of_keys and block in partial:
                    assert ranks.reshape(found.shape[0], lists.k_blocks, -1)[number, tile, block] == rank[block]
                    rank[block] += 1


def list_cases():
    """Cases of `check_lists`."""
    from numbaflash.testing import Case, Placement

    base = Case(batch=2, heads=4, kv_heads=2, seqlen_q=150, seqlen_k=210, head_dim=8, head_dim_v=8)
    full = (2, 4, 150, 210)
    cases = {
        "documents": replace(base, mask_shape=(150, 210), mask_values="documents"),
        "documents, in fours": replace(base, seqlen_k=212, mask_shape=(1, 1, 150, 212), mask_values="documents"),
        "none": replace(base, mask_shape=(2, 1, 150, 210), mask_values="none"),
        "of every head, causal": replace(base, mask_shape=full, mask_values="sliding", causal=True),
        "of keys": replace(base, mask_shape=(2, 1, 1, 210), mask_values="blocks"),
        "of queries, strided": replace(base, mask_shape=(150, 1), mask=Placement(step=(-1, 2)), window=(70, 3)),
        "lengths": replace(base, mask_shape=(150, 210), mask_values="documents", lengths_q="random", lengths_k="random", causal=True),
        "block mask": replace(base, mask_shape=full, mask_values="sliding", as_blocks=True, window=(100, 20)),
        "block mask, lengths": replace(base, mask_shape=(150, 210), mask_values="documents", as_blocks=True, lengths_k="edges"),
    }
    tiles = ((64, 128, 1, False, True), (32, 64, 2, False, True), (64, 128, 2, True, False), (64, 64, 2, True, True))
    return {f"{name}, {tile}": (case, *tile) for name, case in cases.items() for tile in tiles}


def turn_cases():
    """Cases whose blocks add to dq in turn, each with the queries and keys of a tile. No two have the same lengths, so each is planned anew."""
    from numbaflash.testing import BackwardCase

    base = BackwardCase(heads=2, kv_heads=1, head_dim=8, head_dim_v=8, deterministic=True)
    return {
        "no band": (replace(base, seqlen_q=10, seqlen_k=18), 8, 8),
        "causal": (replace(base, seqlen_q=25, seqlen_k=25, causal=True), 8, 8),
        "causal, batch": (replace(base, batch=2, heads=4, kv_heads=2, seqlen_q=12, seqlen_k=13, causal=True), 8, 8),
        "causal, wide tiles of queries": (replace(base, seqlen_q=26, seqlen_k=20, causal=True), 16, 8),
        "causal, wide tiles of keys": (replace(base, seqlen_q=20, seqlen_k=26, causal=True), 8, 16),
        "causal, top left, more keys than queries": (replace(base, seqlen_q=9, seqlen_k=27, causal="top_left"), 16, 8),
        "causal, more queries than keys": (replace(base, seqlen_q=28, seqlen_k=14, causal=True), 8, 8),
        "window": (replace(base, seqlen_q=29, seqlen_k=31, window=(9, 5)), 8, 8),
        "window, wide tiles of keys": (replace(base, seqlen_q=30, seqlen_k=33, window=(3, 0)), 8, 16),
        "left window": (replace(base, seqlen_q=19, seqlen_k=21, window=(6, None)), 8, 8),
    }


def defined_steps(problem, q_tile, kv_tile):
    """Steps (tile of keys, turn, number) of each key/value head over the batch: its blocks in their order, each with its walk.

    A turn is how many blocks of smaller keys see the tile of queries; a number counts tiles of queries over all heads.
    """
    from numbaflash import reference

    seen, group = reference.visible(problem), range(problem.group)
    q_tiles, kv_tiles = -(-problem.seqlen_q // q_tile), -(-problem.seqlen_k // kv_tile)
    sees = [[seen[m * q_tile :, n * kv_tile :][:q_tile, :kv_tile].any() for m in range(q_tiles)] for n in range(kv_tiles)]
    columns = []
    for column in range(problem.batch * problem.kv_heads):
        steps = []
        for n, tiles in enumerate(sees):
            up = [m for m in range(q_tiles) if tiles[m]]
            walk = [(m, h) for h in group for m in up]
            if problem.left is not None or problem.right is not None:
                walk = [(m, h) for m in reversed(up) for h in group]
            steps += [(n, sum(before[m] for before in sees[:n]), (column * problem.group + h) * q_tiles + m) for m, h in walk]
        columns.append(steps)
    return columns


def check_turns(case, q_tile, kv_tile):
    """Run a case, and compare the tiles of queries that blocks come to, and how many blocks they wait for there, with the definition."""
    from numbaflash import testing
    from numbaflash.kernels.simt.backward import config, tiles, walk

    steps, turn, add_sums = [], walk.turn, tiles.add_sums

    def watched_turn(config):
        turn_of = turn(config)

        def watched(kv_block, first_q, band_first):
            steps.append((int(kv_block), int(turn_of(kv_block, first_q, band_first))))
            return steps[-1][1]

        return watched

    def watched_add(config):
        add = add_sums(config)

        def watched(sums, number, thread, dq):
            if thread == 0:
                steps[-1] += (int(number),)
            add(sums, number, thread, dq)

        return watched

    tile = replace(config._SIMULATOR_TILE, q_tile=q_tile, kv_tile=kv_tile)
    with (
        mock.patch.object(config, "_SIMULATOR_TILE", tile),
        mock.patch.object(walk, "turn", watched_turn),
        mock.patch.object(tiles, "add_sums", watched_add),
    ):
        testing.run_backward_case(case, "simt", "numpy")
    half, of_head = len(steps) // 2, -(-case.seqlen_q // q_tile) * case.problem.group
    if steps[:half] != steps[half:]:
        raise AssertionError("the second of two calls goes another way")
    for column, defined in enumerate(defined_steps(case.problem, q_tile, kv_tile)):
        found = [step for step in steps[:half] if step[2] // of_head == column]
        if found != defined or not found:
            raise AssertionError(f"key/value head {column}: (keys, turn, number) are {found}, but should be {defined}")


def decode_cases():
    """Named cases of caches, some of those of all families and some of what is special here: tiles have 8 rows and 8 keys."""
    from decode_cases import CASES, DecodeCase

    small = {"heads": 4, "kv_heads": 2, "head_dim": 8, "head_dim_v": 8}
    every = {"options": {"causal": True, "window": (9, None), "softcap": 3.0}, "with_sinks": True, "alibi_per_batch": True}
    named = {name: case for name, case in CASES.items() if name not in LONG_DECODE}
    for size in (None, 1, 7, 8, 24):
        named[f"heads as rows, pages of {size}"] = DecodeCase((70, 0, 33, 8), size, **small, **every, num_splits=3)
        named[f"queries as rows, pages of {size}"] = DecodeCase((70, 0, 33, 8), size, seqlen_q=11, **small, **every, num_splits=2)
    for dtype in ("float16", "bfloat16", "float64"):
        named[f"every option, {dtype}"] = DecodeCase((40, 0, 3), 7, **small, **every, dtype=dtype, lengths_dtype="int64", num_splits=2)
    named["more heads than rows of a tile"] = DecodeCase((40, 3), 16, **small | {"heads": 13, "kv_heads": 1}, with_sinks=True, alibi_per_batch=False)
    named["every sequence empty, in parts"] = DecodeCase((0, -5), 4, spare=9, **small, with_sinks=True, num_splits=4)
    named["more parts than the merge adds at once"] = DecodeCase((400, 9), 8, **small, with_sinks=True, num_splits=45)
    return named


LONG_DECODE = ("pages of 100", "pages of 256", "many queries", "many queries, contiguous", "parts without keys", "bfloat16, latent")
"""Cases that would take long in the simulator, and of whose kind there are others."""

SAME_BITS = ("heads as rows, pages of 7", "queries as rows, pages of None", "every option, bfloat16", "more parts than the merge adds at once")
"""Cases whose results are compared bit for bit, too."""


def check_decode(case):
    """Run a case twice, and once more with other things where nobody looks: the same bits."""
    results = [each.run("simt") for each in (case, case, replace(case, hidden=3.0))]
    for again in results[1:]:
        for one, other in zip(results[0], again, strict=True):
            if one.tobytes() != other.tobytes():
                raise AssertionError("other bits")


def main():
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    import packed_cases
    from decode_cases import any_case
    from hypothesis import HealthCheck, given, settings

    from numbaflash import testing
    from numbaflash.dispatch import CPU
    from numbaflash.testing.strategies import FEATURES, PACKED

    options = (*FEATURES, PACKED)
    failed = False
    for name, case in cases().items():
        failed |= report(name, lambda case=case: testing.run_case(case, "simt", "numpy"))

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(testing.problems_for("simt", CPU, max_seqlen=40, work=2**9))
    def drawn(case):
        testing.run_case(case, "simt", "numpy")

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(testing.problems_for("simt", CPU, "backward", max_seqlen=40, work=2**9))
    def backward_drawn(case):
        testing.run_backward_case(case, "simt", "numpy")

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(testing.problems_for("simt", CPU, max_seqlen=40, work=2**9, options=options))
    def options_drawn(case):
        testing.run_case(case, "simt", "numpy")

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(testing.problems_for("simt", CPU, "backward", max_seqlen=40, work=2**9, options=options))
    def backward_options_drawn(case):
        testing.run_backward_case(case, "simt", "numpy")

    @settings(max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(any_case(dims=((8, 8), (17, 3)), most_keys=40, most_queries=5, most_heads=1))
    def decode_drawn(case):
        case.run("simt")

    failed |= report("drawn by Hypothesis", drawn)
    failed |= report("options drawn by Hypothesis", options_drawn)
    for name, case in backward_cases().items():
        failed |= report(f"backward: {name}", lambda case=case: testing.run_backward_case(case, "simt", "numpy"))
    failed |= report("backward: drawn by Hypothesis", backward_drawn)
    failed |= report("backward: options drawn by Hypothesis", backward_options_drawn)
    for name, case in packed_cases.CASES.items():
        failed |= report(f"packed: {name}", lambda case=case: packed_cases.run(case, "simt"))
    for name, case in decode_cases().items():
        check = check_decode if name in SAME_BITS else lambda case: case.run("simt")
        failed |= report(f"decode: {name}", lambda case=case, check=check: check(case))
    failed |= report("decode: drawn by Hypothesis", decode_drawn)
    for name, arguments in list_cases().items():
        failed |= report(f"lists: {name}", lambda arguments=arguments: check_lists(*arguments))
    for name, arguments in turn_cases().items():
        failed |= report(f"turns: {name}", lambda arguments=arguments: check_turns(*arguments))
    return int(failed)


def report(name, check):
    """Run a check and print how it went; whether it failed."""
    try:
        check()
        error = None
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    print(json.dumps({"case": name, "error": error}), flush=True)
    return error is not None


if __name__ == "__main__":
    sys.exit(main())
