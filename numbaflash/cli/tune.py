"""``numbaflash tune``: measure tile choices on this machine, and keep those that win for later calls."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..dispatch import FAMILIES
from . import calls
from .errors import CommandError, reported
from .measure import seconds_text

BUDGET = {"cpu": 120.0, "cuda": 600.0}
DIRECTIONS = ("forward", "backward", "decode")


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "tune",
        help="measure tile choices on this machine and keep the faster ones for later calls",
        description="Measures the tiles that a kernel family may take for your shapes, each checked before it is timed, and stores those that are "
        "faster than the family's own choice by more than the measured spread. Later processes use them on the same model of GPU or processor. "
        "Shapes come from options, from a model's config.json, or from a trace of numbaflash.record. Exit status 1 when a candidate computed a "
        "wrong result.",
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("run", "list", "clear"),
        default="run",
        help="measure (the default); list what is stored; delete it, or what --family, --direction and --stale leave of it",
    )
    calls.add_sources(parser)
    what = parser.add_argument_group("what and how")
    what.add_argument("--family", choices=FAMILIES, help="kernel family (default: the best that can)")
    what.add_argument("--direction", choices=DIRECTIONS, action="append", help="may be given several times (default: all)")
    what.add_argument(
        "--library", choices=("numpy", "cupy", "torch"), help="whose arrays (default: torch or CuPy where they reach a GPU, else numpy)"
    )
    what.add_argument("--device", type=int, default=0, metavar="INDEX", help="CUDA device, where the library reaches one (default: %(default)s)")
    what.add_argument(
        "--budget",
        type=calls.seconds,
        metavar="SECONDS",
        help="of checking and timing, for all calls; building kernels comes on top (default: 120 on the CPU, 600 on a GPU)",
    )
    what.add_argument("--seed", type=int, default=0, help="of the random numbers (default: %(default)s)")
    kept = parser.add_argument_group("tables")
    kept.add_argument("--dry-run", action="store_true", help="measure and store nothing")
    kept.add_argument(
        "--folder", type=Path, help="of the tables (default: NUMBAFLASH_TUNE_DIR, else numbaflash/tuned in the folder of configurations)"
    )
    kept.add_argument("--stale", action="store_true", help="with clear: only what was measured with other kernels than there are now")
    return parser


def run(arguments: argparse.Namespace) -> int:
    if arguments.stale and arguments.action != "clear":
        raise CommandError("--stale is for numbaflash tune clear")
    if arguments.dry_run and arguments.action != "run":
        raise CommandError(f"--dry-run is for measuring, not for {arguments.action}")
    with reported():
        return {"run": _tune, "list": _list, "clear": _clear}[arguments.action](arguments)


def _tune(arguments) -> int:
    from .. import verify
    from ..tuned import store
    from ..tuned.keys import model_of
    from ..tuned.search import table, tune

    calls.check_sources(arguments)
    folder = (arguments.folder or store.directory()).expanduser()
    place = verify.open_place(arguments.library, arguments.seed, arguments.device)
    wanted, source = calls.calls_of(arguments, place.device.kind)
    directions = tuple(arguments.direction or DIRECTIONS)
    if not any(call.direction in directions for call in wanted):
        raise CommandError(f"{source} has no call of --direction {', '.join(directions)}")
    if not arguments.dry_run:
        _check_writable(folder)
    seconds = arguments.budget or BUDGET[place.device.kind]
    print(f"device: {model_of(place.device)}\narrays: {place.library}, {place.clock}\nshapes: {source}\nbudget: {seconds:g} s")
    print(f"table:  {'none, --dry-run' if arguments.dry_run else store.path_of(model_of(place.device), folder)}\n", flush=True)
    if busy := _busy(place):
        print(busy, flush=True)
    how = {"family": arguments.family, "directions": directions, "folder": folder, "dry_run": arguments.dry_run}
    outcomes = tune(wanted, place, seconds, **how, say=lambda line: print(line, flush=True))
    print("", table(outcomes), sep="\n")
    won = sum(outcome.entry is not None for outcome in outcomes)
    stored = "nothing was stored (--dry-run)" if arguments.dry_run else f"{won} stored"
    print(f"\n{won} of {len(outcomes)} calls have a faster choice; {stored}")
    if won and not arguments.dry_run and store.is_off():
        print("NUMBAFLASH_TUNE=0 is set, so no call uses it")
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def _busy(place) -> str:
    """A warning where others use the processors that are to be measured."""
    if place.on_gpu or not hasattr(os, "getloadavg"):
        return ""
    load, count = os.getloadavg()[0], os.cpu_count() or 1
    return f"the machine is busy: a load of {load:.1f} on {count} processors. Times will say little\n" if load > count / 2 else ""


def _check_writable(folder):
    """Known before anything is measured."""
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _files(arguments, shipped):
    from ..tuned import store

    folder = (arguments.folder or store.directory()).expanduser()
    return folder, [path for place in (folder, *((store.SHIPPED,) if shipped else ())) for path in sorted(place.glob("*.json"))]


def _list(arguments) -> int:
    from ..tuned import store

    folder, paths = _files(arguments, shipped=True)
    count = 0
    for path in paths:
        try:
            model, entries = store.model_in(path), store.read(path)
        except (OSError, store.TableError) as error:
            print(f"{path}: cannot be used: {error}")
            continue
        print(f"{path}: {model}")
        for entry in filter(_wanted(arguments), entries):
            count += 1
            chosen = ", ".join(f"{name} {x}" for name, x in entry.config.items())
            times = (
                f"{entry.default_seconds / entry.seconds:.2f} times as fast ({seconds_text(entry.default_seconds)} to {seconds_text(entry.seconds)})"
            )
            stale = ", STALE: other kernels were measured, it is not used" if entry.is_stale else ""
            print(f"  {entry.date[:10]}  {entry.family} {entry.direction}  {entry.key}\n    {chosen}: {times}{stale}")
    off = "; NUMBAFLASH_TUNE=0: none is used" if store.is_off() else ""
    print(f"{count} choices in {folder}{' and in the package' if any(path.parent == store.SHIPPED for path in paths) else ''}{off}")
    return 0


def _clear(arguments) -> int:
    from ..tuned import store

    folder, paths = _files(arguments, shipped=False)
    wanted, count = _wanted(arguments), 0
    for path in paths:
        try:
            count += store.clear(path, wanted)
        except store.TableError as error:
            print(f"{path} is left as it is: {error}")
    print(f"{count} choices deleted from {folder}")
    return 0


def _wanted(arguments):
    def wanted(entry):
        named = arguments.family in (None, entry.family) and (not arguments.direction or entry.direction in arguments.direction)
        return named and (entry.is_stale or not arguments.stale)

    return wanted
