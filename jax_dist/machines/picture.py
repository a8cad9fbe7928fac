"""A picture of what each way takes of the memory of one device, as the text of an SVG file.

Bars of one machine have one scale: that of its device, or of the largest bar. Colours follow the
reader's theme, and each bar has its bytes beside it.
"""

import html
from collections.abc import Sequence
from typing import NamedTuple

from jax_dist import _pictures
from jax_dist._usage import human_bytes

_LEFT, _SCALE, _ROW = 130, 400, 34


class Bar(NamedTuple):
    """One way on one machine."""

    machine: str
    way: str
    arguments: int  # bytes
    peak: int | None  # with them; None: there is no program
    memory: int | None  # of the device


def draw(title: str, bars: Sequence[Bar]) -> str:
    """The bars, by machine, below each other."""
    groups: dict[str, list[Bar]] = {}
    for bar in bars:
        groups.setdefault(bar.machine, []).append(bar)
    lines, top = [], 48
    for machine, own in groups.items():
        top += 18
        lines.append(f'<text x="16" y="{top}">{html.escape(machine)}</text>')
        largest = max([bar.peak or 0 for bar in own] + [bar.memory or 0 for bar in own]) or 1
        begin = top + 10
        for bar in own:
            top += _ROW
            lines += _bar(bar, top - 22, _SCALE / largest)
        if memory := own[0].memory:
            x = _LEFT + memory * _SCALE / largest
            lines += [
                f'<line class="limit" x1="{x:.1f}" y1="{begin - 6}" x2="{x:.1f}" y2="{top + 4}"/>',
                f'<text class="small" x="{x + 4:.1f}" y="{begin - 8}">'
                f"{human_bytes(memory)} for programs</text>",
            ]
        top += 20
    legend = "dark: arguments; light: results and temporary memory; red: more than there is"
    height = top + 30
    lines.append(f'<text class="small" x="16" y="{height - 14}">{legend}</text>')
    return _pictures.card(title, height, lines)


def _bar(bar: Bar, top: int, scale: float) -> list[str]:
    """Its name, its parts from left to right, and its bytes."""
    name = f'<text class="small" x="16" y="{top + 15}">{html.escape(bar.way)}</text>'
    if bar.peak is None:
        return [name, f'<text class="small" x="{_LEFT}" y="{top + 15}">no program</text>']
    memory = bar.peak if bar.memory is None else bar.memory
    edges = [0, min(bar.arguments, memory), min(bar.peak, memory), bar.peak]
    lines, kinds = [name], ("part0", "part1", "over")
    for kind, start, end in zip(kinds, edges, edges[1:], strict=False):
        if end > start:
            lines.append(
                f'<rect class="{kind}" x="{_LEFT + start * scale:.1f}" y="{top}" '
                f'width="{(end - start) * scale:.1f}" height="22">'
                f"<title>{html.escape(bar.way)}: {end - start:,} bytes</title></rect>"
            )
    x = _LEFT + bar.peak * scale + 6
    lines.append(f'<text class="small" x="{x:.1f}" y="{top + 15}">{human_bytes(bar.peak)}</text>')
    return lines
