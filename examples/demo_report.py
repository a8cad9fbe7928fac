"""What the demo ends with: one table, one picture."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from demo_processes import Run
from rich.table import Table

_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def table_of(runs: Sequence[Run], explained: dict[str, Any] | None) -> Table:
    """One column for each run.

    Args:
      runs: the old program first.
      explained: what `explain` said of the old program, if it was asked.
    """
    table = Table(title="The same numbers", title_style="bold")
    table.add_column("on one machine, in turns")
    for run in runs:
        table.add_column(run.label.replace(": ", "\n"), justify="right", style=run.colour)
    rows: list[tuple[str, Callable[[Run], str]]] = [
        ("all generations", lambda run: _seconds(run.trained["seconds"])),
        ("first step", lambda run: _seconds(run.trained["first_step"])),
        ("second step", lambda run: _seconds(run.trained["second_step"])),
        ("each later step", lambda run: _seconds(run.trained["step"])),
        ("tracing and compiling", lambda run: _seconds(run.trained["compile"])),
        ("programs compiled for it", lambda run: str(run.trained["programs"])),
        ("program size", lambda run: _bytes(_size(run, explained))),
        ("sent, per step and device", lambda run: _bytes(_sent(run, explained))),
        ("peak memory of the process", lambda run: _bytes(run.trained["peak_memory"])),
        ("first step, second start", lambda run: _seconds(run.again["first_step"])),
        ("theta differs from before by", lambda run: f"{_difference(run, runs[0]):.1g}"),
    ]
    for name, cell in rows:
        table.add_row(name, *[cell(run) for run in runs])
    return table


def draw(runs: Sequence[Run], path: pathlib.Path) -> None:
    """Learning curves over the time of each program's own steps."""
    from matplotlib.figure import Figure  # only here: the demo is to begin at once

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(
        title="The same learning, over time",
        xlabel="seconds of its steps, compilation included",
        ylabel="mean return of the population (steps)",
    )
    for run in runs:
        seconds, returns = np.array(run.curve).T
        axes.plot(seconds, returns, ".-", color=f"tab:{run.colour}", label=run.label)
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def _size(run: Run, explained: dict[str, Any] | None) -> float | None:
    if run.facts:
        return run.facts["program_size"]
    return explained and explained["report"]["before"]["stablehlo_bytes"]


def _sent(run: Run, explained: dict[str, Any] | None) -> float | None:
    if run.facts:
        return run.facts["sent"]
    return explained and explained["report"]["moved_bytes"]["before"]


def _difference(run: Run, first: Run) -> float:
    return float(np.abs(np.array(run.trained["theta"]) - first.trained["theta"]).max())


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _bytes(size: float | None) -> str:
    if size is None:
        return "-"  # --noexplain
    for unit, factor in _SIZES:
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"
