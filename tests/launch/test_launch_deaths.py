"""However a rank dies, the job ends soon, with the right exit code, and names it."""

import random

import killing
import pytest


def _faults(seed: int, ranks: int) -> list[str]:
    chance = random.Random(seed)
    how = chance.choice(killing.BY_ITSELF + killing.BY_SIGNAL)
    death = killing.one_death(
        ranks=ranks, rank=chance.randrange(ranks), how=how, delay=chance.uniform(0.5, 6)
    )
    return [f"{death}: {fault}" for fault in death.faults()]


def test_a_rank_that_is_killed_at_some_moment():
    death = killing.one_death(ranks=3, rank=1, how="SIGKILL", delay=2.0)

    assert (death.faults(), death.code) == ([], 137)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_dies_somehow_at_some_moment(seed, ranks):
    assert _faults(seed, ranks) == []
