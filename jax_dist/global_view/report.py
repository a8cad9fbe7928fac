"""What was found of a step in the global view, as a table and as a picture."""

import dataclasses
import math

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _pictures
from jax_dist._rewrite.interpreter import names_of
from jax_dist._usage import counted
from jax_dist.global_view.uniformity import VaryingOrigin
from jax_dist.uniformity import cut_along


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
    def is_away(self) -> bool:
        """Whether it lies in another memory than that of the device, as in "pinned_host"."""
        return self.sharding.memory_kind not in (None, "device")

    @property
    def is_cut(self) -> bool:
        return bool(cut_along(self.sharding.spec))

    @property
    def is_kept_from_cut(self) -> bool:
        """Whether it was to be cut over the mapped axis, along which each device has its own."""
        own = names_of(self.sharding.spec[0]) if not self.shared else ()
        return not cut_along(self.wanted).isdisjoint(own)

    @property
    def bytes_per_device(self) -> int:
        """In the memory of the device."""
        shape = (0,) if self.is_away else self.sharding.shard_shape(self.whole.shape)
        return math.prod(shape) * self.type.dtype.itemsize

    @property
    def bytes_under_pmap(self) -> int:
        """The whole of it."""
        return self.type.size * self.type.dtype.itemsize


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
        return _pictures.stacked_bars(
            f"State of {self.function} on one of {self.devices} devices",
            {
                "pmap": dict(zip(before, under_pmap, strict=True)),
                "global view": dict(zip(after, here, strict=True)),
            },
        )

    def __repr__(self) -> str:  # at a prompt, the table
        return str(self)

    def __str__(self) -> str:
        rows = [("leaf", "one device sees", "found", "lies as", "bytes per device")]
        for leaf in self.leaves:
            away = f" in {leaf.sharding.memory_kind}" if leaf.is_away else ""
            rows.append(
                (
                    leaf.path,
                    f"{leaf.type.dtype}{list(leaf.type.shape)}",
                    "shared" if leaf.origin is None else f"varies from {leaf.origin}",
                    str(leaf.sharding.spec).replace("PartitionSpec", "P") + away,
                    f"{leaf.bytes_per_device:,}",
                )
            )
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
