"""The roofline: what is counted of a cell, which ceiling it has, the tables, the picture, and what is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the benchmarks hold their arrays in PyTorch")
import simulated_gpu  # noqa: E402, F401  (finds bench)

from bench import decode, roofline  # noqa: E402
from numbaflash.benchmarks import cells, records  # noqa: E402

GPU = {"gpu": "NVIDIA H200", "version": "1", "date": "2026-01-02"}


def ceilings(copy=4.0, product=800.0, **more):
    told = GPU | more
    return [
        roofline.ceiling_record(roofline.COPY, "1 GiB", [copy, 2 * copy, copy / 2], "TB/s", **told),
        roofline.ceiling_record(roofline.PRODUCT, "small", [product / 2], "TFLOP/s", **told),
        roofline.ceiling_record(roofline.PRODUCT, "large", [product], "TFLOP/s", **told),
    ]


def measured(seqlen, tflops, bench="forward", causal=False, head_dim=128, kv_heads=16, library="numbaflash", dtype="bfloat16"):
    cell = cells.Cell(dtype, 4, seqlen, 16, kv_heads, head_dim, causal)
    flops = cell.count(cells.backward_flops if bench == "backward" else cells.forward_flops)
    base = {"bench": bench, "direction": bench, **cell.fields(), "library": library}
    return records.check(base | {"ms": flops / tflops / 1e9, "tflops": tflops} | GPU)


def decoded(lengths="64 of 8k", tb_per_s=4.0, heads=32, kv_heads=8, tokens=1, page=16, **more):
    cell = decode.DecodeCell(lengths, decode.LENGTHS[lengths], heads, kv_heads, 128, page, tokens)
    times = {"ms": cell.bytes / tb_per_s / 1e9, "bytes": cell.bytes, "tb_per_s": tb_per_s, "share_of_copy": tb_per_s / 4.2}
    return records.check(decode.record_of(cell, "numbaflash", GPU, **times, **more) | {"version": "1"})


def test_the_ceilings_are_medians_and_the_fastest_product_of_the_last_run():
    c = roofline.Ceilings.of([measured(512, 1.0), *ceilings(3.0, 900.0, date="2026-01-01"), *ceilings()])
    assert (c.bytes_per_s, c.flops_per_s, c.ridge) == (4e12, 8e14, 200)
    assert c.roof(1) == 4e12 and c.roof(199) < 8e14 == c.roof(200) == c.roof(1e4)


def test_without_ceilings_or_with_those_of_another_gpu_there_is_no_roof():
    with pytest.raises(ValueError, match="no ceilings are among the results; add a file of python -m bench.roofline --measure"):
        roofline.points([measured(512, 1.0)])
    with pytest.raises(ValueError, match="no ceilings"):
        roofline.points(ceilings()[:1])
    with pytest.raises(ValueError, match="the ceilings are those of another; there are results of NVIDIA H200, too"):
        roofline.points([measured(512, 1.0), *ceilings(gpu="another")])


def test_operations_a_byte():
    full, causal, backward = (
        roofline.points([measured(512, 100.0, **more), *ceilings()])[0] for more in ({}, {"causal": True}, {"bench": "backward"})
    )
    assert full.intensity == pytest.approx(512 / 2) and causal.intensity == pytest.approx(513 / 4)
    rows = 4 * 512 * 16
    assert full.bytes == rows * 128 * 2 * 4 and backward.bytes == rows * (128 * 2 * 8 + 4) and backward.flops == pytest.approx(2.5 * full.flops)
    assert full.share == pytest.approx(100 / 800) and causal.share == pytest.approx(100 / (4 * 513 / 4)), "below the copy"


def test_a_cell_of_decoding_has_the_copy_of_its_own_run_above_it():
    (point,) = roofline.points([decoded(), *ceilings()])
    assert point.intensity == 4 and point.share == pytest.approx(4.0 / 4.2)
    assert point.flops == 64 * 8192 * 32 * 4 * 128
    (point,) = roofline.points([decoded(tokens=64, heads=64), *ceilings()])
    assert point.intensity == 512 and point.share == pytest.approx(4.0 * 512 / 800)


def test_only_our_timed_cells_are_there():
    skipped = measured(512, 1.0) | {"ms": None, "tflops": None, "skipped": "no time"}
    other = [measured(512, 900.0, library="fa4"), skipped, measured(512, 1.0) | {"bench": "options"}]
    assert len(roofline.points([*other, measured(512, 1.0), *ceilings()])) == 1


def test_the_tables():
    found = [measured(512, 100.0, causal=True), measured(1024, 400.0, causal=True), measured(512, 100.0, dtype="float16", kv_heads=4)]
    found += [measured(512, 200.0, bench="backward"), decoded(), decoded(page=0, tb_per_s=2.1), *ceilings()]
    assert roofline.ceilings_table(found).splitlines()[2:] == [
        "| copy | 4.00 TB/s |",
        "| matrix product | 800 TFLOP/s |",
        "| both are reached at | 200 operations a byte |",
    ]
    assert roofline.cells_table(found, "forward").splitlines() == [
        "| TFLOP/s, share of the roof | 512 | 1k |",
        "| --- | --: | --: |",
        "| operations a byte: equal heads, causal | 128 | 256 |",
        "| operations a byte: 16/4 heads, full | 410 | - |",
        "| bf16, equal heads, D 128, causal | 100, 19% | 400, 50% |",
        "| fp16, 16/4 heads, D 128, full | 100, 12% | - |",
    ]
    assert roofline.decode_table(found).splitlines() == [
        "| TB/s, share of the roof | heads | operations a byte | contiguous | pages of 16 |",
        "| --- | --: | --: | --: | --: |",
        "| 64 of 8k | 32/8 | 4 | 2.10, 50% | 4.00, 95% |",
    ]
    assert roofline.summary_table(found).splitlines()[2:] == [
        "| forward, D 128, causal | 2 | 1 | 19% | 35% | 50% |",
        "| forward, D 128, full | 1 | 0 | 12% | 12% | 12% |",
        "| backward, D 128, full | 1 | 0 | 25% | 25% | 25% |",
        "| decode, 32/8 heads | 2 | 2 | 50% | 73% | 95% |",
    ]
    told = roofline.text_of([measured(512, 1.0), *ceilings()])
    assert "TFLOP/s, share" in told and "TB/s, share" not in told


def test_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    a = records.write(tmp_path / "a.jsonl", [measured(512, 100.0), measured(512, 200.0, bench="backward", head_dim=64), decoded()])
    b = records.write(tmp_path / "b.jsonl", ceilings())
    assert roofline.main([str(a), str(b)]) == 0
    found = records.read(a, b)
    assert capsys.readouterr().out.strip() == f"{roofline.text_of(found)}\n\n{tmp_path / 'b-roofline.png'}"
    assert (tmp_path / "b-roofline.png").read_bytes().startswith(b"\x89PNG")
    assert roofline.main([str(a), str(b), "--plot", str(tmp_path / "c.png")]) == 0 and (tmp_path / "c.png").exists()
    assert roofline.main([str(b)]) == 1 and "the files have no timed cell" in capsys.readouterr().err
    assert roofline.main([str(a)]) == 1 and "no ceilings" in capsys.readouterr().err
    assert roofline.main([str(tmp_path / "none.jsonl")]) == 1 and "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["a.jsonl", "--measure"]])
def test_bad_words(words, capsys):
    with pytest.raises(SystemExit):
        roofline.main(words)
    assert "give files of results, or --measure" in capsys.readouterr().err


def test_the_ceilings_are_measured_on_a_gpu(tmp_path, capsys):
    import torch

    words = ["--measure", "--out", str(tmp_path)]
    if not torch.cuda.is_available():
        assert roofline.main(words) == 2 and "no CUDA GPU" in capsys.readouterr().err
        return
    assert roofline.main(words) == 0
    (path,) = tmp_path.iterdir()
    assert roofline.Ceilings.of(records.read(path)).ridge > 1
