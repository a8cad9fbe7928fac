"""Low-rank perturbations, applied without forming them, train as formed ones would."""

import math
import re

import es_common
import es_eggroll
import jax
import jax.numpy as jnp
import numpy as np
import pytest

_PLAN = es_eggroll.Plan(pairs=16, rank=2, rows=5, length=3, letter=4, width=8, generations=3)


def key_of(number=0):
    return jax.random.key(number)


def trained(plan, devices):
    """Return the parameters, and the mean losses."""
    losses = []
    _, (params, _) = es_eggroll.train(
        plan,
        jax.devices()[:devices],
        0,
        lambda _, loss: losses.append(loss),
        es_common.Checkpoints(),
    )
    return jax.device_get(params), losses


@pytest.fixture(scope="module")
def usual():
    return trained(_PLAN, 8)


@pytest.fixture(scope="module")
def program():
    return es_eggroll.build(_PLAN, jax.devices(), key_of())


def formed(noise, sign):
    """Return the sums that one member of a pair adds to each matrix."""
    scale = sign * es_eggroll.SIGMA / math.sqrt(_PLAN.rank)
    return {name: scale * left @ right.T for name, (left, right) in noise.items()}


@pytest.mark.thorough
def test_the_update_is_that_of_the_sum_over_formed_members(program):
    key = key_of(7)
    (params, _), losses = program.run(program.state, key)

    noise_key, row_key = jax.random.split(key)
    before, adam = jax.device_get(program.state)
    text = jnp.asarray(jax.device_get(program.text))
    gradient = {name: np.zeros_like(matrix) for name, matrix in before.items()}
    scores = np.zeros((_PLAN.pairs, 2))
    loss_of = jax.jit(es_eggroll.loss_of)
    for pair in range(_PLAN.pairs):
        noise = es_eggroll.noise_of(_PLAN, noise_key, jnp.int32(pair))
        rows = es_eggroll.rows_of(_PLAN, text, row_key, jnp.int32(pair))
        for column, sign in enumerate((1, -1)):
            added = formed(noise, sign)
            member = jax.tree.map(jnp.add, before, added)
            scores[pair, column] = loss = float(loss_of(member, rows))
            for name, matrix in added.items():
                share = loss / (2 * _PLAN.pairs * es_eggroll.SIGMA**2)
                gradient[name] += share * np.asarray(matrix)
    change, _ = _PLAN.adam.update(gradient, adam)

    np.testing.assert_allclose(losses, scores, rtol=1e-5)
    for name, matrix in jax.device_get(params).items():
        np.testing.assert_allclose(matrix - before[name], change[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("devices", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_the_curve_is_the_same_on_any_number_of_devices(usual, devices):
    params, losses = trained(_PLAN, devices)

    assert losses == usual[1]
    for name, matrix in params.items():
        np.testing.assert_array_equal(matrix, usual[0][name], err_msg=name)


@pytest.mark.thorough
def test_the_loss_falls_on_text_that_the_model_never_saw(program):
    plan = es_eggroll.Plan(pairs=64, rows=8, length=3, letter=4, width=8, generations=40)
    params, losses = trained(plan, 8)
    first, _ = jax.device_get(es_eggroll.build(plan, jax.devices(), key_of()).state)

    assert losses[0] > 3.3  # nats; there are 32 letters
    untrained, after = (es_eggroll.loss_of(each, program.test) for each in (first, params))
    assert after < untrained - 0.05


def test_no_letter_is_in_two_parts_of_the_text():
    seen, test = es_eggroll.parts(_PLAN, np.arange(25_300))

    assert not np.isin(test, seen).any()
    assert len(seen) == 21_300
    # Every row of each piece, and none over its end.
    assert np.unique(test).tolist() == [*range(9_000, 10_000), *range(19_000, 20_000)]
    assert test.shape == (2 * 997, 4)
    assert (test[:, -1] - test[:, 0] == 3).all()


def test_signs_have_mean_0_and_variance_1_and_are_independent():
    signs = np.asarray(
        jax.vmap(lambda pair: es_eggroll.signs_of(pair, 70))(
            es_common.keys_of(key_of(), jnp.arange(4000))
        )
    )

    assert set(np.unique(signs)) == {-1.0, 1.0}
    products = signs.T @ signs / len(signs)  # 1 / sqrt(4000) = 0.016 beside the diagonal
    np.testing.assert_allclose(products, np.eye(70), atol=6 * 0.016)
    assert np.abs(signs.mean(0)).max() < 6 * 0.016


def compiled_text(program):
    arguments = (program.state, program.text, key_of(), program.pairs)
    return program.update.lower(*arguments).compile().as_text()


def test_only_the_losses_are_sent_and_no_member_is_formed(program):
    text = compiled_text(program)

    assert es_common.exchanged(text) == {"all-gather": 2 * _PLAN.pairs * 4}
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    for m, n in _PLAN.shapes.values():
        members = re.findall(rf"\[(?:\d+,)+(?:{m},{n}|{n},{m})\]", text)
        assert members == []
