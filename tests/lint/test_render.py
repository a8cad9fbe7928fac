"""The forms of output, each as the very text that a person or a program gets."""

import json
import textwrap

import pytest

from jax_dist.lint.model import notebooks, sources
from jax_dist.lint.model.findings import Edit, Finding, Fix, Position, Safety
from jax_dist.lint.output import report
from jax_dist.lint.output.context import RenderContext
from jax_dist.lint.output.markdown import page_markdown
from jax_dist.lint.output.report import FORMATS
from jax_dist.lint.rules import Page

_PAGE = Page(
    code="JXD306",
    name="psum-of-one",
    what="Finds `psum(1, axis)`.",
    why="It reads as communication.",
    example="n = psum(1, 'i')\n",
    instead="n = axis_size('i')\n",
    fix="Safe: the same value.",
    since="jax 0.6.1.",
    source="Its page (https://docs.jax.dev/axis_size.html), and a look.",
)
_OFF = Page(
    "JXD205", "may", "Finds.", "May.", "x\n", "A sentence.", "None: -", "-", "-", default=False
)
_PAGES = {page.code: page for page in (_PAGE, _OFF)}


def _finding(
    code: bytes,
    found: bytes,
    *,
    path: str = "train.py",
    rule: str = "JXD306",
    message: str = "psum(1, axis) is axis_size(axis)",
    fix: Fix | None = None,
) -> Finding:
    source = sources.read(path, code)
    start = code.index(found)
    end = start + len(found)
    return Finding(
        path=path,
        code=rule,
        name="psum-of-one",
        message=message,
        start=source.position(start),
        end=source.position(end),
        span=(start, end),
        line_text=source.line_text(start),
        fix=fix,
    )


def _fix(safety: Safety = Safety.SAFE, *edits: Edit, **more) -> Fix:
    return Fix("use axis_size", safety, edits or (Edit(0, 4, "axis_size"),), **more)


def _text(*findings: Finding, colour: bool = False) -> str:
    return FORMATS["text"](findings, RenderContext(_PAGES, colour=colour))


class TestText:
    def test_a_finding_with_its_line_what_it_points_at_and_its_fix(self):
        code = b"import jax\n\n\n\n\n\n\n\n\nn = psum(1, 'i') + 1\n"

        assert _text(_finding(code, b"psum(1, 'i')", fix=_fix())) == textwrap.dedent("""\
            train.py:10:5: JXD306 [*] psum(1, axis) is axis_size(axis)
            10 | n = psum(1, 'i') + 1
               |     ^^^^^^^^^^^^
               help: use axis_size

            Found 1 finding in 1 file (1 fixable with --fix).
            """)

    def test_a_tab_is_four_blanks_and_a_wide_character_two_columns(self):
        accent = "e\N{COMBINING ACUTE ACCENT}"  # takes one column
        code = f"\t日 = {accent} = psum(1)\n".encode()

        assert _text(_finding(code, b"psum(1)")) == (
            "train.py:1:11: JXD306 psum(1, axis) is axis_size(axis)\n"
            f"1 |     日 = {accent} = psum(1)\n"
            f"  | {' ' * 4}     {' '}   ^^^^^^^\n"
            "\n"
            "Found 1 finding in 1 file.\n"
        )

    def test_what_takes_several_lines_is_marked_to_the_end_of_the_first(self):
        code = b"n = psum(\n1)\n"

        assert _text(_finding(code, b"psum(\n1)")).splitlines()[1:3] == [
            "1 | n = psum(",
            "  |     ^^^^^",
        ]

    def test_a_long_line_is_cut_around_what_is_found(self):
        code = b"x = '" + b"a" * 300 + b"'; n = psum(1, 'i'); y = '" + b"b" * 300 + b"'\n"

        _, line, mark, *_ = _text(_finding(code, b"psum(1, 'i')")).splitlines()

        assert line == "1 | …" + "a" * 33 + "'; n = psum(1, 'i'); y = '" + "b" * 101 + "…"
        assert mark == "  | " + " " * 41 + "^" * 12

    def test_an_empty_line_is_not_shown(self):
        position = Position(3, 1)
        finding = Finding("a.py", "JXD901", "x", "no text", position, position, (0, 0), "")

        assert _text(finding) == ("a.py:3:1: JXD901 no text\n\nFound 1 finding in 1 file.\n")

    def test_where_nothing_is_wide_a_place_still_gets_a_mark(self):
        position = Position(1, 4)
        finding = Finding("a.py", "JXD901", "x", "bad", position, position, (0, 0), "f = (")

        assert _text(finding).splitlines()[1:3] == ["1 | f = (", "  |    ^"]

    def test_what_could_harm_a_terminal_is_not_written_to_it(self):
        code = b"s = '\x1b[2J'; psum(1)\n"
        finding = _finding(code, b"psum(1)", path="a\x1b.py", message="no\x07")

        lines = _text(finding).splitlines()

        assert lines[:3] == [
            "a�.py:1:13: JXD306 no�",
            "1 | s = '�[2J'; psum(1)",
            "  |             ^^^^^^^",
        ]

    def test_the_cell_of_a_notebook_is_named(self):
        start, end = Position(2, 1, cell=3), Position(2, 5, cell=3)
        finding = Finding("a.ipynb", "JXD306", "x", "bad", start, end, (0, 4), "psum")

        assert _text(finding).splitlines()[0] == "a.ipynb:cell 3:2:1: JXD306 bad"

    def test_how_a_fix_is_made_is_said(self):
        fixes = [_fix(Safety.UNSAFE), _fix(Safety.DISPLAY)]
        shown = _text(*[_finding(b"psum(1)", b"psum", fix=fix) for fix in fixes])

        assert [line for line in shown.splitlines() if "help" in line] == [
            "  help: use axis_size (--unsafe-fixes)",
            "  help: use axis_size (by hand)",
        ]
        assert "[*]" not in shown

    def test_a_sketch_is_shown(self):
        code = b"import jax\n\nn = psum(1, 'i')\nm = 1\nk = psum(1, 'j')\n"
        made = (Edit(16, 20, "size"), Edit(39, 43, "size"))
        fix = _fix(Safety.DISPLAY, *made, imports=("from a import size",))
        context = RenderContext(_PAGES, lambda path: sources.read(path, code))

        shown = FORMATS["text"]([_finding(code, b"psum(1, 'i')", fix=fix)], context)

        assert shown.splitlines()[3:-2] == [
            "  help: use axis_size (by hand)",
            "    + from a import size",
            "    - n = psum(1, 'i')",
            "    + n = size(1, 'i')",
            "    - k = psum(1, 'j')",
            "    + k = size(1, 'j')",
        ]

    def test_colours(self):
        shown = _text(_finding(b"psum(1)", b"psum", fix=_fix()), colour=True)

        assert shown == (
            "\x1b[1mtrain.py\x1b[0m:1:1: \x1b[1;31mJXD306\x1b[0m \x1b[36m[*] \x1b[0m"
            "psum(1, axis) is axis_size(axis)\n"
            "\x1b[1;34m1\x1b[0m \x1b[1;34m|\x1b[0m psum(1)\n"
            "  \x1b[1;34m|\x1b[0m \x1b[1;31m^^^^\x1b[0m\n"
            "  \x1b[36mhelp:\x1b[0m use axis_size\n"
            "\n"
            "Found 1 finding in 1 file (1 fixable with --fix).\n"
        )

    @pytest.mark.parametrize(
        ("fixes", "said"),
        [
            ([], "No findings."),
            ([None, None], "Found 2 findings in 1 file."),
            ([Safety.SAFE, None], "Found 2 findings in 1 file (1 fixable with --fix)."),
            ([Safety.UNSAFE], "Found 1 finding in 1 file (1 fixable with --unsafe-fixes)."),
            (
                [Safety.SAFE, Safety.UNSAFE, Safety.UNSAFE, Safety.DISPLAY],
                "Found 4 findings in 1 file (1 fixable with --fix, 2 more with --unsafe-fixes).",
            ),
        ],
    )
    def test_the_last_line_counts(self, fixes, said):
        findings = [_finding(b"psum", b"psum", fix=_fix(each) if each else None) for each in fixes]

        assert report.summary(findings) == said

    def test_statistics_have_the_most_frequent_first(self):
        findings = [_finding(b"psum", b"psum", rule="JXD001")] * 2
        findings += [_finding(b"psum", b"psum", rule="JXD401")] * 10
        findings += [_finding(b"psum", b"psum", rule="JXD301", fix=_fix())] * 2

        assert report.statistics(findings) == textwrap.dedent("""\
            10  JXD401      psum-of-one
             2  JXD001      psum-of-one
             2  JXD301  [*] psum-of-one
            """)
        assert report.statistics([]) == ""


class TestJson:
    def test_all_that_is_known(self):
        code = "é = psum(1, 'i')\n".encode()
        fix = _fix(Safety.UNSAFE, Edit(5, 9, "axis_size"), imports=("import jax",), group="f")
        source = sources.read("train.py", code)

        shown = FORMATS["json"](
            [_finding(code, b"psum(1, 'i')", fix=fix)], RenderContext(_PAGES, lambda path: source)
        )

        assert json.loads(shown) == [
            {
                "path": "train.py",
                "code": "JXD306",
                "name": "psum-of-one",
                "message": "psum(1, axis) is axis_size(axis)",
                "severity": "warning",
                "start": {"line": 1, "column": 5},
                "end": {"line": 1, "column": 17},
                "bytes": [5, 17],
                "line": "é = psum(1, 'i')",
                "url": "https://docs.jax.dev/axis_size.html",
                "fix": {
                    "title": "use axis_size",
                    "safety": "unsafe",
                    "group": "f",
                    "edits": [
                        {
                            "bytes": [5, 9],
                            "start": {"line": 1, "column": 5},
                            "end": {"line": 1, "column": 9},
                            "text": "axis_size",
                        }
                    ],
                    "imports": ["import jax"],
                },
            }
        ]

    def test_without_findings_it_is_an_empty_list(self):
        assert FORMATS["json"]([], RenderContext({})) == "[]\n"

    def test_without_the_file_edits_have_bytes_only(self):
        shown = FORMATS["json"]([_finding(b"psum", b"psum", fix=_fix())], RenderContext({}))

        assert json.loads(shown)[0]["fix"]["edits"] == [{"bytes": [0, 4], "text": "axis_size"}]

    def test_the_cell_is_told(self):
        place = Position(2, 1, cell=3)
        finding = Finding("a.ipynb", "JXD306", "x", "bad", place, place, (0, 0), "psum")

        shown = json.loads(FORMATS["json"]([finding], RenderContext({})))

        assert shown[0]["start"] == {"cell": 3, "line": 2, "column": 1}


class TestGithub:
    def test_one_command_a_finding(self):
        context = RenderContext(_PAGES)
        many = [
            _finding(b"n = psum(1)\n", b"psum(1)"),
            _finding(b"x\nn = psum(\n1)\n", b"psum(\n1)", rule="JXD205"),
            _finding(b"(\n", b"(", rule="JXD901"),
        ]

        assert FORMATS["github"](many, context) == (
            "::warning title=jax-dist (JXD306),file=train.py,line=1,endLine=1,col=5,endColumn=12"
            "::JXD306 psum(1, axis) is axis_size(axis)\n"
            "::notice title=jax-dist (JXD205),file=train.py,line=2,endLine=3"
            "::JXD205 psum(1, axis) is axis_size(axis)\n"
            "::error title=jax-dist (JXD901),file=train.py,line=1,endLine=1,col=1,endColumn=2"
            "::JXD901 psum(1, axis) is axis_size(axis)\n"
        )

    def test_what_a_command_could_not_hold_is_escaped(self):
        finding = _finding(b"n", b"n", path="a,b:c%.py", message="100%\nof::it\r")

        assert FORMATS["github"]([finding], RenderContext({})) == (
            "::warning title=jax-dist (JXD306),file=a%2Cb%3Ac%25.py,line=1,endLine=1,col=1,"
            "endColumn=2::JXD306 100%25%0Aof::it%0D\n"
        )


class TestSarif:
    def _run(self, *findings: Finding, code: bytes = b"n = psum(1, 'i')\n") -> dict:
        context = RenderContext(_PAGES, lambda path: sources.read(path, code))
        document = json.loads(FORMATS["sarif"](findings, context))
        assert document["version"] == "2.1.0"
        (run,) = document["runs"]
        return run

    def test_a_fingerprint_outlives_a_move_and_is_the_only_one_of_its_kind(self):
        here = _finding(b"n = psum(1)\n", b"psum(1)")
        moved = _finding(b"x\n\n    n = psum(1)\n", b"psum(1)")
        other = _finding(b"n = psum(1)\n", b"psum(1)", path="other.py")

        marks = [
            [result["partialFingerprints"]["jaxDistFinding/v1"] for result in run["results"]]
            for run in (self._run(here), self._run(moved), self._run(here, here, other))
        ]

        assert marks[0] == marks[1]
        assert marks[2][0] == marks[0][0]
        assert len(set(marks[2])) == 3

    def test_a_result(self):
        code = b"n = psum(1, 'i')\n"

        run = self._run(_finding(code, b"psum(1, 'i')", path="a b/é.py"))

        place = {"uri": "a%20b/%C3%A9.py"}
        assert run["columnKind"] == "unicodeCodePoints"
        assert run["results"] == [
            {
                "ruleId": "JXD306",
                "ruleIndex": 0,
                "level": "warning",
                "message": {"text": "psum(1, axis) is axis_size(axis)"},
                "locations": [
                    {
                        "physicalLocation": {
                            "artifactLocation": place,
                            "region": {
                                "startLine": 1,
                                "startColumn": 5,
                                "endLine": 1,
                                "endColumn": 17,
                            },
                        }
                    }
                ],
                "partialFingerprints": {"jaxDistFinding/v1": "964fc86cb06d2e39cdafe17dc8869165"},
            }
        ]

    def test_the_rules_bring_their_pages(self):
        code = b"n = psum(1, 'i')\n"

        run = self._run(
            _finding(code, b"psum(1, 'i')"),
            _finding(code, b"psum(1, 'i')", rule="JXD205"),
        )

        assert run["tool"]["driver"]["name"] == "jax-dist"
        rules = run["tool"]["driver"]["rules"]
        assert [rule["id"] for rule in rules] == ["JXD205", "JXD306"]
        assert [rule["defaultConfiguration"] for rule in rules] == [
            {"enabled": False, "level": "note"},
            {"enabled": True, "level": "warning"},
        ]
        assert rules[1]["name"] == "PsumOfOne"
        assert rules[1]["helpUri"] == "https://docs.jax.dev/axis_size.html"
        assert rules[1]["help"]["markdown"] == page_markdown(_PAGE)
        assert "helpUri" not in rules[0]
        assert [result["ruleIndex"] for result in run["results"]] == [1, 0]


def _of_notebook(*imports: str) -> tuple[notebooks.Notebook, Finding]:
    data = b"""{
 "cells": [
  {"cell_type": "code", "source": [
   "import flax\\n",
   "n = psum(1, 'i')"
  ]}
 ]
}
"""
    notebook = notebooks.read_notebook("a.ipynb", data)
    start = notebook.code.index(b"psum")
    finding = Finding(
        fix=_fix(Safety.SAFE, Edit(start, start + 4, "axis_size"), imports=imports),
        path="a.ipynb",
        code="JXD306",
        name="psum-of-one",
        message="bad",
        start=notebook.position(start),
        end=notebook.position(start + 4),
        span=(start, start + 4),
        line_text=notebook.line_text(start),
    )
    return notebook, finding


def test_a_place_in_a_notebook_is_named_in_the_message():
    notebook, finding = _of_notebook()

    assert FORMATS["github"]([finding], RenderContext({}, lambda path: notebook)) == (
        "::warning title=jax-dist (JXD306),file=a.ipynb,line=1,endLine=1,col=1,endColumn=1"
        "::JXD306 cell 1, line 2: bad\n"
    )


def test_a_page_as_markdown():
    assert page_markdown(_PAGE, 2) == textwrap.dedent("""\
        ## JXD306 psum-of-one

        ### What it does

        Finds `psum(1, axis)`.

        ### Why this is bad

        It reads as communication.

        ### Example

        ```py
        n = psum(1, 'i')
        ```

        ### Use instead

        ```py
        n = axis_size('i')
        ```

        ### Fix safety

        Safe: the same value.

        ### Since

        jax 0.6.1.

        ### Source

        Its page (https://docs.jax.dev/axis_size.html), and a look.
        """)
    assert page_markdown(_OFF).endswith("\n\nOff by default: `--extend-select` turns it on.\n")
    assert "## Use instead\n\nA sentence.\n" in page_markdown(_OFF)
