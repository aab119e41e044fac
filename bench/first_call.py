"""One process of `bench.latency`: times the imports and the first calls, and prints them as one JSON object.

``python -m bench.first_call LIBRARY ARRAYS DTYPE BATCH,SEQLEN,HEADS,KV_HEADS,HEAD_DIM CAUSAL`` with ARRAYS "torch" or "cupy" and CAUSAL 0 or 1.
"""

from __future__ import annotations

import json
import sys
import time


def main(arguments) -> int:
    library, arrays, dtype, shape, causal = arguments
    batch, seqlen, heads, kv_heads, head_dim = map(int, shape.split(","))
    seconds = {}

    def timed(name, function):
        start = time.perf_counter()
        result = function()
        seconds[name] = time.perf_counter() - start
        return result

    def import_module(name):
        return timed(f"import {name}", lambda: __import__(name))

    if library == "numbaflash":
        import_module("numba")
        import_module("numbaflash")
    xp = import_module(arrays)

    def draw(heads):
        size = (batch, seqlen, heads, head_dim)
        if arrays == "torch":
            return xp.randn(size, device="cuda", dtype=getattr(xp, dtype))
        return xp.random.standard_normal(size, dtype="float32").astype(dtype)

    def synchronize():
        (xp.cuda.synchronize if arrays == "torch" else xp.cuda.Device().synchronize)()

    def operands():
        made = draw(heads), draw(kv_heads), draw(kv_heads)
        synchronize()
        return made

    q, k, v = timed("context and inputs", operands)
    if arrays == "torch":
        from numbaflash.benchmarks.peers import LIBRARIES

        bound = timed(f"import {library}", LIBRARIES[library]) if library != "numbaflash" else LIBRARIES[library]()
        scope, call = bound.scope(), bound.bind(q, k, v, causal == "1")
    else:
        from contextlib import nullcontext

        forward = sys.modules[library].forward
        scope, call = nullcontext(), lambda: forward(q, k, v, causal=causal == "1")

    def run():
        call()
        synchronize()

    with scope:
        timed("first call", run)
        timed("second call", run)
    print(json.dumps(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
