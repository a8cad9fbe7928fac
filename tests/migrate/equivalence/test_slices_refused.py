"""What a proof by slices wants of a program: one shard_map, and nothing else that counts."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, PartitionSpec

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.verify import slices, text_uniformity
from jax_dist.migrate.verify.equivalence import NotProvedError
from jax_dist.migrate.verify.recording import programs

pytestmark = pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")

ROWS, WHOLE = PartitionSpec("i"), PartitionSpec()
COPIES, MERGED, AS_IS = "one of equal copies", "device axis merged", "as is"


def _typed(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _mapped(body: Any, in_specs: Any = ROWS, out_specs: Any = ROWS, **mesh: Any) -> Any:
    devices = mesh.pop("devices", jax.devices())
    own = Mesh(devices, **{"axis_names": ("i",), **mesh})
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.shard_map(body, mesh=own, **specs)


def _before(body: Any = jnp.sin, *operands: Any, **options: Any) -> dict[str, Any]:
    mapped = jax.pmap(body, axis_name="i", **options)
    return programs.text(lambda *args: mapped(*args), [*operands] or [_typed(8, 4, 3)])


def _after(function: Any, *operands: Any) -> dict[str, Any]:
    return programs.text(function, [*operands] or [_typed(32, 3)])


def _proof(before: Any, after: Any, **relation: Any) -> tuple[str, ...]:
    merged = {"arguments": [[0, MERGED]], "results": [MERGED]}
    return slices.proof({"before": before, "after": after, "sizes": {}, **merged, **relation})


def _twice(x: jax.Array) -> jax.Array:
    return _mapped(jnp.sin)(_mapped(lambda x: x)(x))


def _one_array_twice(x: jax.Array) -> jax.Array:
    return _mapped(lambda a, b: jnp.sin(a) + 0 * b, (ROWS, ROWS))(x, x)


def _with_metadata(x: jax.Array) -> jax.Array:
    with set_xla_metadata(_scheduling_group="1"):
        return _mapped(jnp.sin)(x)


_OTHER = {
    "fewer devices": (_mapped(jnp.sin, devices=jax.devices()[:4]), "devices .* before, .* after"),
    "two axes": (
        _mapped(
            jnp.sin, PartitionSpec(("i", "j")), PartitionSpec(("i", "j")),
            devices=np.array(jax.devices()).reshape(4, 2), axis_names=("i", "j"),
        ),
        "its mesh has several axes",
    ),
    "two shard_maps": (_twice, "it has several shard_maps"),
    "no shard_map": (jnp.sin, "outside of its shard_map: sin"),
    "an argument": (lambda x: x, "it has no shard_map"),
    "one array twice": (_one_array_twice, "its shard_map takes one array twice"),
    "metadata": (_with_metadata, "something is set around its shard_map"),
    "donation": (jax.jit(_mapped(jnp.sin), donate_argnums=0), "other arguments are donated"),
    "another type": (
        lambda x: _mapped(lambda x: jnp.sin(x).astype(jnp.bfloat16))(x), "result 0 is .* which is",
    ),
    "other rows": (
        _mapped(lambda x: jnp.sin(x).T, ROWS, PartitionSpec(None, "i")), "result 0 is .* which is",
    ),
    "one more result": (
        _mapped(lambda x: (jnp.sin(x), x), ROWS, ROWS), "its results have other weak types",
    ),
    "cosine": (_mapped(jnp.cos), "'.*sin.*' before, '.*cos.*' after"),
}  # fmt: skip


@pytest.mark.parametrize("name", _OTHER)
def test_another_program_is_not_proved(name: str):
    other, said = _OTHER[name]
    assert _proof(_before(), _after(_mapped(jnp.sin))) == ("R7",)

    with pytest.raises(NotProvedError, match=said):
        _proof(_before(), _after(other))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compiler_options_kvs", [["xla_cpu_enable_fast_math", True]]),
        ("in_layouts", ["one"]),
        ("out_layouts", ["one"]),
    ],
)
def test_options_of_a_jit_are_no_part_of_a_proof(name: str, value: Any):
    after = json.loads(json.dumps(_after(jax.jit(_mapped(jnp.sin)))))
    ((_, parameters, *_),) = after["eqns"]
    assert _proof(_before(), after) == ("R7",)

    parameters[name] = value
    with pytest.raises(NotProvedError, match=f"its jit has {name}"):
        _proof(_before(), after)


def test_one_program_has_no_other_relation_to_itself():
    text = _after(_mapped(jnp.sin))
    as_is = {"arguments": [[0, AS_IS]]}

    assert _proof(text, text, **as_is, results=[AS_IS]) == ()
    for how in (COPIES, MERGED):
        with pytest.raises(NotProvedError, match="result 0 is .* which is not"):
            _proof(text, text, **as_is, results=[how])

    less = _after(_mapped(lambda x, y: x - y, (ROWS, ROWS)), *[_typed(8, 3)] * 2)
    in_order, turned = ([[n, AS_IS] for n in order] for order in ((0, 1), (1, 0)))
    assert _proof(less, less, arguments=in_order, results=[AS_IS]) == ()
    with pytest.raises(NotProvedError, match="before, .* after"):
        _proof(less, less, arguments=turned, results=[AS_IS])


@pytest.mark.parametrize("hides", ["before", "after"])
def test_what_a_text_hides_is_not_proved(hides: str):
    def called_back(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    before = _before(called_back if hides == "before" else jnp.sin)
    after = _after(_mapped(called_back if hides == "after" else jnp.sin))
    with pytest.raises(NotProvedError, match="its text does not show all of it"):
        _proof(before, after)


def test_the_kinds_of_axes_are_compared():
    text = json.dumps(_after(_mapped(jnp.sin)))
    assert "AxisType.Auto" in text

    with pytest.raises(NotProvedError, match="axes of .* before, of .* after"):
        _proof(_before(), json.loads(text.replace("AxisType.Auto", "AxisType.Explicit")))


def test_what_its_shard_map_has_not_computed():
    both = {"arguments": [[0, MERGED]], "results": [MERGED, MERGED]}
    before = _before(lambda x: (jnp.sin(x), x))
    mapped = _mapped(jnp.sin)

    assert _proof(before, _after(_mapped(lambda x: (jnp.sin(x), x))), **both) == ("R7",)
    with pytest.raises(NotProvedError, match="it returns what its shard_map has not computed"):
        _proof(before, _after(lambda x: (mapped(x), x)), **both)

    for given_back in (np.float32(1), np.ones((32, 3), np.float32)):
        with pytest.raises(NotProvedError, match="it returns what its shard_map has not computed"):
            _proof(before, _after(lambda x, value=given_back: (mapped(x), value)), **both)


def test_the_devices_must_be_known():
    def text(made: Any) -> Any:
        found = json.loads(json.dumps(made))
        (eqn,) = found["eqns"]
        inner = eqn if eqn[0] == "shard_map" else eqn[1]["jaxpr"]["jaxpr"]["eqns"][0]
        del inner[1]["mesh"]["devices"]
        return found

    with pytest.raises(NotProvedError, match=r"devices \(\) before, \(\) after"):
        _proof(text(_before()), text(_after(_mapped(jnp.sin))))


def test_what_is_as_it_was_may_be_any_program():
    """One that no proof by slices takes; but only where all of it is as it was."""
    relation = {"arguments": [[0, AS_IS]], "results": [AS_IS]}

    assert _proof(_after(_twice), _after(_twice), **relation) == ()
    with pytest.raises(NotProvedError, match="it has several shard_maps"):
        _proof(_after(_twice), _after(_twice), arguments=[[0, AS_IS]], results=[MERGED])


def test_what_a_jit_inside_donates_is_its_own():
    donating = jax.jit(lambda x: x, donate_argnums=0)

    assert _proof(_before(), _after(lambda x: donating(_mapped(jnp.sin)(x)))) == ("R7",)


def test_options_that_a_jit_does_not_have():
    after = json.loads(json.dumps(_after(jax.jit(_mapped(jnp.sin)))))
    ((_, parameters, *_),) = after["eqns"]
    for name in ("compiler_options_kvs", "in_layouts", "out_layouts", "in_shardings"):
        for change in ({name: None}, {}):
            parameters.pop(name, None)
            parameters.update(change)
            assert _proof(_before(), after) == ("R7",)


def test_a_number_is_not_cut():
    """Each device would have one of its own."""
    operands = _typed(32, 3), _typed(8)
    literal = f"float32[] {np.float32(2).tobytes().hex()}"
    relation = {"arguments": [[0, MERGED], [literal, "a number"]]}
    body = lambda x, n: x * n.reshape(())
    before = _before(lambda x: x * np.float32(2))

    whole = _after(_mapped(body, (ROWS, WHOLE)), operands[0], _typed(1))
    assert _proof(before, whole, **relation) == ("R10", "R7")
    with pytest.raises(NotProvedError, match="its shard_map cuts a number"):
        _proof(before, _after(_mapped(body, (ROWS, ROWS)), *operands), **relation)


@pytest.mark.parametrize(
    ("old", "new", "how", "holds"),
    [
        (("float32[8,3]", 0), ("float32[3]", None), COPIES, True),
        (("float32[16,3]", 0), ("float32[3]", None), COPIES, False),
        (("float32[8,8]", 0), ("float32[8]", 0), COPIES, False),
        (("float32[8,3]", None), ("float32[3]", None), COPIES, False),
        (("float32[8,8]", 1), ("float32[8]", None), COPIES, False),
        (("float32[8,4,3]", 0), ("float32[32,3]", 0), MERGED, True),
        (("float32[16,2,3]", 0), ("float32[32,3]", 0), MERGED, False),
        (("float32[8,4,3]", 0), ("float32[32,3]", None), MERGED, False),
        (("float32[8,4,8]", 0), ("float32[32,8]", 1), MERGED, False),
        (("float32[8,3]", 0), ("float32[8,3]", 0), AS_IS, True),
        (("float32[8,8]", 0), ("float32[8,8]", 1), AS_IS, False),
    ],
)
def test_each_device_has_the_same_slice(old: Any, new: Any, how: str, *, holds: bool):
    arrays = slices._Array(*old), slices._Array(*new)
    if holds:
        slices._check_slices("argument 0", *arrays, how, 8)
    else:
        with pytest.raises(NotProvedError, match="argument 0 is .* which is not"):
            slices._check_slices("argument 0", *arrays, how, 8)


def test_donated_arguments_are_told_by_the_relation():
    def taken(x: jax.Array, y: jax.Array) -> jax.Array:
        return x - 2 * y

    operands = [_typed(8, 4, 3), _typed(8, 4, 3)]
    before = _before(taken, *operands, donate_argnums=1)
    turned = lambda y, x: _mapped(taken, (ROWS, ROWS))(x, y)
    relation = {"arguments": [[1, MERGED], [0, MERGED]]}
    merged = [_typed(32, 3)] * 2

    right, wrong = (_after(jax.jit(turned, donate_argnums=n), *merged) for n in (0, 1))
    assert _proof(before, right, **relation) == ("R7",)
    with pytest.raises(NotProvedError, match="other arguments are donated"):
        _proof(before, wrong, **relation)


def test_weak_types_count():
    before = _before(lambda x: (jnp.sin(x), x[0, 0] * 0 + 1))
    weak = _mapped(lambda x: (jnp.sin(x), jnp.broadcast_to(1.0, ())), ROWS, (ROWS, WHOLE))

    with pytest.raises(NotProvedError, match="weak types"):
        _proof(before, _after(weak), results=[MERGED, COPIES])


@pytest.mark.parametrize(
    ("was", "now", "how", "holds"),
    [
        ("float32[8,3]", "float32[8,3]", AS_IS, True),
        ("float32[8,3]", "float32[3,8]", AS_IS, False),
        ("float32[8,3]", "float32[3]", COPIES, True),
        ("float32[8]", "float32[]", COPIES, True),
        ("float32[]", "float32[]", COPIES, False),
        ("float32[8,3]", "float32[8]", COPIES, False),
        ("float32[8,3]", "int32[3]", COPIES, False),
        ("float32[8,4,3]", "float32[32,3]", MERGED, True),
        ("float32[8,4]", "float32[32]", MERGED, True),
        ("float32[8]", "float32[8]", MERGED, False),
        ("float32[8,4,3]", "float32[4,24]", MERGED, False),
        ("float32[8,4,3]", "float32[12,3]", MERGED, False),
        ("float32[8,3]", "float32[8,3]", "by magic", False),
    ],
)
def test_types_that_have_a_relation(was: str, now: str, how: str, *, holds: bool):
    assert slices._has_relation(was, now, how) is holds


def test_results_of_one_program_that_are_alike():
    def body(x: jax.Array, y: jax.Array) -> Any:
        return lax.psum(x, "i"), x, y, x + y, lax.axis_index("i") + 0 * y

    pair = [_typed(8, 3), _typed(8, 3)]
    text = programs.text(lambda *args: jax.pmap(body, axis_name="i")(*args), pair)

    assert slices.alike_results(text, [False, True]) == [True, False, True, False, False]
    assert slices.alike_results(text, [True, True]) == [True, True, True, True, False]
    table = np.arange(24, dtype=np.float32).reshape(8, 3)
    of_table = _after(lambda x: _mapped(lambda x, t: (x * 2, t), (ROWS, ROWS))(x, table), pair[0])
    assert slices.alike_results(of_table, [True]) == [True, False]
    whole = _after(_mapped(lambda x: x * 2, WHOLE, ROWS), _typed(8, 3))
    assert slices.alike_results(whole, [False]) == [True]
    with pytest.raises(NotProvedError, match="outside of its shard_map"):
        slices.alike_results(_after(jnp.sin), [True])


def test_each_carry_of_a_scan_is_its_own():
    def body(x: jax.Array, y: jax.Array) -> Any:
        shared = lax.psum(x, "i")
        turn = lambda c, _: ((c[0] * 2 + shared, c[1] + shared), None)
        return lax.scan(turn, (x, y), None, length=2)[0]

    pair = [_typed(8, 3), _typed(8, 3)]
    text = programs.text(lambda *args: jax.pmap(body, axis_name="i")(*args), pair)

    assert slices.alike_results(text, [True, False]) == [True, False]
    assert slices.alike_results(text, [False, True]) == [False, True]


def test_what_a_scan_carries_is_followed_through_all_turns():
    def body(x: jax.Array, y: jax.Array) -> Any:
        turn = lambda c, _: ((c[1] * 1, c[2] * 1, c[2]), None)
        return lax.scan(turn, (x, x, y), None, length=5)[0]

    pair = [_typed(8, 3), _typed(8, 3)]
    text = programs.text(lambda *args: jax.pmap(body, axis_name="i")(*args), pair)

    assert slices.alike_results(text, [True, False]) == [False, False, False]
    assert slices.alike_results(text, [True, True]) == [True, True, True]


def test_all_programs_in_an_equation_are_read():
    """That of a linear solver holds four, one of which may give each device something else."""

    def solved(x: jax.Array, *, by_device: bool) -> jax.Array:
        apart = lax.axis_index("i") if by_device else 1
        return lax.custom_linear_solve(lambda y: y * 2, x, lambda _, y: y / 2 + apart)

    for by_device in (False, True):
        body = functools.partial(solved, by_device=by_device)
        text = _after(_mapped(body, WHOLE, ROWS), _typed(8, 3))
        assert slices.alike_results(text, [True]) == [not by_device]


def test_programs_are_found_however_deep():
    program = {"jaxpr": _after(jnp.sin)}
    held = text_uniformity._with_programs({"a": [{"b": program, "c": 1}, 3], "d": program})

    assert held["a"][1] == 3
    assert len([*text_uniformity._programs(held)]) == 2


# ---- programs of the host


def _on_host(before: Any, after: Any, operands: Any, **relation: Any) -> tuple[str, ...]:
    one, other = (programs.text(f, list(o)) for f, o in zip((before, after), operands, strict=True))
    return slices.proof({"before": one, "after": other, "sizes": {}, **relation})


_PAIR = ([_typed(8, 3)], [_typed(3)])
_ONE = {"arguments": [[0, COPIES]], "results": [AS_IS]}
_COPIES = {"arguments": [[0, COPIES]], "results": [COPIES]}


def test_one_of_equal_rows():
    assert _on_host(lambda x: x[0] * 2, lambda x: x * 2, _PAIR, **_ONE) == ("R5", "R8")
    assert _on_host(lambda x: x[5] * 2, lambda x: x * 2, _PAIR, **_ONE) == ("R5", "R8")
    first = lambda x: jax.device_put(jnp.copy(x)[1])
    assert _on_host(first, lambda x: x, _PAIR, results=[AS_IS], arguments=[[0, COPIES]]) == (
        *("R5", "R8"),
    )


def test_several_arrays_that_are_put_at_once():
    operands = [_typed(8, 3), _typed(3)], [_typed(3), _typed(3)]
    relation = {"arguments": [[0, COPIES], [1, AS_IS]], "results": [AS_IS, AS_IS]}
    before = lambda x, y: jax.device_put((x[0], y), jax.devices()[0])

    put = lambda device: lambda x, y: jax.device_put((x, y), jax.devices()[device])
    assert _on_host(before, put(0), operands, **relation) == ("R5", "R8")
    with pytest.raises(NotProvedError):
        _on_host(before, put(1), operands, **relation)


def test_rows_of_the_host_that_are_one_batch():
    merged = {"arguments": [[0, MERGED]], "results": [MERGED]}
    same = lambda x: jnp.copy(x)
    table, other = np.arange(3, dtype=np.float32), np.ones(3, np.float32)

    of_rows, of_one = (lambda x: x[0] * table), (lambda x: x * table)
    assert _on_host(of_rows, of_one, _PAIR, **_ONE) == ("R5", "R8")
    with pytest.raises(NotProvedError):
        _on_host(of_rows, lambda x: x * other, _PAIR, **_ONE)
    assert _on_host(same, same, ([_typed(8, 4, 3)], [_typed(32, 3)]), **merged) == ("R7",)


def test_what_is_set_around_a_copy_of_the_host_is_compared():
    def copied(x: jax.Array) -> jax.Array:
        with set_xla_metadata(_scheduling_group="1"):
            return jnp.copy(x)

    rows = lambda x: copied(x[0])
    assert _on_host(rows, copied, _PAIR, **_ONE) == ("R5", "R8")
    for pair in ((rows, jnp.copy), (lambda x: jnp.copy(x[0]), copied)):
        with pytest.raises(NotProvedError):
            _on_host(*pair, _PAIR, **_ONE)


def test_rules_hold_on_both_sides():
    plain, over_one = jnp.sin, lambda x: jnp.sin(x) / 1.0
    of_row = lambda function: lambda x: function(x[0])

    assert _on_host(of_row(plain), over_one, _PAIR, **_ONE) == ("R3", "R5", "R8")
    assert _on_host(of_row(over_one), plain, _PAIR, **_ONE) == ("R3", "R5", "R8")


@pytest.mark.parametrize(
    ("before", "after", "operands", "relation", "said"),
    [
        (lambda x: x.sum(0), lambda x: x, _PAIR, _ONE, "it computes with copies: reduce_sum"),
        (lambda x: x + 1, lambda x: x + 1, _PAIR, _COPIES, "it computes with copies: add"),
        (
            lambda x: np.float32(1), lambda x: np.float32(1), ([_typed(8, 3)], [_typed(4)]), _ONE,
            "argument 0 is .* which is not 'one of equal copies'",
        ),
        (
            lambda x: x[0], lambda x, y: x, ([_typed(8, 3)], [_typed(3), _typed(3)]), _ONE,
            "its programs take other arguments",
        ),
        (lambda x: x[0] * 2, lambda x: x * 3, _PAIR, _ONE, "before, .* after"),
        (lambda x: x[:2], lambda x: jnp.stack([x, x]), _PAIR, _ONE, "computes with copies: slice"),
        (lambda x: x, lambda x: x, _PAIR, _ONE, "result 0 is .* which is not 'as is'"),
        (lambda x: x[0], lambda x: x[None][0], _PAIR, {**_ONE, "results": [COPIES]}, "result 0 is"),
        (
            lambda x: (x[0], x[1]), lambda x: x, _PAIR, {**_ONE, "results": [AS_IS, AS_IS]},
            "weak types|another number of results",
        ),
        (
            lambda x: x[0] * 2, lambda x: x * 2, _PAIR, {**_ONE, "results": [AS_IS, AS_IS]},
            "another number of results",
        ),
        (
            lambda x, y: x[0] + y, lambda x: x, ([_typed(8, 3), _typed(3)], [_typed(3)]), _ONE,
            "its programs take other arguments",
        ),
        (
            lambda x: x, lambda x: jnp.stack([x] * 8), ([_typed(8, 3)], [_typed(3)]),
            {"arguments": [[0, COPIES]], "results": [AS_IS]}, "result 0 is not 'as is'",
        ),
        (
            lambda x: jnp.stack([x, x * 1, x, x]), lambda x: x, ([_typed(3)], [_typed(3)]),
            {"arguments": [[0, AS_IS]], "results": [COPIES]}, "result 0 is not 'one of equal cop",
        ),
    ],
    ids=[
        *("a sum", "more", "another argument that nobody reads", "an argument more"),
        *("another number", "two rows", "all rows", "no copies", "two results"),
        *("one result", "another argument", "copies after", "unlike rows"),
    ],
)  # fmt: skip
def test_another_program_of_the_host(
    before: Any, after: Any, operands: Any, relation: Any, said: str
):
    with pytest.raises(NotProvedError, match=said):
        _on_host(before, after, operands, **relation)


def test_calls_of_the_host_stay_apart():
    """XLA may round otherwise in one than in two."""
    one, two = jax.jit(lambda x: jnp.sin(jnp.cos(x))), lambda x: jnp.sin(jnp.cos(x))

    for before, after, same in ((one, one, True), (two, two, True), (two, one, False)):
        rows = lambda x, before=before: before(x[0])
        if same:
            assert _on_host(rows, after, _PAIR, **_ONE) == ("R5", "R8")
            continue
        with pytest.raises(NotProvedError):
            _on_host(rows, after, _PAIR, **_ONE)


def test_the_host_donates_nothing():
    first, doubled = (lambda x: x[0] * 2), (lambda x: x * 2)
    donating = functools.partial(jax.jit, donate_argnums=0)
    for pair in ((donating(first), doubled), (first, donating(doubled))):
        with pytest.raises(NotProvedError, match="it donates what it takes"):
            _on_host(*pair, _PAIR, **_ONE)
