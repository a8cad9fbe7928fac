"""`jax-dist plan`: a step of a file, on the devices that are here."""

import io
import json
import sys

import jax
import pytest

from jax_dist.cli.main import main

pytestmark = pytest.mark.rewriting

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

    words = [*named, "--quick", "--ways", "jax.pmap,fsdp", "--json", "--", *command]
    code, out, err = _run(*words)

    found = json.loads(out)
    rows = {row["way"]: row["program"]["argument_bytes"] for row in found["rows"]}
    state, batch = 4 * 256 * 64, 4 * 6 * 256
    assert (code, rows) == (0, {"jax.pmap": state + batch, "fsdp": state // 8 + batch})
    assert all(row["is_quick"] for row in found["rows"])
    assert capsys.readouterr() == ("", "training\n")
    assert err.splitlines()[:2] == [
        f"runs {' '.join(command)}, up to its step",
        "step takes 71.7 kB on each device",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "python", "other.py"], "there is no file other.py"),
        (["--", "bash", "a_trainer.py"], "'bash a_trainer.py' cannot be run here"),
        (["--ways", "zero", "--", "python", "a_trainer.py"], "plan knows no way 'zero'"),
        (["--", "python", "a_trainer.py"], "the program exited before it called a training step"),
        ([], "no program is given. Give one that calls the step"),
        (
            ["--state", "first", "--", "python", "a_trainer.py"],
            "--state takes positions, as in 0,1",
        ),
        (["--on", "v5:4x4", "--", "python", "a_trainer.py"], "Did you mean v5e?"),
        (
            ["--devices", "65", "--", "python", "a_trainer.py"],
            "argument --devices: must be a whole number from 1 to 64",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_program_that_gives_no_step(words, said, trainer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", list(sys.argv))

    code, out, err = _run("--quiet", *words)

    assert (code, out) == (2, "")
    assert said in err + capsys.readouterr().err


@pytest.fixture
def program(trainer, monkeypatch):
    """The command that runs `_PROGRAM`."""
    (trainer.parent / "main.py").write_text(_PROGRAM)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return ["--", "python", "main.py", "4"]


def test_the_table_is_printed_and_a_picture_written(program, tmp_path):
    code, out, err = _run("--quiet", "--plot", "plan.svg", *program)

    assert (code, err) == (0, "")
    assert out.startswith("step: On 8 cpu devices, ")
    assert "8 cpu devices: 8 devices on 1 host\n" in out
    picture = (tmp_path / "plan.svg").read_text()
    assert "Memory of one device at the peak of step" in picture
    again = _run("--quiet", "--plot", "plan.svg", *program)
    assert again[0] == 0  # over its own picture


def test_a_file_of_another_kind_is_left(program, tmp_path):
    (tmp_path / "plan.svg").write_text("<svg of somebody else/>")

    code, _, err = _run("--plot", "plan.svg", *program)

    assert code == 2
    assert "not a picture of jax-dist plan" in err
    assert (tmp_path / "plan.svg").read_text() == "<svg of somebody else/>"


def test_where_nothing_fits_something_was_found(program, monkeypatch):
    from jax_dist.machines import plans
    from jax_dist.machines.report import Machine

    small = Machine("a thimble", tuple(jax.devices()), 1000)
    monkeypatch.setattr(plans, "machines_of", lambda on: [small])

    code, out, _ = _run("--quiet", *program)

    assert code == 1
    assert out.startswith("step: It does not fit on a thimble: ")


def test_without_any_program_the_command_was_invalid(program):
    code, out, _ = _run("--quiet", "--state", "5", "--ways", "fsdp", *program)

    assert code == 2
    assert out.startswith("step: No way gives a program for 8 cpu devices.")


def test_a_picture_that_cannot_be_written_does_not_take_the_table_along(program):
    code, out, err = _run("--plot", "no/such/folder/plan.svg", *program)

    assert code == 2
    assert "no/such/folder" in err
    assert out == "" or out.startswith("step: ")
