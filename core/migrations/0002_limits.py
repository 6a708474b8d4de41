from django.db import migrations, models


def set_unlogged(apps, schema_editor):
    # An update of an unlogged table writes no WAL and so does not wait for the disk. PostgreSQL empties such tables after
    # a crash, which refills all rate limits.
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute("ALTER TABLE core_ratebucket SET UNLOGGED")
        schema_editor.execute("ALTER TABLE core_atoncecount SET UNLOGGED")


class Migration(migrations.Migration):
    dependencies = [
        ("core", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="RateBucket",
            fields=[
                ("key", models.CharField(max_length=100, primary_key=True, serialize=False)),
                ("level", models.FloatField()),
                ("granted", models.IntegerField()),
                ("updated_at", models.FloatField()),
            ],
        ),
        migrations.CreateModel(
            name="AtOnceCount",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("process", models.CharField(max_length=32)),
                ("key", models.CharField(max_length=100)),
                ("count", models.IntegerField()),
                ("sequence", models.BigIntegerField()),
                ("expires_at", models.FloatField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("key", "process"), name="at_once_count_once")
                ],
            },
        ),
        migrations.RunPython(set_unlogged, migrations.RunPython.noop),
    ]
