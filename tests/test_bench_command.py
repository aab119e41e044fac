"""``numbaflash bench``: runs on the CPU and on a simulated device, what it refuses, and how two runs are compared."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from simulated_gpu import OnCpu, SimulatedDevice

from numbaflash import cli
from numbaflash.benchmarks import cells, cpu, evidence, gpu, passes, peers, prebuild, records, regressions, running, session, tables
from numbaflash.benchmarks.progress import Progress
from numbaflash.cli import bench

CELL = cells.Cell("float16", 2, 64, 4, 2, 16, True)
SMALL = ["--seqlen", "32", "--tokens", "64", "--head-dim", "16", "--heads", "4/2", "--rounds", "2", "--device", "cpu"]


def record(library="numbaflash", ms=1.0, cell=CELL, **more):
    base = {"bench": "forward", "gpu": "NVIDIA H200", "direction": "forward", **cell.fields(), "library": library, "version": "1"}
    return {**base, "ms": ms, "tflops": None if ms is None else cell.flops / ms / 1e9, "inputs": [1, 2], **more}


def bench_of(capsys, *words):
    """(exit status, output, errors) of the command."""
    try:
        status = cli.main(["bench", *map(str, words)])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    return status, said.out, said.err


# ---- runs


def test_a_run_on_the_cpu(tmp_path, capsys):
    pytest.importorskip("torch")
    out = tmp_path / "run.jsonl"
    words = ["--only", "prefill,backward,decode,batched-decode", "--context", "40", "--requests", "3", "--page-size", "0,16", "--budget", "60"]
    status, shown, _ = bench_of(capsys, *SMALL, *words, "--out", out)
    assert status == 0
    found = records.read(out)
    assert {(r["bench"], r["direction"]) for r in found} == {("forward", "forward"), ("backward", "backward"), ("decode", "decode")}
    assert {r["library"] for r in found if r["bench"] == "forward"} == {"numbaflash", "sdpa"}
    assert {(r["batch"], r["page_size"], r["library"]) for r in found if r["bench"] == "decode"} == {
        *((batch, page, "numbaflash") for batch in (1, 3) for page in (0, 16)),
        *((batch, 0, "sdpa") for batch in (1, 3)),  # it knows no pages
    }
    for r in found:
        assert r["ms"] > 0 and r["ms_q1"] <= r["ms"] <= r["ms_q3"] and r["method"] == cpu.METHOD and r["inputs"], r
        assert r["library"] != "numbaflash" or (r["family"] == "cpu" and r["error_per_tolerance"] < 1)
    assert all(f"# {kind}\n" in shown for kind in ("prefill", "backward", "decode", "batched-decode"))
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]
    assert bench_of(capsys, "show", out)[1].count("# ") == 3
    status, shown, _ = bench_of(capsys, "compare", out, out)
    assert status == 0 and "speed 1.00 to 1.00" in shown


def test_a_run_with_options_and_plots(tmp_path, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    out = tmp_path / "run.jsonl"
    status, shown, _ = bench_of(capsys, *SMALL, "--only", "options", "--option", "bias", "--out", out, "--plot")
    assert status == 0 and "plain" in shown
    found = records.read(out)
    assert {(r["option"], r["library"]) for r in found if r["ms"]} == {("bias", name) for name in ("numbaflash", "numbaflash-plain", "sdpa")}
    assert {p.name for p in tmp_path.iterdir()} == {"run.jsonl", "run-options.png"}


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else spec(name, *more))
    status, shown, told = bench_of(capsys, *SMALL, "--plot", "--out", tmp_path / "run.jsonl")
    assert (status, shown) == (2, "") and "pip install matplotlib" in told and not list(tmp_path.iterdir())


def test_without_torch_numpy_is_measured(tmp_path, capsys, monkeypatch):
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else spec(name, *more))
    out = tmp_path / "run.jsonl"
    status, shown, _ = bench_of(capsys, *SMALL, "--out", out)
    assert status == 0 and "# decode" not in shown
    assert {(r["bench"], r["library"]) for r in records.read(out)} == {("forward", "numbaflash"), ("forward", "numpy"), ("backward", "numbaflash")}
    status, _, told = bench_of(capsys, *SMALL, "--only", "decode")
    assert status == 2 and "--only decode needs PyTorch" in told


def test_what_would_be_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, shown, _ = bench_of(capsys, *SMALL, "--seqlen", "32,64", "--list")
    assert status == 0 and "prefill: 2 cells, fp32 D16 causal 4/2 heads 2x32 to fp32 D16 causal 4/2 heads 1x64" in shown
    assert not list(tmp_path.iterdir())


def simulated(tmp_path, **libraries):
    """Records of a run of one cell on a simulated device, and what was told."""
    pytest.importorskip("torch")
    device, notes = SimulatedDevice(), []
    found = {name: OnCpu(name, device, **how) for name, how in libraries.items()}
    options = type("Options", (), {"cells": [CELL], "rounds": 3, "budget": 5.0})
    run = running.Run(passes.Forward, options, found, {"gpu": "Simulated"}, device)
    progress = Progress(1, "bench")
    progress.note = notes.append
    running.measure([run], lambda: records.write(tmp_path / "a.jsonl", run.records), 5.0, progress)
    return records.read(tmp_path / "a.jsonl"), notes


def test_peers_that_fail_or_are_wrong_are_told_and_never_timed(tmp_path):
    found, notes = simulated(
        tmp_path,
        numbaflash={"ms": 1.0},
        fa4={"ms": 0.1, "spoil": 7.0},
        cudnn={"ms": 0.1, "fails": True},
        fa2={"ms": 2.0},
        dense={"ms": 3.0, "unfit": "too large"},
    )
    timed = {r["library"]: r["ms"] for r in found}
    assert (
        timed["fa4"] is timed["cudnn"] is timed["dense"] is None and timed["numbaflash"] == pytest.approx(1.0) and timed["fa2"] == pytest.approx(2.0)
    )
    why = {r["library"]: r.get("skipped") for r in found}
    assert why["fa4"].startswith("wrong result: ") and why["dense"] == "too large" and why["cudnn"]
    assert all(any(name in note for note in notes) for name in ("fa4", "cudnn", "dense"))


def test_a_wrong_result_of_numbaflash_fails(tmp_path, capsys):
    found, _ = simulated(tmp_path, numbaflash={"ms": 1.0, "spoil": 7.0}, fa2={"ms": 2.0})
    assert running.verdict(found) == 1 and "numbaflash has no time in 1 cells" in capsys.readouterr().err


def test_inputs_that_are_changed_are_noticed(tmp_path):
    class Changing(OnCpu):
        def bind(self, q, k, v, causal):
            right = super().bind(q, k, v, causal)

            def call():
                out = right()
                q[0, 0, 0, 0] += 1
                return out

            return call

    pytest.importorskip("torch")
    device = SimulatedDevice()
    found = {"numbaflash": OnCpu("numbaflash", device, 1.0), "fa2": Changing("fa2", device, 1.0)}
    options = type("Options", (), {"cells": [CELL], "rounds": 2, "budget": 5.0})
    run = running.Run(passes.Forward, options, found, {"gpu": "Simulated"}, device)
    admitted = run.admit(CELL, lambda text: None)
    assert set(admitted) == {"numbaflash"}
    assert [r["skipped"] for r in run.records] == ["wrong result: it has changed its inputs"]


def test_results_of_another_dtype_are_wrong():
    torch = pytest.importorskip("torch")

    class Wide(OnCpu):
        def bind(self, q, k, v, causal):
            right = super().bind(q, k, v, causal)
            return lambda: right().double()

    options = type("Options", (), {"cells": [CELL], "rounds": 2, "budget": 5.0})
    device = SimulatedDevice()
    libraries = {"numbaflash": Wide("numbaflash", device, 1.0), "fa2": OnCpu("fa2", device, 1.0)}
    run = running.Run(passes.Forward, options, libraries, {"gpu": "Simulated"}, device)
    assert set(run.admit(CELL, lambda text: None)) == {"fa2"} and torch
    assert [r["skipped"] for r in run.records] == ["wrong result: dtype float64, expected float16"]


def test_what_does_not_fit_is_left_out_before_it_is_made(tmp_path):
    device = cpu.Cpu()
    device.free_bytes = lambda: 1000
    options = type("Options", (), {"cells": [CELL], "rounds": 2})
    run = running.Run(passes.Forward, options, {"numbaflash": peers.Numbaflash()}, {"gpu": "here"}, device)
    assert run.admit(CELL, lambda text: None) == {}
    assert run.records[0]["skipped"].startswith("its arrays take ")


def test_other_inputs_in_a_cell_are_not_compared():
    with pytest.raises(ValueError, match="the inputs of numbaflash and fa2 differ, so they are not compared"):
        tables.cell_table([record(), record("fa2", 2.0, inputs=[1, 3])])


def test_libraries_and_options_of_the_command_line_are_those_of_the_engine():
    optional = pytest.importorskip("numbaflash.benchmarks.optional")
    from numbaflash.benchmarks import decoding

    assert set(bench.OPTIONS) == set(optional.OPTIONS)
    for of_kind in session.LIBRARIES.values():
        for kind, names in of_kind.items():
            known = {"prefill": peers.LIBRARIES, "backward": peers.LIBRARIES, "decode": decoding.LIBRARIES, "options": optional.LIBRARIES}[kind]
            assert set(names) <= set(known)


def test_a_run_on_a_simulated_gpu(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    device, built = SimulatedDevice(), []
    found = {"numbaflash": OnCpu("numbaflash", device, 1.0), "fa4": OnCpu("fa4", device, 2.0), "fa2": OnCpu("fa2", device, 0.5, spoil=9.0)}

    def prebuilt(tasks, note, **more):
        built.extend(tasks)
        return [{"what": "Forward", "library": "fa4", "cell": str(task.cell), "evidence": {"family": "told before"}} for task in tasks]

    monkeypatch.setattr(bench, "_device", lambda name: ("cuda", ""))
    monkeypatch.setattr(gpu, "Gpu", lambda seed: device)
    monkeypatch.setattr(session, "device_fields", lambda kind: {"gpu": "NVIDIA Simulated"})
    monkeypatch.setattr(peers, "find", lambda names, classes: (found, {"flashinfer": "ModuleNotFoundError: flashinfer"}))
    monkeypatch.setattr(prebuild, "prebuild", prebuilt)
    monkeypatch.setattr(evidence, "kernels", lambda calls: [["kernel"] for call in calls if call() is not None])
    words = ["--only", "prefill,backward", "--dtype", "float16", "--seqlen", "32", "--tokens", "64", "--head-dim", "16", "--heads", "4/2"]
    out = tmp_path / "run.jsonl"
    status, shown, told = bench_of(capsys, *words, "--rounds", "3", "--out", out)
    assert status == 0 and "flashinfer is not measured: ModuleNotFoundError" in shown and "fa2 left out: wrong result" in told
    records_of = {(r["direction"], r["library"]): r for r in records.read(out)}
    assert {r["gpu"] for r in records_of.values()} == {"NVIDIA Simulated"} and len(records_of) == 6 and len(built) == 2
    assert records_of["forward", "fa4"]["family"] == "told before" and records_of["forward", "fa2"]["ms"] is None
    for direction in ("forward", "backward"):
        ours = records_of[direction, "numbaflash"]
        assert ours["ms"] == pytest.approx(1.0) and ours["host_us"] > 0 and ours["kernels"] == ["kernel"]
        assert records_of[direction, "fa4"]["ms"] == pytest.approx(2.0)
    assert "2.00" in shown and "host us" in shown


# ---- what is refused


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "training"], "--only must be of prefill, .*; got training"),
        (["--dtype", "fp32"], "--dtype must be of float16, .*; got fp32"),
        (["--causal", "left"], "--causal must be of full, causal; got left"),
        (["--option", "score"], "--option must be of softcap, .*; got score"),
        (["--heads", "6/4"], "H a multiple of Hk; got '6/4'"),
        (["--head-dim", "300"], "--head-dim must be at most 256; got 300"),
        (["--new-tokens", "65"], "--new-tokens must be at most 64; got 65"),
        (["--seqlen", "1k"], "must hold whole numbers from 1 on; got '1k'"),
        (["--page-size", "-1"], "must hold whole numbers from 0 on"),
        (["--seqlen", ","], "must name at least one"),
        (["--rounds", "0"], "--rounds must be above 0; got 0"),
        (["--tokens", "-5"], "--tokens must be above 0; got -5"),
        (["--budget", "inf"], "--budget must be above 0; got inf"),
        (["--library", "fa9"], "--library must be of .*; got fa9"),
        (["--device", "tpu"], "--device must be cpu, cuda:INDEX or auto; got tpu"),
        (["--out", "run.txt"], "--out must end in .jsonl; got run.txt"),
        (["--out", "nowhere/run.jsonl"], "it must be a file in a folder that there is"),
        (["--only", "decode", "--context", "3", "--new-tokens", "4"], "--new-tokens must not be above --context"),
        (["compare", "one.jsonl"], "required: after"),
        (["compare", "one.jsonl", "two.jsonl"], "No such file"),
        (["compare", "one.jsonl", "two.jsonl", "--threshold", "2"], "--threshold must be at least 0 and below 1; got 2"),
        (["show", "one.jsonl"], "No such file"),
    ],
)
def test_wrong_words_are_named_and_nothing_is_written(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    device = [] if {"--device", "compare", "show"} & set(words) else ["--device", "cpu"]
    status, _, said = bench_of(capsys, *device, *words)
    assert status == 2 and len(said.splitlines()) == 1
    assert re.search(told, said), said
    assert not list(tmp_path.iterdir())


def test_results_are_not_replaced_unasked(capsys, tmp_path):
    out = tmp_path / "run.jsonl"
    out.write_text("mine")
    status, _, said = bench_of(capsys, *SMALL, "--only", "prefill", "--out", out)
    assert status == 2 and "is there already; name another file, or add --overwrite" in said and out.read_text() == "mine"


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "missing", lambda: "no CUDA GPU was found by PyTorch")
    status, _, said = bench_of(capsys, "--device", "cuda:0")
    assert status == 2 and "--device cuda:0: no CUDA GPU was found by PyTorch" in said
    status, shown, _ = bench_of(capsys, "--device", "auto", "--list")
    assert status == 0 and "prefill" in shown


def test_saved_runs_are_shown(tmp_path, capsys):
    path = records.write(tmp_path / "a.jsonl", [record(), record(library="sdpa", ms=1.5)])
    assert bench_of(capsys, "show", path)[:2] == (0, tables.tables(records.read(path)) + "\n")
    status, shown, _ = bench_of(capsys, "show", path, "--metric", "ms", "--markdown")
    assert status == 0 and "| 1.5* |" in shown


def test_a_damaged_file(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record()) + "\n{broken\n")
    status, _, said = bench_of(capsys, "show", path)
    assert status == 2 and "a.jsonl, line 2" in said
    path.write_text("")
    status, _, said = bench_of(capsys, "show", path)
    assert status == 2 and "there are no records" in said
    path.write_bytes(b"\xff\xfe\x00")
    status, _, said = bench_of(capsys, "show", path)
    assert status == 2 and "a.jsonl holds no records" in said


def test_what_cannot_be_kept_or_drawn_is_told_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "matplotlib" else find(name, *more))
    status, _, said = bench_of(capsys, *SMALL, "--only", "prefill", "--plot")
    assert status == 2 and "--plot needs the package matplotlib" in said
    monkeypatch.setattr(os, "access", lambda *unused: False)
    status, _, said = bench_of(capsys, *SMALL, "--only", "prefill")
    assert status == 2 and "this folder cannot be written" in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("measured", [False, True])
def test_an_interrupted_run_keeps_what_it_has(measured, tmp_path, capsys, monkeypatch):
    def interrupted(runs, *unused, **more):
        if measured:
            runs[0].skip(runs[0].options.cells[0], "a test", lambda text: None)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "measure", interrupted)
    out = tmp_path / "run.jsonl"
    status, _, said = bench_of(capsys, *SMALL, "--only", "prefill", "--out", out)
    assert status == 130 and (f"what was measured is in {out}" if measured else "nothing was measured") in said
    assert out.exists() is measured


# ---- two runs


def compared(before, after, **options):
    found = regressions.compare(before, after, **options)
    return found, regressions.table(found, 0.03)


def test_runs_are_compared_by_the_ratio_to_a_peer_of_both():
    """fa4, which only the first run has, is the fastest there and is no yardstick."""
    found, shown = compared([record(), record("fa4", 0.5), record("fa2", 2.0)], [record(ms=2.0), record("fa2", 4.2)])
    (change,) = found.changes
    assert change.peer == "fa2" and change.speed == pytest.approx(1.05) and not found.failed(0.03) and "faster" in shown


def test_a_slower_run_fails():
    found, shown = compared([record(), record("fa2", 2.0)], [record(), record("fa2", 1.8)])
    assert found.failed(0.03) and not found.failed(0.2) and "slower" in shown and "1 slower by more than 3%" in shown


def test_the_spread_is_allowed_for():
    wide = {"ms_q1": 0.9, "ms_q3": 1.1}
    found, _ = compared([record(**wide), record("fa2", 2.0)], [record(**wide), record("fa2", 1.8)])
    assert found.changes[0].noise == pytest.approx(0.2) and not found.failed(0.03)


def test_times_are_compared_where_there_is_no_peer():
    found, shown = compared([record()], [record(ms=1.5)])
    assert found.changes[0].peer is None and found.changes[0].speed == pytest.approx(2 / 3) and found.failed(0.03) and " ms " in shown
    with pytest.raises(ValueError, match="share no cell in which numbaflash and a peer have a time"):
        regressions.compare([record()], [record()], by="ratio")
    found, _ = compared([record(), record("fa2", 2.0)], [record(ms=3.0), record("fa2", 6.0)], by="time")
    assert found.failed(0.03)


def test_a_cell_without_a_time_any_more_fails():
    other = replace(CELL, seqlen=128)
    before = [record(), record(cell=other)]
    found, shown = compared(before, [record(), record(ms=None, cell=other, skipped="wrong result: x")])
    assert found.failed(0.03) and "no time any more" in shown and "wrong result: x" in shown
    found, shown = compared(before, [record()])
    assert not found.failed(0.03) and "only in the first run: forward, fp16" in shown
    found, shown = compared(before, [record(), record("fa2", 2.0, cell=other)])
    assert found.failed(0.03) and "there is no record of numbaflash" in shown


def test_a_cell_that_the_budget_did_not_reach_is_told_and_is_no_regression():
    other = replace(CELL, seqlen=128)
    found, shown = compared([record(), record(cell=other)], [record(), record(ms=None, cell=other, skipped=running.NO_TIME)])
    assert not found.failed(0.03) and "not reached in the second run: forward, fp16" in shown


def test_inputs_that_are_not_told_are_told_of():
    old = record()
    del old["inputs"]
    assert "1 cells whose inputs a run does not tell" in compared([old], [record()])[1]


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ([record(gpu="NVIDIA A100")], "the runs are of two devices"),
        ([record(threads=64, torch_threads=2)], "the runs are of two devices.*64 threads"),
        ([record(inputs=[1, 4])], "the inputs of the two runs differ"),
        ([record(method="another")], "the way of measuring of the two runs differ"),
        ([record(cell=replace(CELL, causal=False))], "share no cell"),
        ([record(cell=replace(CELL, dtype="bfloat16"))], "share no cell"),
        ([], "share no cell"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(after, told):
    with pytest.raises(ValueError, match=told):
        regressions.compare([record(method="one")], after)


def test_two_devices_are_compared_on_request():
    found = regressions.compare([record(), record("fa2", 2.0)], [record(gpu="x"), record("fa2", 2.0, gpu="x")], other_device=True)
    assert found.changes[0].speed == 1.0


def test_the_compare_command(tmp_path, capsys):
    before = records.write(tmp_path / "a.jsonl", [record(), record("fa2", 2.0)])
    after = records.write(tmp_path / "b.jsonl", [record(), record("fa2", 1.5)])
    status, shown, _ = bench_of(capsys, "compare", before, after)
    assert status == 1 and "slower" in shown
    assert bench_of(capsys, "compare", before, after, "--threshold", "0.5")[0] == 0
    status, shown, _ = bench_of(capsys, "compare", before, after, "--markdown")
    assert "| ratio to fa2 | 2.00 | 1.50 | -25.0% |" in shown


def test_inputs_on_the_cpu_are_the_same_each_time():
    one, other = (cpu.Cpu(3).inputs(CELL, number=1) for _ in range(2))
    assert all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(one, other, strict=True))
