"""The mistakes that `benchmarks/mutants.py` makes, and the texts that say what of them runs."""

import importlib.util
import os
import pathlib
import sys
import types

import pytest

_FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


def _imported(path: pathlib.Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"jax_dist_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mutations() -> types.ModuleType:
    return _imported(_FOLDER / "mutations.py")


_MUTANTS = {
    "a < b": ["a < b -> a <= b"],
    "a and b and c": [
        "a and b and c -> b and c",
        "a and b and c -> a and c",
        "a and b and c -> a and b",
    ],
    "not a": ["not a -> a"],
    "a | b": ["a | b -> a & b"],
    "[a] * b": [],
    "f(True, 3)": ["True -> False", "3 -> 4"],
    "a if b else c": ["a if b else c -> a", "a if b else c -> c"],
    "any(a)": ["any(a) -> all(a)"],
    "f(a.x, b.x)": ["f(a.x, b.x) -> f(b.x, a.x)"],
    "f(a, b.x)": [],
    "{a, b}": ["{a, b} -> {b}", "{a, b} -> {a}"],
    "[a for a in b if c]": ["for ... if c -> for ..."],
    "a[b:]": ["b: -> b + 1:"],
    "f'{a < b}'": [],
    "zip(a, strict=True)": [],
}


@pytest.mark.parametrize("text", _MUTANTS)
def test_an_expression(mutations: types.ModuleType, text: str):
    found = mutations.mutants_of("file.py", f"def f():\n    x = {text}\n")
    assert [each.name for each in found] == [f"f: {name}" for name in _MUTANTS[text]]


_STATEMENTS = {
    "if a == b:\n    c": ["if a == b -> if False", "if a == b -> if True", "c -> pass"],
    "return a": ["return a -> return None"],
    "raise Error('1' + a)": ["raise Error('1' + a) -> pass"],
    "for a in b:\n    continue": ["continue -> break"],
    "a |= b": ["a |= b -> pass", "a |= b -> a &= b"],
    "match a:\n    case 1:\n        b = c": ["case 1 -> case 1 if False"],
    "print(1)": [],
    "a: int = b": [],
}


@pytest.mark.parametrize("text", _STATEMENTS)
def test_a_statement(mutations: types.ModuleType, text: str):
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    found = mutations.mutants_of("file.py", f"def f():\n{lines}\n")
    assert [each.name for each in found] == [f"f: {name}" for name in _STATEMENTS[text]]
    for each in found:
        assert compile(each.text, "file.py", "exec")
        assert each.text != each.before


def test_what_a_function_gives(mutations: types.ModuleType):
    found = mutations.mutants_of("file.py", "def f() -> bool:\n    return g()\n")
    assert [each.name for each in found] == [
        "f: return g() -> return True",
        "f: return g() -> return False",
    ]
    (one,) = mutations.mutants_of("file.py", "def f() -> list[int]:\n    return g()\n")
    assert one.text == "def f() -> list[int]:\n    return []"


def test_a_table_is_one_of_its_file(mutations: types.ModuleType):
    found = mutations.mutants_of("file.py", "TABLE = {'a': f(x), 'b': g(x)}\nY = ('c', 'd')\n")
    assert [each.name for each in found] == [
        ": {'a': f(x), 'b': g(x)} -> {'b': g(x)}",
        ": {'a': f(x), 'b': g(x)} -> {'a': f(x)}",
        ": ('c', 'd') -> ('d',)",
        ": ('c', 'd') -> ('c',)",
    ]
    assert {each.statement for each in found} == {None}


def test_a_text_says_which_of_its_statements_run(
    mutations: types.ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    source = '"""A module."""\n\nfrom __future__ import annotations\n\n\ndef f(a):\n'
    source += '    """A function."""\n    if a:\n        return 1\n    return 2\n'
    names: dict = {}
    exec(mutations.with_probes("file.py", source, "SEEN_BY_A_TEST"), names)
    names["f"](1)
    monkeypatch.setenv("SEEN_BY_A_TEST", str(tmp_path / "one"))
    assert [names["f"](1), names["f"](1)] == [1, 1]
    monkeypatch.setenv("SEEN_BY_A_TEST", str(tmp_path / "two"))
    assert names["f"](0) == 2
    numbers = {each.name: each.statement for each in mutations.mutants_of("file.py", source)}
    test, one, two = (
        f"file.py {numbers[f'f: {name}']}"
        for name in ("if a -> if True", "return 1 -> return None", "return 2 -> return None")
    )
    assert sorted((tmp_path / "one").read_text().splitlines()) == sorted([test, one])
    assert sorted((tmp_path / "two").read_text().splitlines()) == sorted([test, two])
    monkeypatch.setenv("SEEN_BY_A_TEST", str(tmp_path / "three"))
    exec(mutations.with_probes("file.py", source, "SEEN_BY_A_TEST"), names)
    monkeypatch.setattr(os, "open", None)  # the program may open nothing any more
    names["f"](1)
    assert sorted((tmp_path / "three").read_text().splitlines()) == sorted(
        ["file.py -1", test, one]
    )


_LIVING = """\
def f(x):
    return [x, 1]


class A:
    def g(self):
        return lambda: 2

    def h(self, y):
        return lambda: y
"""


def test_living_functions_take_over_another_text_and_give_it_back(tmp_path: pathlib.Path):
    tests = _imported(_FOLDER / "mutant_tests.py")
    path = tmp_path / "living.py"
    path.write_text(_LIVING)
    living = _imported(path)
    f, a = living.f, living.A()
    made = a.h(3)
    functions = tests._Functions("living.py")

    assert functions.take_over(_LIVING.replace("1]", "5]").replace("2", "6"))
    assert (f(0), a.g()(), made()) == ([0, 5], 6, 3)
    functions.put_back()
    assert (f(0), a.g()(), made()) == ([0, 1], 2, 3)
    # One closes over less, and one is gone.
    for other in (_LIVING.replace("lambda: y", "lambda: 4"), _LIVING.replace("def g", "def k")):
        assert not functions.take_over(other)
        functions.put_back()
        assert (f(0), a.g()(), made()) == ([0, 1], 2, 3)


def test_tables_are_put_back(monkeypatch: pytest.MonkeyPatch):
    tests = _imported(_FOLDER / "mutant_tests.py")
    module = types.ModuleType("jax_dist.of_a_test")
    module.table, module.names, module.rows = {"a": 1}, {"b"}, [2]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = module.table

    with tests._tables_put_back():
        module.table["c"] = 3
        module.names.clear()
        module.rows.append(4)
    assert (module.table, module.names, module.rows) == ({"a": 1}, {"b"}, [2])
    assert module.table is table
