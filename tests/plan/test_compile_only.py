"""Devices that only compile: programs for them come out, arrays do not go in.

The CPU devices of the tests stand in for such devices: their client counts as one that only
compiles. `test_on_tpus.py` has the real ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import _compat

pytestmark = [
    pytest.mark.rewriting,
    pytest.mark.filterwarnings("ignore::jax_dist.errors.CapturedArrayWarning"),
]

N = 8
_TABLE = np.ones((16, 16), np.float32)
_X = np.ones((N, 16), np.float32)
_TYPE = jax.ShapeDtypeStruct(_X.shape, _X.dtype)


def _averaged(x):
    return jax.lax.pmean(x @ _TABLE, "i")


def _step(w, x):
    gradient = jax.grad(lambda w: jnp.mean((x @ _TABLE @ w) ** 2))(w)
    return w - 0.1 * jax.lax.pmean(gradient, "i")


@pytest.fixture(autouse=True)
def compile_only(monkeypatch):
    monkeypatch.setattr(_compat, "_COMPILE_ONLY", type(jax.devices()[0].client))


def _mesh():
    return Mesh(np.array(jax.devices()), ("i",))


def _mapped():
    return jax_dist.pmap(_averaged, "i", devices=jax.devices())


def _view():
    return jax_dist.global_view(_step, "i", mesh=_mesh(), shardings="fsdp")


_LOWERED = {
    "pmap": lambda: _mapped().lower(_TYPE),
    "rewrite": lambda: jax_dist.rewrite(jax.jit(jax.pmap(_averaged, "i"))).lower(_TYPE),
    "global view": lambda: _view().lower(
        jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((N, 4, 16), jnp.float32)
    ),
    "global view, of arrays": lambda: _view().lower(_TABLE, np.ones((N, 4, 16), np.float32)),
}


@pytest.mark.parametrize("entry", _LOWERED)
def test_what_is_captured_is_a_type_in_the_program(entry, monkeypatch):
    placed = []
    monkeypatch.setattr(jax, "device_put", lambda value, *where, **_: placed.append(value))
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *args: placed.append(args))

    lowered = _LOWERED[entry]()

    text = lowered.as_text()
    assert "tensor<16x16xf32>" in text.partition("func.func public @main(")[2].partition("->")[0]
    assert lowered.compile().memory_analysis().argument_size_in_bytes >= _TABLE.nbytes
    assert not placed


_RUNS = {
    "pmap": lambda: _mapped()(_X),
    "rewrite": lambda: jax_dist.rewrite(jax.pmap(_averaged, "i", devices=jax.devices()))(_X),
    "global view": lambda: _view()(_TABLE, np.ones((N, 4, 16), np.float32)),
    "replicate": lambda: jax_dist.replicate(_X),
    "shard": lambda: jax_dist.shard(_X, _mesh(), P("i")),
}  # fmt: skip


@pytest.mark.parametrize("entry", _RUNS)
def test_nothing_runs_there(entry):
    with pytest.raises(NotImplementedError, match="only compile") as raised:
        _RUNS[entry]()

    assert "a device of a topology: it only compiles" in str(raised.value)
    assert "Use .lower(...).compile()" in str(raised.value)
