"""A decoder-only transformer with random weights: RMSNorm, rotary positions, grouped-query attention, SwiGLU (as in Llama)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

EPSILON = 1e-5
ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    layers: int = 8
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 128
    feed_forward: int = 5632
    vocabulary: int = 32000

    def __post_init__(self):
        for name, n in vars(self).items():
            if not isinstance(n, int) or n < 1:
                raise ValueError(f"{name} must be a positive integer; got {n!r}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads; got {self.heads} and {self.kv_heads}")


class Model:
    """Weights on a device, and all of a layer but its attention.

    Parameters
    ----------
    shape : Shape
    positions : int
        Tokens of the longest sequence.
    """

    def __init__(self, shape: Shape, positions: int, device, dtype=torch.bfloat16, seed: int = 0):
        self.shape, self.device, self.dtype = shape, torch.device(device), dtype
        generator = torch.Generator(device=self.device).manual_seed(seed)

        def weights(n_out, n_in):
            return (torch.randn(n_out, n_in, generator=generator, device=self.device) * n_in**-0.5).to(dtype)

        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.embedding = weights(shape.vocabulary, shape.hidden) * shape.hidden**0.5
        self.layers = [
            {
                "qkv": weights(q + 2 * kv, shape.hidden),
                "out": weights(shape.hidden, q),
                "up": weights(2 * shape.feed_forward, shape.hidden),
                "down": weights(shape.hidden, shape.feed_forward),
            }
            for _ in range(shape.layers)
        ]
        frequencies = ROTARY_BASE ** -(torch.arange(0, shape.head_dim, 2, device=self.device, dtype=torch.float32) / shape.head_dim)
        angles = torch.arange(positions, device=self.device, dtype=torch.float32)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens, attend):
        """Logits of the last token of each row.

        Parameters
        ----------
        tokens : tensor of int64, (batch, length)
        attend : callable
            ``attend(layer, q, k, v)`` of (batch, length, heads, head_dim) and twice (batch, length, kv_heads, head_dim), before rotary
            positions, returns the output of attention, like q.

        Returns
        -------
        tensor, (batch, vocabulary)
        """
        shape = self.shape
        batch, length = tokens.shape
        sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
        x = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            qkv = (_normalise(x) @ layer["qkv"].T).view(batch, length, sum(sizes), shape.head_dim)
            attended = attend(number, *qkv.split(sizes, dim=2))
            x = x + attended.reshape(batch, length, -1) @ layer["out"].T
            gate, up = (_normalise(x) @ layer["up"].T).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ layer["down"].T
        return _normalise(x[:, -1]) @ self.embedding.T


def _normalise(x):
    return functional.rms_norm(x, x.shape[-1:], eps=EPSILON)


def rotate(x, cos, sin):
    """Rotary positions, half-split: ``cos`` and ``sin`` (..., length, head_dim / 2) of the positions of x, (..., length, heads, head_dim)."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)
