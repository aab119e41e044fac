"""The benchmark of hardware counters without a GPU: what Nsight Compute has printed on one, who launched what, and what a run says.

``ncu/`` holds the columns that are used of what ``ncu`` printed on an H200.
"""

from __future__ import annotations

import json
import subprocess
import types
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the benchmark holds its arrays in PyTorch")
import simulated_gpu  # noqa: E402, F401  (finds bench)

from bench import counter_tables, counters, ncu  # noqa: E402
from numbaflash import dispatch, support  # noqa: E402
from numbaflash.benchmarks import records  # noqa: E402

PRINTED = Path(__file__).parent / "ncu"
FORWARD, DECODE = (counters.CASES[name] for name in ("forward-d128-causal", "decode-64-of-8k"))
COMMON = {"gpu": "NVIDIA H200", "version": "0"}


def printed(name):
    return (PRINTED / f"{name}.csv").read_text()


def test_what_was_printed_is_read():
    (row,) = ncu.rows_of(printed("forward"))
    (record,) = counters.records_of(FORWARD, [row], COMMON)
    assert record["kernel"] == "numbaflash_sm90_forward_c1aae6fb" and record["main"]
    assert record["ms"] == 0.409024 and record["tflops"] == pytest.approx(672.2, abs=0.1)
    seen = record["counters"]
    assert (seen["tensor_pct"], seen["issue_pct"], seen["registers"], seen["blocks"]) == (79.06, 40.92, 168, 132)
    assert seen["dram_bytes_per_s"] == 688712877483.96 and seen["instructions"] == 139894882
    assert seen["l2_bytes"] is None, "not among the sections of that run"
    assert list(record["stalls"])[:3] == ["wait", "selected", "dispatch_stall"]


@pytest.mark.parametrize("name", ["forward", "decode"])
def test_states_of_warps_add_up_to_what_passes_between_two_instructions(name):
    for row in ncu.rows_of(printed(name)):
        assert sum(ncu.stalls_of(row).values()) == pytest.approx(ncu.counters_of(row)["cycles_per_issue"], rel=0.02), "of two replays"


def test_bytes_and_products_are_those_of_the_cells():
    (forward,) = counters.records_of(FORWARD, ncu.rows_of(printed("forward")), COMMON)
    assert counter_tables.products_over_needed(forward) == pytest.approx(1.03, abs=0.005)
    merge, main = counters.records_of(DECODE, ncu.rows_of(printed("decode")), COMMON)
    assert not merge["main"] and merge["tflops"] is None and main["main"]
    moved = main["counters"]["dram_bytes_per_s"] * main["counters"]["ns"] / 1e9
    assert moved == pytest.approx(DECODE.cell.bytes, rel=0.01)


def test_several_tables_and_other_lines_are_passed_over():
    both = ncu.rows_of("hello\n" + printed("decode") + "==PROF== Report\n" + printed("forward"))
    assert [row["Kernel Name"][1].split("_")[2] for row in both] == ["decoding", "decoding", "forward"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: "==PROF== Connected\n", "there is no table of ncu --csv --page raw"),
        (lambda text: "==ERROR== ERR_NVGPUCTRPERM - The user may not\n", "no launch was counted: ERR_NVGPUCTRPERM - The user may not"),
        (lambda text: text.replace('"ns"', '"us"'), "gpu__time_duration.sum must be in ns, as ncu --print-units base gives it; got us"),
        (lambda text: text.replace('"79.06"', '"n/a"'), r"sm__pipe_tensor_cycles_active\S+ was not counted \(n/a\); run ncu with --section Speed"),
        (lambda text: text.replace("lts__throughput", "other"), r"lts__throughput\S+ was not counted \(no such column\)"),
        (lambda text: text.replace("issue_stalled", "other"), "no reason why warps stall was counted"),
    ],
)
def test_what_cannot_be_read_is_named(change, told):
    with pytest.raises(ValueError, match=told):
        counters.records_of(FORWARD, ncu.rows_of(change(printed("forward"))), COMMON)


def told_of(case, name, **more):
    return {"case": case.name, "kernels": [row["Kernel Name"][1] for row in ncu.rows_of(printed(name))], "family": "sm90", **more}


def test_launches_are_those_of_the_plans():
    rows = ncu.rows_of(printed("decode") + printed("forward"))
    told = [told_of(DECODE, "decode"), {"case": "forward-d64-full", "kernels": []}, told_of(FORWARD, "forward")]
    found = counters.assign(rows, told)
    assert [len(found[name]) for name in ("decode-64-of-8k", "forward-d64-full", "forward-d128-causal")] == [2, 0, 1]
    with pytest.raises(
        ValueError, match="forward-d128-causal: the plan has the kernels numbaflash_sm90_forward_c1aae6fb; counted were numbaflash_sm90_dec"
    ):
        counters.assign(rows, told[::-1])
    with pytest.raises(ValueError, match="counted were none"):
        counters.assign(rows[:2], told)
    with pytest.raises(ValueError, match="1 launches were counted beyond those of the plans, first numbaflash_sm90_forward"):
        counters.assign(rows, told[:1])


def pretending(text, told, code=0):
    """In the place of `subprocess.run`: the process of ncu."""

    def run(command, **options):
        assert command[:1] == ["ncu"] and command[command.index("--clock-control") + 1] == "none"
        assert command[command.index("--kernel-name") + 1] == "regex:numbaflash" and {"--csv", "raw", *ncu.SECTIONS} <= set(command)
        Path(command[command.index("--log-file") + 1]).write_text(text)
        Path(command[command.index("--facts") + 1]).write_text("".join(json.dumps(each) + "\n" for each in told))
        return types.SimpleNamespace(returncode=code, stdout="Segmentation fault", stderr="")

    return run


def test_a_run():
    run = pretending(printed("decode") + printed("forward"), [told_of(DECODE, "decode"), told_of(FORWARD, "forward", config="Config()")])
    found, failed = counters.count("ncu", [DECODE, FORWARD], COMMON, 10.0, "/nowhere", run)
    assert not failed and [r["case"] for r in found] == ["decode-64-of-8k"] * 2 + ["forward-d128-causal"]
    assert found[2]["config"] == "Config()" and found[2]["kernels"] == ["numbaflash_sm90_forward_c1aae6fb"]


def test_a_case_that_fails_leaves_the_others():
    run = pretending(printed("forward"), [{"case": DECODE.name, "error": "MemoryError"}, told_of(FORWARD, "forward")])
    found, failed = counters.count("ncu", [DECODE, FORWARD], COMMON, 10.0, "/nowhere", run)
    assert len(found) == 1 and failed == {"decode-64-of-8k": "MemoryError"}
    run = pretending(printed("forward"), [told_of(FORWARD, "forward")], code=-11)
    found, failed = counters.count("ncu", [FORWARD, DECODE], COMMON, 10.0, "/nowhere", run)
    assert len(found) == 1 and failed["decode-64-of-8k"].startswith("its process ended with exit code -11: Segmentation fault")


def test_what_is_not_understood_is_kept(tmp_path):
    run = pretending(printed("forward"), [told_of(DECODE, "decode")])
    with pytest.raises(ValueError, match=r"decode-64-of-8k: the plan has .*; what was counted is in .*counters-raw\.csv"):
        counters.count("ncu", [DECODE], COMMON, 10.0, tmp_path / "new", run)
    assert (tmp_path / "new" / "counters-raw.csv").read_text() == printed("forward")


def test_a_child_tells_of_each_case(tmp_path, monkeypatch):
    monkeypatch.setattr(counters, "counted_call", lambda case, torch: {"kernels": ["k"]} if case is FORWARD else 1 / 0)
    assert counters.main(["--child", "decode-64-of-8k,forward-d128-causal", "--facts", str(tmp_path / "facts")]) == 0
    told = [json.loads(line) for line in (tmp_path / "facts").read_text().splitlines()]
    assert told[0] == {"case": DECODE.name, "error": "ZeroDivisionError: division by zero"} and told[1] == {"case": FORWARD.name, "kernels": ["k"]}


@pytest.mark.parametrize("case", counters.CASES.values(), ids=lambda case: case.name)
def test_plans_of_the_cases(case):
    plans = case.plans(support.assumed_device("sm_90"))
    assert {plan.family for plan in plans} == {"sm90"} and plans[-1].direction == case.direction
    requests = [request for plan in plans for request in dispatch.family(plan.family, plan.direction).requests(plan)]
    assert len(requests) == {"forward": 1, "backward": 4, "decode": 1}[case.direction]
    assert records.check({"bench": "counters", **COMMON, **case.fields, "library": "x", "direction": case.direction, "ms": 1.0, "tflops": None})


def test_operations_of_the_cases():
    assert counters.CASES["forward-d128-full"].flops == 4 * 16 * 4096**2 * 4 * 128
    assert counters.CASES["backward-d128-full"].flops == 2.5 * counters.CASES["forward-d128-full"].flops
    assert DECODE.flops == 64 * 8192 * 32 * 4 * 128


@pytest.mark.parametrize("case", ["forward-d64-causal", "backward-d128-causal", "decode-64-of-8k"])
def test_a_case_on_a_gpu(case):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    told = counters.counted_call(counters.CASES[case], torch)
    assert told["family"] == "sm90" and told["kernels"]


def test_without_ncu_it_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="ncu was not found on PATH; it is Nsight Compute's command line.* or say where it is with --ncu"):
        ncu.find()
    with pytest.raises(ValueError, match="/no/ncu was not found; it is"):
        ncu.find("/no/ncu")
    assert ncu.version_of("/no/ncu") is None


def test_the_version_of_ncu(tmp_path):
    program = tmp_path / "ncu"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA (R) Nsight Compute Command Line Profiler'\necho 'Version 2025.3.1.0 (build 36398880) (public-release)'\n"
    )
    program.chmod(0o755)
    assert ncu.version_of(str(program)) == "2025.3.1.0"
    with pytest.raises(subprocess.TimeoutExpired):
        counters.count(str(program), [FORWARD], COMMON, 0.0, "/nowhere")


def test_without_a_gpu_it_says_so(capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert counters.main([]) == 2 and "no CUDA GPU" in capsys.readouterr().err


def test_records_of_what_was_printed_before(tmp_path, capsys):
    words = ["--parse", f"forward-d128-causal={PRINTED / 'forward.csv'}", "--source", "a test", "--date", "2026-12-01", "--out", str(tmp_path)]
    assert counters.main(words) == 0
    (path,) = tmp_path.iterdir()
    (record,) = records.read(path)
    assert path.name == "2026-12-01-h200-counters.jsonl"
    assert (record["source"], record["date"], record["commit"], record["driver"]) == ("a test", "2026-12-01", None, None)
    assert counter_tables.text_of([record]) in capsys.readouterr().out
    assert counters.main(["--show", str(path)]) == 0 and capsys.readouterr().out == counter_tables.text_of([record]) + "\n"
    assert counters.main(["--show", str(tmp_path / "none.jsonl")]) == 1 and "none.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--only", "all"], "--only takes forward-d64-full"),
        (["--parse", "forward.csv"], "--parse takes CASE=FILE with a case of forward-d64-full"),
        (["--parse", f"forward-d128-causal={PRINTED / 'forward.csv'}"], "--parse needs --source and --date"),
    ],
)
def test_bad_words(words, told, capsys):
    with pytest.raises(SystemExit):
        counters.main(words)
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_bad_file_leaves_nothing_half_written(tmp_path, capsys):
    (tmp_path / "bad.csv").write_text("nothing")
    out = tmp_path / "out"
    words = ["--parse", f"forward-d128-causal={PRINTED / 'forward.csv'}", f"decode-64-of-8k={tmp_path / 'bad.csv'}"]
    assert counters.main([*words, "--source", "a test", "--date", "2026-12-01", "--out", str(out)]) == 1
    assert "bad.csv: no launch was counted" in capsys.readouterr().err and not out.exists()


def test_the_tables():
    found = counters.records_of(DECODE, ncu.rows_of(printed("decode")), COMMON)
    found += counters.records_of(FORWARD, ncu.rows_of(printed("forward")), COMMON)
    lines = {name: make(found).splitlines() for name, make in counter_tables.TABLES.items()}
    assert all(len(each) == 5 and len({line.count("|") for line in each}) == 1 for each in lines.values())
    assert lines["launches"][4] == "| forward D 128 causal | 409.0 | 1621 | 132 x 384 | 168 | 226 | 9.0 of 12 | 672 |"
    assert lines["pipes"][4].startswith("| forward D 128 causal | 79.1 | 41.2 |") and lines["pipes"][4].endswith("| 1.03 |")
    assert lines["memory"][2].startswith("| decode 64 of 8k, pages of 16: merge | 11.2 | 0.53 |")
    assert lines["stalls"][0].startswith("| kernel, cycles | all | long scoreboard | wait | selected |") and "membar" not in lines["stalls"][0]
