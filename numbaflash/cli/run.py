"""``numbaflash run``: attention of arrays in files."""

from __future__ import annotations

import argparse
import time

from ..files import OPTIONS
from . import options
from .errors import CommandError, reported


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "run",
        help="attention of q, k and v from files",
        description="Attention of q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, kv_heads, head_dim) from files. "
        f"Arrays named {', '.join(OPTIONS)} beside them are options, and are used. The result appears complete or not at all.",
    )
    parser.add_argument(
        "input",
        nargs="+",
        metavar="INPUT",
        help="one .npz or .safetensors file that holds q, k, v and options, or .npy files: q k v, then options named as mask.npy",
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="where the result goes: .npz or .safetensors (array out), or .npy")
    parser.add_argument("--lse", action="store_true", help="also write lse, the log-sum-exp of the scores of each row")
    options.add_attention(parser)
    options.add_choice(parser, device="cpu", device_help="cpu or cuda:INDEX")
    return parser


def run(arguments: argparse.Namespace) -> int:
    from .. import api, files
    from ..dispatch import use_family
    from .devices import open_device

    if arguments.device.startswith("sm_") or arguments.device == "auto":
        raise CommandError(f"run computes on cpu or cuda:INDEX; got --device {arguments.device}")
    with reported():
        target = files.check_output(arguments.out, inputs=arguments.input, want_lse=arguments.lse)
        arrays = files.load(arguments.input)
        if arguments.dtype is not None:
            arrays = {name: array.astype(files.dtype_of(_dtype(name, array, arguments.dtype)), copy=False) for name, array in arrays.items()}
        device = open_device(arguments.device)
        given = {name: device.put(array) for name, array in arrays.items()}
        start = time.perf_counter()
        with use_family(arguments.family):
            out, lse = api.forward(**given, return_lse=True, seed=arguments.seed, **options.attention(arguments))
        results = {"out": device.get(out)}
        seconds = time.perf_counter() - start
        if arguments.lse:
            results["lse"] = device.get(lse)
        files.save(target, results)
    shape = "x".join(map(str, results["out"].shape))
    dtype = results["out"].dtype.name
    used = ", ".join(name for name in OPTIONS if name in arrays)
    where = f"{seconds:.3f} s on {device.name}, kernel build included"
    print(f"wrote {target} ({', '.join(results)}): out {shape} {dtype}{f', with {used}' if used else ''}, {where}")
    return 0


def _dtype(name: str, array, dtype: str) -> str:
    """Of an array in a computation in ``dtype``: what is not q, k or v keeps its own where it may."""
    wide = "float64" if dtype == "float64" else "float32"
    if name == "sinks" or (name == "bias" and array.dtype.name == "float64"):
        return wide
    return array.dtype.name if name in OPTIONS else dtype
