"""Edits that leave the lines of a program where they are, and marks that tell what ran."""

import ast
import types
from typing import Any

import pytest

from jax_dist.migrate.verify import edits
from jax_dist.migrate.verify.program_text import HostForm, Marked, ProgramText

_IMPORT = "import _jax_dist_recording.start as __jd__\n"


# --- edits


def test_edits_are_made_side_by_side():
    program = ProgramText("\u00e9 = f(x)\ny = 2\n")
    assert program.edited == "\u00e9 = f(x)\ny = 2\n"
    program.replace(14, 15, "\u00fc")
    program.replace(5, 6, "g")
    program.replace(10, 10, "z = 1\n")
    program.replace(0, 0, "")

    assert program.edited == "\u00e9 = g(x)\nz = 1\ny = \u00fc\n"
    program.replace(14, 16, "!")
    program.replace(13, 15, "?")
    with pytest.raises(AssertionError):
        _ = program.edited


def test_which_lines_an_edit_put_a_line_above():
    program = ProgramText("a = 1\nb = 2\nc = 3\n")
    for start, stop, new in (
        *((12, 12, "y\n"), (0, 0, "x\n"), (6, 6, "no line"), (6, 11, "b\n"), (12, 12, "z\n")),
    ):
        program.replace(start, stop, new)

    assert program.added() == [1, 3, 3]
    program = ProgramText("\nx = 1\n")
    program.replace(1, 1, "y\n")
    assert program.added() == [2]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", f"{_IMPORT}x = 1\n"),
        ("'doc'\nx = 1\n", f"'doc'\n{_IMPORT}x = 1\n"),
        (
            "'doc'\nfrom __future__ import annotations\n# x\n\n@f\ndef g(): ...\n",
            f"'doc'\nfrom __future__ import annotations\n# x\n\n{_IMPORT}@f\ndef g(): ...\n",
        ),
        ("from a import b\nx = 1\n", f"{_IMPORT}from a import b\nx = 1\n"),
        ("'doc'\n", "'doc'\n"),
        ("", ""),
    ],
)
def test_the_import_comes_as_early_as_it_may(text: str, expected: str):
    program = ProgramText(text)
    program.import_start()

    assert program.edited == expected


def test_where_things_are():
    text = "\u00e9 = (a +\n  b)  # c\nb, *a[1:2] = f(a, *b)\n"
    program = ProgramText(text)
    data = text.encode()

    assert (program.offset(None, None), program.offset(2, 1)) == (0, data.index(b"  b)") + 1)
    value = program.tree.body[0].value  # pyright: ignore[reportAttributeAccessIssue]
    assert program.span(value) == (6, data.index(b")"))
    assert program.between(*program.span(value)) == "a +\n  b"
    assert program.spans(1, "a") == [(6, 7)]
    assert program.spans(2, "a") == []
    third = data.index(b"b, *")
    # What is stored to, starred, or a part of a slice is no value.
    assert program.spans(3, "b") == [(third + 19, third + 20)]
    assert program.spans(3, "*b") == program.spans(3, "1:2") == []
    assert program.spans(3, "a") == [(third + 4, third + 5), (third + 15, third + 16)]
    assert program.spans(3, "f") == [(third + 13, third + 14)]
    assert program.extents(3, "f") == [(third + 13, third + 21)]
    assert program.extents(3, "a") == program.spans(3, "a")


# --- where a statement tells

_CALL = "__jd__.place(0, None)"


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("x = 1\ny = 2\n", 2, "x = 1\n{}; y = 2\n"),
        ("x = 1; y = 2\n", 1, "x = 1; {}; y = 2\n"),
        ("x = [\n  1]\n", 2, "{}; x = [\n  1]\n"),
        ("if a:\n    x = 1\n", 1, "{}\nif a:\n    x = 1\n"),
        ("if a:\n    x = 1\n", 2, "if a:\n    {}; x = 1\n"),
        ("if a: x = 1\n", 1, "if a: {}; x = 1\n"),
        ("if a:\n  if b:\n    x = 1\n", 2, "if a:\n  {}\n  if b:\n    x = 1\n"),
        ("if a:\n  x\nelif b:\n  y\n", 3, "if a:\n  x\nelif b:\n  {}; y\n"),
        ("if a:\n  x\nelse:\n  if b:\n    y\n", 4, "if a:\n  x\nelse:\n  {}\n  if b:\n    y\n"),
        ("match a:\n  case 1:\n    x\n", 1, "{}\nmatch a:\n  case 1:\n    x\n"),
        ("try:\n  x\nexcept E:\n  y\n", 3, "{}\ntry:\n  x\nexcept E:\n  y\n"),
        ("def f():\n    'doc'\n    x = 1\n", 1, "def f():\n    'doc'\n    {}; x = 1\n"),
        ("@g\ndef f():\n    for a in b: x\n", 1, "@g\ndef f():\n    {}\n    for a in b: x\n"),
        ("@g\ndef f():\n  if b:\n    x\n", 1, "@g\ndef f():\n  {}\n  if b:\n    x\n"),
        ("async def f():\n    x = 1\n", 1, "async def f():\n    {}; x = 1\n"),
        ("def f():\n    'doc'\n", 1, "{}\ndef f():\n    'doc'\n"),
        ("@g\nclass A:\n    x = 1\n", 1, "{}\n@g\nclass A:\n    x = 1\n"),
        ("@g\n@h\nclass A:\n    x = 1\n", 1, "{}\n@g\n@h\nclass A:\n    x = 1\n"),
        ("elif_ = 1\n", 1, "{}; elif_ = 1\n"),
        ("'doc'\n", 1, None),
        ("x = 1\n\ny = 2\n", 2, None),
        ("class A:\n    'doc'\n", 2, None),
    ],
)
def test_where_a_statement_tells_that_it_runs(text: str, line: int, expected: str | None):
    program = ProgramText(text)
    found = program.entry(line)
    if found is None or expected is None:
        assert found is expected is None
        return
    program.replace(found[0], found[0], found[1])
    compile(program.edited.format(_CALL), "a.py", "exec")

    assert program.edited == expected


# --- marks


def _marked(text: str, *places: tuple[int, str, str], first: int = 0, **hosts: HostForm) -> Marked:
    found = Marked(text, places, first, {int(name[1:]): form for name, form in hosts.items()})
    compile(found.text, "a.py", "exec")
    return found


def _body(marked: Marked) -> str:
    assert marked.text.startswith(_IMPORT)
    return marked.text.removeprefix(_IMPORT)


def test_places_in_a_line_have_their_numbers():
    found = _marked("a = f + f\nb = f\n", (1, "f", ""), (2, "f", ""), (1, "f", ""), first=4)

    assert _body(found) == (
        "a = (__jd__.place(4, (f))) + (__jd__.place(5, (f)))\nb = (__jd__.place(6, (f)))\n"
    )
    assert found.numbers == {(1, "f"): [4, 5], (2, "f"): [6]}
    assert found.count == 7
    assert found.by_line == set()


def test_what_is_around_another_place_is_marked_around_it():
    found = _marked("a = f(g)\n", (1, "f(g)", ""), (1, "g", ""), (1, "f", ""))

    assert _body(found) == (
        "a = (__jd__.place(0, ((__jd__.place(2, (f)))((__jd__.place(1, (g)))))))\n"
    )


def test_what_is_compared_stays_the_object_that_it_is():
    found = _marked("a = f is f != g\n", (1, "f", ""), (1, "g", ""))

    assert _body(found) == (
        "a = (__jd__.ran(0) or (f)) is (__jd__.ran(1) or (f)) != (__jd__.ran(2) or (g))\n"
    )


def test_an_import_tells_when_it_has_bound_its_name():
    found = _marked("from a import (b,\n  c)\nc\n", (1, "from a import b, c", "c"), (3, "c", ""))

    assert _body(found) == (
        "from a import (b,\n  c); c = __jd__.place(0, c)\n(__jd__.place(1, (c)))\n"
    )
    assert found.numbers == {(1, "from a import b, c"): [0], (3, "c"): [1]}
    assert found.by_line == set()


def test_a_statement_tells_by_its_line():
    found = _marked("if a:\n    x = 1\ny = 2\n", (1, "if a:", ""), (2, "x = 3", ""), first=7)

    assert _body(found) == (
        "__jd__.place(7, None)\nif a:\n    __jd__.place(8, None); x = 1\ny = 2\n"
    )
    assert found.by_line == {(1, "if a:"), (2, "x = 3")}
    assert found.numbers == {(1, "if a:"): [7], (2, "x = 3"): [8]}
    # Two lines are new, the import and the one above the `if`.
    assert [found.line_before(line) for line in range(1, 6)] == [1, 1, 1, 2, 3]


def test_what_cannot_tell_has_no_number():
    found = _marked("'doc'\nx = 1\n", (1, "'d'", ""))

    assert found.numbers == {(1, "'d'"): []}
    assert (found.count, found.by_line) == (0, set())


def _host(text: str, what: str, of: str) -> HostForm:
    nodes = {ast.unparse(each): each for each in ast.walk(ast.parse(text))}
    return HostForm(nodes[what], nodes[of])  # pyright: ignore[reportArgumentType]


def test_a_host_edit_tells_by_its_value_and_keeps_its_lines():
    text = "a = first(\n  x.y,\n  2)\nb = 1\n"
    form = _host(text, "first(x.y, 2)", "x.y")
    assert form.around("v") == "first(v, 2)"
    found = _marked(text, (1, "first(\n  x.y,\n  2)", ""), (2, "x", ""), (1, "first", ""), h3=form)

    # The name of the function goes with it, so that the statement tells for it.
    host = "__jd__.host(3, lambda __jd_value__: first(__jd_value__, 2), \n"
    statement = f"a = (__jd__.place(0, ({host}(__jd__.place(1, (x))).y\n))))\n"
    assert _body(found) == f"__jd__.place(2, None); {statement}b = 1\n"
    assert found.numbers[1, "first"] == [2]
    told: list[int] = []
    recorder = types.SimpleNamespace(
        place=lambda number, value: told.append(number) or value,
        host=lambda number, form, value: told.append(number) or form(value),
    )
    names: dict[str, Any] = {"__jd__": recorder, "first": lambda x, n: x * n}
    exec(_body(found), {**names, "x": types.SimpleNamespace(y=4)}, names)
    assert (names["a"], told) == (8, [2, 1, 3, 0])


def test_a_name_inside_of_a_host_edit_hides_no_other():
    text = "a = first(x) + first\n"
    found = _marked(text, (1, "first", ""), h0=_host(text, "first(x)", "x"))

    assert _body(found) == (
        "a = __jd__.host(0, lambda __jd_value__: first(__jd_value__), x)"
        " + (__jd__.place(0, (first)))\n"
    )


def test_a_value_in_a_host_edit_may_be_one_too():
    text = "a = first(put(x))\n"
    outer, inner = _host(text, "first(put(x))", "put(x)"), _host(text, "put(x)", "x")
    found = _marked(text, (1, "x", ""), h0=outer, h1=inner)

    heads = [
        f"__jd__.host({n}, lambda __jd_value__: {name}(__jd_value__), "
        for n, name in enumerate(("first", "put"))
    ]
    assert _body(found) == f"a = {heads[0]}{heads[1]}(__jd__.place(0, (x)))))\n"


# --- all edits are found

_ARMS = "try:\n    x = f\nexcept E as e:\n    y = 1\n"
_CASES = "match f:\n    case 1 if a:\n        y = 1\n"


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (_ARMS, _ARMS.replace("except E", "except F"), "try:"),
        (_ARMS, _ARMS.replace("as e", "as g"), "try:"),
        (_ARMS, f"{_ARMS}except F:\n    pass\n", "try:"),
        (_ARMS, _ARMS.partition("except")[0] + "finally:\n    pass\n", "try:"),
        (_ARMS, f"{_ARMS}finally:\n    boom()\n", "try:"),
        (_ARMS, _ARMS.replace("y = 1", "y = 2"), "1"),
        (_CASES, _CASES.replace("case 1", "case 2"), "match f:"),
        (_CASES, _CASES.replace("if a", "if b"), "match f:"),
        (_CASES, f"{_CASES}    case 3: pass\n", "match f:"),
        (_CASES, _CASES.replace("y = 1", "y = 2"), "1"),
        ("if a:\n    x = 1\n", "if a:\n    x = 1\nelse:\n    x = 2\n", "if a:"),
        ("if a:\n    x = 1\nelif b:\n    x = 2\n", "if a:\n    x = 1\n", "if b:"),
    ],
)
def test_an_edit_of_what_is_between_blocks_is_a_place(before: str, after: str, what: str):
    found = edits.changes(ProgramText(before), ast.parse(after))
    marked = _marked(before, *((each.line, each.what, "") for each in found))

    assert [each.what for each in found] == [what]
    assert marked.count == 1
