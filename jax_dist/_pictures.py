"""Pictures of bytes as the text of an SVG file: a card with a title, and bars in it.

Colours follow the reader's theme; each part also has its name and its bytes beside it, for who sees
none.
"""

import html
from collections.abc import Mapping, Sequence

from jax_dist._usage import human_bytes

WIDTH, _LEFT, _SCALE, _ROW = 720, 16, 520, 64
_STYLE = """
svg { font-family: system-ui, sans-serif; font-size: 14px; fill: #1a1a1a; }
.small { font-size: 12px; fill: #555; }
.part0 { fill: #3b6fb6; } .part1 { fill: #8fb3e0; } .part2 { fill: #d08a3c; }
.over { fill: #c0392b; }
.limit { stroke: #1a1a1a; stroke-dasharray: 4 3; }
.card { fill: #fff; stroke: #ccc; }
@media (prefers-color-scheme: dark) {
  svg { fill: #eee; } .small { fill: #aaa; } .card { fill: #1b1b1f; stroke: #444; }
  .limit { stroke: #eee; }
}
"""


def card(title: str, height: int, lines: Sequence[str]) -> str:
    """A picture of these elements, below its title."""
    name = html.escape(title)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img">',
            f"<title>{name}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="8"/>',
            f'<text x="{_LEFT}" y="28">{name}</text>',
            *lines,
            "</svg>",
            "",
        ]
    )


def stacked_bars(title: str, bars: Mapping[str, Mapping[str, int]]) -> str:
    """The bars below each other, to one scale.

    Each bar has the bytes of its parts by their names; parts at the same place have one colour.
    """
    lines = []
    largest = max(sum(parts.values()) for parts in bars.values())
    for row, (bar, parts) in enumerate(bars.items()):
        top, left = 44 + row * _ROW, float(_LEFT)
        for number, (part, size) in enumerate(parts.items()):
            width = _SCALE * size / largest if largest else 0.0
            if size:
                lines.append(
                    f'<rect class="part{number}" x="{left:.1f}" y="{top}" width="{width:.1f}" '
                    f'height="24"><title>{html.escape(part)}: {size:,} bytes</title></rect>'
                )
            left += width
        shown = ", ".join(f"{human_bytes(size)} {part}" for part, size in parts.items() if size)
        said = html.escape(f"{bar}: {shown}")
        lines += [
            f'<text x="{left + 8:.1f}" y="{top + 17}">{human_bytes(sum(parts.values()))}</text>',
            f'<text class="small" x="{_LEFT}" y="{top + 42}">{said}</text>',
        ]
    return card(title, 56 + len(bars) * _ROW, lines)
