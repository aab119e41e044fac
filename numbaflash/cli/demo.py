"""``numbaflash demo``: one problem of a real size, beside the dense computation, and the block merge in numbers."""

from __future__ import annotations

import argparse
import importlib.util

from ..measuring import bytes_text, seconds, seconds_text
from . import options
from .errors import CommandError, reported

CPU_SIZE = {"batch": 1, "seqlen": 4096, "heads": 8, "head_dim": 64, "dtype": "float32"}
GPU_SIZE = {"batch": 1, "seqlen": 8192, "heads": 16, "head_dim": 128, "dtype": "bfloat16"}


def add_parser(commands) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "demo",
        help="attention of a real size beside the dense computation",
        description="Computes one attention problem of a real size on random data, compares it with the dense computation in values, time "
        "and peak memory, and shows that results over parts of the keys merge into the whole.",
    )
    group = parser.add_argument_group("shape (defaults: {batch} x {seqlen} x {heads} x {head_dim} on the CPU)".format(**CPU_SIZE))
    for name in ("batch", "seqlen", "heads", "head_dim"):
        group.add_argument(f"--{name.replace('_', '-')}", type=positive, help=f"default: {CPU_SIZE[name]} on the CPU, {GPU_SIZE[name]} on a GPU")
    group.add_argument("--full", action="store_true", help="every query sees every key (default: causal)")
    parser.add_argument("--repeats", type=positive, default=3, help="timed runs, of which the median counts (default: %(default)s)")
    options.add_choice(parser, device="auto", device_help="cpu, cuda:INDEX, or auto: the first GPU that an installed library sees, else the CPU")
    return parser


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {value}")
    return value


def run(arguments: argparse.Namespace) -> int:
    import numpy as np

    from .. import api, files
    from ..dispatch import use_family

    size, device = _size_and_device(arguments)
    shape = (size["batch"], size["seqlen"], size["heads"], size["head_dim"])
    causal = not arguments.full
    rng = np.random.default_rng(0)
    with reported():
        dtype = files.dtype_of(size["dtype"])
        host = [rng.standard_normal(shape, np.float32).astype(dtype, copy=False) for _ in range(3)]
        q, k, v = (device.put(x) for x in host)
        sizes = " x ".join(map(str, shape))
        kind = f"{size['dtype']}, {'causal' if causal else 'full'}"
        print(f"Attention of {sizes} (batch x seqlen x heads x head_dim), {kind}, on {device.name}, {device.library} arrays\n", flush=True)
        with use_family(arguments.family):

            def flash():
                return api.forward(q, k, v, causal=causal, return_lse=True)

            first = seconds(flash, device.synchronize, repeats=1)
            print(api.explain(q, k, v, causal=causal, return_lse=True), "\n", sep="")
            out, lse, flash_row = _measured(flash, device, arguments.repeats)
            print(f"{'':12}{'time':>12}{'peak memory':>16}   (memory on top of q, k, v; first call {seconds_text(first)})")
            print(f"{'numbaflash':12}{flash_row[0]:>12}{flash_row[1]:>16}")
            ok = _compare_dense(device, (q, k, v), out, causal, arguments.repeats, size["dtype"])
            return 0 if _merge(device, (q, k, v), out, lse, causal, size["dtype"]) and ok else 1


def _size_and_device(arguments):
    """Sizes the person did not give come from the kind of device."""
    from .devices import Cpu, open_device

    given = {name: getattr(arguments, name) for name in CPU_SIZE if getattr(arguments, name) is not None}
    if arguments.device.startswith("sm_"):
        raise CommandError(f"demo computes on cpu, cuda:INDEX or auto; got --device {arguments.device}")
    if arguments.device == "auto":
        try:
            device = open_device("cuda:0")
        except CommandError:
            device = Cpu()
    else:
        device = open_device(arguments.device)
    size = CPU_SIZE if device.name == "cpu" else GPU_SIZE
    if importlib.util.find_spec("ml_dtypes") is None:  # without which NumPy, where the data comes from, has no bfloat16
        size = size | {"dtype": size["dtype"].replace("bfloat16", "float16")}
    return size | given, device


def _measured(call, device, repeats):
    """Results of `call` and the two cells of its row."""
    with device.peak_bytes() as peak:
        result = call()
        device.synchronize()
    result_seconds = seconds(call, device.synchronize, repeats=repeats)
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out, lse, (seconds_text(result_seconds), bytes_text(peak.get("bytes")))


def _compare_dense(device, operands, out, causal, repeats, dtype) -> bool:
    import numpy as np

    q, k, v = operands
    batch, seqlen, heads, head_dim = q.shape
    if device.dense is None:
        print(f"{'dense':12}not computed: {device.library} arrays have no matrix product (install CuPy or PyTorch)")
        return True
    score_bytes = batch * heads * seqlen * seqlen * max(4, q.dtype.itemsize)
    free = device.free_bytes()
    if free is not None and 3 * score_bytes > free:
        print(f"{'dense':12}not computed: its scores alone take {bytes_text(score_bytes)}, {bytes_text(free)} are free")
        return True
    seen = np.tri(seqlen, dtype=bool) if causal else None

    def dense():
        return device.dense(q, k, v, seen, head_dim**-0.5)

    want, _, row = _measured(dense, device, repeats)
    print(f"{'dense':12}{row[0]:>12}{row[1]:>16}")
    error = _largest_difference(device.get(out), device.get(want))
    limit = _limit(dtype)
    verdict = "within" if error <= limit else "ABOVE"
    print(f"\nLargest difference between the two: {error:.1e}, {verdict} the {limit:.0e} that rounding to {dtype} allows")
    return error <= limit


def _merge(device, operands, out, lse, causal, dtype) -> bool:
    """Attention over each half of the keys, merged, against attention over all keys."""
    from .. import api

    q, k, v = operands
    batch, seqlen, heads, _ = q.shape
    half = seqlen // 2
    # Query i stands beside key i of the first half, and beside key i - half of the second: the first is aligned at the
    # top left, the second at the bottom right.
    parts = [
        api.forward(q, k[:, :half], v[:, :half], causal="top_left" if causal else False, return_lse=True),
        api.forward(q, k[:, half:], v[:, half:], causal=causal, return_lse=True),
    ]
    merged_out, merged_lse = api.merge([part[0] for part in parts], [part[1] for part in parts])
    print(f"\nOnline softmax: keys 0..{half - 1} and keys {half}..{seqlen - 1} computed apart, then merged by their (out, lse)")
    print(f"{'':28}{'lse':>12}{'out[0..2]':>32}")
    for row in sorted({0, half - 1, seqlen - 1}):
        for label, some_out, some_lse in (
            (f"query {row}: first half", *parts[0]),
            ("second half", *parts[1]),
            ("merged", merged_out, merged_lse),
            ("all keys at once", out, lse),
        ):
            values = " ".join(f"{float(x):10.6f}" for x in device.get(some_out[:1, row : row + 1, :1, :3]).reshape(-1))
            print(f"{label:>28}{float(device.get(some_lse[:1, :1, row : row + 1]).reshape(-1)[0]):12.6f}{values:>32}")
    out_error = _largest_difference(device.get(merged_out), device.get(out))
    lse_error = _largest_difference(device.get(merged_lse), device.get(lse))
    limit = _limit(dtype)
    good = out_error <= limit and lse_error <= max(limit, 1e-5)
    print(f"Largest difference over all rows: out {out_error:.1e}, lse {lse_error:.1e}: {'the halves make the whole' if good else 'TOO LARGE'}")
    return good


def _largest_difference(got, want) -> float:
    import numpy as np

    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    return float(difference.max(initial=0.0, where=np.isfinite(want.astype(np.float64)) | np.isfinite(got.astype(np.float64))))


def _limit(dtype: str) -> float:
    """Largest difference that two correct results of standard normal data may show: two roundings of an output below 8."""
    return {"float64": 1e-12, "float32": 1e-5, "float16": 8e-3, "bfloat16": 6e-2}[dtype]
