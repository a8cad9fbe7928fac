"""Sequences that repeat, without any program."""

import random

import pytest

from jax_dist.passes.rolling_repeats import Stretch, best_start, stretches

pytestmark = pytest.mark.rewriting


def spelled(text: str, least_copies: int = 3) -> list[str]:
    """The stretches of a text, each as its first copy and the number of copies."""
    found = stretches([ord(letter) for letter in text], least_copies)
    return [f"{text[s.start : s.start + s.period]} {s.copies}" for s in found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("abcdef", []),
        ("ababab", ["ab 3"]),
        ("abab", []),
        ("xabcabcabcy", ["abc 3"]),
        ("xabcabcabcab", ["abc 3"]),
        ("aaaa", ["a 4"]),
        ("abababxababab", ["ab 3", "ab 3"]),
    ],
)
def test_stretches(text: str, found: list[str]):
    assert spelled(text) == found


def test_a_loop_in_a_loop_has_both_periods():
    assert set(spelled("xyyyxyyyxyyy")) >= {"xyyy 3", "y 3"}


@pytest.mark.parametrize("seed", range(20))
def test_a_planted_loop_is_found(seed: int):
    rng = random.Random(seed)
    period, copies = rng.randint(2, 40), rng.randint(4, 9)
    block = [rng.randrange(30) for _ in range(period)]
    around = [[100 + rng.randrange(50) for _ in range(rng.randint(0, 60))] for _ in range(2)]
    numbers = [*around[0], *block * copies, *around[1]]

    found = stretches(numbers, 4)

    covered = [s for s in found if s.start <= len(around[0]) and s.copies * s.period >= period * 4]
    assert any(s.stop >= len(around[0]) + period * copies for s in covered)


def test_copies_start_where_the_fewest_values_cross():
    """Values go from each even place to the next: the border must not lie between them."""
    edges = [(place, place + 1) for place in range(1, 12, 2)]

    assert best_start(Stretch(0, 13, 4), iter(edges)) == 1
    assert best_start(Stretch(1, 13, 4), iter(edges)) == 1
