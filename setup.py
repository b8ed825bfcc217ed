"""Builds the native packing core. Without a compiler the package installs all the same and plans in Python."""

import glob
import os
import sys

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

REQUIRED = os.environ.get("MEGATRON_WLB_REQUIRE_NATIVE") == "1"


class BuildNative(build_ext):
    """Says loudly whether the native core was built."""

    def build_extension(self, extension: Pybind11Extension) -> None:
        try:
            super().build_extension(extension)
        except Exception as error:
            remedy = (
                "this build stops because MEGATRON_WLB_REQUIRE_NATIVE=1"
                if REQUIRED
                else "plans will come from the slower Python reference; install a C++17 compiler and build again, or "
                "set MEGATRON_WLB_REQUIRE_NATIVE=1 to make this an error"
            )
            print(f"megatron_wlb: NATIVE CORE NOT BUILT: {remedy} ({error})", file=sys.stderr)
            raise
        print("megatron_wlb: native core built", file=sys.stderr)


setup(
    ext_modules=[
        Pybind11Extension(
            "megatron_wlb._native",
            sorted(glob.glob("csrc/*.cpp")),
            depends=glob.glob("csrc/*.h"),
            cxx_std=17,
            # Python and C++ must round alike, so no fused multiply-add.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            optional=not REQUIRED,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
