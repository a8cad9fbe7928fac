"""One call of a mapped function, with its arguments flattened."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from jax_dist.mapping import axes, refusals
from jax_dist.mapping.axes import Axis, AxisPrefix
from jax_dist.mapping.meshes import DeviceChoice
from jax_dist.passes.captures import Captures
from jax_dist.passes.gathers import Gathers


@dataclasses.dataclass(frozen=True)
class Options:
    """What was said to pmap, checked."""

    axis_name: Any  # None where the user gave none
    in_axes: AxisPrefix
    out_axes: AxisPrefix
    static: tuple[int, ...]  # positions, ascending
    donated: tuple[int, ...]
    choice: DeviceChoice
    arrays: str  # "local" or "global"
    captures: Captures
    gathers: Gathers


@dataclasses.dataclass(frozen=True)
class Call:
    """One call with its arguments flattened."""

    fun: Callable
    rebuild: Callable[[Sequence[Any]], tuple[tuple, dict]]  # leaves -> (args, kwargs)
    leaves: list[Any]
    axes: tuple[Axis, ...]  # of each leaf
    owners: tuple[int | str, ...]  # of each leaf: the position or keyword of its argument
    paths: Callable[[], list[str]]  # the name of each leaf
    fun_name: str
    structure: Any = None  # of the arguments that are not static
    static: tuple[Any, ...] = ()  # the values of those that are

    @functools.cached_property
    def size(self) -> int:
        """Of the mapped axis. Raises MappedAxisError or AxesError where there is no one size."""
        return axes.mapped_size(self.leaves, self.axes, self.paths, self.fun_name)

    def run(self, leaves: Sequence[Any]) -> Any:
        """The body, on its arguments as it sees them."""
        args, kwargs = self.rebuild(leaves)
        return self.fun(*args, **kwargs)


def any_tracer(leaves: Iterable[Any]) -> bool:
    """Whether the call is part of a trace outside."""
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def bind(options: Options, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Flattens the arguments, and finds the mapped axis of each leaf.

    Raises:
      AxesError: in_axes is no prefix of the arguments.
      StaticArgumentError: the call has too few positional arguments.
    """
    name = options.choice.fun_name
    if options.static and options.static[-1] >= len(args):
        raise refusals.static_argument_missing(name, options.static, len(args))
    numbers = [number for number in range(len(args)) if number not in options.static]
    mapped_args = tuple(args[number] for number in numbers)
    in_axes = options.in_axes
    if options.static and isinstance(in_axes, tuple | list) and len(in_axes) == len(args):
        in_axes = tuple(in_axes[number] for number in numbers)

    def rebuild(leaves: Sequence[Any]) -> tuple[tuple, dict]:
        values, keywords = jax.tree.unflatten(structure, leaves)
        whole = list(args)
        for number, value in zip(numbers, values, strict=True):
            whole[number] = value
        return tuple(whole), keywords

    def paths() -> list[str]:
        return axes.argument_paths(fun, mapped_args, kwargs, numbers)

    leaves, structure = jax.tree.flatten((mapped_args, kwargs))
    leaf_axes = axes.spread_in_axes(in_axes, mapped_args, kwargs, name)
    owned = [*zip(numbers, mapped_args, strict=True), *sorted(kwargs.items())]
    owners = tuple(owner for owner, tree in owned for _ in jax.tree.leaves(tree))
    static = tuple(args[number] for number in options.static)
    return Call(fun, rebuild, leaves, leaf_axes, owners, paths, name, structure, static)
