"""Primitives by what may be taken for granted of them: nothing, of one that is not named here."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


CALLS = _names(
    # Of one body, which takes the operands and gives the results.
    "checkpoint closed_call core_call custom_jvp_call custom_vjp_call jit pjit remat2"
)

INLINED = _names(
    # Calls that mean nothing by being calls, inside of a shard_map.
    "closed_call core_call jit pjit"
)

ELEMENTWISE = _names(
    # One result, of which each element depends on the same element of each operand.
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc
    exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma log log1p
    logistic lt lt_to max min mul ne neg nextafter not or polygamma population_count pow real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor zeta
    """
)

EXACT = _names(
    # Any order of the elements gives the same bits, and no rounding takes place: what moves,
    # compares and chooses. The sign of a zero aside, which a maximum may lose.
    """
    abs argmax argmin broadcast_in_dim ceil clamp concatenate conj convert_element_type copy copy_p
    cummax cummin dynamic_slice eq eq_to floor ge gt imag is_finite le le_to lt lt_to max min ne neg
    pad pvary real reduce_and reduce_max reduce_min reduce_or reduce_precision reshape rev round
    select_n sign slice sort split squeeze stack stop_gradient transpose
    """
)

DETERMINISTIC = ELEMENTWISE + _names(
    # Equal operands give equal results, on every device.
    """
    approx_top_k argmax argmin argsort bitcast_convert_type broadcast_in_dim cholesky concatenate
    conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum device_put dot_general
    dynamic_slice dynamic_update_slice eig eigh fft gather geqrf householder_product iota lu
    lu_pivots_to_permutation optimization_barrier ormqr pad pvary qr ragged_dot_general random_bits
    random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap
    reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor reshape rev
    rng_bit_generator scatter scatter-add scatter-max scatter-min scatter-mul scatter_add
    scatter_max scatter_min scatter_mul select_and_gather_add select_and_scatter_add slice sort
    split squeeze stack svd threefry2x32 tile top_k transpose triangular_solve tridiagonal_solve
    """
)

GATHERS = _names(
    # What the gather algebra starts from.
    "all_gather reduce_scatter"
)
