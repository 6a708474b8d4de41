"""Installs missing Debian packages with apt.

Starts no services and upgrades no installed packages. If nothing is missing, apt is not called, so that no network is
needed.
"""

from __future__ import annotations

import contextlib
import glob
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from devtools.embedded_cluster.console import SYSTEM_PATH, ClusterSetupError, run, run_logged

POLICY_FILE = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = "#!/bin/sh\n# Temporary, by Sluice's scripts/cluster: packages must not start services.\nexit 101\n"


@dataclass(frozen=True)
class Requirement:
    """A package, and the program or file pattern whose presence means that it or an equivalent is installed.

    `unit` is the systemd service that the package would start.
    """

    package: str
    provides: str
    unit: str = ""


# MariaDB's -core packages contain the programs without a service, a user or a data directory.
CLUSTER_REQUIREMENTS = (
    Requirement("munge", "munged", "munge.service"),
    Requirement("slurmctld", "slurmctld", "slurmctld.service"),
    Requirement("slurmd", "slurmd", "slurmd.service"),
    Requirement("slurmdbd", "slurmdbd", "slurmdbd.service"),
    Requirement("slurm-client", "sbatch"),
    Requirement("slurm-wlm-basic-plugins", "/usr/lib/*/slurm*/select_cons_tres.so"),
    Requirement("slurm-wlm-mysql-plugin", "/usr/lib/*/slurm*/accounting_storage_mysql.so"),
    Requirement("mariadb-server-core", "mariadbd"),
    Requirement("mariadb-client-core", "mariadb"),
    Requirement("openssh-server", "sshd", "ssh.service"),
    Requirement("openssh-client", "ssh-keygen"),
    Requirement("passwd", "useradd"),
)

# For srun --mpi=pmix. Slurm's plugin, which is in slurm-wlm-basic-plugins, opens libpmix.so (22.05), which only the -dev
# package has, or libpmix.so.2 (24.11), which that package requires; the library's own package has another name in
# Debian 12 (libpmix2) than in 13 (libpmix2t64). The cluster works without it, except for MPI jobs that srun starts.
PMIX_PLUGIN = "/usr/lib/*/slurm*/mpi_pmix*.so"
PMIX_REQUIREMENT = Requirement("libpmix-dev", "/usr/lib/*/pmix2/lib/libpmix.so")


def is_installed(requirement: Requirement) -> bool:
    if "/" in requirement.provides:
        return bool(glob.glob(requirement.provides))
    return shutil.which(requirement.provides, path=SYSTEM_PATH) is not None


def find_missing(requirements: Sequence[Requirement]) -> list[Requirement]:
    return [requirement for requirement in requirements if not is_installed(requirement)]


@contextlib.contextmanager
def prevent_service_starts() -> Iterator[None]:
    """Install a policy-rc.d during the block, which prevents packages from starting services at installation."""
    if POLICY_FILE.exists() and POLICY_FILE.read_text(errors="replace") != POLICY_TEXT:
        # The machine has a policy of its own, which is not replaced.
        yield
        return
    POLICY_FILE.write_text(POLICY_TEXT)
    POLICY_FILE.chmod(0o755)
    try:
        yield
    finally:
        POLICY_FILE.unlink(missing_ok=True)


def disable_units(requirements: Sequence[Requirement]) -> None:
    """Disable the services of newly installed packages, so that they do not start at boot (sshd on port 22)."""
    units = [requirement.unit for requirement in requirements if requirement.unit]
    if units and shutil.which("systemctl", path=SYSTEM_PATH):
        run(["systemctl", "disable", *units], check=False)
        if "ssh.service" in units:
            run(["systemctl", "disable", "ssh.socket"], check=False)


def is_available_in_apt(package: str) -> bool:
    if not shutil.which("apt-cache", path=SYSTEM_PATH):
        return False
    output = run(["apt-cache", "policy", package], check=False).stdout
    candidates = [line for line in output.splitlines() if "Candidate:" in line]
    return bool(candidates) and "(none)" not in candidates[0]


def install(requirements: Sequence[Requirement], *, log: Path) -> list[str]:
    """Install the packages that are missing; returns their names."""
    missing = find_missing(requirements)
    if not missing:
        return []
    names = [requirement.package for requirement in missing]
    if not shutil.which("apt-get", path=SYSTEM_PATH):
        raise ClusterSetupError(
            f"This machine lacks {', '.join(names)} and has no apt-get to install them: "
            "install them with your package manager and run this again."
        )
    environment = {"DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_MODE": "l"}
    options = ["-o", "DPkg::Lock::Timeout=300", "-o", "Acquire::Retries=2"]
    command = [
        "apt-get", "install", "-y", "--no-install-recommends", "--no-upgrade",
        "-o", "Dpkg::Options::=--force-confold", *options, *names,
    ]  # fmt: skip
    with prevent_service_starts():
        if run_logged(["apt-get", "update", *options], log=log, env=environment) != 0:
            with log.open("a") as stream:
                stream.write("apt-get update failed; trying with the lists that the machine has\n")
        code = run_logged(command, log=log, env=environment)
    still_missing = [requirement.package for requirement in find_missing(missing)]
    if code != 0 or still_missing:
        raise ClusterSetupError(
            f"apt-get could not install {', '.join(still_missing or names)}: see {log}, "
            "repair the machine's package sources or network, and run this again."
        )
    disable_units(missing)
    return names


def has_pmix() -> bool:
    return bool(glob.glob(PMIX_PLUGIN)) and is_installed(PMIX_REQUIREMENT)


def install_pmix(*, log: Path) -> list[str]:
    """Install PMIx if Slurm has the plugin and apt has the package; returns the names of installed packages."""
    if has_pmix() or not glob.glob(PMIX_PLUGIN):
        return []
    if not is_available_in_apt(PMIX_REQUIREMENT.package):
        return []
    return install([PMIX_REQUIREMENT], log=log)


def get_debian_architecture() -> str:
    return run(["dpkg", "--print-architecture"]).stdout.strip()
