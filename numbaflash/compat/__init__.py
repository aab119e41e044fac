"""Other libraries' attention by their own names and signatures, on these kernels: one module a library, imported by name.

`numbaflash.compat.flash_attn`, `numbaflash.compat.xformers`, `numbaflash.compat.transformers`; all for PyTorch. None of those libraries needs
to be installed but transformers, for its own module.
"""

from __future__ import annotations
