"""An ES program of the pmap era: what is wrong with it, the cure, and both of them at work.

    python examples/demo.py

Shows what `jax-dist lint` finds in `es_before_pmap.py`, what `jax_dist.explain` says of it and what
`jax-dist migrate` makes of it. Then three programs learn the same, each in a process of its own,
and take turns step by step: the old one, the migrated one, and `es_after.py`, which is written by
hand. In the end there is a table and, in --out, a picture. Takes half a minute on two CPU cores;
the compilation cache is a fresh folder, so that all of them start cold.
"""

import difflib
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import Any

import es_common
from absl import app, flags
from demo_processes import Run, Workers
from demo_report import draw, table_of
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.text import Text

_JSON = flags.DEFINE_bool("json", default=False, help="Print one JSON object, and nothing else.")
_EXPLAIN = flags.DEFINE_bool(
    "explain", default=True, help="Ask explain, which compiles the old program in three ways."
)

_BEFORE = pathlib.Path(__file__).with_name("es_before_pmap.py")
_AFTER = pathlib.Path(__file__).with_name("es_after.py")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"Too many arguments: {' '.join(argv[1:])}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes are ended
    out = pathlib.Path(es_common.OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(quiet=_JSON.value)
    try:
        with tempfile.TemporaryDirectory(prefix="jax_dist_demo_") as folder:
            found = show(console, pathlib.Path(folder), out)
    except KeyboardInterrupt:
        console.print("\nstopped; nothing is left running")
        sys.exit(130)
    if _JSON.value:
        print(json.dumps(found, indent=2))


def show(console: Console, folder: pathlib.Path, out: pathlib.Path) -> dict[str, Any]:
    """The whole demo. What it makes lies in `folder`, but for the picture."""
    devices, seed = es_common.DEVICES.value, es_common.SEED.value
    with Workers(folder, devices=devices, seed=seed) as workers:
        lint = show_lint(console)
        explained = show_explain(console, workers) if _EXPLAIN.value else None
        migrated, diff = show_migrate(console, out)
        runs = [
            # What explain has told need not be measured again: it takes a while.
            Run("before: jax.pmap", str(_BEFORE), "red", looked_into=explained is None),
            Run("migrated: jax_dist.pmap", str(migrated), "blue"),
            Run("by hand: shard_map", str(_AFTER), "green"),
        ]
        console.rule("[bold]4  All three learn, in turns")
        train(console, workers, runs)
        console.rule("[bold]5  The second start, with the compilation cache")
        start_again(console, workers, runs)
    picture = out / "demo.png"
    draw(runs, picture)
    console.print(table_of(runs, explained))
    console.print(f"picture   {picture}\nmigrated  {migrated}")
    return {
        "lint": lint,
        "explain": explained and explained["report"],
        "diff": diff,
        "runs": {run.label: run.to_dict() for run in runs},
        "picture": str(picture),
    }


def show_lint(console: Console) -> list[dict[str, Any]]:
    console.rule("[bold]1  What lint finds")
    console.print(f"[dim]$ jax-dist lint {_BEFORE.name}")
    colour = "always" if console.is_terminal else "never"
    said = jax_dist_says("lint", "--color", colour, _BEFORE.name)
    console.print(Text.from_ansi(said), soft_wrap=True)
    return json.loads(jax_dist_says("lint", "--output-format", "json", _BEFORE.name))


def show_explain(console: Console, workers: Workers) -> dict[str, Any]:
    console.rule("[bold]2  What explain says")
    console.print("[dim]>>> jax_dist.explain(update, theta, opt_state, keys)")
    with console.status("compiles the program as it is, rewritten, and as plain jit"):
        said = workers.ask(str(_BEFORE), "--explain")
    console.print(Text(said["text"]), soft_wrap=True)
    return said


def show_migrate(console: Console, out: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Migrates a copy of the old program."""
    console.rule("[bold]3  What migrate writes")
    before = _BEFORE.read_text()
    migrated = out / "es_migrated.py"
    migrated.write_text(before)
    for command in (["lint", "--fix", "--unsafe-fixes"], ["migrate", "--write"]):
        console.print(f"[dim]$ jax-dist {' '.join(command)} {migrated.name}")
        jax_dist_says(*command, "--quiet", str(migrated.resolve()))
    lines = difflib.unified_diff(
        before.splitlines(keepends=True),
        migrated.read_text().splitlines(keepends=True),
        _BEFORE.name,
        migrated.name,
    )
    diff = "".join(lines)
    console.print(Panel(Syntax(diff, "diff", background_color="default"), border_style="dim"))
    return migrated, diff


def train(console: Console, workers: Workers, runs: list[Run]) -> None:
    """In turns, so that they meet the same moments of the machine and none slows another."""
    generations = es_common.GENERATIONS.value
    columns = (
        TextColumn("{task.description:<25}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("return {task.fields[score]:>5}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        tasks = {
            run.label: progress.add_task(
                f"[{run.colour}]{run.label}", total=generations, score="..."
            )
            for run in runs
        }

        def follow(run: Run, number: int, score: float) -> None:
            progress.update(tasks[run.label], completed=number, score=f"{score:.0f}")
            if number == generations:
                progress.stop_task(tasks[run.label])

        workers.train(runs, generations, follow)


def start_again(console: Console, workers: Workers, runs: list[Run]) -> None:
    with console.status("three generations each, in new processes"):
        workers.start_again(runs)


def jax_dist_says(*arguments: str) -> str:
    """The standard output of the command line tool; it exits with 1 where it found something."""
    command = [sys.executable, "-m", "jax_dist", *arguments]
    ran = subprocess.run(command, cwd=_BEFORE.parent, capture_output=True, text=True, check=False)
    if ran.returncode > 1:
        raise RuntimeError(f"{' '.join(command)}\n{ran.stderr}")
    return ran.stdout


if __name__ == "__main__":
    es_common.declare("demo", generations=30)
    app.run(main)
