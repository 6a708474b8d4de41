"""Forms for clusters and namespaces, shared by the admin site and the administrators' pages.

In these forms a list has one item per line, and a time has Slurm's format; the database stores JSON and seconds.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _

from clusters.models import Cluster, Namespace, load_capacity

if TYPE_CHECKING:
    ClusterModelForm = forms.ModelForm[Cluster]
    NamespaceModelForm = forms.ModelForm[Namespace]
else:
    ClusterModelForm = NamespaceModelForm = forms.ModelForm

_TIME = re.compile(
    r"(?:(?P<days>\d{1,4})-)?(?P<hours>\d{1,4}):(?P<minutes>\d{2})(?::(?P<seconds>\d{2}))?\Z"
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_AMOUNT = re.compile(r"(?P<number>\d{1,9})\s*(?P<unit>[smhd])\Z")


def parse_time_limit(text: str) -> int:
    """Parse `8:00` (hours and minutes), `08:00:00`, `2-00:00:00`, `90m`, `8h` or `2d` into seconds."""
    text = text.strip()
    if match := _AMOUNT.match(text):
        return int(match["number"]) * _UNITS[match["unit"]]
    if match := _TIME.match(text):
        parts = {name: int(value or 0) for name, value in match.groupdict().items()}
        if parts["minutes"] < 60 and parts["seconds"] < 60:
            return (
                parts["days"] * 86400
                + parts["hours"] * 3600
                + parts["minutes"] * 60
                + parts["seconds"]
            )
    raise ValueError(text)


def format_time_limit(seconds: int) -> str:
    """Format seconds as Slurm does: `D-HH:MM:SS`, or `HH:MM:SS` below one day."""
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


class TimeLimitField(forms.CharField):
    """A form field with text such as `8:00:00`, `2-00:00:00`, `8h` or `2d`; its value is in seconds."""

    def prepare_value(self, value: Any) -> Any:
        return format_time_limit(value) if isinstance(value, int) else value

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        try:
            return parse_time_limit(text)
        except ValueError as error:
            raise ValidationError(
                _("Write a time as 8:00:00, 2-00:00:00 (days first), 90m, 8h or 2d."), code="time"
            ) from error

    def has_changed(self, initial: Any, data: Any) -> bool:
        return super().has_changed(self.prepare_value(initial), data)


class LineListField(forms.CharField):
    """A form field for a list of strings, separated by newlines or commas."""

    widget = forms.Textarea(attrs={"rows": 4, "cols": 40})

    def prepare_value(self, value: Any) -> Any:
        return "\n".join(map(str, value)) if isinstance(value, list) else value

    def to_python(self, value: Any) -> Any:
        if isinstance(value, list):
            return value
        return [item.strip() for item in re.split(r"[\n,]", value or "") if item.strip()]

    def has_changed(self, initial: Any, data: Any) -> bool:
        return bool((initial or []) != self.to_python(data))

    def validate(self, value: Any) -> None:
        if self.required and not value:
            raise ValidationError(self.error_messages["required"], code="required")


class PairsField(LineListField):
    """A form field for a mapping, with one `name = value` per line."""

    def prepare_value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return "\n".join(f"{name} = {target}" for name, target in value.items())
        return value

    def to_python(self, value: Any) -> Any:
        if isinstance(value, dict):
            return value
        pairs = {}
        for line in (value or "").splitlines():
            if not line.strip():
                continue
            name, equals, target = (part.strip() for part in line.partition("="))
            if not (name and equals and target):
                raise ValidationError(
                    _("“%(line)s” does not have the form “name = value”."),
                    code="pair",
                    params={"line": line.strip()[:80]},
                )
            pairs[name] = target
        return pairs

    def has_changed(self, initial: Any, data: Any) -> bool:
        try:
            return bool((initial or {}) != self.to_python(data))
        except ValidationError:
            return True


WIDE_INPUT = {"size": 80}


class ClusterForm(ClusterModelForm):
    image_aliases = PairsField(
        label=_("Image names"),
        required=False,
        help_text=_(
            "One per line: image name in job files = file in the directory of images, absolute "
            "path or another image reference. For example: tensorflow:2.15 = tensorflow-2.15.sif"
        ),
    )
    storages = PairsField(
        label=_("Storages"),
        required=False,
        help_text=_(
            "One per line: storage name in OpenPAI job files, or beginning of a URI = directory on this cluster, "
            "which may start with ~ and contain $USER. For example: teamdata = /data/team, "
            "hdfs://namenode:9000 = /data/hdfs"
        ),
    )
    container_binds = LineListField(
        label=_("Directories in every container"),
        required=False,
        help_text=_("Absolute paths on the compute nodes, one per line."),
    )

    class Meta:
        model = Cluster
        exclude: list[str] = []
        widgets = {
            "host_keys": forms.Textarea(attrs={"rows": 3, "cols": 100}),
            **{
                name: forms.TextInput(attrs=WIDE_INPUT)
                for name in (
                    "title",
                    "host",
                    "key_file",
                    "slurm_bin_dir",
                    "slurm_conf",
                    "work_root",
                    "runtime_program",
                    "images_dir",
                    "image_cache",
                    "default_fs_uri",
                )
            },
        }


class NamespaceForm(NamespaceModelForm):
    """Edits a namespace. Rejects partitions that the cluster's stored capacity does not contain."""

    partitions = LineListField(label=_("Partitions"))
    default_time_s = TimeLimitField(
        label=_("Default time"), required=False, help_text=_("Empty: the partition's default.")
    )
    max_time_s = TimeLimitField(
        label=_("Longest time"), required=False, help_text=_("Empty: the partition's limit.")
    )

    class Meta:
        model = Namespace
        exclude = ["members"]  # edited with their roles in an inline
        widgets = {
            name: forms.TextInput(attrs=WIDE_INPUT)
            for name in ("description", "constraint", "default_image")
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        help_text = str(_("One per line, in order of preference."))
        if self.instance.cluster_id and (names := partition_names(self.instance.cluster)):
            help_text = _("One per line, in order of preference. The cluster has: %(names)s.") % {
                "names": ", ".join(names)
            }
        if "partitions" in self.fields:
            self.fields["partitions"].help_text = help_text

    def clean(self) -> dict[str, Any] | None:
        cleaned = super().clean()
        # Only if changed: a namespace can be deactivated although its partition no longer exists.
        if {"partitions", "cluster"} & set(self.changed_data):
            self._check_partitions()
        return cleaned

    def _check_partitions(self) -> None:
        cluster = self.cleaned_data.get("cluster")
        existing = partition_names(cluster) if cluster else []
        unknown = [name for name in self.cleaned_data.get("partitions", []) if name not in existing]
        if existing and unknown:
            self.add_error(
                "partitions",
                ValidationError(
                    _("The cluster has no partition %(unknown)s. It has: %(known)s."),
                    code="unknown_partition",
                    params={"unknown": ", ".join(unknown), "known": ", ".join(existing)},
                ),
            )


def partition_names(cluster: Cluster) -> list[str]:
    """The partitions of the stored capacity; empty if none was stored yet."""
    capacity = load_capacity(cluster)
    return [partition.name for partition in capacity.partitions] if capacity else []
