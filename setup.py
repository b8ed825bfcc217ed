"""Builds the cores of planning, which are in C++."""

import glob
import sys

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build_py import build_py

# pip 23 tries older and older releases of numpy for minutes before it looks at requires-python.
if sys.version_info < (3, 12):  # noqa: UP036
    sys.exit(f"megatron_wlb needs Python 3.12 or newer, and this is {sys.version.split()[0]}; install with a newer one")


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


class WithHook(build_py):
    """Brings the hook of Python's start, beside the package, which an editable install has not."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file("megatron_wlb_hook.pth", self.build_lib)


ParallelCompile(default=0).install()  # on all cores
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
    cmdclass={"build_ext": BuildNative, "build_py": WithHook},
)
