"""Python client of Sluice: submit jobs to a Slurm cluster, follow them and download results, over HTTP."""

from __future__ import annotations

from sluice.client import Client, create_token
from sluice.errors import (
    CannotRun,
    Conflict,
    FieldError,
    Forbidden,
    Invalid,
    NotConfigured,
    NotFound,
    ServerFailed,
    SluiceError,
    Throttled,
    TooLarge,
    Unauthorized,
    Unreachable,
    WaitTimeout,
)
from sluice.frameworks import (
    HorovodJob,
    MindSporeJob,
    MPIJob,
    MXNetJob,
    PaddleJob,
    PyTorchJob,
    TensorFlowJob,
    XGBoostJob,
)
from sluice.logs import LogStream
from sluice.values import File, Job, Plan, Reason, Task, Template, Token
from sluice.version import VERSION

__version__ = VERSION

__all__ = [
    "CannotRun",
    "Client",
    "Conflict",
    "FieldError",
    "File",
    "Forbidden",
    "HorovodJob",
    "Invalid",
    "Job",
    "LogStream",
    "MPIJob",
    "MXNetJob",
    "MindSporeJob",
    "NotConfigured",
    "NotFound",
    "PaddleJob",
    "Plan",
    "PyTorchJob",
    "Reason",
    "ServerFailed",
    "SluiceError",
    "Task",
    "Template",
    "TensorFlowJob",
    "Throttled",
    "Token",
    "TooLarge",
    "Unauthorized",
    "Unreachable",
    "WaitTimeout",
    "XGBoostJob",
    "__version__",
    "create_token",
]
