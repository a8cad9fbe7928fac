"""The analysis never says of a value that it is the same on all devices where it is not."""

import numpy as np
import pytest
import training_steps
from fuzzing import values_from
from gather_cases import CASES
from uniformity_truth import Subject, total

pytestmark = pytest.mark.rewriting

_IN_EVERY_RUN = ("mlp, adam", "attention, every second step", "evolution, if finite")


def _steps(names):
    for name in names:
        step, state = training_steps.STEPS[name]
        args = state, training_steps.BATCH
        yield Subject(name, step, args, (True, False), {"i": training_steps.DEVICES})


def _fuzz(seeds):
    for seed in seeds:
        x = np.random.default_rng(seed).normal(size=(6, 2, 3, 2)).astype(np.float32)
        function = lambda x, seed=seed: values_from(x, seed, ("i", "j"))
        yield Subject(f"fuzz {seed}", function, (x,), (False,), {"i": 2, "j": 3})


@pytest.mark.thorough
def test_training_steps():
    count = total(_steps(_IN_EVERY_RUN))

    assert not count.wrong
    assert count.found >= 0.95 * count.equal > 100, count.missed


def test_drawn_programs():
    count = total(_fuzz(range(6)))

    assert not count.wrong
    assert count.found >= 0.98 * count.equal > 30, count.missed


@pytest.mark.slow
def test_all_training_steps():
    count = total(_steps(training_steps.STEPS))

    assert not count.wrong
    assert count.found >= 0.98 * count.equal, count.missed


@pytest.mark.slow
def test_many_drawn_programs():
    assert not total(_fuzz(range(6, 60))).wrong


@pytest.mark.slow
def test_gather_cases():
    x = np.random.default_rng(1).normal(size=(8, 2, 3)).astype(np.float32)
    subjects = (Subject(case.name, case.body, (x,), (False,), {"i": 8}) for case in CASES)

    assert not total(subjects).wrong
