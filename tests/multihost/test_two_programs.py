"""Two programs on one folder: a trainer and a reader, or two trainers, killed at any moment."""

import pytest
from two_programs import play

from jax_dist.multihost import Checkpoints


def nothing_is_lost(folder, rounds: int, seed: int) -> None:
    found = play(folder, rounds=rounds, seed=seed)

    assert found.wrong == []
    assert found.saves >= rounds
    assert found.reads + found.in_use > 0
    with Checkpoints(folder, every=1):  # whoever saves next
        names = sorted(path.name for path in folder.iterdir())
    assert names[0] == ".jax_dist.lock"
    assert 1 <= len(names[1:]) <= 4
    assert all(name.isdecimal() for name in names[1:])


def test_a_few_rounds(tmp_path):
    nothing_is_lost(tmp_path, rounds=4, seed=0)


@pytest.mark.slow
def test_two_hundred_rounds(tmp_path):
    nothing_is_lost(tmp_path, rounds=200, seed=1)
