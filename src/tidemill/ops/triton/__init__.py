"""The GPU's kernels, in Triton. Each is specified in `ops/reference.py`, and runs in Triton's interpreter too."""
