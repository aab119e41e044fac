"""The benchmarks without a GPU: grids, records, tables, timing against a simulated device, tables, plots, the command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from simulated_gpu import ROOT, OnCpu, SimulatedDevice

import numbaflash
from bench import backward, forward, grids, latency, options, training
from numbaflash.benchmarks import accuracy, cells, evidence, gpu, passes, peers, plots, prebuild, progress, records, tables, timing

CELL = cells.Cell("float16", 2, 64, 4, 2, 16, True)


def record(library="numbaflash", ms=1.0, cell=CELL, **more):
    base = {"bench": "forward", "gpu": "NVIDIA H200", "direction": "forward", **cell.fields(), "library": library, "version": "1"}
    return {**base, "ms": ms, "tflops": None if ms is None else cell.flops / ms / 1e9, **more}


def parse(text, module=forward):
    return module.parse(text.split())


# grid


def test_the_default_grid_is_the_issues_144_cells():
    grid = forward.parse([]).cells
    assert len(grid) == len(set(grid)) == 144
    assert all(cell.batch * cell.seqlen == 16384 for cell in grid)
    equal = [cell for cell in grid if cell.heads == cell.kv_heads]
    assert len(equal) == 72 and all(cell.heads * cell.head_dim == 2048 for cell in equal)
    assert {(cell.heads, cell.kv_heads) for cell in grid if cell not in equal} == {(32, 8)}


def test_options_select_a_part_of_the_grid():
    options = parse("--dims 96 --seqlens 128,256 --dtypes fp16 --causal causal --heads 12/4 --tokens 512 --libraries fa2,numbaflash")
    assert options.cells == [cells.Cell("float16", 4, 128, 12, 4, 96, True), cells.Cell("float16", 2, 256, 12, 4, 96, True)]
    assert options.libraries == ["fa2", "numbaflash"]


def test_quick_is_smaller_and_is_overridden_by_other_options():
    assert len(forward.parse(["--quick"]).cells) == 18
    options = forward.parse(["--quick", "--dims", "64", "--rounds", "3"])
    assert len(options.cells) == 6 and options.rounds == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dims", "300"], "--dims takes whole numbers from 1 to 256; got '300'"),
        (["--seqlens", "1k"], "--seqlens takes whole numbers from 1 to 16384; got '1k'"),
        (["--dtypes", "fp8"], "--dtypes takes bf16, fp16, fp32; got 'fp8'"),
        (["--causal", ""], "--causal must name at least one"),
        (["--heads", "6/4"], "H a multiple of Hk; got '6/4'"),
        (["--libraries", "fa9"], "--libraries takes numbaflash, fa4, cudnn, fa2, dense; got 'fa9'"),
        (["--budget", "0"], "--budget must be above 0"),
        (["--rounds", "-1"], "--rounds must be above 0"),
        (["--tokens", "0"], "--seqlens takes whole numbers from 1 to 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        forward.parse(arguments)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_flops_count_visible_pairs_only():
    full = cells.Cell("float16", 1, 4, 2, 2, 8, False)
    causal = cells.Cell("float16", 1, 4, 2, 2, 8, True)
    assert full.flops == 4 * 2 * 16 * 8
    assert causal.flops == 4 * 2 * (1 + 2 + 3 + 4) * 8
    assert CELL.input_bytes == 2 * 2 * 64 * 16 * (4 + 2 + 2)


def test_tasks_travel_as_json():
    packed_cell = cells.PackedCell("bfloat16", "some", (3, 5), 4, 2, 16, True)
    tasks = [prebuild.Task(passes.Backward, cell, ("numbaflash", "fa4")) for cell in forward.parse(["--quick"]).cells]
    tasks.append(prebuild.Task(passes.PackedForward, packed_cell, ("numbaflash",)))
    assert [prebuild.Task.from_json(json.loads(json.dumps(task.to_json()))) for task in tasks] == tasks


# records


def test_records_survive_a_file(tmp_path):
    saved = [record(), record("fa2", None, skipped="not there"), record("fa4", 2)]
    path = records.write(tmp_path / "new" / "a.jsonl", saved)
    assert records.read(path) == saved
    assert [p.name for p in path.parent.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ms": None}, "must say why"),
        ({"ms": "1"}, "'ms' of a record must be int or float or null"),
        ({"ms": float("nan")}, "must be finite"),
        ({"heads": True}, "'heads' of a record must be int"),
        ({"causal": 1}, "'causal' of a record must be bool or str"),
    ],
)
def test_a_wrong_record_is_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        records.write(tmp_path / "a.jsonl", [{**record(), **change}])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field", records.FIELDS)
def test_each_field_is_required(field):
    broken = record()
    del broken[field]
    with pytest.raises(ValueError, match=f"no field '{field}'"):
        records.check(broken)


@pytest.mark.parametrize("line", ["{", "3", "{}"])
def test_a_bad_line_is_named(line, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record()) + f"\n{line}\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2"):
        records.read(path)


def test_a_second_run_of_a_day_gets_its_own_file(tmp_path):
    first = records.result_path("NVIDIA H200", "forward", tmp_path, "2026-01-02")
    assert first.name == "2026-01-02-h200-forward.jsonl"
    first.touch()
    assert records.result_path("NVIDIA H200", "forward", tmp_path, "2026-01-02").name == "2026-01-02-h200-forward-2.jsonl"
    assert records.slug("NVIDIA GeForce RTX 4090") == "rtx-4090" and records.slug("") == "unknown"


def test_a_run_names_its_commit_and_command(monkeypatch):
    assert records.run_fields("abc")["commit"] == "abc"
    fields = records.run_fields()
    assert fields["command"] and fields["date"].endswith("+00:00")
    monkeypatch.setenv("PATH", "")
    assert records.git_commit() is None and records.driver_version() is None


# timing


def test_device_time_is_measured_behind_a_slow_host():
    device = SimulatedDevice()
    calls = {"slow host": device.call("slow host", 0.2, 0.1), "fast host": device.call("fast host", 0.001, 0.1)}
    result = timing.measure(device, calls, rounds=5, target_ms=2.0)
    for times in result.values():
        assert not times.host_bound and times.launches == 20 and len(times.ms) == 5
        assert times.ms == pytest.approx([0.1] * 5)
    assert result["slow host"].spin_ms > 20 * 0.2 > 1


def test_a_call_that_waits_for_the_device_is_marked():
    device = SimulatedDevice()
    result = timing.measure(device, {"waits": device.call("waits", 0.1, 1.0, waits=True)}, rounds=3, target_ms=4.0)["waits"]
    assert result.host_bound and result.summary()["host_bound"] is True
    assert result.ms == pytest.approx([1.1] * 3, rel=0.1)


def test_launches_follow_the_target_within_bounds():
    device = SimulatedDevice()
    calls = {"long": device.call("long", 0.01, 50.0), "short": device.call("short", 0.0, 0.001)}
    result = timing.measure(device, calls, rounds=1, target_ms=10.0)
    assert result["long"].launches == 1 and result["short"].launches == timing.MAX_LAUNCHES


def test_libraries_take_turns():
    device = SimulatedDevice()
    calls = {name: device.call(name, 0.0, 10.0) for name in "abc"}
    timing.measure(device, calls, rounds=3, target_ms=1.0)
    assert "".join(device.log[-9:]) == "abc" + "bca" + "cab"


def test_quartiles_interpolate():
    assert timing.quartiles([4, 1, 3, 2]) == (1.75, 2.5, 3.25)
    assert timing.quartiles([7]) == (7, 7, 7)
    assert timing.Times([3.0, 1.0, 2.0], 5).summary() == {
        "ms": 2.0, "ms_q1": 1.5, "ms_q3": 2.5, "ms_min": 1.0, "rounds": 3, "launches": 5, "host_bound": False
    }  # fmt: skip


def test_inputs_rotate_past_the_cache():
    assert timing.input_sets(200, 60) == 1 and timing.input_sets(179, 60) == 2 and timing.input_sets(1, 60) == 180


def test_a_budget_is_kept_whatever_a_cell_costs():
    now = [0.0]
    budget = timing.Budget(100.0, 50, 5, reserve=10.0, now=lambda: now[0])
    for _ in range(50):
        target = budget.target_ms(4)
        measuring = 3.1 * 5 * 4 * target / 1e3
        now[0] += 0.9 + measuring
        budget.cell_done(4, target, measuring, 0.9 + measuring)
    assert 60 < now[0] <= 91
    assert budget.overrun == pytest.approx(now[0] - 90)


def test_a_budget_that_is_over_still_measures():
    now = [0.0]
    budget = timing.Budget(5.0, 3, 5, floor_ms=1.5, now=lambda: now[0])
    now[0] = 50.0
    assert budget.target_ms(4) == 1.5 and budget.overrun == 45.0
    rich = timing.Budget(1e6, 3, 5, ceiling_ms=40, now=lambda: now[0])
    assert rich.target_ms(4) == 40


# a run on a simulated device


def simulated_run(options, device, what=passes.Forward, **libraries):
    common = {"gpu": "NVIDIA Simulated", "driver": "1"}
    built = [{"what": what.__name__, "library": "fa2", "cell": str(cell), "error": "x"} for cell in options.cells[:1]]
    told = {"library": "numbaflash", "seconds": 1.0, "evidence": {"family": "prebuilt"}}
    built += [{"what": what.__name__, "cell": str(cell), **told} for cell in options.cells[1:]]
    libraries = {name.replace("_", "-"): how for name, how in libraries.items()}
    return grids.Run(what, options, {name: OnCpu(name, device, **how) for name, how in libraries.items()}, common, device, built)


def test_a_run_measures_what_is_right_and_reports_the_rest(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    device = SimulatedDevice()
    options = parse("--dims 16 --seqlens 40 --dtypes bf16 --heads 4/2 --tokens 80 --rounds 3 --budget 5")
    run = simulated_run(
        options,
        device,
        numbaflash={"ms": 1.0},
        fa4={"ms": 0.5, "spoil": 9.0},
        cudnn={"ms": 2.0},
        fa2={"ms": 1.0, "fails": True},
        dense={"ms": 9.0, "unfit": "needs too much"},
    )
    monkeypatch.setattr(evidence, "kernels", lambda calls: [[f"kernel {n}"] for n, call in enumerate(calls) if call() is not None])
    path = tmp_path / "run.jsonl"
    notes = progress.Progress(len(options.cells), "forward", stream=sys.stderr)
    grids.measure([run], path, options.budget, notes)
    saved = records.read(path)
    assert len(saved) == 2 * 5
    by_name = {r["library"]: r for r in saved if r["causal"]}
    assert by_name["numbaflash"]["ms"] == pytest.approx(1.0) and by_name["cudnn"]["ms"] == pytest.approx(2.0)
    assert by_name["numbaflash"]["tflops"] == pytest.approx(options.cells[1].flops / 1e9)
    assert 0 <= by_name["numbaflash"]["error_per_tolerance"] <= 1 and by_name["numbaflash"]["family"] == "prebuilt"
    assert [r["family"] for r in saved if r["library"] == "numbaflash" and not r["causal"]] == ["family of numbaflash"]
    assert [r["kernels"] for r in saved if r["ms"] is not None] == [[f"kernel {n}"] for n in range(4)]
    assert by_name["cudnn"]["evidence_error"] == "RuntimeError: does not tell"
    assert by_name["fa4"]["skipped"].startswith("wrong result: out[")
    assert by_name["fa2"]["skipped"] == "RuntimeError: no such kernel"
    assert by_name["dense"]["skipped"] == "needs too much"
    assert grids.report([run], path, 1.0) == 0
    shown = capsys.readouterr()
    assert "2 of 2 cells at 1.00 x the best peer or above; least 2.00" in shown.out
    assert "fa4 left out: wrong result" in shown.err
    assert len(list(tmp_path.glob("*.png"))) == 1


def test_a_wrong_result_of_numbaflash_fails_the_run(tmp_path, capsys):
    pytest.importorskip("torch")
    device = SimulatedDevice()
    options = parse("--dims 16 --seqlens 40 --dtypes fp16 --causal full --heads 2/2 --tokens 40 --rounds 1 --budget 1")
    run = simulated_run(options, device, numbaflash={"ms": 1.0, "spoil": float("nan")}, fa2={"ms": 1.0})
    grids.measure([run], tmp_path / "run.jsonl", options.budget, progress.Progress(1, "forward", stream=sys.stderr))
    assert grids.report([run], tmp_path / "run.jsonl", 1.0) == 1
    shown = capsys.readouterr()
    assert "numbaflash has no time in 1 cells, first: fp16 D16 full 2/2 heads 1x40: wrong result: NaN" in shown.err
    assert "no cell has both numbaflash and a peer" in shown.out


def test_dense_is_attention():
    torch = pytest.importorskip("torch")
    import numpy as np

    from numbaflash import reference

    q, k, v = SimulatedDevice().inputs(CELL)
    got = peers.dense(torch, *(x.double() for x in (q, k, v)), peers.hidden_keys(torch, 64, 64, "cpu"))
    want, _ = reference.forward(CELL.problem, *(x.double().numpy() for x in (q, k, v)))
    np.testing.assert_allclose(got.numpy(), want, atol=1e-12)
    got = latency.dense_cupy(np, *(np.repeat(x.double().numpy(), 4 // x.shape[2], 2) for x in (q, k, v)), True)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_dense_is_left_out_where_memory_is_short():
    dense = object.__new__(peers.Dense)
    assert dense.unfit(CELL, 2**30) is None
    assert "GiB" in dense.unfit(cells.Cell("float16", 1, 65536, 32, 32, 64, False), 2**30)


def test_libraries_that_are_not_there_are_named(monkeypatch):
    def broken():
        raise ImportError("no module\nnamed so")

    monkeypatch.setitem(peers.LIBRARIES, "fa4", broken)
    found, missing = peers.find(["fa4"])
    assert not found and missing == {"fa4": "ImportError: no module named so"}
    assert len(peers.one_line(ValueError("x" * 1000))) == 200 and peers.one_line(KeyError()) == "KeyError"


# gradients


def test_the_grid_of_gradients_is_that_of_the_forward():
    options = backward.parse([])
    assert options.cells == forward.parse([]).cells
    assert options.libraries == ["numbaflash", "numbaflash-deterministic", "fa4", "cudnn", "fa2"]
    assert backward.parse(["--libraries", "dense"]).libraries == ["dense"]
    assert {cell.seqlen for cell in training.parse([]).cells} == {2048} and len(training.parse([]).cells) == 24


def test_flops_of_gradients_are_those_of_five_products():
    problem = CELL.problem
    assert cells.backward_flops(problem) == 5 * 2 * 16 * problem.visible_pairs * 2 * 4
    assert passes.Backward.flops(CELL) * 2 == passes.Forward.flops(CELL) * 5
    assert passes.Training.flops(CELL) * 2 == passes.Forward.flops(CELL) * 7
    assert CELL.bytes_of("q", "dk") == 2 * 2 * 64 * 16 * (4 + 2) and CELL.bytes_of("lse") == 4 * 2 * 4 * 64


def test_a_run_of_gradients(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    device = SimulatedDevice()
    options = parse("--dims 16 --seqlens 40 --dtypes bf16 --heads 4/2 --tokens 80 --rounds 3 --budget 5", backward)
    run = simulated_run(
        options,
        device,
        passes.Backward,
        numbaflash={"ms": 1.0},
        numbaflash_deterministic={"ms": 1.25},
        fa4={"ms": 0.5, "spoil": 9.0},
        cudnn={"ms": 0.5, "spoil": float("nan")},
        fa2={"ms": 1.5},
    )
    monkeypatch.setattr(evidence, "kernels", lambda calls: [[str(len(call()))] for call in calls])
    path = tmp_path / "run.jsonl"
    grids.measure([run], path, options.budget, progress.Progress(2, "backward", stream=sys.stderr))
    saved = records.read(path)
    assert len(saved) == 2 * 5 and {r["direction"] for r in saved} == {r["bench"] for r in saved} == {"backward"}
    by_name = {r["library"]: r for r in saved if r["causal"]}
    assert by_name["numbaflash"]["tflops"] == pytest.approx(2.5 * options.cells[1].flops / 1e9)
    assert 0 < by_name["fa2"]["error_per_tolerance"] <= 1 and by_name["fa2"]["workspace_bytes"] == 2**20
    assert by_name["fa4"]["skipped"].startswith("wrong result: dv[") and by_name["cudnn"]["skipped"] == "wrong result: NaN or infinite elements of dv"
    assert by_name["numbaflash"]["kernels"] == ["3"]
    assert grids.report([run], path, 1.0) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 cells at 1.00 x the best peer or above; least 1.50" in shown
    assert "deterministic: 0.80 x the speed of the other at least (bf16 D16 full 4/2 heads 2x40), median 0.80" in shown
    assert shown.splitlines()[2].split()[-3:] == ["det", "ratio", "+-%"]
    assert len(list(tmp_path.glob("*.png"))) == 1


def test_a_wrong_deterministic_gradient_fails_the_run(tmp_path, capsys):
    options = parse("--dims 16 --seqlens 40 --dtypes fp16 --causal full --heads 2/2 --tokens 40 --rounds 1 --budget 1", backward)
    run = simulated_run(options, SimulatedDevice(), passes.Backward, numbaflash={"ms": 1.0}, numbaflash_deterministic={"ms": 1.0, "spoil": 5.0})
    grids.measure([run], tmp_path / "run.jsonl", options.budget, progress.Progress(1, "backward", stream=sys.stderr))
    assert grids.report([run], tmp_path / "run.jsonl", 1.0) == 1
    assert "numbaflash-deterministic has no time in 1 cells, first: fp16 D16 full 2/2 heads 1x40: wrong result: dv[" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["numbaflash", "numbaflash-deterministic", "dense"])
@pytest.mark.parametrize("cell", [CELL, cells.Cell("bfloat16", 1, 70, 2, 2, 32, False)], ids=str)
def test_gradients_of_libraries_on_the_cpu_are_right(name, cell):
    pytest.importorskip("torch")
    library = peers.LIBRARIES[name]()
    arrays = cells.inputs(cell, operands=passes.Backward.operands, device="cpu")
    sample = accuracy.GradientSample(cell, *arrays)
    for what in (passes.Backward, passes.Training):
        call = what.bind(library, arrays, cell)
        for _ in range(2):
            worst, complaint = sample.judge(call())
            assert complaint is None and 0 < worst <= 1
        told = prebuild.evidence(what, library, arrays, cell)
        plans = told.get("plans", {"backward": told}) if told else {}
        assert [plan["family"] for plan in plans.values()] == ["cpu"] * len(plans) and bool(plans) == (name in peers.OWN)
    assert "shape" in sample.judge([arrays[1], arrays[2][:, 1:], arrays[3]])[1]
    assert sample.judge([arrays[1], arrays[2], arrays[3] * float("inf")])[1].startswith("wrong result: NaN or infinite elements of dv")


def test_torch_takes_only_the_named_back_end():
    torch = pytest.importorskip("torch")

    class Math(peers.Sdpa):
        name, backend = "math", "MATH"

    library, arrays = Math(), cells.inputs(CELL, operands=passes.Backward.operands, device="cpu")
    with library.scope():
        assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
        for what in (passes.Backward, passes.Training):
            assert accuracy.GradientSample(CELL, *arrays).judge(what.bind(library, arrays, CELL)())[1] is None


def test_gradients_of_dense_attention_need_more_memory():
    dense, cell = object.__new__(peers.Dense), cells.Cell("float16", 1, 2048, 4, 4, 64, False)
    room = 3.5 / 0.8 * 2 * 4 * 2048**2
    assert dense.unfit(cell, room) is None and "GiB" in dense.unfit(cell, room, "backward")


# training


class Meter:
    """A memory meter that knows what each library takes."""

    def __init__(self, sizes):
        self.sizes = iter(sizes)

    def peak(self, call):
        call()
        return next(self.sizes), 0


def costs(notes=None, **libraries):
    device = SimulatedDevice()
    made = {name: OnCpu(name, device, 1.0, **how) for name, how in libraries.items()}
    return training.Costs(made, {"gpu": "NVIDIA H200"}, (notes if notes is not None else []).append)


def on_cpu(cell, operands):
    return cells.inputs(cell, operands=operands, device="cpu")


def test_memory_is_compared_with_dense():
    pytest.importorskip("torch")
    notes, results = [], CELL.bytes_of("out", "dq", "dk", "dv")
    told = costs(notes, numbaflash={}, fa2={"fails": True}, dense={})
    told.memory(Meter([results + 1000, results + 10000]), [CELL], on_cpu)
    values = {(r["library"], r["quantity"]): r["value"] for r in told.records}
    assert values["numbaflash", "peak memory beyond results, share of dense"] == pytest.approx(0.1)
    assert values["numbaflash", "peak memory, share of dense"] == pytest.approx((results + 1000) / (results + 10000))
    assert values["numbaflash", "peak memory beyond out and gradients"] == pytest.approx(1000 / 2**20)
    assert values["numbaflash", "workspace of the backward, as planned"] == 1.0
    assert values["dense", "peak memory beyond results, share of dense"] == 1.0
    assert notes == ["memory of fa2 left out: RuntimeError: no such kernel"]
    assert all(r["bench"] == "training" and r["direction"] == "forward+backward" and r["ms"] is None for r in told.records)


def test_host_time_of_both_directions():
    pytest.importorskip("torch")
    told = costs(numbaflash={}, fa2={})
    told.host(lambda: None, CELL, on_cpu, blocks=2, calls=3)
    assert [(r["library"], r["direction"], r["case"].split(", ", 1)[1]) for r in told.records] == [
        ("numbaflash", "forward", "autograd, forward"),
        ("numbaflash", "backward", "autograd, backward"),
        ("numbaflash", "forward+backward", "autograd, forward and backward"),
        ("numbaflash", "backward", "by hand, gradients allocated"),
        ("fa2", "forward", "autograd, forward"),
        ("fa2", "backward", "autograd, backward"),
        ("fa2", "forward+backward", "autograd, forward and backward"),
    ]
    assert all(r["value"] > 0 and r["unit"] == "us" and r["samples"] == 2 for r in told.records)


def test_sections_of_training(monkeypatch):
    torch = pytest.importorskip("torch")
    options = training.parse(["--only", "host"])
    assert options.cells == [] and options.only == ["host"]
    with pytest.raises(SystemExit):
        training.parse(["--only", "speed"])
    asked = []
    for section in ("memory", "host"):
        monkeypatch.setattr(training.Costs, section, lambda self, *_, section=section: asked.append(section))
    monkeypatch.setattr(training, "TorchMemory", lambda: None)
    monkeypatch.setattr(training, "cupy_host", lambda costs: asked.append("cupy"))
    assert torch.is_grad_enabled()
    for only in ("host", "memory", "time,memory,host"):
        training.measure_costs(simulated_run(training.parse(["--only", only]), SimulatedDevice(), numbaflash={"ms": 1.0}), print)
    assert asked == ["host", "cupy", "memory", "memory", "host", "cupy"]


def test_training_on_a_simulated_gpu(tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    device = SimulatedDevice()
    for name, value in {"missing": lambda: None, "Gpu": lambda seed: device}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(records, "gpu_fields", lambda: {"gpu": "NVIDIA Simulated", "driver": "1", "torch": torch.__version__})
    libraries = {name: OnCpu(name, device, ms) for name, ms in (("numbaflash", 1.0), ("fa2", 1.1))}
    monkeypatch.setattr(grids, "find", lambda *_: (libraries, {"fa4": "not here"}))
    monkeypatch.setattr(prebuild, "prebuild", lambda *_, **__: [])
    monkeypatch.setattr(evidence, "kernels", lambda calls: [["k"] for call in calls if call()])
    monkeypatch.setattr(training, "measure_costs", lambda run, note: costs_of_one(libraries))
    arguments = "--dims 16 --seqlens 32 --dtypes fp16 --causal causal --heads 2/2 --tokens 64 --rounds 2 --budget 3"
    assert training.main([*arguments.split(), "--out", str(tmp_path)]) == 0
    saved = records.read(*tmp_path.glob("*-simulated-training.jsonl"))
    assert [r["library"] for r in saved] == ["numbaflash", "fa2", "numbaflash"] and saved[-1]["quantity"] == "host time a call"
    assert saved[0]["plans"]["backward"]["workspace_bytes"] == 2**20 and saved[0]["kernels"] == ["k"]
    assert len(list(tmp_path.glob("*.png"))) == 1
    shown = capsys.readouterr().out
    assert "fa4 is not measured: not here" in shown and "1 of 1 cells" in shown and "host time a call" in shown


def costs_of_one(libraries):
    told = training.Costs(libraries, {"gpu": "NVIDIA Simulated"}, print)
    told.record(CELL, "numbaflash", "case", "host time a call", [1.0, 2.0], "us", "forward")
    return told.records


# evidence and prebuild


def test_kernels_are_those_between_separators():
    spin = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    names = ["randn", spin, "void a", "b", "a", spin, "triu", spin, spin, "late"]
    events = list(enumerate(names))
    assert evidence.split(reversed(events), 2) == [["a", "b"], []]
    with pytest.raises(ValueError, match="4 of 6 separators"):
        evidence.split(events, 3)
    assert len(evidence.short("k" * 500)) == evidence.NAME_LIMIT


def test_cells_that_share_kernels_go_to_one_worker():
    grid = forward.parse([]).cells
    hands = prebuild.groups(grid, 8)
    assert len(hands) == 8 and sorted(map(str, sum(hands, []))) == sorted(map(str, grid))
    owners = {}
    for n, hand in enumerate(hands):
        for cell in hand:
            assert owners.setdefault(cell.config, n) == n
    assert prebuild.groups(grid[:1], 8) == [grid[:1]]


def test_prebuild_reports_what_its_workers_say(monkeypatch, tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, sys\n"
        "for task in json.load(open(sys.argv[-1])):\n"
        "    print(json.dumps({'library': task['libraries'][0], 'cell': str(task['cell']['seqlen']), 'seconds': 1.5}))\n"
        "print('{trunc')"
    )
    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kw: real([sys.executable, str(worker), command[-1]], **kw))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    grid, notes = forward.parse(["--quick"]).cells, []
    assert len(prebuild.prebuild(grids.Run.tasks(passes.Forward, grid, ["fa2", "fa4"]), notes.append)) == len(grid)
    assert "fa4 18 cells, slowest first call 1.5 s" in notes[0] and "2 processes" in notes[0]
    assert prebuild.prebuild(grids.Run.tasks(passes.Forward, grid, ["fa2"]), notes.append) == [] and len(notes) == 1
    assert "1 failed" in prebuild.summary([{"library": "fa4", "cell": "", "error": "x"}], 1, 2.0)


def test_prebuild_ends_workers_that_take_too_long(monkeypatch):
    real, started = subprocess.Popen, []

    def start(command, **kw):
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **kw))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    notes = []
    tasks = grids.Run.tasks(passes.Forward, forward.parse(["--quick"]).cells, ["numbaflash"])
    assert prebuild.prebuild(tasks, notes.append, timeout=0.2) == []
    assert "was ended" in notes[0] and all(worker.poll() is not None for worker in started) and len(started) == 2


# tables and plots


def test_the_table_shows_each_library_and_the_ratio():
    recs = [record(ms=2.0, ms_q1=1.9, ms_q3=2.1), record("fa4", 3.0), record("dense", 9.0), record("fa2", None, skipped="x")]
    text = tables.cell_table(recs)
    assert "fp16, 4/2 heads, TFLOP/s" in text and "causal" in text
    row = text.splitlines()[-1].split()
    assert row[:3] == ["16", "causal", "64"] and row[-2:] == ["1.50", "5.0"] and row[-3] != "-" and row[5] == "-"
    assert "3*" in tables.cell_table(recs, metric="ms")
    assert tables.cell_table(recs, markdown=True).splitlines()[-1].startswith("| 16 | causal | 64 | ")
    assert tables.GREEN + "  1.50" in tables.cell_table(recs, colour=True)
    assert tables.RED in tables.cell_table([record(ms=2.0), record("fa4", 1.0)], colour=True)
    with pytest.raises(ValueError, match="metric must be one of tflops, ms; got 'x'"):
        tables.cell_table(recs, metric="x")


def test_the_summary_lists_cells_below_the_bar():
    slow = cells.Cell("bfloat16", 1, 64, 4, 4, 32, False)
    text = tables.summary([record(ms=1.0), record("fa4", 1.2), record(ms=1.0, cell=slow), record("fa4", 0.9, cell=slow)])
    assert text.splitlines() == [
        "1 of 2 cells at 1.00 x the best peer or above; least 0.90, median 1.05",
        "  0.90  bf16 D32 full 4/4 heads 1x64",
    ]
    assert "and 1 more" in tables.summary([record(ms=2.0), record("fa4", 1.0), record(ms=2.0, cell=slow), record("fa4", 1.0, cell=slow)], listed=1)


def test_directions_are_never_mixed():
    both = [record(name, ms, direction=direction) for direction, ms in (("forward", 1.0), ("backward", 3.0)) for name in ("numbaflash", "fa4")]
    both.append(record(ms=0.001, quantity="host time a call", case="c", value=1.0, q1=1.0, q3=1.0, unit="us"))
    text = tables.tables(both, metric="ms")
    assert text.index("# forward") < text.index("# backward") and text.count("1 of 1 cells") == 2 and "host time a call" in text


def test_plots_have_one_file_for_each_dtype_and_kind_of_heads(tmp_path):
    pytest.importorskip("matplotlib")
    grid = parse("--dims 64,128 --seqlens 512,1024 --dtypes bf16,fp16").cells
    recs = [record(name, ms, cell) for cell in grid for name, ms in (("numbaflash", 1.0), ("fa4", 1.1), ("other", 3.0))]
    recs.append(record("fa2", None, grid[0], skipped="x"))
    written = plots.plot(recs, tmp_path / "run.jsonl")
    assert sorted(p.name for p in written) == ["run-bf16-32-8.png", "run-bf16-mha.png", "run-fp16-32-8.png", "run-fp16-mha.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in written)
    assert plots.plot([], tmp_path / "run.jsonl") == []


# latency


def test_host_time_leaves_the_device_out():
    now, waited = [0.0], []

    def call():
        now[0] += 3e-6

    def synchronize():
        waited.append(None)
        now[0] += 1.0

    values = latency.host_microseconds(call, synchronize, blocks=4, calls=10, clock=lambda: now[0])
    assert values == pytest.approx([3.0] * 4, rel=1e-6) and len(waited) == 5


def gathered(notes):
    libraries = {name: OnCpu(name, SimulatedDevice(), 1.0) for name in ("numbaflash", "fa2")}
    return latency.Latency(libraries, {"gpu": "NVIDIA H200"}, notes.append)


def test_yardsticks_of_the_host_are_recorded(monkeypatch):
    cupy = types.SimpleNamespace(__version__="14", RawKernel=lambda code, name: lambda grid, block, arguments: None)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(latency, "cupy_inputs", lambda cupy, cell: [None] * 3)
    notes = []
    run = gathered(notes)
    for name, case, _, call in latency.yardstick_calls(run.libraries, latency.SMALL):
        call()
        run.record(latency.SMALL, name, case, "host time a call", [1.0], "us")
    assert [(r["library"], r["case"]) for r in run.records] == [("python", "sum of 1000 integers"), ("cupy", "RawKernel that does nothing")]
    assert run.records[1]["version"] == "14"


def test_first_calls_are_cold_then_cached(monkeypatch):
    seen = []

    def fake(library, arrays, cell, folder):
        seen.append((library, arrays, folder))
        number = sum(f == folder for _, _, f in seen)
        if library == "fa2":
            raise RuntimeError("no fa2")
        return {"first call": 2.0 / number, "second call": 0.001, "import numbaflash": 0.2}

    monkeypatch.setattr(latency, "first_call", fake)
    notes = []
    run = gathered(notes)
    run.first(2, progress.Progress(3, "latency", stream=sys.stderr))
    firsts = {r["case"]: r["value"] for r in run.records if r["quantity"] == "first call of a process"}
    assert firsts == {"torch, cold": 2.0, "torch, cached": 1.0, "cupy, cold": 2.0, "cupy, cached": 1.0}
    assert [r["value"] for r in run.records if r["quantity"] == "import"] == [0.2]
    assert notes == ["first call of fa2 from torch left out: RuntimeError: no fa2"]
    assert len({folder for _, _, folder in seen}) == 5 and not any(Path(folder).exists() for _, _, folder in seen)
    assert "torch, cold" in tables.latency_table(run.records) and "| torch, cold |" in tables.latency_table(run.records, markdown=True)
    assert tables.tables(run.records) == tables.latency_table(run.records)


def test_a_first_call_that_fails_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="Error"):
        latency.first_call("numbaflash", "no_such_library", CELL, tmp_path)


def test_every_cache_moves_into_the_folder(tmp_path):
    moved = latency.caches_in(tmp_path)
    assert {"NUMBAFLASH_CACHE_DIR", "CUDA_CACHE_PATH", "CUPY_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"} <= set(moved)


@pytest.mark.parametrize("arguments", [["--only", "gpu"], ["--libraries", ","], ["--repeats", "0"]])
def test_latency_names_wrong_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        latency.parse(arguments)
    assert stop.value.code == 2 and arguments[0] in capsys.readouterr().err


# progress, and no GPU


def test_progress_is_plain_lines_without_a_terminal(capsys):
    bar = progress.Progress(3, "work", every=1e9)
    for name in "abc":
        bar.step(name)
    bar.note("noted")
    bar.close()
    assert capsys.readouterr().err.splitlines() == ["work 3/3 (0 s) c", "noted"]
    assert not progress.colour_wanted()


@pytest.mark.parametrize("module", [forward, backward, training, latency, options])
def test_without_a_gpu_one_line_says_so(module, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "missing", lambda: "no CUDA GPU was found")
    assert module.main([]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"{module.PROGRAM}: no CUDA GPU was found; ") and shown.out == ""


def test_the_command_line_without_a_gpu():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "bench.forward", "--quick"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


def test_pairs_of_dtypes_and_heads():
    cells = forward.parse(["--dtypes", "bf16,fp16", "--heads", "mha,gqa", "--pair", "--dims", "64", "--seqlens", "512"]).cells
    assert [(c.dtype, c.kv_heads) for c in cells] == [("bfloat16", 32)] * 2 + [("float16", 8)] * 2


def test_pairs_must_match(capsys):
    with pytest.raises(SystemExit):
        forward.parse(["--dtypes", "bf16", "--heads", "mha,gqa", "--pair"])
    assert "as many --dtypes as --heads; got 1 and 2" in capsys.readouterr().err


# ---- options


def on_the_cpu(monkeypatch):
    """Let what asks torch for CUDA get CPU tensors."""
    torch = pytest.importorskip("torch")
    for name in ("randn", "linspace", "full", "arange"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *shape, make=make, **more: make(*shape, **{**more, "device": "cpu"}))
    return torch


@pytest.mark.parametrize("name", options.scenarios("bfloat16", 64))
def test_the_sample_of_a_scenario_is_attention_under_its_options(name, monkeypatch):
    torch, scenario = on_the_cpu(monkeypatch), options.scenarios("bfloat16", 64)[name]
    seqlen = scenario.make(torch, scenario.cell)["window"][0] + 400 if "window" in name else 256
    cell = replace(scenario.cell, batch=2, seqlen=seqlen, heads=2, kv_heads=2)
    torch.manual_seed(0)
    given = scenario.make(torch, cell)
    q, k, v = (torch.randn(cell.problem.shape_of(operand), dtype=torch.bfloat16) for operand in "qkv")
    exact = [x.float() for x in (q, k, v)]  # of whose kernels other tests have compiled each
    out = numbaflash.forward(*exact, causal=cell.causal, **given | {name: given[name].float() for name in ("bias",) if name in given}).bfloat16()
    wanted = options.sampled(torch, cell, given, q, k, v)
    assert options.complaint(torch, cell, given, out, wanted) is None
    if "dropout" not in name:
        assert "off by" in options.complaint(torch, cell, given, out.roll(1, 1), wanted)


def test_the_table_of_options():
    plain = {**record(ms=1.0), "option": "plain"}
    cost = {**record(ms=1.25), "option": "softcap"}
    peer = {**record("flex", ms=2.5), "option": "softcap"}
    plain_beside = {**record(peers.OURS_PLAIN, ms=1.0), "option": "softcap"}
    _, first, second = options.table([plain, cost, peer, plain_beside]).splitlines()
    assert first.split() == ["plain", "forward", "1.000", "-", "-", "-"]
    assert second.split() == ["softcap", "forward", "1.250", "0.80", "flex", "2.500", "2.00"]


def test_a_share_of_the_window_is_told():
    """Twice the window in 2.2 times the time, for a little less than twice the pairs."""
    found = []
    for keys, ms in zip(options.WINDOWS, (1.0, 2.2, None), strict=True):
        scenario = options.scenarios("bfloat16", 64)[options.window_name(keys)]
        problem = options.problem_of(scenario.cell, scenario.make(None, scenario.cell))
        assert problem.visible_pairs == sum(min(keys, query + 1) for query in range(scenario.cell.seqlen))
        tflops = ms and options.forward_flops(problem) / ms / 1e9
        found.append({**record(ms=ms or 1.0), "option": options.window_name(keys), "ms": ms, "tflops": tflops, "skipped": "too long"})
    (line,) = options.proportions(found)
    assert line == "window 2048 at 32k, forward: 2.20 x the time of window 1024 for 1.97 x the pairs: 1.12"
    assert options.table(found).endswith(line)


@pytest.mark.parametrize("name", ["alibi", *map(options.window_name, options.WINDOWS)])
def test_torchs_fa2_takes_windows_and_alibi(name, monkeypatch):
    """By shapes alone, without a GPU: torch's own description of the operator and of its derivative."""
    torch, scenario = on_the_cpu(monkeypatch), options.scenarios("bfloat16", 64)[name]
    given = scenario.make(torch, scenario.cell)
    assert "fa2" in scenario.peers
    schema = torch.ops.aten._flash_attention_forward.default._schema
    arguments = {argument.name for argument in schema.arguments}
    assert {"window_size_left", "window_size_right", "alibi_slopes"} <= arguments and "softcap" not in arguments
    q, k, v = (torch.empty(scenario.cell.problem.shape_of(operand), dtype=torch.bfloat16, device="meta") for operand in "qkv")
    asked = {}
    operator = torch.ops.aten._flash_attention_forward.default
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", lambda *given, **more: asked.update(more) or operator(*given, **more))
    peers = options.Peers()
    out = peers.bind("fa2", scenario, given, q, k, v)()
    assert out.shape == q.shape
    left, right = given.get("window", (None, None))
    assert asked["window_size_left"] == left and asked["window_size_right"] == right and asked["alibi_slopes"] is given.get("alibi_slopes")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if name == "alibi":
        with pytest.raises(NotImplementedError, match="knows no ALiBi"):
            peers.bind("fa2", scenario, given, *leaves)
    else:
        gradients = torch.autograd.grad(peers.bind("fa2", scenario, given, *leaves)().sum(), leaves)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
