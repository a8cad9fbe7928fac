"""Every parameter of a primitive that is read stands in the table, and this jax has it."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist import _compat
from jax_dist.passes.interpreter import equations

pytestmark = [pytest.mark.mapping, pytest.mark.runtime]

_PACKAGE = pathlib.Path(jax_dist.__file__).parent
_READ = re.compile(r"params(?:\.get\(|\[)\"(\w+)\"")
_X = jnp.ones((4, 8))
_Numbers = tuple[int, ...]
_Groups = tuple[_Numbers, ...] | None
_AXIS_REDUCE = {"axes": tuple, "axis_index_groups": _Groups}
_CUSTOM_RULE = {"call_jaxpr": Any}
_REDUCE = {"axes": _Numbers}

_PARAMETERS: dict[str, dict[str, Any]] = {
    "jit": {  # named `pjit` before 0.8
        "jaxpr": ClosedJaxpr,
        "name": str,
        "in_shardings": tuple,
        "out_shardings": tuple,
        "donated_invars": tuple[bool, ...],
        "keep_unused": bool,
        "inline": bool,
        "compiler_options_kvs": tuple,
    },
    "shard_map": {
        "jaxpr": Jaxpr,
        "mesh": Mesh | AbstractMesh,
        "in_specs": tuple[P, ...],
        "out_specs": tuple[P, ...],
        "check_vma": bool,
    },
    "psum": _AXIS_REDUCE,  # and `psum_invariant`
    "pmax": _AXIS_REDUCE,
    "pmin": _AXIS_REDUCE,
    "all_gather": {
        "axis_name": Any,
        "axis_size": int,
        "axis_index_groups": _Groups,
        "all_gather_dimension": int,
        "tiled": bool,
    },
    "reduce_scatter": {
        "axis_name": Any,
        "axis_size": int,
        "axis_index_groups": _Groups,
        "scatter_dimension": int,
        "tiled": bool,
    },
    "all_to_all": {
        "axis_name": Any,
        "axis_index_groups": _Groups,
        "split_axis": int,
        "concat_axis": int,
        "tiled": bool,
    },
    "ppermute": {"axis_name": Any, "perm": tuple[tuple[int, int], ...]},
    "axis_index": {"axis_name": Any},
    # Which inputs of a scan are carried: see `scan_layout`.
    "scan": {"jaxpr": ClosedJaxpr, "length": int, "reverse": bool, "unroll": int},
    "while": {"body_jaxpr": Any, "cond_jaxpr": Any, "body_nconsts": int, "cond_nconsts": int},
    "cond": {"branches": tuple},
    "custom_jvp_call": _CUSTOM_RULE,
    "custom_vjp_call": _CUSTOM_RULE,
    "sharding_constraint": {"sharding": Any},
    "reduce_sum": _REDUCE,
    "reduce_max": _REDUCE,
    "dot_general": {"dimension_numbers": tuple, "precision": Any},
    "broadcast_in_dim": {"shape": _Numbers, "broadcast_dimensions": _Numbers},
    "reshape": {"new_sizes": _Numbers, "dimensions": _Numbers | None},
    "transpose": {"permutation": _Numbers},
    "squeeze": {"dimensions": _Numbers},
    "slice": {"start_indices": _Numbers, "limit_indices": _Numbers, "strides": _Numbers | None},
    "dynamic_slice": {"slice_sizes": _Numbers},
    "pad": {"padding_config": tuple[tuple[int, int, int], ...]},
    "concatenate": {"dimension": int},
    "split": {"axis": int},
    "cumsum": {"axis": int, "reverse": bool},
    "rev": {"dimensions": _Numbers},
    "sort": {"dimension": int},
    "reduce_window_max": {"padding": tuple[tuple[int, int], ...]},
    "unstack": {"axis": int},
    "custom_partitioning": {
        "call": ClosedJaxpr,
        "partition": Callable,
        "in_tree": Any,
        "out_tree": Any,
        "static_args": list,
        "decode_shardings": bool,
    },
}

# Read where they are there, and named otherwise, or absent, in some versions.
_OPTIONAL = frozenset(
    {
        "_prim",  # of call_hi_primitive in 0.12.0.1
        "ft_in",  # of scan in 0.12.0.1
        "ft_out",
        "manual_axes",  # of shard_map in 0.7.2
        "newly_manual_axes",  # the same in 0.10.2 and 0.12.0.1
        "num_carry",  # of scan in 0.7.2 and 0.10.2
        "num_consts",
        "source",  # of pbroadcast
    }
)


def _over_devices(body: Callable) -> Callable:
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
    return jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)


def _partitioned(x: jax.Array) -> jax.Array:
    op = custom_partitioning(lambda x: x)
    op.def_partition(
        partition=lambda *_: None,
        infer_sharding_from_operands=lambda *_: None,
        sharding_rule="i j -> i j",
    )
    return op(x)


@jax.custom_vjp
def _with_vjp(x: jax.Array) -> jax.Array:
    return x


_with_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))

_MADE = {  # a function whose jaxpr has an equation of each primitive
    "jit": jax.jit(jnp.sin),
    "shard_map": _over_devices(jnp.sin),
    "psum": _over_devices(lambda x: lax.psum(x, "i")),
    "pmax": _over_devices(lambda x: lax.pmax(x, "i")),
    "pmin": _over_devices(lambda x: lax.pmin(x, "i")),
    "all_gather": _over_devices(lambda x: lax.all_gather(x, "i")),
    "reduce_scatter": _over_devices(
        lambda x: lax.psum_scatter(x, "i", scatter_dimension=1, tiled=True)
    ),
    "all_to_all": _over_devices(lambda x: lax.all_to_all(x, "i", 1, 1, tiled=True)),
    "ppermute": _over_devices(lambda x: lax.ppermute(x, "i", [(0, 1)])),
    "axis_index": _over_devices(lambda x: x + lax.axis_index("i")),
    "scan": lambda x: lax.scan(lambda c, _: (c + 1, None), x, None, 3)[0],
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x),
    "cond": lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: -x),
    "custom_jvp_call": jax.nn.relu,
    "custom_vjp_call": _with_vjp,
    "sharding_constraint": lambda x: lax.with_sharding_constraint(
        x, NamedSharding(Mesh(np.array(jax.devices()[:4]), ("i",)), P("i"))
    ),
    "reduce_sum": lambda x: lax.reduce_sum(x, (0,)),
    "reduce_max": lambda x: lax.reduce_max(x, (0,)),
    "dot_general": lambda x: x @ x.T,
    "broadcast_in_dim": lambda x: lax.broadcast(x, (2,)),
    "reshape": lambda x: lax.reshape(x, (8, 4)),
    "transpose": lambda x: lax.transpose(x, (1, 0)),
    "squeeze": lambda x: lax.squeeze(x[None], (0,)),
    "slice": lambda x: lax.slice(x, (0, 0), (2, 2)),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, 0), (2, 2)),
    "pad": lambda x: lax.pad(x, 0.0, [(1, 0, 0), (0, 0, 0)]),
    "concatenate": lambda x: lax.concatenate([x, x], 0),
    "split": lambda x: lax.split(x, (2, 2)),
    "cumsum": lambda x: lax.cumsum(x),
    "rev": lambda x: lax.rev(x, (0,)),
    "sort": lambda x: lax.sort(x),
    "reduce_window_max": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "VALID"),
    "unstack": lambda x: jnp.unstack(x),
    "custom_partitioning": _partitioned,
}


def _equation(primitive: str) -> Any:
    names = {
        "jit": ("jit", "pjit"),
        "custom_vjp_call": ("custom_vjp_call", "custom_vjp_call_jaxpr"),
    }
    wanted = names.get(primitive, (primitive,))
    found = equations(jax.make_jaxpr(_MADE[primitive])(_X))
    return next(eqn for eqn in found if eqn.primitive.name in wanted)


@pytest.mark.parametrize("primitive", _PARAMETERS)
@pytest.mark.skipif(not _compat.CAN_REWRITE, reason="jaxprs of 0.7.2 are walked, not rewritten")
def test_this_jax_has_the_parameters(primitive: str):
    assert set(_PARAMETERS[primitive]) <= set(_equation(primitive).params)


def test_every_parameter_that_is_read_is_in_the_table():
    listed = {name for kind in _PARAMETERS.values() for name in kind}
    read = {
        name
        for floor in ("mapping", "passes", "rewriting", "_compat")
        for file in (_PACKAGE / floor).glob("*.py")
        for name in _READ.findall(file.read_text())
    }

    assert read - listed - _OPTIONAL == set()
    elsewhere = {"donated_invars", "in_shardings", "out_shardings"}
    assert (listed | _OPTIONAL) - read - elsewhere == set()
