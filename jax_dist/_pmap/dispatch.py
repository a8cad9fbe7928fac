"""Calls of a mapped function.

- *cache hit*: the C++ fast path (see `_fast_path`) knows the signature, and runs its program;
- *cache miss*: the function is traced, the arguments are placed on the mesh, and the fast path
  remembers how to run such a call;
- *misplaced arguments*: an array is committed elsewhere; it is moved (once, if it lives on), and
  the fast path called again. So are arrays of one of several processes, by `process_calls`;
- *in an outer trace* (jit, grad, vmap): arguments stay as they are.

Since arguments are placed before the program is called, a training loop compiles once.
"""

import contextvars
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Traced

from jax_dist import _compat, _fast_path
from jax_dist._compat import CallResult
from jax_dist._fast_path import FastPath, is_staged
from jax_dist._passes import captures, interpreter
from jax_dist._passes.captures import Lifted, Watch
from jax_dist._passes.gathers import plan_gathers
from jax_dist._pmap import axes, meshes, placement, traced_body
from jax_dist._pmap.call import MappedCall, any_tracer, type_of
from jax_dist._pmap.meshes import InnerAxis, MeshLayout
from jax_dist._pmap.options import PmapOptions
from jax_dist._pmap.process_calls import ProcessCalls, is_global
from jax_dist.errors import ArgumentError, DeviceCountError, MappedAxisError

# `_trace` gets from jit a jaxpr only; the function that jit traces leaves the mesh axes that pmaps
# inside would use here.
_new_inner_axes = contextvars.ContextVar[tuple[InnerAxis, ...] | None]("inner_axes", default=None)


class _TraceContext(NamedTuple):
    """Layout and kind of a trace; a part of the key of its jit object."""

    layout: MeshLayout
    in_outer_trace: bool  # whether the call is traced by a jit, grad or vmap around it
    process_local: bool  # whether arrays are those of this process, `[L, *s]`; else global ones


@dataclasses.dataclass(frozen=True, eq=False)
class TracedPmap:
    """A mapped function, traced for arguments of certain types."""

    context: _TraceContext
    out_tree: Any
    lifted: Lifted  # the arrays that the function captures
    takes_captures: bool  # whether they are the first argument of the program
    rewritten: ClosedJaxpr | None  # None if there was nothing to rewrite


class PmapDispatcher:
    """The state shared by all decorated versions of one function with equal options."""

    def __init__(self, options: PmapOptions, fun: Callable[[], Callable]):
        """`fun` returns the function, held weakly: dispatchers are cached as long as it lives."""
        self.options: PmapOptions = options
        self._weak_fun = fun
        self.fast_path: FastPath = FastPath(
            options.fun_name,
            self._call_anew,
            without_jit=self._call_without_jit,
            static_argnums=options.static,
        )
        self._argument_copies = placement.PlacementCache()  # on the mesh, of arrays elsewhere
        self._capture_copies = placement.CaptureCopies()  # on the mesh, of captured arrays
        self._capture_warnings = Watch(options.fun_name)
        self._jits: dict[Any, Any] = {}  # see `_jit`
        # By the jaxpr of the user's function, and dropped when JAX drops that.
        self._traced = weakref.WeakKeyDictionary[Any, TracedPmap]()
        self._inner_axes = weakref.WeakKeyDictionary[Any, tuple[InnerAxis, ...]]()

    @property
    def fun(self) -> Callable:
        """The mapped function; `_calls` finds it by this name on the stack."""
        return self._weak_fun()

    @functools.cached_property
    def _process_calls(self) -> ProcessCalls | None:
        """Converter of arrays of this process to global ones; None if all devices are its own.

        It is made at the first call: it asks for the devices, which starts JAX's backend.
        """
        processes = {meshes.owner_of(device) for device in self.options.candidates()}
        if len(processes) == 1:
            return None
        run = lambda *args, **kwargs: self.fast_path.call(*args, **kwargs)
        find_layout = lambda call: self._trace_call(call)[0].context.layout
        calls = ProcessCalls(self.options, self._weak_fun, run=run, find_layout=find_layout)
        if self.options.arrays == "local":  # each call converts its arguments, and results back
            self.fast_path.wrap(calls.call)
        return calls

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the lowered program; with several processes, that on global arrays."""
        if self._process_calls is not None:
            args, kwargs = self._process_calls.to_global_types(args, kwargs)
        call = self._bind(args, kwargs)
        traced, trace_of_user = self._trace_call(call)
        if traced.rewritten is None:
            lowered = trace_of_user.lower()
        else:
            args, kwargs = call.rebuild(self._types_in_trace(call, traced.context))
            captured = self._place_captures(traced)
            lowered = _fast_path.lower(self._get_jit(traced), captured, args, kwargs)
        _compat.remove_mesh_of_arguments(lowered)  # so that the compiled program takes any array
        return lowered

    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """Trace the program as a caller sees it; captured arrays are in it."""
        traced, _ = self._trace_call(self._bind(args, kwargs), in_outer_trace=True)
        return self._get_jit(traced).trace(*args, **kwargs)

    def _call_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallResult:
        """Run a call that the fast path does not know, wherever it is made.

        The fast path remembers only how to run a call outside of all traces, by `_run`; any other
        comes here each time.
        """
        call = self._bind(args, kwargs)
        if (outer := meshes.current_frame.get()) is not None:  # in the body of another pmap
            return CallResult(traced_body.emit_inside(self.options, call, outer))
        if manual := jax.sharding.get_abstract_mesh().manual_axes:
            raise MappedAxisError(
                f"pmap of '{call.fun_name}' is called inside a shard_map over {manual!r}, which "
                "pmap cannot extend. Map the outer function with jax_dist.pmap too, or use vmap."
            )
        # In an outer trace, a call on constants has no tracers among its leaves.
        if any_tracer(call.leaves) or is_staged():
            return CallResult(self._call_in_outer_trace(call, args, kwargs))
        user_mesh: Any = jax.sharding.get_mesh() if meshes.mesh_of_user() is not None else None
        with meshes.no_mesh():
            result = self._run(call, args, kwargs)
        if user_mesh is not None and user_mesh.explicit_axes:
            return CallResult(meshes.reshard_to(user_mesh, result.results))
        return result

    def _run(self, call: MappedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallResult:
        """Run the program of a call outside of traces, on arguments that are placed on its mesh.

        If arguments have to be converted or moved first, the fast path is called again with the new
        ones, and remembers nothing of the old ones: each such call has to come here.
        """
        placement.check_runs((self.options.devices or ())[:1], f"pmap of '{call.fun_name}'")
        process_calls = self._process_calls
        if process_calls is not None and not all(map(is_global, call.leaves)):
            return CallResult(process_calls.call(*args, **kwargs))
        traced, _ = self._trace_call(call)
        layout = traced.context.layout
        leaves, any_misplaced = self._place(call, layout)
        args, kwargs = call.rebuild(leaves)
        if any_misplaced:
            return CallResult(self.fast_path.call(*args, **kwargs))
        self._capture_warnings.warn_of(traced.lifted.captures, lifted=True)
        if process_calls is not None:
            process_calls.compare_program(call, traced.lifted.jaxpr, layout)
        self.fast_path.throttle(layout.mesh)
        captured = self._place_captures(traced)
        return _compat.run_jit(self._get_jit(traced), captured, args, kwargs)

    def _call_in_outer_trace(self, call: MappedCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the program in an outer trace; captured arrays become constants of that trace."""
        traced, _ = self._trace_call(call, in_outer_trace=True)
        # A jax_dist.pmap or rewrite around it makes these constants arguments of its program.
        if not captures.is_lifted_outside():
            self._capture_warnings.warn_of(traced.lifted.captures, lifted=False)
        try:
            return self._get_jit(traced)(*args, **kwargs)
        except ValueError as error:
            if self._process_calls is None or "incompatible devices" not in str(error):
                raise
            raise ArgumentError(
                f"pmap of '{call.fun_name}' got an array of this process only, while traced over "
                "the devices of all processes. Pass NumPy arrays, or global arrays made by "
                "jax_dist.shard."
            ) from None

    def _call_without_jit(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call it under `jax.disable_jit`, or to find where a NaN comes from."""
        call = self._bind(args, kwargs)
        if (outer := meshes.current_frame.get()) is not None:
            return traced_body.emit_inside(self.options, call, outer)
        return traced_body.emit(self.options, call, self.options.lay_out(call.size))[0]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MappedCall:
        return MappedCall.bind(self.options, self.fun, args, kwargs)

    def _place(self, call: MappedCall, layout: MeshLayout) -> tuple[list[Any], bool]:
        """Place the leaves on the mesh; return them, and whether one was committed elsewhere."""
        leaves, misplaced, options = [], False, self.options
        for leaf, axis, argument in zip(call.leaves, call.axes, call.owners, strict=True):
            if placement.can_be_put(leaf):
                target = layout.sharding(axis, jnp.ndim(leaf))
                donated = argument in options.donated or argument in options.donated_names
                leaf, elsewhere = self._argument_copies.put(leaf, target, donated=donated)
                misplaced = misplaced or elsewhere
            leaves.append(leaf)
        return leaves, misplaced

    def _place_captures(self, traced: TracedPmap) -> tuple[Any, ...]:
        """Return the captured arrays of a program, with a copy on each device of its mesh."""
        mesh = traced.context.layout.mesh
        put = functools.partial(placement.put_copy, where=NamedSharding(mesh, P()))
        return self._capture_copies.get(traced.lifted, mesh, put)

    def _trace_call(
        self, call: MappedCall, *, in_outer_trace: bool = False
    ) -> tuple[TracedPmap, Traced]:
        """Return the trace for the types of a call: rewritten, and before that, as `jit` made it.

        A function that calls other pmaps is traced twice: the first trace finds how many mesh axes
        these would use, and the second has a mesh with them.
        """
        is_local = self.options.arrays == "local" and self._process_calls is not None
        process_local = in_outer_trace and is_local
        lay_out = functools.partial(self.options.lay_out, is_global_size=not process_local)
        context = _TraceContext(lay_out(call.size), in_outer_trace, process_local)
        traced, trace_of_user = self._trace(context, call)
        inner_axes = self._inner_axes[trace_of_user.jaxpr]
        if inner_axes != context.layout.inner_axes:
            context = context._replace(layout=lay_out(call.size, inner_axes))
            traced, trace_of_user = self._trace(context, call)
        devices, used = self.options.devices, context.layout.mesh.size
        if devices is not None and used != len(devices):
            raise DeviceCountError(
                f"pmap of '{call.fun_name}' got {len(devices)} devices for an axis of size {used}; "
                "with devices=, each of them runs one slice."
            )
        return traced, trace_of_user

    def _trace(self, context: _TraceContext, call: MappedCall) -> tuple[TracedPmap, Traced]:
        """Trace the user's function once for the types of a call, and rewrite the trace.

        Returns the rewritten trace, and that of jit. jit caches traces, and gives the same jaxpr
        for the same types, so its jaxpr is the key of what is stored here.
        """
        args, kwargs = call.rebuild(self._types_in_trace(call, context))
        with captures.tracing(self.options.captures):
            trace_of_user = self._get_jit_of_user(context).trace(*args, **kwargs)
        jaxpr, inner_axes = trace_of_user.jaxpr, _new_inner_axes.get()
        if inner_axes is not None:  # the function has run, so the trace is not from jit's cache
            self._inner_axes[jaxpr] = inner_axes
            _new_inner_axes.set(None)
        if jaxpr not in self._traced:  # it is new, or `_rewrite` has raised an error
            self._traced[jaxpr] = self._rewrite(context, call, trace_of_user)
        return self._traced[jaxpr], trace_of_user

    def _types_in_trace(self, call: MappedCall, context: _TraceContext) -> list[Any]:
        """Return the types of the leaves when placed on the mesh; in an outer trace, the leaves."""
        if context.in_outer_trace:
            return call.leaves
        sharding, pairs = context.layout.sharding, zip(call.leaves, call.axes, strict=True)
        return [type_of(leaf, sharding=sharding(axis, jnp.ndim(leaf))) for leaf, axis in pairs]

    def _rewrite(self, context: _TraceContext, call: MappedCall, trace: Traced) -> TracedPmap:
        """Rewrite a trace: captured arrays become arguments, and gathers are reduced."""
        options, jaxpr = self.options, trace.jaxpr
        traced_body.check_collectives(options.fun_name, context.layout.name, jaxpr)
        lifted = captures.lift(jaxpr, call.fun, options.fun_name, options.captures)
        # In an outer trace, captured arrays stay constants: the caller does not pass them.
        takes_captures = bool(lifted.captures) and not context.in_outer_trace
        rewritten = lifted.jaxpr if takes_captures else None
        if options.gathers != "keep":
            plan = plan_gathers(rewritten or jaxpr, exact=options.gathers == "exact")
            rewritten = plan.jaxpr or rewritten
        return TracedPmap(context, trace.out_tree, lifted, takes_captures, rewritten)

    def _get_jit(self, traced: TracedPmap) -> Any:
        """Return the jit object of a program; captured arrays, if any, are its first argument."""
        context, takes_captures = traced.context, traced.takes_captures
        if traced.rewritten is None:
            return self._get_jit_of_user(context)

        def evaluate_rewritten(*flat_args: Any, **kwargs: Any) -> Any:
            captured, args = (flat_args[0], flat_args[1:]) if takes_captures else ((), flat_args)
            call = self._bind(args, kwargs)
            # One jit object serves several signatures, and `traced` is of one of them only.
            traced_for_call, _ = self._trace(context, call)
            assert traced_for_call.rewritten is not None
            leaves = interpreter.evaluate(traced_for_call.rewritten, [*captured, *call.leaves])
            return jax.tree.unflatten(traced_for_call.out_tree, leaves)

        return self._jit(evaluate_rewritten, context, takes_captures=takes_captures)

    def _get_jit_of_user(self, context: _TraceContext) -> Any:
        """Return the jit object that traces the user's function, into a `shard_map`."""
        layout, process_local = context.layout, context.process_local

        def map_function(*flat_args: Any, **kwargs: Any) -> Any:  # `args` may be a keyword
            call = self._bind(flat_args, kwargs)
            results, inner_axes = traced_body.emit(
                self.options, call, layout, process_local=process_local
            )
            _new_inner_axes.set(inner_axes)  # for `_trace`: jit returns nothing but the results
            return results

        return self._jit(map_function, context)

    def _jit(
        self, function: Callable, context: _TraceContext, *, takes_captures: bool | None = None
    ) -> Any:
        """Return `function` under jit, with the user's options, cached by the other arguments.

        `takes_captures` is whether a rewritten program takes a tuple of captured arrays before the
        user's arguments; None is for the user's function, which is not rewritten.
        """
        key, first = (context, takes_captures), 1 if takes_captures else 0
        if key not in self._jits:
            # No functools.wraps: jit would read the user's signature.
            function.__name__ = function.__qualname__ = self.options.fun_name
            self._jits[key] = jax.jit(
                function,
                static_argnums=tuple(first + number for number in self.options.static),
                donate_argnums=tuple(first + number for number in self.options.donated),
                donate_argnames=self.options.donated_names or None,
                **self._out_shardings(context),
            )
        return self._jits[key]

    def _out_shardings(self, context: _TraceContext) -> dict[str, Any]:
        """Return jit's option `out_shardings` from pmap's `out_axes`, or {} to let XLA choose.

        XLA would replicate a result of size zero, and say nothing of donated arguments. It may
        choose in an outer trace, and if results are also sharded over the axes of pmaps inside.
        """
        if context.in_outer_trace or context.layout.inner_axes:
            return {}

        def sharding_of(axis: int | None) -> NamedSharding | None:
            if axis is not None and axis < 0:  # the result's rank decides which dimension it is
                return None
            least_rank = (
                1 if axis is None else axis + 1
            )  # a sharding is valid for higher ranks, too
            return context.layout.sharding(axis, least_rank)

        shardings = jax.tree.map(sharding_of, self.options.out_axes, is_leaf=axes.is_none)
        return {"out_shardings": shardings}
