"""Parts of the normal form by themselves: what is no equation, what is hidden, and the rules."""

from typing import Any

import pytest

from jax_dist.migrate.verify import equivalence
from jax_dist.migrate.verify.equivalence import Equations, NotProvedError


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


_ONES = "literal(float64[] 000000000000f03f)", "literal(bfloat16[] 803f)"
_ONE, _TWO = "literal(float32[] 0000803f)", "literal(float32[] 00000040)"


@pytest.mark.parametrize(
    ("primitive", "given", "kind", "parameters", "rule"),
    [
        ("convert_element_type", [("§1", _ROW)], _ROW, {}, "R11"),
        ("convert_element_type", [("§1", _ROW)], "int32[3]", {}, None),
        ("div", [("§1", _ROW), (_ONE, "float32[]")], _ROW, {}, "R3"),
        ("div", [("§1", "float64[3]"), (_ONES[0], "float64[]")], "float64[3]", {}, "R3"),
        ("div", [("§1", "bfloat16[3]"), (_ONES[1], "bfloat16[]")], "bfloat16[3]", {}, "R3"),
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
        ({}, "reduce_sum", "float32[8,3]", "float64[3]", [0], False),
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
    for shared, shown in (("a" * 50, "a" * 30), ("aa", "aa")):
        before, after = (f"same\n{shared}{each * 60}\n{each}" for each in "bc")
        said = f"^'{shown}{'b' * 40}' before, '{shown}{'c' * 40}' after$"
        with pytest.raises(NotProvedError, match=said):
            equivalence.require_same(before, after)
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
    assert equations._parameters({"axes": [{"number": "1.0"}, 2]}) == (
        '[axes=[{"number": "1.0"}, 2]]'
    )
    for name in ("set", "offset"):
        assert equations._parameters({"axes": [name]}) == f'[axes=["{name}"]]'
        assert equations._parameters({"axis_name": name}) == f'[axis_name=["{name}"]]'
    # An axis whose name is a set is another one.
    one = equations._parameters({"axes": [{"set": ["batch"]}]})
    assert one == '[axes=[{"set": ["batch"]}]]'
    assert equations._parameters({"axes": {"number": "1.0"}}) == '[axes=[{"number": "1.0"}]]'


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


# ---- whole programs


def _program(*eqns: Any, out: Any, inputs: int = 1) -> dict[str, Any]:
    """Of inputs with the numbers from 1 on, all `float32[3]`."""
    given = [[number, _ROW] for number in range(1, inputs + 1)]
    return {"in": given, "consts": [], "eqns": [*eqns], "out": [out], "weak": [False]}


def _proved(before: Any, after: Any, **sizes: Any) -> tuple[str, ...]:
    return equivalence.proof({"before": before, "after": after, "sizes": sizes})


def _refused(before: Any, after: Any, **sizes: Any) -> None:
    for one, other in ((before, after), (after, before)):
        with pytest.raises(NotProvedError):
            _proved(one, other, **sizes)


_SINE, _COSINE = (_program(_line(2, name, 1), out=2) for name in ("sin", "cos"))


def test_programs_for_other_numbers_of_devices_are_compared_too():
    same, other = {"before": _SINE, "after": _SINE}, {"before": _SINE, "after": _COSINE}

    assert _proved(_SINE, _SINE, **{"2": same, "4": {"after": _COSINE}}) == ()
    _refused(_SINE, _SINE, **{"2": same, "4": other})


def test_what_is_set_around_an_equation_is_compared():
    context = {"ctx": {"xla_metadata": {"dict": [["a", "b"]]}}}
    inside = [
        _program([name, context, [1], [[2, _ROW]]], _line(3, "exp", 2), out=3)
        for name in ("sin", "cos")
    ]

    assert _proved(inside[0], inside[0]) == ()
    _refused(*inside)


def _call(**parameters: Any) -> list[Any]:
    return ["jit", {"jaxpr": {"jaxpr": _SINE}, **parameters}, [1], [[2, _ROW]]]


def test_only_what_the_outer_jit_donates_is_donated():
    plain, donating = (_call(donated_invars=[flag]) for flag in (False, True))
    inner, outer = _program(donating, out=2), _program(plain, out=2)
    around = lambda body: [
        *("jit", {"jaxpr": {"jaxpr": body}, "donated_invars": [False]}, [1], [[2, _ROW]])
    ]

    _refused(inner, outer)
    assert _proved(*(_program(around(each), out=2) for each in (inner, outer))) == ()


@pytest.mark.parametrize("name", ["compiler_options_kvs", "in_layouts", "out_layouts"])
def test_the_options_of_a_jit_are_compared(name: str):
    plain, none, some, others = (
        _program(_call(**each), out=2)
        for each in ({}, {name: [None]}, {name: ["a"]}, {name: ["b"]})
    )

    assert _proved(plain, none) == _proved(some, some) == ()
    _refused(plain, some)
    _refused(some, others)


_MESH = {"mesh": [["i", 8]], "kinds": ["AxisType.Auto"], "devices": [*range(8)]}
_TURNED = {**_MESH, "devices": [*range(8)][::-1]}


def _placed(spec: Any, mesh: Any = _MESH) -> dict[str, Any]:
    return {"sharding": [mesh, {"spec": spec}]}


def test_where_a_jit_wants_its_arrays_is_compared():
    for name in ("in_shardings", "out_shardings"):
        plain, rows, whole, turned, unspecified = (
            _program(_call(**{name: [each]}), out=2)
            for each in (
                *(None, _placed([["i"]]), _placed([[]]), _placed([["i"]], _TURNED)),
                "UnspecifiedValue",
            )
        )
        assert _proved(plain, unspecified) == _proved(plain, _program(_call(), out=2)) == ()
        assert _proved(rows, rows) == ()
        for other in (plain, whole, turned):
            _refused(rows, other)


def _mapped(*, ins: Any, outs: Any) -> dict[str, Any]:
    specs = {"in_specs": [{"spec": ins}], "out_specs": [{"spec": outs}]}
    parameters = {"mesh": _MESH, "jaxpr": {"jaxpr": _SINE}, **specs}
    return _program(["shard_map", parameters, [1], [[2, _ROW]]], out=2)


def test_a_jit_that_wants_what_its_shard_map_says_wants_nothing():
    body = _mapped(ins=[["i"]], outs=[[]])

    def program(**shardings: Any) -> dict[str, Any]:
        call = {"jaxpr": {"jaxpr": body}, **shardings}
        return _program(["jit", call, [1], [[2, _ROW]]], out=2)

    rows, whole = [_placed([["i"]])], [_placed([[]])]
    assert _proved(program(in_shardings=rows, out_shardings=whole), program()) == ()
    _refused(program(in_shardings=whole), program())
    _refused(program(out_shardings=rows), program())
    _refused(program(in_shardings=rows), program(in_shardings=whole))
    _refused(body, _mapped(ins=[[]], outs=[[]]))
    _refused(body, _mapped(ins=[["i"]], outs=[["i"]]))


def test_operands_of_a_shard_map_go_with_their_specs():
    """They come in the order in which the body uses them; locally, all have one type."""
    mesh = {"mesh": [["i", 2], ["j", 2]], "kinds": [], "devices": [0, 1, 2, 3]}

    def program(operands: list[int], uses: tuple[int, int]) -> dict[str, Any]:
        eqns = [_line(3, "sin", uses[0]), _line(4, "cos", uses[1])]
        total = ["add", {}, [3, 4], [[5, _ROW]]]
        body = {"jaxpr": _program(*eqns, total, out=5, inputs=2)}
        specs = [{"spec": [["i"]]}, {"spec": [["j"]]}]
        parameters = {"mesh": mesh, "jaxpr": body, "in_specs": specs, "out_specs": [{"spec": []}]}
        return _program(["shard_map", parameters, operands, [[3, _ROW]]], out=3, inputs=2)

    first = program([1, 2], (1, 2))
    assert _proved(first, first) == ()
    _refused(first, program([2, 1], (2, 1)))
    _refused(first, program([1, 2], (2, 1)))


def _scan(operands: list[int], body: dict[str, Any], consts: int) -> dict[str, Any]:
    parameters = {"num_consts": consts, "num_carry": 1, "linear": [False] * 3}
    eqn = ["scan", {**parameters, "jaxpr": {"jaxpr": body}}, operands, [[4, _ROW]]]
    return _program(eqn, out=4, inputs=3)


def test_two_constants_of_a_scan_have_no_order():
    def body(one: int, other: int, carry: int = 3) -> dict[str, Any]:
        eqns = [["mul", {}, [carry, one], [[4, _ROW]]], ["sub", {}, [4, other], [[5, _ROW]]]]
        return _program(*eqns, out=5, inputs=3)

    first = _scan([1, 2, 3], body(1, 2), 2)
    assert _proved(first, _scan([2, 1, 3], body(2, 1), 2)) == ()
    _refused(first, _scan([1, 2, 3], body(2, 1), 2))
    _refused(first, _scan([2, 1, 3], body(1, 2), 2))
    # One that the body does not use comes last, and carries keep their order.
    unused = _scan([1, 2, 3], body(2, 3, 2), 2)
    assert _proved(unused, _scan([2, 1, 3], body(1, 3, 1), 2)) == ()
    _refused(_scan([1, 2, 3], body(1, 3, 2), 1), _scan([1, 3, 2], body(1, 2, 3), 1))


def test_numbers_of_variables_in_branches_make_no_difference():
    def branching(number: int, name: str) -> dict[str, Any]:
        branch = {
            **{"in": [[number, _ROW]], "consts": [], "out": [number + 1], "weak": [False]},
            "eqns": [[name, {}, [number], [[number + 1, _ROW]]]],
        }
        parameters = {"branches": [{"jaxpr": branch}]}
        return _program(["cond", parameters, ["int32[] 00000000", 1], [[2, _ROW]]], out=2)

    assert _proved(branching(1, "sin"), branching(7, "sin")) == ()
    _refused(branching(1, "sin"), branching(1, "cos"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"number": "0.5"}, {"number": "1.5"}),
        ({"named": ["Dims", [["a", 1]]]}, {"named": ["Dims", [["a", 2]]]}),
        ([_CUT], [_lies([["i"], []], "AxisType.Manual")]),
        ([_CUT], [{"sharding": [_MESH, {"spec": [[], ["i"]]}]}]),
        (_placed([["i"]]), _placed([["i"]], _TURNED)),
        (_NOWHERE, _CUT),
        ("sin", "cos"),
        (1, 2),
    ],
)
def test_parameters_are_compared(one: Any, other: Any):
    before, after = (
        _program(["sin", {"of": each}, [1], [[2, _ROW]]], out=2) for each in (one, other)
    )

    assert _proved(before, before) == ()
    _refused(before, after)


def test_a_sharding_that_says_nothing_is_none():
    assert Equations(rules=False)._value(_NOWHERE) == "null"


@pytest.mark.parametrize(
    ("primitive", "key"),
    [
        *(("jit", "jaxpr"), ("custom_jvp_call", "call_jaxpr"), ("custom_vjp_call", "call_jaxpr")),
        ("custom_vjp_call", "fun_jaxpr"),
    ],
)
def test_calls_are_written_out(primitive: str, key: str):
    call = [primitive, {key: {"jaxpr": _SINE}}, [1], [[2, _ROW]]]

    assert _proved(_program(call, out=2), _SINE) == ()
    assert equivalence.called(primitive, {key: {"jaxpr": _SINE}}) is _SINE
    assert equivalence.called("remat2", {key: {"jaxpr": _SINE}}) is None
