"""A call of a mapped function, with its arguments flattened."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.options import PmapOptions
from jax_dist.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class MappedCall:
    """One call of a mapped function, with its arguments flattened.

    A call `step(w, batch, train=...)`, with "x" and "y" in the batch, has four leaves.
    """

    fun: Callable
    rebuild: Callable[[Sequence[Any]], tuple[tuple, dict]]  # leaves -> (args, kwargs)
    leaves: list[Any]
    axes: tuple[Axis, ...]  # the mapped dimension of each leaf; may be negative
    owners: tuple[int | str, ...]  # of each leaf its argument: 0, 1, 1, "train"
    paths: Callable[[], list[str]]  # returns the names "w", "batch['x']", "batch['y']", "train"
    fun_name: str
    structure: Any  # the tree of the arguments that are not static
    static: tuple[Any, ...]  # the values of the static arguments

    @functools.cached_property
    def size(self) -> int:
        """The size of the mapped axis; raises MappedAxisError if it differs between leaves."""
        return axes.mapped_size(self.leaves, self.axes, self.paths, self.fun_name)

    @functools.cached_property
    def dims(self) -> list[Axis]:
        """The mapped dimension of each leaf, not negative; None if it is not mapped."""
        pairs = zip(self.axes, self.leaves, strict=True)
        return [None if axis is None else axis % jnp.ndim(leaf) for axis, leaf in pairs]

    def slices(self) -> list[jax.ShapeDtypeStruct]:
        """Return the type of each leaf without its mapped dimension: the slice on one device."""
        types = []
        for leaf, mapped_dim in zip(map(type_of, self.leaves), self.dims, strict=True):
            shape = [size for dim, size in enumerate(leaf.shape) if dim != mapped_dim]
            types.append(type_of(leaf, shape))
        return types

    def run(self, leaves: Sequence[Any]) -> Any:
        """Call the user's function, with these leaves in place of those of the call."""
        args, kwargs = self.rebuild(leaves)
        return self.fun(*args, **kwargs)

    @classmethod
    def bind(
        cls, options: PmapOptions, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "MappedCall":
        """Return the call of `fun` with these arguments, by the options of its pmap."""
        static = options.static
        if static and static[-1] >= len(args):
            raise ArgumentError(
                f"pmap of '{options.fun_name}' has static_broadcasted_argnums {static}, but the "
                f"call has only {len(args)} positional arguments."
            )
        positions = [n for n in range(len(args)) if n not in static]
        mapped_args = tuple(args[n] for n in positions)
        in_axes = options.in_axes
        # A longer in_axes has entries for static arguments, too; jax.pmap ignores them.
        is_longer = isinstance(in_axes, tuple | list) and len(in_axes) > len(positions)
        if static and is_longer and all(n < len(in_axes) for n in positions):
            in_axes = tuple(in_axes[n] for n in positions)
        leaves, structure = jax.tree.flatten((mapped_args, kwargs))
        # Arguments in the order of their leaves: JAX flattens a dict by its sorted keys.
        trees = [*zip(positions, mapped_args, strict=True), *sorted(kwargs.items())]

        def rebuild(new_leaves: Sequence[Any]) -> tuple[tuple, dict]:
            new_args, new_kwargs = jax.tree.unflatten(structure, new_leaves)
            all_args = list(args)
            for position, arg in zip(positions, new_args, strict=True):
                all_args[position] = arg
            return tuple(all_args), new_kwargs

        def paths() -> list[str]:
            named_trees = [(axes.argument_name(fun, owner), tree) for owner, tree in trees]
            return [
                name + jax.tree_util.keystr(path)
                for name, tree in named_trees
                for path, _ in jax.tree.leaves_with_path(tree)
            ]

        return cls(
            fun,
            rebuild,
            leaves,
            axes=axes.spread_in_axes(in_axes, mapped_args, kwargs, options.fun_name),
            owners=tuple(owner for owner, tree in trees for _ in jax.tree.leaves(tree)),
            paths=paths,
            fun_name=options.fun_name,
            structure=structure,
            static=tuple(args[n] for n in static),
        )


def any_tracer(leaves: Iterable[Any]) -> bool:
    """Return whether a leaf is a tracer, which means that the call is part of an outer trace."""
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def type_of(leaf: Any, shape: Sequence[int] | None = None, sharding: Sharding | None = None) -> Any:
    """Return the type of an array, number or type, maybe of another shape; else raise TypeError."""
    is_type = hasattr(leaf, "shape") and not isinstance(leaf, (jax.Array, np.ndarray))
    aval: Any = leaf if is_type else jax.typeof(leaf)
    weak = bool(getattr(aval, "weak_type", False))
    sizes: Sequence[int] = aval.shape if shape is None else shape
    return jax.ShapeDtypeStruct(sizes, aval.dtype, weak_type=weak, sharding=sharding)
