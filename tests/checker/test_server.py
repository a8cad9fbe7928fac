"""The language server, spoken to as an editor does: over its standard streams."""

import json
import subprocess
import sys
from typing import Any

import pytest

import jax_dist

pytest.importorskip("pygls")


class _Editor:
    """Speaks to a server in a process of its own."""

    def __init__(self, folder, **capabilities: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jax_dist", "server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._number = 0
        self.started = self.ask(
            "initialize", processId=None, rootUri=folder.as_uri(), capabilities=capabilities
        )
        self.tell("initialized")

    def tell(self, method: str, **params: Any) -> None:
        self._send({"method": method, "params": params})

    def ask(self, method: str, **params: Any) -> Any:
        self._number += 1
        self._send({"method": method, "params": params, "id": self._number})
        while (message := self._receive()).get("id") != self._number or "method" in message:
            pass
        return message["result"]

    def diagnostics(self, uri: str) -> list[dict[str, Any]]:
        """The next that come for a document."""
        return self.notified("textDocument/publishDiagnostics", uri=uri)["diagnostics"]

    def notified(self, method: str, **params: Any) -> dict[str, Any]:
        while True:
            message = self._receive()
            if message.get("method") == method and params.items() <= message["params"].items():
                return message["params"]

    def open(self, uri: str, text: str) -> list[dict[str, Any]]:
        document = {"uri": uri, "languageId": "python", "version": 1, "text": text}
        self.tell("textDocument/didOpen", textDocument=document)
        return self.diagnostics(uri)

    def actions(self, uri: str, line: int, *only: str) -> list[dict[str, Any]]:
        place = {"line": line, "character": 0}
        end = {"line": line, "character": 1000}
        context = {"diagnostics": [], **({"only": list(only)} if only else {})}
        return self.ask(
            "textDocument/codeAction",
            textDocument={"uri": uri},
            range={"start": place, "end": end},
            context=context,
        )

    def close(self, *said: str) -> tuple[int, bytes]:
        """The exit code, and what was written to standard error."""
        for method in said:
            self.ask(method) if method == "shutdown" else self.tell(method)
        self._process.stdin.close()
        code = self._process.wait(timeout=30)
        return code, self._process.stderr.read()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            stream.close()

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        length = 0
        while line := self._process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        assert length, "the server has ended"
        return json.loads(self._process.stdout.read(length))


@pytest.fixture(scope="module")
def editor(tmp_path_factory):
    editor = _Editor(tmp_path_factory.mktemp("project"))
    yield editor
    editor.kill()


def _mended(text: str, action: dict[str, Any], uri: str) -> str:
    """The text once an editor has made the action's edits; characters below U+10000 only."""
    lines = text.split("\n")
    starts = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]

    def offset(place: dict[str, int]) -> int:
        if place["line"] >= len(lines):  # what editors do with a place behind the end
            return len(text)
        return starts[place["line"]] + place["character"]

    for edit in sorted(
        action["edit"]["changes"][uri], key=lambda edit: -offset(edit["range"]["start"])
    ):
        start, end = offset(edit["range"]["start"]), offset(edit["range"]["end"])
        text = text[:start] + edit["newText"] + text[end:]
    return text


def _place(diagnostic: dict[str, Any]) -> tuple[int, int, int, int]:
    start, end = diagnostic["range"]["start"], diagnostic["range"]["end"]
    return start["line"], start["character"], end["line"], end["character"]


def test_what_it_finds_is_shown_with_code_link_and_tag(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()

    shown = editor.open(uri, "import jax\n\nstep = jax.pmap(f)\n")

    assert shown == [
        {
            "range": {
                "start": {"line": 2, "character": 7},
                "end": {"line": 2, "character": 15},
            },
            "severity": 2,
            "code": "JXD001",
            "codeDescription": {"href": "https://docs.jax.dev/en/latest/migrate_pmap.html"},
            "source": "jax-dist",
            "message": "jax.pmap is in maintenance mode; jax-dist migrate rewrites it",
            "tags": [2],
        }
    ]


def test_columns_count_as_the_editor_does(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()

    shown = editor.open(uri, 'import jax\ns = "\U0001f600日"; step = jax.pmap(f)\n')

    # U+1F600 counts twice in UTF-16, which is what this editor speaks.
    assert [_place(each) for each in shown] == [(1, 18, 1, 26)]


def test_changes_are_seen_before_they_are_saved(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()
    editor.open(uri, "import jax\nstep = jax.pmap(f)\n")
    place = {"start": {"line": 1, "character": 7}, "end": {"line": 1, "character": 15}}

    editor.tell(
        "textDocument/didChange",
        textDocument={"uri": uri, "version": 2},
        contentChanges=[{"range": place, "text": "jax.jit"}],
    )

    assert editor.diagnostics(uri) == []


def test_a_text_that_does_not_parse_is_said_and_does_no_harm(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()

    shown = editor.open(uri, "import jax\nstep = jax.pmap(f\n")

    assert [(each["code"], each["severity"]) for each in shown] == [("JXD901", 1)]
    assert editor.actions(uri, 1) == []
    editor.tell(
        "textDocument/didChange",
        textDocument={"uri": uri, "version": 2},
        contentChanges=[{"text": "import jax\nstep = jax.pmap(f)\n"}],
    )
    assert [each["code"] for each in editor.diagnostics(uri)] == ["JXD001"]


def test_a_fix_is_offered_where_the_cursor_is(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()
    text = "import jax\n\nn = jax.lax.psum(1, 'i')\nm = jax.lax.psum(1, 'j')\n"
    editor.open(uri, text)

    actions = editor.actions(uri, 2, "quickfix")

    assert [action["title"] for action in actions] == [
        "JXD306: use jax.lax.axis_size",
        "JXD306: switch it off on this line",
    ]
    assert [_mended(text, action, uri) for action in actions] == [
        "import jax\n\nn = jax.lax.axis_size('i')\nm = jax.lax.psum(1, 'j')\n",
        "import jax\n\nn = jax.lax.psum(1, 'i')  # noqa: JXD306\nm = jax.lax.psum(1, 'j')\n",
    ]
    assert actions[0]["isPreferred"]
    assert actions[0]["kind"] == "quickfix"


def test_a_fix_brings_its_import(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()
    text = "from jax.lax import psum\nn = psum(1, 'i') + psum(x, 'i')\n"
    editor.open(uri, text)

    action = editor.actions(uri, 1)[0]

    assert _mended(text, action, uri) == (
        "from jax.lax import psum\nimport jax\nn = jax.lax.axis_size('i') + psum(x, 'i')\n"
    )


def test_all_safe_fixes_at_once(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()
    text = "import jax\nn = jax.lax.psum(1, 'i')\nm = jax.lax.psum(1, 'j')\n"
    editor.open(uri, text)

    actions = editor.actions(uri, 0, "source.fixAll")

    assert [action["kind"] for action in actions] == ["source.fixAll.jax-dist"]
    assert _mended(text, actions[0], uri) == (
        "import jax\nn = jax.lax.axis_size('i')\nm = jax.lax.axis_size('j')\n"
    )


def test_the_settings_of_the_project_hold(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.jax-dist]\nignore = ["JXD001"]\n')
    editor = _Editor(tmp_path)
    uri = (tmp_path / "train.py").as_uri()
    text = "import jax\nstep = jax.pmap(f)\nn = jax.lax.psum(1, 'i')\n"

    shown = editor.open(uri, text)

    assert [each["code"] for each in shown] == ["JXD306"]
    (tmp_path / "pyproject.toml").write_text('[tool.jax-dist]\nignore = ["JXD306"]\n')
    editor.tell("textDocument/didSave", textDocument={"uri": uri})
    assert [each["code"] for each in editor.diagnostics(uri)] == ["JXD001"]
    editor.kill()


def test_settings_that_cannot_be_read_are_said(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.jax-dist]\nselct = []\n")
    editor = _Editor(tmp_path)
    document = {"languageId": "python", "version": 1, "text": "import jax\nf = jax.pmap(g)\n"}

    document["uri"] = uri = (tmp_path / "train.py").as_uri()
    editor.tell("textDocument/didOpen", textDocument=document)

    said = editor.notified("window/showMessage")
    assert "there is no setting 'selct'. Did you mean select?" in said["message"]
    assert [each["code"] for each in editor.diagnostics(uri)] == ["JXD001"]
    editor.kill()


def test_a_closed_document_has_no_findings(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()
    editor.open(uri, "import jax\nstep = jax.pmap(f)\n")

    editor.tell("textDocument/didClose", textDocument={"uri": uri})

    assert editor.diagnostics(uri) == []


def test_the_cells_of_a_notebook_are_seen_together(editor, tmp_path):
    notebook = (tmp_path / "train.ipynb").as_uri()
    cells = {
        f"{notebook}#a": "%matplotlib inline\nimport flax",
        f"{notebook}#b": "%%time\nx = !nproc\nfrom jax.lax import psum\nn = psum(1, 'i')\n",
    }
    editor.tell(
        "notebookDocument/didOpen",
        notebookDocument={
            "uri": notebook,
            "notebookType": "jupyter-notebook",
            "version": 1,
            "cells": [
                {"kind": 2, "document": f"{notebook}#a"},
                {"kind": 1, "document": f"{notebook}#prose"},
                {"kind": 2, "document": f"{notebook}#b"},
            ],
        },
        cellTextDocuments=[
            {"uri": uri, "languageId": "python", "version": 1, "text": text}
            for uri, text in cells.items()
        ],
    )

    assert editor.diagnostics(f"{notebook}#a") == []
    shown = editor.diagnostics(f"{notebook}#b")
    assert [(each["code"], _place(each)) for each in shown] == [("JXD306", (3, 4, 3, 16))]
    action = editor.actions(f"{notebook}#b", 3)[0]
    assert {uri: _mended(text, action, uri) for uri, text in cells.items()} == {
        f"{notebook}#a": "%matplotlib inline\nimport flax\nimport jax",
        f"{notebook}#b": "%%time\nx = !nproc\nfrom jax.lax import psum\n"
        "n = jax.lax.axis_size('i')\n",
    }


def test_it_ends_when_the_editor_says_so(tmp_path):
    editor = _Editor(tmp_path)

    assert editor.started["serverInfo"] == {"name": "jax-dist", "version": jax_dist.__version__}
    assert editor.close("shutdown", "exit") == (0, b"")
    editor.kill()


@pytest.mark.parametrize(("said", "code"), [(("exit",), 1), ((), 0)])
def test_it_ends_when_the_editor_goes_without_a_word(tmp_path, said, code):
    editor = _Editor(tmp_path)

    assert editor.close(*said) == (code, b"")
    editor.kill()


def test_one_pmap_is_migrated_where_the_cursor_is(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()
    text = "import jax\n\nstep = jax.pmap(f)\ntest = jax.pmap(g)\n"
    editor.open(uri, text)

    (action,) = [each for each in editor.actions(uri, 2) if "migrate" in each["title"]]

    assert action["title"] == "JXD001: migrate this pmap to jax_dist"
    assert _mended(text, action, uri) == (
        "import jax\nimport jax_dist\n\nstep = jax_dist.pmap(f)\ntest = jax.pmap(g)\n"
    )


def test_a_pmap_that_would_be_left_is_not_offered(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()
    editor.open(uri, "import jax\nis_pmap = t == jax.pmap\nstep = jax.pmap(f)\n")

    titles = [action["title"] for action in editor.actions(uri, 2)]

    assert titles == ["JXD001: switch it off on this line"]


def test_a_hover_shows_the_page_of_the_rule(editor, tmp_path):
    uri = (tmp_path / "train.py").as_uri()
    editor.open(uri, "import jax\n\nn = jax.lax.psum(1, 'i')\n")
    document = {"uri": uri}

    there = editor.ask(
        "textDocument/hover", textDocument=document, position={"line": 2, "character": 6}
    )
    beside = editor.ask(
        "textDocument/hover", textDocument=document, position={"line": 0, "character": 2}
    )

    assert there["contents"]["kind"] == "markdown"
    assert "JXD306" in there["contents"]["value"]
    assert beside is None
