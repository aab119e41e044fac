"""Random bits of dropout, drawn by the warps of the producer's warpgroup that issue no loads.

Nothing is known to them that the tile and the block do not say, so they are ahead of the consumers by as many blocks as the ring has stages; a
consumer reads 16 bytes of each draw that is its thread's. Drawing takes as many instructions as a softmax does, and what consumers do for themselves
is what the tensor cores wait for.
"""

from __future__ import annotations

from numba import cuda
from numba.cuda.types import Tuple, UniTuple, int32, uint32

from ...ptx import pipeline, shared
from ...ptx.index import plus
from ...ptx.straight import straight_line
from ..dropout import float64_product, philox
from .config import INSPECTORS, ForwardConfig
from .options import KEYS_OF_A_DRAW
from .scores import option_types, round_keys_of

inline = cuda.jit(device=True, inline="always")

ROWS_OF_A_DRAW = 16


def pair_of_draws(config: ForwardConfig):
    """``f(number, block, lane, q_block, head, batch, options) -> words``: four each of the draws of that number and of the drawer's next one.

    A number is one draw of each lane of a warp, for the thread of that lane in warp ``number % groups`` of the consumers, and the 32 keys of number
    ``number // groups`` of the block.
    """
    groups, blocks = _shape(config)

    def body(ops, number, block, lane, q_block, head, batch, options):
        named = {name: x for (name, _), x in zip(config.options.parameters(), options, strict=True)}
        first_key, lane = (named["first_key"] // KEYS_OF_A_DRAW) + block * blocks, ops.opaque(lane)  # no register for what is made of it
        counters = [
            [(first_key + n // groups) << 2 | (lane & 3), (q_block * groups + n % groups) << 3 | (lane >> 2), head, batch]
            for n in (number, number + INSPECTORS)
        ]
        return [word for words in philox(ops, counters, round_keys_of(ops, named), float64_product) for word in words]

    return straight_line(UniTuple(int32, 8), (*(int32,) * 6, Tuple(option_types(config.options))), body)


def _shape(config):
    return config.q_tile // ROWS_OF_A_DRAW, config.kv_block // KEYS_OF_A_DRAW


def drawing(config: ForwardConfig):
    """Two functions.

    ``draw(stages, place, block, drawer, lane, q_block, head, batch, options)`` fills a stage, by all drawers: a warp's part of it.

    ``read(stages, place, thread) -> drawn``, as `Scores.draw` returns it, of a thread among all consumers'.
    """
    groups, blocks = _shape(config)
    numbers, row_bytes = groups * blocks, 16 * 32
    of_stage, put, get = pipeline.slot(numbers * row_bytes), shared.put_words(4), shared.get_words(4 * blocks, groups * row_bytes)
    two = pair_of_draws(config)
    place_of = straight_line(uint32, (uint32, int32, int32), lambda ops, base, number, lane: base + number * row_bytes + lane * 16)
    place_of_thread = straight_line(uint32, (uint32, int32), lambda ops, base, thread: base + thread * 16)

    @inline
    def draw(stages, place, block, drawer, lane, q_block, head, batch, options):
        base, number = of_stage(stages, place), drawer
        while number < numbers:
            words = two(number, block, lane, q_block, head, batch, options)
            put(place_of(base, number, lane), words[:4])
            number = plus(number, INSPECTORS)
            if number < numbers:
                put(place_of(base, number, lane), words[4:])
            number = plus(number, INSPECTORS)

    @inline
    def read(stages, place, thread):
        return get(place_of_thread(of_stage(stages, place), thread))

    return draw, read
