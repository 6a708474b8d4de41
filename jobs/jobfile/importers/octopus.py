"""Octopus training jobs (a list `config` of sub-tasks) into our job file. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from core.messages import _
from jobs.jobfile.errors import Loc
from jobs.jobfile.fields import ROLE_NAME_PATTERN
from jobs.jobfile.importers.draft import Draft, Site
from jobs.jobfile.importers.placeholders import text_of

_TOP = [
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
_DROPPED = {
    "algorithmId": _("algorithms are directories here: set codeDir, it appears at /code."),
    "algorithmVersion": _("algorithms are directories here: set codeDir, it appears at /code."),
    "datasetId": _("data sets are directories here: set dataDir, it appears at /dataset."),
    "datasetVersion": _("data sets are directories here: set dataDir, it appears at /dataset."),
    "imageId": _("images are named here, not numbered: set image."),
    "workspaceId": _("workspaces are namespaces here: set namespace."),
}
_ROLE = [
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


def import_octopus(source: Mapping[str, Any], site: Site) -> Draft:
    return _Octopus(source, site).run()


class _Octopus:
    def __init__(self, source: Mapping[str, Any], site: Site) -> None:
        self.source = source
        self.site = site
        self.draft = Draft("octopus")

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
            draft.take(source, key, (field,))
        for index, entry in enumerate(draft.items(source.get("config"), ("config",))):
            self._role(index, draft.mapping(entry, ("config", index)))
        if draft.document.get("image") is None:
            draft.document["image"] = ""
            draft.warn((), _("names no image; the namespace's default image is taken."))
        for key in source:
            if key not in _TOP and key not in _DIRECTORIES:
                draft.warn((key,), _DROPPED.get(key, _("has no meaning here and is ignored.")))
        return draft

    def _role(self, index: int, role: Mapping[str, Any]) -> None:
        draft = self.draft
        here: Loc = ("taskRoles", index)
        at: Loc = ("config", index)
        draft.document["taskRoles"].append({"name": self._name(index, role.get("name"), at)})
        draft.sources[here] = at
        for key, field in (
            ("command", "command"),
            ("taskNumber", "taskNumber"),
            ("isMainRole", "isMain"),
            ("image", "image"),
        ):
            draft.take(role, key, (*here, field), at)
        for key in ("minFailedTaskCount", "minSucceededTaskCount"):
            if role.get(key):  # 0 stands for "not set" there
                draft.put((*here, key), role[key], (*at, key))
        self._size(role.get("resourceSpecId"), here, (*at, "resourceSpecId"))
        parameters = [
            entry
            for entry in draft.items(role.get("parameters"), (*at, "parameters"))
            if not (isinstance(entry, Mapping) and not entry.get("key") and not entry.get("value"))
        ]
        draft.put((*here, "parameters"), parameters, (*at, "parameters"))
        draft.put((*here, "env"), self._env(role.get("envs"), (*at, "envs")), (*at, "envs"))
        for key in role:
            if key not in _ROLE:
                draft.warn((*at, key), _("has no meaning here and is ignored."))

    def _name(self, index: int, name: Any, at: Loc) -> Any:
        given = text_of(name)
        if not given:
            return f"task{index}"
        if not re.match(ROLE_NAME_PATTERN, given):
            self.draft.warn(
                (*at, "name"),
                _(
                    'role names are letters, digits and - . _ ~; it becomes "%(name)s".',
                    name=f"task{index}",
                ),
            )
            return f"task{index}"
        return given

    def _size(self, wanted: Any, here: Loc, at: Loc) -> None:
        size = text_of(wanted)
        if not size:
            return
        fields = self.site.sizes.get(size)
        if fields is None:
            self.draft.warn(
                at,
                _(
                    'there is no size "%(size)s" here: the task gets 1 CPU and 100 MB unless you set them.',
                    size=size,
                ),
            )
            return
        for field, value in fields.items():
            self.draft.put((*here, field), value, at)

    def _env(self, given: Any, at: Loc) -> Any:
        if not isinstance(given, list):
            return given or {}
        pairs = (self.draft.mapping(entry, (*at, index)) for index, entry in enumerate(given))
        return {str(pair.get("key", pair.get("name"))): pair.get("value") for pair in pairs}
