"""Output of newer Slurm releases, written by hand from their documentation and source code.

Replace it with recordings (scripts/record_slurm) when such a release is available for testing.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from clusters.capacity import GpuCount
from clusters.errors import CommandFailed, SlurmParseError, SlurmUnavailable
from clusters.slurm import control, fields, nodes, sacct, sacctmgr, scontrol, squeue
from clusters.slurm.errors import raise_for_failure
from clusters.slurm.fields import ExitStatus
from clusters.slurm.nodes import parse_gres, parse_node_state
from clusters.slurm.states import SlurmPhase
from clusters.transport.base import CommandResult

SEPARATOR = "\x1f0badcafe"


def make_result(text="", *, code=0, err="", argv=("scontrol",)):
    return CommandResult(argv, code, text.encode(), err.encode())


# 23.11: GresDrain, Comment and Extra in addition to Reason; MIG types; a powered-down cloud node.
NODES_23_11 = (
    "NodeName=dgx1 Arch=x86_64 CoresPerSocket=64 CPUAlloc=40 CPUEfctv=252 CPUTot=256 CPULoad=38.10 "
    "AvailableFeatures=dgx,nvlink ActiveFeatures=dgx,nvlink "
    "Gres=gpu:a100:6(S:0-1),gpu:1g.10gb:7(S:1),shard:a100:24(S:0-1) GresDrain=N/A "
    "GresUsed=gpu:a100:3(IDX:0,2-3),gpu:1g.10gb:1(IDX:4),shard:a100:0(IDX:N/A) "
    "NodeAddr=dgx1 NodeHostName=dgx1 Version=23.11.4 OS=Linux 5.15.0 #101-Ubuntu SMP Tue Nov 14 13:30:08 UTC 2023 "
    "RealMemory=2000000 AllocMem=400000 FreeMem=900000 Sockets=2 Boards=1 State=MIXED+PLANNED ThreadsPerCore=2 "
    "TmpDisk=0 Weight=10 Owner=N/A MCS_label=N/A Partitions=gpu,long BootTime=1700000000 "
    "SlurmdStartTime=1700000100 LastBusyTime=1700001000 ResumeAfterTime=None "
    "CfgTRES=cpu=252,mem=2000000M,billing=252,gres/gpu=13 AllocTRES=cpu=40,mem=400000M,gres/gpu=4 "
    "CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/a Comment=rack 7 State=odd\n"
    "NodeName=cloud1 CoresPerSocket=8 CPUAlloc=0 CPUEfctv=16 CPUTot=16 CPULoad=N/A AvailableFeatures=cloud "
    "ActiveFeatures=cloud Gres=gpu:4 GresDrain=N/A GresUsed=gpu:(null):0(IDX:N/A) RealMemory=64000 AllocMem=0 "
    "FreeMem=N/A State=IDLE+CLOUD+POWERED_DOWN Partitions=cloud "
    "Reason=Power saving [slurm@1700000000]\n"
)


def test_nodes_of_slurm_23_11_are_parsed():
    first, second = nodes.parse_show_nodes(make_result(NODES_23_11))
    assert (first.state, first.usable, first.cpus, first.cpus_used) == ("mixed", True, 252, 40)
    assert first.gpus == (GpuCount("1g.10gb", 7, 1), GpuCount("a100", 6, 3))
    assert first.partitions == ("gpu", "long")
    assert (second.state, second.usable) == ("idle", True)
    assert second.gpus == (GpuCount("", 4, 0),)
    assert second.reason == "Power saving"


# 24.05 and later: ExclusiveTopo, MaxCPUsPerSocket, NodeSets; a name with spaces; Deny instead of Allow.
PARTITIONS_24_11 = (
    "PartitionName=CPU nodes (amd) AllowGroups=ALL AllowAccounts=lab,physics AllowQos=normal AllocNodes=ALL "
    "Default=NO QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO "
    "MaxNodes=8 MaxTime=UNLIMITED MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED "
    "NodeSets=amd Nodes=gh[101-103],login-[0001-0002] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO "
    "OverSubscribe=YES:4 OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=248 TotalNodes=5 "
    "SelectTypeParameters=NONE JobDefaults=DefCpuPerGPU=30 DefMemPerCPU=12000 MaxMemPerCPU=12000 "
    "TRES=cpu=248,mem=1216G,node=5,billing=248 TRESBillingWeights=CPU=1,Mem=0.0833G\n"
    "PartitionName=h100 AllowGroups=ALL DenyAccounts=guests DenyQos=low AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=01:00:00 MaxNodes=UNLIMITED MaxTime=3-00:00:00 Nodes=(null) State=INACTIVE TotalNodes=0\n"
)


def test_partitions_of_slurm_24_11_are_parsed():
    amd, h100 = nodes.parse_show_partitions(make_result(PARTITIONS_24_11))
    assert amd.name == "CPU nodes (amd)"
    assert amd.nodes == ("gh101", "gh102", "gh103", "login-0001", "login-0002")
    assert (amd.allowed_accounts, amd.allowed_qos) == (("lab", "physics"), ("normal",))
    assert (amd.max_time_s, amd.default_time_s, amd.max_nodes_per_job) == (None, None, 8)
    assert (h100.up, h100.nodes, h100.max_time_s, h100.default_time_s) == (False, (), 259200, 3600)
    assert (h100.allowed_accounts, h100.allowed_qos, h100.is_default) == ((), (), True)


@pytest.mark.parametrize(
    ("text", "name", "usable"),
    [
        ("IDLE", "idle", True),
        ("ALLOCATED+COMPLETING", "allocated", True),
        ("MIXED+CLOUD+DYNAMIC_NORM", "mixed", True),
        ("IDLE+POWERING_UP", "idle", True),
        ("IDLE+DRAIN", "drained", False),
        ("ALLOCATED+DRAIN", "draining", False),
        ("DOWN*+DRAIN", "down", False),
        ("DOWN+NOT_RESPONDING", "down", False),
        ("IDLE+NOT_RESPONDING", "not_responding", False),
        ("IDLE+MAINTENANCE", "maint", False),
        ("IDLE+RESERVED", "reserved", False),
        ("IDLE+FAIL", "fail", False),
        ("IDLE+INVALID_REG", "invalid_reg", False),
        ("IDLE+BLOCKED", "blocked", False),
        ("UNKNOWN+NOT_RESPONDING", "not_responding", False),
        ("FUTURE", "future", False),
        ("INVAL", "inval", False),
        ("idle~", "idle", True),
        ("mix-", "mixed", True),
        ("alloc+", "allocated", True),
        ("down*", "down", False),
        ("drng", "draining", False),
        ("drain*", "drained", False),
        ("maint", "maint", False),
        ("resv", "reserved", False),
        ("idle$", "maint", False),
        ("idle#", "idle", True),
        ("idle@", "idle", True),
    ],
)
def test_node_state_has_a_name_and_says_if_the_node_is_usable(text, name, usable):
    state = parse_node_state(text)
    assert (state.name, state.usable) == (name, usable)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("gpu:a100:4", {("gpu", "a100"): 4}),
        ("gpu:4(S:0)", {("gpu", ""): 4}),
        ("gres:gpu:4(S:0)", {("gpu", ""): 4}),
        ("gpu:a100:2(IDX:0,2),gpu:V100:1(IDX:1)", {("gpu", "a100"): 2, ("gpu", "v100"): 1}),
        ("gpu:4090:2", {("gpu", "4090"): 2}),
        ("gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", {("gpu", "nvidia_h100_80gb_hbm3"): 8}),
        ("craynetwork:4,gpu:a100:4", {("craynetwork", ""): 4, ("gpu", "a100"): 4}),
        ("bandwidth:lustre:4G", {("bandwidth", "lustre"): 4 * 1024**3}),
        ("(null)", {}),
        ("N/A", {}),
        ("", {}),
    ],
)
def test_gres_is_parsed_to_counts_by_type(text, counts):
    assert parse_gres(text) == counts


@pytest.mark.parametrize("text", ["gpu", "gpu:a100", "gpu:a100:x", "gpu:a100:4;rm"])
def test_invalid_gres_raises(text):
    with pytest.raises(SlurmParseError):
        parse_gres(text)


def test_node_without_state_raises_and_reports_the_row():
    with pytest.raises(SlurmParseError) as caught:
        nodes.parse_show_nodes(
            make_result("NodeName=n1 CPUTot=8 CPUAlloc=0 RealMemory=1 AllocMem=0\n")
        )
    assert "NodeName=n1" in caught.value.detail
    with pytest.raises(SlurmParseError):
        nodes.parse_show_nodes(make_result("something else\n"))


def test_cluster_without_nodes_gives_no_rows():
    assert nodes.parse_show_nodes(make_result("No nodes in the system\n")) == ()


def make_rows_result(*rows):
    return make_result(
        "".join("".join(f"{value}{SEPARATOR}" for value in row) + "\n" for row in rows)
    )


def squeue_row(**changes):
    row = {
        "id": "12", "raw": "12", "state": "R", "reason": "None", "dir": "/w/1", "user": "alice", "partition": "gpu",
        "account": "lab", "qos": "normal", "nodes": "n1", "submit": "1700000000", "start": "1700000001",
        "end": "1700003601", "limit": "1:00:00", "priority": "4294901758", "restarts": "0", "exit": "0", "name": "x",
    }  # fmt: skip
    return list({**row, **changes}.values())


def test_state_expediting_of_slurm_25_11_is_ending():
    (record,) = squeue.parse_squeue(
        make_rows_result(squeue_row(state="EXPEDITING")), separator=SEPARATOR
    )
    assert record.phase is SlurmPhase.ENDING


def test_exit_code_of_squeue_may_be_a_pair():
    (record,) = squeue.parse_squeue(
        make_rows_result(squeue_row(state="F", exit="3:0")), separator=SEPARATOR
    )
    assert record.exit_status == ExitStatus(3)


def test_unknown_state_is_kept():
    (record,) = squeue.parse_squeue(make_rows_result(squeue_row(state="ZZ")), separator=SEPARATOR)
    assert (record.reported.name, record.phase) == ("ZZ", SlurmPhase.UNKNOWN)


@pytest.mark.parametrize(
    "change", [{"id": "twelve"}, {"submit": "soon"}, {"limit": "long"}, {"restarts": "x"}]
)
def test_invalid_field_raises_and_reports_the_row(change):
    rows = make_rows_result(squeue_row(), squeue_row(name="culprit", **change))
    with pytest.raises(SlurmParseError) as caught:
        squeue.parse_squeue(rows, separator=SEPARATOR)
    assert "culprit" in caught.value.detail


def test_login_script_output_before_the_rows_raises():
    with_banner = CommandResult(
        ("squeue",), 0, b"Welcome!\n" + make_rows_result(squeue_row()).stdout, b""
    )
    with pytest.raises(SlurmParseError):
        squeue.parse_squeue(with_banner, separator=SEPARATOR)


def test_invalid_utf8_is_replaced():
    raw = make_rows_result(squeue_row(name="NAME")).stdout.replace(b"NAME", b"\xff\xfe")
    (record,) = squeue.parse_squeue(CommandResult(("squeue",), 0, raw, b""), separator=SEPARATOR)
    assert record.name == "\ufffd\ufffd"


def sacct_row(**changes):
    row = {
        "id": "12", "raw": "12", "state": "COMPLETED", "reason": "None", "dir": "/w/1", "user": "alice",
        "partition": "gpu", "account": "lab", "qos": "normal", "nodes": "n1", "submit": "1700000000",
        "start": "1700000001", "end": "1700000002", "limit": "60", "elapsed": "1", "exit": "0:0", "derived": "0:0",
        "tres": "cpu=1", "name": "x",
    }  # fmt: skip
    return list({**row, **changes}.values())


@pytest.mark.parametrize(
    "stderr",
    [
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "squeue: error: Munge encode failed: Failed to access /run/munge/munge.socket.2",
        "slurm_load_jobs error: Rate limit exceeded, please retry momentarily",
        "squeue: fatal: Could not establish a configuration source",
        "slurm_load_jobs error: Slurm backup controller in standby mode",
        "slurm_load_jobs error: Incompatible versions of client and server code",
    ],
)
@pytest.mark.parametrize("code", [0, 1])
def test_error_output_is_not_parsed_as_an_empty_queue(stderr, code):
    with pytest.raises(SlurmUnavailable):
        squeue.parse_squeue(
            make_result(code=code, err=stderr, argv=("squeue",)), separator=SEPARATOR
        )


def test_unknown_error_output_raises():
    with pytest.raises(CommandFailed):
        raise_for_failure(make_result(err="squeue: error: something new"))


def test_login_banner_is_ignored():
    raise_for_failure(
        make_result(
            err="bash: warning: setlocale: LC_ALL: cannot change locale (xx)\nWelcome to login1"
        )
    )


def test_disabled_accounting_raises_unavailable():
    with pytest.raises(SlurmUnavailable) as caught:
        sacct.parse_sacct(
            make_result(code=1, err="Slurm accounting storage is disabled"), separator=SEPARATOR
        )
    assert "disabled" in caught.value.user_message


def test_sacctmgr_row_with_extra_field_raises():
    with pytest.raises(SlurmParseError):
        sacctmgr.parse_users(make_result("a|b|None|x\n"))


@pytest.mark.parametrize(
    ("text", "version"),
    [("slurm 25.11.0-0rc1\n", (25, 11, 0)), ("slurm-wlm 22.05.8\n", (22, 5, 8))],
)
def test_version_is_parsed_from_scontrol(text, version):
    assert scontrol.parse_version(make_result(text)) == version


def test_ping_lists_primary_and_backup_controller():
    text = "Slurmctld(primary) at ctl1 is DOWN\nSlurmctld(backup) at ctl2 is UP\n"
    assert [(c.host, c.role, c.up) for c in scontrol.parse_ping(make_result(text, code=1))] == [
        ("ctl1", "primary", False),
        ("ctl2", "backup", True),
    ]


@pytest.mark.parametrize("job_id", ["1;reboot", "--me", "", "12 13", "12_[1-3]"])
def test_control_commands_accept_ids_only(job_id):
    with pytest.raises(ValueError, match="not a job id"):
        control.build_scancel_argv(fields.SlurmCommands(), job_ids=[job_id])


def test_control_and_query_commands_have_the_expected_arguments():
    commands = fields.SlurmCommands(bin_dir="/opt/slurm/bin")
    assert control.build_scancel_argv(
        commands, job_ids=["1", "2+1"], signal="USR1", target="all"
    ) == [
        "/opt/slurm/bin/scancel",
        "--signal=USR1",
        "--full",
        "1",
        "2+1",
    ]
    assert control.build_time_limit_argv(commands, job_ids=["7"], seconds=3601)[-2:] == [
        "JobId=7",
        "TimeLimit=61",
    ]
    argv = sacct.build_sacct_argv(
        commands,
        separator=SEPARATOR,
        since=datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC),
    )
    assert argv[argv.index("-S") + 1] == "2024-05-06T07:08:09"
    assert "TZ=UTC" in argv
    assert f"--delimiter={SEPARATOR}" in argv
