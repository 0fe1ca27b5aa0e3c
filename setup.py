# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: where patches/ is installed, and the native extensions."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

PATCHES = "adaptra_megatron.patches"

setup(
    packages=[*find_packages(include=["adaptra_megatron", "adaptra_megatron.*"]), PATCHES],
    package_dir={PATCHES: "patches"},
    ext_modules=[
        Pybind11Extension(
            "adaptra_megatron.schedule._native",
            sorted(glob("csrc/schedule/*.cpp")),
            depends=sorted(glob("csrc/schedule/*.hpp")),
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra", "-ffp-contract=off"],
        ),
        Pybind11Extension(
            "adaptra_megatron.transport._ring",
            sorted(glob("csrc/ring/*.cpp")),
            depends=sorted(glob("csrc/ring/*.hpp")),
            cxx_std=17,
            extra_compile_args=["-O3", "-Wall", "-Wextra"],
        ),
    ],
    cmdclass={"build_ext": build_ext},
)
