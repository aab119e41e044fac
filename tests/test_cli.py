"""The command line, as a person or a script uses it: processes, files, exit status, one line for an error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import numbaflash as nf
from numbaflash import cli, files

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.filterwarnings("error")


def command(capsys, *arguments):
    """Exit status, stdout and stderr of a command run in this process."""
    try:
        status = cli.main([str(a) for a in arguments])
    except SystemExit as end:  # argparse
        status = end.code
    said = capsys.readouterr()
    return status, said.out, said.err


def process(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "numbaflash", *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 37, 4, 32), dtype=np.float32)
    k, v = (rng.standard_normal((2, 50, 2, 32), dtype=np.float32) for _ in range(2))
    return {"q": q, "k": k, "v": v}


def refused(capsys, words, *arguments):
    status, out, err = command(capsys, *arguments)
    assert status == 2 and out == ""
    assert err.startswith("numbaflash: error: ") and err.count("\n") == 1, err
    assert re.search(words, err), err


# ---- run


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_run_computes_what_forward_computes(tmp_path, capsys, operands, suffix):
    files.save(tmp_path / f"in{suffix}", operands)
    out = tmp_path / f"out{suffix}"
    options = ("--causal", "--window", "20,none", "--scale", "0.3", "--lse")
    status, said, err = command(capsys, "run", tmp_path / f"in{suffix}", "--out", out, *options)
    assert status == 0 and err == "" and str(out) in said
    want, want_lse = nf.forward(**operands, causal=True, window=(20, None), scale=0.3, return_lse=True)
    got = np.load(out) if suffix == ".npz" else pytest.importorskip("safetensors.numpy").load_file(out)
    assert sorted(got) == ["lse", "out"]
    np.testing.assert_array_equal(got["out"], want)
    np.testing.assert_array_equal(got["lse"], want_lse)


def test_run_three_npy_files_top_left(tmp_path, capsys, operands):
    for name, array in operands.items():
        np.save(tmp_path / f"{name}.npy", array)
    inputs = [tmp_path / f"{name}.npy" for name in "qkv"]
    assert command(capsys, "run", *inputs, "--top-left", "--out", tmp_path / "out.npy")[0] == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), nf.forward(**operands, causal="top_left"))


@pytest.fixture
def option_arrays():
    rng = np.random.default_rng(1)
    return {
        "mask": rng.random((37, 50)) < 0.7,
        "bias": rng.standard_normal((4, 1, 50)).astype(np.float16),
        "alibi_slopes": rng.random((2, 4), dtype=np.float32),
        "sinks": rng.standard_normal(4).astype(np.float32),
        "seqlens_q": np.array([30, 37]),
        "seqlens_k": np.array([50, 41], np.int32),
    }


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".npy"])
def test_run_takes_options_from_the_file_by_name(tmp_path, capsys, operands, option_arrays, suffix):
    arrays = operands | option_arrays
    if suffix == ".npy":
        inputs = [tmp_path / f"{name}.npy" for name in arrays]
        for path, array in zip(inputs, arrays.values(), strict=True):
            np.save(path, array)
    else:
        inputs = [tmp_path / f"in{suffix}"]
        files.save(inputs[0], arrays)
    numbers = ("--softcap", "5", "--dropout", "0.25", "--seed", str(2**64 - 1))
    status, said, err = command(capsys, "run", *inputs, "--causal", *numbers, "--out", tmp_path / "out.npz")
    assert status == 0 and f"with {', '.join(option_arrays)}" in said, err
    want = nf.forward(**arrays, causal=True, softcap=5.0, dropout=0.25, seed=2**64 - 1)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["out"], want)
    assert not np.allclose(want, nf.forward(**operands, causal=True), atol=1e-2)


def test_run_in_another_dtype_keeps_that_of_options(tmp_path, capsys, operands, option_arrays):
    files.save(tmp_path / "in.npz", operands | option_arrays | {"bias": option_arrays["bias"].astype(np.float64)})
    for dtype in ("float64", "float16"):
        numbers = ("--softcap", "5", "--dropout", "0.25", "--seed", "1")
        status, said, err = command(capsys, "run", tmp_path / "in.npz", "--dtype", dtype, *numbers, "--out", tmp_path / "out.npz")
        assert status == 0 and f" {dtype}, with mask" in said, err


def test_run_refuses_bad_options(tmp_path, capsys, operands, option_arrays):
    out = tmp_path / "out.npz"

    def refuse(words, *arguments, **arrays):
        files.save(tmp_path / "in.npz", operands)
        np.savez(tmp_path / "in.npz", **operands, **arrays)
        refused(capsys, words, "run", tmp_path / "in.npz", "--out", out, *arguments)

    refuse("in.npz: mask must be bool; got dtype float32. Numbers that are added to the scores are a bias", mask=np.ones(50, np.float32))
    refuse(r"mask must broadcast to .* = \(2, 4, 37, 50\)", mask=np.ones((3, 50), bool))
    refuse("seqlens_k must be int32 or int64; got dtype float64", seqlens_k=np.ones(2))
    refuse(r"sinks must have shape \(heads,\) = \(4,\)", sinks=np.ones(3, np.float32))
    refuse("bias must be one of float16, bfloat16, float32 for q of float32", bias=np.ones(50))
    refuse("dropout needs a seed", "--dropout", "0.5")
    refuse("dropout must be at least 0 and below 1", "--dropout", "1", "--seed", "1")
    refuse("None is no cap", "--softcap", "0")
    refuse("seed must be at least 0 and below 2", "--dropout", "0.5", "--seed=-1")
    for name, array in (operands | option_arrays).items():
        np.save(tmp_path / f"{name}.npy", array)
    three = [tmp_path / f"{name}.npy" for name in "qkv"]
    refused(capsys, "mask.npy, bias.npy, .*", "run", *three, tmp_path / "q.npy", "--out", out)
    refused(capsys, "there is a second file of mask", "run", *three, tmp_path / "mask.npy", tmp_path / "mask.npy", "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_run_in_another_dtype(tmp_path, capsys, operands, dtype):
    files.save(tmp_path / "in.npz", operands)
    assert command(capsys, "run", tmp_path / "in.npz", "--dtype", dtype, "--family", "cpu", "--out", tmp_path / "out.npz")[0] == 0
    with np.load(tmp_path / "out.npz") as stored:
        assert stored.files == ["out"]
        got = stored["out"]
    want = nf.forward(**{name: array.astype(files.dtype_of(dtype)) for name, array in operands.items()})
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def test_run_refuses_in_one_line_and_writes_nothing(tmp_path, capsys, operands):
    good, out = tmp_path / "in.npz", tmp_path / "out.npz"
    files.save(good, operands)
    files.save(tmp_path / "shape.npz", operands | {"k": operands["k"][..., :8]})
    files.save(tmp_path / "mixed.npz", operands | {"k": operands["k"].astype(np.float16)})
    np.savez(tmp_path / "int.npz", **(operands | {"q": np.ones((1, 2), np.int64)}))
    np.savez(tmp_path / "keys.npz", a=1)
    (tmp_path / "broken.npz").write_bytes(good.read_bytes()[:-100])
    refused(capsys, "cannot read .*no.npz: No such file", "run", tmp_path / "no.npz", "--out", out)
    refused(capsys, "k must have the same head_dim", "run", tmp_path / "shape.npz", "--out", out)
    refused(capsys, "one dtype", "run", tmp_path / "mixed.npz", "--out", out)
    refused(capsys, "int.npz: q must be float16, .*int64", "run", tmp_path / "int.npz", "--out", out)
    refused(capsys, "q, k, v missing, found a", "run", tmp_path / "keys.npz", "--out", out)
    refused(capsys, "damaged", "run", tmp_path / "broken.npz", "--out", out)
    refused(capsys, "there is no folder", "run", good, "--out", tmp_path / "no" / "out.npz")
    refused(capsys, "would overwrite an input", "run", good, "--out", good)
    refused(capsys, "window left must not be negative", "run", good, "--out", out, "--window", "-3,0")
    refused(capsys, "scale must be finite", "run", good, "--out", out, "--scale", "nan")
    refused(capsys, "no kernel family can compute", "run", good, "--out", out, "--family", "sm90")
    refused(capsys, "cpu or cuda:INDEX", "run", good, "--out", out, "--device", "sm_90")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.npz", "in.npz", "int.npz", "keys.npz", "mixed.npz", "shape.npz"]


def test_wrong_arguments_are_told_in_one_line(capsys):
    for arguments, words in (
        ((), "required: COMMAND"),
        (("run", "x.npz"), "required: --out"),
        (("run", "x.npz", "--out", "y.npz", "--window", "3"), "must be LEFT,RIGHT"),
        (("run", "x.npz", "--out", "y.npz", "--window", "a,b"), "must be LEFT,RIGHT"),
        (("run", "x.npz", "--out", "y.npz", "--dtype", "int8"), "invalid choice"),
        (("explain", "--device", "tpu"), "must be cpu, cuda:INDEX or a GPU architecture"),
        (("explain", "--batch", "-1"), "q must have no negative size (batch, seqlen_q, heads, head_dim); got shape (-1, "),
        (("explain", "--seqlen-k", "-5"), "k must have no negative size"),
        (("warmup", "--batch", "-1", "--device", "cpu"), "q must have no negative size"),
        (("demo", "--seqlen", "0"), "must be at least 1"),
        (("warmup", "--head-dim", "64:64:64"), "must be a number or first:second"),
        (("warmup", "--dtype", "int8"), "must be of float16"),
        (("warmup", "--max-seqlen", "64"), "--max-seqlen: for packed sequences alone, add --total"),
        (("warmup", "--lse", "true"), "must be of no, yes; got 'true'"),
        (("warmup", "--direction", "sideways", "--device", "cpu"), 'directions must hold nothing but "forward", "backward" and "decode"'),
        (("warmup", "--page-size", "16"), "are for caches, add --cache"),
        (("warmup", "--cache", "64", "--mask", "--device", "cpu"), "caches have no mask; leave it out"),
        (("warmup", "--cache", "64", "--page-size", "0", "--device", "cpu"), "page_sizes must hold positive integers and None; got 0"),
        (("explain", "--page-size", "16"), "--page-size is for caches, add --decode"),
        (("explain", "--decode", "--backward"), "--decode has no gradients"),
        (("explain", "--decode", "--bias"), "--decode has no --bias"),
        (("explain", "--decode", "--dropout", "0.1"), "--decode has no --dropout"),
        (("explain", "--decode", "--total-q", "9"), "--decode has no packed sequences"),
        (("explain", "--decode", "--page-size", "0"), "--page-size must be at least 1"),
        (("explain", "--decode", "--num-splits", "0"), "num_splits must be from 1"),
        (("explain", "--decode", "--seqlen-q", "65"), "q must have at most 64 tokens"),
        (("warmup", "--deterministic"), "are for gradients, add --direction backward"),
        (("warmup", "--total", "64", "--bias", "--device", "cpu"), "packed sequences have no bias; leave it out"),
        (("cache", "burn"), "invalid choice"),
        (("nonsense",), "invalid choice"),
    ):
        refused(capsys, re.escape(words), *arguments)


def test_values_that_begin_with_a_minus(capsys):
    status, out, _ = command(capsys, "explain", "--scale", "-1e-3", "--seqlen-q", "64", "--device", "cpu")
    assert status == 0 and re.search(r"^scale +-0\.001$", out, re.M)
    refused(capsys, "window left must not be negative .*; got -1", "explain", "--window", "-1,0")


def test_traceback_shows_the_whole_story(tmp_path, capsys):
    status, _, err = command(capsys, "--traceback", "run", tmp_path / "no.npz", "--out", tmp_path / "out.npz")
    assert status == 2 and "Traceback" in err and "FileError" in err


# ---- demo


def test_demo_compares_and_merges(capsys):
    status, out, err = command(capsys, "demo", "--device", "cpu", "--seqlen", "300", "--heads", "2", "--repeats", "1")
    assert status == 0 and err == ""
    assert "family         cpu" in out or "family" in out
    assert re.search(r"^numbaflash +[\d.]+ \w+ +[\d.]+ \w+$", out, re.M), out
    assert re.search(r"^dense +[\d.]+ \w+ +[\d.]+ \w+$", out, re.M), out
    assert "the halves make the whole" in out and "within" in out
    rows = re.findall(r"^ +(merged|all keys at once) +(\S+) +(.*)$", out, re.M)
    assert len(rows) == 6
    for merged, whole in zip(rows[::2], rows[1::2], strict=True):
        np.testing.assert_allclose(float(merged[1]), float(whole[1]), atol=2e-6)
        np.testing.assert_allclose(np.fromstring(merged[2], sep=" "), np.fromstring(whole[2], sep=" "), atol=2e-6)
    assert "-inf" in out  # query 0 sees nothing of the second half


def test_demo_notices_a_wrong_result(capsys, monkeypatch):
    from numbaflash import api

    right = api.forward

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        out[0, -1, 0, 0] += 1
        return out, lse

    monkeypatch.setattr(api, "forward", wrong)
    status, out, _ = command(capsys, "demo", "--device", "cpu", "--seqlen", "64", "--heads", "1", "--repeats", "1")
    assert status == 1 and "ABOVE" in out


def test_demo_leaves_the_dense_part_out_when_memory_is_short(capsys, monkeypatch):
    from numbaflash.cli import devices

    monkeypatch.setattr(devices.Cpu, "free_bytes", lambda self: 1000)
    status, out, _ = command(capsys, "demo", "--device", "cpu", "--seqlen", "64", "--heads", "1", "--repeats", "1", "--full", "--dtype", "float64")
    assert status == 0 and "dense       not computed: its scores alone take" in out and "the halves make the whole" in out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dense_computations_are_attention(dtype):
    """PyTorch's is looked at on the CPU here, through the class that serves its GPUs."""
    torch = pytest.importorskip("torch")
    from numbaflash.cli.devices import Cpu, Torch

    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 20, 4, 16)).astype(files.dtype_of(dtype))
    k, v = (rng.standard_normal((2, 20, 2, 16)).astype(files.dtype_of(dtype)) for _ in range(2))
    want = nf.forward(q, k, v, causal=True, scale=0.3).astype(np.float64)
    place = object.__new__(Torch)
    place.torch, place.device = torch, torch.device("cpu")
    for where in (Cpu(), place):
        arrays = [where.put(x) for x in (q, k, v)]
        np.testing.assert_array_equal(where.get(arrays[0]).view(np.uint8), q.view(np.uint8))
        got = where.get(where.dense(*arrays, np.tri(20, dtype=bool), 0.3)).astype(np.float64)
        np.testing.assert_allclose(got, want, atol=1e-5 if dtype == "float32" else 3e-2)


def test_a_gpu_that_no_library_sees_is_told(capsys, monkeypatch):
    from numbaflash.cli import devices

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    refused(capsys, "cannot use cuda:7: PyTorch is not installed; CuPy is not installed; Numba is not installed", "demo", "--device", "cuda:7")


def test_peak_memory_is_measured():
    from numbaflash.measuring import peak_host_bytes

    np.ones(100)
    with peak_host_bytes() as peak:
        x = np.ones(100 * 2**20, np.uint8)
        del x
    if sys.platform == "linux":
        assert 95 * 2**20 < peak["bytes"] < 130 * 2**20
    else:
        assert peak == {}


# ---- explain, support, warmup, cache, env, fuzz


def test_explain_says_which_kernel_and_why(capsys):
    shape = ("--seqlen-q", "100", "--seqlen-k", "300", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--causal")
    status, out, _ = command(capsys, "explain", *shape)
    assert status == 0 and "cpu" in out and "sm90" in out and "(1, 300, 2, 64)" in out
    assert command(capsys, "explain", "--seqlen-q", "0")[1].startswith("nothing to compute")
    refused(capsys, "no kernel family can compute", "explain", "--family", "sm90")
    refused(capsys, "head dim .* from 1 to 256; got 300", "explain", "--head-dim", "300")
    refused(capsys, "--device must be cpu, cuda:INDEX or an architecture", "explain", "--device", "auto")


def test_explain_of_caches(capsys):
    status, out, err = command(
        capsys,
        "explain",
        "--decode",
        "--page-size",
        "16",
        "--batch",
        "3",
        "--sinks",
        "--num-splits",
        "2",
        "--seqlens-k",
        "int64",
        "--head-dim",
        "576",
    )
    assert status == 0, err
    for line in (
        r"problem +float32, q \(3, 1, 16, 576\), k \(768, 16, 16, 576\)",
        r"page_table +int32 \(3, 256\)",
        r"seqlens_k +int64 \(3,\)",
        "num_splits +2",
    ):
        assert re.search(f"^{line}", out, re.M), out
    status, out, err = command(capsys, "explain", "--decode", "--dtype", "bfloat16", "--device", "sm_90", "--seqlen-q", "4", "--causal")
    assert status == 0 and re.search(r"family +sm90", out) and "(1, 4096, 16, 128)" in out, out + err


@pytest.mark.parametrize(("dtype", "family"), [("bfloat16", "sm90"), ("float32", "simt")])
def test_explain_for_a_gpu_that_is_not_there(capsys, dtype, family):
    status, out, err = command(capsys, "explain", "--dtype", dtype, "--device", "sm_90")
    assert status == 0, err
    assert re.search(rf"family\W+{family}", out)


def test_explain_shows_options(capsys):
    options = ("--mask", "--bias", "8,1,4096:float32", "--alibi-slopes", "--sinks", "--seqlens-q", "--seqlens-k", "int64", "--softcap", "30")
    status, out, err = command(capsys, "explain", "--heads", "8", "--causal", *options, "--dropout", "0.25")
    assert status == 0, err
    for line in (
        *("softcap +30", r"mask +bool \(1, 1, 4096, 4096\)", r"bias +float32 \(1, 8, 1, 4096\)", r"alibi_slopes +float32 \(1, 8\)"),
        *(r"sinks +float32 \(8,\)", r"seqlens_q +int32 \(1,\)", r"seqlens_k +int64 \(1,\)", "dropout +0.25", "not sm90 +it needs a Hopper GPU"),
    ):
        assert re.search(f"^{line}", out, re.M), out
    status, out, err = command(capsys, "explain", "--backward", "--deterministic", "--mask", "1,16,1,4096")
    assert status == 0 and "backward, deterministic" in out and "bool (1, 16, 1, 4096)" in out, err
    assert "every gradient is 0" in command(capsys, "explain", "--backward", "--seqlen-k", "0")[1]
    refused(capsys, "add --backward", "explain", "--deterministic")
    refused(capsys, "mask must broadcast", "explain", "--mask", "5,4096")
    refused(capsys, "must be a shape such as", "explain", "--mask", "a,b")
    refused(capsys, "after the colon; got 'int8'", "explain", "--bias", "1,1:int8")
    refused(capsys, "sm90: it needs a Hopper GPU", "explain", "--family", "sm90", "--mask")
    refused(capsys, "seed must be at least 0", "explain", "--seed=-2")


def test_explain_of_packed_sequences(capsys):
    shape = ("--total-q", "65536", "--total-k", "32768", "--batch", "32", "--max-seqlen-q", "4096", "--heads", "8", "--head-dim", "64")
    gpu = ("--dtype", "bfloat16", "--device", "sm_90")
    status, out, err = command(capsys, "explain", *shape, *gpu, "--causal", "--sinks", "--alibi-slopes", "--cu-seqlens", "int64")
    assert status == 0, err
    for line in (
        *(r"problem +bfloat16, q \(65536, 8, 64\), k \(32768, 8, 64\), v \(32768, 8, 64\)", r"cu_seqlens_q +int64 \(33,\)", r"sinks +float32 \(8,\)"),
        *(r"alibi_slopes +float32 \(1, 8\)", "band +query i sees keys j <= i \\+ length_k - length_q", "family +sm90"),
    ):
        assert re.search(f"^{line}", out, re.M), out
    status, out, err = command(capsys, "explain", *shape, "--backward", "--needs", "k,sinks", "--sinks")
    assert status == 0 and re.search(r"^cu_seqlens_k +int32 \(33,\)", out, re.M) and "backward" in out, err
    assert command(capsys, "explain", "--total-q", "0")[1].startswith("nothing to compute")
    refused(capsys, r"packed sequences \(--total-q\) have no --seqlen-k", "explain", "--total-q", "8", "--seqlen-k", "8")
    refused(capsys, "--total-k, --max-seqlen-k: for packed sequences alone", "explain", "--total-k", "8", "--max-seqlen-k", "8")
    refused(capsys, "packed sequences have no mask; leave it out", "explain", "--total-q", "8", "--mask")
    refused(capsys, "packed sequences have no seqlens_q; leave it out", "explain", "--total-q", "8", "--seqlens-q")
    refused(capsys, "max_seqlen_q must not be negative", "explain", "--total-q", "8", "--max-seqlen-q=-1")
    refused(capsys, r"cu_seqlens_q must have shape \(batch \+ 1,\)", "explain", "--total-q", "8", "--batch=-1")


def test_explain_of_block_masks_and_gradients_of_options(capsys):
    gpu = ("--dtype", "float16", "--device", "sm_90")
    status, out, err = command(capsys, "explain", *gpu, "--block-mask", "--bias", "1,4096", "--backward", "--needs", "q,bias")
    assert (
        status == 0 and re.search("^mask +BlockMask", out, re.M) and "with_dq True, with_dk False, with_dv False" in out and "with_dbias True" in out
    ), err
    refused(capsys, "not allowed with argument", "explain", "--block-mask", "--mask")
    refused(capsys, "--needs is for gradients, add --backward", "explain", "--needs", "q")
    refused(capsys, "no sinks was given", "explain", "--backward", "--needs", "q,sinks")
    refused(capsys, "needs must hold nothing but", "explain", "--backward", "--needs", "x")


def test_explain_without_the_compilers_libraries(capsys, monkeypatch, tmp_path):
    from numbaflash.toolchain import compile as compiler
    from numbaflash.toolchain import resources

    class DynamicLibNotFoundError(RuntimeError):
        pass

    def missing(*arguments):
        raise DynamicLibNotFoundError("no libnvvm")

    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "_numba_ptx", missing)
    shape = ("--dtype", "float32", "--head-dim", "24", "--device", "sm_86")
    status, out, _ = command(capsys, "explain", *shape)
    assert status == 0 and re.search(r"resources +error could not compile .*no libnvvm\. Hint: .*pip install 'numba-cuda\[cu13\]'", out), out

    def no_tool(name):
        raise resources.ToolMissingError(f"{name} was not found")

    monkeypatch.undo()
    monkeypatch.setattr(resources, "find_tool", no_tool)
    resources._assemble.cache_clear()
    status, out, _ = command(capsys, "explain", *shape)
    assert status == 0 and re.search(r"resources +error ptxas was not found", out), out


def test_support_table(capsys):
    status, out, _ = command(capsys, "support")
    assert status == 0 and out.startswith("| family |") and "`cpu`" in out
    assert "| option | `sm90` | `simt` | `cpu` |" in out and out.count("| `bias`, with its gradient |") == 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_table_of_options_is_what_the_families_answer(direction):
    """A family refuses just the options that its ``FEATURES`` leave out."""
    from numbaflash import dispatch, support
    from numbaflash.kernels.blocks.layout import words
    from numbaflash.problem import FEATURES, PACKED_FEATURE, make_packed_problem, make_problem

    given = {"softcap": 9.0, "mask": ((256, 256), "bool"), "bias": ((256,), "float16"), "alibi_slopes": ((4,), "float32"), "dropout": 0.5}
    given |= {"sinks": ((4,), "float32"), "seqlens_q": ((1,), "int32"), "seqlens_k": ((1,), "int64")}
    given |= {"block_mask": ((1, 1, words(256, 256, 1)), "int32")}
    shape = (1, 256, 4, 64)
    for feature, cells in support.features().items():
        if feature == PACKED_FEATURE:
            ends = ((3,), "int32")
            problem = make_packed_problem(*[shape[1:]] * 3, ("float16",) * 3, cu_seqlens_q=ends, cu_seqlens_k=ends)
        else:
            problem = make_problem(shape, shape, shape, ("float16",) * 3, **{feature: given[feature]})
        assert problem.features == (feature,) and tuple(support.features()) == (*FEATURES, PACKED_FEATURE)
        for name, cell in cells.items():
            device = dispatch.CPU if name == "cpu" else support.assumed_device("sm_90")
            able = not dispatch.family(name, direction).supports(problem, device)
            assert able == (cell in ("yes", {"forward": "forward", "backward": "gradients"}[direction])), (name, feature)


def test_cache_list_size_clear(tmp_path, capsys, monkeypatch):
    from numbaflash.toolchain import cache

    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(tmp_path / "cache"))
    assert command(capsys, "cache", "size")[1].startswith("0 kernels, 0 B")
    cache.store("0" * 64, "text", {"entry": "e", "build": "some.module:build", "config": "Config()", "arch": "sm_90a"})
    status, out, _ = command(capsys, "cache", "list")
    assert status == 0 and "sm_90a" in out and "some.module:build" in out and "1 kernels" in out
    assert command(capsys, "cache", "clear")[1].startswith("1 kernels deleted")
    assert command(capsys, "cache", "size")[1].startswith("0 kernels")


SMALL = ("--dtype", "float32", "--head-dim", "32", "--causal", "yes", "--heads", "2", "--device", "sm_80", "--workers", "1", "--lse", "no")


def test_warmup_fills_the_cache_for_a_gpu_that_is_not_there(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    environment = os.environ | {"NUMBAFLASH_CACHE_DIR": str(cache)}
    done = process("warmup", *SMALL, "--seqlen", "128", env=environment)
    assert done.returncode == 0 and "1 kernels built" in done.stdout, done.stdout + done.stderr
    assert len(list(cache.glob("*.ptx"))) == 1
    again = process("warmup", *SMALL, "--seqlen", "128", env=environment)
    assert "0 kernels built, 1 in the cache" in again.stdout


def test_warmup_of_packed_sequences_with_options(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(tmp_path))
    packed = ("--total", "4096:2048", "--max-seqlen", "512", "--batch", "8", "--softcap", "30", "--sinks", "--direction", "forward,backward")
    status, out, err = command(capsys, "warmup", *SMALL, *packed, "--needs", "q,k,v,sinks")
    assert status == 0 and re.match(r"(\d+) kernels built, 0 in the cache", out), out + err
    built = len(list(tmp_path.glob("*.ptx")))
    shape = ("--heads", "2", "--head-dim", "32", "--batch", "8", "--total-q", "4096", "--total-k", "2048", "--causal", "--softcap", "30", "--sinks")
    for more in ((), ("--backward", "--needs", "q,k,v,sinks")):
        status, out, err = command(capsys, "explain", *shape, "--max-seqlen-q", "512", "--max-seqlen-k", "512", "--device", "sm_80", *more)
        assert status == 0 and "simt" in out, err
    assert len(list(tmp_path.glob("*.ptx"))) == built, "explain compiles nothing that the warm-up did not"


def test_warmup_passes_every_option(capsys, monkeypatch):
    from numbaflash.toolchain import warmup as warming

    asked = {}
    monkeypatch.setattr(warming, "warmup", lambda **given: asked.update(given) or "done")
    more = (
        "--mask",
        "1,64,64",
        "--bias",
        "64,64:float32",
        "--alibi-slopes",
        "--seqlens-q",
        "--seqlens-k",
        "int64",
        "--dropout",
        "0.5",
        "--scale",
        "2",
    )
    assert command(capsys, "warmup", *SMALL, "--seqlen", "64", "--batch", "3", *more, "--direction", "backward", "--deterministic")[:2] == (
        0,
        "done\n",
    )
    assert asked["options"] == {
        "scale": 2.0,
        "softcap": None,
        "dropout": 0.5,
        "block_mask": False,
        "alibi_slopes": True,
        "sinks": False,
        "mask": ((1, 64, 64), "bool"),
        "bias": ((64, 64), "float32"),
        "seqlens_q": ((3,), "int32"),
        "seqlens_k": ((3,), "int64"),
    }
    assert (asked["directions"], asked["deterministic"], asked["return_lse"], asked["totals"]) == (["backward"], True, [False], ())
    assert command(capsys, "warmup", "--mask", "--bias", "--lse", "no,yes", "--device", "cpu")[0] == 0
    assert asked["options"]["mask"] is True and asked["options"]["bias"] is True and asked["return_lse"] == [False, True] and asked["seqlens"] is None
    assert (asked["caches"], asked["page_sizes"], asked["new_tokens"], asked["num_splits"]) == ((), (None,), [1], None)
    caches = ("--cache", "64,128", "--page-size", "16", "--new-tokens", "1,4", "--num-splits", "2")
    assert command(capsys, "warmup", *caches, "--device", "cpu")[0] == 0
    assert (asked["caches"], asked["page_sizes"], asked["new_tokens"], asked["num_splits"]) == ([64, 128], [16], [1, 4], 2)


def test_env_tells_every_probe(tmp_path):
    done = process("env", "--json", env=os.environ | {"NUMBAFLASH_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in (
        "numbaflash",
        "python",
        "numpy",
        "numba",
        "numba-cuda",
        "llvmlite",
        "cache folder",
        "cpu compiler",
        "gpu compiler",
        "cuda driver",
        "gpus",
    ):
        assert found[name].keys() == {"value", "error", "seconds"}
    assert found["numpy"]["value"] == np.__version__
    assert "writable" in found["cache folder"]["value"] and "threads" in found["cpu compiler"]["value"]
    assert found["gpu compiler"]["error"] is None and "PTX" in found["gpu compiler"]["value"]


def test_env_goes_on_when_everything_is_broken(tmp_path, monkeypatch, capsys):
    """Numba, NumPy and ctypes fail at import in the probes' processes, one kills its process, the cache folder is a file."""
    from numbaflash import environment

    for module in ("numba", "numpy", "cuda"):
        (tmp_path / f"{module}.py").write_text("raise OSError('broken on purpose')")
    (tmp_path / "ctypes.py").write_text("import os; os.kill(os.getpid(), 9)")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = environment.env()
    assert found["python"].error is None
    assert re.search("broken on purpose|ended with status", found["cpu compiler"].error)
    assert re.search("broken on purpose|ended with status", found["gpu compiler"].error)
    assert "failed: " in str(found) and json.dumps(found.to_dict())
    with pytest.raises(KeyError):
        found["no such probe"]


def test_env_ends_a_probe_that_hangs(monkeypatch):
    from numbaflash import environment

    monkeypatch.setattr(environment, "TIMEOUT", 0.01)
    assert "no answer within" in environment.env()["cpu compiler"].error


def test_fuzz_finds_nothing_in_the_cpu_family(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(capsys, "fuzz", "--minutes", "0.03", "--family", "cpu", "--dtype", "float32", "--head-dim", "32", "--seed", "1")
    assert status == 0, out + err
    assert "seed 1" in out and "no case failed" in out and not list(tmp_path.glob("numbaflash*"))


def test_fuzz_draws_options(capsys, monkeypatch):
    from numbaflash import testing
    from numbaflash.testing.strategies import FEATURES, PACKED

    asked = []
    monkeypatch.setattr(testing, "fuzz", lambda **options: asked.append(options.get("options")) or 0)
    for arguments in ((), ("--option", "mask", "--option", "packed"), ("--option", "mask", "--option", "all")):
        assert command(capsys, "fuzz", *arguments)[0] == 0
    assert asked[:2] == [None, ("mask", "packed")] and set(asked[2]) == {*FEATURES, PACKED}


def test_fuzz_of_packed_sequences(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    only = ("--family", "cpu", "--dtype", "float32", "--head-dim", "8", "--seed", "2", "--max-seqlen", "40")
    status, out, err = command(capsys, "fuzz", "--minutes", "0.1", "--direction", "both", "--option", "packed", *only)
    assert status == 0 and "packed sequences" in out, out + err


def test_fuzz_of_decoding(tmp_path, capsys, monkeypatch):
    from numbaflash import testing
    from numbaflash.testing.strategies import OF_DECODING

    monkeypatch.chdir(tmp_path)
    only = ("--family", "cpu", "--dtype", "float32", "--head-dim", "8", "--seed", "2", "--max-seqlen", "40")
    status, out, err = command(capsys, "fuzz", "--minutes", "0.05", "--direction", "decode", *only)
    assert status == 0 and out.startswith("fuzz: decode, cpu") and "no case failed" in out, out + err
    asked = []
    monkeypatch.setattr(testing, "fuzz", lambda **options: asked.append(options["options"]) or 0)
    assert command(capsys, "fuzz", "--direction", "decode", "--option", "all")[0] == 0 and set(asked[0]) == set(OF_DECODING)


def test_fuzz_replays_decoding(tmp_path, capsys):
    from numbaflash.testing import Cache, DecodeCase

    case = DecodeCase(seqlen_k=8, head_dim=8, head_dim_v=8, cache=Cache((7, 0), page_size=4))
    (tmp_path / "case.json").write_text(f'{{"direction": "decode", "case": {case.to_json()}}}')
    status, out, err = command(capsys, "fuzz", "--family", "cpu", "--replay", tmp_path / "case.json")
    assert status == 0 and "run_decode_case" in out and "passes" in out, out + err


def test_fuzz_refuses(tmp_path, capsys):
    refused(capsys, "in decoding; got bias", "fuzz", "--family", "cpu", "--direction", "decode", "--option", "bias")
    refused(capsys, "invalid choice: 'masks'", "fuzz", "--option", "masks")
    refused(capsys, "minutes must be positive", "fuzz", "--minutes", "0")
    refused(capsys, "max_seqlen must be at least 1; got 0", "fuzz", "--max-seqlen", "0")
    refused(capsys, "library must be one of", "fuzz", "--library", "tensorflow")
    refused(capsys, "No such file", "fuzz", "--replay", tmp_path / "no.json")
    refused(capsys, "leave out minutes, seed", "fuzz", "--replay", tmp_path / "no.json", "--minutes", "1", "--seed", "3")
    (tmp_path / "bad.json").write_text("[]")
    refused(capsys, "holds no case", "fuzz", "--replay", tmp_path / "bad.json")


def test_fuzz_replays_a_case(tmp_path, capsys):
    from numbaflash.testing import Case

    case = Case(dtype="float32", seqlen_q=3, seqlen_k=5, heads=1, kv_heads=1, head_dim=8, head_dim_v=8)
    (tmp_path / "case.json").write_text(case.to_json())
    status, out, err = command(capsys, "fuzz", "--family", "cpu", "--replay", tmp_path / "case.json")
    assert status == 0 and "passes" in out, out + err


# ---- what is missing


def test_a_missing_package_and_a_missing_file_are_told(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    for name in [name for name in sys.modules if name.startswith(("hypothesis.", "numbaflash.testing.strategies"))]:
        monkeypatch.delitem(sys.modules, name)
    refused(capsys, "the package hypothesis, which is not installed: pip install hypothesis", "fuzz", "--minutes", "0.01")
    refused(capsys, r"nowhere\.jsonl: No such file or directory", "bench", "show", tmp_path / "nowhere.jsonl")


# ---- as a process


def test_version_and_help_are_light():
    code = (
        "import sys, numbaflash.cli\n"
        "try: numbaflash.cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "heavy = {'cupy', 'torch', 'jax', 'sphinx', 'hypothesis', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"numbaflash {nf.__version__}"
    assert process("--help").returncode == 0


def test_a_reader_that_goes_away_is_no_error():
    running = subprocess.Popen([sys.executable, "-m", "numbaflash", "support"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.close()
    assert running.stderr.read() == b"" and running.wait(60) in (141, -signal.SIGPIPE)
    running.stderr.close()


def test_interrupt_is_one_line(tmp_path):
    running = subprocess.Popen(
        [sys.executable, "-u", "-m", "numbaflash", "fuzz", "--family", "cpu", "--minutes", "5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert running.stdout.readline().startswith("fuzz:")
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, "numbaflash: interrupted\n") and not list(tmp_path.glob("numbaflash*"))


def test_an_interrupt_in_the_middle(capsys, monkeypatch):
    from numbaflash.cli import support

    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(support, "run", interrupted)
    assert command(capsys, "support") == (130, "", "numbaflash: interrupted\n")


def test_memory_that_cannot_be_had_is_one_line(capsys, monkeypatch, tmp_path, operands):
    from numbaflash import api

    def hungry(*args, **options):
        raise MemoryError("Unable to allocate 1 PiB")

    files.save(tmp_path / "in.npz", operands)
    monkeypatch.setattr(api, "forward", hungry)
    refused(capsys, "not enough memory: Unable to allocate", "run", tmp_path / "in.npz", "--out", tmp_path / "out.npz")
