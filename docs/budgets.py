"""What each kernel has in shared memory and registers, read from its configuration: the tables that ``python docs/tables.py`` writes.

``python docs/figures/draw.py`` draws the same budgets. Offsets are those of a configuration's memory, registers the lengths of the tuples that
its kernel computes with, and which configuration a problem gets its family says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from numbaflash.kernels.cpu import arguments as cpu_arguments
from numbaflash.kernels.cpu import config as cpu
from numbaflash.kernels.cpu.backward import arguments as cpu_backward_arguments
from numbaflash.kernels.cpu.backward import config as cpu_backward
from numbaflash.kernels.cpu.convert import COMPUTE
from numbaflash.kernels.simt import config as simt
from numbaflash.kernels.simt import tiles as simt_tiles
from numbaflash.kernels.simt.backward import config as simt_backward
from numbaflash.kernels.simt.backward import tiles as simt_backward_tiles
from numbaflash.kernels.sm90 import config as sm90
from numbaflash.kernels.sm90.backward import config as sm90_backward
from numbaflash.kernels.sm90.decoding import config as sm90_decode
from numbaflash.problem import ITEMSIZE, make_decode_problem, make_problem
from numbaflash.ptx import fragment, mma
from numbaflash.support import assumed_device, contiguous_backward_layouts, contiguous_layouts, described_options

KIB = 1024
SM_REGISTERS = 65536
"""32-bit registers of a multiprocessor."""

MOST_REGISTERS = 255
"""Of a thread."""

RESERVED = 1024
"""Bytes of shared memory that the system takes for each block."""

SM_SHARED = sm90.MAX_SHARED + RESERVED
"""Bytes of shared memory of a multiprocessor of compute capability 9.0."""

H200 = assumed_device("sm_90")
SHORTEST, LONGEST = 1 << 4, 1 << 17
"""Keys between which it is asked where the configuration changes: a single query sees no band."""


@dataclass(frozen=True, slots=True)
class Part:
    """So many bytes of memory, or so many registers of a thread."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Role:
    """Warps that do the same.

    Attributes
    ----------
    name : str
    warps : int
    registers : int
        What a thread may have.
    parts : tuple of Part
        What fragments take of them.
    phases : tuple of tuple of Part
        The same of fragments that take turns: those of one, or those of another.
    """

    name: str
    warps: int
    registers: int
    parts: tuple[Part, ...] = ()
    phases: tuple[tuple[Part, ...], ...] = ()

    @property
    def told(self) -> str:
        return ", ".join(filter(None, (_sum(self.parts), " or ".join(map(_sum, self.phases)))))


def _sum(parts) -> str:
    return " + ".join(str(part.size) for part in parts)


@dataclass(frozen=True, slots=True)
class Budget:
    """What a block of a kernel has.

    Attributes
    ----------
    tile : tuple of str
        What a row of the table says of the configuration, between the name of the row and what is below.
    memory : tuple of Part
        Shared memory from its first byte to its last one.
    roles : tuple of Role
    blocks : int
        Blocks that a multiprocessor is to hold.
    """

    tile: tuple[str, ...]
    memory: tuple[Part, ...]
    roles: tuple[Role, ...]
    blocks: int = 1

    @property
    def bytes(self) -> int:
        return sum(part.size for part in self.memory)

    @property
    def kib(self) -> str:
        return f"{self.bytes / KIB:.0f} KiB"


def cut(total: int, *places: tuple[str, int]) -> tuple[Part, ...]:
    """Parts that begin at the places, each up to the next one, the last one up to the total."""
    places = sorted(places, key=lambda place: place[1])
    ends = [start for _, start in places[1:]] + [total]
    return tuple(Part(name, end - start) for (name, start), end in zip(places, ends, strict=True) if end > start)


def table(head, rows) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def self_attention(dims, seqlen: int, dtype: str = "bfloat16", kv_heads: int = 16, options=(), **others):
    """16 heads of one sequence; ``options`` names arrays that are there."""
    shapes = (1, seqlen, 16, dims[0]), (1, seqlen, kv_heads, dims[0]), (1, seqlen, kv_heads, dims[1])
    return make_problem(*shapes, (dtype,) * 3, **described_options(dict.fromkeys(options, True), shapes, dtype), **others)


OPTIONS = {  # what is asked for by name, and how
    "softcap": {"softcap": 30.0},
    "mask": {"options": ("mask",)},
    "bias": {"options": ("bias",)},
    "ALiBi": {"options": ("alibi_slopes",)},
    "sinks": {"options": ("sinks",)},
    "dropout": {"dropout": 0.1},
    "lengths": {"options": ("seqlens_k",)},
}
MASKS = {("full", "equal heads"): {}, ("full", "grouped heads"): {"kv_heads": 4}}
MASKS |= {("causal", heads): {"causal": True, **options} for (_, heads), options in MASKS.items()}


def alike(named: Iterator[tuple[str, Budget]]) -> Iterator[tuple[str, Budget]]:
    """Names of budgets together of which a table says the same, in the order in which they come first."""
    found: dict[tuple, list[tuple[str, Budget]]] = {}
    for name, budget in named:
        found.setdefault((budget.tile, budget.roles, budget.kib), []).append((name, budget))
    return ((", ".join(name for name, _ in of), of[0][1]) for of in found.values())


def stretches(budget_of: Callable[[int], Budget]) -> list[tuple[str, Budget]]:
    """By the number of keys: how many, and the budget of so many."""
    grid = [1 << n for n in range(SHORTEST.bit_length() - 1, LONGEST.bit_length())]
    starts = [1]
    for low, high in itertools.pairwise(grid):
        if budget_of(low) != budget_of(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if budget_of(middle) == budget_of(low) else (low, middle)
            starts.append(high)
    ends = [start - 1 for start in starts[1:]] + [None]
    return [(_between(start, end), budget_of(max(start, SHORTEST))) for start, end in zip(starts, ends, strict=True)]


def _between(start, end):
    if end is None:
        return "any" if start == 1 else f"from {start}"
    return f"up to {end}" if start == 1 else f"{start} to {end}"


# ---- the Hopper forward


def sm90_forward_budget(config: sm90.ForwardConfig) -> Budget:
    memory = sm90.SharedMemory.of(config)
    consumers, stages = range(config.consumers), range(config.stages)
    places = [(f"Q {c + 1}", memory.q + c * memory.q_stride + s * memory.q_bytes) for c in consumers for s in range(config.q_stages)]
    places += [("K", memory.k + s * memory.k_bytes) for s in stages] + [("V", memory.v + s * memory.v_bytes) for s in stages]
    places += [(f"O {c + 1}", memory.out + c * memory.out_stride) for c in consumers if not config.out_in_q]
    parts = (
        Part("S", len(fragment.fragment(config.kv_block))),
        Part("O", len(fragment.fragment(config.padded_head_dim_v))),
        Part("P", len(fragment.packed(config.kv_block))),
    )
    roles = Role("producer", 4, config.registers[0]), *(Role(f"consumer {c + 1}", 4, config.registers[1], parts) for c in consumers)
    tile = str(config.q_tile), str(config.kv_block), f"{config.stages}, of Q {config.q_stages}"
    return Budget(tile, cut(memory.total, *places, ("rest", memory.barriers)), roles)


def sm90_forward_cases() -> Iterator[tuple[tuple[str, str, str], Budget]]:
    """((head dim, attention, keys), budget)"""
    for dim in (64, 96, 128, 192, 256):
        found: dict[tuple, list] = {}
        for mask, options in MASKS.items():

            def budget_of(keys, dim=dim, options=options):
                return sm90_forward_budget(sm90.forward_config(self_attention((dim, dim), keys, **options)))

            found.setdefault(tuple(stretches(budget_of)), []).append(mask)
        for listed, masks in found.items():
            for keys, budget in listed:
                yield (str(dim), attention(masks), keys), budget


def attention(masks: list[tuple[str, str]]) -> str:
    """In words, which of `MASKS`."""
    if len(masks) == len(MASKS):
        return "any"
    heads = {mask: [h for m, h in masks if m == mask] for mask in dict(masks)}
    return "; ".join(mask if len(of) == 2 else f"{mask}, {of[0]}" for mask, of in heads.items())


SM90_TAIL = ["registers a consumer thread: S + O + P", "of", "of a producer's", "shared memory"]


def _sm90_tail(budget):
    producer, consumer = budget.roles[:2]
    return consumer.told, str(consumer.registers), str(producer.registers), budget.kib


def sm90_forward() -> str:
    head = ["head dim", "attention", "keys", "q tile", "KV block", "stages", *SM90_TAIL]
    return table(head, ([*case, *budget.tile, *_sm90_tail(budget)] for case, budget in sm90_forward_cases()))


def sm90_forward_options() -> str:
    """Of causal attention to 4096 keys, options one at a time."""

    def budgets(dim):
        for name, options in OPTIONS.items():
            problem = self_attention((dim, dim), 4096, causal=True, **options)
            yield name, sm90_forward_budget(sm90.forward_config(problem, contiguous_layouts(problem)))

    head = ["head dim", "option", "q tile", "KV block", "stages", *SM90_TAIL]
    return table(head, ([str(dim), names, *budget.tile, *_sm90_tail(budget)] for dim in (64, 128, 256) for names, budget in alike(budgets(dim))))


# ---- the Hopper gradients


def sm90_gradients_budget(config: sm90_backward.BackwardConfig) -> Budget:
    memory, apart, stages = sm90_backward.SharedMemory.of(config), config.columns_apart, range(config.stages)
    places = [("K", memory.k), ("V", memory.v)]
    places += [("Q", memory.q + s * memory.q_bytes) for s in stages] + [("dO", memory.dout + s * memory.dout_bytes) for s in stages]
    half = memory.ds_bytes // 2
    for s in stages:
        start = memory.ds + s * memory.ds_bytes
        places += [("P", start), ("dS", start + half)] if apart else [("dS", start)]
    if not apart:
        places += [(f"dQ {c + 1}", memory.dq + c * memory.part_bytes) for c in range(config.consumers)]
    queries, parts = (config.q_block // config.consumers, 1) if apart else (config.q_block, config.parts)
    of_keys = [config.part_columns, config.part_columns_v] if apart else [config.padded_head_dim, config.padded_head_dim_v]
    kept = tuple(Part(name, len(fragment.fragment(columns))) for name, columns in zip(("dK", "dV"), of_keys, strict=True))
    scores = tuple(Part(name, len(fragment.fragment(queries))) for name in ("S", "dP"))
    dq = Part("dQ", parts * len(fragment.fragment(config.part_columns)))
    consumer = [Role(f"consumer {c + 1}", 4, config.registers[1], kept, (scores, (dq,))) for c in range(config.consumers)]
    tile = str(config.kv_tile), str(config.q_block), "columns" if apart else "keys"
    return Budget(tile, cut(memory.total, *places, ("rest", memory.shifts)), (Role("producer", 4, config.registers[0]), *consumer))


def _sm90_gradients_of(dim, **options) -> Budget:
    problem = self_attention((dim, dim), 4096, **options)
    config = sm90_backward.backward_config(problem, contiguous_backward_layouts(problem), blocks=H200.sm_count, deterministic=False)
    return sm90_gradients_budget(config)


SM90_GRADIENTS_TAIL = ["keys", "queries a step", "a consumer's own", "registers a consumer thread: dK + dV, S + dP or dQ", "of", "of a producer's"]
SM90_GRADIENTS_TAIL += ["shared memory"]


def _sm90_gradients_tail(budget):
    producer, consumer = budget.roles[:2]
    return *budget.tile, consumer.told, str(consumer.registers), str(producer.registers), budget.kib


def sm90_gradients_cases() -> Iterator[tuple[str, Budget]]:
    return alike((str(dim), _sm90_gradients_of(dim)) for dim in (64, 96, 128, 192, 256))


def sm90_gradients() -> str:
    return table(["head dim", *SM90_GRADIENTS_TAIL], ([dims, *_sm90_gradients_tail(budget)] for dims, budget in sm90_gradients_cases()))


def sm90_gradients_options() -> str:
    """Of causal attention to 4096 keys, options one at a time."""
    rows = []
    for dim in (64, 128, 256):
        for names, budget in alike((name, _sm90_gradients_of(dim, causal=True, **options)) for name, options in OPTIONS.items()):
            rows.append([str(dim), names, *_sm90_gradients_tail(budget)])
    return table(["head dim", "option", *SM90_GRADIENTS_TAIL], rows)


# ---- decoding on Hopper

DECODED = (  # head dims, tokens of groups of 4 heads, page size
    ((64, 64), 1, 0),
    ((64, 64), 1, 16),
    ((128, 128), 1, 0),
    ((192, 128), 1, 0),
    ((256, 256), 1, 0),
    ((128, 128), 8, 0),
    ((128, 128), 16, 0),
    ((128, 128), 32, 0),
    ((256, 256), 16, 0),
    ((576, 512), 4, 0),
)


def sm90_decode_budget(config: sm90_decode.DecodeConfig) -> Budget:
    memory = sm90_decode.SharedMemory.of(config)
    rings = config.warps if config.division == "keys" else 1
    starts = [ring * (memory.q // rings) + stage * memory.stage_bytes for ring in range(rings) for stage in range(config.stages)]
    places = [place for start in starts for place in (("K", start), ("V", start + memory.v))]
    if config.shared_q:
        places.append(("Q", memory.q))
    parts = [Part("O", len(fragment.fragment(config.warp_columns))), Part("S", len(fragment.fragment(config.keys)))]
    if not config.shared_q:
        parts.append(Part("Q", len(mma.row_operand(config.depth))))
    role = Role("", config.warps, of_launch_bounds(config.threads, config.blocks), tuple(parts))
    tile = tuple(map(str, (config.division, config.warps, config.blocks, config.keys, config.stages)))
    return Budget(tile, cut(memory.total, *places, ("rest", memory.statistics)), (role,), config.blocks)


def of_launch_bounds(threads: int, blocks: int) -> int:
    """Registers that ptxas may give a thread, where a multiprocessor is to hold so many blocks: a multiple of 8, of which one is not to be had."""
    return min(MOST_REGISTERS, SM_REGISTERS // (threads * blocks) // 8 * 8)


def sm90_decode_cases() -> Iterator[tuple[tuple[str, str], Budget]]:
    """((head dims, rows), budget)"""
    for dims, tokens, page_size in DECODED:
        rows = (99, page_size) if page_size else (8, 1000)
        paging = {"page_table": ((8, 9), "int32")} if page_size else {}
        shapes = ((8, tokens, 8, dims[0]), (*rows, 2, dims[0]), (*rows, 2, dims[1]))
        config = sm90_decode.decode_config(make_decode_problem(*shapes, ("bfloat16",) * 3, seqlens_k=((8,), "int32"), **paging))
        name = ", ".join(map(str, dict.fromkeys(dims))) + (", pages" if page_size else "")
        yield (name, str(tokens * config.group)), sm90_decode_budget(config)


def sm90_decode_table() -> str:
    head = ["head dims", "rows", "division", "warps", "blocks a multiprocessor", "keys a step", "stages", "registers: O + S + Q", "of"]
    rows = []
    for case, budget in sm90_decode_cases():
        (role,) = budget.roles
        told = role.told if len(role.parts) == 3 else f"{role.told} + shared"
        rows.append([*case, *budget.tile, told, str(role.registers), budget.kib])
    return table([*head, "shared memory a block"], rows)


# ---- CUDA cores


def simt_forward_budget(config: simt.Config) -> Budget:
    """Registers are 32 bits: a double is two."""
    itemsize = ITEMSIZE[config.compute]
    k = config.q_tile * config.dim
    v = k + config.kv_tile * config.dim
    p = v + config.kv_tile * config.dim_v
    places = [(name, start * itemsize) for name, start in (("Q", 0), ("K", k), ("V", v), ("P", p))]
    t = simt_tiles.Types.of(config)
    parts = tuple(Part(name, len(kind) * itemsize // 4) for name, kind in (("S", t.scores), ("O", t.output), ("m, l", 2 * t.row.types)))
    role = Role("", config.threads // 32, of_launch_bounds(config.threads, config.min_blocks), parts)
    tile = f"{config.q_tile} x {config.kv_tile}", str(config.threads), f"{config.rows} x {config.columns}", str(config.min_blocks)
    return Budget(tile, cut(config.shared_bytes, *places), (role,), config.min_blocks)


SIMT_CASES = tuple((dtype, dim) for dtype in ("float32", "float64") for dim in (64, 128, 256))


def simt_forward_cases() -> Iterator[tuple[tuple[str, str], Budget]]:
    """((dtype, head dim), budget)"""
    for dtype, dim in SIMT_CASES:
        problem = self_attention((dim, dim), 4096, dtype, causal=True)
        yield (dtype, str(dim)), simt_forward_budget(simt.choose_config(problem, contiguous_layouts(problem), H200))


def simt_forward() -> str:
    head = ["dtype", "D", "queries x keys", "threads", "scores a thread", "blocks a multiprocessor", "registers: S + O + m, l", "of", "shared memory"]
    return table(
        head, ([*case, *budget.tile, budget.roles[0].told, str(budget.roles[0].registers), budget.kib] for case, budget in simt_forward_cases())
    )


def simt_gradients_budget(config: simt_backward.Config) -> Budget:
    itemsize = ITEMSIZE[config.compute]
    v = config.kv_tile * config.dim
    q = v + config.kv_tile * config.dim_v
    dout = q + config.q_tile * config.dim
    p = dout + config.q_tile * config.dim_v
    ds = p + (config.buffers - 1) * config.q_tile * config.kv_tile
    both = [("P", p), ("dS", ds)] if config.buffers == 2 else [("P, dS", p)]
    places = [(name, start * itemsize) for name, start in (("K", 0), ("V", v), ("Q", q), ("dO", dout), *both)]
    t = simt_backward_tiles.Types.of(config)
    dk, dv, scores, dq = (Part(name, len(kind) * itemsize // 4) for name, kind in (("dK", t.dk), ("dV", t.dv), ("S", t.scores), ("dQ", t.dq)))
    role = Role("", config.threads // 32, of_launch_bounds(config.threads, config.min_blocks), (dk, dv), ((scores,), (dq,)))
    shares = ", ".join(f"{share.rows} x {share.columns}" for share in (config.scores, config.dq, config.dk))
    tile = f"{config.kv_tile} x {config.q_tile}", str(config.threads), shares, str(config.min_blocks)
    return Budget(tile, cut(config.shared_bytes, *places), (role,), config.min_blocks)


def simt_gradients_cases() -> Iterator[tuple[tuple[str, str], Budget]]:
    """((dtype, head dim), budget)"""
    for dtype, dim in SIMT_CASES:
        problem = self_attention((dim, dim), 4096, dtype)
        config = simt_backward.choose_config(problem, contiguous_backward_layouts(problem), H200, False)
        yield (dtype, str(dim)), simt_gradients_budget(config)


def simt_gradients() -> str:
    head = ["dtype", "D", "keys x queries", "threads", "a lane's share of scores, dq, dk and dv", "blocks a multiprocessor"]
    head += ["registers: dK + dV, S or dQ", "of", "shared memory"]
    return table(
        head, ([*case, *budget.tile, budget.roles[0].told, str(budget.roles[0].registers), budget.kib] for case, budget in simt_gradients_cases())
    )


# ---- the CPU

PROCESSORS = {  # vector registers and their bytes, as `cpu.REGISTER_TILE` has them
    (32, 64): "AVX-512",
    (16, 32): "AVX, AVX2",
    (32, 16): "Arm",
    (16, 16): "SSE",
}
THREADS = 8


def cpu_kernel(registers: int, size: int, dtype: str) -> cpu.Kernel:
    """The kernel of many queries on a processor."""
    return cpu.Kernel("panels", dtype, size * 8 // COMPUTE[dtype].bitwidth, *cpu.REGISTER_TILE[registers, size])


def cpu_registers_budget(registers: int, kernel: cpu.Kernel) -> tuple[Part, ...]:
    """What the vector registers hold in the inner loop: sums, what is loaded of one operand, and one number of the other in all lanes."""
    used = kernel.rows * kernel.vectors, kernel.vectors, 1
    return *(Part(name, n) for name, n in zip(("sums", "loaded", "broadcast"), used, strict=True)), Part("free", registers - sum(used))


def cpu_register_cases() -> Iterator[tuple[str, cpu.Kernel, tuple[Part, ...]]]:
    for (registers, size), name in PROCESSORS.items():
        kernel = cpu_kernel(registers, size, "float32")
        yield name, kernel, cpu_registers_budget(registers, kernel)


def cpu_registers() -> str:
    head = ["processor", "vector registers", "float32 a register", "register tile", "queries of a panel", "sums", "loaded", "broadcast", "free"]
    rows = []
    for name, kernel, parts in cpu_register_cases():
        sizes = sum(part.size for part in parts), kernel.lanes
        rows.append([name, *map(str, sizes), f"{kernel.rows} x {kernel.vectors}", str(kernel.panel), *(str(part.size) for part in parts)])
    return table(head, rows)


REGIONS = {  # what the parts of a thread's memory are called here; all others are the rest
    **{"queries": "Q", "keys": "K", "values": "V", "scores": "S", "output": "O"},
    **{"dkeys": "dK", "dvalues": "dV", "douts": "dO", "queries_t": "Q^T", "douts_t": "dO^T", "dscores": "dS"},
}


def cpu_forward_budget(problem) -> Budget:
    kernel = cpu_kernel(32, 64, problem.dtype)
    heads, rows = problem.batch * problem.kv_heads, problem.seqlen_q * problem.group
    config = cpu.CpuConfig(kernel, cpu.choose_q_tile(problem, kernel, rows, heads, THREADS), cpu.KV_TILE)
    args = cpu_arguments.arguments(problem, contiguous_layouts(problem), config)[0]
    return Budget((f"{config.q_tile} queries", f"{config.kv_tile} keys"), _regions(args, cpu_arguments.REGIONS, "workspace"), ())


def cpu_gradients_budget(problem) -> Budget:
    kernel = cpu_kernel(32, 64, problem.dtype)
    q_tile = cpu_backward.Q_TILE // kernel.panel * kernel.panel
    kv_tile = cpu_backward.choose_kv_tile(problem, problem.batch * problem.kv_heads, THREADS)
    config = cpu_backward.BackwardConfig(kernel, q_tile, cpu_backward.KV_BLOCK, kv_tile)
    args = cpu_backward_arguments.arguments(problem, contiguous_backward_layouts(problem), config)[0]
    tile = f"{config.kv_tile} keys", f"{config.q_tile} queries x {config.kv_block} keys"
    return Budget(tile, _regions(args, cpu_backward_arguments.SCRATCH, "scratch"), ())


def _regions(args, regions, total) -> tuple[Part, ...]:
    """A thread's memory; what has no name here is one part, at the end."""
    parts = cut(int(args[total]), *((region, int(args[f"at_{region}"])) for region in regions if f"at_{region}" in args.dtype.names))
    named = [replace(part, name=REGIONS[part.name]) for part in parts if part.name in REGIONS]
    return *named, Part("rest", sum(part.size for part in parts if part.name not in REGIONS))


def cpu_cases() -> Iterator[tuple[tuple[str, str, str], Budget]]:
    """((pass, dtype, head dim), budget)"""
    for name, budget_of in (("forward", cpu_forward_budget), ("gradients", cpu_gradients_budget)):
        for dtype, dim in SIMT_CASES:
            yield (name, dtype, str(dim)), budget_of(self_attention((dim, dim), 4096, dtype))


def cpu_tiles() -> str:
    head = ["pass", "dtype", "D", "a work item", "at a time", "memory a thread", "of it Q, K, V, dO and gradients", "scores"]
    rows = []
    for case, budget in cpu_cases():
        scores = sum(part.size for part in budget.memory if part.name in ("S", "dS"))
        matrices = sum(part.size for part in budget.memory if part.name not in ("S", "dS", "rest"))
        rows.append([*case, *budget.tile, budget.kib, f"{matrices / KIB:.0f} KiB", f"{scores / KIB:.0f} KiB"])
    return table(head, rows)


TABLES = {
    "sm90-forward": sm90_forward,
    "sm90-forward-options": sm90_forward_options,
    "sm90-gradients": sm90_gradients,
    "sm90-gradients-options": sm90_gradients_options,
    "sm90-decode": sm90_decode_table,
    "simt-forward": simt_forward,
    "simt-gradients": simt_gradients,
    "cpu-registers": cpu_registers,
    "cpu-tiles": cpu_tiles,
}
"""By the name that follows "budget" in the mark of a page."""
