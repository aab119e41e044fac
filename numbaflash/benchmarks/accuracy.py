"""Is what a library computed right? Checked on a sample by `numbaflash.testing`'s rule before anything is timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..testing import accuracy as rule

ROWS = 32
WRONG = "wrong result"
AGREEMENT = {"float16": 2**-6, "bfloat16": 2**-4, "float32": 1e-4, "float64": 1e-10}
"""Largest difference of two right results, of their largest element: some roundings of it. A mask or a scale that is another one differs by as much
as the elements themselves."""


def finite(x) -> bool:
    """Whether an array of NumPy or torch has neither NaN nor infinities."""
    if isinstance(x, np.ndarray):
        return bool(np.isfinite(x.astype(np.float32)).all())
    return bool(x.isfinite().all())


def fault_of(found: dict, shapes: dict) -> str | None:
    """What is wrong with results whatever they should hold: a shape, or elements that are no numbers; None when nothing is."""
    for name, shape in shapes.items():
        if tuple(found[name].shape) != shape:
            return f"{WRONG}: {name} has shape {tuple(found[name].shape)}, expected {shape}"
        if not finite(found[name]):
            return f"{WRONG}: NaN or infinite elements of {name}"
    return None


def kind_of(results) -> list[tuple]:
    """Shape and dtype of each array of a result."""
    each = results if isinstance(results, (tuple, list)) else (results,)
    return [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in each]


def other_dtype(results, dtype: str) -> str | None:
    """What is wrong with results of another dtype than that of the problem; None when nothing is."""
    other = next((found for _, found in kind_of(results) if found != dtype), None)
    return other and f"{WRONG}: dtype {other}, expected {dtype}"


def disagreement(ours, theirs, dtype: str) -> str | None:
    """What is different about two results that must be the same; None when they are.

    Parameters
    ----------
    ours, theirs : array, or tuple of them
        Whole results.
    dtype : str
        Of the problem.
    """
    ours, theirs = (x if isinstance(x, (tuple, list)) else (x,) for x in (ours, theirs))
    if kind_of(ours) != kind_of(theirs):
        return f"shapes or dtypes {kind_of(theirs)}, not {kind_of(ours)}"
    for n, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        worst = largest = 0.0
        for b in range(len(one)):  # one batch entry at a time, for memory
            x, y = (each[b].astype(np.float32) if isinstance(each, np.ndarray) else each[b].float() for each in (one, other))
            worst, largest = max(worst, float(abs(x - y).max())), max(largest, float(abs(x).max()))
        if not worst <= AGREEMENT[dtype] * largest:
            of = f" of result {n + 1}" if len(ours) > 1 else ""
            return f"an element{of} differs by {worst:.3g}, the largest is {largest:.3g}"
    return None


def fingerprint(arrays) -> list[int]:
    """A sum over the bits of each array, by which a changed one is known."""
    found = []
    for x in arrays:
        if isinstance(x, np.ndarray):
            words = np.ascontiguousarray(x).view(f"int{8 * x.dtype.itemsize}")
            found.append(int(words.sum(dtype=np.int64)))
        else:
            import torch

            kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
            found.append(int(x.contiguous().view(kind).sum(dtype=torch.int64)))
    return found


class Sample:
    """Exact results of all heads of the first and the last batch entry, at the first, the middle and the last rows.

    Parameters
    ----------
    cell : numbaflash.benchmarks.cells.Cell
    q, k, v : torch.Tensor
        Inputs of the cell.
    """

    def __init__(self, cell, q, k, v):
        self._shape = cell.problem.out_shape
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
        if not finite(out):
            return float("inf"), f"{WRONG}: NaN or infinite elements"
        try:
            return max(rule.compare(expected, out[self._batch, part]).out for part, expected in self._blocks), None
        except rule.AccuracyError as error:
            return float("inf"), f"{WRONG}: {error}"


class GradientSample:
    """Exact gradients of some key/value heads with their query heads: of the first one of the first batch entry, and of the last one of the last.

    Parameters
    ----------
    cell : numbaflash.benchmarks.cells.Cell
    dout, q, k, v : torch.Tensor
        Inputs of the cell.
    heads : list of (int, int), optional
        Batch entries and key/value heads to take instead.
    """

    def __init__(self, cell, dout, q, k, v, heads=None):
        group = cell.problem.group
        self._shapes = {name: cell.problem.shape_of(name) for name in ("dq", "dk", "dv")}
        problem = replace(cell.problem, batch=1, heads=group, kv_heads=1)
        self._parts = []
        for batch, head in sorted({(0, 0), (cell.batch - 1, cell.kv_heads - 1)} if heads is None else heads):
            entry, heads = slice(batch, batch + 1), slice(head * group, (head + 1) * group)
            rows, keys = (entry, slice(None), heads), (entry, slice(None), slice(head, head + 1))
            self._parts.append((rows, keys, rule.expected_gradients(problem, dout[rows], q[rows], k[keys], v[keys])))

    def judge(self, gradients) -> tuple[float, str | None]:
        """Largest error of a sampled element in units of its tolerance, and what is wrong with the gradients, or None.

        Parameters
        ----------
        gradients : tuple of torch.Tensor
            dq, dk and dv, whole.
        """
        fault = fault_of(dict(zip(self._shapes, gradients, strict=True)), self._shapes)
        if fault:
            return float("inf"), fault
        dq, dk, dv = gradients
        worst = 0.0
        try:
            for rows, keys, expected in self._parts:
                found = rule.compare_gradients(expected, dq[rows], dk[keys], dv[keys])
                worst = max(worst, found.dq, found.dk, found.dv)
        except rule.AccuracyError as error:
            return float("inf"), f"{WRONG}: {error}"
        return worst, None


class PackedSample:
    """`Sample` of the first, the longest and the last of packed sequences, each as a batch of its own.

    Parameters
    ----------
    cell : numbaflash.benchmarks.cells.PackedCell
    *arrays : torch.Tensor
        Inputs of the cell.
    """

    results = ("out",)

    def __init__(self, cell, *arrays):
        self._shapes = {name: cell.problem.shape_of(name) for name in self.results}
        ends = cell.boundaries
        chosen = dict.fromkeys((0, cell.lengths.index(cell.longest), len(cell.lengths) - 1))
        self._parts = []
        for place, number in enumerate(chosen):
            rows = slice(*ends[number : number + 2])
            head = (cell.kv_heads - 1) * place // max(1, len(chosen) - 1)
            self._parts.append((rows, self._of_one(cell.batch_of(1, cell.lengths[number]), [x[None, rows] for x in arrays], head)))

    @staticmethod
    def _of_one(cell, arrays, head):
        return Sample(cell, *arrays)

    def judge(self, found) -> tuple[float, str | None]:
        """As that of the samples of batches, of the whole results of packed sequences."""
        found = dict(zip(self.results, found if isinstance(found, (tuple, list)) else (found,), strict=True))
        fault = fault_of(found, self._shapes)
        if fault:
            return float("inf"), fault
        worst = 0.0
        for rows, sample in self._parts:
            one = [x[None, rows] for x in found.values()]
            error, complaint = sample.judge(one if len(one) > 1 else one[0])
            if complaint:
                return error, f"{complaint}, of the sequence at {rows.start}"
            worst = max(worst, error)
        return worst, None


class PackedGradientSample(PackedSample):
    """`GradientSample` likewise, of one key/value head of each sequence: the first, a middle one, the last."""

    results = ("dq", "dk", "dv")

    @staticmethod
    def _of_one(cell, arrays, head):
        return GradientSample(cell, *arrays, heads=[(0, head)])
