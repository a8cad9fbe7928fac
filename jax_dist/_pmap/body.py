"""A call with its arguments flattened."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jax_dist import _compat
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.options import Options as Options
from jax_dist.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a mapped function, with its arguments flattened."""

    fun: Callable
    rebuild: Callable[[Sequence[Any]], tuple[tuple, dict]]  # leaves -> (args, kwargs)
    leaves: list[Any]
    axes: tuple[Axis, ...]  # of each leaf; may be negative
    owners: tuple[int | str, ...]  # the position, or the keyword, of the argument of each leaf
    paths: Callable[[], list[str]]  # returns the name of each leaf, as "batch['x']"
    fun_name: str
    structure: Any = None  # the tree of the arguments that are not static
    static: tuple[Any, ...] = ()  # the values of the static arguments

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
        cls, options: Options, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "Call":
        """Return the call of `fun` with these arguments, by the options of its pmap."""
        if options.static and options.static[-1] >= len(args):
            raise ArgumentError(
                f"pmap of '{options.fun_name}' has static_broadcasted_argnums {options.static}, "
                f"but the call has only {len(args)} positional arguments."
            )
        numbers = [number for number in range(len(args)) if number not in options.static]
        mapped_args = tuple(args[number] for number in numbers)
        in_axes = options.in_axes
        # A longer in_axes has entries for static arguments, too; jax.pmap ignores them.
        is_longer = isinstance(in_axes, tuple | list) and len(in_axes) > len(numbers)
        if options.static and is_longer and all(number < len(in_axes) for number in numbers):
            in_axes = tuple(in_axes[number] for number in numbers)

        def rebuild(leaves: Sequence[Any]) -> tuple[tuple, dict]:
            values, keywords = jax.tree.unflatten(structure, leaves)
            positional = list(args)
            for number, value in zip(numbers, values, strict=True):
                positional[number] = value
            return tuple(positional), keywords

        def paths() -> list[str]:
            return axes.argument_paths(fun, mapped_args, kwargs, numbers)

        leaves, structure = jax.tree.flatten((mapped_args, kwargs))
        leaf_axes = axes.spread_in_axes(in_axes, mapped_args, kwargs, options.fun_name)
        trees = [*zip(numbers, mapped_args, strict=True), *sorted(kwargs.items())]
        owners = tuple(owner for owner, tree in trees for _ in jax.tree.leaves(tree))
        static = tuple(args[number] for number in options.static)
        name = options.fun_name
        return cls(fun, rebuild, leaves, leaf_axes, owners, paths, name, structure, static)

    @classmethod
    def bind_intercepted(
        cls, taken: _compat.InterceptedPmap, leaves: Sequence[Any], fun: Callable, name: str
    ) -> "Call":
        """Return the call of an intercepted `jax.pmap`, with `fun` in place of its function."""

        def rebuild(values: Sequence[Any]) -> tuple[tuple, dict]:
            return jax.tree.unflatten(taken.in_tree, list(values))

        args, kwargs = rebuild(leaves)
        paths = lambda: axes.argument_paths(fun, args, kwargs, range(len(args)))
        index_args, index_kwargs = rebuild(range(len(leaves)))  # each leaf is its index
        trees = [*enumerate(index_args), *index_kwargs.items()]
        owner_of = {index: owner for owner, tree in trees for index in jax.tree.leaves(tree)}
        owners = tuple(owner_of[index] for index in range(len(leaves)))
        return cls(fun, rebuild, list(leaves), taken.in_axes, owners, paths, name)


def any_tracer(leaves: Iterable[Any]) -> bool:
    """Return whether a leaf is a tracer, which means that the call is part of an outer trace."""
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def type_of(leaf: Any, shape: Sequence[int] | None = None, sharding: Sharding | None = None) -> Any:
    """Return the type of an array, number or type, maybe of another shape; else raise TypeError."""
    is_type = hasattr(leaf, "shape") and not isinstance(leaf, jax.Array | np.ndarray)
    aval: Any = leaf if is_type else jax.typeof(leaf)
    weak = bool(getattr(aval, "weak_type", False))
    sizes: Sequence[int] = aval.shape if shape is None else shape
    return jax.ShapeDtypeStruct(sizes, aval.dtype, weak_type=weak, sharding=sharding)
