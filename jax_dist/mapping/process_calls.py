"""Calls of a mapped function whose devices belong to several processes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_dist.mapping import agreements, refusals
from jax_dist.mapping.axes import Axis
from jax_dist.mapping.body import Body
from jax_dist.mapping.calls import Call, Options, any_tracer, bind
from jax_dist.mapping.host_local import LocalView, Misfit, is_weak
from jax_dist.mapping.keys import is_key
from jax_dist.mapping.meshes import Layout, lay_out
from jax_dist.passes.programs import Program


class ProcessCalls:
    """Gives each process its own view of the whole arrays, or keeps them whole.

    With `arrays="local"`, arguments and results hold the slices of this process, as jax.pmap's do.
    With `arrays="global"`, results stay whole, and come back as arguments without a conversion;
    what this process made itself (a NumPy batch) still holds its own slices.

    Attributes:
      view: the program on what this process sees, for tracers.
    """

    def __init__(
        self,
        options: Options,
        fun: Callable[[], Callable],
        *,
        run: Callable[..., Any],
        view: Program,
        layout_of: Callable[[Call], Layout],
    ):
        """
        Args:
          options: what was said to pmap.
          fun: gives the function.
          run: takes and returns whole arrays.
          view: the program on what this process sees.
          layout_of: gives the layout for a call on whole arrays, of which the types matter.
        """
        self._options = options
        self._fun = fun
        self._run = run
        self._layout_of = layout_of
        self._is_global = options.arrays == "global"
        self.view = view
        self._agreed: set[int] = set()  # hashes of signatures: no object is kept alive
        self._views: dict[Any, LocalView] = {}
        self._axes: dict[Any, tuple[Axis, ...]] = {}

    def must_convert(self, leaves: Sequence[Any]) -> bool:
        """Whether this process holds some of the arrays alone."""
        return not all(_is_whole(leaf) for leaf in leaves)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A call on arrays of this process."""
        static = self._options.static
        mapped = [arg for number, arg in enumerate(args) if number not in static]
        leaves, structure = jax.tree.flatten((mapped, kwargs))
        if any_tracer(leaves):
            return self._run(*args, **kwargs)

        def bound() -> Call:
            return bind(self._options, self._fun(), args, kwargs)

        kind = (structure, len(args))
        leaf_axes = self._axes.get(kind)
        if leaf_axes is None:
            leaf_axes = self._axes[kind] = bound().axes
        view = self._view(kind, leaves, leaf_axes, bound)
        try:
            whole = [view.enter(*pair) for pair in zip(leaves, leaf_axes, strict=True)]
        except Misfit:
            raise _what_does_not_fit(bound(), view) from None
        if any_tracer(whole):  # constants, in a trace outside
            return self._run(*args, **kwargs)
        values, keywords = jax.tree.unflatten(structure, whole)
        values = iter(values)
        again = [arg if n in static else next(values) for n, arg in enumerate(args)]
        output = self._run(*again, **keywords)
        for number in self._options.donated:
            if number < len(args):
                _finish_donation(args[number], again[number])
        if self._is_global:
            return output
        flat, structure = jax.tree.flatten(output)
        return jax.tree.unflatten(structure, [view.leave(leaf) for leaf in flat])

    def abstract(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as shapes of whole arrays, for lower."""
        call = bind(self._options, self._fun(), args, kwargs)
        if any_tracer(call.leaves):
            return args, kwargs
        kind = (jax.tree.structure((args, kwargs)), len(args))
        view = self._view(kind, call.leaves, call.axes, lambda: call)
        return call.rebuild(self._described(call, view))

    def agree(self, call: Call, body: Body, layout: Layout) -> None:
        """With the other processes, before a program that moves something runs first.

        Raises:
          DisagreementError: they are about to run another one.
        """
        moves = agreements.collectives(body.lifted.jaxpr)
        signature = hash(agreements.signature_of(call))
        if moves and signature not in self._agreed:
            agreements.agree(self._options, self._fun(), call, body, layout, moves)
            self._agreed.add(signature)

    def _described(self, call: Call, view: LocalView) -> list[jax.ShapeDtypeStruct]:
        """The leaves as parts of whole arrays. Raises what does not fit."""

        def described(leaf: Any, axis: Axis) -> jax.ShapeDtypeStruct:
            shape = jnp.shape(leaf) if _is_whole(leaf) else view.whole_shape(jnp.shape(leaf), axis)
            # canonicalize_dtype refuses that of keys, which has no other form.
            dtype = leaf.dtype if is_key(leaf) else _canonical(leaf)
            sharding = view.sharding(len(shape), axis)
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding, weak_type=is_weak(leaf))

        try:
            return [described(*pair) for pair in zip(call.leaves, call.axes, strict=True)]
        except Misfit:
            raise _what_does_not_fit(call, view) from None

    def _view(
        self,
        kind: Any,
        leaves: list[Any],
        leaf_axes: tuple[Axis, ...],
        bound: Callable[[], Call],
    ) -> LocalView:
        """The view for the size of the mapped axis, read from the first array that has it."""
        for leaf, axis in zip(leaves, leaf_axes, strict=True):
            if axis is not None:
                shape = jnp.shape(leaf)
                size = shape[axis] if -len(shape) <= axis < len(shape) else bound().size
                key = (kind, size, _is_whole(leaf))
                view = self._views.get(key)
                if view is None:
                    view = self._views[key] = self._new_view(bound(), size, whole=key[2])
                return view
        raise AssertionError(bound().size)  # raises: nothing is mapped

    def _new_view(self, call: Call, size: int, *, whole: bool) -> LocalView:
        """With the mesh that the body wants: it is traced here, on the types of whole arrays."""
        choice = self._options.choice
        if self._is_global and not whole and not choice.virtual:
            here = jax.process_index()
            own = sum(device.process_index == here for device in choice.candidates())
            whole = size > own  # more than this process can run: the slices of all of them
        first = LocalView(lay_out(choice, size, (), whole=whole), accepts_whole=self._is_global)
        args, kwargs = call.rebuild(self._described(call, first))
        layout = self._layout_of(bind(self._options, self._fun(), args, kwargs))
        return LocalView(layout, accepts_whole=self._is_global)


def _finish_donation(given: Any, used: Any) -> None:
    """Deletes the originals of copies that were donated and used, as jax.pmap does here."""
    for original, copy in zip(jax.tree.leaves(given), jax.tree.leaves(used), strict=True):
        if isinstance(original, jax.Array) and copy.is_deleted():
            original.delete()


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
