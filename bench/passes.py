"""What one call of a benchmark computes: attention, its gradients, or both through torch's autograd."""

from __future__ import annotations

from .accuracy import GradientSample, Sample
from .cells import backward_flops, forward_flops
from .peers import LIBRARIES, NAMES, OURS, OURS_DETERMINISTIC


class Forward:
    """Attention alone.

    Attributes
    ----------
    bench, direction : str
        As records name them.
    operands : tuple of str
        Inputs of a call.
    libraries, known : tuple of str
        What is measured if nothing else is asked for, and what can be.
    sample : class of bench.accuracy
        Exact results to compare with.
    autograd : bool
        Whether torch must be allowed to record what is called.
    """

    bench = direction = "forward"
    operands = ("q", "k", "v")
    libraries = known = NAMES
    sample = Sample
    autograd = False

    @staticmethod
    def flops(cell) -> int:
        return forward_flops(cell.problem)

    @staticmethod
    def bind(library, arrays, causal):
        """A function without arguments that computes the results from the operands."""
        return library.bind(*arrays, causal)

    @staticmethod
    def evidence(library, arrays, causal) -> dict:
        """Fields of a record that say which kernels were chosen."""
        return library.evidence(*arrays, causal)


class Backward:
    """The gradients alone: the forward has run before, out and its log-sum-exp are there."""

    bench = direction = "backward"
    operands = ("dout", "q", "k", "v")
    libraries, known = (OURS, OURS_DETERMINISTIC, "fa4", "cudnn", "fa2"), tuple(LIBRARIES)
    sample = GradientSample
    autograd = True

    @staticmethod
    def flops(cell) -> int:
        return backward_flops(cell.problem)

    @staticmethod
    def bind(library, arrays, causal):
        return library.bind_backward(*arrays, causal)

    @staticmethod
    def evidence(library, arrays, causal) -> dict:
        return library.evidence(*arrays[1:], causal, direction="backward")


class Training:
    """Forward and gradients, as a training step runs them through autograd."""

    bench, direction = "training", "forward+backward"
    operands = Backward.operands
    libraries, known = NAMES, tuple(LIBRARIES)
    sample = GradientSample
    autograd = True

    @staticmethod
    def flops(cell) -> int:
        return forward_flops(cell.problem) + backward_flops(cell.problem)

    @staticmethod
    def bind(library, arrays, causal):
        return library.bind_training(*arrays, causal)

    @staticmethod
    def evidence(library, arrays, causal) -> dict:
        plans = {part: library.evidence(*arrays[1:], causal, direction=part) for part in ("forward", "backward")}
        return {"plans": plans} if any(plans.values()) else {}


PASSES = {what.direction: what for what in (Forward, Backward, Training)}
