"""Models of Hugging Face transformers, tiny and randomly initialised, with these kernels against their own eager attention."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import numbaflash  # noqa: E402
from numbaflash.compat.transformers import attention_forward, register  # noqa: E402

BASE = {"vocab_size": 97, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
SMALL = BASE | {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(**BASE, n_embd=48, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    "mistral": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=5, attn_logit_softcapping=0.5
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=16, sliding_window=5, num_local_experts=2, num_experts_per_tok=1
    ),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def pair(name):
    """The same model twice: with eager attention and with these kernels. A model remembers its attention in its configuration: each has its own."""
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for weight in eager.parameters():  # larger than at initialisation, so that attention decides something
            weight.copy_(torch.randn_like(weight) * 0.15)
    ours = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="numba")
    ours.load_state_dict(eager.state_dict())
    assert (eager.config._attn_implementation, ours.config._attn_implementation) == ("eager", "numba")
    return eager.eval(), ours.eval()


def tokens(batch, length, seed=0):
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def counted(monkeypatch):
    """How often these kernels were called."""
    from numbaflash.compat import transformers as module

    calls = []
    original = module.attention
    monkeypatch.setattr(module, "attention", lambda *arrays, **options: calls.append(options) or original(*arrays, **options))
    return calls


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill(name, counted):
    eager, ours = pair(name)
    ids = tokens(2, 11)
    with torch.no_grad():
        want, got = eager(ids).logits, ours(ids).logits
    assert len(counted) == 2 and want.std() > 0.1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name, side):
    eager, ours = pair(name)
    ids, attended = tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    for row, n in ((1, 3), (2, 6)):
        attended[row, :n] = 0
    attended = attended if side == "left" else attended.flip(1)
    with torch.no_grad():
        want, got = eager(ids, attention_mask=attended).logits, ours(ids, attention_mask=attended).logits
        without = ours(ids).logits
    real = attended.bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)
    assert side == "right" or not torch.allclose(without[real], want[real], atol=1e-2)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate(name, cache):
    eager, ours = pair(name)
    ids, attended = tokens(2, 6), torch.ones(2, 6, dtype=torch.long)
    attended[1, :2] = 0
    ids[1, :2] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_scores": True, "disable_compile": True}
    options |= {"cache_implementation": "static"} if cache == "static" else {}
    for mask in (None, attended):
        given = {} if mask is None else {"attention_mask": mask}
        want, got = (model.generate(ids if mask is not None else tokens(2, 6), **given, **options) for model in (eager, ours))
        assert torch.equal(got.sequences, want.sequences)
        torch.testing.assert_close(torch.stack(got.scores), torch.stack(want.scores), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss"])
def test_gradients(name):
    eager, ours = pair(name)
    ids, attended = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    attended[1, 5:] = 0
    labels = ids.masked_fill(attended == 0, -100)
    for model in (eager, ours):
        model(ids, attention_mask=attended, labels=labels).loss.backward()
    for (which, want), (_, got) in zip(eager.named_parameters(), ours.named_parameters(), strict=True):
        if want.grad is not None or got.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-3, atol=1e-5, msg=lambda text, which=which: f"{which}: {text}")


def test_packed_sequences_by_position_ids():
    _, ours = pair("llama")
    first, second = tokens(1, 5), tokens(1, 7, seed=1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        apart = torch.cat([ours(first).logits, ours(second).logits], 1)
        packed = ours(torch.cat([first, second], 1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-4)


def test_the_picture_shows_what_models_ask_for(counted):
    figures = runpy.run_path(str(Path(__file__).resolve().parent.parent / "docs" / "figures" / "draw.py"))
    panels, n, ends = figures["compat_panels"](), figures["N"], figures["COMPAT_ENDS"]
    attended, positions = torch.ones(1, n, dtype=torch.long), torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(ends)])[None]
    attended[0, : figures["PADDING"]] = 0
    with torch.no_grad():
        pair("llama")[1](tokens(1, n), attention_mask=attended)
        (padded, *_) = counted
        counted.clear()
        config = transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=3)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="numba")
        model(tokens(1, n), position_ids=positions, use_cache=False)
    for title, options in (("padding on the left", padded), ("sliding_window=3, packed", counted[0])):
        seen = torch.from_numpy(panels[title][2])
        rows = seen.any(1)  # of padding, models take what they get
        assert torch.equal(options["mask"][0, 0][rows], seen[rows]) and not options.get("causal")


def test_transformers_takes_every_flash_for_one_of_its_own():
    """Why the name is not the package's: where this fails, it may become so."""
    transformers.AttentionInterface.register("numbaflash", attention_forward)
    try:
        with pytest.raises(ValueError, match="flash attention implementation at `numbaflash`"):
            transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="numbaflash")
    finally:
        del transformers.AttentionInterface._global_mapping["numbaflash"]


def test_compiled_as_one_graph():
    _, ours = pair("llama")
    ids = tokens(2, 7)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, ours(ids).logits)


def test_dropout_in_training_alone(counted):
    config = transformers.LlamaConfig(**SMALL, attention_dropout=0.5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="numba")
    ids = tokens(1, 9)
    model.eval()(ids)
    assert all("dropout" not in options for options in counted)
    counted.clear()
    torch.manual_seed(3)
    first = model.train()(ids).logits
    torch.manual_seed(3)
    assert torch.equal(model(ids).logits, first) and not torch.equal(model(ids).logits, first)
    assert [options["dropout"] for options in counted] == [0.5] * 6


def test_causal_attention_and_windows_without_a_mask(counted):
    class Layer:
        is_causal = True

    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    for options, wanted in (
        ({}, {"causal": "top_left"}),
        ({"is_causal": False}, {"causal": False}),
        ({"sliding_window": 6}, {"causal": "top_left"}),
        ({"sliding_window": 4}, {"causal": "top_left", "window": (3, None)}),
    ):
        out, weights = attention_forward(Layer(), q, k, v, None, **options)
        assert weights is None and out.shape == (1, 6, 2, 8)
        torch.testing.assert_close(out, numbaflash.attention(*(x.transpose(1, 2) for x in (q, k, v)), **wanted))
    out, _ = attention_forward(Layer(), q[:, :, -1:], k, v, None, sliding_window=4)
    torch.testing.assert_close(out, numbaflash.attention(*(x.transpose(1, 2) for x in (q[:, :, -1:], k[:, :, -4:], v[:, :, -4:]))))


def test_masks_and_biases_together():
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    bias, added = torch.randn(1, 2, 6, 6), torch.randn(6, 6)
    seen = torch.rand(1, 1, 6, 6) < 0.8
    arrays = [x.transpose(1, 2) for x in (q, k, v)]
    for mask, options in (
        (seen, {"mask": seen, "bias": bias}),
        (added, {"bias": bias + added}),
        (None, {"bias": bias}),
    ):
        out, _ = attention_forward(None, q, k, v, mask, position_bias=bias, is_causal=False)
        torch.testing.assert_close(out, numbaflash.attention(*arrays, **options))


def test_refuses():
    q = torch.randn(1, 2, 6, 8)
    for words, options in (
        ('output_attentions asks for the weights.*"eager"', {"output_attentions": True}),
        ("head_mask", {"head_mask": torch.ones(2)}),
        ("pass position_ids", {"cu_seq_lens_q": torch.tensor([0, 6])}),
        ("must come as attention_mask", {"sliding_window": 4, "is_causal": False}),
    ):
        with pytest.raises(numbaflash.UnsupportedError, match=words):
            attention_forward(None, q, q, q, None, **options)
    with pytest.raises(TypeError, match="name must be a string"):
        register(None)
    for name, words in (
        ("numbaflash", 'must not have "flash" in it'),
        ("sdpa", "must be a new one; got 'sdpa'"),
        ("eager", "must be a new one"),
    ):
        with pytest.raises(ValueError, match=words):
            register(name)


def test_another_name():
    register("numba_again")
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="numba_again")
    assert model(tokens(1, 4)).logits.shape == (1, 4, 97)
