"""What happens to the rows of the queries before and after the gradients' products: delta, dq out of the workspace, gradients of sinks."""

from __future__ import annotations

import math

import numba
from numba import cuda, int32

from numbaflash.problem import PACKED
from numbaflash.toolchain import KernelSource

from .. import packed, scores
from . import tiles
from .config import Config


def build_delta(config: Config) -> KernelSource:
    """delta = rowsum(dout * out) - dlse, and zeros in the workspace; a block for each tile of queries of each head.

    The parameters: dout, out, lse, dlse; delta (batch * heads, queries), sums (tiles, elements), turns; q tiles of a head; those of the options.
    """
    t = tiles.Types.of(config)
    dot_rows = tiles.dot_rows(config)
    warp_size, lanes_m, lanes_n = config.warp_size, config.lanes_m, config.lanes_n
    lane_bits = lanes_n.bit_length()
    q_tile, rows_at_once = config.q_tile, config.warps * lanes_m
    threads, sums_of_thread = config.threads, config.sums
    with_dlse, with_dq, ordered = config.with_dlse, config.with_dq, config.ordered
    real, lowest = t.real, -math.inf
    is_packed = config.options.packed
    if is_packed:
        entries, ascends, bisect, entry_of_tile = _searching(config)

    def write_delta(dout, out, lse, dlse, delta, sums, turns, q_tiles, *options):
        tile = int32(cuda.blockIdx.x)
        batch_head, q_block = tile // q_tiles, tile % q_tiles
        heads = int32(dout.shape[2])
        batch, head = batch_head // heads, batch_head % heads
        thread = int32(cuda.threadIdx.x)
        warp, lane = thread // warp_size, thread % warp_size
        lane_m = (lane & 1) | (lane >> lane_bits) << 1
        lane_n = (lane >> 1) & (lanes_n - 1)
        if is_packed:
            ascending = int32(1)
            for entry in range(thread, entries(options), threads):
                ascending &= ascends(entry, dout.shape[1], options)
            ascending = cuda.syncthreads_and(ascending)
            low, high = int32(0), entries(options)
            while high - low > 1:
                low, high = bisect(low, high, q_block, dout.shape[1], options)
            batch, q_block, first_row, queries, _, _, _, _ = entry_of_tile(low, q_block, dout.shape[1], 0, ascending, 1, options)
            dout, out = dout[:, first_row : first_row + queries], out[:, first_row : first_row + queries]
            lse, delta = lse[:, :, first_row : first_row + queries], delta[:, first_row : first_row + queries]
            if with_dlse:
                dlse = dlse[:, :, first_row : first_row + queries]

        for first in range(0, q_tile, rows_at_once):
            row = int32(q_block * q_tile + first + warp * lanes_m + lane_m)
            total = dot_rows(dout, out, batch, row, head, lane_n)
            if lane_n == 0 and first + warp * lanes_m + lane_m < q_tile and row < dout.shape[1]:
                if with_dlse:
                    total -= dlse[batch, head, row]
                # A row that sees nothing has no gradient, whatever dout holds there.
                delta[batch_head, row] = real(0.0) if lse[batch, head, row] == lowest else total

        if with_dq:
            for i in range(sums_of_thread):
                sums[tile, i * threads + thread] = real(0.0)
        if ordered and thread == 0:
            turns[1 + tile] = 0
            if tile == 0:
                turns[0] = 0

    arrays = t.operand, t.operand, t.lse, t.lse, t.delta, t.sums, t.turns
    signature = numba.types.void(*arrays, numba.types.int32, scores.option_types(config))
    return KernelSource(write_delta, signature, threads=threads)


def build_dq(config: Config) -> KernelSource:
    """dq out of the sums in the workspace; a block for each tile of queries of each head.

    The parameters: dq, sums, the factor of the sums, q tiles of a head; those of the options.
    """
    t = tiles.Types.of(config)
    load_sums, store_rows = tiles.load_sums(config), tiles.store_rows(config, config.dq, 1)
    place, q_tile, threads = tiles.place(config, config.dq, 1, config.vector), config.q_tile, config.threads
    is_packed = config.options.packed
    if is_packed:
        entries, ascends, bisect, entry_of_tile = _searching(config)

    def write_dq(dq, sums, factor, q_tiles, *options):
        tile = int32(cuda.blockIdx.x)
        batch_head, q_block = tile // q_tiles, tile % q_tiles
        heads = int32(dq.shape[2])
        batch, head = batch_head // heads, batch_head % heads
        thread = int32(cuda.threadIdx.x)
        if is_packed:
            ascending = int32(1)
            for entry in range(thread, entries(options), threads):
                ascending &= ascends(entry, dq.shape[1], options)
            ascending = cuda.syncthreads_and(ascending)
            low, high = int32(0), entries(options)
            while high - low > 1:
                low, high = bisect(low, high, q_block, dq.shape[1], options)
            batch, q_block, first_row, queries, _, _, _, _ = entry_of_tile(low, q_block, dq.shape[1], 0, ascending, 1, options)
            dq = dq[:, first_row : first_row + queries]
        query, column, _, _ = place(thread)
        store_rows(dq, batch, q_block * q_tile + query, head, column, load_sums(sums, tile, thread), factor)

    signature = numba.types.void(t.operand, t.sums, t.real, numba.types.int32, scores.option_types(config))
    return KernelSource(write_dq, signature, threads=threads)


def _searching(config):
    """What finds the sequence of a tile of queries."""
    name = PACKED[0]
    finding = packed.bisect(config, name, config.q_tile), packed.entry_of_tile(config, *PACKED, config.q_tile, config.q_tile)
    return packed.entries(config), packed.ascends(config, name), *finding


def build_dsinks(config: Config) -> KernelSource:
    """The gradients of the sinks, of which each query gives ``-exp(sink - lse) * delta``; a block for each head, always in the same order.

    The parameters: dsinks, lse, delta; those of the options.
    """
    t = tiles.Types.of(config)
    of_sink, lengths, with_lengths = scores.of_sink(config), scores.lengths(config), config.options.lengths
    threads, real, is_packed = config.threads, t.real, config.options.packed
    if is_packed:
        entries, ascends, span = packed.entries(config), packed.ascends(config, PACKED[0]), packed.span(config, PACKED[0])

    def write_dsinks(dsinks, lse, delta, *options):
        head, thread = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        sums = cuda.shared.array(0, real)  # an element a thread
        total = real(0.0)
        batches = int32(lse.shape[0])
        if is_packed:  # all sequences are rows of one batch entry
            ascending = int32(1)
            for entry in range(thread, entries(options), threads):
                ascending &= ascends(entry, lse.shape[2], options)
            batches = int32(cuda.syncthreads_and(ascending))
            first_row, end_row = span(lse.shape[2], options)
            lse, delta = lse[:, :, first_row:end_row], delta[:, first_row:end_row]
        for batch in range(batches):
            seqlen_q = int32(lse.shape[2])
            if with_lengths:
                seqlen_q, _ = lengths(seqlen_q, seqlen_q, batch, options)
            batch_head = int32(batch * int32(lse.shape[1]) + head)
            for row in range(thread, seqlen_q, threads):
                total += of_sink(delta[batch_head, row], lse[batch, head, row], head, options)
        sums[thread] = total
        cuda.syncthreads()
        width = threads // 2
        while width > 0:
            if thread < width:
                sums[thread] += sums[thread + width]
            cuda.syncthreads()
            width = width // 2
        if thread == 0:
            dsinks[head] = -sums[0]

    arrays = numba.types.Array(t.real, 1, "A"), t.lse, t.delta
    return KernelSource(write_dsinks, numba.types.void(*arrays, scores.option_types(config)), threads=threads)
