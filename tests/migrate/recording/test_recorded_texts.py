"""The programs of calls as texts: what is written, what is opaque, and which calls share one."""

import enum
import functools
import os
import random
import sys
import types
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.verify.recording import call_programs, programs
from jax_dist.migrate.verify.recording.call_programs import Arguments, ProgramTexts

_X = jax.ShapeDtypeStruct((8, 3), np.float32)
_MESH, _ROWS = Mesh(np.array(jax.devices()), ("i",)), P("i")


def _text(function: Callable, *kinds: Any) -> dict[str, Any]:
    return programs.text(function, [*(kinds or (_X,))])


def _mapped(body: Callable, spec: Any = _ROWS, mesh: Mesh = _MESH) -> Callable:
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def _eqns(function: Callable, *kinds: Any) -> list[Any]:
    return _text(function, *kinds)["eqns"]


# --- one program


def test_a_program_has_numbers_for_variables_and_bytes_for_literals():
    number = jax.ShapeDtypeStruct((), np.int32)
    found = _text(lambda x, y: (lax.max(x, np.float32(2)), lax.min(y, 1)), _X, number)

    assert found == {
        "in": [[1, "float32[8,3]"], [2, "int32[]"]],
        "consts": [],
        "eqns": [
            ["max", {}, [1, "float32[] 00000040"], [[3, "float32[8,3]"]]],
            ["min", {}, [2, "int32[] 01000000"], [[4, "int32[]"]]],
        ],
        "out": [3, 4],
        "weak": [False, False],
    }
    assert _text(lambda x: 2.0 * x.sum() * 0 + 1.0 * 3, _X)["weak"] == [False]
    weak = jax.ShapeDtypeStruct((), np.float32, weak_type=True)
    assert _text(lambda x: x * 2, weak)["weak"] == [True]
    assert _text(lambda x: np.float32(1))["out"] == ["float32[] 0000803f"]


def test_constants_are_told_by_their_digests():
    ones, rows = np.ones((300,), np.float32), np.full((8,), 3, np.float32)
    found = [_text(lambda x, c=c: x.sum() + c)["consts"] for c in (ones, ones + 1, rows)]

    ((number, kind, digest),) = found[0]
    assert (number, kind) == (2, "float32[300]")
    assert digest.startswith("float32[300] ")
    assert digest != found[1][0][2]
    assert found[2][0][3] == "float32[] 00004040"


@pytest.mark.parametrize(
    ("value", "element"),
    [
        (np.full((64,), 3, np.float32), ["float32[] 00004040"]),
        (jnp.full((2,), 3, np.int32), ["int32[] 03000000"]),
        (np.full((65,), 3, np.float32), []),
        (np.zeros((0,), np.float32), []),
        (np.array([0.0, -0.0], np.float32), []),
        (np.full((2, 2), 3, np.float32), []),
        (np.float32(3), []),
        ([3, 3], []),
        (jax.random.key(0)[None], []),
    ],
)
def test_the_element_of_a_row_of_equal_ones(value: Any, element: list[str]):
    assert [*programs._element(value)] == element


def test_digests_are_of_the_bytes_or_opaque():
    ones = np.ones((2, 2), np.float32)
    digest = programs._digest(ones)

    assert (
        digest == programs._digest(jnp.asarray(ones)) == programs._digest(np.asfortranarray(ones))
    )
    assert digest.startswith("float32[2, 2] ")
    assert len(digest) == len("float32[2, 2] ") + 64
    assert programs._digest(-ones) != digest
    for number in (True, 1, 1.0, 1j, np.float32(1)):
        assert "opaque" not in programs._digest(number)
    assert programs._digest("text") == "opaque str"
    assert programs._digest(np.array([abs], object)) == "opaque objects"
    key, other = jax.random.key(0), jax.random.key(1)
    assert programs._digest(key).startswith("key uint32[2] ")
    assert programs._digest(key) != programs._digest(other)


def test_a_primitive_is_named_where_it_is_a_parameter():
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2,), (2,), "VALID").sum()
    found = repr(_text(jax.grad(pool), jax.ShapeDtypeStruct((8,), np.float32)))

    assert "{'primitive': 'ge'}" in found
    assert "opaque" not in found


_SINE = jax.extend.core.Primitive("sin")
_SINE.def_abstract_eval(lambda x: x)


def test_a_primitive_of_the_user_has_no_name_of_jax():
    assert [each[0] for each in _eqns(lambda x: jnp.sin(_SINE.bind(x)))] == [
        *("sin (not of jax)", "sin")
    ]
    assert programs.described(_SINE) == {"opaque": "Primitive"}
    assert programs.described(lax.sin_p) == {"primitive": "sin"}


def test_names_and_caches_are_left_out():
    def named(x: jax.Array) -> jax.Array:
        return x

    ((primitive, parameters, _, _),) = _eqns(jax.jit(named))
    assert primitive == "jit"
    assert "jaxpr" in parameters
    assert not {"name", "inline", "keep_unused", "ctx_mesh"} & {*parameters}
    assert [*parameters] == sorted(parameters)


def test_the_constants_of_a_scan_are_counted_and_those_of_a_call_are_not():
    (scan,) = _eqns(lambda x: lax.scan(lambda c, y: (c + y, c), x[0] * 0, x)[0])[-1:]
    (call,) = _eqns(jax.nn.relu)
    ruled = jax.custom_vjp(lambda x: x * 2)
    ruled.defvjp(lambda x: (x, None), lambda _, g: (g,))
    ((name, parameters, _, _),) = _eqns(ruled)
    assert name == "custom_vjp_call"
    assert not {"num_consts", "bwd", "fwd_jaxpr_thunk"} & {*parameters}

    assert (scan[0], scan[1]["num_consts"], scan[1]["num_carry"]) == ("scan", 0, 1)
    assert call[0] == "custom_jvp_call"
    assert "num_consts" not in call[1]
    assert not {"jvp_jaxpr_fun", "symbolic_zeros"} & {*call[1]}


def test_what_changes_neither_numbers_nor_placement_is_left_out():
    eqn = _equation(jnp.sin)
    eqn.params = dict.fromkeys(
        [
            *("name", "debug_info", "inline", "keep_unused", "ctx_mesh", "resource_env", "bwd"),
            *("rewrite", "symbolic_zeros", "out_trees", "_split_transpose", "jvp_jaxpr_fun"),
            *("jvp_jaxpr_thunk", "fwd_jaxpr_thunk"),
        ],
        1,
    )
    assert _written(eqn)[1] == {}
    eqn.params = {"num_consts": 1, "names": 2}
    assert _written(eqn)[1] == {"num_consts": 1, "names": 2}


def test_a_composite_has_a_name():
    texts = [_text(lax.composite(jnp.sin, name=name)) for name in ("a.b", "a.c")]

    assert texts[0] != texts[1]
    assert texts[0]["eqns"][0][1]["name"] == "a.b"


def test_primitives_of_jax_are_those_of_its_modules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jax.no_module", None)  # pyright: ignore
    found = programs._primitives_of_jax.__wrapped__(0)

    assert lax.sin_p in found
    assert _SINE not in found


def test_a_result_that_is_no_array_is_not_weak():
    assert _text(lambda x: lax.create_token(x))["weak"] == [False]


def _equation(function: Callable, **changes: Any) -> Any:
    (eqn,) = jax.make_jaxpr(function)(np.ones(3, np.float32)).eqns
    names = ("primitive", "params", "effects", "invars", "outvars", "ctx")
    return types.SimpleNamespace(**{name: getattr(eqn, name) for name in names}, **changes)


def _written(eqn: Any) -> list[Any]:
    writer = programs._Writer([])
    for each in eqn.invars:
        writer._bound(each)
    return writer._equation(eqn)


def test_a_scan_of_the_newest_jax_has_numbers_too():
    tree = types.SimpleNamespace(unpack=lambda: ([1], [2, 3], [4, 5, 6]))
    eqn = _equation(jnp.sin)
    eqn.params = {**eqn.params, "ft_in": tree, "ft_out": tree}
    found = _written(eqn)[1]

    assert (found["num_consts"], found["num_carry"]) == (1, 2)
    assert not {"ft_in", "ft_out"} & {*found}
    eqn.params.pop("ft_out")
    assert _written(eqn)[1] == found


def test_effects_are_opaque_but_for_names_of_axes():
    (printed,) = _eqns(lambda x: jax.debug.print("{}", x))
    (shard_map,) = _eqns(_mapped(lambda x: lax.psum(x, "i") + lax.axis_index("i")))
    inside = shard_map[1]["jaxpr"]["jaxpr"]["eqns"]

    assert printed[1]["effects"] == {"opaque": "effects"}
    assert not any("effects" in parameters for _, parameters, _, _ in inside)
    assert "opaque" not in repr(shard_map)


def _own_keys() -> Any:
    draw = lambda key, bit_width, shape: jnp.zeros(shape, np.uint32)
    return jax.extend.random.define_prng_impl(
        **{"key_shape": (2,), "seed": lambda seed: jnp.zeros(2, np.uint32) + seed},
        **{"split": lambda key, shape: jnp.zeros((*shape, 2), np.uint32)},
        **{"random_bits": draw, "fold_in": lambda key, data: key + data, "name": "own"},
    )


def test_keys_of_a_kind_of_the_user_are_opaque():
    own = _own_keys()
    draws = lambda impl: _eqns(lambda x: x + jax.random.bits(jax.random.key(0, impl=impl)))
    hidden = {"opaque": "random keys of a user's own kind"}

    assert hidden in [parameters.get("keys") for _, parameters, _, _ in draws(own)]
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        assert not any("keys" in parameters for _, parameters, _, _ in draws(impl))


# --- what stands around an equation


def _contexts(function: Callable) -> list[Any]:
    return [parameters.get("ctx") for _, parameters, _, _ in _eqns(function)]


def test_what_is_set_around_an_equation_is_written_where_it_says_something():
    def inside(x: jax.Array) -> jax.Array:
        with set_xla_metadata(group="1"):
            y = jnp.sin(x)
        return jnp.cos(y)

    sine, cosine = _contexts(inside)
    assert cosine is None
    assert [*sine] == ["xla_metadata"]
    with jax.threefry_partitionable(False):  # noqa: FBT003 - jax has it so
        assert _contexts(jnp.sin) == [None]
        drawn = _contexts(lambda x: x + lax.convert_element_type(_bits(), np.float32))
    assert {"threefry_partitionable": False} in drawn
    assert None in drawn
    drawn = _contexts(lambda x: x + lax.convert_element_type(_bits(), np.float32))
    assert {*map(str, drawn)} == {"None"}
    words = [jnp.zeros(2, np.uint32)] * 4
    hashed = lambda x: jax.extend.random.threefry2x32_p.bind(*words)
    with jax.threefry_partitionable(False):  # noqa: FBT003 - jax has it so
        assert _contexts(hashed) == [{"threefry_partitionable": False}]
    with jax.sharding.use_abstract_mesh(_MESH.abstract_mesh):
        assert _contexts(jnp.sin) == [None]


def _bits() -> jax.Array:
    return jax.random.bits(jax.random.key(0), (8, 3))


def _in_context(**context: Any) -> Any:
    eqn = _equation(jnp.sin)
    usual = {name: value for name, value in programs._USUAL_CONTEXT.items() if value is not ...}
    made = {**usual, "no_collectives": frozenset(), "cur_layout_mode": _Mode.AUTO, **context}
    eqn.ctx = types.SimpleNamespace(**made)
    return _written(eqn)[1].get("ctx")


class _Mode(enum.Enum):
    AUTO = 1

    def __str__(self) -> str:
        return "LayoutMode.AUTO"


def test_each_part_of_a_context():
    assert _in_context() is None
    assert _in_context(xla_metadata={}) is None
    assert _in_context(xla_metadata={"a": "b"}) == {"xla_metadata": {"dict": [["a", "b"]]}}
    assert _in_context(compute_type="device_host") == {"compute_type": "device_host"}
    assert _in_context(compute_type="") == {"compute_type": ""}
    assert _in_context(_hidden=1) is None
    assert _in_context(cur_abstract_mesh=abs, manager=abs) is None
    assert _in_context(new=1) == {"new": 1}
    assert _in_context(new=abs) == {"new": {"opaque": "builtin_function_or_method"}}
    assert _in_context(threefry_partitionable=False) is None
    assert _in_context(remove_size_one_mesh_axis=True) == {"remove_size_one_mesh_axis": True}
    eqn = _equation(jnp.sin)
    del eqn.ctx
    assert "ctx" not in _written(eqn)[1]


# --- parameters


class _Colour(enum.Enum):
    RED = 1


_Pair = namedtuple("_Pair", ("a", "b"))  # noqa: PYI024 - without types


def _dims(kind: str, **fields: Any) -> Any:
    made = type(kind, (), {})()
    vars(made).update(fields)
    return made


class _Unhashable:
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return False


class UnspecifiedValue:
    """As in jax."""


class _Axis:
    """An axis may have any name."""


_AXIS = _Axis()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (_Colour.RED, "_Colour.RED"),
        (None, None),
        (True, True),
        (3, 3),
        ("text", "text"),
        (0.5, {"number": "0.5"}),
        (-0.0, {"number": "-0.0"}),
        (1j, {"number": "1j"}),
        (np.int8(3), 3),
        (P("i", None, ("j", "k")), {"spec": [["i"], [], ["j", "k"]]}),
        (np.dtype("int8"), "dtype int8"),
        (np.float32, "dtype float32"),
        (int, {"opaque": "type"}),
        (UnspecifiedValue(), "UnspecifiedValue "),
        ((1, (2, None)), [1, [2, None]]),
        ([1, 0.5], [1, {"number": "0.5"}]),
        (_Pair(1, 2), {"named": ["_Pair", [1, 2]]}),
        *(
            (_dims(kind, a=(0,), b=1), {"named": [kind, [["a", [0]], ["b", 1]]]})
            for kind in (
                *("GatherDimensionNumbers", "ScatterDimensionNumbers", "ConvDimensionNumbers"),
                *("DotDimensionNumbers", "RaggedDotDimensionNumbers", "FTTuple", "FTPyTree"),
            )
        ),
        (_dims("OtherNumbers", a=1), {"opaque": "OtherNumbers"}),
        (_dims("PRNGImpl", tag="fry"), "PRNGImpl fry"),
        (_Unhashable(), {"opaque": "_Unhashable"}),
        ({"b": 1, "a": (2,)}, {"dict": [["a", [2]], ["b", 1]]}),
        ({2, 1}, {"set": [1, 2]}),
        (frozenset({"b", "a"}), {"set": ["a", "b"]}),
        (abs, {"opaque": "builtin_function_or_method"}),
        ((1, abs), [1, {"opaque": "builtin_function_or_method"}]),
    ],
)
def test_a_parameter(value: Any, expected: Any):
    found = programs.described(value)

    assert found == expected
    assert type(found) is type(expected)


def test_parameters_of_jax():
    device = jax.devices()[0]
    digest = programs._digest(np.ones(2))
    mesh = {"mesh": [["i", 8]], "kinds": ["AxisType.Auto"], "devices": [*range(8)]}
    abstract = AbstractMesh((2, 4), ("i", "j"))
    axis_types = [str(each) for each in abstract.axis_types]

    assert programs.described(device) == {"device": ["cpu", 0]}
    for array in (np.ones(2), jnp.ones(2, np.float32)):
        assert programs.described(array) == {"array": programs._digest(array)}
    assert programs.described(np.ones(2)) == {"array": digest}
    assert programs.described(np.float32(1)) == {"array": programs._digest(np.float32(1))}
    assert programs.described(_MESH) == mesh
    assert programs.described(NamedSharding(_MESH, P("i"))) == {
        "sharding": [mesh, {"spec": [["i"]]}]
    }
    assert programs.described(abstract) == {"mesh": [["i", 2], ["j", 4]], "kinds": axis_types}
    old = types.SimpleNamespace(shape={"i": 2}, axis_types=None)
    assert programs._Writer([])._mesh(old) == {"mesh": [["i", 2]], "kinds": []}
    made = jax.make_jaxpr(jnp.sin)(np.float32(1))
    for body in (made, made.jaxpr):
        assert programs.described(body)["jaxpr"]["eqns"][0][0] == "sin"


def test_a_name_of_an_axis_that_is_no_text_is_the_same_in_all_of_a_program():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), (_AXIS, "j"))
    body = lambda x: lax.psum(jax.jit(lambda x: lax.pmax(x, _AXIS))(x), _AXIS)
    ((_, parameters, _, _),) = _eqns(_mapped(body, P((_AXIS, "j")), mesh))
    call, total = parameters["jaxpr"]["jaxpr"]["eqns"]

    assert parameters["mesh"]["mesh"] == [["axis 0", 2], ["j", 4]]
    assert parameters["in_specs"] == [{"spec": [["axis 0", "j"]]}]
    assert total[1]["axes"] == ["axis 0"]
    assert call[1]["jaxpr"]["jaxpr"]["eqns"][0][1]["axes"] == ["axis 0"]
    writer = programs._Writer([])
    assert [writer._name(each) for each in (_AXIS, "j", 1, _AXIS)] == [
        *("axis 0", "j", "axis 1", "axis 0")
    ]


def test_a_type_says_where_a_value_lies():
    lies = lambda spec: types.SimpleNamespace(
        shape=(8, 3), dtype=np.dtype("int8"), sharding=types.SimpleNamespace(spec=spec)
    )

    assert programs._type(lies(P(None, None))) == "int8[8,3]"
    assert programs._type(lies(None)) == "int8[8,3]"
    assert programs._type(lies(P(None, "i"))) == f"int8[8,3] {P(None, 'i')}"
    assert programs._type("token") == "token"


def test_a_literal_of_a_key_is_told_by_its_digest():
    key = jax.random.key(0)
    literal = types.SimpleNamespace(aval=jax.typeof(key), val=key)
    number = types.SimpleNamespace(aval=jax.typeof(np.float32(0)), val=1)

    assert programs._Writer([])._operand(literal) == f"key<fry>[] {programs._digest(key)}"
    assert programs._Writer([])._operand(number) == "float32[] 0000803f"


# --- for other numbers of devices


def _sizes(function: Callable, *kinds: Any) -> dict[int, list[tuple[int, ...]]]:
    found = programs.other_sizes(_text(function, *kinds), [*kinds])
    return {size: [each.shape for each in leaves] for size, leaves in found}


def test_the_other_sizes_of_a_program():
    own, turned = jax.ShapeDtypeStruct((8, 3), np.int8), jax.ShapeDtypeStruct((3, 8), np.int8)
    shared = jax.ShapeDtypeStruct((3,), np.int8)
    mapped = jax.shard_map(
        *(lambda x, y, z: x + y.T + z,),
        **{"mesh": _MESH, "in_specs": (P("i"), P(None, "i"), P()), "out_specs": P("i")},
    )
    expected = {size: [(size, 3), (3, size), (3,)] for size in (1, 2, 4)}

    assert _sizes(jax.jit(mapped), own, turned, shared) == expected
    assert _sizes(lambda x, y, z: jax.jit(mapped)(x, y, z), own, turned, shared) == expected
    assert _sizes(jnp.sin, own) == {}
    assert _sizes(_mapped(lambda x: x * 2, P()), own) == {}
    four = Mesh(np.array(jax.devices()[:4]), ("i",))
    both = lambda x: (_mapped(jnp.sin)(x), _mapped(jnp.sin, P("i"), four)(x))
    assert _sizes(both, own) == {}
    assert [*_sizes(_mapped(jnp.sin, P("i"), four), own)] == [1, 2, 8]
    table = np.ones((8, 3), np.int8)
    assert _sizes(lambda x: _mapped(lambda y: y)(table) + x, own) == {}
    doubled = lambda x: _mapped(jnp.sin)(x * 2)
    assert _sizes(doubled, jax.ShapeDtypeStruct((8, 3), np.float32)) == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_SIZES", (2, 16))
        assert [*_sizes(_mapped(jnp.sin), own)] == [2]
    two = Mesh(np.array(jax.devices()).reshape(2, 4), ("i", "j"))
    assert [*_sizes(_mapped(jnp.sin, P(("i", "j")), two), own)] == [1, 2, 4]


# --- calls and their programs


def test_arguments_are_told_by_types_and_their_places():
    found = Arguments((np.ones((2, 3)), {"a": 1.5}), {"by": jnp.asarray(2.0), "text": "t"})

    assert found.paths() == ["[0]", "[1]['a']", "['by']", "['text']"]
    array, number, weak, text = found.leaves
    assert (array.shape, array.dtype, array.weak_type) == ((2, 3), np.float32, False)
    assert (weak.shape, weak.weak_type) == ((), True)
    assert (number, text) == (1.5, "t")
    assert Arguments((np.float32(1),), {}).leaves[0].dtype == np.float32
    others = (np.array([abs]), np.ones(2, jnp.bfloat16), np.ones(2, np.uint64), np.ones(2, bool))
    kinds = [each.dtype for each in Arguments((others, jax.random.key(0)), {}).leaves]
    assert [*map(str, kinds)] == ["object", "bfloat16", "uint32", "bool", "key<fry>"]


def _signatures(*args: Any, owner: Any = 0) -> tuple[Any, Any]:
    return Arguments(args, {}).signatures(owner)


def test_what_two_calls_have_in_common():
    by_type, by_value = _signatures(np.ones(2), 1.5, "t")

    assert (by_type, by_value) == _signatures(np.zeros(2), 1.5, "t")
    other = _signatures(np.ones(2), 2.5, "t")
    assert (by_type == other[0], by_value == other[1]) == (True, False)
    for args in (
        *((np.ones(3), 1.5, "t"), (np.ones(2, np.int8), 1.5, "t"), (np.ones(2), 1.5, "u")),
        *((np.ones(2), 1, "t"), (np.ones(2), 1.5, "t", 1), (np.ones(2), [1.5], "t")),
    ):
        assert not {by_type, by_value} & {*_signatures(*args)}
    assert not {by_type, by_value} & {*_signatures(np.ones(2), 1.5, "t", owner=1)}
    assert _signatures(jnp.asarray(1.0)) != _signatures(jnp.asarray(np.float32(1)))
    assert _signatures(*[True])[1] != _signatures(1)[1]
    one, other_set = {1}, {1}  # they have no hash
    assert _signatures(one) == _signatures(one) != _signatures(other_set)


def test_what_is_traced():
    found = []
    jax.make_jaxpr(lambda x: found.append(call_programs.is_traced({"a": (1, x)})))(1.0)

    assert found == [True]
    assert not call_programs.is_traced((1, np.ones(2), "t", None))
    assert not call_programs.is_traced({1: 0, "a": 0})  # keys without an order


def _described(make: Callable, *args: Any, **options: Any) -> tuple[dict[str, Any], bool]:
    return Arguments(args, {}).described(make, **options)


def test_numbers_are_arguments_where_the_function_takes_them_as_such():
    given: list[list[int]] = []

    def make(found: list[int]) -> dict[str, Any]:
        given.append(found)
        if len(found) > 1:
            raise TypeError("static")
        return {"text": "t"}

    found, whole = _described(make, np.ones(2), 3)
    assert (found["text"], whole, given) == ("t", True, [[0, 1], [0]])
    given.clear()
    found, whole = _described(make, np.ones(2))
    assert (found["text"], whole, given) == ("t", False, [[0]])
    given.clear()
    assert _described(make, np.ones(2), 3, numbers=False) == (found, True)
    assert given == [[0]]
    given.clear()
    for number in (True, 1, 1.5, 1j):
        _described(make, "text", number)
    assert given == [[1]] * 4
    assert found["environment"] == {
        **{"jax": jax.__version__, "backend": "cpu", "devices": 8},
        **{"xla_flags": os.environ.get("XLA_FLAGS", "")},
    }


def test_why_a_call_has_no_text():
    make = lambda found: 1 / 0

    with warnings.catch_warnings(action="ignore"):  # jax takes none in the future
        assert _described(make, iter([1]), 1) == ({"why": "it takes an iterator"}, True)
    assert _described(make, 1) == ({"why": "it cannot be traced: ZeroDivisionError"}, True)


class _Texts:
    """With the events that they wrote."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.texts = ProgramTexts(lambda **event: self.events.append(event))

    def number(self, function: Callable, *args: Any, site: int = 0, **options: Any) -> int | None:
        return self.texts.number(site, function, Arguments(args, {}), **options)


def test_a_program_is_written_once():
    found = _Texts()

    def double(x: Any, n: Any = 2) -> Any:
        return x * n

    assert [found.number(double, np.ones(size)) for size in (2, 3, 2)] == [0, 1, 0]
    assert found.number(double, np.zeros(3)) == 1
    assert found.number(double, np.ones(2), site=5) == 2
    assert [found.number(double, np.ones(2), n) for n in (3, 4)] == [3, 3]
    assert [found.number(double, np.ones(2), n, numbers=False) for n in (5, 6)] == [3, 3]
    assert [(event["event"], event["site"], event["number"]) for event in found.events] == [
        *(("text", 0, 0), ("text", 0, 1), ("text", 5, 2), ("text", 0, 3))
    ]
    assert found.events[3]["paths"] == ["[0]", "[1]"]
    assert found.events[0]["paths"] == ["[0]"]
    assert found.events[0]["text"]["in"] == [[1, "float32[2]"]]
    assert found.events[0]["sizes"] == {}
    assert "environment" in found.events[0]


def test_a_program_that_depends_on_a_number_is_written_for_each():
    found = _Texts()

    def power(x: Any, n: int) -> Any:
        return x if n == 1 else x**n

    assert [found.number(power, np.ones(2), n) for n in (1, 2, 1)] == [0, 1, 0]
    assert [event["paths"] for event in found.events] == [["[0]"], ["[0]"]]


def test_a_site_has_so_many_programs():
    found = _Texts()
    sizes = [*range(1, 35)]
    numbers = [found.number(jnp.sin, np.ones(size)) for size in sizes]

    assert numbers == [*range(32), None, None]
    assert found.number(jnp.sin, np.ones(1)) == 0
    assert found.number(jnp.sin, np.ones(40), site=1) == 32
    assert len(found.events) == 33


def test_lambdas_of_one_expression_and_of_the_same_values_have_one_program():
    found = _Texts()
    held, other = np.ones(2, np.float32), np.zeros(2, np.float32)
    plain = lambda: lambda x: x * 2
    closing = lambda value: lambda x: x * value
    default = lambda value: lambda x, n=value: x * n

    assert [found.number(plain(), np.ones(2)) for _ in range(2)] == [0, 0]
    assert [found.number(closing(each), np.ones(2)) for each in (held, held, other)] == [1, 1, 2]
    kept = [default(each) for each in (1, 1)]
    assert [found.number(each, np.ones(2)) for each in kept] == [3, 4]


def test_for_other_numbers_of_devices_too():
    found = _Texts()
    found.number(jax.jit(_mapped(lambda x: x * 2)), np.ones((8, 3), np.float32))

    def picky(x: Any) -> Any:
        if x.shape[0] == 2:
            raise ValueError("not two")
        return _mapped(lambda x: x * 2, P("i"), Mesh(jax.devices()[: x.shape[0]], ("i",)))(x)

    found.number(picky, np.ones((8, 3), np.float32))
    assert [*found.events[1]["sizes"]] == ["1", "4"]
    assert found.events[1]["sizes"]["4"]["in"] == [[1, "float32[4,3]"]]


def test_a_trace_for_the_text_is_known_as_one_and_draws_no_number_of_the_program():
    found, seen = _Texts(), []

    def noisy(x: jax.Array) -> jax.Array:
        seen.append(found.texts.is_tracing)
        return x + np.random.normal() + random.random()  # noqa: NPY002 - as programs do

    assert not found.texts.is_tracing
    of_numpy = lambda: str(np.random.get_state())  # noqa: NPY002 - as programs do
    states = random.getstate(), of_numpy()
    found.number(noisy, jnp.ones(8))

    assert "text" in found.events[0]
    assert states == (random.getstate(), of_numpy())
    assert seen == [True]
    assert not found.texts.is_tracing


def test_what_is_called_lives_on_so_that_no_other_gets_its_identity():
    found = _Texts()
    numbers = [found.number(functools.partial(jnp.sin), np.ones(2)) for _ in range(5)]

    assert numbers == [*range(5)]


def test_a_mapped_program_says_nothing_that_is_opaque():
    if not CAN_REWRITE:
        pytest.skip("before jax 0.10, jax.pmap was another program")
    step = jax.pmap(lambda x: x - lax.pmean(jnp.sin(x), "i"), axis_name="i")

    assert "opaque" not in repr(_text(lambda x: step(x)))
