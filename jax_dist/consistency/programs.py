"""The program of a function for each number of devices: traced, and not run."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.consistency.evaluation import manual_axes
from jax_dist.errors import ConsistencyError, message
from jax_dist.mapping import axes
from jax_dist.mapping.axes import Axis, AxisPrefix
from jax_dist.passes import interpreter


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedProgram:
    """What a function does on so many devices."""

    devices: int
    jaxpr: Any  # closed, of all leaves of the arguments
    tree: Any  # the structure of its result
    mapped: bool  # whether results come with the devices first: `[devices, *shape]`


@dataclasses.dataclass(frozen=True, slots=True)
class PerDevice:
    """A function of what one device has, which names the mapped axis."""

    fun: Callable
    name: str
    axis_name: Hashable
    in_axes: AxisPrefix
    args: tuple[Any, ...]

    def skipped(self, devices: int) -> str | None:
        """Why there is no program for so many devices."""
        for path, leaf, axis in self._leaves():
            if axis is not None and np.shape(leaf)[axis] % devices:
                return f"{path} has {np.shape(leaf)[axis]} rows, which do not divide evenly"
        return None

    def check(self) -> None:
        """Raises what `pmap` would: axes that do not fit, nothing that is mapped."""
        axes.check_axes("in_axes", self.in_axes)
        leaves, prefixes = jax.tree.leaves(self.args), self._axes()
        sizes = [np.shape(leaf) for leaf in leaves]
        wrong = [
            f"{path} has shape {np.shape(leaf)}, in_axes {axis}"
            for path, leaf, axis in self._leaves()
            if axis is not None and not -np.ndim(leaf) <= axis < np.ndim(leaf)
        ]
        if wrong:
            raise ConsistencyError(
                message(
                    what=f"in_axes of '{self.name}' names a dimension that is not there",
                    which=wrong,
                    why="a mapped argument is split along it, into equal shares of the devices",
                    do="Give None for an argument that all devices share, as in in_axes=(None, 0).",
                )
            )
        if not [axis for axis in prefixes if axis is not None] or not sizes:
            raise ConsistencyError(
                message(
                    what=f"nothing is mapped in '{self.name}'",
                    which=[f"in_axes is {self.in_axes}"],
                    why="every device would do the same with the same values",
                    do="Give the dimension to split for at least one argument.",
                )
            )

    def program(self, devices: int) -> CheckedProgram:
        trees: list[Any] = []

        def stacked(*blocks: Any) -> list[Any]:
            result = self.fun(*jax.tree.unflatten(structure, blocks))
            leaves, tree = jax.tree.flatten(result)
            trees.append(tree)
            return [jax.numpy.asarray(leaf)[None] for leaf in leaves]

        leaves, structure = jax.tree.flatten(self.args)
        specs = tuple(
            axes.spec_of_axis(axis, np.ndim(leaf), self.axis_name)
            for leaf, axis in zip(leaves, self._axes(), strict=True)
        )
        names: Any = (self.axis_name,)  # any hashable will do
        mesh = AbstractMesh((devices,), names, axis_types=(AxisType.Auto,))
        mapped = jax.shard_map(
            stacked, mesh=mesh, in_specs=specs, out_specs=P(self.axis_name), check_vma=False
        )
        return CheckedProgram(devices, jax.make_jaxpr(mapped)(*leaves), trees[-1], mapped=True)

    def _axes(self) -> tuple[Axis, ...]:
        return axes.spread_in_axes(self.in_axes, self.args, {}, self.name)

    def _leaves(self) -> Iterator[tuple[str, Any, Axis]]:
        paths = axes.argument_paths(self.fun, self.args, {}, range(len(self.args)))
        yield from zip(paths, jax.tree.leaves(self.args), self._axes(), strict=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Global:
    """A function of global arrays, under jit or with a shard_map in it."""

    fun: Callable
    name: str
    mesh: Mesh  # whose axes it names; made smaller for fewer devices
    args: tuple[Any, ...]

    def skipped(self, devices: int) -> str | None:
        if devices > jax.device_count():
            return f"there are {jax.device_count()} devices"
        if math.prod(self._shape(devices)) != devices:
            return f"a mesh {dict(self.mesh.shape)} cannot be made smaller to {devices}"
        return None

    def program(self, devices: int) -> CheckedProgram:
        shape = self._shape(devices)
        chosen = np.array(self.mesh.devices.flat[:devices]).reshape(shape)
        mesh = Mesh(chosen, self.mesh.axis_names, axis_types=self.mesh.axis_types)
        args = jax.tree.map(lambda leaf: _moved(leaf, mesh), self.args)
        leaves, structure = jax.tree.flatten(args)
        trees: list[Any] = []
        options = {"mesh": mesh} if _takes_mesh(self.fun) else {}

        def flat(*leaves: Any) -> list[Any]:
            result = self.fun(*jax.tree.unflatten(structure, leaves), **options)
            results, tree = jax.tree.flatten(result)
            trees.append(tree)
            return results

        try:
            with jax.set_mesh(mesh):
                jaxpr = jax.make_jaxpr(flat)(*leaves)
        except ValueError as error:
            if "context mesh" not in str(error):
                raise
            raise self._own_mesh(str(error).partition("\n")[0], devices) from error
        self._check_meshes(jaxpr, devices)
        return CheckedProgram(devices, jaxpr, trees[-1], mapped=False)

    def _shape(self, devices: int) -> tuple[int, ...]:
        """As much of each axis as fits, the first ones first."""
        shape, left = [], devices
        for size in self.mesh.devices.shape:
            shape.append(math.gcd(size, left))
            left //= shape[-1]
        return tuple(shape)

    def _check_meshes(self, jaxpr: Any, devices: int) -> None:
        """A function that brings a mesh of its own runs on that one, whatever is asked."""
        for eqn in interpreter.equations(jaxpr):
            if eqn.primitive.name == "shard_map":
                sizes = dict(eqn.params["mesh"].shape)
                if math.prod(sizes.values()) != devices and manual_axes(eqn):
                    line = interpreter.source_line(eqn) or "a shard_map"
                    raise self._own_mesh(f"{line}: its mesh is {sizes}", devices)

    def _own_mesh(self, which: str, devices: int) -> ConsistencyError:
        return ConsistencyError(
            message(
                what=f"'{self.name}' has a mesh of its own, which cannot be made smaller",
                which=[which, f"it is to be checked on {devices}"],
                why="the number of devices is that of the mesh, and it is fixed in the function",
                do="Give a function with a parameter named mesh, as in "
                "check(lambda x, mesh: jax.shard_map(f, mesh=mesh, ...)(x), x, mesh=mesh), or "
                "leave out mesh= in jax.shard_map, which then takes the one that is set.",
            )
        )


def _takes_mesh(fun: Callable) -> bool:
    try:
        return "mesh" in inspect.signature(fun).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False


def mesh_of(args: Sequence[Any]) -> Mesh | None:
    """The mesh that the arguments lie on."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _moved(leaf: Any, mesh: Mesh) -> Any:
    """The same cut, over the devices of another mesh."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))
    if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
        return jax.device_put(leaf, NamedSharding(mesh, P()))
    return leaf
