"""Other libraries' attention by their own names: signatures and meaning, against the plain formula in torch.

The masks of xformers are stood in for by classes of the same names and attributes, as xformers' documentation and sources tell them.
"""

from __future__ import annotations

import inspect
import itertools
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import numbaflash  # noqa: E402
from numbaflash.compat.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from numbaflash.compat.xformers import memory_efficient_attention  # noqa: E402


def tensors(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def plain(q, k, v, *, scale=None, softcap=None, bias=None, seen=None):
    """(out, lse) of (batch, seqlen, heads, head_dim) tensors by the formula; ``seen`` of (seqlen_q, seqlen_k)."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.repeat_interleave(group, 2).transpose(1, 2), v.repeat_interleave(group, 2).transpose(1, 2)
    score = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    if seen is not None:
        score = score.masked_fill(~seen, -math.inf)
        weights = torch.where(seen.any(-1, keepdim=True), torch.softmax(score, -1), 0)
    else:
        weights = torch.softmax(score, -1)
    return (weights @ v).transpose(1, 2), torch.logsumexp(score, -1)


def band(seqlen_q, seqlen_k, low=None, high=None, offset=None):
    """Where ``low <= key - (query + offset) <= high``; the offset is at the bottom right unless told."""
    offset = seqlen_k - seqlen_q if offset is None else offset
    away = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - offset
    return (away >= (-(10**6) if low is None else low)) & (away <= (10**6 if high is None else high))


def same(found, wanted, *inputs):
    """Equal results, and equal gradients of a sum that weighs every element otherwise."""
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    weight = torch.linspace(-1, 1, found.numel(), dtype=found.dtype).reshape(found.shape)
    for got, want in zip(*(torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-9)


# flash_attn

SIGNATURE = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
SIGNATURE += "return_attn_probs=False)"


def test_flash_attn_signatures():
    assert str(inspect.signature(flash_attn_func)) == f"(q, k, v, {SIGNATURE}"
    assert str(inspect.signature(flash_attn_kvpacked_func)) == f"(q, kv, {SIGNATURE}"
    assert str(inspect.signature(flash_attn_qkvpacked_func)) == f"(qkv, {SIGNATURE}"
    varlen = f"(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {SIGNATURE[:-1]}, block_table=None)"
    assert str(inspect.signature(flash_attn_varlen_func)) == varlen


@pytest.mark.parametrize(
    "options, low, high",
    [
        ({}, None, None),
        ({"causal": True}, None, 0),
        ({"window_size": (3, -1)}, -3, None),
        ({"window_size": (-1, 2)}, None, 2),
        ({"window_size": (0, 0)}, 0, 0),
        ({"causal": True, "window_size": (2, 5)}, -2, 0),
        ({"causal": True, "window_size": (-1, -1), "deterministic": True}, None, 0),
    ],
)
@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5)])
def test_flash_attn_sees_what_flash_attn_sees(options, low, high, lengths):
    q, k, v = tensors((2, lengths[0], 4, 8), (2, lengths[1], 2, 8), (2, lengths[1], 2, 8))
    same(flash_attn_func(q, k, v, **options), plain(q, k, v, seen=band(*lengths, low, high))[0], q, k, v)


def test_flash_attn_alibi_softcap_and_scale():
    q, k, v = tensors((2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    away = (torch.arange(6)[:, None] + 3 - torch.arange(9)).abs()
    for slopes in (torch.rand(4), torch.rand(2, 4)):
        bias = -(slopes.double()[..., None, None] * away)
        want = plain(q, k, v, scale=0.7, softcap=2.0, bias=bias if slopes.dim() == 2 else bias[None])[0]
        same(flash_attn_func(q, k, v, 0.0, 0.7, False, (-1, -1), 2.0, slopes), want, q, k, v)
    for softcap in (0.0, -1.0, 0):
        same(flash_attn_func(q, k, v, softcap=softcap), plain(q, k, v)[0], q, k, v)


def test_flash_attn_packed():
    (qkv,) = tensors((2, 6, 3, 4, 8))
    q, k, v = qkv.unbind(2)
    same(flash_attn_qkvpacked_func(qkv, causal=True, window_size=(2, 0)), plain(q, k, v, seen=band(6, 6, -2, 0))[0], qkv)
    q, kv = tensors((2, 6, 4, 8), (2, 9, 2, 2, 8))
    same(flash_attn_kvpacked_func(q, kv, softmax_scale=0.4, causal=True), plain(q, *kv.unbind(2), scale=0.4, seen=band(6, 9, None, 0))[0], q, kv)


def test_flash_attn_varlen():
    q, k, v = tensors((11, 4, 8), (13, 2, 8), (13, 2, 8))
    ends_q, ends_k = torch.tensor([0, 4, 11], dtype=torch.int32), torch.tensor([0, 7, 13], dtype=torch.int32)
    out, lse, weights = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 7, 7, causal=True, window_size=(3, 0), return_attn_probs=True)
    want = [
        flash_attn_func(q[None, a:b], k[None, c:d], v[None, c:d], causal=True, window_size=(3, 0), return_attn_probs=True)
        for a, b, c, d in ((0, 4, 0, 7), (4, 11, 7, 13))
    ]
    same(out, torch.cat([each[0][0] for each in want]), q, k, v)
    torch.testing.assert_close(lse, torch.cat([each[1][0] for each in want], 1))
    assert weights.shape == (0,)
    with pytest.raises(numbaflash.UnsupportedError, match="block_table: keys and values in pages"):
        flash_attn_varlen_func(q, k, v, ends_q, ends_k, 7, 7, block_table=ends_q[None])


def test_flash_attn_returns_three_without_dropout():
    q, k, v = tensors((2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    out, lse, weights = flash_attn_func(q, k, v, return_attn_probs=True)
    want, want_lse = plain(q, k, v)
    same(out, want, q, k, v)
    torch.testing.assert_close(lse, want_lse)
    assert weights.shape == (0,) and len(flash_attn_kvpacked_func(q, torch.stack((k, v), 2), return_attn_probs=True)) == 3
    with pytest.raises(numbaflash.UnsupportedError, match="return_attn_probs with dropout_p"):
        flash_attn_func(q, k, v, 0.1, return_attn_probs=True)


def test_flash_attn_drops_by_torchs_generator():
    q, k, v = tensors((1, 64, 2, 8), (1, 64, 2, 8), (1, 64, 2, 8))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(flash_attn_func(q, k, v.detach() * 0 + 1, dropout_p=0.3))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert abs(outs[0].mean().item() - 1) < 0.05 and outs[0].std() > 0.01


@pytest.mark.parametrize(
    "error, words, options",
    [
        (TypeError, "window_size must be a pair of integers", {"window_size": 3}),
        (TypeError, "window_size must be a pair of integers", {"window_size": (None, 0)}),
        (ValueError, "window_size must be -1 .unbounded. or at least 0", {"window_size": (-2, 0)}),
        (TypeError, "causal must be True or False", {"causal": "top_left"}),
        (TypeError, "softcap must be a real number", {"softcap": "no"}),
        (TypeError, "softcap must be a real number", {"softcap": False}),
        (ValueError, "dropout must be at least 0 and below 1", {"dropout_p": 1.0}),
        (TypeError, "dropout must be a real number", {"dropout_p": None}),
        (TypeError, "dropout must be a real number", {"dropout_p": False}),
        (TypeError, "alibi_slopes must be float32", {"alibi_slopes": torch.ones(4, dtype=torch.float64)}),
        (TypeError, "deterministic must be", {"deterministic": 1}),
        (TypeError, "return_attn_probs must be", {"return_attn_probs": 1}),
    ],
)
def test_flash_attn_refuses(error, words, options):
    q, k, v = tensors((2, 6, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    with pytest.raises(error, match=words):
        flash_attn_func(q, k, v, **options)


def test_flash_attn_refuses_other_shapes():
    (q,) = tensors((2, 6, 4, 8))
    with pytest.raises(ValueError, match=r"qkv must have 5 axes \(batch, seqlen, 3, heads, head_dim\); got shape \(2, 6, 4, 8\)"):
        flash_attn_qkvpacked_func(q)
    with pytest.raises(ValueError, match="kv must have 5 axes"):
        flash_attn_kvpacked_func(q, torch.zeros(2, 6, 3, 4, 8))
    with pytest.raises(TypeError, match="kv must be a torch tensor; got ndarray"):
        flash_attn_kvpacked_func(q, torch.zeros(2, 6, 2, 4, 8).numpy())


# flash_attn with a cache


def cached(lengths=(5, 0, 11), page_size=None, seqlen_q=1, new=0, heads=4, kv_heads=2, dim=8, capacity=24, dtype=torch.float64, seed=0):
    """Arguments of `flash_attn_with_kvcache`; slots that nobody uses are NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    table = None
    if page_size is not None:
        columns = -(-capacity // page_size)
        table = torch.randperm(batch * columns, generator=generator).reshape(batch, columns).int()
    rows = (batch, capacity) if page_size is None else (batch * columns, page_size)
    caches = [torch.full((*rows, kv_heads, dim), math.nan, dtype=dtype) for _ in "kv"]
    for b, length in enumerate(lengths):
        for position in range(length):
            for x in caches:
                Rows(x, table, b)[position] = random(kv_heads, dim)
    found = {"q": random(batch, seqlen_q, heads, dim), "k_cache": caches[0], "v_cache": caches[1], "block_table": table}
    if new:
        found |= {name: random(batch, new, kv_heads, dim) for name in "kv"}
    return found | {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}


class Rows:
    """The keys of a sequence, one after the other, wherever they lie."""

    def __init__(self, cache, table, b):
        self.cache, self.table, self.b = cache, table, b

    def __setitem__(self, position, row):
        self.cache[self._place(position)] = row

    def __getitem__(self, position):
        return self.cache[self._place(position)]

    def _place(self, position):
        if self.table is None:
            return self.b, position
        size = self.cache.shape[1]
        return int(self.table[self.b, position // size]), position % size


def rotated(x, position, cos, sin, interleaved):
    """(heads, head_dim) turned by complex numbers."""
    n = cos.shape[1]
    pairs = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(0, n), slice(n, 2 * n))
    x, turn = x.clone(), torch.complex(cos[position], sin[position])
    z = torch.complex(*(x[:, pair] for pair in pairs)) * turn
    x[:, pairs[0]], x[:, pairs[1]] = z.real, z.imag
    return x


def plain_with_cache(
    q, k_cache, v_cache, cache_seqlens, k=None, v=None, table=None, cos=None, sin=None, interleaved=True, low=None, high=None, **options
):
    """(out, lse) sequence by sequence, the caches written in place."""
    outs, lses = [], []
    for b, length in enumerate(cache_seqlens.tolist()):
        rows, turned = [Rows(x, table, b) for x in (k_cache, v_cache)], q[b].clone()
        if k is not None:
            for i in range(k.shape[1]):
                rows[0][length + i] = k[b, i] if cos is None else rotated(k[b, i], length + i, cos, sin, interleaved)
                rows[1][length + i] = v[b, i]
            if cos is not None:
                for i in range(len(turned)):
                    turned[i] = rotated(q[b, i], length + (0 if low is None and high is None else i), cos, sin, interleaved)
            length += k.shape[1]
        keys, values = (torch.stack([x[n] for n in range(length)]) if length else x.cache.new_zeros(0, *x.cache.shape[2:]) for x in rows)
        out, lse = plain(turned[None], keys[None], values[None], seen=band(len(turned), length, low, high), **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses)


def check_with_cache(given, options=None, **wanted):
    """Results and caches are those of the plain computation."""
    other = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    names = {"block_table": "table", "rotary_cos": "cos", "rotary_sin": "sin", "rotary_interleaved": "interleaved"}
    want, want_lse = plain_with_cache(**{names.get(name, name): x for name, x in other.items()}, **wanted)
    out, lse = flash_attn_with_kvcache(**given, **(options or {}), return_softmax_lse=True)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, want_lse, rtol=1e-9, atol=1e-9)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(given[name], other[name], equal_nan=True, rtol=1e-9, atol=1e-9)
    return out


def test_flash_attn_with_kvcache_signature():
    told = "(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    told += "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
    told += "num_splits=0, return_softmax_lse=False, *, page_table=None)"
    assert str(inspect.signature(flash_attn_with_kvcache)) == told


@pytest.mark.parametrize("page_size", [None, 1, 5, 8])
@pytest.mark.parametrize(
    "options, wanted",
    [
        ({}, {}),
        ({"causal": True}, {"high": 0}),
        ({"causal": True, "window_size": (3, -1)}, {"low": -3, "high": 0}),
        ({"window_size": (2, 1)}, {"low": -2, "high": 1}),
        ({"softmax_scale": 0.7, "softcap": 2.0, "num_splits": 3}, {"scale": 0.7, "softcap": 2.0}),
    ],
)
@pytest.mark.parametrize("seqlen_q, new", [(1, 0), (1, 1), (4, 4), (3, 0), (2, 5)])
def test_flash_attn_with_kvcache(page_size, options, wanted, seqlen_q, new):
    check_with_cache(cached(page_size=page_size, seqlen_q=seqlen_q, new=new), options, **wanted)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("options, wanted", [({}, {}), ({"causal": True}, {"high": 0}), ({"window_size": (6, 2)}, {"low": -6, "high": 2})])
@pytest.mark.parametrize("seqlen_q, new", [(1, 1), (3, 3), (2, 5), (4, 1)])
def test_flash_attn_with_kvcache_turns_queries_and_new_keys(interleaved, rotary_dim, options, wanted, seqlen_q, new):
    angles = torch.arange(24, dtype=torch.float64)[:, None] / 10 ** torch.linspace(0, 1, rotary_dim // 2, dtype=torch.float64)
    given = cached(page_size=5 if seqlen_q == 3 else None, seqlen_q=seqlen_q, new=new, capacity=20)
    check_with_cache(given | {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}, options, **wanted)


def test_flash_attn_with_kvcache_takes_a_number_entries_and_alibi():
    given = cached((6, 6, 6), new=2, seqlen_q=2)
    check_with_cache(given | {"cache_seqlens": torch.tensor([6, 6, 6])}, {"causal": True}, high=0)
    again = cached((6, 6, 6), new=2, seqlen_q=2)
    out = flash_attn_with_kvcache(**again | {"cache_seqlens": 6}, causal=True)
    torch.testing.assert_close(out, flash_attn_with_kvcache(**cached((6, 6, 6), new=2, seqlen_q=2), causal=True))
    full = cached((24, 24))
    del full["cache_seqlens"]
    torch.testing.assert_close(flash_attn_with_kvcache(**full), flash_attn_func(full["q"], full["k_cache"], full["v_cache"]))

    given, entries = cached((5, 0, 11), new=2, seqlen_q=2), torch.tensor([2, 0], dtype=torch.int32)
    want = flash_attn_with_kvcache(**cached((5, 0, 11), new=2, seqlen_q=2), causal=True)
    before = given["k_cache"].clone()
    some = {name: given[name][[2, 0]] for name in ("q", "k", "v", "cache_seqlens")}
    out = flash_attn_with_kvcache(k_cache=given["k_cache"], v_cache=given["v_cache"], cache_batch_idx=entries, causal=True, **some)
    torch.testing.assert_close(out, want[[2, 0]])
    torch.testing.assert_close(given["k_cache"][1], before[1], equal_nan=True)

    for slopes in (torch.rand(4), torch.rand(3, 4)):
        given = cached((7, 7, 7), 5, seqlen_q=3, new=3)
        away = (torch.arange(3)[:, None] + 7 - torch.arange(10)).abs()
        each = slopes.double().expand(3, 4)
        table = given.pop("block_table")
        found = flash_attn_with_kvcache(**{x: y.clone() for x, y in given.items()}, page_table=table, alibi_slopes=slopes, causal=True)
        for b in range(3):
            one = {name: x[b : b + 1] if name in ("q", "k", "v", "cache_seqlens") else x.clone() for name, x in given.items()}
            want, _ = plain_with_cache(**one, table=table[b : b + 1], high=0, bias=-each[b][None, :, None, None] * away)
            torch.testing.assert_close(found[b : b + 1], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(
    "options, wanted", [({}, {}), ({"causal": True}, {"high": 0}), ({"causal": True, "window_size": (30, 0)}, {"low": -30, "high": 0})]
)
def test_flash_attn_with_kvcache_of_many_queries(page_size, options, wanted):
    given = cached((5, 0, 70), page_size, seqlen_q=150, new=150, capacity=224)
    check_with_cache(given, options, **wanted)
    with_splits = flash_attn_with_kvcache(**cached((5, 0, 70), page_size, seqlen_q=70, capacity=224), num_splits=2, **options)
    assert with_splits.shape == (3, 70, 4, 8)


@pytest.mark.parametrize(
    "error, words, options",
    [
        (numbaflash.UnsupportedError, "cache_leftpad: padding in front", {"cache_leftpad": torch.zeros(3, dtype=torch.int32)}),
        (ValueError, "block_table and page_table are two names", {"page_table": torch.zeros(3, 3, dtype=torch.int32)}),
        (ValueError, "cache_batch_idx is for caches without pages", {"cache_batch_idx": torch.zeros(3, dtype=torch.int32)}),
        (ValueError, "k and v must be given together; got k alone", {"k": torch.zeros(3, 1, 2, 8)}),
        (ValueError, "rotary_cos and rotary_sin must be given together", {"rotary_cos": torch.zeros(24, 4)}),
        (ValueError, "got no k and v", {"rotary_cos": torch.zeros(24, 4), "rotary_sin": torch.zeros(24, 4)}),
        (TypeError, "cache_seqlens must be a torch tensor or an int; got float", {"cache_seqlens": 3.0}),
        (ValueError, "cache_seqlens must be from 0 to the capacity of 25 keys; got 26", {"cache_seqlens": 26}),
        (ValueError, "num_splits must be", {"num_splits": -1}),
        (TypeError, "num_splits must be", {"num_splits": False}),
        (TypeError, "causal must be True or False", {"causal": "top_left"}),
        (TypeError, "return_softmax_lse must be", {"return_softmax_lse": 1}),
        (TypeError, "block_table must be a torch tensor .batch, max_pages.; got list", {"block_table": [[1]]}),
        (ValueError, "block_table must be a torch tensor .batch, max_pages.; got shape", {"block_table": torch.zeros(3, dtype=torch.int32)}),
        (TypeError, "page_table must be int32", {"block_table": torch.zeros(3, 5, dtype=torch.int64)}),
        (TypeError, "q must be a torch tensor; got NoneType", {"q": None}),
        (ValueError, "v_cache must have 4 axes", {"v_cache": torch.zeros(3, 2, 8)}),
        (TypeError, "k must be a torch tensor", {"k": 3, "v": 4}),
    ],
)
def test_flash_attn_with_kvcache_refuses(error, words, options):
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(**cached(page_size=5) | options)


def test_flash_attn_with_kvcache_refuses_what_needs_more():
    given = cached(new=1)
    with pytest.raises(ValueError, match="cache_seqlens must say where k and v go"):
        flash_attn_with_kvcache(**given | {"cache_seqlens": None})
    with pytest.raises(ValueError, match="rotary_cos must have a row for each of the 24 positions of the cache; got 23"):
        flash_attn_with_kvcache(**given, rotary_cos=torch.zeros(23, 4, dtype=torch.float64), rotary_sin=torch.zeros(23, 4, dtype=torch.float64))
    for entries, error, words in (
        ([0, 1, 2], TypeError, "cache_batch_idx must be a torch tensor of int32 or int64; got list"),
        (torch.zeros(3), TypeError, "got torch.float32"),
        (torch.zeros(2, dtype=torch.int32), ValueError, "one number for each sequence"),
    ):
        with pytest.raises(error, match=words):
            flash_attn_with_kvcache(**given, cache_batch_idx=entries)
    many = cached(page_size=5, seqlen_q=65)
    for options in ({"window_size": (4, 4)}, {"alibi_slopes": torch.ones(4)}):
        with pytest.raises(numbaflash.UnsupportedError, match="over pages, a window or ALiBi without causal .* 64 queries a sequence; got 65"):
            flash_attn_with_kvcache(**many, **options)


# xformers


class LowerTriangularMask:
    def materialize(self, shape, dtype, device): ...


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias):
        self._subtensor = bias


class LowerTriangularFromBottomRightMask(LowerTriangularMask): ...


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    def __init__(self, window_size):
        self._window_size = window_size


class LocalAttentionFromBottomRightMask(LowerTriangularMask):
    def __init__(self, window_left, window_right):
        self.window_left, self.window_right = window_left, window_right


class SeqLenInfo:
    def __init__(self, lengths):
        self.seqstart_py = [0, *itertools.accumulate(lengths)]
        self.seqstart, self.max_seqlen = torch.tensor(self.seqstart_py, dtype=torch.int32), max(lengths, default=-1)


class BlockDiagonalMask(LowerTriangularMask):
    def __init__(self, lengths_q, lengths_k, window_size=None):
        self.q_seqinfo, self.k_seqinfo = SeqLenInfo(lengths_q), SeqLenInfo(lengths_k)
        if window_size is not None:
            self._window_size = window_size


class BlockDiagonalCausalMask(BlockDiagonalMask): ...


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask): ...


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask): ...


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask): ...


class BlockDiagonalPaddedKeysMask(BlockDiagonalMask): ...


@pytest.mark.parametrize(
    "mask, limits",
    [
        (None, {}),
        (LowerTriangularMask(), {"high": 0, "offset": 0}),
        (LowerTriangularFromBottomRightMask(), {"high": 0}),
        (LowerTriangularFromBottomRightLocalAttentionMask(3), {"low": -2, "high": 0}),
        (LocalAttentionFromBottomRightMask(1, 2), {"low": -1, "high": 2}),
    ],
    ids=lambda x: type(x).__name__,
)
@pytest.mark.parametrize("lengths", [(6, 6), (5, 9)])
def test_xformers_masks(mask, limits, lengths):
    q, k, v = tensors((2, lengths[0], 3, 8), (2, lengths[1], 3, 8), (2, lengths[1], 3, 10))
    same(memory_efficient_attention(q, k, v, mask, scale=0.3), plain(q, k, v, scale=0.3, seen=band(*lengths, **limits))[0], q, k, v)


@pytest.mark.parametrize(
    "kind, limits",
    [
        (BlockDiagonalMask, {}),
        (BlockDiagonalCausalMask, {"high": 0, "offset": 0}),
        (BlockDiagonalCausalFromBottomRightMask, {"high": 0}),
        (BlockDiagonalCausalLocalAttentionMask, {"low": -2, "high": 0, "offset": 0}),
        (BlockDiagonalCausalLocalAttentionFromBottomRightMask, {"low": -2, "high": 0}),
    ],
)
def test_xformers_packed_sequences(kind, limits):
    lengths_q, lengths_k = (4, 0, 5, 1), (6, 2, 5, 7)
    mask = kind(lengths_q, lengths_k, 3 if "low" in limits else None)
    seen = torch.block_diag(*(band(n, m, **limits).expand(n, m) for n, m in zip(lengths_q, lengths_k, strict=True))).bool()
    q, k, v = tensors((1, 10, 3, 8), (1, 20, 3, 8), (1, 20, 3, 10))
    same(memory_efficient_attention(q, k, v, mask, scale=0.3), plain(q, k, v, scale=0.3, seen=seen)[0], q, k, v)
    found = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], mask)
    same(found, plain(q[:, :, :1], k[:, :, :1], v[:, :, :1], seen=seen)[0][:, :, 0], q, k, v)
    wide = [x.unsqueeze(2) for x in (q, k, v)]
    same(memory_efficient_attention(*wide, mask), plain(q, k, v, seen=seen)[0].unsqueeze(2), q, k, v)
    for message, arrays in (
        ("query must have the 10 rows .axis 1. of the sequences of attn_bias; got 9", (q[:, 1:], k, v)),
        ("key must have the 20 rows", (q, k[:, :3], v)),
        (f"query must have a batch .axis 0. of 1 with {kind.__name__}", [x.expand(2, -1, -1, -1) for x in (q, k, v)]),
    ):
        with pytest.raises(ValueError, match=message):
            memory_efficient_attention(*arrays, mask)


def test_xformers_bias():
    q, k, v, bias = tensors((2, 5, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8), (1, 3, 5, 9))
    same(memory_efficient_attention(q, k, v, bias), plain(q, k, v, bias=bias)[0], q, k, v, bias)
    wanted = plain(q, k, v, bias=bias, seen=band(5, 9, high=0, offset=0))[0]
    same(memory_efficient_attention(q, k, v, LowerTriangularMaskWithTensorBias(bias)), wanted, q, k, v, bias)
    old = LowerTriangularMaskWithTensorBias(None)
    del old._subtensor
    old._bias = bias
    same(memory_efficient_attention(q, k, v, old), wanted, q, k, v, bias)


def test_xformers_without_heads_and_with_groups():
    q, k, v, bias = tensors((2, 5, 8), (2, 9, 8), (2, 9, 6), (2, 5, 9))
    wanted = plain(q[:, :, None], k[:, :, None], v[:, :, None], bias=bias[:, None])[0][:, :, 0]
    same(memory_efficient_attention(q, k, v, bias), wanted, q, k, v, bias)
    q, k, v, bias = tensors((2, 5, 2, 3, 8), (2, 9, 2, 1, 8), (2, 9, 2, 1, 8), (1, 2, 3, 5, 9))
    wide = [x.expand(-1, -1, -1, 3, -1) for x in (k, v)]
    wanted = plain(q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0], bias=bias.flatten(1, 2))[0].unflatten(2, (2, 3))
    same(memory_efficient_attention(q, *wide, bias), wanted, q, k, v, bias)
    same(memory_efficient_attention(q, *(x.contiguous() for x in wide), bias), wanted, q, k, v, bias)


def test_xformers_bias_of_groups_broadcasts():
    q, k, v = tensors((2, 5, 2, 3, 8), (2, 9, 2, 3, 8), (2, 9, 2, 3, 8))
    for shape in ((2, 1, 1, 5, 9), (1, 2, 1, 1, 9), (1, 1, 3, 5, 1)):
        (bias,) = tensors(shape)
        whole = bias.expand(-1, 2, 3, -1, -1).flatten(1, 2)
        wanted = plain(*(x.flatten(2, 3) for x in (q, k, v)), bias=whole)[0].unflatten(2, (2, 3))
        same(memory_efficient_attention(q, k, v, bias), wanted, q, k, v, bias)
    with pytest.raises(ValueError, match=r"groups and heads of query \(axes 1 and 2\), \(2, 3\); got \(1, 3, 2, 5, 9\)"):
        memory_efficient_attention(q, k, v, torch.zeros(1, 3, 2, 5, 9))


def test_xformers_drops_and_keeps_the_mean():
    q, k, v = tensors((1, 64, 2, 8), (1, 64, 2, 8), (1, 64, 2, 8))
    torch.manual_seed(0)
    out = memory_efficient_attention(q, k, v * 0 + 1, p=0.3)
    assert abs(out.mean().item() - 1) < 0.05 and out.std() > 0.01


def test_xformers_refuses():
    q, k, v = tensors((2, 5, 3, 8), (2, 9, 3, 8), (2, 9, 3, 8))
    for error, words, options in (
        (
            numbaflash.UnsupportedError,
            "attn_bias must be None, a tensor, LowerTriangularMask, .*; got BlockDiagonalPaddedKeysMask",
            {"attn_bias": BlockDiagonalPaddedKeysMask((5,), (9,))},
        ),
        (TypeError, "attn_bias must be None, a tensor or a mask of xformers; got str", {"attn_bias": "causal"}),
        (TypeError, "attn_bias must be of a float dtype; got torch.bool", {"attn_bias": torch.ones(1, 1, 5, 9, dtype=torch.bool)}),
        (ValueError, "as many axes as query, 4", {"attn_bias": torch.ones(5, 9)}),
        (ValueError, "bias must broadcast", {"attn_bias": torch.ones(1, 1, 5, 8)}),
        (ValueError, "op must be None", {"op": ("a", "b")}),
        (numbaflash.UnsupportedError, "output_dtype must be that of query", {"output_dtype": torch.float16}),
        (ValueError, "dropout must be", {"p": 2}),
        (TypeError, "dropout must be", {"p": None}),
    ):
        with pytest.raises(error, match=words):
            memory_efficient_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="3, 4 or 5 axes; got 4 of query and 3 of key"):
        memory_efficient_attention(q, k[0], v)
    with pytest.raises(TypeError, match="query must be a torch tensor"):
        memory_efficient_attention(q.detach().numpy(), k, v)
    causal_bias = pytest.importorskip("torch.nn.attention.bias").causal_lower_right(5, 9)
    with pytest.raises(numbaflash.UnsupportedError, match="got CausalBias"):
        memory_efficient_attention(q, k, v, causal_bias)


def test_the_picture_shows_what_the_functions_see():
    figures = runpy.run_path(str(Path(__file__).resolve().parent.parent / "docs" / "figures" / "draw.py"))
    panels, n = figures["compat_panels"](), figures["N"]
    q, k = (torch.randn(1, n, 1, 4) for _ in range(2))
    v = torch.eye(n)[None, :, None]
    lengths = [end - start for start, end in itertools.pairwise(figures["COMPAT_ENDS"])]
    for title, weights in (
        ("window_size=(3, 1)", flash_attn_func(q, k, v, window_size=(3, 1))),
        ("BlockDiagonalCausalMask", memory_efficient_attention(q, k, v, BlockDiagonalCausalMask(lengths, lengths))),
    ):
        _, _, seen = panels[title]
        assert ((weights[0, :, 0] != 0).numpy() == seen).all()


def test_compiled_as_one_graph():
    qkv, bias = tensors((2, 16, 3, 4, 8), (1, 4, 16, 16))

    def packed(qkv, bias):
        return flash_attn_qkvpacked_func(qkv.sin(), causal=True, window_size=(3, -1), softcap=3.0) + 0 * bias.sum()

    def biased(qkv, bias):
        return memory_efficient_attention(*qkv.sin().unbind(2), bias)

    for function in (packed, biased):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        same(compiled(qkv, bias), function(qkv, bias), qkv, bias)


def test_nothing_more_is_imported():
    code = (
        "import sys, numbaflash.compat\n"
        "assert 'torch' not in sys.modules\n"
        "import numbaflash.compat.flash_attn, numbaflash.compat.xformers\n"
        "assert not {'flash_attn', 'xformers', 'transformers', 'jax', 'cupy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
