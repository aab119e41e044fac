"""From scores to weights, and from the weights' gradients to the scores', of a consumer's block: plain, or under options."""

from __future__ import annotations

from numba import cuda
from numba.cuda.types import UniTuple, int32

from ....ptx import fragment, pipeline
from ....ptx.index import plus
from ....ptx.straight import straight_line
from .config import BackwardConfig, SharedMemory
from .scores import KeyScores

inline = cuda.jit(device=True, inline="always")


def weighing(config: BackwardConfig, of_scores: KeyScores, memory: SharedMemory, limits_of):
    """Two functions: ``f(masked) -> (weights, gradients)`` of fragments of so many columns, and ``fetch_mask_of(m, head, my)``, where blocks come
    from lists. ``limits_of(key, column, bounds)`` are `KeyBand.limits`.

    ``weights(s, words, mask_words, place, m, head, ring, my)`` returns P^T as dV needs it but for dropout, and as the gradient of the scores does;
    ``gradients(p, dp, kept, place, m, ring, my)`` returns dS^T.
    """
    columns, with_options, values_at = of_scores.columns, bool(of_scores.options), pipeline.slot(memory.row_bytes)
    listed = of_scores.options.masked
    probabilities, score_gradients = fragment.probabilities(columns), fragment.score_gradients(columns)
    mask, column_values = fragment.mask_band(columns, True, of_scores.left, 0.0, of_scores.q_block), fragment.column_values(columns)

    fetch_mask = of_scores.fetch_mask() if listed else None
    rows_of_consumer = 0 if config.columns_apart else 64

    place_anew = straight_line(  # (first key, first column) of a thread, for which no registers are kept
        UniTuple(int32, 2),
        (int32,) * 4,
        lambda ops, n, w, thread, columns: [
            n * config.kv_tile + w * rows_of_consumer + (ops.opaque(thread) >> 5) * 16 + ((ops.opaque(thread) & 31) >> 2),
            ops.opaque(columns) >> 2,
        ],
    )

    @inline
    def fetch_mask_of(m, head, my):
        n, batch, seqlen_k, bounds = my.spot
        key, query = place_anew(n, my.w, my.thread, my.columns)
        return fetch_mask(key, query, m, batch, head, bounds[0], seqlen_k, my.options)

    def make(masked):
        weigh, differentiate = of_scores.weigh(masked), of_scores.differentiate(masked)

        @inline
        def weights(s, words, mask_words, place, m, head, ring, my):
            if with_options:
                shifts = column_values(plus(values_at(ring.shifts, place), my.columns))
                limits = my.limits
                if masked and listed:
                    n, _, _, bounds = my.spot
                    key, column = place_anew(n, my.w, my.thread, my.columns)
                    limits = limits_of(key, column, bounds)
                return weigh(s, shifts, words, mask_words, my.seat, m, head, limits, my.scale_log2, my.options)
            p = probabilities(s, plus(values_at(ring.shifts, place), my.columns), my.scale_log2)
            if masked:
                p = mask(p, m, my.limits)
            return p, p

        @inline
        def gradients(p, dp, kept, place, m, ring, my):
            if with_options:
                return differentiate(p, dp, kept, column_values(plus(values_at(ring.deltas, place), my.columns)), my.options)
            ds = score_gradients(p, dp, plus(values_at(ring.deltas, place), my.columns))
            if masked:
                ds = mask(ds, m, my.limits)
            return ds

        return weights, gradients

    return make, fetch_mask_of
