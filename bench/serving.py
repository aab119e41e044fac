"""What attention is worth to those who wait for tokens: ``python -m bench.serving``.

A small transformer (random weights) serves requests that arrive at random times: continuous batching, prompts in chunks, a paged cache, steps of
answers in CUDA graphs. The same loop runs with numbaflash, with the fastest of torch's back ends, and without any attention; what is still spent then
bounds what any attention could gain (Amdahl's law), and is printed beside what was gained. Engines take turns, with the same arrivals.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from numbaflash.benchmarks import gpu, records

PROGRAM, BENCH = "bench.serving", "serving"
BOUND = "none"


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(PROGRAM, description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of a prompt (%(default)s)")
    parser.add_argument("--answer", type=int, default=128, help="tokens of an answer (%(default)s)")
    parser.add_argument("--rate", type=float, default=16.0, help="requests a second on average, a Poisson process (%(default)s)")
    parser.add_argument("--slots", type=int, default=32, help="requests that are answered at once (%(default)s)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt between two steps of answers (%(default)s)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", default="16/4", help="query heads and key/value heads (%(default)s)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--engines", default="numbaflash,torch,none", help="in turns (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", type=float, default=1.0, help="limit of a good request: seconds to the first token (%(default)s)")
    parser.add_argument("--token", type=float, default=0.05, help="limit of a good request: seconds a token after it (%(default)s)")
    parser.add_argument("--no-graphs", action="store_true", help="launch steps of answers one kernel at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="folder of the result (bench/results)")
    parser.add_argument("--commit", help="commit to note where there is no git")
    options = parser.parse_args(arguments)
    heads, _, kv_heads = options.heads.partition("/")
    if not heads.isdigit() or not (kv_heads or heads).isdigit():
        parser.error(f"heads must be like 16/4; got {options.heads}")
    options.heads, options.kv_heads = int(heads), int(kv_heads or heads)
    options.engines = options.engines.split(",")
    for name in options.engines:
        if name not in ("numbaflash", "torch", BOUND):
            parser.error(f"engines must be of numbaflash, torch and none; got {name}")
    return options


def measure(options, device="cuda", dtype=None, say=print) -> dict[str, list[dict]]:
    """The figures of each engine, a dict a round."""
    import torch

    from numbaflash import service

    shape = service.Shape(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        feed_forward=options.hidden * 11 // 4,
    )
    load = service.Load(options.requests, options.prompt, options.answer, options.rate, options.seed)
    limits, capacity = service.Limits(options.first, options.token), options.prompt + options.answer
    model = service.Model(shape, capacity, device, dtype or torch.bfloat16, options.seed)
    servers, figures = {}, {}
    for name in options.engines:
        try:
            engine = service.ENGINES[name](model, options.slots, capacity)
            servers[name] = service.Server(model, engine, options.chunk, not options.no_graphs)
            servers[name].warm_up(load)
        except (RuntimeError, NotImplementedError) as error:
            say(f"{name}: left out, {type(error).__name__}: {str(error).splitlines()[0]}")
            servers.pop(name, None)
            continue
        figures[name] = []
    for _ in range(options.rounds):
        for name, server in servers.items():
            requests = service.arrivals(load, shape.vocabulary)
            seconds = server.run(requests)
            figures[name].append(
                service.summarise(requests, seconds, limits) | {"backend": getattr(getattr(server.engine, "backend", None), "name", None)}
            )
    return figures


QUANTITIES = (("ttft", "p50"), ("ttft", "p90"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p90"), ("tpot", "p99"), "throughput", "goodput", "errors")


def value(round_figures: dict, quantity):
    return round_figures[quantity[0]][quantity[1]] if isinstance(quantity, tuple) else round_figures[quantity]


def median(rounds: list[dict], quantity):
    found = [x for x in (value(each, quantity) for each in rounds) if x is not None]
    return statistics.median(found) if found else None


def table(figures: dict[str, list[dict]]) -> str:
    """Medians over the rounds, what was gained, and the bound."""
    heads = ["engine", *(" ".join(q) if isinstance(q, tuple) else q for q in QUANTITIES)]
    rows = [[name, *(_shown(median(rounds, q)) for q in QUANTITIES)] for name, rounds in figures.items()]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]
    return "\n".join([*lines, *gains(figures)])


def gains(figures) -> list[str]:
    """What numbaflash gains over torch in each time, and what no attention at all would."""
    if "numbaflash" not in figures or "torch" not in figures:
        return []
    lines = []
    for quantity in (("ttft", "p50"), ("tpot", "p50")):
        ours, torchs = median(figures["numbaflash"], quantity), median(figures["torch"], quantity)
        if ours is None or torchs is None:
            continue
        line = f"{quantity[0]} {quantity[1]}: {torchs / ours:.2f} times as fast with numbaflash as with torch"
        least = median(figures[BOUND], quantity) if BOUND in figures else None
        if least:
            line += (
                f"; without any attention {torchs / least:.2f} times (attention is {1 - least / torchs:.0%} of the time with torch, "
                f"{1 - least / ours:.0%} with numbaflash)"
            )
        lines.append(line)
    return lines


def _shown(x) -> str:
    return "-" if x is None else f"{x:.3g}"


def to_records(options, figures, fields) -> list[dict]:
    """A record for each engine, round and quantity."""
    found = []
    for name, rounds in figures.items():
        for number, each in enumerate(rounds):
            for quantity in QUANTITIES:
                x = value(each, quantity)
                label = " ".join(quantity) if isinstance(quantity, tuple) else quantity
                found.append(
                    {
                        "bench": BENCH,
                        "direction": "decode",
                        "dtype": "bfloat16",
                        "batch": options.slots,
                        "seqlen_q": 1,
                        "seqlen_k": options.prompt + options.answer,
                        "heads": options.heads,
                        "kv_heads": options.kv_heads,
                        "head_dim": options.head_dim,
                        "head_dim_v": options.head_dim,
                        "causal": True,
                        "library": name,
                        "version": fields.get("torch", ""),
                        "ms": None,
                        "tflops": None,
                        "quantity": label,
                        "unit": "ms"
                        if isinstance(quantity, tuple)
                        else {"throughput": "tokens/s", "goodput": "requests/s", "errors": "share"}[quantity],
                        "value": x,
                        "round": number,
                        "backend": each["backend"],
                        **fields,
                    }
                )
    return found


def main(arguments=None) -> int:
    options = parse(arguments)
    reason = gpu.missing()
    if reason:
        return gpu.refuse(PROGRAM, reason)
    try:
        figures = measure(options)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    fields = (
        records.gpu_fields() | records.run_fields(options.commit) | {"load": {k: v for k, v in vars(options).items() if k not in ("out", "commit")}}
    )
    print(table(figures))
    path = records.write(records.result_path(fields["gpu"], BENCH, options.out), to_records(options, figures, fields))
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
