"""``numbaflash bench``: time prefill, gradients, decoding and options beside every library that is installed."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path

from ..benchmarks import KINDS
from ..problem import DTYPES, MAX_HEAD_DIM, MAX_NEW_TOKENS
from .errors import CommandError, reported

USUAL = {
    "cpu": {"only": KINDS[:4], "dtype": ("float32",), "head_dim": (64,), "seqlen": (512, 2048), "heads": ("8/2",), "causal": ("causal",)}
    | {"tokens": 2048, "context": (4096,), "requests": (8,), "page_size": (0, 64), "new_tokens": (1,), "rounds": 5, "budget": 90.0},
    "cuda": {"only": KINDS, "dtype": ("bfloat16",), "head_dim": (128,), "seqlen": (1024, 4096, 16384), "heads": ("32/8",), "causal": ("causal",)}
    | {"tokens": 16384, "context": (8192,), "requests": (64,), "page_size": (0, 64), "new_tokens": (1,), "rounds": 5, "budget": 300.0},
}
OPTIONS = ("softcap", "alibi", "sinks", "window", "bias", "mask", "lengths", "dropout")
MASKS = {"full": False, "causal": True}
MOST = {"head_dim": MAX_HEAD_DIM, "seqlen": 2**20, "context": 2**24, "requests": 2**16, "new_tokens": MAX_NEW_TOKENS, "page_size": 2**20}
THRESHOLD = 0.03


def add_parser(commands) -> argparse.ArgumentParser:
    cpu, cuda = USUAL["cpu"], USUAL["cuda"]

    def told(name):
        here, there = (", ".join(map(str, usual[name])) if isinstance(usual[name], tuple) else f"{usual[name]:g}" for usual in (cpu, cuda))
        return f"(default: {here})" if here == there else f"(default: {here} on the CPU, {there} on a GPU)"

    parser = commands.add_parser(
        "bench",
        help="time attention beside every library that is installed; compare two runs",
        description="Times prefill, gradients, decoding and options of the chosen cells with numbaflash and with every other attention that is "
        "installed, in turns. A result is compared with float64 before it is timed; what fails or is wrong is told and left out. Exit status 1 when "
        "numbaflash failed or was wrong. `numbaflash bench compare A B` compares two runs, `numbaflash bench show FILE` prints one. Lists are "
        "separated by commas.",
    )
    cells = parser.add_argument_group("cells")
    cells.add_argument("--only", type=_words, metavar="KINDS", help=f"of {', '.join(KINDS)} {told('only')}")
    cells.add_argument("--dtype", type=_words, help=f"of {', '.join(DTYPES)} {told('dtype')}")
    cells.add_argument("--head-dim", type=_integers, help=told("head_dim"))
    cells.add_argument("--heads", type=_words, help=f'"HEADS/KV_HEADS", mha (as many as make 2048 columns) or gqa (32/8) {told("heads")}')
    cells.add_argument("--seqlen", type=_integers, help=f"of prefill, gradients and options {told('seqlen')}")
    cells.add_argument("--tokens", type=int, help=f"of a batch there: tokens / seqlen sequences, one at least {told('tokens')}")
    cells.add_argument("--causal", type=_words, metavar="MASKS", help=f"of {', '.join(MASKS)}, there {told('causal')}")
    cells.add_argument("--option", type=_words, metavar="NAMES", help=f"of {', '.join(OPTIONS)} (default: all of them, where options are measured)")
    cells.add_argument("--context", type=_integers, help=f"keys of each sequence that is decoded {told('context')}")
    cells.add_argument("--requests", type=_integers, help=f"sequences of batched-decode {told('requests')}")
    cells.add_argument("--page-size", type=_integers_or_zero, help=f"keys of a page, 0 for contiguous caches {told('page_size')}")
    cells.add_argument("--new-tokens", type=_integers, help=f"queries of a sequence that is decoded {told('new_tokens')}")
    how = parser.add_argument_group("where and how")
    how.add_argument("--device", default="auto", help="cpu, cuda:INDEX, or auto: a GPU that PyTorch sees, else the CPU (default: %(default)s)")
    how.add_argument("--library", type=_words, metavar="NAMES", help="measure these alone (default: numbaflash and what is installed of its peers)")
    how.add_argument("--rounds", type=int, help=f"measurements of each library in a cell {told('rounds')}")
    how.add_argument("--budget", type=float, metavar="SECONDS", help=f"time for all cells; those that it does not reach are told {told('budget')}")
    how.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    how.add_argument("--list", action="store_true", help="say what would be measured, and measure nothing")
    result = parser.add_argument_group("results")
    result.add_argument("--out", metavar="FILE", help="records, a JSON object a line (default: DATE-DEVICE-bench.jsonl, here)")
    result.add_argument("--overwrite", action="store_true", help="replace FILE where it is there already")
    result.add_argument("--plot", action="store_true", help="draw figures beside the records (needs matplotlib)")
    result.add_argument("--metric", choices=("tflops", "ms"), help="of the tables (default: tflops; of decoding, ms)")
    parser.set_defaults(action=_measure)
    _add_more(parser)
    return parser


def _add_more(parser):
    actions = parser.add_subparsers(title="saved runs", metavar="ACTION", required=False)
    compare = actions.add_parser(
        "compare",
        help="is numbaflash slower in the second of two runs?",
        description="Compares two runs cell by cell: by the ratio to the fastest peer that both runs have, since a device's clock drifts from run to "
        "run, and by numbaflash's own time where there is none. Exit status 1 when a cell is slower by more than the threshold and the spread of "
        "its measurements, or has no time any more.",
    )
    compare.add_argument("before", help="the earlier run (.jsonl)")
    compare.add_argument("after", help="the later run (.jsonl)")
    compare.add_argument("--threshold", type=float, default=THRESHOLD, help="what is slower counts from here on (default: %(default)s, 3%%)")
    compare.add_argument("--by", choices=("ratio", "time"), help="ratios to a peer alone, or times alone")
    compare.add_argument("--other-device", action="store_true", help="compare runs of two devices")
    compare.add_argument("--markdown", action="store_true", help="as a Markdown table")
    compare.set_defaults(action=_compare)
    show = actions.add_parser("show", help="print saved runs as tables", description="Prints saved runs as tables.")
    show.add_argument("files", nargs="+", metavar="FILE", help="records (.jsonl)")
    show.add_argument("--metric", choices=("tflops", "ms"), default="tflops", help="(default: %(default)s)")
    show.add_argument("--markdown", action="store_true", help="as Markdown tables")
    show.set_defaults(action=_show)


def run(arguments: argparse.Namespace) -> int:
    with reported():
        return arguments.action(arguments)


def _show(arguments) -> int:
    from ..benchmarks import records, tables
    from ..benchmarks.progress import colour_wanted

    found = records.read(*arguments.files)
    if not found:
        raise CommandError(f"{', '.join(map(str, arguments.files))}: there are no records")
    print(tables.tables(found, metric=arguments.metric, markdown=arguments.markdown, colour=colour_wanted() and not arguments.markdown))
    return 0


def _compare(arguments) -> int:
    from ..benchmarks import records, regressions
    from ..benchmarks.progress import colour_wanted

    if not 0 <= arguments.threshold < 1:
        raise CommandError(f"--threshold must be at least 0 and below 1; got {arguments.threshold:g}")
    before, after = records.read(arguments.before), records.read(arguments.after)
    found = regressions.compare(before, after, by=arguments.by, other_device=arguments.other_device)
    print(regressions.table(found, arguments.threshold, markdown=arguments.markdown, colour=colour_wanted() and not arguments.markdown))
    return int(found.failed(arguments.threshold))


def _measure(arguments) -> int:
    import importlib.util

    from ..benchmarks import records

    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs the package matplotlib, which is not installed: pip install matplotlib")
    device, reason = _device(arguments.device)
    plan, rounds, budget = _plan(arguments, device)
    out = _out(arguments.out, arguments.overwrite or arguments.list)
    for kind, (_, cells) in plan.groups.items():
        print(f"{kind}: {len(cells)} cell{'s' * (len(cells) != 1)}, {cells[0]}" + (f" to {cells[-1]}" if len(cells) > 1 else ""))
    if arguments.list:
        return 0
    if out is None and not os.access(".", os.W_OK):
        raise CommandError("this folder cannot be written; name a file in another one with --out")
    from ..benchmarks import session

    common = session.device_fields(device) | records.run_fields()
    path = out or records.result_path(common["gpu"], "bench", out=".")
    print(f"{common['gpu']}" + (f" ({reason})" if reason else "") + f"; {path}", flush=True)
    return _run(plan, device, common, path, rounds, budget, arguments)


def _run(plan, device, common, path, rounds, budget, arguments) -> int:
    from ..benchmarks import cpu, gpu, prebuild, records, running, tables
    from ..benchmarks.progress import Progress, colour_wanted

    start = time.monotonic()
    place = gpu.Gpu(arguments.seed) if device == "cuda" else cpu.Cpu(arguments.seed)
    kinds = plan.runs(place, common, rounds)
    runs = list(kinds.values())
    for name, why in plan.missing.items():
        print(f"{name} is not measured: {why}", flush=True)
    if not runs:
        raise CommandError("none of the libraries can be measured here; numbaflash env --import shows what was found")
    progress = Progress(sum(len(run.options.cells) for run in runs), "bench")

    def save():
        records.write(path, [record for run in runs for record in run.records])

    try:
        with _recording(any(run.what.autograd for run in runs)):
            if device == "cuda":
                tasks = [task for run in runs if run.what.bench != "decode" for task in run.tasks(run.what, run.options.cells, run.libraries)]
                built = prebuild.prebuild(tasks, progress.note, timeout=budget / 2)
                for run in runs:
                    run.learn(built)
            running.measure(runs, save, max(1.0, budget - (time.monotonic() - start)), progress, drop=True)
            if device == "cuda":
                running.add_kernel_names(runs, progress.note)
                save()
    except KeyboardInterrupt:
        told = "nothing was measured"
        if any(run.records for run in runs):
            save()
            told = f"what was measured is in {path}"
        print(f"\nnumbaflash: interrupted; {told}", file=sys.stderr)
        return 130
    finally:
        progress.close()
    drawn = []
    for kind, run in kinds.items():
        metric = arguments.metric or ("ms" if "decode" in kind else "tflops")
        print(f"\n# {kind}\n{tables.tables(run.records, metric=metric, colour=colour_wanted())}")
        drawn += _drawn(kind, run, path) if arguments.plot else []
    print(f"\n{time.monotonic() - start:.0f} s; {', '.join(map(str, [path, *drawn]))}")
    return running.verdict([record for run in runs for record in run.records if record.get("skipped") != running.NO_TIME])


def _recording(wanted):
    """Whether torch may record what is called; nothing where there is no torch."""
    from contextlib import nullcontext

    if importlib.util.find_spec("torch") is None:
        return nullcontext()
    import torch

    return torch.set_grad_enabled(wanted)


def _drawn(kind, run, path) -> list[Path]:
    from ..benchmarks import plots

    draw = plots.plot if kind in ("prefill", "backward") else plots.plot_bars
    return draw(run.records, f"{Path(path).with_suffix('')}-{kind}")


def _device(name) -> tuple[str, str]:
    """("cuda" or "cpu", why it is not a GPU)."""
    from ..benchmarks import gpu

    if name == "cpu":
        return "cpu", ""
    kind, _, index = name.partition(":")
    if name != "auto" and (kind != "cuda" or not index.isdecimal()):
        raise CommandError(f"--device must be cpu, cuda:INDEX or auto; got {name}")
    reason = gpu.missing()
    if reason is not None:
        if name == "auto":
            return "cpu", f"the CPU: {reason}"
        raise CommandError(f"--device {name}: {reason}")
    import torch

    if int(index or 0) >= torch.cuda.device_count():
        raise CommandError(f"--device {name}: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    torch.cuda.set_device(int(index or 0))
    return "cuda", ""


def _plan(arguments, device):
    """(`session.Plan`, rounds, seconds) of the command line."""
    from ..benchmarks import cells, session

    usual = USUAL[device]
    given = {name: usual[name] if getattr(arguments, name) is None else getattr(arguments, name) for name in usual}
    given["option"] = arguments.option or OPTIONS
    for name, allowed in (("only", KINDS), ("dtype", DTYPES), ("causal", tuple(MASKS)), ("option", OPTIONS)):
        _check_words(name, given[name], allowed)
    for name, most in MOST.items():
        for n in given[name]:
            if n > most:
                raise CommandError(f"--{name.replace('_', '-')} must be at most {most}; got {n}")
    for name in ("rounds", "tokens", "budget"):
        if not 0 < given[name] < float("inf"):
            raise CommandError(f"--{name} must be above 0; got {given[name]:g}")
    for kind in given["heads"]:
        cells.heads_of(kind, 64)
    known = {name for of_kind in session.LIBRARIES[device].values() for name in of_kind} - {session.PLAIN}
    known = sorted(known.union(session.MORE[device]))
    if arguments.library is not None:
        _check_words("library", arguments.library, tuple(known))
    kinds = given["only"]
    if importlib.util.find_spec("torch") is None:
        if arguments.only and set(kinds) <= set(session.WITH_TORCH):
            raise CommandError(f"--only {','.join(kinds)} needs PyTorch, which holds the arrays and the peers: pip install torch")
        kinds = tuple(kind for kind in kinds if kind not in session.WITH_TORCH)
    plan = session.Plan(
        device,
        kinds,
        dtypes=list(given["dtype"]),
        dims=list(given["head_dim"]),
        seqlens=list(given["seqlen"]),
        heads=list(given["heads"]),
        causal=[MASKS[word] for word in given["causal"]],
        tokens=given["tokens"],
        contexts=list(given["context"]),
        requests=list(given["requests"]),
        page_sizes=list(given["page_size"]),
        new_tokens=list(given["new_tokens"]),
        options=list(given["option"]),
        libraries=None if arguments.library is None else list(arguments.library),
    )
    if not plan.groups:
        raise CommandError("there is no cell to measure: --new-tokens must not be above --context")
    return plan, given["rounds"], given["budget"]


def _out(path, overwrite) -> Path | None:
    """Where the records go, looked at before anything is measured."""
    if path is None:
        return None
    path = Path(path)
    if path.suffix != ".jsonl":
        raise CommandError(f"--out must end in .jsonl; got {path}")
    folder = path.resolve().parent
    if path.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise CommandError(f"--out {path}: it must be a file in a folder that there is and that can be written")
    if path.exists() and not overwrite:
        raise CommandError(f"--out {path} is there already; name another file, or add --overwrite")
    return path


def _check_words(name, words, allowed):
    for word in words:
        if word not in allowed:
            raise CommandError(f"--{name} must be of {', '.join(allowed)}; got {word}")


def _words(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"must name at least one; got {text!r}")
    return found


def _integers(text: str, least: int = 1) -> tuple[int, ...]:
    found = []
    for word in _words(text):
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"must hold whole numbers from {least} on; got {word!r}")
        found.append(int(word))
    return tuple(found)


def _integers_or_zero(text: str) -> tuple[int, ...]:
    return _integers(text, 0)
