"""Templates: saved job files with parameters, private, for a namespace or public.

Decides who may use and change a template. A change names the version on which it is based, so that of two
concurrent changes the second fails. The job file is stored as given, in any dialect.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from django.db.models import Q, QuerySet
from django.utils import timezone

from clusters.access import Role, can_administer, has_role, namespaces_visible_to
from clusters.models import Namespace
from core.errors import InvalidValue, NotAllowed, NotFound, VersionConflict
from core.messages import _, join_messages
from jobs import actions
from jobs.jobfile import SpecError, to_document
from jobs.jobfile.parameters import (
    MAX_PARAMETERS,
    TemplateParameter,
    check_parameters,
    fill_template,
)
from jobs.models import Job, JobTemplate
from jobs.offload import load_document, parse_text
from jobs.store.submitter import Submitter
from jobs.submission import JobFileSource, SubmissionRequest, parse_submission

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser

    from accounts.models import User

Visibility = JobTemplate.Visibility


def templates_visible_to(user: User | AnonymousUser) -> QuerySet[JobTemplate]:
    if not user.is_authenticated or not user.is_active:
        return JobTemplate.objects.none()
    if user.is_superuser:
        return JobTemplate.objects.all()
    return JobTemplate.objects.filter(
        Q(owner=user)
        | Q(visibility=Visibility.PUBLIC)
        | Q(visibility=Visibility.NAMESPACE, namespace__in=namespaces_visible_to(user).values("pk"))
    )


def can_edit_template(user: User, template: JobTemplate) -> bool:
    """Allow the owner, superusers and, for a template of a namespace, that namespace's administrators."""
    if user.is_superuser or template.owner_id == user.pk:
        return True
    return (
        template.visibility == Visibility.NAMESPACE
        and template.namespace is not None
        and can_administer(user, template.namespace)
    )


def find_template(*, id: uuid.UUID, by: User) -> JobTemplate:
    found = templates_visible_to(by).select_related("owner", "namespace").filter(pk=id).first()
    if found is None:
        raise NotFound(_("The template does not exist, or you may not see it."), template=str(id))
    return found


def parse_template_text(text: str) -> dict[str, Any]:
    """Parse a job file of any dialect into the document that a template stores."""
    document = parse_text(text).document
    if not isinstance(document, dict):
        raise SpecError.single("", _("must be a mapping of fields."), code="not_a_mapping")
    return document


def build_document_from_job(job: Job) -> dict[str, Any]:
    """Return the job's job file, without the reference to uploaded code."""
    document = to_document(actions.load_spec(job))
    if document.get("code", {}).get("selector") == "codeFile":
        document.pop("code")
    return document


def find_declared_parameters(document: Mapping[str, Any]) -> list[TemplateParameter]:
    """Return the parameters that an OpenPAI v2 file declares; used if the template itself declares none."""
    declared = document.get("parameters")
    if "protocolVersion" not in document or not isinstance(declared, Mapping):
        return []
    parameters = []
    for name, value in declared.items():
        if isinstance(value, bool):
            parameters.append(TemplateParameter(str(name), kind="flag", default=value))
        elif isinstance(value, int | float):
            parameters.append(TemplateParameter(str(name), kind="number", default=value))
        elif isinstance(value, str):
            parameters.append(TemplateParameter(str(name), default=value))
    return parameters


def _validate_template(
    document: Mapping[str, Any], parameters: Sequence[TemplateParameter]
) -> None:
    """Check that the template gives a valid job file if each parameter has its default or a sample value."""
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidValue(
            _("A template may have at most %(limit)s parameters.", limit=MAX_PARAMETERS),
            most=MAX_PARAMETERS,
        )
    check_parameters(parameters, document)
    sample_values = {parameter.name: parameter.sample_value() for parameter in parameters}
    loaded = load_document(fill_template(document, parameters, sample_values))
    if loaded.secrets or loaded.image_logins:
        raise SpecError.single(
            "secrets",
            _("templates do not store secret values; enter them when you submit a job."),
            code="secret_in_template",
        )


def _resolve_namespace(name: str | None, visibility: str, by: User) -> Namespace | None:
    if not name:
        if visibility == Visibility.NAMESPACE:
            raise InvalidValue(_("A template for a namespace must name it."), field="namespace")
        return None
    visible = namespaces_visible_to(by)
    found = visible.filter(name=name).first()
    if found is None:
        near = get_close_matches(name, visible.values_list("name", flat=True)[:200], n=1)
        hint = _('Did you mean "%(suggestion)s"?', suggestion=near[0]) if near else ""
        raise InvalidValue(
            join_messages(_("You are not a member of namespace %(name)s.", name=name), hint),
            namespace=name,
        )
    if visibility == Visibility.NAMESPACE and not has_role(by, found, at_least=Role.MEMBER):
        raise NotAllowed(
            _("Only members may keep templates in namespace %(name)s.", name=name), namespace=name
        )
    return found


def create_template(
    *,
    by: User,
    name: str,
    document: Mapping[str, Any],
    parameters: Sequence[TemplateParameter] = (),
    description: str = "",
    visibility: str = Visibility.PRIVATE,
    namespace: str | None = None,
) -> JobTemplate:
    declared = list(parameters) or find_declared_parameters(document)
    _validate_template(document, declared)
    return JobTemplate.objects.create(
        owner=by,
        name=name,
        description=description,
        visibility=visibility,
        namespace=_resolve_namespace(namespace, visibility, by),
        spec=dict(document),
        parameters=[parameter.to_json() for parameter in declared],
    )


def change_template(
    *, template: JobTemplate, by: User, version: int, changes: Mapping[str, Any]
) -> JobTemplate:
    """Change a template that still has the given version.

    `changes` may contain name, description, visibility, namespace, document and parameters.
    """
    if not can_edit_template(by, template):
        raise NotAllowed(_("You may use this template, but not change it. Copy it first."))
    values = dict(changes)
    visibility = values.get("visibility", template.visibility)
    # `_resolve_namespace` refuses an owner who is no longer a member of the template's namespace.
    if visibility == Visibility.NAMESPACE or "namespace" in values:
        current = template.namespace.name if template.namespace else None
        values["namespace"] = _resolve_namespace(values.get("namespace", current), visibility, by)
    if "document" in values:
        values["spec"] = dict(values.pop("document"))
    document = values.get("spec", template.spec)
    parameters = values.get("parameters")
    if parameters is None:
        parameters = parameters_from_json(template.parameters)
    _validate_template(document, parameters)
    values["parameters"] = [parameter.to_json() for parameter in parameters]
    # The condition on the version lets only one of two concurrent changes succeed.
    changed = JobTemplate.objects.filter(pk=template.pk, version=version).update(
        **values, version=version + 1, updated_at=timezone.now()
    )
    if not changed:
        raise VersionConflict(
            _(
                "Someone changed this template since you opened it. Load it again and repeat your change."
            ),
            version=version,
        )
    template.refresh_from_db()
    return template


def parameters_from_json(rows: Sequence[Mapping[str, Any]]) -> list[TemplateParameter]:
    return [TemplateParameter.from_json(row) for row in rows]


def copy_template(*, template: JobTemplate, by: User, name: str = "") -> JobTemplate:
    """Create a private copy that belongs to the person."""
    return JobTemplate.objects.create(
        owner=by,
        name=(name or f"{template.name} (2)")[:120],
        description=template.description,
        spec=template.spec,
        parameters=template.parameters,
    )


def delete_template(*, template: JobTemplate, by: User) -> None:
    if not can_edit_template(by, template):
        raise NotAllowed(_("You may use this template, but not delete it."))
    JobTemplate.objects.filter(pk=template.pk).delete()


def build_submission(
    *,
    template: JobTemplate,
    submitter: Submitter,
    values: Mapping[str, Any],
    name: str = "",
    namespace: str = "",
    secrets: Mapping[str, str] | None = None,
    code_digest: str = "",
) -> SubmissionRequest:
    """Fill in the parameters and parse the resulting job file as a submission of the person."""
    document = fill_template(template.spec, parameters_from_json(template.parameters), values)
    source = JobFileSource(
        document=document,
        secrets=secrets or {},
        code_digest=code_digest,
        name=name,
        namespace=namespace,
        unique_name=not name,
    )
    return parse_submission(submitter, source)
