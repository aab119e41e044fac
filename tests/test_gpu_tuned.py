"""`numbaflash tune` on a GPU: every candidate of every family is built, computes attention, and is timed; what wins is used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from numbaflash import call as road
from numbaflash import verify
from numbaflash.tuned import keys, search, store
from numbaflash.verify.inputs import Inputs
from numbaflash.verify.meaning import sampled

pytestmark = pytest.mark.gpu

OPTIONS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window": (200, 0)},
    "softcap and sinks": {"causal": True, "softcap": 20.0, "sinks": True},
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBAFLASH_TUNE_DIR", str(tmp_path))
    monkeypatch.delenv("NUMBAFLASH_TUNE", raising=False)
    store.forget()
    road.forget()
    yield tmp_path
    store.forget()
    road.forget()


def place():
    return verify.open_place(None)


def calls(family, head_dim, options, seqlens=(1000,)):
    attention = verify.Attention(8, 2, head_dim, head_dim, "bfloat16" if family == "sm90" else "float32", **options)
    return verify.calls_of(attention, batch=2, seqlens=seqlens, context=1500, requests=3, page_size=64, backward=True)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_every_candidate_computes_attention(gpu, head_dim, options):
    outcomes = search.tune(calls(gpu.family, head_dim, OPTIONS[options]), place(), 600.0, family=gpu.family, dry_run=True)
    for outcome in outcomes:
        assert outcome.status in (search.TUNED, search.KEPT) or "one candidate alone" in outcome.text, f"{outcome.call}: {outcome.text}"
        for trial in outcome.trials:
            assert not trial.wrong and trial.why_not.partition(" ")[0] in ("", "spills"), f"{outcome.call}, {trial.values}: {trial.why_not}"


def test_deterministic_gradients_are_tuned_apart(gpu):
    (call,) = (each for each in calls(gpu.family, 128, OPTIONS["causal"]) if each.direction == "backward")
    (outcome,) = search.tune([replace(call, deterministic=True)], place(), 600.0, family=gpu.family, dry_run=True)
    assert outcome.key.endswith(" deterministic") and not outcome.wrong


def test_what_wins_is_used(gpu, folder, monkeypatch):
    """Whatever is the fastest, by any margin, so that there is something to use."""
    monkeypatch.setattr(search, "LEAST_GAIN", -10.0)
    monkeypatch.setattr(search.timing, "quartiles", lambda values: (sorted(values)[len(values) // 2],) * 3)
    here = place()
    outcomes = search.tune(calls(gpu.family, 128, OPTIONS["causal"], seqlens=(4096,)), here, 300.0, family=gpu.family)
    won = [outcome for outcome in outcomes if outcome.entry is not None]
    if won:
        assert len(store.read(store.path_of(keys.model_of(here.device)))) == len(won)
    for outcome in won:
        with search.use_family(gpu.family):
            inputs = Inputs.of(outcome.call, here)
            plan = inputs.explain().plan
            assert search.values_of(search.dispatch.family(gpu.family, plan.direction), plan.config) == outcome.entry.config
            assert plan.tuned.file == outcome.file
            results = inputs.forward()
            gradients = inputs.backward(*results) if plan.direction == "backward" else None
        sampled(inputs, *results, gradients)
