"""The kernels. `reference.py` is plain torch and always right; fast kernels are tested against it."""
