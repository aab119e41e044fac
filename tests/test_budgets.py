"""The budgets of the documentation: they add up to what a launch asks for, fit the hardware, and stand on the pages of their kernels."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from numbaflash import dispatch
from numbaflash.kernels.cpu import config as cpu
from numbaflash.kernels.sm90.config import MAX_SHARED
from numbaflash.problem import make_decode_problem
from numbaflash.support import assumed_device, contiguous_backward_layouts, contiguous_layouts

DOCS = Path(__file__).resolve().parent.parent / "docs"


@cache
def made():
    spec = importlib.util.spec_from_file_location("budgets_of_docs", DOCS / "budgets.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def on_gpus():
    of = made()
    cases = of.sm90_forward_cases(), of.sm90_gradients_cases(), of.sm90_decode_cases(), of.simt_forward_cases(), of.simt_gradients_cases()
    return [budget for _, budget in itertools.chain(*cases)]


def test_every_budget_fits_a_multiprocessor():
    of = made()
    assert len(on_gpus()) > 30
    for budget in on_gpus():
        assert budget.bytes <= MAX_SHARED and budget.blocks * (budget.bytes + of.RESERVED) <= of.SM_SHARED
        assert budget.blocks * sum(32 * role.warps * role.registers for role in budget.roles) <= of.SM_REGISTERS
        for role in budget.roles:
            most = max((sum(part.size for part in phase) for phase in role.phases), default=0)
            assert sum(part.size for part in role.parts) + most < role.registers <= of.MOST_REGISTERS


@pytest.mark.parametrize("dtype, family", [("bfloat16", "sm90"), ("float32", "simt"), ("float64", "simt")])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "kv_heads": 4, "dropout": 0.1}, {"options": ("mask",)}], ids=str)
def test_the_memory_is_what_a_launch_asks_for(dtype, family, dim, options):
    of, device = made(), assumed_device("sm_90")
    for seqlen in (512, 8192):
        problem = of.self_attention((dim, dim), seqlen, dtype, **options)
        with dispatch.use_family(family):
            forward = dispatch.make_plan(problem, contiguous_layouts(problem), device)
            backward = dispatch.make_backward_plan(problem, contiguous_backward_layouts(problem), device, False)
        budgets = {
            "sm90": (of.sm90_forward_budget, of.sm90_gradients_budget),
            "simt": (of.simt_forward_budget, of.simt_gradients_budget),
        }
        for plan, budget_of in zip((forward, backward), budgets[family], strict=True):
            budget = budget_of(plan.config)
            assert budget.bytes == plan.shared_bytes and 32 * sum(role.warps for role in budget.roles) == plan.threads


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_the_memory_of_decoding_is_what_a_launch_asks_for(dims, tokens):
    shapes = (8, tokens, 8, dims[0]), (8, 1000, 2, dims[0]), (8, 1000, 2, dims[1])
    problem = make_decode_problem(*shapes, ("bfloat16",) * 3, seqlens_k=((8,), "int32"))
    with dispatch.use_family("sm90"):
        plan = dispatch.make_decode_plan(problem, contiguous_layouts(problem), assumed_device("sm_90"))
    budget = made().sm90_decode_budget(plan.config)
    assert budget.bytes == plan.shared_bytes and 32 * budget.roles[0].warps == plan.threads


def test_lengths_at_which_the_tiles_change_are_found():
    of = made()

    def budget_of(keys):
        return of.Budget(("long" if keys > 768 else "short",), (), ())

    assert [keys for keys, _ in of.stretches(budget_of)] == ["up to 768", "from 769"]
    assert [keys for keys, _ in of.stretches(lambda keys: of.Budget((), (), ()))] == ["any"]


def test_every_processor_with_a_register_tile_is_told():
    of = made()
    assert set(of.PROCESSORS) == set(cpu.REGISTER_TILE)
    for (registers, _), (_, _, parts) in zip(of.PROCESSORS, of.cpu_register_cases(), strict=True):
        assert sum(part.size for part in parts) == registers and all(part.size >= 0 for part in parts)


def test_parts_leave_nothing_out():
    parts = made().cut(100, ("b", 40), ("a", 0), ("c", 90))
    assert [(part.name, part.size) for part in parts] == [("a", 40), ("b", 50), ("c", 10)]


@pytest.mark.parametrize("name", sorted(path.stem for path in DOCS.glob("kernels-*.md")))
def test_every_page_of_a_kernel_has_a_table_and_a_picture_of_its_budget(name):
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    assert re.search(r"^<!-- numbaflash budget [\w-]+ -->$", text, re.M) and re.search(r"^!\[[^]]+\]\(figures/budget-[\w-]+\.svg\)$", text, re.M)
