"""`jax-dist cache`: what is printed, as tables and as JSON, and the exit codes."""

import io
import json
import os
import pathlib
import subprocess
import sys
import textwrap
import time
import zlib

import cache_runs
import pytest

from jax_dist.commands import cli

HASHES = [letter * 64 for letter in "abc"]


def _run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    code = cli.main(["cache", *map(str, arguments)], out=out, err=err)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Two entries, one of which was used."""
    for place, (name, days, size) in enumerate((("jit_step", 1, 3000), ("jit_loss", 9, 10))):
        key = f"{name}-{HASHES[place]}"
        path = tmp_path / f"{key}-cache"
        data = zlib.compress((13 + place).to_bytes(4, "big") + bytes(size), 0)  # as it is
        path.write_bytes(data)
        written = time.time() - days * 86400 - 60
        os.utime(path, (time.time() - 7200 if place == 0 else written, written))
    return tmp_path


def test_ls(folder):
    code, out, _ = _run("ls", folder)

    assert code == 0
    assert out == (
        "function  key             size  compiled in  written  used\n"
        "jit_step  aaaaaaaaaaaa  3.0 kB         13 s  1 d ago  today\n"
        "jit_loss  bbbbbbbbbbbb    25 B         14 s  9 d ago  never\n"
        f"{folder}: 2 programs, 3.0 kB\n"
    )


def test_ls_for_machines(folder):
    code, out, _ = _run("ls", folder, "--json", "--function", "jit_loss")
    (entry,) = json.loads(out)

    assert code == 0
    assert (entry["function"], entry["key"]) == ("jit_loss", f"jit_loss-{HASHES[1]}")
    assert (entry["bytes"], entry["compile_seconds"], entry["used"]) == (25, 14, None)


def test_ls_takes_the_folder_of_enable(folder, monkeypatch):
    monkeypatch.setenv("JAX_DIST_CACHE_DIR", str(folder))

    assert _run("ls")[1].endswith(f"{folder}: 2 programs, 3.0 kB\n")


def test_ls_of_nothing(tmp_path):
    assert _run("ls", tmp_path / "none") == (0, f"{tmp_path / 'none'}: 0 programs, 0 B\n", "")


@pytest.mark.parametrize(
    ("arguments", "printed", "left"),
    [
        (["--older-than", "5d"], "removed 1 (25 B), kept 1 (3.0 kB)\n", 1),
        (["--max-size", "20"], "removed 2 (3.0 kB), kept 0 (0 B)\n", 0),
        (["--max-size", "20", "--dry-run"], "would remove 2 (3.0 kB), kept 0 (0 B)\n", 2),
    ],
)
def test_prune(folder, arguments, printed, left):
    assert _run("prune", folder, *arguments) == (0, printed, "")
    assert len(list(folder.glob("*-cache"))) == left


def test_prune_for_machines(folder):
    _, out, _ = _run("prune", folder, "--older-than", "5d", "--json")
    facts = json.loads(out)

    assert facts["removed"] == [f"jit_loss-{HASHES[1]}"]
    assert (facts["removed_bytes"], facts["kept"], facts["dry_run"]) == (25, 1, False)


def test_prune_needs_a_limit(folder):
    with pytest.raises(SystemExit) as caught:
        _run("prune", folder)

    assert caught.value.code == 2


def test_a_limit_that_cannot_be_read(folder, capsys):
    with pytest.raises(SystemExit) as caught:
        _run("prune", folder, "--max-size", "much")

    assert caught.value.code == 2
    assert "'much' is no size; write it as 500MB or 2GiB" in capsys.readouterr().err


def test_doctor(folder):
    broken = folder / f"jit_broken-{HASHES[2]}-cache"
    broken.touch()
    found, mended = _run("doctor", folder), _run("doctor", folder, "--fix")

    assert (found[0], mended[0]) == (1, 0)
    assert f"empty: {broken}\n" in found[1]
    assert "fixed: removed, 0 B" in mended[1]
    assert _run("doctor", folder)[1] == f"{folder}: 2 entries, 3.0 kB; all is well\n"


def test_doctor_for_machines(folder):
    (folder / f"jit_broken-{HASHES[2]}-cache").touch()
    code, out, _ = _run("doctor", folder, "--json")
    facts = json.loads(out)

    assert code == 1
    assert [finding["kind"] for finding in facts["findings"]] == ["empty"]
    assert (facts["entries"], facts["healthy"]) == (3, False)


PROGRAMS = textwrap.dedent("""
    import jax

    def step(x):
        return x.sum()

    def programs():
        yield step, jax.ShapeDtypeStruct((len(jax.devices()), 2), "float32")
""")


def _warm(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "jax_dist", "cache", "warm", "--cache", str(folder), *arguments],
        env=cache_runs.environment(),
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_warm_compiles_for_devices_that_are_simulated(tmp_path):
    (tmp_path / "programs.py").write_text(PROGRAMS)
    first = _warm(tmp_path, "--devices", "4", "--json", "programs.py:programs")
    second = _warm(tmp_path, "--devices", "4", "programs:programs")

    assert (first.returncode, first.stderr) == (0, "")
    (program,) = json.loads(first.stdout)
    assert (program["function"], program["written"]) == ("jit_step", True)
    assert (second.returncode, second.stdout) == (0, "jit_step: in the cache\n")


def test_warm_starts_the_processes_that_a_program_has(tmp_path):
    (tmp_path / "programs.py").write_text(PROGRAMS)
    done = _warm(tmp_path, "--processes", "2", "--devices", "2", "--json", "programs.py:programs")

    assert done.returncode == 0, done.stderr
    assert [(each["rank"], each["written"]) for each in json.loads(done.stdout)] == [
        (0, True),
        (1, True),
    ]


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ("programs.py", "programs.py names no function; write programs.py:programs"),
        ("none.py:programs", "none.py:programs cannot be found"),
        ("programs.py:nothing", "programs.py:nothing cannot be found"),
        ("broken.py:programs", "broken cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_warm_says_what_it_cannot_find(tmp_path, programs, said, monkeypatch, capsys):
    (tmp_path / "programs.py").write_text(PROGRAMS)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    err = io.StringIO()
    with pytest.raises(SystemExit) as caught:
        cli.main(["cache", "warm", "--cache", str(tmp_path), programs], err=err)

    assert caught.value.code == 2
    assert f"jax-dist cache: {said}" in err.getvalue()


def test_listing_does_not_load_jax(folder):
    script = (
        "import sys; from jax_dist.commands import cli; "
        f"cli.main(['cache', 'ls', {str(folder)!r}]); "
        f"cli.main(['cache', 'prune', '--max-size', '1GB', {str(folder)!r}]); "
        "assert 'jax' not in sys.modules, 'jax is loaded'"
    )
    subprocess.run([sys.executable, "-c", script], env=cache_runs.environment(), check=True)


def test_without_a_subcommand_the_help_is_printed():
    code, out, err = _run()

    assert (code, out) == (2, "")
    for name in ("verify", "ls", "doctor", "prune", "warm"):
        assert f"\n    {name} " in err


def test_what_stands_behind_two_dashes_is_a_folder(folder, capsys):
    named = folder.rename(folder.with_name("-x"))

    assert _run("ls", "--", named)[0] == 0
    with pytest.raises(SystemExit) as caught:
        _run("ls", named, "--", "python", "a.py")
    assert caught.value.code == 2
    assert "unrecognized arguments: python a.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "."),
        ("doctor", "."),
        ("verify", "--", "/no/such/program"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_looking_at_files_imports_no_jax(tmp_path, arguments):
    program = (
        "import atexit, sys\n"
        "loaded = lambda: sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules))\n"
        "atexit.register(lambda: print(loaded()))\n"
        "from jax_dist.commands.cli import main\n"
        f"main({['cache', *arguments]})\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.stdout.splitlines()[-1:] == ["[]"], ran.stderr
