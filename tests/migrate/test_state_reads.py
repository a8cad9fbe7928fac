"""What a mapped function reads that the project may set: pmap would run what it has traced."""

import pathlib
import sys
import textwrap

import pytest
import recorded

from jax_dist.lint.engine.linter import load
from jax_dist.lint.model import pmaps
from jax_dist.lint.model.project import Project
from jax_dist.migrate import migration, state_reads
from jax_dist.migrate.migration import MigrationOptions
from jax_dist.migrate.pmap_facts import Promises
from jax_dist.migrate.results import Form, ProjectContext

_TRAINER = """\
class Trainer:
    def __init__(self, lr):
        self.lr, self.model = lr, models.Net()

    def step(self, w, x):
        return {read}

    def fit(self, w, x):
        return jax.pmap({mapped}, axis_name="i")(w, x)

"""
_METHOD = _TRAINER.replace("{mapped}", "self.step")

_FUNCTION = """\
LR = 0.1
CFG = {{"lr": 0.1}}


def loss(w, x):
    return {inner}


def step(w, x):
    return {read}


def fit(w, x):
    return jax.pmap(step)(w, x)
"""

_OBJECT = """\
class Model:
    on = True

    def __call__(self, x):
        return {read}

m = Model()
f = jax.pmap(m)
"""
_LOSS = "jax.grad(loss)(w, x)"
_CLOSURE = """\
import os, random
import numpy as np

def fit(w, x):
    lr = 0.1
    def halve():
        {outer} = lr / 2
    def step(w, x):
        return {read}
    for _ in range(2):
        w = jax.pmap(step)(w, x)
        halve()
"""
_NONLOCAL = _CLOSURE.replace("{outer}", "nonlocal lr\n        lr")
_LOCAL = _CLOSURE.replace("{outer}", "other")
_CASES = {
    "a field that the file sets": (_METHOD + "t.lr *= 0.1", "w - self.lr * x", "self.lr"),
    "a field that a function sets": (_METHOD + "def f(t): t.lr = 1", "self.lr * x", "self.lr"),
    "a field that is made once": (_METHOD, "w - self.lr * x", ""),
    "a field by its name": (_METHOD + "setattr(t, name, 1)", "self.lr * x", "self.lr"),
    "only arguments": (_METHOD + "t.lr = 1", "w - x", ""),
    "a method of a library's object": (_METHOD, "self.model.apply(w, x)", ""),
    "a method of another object": (_TRAINER.replace("{mapped}", "agent.go"), "w", ""),
    "a global": (_FUNCTION, "w * LR", ""),
    "a global that is set again": (_FUNCTION + "LR = 2", "w * LR", "LR"),
    "a global of functions": (_FUNCTION + "def g():\n    global LR\n    LR = 1", "w * LR", "LR"),
    "in what it calls": (_FUNCTION + "LR = 2", "loss(w, x)", "LR"),
    "in what it hands on": (_FUNCTION + "LR = 2", _LOSS, "LR"),
    "an entry": (_FUNCTION, 'w * CFG["lr"]', ""),
    "an entry that is set": (_FUNCTION + 'CFG["lr"] = 2', 'w * CFG["lr"]', "CFG"),
    "an entry by update": (_FUNCTION + "CFG.update(lr=2)", 'w * CFG["lr"]', "CFG"),
    "a list that grows": (_FUNCTION + "LR.append(2)", "w * LR[-1]", "LR"),
    "an array in place": (_FUNCTION + "LR.fill(2)", "w * LR", "LR"),
    "a list in a dictionary": (_FUNCTION + "CFG['all'].pop()", "w * CFG['all'][-1]", "CFG"),
    "its dictionary": (_FUNCTION + "CFG.__dict__.update(lr=2)", "w * CFG.lr", "CFG"),
    "by vars": (_FUNCTION + "vars(CFG)['lr'] = 2", "w * CFG.lr", "CFG.lr"),
    "vars that are read": (_FUNCTION + "print(vars(CFG))", "w * CFG.lr", ""),
    "a field of a class": (_METHOD + "type.__setattr__(t, n, 1)", "self.lr * x", "self.lr"),
    "of a function around, set": (_NONLOCAL, "w * lr", "lr"),
    "of a function around, made once": (_LOCAL, "w * lr", ""),
    "the environment": (_LOCAL, "w * float(os.environ['LR'])", "os.environ"),
    "a variable of the environment": (_LOCAL, "w * float(os.getenv('LR'))", "os.getenv"),
    "a file": (_LOCAL, "w * float(open('lr').read())", "open"),
    "random numbers": (_LOCAL, "w * random.random()", "random.random"),
    "random numbers of numpy": (_LOCAL, "w * np.random.rand()", "np.random.rand"),
    "random numbers of jax": (_LOCAL, "w * jax.random.normal(x)", ""),
    "an object that is called": (_OBJECT, "x * self.on", ""),
    "an object whose field is set": (_OBJECT + "m.on = False", "x * self.on", "self.on"),
    "a function of a library": (_FUNCTION, "jnp.sum(x)", ""),
}


def _first(tmp_path: pathlib.Path, text: str) -> str:
    files = {path: path.read_bytes() for path in tmp_path.glob("*.py")}
    top = "import jax\nimport jax.numpy as jnp\nimport models\n\n"
    (tmp_path / "train.py").write_text(top + text + "\n")
    (tmp_path / "pyproject.toml").touch()
    path = str(tmp_path / "train.py")
    project = Project((path, *map(str, files)))
    module = project.module(load(path, (tmp_path / "train.py").read_bytes()))
    (site,) = pmaps.applications(module)
    return state_reads.first(module, ProjectContext(project), site.fun)


@pytest.mark.parametrize("name", _CASES)
def test_what_may_be_set_meanwhile(tmp_path: pathlib.Path, name: str):
    text, read, found = _CASES[name]
    inner = "w * LR" if read == "loss(w, x)" or read == _LOSS else "w"

    assert _first(tmp_path, text.format(read=read, inner=inner)) == found


_OTHER = "from steps import step\ndef fit(w, x):\n    return jax.pmap(step)(w, x)"


@pytest.mark.parametrize(
    ("steps", "run", "found"),
    [
        ("import jax\nLR = 1\ndef step(w, x): return w * LR\n", "", ""),
        (
            "import jax\nLR = 1\ndef step(w, x): return w * LR\n",
            "import steps\nsteps.LR = 2\n",
            "LR",
        ),
        ("import jax\nLR = 1\ndef step(w, x): return w * LR\nLR = 2\n", "", "LR"),
    ],
)
def test_what_another_file_defines_or_sets(
    tmp_path: pathlib.Path, steps: str, run: str, found: str
):
    (tmp_path / "steps.py").write_text(steps)
    (tmp_path / "run.py").write_text(f"import train\n{run}")

    assert _first(tmp_path, _OTHER) == found


@pytest.mark.parametrize("is_set", [False, True])
def test_a_run_that_maps_once_shows_that_of_a_function_whose_state_stays(
    tmp_path: pathlib.Path, *, is_set: bool
):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "train.py").write_text(
        textwrap.dedent("""\
        import sys
        import jax
        import jax.numpy as jnp

        class Trainer:
            def __init__(self, lr):
                self.lr = lr

            def step(self, w, x):
                return w - self.lr * x

            def fit(self, w, x):
                return jax.pmap(self.step)(w, x)

        trainer = Trainer(0.5)
        for i in range(int(sys.argv[1])):
            print(trainer.fit(jnp.zeros((8, 3)), jnp.ones((8, 3))))
        """)
        + ("    trainer.lr *= 0.1\n" if is_set else "")
    )
    command = [sys.executable, str(tmp_path / "train.py"), "1"]
    flow = recorded.flow([tmp_path / "train.py"], command)
    options = migration.dataclasses.replace(recorded.OPTIONS, flow=flow, plainest=Form.DIRECT)
    (file, *_), _ = migration.migrate([str(tmp_path / "train.py")], options)
    (place,) = file.outcomes

    assert place.form is (Form.MAPPED if is_set else Form.DIRECT)
    assert ("when self.lr is another one" in place.reason) is is_set


_TWICE = """\
import jax
CFG = {"drop": 0.5}
def forward(x):
    return x * CFG["drop"]
train = jax.pmap(forward, axis_name="i")
CFG["drop"] = 0.0
evaluate = jax.pmap(FUN, axis_name="i")
"""


@pytest.mark.parametrize("fun", ["forward", "lambda x: x"])
def test_what_two_places_map_keeps_one_program(tmp_path: pathlib.Path, fun: str):
    (tmp_path / "pyproject.toml").touch()
    path = tmp_path / "train.py"
    path.write_text(_TWICE.replace("FUN", fun))
    both = Promises(one_process=True, all_devices=True)
    files, _ = migration.migrate([str(path)], MigrationOptions(to="jax", promises=both))
    forms = {place.form for place in files[0].outcomes}

    assert forms == ({Form.MAPPED} if fun == "forward" else {Form.DIRECT})
    assert any(b"def _once(" in file.after for file in files) is (fun == "forward")


@pytest.mark.parametrize("text", ["import lib\ng = jax.pmap(lib.forward)\n", "import lib\n"])
def test_what_two_files_map_keeps_one_program(tmp_path: pathlib.Path, text: str):
    texts = {
        "lib": 'CFG = {"s": 1}\ndef forward(x): return x * CFG["s"]\n',
        "a": "from lib import forward\nf = jax.pmap(forward)\n",
        "b": text,
        "main": 'import a\nimport lib\nlib.CFG["s"] = 2\nimport b\n',
    }
    (tmp_path / "pyproject.toml").touch()
    for name, each in texts.items():
        (tmp_path / f"{name}.py").write_text(f"import jax\n{each}")
    both = Promises(one_process=True, all_devices=True)
    paths = [str(tmp_path / f"{name}.py") for name in texts]
    files, _ = migration.migrate(paths, MigrationOptions(to="jax", promises=both))
    forms = {place.form for file in files for place in file.outcomes}

    assert forms == ({Form.MAPPED} if "pmap" in text else {Form.DIRECT})
    assert any(b"def _once(" in file.after for file in files) is ("pmap" in text)
