"""Import of job files of other systems: converted fields, warnings and problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.jobfile import SpecError, dump
from jobs.jobfile.fields import parse_memory_mib
from jobs.jobfile.importers import LoadResult, SiteCatalog, detect_dialect, load_document, load_text
from jobs.jobfile.importers.placeholders import format_scalar, render_template, secret_variable_name
from jobs.jobfile.limits import TextBudget
from jobs.management.import_report import main, render_table

FILES = Path(__file__).parent / "jobfiles"
SITE = SiteCatalog(
    storages={"team": "/cluster/team"},
    sizes={"small": {"cpuNumber": 2, "memoryMB": 4096, "gpuNumber": 1, "gpuType": "t4"}},
)


def load(name: str) -> LoadResult:
    return load_text((FILES / name).read_bytes(), filename=name, site=SITE)


def warnings_by_path(result: LoadResult) -> dict[str, str]:
    return {warning.path: warning.message for warning in result.warnings}


def problems_by_path(document: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        load_document(document)
    return {problem.path: problem.message for problem in caught.value.problems}


class TestBaseFormat:
    def test_extensions_of_other_platforms_are_accepted(self):
        result = load("segmentation.json")
        assert result.dialect == "sluice"
        assert set(warnings_by_path(result)) == {
            "",
            "taskRoles[0].storageGB",
            "taskRoles[0].tmp",
            "taskRoles[1].dockerImage",
        }
        ps, worker = result.spec.task_roles
        assert ps.memory_mb == 2048
        assert worker.image == "registry.lab/tf:2.15-gpu"
        assert worker.command.endswith("http://example.org//a")
        assert (result.spec.namespace, result.spec.is_debug) == ("vision", True)
        assert result.spec.extras == {"virtualGroup": "total"}

    @pytest.mark.parametrize(
        ("section", "path"),
        [
            ({"alerts": {"event": [{"event_checker": "FAILED"}]}}, "alerts"),
            ({"services": [{"kind": "jupyter"}]}, "services[0]"),
            ({"metrics": {"type": "tensorboard"}}, "metrics"),
        ],
    )
    @pytest.mark.proves("alerts.*", "services.*", "metrics.*")
    def test_inactive_section_gives_a_warning(self, section, path):
        document = {
            "jobName": "j",
            "image": "i",
            "taskRoles": [{"name": "w", "command": "true"}],
        }
        assert load_document(document).warnings == ()
        assert load_document({**document, "alerts": {}}).warnings == ()
        warnings = warnings_by_path(load_document({**document, **section}))
        assert list(warnings) == [path]
        assert str(warnings[path]).startswith("saved, not active yet")

    def test_questionable_values_give_warnings(self):
        result = load_document(
            {
                "jobName": "j",
                "image": "i",
                "jobEnvs": {"PAI_JOB_NAME": "x"},
                "retryCount": -2,
                "taskRoles": [
                    {
                        "name": "a",
                        "command": "x",
                        "taskNumber": 2,
                        "env": {"SLURM_JOB_ID": 1},
                        "portList": [
                            {"label": "a", "beginAt": 80},
                            {"label": "b", "beginAt": 8080},
                        ],
                    }
                ],
            }
        )
        assert set(warnings_by_path(result)) == {
            "jobEnvs.PAI_JOB_NAME",
            "retryCount",
            "taskRoles[0].env.SLURM_JOB_ID",
            "taskRoles[0].portList[0].beginAt",
            "taskRoles[0].portList[1].beginAt",
        }


class TestOpenPaiV2:
    result = load("finetune-v2.yaml")

    def test_command_joins_deployment_and_role_commands(self):
        assert self.result.spec.task_roles[0].command == (
            "cd /work\n"
            "python train.py --epochs 3 --lr 0.00001 --ratio 2\n"
            "echo https://example.org/b.tar https://example.org/trainer.git weights true\n"
            'curl -H "X-Token: ${PAI_SECRETS_token}" https://example.org\n'
            "echo <% $parameters.unknown %> <% $data.uri[9] %> <% $secrets.none %>\n"
            "echo done"
        )
        assert self.result.spec.task_roles[0].strict_shell

    def test_resources_and_completion_counts_are_converted(self):
        master, worker = self.result.spec.task_roles
        assert (master.cpu_number, master.memory_mb, master.gpu_number, master.shm_mb) == (
            4,
            16384,
            2,
            4096,
        )
        assert [(p.label, p.port_number) for p in master.port_list] == [("rendezvous", 1)]
        assert (worker.cpu_number, worker.memory_mb, worker.shm_mb) == (1, 100, 0)
        assert (master.min_failed_task_count, master.min_succeeded_task_count) == (1, 1)
        assert (worker.min_failed_task_count, worker.min_succeeded_task_count) == (None, None)
        assert (master.image, worker.image) == ("", "registry.lab/serve:1")
        assert self.result.spec.image == "registry.lab/torch:2.3"
        assert self.result.spec.namespace == "nlp"
        assert self.result.spec.retry_count == 1

    def test_secrets_are_returned_separately_from_the_spec(self):
        assert self.result.secrets == {"PAI_SECRETS_token": "s3cr3t"}
        assert self.result.spec.secrets == ("PAI_SECRETS_token",)
        assert self.result.image_logins == {
            "registry.lab/torch:2.3": {
                "username": "robot",
                "password": "hunter2",
                "registryuri": "registry.lab",
            }
        }
        everything = dump(self.result.spec) + repr(self.result) + str(warnings_by_path(self.result))
        assert "s3cr3t" not in everything
        assert "hunter2" not in everything

    def test_plugins_become_commands_services_mounts_and_alerts(self):
        spec = self.result.spec
        worker = spec.task_roles[1]
        assert worker.pre_commands == (
            "echo one\necho two",
            "git clone --depth=1 -- 'https://example.org/x y.git' src",
        )
        assert worker.post_commands == ('echo "3"',)
        assert [(s.kind, s.role, s.path) for s in spec.services] == [
            ("ssh", "master", ""),
            ("tensorboard", "master", "/logs/a"),
        ]
        assert [(m.source, m.target) for m in spec.mounts] == [
            ("/cluster/team", "/mnt/team"),
            ("/cluster/team", "/team"),
        ]
        assert spec.alerts is not None
        assert [a.event_checker for a in spec.alerts.event] == ["COMPLETED", "FAILED"]
        assert spec.extras == {"submitFrom": "page"}
        assert spec.job_ssh

    def test_every_dropped_or_changed_field_gives_a_warning(self):
        plugins = 'extras["com.microsoft.pai.runtimeplugin"]'
        assert set(warnings_by_path(self.result)) == {
            plugins,  # jobssh applies to all roles
            "prerequisites[0].auth",
            "secrets.token",
            "taskRoles.master.extraContainerOptions.infiniband",
            "taskRoles.master.taskRetryCount",
            "taskRoles.worker.resourcePerInstance.cpu",
            "taskRoles.worker.resourcePerInstance.memoryMB",
            "taskRoles.worker.completion.minSucceededInstances",
            f"{plugins}[0].parameters.userssh",
            f"{plugins}[0]",  # services are not active yet
            "extras.jobStatusChangeNotification",  # nor are alerts
            f"{plugins}[1].parameters.callbacks[1]",
            f"{plugins}[2]",
            f"{plugins}[4].parameters.storageConfigNames",
            f"{plugins}[5]",
            f"{plugins}[5].failurePolicy",
            "extras.hivedScheduler.taskRoles.master.skuType",
            "extras.gangAllocation",
            "extras.jobStatusChangeNotification.running",
        }
        assert {w.line for w in self.result.warnings if w.path == "secrets.token"} == {13}

    @pytest.mark.parametrize(
        ("completion", "expected"),
        [
            ({}, (1, 3)),
            ({"minFailedInstances": None, "minSucceededInstances": 0}, (1, 3)),
            ({"minFailedInstances": -1, "minSucceededInstances": -1}, (None, None)),
            ({"minFailedInstances": 2, "minSucceededInstances": 1}, (2, 1)),
            ({"minFailedInstances": -2, "minSucceededInstances": None}, (None, 3)),
        ],
    )
    def test_completion_counts_have_the_defaults_of_openpai(
        self, completion: dict[str, Any], expected: tuple[Any, Any]
    ):
        (role,) = load_document(v2(instances=3, completion=completion)).spec.task_roles
        assert (role.min_failed_task_count, role.min_succeeded_task_count) == expected

    def test_zero_cpu_and_memory_are_raised_and_zero_gpu_is_kept(self):
        result = load_document(v2(resourcePerInstance={"cpu": 0, "memoryMB": 0, "gpu": 0}))
        (role,) = result.spec.task_roles
        assert (role.cpu_number, role.memory_mb, role.gpu_number) == (1, 100, 0)
        assert len(result.warnings) == 2

    def test_problems_use_paths_of_the_v2_file(self):
        document = v2(
            instances=0,
            dockerImage="nope",
            commands=[],
            data="missing",
            resourcePerInstance={"cpu": "many", "memoryMB": -1, "gpus": 1},
        )
        document |= {
            "name": "a b",
            "parameter": {},
            "defaults": {"deployment": "x"},
            "type": "jobs",
        }
        assert problems_by_path(document) == {
            "parameter": 'is not a field of this format. Did you mean "parameters"?',
            "type": 'must be "job".',
            "name": "must consist of letters, digits, Chinese characters and - . _ ~.",
            "defaults.deployment": "is not a deployment of this file.",
            "taskRoles.main.instances": "must be at least 1.",
            "taskRoles.main.dockerImage": "must name a prerequisite of type dockerimage; available: img.",
            "taskRoles.main.data": "is not a prerequisite of type data.",
            "taskRoles.main.resourcePerInstance.gpus": 'is not a field of this format. Did you mean "gpu"?',
            "taskRoles.main.resourcePerInstance.cpu": "must be a whole number, not text.",
            "taskRoles.main.resourcePerInstance.memoryMB": "must be at least 100.",
            "taskRoles.main.commands": "must not be empty.",
        }

    @pytest.mark.parametrize(
        "change",
        [
            {"taskRoles": []},
            {"taskRoles": {"a": 5}},
            {"prerequisites": {"a": 1}},
            {"prerequisites": [5]},
            {"deployments": 5},
            {"defaults": []},
            {"extras": "x"},
            {"extras": {"com.microsoft.pai.runtimeplugin": {"plugin": "ssh"}}},
            {"extras": {"com.microsoft.pai.runtimeplugin": [{"plugin": "cmd", "taskroles": ["x"]}]}},
            {"extras": {"com.microsoft.pai.runtimeplugin": ["ssh"]}},
            {"taskRoles": {"a": {"commands": [[1]], "dockerImage": "img"}}},
            {"taskRoles": {}},
            {"protocolVersion": 3},
        ],
    )  # fmt: skip
    def test_wrong_types_are_problems(self, change: dict[str, Any]):
        assert problems_by_path({**v2(), **change})


def v2(**role: Any) -> dict[str, Any]:
    return {
        "protocolVersion": 2,
        "name": "j",
        "type": "job",
        "prerequisites": [{"type": "dockerimage", "name": "img", "uri": "ubuntu"}],
        "taskRoles": {
            "main": {
                "dockerImage": "img",
                "resourcePerInstance": {"cpu": 1, "memoryMB": 200, "gpu": 0},
                "commands": ["true"],
                **role,
            }
        },
    }


class TestManifest:
    def test_manifest_with_parameter_servers_is_converted(self):
        result = load("prophecis-storage.yaml")
        spec = result.spec
        assert (result.dialect, spec.job_name, spec.namespace) == (
            "ffdl",
            "fraud-model",
            "ns-risk-team",
        )
        ps, worker = spec.task_roles
        assert (ps.name, ps.task_number, ps.cpu_number, ps.memory_mb, ps.gpu_number, ps.image) == (
            "ps",
            1,
            1,
            1024,
            0,
            "lab/ps:1",
        )
        assert (worker.name, worker.task_number, worker.cpu_number, worker.memory_mb) == (
            "worker",
            2,
            2,
            4096,
        )
        assert (worker.gpu_number, worker.min_succeeded_task_count) == (1, 2)
        assert spec.image == "lab/di:tensorflow-2.15"
        assert spec.framework is not None
        assert (spec.framework.name, spec.framework.strategy) == ("tensorflow", "ps")
        assert spec.data_dir == "/data/team/alice/data"
        assert spec.output_dir == "/data/team/alice/result"
        assert spec.code_dir == "/data/team/alice/workspace"
        assert spec.code is not None
        assert spec.code.selector == "storagePath"
        assert [m.source for m in spec.mounts] == ["/data/team/alice/", "/data/shared"]
        assert spec.metrics is not None
        assert spec.metrics.source == "$LOG_DIR/train.log"
        assert spec.alerts is not None
        assert spec.alerts.event[0].receiver == ("alice", "bob")
        assert spec.alerts.event[0].alert_level == "major"
        assert spec.alerts.overtime[0].overtime_checker == 5
        assert set(warnings_by_path(result)) == {
            "name",
            "ps_cpu",
            "proxy_user",
            "data_stores[1]",
            "framework.command",
            "framework.image_tag",
            "evaluation_metrics.event_types",
            # not active yet
            "evaluation_metrics",
            "job_alert",
        }

    @pytest.mark.parametrize(
        ("written", "command"),
        [
            ("python a.py\n  --lr 1\n  -v\n", "python a.py --lr 1 -v"),
            ("python a.py \\\n  --lr 1", "python a.py \\\n  --lr 1"),
            ("cd x\n  python a.py", "cd x\n  python a.py"),
            ("echo - \n - b", "echo - \n - b"),
        ],
    )
    def test_commands_split_before_options_are_joined(self, written: str, command: str):
        document = manifest()
        document["framework"]["command"] = written
        assert load_document(document).spec.task_roles[0].command == command

    def test_version_of_the_framework_custom_is_the_image(self):
        document = manifest()
        document["framework"] |= {"name": "custom", "version": "someone/torch:1"}
        assert load_document(document).spec.image == "someone/torch:1"

    def test_uploaded_code_needs_no_workspace(self):
        spec = load_document(manifest(code_selector="codeFile", data_stores=[STORE])).spec
        assert spec.code is not None
        assert (spec.code.selector, spec.code_dir) == ("codeFile", "")

    def test_object_store_keys_are_dropped_with_a_warning(self):
        store = {
            "type": "mount_cos",
            "training_data": {"container": "bucket"},
            "connection": {"auth_url": "http://s3", "user_name": "u", "password": "pa55"},
        }
        result = load_document(manifest(data_stores=[store]))
        assert "bucket" in warnings_by_path(result)["data_stores[0]"]
        assert "pa55" not in dump(result.spec) + str(warnings_by_path(result))

    @pytest.mark.parametrize(
        ("name", "learners", "expected"),
        [
            ("horovod", 2, ("horovod", "")),
            ("pytorch", 2, ("pytorch", "")),
            ("tensorflow", 2, ("tensorflow", "multiworker")),
            ("tensorflow", 1, None),
            ("caffe", 2, None),
        ],
    )
    def test_framework_and_strategy_depend_on_the_learner_count(
        self, name: str, learners: int, expected: Any
    ):
        document = manifest(learners=learners)
        document["framework"]["name"] = name
        framework = load_document(document).spec.framework
        assert (framework and (framework.name, framework.strategy)) == expected

    @pytest.mark.parametrize(
        ("written", "mb"),
        [
            ("1Gb", 1024),
            ("1GB", 1024),
            ("1 GiB", 1024),
            ("512MB", 512),
            ("512mib", 512),
            ("1.5G", 1536),
            (256, 256),
            ("2 parsecs", None),
            ("", None),
            ("-1Gb", None),
            (True, None),
            (None, None),
        ],
    )
    def test_memory_is_converted_to_mib(self, written: Any, mb: int | None):
        assert parse_memory_mib(written) == mb

    @pytest.mark.parametrize(
        ("change", "path"),
        [
            ({"memory": "2 parsecs"}, "memory"),
            ({"cpus": "many"}, "cpus"),
            ({"learners": 0.0001, "gpus": -1}, "gpus"),
            ({"code_selector": "magic"}, "code_selector"),
            ({"code_selector": "storagePath"}, "code_selector"),
            ({"framework": {"version": "1"}}, "framework.name"),
            ({"framework": {"name": "a"}}, "framework.command"),
            ({"data_stores": "x"}, "data_stores"),
            ({"data_stores": [5]}, "data_stores[0]"),
            ({"job_alert": {"event": [{"alert_level": "loud"}]}}, "job_alert.event[0].alert_level"),
            ({"job_alert": []}, "job_alert"),
            ({"namespace": "a b"}, "namespace"),
            ({"gpu_type": "a\nb"}, "gpu_type"),
            ({"name": None}, "name"),
        ],
    )
    def test_problems_use_paths_of_the_manifest(self, change: dict[str, Any], path: str):
        assert path in problems_by_path({**manifest(), **change})


STORE = {
    "id": "hostmount",
    "training_data": {"container": "data"},
    "training_workspace": {"container": "workspace"},
    "connection": {"type": "host_mount", "name": "h", "path": "/data/a"},
}


def manifest(**more: Any) -> dict[str, Any]:
    framework = {"name": "tensorflow", "version": "2", "command": "python a.py"}
    return {"name": "m", "cpus": 1, "gpus": 0, "memory": "1Gb", "framework": framework, **more}


class TestOctopus:
    def test_sub_tasks_become_roles(self):
        result = load("octopus.json")
        main_role, other = result.spec.task_roles
        assert result.dialect == "octopus"
        assert result.spec.job_name == "分布式训练-1"
        assert (main_role.name, main_role.is_main, main_role.gpu_type) == ("main", True, "t4")
        assert [(p.key, p.value) for p in main_role.parameters] == [
            ("lr", "0.1"),
            ("note", "a b'c"),
        ]
        assert main_role.min_succeeded_task_count is None
        assert (other.name, other.env, other.task_number) == ("task1", {"B": 2}, 2)
        assert (main_role.title, other.title) == ("", "从任务")
        assert set(warnings_by_path(result)) == {
            "algorithmId",
            "config[1].resourceSpecId",
            "config[1].shareMemory",
        }

    def test_problems_use_paths_of_config(self):
        found = problems_by_path(
            {
                "name": "j",
                "config": [{"command": "", "taskNumber": 0, "parameters": [{"key": "-x"}]}],
            }
        )
        assert set(found) == {
            "config[0].command",
            "config[0].taskNumber",
            "config[0].parameters[0].key",
        }
        assert "config[0]" in problems_by_path({"name": "j", "config": ["x"]})


class TestDetection:
    @pytest.mark.parametrize(
        ("document", "name"),
        [
            ({"protocolVersion": 2}, "openpai-v2"),
            ({"taskRoles": {"a": {}}}, "openpai-v2"),
            ({"jobName": "j"}, "sluice"),
            ({"taskRoles": []}, "sluice"),
            ({"jobName": "j", "framework": {"name": "pytorch"}, "memory": 1}, "sluice"),
            ({"config": [{}]}, "octopus"),
            ({"framework": {"name": "x"}, "cpus": 1}, "ffdl"),
        ],
    )
    def test_dialect_is_detected_by_its_keys(self, document: dict[str, Any], name: str):
        assert detect_dialect(document).name == name

    def test_unknown_dialect_lists_the_known_ones(self):
        message = problems_by_path({"a": 1})[""]
        for key in ("protocolVersion", "jobName", "config", "data_stores"):
            assert key in message


class TestTemplates:
    def test_numbers_are_formatted_as_in_javascript(self):
        values = [1, 1.0, 0.1, 1e-5, 1e-7, 1.5e-10, 1e21, 1.5e300, -2.50, True, "x", None, [1]]
        assert [format_scalar(value) for value in values] == [
            "1", "1", "0.1", "0.00001", "1e-7", "1.5e-10", "1e+21", "1.5e+300", "-2.5", "true", "x",
            None, None,
        ]  # fmt: skip

    def test_substituted_values_are_not_expanded_again(self):
        context = {"parameters": {"a": "<% $parameters.b %>", "b": "x"}}
        assert (
            render_template("<% $parameters.a %>", context, lambda path: None, TextBudget())
            == "<% $parameters.b %>"
        )

    def test_secret_variables_are_identifiers(self):
        assert secret_variable_name(".a.b[0]") == "PAI_SECRETS_a_b_0"
        assert secret_variable_name(".my-token") == "PAI_SECRETS_my_token"


class TestReport:
    def test_report_counts_files_and_lists_differences(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        good = {"jobName": "j", "image": "i", "taskRoles": [{"name": "a", "command": "x"}]}
        (tmp_path / "good.json").write_text(json.dumps(good))
        (tmp_path / "bad.json").write_text("{}")
        (tmp_path / "v2.yaml").write_text(json.dumps(v2()))
        expected_file = tmp_path / "expected.txt"
        expected = {
            "good.json": {"ok": True, "normalized": {"virtualCluster": "default", "retryCount": 0}},
            "bad.json": {"ok": False},
            "v2.yaml": {"ok": True, "entrypoints": {"main": "true"}, "env": {"PAI_TASKS_NUM": 1}},
        }
        expected_file.write_text(json.dumps(expected))
        assert main([str(tmp_path), "--expected", str(expected_file)]) == 0
        text = capsys.readouterr().out
        assert "3 files: 2 accepted (0 with warnings), 1 refused." in text
        assert "Compared with 3 expected results: 0 files differ." in text
        expected["good.json"]["normalized"] = {"retryCount": 1}
        expected["bad.json"]["ok"] = True
        expected["v2.yaml"] |= {
            "entrypoints": {"main": "false"},
            "env": {"PAI_TASKS_NUM": 2},
        }
        expected_file.write_text(json.dumps(expected))
        assert main([str(tmp_path), "--expected", str(expected_file)]) == 1
        text = capsys.readouterr().out
        assert text.count("differs:") == 4
        assert "retryCount is 0, not 1" in text

    def test_report_of_no_files_is_rendered(self):
        assert "0 files" in render_table([], verbose=True, expected_count=0)
