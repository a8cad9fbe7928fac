"""What is done to one file: it is read, checked, and its suppressions are heeded."""

import dataclasses
import re
from collections.abc import Mapping

from jax_dist.checker import catalogue, linter, parsing, prefilter, sources
from jax_dist.checker.findings import Code, Finding
from jax_dist.checker.page import Page
from jax_dist.checker.patterns import Patterns
from jax_dist.checker.project import Project
from jax_dist.checker.registry import Version
from jax_dist.checker.rules import syntax_error
from jax_dist.checker.sources import Source, UnreadableError


@dataclasses.dataclass(frozen=True)
class Examiner:
    """What is looked for, and where."""

    codes: frozenset[Code]
    project: Project = dataclasses.field(default_factory=Project)
    target: Version | None = None  # the oldest jax that the code must run on; None: the newest
    ignores: tuple[tuple[Patterns, frozenset[Code]], ...] = ()  # codes that are off in some files

    @property
    def pages(self) -> Mapping[Code, Page]:
        return catalogue.PAGES

    def codes_for(self, path: str) -> frozenset[Code]:
        """The codes that are on in one file."""
        if not self.ignores:
            return self.codes
        off = (codes for patterns, codes in self.ignores if patterns.match(path))
        return self.codes.difference(*off)

    def looked_into(self) -> list[str]:
        """The files that were read while others were checked, so far."""
        return self.project.looked_into

    @staticmethod
    def passes_over(data: bytes) -> bool:
        """Whether a glance shows that a file has no findings, whatever the rules."""
        words = b"jax", b"pmap"  # as in linter.likely
        return not any(sources.holds(word, data) for word in words) and b"JXD" not in data

    def likely(self, path: str, data: bytes) -> frozenset[Code] | None:
        """The codes that may have findings in a file, by its bytes; None: it can have none."""
        if b"jax" not in data and sources.holds(b"jax", data):
            return self.codes_for(path)  # UTF-16, which Python does not read
        ours = speaks_to_us(data)
        if not ours and prefilter.is_internal(data):
            return None
        codes = linter.likely(data, self.codes_for(path))
        return codes if codes or ours else None

    def examined(
        self, path: str, data: bytes, likely: frozenset[Code] | None = None
    ) -> list[Finding]:
        """The findings of a file that are not switched off, in order of place.

        Args:
          path: of the file.
          data: its bytes.
          likely: what `likely` says of them, where that is known.
        """
        likely = self.likely(path, data) if likely is None else likely
        if likely is None:
            return []
        try:
            source = load(path, data)
        except UnreadableError as error:
            return [unreadable(path, str(error))]
        if path.endswith(".ipynb"):
            likely = None  # its code may hold phrases that its bytes spell in another way
        return self.of_source(source, likely)

    def of_source(self, source: Source, likely: frozenset[Code] | None = None) -> list[Finding]:
        """As `examined`, of a file that is read already."""
        codes = self.codes_for(source.path)
        found = linter.check(source, self.project, codes, self.target, likely)
        found += _of_cells(source, codes)
        if not (found or speaks_to_us(source.code)) or not may_suppress(source.code):
            return found
        from jax_dist.checker import suppress  # only here: it is slow to load

        return suppress.applied(source, found, codes, self.pages)


def load(path: str, data: bytes) -> Source:
    """A file as text that can be checked, whatever kind of file it is.

    Raises:
      UnreadableError: its bytes are not what its name or they themselves say.
    """
    if path.endswith(".ipynb"):
        from jax_dist.checker import notebooks  # only here: most projects have none

        return notebooks.read_notebook(path, data)
    return sources.read(path, data)


def speaks_to_us(data: bytes) -> bool:
    """Whether a file's comments can have findings of their own."""
    return b"JXD" in data or b"jax-dist:" in data


def may_suppress(code: bytes) -> bool:
    """Whether a comment can switch a finding off."""
    code = code.lower()
    return b"jax-dist:" in code or (b"noqa" in code and _NOQA.search(code) is not None)


# Without codes, or with one of ours: other codes are for other linters.
_NOQA = re.compile(rb"#\s*noqa\b(?:(?!\s*:\s*[a-z]+[0-9])|[^\n#]*jxd)")


def unreadable(path: str, reason: str) -> Finding:
    """The finding for a file that is no text."""
    page = syntax_error.PAGE
    source = Source(path, b"", b"")
    start = source.position(0)
    return Finding(path, page.code, page.name, reason, start, start, (0, 0), "")


def _of_cells(source: Source, codes: frozenset[Code]) -> list[Finding]:
    """Cells of a notebook that Python cannot parse; the others were checked."""
    if syntax_error.PAGE.code not in codes:
        return []
    cells = getattr(source, "unparsed", ())
    errors = (parsing.ParseError(cell.message, cell.line, cell.column) for cell in cells)
    return [linter.unparsed(source, error) for error in errors]
