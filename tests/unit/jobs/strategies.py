"""Hypothesis strategies for valid and hostile job specs."""

from __future__ import annotations

from hypothesis import strategies as st

from jobs.jobfile import (
    Code,
    Framework,
    JobSpec,
    Metrics,
    Mount,
    Parameter,
    Port,
    Service,
    TaskRole,
)
from jobs.jobfile.fields import to_identifier

# Quotes, substitutions, line breaks, YAML scalars and non-Latin scripts.
HOSTILE_TEXTS = (
    "'",
    '"',
    "$(touch /tmp/owned)",
    "`id`",
    "${HOME}",
    "a\nb",
    "#SBATCH --uid=0",
    "-rf",
    "--",
    "中文",
    "\t",
    "\\",
    "\\n",
    "!!",
    "*",
    "~",
    "%s",
    "yes",
    "null",
    "012",
    "1e5",
    "0x1f",
    "1:30",
    " lead",
    "trail ",
    "# no comment",
    "a: b",
    "- x",
    "\u2028",
    "\x7f",
    "\x85",
    "\ufeff",
    "\r\n",
    "EOF",
    "{}",
    "🙂",
)
_any_text = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=40
)
texts = st.lists(st.sampled_from(HOSTILE_TEXTS) | _any_text, max_size=4).map("".join)
commands = texts.filter(lambda text: text.strip())
lines = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029"), max_size=30
)
names = st.from_regex(r"[A-Za-z0-9._~-]{1,12}", fullmatch=True).filter(to_identifier)
job_names = st.from_regex(r"[A-Za-z0-9中文._~-]{1,20}", fullmatch=True).filter(
    lambda name: name not in (".", "..")
)
env_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True)
env_values = (
    texts
    | st.integers(-(10**12), 10**12)
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
)
envs = st.dictionaries(env_names, env_values, max_size=4)
paths = st.lists(lines.map(lambda t: t.replace("/", "")), min_size=1, max_size=3).map(
    lambda parts: "/" + "/".join(parts)
)
_mount_parts = st.lists(
    st.from_regex(r"[A-Za-z0-9 $'\"._~中-]{1,8}", fullmatch=True).filter(lambda p: p.strip(".")),
    min_size=1,
    max_size=3,
).map(lambda parts: "/" + "/".join(parts))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**15), 10**15) | texts
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(lines, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@st.composite
def task_roles(draw: st.DrawFn, name: str) -> TaskRole:
    tasks = draw(st.integers(1, 5))
    memory = draw(st.integers(100, 100_000))
    labels = draw(st.lists(names, max_size=3, unique_by=to_identifier))
    return TaskRole(
        name=name,
        task_number=tasks,
        cpu_number=draw(st.integers(1, 64)),
        memory_mb=memory,
        shm_mb=draw(st.integers(0, memory)),
        gpu_number=draw(st.integers(0, 8)),
        gpu_type=draw(st.sampled_from(["", "a100", "v100-32g"])),
        image=draw(st.sampled_from(["", "docker://ubuntu:22.04", "/images/x.sif"])),
        command=draw(commands),
        parameters=tuple(
            Parameter(key=draw(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)), value=draw(texts))
            for _ in range(draw(st.integers(0, 3)))
        ),
        port_list=tuple(Port(label=label, port_number=draw(st.integers(1, 3))) for label in labels),
        min_failed_task_count=draw(st.none() | st.integers(1, tasks)),
        min_succeeded_task_count=draw(st.none() | st.integers(1, tasks)),
        is_main=draw(st.booleans()),
        env=draw(envs),
        placement=draw(st.sampled_from(["auto", "pack", "separate"])),
        pre_commands=tuple(draw(st.lists(commands, max_size=2))),
        post_commands=tuple(draw(st.lists(commands, max_size=2))),
        strict_shell=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def job_specs(draw: st.DrawFn, max_roles: int = 3) -> JobSpec:
    role_names = draw(st.lists(names, min_size=1, max_size=max_roles, unique_by=to_identifier))
    targets = draw(st.lists(_mount_parts, max_size=2, unique=True))
    return JobSpec(
        job_name=draw(job_names),
        namespace=draw(job_names),
        image=draw(st.sampled_from(["", "ubuntu", "registry:5000/a/b:c"])),
        description=draw(texts),
        data_dir=draw(st.just("") | paths),
        output_dir=draw(st.just("") | paths),
        code_dir=draw(st.just("") | paths),
        retry_count=draw(st.integers(-2, 5)),
        time_limit=draw(st.none() | st.integers(1, 10**7)),
        estimated_duration=draw(st.none() | st.integers(1, 10**7)),
        placement=draw(st.sampled_from(["auto", "pack", "separate"])),
        task_roles=tuple(draw(task_roles(name)) for name in role_names),
        job_envs=draw(envs),
        mounts=tuple(
            Mount(source=draw(_mount_parts), target=target, read_only=draw(st.booleans()), name=draw(lines))
            for target in targets
        ),
        code=draw(st.none() | st.just(Code(selector="codeFile", upload_id="u1"))),
        services=tuple(draw(st.lists(st.just(Service(kind="ssh", role=role_names[0])), max_size=1))),
        metrics=draw(st.none() | st.builds(Metrics, source=lines, groups=st.dictionaries(lines, json_values, max_size=2))),
        labels=draw(st.dictionaries(lines, lines, max_size=2)),
        extras=draw(st.dictionaries(lines, json_values, max_size=3)),
        framework=draw(st.none() | st.just(Framework(name="pytorch"))) if len(role_names) == 1 else None,
    )  # fmt: skip
