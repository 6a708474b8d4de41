"""The command line of `scripts/cluster`: parses arguments, runs the operation, returns the exit code."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path

from devtools.embedded_cluster import apptainer, operations, packages
from devtools.embedded_cluster.console import ClusterSetupError, print_error
from devtools.embedded_cluster.layout import SERVICE_USER, Layout, get_cluster_dir, read_ports

DESCRIPTION = """A complete Slurm cluster on this machine: slurmctld, slurmdbd with MariaDB, four nodes,
an sshd on loopback that trusts Sluice's certificate authority, Apptainer and two images. It has its own
directory, ports, sockets and keys; the machine's own Slurm, MariaDB and sshd are not affected."""

EPILOG = """environment:
  SLUICE_CLUSTER_DIR   the cluster's directory (default /var/lib/sluice/cluster); each directory is a separate cluster
  SLUICE_SSH_CA_KEY    the private key of the certificate authority (default: ssh/ca_key in that directory)

examples:
  scripts/cluster up && eval "$(scripts/cluster env)" && sinfo
  SLUICE_CLUSTER_DIR=/var/lib/sluice/second scripts/cluster up
  scripts/cluster logs slurmctld -f
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser(
        "up", help="start the cluster, or repair it: create what is missing, start what has stopped"
    )
    up.add_argument(
        "--no-images",
        action="store_true",
        help="without Apptainer and the images (faster first start)",
    )
    commands.add_parser(
        "down", help="stop the cluster; running jobs are cancelled, pending jobs stay queued"
    )
    status = commands.add_parser(
        "status", help="show each daemon; exit code 0 only if all of them work"
    )
    status.add_argument("--json", action="store_true", help="as JSON")
    commands.add_parser("env", help="print shell commands that set the environment for the cluster")
    logs = commands.add_parser("logs", help="show the last lines of the logs")
    logs.add_argument("name", nargs="?", metavar="NAME", help="one daemon; default: all")
    logs.add_argument("-f", "--follow", action="store_true", help="follow the logs")
    logs.add_argument(
        "-n", "--lines", type=int, default=20, help="number of lines of each log (default 20)"
    )
    reset = commands.add_parser(
        "reset", help="stop the cluster and delete the contents of its directory"
    )
    reset.add_argument("--yes", action="store_true", help="do not prompt")
    for name, text in (
        ("start", "start one daemon"),
        ("stop", "stop one daemon"),
        ("kill", "kill one daemon with SIGKILL, to test a crash"),
    ):
        one = commands.add_parser(name, help=text)
        one.add_argument(
            "name", metavar="NAME", help="munge, mariadb, slurmdbd, slurmctld, n1 … n4 or sshd"
        )
    return parser


def print_status(layout: Layout, *, as_json: bool) -> int:
    rows = operations.status(layout)
    all_running = bool(rows) and all(row.ok for row in rows)
    if as_json:
        daemons = [
            {"name": r.name, "pid": r.pid, "port": r.port, "state": r.state, "ok": r.ok}
            for r in rows
        ]
        print(json.dumps({"dir": str(layout.dir), "ok": all_running, "daemons": daemons}, indent=1))
    elif not rows:
        print(f"There is no cluster in {layout.dir}.")
    else:
        print(f"{'DAEMON':<11}{'PID':>8}{'PORT':>7}  STATE")
        for row in rows:
            print(f"{row.name:<11}{row.pid or '-':>8}{row.port or '-':>7}  {row.state}")
    return 0 if all_running else 1


def build_environment(layout: Layout) -> dict[str, str]:
    ports = read_ports(layout)
    if not ports or not layout.host_key.exists():
        raise ClusterSetupError(
            f"There is no cluster in {layout.dir} yet: run scripts/cluster up first."
        )
    public = layout.host_key.with_name("host_key.pub").read_text().split()
    return {
        "SLURM_CONF": str(layout.slurm_conf),
        "SLUICE_CLUSTER_DIR": str(layout.dir),
        "SLUICE_EMBEDDED_SSH_PORT": str(ports["sshd"]),
        "SLUICE_EMBEDDED_HOST_KEY": " ".join(public[:2]),
        "SLUICE_SSH_CA_KEY": str(layout.ca_key),
        "SLUICE_EMBEDDED_WORK_ROOT": f"{layout.scratch}/{{user}}",
        "SLUICE_EMBEDDED_IMAGES": str(layout.images),
        "SLUICE_EMBEDDED_SERVICE_USER": SERVICE_USER,
        "SLUICE_EMBEDDED_MPI": "pmix" if packages.has_pmix() else "",
    }


def print_environment(layout: Layout) -> int:
    for name, value in build_environment(layout).items():
        print(f"export {name}={shlex.quote(value)}")
    extra_path = apptainer.find_path_entry()
    if extra_path:
        print(f'export PATH={shlex.quote(extra_path)}:"$PATH"')
    return 0


def show_logs(layout: Layout, name: str | None, *, follow: bool, lines: int) -> int:
    if name is not None:
        files = [daemon.log_file for daemon in [operations.find_daemon(layout, name)]]
    else:
        files = sorted(layout.log.glob("*.log"))
    files = [file for file in files if file.exists()]
    if not files:
        raise ClusterSetupError(f"There are no logs in {layout.log} yet.")
    sys.stdout.flush()
    os.execvp(  # noqa: S606 tail replaces this process
        "tail", ["tail", f"--lines={lines}", *(["-F"] if follow else []), "--", *map(str, files)]
    )


def confirm_and_reset(layout: Layout, *, confirmed: bool) -> int:
    if not layout.dir.exists():
        print(f"There is no cluster in {layout.dir}.")
        return 0
    if not confirmed:
        if not sys.stdin.isatty():
            raise ClusterSetupError(
                "reset deletes the cluster with all its jobs and files: add --yes to confirm without a terminal."
            )
        reply = input(f"Delete the cluster in {layout.dir} with all its jobs and files? [y/N] ")
        if reply.strip().lower() not in ("y", "yes"):
            print("Nothing was deleted.")
            return 1
    operations.reset(layout)
    print(
        f"The cluster in {layout.dir} was deleted. The Unix accounts remain, because other clusters may use them."
    )
    return 0


def run_daemon_command(layout: Layout, command: str, name: str) -> int:
    daemon = operations.find_daemon(layout, name)
    with layout.locked():
        if command == "start":
            print(f"{name}: {daemon.ensure_running() or 'was running'}")
        else:
            was_running = daemon.stop() if command == "stop" else daemon.kill()
            print(f"{name}: {'ended' if was_running else 'was not running'}")
    return 0


def dispatch(arguments: argparse.Namespace) -> int:
    layout = Layout(get_cluster_dir())
    command = arguments.command
    if command == "up":
        operations.up(layout, with_images=not arguments.no_images)
        return 0
    if command == "down":
        count = operations.down(layout)
        print(
            f"The cluster in {layout.dir} is down ({count} processes ended)."
            if count
            else "Nothing was running."
        )
        return 0
    if command == "status":
        return print_status(layout, as_json=arguments.json)
    if command == "env":
        return print_environment(layout)
    if command == "logs":
        return show_logs(layout, arguments.name, follow=arguments.follow, lines=arguments.lines)
    if command == "reset":
        return confirm_and_reset(layout, confirmed=arguments.yes)
    return run_daemon_command(layout, command, arguments.name)


def main(argv: list[str]) -> int:
    arguments = build_parser().parse_args(argv)
    if os.geteuid() != 0:
        print_error(
            "scripts/cluster creates accounts and starts daemons and must run as root: use sudo."
        )
        return 1
    try:
        return dispatch(arguments)
    except ClusterSetupError as error:
        print_error(str(error))
        return 1
    except OSError as error:
        # For example a full disk or a read-only file system; the message names the cause and the file.
        print_error(f"{error.strerror or error} ({error.filename or Path.cwd()}).")
        return 1
    except KeyboardInterrupt:
        print_error("interrupted; run the same command again to continue.")
        return 130
