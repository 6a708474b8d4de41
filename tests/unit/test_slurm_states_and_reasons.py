"""Slurm's job states and reasons: every name up to 26.05."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from clusters.slurm.reasons import ExitStatus, explain_end, explain_reason
from clusters.slurm.states import JOB_STATES, SlurmPhase, lookup_job_state, parse_job_state

_comment, _names = (Path(__file__).parent / "slurm_reasons.txt").read_text().split("\n", 1)
PLAIN_REASONS, LIMIT_REASONS = (part.split() for part in _names.split("\n\n"))


@pytest.mark.parametrize("name", PLAIN_REASONS)
def test_every_plain_reason_has_a_message(name):
    explanation = explain_reason(name)
    assert explanation.code == name
    assert explanation.message.endswith(".")


@pytest.mark.parametrize("name", LIMIT_REASONS)
def test_every_limit_reason_names_owner_and_resource(name):
    explanation = explain_reason(name)
    assert explanation.code.startswith("limit_")
    owner = "account" if name.startswith("Assoc") else "QOS"
    assert owner in explanation.message
    assert explanation.message.endswith(".")
    if "GRES" in name:
        assert "GPU" in explanation.message


@pytest.mark.parametrize(
    ("name", "code", "temporary"),
    [
        ("QOSMaxGRESPerUser", "limit_own", True),
        ("QOSMaxGRESPerJob", "limit_per_one", False),
        ("AssocGrpGRES", "limit_shared", True),
        ("AssocGrpCPUMinutesLimit", "limit_budget", False),
        ("AssocGrpCPURunMinutesLimit", "limit_running_time", True),
        ("QOSMaxWallDurationPerJobLimit", "limit_per_one", False),
        ("AssocMaxJobsLimit", "limit_own", True),
        ("AssocMaxSubmitJobLimit", "limit_own", True),
        ("QOSMinGRES", "limit_minimum", False),
        ("Priority", "Priority", True),
        ("BadConstraints", "BadConstraints", False),
        ("(JobHeldAdmin)", "JobHeldAdmin", False),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "ReqNodeNotAvail", True),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "ReqNodeNotAvail",
            True,
        ),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "ReqNodeNotAvail", True),
        ("launch failed requeued held", "launch_failed_held", False),
        ("(null)", "None", True),
        ("", "None", True),
        ("SomethingOf2031", "other", True),
    ],
)
def test_reason(name, code, temporary):
    explanation = explain_reason(name)
    assert (explanation.code, explanation.temporary) == (code, temporary)


def test_unknown_reason_keeps_slurm_message():
    assert "SomethingOf2031" in explain_reason("SomethingOf2031").message
    assert "{0} {x}" in explain_reason("{0} {x}").message


def test_states_short_and_long_agree():
    for state in JOB_STATES.values():
        assert lookup_job_state(state.name) is state
        if state.short_name:
            assert lookup_job_state(state.short_name) is state


@pytest.mark.parametrize(
    ("text", "name", "uid", "phase"),
    [
        ("CANCELLED by 1000", "CANCELLED", 1000, SlurmPhase.ENDED),
        ("CANCELLED", "CANCELLED", None, SlurmPhase.ENDED),
        ("CA", "CANCELLED", None, SlurmPhase.ENDED),
        ("CG", "COMPLETING", None, SlurmPhase.ENDING),
        ("REQUEUED", "REQUEUED", None, SlurmPhase.WAITING),
        ("SPECIAL_EXIT", "SPECIAL_EXIT", None, SlurmPhase.WAITING),
        ("OUT_OF_MEMORY", "OUT_OF_MEMORY", None, SlurmPhase.ENDED),
        ("OUT_OF_ME+", "OUT_OF_ME", None, SlurmPhase.UNKNOWN),
        ("R", "RUNNING", None, SlurmPhase.RUNNING),
    ],
)
def test_parse_job_state(text, name, uid, phase):
    parsed = parse_job_state(text)
    assert (parsed.name, parsed.cancelled_by_uid, parsed.phase) == (name, uid, phase)


def test_unknown_state_is_kept_logged_once_and_not_ended(caplog):
    with caplog.at_level(logging.WARNING):
        parsed = [parse_job_state("QUANTUM_LEAP") for _ in range(3)]
    assert {s.name for s in parsed} == {"QUANTUM_LEAP"}
    assert parsed[0].phase is SlurmPhase.UNKNOWN
    assert not parsed[0].state.ended
    assert [r.action for r in caplog.records] == ["slurm_unknown_job_state"]


@pytest.mark.parametrize(
    ("state", "exit_status", "expected_text"),
    [
        ("FAILED", ExitStatus(3), "exit code 3"),
        ("FAILED", ExitStatus(0, 9), "SIGKILL"),
        ("FAILED", ExitStatus(0, 250), "signal 250"),
        ("FAILED", None, "failed"),
        ("CANCELLED by 0", None, "administrator"),
        ("CANCELLED by 1000", None, "1000"),
        ("TIMEOUT", ExitStatus(0), "time limit"),
        ("OUT_OF_MEMORY", ExitStatus(0, 125), "memory"),
        ("LAUNCH_FAILED", None, "launched"),
    ],
)
def test_end_explanations(state, exit_status, expected_text):
    assert expected_text in explain_end(parse_job_state(state), exit_status).message
