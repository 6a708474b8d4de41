"""Imports manifests of FfDL and Prophecis DI. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from core.messages import msg
from jobs.jobfile.errors import Loc
from jobs.jobfile.fields import JOB_NAME_PATTERN, parse_memory_mib
from jobs.jobfile.importers.draft import NOT_SUPPORTED, Draft, SiteCatalog
from jobs.jobfile.importers.placeholders import format_scalar

# Ignored fields that have a warning of their own. Every other field outside _KNOWN_FIELDS gets a general warning.
_IGNORED_FIELDS = {
    "code_path": msg(
        "import.ffdl.code-uploaded-job-ignored", "is ignored: the code is uploaded with the job."
    ),
    "exp_id": msg(
        "import.ffdl.experiments-not-kept-ignored", "is ignored: Sluice does not store experiments."
    ),
    "exp_name": msg(
        "import.ffdl.experiments-not-kept-ignored", "is ignored: Sluice does not store experiments."
    ),
    "proxy_user": msg("import.ffdl.jobs-run-your-own", "is ignored: jobs run as your own account."),
}
_KNOWN_FIELDS = [
    "name",
    "description",
    "version",
    "cpus",
    "gpus",
    "gpu_type",
    "learners",
    "memory",
    "data_stores",
    "framework",
    "evaluation_metrics",
    "namespace",
    "code_selector",
    "job_type",
    "pss",
    "ps_cpu",
    "ps_memory",
    "ps_image",
    "job_alert",
]

_OPTION_LINE = re.compile(r"[ \t]+(?=--?[A-Za-z])")


def _join_option_lines(text: str) -> str:
    """Replace the line break before an indented option by a space, unless a backslash precedes it.

    A single regular expression for this would take time in proportion to the square of the number of spaces.
    """
    first, *others = text.split("\n")
    parts = [first]
    for line in others:
        before, option = parts[-1], _OPTION_LINE.match(line)
        if option and not before.endswith("\\"):
            stripped = before.rstrip(" \t")
            # A space after a backslash is part of a word of the shell.
            parts[-1] = before[: len(stripped) + 1] if stripped.endswith("\\") else stripped
            parts += [" ", line[option.end() :]]
        else:
            parts += ["\n", line]
    return "".join(parts)


def import_ffdl(source: Mapping[str, Any], site: SiteCatalog) -> Draft:
    return _ManifestImporter(source, site).run()


class _ManifestImporter:
    def __init__(self, source: Mapping[str, Any], site: SiteCatalog) -> None:
        self.source = source
        self.site = site
        self.draft = Draft()

    def run(self) -> Draft:
        draft, source = self.draft, self.source
        draft.document = {"taskRoles": [], "image": "", "importedFrom": "ffdl"}
        self._import_name()
        draft.copy_field(source, "description", ("description",))
        draft.copy_field(source, "namespace", ("namespace",))
        draft.copy_field(source, "gpu_type", ("gpuType",))
        if (version := format_scalar(source.get("version"))) is not None:
            draft.document["labels"] = {"version": version}
        framework = draft.as_mapping(source.get("framework"), ("framework",))
        self._import_image(framework)
        self._import_roles(framework)
        self._import_data_stores()
        self._import_code()
        self._import_metrics()
        draft.copy_field(source, "job_alert", ("alerts",))
        self._warn_ignored_fields(framework)
        return draft

    def _import_name(self) -> None:
        name = format_scalar(self.source.get("name"))
        if name is not None:
            forbidden_character = JOB_NAME_PATTERN.replace("^[", "[^").removesuffix("+$")
            valid_name = re.sub(forbidden_character, "-", name.strip())
            if valid_name != name:
                self.draft.add_warning(
                    ("name",),
                    msg(
                        "import.ffdl.job-names-hold-no",
                        'contains characters that job names may not have; it becomes "%(name)s".',
                        name=valid_name,
                    ),
                )
            self.draft.set_value(("jobName",), valid_name, ("name",))
        self.draft.sources[("jobName",)] = ("name",)

    def _import_image(self, framework: Mapping[str, Any]) -> None:
        name, version = (format_scalar(framework.get(key)) for key in ("name", "version"))
        if not name:
            self.draft.add_problem(
                ("framework", "name"),
                msg("import.ffdl.required-names-image", "is required: it names the image."),
                code="missing",
            )
            return
        image = f"{name}:{version}" if version else name
        if name == "custom" and version:  # FfDL's name for a custom image
            image = version
        self.draft.set_value(("image",), image, ("framework", "version" if version else "name"))

    # Roles

    def _read_count(self, key: str, default: int) -> Any:
        value = self.source.get(key)
        return (
            default
            if value is None
            else self.draft.round_up(value, (key,), msg("import.ffdl.cpus-gpus", "CPUs and GPUs"))
        )

    def _read_memory_mib(self, key: str) -> int | None:
        value = self.source.get(key)
        if value is None:
            return None
        amount = parse_memory_mib(value)
        if amount is None:
            message = msg(
                "import.ffdl.must-amount-memory-such",
                "must be an amount of memory such as 1Gb, 512MB or 2GiB.",
            )
            self.draft.add_problem((key,), message, code="memory", value=value)
        else:
            amount = self.draft.raise_to_minimum(amount, 100, (key,))
        return amount

    def _import_roles(self, framework: Mapping[str, Any]) -> None:
        draft = self.draft
        learners = self._read_count("learners", 1)
        pss = self._read_count("pss", 0)
        is_distributed = self.source.get("job_type") == "dist-tf" or pss or learners not in (0, 1)
        command = framework.get("command")
        worker: dict[str, Any] = {
            "name": "worker",
            "taskNumber": 1 if learners == 0 else learners,
            "cpuNumber": self._read_count("cpus", 1),
            "gpuNumber": self._read_count("gpus", 0),
            "memoryMB": self._read_memory_mib("memory") or 512,
            "command": self._join_option_lines(command) if isinstance(command, str) else command,
        }
        sources = {
            "taskNumber": ("learners",),
            "cpuNumber": ("cpus",),
            "gpuNumber": ("gpus",),
            "memoryMB": ("memory",),
            "command": ("framework", "command"),
        }
        if pss:
            worker["minSucceededTaskCount"] = worker["taskNumber"]
            self._add_parameter_servers(pss, worker)
        index = len(draft.document["taskRoles"])
        draft.document["taskRoles"].append(worker)
        for key, source in sources.items():
            draft.sources["taskRoles", index, key] = source
        if is_distributed:
            self._detect_framework(framework, pss)

    def _join_option_lines(self, text: str) -> str:
        """Join lines that begin with an option to the line before, with a warning.

        Manifests break long commands before options, and YAML's `>` keeps the line break before an indented line.
        """
        joined_lines = _join_option_lines(text.strip())
        if joined_lines != text.strip():
            message = msg(
                "import.ffdl.lines-begin-option-joined",
                "lines that begin with an option are joined to the line before.",
            )
            self.draft.add_warning(("framework", "command"), message)
        return joined_lines

    def _add_parameter_servers(self, pss: Any, worker: Mapping[str, Any]) -> None:
        draft = self.draft
        role: dict[str, Any] = {
            "name": "ps",
            "taskNumber": pss,
            "cpuNumber": self._read_count("ps_cpu", 1),
            "gpuNumber": 0,
            "memoryMB": self._read_memory_mib("ps_memory") or worker["memoryMB"],
            "command": worker["command"],
        }
        if image := self.source.get("ps_image"):
            role["image"] = image
        draft.document["taskRoles"].append(role)
        for key, name in (
            ("taskNumber", "pss"),
            ("cpuNumber", "ps_cpu"),
            ("memoryMB", "ps_memory"),
            ("image", "ps_image"),
        ):
            draft.sources["taskRoles", 0, key] = (name,)
        draft.sources["taskRoles", 0, "command"] = ("framework", "command")

    def _detect_framework(self, framework: Mapping[str, Any], pss: Any) -> None:
        image_name = f"{framework.get('name')}:{framework.get('version')}".lower()
        if self.source.get("job_type") == "dist-tf" or pss:
            found = {"name": "tensorflow", "strategy": "ps" if pss else "multiworker"}
        elif "horovod" in image_name:
            found = {"name": "horovod"}
        elif "torch" in image_name:
            found = {"name": "pytorch"}
        elif "tensorflow" in image_name:
            found = {"name": "tensorflow", "strategy": "multiworker"}
        else:
            return
        self.draft.set_value(("framework",), found, ("framework",))

    # Directories

    def _import_data_stores(self) -> None:
        draft = self.draft
        fields = {
            "training_data": "dataDir",
            "training_results": "outputDir",
            "training_workspace": "codeDir",
        }
        first_store_used = False
        for index, entry in enumerate(
            draft.as_list(self.source.get("data_stores"), ("data_stores",))
        ):
            source_loc: Loc = ("data_stores", index)
            store = draft.as_mapping(entry, source_loc)
            connection = draft.as_mapping(store.get("connection"), (*source_loc, "connection"))
            root = connection.get("path")
            if connection.get("type") != "host_mount" or not isinstance(root, str):
                self._warn_object_store(store, source_loc)
                continue
            if first_store_used:
                draft.add_warning(
                    source_loc,
                    msg(
                        "import.ffdl.only-first-store-gives",
                        "only the first store sets dataDir and outputDir; this one becomes a mount.",
                    ),
                )
            for part, field in fields.items() if not first_store_used else ():
                if part == "training_workspace" and self.source.get("code_selector") == "codeFile":
                    continue
                folder = draft.as_mapping(store.get(part), (*source_loc, part)).get("container")
                if isinstance(folder, str):
                    directory = f"{root.rstrip('/')}/{folder.strip('/')}"
                    draft.set_value((field,), directory, (*source_loc, part, "container"))
            self._add_mount(connection, root, (*source_loc, "connection", "path"))
            first_store_used = True

    def _add_mount(self, connection: Mapping[str, Any], root: str, source_loc: Loc) -> None:
        mounts = self.draft.document.setdefault("mounts", [])
        mounts.append({"name": connection.get("name") or "", "source": root, "target": root})
        self.draft.sources["mounts", len(mounts) - 1] = source_loc[:-1]
        for key in ("source", "target"):
            self.draft.sources["mounts", len(mounts) - 1, key] = source_loc

    def _warn_object_store(self, store: Mapping[str, Any], source_loc: Loc) -> None:
        names = [
            str(part["container"])
            for key in ("training_data", "training_results")
            if isinstance(part := store.get(key), Mapping) and part.get("container")
        ]
        self.draft.add_warning(
            source_loc,
            msg(
                "import.ffdl.object-stores-not-fetched",
                "object stores (%(names)s) are not supported and their keys are not stored: put the data on the cluster and set dataDir and outputDir.",
                names=", ".join(names) or store.get("type"),
            ),
        )

    def _import_code(self) -> None:
        selector = self.source.get("code_selector")
        if selector is None or selector == "codeFile":
            self.draft.set_value(("code",), {"selector": "codeFile"}, ("code_selector",))
        elif selector == "storagePath":
            self.draft.set_value(("code",), {"selector": "storagePath"}, ("code_selector",))
            if not self.draft.document.get("codeDir"):
                message = msg(
                    "import.ffdl.wants-training-workspace-container",
                    "requires training_workspace.container in a data store with a host_mount.",
                )
                self.draft.add_problem(("code_selector",), message, value=selector)
        else:
            message = msg(
                "import.ffdl.must-codefile-storagepath", "must be codeFile or storagePath."
            )
            self.draft.add_problem(("code_selector",), message, value=selector)

    def _import_metrics(self) -> None:
        source_loc: Loc = ("evaluation_metrics",)
        section = self.draft.as_mapping(self.source.get("evaluation_metrics"), source_loc)
        if not section:
            return
        metrics = {
            key: section[key] for key in ("type", "in", "groups") if section.get(key) is not None
        }
        self.draft.set_value(("metrics",), metrics, source_loc)
        for key in section:
            if key not in ("type", "in", "groups"):
                self.draft.add_warning(
                    (*source_loc, key),
                    NOT_SUPPORTED,
                )

    def _warn_ignored_fields(self, framework: Mapping[str, Any]) -> None:
        for key in self.source:
            if key not in _KNOWN_FIELDS:
                reason = _IGNORED_FIELDS.get(
                    key,
                    NOT_SUPPORTED,
                )
                self.draft.add_warning((key,), reason)
        for key in framework:
            if key not in ("name", "version", "command"):
                self.draft.add_warning(
                    ("framework", key),
                    NOT_SUPPORTED,
                )
        job_type = self.source.get("job_type")
        if job_type not in (None, "", "single", "local", "dist-tf"):
            self.draft.add_warning(
                ("job_type",),
                msg(
                    "import.ffdl.kind-job-unknown-ignored",
                    "is ignored: this kind of job is not supported.",
                ),
            )
