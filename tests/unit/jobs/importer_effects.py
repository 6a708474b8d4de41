"""What each field of the other dialects does: found by importing a small file with and without the field.

A field changes the imported job, gives a warning, is refused, or is documentation of the file itself. The table in
docs/jobfile.md is rendered from this; a test compares them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jobs.jobfile.errors import SpecError
from jobs.jobfile.importers import (
    LoadResult,
    SiteCatalog,
    ffdl,
    load_document,
    native,
    octopus,
    openpai_v2,
)

SITE = SiteCatalog(storages={"nfs": "/nfs"}, sizes={"small": {"cpuNumber": 2}})
PLUGINS = "com.microsoft.pai.runtimeplugin"

_OPENPAI_V2: Mapping[str, Any] = {
    "protocolVersion": 2,
    "name": "j",
    "type": "job",
    "prerequisites": [
        {"name": "i", "type": "dockerimage", "uri": "image:1"},
        {"name": "d", "type": "data", "uri": ["/d/1"]},
        {"name": "o", "type": "output", "uri": "/o"},
        {"name": "s", "type": "script", "uri": "/s"},
    ],
    "taskRoles": {
        "w": {
            "dockerImage": "i",
            "resourcePerInstance": {"cpu": 1, "memoryMB": 500, "gpu": 0},
            "commands": [
                "run <% $parameters.lr %> <% $data.uri[0] %> <% $output.uri %> <% $script.uri %>"
            ],
        }
    },
}
_FFDL: Mapping[str, Any] = {
    "name": "j",
    "learners": 1,
    "framework": {"name": "tensorflow", "version": "1", "command": "run"},
}
_OCTOPUS: Mapping[str, Any] = {"name": "j", "image": "i", "config": [{"command": "run"}]}
_NATIVE: Mapping[str, Any] = {
    "jobName": "j",
    "image": "i",
    "taskRoles": [{"name": "w", "command": "run"}],
}
_STORE = {
    "connection": {"type": "host_mount", "path": "/store", "name": "x"},
    "training_data": {"container": "d"},
    "training_results": {"container": "r"},
    "training_workspace": {"container": "c"},
}


def _plugin(name: str, **parameters: Any) -> list[dict[str, Any]]:
    return [{"plugin": name, "parameters": parameters}]


# Dialect → (file without the field, field → value). "*" in a path is the first entry.
SAMPLES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "openpai-v2": (
        _OPENPAI_V2,
        {
            "protocolVersion": 3,
            "name": "other",
            "type": "data",
            "version": "1.0",
            "contributor": "alice",
            "description": "text",
            "prerequisites": [{"name": "i", "type": "dockerimage", "uri": "image:2"}],
            "prerequisites.*.protocolVersion": 2,
            "prerequisites.*.name": "k",
            "prerequisites.*.type": "oops",
            "prerequisites.*.version": "1",
            "prerequisites.*.contributor": "alice",
            "prerequisites.*.description": "text",
            "prerequisites.*.auth": {"username": "u", "password": "p", "registryuri": "r"},
            "prerequisites.*.uri": "image:2",
            "parameters": {"lr": 0.1},
            "secrets": {"key": "value"},
            "jobRetryCount": 2,
            "taskRoles": {},
            "taskRoles.w.protocolVersion": 2,
            "taskRoles.w.instances": 2,
            "taskRoles.w.completion": {"minFailedInstances": -1},
            "taskRoles.w.completion.minFailedInstances": -1,
            "taskRoles.w.completion.minSucceededInstances": -1,
            "taskRoles.w.taskRetryCount": 1,
            "taskRoles.w.dockerImage": "none",
            "taskRoles.w.data": "d",
            "taskRoles.w.output": "o",
            "taskRoles.w.script": "s",
            "taskRoles.w.extraContainerOptions": {"shmMB": 128},
            "taskRoles.w.extraContainerOptions.shmMB": 128,
            "taskRoles.w.extraContainerOptions.infiniband": True,
            "taskRoles.w.resourcePerInstance": {"cpu": 2, "memoryMB": 500, "gpu": 0},
            "taskRoles.w.resourcePerInstance.cpu": 2,
            "taskRoles.w.resourcePerInstance.memoryMB": 600,
            "taskRoles.w.resourcePerInstance.gpu": 1,
            "taskRoles.w.resourcePerInstance.ports": {"web": 2},
            "taskRoles.w.commands": ["other"],
            "taskRoles.w.prerequisites": ["d"],
            "deployments": [{"name": "p", "taskRoles": {"w": {"preCommands": ["before"]}}}],
            "defaults": {"virtualCluster": "lab"},
            "defaults.virtualCluster": "lab",
            "defaults.deployment": "none",
            "extras": {"anything": 1},
            "extras.storages": [{"name": "nfs", "mountPath": "/mnt"}],
            "extras.hivedScheduler": {"taskRoles": {"w": {"skuType": "K80"}}},
            "extras.gangAllocation": False,
            "extras.jobStatusChangeNotification": {"failed": True},
            f"extras.{PLUGINS} ssh": _plugin("ssh", jobssh=True),
            f"extras.{PLUGINS} ssh.userssh": _plugin("ssh", userssh={"type": "custom"}),
            f"extras.{PLUGINS} ssh.sshbarrier": _plugin("ssh", sshbarrier=True),
            f"extras.{PLUGINS} cmd": _plugin("cmd", preCommands=["before"]),
            f"extras.{PLUGINS} git": _plugin("git", repo="https://host/repo"),
            f"extras.{PLUGINS} tensorboard": _plugin("tensorboard", logdir={"a": "/logs"}),
            f"extras.{PLUGINS} teamwise_storage": _plugin(
                "teamwise_storage", storageConfigNames=["nfs"]
            ),
            f"extras.{PLUGINS} other": _plugin("other"),
        },
    ),
    "ffdl": (
        _FFDL,
        {
            "name": "other",
            "description": "text",
            "version": "1.0",
            "cpus": 2,
            "gpus": 1,
            "gpu_type": "a100",
            "learners": 2,
            "memory": "1Gb",
            "data_stores": [_STORE],
            "framework": {"name": "pytorch", "version": "1", "command": "run"},
            "framework.name": "pytorch",
            "framework.version": "2",
            "framework.command": "other",
            "framework.image_tag": "t",
            "evaluation_metrics": {"type": "regex", "in": "log"},
            "namespace": "lab",
            "code_selector": "storagePath",
            "job_type": "dist-tf",
            "pss": 1,
            "ps_cpu": 2,
            "ps_memory": "1Gb",
            "ps_image": "other:1",
            "job_alert": {"event": [{"event_checker": "FAILED"}]},
            "code_path": "c.zip",
            "exp_id": 1,
            "exp_name": "e",
            "proxy_user": "u",
        },
    ),
    "octopus": (
        _OCTOPUS,
        {
            "name": "other",
            "desc": "text",
            "description": "text",
            "image": "other",
            "imageUrl": "other",
            "isDistributed": True,
            "config": [{"command": "other"}],
            "namespace": "lab",
            "workspace": "lab",
            "codeDir": "/c",
            "dataDir": "/d",
            "modelDir": "/m",
            "outputDir": "/o",
            "algorithmId": "a",
            "algorithmVersion": "1",
            "datasetId": "d",
            "datasetVersion": "1",
            "imageId": "i",
            "workspaceId": "w",
            "config.*.name": "part",
            "config.*.command": "other",
            "config.*.parameters": [{"key": "lr", "value": "1"}],
            "config.*.resourceSpecId": "small",
            "config.*.taskNumber": 2,
            "config.*.minFailedTaskCount": 2,
            "config.*.minSucceededTaskCount": 1,
            "config.*.isMainRole": True,
            "config.*.envs": {"A": "1"},
            "config.*.image": "other",
        },
    ),
    "openpai-v1": (
        _NATIVE,
        {
            "killAllOnCompletedTaskNumber": 1,
            "gpuTypeList": ["K80"],
            "taskRoles.*.storageGB": 5,
            "taskRoles.*.tmp": "/x",
            "taskRoles.*.dockerImage": {"uri": "other"},
        },
    ),
}
# Fields that describe the file itself: nothing runs differently, and no warning is needed.
DOCUMENTATION_FIELDS = {
    ("openpai-v2", f"prerequisites.*.{name}")
    for name in ("protocolVersion", "version", "contributor", "description")
} | {("openpai-v2", "taskRoles.w.protocolVersion"), ("octopus", "isDistributed")}
# Fields that take effect only together with another one.
COMPANIONS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("ffdl", "ps_cpu"): {"pss": 1},
    ("ffdl", "ps_memory"): {"pss": 1},
    ("ffdl", "ps_image"): {"pss": 1},
    ("ffdl", "code_selector"): {"data_stores": [_STORE]},
    ("octopus", "imageUrl"): {"image": None},
    ("octopus", "config.*.minFailedTaskCount"): {"config.*.taskNumber": 2},
    ("openpai-v2", "secrets"): {"taskRoles.w.commands": ["login <% $secrets.key %>"]},
}


def list_importer_fields() -> Iterator[tuple[str, str]]:
    """List (dialect, field) of every field that an importer names."""
    for prefix, names in (
        ("", openpai_v2._TOP_FIELDS),
        ("prerequisites.*.", openpai_v2._PREREQUISITE_FIELDS),
        ("taskRoles.w.", openpai_v2._ROLE_FIELDS),
    ):
        yield from (("openpai-v2", prefix + name) for name in names)
    yield from (("ffdl", name) for name in (*ffdl._KNOWN_FIELDS, *ffdl._IGNORED_FIELDS))
    top = (*octopus._TOP_FIELDS, *octopus._IGNORED_FIELDS, *octopus._DIRECTORIES)
    yield from (("octopus", name) for name in top)
    yield from (("octopus", f"config.*.{name}") for name in octopus._ROLE_FIELDS)
    yield from (("openpai-v1", name) for name in native._IGNORED_FIELDS)
    yield from (("openpai-v1", f"taskRoles.*.{name}") for name in native._IGNORED_ROLE_FIELDS)


def _set_value(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a path; the part after a space (a plugin's name) is not part of it."""
    if PLUGINS in path:
        key, last = "extras", PLUGINS
    else:
        key, _, last = path.rpartition(".")
    container: Any = document
    for part in key.split(".") if key else ():
        container = container[0] if part == "*" else container.setdefault(part, {})
    container[last] = value


def _load(document: Mapping[str, Any]) -> LoadResult | SpecError:
    try:
        return load_document(document, site=SITE)
    except SpecError as error:
        return error


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Map the path of every value that is no mapping or list to the value."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if not items:
        return {path: value}
    return {k: v for key, item in items for k, v in _flatten(item, key).items()}


def describe_effect(dialect: str, field: str) -> str:
    """Describe what the field does: the changed fields of the job, a warning, or a refusal. Empty: nothing."""
    base, samples = SAMPLES[dialect]
    without, given = copy.deepcopy(dict(base)), copy.deepcopy(dict(base))
    for path, value in COMPANIONS.get((dialect, field), {}).items():
        _set_value(without, path, value)
        _set_value(given, path, value)
    _set_value(given, field, samples[field])
    before, after = _load(without), _load(given)
    if isinstance(before, SpecError):
        raise AssertionError(f"the file without {field} is refused: {before}")
    if isinstance(after, SpecError):
        return "refused if not valid" if field in base else "refused"
    old, new = (_flatten(r.spec.model_dump(mode="json", by_alias=True)) for r in (before, after))
    paths = [path for path in old.keys() | new.keys() if old.get(path) != new.get(path)]
    changed = sorted({re.sub(r"\[\d+\]", "[]", path).removesuffix("[]") for path in paths})
    effects = ["sets " + ", ".join(_shorten(changed))] if changed else []
    if before.secrets != after.secrets or before.image_logins != after.image_logins:
        effects.append("login or secret, not stored in the job file")
    if len(after.warnings) > len(before.warnings):
        effects.append("warned")
    return "; ".join(effects)


def _shorten(paths: list[str]) -> list[str]:
    """Keep at most three paths, without those below another one."""
    top = [p for p in paths if not any(p != q and p.startswith((q + ".", q + "[")) for q in paths)]
    shown = [f"`{path}`" for path in top]
    return [*shown[:3], "…"] if len(shown) > 3 else shown


def render_importer_table() -> str:
    lines = ["| dialect | field | effect |", "|---|---|---|"]
    for dialect, (_, samples) in SAMPLES.items():
        for field in samples:
            effect = describe_effect(dialect, field)
            if (dialect, field) in DOCUMENTATION_FIELDS:
                effect = "describes the file; not used"
            shown = field.replace("taskRoles.w.", "taskRoles.<role>.")
            lines.append(f"| {dialect} | `{shown}` | {effect} |")
    return "\n".join(lines) + "\n"
