"""Ways to compute the attention of a server's model over a cache of keys and values.

An engine serves a fixed number of slots, a sequence each. Prompts come in chunks of one slot, answers a token a step for all slots at once; a slot
that is not answering has a length below 0.
"""

from __future__ import annotations

import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from .. import append_kv, decode, forward
from .model import Model, rotate


class Engine:
    """What all engines have.

    Parameters
    ----------
    model : Model
    slots : int
    capacity : int
        Tokens of a slot at most.
    """

    name = ""

    def __init__(self, model: Model, slots: int, capacity: int):
        self.model, self.slots, self.capacity = model, slots, capacity
        self._prompts = {}

    def _empty(self, *shape):
        return torch.zeros(*shape, device=self.model.device, dtype=self.model.dtype)

    def reserve(self, slot: int, tokens: int) -> bool:
        """Make room for a sequence of so many tokens; False where there is none now."""
        shape = self.model.shape
        if tokens > self.capacity:
            raise ValueError(f"a sequence of {tokens} tokens does not fit a slot of {self.capacity}")
        self._prompts[slot] = tuple(self._empty(shape.layers, 1, tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
        return True

    def release(self, slot: int) -> None:
        """Give the room of a sequence back."""

    def prefill(self, slot: int, start: int, layer: int, q, k, v):
        """Attention of a chunk of a prompt, which begins at a position. Keys and values of a prompt are kept row-major until it is complete."""
        end = start + q.shape[1]
        cos, sin = self.model.cos[start:end], self.model.sin[start:end]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys, values = (x[layer] for x in self._prompts[slot])
        keys[:, start:end], values[:, start:end] = k, v
        return self.attend_prompt(q, keys[:, :end], values[:, :end])

    def finish_prompt(self, slot: int, tokens: int) -> None:
        """A prompt is complete: put its keys and values into the cache."""
        self.keep(slot, *(x[:, 0, :tokens] for x in self._prompts.pop(slot)))

    def variant(self, longest: int) -> int:
        """What a step that has been captured depends on beside the contents of arrays, when the longest sequence has so many tokens."""
        return 0

    # ---- what each engine has of its own

    def attend_prompt(self, q, k, v):
        """Causal attention, the last query beside the last key."""
        raise NotImplementedError

    def keep(self, slot: int, keys, values) -> None:
        """Keys and values (layers, tokens, kv_heads, head_dim) of a slot's first tokens to the cache."""
        raise NotImplementedError

    def step(self, layer: int, q, k, v, lengths, variant: int):
        """Attention of one token a slot; ``lengths`` (slots,) int32 are the tokens before it."""
        raise NotImplementedError


class Numbaflash(Engine):
    """Pages, `numbaflash.append_kv` and `numbaflash.decode`."""

    name = "numbaflash"
    page_size = 64

    def __init__(self, model, slots, capacity):
        super().__init__(model, slots, capacity)
        shape, each = model.shape, -(-capacity // self.page_size)
        self._caches = [self._empty(shape.layers, slots * each, self.page_size, shape.kv_heads, shape.head_dim) for _ in range(2)]
        self._free = list(range(slots * each))
        self._used = {}
        self._table = torch.full((slots, each), -1, device=model.device, dtype=torch.int32)

    def reserve(self, slot, tokens):
        needed = -(-tokens // self.page_size)
        if needed > len(self._free) or not super().reserve(slot, tokens):
            return False
        pages = self._used[slot] = [self._free.pop() for _ in range(needed)]
        self._table[slot, :needed] = torch.tensor(pages, dtype=torch.int32, device=self.model.device)
        return True

    def release(self, slot):
        self._free += self._used.pop(slot)
        self._table[slot] = -1

    def attend_prompt(self, q, k, v):
        return forward(q, k, v, causal=True)

    def keep(self, slot, keys, values):
        none = torch.zeros(1, device=self.model.device, dtype=torch.int32)
        for layer in range(self.model.shape.layers):
            append_kv(keys[layer][None], values[layer][None], self._caches[0][layer], self._caches[1][layer], none, self._table[slot : slot + 1])

    def step(self, layer, q, k, v, lengths, variant):
        keys, values = (x[layer] for x in self._caches)
        q = append_kv(k, v, keys, values, lengths, self._table, q=q, cos=self.model.cos, sin=self.model.sin)
        return decode(q, keys, values, lengths + 1, self._table)


class Torch(Engine):
    """A contiguous cache and the fastest of PyTorch's own ways to attend to it, chosen by a measurement.

    The heads of a group stand in the place of queries, so that every back end that takes a mask can be tried.
    """

    name = "torch"
    bucket = 256  # keys to which the longest sequence is rounded up: a step computes those of every slot
    backends = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)

    def __init__(self, model, slots, capacity):
        super().__init__(model, slots, capacity)
        shape = model.shape
        self._room = -(-capacity // self.bucket) * self.bucket
        # One row more takes what slots that are not answering write.
        self._caches = [self._empty(shape.layers, slots, shape.kv_heads, self._room + 1, shape.head_dim) for _ in range(2)]
        self._numbers = torch.arange(slots, device=model.device)
        self._places = torch.arange(self._room, device=model.device)
        self.backend = self._fastest()

    def _fastest(self):
        """The back end that is fastest at half the capacity; the first that works, on the CPU."""
        shape, found = self.model.shape, {}
        q = torch.randn(self.slots, 1, shape.heads, shape.head_dim, device=self.model.device).to(self.model.dtype)
        lengths = torch.full((self.slots,), max(self._room // 2, 1), device=self.model.device, dtype=torch.int32)
        for backend in self.backends:
            self.backend = backend
            try:
                found[backend] = _milliseconds(lambda: self._attend(0, q, lengths, self._room))
            except RuntimeError:  # not for this device or shape
                continue
        if not found:
            raise RuntimeError("no back end of torch's scaled_dot_product_attention takes this model's shapes")
        return min(found, key=found.get)

    def attend_prompt(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if q.shape[2] == k.shape[2]:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2])).transpose(1, 2)

    def keep(self, slot, keys, values):
        for cache, x in zip(self._caches, (keys, values), strict=True):
            cache[:, slot, :, : x.shape[1]] = x.transpose(1, 2)

    def variant(self, longest):
        return min(-(-(longest + 1) // self.bucket) * self.bucket, self._room)

    def step(self, layer, q, k, v, lengths, variant):
        position = lengths.clamp(min=0).long()
        cos, sin = self.model.cos[position][:, None], self.model.sin[position][:, None]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        place = torch.where(lengths < 0, self._room, lengths).long()
        for cache, x in zip(self._caches, (k, v), strict=True):
            cache[layer][self._numbers, :, place] = x[:, 0]
        return self._attend(layer, q, lengths, variant)

    def _attend(self, layer, q, lengths, keys):
        slots, _, heads, head_dim = q.shape
        k, v = (x[layer, :, :, :keys] for x in self._caches)
        mask = (self._places[:keys] <= lengths[:, None].clamp(min=0))[:, None, None]
        with sdpa_kernel(self.backend):
            out = scaled_dot_product_attention(q.view(slots, k.shape[1], -1, head_dim), k, v, attn_mask=mask)
        return out.reshape(slots, 1, heads, head_dim)


class Nothing(Engine):
    """No attention at all: what is left of the time is not attention's to gain (Amdahl's law). Its tokens mean nothing."""

    name = "none"

    def reserve(self, slot, tokens):
        return True

    def prefill(self, slot, start, layer, q, k, v):
        return q

    def finish_prompt(self, slot, tokens):
        pass

    def step(self, layer, q, k, v, lengths, variant):
        return q


ENGINES = {each.name: each for each in (Numbaflash, Torch, Nothing)}


def _milliseconds(work, calls=5) -> float:
    if not torch.cuda.is_available():
        work()
        return 0.0
    times = []
    for _ in range(calls):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])
