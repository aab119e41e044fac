"""Options that several commands share, spelled and meant as the keyword arguments of `numbaflash.forward`."""

from __future__ import annotations

import argparse
import re

from ..dispatch import FAMILIES
from ..problem import DTYPES


def add_attention(parser: argparse.ArgumentParser) -> None:
    """--causal, --top-left, --window, --scale."""
    group = parser.add_argument_group("attention")
    group.add_argument("--causal", action="store_true", help="query i sees key j where j <= i + seqlen_k - seqlen_q (aligned at the bottom right)")
    group.add_argument("--top-left", action="store_true", help="causal, aligned at the top left: query i sees key j where j <= i")
    group.add_argument(
        "--window",
        type=window,
        metavar="LEFT,RIGHT",
        help='keys seen to the left and to the right, inclusive; "none" is unbounded, for example 128,0 or 128,none',
    )
    group.add_argument("--scale", type=float, help="factor of the scores (default: 1/sqrt(head_dim))")


def attention(arguments: argparse.Namespace) -> dict:
    """Keyword arguments of `numbaflash.forward`."""
    return {"scale": arguments.scale, "causal": "top_left" if arguments.top_left else arguments.causal, "window": arguments.window}


def add_choice(parser: argparse.ArgumentParser, *, device: str, device_help: str, dtype: str | None = None) -> None:
    """--dtype, --family, --device."""
    group = parser.add_argument_group("where and how")
    group.add_argument("--dtype", choices=DTYPES, default=dtype, help=f"element type of the computation{f' (default: {dtype})' if dtype else ''}")
    group.add_argument("--family", choices=FAMILIES, help="force a kernel family (default: the best that can)")
    group.add_argument("--device", type=device_name, default=device, metavar="DEVICE", help=f"{device_help} (default: {device})")


def add_shape(parser: argparse.ArgumentParser, *, seqlen: int, heads: int, head_dim: int) -> None:
    """--batch, --seqlen-q, --seqlen-k, --heads, --kv-heads, --head-dim, --head-dim-v."""
    group = parser.add_argument_group("shape")
    group.add_argument("--batch", type=int, default=1, help="default: %(default)s")
    group.add_argument("--seqlen-q", type=int, default=seqlen, help="queries (default: %(default)s)")
    group.add_argument("--seqlen-k", type=int, help="keys (default: as many as queries)")
    group.add_argument("--heads", type=int, default=heads, help="query heads (default: %(default)s)")
    group.add_argument("--kv-heads", type=int, help="key and value heads (default: as many as query heads)")
    group.add_argument("--head-dim", type=int, default=head_dim, help="of q and k (default: %(default)s)")
    group.add_argument("--head-dim-v", type=int, help="of v (default: that of q and k)")


def shapes(arguments: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shapes of q, k and v."""

    def default(value, other):
        return other if value is None else value

    seqlen_k = default(arguments.seqlen_k, arguments.seqlen_q)
    kv_heads = default(arguments.kv_heads, arguments.heads)
    head_dim_v = default(arguments.head_dim_v, arguments.head_dim)
    return (
        (arguments.batch, arguments.seqlen_q, arguments.heads, arguments.head_dim),
        (arguments.batch, seqlen_k, kv_heads, arguments.head_dim),
        (arguments.batch, seqlen_k, kv_heads, head_dim_v),
    )


def window(text: str) -> tuple[int | None, int | None]:
    parts = [part.strip() for part in text.split(",")]
    try:
        left, right = (None if part.lower() == "none" else int(part) for part in parts)
    except ValueError:
        raise argparse.ArgumentTypeError(f'must be LEFT,RIGHT, each an integer or "none"; got {text!r}') from None
    return left, right


def device_name(text: str) -> str:
    """Check the spelling of a device; which spellings a command takes is for the command to say."""
    text = text.lower()
    kind, _, index = text.partition(":")
    if text in ("cpu", "auto", "cuda") or (kind == "cuda" and index.isdecimal()) or re.fullmatch(r"sm_\d{2,3}a?", text):
        return "cuda:0" if text == "cuda" else text
    raise argparse.ArgumentTypeError(f"must be cpu, cuda:INDEX or a GPU architecture such as sm_90; got {text!r}")
