"""The memory of one device before and after, as an SVG image.

Two bars to one scale: what a device holds of the state under pmap, and in the global view. Colours
follow the reader's theme; each part also has its name and its bytes beside it, for who sees none.
"""

import dataclasses
import html
from collections.abc import Sequence

from jax_dist.passes.findings import human_bytes

_WIDTH, _SCALE, _LEFT, _ROW = 720, 520, 16, 64
_STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 14px; fill: #1a1a1a; }
.small { font-size: 12px; fill: #555; }
.part0 { fill: #3b6fb6; } .part1 { fill: #8fb3e0; } .part2 { fill: #d08a3c; }
.card { fill: #fff; stroke: #ccc; }
@media (prefers-color-scheme: dark) {
  svg { fill: #eee; } .small { fill: #aaa; } .card { fill: #1b1b1f; stroke: #444; }
}
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """What one device holds, in parts: bytes by name, each name at the same place in all bars."""

    title: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)


def draw(title: str, bars: Sequence[Bar]) -> str:
    """The bars below each other, to one scale, as the text of an SVG file."""
    height = 56 + len(bars) * _ROW
    name = html.escape(title)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">',
        f"<title>{name}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{_WIDTH - 2}" height="{height - 2}" rx="8"/>',
        f'<text x="{_LEFT}" y="28">{name}</text>',
    ]
    largest = max((bar.total for bar in bars), default=0)
    for row, bar in enumerate(bars):
        lines += _drawn(bar, 44 + row * _ROW, largest)
    return "\n".join([*lines, "</svg>", ""])


def _drawn(bar: Bar, top: int, largest: int) -> list[str]:
    """One bar; `largest` bytes are as long as the scale."""
    lines, left = [], float(_LEFT)
    for number, (name, size) in enumerate(bar.parts):
        width = _SCALE * size / largest if largest else 0.0
        if size:
            lines.append(
                f'<rect class="part{number}" x="{left:.1f}" y="{top}" width="{width:.1f}" '
                f'height="24"><title>{html.escape(name)}: {size:,} bytes</title></rect>'
            )
        left += width
    parts = ", ".join(f"{human_bytes(size)} {name}" for name, size in bar.parts if size)
    said = html.escape(f"{bar.title}: {parts}")
    lines += [
        f'<text x="{left + 8:.1f}" y="{top + 17}">{human_bytes(bar.total)}</text>',
        f'<text class="small" x="{_LEFT}" y="{top + 42}">{said}</text>',
    ]
    return lines
