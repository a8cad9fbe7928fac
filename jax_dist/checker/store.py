"""Remembers the findings of files, so that a file is checked again only once it has changed.

One JSON file. An entry counts only for the same bytes, the same rules, and the same checker; what
cannot be read is as good as empty.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from hashlib import sha1
from typing import Any

import jax_dist
from jax_dist.checker.findings import Code, Edit, Finding, Fix, Position, Safety
from jax_dist.checker.registry import Version
from jax_dist.checker.writing import write

FOLDER = ".jax_dist_cache"

_TAG = """\
Signature: 8a477f597d28d172789f06886806bc55
# This folder holds what jax-dist lint remembers of the files it has checked.
"""


class Store:
    """The findings of earlier runs over the same paths.

    Args:
      folder: where they are kept; made when there is something to keep.
      paths: what the user asked to check; other paths have another memory.
      target: the jax that is asked for.
      files: all files of this run: with one more or one less, names may mean something else.
    """

    def __init__(
        self, folder: str, paths: Sequence[str], target: Version | None, files: Sequence[str]
    ) -> None:
        here = os.getcwd()
        self._folder = folder
        self._path = os.path.join(folder, f"{_hash(here, *paths)[:16]}.json")
        self._context = _hash(
            jax_dist.__version__,
            sys.version,
            ".".join(map(str, target)) if target else "newest",
            _of_checker(),
            here,
            *files,
        )
        self._read, self._entries = _load(self._path, self._context)
        self._fresh: dict[str, list[Any]] = {}

    @staticmethod
    def digest(data: bytes, codes: frozenset[Code]) -> str:
        """Of a file's bytes and the rules that are on in it."""
        print_ = sha1(data, usedforsecurity=False)
        print_.update(",".join(sorted(codes)).encode())
        return print_.hexdigest()

    def get(self, path: str, digest: str) -> list[Finding] | None:
        """The findings of a file, where it is known with these bytes and rules."""
        entry = self._entries.get(path)
        if entry is None or entry[0] != digest:
            return None
        try:
            return [_finding(path, each) for each in entry[1]]
        except (TypeError, ValueError, KeyError):  # somebody wrote into it
            return None

    def put(self, path: str, digest: str, findings: Iterable[Finding]) -> None:
        """Remembers the findings of a file."""
        self._fresh[path] = [digest, [_fields(finding) for finding in findings]]

    def save(self, read: Iterable[str] = ()) -> None:
        """Writes what is new; a folder that cannot be written to is left as it is.

        Args:
          read: files that were looked into while others were checked. When one of them changes,
            nothing that is remembered counts.
        """
        if not self._fresh:
            return
        kept = {
            "context": self._context,
            "read": self._read | {path: _of_file(path) for path in sorted(read)},
            "files": self._entries | self._fresh,
        }
        text = json.dumps(kept, separators=(",", ":"))
        with contextlib.suppress(OSError):  # a memory that is not kept costs time, nothing else
            _make_folder(self._folder)
            write(self._path, text.encode())


def _hash(*texts: str) -> str:
    return sha1("\0".join(texts).encode(), usedforsecurity=False).hexdigest()


def _of_checker() -> str:
    """Changes with every change of the rules, also between releases."""
    folder = os.path.dirname(os.path.abspath(__file__))
    entries: list[str] = []
    for place in (folder, os.path.join(folder, "rules")):
        with os.scandir(place) as files:
            for file in files:
                if file.name.endswith(".py"):
                    status = file.stat()
                    entries.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    return "\n".join(sorted(entries))


def _load(path: str, context: str) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """`(read, files)`: files that others depend on, with their digests; and the findings."""
    try:
        with open(path, "rb") as file:
            kept = json.loads(file.read())
        read, entries = dict(kept["read"]), dict(kept["files"])
        if kept["context"] != context or any(_of_file(each) != read[each] for each in read):
            return {}, {}
        whole = all(isinstance(entry, list) and len(entry) == 2 for entry in entries.values())
        return (read, entries) if whole else ({}, {})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}, {}


def _of_file(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return sha1(file.read(), usedforsecurity=False).hexdigest()
    except OSError:
        return ""


def _make_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    os.makedirs(folder, exist_ok=True)
    for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _TAG)):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)


def _fields(finding: Finding) -> list[Any]:
    fix = finding.fix
    return [
        finding.code,
        finding.name,
        finding.message,
        dataclasses.astuple(finding.start),
        dataclasses.astuple(finding.end),
        finding.span,
        finding.line_text,
        None if fix is None else [*dataclasses.astuple(fix)],
    ]


def _finding(path: str, fields: Sequence[Any]) -> Finding:
    code, name, message, start, end, (first, last), line_text, fix = fields
    return Finding(
        path=path,
        code=code,
        name=name,
        message=message,
        start=Position(*start),
        end=Position(*end),
        span=(first, last),
        line_text=line_text,
        fix=None if fix is None else _fix(fix),
    )


def _fix(fields: Sequence[Any]) -> Fix:
    title, safety, edits, imports, group = fields
    return Fix(
        title=title,
        safety=Safety(safety),
        edits=tuple(Edit(*edit) for edit in edits),
        imports=tuple(imports),
        group=group,
    )
