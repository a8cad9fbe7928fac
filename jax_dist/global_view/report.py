"""Report of a step in the global view."""

import dataclasses
import math

import jax
from jax.sharding import NamedSharding

from jax_dist._passes.uniformity import find_sharded_axes
from jax_dist._usage import counted, make_table, render


@dataclasses.dataclass(frozen=True, slots=True)
class StateLeaf:
    """Facts about one leaf of the state."""

    argument: int  # its position
    path: str  # "state.params['w']"
    type: jax.ShapeDtypeStruct  # on one device, `[*s]`
    wanted: NamedSharding  # what `shardings` asks for `[*s]`, which it has if it is uniform
    sharding: NamedSharding  # of `[*s]`, or of `[N, *s]` where it varies
    size: int  # N
    origin: str | None  # where it began to vary, "train.py:12 (add)"

    @property
    def uniform(self) -> bool:
        """True if all devices have the same value."""
        return self.origin is None

    @property
    def whole(self) -> jax.ShapeDtypeStruct:
        """The type of the global array."""
        shape = self.type.shape if self.uniform else (self.size, *self.type.shape)
        return jax.ShapeDtypeStruct(shape, self.type.dtype, sharding=self.sharding)

    @property
    def is_sharded(self) -> bool:
        return bool(find_sharded_axes(self.sharding.spec))

    @property
    def bytes_per_device(self) -> int:
        shape = self.sharding.shard_shape(self.whole.shape)
        return math.prod(shape) * self.type.dtype.itemsize

    @property
    def bytes_under_pmap(self) -> int:
        """The bytes of the whole leaf."""
        return self.type.size * self.type.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class GlobalViewReport:
    """Facts about the leaves of the state, and how the step runs."""

    function: str
    devices: int
    leaves: tuple[StateLeaf, ...]
    shard_maps: int  # in the program
    scattered: int  # sums over devices of which each device gets the shard that it keeps

    @property
    def bytes_per_device(self) -> int:
        """The bytes of the state that one device holds between two calls."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    @property
    def bytes_under_pmap(self) -> int:
        """The bytes that it holds under pmap: the whole of each leaf."""
        return sum(leaf.bytes_under_pmap for leaf in self.leaves)

    def __repr__(self) -> str:  # the table, also at a prompt
        columns = ("leaf", "one device sees", "kind", "sharding", "bytes per device")
        rows = [
            (
                leaf.path,
                f"{leaf.type.dtype}{list(leaf.type.shape)}",
                "uniform" if leaf.uniform else f"varies from {leaf.origin}",
                str(leaf.sharding.spec).replace("PartitionSpec", "P"),
                f"{leaf.bytes_per_device:,}",
            )
            for leaf in self.leaves
        ]
        table = make_table(columns, rows, numbers=1)
        head = (
            f"{self.function} on {self.devices} devices: {counted(self.shard_maps, 'shard_map')}, "
            f"{counted(self.scattered, 'sum')} scattered"
        )
        state = f"state: {self.bytes_per_device:,} bytes per device; under pmap "
        return f"{head}\n{render(table, width=120)}\n{state}{self.bytes_under_pmap:,}"
