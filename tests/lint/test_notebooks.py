"""Notebooks: cells as one Python text, and their JSON written again in its own layout."""

import ast
import json
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_dist.lint.findings import Position
from jax_dist.lint.model.sources import UnreadableError
from jax_dist.lint.notebooks import Notebook, read_notebook

# Written by several programs in turn: spaces that differ, escapes that need not be, outputs.
_MIXED = rb"""{ "nbformat":4,
 "cells": [
  {"cell_type": "markdown", "source": ["# jax.pmap\n", "%%time"]},
  {
   "cell_type": "code", "execution_count": 1,
   "outputs": [{"text": ["import jax\n"], "data": {"source": ["no"]}}],
   "source": [
    "import jax\n",
    "print(\"\u00e9\", '\/', 1 \u003c 2)\n",
    "%matplotlib inline\n",
    "n = jax.lax.psum(1, 'i')"
   ]
  },
  {"source": "%%time\nm = jax.lax.psum(1, 'j')\n\u0023 done", "cell_type": "code"},
  {"cell_type": "code", "source": []},
  {"cell_type": "code", "source": ["%%bash\n", "pip install jax"]}
 ],
 "metadata": {"language_info": {"name": "python"}}}"""


def _notebook(*cells: str) -> Notebook:
    data = {"cells": [{"cell_type": "code", "source": cell} for cell in cells]}
    return read_notebook("a.ipynb", json.dumps(data).encode())


def _replaced(notebook: Notebook, old: bytes, new: bytes) -> bytes:
    assert notebook.code.count(old) == 1
    return notebook.written(notebook.code.replace(old, new))


class TestReading:
    def test_the_code_is_that_of_the_python_cells(self):
        notebook = read_notebook("a.ipynb", _MIXED)

        assert notebook.code.decode() == textwrap.dedent("""\
            # cell 2
            import jax
            print("é", '/', 1 < 2)
            %matplotlib inline
            n = jax.lax.psum(1, 'i')
            # cell 3
            %%time
            m = jax.lax.psum(1, 'j')
            # done""")
        assert notebook.unparsed == ()

    def test_what_is_parsed_has_no_magics_and_the_same_places(self):
        notebook = read_notebook("a.ipynb", _MIXED)

        shown = notebook.code.replace(b"%matplotlib inline", b" " * 18)
        assert notebook.python == shown.replace(b"%%time", b" " * 6)

    def test_positions_count_all_cells_and_the_lines_in_them(self):
        notebook = read_notebook("a.ipynb", _MIXED)

        assert notebook.position(notebook.code.index(b"jax.lax.psum(1, 'i')")) == Position(4, 5, 2)
        assert notebook.position(notebook.code.index(b"jax.lax.psum(1, 'j')")) == Position(2, 5, 3)
        assert notebook.position(notebook.code.index(b"# done")) == Position(3, 1, 3)
        assert notebook.line_text(notebook.code.index(b"done")) == "# done"

    def test_a_cell_that_is_no_python_does_not_hide_the_others(self):
        notebook = _notebook("import jax", "x = (\nSELECT * FROM t", "jax.pmap(f)")

        ast.parse(notebook.python)
        (error,) = notebook.unparsed
        assert notebook.position(notebook.line_starts[error.line - 1]) == Position(1, 1, 2)
        assert error.message == "'(' was never closed"
        assert b"SELECT" in notebook.code
        assert b"SELECT" not in notebook.python
        assert b"jax.pmap(f)" in notebook.python

    def test_a_cell_that_looks_like_the_mark_between_cells_is_not_edited(self):
        notebook = _notebook("a = 1\n# cell 2\nb = 2", "c = 3")

        with pytest.raises(ValueError, match="an edit reaches over the end of a cell"):
            notebook.written(notebook.code)

    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"", "the file is no notebook: Expecting value: line 1 column 1 (char 0)"),
            (b"[1]", "the file is no notebook: it has no list of cells"),
            (b"{}", "the file is no notebook: it has no list of cells"),
            (
                b'{"cells": [{"cell_type": "code", "source": [1, 2]}]}',
                "the file is no notebook: a line of a cell is no text",
            ),
            (
                b'{"cells": [}',
                "the file is no notebook: Expecting value: line 1 column 12 (char 11)",
            ),
            (b'{"cells": {}}', "the file is no notebook: it has no list of cells"),
            (b'{"cells": [{"cell_type": "code", "source": "\\ud83d"}]}', None),
            (b"\xff", None),
            (b"[" * 100_000, None),
            (b'{"cells": ' + b"[" * 100_000, None),
        ],
    )
    def test_what_is_no_notebook_is_said_to_be_none(self, data, why):
        with pytest.raises(UnreadableError) as caught:
            read_notebook("a.ipynb", data)

        assert why is None or str(caught.value) == why

    def test_what_is_cut_off_or_garbled_never_crashes(self):
        outcomes = set()
        for place in range(len(_MIXED)):
            for data in (_MIXED[:place], _MIXED[:place] + b"]" + _MIXED[place + 1 :]):
                try:
                    notebook = read_notebook("a.ipynb", data)
                except UnreadableError:
                    outcomes.add("unreadable")
                else:
                    outcomes.add("read")
                    assert notebook.written(notebook.code) == data

        assert outcomes == {"read", "unreadable"}


class TestWriting:
    def test_without_a_change_all_bytes_are_as_they_were(self):
        for data in (
            _MIXED,
            b"\xef\xbb\xbf" + _MIXED,
            _MIXED.replace(b"\n", b"\r\n"),
            b'{"cells":[]}',
        ):
            notebook = read_notebook("a.ipynb", data)

            assert notebook.written(notebook.code) == data

    @pytest.mark.parametrize("indent", [None, 1, 2, "\t"])
    @pytest.mark.parametrize("ascii_only", [True, False])
    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    @pytest.mark.parametrize("end", ["", "\n"])
    def test_an_edit_changes_only_its_line(self, indent, ascii_only, newline, end):
        book = json.loads(_MIXED)
        text = json.dumps(book, indent=indent, ensure_ascii=ascii_only) + end
        data = text.replace("\n", newline).encode()
        notebook = read_notebook("a.ipynb", data)

        for name in (b"i", b"j"):
            old, new = b"psum(1, '%b')" % name, b"axis_size('%b')" % name
            assert _replaced(notebook, old, new) == data.replace(old, new)

    def test_every_other_byte_stays(self):
        data = rb"""{"cells":[{"cell_type" : "code","outputs":[1e400, 1e-7, 0.12345678901234567,
	{"a": 1, "a": 2}],  "source":["\u0061 = \u003c\/ '1'\n" ,"b = 'x'"]}],"n": 1E+02}"""
        notebook = read_notebook("a.ipynb", data)

        assert _replaced(notebook, b"b = ", b"c = ") == data.replace(b"b = ", b"c = ")
        assert notebook.written(notebook.code + b"\nd").endswith(
            rb"""["\u0061 = \u003c\/ '1'\n" ,"b = 'x'\n" ,"d"]}],"n": 1E+02}"""
        )

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (["a = 1"], ["a = 1\n", "b = 2"]),
            (["a = 1\n", "b = 2"], ["a = 1\n"]),
            (["a = 1\n", "b = 2"], ["b = 2"]),
            (["a = 1\n", "b = 2\n", "c = 3"], ["b = 2\n", "c = 4"]),
            (["a = 1\n"], ["a = 1\n", "b = 2"]),
            (["a = 1"], []),
            (["a = 1\n", "b = 2"], ["a = 'é'\n", "b = 2"]),
            (["a = 1\n", "a = 1\n", "a = 1"], ["a = 1\n", "a = 1"]),
        ],
    )
    def test_a_list_of_lines_stays_one(self, before, after):
        data = json.dumps({"cells": [{"cell_type": "code", "source": before}]}, indent=1).encode()
        notebook = read_notebook("a.ipynb", data)

        written = notebook.written(b"# cell 1\n" + "".join(after).encode())

        assert json.loads(written)["cells"][0]["source"] == after
        assert written.isascii()
        assert written.count(b"\n") == data.count(b"\n") + max(len(after), 1) - len(before)

    def test_letters_are_written_as_the_file_writes_them(self):
        data = json.dumps({"cells": [{"cell_type": "code", "source": ["x = 'é'"]}]}).encode()
        spelled = data.replace(b"\\u00e9", "é".encode())

        written = [
            _replaced(read_notebook("a.ipynb", each), b"x =", "ü =".encode())
            for each in (data, spelled)
        ]

        assert written == [
            data.replace(b"x =", b"\\u00fc ="),
            spelled.replace(b"x =", "ü =".encode()),
        ]

    def test_lines_that_are_cut_otherwise_are_written_anew(self):
        data = b'{"cells": [{"cell_type": "code", "source": ["a = ", "1\\nb = 2"]}]}'
        notebook = read_notebook("a.ipynb", data)

        assert notebook.written(notebook.code) == data
        assert _replaced(notebook, b"b = 2", b"b = 3") == data.replace(
            b'["a = ", "1\\nb = 2"]', b'["a = 1\\n", "b = 3"]'
        )

    def test_what_is_put_at_the_very_top_goes_into_the_first_cell(self):
        notebook = read_notebook("a.ipynb", _MIXED)

        written = notebook.written(b"import jax_dist\n" + notebook.code)

        assert json.loads(written)["cells"][1]["source"][:2] == [
            "import jax_dist\n",
            "import jax\n",
        ]

    def test_an_edit_over_the_end_of_a_cell_is_refused(self):
        notebook = read_notebook("a.ipynb", _MIXED)

        with pytest.raises(ValueError, match="an edit reaches over the end of a cell of a.ipynb"):
            _replaced(notebook, b"\n# cell 3\n", b"\n")

    def test_edited_is_what_would_be_read(self):
        notebook = read_notebook("a.ipynb", _MIXED)

        edited = notebook.edit(notebook.code.replace(b"1, 'i'", b"2, 'i'"))

        assert edited.python == notebook.python.replace(b"1, 'i'", b"2, 'i'")

    @given(
        st.lists(
            st.text(alphabet='ab"\\\n/é\u2028\U0001f600\t ', min_size=1, max_size=12), min_size=1
        ),
        st.lists(st.text(alphabet='ab"\\\né😀 ', max_size=12), min_size=1),
        st.booleans(),
        st.sampled_from([None, 1]),
    )
    def test_any_text_can_become_any_other(self, before, after, as_list, indent):
        cells = [
            {"cell_type": "code", "source": text.splitlines(keepends=True) if as_list else text}
            for text in before
        ]
        data = json.dumps({"cells": cells, "x": "é"}, indent=indent).encode()
        after = [*after, *before][: len(before)]
        notebook = read_notebook("a.ipynb", data)
        code = "\n".join(f"# cell {number}\n{text}" for number, text in enumerate(after, start=1))

        written = json.loads(notebook.written(code.encode()))

        assert ["".join(cell["source"]) for cell in written["cells"]] == after
        assert written["x"] == "é"


class TestMagics:
    @pytest.mark.parametrize(
        ("cell", "shown"),
        [
            ("!pip install jax\nx = 1", "                \nx = 1"),
            ("if colab:\n  !pip install jax\n", "if colab:\n  _               \n"),
            ("files = !ls\n", "files = _  \n"),
            ("x = 1\njax.pmap?\n", "x = 1\n         \n"),
            ("?jax.pmap\nf??\n", "         \n   \n"),
            ("a, b = %time f(x)\n", "a, b = _    ;f(x)\n"),
            ("%timeit -n 5 -r2 pmap(f)(x)\n", "_              ; pmap(f)(x)\n".replace("; ", " ;")),
            ("timeit -n 5 pmap(f)(x)\ny = 1\n!ls\n", "_          ;pmap(f)(x)\ny = 1\n   \n"),
            ("% matplotlib inline\nx = 1", " " * 19 + "\nx = 1"),
            ("  %time y = f(x)\n", None),
            ("if x:\n  %time y = f(x)\n", "if x:\n  _    ;y = f(x)\n"),
            ("%run \\\n  file.py\nx = 1", "      \n         \nx = 1"),
            ("!echo é\nx = 1", " " * 8 + "\nx = 1"),
            ("x = (a\n  % b)\n!ls\n", "x = (a\n  % b)\n   \n"),
            ('s = """\n!no\n"""\n', 's = """\n!no\n"""\n'),
            ("s = '(' # (\n!ls\n", "s = '(' # (\n   \n"),
            ("x = 5 % 3\nx %= 2\n", "x = 5 % 3\nx %= 2\n"),
        ],
    )
    def test_a_magic_is_hidden_and_nothing_else(self, cell, shown):
        notebook = _notebook(cell)
        if shown is None:
            assert [error.message for error in notebook.unparsed] == ["unexpected indent"]
            return
        assert notebook.unparsed == ()
        assert notebook.python.decode() == f"# cell 1\n{shown}"
        assert len(shown.encode()) == len(cell.encode())

    @pytest.mark.parametrize(
        ("cell", "body"),
        [
            ("x = 1", "x = 1"),
            ("%%time\nx = 1", "      \nx = 1"),
            ("\n  %%timeit -n 5 setup()\nf(x)", "\n" + " " * 23 + "\nf(x)"),
            ("%%capture", " " * 9),
            ("%%bash\nls", None),
            ("%%html\n<b>", None),
            ("%%writefile train.py\nimport jax", None),
        ],
    )
    def test_where_the_python_of_a_cell_begins(self, cell, body):
        assert _notebook(cell).python.decode() == ("" if body is None else f"# cell 1\n{body}")
