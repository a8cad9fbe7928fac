"""The parameters of JAX's primitives that are read here, and fields of equations that were renamed.

Which primitive has a parameter, and its type: JAX documents none of them. A test makes an equation
of each primitive and looks for its parameters, on every version that is supported; another one
looks for parameters that are read and not listed.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

_Numbers = tuple[int, ...]
_Groups = tuple[_Numbers, ...] | None
_AXIS_REDUCE = {"axes": tuple, "axis_index_groups": _Groups}
_CUSTOM_RULE = {"call_jaxpr": Any}
_REDUCE = {"axes": _Numbers}

PARAMETERS: dict[str, dict[str, Any]] = {
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
        "in_specs": tuple[PartitionSpec, ...],
        "out_specs": tuple[PartitionSpec, ...],
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
OPTIONAL = frozenset(
    {
        "ft_in",  # of scan in 0.12.0.1
        "ft_out",
        "manual_axes",  # of shard_map in 0.7.2
        "newly_manual_axes",  # the same in 0.10.2 and 0.12.0.1
        "num_carry",  # of scan in 0.7.2 and 0.10.2
        "num_consts",
        "source",  # of pbroadcast
    }
)


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes along which a value may differ between devices, as far as its type says.

    Under `check_vma=False` the type says nothing, and this is empty. There is no default: "differs
    nowhere" would let a wrong sum through (it did: `aval.vma` was gone, and the result 42 times too
    large). `manual_axis_type`: seen in 0.10.2 and 0.12.0.1.
    """
    return aval.manual_axis_type.varying


def is_unreduced(aval: Any) -> bool:
    """Whether the type says that a sum over devices is still to come, or has to be undone."""
    return bool(aval.manual_axis_type.unreduced or aval.manual_axis_type.reduced)


def to_varying(value: jax.Array, axes: Sequence[Any]) -> jax.Array:
    """The value, typed as if it could differ along `axes`. `pcast` is public since 0.9."""
    return jax.lax.pcast(value, tuple(axes), to="varying")


def newly_manual_axes(eqn: JaxprEqn) -> frozenset[Any]:
    """The axes that a shard_map makes manual: `manual_axes` in 0.7.2, which knows no others."""
    params = eqn.params
    return frozenset(params.get("newly_manual_axes", params.get("manual_axes", ())))


@dataclasses.dataclass(frozen=True, slots=True)
class ScanLayout:
    """Which inputs and outputs of a scan (and of its body, in the same order) are which."""

    constants: tuple[int, ...]
    carries_in: tuple[int, ...]
    carries_out: tuple[int, ...]


def scan_layout(params: Mapping[str, Any], inputs: int, outputs: int) -> ScanLayout:
    """Counts in 0.10.2 (`num_consts`, `num_carry`), trees in 0.12.0.1 (`ft_in`, `ft_out`)."""
    if "ft_in" in params:
        constants, carries, _ = params["ft_in"].update(range(inputs)).unpack()
        carries_out, _ = params["ft_out"].update(range(outputs)).unpack()
        return ScanLayout(tuple(constants), tuple(carries), tuple(carries_out))
    first, count = params["num_consts"], params["num_carry"]
    places = tuple(range(first, first + count))
    return ScanLayout(tuple(range(first)), places, tuple(range(count)))


def call_of(jaxpr: ClosedJaxpr) -> JaxprEqn:
    """An equation that calls a jaxpr, as a jit does that was traced to it.

    `jax.jit` would trace again. The parameters are those of an equation that JAX has just made, in
    the same context, spread over as many operands; their names: seen in 0.10.2 and 0.12.0.1.
    """
    model = jax.make_jaxpr(jax.jit(jax.lax.neg))(1.0).eqns[0]
    ins, outs = len(jaxpr.in_avals), len(jaxpr.out_avals)
    counts = dict.fromkeys(("in_shardings", "in_layouts", "donated_invars"), ins)
    counts |= dict.fromkeys(("out_shardings", "out_layouts"), outs)
    spread = {name: (model.params[name][0],) * count for name, count in counts.items()}
    params = {**model.params, **spread, "jaxpr": jaxpr, "name": "as_it_is"}
    return model.replace(params=params, outvars=jaxpr.jaxpr.outvars, effects=jaxpr.effects)


def has_side_effects(eqn: JaxprEqn) -> bool:
    """Whether it does more than to compute: prints, calls back, writes to a reference.

    A collective has an effect, too, which only names its mesh axis: `NamedAxisEffect`, of
    `jax._src.core`; seen in 0.10.2 and 0.12.0.1. Known by name: another one counts as an effect.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)
