"""What goes on, and for how long."""

import io
import time

import pytest

from jax_dist.commands import elapsed


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_seconds_go_by(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(elapsed, "_TICK", 0.001)
    monkeypatch.setattr(elapsed.time, "monotonic", lambda: now[0])
    stream = _Terminal()
    line = elapsed.Elapsed(stream)
    line("running the command")
    now[0] = 3.2
    while "3 s" not in stream.getvalue():
        time.sleep(0.001)
    line("running it again")
    line.close()

    shown = stream.getvalue()
    assert shown.startswith("\rrunning the command\x1b[K")
    assert "\rrunning the command: 3 s\x1b[K\n\rrunning it again\x1b[K" in shown
    assert shown.endswith("\rrunning it again\x1b[K\n")


def test_a_file_gets_one_line_for_each():
    stream = io.StringIO()
    line = elapsed.Elapsed(stream)
    line("running the command")
    line("running it again")
    line.close()

    assert stream.getvalue() == "running the command\nrunning it again\n"
