"""Block masks: what is built of a rule or an array, what is refused, and that attention heeds them, on the CPU; their GPU kernels compile."""

from __future__ import annotations

import re

import numpy as np
import pytest

import numbaflash as nf
from numbaflash import BlockMask, reference, testing, toolchain
from numbaflash.kernels.blocks import build, layout, lists, rules, summary
from numbaflash.problem import make_problem
from numbaflash.testing import BackwardCase, Case

LIKE = np.zeros(1, np.float32)
SQ, SK = 150, 330
I, J = np.arange(SQ)[:, None], np.arange(SK)[None, :]
PLACE = I + SK - SQ
IDS, KEY_IDS = np.random.default_rng(0).integers(-1, 4, (2, SQ)), np.sort(np.random.default_rng(1).integers(-1, 4, SK))

RULES = {
    "block causal": (BlockMask.block_causal(SQ, SK, block=48, like=LIKE), J // 48 <= PLACE // 48),
    "block causal, before the first key": (BlockMask.block_causal(SQ, SK, block=7, offset=-20, like=LIKE), J // 7 <= (I - 20) // 7),
    "documents": (BlockMask.documents(IDS, KEY_IDS), ((IDS[:, :, None] == KEY_IDS) & (IDS[:, :, None] >= 0))[:, None]),
    "documents, int32": (BlockMask.documents(IDS.astype(np.int32)), ((IDS[:, :, None] == IDS[:, None]) & (IDS[:, :, None] >= 0))[:, None]),
    "prefix": (BlockMask.prefix_lm(SQ, SK, prefix=100, like=LIKE), (J <= PLACE) | (J < 100)),
    "prefix of each entry": (
        BlockMask.prefix_lm(SQ, SK, prefix=np.array([0, 250, 2**40]), offset=0),
        ((J <= I) | (np.array([0, 250, 2**40])[:, None, None] > J))[:, None],
    ),
    "dilated": (BlockMask.dilated(SQ, SK, dilation=3, like=LIKE), (PLACE - J) % 3 == 0),
    "dilated, window": (
        BlockMask.dilated(SQ, SK, dilation=4, window=(60, 8), like=LIKE),
        ((PLACE - J) % 4 == 0) & (PLACE - J <= 60) & (J - PLACE <= 8),
    ),
    "sliding, global": (
        BlockMask.sliding_global(SQ, SK, window=(40, None), n_global=90, like=LIKE),
        (PLACE - J <= 40) | (J < 90) | ((PLACE < 90) & (PLACE >= 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_rules_are_what_is_defined(name):
    mask, want = RULES[name]
    want = np.broadcast_to(want, mask.shape)
    assert (mask.to_dense() == want).all() and mask.words.dtype == np.int32
    assert mask.density == pytest.approx(want.mean()) and sum(mask.counts) == mask.states().size


@pytest.mark.parametrize("shape", [(2, 3, 100, 200), (100, 200), (2, 1, 1, 200), (100, 1), (1, 64), ()], ids=str)
def test_masks_are_kept(shape):
    dense = np.asarray(np.random.default_rng(0).random(shape) < 0.5)
    if dense.ndim > 1 and dense.shape[-2] > 64:
        dense[..., :64, :64] = True
    mask = BlockMask.from_mask(dense, seqlen_q=None if len(shape) > 1 and shape[-2] > 1 else 100, seqlen_k=None if shape and shape[-1] > 1 else 200)
    assert (mask.to_dense() == np.broadcast_to(dense, mask.shape)).all()


def test_states_and_bits():
    dense = np.random.default_rng(0).random((130, 70)) < 0.5
    dense[:64], dense[64:128, 64:] = False, True
    mask = BlockMask.from_mask(dense)
    assert mask.states().tolist() == [[[[0, 0], [2, 1], [2, 2]]]] and mask.counts == (1, 3, 2)
    assert repr(mask) == "BlockMask(130 queries x 70 keys, batch 1, heads 1; blocks of 64: 1 full, 3 partial, 2 empty)"
    bits = mask.words[0, 0, layout.bits_at(130, 70) :].reshape(-1, layout.BITS)
    by_query, by_key = (np.unpackbits(bits[0, at : at + 128].astype("<i4").view(np.uint8), bitorder="little").reshape(64, 64) for at in (0, 128))
    assert (by_query == dense[64:128, :64]).all() and (by_key == by_query.T).all()


def test_what_a_mask_takes():
    """Words for blocks, bits for the partial ones, and no more."""
    mask = BlockMask.documents(np.repeat(np.arange(8), 1000))
    assert mask.words.nbytes < 4 * 125**2 + 1500 * (mask.counts.partial + 8) and mask.words.nbytes < 8000**2 / 100
    one, two = (BlockMask.documents(np.repeat(np.arange(8), [1000 - n] * 4 + [1000 + n] * 4)) for n in (1, 2))
    assert one.words.shape == two.words.shape, "calls with masks of about one size are of one kind"


@pytest.mark.parametrize("seqlen_q", [1, 40])
@pytest.mark.parametrize("values", testing.values.MASKS)
def test_attention(values, seqlen_q):
    for number, shape in enumerate(((2, 4, seqlen_q, 200), (seqlen_q, 200), (2, 1, 1, 200))):
        sizes = dict(batch=2, seqlen_q=seqlen_q, seqlen_k=200, heads=4, kv_heads=(4, 2, 1)[number], head_dim=16, head_dim_v=8)
        more = dict(mask_shape=shape, mask_values=values, as_blocks=True, hidden="nan", causal=number == 0, window=(None, (80, 30), None)[number])
        testing.run_case(Case(**sizes, **more), "cpu")
        testing.run_backward_case(BackwardCase(**sizes, **more, with_dlse=True), "cpu")


def test_with_every_option():
    options = dict(softcap=3.0, bias_shape=(2, 1, 90), alibi_shape=(2,), with_sinks=True, dropout=0.3, lengths_q="random", lengths_k="random")
    shape = dict(batch=3, heads=2, kv_heads=1, seqlen_q=70, seqlen_k=90, head_dim=8, head_dim_v=8, causal=True, hidden="nan")
    mask = dict(mask_shape=(70, 90), mask_values="sliding", as_blocks=True)
    testing.run_case(Case(**shape, **options, **mask), "cpu")
    testing.run_backward_case(BackwardCase(**shape, **options, **mask, needs=("q", "k", "v", "bias", "sinks")), "cpu")


def test_the_same_as_the_array():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 300, 2, 32), dtype=np.float32)
    ids = np.repeat([3, 1, 1, 2, 2, 2], 50)
    mask, dense = BlockMask.documents(ids), ids[:, None] == ids
    out, lse = nf.forward(q, k, v, mask=mask, causal=True, return_lse=True)
    for x, y in zip((out, lse), nf.forward(q, k, v, mask=dense, causal=True, return_lse=True), strict=True):
        assert np.array_equal(x, y)
    gradients = (nf.backward(out, q, k, v, out, lse, mask=each, causal=True) for each in (mask, dense))
    assert all(np.array_equal(x, y) for x, y in zip(*gradients, strict=True))
    problem = make_problem(q.shape, k.shape, v.shape, ["float32"] * 3, causal=True, block_mask=(mask.words.shape, "int32"))
    assert np.allclose(reference.forward(problem, q, k, v, block_mask=mask)[0], out, atol=1e-5)


def test_explain():
    mask = BlockMask.block_causal(256, block=64, like=LIKE)
    x = np.zeros((1, 256, 2, 16), np.float32)
    told = str(nf.explain(x, x, x, mask=mask))
    assert re.search(r"mask +BlockMask\(256 queries x 256 keys.*10 full, 0 partial, 6 empty\), 62\.5% not empty", told)


X = np.zeros((2, 100, 4, 16), np.float32)
REFUSED = {
    "another length": (ValueError, r"mask must broadcast to .*\(2, 4, 100, 100\)", lambda: nf.forward(X, X, X, mask=BlockMask.documents(np.zeros(99,
    int)))), "another batch": (ValueError, "mask must broadcast", lambda: nf.forward(X, X, X, mask=BlockMask.documents(np.zeros((3, 100), int)))),
    "integers": (TypeError, "mask must be bool", lambda: nf.forward(X, X, X, mask=BlockMask.documents(np.zeros(100, int)).words)),
    "packed": (ValueError, "packed sequences have no mask", lambda: nf.explain(
        X[0], X[0], X[0], cu_seqlens_q=np.array([0, 100]), cu_seqlens_k=np.array([0, 100]), mask=BlockMask.documents(np.zeros(100, int)))),
    "floats": (TypeError, "mask must be bool", lambda: BlockMask.from_mask(np.zeros((3, 3), np.float32))),
    "5 axes": (ValueError, "at most 4 axes", lambda: BlockMask.from_mask(np.zeros((1, 1, 1, 3, 3), bool))),
    "size": (ValueError, "seqlen_k must be the size", lambda: BlockMask.from_mask(np.zeros((3, 3), bool), seqlen_k=4)),
    "ids": (TypeError, "ids_q must be int32 or int64", lambda: BlockMask.documents(np.zeros(3))),
    "axes of ids": (ValueError, r"ids_q must have shape \(seqlen,\) or", lambda: BlockMask.documents(np.zeros((1, 2, 3), int))),
    "dtypes of ids": (TypeError, "one dtype", lambda: BlockMask.documents(np.zeros(3, np.int32), np.zeros(3, np.int64))),
    "batches of ids": (ValueError, "one batch size", lambda: BlockMask.documents(np.zeros((2, 3), int), np.zeros((3, 3), int))),
    "libraries of ids": (TypeError, "must be an array", lambda: BlockMask.documents([0, 1, 2])),
    "block": (ValueError, "block must be from 1", lambda: BlockMask.block_causal(8, block=0, like=LIKE)),
    "block, kind": (TypeError, "block must be an integer", lambda: BlockMask.block_causal(8, block=2.0, like=LIKE)),
    "length": (ValueError, "seqlen_q must be from 0", lambda: BlockMask.block_causal(-8, block=2, like=LIKE)),
    "prefix": (TypeError, "prefix must be an integer, or an array", lambda: BlockMask.prefix_lm(8, prefix=np.zeros(3), like=LIKE)),
    "prefix, axes": (ValueError, r"prefix must have shape \(batch,\)", lambda: BlockMask.prefix_lm(8, prefix=np.zeros((3, 1), int))),
    "like": (TypeError, "like must be an array", lambda: BlockMask.prefix_lm(8, prefix=3)),
    "window": (ValueError, "window left must not be negative", lambda: BlockMask.dilated(8, dilation=2, window=(-1, 0), like=LIKE)),
    "no window": (TypeError, "window must be a pair", lambda: BlockMask.sliding_global(8, window=None, n_global=1, like=LIKE)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    error, message, call = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_empty():
    mask = BlockMask.block_causal(0, 5, block=2, like=LIKE)
    assert mask.counts == (0, 0, 0) and mask.density == 0 and mask.to_dense().shape == (1, 1, 0, 5)
    q, k = np.zeros((1, 0, 1, 8), np.float32), np.zeros((1, 5, 1, 8), np.float32)
    assert nf.forward(q, k, k, mask=mask).shape == q.shape


def test_torch():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, 130, 2, 16, requires_grad=True) for _ in "qkv")
    ids = torch.arange(130) // 50
    mask, dense = BlockMask.documents(ids), ids[:, None] == ids
    assert torch.equal(mask.to_dense()[0, 0], dense)
    found = [nf.attention(q, k, v, mask=each, causal=True) for each in (mask, dense)]
    assert torch.equal(*found)
    gradients = [torch.autograd.grad(each.sum(), (q, k, v)) for each in found]
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))
    compiled = torch.compile(lambda q, k, v, mask: nf.attention(q, k, v, mask=mask, causal=True), backend="aot_eager")
    assert torch.equal(compiled(q, k, v, mask), found[0])
    prefix = BlockMask.prefix_lm(130, prefix=torch.tensor([3, 70]))
    assert prefix.shape == (2, 1, 130, 130) and BlockMask.prefix_lm(130, prefix=3, like=q).words.device == q.device


def test_jax():
    jax = pytest.importorskip("jax")
    import numbaflash.jax

    q, k, v = (jax.random.normal(key, (1, 130, 2, 16)) for key in jax.random.split(jax.random.key(0), 3))
    ids = jax.numpy.arange(130) // 50
    mask, dense = BlockMask.documents(ids), ids[:, None] == ids

    @jax.jit
    def attend(q, k, v, mask):
        return numbaflash.jax.attention(q, k, v, mask=mask, causal=True)

    assert (attend(q, k, v, mask) == attend(q, k, v, dense)).all()
    one, other = (jax.grad(lambda q, mask=mask: attend(q, k, v, mask).sum())(q) for mask in (mask, dense))
    assert (one == other).all()
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda ids: BlockMask.documents(ids).words)(ids)


def test_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mask, _ = RULES["sliding, global"]
    for each, options in (
        (mask, {}),
        (mask, {"causal": True}),
        (np.ones((70, 90), bool), {"window": (9, 0)}),
        (None, {"causal": True, "seqlen_q": 80}),
    ):
        ax = nf.plot_mask(each, **options)
        picture = ax.images[0].get_array()
        assert ax.get_xlabel() == "keys" and picture.shape == (each.shape[-2:] if each is not None else (80, 80))
        plt.close(ax.figure)
    seen = np.asarray(nf.plot_mask(mask, causal=True).images[0].get_array()) > 0
    assert (seen == (mask.to_dense()[0, 0] & (J <= PLACE))).all()
    large = nf.plot_mask(BlockMask.block_causal(4096, block=256, like=LIKE), window=(500, 0)).images[0].get_array()
    assert large.shape == (64, 64) and large[10].tolist() == [0] * 2 + [2] * 2 + [1] * 6 + [2] + [0] * 53
    plt.close("all")
    documents = RULES["documents"][0]
    for error, message, mask, options in (
        (ValueError, "seqlen_q must be given", None, {}),
        (ValueError, "batch must be from 0 to", documents, {"batch": 2}),
        (TypeError, "batch must be an integer; got True", documents, {"batch": True}),
        (ValueError, "seqlen_k must be that of the BlockMask, .*; got 7", documents, {"seqlen_k": 7}),
        (ValueError, "something to draw", None, {"seqlen_q": 0}),
        (ValueError, "something to draw", np.ones((0, 1, 5, 5), bool), {}),
    ):
        with pytest.raises(error, match=message):
            nf.plot_mask(mask, **options)


def test_plot_of_a_traced_mask():
    jax = pytest.importorskip("jax")
    pytest.importorskip("matplotlib").use("Agg")
    with pytest.raises(TypeError, match="traced"):
        jax.jit(nf.plot_mask)(jax.numpy.ones((5, 5), bool))


KERNELS = {
    **{f"build, {rule}": ("build", b, build.BuildConfig(rule, isinstance(rule, rules.Pairs)))
       for rule in (rules.Pairs("bool"), rules.BlockCausal(block=48), rules.Documents("int64"), rules.PrefixLM("int64"), rules.SlidingGlobal())
       for b in ("build_states", "build_bits")},
    **{f"summary, {fours}": ("summary", "build", summary.SummaryConfig(fours, 128)) for fours in (True, False)},
    **{f"{b}, {of_keys}": ("lists", b, lists.ListsConfig(64, 128, of_keys, True, True, True, "int64", "int32", True, 64))
       for b, of_keys in (("build_lists", False), ("build_lists", True), ("build_ranks", True))},
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(name):
    module, function, config = KERNELS[name]
    request = toolchain.KernelRequest(f"numbaflash.kernels.blocks.{module}:{function}", config, (9, 0, "a"))
    report = toolchain.ptxas_report(toolchain.compile_ptx(request), request.arch)
    assert (report.stack_bytes, report.spill_stores, report.spill_loads) == (0, 0, 0)


def test_capacity_has_room():
    for count in (*range(40), 1000, 12345):
        assert count <= layout.capacity(count) <= count * 1.3 + 1
