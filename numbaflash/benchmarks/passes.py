"""What one call of a benchmark computes: attention, its gradients, or both through torch's autograd; of batches, or of packed sequences."""

from __future__ import annotations

from . import packed
from .accuracy import GradientSample, PackedGradientSample, PackedSample, Sample
from .cells import Cell, PackedCell, backward_flops, forward_flops
from .peers import LIBRARIES, NAMES, OURS, OURS_DETERMINISTIC


class Batches:
    """Of cells that are batches."""

    kind = Cell
    classes = LIBRARIES


class Packed:
    """Of packed sequences."""

    kind = PackedCell
    bench = "varlen"
    classes = packed.LIBRARIES
    libraries = known = packed.NAMES


class Forward(Batches):
    """Attention alone.

    Attributes
    ----------
    bench, direction : str
        As records name them.
    kind : class of numbaflash.benchmarks.cells
        Of the cells.
    operands : tuple of str
        Inputs of a call.
    classes : dict of str to class of numbaflash.benchmarks.peers
        The libraries by name.
    libraries, known : tuple of str
        What is measured if nothing else is asked for, and what can be.
    sample : class of numbaflash.benchmarks.accuracy
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
        return cell.count(forward_flops)

    @staticmethod
    def bind(library, arrays, cell):
        """A function without arguments that computes the results from the operands."""
        return library.bind(*arrays, cell.structure)

    @staticmethod
    def evidence(library, arrays, cell) -> dict:
        """Fields of a record that say which kernels were chosen."""
        return library.evidence(*arrays, cell.structure)


class Backward(Batches):
    """The gradients alone: the forward has run before, out and its log-sum-exp are there."""

    bench = direction = "backward"
    operands = ("dout", "q", "k", "v")
    libraries, known = (OURS, OURS_DETERMINISTIC, "fa4", "cudnn", "fa2"), tuple(LIBRARIES)
    sample = GradientSample
    autograd = True

    @staticmethod
    def flops(cell) -> int:
        return cell.count(backward_flops)

    @staticmethod
    def bind(library, arrays, cell):
        return library.bind_backward(*arrays, cell.structure)

    @staticmethod
    def evidence(library, arrays, cell) -> dict:
        return library.evidence(*arrays[1:], cell.structure, direction="backward")


class Training(Batches):
    """Forward and gradients, as a training step runs them through autograd."""

    bench, direction = "training", "forward+backward"
    operands = Backward.operands
    libraries, known = NAMES, tuple(LIBRARIES)
    sample = GradientSample
    autograd = True

    @staticmethod
    def flops(cell) -> int:
        return cell.count(forward_flops) + cell.count(backward_flops)

    @staticmethod
    def bind(library, arrays, cell):
        return library.bind_training(*arrays, cell.structure)

    @staticmethod
    def evidence(library, arrays, cell) -> dict:
        plans = {part: library.evidence(*arrays[1:], cell.structure, direction=part) for part in ("forward", "backward")}
        return {"plans": plans} if any(plans.values()) else {}


class PackedForward(Packed, Forward):
    """Attention of packed sequences; ``plain`` is that of batches."""

    plain, sample = Forward, PackedSample


class PackedBackward(Packed, Backward):
    """The gradients alone of packed sequences."""

    plain, sample = Backward, PackedGradientSample


PASSES = {what.__name__: what for what in (Forward, Backward, Training, PackedForward, PackedBackward)}
