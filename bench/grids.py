"""A grid of cells measured with several libraries on a GPU: the command line that `bench.forward`, `bench.backward`, `bench.training` and
`bench.varlen` share. How it is measured: `numbaflash.benchmarks.running`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from numbaflash.benchmarks import gpu, plots, prebuild, records, running, tables
from numbaflash.benchmarks.cells import DTYPES, grid, heads_of
from numbaflash.benchmarks.peers import find
from numbaflash.benchmarks.progress import Progress, colour_wanted
from numbaflash.benchmarks.running import Run, verdict

FULL = {"dims": "64,128,256", "seqlens": "512,1024,2048,4096,8192,16384", "dtypes": "bf16,fp16", "causal": "full,causal", "heads": "mha,gqa"}
FULL |= {"budget": 240.0, "rounds": 7}
QUICK = {"dims": "64,128,256", "seqlens": "1024,4096,16384", "dtypes": "bf16", "causal": "full,causal", "heads": "mha", "budget": 60.0, "rounds": 5}
MASKS = {"full": False, "causal": True}


def parser(program, what, description, full) -> argparse.ArgumentParser:
    """The options of a grid.

    Parameters
    ----------
    program : str
        Name of the module that is run.
    what : class of numbaflash.benchmarks.passes
    description : str
    full : dict
        Values of the options that ``--quick`` changes, without it.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description.split("\n\n")[0])
    parser.add_argument("--dims", help=f"head dims ({full['dims']})")
    parser.add_argument("--seqlens", help=f"sequence lengths ({full['seqlens']})")
    parser.add_argument("--dtypes", help=f"of {', '.join(DTYPES)} ({full['dtypes']})")
    parser.add_argument("--causal", help=f"of {', '.join(MASKS)} ({full['causal']})")
    parser.add_argument("--heads", help=f'of mha (heads * D = 2048), gqa (32/8), or "H/Hk" ({full["heads"]})')
    parser.add_argument("--pair", action="store_true", help="the n-th of --dtypes with the n-th of --heads, not every combination")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * seqlen (%(default)s)")
    parser.add_argument("--libraries", default=",".join(what.libraries), help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds; other options override")
    add_run_options(parser, full, "no cell is dropped when it is over")
    return parser


def add_run_options(parser, full, over) -> None:
    """Options of every run; ``over`` says what happens to cells when the budget is over."""
    parser.add_argument("--budget", type=float, help=f"seconds for the whole grid, compilation included ({full['budget']:.0f}); {over}")
    parser.add_argument("--rounds", type=int, help=f"measurements of each library in a cell ({full['rounds']})")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (%(default)s)")
    parser.add_argument("--out", type=Path, help=f"folder of the results ({records.RESULTS.relative_to(Path(__file__).parents[1])})")
    parser.add_argument("--commit", help="commit to write in the records where this is no git checkout")


def parse(parser, what, full, quick, arguments=None) -> argparse.Namespace:
    """The command line, with ``cells`` and ``libraries`` worked out."""
    options = parser.parse_args(arguments)
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        dims, seqlens = integers("dims", options.dims, 256), integers("seqlens", options.seqlens, options.tokens)
        dtypes = [DTYPES[name] for name in choices("dtypes", options.dtypes, DTYPES)]
        masks = [MASKS[name] for name in choices("causal", options.causal, MASKS)]
        kinds = words("heads", options.heads)
        for kind in kinds:
            heads_of(kind, 64)
        if options.pair and len(dtypes) != len(kinds):
            raise ValueError(f"--pair needs as many --dtypes as --heads; got {len(dtypes)} and {len(kinds)}")
        options.libraries = choices("libraries", options.libraries, what.known)
        check_run_options(options)
    except ValueError as error:
        parser.error(str(error))
    groups = [([dtype], [kind]) for dtype, kind in zip(dtypes, kinds, strict=True)] if options.pair else [(dtypes, kinds)]
    options.cells = [
        cell for dtypes, kinds in groups for cell in grid(dtypes=dtypes, dims=dims, seqlens=seqlens, causal=masks, heads=kinds, tokens=options.tokens)
    ]
    return options


def check_run_options(options) -> None:
    """ValueError where one of `add_run_options` has no sense."""
    for name in ("budget", "rounds"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name} must be above 0; got {getattr(options, name)}")


def words(name, text) -> list[str]:
    """What an option lists, each once; a ValueError where that is nothing."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ValueError(f"--{name} must name at least one; got {text!r}")
    return found


def choices(name, text, allowed) -> list[str]:
    """The words of an option, each one of those that are allowed; else a ValueError that says so."""
    found = words(name, text)
    for word in found:
        if word not in allowed:
            raise ValueError(f"--{name} takes {', '.join(allowed)}; got {word!r}")
    return found


def integers(name, text, most) -> list[int]:
    """The same of whole numbers from 1 to the largest allowed one."""
    numbers = []
    for word in words(name, text):
        if not word.isdecimal() or not 1 <= int(word) <= most:
            raise ValueError(f"--{name} takes whole numbers from 1 to {most}; got {word!r}")
        numbers.append(int(word))
    return numbers


def report(runs, path, seconds) -> int:
    """Table, plots and the places of the files; exit code 1 when numbaflash failed or was wrong in a cell."""
    (run,) = runs
    print(tables.tables(run.records, colour=colour_wanted()))
    try:
        drawn = plots.plot(run.records, path)
    except ImportError:
        drawn = []
        print("no plot: matplotlib is not installed")
    print(f"\n{seconds:.0f} s; {', '.join(str(p) for p in [path, *drawn])}")
    return verdict(run.records)


def main(program, passes, options, *, more=None, make=Run, report=report, drop=False) -> int:
    """Measure the grid of some options; returns the exit code.

    Parameters
    ----------
    program : str
        Name of the module that is run.
    passes : list of class of numbaflash.benchmarks.passes
        What is measured on each cell, in this order. Libraries and the name of the results are those of the first.
    options : argparse.Namespace
        From `parse`.
    more : callable, optional
        Takes the `Run` of the first pass and a function that prints a line; measures something else and returns its records.
    make : class, optional
        `Run`, or one derived from it.
    report : callable, optional
        Prints what there is to show, and returns the exit code, of the runs, the path of the results and the seconds that all took.
    drop : bool
        Leave cells out when the budget is over, instead of measuring them shortly.
    """
    reason = gpu.missing()
    if reason:
        return gpu.refuse(program, reason)
    import torch

    start = time.monotonic()
    libraries, missing = find(options.libraries, passes[0].classes)
    for name, why in missing.items():
        print(f"{name} is not measured: {why}", flush=True)
    if not libraries:
        return gpu.refuse(program, "none of the libraries can be imported")
    common = {**records.gpu_fields(), **records.run_fields(options.commit)}
    path = records.result_path(common["gpu"], passes[0].bench, options.out)
    directions = " and ".join(what.direction for what in passes)
    print(f"{common['gpu']}, driver {common['driver']}, torch {common['torch']}; {directions}, {len(options.cells)} cells", flush=True)
    progress = Progress(len(options.cells) * len(passes), directions)
    try:
        with torch.set_grad_enabled(any(what.autograd for what in passes)):
            tasks = [task for what in passes for task in make.tasks(what, options.cells, libraries)]
            built = prebuild.prebuild(tasks, progress.note, **({"timeout": options.budget / 2} if drop else {}))
            device = gpu.Gpu(options.seed)
            runs = [make(what, options, libraries, common, device, built) for what in passes]
            if options.cells:
                measure(runs, path, options.budget - (time.monotonic() - start), progress, drop)
            if more:
                runs[0].records += more(runs[0], progress.note)
                records.write(path, runs[0].records)
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {path}", file=sys.stderr)
        return 130
    finally:
        progress.close()
    return report(runs, path, time.monotonic() - start)


def measure(runs, path, seconds, progress, drop=False):
    """Measure the cells of some runs within so many seconds, and save the records, again after each cell."""

    def save():
        records.write(path, [record for run in runs for record in run.records])

    running.measure(runs, save, seconds, progress, drop)
    running.add_kernel_names(runs, progress.note)
    save()
