"""From scores to weights, and from the weights' gradients to the scores', of a consumer's block: plain, or under options."""

from __future__ import annotations

from numba import cuda

from ....ptx import fragment, pipeline
from ....ptx.index import plus
from .config import SharedMemory
from .scores import KeyScores

inline = cuda.jit(device=True, inline="always")


def weighing(of_scores: KeyScores, memory: SharedMemory, limits_of, place_anew):
    """``f(masked) -> (weights, gradients)`` of fragments of so many columns.

    ``place_anew(n, w, thread, columns)`` and ``limits_of(key, column, bounds)`` say where a thread stands, where blocks come from lists.
    ``weights(s, words, mask_words, place, m, head, ring, my)`` returns P^T as dV needs it but for dropout, and as the gradient of the scores does;
    ``gradients(p, dp, kept, place, m, ring, my)`` returns dS^T.
    """
    columns, with_options, values_at = of_scores.columns, bool(of_scores.options), pipeline.slot(memory.row_bytes)
    listed = of_scores.options.masked
    probabilities, score_gradients = fragment.probabilities(columns), fragment.score_gradients(columns)
    mask, column_values = fragment.mask_band(columns, True, of_scores.left, 0.0, of_scores.q_block), fragment.column_values(columns)

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

    return make
