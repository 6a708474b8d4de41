"""The cost of a job file: at most in proportion to its size, for validation, import, plan and script.

Sizes are counted in bytecode instructions, so that the tests do not depend on the machine.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clusters.capacity import Capacity, GpuCount, NamespaceRules, Node, Partition
from core.cancellation import CancelScope, RequestCancelled
from jobs.jobfile import JobSpec, SpecError
from jobs.jobfile.errors import MAX_PROBLEMS, format_path, parse_path
from jobs.jobfile.importers import load_document, load_text
from jobs.jobfile.importers.draft import MAX_WARNINGS
from jobs.jobfile.limits import (
    MAX_ITEMS,
    MAX_NESTING_DEPTH,
    MAX_STRING_CHARS,
    MAX_TOTAL_CHARS,
    check_document,
)
from jobs.jobfile.parameters import TemplateParameter, check_parameters, fill_template
from jobs.jobfile.parse import parse_text
from jobs.plan import PlanError, plan
from jobs.plan.planner import _find_port_conflict, _Unit
from jobs.script.job_paths import find_path_problems
from jobs.script.render import RenderError, RenderOptions, render_files
from tests.unit.jobs.hostile_documents import (
    BASE,
    list_containers,
    list_importer_cases,
    list_model_cases,
)
from tests.unit.jobs.rendering import PATHS
from tests.work_count import assert_linear, count_instructions, measure_cpu_s

NODES = tuple(
    Node(f"n{i}", "idle", True, 1024, 0, 512_000, 0, (GpuCount("a100", 8, 0),)) for i in range(110)
)
CAPACITY = Capacity(
    datetime(2026, 1, 1, tzinfo=UTC),
    NODES,
    tuple(
        Partition(name, True, False, tuple(node.name for node in NODES), None, None)
        for name in ("one", "two")
    ),
)
RULES = NamespaceRules("default", ("one", "two"), default_image="image")
MODEL_CASES = {name: (limit, make) for name, limit, make in list_model_cases()}
IMPORTER_CASES = {name: (limit, make) for name, limit, make in list_importer_cases()}


def process(document: Any, runtime: Any = "apptainer") -> None:
    """Validate, plan and render a job as a preview does; refusals are results like others."""
    try:
        spec = load_document(document).spec
        find_path_problems(spec, options=RenderOptions())
        job_plan = plan(spec, RULES, CAPACITY)
        render_files(
            job_plan,
            spec,
            PATHS,
            user="alice",
            options=RenderOptions(runtime=runtime),
            default_image="image",
            secrets=dict.fromkeys(spec.secrets, "value"),
        )
    except (SpecError, PlanError) as error:
        check_problem_count(error)
    except RenderError:
        pass


def process_text(text: str, filename: str) -> None:
    try:
        load_text(text, filename=filename)
    except SpecError as error:
        check_problem_count(error)


def check_problem_count(error: SpecError | PlanError) -> None:
    assert len(error.problems) <= MAX_PROBLEMS + 1


def size_for(limit: int) -> int:
    """The smallest of three sizes; the largest, four times this one, is within the limit."""
    return min(limit // 4, 50)


def test_every_list_of_the_model_is_found():
    names = {".".join(map(str, path)) for path, _kind in list_containers()}
    assert {
        "taskRoles",
        "taskRoles.0.portList",
        "taskRoles.0.env",
        "alerts.event.0.receiver",
        "metrics.groups",
        "mounts",
        "secrets",
    } <= names
    assert len(IMPORTER_CASES) > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_CASES)
def test_a_job_takes_work_in_proportion_to_each_of_its_lists(name: str):
    limit, make = MODEL_CASES[name]
    documents = {n: make(n) for n in (size_for(limit) * k for k in (1, 2, 4))}
    assert_linear(lambda n: count_instructions(lambda: process(documents[n])), size_for(limit))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["separate", "pack"])
def test_roles_take_work_in_proportion_to_their_number(placement: str):
    _limit, make = MODEL_CASES["taskRoles, different"]
    documents = {n: {**make(n), "placement": placement} for n in (25, 50, 100)}
    assert_linear(lambda n: count_instructions(lambda: process(documents[n])), 25)


def test_fixed_ports_of_several_roles_take_work_in_proportion():
    def make(n: int) -> Any:
        roles = [
            {
                "name": f"r{k}",
                "command": "true",
                "portList": [{"label": f"p{i}", "beginAt": 2000 * k + i} for i in range(n)],
            }
            for k in (1, 2, 3)
        ]
        return {**BASE, "taskRoles": roles}

    specs = {n: load_document(make(n)).spec for n in (25, 50, 100)}
    assert_linear(lambda n: count_instructions(lambda: plan(specs[n], RULES, CAPACITY)), 25)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pyxis", "none"])
@pytest.mark.parametrize("name", ["taskRoles, different", "mounts, different"])
def test_scripts_for_other_runtimes_take_work_in_proportion(name: str, runtime: str):
    limit, make = MODEL_CASES[name]
    documents = {n: make(n) for n in (size_for(limit) * k for k in (1, 2, 4))}
    assert_linear(
        lambda n: count_instructions(lambda: process(documents[n], runtime)), size_for(limit)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPORTER_CASES)
def test_an_imported_file_takes_work_in_proportion_to_each_of_its_lists(name: str):
    limit, make = IMPORTER_CASES[name]
    n = min(limit // 4, 25)
    assert_linear(lambda size: count_instructions(lambda: process(make(size))), n)


YAML_TEXTS: dict[str, Callable[[int], str]] = {
    "aliases": lambda n: "a: &a [x]\n" + "".join(f"k{i}: *a\n" for i in range(n)),
    "nested aliases": lambda n: (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, n))
    ),
    "merges": lambda n: "a: &a {x: 1, y: 2}\n" + "".join(f"k{i}: {{<<: *a}}\n" for i in range(n)),
    "merge lists": lambda n: f"a: &a {{x: 1}}\nb: {{<<: [{', '.join(['*a'] * n)}]}}\n",
    "flow nesting": lambda n: "a: " + "[" * n,
    "block nesting": lambda n: "- " * n,
    "documents": lambda n: "---\na: 1\n" * n,
    "directives": lambda n: "".join(f"%TAG !t{i}! x\n" for i in range(n)) + "---\na: 1\n",
    "tags": lambda n: "".join(f"k{i}: !!str x\n" for i in range(n)),
    "unknown tags": lambda n: "".join(f"k{i}: !t{i} x\n" for i in range(n)),
    "equal keys": lambda n: "a: 1\n" * n,
    "anchors": lambda n: "".join(f"k{i}: &a{i} x\n" for i in range(n)),
    "long number": lambda n: "a: " + "1" * n,
    "long text": lambda n: "a: " + "x " * n,
    "comments": lambda n: "# x\n" * n + "a: 1\n",
}
JSON_TEXTS: dict[str, Callable[[int], str]] = {
    "comments": lambda n: "{" + "/**/" * n + "}",
    "lines": lambda n: "{" + "\n" * n + '"a": 1}',
    "nesting": lambda n: '{"a":' * n,
    "escapes": lambda n: json.dumps({"a": "\x01" * n}),
    "unclosed text": lambda n: '{"a": "' + "\\n" * n,
    "long number": lambda n: '{"a": ' + "1" * n + "}",
    "values": lambda n: json.dumps({"a": list(range(n))}),
    "keys": lambda n: json.dumps({f"k{i}": i for i in range(n)}),
}


@pytest.mark.parametrize("name", YAML_TEXTS)
def test_yaml_takes_work_in_proportion(name: str):
    make = YAML_TEXTS[name]
    assert_linear(lambda n: count_instructions(lambda: process_text(make(n), "job.yaml")), 100)


@pytest.mark.parametrize("name", JSON_TEXTS)
def test_json_takes_work_in_proportion(name: str):
    make = JSON_TEXTS[name]
    assert_linear(lambda n: count_instructions(lambda: process_text(make(n), "job.json")), 100)


def test_the_measure_finds_a_quadratic_rule(monkeypatch: pytest.MonkeyPatch):
    """The tests above would fail if a rule compared each entry with each other."""

    def compare_all(job: Any) -> Any:
        names = list(job.job_envs)
        return iter([one for one in names for other in names if one == other + "?"])

    monkeypatch.setattr("jobs.jobfile.model.find_rule_violations", compare_all)
    _limit, make = MODEL_CASES["jobEnvs, different"]
    with pytest.raises(AssertionError, match="the work for"):
        assert_linear(lambda n: count_instructions(lambda: load_document(make(n))), 100)


# -- limits


LIMITED: dict[str, tuple[str, Any]] = {
    "list": ("too_many_items", {**BASE, "extras": {"a": [1] * (MAX_ITEMS + 1)}}),
    "mapping": (
        "too_many_items",
        {**BASE, "jobEnvs": {f"A{i}": 1 for i in range(MAX_ITEMS + 1)}},
    ),
    "ports": (
        "too_many_items",
        {
            **BASE,
            "taskRoles": [
                {"name": "w", "command": "x", "portList": [{"label": f"p{i}"} for i in range(101)]}
            ],
        },
    ),
    "values": ("too_many_values", {**BASE, "extras": {f"a{i}": [1] * 900 for i in range(30)}}),
    "text": ("too_long", {**BASE, "description": "x" * (MAX_STRING_CHARS + 1)}),
    "all text": (
        "too_much_text",
        {**BASE, "extras": {f"a{i}": "x" * 200_000 for i in range(6)}},
    ),
    "key": ("key_too_long", {**BASE, "extras": {"k" * 1025: 1}}),
    "number": ("too_large", {**BASE, "extras": {"a": 10**300}}),
    "infinite": ("not_finite", {**BASE, "extras": {"a": float("inf")}}),
}


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


LIMITED["depth"] = ("too_deep", {**BASE, "extras": {"a": nest(MAX_NESTING_DEPTH)}})


@pytest.mark.parametrize("name", LIMITED)
def test_one_limit_holds_for_text_values_and_templates(name: str):
    code, document = LIMITED[name]
    ways: dict[str, Callable[[], Any]] = {
        "values": lambda: load_document(document),
        "template": lambda: check_parameters([], document),
        "filled template": lambda: fill_template(document, [], {}),
    }
    # JSON has no infinite numbers; the size of a file limits all text, unless aliases repeat it.
    if name not in ("infinite", "all text"):
        ways["JSON"] = lambda: load_text(json.dumps(document), filename="job.json")
        ways["YAML"] = lambda: load_text(yaml.safe_dump(document), filename="job.yaml")
    for way, load in ways.items():
        with pytest.raises(SpecError) as caught:
            load()
        assert [problem.code for problem in caught.value.problems] == [code], way
        assert caught.value.problems[0].message.endswith("."), way


def test_a_refused_list_is_named_with_its_limit_and_place():
    text = json.dumps({**BASE, "mounts": [{"target": "/a"}] * 300}, indent=1)
    with pytest.raises(SpecError) as caught:
        load_text(text)
    (problem,) = caught.value.problems
    assert problem.path == "mounts"
    assert problem.line == text[: text.index("mounts")].count("\n") + 1
    assert "has 300 entries and may have 200" in problem.message


def test_a_document_at_the_limits_is_accepted():
    extras = {f"a{i}": ["x"] * 900 for i in range(22)}
    assert load_document({**BASE, "extras": extras}).spec.extras == extras


# -- text that is made from a job file


def v2_file(**more: Any) -> dict[str, Any]:
    return {
        "protocolVersion": 2,
        "name": "j",
        "type": "job",
        "prerequisites": [{"name": "i", "type": "dockerimage", "uri": "image:1"}],
        "taskRoles": {"w": {"dockerImage": "i", "commands": ["true"]}},
        **more,
    }


EXPANSIONS: dict[str, Callable[[], Any]] = {
    "parameters of OpenPAI": lambda: load_document(
        v2_file(
            parameters={"x": "x" * 200_000},
            taskRoles={"w": {"dockerImage": "i", "commands": ["<% $parameters.x %>" * 10_000]}},
        )
    ),
    "commands of plugins": lambda: load_document(
        v2_file(
            taskRoles={f"w{i}": {"dockerImage": "i", "commands": ["true"]} for i in range(100)},
            extras={
                "com.microsoft.pai.runtimeplugin": [
                    {"plugin": "cmd", "parameters": {"preCommands": ["x" * 100_000]}}
                ]
            },
        )
    ),
    "callbacks of plugins": lambda: load_document(
        v2_file(
            taskRoles={f"w{i}": {"dockerImage": "i", "commands": ["true"]} for i in range(100)},
            extras={
                "com.microsoft.pai.runtimeplugin": [
                    {
                        "plugin": "cmd",
                        "parameters": {"callbacks": [{"event": "taskStarts", "commands": [""]}] * 900},
                    }
                ]
            },
        )
    ),
    "parameters of templates": lambda: fill_template(
        {**BASE, "description": "<% $parameters.x %>" * 10_000},
        [TemplateParameter("x")],
        {"x": "x" * 10_000},
    ),
    "aliases": lambda: load_text(
        f"a: &a {'x' * 200_000}\nb: [{', '.join(['*a'] * 900)}]\n", filename="job.yaml"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPANSIONS)
def test_text_cannot_be_multiplied(name: str):
    tracemalloc.start()
    try:
        with pytest.raises(SpecError) as caught:
            EXPANSIONS[name]()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [problem.code for problem in caught.value.problems] == ["too_much_text"]
    assert peak_bytes < 32 * MAX_TOTAL_CHARS


def test_variables_cannot_multiply_the_text_of_paths():
    spec = load_document({**BASE, "jobEnvs": {"A": "x" * 100_000}, "dataDir": "$A" * 2000}).spec
    tracemalloc.start()
    try:
        (problem,) = find_path_problems(spec, options=RenderOptions())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (problem.path, problem.code) == ("dataDir", "path_too_long")
    assert peak_bytes < 4 * 1024**2


# -- problems and warnings


def test_problems_and_warnings_are_listed_up_to_a_maximum():
    unknown = {f"taskNumbr{i}": 1 for i in range(900)}
    for document in (
        {**BASE, **unknown},
        v2_file(**unknown),
        {**BASE, "jobEnvs": {f"-{i}": 1 for i in range(900)}},
    ):
        with pytest.raises(SpecError) as caught:
            load_document(document)
        assert len(caught.value.problems) == MAX_PROBLEMS + 1
        assert "further problems" in caught.value.problems[-1].message
    loaded = load_document({**BASE, "jobEnvs": {f"PAI_{i}": 1 for i in range(900)}})
    assert len(loaded.warnings) == MAX_WARNINGS + 1
    assert "has 800 further warnings" in loaded.warnings[-1].message


@given(
    st.lists(st.integers(0, 10**6) | st.from_regex(r"[A-Za-z_-]{1,9}|[a-z.]{1,9}", fullmatch=True))
)
def test_a_formatted_path_is_parsed_to_its_location(parts: list[str | int]):
    loc = ("key", *parts)
    assert parse_path(format_path(loc)) == loc


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), max_size=4),
        min_size=1,
        max_size=5,
    ),
    st.data(),
)
def test_a_port_conflict_is_found_if_two_units_use_a_port(ports: Any, data: st.DataObject):
    roles = [
        SimpleNamespace(
            name=f"r{i}",
            port_list=[SimpleNamespace(begin_at=begin, port_number=n) for begin, n in rows],
        )
        for i, rows in enumerate(ports)
    ]
    spec: Any = SimpleNamespace(task_roles=roles)
    unit_of = [data.draw(st.integers(0, 2)) for _ in roles]
    units = [
        _Unit(tuple(i for i, one in enumerate(unit_of) if one == unit), None)  # type: ignore[arg-type]
        for unit in sorted(set(unit_of))
    ]
    used: dict[int, set[int]] = {}
    for i, rows in enumerate(ports):
        for begin, count in rows:
            for port in range(begin, begin + count):
                used.setdefault(port, set()).add(unit_of[i])
    conflict = _find_port_conflict(spec, units)
    assert (conflict is not None) == any(len(found) > 1 for found in used.values())
    if conflict is not None:
        port, one, other = conflict
        assert len(used[port]) > 1
        assert unit_of[int(one[1:])] != unit_of[int(other[1:])]


# -- memory, CPU time, cancellation


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODEL_CASES if name.endswith("different")])
def test_memory_is_in_proportion(name: str):
    limit, make = MODEL_CASES[name]

    def measure(n: int) -> int:
        document = make(n)
        tracemalloc.start()
        try:
            process(document)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    process(make(1))
    assert_linear(measure, size_for(limit), allowance=20_000)


TEXTS: dict[str, Callable[[int], str]] = {
    "spaces": lambda n: "1" + " " * n + "!",
    "digits": lambda n: "1" * n + "!",
    "letters": lambda n: "x" * n,
    "placeholders": lambda n: "<%" * (n // 2),
    "open placeholder": lambda n: "<% $parameters" + ".a" * (n // 2),
    "variables": lambda n: "${" * (n // 2),
    "option lines": lambda n: "x\n -a" * (n // 5),
    "quotes": lambda n: "'" * n,
    "lines": lambda n: "\n \t" * (n // 3),
    "combining characters": lambda n: "e\u0301" * (n // 2),
}


def list_text_fields() -> list[tuple[str, Callable[[str], Any]]]:
    role, openpai = {"name": "w", "command": "true"}, v2_file()
    keys = [field.alias or name for name, field in JobSpec.model_fields.items()]
    role_keys = ["command", "memoryMB", "shmMB", "name", "image", "title", "gpuType", "env"]
    return [
        *((key, lambda text, key=key: {**BASE, key: text}) for key in keys),
        *(
            (f"role {key}", lambda text, key=key: {**BASE, "taskRoles": [{**role, key: text}]})
            for key in role_keys
        ),
        ("parameter", lambda text: {**BASE, "taskRoles": [{**role, "parameters": {"a": text}}]}),
        ("command of OpenPAI", lambda text: {**openpai, "taskRoles": {"w": {"dockerImage": "i", "commands": [text]}}}),
        ("command of FfDL", lambda text: {"name": "j", "cpus": 1, "framework": {"name": "i", "command": text}}),
        ("memory of FfDL", lambda text: {"name": "j", "memory": text, "framework": {"name": "i", "command": "x"}}),
        ("name of FfDL", lambda text: {"name": text, "cpus": 1, "framework": {"name": "i", "command": "x"}}),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_long_texts_take_cpu_time_in_proportion(text: str):
    """Quadratic work in C, as of regular expressions, takes 64 times as long for 8 times the text."""
    make = TEXTS[text]
    for name, build in list_text_fields():
        small, large = (build(make(n)) for n in (30_000, 240_000))
        process(small)
        small_s = measure_cpu_s(lambda document=small: process(document))
        large_s = measure_cpu_s(lambda document=large: process(document))
        assert large_s <= 20 * (small_s + 0.002), name


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_CASES)
def test_long_lists_take_cpu_time_in_proportion(name: str):
    limit, make = MODEL_CASES[name]
    small, large = make(limit // 4), make(limit)
    process(small)
    small_s = measure_cpu_s(lambda: process(small))
    large_s = measure_cpu_s(lambda: process(large))
    assert large_s <= 8 * (small_s + 0.005)


@pytest.mark.slow
def test_many_yaml_directives_are_refused_at_once():
    """libyaml compares each %TAG with all others: one file took 10 s."""
    text = "".join(f"%TAG !t{i}! x\n" for i in range(60_000)) + "---\na: 1\n"
    start = time.thread_time()
    with pytest.raises(SpecError) as caught:
        parse_text(text, filename="job.yaml")
    plain_s = time.thread_time() - start
    assert caught.value.problems[0].code == "too_many_directives"
    assert plain_s < 100 * measure_cpu_s(lambda: text.count("\n%")) + 0.1


@pytest.mark.parametrize(
    "work",
    [
        lambda: load_document(BASE),
        lambda: load_text(json.dumps(BASE)),
        lambda: plan(JobSpec.model_validate(BASE), RULES, CAPACITY),
        lambda: check_document([[1] * 900] * 20),
    ],
    ids=["values", "text", "plan", "limits"],
)
def test_work_stops_when_the_request_is_cancelled(work: Callable[[], Any]):
    with CancelScope().active() as scope:
        work()
        scope.cancel()
        with pytest.raises(RequestCancelled):
            work()
