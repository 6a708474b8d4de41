"""URLs of the pages."""

from __future__ import annotations

from django.urls import path

from jobs.web import (
    audit,
    clusters,
    home,
    job_list,
    job_page,
    namespaces,
    submit_page,
    template_pages,
)
from jobs.web.layout import choose_namespace

urlpatterns = [
    path("", home.home, name="home"),
    path("home/live", home.home_live, name="home_live"),
    path("namespace", choose_namespace, name="choose_namespace"),
    path("jobs", job_list.job_list, name="jobs"),
    path("jobs/rows", job_list.job_rows, name="job_rows"),
    path("jobs/batch", job_list.batch_action, name="jobs_batch"),
    path("jobs/<uuid:job_id>", job_page.job_page, name="job"),
    path("jobs/<uuid:job_id>/live", job_page.job_live, name="job_live"),
    path("jobs/<uuid:job_id>/do/<slug:verb>", job_page.job_action, name="job_action"),
    path("submit", submit_page.submit_page, name="submit"),
    path("submit/check", submit_page.check_job_file_view, name="submit_check"),
    path("templates", template_pages.template_list, name="templates"),
    path("templates/new", template_pages.template_new, name="template_new"),
    path("templates/check", template_pages.template_check, name="template_check"),
    path("templates/delete", template_pages.delete_templates, name="templates_delete"),
    path("templates/<uuid:template_id>", template_pages.template_edit, name="template"),
    path("templates/<uuid:template_id>/use", template_pages.template_use, name="template_use"),
    path("templates/<uuid:template_id>/copy", template_pages.template_copy, name="template_copy"),
    path("capacity", clusters.capacity_page, name="capacity"),
    path("clusters", clusters.cluster_list, name="clusters"),
    path("clusters/<slug:name>", clusters.cluster_detail, name="cluster"),
    path("clusters/<slug:name>/check", clusters.request_check, name="cluster_check"),
    path("namespaces", namespaces.namespace_list, name="namespaces"),
    path("new-namespace", namespaces.new_namespace, name="namespace_new"),
    path("namespaces/<int:pk>", namespaces.namespace_detail, name="namespace"),
    path("namespaces/<int:pk>/members", namespaces.update_members, name="namespace_members"),
    path("audit", audit.audit, name="audit"),
]
