"""Where arrays that mapped functions take and give come from and go to, seen from expressions."""

import builtins
import gc
import json
import pathlib
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_dist.migrate.verify.recording import flow as flows
from jax_dist.migrate.verify.recording.flow import Flow


@pytest.fixture
def flow() -> Flow:
    return Flow()


def _written(flow: Flow, folder: pathlib.Path, of_type: str = "") -> dict[str, Any]:
    flow.write(str(folder))
    found = json.loads((folder / "flow.json").read_text())
    types = {each.pop("type") for each in found["expressions"].values()}
    assert types == {of_type} or not of_type
    return found


def _plain(**more: Any) -> dict[str, Any]:
    return {
        **{"hits": 1, "arrays": {}, "others": False, "numbers": False, "scalars": False},
        **{"host": True, "numpy": False, "sites": [], "callable": False, **more},
    }


def test_expressions_call_a_builtin(flow: Flow, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builtins, flows.NAME, None, raising=False)
    flow.install()
    value = object()

    assert eval("__jd_see__(3, value)", {"value": value}) is value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, {}),
        ("text", {}),
        (len, {"callable": True}),
        ({"a": 3}, {"numbers": True}),
        ({"a": True}, {"numbers": True}),
        ({"a": 1.5}, {"numbers": True}),
        ({"a": 1j}, {"numbers": True}),
        ({"a": "text"}, {}),
        ({"a": 3}.items(), {"numbers": True}),
        ({"a": np.ones(2)}.values(), {"numpy": True, "others": True}),
        (np.float32(3), {}),
        (np.ones(()), {"scalars": True}),
        (jnp.ones(()), {"scalars": True}),
        ([jnp.ones(()), 3], {"scalars": True, "numbers": True}),
        (np.ones(2), {"numpy": True, "others": True}),
        (jnp.ones(2), {"host": False, "others": True}),
        ([jnp.ones(2), np.ones(2)], {"host": False, "numpy": True, "others": True}),
        ([jnp.ones(2), np.ones(())], {"host": False, "scalars": True, "others": True}),
    ],
)
def test_what_an_expression_was(
    flow: Flow, tmp_path: pathlib.Path, value: Any, expected: dict[str, Any]
):
    assert flow.see(7, value) is value
    found = _written(flow, tmp_path, type(value).__name__)["expressions"]
    assert found == {"7": _plain(**expected)}


def test_an_array_is_known_again_in_a_tree_and_in_calls(flow: Flow, tmp_path: pathlib.Path):
    state, batch, number = jnp.ones(2), np.ones(2), 3
    new = jnp.zeros(2)
    flow.see(1, state)
    flow.see(2, {"state": state, "other": [batch]})
    flow.given(5, (state, {"x": batch}, number), {"key": batch}, (2,))
    flow.returned(5, (new, (state, [batch])))
    flow.see(3, new)
    flow.see(4, [new])
    found = _written(flow, tmp_path)

    assert found["slots"] == {
        "0": [[5, "in", 0], [5, "out", 1, 0]],
        "1": [[5, "in", 1], [5, "word", "key"], [5, "out", 1, 1]],
        "2": [[5, "out", 0]],
    }
    assert found["born"] == {"0": 1, "1": 2}
    assert found["static"] == [[5, 2, ["int"]]]
    assert found["forms"]["5"].count({"arguments": 3, "words": ["key"]}) == 1
    assert {"results": [[0], [1, 0], [1, 1]]} in found["forms"]["5"]
    assert found["again"] == []
    seen = found["expressions"]
    assert seen["1"] == _plain(arrays={"0": ""}, host=False)
    trees = {"0": "['state']", "1": "['other'][0]"}
    assert seen["2"] == _plain(arrays=trees, host=False, numpy=True)
    assert seen["3"] == _plain(arrays={"2": ""}, host=False, sites=[5])
    assert seen["4"] == _plain(arrays={"2": "[0]"}, host=False)


def test_what_gave_a_value_that_was_known_before(flow: Flow, tmp_path: pathlib.Path):
    """As in `a, b = step(a), step(b)`, each is of its own call."""
    one, other = jnp.ones(2), jnp.zeros(2)
    flow.returned(8, one)
    flow.returned(5, (other, one))
    flow.see(2, (one, other))
    flow.see(3, one)
    found = _written(flow, tmp_path)["expressions"]

    assert (found["2"]["sites"], found["3"]["sites"]) == ([5], [])
    flow.returned(8, one)
    flow.see(2, one)
    assert _written(flow, tmp_path)["expressions"]["2"]["sites"] == [5, 8]


def test_arrays_of_no_mapped_function_are_others(flow: Flow, tmp_path: pathlib.Path):
    mine, other = jnp.ones(2), jnp.zeros(2)
    flow.given(0, (mine,), {}, ())
    flow.see(1, [mine, other])
    flow.see(2, mine)
    found = _written(flow, tmp_path)

    assert [found["expressions"][n]["others"] for n in "12"] == [True, False]
    assert found["expressions"]["1"]["arrays"] == {"0": "[0]"}
    assert found["born"] == {}


def test_static_arguments_are_told_by_their_types(flow: Flow, tmp_path: pathlib.Path):
    state = jnp.ones(2)
    flow.given(5, (state, 1), {}, (1,))
    flow.given(5, (state, "text"), {}, (1,))
    flow.given(6, (state,), {}, (0,))
    found = _written(flow, tmp_path)

    assert found["static"] == [[5, 1, ["int", "str"]], [6, 0, [type(state).__name__]]]
    assert found["slots"] == {"0": [[5, "in", 0]]}
    assert found["forms"]["5"] == [{"arguments": 2, "words": []}]


def test_results_are_told_apart_through_tuples_alone(flow: Flow, tmp_path: pathlib.Path):
    flow.returned(1, ((1, [2, 3]), (), {"a": (4,)}))

    assert _written(flow, tmp_path)["forms"] == {"1": [{"results": [[0, 0], [0, 1], [1], [2]]}]}
    assert flows._parts(3) == [((), 3)]
    assert flows._parts((3,)) == [((0,), 3)]


def test_an_identity_that_another_array_has_now_is_no_longer_its_own(
    flow: Flow, tmp_path: pathlib.Path
):
    array = jnp.ones(2)
    flow.given(0, (array,), {}, ())
    identity = id(array)
    del array
    gc.collect()
    other = jnp.zeros(3)
    flow._live[id(other)] = flow._live[identity]  # as if it had its place
    flow.see(1, other)
    found = _written(flow, tmp_path)

    assert found["expressions"]["1"]["arrays"] == {}
    assert found["expressions"]["1"]["others"] is True


def test_nothing_is_kept_alive(flow: Flow):
    array = jnp.ones(2)
    flow.see(0, [array])
    flow.given(0, (array,), {}, ())
    flow.returned(0, array)
    alive = flow._live[id(array)][1]
    del array
    gc.collect()

    assert alive() is None


# --- what is not looked at


def test_an_expression_is_looked_at_so_often(flow: Flow, tmp_path: pathlib.Path):
    arrays = [jnp.full(2, n) for n in range(42)]
    for array in arrays:
        flow.see(1, array)
        flow.given(0, (array,), {}, ())
    for _ in range(1000):
        flow.see(2, [])
    flow.see(2, arrays)
    for _ in range(999):
        flow.see(3, [])
    flow.see(3, arrays[:2])
    found = _written(flow, tmp_path)["expressions"]

    assert (found["1"]["hits"], len(found["1"]["arrays"])) == (42, 40)
    assert (found["2"]["hits"], len(found["2"]["arrays"])) == (1001, 0)
    assert (found["3"]["hits"], len(found["3"]["arrays"])) == (1000, 2)


def test_what_is_traced_holds_nothing(flow: Flow, tmp_path: pathlib.Path):
    array = jnp.ones(2)
    said = []
    jax.make_jaxpr(lambda x: said.append(flows._arrays(flow.see(1, [x, array, 3]))))(array)

    assert said == [([], False, False)]

    assert _written(flow, tmp_path)["expressions"] == {"1": _plain()}


class _Odd:
    """A node of a tree whose flattening runs code of the user."""

    act: Any = None


jax.tree_util.register_pytree_node(
    _Odd, lambda odd: ((type(odd).act(), jnp.ones(2)), None), lambda _, children: _Odd()
)


def test_code_that_runs_while_we_look_is_not_looked_at(flow: Flow, tmp_path: pathlib.Path):
    _Odd.act = lambda: flow.see(2, [1])
    flow.see(1, _Odd())
    flow.see(3, [1])
    found = _written(flow, tmp_path)["expressions"]

    assert found["2"] == _plain(hits=found["2"]["hits"])
    assert found["1"]["host"] is False
    assert found["3"]["numbers"] is True


def test_what_cannot_be_flattened_holds_nothing(flow: Flow, tmp_path: pathlib.Path):
    _Odd.act = lambda: 1 / 0
    odd = _Odd()

    assert flow.see(1, odd) is odd
    flow.see(1, [1])
    assert _written(flow, tmp_path)["expressions"] == {"1": _plain(hits=2, numbers=True)}


def test_threads_do_not_hide_each_other(flow: Flow, tmp_path: pathlib.Path):
    def act() -> int:
        thread = threading.Thread(target=lambda: flow.see(2, [1]))
        thread.start()
        thread.join()
        return 0

    _Odd.act = act
    flow.see(1, _Odd())

    assert _written(flow, tmp_path)["expressions"]["2"]["numbers"] is True


def test_before_jax_is_imported_there_is_no_array(
    flow: Flow, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    value = [jnp.ones(2), 1]
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "jax")
        assert flow.see(1, value) is value
        assert "jax" not in sys.modules

    assert _written(flow, tmp_path)["expressions"] == {"1": _plain()}


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.5, True, 1j, "text", b"text", None, int, range(3), slice(2), property()),
        *(lambda: 0, len, sys, (each for each in ())),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_hold_no_array_is_not_looked_at(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, value: Any
):
    looked: list[Any] = []
    monkeypatch.setattr(flow, "_look", lambda *given: looked.append(given))

    assert flow.see(1, value) is value
    assert looked == []


# --- what is mapped more than once


def test_a_function_that_is_mapped_twice(flow: Flow, tmp_path: pathlib.Path):
    functions = [lambda x, n=n: x * n for n in range(9)]
    for function in functions[:8]:
        flow.mapped(1, function)
        flow.mapped(2, function)
    assert _written(flow, tmp_path)["again"] == []
    flow.mapped(2, functions[8])
    flow.mapped(3, functions[0])
    flow.mapped(3, functions[0])
    flow.mapped(0, functions[0])
    flow.mapped(0, functions[0])

    assert _written(flow, tmp_path)["again"] == [0, 2, 3]
