"""One function being rewritten: it is traced, goes through the passes, and becomes programs.

The user's function is traced once per signature, and JAX remembers that. What the passes make of
it is traced by a jit object: one for each set of captured arrays, which are its first argument, and
for each way that arguments are sharded where the passes follow that. A front is the C++ fast path
of calls (see `_compat.front`); a call that is not in its cache comes to `_call_anew`.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._calls import warn_user
from jax_dist._multihost.agreement import Fingerprint
from jax_dist._passes import PassFinding, PassPlan, fronts, interpreter
from jax_dist._passes.captures import (
    NO_CAPTURES,
    Captures,
    Lifted,
    PlacedCaptures,
    Placements,
    Watch,
    is_lifted_outside,
    lift,
    tracing,
)
from jax_dist._passes.constants import put_copy
from jax_dist._passes.gathers import Gathers, plan_gathers
from jax_dist._passes.partition import Partitioning, Specs, plan_partitioning
from jax_dist._passes.propagation import find_meshes, meshes_of
from jax_dist._pmap import placement, process_calls
from jax_dist._pmap.body import any_tracer, type_of
from jax_dist._rewrite import remesh

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class RewriteOptions:
    """Options of `rewrite`, checked."""

    mesh: Mesh | None
    captures: Captures
    gathers: Gathers
    partitioning: Partitioning
    specs: Specs | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _TracedCall:
    """The user's function as JAX sees it for one signature."""

    lifted: Lifted  # its inputs: the captured arrays that are lifted, and then the dynamic leaves
    out_tree: Any
    fingerprint: Fingerprint | None  # the same in all processes, if there are several
    findings: tuple[PassFinding, ...]  # made while tracing
    meshes: tuple[Mesh, ...]  # that the program itself names
    routes: bool  # whether it has custom_partitioning operations, which shardings decide on


class _KnownCall(NamedTuple):
    """The trace that serves a call, and what its program depends on beyond the types."""

    traced: _TracedCall
    shardings: tuple[NamedSharding | None, ...]  # of the dynamic leaves
    meshes: tuple[Mesh, ...]  # what the program runs on

    @property
    def mesh(self) -> Mesh | None:
        return self.meshes[0] if len(self.meshes) == 1 else None

    @property
    def variant(self) -> Hashable:
        """Key of its jit object: jit traces once for all shardings, but routing depends on them."""
        return (self.shardings, self.meshes) if self.traced.routes else None


class RewrittenProgram:
    """All that the calls of one rewritten function share.

    Attributes:
      fun: the user's function.
      name: of the program.
      options: of the rewriting.
    """

    def __init__(self, fun: Callable, name: str, options: RewriteOptions):
        self.fun: Callable[..., Any] = fun
        self.name: str = name
        self.options: RewriteOptions = options
        self._jit_options = _compat.JitOptions.read(fun)
        self._agreed: set[int] = set()  # hashes of signatures, with the other processes
        self._watch = Watch(name)
        self._placements = Placements()
        self._traces = weakref.WeakKeyDictionary[ClosedJaxpr, _TracedCall]()
        self._pmap_findings: list[PassFinding] = []  # of the trace that is made now
        self._jits: dict[tuple[PlacedCaptures, Hashable], Any] = {}
        self.fronts = fronts.Fronts(
            name,
            self._call_anew,
            function=lambda: self.fun,
            rerun=self._rewrite,
            without_jit=lambda args, kwargs: self.fun(*args, **kwargs),
            static_argnums=self._jit_options.static_argnums,
            static_argnames=self._jit_options.static_argnames,
        )

    def lower(self, args: _Args, kwargs: _Kwargs) -> jax.stages.Lowered:
        call = self._find(args, kwargs)
        placed = self._place_captures(call)
        lowered = self._jit(placed, call.variant).lower(*placed.prepend(args), **kwargs)
        return placed.hide(lowered)

    def trace(self, args: _Args, kwargs: _Kwargs) -> jax.stages.Traced:
        """Return the rewritten jaxpr, with the captured arrays in it."""
        call = self._find(args, kwargs)
        return self._jit(NO_CAPTURES, call.variant).trace(*args, **kwargs)

    def explain(self, args: _Args, kwargs: _Kwargs) -> tuple[Lifted, tuple[PassFinding, ...]]:
        """Return the program before the passes, and all findings."""
        traced = self._trace_user(args, kwargs)
        _, findings = self._run_passes(traced, args, kwargs)
        return traced.lifted, (*traced.findings, *findings)

    # ---- a call that the front does not know

    def _call_anew(
        self, front_captures: PlacedCaptures, args: _Args, kwargs: _Kwargs
    ) -> _compat.Answer:
        """Run a call that no front knows; `front_captures` are those of the front that was called.

        Returns what `_compat.front` expects: the results, what the front is to remember, or None,
        and whether that is stale.
        """
        call = self._find(args, kwargs)
        if fronts.is_staged() or any_tracer(jax.tree.leaves((args, kwargs))):
            return self._stage(call, args, kwargs), None, False
        for mesh in call.meshes:
            placement.check_runs(mesh.devices.flat, f"'{self.name}', rewritten,")
        mesh = self.options.mesh
        try:
            return self._run(front_captures, call, args, kwargs)
        except ValueError:  # perhaps of jit, for arguments on different sets of devices
            if mesh is None:
                raise
        args, kwargs = remesh.put_on(mesh, (args, kwargs))
        results, _, _ = self._run(front_captures, self._find(args, kwargs), args, kwargs)
        return results, None, False

    def _stage(self, call: _KnownCall, args: _Args, kwargs: _Kwargs) -> Any:
        """Call the program as part of an outer trace. Captured arrays become constants of that."""
        if call.traced.routes and call.mesh is None and jax.device_count() > 1:
            warn_user(
                f"rewrite leaves the custom_partitioning operations of '{self.name}' as they are: "
                "in a jit, grad or vmap around it, arguments do not show their mesh. Give it by "
                "rewrite(..., mesh=mesh), or put rewrite outermost.",
                UserWarning,
            )
        if not is_lifted_outside():
            self._watch.warn_of(call.traced.lifted.captures, lifted=False)
        return self._jit(NO_CAPTURES, call.variant)(*args, **kwargs)

    def _run(
        self, front_captures: PlacedCaptures, call: _KnownCall, args: _Args, kwargs: _Kwargs
    ) -> _compat.Answer:
        """Run a call on arrays; see `_call_anew` for `front_captures` and the results."""
        placed = self._place_captures(call)
        self._watch.warn_of(call.traced.lifted.captures, lifted=True)
        if call.mesh is not None and call.traced.fingerprint is not None:
            self._agree(call.traced, call.traced.fingerprint, call.mesh)
        jitted = self._jit(placed, call.variant)
        results, memory, stale = _compat.run_jit(jitted, placed.prepend(args), kwargs)
        is_full = call.mesh is not None and fronts.can_be_full(call.mesh)
        self.fronts.use(placed, is_full=is_full)
        return results, memory if placed is front_captures else None, stale

    def _place_captures(self, call: _KnownCall) -> PlacedCaptures:
        """Return the captured arrays of a call on the devices that it runs on."""
        mesh = call.mesh
        if mesh is None and jax.process_count() > 1:
            # One with devices of other processes too, where arrays of this one cannot be used.
            mesh = next((mesh for mesh in call.meshes if mesh.is_multi_process), None)
        place = lambda value: _place_capture(value, mesh)
        return self._placements.get(call.traced.lifted, mesh, place)

    def _find(self, args: _Args, kwargs: _Kwargs) -> _KnownCall:
        """Return the trace that serves a call, and the shardings that its arguments show."""
        traced = self._trace_user(args, kwargs)
        leaf_shardings = [
            None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
            for leaf in jax.tree.leaves(self._dynamic(args, kwargs))
        ]
        shardings = tuple(s if isinstance(s, NamedSharding) else None for s in leaf_shardings)
        mesh = self.options.mesh
        meshes = [mesh] if mesh else meshes_of(traced.meshes, shardings)
        return _KnownCall(traced, shardings, tuple(meshes))

    # ---- the user's function is traced

    def _trace_user(self, args: _Args, kwargs: _Kwargs) -> _TracedCall:
        """Trace the user's function for arguments of these types; their values do not matter.

        A signature is all that a trace depends on: types, static values, settings such as x64. JAX
        keeps traces by it, and forgets them with `jax.clear_caches()`.
        """
        args, kwargs = jax.tree.map(_describe_leaf, (args, kwargs))
        with tracing(self.options.captures):
            traced = self._user_jit.trace(*args, **kwargs)
        if traced.jaxpr not in self._traces:
            self._traces[traced.jaxpr] = self._analyze(traced, args, kwargs)
        return self._traces[traced.jaxpr]

    @functools.cached_property
    def _user_jit(self) -> Any:
        """The jit object that traces the user's function, and never runs it."""
        fun = _compat.inside_jit(self.fun) if jax.process_count() > 1 else self.fun

        def traced(*flat_args: Any, **kwargs: Any) -> Any:
            self._pmap_findings.clear()
            with remesh.pmaps_over_all_processes(self.options.mesh, self._pmap_findings):
                return fun(*flat_args, **kwargs)

        # No functools.wraps: jit would read the user's signature.
        traced.__name__ = traced.__qualname__ = self.name
        static, names = self._jit_options.static_argnums, self._jit_options.static_argnames
        return jax.jit(traced, static_argnums=static, static_argnames=names or None)

    def _analyze(self, traced: jax.stages.Traced, args: _Args, kwargs: _Kwargs) -> _TracedCall:
        """Lift the captured arrays of a new trace, and find out which passes can change it."""
        jaxpr, out_tree = traced.jaxpr, jax.tree.structure(traced.out_info)
        remesh.check_none_local(jaxpr)
        lifted = lift(jaxpr, self.fun, self.name, self.options.captures)
        eqns = list(interpreter.equations(jaxpr))
        meshes, primitives = tuple(find_meshes(eqns)), set(map(_compat.name_of, eqns))
        options = self.options
        routes = options.partitioning == "route" and "custom_partitioning" in primitives
        fingerprint = None
        if jax.process_count() > 1:
            fingerprint = Fingerprint.take((args, kwargs, traced.out_info))
        findings = tuple(self._pmap_findings)
        return _TracedCall(lifted, out_tree, fingerprint, findings, meshes, routes)

    def _dynamic(self, args: _Args, kwargs: _Kwargs) -> tuple[dict[int, Any], _Kwargs]:
        """Return the arguments that are not static, by position and by name."""
        static, names = self._jit_options.static_argnums, self._jit_options.static_argnames
        fixed = {number % len(args) for number in static if number < len(args)}
        by_position = {n: arg for n, arg in enumerate(args) if n not in fixed}
        return by_position, {name: value for name, value in kwargs.items() if name not in names}

    # ---- the passes, in their order, and the programs that they make

    def _rewrite(
        self, captured: Sequence[Any], args: _Args, kwargs: _Kwargs, variant: Any = None
    ) -> Any:
        """Evaluate the rewritten program in this trace; `captured` is empty for constants."""
        traced = self._trace_user(args, kwargs)
        program, _ = self._run_passes(traced, args, kwargs, variant)
        dynamic = jax.tree.leaves(self._dynamic(args, kwargs))
        results = interpreter.evaluate(program, [*(captured or traced.lifted.values), *dynamic])
        return jax.tree.unflatten(traced.out_tree, results)

    def _run_passes(
        self, traced: _TracedCall, args: _Args, kwargs: _Kwargs, variant: Any = None
    ) -> tuple[ClosedJaxpr, tuple[PassFinding, ...]]:
        """Return the program after all passes, and their findings.

        `variant` has the shardings and meshes of the call (see `_KnownCall`); None: read them from
        the arguments.
        """
        options, lifted = self.options, traced.lifted
        jaxpr, findings = lifted.jaxpr, list[PassFinding]()
        passes: list[Callable[[ClosedJaxpr], PassPlan]] = []
        if jax.process_count() == 1:
            passes.append(lambda jaxpr: remesh.plan_remesh(jaxpr, options.mesh))
        if traced.routes:
            call = self._find(args, kwargs) if variant is None else _KnownCall(traced, *variant)
            replicated = None if call.mesh is None else NamedSharding(call.mesh, P())
            shardings = (*[replicated] * len(lifted.values), *call.shardings)
            passes.append(
                lambda jaxpr: plan_partitioning(
                    jaxpr, meshes=call.meshes, in_shardings=shardings, specs=options.specs
                )
            )
        if options.gathers != "keep":
            passes.append(lambda jaxpr: plan_gathers(jaxpr, exact=options.gathers == "exact"))
        for plan_pass in passes:
            plan = plan_pass(jaxpr)
            findings += plan.findings
            jaxpr = plan.jaxpr or jaxpr
        return jaxpr, tuple(findings)

    def _jit(self, placed: PlacedCaptures, variant: Hashable) -> Any:
        """Return the jit object of a program; captured arrays are its first argument, if any."""
        key = placed, variant
        if key not in self._jits:
            # `first` is the position of the user's first argument, after the captured arrays.
            options, first = self._jit_options, int(placed is not NO_CAPTURES)

            # `flat_args` as in jax.pmap: a keyword `args` of the user would clash with that name.
            def traced(*flat_args: Any, **kwargs: Any) -> Any:
                captured = flat_args[0] if first else ()
                return self._rewrite(captured, flat_args[first:], kwargs, variant)

            # No functools.wraps: jit would read the user's signature and donate by keyword too.
            traced.__name__ = traced.__qualname__ = self.name
            self._jits[key] = jax.jit(
                traced,
                static_argnums=tuple(first + number for number in options.static_argnums),
                static_argnames=options.static_argnames or None,
                donate_argnums=tuple(first + number for number in options.donate_argnums),
                donate_argnames=options.donate_argnames or None,
                keep_unused=options.keep_unused,
                compiler_options=options.compiler_options,
            )
        return self._jits[key]

    def _agree(self, traced: _TracedCall, fingerprint: Fingerprint, mesh: Mesh) -> None:
        """Agree with the other processes on what runs next; see `_pmap.process_calls`."""
        signature = hash((traced.out_tree, *fingerprint.leaves.items()))
        if signature in self._agreed:
            return
        # Without a collective too: the compiler may move what is sharded over the mesh.
        moves = process_calls.collectives(traced.lifted.jaxpr)
        process_calls.agree_to_run("{}, rewritten", self.fun, fingerprint, moves, mesh)
        self._agreed.add(signature)


def _describe_leaf(leaf: Any) -> Any:
    """Return an array on Auto axes as its type, so that all shardings share one trace."""
    if isinstance(leaf, jax.Array):
        kind: Any = jax.typeof(leaf)
        if all(axis == AxisType.Auto for axis in kind.sharding.mesh.axis_types):
            return type_of(leaf)
    return leaf


def _place_capture(value: Any, mesh: Mesh | None) -> Any:
    """Return a captured array on the devices of the program: replicated, if it is on one device."""
    is_array = isinstance(value, jax.Array)
    if is_array and len(value.sharding.device_set) > 1:
        return put_copy(value, value.sharding)  # the user has said where
    if mesh is not None:
        return put_copy(value, NamedSharding(mesh, P()))
    # Once, and not in each call; tied to a device as before.
    return put_copy(value, value.sharding if is_array and value.committed else None)
