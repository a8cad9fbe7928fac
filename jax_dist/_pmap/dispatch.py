"""Calls of a mapped function.

- *cache hit*: the C++ fast path (see `_fast_path`) knows the signature, and runs its program;
- *cache miss*: the function is traced, the arguments are placed on the mesh, and the fast path
  remembers how to run such a call;
- *misplaced arguments*: an array is committed elsewhere. The fast path remembers nothing: each such
  call comes here, is moved (an array that lives on, once), and goes to the fast path again;
- *several processes*: see `process_calls`; the global arrays it makes go to the fast path;
- *staged*: in an outer trace (jit, grad, vmap), arguments stay as they are.

Since arguments are placed before the program is called, a training loop compiles once, wherever
they are. The jaxpr is evaluated again only if captured arrays or gathers in it are rewritten.
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
from jax_dist._fast_path import FastPath, is_staged
from jax_dist._passes import captures, interpreter
from jax_dist._passes.captures import Lifted, Watch
from jax_dist._passes.gathers import plan_gathers
from jax_dist._pmap import axes, meshes, placement, traced_body
from jax_dist._pmap.call import MappedCall, any_tracer, type_of
from jax_dist._pmap.meshes import InnerAxis, MeshLayout
from jax_dist._pmap.options import PmapOptions
from jax_dist._pmap.process_calls import ProcessCalls, collectives, is_global
from jax_dist.errors import ArgumentError, DeviceCountError, MappedAxisError

# `_jit_of_user` leaves the axes that pmaps inside ask for here, for `_trace`: jit gives it a jaxpr.
_wanted_axes = contextvars.ContextVar[tuple[InnerAxis, ...] | None]("wanted_axes", default=None)


class _TraceContext(NamedTuple):
    """Layout and kind of a trace; a part of the key of its jit object."""

    layout: MeshLayout
    staged: bool  # whether the call is part of an outer trace


@dataclasses.dataclass(frozen=True, eq=False)
class TracedPmap:
    """A mapped function, traced for arguments of certain types."""

    context: _TraceContext
    out_tree: Any
    lifted: Lifted  # the captured arrays that become arguments
    program: ClosedJaxpr | None  # the rewritten program; None if there was nothing to rewrite
    collectives: tuple[str, ...]  # to compare between processes; () with one process


class PmapDispatcher:
    """The state shared by all decorated versions of one function with equal options."""

    def __init__(self, options: PmapOptions, fun: Callable[[], Callable]):
        """`fun` returns the function, held weakly: dispatchers are cached as long as it lives."""
        self.options: PmapOptions = options
        self._weak_fun = fun
        self._placed = placement.PlacementCache()
        self._watch = Watch(options.fun_name)
        self._capture_copies = placement.CaptureCopies()
        self._jits: dict[Any, Any] = {}
        self._traced = weakref.WeakKeyDictionary[Any, TracedPmap]()  # by the jaxpr before rewriting
        self._inner_axes = weakref.WeakKeyDictionary[Any, tuple[InnerAxis, ...]]()  # the same
        self.fast_path: FastPath = FastPath(
            options.fun_name,
            self._call_anew,
            without_jit=self._call_without_jit,
            static_argnums=options.static,
        )

    @property
    def fun(self) -> Callable:
        """The mapped function; `_calls` finds it by this name on the stack."""
        return self._weak_fun()

    @functools.cached_property
    def _processes(self) -> ProcessCalls | None:
        """The handler of calls over several processes, or None; reading it starts the backend."""
        if len(set(map(meshes.owner_of, self.options.candidates()))) <= 1:
            return None
        calls = ProcessCalls(
            self.options,
            self._weak_fun,
            run=lambda *args, **kwargs: self.fast_path.call(*args, **kwargs),
            layout_of=lambda call: self._find(call)[0].context.layout,
        )
        if self.options.arrays == "local":
            self.fast_path.serve_by(calls.call)
        return calls

    def _is_process_local(self, *, staged: bool) -> bool:
        """Return whether a traced function takes process-local arrays: else they are global."""
        return staged and self._processes is not None and self.options.arrays == "local"

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the lowered program; with several processes, that on global arrays."""
        if self._processes is not None:
            args, kwargs = self._processes.abstract(args, kwargs)
        call = self._bind(args, kwargs)
        traced, trace = self._find(call)
        if traced.program is None:  # nothing is rewritten
            lowered = trace.lower()
        else:
            args, kwargs = call.rebuild(self._types_in_trace(call, traced.context))
            captured = self._place_captures(traced)
            lowered = _fast_path.lower(self._program(traced), captured, args, kwargs)
        _compat.remove_mesh_of_arguments(lowered)
        return lowered

    def trace(self, /, *args: Any, **kwargs: Any) -> Traced:
        """Trace the program as a caller sees it; captured arrays are in it."""
        traced, _ = self._find(self._bind(args, kwargs), staged=True)
        return self._program(traced).trace(*args, **kwargs)

    # ---- a call whose signature the fast path does not know

    def _call_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _compat.Answer:
        """Run a call that the fast path does not know, wherever it is made.

        Returns the results, what the fast path is to remember for the next such call (None:
        nothing), and whether that is stale.
        """
        call = self._bind(args, kwargs)
        if (outer := meshes.current_frame.get()) is not None:  # in the body of another pmap
            return traced_body.emit_inside(self.options, call, outer), None, False
        if manual := jax.sharding.get_abstract_mesh().manual_axes:
            raise MappedAxisError(
                f"pmap of '{call.fun_name}' is called inside a shard_map over {manual!r}, which "
                "pmap cannot extend. Map the outer function with jax_dist.pmap too, or use vmap."
            )
        # In an outer trace, a call on constants has no tracers among its leaves.
        if any_tracer(call.leaves) or is_staged():
            return self._stage(call, args, kwargs), None, False
        user_mesh: Any = jax.sharding.get_mesh() if meshes.mesh_of_user() is not None else None
        with meshes.no_mesh():
            results, memory, stale = self._run(call, args, kwargs)
        if user_mesh is not None and user_mesh.explicit_axes:
            return meshes.reshard_to(user_mesh, results), None, False
        return results, memory, stale

    def _run(
        self, call: MappedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _compat.Answer:
        """Place the arguments of a call on the mesh, and run its program; see `_call_anew`."""
        placement.check_runs((self.options.devices or ())[:1], f"pmap of '{call.fun_name}'")
        if self._processes is not None and not all(map(is_global, call.leaves)):
            # It makes the arguments global, and calls again.
            return self._processes.call(*args, **kwargs), None, False
        traced, _ = self._find(call)
        leaves, misplaced = self._place(call, traced.context.layout)
        args, kwargs = call.rebuild(leaves)
        if misplaced:  # they are moved now: call again, without memory of where they were
            return self.fast_path.call(*args, **kwargs), None, False
        self._watch.warn_of(traced.lifted.captures, lifted=True)
        if self._processes is not None:
            self._processes.agree(call, traced)
        self.fast_path.throttle(traced.context.layout.mesh)
        return _compat.run_jit(self._program(traced), self._place_captures(traced), args, kwargs)

    def _stage(self, call: MappedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the program in an outer trace; captured arrays become constants of that trace."""
        traced, _ = self._find(call, staged=True)
        if not captures.is_lifted_outside():
            self._watch.warn_of(traced.lifted.captures, lifted=False)
        try:
            return self._program(traced)(*args, **kwargs)
        except ValueError as error:
            if self._processes is None or "incompatible devices" not in str(error):
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
        """Place the leaves on the mesh; return them, and whether one was committed elsewhere.

        Leaves that are no arrays or numbers are left to jit, which may raise.
        """
        leaves, misplaced, options = [], False, self.options
        for leaf, axis, argument in zip(call.leaves, call.axes, call.owners, strict=True):
            if placement.can_be_put(leaf):
                target = layout.sharding(axis, jnp.ndim(leaf))
                donated = argument in options.donated or argument in options.donated_names
                leaf, elsewhere = self._placed.put(leaf, target, donated=donated)
                misplaced = misplaced or elsewhere
            leaves.append(leaf)
        return leaves, misplaced

    def _place_captures(self, traced: TracedPmap) -> tuple[Any, ...]:
        """Return the captured arrays of a program, with a copy on each device of its mesh."""
        mesh = traced.context.layout.mesh
        put = functools.partial(placement.put_copy, where=NamedSharding(mesh, P()))
        return self._capture_copies.get(traced.lifted, mesh, put)

    # ---- from a call to its program

    def _find(self, call: MappedCall, *, staged: bool = False) -> tuple[TracedPmap, Traced]:
        """Return what is traced for the types of a call, and JAX's trace before it is rewritten."""
        # In an outer trace (`staged`), a process sees its own slices: the size is its own, too.
        whole = not self._is_process_local(staged=staged)
        lay_out = functools.partial(self.options.lay_out, call.size, whole=whole)
        traced, trace = self._trace(_TraceContext(lay_out(), staged), call)
        inner = self._inner_axes[trace.jaxpr]
        if inner != traced.context.layout.inner:  # trace again, with mesh axes for pmaps inside
            traced, trace = self._trace(_TraceContext(lay_out(inner), staged), call)
        devices, used = self.options.devices, traced.context.layout.mesh.size
        if devices is not None and used != len(devices):
            raise DeviceCountError(
                f"pmap of '{call.fun_name}' got {len(devices)} devices for an axis of size {used}; "
                "with devices=, each of them runs one slice."
            )
        return traced, trace

    def _trace(self, context: _TraceContext, call: MappedCall) -> tuple[TracedPmap, Traced]:
        """Trace the user's function once for the types of a call, and analyze the trace.

        jit caches traces, and gives the same jaxpr for the same types: so that is the key here.
        """
        args, kwargs = call.rebuild(self._types_in_trace(call, context))
        with captures.tracing(self.options.captures):
            trace = self._jit_of_user(context).trace(*args, **kwargs)
        if (inner := _wanted_axes.get()) is not None:  # jit has just traced it
            self._inner_axes[trace.jaxpr] = inner
            _wanted_axes.set(None)
        if trace.jaxpr not in self._traced:  # it is new, or its analysis has raised an error
            self._traced[trace.jaxpr] = self._analyze(context, call, trace)
        return self._traced[trace.jaxpr], trace

    def _types_in_trace(self, call: MappedCall, context: _TraceContext) -> list[Any]:
        """Return the types of the leaves when placed on the mesh; in an outer trace, the leaves."""
        if context.staged:
            return call.leaves
        sharding, pairs = context.layout.sharding, zip(call.leaves, call.axes, strict=True)
        return [type_of(leaf, sharding=sharding(axis, jnp.ndim(leaf))) for leaf, axis in pairs]

    def _analyze(self, context: _TraceContext, call: MappedCall, trace: Traced) -> TracedPmap:
        """Lift the captured arrays of a new trace, and reduce its gathers."""
        options, jaxpr = self.options, trace.jaxpr
        traced_body.check_collectives(options.fun_name, context.layout.name, jaxpr)
        lifted = captures.lift(jaxpr, call.fun, options.fun_name, options.captures)
        program = lifted.jaxpr if lifted.captures and not context.staged else None
        if options.gathers != "keep":
            plan = plan_gathers(program or jaxpr, exact=options.gathers == "exact")
            program = plan.jaxpr or program
        moves = () if self._processes is None else tuple(collectives(jaxpr))
        return TracedPmap(context, trace.out_tree, lifted, program, moves)

    # ---- jit objects

    def _program(self, traced: TracedPmap) -> Any:
        """Return the jit object of a program; captured arrays, if any, are its first argument."""
        context = traced.context
        if traced.program is None:  # nothing is rewritten
            return self._jit_of_user(context)
        offset = 1 if traced.lifted.captures and not context.staged else 0

        def rewritten(*flat_args: Any, **kwargs: Any) -> Any:
            call = self._bind(flat_args[offset:], kwargs)
            traced, _ = self._trace(context, call)  # one jit object serves several signatures
            assert traced.program is not None
            captured = flat_args[0] if offset else ()
            flat = interpreter.evaluate(traced.program, [*captured, *call.leaves])
            return jax.tree.unflatten(traced.out_tree, flat)

        return self._jit(rewritten, context, offset)

    def _jit_of_user(self, context: _TraceContext) -> Any:
        """Return the jit object of the program as it is traced from the user's function."""

        def program(*flat_args: Any, **kwargs: Any) -> Any:
            call = self._bind(flat_args, kwargs)
            as_view = self._is_process_local(staged=context.staged)
            results, inner = traced_body.emit(self.options, call, context.layout, as_view=as_view)
            _wanted_axes.set(inner)
            return results

        return self._jit(program, context)

    def _jit(
        self, function: Callable[..., Any], context: _TraceContext, offset: int | None = None
    ) -> Any:
        """Return `function` under jit, with donation and static arguments as the user said.

        `offset` is the number of arguments before the user's: 1 for captured arrays, 0 for a
        rewritten program without them, None for `_jit_of_user`. With the context, it is the key by
        which jit objects are cached.
        """
        key, first = (context, offset), offset or 0
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
        """Return the option `out_shardings` for jit, or {} to let XLA choose.

        XLA would replicate a result of size zero, and say nothing of donated arguments. With pmaps
        inside it chooses, so that their results stay sharded over their axes, too.
        """
        if context.staged or context.layout.inner:
            return {}

        def sharding(axis: int | None) -> NamedSharding | None:
            if axis is not None and axis < 0:  # which dimension it is, the trace will show
                return None
            return context.layout.sharding(axis, 1 + (axis or 0))

        shardings = jax.tree.map(sharding, self.options.out_axes, is_leaf=axes.is_none)
        return {"out_shardings": shardings}
