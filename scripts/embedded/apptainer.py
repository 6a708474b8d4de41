"""Apptainer for the embedded clusters of this machine.

The machine's own where it has one or its package sources offer one; else (Debian 12) the build of Debian unstable,
unpacked with its own C library into a private prefix. The machine's apt configuration is never changed: sources,
lists and cache of the second way are private and temporary.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from embedded.console import SYSTEM_PATH, Refusal, run, run_logged
from embedded.layout import SHARED_DIR, lock_file
from embedded.packages import Need, apt_offers, debian_architecture, install
from embedded.sources import Source, machine_sources, os_release

PREFIX = SHARED_DIR / "apptainer"
COMPLETE = PREFIX / ".complete"
NEEDS = (
    Need("squashfs-tools", "mksquashfs"),
    Need("squashfuse", "squashfuse"),
    Need("fuse3", "fusermount3"),
    Need("uidmap", "newuidmap"),
)
FUSE = Path("/dev/fuse")


def system_program(*names: str) -> str | None:
    found = (shutil.which(name, path=SYSTEM_PATH) for name in names)
    return next((path for path in found if path), None)


def path_for_logins(system_path: str) -> str:
    """The same whether or not Apptainer is there yet, so that sshd needs no restart when it comes."""
    return f"{PREFIX}/bin:{system_path}"


def path_addition() -> str:
    return f"{PREFIX}/bin" if (PREFIX / "bin").is_dir() else ""


def program() -> str:
    private = PREFIX / "bin" / "apptainer"
    return str(private) if private.exists() else system_program("apptainer") or "apptainer"


def provide(*, log: Path) -> list[str]:
    """Make `apptainer` usable by the demo accounts; says whose it is."""
    with lock_file(SHARED_DIR / "apptainer.lock", "another cluster providing Apptainer"):
        open_fuse()
        if COMPLETE.exists() and Path(program()).exists():
            return [f"{COMPLETE.read_text().strip()}, in {PREFIX}"]
        own_one = system_program("apptainer", "singularity")
        if own_one is None:
            own_one = from_machine_sources(log)
        if own_one is None:
            install((*NEEDS, Need("patchelf", "patchelf")), log=log)
            from_unstable(log)
            open_fuse()
            return [f"{COMPLETE.read_text().strip()}, in {PREFIX}"]
        if os.path.basename(own_one) == "singularity":
            link_as_apptainer(own_one)
        return [f"the machine's own {own_one}"]


def open_fuse() -> None:
    """Unprivileged mounts of images go through it; udev gives it this mode, machines without udev do not."""
    if FUSE.exists() and FUSE.stat().st_mode & 0o666 != 0o666:
        FUSE.chmod(0o666)


def from_machine_sources(log: Path) -> str | None:
    for package in ("apptainer", "singularity-container"):
        if apt_offers(package):
            install([Need(package, package.split("-")[0]), *NEEDS], log=log)
            return system_program("apptainer", "singularity")
    return None


def link_as_apptainer(target: str) -> None:
    (PREFIX / "bin").mkdir(parents=True, exist_ok=True)
    link = PREFIX / "bin" / "apptainer"
    if not link.is_symlink() or os.readlink(link) != target:
        link.unlink(missing_ok=True)
        link.symlink_to(target)


def debian_source() -> Source:
    release = os_release()
    if release.get("ID") != "debian":
        raise Refusal(
            "This machine has no apptainer or singularity and its package sources offer none: "
            "install Apptainer, then run this again."
        )
    codename = release.get("VERSION_CODENAME", "sid")
    for source in machine_sources():
        if codename in source.suites and "main" in source.components:
            return source
    raise Refusal(
        f"No package source for Debian {codename} main was found in /etc/apt, from which Apptainer could be had: "
        "install Apptainer, then run this again."
    )


def write_private_apt(folder: Path, source: Source) -> dict[str, str]:
    """An apt of its own below `folder`: knows Debian unstable alone, and of no installed package."""
    for name in ("lists/partial", "cache/archives/partial", "empty", "debs"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    options = [f"arch={debian_architecture()}"]
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


def with_libraries(package: str, env: dict[str, str]) -> list[str]:
    """The package and the libraries below it; its helper programs come from the machine's own packages."""
    found, waiting = [package], [package]
    while waiting:
        said = run(["apt-cache", "depends", "--important", *waiting], env=env).stdout
        names = re.findall(r"^\s*Depends: (lib[\w.+-]+)", said, flags=re.MULTILINE)
        waiting = [name for name in dict.fromkeys(names) if name not in found]
        found += waiting
    return found


def from_unstable(log: Path) -> None:
    building = PREFIX.with_name(".apptainer.new")
    shutil.rmtree(building, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="sluice-apt-", dir=SHARED_DIR) as name:
        folder = Path(name)
        env = write_private_apt(folder, debian_source())
        failed = run_logged(["apt-get", "update"], log=log, env=env)
        packages = with_libraries("apptainer", env) if not failed else []
        download = ["sh", "-c", 'cd "$0" && exec apt-get download "$@"', str(folder / "debs")]
        if failed or run_logged([*download, *packages], log=log, env=env):
            raise Refusal(
                f"Apptainer could not be downloaded: see {log}, repair the network or install Apptainer yourself, "
                "and run this again (the cluster itself is up)."
            )
        for deb in sorted((folder / "debs").glob("*.deb")):
            run(["dpkg-deb", "-x", str(deb), str(building)])
    patch(building)
    shutil.rmtree(PREFIX, ignore_errors=True)
    building.rename(PREFIX)
    try:
        version = run([program(), "--version"]).stdout.strip()
    except Refusal:
        shutil.rmtree(PREFIX, ignore_errors=True)
        raise
    COMPLETE.write_text(version + "\n")


def patch(building: Path) -> None:
    """Give the programs the C library that came with them, and let Apptainer find its own files below the prefix."""
    programs = [building / "usr/bin/apptainer", *building.glob("usr/lib*/**/apptainer/bin/starter")]
    machine_loader = run(["patchelf", "--print-interpreter", str(programs[0])]).stdout.strip()
    loaders = [*building.glob(f"usr/lib*/**/{os.path.basename(machine_loader)}")]
    libraries = sorted({path.parent for path in building.glob("usr/lib*/**/libc.so.6")})
    if not loaders or not libraries or len(programs) < 2:
        raise Refusal(
            "Debian's apptainer package has changed its layout: install Apptainer yourself."
        )
    # The unpacked tree gets its final name only when it is complete, so the paths in it are those to come.
    final = [PREFIX / path.relative_to(building) for path in (loaders[0], *libraries)]
    for path in programs:
        run(
            [
                "patchelf", "--set-interpreter", str(final[0]), "--force-rpath",
                "--set-rpath", ":".join(map(str, final[1:])), str(path),
            ]
        )  # fmt: skip
    for place in ("usr", "usr/lib"):
        for name in ("etc", "var"):
            (building / name).mkdir(exist_ok=True)
            link = building / place / name
            if not link.exists():
                link.symlink_to(os.path.relpath(building / name, link.parent))
    bind_only_what_exists(building / "etc/apptainer/apptainer.conf")
    (building / "bin").mkdir(exist_ok=True)
    (building / "bin" / "apptainer").symlink_to("../usr/bin/apptainer")
    for junk in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian"):
        shutil.rmtree(building / junk, ignore_errors=True)


def bind_only_what_exists(configuration: Path) -> None:
    """Apptainer refuses to start when a file that it binds by default (/etc/localtime) is not on the machine."""
    lines = configuration.read_text().splitlines() if configuration.exists() else []
    for number, line in enumerate(lines):
        match = re.match(r"bind path = ([^:\s]+)", line)
        if match and not Path(match[1]).exists():
            lines[number] = f"# not on this machine: {line}"
    if lines:
        configuration.write_text("\n".join(lines) + "\n")
