"""One function being rewritten: it is traced, goes through the passes, and becomes programs.

The user's function is traced once per signature, and JAX remembers that. The passes make a program
of the trace; where they follow how arguments are sharded, one for each way. A program has a jit
object, whose first argument are the captured arrays. Calls go through the C++ cache of `FastPath`;
one that is not in it comes to `_call_anew`.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat, _fast_path
from jax_dist._calls import warn_user
from jax_dist._fast_path import FastPath, is_staged
from jax_dist._multihost.agreement import Fingerprint
from jax_dist._passes import PassFinding, PassPlan, captures, interpreter
from jax_dist._passes.captures import Captures, Lifted, Watch
from jax_dist._passes.gathers import Gathers, plan_gathers
from jax_dist._passes.partition import Partitioning, Specs, plan_partitioning
from jax_dist._passes.propagation import find_meshes, meshes_of
from jax_dist._pmap import placement, process_calls
from jax_dist._pmap.call import any_tracer, type_of
from jax_dist._rewrite import remesh

_Args: TypeAlias = tuple[Any, ...]
_Kwargs: TypeAlias = dict[str, Any]
_Shardings: TypeAlias = tuple[NamedSharding | None, ...]  # of the leaves of a call


@dataclasses.dataclass(frozen=True, slots=True)
class RewriteOptions:
    """Options of `rewrite`, checked."""

    mesh: Mesh | None
    captures: Captures
    gathers: Gathers
    partitioning: Partitioning
    specs: Specs | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Trace:
    """The user's function as JAX traced it for one signature."""

    lifted: Lifted  # the jaxpr: of the captured arrays, as inputs, and then the dynamic leaves
    out_tree: Any
    findings: tuple[PassFinding, ...]  # made while tracing
    meshes: tuple[Mesh, ...]  # that its equations name
    has_custom_partitioning: bool  # operations that are to be replaced
    programs: dict[Hashable, "RewrittenProgram"]  # after the passes, by meshes and shardings


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RewrittenProgram:
    """A trace after the passes."""

    trace: _Trace
    jaxpr: ClosedJaxpr  # of the same inputs and results as that of the trace
    findings: tuple[PassFinding, ...]  # also those of the trace
    meshes: tuple[Mesh, ...]  # those of the arguments; if they have none, what the trace names
    jits: dict[bool, Any]  # by whether captured arrays are the first argument

    @property
    def mesh(self) -> Mesh | None:
        """One of the meshes: of several processes if there is one, as it has all devices."""
        return max(self.meshes, key=lambda mesh: mesh.is_multi_process, default=None)


class RewriteDispatcher:
    """A rewritten function: its traces, its programs, and the calls that are not cached in C++."""

    def __init__(self, fun: Callable, name: str, options: RewriteOptions):
        self.fun: Callable[..., Any] = fun
        self.name: str = name
        self.options: RewriteOptions = options
        self._jit_options = _compat.JitOptions.read(fun)  # if it is a jit: static, donated, ...
        self._agreed_signatures: set[int] = set()  # of the calls that all processes make alike
        self._capture_warnings = Watch(name)  # of each captured array only one
        self._capture_copies = placement.CaptureCopies()  # on the devices of the programs
        self._pmap_findings: list[PassFinding] = []  # of the trace that is made now
        # By the jaxpr that JAX returns; weak, so that traces go when JAX drops them.
        self._traces = weakref.WeakKeyDictionary[ClosedJaxpr, _Trace]()
        # The C++ cache of calls by signature, which asks `_call_anew` about the others.
        self.fast_path = FastPath(
            name,
            self._call_anew,
            without_jit=lambda args, kwargs: self.fun(*args, **kwargs),
            static_argnums=self._jit_options.static_argnums,
            static_argnames=self._jit_options.static_argnames,
        )

    def lower(self, args: _Args, kwargs: _Kwargs) -> jax.stages.Lowered:
        program = self.find_program(args, kwargs)
        captured = self._place_captures(program)
        jitted = self._get_jit(program, takes_captures=bool(captured))
        return _fast_path.lower(jitted, captured, args, kwargs)

    def trace(self, args: _Args, kwargs: _Kwargs) -> jax.stages.Traced:
        """Return the rewritten jaxpr, with the captured arrays in it."""
        jitted = self._get_jit(self.find_program(args, kwargs), takes_captures=False)
        return jitted.trace(*args, **kwargs)

    def _call_anew(self, args: _Args, kwargs: _Kwargs) -> _compat.CallResult:
        """Run a call whose signature the C++ fast path does not know."""
        program = self.find_program(args, kwargs)
        if is_staged() or any_tracer(jax.tree.leaves((args, kwargs))):
            return _compat.CallResult(self._call_in_outer_trace(program, args, kwargs))
        for program_mesh in program.meshes:
            placement.check_runs(program_mesh.devices.flat, f"'{self.name}', rewritten,")
        try:
            return self._run(program, args, kwargs)
        except ValueError:  # perhaps of jit, for arguments on different sets of devices
            if (mesh := self.options.mesh) is None:
                raise
        args, kwargs = remesh.put_on(mesh, (args, kwargs))
        results, _, _ = self._run(self.find_program(args, kwargs), args, kwargs)
        return _compat.CallResult(results)  # not for the fast path: it would not move the arguments

    def _call_in_outer_trace(self, program: RewrittenProgram, args: _Args, kwargs: _Kwargs) -> Any:
        """Call a program on tracers, as in a jit or grad around the rewritten function.

        Captured arrays are then constants of the outer program, not inputs, so they are warned of.
        """
        meshes_are_unknown = not program.meshes and jax.device_count() > 1
        if program.trace.has_custom_partitioning and meshes_are_unknown:
            warn_user(
                f"rewrite leaves the custom_partitioning operations of '{self.name}' as they are: "
                "in a jit, grad or vmap around it, arguments do not show their mesh. Give it by "
                "rewrite(..., mesh=mesh), or put rewrite outermost.",
                UserWarning,
            )
        if not captures.is_lifted_outside():
            self._capture_warnings.warn_of(program.trace.lifted.captures, lifted=False)
        return self._get_jit(program, takes_captures=False)(*args, **kwargs)

    def _run(self, program: RewrittenProgram, args: _Args, kwargs: _Kwargs) -> _compat.CallResult:
        """Run a program on the user's arguments and the arrays that it captures."""
        captured, mesh = self._place_captures(program), program.mesh
        self._capture_warnings.warn_of(program.trace.lifted.captures, lifted=True)
        if mesh is not None and jax.process_count() > 1:
            self._compare_with_processes(program, mesh, (args, kwargs))
        if mesh is not None:
            self.fast_path.throttle(mesh)  # the CPU backend hangs over too many calls in flight
        jitted = self._get_jit(program, takes_captures=bool(captured))
        return _compat.run_jit(jitted, captured, args, kwargs)

    def _place_captures(self, program: RewrittenProgram) -> tuple[Any, ...]:
        """Return the captured arrays of a program on the devices that it runs on."""
        place = functools.partial(_place_capture, program.mesh)
        return self._capture_copies.get(program.trace.lifted, program.mesh, place)

    def _compare_with_processes(
        self, program: RewrittenProgram, mesh: Mesh, arguments: tuple[_Args, _Kwargs]
    ) -> None:
        """Raise DisagreementError if the processes of the mesh are about to run other programs.

        Compared are the types of arguments and results, and collectives, once per signature.
        """
        results = jax.tree.unflatten(program.trace.out_tree, program.jaxpr.out_avals)
        fingerprint = Fingerprint.take((*arguments, results))  # texts of types, by path
        signature = hash((fingerprint.containers, *fingerprint.leaves.items()))
        if signature in self._agreed_signatures:
            return
        # Also if there are none: the compiler may move what is sharded over the mesh.
        collectives = process_calls.collectives(program.trace.lifted.jaxpr)
        process_calls.agree_to_run("{}, rewritten", self.fun, fingerprint, collectives, mesh)
        self._agreed_signatures.add(signature)

    def find_program(self, args: _Args, kwargs: _Kwargs) -> RewrittenProgram:
        """Return the program for arguments of these types and shardings; values do not matter."""
        trace = self._trace_user(args, kwargs)
        shardings = tuple(map(_find_named_sharding, self._dynamic_leaves(args, kwargs)))
        mesh = self.options.mesh
        meshes = (mesh,) if mesh else tuple(meshes_of(trace.meshes, shardings))
        # A program serves all shardings, as a jit does, unless it has custom_partitioning
        # operations: each of these is replaced by a shard_map with specs for these shardings.
        key = meshes, shardings if trace.has_custom_partitioning else ()
        if key not in trace.programs:
            trace.programs[key] = self._run_passes(trace, meshes, shardings)
        return trace.programs[key]

    def _trace_user(self, args: _Args, kwargs: _Kwargs) -> _Trace:
        """Trace the user's function, once for all arguments of the same types.

        JAX keeps the traces of a jit object, and knows all that they depend on: types, static
        values, settings such as x64. Where it has one, it returns the same jaxpr object again.
        """
        args, kwargs = jax.tree.map(_describe_leaf, (args, kwargs))
        with captures.tracing(self.options.captures):
            traced = self._user_jit.trace(*args, **kwargs)
        if traced.jaxpr not in self._traces:
            self._traces[traced.jaxpr] = self._analyze(traced)
        return self._traces[traced.jaxpr]

    @functools.cached_property
    def _user_jit(self) -> Any:
        """The jit object that traces the user's function, and never runs it.

        With several processes, each `jax.pmap` inside is traced as one over the devices of all: by
        itself, it sees those of its own process. A jit of the user, which may have a trace of that
        in its cache, is taken off.
        """
        fun = _compat.inside_jit(self.fun) if jax.process_count() > 1 else self.fun

        def traced(*flat_args: Any, **kwargs: Any) -> Any:
            self._pmap_findings.clear()
            with remesh.widen_pmaps_to_all_processes(self.options.mesh, self._pmap_findings):
                return fun(*flat_args, **kwargs)

        # No functools.wraps: jit would read the user's signature.
        traced.__name__ = traced.__qualname__ = self.name
        static, names = self._jit_options.static_argnums, self._jit_options.static_argnames
        return jax.jit(traced, static_argnums=static, static_argnames=names or None)

    def _analyze(self, traced: jax.stages.Traced) -> _Trace:
        """Make captured arrays inputs of a new trace, and find what decides about its passes."""
        remesh.check_none_local(traced.jaxpr)
        eqns = list(interpreter.equations(traced.jaxpr))
        has_operations = "custom_partitioning" in map(_compat.name_of, eqns)
        return _Trace(
            lifted=captures.lift(traced.jaxpr, self.fun, self.name, self.options.captures),
            out_tree=traced.out_tree,
            findings=tuple(self._pmap_findings),  # added while it was traced
            meshes=tuple(find_meshes(eqns)),
            has_custom_partitioning=has_operations and self.options.partitioning == "route",
            programs={},
        )

    def _run_passes(
        self, trace: _Trace, meshes: tuple[Mesh, ...], shardings: _Shardings
    ) -> RewrittenProgram:
        """Return the program after all passes, each of which changes the jaxpr of the one before.

        `meshes` are those that the arguments or the program name, `shardings` of the arguments.
        """
        options, plan = self.options, PassPlan(trace.lifted.jaxpr, trace.findings)
        if jax.process_count() == 1:  # else pmaps were moved while tracing
            plan = plan.then(remesh.plan_remesh, options.mesh)
        if trace.has_custom_partitioning:
            replicated = NamedSharding(meshes[0], P()) if len(meshes) == 1 else None
            in_shardings = (*[replicated] * len(trace.lifted.values), *shardings)
            plan = plan.then(
                plan_partitioning, meshes=meshes, in_shardings=in_shardings, specs=options.specs
            )
        if options.gathers != "keep":
            plan = plan.then(plan_gathers, exact=options.gathers == "exact")
        assert plan.jaxpr is not None  # the first plan has one
        return RewrittenProgram(trace, plan.jaxpr, plan.findings, meshes, jits={})

    def _get_jit(self, program: RewrittenProgram, *, takes_captures: bool) -> Any:
        """Return the jit object of a program, which has the user's options of jit.

        It takes the user's arguments; before them, if `takes_captures`, the tuple of the arrays
        that the function captures. Else these are constants of its program.
        """
        if takes_captures not in program.jits:
            trace, options, count_before = program.trace, self._jit_options, int(takes_captures)

            # `flat_args` as in jax.pmap: a keyword `args` of the user would clash with that name.
            def run(*flat_args: Any, **kwargs: Any) -> Any:
                captured = flat_args[0] if takes_captures else trace.lifted.values
                inputs = [*captured, *self._dynamic_leaves(flat_args[count_before:], kwargs)]
                results = interpreter.evaluate(program.jaxpr, inputs)
                return jax.tree.unflatten(trace.out_tree, results)

            # No functools.wraps: jit would read the user's signature and donate by keyword too.
            run.__name__ = run.__qualname__ = self.name
            program.jits[takes_captures] = jax.jit(
                run,
                static_argnums=tuple(count_before + n for n in options.static_argnums),
                static_argnames=options.static_argnames or None,
                donate_argnums=tuple(count_before + n for n in options.donate_argnums),
                donate_argnames=options.donate_argnames or None,
                keep_unused=options.keep_unused,
                compiler_options=options.compiler_options,
            )
        return program.jits[takes_captures]

    def _dynamic_leaves(self, args: _Args, kwargs: _Kwargs) -> list[Any]:
        """Return the leaves of the arguments that are not static."""
        static, names = self._jit_options.static_argnums, self._jit_options.static_argnames
        fixed = {number % len(args) for number in static if number < len(args)}
        by_position = [arg for number, arg in enumerate(args) if number not in fixed]
        by_name = {name: value for name, value in kwargs.items() if name not in names}
        return jax.tree.leaves((by_position, by_name))


def _find_named_sharding(leaf: Any) -> NamedSharding | None:
    """Return how an argument is sharded, or None if it is traced or on no mesh."""
    sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _describe_leaf(leaf: Any) -> Any:
    """Return an array on Auto axes as its type, so that all shardings share one trace."""
    kind: Any = jax.typeof(leaf) if isinstance(leaf, jax.Array) else None
    is_auto = kind is not None and kind.sharding.mesh.are_all_axes_auto
    return type_of(leaf) if is_auto else leaf


def _place_capture(mesh: Mesh | None, value: Any) -> Any:
    """Return a captured array on the devices of the program: replicated, if it is on one device."""
    where = None if mesh is None else NamedSharding(mesh, P())
    if isinstance(value, jax.Array):
        is_spread = len(value.sharding.device_set) > 1  # the user has said where
        if is_spread or (mesh is None and value.committed):
            where = value.sharding
    return placement.put_copy(value, where)
