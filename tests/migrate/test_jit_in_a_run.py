"""`--to jit`, decided by a run: what stays jit, what takes the form of shard_map, and why."""

import pathlib
import sys

import pytest

from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.verify import trial

_HEAD = """\
import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils


def norm(x):  # as BatchNorm does, without the name of an axis
    batch_stats = x.mean(0)
    return x - batch_stats


class Centre:  # as BatchNorm of another file, with the name of an axis
    def __call__(self, x):
        return x - jax.lax.pmean(x.mean(0), "i")


centre = Centre()


def average(x, axis_name=None):  # as the gradients of DynamicScale
    return x if axis_name is None else jax.lax.pmean(x, axis_name)


"""
_STEP = """\
def {name}_step(w, x, key):
    {body}


"""
_MAIN = """\
def {name}(w, batches, key):
    f = jax.pmap({name}_step, axis_name="i"{options})
    w = jax_utils.replicate(w){more}
    for batch in batches:
        w = f(w, batch, {key})
    print(jax_utils.unreplicate(w))


"""
_END = """\
batches = np.random.normal(size=(3, 8, 4, 5)).astype(np.float32)
w, key = jnp.ones(5), jax.random.PRNGKey(0)
"""
# By name: the body, how the key is given, and the reason against jit alone ("" if there is none).
_STEPS = {
    "plain": ("return w - 0.1 * jax.lax.pmean((w * x).mean(0), 'i')", "shared", ""),
    "half_precision": (
        "g = (w.astype(jnp.bfloat16) * x).mean(0)\n"
        "    return w - 0.1 * jax.lax.pmean(g.astype(jnp.float32), 'i')",
        "shared",
        "",
    ),
    "axis_name": (
        "return w - 0.1 * average((w * x).mean(0), axis_name='i')",
        "shared",
        "",
    ),
    "keys_of_no_effect": (  # as of a dropout whose rate is 0
        "keep = jax.random.bernoulli(key, 1.0, x.shape)\n"
        "    return w - 0.1 * jax.lax.pmean((keep * x).mean(0), 'i')",
        "split",
        "",
    ),
    "keys_of_no_effect_with_local_counts": (  # as of padding, under a mean over the devices
        "keep = jax.random.bernoulli(key, 1.0, x.shape)\n"
        "    return w - 0.1 * jax.lax.pmean((keep * x).sum(0) / (x[:, 0] > 0).sum(), 'i')",
        "split",
        "it gives something else for the whole batch",
    ),
    "local_sum": (
        "return w - 0.1 * jax.lax.pmean((w * x).sum(0), 'i')",
        "shared",
        "a sum over the local batch under pmean",
    ),
    "global_sum_of_means": (
        "return w - 0.1 * jax.lax.psum((w * x).mean(0), 'i')",
        "shared",
        "a mean over the local batch under psum",
    ),
    "batch_norm": (
        "return w - 0.1 * jax.lax.pmean((norm(w * x) ** 2).mean(0), 'i')",
        "shared",
        "it gives something else for the whole batch, likely by batch norm",
    ),
    "noise": (
        "noise = jax.random.normal(key, x.shape)\n"
        "    return w - 0.1 * jax.lax.pmean((noise * x).mean(0), 'i')",
        "shared",
        "it gives something else for the whole batch, likely by its random numbers",
    ),
    "key_of_no_effect_with_local_counts": (
        "keep = jax.random.bernoulli(key, 1.0, x.shape)\n"
        "    return w - 0.1 * jax.lax.pmean((keep * x).sum(0) / (x[:, 0] > 0).sum(), 'i')",
        "shared",
        "it gives something else for the whole batch",
    ),
    "row_number": (
        "rows = jnp.arange(len(x))[:, None]\n"
        "    return w - 0.1 * jax.lax.pmean((rows * x).mean(0), 'i')",
        "shared",
        "it gives something else for the whole batch",
    ),
    "device_count": (
        "return w - 0.1 * jax.lax.pmean((w * x).mean(0), 'i') * jax.device_count()",
        "shared",
        "",
    ),
    "not_reduced": (
        "return w - 0.1 * (w * x).mean(0)",
        "shared",
        "the copies of its results differ",
    ),
    "keys": (
        "return w + jax.lax.pmean(jax.random.normal(key, w.shape), 'i')",
        "split",
        "keys per device",
    ),
    "key_of_the_device": (
        "noise = jax.random.normal(jax.random.fold_in(key, jax.lax.axis_index('i')), x.shape)\n"
        "    return w - 0.1 * jax.lax.pmean((noise * x).mean(0), 'i')",
        "shared",
        "it gives something else for the whole batch, likely by its random numbers",
    ),
    "index": (
        "return w + jax.lax.pmean(x.mean(0) * jax.lax.axis_index('i'), 'i')",
        "shared",
        "the step asks for its device, as for a key of its own",
    ),
    "maximum": (
        "return w + jax.lax.pmax(x.max(0), 'i')",
        "shared",
        "the step takes a maximum over the devices",
    ),
    "gather": (
        "return w + jax.lax.all_gather(x, 'i').mean((0, 1))",
        "shared",
        "the step gathers from the other devices",
    ),
    "axis_in_a_class": (  # the last: it raises an error as jit
        "return w - 0.1 * jax.lax.pmean((centre(w * x) ** 2).mean(0), 'i')",
        "shared",
        "other code uses its axis",
    ),
}
_KEYS = {
    "shared": ("key", ", in_axes=(0, 0, None)", ""),
    "split": ("keys", "", "\n    keys = jax.random.split(key, jax.local_device_count())"),
}


def _program() -> str:
    text = _HEAD
    for name, (body, how, _) in _STEPS.items():
        key, options, more = _KEYS[how]
        text += _STEP.format(name=name, body=body.replace("'i'", '"i"'))
        text += _MAIN.format(name=name, key=key, options=options, more=more)
    return text + _END + "".join(f"{name}(w, batches, key)\n" for name in _STEPS)


@pytest.mark.thorough
def test_each_trap_takes_the_form_of_shard_map_with_its_reason(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("flax")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(_program())
    options = MigrationOptions(to="jit")

    def again(fallbacks):
        lines = {line: fallback for (_, line), fallback in fallbacks.items()}
        return migration.migrate(["a.py"], MigrationOptions(to="jit", fallbacks={"a.py": lines}))

    files = migration.migrate(["a.py"], options)
    (file,), verification = trial.verify([sys.executable, "a.py"], files, again)
    places = [place for place in file.places if place.is_mapped]

    assert verification.problems == []
    reasons = {
        name: place.reason.removeprefix("stays in shard_map: ")
        for name, place in zip(_STEPS, places, strict=True)
    }
    assert reasons == {name: reason for name, (_, _, reason) in _STEPS.items()}
    assert [place.form for place in places] == [
        "jit" if not r else "shard_map" for r in reasons.values()
    ]
    assert not verification.has_differences
    assert "same in 3 of 3 calls, 3 of them on 1, 2 and all devices" in str(verification)
