"""What was found of a step in the global view, as a table and as a picture.

The picture is an SVG image of the memory of one device, before and after: two bars to one scale,
what a device holds of the state under pmap, and in the global view. Colours follow the reader's
theme; each part also has its name and its bytes beside it, for who sees none.
"""

import dataclasses
import html
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._usage import counted
from jax_dist.global_views import state_placement
from jax_dist.global_views.mesh_axes import names_of
from jax_dist.global_views.uniformity import VaryingOrigin
from jax_dist.passes.pipeline import human_bytes

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
class Leaf:
    """What was found of one leaf of the state."""

    argument: int  # its position
    path: str  # "state.params['w']"
    type: jax.ShapeDtypeStruct  # of one device, `[*s]`
    shared: bool
    sharding: NamedSharding  # of `[*s]`, or of `[N, *s]` where it varies
    wanted: P  # how it is to lie if it is shared
    size: int  # N
    origin: VaryingOrigin | None  # where it began to vary
    inputs: tuple[str, ...]  # the paths of the arguments that vary and reach it

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """Its type as it is kept."""
        shape = self.type.shape if self.shared else (self.size, *self.type.shape)
        return jax.ShapeDtypeStruct(shape, self.type.dtype, sharding=self.sharding)

    @property
    def names(self) -> set[Any]:
        """The mesh axes that it is cut over."""
        return {name for part in self.sharding.spec for name in names_of(part)}

    @property
    def is_cut(self) -> bool:
        return state_placement.is_cut(self.sharding.spec)

    @property
    def is_kept_from_cut(self) -> bool:
        """Whether it was to be cut over the mapped axis, along which each device has its own."""
        wanted = {name for part in self.wanted for name in names_of(part)}
        return not self.shared and not wanted.isdisjoint(names_of(self.sharding.spec[0]))

    @property
    def bytes_per_device(self) -> int:
        shape = self.sharding.shard_shape(self.whole.shape)
        return math.prod(shape) * _item_size(self.type.dtype)

    @property
    def bytes_under_pmap(self) -> int:
        """The whole of it."""
        return self.type.size * _item_size(self.type.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class GlobalViewReport:
    """What was found of each leaf of the state, and how the step runs."""

    function: str
    devices: int
    leaves: tuple[Leaf, ...]
    islands: int  # shard_maps in the program
    scattered: int  # sums over devices of which each device gets the part that it keeps

    @property
    def bytes_per_device(self) -> int:
        """What one device holds of the state between two calls."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def bytes_under_pmap(self) -> int:
        """What one device holds of it under pmap: the whole of each leaf."""
        return sum(leaf.bytes_under_pmap for leaf in self.leaves)

    def picture(self) -> str:
        """What a device holds of the state under pmap and here, as the text of an SVG file."""
        under_pmap, here = [0, 0, 0], [0, 0, 0]
        for leaf in self.leaves:
            kind = 2 if not leaf.shared else int(not leaf.is_cut)
            under_pmap[kind] += leaf.bytes_under_pmap
            here[kind] += leaf.bytes_per_device
        before = ("to be sharded", "shared and whole", "different on each device")
        after = ("sharded", "whole", "different on each device")
        return _draw(
            f"State of {self.function} on one of {self.devices} devices",
            {
                "pmap": dict(zip(before, under_pmap, strict=True)),
                "global view": dict(zip(after, here, strict=True)),
            },
        )

    def as_json(self) -> dict[str, Any]:
        """The same as numbers and texts."""
        return {
            "function": self.function,
            "devices": self.devices,
            "islands": self.islands,
            "scattered": self.scattered,
            "bytes_per_device": self.bytes_per_device,
            "bytes_under_pmap": self.bytes_under_pmap,
            "leaves": [
                {
                    "path": leaf.path,
                    "shape": list(leaf.type.shape),
                    "dtype": str(leaf.type.dtype),
                    "shared": leaf.shared,
                    "varies_from": None if leaf.origin is None else str(leaf.origin),
                    "spec": str(leaf.sharding.spec),
                    "bytes_per_device": leaf.bytes_per_device,
                }
                for leaf in self.leaves
            ],
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each leaf: its path, its type, what was found, its spec, and its bytes."""
        return [
            (
                leaf.path,
                f"{leaf.type.dtype}{list(leaf.type.shape)}",
                "shared" if leaf.origin is None else f"varies from {leaf.origin}",
                str(leaf.sharding.spec).replace("PartitionSpec", "P"),
                f"{leaf.bytes_per_device:,}",
            )
            for leaf in self.leaves
        ]

    def __repr__(self) -> str:  # at a prompt, the table
        return str(self)

    def __str__(self) -> str:
        rows = [("leaf", "one device sees", "found", "lies as", "bytes per device"), *self.rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"{self.function} on {self.devices} devices: {counted(self.islands, 'shard_map')}, "
            f"{counted(self.scattered, 'sum')} scattered"
        ]
        for *texts, number in rows:
            cells = [text.ljust(width) for text, width in zip(texts, widths, strict=False)]
            lines.append("  ".join([*cells, number.rjust(widths[-1])]))
        lines.append(
            f"state: {self.bytes_per_device:,} bytes per device; under pmap "
            f"{self.bytes_under_pmap:,}"
        )
        return "\n".join(lines)


def _item_size(dtype: Any) -> int:
    """The bytes of one element; of a random key, those of its data."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return math.prod(data.shape) * data.dtype.itemsize
    return dtype.itemsize


def _draw(title: str, bars: Mapping[str, Mapping[str, int]]) -> str:
    """The bars below each other, to one scale, as the text of an SVG file.

    Each bar has the bytes of its parts by their names; parts at the same place have one colour.
    """
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
    return "\n".join([*lines, "</svg>", ""])
