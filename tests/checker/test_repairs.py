"""All that a fix changes: its edits, those of its group, and what it imports and defines."""

from hypothesis import given
from hypothesis import strategies as st

from jax_dist.checker.engine.fixer import between, changes, repair
from jax_dist.checker.model import notebooks, sources
from jax_dist.checker.model.findings import Edit, Finding, Fix, Position, Safety, apply_edits
from jax_dist.checker.model.semantic_model import Module


def _module(code: str) -> Module:
    return Module(sources.read("train.py", code.encode()))


def _fix(*made: Edit, safety: Safety = Safety.SAFE, **more) -> Fix:
    return Fix("mend", safety, made, **more)


def _finding(fix: Fix | None) -> Finding:
    place = Position(1, 1)
    return Finding("train.py", "JXD306", "x", "bad", place, place, (0, 0), "", fix)


def test_an_import_that_comes_behind_an_edit_has_its_place_in_the_old_text():
    module = _module("import flax\n\nn = psum(1)\n")
    fix = _fix(Edit(7, 11, "flax.linen"), Edit(17, 21, "size"), imports=("import jax",))

    assert changes([fix], module) == [
        Edit(7, 11, "flax.linen"),
        Edit(12, 12, "import jax\n"),
        Edit(17, 21, "size"),
    ]


def test_of_two_that_clash_the_first_is_made():
    module = _module("n = psum(1)\n")

    assert changes([_fix(Edit(4, 8, "a")), _fix(Edit(6, 9, "b"))], module) == [Edit(4, 8, "a")]


def test_nothing_is_offered_that_would_not_parse():
    module = _module("n = psum(1)\n")

    assert changes([_fix(Edit(8, 9, "["))], module) == []


def test_a_group_is_mended_as_a_whole_or_not_at_all():
    module = _module("n = psum(1)\n")
    one, two = _fix(Edit(0, 1, "m"), group="f"), _fix(Edit(4, 8, "size"), group="f")
    sketch = _fix(Edit(4, 8, "size"), group="f", safety=Safety.DISPLAY)
    other = _fix(Edit(9, 10, "2"), group="g")

    findings = [_finding(fix) for fix in (one, two, None, other)]
    assert repair(findings[0], findings, module) == [Edit(0, 1, "m"), Edit(4, 8, "size")]
    assert repair(findings[2], findings, module) == []
    assert repair(_finding(one), [_finding(one), _finding(sketch)], module) == []


def test_a_sketch_is_never_made():
    finding = _finding(_fix(Edit(0, 1, "m"), safety=Safety.DISPLAY))

    assert repair(finding, [finding], _module("n = psum(1)\n")) == []


def test_magics_are_not_touched():
    data = b'{"cells": [{"cell_type": "code", "source": "import flax\\n!ls\\nn = %time psum(1)"}]}'
    notebook = notebooks.read_notebook("a.ipynb", data)
    start = notebook.code.index(b"n =")
    fix = _fix(Edit(start, start + 1, "m"), imports=("import jax",))

    made = changes([fix], Module(notebook))

    assert notebook.written(apply_edits(notebook.code, made)) == data.replace(
        b"flax\\n!ls\\nn =", b"flax\\nimport jax\\n!ls\\nm ="
    )


@given(st.lists(st.sampled_from(["a\n", "b\n", "\n", "é"])), st.lists(st.sampled_from("ab\n")))
def test_the_lines_that_differ_make_one_text_of_the_other(one, two):
    old, new = "".join(one).encode(), "".join(two).encode()

    assert apply_edits(old, between(old, new)) == new


def test_lines_that_differ():
    assert list(between(b"a\nb\nc\n", b"x\na\nc\n")) == [Edit(0, 0, "x\n"), Edit(2, 4, "")]
    assert list(between(b"a\nb", b"a\nx\ny")) == [Edit(2, 3, "x\ny")]
    assert list(between(b"a\n", b"a\n")) == []
