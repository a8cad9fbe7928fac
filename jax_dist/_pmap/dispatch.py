"""Calls of a mapped function.

- *cache hit*: the C++ front (see `_compat.front`) knows the signature, and runs its program;
- *cache miss*: the function is traced, the arguments are placed on the mesh, and the front
  remembers how to run such a call;
- *misplaced arguments*: an array is committed elsewhere. The front remembers nothing: each such
  call comes here, is moved (an array that lives on, once), and goes to the front again;
- *several processes*: see `process_calls`; the global arrays it makes go to the front.

Arguments are placed on the mesh before a program is called, so input placement never triggers a
recompilation: a training loop compiles once. What is traced outside (under jit, grad, vmap) is
staged, with its arguments as they are.

The user's function is traced once, straight into the program. Only if something in the jaxpr is to
be changed (arrays it captures, gathers that are reduced), it is evaluated again.
"""

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._pmap import axes, emission, meshes, placement
from jax_dist._pmap.body import Call, any_tracer, check_static, type_of
from jax_dist._pmap.emission import TracedBody
from jax_dist._pmap.meshes import InnerAxis, Layout
from jax_dist._pmap.options import Options
from jax_dist._rewrite import captures, interpreter, programs
from jax_dist._rewrite.captures import NO_CAPTURES, Lifted, PlacedCaptures, Placements, Watch
from jax_dist._rewrite.constants import put_copy
from jax_dist._rewrite.gathers import GATHERS, plan_gathers
from jax_dist.errors import ArgumentError, DeviceCountError, MappedAxisError

if TYPE_CHECKING:
    from jax_dist._pmap.process_calls import ProcessCalls

_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_NOTHING_LIFTED = Lifted(None, (), (), [])  # pyright: ignore[reportArgumentType]


class _Place(NamedTuple):
    """The key of a jit object: where and how a program runs."""

    layout: Layout
    staged: bool = False  # whether it is part of an outer trace
    as_view: bool = False  # whether its arguments are those of this process


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """The program for one signature."""

    inner: tuple[InnerAxis, ...]
    out_tree: Any
    lifted: Lifted
    evaluate: Callable[..., list[Any]] | None  # the changed program; None: as it was traced
    results: Any  # their types, as a tree
    collectives: tuple[str, ...]  # with several processes


class Dispatcher:
    """The state shared by all decorated versions of one function with equal options."""

    def __init__(self, options: Options, fun: Callable[[], Callable]):
        """`fun` returns the function, which is held weakly: this is cached on its account."""
        self.options: Options = options
        self._fun = fun
        self._placed = placement.PlacementCache()
        self._watch = Watch(options.fun_name)
        self._placements = Placements()
        self._layouts: dict[int, Layout] = {}  # by size of the mapped axis, the last one
        self._jits: dict[Any, Any] = {}
        self._signatures = weakref.WeakKeyDictionary[Any, Signature]()  # by jaxpr
        self._callers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._processes: ProcessCalls | None = None
        self._is_chosen = False  # whether there are several processes
        self._fronts = programs.Fronts(
            options.fun_name,
            self._call_anew,
            function=fun,
            rerun=lambda _, args, kwargs: self._call_without_jit(args, kwargs),
            without_jit=self._call_without_jit,
            static_argnums=options.static,
        )
        self._update_callers()

    @property
    def fun(self) -> Callable:
        """The mapped function, which `strict` names in its errors."""
        return self._fun()

    def serve(self, caller: Any) -> None:
        """Keep `caller.__call__` the fastest way to call."""
        self._callers.add(caller)
        caller.__call__ = self._call

    def jitted(self) -> Any:
        """Return a jit object that moves no arguments."""

        def traced(*flat_args: Any, **kwargs: Any) -> Any:
            call = self._bind(flat_args, kwargs)
            return self._stage(call, flat_args, kwargs)

        return self._jit(traced, "jitted", {})

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Return the lowered program; with several processes, that on global arrays."""
        self._choose()
        if self._processes is not None:
            args, kwargs = self._processes.abstract(args, kwargs)
        call = self._bind(args, kwargs)
        place, signature, (args, kwargs) = self._find_described(call)
        placed = self._place_captures(signature, place.layout)
        program = self._program(place, signature)
        lowered = program.lower(*placed.prepend(args), **kwargs)
        _compat.describe_arguments(lowered, self._describe(call, place.layout))
        return lowered if placed is NO_CAPTURES else programs.Lowered(lowered, placed.values)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the program as a caller sees it; captured arrays are in it."""
        self._choose()
        place, signature = self._find_staged(self._bind(args, kwargs), (args, kwargs))
        return self._program(place, signature).trace(*args, **kwargs)

    # ---- a call that the front does not know

    def _call_anew(
        self, asking: PlacedCaptures, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _compat.Answer:
        call = self._bind(args, kwargs)
        outer = meshes.Frame.current()
        if outer is not None:
            return emission.emit_inside(self.options, call, outer), None, False
        if manual := meshes.manual_axes():
            raise MappedAxisError(
                f"pmap of '{call.fun_name}' is called inside a shard_map over {manual!r} that is "
                "not ours. Map the outer function with jax_dist.pmap too, or use jax.vmap inside."
            )
        self._choose()
        if any_tracer(call.leaves) or programs.is_staged():  # the latter: a call on constants
            return self._stage(call, args, kwargs), None, False
        user = meshes.mesh_of_user()
        if user is None:
            return self._run(asking, call, args, kwargs)
        mesh: Any = jax.sharding.get_mesh()
        with meshes.no_mesh():
            results, memory, stale = self._run(asking, call, args, kwargs)
        if not meshes.is_explicit(user):
            return results, memory, stale
        return meshes.reshard_to(mesh, results), None, False

    def _run(
        self, asking: PlacedCaptures, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _compat.Answer:
        """Run a call on arrays, outside of any trace and any mesh."""
        placement.check_runs((self.options.devices or ())[:1], f"pmap of '{call.fun_name}'")
        if self._processes is not None and self._processes.must_convert(call.leaves):
            return self._processes.call(*args, **kwargs), None, False
        layout = self._layouts.get(call.size)
        if layout is None:
            layout = self._lay_out(call)
        leaves, misplaced = self._place(call, layout)
        args, kwargs = call.rebuild(leaves)
        if misplaced and call.size in self._layouts:
            return self._fronts.call(*args, **kwargs), None, False
        again = lambda other: call.rebuild(self._place(call, other)[0])
        place, signature, (args, kwargs) = self._find(
            _Place(layout), call, lambda other: (args, kwargs) if other is layout else again(other)
        )
        layout = self._layouts[call.size] = place.layout
        self._watch.warn_of(signature.lifted.captures, lifted=True)
        if self._processes is not None:
            self._processes.agree(call, signature, layout)
        placed = self._place_captures(signature, layout)
        program = self._program(place, signature)
        results, memory, stale = _compat.run_jit(program, placed.prepend(args), kwargs)
        if self._fronts.use(placed, is_full=programs.can_be_full(layout.mesh)):
            self._update_callers()
        return results, None if misplaced or placed is not asking else memory, stale

    def _stage(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the program as part of an outer trace. Captured arrays become constants of that."""
        place, signature = self._find_staged(call, (args, kwargs))
        if not captures.is_lifted_outside():
            self._watch.warn_of(signature.lifted.captures, lifted=False)
        try:
            return self._program(place, signature)(*args, **kwargs)
        except ValueError as error:
            if self._processes is None or "incompatible devices" not in str(error):
                raise
            raise ArgumentError(
                f"pmap of '{call.fun_name}' got an array of this process only, while traced over "
                "the devices of all processes. Pass NumPy arrays, or global arrays made by "
                "jax_dist.shard."
            ) from None

    # ---- programs

    def _find(
        self, place: _Place, call: Call, arguments: Callable[[Layout], _Arguments]
    ) -> tuple[_Place, Signature, _Arguments]:
        """Return where a call runs, its program, and `arguments` there."""
        args, kwargs = arguments(place.layout)
        signature = self._signature(place, call, args, kwargs)
        if signature.inner != place.layout.inner:
            layout = self._lay_out(call, signature.inner, whole=not place.as_view)
            place = place._replace(layout=layout)
            args, kwargs = arguments(layout)
            signature = self._signature(place, call, args, kwargs)
        self._check_devices_used(place.layout)
        return place, signature, (args, kwargs)

    def _find_staged(self, call: Call, arguments: _Arguments) -> tuple[_Place, Signature]:
        """Return where a call runs as part of an outer trace, and its program."""
        as_view = self._processes is not None and self.options.arrays == "local"
        place = _Place(self._lay_out(call, whole=not as_view), staged=True, as_view=as_view)
        return self._find(place, call, lambda _: arguments)[:2]

    def _find_described(self, call: Call) -> tuple[_Place, Signature, _Arguments]:
        """Return where a call on arrays runs, its program, and the types of arguments there."""
        types = lambda layout: call.rebuild(self._describe(call, layout))
        return self._find(_Place(self._lay_out(call)), call, types)

    def _describe(self, call: Call, layout: Layout) -> list[Any]:
        pairs = zip(map(type_of, call.leaves), call.axes, strict=True)
        return [type_of(t, sharding=layout.sharding(axis, len(t.shape))) for t, axis in pairs]

    def _signature(
        self, place: _Place, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature:
        """Return the program for arguments on the mesh of `place`; JAX remembers its trace."""
        with captures.tracing(self.options.captures):
            traced = self._direct(place).trace(*args, **kwargs)
        signature = self._signatures.get(traced.jaxpr)
        if signature is None:
            body = _last_trace.body
            assert body is not None
            signature = self._signatures[traced.jaxpr] = self._analyze(place, call, traced, body)
        _last_trace.body = None
        return signature

    def _analyze(
        self, place: _Place, call: Call, traced: jax.stages.Traced, body: TracedBody
    ) -> Signature:
        """Look for what is to be changed in a traced program."""
        options, jaxpr = self.options, traced.jaxpr
        emission.check_collectives(body, jaxpr)
        lifted = captures.lift(jaxpr, call.fun, options.fun_name, options.captures)
        evaluate, source = None, jaxpr
        if not lifted.captures:
            lifted = _NOTHING_LIFTED  # another jaxpr here would keep the key of this one alive
        elif not place.staged:
            source = lifted.jaxpr
            evaluate = lambda *values: interpreter.run(source, values, {})
        gathers = interpreter.contains(jaxpr, lambda eqn: eqn.primitive.name in GATHERS)
        if options.gathers != "keep" and gathers:
            plan = plan_gathers(source, exact=options.gathers == "exact")
            evaluate = plan.evaluate or evaluate
        moves: Sequence[str] = ()
        if self._processes is not None:
            from jax_dist._pmap.process_calls import collectives

            moves = collectives(jaxpr)
        results = traced.out_info
        return Signature(body.inner, body.out_tree, lifted, evaluate, results, tuple(moves))

    def _direct(self, place: _Place) -> Any:
        """Return the jit object into which the user's function is traced."""

        def traced(*flat_args: Any, **kwargs: Any) -> Any:
            call = self._bind(flat_args, kwargs)
            results, body = emission.emit(self.options, call, place.layout, as_view=place.as_view)
            body.call = None  # pyright: ignore[reportAttributeAccessIssue]  # it holds tracers
            _last_trace.body = body
            return results

        return self._jit(traced, place, self._out_shardings(place))

    def _program(self, place: _Place, signature: Signature) -> Any:
        """Return the jit object for a signature; captured arrays are its first argument."""
        if signature.evaluate is None:
            return self._direct(place)
        takes_captures = bool(signature.lifted.captures) and not place.staged
        first = int(takes_captures)

        def traced(*flat_args: Any, **kwargs: Any) -> Any:
            args = flat_args[first:]
            call = self._bind(args, kwargs)
            signature = self._signature(place, call, args, kwargs)
            assert signature.evaluate is not None
            captured = flat_args[0] if first else ()
            flat = signature.evaluate(*captured, *call.leaves)
            return jax.tree.unflatten(signature.out_tree, flat)

        key = (place, takes_captures)
        return self._jit(traced, key, self._out_shardings(place), first=first)

    def _jit(
        self, traced: Callable[..., Any], key: Any, shardings: dict[str, Any], *, first: int = 0
    ) -> Any:
        """Return a jit object, the same for the same key, with `first` arguments before."""
        if key not in self._jits:
            # No functools.wraps: jit would read the user's signature.
            traced.__name__ = traced.__qualname__ = self.options.fun_name
            self._jits[key] = jax.jit(
                traced,
                static_argnums=tuple(first + number for number in self.options.static),
                donate_argnums=tuple(first + number for number in self.options.donated),
                donate_argnames=self.options.donated_names or None,
                **shardings,
            )
        return self._jits[key]

    def _out_shardings(self, place: _Place) -> dict[str, Any]:
        """Return the shardings of results as options of jit.

        XLA would replicate a result of size zero, and say nothing of donated arguments. The results
        of pmaps inside stay sharded over their axes, too.
        """
        if place.staged or place.layout.inner:
            return {}

        def sharding(axis: int | None) -> NamedSharding | None:
            if axis is not None and axis < 0:  # the rank is not known yet
                return None
            return place.layout.sharding(axis, 0 if axis is None else axis + 1)

        shardings = jax.tree.map(sharding, self.options.out_axes, is_leaf=axes.is_none)
        return {"out_shardings": shardings}

    # ---- its parts

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call.bind(self.options, self._fun(), args, kwargs)

    def _lay_out(
        self, call: Call, inner: tuple[InnerAxis, ...] = (), *, whole: bool = True
    ) -> Layout:
        return self.options.lay_out(call.size, inner, whole=whole)

    def _check_devices_used(self, layout: Layout) -> None:
        """Raise DeviceCountError unless all of `devices=` are used, maybe by pmaps inside."""
        devices, used = self.options.devices, layout.mesh.size
        if devices is not None and used != len(devices):
            raise DeviceCountError(
                f"pmap of '{self.options.fun_name}' got {len(devices)} devices for an axis of size "
                f"{used}; with devices=, each of them runs one slice."
            )

    def _place(self, call: Call, layout: Layout) -> tuple[list[Any], bool]:
        """Return the leaves on the mesh, and whether one was committed elsewhere."""
        leaves, misplaced = [], False
        for leaf, axis, owner in zip(call.leaves, call.axes, call.owners, strict=True):
            if placement.can_be_put(leaf):
                target = layout.sharding(axis, jnp.ndim(leaf))
                donated = self.options.is_donated(owner)
                leaf, elsewhere = self._placed.put(leaf, target, donated=donated)
                misplaced = misplaced or elsewhere
            leaves.append(leaf)
        return leaves, misplaced

    def _place_captures(self, signature: Signature, layout: Layout) -> PlacedCaptures:
        everywhere = NamedSharding(layout.mesh, P())
        place = lambda value: put_copy(value, everywhere)
        return self._placements.of(signature.lifted, layout.mesh, place)

    # ---- the way to call it

    def _call_without_jit(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = self._bind(args, kwargs)
        outer = meshes.Frame.current()
        if outer is not None:
            return emission.emit_inside(self.options, call, outer)
        return emission.emit(self.options, call, self._lay_out(call))[0]

    def _update_callers(self) -> None:
        call = self._fronts.call
        if self._processes is not None and self.options.arrays == "local":
            call = self._processes.call

        def checking(*args: Any, **kwargs: Any) -> Any:
            try:  # a front compares static arguments before it asks Python about them
                return call(*args, **kwargs)
            except (TypeError, ValueError):
                check_static(self.options, self._fun(), args)
                raise

        self._call = checking if self.options.static else call
        for caller in self._callers:
            caller.__call__ = self._call

    def _choose(self) -> None:
        """Find out whether several processes map together. Not before: it starts the backend."""
        if self._is_chosen:
            return
        self._is_chosen = True
        if len(set(map(meshes.owner_of, self.options.candidates()))) <= 1:
            return
        from jax_dist._pmap.process_calls import ProcessCalls  # most programs need none

        self._processes = ProcessCalls(
            self.options,
            self._fun,
            run=lambda *args, **kwargs: self._fronts.call(*args, **kwargs),
            layout_of=lambda call: self._find_described(call)[0].layout,
        )
        self._update_callers()


class _LastTrace(threading.local):
    """The body that this thread has traced last, for the signature that is made of it."""

    body: TracedBody | None = None


_last_trace = _LastTrace()
