"""Whatever changes in the text of a program, a proof notices; but for what is said twice in it."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.verify import slices
from jax_dist.migrate.verify.equivalence import NotProvedError
from jax_dist.migrate.verify.recording import programs

pytestmark = pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program")

ROWS, WHOLE = PartitionSpec("i"), PartitionSpec()
COPIES, MERGED, AS_IS = "one of equal copies", "device axis merged", "as is"


def _text(function: Any, *shapes: tuple[int, ...]) -> dict[str, Any]:
    kinds = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return json.loads(json.dumps(programs.text(function, kinds)))


def _mapped(body: Any, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    mesh = Mesh(jax.devices(), ("i",))
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    return jax.jit(jax.shard_map(body, mesh=mesh, **specs), **options)


def _step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    slope = (jnp.sin(batch) * state).sum(0)
    return state - lax.pmean(slope, "i"), lax.psum(batch.sum(), "i")


def _slices() -> dict[str, Any]:
    mapped = jax.pmap(_step, axis_name="i", donate_argnums=0)
    return {
        "before": _text(lambda *args: mapped(*args), (8, 3), (8, 4, 3)),
        "after": _text(_mapped(_step, (WHOLE, ROWS), WHOLE, donate_argnums=0), (3,), (32, 3)),
        "arguments": [[0, COPIES], [1, MERGED]],
        "results": [COPIES, COPIES],
    }


def _turns(x: jax.Array) -> jax.Array:
    turn = lambda carry, row: (carry + lax.psum(row, "i"), carry * 2)
    return lax.scan(turn, x[0], x)[1] - lax.pmean(jnp.sin(x) * 2.5, "i")


def _same() -> dict[str, Any]:
    text = _text(_mapped(_turns, ROWS, ROWS), (8, 3))
    return {"before": text, "after": text}


def _ruled() -> dict[str, Any]:
    gathered = _mapped(lambda x: lax.all_gather(x, "i").sum(0), ROWS, ROWS)
    return {
        "before": _text(gathered, (8, 3)),
        "after": _text(_mapped(lambda x: lax.psum(x, "i"), ROWS, ROWS), (8, 3)),
    }


def _replicated() -> dict[str, Any]:
    lies = lambda spec: NamedSharding(Mesh(jax.devices(), ("i",)), spec)
    return {
        "before": _text(lambda x: jax.device_put(jnp.stack([x] * 8), lies(ROWS)), (3,)),
        "after": _text(lambda x: jax.device_put(x, lies(WHOLE)), (3,)),
        "arguments": [[0, AS_IS]],
        "results": [COPIES],
    }


def _one_row() -> dict[str, Any]:
    return {
        "before": _text(lambda x: jnp.sin(x[2]), (8, 3)),
        "after": _text(jnp.sin, (3,)),
        "arguments": [[0, COPIES]],
        "results": [AS_IS],
    }


_RULES = {
    _slices: ("R5", "R6", "R7"),
    _same: (),
    _ruled: ("R1",),
    _replicated: ("R9",),
    _one_row: ("R5", "R8"),
}

# What may change alone: it is unspecified, or the text says it once more.
_OF_CALLS = {
    *("in_shardings", "fewer of in_shardings", "out_shardings", "fewer of out_shardings"),
    *("fewer of in_layouts", "fewer of out_layouts"),
    *("weak", "fewer of weak"),  # of programs inside; those of the whole one count
}
_OF_MOVES = {"dimensions", "fewer of dimensions", "shape", "fewer of shape", "type of a result"}
_SAID_ELSEWHERE = {
    _slices: {
        *(*_OF_CALLS, *_OF_MOVES, "in", "check_vma"),
        *("spec", "mesh", "set", "fewer of set"),  # names of the one axis; its size is its devices'
    },
    _same: {
        *(*_OF_CALLS, "fewer of donated_invars", "dimensions", "fewer of dimensions"),
        "a result",  # nobody uses it
    },
    _ruled: {
        *(*_OF_CALLS, "fewer of donated_invars"),
        *("axis_size", "type of a result", "out_sharding"),
    },
    _replicated: {
        *("in", "type of a result", "fewer operands", "mesh", "fewer of mesh"),
        *("srcs", "fewer of srcs", "copy_semantics", "fewer of copy_semantics"),
    },
    _one_row: {"in", "fewer of start_indices", *_OF_MOVES} - {"shape", "fewer of shape"},
}


def _changes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each place where one thing can change, and what is there then."""
    if isinstance(value, dict | list):
        for step, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _changes(each, (*path, step))
        if value and isinstance(value, list):
            yield path, value[:-1]
    elif isinstance(value, bool):
        yield path, not value
    else:
        yield path, value + 1 if isinstance(value, int | float) else f"{value} "


def _told(path: tuple[Any, ...], value: Any) -> str:
    name = [step for step in path if isinstance(step, str)][-1]
    if name == "eqns":
        place = path[len(path) - path[::-1].index("eqns") + 1 :]
        parts = {0: "primitive", 2: "an operand", 3: "a result"}
        name = parts.get(place[0], "an equation") if place else "an equation"
        if place[0:1] == (3,) and place[2:] == (1,):
            name = "type of a result"
        return "fewer operands" if place == (2,) and isinstance(value, list) else name
    return f"fewer of {name}" if isinstance(value, list) else name


def _altered(text: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(text)
    holder = found
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    return found


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("program", _RULES, ids=lambda each: each.__name__)
def test_a_change_of_one_text_is_noticed(program: Any, side: str):
    signature = {"sizes": {}, **program()}
    assert slices.proof(signature) == _RULES[program]

    unnoticed = set()
    for path, value in _changes(signature[side]):
        altered = {**signature, side: _altered(signature[side], path, value)}
        try:
            slices.proof(altered)
        except (NotProvedError, LookupError, ValueError, TypeError, AttributeError):
            continue  # or it cannot be read, and the certificate says so
        unnoticed.add(_told(path, value))
    assert unnoticed <= _SAID_ELSEWHERE[program]
