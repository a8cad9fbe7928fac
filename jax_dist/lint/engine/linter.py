"""Linting of one file or many: read, parsed, given to each rule, and filtered by `# noqa`.

The rules are all that the files of their folder hold. Most files hold no word that a rule looks
for, and are passed over by their bytes alone.
"""

import ast
import dataclasses
import functools
import gc
import importlib
import pkgutil
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence

from jax_dist import _codes
from jax_dist.lint import rules
from jax_dist.lint.engine import suppressions
from jax_dist.lint.model import sources
from jax_dist.lint.model.findings import Code, Finding, Fix, Safety
from jax_dist.lint.model.project import Project
from jax_dist.lint.model.semantic_model import Module
from jax_dist.lint.model.sources import ParseError, Patterns, Source, UnreadableError
from jax_dist.lint.rules import Rule, Version


def _rules_in_folder() -> dict[Code, Rule]:
    names = [each.name for each in pkgutil.iter_modules(rules.__path__) if each.name[0] != "_"]
    modules = [importlib.import_module(f"{rules.__name__}.{name}") for name in names]
    found = [each for module in modules for each in vars(module).values() if isinstance(each, Rule)]
    return {rule.code: rule for rule in sorted(found, key=lambda rule: rule.code)}


RULES: dict[Code, Rule] = _rules_in_folder()


@dataclasses.dataclass(frozen=True)
class Examiner:
    """Rules to look for, and the project to look in."""

    codes: frozenset[Code]
    project: Project = dataclasses.field(default_factory=Project)
    target: Version | None = None  # the oldest jax that the code must run on; None: the newest
    ignores: tuple[tuple[Patterns, frozenset[Code]], ...] = ()  # codes that are off in some files

    def examine_files(
        self,
        paths: Sequence[str],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Finding]:
        """Return the findings of all files, in their order; `progress` learns how many are done."""
        findings: list[Finding] = []
        gc.disable()  # trees hold no circles, and looking for some takes as long as the parser
        try:
            for done, path in enumerate(paths, start=1):
                try:
                    data = sources.read_bytes(path)
                except OSError as error:
                    reason = f"the file cannot be read: {error.strerror}"
                    findings += self._on(path, [_unreadable(path, reason)])
                else:
                    findings += self.examine(path, data)
                progress(done, len(paths))
        finally:
            gc.enable()
        return findings

    def examine(self, path: str, data: bytes) -> list[Finding]:
        """Return the findings of one file that are not switched off, in order of place."""
        if sources.looks_like_python(path, data):
            codes = likely(data, self._codes_for(path))
            if not codes:
                return []
        else:
            codes = self._codes_for(path)  # what cannot be read holds no words, and is a finding
        try:
            source = load(path, data)
            if path.endswith(".ipynb"):  # its code may hold words that its bytes spell otherwise
                codes = likely(source.code, self._codes_for(path))
            return self.examine_source(source, codes)
        except UnreadableError as error:
            return self._on(path, [_unreadable(path, str(error))])
        except Exception as error:  # noqa: BLE001 - other files must not suffer
            reason = f"jax-dist failed ({type(error).__name__}: {error}); please report it"
            return [_unreadable(path, reason)]

    def examine_source(self, source: Source, codes: frozenset[Code] | None = None) -> list[Finding]:
        """Return the same of a file that is read; `codes` are those that its words may have."""
        codes = likely(source.code, self._codes_for(source.path)) if codes is None else codes
        module: Module | None = None
        try:
            module = self.project.module(source)
            findings = _run(module, codes, self.target)
        except ParseError as error:
            findings = self._on(source.path, [_unparsed(source, error)])
        finally:
            if module is not None:
                module.drop()
        cells = getattr(source, "unparsed", ())  # of a notebook; the others were checked
        findings += self._on(source.path, [_unparsed(source, cell) for cell in cells])
        if findings and b"noqa" in source.code.lower():
            return suppressions.unsuppressed(source, findings)
        return findings

    def _codes_for(self, path: str) -> frozenset[Code]:
        off = (codes for patterns, codes in self.ignores if patterns.match(path))
        return self.codes.difference(*off)

    def _on(self, path: str, findings: list[Finding]) -> list[Finding]:
        codes = self._codes_for(path)
        return [finding for finding in findings if finding.code in codes]


def load(path: str, data: bytes) -> Source:
    """Return a file as text that can be checked, whatever kind of file it is.

    Raises:
      UnreadableError: its bytes are not what its name or they themselves say.
    """
    if path.endswith(".ipynb"):
        from jax_dist.lint.model import notebooks  # only here: most projects have none

        return notebooks.read_notebook(path, data)
    return sources.read(path, data)


def check_module(
    module: Module, codes: frozenset[Code], target: Version | None = None
) -> list[Finding]:
    """Return the findings of a parsed file, in order of place; nothing is suppressed here."""
    return _run(module, likely(module.source.code, codes), target)


def _run(module: Module, codes: frozenset[Code], target: Version | None) -> list[Finding]:
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
            string = _string_around(module, node) if may_have_strings else None
            if string is not None:  # Python 3.11 does not know where in it
                node, fix = string, None
            if fix is not None and _loses_comment(module.source, fix):
                fix = None
            findings.append(rule.finding(module.source, found.message, module.span(node), fix))
    return sorted(findings, key=lambda finding: finding.sort_key)


def _string_around(module: Module, node: ast.AST) -> ast.JoinedStr | None:
    """Return the outermost f-string around a node."""
    if not module.has_f_strings:
        return None
    strings = [each for each in module.ancestors(node) if isinstance(each, ast.JoinedStr)]
    return strings[-1] if strings else None


def _loses_comment(source: Source, fix: Fix) -> bool:
    """Return whether a fix takes words of the author away; "#" in a string counts too."""
    taken = (source.code[each.start : each.end].count(b"#") for each in fix.edits)
    return sum(taken) > sum(each.text.count("#") for each in fix.edits)


def _unparsed(source: Source, error: ParseError) -> Finding:
    line = min(max(error.line, 1), len(source.line_starts))
    offset = source.line_starts[line - 1]
    message = f"Python {platform.python_version()} cannot parse this file: {error.message}"
    found = RULES[_codes.SYNTAX_ERROR].finding(source, message, (offset, offset))
    start = dataclasses.replace(found.start, column=max(error.column, 1))
    return dataclasses.replace(found, start=start, end=start)


def _unreadable(path: str, reason: str) -> Finding:
    return RULES[_codes.SYNTAX_ERROR].finding(Source(path, b"", b""), reason, (0, 0))


# --- which rules may have findings, by the bytes of a file


def wanted(data: bytes, codes: frozenset[Code]) -> bool:
    """Return whether a file may have findings of these rules, by its bytes alone."""
    return bool(likely(data, codes))


# Every import that matters says jax, but for those of equinox.filter_pmap and of Flax.
_LIBRARIES = (b"jax", b"pmap", b"flax")


def likely(data: bytes, codes: Iterable[Code]) -> frozenset[Code]:
    """Return those rules that may have findings in a file, by the words that it holds."""
    if not any(word in data for word in _LIBRARIES) or _is_internal(data):
        return frozenset()
    holds = holding(data)
    return frozenset(
        rule.code
        for rule in (RULES[code] for code in codes if code in RULES)
        if any(
            holds(each) and (each not in rule.narrow or rule.narrow[each].search(data))
            for each in rule.triggers
        )
    )


def _is_internal(data: bytes) -> bool:
    r"""Return whether a file sees JAX through its private modules only, as those of JAX itself do.

    >>> _is_internal(b"import functools\nfrom jax._src import core\n")
    True
    >>> _is_internal(b"import jax\nfrom jax._src import core\n")
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
    """Return whether a file may hold a phrase such as `pmap`, `jax.jit`, `import jax as`.

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
    """Return the words that are whole, and all of the phrase without its stars."""
    words = phrase.translate(_BLANKS_AND_STARS).split()
    return frozenset(each for each in words if b"*" not in each), phrase.replace(b"*", b"")


_BEFORE_JSON = b"\xef\xbb\xbf \t\r\n"
# All but letters, digits, underscores, and what is not ASCII.
_BLANKS = re.sub(rb"[^\w\x80-\xff]", b" ", bytes(range(256)))
_BLANKS_AND_STARS = re.sub(rb"[^\w*\x80-\xff]", b" ", bytes(range(256)))
