"""`jax-dist plan`: a step of a file, on the devices that are here."""

import io
import json
import sys
import textwrap

import jax
import pytest

from jax_dist.commands.cli import main

pytestmark = pytest.mark.rewriting

_TRAINER = """
import jax, jax.numpy as jnp

def step(params, batch):
    gradient = jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
    return params - 0.1 * jax.lax.pmean(gradient, "i")

p_step = jax.pmap(step, axis_name="i", donate_argnums=0)
p_evaluate = jax.pmap(lambda params, batch: jax.lax.psum((batch @ params).sum(), "i"), "i")

def params():
    return jnp.ones((256, 64))

def example_args():
    return jnp.ones((2, 256, 64)), jnp.ones((2, 4, 256))

def huge():
    return jnp.ones((1, 10**6, 10**6)), jnp.ones((1, 4, 10**6))

def read():
    if float(jnp.ones(())) == 1.0:  # needs a value
        return example_args()

class Trainer:
    pmapped = staticmethod(p_step)

def broken():
    raise KeyError("rows")

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


@pytest.mark.parametrize(
    "arguments",
    [
        ["a_trainer.py:p_step", "--args", "example_args"],
        ["a_trainer.py:p_step", "--args", "example_args()"],
        ["a_trainer.py:p_step", "--args", "jnp.ones((3, 256, 64)), jnp.ones((3, 4, 256))"],
        ["a_trainer.py:p_step", "--args", "read"],
        ["a_trainer.py:Trainer.pmapped", "--args", "example_args"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_step_is_planned_by_the_arguments_of_its_call(arguments, trainer):
    code, out, err = _run(*arguments, "--json", "--ways", "jax.pmap,fsdp")

    found = json.loads(out)
    rows = {row["way"]: row["program"] for row in found["rows"]}
    state, batch = 4 * 256 * 64, 4 * 4 * 256
    assert code == 0
    assert rows["jax.pmap"]["argument_bytes"] == state + batch
    assert rows["jax.pmap"]["alias_bytes"] == state
    assert rows["fsdp"]["argument_bytes"] == state // 8 + batch
    assert err.splitlines()[1].startswith("1 of 2: jax.pmap on 8 cpu devices: limit unknown")


def test_arguments_by_keyword(trainer):
    trainer.write_text(_TRAINER + "p_named = jax.pmap(lambda p, *, batch: step(p, batch), 'i')\n")
    words = ["--args", "example_args()[0]", "--quiet", "--json", "--ways", "fsdp"]

    code, out, _ = _run(
        "a_trainer.py:p_named", *words, "--keywords", "dict(batch=example_args()[1])"
    )

    (row,) = json.loads(out)["rows"]
    assert (code, row["program"]["argument_bytes"]) == (0, 4 * 256 * 64 // 8 + 4 * 4 * 256)
    assert _run("a_trainer.py:p_named", *words, "--keywords", "3") == (
        2, "", "jax-dist plan: --keywords '3' is no dict, but int\n"
    )  # fmt: skip


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
        (["--args", "read", "--", "python", "a_trainer.py"], "--args is for a step that is named"),
        (["--", "python", "a_trainer.py"], "the program exited before it called a training step"),
        (["a_trainer.py:p_step"], "--args is missing. Give the arguments of the step; or, behind"),
        ([], "no step is given. Give a program that calls it"),
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


def test_the_table_is_printed(trainer):
    code, out, err = _run("a_trainer.py:p_step", "--args", "example_args", "--quiet")

    assert (code, err) == (0, "")
    assert out.startswith("step: On 8 cpu devices, ")
    assert "8 cpu devices: 8 devices on 1 host\n" in out


def test_arguments_that_can_be_traced_take_no_memory(trainer):
    """A terabyte; compiled, and not made."""
    code, out, _ = _run("a_trainer.py:p_step", "--args", "huge", "--ways", "jax.pmap", "--json")

    (row,) = json.loads(out)["rows"]
    assert code == 0
    assert row["program"]["argument_bytes"] > 4 * 10**12


def test_where_nothing_fits_something_was_found(trainer, monkeypatch):
    from jax_dist.machines import plans
    from jax_dist.machines.report import Machine

    small = Machine("a thimble", tuple(jax.devices()), 1000)
    monkeypatch.setattr(plans, "machines_of", lambda on: [small])

    code, out, _ = _run("a_trainer.py:p_step", "--args", "example_args")

    assert code == 1
    assert out.startswith("step: It does not fit on a thimble: ")


_WRONG = {
    "a_trainer.py": "'a_trainer.py' names no function. Give FILE:NAME, as train.py:step.",
    "nowhere.py:step": "there is no file nowhere.py",
    "a_trainer.py:p_stop": "a_trainer.py has no 'p_stop'. Did you mean p_step?",
    "a_trainer.py:Trainer.no": "Trainer of a_trainer.py has no 'no'",
    "a_trainer.py:__name__": "__name__ of a_trainer.py is no function, but str",
}


@pytest.mark.parametrize("step", _WRONG)
def test_a_step_that_is_not_there(step, trainer):
    assert _run(step, "--args", "example_args") == (2, "", f"jax-dist plan: {_WRONG[step]}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--args", "example_arg"], "NameError: name 'example_arg' is not defined"),
        (["--args", "broken"], "--args 'broken': KeyError: 'rows'"),
        (["--args", "example_args", "--state", "first"], "--state takes positions, as in 0,1"),
        (["--args", "example_args", "--ways", "pmap"], "plan knows no way 'pmap'"),
        (["--args", "example_args", "--on", "v5:4x4"], "Did you mean v5e?"),
        (["--args", "params"], "p_step cannot be planned: TypeError: step() missing 1 required"),
        (["--args", "jnp.ones((2, 256, 64)), jnp.ones((3, 4, 256))"], "different sizes along"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, said, trainer):
    code, out, err = _run("a_trainer.py:p_step", *arguments)

    assert (code, out) == (2, "")
    assert said in err
    assert "fault of jax-dist" not in err


def test_a_file_that_cannot_be_loaded(trainer):
    trainer.write_text("import no_such_module\n")

    code, _, err = _run("a_trainer.py:p_step", "--args", "example_args")

    assert (code, err) == (
        2,
        "jax-dist plan: a_trainer.py cannot be loaded: ModuleNotFoundError: No module named "
        "'no_such_module'\n",
    )


def test_an_evaluation_carries_nothing(trainer):
    code, out, _ = _run("a_trainer.py:p_evaluate", "--args", "example_args", "--quiet")

    assert code == 0
    assert (
        textwrap.dedent("""\
          replicated     '<lambda>' carries no state that could lie in parts
    """).strip()
        in out
    )


def test_without_any_program_the_command_was_invalid(trainer):
    code, out, _ = _run(
        "a_trainer.py:p_evaluate", "--args", "example_args", "--ways", "fsdp,replicated"
    )

    assert code == 2
    assert out.startswith("<lambda>: No way gives a program for 8 cpu devices.")


def test_a_collective_of_a_function_that_is_not_mapped(trainer):
    code, _, err = _run("a_trainer.py:step", "--args", "params(), np.ones((4, 256), np.float32)")

    assert code == 2
    assert "'step' maps nothing" in err
    assert "axis_name='i'" in err
