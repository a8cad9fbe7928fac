"""What is done to one file: it is looked at, read, checked, and its suppressions are heeded.

The rules are all that the files of their folder hold.

Most files hold no word that a rule looks for, and are passed over by their bytes alone. Words are
looked up among those of the file before a phrase is searched for, which takes longer.
"""

import ast
import dataclasses
import functools
import importlib
import pkgutil
import platform
import re
import sys
import types
from collections.abc import Callable

from jax_dist.lint import rules
from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Code, Finding, Fix, Safety
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, Patterns, Source, UnreadableError
from jax_dist.lint.rules import Page, Rule, Version
from jax_dist.lint.rules.linter_findings import SYNTAX_ERROR


def _rules_found() -> dict[Code, Rule]:
    modules = (
        importlib.import_module(f"{rules.__name__}.{each.name}")
        for each in pkgutil.iter_modules(rules.__path__)
        if not each.name.startswith("_")
    )
    found = {
        each.page.code: each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, Rule)
    }
    return dict(sorted(found.items()))


RULES: dict[Code, Rule] = _rules_found()
MODULES: dict[Code, types.ModuleType] = {
    code: sys.modules[rule.check.__module__] for code, rule in RULES.items()
}
PAGES: dict[Code, Page] = {code: rule.page for code, rule in RULES.items()}


@dataclasses.dataclass(frozen=True)
class Examiner:
    """What is looked for, and where."""

    codes: frozenset[Code]
    project: Project = dataclasses.field(default_factory=Project)
    target: Version | None = None  # the oldest jax that the code must run on; None: the newest
    ignores: tuple[tuple[Patterns, frozenset[Code]], ...] = ()  # codes that are off in some files

    def codes_for(self, path: str) -> frozenset[Code]:
        """The codes that are on in one file."""
        if not self.ignores:
            return self.codes
        off = (codes for patterns, codes in self.ignores if patterns.match(path))
        return self.codes.difference(*off)

    @staticmethod
    def passes_over(path: str, data: bytes) -> bool:
        """Whether a glance shows that a file has no findings, whatever the rules."""
        words = *_LIBRARIES, b"JXD"
        return sources.looks_like_python(path, data) and not any(word in data for word in words)

    def likely(self, path: str, data: bytes) -> frozenset[Code] | None:
        """The codes that may have findings in a file, by its bytes; None: it can have none."""
        if not sources.looks_like_python(path, data):
            return self.codes_for(path)  # what cannot be read has no words, and is a finding
        ours = _speaks_to_us(data)
        if not ours and is_internal(data):
            return None
        codes = _likely(data, self.codes_for(path))
        return codes if codes or ours else None

    def examined(
        self, path: str, data: bytes, likely: frozenset[Code] | None = None
    ) -> list[Finding]:
        """The findings of a file that are not switched off, in order of place.

        `likely`: what the method says of the file, where that is known.
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
        found = check(source, self.project, codes, self.target, likely)
        if SYNTAX_ERROR.code in codes:  # cells of a notebook; the others were checked
            for cell in getattr(source, "unparsed", ()):
                found.append(_unparsed(source, cell))
        if not found and not _speaks_to_us(source.code):
            return found
        code = source.code.lower()
        if b"jax-dist:" not in code and not (b"noqa" in code and _NOQA.search(code)):
            return found  # no comment switches a finding off
        from jax_dist.lint.engine import suppressions  # only here: it is slow to load

        return suppressions.applied(source, found, codes, PAGES)


def load(path: str, data: bytes) -> Source:
    """A file as text that can be checked, whatever kind of file it is.

    Raises:
      UnreadableError: its bytes are not what its name or they themselves say.
    """
    if path.endswith(".ipynb"):
        from jax_dist.lint.model import notebooks  # only here: most projects have none

        return notebooks.read_notebook(path, data)
    return sources.read(path, data)


def _speaks_to_us(data: bytes) -> bool:
    """Whether a file's comments can have findings of their own."""
    return b"JXD" in data or b"jax-dist:" in data


# Without codes, or with one of ours: other codes are for other linters.
_NOQA = re.compile(rb"#\s*noqa\b(?:(?!\s*:\s*[a-z]+[0-9])|[^\n#]*jxd)")


def check(
    source: Source,
    project: Project,
    codes: frozenset[Code],
    target: Version | None = None,
    of: frozenset[Code] | None = None,
) -> list[Finding]:
    """All findings of one file, in order of place; nothing is suppressed here.

    `target` is the oldest jax that the code must run on (None: the newest); `of` what `likely` says
    of the file, where that is known.
    """
    of = _likely(source.code, codes) if of is None else of
    held = project.held(source)
    if held is not None:
        return _found(held, of, target)
    try:
        module = project.module(source)
    except ParseError as error:
        return [_unparsed(source, error)] if SYNTAX_ERROR.code in codes else []
    try:
        return _found(module, of, target)
    finally:
        module.drop()


def check_module(
    module: Module, codes: frozenset[Code], target: Version | None = None
) -> list[Finding]:
    """Like `check`, for a file that is parsed already."""
    return _found(module, _likely(module.source.code, codes), target)


def _found(module: Module, codes: frozenset[Code], target: Version | None) -> list[Finding]:
    findings: list[Finding] = []
    may_have_strings = b"{" in module.source.code
    for rule in (RULES[code] for code in sorted(codes)):
        if target is not None and target < rule.since:
            continue
        for found in rule.check(module):
            node, fix, needs = found.node, found.fix, max(rule.needs, found.needs)
            if fix is not None and target is not None and target < needs:  # it would not run there
                title = f"{fix.title} (needs jax {'.'.join(map(str, needs))})"
                fix = dataclasses.replace(fix, title=title, safety=Safety.DISPLAY)
            for around in module.ancestors(node) if may_have_strings else ():
                if isinstance(around, ast.JoinedStr):  # Python 3.11 does not know where in them
                    node, fix = around, None
            if fix is not None and _loses_comment(module.source, fix):
                fix = None
            place = module.span(node)
            findings.append(rule.page.finding(module.source, found.message, place, fix))
    return sorted(findings, key=lambda finding: finding.sort_key)


def _loses_comment(source: Source, fix: Fix) -> bool:
    """Whether a fix takes words of the author away: "#" in a string counts too."""
    taken = (source.code[each.start : each.end].count(b"#") for each in fix.edits)
    return sum(taken) > sum(each.text.count("#") for each in fix.edits)


def _unparsed(source: Source, error: ParseError) -> Finding:
    """The finding for a file that Python cannot parse."""
    line = min(max(error.line, 1), len(source.line_starts))
    offset = source.line_starts[line - 1]
    message = f"Python {platform.python_version()} cannot parse this file: {error.message}"
    found = SYNTAX_ERROR.finding(source, message, (offset, offset))
    start = dataclasses.replace(found.start, column=max(error.column, 1))
    return dataclasses.replace(found, start=start, end=start)


def unreadable(path: str, reason: str) -> Finding:
    """The finding for a file that is no text."""
    return SYNTAX_ERROR.finding(Source(path, b"", b""), reason, (0, 0))


def wanted(data: bytes, codes: frozenset[Code]) -> bool:
    """Whether a file may have findings of these rules, by its bytes alone."""
    return bool(_likely(data, codes)) and not is_internal(data)


# Every import that matters says jax, but for those of equinox.filter_pmap and of Flax.
_LIBRARIES = (b"jax", b"pmap", b"flax")


def _likely(data: bytes, codes: frozenset[Code]) -> frozenset[Code]:
    """Those rules that may have findings in a file, by the words that it holds."""
    if not any(word in data for word in _LIBRARIES):
        return frozenset()
    holds = holding(data)
    return frozenset(
        rule.page.code
        for rule in (RULES[code] for code in codes if code in RULES)
        if any(
            holds(each) and (each not in rule.narrow or rule.narrow[each].search(data))
            for each in rule.triggers
        )
    )


def is_internal(data: bytes) -> bool:
    r"""Whether a file sees JAX through its private modules only, as those of JAX itself do.

    >>> is_internal(b"import functools\nfrom jax._src import core\n")
    True
    >>> is_internal(b"import jax\nfrom jax._src import core\n")
    False
    """
    if b"jax._src" not in data:
        return False
    seen = False
    for found in _IMPORT.finditer(data):
        name = found[1] or found[2]
        seen = seen or name.startswith(b"jax._src")
        if not name.startswith((b"jax._src", b"jaxlib")) and name.split(b".")[0] not in _OTHERS:
            return False
        if found[3]:  # `import a, b`
            return False
    return seen  # the imports of a notebook stand in strings, and show nothing


_IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import\b|import[ \t]+([.\w]+)[^\n,;]*([,;]?))",
    re.MULTILINE,
)
_OTHERS = {b"numpy", b"ml_dtypes", b"opt_einsum", b"absl", b"scipy"}
_OTHERS |= {name.encode() for name in sys.stdlib_module_names}


def holding(data: bytes) -> Callable[[bytes], bool]:
    """Whether a file may hold a phrase such as `pmap`, `jax.jit`, `import jax as`.

    Their words must stand as words of their own in the file, but for those with a star: there may
    be more of the word around it, as in `*pmap*` and `common_utils.shard*`.

    >>> holds = holding(b"f = jax.jit(g)  # not pmapped")
    >>> [holds(phrase) for phrase in (b"jax.jit", b"jax.pmap", b"pmap", b"*pmap*")]
    [True, False, False, True]
    """
    text = data
    if data[:9].lstrip(_BEFORE_JSON).startswith(b"{"):  # a notebook, where lines end with "\\n"
        text = data.replace(b"\\n", b" ")
    words = frozenset(text.translate(_BLANKS).split())

    @functools.cache  # several rules look for the same
    def holds(phrase: bytes) -> bool:
        whole, rest = _parts(phrase)
        return whole <= words and rest in text

    return holds


@functools.cache
def _parts(phrase: bytes) -> tuple[frozenset[bytes], bytes]:
    """The words that are whole, and all of the phrase without its stars."""
    words = phrase.translate(_BLANKS_AND_STARS).split()
    return frozenset(each for each in words if b"*" not in each), phrase.replace(b"*", b"")


_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"
# All but letters, digits, underscores, and what is not ASCII.
_BLANKS = re.sub(rb"[^\w\x80-\xff]", b" ", bytes(range(256)))
_BLANKS_AND_STARS = re.sub(rb"[^\w*\x80-\xff]", b" ", bytes(range(256)))
