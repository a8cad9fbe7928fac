"""`--to shard_map` and `--to jit`: what is left, what is no plain jit, and two processes."""

import json
import pathlib
import textwrap
from typing import Any

import pytest
import test_golden as golden

from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.testing import run_processes

_HEAD = "import functools\nimport jax\nimport jax.numpy as jnp\nfrom flax import jax_utils\n\n"

_LEFT = {
    "arguments by **": (
        "f = jax.pmap(abs, **options)\nf(x)\n",
        "its arguments are given by **kwargs",
    ),
    "a backend": ("f = jax.pmap(abs, backend='cpu')\nf(x)\n", "backend has no counterpart"),
    "calls elsewhere": ("f = jax.pmap(abs)\n", "its calls are not in this file"),
    "another axis": (
        "f = jax.pmap(abs, in_axes=1)\nf(x)\n",
        "in_axes maps another axis than 0, or parts of an argument",
    ),
    "results on another axis": (
        "f = jax.pmap(abs, out_axes=1)\nf(x)\n",
        "out_axes places the mapped axis elsewhere",
    ),
    "handed on": (
        "import other\nf = jax.pmap(abs)\nother.train(f)\n",
        "the mapped function goes where its calls are not seen",
    ),
    "arguments by *": ("f = jax.pmap(abs)\nf(*xs)\n", "a call gives arguments by * or **"),
    "arguments that differ": (
        "f = jax.pmap(max)\nf(x)\nf(x, y)\n",
        "its calls give different arguments",
    ),
    "a computed static position": (
        "f = jax.pmap(max, static_broadcasted_argnums=n)\nf(x, 1)\n",
        "static_broadcasted_argnums is computed",
    ),
    "one call of two mapped functions": (
        "f = jax.pmap(abs)\nif x is None:\n    f = jax.pmap(max)\nf(x)\n",
        "a call of it is inside of another mapped function, or may be one of another",
    ),
    "a state that is read elsewhere": (
        "import other\nf = jax.pmap(max)\n\n\ndef main(x):\n    s = other.make()\n"
        "    for _ in range(3):\n        s = f(s, x)\n    return s\n",
        "its state keeps the device axis: it is read where that is not seen",
    ),
}


def test_a_value_that_a_statement_only_names_is_followed():
    """As the last line of a notebook's cell, which shows the value."""
    text = f"{_HEAD}f = jax.pmap(abs)\nx = f(jnp.arange(8))\nx\n"

    assert golden.migrate(text, "shard_map").problem == ""


@pytest.mark.parametrize("name", _LEFT)
def test_a_place_is_left_with_the_reason(name: str):
    text, reason = _LEFT[name]
    result = golden.migrate(_HEAD + text, "shard_map")

    assert not result.changed
    assert {place.reason for place in result.places} == {reason}
    assert all(place.by_hand for place in result.places)


_STEP = """\
def step(w, x{more}):
    {body}


def main(w, batches, key):
    f = jax.pmap(step, axis_name="i")
    w = jax_utils.replicate(w)
    keys = jax.random.split(key, jax.local_device_count())
    for batch in batches:
        w = f(w, batch{keys})
    return jax_utils.unreplicate(w)
"""
_TRAPS = {
    "its index": (
        "return jax.lax.pmean(w + jax.lax.axis_index('i'), 'i')",
        "the step asks for its device, as for a key of its own",
    ),
    "a gather": (
        "return w + jax.lax.all_gather(x, 'i').mean()",
        "the step gathers from the other devices",
    ),
    "a maximum": (
        "return w + jax.lax.pmax(x, 'i').max()",
        "the step takes a maximum over the devices",
    ),
    "a minimum": (
        "return w + jax.lax.pmin(x, 'i').min()",
        "the step takes a minimum over the devices",
    ),
    "a neighbour": (
        "return w + jax.lax.ppermute(x, 'i', [(0, 1)]).sum()",
        "the step sends to another device",
    ),
    "the number of devices": (
        "return w + x.sum() / jax.lax.psum(1, 'i')",
        "the step counts its devices",
    ),
    "batch norm": (
        "return jax.lax.pmean(norm(x, 'i'), 'i') + w",
        "the step hands the name of its axis on, as to batch norm",
    ),
    "a scatter": (
        "return w + jax.lax.psum_scatter(x, 'i')",
        "the step uses psum_scatter over its axis",
    ),
}


@pytest.mark.parametrize("name", _TRAPS)
def test_a_step_that_needs_its_device_is_no_jit_alone(name: str):
    body, reason = _TRAPS[name]
    text = _STEP.format(body=body, more="", keys="").replace("'i'", '"i"')
    result = golden.migrate(_HEAD + text, "jit")

    assert [place.form for place in result.places] == ["shard_map"]
    assert result.places[0].reason == f"stays in shard_map: {reason}"
    assert "jax.shard_map(" in result.after.decode()


def test_a_state_may_be_deleted():
    text = _STEP.format(body='return w - jax.lax.pmean(x.mean(0), "i")', more="", keys="")
    text = text.replace("batch)\n", "batch)\n        if batch is None:\n            del w\n")
    result = golden.migrate(_HEAD + text, "shard_map")

    assert [place.form for place in result.places] == ["shard_map"]
    assert "w = jax.device_put(w, NamedSharding(mesh, P()))" in result.after.decode()


_SHARED = """\
def main(w, batches):
    f = jax.pmap(lambda w, x: w - jax.lax.pmean(x, "i"), "i", in_axes=(None, 0), out_axes=None)
    for x in batches:
        w = f(w, x)
        w = f(w, x)
        late = f(late, x)
"""


def test_a_state_that_no_axis_maps_is_put_on_the_mesh_once():
    after = golden.migrate(_HEAD + _SHARED, "shard_map").after.decode()

    assert after.count("w = jax.device_put(w, NamedSharding(mesh, P()))\n    f = ") == 1
    assert "late = jax.device_put" not in after  # not defined above


def test_a_state_on_the_mesh_is_a_global_array_for_orbax():
    name = "fully_replicated_host_local_array_to_global_array"
    text = f"    # Orbax takes no arrays from pmap.\n    new = jax.tree.map(ocp.utils.{name}, w)\n"
    text = f"import orbax.checkpoint as ocp\n{_HEAD}{_SHARED}{text}    ocp.save(path, new)\n"
    after = golden.migrate(text, "shard_map").after.decode()

    assert after.endswith("(sharded, x))\n    new = w\n    ocp.save(path, new)\n")


@pytest.mark.parametrize("place", ["w = jax_utils.replicate(w)", "print(w)"])
def test_a_state_of_a_checkpoint_goes_by_way_of_the_host(place: str):
    """Several processes cannot put an array on one mesh that is committed to a device."""
    text = _SHARED.replace("        late = f(late, x)\n", "")
    text = text if "print" in place else text.replace(", in_axes=(None, 0), out_axes=None", "")
    text = text.replace(
        ":\n", f":\n    w = checkpoints.restore_checkpoint(path, w)\n    {place}\n", 1
    )
    after = golden.migrate(_HEAD + text, "shard_map").after.decode()

    assert "    w = jax.device_put(jax.device_get(w), NamedSharding(mesh, P()))\n" in after


_ITERATOR = """\
def split(batch):
    return jax.tree.map(lambda x: x.reshape((jax.device_count(), -1)), batch)


def main(w, data, other):
    f = jax.pmap(lambda w, x: jax.lax.pmean(w - x, "i"), "i")
    w = jax_utils.replicate(w)
    it = map(split, data)
    for x in it:
        w = f(w, x)
"""


def test_a_split_that_no_call_needs_is_removed():
    after = golden.migrate(_HEAD + _ITERATOR, "shard_map").after.decode()

    assert "def split(batch):\n    return batch\n" in after
    assert "x = jax.make_array_from_process_local_data(sharded, x)\n        w = f(w, x)" in after


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("w = f(w, x)", "w = f(w, x)\n        print(x)"),
        ("w = f(w, x)", "w = f(w, x)\n    w = f(w, other(next(it)))"),
        ("w = f(w, x)", "w = f(w, x)\n    other(it)"),
        ("w = f(w, x)", "w = f(w, x)\n    other(split(data))"),
        ("    for", "    it = other or it\n    for"),
    ],
)
def test_a_split_that_other_code_may_need_stays(old: str, new: str):
    text = _HEAD + _ITERATOR.replace(old, new)
    after = golden.migrate(text, "shard_map").after.decode()

    assert "x.reshape((jax.device_count(), -1))" in after
    assert "x = jax.tree.map(lambda x: x[0], x)" in after


def test_a_step_over_the_whole_batch_has_no_helper_and_no_collective():
    text = _STEP.format(
        body='return w - jax.lax.pmean(jax.grad(loss)(w, x), "i")', more="", keys=""
    )
    after = golden.migrate(_HEAD + text, "jit").after.decode()

    assert "pmean" not in after
    assert "shard_map" not in after
    assert "jax_dist" not in after
    assert "return w - jax.grad(loss)(w, x)\n" in after


@pytest.mark.parametrize(
    ("call", "remains"),
    [
        ('norm(x, axis_name="i")', "norm(x)"),
        ('norm(axis_name="i", x=x)', "norm(x=x)"),
        ('norm(jax.random.fold_in(x, jax.lax.axis_index("i")))', "norm(x)"),
    ],
)
def test_a_step_over_the_whole_batch_names_no_axis(call: str, remains: str):
    text = _STEP.format(body=f'return w - jax.lax.pmean({call}, "i")', more="", keys="")
    after = golden.migrate(_HEAD + text, "jit").after.decode()

    assert f"return w - {remains}\n" in after


_SPLIT = "jax.random.split(key, jax.local_device_count())"


@pytest.mark.parametrize(
    ("old", "new", "argument"),
    [
        ("", "", "keys"),
        (f"    keys = {_SPLIT}\n", "", _SPLIT),
    ],
)
def test_a_step_over_the_whole_batch_takes_one_key(old: str, new: str, argument: str):
    body = 'return w - jax.lax.pmean(loss(w, x, key), "i")'
    text = _STEP.format(body=body, more=", key", keys=f", {argument}").replace(old, new)
    result = golden.migrate(_HEAD + text, "jit")
    after = result.after.decode()

    assert [place.form for place in result.places] == ["jit"]
    assert "split" not in after
    assert "in_shardings=(replicated, sharded, replicated)," in after
    assert ("    keys = key\n" in after) == (argument == "keys")


def test_what_a_jitted_step_reads_of_its_arguments_is_to_be_reviewed_if_it_does_not_run():
    text = _STEP.format(body='return w - jax.lax.pmean(x.mean(0), "i")', more="", keys="")
    line = (_HEAD + text).splitlines().index('    return w - jax.lax.pmean(x.mean(0), "i")') + 1

    assert line in golden.migrate(_HEAD + text, "jit").changed_reads
    assert line not in golden.migrate(_HEAD + text, "shard_map").changed_reads


def test_a_jit_takes_arguments_by_position():
    body = 'return w - jax.lax.pmean(loss(w, x, key), "i")'
    text = _STEP.format(body=body, more=", rate=1.0, key=None", keys=", key=keys")
    after = golden.migrate(_HEAD + text, "jit").after.decode()

    assert "lambda w, x, key: step(w, x, key=key)," in after
    assert "w = f(w, batch, keys)\n" in after


def test_keys_that_the_program_reads_itself_stay_one_for_each_device():
    body = 'return w - jax.lax.pmean(loss(w, x, key), "i")'
    text = _STEP.format(body=body, more=", key", keys=", keys")
    text = text.replace("return jax_utils.unreplicate(w)", "return jax_utils.unreplicate(w), keys")
    result = golden.migrate(_HEAD + text, "jit")

    assert [place.reason for place in result.places] == ["stays in shard_map: keys per device"]


@pytest.mark.parametrize(
    ("line", "remains"),
    [
        ('x = jax.lax.pmean(x, "i")', ""),
        ('w, x = jax.lax.pmean((w, x), "i")', ""),
        ('loss = jax.lax.pmean(loss(), "i")', "    loss = loss()\n"),  # no other name for it
    ],
)
def test_a_reduction_of_its_own_target_is_removed(line, remains):
    text = _STEP.format(body=f"{line}\n    return w - x.mean(0)", more="", keys="")
    after = golden.migrate(_HEAD + text, "jit").after.decode()

    assert f"def step(w, x):\n{remains}    return w - x.mean(0)\n" in after


def test_a_reduction_stays_where_a_step_of_shard_map_needs_it():
    text = _STEP.format(body='return w - jax.lax.pmean(x.mean(0), "i")', more="", keys="")
    second = '    g = jax.pmap(step, axis_name="i")\n    w = g(w, batch)\n'
    text = (_HEAD + text).replace("    return jax_utils", f"{second}    return jax_utils")
    fallbacks: Any = {"a.py": {16: ("shard_map", "it differs")}}
    both = migration.migrate_text("a.py", text.encode(), MigrationOptions("jit"))
    one = migration.migrate_text(
        "a.py", text.encode(), MigrationOptions("jit", fallbacks=fallbacks)
    )

    assert both is not None
    assert one is not None
    assert [place.form for place in both.places] == ["jit", "jit"]
    assert [place.reason.partition(": ")[2] for place in one.places] == [
        "another mapped function shares its reductions or keys",
        "it differs",
    ]
    assert b"pmean" in one.after


_TWO = (
    "steps_train_loop",
    "steps_of_a_factory",
    "steps_of_a_learner",
    "steps_handed_on",
    "steps_of_evolution",
)


def run_both() -> dict[str, Any]:
    """Run programs before and after, in this one of several processes."""
    return {
        name: [
            [leaf.value for leaf in golden.run(golden.read(name, stem), f"{name}_{stem}")]
            for stem in ("before", "after_shard_map")
        ]
        for name in _TWO
    }


@pytest.mark.thorough
def test_the_same_text_runs_in_two_processes():
    pytest.importorskip("flax")
    outcomes = run_processes(run_both, cpu_devices=4, timeout=300)

    assert [outcome.error for outcome in outcomes] == [None, None]
    for outcome in outcomes:
        for name, (before, after) in outcome.value.items():
            assert before == after, name


def test_a_file_goes_back_to_the_vendored_module_as_a_whole():
    text = _STEP.format(body='return w - jax.lax.pmean(x.mean(0), "i")', more="", keys="")
    text = (_HEAD + text).encode()
    fallbacks: Any = {"a.py": {12: ("vendored", "it computes something else")}}
    result = migration.migrate_text(
        "a.py", text, MigrationOptions("shard_map", fallbacks=fallbacks)
    )
    vendored = migration.migrate_text("a.py", text, MigrationOptions("vendored"))

    assert result is not None
    assert result == vendored
    assert result.needs_module


_READS = {
    "a method": ("state.save(path)", "stacked(state).save(path)"),
    "a field": ("save(state.params)", "save(stacked(state.params))"),
    "a wait": (
        "pause(wait_for=(state.params, state.opt))",
        "pause(wait_for=(state.params, state.opt))",
    ),
}


@pytest.mark.parametrize("name", _READS)
def test_other_code_gets_the_copies_of_a_state(name: str):
    before, after = _READS[name]
    text = "def main(state, x):\n    f = jax.pmap(step)\n    state = jax_utils.replicate(state)\n"
    text += f"    for _ in range(2):\n        state = f(state, x)\n    {before}\n"

    assert f"    {after}\n" in golden.migrate(_HEAD + text, "shard_map").after.decode()


def test_a_result_is_stacked_if_one_of_its_calls_needs_all_copies():
    text = "def main(x):\n    f = jax.pmap(abs)\n    first = jax_utils.unreplicate(f(x))\n"
    after = golden.migrate(f"{_HEAD}{text}    return first, f(x)\n", "shard_map").after.decode()

    assert 'out_specs=P("devices"),' in after
    assert "first = jax_utils.unreplicate(f(" in after


def test_comments_of_the_old_call_stay():
    text = textwrap.dedent(
        """\
        def main(w, x):
            w = jax_utils.replicate(w)
            f = jax.pmap(
                step,
                axis_name="i",
                donate_argnums=(0,),  # not needed any more
            )
            return jax_utils.unreplicate(f(w, x))
        """
    )
    after = golden.migrate(_HEAD + text, "shard_map").after.decode()

    assert after.count("# not needed any more") == 1


_LAYOUTS = {
    "the mesh stands above a comment": (
        "def main(w, x):\n    # Replicate.\n    w = jax_utils.replicate(w)\n"
        "    return jax.pmap(jnp.add, 'i')(w, x)\n",
        "    sharded = NamedSharding(mesh, P('i'))\n\n    # Replicate.\n    w = jax.device_put(w, ",
    ),
    "but below the mark of a cell": (
        "# %%\nw = jax_utils.replicate(w)\nprint(jax.pmap(jnp.add, 'i')(w, x))\n",
        "# %%\nmesh = jax.sharding.Mesh(",
    ),
    "a function stands above a comment": (
        "def main(x):\n    n = 2\n    # All of it.\n    return jax.pmap(jnp.cumsum, 'i')(x)\n",
        "jnp.cumsum(x0))\n\n    # All of it.\n    return jax.jit(",
    ),
    "a sharding that is needed once is written there": (
        "def main(w, x):\n    w = jax_utils.replicate(w)\n    return jax.pmap(jnp.add)(w, x)\n",
        "w = jax.device_put(w, NamedSharding(mesh, P()))\n",
    ),
    "one that is needed twice is a variable": (
        "def main(w, v):\n    w, v = jax_utils.replicate(w), jax_utils.replicate(v)\n"
        "    return jax.pmap(jnp.add)(w, v)\n",
        "    replicated = NamedSharding(mesh, P())\n"
        "    w, v = jax.device_put(w, replicated), jax.device_put(v, replicated)\n",
    ),
    "arguments go by position": (
        "def step(x, cfg, rng=None):\n    return x\n\n\ndef main(x, k, c):\n"
        "    ks = jax.random.split(k, jax.local_device_count())\n"
        "    return jax.pmap(functools.partial(step, cfg=c))(x, rng=ks)\n",
        "step(x, c, rng[0])",
    ),
    "but literals by name": (
        "def step(x, train):\n    return x\n\n\ndef main(x):\n"
        "    return jax.pmap(functools.partial(step, train=True))(x)\n",
        "step(x, train=True)",
    ),
    "and those of a function that others may decorate": (
        "@other\ndef step(x, cfg):\n    return x\n\n\ndef main(x, c):\n"
        "    return jax.pmap(functools.partial(step, cfg=c))(x)\n",
        "step(x, cfg=c)",
    ),
    "static arguments of a decorator that do not come first": (
        "# The step.\n@functools.partial(jax.pmap, static_broadcasted_argnums=1)  # slow\n"
        "def step(x, n):\n    return x * n\n\n\ndef main(x):\n"
        "    x = jax_utils.replicate(x)\n    return step(x, 2)[0]\n",
        "# The step.\n@functools.partial(jax.jit, static_argnums=(1,))  # slow\ndef step(x, n):\n"
        "    return jax.shard_map(\n        lambda x: _step(x, n),\n",
    ),
    "a bare tuple whose first item is in parentheses": (
        "@jax.pmap\ndef f(x):\n    return (x + 1), x\n\n\nprint(f(xs))\n",
        "return jax.tree.map(lambda x: x[None], ((x + 1), x))\n",
    ),
    "comments between the arguments of calls": (
        "def main(w, x):\n    w = jax_utils.replicate(  # copies\n        w  # of a state\n    )\n"
        "    return jax.pmap(jnp.add)(  # add\n        w, x  # to it\n    )\n",
        "    # copies\n    # of a state\n    w = jax.device_put(w, ",
    ),
}


@pytest.mark.parametrize("name", _LAYOUTS)
def test_new_text_reads_as_if_written_by_hand(name: str):
    text, expected = _LAYOUTS[name]

    assert expected in golden.migrate(_HEAD + text, "shard_map").after.decode()


def test_new_lines_stay_in_their_cell_of_a_notebook():
    above = _HEAD + "# The end."
    sources = [above, "# Replicate.\nw = jax_utils.replicate(w)", "print(jax.pmap(jnp.add)(w, x))"]
    cells = [{"cell_type": "code", "source": text.splitlines(keepends=True)} for text in sources]
    text = json.dumps({"cells": cells, "nbformat": 4})
    result = migration.migrate_text("a.ipynb", text.encode(), MigrationOptions(to="shard_map"))
    after = ["".join(cell["source"]) for cell in json.loads(result.after)["cells"]]

    assert after[0].endswith("# The end.")
    assert after[1].startswith("mesh = ")
    assert "\n\n# Replicate.\nw = jax.device_put(" in after[1]


def test_slices_are_taken_above_the_decorators_of_an_inner_function():
    text = '@functools.partial(jax.pmap, axis_name="i")\ndef f(x):\n    @jax.grad\n'
    text += "    def g(y):\n        return y\n\n    return g(x)\n\n\nprint(f(xs))\n"
    after = golden.migrate(_HEAD + text, "shard_map").after.decode()

    assert "x = jax.tree.map(lambda x: x[0], x)  # of this device\n\n    @jax.grad\n" in after


def test_a_function_on_one_line_gets_a_body():
    text = '@functools.partial(jax.pmap, axis_name="i")\ndef f(x): return x\n\n\nprint(f(xs))\n'
    after = golden.migrate(_HEAD + text, "shard_map").after.decode()

    assert "def f(x):\n    x = jax.tree.map(lambda x: x[0], x)  # of this device\n" in after


def test_every_program_has_both_targets():
    for folder in pathlib.Path(golden.__file__).parent.glob("golden/steps_*"):
        assert {path.stem for path in folder.glob("after_*.py")} >= {"after_shard_map", "after_jit"}


@pytest.mark.parametrize("sizes", ["(n, 2, -1) + x.shape[1:]", "(n, 2, k, *x.shape[1:])"])
def test_a_batch_that_gets_two_dimensions_keeps_them(sizes: str):
    text = f"n, k = jax.device_count(), 4\nx = x.reshape({sizes})\nprint(jax.pmap(f)(x))\n"
    after = golden.migrate(_HEAD + text, "shard_map").after.decode()

    assert f"x.reshape({sizes})" in after


_MODEL = """\
import functools
from flax import linen as nn

norm = functools.partial(
    nn.BatchNorm,
    momentum=0.9,
    axis_name="batch",
)
layer = functools.partial(nn.Dense, axis_name="batch")
"""
_SINGLE = 'from flax import linen as nn\n\nlayer = nn.BatchNorm(axis_name="batch")\n'
_COMMENTED = """\
from flax import linen as nn

layer = nn.BatchNorm(momentum=0.9,  # of the mean
                     axis_name="batch")
"""


@pytest.mark.parametrize(("collective", "form"), [("pmean", "jit"), ("all_gather", "shard_map")])
def test_batch_norms_lose_the_axis_if_all_steps_are_plain_jits(
    tmp_path: pathlib.Path, collective: str, form: str
):
    model, train = tmp_path / "model.py", tmp_path / "train.py"
    model.write_text(_MODEL)
    body = f'return w - jax.lax.{collective}(x.mean(0), "i")'
    train.write_text(_HEAD + _STEP.format(body=body, more="", keys=""))
    files = migration.migrate([str(model), str(train)], MigrationOptions("jit"))

    forms = [place.form for file in files for place in file.places if place.is_mapped]
    changed = [file.after.decode() for file in files if file.path == str(model)]
    without = _MODEL.replace('    axis_name="batch",\n', "", 1)
    assert (forms, changed) == ([form], [without] if form == "jit" else [])


@pytest.mark.parametrize("model", [_SINGLE, _COMMENTED])
def test_the_axis_of_a_batch_norm_goes_alone(tmp_path: pathlib.Path, model: str):
    (tmp_path / "model.py").write_text(model)
    body = 'return w - jax.lax.pmean(x.mean(0), "i")'
    (tmp_path / "train.py").write_text(_HEAD + _STEP.format(body=body, more="", keys=""))
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    files = migration.migrate(paths, MigrationOptions("jit"))

    assert files[0].after.decode() == model.replace('axis_name="batch"', "")


def test_batch_norms_keep_the_axis_if_a_pmap_stays(tmp_path: pathlib.Path):
    (tmp_path / "model.py").write_text(_MODEL)
    body = 'return w - jax.lax.pmean(x.mean(0), "i")'
    text = _HEAD + _STEP.format(body=body, more="", keys="") + "\n\nother(jax.pmap(step))\n"
    (tmp_path / "train.py").write_text(text)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    files = migration.migrate(paths, MigrationOptions("jit"))

    assert {place.status for file in files for place in file.places} == {"done", "left"}
    assert "model.py" not in {pathlib.Path(file.path).name for file in files}
