# SPDX-License-Identifier: Apache-2.0
"""What is shipped, that both ways to install it work, and that importing it costs nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTENSION = f"adaptra_megatron/schedule/_native{sysconfig.get_config_var('EXT_SUFFIX')}"
EXTENSIONS = (
    "adaptra_megatron.schedule._native",
    "adaptra_megatron.transport._device",
    "adaptra_megatron.transport._ring",
)
pytestmark = pytest.mark.timeout(900)
"""Native code takes three minutes to compile during the other tests on 2 cores, and more on a busy machine."""
NOT_SOURCE = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", "*.so", ".*_cache", ".hypothesis")


def run(*command: object, directory: Path, compiler: Path | None = None) -> str:
    """Output of a command; its whole output is the message if it fails. `compiler`: instead of the machine's own."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if compiler is not None:
        environment |= {"CC": str(compiler), "CXX": str(compiler)}
    ran = subprocess.run(
        [str(part) for part in command], cwd=directory, env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, f"{command} exits with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree as a fresh clone has it, so that builds leave nothing in this one."""
    copy = tmp_path_factory.mktemp("source") / "adaptra-megatron"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    return copy


HASTY_COMPILER = """#!/bin/sh
for option in "$@"; do
  shift
  [ "$option" = -O3 ] && option=-O0
  set -- "$@" "$option"
done
exec c++ "$@"
"""
"""The machine's compiler, which takes most of its time to make code fast: that of the wheel only has to work."""


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel built from nothing but it."""
    out = tmp_path_factory.mktemp("distributions")
    compiler = tmp_path_factory.mktemp("compiler") / "c++"
    compiler.write_text(HASTY_COMPILER)
    compiler.chmod(0o755)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, directory=out, compiler=compiler)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def fresh_environment(directory: Path) -> Path:
    """Interpreter of a new virtual environment that sees this one's packages behind its own: torch is large."""
    venv.create(directory, with_pip=False, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(directory), "platbase": str(directory)})
    packages = Path(paths["purelib"])
    (packages / "development_environment.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    return directory / "bin" / "python"


def install(interpreter: Path, *what: object, directory: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet")
    # What this environment has installed is visible in the fresh one too, and must not count as installed there.
    run(*pip, "--no-deps", "--no-build-isolation", "--ignore-installed", *what, directory=directory)


USE = """
import adaptra_megatron, adaptra_megatron.patches, adaptra_megatron.schedule._native
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.planner import plan
plan(uniform_costs(2, 4, forward_s=1.0, backward_input_s=1.0, backward_weight_s=1.0))
for module in (adaptra_megatron, adaptra_megatron.patches, adaptra_megatron.schedule._native):
    print(module.__file__)
"""


def used_files(interpreter: Path, directory: Path) -> list[Path]:
    """Where the package, its patches and its extension come from when used away from the source tree."""
    return [Path(line) for line in run(interpreter, "-c", USE, directory=directory).splitlines()]


def check_the_flag_until_uninstalled(interpreter: Path, directory: Path) -> None:
    """--adaptra on the command line brings the hooks in, no other start does, and all goes with the package."""
    code = "import sys; print(any(name.startswith('adaptra_megatron') for name in sys.modules))"
    reported = [run(interpreter, "-c", code, *flags, directory=directory).strip() for flags in ((), ("--adaptra",))]
    assert reported == ["False", "True"]
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "uninstall", "--quiet", "--yes")
    run(*pip, "adaptra-megatron", directory=directory)
    assert not list((directory / "environment").rglob("adaptra_megatron*"))
    assert run(interpreter, "-c", code, "--adaptra", directory=directory).strip() == "False"


def test_the_source_distribution_is_complete(source: Path, distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("adaptra_megatron", "csrc", "patches", "tests", "scripts", "requirements", "examples"):
        expected = {
            str(path.relative_to(source))
            for pattern in ("*.py", "*.pyi", "*.cpp", "*.hpp", "*.sh", "*.txt", "*.in", "*.yaml", "templates/*")
            for path in (source / folder).rglob(pattern)
        }
        assert expected
        assert expected <= names
    assert {"LICENSE", "README.md", "SECURITY.md", "CHANGELOG.md", "CITATION.cff", "Makefile", ".ci/run"} <= names
    assert {"pyproject.toml", "setup.py", "adaptra_megatron.pth"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_wheel_carries_patches_and_the_extension(source: Path, distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    expected = {f"adaptra_megatron/patches/{path.name}" for path in (source / "patches").glob("*.py")}
    for pattern in ("*.py", "*.csv", "templates/*"):
        expected |= {str(path.relative_to(source)) for path in (source / "adaptra_megatron").rglob(pattern)}
    assert expected | {EXTENSION, "adaptra_megatron/py.typed", "adaptra_megatron/schedule/_native.pyi"} <= names
    assert "adaptra_megatron.pth" in names
    assert all(name.startswith(("adaptra_megatron/", "adaptra_megatron-", "adaptra_megatron.pth")) for name in names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    required = {line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist")}
    assert {"torch>=2.8.0a0", 'megatron-core<0.21,>=0.14; extra == "megatron"'} <= required
    assert (source / "README.md").read_text().strip() in metadata


@pytest.mark.parametrize("torch", ["2.8.0a0+5228986c39.nv25.5", "2.8.0a0+34c6371d24.nv25.8", "2.8.0", "2.13.0+cpu"])
def test_builds_of_torch_that_images_have_are_accepted(torch: str) -> None:
    """NVIDIA numbers its builds as pre-releases of the release to come."""
    (dependencies,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (wanted,) = (found for found in map(Requirement, re.findall(r'"([^"]+)"', dependencies)) if found.name == "torch")
    assert wanted.specifier.contains(torch)
    assert not wanted.specifier.contains("2.7.1")


def test_links_on_a_package_index_lead_to_the_repository() -> None:
    code = "import runpy, setuptools; setuptools.setup = lambda **given: print(given['long_description']); "
    environment = {**os.environ, "ADAPTRA_REPOSITORY": "https://example.org/owner/name/"}
    done = subprocess.run(
        [sys.executable, "-c", code + "runpy.run_path('setup.py')"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", done.stdout)
    assert len(links) > 10
    assert all(target.startswith(("https://", "#")) for _, target in links)
    at = f"https://example.org/owner/name/{{}}/v{adaptra_version()}/docs/"
    assert ("!", at.format("raw") + "timeline.png") in links
    assert ("", at.format("blob") + "README.md") in links


@pytest.mark.parametrize("repository", ["", "https://example.org/owner/name"])
def test_metadata_has_addresses_only_where_a_repository_is_named(repository: str) -> None:
    code = "import runpy, setuptools; setuptools.setup = lambda **given: print(*given['project_urls'].values()); "
    environment = {**os.environ, "ADAPTRA_REPOSITORY": repository}
    done = subprocess.run(
        [sys.executable, "-c", code + "runpy.run_path('setup.py')"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    pages = ("", "/blob/HEAD/docs/README.md", "/blob/HEAD/CHANGELOG.md")
    assert done.stdout.split() == ([repository + page for page in pages] if repository else [])


def adaptra_version() -> str:
    return importlib.import_module("adaptra_megatron").__version__


def test_an_installed_wheel_works(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    interpreter = fresh_environment(tmp_path / "environment")
    install(interpreter, distributions[1], directory=tmp_path)
    for file in used_files(interpreter, tmp_path):
        assert file.is_relative_to(tmp_path / "environment")
    assert "adaptra 0." in run(interpreter.parent / "adaptra", "--version", directory=tmp_path)
    check_the_flag_until_uninstalled(interpreter, tmp_path)


def test_an_installed_wheel_trains(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """With torch and megatron-core, away from the source tree: two ranks by links and planner of the wheel."""
    interpreter = fresh_environment(tmp_path / "environment")
    install(interpreter, distributions[1], directory=tmp_path)
    shutil.copytree(ROOT / "testing", tmp_path / "testing")  # Megatron on CPUs, which is in no wheel
    script = tmp_path / "train.py"
    where = "    import adaptra_megatron as package\n    print(package.__file__)\n"
    script.write_text((ROOT / "scripts" / "train_gpt.py").read_text() + where)
    sizes = "--pipeline-model-parallel-size 2 --num-layers 2 --global-batch-size 4 --train-iters 3 --mock-data"
    flags = ("--emulate-cpu", "--adaptra", "--adaptra-trace-dir", tmp_path / "run")
    job = (interpreter, "-m", "testing.jobs.launch_command", "--nproc", 2, script)
    said = run(*job, *sizes.split(), *flags, directory=tmp_path)
    assert "iteration        3/       3" in said
    assert str(tmp_path / "environment") in said
    assert len(list((tmp_path / "run").glob("rank-*.jsonl"))) == 2


@pytest.mark.slow  # a minute of compiling, for what `make install` does before these tests run
def test_an_editable_install_works(source: Path, tmp_path: Path) -> None:
    interpreter = fresh_environment(tmp_path / "environment")
    install(interpreter, "--editable", source, directory=tmp_path)
    package, patches, native = used_files(interpreter, tmp_path)
    assert package == source / "adaptra_megatron" / "__init__.py"
    assert patches == source / "patches" / "__init__.py"
    assert native == source / EXTENSION
    assert "adaptra 0." in run(interpreter.parent / "adaptra", "--version", directory=tmp_path)
    check_the_flag_until_uninstalled(interpreter, tmp_path)


@pytest.mark.parametrize("name", EXTENSIONS)
def test_extensions_are_built_to_stand_attacks_and_without_symbols(name: str) -> None:
    file = importlib.util.find_spec(name).origin  # type: ignore[union-attr]
    dynamic, segments, sections, symbols = (
        run("readelf", "--wide", option, file, directory=ROOT)
        for option in ("--dynamic", "--segments", "--sections", "--dyn-syms")
    )
    assert "BIND_NOW" in dynamic
    assert "GNU_RELRO" in segments
    (stack,) = (line for line in segments.splitlines() if "GNU_STACK" in line)
    assert " RW " in stack
    assert "__stack_chk_fail" in symbols
    assert not re.findall(r"\.symtab|\.debug_\w+", sections)
    assert len(re.findall(r"\bPyInit_\w+", symbols)) == 1


def pinned(file: str) -> dict[str, list[Requirement]]:
    """What a lock file has, by name, for each of which there is at least one hash."""
    blocks = re.split(r"\n(?=[a-z])", (ROOT / "requirements" / file).read_text())[1:]
    found: dict[str, list[Requirement]] = {}
    for block in blocks:
        requirement = Requirement(block.partition("\\")[0])
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), f"{requirement} has no hash"
        assert re.fullmatch(r"==[^*]+", str(requirement.specifier)), f"{requirement} is no version"
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def of_this_python(requirements: list[Requirement]) -> list[str]:
    return [
        str(requirement.specifier).removeprefix("==")
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate()
    ]


def test_what_tests_run_with_is_pinned_and_installed() -> None:
    """All that pyproject.toml asks for, but torch: that is pinned by version, for its builds differ."""
    lock, project = pinned("tested.txt"), metadata.requires("adaptra-megatron") or []
    (torch,) = re.findall("^torch==(.+)$", (ROOT / "requirements" / "tested.in").read_text(), re.MULTILINE)
    assert metadata.version("torch").partition("+")[0] == torch
    for wanted in map(Requirement, project):
        if wanted.name != "torch":
            assert of_this_python(lock[canonicalize_name(wanted.name)]) == [metadata.version(wanted.name)]
            assert metadata.version(wanted.name) in wanted.specifier
    for name, requirements in lock.items():
        for version in of_this_python(requirements):
            assert metadata.version(name) == version
    assert "torch" not in lock
    for name, requirements in pinned("megatron_lm.txt").items():
        assert set(of_this_python(requirements)) <= set(of_this_python(lock.get(name, requirements)))


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, adaptra_megatron; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = run(sys.executable, "-c", code, directory=ROOT).split()
    assert "adaptra_megatron" in loaded
    assert not {"torch", "megatron", "numpy"} & set(loaded)


def test_importing_the_package_is_quick() -> None:
    """Fastest of several, because other work shares the machine."""
    code = "import time; start = time.perf_counter(); import adaptra_megatron; print(time.perf_counter() - start)"
    seconds = [float(run(sys.executable, "-c", code, directory=ROOT)) for _ in range(5)]
    assert min(seconds) < 0.05
