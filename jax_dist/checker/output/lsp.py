"""A language server: findings, quick fixes and pages of rules in the editor, also in notebooks.

Needs pygls, the extra `jax-dist[lsp]`; nothing else imports this module.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer

import jax_dist
from jax_dist import _codes, _usage
from jax_dist.checker.engine import config, fixer, linter, suppressions
from jax_dist.checker.engine.linter import Examiner
from jax_dist.checker.model import semantic_model, sources
from jax_dist.checker.model.findings import Edit, Finding, Position, Safety
from jax_dist.checker.model.notebooks import Cell, Notebook, joined
from jax_dist.checker.model.project import Project
from jax_dist.checker.model.sources import Source
from jax_dist.checker.output.context import RenderContext, Severity
from jax_dist.checker.output.markdown import page_markdown

_SEVERITIES: dict[Severity, types.DiagnosticSeverity] = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}
_CONTEXT = RenderContext(linter.PAGES)
_FIX_ALL = "source.fixAll.jax-dist"
_PMAP = _codes.PMAP_CALL

# Migrates the pmaps of one line of a source: the new code; None where they are left.
_Migrated: TypeAlias = Callable[[Source, int], bytes | None]


@dataclasses.dataclass(frozen=True)
class _Translator:
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
        start, end = map(self._place, finding.span)
        if finding.span[0] == finding.span[1]:  # where a parser stopped: its line from there on
            line = finding.start.line - 1
            start = types.Position(line, finding.start.column - 1)
            end = types.Position(line, max(len(finding.line_text), start.character))
        tags: list[types.DiagnosticTag] = []
        if finding.code == _codes.UNUSED_SUPPRESSION:
            tags = [types.DiagnosticTag.Unnecessary]
        elif finding.code == _PMAP or finding.code.startswith("JXD1"):  # what jax has removed
            tags = [types.DiagnosticTag.Deprecated]
        return types.Diagnostic(
            range=types.Range(start, end),
            message=finding.message,
            severity=_SEVERITIES[_CONTEXT.severity(finding.code)],
            code=finding.code,
            code_description=types.CodeDescription(href=link) if link else None,
            source="jax-dist",
            tags=tags or None,
        )

    def hover(self, place: types.Position, uri: str, findings: Sequence[Finding]) -> str:
        """The pages of the rules whose findings are at a place, as Markdown."""
        here = types.Range(place, place)
        met = [each for each in findings if self.document(each.start) == uri]
        codes = dict.fromkeys(each.code for each in met if _meet(self.diagnostic(each), here))
        return "\n".join(page_markdown(linter.PAGES[code]) for code in codes)

    def actions(
        self,
        params: types.CodeActionParams,
        findings: Sequence[Finding],
        migrated: _Migrated | None = None,
    ) -> list[types.CodeAction]:
        """What can be done about the findings in a range.

        Args:
          params: the range, and the kinds that the editor wants.
          findings: those of the whole text.
          migrated: migrates the pmaps of one line; None where nothing does.
        """
        try:
            module = semantic_model.Module(self.source)
        except sources.ParseError:
            return []
        actions: list[types.CodeAction] = []
        if _asked(params, types.CodeActionKind.QuickFix):
            uri = params.text_document.uri
            here = [finding for finding in findings if self.document(finding.start) == uri]
            met = [finding for finding in here if _meet(self.diagnostic(finding), params.range)]
            for finding in met:
                edits = fixer.repair(finding, findings, module)
                if edits and finding.fix:
                    safe = finding.fix.safety is Safety.SAFE
                    title = f"{finding.fix.title}{'' if safe else ' (unsafe)'}"
                    actions.append(self._quick_fix(finding, title, edits, is_preferred=safe))
                # The cells of a notebook are migrated together, by the command.
                if migrated and finding.code == _PMAP and not isinstance(self.source, Notebook):
                    code = migrated(self.source, finding.start.line)
                    if code is not None:
                        edits = fixer.between(self.source.code, code)
                        title = "migrate this pmap to jax_dist"
                        actions.append(self._quick_fix(finding, title, edits))
            for finding in met:
                code = suppressions.with_noqa(self.source, [finding])
                edits = fixer.between(self.source.code, code)
                actions.append(self._quick_fix(finding, "switch it off on this line", edits))
        if _asked(params, _FIX_ALL):
            fixes = [finding.fix for finding in findings if finding.fix]
            edits = fixer.changes([fix for fix in fixes if fix.safety is Safety.SAFE], module)
            if edits:
                title = "jax-dist: make all safe fixes"
                change = self._change(edits)
                actions.append(types.CodeAction(title=title, kind=_FIX_ALL, edit=change))
        return actions

    def _quick_fix(
        self,
        finding: Finding,
        title: str,
        edits: Iterable[Edit],
        *,
        is_preferred: bool | None = None,
    ) -> types.CodeAction:
        return types.CodeAction(
            title=f"{finding.code}: {title}",
            kind=types.CodeActionKind.QuickFix,
            diagnostics=[self.diagnostic(finding)],
            is_preferred=is_preferred,
            edit=self._change(edits),
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
        match self.encoding:
            case "utf-8":
                units = len(before.encode("utf-8", "surrogatepass"))
            case "utf-32":
                units = len(before)
            case _:
                units = len(before.encode("utf-16-le", "surrogatepass")) // 2
        return types.Position(position.line - 1, units)


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


_NOTEBOOKS = types.NotebookDocumentSyncOptions(
    notebook_selector=[
        types.NotebookDocumentFilterWithCells(cells=[types.NotebookCellLanguage(language="python")])
    ],
    save=True,
)
_ACTIONS = types.CodeActionOptions(
    code_action_kinds=[types.CodeActionKind.QuickFix, types.CodeActionKind.SourceFixAll]
)


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A file or notebook as it was last checked."""

    source: Source
    findings: list[Finding]


class _Server(LanguageServer):
    """Keeps what it found in each open document, by the document's address.

    Attributes:
      was_shut_down: whether the editor has said that it is about to say exit.
      exit_code: 1 once the editor has said exit without shutdown before, as the protocol has it.
    """

    def __init__(self) -> None:
        super().__init__("jax-dist", jax_dist.__version__, notebook_document_sync=_NOTEBOOKS)
        self.exit_code: int = 0
        self.was_shut_down = False
        self.checked: dict[str, _Checked] = {}
        self._examiners: dict[str, Examiner] = {}

    def check(self, uri: str, *, anew: bool = False) -> None:
        """Looks at a document, and tells the editor.

        Args:
          uri: of the document.
          anew: read the settings and the other files of the project again.
        """
        if anew:
            self._examiners.clear()
        document = self.workspace.get_text_document(uri)
        code = document.source.encode("utf-8", "replace")
        self._check(uri, Source(_path(uri), code, code))

    def check_notebook(self, uri: str) -> None:
        """As `check`, for a notebook."""
        notebook = self.workspace.notebook_documents[uri]
        self._examiners.clear()
        cells = [
            Cell(number, self.workspace.get_text_document(cell.document).source)
            for number, cell in enumerate(notebook.cells, start=1)
            if cell.kind == types.NotebookCellKind.Code
        ]
        self._check(uri, joined(_path(notebook.uri), cells))

    def forget(self, uri: str) -> None:
        """A closed document has no findings."""
        self.checked.pop(uri, None)
        self._publish(uri, [])

    def home(self, uri: str) -> tuple[str, _Checked | None]:
        """The document that holds a cell, or the document itself; with what was found in it."""
        for notebook in self.workspace.notebook_documents.values():
            if any(cell.document == uri for cell in notebook.cells):
                return notebook.uri, self.checked.get(notebook.uri)
        return uri, self.checked.get(uri)

    def translator(self, uri: str, source: Source) -> _Translator:
        """Puts places in the editor's words."""
        notebook = self.workspace.notebook_documents.get(uri)
        cells = [cell.document for cell in notebook.cells] if notebook else [uri]
        encoding = self.workspace.position_encoding or types.PositionEncodingKind.Utf16
        return _Translator(source, tuple(cells), str(getattr(encoding, "value", encoding)))

    def _check(self, uri: str, source: Source) -> None:
        examiner = self._examiner(source.path)
        likely = examiner.likely(source.path, source.code)
        findings = [] if likely is None else examiner.of_source(source, likely)
        self.checked[uri] = _Checked(source, findings)
        translator = self.translator(uri, source)
        found: dict[str, list[types.Diagnostic]] = {cell: [] for cell in translator.documents}
        for finding in findings:
            found[translator.document(finding.start)].append(translator.diagnostic(finding))
        for cell, diagnostics in found.items():
            self._publish(cell, diagnostics)

    def _examiner(self, path: str) -> Examiner:
        folder = os.path.dirname(path)
        if folder not in self._examiners:
            try:
                settings = config.load([path])
                settings.check_codes(linter.PAGES)
                on = config.selected([settings.choice], linter.PAGES)
                project = Project(settings.project_roots or (path,))
                ignores = settings.ignores(linter.PAGES)
                self._examiners[folder] = Examiner(on, project, settings.target_jax, ignores)
            except _usage.MisuseError as error:
                kind, text = types.MessageType.Error, f"jax-dist: {error}"
                self.window_show_message(types.ShowMessageParams(type=kind, message=text))
                self._examiners[folder] = Examiner(linter.DEFAULT, Project([path]))
        return self._examiners[folder]

    def _publish(self, uri: str, diagnostics: list[types.Diagnostic]) -> None:
        params = types.PublishDiagnosticsParams(uri=uri, diagnostics=diagnostics)
        self.text_document_publish_diagnostics(params)


def create(migrated: _Migrated) -> _Server:
    """A server that listens to nothing yet; `start_io` lets it speak over the standard streams.

    Args:
      migrated: migrates the pmaps of one line.
    """
    server = _Server()

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        server.check(params.text_document.uri, anew=True)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        server.check(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: types.DidSaveTextDocumentParams) -> None:
        server.check(params.text_document.uri, anew=True)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        server.forget(params.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_CODE_ACTION, _ACTIONS)
    def actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        home, checked = server.home(params.text_document.uri)
        if checked is None:
            return []
        return server.translator(home, checked.source).actions(params, checked.findings, migrated)

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> types.Hover | None:
        home, checked = server.home(params.text_document.uri)
        if checked is None:
            return None
        translator = server.translator(home, checked.source)
        text = translator.hover(params.position, params.text_document.uri, checked.findings)
        return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, text)) if text else None

    @server.feature(types.SHUTDOWN)
    def shut_down(params: None) -> None:
        server.was_shut_down = True

    @server.feature(types.EXIT)
    def leave(params: None) -> None:
        server.exit_code = 0 if server.was_shut_down else 1

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_OPEN)
    def notebook_opened(params: types.DidOpenNotebookDocumentParams) -> None:
        server.check_notebook(params.notebook_document.uri)

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_CHANGE)
    def notebook_changed(params: types.DidChangeNotebookDocumentParams) -> None:
        server.check_notebook(params.notebook_document.uri)

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_CLOSE)
    def notebook_closed(params: types.DidCloseNotebookDocumentParams) -> None:
        server.checked.pop(params.notebook_document.uri, None)
        for cell in params.cell_text_documents:
            server.forget(cell.uri)

    return server


def _path(uri: str) -> str:
    """A file's path; for a text that was never saved a name in the working folder."""
    path = uris.to_fs_path(uri) if uri.startswith("file:") else None
    return path or os.path.abspath("untitled.py")
