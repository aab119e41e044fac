"""The benchmark of decoding without a GPU: cells, what is admitted, a run on a simulated device, and what it says."""

from __future__ import annotations

import types
from contextlib import nullcontext

import pytest
from simulated_gpu import SimulatedDevice

torch = pytest.importorskip("torch", reason="the benchmark holds its arrays in PyTorch")

from bench import decode, decode_peers, decode_report, decode_timing, gpu, peers, records, timing  # noqa: E402

SMALL = decode.DecodeCell("small", (40, 7, 64), 8, 2, 16, 0)
COMMON = {
    "gpu": "NVIDIA Simulated",
    "driver": "1",
    "torch": "2.0",
    "cudnn": 9,
    "method": decode_timing.METHOD,
    "versions": {"fa4": "4.0", "fa2": "torch 2.0"},
}


# cells and arguments


def test_cells_count_what_is_attended_to():
    cell = decode.DecodeCell("x", (10, 17), 32, 8, 128, 16)
    assert cell.bytes == 27 * 8 * 128 * 4 and cell.pages == 3 and cell.capacity == 32 and cell.cache_bytes == 48 * 8 * 128 * 4
    assert not cell.equal and decode.DecodeCell("x", (5, 5), 1, 1, 8, 0).equal
    mixed, equal = decode.LENGTHS["64 mixed"], decode.LENGTHS["64 mixed equal"]
    assert len(mixed) == len(equal) == 64 and min(mixed) >= 128 and max(mixed) <= 32768 and 0 <= sum(mixed) - sum(equal) < 64
    assert mixed == decode.mixed_lengths(64)
    twin = decode.equal_twin(decode.DecodeCell("64 mixed", mixed, 32, 8, 128, 16))
    assert (twin.name, twin.lengths, twin.page_size) == ("64 mixed equal", equal, 16)


def test_the_default_cells_and_a_part():
    options = decode.parse([])
    assert len(options.cells) == len(decode.LENGTHS) * 3 * 5 and {cell.page_size for cell in options.cells} == {0, 1, 16, 64, 256}
    options = decode.parse(["--only", "one of 1k,64 mixed", "--heads", "mqa", "--pages", "0,16", "--tokens", "1,4", "--libraries", "fa2"])
    assert {(cell.name, cell.tokens, cell.page_size) for cell in options.cells} == {
        (name, tokens, page) for name in ("one of 1k", "64 mixed") for tokens in (1, 4) for page in (0, 16)
    }
    assert {(cell.heads, cell.kv_heads) for cell in options.cells} == {(32, 1)} and options.libraries == ["fa2"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--only nothing", "--only takes"),
        ("--heads big", "--heads takes"),
        ("--pages -1", "--pages takes whole numbers from 0 (contiguous caches); got '-1'"),
        ("--pages 16,x", "--pages takes whole numbers from 0"),
        ("--dims 1000", "--dims takes"),
        ("--tokens 65", "--tokens takes"),
        ("--rounds 0", "--rounds must be above 0"),
        ("--budget -1", "--budget must be above 0"),
        ("--target 0", "--target must be above 0"),
    ],
)
def test_bad_words(words, told, capsys):
    with pytest.raises(SystemExit):
        decode.parse([words.split(" ")[0], words.split(" ")[1]])
    assert told in " ".join(capsys.readouterr().err.split())


def test_graphs_hold_each_cache_as_often():
    assert decode_timing.calls_in_graph(2**40, 1) == 2, "long calls"
    assert decode_timing.calls_in_graph(2**22, 45) == 45 and decode_timing.calls_in_graph(2**22, 7) == 35
    for attended in (2**19, 2**22, 2**28, 2**33):
        sets = timing.input_sets(attended, 60 * 2**20)
        assert decode_timing.calls_in_graph(attended, sets) % sets == 0


# what is admitted


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_libraries_that_are_right_are_admitted_and_others_named(page_size, tokens):
    cell = decode.DecodeCell("small", (40, 7, 64), 8, 2, 16, page_size, tokens)
    inputs, said = decode.Inputs(torch, cell, 2**14, "cpu"), {}
    assert len(inputs.caches) > 1, "past the cache"

    def planted(torch, cell, inputs):
        ours = decode_peers.bind_numbaflash(torch, cell, inputs)

        def call(k, v):
            out = ours(k, v).clone()
            out[-1, -1, 3, 5] += 0.5
            return out

        return call

    def broken(torch, cell, inputs):
        raise RuntimeError("no such kernel")

    bind = decode.BIND | {"fa4": planted, "flashinfer": broken}
    calls = decode.admit(torch, cell, inputs, ["numbaflash", "fa4", "cudnn", "flashinfer"], said.__setitem__, bind)
    assert set(calls) == {"numbaflash"} and 0 < calls["numbaflash"][1] < 1
    assert said["fa4"].startswith("wrong result: ") and said["fa4"].endswith("of sequence 2") and said["flashinfer"] == "RuntimeError: no such kernel"
    if page_size:
        assert said["cudnn"] == "NotImplementedError: it knows no pages"


def test_wrong_results_of_many_keys_are_refused():
    """Their elements are all small: of 32k keys none is above 0.05, so that no fixed tolerance tells them from zeros."""
    cell = decode.DecodeCell("long", (32768,), 2, 1, 64, 0)
    inputs = decode.Inputs(torch, cell, 1, "cpu")
    sample, (k, v) = decode.Sample(cell, inputs), inputs.gathered(0, 32768)
    weights = torch.einsum("hd,kd->hk", inputs.q[0, 0].double(), k[:, 0].double()) / 8

    def attended(weights, v=v):
        return (weights.softmax(-1) @ v[:, 0].double()).bfloat16()[None, None]

    right = attended(weights)
    error, fault = sample.judge(right)
    assert fault is None and error < 1 and right.abs().max() < 0.05
    for wrong in (right * 0, right.flip(2), attended(weights * 1.5), attended(weights[:, :16384], v[:16384]), right * float("nan"), right[:, :, :1]):
        assert sample.judge(wrong)[1].startswith("wrong result: ")
    assert sample.judge(right.view(1, 1, 1, 2, 64))[1] is None, "heads by key heads"


def test_the_longest_sequence_is_checked_too():
    inputs = decode.Inputs(torch, (cell := decode.DecodeCell("x", (5, 60, 9), 4, 2, 16, 0)), 1, "cpu")
    out = decode_peers.bind_numbaflash(torch, cell, inputs)(*inputs.caches[0]).clone()
    out[1, 0, 2] = 0
    assert decode.Sample(cell, inputs).judge(out)[1].endswith("of sequence 1")


@pytest.mark.parametrize("lengths", [(40, 40), (40, 7)])
@pytest.mark.parametrize(("name", "tokens"), [("cudnn", 1), ("cudnn", 3), ("efficient", 1), ("efficient", 3)])
def test_what_torch_gets_is_the_same_attention(lengths, tokens, name, monkeypatch):
    """Whatever back end it is held to: here the one that runs on the CPU."""
    cell = decode.DecodeCell("x", lengths, 8, 2, 16, 0, tokens)
    form = decode.sdpa_form(name, cell)
    monkeypatch.setitem(decode_peers.SDPA, name, "MATH")
    inputs = decode.Inputs(torch, cell, 1, "cpu")
    out = decode.BIND[name](torch, cell, inputs)(*inputs.caches[0])
    assert decode.Sample(cell, inputs).judge(out)[1] is None
    assert form == ("rows and mask" if tokens > 1 or not cell.equal else "rows" if name == "efficient" else "caches as they are")


@pytest.mark.parametrize(("page_size", "lengths", "tokens"), [(0, (40, 7), 1), (0, (40, 40), 3), (16, (40, 40), 1)])
def test_fa2_gets_lengths_and_pages_in_torchs_order(page_size, lengths, tokens):
    cell = decode.DecodeCell("x", lengths, 8, 2, 16, page_size, tokens)
    inputs, seen = decode.Inputs(torch, cell, 1, "cpu"), {}
    schema = torch.ops.aten._flash_attention_forward.default._schema

    def attention(*given, **named):
        names = [argument.name for argument in schema.arguments]
        assert set(named) <= set(names) | {"block_table"}
        seen.update(zip(names, given, strict=False), **named)
        return (given[0],)

    fake = types.SimpleNamespace(_flash_attention_forward=attention)
    stub = types.SimpleNamespace(ops=types.SimpleNamespace(aten=fake), arange=torch.arange, int32=torch.int32)
    k, v = inputs.caches[0]
    assert decode_peers.bind_fa2(stub, cell, inputs)(k, v).shape == inputs.q.shape
    assert seen["cum_seq_q"].tolist() == [0, tokens, 2 * tokens] and seen["cum_seq_k"].tolist() == [0, cell.capacity, 2 * cell.capacity]
    assert (seen["max_q"], seen["max_k"], seen["dropout_p"], seen["is_causal"], seen["return_debug_mask"]) == (
        tokens,
        cell.capacity,
        0.0,
        True,
        False,
    )
    assert seen["seqused_k"] is inputs.lengths and seen["key"].shape == (k.shape if page_size else (2 * cell.capacity, 2, 16))
    assert (seen["block_table"] is inputs.table) if page_size else "block_table" not in seen


def test_each_library_has_its_own_version():
    told = decode.versions({"torch": "2.0", "cudnn": 9})
    assert set(told) == {"numbaflash", *decode_report.PEERS}
    assert told["cudnn"] == "9 (torch 2.0)" and "2.0" not in told["fa4"] + told["flashinfer"]


# graphs


def test_a_graph_that_writes_nothing_is_refused(monkeypatch):
    inputs, calls = decode.Inputs(torch, SMALL, 2**14, "cpu"), []
    sample, ours = decode.Sample(SMALL, inputs), decode_peers.bind_numbaflash(torch, SMALL, inputs)

    class Graph:
        work = staticmethod(lambda: None)

        def replay(self):
            self.work()

    def call(k, v):
        calls.append(k)
        return ours(k, v)

    fake = types.SimpleNamespace(synchronize=lambda: None, CUDAGraph=Graph, graph=lambda graph: nullcontext())
    stub = types.SimpleNamespace(cuda=fake)
    count = 2 * len(inputs.caches)
    with pytest.raises(RuntimeError, match="its graph: wrong result: NaN"):
        decode_timing.captured(stub, call, inputs.caches, count, sample)
    assert len(calls) == 1 + count and calls[-1] is inputs.caches[0][0], "the sample is of the first caches"
    assert all(sum(k is each[0] for k in calls[1:]) == 2 for each in inputs.caches)
    Graph.work = staticmethod(lambda: ours(*inputs.caches[0]))
    decode_timing.captured(stub, call, inputs.caches, count, sample)()


def test_times_are_those_of_one_call():
    told = decode_timing.of_one_call(timing.Times([6.0, 3.0, 9.0], launches=4), 3)
    assert (told["ms"], told["ms_min"], told["launches"], told["rounds"]) == (2.0, 1.0, 12, 3)


# a run on a simulated device


class Quiet:
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    step = note


def once_each(calls, synchronize):
    for call in calls.values():
        call()
    return {"host_us": {name: [1.0, 2.0, 3.0] for name in calls}}


def simulated(monkeypatch, libraries, lengths=(40, 7, 64), words=(), device=None, **how):
    """A run whose libraries take so many milliseconds each: a number, or what is raised; wrong where negative."""
    monkeypatch.setitem(decode.LENGTHS, "8 mixed", lengths)
    monkeypatch.setitem(decode.HEADS, "gqa", (8, 2))
    monkeypatch.setattr(decode_timing, "host_fields", once_each)
    others = ",".join(name for name in libraries if name != "numbaflash")
    arguments = ["--only", "8 mixed", "--heads", "gqa", "--dims", "16", "--pages", "0", "--rounds", "3", "--libraries", others, *words]
    options, device = decode.parse(arguments), device or SimulatedDevice()

    def binding(name, ms):
        def bind(torch, cell, inputs):
            if isinstance(ms, Exception):
                raise ms
            ours = decode_peers.bind_numbaflash(torch, cell, inputs)

            def call(k, v):
                device.call(f"{name} {cell.name}", 0.0, abs(ms))()
                out = ours(k, v)
                return out if ms > 0 else out * 0

            return call

        return bind

    def capture(torch, call, caches, count, sample):
        if count == 1:
            return lambda: call(*caches[0])
        return lambda: [call(*caches[n % len(caches)]) for n in range(count)]

    bind = {name: binding(name, ms) for name, ms in libraries.items()}
    copy = device.call("copy", 0.0, 0.5)
    return decode.Run(options, torch, device, COMMON, copy, place="cpu", bind=bind, capture=how.pop("capture", capture)), device


def test_a_run(monkeypatch, tmp_path):
    libraries = {"numbaflash": 2.0, "fa4": 3.0, "fa2": 1.0, "cudnn": -1.0, "efficient": RuntimeError("no such kernel")}
    run, device = simulated(monkeypatch, libraries)
    progress, path = Quiet(), tmp_path / "run.jsonl"
    decode.measure(run, path, progress)
    saved = {r["library"]: r for r in records.read(path)}
    assert set(saved) == set(libraries) and not run.failed
    ours, cell = saved["numbaflash"], run.options.cells[0]
    assert ours["ms"] == pytest.approx(2.0) and saved["fa4"]["ms"] == pytest.approx(3.0) and ours["in_graph"] and ours["rounds"] == 3
    assert ours["bytes"] == cell.bytes == 111 * 2 * 16 * 4 and ours["tb_per_s"] == pytest.approx(cell.bytes / 2e-3 / 1e12)
    assert ours["copy_tb_per_s"] == pytest.approx(2 * decode.COPY_BYTES / 0.5e-3 / 1e12)
    assert ours["share_of_copy"] == pytest.approx(ours["tb_per_s"] / ours["copy_tb_per_s"])
    assert ours["equal"]["ms"] == pytest.approx(2.0) and ours["equal"]["bytes"] == cell.bytes and decode_report.of_equal(ours) == pytest.approx(1.0)
    assert set(ours["host_us"]) == set(decode_report.LABELS) and "host_us" not in saved["fa4"]
    assert (saved["fa4"]["version"], saved["fa2"]["version"], saved["fa2"]["form"]) == ("4.0", "torch 2.0", "lengths")
    assert saved["cudnn"]["skipped"].startswith("wrong result: ") and saved["efficient"]["skipped"] == "RuntimeError: no such kernel"
    assert any("cudnn left out: wrong result" in note for note in progress.notes) and any("no such kernel" in note for note in progress.notes)
    told = decode_report.table(run.records)
    assert "0 of 1 cells at or above every peer; ahead in every cell: missed in 1" in told and "0.50 fa2: 8 mixed, 8/2" in told


def test_everything_of_a_cell_takes_turns(monkeypatch, tmp_path):
    run, device = simulated(monkeypatch, {"numbaflash": 2.0, "fa2": 1.0}, words=["--target", "0.001"])
    decode.measure(run, tmp_path / "run.jsonl", Quiet())
    turns = [a for a, b in zip(device.log, [None, *device.log], strict=False) if a != b]
    names = ["copy", "numbaflash 8 mixed", "fa2 8 mixed", "numbaflash 8 mixed equal"]
    rounds = [names[turn:] + names[:turn] for turn in range(3)]
    expected = [name for each in rounds for name in each]
    last = len(turns) - 1 - turns[::-1].index("fa2 8 mixed")
    assert "".join(f"{name};" for name in expected) in "".join(f"{name};" for name in turns), turns[: last + 1]


def test_without_a_graph_calls_are_timed_one_by_one(monkeypatch, tmp_path):
    def capture(*arguments):
        raise RuntimeError("it waits for the device")

    run, _ = simulated(monkeypatch, {"numbaflash": 2.0, "fa2": 1.0}, capture=capture)
    progress = Quiet()
    decode.measure(run, tmp_path / "run.jsonl", progress)
    assert [(r["ms"], r["in_graph"]) for r in run.records] == [(pytest.approx(2.0), False), (pytest.approx(1.0), False)]
    assert sum("is timed without a graph: RuntimeError: it waits for the device" in note for note in progress.notes) == 3
    assert decode_timing.REPLAY not in run.records[0]["host_us"] and not run.failed


@pytest.mark.parametrize("ms", [-1.0, RuntimeError("broken")])
def test_without_ours_the_run_fails(ms, monkeypatch, tmp_path):
    run, _ = simulated(monkeypatch, {"numbaflash": ms, "fa2": 1.0})
    decode.measure(run, tmp_path / "run.jsonl", Quiet())
    (record,) = records.read(tmp_path / "run.jsonl")
    assert run.failed and record["library"] == "numbaflash" and ("wrong result" if ms == -1 else "broken") in record["skipped"]


def test_cells_that_do_not_fit_or_are_not_reached_say_why(monkeypatch, tmp_path):
    run, _ = simulated(monkeypatch, {"numbaflash": 1.0})
    cell = decode.DecodeCell("256 mixed", decode.LENGTHS["256 mixed"], 32, 32, 128, 0)
    assert "GB, more than 60" in run.left_out(cell, False)
    run.options.cells, progress = [cell], Quiet()
    decode.measure(run, tmp_path / "run.jsonl", progress)
    assert any("its caches take" in note for note in progress.notes) and not run.failed
    run, _ = simulated(monkeypatch, {"numbaflash": 1.0}, words=["--budget", "1e-9"])
    decode.measure(run, tmp_path / "run.jsonl", Quiet())
    assert "the time of the run was over" in decode_report.table(records.read(tmp_path / "run.jsonl"))


def test_a_cell_that_breaks_is_recorded_and_a_lost_gpu_ends_the_run(monkeypatch, tmp_path):
    run, device = simulated(monkeypatch, {"numbaflash": 1.0})
    monkeypatch.setattr(decode, "Inputs", lambda *arguments: (_ for _ in ()).throw(MemoryError("none left")))
    decode.measure(run, tmp_path / "run.jsonl", Quiet())
    assert run.failed and records.read(tmp_path / "run.jsonl")[0]["skipped"] == "MemoryError: none left"
    device.recover = lambda: (_ for _ in ()).throw(RuntimeError("lost"))
    with pytest.raises(SystemExit, match="the CUDA context is lost after: MemoryError: none left"):
        decode.measure(run, tmp_path / "run.jsonl", Quiet())


# what a run says


def record(lengths, library, ms, page=0, **more):
    cell = decode.DecodeCell(lengths, decode.LENGTHS[lengths], 32, 8, 128, page)
    timed = {"ms": ms, "ms_q1": ms * 0.98, "ms_q3": ms * 1.02, "in_graph": True, "bytes": cell.bytes}
    rates = {"tb_per_s": cell.bytes / ms / 1e9, "share_of_copy": cell.bytes / ms / 1e9 / 4.28}
    return records.check(decode.record_of(cell, library, COMMON, **timed | rates | more))


def test_the_table_and_the_bars():
    host = {decode_timing.PLAN_RUN: [8.5, 9.0, 9.5]}
    found = [record("64 of 8k", "numbaflash", 0.5), record("64 of 8k", "fa4", 0.6), record("64 of 8k", "numbaflash", 0.6, 1)]
    found += [record("one of 1k", "numbaflash", 0.0065, host_us=host), record("one of 1k", "fa2", 0.006)]
    found += [record("64 mixed", "numbaflash", 0.37, equal={"ms": 0.33, "bytes": sum(decode.LENGTHS["64 mixed"]) * 8 * 128 * 4})]
    told = decode_report.table(found)
    line = next(line for line in told.splitlines() if line.startswith("64 of 8k"))
    assert line.split() == ["64", "of", "8k", "32/8", "128", "-", "1", "500.00", "2.0", "4.29", "100%", "-", "1.20", "1.20", "-"]
    assert "share of the copy: 1.00 (64 of 8k, 32/8, D 128, contiguous), at least 0.90: reached" in told
    assert "in pages of 1: 0.84 (64 of 8k, 32/8, D 128, pages of 1), at least 0.60: reached" in told
    assert "in a graph, us: 6.50" in told and "at most 8.00: reached" in told and "9.00 (8.50-9.50)" in told
    assert "plan.run, us: 9.00 (one of 1k, 32/8, D 128, contiguous), at most 8.00: missed by 1.00" in told
    assert "at equal lengths: 1.12" in told and "at most 1.10: missed by 0.02" in told
    assert "1 of 2 cells at or above every peer; ahead in every cell: missed in 1" in told and "0.92 fa2: one of 1k" in told


def test_bars_are_of_the_worst_cell_and_of_graphs_alone():
    found = [
        record("one of 1k", "numbaflash", 0.007),
        record("one of 1k", "numbaflash", 0.009, 16),
        record("one of 1k", "numbaflash", 0.1, 64, in_graph=False),
    ]
    (line, last) = decode_report.bars(found)
    assert line == "one request of 1k in a graph, us: 9.00 (one of 1k, 32/8, D 128, pages of 16), at most 8.00: missed by 1.00"
    assert last == "no cell has both numbaflash and a peer"


# the command


def test_the_command_on_a_simulated_gpu(monkeypatch, tmp_path, capsys):
    run, device = simulated(monkeypatch, {"numbaflash": 1.0, "fa2": 2.0})
    fields = {"gpu": "NVIDIA Simulated", "driver": "1", "torch": "2.0", "cudnn": 9}
    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu, "Gpu", lambda seed: device)
    monkeypatch.setattr(records, "gpu_fields", lambda: fields)
    monkeypatch.setattr(decode, "copier", lambda torch: None)
    monkeypatch.setattr(decode, "Run", lambda *arguments: run)
    assert decode.main(["--only", "8 mixed", "--heads", "gqa", "--out", str(tmp_path), "--commit", "abc"]) == 0
    (path,) = tmp_path.glob("*-simulated-decode.jsonl")
    assert [r["library"] for r in records.read(path)] == ["numbaflash", "fa2"]
    told = capsys.readouterr().out
    assert "1 of 1 cells at or above every peer; ahead in every cell: reached" in told and str(path) in told
    assert peers.OURS in {r["library"] for r in run.records}


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert decode.main([]) == 2 and "no CUDA GPU" in capsys.readouterr().err
