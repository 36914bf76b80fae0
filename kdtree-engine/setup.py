"""Makes the wheel carry the kernel library where `kd build` has put one.

With it the wheel fits any Python 3 on this platform, as the library's interface is not Python's.
Without it the wheel is pure: the oracle and the CPU implementation run anywhere.
"""

from __future__ import annotations

import pathlib

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.dist import Distribution

LIBRARY = pathlib.Path(__file__).parent / "kdtree_engine" / "lib" / "libkdtree_engine.so"


class EngineDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return LIBRARY.is_file()


class EngineWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if LIBRARY.is_file() else (python, abi, platform)


setup(distclass=EngineDistribution, cmdclass={"bdist_wheel": EngineWheel})
