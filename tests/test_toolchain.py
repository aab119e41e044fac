"""The toolchain: PTX text passes, disk cache, prepared launches (byte for byte, against a driver made of callbacks), resource
reports, warm-up; on a GPU, launches with every kind of parameter."""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import logging
import math
import os
import re
import struct
import subprocess
import sys
import textwrap
import threading
import types
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from numbaflash import dispatch, toolchain
from numbaflash.kernels.blocks import layout
from numbaflash.problem import ITEMSIZE, NEEDS, make_packed_problem, make_problem
from numbaflash.toolchain import Array, CompileError, CudaError, KernelRequest, KernelSource, Pointer, Ptx, Scalar, TensorMap
from numbaflash.toolchain import cache as disk
from numbaflash.toolchain import compile as compiler
from numbaflash.toolchain import driver as drv
from numbaflash.toolchain import launch as launching
from numbaflash.toolchain import log as logs
from numbaflash.toolchain import resources as reports
from numbaflash.toolchain import warmup as warming

ROOT = Path(__file__).resolve().parent.parent
HOPPER = (9, 0, "a")
SOURCES_DIGEST = disk._sources_digest


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    """An empty cache for each test, on disk and in this process."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(folder))
    monkeypatch.delenv("NUMBAFLASH_CACHE_MB", raising=False)
    for store in (compiler._ready, compiler._building):
        monkeypatch.setattr(compiler, "_ready" if store is compiler._ready else "_building", {})
    monkeypatch.setattr(disk, "_sources_digest", lambda: disk._sources)  # whoever edits a kernel while the tests run
    disk._warned.cache_clear()
    return folder


# ---- kernels


@dataclass(frozen=True)
class ScaleConfig:
    factor: int = 2
    trace: str = ""  # a file that gets a line for each build


def build_scale(config):
    from numba import cuda, types

    if config.trace:
        with open(config.trace, "a") as file:
            file.write("built\n")
    factor = config.factor

    def scale(x, n):
        i = cuda.grid(1)
        if i < n:
            x[i] = x[i] * factor

    return KernelSource(scale, types.void(types.Array(types.float32, 1, "A"), types.int32), threads=128)


def build_untypable(config):
    from numba import types

    def untypable(n):
        n.nothing()

    return KernelSource(untypable, types.void(types.int32), threads=32)


def build_division(config):
    from numba import cuda, types

    def division(x, y):
        i = cuda.threadIdx.x
        x[i] = x[i] / y[i]

    kind = types.Array(types.float32, 1, "A")
    return KernelSource(division, types.void(kind, kind), threads=32, fastmath=config)


def build_spilling(config):
    from numba import cuda, types

    def spilling(x):
        i = cuda.threadIdx.x
        values = cuda.local.array(64, types.float32)
        for j in range(64):
            values[j] = x[i + 32 * j]
        for _ in range(x[0]):
            for j in range(64):
                values[j] = values[j] * values[(j + 7) % 64] + x[j]
        for j in range(64):
            x[i + 32 * j] = values[j]

    return KernelSource(spilling, types.void(types.Array(types.float32, 1, "A")), threads=32, max_registers=24)


@dataclass(frozen=True)
class EverythingConfig:
    """A kernel with one parameter of each kind; with ``tensor_map`` q is read by TMA, else through its address."""

    tensor_map: bool = True
    cluster: tuple | None = None


SCALARS = {"int32": -7, "uint32": 2**32 - 5, "int64": -(2**40), "uint64": 2**63, "float32": 0.5, "float64": math.pi}


def build_everything(config):
    """out[i] = q[i] + 100 k[i] + 10000 v[i % 4, i // 4] for 16 elements; lse gets the scalars, as float64."""
    from llvmlite import ir
    from numba import cuda
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    i32, i64, f32 = ir.IntType(32), ir.IntType(64), ir.FloatType()

    def asm(text, result, constraints, *arguments):
        signature = result(*arguments)
        kinds = {types.uint32: i32, types.uint64: i64, types.float32: f32, types.float64: ir.DoubleType(), types.void: ir.VoidType()}

        def generate(context, builder, sig, values):
            values = [context.cast(builder, value, have, want) for value, have, want in zip(values, sig.args, arguments, strict=True)]
            function = ir.FunctionType(kinds[result], [value.type for value in values])
            got = builder.call(ir.InlineAsm(function, text, constraints + ",~{memory}", side_effect=True), values)
            return context.get_dummy_value() if result is types.void else got

        if len(arguments) == 1:
            return intrinsic(lambda typingctx, a: (signature, generate))
        if len(arguments) == 2:
            return intrinsic(lambda typingctx, a, b: (signature, generate))
        return intrinsic(lambda typingctx, a, b, c: (signature, generate))

    u32, u64, f = types.uint32, types.uint64, types.float32
    load_global = asm("ld.global.f32 $0, [$1];", f, "=f,l", u64)
    store_global = asm("st.global.f64 [$0], $1;", types.void, "l,d", u64, types.float64)
    load_shared = asm("ld.shared.f32 $0, [$1];", f, "=f,r", u32)
    barrier_init = asm("mbarrier.init.shared::cta.b64 [$0], 1; fence.mbarrier_init.release.cluster;", types.void, "r", u32)
    barrier_expect = asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", types.void, "r,r", u32, u32)
    barrier_wait = asm(
        "{\n.reg .pred p;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p, [$0], 0;\n@p bra DONE;\nbra WAIT;\nDONE:\n}", types.void, "r", u32
    )
    tma = asm(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {0, 0}], [$2];", types.void, "r,l,r", u32, u64, u32
    )

    @intrinsic
    def shared_address(typingctx):
        def generate(context, builder, sig, args):
            module = builder.module
            found = module.globals.get("tile")
            if found is None:
                found = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), "tile", addrspace=3)
                found.linkage, found.align = "external", 128
            return builder.ptrtoint(found, i32)

        return u32(), generate

    with_map = config.tensor_map

    def everything(q, k, v, out, lse, a, b, c, d, e, g):
        i = cuda.threadIdx.x
        x = f(0)
        if with_map:
            tile = shared_address()
            barrier = tile + u32(128)
            if i == 0:
                barrier_init(barrier)
            cuda.syncthreads()
            if i == 0:
                barrier_expect(barrier, u32(64))
                tma(tile, q, barrier)
            barrier_wait(barrier)
            x = load_shared(tile + u32(4 * i))
        else:
            x = load_global(q + u64(4 * i))
        out[i] = x + f(100) * load_global(k + u64(4 * i)) + f(10000) * v[i % 4, i // 4]
        if i == 0 and lse != 0:
            store_global(lse, types.float64(a))
            store_global(lse + u64(8), types.float64(b))
            store_global(lse + u64(16), types.float64(c))
            store_global(lse + u64(24), types.float64(d))
            store_global(lse + u64(32), types.float64(e))
            store_global(lse + u64(40), g)

    scalars = (types.int32, types.uint32, types.int64, types.uint64, types.float32, types.float64)
    signature = types.void(u64, u64, types.Array(f, 2, "A"), types.Array(f, 1, "A"), u64, *scalars)
    return KernelSource(everything, signature, threads=16, tensor_maps=(0,) if with_map else (), cluster=config.cluster)


def request_of(build, config=None, arch=HOPPER):
    return KernelRequest(f"{__name__}:{build.__name__}", config, arch)


V_STRIDES = (-4, 16)  # rows of v run backwards


def everything_parameters(tensor_map=True):
    q = TensorMap("q", "float32", (16, 1), (64,), (16, 1), swizzle=0) if tensor_map else Pointer("q")
    scalars = [Scalar(kind, value) for kind, value in SCALARS.items()]
    return [q, Pointer("k"), Array("v", "float32", (4, 4), V_STRIDES), Array("out", "float32", (16,), (4,)), Pointer("lse"), *scalars]


# ---- PTX text passes

PTX = """//
.version 9.5
.target sm_90a
.address_size 64

.extern .shared .align 128 .b8 tile[];

.visible .entry _ZN4kern1kB2v1Ey(
	.param .u64 _ZN4kern1kB2v1Ey_param_0,
	.param .u32 _ZN4kern1kB2v1Ey_param_1,
	.param .u64 _ZN4kern1kB2v1Ey_param_10,
	.param .f32 _ZN4kern1kB2v1Ey_param_11
)
.maxntid 96, 1, 1
.minnctapersm 1
{
	.reg .b64 	%rd<3>;

	ld.param.u64 	%rd1, [_ZN4kern1kB2v1Ey_param_0];
	ld.param.u64 	%rd2, [_ZN4kern1kB2v1Ey_param_10];
	prefetch.tensormap [%rd1];
	ret;
}
"""
SHORT = PTX.replace("_ZN4kern1kB2v1Ey", "k")


def test_entry_is_found_and_renamed():
    assert compiler.entry_name(PTX) == "_ZN4kern1kB2v1Ey"
    assert compiler.rename_entry(PTX, "k") == SHORT


@pytest.mark.parametrize("text, count", [("", 0), (PTX + SHORT, 2)])
def test_exactly_one_entry(text, count):
    with pytest.raises(CompileError, match=f"expected one .entry in the PTX; found {count}"):
        compiler.entry_name(text)


@pytest.mark.parametrize(
    "have, arch, want",
    [
        ("9.5", HOPPER, "8.3"),
        ("9.5", (9, 0), "8.3"),
        ("9.5", (8, 0), "8.0"),
        ("9.5", (7, 5), "8.0"),
        ("9.5", (10, 0, "a"), "8.6"),
        ("9.5", (12, 0), "8.7"),
        ("9.5", (99, 0), "9.5"),
        ("8.3", HOPPER, "8.3"),
        ("8.1", HOPPER, "8.1"),
        ("7.8", (8, 0), "7.8"),
        ("10.0", HOPPER, "8.3"),
    ],
)
def test_version_is_lowered_and_never_raised(have, arch, want):
    text = compiler.lower_version(PTX.replace("9.5", have), arch)
    assert text == PTX.replace("9.5", want)


def test_version_line_must_be_there():
    with pytest.raises(CompileError, match=r"expected one .version line in the PTX; found 0"):
        compiler.lower_version(PTX.replace(".version", "//version"), HOPPER)


@pytest.mark.parametrize(
    "declared, loaded", [(".u64", "u64"), (".u64 .ptr .align 1", "b64"), (".b64", "b64"), (".u64 .ptr .global .align 64", "u64")]
)
def test_tensor_map_by_value(declared, loaded):
    text = SHORT.replace(".u64 k_param_0", f"{declared} k_param_0").replace("ld.param.u64 \t%rd1", f"ld.param.{loaded} \t%rd1")
    got = compiler.maps_by_value(text, "k", [0])
    assert ".param .align 64 .b8 k_param_0[128],\n" in got
    assert "mov.b64 \t%rd1, k_param_0;\n\tcvta.param.u64 \t%rd1, %rd1;" in got
    assert ".param .u64 k_param_10," in got and "ld.param.u64 \t%rd2, [k_param_10];" in got, "another parameter was touched"
    assert compiler.parameter_sizes(Ptx(got, "k")) == [128, 4, 8, 4]


def test_tensor_map_pass_refuses_what_it_does_not_know():
    with pytest.raises(CompileError, match="expected one 64-bit parameter k_param_1 in the PTX; found 0"):
        compiler.maps_by_value(SHORT, "k", [1])
    for odd in ("ld.param.u32 \t%r1, [k_param_0+4];", "ld.param.v2.u64 \t{%rd1, %rd2}, [k_param_0];"):
        with pytest.raises(CompileError, match="reads tensor map parameter k_param_0 in a way"):
            compiler.maps_by_value(SHORT.replace("ld.param.u64 \t%rd1, [k_param_0];", odd), "k", [0])


def test_environment_pointers_are_dropped_unless_used():
    pointer = ".common .global .align 8 .u64 _ZN08NumbaEnv4kern1kB2v1Ey;\n"
    text = SHORT.replace(".visible", pointer + ".visible")
    assert compiler.drop_environments(text) == SHORT
    used = text.replace("ret;", "mov.u64 %rd1, _ZN08NumbaEnv4kern1kB2v1Ey;\n\tret;")
    assert compiler.drop_environments(used) == used


def test_cluster_and_register_directives():
    text = compiler.limit_registers(compiler.set_cluster(SHORT, "k", (2, 1, 1)), "k", 168)
    assert ".minnctapersm 1\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n.maxnreg 168\n{" in text
    assert compiler.cluster_of(Ptx(text, "k")) == (2, 1, 1)
    assert compiler.cluster_of(Ptx(SHORT, "k")) == (1, 1, 1)
    assert compiler.launch_threads(Ptx(text, "k")) == 96
    assert compiler.parameter_sizes(Ptx(text, "k")) == [8, 4, 8, 4]
    with pytest.raises(CompileError, match="already has .maxnreg"):
        compiler.limit_registers(text, "k", 128)
    with pytest.raises(CompileError, match="already has .explicitcluster"):
        compiler.set_cluster(text, "k", (2, 1, 1))
    with pytest.raises(CompileError, match="expected one body of kernel other in the PTX; found 0"):
        compiler.limit_registers(SHORT, "other", 128)


@pytest.mark.parametrize("cluster", [(0, 1, 1), (2, 1), (4, 4, 2), (1.0, 1, 1)])
def test_bad_cluster(cluster):
    with pytest.raises(CompileError, match="cluster must be three positive sizes"):
        compiler.set_cluster(SHORT, "k", cluster)


@pytest.mark.parametrize("registers", [0, 8, 256, 100.5])
def test_bad_register_limit(registers):
    with pytest.raises(CompileError, match="max_registers must be from 16 to 255"):
        compiler.limit_registers(SHORT, "k", registers)


def test_facts_that_are_not_in_the_text_are_errors():
    for function, message in (
        (compiler.parameter_sizes, "the PTX has no kernel z"),
        (compiler.launch_threads, "the PTX of z states no .maxntid"),
    ):
        with pytest.raises(CompileError, match=message):
            function(Ptx(SHORT.replace(".maxntid", ".other"), "z"))
    with pytest.raises(CompileError, match="cannot read parameter"):
        compiler.parameter_sizes(Ptx(SHORT.replace(".u32 k_param_1", ".v4 k_param_1"), "k"))


def test_tensor_map_position_counts_the_words_of_arrays():
    from numba import types

    array = types.Array(types.float32, 2, "A")
    source = KernelSource(None, types.void(types.int32, array, types.uint64), 32, tensor_maps=(2,))
    assert compiler._ptx_positions(source) == [10]
    for index in (0, 1, 3):
        with pytest.raises(CompileError, match=f"tensor map parameter {index} must be declared uint64"):
            compiler._ptx_positions(KernelSource(None, source.signature, 32, tensor_maps=(index,)))


@pytest.mark.parametrize("build", ["module", ":function", "module:"])
def test_request_needs_module_and_function(build):
    with pytest.raises(ValueError, match=r'build must be "module:function"'):
        KernelRequest(build, None, HOPPER)


@pytest.mark.parametrize("arch", [(9,), ("9", "0"), (9, 0, "x"), (9, 0, "a", "b")])
def test_request_needs_an_architecture(arch):
    with pytest.raises(ValueError, match="arch must be"):
        KernelRequest("module:function", None, arch)


# ---- compiling


def need_ptxas():
    for tool in ("ptxas", "nvdisasm"):
        try:
            reports.find_tool(tool)
        except toolchain.ToolMissingError as error:
            pytest.skip(str(error))


@pytest.mark.parametrize("arch", [HOPPER, (10, 0, "a")], ids=["sm_90a", "sm_100a"])
def test_kernel_with_tensor_map_by_value_assembles(arch):
    need_ptxas()
    request = request_of(build_everything, EverythingConfig(cluster=(2, 1, 1)), arch)
    ptx = toolchain.compile_ptx(request)
    assert compiler.parameter_sizes(ptx) == [128, 8] + [8] * 9 + [8] * 7 + [8, 4, 4, 8, 8, 4, 8]
    assert re.fullmatch(r"test_toolchain_build_everything_[0-9a-f]{8}", ptx.entry)
    report = toolchain.ptxas_report(ptx, arch)
    assert 8 <= report.registers <= 64
    assert (report.stack_bytes, report.spill_stores, report.spill_loads, report.notes) == (0, 0, 0, ())
    opcodes = toolchain.count_opcodes(toolchain.sass(ptx, arch))
    assert opcodes["UTMALDG"] == 1 and opcodes["EXIT"] >= 1
    assert toolchain.compile_ptx(request) is ptx


def test_old_architecture_assembles():
    need_ptxas()
    report = toolchain.ptxas_report(toolchain.compile_ptx(request_of(build_everything, EverythingConfig(tensor_map=False), (7, 5))), (7, 5))
    assert report.registers > 0 and report.spill_stores == 0


def test_spills_and_register_limit_are_reported():
    need_ptxas()
    ptx = toolchain.compile_ptx(request_of(build_spilling, None, (8, 0)))
    report = toolchain.ptxas_report(ptx, (8, 0))
    assert report.registers <= 24
    assert report.stack_bytes >= 256


@pytest.mark.parametrize("fastmath, division", [(False, "div.rn.f32"), (True, "div.approx.ftz.f32"), (frozenset({"contract"}), "div.approx.ftz.f32")])
def test_fastmath_reaches_the_compiler(fastmath, division):
    text = toolchain.compile_ptx(request_of(build_division, fastmath)).text
    assert division in text or division.replace("approx", "full") in text


@pytest.mark.parametrize(
    "build, words",
    [
        (f"{__name__}:build_untypable", "nothing"),
        (f"{__name__}:build_missing", "has no attribute 'build_missing'"),
        ("no_such_module:build", "No module named 'no_such_module'"),
    ],
)
def test_compile_errors_name_the_kernel(build, words):
    with pytest.raises(CompileError, match=re.escape(words)) as caught:
        toolchain.compile_ptx(KernelRequest(build, 5, HOPPER))
    assert str(caught.value).startswith(f"could not compile {build} 5 for sm_90a: ")
    assert caught.value.__cause__ is not None


def test_ptxas_error_is_shown():
    need_ptxas()
    with pytest.raises(RuntimeError, match="ptxas refused the PTX for sm_90a:\n(.|\n)*nonsense"):
        toolchain.ptxas_report(Ptx(SHORT.replace("ret;", "nonsense;").replace("9.5", "8.3"), "k"), HOPPER)


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources in function 'k'
ptxas warning : setmaxnreg ignored to maintain minimum register requirements.
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 48 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 12.345 ms
"""


def test_report_is_read_with_its_notes():
    report = reports.parse_report(REPORT, "k")
    assert (report.registers, report.stack_bytes, report.spill_stores, report.spill_loads, report.shared_bytes) == (168, 48, 40, 44, 1024)
    assert len(report.notes) == 2
    assert "Potential Performance Loss" in report.notes[0] and "setmaxnreg ignored" in report.notes[1]
    with pytest.raises(RuntimeError, match="cannot read the report of ptxas about other"):
        reports.parse_report(REPORT, "other")


def test_opcodes_are_counted_without_predicates_and_modifiers():
    listing = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA 0x40 ;
        /*0020*/             @UP1 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0040*/              @P3  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""
    assert toolchain.count_opcodes(listing) == Counter(LDC=1, BRA=1, UIADD3=1, HGMMA=2)


def test_missing_tool_names_its_wheel(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    find = reports.find_tool.__wrapped__
    with pytest.raises(toolchain.ToolMissingError, match="ptxas was not found; pip install nvidia-cuda-nvcc"):
        find("ptxas")
    with pytest.raises(toolchain.ToolMissingError, match="pip install nvidia-cuda-nvdisasm"):
        find("nvdisasm")
    for home, base in ((tmp_path, tmp_path / "bin"), (None, tmp_path / "nvidia" / "cu13" / "bin")):
        base.mkdir(parents=True)
        (base / "ptxas").write_text("")
        (base / "ptxas").chmod(0o755)
        if home:
            monkeypatch.setenv("CUDA_HOME", str(home))
        assert find("ptxas") == str(base / "ptxas"), "a wheel comes before CUDA_HOME"


def run_python(code, **environment):
    """Run code in a new interpreter that can import this file; the JSON it prints last."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths, **environment}, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_numpy_without_row_stack():
    """NumPy 2.5 has no row_stack, which numba-cuda 0.30 wants when it compiles."""
    got = run_python("""
        import json
        import numpy as np
        if hasattr(np, "row_stack"):
            del np.row_stack
        from test_toolchain import ScaleConfig, build_scale, request_of
        from numbaflash import toolchain
        print(json.dumps([np.row_stack is np.vstack, toolchain.compile_ptx(request_of(build_scale, ScaleConfig())).entry]))
    """)
    assert got[0] is True and got[1].startswith("test_toolchain_build_scale_")


def test_simulator_is_refused_with_a_clear_error():
    got = run_python(
        """
        import json
        from test_toolchain import ScaleConfig, build_scale, request_of
        from numbaflash import toolchain
        try:
            toolchain.compile_ptx(request_of(build_scale, ScaleConfig()))
        except toolchain.CompileError as error:
            print(json.dumps(str(error)))
        """,
        NUMBA_ENABLE_CUDASIM="1",
    )
    assert "the CUDA simulator (NUMBA_ENABLE_CUDASIM=1) has no compiler" in got


# ---- disk cache


def test_key_depends_on_everything():
    base = request_of(build_scale, ScaleConfig())
    others = [
        request_of(build_scale, ScaleConfig(3)),
        request_of(build_scale, ScaleConfig(), (9, 0)),
        request_of(build_division, ScaleConfig()),
        KernelRequest("numbaflash.kernels.nothing:build_scale", ScaleConfig(), HOPPER),
    ]
    keys = [disk.key(request) for request in (base, *others)]
    assert len(set(keys)) == len(keys)
    assert disk.key(request_of(build_scale, ScaleConfig())) == keys[0]


def test_key_depends_on_sources_and_compilers(monkeypatch, tmp_path):
    request = request_of(build_scale, ScaleConfig())
    keys = {disk.key(request)}
    monkeypatch.setattr(disk, "fingerprint", disk.fingerprint.__wrapped__)
    assert disk.key(request) in keys
    with monkeypatch.context() as patch:
        patch.setattr(disk, "_sources", "edited")
        keys.add(disk.key(request))
    with monkeypatch.context() as patch:
        patch.setattr(disk.importlib.metadata, "version", lambda name: "0.0")
        keys.add(disk.key(request))
    module = tmp_path / "outside_kernel.py"
    monkeypatch.syspath_prepend(str(tmp_path))
    for text in ("x = 1\n", "x = 2\n"):
        module.write_text(text)
        disk._outside_source.cache_clear()
        keys.add(disk.key(KernelRequest("outside_kernel:build", None, HOPPER)))
    assert len(keys) == 5


def test_kernel_of_no_file_is_not_kept_on_disk(monkeypatch, cache_folder):
    module = types.ModuleType("a_notebook")
    module.build = build_scale
    monkeypatch.setitem(sys.modules, "a_notebook", module)
    request = KernelRequest("a_notebook:build", ScaleConfig(), HOPPER)
    assert disk.key(request) is None and not compiler.is_cached(request)
    assert toolchain.compile_ptx(request).entry.startswith("a_notebook_")
    assert compiler.is_cached(request) and disk.entries() == []


def test_source_digest_follows_the_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(disk, "_sources_digest", SOURCES_DIGEST)
    for folder in ("kernels", "ptx", "toolchain"):
        (tmp_path / folder).mkdir()
    (tmp_path / "toolchain" / "cache.py").write_text("a = 1\n")
    monkeypatch.setattr(disk, "__file__", str(tmp_path / "toolchain" / "cache.py"))
    seen = {disk._sources_digest()}
    (tmp_path / "kernels" / "deep").mkdir()
    (tmp_path / "kernels" / "deep" / "forward.py").write_text("a = 1\n")
    seen.add(disk._sources_digest())
    (tmp_path / "kernels" / "deep" / "forward.py").write_text("a = 2\n")
    seen.add(disk._sources_digest())
    (tmp_path / "kernels" / "deep" / "notes.txt").write_text("no source")
    seen.add(disk._sources_digest())
    assert len(seen) == 3


def test_folder_is_chosen_by_the_environment(monkeypatch, tmp_path):
    assert disk.directory() == tmp_path / "cache"
    monkeypatch.delenv("NUMBAFLASH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk.directory() == tmp_path / "xdg" / "numbaflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert disk.directory() == tmp_path / "home" / ".cache" / "numbaflash"


def trace_lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_second_process_builds_nothing_and_imports_no_compiler(tmp_path):
    trace = tmp_path / "trace"
    config = ScaleConfig(5, str(trace))
    ptx = toolchain.compile_ptx(request_of(build_scale, config))
    assert trace_lines(trace) == 1
    got = run_python(f"""
        import json, sys, time
        import numbaflash.toolchain as toolchain
        toolchain.cache._sources = {disk._sources!r}
        from dataclasses import dataclass
        @dataclass(frozen=True)
        class ScaleConfig:
            factor: int
            trace: str
        start = time.perf_counter()
        ptx = toolchain.compile_ptx(toolchain.KernelRequest("test_toolchain:build_scale", ScaleConfig(5, {str(trace)!r}), (9, 0, "a")))
        seconds = time.perf_counter() - start
        print(json.dumps([ptx.text, ptx.entry, seconds, sorted(name for name in sys.modules if name.startswith(("numba.", "llvmlite")))]))
    """)
    assert got[:2] == [ptx.text, ptx.entry]
    assert trace_lines(trace) == 1
    assert got[3] == [], "a cache hit imported Numba"
    assert got[2] < 0.15


def test_threads_build_once(tmp_path):
    trace = tmp_path / "trace"
    request = request_of(build_scale, ScaleConfig(6, str(trace)))
    results, gate = [], threading.Barrier(8)

    def work():
        gate.wait()
        results.append(toolchain.compile_ptx(request))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(ptx is results[0] for ptx in results)
    assert trace_lines(trace) == 1


def test_processes_build_once(tmp_path, cache_folder):
    trace = tmp_path / "trace"
    code = f"""
        import time
        from test_toolchain import ScaleConfig, build_scale, request_of
        from numbaflash import toolchain
        toolchain.cache._sources = "of both"
        toolchain.cache._sources_digest = lambda: "of both"
        toolchain.compile_ptx(request_of(build_scale, ScaleConfig(7, {str(trace)!r})))
    """
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    running = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, "PYTHONPATH": paths}) for _ in range(2)]
    assert [process.wait(timeout=300) for process in running] == [0, 0]
    assert trace_lines(trace) == 1
    assert [path.suffix for path in cache_folder.iterdir()] == [".ptx"], "locks and temporary files are gone"


def damage_truncate(data):
    return data[: len(data) // 2]


def damage_flip(data):
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def damage_empty(data):
    return b""


def damage_other(data):
    return b"something else\n" + data


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, damage_empty, damage_other])
def test_damaged_entry_is_rebuilt(damage, tmp_path, cache_folder, caplog):
    trace = tmp_path / "trace"
    request = request_of(build_scale, ScaleConfig(8, str(trace)))
    text = toolchain.compile_ptx(request).text
    (path,) = cache_folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    compiler.forget()
    assert disk.entries() == [] and disk.size() == len(damage(whole))
    assert not compiler.is_cached(request)
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING, "numbaflash"):
        again = toolchain.compile_ptx(request)
    assert again.text == text, "the same text each time, so that the driver knows it again"
    assert trace_lines(trace) == 2
    assert "is damaged and will be rebuilt" in caplog.text
    assert len(disk.entries()) == 1


def test_folder_that_cannot_be_made(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check_memory_only(caplog)


@pytest.fixture
def numba_loaded():
    """Numba is imported: what a test breaks next does not break that import, and with it every later test of the process."""
    importlib.import_module("numba.cuda")


@pytest.mark.usefixtures("numba_loaded")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_disk_full_or_read_only(number, monkeypatch, cache_folder, caplog):
    def refuse(*arguments, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(disk.os, "open", refuse)
    check_memory_only(caplog)
    assert list(cache_folder.iterdir()) == []


@pytest.mark.usefixtures("numba_loaded")
def test_disk_full_while_writing(monkeypatch, cache_folder, caplog):
    def refuse(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "replace", refuse)
    check_memory_only(caplog)
    assert list(cache_folder.iterdir()) == [], "the temporary file is removed"


def check_memory_only(caplog):
    with caplog.at_level(logging.WARNING, "numbaflash"):
        first = [toolchain.compile_ptx(request_of(build_scale, ScaleConfig(factor))) for factor in (2, 3)]
    assert [toolchain.compile_ptx(request_of(build_scale, ScaleConfig(factor))) for factor in (2, 3)] == first
    assert caplog.text.count("cannot write to the kernel cache") == 1, "said once"
    assert "set NUMBAFLASH_CACHE_DIR to a writable folder" in caplog.text
    assert disk.entries() == [] and disk.size() == 0 and disk.clear() == 0


def test_nothing_is_stored_after_a_source_was_edited(monkeypatch, cache_folder):
    monkeypatch.setattr(disk, "_sources_digest", lambda: "edited")
    toolchain.compile_ptx(request_of(build_scale, ScaleConfig()))
    assert disk.entries() == []


def test_entries_size_and_clear(cache_folder):
    assert disk.entries() == [] and disk.size() == 0 and disk.clear() == 0
    for age, name in ((30, "old"), (20, "middle"), (10, "new")):
        disk.store(name * 10, "text " + name, {"entry": "k", "build": "m:" + name, "config": "c", "arch": "sm_90a"})
        path = cache_folder / (name * 10 + ".ptx")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    found = disk.entries()
    assert [entry.build for entry in found] == ["m:new", "m:middle", "m:old"]
    assert found[0].config == "c" and found[0].arch == "sm_90a" and found[0].key == "new" * 10
    assert disk.size() == sum(entry.bytes for entry in found) > 0
    assert disk.load("old" * 10)[1] == "text old"
    assert [entry.build for entry in disk.entries()][0] == "m:old", "a hit counts as use"
    (cache_folder / ".left.tmp").write_text("of a killed process")
    os.utime(cache_folder / ".left.tmp", (0, 0))
    (cache_folder / "mine.txt").write_text("not ours")
    assert disk.clear() == 3
    assert [path.name for path in cache_folder.iterdir()] == ["mine.txt"]


def test_size_is_bounded(monkeypatch, cache_folder):
    monkeypatch.setenv("NUMBAFLASH_CACHE_MB", "0.005")
    for i in range(10):
        disk.store(f"{i}" * 8, "x" * 1000, {"entry": "k", "build": f"m:{i}", "config": "c", "arch": "sm_90a"})
        path = cache_folder / (f"{i}" * 8 + ".ptx")
        os.utime(path, (1e9 + i,) * 2)
    assert [entry.build for entry in disk.entries()] == ["m:9", "m:8", "m:7", "m:6"]
    disk.store("big", "x" * 10000, {"entry": "k", "build": "m:big", "config": "c", "arch": "sm_90a"})
    assert [entry.build for entry in disk.entries()] == ["m:big"], "the newest stays, whatever its size"
    monkeypatch.setenv("NUMBAFLASH_CACHE_MB", "much")
    with pytest.raises(ValueError, match="NUMBAFLASH_CACHE_MB must be a number of megabytes; got 'much'"):
        disk.limit_bytes()


def test_lock_survives_removal_by_its_holder(cache_folder):
    order, inside = [], threading.Event()

    def second():
        inside.wait()
        with disk.lock("key"):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with disk.lock("key"):
        inside.set()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert list(cache_folder.iterdir()) == []


def test_log_level_names(monkeypatch):
    monkeypatch.setattr(logs.logger, "handlers", list(logs.logger.handlers))
    monkeypatch.setattr(logs.logger, "propagate", True)
    level = logs.logger.level
    try:
        for value, want in (("1", logging.DEBUG), ("info", logging.INFO), ("WARNING", logging.WARNING), ("15", 15)):
            logs.configure(value)
            assert logs.logger.level == want
        logs.logger.setLevel(level)
        for value in ("", "0", " "):
            logs.configure(value)
            assert logs.logger.level == level
        with pytest.raises(ValueError, match="NUMBAFLASH_LOG must be 1 or a logging level .* got 'LOUD'"):
            logs.configure("loud")
        assert sum(getattr(handler, "numbaflash", False) for handler in logs.logger.handlers) == 1
    finally:
        logs.logger.setLevel(level)


def test_log_tells_builds_and_hits():
    code = """
        from test_toolchain import ScaleConfig, build_scale, request_of
        from numbaflash import toolchain
        from numbaflash.toolchain import compile
        for _ in range(2):
            toolchain.compile_ptx(request_of(build_scale, ScaleConfig(4)))
            compile.forget()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "NUMBAFLASH_LOG": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    name = r"test_toolchain:build_scale ScaleConfig\(factor=4, trace=''\) for sm_90a"
    assert re.search(rf"DEBUG cache miss: {name}\n.* INFO built {name} in [\d.]+ ms\n.* DEBUG cache hit: {name}\n", done.stderr), done.stderr


# ---- descriptions of parameters


def good_map(**changes):
    options = {"operand": "q", "dtype": "bfloat16", "shape": (128, 1000, 16, 2), "strides": (4096, 256, 4096000), "box": (64, 128, 1, 1)}
    return TensorMap(**{**options, **changes})


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"operand": "z"}, ValueError, "operand must be one of q, k, v, out, lse, mask"),
        ({"dtype": "complex64"}, TypeError, "tensor map of q: dtype must be one of"),
        ({"shape": (1,) * 6, "strides": (16,) * 5, "box": (1,) * 6}, ValueError, "shape must have 1 to 5 axes"),
        ({"shape": (), "strides": (), "box": ()}, ValueError, "shape must have 1 to 5 axes"),
        ({"strides": (4096, 256)}, ValueError, "4 axes need 3 strides and 4 box sizes"),
        ({"box": (64, 128)}, ValueError, "4 axes need 3 strides and 4 box sizes"),
        ({"shape": (128, 0, 16, 2)}, ValueError, "shape must be from 1 to"),
        ({"shape": (128, 2**32 + 1, 16, 2)}, ValueError, "shape must be from 1 to"),
        ({"strides": (4096, 8, 4096000)}, ValueError, "strides must be multiples of 16 bytes"),
        ({"strides": (4096, -256, 4096000)}, ValueError, "strides must be multiples of 16 bytes"),
        ({"strides": (4096, 256, 2**40)}, ValueError, "strides must be multiples of 16 bytes"),
        ({"box": (64, 257, 1, 1)}, ValueError, "box must be from 1 to 256"),
        ({"box": (64, 0, 1, 1)}, ValueError, "box must be from 1 to 256"),
        ({"box": (128, 64, 1, 1)}, ValueError, "at most the swizzle of 128; got 128 bfloat16 = 256 bytes"),
        ({"box": (64, 64, 1, 1), "swizzle": 64}, ValueError, "at most the swizzle of 64; got 64 bfloat16 = 128 bytes"),
        ({"box": (4, 64, 1, 1)}, ValueError, "must be a multiple of 16 bytes"),
        ({"swizzle": 48}, ValueError, "swizzle must be 0, 32, 64 or 128; got 48"),
        ({"promotion": 100}, ValueError, "promotion must be 0, 64, 128 or 256; got 100"),
    ],
)
def test_tensor_map_rules(changes, error, words):
    good_map()
    with pytest.raises(error, match=re.escape(words)):
        good_map(**changes)


def test_tensor_map_at_its_limits():
    good_map(shape=(2**32,) * 5, strides=(0, 16, 2**40 - 16, 32), box=(64, 256, 256, 1, 1))
    good_map(shape=(128,), strides=(), box=(128,), swizzle=0)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda: Pointer("x"), ValueError, "operand must be one of"),
        (lambda: Array("x", "float32", (1,), (4,)), ValueError, "operand must be one of"),
        (lambda: Array("q", "bool", (1,), (4,)), TypeError, "array q: dtype must be one of"),
        (lambda: Array("q", "float32", (1, 2), (4,)), ValueError, "array q: shape and strides must have the same length"),
        (lambda: Scalar("int8", 1), TypeError, "scalar kind must be one of"),
        (lambda: Scalar("int32", 2**31), ValueError, "scalar value must fit int32; got 2147483648"),
        (lambda: Scalar("uint32", -1), ValueError, "scalar value must fit uint32; got -1"),
        (lambda: Scalar("int64", 1.5), ValueError, "scalar value must fit int64; got 1.5"),
        (lambda: Scalar("float32", 1e300), ValueError, "scalar value must fit float32"),
    ],
)
def test_bad_parameters(make, error, words):
    with pytest.raises(error, match=re.escape(words)):
        make()


# ---- a driver of Python callbacks


INVALID_CONTEXT = 201


class FakeCuda:
    """One device of compute capability 9.0; remembers what it was asked."""

    CONTEXT = 0xC0DE0000

    def __init__(self):
        self.current = threading.local()
        self.fail = {}
        self.modules, self.attributes, self.launches, self.maps, self.capture_modes = [], [], [], {}, []
        self.calls = []  # names
        self.sizes = []  # bytes of each kernel parameter
        self.kept = []
        self.version = 13000

    def driver(self):
        return drv.Driver(self._find)

    def _find(self, name, keeps_gil):
        method = getattr(self, name)  # AttributeError: this driver has no such function
        counts = {"cuLaunchKernelEx": 4, "cuCtxGetCurrent": 1}
        arguments = drv._SIGNATURES.get(name) or (ctypes.c_void_p,) * counts[name]
        plain = [kind if kind in (ctypes.c_int, ctypes.c_uint, ctypes.c_uint32, ctypes.c_uint64) else ctypes.c_void_p for kind in arguments]

        def call(*values):
            self.calls.append(name)
            return self.fail.get(name) or method(*(value or 0 for value in values)) or 0

        callback = (ctypes.PYFUNCTYPE if keeps_gil else ctypes.CFUNCTYPE)(ctypes.c_int, *plain)(call)
        self.kept.append(callback)
        return callback

    def put(self, address, kind, value):
        kind.from_address(address).value = value

    def stack(self):
        return self.current.__dict__.setdefault("stack", [])

    def cuInit(self, flags):
        return 0

    def cuDriverGetVersion(self, out):
        self.put(out, ctypes.c_int, self.version)

    def cuGetErrorName(self, code, out):
        return self._text(code, out, {1: b"CUDA_ERROR_INVALID_VALUE", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS", 222: b"CUDA_ERROR_UNSUPPORTED_PTX_VERSION"})

    def cuGetErrorString(self, code, out):
        return self._text(code, out, {1: b"invalid argument", 700: b"an illegal memory access was encountered", 222: b"unsupported toolchain"})

    def _text(self, code, out, texts):
        if code not in texts:
            return 1
        text = ctypes.create_string_buffer(texts[code])
        self.kept.append(text)
        self.put(out, ctypes.c_uint64, ctypes.addressof(text))
        return 0

    def cuDeviceGetCount(self, out):
        self.put(out, ctypes.c_int, 1)

    def cuDeviceGet(self, out, index):
        self.put(out, ctypes.c_int, index)

    def cuDeviceGetName(self, out, size, index):
        ctypes.memmove(out, b"Fake H200\0", 10)

    def cuDeviceGetAttribute(self, out, attribute, index):
        self.put(out, ctypes.c_int, {16: 132, 75: 9, 76: 0, 97: 232448}[attribute])

    def cuDevicePrimaryCtxRetain(self, out, index):
        self.put(out, ctypes.c_uint64, self.CONTEXT)

    def cuCtxGetCurrent(self, out):
        self.put(out, ctypes.c_uint64, self.stack()[-1] if self.stack() else 0)

    def cuCtxPushCurrent_v2(self, context):
        self.stack().append(context)

    def cuCtxPopCurrent_v2(self, out):
        self.put(out, ctypes.c_uint64, self.stack().pop())

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.capture_modes.append(ctypes.c_int.from_address(mode).value)
        self.put(mode, ctypes.c_int, 0 if self.capture_modes[-1] else 2)

    def cuModuleLoadDataEx(self, out, text, count, options, values):
        assert self.stack()[-1] == self.CONTEXT
        options, values = (ctypes.c_int * count).from_address(options), (ctypes.c_uint64 * count).from_address(values)
        if self.fail.get("jit"):
            ctypes.memmove(values[0], b"ptxas fatal: too new\0", 21)
            assert list(options) == [5, 6] and values[1] >= 21
            return self.fail["jit"]
        self.modules.append(ctypes.string_at(text).decode())
        self.put(out, ctypes.c_uint64, 0x1000 + len(self.modules))

    def cuModuleGetFunction(self, out, module, name):
        self.put(out, ctypes.c_uint64, 0xF000 + module)

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((function, attribute, value))

    def cuFuncGetAttribute(self, out, attribute, function):
        self.put(out, ctypes.c_int, 10 * attribute)

    def cuTensorMapEncodeTiled(self, at, dtype, rank, address, shape, strides, box, steps, interleave, swizzle, promotion, fill):
        assert at % 64 == 0
        if self.stack()[-1:] != [self.CONTEXT]:
            return INVALID_CONTEXT

        def read(kind, count, where):
            return tuple((kind * count).from_address(where))

        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        self.maps[at] = (dtype, read(u64, rank, shape), read(u64, rank - 1, strides), read(u32, rank, box), read(u32, rank, steps))
        self.maps[at] += ((interleave, swizzle, promotion, fill),)
        ctypes.memset(at, 0xEE, 128)
        self.put(at, u64, address)
        return 0

    def cuTensorMapReplaceAddress(self, at, address):
        if self.stack()[-1:] != [self.CONTEXT]:
            return INVALID_CONTEXT
        self.replaced = getattr(self, "replaced", 0) + 1
        self.put(at, ctypes.c_uint64, address)

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        assert self.stack()[-1] == self.CONTEXT
        pointers = (ctypes.c_uint64 * len(self.sizes)).from_address(parameters)
        values = [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True)]
        self.launches.append((ctypes.string_at(config, 56), function, values, extra))


@pytest.fixture
def fake(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr(drv, "_driver", cuda.driver())
    for name in ("_functions", "_loading", "_contexts", "_gpus"):
        monkeypatch.setattr(drv, name, {})
    return cuda


ENTRY = """.version 8.3
.target sm_90a
.visible .entry k(
{parameters}
)
.maxntid 16, 1, 1
{{
	ret;
}}
"""


def entry_of(kinds, **changes):
    lines = []
    for i, kind in enumerate(kinds):
        lines.append(f"\t.param .align 64 .b8 k_param_{i}[128]" if kind == "map" else f"\t.param .{kind} k_param_{i}")
    text = ENTRY.format(parameters=",\n".join(lines))
    for old, new in changes.items():
        text = text.replace(old, new)
    return Ptx(text, "k")


EVERYTHING_KINDS = ["map", "u64"] + ["u64"] * 9 + ["u64"] * 7 + ["u64", "u32", "u32", "u64", "u64", "f32", "f64"]


def prepare_everything(fake, *, grid=(3, 2, 1), shared_bytes=1024, ptx=None, parameters=None, threads=16, config=None, operands=dispatch.OPERANDS):
    request = request_of(build_everything, config or EverythingConfig())
    ptx = ptx or entry_of(EVERYTHING_KINDS)
    compiler.adopt(request, ptx)
    fake.sizes = compiler.parameter_sizes(ptx)
    parameters = everything_parameters() if parameters is None else parameters
    return toolchain.prepare(request, parameters, grid=grid, threads=threads, shared_bytes=shared_bytes, device=0, operands=operands)


ADDRESSES = {"q": 0x7F0000000100, "k": 0x7F0000000201, "v": 0x7F0000000302, "out": 0x7F0000000404, "lse": 0}


def expected_values(addresses):
    words = [struct.pack("<Q", addresses["q"]) + b"\xee" * 120, struct.pack("<Q", addresses["k"])]
    words += [struct.pack("<q", n) for n in (0, 0, 16, 4)] + [struct.pack("<Q", addresses["v"])] + [struct.pack("<q", n) for n in (4, 4, *V_STRIDES)]
    words += [struct.pack("<q", n) for n in (0, 0, 16, 4)] + [struct.pack("<Q", addresses["out"])] + [struct.pack("<q", n) for n in (16, 4)]
    words.append(struct.pack("<Q", addresses["lse"]))
    return words + [struct.pack("<" + code, value) for code, value in zip("iIqQfd", SCALARS.values(), strict=True)]


def test_launch_byte_for_byte(fake):
    launch = prepare_everything(fake)
    launch(tuple(ADDRESSES.values()), 0x55AA)
    ((config, function, values, extra),) = fake.launches
    assert config == struct.pack("<8I3Q", 3, 2, 1, 16, 1, 1, 1024, 0, 0x55AA, 0, 0)
    assert (function, extra) == (0xF000 + 0x1001, 0)
    assert values == expected_values(ADDRESSES)
    assert fake.modules == [entry_of(EVERYTHING_KINDS).text]
    assert fake.attributes == [(0xF000 + 0x1001, 8, 1024)]
    (encoded,) = fake.maps.values()
    assert encoded == (7, (16, 1), (64,), (16, 1), (1, 1), (0, 0, 3, 0))
    assert fake.capture_modes == [2, 0] * 2, "loading and setting attributes are allowed during a capture, and the mode is put back"
    assert fake.stack() == []


@pytest.mark.parametrize("more", [0, 3, 4, 11, 12, 40])
def test_any_number_of_operands(fake, more):
    """Their addresses do not run into the tensor maps and parameters that come after them."""
    launch = prepare_everything(fake, operands=(*dispatch.OPERANDS, *(f"more{n}" for n in range(more))))
    for first in (0x11, 0x22):
        launch((*ADDRESSES.values(), *range(first, first + more)), 0)
        assert fake.launches[-1][2] == expected_values(ADDRESSES)
    assert launch._free[0].words[8 + len(dispatch.OPERANDS) : 8 + len(dispatch.OPERANDS) + more].tolist() == list(range(first, first + more))


def test_tensor_maps_follow_addresses_only_when_they_change(fake):
    launch = prepare_everything(fake)
    moved = {**ADDRESSES, "q": ADDRESSES["q"] + 0x1000, "lse": 0x99}
    for addresses in (ADDRESSES, ADDRESSES, moved, moved, {**moved, "k": 5}, ADDRESSES):
        launch(tuple(addresses.values()), 0)
        assert fake.launches[-1][2] == expected_values(addresses)
    assert len(fake.maps) == 1 and fake.replaced == 2


def test_tensor_map_needs_an_aligned_address(fake):
    launch = prepare_everything(fake)
    launch(tuple(ADDRESSES.values()), 0)
    with pytest.raises(ValueError, match=r"q must start at a multiple of 16 bytes; got address 0x7f0000000108 \(kernel k: .*build_everything"):
        launch(tuple({**ADDRESSES, "q": ADDRESSES["q"] + 8}.values()), 0)
    launch(tuple(ADDRESSES.values()), 0)
    assert len(fake.launches) == 2 and fake.launches[-1][2] == expected_values(ADDRESSES)


def test_kernel_is_loaded_once(fake):
    first, second = prepare_everything(fake), prepare_everything(fake, grid=(7,), shared_bytes=0)
    assert first.function is second.function and len(fake.modules) == 1
    second(tuple(ADDRESSES.values()), 0)
    assert fake.launches[-1][0] == struct.pack("<8I3Q", 7, 1, 1, 16, 1, 1, 0, 0, 0, 0, 0)
    prepare_everything(fake, shared_bytes=2048)
    prepare_everything(fake, shared_bytes=512)
    assert [value for _, _, value in fake.attributes] == [1024, 2048], "the limit only grows"


def test_threads_load_once_and_launch_with_their_own_arguments(fake):
    errors, gate = [], threading.Barrier(6)

    def work(number):
        try:
            gate.wait()
            launch = prepare_everything(fake)
            for step in range(60):
                base = (number << 32) + (step % 7 << 16)
                launch((base, base + 1, base + 2, base + 3, base + 4), number)
        except Exception as error:
            errors.append(error)

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert errors == []
    assert len(fake.modules) == 1 and len(fake.launches) == 360
    for config, _, values, _ in fake.launches:
        base = struct.unpack("<Q", values[0][:8])[0]
        assert values == expected_values({name: base + i for i, name in enumerate(dispatch.OPERANDS)})
        assert struct.unpack("<Q", config[32:40])[0] == base >> 32


def test_one_launch_shared_by_threads(fake):
    launch, gate, errors = prepare_everything(fake), threading.Barrier(6), []

    def work(number):
        try:
            gate.wait()
            for step in range(60):
                base = (number << 32) + (step << 16)
                launch((base, base + 1, base + 2, base + 3, base + 4), number)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(fake.launches) == 360
    for config, _, values, _ in fake.launches:
        base = struct.unpack("<Q", values[0][:8])[0]
        assert values == expected_values({name: base + i for i, name in enumerate(dispatch.OPERANDS)})
        assert struct.unpack("<Q", config[32:40])[0] == base >> 32
    assert len(launch._free) <= 6


@pytest.mark.parametrize("current", [None, 0xBAD0, FakeCuda.CONTEXT])
@pytest.mark.parametrize("failing", [None, "cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress"])
def test_current_context_is_left_alone(fake, current, failing):
    """Whatever is current, tensor maps are encoded and the kernel is launched in the kernel's context."""
    launch = prepare_everything(fake)
    before = [] if current is None else [current]
    fake.stack().extend(before)
    if failing == "cuTensorMapReplaceAddress":
        launch(tuple({**ADDRESSES, "q": 0x100}.values()), 0)
    if failing:
        fake.fail[failing] = 700
        with pytest.raises(CudaError):
            launch(tuple(ADDRESSES.values()), 0)
        assert fake.stack() == before
        fake.fail.clear()
    launch(tuple(ADDRESSES.values()), 0)
    launch(tuple(ADDRESSES.values()), 0)
    assert fake.stack() == before
    assert [values for _, _, values, _ in fake.launches[-2:]] == [expected_values(ADDRESSES)] * 2
    assert len(fake.launches) == (3 if failing == "cuTensorMapReplaceAddress" else 2)


def test_calls_of_the_driver_in_a_launch(fake):
    """One call beside the launch where the kernel's context is current, and a push and a pop where it is not."""
    launch = prepare_everything(fake)
    fake.stack().append(fake.CONTEXT)
    launch(tuple(ADDRESSES.values()), 0)
    fake.calls.clear()
    launch(tuple(ADDRESSES.values()), 0)
    assert fake.calls == ["cuCtxGetCurrent", "cuLaunchKernelEx"]
    fake.calls.clear()
    launch(tuple({**ADDRESSES, "q": 0x100}.values()), 0)
    assert fake.calls == ["cuCtxGetCurrent", "cuTensorMapReplaceAddress", "cuLaunchKernelEx"]
    fake.stack().clear()
    fake.calls.clear()
    launch(tuple(ADDRESSES.values()), 0)
    assert fake.calls == ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuTensorMapReplaceAddress", "cuLaunchKernelEx", "cuCtxPopCurrent_v2"]


def test_launch_error_says_what_happened_to_which_kernel(fake):
    launch = prepare_everything(fake)
    fake.fail["cuLaunchKernelEx"] = 700
    with pytest.raises(CudaError) as caught:
        launch(tuple(ADDRESSES.values()), 0)
    for words in (
        "cuLaunchKernel failed: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was encountered)",
        "kernel k",
        "build_everything EverythingConfig(tensor_map=True, cluster=None) for sm_90a",
        "device 0, grid (3, 2, 1), 16 threads, 1024 bytes of shared memory",
        "Hint: a kernel accessed memory out of bounds",
    ):
        assert words in str(caught.value)
    assert caught.value.code == 700


@pytest.mark.parametrize("call", ["cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuTensorMapEncodeTiled"])
def test_every_return_code_of_a_launch_is_checked(fake, call):
    launch = prepare_everything(fake)
    fake.fail[call] = 1
    with pytest.raises(CudaError, match=rf"{call.removesuffix('_v2')} failed: CUDA_ERROR_INVALID_VALUE \(invalid argument\)"):
        launch(tuple(ADDRESSES.values()), 0)
    fake.fail.clear()
    launch(tuple(ADDRESSES.values()), 0)
    fake.fail["cuTensorMapReplaceAddress"] = 1
    with pytest.raises(CudaError, match="cuTensorMapReplaceAddress failed"):
        launch(tuple({**ADDRESSES, "q": 0x100}.values()), 0)
    fake.fail.clear()
    launch(tuple(ADDRESSES.values()), 0)
    assert fake.launches[-1][2] == expected_values(ADDRESSES)


LOADING = ("cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2",
           "cuThreadExchangeStreamCaptureMode", "cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncSetAttribute")  # fmt: skip


@pytest.mark.parametrize("call", LOADING)
def test_every_return_code_of_loading_is_checked(fake, call):
    fake.fail[call] = 999
    with pytest.raises(CudaError, match="failed: unknown CUresult 999") as caught:
        prepare_everything(fake)
    assert caught.value.code == 999
    assert fake.stack() == []
    fake.fail.clear()
    prepare_everything(fake)(tuple(ADDRESSES.values()), 0)
    assert fake.launches[-1][2] == expected_values(ADDRESSES), "a failure is not remembered"


def test_driver_too_old_for_the_ptx(fake):
    fake.fail["jit"] = 222
    with pytest.raises(CudaError) as caught:
        prepare_everything(fake)
    for words in (
        "cuModuleLoadData failed: CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "driver supports CUDA 13.0",
        "ptxas fatal: too new",
        "install a newer",
    ):
        assert words in str(caught.value)


def test_driver_without_a_function():
    def find(name, keeps_gil):
        raise AttributeError(name)

    with pytest.raises(CudaError, match="the NVIDIA driver has no cuLaunchKernelEx: it is older than CUDA 12.0"):
        drv.Driver(find).cuLaunchKernelEx  # noqa: B018


def test_devices_are_described(fake):
    assert toolchain.device_count() == 1 and toolchain.unavailable_reason() is None and toolchain.driver_version() == "13.0"
    assert toolchain.device(0) == dispatch.Device("cuda", 0, (9, 0), 132, "Fake H200")
    with pytest.raises(ValueError, match="device must be from 0 to 0; got 3"):
        toolchain.device(3)
    prepare_everything(fake)
    assert toolchain.loaded_resources(request_of(build_everything, EverythingConfig())) == {
        "max_threads": 0, "shared_bytes": 10, "local_bytes": 30, "registers": 40, "ptx_version": 50, "binary_version": 60,
    }  # fmt: skip


@pytest.mark.parametrize("code", [100, 3, 999])
def test_no_usable_device_is_zero_devices(monkeypatch, code):
    cuda = FakeCuda()
    cuda.fail["cuInit"] = code
    monkeypatch.setattr(drv, "_driver", None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: cuda)
    monkeypatch.setattr(drv, "Driver", lambda find, made=drv.Driver: made(cuda._find))
    assert toolchain.device_count() == 0
    assert "cuInit failed" in toolchain.unavailable_reason()
    with pytest.raises(CudaError, match="cuInit failed"):
        toolchain.device(0)
    cuda.fail.clear()
    cuda.version = 11080
    assert toolchain.device_count() == 0
    assert "supports CUDA 11.8 only; CUDA 12.0 (driver 525) or newer is needed" in toolchain.unavailable_reason()


def test_no_driver_is_a_clear_error(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(drv, "_driver", None)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert toolchain.device_count() == 0
    for call in (toolchain.device, toolchain.driver_version):
        with pytest.raises(CudaError, match="no NVIDIA driver: .* cannot be loaded"):
            call()


def test_import_loads_no_driver_and_no_compiler():
    got = run_python("""
        import ctypes, json, sys
        loaded = []
        for kind in ("CDLL", "PyDLL"):
            class Spy(getattr(ctypes, kind)):
                def __init__(self, name, *rest, **options):
                    loaded.append(str(name))
                    super().__init__(name, *rest, **options)
            setattr(ctypes, kind, Spy)
        before = set(sys.modules)  # a .pth file of cuda-bindings 12 has imported "cuda"
        import numbaflash.toolchain
        names = [name for name in sys.modules if name.split(".")[0] in ("numba", "llvmlite", "cuda", "torch", "jax", "cupy") and name not in before]
        print(json.dumps([[name for name in loaded if "cuda" in name], names]))
    """)
    assert got == [[], []]


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"grid": (0, 1, 1)}, ValueError, "grid x must be from 1 to 2147483647; got (0, 1, 1)"),
        ({"grid": (2**31,)}, ValueError, "grid x must be from 1 to 2147483647"),
        ({"grid": (1, 65536)}, ValueError, "grid y must be from 1 to 65535"),
        ({"grid": (1, 1, 65536)}, ValueError, "grid z must be from 1 to 65535"),
        ({"grid": (1, 1, 1, 1)}, ValueError, "grid must have 1 to 3 axes"),
        ({"threads": 32}, ValueError, "threads must be the 16 that k was compiled for; got 32"),
        ({"shared_bytes": 232449}, ValueError, "shared_bytes must be from 0 to 232448, the device's limit; got 232449"),
        ({"parameters": [Pointer("q")]}, ValueError, "k takes parameters of [128, 8,"),
        ({"parameters": [*everything_parameters()[:-1], Scalar("float32", 1.0)]}, ValueError, "the launch describes [128, 8,"),
        ({"parameters": [5]}, TypeError, "a parameter must be a TensorMap, Pointer, Array or Scalar; got 5"),
    ],
)
def test_launch_is_checked_when_prepared(fake, options, error, words):
    with pytest.raises(error, match=re.escape(words)):
        prepare_everything(fake, **options)
    assert fake.launches == []


def test_largest_grid(fake):
    launch = prepare_everything(fake, grid=(2**31 - 1, 65535, 65535))
    launch(tuple(ADDRESSES.values()), 0)
    assert fake.launches[0][0][:12] == struct.pack("<3I", 2**31 - 1, 65535, 65535)


def test_clusters(fake):
    def clustered(x):
        ptx = entry_of(EVERYTHING_KINDS)
        return Ptx(compiler.set_cluster(ptx.text, "k", (x, 1, 1)), "k")

    config = EverythingConfig(cluster=(2, 1, 1))
    with pytest.raises(ValueError, match=re.escape("grid must be a multiple of the kernel's cluster (2, 1, 1); got (3, 2, 1)")):
        prepare_everything(fake, ptx=clustered(2), config=config)
    prepare_everything(fake, grid=(4, 2), config=config)(tuple(ADDRESSES.values()), 0)
    assert [attribute for _, attribute, _ in fake.attributes] == [8]
    prepare_everything(fake, grid=(32,), ptx=clustered(16), config=EverythingConfig(cluster=(16, 1, 1)))
    assert fake.attributes[-1][1:] == (14, 1), "more than 8 blocks a cluster need a permission"


@pytest.mark.parametrize(
    "arch, fits", [(HOPPER, True), ((9, 0), True), ((8, 0), True), ((8, 0, "a"), False), ((10, 0), False), ((10, 0, "a"), False)]
)
def test_architecture_must_fit_the_device(fake, arch, fits):
    request = request_of(build_scale, ScaleConfig(), arch)
    ptx = entry_of(["u64"])
    compiler.adopt(request, ptx)
    fake.sizes = [8]
    if fits:
        toolchain.prepare(request, [Pointer("q")], grid=(1,), threads=16)((0,) * 5, 0)
    else:
        with pytest.raises(ValueError, match=r"cannot run on device 0, Fake H200 \(compute capability 9.0\)"):
            toolchain.prepare(request, [Pointer("q")], grid=(1,), threads=16)


def test_forked_child_starts_afresh(fake):
    prepare_everything(fake)
    assert drv._functions and drv._contexts
    drv._after_fork()
    assert not drv._functions and not drv._contexts and drv._driver is None


# ---- warm-up


def test_build_all_in_processes(tmp_path, cache_folder):
    requests = [request_of(build_scale, ScaleConfig(factor)) for factor in (2, 3, 4)]
    toolchain.compile_ptx(requests[0])
    bad = [request_of(build_untypable, 1), KernelRequest("no_such_module:build", 2, HOPPER)]
    outcome = warming.build_all([*requests, *bad, requests[1]], workers=2)
    assert outcome.cached == requests[:1]
    assert set(outcome.built) == set(requests[1:])
    assert set(outcome.failures) == set(bad)
    assert "could not compile" in outcome.failures[bad[0]] and "No module named 'no_such_module'" in outcome.failures[bad[1]]
    assert len(disk.entries()) == 3
    assert all(request in compiler._ready for request in requests), "this process has them too"


def test_build_all_with_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBAFLASH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    requests = [request_of(build_scale, ScaleConfig(factor)) for factor in (2, 3)]
    assert set(warming.build_all(requests, workers=2).built) == set(requests)
    assert all(request in compiler._ready for request in requests)


def build_killed(config):
    os._exit(3)


def test_worker_that_dies_is_reported():
    requests = [request_of(build_killed, 1), request_of(build_scale, ScaleConfig(2)), request_of(build_scale, ScaleConfig(3))]
    outcome = warming.build_all(requests, workers=2)
    assert outcome.failures == {requests[0]: "the compiler process ended with return code 3"}
    assert set(outcome.built) == set(requests[1:])


def test_kernels_of_the_main_script_are_built_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        from dataclasses import dataclass
        from numbaflash.toolchain import KernelRequest, KernelSource
        from numbaflash.toolchain.warmup import build_all
        from test_toolchain import ScaleConfig, build_scale, request_of
        def build(config):
            return build_scale(config)
        print("script runs")
        mine = [KernelRequest("__main__:build", ScaleConfig(n), (9, 0, "a")) for n in (2, 3)]
        outcome = build_all([*mine, request_of(build_scale, ScaleConfig())], workers=2)
        print(len(outcome.built), outcome.failures)
    """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.stdout.splitlines() == ["script runs", "3 {}"], done.stderr


@pytest.mark.parametrize("workers", [0, -1, 1.5])
def test_bad_workers(workers):
    with pytest.raises(ValueError, match="workers must be a positive integer or None"):
        warming.build_all([], workers=workers)


class FakeFamily:
    """Every problem needs one kernel for its head dim and whether it is masked."""

    def __init__(self, build=build_scale):
        self.build = build

    def supports(self, problem, device):
        return ()

    def plan(self, problem, layouts, device):
        return dispatch.Plan("simt", problem, device, layouts)

    def requests(self, plan):
        factor = 2 * plan.problem.head_dim + (plan.problem.right is not None)
        return [request_of(self.build, ScaleConfig(factor) if self.build is build_scale else factor)]


@pytest.fixture
def family(monkeypatch):
    found = FakeFamily()
    monkeypatch.setattr(dispatch, "family", lambda name, direction="forward": found)
    return found


HOPPER_DEVICE = dispatch.Device("cuda", 0, (9, 0), 132, "somewhere")


def test_warmup_by_options(family, fake):
    report = warming.warmup(device=HOPPER_DEVICE, load=False, workers=1)
    assert report.plans == 2 * 2 * 2 * 3 * 2 and len(report.built) == 4 and report.loaded == 0
    again = warming.warmup(dtypes=("float16",), head_dims=(64, (64, 128)), windows=(None, (128, 0)), seqlens=((16, 512),), device=0)
    assert again.built == () and len(again.cached) == 2 and again.loaded == 2 and len(fake.modules) == 2
    assert str(again).startswith("0 kernels built, 2 in the cache, 2 loaded, in ")


def test_warmup_by_examples(family):
    problem = make_problem((1, 8, 2, 32), (1, 8, 2, 32), (1, 8, 2, 32), ("float16",) * 3, causal=True)
    plan = warming._plan(problem, HOPPER_DEVICE)
    assert plan.layouts.q.strides == (8 * 2 * 32 * 2, 2 * 32 * 2, 64, 2) and plan.layouts.lse.strides == (64, 32, 4)
    for examples in (problem, plan, [problem, plan]):
        report = warming.warmup(examples, device=HOPPER_DEVICE, load=False)
        assert len(report.built + report.cached) == 1


ARRAYS = {"mask": ((64, 96), "bool"), "bias": ((64, 96), "float32"), "alibi_slopes": ((4,), "float32"), "sinks": ((4,), "float32")}
ARRAYS |= {"seqlens_q": ((2,), "int32"), "seqlens_k": ((2,), "int64")}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "given, described",
    [
        ({"softcap": 9.0, "dropout": 0.25, "sinks": True, "seqlens_q": True}, {"sinks": ARRAYS["sinks"], "seqlens_q": ARRAYS["seqlens_q"]}),
        ({"mask": True, "bias": ((64, 96), "float32"), "seqlens_k": ((2,), "int64")}, {name: ARRAYS[name] for name in ("mask", "bias", "seqlens_k")}),
        ({"bias": ((96,), None), "alibi_slopes": True, "scale": 0.0}, {"bias": ((96,), "float16"), "alibi_slopes": ARRAYS["alibi_slopes"]}),
        ({"block_mask": True, "mask": None, "sinks": False}, {"block_mask": ((1, 1, layout.words(64, 96, 0)), "int32")}),
        ("packed", {"sinks": ARRAYS["sinks"], "cu_seqlens_q": ((3,), "int32"), "cu_seqlens_k": ((3,), "int32")}),
    ],
    ids=["numbers", "arrays", "broadcast", "blocks", "packed"],
)
def test_warmup_builds_what_a_call_asks_for(monkeypatch, given, described, direction):
    """The kernels are those of a call with contiguous arrays, through every family of the architecture."""
    from numbaflash import call
    from numbaflash.arrays import Facts

    warmed = []
    monkeypatch.setattr(warming, "warm_plans", lambda plans, **_: warmed.extend(plans))
    packed = given == "packed"
    lengths = {"totals": ((64, 96),), "max_seqlens": ((40, 50),)} if packed else {"seqlens": ((64, 96),)}
    needs = (*NEEDS, *(name for name in ("bias", "sinks") if name in described))
    lists = {"dtypes": ("float16",), "head_dims": ((64, 32),), "causal": (True,), "windows": ((30, 2),), "heads": ((4, 2),), "batch": 2} | lengths
    options = {"sinks": True} if packed else given
    for family in ("sm90", "simt"):
        with dispatch.use_family(family):
            warming.warmup(**lists, options=options, directions=(direction,), needs=needs, device=HOPPER_DEVICE, load=False)
            rows, keys = ((64,), (96,)) if packed else ((2, 64), (2, 96))
            shapes = (*rows, 4, 64), (*keys, 2, 64), (*keys, 2, 32)
            facts = {name: (shape, "float16") for name, shape in zip("qkv", shapes, strict=True)} | described
            facts = {name: Facts(256, shape, None, dtype, "cuda", 0) for name, (shape, dtype) in facts.items()}
            facts = {name: replace(each, strides=dispatch.contiguous_strides(each.shape, ITEMSIZE[each.dtype])) for name, each in facts.items()}
            numbers = {name: options[name] for name in ("softcap", "dropout", "scale") if name in options} | {"causal": True, "window": (30, 2)}
            numbers |= {"max_seqlen_q": 40, "max_seqlen_k": 50} if packed else {}
            make = make_packed_problem if packed else make_problem
            problem = make(*shapes, ("float16",) * 3, **numbers, **described)
            if direction == "forward":
                wanted = [call.plan_call(problem, facts, with_lse, HOPPER_DEVICE) for with_lse in (False, True)]
            else:
                wanted = [call.plan_backward_call(problem, facts, needs, False, HOPPER_DEVICE)]
        package = dispatch.family(family, direction)
        assert [plan.family for plan in warmed] == [family] * len(wanted)
        assert list(map(package.requests, warmed)) == list(map(package.requests, wanted))
        assert [(plan.config, plan.grid, plan.workspace_bytes) for plan in warmed] == [(p.config, p.grid, p.workspace_bytes) for p in wanted]
        warmed.clear()


@pytest.mark.parametrize("family", ["sm90", "simt"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"mask": True}, {"mask": True, "lengths": True}, {"packed": True, "sinks": True}], ids=str)
def test_what_is_requested_is_what_is_prepared(monkeypatch, family, direction, options):
    """All of it: lists of blocks, tickets and passes too."""
    prepared = []
    monkeypatch.setattr(toolchain, "prepare", lambda wanted, *rest, **more: prepared.append(wanted) or (lambda addresses, stream: None))
    described = {"mask": ((2, 4, 64, 96), "bool")} if "mask" in options else {}
    described |= {"sinks": ((4,), "float32")} if "sinks" in options else {}
    described |= {f"seqlens_{side}": ((2,), "int32") for side in "qk"} if "lengths" in options else {}
    described |= {f"cu_seqlens_{side}": ((3,), "int32") for side in "qk"} if "packed" in options else {}
    rows, keys = ((64,), (96,)) if "packed" in options else ((2, 64), (2, 96))
    make = make_packed_problem if "packed" in options else make_problem
    problem = make((*rows, 4, 64), (*keys, 2, 64), (*keys, 2, 64), ("float16",) * 3, causal=True, **described)
    with dispatch.use_family(family):
        plan = warming._plan(problem, HOPPER_DEVICE, direction)
    package = dispatch.family(family, direction)
    package.prepare(plan)
    assert sorted(map(str, prepared)) == sorted(map(str, package.requests(plan)))
    assert len(prepared) >= 1 + (bool(options) and family == "sm90")


def test_warmup_of_packed_sequences_alone_and_beside_others(monkeypatch):
    plans = []
    monkeypatch.setattr(warming, "warm_plans", lambda found, **_: plans.extend(found))
    lists = {"dtypes": ("float16",), "head_dims": (64,), "causal": (True,), "device": HOPPER_DEVICE, "load": False, "return_lse": (False,)}
    warming.warmup(**lists, totals=(4096, (8, 16)), max_seqlens=(None, 512), batch=4)
    assert [(p.problem.total_q, p.problem.total_k, p.problem.seqlen_q, p.problem.batch) for p in plans] == [
        (4096, 4096, 1024, 4),
        (4096, 4096, 512, 4),
        (8, 16, 2, 4),
        (8, 16, 8, 4),
    ]
    plans.clear()
    warming.warmup(**lists, totals=(4096,), seqlens=(512,), options=({}, {"softcap": 5.0}))
    assert [(p.problem.packed, p.problem.softcap) for p in plans] == [(False, None), (True, None), (False, 5.0), (True, 5.0)]
    plans.clear()
    warming.warmup(**lists, seqlens=((16, 0), (0, 16)), directions=("forward", "backward"))
    assert [(p.direction, p.problem.seqlen_q) for p in plans] == [("forward", 16)], "what launches nothing is left out"


def test_warmup_reports_kernel_and_plan(monkeypatch, family):
    family.build = build_untypable
    with pytest.raises(warming.WarmupError) as caught:
        warming.warmup(dtypes=("float16",), head_dims=(64,), causal=(False,), return_lse=(True,), device=HOPPER_DEVICE, load=False)
    for words in ("1 kernels failed to warm up", "build_untypable 128 for sm_90a; plan of simt on somewhere for Problem(", "nothing"):
        assert words in str(caught.value)
    assert len(caught.value.report.failed) == 1


def test_warmup_of_a_family_without_requests(monkeypatch):
    prepared = []

    class Simple(FakeFamily):
        requests = property(lambda self: (_ for _ in ()).throw(AttributeError("requests")))

        def prepare(self, plan):
            prepared.append(plan)

    monkeypatch.setattr(dispatch, "family", lambda name, direction="forward": Simple())
    options = {"dtypes": ("float32",), "head_dims": (64,), "causal": (False,), "seqlens": (64,), "return_lse": (True,)}
    assert len(warming.warmup(**options, device="cpu", load=False).built) == 1 and len(prepared) == 1
    with pytest.raises(warming.WarmupError, match="cannot build a kernel without loading it"):
        warming.warmup(**options, device=HOPPER_DEVICE, load=False)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"device": "gpu"}, "device must be an index"),
        ({"device": True}, "device must be an index"),
        ({"dtypes": "float16"}, "dtypes must be a sequence of values; got 'float16'"),
        ({"head_dims": 64}, "head_dims must be a sequence of values; got 64"),
        ({"head_dims": ("64",)}, "head_dims must hold integers or pairs"),
        ({"heads": ((1, 2, 3),)}, "heads must hold integers or pairs"),
        ({"examples": ["x"]}, "examples must be Problem or Plan objects"),
        ({"totals": 64}, "totals must be a sequence of values; got 64"),
        ({"totals": (64,), "max_seqlens": ("x",)}, "max_seqlens must hold integers or pairs"),
        ({"options": "mask"}, "options must be a sequence of values; got 'mask'"),
        ({"options": ("mask",)}, "options must be a dict of options, or a sequence of such; got 'mask'"),
        ({"options": {"window": (1, 1)}}, "options must be of scale, softcap, dropout, mask, block_mask, bias,"),
        ({"options": {"mask": (64, 64)}}, "mask must be True or a pair (shape, dtype); got (64, 64)"),
        ({"options": {"mask": ((64, 64), "float32")}, "seqlens": (64,)}, "mask must be bool"),
        ({"return_lse": True}, "return_lse must be a sequence of values; got True"),
        ({"return_lse": (1,)}, "return_lse must be True or False; got 1"),
        ({"directions": "backward"}, "directions must be a sequence of values"),
        ({"deterministic": 1}, "deterministic must be True or False; got 1"),
    ],
)
def test_bad_warmup_options(options, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        warming.warmup(**{"device": HOPPER_DEVICE, **options})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"directions": ("sideways",)}, 'directions must hold nothing but "forward", "backward" and "decode"; got \'sideways\''),
        ({"options": {"mask": ((64, 7), "bool")}, "seqlens": (64,)}, "mask must broadcast to (batch, heads, seqlen_q, seqlen_k) = (1, 16, 64, 64)"),
        ({"options": {"block_mask": True}, "totals": (64,)}, "packed sequences have no mask; leave it out"),
        ({"options": {"seqlens_k": True}, "totals": (64,)}, "packed sequences have no seqlens_k; leave it out"),
        ({"totals": (64,), "batch": -1}, "cu_seqlens_q must have shape (batch + 1,)"),
        ({"directions": ("backward",), "needs": ("bias",)}, 'needs holds "bias", but no bias was given'),
    ],
)
def test_bad_warmup_values(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        warming.warmup(**{"device": HOPPER_DEVICE, **options})


# ---- on a GPU


gpu = pytest.mark.skipif(not toolchain.device_count(), reason=f"needs a GPU: {toolchain.unavailable_reason()}")


class Memory:
    """Device memory with a NumPy copy of it."""

    def __init__(self, values):
        self.host = np.ascontiguousarray(values)
        self.address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(self.address), ctypes.c_size_t(self.host.nbytes))
        self.call("cuMemcpyHtoD_v2", self.address, self.host.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.host.nbytes))

    def read(self):
        self.call("cuMemcpyDtoH_v2", self.host.ctypes.data_as(ctypes.c_void_p), self.address, ctypes.c_size_t(self.host.nbytes))
        return self.host.copy()

    def free(self):
        self.call("cuMemFree_v2", self.address)

    @staticmethod
    def call(name, *arguments):
        cuda = drv.driver()
        with drv.pushed(drv.context(0)):
            cuda.check(getattr(cuda, name)(*arguments), name)


@pytest.fixture
def operands():
    rng = np.random.default_rng(3)
    data = [rng.integers(0, 100, 16).astype(np.float32) for _ in range(3)]
    memories = [Memory(x) for x in (*data, np.full(16, np.nan, np.float32), np.full(6, np.nan))]
    yield data, memories
    for memory in memories:
        memory.free()


def everything_on_gpu():
    device = toolchain.device(0)
    with_map = device.capability >= (9, 0)
    arch = HOPPER if device.capability == (9, 0) else device.capability
    request = request_of(build_everything, EverythingConfig(with_map), arch)
    return request, toolchain.prepare(request, everything_parameters(with_map), grid=(1,), threads=16, shared_bytes=1024 if with_map else 0)


def everything_expected(data):
    q, k, v = data
    i = np.arange(16)
    return q + 100 * k + 10000 * v[3 - i % 4 + 4 * (i // 4)]


def check_everything(data, memories, launch, lse=True):
    q, k, v, out, scalars = (memory.address.value for memory in memories)
    launch((q, k, v + 12, out, scalars if lse else 0), 0)
    np.testing.assert_array_equal(memories[3].read(), everything_expected(data))


@gpu
def test_gpu_launch_with_every_kind_of_parameter(operands):
    data, memories = operands
    request, launch = everything_on_gpu()
    check_everything(data, memories, launch, lse=False)
    assert np.isnan(memories[4].read()).all(), "a null address was written through"
    check_everything(data, memories, launch)
    np.testing.assert_array_equal(memories[4].read(), [float(value) for value in SCALARS.values()])
    found = toolchain.loaded_resources(request)
    assert 0 < found["registers"] <= 64 and found["local_bytes"] == 0 and found["max_threads"] >= 16
    assert drv.device_of_address(memories[0].address.value) == 0


@gpu
def test_gpu_addresses_change_between_launches(operands):
    data, memories = operands
    _, launch = everything_on_gpu()
    check_everything(data, memories, launch)
    again = [Memory(x) for x in (*data[::-1], np.full(16, np.nan, np.float32), np.full(6, np.nan))]
    check_everything(data[::-1], again, launch)
    check_everything(data, memories, launch)
    for memory in again:
        memory.free()


@gpu
def test_gpu_threads_and_contexts(operands):
    """Fresh threads have no current context; none is left behind, and results are right at once from several threads."""
    _, launch = everything_on_gpu()
    errors, gate = [], threading.Barrier(4)

    def current():
        found = ctypes.c_void_p()
        drv.driver().check(drv.driver().cuCtxGetCurrent(ctypes.byref(found)), "cuCtxGetCurrent")
        return found.value

    def work(number):
        try:
            rng = np.random.default_rng(number)
            data = [rng.integers(0, 100, 16).astype(np.float32) for _ in range(3)]
            memories = [Memory(x) for x in (*data, np.full(16, np.nan, np.float32), np.full(6, np.nan))]
            gate.wait()
            for _ in range(50):
                check_everything(data, memories, launch)
                if current() is not None:
                    raise AssertionError("a context was left current")
            for memory in memories:
                memory.free()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@gpu
def test_gpu_launch_under_another_context(operands):
    """A context that is not the primary one is current: the launch goes to the kernel's, and the other stays current."""
    data, memories = operands
    _, launch = everything_on_gpu()
    cuda, other, popped = drv.driver(), ctypes.c_void_p(), ctypes.c_void_p()
    create = cuda.cuCtxCreate_v2
    cuda.check(create(ctypes.byref(other), ctypes.c_uint(0), ctypes.c_int(0)), "cuCtxCreate")
    try:
        check_everything(data, memories, launch)
        now = ctypes.c_void_p()
        cuda.check(cuda.cuCtxGetCurrent(ctypes.byref(now)), "cuCtxGetCurrent")
        assert now.value == other.value
    finally:
        cuda.check(cuda.cuCtxPopCurrent_v2(ctypes.byref(popped)), "cuCtxPopCurrent")
        cuda.check(cuda.cuCtxDestroy_v2(other), "cuCtxDestroy")


@gpu
def test_gpu_errors_are_the_drivers_own(monkeypatch, operands):
    request = request_of(build_scale, ScaleConfig(9), (8, 0))
    text = SHORT.replace("prefetch.tensormap [%rd1];", "nonsense;").replace("sm_90a", "sm_80").replace("9.5", "8.0")
    compiler.adopt(request, Ptx(text, "k"))
    with pytest.raises(CudaError, match=r"cuModuleLoadData failed: CUDA_ERROR_INVALID_PTX \(.*\); kernel k: .*build_scale(.|\n)*nonsense"):
        drv.load(request, 0)
    data, memories = operands
    _, launch = everything_on_gpu()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "config", struct.pack(launching._CONFIG_FORMAT, 1, 1, 1, 2048, 1, 1, 0, 0, 0, 0, 0))
        with pytest.raises(CudaError, match=r"cuLaunchKernel failed: CUDA_ERROR_INVALID_VALUE \(.*\); kernel test_toolchain_build_everything"):
            check_everything(data, memories, launch)
        launch._free.clear()
    check_everything(data, memories, launch)
    with pytest.raises(ValueError, match="device must be from 0 to"):
        toolchain.device(1000)


@gpu
def test_gpu_warmup_loads(family):
    family.build = build_scale
    hopper = toolchain.device(0).capability == (9, 0)
    options = {"dtypes": ("float32",), "head_dims": (64,), "causal": (False,)}
    report = warming.warmup(**options, device=0 if hopper else HOPPER_DEVICE, load=hopper)
    assert report.failed == {} and len(report.built) == 1 and report.loaded == hopper
