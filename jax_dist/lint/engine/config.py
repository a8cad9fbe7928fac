"""The settings of a project: `[tool.jax-dist]` in pyproject.toml, or a file jax-dist.toml.

Which jax the project asks for is read too, from the files where projects say so.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax_dist import _codes
from jax_dist._usage import MisuseError, hint
from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Code
from jax_dist.lint.model.sources import Patterns
from jax_dist.lint.rules import Page, Version

_ALWAYS: Code = _codes.SYNTAX_ERROR  # what cannot be parsed was not checked, so it must be said


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """What one place (the settings, or the command line) asks for."""

    select: tuple[str, ...] | None = None  # None: nothing is said
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Config:
    """What a project has set; paths in it are joined to the folder of its file."""

    folder: str  # from which patterns and paths are seen
    file: str | None = None  # None: nothing is set
    select: tuple[str, ...] | None = None
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = sources.EXCLUDED
    extend_exclude: tuple[str, ...] = ()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    target_jax: Version | None = None  # None: the newest
    project_roots: tuple[str, ...] = ()
    baseline: str | None = None

    @property
    def choice(self) -> Choice:
        return Choice(self.select, self.extend_select, self.ignore)

    @property
    def excluded(self) -> Patterns:
        return Patterns((*self.exclude, *self.extend_exclude), self.folder)

    def ignores(self, pages: Mapping[Code, Page]) -> tuple[tuple[Patterns, frozenset[Code]], ...]:
        """The codes that are off in some files. Raises MisuseError where one names no rule."""
        return tuple(
            (
                Patterns((glob,), self.folder),
                frozenset().union(*(_known(code, pages) for code in codes)),
            )
            for glob, codes in self.per_file_ignores
        )

    def check_codes(self, pages: Mapping[Code, Page]) -> None:
        """Raises MisuseError where a setting names a rule that does not exist."""
        asked = {"select": self.select or (), "extend-select": self.extend_select}
        asked |= {"ignore": self.ignore}
        asked |= {f'per-file-ignores."{glob}"': codes for glob, codes in self.per_file_ignores}
        for key, selectors in asked.items():
            for selector in selectors:
                try:
                    _known(selector, pages)
                except MisuseError as error:
                    raise MisuseError(f"{self.file}: {key}: {error}") from error


_MISSPELT = ("jax_dist", "jaxdist", "jax-dist")  # the last without `tool`
_OURS = re.compile(rb"jax[-_]?dist")
_FILES = ("jax-dist.toml", "pyproject.toml")
_MARKS = (*sources.PROJECT_MARKS, "requirements.txt")


def load(paths: Sequence[str], file: str | None = None) -> Config:
    """The settings for `paths`: of `file`, or of the nearest file above all of them.

    Where `target-jax` is not set, it is the oldest jax that the project says to work with.

    Raises:
      MisuseError: the file cannot be read, or a setting cannot be.
    """
    config = _near(paths) if file is None else _read(file, required=True)
    if config.target_jax is not None:
        return config
    return dataclasses.replace(config, target_jax=lower_bound(config.folder))


def _near(paths: Sequence[str]) -> Config:
    folders = [
        path if os.path.isdir(path) else os.path.dirname(path)
        for path in map(os.path.abspath, paths)
    ]
    try:
        folder = os.path.commonpath(folders) if folders else os.getcwd()
    except ValueError:  # Windows: several drives
        folder = os.getcwd()
    above = list(sources.folders_above(folder))
    for path in (os.path.join(place, name) for place in above for name in _FILES):
        if os.path.isfile(path):
            config = _read(path, required=False)
            if config.file is not None:
                return config
    # Nothing is set: the nearest folder that looks like the top of a project.
    tops = (
        place for place in above if any(os.path.exists(f"{place}{os.sep}{mark}") for mark in _MARKS)
    )
    return Config(next(tops, folder))


def _read(path: str, *, required: bool) -> Config:
    folder = os.path.dirname(os.path.abspath(path))
    table = _table(path, required=required)
    tool = table.get("tool")
    tool = tool if isinstance(tool, dict) else {}
    ours = tool.get("jax-dist")
    for name in () if ours is not None else _MISSPELT:
        if name in tool or name in table:
            heading = f"tool.{name}" if name in tool else name
            raise MisuseError(f"{path}: [{heading}] is not read; the table is [tool.jax-dist]")
    if ours is None and not os.path.basename(path).startswith("pyproject"):
        ours = table  # a file of our own needs no heading
    if ours is None:
        if required:
            raise MisuseError(f"{path}: has no [tool.jax-dist]; without it nothing is set there")
        return Config(folder)
    if not isinstance(ours, dict):
        raise MisuseError(f"{path}: tool.jax-dist must be a table, not {_said(ours)}")
    values: dict[str, Any] = {}
    for key, value in ours.items():
        if key not in _KEYS:
            remedy = hint(key, _KEYS, f"The settings are: {', '.join(sorted(_KEYS))}.")
            raise MisuseError(f"{path}: there is no setting {key!r}. {remedy}")
        try:
            values[key.replace("-", "_")] = _KEYS[key](value, folder)
        except MisuseError as error:
            raise MisuseError(f"{path}: {key}: {error}") from error
    return Config(folder, path, **values)


def _table(path: str, *, required: bool) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise MisuseError(f"{path}: cannot be read: {error.strerror}") from error
    if not required and path.endswith("pyproject.toml") and not _OURS.search(data):
        return {}
    import tomllib  # only here: it is slow to load, and most projects set nothing

    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise MisuseError(f"{path}: is not TOML: {error}") from error


def _words(value: Any, _folder: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise MisuseError(f'must be a list of strings, such as ["JXD1"], not {_said(value)}')
    return tuple(value)


def _table_of_words(value: Any, folder: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if not isinstance(value, dict):
        raise MisuseError(f'must be a table, such as {{"tests/*" = ["JXD1"]}}, not {_said(value)}')
    return tuple((glob, _words(codes, folder)) for glob, codes in value.items())


def _target(value: Any, _folder: str) -> Version:
    if not isinstance(value, str):
        raise MisuseError(f'must be a version in quotes, such as "0.7.2", not {_said(value)}')
    return version(value)


def _folders(value: Any, folder: str) -> tuple[str, ...]:
    paths = tuple(os.path.join(folder, each) for each in _words(value, folder))
    for path in paths:
        if not os.path.isdir(path):
            raise MisuseError(f"there is no folder {path}")
    return paths


def _file(value: Any, folder: str) -> str:
    if not isinstance(value, str):
        raise MisuseError(f"must be the name of a file, not {_said(value)}")
    return os.path.join(folder, value)


_KEYS: dict[str, Callable[[Any, str], Any]] = {
    "baseline": _file,
    "exclude": _words,
    "extend-exclude": _words,
    "extend-select": _words,
    "ignore": _words,
    "per-file-ignores": _table_of_words,
    "project-roots": _folders,
    "select": _words,
    "target-jax": _target,
}


def _said(value: Any) -> str:
    """A value as TOML spells it, near enough to be found in the file."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def lower_bound(folder: str) -> Version | None:
    """The oldest jax with which the project in `folder` says to work; None where it is silent.

    Of several requirements (for several Pythons, say) the lowest counts.
    """
    for read in (_of_pyproject, _of_requirements, _of_setup_cfg, _of_setup_py):
        bounds = [bound for text in read(folder) if (bound := _bound(text)) is not None]
        if bounds:
            return min(bounds)
    return None


_JAX = re.compile(r"\s*jax(?![\w.-])\s*(?:\[[^\]]*\])?\s*\(?(?P<bounds>[^;#@)]*)", re.IGNORECASE)
_BOUND = re.compile(r"(?P<sign>>=|==|~=|\^|~|>)\s*(?P<version>\d+(?:\.\d+)*)")


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
    match table:
        case {"project": {"dependencies": list(texts)}}:
            yield from (text for text in texts if isinstance(text, str))
    match table:
        case {"tool": {"poetry": {"dependencies": {"jax": str(bound) | {"version": str(bound)}}}}}:
            yield f"jax {bound}"


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


def version(text: str) -> Version:
    """`"0.7.2"` as `(0, 7, 2)`; also `"0.7.2.dev1"` and `"0.7.2rc0"`.

    Raises:
      MisuseError: it does not begin with numbers.
    """
    match = re.fullmatch(r"v?(\d+(?:\.\d+)*)(?:[.a-z+-].*)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise MisuseError(f"{text!r} is not a version of jax, such as 0.7.2")
    return tuple(map(int, match[1].split(".")))


def selected(choices: Sequence[Choice], pages: Mapping[Code, Page]) -> frozenset[Code]:
    """The codes that are on after all choices, of which a later one speaks the last word.

    Within a choice the more precise selector wins: `--select JXD101 --ignore JXD1` keeps JXD101.

    Raises:
      MisuseError: a selector names no rule.
    """
    on = {code for code, page in pages.items() if page.default}
    for choice in choices:
        if choice.select is not None:
            on = {_ALWAYS} & set(pages)
        asked = [(selector, True) for selector in (*(choice.select or ()), *choice.extend_select)]
        asked += [(selector, False) for selector in choice.ignore]
        # The precise ones, and then the ignoring ones, come last.
        for selector, turns_on in sorted(
            asked, key=lambda each: (_precision(each[0]), not each[1])
        ):
            codes = _known(selector, pages)
            on = on | codes if turns_on else on - codes
    return frozenset(on)


def _precision(selector: str) -> int:
    upper = selector.upper()
    if upper == "ALL":
        return 0
    return len(upper) if upper.startswith("JXD") else len(_ALWAYS)


def _known(selector: str, pages: Mapping[Code, Page]) -> frozenset[Code]:
    """As `resolve`, for a selector that must name something.

    Raises:
      MisuseError: it names no rule.
    """
    codes = resolve(selector, pages)
    if not codes:
        raise MisuseError(f"no rule is called {selector!r}. {likeness(selector, pages)}")
    return codes


def likeness(selector: str, pages: Mapping[Code, Page]) -> str:
    """Which rule was meant by what names none."""
    names = [name for code, page in pages.items() for name in (code, page.name)]
    word = selector.upper() if selector.upper().startswith("JXD") else selector.lower()
    return hint(word, names, "`jax-dist rule --all` lists the rules.")


def resolve(selector: str, pages: Mapping[Code, Page]) -> frozenset[Code]:
    """The codes that a code, the beginning of one, or a name stands for; empty if unknown."""
    upper = selector.upper()
    if upper == "ALL":
        return frozenset(pages)
    if upper.startswith("JXD"):
        return frozenset(code for code in pages if code.startswith(upper))
    return frozenset(code for code, page in pages.items() if page.name == selector.lower())
