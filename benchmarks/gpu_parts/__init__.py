"""The parts of `benchmarks/gpu.py`: shapes, floors, the engine under the clock, its peer, and the report."""
