"""What is written down of the arguments and results of a call: their values, and all else."""

import dataclasses
import hashlib
import pathlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.migrate.verify.calls import compare
from jax_dist.migrate.verify.evidence import Array, CallRecord, SiteRecord
from jax_dist.migrate.verify.recording import arrays

_ONES = np.ones(3, np.float32)


class _Liar:
    """Equal to all, and of one `repr`."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "Liar"


class _Closed(_Liar):
    def __reduce__(self):
        return _Closed, (0,)


class _Number(float):
    unit: str


def _number(unit: str) -> _Number:
    made = _Number(1)
    made.unit = unit
    return made


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Static:
    x: float
    scale: object = dataclasses.field(metadata={"static": True})


_OTHER_NAN = np.uint64(0x7FF8000000000001).view(np.float64)
_MESH = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
_TURNED = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("i",))


def _call(value: object, given: object, archive: pathlib.Path) -> CallRecord:
    """As a record has it."""
    leaves = arrays.leaves(value, every=True)
    np.savez(archive, **{str(i): each for i, (_, each) in enumerate(leaves)})
    returned = tuple(
        Array(**{**about, "shape": tuple(about["shape"])}, archive=archive, key=str(i))
        for i, (about, _) in enumerate(leaves)
    )
    return CallRecord((), returned, None, structure=arrays.structure(value, given))


def _kinds(old: object, new: object, folder: pathlib.Path, given: object = ()) -> list[str]:
    """In what two values differ, as two runs see them."""
    ones, others = (
        SiteRecord(0, "a.py", 1, (), "f", is_mapped=True, calls=[call], count=1)
        for call in (_call(old, given, folder / "0.npz"), _call(new, given, folder / "1.npz"))
    )
    found = compare(ones, others)
    if not found.problems and not found.equal:
        return ["unknown"]
    return sorted(kind for _, kind in found.differing)


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        (jnp.asarray(_ONES), jnp.asarray(_ONES), []),
        (jnp.asarray(_ONES), _ONES, ["placement"]),
        (_ONES, jnp.asarray(_ONES), ["placement"]),
        (jnp.asarray(_ONES), jnp.asarray(_ONES + 1), ["value"]),
        (jnp.asarray(1.0), jnp.asarray(np.float32(1)), ["type"]),  # one is weak
        (_ONES, _ONES + 1, ["value"]),
        (_ONES, _ONES.astype(np.float64), ["type"]),
        (abs, abs, ["unknown"]),
        (abs, 1.0, ["type"]),
        (0.0, -0.0, ["value"]),
        (1, True, ["type"]),
        (1.0, 1, ["type"]),
        (complex(0, 0.0), complex(0, -0.0), ["value"]),
        (np.float64("nan"), _OTHER_NAN, ["value"]),
        (np.zeros(2), -np.zeros(2), ["value"]),
        (float("nan"), float("nan"), []),
        ({"a": (1, 2.0)}, {"a": (1, 2.0)}, []),
        ({"a": (1, 0.0)}, {"a": (1, -0.0)}, ["value"]),
        ({"a": (1, 2.0)}, {"a": [1, 2.0]}, ["structure"]),
        ((1, None), (1, ()), ["structure"]),
        ("text", "text", []),
        ("text", "tex1", ["value"]),
        ("opaque", "opaque", []),
        (b"text", b"text", []),
        (b"text", b"tex1", ["value"]),
        (frozenset([1, 2]), frozenset([2, 1]), []),
        (frozenset([1]), frozenset([True]), ["shape"]),
        (_Liar(1), _Liar(1), ["unknown"]),
        (_Closed(1), _Closed(1), ["unknown"]),
        (_number("m"), _number("s"), ["unknown"]),
        (np.ma.array([1.0], mask=[True]), np.ma.array([1.0], mask=[False]), ["unknown"]),
        (np.array([_Liar(1)], object), np.array([_Liar(1)], object), ["unknown"]),
        (threading.Lock(), threading.Lock(), ["unknown"]),
        (jax.P("a"), jax.P("a"), []),
        (jax.P("a"), jax.P("b"), ["value"]),
        (_MESH, _MESH, []),
        (_MESH, _TURNED, ["value"]),  # of one `repr`
        (_Static(1.0, 0.0), _Static(1.0, 0.0), []),
        (_Static(1.0, 0.0), _Static(1.0, -0.0), ["structure"]),
        (_Static(1.0, _Liar(1)), _Static(1.0, _Liar(1)), ["unknown"]),
    ],
)
def test_what_differs_between_two_values(old, new, kinds, tmp_path: pathlib.Path):
    assert _kinds(old, new, tmp_path) == kinds


def test_what_a_result_holds_of_the_arguments_is_known_by_its_place(tmp_path: pathlib.Path):
    """Such as the functions of an optimizer, which nobody can compare."""
    one, other = _Liar(1), _Liar(2)
    given = (_Static(0.0, one.__repr__), _Static(0.0, other))

    same, again = _Static(1.0, one.__repr__), _Static(1.0, one.__repr__)
    assert _kinds(same, again, tmp_path, given) == []
    assert _kinds(same, _Static(1.0, other), tmp_path, given) == ["structure"]
    assert _kinds(same, _Static(1.0, other.__repr__), tmp_path, given) == ["unknown"]


def test_a_dataclass_in_a_tree_is_told_by_what_it_holds():
    @dataclasses.dataclass(frozen=True)
    class Scale:
        by: int = 1

    register = jax.tree_util.register_pytree_node
    register(Scale, lambda scale: ((), scale), lambda scale, _: scale)
    one, same, other = (arrays.structure((each, 1.0), ()) for each in (Scale(), Scale(), Scale(2)))

    assert one is not None
    assert one == same != other


# --- arrays by themselves


def _about(value: object, *, every: bool = False) -> list[dict]:
    return [about for about, _ in arrays.leaves(value, every=every)]


def test_what_is_said_of_arrays_and_numbers():
    plain = {"devices": 0, "parts": 0, "weak": False}
    found = _about({"a": [np.ones((2, 3), np.int8), 1.5], "b": np.float32(2), "c": "text"})

    assert found == [
        {"path": "['a'][0]", "dtype": "int8", **plain, "shape": [2, 3]},
        {"path": "['a'][1]", "dtype": "float", **plain, "shape": []},
        {"path": "['b']", "dtype": "float32", **plain, "shape": []},
    ]
    assert [about["path"] for about in _about((1, "text"), every=True)] == ["[0]", "[1]"]
    kinds = [about["dtype"] for about in _about((True, 1, 1.0, 1j, np.int8(1)))]
    assert kinds == ["bool", "int", "float", "complex", "int8"]


def test_what_is_no_number_is_told_by_its_text():
    ((text, values), (lock, nothing)) = arrays.leaves(["\u00e9", threading.Lock()], every=True)

    assert (text["dtype"], text["shape"]) == ("builtins.str", [4])
    assert values.tobytes() == "'\u00e9'".encode()
    assert (text["devices"], text["parts"]) == (0, 0)
    assert lock["dtype"] == "unknown _thread.lock"
    assert (lock["shape"], nothing.size) == ([0], 0)


def _placed(spec: P, mesh: jax.sharding.Mesh = _MESH) -> dict:
    (about,) = _about(jax.device_put(np.ones((8, 2)), NamedSharding(mesh, spec)))
    return about


def test_where_an_array_of_jax_lies():
    rows, whole, one = _placed(P("i")), _placed(P()), _about(jnp.ones(2))[0]

    assert (rows["devices"], rows["parts"]) == (8, 8)
    assert (whole["devices"], whole["parts"]) == (8, 1)
    assert (one["devices"], one["parts"]) == (1, 1)
    assert rows["placed"] == _placed(P("i", None))["placed"]
    others = (whole["placed"], _placed(P("i"), _TURNED)["placed"], _placed(P(), _MESH)["placed"])
    assert rows["placed"] not in others
    assert len(rows["placed"]) == 16
    assert whole["placed"] == _placed(P(), _TURNED)["placed"]
    assert _about(jnp.asarray(1.0))[0]["weak"] is True
    assert rows["weak"] is False


def test_keys_and_small_types_are_written_in_types_of_numpy():
    key = jax.random.key(3)
    ((about, data),) = arrays.leaves(key, every=False)
    assert (about["dtype"], about["shape"], data.tolist()) == ("key<fry>", [2], [0, 3])
    for dtype, written in ((jnp.bfloat16, np.float32), (jnp.int4, np.int8), (np.int64, np.int64)):
        ((about, values),) = arrays.leaves(np.array([1, 2], dtype), every=False)
        assert (about["dtype"], values.dtype) == (str(np.dtype(dtype)), written)
        assert values.tolist() == [1, 2]


def test_values_are_copies():
    mine = np.ones(3)
    ((_, values),) = arrays.leaves(mine, every=False)
    mine[:] = 2

    assert values.tolist() == [1, 1, 1]


def test_of_several_processes_each_writes_what_it_has(monkeypatch: pytest.MonkeyPatch):
    value = jax.device_put(np.arange(16.0).reshape(8, 2), NamedSharding(_MESH, P("i")))
    monkeypatch.setattr(type(value), "is_fully_addressable", property(lambda _: False))
    ((about, values),) = arrays.leaves(value, every=False)

    assert about["shape"] == [8, 1, 2]
    assert values.reshape(8, 2).tolist() == np.arange(16.0).reshape(8, 2).tolist()


def test_values_as_a_trace_takes_them():
    assert arrays.as_traced(np.array([0.1])).dtype == np.float32
    assert arrays.as_traced(np.array([1], np.int64)).dtype == np.int32
    same = np.ones(2, np.float32)
    assert arrays.as_traced(same) is same


def test_digests():
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = arrays.digests(rows)

    assert found["digest"] == hashlib.sha256(rows.tobytes()).hexdigest()
    assert found["rows"] == [hashlib.sha256(row.tobytes()).hexdigest() for row in rows]
    assert found["mean"] == 2.5
    assert arrays.digests(np.asfortranarray(rows)) == found
    assert arrays.digests(np.array(1j))["mean"] is None
    assert arrays.digests(np.array(3.0))["rows"] == []
    assert [len(arrays.digests(np.zeros(size))["rows"]) for size in (64, 65)] == [64, 0]
    large = np.full(2**16, 60000, np.float16)
    assert arrays.digests(large)["mean"] == 60000


# --- the tree around them


def test_a_structure_is_told_by_its_types_and_what_they_hold():
    tell = lambda value: arrays.structure(value, ())

    one = tell({"a": (1, 2.0)})
    assert one is not None
    assert one.startswith("builtins.dict ")
    assert len(one) == len("builtins.dict ") + 16
    assert tell({"a": (3, 4.0)}) == one
    for other in ({"b": (1, 2.0)}, {"a": [1, 2.0]}, {"a": (1, 2.0, 3)}, {"a": ((1,), 2.0)}):
        assert tell(other) != one
    assert str(tell(1.0)).startswith("leaf ")
    assert str(tell(None)).startswith("builtins.NoneType ")
    assert tell(_Static(1.0, (1, [2], {"a": 3}))) != tell(_Static(1.0, (1, [2], {"a": 4})))
    assert tell(_Static(1.0, int)) != tell(_Static(1.0, float))
    assert tell(_Static(1.0, int)) == tell(_Static(2.0, int))
    assert tell(_Static(1.0, (1, _Liar(1)))) is None
    assert tell((_Static(1.0, 1), _Static(1.0, _Liar(1)))) is None
    assert tell((_Static(1.0, _Liar(1)), _Static(1.0, 1))) is None


def test_what_a_result_holds_of_the_arguments_has_its_place_there():
    one, other = _Liar(1), _Liar(2)
    held = lambda value, *given: arrays.structure(_Static(1.0, value), given)

    first = held(one, _Static(0.0, (one, {"a": [other]})))
    second = held(other, _Static(0.0, (one, {"a": [other]})))
    assert first is not None
    assert second is not None
    assert first != second
    assert first == held(other, _Static(0.0, (other, {"a": [one]})))
    assert held(one, _Static(0.0, other)) is None
    method = one.__repr__
    assert held(one.__repr__, _Static(0.0, method)) is not None
    assert held(other.__repr__, _Static(0.0, method)) is None
    assert held(one.__hash__, _Static(0.0, method)) is None
    assert held(one, _Static(0.0, method)) is None
    closed = _Closed(1)
    assert held(closed.__reduce__, _Static(0.0, closed.__repr__)) is None


def test_a_dataclass_with_something_that_nobody_can_tell():
    @dataclasses.dataclass(frozen=True)
    class Held:
        what: object = None

    @dataclasses.dataclass(frozen=True, slots=True)
    class Slotted:
        what: object = None

    tell = lambda value, *given: arrays.structure(_Static(1.0, value), given)
    assert tell(Held(1)) == tell(Held(1)) != tell(Held(2))
    assert tell(Held(_Liar(1))) is None
    assert tell(Slotted(1)) is None
    assert tell(Held) != tell(Slotted)
    liar = _Liar(1)
    assert tell(Held(liar), _Static(0.0, liar)) is not None
