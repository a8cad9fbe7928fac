"""Calls of a mapped function whose devices belong to several processes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_dist.mapping import placement, refusals
from jax_dist.mapping.agreements import Agreements
from jax_dist.mapping.attempts import Attempt, Replan
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.calls import Call, Options, any_tracer, bind
from jax_dist.mapping.host_local import LocalView, Misfit
from jax_dist.mapping.keys import is_key
from jax_dist.mapping.meshes import InnerAxis, lay_out
from jax_dist.mapping.programs import jit_alone


class ProcessCalls:
    """Gives each process its own view of the whole arrays, or keeps them whole.

    With `arrays="local"`, arguments and results hold the slices of this process, as jax.pmap's do.
    With `arrays="global"`, results stay whole, and come back as arguments without a conversion;
    what this process made itself (a NumPy batch) still holds its own slices.

    Attributes:
      dispatch: what a call goes through.
      agreements: with the other processes, on the programs.
      jitted_view: the jit object that takes and returns what this process sees, for tracers.
    """

    def __init__(
        self,
        options: Options,
        fun: Callable[[], Callable],
        jitted: Callable,
        *,
        owner: object,
        inner: Callable[[], tuple[InnerAxis, ...]],
    ):
        """
        Args:
          options: what was said to pmap.
          fun: gives the function.
          jitted: takes and returns whole arrays.
          owner: whose attempts the traces of `jitted` belong to.
          inner: gives the mesh axes of pmaps inside, as the last trace found them.
        """
        self._options = options
        self._fun = fun
        self._jitted = jitted
        self._owner = owner
        self._inner = inner
        self._is_global = options.arrays == "global"
        self.jitted_view = jitted if self._is_global else jit_alone(options, fun, whole=False)
        self.agreements = Agreements(options, fun)
        self._views: dict[Any, LocalView] = {}
        self._axes: dict[Any, tuple[Axis, ...]] = {}
        self.dispatch: Callable = jitted if self._is_global else self._call

    def settle(self, args: tuple, kwargs: dict) -> Any:
        """A call that `jitted` did not make, for this process holds some of its arrays alone."""
        output, traced = self._convert_and_call(args, kwargs)
        if not traced:  # known once converted: such arrays come again and again
            self.dispatch = self._call
        return output

    def renewed_dispatch(self) -> Callable:
        """While some programs are traced and not agreed upon, calls are looked at."""
        if self.dispatch is self._jitted and self.agreements.open:
            self.dispatch = self._agree_and_call
        return self.dispatch

    def wants_to_convert(self, args: tuple, kwargs: dict) -> bool:
        """Whether this process holds some of the arrays alone."""
        leaves = bind(self._options, self._fun(), args, kwargs).leaves
        return self._is_global and not all(_is_whole(leaf) for leaf in leaves)

    def abstract(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments as shapes of whole arrays, for lower."""
        call = bind(self._options, self._fun(), args, kwargs)
        if any_tracer(call.leaves):
            return args, kwargs
        view = self._view(call.leaves, call.axes, lambda: call)

        def shape_of(leaf: Any, axis: Axis) -> Any:
            shape = jnp.shape(leaf) if _is_whole(leaf) else view.whole_shape(jnp.shape(leaf), axis)
            # canonicalize_dtype refuses that of keys, which has no other form.
            dtype = leaf.dtype if is_key(leaf) else _canonical(leaf)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=view.sharding(len(shape), axis))

        return call.rebuild([shape_of(*pair) for pair in zip(call.leaves, call.axes, strict=True)])

    def _agree_and_call(self, *args: Any, **kwargs: Any) -> Any:
        if self.agreements.open:
            self.agreements.before(args, kwargs)
        return self._jitted(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self._convert_and_call(args, kwargs)[0]

    def _convert_and_call(self, args: tuple, kwargs: dict) -> tuple[Any, bool]:
        """The output, and whether the call was traced."""
        static = self._options.static
        mapped = [arg for number, arg in enumerate(args) if number not in static]
        leaves, structure = jax.tree.flatten((mapped, kwargs))
        if any_tracer(leaves):
            return self.jitted_view(*args, **kwargs), True

        def bound() -> Call:
            return bind(self._options, self._fun(), args, kwargs)

        leaf_axes = self._axes.get((structure, len(args)))
        if leaf_axes is None:
            leaf_axes = self._axes[structure, len(args)] = bound().axes
        while True:
            view = self._view(leaves, leaf_axes, bound)
            try:
                whole = [view.enter(*pair) for pair in zip(leaves, leaf_axes, strict=True)]
            except Misfit:
                raise _what_does_not_fit(bound(), view) from None
            values, keywords = jax.tree.unflatten(structure, whole)
            values = iter(values)
            again = [arg if n in static else next(values) for n, arg in enumerate(args)]
            if self.agreements.open:
                self.agreements.before(tuple(again), keywords)
            try:
                with Attempt(self._owner, self._inner(), placed=True) as attempt:
                    output = self._jitted(*again, **keywords)
            except Replan:
                continue
            self._finish_donation(args, again)
            return self._as_seen_here(output, view), attempt.traced

    def _as_seen_here(self, output: Any, view: LocalView) -> Any:
        if self._is_global:
            return output
        flat, structure = jax.tree.flatten(output)
        return jax.tree.unflatten(structure, [view.leave(leaf) for leaf in flat])

    def _view(
        self, leaves: list[Any], leaf_axes: tuple[Axis, ...], bound: Callable[[], Call]
    ) -> LocalView:
        """The view for the size of the mapped axis, read from the first array that has it."""
        for leaf, axis in zip(leaves, leaf_axes, strict=True):
            if axis is not None:
                shape = jnp.shape(leaf)
                size = shape[axis] if -len(shape) <= axis < len(shape) else bound().size
                key = (size, _is_whole(leaf), self._inner())
                view = self._views.get(key)
                if view is None:
                    view = self._views[key] = self._new_view(size, key[2], whole=key[1])
                return view
        raise AssertionError(bound().size)  # raises: nothing is mapped

    def _new_view(self, size: int, inner: tuple[InnerAxis, ...], *, whole: bool) -> LocalView:
        choice = self._options.choice
        if self._is_global and not whole and not choice.virtual:
            here = jax.process_index()
            own = sum(device.process_index == here for device in choice.candidates())
            whole = size > own  # more than this process can run: the slices of all of them
        layout = lay_out(choice, size, inner, whole=whole)
        return LocalView(layout, accepts_whole=self._is_global)

    def _finish_donation(self, args: tuple, placed: list[Any]) -> None:
        for number in self._options.donated:
            if number < len(args):
                given, used = jax.tree.leaves(args[number]), jax.tree.leaves(placed[number])
                placement.finish_donation(zip(given, used, strict=True))


def _canonical(leaf: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(jnp.result_type(leaf))


def _is_whole(leaf: Any) -> bool:
    """Whether it is an array of all processes, not of this one alone."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def _what_does_not_fit(call: Call, view: LocalView) -> ValueError:
    layout = view.layout
    sizes = {
        path: jnp.shape(leaf)[axis]
        for path, leaf, axis in zip(call.paths(), call.leaves, call.axes, strict=True)
        if axis is not None and not _is_whole(leaf)
    }
    for path, size in sizes.items():
        if size not in (layout.local_size, layout.size):
            return refusals.mapped_sizes_differ(call.fun_name, sizes)
        if size != layout.local_size:
            return refusals.neither_local_nor_global(
                call.fun_name, path, size, layout.local_size, layout.size
            )
    raise AssertionError("every array fits")
