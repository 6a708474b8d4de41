"""Submission of many job files with one request: all become jobs, or none and all refusals are listed.

The work of a request is bounded: by the number of files, by the values and text of all of them together
(`jobs.jobfile.limits`), and by the number of refused files after which no further one is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from clusters.errors import ClusterError
from core.cancellation import checkpoint
from core.errors import (
    ActionRefused,
    ClusterNotReady,
    InvalidValue,
    NameTaken,
    NotAllowed,
    NotFound,
    TooLarge,
)
from core.messages import _
from jobs.actions import NAME_PATH, PlannedJob, build_name_taken_error, store_jobs
from jobs.jobfile import Problem, SpecError
from jobs.jobfile.limits import MAX_CHARS_PER_REQUEST, MAX_VALUES_PER_REQUEST
from jobs.models import Job
from jobs.plan import PlanError
from jobs.store.job_names import JobNames
from jobs.store.submitter import Submitter
from jobs.submission import (
    JobFileSource,
    SubmissionRequest,
    build_site_catalog,
    choose_name,
    drop_unknown_origins,
    parse_job_file,
    plan_submission,
)

MAX_JOB_FILES = 1000
# After this number of refused files, or of problems, the other files are not checked.
MAX_REFUSED_FILES = 100
MAX_LISTED_PROBLEMS = 1000
# Field of a job file that an error is about, unless the error has paths of its own.
_PATHS: Mapping[type[ActionRefused], str] = {
    NotFound: "code",
    NameTaken: NAME_PATH,
    NotAllowed: "namespace",
    InvalidValue: "labels",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A problem of one job file. `index` is the file's position in the request, counted from 0."""

    index: int
    problem: Problem  # its path begins with jobs[<index>]


class JobsRefused(Exception):
    """Job files of the request are refused, so no job was created. `unchecked` files were not looked at."""

    def __init__(self, refusals: Sequence[Refusal], unchecked: int = 0) -> None:
        super().__init__(f"{len(refusals)} problems")
        self.refusals = tuple(refusals)
        self.unchecked = unchecked

    @property
    def problems(self) -> list[Problem]:
        return [refusal.problem for refusal in self.refusals]


@dataclass(slots=True)
class _Refusals:
    """Collects the problems of the job files of a request."""

    file_count: int
    by_index: dict[int, Sequence[Problem]] = field(default_factory=dict)

    @contextmanager
    def collect(self, index: int) -> Iterator[None]:
        """Collect the refusal of one job file. Raises JobsRefused if too many files are refused."""
        checkpoint()
        try:
            yield
        except (SpecError, PlanError, ActionRefused, ClusterError) as error:
            if isinstance(error, ClusterNotReady | TooLarge):
                raise  # not a problem of this job file
            self.by_index[index] = _list_problems(error)
            problem_count = sum(map(len, self.by_index.values()))
            if len(self.by_index) >= MAX_REFUSED_FILES or problem_count >= MAX_LISTED_PROBLEMS:
                self.raise_if_any(unchecked=self.file_count - index - 1)

    def raise_if_any(self, unchecked: int = 0) -> None:
        if not self.by_index:
            return
        refusals = [
            Refusal(index, _add_index(index, problem))
            for index, problems in sorted(self.by_index.items())
            for problem in problems
        ]
        raise JobsRefused(refusals, unchecked)


def _list_problems(error: SpecError | PlanError | ActionRefused | ClusterError) -> list[Problem]:
    if isinstance(error, SpecError | PlanError):
        return list(error.problems)
    if isinstance(error, ActionRefused):
        path = next((path for kind, path in _PATHS.items() if isinstance(error, kind)), "")
        return [Problem(path, error.user_message, error.code)]
    return [Problem("namespace", error.user_message, "identity_refused")]


def _add_index(index: int, problem: Problem) -> Problem:
    separator = "." if problem.path and not problem.path.startswith("[") else ""
    return replace(problem, path=f"jobs[{index}]{separator}{problem.path}")


def prepare_submissions(
    submitter: Submitter, sources: Sequence[JobFileSource]
) -> Callable[[], list[Job]]:
    """Parse, check and plan all job files, and return the function that stores the jobs in the same order.

    Raises JobsRefused with the problems of all files; TooLarge, ClusterNotReady. Job files that differ only in name,
    description, labels and commands are planned once.
    """
    refusals = _Refusals(len(sources))
    submissions = _parse_job_files(submitter, sources, refusals)
    submissions = _choose_names(submitter, sources, submissions, refusals)
    origins = drop_unknown_origins(submitter, list(submissions.values()))
    planned_jobs = []
    for index, submission in zip(submissions, origins, strict=True):
        with refusals.collect(index):
            planned_jobs.append(plan_submission(submitter, submission))
    refusals.raise_if_any()
    return lambda: _store(submitter, planned_jobs)


def _parse_job_files(
    submitter: Submitter, sources: Sequence[JobFileSource], refusals: _Refusals
) -> dict[int, SubmissionRequest]:
    """Return the accepted job files by their index."""
    site = build_site_catalog(submitter.user)
    submissions: dict[int, SubmissionRequest] = {}
    values = chars = 0
    for index, source in enumerate(sources):
        with refusals.collect(index):
            submission = parse_job_file(submitter, source, site)
            submissions[index] = submission
            values, chars = values + submission.size.values, chars + submission.size.chars
            if values > MAX_VALUES_PER_REQUEST or chars > MAX_CHARS_PER_REQUEST:
                raise TooLarge(
                    _(
                        "The job files of one request may contain %(values)s values and %(chars)s characters of text, "
                        "counting what aliases and placeholders repeat. Send fewer at once.",
                        values=f"{MAX_VALUES_PER_REQUEST:,}",
                        chars=f"{MAX_CHARS_PER_REQUEST:,}",
                    )
                )
    return submissions


def _choose_names(
    submitter: Submitter,
    sources: Sequence[JobFileSource],
    submissions: Mapping[int, SubmissionRequest],
    refusals: _Refusals,
) -> dict[int, SubmissionRequest]:
    """Choose unique names or refuse names that are taken, also by other job files of the request."""
    names = JobNames(submitter.user)
    counts = Counter(submission.spec.job_name for submission in submissions.values())
    names.load(counts)
    names.load_alternatives(
        name for name, count in counts.items() if count > 1 or names.is_used(name)
    )
    named: dict[int, SubmissionRequest] = {}
    for index, submission in submissions.items():
        with refusals.collect(index):
            unique_name = sources[index].unique_name
            if not unique_name:
                _require_free_name(submitter, names, submission.spec.job_name)
            named[index] = choose_name(submission, names, unique_name=unique_name)
            names.give(named[index].spec.job_name, index)
    return named


def _require_free_name(submitter: Submitter, names: JobNames, name: str) -> None:
    if (other := names.find_given(name)) is not None:
        raise NameTaken(
            _(
                "jobs[%(other)s] of this request has the name %(name)s too. Choose another name, or set unique_name.",
                other=other,
                name=name,
            ),
            name=name,
        )
    if names.is_live(name):
        raise build_name_taken_error(submitter.user, names, name)


def _store(submitter: Submitter, planned_jobs: Sequence[PlannedJob]) -> list[Job]:
    try:
        return store_jobs(by=submitter.user, planned_jobs=planned_jobs)
    except NameTaken as error:  # by a request that ran at the same time
        name = error.params["name"]
        index = next(n for n, one in enumerate(planned_jobs) if one.row.name == name)
        problems = [_add_index(index, problem) for problem in _list_problems(error)]
        raise JobsRefused([Refusal(index, problem) for problem in problems]) from error
