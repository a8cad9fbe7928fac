"""`jax-dist doctor`, with real processes: JAX that starts, that fails, and that hangs."""

import io

import jax
import pytest

from jax_dist import doctor
from jax_dist.cli.main import main


def _run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    code = main(["doctor", *arguments], out=out, err=io.StringIO())
    return code, out.getvalue()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_DIST_CACHE_DIR", str(tmp_path / "cache"))


def test_a_good_installation_and_no_module_of_the_current_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    monkeypatch.chdir(tmp_path)
    for name in ("jax", "numpy", "random", "jax_dist"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from here')\n")

    code, out = _run()

    assert code == 0, out
    assert f"jax:    {jax.__version__}\n" in out
    assert "psum over 3 devices: 3\n" in out
    assert f"cache: {tmp_path / 'cache'}" in out
    assert out.endswith("no problem found\n")


@pytest.mark.parametrize(
    ("name", "value", "text", "advice"),
    [
        ("XLA_FLAGS", "--xla_no_such=1", "--xla_no_such=1", "--xla_no_such=1 in the variable XLA_"),
        ("JAX_PLATFORMS", "nowhere", "'nowhere'", "correct nowhere in the variable JAX_PLATFORMS"),
        ("JAX_ENABLE_X64", "perhaps", "invalid truth value 'perhaps'", "JAX_PLATFORMS=cpu starts"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch, name, value, text, advice):
    monkeypatch.setenv(name, value)

    code, out = _run()

    assert code == 1
    problem = out[out.index("problem: ") :]
    assert text in problem.splitlines()[0]
    assert advice in problem.splitlines()[1]


def test_a_directory_that_cannot_be_used_is_a_problem(monkeypatch):
    monkeypatch.setenv("JAX_DIST_CACHE_DIR", "/dev/null/cache")

    code, out = _run()

    assert code == 1
    problem = out[out.index("problem: ") :].splitlines()
    assert "The compilation cache is off: /dev/null" in problem[0]
    assert problem[1] == "Set JAX_DIST_CACHE_DIR to a directory that only you can write to."


def test_a_directory_that_others_can_write_to_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("JAX_DIST_CACHE_DIR", str(tmp_path / "open"))

    code, out = _run()

    assert code == 1
    assert str(tmp_path / "open") in out[out.index("problem: ") :]


def test_devices_that_hang_do_not_hang_the_command(monkeypatch, tmp_path):
    plugin = tmp_path / "jax_plugins" / "never"  # as JAX finds its backends
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text("import time\n\ndef initialize():\n    time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    code, out = _run("--timeout", "8")

    assert code == 1
    assert "problem: No answer in time: another process may hold the devices" in out


def test_a_missing_jax_is_told():
    error = "Traceback ...\nModuleNotFoundError: No module named 'jax'\n"
    problem = doctor._explain_failure(1, error)
    assert problem == "jax is not installed for this Python: pip install -U jax"


def test_a_time_must_be_more_than_nothing(capsys):
    with pytest.raises(SystemExit) as caught:
        _run("--timeout", "0")

    assert caught.value.code == 2
    assert "more than 0" in capsys.readouterr().err
