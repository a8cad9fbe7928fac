"""`compare_device_counts` names the line of planted bugs, and says nothing of clean programs.

By default a part of both lists runs, on one number of devices; all of it is slow.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clean import CASES as CLEAN
from jax import lax, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from planted import CASES as PLANTED
from programs_kit import KEY, ROWS, TARGETS, WEIGHTS, mesh_of

import jax_dist
from jax_dist.errors import ConsistencyError

pytestmark = pytest.mark.rewriting

_QUICK_PLANTED = (
    "summed_gradients_of_means", "divided_by_the_rows_of_a_device",
    "summed_twice", "normalized_by_own_mean", "the_same_noise_everywhere",
    "gathered_along_features", "mean_over_the_other_axis", "differences_within_slices",
)  # fmt: skip
_QUICK_CLEAN = (
    "many_steps", "bf16_layer_norm", "counts", "local_log_sum_exp",
    "stencil_with_neighbours", "transposed_by_all_to_all", "noise_by_device",
    "evolution_with_common_seeds", "mapped_over_a_mesh",
)  # fmt: skip


def _line(finding):
    return int(finding.where.rpartition(":")[2])


@pytest.mark.parametrize("name", _QUICK_PLANTED)
def test_a_planted_bug_is_found_at_its_line(name):
    case = PLANTED[name]
    report = case.report(devices=(4,))

    assert not report.ok
    assert _line(report.findings[0]) == case.wrong_line, str(report)


def test_the_line_where_rows_of_one_device_are_taken_for_all_is_named():
    report = str(PLANTED["normalized_by_own_mean"].report(devices=(4,)))
    words = " ".join(report.split())

    assert "it is made of the rows of one device at " in words, report
    assert "a line that is unknown" not in words, report


@pytest.mark.parametrize("name", _QUICK_CLEAN)
def test_a_clean_program_raises_no_alarm(name):
    report = CLEAN[name].report(devices=(4,))

    assert report.ok, str(report)
    assert report.devices == (4,)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_every_planted_bug(name):
    case = PLANTED[name]
    report = case.report(devices=(1, 2, 4))

    assert not report.ok
    assert _line(report.findings[0]) == case.wrong_line, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_every_clean_program(name):
    report = CLEAN[name].report(devices=(1, 2, 4, 8))

    assert report.ok, str(report)


def test_the_lists_are_as_long_as_they_should_be():
    assert (len(PLANTED) >= 20, len(CLEAN) >= 30) == (True, True)
    assert sum(name.startswith("bf16") for name in CLEAN) >= 3


# ---- what a report says


def _wrong_mean(x):
    return {"mean": lax.psum(jnp.mean(x), "i"), "sum": lax.psum(jnp.sum(x), "i")}


def test_the_report_teaches():
    report = jax_dist.compare_device_counts(_wrong_mean, TARGETS, axis_name="i", devices=(1, 2, 4))
    (finding,) = report.findings

    assert finding.what == "a sum over 'i' of means: 4 times too large"
    assert finding.results == ("result['mean']",)
    assert finding.equation == "psum"
    assert "use lax.pmean(..., 'i')" in finding.do
    text = str(report)
    assert "_wrong_mean: it depends on the number of devices: 1 of 2 results differ" in text
    assert max(map(len, text.splitlines())) <= 80
    assert report.to_dict()["ok"] is False
    assert "4 times too large" in report._repr_html_()
    results = {(each.name, each.devices): each.words for each in report.verdicts}
    assert results == {
        ("result['mean']", 2): "2 times too large",
        ("result['mean']", 4): "4 times too large",
        ("result['sum']", 2): "",
        ("result['sum']", 4): "",
    }


def test_noise_of_own_keys_in_what_is_shared():
    def step(key, w, x):
        key = random.fold_in(key, lax.axis_index("i"))
        return w + random.normal(key, w.shape), lax.psum(jnp.sum(x), "i")

    report = jax_dist.compare_device_counts(
        step, KEY, WEIGHTS, TARGETS, axis_name="i", in_axes=(None, None, 0), devices=(2,)
    )
    (finding,) = report.findings

    assert (finding.code, finding.results) == ("JXD502", ("result[0]",))
    assert not report.ok


def test_keys_may_be_the_devices_own():
    def fold(key, x):
        return random.fold_in(key, lax.axis_index("i")), lax.psum(jnp.sum(x), "i")

    report = jax_dist.compare_device_counts(
        fold, KEY, TARGETS, axis_name="i", in_axes=(None, 0), devices=(2,)
    )
    assert report.ok


def test_what_rounding_could_hide_is_undecided():
    def chaotic(x):
        mean = lax.pmean(jnp.mean(x), "i") * 0.1 + 0.5
        return lax.fori_loop(0, 60, lambda _, at: 3.99 * at * (1 - at), mean)

    report = jax_dist.compare_device_counts(chaotic, TARGETS, axis_name="i", devices=(2,))

    assert not report.ok
    assert [each.undecided for each in report.verdicts] == [True]
    assert "rounding alone" in str(report)


def test_the_tolerance_follows_the_program():
    """What amplifies rounding is no alarm; a result that is off by less is, where nothing does."""

    def amplifying(x):
        return (lax.psum(jnp.sum(x), "i") + 1e3) - 1e3

    assert jax_dist.compare_device_counts(amplifying, TARGETS, axis_name="i", devices=(4,)).ok

    def slightly_wrong(x):
        size = lax.axis_size("i")
        return lax.psum(jnp.sum(x), "i") * (1 + 1e-4 * (size - 1))

    assert not jax_dist.compare_device_counts(
        slightly_wrong, TARGETS, axis_name="i", devices=(4,)
    ).ok


def test_numbers_of_devices_that_do_not_divide_are_left_out_and_named():
    report = jax_dist.compare_device_counts(
        lambda x: lax.psum(x.sum(), "i"), jnp.arange(6.0), axis_name="i", devices=(2, 4)
    )

    assert (report.ok, report.devices, list(report.skipped)) == (True, (2,), [4])
    assert "4 devices left out: x has 6 rows" in str(report)


def test_out_axes_says_along_what_results_join():
    def halves(x):
        return jnp.stack([x, x])

    def along(out_axes):
        return jax_dist.compare_device_counts(
            halves, TARGETS, axis_name="i", out_axes=out_axes, devices=(2,)
        ).ok

    assert along(1)
    assert along(None)
    assert not along(0)


# ---- functions of whole arrays


def _total(mesh):
    def total(x):
        def body(x):
            return lax.psum(jnp.sum(x), "data")

        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P())(x)

    return total


def test_a_mesh_of_the_functions_own_is_refused_with_a_way_out():
    mesh = mesh_of(4)
    with pytest.raises(ConsistencyError, match="mesh of its own") as raised:
        jax_dist.compare_device_counts(_total(mesh), TARGETS, mesh=mesh, devices=(2,))
    assert "parameter named mesh" in str(raised.value)


def test_the_mesh_is_that_of_the_arguments_too():
    x = jax.device_put(TARGETS, NamedSharding(mesh_of(4), P("data")))
    report = jax_dist.compare_device_counts(lambda x, mesh: _total(mesh)(x), x, devices=(2, 4))
    assert (report.ok, report.devices) == (True, (2, 4))


def test_results_joined_from_one_device_only():
    """out_specs=P() of a value that differs gives what the first device has."""

    def first_of_all(x):
        return jax.shard_map(jnp.sum, in_specs=P("data"), out_specs=P(), check_vma=False)(x)

    report = jax_dist.compare_device_counts(first_of_all, TARGETS, mesh=mesh_of(4), devices=(4,))
    assert not report.ok
    assert "the sum over 'data' is missing" in report.findings[0].what


def test_of_a_jit_there_is_little_to_say_and_it_says_so():
    report = jax_dist.compare_device_counts(
        jax.jit(jnp.sum), TARGETS, mesh=mesh_of(4), devices=(4,)
    )
    assert report.ok
    assert "no shard_map is in it" in str(report)


# ---- refusals


@pytest.mark.parametrize(
    ("options", "which"),
    [
        ({}, "no argument has a NamedSharding"),
        ({"axis_name": "i", "in_axes": None}, "in_axes is None"),
        ({"axis_name": "i", "in_axes": 2}, "x has shape"),
        ({"axis_name": "i", "devices": (3,)}, "3 devices: x has 16 rows"),
        ({"axis_name": "i", "devices": ()}, r"devices=\(\)"),
        ({"axis_name": "i", "devices": (1,)}, r"devices=\(1,\)"),
        ({"axis_name": "i", "devices": (0, 2)}, r"devices=\(0, 2\)"),
    ],
)
def test_what_cannot_be_checked_is_refused(options, which):
    with pytest.raises(ConsistencyError, match=which):
        jax_dist.compare_device_counts(lambda x: x, ROWS, **options)


def test_another_structure_is_refused():
    with pytest.raises(ConsistencyError, match="another structure"):
        jax_dist.compare_device_counts(lambda x: list(x), TARGETS, axis_name="i", devices=(2,))


def _fitness(theta: jax.Array, noise: jax.Array) -> jax.Array:
    fitness = jax.vmap(lambda e: -jnp.sum((theta - 0.5 + e) ** 2))(noise)
    return jax.lax.all_gather(fitness, "i", tiled=True)


def test_copies_of_an_argument_are_noted():
    """As jax.pmap takes them, one for each device: with one copy, all is well."""
    noise = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
    theta = np.linspace(-1, 1, 5, dtype=np.float32)
    copies = np.stack([theta] * 8)
    found = jax_dist.compare_device_counts(_fitness, copies, noise, axis_name="i", devices=(2,))
    right = jax_dist.compare_device_counts(
        _fitness, theta, noise, axis_name="i", in_axes=(None, 0), devices=(2,)
    )

    assert not found.ok
    assert [note[:38] for note in found.notes] == ["the rows of args[0] are all equal: if "]
    assert (right.ok, right.notes) == (True, ())
