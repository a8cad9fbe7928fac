"""Arguments on other devices than the mesh are put on it, and other refusals stay as they are."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist

pytestmark = pytest.mark.rewriting

_X = np.arange(12.0, dtype=np.float32).reshape(4, 3)


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def _rewritten():
    mapped = jax.pmap(lambda x: x + lax.psum(x, "i"), "i")
    return jax_dist.rewrite(lambda x, scale=1.0: mapped(x) * scale, mesh=_mesh())


_SUM = _X + _X.sum(0)


def test_what_a_pmap_outside_made_is_put_on_the_mesh_and_cut_as_it_was():
    there = jax.pmap(lambda x: x * 1)(_X)
    assert len(there.sharding.device_set) == 4

    result = _rewritten()(there)

    np.testing.assert_allclose(result, _SUM)
    assert result.sharding.spec == P("data")
    assert len(result.sharding.device_set) == 8


def test_an_array_on_one_device_by_keyword():
    there = jax.device_put(np.float32(2), jax.devices()[5])

    np.testing.assert_allclose(_rewritten()(_X, scale=there), 2 * _SUM)


def test_an_array_over_an_axis_that_the_mesh_has_not():
    three = Mesh(np.array(jax.devices()[:3]), ("three",))
    there = jax.device_put(_X, NamedSharding(three, P(None, "three")))

    np.testing.assert_allclose(_rewritten()(there), _SUM)


def test_a_refusal_for_another_reason_is_passed_on():
    def fails(x):
        raise ValueError("by the user")

    with pytest.raises(ValueError, match="^by the user"):
        jax_dist.rewrite(fails, mesh=_mesh())(jax.device_put(_X, NamedSharding(_mesh(), P())))


def test_without_a_mesh_the_refusal_of_jax_is_passed_on():
    mapped = jax.pmap(lambda x: x + 1)
    there = jax.device_put(_X, jax.devices()[5])

    with pytest.raises(ValueError, match="incompatible devices"):
        jax_dist.rewrite(lambda x: mapped(x))(there)
