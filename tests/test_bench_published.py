"""What the documentation publishes of results: each table and sentence from records whose answer is known."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the benchmarks hold their arrays in PyTorch")
import simulated_gpu  # noqa: E402, F401  (finds bench)

from bench import published  # noqa: E402
from numbaflash.benchmarks import cells, records  # noqa: E402

RUN = {"version": "1", "gpu": "NVIDIA H200", "driver": "580", "date": "2026-01-02T03:04:05", "commit": "abcdef1"}


def timed(library, ms, seqlen=1024, head_dim=64, kv_heads=16, causal=False, dtype="bfloat16", bench="forward", **more):
    cell = cells.Cell(dtype, 4, seqlen, 16, kv_heads, head_dim, causal)
    flops = cell.count(cells.backward_flops if bench == "backward" else cells.forward_flops)
    base = {"bench": bench, "direction": bench, **cell.fields(), "library": library, "ms": ms, "tflops": ms and flops / ms / 1e9}
    spread = {"ms_q1": 0.9 * ms, "ms_q3": 1.1 * ms} if ms else {"skipped": "out of memory"}
    return records.check(base | RUN | spread | more)


def rows(table):
    return [[field.strip() for field in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("|")]


FOUND = [
    timed("numbaflash", 1.0),
    timed("cudnn", 1.5),
    timed("fa4", 1.25),
    timed("numbaflash", 1.0, kv_heads=4),
    timed("fa4", 0.9, kv_heads=4),
    timed("numbaflash", 2.0, seqlen=2048),
    timed("cudnn", None, seqlen=2048),
    timed("fa4", 2.0, seqlen=2048),
    timed("numbaflash", 1.0, seqlen=4096),  # no peer
]


def test_ratios_are_of_the_best_peer_and_range_over_pairs():
    assert rows(published.ratios_table(FOUND)) == [["", "1024", "2048"], ["---", "--:", "--:"], ["D 64, full", "0.90 to 1.25", "1.00"]]


def test_the_standing_counts_cells_that_have_a_peer():
    assert published.standing_line(FOUND) == (
        "Against the best peer of each cell: at least 1.00 in 2 of 3 cells, median 1.00, least 0.90, most 1.25. The best peer is FA4 in 3. "
        "numbaflash is level or ahead of FA4 in 2 of 3, cuDNN in 1 of 1."
    )


def test_cells_behind_name_who_is_ahead_and_our_spread():
    assert rows(published.behind_table(FOUND))[2:] == [["D 64 full, bfloat16, 16/4 heads", "1k", "0.900", "10.0", "FA4"]]


def test_speeds_are_those_of_equal_heads():
    ours, peer = (r["tflops"] for r in FOUND[:3] if r["library"] != "fa4")
    fields = rows(published.speeds_table(FOUND, libraries=("numbaflash", "cudnn")))[2]
    assert fields[1] == f"{ours:.0f} / {peer:.0f}" and fields[2].endswith(" / -")


def test_steps_are_found_from_times_that_follow_the_model():
    line = []
    for seqlen in (512, 1024, 4096):
        for heads, causal in ((16, False), (4, True)):
            blocks, group = seqlen // 128, 16 // heads
            steps = group * ((blocks + 1) / 2 if causal else blocks)
            line.append(timed("numbaflash", 4 * heads * blocks / 132 * (7.0 + steps * 2.5) / 1e3, seqlen, kv_heads=heads, causal=causal))
    assert published.fitted(line) == pytest.approx((7.0, 2.5, 0.0), abs=1e-9)
    table = published.steps_table(line, libraries=("numbaflash",), dims=(64,))
    assert [row[1] for row in rows(table)[2:]] == ["7.0, 2.50"] * 2 and table.endswith("within 0%.")


def test_a_share_is_of_the_plain_kernel_in_turn_where_there_is_one():
    plain = f"{published.OURS}-plain"
    found = [
        timed("numbaflash", 1.0, option="plain"),
        timed("numbaflash", 2.0, option="softcap"),
        timed("numbaflash", 2.0, option="alibi"),
        timed(plain, 1.5, option="alibi"),
        timed("fa4", 3.0, option="alibi"),
        timed("numbaflash", 4.0, option="full plain"),
        timed("numbaflash", 8.0, option="full bias"),
        timed("numbaflash", 8.0, option="window at 32k"),
        timed("numbaflash", 1.0, option="plain", head_dim=128),
    ]
    made = rows(published.options_table(found))
    assert [row[:4] for row in made if row[0][0] not in "D-"] == [
        ["plain", "1.000", "1.00", "-"],
        ["softcap", "2.000", "0.50", "-"],
        ["alibi", "2.000", "0.75", "1.50 FA4"],
        ["full plain", "4.000", "1.00", "-"],
        ["full bias", "8.000", "0.50", "-"],
        ["window at 32k", "8.000", "-", "-"],
        ["plain", "1.000", "1.00", "-"],
    ]
    assert [row[0] for row in made if row[0].startswith("D ")] == ["D 64", "D 128"]


def cached(library, us, page=0, lengths="64 of 8k", kv_heads=8, **more):
    return timed(library, us / 1e3, kv_heads=kv_heads, bench="decode", lengths=lengths, page_size=page, **more)


def test_decoding():
    found = [
        cached("numbaflash", 500, share_of_copy=0.99),
        cached("cudnn", 450),
        cached("numbaflash", 520, page=16, share_of_copy=0.96),
        cached("fa4", 550, page=16),
    ]
    assert rows(published.decode_table(found))[2] == ["64 of 8k", "500", "99%", "96%", "-", "-", "1.06", "-", "0.90"]
    assert published.decode_line(found) == "Level with or ahead of every peer in 1 of 2 cells that have one, the least 0.90."


def test_the_headline():
    found = FOUND + [timed("numbaflash", 1.0, bench="backward"), timed("fa2", 1.1, bench="backward"), cached("numbaflash", 5.0, share_of_copy=0.5)]
    text = published.headline(found)
    assert "On an H200 the forward is 0.90 to 1.25 times (median of 3 shapes 1.00, at least 1.00 in 2)" in text
    assert "1.10 to 1.10 times (median of 1 shapes" in text and "50 to 50% of the speed of a copy" in text


def test_serving():
    values = {"numbaflash": (10, 2, 100), "torch": (20, 4, 90), "none": (5, 1, 110)}
    found = [
        timed(engine, None, bench="decode", quantity=quantity, value=float(value), unit="ms")
        for engine, (first, after, rate) in values.items()
        for quantity, value in {"ttft p50": first, "ttft p99": first, "tpot p50": after, "tpot p99": after, "throughput": rate}.items()
    ]
    assert rows(published.serving_table(found))[4] == ["no attention", "5.00", "5.00", "1.00", "1.00", "110"]
    assert published.serving_line(found) == (
        "The first token comes 2.00 times as fast as with torch, of at most 4.00 without any attention; tokens after it 2.00 times, of at most 4.00. "
        "Attention is 50% of a token's time with numbaflash, 75% with torch."
    )


def test_sources_tell_command_and_place_but_not_where_it_wrote():
    found = [timed("numbaflash", 1.0, command="python3 -m bench.forward --quick --out /root/out --commit abcdef1")]
    assert published.sources({"a": found * 2}) == (
        "- `bench/results/a.jsonl` (NVIDIA H200, driver 580, 2026-01-02, commit abcdef1): `python -m bench.forward --quick`"
    )
    unknown = [timed("numbaflash", 1.0, command=None, commit="x", source="a run before there was a bench")]
    assert published.sources({"b": unknown}).endswith("2026-01-02): a run before there was a bench")


@pytest.mark.parametrize("value, text", [(0.8931, "0.893"), (4.5, "4.50"), (26.0, "26.0"), (99.97, "100"), (1999.4, "1999"), (0.0443, "0.0443")])
def test_three_digits(value, text):
    assert published.digits(value) == text
