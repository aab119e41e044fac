"""The gradients: FlashAttention's Algorithm 4 on tiles that stay in cache.

First, every row (a query of one head) gets what it needs of the forward pass: its LSE and delta = dO . O - dLSE. Then a
work item is one tile of keys of one key/value head and its way through the rows of the query heads that share it. Keys
stay, with the sums of dK and dV; queries come by, and dQ is summed in the workspace. Items add to a tile of dQ in the order of
their keys, each waiting for its turn, so the sums do not depend on who runs when.

As in the forward pass, scores are held transposed, [key][row]: LSE and delta of a row stay in one lane. All five products
are then the forward's register tile, with what is broadcast on the left and what fills the lanes on the right:

    S  = K Q^T        dP = V dO^T        a key by a panel of rows
    dV += P dO        dK += dS Q         a key by a panel of the head dim
    dQ^T += K^T dS                       a number of the head dim by a panel of rows

Scores are in units of log2(e), P = 2**(S - lse2), but for kernels whose options want natural units (`scores`). dK and dQ get the scale when they
are done.

The gradients of a bias and of sinks come last.

This is the way through tiles and blocks; the steps are those of `rows`, `loading`, `panels`, `products`, `results` and `bias`.
"""

from __future__ import annotations

from types import SimpleNamespace

from .. import scores as score_options
from ..config import Kernel
from ..convert import COMPUTE
from ..driver import next_item, store_release, wait_until
from ..finite import finite_test
from ..packed import word_of
from ..vector import jit
from . import bias, loading, panels, products, results, rows
from .arguments import addresses_at, arguments_at, keys_of_tile


def build(kernel: Kernel):
    """Numba functions of the gradients for one kernel; nothing is compiled yet.

    Returns
    -------
    namespace
        ``thread(args, addresses, work, counter, phase)`` is the entry, called on each thread in phase 0, when all are done
        with it in phase 1, and then in phase 2 where there is one; all but the phase are addresses.
    """
    compute, panel = COMPUTE[kernel.dtype], kernel.panel
    itemsize = compute.bitwidth // 8
    panel_bytes = panel * itemsize
    all_finite = finite_test(compute, kernel.lanes)
    options = score_options.build(kernel, with_slopes=True)
    entry_of, has_sinks, has_bias = options.entry_of, options.has_sinks, options.has_bias
    packed = "packed" in kernel.options

    of_rows, of_panels, of_results = rows.build(kernel, options), panels.build(kernel, options), results.build(kernel)
    of_loading, of_products = loading.build(kernel, options), products.build(kernel, options)
    tile_of, prepare_rows, add_sink_terms = of_rows.tile_of, of_rows.prepare_rows, of_rows.add_sink_terms
    list_packed_rows, load_keys, load_rows = of_loading.list_packed_rows, of_loading.load_keys, of_loading.load_rows
    differentiate_panel = of_panels.differentiate_panel
    add_to_keys, add_to_queries = of_products.add_to_keys, of_products.add_to_queries
    clear, store_key_gradients, store_query_gradients = of_results.clear, of_results.store_key_gradients, of_results.store_query_gradients
    of_bias = bias.build(kernel, options, of_loading, of_panels.differentiate_bias_panel, clear)
    bias_parts, differentiate_bias = of_bias.bias_parts, of_bias.differentiate_bias

    @jit
    def place_of(args, at, item):
        """(batch entry, key/value head, tile of keys) of a work item."""
        if packed:
            row, kv_head = args.row_tiles + item // args.kv_heads, item % args.kv_heads
            return word_of(at.cu_seqlens_k, row, 2, 0), kv_head, word_of(at.cu_seqlens_k, row, 2, 1)
        heads = args.batch * args.kv_heads
        kv_tile, head = item // heads, item % heads
        return head // args.kv_heads, head % args.kv_heads, kv_tile

    @jit
    def differentiate(args, at, item, work):
        """Algorithm 4 for a tile of keys: dK and dV from all rows that see it, and what it adds to their dQ."""
        batch, kv_head, kv_tile = place_of(args, at, item)
        entry = entry_of(args, at, batch)
        tile_first = kv_tile * args.kv_tile
        tile_last = min(entry[4], tile_first + args.kv_tile)
        n_keys = tile_last - tile_first
        load_keys(args, at, entry, batch, kv_head, tile_first, tile_last, work)
        keys_finite = all_finite(work + args.at_keys, args.key_stride, 0, n_keys, args.head_dim)
        in_blocks = (n_keys + args.kv_block - 1) // args.kv_block * args.kv_block
        clear(work + args.at_dkeys, in_blocks * args.key_stride)
        clear(work + args.at_dvalues, in_blocks * args.value_stride)
        n_rows = entry[3] * args.group
        for q_tile in range((n_rows + args.q_tile - 1) // args.q_tile):
            first, last = keys_of_tile(args, entry, q_tile)
            if max(first, tile_first) < min(last, tile_last):
                tile, first_row = tile_of(args, entry, batch, kv_head, q_tile), q_tile * args.q_tile
                n_panels = (min(args.q_tile, n_rows - first_row) + panel - 1) // panel
                lse2 = at.workspace + args.at_lse2 + tile * args.q_tile * itemsize
                delta = at.workspace + args.at_delta + tile * args.q_tile * itemsize
                dq_sum = at.workspace + args.at_dq_sum + tile * args.q_tile * args.key_columns * itemsize
                turn = at.workspace + args.at_turns + tile * 8
                rows_finite = load_rows(args, at, entry, batch, kv_head, first_row, n_panels, lse2, work)
                if args.needs_q:
                    wait_until(turn, kv_tile)
                    if kv_tile == first // args.kv_tile:
                        clear(dq_sum, n_panels * args.key_columns * panel_bytes)
                for block in range(tile_first, tile_last, args.kv_block):
                    if max(first, block) < min(last, block + args.kv_block):
                        n_block = min(args.kv_block, tile_last - block)
                        in_tile = block - tile_first
                        differentiate_block(args, at, batch, block, n_block, in_tile, n_panels, lse2, delta, dq_sum, rows_finite, keys_finite, work)
                if args.needs_q:
                    if kv_tile == (last - 1) // args.kv_tile:
                        store_query_gradients(args, at, entry, batch, kv_head, first_row, n_panels, dq_sum, work)
                    store_release(turn, kv_tile + 1)
        store_key_gradients(args, at, entry, batch, kv_head, tile_first, tile_last, work)

    @jit
    def differentiate_block(args, at, batch, block, n_keys, in_tile, n_panels, lse2, delta, dq_sum, rows_finite, keys_finite, work):
        """One block of keys, at ``in_tile`` of the packed tile, and one tile of rows: all that they add to the gradients."""
        keys, values = work + args.at_keys + in_tile * args.key_stride, work + args.at_values + in_tile * args.value_stride
        masked = False
        for p in range(n_panels):
            masked |= differentiate_panel(args, at, batch, block, p, keys, values, n_keys, lse2, delta, work)
        add_to_keys(args, block, n_keys, in_tile, n_panels, masked and not rows_finite, work)
        if args.needs_q:
            add_to_queries(args, keys, block, n_keys, n_panels, dq_sum, masked and not keys_finite, work)

    def thread(args_address, addresses_address, work, counter, phase):
        """Take work items until there are none."""
        args, at = arguments_at(args_address), addresses_at(addresses_address)
        heads = args.batch * args.kv_heads
        row_items, key_items = heads * args.q_tiles, heads * args.kv_tiles
        if packed:
            row_items, key_items = args.kv_heads * args.row_tiles, args.kv_heads * args.key_tiles
        item = next_item(counter)
        if phase == 0:
            while item < row_items:
                prepare_rows(args, at, item)
                item = next_item(counter)
        elif phase == 1:
            list_packed_rows(args, work)
            items = key_items if args.needs_q | args.needs_k | args.needs_v else 0
            while item < items:
                differentiate(args, at, item, work)
                item = next_item(counter)
        else:
            n_sinks = args.kv_heads * args.group if args.needs_sinks else 0
            if has_sinks:
                while item < n_sinks:
                    add_sink_terms(args, at, item)
                    item = next_item(counter)
            if has_bias:
                list_packed_rows(args, work)
                while item - n_sinks < bias_parts(args):
                    differentiate_bias(args, at, item - n_sinks, work)
                    item = next_item(counter)

    return SimpleNamespace(thread=thread)
