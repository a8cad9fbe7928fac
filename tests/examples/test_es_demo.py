"""The demo shows its parts, measures what it says, and leaves no process behind."""

import io
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import demo_report
import matplotlib.image
import psutil
import pytest
from demo_processes import Run, Workers
from rich.console import Console

_ROOT = pathlib.Path(__file__).parents[2]
_DEMO = _ROOT / "examples" / "demo.py"


def measured(label: str, colour: str, scale: float, sent: float) -> Run:
    return Run(
        label,
        "program.py",
        colour,
        curve=[(scale * second, 100.0 * second) for second in range(1, 6)],
        trained={
            "seconds": 22.5 * scale,
            "first_step": 12.25 * scale,
            "second_step": 0.5 * scale,
            "step": 0.025 * scale,
            "compile": 18.0 * scale,
            "programs": 2,
            "peak_memory": 1.5e9,
            "theta": [1.0, 2.0 + scale],
        },
        facts={"program_size": 128e6 * scale, "sent": sent},
        again={"first_step": 2.5 * scale},
    )


def test_the_table_says_what_was_measured():
    runs = [
        measured("before: pmap", "red", 1.0, 3640.0),
        measured("by hand: shard_map", "green", 0.25, 968.0),
    ]
    console = Console(width=90, record=True, file=io.StringIO())

    console.print(demo_report.table_of(runs, None))

    lines = [" ".join(line.split("│")).split() for line in console.export_text().splitlines()]
    rows = {" ".join(line[:-4]): " ".join(line[-4:]) for line in lines}
    assert rows["all generations"] == "22.50 s 5.62 s"
    assert rows["first step"] == "12.25 s 3.06 s"
    assert rows["second step"] == "500 ms 125 ms"
    assert rows["each later step"] == "25 ms 6 ms"
    assert rows["tracing and compiling"] == "18.00 s 4.50 s"
    assert rows["program size"] == "128.0 MB 32.0 MB"
    assert rows["sent, per step and device"] == "3.6 kB 968 B"
    assert rows["peak memory of the process"] == "1.5 GB 1.5 GB"
    assert rows["first step, second start"] == "2.50 s 625 ms"


def test_the_front_page_has_the_rows_of_the_demo():
    run = measured("before: jax.pmap", "red", 1.0, 3640.0)
    (names, *_) = demo_report.table_of([run], None).columns
    page = (_ROOT / "README.md").read_text()
    table = page[page.index("| on one machine, in turns |") :].partition("\n\n")[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]

    assert rows == [*names.cells]


def test_what_was_not_looked_into_is_taken_from_explain():
    run = measured("before", "red", 1.0, 0.0)
    run.facts = {}
    moved = {"before": 3640.0, "after": 1246.0}
    said = {"report": {"before": {"stablehlo_bytes": 128_183_900}, "moved_bytes": moved}}
    console = Console(width=90, record=True, file=io.StringIO())

    console.print(demo_report.table_of([run], said))

    text = console.export_text()
    assert "128.2 MB" in text
    assert "3.6 kB" in text


def test_the_picture(tmp_path):
    demo_report.draw([measured("before", "red", 1.0, 0.0)], tmp_path / "demo.png")

    assert matplotlib.image.imread(tmp_path / "demo.png").shape == (540, 840, 4)


@pytest.mark.thorough
def test_a_process_that_fails_is_told_with_its_complaint(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    program = tmp_path / "broken.py"
    program.write_text("raise ValueError('this program is broken')\n")

    complains = pytest.raises(RuntimeError, match="this program is broken")
    with Workers(tmp_path, devices=2, seed=0) as workers, complains:
        workers.ask(str(program))


@pytest.mark.thorough
def test_programs_take_turns_step_by_step(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    program = tmp_path / "program.py"
    program.write_text(_TELLS_ITS_TIME.format(folder=str(tmp_path)))
    runs = [Run(f"run {i}", str(program), "red", looked_into=False) for i in range(2)]

    with Workers(tmp_path, devices=2, seed=0) as workers:
        workers.train(runs, 5, lambda run, number, score: None)

    times = [json.loads(path.read_text()) for path in tmp_path.glob("*.times")]
    steps = sorted(step for each in times for step in each)
    assert [len(each) for each in times] == [5, 5]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(steps))
    assert all(run.trained["seconds"] < 5 * 0.5 for run in runs)  # its own steps alone


_TELLS_ITS_TIME = """
import json, os, time

def train(seed, n_devices, generations, follow, checkpoints):
    times = []
    for generation in range(generations):
        begin = time.monotonic()
        time.sleep(0.2)
        times.append((begin, time.monotonic()))
        follow(generation, 0.0)
    with open(f"{folder}/{{os.getpid()}}.times", "w") as file:
        json.dump(times, file)
    return [0.0]
"""


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(signal.SIGINT, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, id="SIGTERM", marks=pytest.mark.thorough),
    ],
)
def test_nothing_is_left_running(sent, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    command = [sys.executable, _DEMO, "--noexplain", f"--out={tmp_path}"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as demo:
        children = wait_for_workers(psutil.Process(demo.pid), 3)
        demo.send_signal(sent)
        errors = demo.communicate(timeout=120)[1]

    assert demo.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[sent], errors
    # At once: when the demo is gone, a worker would also end, but only where it writes again.
    assert [child for child in children if child.is_running()] == []


def wait_for_workers(demo: psutil.Process, count: int) -> list[psutil.Process]:
    limit = time.monotonic() + 240  # on a busy machine
    while time.monotonic() < limit:
        children = [child for child in demo.children() if is_worker(child)]
        if len(children) == count:
            return children
        time.sleep(0.1)
    demo.kill()
    raise AssertionError("the demo has started no workers")


def is_worker(process: psutil.Process) -> bool:
    try:
        return any("demo_worker.py" in part for part in process.cmdline())
    except psutil.NoSuchProcess:  # one that has just ended, such as lint
        return False


@pytest.mark.slow
def test_the_whole_demo_for_machines(tmp_path):
    command = [sys.executable, _DEMO, "--json", "--generations=4", f"--out={tmp_path / 'out'}"]
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    before, migrated, by_hand = said["runs"].values()
    codes = {finding["code"] for finding in said["lint"]}
    assert codes == {"JXD001", "JXD002", "JXD301", "JXD401"}
    assert "+    return jax_dist.pmap(update" in said["diff"]
    assert said["explain"]["captured"][0]["bytes"] == 64_000_000
    assert [run["trained"]["programs"] for run in (before, migrated, by_hand)] == [2, 1, 1]
    assert migrated["facts"]["program_size"] < said["explain"]["before"]["stablehlo_bytes"] / 100
    assert by_hand["facts"]["exchanged"] == {"all-gather": 512, "all-reduce": 456}
    assert by_hand["facts"]["sent"] == 512 * 7 / 8 + 2 * 456 * 7 / 8
    assert said["explain"]["moved_bytes"]["after"] == migrated["facts"]["sent"]  # one unit
    assert len(migrated["curve"]) == 4
    assert pathlib.Path(said["picture"]).stat().st_size > 10_000
