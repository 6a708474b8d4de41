"""Addresses below `/api/v1/`."""

from __future__ import annotations

from django.urls import path, re_path

from jobs.api import catalog, files, jobs, logs, templates, uploads

app_name = "api"
urlpatterns = [
    path("jobs", jobs.Jobs.as_view(), name="jobs"),
    path("jobs/plan", jobs.JobsPlan.as_view(), name="jobs-plan"),
    path("jobs/batch/stop", jobs.BatchStop.as_view(), name="jobs-batch-stop"),
    path("jobs/batch/delete", jobs.BatchDelete.as_view(), name="jobs-batch-delete"),
    path("jobs/<uuid:id>", jobs.OneJob.as_view(), name="job"),
    path("jobs/<uuid:id>/stop", jobs.JobStop.as_view(), name="job-stop"),
    path("jobs/<uuid:id>/retry", jobs.JobRetry.as_view(), name="job-retry"),
    path("jobs/<uuid:id>/clone", jobs.JobClone.as_view(), name="job-clone"),
    path("jobs/<uuid:id>/spec", jobs.JobSpecView.as_view(), name="job-spec"),
    path("jobs/<uuid:id>/script", jobs.JobScript.as_view(), name="job-script"),
    path("jobs/<uuid:id>/events", jobs.JobEvents.as_view(), name="job-events"),
    path("jobs/<uuid:id>/tasks", jobs.JobTasks.as_view(), name="job-tasks"),
    path("jobs/<uuid:id>/attempts", jobs.JobAttempts.as_view(), name="job-attempts"),
    path("jobs/<uuid:id>/files", files.JobFiles.as_view(), name="job-files"),
    path("jobs/<uuid:id>/files/download", files.JobFileDownload.as_view(), name="job-file"),
    path("jobs/<uuid:id>/files/tar", files.JobFilesTar.as_view(), name="job-files-tar"),
    path("jobs/<uuid:id>/logs", logs.LogList.as_view(), name="job-logs"),
    path("jobs/<uuid:id>/logs/<str:role>/<int:index>", logs.LogBytes.as_view(), name="job-log"),
    path(
        "jobs/<uuid:id>/logs/<str:role>/<int:index>/download",
        logs.LogDownload.as_view(),
        name="job-log-download",
    ),
    path("templates", templates.Templates.as_view(), name="templates"),
    path("templates/batch/delete", templates.BatchDelete.as_view(), name="templates-batch-delete"),
    path("templates/<uuid:id>", templates.OneTemplate.as_view(), name="template"),
    path("templates/<uuid:id>/copy", templates.TemplateCopy.as_view(), name="template-copy"),
    path("templates/<uuid:id>/submit", templates.TemplateSubmit.as_view(), name="template-submit"),
    path("uploads", uploads.Uploads.as_view(), name="uploads"),
    re_path(r"^uploads/(?P<sha256>[0-9a-f]{64})$", uploads.OneUpload.as_view(), name="upload"),
    path("namespaces", catalog.Namespaces.as_view(), name="namespaces"),
    path("clusters", catalog.Clusters.as_view(), name="clusters"),
    path("capacity", catalog.CapacityView.as_view(), name="capacity"),
    path("specs", catalog.Sizes.as_view(), name="specs"),
    path("me", catalog.Me.as_view(), name="me"),
    path("job-file-schema", catalog.JobFileSchema.as_view(), name="job-file-schema"),
]
