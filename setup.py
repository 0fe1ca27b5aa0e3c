# SPDX-License-Identifier: Apache-2.0
"""What pyproject.toml cannot say: where patches/ is installed, native extensions, the line run as Python starts, and
where the pages are that the README links to.

With ADAPTRA_REPOSITORY=https://HOST/OWNER/NAME in the environment, links of the README that a package index shows lead
to the pages of this version there.
"""

from __future__ import annotations

import os
import re
import sys
from glob import glob
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Command, find_packages, setup
from setuptools.command.build import build

PATCHES = "adaptra_megatron.patches"
PACKAGES = ["adaptra_megatron", "adaptra_megatron.*"]
# Megatron on CPUs, faults and jobs of tests and the demo: of a clone that is installed in place, of no wheel.
TESTING = ["testing", "testing.*"] if "editable_wheel" in sys.argv else []
# Overflows of buffers on the stack end the process, tables of functions are read-only, and no names are shipped that
# only a debugger reads. A level of _FORTIFY_SOURCE that a distribution's compiler has set goes first.
COMPILED = ["-O3", "-g0", "-Wall", "-Wextra", "-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"]
LINKED = ["-Wl,-z,relro,-z,now,-z,noexecstack", "-Wl,--strip-all"]
START_UP = "adaptra_megatron.pth"


class build_start_up(Command):
    """Puts the .pth file next to the package: into wheels by way of build_lib, into editable ones directly.

    Being listed among the wheel's files, it goes when the package is uninstalled. Follows the protocol
    setuptools.command.build.SubCommand.
    """

    user_options: list[tuple[str, str, str]] = []

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        # An editable wheel is made of what is written to install_lib; build_lib is thrown away.
        directory = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        self.mkpath(str(directory))
        self.copy_file(START_UP, str(Path(directory, START_UP)))

    def get_source_files(self) -> list[str]:
        return [START_UP]

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else [str(Path(str(self.build_lib), START_UP))]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class build_with_start_up(build):
    sub_commands = [*build.sub_commands, ("build_start_up", None)]


def long_description(repository: str) -> str:
    """The README; its relative links are absolute where the `repository` is known, pictures' to the raw file."""
    text = Path("README.md").read_text()
    if not repository:
        return text
    (version,) = re.findall(r'^__version__ = "(.+)"$', Path("adaptra_megatron/__init__.py").read_text(), re.MULTILINE)
    places = {"!": f"{repository}/raw/v{version}/", "": f"{repository}/blob/v{version}/"}
    link = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)\s]+)\)")
    return link.sub(lambda found: f"{found[1]}{found[2]}({places[found[1]]}{found[3]})", text)


REPOSITORY = os.environ.get("ADAPTRA_REPOSITORY", "").rstrip("/")
PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md"}


def extension(name: str, folder: str, *flags: str) -> Pybind11Extension:
    """One of the package's, of what is in a folder of csrc."""
    return Pybind11Extension(
        f"adaptra_megatron.{name}",
        sorted(glob(f"csrc/{folder}/**/*.cpp", recursive=True)),
        depends=sorted(glob(f"csrc/{folder}/**/*.hpp", recursive=True)),
        cxx_std=17,
        extra_compile_args=[*COMPILED, *flags],
        extra_link_args=LINKED,
    )


ParallelCompile().install()  # on all cores
setup(
    long_description=long_description(REPOSITORY),
    long_description_content_type="text/markdown",
    project_urls={"Source": REPOSITORY, **{name: f"{REPOSITORY}/blob/HEAD/{path}" for name, path in PAGES.items()}}
    if REPOSITORY
    else {},
    packages=[*find_packages(include=[*PACKAGES, *TESTING]), PATCHES],
    package_dir={PATCHES: "patches"},
    ext_modules=[
        extension("schedule._native", "schedule", "-ffp-contract=off"),
        extension("transport._device", "device"),
        extension("transport._ring", "ring"),
    ],
    cmdclass={"build": build_with_start_up, "build_ext": build_ext, "build_start_up": build_start_up},
)
