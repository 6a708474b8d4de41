"""The job files of a command line: which argument is the code, and the YAML documents of each file."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.client import load_job_file
from sluice.errors import FieldError, Invalid, SluiceError
from sluice.messages import t

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tar.gz", ".tgz")
STDIN = "-"
# YAML allows three hyphens at the beginning of a line nowhere but between documents.
_DOCUMENT_START = re.compile(r"^---(?=\s|\Z)", re.MULTILINE)
_CONTENT = re.compile(r"^(?!\s*(#|%|\.\.\.\s*$|$))", re.MULTILINE)
_JOB_PATH = re.compile(r"\Ajobs\[(?P<index>\d+)\]\.?")


@dataclass(frozen=True, slots=True)
class Document:
    """A job file: a whole file, or one of the YAML documents in it."""

    text: str
    file: str  # for messages: the file, with the number of the document if it has several
    first_line: int = 1  # line of the file with which the text begins


def split_arguments(arguments: Sequence[Path]) -> tuple[list[Path], Path | None]:
    """Separate the job files from the code, which is the last argument if it is a directory or an archive."""
    *files, last = arguments
    if files and _is_code(last):
        return files, last
    return list(arguments), None


def _is_code(path: Path) -> bool:
    if path.is_dir() or path.name.lower().endswith(ARCHIVE_SUFFIXES):
        return True
    return path.is_file() and (zipfile.is_zipfile(path) or tarfile.is_tarfile(path))


def read_documents(files: Sequence[Path]) -> list[Document]:
    """Read all job files. Raises Invalid if one is empty or cannot be read."""
    return [document for file in files for document in _split(file)]


def _split(file: Path) -> Iterator[Document]:
    is_stdin = str(file) == STDIN
    name = "stdin" if is_stdin else str(file)
    text = sys.stdin.read() if is_stdin else str(load_job_file(file))
    starts = [0, *(match.start() for match in _DOCUMENT_START.finditer(text))]
    ends = [*starts[1:], len(text)]
    parts = [(text[start:end], start) for start, end in zip(starts, ends, strict=True)]
    parts = [(part, start) for part, start in parts if _CONTENT.search(_without_marker(part))]
    if not parts:
        raise Invalid(t("{path} contains no job file.", path=name), code="no_job_file")
    if len(parts) == 1:
        yield Document(text, name)
        return
    line, counted = 1, 0
    for number, (part, start) in enumerate(parts, start=1):
        line += text.count("\n", counted, start)
        counted = start
        yield Document(part, f"{name} ({number})", line)


def _without_marker(part: str) -> str:
    return part.removeprefix("---")


def add_file_names(error: SluiceError, documents: Sequence[Document]) -> None:
    """Replace the index in each refusal by the name of the job file and the line in it."""
    error.errors = tuple(_add_file_name(row, documents) for row in error.errors)


def _add_file_name(row: FieldError, documents: Sequence[Document]) -> FieldError:
    match = _JOB_PATH.match(row.path)
    index = row.index if row.index is not None else int(match["index"]) if match else None
    if index is None or index >= len(documents):
        return row
    document = documents[index]
    line = row.line + document.first_line - 1 if row.line else None
    path = row.path[match.end() :] if match else row.path
    return replace(row, index=index, file=document.file, path=path, line=line)
