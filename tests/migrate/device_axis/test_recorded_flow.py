"""What a run shows of values with a device axis: which are one, how they are made, what ran."""

import ast
import dataclasses
import pathlib
import sys

import pytest
import recorded

from jax_dist._compat import CAN_REWRITE
from jax_dist.lint.engine.linter import load
from jax_dist.lint.model.project import Project
from jax_dist.migrate import migration
from jax_dist.migrate.recorded_flow import FileFlow, RecordedFlow, WatchedFiles

pytestmark = [
    pytest.mark.rewriting,
    pytest.mark.skipif(not CAN_REWRITE, reason="jax.pmap was another program"),
]

_PROGRAM = """\
import functools

import jax
import jax.numpy as jnp

N = jax.device_count()


class Trainer:
    def __init__(self, state):
        self.held = {"state": state}

    def train(self, batch):
        self.held["state"], loss = p_step(self.held["state"], batch, 3)
        return loss


@functools.partial(jax.pmap, axis_name="i", static_broadcasted_argnums=2)
def p_step(state, batch, power):
    return state + jax.lax.pmean(batch**power, "i"), batch.sum()


def never(trainer):
    return trainer.held["state"]


trainer = Trainer(jnp.stack([jnp.arange(2.0)] * N))
losses = [trainer.train(jnp.ones((N, 2)) * each) for each in range(2)]
print(f"{len(losses)} {N=}", f"{losses[0].shape}")
"""


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> FileFlow:
    path = tmp_path_factory.mktemp("flow") / "train.py"
    path.write_text(_PROGRAM)
    found = recorded.flow([path], [sys.executable, str(path)])
    module = Project([str(path)]).module(load(str(path), path.read_bytes()))
    file = found.of(module)
    assert file is not None
    return file


def _node(flow: FileFlow, text: str) -> ast.expr:
    return next(node for node in flow.nodes if flow.module.text(node) == text)


def test_of_several_processes_or_a_record_with_gaps_nothing_is_known(flow: FileFlow):
    source = flow.module.source
    first, code = {source.path: flow._first}, {source.path: source.code}
    fork = dataclasses.replace(flow._record.sites[0], process=1)
    for record, is_known in (
        (flow._record, True),
        (dataclasses.replace(flow._record, is_complete=False), False),
        (dataclasses.replace(flow._record, sites=(*flow._record.sites, fork)), False),
    ):
        assert (RecordedFlow(first, code, record, 8).of(flow.module) is not None) is is_known


def test_a_state_in_a_field_is_one_component_from_call_to_call(flow: FileFlow):
    [(site, record)] = flow.sites.items()
    state = [part for part in flow.components if any(s.path == (0,) for s in part.slots)]

    assert len(state) == 1
    assert {(slot.side, slot.path) for slot in state[0].slots} == {("in", (0,)), ("out", (0,))}
    [maker] = [node for node in flow.makers(state[0].serials) if not flow.called_sites(node)]
    assert flow.module.text(maker) == "jnp.stack([jnp.arange(2.0)] * N)"
    assert flow.static(record) == {2: {"int"}}
    assert flow.misfit(site) == ""


def test_which_results_are_the_same_is_a_matter_of_their_program(flow: FileFlow):
    [record] = flow.sites.values()

    assert flow.alike_results(record, {0}, [(0,), (1,)]) == {(0,): True, (1,): False}
    assert flow.alike_results(record, set(), [(0,), (1,)]) == {(0,): False, (1,): False}


def test_what_did_not_run_is_told_from_what_did(flow: FileFlow):
    assert not flow.ran(_node(flow, 'trainer.held["state"]'))
    assert flow.ran(_node(flow, "losses[0].shape"))
    assert flow.is_array(_node(flow, "losses[0]"))


def test_the_text_that_runs_keeps_its_lines_and_what_shows_itself(tmp_path: pathlib.Path):
    path = tmp_path / "train.py"
    path.write_text(_PROGRAM)
    module = Project([str(path)]).module(load(str(path), path.read_bytes()))
    [text] = WatchedFiles([module]).texts.values()

    assert text.count(b"\n") == _PROGRAM.count("\n")
    assert b"{N=}" in text
    assert b"__jd_see__(" in text


_SCORE = """\
import jax
import jax.numpy as jnp
from flax import jax_utils

p_score = jax.pmap(lambda x: jax.lax.pmean(x, "i"), axis_name="i")


def score(x):
    return p_score(jax_utils.replicate(x))


if __name__ == "__main__":
    print(score(jnp.ones(2))[0])
"""


_CLASS = """\
import jax
import jax.numpy as jnp
from flax import jax_utils

p_step = jax.pmap(lambda x: x + jax.lax.pmean(x, "i"), axis_name="i")


class Trainer:
    def __init__(self, state):
        self._state = state

    def run(self):
        self._state = p_step(self._state)
        return jax_utils.unreplicate(self._state)


if __name__ == "__main__":
    print(Trainer(jax_utils.replicate(jnp.ones(2))).run())
"""
_USES = {"score": "print(train.score(1.0).sum())\n", "Trainer": "train.Trainer(stacked).run()\n"}


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize(("name", "text"), [("score", _SCORE), ("Trainer", _CLASS)])
def test_what_another_file_may_call_keeps_the_axis(
    tmp_path: pathlib.Path, name: str, text: str, *, is_used: bool
):
    pytest.importorskip("flax")
    (tmp_path / ".git").mkdir()
    path = tmp_path / "train.py"
    path.write_text(text)
    if is_used:
        (tmp_path / "report.py").write_text(f"import train\n\n{_USES[name]}")

    flow = recorded.flow([path], [sys.executable, str(path)])
    options = dataclasses.replace(recorded.OPTIONS, flow=flow)
    files, _ = migration.migrate([str(path)], options)
    [place] = [o for each in files for o in each.outcomes if o.what == "jax.pmap"]

    assert ("results all" in place.why) is not is_used
    assert (f"other files may use {name}" in place.reason) is is_used
