"""The whole table of cases, on 4 and 8 devices, with check_vma on and off."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gather_cases import CASES, Case, Count
from gather_checks import assert_close, blocks, count, mesh_of, planned, rewritten_leaves
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.rewriting

Function = Callable[[jax.Array], Any]


def mapped(case: Case, devices: int, *, check_vma: bool) -> Function:
    return jax.shard_map(
        case.body,
        mesh=mesh_of(i=devices),
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=check_vma,
    )


def rows(devices: int) -> jax.Array:
    return jnp.asarray(blocks(devices * 2, 3))


def gradient(function: Function) -> Function:
    """Of half the sum of squares of what a function gives."""

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
    pytest.param(
        *program,
        marks=[] if program in IN_EVERY_RUN else pytest.mark.slow,
        id=f"{program[0]}-{'typed' if program[1] else 'untyped'}-{program[2]}",
    )
    for program in itertools.product((4, 8), (False, True), MODES)
]


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_collectives_and_reasons(case: Case, devices: int, *, check_vma: bool):
    if check_vma and not case.typed:
        pytest.skip("groups need check_vma=False")
    function, x = mapped(case, devices, check_vma=check_vma), rows(devices)

    plan = planned(function, x)

    assert count(function, x) == case.before
    assert count(plan.evaluate or function, x) == case.after
    refused = [finding for finding in plan.findings if finding.outcome == "refused"]
    assert [finding.why for finding in refused] == [case.why] * bool(case.why)
    if refused:
        assert refused[0].where == case.forced_at()


@pytest.mark.thorough
@pytest.mark.parametrize(("devices", "check_vma", "mode"), PROGRAMS)
def test_values(devices: int, mode: str, *, check_vma: bool):
    differentiated = mode.startswith("grad")
    cases = [
        case for case in cases_for(check_vma=check_vma) if case.differentiable or not differentiated
    ]
    plain, changed = MODES[mode]
    x = rows(devices)
    if mode.startswith("vmap"):
        x = jnp.stack([x, x - 1])

    wanted = together(cases, devices, plain, check_vma=check_vma)(x)
    found = together(cases, devices, changed, check_vma=check_vma)(x)

    for case in cases:
        for one, other in zip(found[case.name], wanted[case.name], strict=True):
            # A gradient is a sum of sums, even of what is exact itself.
            assert_close(one, other, max(case.tolerance, 2e-6 * differentiated), case.name)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("devices", [4, 8])
def test_values_without_jit(devices: int, *, check_vma: bool):
    x = rows(devices)
    for case in cases_for(check_vma=check_vma):
        function = mapped(case, devices, check_vma=check_vma)
        for one, other in zip(
            rewritten_leaves(function)(x), jax.tree.leaves(function(x)), strict=True
        ):
            assert_close(one, other, case.tolerance, case.name)


@pytest.mark.parametrize("name", ["mean", "max ", "inside scan"])
def test_values_without_jit_of_a_few(name: str):
    (case,) = [case for case in CASES if case.name == name.strip()]
    function, x = mapped(case, 4, check_vma=True), rows(4)
    assert_close(rewritten_leaves(function)(x)[0], function(x), case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_collectives_of_the_compiled_program(case: Case, devices: int, *, check_vma: bool):
    """XLA may join collectives that stand side by side, and never adds one."""
    if check_vma and not case.typed:
        pytest.skip("groups need check_vma=False")
    function, x = mapped(case, devices, check_vma=check_vma), rows(devices)

    found = compiled_count(rewritten_leaves(function), x)

    wanted = case.after
    assert min(wanted.gathers, 1) <= found.gathers <= wanted.gathers
    assert min(wanted.reductions, 1) <= found.reductions <= wanted.reductions
    assert found.scatters == 0


def cases_for(*, check_vma: bool) -> list[Case]:
    return [case for case in CASES if case.typed or not check_vma]


def together(
    cases: list[Case], devices: int, change: Callable[[Function], Function], *, check_vma: bool
) -> Function:
    """All cases in one program, compiled once; each in its own shard_map, by name."""
    each = {case.name: change(mapped(case, devices, check_vma=check_vma)) for case in cases}
    return jax.jit(lambda x: {name: jax.tree.leaves(f(x)) for name, f in each.items()})


def compiled_count(function: Function, x: jax.Array) -> Count:
    text = jax.jit(function).lower(x).compile().as_text()
    names = re.findall(r" (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", text)
    return Count(
        names.count("all-gather"), names.count("all-reduce"), names.count("reduce-scatter")
    )
