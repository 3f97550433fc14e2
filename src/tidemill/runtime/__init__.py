"""Executes steps on a device: loading, rows, the KV cache, the runner and the sampler."""
