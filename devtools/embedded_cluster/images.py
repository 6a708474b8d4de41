"""Builds the two container images of the embedded cluster from the machine's own package sources.

They are built once per machine into a shared cache and hard-linked into each cluster. No image registry is used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from devtools.embedded_cluster import apptainer
from devtools.embedded_cluster.console import ClusterSetupError, run, run_logged
from devtools.embedded_cluster.layout import SHARED_DIR, Layout, ensure_directory, lock_file
from devtools.embedded_cluster.packages import Requirement, install
from devtools.embedded_cluster.sources import read_distribution_sources, read_os_release

IMAGE_CACHE_DIR = SHARED_DIR / "images"
# Increase when a recipe below changes, so that cached images are rebuilt.
RECIPE_VERSION = 1
EXCLUDED_SHARE_DIRS = ("doc", "man", "info", "locale", "lintian", "zoneinfo", "bug", "doc-base")


def ensure_installed(layout: Layout, *, log: Path) -> list[str]:
    """Put both images into the cluster's directory; returns a text for each image that was built."""
    ensure_directory(IMAGE_CACHE_DIR, "root", 0o755)
    built = []
    with lock_file(IMAGE_CACHE_DIR / "lock", "another cluster building the images"):
        recipes = {"busybox": make_busybox_root, "python": make_python_root}
        for name, make_root in recipes.items():
            cached = get_cached_path(name)
            if not cached.exists():
                build_image(cached, make_root, log)
                built.append(f"built {name}.sif ({cached.stat().st_size / 2**20:.1f} MB)")
            link_image(cached, layout.images / f"{name}.sif")
    return built or ["all there"]


def get_cached_path(name: str) -> Path:
    return IMAGE_CACHE_DIR / f"{name}-{RECIPE_VERSION}.sif"


def are_cached() -> bool:
    return all(get_cached_path(name).exists() for name in ("busybox", "python"))


def link_image(cached: Path, target: Path) -> None:
    if target.exists() and (
        target.samefile(cached) or target.stat().st_size == cached.stat().st_size
    ):
        return
    temporary = target.with_name(f".{target.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        os.link(cached, temporary)
    except OSError:  # the cluster is on another file system than the cache
        shutil.copyfile(cached, temporary)
    temporary.replace(target)


def build_image(cached: Path, make_root: Callable[[Path, Path], None], log: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".building-", dir=IMAGE_CACHE_DIR) as name:
        folder = Path(name)
        root = folder / "root"
        make_root(root, log)
        image = folder / "image.sif"
        environment = {"APPTAINER_TMPDIR": name, "APPTAINER_CACHEDIR": f"{name}/cache"}
        code = run_logged(
            [apptainer.find_apptainer(), "build", str(image), str(root)], log=log, env=environment
        )
        if code != 0:
            raise ClusterSetupError(f"Apptainer could not build {cached.name}: see {log}.")
        image.chmod(0o644)
        image.replace(cached)


def make_busybox_root(root: Path, log: Path) -> None:
    """Create the root directory of the busybox image.

    The package is unpacked, not installed, because it would replace the machine's busybox.
    """
    root.mkdir()
    unpacked = root.with_name("unpacked")
    download = ["sh", "-c", 'cd "$0" && exec apt-get -o APT::Sandbox::User=root download "$@"']
    if run_logged([*download, str(root.parent), "busybox-static"], log=log) != 0:
        raise ClusterSetupError(
            f"apt-get could not download busybox-static: see {log}, repair the network and run this again "
            "(the cluster itself is up)."
        )
    run(["dpkg-deb", "-x", str(next(root.parent.glob("busybox-static_*.deb"))), str(unpacked)])
    for name in (
        "bin",
        "dev",
        "etc",
        "home",
        "proc",
        "root",
        "run",
        "sys",
        "tmp",
        "usr",
        "var/tmp",
    ):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    busybox = next(path for path in unpacked.glob("**/bin/busybox") if not path.is_symlink())
    shutil.copy2(busybox, root / "bin" / "busybox")
    for applet in run([str(busybox), "--list"]).stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    for name in ("usr/bin", "sbin", "usr/sbin"):
        (root / name).symlink_to("/bin")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / "etc/os-release").write_text('NAME="BusyBox"\nID=busybox\n')


def make_python_root(root: Path, log: Path) -> None:
    make_debian_root(root, log, packages=("python3", "bash", "ca-certificates"))
    remove_image_clutter(root)


def make_debian_root(root: Path, log: Path, *, packages: Sequence[str]) -> None:
    """Create the root directory of an image with packages of the machine's own distribution."""
    install([Requirement("mmdebstrap", "mmdebstrap")], log=log)
    sources = []
    for source in read_distribution_sources():
        options = f"[signed-by={source.signed_by}] " if source.signed_by else ""
        for suite in source.suites:
            sources.append(f"deb {options}{source.uri} {suite} {' '.join(source.components)}")
    if not sources:
        raise ClusterSetupError(
            "No package source of this distribution was found in /etc/apt, so no image can be made from its packages."
        )
    excluded = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in EXCLUDED_SHARE_DIRS]
    command = [
        "mmdebstrap", "--mode=root", "--variant=essential", f"--include={','.join(packages)}",
        *excluded, '--aptopt=Acquire::Languages "none"', '--aptopt=APT::Install-Recommends "false"',
        read_os_release()["VERSION_CODENAME"], str(root), *sources,
    ]  # fmt: skip
    if run_logged(command, log=log) != 0:
        raise ClusterSetupError(
            f"mmdebstrap could not install {', '.join(packages)} into an image: see {log}, repair the network or the "
            "package sources and run this again (the cluster itself is up)."
        )
    (root / "etc/resolv.conf").unlink(missing_ok=True)
    (root / "etc/hostname").unlink(missing_ok=True)


def remove_image_clutter(root: Path) -> None:
    """Remove package lists, caches and Python's own tests."""
    for pattern in (
        "var/lib/apt/lists/*",
        "var/cache/*/*",
        "usr/lib/python3*/test",
        "usr/lib/python3*/idlelib",
    ):
        for path in root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
