"""sbatch: one job, many jobs in one command, and the question when a job could start.

Paths and options are data: they travel as argv or on stdin and are never part of a program's text. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from clusters.errors import (
    ClusterError,
    CommandTimeout,
    RemoteFileError,
    SlurmUnavailable,
    SubmitRejected,
)
from clusters.slurm.errors import classify_submit_failure
from clusters.slurm.fields import SlurmCommands, expand_nodes, parse_error, parse_time
from clusters.transport.base import CommandResult
from core.messages import _


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """One job to be submitted: a script that lies on the cluster, run in a directory of its own."""

    token: str  # the caller's name for it; comes back with the outcome
    work_dir: str
    script_path: str
    options: tuple[str, ...] = ()  # further long options of sbatch, `--name` or `--name=value`
    # A file that must not exist yet: whoever creates it, and nobody else ever, runs sbatch for this
    # submission; the answer is kept beside it (.out, .end). "": no such care.
    marker: str = ""
    abandon: bool = False  # only take the marker, so that nobody can submit it any more

    def __post_init__(self) -> None:
        for path in (self.work_dir, self.script_path, self.marker or "/"):
            if not path.startswith("/"):
                raise ValueError(f"not an absolute path: {path!r}")
        for option in self.options:
            if not re.match(r"--[a-z]", option):
                raise ValueError(f"not a long option of sbatch: {option!r}")
        for text in (self.token, self.work_dir, self.script_path, *self.options):
            if not text or "\n" in text or "\0" in text:
                raise ValueError(f"empty, or holds a newline or NUL: {text!r}")
        if "\n" in self.marker or "\0" in self.marker:
            raise ValueError(f"not a path: {self.marker!r}")
        if self.abandon and not self.marker:
            raise ValueError("only a submission with a marker can be given up")


class SubmissionAbandoned(SubmitRejected):
    """Nobody had begun it, and now nobody can."""


@dataclass(frozen=True, slots=True)
class SubmitOutcome:
    """What became of one submission. Exactly one of three: an id, an error, or never tried (neither).

    An error that is CommandTimeout means that the job may exist: look for its working directory. One
    that is SubmissionGivenUp: it does not, and with this marker never will.
    """

    token: str
    slurm_job_id: str = ""
    error: ClusterError | None = None

    @property
    def attempted(self) -> bool:
        return bool(self.slurm_job_id) or self.error is not None

    @property
    def outcome_unknown(self) -> bool:
        return isinstance(self.error, CommandTimeout)


_PARSABLE_OUTPUT = re.compile(r"(\d+)(?:;\S+)?\Z")


def build_submit_argv(commands: SlurmCommands, submission: SubmitRequest) -> list[str]:
    return commands.action_argv(
        "sbatch",
        "--parsable",
        f"--chdir={submission.work_dir}",
        *submission.options,
        submission.script_path,
    )


def parse_submit(result: CommandResult) -> str:
    """The new job's id (of a het job: the leader's). Raises what `submit_failure` says."""
    if result.exit_code != 0:
        raise classify_submit_failure(result.exit_code, result.error_text)
    return _parse_job_id(result.text)


def _parse_job_id(stdout: str) -> str:
    """`123`, or `123;cluster`. A job_submit plugin of the site may print lines before it."""
    last_line = stdout.strip().rpartition("\n")[2]
    match = _PARSABLE_OUTPUT.match(last_line)
    if match is None:
        raise parse_error("sbatch did not print a job id", stdout)
    return match[1]


# -- many at once -----------------------------------------------------------------------------------

# $1 mark of this run, $2 seconds in which jobs are begun, $3 sbatch. Per job on stdin: token, work dir, script, marker
# (or an empty line), run or give-up, number of options, options; a line each. Per job on stdout: MARK token MARK
# <sbatch's own stdout> MARK exit code MARK stderr MARK newline, written as it goes, so that a cut shows which jobs were
# begun and which were taken.
# With a marker the program may be run any number of times, also by two gateways at once: `set -C` lets exactly one of
# them run sbatch, the others tell what it answered, or 124 (nobody knows yet) while there is no answer.
# SBATCH_* and SLURM_* of a person's login would override the script (SBATCH_PARTITION, …): only SLURM_CONF stays.
# After an answer that says "no controller" the rest would only wait for the same: stop. One that does not answer is
# ended together with this program by one `timeout` around it all (a process more for each sbatch is a fifth of what
# sbatch itself costs); none is begun late, so that each has its time. The trap makes sh wait for an sbatch that does
# not heed SIGTERM, so that SIGKILL follows for both: whoever asks later may rely on it that sbatch has ended.
_SUBMIT_MANY_PROGRAM = r"""
mark=$1 begin_for=$2 sbatch=$3
trap 'exit 124' TERM
for name in $(env | sed -n -e 's/^\(SBATCH_[A-Za-z0-9_]*\)=.*/\1/p' -e 's/^\(SLURM_[A-Za-z0-9_]*\)=.*/\1/p'); do
  [ "$name" = SLURM_CONF ] || unset "$name"
done
exec 3>&1
umask 077
seconds() { IFS=. read -r now _ </proc/uptime; }
seconds
last_call=$((now + begin_for))
say() { printf '%s%s%s%s%s\n' "$mark" "$code" "$mark" "$complaint" "$mark"; }
show() { while IFS= read -r line; do printf '%s\n' "$line"; done <"$1"; }
take_marker() {
  set -C
  { printf '%s\n' "$$" >"$marker"; } 2>/dev/null
  taken=$?
  set +C
  [ "$taken" -ne 0 ] || return 0
  complaint='begun before, and not answered yet' code=124
  if [ ! -e "$marker" ]; then complaint="$marker cannot be written" code=73
  elif [ -s "$marker.out" ]; then show "$marker.out" && complaint='' code=0
  elif [ -s "$marker.end" ]; then { IFS= read -r code; complaint=$(cat); } <"$marker.end"
  fi
  return 1
}
run() {
  if [ -z "$marker" ]; then
    complaint=$("$sbatch" "$@" "$script" 2>&1 1>&3 3>&- </dev/null)
    code=$?
    return
  fi
  "$sbatch" "$@" "$script" >"$marker.out" 2>"$marker.err" 3>&- </dev/null
  code=$? complaint=''
  [ ! -s "$marker.err" ] || complaint=$(cat "$marker.err")
  [ ! -s "$marker.out" ] || show "$marker.out"
  [ "$code" -eq 0 ] || printf '%s\n%s\n' "$code" "$complaint" >"$marker.end"
}
while IFS= read -r token && IFS= read -r dir && IFS= read -r script && IFS= read -r marker &&
  IFS= read -r order && IFS= read -r count; do
  set -- --parsable --chdir="$dir"
  while [ "$count" -gt 0 ]; do
    IFS= read -r option || exit 3
    set -- "$@" "$option"
    count=$((count - 1))
  done
  seconds
  [ "$now" -le "$last_call" ] || exit 0
  printf '%s%s%s' "$mark" "$token" "$mark"
  if [ -n "$marker" ] && ! take_marker; then say && continue; fi
  if [ "$order" = give-up ]; then
    code=75 complaint='given up before it was begun'
    printf '%s\n%s\n' "$code" "$complaint" >"$marker.end"
    say && continue
  fi
  run "$@"
  say
  case $code:$complaint in
    0:*) ;;
    *'Unable to contact slurm controller'*|*'timed out'*|*'Zero Bytes'*|*'Rate limit'*) exit 0 ;;
  esac
done
"""
# EX_TEMPFAIL and EX_CANTCREAT of sysexits.h; sbatch itself ends with 1.
_EXIT_ABANDONED, _EXIT_NO_MARKER = "75", "73"


def build_submit_many_argv(
    commands: SlurmCommands, *, separator: str, start_window_s: int, min_sbatch_timeout_s: int
) -> list[str]:
    """A small sh program that runs sbatch for each job given on stdin (see submit_many_stdin).

    After `begin_for_s` none is begun any more; each has at least `at_least_each_s`.
    """
    sbatch = commands.program("sbatch")
    # The program's clock counts whole seconds: it may begin one up to a second late.
    argv = ["timeout", "-k", "5", str(start_window_s + 1 + min_sbatch_timeout_s)]
    argv += ["sh", "-c", _SUBMIT_MANY_PROGRAM, "submit", separator, str(start_window_s), sbatch]
    return ["env", f"SLURM_CONF={commands.slurm_conf}", *argv] if commands.slurm_conf else argv


def build_submit_many_stdin(submissions: Sequence[SubmitRequest]) -> bytes:
    if len({job.token for job in submissions}) != len(submissions):
        raise ValueError("two submissions with the same token")
    lines: list[str] = []
    for job in submissions:
        action = "give-up" if job.abandon else "run"
        lines += [job.token, job.work_dir, job.script_path, job.marker, action]
        lines += [str(len(job.options)), *job.options]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", errors="surrogateescape")


def parse_submit_many(
    stdout: bytes, submissions: Sequence[SubmitRequest], *, separator: str
) -> list[SubmitOutcome]:
    """One outcome per submission, in their order, from what was printed, be it cut off or not."""
    text = stdout.decode("utf-8", errors="replace")
    for length in range(len(separator) - 1, 0, -1):  # a mark that was itself cut off
        if text.endswith(separator[:length]):
            text = text[:-length]
            break
    parts = text.split(separator)
    outcomes: dict[str, SubmitOutcome] = {}
    # parts: "", token, stdout, code, stderr, "\n", token, …: five per record after the first. Without the mark
    # behind it the last token may be half a token, and sbatch had not been started.
    for start in range(1, len(parts) - 1, 5):
        outcome = _parse_outcome(parts[start : start + 4], complete=len(parts) > start + 4)
        outcomes[outcome.token] = outcome
    if unexpected := set(outcomes) - {job.token for job in submissions}:
        raise parse_error("sbatch answered for a job that was not submitted", ", ".join(unexpected))
    return [outcomes.get(job.token, SubmitOutcome(job.token)) for job in submissions]


def _parse_outcome(record: list[str], *, complete: bool) -> SubmitOutcome:
    token, sbatch_stdout = record[0], record[1]
    # sbatch prints the id when slurmctld has taken the job: with its newline the line is whole.
    id_match = (
        _PARSABLE_OUTPUT.match(sbatch_stdout.strip().rpartition("\n")[2])
        if sbatch_stdout.endswith("\n")
        else None
    )
    if not complete:
        if id_match:
            return SubmitOutcome(token, slurm_job_id=id_match[1])
        return SubmitOutcome(token, error=classify_submit_failure(124, "the answer was cut off"))
    code, sbatch_stderr = record[2], record[3]
    if code == "0" and id_match:
        return SubmitOutcome(token, slurm_job_id=id_match[1])
    if not code.isdigit():
        raise parse_error("sbatch's exit code is missing", "|".join(record))
    if code == _EXIT_ABANDONED:
        return SubmitOutcome(
            token, error=SubmissionAbandoned(_("The job was stopped before Slurm had it."))
        )
    if code == _EXIT_NO_MARKER:
        return SubmitOutcome(
            token,
            error=RemoteFileError(
                _("The job's directory cannot be written."), detail=sbatch_stderr
            ),
        )
    if code == "0":
        # Exit 0 without an id: nobody knows. Never seen; a wrapper around sbatch could do it.
        return SubmitOutcome(
            token, error=classify_submit_failure(124, f"{sbatch_stdout}\n{sbatch_stderr}")
        )
    return SubmitOutcome(token, error=classify_submit_failure(int(code), sbatch_stderr))


# -- when could it start ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectedStart:
    """What `sbatch --test-only` thinks; for a het job it can promise what never comes (22.05)."""

    start_at: datetime | None
    processors: int | None
    nodes: tuple[str, ...]
    partition: str = ""


# "sbatch: Job 12 to start at 2024-01-02T03:04:05 using 4 processors on nodes n[1-2] in partition cpu"
_TEST_ONLY = re.compile(
    r"to start at (?P<time>\S+)"
    r"(?:[ \w]* using (?P<processors>\d+) processors)?"
    r"(?: on (?:nodes )?(?P<nodes>\S+))?"
    r"(?: in partition (?P<partition>\S+))?"
)


def build_test_only_argv(
    commands: SlurmCommands, *, work_dir: str, options: Sequence[str] = (), script_path: str = ""
) -> list[str]:
    """Without a script path the script is read from stdin. Nothing is submitted."""
    script = [script_path] if script_path else []
    return commands.query_argv("sbatch", "--test-only", f"--chdir={work_dir}", *options, *script)


def parse_test_only(result: CommandResult) -> ExpectedStart:
    """Raises SubmitRejected where sbatch would refuse. The answer stands on stderr."""
    match = _TEST_ONLY.search(result.error_text)
    if match is None or result.exit_code != 0:
        failure = classify_submit_failure(result.exit_code or 1, result.error_text)
        if isinstance(failure, CommandTimeout):  # nothing was submitted: here it is a plain silence
            failure = SlurmUnavailable(
                _("Slurm's controller does not answer."), detail=result.error_text
            )
        raise failure
    return ExpectedStart(
        start_at=parse_time(match["time"]),
        processors=int(match["processors"]) if match["processors"] else None,
        nodes=expand_nodes(match["nodes"] or ""),
        partition=match["partition"] or "",
    )
