"""Versions of frameworks in names of images."""

from __future__ import annotations

import pytest

from jobs.jobfile.framework_images import list_framework_images, read_version


@pytest.mark.parametrize(
    ("framework", "image", "version"),
    [
        ("tensorflow", "tensorflow:2.15", "2.15"),
        ("tensorflow", "tensorflow_2.15.sif", "2.15"),
        ("tensorflow", "TF-2.15.0-gpu.sqsh", "2.15.0-gpu"),
        ("tensorflow", "docker://tensorflow/tensorflow:2.15.0", "2.15.0"),
        ("tensorflow", "tensorflow_tensorflow_2.15.0.sif", "2.15.0"),
        ("pytorch", "nvcr.io/nvidia/pytorch:24.01-py3", "24.01-py3"),
        ("pytorch", "torch_v2.3.1.sif", "2.3.1"),
        ("pytorch", "tensorflow:2.15", ""),
        ("tensorflow", "tensorflow:latest", ""),
        ("tensorflow", "tensorflow", ""),
        ("tensorflow", "horovod_tensorflow_2.15.sif", ""),
        ("tensorflow", "mytensorflow:2.15", ""),
        ("tensorflow", "registry:5000/train:2.15", ""),
    ],
)
def test_version_is_read_from_the_name(framework: str, image: str, version: str) -> None:
    assert read_version(framework, image) == version


def test_images_are_listed_newest_first_and_once_per_version() -> None:
    names = [
        "tensorflow:2.9",
        "tensorflow:2.15",
        "tensorflow_2.15.sif",
        "busybox.sif",
        "torch_2.3.sif",
    ]
    rows = [(row.framework, row.version, row.image) for row in list_framework_images(names)]
    assert rows == [
        ("pytorch", "2.3", "torch_2.3.sif"),
        ("tensorflow", "2.15", "tensorflow:2.15"),
        ("tensorflow", "2.9", "tensorflow:2.9"),
    ]
