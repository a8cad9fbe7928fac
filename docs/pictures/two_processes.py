"""Draw two-processes.svg: the sums that two processes get from pmap, and from jax_dist.pmap.

    python docs/pictures/two_processes.py

The numbers are computed, and printed, in two processes with four simulated devices each.
"""

import pathlib

import jax
import numpy as np
from jax import lax

import jax_dist
from jax_dist.testing import run_processes

_ROWS = (
    ("jax.pmap, called alone", "pmap"),
    ("jax.pmap, inside jax.jit", "jit_pmap"),
    ("jax_dist.pmap, inside jax.jit", "jax_dist"),
)
_WIDTH, _ROW = 400, 76  # about as wide as a phone, so that the letters keep their size there
# Text that the reader's machine sets, on a card of its own: light or dark as the system is.
_STYLE = """
  text { font: 16px system-ui, sans-serif; fill: #263238; }
  .value { text-anchor: middle; font-weight: 600; }
  .small { font-size: 14px; }
  .card { fill: #fafafa; stroke: #b0bec5; }
  .cell { fill: #fff; stroke-width: 1.5; }
  .right.cell { stroke: #2e7d32; } .right.value { fill: #2e7d32; }
  .wrong.cell { stroke: #c62828; } .wrong.value { fill: #c62828; }
  @media (prefers-color-scheme: dark) {
    text { fill: #eceff1; }
    .card { fill: #1e2429; stroke: #546e7a; }
    .cell { fill: #12161a; }
    .right.cell { stroke: #81c784; } .right.value { fill: #81c784; }
    .wrong.cell { stroke: #ef9a9a; } .wrong.value { fill: #ef9a9a; }
  }
"""


def sums() -> dict[str, list[float]]:
    """Run in each process: the sum of 0 to 7, of which it holds half, on each of its devices."""
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


def draw(found: list[dict[str, list[float]]]) -> str:
    """`found`: of each process, what each way gave on its devices."""
    height = 72 + len(_ROWS) * _ROW
    what = f"psum of 0 to 7 over 8 devices (jax {jax.__version__})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">',
        f"<title>{what}, in 2 processes</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="8"/>',
        f'<text x="16" y="28">{what}</text>',
    ]
    for process in range(len(found)):
        lines.append(f'<text class="small" x="{_left(process, 0)}" y="54">process {process}</text>')
    for row, (label, name) in enumerate(_ROWS):
        top = 66 + row * _ROW
        lines.append(f'<text x="16" y="{top + 18}">{label}</text>')
        for process, sums_of in enumerate(found):
            for device, value in enumerate(sums_of[name]):
                lines += _cell(_left(process, device), top + 28, value)
    return "\n".join([*lines, "</svg>", ""])


def _left(process: int, device: int) -> int:
    return 16 + 192 * process + 44 * device


def _cell(x: int, y: int, value: float) -> list[str]:
    kind = "right" if value == 28 else "wrong"
    return [
        f'<rect class="{kind} cell" x="{x}" y="{y}" width="40" height="32" rx="4"/>',
        f'<text class="{kind} value" x="{x + 20}" y="{y + 22}">{value:g}</text>',
    ]


def main() -> None:
    outcomes = run_processes(sums, processes=2, cpu_devices=4, timeout=300)
    sums_by_process = [outcome.value for outcome in outcomes]
    for label, name in _ROWS:
        numbers = " and ".join(f"{process[name][0]:g}" for process in sums_by_process)
        print(f"{label + ':':32} {numbers}")
    path = pathlib.Path(__file__).with_name("two-processes.svg")
    path.write_text(draw(sums_by_process))


if __name__ == "__main__":
    main()
