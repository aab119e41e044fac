"""Writing to caches of keys and values: `host` on the CPU, `kernel` on GPUs, and `launch`, which prepares it."""
