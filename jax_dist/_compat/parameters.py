"""The parameters of JAX's primitives that are read here: which primitive has them, and their types.

JAX documents none of them. A test makes an equation of each primitive and looks for its parameters,
on every version that is supported; another one looks for parameters that are read and not listed.
"""

from collections.abc import Callable
from typing import Any, TypedDict

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

Groups = tuple[tuple[int, ...], ...] | None


class Jit(TypedDict):
    """`jit`, named `pjit` before 0.8."""

    jaxpr: Any  # closed
    name: str
    in_shardings: tuple
    out_shardings: tuple
    donated_invars: tuple[bool, ...]
    keep_unused: bool
    inline: bool
    compiler_options_kvs: tuple


class ShardMap(TypedDict):
    jaxpr: Any  # open
    mesh: Mesh | AbstractMesh
    in_specs: tuple[PartitionSpec, ...]
    out_specs: tuple[PartitionSpec, ...]
    check_vma: bool


class AxisReduce(TypedDict):
    """`psum`, `psum_invariant`, `pmax`, `pmin`."""

    axes: tuple
    axis_index_groups: Groups


class AllGather(TypedDict):
    axis_name: Any
    axis_size: int
    axis_index_groups: Groups
    all_gather_dimension: int
    tiled: bool


class ReduceScatter(TypedDict):
    axis_name: Any
    axis_size: int
    axis_index_groups: Groups
    scatter_dimension: int
    tiled: bool


class AllToAll(TypedDict):
    axis_name: Any
    axis_index_groups: Groups
    split_axis: int
    concat_axis: int
    tiled: bool


class Ppermute(TypedDict):
    axis_name: Any
    perm: tuple[tuple[int, int], ...]


class AxisIndex(TypedDict):
    axis_name: Any


class Scan(TypedDict):
    """Which inputs are carried: see `scan_layout`."""

    jaxpr: Any  # closed
    length: int
    reverse: bool
    unroll: int


class While(TypedDict):
    body_jaxpr: Any
    cond_jaxpr: Any
    body_nconsts: int
    cond_nconsts: int


class Cond(TypedDict):
    branches: tuple


class CustomRule(TypedDict):
    """`custom_jvp_call`, `custom_vjp_call`."""

    call_jaxpr: Any


class ShardingConstraint(TypedDict):
    sharding: Any


class Reduce(TypedDict):
    """`reduce_sum`, `reduce_max` and the like."""

    axes: tuple[int, ...]


class DotGeneral(TypedDict):
    dimension_numbers: tuple
    precision: Any


class BroadcastInDim(TypedDict):
    shape: tuple[int, ...]
    broadcast_dimensions: tuple[int, ...]


class Reshape(TypedDict):
    new_sizes: tuple[int, ...]
    dimensions: tuple[int, ...] | None


class Transpose(TypedDict):
    permutation: tuple[int, ...]


class Squeeze(TypedDict):
    dimensions: tuple[int, ...]


class Slice(TypedDict):
    start_indices: tuple[int, ...]
    limit_indices: tuple[int, ...]
    strides: tuple[int, ...] | None


class DynamicSlice(TypedDict):
    slice_sizes: tuple[int, ...]


class Pad(TypedDict):
    padding_config: tuple[tuple[int, int, int], ...]


class Concatenate(TypedDict):
    dimension: int


class Split(TypedDict):
    axis: int


class Cumulative(TypedDict):
    """`cumsum`, `cummax` and the like."""

    axis: int
    reverse: bool


class Reverse(TypedDict):
    dimensions: tuple[int, ...]


class Sort(TypedDict):
    dimension: int


class CustomPartitioning(TypedDict):
    call: Any  # closed
    partition: Callable
    in_tree: Any
    out_tree: Any
    static_args: list
    decode_shardings: bool


PARAMETERS: dict[str, type] = {
    "jit": Jit,
    "shard_map": ShardMap,
    "psum": AxisReduce,
    "pmax": AxisReduce,
    "pmin": AxisReduce,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_to_all": AllToAll,
    "ppermute": Ppermute,
    "axis_index": AxisIndex,
    "scan": Scan,
    "while": While,
    "cond": Cond,
    "custom_jvp_call": CustomRule,
    "custom_vjp_call": CustomRule,
    "sharding_constraint": ShardingConstraint,
    "reduce_sum": Reduce,
    "reduce_max": Reduce,
    "dot_general": DotGeneral,
    "broadcast_in_dim": BroadcastInDim,
    "reshape": Reshape,
    "transpose": Transpose,
    "squeeze": Squeeze,
    "slice": Slice,
    "dynamic_slice": DynamicSlice,
    "pad": Pad,
    "concatenate": Concatenate,
    "split": Split,
    "cumsum": Cumulative,
    "rev": Reverse,
    "sort": Sort,
    "custom_partitioning": CustomPartitioning,
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
