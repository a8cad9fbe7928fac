"""`--to global`: trainers whose state is cut give pmap's numbers; others stay, and say why.

One command runs all of them, and shows what each carries.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import recorded

import jax_dist
from jax_dist._compat import CAN_REWRITE
from jax_dist.global_view.view import GlobalView
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import UNSHOWN, FileMigration

_OPTIONS = MigrationOptions(to="global", is_tried=True)
_ROOT = pathlib.Path(jax_dist.__file__).parents[1]

_TOP = """\
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils
from flax.training import common_utils


def loss_of(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def initial():
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (64, 256)) / 8,
        "out": jax.random.normal(keys[1], (256, 16)) / 16,
    }


def batches():
    for seed in range(3):
        random = np.random.default_rng(seed)
        x, y = random.normal(size=(32, 64)), random.normal(size=(32, 16))
        yield {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def update(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    grads = jax.lax.pmean(grads, "batch")
    return jax.tree.map(lambda p, g: p - 0.125 * g, params, grads), jax.lax.pmean(loss, "batch")
"""

_TRAINERS = {
    "replicated above the step": """\
def result():
    params = initial()
    params = jax_utils.replicate(params)
    p_step = jax.pmap(
        update,
        axis_name="batch",
        donate_argnums=(0,),  # the old one is not needed
    )
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
    return loss, jax_utils.unreplicate(params)
""",
    "decorated, with statistics that are not synchronised": """\
@functools.partial(jax.pmap, axis_name="batch", donate_argnums=(0,))
def train_step(state, batch):
    params, loss = update(state["params"], batch)
    mean = 0.5 * state["mean"] + 0.5 * batch["x"].mean()
    return {"params": params, "mean": mean, "step": state["step"] + 1}, {"loss": loss}


def result():
    state = {"params": initial(), "mean": jnp.float32(0), "step": 0}
    state = jax_utils.replicate(state)
    losses = []
    for rows in batches():
        state, metrics = train_step(state, common_utils.shard(rows))
        losses.append(float(jax_utils.unreplicate(metrics)["loss"]))
    return losses, jax_utils.unreplicate(state)
""",
    "evaluated by another mapped function": """\
train_step = jax.pmap(update, axis_name="batch", donate_argnums=0)
evaluate = jax.pmap(lambda params, batch: jax.lax.pmean(loss_of(params, batch), "batch"), "batch")


def result():
    params = jax_utils.replicate(initial())
    found = []
    for rows in batches():
        batch = common_utils.shard(rows)
        params, loss = train_step(params, batch)
        found.append(np.asarray(evaluate(params, batch)))
    return found, loss, jax_utils.unreplicate(params)
""",
    "two arguments that come back": """\
def step(params, moment, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    grads = jax.lax.pmean(grads, "batch")
    moment = jax.tree.map(lambda m, g: 0.5 * m + g, moment, grads)
    return jax.tree.map(lambda p, m: p - 0.125 * m, params, moment), moment, loss


p_step = jax.pmap(
    step,
    axis_name="batch",
    donate_argnums=(0, 1),
)


def result():
    params = initial()
    moment = jax_utils.replicate(jax.tree.map(jnp.zeros_like, params))
    params = jax_utils.replicate(params)
    losses = []
    for rows in batches():
        params, moment, loss = p_step(params, moment, common_utils.shard(rows))
        losses.append(loss)
    return losses, jax.tree.map(lambda x: x[0], params)
""",
    "a whole result, and a copy that is read before the next step": """\
def step(params, batch):
    return update(params, batch)[0]


p_step = jax.pmap(step, axis_name="batch", donate_argnums=0)


def result():
    params = jax_utils.replicate(initial())
    kept = []
    for rows in batches():
        params = p_step(params, common_utils.shard(rows))
        kept.append(jax_utils.unreplicate(params))
    return kept
""",
    "a key for each device": """\
def step(state, key, batch):
    noise = jax.random.normal(key, state["in"].shape) / 64
    grads = jax.grad(loss_of)({**state, "in": state["in"] + noise}, batch)
    grads = jax.lax.pmean(grads, "batch")
    return jax.tree.map(lambda p, g: p - 0.125 * g, state, grads)


p_step = jax.pmap(step, "batch", in_axes=(0, 0, 0))


def result():
    state = jax_utils.replicate(initial())
    for seed, rows in enumerate(batches()):
        keys = jax.random.split(jax.random.key(seed), jax.local_device_count())
        state = p_step(state, keys, common_utils.shard(rows))
    return jax_utils.unreplicate(state)
""",
    "made and trained in one function": """\
def result():
    p_step = jax.pmap(update, axis_name="batch", donate_argnums=0)
    params = jax_utils.replicate(initial(), jax.local_devices())
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
    return loss, jax.tree.map(lambda x: x[0], params)
""",
    "functions that are not seen": """\
p_step = jax.pmap(update, axis_name="batch", donate_argnums=0)
HOOKS = {
    "average": jax.pmap(lambda p: jax.lax.pmean(p, "batch"), axis_name="batch"),
    "save": lambda p: jax.tree.map(lambda x: np.asarray(x[0]).copy(), p),
}


def result():
    params = jax_utils.replicate(initial())
    saved = []
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
        saved.append(HOOKS["save"](params))
    params = HOOKS["average"](params)
    sizes = jax.tree.map(lambda x: x.size, params)
    return saved, sizes, [params["in"] * 2], jax_utils.unreplicate(params)
""",
    "a state that is read, changed and given back": """\
p_step = jax.pmap(update, axis_name="batch")


def train(params, count):
    for rows in [*batches()][:count]:
        params, loss = p_step(params, common_utils.shard(rows))
    return params, loss


def result():
    params = jax_utils.replicate(initial())
    params, loss = train(params, 2)
    params = {**params, "out": 0.5 * params["out"]}
    params, loss = train(params, 3)
    return params, loss, jax_utils.unreplicate(params)["in"]
""",
    "the first of each leaf": """\
def result():
    params = jax_utils.replicate(initial())
    p_step = jax.pmap(update, axis_name="batch")  # the step
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
    doubled = jax.tree.map(lambda leaf: (leaf[0] + leaf[0], leaf[0].sum()), params)
    return doubled, jax.tree.map(lambda leaf: leaf[0] + leaf.sum(0), params)
""",
    "a key for each device is carried, too": """\
def step(params, key, batch):
    key, own = jax.random.split(key)
    noise = jax.random.normal(own, params["in"].shape) / 64
    grads = jax.grad(loss_of)({**params, "in": params["in"] + noise}, batch)
    grads = jax.lax.pmean(grads, "batch")
    return jax.tree.map(lambda p, g: p - 0.125 * g, params, grads), key


p_step = jax.pmap(step, "batch", donate_argnums=(0,))


def result():
    params = jax_utils.replicate(initial())
    keys = jax.random.split(jax.random.key(1), jax.local_device_count())
    for rows in batches():
        params, keys = p_step(params, keys, common_utils.shard(rows))
    return jax.random.key_data(keys), jax_utils.unreplicate(params)
""",
    "a state that is stacked where nobody sees it": """\
p_step = jax.pmap(update, axis_name="batch")


def result():
    found = []
    for resumes in (True, False):
        if resumes:
            params = {k: jax.device_put(np.stack([v] * 8)) for k, v in initial().items()}
            params = {k: jax.pmap(lambda x: 2 * x)(v) for k, v in params.items()}
        else:
            params = jax_utils.replicate(initial())
        for rows in batches():
            params, loss = p_step(params, common_utils.shard(rows))
        found.append(jax_utils.unreplicate(params))
    return found
""",
}


_LEFT = {
    "its new state is not its first result": """\
p_step = jax.pmap(lambda p, b: update(p, b)[::-1], axis_name="batch")


def result():
    params = jax_utils.replicate(initial())
    for rows in batches():
        loss, params = p_step(params, common_utils.shard(rows))
    return jax_utils.unreplicate(params)
""",
    "its state is not followed to the end (line 40 sets an entry of tree by a name": """\
p_step = jax.pmap(update, axis_name="batch")


def halve(tree, name):
    tree[name] = 0.5 * tree[name]


def between(tree):
    halve(tree, "out")


def result():
    params = jax_utils.replicate(initial())
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
        between(params)
        params["in"] = 2 * params["in"]
    return jax_utils.unreplicate(params)
""",
    "its state is not followed to the end (line 43 calls jax.tree.map, and never ran)": """\
p_step = jax.pmap(update, axis_name="batch")
RESUMES = False


def result():
    params = jax_utils.replicate(initial())
    if RESUMES:
        params = jax.tree.map(lambda x: np.stack([x] * jax.local_device_count()), initial())
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
    return jax_utils.unreplicate(params)
""",
    "it has out_axes": """\
p_step = jax.pmap(update, axis_name="batch", out_axes=(0, None))


def result():
    params = jax_utils.replicate(initial())
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
    return jax_utils.unreplicate(params)
""",
    "nothing shows where its argument 0 is replicated": """\
p_step = jax.pmap(update, axis_name="batch")


def result():
    params = jax.tree.map(lambda x: np.stack([x] * 8), initial())
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
""",
    "its state is replicated above the step": """\
def result():
    params = jax_utils.replicate(initial())
    print(jax_utils.unreplicate(params)["in"].shape)
    p_step = jax.pmap(update, axis_name="batch")
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
    return jax_utils.unreplicate(params)
""",
    "another mapped function carries the same state": """\
p_step = jax.pmap(update, axis_name="batch")
p_other = jax.pmap(lambda p, b: (jax.tree.map(lambda x: x * 2, p), 0.0), axis_name="batch")


def result():
    params = jax_utils.replicate(initial())
    for rows in batches():
        params, loss = p_step(params, common_utils.shard(rows))
        params, loss = p_other(params, common_utils.shard(rows))
    return jax_utils.unreplicate(params)
""",
    "no argument of it comes back as a result": """\
p_loss = jax.pmap(loss_of, axis_name="batch", in_axes=(None, 0))


def result():
    return [p_loss(initial(), common_utils.shard(rows)) for rows in batches()]
""",
    "it has devices, and a global view runs on a mesh": """\
p_step = jax.pmap(update, axis_name="batch", devices=jax.devices()[:4])
""",
    "it has no axis name": """\
p_step = jax.pmap(lambda p: p)
""",
    "the mapped function has no name of its own": """\
class Trainer:
    def __init__(self):
        self.step = jax.pmap(update, axis_name="batch")

    def train(self):
        params = jax_utils.replicate(initial())
        for rows in batches():
            params, loss = self.step(params, common_utils.shard(rows))
        return jax_utils.unreplicate(params)


def result():
    return Trainer().train()
""",
}


_CASES = {**_TRAINERS, **_LEFT}
_MODULE = {name: f"case_{number}" for number, name in enumerate(_CASES)}


@pytest.fixture(scope="module")
def ran(made_once: Callable[..., Any]) -> recorded.Recorded:
    pytest.importorskip("flax")
    if not CAN_REWRITE:
        pytest.skip("a global view needs jax 0.10")
    return recorded.once(made_once, {_MODULE[name]: _text(name) for name in _CASES})


def _text(name: str) -> str:
    return f"{_TOP}\n\n{_CASES[name]}"


def _migrated(ran: recorded.Recorded, name: str) -> FileMigration:
    return ran.to(_MODULE[name], _OPTIONS)


def _ran(text: str) -> tuple[Any, list[GlobalView]]:
    names: dict[str, Any] = {"__name__": "case"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        exec(compile(text, "case.py", "exec"), names)
        found = names["result"]()
    return found, [each for each in names.values() if isinstance(each, GlobalView)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(_TRAINERS))
def test_a_trainer_gives_the_same_with_its_state_cut(name: str, ran: recorded.Recorded):
    after = _migrated(ran, name).after.decode()
    (old, _), (new, views) = _ran(_text(name)), _ran(after)

    assert "jax_dist.global_view" in after
    assert " jax_utils.replicate(" not in after.partition("def result()")[2]
    assert jax.tree.structure(old) == jax.tree.structure(new)
    for one, other in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    for view in views:
        kept = {leaf.path: leaf for leaf in view.report().leaves}
        cut = [leaf for path, leaf in kept.items() if "'in'" in path]
        assert cut
        assert all(leaf.shared and any(leaf.sharding.spec) for leaf in cut)


@pytest.mark.parametrize("reason", list(_LEFT))
def test_what_is_not_followed_stays_and_says_why(reason: str, ran: recorded.Recorded):
    found = _migrated(ran, reason)

    assert found.after == found.before
    assert any(each.why.startswith(reason) for each in found.outcomes), found.outcomes
    assert {each.status for each in found.outcomes} == {"left"}


@pytest.mark.parametrize("promised", [False, True])
def test_several_processes_stay_with_pmap(tmp_path: pathlib.Path, *, promised: bool):
    text = (
        _TOP + "\n\njax.distributed.initialize()\n" + _TRAINERS["made and trained in one function"]
    )
    path = tmp_path / "train.py"
    path.write_text(text)
    options = dataclasses.replace(_OPTIONS, promises=Promises(one_process=promised))
    [found], _ = migration.migrate([str(path)], options)

    assert not found.changed
    [reason] = [each.reason for each in found.outcomes]
    assert reason.startswith(UNSHOWN if promised else "the program may run in several processes")


def test_the_new_text_reads_well(ran: recorded.Recorded):
    found = _migrated(ran, "evaluated by another mapped function")
    one, other = (each.decode().splitlines() for each in (found.before, found.after))
    gone, added = (
        [line.strip() for line in lines if line not in others]
        for lines, others in ((one, other), (other, one))
    )

    assert gone == [
        "from flax import jax_utils",
        'train_step = jax.pmap(update, axis_name="batch", donate_argnums=0)',
        "params = jax_utils.replicate(initial())",
        "found.append(np.asarray(evaluate(params, batch)))",
        "return found, loss, jax_utils.unreplicate(params)",
    ]
    assert added == [
        "import jax_dist",
        'train_step = jax_dist.global_view(update, axis_name="batch", donate_argnums=0, state=0, '
        'shardings="fsdp")',
        "params = train_step.place(initial(), stacked=False)",
        "found.append(np.asarray(evaluate(train_step.stacked(params), batch)))",
        "return found, loss, train_step.first(params)",
    ]


def test_one_copy_of_a_leaf_is_read_where_the_function_takes_leaves(ran: recorded.Recorded):
    found = _migrated(ran, "the first of each leaf").after.decode()

    assert 'shardings="fsdp")  # the step\n    params = p_step.place(' in found
    assert "lambda leaf: (p_step.first(leaf) + p_step.first(leaf), " in found
    assert "lambda leaf: p_step.first(leaf) + p_step.stacked(leaf).sum(0), params)" in found


@pytest.mark.thorough
@pytest.mark.skipif(not CAN_REWRITE, reason="a global view needs jax 0.10")
def test_the_command_puts_a_step_back_where_two_runs_differ(tmp_path: pathlib.Path):
    """A function of another file changes the state in place, which a copy would hide."""
    pytest.importorskip("flax")
    program = _TRAINERS["a whole result, and a copy that is read before the next step"]
    (tmp_path / "good.py").write_text(f"{_TOP}\n\n{program}")
    changed = program.replace("kept.append", "tools.halve(params)\n        kept.append")
    (tmp_path / "bad.py").write_text(f"import tools\n{_TOP}\n\n{changed}")
    (tmp_path / "tools.py").write_text("def halve(tree):\n    tree.update(out=tree['out'] / 2)\n")
    (tmp_path / "main.py").write_text("import bad, good\n\ngood.result(), bad.result()\n")
    options = ("--to", "global", "--write", "--verify", "good.py", "bad.py", "--", sys.executable)
    ran = subprocess.run(
        [sys.executable, "-m", "jax_dist", "migrate", *options, "main.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "two runs, before and after" in ran.stdout, ran.stdout + ran.stderr
    assert "p_step.place(initial(), stacked=False)" in (tmp_path / "good.py").read_text()
    assert "global_view" not in (tmp_path / "bad.py").read_text()
    assert "bad.py:41: --verify saw it compute something else" in ran.stderr
