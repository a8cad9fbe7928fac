"""Which jax a project asks for, read from the files where projects say so."""

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from jax_dist._usage import MisuseError

Version = tuple[int, ...]

_JAX = re.compile(r"\s*jax(?![\w.-])\s*(?:\[[^\]]*\])?\s*\(?(?P<bounds>[^;#@)]*)", re.IGNORECASE)
_BOUND = re.compile(r"(?P<sign>>=|==|~=|\^|~|>)\s*(?P<version>\d+(?:\.\d+)*)")


def version(text: str) -> Version:
    """`"0.7.2"` as `(0, 7, 2)`; also `"0.7.2.dev1"` and `"0.7.2rc0"`.

    Raises:
      MisuseError: it does not begin with numbers.
    """
    match = re.fullmatch(r"v?(\d+(?:\.\d+)*)(?:[.a-z+-].*)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise MisuseError(f"{text!r} is not a version of jax, such as 0.7.2")
    return tuple(map(int, match[1].split(".")))


def lower_bound(folder: str) -> Version | None:
    """The oldest jax with which the project in `folder` says to work; None where it is silent.

    Of several requirements (for several Pythons, say) the lowest counts.
    """
    for read in (_of_pyproject, _of_requirements, _of_setup_cfg, _of_setup_py):
        bounds = [bound for text in read(folder) if (bound := _bound(text)) is not None]
        if bounds:
            return min(bounds)
    return None


def _bound(requirement: str) -> Version | None:
    match = _JAX.match(requirement)
    if match is None:
        return None
    signs = _BOUND.finditer(match["bounds"])
    return max((version(sign["version"]) for sign in signs), default=None)


def _of_pyproject(folder: str) -> Iterator[str]:
    text = _text(os.path.join(folder, "pyproject.toml"))
    if "jax" not in text:
        return
    import tomllib  # only here: it is slow to load, and many projects say nothing of jax

    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return  # the settings are read from this file too, and complain there
    yield from _strings(_at(table, "project", "dependencies"))
    poetry = _at(table, "tool", "poetry", "dependencies", "jax")
    if isinstance(poetry, dict):
        poetry = poetry.get("version")
    if isinstance(poetry, str):
        yield f"jax {poetry}"


def _of_requirements(folder: str) -> Iterable[str]:
    return _text(os.path.join(folder, "requirements.txt")).splitlines()


def _of_setup_cfg(folder: str) -> Iterator[str]:
    text = _text(os.path.join(folder, "setup.cfg"))
    if "jax" not in text:
        return
    import configparser  # only here: most projects have no such file

    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return
    yield from parser.get("options", "install_requires", fallback="").splitlines()


def _of_setup_py(folder: str) -> Iterator[str]:
    """The strings that begin like a requirement; the file is not run."""
    text = _text(os.path.join(folder, "setup.py"))
    if "jax" not in text:
        return
    import ast

    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _at(table: Any, *keys: str) -> Any:
    for key in keys:
        if not isinstance(table, dict):
            return None
        table = table.get(key)
    return table


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
