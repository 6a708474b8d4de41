"""A request with an Idempotency-Key may create several jobs: the key's row has a list of ids."""

from typing import Any

import django.db.models
from django.db import migrations


def copy_results(apps: Any, schema_editor: Any) -> None:
    keys = apps.get_model("core", "IdempotencyKey").objects.filter(result_id__isnull=False)
    for row in keys.only("pk", "result_id").iterator(chunk_size=1000):
        keys.filter(pk=row.pk).update(result_ids=[str(row.result_id)])


class Migration(migrations.Migration):
    dependencies = [("core", "0002_limits")]

    operations = [
        migrations.AddField(
            "idempotencykey",
            "result_ids",
            django.db.models.JSONField(default=list, verbose_name="results"),
        ),
        migrations.RunPython(copy_results, migrations.RunPython.noop),
        migrations.RemoveField("idempotencykey", "result_id"),
    ]
