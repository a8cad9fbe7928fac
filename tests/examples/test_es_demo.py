"""The demo: its table, its picture, and the whole program."""

import io
import json
import os
import pathlib
import subprocess
import sys

import demo
import matplotlib.image
import pytest
from absl import flags
from rich.console import Console

_ROOT = pathlib.Path(__file__).parents[2]


def _run(label: str, scale: float) -> demo.Run:
    cold = {
        "seconds": 22.5 * scale,
        "first_step": 12.25 * scale,
        "second_step": 0.5 * scale,
        "step": 0.025 * scale,
        "compile": 18.0 * scale,
        "programs": 2,
        "peak_memory": 1.5e9,
        "theta": [1.0, 2.0 + scale],
        "program_size": 128e6 * scale,
        "sent": 3640.0 * scale,
    }
    curve = [(scale * second, 100.0 * second) for second in range(1, 6)]
    return demo.Run(label, pathlib.Path("p.py"), "red", curve, cold, {"first_step": 2.5 * scale})


def test_the_table_holds_the_measurements_in_the_rows_of_the_front_page():
    runs = [_run("before: jax.pmap", 1.0), _run("by hand: shard_map", 0.25)]
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(demo.make_table(runs))
    page = (_ROOT / "README.md").read_text()
    table = page[page.index("| on one machine") :].partition("\n\n")[0]

    lines = [line.split("│")[1:-1] for line in console.export_text().splitlines()]
    rows = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines if line}

    assert rows["all generations"] == ["22.50 s", "5.62 s"]
    assert rows["each later step"] == ["25 ms", "6 ms"]
    assert rows["program size"] == ["128.0 MB", "32.0 MB"]
    assert rows["sent, per step and device"] == ["3.6 kB", "910 B"]
    assert rows["theta differs from before by"] == ["0", "0.8"]
    assert [*rows] == [line.split(" | ")[0].strip("| ") for line in table.splitlines()[2:]]


def test_the_picture(tmp_path):
    demo.draw([_run("before", 1.0)], tmp_path / "demo.png")

    assert matplotlib.image.imread(tmp_path / "demo.png").shape == (540, 840, 4)


def test_a_program_that_fails_is_reported_with_its_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    program = tmp_path / "broken.py"
    program.write_text("raise ValueError('this program is broken')\n")

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["demo"])

    with pytest.raises(RuntimeError, match="this program is broken"):
        list(demo.run_worker(program, str(tmp_path)))


@pytest.mark.thorough
def test_the_whole_demo(tmp_path):
    command = [sys.executable, demo.__file__, "--json", "--generations=4", f"--out={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    results = json.loads(ran.stdout)
    before, migrated, by_hand = results["runs"]
    assert {"JXD001", "JXD002", "JXD301", "JXD401"} <= {each["code"] for each in results["lint"]}
    assert "+    return jax_dist.pmap(update" in results["diff"]
    assert results["explain"]["captured"][0]["bytes"] == 64_000_000
    assert [run["programs"] for run in (before, migrated, by_hand)] == [2, 1, 1]
    assert migrated["program_size"] < before["program_size"] / 100
    assert by_hand["exchanged"] == {"all-gather": 512, "all-reduce": 456}
    assert results["explain"]["moved_bytes"]["after"] == migrated["sent"]
    assert before["theta"] == migrated["theta"] == by_hand["theta"]
    assert pathlib.Path(results["picture"]).stat().st_size > 10_000
