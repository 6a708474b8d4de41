"""Slurm's job states and pending reasons: every name in Slurm up to 26.05."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from clusters.slurm.reasons import explain_reason
from clusters.slurm.states import JOB_STATES, SlurmPhase, lookup_job_state, parse_job_state

_comment, _names = (Path(__file__).parent / "slurm_reasons.txt").read_text().split("\n", 1)
PLAIN_REASONS, LIMIT_REASONS = (part.split() for part in _names.split("\n\n"))


@pytest.mark.parametrize("name", PLAIN_REASONS)
def test_every_plain_reason_has_a_message(name):
    explanation = explain_reason(name)
    assert explanation.message.code == f"slurm-reason.{name}"
    assert explanation.message.endswith(".")


@pytest.mark.parametrize("name", LIMIT_REASONS)
def test_every_limit_reason_names_owner_and_resource(name):
    explanation = explain_reason(name)
    assert explanation.message.code.startswith("slurm-limit.")
    owner = "account" if name.startswith("Assoc") else "QOS"
    assert owner in explanation.message
    assert explanation.message.endswith(".")
    if "GRES" in name:
        assert "GPU" in explanation.message


@pytest.mark.parametrize(
    ("name", "code", "temporary"),
    [
        ("QOSMaxGRESPerUser", "slurm-limit.own", True),
        ("QOSMaxGRESPerJob", "slurm-limit.per-one", False),
        ("AssocGrpGRES", "slurm-limit.shared", True),
        ("AssocGrpCPUMinutesLimit", "slurm-limit.budget", False),
        ("AssocGrpCPURunMinutesLimit", "slurm-limit.running-time", True),
        ("QOSMaxWallDurationPerJobLimit", "slurm-limit.per-one", False),
        ("AssocMaxJobsLimit", "slurm-limit.own", True),
        ("AssocMaxSubmitJobLimit", "slurm-limit.own", True),
        ("QOSMinGRES", "slurm-limit.minimum", False),
        ("Priority", "slurm-reason.Priority", True),
        ("BadConstraints", "slurm-reason.BadConstraints", False),
        ("(JobHeldAdmin)", "slurm-reason.JobHeldAdmin", False),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "slurm-reason.ReqNodeNotAvail", True),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "slurm-reason.ReqNodeNotAvail",
            True,
        ),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved",
            "slurm-reason.ReqNodeNotAvail",
            True,
        ),
        ("launch failed requeued held", "slurm-reason.launch-failed-held", False),
        ("(null)", "slurm-reason.None", True),
        ("", "slurm-reason.None", True),
        ("SomethingOf2031", "slurm-reason.other", True),
    ],
)
def test_reason_has_a_code_and_says_if_it_is_temporary(name, code, temporary):
    explanation = explain_reason(name)
    assert (explanation.message.code, explanation.temporary) == (code, temporary)


def test_unknown_reason_keeps_slurm_message():
    assert "SomethingOf2031" in explain_reason("SomethingOf2031").message
    assert "{0} {x}" in explain_reason("{0} {x}").message


def test_short_and_long_state_names_agree():
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
def test_job_state_has_name_phase_and_cancelling_uid(text, name, uid, phase):
    parsed = parse_job_state(text)
    assert (parsed.name, parsed.cancelled_by_uid, parsed.phase) == (name, uid, phase)


def test_unknown_state_is_kept_logged_once_and_not_ended(caplog):
    with caplog.at_level(logging.WARNING):
        parsed = [parse_job_state("QUANTUM_LEAP") for _ in range(3)]
    assert {s.name for s in parsed} == {"QUANTUM_LEAP"}
    assert parsed[0].phase is SlurmPhase.UNKNOWN
    assert not parsed[0].state.ended
    assert [r.action for r in caplog.records] == ["slurm_unknown_job_state"]
