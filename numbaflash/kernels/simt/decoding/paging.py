"""Tiles of keys that lie in pages: where the rows that a thread copies are, and their copy.

The page of a row is looked up a tile ahead, so that the copy does not wait for it, and serves k and v. Only keys that some query of the tile sees are
looked up and read: entries of the table and slots of pages that nobody needs may hold anything. A number that is no page counts as the nearest one.
"""

from __future__ import annotations

from numba.cuda import types

from numbaflash.ptx.straight import straight_line

from ..config import Config
from ..scores import by_name, option_types
from ..tiles import I32, VOID, ArrayTypes, copy_places, copy_width, walk_tile


def capacity(config: Config):
    """``f(options) -> int32``: keys that the table has room for."""
    return straight_line(I32, (option_types(config),), lambda ops, options: by_name(config, options)["capacity"])


def _in_one_page(config):
    """A tile, which begins at a multiple of its size, never leaves its page."""
    return config.options.page_size % config.kv_tile == 0


def _row_step(config):
    """Rows of a tile that the threads copy at once."""
    return config.threads // copy_width(config, config.kv_tile)


def source_type(config: Config):
    """Numba type of where the rows are that a thread copies of a tile: their pages, -1 for rows that nobody needs, or that of all rows where they lie
    in one; then the first key that is needed and one past the last."""
    return types.UniTuple(I32, 2 + (1 if _in_one_page(config) else config.kv_tile // _row_step(config)))


def find_pages(config: Config):
    """``f(batch, first_row, thread_row, begin, end, pages, options) -> source_type`` of a tile; keys from ``begin`` to ``end`` are needed."""
    page_size, step = config.options.page_size, _row_step(config)

    def body(ops, batch, first_row, thread_row, begin, end, pages, options):
        table, found = by_name(config, options)["page_table"], []
        for row in range(0, 1 if _in_one_page(config) else config.kv_tile, step):
            if _in_one_page(config):
                key = ops.maximum(first_row, begin)
                needed = (key < end) & (key < first_row + config.kv_tile)
            else:
                key = first_row + thread_row + row
                needed = (key >= begin) & (key < end)
            (page,) = ops.load_row(ops.place(table, (batch, key // page_size)), 1, needed)
            found.append(ops.select(needed, ops.maximum(ops.minimum(page, pages - 1), ops.integer(0)), -1))
        return [*found, begin, end]

    return straight_line(source_type(config), (*(I32,) * 6, option_types(config)), body)


def copy_tile(config: Config, dim: int, mask: int = 0):
    """As `tiles.copy_tile`, of keys, with what `find_pages` has found in the place of ``batch``."""
    t, count, page_size, step = ArrayTypes.of(config), config.vector if config.vectors else 1, config.options.page_size, _row_step(config)
    width = copy_width(config, config.kv_tile) * count

    def body(ops, memory, base, array, source, first_row, head, thread_row, thread_column):
        *pages, begin, end = source
        columns, thread_column, first = array.shape[3], thread_column * count, first_row + thread_row

        def row_at(page, key):
            return ops.place(array, (ops.maximum(page, ops.integer(0)), key % page_size, head, thread_column), contiguous=config.vectors)

        if _in_one_page(config):
            places = walk_tile(ops, row_at(pages[0], first), config.kv_tile, step, dim, width)
        else:
            rows = range(0, config.kv_tile, step)
            walks = (walk_tile(ops, row_at(page, first + row), step, step, dim, width) for row, page in zip(rows, pages, strict=True))
            places = ((row, column, place) for row, walk in zip(rows, walks, strict=True) for _, column, place in walk)

        def there(row):
            return (first + row >= begin) & (first + row < end) if _in_one_page(config) else pages[row // step] >= 0

        copy_places(ops, config, memory, base, places, dim, mask, thread_row, thread_column, columns, there)

    return straight_line(VOID, (t.memory, I32, t.operand, source_type(config), I32, I32, I32, I32), body)
