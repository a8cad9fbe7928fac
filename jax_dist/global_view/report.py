"""Report of a step in the global view."""

import dataclasses
import math

import jax
import rich.table
import rich.text
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist._rewrite.interpreter import names_of
from jax_dist._rewrite.report import as_text
from jax_dist._rewrite.uniformity import cut_along
from jax_dist._usage import counted
from jax_dist.global_view.uniformity import VaryingOrigin

_WIDTH = 120


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
    def is_cut(self) -> bool:
        return bool(cut_along(self.sharding.spec))

    @property
    def is_kept_from_cut(self) -> bool:
        """Whether it was to be cut over the mapped axis, along which each device has its own."""
        own = names_of(self.sharding.spec[0]) if not self.shared else ()
        return not cut_along(self.wanted).isdisjoint(own)

    @property
    def bytes_per_device(self) -> int:
        shape = self.sharding.shard_shape(self.whole.shape)
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

    def __repr__(self) -> str:  # at a prompt, the table
        return str(self)

    def __str__(self) -> str:
        table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("leaf", "one device sees", "kind", "sharding"):
            table.add_column(name, overflow="fold")
        table.add_column("bytes per device", justify="right")
        for leaf in self.leaves:
            table.add_row(
                rich.text.Text(leaf.path),
                rich.text.Text(f"{leaf.type.dtype}{list(leaf.type.shape)}"),
                "shared" if leaf.origin is None else f"varies from {leaf.origin}",
                str(leaf.sharding.spec).replace("PartitionSpec", "P"),
                f"{leaf.bytes_per_device:,}",
            )
        head = (
            f"{self.function} on {self.devices} devices: {counted(self.islands, 'shard_map')}, "
            f"{counted(self.scattered, 'sum')} scattered"
        )
        state = f"state: {self.bytes_per_device:,} bytes per device; under pmap "
        return f"{head}\n{as_text(table, width=_WIDTH)}\n{state}{self.bytes_under_pmap:,}"
