"""What is known of the primitives of JAX: one record for each.

All that reads programs asks here: of jaxprs, and of their texts. Imports no jax. Of a primitive
without a record nothing is known: its results may differ between devices, and it needs its operands
whole. `tests/test_primitives.py` compares the records with the installed JAX: with the primitives
that it lists, and with what its own rules of batching and typing say.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

Kind: TypeAlias = Literal[
    "plain",  # equal operands give equal results on every device, as far as its bodies do
    "call",  # of one body, which takes the operands and gives the results
    "branch",  # takes one of its bodies, by its first operand
    "loop",
    "shard_map",
    "collective",
    "callback",  # to Python, which may give each device something else
    "opaque",  # what it computes depends on something else than its operands and parameters
]
_Call: TypeAlias = Literal["inline", "checkpoint", "custom_rule"]
# fmt: off
_Collective: TypeAlias = Literal[
    "sum", "max", "min", "gather", "broadcast", "scatter", "exchange", "permute", "index", "unknown"
]
# fmt: on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Primitive:
    """Facts about one primitive."""

    name: str
    kind: Kind
    # One result, each element of which depends on the same element of each operand.
    elementwise: bool = False
    # Any order of the elements gives the same bits, and nothing is rounded: what moves, compares
    # and chooses. The sign of a zero aside, which a maximum may lose.
    exact: bool = False
    moves: bool = False  # gives elements another place, and computes nothing
    identity: bool = False  # gives its operands as they are, in another type or place
    sums: bool = False  # adds elements up, so that the last bits depend on their order
    reduces: bool = False  # makes one element of those along its parameter `axes`
    ordered: bool = False  # looks at several elements along a dimension, or at some by number
    tied: bool = False  # cannot be bound again under another mesh than that of its trace
    unsplit: bool = False  # XLA cannot split it over devices, or makes something else of it
    # Of a call: one that its body may replace; a checkpoint; one with a derivative of its own.
    call: _Call | None = None
    collective: _Collective | None = None  # of a collective: what it does over devices
    axes_param: str = ""  # of a collective: the parameter that names the mesh axes

    @property
    def makes_replicated(self) -> bool:
        """True if all devices along its axes get the same, if it goes over no groups of them."""
        return self.collective in ("sum", "max", "min", "gather", "broadcast")


def record(name: str) -> Primitive:
    """Return the record of a primitive, which has to be one of JAX's own.

    >>> record("sin").elementwise, record("of_a_user").kind
    (True, 'opaque')
    """
    return RECORDS.get(name) or Primitive(name=name, kind="opaque")


def functions_of(*collectives: _Collective) -> tuple[str, ...]:
    """Return the collectives of `jax.lax` that do one of these things over devices.

    >>> functions_of("sum", "max")
    ('jax.lax.psum', 'jax.lax.pmax', 'jax.lax.pmean')
    """
    names = [name for name, p in LAX_COLLECTIVES.items() if RECORDS[p].collective in collectives]
    return tuple(f"jax.lax.{name}" for name in names)


# The collectives of `jax.lax`, and the primitives that they bind.
LAX_COLLECTIVES = {
    **{name: name for name in ("psum", "pmax", "pmin", "all_gather", "pbroadcast", "all_to_all")},
    **{name: name for name in ("ragged_all_to_all", "ppermute", "axis_index")},
    **{"pmean": "psum", "psum_scatter": "reduce_scatter"},
    **{"pswapaxes": "all_to_all", "pshuffle": "ppermute"},
}

# Facts, and the names that they hold for.
TABLE = """
# element by element
plain elementwise: acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clz
plain elementwise: complex cos cosh digamma erf erf_inv erfc exp exp2 expm1 igamma igamma_grad_a
plain elementwise: igammac integer_pow lgamma log log1p logistic mulhi nextafter polygamma
plain elementwise: population_count pow regularized_incomplete_beta rem rsqrt shift_left
plain elementwise: shift_right_arithmetic shift_right_logical sin sinh sqrt square sub tan tanh zeta
plain elementwise: div log2 mul one_minus_square polynomial
plain elementwise exact: abs and ceil clamp conj convert_element_type copy eq eq_to floor ge gt imag
plain elementwise exact: is_finite le le_to lt lt_to max min name ne neg not or real
plain elementwise exact: reduce_precision round select_n sign stop_gradient xor
# elements in other places
plain moves exact: broadcast_in_dim iota reshape squeeze stack tile transpose
plain moves exact ordered: concatenate dynamic_slice dynamic_update_slice pad rev slice split
plain moves exact ordered: unstack
plain moves exact identity: pvary
plain exact identity: reshard sharding_constraint
plain exact: bitcast_convert_type device_put optimization_barrier
plain exact ordered: gather scatter sort top_k
# several elements become one, or each depends on several
plain exact reduces: reduce_and reduce_max reduce_min reduce_or reduce_xor
plain exact ordered: cummax cummin argmax argmin reduce_window_max reduce_window_min
plain reduces sums: reduce_sum
plain reduces: reduce_prod
plain sums: dot_general ragged_dot_general scaled_dot
plain sums ordered: conv_general_dilated cumsum reduce_window_sum scatter-add scatter-sub
plain ordered unsplit: fft
plain ordered: approx_top_k cumlogsumexp cumprod reduce_window scatter-max scatter-min
plain ordered: scatter-mul select_and_gather_add select_and_scatter select_and_scatter_add
plain: cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu
plain: lu_pivots_to_permutation qr reduce schur svd symmetric_product triangular_solve tridiagonal
plain: ormqr tridiagonal_solve
plain tied: custom_linear_solve
# random numbers; rng_uniform has no key: each device has a state of its own
plain unsplit: rng_bit_generator
plain: philox2x32 philox4x32 random_clone random_fold_in random_seed random_split random_unwrap
plain: random_bits random_gamma random_wrap threefry2x32 threefry4x32
opaque: rng_uniform
# functions of operands and bodies; on which platform it runs, all devices of a program agree
plain: composite custom_vmap_call eval_jaxpr linear_call platform_index
# calls, branches, loops
call inline: jit call closed_call
call checkpoint: remat2
call custom_rule: custom_jvp_call custom_vjp_call
branch: cond
loop: scan while
shard_map: shard_map
# collectives, with the parameter that names their axes
collective sum axes: psum psum_invariant
collective max axes: pmax
collective min axes: pmin
collective gather axis_name: all_gather all_gather_invariant
collective broadcast axis_name: pbroadcast
collective scatter axis_name: reduce_scatter
collective exchange axis_name: all_to_all ragged_all_to_all
collective permute axis_name: ppermute precv psend
collective index axis_name: axis_index
collective unknown axes: unreduced_psum # a sum that is still to come
collective unknown axis_name: all_gather_reduced unreduced_reduce_scatter
# what no parameter shows
callback: debug_callback debug_print
callback unsplit: io_callback pure_callback
opaque: after_all create_token custom_lin custom_partitioning dce_sink empty2 get swap
opaque unsplit: ffi_call
opaque tied unsplit: pallas_call
opaque: call_hi_primitive stage # the first one, unless it can be expanded
"""


def _parse_table() -> Iterator[Primitive]:
    """Yield the records of `TABLE`, whose lines are "kind fact fact: names # comment".

    "plain exact: copy" gives `Primitive(name="copy", kind="plain", exact=True)`; the facts of calls
    and collectives are values of fields: "call inline: jit" gives `call="inline"`.
    """
    for line in TABLE.splitlines():
        description, _, names = line.partition("#")[0].partition(":")
        kind, *facts = description.split() or [""]  # a line without names gives no record
        fields: dict[str, Any] = {"kind": kind}
        if kind == "call":
            (fields["call"],) = facts
        elif kind == "collective":
            fields["collective"], fields["axes_param"] = facts
        else:
            fields |= dict.fromkeys(facts, True)
        for name in names.split():
            yield Primitive(name=name, **fields)


RECORDS: Final[dict[str, Primitive]] = {record.name: record for record in _parse_table()}
