"""The parsers for Slurm commands, run on output recorded from a real Slurm by scripts/record_slurm."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from clusters.capacity import Capacity
from clusters.errors import (
    CommandFailed,
    SlurmParseError,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.slurm import (
    control,
    nodes,
    records,
    sacct,
    sacctmgr,
    sbatch,
    scontrol,
    squeue,
)
from clusters.slurm.errors import classify_submit_failure
from clusters.slurm.fields import ExitStatus
from clusters.slurm.sbatch import SubmitRequest
from clusters.slurm.states import SlurmPhase
from clusters.transport.base import CommandResult

SEPARATOR = "\x1f0badcafe"
VERSIONS = sorted((Path(__file__).parent / "recordings").glob("[0-9]*"))


def test_recordings_exist():
    assert [folder.name for folder in VERSIONS] == ["22.05.8"]


@pytest.fixture(params=VERSIONS, ids=lambda folder: folder.name)
def load_recording(request):
    def load(name):
        value = json.loads((request.param / f"{name}.json").read_text())
        return CommandResult(
            tuple(value["argv"]),
            value["exit_code"],
            value["stdout"].encode(),
            value["stderr"].encode(),
        )

    vars(load)["ids"] = json.loads((request.param / "jobs.json").read_text())
    vars(load)["names"] = sorted(path.stem for path in request.param.glob("*.json"))
    return load


def by_key(records, load):
    """Map the keys of the recorded jobs (see JobSet in scripts/record_slurm) to their records."""
    keys = {leader: key for key, leader in load.ids.items()}
    return {keys[r.leader_id]: r for r in records if r.leader_id in keys and not r.het_offset}


# -- squeue ------------------------------------------------------------------------------------------

SQUEUE_STATES = {
    "timeout": ("TIMEOUT", "TimeLimit"),
    "done": ("COMPLETED", "None"),
    "exit3": ("FAILED", "NonZeroExitCode"),
    "signal": ("FAILED", "JobLaunchFailure"),
    "cancelledheld": ("CANCELLED", "JobHeldUser"),
    "cancelledbyowner": ("CANCELLED", "None"),
    "nodefail": ("NODE_FAIL", "NodeDown"),
    "requeued": ("PENDING", "BeginTime"),
    "requeuehold": ("PENDING", "job requeued in held state"),
    "preempted": ("PENDING", "BeginTime"),
    "running": ("RUNNING", "None"),
    "suspended": ("SUSPENDED", "None"),
    "het": ("RUNNING", "None"),
    "held": ("PENDING", "JobHeldUser"),
    "later": ("PENDING", "BeginTime"),
    "after": ("PENDING", "Dependency"),
    "never": ("PENDING", "DependencyNeverSatisfied"),
    "big": ("PENDING", "Resources"),
    "toomanycpus": ("PENDING", "PartitionConfig"),
    "toomanynodes": ("PENDING", "PartitionNodeLimit"),
    "toolong": ("PENDING", "PartitionTimeLimit"),
}
NAMES = {
    "pipe": "a|b|c|",
    "newline": "two\nlines\n",
    "separators": "unit\x1fseparator\x1erecord",
    "chinese": "训练任务-第一次",
    "long": "n" * 200,
    "forged": "x\n999999\x1f999999\x1fCD\x1f",
}


@pytest.fixture
def squeue_records(load_recording):
    return by_key(
        squeue.parse_squeue(load_recording("squeue_all"), separator=SEPARATOR), load_recording
    )


@pytest.mark.parametrize("key", SQUEUE_STATES)
def test_squeue_reports_state_and_reason(squeue_records, key):
    record = squeue_records[key]
    assert (record.reported.name, record.reason) == SQUEUE_STATES[key]
    assert record.work_dir.endswith(f"/recording/{key}")
    assert record.user == "sluice-alice"


@pytest.mark.parametrize("key", NAMES)
def test_squeue_keeps_hostile_job_names(squeue_records, key):
    assert squeue_records[key].name == NAMES[key]


def test_squeue_keeps_quotes_in_job_names(squeue_records):
    assert squeue_records["quotes"].name == 'it\'s "quoted" $(id) `id`'


def test_job_name_cannot_forge_a_row(load_recording):
    records = squeue.parse_squeue(load_recording("squeue_all"), separator=SEPARATOR)
    assert "999999" not in {record.raw_id for record in records}
    assert len({record.raw_id for record in records}) == len(records)


def test_squeue_reports_times_nodes_and_exit_status(squeue_records):
    running, waiting, ended = (
        squeue_records["running"],
        squeue_records["big"],
        squeue_records["exit3"],
    )
    assert running.nodes == ("n1",)
    assert running.time_limit_s == 26 * 3600 + 180
    assert (
        running.expected_end_at.timestamp() - running.started_at.timestamp() == running.time_limit_s
    )
    assert running.ended_at is None
    assert waiting.started_at is None
    assert waiting.expected_start_at > waiting.submitted_at
    assert squeue_records["held"].expected_start_at is None
    assert ended.ended_at >= ended.started_at >= ended.submitted_at
    assert ended.exit_status == ExitStatus(3)
    assert squeue_records["signal"].exit_status == ExitStatus(0, 9)
    assert running.submitted_at.tzinfo is UTC
    assert abs(running.submitted_at - datetime(2026, 11, 16, tzinfo=UTC)).days < 3650


def test_squeue_counts_restarts(squeue_records):
    keys = ("requeued", "preempted", "running")
    assert [squeue_records[key].restarts for key in keys] == [1, 1, 0]


def test_squeue_has_a_record_per_het_component_and_array_task(load_recording):
    records = squeue.parse_squeue(load_recording("squeue_all"), separator=SEPARATOR)
    het = {r.het_offset: r for r in records if r.leader_id == load_recording.ids["het"]}
    assert sorted(het) == [0, 1]
    assert het[1].raw_id == str(int(het[0].raw_id) + 1)
    assert (het[0].partition, het[1].partition) == ("gpu", "cpu")
    array_id = load_recording.ids["array"]
    array = {r.slurm_job_id: r.phase for r in records if r.leader_id == array_id}
    assert array == {
        f"{array_id}_[3-5%2]": SlurmPhase.WAITING,
        f"{array_id}_1": SlurmPhase.RUNNING,
        f"{array_id}_2": SlurmPhase.RUNNING,
    }


def test_job_rejected_at_submission_stays_in_squeue(load_recording):
    records = squeue.parse_squeue(load_recording("squeue_all"), separator=SEPARATOR)
    rejected = [r for r in records if r.reason == "BadConstraints"]
    assert rejected
    assert all(r.reported.name == "FAILED" and r.work_dir and not r.node_list for r in rejected)


def test_time_zone_of_the_login_node_is_ignored(load_recording):
    default_zone_records = by_key(
        squeue.parse_squeue(load_recording("squeue_all"), separator=SEPARATOR), load_recording
    )
    other_zone_records = by_key(
        squeue.parse_squeue(load_recording("squeue_other_time_zone"), separator=SEPARATOR),
        load_recording,
    )
    assert default_zone_records["exit3"] == other_zone_records["exit3"]


@pytest.mark.parametrize("name", ["squeue_no_rows", "dbd_down_squeue_no_rows"])
def test_squeue_without_rows_is_an_empty_list(load_recording, name):
    assert squeue.parse_squeue(load_recording(name), separator=SEPARATOR) == []


# -- sacct -------------------------------------------------------------------------------------------


@pytest.fixture
def sacct_records(load_recording):
    return sacct.parse_sacct(load_recording("sacct_since"), separator=SEPARATOR)


SACCT_STATES = {
    "timeout": ("TIMEOUT", ExitStatus(0)),
    "done": ("COMPLETED", ExitStatus(0)),
    "exit3": ("FAILED", ExitStatus(3)),
    "signal": ("FAILED", ExitStatus(0, 9)),
    "cancelledbyowner": ("CANCELLED", ExitStatus(0)),
    "nodefail": ("NODE_FAIL", ExitStatus(0)),
    "running": ("RUNNING", ExitStatus(0)),
}


@pytest.mark.parametrize("key", SACCT_STATES)
def test_sacct_reports_state_and_exit_status(sacct_records, load_recording, key):
    record = by_key(sacct_records, load_recording)[key]
    assert (record.reported.name, record.exit_status) == SACCT_STATES[key]
    assert record.work_dir.endswith(f"/recording/{key}")


@pytest.mark.parametrize("key", NAMES)
def test_sacct_keeps_hostile_job_names(sacct_records, load_recording, key):
    assert by_key(sacct_records, load_recording)[key].name == NAMES[key]


def test_sacct_replaces_double_quotes(sacct_records, load_recording):
    # Because sacct (22.05) changes the name, Sluice does not look up jobs by name.
    assert by_key(sacct_records, load_recording)["quotes"].name == "it's `quoted` $(id) `id`"


def test_sacct_reports_the_uid_that_cancelled(sacct_records, load_recording):
    jobs_by_key = by_key(sacct_records, load_recording)
    assert jobs_by_key["cancelledbyroot"].reported.cancelled_by_uid == 0
    assert jobs_by_key["cancelledbyowner"].reported.cancelled_by_uid > 0


def test_sacct_reports_resources_and_derived_exit_status(sacct_records, load_recording):
    jobs_by_key = by_key(sacct_records, load_recording)
    assert jobs_by_key["running"].tres.gpus == 2
    assert jobs_by_key["running"].tres.mem_mib == 2048
    assert jobs_by_key["done"].derived_exit_status == ExitStatus(4)


def test_cancelled_before_eligible_is_found_only_by_id(sacct_records, load_recording):
    held = load_recording.ids["cancelledheld"]
    assert held not in {record.raw_id for record in sacct_records}
    by_id = records.newest_runs(sacct.parse_sacct(load_recording("sacct_ids"), separator=SEPARATOR))
    assert by_id[held].reported.name == "CANCELLED"
    assert not by_id[held].node_list


def test_requeued_job_has_a_row_per_run_and_the_newest_is_used(load_recording):
    rows = sacct.parse_sacct(load_recording("sacct_ids"), separator=SEPARATOR)
    requeued = [row for row in rows if row.raw_id == load_recording.ids["requeued"]]
    assert [row.reported.name for row in requeued] == ["REQUEUED", "PENDING"]
    assert (
        records.newest_runs(reversed(rows))[load_recording.ids["requeued"]].reported.name
        == "PENDING"
    )


def test_sacct_shows_only_the_ended_run_of_a_preempted_and_requeued_job(
    sacct_records, load_recording
):
    # squeue has the run that waits: see SQUEUE_STATES.
    preempted = load_recording.ids["preempted"]
    assert records.newest_runs(sacct_records)[preempted].reported.name == "PREEMPTED"


def test_sacct_without_rows_is_an_empty_list(load_recording):
    assert sacct.parse_sacct(load_recording("sacct_no_rows"), separator=SEPARATOR) == []


# -- cluster -----------------------------------------------------------------------------------------


def test_capacity_is_parsed_from_nodes_and_partitions(load_recording):
    now = datetime.now(UTC)
    capacity = nodes.parse_capacity(
        load_recording("nodes"), load_recording("partitions"), taken_at=now
    )
    found = {n.name: n for n in capacity.nodes}
    assert sorted(found) == ["n1", "n2", "n3", "n4"]
    assert (found["n1"].gpu_total("a100"), found["n1"].gpu_free("a100")) == (4, 2)
    assert found["n3"].gpu_free() == 0
    assert found["n4"].gpus == ()
    assert (found["n4"].state, found["n4"].usable, found["n4"].reason) == (
        "draining",
        False,
        "disk, ask Eve",
    )
    assert found["n1"].usable
    assert found["n1"].features == ("a100",)
    assert (found["n3"].cpus, found["n3"].cpus_used, found["n3"].mem_mib) == (8, 8, 16000)
    assert capacity.partition("gpu").is_default
    assert capacity.partition("debug").max_time_s == 600
    assert capacity.partition("all").nodes == ("n1", "n2", "n3", "n4")
    assert Capacity.from_json(capacity.to_json()) == capacity


def test_associations_qos_and_operators_are_parsed(load_recording):
    associations = sacctmgr.parse_associations(load_recording("associations"))
    alice = next(a for a in associations if a.user == "sluice-alice")
    assert (alice.account, alice.qos, alice.default_qos) == (
        "lab",
        ("low", "normal", "tiny"),
        "normal",
    )
    qos = {q.name: q for q in sacctmgr.parse_qos(load_recording("qos"))}
    assert qos["normal"].preempts == ("low",)
    assert (qos["tiny"].max_submit_jobs_per_user, qos["tiny"].max_wall_s) == (2, 600)
    assert (qos["tiny"].max_tres_per_job.cpus, qos["tiny"].max_tres_per_job.gpus) == (2, 1)
    assert qos["tiny"].flags == ("DenyOnLimit",)
    users = {u.name: u for u in sacctmgr.parse_users(load_recording("users"))}
    assert users["sluice-svc"].is_operator
    assert not users["sluice-alice"].is_operator


def test_config_version_and_ping_are_parsed(load_recording):
    config = scontrol.parse_show_config(load_recording("config"))
    assert config == scontrol.SlurmConfig("sluice", accounting=True, enforces_associations=True)
    assert scontrol.parse_version(load_recording("version")) == (22, 5, 8)
    assert [c.up for c in scontrol.parse_ping(load_recording("ping"))] == [True]


# -- sbatch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "retryable", "expected_text"),
    [
        ("account", False, "account"),
        ("partition", False, "partition does not exist"),
        ("qos", False, "QOS"),
        ("gres", False, "GPUs"),
        ("memory", False, "memory"),
        ("constraint", False, "feature"),
        ("option", False, "unrecognized option '--no-such-option'"),
        ("qos_time", False, "run time"),
        ("drained_partition", True, "drained"),
        ("submit_limit", True, "waiting and running job"),
    ],
)
def test_rejected_submission_has_text_and_retryability(
    load_recording, name, retryable, expected_text
):
    result = load_recording(f"submit_refused_{name}")
    error = classify_submit_failure(result.exit_code, result.error_text)
    assert isinstance(error, SubmitRejected)
    assert error.retryable is retryable
    assert expected_text in error.user_message


def test_submit_many_returns_an_outcome_per_submission(load_recording):
    batch = [SubmitRequest(token, "/w", "/w/batch.sh") for token in ("good-1", "bad", "good-2")]
    outcomes = sbatch.parse_submit_many(
        load_recording("submit_many").stdout, batch, separator=SEPARATOR
    )
    assert [bool(o.slurm_job_id) for o in outcomes] == [True, False, True]
    assert isinstance(outcomes[1].error, SubmitRejected)


# -- control -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["scancel_unknown", "scancel_ended", "scancel_mixed", "time_limit_het", "release"]
)
def test_accepted_control_commands_report_no_refusal(load_recording, name):
    assert control.parse_control(load_recording(name)).refusals == ()


@pytest.mark.parametrize("name", ["time_limit_unknown", "hold_unknown"])
def test_control_of_a_missing_job_reports_its_id(load_recording, name):
    assert control.parse_control(load_recording(name)).missing_ids == ("67043000",)


def test_time_limit_of_an_ended_job_reports_it_as_missing(load_recording):
    assert control.parse_control(load_recording("time_limit_ended")).missing_ids == (
        load_recording.ids["done"],
    )


@pytest.mark.parametrize(
    "name", ["scancel_not_mine", "time_limit_raised_by_owner", "hold_not_mine", "requeue_pending"]
)
def test_refused_control_commands_raise(load_recording, name):
    with pytest.raises(CommandFailed) as caught:
        control.parse_control(load_recording(name))
    assert "error:" not in caught.value.user_message


def test_time_limit_of_a_het_leader_applies_to_all_components(load_recording):
    rows = squeue.parse_squeue(load_recording("squeue_het_after_limit"), separator=SEPARATOR)
    assert [row.time_limit_s for row in rows] == [7200, 7200]


# -- daemons down ------------------------------------------------------------------------------------

PARSERS = {
    "ctld_down_squeue": lambda r: squeue.parse_squeue(r, separator=SEPARATOR),
    "ctld_down_nodes": nodes.parse_show_nodes,
    "ctld_down_scancel": control.parse_control,
    "ctld_down_time_limit": control.parse_control,
    "dbd_down_sacct": lambda r: sacct.parse_sacct(r, separator=SEPARATOR),
    "dbd_down_sacctmgr": sacctmgr.parse_qos,
}


@pytest.mark.parametrize("name", PARSERS)
def test_daemon_down_raises_unavailable(load_recording, name):
    with pytest.raises(SlurmUnavailable) as caught:
        PARSERS[name](load_recording(name))
    assert ("database" in caught.value.user_message) is name.startswith("dbd")


def test_submission_without_controller_is_unavailable(load_recording):
    result = load_recording("ctld_down_submit")
    error = classify_submit_failure(result.exit_code, result.error_text)
    assert isinstance(error, SlurmUnavailable)
    assert "database" not in error.user_message


def test_ping_reports_a_stopped_controller(load_recording):
    assert [c.up for c in scontrol.parse_ping(load_recording("ctld_down_ping"))] == [False]


def test_submit_many_stops_when_the_controller_is_down(load_recording):
    batch = [SubmitRequest(token, "/w", "/w/batch.sh") for token in ("lost", "second")]
    first, second = sbatch.parse_submit_many(
        load_recording("ctld_down_submit_many").stdout, batch, separator=SEPARATOR
    )
    assert isinstance(first.error, SlurmUnavailable)
    assert not second.attempted


def test_missing_slurm_program_raises_command_failed(load_recording):
    with pytest.raises(CommandFailed) as caught:
        squeue.parse_squeue(load_recording("no_such_program"), separator=SEPARATOR)
    assert "squeue was not found" in caught.value.user_message


@pytest.mark.parametrize("name", ["squeue_all", "sacct_since"])
def test_output_truncated_inside_a_row_raises(load_recording, name):
    full_result = load_recording(name)
    parse = squeue.parse_squeue if name == "squeue_all" else sacct.parse_sacct
    last_row = full_result.stdout.rindex(SEPARATOR.encode() + b"\n", 0, -1) + len(SEPARATOR) + 1
    rows = parse(full_result, separator=SEPARATOR)
    for cut in range(last_row + 1, len(full_result.stdout)):
        with pytest.raises(SlurmParseError):
            parse(
                CommandResult(full_result.argv, 0, full_result.stdout[:cut], b""),
                separator=SEPARATOR,
            )
    without_last = CommandResult(full_result.argv, 0, full_result.stdout[:last_row], b"")
    assert parse(without_last, separator=SEPARATOR) == rows[:-1]
