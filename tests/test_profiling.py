"""NVTX ranges: what they are called, that they stand around launches where they are asked for, and that nothing is added where they are not."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import numpy as np
import pytest

import numbaflash
from numbaflash import call, dispatch, profiling
from numbaflash.problem import make_decode_problem, make_packed_problem, make_problem
from numbaflash.support import contiguous_layouts


class FakeNvtx(types.ModuleType):
    """The part of the package nvtx that is used, which notes what it is asked in ``seen``."""

    def __init__(self):
        super().__init__("nvtx")
        self.seen = []

    def get_domain(self, name):
        return FakeDomain(name, self.seen)


class FakeDomain:
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def get_event_attributes(self, message=None, color=None, category=None, payload=None):
        return types.SimpleNamespace(message=message, color=color)

    def push_range(self, attributes):
        self.seen.append((self.name, attributes.message))

    def pop_range(self):
        self.seen.append("end")


@pytest.fixture
def nvtx(monkeypatch):
    fake = FakeNvtx()
    monkeypatch.setitem(sys.modules, "nvtx", fake)
    monkeypatch.setenv("NUMBAFLASH_NVTX", "1")
    call.forget()
    yield fake
    call.forget()


def ranges(*messages):
    return [event for message in messages for event in (("numbaflash", message), "end")]


def arrays(*shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_every_launch_stands_in_a_range(nvtx):
    q, k, v = arrays((2, 9, 4, 16), (2, 13, 2, 16), (2, 13, 2, 24))
    out, lse = numbaflash.forward(q, k, v, causal=True, return_lse=True)
    numbaflash.forward(q, k, v, causal=True, return_lse=True)
    numbaflash.backward(out, q, k, v, out, lse, causal=True, deterministic=True)
    numbaflash.decode(q, k, v, np.array([13, 2]), causal=True)
    sizes = "cpu fp32 B2 S9x13 H4x2 D16x24 causal"
    assert nvtx.seen == ranges(f"forward {sizes}", f"forward {sizes}", f"backward {sizes} deterministic", f"decode {sizes}")


def test_runs_of_a_decode_plan(nvtx):
    q, k, v = arrays((2, 1, 4, 16), (7, 4, 2, 16), (7, 4, 2, 16))
    lengths, table = np.array([5, 3]), np.zeros((2, 3), np.int32)
    plan = numbaflash.plan_decode(q, k, v, lengths, table)
    assert nvtx.seen == []
    plan.run(q, k, v, lengths, table)
    assert nvtx.seen == ranges("decode cpu fp32 B2 S1x12 H4x2 D16 pages of 4")


def test_calls_of_jax(nvtx):
    jax = pytest.importorskip("jax")
    from numbaflash.jax import launches

    for cached in (launches.forward_launch, launches.backward_launch):
        cached.cache_clear()
    with jax.default_device(jax.devices("cpu")[0]):
        q, k, v = (jax.numpy.asarray(x) for x in arrays((1, 8, 2, 16), (1, 8, 2, 16), (1, 8, 2, 16)))
        jax.block_until_ready(jax.grad(lambda q: numbaflash.attention(q, k, v).sum())(q))
    for cached in (launches.forward_launch, launches.backward_launch):
        cached.cache_clear()
    assert nvtx.seen == ranges("forward cpu fp32 B1 S8 H2 D16", "backward cpu fp32 B1 S8 H2 D16 deterministic")


def test_a_range_ends_where_its_launch_fails(nvtx):
    def launch(addresses, stream):
        raise RuntimeError("no memory")

    plan = plan_of(make_problem((1, 4, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8), ("float32",) * 3))
    with pytest.raises(RuntimeError, match="no memory"):
        profiling.in_range(plan, launch)((), 0)
    assert nvtx.seen == ranges("forward cpu fp32 B1 S4 H1 D8")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_nothing_is_added_unless_it_is_asked_for(nvtx, monkeypatch, value):
    monkeypatch.delenv("NUMBAFLASH_NVTX") if value is None else monkeypatch.setenv("NUMBAFLASH_NVTX", value)
    launch = object()
    assert profiling.in_range(None, launch) is launch
    numbaflash.forward(*arrays((1, 4, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8)))
    assert nvtx.seen == []


def test_a_missing_package_is_named(nvtx, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ImportError, match=r"NUMBAFLASH_NVTX=1 needs the package nvtx; pip install 'numbaflash\[profile\]'"):
        numbaflash.forward(*arrays((1, 4, 1, 8), (1, 4, 1, 8), (1, 4, 1, 8)))


def test_the_real_package():
    pytest.importorskip("nvtx")
    code = "import numpy as np, numbaflash as nf; x = np.ones((1, 4, 1, 8), np.float32); assert (nf.forward(x, x, x) == 1).all()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "NUMBAFLASH_NVTX": "1"}, check=True)


def plan_of(problem, direction="forward", family="cpu", **more):
    layouts = None if problem.paged or problem.packed else contiguous_layouts(problem)
    return dispatch.Plan(family, problem, dispatch.CPU, layouts, direction=direction, **more)


SQUARE = ((4, 4096, 16, 128),) * 3
BF16 = ("bfloat16",) * 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "forward sm90 bf16 B4 S4096 H16 D128"),
        ({"causal": True}, "forward sm90 bf16 B4 S4096 H16 D128 causal"),
        ({"window": (256, 0)}, "forward sm90 bf16 B4 S4096 H16 D128 window left256 right0"),
        ({"window": (None, 3)}, "forward sm90 bf16 B4 S4096 H16 D128 window right3"),
        ({"softcap": 20.0, "dropout": 0.5, "sinks": ((16,), "float32")}, "forward sm90 bf16 B4 S4096 H16 D128 softcap sinks dropout"),
        ({"seqlens_k": ((4,), "int32")}, "forward sm90 bf16 B4 S4096 H16 D128 seqlens_k"),
    ],
)
def test_names_of_options(options, name):
    assert profiling.range_name(plan_of(make_problem(*SQUARE, BF16, **options), family="sm90")) == name


def test_names_of_sizes():
    causal = make_problem((1, 8, 8, 64), (1, 32, 2, 64), (1, 32, 2, 32), ("float16",) * 3, causal="top_left")
    assert profiling.range_name(plan_of(causal)) == "forward cpu fp16 B1 S8x32 H8x2 D64x32 causal top_left"
    ends = {name: ((4,), "int32") for name in ("cu_seqlens_q", "cu_seqlens_k")}
    packed = make_packed_problem((500, 8, 64), (500, 8, 64), (500, 8, 64), BF16, causal=True, **ends, max_seqlen_q=200, max_seqlen_k=200)
    assert profiling.range_name(plan_of(packed)) == "forward cpu bf16 B3 T500 H8 D64 causal packed"
    cache = {"seqlens_k": ((64,), "int32"), "page_table": ((64, 512), "int32")}
    paged = make_decode_problem((64, 1, 32, 128), (9999, 16, 8, 128), (9999, 16, 8, 128), BF16, **cache)
    assert profiling.range_name(plan_of(paged, "decode", "sm90")) == "decode sm90 bf16 B64 S1x8192 H32x8 D128 pages of 16"


def test_names_mean_nothing_to_the_filters_of_nsight_compute():
    name = profiling.range_name(plan_of(make_problem((1, 8, 8, 64), (1, 32, 2, 64), (1, 32, 2, 32), BF16, window=(3, 5))))
    assert not set(name) & set("/@*[],")
