"""`numbaflash.record`: a line for each call, and none for what is not one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import timeit

import numpy as np
import pytest

import numbaflash as nf
from numbaflash import recording, verify


def array(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


Q = array(1, 8, 2, 16)


def lines(path):
    first, *others = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"numbaflash": nf.__version__, "trace": recording.FORMAT}
    return others


def test_each_function_leaves_a_line(tmp_path):
    path, ends = tmp_path / "calls.jsonl", np.array([0, 3, 8])
    cache, length = array(2, 16, 2, 16), np.array([3, 4])
    with nf.record(path):
        out, lse = nf.forward(Q, Q, Q, causal=True, return_lse=True)
        nf.backward(out, Q, Q, Q, out, lse, causal=True, deterministic=True, needs=("q", "v"))
        nf.attention(Q, Q, Q, window=(3, None), softcap=2.5)
        out, lse = nf.forward_varlen(Q[0], Q[0], Q[0], ends, ends, max_seqlen_q=5, return_lse=True)
        nf.backward_varlen(out, Q[0], Q[0], Q[0], out, lse, ends, ends, max_seqlen_q=5)
        nf.decode(array(2, 1, 2, 16), cache, cache, length)
        plan = nf.plan_decode(array(2, 1, 2, 16), cache, cache, length, softcap=3.0, sinks=array(2))
        plan.run(array(2, 1, 2, 16), cache, cache, length)
    told = lines(path)
    functions = ["forward", "backward", "forward", "forward_varlen", "backward_varlen", "decode", "DecodePlan.run"]
    assert [each["function"] for each in told] == functions
    assert [each["direction"] for each in told] == ["forward", "backward", "forward", "forward", "backward", "decode", "decode"]
    assert all(each["library"] == "numpy" and each["device"] == "cpu" and each["count"] == 1 for each in told)
    assert told[0]["arrays"]["q"] == {"shape": [1, 8, 2, 16], "dtype": "float32", "strides": "contiguous"}
    assert told[1]["options"] == {"causal": True, "dropout": 0, "deterministic": True, "needs": ["q", "v"]}
    assert told[2]["options"]["window"] == [3, None] and told[2]["options"]["softcap"] == 2.5
    assert set(told[6]["arrays"]) == {"q", "k_cache", "v_cache", "seqlens_k", "sinks"} and told[6]["options"]["softcap"] == 3
    calls = verify.read_trace(path)
    assert {call.problem.seqlen_q for call in calls} == {8, 1, 5} and sorted(call.name for call in calls)[0] == "DecodePlan.run (line 8)"


def test_strides_and_counts(tmp_path):
    path = tmp_path / "calls.jsonl"
    headfirst, packed = array(2, 3, 8, 16).transpose(0, 2, 1, 3), array(2, 8, 3, 3, 16)
    with nf.record(path):
        for _ in range(3):
            nf.forward(headfirst, headfirst, headfirst)
        nf.forward(*(packed[:, :, n] for n in range(3)), mask=np.ones((8, 8), bool))
        nf.forward(np.broadcast_to(array(1, 1, 3, 16), (2, 8, 3, 16)), headfirst, headfirst)
        nf.forward(headfirst[:, ::-1], headfirst, headfirst)
    told = lines(path)
    assert [each["count"] for each in told] == [1, 2, 3, 1, 1, 1]
    assert [each["arrays"]["q"]["strides"] for each in told[2:]] == ["order 0,2,1,3", "strided", "broadcast 0,1", "strided"]
    assert told[3]["arrays"]["mask"] == {"shape": [8, 8], "dtype": "bool", "strides": "contiguous"}
    assert [call.count for call in verify.read_trace(path)] == [3, 1, 1, 1]


def test_block_masks_and_dropout(tmp_path):
    path = tmp_path / "calls.jsonl"
    with nf.record(path):
        nf.forward(Q, Q, Q, mask=nf.BlockMask.from_mask(np.tri(8, dtype=bool)), dropout=0.25, seed=7)
    (told,) = lines(path)
    assert told["options"] == {"causal": False, "dropout": 0.25, "seed": 7, "return_lse": False} and "block_mask" in told["arrays"]
    (call,) = verify.read_trace(path)
    assert call.problem.masked and call.problem.dropout == 0.25


def test_torch_and_its_gradients(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "calls.jsonl"
    x = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    with nf.record(path):
        nf.attention(x, x, x, causal=True).sum().backward()
    forward, backward = lines(path)
    assert (forward["function"], backward["function"]) == ("forward", "backward") and forward["library"] == "torch"
    assert backward["arrays"]["dout"] == {"shape": [1, 8, 2, 16], "dtype": "bfloat16", "strides": "broadcast 1,2,3"}


def test_jax_when_it_is_traced(tmp_path):
    jax = pytest.importorskip("jax")
    path, x = tmp_path / "calls.jsonl", jax.numpy.zeros((1, 8, 2, 16))
    gradient = jax.jit(jax.grad(lambda x: nf.attention(x, x, x, causal=True).sum()))
    with nf.record(path):
        gradient(x)
        gradient(x)
    forward, backward = lines(path)
    assert (forward["function"], backward["direction"], backward["library"]) == ("attention", "backward", "jax")
    assert len(verify.read_trace(path)) == 2


def test_borrowed_arrays_leave_one_line(tmp_path):
    class Lender:
        def __init__(self, x):
            self.x, self.shape, self.dtype = x, x.shape, x.dtype

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    path = tmp_path / "calls.jsonl"
    with nf.record(path):
        nf.forward(*(Lender(Q.copy()) for _ in range(3)))
    (told,) = lines(path)
    assert told["arrays"]["q"]["strides"] == "unknown"


def test_calls_that_fail_leave_no_line(tmp_path):
    path = tmp_path / "calls.jsonl"
    with nf.record(path):
        with pytest.raises(ValueError):
            nf.forward(Q, Q[:, :, :1, :8], Q)
        with pytest.raises(TypeError):
            nf.forward([1.0], Q, Q)
        nf.forward(Q, Q, Q)
    assert len(lines(path)) == 1


def test_threads(tmp_path):
    path, n = tmp_path / "calls.jsonl", 50
    nf.forward(Q, Q, Q)
    with nf.record(path):
        threads = [threading.Thread(target=lambda: [nf.forward(Q, Q, Q) for _ in range(n)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [each["count"] for each in lines(path)] == list(range(1, 4 * n + 1))


def test_a_crash_leaves_whole_lines(tmp_path):
    path = tmp_path / "calls.jsonl"
    code = (
        "import os, sys, numpy as np, numbaflash as nf\n"
        "x = np.zeros((1, 8, 2, 16), np.float32)\n"
        "with nf.record(sys.argv[1]):\n"
        "    nf.forward(x, x, x); nf.forward(x, x, x, causal=True)\n"
        "    os._exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], timeout=120).returncode == 3
    assert len(lines(path)) == 2 and len(verify.read_trace(path)) == 2


def test_nested_use_and_places_that_cannot_be_written(tmp_path):
    path = tmp_path / "calls.jsonl"
    with nf.record(path), pytest.raises(RuntimeError, match="is recording already, to .*calls.jsonl"), nf.record(tmp_path / "other"):
        pass
    assert not (tmp_path / "other").exists() and recording.active is None
    for place, error in ((tmp_path / "nowhere" / "calls.jsonl", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error), nf.record(place):
            pass
    with nf.record(path):  # a trace is replaced
        nf.forward(Q, Q, Q)
    assert len(lines(path)) == 1
    novel = tmp_path / "novel.txt"
    novel.write_text("It was a dark night.\n")
    with pytest.raises(ValueError, match="novel.txt holds something else"), nf.record(novel):
        pass
    assert novel.read_text() == "It was a dark night.\n" and recording.active is None
    with nf.record(path):
        pass
    assert lines(path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_no_room_from_the_beginning():
    with pytest.raises(OSError, match="No space left"), nf.record("/dev/full"):
        pass
    assert recording.active is None


def test_no_room_in_the_middle(tmp_path, monkeypatch):
    path, write = tmp_path / "calls.jsonl", os.write
    with pytest.raises(OSError, match="the trace ends early, No space left"), nf.record(path):
        nf.forward(Q, Q, Q)

        def full(file, data):
            if len(data) > 100:
                write(file, data[:50])
                raise OSError(28, "No space left on device")
            return write(file, data)

        monkeypatch.setattr(os, "write", full)
        nf.forward(Q, Q, Q)  # the program goes on
        monkeypatch.undo()
        nf.forward(Q, Q, Q)
    assert len(lines(path)) == 1 and path.read_text().endswith("\n")


def test_costs_nothing_while_nothing_is_recorded():
    """One look at a global: far less than a hundredth of a call of the least size."""

    def look():
        if recording.active is not None and recording.is_outermost():
            pass

    nf.forward(Q, Q, Q)
    call = min(timeit.repeat(lambda: nf.forward(Q, Q, Q), number=500, repeat=5)) / 500
    check = min(timeit.repeat(look, number=50_000, repeat=5)) / 50_000
    nothing = min(timeit.repeat(lambda: None, number=50_000, repeat=5)) / 50_000
    assert check - nothing < call / 50


# ---- traces that make no sense


def trace(folder, *lines):
    path = folder / "calls.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


HEAD = json.dumps({"numbaflash": "0.1.0", "trace": recording.FORMAT})


def line(count=1, direction="forward", q=(1, 8, 2, 16), k=(1, 8, 2, 16), dtype="float32", options=None, **more):
    arrays = {name: {"shape": list(shape), "dtype": dtype, "strides": "contiguous"} for name, shape in (("q", q), ("k", k), ("v", k))}
    told = {"function": direction, "direction": direction, "library": "numpy", "device": "cpu", "arrays": arrays, "options": options or {}}
    return json.dumps(told | {"count": count} | more)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([], "has no call"),
        ([HEAD], "has no call"),
        ([line()], 'line 1: must begin with a line {"numbaflash"'),
        (["{}"], "line 1: must begin with"),
        ([HEAD, "{"], "line 2: no JSON"),
        ([HEAD, "3"], "line 2: must be a JSON object; got int"),
        ([HEAD, line(), line(count=3)], "line 3: count must be 2, one more than the last of its kind; got 3"),
        ([HEAD, line(count=4)], "line 2: count must be 1"),
        ([HEAD, line(k=(1, 8, 2, 32))], "line 2: .*head_dim"),
        ([HEAD, line(q=(1, 8, 3, 16))], "line 2: .*heads"),
        ([HEAD, line(q=(1, 8, 2))], "line 2: q must have 4 axes"),
        ([HEAD, line(q=(1, -8, 2, 16))], "line 2: the shape of q must hold numbers of elements"),
        ([HEAD, line(dtype="int8")], "line 2: q, k and v must have one dtype of float16"),
        ([HEAD, line(options={"window": [3, -1]})], "line 2: window"),
        ([HEAD, line(options={"causal": "sideways"})], "line 2: causal"),
        ([HEAD, line(direction="sideways")], "line 2: direction must be one of forward, backward, decode"),
        ([HEAD, line(direction="decode")], "line 2: a decode call has q, k_cache, v_cache, seqlens_k; k_cache, v_cache, seqlens_k is missing"),
        ([HEAD, line(direction="backward")], "line 2: a backward call has dout, .*; dout, out, lse is missing"),
        ([HEAD, line(more=1)], "line 2: must have the fields .*; more is unknown"),
        ([HEAD, '{"count": 1}'], "line 2: must have the fields .* is missing"),
    ],
)
def test_wrong_traces(tmp_path, written, message):
    with pytest.raises(verify.TraceError, match=message):
        verify.read_trace(trace(tmp_path, *written))


def test_a_trace_that_was_cut_off(tmp_path):
    path = trace(tmp_path, HEAD, line(), line(count=2))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(verify.TraceError, match="line 3: the line does not end; the file was cut off"):
        verify.read_trace(path)
