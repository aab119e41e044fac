"""The benchmark of decoding without a GPU: cells, what is admitted, and what a run says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the benchmark holds its arrays in PyTorch")

from bench import decode  # noqa: E402
from numbaflash.benchmarks import decoding, records  # noqa: E402

SMALL = decoding.DecodeCell("small", (40, 7, 64), 8, 2, 16, 0)


def test_cells_count_what_is_attended_to():
    cell = decoding.DecodeCell("x", (10, 17), 32, 8, 128, 16)
    assert cell.bytes == 27 * 8 * 128 * 4 and cell.pages == 3 and cell.capacity == 32 and cell.cache_bytes == 48 * 8 * 128 * 4
    assert not cell.equal and decoding.DecodeCell("x", (5, 5), 1, 1, 8, 0).equal
    mixed, equal = decode.LENGTHS["64 mixed"], decode.LENGTHS["64 mixed equal"]
    assert len(mixed) == len(equal) == 64 and min(mixed) >= 128 and max(mixed) <= 32768 and 0 <= sum(mixed) - sum(equal) < 64


@pytest.mark.parametrize("page_size", [0, 1, 16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_libraries_that_are_right_are_admitted_and_others_named(page_size, tokens):
    cell = decoding.DecodeCell("small", (40, 7, 64), 8, 2, 16, page_size, tokens)
    inputs, said = decoding.Inputs(torch, cell, 2**14, "cpu"), {}
    assert len(inputs.caches) > 1, "past the cache"

    def planted(torch, cell, inputs):
        ours = decoding.bind_numbaflash(torch, cell, inputs)

        def call(k, v):
            out = ours(k, v).clone()
            out[-1, -1, 3, 5] += 0.5
            return out

        return call

    def broken(torch, cell, inputs):
        raise RuntimeError("no such kernel")

    bind = decoding.BIND | {"fa4": planted, "cudnn": broken}
    calls = decoding.admit(torch, cell, inputs, ["numbaflash", "fa4", "cudnn", "efficient"], said.__setitem__, bind)
    assert "numbaflash" in calls and "fa4" not in calls and "cudnn" not in calls
    assert said["fa4"].startswith("wrong result: ") and said["fa4"].endswith("of sequence 2") and said["cudnn"] == "RuntimeError: no such kernel"
    if page_size:
        assert said["efficient"] == "NotImplementedError: it knows no pages"
    calls["numbaflash"]()


def test_wrong_results_of_many_keys_are_refused():
    """Their elements are all small: of 32k keys none is above 0.03, so that no fixed tolerance tells them from zeros."""
    cell = decoding.DecodeCell("long", (32768,), 2, 1, 64, 0)
    inputs = decoding.Inputs(torch, cell, 1, "cpu")
    sample, (k, v) = decoding.Sample(cell, inputs), inputs.gathered(0, 32768)
    weights = torch.einsum("hd,kd->hk", inputs.q[0, 0].double(), k[:, 0].double()) / 8

    def attended(weights, v=v):
        return (weights.softmax(-1) @ v[:, 0].double()).bfloat16()[None, None]

    right = attended(weights)
    error, fault = sample.judge(right)
    assert fault is None and error < 1 and right.abs().max() < 0.05
    for wrong in (right * 0, right.flip(2), attended(weights * 1.5), attended(weights[:, :16384], v[:16384]), right * float("nan"), right[:, :, :1]):
        assert sample.judge(wrong)[1].startswith("wrong result: ")
    assert sample.judge(right.view(1, 1, 1, 2, 64))[1] is None, "heads by key heads"


def record(lengths, library, ms, page=0, **more):
    cell = decoding.DecodeCell(lengths, decode.LENGTHS[lengths], 32, 8, 128, page)
    timed = {"ms": ms, "bytes": cell.bytes, "tb_per_s": cell.bytes / ms / 1e9, "share_of_copy": cell.bytes / ms / 1e9 / 4.28}
    return records.check(decode.record_of(cell, library, {"gpu": "none", "torch": "0"}, **timed | more))


def test_the_table_and_the_bars():
    found = [record("64 of 8k", "numbaflash", 0.5), record("64 of 8k", "fa4", 0.6), record("64 of 8k", "numbaflash", 0.6, 1)]
    found += [record("one of 1k", "numbaflash", 0.007, graph_ms=0.0065, host_us=9.0), record("one of 1k", "fa2", 0.006)]
    found += [record("64 mixed", "numbaflash", 0.37), record("64 mixed equal", "numbaflash", 0.33)]
    told = decode.table(found)
    line = next(line for line in told.splitlines() if line.startswith("64 of 8k"))
    assert line.split() == ["64", "of", "8k", "32/8", "128", "-", "1", "500.00", "4.29", "100%", "1.20", "-"]
    assert "share of the copy: 1.00, at least 0.90: reached" in told and "the same in pages of 1: 0.84, at least 0.60: reached" in told
    assert "in a graph, us: 6.50, at most 8.00: reached" in told and "plan.run, us: 9.00, at most 8.00: missed by 1.00" in told
    assert "equal lengths: 1.12, at most 1.10: missed by 0.02" in told
    assert "1 of 2 cells at or ahead of every peer; the least 0.86" in told


def test_cells_that_are_left_out_say_why():
    cell = decoding.DecodeCell("one of 1k", (1024,), 32, 8, 128, 0)
    found = [records.check(decode.record_of(cell, "numbaflash", {"gpu": "none"}, skipped="the time of the run was over"))]
    assert "the time of the run was over" in decode.table(found)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--only nothing", "--only takes"),
        ("--heads big", "--heads takes"),
        ("--pages -1", "pages must not be negative"),
        ("--dims 1000", "--dims takes"),
    ],
)
def test_bad_words(words, told, capsys):
    with pytest.raises(SystemExit):
        decode.parse(words.split(" "))
    assert told in capsys.readouterr().err


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert decode.main([]) == 2 and "no CUDA GPU" in capsys.readouterr().err
