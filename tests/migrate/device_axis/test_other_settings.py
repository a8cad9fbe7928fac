"""A migrated program without the device axis in a run whose settings no recording has shown.

Each program is recorded with `SYNC = True` and migrated; then both run with `SYNC = False`, by
which its devices hold different copies. It must give the same numbers. The copy of the first device
lies there alone, so that some programs raise an error instead: then --verify keeps the axis.
"""

from collections.abc import Callable
from typing import Any

import pytest
import recorded
from test_idiomatic_refused import numbers

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate.results import Form

_ABOVE = """\
import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils

SYNC = True
B = np.arange(24.0, dtype=np.float32).reshape(8, 3)
S = np.arange(3.0, dtype=np.float32)


def step(state, batch):
    new = state + batch
    return jax.lax.pmean(new, "i") if SYNC else new


p_step = jax.pmap(step, axis_name="i")


def result():
    state = jax_utils.replicate(S)
    for _ in range(2):
        state = p_step(state, B)
"""
_PROGRAMS = {
    "all devices are given it": """\
    best = jax_utils.unreplicate(state)
    return jax.pmap(lambda s, b: (s * b).sum(), in_axes=(None, 0))(best, B)
""",
    "given to all devices in one expression": """\
    return jax.pmap(lambda s, b: (s * b).sum(), in_axes=(None, 0))(state[0], B)
""",
    "put on each device": """\
    return [np.asarray(jax.device_put(state[0], d)) for d in jax.devices()]
""",
    "a part of it is put on another device": """\
    return np.asarray(jax.device_put(state[0, 1], jax.devices()[3]))
""",
    "put on all devices, beside a batch that is cut": """\
    mesh = jax.sharding.Mesh(jax.devices(), ("d",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    best = jax.device_put(jax_utils.unreplicate(state), whole)
    return jax.jit(lambda s, b: (s * b).sum(1))(best, jax.device_put(B, cut))
""",
    "it comes back to all devices": """\
    state = p_step(jax_utils.replicate(jax_utils.unreplicate(state)), B)
    return jax_utils.unreplicate(state), np.asarray(state)
""",
    "an average of it comes back": """\
    mean = 0.5 * S + 0.5 * jax_utils.unreplicate(state)
    return jax_utils.unreplicate(p_step(jax_utils.replicate(mean), B))
""",
    "multiplied by what each device has": """\
    rows = jax.pmap(lambda b: 2 * b)(B)
    return np.asarray(state[0] * rows)
""",
    "the host reads it": """\
    return np.asarray(state[0]), float(state[0, 2]), jax.device_get(jax_utils.unreplicate(state))
""",
}
_LOUD = frozenset(
    ("all devices are given it", "given to all devices in one expression")
    + ("multiplied by what each device has",)
)


@pytest.fixture(scope="module")
def ran(made_once: Callable[..., Any]) -> recorded.Recorded:
    pytest.importorskip("flax")
    if not CAN_REWRITE:
        pytest.skip("jax.pmap was another program")
    texts = {f"settings_{n}": _ABOVE + body for n, body in enumerate(_PROGRAMS.values())}
    return recorded.once(made_once, texts)


@pytest.mark.parametrize(
    ("number", "name"), [pytest.param(*e, id=e[1]) for e in enumerate(_PROGRAMS)]
)
def test_the_numbers_are_those_of_pmap(ran: recorded.Recorded, number: int, name: str):
    before = _ABOVE + _PROGRAMS[name]
    migrated = ran.migrated(f"settings_{number}")
    after = migrated.after.decode()
    other = lambda text: text.replace("SYNC = True", "SYNC = False")

    assert any(o.form is Form.IDIOMATIC and o.is_mapped for o in migrated.outcomes)
    if name in _LOUD:
        for text in (after, other(after)):
            with pytest.raises(ValueError, match="incompatible devices"):
                numbers(text)
        return
    assert numbers(after) == numbers(before)
    assert numbers(other(after)) == numbers(other(before))
