"""Types of values in a job file: names, paths, numbers, durations, values of environment variables.

Each type is a pydantic annotation with a validator, which raises the message for invalid values. Pure.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from core.messages import Message, _

# Sluice and Slurm set the environment variables with these prefixes; a job file cannot override them.
RESERVED_PREFIXES = ("PAI_", "VC_", "SLURM_", "SLUICE_")
MAX_COMMAND_BYTES = 256 * 1024
MAX_TEXT_CHARS = 64 * 1024
MAX_ENV_VALUE_BYTES = 128 * 1024  # execve of Linux refuses longer strings (MAX_ARG_STRLEN)
MAX_PATH_CHARS = 4096
MAX_NAME_CHARS = 255
MAX_ROLE_CHARS = 128
MAX_DURATION_S = 3650 * 86400

_IDEOGRAPHS = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
JOB_NAME_PATTERN = rf"^[A-Za-z0-9{_IDEOGRAPHS}._~-]+$"
ROLE_NAME_PATTERN = r"^[A-Za-z0-9._~-]+$"
ENV_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
PARAMETER_KEY_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"

_JOB_NAME_REGEX = re.compile(JOB_NAME_PATTERN)
_ROLE_NAME_REGEX = re.compile(ROLE_NAME_PATTERN)
_ENV_NAME_REGEX = re.compile(ENV_NAME_PATTERN)
_PARAMETER_KEY_REGEX = re.compile(PARAMETER_KEY_PATTERN)
_CONTROL_CHARACTER_REGEX = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE_REGEX = re.compile(r"[\ud800-\udfff]")
_NOT_ALNUM_REGEX = re.compile(r"[^A-Za-z0-9]")


def validation_error(code: str, message: Message, **params: Any) -> PydanticCustomError:
    """Build the error that a validator raises for an invalid value."""
    # pydantic replaces {name} in its template by values of the context. The message is passed as such a value, because
    # braces in it must not be replaced.
    return PydanticCustomError(
        "sluice_" + code,
        "{message}",
        {"message": message, **params},
    )


# Text


def _require_text(value: Any, what: str = "") -> str:
    if not isinstance(value, str):
        raise validation_error(
            "text_type",
            _("must be %(what)s, not %(kind)s.", what=what or _("text"), kind=describe_type(value)),
        )
    if "\x00" in value:
        raise validation_error("nul", _("must not contain a NUL character."))
    if _SURROGATE_REGEX.search(value):
        raise validation_error("surrogate", _("must be valid Unicode text."))
    return value


def describe_type(value: object) -> str:
    """Name the type of a value in the words of job files, such as "a list"."""
    if value is None:
        return _("null")
    if isinstance(value, bool):
        return _("true/false")
    names: tuple[tuple[type, str], ...] = (
        (str, _("text")),
        (int, _("a whole number")),
        (float, _("a number")),
        (dict, _("a mapping")),
        (list, _("a list")),
        (tuple, _("a list")),
    )
    return next((name for kind, name in names if isinstance(value, kind)), type(value).__name__)


def _require_line(value: Any, *, limit: int) -> str:
    text = _require_text(value)
    if _CONTROL_CHARACTER_REGEX.search(text):
        raise validation_error("control", _("must not contain control characters or line breaks."))
    return _limit_length(text, limit)


def _limit_length(text: str, limit: int) -> str:
    if len(text) > limit:
        raise validation_error(
            "too_long",
            _(
                "must have at most %(limit)s characters; it has %(count)s.",
                limit=limit,
                count=len(text),
            ),
        )
    return text


def _validate_text(value: Any) -> str:
    return _limit_length(_require_text(value), MAX_TEXT_CHARS)


def _validate_job_name(value: Any) -> str:
    name = _require_line(value, limit=MAX_NAME_CHARS)
    if not _JOB_NAME_REGEX.match(name) or name in (".", ".."):
        raise validation_error(
            "name",
            _("must consist of letters, digits, Chinese characters and - . _ ~."),
        )
    return name


def _validate_role_name(value: Any) -> str:
    name = _require_line(value, limit=MAX_ROLE_CHARS)
    if not _ROLE_NAME_REGEX.match(name):
        raise validation_error("role_name", _("must consist of letters, digits and - . _ ~."))
    if not to_identifier(name):
        raise validation_error("role_name", _("must contain at least one letter or digit."))
    return name


def to_identifier(name: str) -> str:
    """Reduce a name to lower-case ASCII letters and digits, as in names of variables: ps-server → psserver."""
    return _NOT_ALNUM_REGEX.sub("", name).lower()


def is_identifier(name: str) -> bool:
    """Whether a name can be a part of a variable name unchanged. It may begin with a digit."""
    return re.fullmatch(r"[A-Za-z0-9_]+", name) is not None


def _validate_command(value: Any) -> str:
    text = _require_text(value)
    if not text.strip():
        raise validation_error("empty_command", _("must not be empty."))
    size = len(text.encode())
    if size > MAX_COMMAND_BYTES:
        raise validation_error(
            "too_long",
            _(
                "must have at most %(limit)s bytes; it has %(size)s.",
                limit=MAX_COMMAND_BYTES,
                size=size,
            ),
        )
    return text


def _validate_image(value: Any) -> str:
    text = _require_line(value, limit=1024).strip()
    if re.search(r"\s", text):
        raise validation_error(
            "image", _("must be the name of one container image, without spaces.")
        )
    if text.startswith("-"):
        raise validation_error("image", _("must not begin with a dash."))
    return text


def _validate_path(value: Any) -> str:
    return _require_line(value, limit=MAX_PATH_CHARS)


def _validate_gpu_type(value: Any) -> str:
    # The planner checks whether the cluster has such GPUs.
    return _require_line(value, limit=64).strip()


def _validate_framework_version(value: Any) -> str:
    # YAML reads 2.15 as a number, and 2.10 as 2.1, so such versions must be written as text.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        raise validation_error(
            "version_text",
            _('must be text: write it in quotes, such as "%(version)s".', version=value),
        )
    return _require_line(value, limit=64).strip()


def _validate_mount_path(value: Any) -> str:
    text = _validate_path(value)
    # Apptainer, Singularity, enroot and pyxis split their bind options at these characters.
    if ":" in text or "," in text:
        raise validation_error(
            "mount_path",
            _('must not contain ":" or ",": container runtimes use them as separators.'),
        )
    if ".." in text.split("/"):
        raise validation_error("mount_path", _('must not contain "..".'))
    return text


def _validate_mount_source(value: Any) -> str:
    if value == "":
        return ""  # the directory of the storage that the mount names
    text = _validate_mount_path(value)
    if not text.startswith(("/", "~/", "$")):
        raise validation_error(
            "mount_path", _("must be an absolute path on the cluster, or begin with ~/.")
        )
    return text


def _validate_mount_target(value: Any) -> str:
    text = _validate_mount_path(value)
    if not text.startswith("/") or not text.strip("/"):
        raise validation_error(
            "mount_path", _("must be an absolute path inside the container, and not / itself.")
        )
    return "/" + "/".join(part for part in text.split("/") if part not in ("", "."))


def _validate_env_name(value: Any) -> str:
    name = _require_line(value, limit=MAX_NAME_CHARS)
    if not _ENV_NAME_REGEX.match(name):
        raise validation_error(
            "env_name",
            _(
                "is not a name for an environment variable: use letters, digits and _ only, and do not start with a digit."
            ),
        )
    return name


def _validate_parameter_key(value: Any) -> str:
    key = _require_line(value, limit=128)
    if not _PARAMETER_KEY_REGEX.match(key):
        raise validation_error(
            "parameter_key",
            _(
                "must consist of letters, digits and - . _ and not begin with a dash: it becomes --key=value."
            ),
        )
    return key


# Numbers


def _parse_integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    # Text such as "4" is accepted: OpenPAI's validator converts it, and existing files rely on that.
    if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,15}\s*", value):
        return int(value)
    raise validation_error(
        "whole_number", _("must be a whole number, not %(kind)s.", kind=describe_type(value))
    )


def parse_bounded_integer(value: Any, low: int, high: int) -> int:
    number = _parse_integer(value)
    if number < low:
        raise validation_error("too_small", _("must be at least %(low)s.", low=low), low=low)
    if number > high:
        raise validation_error("too_large", _("must be at most %(high)s.", high=high), high=high)
    return number


def bounded_integer(low: int, high: int) -> BeforeValidator:
    """Build a validator that accepts whole numbers from `low` to `high`."""
    return BeforeValidator(lambda value: parse_bounded_integer(value, low, high))


# Amounts of memory

# In lower case. GB is GiB, as in FfDL's manifests, whose users write 1Gb for it.
_MIB_PER_UNIT = {
    "": 1.0,
    **dict.fromkeys(("m", "mb", "mib"), 1.0),
    **dict.fromkeys(("g", "gb", "gib"), 1024.0),
    **dict.fromkeys(("t", "tb", "tib"), 1024.0**2),
}
_MAX_MEMORY_CHARS = 100
_MEMORY = re.compile(r"\s*(?P<number>[0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(?P<unit>[A-Za-z]*)\s*")


def parse_memory_mib(value: Any) -> int | None:
    """Parse an amount of memory such as 4 GB or 512MiB to MiB, units of 1024; without a unit it is in MiB.

    None if it is not valid. static/sluice/format.js has the same parser.
    """
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    text = str(value)
    # The expression takes time in proportion to the square of the number of spaces.
    found = _MEMORY.fullmatch(text) if len(text) <= _MAX_MEMORY_CHARS else None
    unit = _MIB_PER_UNIT.get(found["unit"].lower()) if found else None
    return round(float(found["number"]) * unit) if found and unit is not None else None


def bounded_memory(low: int, high: int) -> BeforeValidator:
    """Build a validator that accepts MiB as a number, or an amount with a unit such as "4 GB"."""

    def parse(value: Any) -> int:
        if isinstance(value, str) and re.search(r"[A-Za-z.]", value):
            amount = parse_memory_mib(value)
            if amount is None:
                raise validation_error(
                    "memory",
                    _("must be an amount of memory: a number of MB, or with a unit such as 4 GB."),
                )
            value = amount
        return parse_bounded_integer(value, low, high)

    return BeforeValidator(parse)


def _parse_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise validation_error(
        "flag", _("must be true or false, not %(kind)s.", kind=describe_type(value))
    )


EnvScalar = str | int | float | bool


def _validate_env_value(value: Any) -> EnvScalar:
    if value is None:
        return ""
    if isinstance(value, bool):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        raise validation_error("not_finite", _("must be a finite number."))
    if isinstance(value, int | float):
        if isinstance(value, int) and abs(value) >= 10**300:
            raise validation_error("too_large", _("is too large a number."))
        return value
    text = _require_text(value, _("text, a number or true/false"))
    if len(text.encode()) > MAX_ENV_VALUE_BYTES:
        raise validation_error(
            "too_long", _("must have at most %(limit)s bytes.", limit=MAX_ENV_VALUE_BYTES)
        )
    return text


def format_env_value(value: EnvScalar) -> str:
    """Format the value of an environment variable as the text that tasks get."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else repr(value)


def _parse_parameter_value(value: Any) -> str:
    return format_env_value(_validate_env_value(value))


def _validate_json_value(value: Any) -> Any:
    """Accept any JSON value whose text every database can store."""
    if isinstance(value, str):
        return _require_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise validation_error("not_finite", _("must contain finite numbers only."))
    if isinstance(value, dict):
        return {
            _require_text(key, _("a mapping with text keys")): _validate_json_value(v)
            for key, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_validate_json_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise validation_error(
        "json_value",
        _(
            "must contain text, numbers, lists and mappings, not %(kind)s.",
            kind=describe_type(value),
        ),
    )


# Durations

_SECONDS_PER_UNIT = {"w": 7 * 86400, "d": 86400, "h": 3600, "m": 60, "s": 1}
_UNIT_DURATION_REGEX = re.compile(
    r"(?:(?P<w>\d{1,9})w)?(?:(?P<d>\d{1,9})d)?(?:(?P<h>\d{1,9})h)?(?:(?P<m>\d{1,9})m(?:in)?)?(?:(?P<s>\d{1,9})s)?"
)
_CLOCK_DURATION_REGEX = re.compile(
    r"(?:(?P<d>\d{1,6})-(?P<h>\d{1,3})(?::(?P<m>\d{1,3})(?::(?P<s>\d{1,3}))?)?"
    r"|(?P<h2>\d{1,9}):(?P<m2>\d{1,3}):(?P<s2>\d{1,3}))"
)


def parse_duration(value: Any) -> int:
    """Parse a duration to seconds: a number, 90m, 2h30m, 02:30:00 or 1-02:00:00 (days-hours:minutes:seconds)."""
    seconds: int | None = None
    if isinstance(value, str):
        text = re.sub(r"\s+", "", value[:100]).lower()
        if clock := _CLOCK_DURATION_REGEX.fullmatch(text):
            # The first letter of a group's name (h, h2, …) is the unit.
            seconds = sum(
                _SECONDS_PER_UNIT[group[0]] * int(number)
                for group, number in clock.groupdict().items()
                if number
            )
        elif text and (units := _UNIT_DURATION_REGEX.fullmatch(text)):
            seconds = sum(
                _SECONDS_PER_UNIT[unit] * int(number or 0)
                for unit, number in units.groupdict().items()
            )
        elif re.fullmatch(r"\d{1,12}", text):
            seconds = int(text)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        seconds = int(value)
    if seconds is None:
        raise validation_error(
            "duration",
            _(
                "must be a length of time: seconds as a number, 90m, 2h30m, 02:30:00 or "
                "1-02:00:00 (days-hours:minutes:seconds)."
            ),
        )
    if not 1 <= seconds <= MAX_DURATION_S:
        raise validation_error("duration", _("must be between one second and ten years."))
    return seconds


def format_duration(seconds: int) -> str:
    """Format seconds in Slurm's format: 02:30:00 or 1-02:00:00."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


Text = Annotated[str, BeforeValidator(_validate_text)]
Line = Annotated[str, BeforeValidator(lambda value: _require_line(value, limit=1024))]
JobName = Annotated[
    str,
    BeforeValidator(_validate_job_name),
    WithJsonSchema({"type": "string", "pattern": JOB_NAME_PATTERN, "maxLength": MAX_NAME_CHARS}),
]
RoleName = Annotated[
    str,
    BeforeValidator(_validate_role_name),
    WithJsonSchema({"type": "string", "pattern": ROLE_NAME_PATTERN, "maxLength": MAX_ROLE_CHARS}),
]
Command = Annotated[
    str, BeforeValidator(_validate_command), WithJsonSchema({"type": "string", "minLength": 1})
]
Image = Annotated[str, BeforeValidator(_validate_image)]
Path = Annotated[str, BeforeValidator(_validate_path)]
GpuType = Annotated[str, BeforeValidator(_validate_gpu_type)]
FrameworkVersion = Annotated[str, BeforeValidator(_validate_framework_version)]
RoleTitle = Annotated[
    str,
    BeforeValidator(lambda value: _require_line(value, limit=MAX_ROLE_CHARS).strip()),
    WithJsonSchema({"type": "string", "maxLength": MAX_ROLE_CHARS}),
]
MEMORY_SCHEMA = WithJsonSchema({"type": ["integer", "string"], "examples": [4096, "4 GB"]})
MountSource = Annotated[str, BeforeValidator(_validate_mount_source)]
MountTarget = Annotated[str, BeforeValidator(_validate_mount_target)]
EnvName = Annotated[str, BeforeValidator(_validate_env_name)]
EnvValue = Annotated[
    EnvScalar,
    BeforeValidator(_validate_env_value),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
ParameterKey = Annotated[str, BeforeValidator(_validate_parameter_key)]
ParameterValue = Annotated[
    str,
    BeforeValidator(_parse_parameter_value),
    WithJsonSchema({"type": ["string", "number", "boolean"]}),
]
FreeValue = Annotated[Any, BeforeValidator(_validate_json_value), WithJsonSchema({})]
Flag = Annotated[bool, BeforeValidator(_parse_flag)]
Duration = Annotated[
    int,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str, when_used="json"),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["2h30m", "1-02:00:00", 3600]}),
]
