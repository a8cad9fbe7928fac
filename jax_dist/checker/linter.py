"""All findings of one file."""

import ast
import functools

from jax_dist.checker import catalogue, prefilter
from jax_dist.checker.findings import Code, Finding, Fix, Position, Safety
from jax_dist.checker.modules import Module
from jax_dist.checker.parsing import ParseError
from jax_dist.checker.project import Project
from jax_dist.checker.registry import Found, Rule, Version
from jax_dist.checker.rules import syntax_error
from jax_dist.checker.sources import Source


def wanted(data: bytes, codes: frozenset[Code]) -> bool:
    """Whether a file may have findings, by its bytes alone.

    Args:
      data: the file.
      codes: the rules that are asked for.
    """
    return bool(likely(data, codes)) and not prefilter.is_internal(data)


def likely(data: bytes, codes: frozenset[Code]) -> frozenset[Code]:
    """Those rules that may have findings in a file, by the words that it holds."""
    # Every import that matters says jax, but for that of equinox.filter_pmap and flax.nnx.pmap.
    if b"jax" not in data and b"pmap" not in data:
        return frozenset()
    rules, phrases = _rules_and_phrases(codes)
    held = phrases.held_by(data)
    return frozenset(rule.page.code for rule in rules if _is_likely(rule, data, held))


@functools.cache
def _rules_and_phrases(codes: frozenset[Code]) -> tuple[list[Rule], prefilter.Phrases]:
    rules = [catalogue.RULES[code] for code in codes if code in catalogue.RULES]
    return rules, prefilter.Phrases(each for rule in rules for each in rule.triggers + rule.also)


def _is_likely(rule: Rule, data: bytes, held: frozenset[bytes]) -> bool:
    if held.isdisjoint(rule.triggers) or not held.issuperset(rule.also):
        return False
    return not rule.narrow or any(
        each not in rule.narrow or rule.narrow[each].search(data)
        for each in held.intersection(rule.triggers)
    )


def check(
    source: Source,
    project: Project,
    codes: frozenset[Code],
    target: Version | None = None,
    of: frozenset[Code] | None = None,
) -> list[Finding]:
    """All findings of one file, in order of place; nothing is suppressed here.

    Args:
      source: the file.
      project: looks up what other files define.
      codes: the rules that are asked for.
      target: the oldest jax that the code must run on; None: the newest.
      of: what `likely` says of the file, where that is known.
    """
    of = likely(source.code, codes) if of is None else of
    held = project.held(source)
    if held is not None:
        return _found(held, of, target)
    try:
        module = project.module(source)
    except ParseError as error:
        return [unparsed(source, error)] if syntax_error.PAGE.code in codes else []
    try:
        return _found(module, of, target)
    finally:
        module.drop()


def check_module(
    module: Module, codes: frozenset[Code], target: Version | None = None
) -> list[Finding]:
    """Like `check`, for a file that is parsed already."""
    return _found(module, likely(module.source.code, codes), target)


def _found(module: Module, codes: frozenset[Code], target: Version | None) -> list[Finding]:
    findings: list[Finding] = []
    for rule in (catalogue.RULES[code] for code in sorted(codes)):
        if target is not None and target < rule.since:
            continue
        findings += (_finding(module, rule, found, target) for found in rule.check(module))
    return sorted(findings, key=lambda finding: finding.sort_key)


def unparsed(source: Source, error: ParseError) -> Finding:
    """The finding for a file that Python cannot parse."""
    page = syntax_error.PAGE
    line = min(max(error.line, 1), len(source.line_starts))
    offset = source.line_starts[line - 1]
    start = source.position(offset)
    start = Position(start.line, max(error.column, 1), start.cell)
    message = syntax_error.message(error.message)
    text = source.line_text(offset)
    span = (offset, offset)
    return Finding(source.path, page.code, page.name, message, start, start, span, text)


def _finding(module: Module, rule: Rule, found: Found, target: Version | None) -> Finding:
    strings = _strings_around(module, found.node)
    start, end = span = module.span(strings[-1] if strings else found.node)
    fix = None if strings else found.fix  # Python 3.11 does not know where in them
    source = module.source
    return Finding(
        path=source.path,
        code=rule.page.code,
        name=rule.page.name,
        message=found.message,
        start=source.position(start),
        end=source.position(end),
        span=span,
        line_text=source.line_text(start),
        fix=_allowed(fix, max(rule.needs, found.needs), target),
    )


def _strings_around(module: Module, node: ast.AST) -> list[ast.AST]:
    """The f-strings that a node is a part of, the innermost first."""
    if b"{" not in module.source.code:
        return []
    return [each for each in module.ancestors(node) if isinstance(each, ast.JoinedStr)]


def _allowed(fix: Fix | None, needs: Version, target: Version | None) -> Fix | None:
    """A fix whose code would not run on the target is only shown."""
    if fix is None or target is None or target >= needs:
        return fix
    version = ".".join(map(str, needs))
    title = f"{fix.title} (needs jax {version})"
    return Fix(title, Safety.DISPLAY, fix.edits, fix.imports, fix.group)
