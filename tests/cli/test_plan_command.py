"""`jax-dist plan`: the step of a program, on a machine of the devices that are here."""

import importlib
import io
import json
import sys

import jax
import pytest

from jax_dist.cli.main import main
from jax_dist.topology import Topology

_TRAINER = """
import jax, jax.numpy as jnp

def step(params, batch):
    gradient = jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
    return params - 0.1 * jax.lax.pmean(gradient, "i")

def example_args():
    return jnp.ones((2, 256, 64)), jnp.ones((2, 4, 256))

if __name__ == "__main__":
    raise SystemExit("it trains")
"""


MEMORY = {"here": None, "thimble": 1000}


@pytest.fixture(autouse=True)
def machines(monkeypatch):
    """Name the devices that are here, with the memory of `MEMORY`."""
    known = importlib.import_module("jax_dist.topology").topology
    here = lambda name: Topology(name, tuple(jax.devices()), MEMORY[name])
    monkeypatch.setattr(
        importlib.import_module("jax_dist.plan"),
        "topology",
        lambda name: here(name) if name in MEMORY else known(name),
    )


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    path = tmp_path / "a_trainer.py"
    path.write_text(_TRAINER)
    monkeypatch.chdir(tmp_path)
    yield path
    sys.modules.pop("a_trainer", None)
    sys.path.remove(str(tmp_path)) if str(tmp_path) in sys.path else None


def _run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    try:
        code = main(["plan", *arguments], out=out, err=err)
    except SystemExit as left:
        code = left.code
    return code, out.getvalue(), err.getvalue()


_PROGRAM = """
import sys
import jax, jax.numpy as jnp
import a_trainer

if __name__ == "__main__":
    assert jax.pmap(lambda x: jax.lax.psum(x, "i"), "i")(jnp.ones(8))[0] == 8
    params, batch = a_trainer.example_args()
    print("training")
    step = jax.pmap(a_trainer.step, axis_name="i", donate_argnums=0)
    spread = lambda x, rows: jnp.ones((8, rows, *x.shape[2:]))
    step(spread(params, 256), spread(batch, int(sys.argv[1])))
    raise SystemExit("it trains")
"""


@pytest.mark.parametrize(
    "command",
    [
        ["python", "main.py", "6"],
        ["main.py", "6"],
        ["python3", "-u", "main.py", "6"],
        ["python3.12", "-m", "main", "6"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("named", [[], ["step"]], ids=["found", "named"])
def test_a_program_is_run_up_to_its_step(command, named, trainer, monkeypatch, capsys):
    (trainer.parent / "main.py").write_text(_PROGRAM)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    words = [*named, "--on", "here", "--quick", "--strategies", "jax.pmap,fsdp", "--json"]
    words += ["--", *command]
    code, out, err = _run(*words)

    found = json.loads(out)
    rows = {row["strategy"]: row["program"]["argument_bytes"] for row in found["rows"]}
    state, batch = 4 * 256 * 64, 4 * 6 * 256
    assert (code, rows) == (0, {"jax.pmap": state + batch, "fsdp": state // 8 + batch})
    assert all(row["is_quick"] for row in found["rows"])
    assert capsys.readouterr() == ("", "training\n")
    assert err.splitlines()[:2] == [
        f"runs {' '.join(command)}, up to its step",
        "1 of 2: jax.pmap on here: limit unknown",
    ]


HERE = ["--on", "here"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([*HERE, "--", "python", "other.py"], "there is no file other.py"),
        ([*HERE, "--", "bash", "a_trainer.py"], "'bash a_trainer.py' cannot be run"),
        (
            [*HERE, "--strategies", "zero", "--", "python", "a_trainer.py"],
            "unknown strategy 'zero'",
        ),
        ([*HERE, "--", "python", "a_trainer.py"], "did not call a training step"),
        (HERE, "give a program, as in: jax-dist plan --on v5e:4x4 -- python train.py"),
        (["--", "python", "a_trainer.py"], "give a machine, as in: jax-dist plan --on v5e:4x4"),
        (
            [*HERE, "--state", "first", "--", "python", "a_trainer.py"],
            "argument --state: invalid positions value: 'first'",
        ),
        (["--on", "v5:4x4", "--", "python", "a_trainer.py"], "Did you mean v5e?"),
        (
            [*HERE, "--devices", "65", "--", "python", "a_trainer.py"],
            "would run here on 65 simulated devices",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_gives_no_step(words, line, trainer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", list(sys.argv))

    code, out, err = _run("--quiet", *words)

    assert (code, out) == (2, "")
    messages = err + capsys.readouterr().err
    assert line in messages
    assert "Traceback" not in messages or "did not call" in line  # of the program


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--on", "here"], 0),
        (["--on", "here", "--on", "thimble"], 1),
        (["--on", "thimble"], 1),
        (["--on", "here", "--state", "5", "--strategies", "fsdp"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_exit_code_says_whether_it_fits(options, code, trainer, monkeypatch):
    (trainer.parent / "main.py").write_text(_PROGRAM)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    result, out, err = _run("--quiet", *options, "--", "python", "main.py", "4")

    assert (result, err) == (code, "")
    assert ("does NOT fit" in out) == (code == 1)
    assert out.startswith("step\n")
    assert "8 devices on 1 host" in out
