"""The libraries that take packed sequences, and numbaflash on the same sequences in a padded batch.

All of them get (tokens, heads, head_dim) arrays and the `cells.PackedCell` in the place of the mask, and return results in that layout, but for
the padded batch, whose results `Library.rows` brings into it.
"""

from __future__ import annotations

import itertools

from . import peers
from .peers import OURS, OURS_PADDED

MOST_SLOTS = 16  # of a padded batch, for each token: nobody would pad more, and the arrays take as many times the memory


def ends(torch, cell, like):
    """Boundaries of the sequences, int32 (sequences + 1,), where another tensor lies."""
    return torch.tensor(cell.boundaries, dtype=torch.int32, device=like.device)


class Packed(peers.Numbaflash):
    def bind(self, q, k, v, cell):
        forward, bounds = self._numbaflash.forward_varlen, self._bounds(q, cell)
        return lambda: forward(q, k, v, causal=cell.causal, **bounds)

    def bind_backward(self, dout, q, k, v, cell):
        bounds = self._bounds(q, cell)
        out, lse = self._numbaflash.forward_varlen(q, k, v, causal=cell.causal, return_lse=True, **bounds)
        backward = self._numbaflash.backward_varlen
        return lambda: backward(dout, q, k, v, out, lse, causal=cell.causal, **bounds)

    def evidence(self, q, k, v, cell, direction="forward"):
        return self._explained(q, k, v, causal=cell.causal, direction=direction, **self._bounds(q, cell))

    def _bounds(self, q, cell):
        cu_seqlens = ends(self._torch, cell, q)
        return {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": cell.longest, "max_seqlen_k": cell.longest}


class Padded(peers.Numbaflash):
    """A batch as long as the longest sequence, with lengths; packed arrays are copied into it before anything is timed."""

    name = OURS_PADDED

    def unfit(self, cell, free_bytes, direction="forward"):
        slots = len(cell.lengths) * cell.longest
        if slots > MOST_SLOTS * cell.tokens:
            return f"the batch would have {slots} slots for {cell.tokens} tokens, more than {MOST_SLOTS} for each"
        return None

    def bind(self, q, k, v, cell):
        forward, lengths = self._numbaflash.forward, self._lengths(q, cell)
        q, k, v = self._padded(cell, q, k, v)
        return lambda: forward(q, k, v, causal=cell.causal, **lengths)

    def bind_backward(self, dout, q, k, v, cell):
        backward, lengths = self._numbaflash.backward, self._lengths(q, cell)
        dout, q, k, v = self._padded(cell, dout, q, k, v)
        out, lse = self._numbaflash.forward(q, k, v, causal=cell.causal, return_lse=True, **lengths)
        return lambda: backward(dout, q, k, v, out, lse, causal=cell.causal, **lengths)

    def rows(self, results, cell):
        if not isinstance(results, (tuple, list)):
            return results.flatten(0, 1)[self._slots(results, cell)]
        return [self.rows(x, cell) for x in results]

    def evidence(self, q, k, v, cell, direction="forward"):
        return self._explained(*self._padded(cell, q, k, v), causal=cell.causal, direction=direction, **self._lengths(q, cell))

    def _padded(self, cell, *arrays):
        slots = self._slots(arrays[0], cell)
        shape = len(cell.lengths), cell.longest
        padded = [x.new_zeros(shape[0] * shape[1], *x.shape[1:]) for x in arrays]
        for into, x in zip(padded, arrays, strict=True):
            into[slots] = x
        return [x.unflatten(0, shape) for x in padded]

    def _slots(self, like, cell):
        """Where each token lies in the batch."""
        starts = zip(cell.lengths, itertools.count(step=cell.longest), strict=False)
        return self._torch.cat([self._torch.arange(first, first + length, device=like.device) for length, first in starts])

    def _lengths(self, q, cell):
        lengths = self._torch.tensor(cell.lengths, dtype=self._torch.int32, device=q.device)
        return {"seqlens_q": lengths, "seqlens_k": lengths}


class Fa4(peers.Fa4):
    function = "flash_attn_varlen_func"

    def bind(self, q, k, v, cell):
        cu_seqlens = ends(self._torch, cell, q)
        longest = {"max_seqlen_q": cell.longest, "max_seqlen_k": cell.longest}
        return self._bound(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **longest, causal=cell.causal)


class Fa2(peers.Library):
    """FlashAttention 2 as torch has it, which takes boundaries only below scaled_dot_product_attention."""

    name = "fa2"

    def bind(self, q, k, v, cell):
        attention, cu_seqlens, longest = self._torch.ops.aten._flash_attention_forward, ends(self._torch, cell, q), cell.longest
        return lambda: attention(q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, cell.causal, False)[0]


class Cudnn(peers.Library):
    """cuDNN as torch runs it for nested tensors."""

    name = "cudnn"

    def __init__(self):
        super().__init__()
        self.version = f"{self._torch.backends.cudnn.version()} ({self.version})"

    def bind(self, q, k, v, cell):
        attention, cu_seqlens, longest = self._torch.ops.aten._cudnn_attention_forward, ends(self._torch, cell, q), cell.longest
        gradients = any(x.requires_grad for x in (q, k, v))
        return lambda: attention(q, k, v, None, cu_seqlens, cu_seqlens, longest, longest, gradients, 0.0, cell.causal, False)[0]


LIBRARIES = {cls.name: cls for cls in (Packed, Padded, Fa4, Fa2, Cudnn)}
NAMES = tuple(LIBRARIES)
BESIDE = tuple(name for name in NAMES if name != OURS)
"""What is measured beside numbaflash's packed sequences."""
