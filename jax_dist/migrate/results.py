"""What a place is judged with, its project, and what was done there, or why it was left."""

import ast
import dataclasses
import difflib
import enum
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from jax_dist import _codes
from jax_dist.lint.engine.linter import load
from jax_dist.lint.model import pmaps
from jax_dist.lint.model.findings import Code, Fix
from jax_dist.lint.model.import_graph import ImportGraph, outermost_package
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, Source, UnreadableError
from jax_dist.migrate.helper_homes import Homes
from jax_dist.migrate.helper_module import ALL_PARTS
from jax_dist.migrate.process_signs import ProcessSigns

Status: TypeAlias = Literal["done", "left"]
_Named: TypeAlias = ast.expr | ast.alias


AXIS_STAYS = "the device axis stays"  # begins what is said of a place that is done
UNSHOWN = "no run has shown what its state is"
# A reason to leave a place: one that it changes with was not proved.
UNPROVED = "it stays with others, of which --verify did not find that they compute the same"


class Form(enum.IntEnum):
    """What a place becomes, the plainest last."""

    LEFT = 0
    MAPPED = 1  # a function that means what jax.pmap does
    DIRECT = 2  # jit(shard_map), with the axis over devices
    IDIOMATIC = 3  # the same without that axis


@dataclasses.dataclass(frozen=True, slots=True)
class PlaceResult:
    """One place of one file."""

    path: str
    line: int  # of the file as it was, from 1; of the cell in a notebook
    cell: int | None
    code: Code  # the rule whose page speaks of it
    status: Status
    what: str  # "jax.pmap", as the place spells it
    reason: str = ""  # why it was left; or what was done
    by_hand: str = ""  # what to do about it: a sentence, and in the next lines a sketch in Python
    detail: str = ""  # what the reason rests on at this place: "jax.process_count() in line 40"
    form: Form = Form.MAPPED  # of one that is done
    is_mapped: bool = False  # a mapped function in that form, not what is done with its values
    defined_at: tuple[str, int] | None = None  # path and line in another file, whose change it is

    @property
    def why(self) -> str:
        """The reason and its detail."""
        return f"{self.reason} ({self.detail})" if self.detail else self.reason

    @property
    def where(self) -> str:
        """`a.py:12`, or `a.ipynb:cell 3:12`."""
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}"

    @property
    def remedy(self) -> str:
        """The sentence of `by_hand`."""
        return self.by_hand.partition("\n")[0]

    @property
    def sketch(self) -> str:
        """The Python of `by_hand`; empty where a sentence says it."""
        return self.by_hand.partition("\n")[2].strip("\n")


@dataclasses.dataclass(frozen=True, slots=True)
class Helpers:
    """The helper module that a file imports from."""

    path: str  # absolute
    needs: frozenset[str]  # the functions that it must have, and parts of `mapped`

    @property
    def functions(self) -> frozenset[str]:
        return self.needs - set(ALL_PARTS)


@dataclasses.dataclass(frozen=True, slots=True)
class FileMigration:
    """One file before and after; `after` is `before` where nothing was done."""

    path: str
    before: bytes
    after: bytes
    outcomes: tuple[PlaceResult, ...] = ()
    problem: str = ""  # why the file was left whole: it does not parse, say
    helpers: Helpers | None = None
    is_new: bool = False  # a helper module that was not there

    @property
    def changed(self) -> bool:
        return self.before != self.after

    def left_whole(self, left: "Left") -> "FileMigration":
        """The same file with nothing done."""
        outcomes = tuple(
            dataclasses.replace(
                outcome,
                status="left",
                reason=left.reason,
                by_hand=left.by_hand,
                detail=left.detail,
            )
            if outcome.status == "done"
            else outcome
            for outcome in self.outcomes
        )
        return FileMigration(self.path, self.before, self.before, outcomes)


class Left(Exception):  # noqa: N818 - not an error: a place that is left as it is
    """Raised where a place cannot be migrated; the arguments are those of a `PlaceResult`.

    The reason is in words that are the same at each such place, so that reports can count them.
    """

    def __init__(self, reason: str, by_hand: str = "", detail: str = ""):
        super().__init__(reason, by_hand, detail)
        self.reason: str = reason
        self.by_hand: str = by_hand
        self.detail: str = detail


class RefusedError(Exception):
    """The new text would do harm, so the file is left whole."""


def moved_limits(limits: dict[int, Form], before: Source, after: Source) -> dict[int, Form]:
    """Limits by their lines in a new text.

    Raises RefusedError where the line of a place that stays has changed.
    """
    if not limits:
        return limits
    ones, others = (each.code.split(b"\n") for each in (before, after))
    matcher = difflib.SequenceMatcher(None, ones, others, autojunk=False)
    found = {0: 0}
    for one, other, size in matcher.get_matching_blocks():
        found |= {one + i + 1: other + i + 1 for i in range(size)}
    if any(form is Form.LEFT and line not in found for line, form in limits.items()):
        raise RefusedError("a place that stays shares a line with one that is migrated")
    return {found[line]: form for line, form in limits.items() if line in found}


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedPlace:
    """`span`: the bytes it covers."""

    outcome: PlaceResult
    span: tuple[int, int]
    fix: Fix | None = None

    @classmethod
    def done(
        cls,
        module: Module,
        node: _Named,
        code: Code,
        fix: Fix | None,
        said: str = "",
        form: Form = Form.MAPPED,
        *,
        is_mapped: bool = False,
        defined_at: tuple[str, int] | None = None,
    ) -> "PlannedPlace":
        """A place that is migrated, by its own fix or by that of another place."""
        more = {"reason": said, "is_mapped": is_mapped, "defined_at": defined_at}
        return cls._of(module, node, code, fix, "done", form, **more)

    @classmethod
    def left(cls, module: Module, node: _Named, code: Code, why: Left) -> "PlannedPlace":
        """A place that stays as it is."""
        said = {"reason": why.reason, "by_hand": why.by_hand, "detail": why.detail}
        return cls._of(module, node, code, None, "left", Form.LEFT, **said)

    @classmethod
    def _of(
        cls,
        module: Module,
        node: _Named,
        code: Code,
        fix: Fix | None,
        status: Status,
        form: Form,
        **said: Any,
    ) -> "PlannedPlace":
        span = module.span(node)
        at, what = module.source.position(span[0]), module.text(node)
        place = PlaceResult(
            module.source.path, at.line, at.cell, code, status, what, form=form, **said
        )
        return cls(place, span, fix)


def unparsed_cells(source: Source) -> Iterator[PlaceResult]:
    """Cells of a notebook that Python cannot parse; the others are migrated."""
    for cell in getattr(source, "unparsed", ()):
        offset = source.line_starts[min(cell.line, len(source.line_starts)) - 1]
        at = source.position(offset)
        said = (source.line_text(offset).strip(), "Python cannot parse the cell", "", cell.message)
        yield PlaceResult(source.path, at.line, at.cell, _codes.SYNTAX_ERROR, "left", *said)


class ProjectContext:
    """One run: the files that are migrated together, and the projects around them.

    Args:
      project: of the files.
      helpers: the path of the module for all helpers; "" where each package has its own.
      among: the paths of what is migrated, by their absolute ones; None: all that is asked for.
    """

    def __init__(self, project: Project, helpers: str = "", among: Mapping[str, str] | None = None):
        self.project = project
        self.graph: ImportGraph = project.graph
        self.among = among
        self.homes: Homes = Homes(project, helpers)
        self._signs = ProcessSigns(self.graph)

    def sign(self, path: str) -> str:
        """What shows that a program with this file runs in several processes; or ""."""
        return self._signs.of(os.path.abspath(path))

    def comparison(self, module: Module) -> "_PmapValue | None":
        """A place that may meet a function of this file, and asks whether it is jax.pmap.

        Not those where all that they may meet is migrated together: in files of this run that no
        other file imports, such as tests.
        """
        compared = (found for found in self._near(module) if found.is_compared)
        is_last = lambda found: found.is_here and not self.graph.importers(found.path)
        return next((found for found in compared if not is_last(found)), None)

    def twin(self, module: Module) -> "_PmapValue | None":
        """A place to which pmap goes as a value too, in a file that is not migrated now."""
        path = os.path.abspath(module.source.path)
        others = (found for found in self._near(module) if found.path != path)
        return next((found for found in others if not found.is_here), None)

    def _near(self, module: Module) -> "Iterator[_PmapValue]":
        """The places that may meet a function of a file."""
        path = os.path.abspath(module.source.path)
        is_here = self.among is not None and path in self.among
        for line, is_compared in meetings(module):
            yield _PmapValue(path, line, is_compared, is_here)
        for found in self._meetings:
            if found.path != path and self.graph.are_connected(path, found.path):
                yield dataclasses.replace(found, is_here=found.is_here and is_here)

    @functools.cached_property
    def question_of_type(self) -> str:
        """A place that knows functions of jax.pmap by the name of their type; or ""."""
        return self.first(_TYPE)

    def check_observers(self, module: Module) -> None:
        """Raises Left where the package tells functions of plain JAX from those of pmap."""
        if self.asks_for_type(module):
            raise Left(
                "the package knows functions of jax.pmap by their type, and the new one is another",
                "Let it know the new function too.",
                self.question_of_type,
            )

    def check_specs(self, module: Module) -> None:
        """Raises Left where the program may tell results of plain JAX from those of pmap."""
        if asked := self.reader_of_specs(module):
            raise Left(
                "the program decides by the spec of an array's sharding: on one device that of "
                "what jit(shard_map) gives is P(), and jax.pmap says P(axis)",
                "Decide by the shape, then migrate again; or use --to jax_dist.",
                asked,
            )

    def reader_of_specs(self, module: Module) -> str:
        """A place of the program that decides by the spec of an array's sharding; or ""."""
        known = module.memo(ProjectContext.reader_of_specs)
        if _SPEC not in known:
            own = _found([(module.source.path, module.source.code)], _SPEC)
            place = next((place for _, place in own), "")
            known[_SPEC] = place or self.first(_SPEC, [module.source.path])
        return known[_SPEC]

    def free_axis(self, module: Module) -> str:
        """A name for the axis of a pmap that has none, by which its program knows no axis.

        `try: pmean(x, "devices")` would find it. Meshes of an earlier migration do not count.
        """
        own = os.path.abspath(module.source.path)
        is_said = any(self.graph.are_connected(path, own) for path in self._naming_axis)
        return "_devices" if is_said else "devices"

    @functools.cached_property
    def _naming_axis(self) -> list[str]:
        """The files that may know an axis by the name of ours."""
        return [path for path, data in self.graph.files.items() if _names_axis(data)]

    def asks_for_type(self, module: Module) -> bool:
        """Whether `question_of_type` is in the module's package, and may meet its functions."""
        if not self.question_of_type:
            return False
        path = os.path.abspath(module.source.path)
        package = outermost_package(os.path.dirname(path))
        asker = os.path.abspath(self.question_of_type)
        is_near = package and asker.startswith(os.path.join(package, ""))
        return bool(is_near and self.graph.importers(path))

    def first(
        self,
        pattern: re.Pattern[bytes],
        near: Sequence[str] | None = None,
        but: str = "",
        within: str = "",
    ) -> str:
        """Where the files of the projects have a text first: `a.py:3`; "" where they have not.

        Args:
          pattern: of the text.
          near: files; others count only where imports lead from one to the other.
          but: the absolute path of a file that does not count.
          within: that of the only one that does.
        """
        paths = None if near is None else [*map(os.path.abspath, near)]
        for path, data in self.graph.files.items():
            if within and path != within:
                continue
            found = [place for _, place in _found([(path, data)], pattern)]
            if (
                found
                and path != but
                and (paths is None or any(self.graph.are_connected(path, each) for each in paths))
            ):
                return found[0]
        return ""

    def is_in_another(self, pattern: re.Pattern[bytes], path: str) -> bool:
        """Whether a file that is connected with one by imports has a text."""
        return any(
            other != path and pattern.search(data) and self.graph.are_connected(other, path)
            for other, data in self.graph.files.items()
        )

    @functools.cached_property
    def mapping(self) -> dict[str, bytes]:
        """The files that may map, by pmap or a name for it."""
        return {path: data for path, data in self.graph.files.items() if b"pmap" in data}

    @functools.cached_property
    def _meetings(self) -> "list[_PmapValue]":
        """All places of the projects to which jax.pmap goes as a value."""
        found: list[_PmapValue] = []
        for path, data in self.graph.files.items():
            if not _VALUE.search(data):
                continue
            module = self.module(path)
            is_here = self.among is not None and path in self.among
            places = () if module is None else meetings(module)
            found += (_PmapValue(path, *each, is_here) for each in places)
        return found

    def module(self, path: str) -> Module | None:
        """A file of the projects, by its absolute path; None where it is none, or no Python."""
        try:
            return self.project.module(load(path, self.graph.files[path]))
        except (KeyError, UnreadableError, ParseError):
            return None


@dataclasses.dataclass(frozen=True, slots=True)
class _PmapValue:
    """A place to which `jax.pmap` goes as a value."""

    path: str  # absolute
    line: int
    is_compared: bool
    is_here: bool  # in a file of this run


def meetings(module: Module) -> Iterator[tuple[int, bool]]:
    """Where a file hands `jax.pmap` on as a value: `(line, whether it is compared there)`."""
    for site in pmaps.sites(module):
        if site.form == "value":
            within = itertools.takewhile(
                lambda each: not isinstance(each, ast.stmt), module.ancestors(site.node)
            )
            is_compared = any(isinstance(each, ast.Compare) for each in within)
            yield site.reference.lineno, is_compared  # type: ignore[attr-defined]


_VALUE = re.compile(
    rb"pmap\s*(?:[]),}:]|==|!=|is\b|in\b|not\b|else\b|if\b|$)|(?:==|\bis|\bin)[^\n]*pmap"
)
_AXIS = re.compile(rb"[\"']devices[\"']")
_MESH = re.compile(
    rb"\bMesh\([^\n]*?\([\"']devices[\"'],\)|\b(?:P|PartitionSpec)\([\"']devices[\"']\)"
)
_TYPE = re.compile(rb"\bPmapFunction\b")
_SPEC = re.compile(rb"len\([^\n]*\.sharding\.spec\)|\.sharding\.spec\s*(?:\[|==|!=)")


def _names_axis(text: bytes) -> bool:
    return b"devices" in text and _AXIS.search(_MESH.sub(b"", text)) is not None


def _found(
    files: Iterable[tuple[str, bytes]], pattern: re.Pattern[bytes]
) -> Iterator[tuple[str, str]]:
    """The first match of each file, and its place: `a.py:3`."""
    for path, data in files:
        match = pattern.search(data)
        if match is not None:
            line = data.count(b"\n", 0, match.start()) + 1
            yield match[0].decode("utf-8", "replace"), f"{os.path.relpath(path)}:{line}"
