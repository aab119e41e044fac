"""What one call of a benchmark computes: attention, its gradients, or both through torch's autograd; of batches, or of packed sequences."""

from __future__ import annotations

import itertools

from . import packed, timing
from .accuracy import GradientSample, PackedGradientSample, PackedSample, Sample
from .cells import Cell, PackedCell, backward_flops, forward_flops
from .peers import LIBRARIES, NAMES, OURS, OURS_DETERMINISTIC


class Pass:
    """What a run does with a pass, which names its operands."""

    results = ("out",)

    @classmethod
    def inputs(cls, device, cell) -> list:
        """Input sets: random operands, so many that a call never finds its own in the L2 cache."""
        count = timing.input_sets(cell.bytes_of(*cls.operands), device.l2_bytes)
        return [device.inputs(cell, cls.operands, number) for number in range(count)]

    @classmethod
    def one_set(cls, device, cell) -> list:
        """A single one of them."""
        return [device.inputs(cell, cls.operands)]

    @staticmethod
    def count(sets) -> int:
        """How many there are."""
        return len(sets)

    @staticmethod
    def arrays(sets) -> list:
        """The operands of the first set."""
        return sets[0]

    @staticmethod
    def compared(sets) -> list:
        """The arrays whose bits must stay what they are."""
        return sets[0]

    @classmethod
    def calls(cls, library, sets, cell):
        """(call with the first set, call with the next set each time)."""
        bound = [cls.bind(library, arrays, cell) for arrays in sets]
        turn = itertools.cycle(bound)
        return bound[0], lambda: next(turn)()

    @staticmethod
    def timed_call(device, library, sets, cell, turn, sample, note):
        """(`timing.Call`, facts for the record) of the call with the next set each time."""
        return timing.Call(turn, library.scope), {}

    @classmethod
    def figures(cls, cell, ms: float) -> dict:
        """Fields of a record that follow from the time of a call."""
        return {"tflops": cls.flops(cell) / ms / 1e9}

    @classmethod
    def room(cls, cell, l2_bytes: int) -> int:
        """Bytes of all input sets and of three results: ours, a peer's, and the one before it."""
        size = cell.bytes_of(*cls.operands)
        return size * timing.input_sets(size, l2_bytes) + 3 * cell.bytes_of(*cls.results)


class Batches(Pass):
    """Of cells that are batches."""

    kind = Cell
    classes = LIBRARIES


class Packed(Pass):
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
    operands, results : tuple of str
        Of a call.
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
    operands, results = ("dout", "q", "k", "v"), ("dq", "dk", "dv")
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
    operands, results = Backward.operands, Backward.results
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
