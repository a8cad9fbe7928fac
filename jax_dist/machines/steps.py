"""The step inside a mapped function: what one device computes, and of what.

A program under pmap is written for so many devices as its arguments have slices. Here it is taken
apart, so that it can be put together for any number of them.
"""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jax_dist import _compat
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis
from jax_dist._pmap.body import Call, Options, type_of
from jax_dist.errors import UnsupportedError, refusal
from jax_dist.pmap import Mapped, pmap


@dataclasses.dataclass(frozen=True, slots=True)
class MappedStep:
    """A function of one device, and how it is mapped."""

    options: Options
    call: Call
    slices: tuple[jax.ShapeDtypeStruct, ...]  # what one device gives for each leaf of the arguments
    axes: tuple[Axis, ...]  # where the mapped axis stands in each leaf, from the left
    given: int  # slices of the call that it was found in

    @property
    def name(self) -> str:
        return self.call.fun_name

    @property
    def axis_name(self) -> Any:
        """As collectives and the mesh call it."""
        return self.options.choice.axis_name

    @property
    def donated(self) -> tuple[int, ...]:
        """The leaves whose memory the results may take over."""
        owned = enumerate(self.call.owners)
        return tuple(place for place, owner in owned if owner in self.options.donated)

    def leaves(self, devices: int, whole: Sequence[int] = ()) -> list[jax.ShapeDtypeStruct]:
        """The leaves for so many devices, `[N, *s]`; of the arguments `whole`, `[*s]`."""
        found = []
        for kind, axis, owner in zip(self.slices, self.axes, self.call.owners, strict=True):
            axis = None if owner in whole else axis
            found.append(type_of(kind, axes.stacked(kind.shape, axis, devices)))
        return found

    def mapped(self, way: Callable[..., Any], devices: Sequence[Any], **options: Any) -> Any:
        """The step, mapped over devices by `jax.pmap` or `jax_dist.pmap`: a function of leaves."""

        def of_leaves(*leaves: Any) -> Any:
            return self.call.run(leaves)

        of_leaves.__name__ = of_leaves.__qualname__ = self.name
        of_leaves.__wrapped__ = self.call.fun  # pyright: ignore[reportFunctionMemberAccess]
        return way(
            of_leaves,
            self.options.axis_name,
            in_axes=self.axes,
            out_axes=self.options.out_axes,
            donate_argnums=self.donated,
            devices=list(devices),
            **options,
        )

    def program(self, devices: int) -> tuple[ClosedJaxpr, Any]:
        """What one of so many devices computes, and the types of its results."""
        name = self.axis_name if self.options.axis_name is None else self.options.axis_name
        trace = jax.make_jaxpr(
            lambda *leaves: self.call.run(leaves), axis_env=[(name, devices)], return_shape=True
        )
        return trace(*self.slices)

    def state(self, devices: int) -> tuple[int, ...]:
        """The positions of the first arguments whose tree, shapes and types are a result's.

        What comes back after another argument may be anything.
        """
        _, results = self.program(devices)
        parts = [results, *results] if isinstance(results, tuple | list) else [results]
        news = [_kinds(part) for part in parts]
        args, _ = self.call.rebuild(self.slices)
        found = []
        for position, arg in enumerate(args):
            if position in self.options.static:
                continue
            own = _kinds(arg)
            if own in news and jax.tree.leaves(arg):
                news.remove(own)
                found.append(position)
            elif found:
                break
        return tuple(found)

    @classmethod
    def of_mapped(
        cls, fun: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "MappedStep":
        """The step in a mapped function, as it is called; in a larger one, the first that it calls.

        Args:
          fun: by `jax.pmap` or `jax_dist.pmap`; under `jax.jit` or not.
          args: of any number of slices, arrays or their types.
          kwargs: the same.

        Raises:
          UnsupportedError: it maps nothing.
          MappedAxisError: the sizes of the mapped axis differ, or there is none.
        """
        inner = fun if isinstance(fun, Mapped) else getattr(fun, "__wrapped__", None)
        if isinstance(inner, Mapped):
            said: Options = inner._dispatcher.options
            call = Call.bind(said, inner.__wrapped__, args, kwargs)
        else:
            said, call = _first_pmap(fun, args, kwargs)
        given = call.size
        slices, from_left = [], []
        for kind, axis in zip(map(type_of, call.leaves), call.axes, strict=True):
            shape = list(kind.shape)
            if axis is not None:
                axis %= len(shape)
                del shape[axis]
            slices.append(type_of(kind, shape))
            from_left.append(axis)
        return cls(said, call, tuple(slices), tuple(from_left), given)


class _Found(Exception):  # noqa: N818  # it ends a trace, and is no error
    """The first pmap that a function calls."""


def _first_pmap(fun: Callable, args: tuple, kwargs: dict) -> tuple[Options, Call]:
    """In our words. Only arrays are traced: others may be static."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [n for n, leaf in enumerate(leaves) if hasattr(leaf, "shape")]

    def run(taken: _compat.TakenPmap, mapped: Sequence[Any]) -> Any:
        raise _Found(taken, [type_of(jax.typeof(leaf)) for leaf in mapped])

    def traced(arrays: Sequence[Any]) -> None:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        given, keywords = jax.tree.unflatten(tree, filled)
        fun(*given, **keywords)

    try:
        with _compat.pmaps_taken_over(run):
            jax.eval_shape(traced, [type_of(leaves[place]) for place in places])
    except _Found as found:
        return _in_our_words(fun, *found.args)
    except NameError as error:  # a collective, outside of any map
        if "unbound axis" not in str(error):
            raise
    raise refusal(
        UnsupportedError,
        what=f"'{axes.function_name(fun)}' maps nothing",
        which=["it calls neither jax.pmap nor jax_dist.pmap"],
        why="what each device computes is found in a mapped function",
        do="Give the mapped function, as in jax.pmap(step, axis_name='i').",
    )


def _in_our_words(
    fun: Callable, taken: _compat.TakenPmap, leaves: list[Any]
) -> tuple[Options, Call]:
    def of_device(*args: Any, **kwargs: Any) -> Any:
        return taken.fun(*args, **kwargs)

    of_device.__name__ = of_device.__qualname__ = axes.function_name(fun)
    of_device.__wrapped__ = inspect.unwrap(fun)  # pyright: ignore[reportFunctionMemberAccess]
    call = Call.of_taken(taken, leaves, of_device, of_device.__name__)
    kept = {owner for owner, own in zip(call.owners, taken.donated, strict=True) if not own}
    owned = {owner for owner in call.owners if isinstance(owner, int)}
    said: Options = pmap(
        of_device,
        taken.axis_name,
        out_axes=taken.out_axes,
        donate_argnums=tuple(owned - kept),
    )._dispatcher.options
    return said, call


def _kinds(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
