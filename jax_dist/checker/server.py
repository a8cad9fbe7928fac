"""A language server: findings, quick fixes and pages of rules in the editor, also in notebooks.

Needs pygls, the extra `jax-dist[lsp]`; nothing else imports this module.
"""

import dataclasses
import os

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer

import jax_dist
from jax_dist.checker import catalogue, config, misuse, selecting
from jax_dist.checker.examining import Examiner
from jax_dist.checker.findings import Finding
from jax_dist.checker.notebook_json import Cell
from jax_dist.checker.notebooks import Notebook, joined
from jax_dist.checker.patterns import Patterns
from jax_dist.checker.project import Project
from jax_dist.checker.sources import Source
from jax_dist.checker.translating import Migrated, Translator

_NOTEBOOKS = types.NotebookDocumentSyncOptions(
    notebook_selector=[
        types.NotebookDocumentFilterWithCells(cells=[types.NotebookCellLanguage(language="python")])
    ],
    save=True,
)
_ACTIONS = types.CodeActionOptions(
    code_action_kinds=[
        types.CodeActionKind.QuickFix,
        types.CodeActionKind.SourceFixAll,
    ]
)


@dataclasses.dataclass(frozen=True)
class _Checked:
    """A file or notebook as it was last checked."""

    source: Source
    findings: list[Finding]


class Server(LanguageServer):
    """Keeps what it found in each open document, by the document's address.

    Attributes:
      exit_code: 1 once the editor has said exit without shutdown before, as the protocol has it.
    """

    def __init__(self) -> None:
        super().__init__("jax-dist", jax_dist.__version__, notebook_document_sync=_NOTEBOOKS)
        self.exit_code = 0
        self._was_shut_down = False
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
        self._check(uri, self._notebook(notebook))

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

    def shut_down(self) -> None:
        """The editor is about to say exit."""
        self._was_shut_down = True

    def leave(self) -> None:
        """The editor has said exit."""
        self.exit_code = 0 if self._was_shut_down else 1

    def translator(self, uri: str, source: Source) -> Translator:
        """Puts places in the editor's words."""
        notebook = self.workspace.notebook_documents.get(uri)
        cells = [cell.document for cell in notebook.cells] if notebook else [uri]
        encoding = self.workspace.position_encoding or types.PositionEncodingKind.Utf16
        return Translator(source, tuple(cells), str(getattr(encoding, "value", encoding)))

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

    def _notebook(self, notebook: types.NotebookDocument) -> Notebook:
        cells = [
            Cell(number, self.workspace.get_text_document(cell.document).source)
            for number, cell in enumerate(notebook.cells, start=1)
            if cell.kind == types.NotebookCellKind.Code
        ]
        return joined(_path(notebook.uri), cells)

    def _examiner(self, path: str) -> Examiner:
        folder = os.path.dirname(path)
        if folder not in self._examiners:
            try:
                self._examiners[folder] = _configured(config.load([path]), path)
            except misuse.MisuseError as error:
                self._say(str(error))
                self._examiners[folder] = Examiner(catalogue.DEFAULT, Project([path]))
        return self._examiners[folder]

    def _say(self, text: str) -> None:
        kind = types.MessageType.Error
        self.window_show_message(types.ShowMessageParams(type=kind, message=f"jax-dist: {text}"))

    def _publish(self, uri: str, diagnostics: list[types.Diagnostic]) -> None:
        params = types.PublishDiagnosticsParams(uri=uri, diagnostics=diagnostics)
        self.text_document_publish_diagnostics(params)


def create(migrated: Migrated) -> Server:
    """A server that listens to nothing yet; `start_io` lets it speak over the standard streams.

    Args:
      migrated: migrates the pmaps of one line.
    """
    server = Server()

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
        server.shut_down()

    @server.feature(types.EXIT)
    def leave(params: None) -> None:
        server.leave()

    _listen_to_notebooks(server)
    return server


def _listen_to_notebooks(server: Server) -> None:
    @server.feature(types.NOTEBOOK_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenNotebookDocumentParams) -> None:
        server.check_notebook(params.notebook_document.uri)

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeNotebookDocumentParams) -> None:
        server.check_notebook(params.notebook_document.uri)

    @server.feature(types.NOTEBOOK_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseNotebookDocumentParams) -> None:
        server.checked.pop(params.notebook_document.uri, None)
        for cell in params.cell_text_documents:
            server.forget(cell.uri)


def _configured(settings: config.Config, path: str) -> Examiner:
    settings.check_codes(catalogue.PAGES)
    ignores = tuple(
        (Patterns((glob,), settings.folder), _codes(codes))
        for glob, codes in settings.per_file_ignores
    )
    on = selecting.selected([settings.choice], catalogue.PAGES)
    roots = settings.project_roots or (path,)
    return Examiner(on, Project(roots), settings.target_jax, ignores)


def _codes(selectors: tuple[str, ...]) -> frozenset[str]:
    each = (selecting.known(selector, catalogue.PAGES) for selector in selectors)
    return frozenset().union(*each)


def _path(uri: str) -> str:
    """A file's path; for a text that was never saved a name in the working folder."""
    path = uris.to_fs_path(uri) if uri.startswith("file:") else None
    return path or os.path.abspath("untitled.py")
