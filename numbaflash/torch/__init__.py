"""PyTorch: attention that autograd differentiates, in eager mode and inside torch.compile, and torch's own attention by another name.

Eager calls go through an ``autograd.Function`` straight to the kernels. Where torch records what is done (torch.compile, make_fx,
torch.jit.trace, dispatch modes), the same two steps are custom operators, which it keeps in its graph as they are.

``functions`` is what users call, ``autograd`` the eager road, ``operators`` the recorded one and ``decoding`` that of
`decode`, ``nested`` goes from jagged tensors to packed sequences, and ``sdpa`` is torch's own attention.
"""

from __future__ import annotations

from .functions import attention, attention_varlen
from .sdpa import replace_sdpa, scaled_dot_product_attention

__all__ = ["attention", "attention_varlen", "replace_sdpa", "scaled_dot_product_attention"]
