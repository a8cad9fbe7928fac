"""What differs between two texts of a program: edits, and those of the host in both forms."""

import ast
from typing import Any

import pytest

from jax_dist.migrate.verify import edits
from jax_dist.migrate.verify.edits import Change
from jax_dist.migrate.verify.program_text import ProgramText

# --- all edits


def _changes(before: str, after: str) -> list[Any]:
    """What each replaces: of an expression its text, of a statement its line, too."""
    program = ProgramText(before)
    found = edits.changes(program, ast.parse(after))
    for each in found:
        if each.span is not None and not each.what.startswith(("import", "from")):
            assert program.between(*each.span).startswith(each.what)
    return [each.what if each.span else (each.line, each.what) for each in found]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("y = f(x)", "y = f(x)", []),
        ("y = f(x)", "y = g(x)", ["f"]),
        ("y = f(x)", "y = f(x, 1)", ["f(x)"]),
        ("y = f(a) + g(b)", "y = f(c) + g(d)", ["a", "b"]),
        ("y = f(a)(b, 1)", "y = f(c)(b)", ["f(a)(b, 1)"]),
        ("y = x", "y = x.a", ["x"]),
        ("y = a + b", "y = a - b", ["a + b"]),
        ("y = f(*a)", "y = f(*b)", ["a"]),
        ("y = f(*a)", "y = f(a)", ["f(*a)"]),
        ("y = x[1:2]", "y = x[1:3]", ["2"]),
        ("y = x[:2]", "y = x[1:2]", ["x[:2]"]),
        ("y = x[1:2]", "y = x[1]", ["x[1:2]"]),
        ("y = f(a=1)", "y = f(a=2)", ["1"]),
        ("y = f(a=1)", "y = f(b=1)", ["f(a=1)"]),
        ("y = [a for x in b]", "y = [a for x in c]", ["b"]),
        ("y = [a for x in b]", "y = [a for z in b]", ["[a for x in b]"]),
        ("y = lambda a=1: a", "y = lambda a=2: a", ["1"]),
        ("y = lambda a: a", "y = lambda b: a", ["lambda a: a"]),
        ("y = 1", "y = 2", ["1"]),
        ("y = 1", "y = 1.0", ["1"]),
        ("y = 1", "y = True", ["1"]),
        ("y = 'a'", "y = b'a'", ["'a'"]),
        ("with f(x): pass", "with g(x): pass", ["f"]),
        ("with f(x) as a: pass", "with f(x) as b: pass", [(1, "with f(x) as a:")]),
        ("for x in y: pass", "for x in z: pass", ["y"]),
        ("for x in y: pass", "for z in y: pass", [(1, "for x in y:")]),
        ("def f(a=1): pass", "def f(a=2): pass", ["1"]),
        ("def f(a: int): pass", "def f(a: str): pass", ["int"]),
        ("def f(a): pass", "def f(b): pass", [(1, "def f(a):")]),
        ("def f():\n    return", "def f():\n    return x", [(2, "return")]),
        ("def f():\n    return x", "def f():\n    return", [(2, "return x")]),
    ],
)
def test_the_smallest_expression_that_differs(before: str, after: str, expected: list):
    assert _changes(f"{before}\n", f"{after}\n") == expected


_TRIES = "try:\n    f(a)\nexcept E:\n    f(b)\nelse:\n    f(c)\nfinally:\n    f(d)\n"
_CASES = "match x:\n    case 1 if y:\n        f(a)\n    case 2:\n        f(b)\n"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (_TRIES, _TRIES.replace("f", "g").replace("ginally", "finally"), ["f"] * 4),
        (_TRIES, _TRIES.replace("E", "F"), [(1, "try:")]),
        (_CASES, _CASES.replace("f(", "g("), ["f"] * 2),
        (_CASES, _CASES.replace("2", "3"), [(1, "match x:")]),
        (_CASES, _CASES.replace("if y", "if z"), [(1, "match x:")]),
        ("if a:\n    b()\n", "if a:\n    b()\nelse:\n    c()\n", [(1, "if a:")]),
        ("class A:\n    y = f(x)\n", "class A:\n    y = g(x)\n", ["f"]),
        ("async def f():\n    g(x)\n", "async def f():\n    h(x)\n", ["g"]),
        ("def f(): a()\ndef g(): b()\n", "def g(): b()\n", [(1, "def f():")]),
        ("async def f(): a()\ndef g(): b()\n", "def g(): b()\n", [(1, "async def f():")]),
        ("class f: a()\nclass g: b()\n", "class g: b()\n", [(1, "class f:")]),
        ("async def f(): a()\nasync def g(): b()\n", "async def g(): b()\n",
         [(1, "async def f():")]),
        ("x = 1\ny = 2\n", "y = 2\n", [(1, "x = 1")]),
        (_TRIES.replace(":\n", ":\n    u = 1\n"), _TRIES, [(n, "u = 1") for n in (2, 8, 11, 5)]),
        ("x = 1\n" + "f(1)\n" * 300, "f(1)\n" * 300, [(1, "x = 1")]),
        ("x = 1\nfor a in b: c()\nd()\n", "x = 1\nd()\n", [(2, "for a in b:")]),
    ],
)  # fmt: skip
def test_statement_by_statement(before: str, after: str, expected: list):
    assert _changes(before, after) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("@a(1)\ndef f(): pass\n", "@a(2)\ndef f(): pass\n", [Change(1, "1", (3, 4))]),
        ("@a\n@b\ndef f(): pass\n", "@c\ndef f(): pass\n", [Change(1, "a", (1, 5))]),
        ("@a\ndef f(): pass\n", "def f(): pass\n", [Change(1, "a", (1, 2))]),
        ("def f(): pass\n", "@a\ndef f(): pass\n", [Change(1, "def f():", None)]),
        ("@a\ndef f(x): g(x)\n", "@a\ndef f(x): h(x)\n", [Change(2, "g", (13, 14))]),
        (
            "\n@a\n@b\ndef f(x=1): pass\n",
            "@c\ndef f(x=2): pass\n",
            [Change(2, "a", (2, 6)), Change(4, "1", (15, 16))],
        ),
        ("@a\ndef f(x): pass\n", "@b\ndef f(y): pass\n", [Change(2, "@a", None)]),
    ],
)
def test_decorators(before: str, after: str, expected: list[Change]):
    found = edits.changes(ProgramText(before), ast.parse(after))

    assert found == expected


_USE = "import jax\nx = jax.f\ny = sum(x)\n"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (_USE, f"{_USE}z = 1\n", []),
        (_USE, f"{_USE}z, (v, w) = 1, (2, 3)\n", []),
        (_USE, f"{_USE}def z(): x = 1\n", []),
        (_USE, f"{_USE}class z: pass\n", []),
        (_USE, f"{_USE}'text'\n", []),
        (_USE, f"'text'\n{_USE}", []),
        (_USE, f"{_USE}z: int = 1\n", [(3, "y = sum(x)")]),
        (_USE, f"{_USE}f(x)\n", [(3, "y = sum(x)")]),
        (_USE, f"{_USE}f(x)\ng(x)\n", [(3, "y = sum(x)")]),
        (_USE, f"f(x)\n{_USE}", [(1, "import jax")]),
        (_USE, _USE.replace("y =", "f(x)\ny ="), [(3, "y = sum(x)")]),
        (_USE, f"{_USE}x += 1\n", [(3, "y = sum(x)")]),
        (_USE, f"{_USE}z = x = 1\n", [(3, "y = sum(x)")]),
        (_USE, f"{_USE}def x(): pass\n", [(3, "y = sum(x)")]),
        (_USE, f"{_USE}x.a = 1\n", [(3, "y = sum(x)")]),
        (_USE, f"{_USE}x[0] = 1\n", [(3, "y = sum(x)")]),
        (_USE, f"{_USE}z = x[0].a\n", []),
        (_USE, f"{_USE}sum = z\n", [(3, "y = sum(x)")]),
        (_USE, f"{_USE}def sum(): pass\n", [(3, "y = sum(x)")]),
        ("", "f(x)\n", []),
        ("def f(a): return a\n", "def f(a): return a\na = 1\n", []),
        ("from a.b import c\n", "from a.b import c\nfrom a.d import c\n", ["from a.b import c"]),
        ("import a.b as c\na = 1\n", "import a.b as c\na = 1\nimport a.d\n", [(2, "a = 1")]),
        ("", "from a import sum\n", []),
        ("if a:\n    pass\n", "if a:\n    pass\nelse:\n    f(x)\n", [(1, "if a:")]),
    ],
)
def test_what_is_new(before: str, after: str, expected: list):
    assert _changes(before, after) == expected


_BINDS = "import jax\nfrom a import pmap\nimport b.c\nimport d as e, g\nz = 1\ndef u(): pass\n"


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("from other import h", []),
        ("import jax.numpy", []),
        ("import jax.numpy as jnp", []),
        ("import b", []),
        ("from a import pmap, q", []),
        ("import other as jax", [Change(1, "import jax", (0, 10), "jax")]),
        ("import jax.f as jax", [Change(1, "import jax", (0, 10), "jax")]),
        ("from other import pmap", [Change(2, "from a import pmap", (11, 29), "pmap")]),
        ("from other import q as pmap", [Change(2, "from a import pmap", (11, 29), "pmap")]),
        ("from .a import pmap", [Change(2, "from a import pmap", (11, 29), "pmap")]),
        ("from other import h, pmap", [Change(2, "from a import pmap", (11, 29), "pmap")]),
        ("import jax.f, z.f", [Change(6, "def u():", None)]),
        ("import e.f", [Change(4, "import d as e, g", (41, 57), "e")]),
        ("import z.f", [Change(6, "def u():", None)]),
        ("from other import u", [Change(6, "def u():", None)]),
        ("from other import sum", [Change(6, "def u():", None)]),
        (
            "from other import pmap, g",
            [
                Change(2, "from a import pmap", (11, 29), "pmap"),
                Change(4, "import d as e, g", (41, 57), "g"),
            ],
        ),
    ],
)
def test_an_import_that_gives_a_name_another_meaning(new: str, expected: list[Change]):
    program = ProgramText(_BINDS)

    assert edits.changes(program, ast.parse(f"{_BINDS}{new}\n")) == expected


def test_an_import_that_moves_changes_nothing():
    before = "import jax\nx = 1\ndef f():\n    from a import b as c\n    return c\n"
    after = "from a import b as c\nx = 1\ndef f():\n    return c\n"

    assert _changes(before, after) == []
    inside = "def f():\n    import jax\n    x = 1\n"
    assert _changes(inside, inside.replace("    x", "    import other as jax\n    x")) == [
        "import jax"
    ]


@pytest.mark.parametrize(
    "after",
    [
        "import jax\nimport numpy as np\nx = jax.pmap\n",
        "import jax\nimport jax.extend\nx = jax.pmap\n",
        "import jax\ndef helper(): pass\nmesh = 1\nx = jax.pmap\n",
        "x = jax.pmap\n",
    ],
)
def test_what_changes_nothing_by_itself_is_no_place(after: str):
    before = "import jax\nx = jax.pmap\n"

    assert edits.changes(ProgramText(before), ast.parse(after)) == []


# --- host edits


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("y = first(x)", "y = x", [("first(v)", "v")]),
        ("y = x[0]", "y = x", [("v[0]", "v")]),
        ("y = put(x, devices)", "y = hold(x, devices)", [("put(v, devices)", "hold(v, devices)")]),
        (
            "y = first(step(put(w), x))",
            "y = step(hold(w), x)",
            [("first(v)", "v"), ("put(v)", "hold(v)")],
        ),
        (
            "y = u.metrics(x)",
            "y = u.stack(jax.device_get(x))",
            [("u.metrics(v)", "u.stack(jax.device_get(v))")],
        ),
        ("y = x.reshape(8, 4)", "y = x", [("v.reshape(8, 4)", "v")]),
        ("y = first(put(0.1))", "y = hold(0.1)", [("first(put(v))", "hold(v)")]),
        ("y = put(x, 0)", "y = hold(x, 0)", [("put(v, 0)", "hold(v, 0)")]),
        ("y = f(a)", "y = g(b)", []),
        ("y = (n := f(x))", "y = (n := x)", [("f(v)", "v")]),
        ("class A:\n    y = first(x)", "class A:\n    y = x", []),
        (
            "class A:\n    def f(self):\n        return first(self.x)",
            "class A:\n    def f(self):\n        return self.x",
            [("first(v)", "v")],
        ),
        (
            "class A:\n    z = 1\n    if z:\n        y = first(x)\ny = first(x)",
            "class A:\n    z = 1\n    if z:\n        y = x\ny = x",
            [("first(v)", "v")],
        ),
    ],
)
def test_what_stays_inside_is_the_value(before: str, after: str, expected: list):
    before = f"import jax\nimport u\n{before}\n"
    found = edits.host_edits(ast.parse(before), ast.parse(f"import jax\nimport u\n{after}\n"))

    assert [(one.around("v"), other.around("v")) for one, other in found] == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("y = a(b(x))", "y = x", [("a(b(v))", "v")]),
        ("y = a(b(c(x)))", "y = x", []),
        ("y = a(b(x))", "y = d(e(x))", [("a(b(v))", "d(e(v))")]),
        ("y = f(k=x)", "y = x", [("f(k=v)", "v")]),
        ("y = f(**x)", "y = x", []),
        ("y = f(*x)", "y = x", []),
        ("y = f(lambda: x)", "y = lambda: x", []),
        ("y = x[z]", "y = z", []),
        ("y = f(u.x)", "y = u.x", [("f(v)", "v")]),
        ("y = f(u)", "y = u", []),
        ("y = f(x).y", "y = x.y", [("f(v)", "v")]),
        ("y = f(x, z)", "y = g(z, x)", [("f(v, z)", "g(z, v)")]),
        ("y = f(1)", "y = g(1.0)", []),
        ("y = f(x)", "y = g(h(x))", [("f(v)", "g(h(v))")]),
        ("y = f(1, x)", "y = g(1, x)", [("f(1, v)", "g(1, v)")]),
        ("y = f(await x)", "y = await x", []),
        ("y = f((yield x))", "y = (yield x)", []),
        ("y = f((yield from x))", "y = (yield from x)", []),
        ("y = f(n := x)", "y = x", []),
        ("y = f(super().a)", "y = super().a", []),
        ("y = f(locals())", "y = locals()", []),
        ("y = f(super(A, b).a)", "y = super(A, b).a", [("f(v)", "v")]),
        ("y = f(other())", "y = other()", [("f(v)", "v")]),
        ("y = x[f(a):b]", "y = x[a:b]", [("f(v)", "v")]),
        ("y = x[f(a):b]", "y = x[a:c]", [("v[f(a):b]", "v[a:c]")]),
        ("y = f(a) + g(b)", "y = a + c", []),
        ("y = f(a, g(b))", "y = h(a, b)", [("f(v, g(b))", "h(v, b)")]),
        ("if a:\n    y = f(x)", "if a:\n    y = x", [("f(v)", "v")]),
        ("for a in b:\n    y = f(x)", "for a in b:\n    z = x", []),
        ("y = 1\ny = f(x)", "y = 1\ny = x", [("f(v)", "v")]),
        ("z = 1\ny = f(x)", "y = x", [("f(v)", "v")]),
        ("if f(x):\n    pass", "if x:\n    pass", [("f(v)", "v")]),
        ("class A(f(x)):\n    pass", "class A(x):\n    pass", [("f(v)", "v")]),
        ("@f(x)\ndef g(): pass", "@x\ndef g(): pass", []),
        ("class A:\n    async def f(s):\n        return g(s.x)",
         "class A:\n    async def f(s):\n        return s.x", [("g(v)", "v")]),
        ("class A:\n    def f(s):\n        class B:\n            y = g(x)",
         "class A:\n    def f(s):\n        class B:\n            y = x", []),
    ],
)  # fmt: skip
def test_what_may_be_around_a_value(before: str, after: str, expected: list):
    header = "import jax\nimport u\n"
    found = edits.host_edits(ast.parse(f"{header}{before}\n"), ast.parse(f"{header}{after}\n"))

    assert [(one.around("v"), other.around("v")) for one, other in found] == expected


# --- lines that went


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        ("x = cut(x)\ny = f(x)\n", "y = f(x)\n", "x = x\ny = f(x)\n"),
        ("def g(x):\n    y = 1\n    x = cut(x)\n", "def g(x):\n    y = 1\n", None),
        ("y = 1\nx = cut(z)\n", "y = 1\n", "y = 1\n"),  # another name is no line that went
        ("x = f(x)\nz = g(z)\ny = 1\n", "y = 1\n", "x = x\nz = z\ny = 1\n"),
        ("y = 1\nx = f(x)\n", "y = 1", "y = 1\nx = x\n"),
        ("x = f(x)\ny = 1\n", "z = 1\ny = 1\n", "z = 1\ny = 1\n"),
        ("a\nx = f(x)\n", "if b: a\n", "if b: a\n"),
        ("if b:\n    a = 1\n    x = f(x)\n", "if b: a = 1\n", "if b: a = 1\n"),
        ("x = f(x)\nimport a\n", "import a\n", "import a\n"),
        ("x = f(x)\n", "", "\n"),
        ("x = f(x)\nz = g(z)\n", "z = g(z)\n", "x = x\nz = g(z)\n"),
        ("a = 1\ny = 1\nx = f(x)\n", "a = 1\ny = 1\n", "a = 1\ny = 1\nx = x\n"),
        ("y = 1\n", "y = 1\nz = 2\n", "y = 1\nz = 2\n"),
        ("if a:\n    y = 1\nelse:\n    x = f(x)\n", "if a:\n    y = 1\n", "if a:\n    y = 1\n"),
        (
            "try:\n    y = 1\nexcept E:\n    x = f(x)\n    y = 2\n",
            "try:\n    y = 1\nexcept E:\n    y = 2\n",
            "try:\n    y = 1\nexcept E:\n    x = x\n    y = 2\n",
        ),
    ],
)
def test_a_line_that_went_is_told_by_its_name(before: str, after: str, kept: str | None):
    wanted = f"{after}    x = x\n" if kept is None else kept

    assert edits.with_names_kept(ast.parse(before), after) == wanted
