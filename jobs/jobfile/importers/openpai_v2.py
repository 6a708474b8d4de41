"""OpenPAI protocol v2 (YAML with protocolVersion: 2) into our job file. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from core.messages import _, together
from jobs.jobfile.errors import Loc
from jobs.jobfile.fields import kind_of
from jobs.jobfile.importers.draft import Draft, Site
from jobs.jobfile.importers.placeholders import find, render, secret_variable, text_of

PLUGINS = "com.microsoft.pai.runtimeplugin"

_TOP = [
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
_PREREQUISITE = [
    "protocolVersion",
    "name",
    "type",
    "version",
    "contributor",
    "description",
    "auth",
    "uri",
]
_ROLE = [
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


def import_v2(source: Mapping[str, Any], site: Site) -> Draft:
    return _V2(source, site).run()


class _V2:
    def __init__(self, source: Mapping[str, Any], site: Site) -> None:
        self.source = source
        self.site = site
        self.draft = Draft("openpai-v2")
        self.prerequisites: dict[tuple[str, str], Mapping[str, Any]] = {}
        self.role_index: dict[str, int] = {}
        self.warned_secrets: set[str] = set()

    def run(self) -> Draft:
        draft, source = self.draft, self.source
        draft.unknown_keys(source, _TOP)
        if str(source.get("protocolVersion")) not in ("2", "2.0"):
            draft.problem(
                ("protocolVersion",), _("must be 2."), value=source.get("protocolVersion")
            )
        if source.get("type") != "job":
            draft.problem(("type",), _('must be "job".'), value=source.get("type"))
        draft.document = {"taskRoles": [], "image": "", "importedFrom": "openpai-v2"}
        draft.sources[("image",)] = ("prerequisites",)
        draft.sources[("taskRoles",)] = ("taskRoles",)
        draft.take(source, "name", ("jobName",))
        draft.sources[("jobName",)] = ("name",)
        draft.take(source, "description", ("description",))
        draft.take(source, "jobRetryCount", ("retryCount",))
        labels = {
            key: text
            for key in ("version", "contributor")
            if (text := text_of(source.get(key))) is not None
        }
        if labels:
            draft.document["labels"] = labels
        self._prerequisites()
        defaults = draft.mapping(source.get("defaults"), ("defaults",))
        for key in defaults:
            if key not in ("virtualCluster", "deployment"):
                draft.warn(("defaults", key), _("has no meaning here and is ignored."))
        draft.take(defaults, "virtualCluster", ("namespace",), ("defaults",))
        deployment = self._deployment(defaults.get("deployment"))
        for name, role in draft.mapping(source.get("taskRoles"), ("taskRoles",)).items():
            self._role(name, draft.mapping(role, ("taskRoles", name)), deployment)
        if not draft.document["taskRoles"] and not draft.problems:
            draft.problem(("taskRoles",), _("must have at least one role."))
        self._extras()
        self._secrets()
        return draft

    # Prerequisites, templates, secrets

    def _prerequisites(self) -> None:
        for index, entry in enumerate(
            self.draft.items(self.source.get("prerequisites"), ("prerequisites",))
        ):
            at: Loc = ("prerequisites", index)
            item = self.draft.mapping(entry, at)
            if not item:
                continue
            self.draft.unknown_keys(item, _PREREQUISITE, at)
            kind, name = str(item.get("type")), str(item.get("name"))
            if kind not in ("dockerimage", "script", "output", "data"):
                message = _("must be dockerimage, script, output or data.")
                self.draft.problem((*at, "type"), message, value=kind)
            if (kind, name) in self.prerequisites:
                self.draft.problem(
                    (*at, "name"), _("is the second %(kind)s of this name.", kind=kind), value=name
                )
            self.prerequisites[kind, name] = item
            if item.get("auth") is not None:
                self._auth(item, (*at, "auth"))

    def _auth(self, item: Mapping[str, Any], at: Loc) -> None:
        given = self.draft.mapping(item["auth"], at)
        login = {}
        for key in ("username", "password", "registryuri"):
            text = text_of(given.get(key))
            if text is not None:
                login[key] = render(text, {}, self._secret_value)
        if login and isinstance(item.get("uri"), str):
            self.draft.image_auth[item["uri"]] = login
            self.draft.warn(
                at, _("the login is used to fetch the image, and forgotten when the job ends.")
            )

    def _secret_value(self, path: str) -> str | None:
        return text_of(find(self.source.get("secrets"), path))

    def _secret_reference(self, path: str) -> str | None:
        value = self._secret_value(path)
        if value is None:
            return None
        variable = secret_variable(path)
        self.draft.secrets[variable] = value
        if variable not in self.warned_secrets:
            self.warned_secrets.add(variable)
            self.draft.warn(
                ("secrets", *path.strip(".").split(".")),
                _(
                    "tasks read it from the environment variable %(variable)s; between single quotes the "
                    "shell would not fill it in.",
                    variable=variable,
                ),
            )
        return f"${{{variable}}}"

    def _secrets(self) -> None:
        if self.draft.secrets:
            self.draft.document["secrets"] = sorted(self.draft.secrets)

    def _commands(self, value: Any, at: Loc, role: Mapping[str, Any]) -> list[str]:
        """Each command filled in and trimmed, as the original does."""
        context: dict[str, Any] = {"parameters": self.source.get("parameters") or {}}
        for kind in ("script", "output", "data"):
            found = self.prerequisites.get((kind, str(role.get(kind))))
            if found is not None:
                context[kind] = found
        commands = []
        for index, command in enumerate(self.draft.items(value, at)):
            text = text_of(command)
            if text is None:
                hint = _('In YAML, text with ": " in it needs quotes.') if command else ""
                message = together(_("must be text, not %(kind)s.", kind=kind_of(command)), hint)
                self.draft.problem((*at, index), message, value=command)
                continue
            commands.append(render(text, context, self._secret_reference).strip())
        return commands

    # Roles

    def _deployment(self, name: Any) -> Mapping[str, Any]:
        """Pre- and post-commands by role of the chosen deployment."""
        draft = self.draft
        chosen: Mapping[str, Any] = {}
        names = []
        for index, entry in enumerate(
            draft.items(self.source.get("deployments"), ("deployments",))
        ):
            item = draft.mapping(entry, ("deployments", index))
            names.append(str(item.get("name")))
            if item.get("name") == name:
                chosen = draft.mapping(item.get("taskRoles"), ("deployments", index, "taskRoles"))
        if name is not None and str(name) not in names:
            draft.problem(
                ("defaults", "deployment"), _("names no deployment of this file."), value=name
            )
        elif name is None and names:
            draft.warn(
                ("deployments",), _("no deployment is chosen by defaults.deployment; none is used.")
            )
        return chosen

    def _role(self, name: str, role: Mapping[str, Any], deployment: Mapping[str, Any]) -> None:
        draft = self.draft
        at: Loc = ("taskRoles", name)
        index = len(draft.document["taskRoles"])
        here: Loc = ("taskRoles", index)
        self.role_index[name] = index
        draft.document["taskRoles"].append({"name": name, "strictShell": True})
        draft.sources[here] = at
        draft.unknown_keys(role, _ROLE, at)
        draft.take(role, "instances", (*here, "taskNumber"), at)
        self._image(role, here, at)
        self._resources(role, here, at)
        self._completion(role, here, at)
        for kind in ("script", "output", "data"):
            wanted = role.get(kind)
            if wanted is not None and (kind, str(wanted)) not in self.prerequisites:
                draft.problem(
                    (*at, kind),
                    _("names no prerequisite of type %(kind)s.", kind=kind),
                    value=wanted,
                )
        if role.get("taskRetryCount"):
            draft.warn(
                (*at, "taskRetryCount"),
                _("single tasks are not retried here; jobRetryCount retries the whole job."),
            )
        around = draft.mapping(deployment.get(name), ("deployments",))
        commands = [
            *self._commands(around.get("preCommands"), ("deployments",), role),
            *self._commands(role.get("commands"), (*at, "commands"), role),
            *self._commands(around.get("postCommands"), ("deployments",), role),
        ]
        draft.put((*here, "command"), "\n".join(commands), (*at, "commands"))

    def _image(self, role: Mapping[str, Any], here: Loc, at: Loc) -> None:
        wanted = role.get("dockerImage")
        found = self.prerequisites.get(("dockerimage", str(wanted)))
        if found is None:
            known = ", ".join(name for kind, name in self.prerequisites if kind == "dockerimage")
            message = _(
                "must name a prerequisite of type dockerimage; there is %(known)s.",
                known=known or _("none"),
            )
            self.draft.problem((*at, "dockerImage"), message, value=wanted)
            return
        uri = found.get("uri")
        if not self.draft.document["image"]:
            self.draft.put(("image",), uri, (*at, "dockerImage"))
        elif uri != self.draft.document["image"]:
            self.draft.put((*here, "image"), uri, (*at, "dockerImage"))

    def _resources(self, role: Mapping[str, Any], here: Loc, at: Loc) -> None:
        draft = self.draft
        at_resources: Loc = (*at, "resourcePerInstance")
        given = draft.mapping(role.get("resourcePerInstance"), at_resources)
        draft.unknown_keys(given, ("cpu", "memoryMB", "gpu", "ports"), at_resources)
        for key, field in (("cpu", "cpuNumber"), ("memoryMB", "memoryMB"), ("gpu", "gpuNumber")):
            if given.get(key) is not None:
                source: Loc = (*at_resources, key)
                number = draft.whole_up(given[key], source, _("CPUs, MBs and GPUs"))
                low = {"cpu": 1, "memoryMB": 100, "gpu": 0}[key]
                draft.put((*here, field), draft.at_least(number, low, source), source)
        ports = draft.mapping(given.get("ports"), (*at_resources, "ports"))
        listed = [{"label": label, "portNumber": n} for label, n in ports.items() if n != 0]
        draft.put((*here, "portList"), listed, (*at_resources, "ports"))
        options = draft.mapping(role.get("extraContainerOptions"), (*at, "extraContainerOptions"))
        shm = options.get("shmMB") or 0
        memory = draft.document["taskRoles"][here[1]].get("memoryMB", 100)
        if isinstance(shm, int) and isinstance(memory, int) and shm > memory >= 100:
            draft.warn(
                (*at, "extraContainerOptions", "shmMB"),
                _("%(shm)s is lowered to memoryMB, %(memory)s.", shm=shm, memory=memory),
            )
            shm = memory
        draft.put((*here, "shmMB"), shm, (*at, "extraContainerOptions", "shmMB"))
        if options.get("infiniband"):
            draft.warn(
                (*at, "extraContainerOptions", "infiniband"),
                _("has no meaning here: tasks see whatever network their node has."),
            )

    def _completion(self, role: Mapping[str, Any], here: Loc, at: Loc) -> None:
        draft = self.draft
        given = draft.mapping(role.get("completion"), (*at, "completion"))
        draft.unknown_keys(
            given, ("minFailedInstances", "minSucceededInstances"), (*at, "completion")
        )
        tasks = role.get("instances") or 1
        for key, field, default in (
            ("minFailedInstances", "minFailedTaskCount", 1),
            ("minSucceededInstances", "minSucceededTaskCount", tasks),
        ):
            source: Loc = (*at, "completion", key)
            value = given.get(key) or default
            if isinstance(value, int) and isinstance(tasks, int) and value > tasks:
                draft.warn(
                    source,
                    _(
                        "%(value)s can never be reached with %(tasks)s instances; it is off.",
                        value=value,
                        tasks=tasks,
                    ),
                )
                value = -1
            off = isinstance(value, int) and value < 0
            draft.put((*here, field), None if off else value, source)

    # Extras

    def _extras(self) -> None:
        draft = self.draft
        extras = dict(draft.mapping(self.source.get("extras"), ("extras",)))
        for index, entry in enumerate(draft.items(extras.pop(PLUGINS, None), ("extras", PLUGINS))):
            self._plugin(
                draft.mapping(entry, ("extras", PLUGINS, index)), ("extras", PLUGINS, index)
            )
        for index, entry in enumerate(
            draft.items(extras.pop("storages", None), ("extras", "storages"))
        ):
            storage = draft.mapping(entry, ("extras", "storages", index))
            self._storage(
                storage.get("name"), storage.get("mountPath"), ("extras", "storages", index)
            )
        hived = draft.mapping(extras.pop("hivedScheduler", None), ("extras", "hivedScheduler"))
        for name, sku in draft.mapping(
            hived.get("taskRoles"), ("extras", "hivedScheduler", "taskRoles")
        ).items():
            for key in ("skuType", "gpuType"):
                if isinstance(sku, Mapping) and sku.get(key):
                    at: Loc = ("extras", "hivedScheduler", "taskRoles", name, key)
                    draft.warn(at, _("is unknown here; choose a gpuType for the role instead."))
        if extras.pop("gangAllocation", None) in (False, "false"):
            draft.warn(("extras", "gangAllocation"), _("all tasks of a job start together here."))
        self._notifications(extras.pop("jobStatusChangeNotification", None))
        if extras:
            draft.put(("extras",), extras, ("extras",))

    def _notifications(self, given: Any) -> None:
        at: Loc = ("extras", "jobStatusChangeNotification")
        wanted = self.draft.mapping(given, at)
        events = {"succeeded": "COMPLETED", "failed": "FAILED"}
        alerts = [{"event_checker": state} for key, state in events.items() if wanted.get(key)]
        if alerts:
            self.draft.put(("alerts",), {"event": alerts}, at)
        for key in wanted:
            if wanted[key] and key not in events:
                self.draft.warn((*at, key), _("there is no alert for this change here."))

    def _plugin(self, plugin: Mapping[str, Any], at: Loc) -> None:
        roles = self._plugin_roles(plugin, at)
        given = self.draft.mapping(plugin.get("parameters"), (*at, "parameters"))
        name = plugin.get("plugin")
        if name == "ssh":
            self._ssh(given, roles, at)
        elif name == "tensorboard":
            self._tensorboard(given, roles, at)
        elif name == "cmd":
            self._cmd(given, roles, at)
        elif name == "git":
            self._git(given, roles, at)
        elif name == "teamwise_storage":
            for storage in self.draft.items(
                given.get("storageConfigNames"), (*at, "parameters", "storageConfigNames")
            ):
                self._storage(storage, None, (*at, "parameters", "storageConfigNames"))
        else:
            self.draft.warn(at, _("the plugin %(name)s is unknown here and ignored.", name=name))
        if plugin.get("failurePolicy") not in (None, "fail"):
            self.draft.warn(
                (*at, "failurePolicy"), _("a failing plugin command always fails the task here.")
            )

    def _plugin_roles(self, plugin: Mapping[str, Any], at: Loc) -> list[str]:
        wanted = plugin.get("taskroles")
        if wanted is None:
            return list(self.role_index)
        roles = []
        for index, name in enumerate(self.draft.items(wanted, (*at, "taskroles"))):
            if isinstance(name, str) and name in self.role_index:
                roles.append(name)
            else:
                self.draft.problem((*at, "taskroles", index), _("names no role."), value=name)
        return roles

    def _serve(self, service: dict[str, Any], at: Loc) -> None:
        services = self.draft.document.setdefault("services", [])
        if service not in services:
            services.append(service)
            self.draft.sources["services", len(services) - 1] = at

    def _ssh(self, given: Mapping[str, Any], roles: list[str], at: Loc) -> None:
        for role in roles:
            self._serve({"kind": "ssh", "role": role, "portLabel": "ssh"}, at)
        if given.get("userssh"):
            self.draft.warn(
                (*at, "parameters", "userssh"),
                _("your own account's keys are used here, not this one."),
            )
        if given.get("sshbarrier"):
            self.draft.warn(
                (*at, "parameters", "sshbarrier"), _("has no meaning here and is ignored.")
            )

    def _tensorboard(self, given: Mapping[str, Any], roles: list[str], at: Loc) -> None:
        folders = given.get("logdir")
        first = next(iter(folders.values()), "") if isinstance(folders, Mapping) else folders or ""
        self._serve({"kind": "tensorboard", "role": (roles or [""])[0], "path": first}, at)

    def _cmd(self, given: Mapping[str, Any], roles: list[str], at: Loc) -> None:
        here: Loc = (*at, "parameters")
        known = {"taskStarts": "preCommands", "taskSucceeds": "postCommands"}
        lists: list[tuple[str, Any, Loc]] = [
            (key, given.get(key), (*here, key)) for key in ("preCommands", "postCommands")
        ]
        for index, entry in enumerate(
            self.draft.items(given.get("callbacks"), (*here, "callbacks"))
        ):
            callback = self.draft.mapping(entry, (*here, "callbacks", index))
            event = str(callback.get("event"))
            if event in known:
                where: Loc = (*here, "callbacks", index, "commands")
                lists.append((known[event], callback.get("commands"), where))
            else:
                message = _("the event %(event)s does not exist here; ignored.", event=event)
                self.draft.warn((*here, "callbacks", index), message)
        for field, commands, where in lists:
            for role in roles:
                self._around(role, field, commands, where)

    def _around(self, role: str, field: str, commands: Any, where: Loc) -> None:
        source = self.draft.mapping(self.source["taskRoles"].get(role), ("taskRoles", role))
        script = "\n".join(self._commands(commands, where, source))
        if script:
            index = self.role_index[role]
            listed = self.draft.document["taskRoles"][index].setdefault(field, [])
            listed.append(script)
            self.draft.sources["taskRoles", index, field] = where

    def _git(self, given: Mapping[str, Any], roles: list[str], at: Loc) -> None:
        repository = text_of(given.get("repo"))
        if not repository:
            self.draft.warn(at, _("names no repository and is ignored."))
            return
        options = [
            text_of(option) or ""
            for option in self.draft.items(given.get("options"), (*at, "parameters", "options"))
        ]
        folder = [text_of(given["clone_dir"]) or ""] if given.get("clone_dir") else []
        command = shlex.join(["git", "clone", *options, "--", repository, *folder])
        self.draft.warn(
            at, _("becomes a command before the role's own: %(command)s", command=command)
        )
        for role in roles:
            self._around(role, "preCommands", [command], (*at, "parameters"))

    def _storage(self, name: Any, target: Any, at: Loc) -> None:
        target = target or f"/mnt/{name}"
        folder = self.site.storages.get(str(name))
        if folder is None:
            self.draft.warn(
                at,
                _(
                    'there is no storage "%(name)s" here; add a mount with the directory on this cluster '
                    "and target %(target)s.",
                    name=name,
                    target=target,
                ),
            )
            return
        mounts = self.draft.document.setdefault("mounts", [])
        mounts.append({"name": str(name), "source": folder, "target": target})
        self.draft.sources["mounts", len(mounts) - 1] = at
