"""Edits between mapped calls are found, traced, and proved by what they do to copies of arrays."""

import ast
import json
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_dist.migrate.results import FileMigration, PlaceResult
from jax_dist.migrate.vendored.beside import replicated
from jax_dist.migrate.verify import edits, program_text, slices
from jax_dist.migrate.verify.equivalence import NotProvedError
from jax_dist.migrate.verify.ledger import Ledger, Rung
from jax_dist.migrate.verify.recording import programs
from jax_dist.migrate.verify.trial import verified

COPIES, MERGED, AS_IS = "one of equal copies", "device axis merged", "as is"

# --- the proof


def text(function: Callable, *shapes: tuple[int, ...], dtype: Any = np.float32) -> dict[str, Any]:
    return programs.text(function, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])


def stacked(x: jax.Array, devices: Any = None) -> jax.Array:
    """As flax's `replicate`."""
    mesh = Mesh(np.array(devices or jax.devices()), ("d",))
    return jax.device_put(jnp.stack([x] * 8), NamedSharding(mesh, PartitionSpec("d")))


def proof(before: Any, after: Any, arguments: Any, results: Any) -> tuple[str, ...]:
    signature = {"before": before, "after": after, "sizes": {}}
    signature |= {"arguments": arguments, "results": results}
    return slices.proof(json.loads(json.dumps(signature)))


@pytest.mark.parametrize(
    "first",
    [
        lambda x: x[0],
        lambda x: x[-1],
        lambda x: jnp.squeeze(x[3:4], 0),
        jax.jit(lambda x: x[0]),
        lambda x: jnp.copy(x[2]),
    ],
)
def test_one_of_equal_rows_is_the_array(first: Callable):
    one, other = text(first, (8, 4, 3)), text(lambda x: x, (4, 3))

    assert proof(one, other, [[0, COPIES]], [AS_IS]) == ("R5", "R8")


def test_a_copy_of_what_is_donated_later_is_the_array_too():
    one = text(lambda x, y: (x[0], y), (8, 3), (2,))
    other = text(lambda x, y: (jnp.copy(x), y), (3,), (2,))

    assert proof(one, other, [[0, COPIES], [1, AS_IS]], [AS_IS, AS_IS]) == ("R5", "R8")


def test_copies_on_all_devices_are_the_array_there():
    one, other = text(stacked, (4, 3)), text(replicated, (4, 3))
    by_hand = text(lambda x: jnp.concatenate([x[None]] * 8), (4, 3))

    assert proof(one, other, [[0, AS_IS]], [COPIES]) == ("R9",)
    assert proof(by_hand, text(lambda x: x, (4, 3)), [[0, AS_IS]], [COPIES]) == ("R9",)


def test_rows_of_all_devices_are_one_batch():
    one, other = text(lambda x: x.reshape(8, 4, 3), (32, 3)), text(lambda x: x, (32, 3))

    assert proof(one, other, [[0, AS_IS]], [MERGED]) == ("R7",)


def test_what_is_computed_on_the_way_must_be_the_same():
    one = text(lambda x: jnp.sin(x[0]) * 2, (8, 3))
    same = text(lambda x: jnp.sin(x) * 2, (3,))
    other = text(lambda x: jnp.sin(x) * 3, (3,))

    assert proof(one, same, [[0, COPIES]], [AS_IS]) == ("R5", "R8")
    with pytest.raises(NotProvedError, match="before, .* after"):
        proof(one, other, [[0, COPIES]], [AS_IS])


@pytest.mark.parametrize(
    ("one", "other", "arguments", "results", "said"),
    [
        (lambda x: x.sum(0), lambda x: x, [COPIES], [AS_IS], "computes with copies"),
        (lambda x: x[:1], lambda x: x, [COPIES], [AS_IS], "which is not 'as is'"),
        (lambda x: x[0], lambda x: x[0], [AS_IS], [COPIES], "which is not 'one of equal copies'"),
        (lambda x: x, lambda x: x, [COPIES], [AS_IS], "which is not 'as is'"),
        (lambda x: x[0] + 1, lambda x: x, [COPIES], [AS_IS], "before, .* after"),
    ],
)
def test_what_is_no_copy_is_not_taken_for_one(
    one: Callable, other: Callable, arguments: list[str], results: list[str], said: str
):
    shapes = ((8, 3), (3,)) if arguments == [COPIES] else ((8, 3), (8, 3))
    relation = [[number, how] for number, how in enumerate(arguments)]

    with pytest.raises(NotProvedError, match=said):
        proof(text(one, shapes[0]), text(other, shapes[1]), relation, results)


def test_each_result_is_that_of_its_own_argument():
    """Two copies must not be taken for each other."""
    one = text(lambda x, y: (x[0], y[0]), (8, 3), (8, 3))
    other = text(lambda x, y: (y, x), (3,), (3,))

    with pytest.raises(NotProvedError):
        proof(one, other, [[0, COPIES], [1, COPIES]], [AS_IS, AS_IS])


def test_rows_that_are_stacked_are_not_always_copies():
    other = text(replicated, (3,))
    for wrong in (
        lambda x: jnp.stack([x] * 7 + [x * 2]),
        lambda x: jnp.stack([x, x * 2] * 4),
    ):
        with pytest.raises(NotProvedError):
            proof(text(wrong, (3,)), other, [[0, AS_IS]], [COPIES])
    # [3] eight times in one row: [24], and not eight rows.
    flat = text(lambda x: jnp.concatenate([x] * 8).reshape(8, 3), (3,))
    with pytest.raises(NotProvedError, match="is not 'one of equal copies'"):
        proof(flat, other, [[0, AS_IS]], [COPIES])


def test_the_devices_and_their_order_count():
    backwards = text(lambda x: replicated(x, jax.devices()[::-1]), (3,))
    some = text(lambda x: replicated(x, jax.devices()[:4]), (3,))
    nowhere = text(lambda x: x, (3,))

    for other in (backwards, some, nowhere):
        with pytest.raises(NotProvedError, match="lies elsewhere"):
            proof(text(stacked, (3,)), other, [[0, AS_IS]], [COPIES])


def test_a_number_that_numpy_stacks_is_that_number_on_all_devices():
    def put(number: float) -> Any:
        mesh = Mesh(jax.devices(), ("d",))
        sharding = NamedSharding(mesh, PartitionSpec("d"))
        return lambda x: (jax.device_put(np.stack([number] * 8), sharding), x)

    new = text(lambda x: (replicated(0.1), x), (3,))
    assert proof(text(put(0.1), (3,)), new, [[0, AS_IS]], [COPIES, AS_IS]) == ("R9",)
    with pytest.raises(NotProvedError):
        proof(text(put(0.2), (3,)), new, [[0, AS_IS]], [COPIES, AS_IS])


def test_types_and_weak_types_count():
    one = text(lambda x: x[0], (8, 3))
    with pytest.raises(NotProvedError, match="which is not"):
        proof(one, text(lambda x: x, (3,), dtype=np.int32), [[0, COPIES]], [AS_IS])
    weak = {**text(lambda x: x, (3,)), "weak": [True]}
    with pytest.raises(NotProvedError, match="weak"):
        proof(one, weak, [[0, COPIES]], [AS_IS])


def test_programs_that_map_are_no_host_edits():
    mapped = jax.shard_map(
        lambda x: x * 2,
        mesh=Mesh(jax.devices(), ("d",)),
        in_specs=PartitionSpec("d"),
        out_specs=PartitionSpec("d"),
    )

    copies = text(jax.jit(lambda x: x[0]), (8, 3)), text(lambda x: x, (3,))
    assert proof(*copies, [[0, COPIES]], [AS_IS]) == ("R5", "R8")
    twice = text(jax.jit(lambda x: mapped(mapped(x))), (8, 3))
    with pytest.raises(NotProvedError, match="it has several shard_maps"):
        proof(twice, text(lambda x: x, (3,)), [[0, COPIES]], [COPIES])


# --- where they are


def test_the_lines_of_a_program_stay_where_they_are():
    text = "x = 3\ny = abs(  # of\n    x\n)\nz = y\n"
    tree = ast.parse(text)
    [(old, _)] = edits.host_edits(tree, ast.parse("x = 3\ny = x\nz = y\n"))

    marked = program_text.Marked(text, (), 0, {5: old})
    assert [marked.line_before(n) for n in range(2, 7)] == [1, 2, 3, 4, 5]
    names: dict[str, Any] = {"__jd__": _Host}
    exec(marked.text.partition("\n")[2], names)
    assert names["z"] == 3
    assert "__jd__.host(5, lambda __jd_value__: abs(__jd_value__)," in marked.text


class _Host:
    @staticmethod
    def host(number: int, function: Callable, value: Any) -> Any:
        return function(value)


# --- in a program

_BEFORE = """\
import jax, numpy as np
from flax import jax_utils
step = jax.pmap(lambda w, x: w - jax.lax.pmean(x.sum(), "i"), axis_name="i")
w = jax_utils.replicate(np.ones(3, np.float32))
for n in range(3):
    w = step(w, np.full((8, 2), n, np.float32))
print(np.asarray(jax_utils.unreplicate(w)))
"""
_AFTER = """\
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(jax.devices(), ("i",))
step = jax.jit(jax.shard_map(lambda w, x: w - jax.lax.pmean(x.sum(), "i"), mesh=mesh,
    in_specs=(P(), P("i")), out_specs=P(), check_vma=False))
put = lambda x: jax.device_put(x, NamedSharding(mesh, P()))
w = put(np.ones(3, np.float32))
for n in range(3):
    w = step(w, np.full((8, 2), n, np.float32).reshape(16))
print(np.asarray(w))
"""
_PLACES = ((4, "jax_utils.replicate(np.ones(3, np.float32))"), (7, "jax_utils.unreplicate(w)"))


_WRONG = (  # at a place
    ("w = put(np.ones(3, np.float32))", "w = put(np.ones(3, np.float32) * 2)", 0),
    ("print(np.asarray(w))", "print(np.asarray(w * 1.5))", 1),
    ("print(np.asarray(w))", "print(np.asarray(w[:2]))", 1),
)


def _migrated(path: pathlib.Path, after: str) -> FileMigration:
    path.write_text(_BEFORE)
    places = tuple(PlaceResult(str(path), n, None, "JXD101", "done", what) for n, what in _PLACES)
    return FileMigration(str(path), _BEFORE.encode(), after.encode(), places)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module")
def ledger(folder: pathlib.Path) -> Ledger:
    """Of a right migration, and of the wrong ones; one command runs them all."""
    pytest.importorskip("flax")
    afters = [_AFTER, *(_AFTER.replace(old, new) for old, new, _ in _WRONG)]
    files = [_migrated(folder / f"train_{n}.py", after) for n, after in enumerate(afters)]
    command = folder / "every.py"
    command.write_text(
        f"import runpy\nfor file in {[file.path for file in files]}:\n    runpy.run_path(file)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return verified([sys.executable, str(command)], files)


def _judged(ledger: Ledger, number: int) -> list[tuple[Rung, tuple[str, ...]]]:
    """Each host edit of one of the programs."""
    own = [each for each in ledger.entries if each.path.endswith(f"train_{number}.py")]
    return [(each.rung, each.rules) for each in own if (each.line, each.what) in _PLACES]


@pytest.mark.thorough
def test_host_edits_are_proved_by_their_own_values(ledger: Ledger):
    assert _judged(ledger, 0) == [
        (Rung.EQUAL_BY_RULES, ("R9",)),
        (Rung.EQUAL_BY_RULES, ("R5", "R8")),
    ]


@pytest.mark.parametrize("number", range(len(_WRONG)), ids=[new for _, new, _ in _WRONG])
def test_a_wrong_host_edit_is_not(ledger: Ledger, number: int):
    old, _, place = _WRONG[number]
    rung, rules = _judged(ledger, 1 + number)[place]

    assert _AFTER.count(old) == 1
    assert rung <= Rung.RAN
    assert not rules


def test_two_runs_that_differ_are_followed_by_one_more(ledger: Ledger, folder: pathlib.Path):
    assert ledger.runs is not None
    assert ledger.runs.differs
    assert ledger.notes[0] == "without the migration, the command computes the same twice"
    assert {path.read_text() for path in folder.glob("train_*.py")} == {_BEFORE}


def test_marks_that_begin_together_are_nested_as_what_they_are_around():
    old, new = "y = x.a[0] + f(x)\n", "y = first(x.a) + f(stacked(x))\n"
    program = program_text.ProgramText(old)
    forms = [one for one, _ in edits.host_edits(program.tree, ast.parse(new))]
    places = [(1, "x.a[0]", ""), (1, "x", "")]
    marked = program_text.Marked(old, places, 0, dict(enumerate(forms)))

    told: list[int] = []
    recorder = types.SimpleNamespace(
        place=lambda number, value: told.append(number) or value,
        host=lambda number, form, value: form(value),
    )
    x = types.SimpleNamespace(a=[5, 7])
    known: dict[str, Any] = {"x": x, "f": lambda own: own.a[1], "__jd__": recorder}
    exec(marked.text.partition("\n")[2], known)
    assert known["y"] == 12
    assert sorted(told) == [0, 1, 2]
