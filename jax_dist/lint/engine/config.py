"""The settings of a project: `[tool.jax-dist]` in its pyproject.toml."""

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax_dist import _codes
from jax_dist._usage import MisuseError, hint
from jax_dist.lint.findings import Code
from jax_dist.lint.model import sources
from jax_dist.lint.model.sources import Patterns
from jax_dist.lint.rules import Rule, Version

_REQUIREMENTS = ("pyproject.toml", "requirements.txt", "setup.cfg", "setup.py")


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The rules that the settings, or the command line, switch on and off."""

    select: tuple[str, ...] | None = None  # None: keep those that are on by default
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Config(Choice):
    """Settings of a project."""

    folder: str = "."  # the globs of files are relative to it
    file: str | None = None  # where the settings are; None: there are none
    exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    target_jax: Version | None = None  # the oldest jax of the project; None: the newest

    @property
    def excluded(self) -> Patterns:
        return Patterns((*sources.EXCLUDED, *self.exclude), self.folder)


def load(paths: Sequence[str], file: str | None = None) -> Config:
    """Return the settings in `file`, or in the nearest pyproject.toml above all `paths`.

    If `target-jax` is not set, it is the oldest jax that the project requires. MisuseError is
    raised if the file, or a setting in it, cannot be read.
    """
    config = _nearest(paths) if file is None else _read(file)
    if config is None:
        raise MisuseError(f"{file}: has no [tool.jax-dist]")
    if config.target_jax is None:
        config = dataclasses.replace(config, target_jax=_oldest_jax(config.folder))
    return config


def _nearest(paths: Sequence[str]) -> Config:
    """Return the settings in the nearest pyproject.toml that has some; else the defaults."""
    absolute = map(os.path.abspath, paths)
    folders = [path if os.path.isdir(path) else os.path.dirname(path) for path in absolute]
    common = os.path.commonpath(folders) if folders else os.getcwd()
    folders_above = sources.folders_above(common)  # and itself, the nearest first
    for folder in folders_above:
        path = os.path.join(folder, "pyproject.toml")
        config = _read(path) if os.path.isfile(path) else None
        if config is not None:
            return config
    return Config(folder=next(filter(sources.is_project, folders_above), common))


def _read(path: str) -> Config | None:
    """Return the settings in a TOML file; None if it has no table [tool.jax-dist]."""
    try:
        table = tomllib.loads(sources.read_bytes(path).decode())
    except OSError as error:
        raise MisuseError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MisuseError(f"{path}: is not TOML: {error}") from error
    tools = table.get("tool")
    settings = tools.get("jax-dist") if isinstance(tools, dict) else None
    if not isinstance(settings, dict):
        return None
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in _KEYS:
            remedy = hint(key, _KEYS, f"The settings are: {', '.join(sorted(_KEYS))}.")
            raise MisuseError(f"{path}: there is no setting {key!r}. {remedy}")
        try:
            values[key.replace("-", "_")] = _KEYS[key](value)
        except MisuseError as error:
            raise MisuseError(f"{path}: {key}: {error}") from error
    return Config(folder=os.path.dirname(os.path.abspath(path)), file=path, **values)


def _words(value: Any) -> tuple[str, ...]:
    """Return a list of strings as a tuple; raise MisuseError for any other value."""
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise MisuseError(f'must be a list of strings, such as ["JXD1"], not {value!r}')
    return tuple(value)


def _table_of_words(value: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return `{glob: codes}` as pairs; raise MisuseError for any other value."""
    if not isinstance(value, dict):
        raise MisuseError(f'must be a table, such as {{"tests/*" = ["JXD1"]}}, not {value!r}')
    return tuple((glob, _words(codes)) for glob, codes in value.items())


def version(text: Any) -> Version:
    """Return `"0.7.2"` as `(0, 7, 2)`; raise MisuseError if it does not begin with numbers."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip()) if isinstance(text, str) else None
    if match is None:
        raise MisuseError(f"{text!r} is not a version of jax, such as '0.7.2'")
    return tuple(map(int, match[1].split(".")))


_KEYS: dict[str, Callable[[Any], Any]] = {
    "exclude": _words,
    "extend-select": _words,
    "ignore": _words,
    "per-file-ignores": _table_of_words,
    "select": _words,
    "target-jax": version,
}

_JAX = re.compile(  # `jax>=0.5`, and poetry's `jax = {version = "^0.5"}`
    r"(?m)(?:^|[\"'])\s*jax(?:\[[^\]]*\])?\s*(?:=\s*(?:\{\s*version\s*=\s*)?[\"'])?"
    r"\(?(?P<bounds>[<>=~!^][^;#\"')\n]*)"
)
# The lower bounds in them: `0.5` of `>=0.5,<0.7`.
_BOUND = re.compile(r"(?:>=|==|~=|\^|>)\s*(\d+(?:\.\d+)*)")


def _oldest_jax(folder: str) -> Version | None:
    """Return the oldest jax that a project requires: (0, 5) for `jax>=0.5`; None if not said."""
    for path in (os.path.join(folder, name) for name in _REQUIREMENTS):
        try:
            text = sources.read_bytes(path).decode("utf-8", "replace")
        except OSError:
            continue
        # Of each requirement, such as `jax>=0.4,>=0.5`, the highest of the lower bounds.
        lower_bounds = (_BOUND.findall(match["bounds"]) for match in _JAX.finditer(text))
        oldest = [max(map(version, versions)) for versions in lower_bounds if versions]
        if oldest:
            return min(oldest)
    return None


def select_rules(choices: Sequence[Choice], rules: Collection[Rule]) -> frozenset[Code]:
    """Return the codes of the rules that are on after all choices; a later choice wins.

    Within a choice the narrower selector wins: `--select JXD101 --ignore JXD1` keeps JXD101.
    """
    on = {rule.code for rule in rules if rule.default}
    for choice in choices:
        if choice.select == ():
            raise MisuseError('select names no rule; select = ["ALL"] has all, ignore drops some')
        if choice.select is not None:
            on = {_codes.SYNTAX_ERROR}  # else a file that was not checked would look clean
        selectors = (*(choice.select or ()), *choice.extend_select)
        switches = [(resolve(selector, rules), True) for selector in selectors]
        switches += [(resolve(selector, rules), False) for selector in choice.ignore]
        # The widest first; of equally wide ones, those that turn on.
        switches.sort(key=lambda switch: (-len(switch[0]), not switch[1]))
        for codes, turns_on in switches:
            on = on | codes if turns_on else on - codes
    return frozenset(on)


def resolve(selector: str, rules: Collection[Rule]) -> frozenset[Code]:
    """Return the codes that a selector names: a code or its beginning, a rule's name, or ALL.

    Raises MisuseError if it names none.
    """
    upper = selector.upper()
    codes = frozenset(
        rule.code
        for rule in rules
        if upper == "ALL"
        or (upper.startswith("JXD") and rule.code.startswith(upper))
        or rule.name == selector.lower()
    )
    if not codes:
        names = [name for rule in rules for name in (rule.code, rule.name)]
        word = upper if upper.startswith("JXD") else selector.lower()
        remedy = hint(word, names, "docs/rules.md lists the rules.")
        raise MisuseError(f"no rule is called {selector!r}. {remedy}")
    return codes
