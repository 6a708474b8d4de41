"""The paths and ports of an embedded cluster, and the check whether a directory can be used for one.

Each cluster directory has one `Layout`. This module reads and writes the directory's state file and marker; it starts
no process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import random
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from devtools.embedded_cluster.console import ClusterSetupError

DEFAULT_DIR = Path("/var/lib/sluice/cluster")
# Shared by all embedded clusters of a machine: home directories of the accounts, Apptainer, built images.
SHARED_DIR = Path("/var/lib/sluice")
MARKER = ".sluice-cluster"
MARKER_TEXT = "This directory is an embedded Slurm cluster of Sluice; `scripts/cluster reset` may delete it.\n"

CLUSTER_NAME = "sluice"
SERVICE_USER = "sluice-svc"
# Number of additional accounts, for benchmarks with more users than the demo has.
EXTRA_USERS = int(os.environ.get("SLUICE_CLUSTER_MORE_PEOPLE") or 0)
DEMO_USERS = (
    *("sluice-alice", "sluice-bob", "sluice-carol"),
    *(f"sluice-more{n}" for n in range(1, EXTRA_USERS + 1)),
)
USERS = (*DEMO_USERS, SERVICE_USER)

# Below Linux's port range for outgoing connections (32768 and up), so that no outgoing connection occupies one.
PORT_RANGE = range(21000, 29000)
PORT_NAMES = ("slurmctld", "slurmdbd", "sshd", "n1", "n2", "n3", "n4")
# The path of a Unix socket has at most 107 characters; the longest one below the directory needs about 20 of them.
MAX_DIR_LENGTH = 80


@dataclass(frozen=True)
class Node:
    name: str
    gpu_type: str = ""
    gpus: int = 0
    cpus: int = 64
    mem_mib: int = 262144


# Sizes of real servers, so that job files written for real clusters run unchanged. Slurm does not compare them with
# the machine (`SlurmdParameters=config_overrides`).
NODES = (Node("n1", "a100", 8), Node("n2", "a100", 8), Node("n3", "v100", 4), Node("n4"))


@dataclass(frozen=True)
class Layout:
    dir: Path

    @property
    def marker(self) -> Path:
        return self.dir / MARKER

    @property
    def state_file(self) -> Path:
        return self.dir / "state.json"

    @property
    def etc(self) -> Path:
        return self.dir / "etc"

    @property
    def log(self) -> Path:
        return self.dir / "log"

    @property
    def run(self) -> Path:
        return self.dir / "run"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.dir / "munge" / "socket"

    @property
    def munge_key(self) -> Path:
        return self.dir / "munge" / "key"

    @property
    def mariadb_data(self) -> Path:
        return self.dir / "mariadb" / "data"

    @property
    def mariadb_socket(self) -> Path:
        return self.dir / "mariadb" / "socket"

    @property
    def gpu_devices(self) -> Path:
        return self.dir / "dev"

    @property
    def scratch(self) -> Path:
        return self.dir / "scratch"

    @property
    def images(self) -> Path:
        return self.dir / "images"

    def node_tmp(self, node: str) -> Path:
        """The directory for temporary files of one node, below /tmp because container runtimes mount that."""
        digest = hashlib.sha256(str(self.dir).encode()).hexdigest()[:8]
        return Path(f"/tmp/sluice-cluster-{digest}-{node}")  # noqa: S108 created by root, not followed if it is a link

    @property
    def ssh(self) -> Path:
        return self.dir / "ssh"

    @property
    def host_key(self) -> Path:
        return self.ssh / "host_key"

    @property
    def ca_key(self) -> Path:
        configured = os.environ.get("SLUICE_SSH_CA_KEY", "")
        return Path(configured).absolute() if configured else self.ssh / "ca_key"

    def create_marker(self) -> None:
        """Create the directory and its marker file before anything else is written there."""
        ensure_directory(self.dir, "root", 0o755)
        if not self.marker.exists():
            self.marker.write_text(MARKER_TEXT)

    def prepare(self) -> None:
        """Create the directories with the owners and modes that the daemons require."""
        slurm, munge = slurm_user(), account_or_root("munge")
        for path in (self.dir, self.etc, self.run, self.gpu_devices, self.scratch, self.images,
                     self.ssh, self.dir / "spool"):  # fmt: skip
            ensure_directory(path, "root", 0o755)
        # munged refuses a socket directory that others cannot enter or may write to.
        ensure_directory(self.dir / "munge", munge, 0o755)
        ensure_directory(self.dir / "mariadb", slurm, 0o700)
        ensure_directory(self.dir / "state", slurm, 0o700)
        # Logs name people, their jobs and paths. slurmctld and slurmdbd write as slurm, the other daemons as root.
        ensure_directory(self.log, slurm, 0o700)
        for node in NODES:
            ensure_directory(self.dir / "spool" / node.name, "root", 0o755)
            ensure_directory(self.node_tmp(node.name), "root", 0o1777)
        for user in USERS:
            ensure_directory(self.scratch / user, user, 0o700)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the cluster's lock, so that only one `scripts/cluster` changes it; a second one waits."""
        with lock_file(self.dir / "lock", f"another scripts/cluster that works on {self.dir}"):
            yield


def get_cluster_dir() -> Path:
    configured = os.environ.get("SLUICE_CLUSTER_DIR", "")
    return Path(os.path.abspath(configured)) if configured else DEFAULT_DIR


@contextlib.contextmanager
def lock_file(path: Path, holder: str) -> Iterator[None]:
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for {holder} …", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def ensure_directory(path: Path, user: str, mode: int) -> None:
    """Create the directory if it is missing, and set owner and mode. Raises if the path is a symbolic link."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise ClusterSetupError(
            f"{path} is a symbolic link, and following it as root is unsafe: remove it."
        )
    account = pwd.getpwnam(user)
    current = path.stat()
    if (current.st_uid, current.st_gid) != (account.pw_uid, account.pw_gid):
        os.chown(path, account.pw_uid, account.pw_gid)
    if stat.S_IMODE(current.st_mode) != mode:
        path.chmod(mode)


def account_or_root(name: str) -> str:
    try:
        return pwd.getpwnam(name).pw_name
    except KeyError:
        return "root"


def slurm_user() -> str:
    return account_or_root("slurm")


def check_directory(layout: Layout) -> None:
    """Raise ClusterSetupError if the directory cannot be used.

    For example, the demo accounts cannot enter it, it contains other files, or its path is too long.
    """
    path = layout.dir
    if len(str(path)) > MAX_DIR_LENGTH:
        raise ClusterSetupError(
            f"{path} is too long a path for Unix sockets below it: "
            f"choose a SLUICE_CLUSTER_DIR of at most {MAX_DIR_LENGTH} characters."
        )
    # Slurm's configuration files have no quoting: other characters could end a value or start a comment.
    if any(not (c.isalnum() or c in "/._-+@") for c in str(path)):
        raise ClusterSetupError(
            f"{path} has a character that Slurm's configuration cannot hold: "
            "choose a SLUICE_CLUSTER_DIR of letters, digits and / . _ - only."
        )
    for parent in reversed(path.parents):
        if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH:
            raise ClusterSetupError(
                f"{parent} cannot be entered by the cluster's accounts (mode "
                f"{stat.S_IMODE(parent.stat().st_mode):04o}): choose a SLUICE_CLUSTER_DIR elsewhere, "
                "for example below /var/lib."
            )
    if path.exists() and not path.is_dir():
        raise ClusterSetupError(f"{path} is not a directory: choose another SLUICE_CLUSTER_DIR.")
    if path.is_dir() and not layout.marker.exists() and any(path.iterdir()):
        raise ClusterSetupError(
            f"{path} holds files but no embedded cluster: choose an empty SLUICE_CLUSTER_DIR, "
            "so that no other files are overwritten."
        )


def check_space(directory: Path, *, needed_mib: int, purpose: str) -> None:
    while not directory.exists():
        directory = directory.parent
    free_mib = shutil.disk_usage(directory).free // 2**20
    if free_mib < needed_mib:
        raise ClusterSetupError(
            f"{directory} has {free_mib} MB free and {purpose} needs about {needed_mib} MB: "
            "free some space or choose another SLUICE_CLUSTER_DIR."
        )


def read_state(layout: Layout) -> dict[str, object]:
    try:
        state = json.loads(layout.state_file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(layout: Layout, state: dict[str, object]) -> None:
    write_atomically(layout.state_file, json.dumps(state, indent=1, sort_keys=True) + "\n")


def write_atomically(path: Path, text: str, *, mode: int = 0o644, user: str = "root") -> bool:
    """Replace the file if its content differs from `text`; returns whether it did."""
    account = pwd.getpwnam(user)
    temporary = path.with_name(f".{path.name}.new")
    try:
        changed = path.read_text() != text
    except (FileNotFoundError, UnicodeDecodeError):
        changed = True
    if changed:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(text)
        os.chown(temporary, account.pw_uid, account.pw_gid)
        temporary.chmod(mode)
        temporary.replace(path)
    return changed


def read_ports(layout: Layout) -> dict[str, int]:
    ports = read_state(layout).get("ports", {})
    if not isinstance(ports, dict) or set(ports) != set(PORT_NAMES):
        return {}
    return {name: int(port) for name, port in ports.items()}


def port_is_free(port: int) -> bool:
    """Return whether no process listens on this port on any address of the machine."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 a test, no service
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if (
                family == socket.AF_INET or error.errno == 98
            ):  # other errors mean that the machine has no IPv6
                return False
    return True


def assign_ports(layout: Layout, *, running: Iterable[str]) -> list[str]:
    """Assign a free port to each daemon that has none or whose port another process uses; the others keep theirs.

    `running` are the daemons that run now and use their own ports. Returns a message for each changed port.
    """
    with lock_file(SHARED_DIR / "ports.lock", "another cluster that chooses its ports"):
        ports, messages = read_ports(layout), []
        running_names = set(running)
        rng = random.Random(str(layout.dir))  # noqa: S311 not for security: distributes clusters over the range
        candidates = iter(rng.sample(PORT_RANGE, len(PORT_RANGE)))
        assigned: dict[str, int] = {}
        for name in PORT_NAMES:
            port = ports.get(name)
            if port is not None and (name in running_names or port_is_free(port)):
                assigned[name] = port
                continue
            used_ports = {*assigned.values(), *ports.values()}
            assigned[name] = next(p for p in candidates if p not in used_ports and port_is_free(p))
            if port is not None:
                messages.append(
                    f"Port {port} of {name} was taken by another program; it is {assigned[name]} now."
                )
        if assigned != ports:
            write_state(layout, {**read_state(layout), "ports": assigned})
    return messages
