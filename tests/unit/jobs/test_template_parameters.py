"""Template parameters: substitution of placeholders in values, validation of values and declarations.

A value that consists of one placeholder keeps the parameter's type; inside text it becomes text; keys are unchanged.
"""

from __future__ import annotations

from typing import Any

import pytest

from jobs.jobfile import SpecError
from jobs.jobfile.parameters import (
    TemplateParameter,
    check_parameters,
    fill_template,
    find_parameter_names,
    substitute_parameters,
)

LR = TemplateParameter("lr", kind="number", default=0.1)
GPUS = TemplateParameter("gpus", kind="whole", required=True)
DATA = TemplateParameter("data", default="/data")
OPTIMIZER = TemplateParameter("optimizer", kind="choice", choices=("sgd", "adam"), default="sgd")
DEBUG = TemplateParameter("debug", kind="flag", default=False)
ALL = [LR, GPUS, DATA, OPTIMIZER, DEBUG]
FILE = {
    "jobName": "train-<% $parameters.optimizer %>",
    "jobEnvs": {"isDebug": "<% $parameters.debug %>"},
    "taskRoles": [
        {
            "name": "worker",
            "gpuNumber": "<% $parameters.gpus %>",
            "command": "python train.py --lr <%$parameters.lr%> <% $parameters.data  %> <% $other.x %>",
        }
    ],
}


def test_values_keep_their_types() -> None:
    filled = fill_template(FILE, ALL, {"gpus": "2", "optimizer": "adam"})
    assert filled["jobName"] == "train-adam"
    assert filled["jobEnvs"] == {"isDebug": False}
    assert filled["taskRoles"][0]["gpuNumber"] == 2
    assert filled["taskRoles"][0]["command"] == "python train.py --lr 0.1 /data <% $other.x %>"


def test_values_are_not_parsed_as_placeholders_or_structure() -> None:
    hostile = '"}, {"a": "<% $parameters.lr %>"'
    filled = substitute_parameters({"x": "<% $parameters.data %>"}, {"data": hostile, "lr": 1})
    assert filled == {"x": hostile}
    assert substitute_parameters({"<% $parameters.data %>": 1}, {"data": "k"}) == {
        "<% $parameters.data %>": 1
    }


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({}, "parameters.gpus"),
        ({"gpus": ""}, "parameters.gpus"),
        ({"gpus": 1.5}, "parameters.gpus"),
        ({"gpus": True}, "parameters.gpus"),
        ({"gpus": 10**30}, "parameters.gpus"),
        ({"gpus": float("nan")}, "parameters.gpus"),
        ({"gpus": 1, "lr": "quick"}, "parameters.lr"),
        ({"gpus": 1, "lr": []}, "parameters.lr"),
        ({"gpus": 1, "optimizer": "lion"}, "parameters.optimizer"),
        ({"gpus": 1, "debug": "maybe"}, "parameters.debug"),
        ({"gpus": 1, "data": "a\0b"}, "parameters.data"),
        ({"gpus": 1, "dta": "x"}, "parameters.dta"),
    ],
)
def test_problem_has_the_path_of_the_invalid_value(values: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as caught:
        fill_template(FILE, ALL, values)
    assert [problem.path for problem in caught.value.problems] == [path]
    if path == "parameters.dta":
        assert caught.value.problems[0].suggestion == "data"


def test_declarations_are_checked_against_the_job_file() -> None:
    check_parameters(ALL, FILE)
    assert find_parameter_names(FILE) == {"optimizer", "debug", "gpus", "lr", "data"}
    bad = [
        TemplateParameter("1x"),
        TemplateParameter("lr"),
        TemplateParameter("lr"),
        TemplateParameter("pick", kind="choice"),
        TemplateParameter("n", kind="whole", default="many"),
    ]
    with pytest.raises(SpecError) as caught:
        check_parameters(bad, {"x": "<% $parameters.lrr %>"})
    assert [problem.path for problem in caught.value.problems] == [
        "parameters[0].name",
        "parameters[2].name",
        "parameters[3].choices",
        "parameters[4].default",
        "spec",
    ]
    assert caught.value.problems[-1].suggestion == "lr"


@pytest.mark.parametrize("parameter", ALL)
def test_sample_values_are_valid_and_json_round_trips(parameter: TemplateParameter) -> None:
    assert TemplateParameter.from_json(parameter.to_json()) == parameter
    required = [p for p in ALL if p.required]
    fill_template(
        FILE,
        ALL,
        {p.name: p.sample_value() for p in required} | {parameter.name: parameter.sample_value()},
    )
