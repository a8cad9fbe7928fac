"""The whole table of cases, on 4 and 8 devices, with check_vma on and off."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from gather_cases import CASES, Case
from gather_checks import assert_close, blocks, count, mesh_of, planned, rewritten_leaves
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.rewriting

DEVICES = (4, 8)
Mapped = Callable[[jax.Array], Any]


def mapped(case: Case, devices: int, check_vma: bool) -> Mapped:
    return jax.shard_map(
        case.body,
        mesh=mesh_of(i=devices),
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=check_vma,
    )


def together(devices: int, check_vma: bool, cases: list[Case]) -> Mapped:
    """All cases in one program, so that it is compiled once."""
    each = {case.name: mapped(case, devices, check_vma) for case in cases}
    return lambda x: {name: function(x) for name, function in each.items()}


def cases_for(check_vma: bool) -> list[Case]:
    return [case for case in CASES if case.typed or not check_vma]


def rows(devices: int) -> jax.Array:
    return jnp.asarray(blocks(devices * 2, 3))


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_collectives_and_reasons(case: Case, devices: int, check_vma: bool):
    if check_vma and not case.typed:
        pytest.skip("groups need check_vma=False")
    function, x = mapped(case, devices, check_vma), rows(devices)

    plan = planned(function, x)

    before = count(function, x)
    assert before.gathers == case.before.gathers
    assert count(plan.evaluate or function, x) == case.after[devices]
    refusals = [finding for finding in plan.findings if finding.outcome == "refused"]
    assert [finding.why for finding in refusals] == ([case.why[devices]] if case.why[devices] else [])
    if refusals and case.why[4] == case.why[8]:
        assert refusals[0].where == case.forced_at()


MODES: dict[str, Callable[[Mapped], Mapped]] = {
    "eager": lambda function: function,
    "jit": jax.jit,
    "vmap": lambda function: jax.jit(jax.vmap(function)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("devices", DEVICES)
def test_values(devices: int, check_vma: bool, mode: str):
    cases = cases_for(check_vma)
    function = together(devices, check_vma, cases)
    x = rows(devices)
    if mode == "vmap":
        x = jnp.stack([x, x - 1])
    wanted = MODES[mode](function)(x)
    leaves = MODES[mode](rewritten_leaves(function))(x)

    found = jax.tree.unflatten(jax.tree.structure(wanted), leaves)

    for case in cases:
        for one, other in zip(*map(jax.tree.leaves, (found[case.name], wanted[case.name])), strict=True):
            assert_close(one, other, case.tolerance, case.name)
