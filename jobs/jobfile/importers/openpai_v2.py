"""Imports OpenPAI protocol v2 (YAML with protocolVersion: 2); its `extras` are in `openpai_v2_extras`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from core.cancellation import checked
from core.messages import join_messages, msg
from jobs.jobfile.errors import Loc, shorten
from jobs.jobfile.fields import describe_type
from jobs.jobfile.importers.draft import NOT_SUPPORTED, Draft, SiteCatalog
from jobs.jobfile.importers.openpai_v2_extras import ExtrasImporter
from jobs.jobfile.importers.placeholders import (
    format_scalar,
    render_template,
    resolve_path,
    secret_variable_name,
)
from jobs.jobfile.rules import MAX_ROLES

MAX_SHOWN_IMAGES = 20  # in a message
_TOP_FIELDS = [
    "protocolVersion",
    "name",
    "type",
    "version",
    "contributor",
    "description",
    "prerequisites",
    "parameters",
    "secrets",
    "jobRetryCount",
    "taskRoles",
    "deployments",
    "defaults",
    "extras",
]
_PREREQUISITE_FIELDS = [
    "protocolVersion",
    "name",
    "type",
    "version",
    "contributor",
    "description",
    "auth",
    "uri",
]
_ROLE_FIELDS = [
    "protocolVersion",
    "instances",
    "completion",
    "taskRetryCount",
    "dockerImage",
    "data",
    "output",
    "script",
    "extraContainerOptions",
    "resourcePerInstance",
    "commands",
    "prerequisites",
]


def import_openpai_v2(source: Mapping[str, Any], site: SiteCatalog) -> Draft:
    return _OpenpaiV2Importer(source, site).run()


class _OpenpaiV2Importer:
    def __init__(self, source: Mapping[str, Any], site: SiteCatalog) -> None:
        self.source = source
        self.site = site
        self.draft = Draft()
        self.prerequisites: dict[tuple[str, str], Mapping[str, Any]] = {}  # by type and name
        self.role_index: dict[str, int] = {}  # role name → index in the document's taskRoles

    def run(self) -> Draft:
        draft, source = self.draft, self.source
        draft.reject_unknown_keys(source, _TOP_FIELDS)
        if str(source.get("protocolVersion")) not in ("2", "2.0"):
            draft.add_problem(
                ("protocolVersion",),
                msg("import.openpai.must", "must be 2."),
                value=source.get("protocolVersion"),
            )
        if source.get("type") != "job":
            draft.add_problem(
                ("type",),
                msg("import.openpai.must-job", 'must be "job".'),
                value=source.get("type"),
            )
        draft.document = {"taskRoles": [], "image": "", "importedFrom": "openpai-v2"}
        draft.sources[("image",)] = ("prerequisites",)
        draft.sources[("taskRoles",)] = ("taskRoles",)
        draft.copy_field(source, "name", ("jobName",))
        draft.sources[("jobName",)] = ("name",)
        draft.copy_field(source, "description", ("description",))
        draft.copy_field(source, "jobRetryCount", ("retryCount",))
        labels = {
            key: text
            for key in ("version", "contributor")
            if (text := format_scalar(source.get(key))) is not None
        }
        if labels:
            draft.document["labels"] = labels
        self._read_prerequisites()
        defaults = draft.as_mapping(source.get("defaults"), ("defaults",))
        for key in defaults:
            if key not in ("virtualCluster", "deployment"):
                draft.add_warning(
                    ("defaults", key),
                    NOT_SUPPORTED,
                )
        draft.copy_field(defaults, "virtualCluster", ("namespace",), ("defaults",))
        deployment = self._find_deployment(defaults.get("deployment"))
        roles = draft.as_mapping(source.get("taskRoles"), ("taskRoles",))
        for name, role in checked(roles.items()):
            self._import_role(name, draft.as_mapping(role, ("taskRoles", name)), deployment)
        if not draft.document["taskRoles"] and not draft.problems:
            draft.add_problem(
                ("taskRoles",),
                msg("import.openpai.must-least-one-role", "must have at least one role."),
            )
        if len(self.role_index) <= MAX_ROLES:  # a rule reports more roles
            ExtrasImporter(source, self.site, draft, self.role_index, self._render_commands).run()
        if draft.secrets:
            draft.document["secrets"] = sorted(draft.secrets)
        return draft

    # Prerequisites, templates, secrets

    def _read_prerequisites(self) -> None:
        for index, entry in enumerate(
            self.draft.as_list(self.source.get("prerequisites"), ("prerequisites",))
        ):
            source_loc: Loc = ("prerequisites", index)
            item = self.draft.as_mapping(entry, source_loc)
            if not item:
                continue
            self.draft.reject_unknown_keys(item, _PREREQUISITE_FIELDS, source_loc)
            kind, name = str(item.get("type")), str(item.get("name"))
            if kind not in ("dockerimage", "script", "output", "data"):
                message = msg(
                    "import.openpai.must-dockerimage-script-output",
                    "must be dockerimage, script, output or data.",
                )
                self.draft.add_problem((*source_loc, "type"), message, value=kind)
            if (kind, name) in self.prerequisites:
                self.draft.add_problem(
                    (*source_loc, "name"),
                    msg(
                        "import.openpai.second-name",
                        "is a %(kind)s name used twice.",
                        kind=kind,
                    ),
                    value=name,
                )
            self.prerequisites[kind, name] = item
            if item.get("auth") is not None:
                self._read_image_login(item, (*source_loc, "auth"))

    def _read_image_login(self, item: Mapping[str, Any], source_loc: Loc) -> None:
        section = self.draft.as_mapping(item["auth"], source_loc)
        login = {}
        for key in ("username", "password", "registryuri"):
            text = format_scalar(section.get(key))
            if text is not None:
                login[key] = render_template(text, {}, self._read_secret, self.draft.text_budget)
        if login and isinstance(item.get("uri"), str):
            self.draft.image_logins[item["uri"]] = login
            self.draft.add_warning(
                source_loc,
                msg(
                    "import.openpai.login-used-fetch-image",
                    "the login is used to fetch the image and deleted when the job ends.",
                ),
            )

    def _read_secret(self, path: str) -> str | None:
        return format_scalar(resolve_path(self.source.get("secrets"), path))

    def _add_secret_variable(self, path: str) -> str | None:
        """Add the secret at a path as a variable of the tasks. Returns a shell reference to it, or None."""
        value = self._read_secret(path)
        if value is None:
            return None
        variable = secret_variable_name(path)
        if variable not in self.draft.secrets:
            self.draft.add_warning(
                ("secrets", *path.strip(".").split(".")),
                msg(
                    "import.openpai.tasks-read-environment-variable",
                    "tasks read it from the environment variable %(variable)s; the shell does not expand it inside single quotes.",
                    variable=variable,
                ),
            )
        self.draft.secrets[variable] = value
        return f"${{{variable}}}"

    def _render_commands(self, value: Any, source_loc: Loc, role: Mapping[str, Any]) -> list[str]:
        """Replace the placeholders in each command and trim whitespace, as OpenPAI does."""
        context: dict[str, Any] = {"parameters": self.source.get("parameters") or {}}
        for kind in ("script", "output", "data"):
            found = self.prerequisites.get((kind, str(role.get(kind))))
            if found is not None:
                context[kind] = found
        commands = []
        for index, command in enumerate(self.draft.as_list(value, source_loc)):
            text = format_scalar(command)
            if text is None:
                hint = (
                    msg(
                        "import.openpai.yaml-text-needs-quotes",
                        'In YAML, text with ": " in it needs quotes.',
                    )
                    if command
                    else ""
                )
                message = join_messages(
                    msg(
                        "import.openpai.must-text-not",
                        "must be text, not %(kind)s.",
                        kind=describe_type(command),
                    ),
                    hint,
                )
                self.draft.add_problem((*source_loc, index), message, value=command)
                continue
            rendered = render_template(
                text, context, self._add_secret_variable, self.draft.text_budget
            )
            commands.append(rendered.strip())
        return commands

    # Roles

    def _find_deployment(self, name: Any) -> Mapping[str, Any]:
        """Find the pre- and post-commands of the default deployment, by role name."""
        draft = self.draft
        chosen: Mapping[str, Any] = {}
        names = []
        for index, entry in enumerate(
            draft.as_list(self.source.get("deployments"), ("deployments",))
        ):
            item = draft.as_mapping(entry, ("deployments", index))
            names.append(str(item.get("name")))
            if item.get("name") == name:
                chosen = draft.as_mapping(
                    item.get("taskRoles"), ("deployments", index, "taskRoles")
                )
        if name is not None and str(name) not in names:
            draft.add_problem(
                ("defaults", "deployment"),
                msg("import.openpai.names-no-deployment-file", "is not a deployment of this file."),
                value=name,
            )
        elif name is None and names:
            draft.add_warning(
                ("deployments",),
                msg(
                    "import.openpai.no-deployment-chosen-defaults",
                    "defaults.deployment names no deployment; none is used.",
                ),
            )
        return chosen

    def _import_role(
        self, name: str, role: Mapping[str, Any], deployment: Mapping[str, Any]
    ) -> None:
        draft = self.draft
        source_loc: Loc = ("taskRoles", name)
        index = len(draft.document["taskRoles"])
        target_loc: Loc = ("taskRoles", index)
        self.role_index[name] = index
        draft.document["taskRoles"].append({"name": name, "strictShell": True})
        draft.sources[target_loc] = source_loc
        draft.reject_unknown_keys(role, _ROLE_FIELDS, source_loc)
        draft.copy_field(role, "instances", (*target_loc, "taskNumber"), source_loc)
        self._import_image(role, target_loc, source_loc)
        self._import_resources(role, target_loc, source_loc)
        self._import_completion(role, target_loc, source_loc)
        for kind in ("script", "output", "data"):
            requested = role.get(kind)
            if requested is not None and (kind, str(requested)) not in self.prerequisites:
                draft.add_problem(
                    (*source_loc, kind),
                    msg(
                        "import.openpai.names-no-prerequisite-type",
                        "is not a prerequisite of type %(kind)s.",
                        kind=kind,
                    ),
                    value=requested,
                )
        if role.get("taskRetryCount"):
            draft.add_warning(
                (*source_loc, "taskRetryCount"),
                msg(
                    "import.openpai.single-tasks-not-retried",
                    "single tasks are not retried; jobRetryCount retries the whole job.",
                ),
            )
        if role.get("prerequisites"):
            draft.add_warning(
                (*source_loc, "prerequisites"),
                msg(
                    "import.openpai.role-prerequisites-ignored",
                    "is ignored: a role uses its dockerImage, data, output and script.",
                ),
            )
        deployment_role = draft.as_mapping(deployment.get(name), ("deployments",))
        commands = [
            *self._render_commands(deployment_role.get("preCommands"), ("deployments",), role),
            *self._render_commands(role.get("commands"), (*source_loc, "commands"), role),
            *self._render_commands(deployment_role.get("postCommands"), ("deployments",), role),
        ]
        draft.set_value((*target_loc, "command"), "\n".join(commands), (*source_loc, "commands"))

    def _import_image(self, role: Mapping[str, Any], target_loc: Loc, source_loc: Loc) -> None:
        requested = role.get("dockerImage")
        found = self.prerequisites.get(("dockerimage", str(requested)))
        if found is None:
            message = msg(
                "import.openpai.must-name-prerequisite-type",
                "must name a prerequisite of type dockerimage; available: %(known)s.",
                known=self._list_images() or msg("import.openpai.none", "none"),
            )
            self.draft.add_problem((*source_loc, "dockerImage"), message, value=requested)
            return
        uri = found.get("uri")
        if not self.draft.document["image"]:
            self.draft.set_value(("image",), uri, (*source_loc, "dockerImage"))
        elif uri != self.draft.document["image"]:
            self.draft.set_value((*target_loc, "image"), uri, (*source_loc, "dockerImage"))

    def _list_images(self) -> str:
        """List the names of the first images, for a message."""
        names = (name for kind, name in self.prerequisites if kind == "dockerimage")
        shown = [shorten(name) for name in islice(names, MAX_SHOWN_IMAGES + 1)]
        return ", ".join([*shown[:MAX_SHOWN_IMAGES], *("…" for _ in shown[MAX_SHOWN_IMAGES:])])

    def _import_resources(self, role: Mapping[str, Any], target_loc: Loc, source_loc: Loc) -> None:
        draft = self.draft
        resources_loc: Loc = (*source_loc, "resourcePerInstance")
        section = draft.as_mapping(role.get("resourcePerInstance"), resources_loc)
        draft.reject_unknown_keys(section, ("cpu", "memoryMB", "gpu", "ports"), resources_loc)
        for key, field in (("cpu", "cpuNumber"), ("memoryMB", "memoryMB"), ("gpu", "gpuNumber")):
            if section.get(key) is not None:
                source: Loc = (*resources_loc, key)
                number = draft.round_up(
                    section[key], source, msg("import.openpai.cpus-mbs-gpus", "CPUs, MBs and GPUs")
                )
                low = {"cpu": 1, "memoryMB": 100, "gpu": 0}[key]
                draft.set_value(
                    (*target_loc, field), draft.raise_to_minimum(number, low, source), source
                )
        ports = draft.as_mapping(section.get("ports"), (*resources_loc, "ports"))
        entries = [{"label": label, "portNumber": n} for label, n in ports.items() if n != 0]
        draft.set_value((*target_loc, "portList"), entries, (*resources_loc, "ports"))
        options = draft.as_mapping(
            role.get("extraContainerOptions"), (*source_loc, "extraContainerOptions")
        )
        shm = options.get("shmMB") or 0
        memory = draft.document["taskRoles"][target_loc[1]].get("memoryMB", 100)
        if isinstance(shm, int) and isinstance(memory, int) and shm > memory >= 100:
            draft.add_warning(
                (*source_loc, "extraContainerOptions", "shmMB"),
                msg(
                    "import.openpai.lowered-memorymb",
                    "%(shm)s is lowered to memoryMB, %(memory)s.",
                    shm=shm,
                    memory=memory,
                ),
            )
            shm = memory
        draft.set_value(
            (*target_loc, "shmMB"), shm, (*source_loc, "extraContainerOptions", "shmMB")
        )
        if options.get("infiniband"):
            draft.add_warning(
                (*source_loc, "extraContainerOptions", "infiniband"),
                msg(
                    "import.openpai.no-meaning-tasks-see",
                    "is ignored: tasks use their node's network.",
                ),
            )

    def _import_completion(self, role: Mapping[str, Any], target_loc: Loc, source_loc: Loc) -> None:
        draft = self.draft
        section = draft.as_mapping(role.get("completion"), (*source_loc, "completion"))
        draft.reject_unknown_keys(
            section, ("minFailedInstances", "minSucceededInstances"), (*source_loc, "completion")
        )
        tasks = role.get("instances") or 1
        for key, field, default in (
            ("minFailedInstances", "minFailedTaskCount", 1),
            ("minSucceededInstances", "minSucceededTaskCount", tasks),
        ):
            source: Loc = (*source_loc, "completion", key)
            value = section.get(key) or default
            if isinstance(value, int) and isinstance(tasks, int) and value > tasks:
                draft.add_warning(
                    source,
                    msg(
                        "import.openpai.can-never-reached-instances",
                        "%(value)s can never be reached with %(tasks)s instances; it is off.",
                        value=value,
                        tasks=tasks,
                    ),
                )
                value = -1
            is_off = isinstance(value, int) and value < 0
            draft.set_value((*target_loc, field), None if is_off else value, source)
