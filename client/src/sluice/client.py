"""`sluice.Client`: what people can do on the pages, as methods.

HTTP is in `sluice.http`, logs and events are in `sluice.logs` and `sluice.events`, uploads and downloads in
`sluice.archive` and `sluice.transfer`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import httpx

from sluice.archive import MAX_BYTES, FileProgress, Progress, bind_file_name, open_archive
from sluice.config import resolve_connection
from sluice.errors import Invalid, NotFound, SluiceError
from sluice.events import JobWatcher
from sluice.http import ApiSession
from sluice.logs import LogStream, WaitCallback
from sluice.messages import t
from sluice.transfer import Download, download_stream, safe_name
from sluice.values import File, Job, Json, Plan, Task, Template, Token


@runtime_checkable
class HasSpec(Protocol):
    """An object that can produce a job file, such as the classes of `sluice.frameworks`."""

    def spec(self) -> dict[str, Any]: ...


@runtime_checkable
class HasId(Protocol):
    @property
    def id(self) -> str: ...


MAX_JOB_FILES = 1000  # of one request
JobFile = Mapping[str, Any] | str | os.PathLike[str] | HasSpec
JobLike = str | HasId
Code = str | os.PathLike[str]


def parse_job_id(job: JobLike) -> str:
    text = job if isinstance(job, str) else job.id
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise Invalid(
            t("{id} is not a job id; “sluice list” shows the ids.", id=repr(text)), code="bad_id"
        ) from None


def load_job_file(job: JobFile) -> Mapping[str, Any] | str:
    """Return the job file as an object or as text. Reads the file if `job` is a path object."""
    if isinstance(job, os.PathLike):
        try:
            return Path(job).expanduser().read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            raise Invalid(t("{path} is not a text file.", path=str(job)), code="not_text") from None
        except OSError as error:
            raise Invalid(
                t("{path} cannot be read: {problem}.", path=str(job), problem=error.strerror),
                code="no_file",
            ) from error
    if isinstance(job, HasSpec):
        return job.spec()
    if isinstance(job, str) and not any(sign in job for sign in "\n{:"):
        raise Invalid(
            t(
                "{text} is not a job file. To send a file, pass pathlib.Path({text}).",
                text=repr(job),
            ),
            code="not_a_job_file",
        )
    return job


def idempotency_headers(key: str = "") -> dict[str, str]:
    """Return the header with which a request can be repeated after a lost response: the server creates one job."""
    return {"Idempotency-Key": key or str(uuid.uuid4())}


class Client:
    """One user at one server. Without arguments, URL and token are those of the environment or of `sluice login`."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        verify: bool | str = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not url or not token:
            connection = resolve_connection(url)
            url, token = url or connection.url, token or connection.token
        self.session = ApiSession(url, token, verify=verify, transport=transport)
        self.templates = Templates(self)
        self.tokens = Tokens(self.session)

    @property
    def url(self) -> str:
        return self.session.url

    def close(self) -> None:
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    # --- submitting -------------------------------------------------------------------------------

    def submit(
        self,
        job: JobFile,
        *,
        code: Code | None = None,
        name: str = "",
        namespace: str = "",
        secrets: Mapping[str, str] | None = None,
        unique_name: bool = False,
        key: str = "",
        progress: Progress | None = None,
    ) -> Job:
        """Submit a job file in any supported format, with a directory or archive of code.

        With `unique_name` the server appends a number to a name that a job of yours has already.
        Always sends an Idempotency-Key, so that a repeated request after a lost response creates no second
        job. Pass your own `key` to keep this guarantee after a restart of your program.
        """
        body = self._build_submission(job, code, name, namespace, secrets, progress)
        if unique_name:
            body["unique_name"] = True
        return Job.from_json(
            self.session.json("POST", "jobs", json=body, headers=idempotency_headers(key))
        )

    def submit_many(
        self,
        jobs: Sequence[JobFile],
        *,
        code: Code | None = None,
        namespace: str = "",
        secrets: Mapping[str, str] | None = None,
        unique_name: bool = False,
        key: str = "",
        progress: Progress | None = None,
    ) -> Sequence[Job]:
        """Submit job files with one request for each 1,000: all files of a request become jobs, or none.

        Returns the jobs in the order of the files. If a file is refused, the error's `errors` have the `index` of
        their file, and its `submitted` has the jobs of earlier requests. `code` and the options apply to every file.
        """
        shared = {"namespace": namespace} if namespace else {}
        options: dict[str, Any] = {**shared, **({"unique_name": True} if unique_name else {})}
        if code is not None:
            options["code"] = self.upload(code, progress=progress)
        key = key or str(uuid.uuid4())
        created: list[Job] = []
        for start in range(0, len(jobs), MAX_JOB_FILES):
            chunk = jobs[start : start + MAX_JOB_FILES]
            body = {"jobs": [self._build_entry(job, secrets, progress) for job in chunk], **options}
            headers = idempotency_headers(f"{key}-{start}" if start else key)
            try:
                answer = self.session.json("POST", "jobs", json=body, headers=headers)
            except SluiceError as error:
                error.errors = tuple(
                    row if row.index is None else replace(row, index=row.index + start)
                    for row in error.errors
                )
                error.submitted = created
                raise
            created += [Job.from_json(row) for row in answer["items"]]
        return created

    def _build_entry(
        self, job: JobFile, secrets: Mapping[str, str] | None, progress: Progress | None
    ) -> Any:
        """Return a job file as an entry of a list: alone, or with its own code and secrets."""
        body = self._build_submission(job, None, "", "", secrets, progress)
        return body["job"] if len(body) == 1 else body

    def plan(
        self,
        job: JobFile,
        *,
        code: Code | None = None,
        name: str = "",
        namespace: str = "",
        secrets: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Plan:
        """Return the plan and the batch script of a job file, without submitting it."""
        body = self._build_submission(job, code, name, namespace, secrets, progress)
        return Plan.from_json(self.session.json("POST", "jobs/plan", json=body, repeatable=True))

    def _build_submission(
        self,
        job: JobFile,
        code: Code | None,
        name: str,
        namespace: str,
        secrets: Mapping[str, str] | None,
        progress: Progress | None,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"job": load_job_file(job)}
        if code is None:
            code = getattr(job, "code", None) if isinstance(job, HasSpec) else None
        if code is not None:
            body["code"] = self.upload(code, progress=progress)
        if name:
            body["name"] = name
        if namespace:
            body["namespace"] = namespace
        if secrets:
            body["secrets"] = dict(secrets)
        return body

    def upload(
        self, code: Code, *, progress: Progress | None = None, max_bytes: int = MAX_BYTES
    ) -> str:
        """Upload code and return its SHA-256, by which a submission refers to it.

        Sends nothing if the server already has it.
        """
        with open_archive(code, max_bytes=max_bytes) as archive:
            try:
                self.session.json("GET", f"uploads/{archive.sha256}")
                return archive.sha256
            except NotFound:
                pass
            upload = self.session.json(
                "POST",
                "uploads",
                params={"filename": archive.name},
                content=lambda: archive.chunks(progress),
                headers={
                    "Content-Type": "application/octet-stream",
                    "Content-Length": str(archive.size),
                },
                # Uploads are stored by their SHA-256, so a repeated upload changes nothing.
                repeatable=True,
            )
        return str(upload["sha256"])

    # --- reading ------------------------------------------------------------------------------------

    def list(
        self,
        *,
        state: str | Sequence[str] = (),
        namespace: str | Sequence[str] = (),
        owner: str | Sequence[str] = (),
        mine: bool | None = None,
        name: str = "",
        q: str = "",
        slurm_id: str = "",
        gpu_type: str = "",
        distributed: bool | None = None,
        label: str | Sequence[str] = (),
        created_after: datetime | None = None,
        created_before: datetime | None = None,
        sort: str = "",
        limit: int | None = None,
    ) -> Iterator[Job]:
        """Yield jobs, newest first unless `sort` is given. Requests further pages on demand."""
        params: dict[str, Any] = {
            "state": state,
            "namespace": namespace,
            "owner": owner,
            "mine": mine or None,
            "name": name,
            "q": q,
            "slurm_id": slurm_id,
            "gpu_type": gpu_type,
            "distributed": distributed,
            "label": label,
            "created_after": isoformat_utc(created_after) if created_after else None,
            "created_before": isoformat_utc(created_before) if created_before else None,
            "sort": sort,
        }
        for raw in iter_pages(self.session, "jobs", params, limit):
            yield Job.from_json(raw)

    def show(self, job: JobLike) -> Job:
        return Job.from_json(self.session.json("GET", f"jobs/{parse_job_id(job)}"))

    def find(self, word: str) -> Job:
        """Return the job with this id, beginning of an id, Slurm id or name. If several have the name, the newest."""
        try:
            return self.show(str(uuid.UUID(word)))
        except ValueError:
            pass
        queries: list[dict[str, Any]] = [{"name": word}]
        if word.replace("+", "").replace("_", "").isdigit():
            queries.insert(0, {"slurm_id": word})
        if len(word) >= 4 and all(letter in "0123456789abcdef-" for letter in word.lower()):
            queries.append({"q": word})
        for params in queries:
            jobs = [
                job
                for job in self.list(**params, limit=3)
                if "q" not in params or job.id.startswith(word.lower())
            ]
            if len(jobs) == 1 or (jobs and "name" in params):
                return self.show(jobs[0])
            if jobs:
                raise Invalid(
                    t(
                        "Several job ids begin with {word}; give more characters of the id.",
                        word=word,
                    ),
                    code="ambiguous",
                )
        raise NotFound(
            t("Job {word} does not exist; “sluice list” shows your jobs.", word=repr(word)),
            code="not_found",
            status=404,
        )

    def spec(self, job: JobLike) -> dict[str, Any]:
        """Return the job file as an object."""
        document: dict[str, Any] = self.session.json(
            "GET", f"jobs/{parse_job_id(job)}/spec", params={"format": "json"}
        )
        return document

    def job_file(self, job: JobLike) -> str:
        """Return the job file as YAML, which can be changed and submitted again."""
        path = f"jobs/{parse_job_id(job)}/spec"
        return self.session.request("GET", path, params={"format": "yaml"}).text

    def script(self, job: JobLike, *, attempt: int | None = None) -> str:
        """Return the batch script."""
        path = f"jobs/{parse_job_id(job)}/script"
        return str(self.session.json("GET", path, params={"attempt": attempt})["script"])

    def tasks(self, job: JobLike, *, attempt: int | None = None) -> Sequence[Task]:
        path = f"jobs/{parse_job_id(job)}/tasks"
        body = self.session.json("GET", path, params={"attempt": attempt})
        return [Task.from_json(row, body.get("age_s")) for row in body["items"]]

    def events(self, job: JobLike, *, since: int = 0) -> Iterator[Json]:
        """Yield the job's events, oldest first."""
        path = f"jobs/{parse_job_id(job)}/events"
        after: int | None = since
        while after is not None:
            page = self.session.json("GET", path, params={"since": after, "limit": 500})
            yield from page["items"]
            after = page.get("next")

    def attempts(self, job: JobLike) -> Sequence[Json]:
        rows: list[Json] = self.session.json("GET", f"jobs/{parse_job_id(job)}/attempts")["items"]
        return rows

    def watch(self, job: JobLike, *, timeout: float | None = None) -> Iterator[Job]:
        """Yield the job now and after each change, until it has ended."""
        return iter(JobWatcher(self.session, parse_job_id(job), timeout_s=timeout))

    def wait(
        self,
        job: JobLike,
        *,
        timeout: float | None = None,
        on_change: Callable[[Job], None] | None = None,
    ) -> Job:
        """Wait until the job has ended and return it. Raises WaitTimeout after `timeout` seconds; the job continues."""
        last: Job | None = None
        for last in self.watch(job, timeout=timeout):
            if on_change:
                on_change(last)
        if last is None:
            raise SluiceError(t("The server sent no data about the job."))
        return last

    # --- actions ---------------------------------------------------------------------------------------

    def stop(self, job: JobLike) -> Job:
        return Job.from_json(
            self.session.json("POST", f"jobs/{parse_job_id(job)}/stop", repeatable=True)
        )

    def release(self, job: JobLike) -> Job:
        """End the failed tasks that a job with isDebug keeps. The job then ends with their exit code."""
        return Job.from_json(
            self.session.json("POST", f"jobs/{parse_job_id(job)}/release", repeatable=True)
        )

    def delete(
        self, job: JobLike, *, remove_files: bool = False, stop_first: bool = False
    ) -> Job | None:
        """Return None if the job is deleted; return the job if it is being stopped and is deleted afterwards."""
        raw = self.session.json(
            "DELETE",
            f"jobs/{parse_job_id(job)}",
            params={"remove_files": remove_files, "stop_first": stop_first},
        )
        return Job.from_json(raw) if raw else None

    def retry(self, job: JobLike, *, key: str = "") -> Job:
        """Run the same job again, as a new attempt."""
        return Job.from_json(
            self.session.json(
                "POST", f"jobs/{parse_job_id(job)}/retry", headers=idempotency_headers(key)
            )
        )

    def clone(self, job: JobLike, *, name: str = "", namespace: str = "", key: str = "") -> Job:
        """Submit the same job file as a new job. Without `name` the server chooses the next free name."""
        fields = (("name", name), ("namespace", namespace))
        body = {field: value for field, value in fields if value}
        path = f"jobs/{parse_job_id(job)}/clone"
        return Job.from_json(
            self.session.json("POST", path, json=body, headers=idempotency_headers(key))
        )

    def update(
        self,
        job: JobLike,
        *,
        description: str | None = None,
        labels: Mapping[str, str] | None = None,
        time_limit_s: int | None = None,
    ) -> Job:
        body = {"description": description, "labels": labels, "time_limit_s": time_limit_s}
        body = {key: value for key, value in body.items() if value is not None}
        return Job.from_json(self.session.json("PATCH", f"jobs/{parse_job_id(job)}", json=body))

    def set_time_limit(self, job: JobLike, seconds: int) -> Job:
        return self.update(job, time_limit_s=seconds)

    # --- logs and files -------------------------------------------------------------------------------

    def logs(
        self,
        job: JobLike,
        role: str = "",
        index: int = 0,
        *,
        follow: bool = False,
        offset: int = 0,
        attempt: int | None = None,
        on_wait: WaitCallback | None = None,
    ) -> LogStream:
        """Return the output of a task; if `role` is empty, of the main role. A negative offset counts from the end."""
        job_id = parse_job_id(job)
        return LogStream(
            self.session,
            job_id,
            role or default_log_role(self.spec(job_id)),
            index,
            follow=follow,
            offset=offset,
            attempt=attempt,
            on_wait=on_wait,
        )

    def log_list(self, job: JobLike, *, attempt: int | None = None) -> Sequence[Json]:
        """Return the logs of the job's tasks: role, index, size (None if there is no file yet), state of the task."""
        path = f"jobs/{parse_job_id(job)}/logs"
        rows: list[Json] = self.session.json("GET", path, params={"attempt": attempt})["items"]
        # The server also lists the log of the batch script, which `logs(job, "batch")` reads.
        return [row for row in rows if row["role"] != "batch"]

    def files(
        self, job: JobLike, path: str = "", *, root: str = "work", attempt: int | None = None
    ) -> Sequence[File]:
        """List a directory below the attempt's directory ("work"), the results ("output") or the models ("model")."""
        params = {"path": path, "root": root, "attempt": attempt}
        rows = self.session.json("GET", f"jobs/{parse_job_id(job)}/files", params=params)["items"]
        return [File.from_json(row) for row in rows]

    def download(
        self,
        job: JobLike,
        path: str,
        to: str | os.PathLike[str] | None = None,
        *,
        root: str = "work",
        attempt: int | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Download one file. Continues an interrupted download from NAME.part."""
        target = Path(to) if to is not None else Path(safe_name(path.rsplit("/", 1)[-1]))
        if target.is_dir():
            target = target / safe_name(path.rsplit("/", 1)[-1])
        params = {"path": path, "root": root, "attempt": attempt}
        endpoint = f"jobs/{parse_job_id(job)}/files/download"
        return Download(self.session, endpoint, params, target, progress).run()

    def download_tree(
        self,
        job: JobLike,
        to: str | os.PathLike[str],
        path: str = "",
        *,
        root: str = "output",
        attempt: int | None = None,
        progress: FileProgress | None = None,
    ) -> Sequence[Path]:
        """Download a directory recursively, file by file, except files that an earlier call has downloaded."""
        directory = Path(to)
        directory.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        for entry in self.files(job, path, root=root, attempt=attempt):
            target = directory / safe_name(entry.name)
            if entry.kind == "dir":
                paths += self.download_tree(
                    job, target, entry.path, root=root, attempt=attempt, progress=progress
                )
                continue
            if entry.kind not in ("file", "link"):
                continue
            if not _is_up_to_date(target, entry):
                file_progress = bind_file_name(progress, entry.path)
                try:
                    self.download(
                        job, entry.path, target, root=root, attempt=attempt, progress=file_progress
                    )
                except SluiceError:
                    if entry.kind == "file":
                        raise
                    continue  # a link to a directory or to a path outside the job's directories
                if entry.modified_at and entry.kind == "file":
                    modified_at = entry.modified_at.timestamp()
                    os.utime(target, (modified_at, modified_at))
            paths.append(target)
        return paths

    def download_tar(
        self,
        job: JobLike,
        to: str | os.PathLike[str],
        path: str = "",
        *,
        root: str = "output",
        attempt: int | None = None,
        progress: Progress | None = None,
    ) -> Path:
        """Download a directory as one tar archive, which the server creates while it sends it."""
        params = {"path": path, "root": root, "attempt": attempt}
        endpoint = f"jobs/{parse_job_id(job)}/files/tar"
        return download_stream(self.session, endpoint, params, Path(to), progress)

    # --- resources --------------------------------------------------------------------------------

    def me(self) -> Json:
        row: Json = self.session.json("GET", "me")
        return row

    def capacity(self) -> Json:
        """Return total and free GPUs by type, and per namespace the resources that a job could get now."""
        row: Json = self.session.json("GET", "capacity")
        return row

    def namespaces(self) -> Sequence[Json]:
        rows: list[Json] = self.session.json("GET", "namespaces")["items"]
        return rows

    def clusters(self) -> Sequence[Json]:
        rows: list[Json] = self.session.json("GET", "clusters")["items"]
        return rows

    def frameworks(self, namespace: str = "") -> Sequence[Json]:
        """Return the training frameworks with their strategies, and the versions that clusters have images of."""
        params = {"namespace": namespace} if namespace else {}
        rows: list[Json] = self.session.json("GET", "frameworks", params=params)["items"]
        return rows

    def specs(self, namespace: str = "") -> Sequence[Json]:
        """Return the named sizes of a task."""
        params = {"namespace": namespace}
        rows: list[Json] = self.session.json("GET", "specs", params=params)["items"]
        return rows


class Templates:
    """Templates: saved job files with parameters."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session = client.session

    def list(
        self,
        *,
        q: str = "",
        mine: bool | None = None,
        visibility: str = "",
        namespace: str = "",
        limit: int | None = None,
    ) -> Iterator[Template]:
        params = {
            "q": q,
            "mine": mine or None,
            "visibility": visibility,
            "namespace": namespace,
        }
        for raw in iter_pages(self._session, "templates", params, limit):
            yield Template.from_json(raw)

    def show(self, template: str) -> Template:
        return Template.from_json(
            self._session.json("GET", f"templates/{parse_template_id(template)}")
        )

    def find(self, word: str) -> Template:
        """Return the template with this id or name."""
        try:
            return self.show(str(uuid.UUID(word)))
        except ValueError:
            pass
        templates = [template for template in self.list(q=word) if template.name == word]
        if len(templates) != 1:
            message = (
                t("Several templates are named {word}; give the id.", word=repr(word))
                if templates
                else t("Template {word} does not exist.", word=repr(word))
            )
            raise NotFound(message, code="not_found", status=404)
        return self.show(templates[0].id)

    def create(
        self,
        name: str,
        *,
        job_file: JobFile | None = None,
        from_job: JobLike | None = None,
        parameters: Sequence[Mapping[str, Any]] = (),
        description: str = "",
        visibility: str = "private",
        namespace: str | None = None,
    ) -> Template:
        body: dict[str, Any] = {
            "name": name,
            "description": description,
            "visibility": visibility,
            "parameters": [dict(row) for row in parameters],
        }
        if namespace:
            body["namespace"] = namespace
        if job_file is not None:
            document = load_job_file(job_file)
            body["job_file" if isinstance(document, str) else "spec"] = document
        if from_job is not None:
            body["from_job"] = parse_job_id(from_job)
        return Template.from_json(self._session.json("POST", "templates", json=body))

    def update(self, template: Template, **changes: Any) -> Template:
        """Change fields of a template. Raises Conflict if it was changed on the server since it was read."""
        body = {"version": template.version, **changes}
        return Template.from_json(
            self._session.json("PATCH", f"templates/{template.id}", json=body)
        )

    def copy(self, template: str, *, name: str = "") -> Template:
        body = {"name": name} if name else {}
        path = f"templates/{parse_template_id(template)}/copy"
        return Template.from_json(self._session.json("POST", path, json=body))

    def delete(self, template: str) -> None:
        self._session.request("DELETE", f"templates/{parse_template_id(template)}")

    def submit(
        self,
        template: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        namespace: str = "",
        code: Code | None = None,
        secrets: Mapping[str, str] | None = None,
        key: str = "",
        progress: Progress | None = None,
    ) -> Job:
        body: dict[str, Any] = {"parameters": dict(parameters or {})}
        if code is not None:
            body["code"] = self._client.upload(code, progress=progress)
        extra = {"name": name, "namespace": namespace, "secrets": dict(secrets or {})}
        body.update({key: value for key, value in extra.items() if value})
        path = f"templates/{parse_template_id(template)}/submit"
        return Job.from_json(
            self._session.json("POST", path, json=body, headers=idempotency_headers(key))
        )


class Tokens:
    """The user's tokens. `sluice.create_token` creates one, which needs name and password instead of a token."""

    def __init__(self, session: ApiSession) -> None:
        self._session = session

    def list(self) -> Sequence[Token]:
        return [Token.from_json(row) for row in self._session.json("GET", "tokens")["items"]]

    def revoke(self, token_id: int) -> None:
        self._session.request("DELETE", f"tokens/{token_id}")


def create_token(
    url: str,
    user: str,
    password: str,
    *,
    name: str,
    scope: str = "write",
    expires_at: datetime | None = None,
    verify: bool | str = True,
    transport: httpx.BaseTransport | None = None,
) -> Token:
    """Sign in with name and password and create a token. Its secret is only in the returned value."""
    session = ApiSession(url, verify=verify, transport=transport)
    try:
        body = {"name": name, "scope": scope}
        if expires_at is not None:
            body["expires_at"] = isoformat_utc(expires_at)
        return Token.from_json(session.json("POST", "tokens", json=body, auth=(user, password)))
    finally:
        session.close()


def iter_pages(
    session: ApiSession, path: str, params: Mapping[str, Any], limit: int | None
) -> Iterator[Json]:
    """Yield the rows of all pages, at most `limit` rows. Requests further pages on demand."""
    remaining = limit
    cursor: str | None = ""
    while cursor is not None and remaining != 0:
        size = 100 if remaining is None else min(100, remaining)
        page = session.json("GET", path, params={**params, "limit": size, "cursor": cursor})
        yield from page["items"]
        if remaining is not None:
            remaining = max(0, remaining - len(page["items"]))
        cursor = page.get("next")


def default_log_role(spec: Mapping[str, Any]) -> str:
    """Return the role whose log is shown by default.

    That is the main role, else the chief, master or worker of a framework, else the first role.
    """
    roles = [role for role in spec.get("taskRoles") or () if isinstance(role, Mapping)]
    if not roles:
        raise NotFound(t("The job file has no roles."), code="no_roles")
    for role in roles:
        if role.get("isMain"):
            return str(role["name"])
    names = [str(role["name"]) for role in roles]
    if spec.get("framework"):
        for name in ("chief", "master", "worker"):
            if name in names:
                return name
    return names[0]


def parse_template_id(template: str) -> str:
    try:
        return str(uuid.UUID(template))
    except ValueError:
        raise Invalid(t("{id} is not a template id.", id=repr(template)), code="bad_id") from None


def isoformat_utc(value: datetime) -> str:
    """Return the time in UTC. A value without time zone is in local time."""
    return value.astimezone(UTC).isoformat()


def _is_up_to_date(target: Path, entry: File) -> bool:
    try:
        local = target.stat()
    except OSError:
        return False
    modified_at = entry.modified_at.timestamp() if entry.modified_at else local.st_mtime
    return local.st_size == entry.size and abs(local.st_mtime - modified_at) < 2
