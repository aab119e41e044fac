"""Is what a library computed right? Checked on a sample of rows by `numbaflash.testing`'s rule before anything is timed."""

from __future__ import annotations

from dataclasses import replace

from numbaflash.testing import accuracy as rule

ROWS = 32
WRONG = "wrong result"


class Sample:
    """Exact results of all heads of the first and the last batch entry, at the first, the middle and the last rows.

    Parameters
    ----------
    cell : bench.cells.Cell
    q, k, v : torch.Tensor
        Inputs of the cell.
    """

    def __init__(self, cell, q, k, v):
        import torch

        self._isfinite, self._shape = torch.isfinite, cell.problem.out_shape
        self._batch = sorted({0, cell.batch - 1})
        rows = min(ROWS, cell.seqlen)
        self._blocks = []
        for start in sorted({0, (cell.seqlen - rows) // 2, cell.seqlen - rows}):
            part = slice(start, start + rows)
            problem = replace(cell.problem, batch=len(self._batch), seqlen_q=rows, offset=start if cell.causal else 0)
            self._blocks.append((part, rule.expected(problem, q[self._batch, part], k[self._batch], v[self._batch])))

    def judge(self, out) -> tuple[float, str | None]:
        """Largest error of a sampled element in units of its tolerance, and what is wrong with the result, or None.

        Parameters
        ----------
        out : torch.Tensor
            Whole result, shape of q.
        """
        if tuple(out.shape) != self._shape:
            return float("inf"), f"{WRONG}: shape {tuple(out.shape)}, expected {self._shape}"
        if not bool(self._isfinite(out).all()):
            return float("inf"), f"{WRONG}: NaN or infinite elements"
        try:
            return max(rule.compare(expected, out[self._batch, part]).out for part, expected in self._blocks), None
        except rule.AccuracyError as error:
            return float("inf"), f"{WRONG}: {error}"
