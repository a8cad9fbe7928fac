"""Linting of one file or many: read, parsed, given to each rule, and filtered by `# noqa`.

The rules are all those in the files of their folder. A file is parsed only if its bytes hold a word
that a rule looks for.
"""

import ast
import dataclasses
import gc
import importlib
import pkgutil
import platform
import re
from collections.abc import Callable, Iterable, Sequence

from jax_dist import _codes
from jax_dist.lint import rules
from jax_dist.lint.findings import Code, Edit, Finding, Safety
from jax_dist.lint.model import sources
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, Patterns, Source, UnreadableError
from jax_dist.lint.rules import Rule, Version
from jax_dist.lint.words import may_use_jax, words_of


def _rules_in_folder() -> dict[Code, Rule]:
    """Import every file of the folder `rules`, and return the rules by code."""
    names = [entry.name for entry in pkgutil.iter_modules(rules.__path__) if entry.name[0] != "_"]
    modules = [importlib.import_module(f"{rules.__name__}.{name}") for name in names]
    values = [value for module in modules for value in vars(module).values()]
    listed = [value for value in values if isinstance(value, Rule)]
    return {rule.code: rule for rule in sorted(listed, key=lambda rule: rule.code)}


RULES: dict[Code, Rule] = _rules_in_folder()


@dataclasses.dataclass(frozen=True)
class Examiner:
    """The rules to check files by, and the project that the files belong to."""

    codes: frozenset[Code]
    project: Project = dataclasses.field(default_factory=Project)
    target: Version | None = None  # the oldest jax that the code must run on; None: the newest
    ignores: tuple[tuple[Patterns, frozenset[Code]], ...] = ()  # codes that are off in some files

    def examine_files(
        self, paths: Sequence[str], progress: Callable[[int, int], None]
    ) -> list[Finding]:
        """Return the findings of all files, in order; call `progress(done, total)` after each."""
        findings: list[Finding] = []
        gc.disable()  # trees have no reference cycles; looking for some takes as long as parsing
        try:
            for done, path in enumerate(paths, start=1):
                findings += self.examine(path)
                progress(done, len(paths))
        finally:
            gc.enable()
        return findings

    def examine(self, path: str, data: bytes | None = None) -> list[Finding]:
        """Return the findings of one file that are not suppressed, in order of line.

        A file that cannot be read, or on which a rule fails, has one finding that says so: the
        other files are still linted. `data` is what the file holds, if that is known already.
        """
        codes = self._codes_for(path)
        try:
            data = sources.read_bytes(path) if data is None else data
            if not may_use_jax(data):
                return []
            source = load(path, data)
            return self.examine_source(source) if likely(source.code, codes) else []
        except OSError as error:
            reason = f"the file cannot be read: {error.strerror}"
        except UnreadableError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - other files must not suffer
            reason = f"jax-dist failed ({type(error).__name__}: {error}); please report it"
        finding = RULES[_codes.SYNTAX_ERROR].finding(Source(path, b"", b""), reason, (0, 0))
        return [finding] if finding.code in codes else []

    def examine_source(self, source: Source) -> list[Finding]:
        """Return the findings of a file's text that are not suppressed, in order of line."""
        codes = self._codes_for(source.path)
        try:
            findings = check_module(self.project.module(source), codes, self.target)
        except ParseError as error:
            findings = [syntax_error(source, error)]
        unparsed_cells = getattr(source, "unparsed", ())  # of a notebook; the others were checked
        findings += [syntax_error(source, error) for error in unparsed_cells]
        findings = [finding for finding in findings if finding.code in codes]
        if findings and b"noqa" in source.code.lower():
            return [finding for finding in findings if not _is_suppressed(source, finding)]
        return findings

    def _codes_for(self, path: str) -> frozenset[Code]:
        """Return the codes to check in a file: all but those that `per-file-ignores` turn off."""
        ignored = (codes for patterns, codes in self.ignores if patterns.match(path))
        return self.codes.difference(*ignored)


_REST_OF_LINE = re.compile(rb"[^\r\n]*")
_NOQA = re.compile(rb"#\s*noqa\b(?:\s*:\s*((?:(?:[a-z]+[0-9]+|jxd)\b[\s,]*)*))?", re.IGNORECASE)


def _is_suppressed(source: Source, finding: Finding) -> bool:
    """Return whether a comment `# noqa` or `# noqa: JXD306` on its first or last line hides it."""
    for offset in finding.span:
        line_end = _REST_OF_LINE.match(source.code, offset)
        for noqa in _NOQA.finditer(line_end[0] if line_end else b""):
            codes = re.findall(r"\w+", (noqa[1] or b"JXD").decode().upper())
            if finding.code.startswith(tuple(codes)):  # "JXD" stands for all
                return True
    return False


def load(path: str, data: bytes) -> Source:
    """Return the text of a Python file or notebook; raise UnreadableError if it is neither."""
    if path.endswith(".ipynb"):
        from jax_dist.lint import notebooks  # only here: most projects have none

        return notebooks.read_notebook(path, data)
    return sources.read(path, data)


def likely(data: bytes, codes: Iterable[Code]) -> frozenset[Code]:
    """Return the codes of the rules that may have findings in a file, by the words in its bytes."""
    if not may_use_jax(data):
        return frozenset()
    words = words_of(data)
    return frozenset(code for code in codes if code in RULES and RULES[code].may_match(words))


def check_module(
    module: Module, codes: frozenset[Code], target: Version | None = None
) -> list[Finding]:
    """Return the findings, suppressed ones too, for code that must run on the jax `target`."""
    source = module.source
    findings: list[Finding] = []
    last_edits: tuple[Edit, ...] = ()  # of the fix before: thousands of matches may share them
    loses_comment = False  # whether `last_edits` remove a comment
    for rule in (RULES[code] for code in sorted(likely(source.code, codes))):
        if target is not None and target < rule.since:
            continue
        for match in rule.check(module):
            node, fix = match.node, match.fix
            string = _string_around(module, node)
            if string is not None:  # Python 3.11 does not know where in the string the node stands
                node, fix = string, None
            if fix is not None and fix.edits is not last_edits:
                last_edits, loses_comment = fix.edits, _loses_comment(source, fix.edits)
            if loses_comment:
                fix = None
            if fix is not None and target is not None and target < match.needs:  # shown, not made
                title = f"{fix.title} (needs jax {'.'.join(map(str, match.needs))})"
                fix = dataclasses.replace(fix, title=title, safety=Safety.DISPLAY)
            findings.append(rule.finding(source, match.message, module.span(node), fix))
    return sorted(findings, key=lambda finding: (finding.span[0], finding.code))


def _loses_comment(source: Source, edits: tuple[Edit, ...]) -> bool:
    """Return whether edits remove a comment; a "#" in a string counts as one."""
    removed = sum(source.code[edit.start : edit.end].count(b"#") for edit in edits)
    return removed > sum(edit.text.count("#") for edit in edits)


def _string_around(module: Module, node: ast.AST) -> ast.JoinedStr | None:
    """Return the outermost f-string around a node; None if there is none."""
    strings = [around for around in module.ancestors(node) if isinstance(around, ast.JoinedStr)]
    return strings[-1] if strings else None


def syntax_error(source: Source, error: ParseError) -> Finding:
    """Return the finding for a syntax error, at the line and column where Python stopped."""
    offset = source.line_starts[min(max(error.line, 1), len(source.line_starts)) - 1]
    message = f"Python {platform.python_version()} cannot parse this file: {error.message}"
    finding = RULES[_codes.SYNTAX_ERROR].finding(source, message, (offset, offset))
    start = dataclasses.replace(finding.start, column=max(error.column, 1))
    return dataclasses.replace(finding, start=start, end=start)
