"""What the ranks write arrives: whole lines, each behind its rank and the time, and none lost."""

import io
import os
import re

from launching import PYTHON, launch, launched, lines, notices

from jax_dist.launch.outcome import Lines, Printer

_PREFIXED = re.compile(r"\[[01] \d\d:\d\d:\d\d\.\d\d\d\] ")


def test_each_line_stands_behind_rank_and_time():
    program = "import os; print('out', os.environ['RANK']); print('really'); os.write(2, b'err\\n')"
    ended = launch("-n", "2", "--", *PYTHON, program)

    assert ended.returncode == 0
    assert all(_PREFIXED.match(line) for line in ended.stdout.splitlines())
    assert sorted(lines(ended.stdout)) == [(0, "out 0"), (0, "really"), (1, "out 1"), (1, "really")]
    *errors, summary = ended.stderr.splitlines()
    assert sorted(lines("\n".join(errors))) == [(0, "err"), (1, "err")]
    assert re.fullmatch(r"jax-dist launch: 2 ranks, \d+\.\d s, exit code 0", summary)


def test_the_last_line_is_there_without_its_end():
    for program in ("print('half', end='')", "import os; os.write(1, b'half'); os._exit(0)"):
        assert lines(launch("-n", "1", "--", *PYTHON, program).stdout) == [(0, "half")]


def test_no_line_is_lost_or_mixed():
    program = (
        "import os, sys\n"
        "rank = os.environ['RANK']\n"
        "for i in range(5000): print(f'{rank}:{i}:' + rank * 100)\n"
        "os._exit(0)\n"
    )
    ended = launch("-n", "3", "--", *PYTHON, program)

    found = lines(ended.stdout)
    assert len(found) == 15000
    for rank in range(3):
        own = [text for number, text in found if number == rank]
        assert own == [f"{rank}:{i}:" + str(rank) * 100 for i in range(5000)]


def test_what_is_written_just_before_a_kill_is_there():
    program = "import os; print('x' * 60000); print('last words'); os.kill(os.getpid(), 9)"
    ended = launch("-n", "1", "--", *PYTHON, program)

    assert [text[:10] for _, text in lines(ended.stdout)] == ["x" * 10, "last words"]


def test_a_line_comes_when_it_is_printed():
    program = "import time; print('now'); time.sleep(600)"
    with launched("-n", "1", "--", *PYTHON, program) as process:
        assert process.stdout is not None
        assert lines(process.stdout.readline()) == [(0, "now")]


def test_what_a_shell_hands_to_tee_arrives_after_the_shell():
    late = "exec > >(sleep 0.3; cat); echo late"
    assert lines(launch("-n", "1", "--", "bash", "-c", late).stdout) == [(0, "late")]


def test_a_daemon_that_keeps_the_pipe_open_does_not_keep_the_job():
    daemon = "setsid sleep 600 & printf $!"  # no end of the line: it may go on
    ended = launch("-n", "1", "--", "bash", "-c", daemon)
    os.kill(int(lines(ended.stdout)[0][1]), 9)  # it left the group, so it was left alone

    assert ended.returncode == 0


def test_a_progress_bar_gives_its_last_state():
    bar = Lines()

    assert bar.feed(b"\r10%|#   |\r50%|##  |", now=0.0) == []
    assert bar.overdue(now=4.9) == []
    assert bar.overdue(now=5.0) == ["50%|##  |"]
    assert bar.overdue(now=20.0) == []
    assert bar.feed(b"\r90%|### |\r100%|####|\nloss 0.1\r\n", now=21.0) == [
        "100%|####|",
        "loss 0.1",
    ]
    assert bar.feed(b"gone\r    \r\n", now=22.0) == ["gone"]


def test_bytes_that_are_no_text_are_shown_anyhow():
    assert Lines().feed(b"\xff \xc3\xa9\n", now=0.0) == ["\N{REPLACEMENT CHARACTER} é"]
    halves = Lines()
    assert halves.feed(b"caf\xc3", now=0.0) + halves.feed(b"\xa9\n", now=0.1) == ["café"]
    ended = launch(
        "-n", "1", "--", *PYTHON, "print('\\u2588')", PYTHONIOENCODING="utf-8", LC_ALL="C"
    )
    assert len(lines(ended.stdout)) == 1


def test_a_line_without_an_end_does_not_fill_the_memory():
    endless = Lines()
    pieces = [endless.feed(b"x" * 50000, now=0.0) for _ in range(4)]

    assert [len(line) for piece in pieces for line in piece] == [65536, 65536, 65536]
    assert len(endless.close()[0]) == 200000 - 3 * 65536


def test_colours_tell_the_ranks_apart():
    out = io.StringIO()
    printer = Printer(out, io.StringIO(), ranks=12, coloured=["stdout"])
    printer.lines(0, "stdout", ["a"])
    printer.lines(11, "stdout", ["b"])

    first, last = out.getvalue().splitlines()
    assert re.fullmatch(r"\x1b\[36m\[ 0 [\d:.]+\]\x1b\[0m a", first)
    assert re.fullmatch(r"\x1b\[31m\[11 [\d:.]+\]\x1b\[0m b", last)


def test_a_pipe_has_no_colours_unless_asked():
    assert "\x1b" not in launch("-n", "1", "--", "echo", "a").stdout
    assert "\x1b[36m" in launch("-n", "1", "--color", "always", "--", "echo", "a").stdout


def test_each_rank_has_a_log(tmp_path):
    logs = tmp_path / "new" / "logs"
    program = "import os; print('out'); os.write(2, b'err\\n'); print(os.environ['RANK'])"
    ended = launch("-n", "2", "--only-rank", "1", "--log-dir", str(logs), "--", *PYTHON, program)

    assert lines(ended.stdout) == [(1, "out"), (1, "1")]
    assert sorted(file.name for file in logs.iterdir()) == ["rank-0.log", "rank-1.log"]
    written = (logs / "rank-0.log").read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d\.\d\d\d ", line) for line in written)
    assert sorted(line.partition(" ")[2] for line in written) == ["0", "err", "out"]


def test_quiet_says_nothing_when_all_is_well():
    assert launch("-n", "2", "--quiet", "--", "true").stderr == ""
    assert notices(launch("-n", "1", "--quiet", "--", "false").stderr)[-1].endswith("exit code 1)")
