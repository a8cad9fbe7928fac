"""The whole table of cases, on 4 and 8 devices, with check_vma on and off."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gather_cases import CASES, Case
from gather_checks import assert_close, blocks, count, mesh_of, planned, rewritten_leaves
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

Function = Callable[[jax.Array], Any]


def mapped(case: Case, devices: int, *, check_vma: bool) -> Function:
    specs = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check_vma}
    return jax.shard_map(case.body, mesh=mesh_of(i=devices), **specs)


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
    function, x = mapped(case, devices, check_vma=check_vma), rows(devices)

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
        each = {n: change(mapped(case, devices, check_vma=check_vma)) for n, case in cases.items()}
        return jax.jit(lambda x: {name: jax.tree.leaves(f(x)) for name, f in each.items()})

    wanted, actual = (together(change)(x) for change in MODES[mode])

    for name, case in cases.items():
        for one, other in zip(actual[name], wanted[name], strict=True):
            # A gradient is a sum of sums, even of what is exact itself.
            assert_close(one, other, max(case.tolerance, 2e-6 * differentiated), name)
