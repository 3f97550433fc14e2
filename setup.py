"""Compiles the CPU's kernels while the package is built; all else about the package is in pyproject.toml.

Without a C++ compiler, or where compiling fails, the package is built without them and says so: the reference runs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("src/tidemill/ops/cpu")


def kernels() -> ModuleType:
    """The module that compiles, taken from its file: the package cannot be imported yet."""
    spec = importlib.util.spec_from_file_location("tidemill_kernels", Path(__file__).parent / KERNELS / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        module = kernels()
        into = Path(__file__).parent / KERNELS if self.editable_mode else Path(self.build_lib, "tidemill/ops/cpu")
        try:
            module.build(into)
        except module.NoLibrary as reason:
            print(f"warning: the CPU's kernels are not compiled, slower ones will run: {reason}", file=sys.stderr)


class WithLibrary(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class WheelOfOnePlatform(bdist_wheel):
    """The library is of one platform, but of no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=WithLibrary, cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelOfOnePlatform})
