"""URLs below `/api/v1/`."""

from __future__ import annotations

from django.urls import path, re_path

from jobs.api import catalog, files, job_parts, jobs, logs, templates, uploads

app_name = "api"
urlpatterns = [
    path("jobs", jobs.JobListView.as_view(), name="jobs"),
    path("jobs/plan", jobs.JobPlanView.as_view(), name="jobs-plan"),
    path("jobs/batch/stop", jobs.JobBatchStopView.as_view(), name="jobs-batch-stop"),
    path("jobs/batch/delete", jobs.JobBatchDeleteView.as_view(), name="jobs-batch-delete"),
    path("jobs/<uuid:id>", jobs.JobDetailView.as_view(), name="job"),
    path("jobs/<uuid:id>/stop", jobs.JobStopView.as_view(), name="job-stop"),
    path("jobs/<uuid:id>/release", jobs.JobReleaseView.as_view(), name="job-release"),
    path("jobs/<uuid:id>/retry", jobs.JobRetryView.as_view(), name="job-retry"),
    path("jobs/<uuid:id>/clone", jobs.JobCloneView.as_view(), name="job-clone"),
    path("jobs/<uuid:id>/spec", job_parts.JobSpecView.as_view(), name="job-spec"),
    path("jobs/<uuid:id>/script", job_parts.JobScriptView.as_view(), name="job-script"),
    path("jobs/<uuid:id>/events", job_parts.JobEventListView.as_view(), name="job-events"),
    path("jobs/<uuid:id>/tasks", job_parts.JobTaskListView.as_view(), name="job-tasks"),
    path("jobs/<uuid:id>/attempts", job_parts.JobAttemptListView.as_view(), name="job-attempts"),
    path("jobs/<uuid:id>/files", files.JobFileListView.as_view(), name="job-files"),
    path("jobs/<uuid:id>/files/download", files.JobFileDownloadView.as_view(), name="job-file"),
    path("jobs/<uuid:id>/files/tar", files.JobFilesTarView.as_view(), name="job-files-tar"),
    path("jobs/<uuid:id>/logs", logs.LogListView.as_view(), name="job-logs"),
    path("jobs/<uuid:id>/logs/<str:role>/<int:index>", logs.LogReadView.as_view(), name="job-log"),
    path(
        "jobs/<uuid:id>/logs/<str:role>/<int:index>/download",
        logs.LogDownloadView.as_view(),
        name="job-log-download",
    ),
    path("templates", templates.TemplateListView.as_view(), name="templates"),
    path(
        "templates/batch/delete",
        templates.TemplateBatchDeleteView.as_view(),
        name="templates-batch-delete",
    ),
    path("templates/<uuid:id>", templates.TemplateDetailView.as_view(), name="template"),
    path("templates/<uuid:id>/copy", templates.TemplateCopyView.as_view(), name="template-copy"),
    path(
        "templates/<uuid:id>/submit", templates.TemplateSubmitView.as_view(), name="template-submit"
    ),
    path("uploads", uploads.UploadListView.as_view(), name="uploads"),
    re_path(
        r"^uploads/(?P<sha256>[0-9a-f]{64})$", uploads.UploadDetailView.as_view(), name="upload"
    ),
    path("namespaces", catalog.NamespaceListView.as_view(), name="namespaces"),
    path("clusters", catalog.ClusterListView.as_view(), name="clusters"),
    path("capacity", catalog.CapacityView.as_view(), name="capacity"),
    path("specs", catalog.SizeListView.as_view(), name="specs"),
    path("frameworks", catalog.FrameworkListView.as_view(), name="frameworks"),
    path("me", catalog.CurrentUserView.as_view(), name="me"),
    path("job-file-schema", catalog.JobFileSchemaView.as_view(), name="job-file-schema"),
]
