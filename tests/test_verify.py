"""`numbaflash verify`: shapes from everywhere, checks that catch planted errors, reports, and what it refuses."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from numbaflash import call as road
from numbaflash import cli, dispatch, testing, verify
from numbaflash.verify import accuracy, blas, meaning, memory, order, places, report, timing
from numbaflash.verify.findings import FAIL, PASS, SKIP, Report

ATTENTION = verify.Attention(heads=4, kv_heads=2, head_dim=32, head_dim_v=32, dtype="float32")
SIZES = {"batch": 1, "seqlens": (260,), "context": 150, "requests": 3, "page_size": 16, "backward": True}


def calls(attention=ATTENTION, **changes):
    return verify.calls_of(attention, **(SIZES | changes))


def run(which=None, checks=("meaning",), **options):
    """The report of a verification in this process."""
    found = Report(600.0, say=lambda line: None)
    return verify.verify(which or calls(), verify.open_place("numpy"), found, checks=checks, **options)


def failures(found):
    return {finding.name for finding in found.findings if finding.status == FAIL}


# ---- planted errors


def memory_of(plan, operand, address):
    """An operand of a launch, to be written."""
    layout = getattr(plan.layouts, operand)
    size = sum((n - 1) * step for n, step in zip(layout.shape, layout.strides, strict=True)) + 8
    dtype = np.dtype(plan.problem.dtype_of(operand))
    return np.ndarray(layout.shape, dtype, (ctypes.c_char * size).from_address(address), strides=layout.strides)


def after(operand, spoil):
    """Spoil a result once the kernel has written it."""

    def wrap(prepare, plan):
        launch, names = prepare(plan), dispatch.operands(plan.problem, plan.direction)

        def launch_and_spoil(addresses, stream):
            launch(addresses, stream)
            at = addresses[names.index(operand)]
            if at:
                spoil(memory_of(plan, operand, at))

        return launch_and_spoil

    return wrap


def other_problem(**changes):
    """Compute another problem than the plan's."""

    def wrap(prepare, plan):
        made = {name: change(getattr(plan.problem, name)) for name, change in changes.items()}
        return prepare(dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, **made)))

    return wrap


def swapped_pages(prepare, plan):
    """The first two pages of each sequence in the wrong order."""
    launch, names = prepare(plan), dispatch.operands(plan.problem, plan.direction)
    if "page_table" not in names:
        return launch

    def launch_swapped(addresses, stream):
        at = names.index("page_table")
        table = memory_of(plan, "page_table", addresses[at]).copy()
        table[:, :2] = table[:, 1::-1] if table.shape[1] > 1 else table
        launch((*addresses[:at], table.ctypes.data, *addresses[at + 1 :]), stream)

    return launch_swapped


def spoil_element(x):
    x[(0, *(n // 2 for n in x.shape[1:]))] += 0.01


def spoil_tile(x):
    x[0, 64:128, 1] = 0.0


def spoil_row(x):
    x[0, x.shape[1] // 3, -1] *= 1.02


def spoil_tile_of_long_sequences(x):
    if x.shape[1] > 1000:
        x[0, 512:544, 3] *= 1.001


def spoil_batch(x):
    if x.shape[0] > 2:
        x[1] = x[2]


PLANTED = {
    "one element of out": ("forward", after("out", spoil_element), "prefill"),
    "one tile of out": ("forward", after("out", spoil_tile), "prefill"),
    "the scale of one row": ("forward", after("out", spoil_row), "prefill"),
    "the LSE": ("forward", after("lse", lambda x: x.__iadd__(np.float32(0.01))), "prefill"),
    "the mask off by one": ("forward", other_problem(right=lambda n: n + 1), "prefill"),
    "the scale of the scores": ("forward", other_problem(scale=lambda x: 1.01 * x), "prefill"),
    "one element of dq": ("backward", after("dq", spoil_element), "gradients"),
    "one tile of dk": ("backward", after("dk", spoil_tile), "gradients"),
    "the scale of a row of dv": ("backward", after("dv", spoil_row), "gradients"),
    "the mask of the gradients off by one": ("backward", other_problem(right=lambda n: n + 1), "gradients"),
    "one element of a decoded token": ("decode", after("out", spoil_element), "decode"),
    "one request for another": ("decode", after("out", spoil_batch), "decode"),
    "pages in the wrong order": ("decode", swapped_pages, "decode"),
}


@pytest.fixture
def plant(monkeypatch):
    def planted(direction, wrap):
        package = dispatch.family("cpu", direction)
        prepare = package.prepare
        monkeypatch.setattr(package, "prepare", lambda plan: wrap(prepare, plan))
        road.forget()

    yield planted
    road.forget()


def test_right_kernels_pass():
    found = run()
    assert failures(found) == set() and {finding.status for finding in found.findings} == {PASS}
    assert len(found.findings) == 11  # three looks at each call; one request has no other parts


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_caught(plant, name):
    direction, wrap, where = PLANTED[name]
    plant(direction, wrap)
    failed = failures(run([call for call in calls() if call.name.startswith(where)]))
    assert failed and all(each.startswith(where) for each in failed), failed


def test_an_error_in_one_tile_of_long_sequences_alone_is_caught(plant):
    """Neither the smaller problem nor, most likely, the samples see it; the same problem in other parts does."""
    plant("forward", after("out", spoil_tile_of_long_sequences))
    found = run([call for call in calls(seqlens=(1100,), backward=False) if call.direction == "forward"])
    assert "prefill of 1100, in parts" in failures(found) and "prefill of 1100, smaller" not in failures(found)


def test_command_fails_and_names_the_check(plant, capsys):
    plant("forward", after("out", spoil_tile))
    sizes = ("--seqlen", "200", "--heads", "2", "--head-dim", "32", "--requests", "2", "--no-backward")
    assert cli.main(["verify", *sizes, "--library", "numpy", "--check", "meaning"]) == 1
    said = capsys.readouterr().out
    assert "[FAIL] meaning  prefill of 200, smaller: out[" in said and re.search(r"findings FAILED.*\n  meaning: prefill of 200", said)


def test_an_undeclared_dispatch_is_caught(monkeypatch):
    """A call that runs by another plan than the explained one."""
    plan_call = road.plan_call
    monkeypatch.setattr(road, "plan_call", lambda *arguments: dataclasses.replace(plan_call(*arguments), grid=(1, 2, 3)))
    road.forget()
    found = run([call for call in calls() if call.direction == "forward"], checks=("dispatch",))
    assert failures(found) == {"prefill of 260"} and "ran" in found.findings[0].text
    road.forget()


def test_hidden_memory_is_caught(plant):
    def hoard(prepare, plan):
        launch = prepare(plan)
        return lambda addresses, stream: launch(addresses, stream) or np.ones(2**24).sum() and None

    plant("forward", hoard)
    found = run([call for call in calls() if call.direction == "forward"], checks=("memory",))
    assert failures(found) == {"prefill of 260"} and "128." in found.findings[0].text


# ---- all checks


def test_every_check(tmp_path, capsys, monkeypatch):
    """One run from the command line with all that it writes; few special masks, for each is another kernel to compile."""
    some = ("window of one key", "packed sequences, some empty")
    monkeypatch.setattr(accuracy, "SPECIAL", {name: accuracy.SPECIAL[name] for name in some})
    sizes = ("--seqlen", "130", "--heads", "2", "--head-dim", "32", "--context", "100", "--requests", "2", "--page-size", "16")
    files = ("--json", tmp_path / "r.json", "--html", tmp_path / "r.html")
    status = cli.main([str(x) for x in ("verify", *sizes, "--library", "numpy", "--budget", "500", *files)])
    said = capsys.readouterr().out
    assert status == 0, said
    told = json.loads((tmp_path / "r.json").read_text())
    assert not told["failed"] and {"meaning", "dispatch", "time", "memory", "accuracy", "service"} == {
        finding["check"] for finding in told["findings"]
    }
    assert "no check failed" in said and said.count("\n[") == len(told["findings"])
    times = {finding["name"]: finding["figures"] for finding in told["findings"] if finding["check"] == "time"}
    assert set(times) == {"prefill of 130", "gradients of 130", "decode of one request", "decode of 2 requests, paged"}
    assert all(0 < each["seconds_q1"] <= each["seconds"] <= each["seconds_q3"] and each["rounds"] >= 5 for each in times.values())
    parts = {finding["name"]: finding["figures"] for finding in told["findings"] if finding["check"] == "memory"}
    assert parts["prefill of 130"]["inputs"] == 3 * 130 * 2 * 32 * 4 and parts["prefill of 130"]["kv_cache"] == 0
    assert parts["decode of 2 requests, paged"]["kv_cache"] == 2 * (2 * 7 * 16) * 2 * 32 * 4
    page = (tmp_path / "r.html").read_text()
    plots = re.findall(r"<svg.*?</svg>", page)
    assert len(plots) == 4 and "<script" not in page and "http" not in page
    for plot in plots:
        ElementTree.fromstring(plot)
        assert "nan" not in plot
    assert not list(tmp_path.glob("*.part"))


def test_time_ends_the_checks():
    began = time.monotonic()
    found = Report(1e-3, say=lambda line: None)
    verify.verify(calls(seqlens=(64,), context=64), verify.open_place("numpy"), found, checks=("meaning", "accuracy"))
    late = [finding for finding in found.findings if finding.status == SKIP]
    assert any("special" in finding.name for finding in late) and all("--budget" in finding.text for finding in late)
    assert time.monotonic() - began < 120


def test_torch_and_its_own_attention(monkeypatch):
    pytest.importorskip("torch")
    found = Report(60.0, say=lambda line: None)
    place = verify.open_place("torch")
    verify.verify(calls(verify.Attention(2, 2, 32, 32, "float32"), seqlens=(96,)), place, found, checks=("meaning", "dispatch", "time"))
    assert failures(found) == set() and "prefill of 96, torch's attention" in {finding.name for finding in found.findings}

    def broken(*_, **__):
        raise RuntimeError("it is broken")

    import torch

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", broken)
    found = Report(60.0, say=lambda line: None)
    verify.verify(calls(seqlens=(96,), backward=False), place, found, checks=("time",))
    (left_out,) = (finding for finding in found.findings if finding.status == SKIP)
    assert "it is broken" in left_out.text and not found.failed


def test_jax():
    pytest.importorskip("jax")
    found = Report(120.0, say=lambda line: None)
    place = verify.open_place("jax")
    verify.verify(calls(seqlens=(96,)), place, found, checks=("meaning", "dispatch"))
    assert failures(found) == set() and any("as explained" in finding.text for finding in found.findings)


def test_options_of_attention():
    """Window, softcap, sinks and slopes; a latent cache."""
    some = dataclasses.replace(ATTENTION, window=(50, None), softcap=20.0, alibi=True, sinks=True, scale=0.3)
    assert failures(run(calls(some, seqlens=(100,)))) == set()
    latent = verify.Attention(4, 4, 24, 16, "float32", latent=(40, 32), latent_scale=0.2)
    found = run([call for call in calls(latent) if call.direction == "decode"])
    assert failures(found) == set() and all(call.latent for call in calls(latent) if call.direction == "decode")


def test_special_gradients_of_jax():
    """Through its own derivative, as `numbaflash.backward` takes no JAX arrays."""
    pytest.importorskip("jax")
    cases = dict(accuracy.special_cases(calls(backward=True)))
    for name in ("documents, rows of nothing", "packed sequences, some empty"):
        _, figures = accuracy.special(cases[f"gradients, {name}"], verify.open_place("jax"), None)
        assert set(figures["errors"]) == {"dq", "dk", "dv"} and 0 < max(figures["errors"].values()) < 1


def test_decoding_without_pages_where_no_kernel_has_them(monkeypatch):
    package = dispatch.family("cpu", "decode")
    supports = package.supports
    monkeypatch.setattr(package, "supports", lambda problem, device: ("it has no page_table",) if problem.paged else supports(problem, device))
    found = run([call for call in calls() if call.direction == "decode"])
    assert failures(found) == set() and any("contiguous caches instead" in finding.text for finding in found.findings)
    assert any(finding.name == "decode of 3 requests, samples" for finding in found.findings)


def test_what_no_kernel_computes_fails_with_reasons():
    found = run([call for call in calls(dataclasses.replace(ATTENTION, dtype="float64")) if call.direction == "forward"], family="sm90")
    (finding,) = found.findings
    assert finding.status == FAIL and "sm90: it needs a Hopper GPU" in finding.text


# ---- pieces


def test_one_thread_of_blas():
    found = blas._functions()
    if found is None:
        pytest.skip("NumPy has no OpenBLAS of its own")
    before = found[0]()
    with blas.one_thread():
        assert found[0]() == 1
    assert found[0]() == before


def test_quartiles():
    assert timing.quartiles([3.0, 1.0, 2.0, 5.0, 4.0]) == (2.0, 3.0, 4.0)
    assert timing.quartiles([1.0]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("window", [None, (10, None), (3, 5)])
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_pairs_are_counted(window, causal):
    from numbaflash import reference

    numbers = {"causal": causal, "window": window}
    call = verify.Call("x", "forward", (2, 20, 4, 8), (2, 33, 2, 8), (2, 33, 2, 8), "float32", numbers)
    assert call.pairs == 2 * 4 * reference.visible(call.problem).sum()


def test_longest_input_is_bounded_by_time_and_memory(monkeypatch):
    place, (call, *_) = verify.open_place("numpy"), calls(backward=False)
    assert accuracy.longest(call, place, 1e9, 1e-9) <= accuracy.LONGEST["cpu"]
    assert accuracy.longest(call, place, 0.0, 1.0) == 260
    monkeypatch.setattr(places.Place, "free_bytes", lambda self: 2**22)
    assert accuracy.longest(call, place, 1e9, 1e-9) == 520


def test_a_smaller_problem_is_of_the_same_kind():
    place = verify.open_place("numpy")
    for call in calls(dataclasses.replace(ATTENTION, window=(5000, None), sinks=True), seqlens=(8000,)):
        if call.direction != "decode":
            small = meaning.case_of(call, place).problem
            assert (
                small.features == call.problem.features and (small.left is None) == (call.problem.left is None) and small.group == call.problem.group
            )
    chunk = verify.Call("x", "forward", (1, 500, 4, 8), (1, 9000, 2, 8), (1, 9000, 2, 8), "float32", {"causal": True})
    small = meaning.case_of(chunk, place)
    assert small.seqlen_q < small.seqlen_k


def test_html_escapes_what_it_shows():
    found = Report(1.0, say=lambda line: None)
    found.add("meaning", "<b>", FAIL, "a < b & c", {"errors": {"out": 2.0}})
    assert "a &lt; b &amp; c" in report.page(found) and "<td><b></td>" not in report.page(found)
    assert "1 of 1 findings FAILED" in report.table(found) and "nothing was verified" in report.table(Report(1.0))


# ---- configurations


CONFIGS = {
    "llama": (
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"},
        [(32, 8, 128, None, None, None)],
    ),
    "mistral": (
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096, "head_dim": None},
        [(32, 8, 128, (4095, None), None, None)],
    ),
    "mixtral": ({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": None}, [(32, 8, 128, None, None, None)]),
    "qwen2": (
        {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2, "use_sliding_window": False, "sliding_window": 32768},
        [(14, 2, 64, None, None, None)],
    ),
    "qwen3": (
        {"hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "use_sliding_window": True, "sliding_window": 100}
        | {"max_window_layers": 2, "num_hidden_layers": 3},
        [(32, 8, 128, (99, None), None, None), (32, 8, 128, None, None, None)],
    ),
    "gemma2": (
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 224, "attn_logit_softcapping": 50.0}
        | {"sliding_window": 4096, "num_hidden_layers": 26},
        [(8, 4, 256, (4095, None), 224**-0.5, 50.0), (8, 4, 256, None, 224**-0.5, 50.0)],
    ),
    "gemma3_text": (
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "attn_logit_softcapping": None}
        | {"sliding_window": 512, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        [(8, 4, 256, (511, None), 1 / 16, None), (8, 4, 256, None, 1 / 16, None)],
    ),
    "gpt2": ({"n_embd": 768, "n_head": 12, "n_positions": 1024}, [(12, 12, 64, None, None, None)]),
    "gpt_neo": (
        {"hidden_size": 2048, "num_heads": 16, "window_size": 256, "attention_types": [[["global", "local"], 12]]},
        [(16, 16, 128, (255, None), 1.0, None), (16, 16, 128, None, 1.0, None)],
    ),
    "granite": (
        {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_multiplier": 0.015625},
        [(32, 8, 64, None, 1 / 64, None)],
    ),
    "cohere2": (
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096, "num_hidden_layers": 32},
        [(32, 8, 128, (4095, None), None, None), (32, 8, 128, None, None, None)],
    ),
    "gpt_neox": ({"hidden_size": 6144, "num_attention_heads": 64}, [(64, 64, 96, None, None, None)]),
    "phi3": (
        {"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 2047},
        [(32, 32, 96, (2046, None), None, None)],
    ),
    "deepseek_v3": (
        {"num_attention_heads": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
        | {"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}},
        [(128, 128, 192, None, 192**-0.5 * (0.1 * np.log(40) + 1) ** 2, None)],
    ),
}


def config_file(folder, **told):
    path = folder / "config.json"
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize("kind", CONFIGS)
def test_configurations(tmp_path, kind):
    told, want = CONFIGS[kind]
    layers, longest = verify.read_config(config_file(tmp_path, model_type=kind, max_position_embeddings=777, **told))
    got = [(x.heads, x.kv_heads, x.head_dim, x.window, x.scale, x.softcap) for x in layers]
    assert longest == 777
    for one, other in zip(got, want, strict=True):
        assert one[:4] == other[:4] and one[4] == (pytest.approx(other[4]) if other[4] else None) and one[5] == other[5]
    assert {x.dtype for x in layers} == {"bfloat16" if kind == "llama" else "float32"}
    assert layers[0].latent == ((576, 512) if kind == "deepseek_v3" else None)
    for layer in layers:
        assert all(call.problem for call in calls(layer))


def test_configurations_are_those_of_transformers(tmp_path):
    """Every architecture as transformers writes it, and the shapes and the scale that its own modules have."""
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from numbaflash.verify.configs import ARCHITECTURES

    for kind in ARCHITECTURES:
        config = CONFIG_MAPPING[kind]()
        config.save_pretrained(tmp_path / kind)
        layers, _ = verify.read_config(tmp_path / kind)
        for layer in layers:
            assert layer.heads == config.num_attention_heads
            if not kind.startswith("deepseek"):
                assert layer.kv_heads == (getattr(config, "num_key_value_heads", None) or layer.heads)
                assert layer.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // layer.heads)
        kinds = getattr(config, "layer_types", None)
        if kinds and len(layers) == 2:
            assert layers[0].label == f"{kinds.count('sliding_attention')} sliding layers" and layers[0].window == (config.sliding_window - 1, None)


def test_the_page_names_every_architecture():
    from numbaflash.verify.configs import ARCHITECTURES

    page = (Path(__file__).parent.parent / "docs" / "verify.md").read_text(encoding="utf-8")
    told = page[page.index("**A configuration**") : page.index("Layers with a sliding window")]
    assert set(re.findall(r"[a-z]+\d?(?:_\w+)?", told)) >= {kind.removesuffix("_text") for kind in ARCHITECTURES}


def test_a_model_of_images_and_text(tmp_path):
    told, _ = CONFIGS["gemma3_text"]
    layers, _ = verify.read_config(config_file(tmp_path, model_type="gemma3", dtype="bfloat16", text_config=told | {"model_type": "gemma3_text"}))
    assert len(layers) == 2 and layers[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "model_type must be a string; it is missing"),
        ({"model_type": "mamba"}, "model_type must be one of llama, .*; got 'mamba'"),
        ({"model_type": "llama"}, "num_attention_heads must be a positive integer; it is missing"),
        ({"model_type": "llama", "num_attention_heads": 32}, "hidden_size must be a positive integer; it is missing"),
        ({"model_type": "llama", "num_attention_heads": 3, "hidden_size": 64}, "hidden_size must be a multiple of num_attention_heads"),
        ({"model_type": "llama", "num_attention_heads": "8", "hidden_size": 64}, "num_attention_heads must be a positive integer; got '8'"),
        ({"model_type": "mistral", "num_attention_heads": 8, "hidden_size": 64}, "num_key_value_heads must be a positive integer; it is missing"),
        ({"model_type": "llama", "num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"model_type": "llama", "num_attention_heads": 8, "hidden_size": 64, "dtype": "int8"}, "dtype must be one of float16"),
        ({"model_type": "gpt2", "n_head": 8, "n_embd": 64, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be false"),
        ({"model_type": "deepseek_v3", "num_attention_heads": 8}, "qk_rope_head_dim must be a positive integer; it is missing"),
        ({"model_type": "gpt_neo", "num_heads": 8, "hidden_size": 64, "attention_types": "local"}, "attention_types must be a list such as"),
        ({"model_type": "gemma2", "num_attention_heads": 8}, "attn_logit_softcapping must be a positive number or null; it is missing"),
    ],
)
def test_wrong_configurations(tmp_path, told, message):
    path = config_file(tmp_path, **told)
    with pytest.raises(verify.ConfigError, match=message) as error:
        verify.read_config(path)
    assert str(path) in str(error.value)


def refused(capsys, words, *arguments):
    try:
        status = cli.main(["verify", *map(str, arguments)])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert status == 2 and said.err.count("\n") == 1 and re.search(words, said.err), said.err


def test_what_the_command_refuses(tmp_path, capsys):
    path = tmp_path / "config.json"
    refused(capsys, "No such file", "--config", path)
    path.write_text("{")
    refused(capsys, "must hold the JSON of a model's configuration", "--config", path)
    path.write_text("[]")
    refused(capsys, "must hold a JSON object", "--config", path)
    refused(capsys, "--config says these already; leave out --heads", "--config", path, "--heads", "3")
    refused(capsys, "not allowed with", "--config", path, "--trace", path)
    refused(capsys, "No such file", "--trace", tmp_path / "calls.jsonl")
    refused(capsys, "heads of q must be a multiple", "--heads", "3", "--kv-heads", "2", "--library", "numpy")
    refused(capsys, "must be at least 1", "--batch", "0")
    refused(capsys, "--check must be of", "--check", "speed")
    refused(capsys, "cannot be written", "--json", tmp_path / "nowhere" / "r.json")
    refused(capsys, "positive number of seconds", "--budget", "-1")
    if "cupy" not in testing.gpu_libraries():
        refused(capsys, "cupy", "--library", "cupy")


def test_too_large_is_refused_before_anything_is_allocated(tmp_path, capsys, monkeypatch):
    made = []
    monkeypatch.setattr(places.Place, "normal", lambda *arguments: made.append(arguments))
    refused(capsys, r"prefill of 1000000000: .* needs .* and .* are free on cpu", "--seqlen", "1000000000", "--context", "64", "--library", "numpy")
    refused(
        capsys, r"decode of 100000 requests.* KV cache", "--requests", "100000", "--context", "100000", "--library", "numpy", "--html", tmp_path / "r"
    )
    assert not made and not list(tmp_path.iterdir())
    with pytest.raises(memory.TooLargeError):
        run(calls(seqlens=(10**9,)))


def test_same_kinds_are_counted_together():
    (one, *_) = calls()
    found = order.same_kinds([one, dataclasses.replace(one, name="other", count=5), dataclasses.replace(one, dtype="float64")])
    assert [call.count for call in found] == [6, 1]
