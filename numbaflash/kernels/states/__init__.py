"""Merging states of the online softmax: ``kernel`` is it on GPUs, ``launch`` prepares it."""
