"""Native kernels for packed weights on a CPU: `native/` is their C++, compiled by `build.py` at installation.

`library.py` loads them and says why not where that fails; `linear.py` calls them. Importing this package loads nothing.
"""
