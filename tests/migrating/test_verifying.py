"""The files during and after `--verify`: migrated where that holds, else byte by byte as before.

Most commands here import no jax: what they do is read from the file that is migrated.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
from verified_programs import IDIOMATIC, TRAINING, changed

from jax_dist.checker.misuse import MisuseError
from jax_dist.migrating.verification import Verdict, Verification
from jax_dist.migrating.verifying import verified

_GOOD = b"# \xc3\xa9t\xc3\xa9\r\nprint('same')"  # no final newline
_WORSE = b"raise SystemExit(3)\n"


@pytest.fixture
def file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "program.py"
    path.write_bytes(_GOOD)
    return path


def _verify(file: pathlib.Path, after: bytes, **options: object) -> Verification:
    before = {file: file.read_bytes()}
    return verified([sys.executable, str(file)], before, {file: after}, **options)


def test_what_cannot_be_compared_is_kept_and_called_unproven(file: pathlib.Path):
    found = _verify(file, b"print('same')\n")

    assert file.read_bytes() == b"print('same')\n"
    assert str(found) == textwrap.dedent(f"""\
        Nothing differs, but not all could be compared. The files are migrated.
          command: {sys.executable} {file}
          before:  exit 0, 0 mapped functions, 0 calls
          after:   exit 0, 0 mapped functions, 0 calls

        Not proven:
          * no mapped function was called before the migration: nothing to compare with""")


def test_what_cannot_be_compared_is_taken_back_where_proof_is_asked_for(file: pathlib.Path):
    found = _verify(file, b"print('same')\n", only_proven=True)

    assert (found.verdict, found.rolled_back) == (Verdict.UNPROVEN, True)
    assert file.read_bytes() == _GOOD


def test_a_failing_program_is_taken_back_byte_by_byte(
    file: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
):
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    file.chmod(0o640)
    found = _verify(file, _WORSE)

    assert (found.verdict, found.rolled_back) == (Verdict.DIFFERENT, True)
    assert file.read_bytes() == _GOOD
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(file.parent) == ["program.py"]
    assert os.listdir(temporary) == []


def test_a_failing_program_stays_where_asked_for(file: pathlib.Path):
    found = _verify(file, _WORSE, keep=True)

    assert (found.verdict, found.rolled_back) == (Verdict.DIFFERENT, False)
    assert file.read_bytes() == _WORSE


def test_a_program_that_does_not_end_is_taken_back(file: pathlib.Path):
    found = _verify(file, b"import time\ntime.sleep(600)\n", timeout=1.0)

    assert found.verdict is Verdict.DIFFERENT
    assert found.after.exit_code is None
    assert file.read_bytes() == _GOOD


def test_different_output_is_only_reported(file: pathlib.Path):
    found = _verify(file, b"print('other')\n")

    assert found.verdict is Verdict.UNPROVEN
    assert found.notes == ("the output differs from line 1 on: 'same' before, 'other' after",)


def test_a_new_file_goes_away_again(file: pathlib.Path):
    helper = file.with_name("helper.py")
    verified([sys.executable, str(file)], {file: _GOOD}, {file: _WORSE, helper: b"import os\n"})

    assert os.listdir(file.parent) == ["program.py"]


def test_a_link_stays_a_link(file: pathlib.Path):
    link = file.with_name("link.py")
    link.symlink_to(file)
    verified([sys.executable, str(link)], {link: _GOOD}, {link: b"print('same')\n"})

    assert link.is_symlink()
    assert file.read_bytes() == b"print('same')\n"


def test_a_file_that_changed_meanwhile_is_not_touched(file: pathlib.Path):
    with pytest.raises(MisuseError, match=r"program\.py has changed since it was read"):
        verified([sys.executable, str(file)], {file: b"older"}, {file: b"newer"})

    assert file.read_bytes() == _GOOD


def test_a_command_that_is_not_there(file: pathlib.Path):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        verified(["no-such-program"], {file: _GOOD}, {file: _WORSE})

    assert file.read_bytes() == _GOOD


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_verification_takes_the_files_back(
    file: pathlib.Path, ending: signal.Signals
):
    after = b"import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(600)\n"
    script = textwrap.dedent(f"""\
        import pathlib
        from jax_dist.migrating.verifying import verified
        file = pathlib.Path({str(file)!r})
        verified([{sys.executable!r}, str(file)], {{file: file.read_bytes()}}, {{file: {after!r}}})
        """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not file.with_name("started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert file.read_bytes() == after
    parent.send_signal(ending)

    assert parent.wait(30) != 0
    assert file.read_bytes() == _GOOD


def test_a_wrong_migration_of_a_real_program(file: pathlib.Path):
    """The whole way: eight times the gradient, and the program is as it was."""
    wrong = [(old, new.replace(", check_vma=False", "")) for old, new in IDIOMATIC]
    file.write_text(TRAINING)
    found = _verify(file, changed(*wrong).encode())

    assert file.read_text() == TRAINING
    assert (found.verdict, found.rolled_back) == (Verdict.DIFFERENT, True)
    assert found.notes[-1] == "without the migration, the command computes the same twice"
    assert found.to_dict()["sites"][0]["devices_after"] == 8


def test_a_program_that_never_computes_the_same_is_told_apart(file: pathlib.Path):
    unsteady = changed(("default_rng(0)", "default_rng()"))
    file.write_text(unsteady)
    found = _verify(file, unsteady.encode() + b"\n")

    assert (found.verdict, found.rolled_back) == (Verdict.DIFFERENT, True)
    assert found.notes[-1] == (
        "the command does not compute the same twice, even without the migration: give it fixed "
        "seeds, and let it not go on from files of its last run"
    )
