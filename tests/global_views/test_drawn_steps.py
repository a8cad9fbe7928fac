"""Random steps have the numbers of pmap, to the bit, and some of their state is shared."""

import gc
from collections.abc import Iterable

import jax
import pytest
from against_pmap import compare
from drawn_steps import batch_of, state_of, step_of
from jax.sharding import PartitionSpec as P

pytestmark = pytest.mark.rewriting

BATCH = 3  # steps compiled as one


def _compare(seeds: Iterable[int], **options):
    """Several steps as one; gives what was found of their state."""
    steps = {f"{seed}": step_of(seed) for seed in seeds}
    states = {name: state_of(int(name)) for name in steps}
    batch = {name: batch_of(int(name)) for name in steps}

    def step(state: dict, x: dict) -> tuple[dict, dict]:
        outs = {name: each(state[name], x[name]) for name, each in steps.items()}
        return {name: new for name, (new, _) in outs.items()}, {n: y for n, (_, y) in outs.items()}

    view, _ = compare(step, states, batch, **options)
    return view.report().leaves


def _rule(path: str, leaf: jax.ShapeDtypeStruct) -> P:
    """Cuts what is always shared; the leaves are too small for "fsdp"."""
    return P("i") if path.endswith("/a") else P()


@pytest.mark.slow
def test_drawn_steps_have_the_numbers_of_pmap():
    leaves = [
        leaf for first in range(0, 9, BATCH) for leaf in _compare(range(first, first + BATCH))
    ]

    assert 0 < sum(leaf.shared for leaf in leaves) < len(leaves)


@pytest.mark.parametrize(("first", "regather"), [(9, False), (12, True)])
def test_drawn_steps_in_parts_have_the_numbers_of_pmap(first, regather):
    seeds = range(first, first + BATCH)
    leaves = _compare(seeds, shardings=_rule, gradients="reduce", regather=regather)

    assert 0 < sum(leaf.shared for leaf in leaves) < len(leaves)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(12, 5012, 90))
def test_thousands_of_drawn_steps_have_the_numbers_of_pmap(first):
    for start in range(first, first + 90, BATCH):
        _compare(range(start, start + BATCH), shardings=_rule, gradients="reduce")
        jax.clear_caches()  # a process may map only so many pieces of code
        gc.collect()
