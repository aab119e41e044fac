"""Options that several commands share, spelled and meant as the keyword arguments of `numbaflash.forward`."""

from __future__ import annotations

import argparse
import re

from ..dispatch import FAMILIES
from ..problem import DECODE_FEATURES, DTYPES, FORWARD_OPTIONS, LENGTH_DTYPES, PACKED, Problem, make_decode_problem, make_packed_problem, make_problem
from ..support import described_options
from .errors import CommandError


def add_attention(parser: argparse.ArgumentParser) -> None:
    """--causal, --top-left, --window, --scale, --softcap, --dropout, --seed."""
    group = parser.add_argument_group("attention")
    group.add_argument("--causal", action="store_true", help="query i sees key j where j <= i + seqlen_k - seqlen_q (aligned at the bottom right)")
    group.add_argument("--top-left", action="store_true", help="causal, aligned at the top left: query i sees key j where j <= i")
    group.add_argument(
        "--window",
        type=window,
        metavar="LEFT,RIGHT",
        help='keys seen to the left and to the right, inclusive; "none" is unbounded, for example 128,0 or 128,none',
    )
    add_numbers(group)
    group.add_argument("--seed", type=int, help="of the dropout mask, needed with --dropout: the same seed drops the same weights")


def add_numbers(group) -> None:
    """--scale, --softcap, --dropout."""
    group.add_argument("--scale", type=float, help="factor of the scores (default: 1/sqrt(head_dim))")
    group.add_argument("--softcap", type=float, help="scores become SOFTCAP * tanh(score / SOFTCAP) (default: no cap)")
    group.add_argument("--dropout", type=float, default=0.0, metavar="P", help="probability that a weight is dropped, below 1 (default: %(default)s)")


def attention(arguments: argparse.Namespace) -> dict:
    """Keyword arguments of `numbaflash.forward` that are numbers, but for the seed."""
    causal = "top_left" if arguments.top_left else arguments.causal
    return {name: getattr(arguments, name) for name in ("scale", "window", "softcap", "dropout")} | {"causal": causal}


def add_arrays(parser: argparse.ArgumentParser) -> None:
    """--mask, --block-mask, --bias, --alibi-slopes, --sinks, --seqlens-q, --seqlens-k: which arrays there are, without their values."""
    group = parser.add_argument_group("arrays beyond q, k and v")
    broadcast = "of up to 4 axes that broadcast to batch,heads,seqlen_q,seqlen_k (without a SHAPE: seqlen_q,seqlen_k"
    masks = group.add_mutually_exclusive_group()
    masks.add_argument("--mask", type=shape, nargs="?", const=True, metavar="SHAPE", help=f"bool, {broadcast})")
    masks.add_argument("--block-mask", action="store_true", help="a mask that is a BlockMask, one for all heads and batch entries")
    group.add_argument(
        "--bias", type=_shape_and_dtype, nargs="?", const=True, metavar="SHAPE[:DTYPE]", help=f"{broadcast}; without a DTYPE: that of q)"
    )
    group.add_argument("--alibi-slopes", action="store_true", help="a slope a head")
    group.add_argument("--sinks", action="store_true", help="a sink a head")
    for name, what in (("q", "queries"), ("k", "keys")):
        group.add_argument(f"--seqlens-{name}", choices=LENGTH_DTYPES, nargs="?", const="int32", help=f"lengths of {what} in a padded batch")


def arrays(arguments: argparse.Namespace) -> dict:
    """The arrays of `add_arrays` that there are, as `numbaflash.support.described_options` takes them."""
    found = {name: getattr(arguments, name) for name in ("block_mask", "alibi_slopes", "sinks")}
    if arguments.mask is not None:
        found["mask"] = arguments.mask is True or (arguments.mask, "bool")
    if arguments.bias is not None:
        found["bias"] = arguments.bias
    for name in ("seqlens_q", "seqlens_k"):
        if getattr(arguments, name) is not None:
            found[name] = ((arguments.batch,), getattr(arguments, name))
    return found


def add_choice(parser: argparse.ArgumentParser, *, device: str, device_help: str, dtype: str | None = None) -> None:
    """--dtype, --family, --device."""
    group = parser.add_argument_group("where and how")
    group.add_argument("--dtype", choices=DTYPES, default=dtype, help=f"element type of the computation{f' (default: {dtype})' if dtype else ''}")
    group.add_argument("--family", choices=FAMILIES, help="force a kernel family (default: the best that can)")
    group.add_argument("--device", type=device_name, default=device, metavar="DEVICE", help=f"{device_help} (default: {device})")


def add_shape(parser: argparse.ArgumentParser, *, seqlen: int, heads: int, head_dim: int) -> None:
    """--batch, --seqlen-q, --seqlen-k, --heads, --kv-heads, --head-dim, --head-dim-v, and those of packed sequences."""
    group = parser.add_argument_group("shape")
    group.add_argument("--batch", type=int, default=1, help="batch entries, or how many packed sequences there are (default: %(default)s)")
    group.add_argument("--seqlen-q", type=int, help=f"queries (default: {seqlen})")
    group.add_argument("--seqlen-k", type=int, help="keys (default: as many as queries)")
    group.add_argument("--heads", type=int, default=heads, help="query heads (default: %(default)s)")
    group.add_argument("--kv-heads", type=int, help="key and value heads (default: as many as query heads)")
    group.add_argument("--head-dim", type=int, default=head_dim, help="of q and k (default: %(default)s)")
    group.add_argument("--head-dim-v", type=int, help="of v (default: that of q and k)")
    packed = parser.add_argument_group("packed sequences", "In place of --seqlen-q and --seqlen-k.")
    packed.add_argument("--total-q", type=int, metavar="N", help="queries of all sequences")
    packed.add_argument("--total-k", type=int, metavar="N", help="keys of all sequences (default: as many as queries)")
    packed.add_argument("--max-seqlen-q", type=int, metavar="N", help="queries of the longest sequence (default: not told)")
    packed.add_argument("--max-seqlen-k", type=int, metavar="N", help="keys of the longest sequence (default: not told)")
    packed.add_argument("--cu-seqlens", choices=LENGTH_DTYPES, help="dtype of the boundaries (default: int32)")
    parser.set_defaults(usual_seqlen=seqlen)


def shapes(arguments: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of q, k and v: of 4 axes, or of 3 for packed sequences."""
    packed = arguments.total_q is not None
    refused = ("seqlen_q", "seqlen_k") if packed else ("total_k", "max_seqlen_q", "max_seqlen_k", "cu_seqlens")
    given = ", ".join(f"--{name.replace('_', '-')}" for name in refused if getattr(arguments, name) is not None)
    if given:
        raise CommandError(f"packed sequences (--total-q) have no {given}" if packed else f"{given}: for packed sequences alone, add --total-q")

    def default(value, other):
        return other if value is None else value

    batch = () if packed else (arguments.batch,)
    rows_q = arguments.total_q if packed else default(arguments.seqlen_q, arguments.usual_seqlen)
    rows_k = default(arguments.total_k if packed else arguments.seqlen_k, rows_q)
    kv_heads = default(arguments.kv_heads, arguments.heads)
    head_dim_v = default(arguments.head_dim_v, arguments.head_dim)
    return (
        (*batch, rows_q, arguments.heads, arguments.head_dim),
        (*batch, rows_k, kv_heads, arguments.head_dim),
        (*batch, rows_k, kv_heads, head_dim_v),
    )


def problem(arguments: argparse.Namespace) -> Problem:
    """The problem of the options of `add_shape`, `add_attention`, `add_arrays` and --dtype."""
    of_operands = shapes(arguments)
    given = attention(arguments) | described_options(arrays(arguments), of_operands, arguments.dtype)
    if arguments.total_q is None:
        return make_problem(*of_operands, (arguments.dtype,) * 3, **given)
    boundaries = dict.fromkeys(PACKED, ((arguments.batch + 1,), arguments.cu_seqlens or "int32"))
    longest = {name: getattr(arguments, name) for name in ("max_seqlen_q", "max_seqlen_k")}
    return make_packed_problem(*of_operands, (arguments.dtype,) * 3, **given, **boundaries, **longest)


def cache_problem(arguments: argparse.Namespace) -> Problem:
    """The same with keys and values in caches, of --page-size keys a page where that is given."""
    if arguments.total_q is not None:
        raise CommandError("--decode has no packed sequences; leave --total-q out")
    size, keys = arguments.page_size, arguments.usual_seqlen if arguments.seqlen_k is None else arguments.seqlen_k
    if size is not None and size < 1:
        raise CommandError(f"--page-size must be at least 1; got {size}")
    new = argparse.Namespace(**vars(arguments) | {"seqlen_q": 1 if arguments.seqlen_q is None else arguments.seqlen_q, "seqlen_k": keys})
    q, *caches = shapes(new)
    told = attention(new) | described_options(arrays(new) | {"seqlens_k": ((new.batch,), new.seqlens_k or "int32")}, (q, *caches), new.dtype)
    if not told.pop("dropout"):
        others = [f"--{name.replace('_', '-')}" for name in told if name in FORWARD_OPTIONS and name not in DECODE_FEATURES]
    else:
        others = ["--dropout"]
    if others:
        raise CommandError(f"--decode has no {', '.join(others)}")
    if size is not None:
        entries = -(-keys // size)
        caches = [(new.batch * entries, size, *shape[2:]) for shape in caches]
        told["page_table"] = ((new.batch, entries), "int32")
    return make_decode_problem(q, *caches, (new.dtype,) * 3, **told)


def window(text: str) -> tuple[int | None, int | None]:
    parts = [part.strip() for part in text.split(",")]
    try:
        left, right = (None if part.lower() == "none" else int(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be LEFT,RIGHT, each an integer or "none"; got {text!r}') from None
    return left, right


def shape(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise argparse.ArgumentTypeError(f"must be a shape such as 1024,1024 or 8,1,1,1024; got {text!r}")
    return tuple(map(int, text.split(",")))


def names(text: str) -> tuple[str, ...]:
    """Words between commas; which ones a command takes is for the command to say."""
    return tuple(part.strip() for part in text.split(","))


def _shape_and_dtype(text: str) -> tuple[tuple[int, ...], str | None]:
    sizes, _, dtype = text.partition(":")
    if dtype and dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"must have a dtype of {', '.join(DTYPES)} after the colon; got {dtype!r}")
    return shape(sizes), dtype or None


def device_name(text: str) -> str:
    """Check the spelling of a device; which spellings a command takes is for the command to say."""
    text = text.lower()
    kind, _, index = text.partition(":")
    if text in ("cpu", "auto", "cuda") or (kind == "cuda" and index.isdecimal()) or re.fullmatch(r"sm_\d{2,3}a?", text):
        return "cuda:0" if text == "cuda" else text
    raise argparse.ArgumentTypeError(f"must be cpu, cuda:INDEX or a GPU architecture such as sm_90; got {text!r}")
