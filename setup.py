"""Builds the cores of planning, which are in C++."""

import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup


class BuildNative(build_ext):
    """Says what a build that fails most often lacks."""

    def build_extension(self, extension: Pybind11Extension) -> None:
        try:
            super().build_extension(extension)
        except Exception as error:
            raise RuntimeError(
                f"megatron_wlb plans in C++, and that was not built ({error}); it needs a C++17 compiler: install one, "
                "e.g. apt-get install g++, then install again"
            ) from error


setup(
    ext_modules=[
        Pybind11Extension(
            "megatron_wlb._native",
            sorted(glob.glob("csrc/*.cpp")),
            depends=glob.glob("csrc/*.h"),
            cxx_std=17,
            # The references of the tests round alike, so no fused multiply-add.
            extra_compile_args=["-O3", "-ffp-contract=off"],
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
