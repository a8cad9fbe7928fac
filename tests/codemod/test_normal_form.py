"""Parts of the normal form by themselves: what is no equation, what is hidden, and the rules."""

from typing import Any

import pytest

from jax_dist.codemod.verify import equivalence
from jax_dist.codemod.verify.equivalence import Equations, NotProvedError


def _lies(spec: Any, *kinds: str) -> dict[str, Any]:
    return {"sharding": [{"mesh": [["i", 8]], "kinds": [*kinds]}, {"spec": spec}]}


_NOWHERE, _CUT = _lies([[], []], "AxisType.Manual"), _lies([[], ["i"]], "AxisType.Manual")


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (None, True),
        (_NOWHERE, True),
        (_lies([]), True),
        (_CUT, False),
        (_lies([[]], "AxisType.Auto"), False),
        (_lies([[]], "AxisType.Manual", "AxisType.Explicit"), False),
        ("GSPMDSharding", False),
        ({"spec": [[]]}, False),
    ],
)
def test_a_sharding_that_says_nothing(sharding: Any, *, expected: bool):
    assert equivalence._says_nothing(sharding) is expected


_ROW, _ROWS = "float32[3]", "float32[1,3]"


@pytest.mark.parametrize(
    ("primitive", "parameters", "kinds", "expected"),
    [
        ("reshape", {"dimensions": None}, (_ROW, _ROWS), True),
        ("reshape", {"dimensions": None, "sharding": _NOWHERE}, (_ROW, _ROWS), True),
        ("reshape", {"dimensions": None, "sharding": _CUT}, (_ROW, _ROWS), False),
        ("reshape", {"dimensions": [1, 0]}, ("float32[2,3]", "float32[6]"), False),
        ("squeeze", {"dimensions": [0]}, (_ROWS, _ROW), True),
        ("reshard", {"dst_sharding": _NOWHERE}, (_ROW, _ROW), True),
        ("reshard", {"dst_sharding": _CUT}, (_ROW, _ROW), False),
        ("broadcast_in_dim", {"broadcast_dimensions": [1]}, (_ROW, _ROWS), True),
        ("broadcast_in_dim", {"broadcast_dimensions": [0]}, (_ROW, "float32[3,1]"), True),
        ("broadcast_in_dim", {"broadcast_dimensions": [1]}, (_ROW, "float32[2,3]"), False),
        ("broadcast_in_dim", {"broadcast_dimensions": [0]}, ("float32[1]", _ROW), False),
        ("broadcast_in_dim", {"broadcast_dimensions": [0, 1]}, (_ROWS, "float32[2,3]"), False),
        ("broadcast_in_dim", {"broadcast_dimensions": [0, 2]}, (_ROWS, "float32[1,1,3]"), True),
        ("transpose", {"permutation": [0]}, (_ROW, _ROW), False),
        ("sin", {"broadcast_dimensions": [0]}, (_ROW, _ROW), False),
    ],
)
def test_what_moves_no_element(primitive: str, parameters: Any, kinds: Any, *, expected: bool):
    given = [("§1", kinds[0])]
    assert equivalence._moves_nothing(primitive, parameters, given, [kinds[1]]) is expected


def test_a_size_that_is_an_operand_moves_elements():
    given = [("§1", _ROW), ("§2", "int32[]")]
    parameters = {"broadcast_dimensions": [1]}
    assert not equivalence._moves_nothing("broadcast_in_dim", parameters, given, [_ROWS])


@pytest.mark.parametrize(
    ("value", "hidden"),
    [
        ({"opaque": "a function"}, "a function"),
        ([1, {"a": {"b": {"opaque": 3}}}], "3"),
        ("opaque 7", "opaque 7"),
        ({"literal": "key opaque x"}, "key opaque x"),
        ([["pure_callback", {}, [], []]], "pure_callback"),
        (["io_callback", {}, [], []], "io_callback"),
        (["pure_callback", {}, []], None),
        ([3, "callback", 1, 1], None),
        (["sin", {}, [1], [[2, "float32[]"]]], None),
        ("not opaque", None),
        (None, None),
        (3.5, None),
        ([], None),
    ],
)
def test_what_a_text_hides(value: Any, hidden: str | None):
    assert equivalence._opaque(value) == hidden


# ---- rules


def _by_rule(primitive: str, given: Any, kind: str, *, gathered: Any = None, **parameters: Any):
    equations = Equations(rules=True)
    if gathered is not None:
        equations.gathers["§1"] = ("§0", "float32[3]", "float32[8,3]", gathered)
    found = equations._by_rule(primitive, parameters, given, [kind])
    return found, equations


_ONE, _TWO = "literal(float32[] 0000803f)", "literal(float32[] 00000040)"


@pytest.mark.parametrize(
    ("primitive", "given", "kind", "parameters", "rule"),
    [
        ("convert_element_type", [("§1", _ROW)], _ROW, {}, "R11"),
        ("convert_element_type", [("§1", _ROW)], "int32[3]", {}, None),
        ("div", [("§1", _ROW), (_ONE, "float32[]")], _ROW, {}, "R3"),
        ("div", [("§1", _ROW), (_TWO, "float32[]")], _ROW, {}, None),
        ("div", [("§1", "float32[]"), (_ONE, _ROW)], _ROW, {}, None),
        ("div", [(_ONE, "float32[]"), ("§1", _ROW)], _ROW, {}, None),
        ("mul", [("§1", _ROW), (_ONE, "float32[]")], _ROW, {}, None),
        ("reduce_sum", [("§1", _ROW)], _ROW, {"axes": []}, "R2"),
        ("reduce_max", [("§1", _ROWS)], _ROW, {"axes": [0]}, "R4"),
        ("reduce_max", [("§1", _ROWS)], "float32[1]", {"axes": [1]}, None),
        ("reduce_max", [("§1", _ROWS)], "float32[]", {"axes": [0, 1]}, None),
        ("cumsum", [("§1", _ROWS)], _ROWS, {"axes": [0]}, None),
        ("argmax", [("§1", _ROWS)], _ROW, {"axes": [0]}, None),
    ],
)
def test_each_rule(primitive: str, given: Any, kind: str, parameters: Any, rule: str | None):
    found, equations = _by_rule(primitive, given, kind, **parameters)

    assert equations.used == ({rule} if rule else set())
    assert found == (given[0][0] if rule else None)
    assert not equations.lines


_GATHER = {"axis_name": "i", "axis_index_groups": None, "tiled": False, "all_gather_dimension": 0}


@pytest.mark.parametrize(
    ("change", "primitive", "given", "kind", "axes", "holds"),
    [
        ({}, "reduce_sum", "float32[8,3]", _ROW, [0], True),
        ({"axis_name": ["i"]}, "reduce_sum", "float32[8,3]", _ROW, [0], True),
        ({"axis_name": ["i", "j"]}, "reduce_sum", "float32[8,3]", _ROW, [0], True),
        ({"tiled": True}, "reduce_sum", "float32[8,3]", _ROW, [0], False),
        ({"axis_index_groups": [[0, 1]]}, "reduce_sum", "float32[8,3]", _ROW, [0], False),
        ({"all_gather_dimension": 1}, "reduce_sum", "float32[8,3]", _ROW, [0], False),
        ({}, "reduce_sum", "float32[8,3]", "float32[]", [0, 1], False),
        ({}, "reduce_sum", "float32[8,3]", "float32[8]", [1], False),
        ({}, "reduce_max", "float32[8,3]", _ROW, [0], False),
        ({}, "reduce_sum", "float32[3,8]", _ROW, [0], False),
    ],
)
def test_a_sum_of_a_gather(
    change: Any, primitive: str, given: str, kind: str, axes: Any, *, holds: bool
):
    found, equations = _by_rule(
        primitive, [("§1", given)], kind, gathered={**_GATHER, **change}, axes=axes
    )
    assert equations.used == ({"R1"} if holds else set())
    if not holds:
        assert found is None
        return
    names = change.get("axis_name", ["i"])
    (line,) = equations.lines
    assert line.results == [found]
    assert line.operands == ["§0"]
    shown = ", ".join(f'"{name}"' for name in names)
    assert (
        line.text == f"{found}:{kind} = psum[axes=[{shown}], axis_index_groups=null] §0:float32[3]"
    )


# ---- what is compared


def test_where_two_normal_forms_part():
    same = "one\ntwo §1:float32[3] = sin[] §0:float32[3]"
    equivalence.require_same(same, same)
    with pytest.raises(NotProvedError, match="^'.*= sin.*' before, '.*= cos.*' after$"):
        equivalence.require_same(same, same.replace("sin", "cos"))
    with pytest.raises(NotProvedError, match="more equations"):
        equivalence.require_same(same, f"{same}\nthree")


def test_variables_are_numbered_by_their_first_use():
    assert equivalence._numbered("§7 §12 = add §12 §7") == "§0 §1 = add §1 §0"
    assert equivalence.shape("float32[8,4,3]") == [8, 4, 3]
    assert equivalence.shape("float32[]") == []


def test_the_names_of_mesh_axes_are_numbers_in_every_parameter():
    equations = Equations(rules=False, axes={"batch": "axis-0"})
    for name in ("axes", "axis_name", "spmd_axis_name", "newly_manual_axes", "manual_axes"):
        for value in ("batch", ["batch"], {"set": ["batch"]}):
            assert equations._parameters({name: value}) == f'[{name}=["axis-0"]]'
    assert equations._parameters({"name": "batch"}) == '[name="batch"]'


def test_a_program_may_return_a_literal():
    text = {"in": [], "consts": [], "eqns": [], "out": ["float32[] 0000803f"], "weak": [False]}
    assert Equations(rules=False).run(text, []) == ["literal(float32[] 0000803f)"]


def test_all_rules_have_a_sentence():
    assert equivalence.shape("float32[1]") == [1]
    assert [*equivalence.RULES] == [f"R{number}" for number in range(1, 12)]


def _line(result: int, primitive: str, operand: int) -> list[Any]:
    return [primitive, {}, [operand], [[result, "float32[3]"]]]


def test_what_is_one_call_of_the_host_and_what_are_two():
    kind = "float32[3]"
    two = [_line(2, "sin", 1), _line(3, "cos", 2)]
    body = {"in": [[1, kind]], "consts": [], "eqns": two, "out": [3], "weak": [False]}
    called = ["jit", {"jaxpr": {"jaxpr": body}}, [1], [[3, kind]]]
    copied = [*two[:1], ["copy", {}, [2], [[4, kind]]], _line(3, "cos", 4)]
    turned = [*two[:1], ["transpose", {"permutation": [0]}, [2], [[4, kind]]], _line(3, "cos", 4)]
    host = lambda eqns: equivalence._normal_form({**body, "eqns": eqns})[0]

    assert host(two).count("call of the host") == 2
    assert host([called]).count("call of the host") == 1
    for moved in (copied, turned):
        assert host(moved).count("call of the host") == 2


def test_no_rule_is_used_for_what_is_the_same():
    kind, one = "float32[3]", "float32[] 0000803f"
    eqn = ["div", {}, [1, one], [[2, kind]]]
    text = {"in": [[1, kind]], "consts": [], "eqns": [eqn], "out": [2], "weak": [False]}
    assert equivalence.proof({"before": text, "after": text, "sizes": {}}) == ()
    assert equivalence.proof(
        {"before": text, "after": {**text, "eqns": [], "out": [1]}, "sizes": {}}
    ) == ("R3",)
