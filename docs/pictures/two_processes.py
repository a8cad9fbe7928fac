"""Draws two-processes.svg: the sums that two processes get from pmap, and from jax_dist.pmap.

    python docs/pictures/two_processes.py

The numbers are computed while it is drawn, in two processes with four simulated devices each.
"""

import pathlib

import jax
import matplotlib
import numpy as np
from jax import lax
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

import jax_dist
from jax_dist.testing import run_processes

_RIGHT, _WRONG, _INK, _PAPER = "#2e7d32", "#c62828", "#37474f", "#fafafa"
_ROWS = (
    ("jax.pmap, called alone", "pmap"),
    ("jax.pmap, inside jax.jit", "jit_pmap"),
    ("jax_dist.pmap, inside jax.jit", "jax_dist"),
)


def sums() -> dict[str, list[float]]:
    """Runs in each process: the sum of 0 to 7, of which it holds half, on each of its devices."""
    half = np.arange(4.0, dtype=np.float32) + 4 * jax.process_index()

    def total(x):
        return lax.psum(x, "i")

    functions = {
        "pmap": jax.pmap(total, "i"),
        "jit_pmap": jax.jit(jax.pmap(total, "i")),
        "jax_dist": jax.jit(jax_dist.pmap(total, "i")),
    }
    return {name: _local(function(half)) for name, function in functions.items()}


def _local(array: jax.Array) -> list[float]:
    return [shard.data.item() for shard in array.addressable_shards]


def draw(found: list[dict[str, list[float]]]) -> pyplot.Figure:
    """`found`: of each process, what each way gave on its devices."""
    figure, axes = pyplot.subplots(figsize=(8, 3.1), layout="constrained", facecolor=_PAPER)
    for height, (label, name) in zip((2, 1, 0), _ROWS, strict=True):
        axes.text(-0.65, height, label, ha="right", va="center", color=_INK, fontsize=11)
        for process, sums_of in enumerate(found):
            for device, value in enumerate(sums_of[name]):
                _cell(axes, 4.6 * process + device, height, value)
    for process in range(2):
        axes.text(4.6 * process + 1.5, 2.75, f"process {process}", ha="center", color=_INK)
    axes.set_title(
        f"psum of 0 to 7, over 8 devices in 2 processes (jax {jax.__version__})",
        loc="left",
        color=_INK,
        fontsize=11,
    )
    axes.set(xlim=(-5.2, 8.3), ylim=(-0.6, 3.1))
    axes.axis("off")
    return figure


def _cell(axes: pyplot.Axes, x: float, y: float, value: float) -> None:
    colour = _RIGHT if value == 28 else _WRONG
    corner = (x - 0.36, y - 0.3)
    box = FancyBboxPatch(
        corner, 0.72, 0.6, boxstyle="round,pad=0.04", fc="white", ec=colour, lw=1.5
    )
    axes.add_patch(box)
    axes.text(x, y, f"{value:g}", ha="center", va="center", color=colour, fontsize=12)


def main() -> None:
    outcomes = run_processes(sums, processes=2, cpu_devices=4, timeout=300)
    # The same bytes on each machine: no date, no random ids, letters as shapes.
    matplotlib.rcParams.update({"svg.hashsalt": "jax_dist", "svg.fonttype": "path"})
    path = pathlib.Path(__file__).with_name("two-processes.svg")
    draw([outcome.value for outcome in outcomes]).savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
