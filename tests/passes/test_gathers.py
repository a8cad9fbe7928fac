"""What the pass says, what it leaves alone, and how it composes."""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gather_cases import CASES
from gather_checks import assert_close, blocks, count, mesh_of, planned, rewritten_leaves
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from jax_dist._passes import PassFinding, PassPlan
from jax_dist._passes.interpreter import equations

Function = Callable[[jax.Array], Any]
X = jnp.asarray(blocks(8, 3))


def on_devices(body, devices, *, check_vma):
    specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check_vma}
    return jax.shard_map(body, mesh=mesh_of(i=devices), **specs)


def on_four(body, *, check_vma=True):
    return on_devices(body, 4, check_vma=check_vma)


def line_of(function, text):
    """Return where the source of a function holds a text, as a finding names it."""
    source, first = inspect.getsourcelines(function)
    (place,) = [k for k, line in enumerate(source) if text in line]
    return f"tests/passes/test_gathers.py:{first + place}"


def total(x):
    return lax.all_gather(x, "i").sum(0)


def average(x):
    return lax.all_gather(x, "i").mean(0)


# ---- the whole table of cases, on 4 and 8 devices, with check_vma on and off


def rows(devices: int) -> jax.Array:
    return jnp.asarray(blocks(devices * 2, 3))


def gradient(function: Function) -> Function:
    """Return the gradient of half the sum of squares of what a function gives."""

    def loss(x: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(function(x))
        return sum((jnp.sum(leaf.astype(jnp.float32) ** 2) / 2 for leaf in leaves), jnp.zeros(()))

    return jax.grad(loss)


# What the plain function is compared with: the pass before or after the transformation.
MODES: dict[str, tuple[Callable[[Function], Function], Callable[[Function], Function]]] = {
    "plain": (lambda f: f, rewritten_leaves),
    "vmap before": (jax.vmap, lambda f: rewritten_leaves(jax.vmap(f))),
    "vmap after": (jax.vmap, lambda f: jax.vmap(rewritten_leaves(f))),
    "grad before": (gradient, lambda f: rewritten_leaves(gradient(f))),
    "grad after": (gradient, lambda f: gradient(rewritten_leaves(f))),
}
IN_EVERY_RUN = (
    (4, False, "plain"),
    (4, True, "vmap before"),
    (8, False, "grad after"),
    (8, True, "plain"),
    (8, True, "grad before"),
)
PROGRAMS = [
    pytest.param(*program, marks=[] if program in IN_EVERY_RUN else pytest.mark.slow)
    for program in itertools.product((4, 8), (False, True), MODES)
]


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_collectives_and_reasons(name: str, devices: int, *, check_vma: bool):
    case = CASES[name]
    if check_vma and not case.typed:
        pytest.skip("groups need check_vma=False")
    function, x = on_devices(case.body, devices, check_vma=check_vma), rows(devices)

    plan = planned(function, x)
    after = jaxpr_as_fun(plan.jaxpr) if plan.jaxpr else function

    assert count(function, x)[0] >= 1
    assert count(after, x) == (case.gathers, case.reductions)
    refused = [finding for finding in plan.findings if finding.outcome == "refused"]
    assert [finding.why for finding in refused] == [case.why] * bool(case.why)
    assert all(finding.where == case.forced_at() for finding in refused)


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "check_vma", "mode"), PROGRAMS)
def test_values(devices: int, mode: str, *, check_vma: bool):
    """All cases in one program, compiled once."""
    differentiated = mode.startswith("grad")
    cases = {
        name: case
        for name, case in CASES.items()
        if (case.typed or not check_vma) and (case.differentiable or not differentiated)
    }
    x = rows(devices)
    if mode.startswith("vmap"):
        x = jnp.stack([x, x - 1])

    def together(change: Callable[[Function], Function]) -> Function:
        each = {
            n: change(on_devices(case.body, devices, check_vma=check_vma))
            for n, case in cases.items()
        }
        return jax.jit(lambda x: {name: jax.tree.leaves(f(x)) for name, f in each.items()})

    wanted, actual = (together(change)(x) for change in MODES[mode])

    for name, case in cases.items():
        for one, other in zip(actual[name], wanted[name], strict=True):
            # A gradient is a sum of sums, even of what is exact itself.
            assert_close(one, other, max(case.tolerance, 2e-6 * differentiated), name)


# ---- findings


def test_exact_leaves_what_may_round():
    """The largest is one of the numbers; whole numbers have one sum; a turned sign is exact."""
    why = "gathers='exact': a sum in another order may differ in the last bits"

    def findings(body):
        plan = planned(on_four(lambda x: body(lax.all_gather(x, "i"))), X, exact=True)
        return [(finding.outcome, finding.why) for finding in plan.findings]

    for body in (lambda g: g.sum(0), lambda g: g.mean(0), lambda g: jnp.sin(g).max(0)):
        assert findings(body) == [("refused", why)]
    for body in (lambda g: g.max(0), lambda g: (-g).min(0), lambda g: (g > 0).sum(0)):
        assert findings(body) == [("rewritten", "")]


def test_a_gather_that_nobody_reads_is_nothing_to_report():
    for body in (lambda x: lax.psum(x, "i"), lambda x: (jnp.sin(lax.all_gather(x, "i")), x)[1]):
        assert planned(on_four(body), X) == PassPlan(None, ())


def test_a_rewrite_is_told_at_the_line_of_the_gather():
    def body(x):
        whole = lax.all_gather(x, "i", tiled=True)
        return jnp.sin(whole).sum(0) * whole.max(0)

    what = "all_gather over 'i', reduce_sum and reduce_max: one psum and one pmax"
    assert planned(on_four(body), X).findings == (
        PassFinding("JXD301", "rewritten", what, "", line_of(body, "all_gather")),
    )


def test_a_refusal_is_told_at_the_line_of_the_user_that_forces_the_gather():
    def in_order(whole):
        return lax.sort(whole, dimension=0)

    def in_a_jit(x):
        whole = lax.all_gather(x, "i")
        return jax.jit(in_order)(2 * whole).sum(0)

    def median(x):
        return jnp.median(lax.all_gather(x, "i"), 0)

    what = f"all_gather over 'i' ({line_of(in_a_jit, 'all_gather')}) is kept"
    why = "sort needs the whole gathered value"
    assert planned(on_four(in_a_jit), X).findings == (
        PassFinding("JXD301", "refused", what, why, line_of(in_order, "lax.sort")),
    )
    # JAX traces jnp.median once: its equations bear the line of the first caller.
    planned(on_four(lambda x: jnp.median(lax.all_gather(x, "i"), 0)), X)
    (finding,) = planned(on_four(median), X).findings
    assert finding.where == line_of(median, "median(lax")


# ---- values


def test_a_nan_on_one_device_reaches_all():
    x = X.at[2, 1].set(jnp.nan)  # on the second device
    function = on_four(lambda x: lax.all_gather(x, "i").max(0) - lax.all_gather(-x, "i").min(0))
    changed = rewritten_leaves(function)

    assert count(changed, x) == (0, 2)
    is_nan = np.isnan(np.asarray(jax.jit(changed)(x)[0]))
    assert is_nan.tolist() == [[False, True, False], [False] * 3] * 4


def _looped_and_branched(x):
    mapped = on_four(average)
    looped = lax.fori_loop(0, 3, lambda _, x: mapped(x) + 1, x)
    return lax.cond(looped.sum() > 0, mapped, lambda x: x, looped)


def _twice(x):
    """Call one jaxpr twice: its gathers are two all the same."""
    layer = jax.jit(lambda x: average(2 * x))
    return on_four(lambda x: layer(layer(x) + x))(x)


def _constants(x):
    """Return a constant, which has no variable of its own."""
    each = jax.jit(total)
    return on_four(lambda x: x * each(2.0) + each(3.0), check_vma=False)(x)


def _nested(x):
    over = lambda axis: {
        "in_specs": P(axis), "out_specs": P(axis), "axis_names": {axis}, "check_vma": False
    }  # fmt: skip
    weighted = lambda x: (lax.all_gather(x, "i") * jnp.arange(4.0)[:, None, None]).sum(0)
    inner = jax.shard_map(weighted, **over("i"))
    return jax.shard_map(lambda x: inner(x), mesh=mesh_of(i=4, j=2), **over("j"))(x)


_COMPOSED = {
    "among other equations": (lambda x: jnp.sin(on_four(total)(jnp.cos(x)) * 2), 1),
    "loops and branches around": (_looped_and_branched, 2),
    "a layer called twice": (_twice, 2),
    "a jit of a constant": (_constants, 2),
    "a shard_map in another": (_nested, 1),
    "jax.pmap": (lambda x: jax.pmap(total, "i")(x.reshape(8, 3)), 1),
    "second branch": (
        on_four(lambda x: lax.cond(lax.pmax(x[0, 0], "i") > 9, lambda x: x, total, x)),
        2,
    ),
}


@pytest.mark.parametrize("name", _COMPOSED)
def test_composition(name):
    function, reductions = _COMPOSED[name]
    changed = rewritten_leaves(function)

    assert {finding.outcome for finding in planned(function, X).findings} == {"rewritten"}
    assert count(changed, X) == (0, reductions)
    assert_close(jax.jit(changed)(X)[0], jax.jit(function)(X), 1e-6)


@pytest.mark.parametrize(("dtype", "barriers"), [("bfloat16", 1), ("float32", 0), ("int8", 0)])
def test_what_stands_for_a_gather_of_a_small_type_is_rounded(dtype, barriers):
    """As what is sent would be: XLA computes in float32 between operations that it fuses."""
    function = on_four(lambda x: lax.all_gather(x.astype(dtype), "i").max(0), check_vma=False)
    rewritten = jax.make_jaxpr(rewritten_leaves(function))(X)
    names = [eqn.primitive.name for eqn in equations(rewritten)]

    assert (names.count("all_gather"), names.count("optimization_barrier")) == (0, barriers)
