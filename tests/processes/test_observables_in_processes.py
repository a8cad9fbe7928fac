"""In several processes, beside jax.pmap: a table in docs/reference/mapping.md.

The first process passes 0 to 3, the other 4 to 7.
"""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

import jax_dist
from jax_dist.testing import run_processes

pytestmark = pytest.mark.mapping

_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "mapping.md"
_HEAD = "| first number in each process | `jax.pmap` | `jax_dist.pmap` |"


def seen() -> dict[str, dict[str, Any]]:
    """Runs in both processes: by library and title."""
    return {"jax": _seen(jax.pmap), "jax_dist": _seen(jax_dist.pmap)}


def _seen(pmap: Any) -> dict[str, Any]:
    x = np.arange(4.0, dtype=np.float32) + 4 * jax.process_index()
    total = pmap(lambda x: lax.psum(x, "i"), "i")
    square = pmap(lambda x: lax.psum(x, "i") ** 2, "i")
    calls = {
        "a sum": lambda: total(x),
        "a sum under `jit`": lambda: jax.jit(total)(x),
        "a sum under `scan`": lambda: lax.scan(lambda c, _: (total(c), None), x, length=1)[0],
        "`grad` of the square of a sum": lambda: jax.grad(lambda x: square(x).sum())(x),
        "a pmap inside that names both axes": lambda: pmap(
            pmap(lambda y: lax.psum(y, ("i", "j")), "j"), "i"
        )(x.reshape(2, 2)),
    }
    return {title: _first(call) for title, call in calls.items()}


def _first(call: Any) -> float | str:
    try:
        return float(np.ravel(call().addressable_shards[0].data)[0])
    except Exception as error:  # noqa: BLE001  # whatever it is, is compared
        return type(error).__name__


def test_the_table_of_the_docs_is_what_is_seen():
    outcomes = run_processes(seen, processes=2, cpu_devices=4, timeout=240)
    assert [outcome.error for outcome in outcomes] == [None, None]
    first, second = (outcome.value for outcome in outcomes)
    table = [_HEAD, "|---|---|---|"]
    for title in first["jax"]:
        cells = [f"{first[name][title]}, {second[name][title]}" for name in ("jax", "jax_dist")]
        table.append(f"| {title} | {' | '.join(cells)} |")

    assert "\n".join(["", *table, ""]) in _PAGE.read_text()
