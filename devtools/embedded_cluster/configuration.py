"""Renders and writes every configuration file of the embedded cluster.

The rendered text depends only on the layout, the ports and the machine, so that a running daemon is restarted only when
its configuration changed.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from functools import cache
from pathlib import Path

from devtools.embedded_cluster import apptainer, memory, packages
from devtools.embedded_cluster.console import SYSTEM_PATH, run
from devtools.embedded_cluster.layout import (
    CLUSTER_NAME,
    DEFAULT_DIR,
    NODES,
    USERS,
    Layout,
    account_or_root,
    slurm_user,
    write_atomically,
)


@cache
def get_slurm_version() -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", run(["slurmctld", "-V"]).stdout)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def get_host_name() -> str:
    return socket.gethostname().split(".")[0]


def find_host_loopback_address() -> str:
    """Return the loopback address to which the host name resolves; empty if it resolves to another address.

    With NoInAddrAny Slurm's daemons listen only on the address of the host name. If this is a loopback address (Debian:
    127.0.1.1), other machines cannot reach the daemons. Otherwise NoInAddrAny is not set, the daemons listen on all
    addresses, and only munge protects them.
    """
    try:
        address = socket.gethostbyname(get_host_name())
    except OSError:
        return ""
    return address if ipaddress.ip_address(address).is_loopback else ""


def render_slurm_conf(layout: Layout, ports: dict[str, int]) -> str:
    host, loopback = get_host_name(), find_host_loopback_address()
    address = loopback or "127.0.0.1"
    first_id = memory.assign_first_job_id(layout, ports, is_default=layout.dir == DEFAULT_DIR)
    lines = [
        "# Written by scripts/cluster; changes here are overwritten by the next `up`.",
        f"ClusterName={CLUSTER_NAME}",
        f"SlurmctldHost={host}({address})",
        f"SlurmctldPort={ports['slurmctld']}",
        f"SlurmUser={slurm_user()}",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        "CredType=cred/munge",
        *(["CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"] if loopback else []),
        f"PlugStackConfig={layout.etc}/plugstack.conf",
        f"StateSaveLocation={layout.dir}/state",
        f"SlurmdSpoolDir={layout.dir}/spool/%n",
        # Slurm's PMIx plugin creates a directory named for the step here; nodes of one machine must not share it.
        # slurmd loads the plugin only at its start; the changed line restarts it after PMIx was installed.
        f"TmpFS={layout.node_tmp('%n')}"
        if packages.has_pmix()
        else "# TmpFS: default, there is no PMIx",
        f"SlurmctldPidFile={layout.dir}/state/slurmctld.pid",
        f"SlurmdPidFile={layout.dir}/state/%n.pid",
        f"SlurmctldLogFile={layout.log}/slurmctld.log",
        f"SlurmdLogFile={layout.log}/%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        "SlurmctldSyslogDebug=quiet",
        "SlurmdSyslogDebug=quiet",
        "MailProg=/bin/true",
        "MpiDefault=none",
        # This plugin needs no cgroups, so it works in containers and on a host with another Slurm.
        "ProctrackType=proctrack/linuxproc",
        *memory.render_slurm_conf_lines(layout),
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=task=2",
        "SwitchType=switch/none" if get_slurm_version() < (23, 11) else "# SwitchType: none",
        "PropagateResourceLimits=NONE",
        "PrologFlags=Alloc",
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "SlurmctldTimeout=20",
        "SlurmdTimeout=20",
        "MessageTimeout=10",
        "TCPTimeout=3",
        "BatchStartTimeout=10",
        "KillWait=5",
        "UnkillableStepTimeout=60",
        "InactiveLimit=0",
        "MinJobAge=300",
        "WaitTime=0",
        "JobRequeue=1",
        f"FirstJobId={first_id}",
        "MaxArraySize=10001",
        "MaxJobCount=20000",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,bf_interval=1,bf_continue,sched_min_interval=100000,batch_sched_delay=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        "DefMemPerCPU=500",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=10000",
        "PriorityWeightAge=1000",
        "PreemptType=preempt/qos",
        "PreemptMode=REQUEUE",
        "PreemptExemptTime=00:00:00",
        "GresTypes=gpu",
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=localhost",
        f"AccountingStoragePort={ports['slurmdbd']}",
        # For connections to slurmdbd, this option names munge's socket instead of AuthInfo.
        f"AccountingStoragePass={layout.munge_socket}",
        "AccountingStorageEnforce=associations,limits,qos",
        "AccountingStorageTRES=gres/gpu,gres/gpu:a100,gres/gpu:v100",
        "AccountingStoreFlags=job_comment",
    ]
    for node in NODES:
        gres = f" Gres=gpu:{node.gpu_type}:{node.gpus} Feature={node.gpu_type}" if node.gpus else ""
        lines.append(
            f"NodeName={node.name} NodeHostname={host} NodeAddr={address} Port={ports[node.name]} "
            f"CPUs={node.cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={node.cpus} ThreadsPerCore=1 "
            f"RealMemory={node.mem_mib}{gres} State=UNKNOWN"
        )
    lines += [
        "PartitionName=gpu Nodes=n[1-2] Default=YES MaxTime=7-00:00:00 DefaultTime=1-00:00:00 State=UP",
        "PartitionName=v100 Nodes=n3 MaxTime=7-00:00:00 DefaultTime=1-00:00:00 State=UP",
        "PartitionName=cpu Nodes=n[3-4] MaxTime=7-00:00:00 DefaultTime=1-00:00:00 State=UP",
        "PartitionName=debug Nodes=n4 MaxTime=00:10:00 DefaultTime=00:05:00 State=UP",
        "PartitionName=all Nodes=n[1-4] MaxTime=7-00:00:00 DefaultTime=1-00:00:00 State=UP",
    ]
    return "\n".join(lines) + "\n"


def render_slurmdbd_conf(layout: Layout, ports: dict[str, int]) -> str:
    return (
        "\n".join(
            [
                "# Written by scripts/cluster; changes here are overwritten by the next `up`.",
                "AuthType=auth/munge",
                f"AuthInfo=socket={layout.munge_socket}",
                "DbdHost=localhost",
                "DbdAddr=127.0.0.1",
                f"DbdPort={ports['slurmdbd']}",
                f"SlurmUser={slurm_user()}",
                "DebugLevel=info",
                "DebugLevelSyslog=quiet",
                f"LogFile={layout.log}/slurmdbd.log",
                f"PidFile={layout.dir}/state/slurmdbd.pid",
                "StorageType=accounting_storage/mysql",
                # No StoragePass and StoragePort: MariaDB authenticates the Unix user over its Unix socket, which
                # the variable MYSQL_UNIX_PORT names.
                "StorageHost=localhost",
                f"StorageUser={slurm_user()}",
                "StorageLoc=slurm_acct_db",
            ]
        )
        + "\n"
    )


def render_gres_conf(layout: Layout) -> str:
    lines = ["AutoDetect=off"]
    for node in NODES:
        if node.gpus:
            devices = f"{layout.gpu_devices}/{node.name}-gpu[0-{node.gpus - 1}]"
            lines.append(f"NodeName={node.name} Name=gpu Type={node.gpu_type} File={devices}")
    return "\n".join(lines) + "\n"


def render_my_cnf(layout: Layout) -> str:
    data = layout.mariadb_data
    return f"""[mariadbd]
user={slurm_user()}
datadir={data}
socket={layout.mariadb_socket}
pid-file={layout.dir}/mariadb/pid
skip-networking
skip-name-resolve
character-set-server=utf8mb4
innodb_buffer_pool_size=48M
innodb_log_file_size=24M
innodb_lock_wait_timeout=900
innodb_flush_log_at_trx_commit=2
innodb_flush_neighbors=0
innodb_doublewrite=1
max_allowed_packet=16M
max_connections=40
table_open_cache=200
key_buffer_size=1M
aria_pagecache_buffer_size=8M
performance_schema=OFF
log_warnings=1
tmpdir={layout.dir}/mariadb
"""


def render_sshd_config(layout: Layout, ports: dict[str, int]) -> str:
    path = apptainer.build_login_path(SYSTEM_PATH)
    return f"""# Written by scripts/cluster; changes here are overwritten by the next `up`.
ListenAddress 127.0.0.1
Port {ports["sshd"]}
HostKey {layout.host_key}
PidFile {layout.run}/sshd.pid
TrustedUserCAKeys {layout.etc}/ssh_ca.pub
AuthorizedKeysFile none
AuthenticationMethods publickey
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitEmptyPasswords no
PermitRootLogin no
AllowUsers {" ".join(USERS)}
UsePAM no
UseDNS no
StrictModes yes
PermitUserEnvironment no
PermitUserRC no
SetEnv SLURM_CONF={layout.slurm_conf} PATH={path} LANG=C.UTF-8
AllowTcpForwarding local
AllowStreamLocalForwarding no
AllowAgentForwarding no
X11Forwarding no
PermitTunnel no
GatewayPorts no
PrintMotd no
PrintLastLog no
MaxStartups 200:30:400
LoginGraceTime 30
ClientAliveInterval 60
ClientAliveCountMax 3
LogLevel VERBOSE
Subsystem sftp internal-sftp
"""


def make_gpu_devices(layout: Layout) -> None:
    """Create the device file that Slurm requires for each simulated GPU, with the device number of /dev/null (1, 3)."""
    for node in NODES:
        for index in range(node.gpus):
            path = layout.gpu_devices / f"{node.name}-gpu{index}"
            if not path.exists():
                run(["mknod", "-m", "666", str(path), "c", "1", "3"])


def make_key(path: Path, comment: str) -> None:
    """Create an SSH key pair; of an existing pair only the mode and a missing public key are corrected."""
    if path.exists():
        path.chmod(0o600)
        if not path.with_name(path.name + ".pub").exists():
            public = run(["ssh-keygen", "-y", "-P", "", "-f", str(path)]).stdout
            path.with_name(path.name + ".pub").write_text(public)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".pub").unlink(missing_ok=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)])


def make_munge_key(layout: Layout) -> None:
    key = layout.munge_key
    if not key.exists() or key.stat().st_size < 32:
        key.unlink(missing_ok=True)
        write_atomically(key, os.urandom(512).hex(), mode=0o400, user=account_or_root("munge"))


def write_configuration(layout: Layout, ports: dict[str, int]) -> None:
    make_gpu_devices(layout)
    make_munge_key(layout)
    make_key(layout.host_key, f"{CLUSTER_NAME}-embedded-host")
    make_key(layout.ca_key, f"{CLUSTER_NAME}-ca")
    slurm = slurm_user()
    write_atomically(layout.slurm_conf, render_slurm_conf(layout, ports))
    write_atomically(
        layout.etc / "slurmdbd.conf", render_slurmdbd_conf(layout, ports), mode=0o600, user=slurm
    )
    write_atomically(layout.etc / "gres.conf", render_gres_conf(layout))
    write_atomically(
        layout.etc / "cgroup.conf", memory.render_cgroup_conf(layout, get_slurm_version())
    )
    write_atomically(
        layout.etc / "plugstack.conf", "# No plugins: the machine's own are not read.\n"
    )
    write_atomically(layout.etc / "my.cnf", render_my_cnf(layout))
    public = layout.ca_key.with_name(layout.ca_key.name + ".pub")
    write_atomically(layout.etc / "ssh_ca.pub", public.read_text())
    write_atomically(layout.etc / "sshd_config", render_sshd_config(layout, ports))
