"""The options of a problem in the kernels: the one place where a score is changed, and the one where it is decided who sees whom.

`build` makes, for the options of a kernel, the steps that the forward pass, its form for few queries and the gradients share. An option that
a kernel has not is not compiled. What lies in memory as [row][key] (mask, bias) is first brought into a tile that is laid out as the scores are,
[key][row] of one panel of rows; so are the factors of dropout.

Where numbers of any size are added to the scores (a bias, a sink), scores are in natural units instead of those of log2(e): the lowest number
of float32 must stay one.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from numba import from_dtype, types
from numba.extending import intrinsic

from ...dispatch import OPTION_OPERANDS
from ...problem import DROPOUT_STEPS, GRANULE
from ..blocks.layout import BITS, EMPTY, FULL, PARTIAL, bits_at, granules
from . import target
from .config import Kernel
from .convert import COMPUTE, ITEMSIZE, elements
from .dropout import drawing
from .exp2 import exp2
from .packed import ENTRY, word_of
from .tanh import tanh_of
from .transpose import transposing
from .vector import Simd, any_lane, jit, max_lane, maximum, select, words

OPTION_ADDRESSES = np.dtype([(name, np.int64) for name in OPTION_OPERANDS])
"""Addresses of the options of a forward call, 0 for those that there are not; the seed is itself. Of packed sequences, ``cu_seqlens_q`` is the
table of `numbaflash.kernels.cpu.packed.entries` and ``cu_seqlens_k`` the list of tiles."""

TILES = ("mask_tile", "bias_tile", "keep_tile", "slope_tile", "lists")
"""Parts of a thread's memory that options ask for."""

_BROADCAST = ("mask", "bias")  # strides of a block mask take the place of a mask's: of its words, and a row is one of granules
OPTION_INTEGERS = (
    *(f"{name}_{axis}" for name in _BROADCAST for axis in ("batch", "head", "row", "key")),
    *("alibi_slopes_batch", "alibi_slopes_head", "sinks_head"),
    *(f"{name}_{what}" for name in ("seqlens_q", "seqlens_k") for what in ("step", "size")),
    *("offset_per_entry", "keep_limit", "mask_bits"),
    *("page_table_batch", "page_table_step", "pages", "page_size"),
    *(f"at_{tile}" for tile in TILES),
)
OPTION_NUMBERS = ("softcap", "keep_factor")
"""
``{option}_{axis}`` are strides, ``{option}_step`` another one and ``{lengths}_size`` the bytes of a length. ``softcap`` is in the units of the
scores; ``keep_limit`` and ``keep_factor`` say which weights dropout keeps, and what they are multiplied by. ``mask_bits`` are the bytes from the
words of a block mask to its bits.
"""

NOTHING, SOMETHING, EVERYTHING = 0, 1, 2
"""What the rows of a panel see of a block of keys, by the mask alone."""

LOG2E = float(np.log2(np.e))


def is_natural(kernel: Kernel) -> bool:
    """Whether scores are in natural units."""
    return bool({"bias", "sinks"} & set(kernel.options))


def score_unit(kernel: Kernel) -> float:
    """What natural scores are multiplied by."""
    return 1.0 if is_natural(kernel) else LOG2E


def score_scale(problem, kernel: Kernel) -> float:
    """What the products of queries and keys are multiplied by, before the softcap where there is one."""
    return problem.scale / problem.softcap if problem.softcap else problem.scale * score_unit(kernel)


def list_places(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Where the lists of a panel lie: what each row has of the options; and their bytes together."""
    sizes = {"state": 8}
    if "mask" in kernel.options:
        sizes["mask"] = 8
    if "block_mask" in kernel.options:
        sizes |= {"mask": 8, "bits": 8, "words": 4}
    if "bias" in kernel.options:
        sizes["bias"] = 8
    if "alibi_slopes" in kernel.options:
        sizes |= {"places": 4, "slopes": COMPUTE[kernel.dtype].bitwidth // 8}
    if "dropout" in kernel.options:
        sizes |= {"queries": 4, "heads": 4}
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = end
        end += size * kernel.panel + 63 & -64
    return places, end


def tile_sizes(kernel: Kernel, keys: int, rows: int, with_slopes: bool = False) -> dict[str, int]:
    """Bytes of each of `TILES`, for blocks of ``keys`` keys and tiles of ``rows`` rows."""
    tile = keys * kernel.panel * COMPUTE[kernel.dtype].bitwidth // 8
    _, lists = list_places(kernel)
    return {
        "mask_tile": tile if {"mask", "block_mask"} & set(kernel.options) else 0,
        "bias_tile": tile if "bias" in kernel.options else 0,
        "keep_tile": tile + tile * 64 // keys if "dropout" in kernel.options else 0,  # random bits are drawn for 32 aligned keys
        "slope_tile": tile if with_slopes and "softcap" in kernel.options else 0,
        "lists": rows // kernel.panel * lists if kernel.options else 0,
    }


def set_option_arguments(args, problem, layouts, kernel: Kernel) -> None:
    """The fields of `OPTION_INTEGERS`, but places in memory, and of `OPTION_NUMBERS`."""
    for name in _BROADCAST:
        layout = getattr(layouts, name)
        if layout is not None:
            for axis, stride in zip(("batch", "head", "row", "key"), layout.strides, strict=True):
                args[f"{name}_{axis}"] = stride
    if layouts.block_mask is not None:
        args["mask_batch"], args["mask_head"], _ = layouts.block_mask.strides
        args["mask_row"], args["mask_bits"] = 4 * granules(problem.seqlen_k), 4 * bits_at(problem.seqlen_q, problem.seqlen_k)
    if layouts.alibi_slopes is not None:
        args["alibi_slopes_batch"], args["alibi_slopes_head"] = layouts.alibi_slopes.strides
    if layouts.sinks is not None:
        args["sinks_head"] = layouts.sinks.strides[0]
    for name in ("seqlens_q", "seqlens_k"):
        layout = getattr(layouts, name)
        if layout is not None:
            args[f"{name}_step"] = layout.strides[0]
            args[f"{name}_size"] = 8 if getattr(problem, name) == "int64" else 4
    args["offset_per_entry"] = problem.offset_per_entry
    if problem.paged:
        args["page_table_batch"], args["page_table_step"] = layouts.page_table.strides
        args["pages"], args["page_size"] = problem.pages, problem.page_size
    if problem.softcap:
        args["softcap"] = problem.softcap * score_unit(kernel)
    if problem.dropout:
        from ..dropout import keep_limit

        args["keep_limit"] = keep_limit(problem.dropout)
        args["keep_factor"] = DROPOUT_STEPS / (DROPOUT_STEPS - round(problem.dropout * DROPOUT_STEPS))


def signed_seed(seed: int) -> int:
    """A seed of 64 bits as an int64."""
    return seed - 2**64 if seed >= 2**63 else seed


def record_at(dtype):
    """Build ``record(address)``, the record of a NumPy dtype at an address."""

    @intrinsic
    def record(typingctx, address):
        kind = from_dtype(dtype)
        return kind(types.int64), lambda context, builder, sig, args: builder.inttoptr(args[0], context.get_value_type(kind))

    return record


options_at = record_at(OPTION_ADDRESSES)


def build(kernel: Kernel, with_slopes: bool = False):
    """Steps of a kernel that depend on its options.

    Parameters
    ----------
    kernel : Kernel
    with_slopes : bool
        Whether changing a score leaves its derivative in the slope tile.

    Returns
    -------
    namespace
        Functions for compiled code, in which ``args`` is a record with the fields of `OPTION_INTEGERS` and `OPTION_NUMBERS`, and ``at`` one with
        those of `OPTION_ADDRESSES`.
    """
    dtype, lanes, vectors, panel = kernel.dtype, kernel.lanes, kernel.vectors, kernel.panel
    has_softcap, has_mask, has_bias, has_alibi, has_sinks, has_dropout, has_lengths, packed = (
        name in kernel.options for name in ("softcap", "mask", "bias", "alibi_slopes", "sinks", "dropout", "lengths", "packed")
    )
    has_bits = "block_mask" in kernel.options
    has_mask |= has_bits
    natural, unit = is_natural(kernel), score_unit(kernel)
    compute = COMPUTE[dtype]
    number = np.float64 if compute == types.float64 else np.float32
    itemsize = compute.bitwidth // 8
    vector_bytes, panel_bytes = lanes * itemsize, panel * itemsize
    simd, indices, octets = Simd(compute, lanes), Simd(types.int32, lanes), Simd(types.int8, target.vector_bytes())
    load, store, splat, convert = simd.load, simd.store, simd.splat, simd.convert
    load_index, splat_index = indices.load, indices.splat
    load_octets, splat_octet, octet_lanes = octets.load, octets.splat, octets.lanes
    load_int64, store_int64 = words(types.int64)
    load_int32, store_int32 = words(types.int32)
    load_octet, _ = words(types.int8)
    load_float32, _ = words(types.float32)
    load_number, store_number = words(compute)
    tanh = tanh_of(compute, lanes)
    zero, one, log2e, minus_inf = number(0), number(1), number(LOG2E), number(-np.inf)
    no_octet = np.int8(0)
    places, lists_bytes = list_places(kernel)
    at_mask, at_bits, at_words, at_bias, at_places, at_slopes, at_queries, at_heads = (
        places.get(name, 0) for name in ("mask", "bits", "words", "bias", "places", "slopes", "queries", "heads")
    )
    draw_rows, draw_keys = drawing(compute, lanes) if has_dropout else (None, None)
    lane_numbers = indices.lane_numbers
    width = len(ENTRY)

    # Lengths

    @jit
    def length_at(address, size, capacity):
        if address == 0:
            return capacity
        length = load_int64(address) if size == 8 else np.int64(load_int32(address))
        return min(max(length, 0), capacity)

    @jit
    def entry_of(args, at, batch):
        """Of a batch entry: lengths and offset; queries and keys that it has room for; the first of them, and the first tile of rows, of a head."""
        if packed:
            length_q, length_k = word_of(at.cu_seqlens_q, batch, width, 0), word_of(at.cu_seqlens_q, batch, width, 1)
            offset = length_k - length_q if args.offset_per_entry != 0 else 0
            queries, keys = word_of(at.cu_seqlens_q, batch, width, 2), word_of(at.cu_seqlens_q, batch, width, 3)
            first_q, first_k = word_of(at.cu_seqlens_q, batch, width, 4), word_of(at.cu_seqlens_q, batch, width, 5)
            return length_q, length_k, offset, queries, keys, first_q, first_k, word_of(at.cu_seqlens_q, batch, width, 6)
        if has_lengths:
            seqlens_q = at.seqlens_q + batch * args.seqlens_q_step if at.seqlens_q != 0 else 0
            seqlens_k = at.seqlens_k + batch * args.seqlens_k_step if at.seqlens_k != 0 else 0
            length_q = length_at(seqlens_q, args.seqlens_q_size, args.seqlen_q)
            length_k = length_at(seqlens_k, args.seqlens_k_size, args.seqlen_k)
            offset = length_k - length_q if args.offset_per_entry != 0 else args.offset
            return length_q, length_k, offset, args.seqlen_q, args.seqlen_k, 0, 0, 0
        return args.seqlen_q, args.seqlen_k, args.offset, args.seqlen_q, args.seqlen_k, 0, 0, 0

    # What belongs to the rows of a panel

    @jit
    def list_panel(args, at, entry, batch, kv_head, first_row, lists):
        """What each row of a panel has of the options. Lanes past the last row repeat it."""
        if packed and entry[0] == 0:  # sees nothing, and has nothing of the options
            return
        last_row = entry[3] * args.group - 1
        query, head = first_row // args.group, kv_head * args.group + first_row % args.group
        end = (kv_head + 1) * args.group
        for lane in range(panel):
            if has_bits:
                words = at.block_mask + batch * args.mask_batch + head * args.mask_head
                store_int64(lists + at_mask + lane * 8, words + query // GRANULE * args.mask_row)
                store_int64(lists + at_bits + lane * 8, words + args.mask_bits + query % GRANULE * (GRANULE // 8))
            elif has_mask:
                store_int64(lists + at_mask + lane * 8, at.mask + batch * args.mask_batch + head * args.mask_head + query * args.mask_row)
            if has_bias:
                store_int64(lists + at_bias + lane * 8, at.bias + batch * args.bias_batch + head * args.bias_head + query * args.bias_row)
            if has_alibi:
                slope = load_float32(at.alibi_slopes + batch * args.alibi_slopes_batch + head * args.alibi_slopes_head)
                store_int32(lists + at_places + lane * 4, query + entry[2])
                store_number(lists + at_slopes + lane * itemsize, number(slope) * number(unit))
            if has_dropout:
                store_int32(lists + at_queries + lane * 4, query)
                store_int32(lists + at_heads + lane * 4, head)
            if first_row + lane < last_row:
                head += 1
                if head == end:
                    query, head = query + 1, kv_head * args.group

    # Tiles of a panel of rows and keys ``begin`` to ``end`` of a block

    def transposed(name):
        """Build what fills the tile of a mask or a bias."""
        load_rows, _ = transposing(name, lanes, compute)
        load_element, _ = elements(name, compute=compute)
        size = ITEMSIZE[name]

        @jit
        def fill(rows, key_step, same, block, begin, end, tile):
            key = begin
            if same:
                start = load_int64(rows)
                while key < end:
                    value = splat(load_element(start + (block + key) * key_step))
                    for w in range(vectors):
                        store(tile + key * panel_bytes + w * vector_bytes, value)
                    key += 1
            elif key_step == size:
                while key + lanes <= end:
                    for w in range(vectors):
                        load_rows(rows + w * lanes * 8, (block + key) * size, one, tile + key * panel_bytes + w * vector_bytes, panel_bytes)
                    key += lanes
            while key < end:
                for lane in range(panel):
                    value = load_element(load_int64(rows + lane * 8) + (block + key) * key_step)
                    store_number(tile + key * panel_bytes + lane * itemsize, value)
                key += 1

        return fill

    def straight(name):
        """The same for a panel of one row, whose scores lie beside each other."""
        load_elements, _ = elements(name, lanes, compute)
        load_element, _ = elements(name, compute=compute)
        size = ITEMSIZE[name]

        @jit
        def fill(rows, key_step, same, block, begin, end, tile):
            start, key = load_int64(rows) + block * key_step, begin
            if key_step == size:
                while key + lanes <= end:
                    store(tile + key * itemsize, load_elements(start + key * size))
                    key += lanes
            while key < end:
                store_number(tile + key * itemsize, load_element(start + key * key_step))
                key += 1

        return fill

    filling = straight if kernel.form == "rows" else transposed
    fill_mask = filling("bool") if has_mask else None  # of bool
    fill_bias = filling(kernel.bias_dtype) if has_bias else None

    @jit
    def bits_of(lists, lane, key):
        """32 bits of a row of a block mask, from a key on that is a multiple of 32."""
        word = load_int32(load_int64(lists + at_mask + lane * 8) + key // GRANULE * 4)
        if word < PARTIAL:
            return np.int32(-1 if word == FULL else 0)
        return load_int32(load_int64(lists + at_bits + lane * 8) + np.int64(word - PARTIAL) * (4 * BITS) + key % GRANULE // 8)

    @jit
    def fill_of_bits(lists, block, begin, end, tile):
        """The tile of a block mask."""
        key = begin
        while key < end:
            first = (block + key) // 32 * 32
            stop = min(end, first + 32 - block)
            for lane in range(panel):
                store_int32(lists + at_words + lane * 4, bits_of(lists, lane, first))
            while key < stop:
                bit = np.int32(1) << np.int32(block + key - first)
                if panel == 1:
                    store_number(tile + key * itemsize, one if load_int32(lists + at_words) & bit != 0 else zero)
                else:
                    for w in range(vectors):
                        shown = (load_index(lists + at_words + w * lanes * 4) & splat_index(bit)) != splat_index(np.int32(0))
                        store(tile + key * panel_bytes + w * vector_bytes, select(shown, splat(one), splat(zero)))
                key += 1

    @jit
    def look_at_words(lists, block, begin, end):
        """`look_at_mask` of a block mask: what the words of all granules say in which the rows and keys lie."""
        some, every, last = False, True, np.int64(0)
        for lane in range(panel):
            row = load_int64(lists + at_mask + lane * 8)
            if row != last:
                last = row
                for granule in range((block + begin) // GRANULE, (block + end - 1) // GRANULE + 1):
                    word = load_int32(row + granule * 4)
                    some |= word != EMPTY
                    every &= word == FULL
        state = NOTHING
        if some:
            state = EVERYTHING if every else SOMETHING
        store_int64(lists, state)
        return state

    @jit
    def look_at_array(args, lists, block, begin, end):
        """`NOTHING`, `SOMETHING` or `EVERYTHING`, remembered for `fetch`: a block that nobody sees costs no more than this."""
        same = args.mask_row == 0 and (args.mask_head == 0 or args.group == 1)
        some, every = False, True
        for lane in range(1 if same else panel):
            row = load_int64(lists + at_mask + lane * 8) + block * args.mask_key
            key = begin
            if args.mask_key == 1:
                while key + octet_lanes <= end:
                    found = load_octets(row + key)
                    some |= any_lane(found != splat_octet(no_octet))
                    every &= not any_lane(found == splat_octet(no_octet))
                    key += octet_lanes
            while key < end:
                seen = load_octet(row + key * args.mask_key) != no_octet
                some |= seen
                every &= seen
                key += 1
        state = NOTHING
        if some:
            state = EVERYTHING if every else SOMETHING
        store_int64(lists, state)
        return state

    @jit
    def look_at_mask(args, lists, block, begin, end):
        """What a panel sees of keys ``begin`` to ``end`` of a block."""
        if has_bits:
            return look_at_words(lists, block, begin, end)
        return look_at_array(args, lists, block, begin, end)

    @jit
    def fetch(args, lists, block, begin, end, mask_tile, bias_tile):
        """Fill the tiles of what is in memory."""
        if has_mask:
            same = args.mask_row == 0 and (args.mask_head == 0 or args.group == 1)
            if load_int64(lists) == EVERYTHING:
                for i in range(begin * panel_bytes // vector_bytes * vector_bytes, end * panel_bytes, vector_bytes):
                    store(mask_tile + i, splat(one))
            elif has_bits:
                fill_of_bits(lists, block, begin, end, mask_tile)
            else:
                fill_mask(lists + at_mask, args.mask_key, same, block, begin, end, mask_tile)
        if has_bias:
            same = args.bias_row == 0 and (args.bias_head == 0 or args.group == 1)
            fill_bias(lists + at_bias, args.bias_key, same, block, begin, end, bias_tile)

    @jit
    def draw(args, at, lists, batch, block, begin, end, keep_tile):
        """Draw the factors of dropout; returns where those of the block's first key would lie."""
        first = (block + begin) // 32 * 32
        for group in range(first, block + end, 32):
            for key in range(group, group + 8, 2):
                for w in range(vectors):
                    rows = lists + w * lanes * 4
                    place = keep_tile + (key - first) * panel_bytes + w * vector_bytes
                    draw_rows(rows + at_queries, rows + at_heads, key, batch, at.seed, args.keep_limit, number(args.keep_factor), place, panel_bytes)
        return keep_tile + (block - first) * panel_bytes

    @jit
    def draw_row(args, at, lists, batch, block, begin, end, keep_tile):
        """The same for a panel of one row."""
        query, head = np.int64(load_int32(lists + at_queries)), np.int64(load_int32(lists + at_heads))
        for key in range(begin // lanes * lanes, end, lanes):
            draw_keys(query, head, block + key, batch, at.seed, args.keep_limit, number(args.keep_factor), keep_tile + key * itemsize)

    # The step that changes a score

    @jit
    def changed(score, softcap, slope, distance, bias):
        """(score, its derivative) of ``scale * q @ k``; what the kernel has not is not looked at."""
        derivative = score
        if has_softcap:
            capped, derivative = tanh(score)
            score = capped * softcap
        if has_alibi:
            score = score - slope * maximum(distance, splat(zero) - distance)
        if has_bias:
            score = score + bias
        return score, derivative

    @jit
    def change_scores(args, lists, scores, stride, block, begin, end, bias_tile, slope_tile):
        """`changed` for a panel; the rows of scores are ``stride`` bytes apart."""
        softcap, nothing = splat(number(args.softcap)), splat(zero)
        for w in range(vectors):
            slope, distance, bias = nothing, nothing, nothing
            place = splat_index(np.int32(0))
            if has_alibi:
                place, slope = load_index(lists + at_places + w * lanes * 4), load(lists + at_slopes + w * vector_bytes)
            for key in range(begin, end):
                in_tile = key * panel_bytes + w * vector_bytes
                at_score = scores + key * stride + w * vector_bytes
                if has_alibi:
                    distance = convert(place - splat_index(np.int32(block + key)))
                if has_bias:
                    bias = load(bias_tile + in_tile)
                score, derivative = changed(load(at_score), softcap, slope, distance, bias)
                store(at_score, score)
                if has_softcap and with_slopes:
                    store(slope_tile + in_tile, derivative)

    @jit
    def change_row(args, lists, scores, block, begin, end, first, last, mask_tile, bias_tile):
        """`changed` and `visible` for a panel of one row, keys ``begin`` to ``end`` of the block in whole vectors; returns the largest score."""
        softcap, top, bias = splat(number(args.softcap)), splat(minus_inf), splat(zero)
        slope, distance, place = splat(zero), splat(zero), splat_index(np.int32(0))
        if has_alibi:
            place, slope = splat_index(load_int32(lists + at_places)), splat(load_number(lists + at_slopes))
        for key in range(begin // lanes * lanes, end, lanes):
            keys = splat_index(np.int32(block + key)) + lane_numbers()
            if has_alibi:
                distance = convert(place - keys)
            if has_bias:
                bias = load(bias_tile + key * itemsize)
            score, _ = changed(load(scores + key * itemsize), softcap, slope, distance, bias)
            seen = visible(splat_index(np.int32(first)), splat_index(np.int32(last)), keys, mask_tile + key * itemsize)
            score = select(seen, score, splat(minus_inf))
            store(scores + key * itemsize, score)
            top = maximum(score, top)
        return max_lane(top)

    # The step that decides who sees whom

    @jit
    def visible(first, last, key, mask):
        """Which rows see a key: it lies in their band, and their mask (the vector at an address) has it."""
        seen = (first <= key) & (key < last)
        if has_mask:
            seen = seen & (load(mask) != splat(zero))
        return seen

    @jit
    def sees(args, lists, lane, first, last, key):
        """The same of one row, without tiles."""
        seen = first <= key and key < last
        if has_bits:
            seen = seen and (bits_of(lists, lane, key // 32 * 32) >> np.int32(key % 32)) & 1 != 0
        elif has_mask:
            seen = seen and load_octet(load_int64(lists + at_mask + lane * 8) + key * args.mask_key) != no_octet
        return seen

    # Weights

    @jit
    def weight(score):
        """The exponential of a score."""
        if natural:
            return exp2(score * splat(log2e))
        return exp2(score)

    @jit
    def sink_of(args, at, head):
        """The sink of a query head, in the units of the scores; -inf where there is none."""
        if has_sinks:
            return load_number(at.sinks + head * args.sinks_head)
        return minus_inf

    return SimpleNamespace(
        has_lists=bool(set(kernel.options) - {"lengths", "sinks", "packed"}),
        has_mask=has_mask,
        has_bias=has_bias,
        has_tiles=has_mask or has_bias,
        has_sinks=has_sinks,
        has_dropout=has_dropout,
        has_slopes=has_softcap and with_slopes,
        changes_scores=has_softcap or has_bias or has_alibi,
        can_be_dead=bool(kernel.options),
        lists_bytes=lists_bytes,
        entry_of=entry_of,
        list_panel=list_panel,
        look_at_mask=look_at_mask,
        fetch=fetch,
        draw=draw,
        draw_row=draw_row,
        changed=changed,
        change_scores=change_scores,
        change_row=change_row,
        visible=visible,
        sees=sees,
        weight=weight,
        sink_of=sink_of,
    )
