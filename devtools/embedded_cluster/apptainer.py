"""Provides Apptainer for the embedded clusters of this machine.

Uses the installed Apptainer, or installs it from the machine's package sources. Where these lack it (Debian 12), the
package of Debian unstable is unpacked, with its own C library, into a private directory (PREFIX). The machine's apt
configuration is never changed: the sources, lists and cache for Debian unstable are private and temporary.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from devtools.embedded_cluster.console import SYSTEM_PATH, ClusterSetupError, run, run_logged
from devtools.embedded_cluster.layout import SHARED_DIR, lock_file
from devtools.embedded_cluster.packages import (
    Requirement,
    get_debian_architecture,
    install,
    is_available_in_apt,
)
from devtools.embedded_cluster.sources import PackageSource, read_machine_sources, read_os_release

PREFIX = SHARED_DIR / "apptainer"
COMPLETE_MARKER = PREFIX / ".complete"
REQUIREMENTS = (
    Requirement("squashfs-tools", "mksquashfs"),
    Requirement("squashfuse", "squashfuse"),
    Requirement("fuse3", "fusermount3"),
    Requirement("uidmap", "newuidmap"),
)
FUSE_DEVICE = Path("/dev/fuse")


def find_system_program(*names: str) -> str | None:
    """Return the path of the first of these programs that the machine has."""
    found = (shutil.which(name, path=SYSTEM_PATH) for name in names)
    return next((path for path in found if path), None)


def build_login_path(system_path: str) -> str:
    """Return PATH for SSH logins, with the directory of the private Apptainer first.

    The result does not depend on whether Apptainer is installed, so that sshd needs no restart after its installation.
    """
    return f"{PREFIX}/bin:{system_path}"


def find_path_entry() -> str:
    """Return the directory of the private Apptainer; empty if there is none."""
    return f"{PREFIX}/bin" if (PREFIX / "bin").is_dir() else ""


def find_apptainer() -> str:
    private = PREFIX / "bin" / "apptainer"
    return str(private) if private.exists() else find_system_program("apptainer") or "apptainer"


def ensure_installed(*, log: Path) -> list[str]:
    """Make `apptainer` usable by the demo accounts; returns a text about which Apptainer is used."""
    with lock_file(SHARED_DIR / "apptainer.lock", "another cluster providing Apptainer"):
        allow_fuse_access()
        if COMPLETE_MARKER.exists() and Path(find_apptainer()).exists():
            return [f"{COMPLETE_MARKER.read_text().strip()}, in {PREFIX}"]
        system_binary = find_system_program("apptainer", "singularity")
        if system_binary is None:
            system_binary = install_from_system_sources(log)
        if system_binary is None:
            install((*REQUIREMENTS, Requirement("patchelf", "patchelf")), log=log)
            install_from_debian_unstable(log)
            allow_fuse_access()
            return [f"{COMPLETE_MARKER.read_text().strip()}, in {PREFIX}"]
        if os.path.basename(system_binary) == "singularity":
            link_as_apptainer(system_binary)
        return [f"the machine's own {system_binary}"]


def allow_fuse_access() -> None:
    """Set mode 0666 on /dev/fuse, which mounting images without root needs. Machines without udev lack it."""
    if FUSE_DEVICE.exists() and FUSE_DEVICE.stat().st_mode & 0o666 != 0o666:
        FUSE_DEVICE.chmod(0o666)


def install_from_system_sources(log: Path) -> str | None:
    for package in ("apptainer", "singularity-container"):
        if is_available_in_apt(package):
            install([Requirement(package, package.split("-")[0]), *REQUIREMENTS], log=log)
            return find_system_program("apptainer", "singularity")
    return None


def link_as_apptainer(target: str) -> None:
    (PREFIX / "bin").mkdir(parents=True, exist_ok=True)
    link = PREFIX / "bin" / "apptainer"
    if not link.is_symlink() or os.readlink(link) != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def find_debian_source() -> PackageSource:
    release = read_os_release()
    if release.get("ID") != "debian":
        raise ClusterSetupError(
            "This machine has no apptainer or singularity and its package sources offer none: "
            "install Apptainer, then run this again."
        )
    codename = release.get("VERSION_CODENAME", "sid")
    for source in read_machine_sources():
        if codename in source.suites and "main" in source.components:
            return source
    raise ClusterSetupError(
        f"No package source for Debian {codename} main was found in /etc/apt, which is needed for Apptainer: "
        "install Apptainer, then run this again."
    )


def write_private_apt_configuration(folder: Path, source: PackageSource) -> dict[str, str]:
    """Write an apt configuration below `folder` that has Debian unstable as its only source.

    It regards no package as installed. Returns the environment variables with which apt uses it.
    """
    for name in ("lists/partial", "cache/archives/partial", "empty", "debs"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    options = [f"arch={get_debian_architecture()}"]
    if source.signed_by:
        options.append(f"signed-by={source.signed_by}")
    (folder / "sources.list").write_text(f"deb [{' '.join(options)}] {source.uri} sid main\n")
    (folder / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{folder}/sources.list";\n'
        f'Dir::Etc::sourceparts "{folder}/empty";\n'
        f'Dir::Etc::preferences "{folder}/none";\n'
        f'Dir::Etc::preferencesparts "{folder}/empty";\n'
        f'Dir::State::lists "{folder}/lists";\n'
        f'Dir::State::status "{folder}/status";\n'
        f'Dir::Cache "{folder}/cache";\n'
        'APT::Default-Release "";\n'
        'Acquire::Languages "none";\n'
        'Acquire::Retries "2";\n'
        'APT::Sandbox::User "root";\n'
    )
    return {"APT_CONFIG": str(folder / "apt.conf")}


def resolve_libraries(package: str, env: dict[str, str]) -> list[str]:
    """Return the package and all libraries on which it depends.

    Programs on which it depends are left out: the machine's own packages provide them (REQUIREMENTS).
    """
    found, pending = [package], [package]
    while pending:
        output = run(["apt-cache", "depends", "--important", *pending], env=env).stdout
        names = re.findall(r"^\s*Depends: (lib[\w.+-]+)", output, flags=re.MULTILINE)
        pending = [name for name in dict.fromkeys(names) if name not in found]
        found += pending
    return found


def install_from_debian_unstable(log: Path) -> None:
    build_dir = PREFIX.with_name(".apptainer.new")
    shutil.rmtree(build_dir, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="sluice-apt-", dir=SHARED_DIR) as name:
        folder = Path(name)
        env = write_private_apt_configuration(folder, find_debian_source())
        failed = run_logged(["apt-get", "update"], log=log, env=env)
        packages = resolve_libraries("apptainer", env) if not failed else []
        download = ["sh", "-c", 'cd "$0" && exec apt-get download "$@"', str(folder / "debs")]
        if failed or run_logged([*download, *packages], log=log, env=env):
            raise ClusterSetupError(
                f"Apptainer could not be downloaded: see {log}, repair the network or install Apptainer yourself, "
                "and run this again (the cluster itself is up)."
            )
        for deb in sorted((folder / "debs").glob("*.deb")):
            run(["dpkg-deb", "-x", str(deb), str(build_dir)])
    patch_binaries(build_dir)
    shutil.rmtree(PREFIX, ignore_errors=True)
    build_dir.rename(PREFIX)
    try:
        version = run([find_apptainer(), "--version"]).stdout.strip()
    except ClusterSetupError:
        shutil.rmtree(PREFIX, ignore_errors=True)
        raise
    COMPLETE_MARKER.write_text(version + "\n")


def patch_binaries(build_dir: Path) -> None:
    """Change the programs so that they use the unpacked C library and find their files below PREFIX."""
    programs = [
        build_dir / "usr/bin/apptainer",
        *build_dir.glob("usr/lib*/**/apptainer/bin/starter"),
    ]
    machine_loader = run(["patchelf", "--print-interpreter", str(programs[0])]).stdout.strip()
    loaders = [*build_dir.glob(f"usr/lib*/**/{os.path.basename(machine_loader)}")]
    libraries = sorted({path.parent for path in build_dir.glob("usr/lib*/**/libc.so.6")})
    if not loaders or not libraries or len(programs) < 2:
        raise ClusterSetupError(
            "Debian's apptainer package has changed its layout: install Apptainer yourself."
        )
    # `build_dir` is renamed to PREFIX when it is complete, so the programs get the paths below PREFIX.
    final_paths = [PREFIX / path.relative_to(build_dir) for path in (loaders[0], *libraries)]
    for path in programs:
        run(
            [
                "patchelf", "--set-interpreter", str(final_paths[0]), "--force-rpath",
                "--set-rpath", ":".join(map(str, final_paths[1:])), str(path),
            ]
        )  # fmt: skip
    for subdir in ("usr", "usr/lib"):
        for name in ("etc", "var"):
            (build_dir / name).mkdir(exist_ok=True)
            link = build_dir / subdir / name
            if not link.exists():
                link.symlink_to(os.path.relpath(build_dir / name, link.parent))
    disable_missing_binds(build_dir / "etc/apptainer/apptainer.conf")
    (build_dir / "bin").mkdir(exist_ok=True)
    (build_dir / "bin" / "apptainer").symlink_to("../usr/bin/apptainer")
    for unused in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian"):
        shutil.rmtree(build_dir / unused, ignore_errors=True)


def disable_missing_binds(configuration: Path) -> None:
    """Comment out the bind paths that this machine lacks, for example /etc/localtime.

    Apptainer does not start a container if a configured bind path is missing.
    """
    lines = configuration.read_text().splitlines() if configuration.exists() else []
    for number, line in enumerate(lines):
        match = re.match(r"bind path = ([^:\s]+)", line)
        if match and not Path(match[1]).exists():
            lines[number] = f"# not on this machine: {line}"
    if lines:
        configuration.write_text("\n".join(lines) + "\n")
