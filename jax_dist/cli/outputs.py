"""Files that a command writes: a new one, or its own of an earlier run, and never anything else."""

import json
import os
import re
from collections.abc import Callable
from typing import Any

from jax_dist import _files, _notes
from jax_dist._usage import MisuseError

_LINT_TEXT = re.compile(
    rb"::(?:error|warning|notice) title=jax-dist"  # for GitHub
    rb"|[^\n]*:\d+:\d+: (?:\x1b\[[\d;]*m)?JXD\d{3}\b| *\d+  JXD\d{3} |No findings\.\s*\Z"
)


def _is_baseline(data: bytes, found: Any) -> bool:
    return _has(found, "version", "findings") and isinstance(found["findings"], dict)


def _is_lint_report(data: bytes, found: Any) -> bool:
    if isinstance(found, list):
        return all(_has(each, "path", "code", "fix") for each in found)
    return bool(_LINT_TEXT.match(data)) or _is_sarif(found)


def _is_migration_report(data: bytes, found: Any) -> bool:
    return data.startswith(b"# Migration to ") or _has(found, "schema", "to")


def _is_sarif(found: Any) -> bool:
    try:
        return found["runs"][0]["tool"]["driver"]["name"] == "jax-dist"
    except (TypeError, LookupError):
        return False


def _has(found: Any, *keys: str) -> bool:
    return isinstance(found, dict) and set(keys) <= found.keys()


def _is_plan(data: bytes, found: Any) -> bool:
    return data.startswith(b"<svg ") and b"<title>Memory of one device at the peak of" in data


_KINDS: dict[str, Callable[[bytes, Any], bool]] = {  # takes the bytes, and their JSON or None
    "a baseline": _is_baseline,
    "a picture of jax-dist plan": _is_plan,
    "a report of jax-dist lint": _is_lint_report,
    "a report of jax-dist migrate": _is_migration_report,
}


def check(option: str, path: str, kind: str) -> None:
    """Asks before the work whether `save` will overwrite a file.

    Raises:
      MisuseError: what is there is not of this kind, or its folder cannot be written to.
    """
    if _is_stream(path):
        return
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        is_file = os.path.exists(folder)
        why = f"{folder} is no folder" if is_file else f"there is no folder {folder}: make it first"
        raise MisuseError(f"{option} {path} cannot be written: {why}")
    if not os.path.exists(path):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise MisuseError(f"{option} {path} cannot be written: {folder} may not be written to")
        return
    if os.path.isdir(path):
        raise MisuseError(f"{option} {path} cannot be written: it is a folder")
    try:
        data = _notes.content(path)
    except OSError as error:
        raise MisuseError(f"{option} {path} cannot be written: {error.strerror}") from error
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if data.strip() and not _KINDS[kind](data, found):
        there = next((name for name, is_one in _KINDS.items() if is_one(data, found)), None)
        raise MisuseError(
            f"{option} {path}: the file is {there or _described(path, data, found)}, not {kind}, "
            "and is left as it is. Give another name, or remove it first."
        )


def save(option: str, path: str, text: str, kind: str) -> None:
    """Writes a file as a whole, over nothing but an earlier one of this kind, as `check` knows it.

    A device or pipe is written to. `option` asked for it, as in `--report`.

    Raises:
      MisuseError: something else is there, or it cannot be written.
    """
    check(option, path, kind)
    try:
        if _is_stream(path):
            with open(path, "ab") as stream:
                stream.write(text.encode())
        else:
            _files.write_atomically(path, text)
    except OSError as error:
        reason = error.strerror or error
        raise MisuseError(f"{option} {path} cannot be written: {reason}") from error


def _is_stream(path: str) -> bool:
    """A device or a pipe, such as /dev/stdout."""
    if path.startswith("/dev/"):  # also /dev/stdout where the shell has led it to a file
        return True
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))


def _described(path: str, data: bytes, found: Any) -> str:
    if path.endswith((".py", ".pyi")):
        return "Python source"
    if path.endswith(".ipynb"):
        return "a notebook"
    if found is not None:
        return "other JSON"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "a binary file"
    return "other text"
