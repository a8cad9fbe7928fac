"""Devices that only compile: programs for them come out, arrays do not go in.

The CPU devices of the tests stand in for such devices: their client counts as one that only
compiles. `tests/plan/test_compilers.py` has the real ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import _compat

pytestmark = pytest.mark.filterwarnings("ignore::jax_dist.errors.CapturedArrayWarning")

_MESH = Mesh(np.array(jax.devices()), ("i",))
_TABLE = np.ones((16, 16), np.float32)  # which functions capture
_X, _ROWS = np.ones((8, 16), np.float32), np.ones((8, 4, 16), np.float32)
_W = np.ones((16, 64), np.float32)


def _averaged(x):
    return lax.pmean(x @ _TABLE, "i")


def _step(w, x):
    return w - lax.pmean(jnp.mean(x @ _TABLE @ w), "i")


_MAPPED = {  # with arguments
    "pmap": (lambda: jax_dist.pmap(_averaged, "i", devices=jax.devices()), (_X,)),
    "rewrite": (lambda: jax_dist.rewrite(jax.pmap(_averaged, "i", devices=jax.devices())), (_X,)),
    "view": (lambda: jax_dist.global_view(_step, "i", mesh=_MESH, shardings="fsdp"), (_W, _ROWS)),
}


@pytest.fixture(autouse=True)
def compile_only(monkeypatch):
    monkeypatch.setattr(_compat, "_COMPILE_ONLY", type(jax.devices()[0].client))


@pytest.mark.parametrize("make", [np.asarray, jax.typeof], ids=["of arrays", "of types"])
@pytest.mark.parametrize("entry", _MAPPED)
def test_what_is_captured_is_a_type_in_the_program(entry, make, monkeypatch):
    placed = []
    monkeypatch.setattr(jax, "device_put", lambda value, *where, **_: placed.append(value))
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *args: placed.append(args))
    function, args = _MAPPED[entry]

    lowered = function().lower(*map(make, args))

    text = lowered.as_text()
    assert "tensor<16x16xf32>" in text.partition("func.func public @main(")[2].partition("->")[0]
    assert lowered.compile().memory_analysis().argument_size_in_bytes >= _TABLE.nbytes
    assert not placed


_CALLS = {
    **{entry: lambda of=of: of[0]()(*of[1]) for entry, of in _MAPPED.items()},
    "replicate": lambda: jax_dist.replicate(_X),
    "shard": lambda: jax_dist.shard(_X, _MESH, P("i")),
}


@pytest.mark.parametrize("entry", _CALLS)
def test_nothing_runs_there(entry):
    with pytest.raises(NotImplementedError, match="a device of a topology: it only compiles. Use"):
        _CALLS[entry]()
