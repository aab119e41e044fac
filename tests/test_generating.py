"""The example that generates text: tokens with a paged cache are those without a cache, in every library and whoever else is in the batch."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

import numbaflash
from numbaflash.toolchain import device_count

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "examples" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(example):
    told = []
    parameters = example.train(report=told.append)
    assert len(told) == 5 and float(told[-1].split()[-1]) < 0.1
    return parameters


LIBRARIES = [
    ("numpy", "float32"),
    ("numpy", "float16"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    *(pytest.param(library, dtype, marks=pytest.mark.gpu) for library in ("cupy", "torch-cuda") for dtype in ("float16", "float32")),
]


def arrays_of(example, library, dtype):
    pytest.importorskip(library.removesuffix("-cuda"))
    if library in ("cupy", "torch-cuda") and dtype == "float32":
        from numbaflash import dispatch, toolchain
        from numbaflash.problem import make_decode_problem

        shape = (1, 128, example.KV_HEADS, example.HEAD_DIM)
        told = make_decode_problem((1, 1, example.HEADS, example.HEAD_DIM), (9, 8, *shape[2:]), (9, 8, *shape[2:]), (dtype,) * 3, **PAGED)
        device = toolchain.device(0)
        if all(dispatch.family(name, "decode").supports(told, device) for name in dispatch.FAMILIES):
            pytest.skip("no kernel family decodes float32 from pages on this GPU")
    return example.Arrays(library, dtype)


PAGED = {"seqlens_k": ((1,), "int32"), "page_table": ((1, 16), "int32")}


def requests(example, temperature=0.0):
    """Prompts shorter and longer than a chunk and a page; more than there are slots."""
    counts = (30, 5, 41, 12, 1, 23)
    return [example.Request(list(p), n, temperature, seed) for seed, (p, n) in enumerate(zip(example.PROMPTS, counts, strict=True))]


def without_cache(example, parameters, arrays, temperature):
    found = requests(example, temperature)
    for request in found:
        example.generate_without_cache(parameters, request, arrays)
    return [request.tokens for request in found]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("library, dtype", LIBRARIES)
def test_tokens_are_those_without_a_cache(example, trained, library, dtype, temperature):
    arrays = arrays_of(example, library, dtype)
    generator, found = example.Generator(trained, arrays, slots=3, pages=20), requests(example, temperature)
    generator.run(found)
    assert [request.tokens for request in found] == without_cache(example, trained, arrays, temperature)
    assert sorted(generator.free) == list(range(20)), "every page is free again"
    if library == "numpy" and not temperature:
        text = example.TEXT * 2
        for request in found:
            assert bytes(request.prompt + request.tokens) in text, "it knows its lines"


@pytest.mark.parametrize("slots, pages, page_size", [(1, 20, 8), (6, 60, 8), (2, 100, 1), (3, 4, 64), (3, 12, 7)])
def test_slots_and_pages_do_not_matter(example, trained, slots, pages, page_size):
    arrays = example.Arrays()
    generator, found, told = example.Generator(trained, arrays, slots, pages, page_size), requests(example, 0.7), []
    generator.run(found, told.append)
    assert [request.tokens for request in found] == without_cache(example, trained, arrays, 0.7)
    assert len(told) == 2 * len(found) and all(words.startswith("slot ") for words in told)
    assert sorted(generator.free) == list(range(pages))


def test_requests_join_while_others_are_half_way(example, trained):
    generator, told, answered = example.Generator(trained, example.Arrays(), slots=2, pages=32), [], []
    step = generator.step
    generator.step = lambda slots, tokens: (answered.append((tuple(slots), len(tokens[0]))), step(slots, tokens))[1]
    found = requests(example)
    generator.run(found, told.append)
    first, second, third = (next(n for n, words in enumerate(told) if repr(bytes(r.prompt)) in words) for r in found[:3])
    assert (first, second) == (0, 1) and told[2] == "slot 1: done, 3 pages are free again" and third == 3
    alone = [slots for slots, new in answered if new > 1 or len(slots) == 1]
    both = [slots for slots, new in answered if slots == (0, 1)]
    assert len(both) > 20 and alone
    assert len([new for _, new in answered if new == 1]) < sum(r.count for r in found), "a step serves all that are in the batch"


def test_the_gradients_are_right(example):
    """Against differences of the loss, in float64, along a random direction."""
    parameters = {name: x.astype(np.float64) for name, x in example.make_parameters(np.random.default_rng(0)).items()}
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, example.VOCABULARY, (2, 9))
    _, gradients = example.loss_and_gradients(parameters, tokens)
    assert gradients.keys() == parameters.keys() - {"cos", "sin"}
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        ends = [example.loss_and_gradients(parameters | {name: parameters[name] + h * direction}, tokens)[0] for h in (1e-6, -1e-6)]
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx((gradient * direction).sum(), rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("prompt, count", [([], 3), ([65], 0), ([65], 128), ([65] * 90, 70)])
def test_what_never_fits_is_refused(example, prompt, count):
    generator = example.Generator(example.make_parameters(np.random.default_rng(0)), example.Arrays(), pages=10)
    with pytest.raises(ValueError, match=f"room for all of its {len(prompt) + count} tokens"):
        generator.run([example.Request(prompt, count)])


@pytest.mark.parametrize("on", ["numpy", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cupy", "torch-cuda"))])
def test_the_example_runs(example, monkeypatch, capsys, on):
    if on != "numpy":
        pytest.importorskip(on.removesuffix("-cuda"))
    monkeypatch.setattr(sys, "argv", ["generate.py", "--steps", "30", "--temperature", "0.5", "--on", on])
    example.main()
    told = capsys.readouterr().out
    assert "step  30   loss" in told and "slot 0: done" in told and "375 tokens in" in told and "[page after page, in]" in told
    assert numbaflash.decode and (on == "numpy" or device_count())
