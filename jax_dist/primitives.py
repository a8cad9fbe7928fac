"""What is known of the primitives of JAX: one record for each.

All that reads programs asks here: of jaxprs, and of their texts. Imports no jax. Of a primitive
without a record nothing is known: its results may differ between devices, and it needs its operands
whole. `tests/test_primitives.py` compares the records with the installed JAX: with the primitives
that it lists, and with what its own rules of batching and typing say.
"""

import dataclasses
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal[
    "plain",  # equal operands give equal results on every device, as far as its bodies do
    "call",  # of one body, which takes the operands and gives the results
    "branch",  # takes one of its bodies, by its first operand
    "loop",
    "region",  # a body on each device of a mesh
    "collective",
    "callback",  # to Python, which may give each device something else
    "opaque",  # what it computes stands in none of its parameters, or in a state
]
_Call: TypeAlias = Literal["inline", "checkpoint", "custom rule"]
# fmt: off
_Over: TypeAlias = Literal[
    "sum", "max", "min", "gather", "broadcast", "scatter", "exchange", "permute", "index", "unknown"
]
# fmt: on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """What is known of one primitive."""

    name: str
    kind: Kind
    elementwise: bool = False
    """One result, each element of which depends on the same element of each operand."""
    exact: bool = False
    """Any order of the elements gives the same bits, and nothing is rounded.

    What moves, compares and chooses. The sign of a zero aside, which a maximum may lose.
    """
    moves: bool = False
    """Gives elements another place, and computes nothing."""
    identity: bool = False
    """Gives its operands as they are, in another type or place."""
    constrains: bool = False
    """Says where a value lies, by a mesh."""
    linear: bool = False
    """What it makes of a gradient is one: a multiple, a sum, or a part."""
    scales: bool = False
    """Multiplies or divides its first operand."""
    adds: bool = False
    """Of two operands, the sum or the difference."""
    sums: bool = False
    """Adds elements up, so that the last bits depend on their order."""
    reduces: bool = False
    """Makes one element of those along its parameter `axes`; of one element, that element."""
    extreme: bool = False
    """Takes the largest or smallest element."""
    ordered: bool = False
    """Looks at several elements along a dimension, or at some by their number."""
    draws: bool = False
    """Makes random numbers; equal keys make equal ones."""
    tied: bool = False
    """Cannot be bound again under another mesh than that of its trace."""
    call: _Call | None = None
    """Of a call: one that means nothing by being one, or what it is for."""
    over: _Over | None = None
    """Of a collective: what it does over devices."""
    axes: str = ""
    """Of a collective: the parameter that names the mesh axes, as one name or several."""
    functions: tuple[str, ...] = ()
    """Of a collective: the functions of `jax.lax` that bind it."""
    since: str = ""
    """The first version of jax among 0.7.2, 0.10.2 and 0.12.0 that has it; "": all."""
    until: str = ""
    """The last one of them that has it; "": all."""

    @property
    def makes_alike(self) -> bool:
        """Whether all devices along its axes get the same, if it goes over no groups of them."""
        return self.over in ("sum", "max", "min", "gather", "broadcast")


def record(name: str) -> Primitive:
    """The record of a primitive, which has to be one of JAX's own.

    >>> record("sin").elementwise, record("of_a_user").kind
    (True, 'opaque')
    """
    return RECORDS.get(name) or Primitive(name=name, kind="opaque")


def functions_of(*over: _Over) -> tuple[str, ...]:
    """The collectives of `jax.lax` that do one of these things over devices.

    >>> functions_of("sum", "max")
    ('jax.lax.psum', 'jax.lax.pmean', 'jax.lax.pmax')
    """
    records = [record for record in RECORDS.values() if record.over in over]
    return tuple(f"jax.lax.{name}" for record in records for name in record.functions)


RECORDS: Final[dict[str, Primitive]] = {}


def _record(names: str, kind: Kind, **facts: object) -> None:
    for name in names.split():
        if name in RECORDS:
            raise AssertionError(f"two records of {name}")
        RECORDS[name] = Primitive(name=name, kind=kind, **facts)  # pyright: ignore[reportArgumentType]


# --- element by element

_record(
    """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clz complex cos cosh digamma
    erf erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac integer_pow lgamma log log1p
    logistic nextafter polygamma population_count pow regularized_incomplete_beta rem rsqrt
    shift_left shift_right_arithmetic shift_right_logical sin sinh sqrt square tan tanh zeta
    """,
    "plain",
    elementwise=True,
)
_record("add add_any sub", "plain", elementwise=True, linear=True, adds=True)
_record("div mul", "plain", elementwise=True, linear=True, scales=True)
_record(
    """
    abs and ceil conj eq eq_to floor ge gt imag is_finite le le_to lt lt_to ne not or real
    reduce_precision round sign stop_gradient xor
    """,
    "plain",
    elementwise=True,
    exact=True,
)
_record(
    "bitcast_convert_type",  # element by element where both types have the same size
    "plain",
    elementwise=True,
    exact=True,
)
_record(
    "clamp convert_element_type copy max min neg select_n",
    "plain",
    elementwise=True,
    exact=True,
    linear=True,
)
_record("mulhi", "plain", elementwise=True, since="0.10")
_record("log2 one_minus_square polynomial", "plain", elementwise=True, since="0.12")

# --- elements in other places

_record("broadcast_in_dim reshape squeeze transpose", "plain", moves=True, exact=True, linear=True)
_record(
    "concatenate dynamic_slice dynamic_update_slice pad rev slice split",
    "plain",
    moves=True,
    exact=True,
    ordered=True,
)
_record("iota", "plain", moves=True, exact=True)
_record("stack tile", "plain", moves=True, exact=True, since="0.10")
_record("unstack", "plain", moves=True, exact=True, ordered=True, since="0.10")
_record("gather scatter sort top_k", "plain", exact=True, ordered=True)
_record("pvary", "plain", moves=True, exact=True, identity=True, linear=True)
_record(
    "reshard sharding_constraint",
    "plain",
    exact=True,
    identity=True,
    constrains=True,
    linear=True,
)
_record("device_put optimization_barrier", "plain", exact=True)
_record("name", "plain", elementwise=True, exact=True, linear=True)

# --- several elements become one, or each depends on several

_record(
    "reduce_and reduce_max reduce_min reduce_or", "plain", exact=True, reduces=True, extreme=True
)
_record("argmax argmin", "plain", exact=True, ordered=True)
_record("cummax cummin", "plain", exact=True, extreme=True, ordered=True)
_record("reduce_window_max reduce_window_min", "plain", exact=True, ordered=True)
_record("reduce_xor", "plain", exact=True, reduces=True)
_record("reduce_sum", "plain", reduces=True, sums=True)
_record("reduce_prod", "plain", reduces=True)
_record("dot_general ragged_dot_general", "plain", sums=True)
_record(
    "conv_general_dilated cumsum reduce_window_sum scatter-add scatter-sub",
    "plain",
    sums=True,
    ordered=True,
)
_record("scaled_dot", "plain", sums=True, since="0.10")
_record("reduce", "plain")
_record(
    """
    approx_top_k cumlogsumexp cumprod fft reduce_window scatter-max scatter-min scatter-mul
    select_and_gather_add select_and_scatter select_and_scatter_add
    """,
    "plain",
    ordered=True,
)
_record(
    """
    cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu
    lu_pivots_to_permutation qr schur svd symmetric_product triangular_solve tridiagonal
    tridiagonal_solve
    """,
    "plain",
)
_record("ormqr", "plain", since="0.10")
_record("custom_linear_solve", "plain", tied=True)

# --- random numbers

_record("random_bits random_gamma rng_bit_generator", "plain", draws=True)
_record("random_clone random_fold_in random_seed random_split", "plain")
_record("random_unwrap random_wrap threefry2x32", "plain")
_record("philox2x32 philox4x32 threefry4x32", "plain", since="0.10")
_record("rng_uniform", "opaque", draws=True)  # has no key: each device has a state of its own

# --- functions of operands and bodies; which platform it is, all devices of a program agree on

_record("composite custom_vmap_call eval_jaxpr linear_call platform_index", "plain")

# --- calls, branches, loops

_record("jit", "call", call="inline")
_record("call closed_call", "call", call="inline", until="0.10")
_record("remat2", "call", call="checkpoint")
_record("custom_jvp_call custom_vjp_call", "call", call="custom rule")
_record("cond", "branch")
_record("scan while", "loop")
_record("shard_map", "region")

# --- collectives

_record("psum", "collective", over="sum", axes="axes", functions=("psum", "pmean"))
_record("psum_invariant", "collective", over="sum", axes="axes")
_record("pmax", "collective", over="max", axes="axes", functions=("pmax",))
_record("pmin", "collective", over="min", axes="axes", functions=("pmin",))
_record("all_gather", "collective", over="gather", axes="axis_name", functions=("all_gather",))
_record("all_gather_invariant", "collective", over="gather", axes="axis_name")
_record("pbroadcast", "collective", over="broadcast", axes="axis_name", functions=("pbroadcast",))
_record(
    "reduce_scatter", "collective", over="scatter", axes="axis_name", functions=("psum_scatter",)
)
_record(
    "all_to_all",
    "collective",
    over="exchange",
    axes="axis_name",
    functions=("all_to_all", "pswapaxes"),
)
_record(
    "ragged_all_to_all",
    "collective",
    over="exchange",
    axes="axis_name",
    functions=("ragged_all_to_all",),
)
_record(
    "ppermute", "collective", over="permute", axes="axis_name", functions=("ppermute", "pshuffle")
)
_record("precv psend", "collective", over="permute", axes="axis_name")
_record("axis_index", "collective", over="index", axes="axis_name", functions=("axis_index",))
# Of values that are typed as sums still to come.
_record("unreduced_psum", "collective", over="unknown", axes="axes", since="0.10")
_record(
    "all_gather_reduced unreduced_reduce_scatter",
    "collective",
    over="unknown",
    axes="axis_name",
    since="0.10",
)

# --- what no parameter shows

_record("debug_callback debug_print io_callback pure_callback", "callback")
_record("custom_partitioning ffi_call", "opaque")
_record("pallas_call", "opaque", tied=True)
_record("after_all create_token custom_lin dce_sink", "opaque")
_record("empty2 get swap", "opaque")
_record("stage", "opaque", since="0.10")
_record("call_hi_primitive", "opaque", since="0.10")  # unless it can be expanded
_record("xla_pmap", "opaque", until="0.7")
