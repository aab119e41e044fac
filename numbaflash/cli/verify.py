"""``numbaflash verify``: the order of checks of a careful engineer, on this machine and these shapes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

from .._version import __version__
from ..dispatch import FAMILIES
from . import calls, options
from .errors import CommandError, reported

CHECKS = ("meaning", "dispatch", "time", "memory", "accuracy", "service")
BUDGET = {"cpu": 80.0, "cuda": 220.0}


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "verify",
        help="check meaning, dispatch, time, memory and accuracy of your shapes on this machine",
        description="Checks, in this order: the same meaning as the float64 reference; which kernel runs, and why not a faster one; time after a "
        "warm-up of prefill, one-request decode and batched decode; peak memory; very long inputs and special masks; a small server. Exit status 1 "
        "when a check failed. Shapes come from options, from a model's config.json, or from a trace of numbaflash.record.",
    )
    calls.add_sources(parser)
    how = parser.add_argument_group("where and how")
    how.add_argument(
        "--library", choices=("numpy", "cupy", "torch", "jax"), help="whose arrays (default: torch or CuPy where they reach a GPU, else numpy)"
    )
    how.add_argument("--device", type=int, default=0, metavar="INDEX", help="CUDA device, where the library reaches one (default: %(default)s)")
    how.add_argument("--family", choices=FAMILIES, help="force a kernel family (default: the best that can)")
    how.add_argument("--budget", type=calls.seconds, metavar="SECONDS", help="time for all of it (default: 80 on the CPU, 220 on a GPU)")
    how.add_argument(
        "--check", type=options.names, metavar="NAMES", default=CHECKS, help=f"only these, of {', '.join(CHECKS)} (default: all of them)"
    )
    how.add_argument("--seed", type=int, default=0, help="of the random numbers (default: %(default)s)")
    result = parser.add_argument_group("report")
    result.add_argument("--json", metavar="FILE", help="write all findings and figures")
    result.add_argument("--html", metavar="FILE", help="write a page with plots, which needs no other file")
    return parser


def run(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    from .. import verify as verification
    from ..verify import report as shown
    from ..verify.findings import Report

    calls.check_sources(arguments)
    if unknown := set(arguments.check) - set(CHECKS):
        raise CommandError(f"--check must be of {', '.join(CHECKS)}; got {', '.join(sorted(unknown))}")
    with reported():
        for path in (arguments.json, arguments.html):
            _check_writable(path)
        place = verification.open_place(arguments.library, arguments.seed, arguments.device)
        wanted, source = calls.calls_of(arguments, place.device.kind)
        report = Report(arguments.budget or BUDGET[place.device.kind], say=lambda line: print(line, flush=True), began=began)
        report.settings = _settings(arguments, place, source, report.seconds)
        for name, x in report.settings.items():
            print(f"{name}: {x}")
        for call in wanted:
            print(f"  {call}" + (f" ({call.count} times)" if call.count > 1 else ""))
        print(flush=True)
        verification.verify(wanted, place, report, family=arguments.family, checks=arguments.check)
        print("", shown.table(report), sep="\n")
        if arguments.json:
            _write(arguments.json, json.dumps(report.to_dict(), indent=1, default=str) + "\n")
        if arguments.html:
            _write(arguments.html, shown.page(report))
    return 1 if report.failed or not any(finding.status in ("pass", "info") for finding in report.findings) else 0


def _settings(arguments, place, source, seconds):
    return {
        "numbaflash": f"{__version__}, Python {platform.python_version()}",
        "device": place.device.name if place.on_gpu else f"the CPU ({platform.machine()}, {platform.system()})",
        "arrays": place.library,
        "shapes": source,
        "family": arguments.family or "the best that can",
        "budget": f"{seconds:g} s",
        "seed": arguments.seed,
    }


def _check_writable(path):
    """Known before anything is computed."""
    if path is not None and (Path(path).is_dir() or not Path(path).resolve().parent.is_dir()):
        raise CommandError(f"{path} cannot be written: it must be a file in a folder that there is")


def _write(path, text):
    """The whole file or none."""
    beside = Path(f"{path}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
