"""Commands that submit, show and change jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from sluice.archive import bind_file_name
from sluice.client import Client, JobFile
from sluice.command import output
from sluice.command.attach import attach_and_exit
from sluice.command.job_files import Document, add_file_names, read_documents, split_arguments
from sluice.command.options import (
    AllOption,
    CodeArgument,
    FollowJobOption,
    IndexOption,
    JobArgument,
    JobArguments,
    JsonOption,
    ManifestArgument,
    ManifestArguments,
    NameOption,
    NamespaceOption,
    RoleOption,
    SecretOption,
    UniqueNameOption,
    YesOption,
)
from sluice.command.terminal import strip_control
from sluice.errors import Invalid, SluiceError
from sluice.messages import t
from sluice.values import Job, Plan, Task

# The states of watched tasks are read more often; older ones are shown with their age.
MAX_TASK_AGE_S = 3


def register(app: typer.Typer) -> None:
    """Add these commands, in the order in which the help lists them."""
    app.command("train", help=t("Submit a manifest with its code and follow the job."))(train)
    app.command("submit", help=t("Submit job files; --follow follows a job until it ends."))(submit)
    app.command("plan", help=t("Show the plan of a job file without submitting it."))(plan)
    app.command("list", help=t("Jobs that you may see, newest first."))(list_jobs)
    app.command("show", help=t("One job: its state, the reason, its tasks."))(show)
    app.command("attach", help=t("Follow a job: its state and output until it ends."))(attach)
    app.command("wait", help=t("Wait for the end without printing output."))(wait)
    app.command("stop", help=t("Stop jobs."))(stop)
    app.command("halt", help=t("The same as stop."))(stop)
    app.command("release", help=t("End the failed tasks that isDebug keeps."))(release)
    app.command("delete", help=t("Delete jobs; those that still run are stopped first."))(delete)
    app.command("retry", help=t("Run an ended job again, as a new attempt."))(retry)
    app.command("clone", help=t("Submit the same job file as a new job."))(clone)
    app.command("limit", help=t("Change the time limit of a job."))(limit)


def read_job_file(path: Path) -> JobFile:
    return sys.stdin.read() if str(path) == "-" else path


def parse_secrets(options: list[str] | None) -> dict[str, str]:
    """Parse the options NAME=VALUE and NAME; the value of the latter is that of the environment variable."""
    secrets = {}
    for option in options or ():
        name, sign, value = option.partition("=")
        if not sign and name not in os.environ:
            raise Invalid(
                t("The secret {name} has no value: set it in the environment.", name=name),
                code="secret",
            )
        secrets[name] = value if sign else os.environ[name]
    return secrets


def print_warnings(warnings: tuple[str, ...]) -> None:
    if not output.mode.json:
        for warning in warnings:
            output.print_message(t("Warning: {message}", message=warning), "yellow")


def submit_job_file(
    client: Client,
    job_file: JobFile,
    code: Path | None,
    name: str,
    namespace: str,
    secret: list[str] | None,
    unique_name: bool,
) -> Job:
    with output.progress_bar(t("Uploading the code")) as update:
        job = client.submit(
            job_file,
            code=code,
            name=name,
            namespace=namespace,
            secrets=parse_secrets(secret),
            unique_name=unique_name,
            progress=bind_file_name(update, ""),
        )
    print_warnings(job.warnings)
    return job


def train(
    manifest: ManifestArgument,
    code: CodeArgument = None,
    name: NameOption = "",
    unique_name: UniqueNameOption = False,
    namespace: NamespaceOption = "",
    secret: SecretOption = None,
    role: RoleOption = "",
    index: IndexOption = 0,
    all_tasks: AllOption = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help=t("Submit and return immediately."))
    ] = False,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        job_file = read_job_file(manifest)
        job = submit_job_file(client, job_file, code, name, namespace, secret, unique_name)
        print_and_follow(
            client, job, follow=not detach, role=role, index=index, all_tasks=all_tasks
        )


def submit(
    manifests: ManifestArguments,
    name: NameOption = "",
    unique_name: UniqueNameOption = False,
    namespace: NamespaceOption = "",
    secret: SecretOption = None,
    follow: FollowJobOption = False,
    role: RoleOption = "",
    index: IndexOption = 0,
    all_tasks: AllOption = False,
    json: JsonOption = False,
) -> None:
    files, code = split_arguments(manifests)
    documents = read_documents(files)
    with Client() as client:
        if len(documents) == 1:
            job = submit_job_file(
                client, documents[0].text, code, name, namespace, secret, unique_name
            )
            print_and_follow(
                client, job, follow=follow, role=role, index=index, all_tasks=all_tasks
            )
            return
        if name or follow:
            raise Invalid(
                t(
                    "--name and --follow are for one job file, but there are {count}.",
                    count=len(documents),
                ),
                code="several_files",
            )
        submit_documents(client, documents, code, namespace, secret, unique_name)


def submit_documents(
    client: Client,
    documents: Sequence[Document],
    code: Path | None,
    namespace: str,
    secret: list[str] | None,
    unique_name: bool,
) -> None:
    """Submit several job files and print one line per job; or every refusal with its file."""
    try:
        with output.progress_bar(t("Uploading the code")) as update:
            jobs = client.submit_many(
                [document.text for document in documents],
                code=code,
                namespace=namespace,
                secrets=parse_secrets(secret),
                unique_name=unique_name,
                progress=bind_file_name(update, ""),
            )
    except SluiceError as error:
        if error.submitted:
            print_jobs(error.submitted)
        add_file_names(error, documents)
        raise
    print_jobs(jobs)


def print_jobs(jobs: Sequence[Job]) -> None:
    if output.mode.json:
        output.print_json({"items": [job.raw for job in jobs]})
        return
    for job in jobs:
        print_warnings(tuple(f"{job.name}: {warning}" for warning in job.warnings))
        output.print_text(strip_control(f"{job.id}  {job.name}"))


def print_and_follow(
    client: Client,
    job: Job,
    *,
    follow: bool,
    role: str = "",
    index: int = 0,
    all_tasks: bool = False,
) -> None:
    """Print the submitted job. If `follow`, follow it and exit with its result; else print only its id."""
    if output.mode.json:
        output.print_json({"event": "submitted", "job": job.raw} if follow else job.raw)
    elif follow:
        output.print_message(t("Job {name} is submitted: {id}", name=job.name, id=job.id), "bold")
    else:
        output.print_text(job.id)
    if follow:
        attach_and_exit(client, job, role=role, index=index, all_tasks=all_tasks)


def plan(
    manifest: ManifestArgument,
    code: CodeArgument = None,
    name: NameOption = "",
    namespace: NamespaceOption = "",
    script: Annotated[bool, typer.Option("--script", help=t("Only the batch script."))] = False,
    json: JsonOption = False,
) -> None:
    with Client() as client, output.progress_bar(t("Uploading the code")) as update:
        job_plan = client.plan(
            read_job_file(manifest),
            code=code,
            name=name,
            namespace=namespace,
            progress=bind_file_name(update, ""),
        )
    output.print_result(job_plan.raw, lambda: show_plan(job_plan, script))
    if not job_plan.ok:
        raise typer.Exit(output.EXIT_FAILED)


def show_plan(job_plan: Plan, script: bool) -> None:
    if script:
        output.print_text(job_plan.script)
        return
    print_warnings(job_plan.warnings)
    for problem in job_plan.problems:
        output.print_message(problem, "red")
    if job_plan.words:
        output.print_text(strip_control(job_plan.words))
    if cost := format_cost(job_plan):
        output.print_text(t("At most: {cost}", cost=cost))
    if job_plan.ok and job_plan.starts_now:
        output.print_message(t("It could start now."), "green")
    elif job_plan.ok and job_plan.starts_now is False:
        output.print_message(t("It would have to wait: the resources are not free now."), "yellow")
        if job_plan.expected_start:
            at = output.timestamp_text(job_plan.expected_start)
            output.print_message(
                t("Estimated from the time limits of running jobs, it could start by {at}.", at=at)
            )
    if job_plan.ok and not job_plan.may_submit:
        output.print_message(
            t("You may not submit to {namespace}.", namespace=job_plan.namespace), "red"
        )


def format_cost(job_plan: Plan) -> str:
    """Format the cost of the whole time limit; empty if the job has no time limit."""
    parts = []
    if job_plan.machine_hours is not None:
        parts.append(t("{hours} machine hours", hours=f"{job_plan.machine_hours:g}"))
    elif job_plan.node_hours is not None:
        parts.append(t("{hours} node hours, no price", hours=f"{job_plan.node_hours:g}"))
    if job_plan.gpu_hours:
        parts.append(t("{hours} GPU hours", hours=f"{job_plan.gpu_hours:g}"))
    return " · ".join(parts)


def list_jobs(
    query: Annotated[
        str, typer.Argument(metavar="[TEXT]", help=t("Part of a name, description, owner or id."))
    ] = "",
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help=t("Only in these states."))
    ] = None,
    namespace: Annotated[
        list[str] | None, typer.Option("--namespace", "-n", help=t("Only in these namespaces."))
    ] = None,
    owner: Annotated[
        list[str] | None, typer.Option("--owner", "-o", help=t("Only of these owners."))
    ] = None,
    mine: Annotated[bool, typer.Option("--mine", "-m", help=t("Only your own."))] = False,
    label: Annotated[
        list[str] | None, typer.Option("--label", "-l", help=t("Only with this key or key=value."))
    ] = None,
    gpu_type: Annotated[
        str, typer.Option("--gpu-type", help=t("Only with this type of GPU."))
    ] = "",
    sort: Annotated[
        str, typer.Option("--sort", help=t("For example created, -started, name."))
    ] = "",
    limit: Annotated[
        int, typer.Option("--limit", min=0, help=t("Maximum number of jobs; 0: all."))
    ] = 20,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        jobs = list(
            client.list(
                q=query,
                state=[name.upper() for name in state or ()],
                namespace=namespace or (),
                owner=owner or (),
                mine=mine,
                label=label or (),
                gpu_type=gpu_type,
                sort=sort,
                limit=limit or None,
            )
        )
    output.print_result([job.raw for job in jobs], lambda: show_list(jobs))


def show_list(jobs: list[Job]) -> None:
    if not jobs:
        output.print_message(t("No jobs found."))
        return
    output.print_table(
        (
            t("ID"),
            t("NAME"),
            t("STATE"),
            t("NAMESPACE"),
            t("OWNER"),
            t("TASKS"),
            t("GPUS"),
            t("AGE"),
            t("RAN"),
            t("REASON"),
        ),
        (
            (
                job.id[:8],
                job.name,
                output.state_text(job),
                job.namespace,
                job.owner,
                job.tasks,
                job.gpus or "",
                output.age_text(job.created_at),
                output.duration_text(job.duration_s),
                job.reason,
            )
            for job in jobs
        ),
    )


def show(
    id: JobArgument,
    file: Annotated[bool, typer.Option("--file", help=t("Only the job file, as YAML."))] = False,
    script: Annotated[
        bool, typer.Option("--script", help=t("Only the batch script given to sbatch."))
    ] = False,
    events: Annotated[
        bool, typer.Option("--events", help=t("Only the events of the job."))
    ] = False,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        job = client.find(id)
        if file:
            output.print_result(client.spec(job), lambda: output.print_text(client.job_file(job)))
        elif script:
            text = client.script(job)
            output.print_result({"script": text}, lambda: output.print_text(text))
        elif events:
            rows = list(client.events(job))
            output.print_result(
                rows,
                lambda: output.print_table(
                    ("", "", "", ""),
                    (
                        (
                            row["at"][:19].replace("T", " "),
                            row["kind"],
                            row["actor_name"] or row["actor"],
                            row["data"].get("state") or "",
                        )
                        for row in rows
                    ),
                ),
            )
        else:
            tasks = client.tasks(job) if job.attempt else ()
            raw = {**job.raw, "task_list": [task.raw for task in tasks]}
            output.print_result(raw, lambda: show_job(client.url, job, tasks))


def show_job(server_url: str, job: Job, tasks: Sequence[Task]) -> None:
    output.print_fields(
        (
            (t("Job"), job.name),
            ("ID", job.id),
            (t("State"), output.state_text(job)),
            (t("Reason"), str(job.reason)),
            (t("Exit code"), "" if job.exit_code is None else job.exit_code),
            (t("Kept until"), output.timestamp_text(job.kept_until)),
            (t("Owner"), job.owner),
            (t("Namespace"), job.namespace),
            (t("Slurm id"), job.slurm_job_id),
            (t("Attempt"), job.attempt if job.attempt > 1 else ""),
            (t("Resources"), output.resources_text(job)),
            (t("Submitted"), output.timestamp_text(job.created_at)),
            (
                t("Expected start"),
                output.timestamp_text(job.expected_start) if job.state == "PENDING" else "",
            ),
            (t("Started"), output.timestamp_text(job.started_at)),
            (t("Ended"), output.timestamp_text(job.ended_at)),
            (t("Ran"), output.duration_text(job.duration_s)),
            (t("Expected end"), output.timestamp_text(job.expected_end)),
            (t("Time limit"), output.duration_text(job.time_limit_s)),
            (t("Estimated duration"), output.duration_text(job.estimated_duration_s)),
            (t("GPU hours"), f"{job.gpu_hours:g}" if job.gpu_hours else ""),
            (
                t("Cost"),
                t("{hours} machine hours", hours=f"{job.machine_hours:g}")
                if job.machine_hours
                else "",
            ),
            (t("Page"), server_url + str((job.raw.get("links") or {}).get("page", ""))),
        )
    )
    if tasks:
        output.print_text("")
        output.print_table(
            (t("TASK"), t("STATE"), t("NODE"), t("EXIT CODE")),
            (
                (
                    f"{task.role}-{task.index} {strip_control(task.role_title)}".rstrip(),
                    output.task_state_text(task),
                    task.node,
                    "" if task.exit_code is None else task.exit_code,
                )
                for task in tasks
            ),
        )
        age_s = tasks[0].age_s or 0
        if age_s > MAX_TASK_AGE_S:
            output.print_message(
                t("The states of the tasks were read {age} ago.", age=output.duration_text(age_s)),
                "dim",
            )
    print_warnings(job.warnings)


def attach(
    id: JobArgument,
    role: RoleOption = "",
    index: IndexOption = 0,
    all_tasks: AllOption = False,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        attach_and_exit(client, client.find(id), role=role, index=index, all_tasks=all_tasks)


def wait(
    id: JobArgument,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help=t("Maximum wait in seconds."))
    ] = None,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        job = client.wait(client.find(id), timeout=timeout)
    output.print_result(job.raw, lambda: output.print_text(job.state))
    raise typer.Exit(0 if job.completed else output.EXIT_FAILED)


def for_each_job(ids: list[str], apply: Callable[[Client, Job], object]) -> None:
    """Apply an action to each job. Exits with an error code if it failed for one of them."""
    done, failed = [], 0
    with Client() as client:
        for job_id in ids:
            try:
                job = client.find(job_id)
                done.append(apply(client, job))
            except SluiceError as error:
                if len(ids) == 1:
                    raise
                failed += 1
                output.print_message(f"{job_id}: {error.message}", "red")
    if output.mode.json:
        output.print_json(done if len(ids) > 1 else done[0])
    if failed:
        raise typer.Exit(output.EXIT_FAILED)


def stop(ids: JobArguments, json: JsonOption = False) -> None:
    def apply(client: Client, job: Job) -> object:
        if job.ended:
            output.print_message(
                t("{name} has ended already ({state}).", name=job.name, state=job.state)
            )
            return job.raw
        stopped = client.stop(job)
        output.print_message(t("{name} is being stopped.", name=job.name))
        return stopped.raw

    for_each_job(ids, apply)


def release(ids: JobArguments, json: JsonOption = False) -> None:
    def apply(client: Client, job: Job) -> object:
        released = client.release(job)
        output.print_message(t("The kept tasks of {name} are being released.", name=job.name))
        return released.raw

    for_each_job(ids, apply)


def delete(
    ids: JobArguments,
    files: Annotated[
        bool, typer.Option("--files", help=t("Also the job's directory on the cluster."))
    ] = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    def apply(client: Client, job: Job) -> object:
        ask = not yes and sys.stdin.isatty() and not output.mode.json
        if ask and not job.ended:
            question = t("{name} has not ended. Stop and delete it?", name=job.name)
            typer.confirm(question, abort=True, err=True)
        stopping_job = client.delete(job, remove_files=files, stop_first=True)
        if stopping_job is None:
            output.print_message(t("{name} is deleted.", name=job.name))
        else:
            output.print_message(
                t("{name} is being stopped and will then be deleted.", name=job.name)
            )
        return {"id": job.id, "deleted": stopping_job is None}

    for_each_job(ids, apply)


def retry(
    id: JobArgument,
    follow: FollowJobOption = False,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        print_and_follow(client, client.retry(client.find(id)), follow=follow)


def clone(
    id: JobArgument,
    name: NameOption = "",
    namespace: NamespaceOption = "",
    follow: FollowJobOption = False,
    json: JsonOption = False,
) -> None:
    with Client() as client:
        job = client.clone(client.find(id), name=name, namespace=namespace)
        print_and_follow(client, job, follow=follow)


def limit(
    id: JobArgument,
    time: Annotated[str, typer.Argument(metavar="TIME", help=t("Such as 90m, 2h30m or 1d."))],
    json: JsonOption = False,
) -> None:
    seconds = parse_duration(time)
    with Client() as client:
        job = client.set_time_limit(client.find(id), seconds)
    output.print_result(
        job.raw,
        lambda: output.print_message(
            t("The time limit changes to {time}.", time=output.duration_text(seconds))
        ),
    )


def parse_duration(text: str) -> int:
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    total, number = 0, ""
    for letter in text.lower().strip():
        if letter.isdigit():
            number += letter
        elif letter in units and number:
            total, number = total + int(number) * units[letter], ""
        else:
            total, number = 0, ""
            break
    total += int(number or 0)
    if not total:
        raise Invalid(
            t("{text} is not a duration; write it as 90m, 2h30m or 1d.", text=text), code="time"
        )
    return total
