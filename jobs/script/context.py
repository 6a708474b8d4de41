"""Collects what the functions that render an attempt's files need: spec, plan, options, directories, images. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from core.messages import msg
from jobs.jobfile import JobSpec, TaskRole
from jobs.plan import Plan, RolePlan
from jobs.script.directories import Directories, check_enroot_binds, resolve_directories
from jobs.script.framework_variables import shares_node_memory
from jobs.script.images import ResolvedImage, resolve_image
from jobs.script.paths import AttemptPaths
from jobs.script.render_options import RenderError, RenderOptions


@dataclass(frozen=True, slots=True)
class RenderContext:
    """Everything that decides the content of an attempt's files."""

    spec: JobSpec
    plan: Plan
    paths: AttemptPaths
    options: RenderOptions
    dirs: Directories
    images: tuple[ResolvedImage, ...]  # one per role, in the order of the job file
    # `ResolvedImage.source` → login of the registry: username and password.
    logins: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    shares_node_memory: bool = False  # tasks use /dev/shm of the node

    @property
    def slurm_time_limit_s(self) -> int | None:
        """The time limit that Slurm enforces: it rounds limits up to minutes. None: the partition's."""
        limit_s = self.plan.time_limit_s
        return None if limit_s is None else -(-limit_s // 60) * 60

    @property
    def grace_s(self) -> int:
        """Seconds between SIGTERM and SIGKILL: the job's, or else the cluster's; at most half of the time limit."""
        requested_s = self.spec.grace_period
        grace_s = self.options.grace_s if requested_s is None else requested_s
        limit_s = self.slurm_time_limit_s
        return grace_s if limit_s is None else min(grace_s, limit_s // 2)

    def shm_mib_of(self, role: RolePlan) -> int:
        """Size of /dev/shm of a role's containers; 0: the one of the node."""
        return 0 if self.shares_node_memory else role.shm_mib

    @property
    def runtime_program(self) -> str:
        """The program that starts containers."""
        return self.options.runtime_program or self.options.runtime


def build_context(
    spec: JobSpec,
    plan: Plan,
    paths: AttemptPaths,
    options: RenderOptions,
    *,
    default_image: str,
    image_logins: Mapping[str, Mapping[str, str]],
) -> RenderContext:
    """Resolve the directories, images and registry logins of a job. Raises RenderError.

    The caller has resolved the paths of `spec` (`resolve_paths`). `image_logins` maps the
    name of an image in the job file to the login of its registry.
    """
    dirs = resolve_directories(spec, paths, options=options)
    if options.runtime in ("enroot", "pyxis"):
        check_enroot_binds(dirs.binds)
    images = tuple(
        _resolve_role_image(spec, role, default_image, options) for role in spec.task_roles
    )
    logins = {
        image.source: image_logins[spec.image_of(role)]
        for role, image in zip(spec.task_roles, images, strict=True)
        if spec.image_of(role) in image_logins and image.source.startswith("docker://")
    }
    return RenderContext(spec, plan, paths, options, dirs, images, logins, shares_node_memory(spec))


def _resolve_role_image(
    spec: JobSpec, role: TaskRole, default_image: str, options: RenderOptions
) -> ResolvedImage:
    if options.runtime == "none":
        return ResolvedImage("")
    name = spec.image_of(role) or default_image
    if not name:
        raise RenderError(
            msg(
                "script.role-names-no-container",
                "Role %(name)s has no container image, and the namespace has no default image.",
                name=role.name,
            )
        )
    return replace(resolve_image(name, options), name=name)
