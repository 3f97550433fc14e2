"""Finds launch parameters of the Triton kernels on the card at hand. One module per group of kernels, each with
`tune() -> {kernel: {key: config}}`; `python -m benchmarks.gpu_tune` runs them and writes the card's file."""
