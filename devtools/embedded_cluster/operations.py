"""Operations on a whole cluster: start or repair it, stop it, report its status.

Defines the order in which daemons start and stop.
"""

from __future__ import annotations

import os
import pwd
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from devtools.embedded_cluster import accounts, apptainer, images, memory, packages
from devtools.embedded_cluster.configuration import write_configuration
from devtools.embedded_cluster.console import ClusterSetupError, ProgressSteps, open_log, run
from devtools.embedded_cluster.daemons import Daemon, build_daemons, build_slurm_environment
from devtools.embedded_cluster.layout import (
    NODES,
    SHARED_DIR,
    USERS,
    Layout,
    assign_ports,
    check_directory,
    check_space,
    ensure_directory,
    read_ports,
    slurm_user,
)
from devtools.embedded_cluster.processes import (
    Process,
    find_by_token,
    find_descendants,
    find_socket_inodes,
    holds_socket,
    is_connected,
    iter_open_files,
    iter_processes,
    terminate_all,
)

NODE_NAMES = tuple(node.name for node in NODES)
FIRST_SPACE_MIB, LATER_SPACE_MIB = 2000, 200


def up(layout: Layout, *, with_images: bool) -> None:
    """Start the cluster or repair it: create what is missing and start what does not run."""
    check_directory(layout)
    ensure_directory(SHARED_DIR, "root", 0o755)
    first_time = not (layout.mariadb_data / "mysql").exists()
    check_space(
        layout.dir,
        needed_mib=FIRST_SPACE_MIB if first_time else LATER_SPACE_MIB,
        purpose="a new embedded cluster" if first_time else "the embedded cluster",
    )
    if with_images and not images.are_cached():
        check_space(
            SHARED_DIR, needed_mib=FIRST_SPACE_MIB, purpose="building Apptainer and the images"
        )
    layout.create_marker()
    with layout.locked():
        steps = ProgressSteps(12 if with_images else 10)
        log = prepare(layout, steps)
        start_daemons(layout, steps)
        if with_images:
            with steps.step("providing Apptainer") as remarks:
                remarks += apptainer.ensure_installed(log=log)
            with steps.step("providing the images busybox.sif and python.sif") as remarks:
                remarks += images.ensure_installed(layout, log=log)
    print(f"The cluster in {layout.dir} is up; its logs are in {layout.log}.")


def prepare(layout: Layout, steps: ProgressSteps) -> Path:
    """Prepare packages, accounts, directories and configuration; returns the log file of the installation commands."""
    bootstrap_log = SHARED_DIR / "install.log"
    open_log(bootstrap_log).close()  # also makes an older one private
    with steps.step(f"packages (log: {bootstrap_log})") as remarks:
        installed = packages.install(packages.CLUSTER_REQUIREMENTS, log=bootstrap_log)
        installed += packages.install_pmix(log=bootstrap_log)
        remarks += [f"installed {', '.join(installed)}"] if installed else ["all there"]
    with steps.step("Unix accounts") as remarks:
        created = accounts.ensure_unix_accounts()
        remarks += [f"created {', '.join(created)}"] if created else ["all there"]
    with steps.step(f"configuration in {layout.etc}"):
        layout.prepare()
        running = [
            name for name, daemon in build_known_daemons(layout).items() if daemon.find_process()
        ]
        for message in assign_ports(layout, running=running):
            steps.note(message)
        write_configuration(layout, read_ports(layout))
    return bootstrap_log


def build_known_daemons(layout: Layout) -> dict[str, Daemon]:
    """Return the daemons; empty before the first `up`, which assigns their ports."""
    return build_daemons(layout) if read_ports(layout) else {}


def start_daemons(layout: Layout, steps: ProgressSteps) -> None:
    daemons = build_daemons(layout)
    with steps.step("starting munge") as remarks:
        munge_started = daemons["munge"].ensure_running()
        remarks.append(munge_started or "was running")
    with steps.step("starting mariadb") as remarks:
        remarks.append(ensure_database(layout, daemons["mariadb"]) or "was running")
    with steps.step("starting slurmdbd") as remarks:
        remarks.append(daemons["slurmdbd"].ensure_running() or "was running")
        accounts.ensure_cluster_entry(layout)
    with steps.step("starting slurmctld") as remarks:
        # Its messages to the nodes failed without munge. Those that it still repeats would mark nodes as not responding
        # after munge is back; a new slurmctld asks the nodes to register.
        if munge_started and daemons["slurmctld"].stop():
            remarks.append("stopped, because munge was down")
        remarks.append(daemons["slurmctld"].ensure_running() or "was running")
        if wait_for_accounting(daemons):
            remarks.append("connected to slurmdbd")
    with steps.step("Slurm accounts") as remarks:
        remarks.append("made" if accounts.ensure_slurm_accounts(layout) else "all there")
    with steps.step(f"starting the nodes {', '.join(NODE_NAMES)}") as remarks:
        start_nodes(layout, remarks)
    with steps.step("starting sshd") as remarks:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        remarks.append(daemons["sshd"].ensure_running() or "was running")


def start_nodes(layout: Layout, remarks: list[str]) -> None:
    daemons = build_daemons(layout)
    try:
        if not any(daemons[name].find_process() for name in NODE_NAMES):
            memory.remove_cgroups(layout)
        done = {name: daemons[name].ensure_running() for name in NODE_NAMES}
    except ClusterSetupError:
        if memory.get_memory_enforcement(layout) is memory.MemoryEnforcement.POLLING:
            raise
        # Some machines have cgroups that slurmd cannot use. With polling everything works except the state
        # OUT_OF_MEMORY.
        memory.use_polling(layout)
        write_configuration(layout, read_ports(layout))
        daemons["slurmctld"].ensure_running()
        done = {name: daemons[name].ensure_running() for name in NODE_NAMES}
        remarks.append("cgroups are unusable; memory limits are enforced by polling")
    remarks += [f"{name} {what}" for name, what in done.items() if what] or ["were running"]
    wait_for_nodes(layout, remarks)


def ensure_database(layout: Layout, daemon: Daemon) -> str:
    """Create MariaDB's data directory if needed and start MariaDB; returns what was done, empty for nothing."""
    data = layout.mariadb_data
    complete_marker = layout.dir / "mariadb" / "installed"
    if not complete_marker.exists():
        # Without the marker the installation was interrupted, so there is no data to keep.
        daemon.stop()
        shutil.rmtree(data, ignore_errors=True)
        user = slurm_user()
        ensure_directory(data, user, 0o700)
        run(
            [
                "mariadb-install-db", "--no-defaults", f"--user={user}", f"--datadir={data}",
                "--auth-root-authentication-method=socket", f"--auth-root-socket-user={user}",
                "--skip-test-db", "--skip-name-resolve",
                # MariaDB deletes temporary tables in this directory when it starts; in /tmp they
                # could belong to another server.
                f"--tmpdir={data.parent}",
            ],
            timeout_s=300,
        )  # fmt: skip
        complete_marker.touch()
    return daemon.ensure_running()


def wait_for_accounting(daemons: dict[str, Daemon], timeout_s: float = 45) -> bool:
    """Wait until slurmctld is connected to slurmdbd; returns whether it had to wait."""
    port, waited = daemons["slurmdbd"].port or 0, False
    deadline = time.monotonic() + timeout_s
    while True:
        controller = daemons["slurmctld"].find_process()
        if controller is not None and is_connected(controller, port):
            return waited
        if time.monotonic() > deadline:
            raise ClusterSetupError(
                f"slurmctld did not connect to slurmdbd within {timeout_s:.0f} s: "
                f"see {daemons['slurmctld'].log_file} and {daemons['slurmdbd'].log_file}."
            )
        waited = True
        time.sleep(0.2)


def read_node_states(layout: Layout) -> dict[str, str]:
    output = run(
        ["sinfo", "-h", "-N", "-o", "%N %T"],
        env=build_slurm_environment(layout),
        check=False,
        timeout_s=30,
    ).stdout
    return dict(line.split() for line in output.splitlines() if len(line.split()) == 2)


def is_usable(state: str) -> bool:
    """Return whether a node in this state needs no repair.

    Slurm appends * to the state of a node that does not respond. A drained node needs no repair: a person drained it.
    """
    return not state.endswith("*") and not state.startswith(
        ("down", "unk", "inval", "fail", "future")
    )


def wait_for_nodes(layout: Layout, remarks: list[str], timeout_s: float = 40) -> None:
    """Wait until all nodes are usable; resumes each node in state down once.

    A node that slurmctld takes for not responding is restarted once, so that it registers: slurmctld itself asks it
    again only after minutes.
    """
    daemons = build_daemons(layout)
    deadline = time.monotonic() + timeout_s
    restart_at = time.monotonic() + 5
    resumed: set[str] = set()
    restarted: set[str] = set()
    while True:
        states = read_node_states(layout)
        unusable = {
            name: states.get(name, "missing")
            for name in NODE_NAMES
            if not is_usable(states.get(name, "fail"))
        }
        if not unusable:
            break
        for name, state in unusable.items():
            if state == "down" and name not in resumed:
                resumed.add(name)
                update = ["scontrol", "update", f"nodename={name}", "state=resume"]
                run(update, env=build_slurm_environment(layout), check=False)
            elif state.endswith("*") and name not in restarted and time.monotonic() > restart_at:
                restarted.add(name)
                daemons[name].stop()
                daemons[name].start()
        if time.monotonic() > deadline:
            summary = ", ".join(f"{name} is {state}" for name, state in unusable.items())
            raise ClusterSetupError(
                f"Not all nodes came up within {timeout_s:.0f} s ({summary}): see {layout.log}/slurmctld.log."
            )
        time.sleep(0.2)
    for what, names in (("resumed", resumed), ("restarted", restarted)):
        if names:
            remarks.append(f"{what} {', '.join(sorted(names))}")


def down(layout: Layout) -> int:
    """Stop all processes of this cluster; returns how many it ended."""
    daemons = build_known_daemons(layout)
    if not daemons:
        return 0
    with layout.locked():
        controller = daemons["slurmctld"].find_process()
        if controller is not None and any(daemons[name].find_process() for name in NODE_NAMES):
            cancel_running_jobs(layout)
        # Stop sshd first, so that no new session starts while the existing ones are ended.
        count = int(daemons["sshd"].stop())
        while ended := end_ssh_sessions(layout):
            count += ended
        # Stop slurmctld before slurmd. Otherwise it would lose its nodes and mark their jobs as failed. A slurmd waits
        # for its jobs, so these end first; they have got SIGTERM already.
        count += daemons["slurmctld"].stop()
        count += terminate_all(find_job_processes(layout), stop_timeout_s=2)
        for name in NODE_NAMES:
            count += daemons[name].stop()
        for name in ("slurmdbd", "mariadb", "munge"):
            count += daemons[name].stop()
        memory.remove_cgroups(layout)
    return count


def cancel_running_jobs(layout: Layout) -> None:
    """Cancel running jobs, so that accounting records their end; pending jobs stay pending until the next `up`."""
    env = build_slurm_environment(layout)
    running = "RUNNING,SUSPENDED,STOPPED,CONFIGURING"
    try:
        job_ids = run(
            ["squeue", "-h", "-t", running, "-o", "%A"], env=env, check=False, timeout_s=10
        ).stdout.split()
        if job_ids:
            run(["scancel", *sorted(set(job_ids))], env=env, check=False, timeout_s=20)
    except ClusterSetupError:
        return  # slurmctld does not respond; it is stopped without cancelling the jobs


def get_user_ids() -> set[int]:
    found = set()
    for user in USERS:
        try:
            found.add(pwd.getpwnam(user).pw_uid)
        except KeyError:
            continue
    return found


def has_variable(environment: list[bytes], prefix: bytes) -> bool:
    return any(variable.startswith(prefix) for variable in environment)


def find_job_processes(layout: Layout) -> list[Process]:
    """Find the step daemons of this cluster, their descendants, and other processes of the demo accounts' jobs."""
    marker = f"SLURM_CONF={layout.slurm_conf}".encode()
    logs = f"{os.path.realpath(layout.log)}/"
    uids, stepds, detached = get_user_ids(), [], []
    for process in iter_processes():
        environment = process.environment()
        # Debian's program is slurmstepd-wlm. It overwrites its arguments and environment with a process title, so the
        # open log file of its node must identify the cluster.
        if os.path.basename(process.executable()).startswith("slurmstepd"):
            if any(path.startswith(logs) for path in iter_open_files(process)):
                stepds.append(process)
        elif (
            process.uid() in uids
            and marker in environment
            and has_variable(environment, b"SLURM_JOB_ID=")
        ):
            detached.append(process)
    return [*find_descendants(stepds), *detached, *stepds]


def end_ssh_sessions(layout: Layout) -> int:
    """End the session processes of this cluster's sshd and the commands of those sessions; returns their number."""
    port = read_ports(layout)["sshd"]
    inodes = find_socket_inodes(port)
    listener = find_by_token("sshd", f"-f {layout.etc}/sshd_config")
    servers = [
        process
        for process in iter_processes()
        if process != listener
        and os.path.basename(process.executable()).startswith("sshd")
        and holds_socket(process, inodes)
    ]
    uids, marker = get_user_ids(), f"SLURM_CONF={layout.slurm_conf}".encode()
    orphans = [
        process
        for process in iter_processes()
        if process.uid() in uids
        and marker in (environment := process.environment())
        and has_variable(environment, b"SSH_CONNECTION=")
        and not has_variable(environment, b"SLURM_JOB_ID=")
    ]
    return terminate_all([*find_descendants(servers), *orphans, *servers], stop_timeout_s=3)


@dataclass(frozen=True)
class DaemonStatus:
    name: str
    pid: int | None
    port: int | None
    state: str

    @property
    def ok(self) -> bool:
        return self.state.startswith("running")


def status(layout: Layout) -> list[DaemonStatus]:
    rows: list[DaemonStatus] = []
    states: dict[str, str] = {}
    for name, daemon in build_known_daemons(layout).items():
        process = daemon.find_process()
        if process is None:
            state = "stopped"
        elif name == "slurmctld" and not rows[0].ok:
            # Do not check slurmctld: the command would retry to reach munge for half a minute.
            state = "not responding, because munge does not"
        elif not daemon.is_responding():
            state = "not responding"
        else:
            state = "running"
            if name == "slurmctld":
                states = read_node_states(layout)
            elif name in states:
                state = f"running, {states[name]}" if is_usable(states[name]) else states[name]
        rows.append(DaemonStatus(name, process.pid if process else None, daemon.port, state))
    return rows


def reset(layout: Layout) -> None:
    """Delete the cluster's directory, if it has the marker file."""
    if not layout.dir.exists():
        return
    if not layout.marker.is_file() or layout.dir.is_symlink():
        raise ClusterSetupError(
            f"{layout.dir} has no marker file of an embedded cluster: it is not deleted."
        )
    down(layout)
    for path in (layout.node_tmp(name) for name in NODE_NAMES):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    for entry in sorted(layout.dir.iterdir(), key=lambda path: path == layout.marker):
        # The marker is deleted last, so that an interrupted reset can be repeated.
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def find_daemon(layout: Layout, name: str) -> Daemon:
    daemons = build_known_daemons(layout)
    if not daemons:
        raise ClusterSetupError(
            f"There is no cluster in {layout.dir} yet: run scripts/cluster up first."
        )
    if name not in daemons:
        raise ClusterSetupError(f"There is no daemon {name}: choose one of {', '.join(daemons)}.")
    return daemons[name]
