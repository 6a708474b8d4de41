"""`sluice.Client`: the functions of the pages as methods. HTTP is in `sluice.http`, streams are in
`sluice.logs` and `sluice.events`, files in `sluice.archive` and `sluice.transfer`."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

import httpx

from sluice.archive import MAX_BYTES, Progress, open_archive
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
    """The job file as an object or as text. A path is read; a text is a job file already."""
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
    """With this key a request can be repeated after a lost response: the server creates one job."""
    return {"Idempotency-Key": key or str(uuid.uuid4())}


class Client:
    """One user at one server. Without arguments: from the environment or `sluice login`."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        verify: bool | str = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if not url or not token:
            found = resolve_connection(url)
            url, token = url or found.url, token or found.token
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
        key: str = "",
        progress: Progress | None = None,
    ) -> Job:
        """Submit a job file in any supported format, with a directory or archive of code.

        Always sends an Idempotency-Key, so that a repeated request after a lost response creates no second
        job. Pass your own `key` to keep this guarantee after a restart of your program.
        """
        body = self._envelope(job, code, name, namespace, secrets, progress)
        return Job.from_json(
            self.session.json("POST", "jobs", json=body, headers=idempotency_headers(key))
        )

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
        """The plan and the script of a job file, without submitting it."""
        body = self._envelope(job, code, name, namespace, secrets, progress)
        return Plan.from_json(self.session.json("POST", "jobs/plan", json=body, repeatable=True))

    def _envelope(
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
                # Addressed by content, so a repeated upload is harmless.
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
        """Jobs, newest first unless `sort` is given; pages are fetched on demand."""
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
            "created_after": isoformat_utc(created_after),
            "created_before": isoformat_utc(created_before),
            "sort": sort,
        }
        for raw in iter_pages(self.session, "jobs", params, limit):
            yield Job.from_json(raw)

    def show(self, job: JobLike) -> Job:
        return Job.from_json(self.session.json("GET", f"jobs/{parse_job_id(job)}"))

    def find(self, word: str) -> Job:
        """A job by its id, the beginning of its id, a Slurm id, or its exact name (the newest of that name)."""
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
            found = [
                job
                for job in self.list(**params, limit=3)
                if "q" not in params or job.id.startswith(word.lower())
            ]
            if len(found) == 1 or (found and "name" in params):
                return self.show(found[0])
            if found:
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
        """The job file as an object."""
        found: dict[str, Any] = self.session.json(
            "GET", f"jobs/{parse_job_id(job)}/spec", params={"format": "json"}
        )
        return found

    def job_file(self, job: JobLike) -> str:
        """The job file as YAML, to change and submit again."""
        path = f"jobs/{parse_job_id(job)}/spec"
        return self.session.request("GET", path, params={"format": "yaml"}).text

    def script(self, job: JobLike, *, attempt: int | None = None) -> str:
        """The batch script."""
        path = f"jobs/{parse_job_id(job)}/script"
        return str(self.session.json("GET", path, params={"attempt": attempt})["script"])

    def tasks(self, job: JobLike, *, attempt: int | None = None) -> Sequence[Task]:
        path = f"jobs/{parse_job_id(job)}/tasks"
        rows = self.session.json("GET", path, params={"attempt": attempt})["items"]
        return [Task.from_json(row) for row in rows]

    def events(self, job: JobLike, *, since: int = 0) -> Iterator[Json]:
        """Its events, oldest first."""
        path = f"jobs/{parse_job_id(job)}/events"
        after: int | None = since
        while after is not None:
            page = self.session.json("GET", path, params={"since": after, "limit": 500})
            yield from page["items"]
            after = page.get("next")

    def attempts(self, job: JobLike) -> Sequence[Json]:
        found: list[Json] = self.session.json("GET", f"jobs/{parse_job_id(job)}/attempts")["items"]
        return found

    def watch(self, job: JobLike, *, timeout: float | None = None) -> Iterator[Job]:
        """Yields the job after each change; the last value has ended."""
        return iter(JobWatcher(self.session, parse_job_id(job), timeout_s=timeout))

    def wait(
        self,
        job: JobLike,
        *,
        timeout: float | None = None,
        on_change: Callable[[Job], None] | None = None,
    ) -> Job:
        """The ended job. Raises WaitTimeout after `timeout` seconds; the job continues."""
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

    def delete(
        self, job: JobLike, *, remove_files: bool = False, stop_first: bool = False
    ) -> Job | None:
        """None: it is deleted. A job: it is being stopped and is deleted afterwards."""
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
        """The same job file as a new job."""
        given = (("name", name), ("namespace", namespace))
        body = {field: value for field, value in given if value}
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
        """A task's output. Without a role: the main role's. A negative offset counts from the end."""
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
        """The logs of its tasks: role, index, size (None: no file yet) and the task's state."""
        path = f"jobs/{parse_job_id(job)}/logs"
        rows: list[Json] = self.session.json("GET", path, params={"attempt": attempt})["items"]
        # The batch script's own log is listed too; `logs(job, "batch")` reads it.
        return [row for row in rows if row["role"] != "batch"]

    def files(
        self, job: JobLike, path: str = "", *, root: str = "work", attempt: int | None = None
    ) -> Sequence[File]:
        """List a directory below the attempt's directory ("work") or the results ("output")."""
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
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Sequence[Path]:
        """Download a directory recursively, file by file. Repeated, it fetches only missing files."""
        directory = Path(to)
        directory.mkdir(parents=True, exist_ok=True)
        found: list[Path] = []
        for entry in self.files(job, path, root=root, attempt=attempt):
            target = directory / safe_name(entry.name)
            if entry.kind == "dir":
                found += self.download_tree(
                    job, target, entry.path, root=root, attempt=attempt, progress=progress
                )
            elif entry.kind in ("file", "link") and not _is_up_to_date(target, entry):
                file_progress = _bind_name(progress, entry.path)
                try:
                    self.download(
                        job, entry.path, target, root=root, attempt=attempt, progress=file_progress
                    )
                except SluiceError:
                    if entry.kind == "file":
                        raise
                    continue  # a link to a directory, or out of the job's files
                if entry.modified_at and entry.kind == "file":
                    at = entry.modified_at.timestamp()
                    os.utime(target, (at, at))
                found.append(target)
            elif entry.kind in ("file", "link"):
                found.append(target)
        return found

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
        """Download a directory as one tar, which the server creates while sending."""
        params = {"path": path, "root": root, "attempt": attempt}
        endpoint = f"jobs/{parse_job_id(job)}/files/tar"
        return download_stream(self.session, endpoint, params, Path(to), progress)

    # --- resources --------------------------------------------------------------------------------

    def me(self) -> Json:
        found: Json = self.session.json("GET", "me")
        return found

    def capacity(self) -> Json:
        """GPUs by type, total and free, and per namespace what you could start now."""
        found: Json = self.session.json("GET", "capacity")
        return found

    def namespaces(self) -> Sequence[Json]:
        found: list[Json] = self.session.json("GET", "namespaces")["items"]
        return found

    def clusters(self) -> Sequence[Json]:
        found: list[Json] = self.session.json("GET", "clusters")["items"]
        return found

    def specs(self, namespace: str = "") -> Sequence[Json]:
        """Named sizes of a task."""
        found: list[Json] = self.session.json("GET", "specs", params={"namespace": namespace})[
            "items"
        ]
        return found


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
        """By id, or by its exact name."""
        try:
            return self.show(str(uuid.UUID(word)))
        except ValueError:
            pass
        found = [row for row in self.list(q=word) if row.name == word]
        if len(found) != 1:
            message = (
                t("Several templates are named {word}; give the id.", word=repr(word))
                if found
                else t("Template {word} does not exist.", word=repr(word))
            )
            raise NotFound(message, code="not_found", status=404)
        return self.show(found[0].id)

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
        """Change it; raises Conflict if it was changed since it was read."""
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
    """Your tokens. Creating one requires name and password, not a token."""

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
    """Sign in with name and password and get a token; its secret is only in this response."""
    session = ApiSession(url, verify=verify, transport=transport)
    try:
        body = {"name": name, "scope": scope}
        if expires_at is not None:
            body["expires_at"] = expires_at.astimezone(UTC).isoformat()
        return Token.from_json(session.json("POST", "tokens", json=body, auth=(user, password)))
    finally:
        session.close()


def iter_pages(
    session: ApiSession, path: str, params: Mapping[str, Any], limit: int | None
) -> Iterator[Json]:
    """Rows of all pages, fetched on demand; at most `limit` rows."""
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
    """The role shown by default: the main role, else chief, master or worker of a framework, else the first."""
    roles = [role for role in spec.get("taskRoles") or () if isinstance(role, Mapping)]
    if not roles:
        raise NotFound(t("The job file has no roles."), code="no_roles")
    for role in roles:
        if role.get("isMain"):
            return str(role["name"])
    names = [str(role["name"]) for role in roles]
    if spec.get("framework"):
        for wanted in ("chief", "master", "worker"):
            if wanted in names:
                return wanted
    return names[0]


def parse_template_id(template: str) -> str:
    try:
        return str(uuid.UUID(template))
    except ValueError:
        raise Invalid(t("{id} is not a template id.", id=repr(template)), code="bad_id") from None


def isoformat_utc(value: datetime | None) -> str | None:
    if value is None:
        return None
    aware = value if value.tzinfo else value.astimezone()
    return aware.astimezone(UTC).isoformat()


def _is_up_to_date(target: Path, entry: File) -> bool:
    try:
        found = target.stat()
    except OSError:
        return False
    at = entry.modified_at.timestamp() if entry.modified_at else found.st_mtime
    return found.st_size == entry.size and abs(found.st_mtime - at) < 2


def _bind_name(progress: Callable[[str, int, int], None] | None, name: str) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(name, done, total)
