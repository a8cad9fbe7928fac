"""Findings and their fixes in the words of the Language Server Protocol."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from lsprotocol import types

from jax_dist.checker import catalogue, modules, parsing, repairs, suppress
from jax_dist.checker.findings import Edit, Finding, Position, Safety
from jax_dist.checker.notebooks import Notebook
from jax_dist.checker.render.context import Context, Severity
from jax_dist.checker.render.markdown import page_markdown
from jax_dist.checker.sources import Source

_SEVERITIES: dict[Severity, types.DiagnosticSeverity] = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}
_CONTEXT = Context(catalogue.PAGES)
_FIX_ALL = "source.fixAll.jax-dist"
_PMAP = "JXD001"

# Migrates the pmaps of one line of a source: the new code; None where they are left.
Migrated: TypeAlias = Callable[[Source, int], bytes | None]


@dataclasses.dataclass(frozen=True)
class Translator:
    """Speaks of one text, or of one notebook.

    Args:
      source: as it was checked.
      documents: the address of the text; of a notebook, those of all its cells.
      encoding: what the editor counts within a line: "utf-8", "utf-16" or "utf-32".
    """

    source: Source
    documents: tuple[str, ...]
    encoding: str = "utf-16"

    def document(self, position: Position) -> str:
        """The address of the text, or of the cell."""
        return self.documents[(position.cell or 1) - 1]

    def diagnostic(self, finding: Finding) -> types.Diagnostic:
        """A finding."""
        link = _CONTEXT.link(finding.code)
        start, end = finding.span
        place = (
            types.Range(self._place(start), self._place(end)) if start < end else _point(finding)
        )
        return types.Diagnostic(
            range=place,
            message=finding.message,
            severity=_SEVERITIES[_CONTEXT.severity(finding.code)],
            code=finding.code,
            code_description=types.CodeDescription(href=link) if link else None,
            source="jax-dist",
            tags=_tags(finding.code) or None,
        )

    def hover(self, place: types.Position, uri: str, findings: Sequence[Finding]) -> str:
        """The pages of the rules whose findings are at a place, as Markdown."""
        here = types.Range(place, place)
        met = [each for each in findings if self.document(each.start) == uri]
        codes = dict.fromkeys(each.code for each in met if _meet(self.diagnostic(each), here))
        return "\n".join(page_markdown(catalogue.PAGES[code]) for code in codes)

    def actions(
        self,
        params: types.CodeActionParams,
        findings: Sequence[Finding],
        migrated: Migrated | None = None,
    ) -> list[types.CodeAction]:
        """What can be done about the findings in a range.

        Args:
          params: the range, and the kinds that the editor wants.
          findings: those of the whole text.
          migrated: migrates the pmaps of one line; None where nothing does.
        """
        module = self._module()
        if module is None:
            return []
        actions: list[types.CodeAction] = []
        if _asked(params, types.CodeActionKind.QuickFix):
            uri = params.text_document.uri
            here = [finding for finding in findings if self.document(finding.start) == uri]
            met = [finding for finding in here if _meet(self.diagnostic(finding), params.range)]
            for finding in met:
                actions += self._fixes(finding, findings, module)
                if migrated and finding.code == _PMAP:
                    actions += self._migration(finding, migrated)
            actions += [self._ignoring(finding) for finding in met]
        if _asked(params, _FIX_ALL):
            actions += self._fix_all(findings, module)
        return actions

    def _module(self) -> modules.Module | None:
        try:
            return modules.Module(self.source)
        except parsing.ParseError:
            return None

    def _fixes(
        self, finding: Finding, findings: Sequence[Finding], module: modules.Module
    ) -> Iterator[types.CodeAction]:
        edits = repairs.repair(finding, findings, module)
        if edits and finding.fix:
            safe = finding.fix.safety is Safety.SAFE
            title = f"{finding.code}: {finding.fix.title}{'' if safe else ' (unsafe)'}"
            yield types.CodeAction(
                title=title,
                kind=types.CodeActionKind.QuickFix,
                diagnostics=[self.diagnostic(finding)],
                is_preferred=safe,
                edit=self._change(edits),
            )

    def _migration(self, finding: Finding, migrated: Migrated) -> Iterator[types.CodeAction]:
        if isinstance(self.source, Notebook):
            return  # its cells are migrated together, by the command
        code = migrated(self.source, finding.start.line)
        if code is not None:
            yield types.CodeAction(
                title=f"{finding.code}: migrate this pmap to jax_dist",
                kind=types.CodeActionKind.QuickFix,
                diagnostics=[self.diagnostic(finding)],
                edit=self._change(repairs.between(self.source.code, code)),
            )

    def _ignoring(self, finding: Finding) -> types.CodeAction:
        code = suppress.with_noqa(self.source, [finding])
        return types.CodeAction(
            title=f"{finding.code}: switch it off on this line",
            kind=types.CodeActionKind.QuickFix,
            diagnostics=[self.diagnostic(finding)],
            edit=self._change(repairs.between(self.source.code, code)),
        )

    def _fix_all(
        self, findings: Sequence[Finding], module: modules.Module
    ) -> Iterator[types.CodeAction]:
        fixes = [finding.fix for finding in findings if finding.fix]
        edits = repairs.changes([fix for fix in fixes if fix.safety is Safety.SAFE], module)
        if edits:
            yield types.CodeAction(
                title="jax-dist: make all safe fixes", kind=_FIX_ALL, edit=self._change(edits)
            )

    def _change(self, edits: Iterable[Edit]) -> types.WorkspaceEdit:
        changes: dict[str, list[types.TextEdit]] = {}
        for edit in edits:
            if isinstance(self.source, Notebook) and self.source.ends_cell(edit.start):
                # A new last line: an editor knows only the end of the one before.
                edit = Edit(edit.start - 1, edit.end - 1, "\n" + edit.text.removesuffix("\n"))
            uri = self.document(self.source.position(edit.start))
            place = types.Range(self._place(edit.start), self._place(edit.end))
            changes.setdefault(uri, []).append(types.TextEdit(place, edit.text))
        return types.WorkspaceEdit(changes=changes)

    def _place(self, offset: int) -> types.Position:
        position = self.source.position(offset)
        before = self.source.line_text(offset)[: position.column - 1]
        return types.Position(position.line - 1, self._units(before))

    def _units(self, text: str) -> int:
        match self.encoding:
            case "utf-8":
                return len(text.encode("utf-8", "surrogatepass"))
            case "utf-32":
                return len(text)
            case _:
                return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _point(finding: Finding) -> types.Range:
    """Of a finding without bytes, such as where a parser stopped: its line from there on."""
    line = finding.start.line - 1
    start = types.Position(line, finding.start.column - 1)
    return types.Range(start, types.Position(line, max(len(finding.line_text), start.character)))


def _tags(code: str) -> list[types.DiagnosticTag]:
    if code == "JXD900":
        return [types.DiagnosticTag.Unnecessary]
    gone = code == "JXD001" or code.startswith("JXD1")  # pmap, and what jax has removed
    return [types.DiagnosticTag.Deprecated] if gone else []


def _asked(params: types.CodeActionParams, kind: str) -> bool:
    """An editor that asks for `source` wants all kinds below it."""
    only = params.context.only
    return only is None or any(kind == asked or kind.startswith(f"{asked}.") for asked in only)


def _meet(diagnostic: types.Diagnostic, place: types.Range) -> bool:
    start, end = diagnostic.range.start, diagnostic.range.end
    return (start.line, start.character) <= (place.end.line, place.end.character) and (
        place.start.line,
        place.start.character,
    ) <= (end.line, end.character)
