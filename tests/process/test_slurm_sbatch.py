"""sbatch: error classification, job id parsing, and batched submission with output that may be truncated."""

from __future__ import annotations

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters.errors import (
    CommandFailed,
    CommandTimeout,
    RemoteFileError,
    SlurmParseError,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.slurm.errors import classify_submit_failure
from clusters.slurm.fields import SlurmCommands
from clusters.slurm.sbatch import (
    SubmissionAbandoned,
    SubmitRequest,
    build_submit_many_argv,
    build_submit_many_stdin,
    parse_submit_many,
)

SEPARATOR = "\x1f0123abcd"
FAILED = "sbatch: error: Batch job submission failed: "
POLICY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


@pytest.mark.parametrize(
    ("stderr", "kind", "retryable"),
    [
        (
            FAILED + "Invalid account or account/partition combination specified",
            SubmitRejected,
            False,
        ),
        (FAILED + "Invalid qos specification", SubmitRejected, False),
        (FAILED + "Invalid partition name specified", SubmitRejected, False),
        (FAILED + "Requested node configuration is not available", SubmitRejected, False),
        (FAILED + "Invalid generic resource (gres) specification", SubmitRejected, False),
        (FAILED + "Node count specification invalid", SubmitRejected, False),
        (FAILED + "Memory required by task is not available", SubmitRejected, False),
        ("sbatch: error: Memory specification can not be satisfied", SubmitRejected, False),
        (
            FAILED + "Requested time limit is invalid (missing or exceeds some limit)",
            SubmitRejected,
            False,
        ),
        (FAILED + "Invalid feature specification", SubmitRejected, False),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{FAILED}{POLICY}", SubmitRejected, True),
        (f"sbatch: error: AssocMaxSubmitJobLimit\n{FAILED}{POLICY}", SubmitRejected, True),
        (
            f"sbatch: error: AssocMaxWallDurationPerJobLimit\n{FAILED}{POLICY}",
            SubmitRejected,
            False,
        ),
        (f"sbatch: error: QOSMaxGRESPerJob\n{FAILED}{POLICY}", SubmitRejected, False),
        (FAILED + POLICY, SubmitRejected, False),
        (FAILED + "Required partition not available (inactive or drain)", SubmitRejected, True),
        (FAILED + "Partition in DOWN state", SubmitRejected, True),
        (FAILED + "Slurm temporarily unable to accept job", SubmitRejected, True),
        (FAILED + "System submissions disabled", SubmitRejected, True),
        (FAILED + "MaxJobCount limit reached", SubmitRejected, True),
        ("sbatch: error: Unable to open file /x/batch.sh", SubmitRejected, False),
        (FAILED + "An unknown error of 2031", SubmitRejected, False),
        (FAILED + "Socket timed out on send/recv operation", CommandTimeout, True),
        (FAILED + "Zero Bytes were transmitted or received", CommandTimeout, True),
        (FAILED + "Unable to contact slurm controller (receive failure)", CommandTimeout, True),
        (FAILED + "Unable to contact slurm controller (connect failure)", SlurmUnavailable, True),
        (FAILED + "Rate limit exceeded, please retry momentarily", SlurmUnavailable, True),
    ],
)
def test_sbatch_errors_are_classified(stderr, kind, retryable):
    error = classify_submit_failure(1, stderr)
    assert type(error) is kind
    assert error.retryable is retryable
    assert error.detail == stderr
    assert "sbatch: error" not in error.user_message


def test_unknown_rejection_keeps_slurm_message():
    assert (
        "An unknown error of 2031"
        in classify_submit_failure(1, FAILED + "An unknown error of 2031").user_message
    )


def test_missing_sbatch_is_a_command_failure():
    assert isinstance(classify_submit_failure(127, "sh: 1: sbatch: not found"), CommandFailed)


@pytest.mark.parametrize(
    ("output", "job_id"),
    [("123\n", "123"), ("123;cluster2\n", "123"), ("lua: hello\n123\n", "123")],
)
def test_job_id_is_parsed_from_output(output, job_id):
    assert parse_one_outcome(output).slurm_job_id == job_id


def test_missing_job_id_is_outcome_unknown():
    outcome = parse_one_outcome("Submitted batch job\n")
    assert outcome.slurm_job_id == ""
    assert isinstance(outcome.error, CommandTimeout)


def parse_one_outcome(sbatch_stdout):
    output = f"{SEPARATOR}a{SEPARATOR}{sbatch_stdout}{SEPARATOR}0{SEPARATOR}{SEPARATOR}\n"
    (outcome,) = parse_submit_many(output.encode(), [job("a", "good")], separator=SEPARATOR)
    return outcome


@pytest.mark.parametrize(
    ("work_dir", "script", "options"),
    [
        ("relative", "/s", ()),
        ("/w", "--wrap=evil", ()),
        ("/w\n", "/s", ()),
        ("/w", "/s", ("evil",)),
        ("/w", "/s", ("-x",)),
        ("/w", "/s", ("--a\n--b",)),
        ("/w", "/s\0", ()),
    ],
)
def test_ambiguous_submission_arguments_are_rejected(work_dir, script, options):
    with pytest.raises(ValueError, match=r"not a|contains"):
        SubmitRequest("t", work_dir, script, options)


# -- submit many: the real sh program with a fake sbatch ---------------------------------------------

FAKE_SBATCH = """#!/bin/sh
# The result depends on the last part of the work directory. Arguments are appended to $ARGUMENTS_FILE.
for argument; do printf '%s\\n' "$argument"; done >> "$ARGUMENTS_FILE"
env | grep -c '^SBATCH_' >> "$ARGUMENTS_FILE"
case "$2" in
  */good*) echo 41 ;;
  */cluster*) echo 'warning: old' >&2; echo '42;other' ;;
  */refused*) echo 'sbatch: error: Batch job submission failed: Invalid qos specification' >&2; exit 1 ;;
  */down*) echo 'sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)' >&2; exit 1 ;;
  */hang*) sleep 30 ;;
  */ignores-sigterm*) trap '' TERM; echo $$ >"${ARGUMENTS_FILE%arguments}ignores-sigterm.pid"; sleep 30; sleep 30 ;;
  */slow*) sleep 0.5; echo 43 ;;
esac
"""


@pytest.fixture
def run_many(tmp_path):
    program = tmp_path / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text(FAKE_SBATCH)
    program.chmod(0o755)
    arguments_file = tmp_path / "arguments"

    def run(submissions, start_window_s=1):
        argv = build_submit_many_argv(
            SlurmCommands(bin_dir=str(program.parent)),
            separator=SEPARATOR,
            start_window_s=start_window_s,
            min_sbatch_timeout_s=1,
        )
        environment = {
            **os.environ,
            "ARGUMENTS_FILE": str(arguments_file),
            "SBATCH_PARTITION": "mine",
            "SLURM_JOB_ID": "7",
        }
        done = subprocess.run(
            argv,
            input=build_submit_many_stdin(submissions),
            capture_output=True,
            env=environment,
            check=False,
        )
        assert done.returncode in (0, 124, -signal.SIGKILL)
        return done.stdout, parse_submit_many(done.stdout, submissions, separator=SEPARATOR)

    vars(run)["arguments_file"] = arguments_file
    return run


def job(token, directory, *options):
    return SubmitRequest(token, f"/w/{directory}", f"/w/{directory}/batch.sh", options)


def test_submit_many_with_one_rejection(run_many):
    _, outcomes = run_many([job("a", "good"), job("b", "refused"), job("c", "cluster")])
    assert [(o.token, o.slurm_job_id) for o in outcomes] == [("a", "41"), ("b", ""), ("c", "42")]
    assert isinstance(outcomes[1].error, SubmitRejected)


def test_hostile_strings_are_not_evaluated(run_many, tmp_path):
    marker = tmp_path / "ran"
    directory = f"good $(touch {marker}) `touch {marker}` ' \" * ; é中"
    _, outcomes = run_many([job("a'; exit", directory, "--comment=$(id) \\n * '")])
    assert outcomes[0].slurm_job_id == "41"
    sbatch_arguments = run_many.arguments_file.read_text().splitlines()
    assert sbatch_arguments[:4] == [
        "--parsable",
        f"--chdir=/w/{directory}",
        "--comment=$(id) \\n * '",
        f"/w/{directory}/batch.sh",
    ]
    assert not marker.exists()


def test_sbatch_variables_of_the_login_environment_are_removed(run_many):
    run_many([job("a", "good")])
    assert run_many.arguments_file.read_text().splitlines()[-1] == "0"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind"), [("down", SlurmUnavailable), ("hang", CommandTimeout)])
def test_batch_stops_after_unavailable_slurm(run_many, fault, kind):
    _, outcomes = run_many([job("a", "good"), job("b", fault), job("c", "good")])
    assert outcomes[0].slurm_job_id == "41"
    assert isinstance(outcomes[1].error, kind)
    assert not outcomes[2].attempted


@pytest.mark.slow
def test_sbatch_ignoring_sigterm_is_killed(run_many, tmp_path):
    """No sbatch may run after the command has ended; the submitter relies on this."""
    _, (outcome, rest) = run_many(
        [job_with_marker(tmp_path, "a", "ignores-sigterm"), job_with_marker(tmp_path, "b", "good")]
    )
    assert isinstance(outcome.error, CommandTimeout)
    assert not rest.attempted
    pid = int((tmp_path / "ignores-sigterm.pid").read_text())
    # No output: the process is gone. Z: its new parent has not reaped it yet.
    ps_result = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, check=False
    )
    assert ps_result.stdout.strip()[:1] in (b"", b"Z")


@pytest.mark.slow
def test_no_submission_starts_after_deadline(run_many, tmp_path):
    jobs = [job_with_marker(tmp_path, f"s{n}", "slow") for n in range(6)]
    _, outcomes = run_many(jobs)
    started = [o.slurm_job_id for o in outcomes if o.attempted]
    # Each sbatch takes 0.5 s. The window is 1 s in whole seconds; an sbatch started inside it may finish.
    assert 2 <= len(started) <= 5
    assert set(started) == {"43"}
    assert sbatch_calls(run_many) == len(started)
    _, outcomes = run_many(jobs, start_window_s=60)
    assert {o.slurm_job_id for o in outcomes} == {"43"}
    assert sbatch_calls(run_many) == len(jobs)


def test_truncated_output_neither_loses_nor_adds_jobs(run_many):
    submissions = [job("1", "good"), job("12", "refused"), job("123", "cluster")]
    full_output, _ = run_many(submissions)
    for cut in range(len(full_output) + 1):
        outcomes = parse_submit_many(full_output[:cut], submissions, separator=SEPARATOR)
        assert [o.token for o in outcomes] == ["1", "12", "123"]
        started = [
            SEPARATOR.encode() + o.token.encode() + SEPARATOR.encode() in full_output[:cut]
            for o in outcomes
        ]
        for outcome, was_started in zip(outcomes, started, strict=True):
            assert outcome.attempted or not was_started
            assert outcome.slurm_job_id in ("", "41" if outcome.token == "1" else "42")
        if b"41\n" in full_output[:cut]:
            assert outcomes[0].slurm_job_id == "41"


@given(st.text(max_size=60))
def test_stderr_cannot_corrupt_other_records(stderr):
    text = stderr.replace(SEPARATOR, "")
    out = f"{SEPARATOR}a{SEPARATOR}{SEPARATOR}1{SEPARATOR}{text}{SEPARATOR}\n{SEPARATOR}b{SEPARATOR}7\n{SEPARATOR}0{SEPARATOR}{SEPARATOR}\n"
    outcomes = parse_submit_many(
        out.encode("utf-8", "replace"), [job("a", "x"), job("b", "y")], separator=SEPARATOR
    )
    assert outcomes[0].error is not None
    assert outcomes[1].slurm_job_id == "7"


def test_unknown_token_in_output_raises():
    out = f"{SEPARATOR}x{SEPARATOR}7\n{SEPARATOR}0{SEPARATOR}{SEPARATOR}\n".encode()
    with pytest.raises(SlurmParseError):
        parse_submit_many(out, [job("a", "good")], separator=SEPARATOR)


# -- the marker: sbatch runs at most once per submission ---------------------------------------------


def job_with_marker(tmp_path, token, directory, **more):
    script = f"/w/{directory}/batch.sh"
    return SubmitRequest(
        token, f"/w/{directory}", script, marker=str(tmp_path / f"{token}.1"), **more
    )


def sbatch_calls(run_many):
    file = run_many.arguments_file
    return file.read_text().count("--parsable") if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("directory", ["good", "refused", "down", "hang"])
def test_marked_submission_runs_sbatch_once_and_keeps_the_result(run_many, tmp_path, directory):
    _, (first,) = run_many([job_with_marker(tmp_path, "a", directory)])
    _, (second,) = run_many([job_with_marker(tmp_path, "a", directory)])
    assert sbatch_calls(run_many) == 1
    assert second.slurm_job_id == first.slurm_job_id
    assert type(second.error) is type(first.error)
    assert str(second.error) == str(first.error)


def test_concurrent_engines_run_sbatch_once(run_many, tmp_path):
    jobs = [job_with_marker(tmp_path, str(n), "good") for n in range(30)]
    with ThreadPoolExecutor(4) as pool:
        answers = [outcomes for _, outcomes in pool.map(run_many, [jobs] * 4)]
    assert sbatch_calls(run_many) == 30
    for outcomes in answers:
        for outcome in outcomes:
            assert outcome.slurm_job_id == "41" or isinstance(outcome.error, CommandTimeout)


def test_marker_without_result_is_outcome_unknown_and_others_continue(run_many, tmp_path):
    (tmp_path / "a.1").write_text("1\n")
    _, (started, other) = run_many(
        [job_with_marker(tmp_path, "a", "good"), job_with_marker(tmp_path, "b", "good")]
    )
    assert isinstance(started.error, CommandTimeout)
    assert other.slurm_job_id == "41"


def test_truncated_job_id_is_not_used(run_many, tmp_path):
    (tmp_path / "a.1").write_text("1\n")
    (tmp_path / "a.1.out").write_text("4")
    _, (outcome,) = run_many([job_with_marker(tmp_path, "a", "good")])
    assert isinstance(outcome.error, CommandTimeout)


def test_abandoned_submission_never_starts(run_many, tmp_path):
    _, (first,) = run_many([job_with_marker(tmp_path, "a", "good", abandon=True)])
    _, (second,) = run_many([job_with_marker(tmp_path, "a", "good")])
    assert sbatch_calls(run_many) == 0
    assert isinstance(first.error, SubmissionAbandoned)
    assert isinstance(second.error, SubmissionAbandoned)


def test_abandoning_started_submission_returns_result(run_many, tmp_path):
    run_many([job_with_marker(tmp_path, "a", "good")])
    _, (outcome,) = run_many([job_with_marker(tmp_path, "a", "good", abandon=True)])
    assert outcome.slurm_job_id == "41"


def test_unwritable_marker_directory_runs_no_sbatch(run_many, tmp_path):
    _, (outcome,) = run_many([job_with_marker(tmp_path / "gone", "a", "good")])
    assert isinstance(outcome.error, RemoteFileError)
    assert sbatch_calls(run_many) == 0
