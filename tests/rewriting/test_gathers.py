"""The gather pass: its findings, what it leaves alone, and how it composes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_cases import CASES
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P
from observing import (
    assert_close,
    line_of,
    mesh_of,
    numbers,
    plan_for,
    rewrite_gathers,
    traced_collectives,
    traced_names,
)

from jax_dist._passes import PassFinding, PassPlan

X = numbers(8, 3)


def on_devices(body, devices=4, *, check_vma=True):
    specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check_vma}
    return jax.shard_map(body, mesh=mesh_of(i=devices), **specs)


def place_in(function, after):
    """Return a place as a finding names it: this many lines after the first of a function."""
    return f"tests/rewriting/test_gathers.py:{line_of(function, after)}"


def total(x):
    return lax.all_gather(x, "i").sum(0)


# ---- the whole table of cases, on 4 and 8 devices, with check_vma on and off

ROUNDS = "gathers='exact': a sum in another order may differ in the last bits"


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_collectives_and_reasons(name: str, devices: int, *, check_vma: bool):
    case = CASES[name]
    if check_vma and not case.typed:
        pytest.skip("groups need check_vma=False")
    function, x = on_devices(case.body, devices, check_vma=check_vma), numbers(devices * 2, 3)

    plan = plan_for(function, x)
    after = jaxpr_as_fun(plan.jaxpr) if plan.jaxpr else function

    assert traced_collectives(function, x)[0] >= 1
    assert traced_collectives(after, x) == (case.gathers, case.reductions)
    refused = [finding for finding in plan.findings if finding.outcome == "refused"]
    assert [finding.why for finding in refused] == [case.why] * bool(case.why)
    assert all(finding.where == case.forced_at() for finding in refused)
    if not case.why:
        exactly = plan_for(function, x, exact=True).findings
        assert {finding.why for finding in exactly} == {ROUNDS if case.tolerance else ""}


# ---- findings


def test_a_gather_that_nobody_reads_is_nothing_to_report():
    for body in (lambda x: lax.psum(x, "i"), lambda x: (jnp.sin(lax.all_gather(x, "i")), x)[1]):
        assert plan_for(on_devices(body), X) == PassPlan(None, ())


def test_a_rewrite_is_told_at_the_line_of_the_gather():
    def body(x):
        whole = lax.all_gather(x, "i", tiled=True)
        return jnp.sin(whole).sum(0) * whole.max(0)

    what = "all_gather over 'i', reduce_sum and reduce_max: one psum and one pmax"
    assert plan_for(on_devices(body), X).findings == (
        PassFinding("JXD301", "rewritten", what, "", place_in(body, 1)),
    )


def test_a_refusal_is_told_at_the_line_of_the_user_that_forces_the_gather():
    def in_order(whole):
        return lax.sort(whole, dimension=0)

    def in_a_jit(x):
        whole = lax.all_gather(x, "i")
        return jax.jit(in_order)(2 * whole).sum(0)

    def median(x):
        return jnp.median(lax.all_gather(x, "i"), 0)

    what = f"all_gather over 'i' ({place_in(in_a_jit, 1)}) is kept"
    why = "sort needs the whole gathered value"
    assert plan_for(on_devices(in_a_jit), X).findings == (
        PassFinding("JXD301", "refused", what, why, place_in(in_order, 1)),
    )
    # JAX traces jnp.median once: its equations bear the line of the first caller.
    plan_for(on_devices(lambda x: jnp.median(lax.all_gather(x, "i"), 0)), X)
    (finding,) = plan_for(on_devices(median), X).findings
    assert finding.where == place_in(median, 1)


# ---- values


def test_a_nan_on_one_device_reaches_all():
    x = X.at[2, 1].set(jnp.nan)  # on the second device
    changed = rewrite_gathers(on_devices(lambda x: lax.all_gather(x, "i").max(0)))

    assert traced_collectives(changed, x) == (0, 1)
    assert np.isnan(jax.jit(changed)(x)[0]).tolist() == [[False, True, False], [False] * 3] * 4


# Ties within a device, between devices, and both at once.
TIES = np.array(
    [
        [[5.0, 1.0, 7.0, 0.0], [5.0, 2.0, 7.0, 1.0]],
        [[5.0, 3.0, 7.0, 2.0], [1.0, 0.0, 0.0, 3.0]],
        [[2.0, 3.0, 7.0, 4.0], [0.0, 3.0, 1.0, 5.0]],
        [[0.0, 0.0, 7.0, 6.0], [5.0, 1.0, 7.0, 7.0]],
    ],
    np.float32,
)


def test_derivatives_of_a_maximum_are_shared_by_ties():
    function = on_devices(lambda block: lax.all_gather(block[0], "i").max((0, 1))[None])
    largest = rewrite_gathers(function)
    cubed = lambda x: jnp.sum(largest(x)[0][0] ** 3)
    wanted = lambda x: jnp.sum(x.max((0, 1)) ** 3)
    direction = np.zeros_like(TIES)
    direction[1, 1, 3] = direction[3, 1, 3] = 2.0  # only the second is the largest
    curvature = lambda fun: jax.grad(lambda x: jnp.vdot(jax.grad(fun)(x), direction))

    assert traced_collectives(largest, TIES) == (0, 1)
    for derivative in (jax.grad, curvature):
        actual = jax.jit(derivative(cubed))(TIES)
        np.testing.assert_allclose(actual, derivative(wanted)(TIES), rtol=1e-6, atol=1e-6)


def _looped_and_branched(x):
    mapped = on_devices(total)
    looped = lax.fori_loop(0, 3, lambda _, x: mapped(x) + 1, x)
    return lax.cond(looped.sum() > 0, mapped, lambda x: x, looped)


def _nested(x):
    over = lambda axis: {
        "in_specs": P(axis), "out_specs": P(axis), "axis_names": {axis}, "check_vma": False
    }  # fmt: skip
    weighted = lambda x: (lax.all_gather(x, "i") * jnp.arange(4.0)[:, None, None]).sum(0)
    inner = jax.shard_map(weighted, **over("i"))
    return jax.shard_map(lambda x: inner(x), mesh=mesh_of(i=4, j=2), **over("j"))(x)


_COMPOSED = {
    "among other equations": (lambda x: jnp.sin(on_devices(total)(jnp.cos(x)) * 2), 1),
    "loops and branches around": (_looped_and_branched, 2),
    "a shard_map in another": (_nested, 1),
    "jax.pmap": (lambda x: jax.pmap(total, "i")(x.reshape(8, 3)), 1),
}


@pytest.mark.parametrize("name", _COMPOSED)
def test_composition(name):
    function, reductions = _COMPOSED[name]
    changed = rewrite_gathers(function)

    assert {finding.outcome for finding in plan_for(function, X).findings} == {"rewritten"}
    assert traced_collectives(changed, X) == (0, reductions)
    assert_close(jax.jit(changed)(X)[0], jax.jit(function)(X), 1e-6)


@pytest.mark.parametrize(("dtype", "barriers"), [("bfloat16", 1), ("float32", 0), ("int8", 0)])
def test_what_stands_for_a_gather_of_a_small_type_is_rounded(dtype, barriers):
    """Round as a gather would: XLA computes in float32 between operations that it fuses."""
    function = on_devices(lambda x: lax.all_gather(x.astype(dtype), "i").max(0), check_vma=False)
    names = traced_names(jax.jit(rewrite_gathers(function)), X)

    assert (names["all_gather"], names["optimization_barrier"]) == (0, barriers)
