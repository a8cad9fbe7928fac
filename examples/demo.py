"""Migration of an ES program of the pmap era, from lint to the learning curves.

    python examples/demo.py

Shows what `jax-dist lint` finds in `es_before_pmap.py`, what `jax_dist.explain` reports, and what
`jax-dist migrate` writes. Then three programs learn the same policy, each in a process of its own:
the original, the migrated one, and `es_after.py`, written by hand. Ends with a table and, in --out,
a picture. Takes half a minute on two CPU cores; the compilation cache is a fresh folder, so that
all start cold.
"""

import dataclasses
import difflib
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import es_common
import numpy as np
from absl import flags
from es_common import FLAGS
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

flags.DEFINE_bool("json", default=False, help="Print one JSON object, and nothing else.")

_BEFORE = pathlib.Path(__file__).with_name("es_before_pmap.py")
_AFTER = pathlib.Path(__file__).with_name("es_after.py")
_WORKER = pathlib.Path(__file__).with_name("demo_worker.py")


@dataclasses.dataclass
class Run:
    """One program, and what was measured."""

    label: str
    program: pathlib.Path
    color: str
    curve: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # (seconds, return)
    cold: dict[str, Any] = dataclasses.field(default_factory=dict)  # with an empty cache
    warm: dict[str, Any] = dataclasses.field(default_factory=dict)  # second start


def main() -> None:
    out = pathlib.Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(quiet=FLAGS.json)
    with tempfile.TemporaryDirectory(prefix="jax_dist_demo_") as cache:
        results = show(console, cache, out)
    if FLAGS.json:
        print(json.dumps(results, indent=2))


def show(console: Console, cache: str, out: pathlib.Path) -> dict[str, Any]:
    """Run all parts of the demo."""
    console.rule("[bold]1  What lint finds")
    console.print(f"[dim]$ jax-dist lint {_BEFORE.name}")
    color = "always" if console.is_terminal else "never"
    console.print(Text.from_ansi(run_jax_dist("lint", "--color", color, _BEFORE.name)))

    console.rule("[bold]2  What explain reports")
    console.print("[dim]>>> jax_dist.explain(update, theta, opt_state, keys)")
    with console.status("compiling the program as it is, and rewritten"):
        (explained,) = run_worker(_BEFORE, cache, "--explain")
    console.print(Text(explained["text"]), soft_wrap=True)

    console.rule("[bold]3  What migrate writes")
    migrated, diff = migrate(out)
    console.print(Panel(Syntax(diff, "diff", background_color="default"), border_style="dim"))

    runs = [
        Run("before: jax.pmap", _BEFORE, "red"),
        Run("migrated: jax_dist.pmap", migrated, "blue"),
        Run("by hand: shard_map", _AFTER, "green"),
    ]
    console.rule("[bold]4  All three learn")
    train(console, cache, runs)
    console.rule("[bold]5  The second start, with the compilation cache")
    for run in runs:
        with console.status(f"three generations of {run.label}"):
            *_, run.warm = run_worker(run.program, cache, "--generations=3", "--nofacts")
    picture = out / "demo.png"
    draw(runs, picture)
    console.print(make_table(runs))
    console.print(f"picture   {picture}\nmigrated  {migrated}")
    return {
        "lint": json.loads(run_jax_dist("lint", "--output-format", "json", _BEFORE.name)),
        "explain": explained["report"],
        "diff": diff,
        "runs": [{**run.cold, "label": run.label, "curve": run.curve} for run in runs],
        "picture": str(picture),
    }


def migrate(out: pathlib.Path) -> tuple[pathlib.Path, str]:
    """Migrate a copy of the old program; return its path and the diff."""
    before = _BEFORE.read_text()
    migrated = out / "es_migrated.py"
    migrated.write_text(before)
    run_jax_dist("lint", "--fix", "--unsafe-fixes", "--quiet", str(migrated.resolve()))
    run_jax_dist("migrate", "--write", "--quiet", str(migrated.resolve()))
    texts = [text.splitlines(keepends=True) for text in (before, migrated.read_text())]
    return migrated, "".join(difflib.unified_diff(*texts, _BEFORE.name, migrated.name))


def train(console: Console, cache: str, runs: list[Run]) -> None:
    """Train with one program after the other, so that none slows another."""
    generations = FLAGS.generations
    columns = (
        TextColumn("{task.description:<25}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("return {task.fields[score]:>5}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        for run in runs:
            task = progress.add_task(f"[{run.color}]{run.label}", total=generations, score="...")
            for event in run_worker(run.program, cache, f"--generations={generations}"):
                if event["event"] == "generation":
                    score = event["mean_return"]
                    run.curve.append((event["seconds"], score))
                    progress.update(task, completed=event["number"], score=f"{score:.0f}")
                else:
                    run.cold = event


def run_worker(program: pathlib.Path, cache: str, *options: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a program in a new process, which ends with this iterator."""
    command = [sys.executable, str(_WORKER), str(program), f"--cache_folder={cache}"]
    command += [f"--devices={FLAGS.devices}", f"--seed={FLAGS.seed}", *options]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in process.stdout:
                yield json.loads(line)
        finally:
            process.stdout.close()
            process.terminate() if sys.exc_info()[0] else None
            code = process.wait()
        if code:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} exited with {code}\n{errors.read()}")


def run_jax_dist(*arguments: str) -> str:
    """Return the standard output of `jax-dist`, which exits with 1 if it found something."""
    command = [sys.executable, "-m", "jax_dist", *arguments]
    ran = subprocess.run(command, cwd=_BEFORE.parent, capture_output=True, text=True, check=False)
    if ran.returncode > 1:
        raise RuntimeError(f"{' '.join(command)}\n{ran.stderr}")
    return ran.stdout


def make_table(runs: list[Run]) -> Table:
    """Return the table of measurements, one column for each run, the original first."""
    original = np.array(runs[0].cold["theta"])
    rows: dict[str, Callable[[Run], str]] = {
        "all generations": lambda run: _seconds(run.cold["seconds"]),
        "first step": lambda run: _seconds(run.cold["first_step"]),
        "second step": lambda run: _seconds(run.cold["second_step"]),
        "each later step": lambda run: _seconds(run.cold["step"]),
        "tracing and compiling": lambda run: _seconds(run.cold["compile"]),
        "programs compiled for it": lambda run: str(run.cold["programs"]),
        "program size": lambda run: _bytes(run.cold["program_size"]),
        "sent, per step and device": lambda run: _bytes(run.cold["sent"]),
        "peak memory of the process": lambda run: _bytes(run.cold["peak_memory"]),
        "first step, second start": lambda run: _seconds(run.warm["first_step"]),
        "theta differs from before by": lambda run: (
            f"{np.abs(np.array(run.cold['theta']) - original).max():.1g}"
        ),
    }
    table = Table(title="The same numbers", title_style="bold")
    table.add_column("on one machine")
    for run in runs:
        table.add_column(run.label.replace(": ", "\n"), justify="right", style=run.color)
    for name, cell in rows.items():
        table.add_row(name, *map(cell, runs))
    return table


def draw(runs: list[Run], path: pathlib.Path) -> None:
    """Draw the learning curves over the time of each program's steps."""
    from matplotlib.figure import Figure  # only here: the demo is to start at once

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title="The same learning, over time",
        xlabel="seconds of its steps, compilation included",
        ylabel="mean return of the population (steps)",
    )
    for run in runs:
        seconds, returns = np.array(run.curve).T
        axes.plot(seconds, returns, ".-", color=f"tab:{run.color}", label=run.label)
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _bytes(size: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


if __name__ == "__main__":
    es_common.run(main, "demo", generations=30)
