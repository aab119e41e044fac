"""Is what a library computed right? Compared on a sample of rows with float64, before anything is timed."""

from __future__ import annotations

from .peers import dense, hidden_keys

ROWS = 128
ROUNDINGS = 3
WRONG = "wrong result"


class Sample:
    """Rows of all heads of the first and the last batch entry, with the result they should have.

    A result passes when each sampled row differs from float64 by at most twice as much (in the 2-norm, relative to the row)
    as the worst row of dense attention in the dtype of the arrays, plus a few roundings, and when no element of the whole
    result is NaN or infinite.

    Parameters
    ----------
    q, k, v : torch.Tensor
        Shapes of a cell, equal lengths.
    causal : bool
    """

    def __init__(self, q, k, v, causal):
        import torch

        self._torch = torch
        seqlen = q.shape[1]
        self._batch = torch.tensor(sorted({0, q.shape[0] - 1}), device=q.device)
        self._rows = torch.linspace(0, seqlen - 1, min(ROWS, seqlen), device=q.device).round().long()
        q, k, v = self._pick(q), k[self._batch], v[self._batch]
        hidden = hidden_keys(torch, seqlen, seqlen, q.device)[self._rows] if causal else None
        self._want = dense(torch, *(x.double() for x in (q, k, v)), hidden)
        plain = self._difference(dense(torch, q, k, v, hidden))
        self.limit = 2 * plain + ROUNDINGS * torch.finfo(q.dtype).eps / 2

    def _pick(self, x):
        return x[self._batch][:, self._rows]

    def _difference(self, rows) -> float:
        norm = self._torch.linalg.vector_norm
        return (norm(rows.double() - self._want, dim=-1) / norm(self._want, dim=-1)).max().item()

    def judge(self, out) -> tuple[float, str | None]:
        """Largest relative error of a sampled row, and what is wrong with the result, or None.

        Parameters
        ----------
        out : torch.Tensor
            Whole result, shape of q.
        """
        wanted = (self._want.shape[-2], self._want.shape[-1])
        if out.dim() != 4 or tuple(out.shape[-2:]) != wanted:
            return float("inf"), f"{WRONG}: shape {tuple(out.shape)}"
        if not bool(self._torch.isfinite(out).all()):
            return float("inf"), f"{WRONG}: NaN or infinite elements"
        error = self._difference(self._pick(out))
        if not error <= self.limit:
            return error, f"{WRONG}: a row differs from float64 by {error:.1e} of its norm, allowed are {self.limit:.1e}"
        return error, None
