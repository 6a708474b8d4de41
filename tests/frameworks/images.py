"""Builds the container images of the framework tests from Debian packages and PyPI, once per machine.

`python -m tests.frameworks.images [NAME…]` builds the missing ones, as root. The wheels are downloaded on the machine,
with its own pip configuration, and installed without a network in the image's root directory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from devtools.embedded_cluster.console import ClusterSetupError, run, run_logged
from devtools.embedded_cluster.images import (
    IMAGE_CACHE_DIR,
    build_image,
    make_debian_root,
    remove_image_clutter,
)
from devtools.embedded_cluster.layout import ensure_directory, lock_file


@dataclass(frozen=True)
class Recipe:
    """Contents of an image. Increase `version` when they change, so that the cached image is rebuilt."""

    version: int
    packages: tuple[str, ...]
    wheels: tuple[str, ...] = ()
    # A package that PyPI has only as source, compiled with the environment `build`.
    source: str = ""
    build: Mapping[str, str] = field(default_factory=dict)


# ssh: mpirun and horovodrun start their processes on other nodes with it; jobssh starts the server of a task.
_COMMON = ("python3", "python3-pip", "bash", "ca-certificates", "openssh-client", "openssh-server")
_COMPILED = (*_COMMON, "libstdc++6", "libgomp1")  # libraries that wheels need
RECIPES = {
    "openmpi": Recipe(1, (*_COMMON, "openmpi-bin", "python3-mpi4py")),
    # PyPI's CPU build, where the package index has one of this version: 2.13.0+cpu ranks above 2.13.0.
    "pytorch": Recipe(1, _COMPILED, ("torch==2.13.0", "numpy<2.4")),
    "xgboost": Recipe(1, _COMPILED, ("xgboost-cpu==3.0.5",)),
    # Horovod 0.28.1 does not compile against torch 2.1 and later.
    "tensorflow": Recipe(
        1,
        (*_COMMON, "cmake", "g++", "make", "python3-dev"),
        ("tensorflow-cpu==2.13.1", "cloudpickle", "psutil", "pyyaml", "packaging"),
        source="horovod==0.28.1",
        build={
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITH_GLOO": "1",
            "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_CPU_OPERATIONS": "GLOO",
        },
    ),
}


def get_framework_image(name: str) -> Path:
    return IMAGE_CACHE_DIR / f"framework-{name}-{RECIPES[name].version}.sif"


def ensure_framework_image(name: str) -> Path:
    """Build the image unless it is in the cache. Raises ClusterSetupError."""
    image = get_framework_image(name)
    ensure_directory(IMAGE_CACHE_DIR, "root", 0o755)
    with lock_file(IMAGE_CACHE_DIR / f"framework-{name}.lock", f"another build of {image.name}"):
        if not image.exists():
            log = IMAGE_CACHE_DIR / f"framework-{name}.log"
            build_image(image, partial(make_framework_root, recipe=RECIPES[name]), log)
    return image


def make_framework_root(root: Path, log: Path, *, recipe: Recipe) -> None:
    make_debian_root(root, log, packages=recipe.packages)
    if recipe.wheels:
        wheels = root / "opt/wheels"
        _download(recipe, wheels, _read_python_version(root), log)
        _run_pip(root, log, ["install", *recipe.wheels])
        if recipe.source:
            # setup.py imports the framework that it compiles against, so it needs the installed packages.
            options = ["install", "--no-build-isolation", "--no-deps", recipe.source]
            _run_pip(root, log, options, recipe.build)
        shutil.rmtree(wheels)
    remove_image_clutter(root)


def _read_python_version(root: Path) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return run(["chroot", str(root), "python3", "-c", code]).stdout.strip()


def _download(recipe: Recipe, target: Path, python_version: str, log: Path) -> None:
    """Download the wheels for the Python of the image, and the source package."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", f"--dest={target}"]
    wheel_options = ["--only-binary=:all:", f"--python-version={python_version}"]
    commands = [[*pip, *wheel_options, *recipe.wheels]]
    if recipe.source:
        commands.append([*pip, "--no-deps", "--no-binary=:all:", recipe.source])
    for command in commands:
        with log.open("a") as stream:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, check=False
            ).returncode
        if code != 0:
            raise ClusterSetupError(
                f"pip could not download {' '.join(command[5:])} for Python {python_version}: see {log}."
            )


def _run_pip(
    root: Path, log: Path, arguments: list[str], environment: Mapping[str, str] | None = None
) -> None:
    options = [
        "--no-index",
        "--find-links=/opt/wheels",
        "--no-cache-dir",
        "--root-user-action=ignore",
    ]
    options += ["--break-system-packages", "--no-compile"]
    command = ["chroot", str(root), "python3", "-m", "pip", *arguments, *options]
    env = {"MAKEFLAGS": f"-j{os.cpu_count() or 1}", **(environment or {})}
    if run_logged(command, log=log, env=env, timeout_s=3600) != 0:
        raise ClusterSetupError(f"pip could not install into the image: see {log}.")


def main() -> int:
    for name in sys.argv[1:] or RECIPES:
        image = ensure_framework_image(name)
        sys.stdout.write(f"{image}: {image.stat().st_size / 2**20:.0f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
