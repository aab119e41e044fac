"""`numbaflash tune`: candidates, tables that come and go, and a search that keeps nothing that is wrong."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace

import numba
import numpy as np
import pytest

import numbaflash as nf
from numbaflash import call as road
from numbaflash import cli, dispatch, environment, support, tuned, verify
from numbaflash.dispatch import CPU, Device
from numbaflash.kernels.simt import config as simt_config
from numbaflash.kernels.sm90 import config as sm90_config
from numbaflash.kernels.sm90.backward.config import SharedMemory as BackwardMemory
from numbaflash.kernels.sm90.decoding.config import SharedMemory as DecodeMemory
from numbaflash.problem import make_decode_problem, make_packed_problem, make_problem
from numbaflash.toolchain import CompileError, warmup
from numbaflash.tuned import keys, search, store
from numbaflash.verify import timing
from numbaflash.verify.places import Place

H200 = Device("cuda", 0, (9, 0), 132, "NVIDIA H200")
DIRECTIONS = ("forward", "backward", "decode")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The user's tables of a test, which are used."""
    monkeypatch.setattr(timing, "MOST_ROUNDS", 7)
    monkeypatch.setenv("NUMBAFLASH_TUNE_DIR", str(tmp_path / "tables"))
    monkeypatch.delenv("NUMBAFLASH_TUNE", raising=False)
    store.forget()
    road.forget()
    yield tmp_path / "tables"
    store.forget()
    road.forget()


def problem(dtype="float32", *, batch=2, seqlen=512, heads=8, kv_heads=2, head_dim=64, **options):
    k = (batch, options.pop("seqlen_k", seqlen), kv_heads, head_dim)
    return make_problem((batch, seqlen, heads, head_dim), k, k, (dtype,) * 3, **options)


def decoding(dtype="float32", *, batch=4, tokens=1, keys=2048, heads=8, kv_heads=2, head_dim=64, page=None, **options):
    rows, table = (batch, keys), {}
    if page is not None:
        rows, table = (batch * keys // page, page), {"page_table": ((batch, keys // page), "int32")}
    k = (*rows, kv_heads, head_dim)
    told = {"seqlens_k": ((batch,), "int32")} | table
    return make_decode_problem((batch, tokens, heads, head_dim), k, k, (dtype,) * 3, **told, **options)


def layouts_of(p, direction):
    return support.contiguous_backward_layouts(p) if direction == "backward" else support.contiguous_layouts(p)


def how_of(direction, deterministic=False, num_splits=None):
    return {"forward": (), "backward": (deterministic,), "decode": (num_splits,)}[direction]


def plan_of(p, direction, device, *how):
    """The plan of dispatch."""
    make = {"forward": dispatch.make_plan, "backward": dispatch.make_backward_plan, "decode": dispatch.make_decode_plan}[direction]
    return make(p, layouts_of(p, direction), device, *(how or how_of(direction)))


def problems(direction, family):
    dtypes = {"sm90": ("bfloat16",), "simt": ("float32", "float64"), "cpu": ("float32", "float16")}[family]
    for dtype in dtypes:
        for head_dim in (40, 64, 128, 256):
            if direction == "decode":
                for tokens in (1, 8):
                    for page in (None, 16) if family != "simt" else (None,):
                        yield decoding(dtype, head_dim=head_dim, tokens=tokens, page=page)
                continue
            for seqlen in (20, 512, 4096):
                lists = ({}, {"causal": True}, {"window": (100, 10)}, {"softcap": 20.0, "causal": True}, {"dropout": 0.25})
                for options in (*lists, {"mask": ((seqlen, seqlen), "bool")}, {"seqlens_k": ((2,), "int32")}):
                    yield problem(dtype, head_dim=head_dim, seqlen=seqlen, **options)
            ends = ((5,), "int32")
            x = (300, 4, head_dim)
            yield make_packed_problem(x, x, x, (dtype,) * 3, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)


CASES = [(family, direction) for family in dispatch.FAMILIES for direction in DIRECTIONS]


def on(family):
    return CPU if family == "cpu" else H200


# ---- candidates


@pytest.mark.parametrize(("family", "direction"), CASES)
def test_without_a_table_plans_are_the_families_own(family, direction):
    package, count = dispatch.family(family, direction), 0
    for p in problems(direction, family):
        layouts = layouts_of(p, direction)
        for how in sorted({how_of(direction), how_of(direction, True, 2 if family != "simt" else 1)}, key=str):
            own = package.plan(p, layouts, on(family), *how)
            with dispatch.use_family(family):
                plan = plan_of(p, direction, on(family), *how)
            assert plan == own and plan.tuned is None
            candidates = package.candidates(p, layouts, on(family), *how)
            assert candidates[0] == own.config, "the family's own choice comes first"
            assert len({json.dumps(tuned.values_of(package, config)) for config in candidates}) == len(candidates), "a table can tell them apart"
            assert package.plan(p, layouts, on(family), *how, config=own.config) == own
            count += len(candidates) > 1
    assert count > 4, "there is something to tune"


def test_candidates_fit_the_hardware():
    for p in problems("forward", "sm90"):
        for config in dispatch.family("sm90").candidates(p, layouts_of(p, "forward"), H200):
            assert sm90_config.SharedMemory.of(config).total <= sm90_config.MAX_SHARED
            live = config.kv_block // 2 + config.kv_block // 4 + config.padded_head_dim_v // 2
            assert live <= config.registers[1] - 24 and config.hold <= config.kv_block // 4
            assert 128 * config.registers[0] + 128 * config.consumers * config.registers[1] <= 65536
    for p in problems("backward", "sm90"):
        for config in dispatch.family("sm90", "backward").candidates(p, layouts_of(p, "backward"), H200, True):
            assert BackwardMemory.of(config).total <= sm90_config.MAX_SHARED
            assert 128 * config.registers[0] + 256 * config.registers[1] <= 168 * config.threads
    for p in problems("decode", "sm90"):
        for config in dispatch.family("sm90", "decode").candidates(p, layouts_of(p, "decode"), H200):
            assert config.blocks * (DecodeMemory.of(config).total + 1024) <= 227 * 1024
    for capability in ((7, 5), (8, 6), (9, 0)):
        device = replace(H200, capability=capability)
        for direction in ("forward", "backward"):
            for p in problems(direction, "simt"):
                for config in dispatch.family("simt", direction).candidates(p, layouts_of(p, direction), device, *how_of(direction)):
                    assert config.shared_bytes <= simt_config.shared_limit(device)


def test_a_number_of_parts_leaves_nothing_to_choose():
    """What is computed for a sequence must not depend on the others in the batch."""
    for family in dispatch.FAMILIES:
        p = decoding("bfloat16" if family == "sm90" else "float32")
        assert len(dispatch.family(family, "decode").candidates(p, layouts_of(p, "decode"), on(family), 1)) == 1


def arrays(seed=0, batch=2, seqlen=150, heads=4, kv_heads=2, head_dim=32):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, seqlen, heads, head_dim), dtype=np.float32)
    return q, *(rng.standard_normal((batch, seqlen, kv_heads, head_dim), dtype=np.float32) for _ in range(2))


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": True, "dropout": 0.25, "seed": 3}], ids=str)
def test_every_candidate_of_the_cpu_computes_the_same(options):
    q, k, v = arrays()
    if "mask" in options:
        options = options | {"mask": np.random.default_rng(1).random((150, 150)) < 0.5}
    out, lse = nf.forward(q, k, v, **options, return_lse=True)
    inputs_of = {"forward": {}}
    if "mask" not in options:  # compiling the gradients takes its time
        gradients = nf.backward(out, q, k, v, out, lse, **options)
        inputs_of["backward"] = {"dout": out, "out": out, "lse": lse}
    for direction, inputs in inputs_of.items():
        plan = nf.explain(q, k, v, **inputs, **options, direction=direction, return_lse=True).plan
        package = dispatch.family("cpu", direction)
        candidates = package.candidates(plan.problem, plan.layouts, CPU, *how_of(direction))
        assert len(candidates) > 1
        for config in candidates:
            with dispatch.use_config("cpu", direction, config):
                if direction == "forward":
                    np.testing.assert_allclose(nf.forward(q, k, v, **options), out, atol=2e-6)
                    assert nf.explain(q, k, v, **options).plan.config == config
                    continue
                for one, other in zip(nf.backward(out, q, k, v, out, lse, **options), gradients, strict=True):
                    np.testing.assert_array_equal(one, other, err_msg="tiles of the gradients decide no bit")


# ---- tables


def entry_of(p, direction="forward", device=CPU, *, family="cpu", number=-1, how=None, **changes):
    """An entry for a candidate of a problem, and that candidate."""
    package, layouts = dispatch.family(family, direction), layouts_of(p, direction)
    how = how_of(direction) if how is None else how
    config = package.candidates(p, layouts, device, *how)[number]
    told = {
        "family": family,
        "direction": direction,
        "key": keys.key_of(p, layouts, device, how),
        "config": tuned.values_of(package, config),
        "seconds": 1.0,
        "default_seconds": 1.25,
        "problem": "a problem",
        "date": "2026-12-01T04:20:09Z",
        "sources": store.sources_of(family),
        "version": nf.__version__,
    }
    return store.Entry(**told | changes), config


def stored(p, direction="forward", device=CPU, **options):
    """The config of an entry that the user's table now has."""
    entry, config = entry_of(p, direction, device, **options)
    store.store(keys.model_of(device), [entry])
    return config


@pytest.mark.parametrize(("family", "direction"), CASES)
def test_a_table_decides(family, direction):
    dtype = "bfloat16" if family == "sm90" else "float32"
    p = decoding(dtype) if direction == "decode" else problem(dtype, causal=True)
    config = stored(p, direction, on(family), family=family)
    with dispatch.use_family(family):
        plan = plan_of(p, direction, on(family))
        own = dispatch.family(family, direction).plan(p, layouts_of(p, direction), on(family), *how_of(direction))
        assert plan.config == config != own.config and plan.tuned.speedup == 1.25
        assert plan == replace(
            dispatch.family(family, direction).plan(p, plan.layouts, on(family), *how_of(direction), config=config), tuned=plan.tuned
        )
        if family != "cpu":
            requests = dispatch.family(family, direction).requests(plan)
            assert requests != dispatch.family(family, direction).requests(own), "another kernel is built"
            assert plan_of(p, direction, replace(H200, name="NVIDIA H100")).tuned is None, "of this model alone"
        if direction == "decode":
            assert plan_of(p, direction, on(family), 1).tuned is None, "a number of parts was given"


def test_a_table_is_for_problems_of_its_key():
    config = stored(problem(causal=True))
    for same in (problem(seqlen=300, causal=True), problem(batch=1, heads=16, kv_heads=4, causal=True), problem(scale=3.0, causal=True)):
        plan = plan_of(same, "forward", CPU)
        assert tuned.values_of(dispatch.family("cpu"), plan.config) == tuned.values_of(dispatch.family("cpu"), config)
    others = {"dtype": "float64"}, {"head_dim": 128}, {"causal": "top_left", "seqlen_k": 500}, {"window": (100, 0)}, {"seqlen": 1024}, {"seqlen": 256}
    more = {"batch": 32}, {"kv_heads": 4}, {"softcap": 3.0}, {"causal": False}, {"sinks": ((8,), "float32")}, {"dropout": 0.5}
    for other in (*others, *more):
        assert plan_of(problem(**{"causal": True} | other), "forward", CPU).tuned is None, other
    assert plan_of(problem(causal=True), "backward", CPU).tuned is None


def test_what_is_no_candidate_is_not_used():
    p = problem(causal=True)
    entry, _ = entry_of(p)
    for config in ({"q_tile": 77, "kv_tile": 64, "splits": 1}, {"q_tile": 64}, entry.config | {"threads": 2}, {}):
        store.store(keys.model_of(CPU), [replace(entry, config=config)])
        assert plan_of(p, "forward", CPU).tuned is None, config


def test_the_variable_leaves_tables_out(monkeypatch):
    p = problem()
    stored(p)
    assert plan_of(p, "forward", CPU).tuned
    monkeypatch.setenv("NUMBAFLASH_TUNE", "0")
    assert plan_of(p, "forward", CPU).tuned is None


def test_a_table_of_the_package_comes_after_the_users(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    one, other = problem("bfloat16"), problem("bfloat16", head_dim=128)
    options = {"device": H200, "family": "sm90"}
    shipped = [entry_of(p, **options, number=1) for p in (one, other)]
    store.store("NVIDIA H200", [entry for entry, _ in shipped], folder=store.SHIPPED)
    assert [plan_of(p, "forward", H200).config for p in (one, other)] == [config for _, config in shipped]
    config = stored(one, device=H200, family="sm90", number=2)
    assert [plan_of(p, "forward", H200).config for p in (one, other)] == [config, shipped[1][1]]
    files = [plan_of(p, "forward", H200).tuned.file for p in (one, other)]
    assert files == [str(folder / "nvidia-h200.json") for folder in (store.directory(), store.SHIPPED)]


def test_explain_tells_file_and_date(folder):
    q, k, v = arrays()
    assert "tuned" not in str(nf.explain(q, k, v))
    stored(nf.explain(q, k, v).problem)
    path = folder / store.path_of(keys.model_of(CPU)).name
    assert f"tuned      1.25 times as fast as the family's own choice on 2026-12-01, says {path}" in str(nf.explain(q, k, v))


def test_stale_choices_are_not_used_and_the_log_says_so_once(caplog):
    p = problem("bfloat16")
    entry, _ = entry_of(p, device=H200, family="sm90", sources="0123456789abcdef")
    store.store("NVIDIA H200", [entry])
    stored(decoding("float64"), "decode", H200, family="simt")
    with caplog.at_level(logging.WARNING, "numbaflash"):
        assert [plan_of(p, "forward", H200).tuned for _ in range(3)] == [None] * 3
        assert plan_of(decoding("float64"), "decode", H200).tuned, "another family's choices are still good"
    (record,) = caplog.records
    assert "sm90" in record.getMessage() and "numbaflash tune" in record.getMessage() and "simt" not in record.getMessage()


def test_the_digest_of_a_family_is_that_of_what_decides_its_speed():
    found = {name: store.sources_of(name) for name in dispatch.FAMILIES}
    assert len(set(found.values())) == len(found) and all(len(x) == 16 for x in found.values())
    assert store.sources_of("sm80") == store.sources_of("..") == ""


def good():
    return {"format": store.FORMAT, "device": keys.model_of(CPU), "entries": []}


DAMAGE = {
    "cut off": '{"format": 1, "dev',
    "not text": b"\xff\xfe\x00",
    "nothing": "",
    "no object": "[1, 2]",
    "deep": "[" * 100_000,
    "no entries": {"format": 1, "device": "x"},
    "another format": {"format": 99},
    "another model": {"device": "NVIDIA H100"},
    "no entry": {"entries": [3]},
    "fields missing": {"entries": [{"family": "cpu"}]},
    "a time that is none": {"entries": [{"seconds": "fast"}]},
    "a time of 0": {"entries": [{"seconds": 0}]},
    "no date": {"entries": [{"date": None}]},
    "no config": {"entries": [{"config": 3}]},
}


def written(damage, path):
    if isinstance(damage, dict):
        told = good() | damage
        from_entry = json.loads(json.dumps({name: getattr(entry_of(problem())[0], name) for name in store.Entry.__slots__}))
        told["entries"] = [from_entry | each if isinstance(each, dict) and each != {"family": "cpu"} else each for each in told["entries"]]
        damage = json.dumps(told if "entries" in told and damage != DAMAGE["no entries"] else damage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_is_left_out_and_the_log_says_so_once(damage, caplog, capsys):
    path = store.path_of(keys.model_of(CPU))
    written(DAMAGE[damage], path)
    before = path.read_bytes()
    p = problem()
    with caplog.at_level(logging.WARNING, "numbaflash"):
        assert [plan_of(p, "forward", CPU).tuned for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert cli.main(["tune", "list"]) == 0
    if damage != "another model":  # which is a good table of that
        assert f"{path}: cannot be used" in capsys.readouterr().out
        assert cli.main(["tune", "clear"]) == 0 and path.read_bytes() == before
    config = stored(p)
    assert plan_of(p, "forward", CPU).config == config
    assert path.with_suffix(".damaged").read_bytes() == before, "nothing is thrown away"


def test_a_table_that_cannot_be_read_is_left_out(caplog):
    store.path_of(keys.model_of(CPU)).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "numbaflash"):
        assert plan_of(problem(), "forward", CPU).tuned is None
    assert len(caplog.records) == 1


def test_processes_that_store_at_once_lose_nothing(folder):
    code = (
        "import sys\n"
        "from numbaflash.tuned import store\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for n in range(25):\n"
        "    entry = store.Entry('cpu', 'forward', f'{sys.argv[1]} {n}', {'q_tile': n}, 1.0, 2.0, 'p', '2026-12-01', 's', 'v')\n"
        "    store.store('Some CPU', [entry])\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen([sys.executable, "-c", code, name], **pipes) for name in "ab"]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    for worker in workers:
        worker.communicate(timeout=60)
        assert worker.returncode == 0
    entries = store.read(folder / "some-cpu.json", "Some CPU")
    assert {entry.key for entry in entries} == {f"{name} {n}" for name in "ab" for n in range(25)}
    assert [path.name for path in folder.iterdir()] == ["some-cpu.json"], "no lock and no part is left"


def test_a_later_entry_takes_the_place_of_an_earlier_one(folder):
    p = problem()
    entry, _ = entry_of(p)
    for seconds in (1.0, 0.5):
        path = store.store(keys.model_of(CPU), [replace(entry, seconds=seconds)])
    assert [each.seconds for each in store.read(path)] == [0.5]
    assert plan_of(p, "forward", CPU).tuned.speedup == 2.5
    store.store(keys.model_of(CPU), [], drop=[entry.place])
    assert plan_of(p, "forward", CPU).tuned is None


def test_a_prepared_call_looks_nothing_up(monkeypatch):
    q, k, v = arrays()
    looked = []
    find = tuned.find
    monkeypatch.setattr(tuned, "find", lambda *args: looked.append(args) or find(*args))
    for _ in range(3):
        nf.forward(q, k, v)
    assert len(looked) == 1


@pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="one thread")
def test_other_numbers_of_threads_have_entries_of_their_own():
    p = problem(seqlen=2048)
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        config = stored(p)
        plan = plan_of(p, "forward", CPU)
        assert plan.config == config
        numba.set_num_threads(2)
        assert dispatch.plan_again(plan).tuned is None
        other = stored(p, number=2)
        assert dispatch.plan_again(plan).config == other
        numba.set_num_threads(1)
        assert dispatch.plan_again(plan).config == config
    finally:
        numba.set_num_threads(before)


# ---- the search


class Clock(Place):
    """NumPy, where a call takes what the test says of its config."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds_of, self.turn = seconds, 0

    def seconds(self, call):
        call()
        self.turn += 1
        (trial,) = (cell.cell_contents for cell in call.__closure__ if isinstance(cell.cell_contents, search.Trial))
        return self.seconds_of(trial.config) * (1 + 0.01 * (self.turn % 3)), 0.0


ATTENTION = verify.Attention(heads=4, kv_heads=2, head_dim=32, head_dim_v=32, dtype="float32")


def calls(**changes):
    sizes = {"batch": 1, "seqlens": (150,), "context": 120, "requests": 3, "page_size": 16, "backward": True}
    return verify.calls_of(ATTENTION, **sizes | changes)


def tune(seconds, which=None, **options):
    return search.tune(which or calls(), Clock(seconds), 1e6, say=lambda line: None, **options)


def faster_with(**values):
    def seconds(config):
        return 0.5 if all(getattr(config, name) == x for name, x in values.items()) else 1.0

    return seconds


def test_the_search_stores_what_wins(folder):
    outcomes = tune(faster_with(kv_tile=128))
    assert [outcome.status for outcome in outcomes] == [search.TUNED] * 4
    assert {entry.place for entry in store.read(store.path_of(keys.model_of(CPU)))} == {outcome.entry.place for outcome in outcomes}
    for outcome in outcomes:
        assert outcome.entry.config["kv_tile"] == 128 and outcome.entry.default_seconds / outcome.entry.seconds == pytest.approx(2)
        assert "2.00" in search.table([outcome]) and "kv_tile 64 -> 128" in search.table([outcome])
        plan = verify.inputs.Inputs.of(outcome.call, Place()).explain().plan
        assert plan.config.kv_tile == 128 and plan.tuned.speedup == pytest.approx(2)
    assert [outcome.status for outcome in tune(faster_with(kv_tile=128))] == [search.TUNED] * 4, "a table does not change what is compared"
    again = tune(lambda config: 1.0)
    assert [outcome.status for outcome in again] == [search.KEPT] * 4 and "was removed" in again[0].text
    assert store.read(store.path_of(keys.model_of(CPU))) == []


def test_less_than_the_spread_is_no_win():
    assert {outcome.status for outcome in tune(lambda config: 1.0 - 0.015 * (config.kv_tile == 128))} == {search.KEPT}


def test_a_dry_run_stores_nothing(folder):
    outcomes = tune(faster_with(kv_tile=128), dry_run=True)
    assert all(outcome.entry for outcome in outcomes) and not folder.exists()


def test_calls_of_one_key_are_tuned_once():
    outcomes = tune(lambda config: 1.0, calls(seqlens=(150, 151), requests=1, backward=False))
    assert [outcome.status for outcome in outcomes] == [search.KEPT, search.SKIPPED, search.KEPT]
    assert "shares its choice" in outcomes[1].text


def test_no_time_is_told():
    outcomes = search.tune(calls(), Clock(lambda config: 1.0), 0.0, say=lambda line: None)
    assert {(outcome.status, outcome.text) for outcome in outcomes} == {(search.SKIPPED, "no time left (--budget)")}


PLANTED = {
    "forward": ("out", lambda x: x[0, 7, 1].__setitem__(3, 0.5)),
    "backward": ("dk", lambda x: x[0, 149].__imul__(1.01)),
    "decode": ("lse", None),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_wrong_candidate_is_reported_and_never_stored(direction, monkeypatch, folder):
    """The fastest of all spoils an element, a row, or writes nothing."""
    from tests.test_verify import memory_of

    package, (operand, spoil) = dispatch.family("cpu", direction), PLANTED[direction]
    prepare = package.prepare

    def planted(plan):
        launch, names = prepare(plan), dispatch.operands(plan.problem, plan.direction)

        def launch_and_spoil(addresses, stream):
            if spoil is None:
                return
            launch(addresses, stream)
            spoil(memory_of(plan, operand, addresses[names.index(operand)]))

        return launch_and_spoil if plan.config.kv_tile == 128 else launch

    monkeypatch.setattr(package, "prepare", planted)
    which = [call for call in calls() if call.direction == direction]
    said = []
    clock = Clock(lambda config: {128: 0.25, 256: 0.5, 32: 0.5}.get(config.kv_tile, 1.0))
    outcomes = search.tune(which, clock, 1e6, say=said.append)
    for outcome in outcomes:
        assert outcome.wrong and {trial.wrong for trial in outcome.trials if trial.config.kv_tile == 128} == {True}
        assert outcome.entry.config["kv_tile"] != 128 and outcome.entry.config["kv_tile"] != 64, "the next one has won"
    assert any("WRONG" in line and "kv_tile 128" in line for line in said) and "WRONG" in search.table(outcomes)
    assert all(entry.config["kv_tile"] != 128 for entry in store.read(store.path_of(keys.model_of(CPU))))


def test_an_own_choice_that_is_wrong_ends_its_call(monkeypatch, folder):
    package = dispatch.family("cpu")
    prepare = package.prepare
    monkeypatch.setattr(package, "prepare", lambda plan: prepare(replace(plan, problem=replace(plan.problem, scale=plan.problem.scale * 1.1))))
    (outcome,) = tune(faster_with(kv_tile=128), [call for call in calls(backward=False) if call.direction == "forward"])
    assert outcome.status == search.WRONG and outcome.wrong and outcome.entry is None and not folder.exists()


def test_a_table_of_the_package_that_loses_is_overruled(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    which = [call for call in calls(backward=False) if call.direction == "forward"]
    tune(faster_with(kv_tile=128), which, folder=store.SHIPPED)
    plan = verify.inputs.Inputs.of(which[0], Place()).explain().plan
    assert plan.config.kv_tile == 128 and plan.tuned.file.startswith(str(store.SHIPPED))
    (outcome,) = tune(lambda config: 1.0, which)
    plan = verify.inputs.Inputs.of(which[0], Place()).explain().plan
    assert outcome.status == search.KEPT and plan.config.kv_tile == 64 and plan.tuned.file == outcome.file and outcome.file.startswith(str(folder))
    assert len(store.read(store.path_of(keys.model_of(CPU), store.SHIPPED))) == 1


def test_a_stored_choice_that_there_was_no_time_for_stays(monkeypatch):
    which = [call for call in calls(backward=False) if call.direction == "forward"]
    tune(faster_with(kv_tile=128), which)
    (entry,) = store.read(store.path_of(keys.model_of(CPU)))
    check = search._Search._check

    def check_in_a_hurry(self, trials):
        check(self, trials)
        for trial in trials:
            trial.why_not = "no time left (--budget)" if trial.values == entry.config else ""

    monkeypatch.setattr(search._Search, "_check", check_in_a_hurry)
    (outcome,) = tune(lambda config: 1.0, which)
    assert outcome.status == search.KEPT and store.read(store.path_of(keys.model_of(CPU))) == [entry]


def test_a_stored_choice_that_is_wrong_now_is_dropped(monkeypatch):
    which = [call for call in calls(backward=False) if call.direction == "forward"]
    tune(faster_with(kv_tile=128), which)
    package = dispatch.family("cpu")
    prepare = package.prepare
    monkeypatch.setattr(package, "prepare", lambda plan: prepare(plan) if plan.config.kv_tile == 64 else lambda addresses, stream: None)
    (outcome,) = tune(lambda config: 1.0, which)
    assert outcome.wrong and outcome.entry is None and store.read(store.path_of(keys.model_of(CPU))) == []


def test_candidates_of_a_gpu_that_spill_or_do_not_build_are_left_out(monkeypatch):
    """Without a GPU: what is built, and what comes of what ptxas says of it."""
    p = problem("bfloat16", head_dim=128)
    layouts, package = layouts_of(p, "forward"), dispatch.family("sm90")
    found = search._Search(calls()[0], Place(), None, 1.0, lambda line: None)
    found.plan, found.package = package.plan(p, layouts, H200), package
    monkeypatch.setattr(Place, "on_gpu", True)
    warmed = []
    monkeypatch.setattr(warmup, "warm_plans", lambda plans, load: warmed.extend(plans))

    def resources(plan):
        if plan.config.kv_block == 64:
            raise CompileError("refused")
        return {"spill_bytes": 8 * (plan.config.kv_block == 80)}

    monkeypatch.setattr(package, "resources", resources)
    trials = [search.Trial(config, tuned.values_of(package, config)) for config in package.candidates(p, layouts, H200)]
    found._build(trials, ())
    assert [plan.config for plan in warmed] == [trial.config for trial in trials]
    for trial in trials:
        assert trial.why_not == {64: "not built: refused", 80: "spills 8 bytes"}.get(trial.config.kv_block, "")
    assert {trial.config.kv_block for trial in trials} > {64, 80, 128}


# ---- the command


def command(capsys, *arguments):
    status = cli.main(["tune", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out, said.err


TINY = ("--library", "numpy", "--seqlen", 96, "--context", 96, "--heads", 2, "--head-dim", 32, "--requests", 1, "--budget", 1.5)


def test_the_command_on_the_cpu(capsys, folder):
    status, out, err = command(capsys, *TINY, "--direction", "forward", "--direction", "decode")
    assert status == 0 and err == "", out
    assert "prefill of 96" in out and "decode of one request" in out and "gradients" not in out
    assert f"{store.path_of(keys.model_of(CPU))}" in out and "of 2 calls have a faster choice" in out
    x = np.ones((1, 96, 2, 32), np.float32)
    np.testing.assert_allclose(nf.forward(x, x, x, causal=True), x, atol=1e-6)


def test_the_command_lists_and_clears(capsys, folder):
    for p, direction in ((problem(), "forward"), (problem(), "backward"), (problem(causal=True), "forward")):
        stored(p, direction)
    store.store("NVIDIA H200", [entry_of(problem("bfloat16"), "forward", H200, family="sm90", sources="other")[0]])
    status, out, _ = command(capsys, "list")
    assert status == 0 and out.count("1.25 times as fast") == 4 and out.count("STALE") == 1 and "4 choices" in out
    assert "2 choices" in command(capsys, "list", "--family", "cpu", "--direction", "forward")[1]
    assert "1 choices deleted" in command(capsys, "clear", "--stale")[1] and not (folder / "nvidia-h200.json").exists()
    assert "1 choices deleted" in command(capsys, "clear", "--direction", "backward")[1]
    assert environment._tuned_tables() == f"{folder}: {store.path_of(keys.model_of(CPU)).name} (2 choices)"
    assert plan_of(problem(), "backward", CPU).tuned is None and plan_of(problem(), "forward", CPU).tuned
    assert "2 choices deleted" in command(capsys, "clear")[1] and list(folder.iterdir()) == []
    assert plan_of(problem(), "forward", CPU).tuned is None


def test_the_command_reads_traces_and_writes_where_it_is_told(capsys, tmp_path):
    q, k, v = arrays(seqlen=40)
    with nf.record(tmp_path / "calls.jsonl"):
        nf.forward(q, k, v, causal=True)
    arguments = ("--trace", tmp_path / "calls.jsonl", "--library", "numpy", "--budget", 0.5, "--folder", tmp_path / "mine", "--dry-run")
    status, out, _ = command(capsys, *arguments)
    assert status == 0 and "forward (line 2)" in out and "nothing was stored (--dry-run)" in out and not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stale",), "--stale is for numbaflash tune clear"),
        (("list", "--dry-run"), "not for list"),
        (("--trace", "calls.jsonl", "--heads", "4"), "--trace says these already"),
        (("--trace", "there/is/none.jsonl"), "none.jsonl"),
        (("--folder", "/proc/1/tables"), "/proc/1"),
        (("--no-backward", "--direction", "backward"), "no call of --direction backward"),
    ],
    ids=str,
)
def test_the_command_refuses_in_one_line(arguments, words, capsys):
    status, _, err = command(capsys, "--library", "numpy", *arguments) if arguments[0] != "list" else command(capsys, *arguments)
    assert status == 2 and err.count("\n") == 1 and words in err


def test_a_wrong_candidate_is_the_exit_status(capsys, monkeypatch):
    package = dispatch.family("cpu")
    prepare = package.prepare

    def planted(plan):
        return (lambda addresses, stream: None) if plan.config.kv_tile == 32 else prepare(plan)

    monkeypatch.setattr(package, "prepare", planted)
    status, out, _ = command(capsys, *TINY, "--direction", "forward")
    assert status == 1 and "WRONG, left out" in out and "candidates WRONG" in out
