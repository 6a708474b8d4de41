"""Imports the `extras` of OpenPAI v2 files: runtime plugins, storages and notifications. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from core.cancellation import checked
from core.messages import msg
from jobs.jobfile.errors import Loc
from jobs.jobfile.importers.draft import Draft, SiteCatalog
from jobs.jobfile.importers.placeholders import format_scalar

_PLUGINS_KEY = "com.microsoft.pai.runtimeplugin"

RenderCommands = Callable[[Any, Loc, Mapping[str, Any]], list[str]]


def _freeze(service: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal services, whatever the types of their values."""
    return json.dumps(service, sort_keys=True, default=str)


class ExtrasImporter:
    """Adds the `extras` of a file to a draft whose roles are complete.

    `render_commands` replaces placeholders in commands.
    """

    def __init__(
        self,
        source: Mapping[str, Any],
        site: SiteCatalog,
        draft: Draft,
        role_index: Mapping[str, int],
        render_commands: RenderCommands,
    ) -> None:
        self.source = source
        self.site = site
        self.draft = draft
        self.role_index = role_index
        self.render_commands = render_commands
        self.ssh_roles: set[str] = set()
        self.added_services: set[str] = set()

    def run(self) -> None:
        draft = self.draft
        extras = dict(draft.as_mapping(self.source.get("extras"), ("extras",)))
        for index, entry in enumerate(
            checked(draft.as_list(extras.pop(_PLUGINS_KEY, None), ("extras", _PLUGINS_KEY)))
        ):
            self._import_plugin(
                draft.as_mapping(entry, ("extras", _PLUGINS_KEY, index)),
                ("extras", _PLUGINS_KEY, index),
            )
        self._warn_about_ssh_roles()
        for index, entry in enumerate(
            draft.as_list(extras.pop("storages", None), ("extras", "storages"))
        ):
            storage = draft.as_mapping(entry, ("extras", "storages", index))
            self._add_storage_mount(
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
        self._import_notifications(extras.pop("jobStatusChangeNotification", None))
        if extras:
            draft.set_value(("extras",), extras, ("extras",))

    def _import_notifications(self, section: Any) -> None:
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

    def _import_plugin(self, plugin: Mapping[str, Any], source_loc: Loc) -> None:
        roles = self._find_plugin_roles(plugin, source_loc)
        section = self.draft.as_mapping(plugin.get("parameters"), (*source_loc, "parameters"))
        name = plugin.get("plugin")
        if name == "ssh":
            self._import_ssh_plugin(section, roles, source_loc)
        elif name == "tensorboard":
            self._import_tensorboard_plugin(section, roles, source_loc)
        elif name == "cmd":
            self._import_cmd_plugin(section, roles, source_loc)
        elif name == "git":
            self._import_git_plugin(section, roles, source_loc)
        elif name == "teamwise_storage":
            for storage in self.draft.as_list(
                section.get("storageConfigNames"), (*source_loc, "parameters", "storageConfigNames")
            ):
                self._add_storage_mount(
                    storage, None, (*source_loc, "parameters", "storageConfigNames")
                )
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

    def _find_plugin_roles(self, plugin: Mapping[str, Any], source_loc: Loc) -> list[str]:
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
        if _freeze(service) in self.added_services:
            return
        self.added_services.add(_freeze(service))
        services.append(service)
        self.draft.sources["services", len(services) - 1] = source_loc

    def _import_ssh_plugin(
        self, section: Mapping[str, Any], roles: list[str], source_loc: Loc
    ) -> None:
        """Import the plugin ssh. The SSH servers of all tasks listen before the first command: sshbarrier always holds."""
        draft = self.draft
        parameters_loc: Loc = (*source_loc, "parameters")
        if section.get("jobssh"):
            draft.set_value(("jobssh",), section["jobssh"], (*parameters_loc, "jobssh"))
            self.ssh_roles.update(roles)
        elif section.get("sshbarrier"):
            draft.add_warning(
                (*parameters_loc, "sshbarrier"),
                msg("import.openpai.only-with-jobssh", "has an effect only with jobssh: true."),
            )
        if section.get("userssh"):
            for role in roles:
                self._add_service({"kind": "ssh", "role": role, "portLabel": "ssh"}, source_loc)
            draft.add_warning(
                (*parameters_loc, "userssh"),
                msg(
                    "import.openpai.your-own-account-keys",
                    "is ignored: tasks cannot be reached with SSH from outside the job yet.",
                ),
            )

    def _warn_about_ssh_roles(self) -> None:
        others = [name for name in self.role_index if name not in self.ssh_roles]
        if self.ssh_roles and others:
            self.draft.add_warning(
                ("extras", _PLUGINS_KEY),
                msg(
                    "import.openpai.jobssh-for-all-roles",
                    "jobssh applies to all roles of a job, also to %(roles)s.",
                    roles=", ".join(others),
                ),
            )

    def _import_tensorboard_plugin(
        self, section: Mapping[str, Any], roles: list[str], source_loc: Loc
    ) -> None:
        folders = section.get("logdir")
        log_directory = (
            next(iter(folders.values()), "") if isinstance(folders, Mapping) else folders or ""
        )
        self._add_service(
            {"kind": "tensorboard", "role": (roles or [""])[0], "path": log_directory}, source_loc
        )

    def _import_cmd_plugin(
        self, section: Mapping[str, Any], roles: list[str], source_loc: Loc
    ) -> None:
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
        script = "\n".join(self.render_commands(commands, commands_loc, source))
        if script:
            index = self.role_index[role]
            entries = self.draft.document["taskRoles"][index].setdefault(field, [])
            entries.append(script)
            self.draft.sources["taskRoles", index, field] = commands_loc

    def _import_git_plugin(
        self, section: Mapping[str, Any], roles: list[str], source_loc: Loc
    ) -> None:
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

    def _add_storage_mount(self, name: Any, target: Any, source_loc: Loc) -> None:
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
