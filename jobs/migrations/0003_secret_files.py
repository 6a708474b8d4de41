from django.apps.registry import Apps
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


def mark_attempts_with_secrets(apps: Apps, _schema_editor: BaseDatabaseSchemaEditor) -> None:
    """The files of attempts that have ended are still there: let the engine remove them."""
    attempts = apps.get_model("jobs", "Attempt").objects
    attempts.filter(job__has_secrets=True).update(secret_files="present")


class Migration(migrations.Migration):
    dependencies = [
        ("clusters", "0002_image_files"),
        ("jobs", "0002_job_file_effects"),
    ]

    operations = [
        migrations.AddField(
            model_name="attempt",
            name="secret_files",
            field=models.CharField(
                blank=True,
                choices=[
                    ("", "none"),
                    ("present", "present"),
                    ("wanted", "to be written again"),
                ],
                default="",
                max_length=7,
                verbose_name="files with secrets",
            ),
        ),
        migrations.RunPython(mark_attempts_with_secrets, migrations.RunPython.noop),
        migrations.AddIndex(
            model_name="attempt",
            index=models.Index(
                condition=models.Q(("secret_files", ""), _negated=True),
                fields=["cluster", "phase"],
                name="attempt_secret_files",
            ),
        ),
    ]
