"""`bench.varlen` without a GPU: lengths, operations, samples, the libraries' calls, and a run on a simulated device."""

from __future__ import annotations

import sys
import types

import pytest
from simulated_gpu import OnCpu, SimulatedDevice

import numbaflash
from bench import grids, varlen
from numbaflash.benchmarks import cells, evidence, gpu, packed, passes, peers, prebuild, records, tables

CELL = cells.PackedCell("bfloat16", "some", (40, 7, 129, 1), 4, 2, 32, True)


def arrays_of(what, cell=CELL):
    pytest.importorskip("torch")
    return cells.inputs(cell, operands=what.operands, device="cpu")


# lengths and cells


def test_lengths_have_64k_tokens():
    assert all(sum(lengths) == varlen.TOKENS == 65536 for lengths in varlen.LENGTHS.values())
    uniform, uneven = varlen.LENGTHS["uniform"], varlen.LENGTHS["uneven"]
    assert min(uniform) >= 64 and max(uniform) <= 4096 and len(set(uniform)) > 20
    assert uniform == varlen.uniform_lengths() and uniform != varlen.uniform_lengths(seed=2)
    assert sorted(uneven) == [128] * 256 + [32768] and set(varlen.LENGTHS["equal"]) == {2048}


def test_the_default_cells():
    options = varlen.parse([])
    assert [cell.name for cell in options.cells] == ["uniform"] * 8 + ["equal"] * 8 + ["uneven"] * 8
    shapes = {(cell.head_dim, cell.heads, cell.kv_heads, cell.causal) for cell in options.cells}
    assert shapes == {(d, *heads, causal) for d, equal in ((128, 16), (64, 32)) for heads in ((equal, equal), (32, 8)) for causal in (False, True)}
    assert options.libraries == ["numbaflash", "numbaflash-padded", "fa4", "fa2", "cudnn"] and options.budget == 150
    part = "--only equal --dims 64 --heads 8/2 --causal causal --directions backward --libraries fa2 --dtype fp16"
    options = varlen.parse(part.split())
    assert options.cells == [cells.PackedCell("float16", "equal", (2048,) * 32, 8, 2, 64, True)]
    assert options.libraries == ["numbaflash", "fa2"] and options.directions == ["backward"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "short"], "--only takes uniform, equal, uneven; got 'short'"),
        (["--libraries", "flex"], "--libraries takes numbaflash-padded, fa4, fa2, cudnn; got 'flex'"),
        (["--directions", "both"], "--directions takes forward, backward; got 'both'"),
        (["--heads", "6/4"], "H a multiple of Hk; got '6/4'"),
        (["--dims", "0"], "--dims takes whole numbers from 1 to 256; got '0'"),
        (["--budget", "0"], "--budget must be above 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        varlen.parse(arguments)
    assert stop.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_operations_are_those_of_each_sequence():
    pairs = sum(n * (n + 1) // 2 for n in CELL.lengths)
    assert passes.PackedForward.flops(CELL) == 4 * pairs * 4 * 32
    assert passes.PackedBackward.flops(CELL) * 2 == passes.PackedForward.flops(CELL) * 5
    full = cells.PackedCell("bfloat16", "uneven", varlen.LENGTHS["uneven"], 1, 1, 64, False)
    assert passes.PackedForward.flops(full) == 4 * 64 * sum(n * n for n in full.lengths)


def test_a_cell_says_what_it_is():
    assert str(CELL) == "bf16 D32 causal 4/2 heads some 177" and CELL.boundaries == (0, 40, 47, 176, 177)
    problem = CELL.problem
    assert problem.packed and problem.batch == 4 and problem.q_shape == (177, 4, 32)
    told = CELL.fields()
    assert (told["batch"], told["seqlen_q"], told["seqlen_k"], told["lengths"], told["tokens"]) == (4, 129, 129, "some", 177)
    assert CELL.bytes_of("q", "k") == 2 * 177 * 32 * (4 + 2)


# samples and libraries


@pytest.mark.parametrize("what", [passes.PackedForward, passes.PackedBackward])
def test_a_sample_tells_right_from_wrong(what):
    arrays = arrays_of(what)
    sample = what.sample(CELL, *arrays)
    library = packed.Packed()
    results = what.bind(library, arrays, CELL)()
    worst, complaint = sample.judge(results)
    assert complaint is None and 0 < worst <= 1
    spoilt = list(results) if isinstance(results, tuple) else [results]
    for wrong, message in ((-spoilt[-1], "of the sequence at 0"), (spoilt[-1] * float("nan"), "NaN or infinite"), (spoilt[-1][1:], "has shape")):
        assert message in sample.judge([*spoilt[:-1], wrong])[1]
    only_last = spoilt[-1].clone()
    only_last[-1] += 1
    assert "of the sequence at 176" in sample.judge([*spoilt[:-1], only_last])[1]


@pytest.mark.parametrize("name", ["numbaflash", "numbaflash-padded"])
@pytest.mark.parametrize("what", [passes.PackedForward, passes.PackedBackward])
def test_our_libraries_are_right(name, what):
    arrays, library = arrays_of(what), packed.LIBRARIES[name]()
    call = what.bind(library, arrays, CELL)
    for _ in range(2):
        assert what.sample(CELL, *arrays).judge(library.rows(call(), CELL))[1] is None
    told = prebuild.evidence(what, library, arrays, CELL)
    assert told["family"] == "cpu" and ("'packed'" if name == "numbaflash" else "'lengths'") in told["config"]


def test_a_batch_that_is_nearly_all_padding_is_left_out():
    library, uneven = packed.Padded(), cells.PackedCell("bfloat16", "uneven", varlen.LENGTHS["uneven"], 2, 2, 64, True)
    assert "8421376 slots for 65536 tokens, more than 16 for each" in library.unfit(uneven, 2**60) and library.unfit(CELL, 0) is None


def fake_fa4(calls):
    """The function of flash-attn-4 with the arguments that the benchmark may give it, computed by numbaflash."""

    def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
        calls.append((max_seqlen_q, max_seqlen_k))
        bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        return numbaflash.attention_varlen(q, k, v, **bounds, causal=causal), None

    return types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)


@pytest.mark.parametrize("what", [passes.PackedForward, passes.PackedBackward])
def test_fa4_gets_boundaries_and_the_longest_sequence(what, monkeypatch):
    calls, arrays = [], arrays_of(what)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake_fa4(calls))
    library = packed.Fa4()
    assert what.sample(CELL, *arrays).judge(what.bind(library, arrays, CELL)())[1] is None
    assert calls == [(129, 129)]


def test_fa2_is_differentiated_by_torch():
    torch = pytest.importorskip("torch")
    arrays = cells.inputs(CELL, operands=passes.PackedBackward.operands, device="meta")
    library = packed.Fa2()
    assert passes.PackedForward.bind(library, arrays[1:], CELL)().shape == CELL.problem.out_shape
    with torch.enable_grad():
        gradients = passes.PackedBackward.bind(library, arrays, CELL)()
    assert [tuple(x.shape) for x in gradients] == [CELL.problem.shape_of(name) for name in ("dq", "dk", "dv")]


@pytest.mark.parametrize("name", ["_flash_attention_forward", "_cudnn_attention_forward"])
def test_arguments_are_in_torchs_order(name, monkeypatch):
    torch = pytest.importorskip("torch")
    schema = getattr(torch.ops.aten, name).default._schema
    arrays, seen = arrays_of(passes.PackedForward), []

    def attention(*given):
        seen.append(dict(zip((argument.name for argument in schema.arguments), given, strict=False)))
        return given

    library = {"_flash_attention_forward": packed.Fa2, "_cudnn_attention_forward": packed.Cudnn}[name]()
    aten = types.SimpleNamespace(**{name: attention})
    library._torch = types.SimpleNamespace(ops=types.SimpleNamespace(aten=aten), tensor=torch.tensor, int32=torch.int32)
    assert passes.PackedForward.bind(library, arrays, CELL)() is arrays[0]
    leaves = [x.detach().requires_grad_() for x in arrays]
    library.bind(*leaves, CELL)()
    for given, needs_gradients in zip(seen, (False, True), strict=True):
        assert all(given[each].tolist() == list(CELL.boundaries) and given[each].dtype == torch.int32 for each in ("cum_seq_q", "cum_seq_k"))
        assert (given["max_q"], given["max_k"], given["dropout_p"], given["is_causal"], given["return_debug_mask"]) == (129, 129, 0.0, True, False)
        assert given.get("attn_bias") is None and given.get("compute_log_sumexp", needs_gradients) is needs_gradients


# a run on a simulated device


class PackedOnCpu(OnCpu):
    def exact(self, q, k, v, cell):
        import torch

        parts = [slice(*cell.boundaries[n : n + 2]) for n in range(len(cell.lengths))]
        return torch.cat([super(PackedOnCpu, self).exact(q[None, part], k[None, part], v[None, part], cell.causal)[0] for part in parts])


def simulated(options, device, plain=2.0, **libraries):
    common = {"gpu": "NVIDIA Simulated", "driver": "1"}
    runs = []
    for what in (varlen.DIRECTIONS[name] for name in options.directions):
        run = varlen.Run(what, options, {name: PackedOnCpu(name.replace("_", "-"), device, **how) for name, how in libraries.items()}, common, device)
        run.plain.libraries = {"numbaflash": OnCpu("numbaflash", device, plain)}
        runs.append(run)
    return runs


@pytest.fixture
def options(monkeypatch):
    monkeypatch.setitem(varlen.LENGTHS, "uniform", (40, 9, 17))
    monkeypatch.setattr(varlen, "PLAIN_SEQLEN", 16)
    monkeypatch.setattr(evidence, "kernels", lambda calls: [["k"] for call in calls if call() is not None])
    return varlen.parse(["--only", "uniform", "--dims", "16", "--heads", "4/2", "--causal", "causal", "--rounds", "2", "--budget", "20"])


class Quiet:
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    step = note


def test_a_run(options, tmp_path, capsys):
    progress, path = Quiet(), tmp_path / "run.jsonl"
    libraries = {"numbaflash": {"ms": 1.0}, "fa2": {"ms": 2.0}, "fa4": {"ms": 0.5, "spoil": 9.0}, "cudnn": {"ms": 1.0, "fails": True}}
    runs = simulated(options, SimulatedDevice(), **libraries)
    grids.measure(runs, path, options.budget, progress, drop=True)
    saved = records.read(path)
    assert len(saved) == 2 * 4 and {r["bench"] for r in saved} == {"varlen"} and {r["lengths"] for r in saved} == {"uniform"}
    cell, plain = options.cells[0], cells.Cell("bfloat16", 4, 16, 4, 2, 16, True)
    for direction, what in varlen.DIRECTIONS.items():
        by_name = {r["library"]: r for r in saved if r["direction"] == direction}
        ours = by_name["numbaflash"]
        assert ours["tflops"] == pytest.approx(what.flops(cell) / 1e9) and ours["kernels"] == ["k"]
        assert ours["ideal_ms"] == pytest.approx(2.0 * what.flops(cell) / what.plain.flops(plain))
        assert ours["plain"]["ms"] == pytest.approx(2.0) and (ours["plain"]["batch"], ours["plain"]["seqlen_q"]) == (4, 16)
        assert "gpu" not in ours["plain"] and "head_dim" not in ours["plain"]
        assert by_name["fa4"]["skipped"].startswith("wrong result") and by_name["cudnn"]["skipped"] == "RuntimeError: no such kernel"
    assert varlen.report(runs, path, 1.0) == 0
    shown = capsys.readouterr().out.splitlines()
    share = ours["ms"] / ours["ideal_ms"]
    assert shown[0].split()[-3:] == ["fa4", "fa2", "cudnn"] and shown[2].split()[-4:] == [f"{share:.2f}", "-", "2.00", "-"]
    assert "uniform lengths, at least 1.00 x fa2: 2 of 2" in shown
    assert f"uniform lengths, at most 1.10 x the ideal: {2 * (share <= 1.1)} of 2" in shown
    assert "uniform" in str(progress.notes) and "2.00" in tables.tables(saved)


def test_what_the_budget_does_not_reach_is_recorded(options, tmp_path, capsys):
    progress = Quiet()
    runs = simulated(options, SimulatedDevice(), numbaflash={"ms": 1.0}, fa2={"ms": 1.0})
    grids.measure(runs, tmp_path / "run.jsonl", 0.0, progress, drop=True)
    assert [r["skipped"] for r in records.read(tmp_path / "run.jsonl")] == ["the budget was over"] * 4
    assert varlen.report(runs, "run.jsonl", 1.0) == 1
    shown = capsys.readouterr()
    assert "numbaflash has no time in 2 cells" in shown.err and "the budget was over" in shown.out
    assert any("cells were left out" in note for note in progress.notes)


@pytest.mark.parametrize("spoil", [None, 9.0])
def test_without_a_plain_kernel_or_ours_there_is_no_ideal(options, spoil, tmp_path, capsys):
    runs = simulated(options, SimulatedDevice(), numbaflash={"ms": 1.0, "spoil": spoil})
    for run in runs:
        run.plain.libraries["numbaflash"].spoil = 9.0
    grids.measure(runs, tmp_path / "run.jsonl", 20.0, Quiet())
    ours = records.read(tmp_path / "run.jsonl")[0]
    assert "ideal_ms" not in ours and varlen.report(runs, "run.jsonl", 1.0) == (spoil is not None)
    if spoil is None:
        assert ours["plain"]["skipped"].startswith("wrong result")
    assert "ideal: " not in capsys.readouterr().out


def test_kernels_of_the_plain_batch_are_built_too():
    options = varlen.parse(["--dims", "64", "--heads", "gqa"])
    tasks = varlen.Run.tasks(passes.PackedBackward, options.cells, ["numbaflash", "fa4"])
    assert [task.cell for task in tasks[:6]] == options.cells
    assert [str(task.cell) for task in tasks[6:]] == [f"bf16 D64 {mask} 32/8 heads 16x4096" for mask in ("full", "causal")]
    assert {task.what for task in tasks[6:]} == {passes.Backward} and {task.libraries for task in tasks[6:]} == {("numbaflash",)}


def test_a_first_call_is_reported(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(prebuild, "inputs", lambda cell, operands: cells.inputs(cell, operands=operands, device="cpu"))
    waited, device = [], SimulatedDevice()
    cuda = types.SimpleNamespace(synchronize=lambda: waited.append(None))
    made = prebuild.first_call(passes.PackedForward, CELL, PackedOnCpu("fa4", device, 1.0), cuda)
    assert made.pop("seconds") > 0 and len(waited) == 2
    assert made == {"what": "PackedForward", "library": "fa4", "cell": str(CELL), "evidence": {"family": "family of fa4"}}
    failed = prebuild.first_call(passes.PackedForward, CELL, PackedOnCpu("fa4", device, 1.0, fails=True), cuda)
    assert failed["error"] == "RuntimeError: no such kernel" and "seconds" not in failed


def test_the_command_on_a_simulated_gpu(options, tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    device = SimulatedDevice()
    for name, value in {"missing": lambda: None, "Gpu": lambda seed: device}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(records, "gpu_fields", lambda: {"gpu": "NVIDIA Simulated", "driver": "1", "torch": torch.__version__})
    monkeypatch.setattr(grids, "find", lambda names, classes: ({name: PackedOnCpu(name, device, 1.0) for name in names[:2]}, {"fa4": "not here"}))
    limits = []
    monkeypatch.setattr(prebuild, "prebuild", lambda tasks, note, timeout: limits.append(timeout) or [])
    monkeypatch.setattr(varlen, "Numbaflash", lambda: OnCpu("numbaflash", device, 1.0))
    arguments = "--only uniform --dims 16 --heads 4/2 --causal causal --libraries fa2 --rounds 1 --budget 8"
    assert varlen.main([*arguments.split(), "--out", str(tmp_path), "--commit", "abc"]) == 0
    saved = records.read(*tmp_path.glob("*-simulated-varlen.jsonl"))
    assert [(r["library"], r["direction"], r["commit"]) for r in saved] == [
        (name, direction, "abc") for direction in ("forward", "backward") for name in ("numbaflash", "fa2")
    ]
    assert limits == [4.0]
    shown = capsys.readouterr().out
    assert "fa4 is not measured: not here" in shown and "forward and backward, 1 cells" in shown and "of ideal" in shown


def test_without_a_gpu_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "missing", lambda: "no CUDA GPU was found")
    assert varlen.main([]) == gpu.NO_GPU
    assert capsys.readouterr().err.startswith(f"{varlen.PROGRAM}: no CUDA GPU was found; ")


def test_a_padded_batch_is_no_peer():
    base = {"bench": "varlen", "gpu": "NVIDIA H200", "direction": "forward", **CELL.fields(), "version": "1", "tflops": 1.0}
    found = [{**base, "library": name, "ms": ms} for name, ms in (("numbaflash", 1.0), (peers.OURS_PADDED, 0.5), ("fa2", 1.5))]
    assert "1 of 1 cells at 1.00 x the best peer or above; least 1.50" in tables.tables(found)
