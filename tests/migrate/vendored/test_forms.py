"""Each form of a mapped function in runs where what a recording showed does not hold.

There are other numbers of devices and slices, keyword calls, and two processes: each form does what
jax.pmap does there, or raises; it never gives other numbers.
"""

import dataclasses
import pathlib
import sys

import forms_compared
import pytest
import recorded

from jax_dist._compat import CAN_REWRITE
from jax_dist.migrate import migration
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.recorded_flow import RecordedFlow
from jax_dist.migrate.results import Form
from jax_dist.testing import run_processes

pytest.importorskip("flax")

_PROGRAM = """\
import jax
import numpy as np
from flax import jax_utils
from flax.training import common_utils

OFFSET = 0


def alone(slices):
    run = jax.pmap(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i")
    return run(np.arange(3.0 * slices, dtype=np.float32).reshape(slices, 3) + OFFSET)


def shared(slices):
    run = jax.pmap(lambda w, x: jax.lax.psum(w * x, "i"), axis_name="i", in_axes=(None, 0))
    return run(np.arange(3, dtype=np.float32), np.ones((slices, 3), np.float32) + OFFSET)


def by_name(slices):
    run = jax.pmap(lambda x: 2 * x)
    return run(x=np.ones((slices, 3), np.float32))


def one_device_fewer(slices):
    run = jax.pmap(lambda x: x + jax.lax.axis_index("i"), "i", devices=jax.local_devices()[1:])
    return run(np.ones((slices, 3), np.float32))


def step(state, batch):
    grads = jax.lax.pmean((state - batch).mean(0), "i")
    return state - 0.5 * grads


def trained(slices):
    update = jax.pmap(step, axis_name="i", donate_argnums=(0,))
    state = jax_utils.replicate(np.arange(3.0, dtype=np.float32))
    for each in range(2):
        rows = np.arange(6.0 * slices, dtype=np.float32).reshape(2 * slices, 3)
        state = update(state, common_utils.shard(rows + each + OFFSET))
    return jax_utils.unreplicate(state)


FOUR = 4


def on_four(slices):  # so often it is called while it is recorded
    run = jax.pmap(lambda x: x - jax.lax.pmean(x, "i"), axis_name="i")
    return run(np.arange(3.0 * slices, dtype=np.float32).reshape(slices, 3) + OFFSET)


def evaluated(slices):
    measure = jax.pmap(lambda x: jax.lax.psum((x**2).sum(), "i"), axis_name="i")
    rows = np.ones((2 * slices, 3), np.float32) + OFFSET
    return jax_utils.unreplicate(measure(common_utils.shard(rows)))
"""
_CALLS = """\
import before

for name in ("alone", "shared", "by_name", "trained", "evaluated"):
    getattr(before, name)(8)
before.on_four(before.FOUR)
"""
_FORMS = {
    "mapped": MigrationOptions(to="jax", plainest=Form.MAPPED),
    "direct": MigrationOptions(to="jax", is_tried=True),
    "idiomatic": dataclasses.replace(recorded.OPTIONS, promises=Promises()),
}
_PLAINEST = {"mapped": Form.MAPPED, "direct": Form.DIRECT, "idiomatic": Form.IDIOMATIC}


def _flow(path: pathlib.Path, calls: str) -> RecordedFlow:
    """What calls of the functions of a file show, on all of 8 devices."""
    run = path.with_name("run_all.py")
    run.write_text(calls)
    flow = recorded.flow([path], [sys.executable, str(run)])
    run.unlink()  # else it is one of the files that may use the program
    return flow


@pytest.fixture(scope="module", params=list(_FORMS))
def form(request, tmp_path_factory) -> tuple[str, pathlib.Path]:
    """Its name, and a folder with the program before and after."""
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "before.py"
    path.write_text(_PROGRAM)
    options = _FORMS[request.param]
    if request.param == "idiomatic":
        if not CAN_REWRITE:
            pytest.skip("jax.pmap was another program")
        options = dataclasses.replace(options, flow=_flow(path, _CALLS))
    files, _ = migration.migrate([str(path)], options, helpers=str(folder / "_mapped.py"))
    forms = {o.form for file in files for o in file.outcomes if o.what == "jax.pmap"}
    assert max(forms) is _PLAINEST[request.param]
    is_cut = any(b"jax.devices()[:4]" in file.after for file in files)
    assert is_cut == (request.param == "idiomatic")
    for file in files:
        name = "after.py" if pathlib.Path(file.path).name == "before.py" else "_mapped.py"
        (folder / name).write_bytes(file.after)
    return request.param, folder


def _verdicts(folder: pathlib.Path, devices: int, processes: int = 1) -> list[dict[str, str]]:
    """By call, for each process."""
    outcomes = run_processes(
        forms_compared.verdicts, str(folder), processes=processes, cpu_devices=devices, timeout=240
    )
    assert [outcome.error for outcome in outcomes] == [None] * processes
    return [outcome.value for outcome in outcomes]


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_one_process(form, devices):
    name, folder = form
    found = _verdicts(folder, devices)[0]

    assert "different" not in found.values()
    assert "raised before" not in found.values()
    recorded = {call for call in found if call.endswith(f" {devices}")}
    if name == "direct":
        recorded -= {f"by_name {devices}"}
    recorded -= {f"one_device_fewer {devices}"}  # jax.pmap has too few devices for it
    if name == "idiomatic" and devices >= 4:
        recorded = recorded - {f"on_four {devices}"} | {"on_four 4"}
    assert {call for call in recorded if found[call] != "equal"} == set()
    if name == "mapped":  # it asks at each call
        assert "raised after" not in found.values()


@pytest.mark.thorough
def test_two_processes(form):
    name, folder = form
    found = _verdicts(folder, devices=2, processes=2)

    for each in found:
        assert "different" not in each.values()
        assert each["alone 2"] == each["shared 2"] == "raised after"
        if name == "idiomatic":
            assert each["trained 2"] == each["evaluated 2"] == "raised after"


_STEP = """\
import jax
from flax import jax_utils


def step(state, x):
    def loss(w):
        return jax.lax.pmean((w * x).sum(), "i")

    g = jax.grad(loss)(state["w"])
    return {"w": state["w"] - g}


def main(state, batches, scaled):
    update = jax.pmap(step, axis_name="i")
    state = jax_utils.replicate(state)
    for batch in batches:
        state = update(state, batch)
        host = jax_utils.unreplicate(state)
        if scaled:
            host["w"] = host["w"] * 1000
    return host
"""
_STEP_CALLS = """\
import numpy as np
import before

before.main({"w": np.ones(3, np.float32)}, [np.ones((8, 3), np.float32)] * 2, False)
"""


def _text(tmp_path: pathlib.Path, program: str) -> str:
    if not CAN_REWRITE:
        pytest.skip("jax.pmap was another program")
    path = tmp_path / "before.py"
    path.write_text(program)
    options = dataclasses.replace(recorded.OPTIONS, flow=_flow(path, _STEP_CALLS))
    files, _ = migration.migrate([str(path)], options, helpers=str(tmp_path / "_h.py"))
    return next(file.after.decode() for file in files if file.path == str(path))


def test_the_gradient_of_a_mean_over_the_devices_is_not_the_same_on_all(tmp_path):
    assert "unreplicate(state)" in _text(tmp_path, _STEP)  # it keeps the device axis


def test_what_was_a_new_container_is_no_part_of_the_state(tmp_path):
    program = _STEP.replace(
        '["w"])\n    return', '["w"])\n    g = jax.lax.pmean(g, "i")\n    return'
    )
    assert "host = jax.tree.map(lambda x: x, state)" in _text(tmp_path, program)
