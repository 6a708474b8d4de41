"""sbatch: submit many jobs with one command, parse the outcome of each.

Paths and options are passed as argv or stdin, never as program text. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from clusters.errors import ClusterError, RemoteFileError, SubmitRejected
from clusters.slurm.errors import classify_submit_failure
from clusters.slurm.fields import SlurmCommands, parse_error
from core.messages import msg


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """One job to submit: its script on the cluster, its work directory and its options."""

    token: str  # identifies the request; returned with the outcome
    work_dir: str
    script_path: str
    options: tuple[str, ...] = ()  # further long options of sbatch, `--name` or `--name=value`
    # A file that must not exist yet. Only the process that creates it runs sbatch for this request; the result is
    # stored in the same directory (.out, .err, .end). "": no protection against a second submission.
    marker: str = ""
    abandon: bool = False  # only create the marker, so that the job can no longer be submitted

    def __post_init__(self) -> None:
        for path in (self.work_dir, self.script_path, self.marker or "/"):
            if not path.startswith("/"):
                raise ValueError(f"not an absolute path: {path!r}")
        for option in self.options:
            if not re.match(r"--[a-z]", option):
                raise ValueError(f"not a long option of sbatch: {option!r}")
        for text in (self.token, self.work_dir, self.script_path, *self.options):
            if not text or "\n" in text or "\0" in text:
                raise ValueError(f"empty, or contains a newline or NUL: {text!r}")
        if "\n" in self.marker or "\0" in self.marker:
            raise ValueError(f"not a path: {self.marker!r}")
        if self.abandon and not self.marker:
            raise ValueError("only a submission with a marker can be abandoned")


class SubmissionAbandoned(SubmitRejected):
    """sbatch had not run for this request and, because of its marker, never will."""


@dataclass(frozen=True, slots=True)
class SubmitOutcome:
    """Result of one submission: an id, an error, or neither if sbatch was not started for it.

    CommandTimeout: the job may exist; search for it by its work directory. SubmissionAbandoned: the job does not
    exist and cannot be submitted with this marker.
    """

    token: str
    slurm_job_id: str = ""
    error: ClusterError | None = None

    @property
    def attempted(self) -> bool:
        return bool(self.slurm_job_id) or self.error is not None


# `123` or `123;cluster`, the last line that sbatch prints. A site's job_submit plugin may print lines before it.
_PARSABLE_OUTPUT = re.compile(r"(\d+)(?:;\S+)?\Z")


# sh program that runs sbatch for each job on stdin.
_SUBMIT_MANY_PROGRAM = r"""
# Arguments: the separator of this run, the seconds within which it starts sbatch, the path of sbatch.
sep=$1 start_window=$2 sbatch=$3

# Time-out: one `timeout` around the program limits a hanging sbatch (a `timeout` process per sbatch costs a fifth of
# the time of sbatch). The TERM trap makes sh wait for an sbatch that ignores SIGTERM until `timeout` sends SIGKILL to
# both: after the command has ended, no sbatch runs.
trap 'exit 124' TERM

# Environment: SBATCH_* and SLURM_* of the login environment would override the script (SBATCH_PARTITION, ...). All
# but SLURM_CONF are removed.
for name in $(env | sed -n -e 's/^\(SBATCH_[A-Za-z0-9_]*\)=.*/\1/p' -e 's/^\(SLURM_[A-Za-z0-9_]*\)=.*/\1/p'); do
  [ "$name" = SLURM_CONF ] || unset "$name"
done
exec 3>&1
umask 077

# Time-out: no sbatch starts after the deadline, so each has its minimum time.
read_uptime() { IFS=. read -r now _ </proc/uptime; }
read_uptime
deadline=$((now + start_window))

# Output per job: SEP token SEP <stdout of sbatch> SEP exit code SEP stderr SEP newline. It is written while the program
# runs, so truncated output shows which jobs were started and which were accepted.
print_result() { printf '%s%s%s%s%s\n' "$sep" "$code" "$sep" "$stderr" "$sep"; }
print_file() { while IFS= read -r line; do printf '%s\n' "$line"; done <"$1"; }

# Marker: makes the program idempotent, also if two engines run it at once. `set -C` (noclobber) lets exactly one process
# create the marker and run sbatch. The others print the stored result, or 124 while there is none.
claim_marker() {
  set -C
  { printf '%s\n' "$$" >"$marker"; } 2>/dev/null
  failed=$?
  set +C
  [ "$failed" -ne 0 ] || return 0
  stderr='started before, no result yet' code=124
  if [ ! -e "$marker" ]; then stderr="$marker cannot be written" code=73
  elif [ -s "$marker.out" ]; then print_file "$marker.out" && stderr='' code=0
  elif [ -s "$marker.end" ]; then { IFS= read -r code; stderr=$(cat); } <"$marker.end"
  fi
  return 1
}
run_sbatch() {
  if [ -z "$marker" ]; then
    stderr=$("$sbatch" "$@" "$script" 2>&1 1>&3 3>&- </dev/null)
    code=$?
    return
  fi
  "$sbatch" "$@" "$script" >"$marker.out" 2>"$marker.err" 3>&- </dev/null
  code=$? stderr=''
  [ ! -s "$marker.err" ] || stderr=$(cat "$marker.err")
  [ ! -s "$marker.out" ] || print_file "$marker.out"
  [ "$code" -eq 0 ] || printf '%s\n%s\n' "$code" "$stderr" >"$marker.end"
}

# Input, one line each per job: token, work directory, script, marker (or empty), `run` or `abandon`, number of options,
# the options. `abandon` creates the marker and runs no sbatch, so that no later program can submit the job; if sbatch
# was started before, it prints the stored result like `run`.
while IFS= read -r token && IFS= read -r dir && IFS= read -r script && IFS= read -r marker &&
  IFS= read -r action && IFS= read -r count; do
  set -- --parsable --chdir="$dir"
  while [ "$count" -gt 0 ]; do
    IFS= read -r option || exit 3
    set -- "$@" "$option"
    count=$((count - 1))
  done
  read_uptime
  [ "$now" -le "$deadline" ] || exit 0
  printf '%s%s%s' "$sep" "$token" "$sep"
  if [ -n "$marker" ] && ! claim_marker; then print_result && continue; fi
  if [ "$action" = abandon ]; then
    code=75 stderr='abandoned before sbatch started'
    printf '%s\n%s\n' "$code" "$stderr" >"$marker.end"
    print_result && continue
  fi
  run_sbatch "$@"
  print_result
  # If the controller is unavailable, the other jobs would get the same error.
  case $code:$stderr in
    0:*) ;;
    *'Unable to contact slurm controller'*|*'timed out'*|*'Zero Bytes'*|*'Rate limit'*) exit 0 ;;
  esac
done
"""
# EX_TEMPFAIL and EX_CANTCREAT of sysexits.h; sbatch's own failures exit with 1.
_EXIT_ABANDONED, _EXIT_NO_MARKER = "75", "73"


def build_submit_many_argv(
    commands: SlurmCommands, *, separator: str, start_window_s: int, min_sbatch_timeout_s: int
) -> list[str]:
    """argv of an sh program that runs sbatch for each job on stdin (see build_submit_many_stdin).

    No sbatch starts later than `start_window_s`; each has at least `min_sbatch_timeout_s` to finish.
    """
    sbatch = commands.program("sbatch")
    # The program counts whole seconds, so the last sbatch may start up to 1 s after the window.
    argv = ["timeout", "-k", "5", str(start_window_s + 1 + min_sbatch_timeout_s)]
    argv += ["sh", "-c", _SUBMIT_MANY_PROGRAM, "submit", separator, str(start_window_s), sbatch]
    return ["env", f"SLURM_CONF={commands.slurm_conf}", *argv] if commands.slurm_conf else argv


def build_submit_many_stdin(submissions: Sequence[SubmitRequest]) -> bytes:
    if len({job.token for job in submissions}) != len(submissions):
        raise ValueError("two submissions with the same token")
    lines: list[str] = []
    for job in submissions:
        action = "abandon" if job.abandon else "run"
        lines += [job.token, job.work_dir, job.script_path, job.marker, action]
        lines += [str(len(job.options)), *job.options]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", errors="surrogateescape")


def parse_submit_many(
    stdout: bytes, submissions: Sequence[SubmitRequest], *, separator: str
) -> list[SubmitOutcome]:
    """Parse complete or truncated output into one outcome per submission, in the same order."""
    text = stdout.decode("utf-8", errors="replace")
    for length in range(len(separator) - 1, 0, -1):  # a truncated separator at the end
        if text.endswith(separator[:length]):
            text = text[:-length]
            break
    parts = text.split(separator)
    outcomes: dict[str, SubmitOutcome] = {}
    # parts: "", token, stdout, code, stderr, "\n", token, …: five per record after the first. A last token without a
    # separator after it may be truncated; then sbatch had not been started.
    for start in range(1, len(parts) - 1, 5):
        outcome = _parse_outcome(parts[start : start + 4], complete=len(parts) > start + 4)
        outcomes[outcome.token] = outcome
    if unexpected := set(outcomes) - {job.token for job in submissions}:
        raise parse_error(
            "sbatch printed a result for a job that was not submitted", ", ".join(unexpected)
        )
    return [outcomes.get(job.token, SubmitOutcome(job.token)) for job in submissions]


def _parse_outcome(record: list[str], *, complete: bool) -> SubmitOutcome:
    token, sbatch_stdout = record[0], record[1]
    # sbatch prints the id after slurmctld has accepted the job. Only with its newline is the line complete.
    id_match = (
        _PARSABLE_OUTPUT.match(sbatch_stdout.strip().rpartition("\n")[2])
        if sbatch_stdout.endswith("\n")
        else None
    )
    if not complete:
        if id_match:
            return SubmitOutcome(token, slurm_job_id=id_match[1])
        return SubmitOutcome(token, error=classify_submit_failure(124, "the output was truncated"))
    code, sbatch_stderr = record[2], record[3]
    if code == "0" and id_match:
        return SubmitOutcome(token, slurm_job_id=id_match[1])
    if not code.isdigit():
        raise parse_error("sbatch's exit code is missing", "|".join(record))
    if code == _EXIT_ABANDONED:
        return SubmitOutcome(
            token,
            error=SubmissionAbandoned(
                msg(
                    "slurm.job-stopped-before-slurm", "The job was stopped before it was submitted."
                )
            ),
        )
    if code == _EXIT_NO_MARKER:
        return SubmitOutcome(
            token,
            error=RemoteFileError(
                msg("slurm.job-directory-cannot-written", "The job's directory cannot be written."),
                detail=sbatch_stderr,
            ),
        )
    if code == "0":
        # Exit code 0 without an id: outcome unknown. Not observed, but a wrapper around sbatch could do it.
        return SubmitOutcome(
            token, error=classify_submit_failure(124, f"{sbatch_stdout}\n{sbatch_stderr}")
        )
    return SubmitOutcome(token, error=classify_submit_failure(int(code), sbatch_stderr))
