"""The forward pass: FlashAttention's Algorithm 1 on tiles that stay in cache.

A work item is one tile of queries of one key/value head and its way through the keys. The rows of the tile are the
queries of all query heads that share the key/value head, query by query, so that grouped heads read keys and values
once. They are packed transposed, with the scale and log2(e) multiplied in: a panel of ``kernel.panel`` rows lies in the
lanes of a few vectors. The scores of a panel are held transposed too, [key][row]: the running maximum m and sum l of a
row stay in one lane, nothing is ever reduced across lanes, and both products broadcast a number of K or V to all rows.

Everything here is in units of log2(e): p = 2**(s - m).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from llvmlite import ir
from numba import carray, from_dtype, njit, types
from numba.extending import intrinsic

from .config import CpuConfig, Kernel, round_up
from .convert import COMPUTE, ITEMSIZE, elements
from .exp2 import exp2
from .microkernel import tile_product
from .transpose import transposing
from .vector import Simd, any_lane, fma, maximum, pointer, select

INT64_FIELDS = (
    *("batch", "seqlen_q", "seqlen_k", "kv_heads", "group", "head_dim", "head_dim_v", "offset", "left", "right"),
    *("q_tile", "kv_tile", "splits", "q_blocks", "items", "value_columns"),
    *(f"{operand}_{axis}" for operand in ("q", "k", "v", "out") for axis in ("batch", "row", "head", "dim")),
    *("lse_batch", "lse_head", "lse_row"),
    *("at_queries", "at_output", "at_keys", "at_values", "at_scores", "at_m", "at_l", "at_alpha", "at_first", "at_last", "at_ranges", "at_addresses", "workspace", "partial"),
)
ARGUMENTS = np.dtype([("score_scale", np.float64), *((name, np.int64) for name in INT64_FIELDS)])
"""What a launch tells the kernel beside addresses: sizes, tiles, strides and workspace places, the latter in bytes."""

UNBOUNDED = 2**40
CACHE_LINE = 64


def arguments(problem, layouts, config: CpuConfig) -> np.ndarray:
    """The prepared arguments of a launch, an array of one record."""
    kernel = config.kernel
    result = np.zeros(1, ARGUMENTS)
    args = result[0]
    for name in ("batch", "seqlen_q", "seqlen_k", "kv_heads", "group", "head_dim", "head_dim_v", "offset"):
        args[name] = getattr(problem, name)
    args["left"] = UNBOUNDED if problem.left is None else problem.left
    args["right"] = UNBOUNDED if problem.right is None else problem.right
    args["score_scale"] = problem.scale * np.log2(np.e)
    args["q_tile"], args["kv_tile"], args["splits"] = config.q_tile, config.kv_tile, config.splits
    args["q_blocks"] = -(-problem.seqlen_q * problem.group // config.q_tile)
    args["items"] = args["q_blocks"] * problem.batch * problem.kv_heads * config.splits
    columns = args["value_columns"] = round_up(problem.head_dim_v, kernel.rows)
    for operand in ("q", "k", "v", "out"):
        for axis, stride in zip(("batch", "row", "head", "dim"), getattr(layouts, operand).strides, strict=True):
            args[f"{operand}_{axis}"] = stride
    if layouts.lse is not None:
        args["lse_batch"], args["lse_head"], args["lse_row"] = layouts.lse.strides
    itemsize = COMPUTE[problem.dtype].bitwidth // 8
    end = 0
    for name, size in (
        ("queries", config.q_tile * problem.head_dim * itemsize),
        ("keys", config.kv_tile * problem.head_dim * itemsize),
        ("scores", config.kv_tile * kernel.panel * itemsize),
        ("values", config.kv_tile * int(columns) * itemsize),
        ("output", config.q_tile * int(columns) * itemsize),
        ("m", config.q_tile * itemsize),
        ("l", config.q_tile * itemsize),
        ("alpha", kernel.panel * itemsize),
        ("first", config.q_tile * 4),
        ("last", config.q_tile * 4),
        ("ranges", config.q_tile // kernel.panel * 4 * 8),
        ("addresses", kernel.panel * 8),
    ):
        args[f"at_{name}"] = end
        end += round_up(size, CACHE_LINE)
    args["workspace"] = end
    args["partial"] = round_up(config.q_tile * (int(columns) + 2) * itemsize, CACHE_LINE)
    return result


def pointer_to(dtype):
    """Intrinsic that makes a typed pointer, for `numba.carray`, of an address."""

    @intrinsic
    def as_pointer(typingctx, address):
        def codegen(context, builder, sig, args):
            return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

        return types.CPointer(dtype)(types.int64), codegen

    return as_pointer


as_pointer_to_int32, as_pointer_to_int64 = pointer_to(types.int32), pointer_to(types.int64)
as_pointer_to_arguments = pointer_to(from_dtype(ARGUMENTS))


@intrinsic
def next_item(typingctx, counter):
    """Take a number from a counter that threads share."""

    def codegen(context, builder, sig, args):
        place = pointer(builder, args[0], ir.IntType(64))
        return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.int64), codegen


def build(kernel: Kernel):
    """Numba functions of the forward pass for one kernel; nothing is compiled yet.

    Returns
    -------
    namespace
        ``run`` is the entry: ``run(args, q, k, v, out, lse, threads)`` with `ARGUMENTS` and addresses. The others are
        its steps.
    """
    compute = COMPUTE[kernel.dtype]
    itemsize, stored_size = compute.bitwidth // 8, ITEMSIZE[kernel.dtype]
    lanes, rows, panel, vectors = kernel.lanes, kernel.rows, kernel.panel, kernel.vectors
    vector_bytes, panel_bytes = lanes * itemsize, kernel.panel * itemsize
    simd, index_simd = Simd(compute, lanes), Simd(types.int32, lanes)
    load, store, splat = simd.load, simd.store, simd.splat
    load_number, store_number = elements("float64" if compute == types.float64 else "float32")
    load_element, store_element = elements(kernel.dtype)
    load_elements, _ = elements(kernel.dtype, lanes)
    load_rows, store_rows = transposing(kernel.dtype, lanes)
    lse_dtype = "float64" if compute == types.float64 else "float32"
    _, store_lse = elements(lse_dtype)
    load_index, splat_index = index_simd.load, index_simd.splat
    product, accumulate = tile_product(compute, rows, vectors, lanes)
    number = np.float64 if compute == types.float64 else np.float32
    minus_inf = number(-np.inf)
    zero, one, largest = number(0), number(1), number(np.finfo(number).max)
    ln2 = float(np.log(2))
    jit = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)

    # -- packing

    @jit
    def pack(source, row_stride, column_stride, n_rows, n_columns, target, target_columns):
        """Rows of keys or values, converted, each ``target_columns`` long; columns beyond ``n_columns`` are 0."""
        for row in range(n_rows):
            start, end = source + row * row_stride, target + row * target_columns * itemsize
            column = 0
            if column_stride == stored_size:
                while column + lanes <= n_columns:
                    store(end + column * itemsize, load_elements(start + column * stored_size))
                    column += lanes
            while column < n_columns:
                store_number(end + column * itemsize, load_element(start + column * column_stride))
                column += 1
            while column < target_columns:
                store_number(end + column * itemsize, zero)
                column += 1

    @jit
    def list_rows(args, operand, row_stride, head_stride, first_row, addresses):
        """Addresses of the rows of a panel. Lanes past the last row repeat it: they compute and store the same again."""
        n_rows = args.seqlen_q * args.group
        for lane in range(panel):
            row = min(first_row + lane, n_rows - 1)
            query = row // args.group
            addresses[lane] = operand + query * row_stride + (row - query * args.group) * head_stride

    @jit
    def list_bands(args, first_row, first, last):
        """Keys that each row of a panel sees, from ``first[lane]`` until before ``last[lane]``.

        Returns (first key that some row sees, one past the last, first key that all rows see, one past the last).
        """
        some_first, some_last, all_first, all_last = args.seqlen_k, 0, 0, args.seqlen_k
        n_rows = args.seqlen_q * args.group
        for lane in range(panel):
            place = min(first_row + lane, n_rows - 1) // args.group + args.offset
            lo = max(0, place - args.left)
            hi = max(lo, min(args.seqlen_k, place + args.right + 1))
            first[lane], last[lane] = lo, hi
            if lo < hi:
                some_first, some_last = min(some_first, lo), max(some_last, hi)
            all_first, all_last = max(all_first, lo), min(all_last, hi)
        return some_first, some_last, all_first, all_last

    @jit
    def pack_queries(args, addresses, queries):
        """Transpose a panel of queries, in units of log2(e)."""
        factor = number(args.score_scale)
        remainder = number(args.score_scale - np.float64(factor))
        d = 0
        if args.q_dim == stored_size:
            while d + lanes <= args.head_dim:
                for w in range(vectors):
                    rows_of_lanes = np.int64(addresses.ctypes.data) + w * lanes * 8
                    load_rows(rows_of_lanes, d * stored_size, factor, remainder, queries + d * panel_bytes + w * vector_bytes, panel_bytes)
                d += lanes
        while d < args.head_dim:
            for lane in range(panel):
                scaled = np.float64(load_element(addresses[lane] + d * args.q_dim)) * args.score_scale
                store_number(queries + d * panel_bytes + lane * itemsize, number(scaled))
            d += 1

    @jit
    def clear_state(args, m, l, output):
        """m = -inf, l = 0, O = 0, for a panel."""
        for w in range(vectors):
            store(m + w * vector_bytes, splat(minus_inf))
            store(l + w * vector_bytes, splat(zero))
        for i in range(vectors * args.value_columns):
            store(output + i * vector_bytes, splat(zero))

    # -- the steps of one key block and one panel of queries

    @jit
    def compute_scores(args, keys, queries, scores, begin, end):
        """S = K Q, transposed, for keys begin to end of the block."""
        row_bytes = args.head_dim * itemsize
        for key in range(begin, end, rows):
            product(keys + key * row_bytes, row_bytes, itemsize, queries, panel_bytes, scores + key * panel_bytes, panel_bytes, args.head_dim)

    @jit
    def mask_scores(scores, first_key, begin, end, first, last):
        """Scores of keys that a row does not see become -inf."""
        for key in range(begin, end):
            at = splat_index(np.int32(first_key + key))
            for w in range(vectors):
                place = scores + key * panel_bytes + w * vector_bytes
                seen = (load_index(first + w * lanes * 4) <= at) & (at < load_index(last + w * lanes * 4))
                store(place, select(seen, load(place), splat(minus_inf)))

    @jit
    def update_softmax(scores, begin, end, m, l, alpha):
        """The online softmax: scores become probabilities, m and l take them in, alpha is what the past shrinks by."""
        for w in range(vectors):
            column = scores + w * vector_bytes
            m_old = load(m + w * vector_bytes)
            m0, m1, m2, m3 = m_old, m_old, m_old, m_old  # four chains: a maximum takes several cycles
            for key in range(begin, end, 4):
                place = column + key * panel_bytes
                m0 = maximum(load(place), m0)
                m1 = maximum(load(place + panel_bytes), m1)
                m2 = maximum(load(place + 2 * panel_bytes), m2)
                m3 = maximum(load(place + 3 * panel_bytes), m3)
            m_new = maximum(maximum(m0, m1), maximum(m2, m3))
            top = select(m_new == splat(minus_inf), splat(zero), m_new)  # no key so far: -inf - 0, not -inf - -inf
            shrink = exp2(m_old - top)
            block_sum = splat(zero)
            for key in range(begin, end):
                place = column + key * panel_bytes
                probability = exp2(load(place) - top)
                store(place, probability)
                block_sum = block_sum + probability
            store(m + w * vector_bytes, m_new)
            store(l + w * vector_bytes, fma(load(l + w * vector_bytes), shrink, block_sum))
            store(alpha + w * vector_bytes, shrink)

    @jit
    def weigh_values(args, values, scores, output, alpha, begin, n_keys):
        """O = alpha O + V P, transposed."""
        row_bytes = args.value_columns * itemsize
        for column in range(0, args.value_columns, rows):
            accumulate(
                values + begin * row_bytes + column * itemsize,
                itemsize,
                row_bytes,
                scores + begin * panel_bytes,
                panel_bytes,
                output + column * panel_bytes,
                panel_bytes,
                n_keys,
                alpha,
            )

    @jit
    def all_finite(values, n):
        """Whether none of n numbers (a multiple of 4) is NaN or infinite."""
        i = 0
        while i + lanes <= n:
            x = load(values + i * itemsize)
            if any_lane(splat(largest) < maximum(x, splat(zero) - x)) or any_lane(x != x):
                return False
            i += lanes
        while i < n:
            x = load_number(values + i * itemsize)
            if not abs(x) <= largest:
                return False
            i += 1
        return True

    @jit
    def weigh_seen_values(args, values, scores, output, alpha, begin, end, first_key, first, last):
        """`weigh_values` where a value may be NaN or infinite in a row that only some queries see: the others keep out."""
        for column in range(args.value_columns):
            for w in range(vectors):
                place = output + column * panel_bytes + w * vector_bytes
                lo, hi = load_index(first + w * lanes * 4), load_index(last + w * lanes * 4)
                total = load(place) * load(alpha + w * vector_bytes)
                for key in range(begin, end):
                    at = splat_index(np.int32(first_key + key))
                    value = splat(load_number(values + (key * args.value_columns + column) * itemsize))
                    probability = load(scores + key * panel_bytes + w * vector_bytes)
                    total = select((lo <= at) & (at < hi), fma(value, probability, total), total)
                store(place, total)

    # -- a work item

    @jit
    def attend(args, q, k, v, item, work):
        """Algorithm 1 for one tile of queries and (a part of) their keys; m, l and O are left in the workspace."""
        batch, kv_head, first_row, split = place_of(args, item)
        keys, values, scores, alpha = work + args.at_keys, work + args.at_values, work + args.at_scores, work + args.at_alpha
        first = carray(as_pointer_to_int32(work + args.at_first), args.q_tile)
        last = carray(as_pointer_to_int32(work + args.at_last), args.q_tile)
        ranges = carray(as_pointer_to_int64(work + args.at_ranges), (args.q_tile // panel, 4))
        addresses = carray(as_pointer_to_int64(work + args.at_addresses), panel)
        n_panels = panels_of(args, first_row)
        q_head = q + batch * args.q_batch + kv_head * args.group * args.q_head
        tile_first, tile_last = args.seqlen_k, 0
        for p in range(n_panels):
            list_rows(args, q_head, args.q_row, args.q_head, first_row + p * panel, addresses)
            pack_queries(args, addresses, work + args.at_queries + p * args.head_dim * panel_bytes)
            ranges[p] = list_bands(args, first_row + p * panel, first[p * panel :], last[p * panel :])
            tile_first, tile_last = min(tile_first, ranges[p, 0]), max(tile_last, ranges[p, 1])
            clear_state(
                args, work + args.at_m + p * panel_bytes, work + args.at_l + p * panel_bytes, work + args.at_output + p * args.value_columns * panel_bytes
            )
        if args.splits > 1:
            part = -(-(-(-(tile_last - tile_first) // args.splits)) // args.kv_tile) * args.kv_tile
            tile_first, tile_last = tile_first + split * part, min(tile_last, tile_first + (split + 1) * part)

        for block in range(tile_first, tile_last, args.kv_tile):
            n_keys = min(args.kv_tile, tile_last - block)
            k_block = k + batch * args.k_batch + block * args.k_row + kv_head * args.k_head
            v_block = v + batch * args.v_batch + block * args.v_row + kv_head * args.v_head
            pack(k_block, args.k_row, args.k_dim, n_keys, args.head_dim, keys, args.head_dim)
            pack(v_block, args.v_row, args.v_dim, n_keys, args.head_dim_v, values, args.value_columns)
            for i in range(n_keys * args.head_dim, -(-n_keys // rows) * rows * args.head_dim):
                store_number(keys + i * itemsize, zero)  # the register tile is filled up with keys that nobody sees
            for p in range(n_panels):
                begin = max(0, ranges[p, 0] - block) // rows * rows
                n_seen = min(n_keys, ranges[p, 1] - block)
                if begin >= n_seen:
                    continue
                end = -(-n_seen // rows) * rows
                queries = work + args.at_queries + p * args.head_dim * panel_bytes
                output = work + args.at_output + p * args.value_columns * panel_bytes
                m, l = work + args.at_m + p * panel_bytes, work + args.at_l + p * panel_bytes
                panel_first, panel_last = work + args.at_first + p * panel * 4, work + args.at_last + p * panel * 4

                compute_scores(args, keys, queries, scores, begin, end)
                border_left = max(begin, min(end, ranges[p, 2] - block))  # keys before it and from border_right on are
                border_right = max(border_left, min(end, min(n_keys, ranges[p, 3] - block)))  # not seen by every row
                mask_scores(scores, block, begin, border_left, panel_first, panel_last)
                mask_scores(scores, block, border_right, end, panel_first, panel_last)
                update_softmax(scores, begin, end, m, l, alpha)
                row_bytes = args.value_columns * itemsize
                if all_finite(values + begin * row_bytes, (border_left - begin) * args.value_columns) and all_finite(
                    values + border_right * row_bytes, (n_seen - border_right) * args.value_columns
                ):
                    weigh_values(args, values, scores, output, alpha, begin, n_seen - begin)
                else:
                    weigh_seen_values(args, values, scores, output, alpha, begin, n_seen, block, panel_first, panel_last)

    @jit
    def panels_of(args, first_row):
        """Panels of the tile that begins at a row."""
        return (min(args.q_tile, args.seqlen_q * args.group - first_row) + panel - 1) // panel

    @jit
    def place_of(args, item):
        """(batch, key/value head, first row, part of the keys) of a work item.

        Tiles of one row block go together, the last rows first where a right bound makes them the longest.
        """
        item, split = item // args.splits, item % args.splits
        item, kv_head = item // args.kv_heads, item % args.kv_heads
        block, batch = item // args.batch, item % args.batch
        if args.right != UNBOUNDED:
            block = args.q_blocks - 1 - block
        return batch, kv_head, block * args.q_tile, split

    @jit
    def finish(args, out, lse, item, output, m, l, addresses_place):
        """out = O / l and lse = m + log2(l), in natural units, transposed back to rows. Overwrites l."""
        batch, kv_head, first_row, _ = place_of(args, item)
        addresses = carray(as_pointer_to_int64(addresses_place), panel)
        head = kv_head * args.group
        for p in range(panels_of(args, first_row)):
            panel_m, panel_l, panel_output = m + p * panel_bytes, l + p * panel_bytes, output + p * args.value_columns * panel_bytes
            if lse != 0:
                list_rows(args, lse + batch * args.lse_batch + head * args.lse_head, args.lse_row, args.lse_head, first_row + p * panel, addresses)
                for lane in range(panel):
                    total = np.float64(load_number(panel_l + lane * itemsize))
                    top = np.float64(load_number(panel_m + lane * itemsize))
                    store_lse(addresses[lane], number(-np.inf if total == 0 else top * ln2 + np.log(total)))
            for lane in range(panel):
                total = load_number(panel_l + lane * itemsize)
                store_number(panel_l + lane * itemsize, one if total == zero else one / total)
            list_rows(args, out + batch * args.out_batch + head * args.out_head, args.out_row, args.out_head, first_row + p * panel, addresses)
            d = 0
            if args.out_dim == stored_size:
                while d + lanes <= args.head_dim_v:
                    for w in range(vectors):
                        source = panel_output + d * panel_bytes + w * vector_bytes
                        store_rows(source, panel_bytes, panel_l + w * vector_bytes, addresses_place + w * lanes * 8, d * stored_size)
                    d += lanes
            while d < args.head_dim_v:
                for lane in range(panel):
                    value = load_number(panel_output + d * panel_bytes + lane * itemsize) * load_number(panel_l + lane * itemsize)
                    store_element(addresses[lane] + d * args.out_dim, value)
                d += 1

    @jit
    def keep_part(args, work, part):
        """Put m, l and O of a part of the keys away."""
        bytes_of_output = args.q_tile * args.value_columns * itemsize
        copy(work + args.at_output, part, bytes_of_output)
        copy(work + args.at_m, part + bytes_of_output, args.q_tile * itemsize)
        copy(work + args.at_l, part + bytes_of_output + args.q_tile * itemsize, args.q_tile * itemsize)

    @jit
    def copy(source, target, n_bytes):
        for i in range(0, n_bytes, vector_bytes):
            store(target + i, load(source + i))

    @jit
    def merge_parts(args, parts):
        """Merge the splits of a tile into the first one: the block merge of the online softmax."""
        bytes_of_output = args.q_tile * args.value_columns * itemsize
        bytes_of_rows = args.q_tile * itemsize
        for p in range(args.q_tile // panel):
            for w in range(vectors):
                at_m = parts + bytes_of_output + p * panel_bytes + w * vector_bytes
                at_l = at_m + bytes_of_rows
                at_output = parts + p * args.value_columns * panel_bytes + w * vector_bytes
                m = load(at_m)
                for split in range(1, args.splits):
                    m = maximum(load(at_m + split * args.partial), m)
                top = select(m == splat(minus_inf), splat(zero), m)
                factor = exp2(load(at_m) - top)
                l = load(at_l) * factor
                for column in range(args.value_columns):
                    store(at_output + column * panel_bytes, load(at_output + column * panel_bytes) * factor)
                for split in range(1, args.splits):
                    part = split * args.partial
                    factor = exp2(load(at_m + part) - top)
                    l = fma(load(at_l + part), factor, l)
                    for column in range(args.value_columns):
                        place = at_output + column * panel_bytes
                        store(place, fma(load(place + part), factor, load(place)))
                store(at_m, m)
                store(at_l, l)

    # -- a thread

    def thread(args_address, q, k, v, out, lse, work, partial, counter, merging):
        """What a thread does: take work items until there are none; in a second round, merge their parts."""
        args = carray(as_pointer_to_arguments(args_address), 1)[0]
        item = next_item(counter)
        if merging:
            item *= args.splits
            bytes_of_output = args.q_tile * args.value_columns * itemsize
            while item < args.items:
                part = partial + item * args.partial
                merge_parts(args, part)
                finish(args, out, lse, item, part, part + bytes_of_output, part + bytes_of_output + args.q_tile * itemsize, work + args.at_addresses)
                item = next_item(counter) * args.splits
        else:
            while item < args.items:
                attend(args, q, k, v, item, work)
                if args.splits == 1:
                    finish(args, out, lse, item, work + args.at_output, work + args.at_m, work + args.at_l, work + args.at_addresses)
                else:
                    keep_part(args, work, partial + item * args.partial)
                item = next_item(counter)

    return SimpleNamespace(
        thread=thread,
        pack=pack,
        pack_queries=pack_queries,
        compute_scores=compute_scores,
        mask_scores=mask_scores,
        update_softmax=update_softmax,
        weigh_values=weigh_values,
        all_finite=all_finite,
        finish=finish,
    )
