"""`--verify` says of each place how sure it is, and never touches the user's files.

Most commands here import no jax: what they do is read from the file that is migrated.
"""

import ast
import fcntl
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
from verified_programs import changed

from jax_dist._compat import CAN_REWRITE
from jax_dist._usage import MisuseError
from jax_dist.cli import migrate_forms
from jax_dist.migrate.results import FileMigration, Form
from jax_dist.migrate.verify import comparison, edits, sandbox, workplace
from jax_dist.migrate.verify.ledger import (
    Ledger,
    LedgerEntry,
    Rung,
)
from jax_dist.migrate.verify.program_text import Marked, ProgramText
from jax_dist.migrate.verify.trial import verified

_GOOD = b"# \xc3\xa9t\xc3\xa9\r\nprint('same')"  # no final newline


@pytest.fixture(params=["overlay", "copy"])
def way(request: pytest.FixtureRequest, tmp_path: pathlib.Path, monkeypatch) -> str:
    """Each way of keeping the project apart that this machine has."""
    if request.param == "copy":
        monkeypatch.setenv("JAX_DIST_VERIFY_BY_COPY", "1")
    else:
        (tmp_path / "trial").mkdir()
        if sandbox.Workspace([], tmp_path / "trial", [tmp_path], 8, None).way != "overlay":
            pytest.skip("no overlays for users here")
    return request.param


@pytest.fixture
def file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = folder / "program.py"
    path.write_bytes(_GOOD)
    return path


def _verify(file: pathlib.Path, after: bytes | str, **options: object) -> Ledger:
    after = after if isinstance(after, bytes) else after.encode()
    migrated = FileMigration(str(file), file.read_bytes(), after)
    return verified([sys.executable, str(file)], [migrated], **options)


_BEFORE = """\
import jax
import jax.numpy as jnp
import numpy as np


def mapped(fun, **options):
    return jax.pmap(fun, **options)


def one_device(fun):
    return jax.jit(jax.vmap(fun))


def wrong_in_the_end(fun):
    return jax.pmap(lambda x: fun(x) + (x == 2))


def never(x):
    return jax.pmap(jnp.sin)(x)


def main():
    step = jax.pmap(lambda w, x: w - jax.lax.pmean(x * w, "i"), axis_name="i", donate_argnums=0)
    idle = jax.pmap(jnp.sin)
    count = jax.pmap(lambda x: x + 1)
    random = np.random.default_rng()  # another run computes something else
    w, n = jnp.ones((8, 3)), jnp.zeros(8)
    for _ in range(3):
        w = step(w, random.normal(size=(8, 3)))
        n = count(n)
    whole = jax.jit(jax.pmap(jnp.cos))(w)
    alone = jax.pmap(jnp.cos)(np.ones(8))
    donor = jax.pmap(lambda x: x * 2)
    tail = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    print(tail(w)[0], donor(w), whole, alone, w)
    with open("out.txt", "a") as out:
        out.write("x")


main()
"""
_AFTER = (
    ("    return jax.pmap(jnp.sin)(x)", "    return mapped(jnp.sin)(x)"),
    ("step = jax.pmap", "step = mapped"),
    ("idle = jax.pmap", "idle = mapped"),
    ("count = jax.pmap", "count = wrong_in_the_end"),
    ("whole = jax.jit(jax.pmap(", "whole = jax.jit(mapped("),
    ("alone = jax.pmap", "alone = one_device"),
    ("lambda x: x * 2)", "lambda x: x * 2, donate_argnums=0)"),
    ("psum", "pmean"),
)


def test_each_place_has_its_own_rung(file: pathlib.Path):
    """Nothing here computes the same twice; what is wrong is wrong at its own line."""
    file.write_text(_BEFORE)
    found = _verify(file, changed(*_AFTER, source=_BEFORE))

    lines = _BEFORE.splitlines()
    told = {lines[each.line - 1].split()[0]: each for each in found.entries}
    assert {name: (each.rung, each.calls, each.equal) for name, each in told.items()} == {
        "return": (Rung.NEVER_RAN, 0, 0),
        "step": (Rung.SAME_PROGRAM if CAN_REWRITE else Rung.REPLAYED, 3, 3),
        "idle": (Rung.NEVER_RAN, 0, 0),
        "count": (Rung.DIFFERENT, 3, 2),
        "whole": (Rung.SAME_PROGRAM, 1, 1) if CAN_REWRITE else (Rung.RAN, 0, 0),
        "alone": (Rung.DIFFERENT, 1, 0),
        "donor": (Rung.DIFFERENT, 1, 0),
        "tail": (Rung.RAN, 0, 0),
    }
    assert "call 3, result: differs by up to 1" in told["count"].problems[0]
    assert told["alone"].problems == ("call 1, result: on 8 devices before, on 1 after",)
    assert told["donor"].problems == ("call 1, argument 0: donated after only",)
    assert "from run to run" in told["step"].notes[0]
    assert (found.exit_code, found.worst) == (1, Rung.DIFFERENT)  # `w` is gone when it is printed
    assert file.read_text() == _BEFORE
    assert os.listdir(file.parent) == ["program.py"]


_IN_A_JIT = """\
import jax
import jax.numpy as jnp


def other(fun):
    return jax.pmap(lambda x: fun(x) + 1)


def same(fun):
    return jax.pmap(fun)


right, wrong = jax.pmap(jnp.sin), jax.pmap(jnp.cos)
double = lambda x: x * 2


@jax.jit
def step(x):
    captures = jax.pmap(lambda y: y * jnp.sum(x))
    return right(x), wrong(x), captures(x), double(x)


step(jnp.ones(8))
step(jnp.ones((8, 2)))
"""


@pytest.mark.thorough
def test_inside_of_a_jit_the_text_of_the_program_decides(file: pathlib.Path):
    """None of these calls has a value; what has no equal text is a part of what differs."""
    file.write_text(_IN_A_JIT)
    changes = (
        ("right, wrong = jax.pmap(jnp.sin), jax.pmap", "right, wrong = same(jnp.sin), other"),
        ("captures = jax.pmap", "captures = same"),
        ("double(x)\n", "x * 2\n"),
    )
    found = _verify(file, changed(*changes, source=_IN_A_JIT))

    told = [(_IN_A_JIT.splitlines()[e.line - 1], e.rung, e.calls) for e in found.entries]
    lines = [line for line in _IN_A_JIT.splitlines() if "right" in line or "captures =" in line]
    proved = (Rung.SAME_PROGRAM, 2) if CAN_REWRITE else (Rung.DIFFERENT, 0)
    assert told == [
        (lines[0], *proved),
        (lines[0], Rung.DIFFERENT, 0),
        (lines[1], Rung.DIFFERENT, 0),
        (lines[2], Rung.DIFFERENT, 0),
    ]


def test_a_command_that_fails_before_is_no_proof(file: pathlib.Path):
    before = """\
import jax, jax.numpy as jnp
print(jax.pmap(lambda x: x + 1)(jnp.zeros(8)))
raise SystemExit(3)
"""
    file.write_text(before)
    found = _verify(file, before.replace("x + 1", "1 + x"))

    assert (found.worst, found.exit_code) == (Rung.RAN, 3)
    assert any("a command that fails is no proof" in note for note in found.notes)


def test_a_command_that_fails_after_is_different(file: pathlib.Path):
    found = _verify(file, b"raise SystemExit(3)\n")

    assert found.worst is Rung.DIFFERENT
    assert found.problems == ("the command ended well before the migration; after it: exit 3",)


@pytest.mark.slow
def test_two_runs_do_not_see_into_the_pmap_of_equinox(file: pathlib.Path):
    pytest.importorskip("equinox")
    before = (
        "import equinox\nimport jax\nimport jax.numpy as jnp\n\n"
        "double = equinox.filter_pmap(lambda x: x * 2)\n"
        "triple = jax.pmap(lambda x: x * 3)\n"
        "double(jnp.arange(8)), triple(jnp.arange(8))\n"
    )
    file.write_text(before)
    ours = before.replace("import jax\n", "import jax\nimport jax_dist\n")
    ours = ours.replace("equinox.filter_pmap", "jax_dist.filter_pmap")

    other = ours.replace("triple(jnp", "jax.vmap(lambda x: x * 3)(jnp")
    command = [sys.executable, str(file)]
    with sandbox.stage(command, [file], devices=8, timeout=None) as stage:
        first, *runs = (
            stage.recorded({file: text.encode()}, [file]) for text in (before, ours, other)
        )
        found, wrong = (comparison.judged(command, first, each, files=[file]) for each in runs)

    assert found.verdict == "unproven"
    assert [each.compared for each in found.sites] == [1]
    (reason,) = found.unproven
    assert reason.endswith("<lambda> was called only before the migration")
    assert "_vmap_pmap.py" in reason
    assert wrong.verdict == "different"


def test_a_program_that_does_not_end_is_stopped(file: pathlib.Path):
    found = _verify(file, b"import time\ntime.sleep(600)\n", timeout=5.0)

    assert found.runs is not None
    assert found.runs.after.exit_code is None


def test_runs_start_from_the_same_files_and_seeds(file: pathlib.Path, way: str):
    """What a program writes is gone before the next run, wherever it lies in the project."""
    file.write_text("""\
import os, random, pathlib
print(random.random(), os.path.exists("state"), pathlib.Path(__file__).with_name("state").exists())
pathlib.Path(__file__).with_name("state").touch()
open("state", "a").write("x")
""")
    found = _verify(file, file.read_bytes() + b"print('end')\n")

    assert found.runs is not None
    one, other = (each.output for each in (found.runs.before, found.runs.after))
    assert other == one + "\nend"
    assert one.endswith("False False")
    assert os.listdir(file.parent) == ["program.py"]


@pytest.mark.parametrize("own", [None, "3"])
def test_there_are_threads_for_all_simulated_devices(
    own: str | None, file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """XLA ends a program whose devices wait in collectives on all the threads that there are."""
    monkeypatch.delenv("NPROC", raising=False)
    if own is not None:
        monkeypatch.setenv("NPROC", own)
    program = b"import os\nprint(os.environ['NPROC'])\n"
    found = _verify(file, program, devices=4)

    assert found.runs is not None
    assert found.runs.after.output == (own or "16")


def test_a_link_leads_to_the_new_text(file: pathlib.Path, way: str):
    link = file.with_name("link.py")
    link.symlink_to(file)
    migrated = FileMigration(str(link), _GOOD, b"print('new')\n")
    found = verified([sys.executable, str(link)], [migrated])

    assert found.runs is not None
    assert (found.runs.before.output, found.runs.after.output) == ("same", "new")


def test_a_file_that_changed_meanwhile_is_not_touched(file: pathlib.Path):
    with pytest.raises(MisuseError, match=r"program\.py has changed since it was read"):
        verified([sys.executable, str(file)], [FileMigration(str(file), b"older", b"newer")])

    assert file.read_bytes() == _GOOD


def test_a_command_that_is_not_there(file: pathlib.Path):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        verified(["no-such-program"], [FileMigration(str(file), _GOOD, b"1\n")])


_ENDINGS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]


@pytest.mark.thorough
@pytest.mark.parametrize("ending", _ENDINGS, ids=[each.name for each in _ENDINGS])
def test_whatever_ends_it_the_tree_is_as_it_was_and_nothing_runs_on(
    file: pathlib.Path, ending: signal.Signals
):
    """No file that the program writes can be seen here, but what it sends can."""
    after = "import os, pathlib, socket, subprocess, sys, time\n"
    after += "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    after += "pathlib.Path('left').touch()\n"
    after += "to = socket.socket(type=socket.SOCK_DGRAM)\n"
    with socket.socket(type=socket.SOCK_DGRAM) as heard:
        heard.bind(("127.0.0.1", 0))
        heard.settimeout(60)
        after += f"to.sendto(f'{{os.getpid()}} {{child.pid}}'.encode(), {heard.getsockname()})\n"
        with _started(file, f"{after}time.sleep(600)\n".encode()) as parent:
            try:
                started = heard.recv(100).decode().split()
                parent.send_signal(ending)

                assert parent.wait(120) != 0
            finally:
                parent.kill()
    assert file.read_bytes() == _GOOD
    assert os.listdir(file.parent) == ["program.py"]
    assert _waited_for(lambda: not any(map(_lives, started)))


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(30))
def test_a_kill_at_any_moment_leaves_the_tree_as_it_was(file: pathlib.Path, moment: int):
    parent = _started(file, b"import time\ntime.sleep(0.4)\nprint('same')\n")
    time.sleep(0.05 * moment)
    parent.kill()
    parent.wait(30)

    assert file.read_bytes() == _GOOD
    assert os.listdir(file.parent) == ["program.py"]


def _started(file: pathlib.Path, after: bytes) -> subprocess.Popen:
    script = textwrap.dedent(f"""\
        import signal
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, around the tests, ignores it
        from jax_dist.migrate.results import FileMigration
        from jax_dist.migrate.verify.trial import verified
        migrated = FileMigration({str(file)!r}, {file.read_bytes()!r}, {after!r})
        verified([{sys.executable!r}, {str(file)!r}], [migrated])
        """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL
    )


def _waited_for(condition) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def _lives(pid: str) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_no_file_for_the_runs_is_left(file: pathlib.Path, tmp_path: pathlib.Path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    _verify(file, b"print('other')\n")

    assert os.listdir(temporary) == []
    assert file.read_bytes() == _GOOD


def test_what_a_killed_run_has_left_goes_with_the_next(tmp_path: pathlib.Path):
    names = [f"jax_dist_verify_{each}" for each in ("killed", "begun", "running")]
    for name in names:
        (tmp_path / name).mkdir()
    for name in (names[0], names[2]):
        (tmp_path / name / "lock").touch()
    with open(tmp_path / names[2] / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with workplace.working_folder(str(tmp_path)) as made:
            left = {each.name for each in tmp_path.iterdir()} - {made.name}

    assert left == set(names[1:])
    assert not made.exists()


def test_a_folder_that_is_being_made_is_nobodys_leftover(tmp_path: pathlib.Path, monkeypatch):
    """Two commands may start at one moment: neither takes the other's folder for abandoned."""
    flock = fcntl.flock
    others: list[pathlib.Path] = []

    def first(file, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        with workplace.working_folder(str(tmp_path)) as other:
            others.append(other)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", first)
    with workplace.working_folder(str(tmp_path)) as made:
        assert len(others) == 1
        assert os.listdir(made) == ["lock"]
    assert os.listdir(tmp_path) == []


# --- the marked text


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (
            "class A:\n    f = pmap(g, 1)\n",
            "class A:\n    f = mapped(g, 1)\n",
            "    f = (__jd__.place(0, (pmap)))(g, 1)",
        ),
        (
            "def f(s):\n    return pmap(super().f, 1)(s)\n",
            "def f(s):\n    return mapped(super().f, 1)(s)\n",
            "    return (__jd__.place(0, (pmap)))(super().f, 1)(s)",
        ),
        (
            "from jax import pmap\nf = pmap(g)\n",
            "from own import pmap\nf = pmap(g)\n",
            "from jax import pmap; pmap = __jd__.place(0, pmap)",
        ),
        (
            "@partial(\n    pmap, x=1)\ndef f(x): pass\n",
            "@partial(mapped, x=1)\ndef f(x): pass\n",
            "    (__jd__.place(0, (pmap))), x=1)",
        ),
        (
            "x = 1 if t is pmap else pmap\n",
            "x = 1 if t is mapped else mapped\n",
            "x = 1 if t is (__jd__.ran(0) or (pmap)) else (__jd__.place(1, (pmap)))",
        ),
        ("x = 1\nprint(x)\n", "print(x)\n", "__jd__.place(0, None); x = 1"),
    ],
    ids=["body of a class", "super", "import", "decorator", "compared", "a statement less"],
)
def test_each_edit_is_a_place_that_tells(before: str, after: str, expected: str):
    """What is compared stays the object that it is."""
    found = edits.changes(ProgramText(before), ast.parse(after))
    marked = Marked(before, [(e.line, e.what, e.imported) for e in found], 0, {})
    compile(marked.text, "a.py", "exec")

    assert expected in marked.text.split("\n")


def test_what_differs_in_the_last_form_waits_for_what_has_another():
    rich, plain, idle = (("a.py", line, "jax.pmap") for line in (3, 9, 12))
    forms = {rich: Form.IDIOMATIC, plain: Form.MAPPED, idle: Form.MAPPED}
    raises = LedgerEntry(*rich, Rung.DIFFERENT, problems=("call 1: raised",))
    behind = LedgerEntry(*plain, Rung.DIFFERENT, problems=("it is not called after",))
    unseen = LedgerEntry(*idle, Rung.NEVER_RAN)
    elsewhere = LedgerEntry("b.py", 1, "jax.pmap", Rung.DIFFERENT, problems=("other values",))

    all_of_them = [raises, behind, unseen, elsewhere]
    assert migrate_forms.to_lower(all_of_them, forms) == ([raises, unseen], [unseen])
    assert migrate_forms.to_lower([raises], forms) == ([raises], [])
    assert migrate_forms.to_lower([behind, unseen], forms) == ([behind, unseen], [behind, unseen])
