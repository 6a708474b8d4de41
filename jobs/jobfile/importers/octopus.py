"""Imports Octopus training jobs (a list `config` of sub-tasks). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from core.cancellation import checked
from core.messages import msg
from jobs.jobfile.errors import Loc
from jobs.jobfile.fields import ROLE_NAME_PATTERN
from jobs.jobfile.importers.draft import NOT_SUPPORTED, Draft, SiteCatalog
from jobs.jobfile.importers.placeholders import format_scalar

_TOP_FIELDS = [
    "name",
    "desc",
    "description",
    "image",
    "imageUrl",
    "isDistributed",
    "config",
    "namespace",
    "workspace",
]
_IGNORED_FIELDS = {
    "algorithmId": msg(
        "import.octopus.algorithms-directories-set-codedir",
        "is ignored: set codeDir to the algorithm's directory; it is mounted at /code.",
    ),
    "algorithmVersion": msg(
        "import.octopus.algorithms-directories-set-codedir",
        "is ignored: set codeDir to the algorithm's directory; it is mounted at /code.",
    ),
    "datasetId": msg(
        "import.octopus.data-sets-directories-set",
        "is ignored: set dataDir to the data set's directory; it is mounted at /dataset.",
    ),
    "datasetVersion": msg(
        "import.octopus.data-sets-directories-set",
        "is ignored: set dataDir to the data set's directory; it is mounted at /dataset.",
    ),
    "imageId": msg(
        "import.octopus.images-named-not-numbered",
        "is ignored: set image to the image's name.",
    ),
    "workspaceId": msg(
        "import.octopus.workspaces-namespaces-set-namespace",
        "is ignored: set namespace instead.",
    ),
}
_ROLE_FIELDS = [
    "name",
    "command",
    "parameters",
    "resourceSpecId",
    "taskNumber",
    "minFailedTaskCount",
    "minSucceededTaskCount",
    "isMainRole",
    "envs",
    "image",
]
_DIRECTORIES = ("codeDir", "dataDir", "modelDir", "outputDir")


def import_octopus(source: Mapping[str, Any], site: SiteCatalog) -> Draft:
    return _OctopusImporter(source, site).run()


class _OctopusImporter:
    def __init__(self, source: Mapping[str, Any], site: SiteCatalog) -> None:
        self.source = source
        self.site = site
        self.draft = Draft()

    def run(self) -> Draft:
        draft, source = self.draft, self.source
        draft.document = {"taskRoles": [], "importedFrom": "octopus"}
        draft.sources[("taskRoles",)] = ("config",)
        draft.sources[("jobName",)] = ("name",)
        for key, field in (
            ("name", "jobName"),
            ("desc", "description"),
            ("description", "description"),
            ("imageUrl", "image"),
            ("image", "image"),
            ("workspace", "namespace"),
            ("namespace", "namespace"),
            *((key, key) for key in _DIRECTORIES),
        ):
            draft.copy_field(source, key, (field,))
        for index, entry in enumerate(checked(draft.as_list(source.get("config"), ("config",)))):
            self._import_role(index, draft.as_mapping(entry, ("config", index)))
        if draft.document.get("image") is None:
            draft.document["image"] = ""
            draft.add_warning(
                (),
                msg(
                    "import.octopus.names-no-image-namespace",
                    "has no image; the namespace's default image is used.",
                ),
            )
        for key in source:
            if key not in _TOP_FIELDS and key not in _DIRECTORIES:
                draft.add_warning(
                    (key,),
                    _IGNORED_FIELDS.get(
                        key,
                        NOT_SUPPORTED,
                    ),
                )
        return draft

    def _import_role(self, index: int, role: Mapping[str, Any]) -> None:
        draft = self.draft
        target_loc: Loc = ("taskRoles", index)
        source_loc: Loc = ("config", index)
        draft.document["taskRoles"].append({})
        draft.sources[target_loc] = source_loc
        self._set_role_name(index, role.get("name"), target_loc, (*source_loc, "name"))
        for key, field in (
            ("command", "command"),
            ("taskNumber", "taskNumber"),
            ("isMainRole", "isMain"),
            ("image", "image"),
        ):
            draft.copy_field(role, key, (*target_loc, field), source_loc)
        for key in ("minFailedTaskCount", "minSucceededTaskCount"):
            if role.get(key):  # 0 means "not set" in Octopus
                draft.set_value((*target_loc, key), role[key], (*source_loc, key))
        self._apply_size(role.get("resourceSpecId"), target_loc, (*source_loc, "resourceSpecId"))
        parameters = [
            entry
            for entry in draft.as_list(role.get("parameters"), (*source_loc, "parameters"))
            if not (isinstance(entry, Mapping) and not entry.get("key") and not entry.get("value"))
        ]
        draft.set_value((*target_loc, "parameters"), parameters, (*source_loc, "parameters"))
        draft.set_value(
            (*target_loc, "env"),
            self._convert_env(role.get("envs"), (*source_loc, "envs")),
            (*source_loc, "envs"),
        )
        for key in role:
            if key not in _ROLE_FIELDS:
                draft.add_warning(
                    (*source_loc, key),
                    NOT_SUPPORTED,
                )

    def _set_role_name(self, index: int, name: Any, target_loc: Loc, source_loc: Loc) -> None:
        """Set the name of a role. Another name than an identifier, such as a Chinese one, becomes its title."""
        given = format_scalar(name)
        if given and not re.match(ROLE_NAME_PATTERN, given):
            self.draft.set_value((*target_loc, "title"), given, source_loc)
            given = ""
        self.draft.set_value((*target_loc, "name"), given or f"task{index}", source_loc)

    def _apply_size(self, requested: Any, target_loc: Loc, source_loc: Loc) -> None:
        size = format_scalar(requested)
        if not size:
            return
        fields = self.site.sizes.get(size)
        if fields is None:
            self.draft.add_warning(
                source_loc,
                msg(
                    "import.octopus.no-size-task-gets",
                    'the size "%(size)s" does not exist: the task gets 1 CPU and 100 MB unless you set them.',
                    size=size,
                ),
            )
            return
        for field, value in fields.items():
            self.draft.set_value((*target_loc, field), value, source_loc)

    def _convert_env(self, given: Any, source_loc: Loc) -> Any:
        if not isinstance(given, list):
            return given or {}
        pairs = (
            self.draft.as_mapping(entry, (*source_loc, index)) for index, entry in enumerate(given)
        )
        return {str(pair.get("key", pair.get("name"))): pair.get("value") for pair in pairs}
