"""Imports OpenPAI protocol v2 (YAML with protocolVersion: 2). Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from core.messages import join_messages, msg
from jobs.jobfile.errors import Loc
from jobs.jobfile.fields import describe_type
from jobs.jobfile.importers.draft import Draft, SiteCatalog
from jobs.jobfile.importers.placeholders import (
    format_scalar,
    render_template,
    resolve_path,
    secret_variable_name,
)

PLUGINS = "com.microsoft.pai.runtimeplugin"

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


def import_v2(source: Mapping[str, Any], site: SiteCatalog) -> Draft:
    return _V2Importer(source, site).run()


class _V2Importer:
    def __init__(self, source: Mapping[str, Any], site: SiteCatalog) -> None:
        self.source = source
        self.site = site
        self.draft = Draft("openpai-v2")
        self.prerequisites: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.role_index: dict[str, int] = {}
        self.warned_secrets: set[str] = set()

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
        self._prerequisites()
        defaults = draft.as_mapping(source.get("defaults"), ("defaults",))
        for key in defaults:
            if key not in ("virtualCluster", "deployment"):
                draft.add_warning(
                    ("defaults", key),
                    msg("import.ffdl.no-meaning-ignored", "is not supported and is ignored."),
                )
        draft.copy_field(defaults, "virtualCluster", ("namespace",), ("defaults",))
        deployment = self._deployment(defaults.get("deployment"))
        for name, role in draft.as_mapping(source.get("taskRoles"), ("taskRoles",)).items():
            self._role(name, draft.as_mapping(role, ("taskRoles", name)), deployment)
        if not draft.document["taskRoles"] and not draft.problems:
            draft.add_problem(
                ("taskRoles",),
                msg("import.openpai.must-least-one-role", "must have at least one role."),
            )
        self._extras()
        self._secrets()
        return draft

    # Prerequisites, templates, secrets

    def _prerequisites(self) -> None:
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
                self._auth(item, (*source_loc, "auth"))

    def _auth(self, item: Mapping[str, Any], source_loc: Loc) -> None:
        section = self.draft.as_mapping(item["auth"], source_loc)
        login = {}
        for key in ("username", "password", "registryuri"):
            text = format_scalar(section.get(key))
            if text is not None:
                login[key] = render_template(text, {}, self._secret_value)
        if login and isinstance(item.get("uri"), str):
            self.draft.image_auth[item["uri"]] = login
            self.draft.add_warning(
                source_loc,
                msg(
                    "import.openpai.login-used-fetch-image",
                    "the login is used to fetch the image and deleted when the job ends.",
                ),
            )

    def _secret_value(self, path: str) -> str | None:
        return format_scalar(resolve_path(self.source.get("secrets"), path))

    def _secret_reference(self, path: str) -> str | None:
        value = self._secret_value(path)
        if value is None:
            return None
        variable = secret_variable_name(path)
        self.draft.secrets[variable] = value
        if variable not in self.warned_secrets:
            self.warned_secrets.add(variable)
            self.draft.add_warning(
                ("secrets", *path.strip(".").split(".")),
                msg(
                    "import.openpai.tasks-read-environment-variable",
                    "tasks read it from the environment variable %(variable)s; the shell does not expand it inside single quotes.",
                    variable=variable,
                ),
            )
        return f"${{{variable}}}"

    def _secrets(self) -> None:
        if self.draft.secrets:
            self.draft.document["secrets"] = sorted(self.draft.secrets)

    def _commands(self, value: Any, source_loc: Loc, role: Mapping[str, Any]) -> list[str]:
        """Each command with placeholders replaced and whitespace trimmed, as OpenPAI does."""
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
            commands.append(render_template(text, context, self._secret_reference).strip())
        return commands

    # Roles

    def _deployment(self, name: Any) -> Mapping[str, Any]:
        """Pre- and post-commands of the default deployment, by role."""
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

    def _role(self, name: str, role: Mapping[str, Any], deployment: Mapping[str, Any]) -> None:
        draft = self.draft
        source_loc: Loc = ("taskRoles", name)
        index = len(draft.document["taskRoles"])
        target_loc: Loc = ("taskRoles", index)
        self.role_index[name] = index
        draft.document["taskRoles"].append({"name": name, "strictShell": True})
        draft.sources[target_loc] = source_loc
        draft.reject_unknown_keys(role, _ROLE_FIELDS, source_loc)
        draft.copy_field(role, "instances", (*target_loc, "taskNumber"), source_loc)
        self._image(role, target_loc, source_loc)
        self._resources(role, target_loc, source_loc)
        self._completion(role, target_loc, source_loc)
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
        deployment_role = draft.as_mapping(deployment.get(name), ("deployments",))
        commands = [
            *self._commands(deployment_role.get("preCommands"), ("deployments",), role),
            *self._commands(role.get("commands"), (*source_loc, "commands"), role),
            *self._commands(deployment_role.get("postCommands"), ("deployments",), role),
        ]
        draft.set_value((*target_loc, "command"), "\n".join(commands), (*source_loc, "commands"))

    def _image(self, role: Mapping[str, Any], target_loc: Loc, source_loc: Loc) -> None:
        requested = role.get("dockerImage")
        found = self.prerequisites.get(("dockerimage", str(requested)))
        if found is None:
            known = ", ".join(name for kind, name in self.prerequisites if kind == "dockerimage")
            message = msg(
                "import.openpai.must-name-prerequisite-type",
                "must name a prerequisite of type dockerimage; available: %(known)s.",
                known=known or msg("import.openpai.none", "none"),
            )
            self.draft.add_problem((*source_loc, "dockerImage"), message, value=requested)
            return
        uri = found.get("uri")
        if not self.draft.document["image"]:
            self.draft.set_value(("image",), uri, (*source_loc, "dockerImage"))
        elif uri != self.draft.document["image"]:
            self.draft.set_value((*target_loc, "image"), uri, (*source_loc, "dockerImage"))

    def _resources(self, role: Mapping[str, Any], target_loc: Loc, source_loc: Loc) -> None:
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

    def _completion(self, role: Mapping[str, Any], target_loc: Loc, source_loc: Loc) -> None:
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
            off = isinstance(value, int) and value < 0
            draft.set_value((*target_loc, field), None if off else value, source)

    # Extras

    def _extras(self) -> None:
        draft = self.draft
        extras = dict(draft.as_mapping(self.source.get("extras"), ("extras",)))
        for index, entry in enumerate(
            draft.as_list(extras.pop(PLUGINS, None), ("extras", PLUGINS))
        ):
            self._plugin(
                draft.as_mapping(entry, ("extras", PLUGINS, index)), ("extras", PLUGINS, index)
            )
        for index, entry in enumerate(
            draft.as_list(extras.pop("storages", None), ("extras", "storages"))
        ):
            storage = draft.as_mapping(entry, ("extras", "storages", index))
            self._storage(
                storage.get("name"), storage.get("mountPath"), ("extras", "storages", index)
            )
        hived_scheduler = draft.as_mapping(
            extras.pop("hivedScheduler", None), ("extras", "hivedScheduler")
        )
        for name, sku in draft.as_mapping(
            hived_scheduler.get("taskRoles"), ("extras", "hivedScheduler", "taskRoles")
        ).items():
            for key in ("skuType", "gpuType"):
                if isinstance(sku, Mapping) and sku.get(key):
                    source_loc: Loc = ("extras", "hivedScheduler", "taskRoles", name, key)
                    draft.add_warning(
                        source_loc,
                        msg(
                            "import.openpai.unknown-choose-gputype-role",
                            "is not supported; set the role's gpuType instead.",
                        ),
                    )
        if extras.pop("gangAllocation", None) in (False, "false"):
            draft.add_warning(
                ("extras", "gangAllocation"),
                msg(
                    "import.openpai.all-tasks-job-start",
                    "is ignored: all tasks of a job start together.",
                ),
            )
        self._notifications(extras.pop("jobStatusChangeNotification", None))
        if extras:
            draft.set_value(("extras",), extras, ("extras",))

    def _notifications(self, section: Any) -> None:
        source_loc: Loc = ("extras", "jobStatusChangeNotification")
        requested = self.draft.as_mapping(section, source_loc)
        events = {"succeeded": "COMPLETED", "failed": "FAILED"}
        alerts = [{"event_checker": state} for key, state in events.items() if requested.get(key)]
        if alerts:
            self.draft.set_value(("alerts",), {"event": alerts}, source_loc)
        for key in requested:
            if requested[key] and key not in events:
                self.draft.add_warning(
                    (*source_loc, key),
                    msg(
                        "import.openpai.no-alert-change",
                        "is ignored: there is no alert for this change.",
                    ),
                )

    def _plugin(self, plugin: Mapping[str, Any], source_loc: Loc) -> None:
        roles = self._plugin_roles(plugin, source_loc)
        section = self.draft.as_mapping(plugin.get("parameters"), (*source_loc, "parameters"))
        name = plugin.get("plugin")
        if name == "ssh":
            self._ssh(section, roles, source_loc)
        elif name == "tensorboard":
            self._tensorboard(section, roles, source_loc)
        elif name == "cmd":
            self._cmd(section, roles, source_loc)
        elif name == "git":
            self._git(section, roles, source_loc)
        elif name == "teamwise_storage":
            for storage in self.draft.as_list(
                section.get("storageConfigNames"), (*source_loc, "parameters", "storageConfigNames")
            ):
                self._storage(storage, None, (*source_loc, "parameters", "storageConfigNames"))
        else:
            self.draft.add_warning(
                source_loc,
                msg(
                    "import.openpai.plugin-unknown-ignored",
                    "the plugin %(name)s is not supported and is ignored.",
                    name=name,
                ),
            )
        if plugin.get("failurePolicy") not in (None, "fail"):
            self.draft.add_warning(
                (*source_loc, "failurePolicy"),
                msg(
                    "import.openpai.failing-plugin-command-always",
                    "is ignored: a failing plugin command always fails the task.",
                ),
            )

    def _plugin_roles(self, plugin: Mapping[str, Any], source_loc: Loc) -> list[str]:
        requested = plugin.get("taskroles")
        if requested is None:
            return list(self.role_index)
        roles = []
        for index, name in enumerate(self.draft.as_list(requested, (*source_loc, "taskroles"))):
            if isinstance(name, str) and name in self.role_index:
                roles.append(name)
            else:
                self.draft.add_problem(
                    (*source_loc, "taskroles", index),
                    msg("import.openpai.names-no-role", "is not a role of this job."),
                    value=name,
                )
        return roles

    def _add_service(self, service: dict[str, Any], source_loc: Loc) -> None:
        services = self.draft.document.setdefault("services", [])
        if service not in services:
            services.append(service)
            self.draft.sources["services", len(services) - 1] = source_loc

    def _ssh(self, section: Mapping[str, Any], roles: list[str], source_loc: Loc) -> None:
        for role in roles:
            self._add_service({"kind": "ssh", "role": role, "portLabel": "ssh"}, source_loc)
        if section.get("userssh"):
            self.draft.add_warning(
                (*source_loc, "parameters", "userssh"),
                msg(
                    "import.openpai.your-own-account-keys",
                    "is ignored: your own account's SSH keys are used.",
                ),
            )
        if section.get("sshbarrier"):
            self.draft.add_warning(
                (*source_loc, "parameters", "sshbarrier"),
                msg("import.ffdl.no-meaning-ignored", "is not supported and is ignored."),
            )

    def _tensorboard(self, section: Mapping[str, Any], roles: list[str], source_loc: Loc) -> None:
        folders = section.get("logdir")
        log_directory = (
            next(iter(folders.values()), "") if isinstance(folders, Mapping) else folders or ""
        )
        self._add_service(
            {"kind": "tensorboard", "role": (roles or [""])[0], "path": log_directory}, source_loc
        )

    def _cmd(self, section: Mapping[str, Any], roles: list[str], source_loc: Loc) -> None:
        parameters_loc: Loc = (*source_loc, "parameters")
        known = {"taskStarts": "preCommands", "taskSucceeds": "postCommands"}
        lists: list[tuple[str, Any, Loc]] = [
            (key, section.get(key), (*parameters_loc, key))
            for key in ("preCommands", "postCommands")
        ]
        for index, entry in enumerate(
            self.draft.as_list(section.get("callbacks"), (*parameters_loc, "callbacks"))
        ):
            callback = self.draft.as_mapping(entry, (*parameters_loc, "callbacks", index))
            event = str(callback.get("event"))
            if event in known:
                commands_loc: Loc = (*parameters_loc, "callbacks", index, "commands")
                lists.append((known[event], callback.get("commands"), commands_loc))
            else:
                message = msg(
                    "import.openpai.event-does-not-exist",
                    "is ignored: the event %(event)s is not supported.",
                    event=event,
                )
                self.draft.add_warning((*parameters_loc, "callbacks", index), message)
        for field, commands, commands_loc in lists:
            for role in roles:
                self._add_commands(role, field, commands, commands_loc)

    def _add_commands(self, role: str, field: str, commands: Any, commands_loc: Loc) -> None:
        source = self.draft.as_mapping(self.source["taskRoles"].get(role), ("taskRoles", role))
        script = "\n".join(self._commands(commands, commands_loc, source))
        if script:
            index = self.role_index[role]
            entries = self.draft.document["taskRoles"][index].setdefault(field, [])
            entries.append(script)
            self.draft.sources["taskRoles", index, field] = commands_loc

    def _git(self, section: Mapping[str, Any], roles: list[str], source_loc: Loc) -> None:
        repository = format_scalar(section.get("repo"))
        if not repository:
            self.draft.add_warning(
                source_loc,
                msg(
                    "import.openpai.names-no-repository-ignored",
                    "is ignored: it has no repository.",
                ),
            )
            return
        options = [
            format_scalar(option) or ""
            for option in self.draft.as_list(
                section.get("options"), (*source_loc, "parameters", "options")
            )
        ]
        folder = [format_scalar(section["clone_dir"]) or ""] if section.get("clone_dir") else []
        command = shlex.join(["git", "clone", *options, "--", repository, *folder])
        self.draft.add_warning(
            source_loc,
            msg(
                "import.openpai.becomes-command-before-role",
                "becomes a command before the role's own: %(command)s",
                command=command,
            ),
        )
        for role in roles:
            self._add_commands(role, "preCommands", [command], (*source_loc, "parameters"))

    def _storage(self, name: Any, target: Any, source_loc: Loc) -> None:
        target = target or f"/mnt/{name}"
        folder = self.site.storages.get(str(name))
        if folder is None:
            self.draft.add_warning(
                source_loc,
                msg(
                    "import.openpai.no-storage-add-mount",
                    'the storage "%(name)s" does not exist; add a mount with the directory on this cluster and target %(target)s.',
                    name=name,
                    target=target,
                ),
            )
            return
        mounts = self.draft.document.setdefault("mounts", [])
        mounts.append({"name": str(name), "source": folder, "target": target})
        self.draft.sources["mounts", len(mounts) - 1] = source_loc
