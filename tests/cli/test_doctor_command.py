"""`jax-dist doctor`, with real processes: JAX that starts, that fails, and that hangs."""

import io
import json
import os
import textwrap
import time

import jax
import pytest

from jax_dist.cli.main import main


def _run(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    code = main(["doctor", *arguments], out=out, err=io.StringIO())
    return code, out.getvalue()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch, tmp_path):
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_DIST_CACHE_DIR", str(tmp_path / "cache"))


def test_a_healthy_machine(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")

    code, out = _run("--json")
    found = json.loads(out)

    assert code == 0
    assert found["healthy"] is True
    assert found["facts"]["jax"] == jax.__version__
    assert found["facts"]["devices"] == "3 devices of cpu (cpu)"
    assert found["facts"]["psum"] == "right over 3 devices"
    assert found["variables"]["JAX_NUM_CPU_DEVICES"] == "3"
    assert found["findings"] == []


def test_harm_is_exit_code_1_and_one_line_of_advice(monkeypatch):
    monkeypatch.setenv("JAX_PMAP_SHMAP_MERGE", "0")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1234")

    code, out = _run("--quiet", "--color=never")

    if hasattr(jax.config, "jax_pmap_shmap_merge"):  # until jax 0.10
        assert "JAX_PMAP_SHMAP_MERGE" not in out
        return
    assert code == 1
    assert (
        out
        == textwrap.dedent("""\
        harm: JAX_PMAP_SHMAP_MERGE is set, and this jax does not read it (JXD104)
          help: unset JAX_PMAP_SHMAP_MERGE; the old pmap is gone
        harm: JAX_COORDINATOR_ADDRESS is set, and nothing says which process this is of many
          help: pass num_processes and process_id, or start with jax-dist launch -n N
        """)
        + out[out.rindex("2 things to fix") :]
    )


def test_a_flag_that_ends_the_process_is_named(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_there_is_no_such_flag=1")

    code, out = _run("--quiet", "--color=never")

    assert code == 1
    assert out.startswith("harm: JAX cannot start its devices: Unknown flag in XLA_FLAGS")
    assert "--xla_there_is_no_such_flag=1" in out


def test_a_jax_that_cannot_be_imported_is_told(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "perhaps")

    code, out = _run("--quiet", "--color=never")

    assert code == 1
    assert "harm: jax cannot be imported: ValueError: invalid truth value 'perhaps'" in out


def test_devices_that_hang_do_not_hang_the_doctor(monkeypatch, tmp_path):
    plugin = tmp_path / "plugins" / "jax_plugins" / "never"  # as JAX finds its backends
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(
        textwrap.dedent(f"""\
            import os, pathlib, time

            def initialize():
                pathlib.Path({str(tmp_path)!r}, "reached").write_text(str(os.getpid()))
                time.sleep(600)
            """)
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "plugins"))
    started = time.monotonic()

    code, out = _run("--quiet", "--color=never", "--timeout", "6")

    assert code == 1
    assert out.startswith("harm: JAX cannot start its devices: no answer within the time\n")
    assert time.monotonic() - started < 120  # and not 600
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "reached").read_text()), 0)


def test_a_time_must_be_more_than_nothing(capsys):
    with pytest.raises(SystemExit) as caught:
        _run("--timeout", "0")

    assert caught.value.code == 2
    assert "must be more than 0" in capsys.readouterr().err


def test_colours_are_there_where_asked(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "perhaps")

    _, out = _run("--quiet", "--color=always")

    assert out.startswith("\x1b[1;31mharm\x1b[0m: jax cannot be imported")
