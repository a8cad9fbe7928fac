"""One function being rewritten: the passes in their order, once per signature.

The user's function is traced once per signature, and remembered (see `passes.programs`). What the
passes make of it is traced by a jit object, for the arguments as they lie.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist._multihost.agreement import Fingerprint, containers, describe
from jax_dist._pmap import placement, process_calls
from jax_dist._pmap.body import any_tracer, type_of
from jax_dist._rewrite import interpreter, pipeline, programs, remesh
from jax_dist._rewrite.captures import Capture, Captures, Lifted, lift, tracing
from jax_dist._rewrite.constants import lies_on_many, put_copy
from jax_dist._rewrite.gathers import GATHERS, Gathers, plan_gathers
from jax_dist._rewrite.partition import plan_partitioning
from jax_dist._rewrite.pipeline import Pass, PassFinding
from jax_dist._rewrite.pmap_sites import check_none_local, pmaps_over_all_processes
from jax_dist._rewrite.programs import Bound, Memo, Program, Programs
from jax_dist._rewrite.propagation import is_partitioned, mesh_of, meshes_of
from jax_dist.errors import ArgumentError

Partitioning: TypeAlias = Literal["route", "keep"]
Specs: TypeAlias = Mapping[str, tuple[Any, Any]]


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
    places: tuple[int, ...]  # of the dynamic leaves among all
    out_tree: Any
    described: dict[str, str]  # the arguments, by their path
    findings: tuple[PassFinding, ...]  # made while tracing
    routes: bool  # whether it has operations whose program depends on how arguments are cut


class _KnownCall(NamedTuple):
    """What is known of one call."""

    traced: _TracedCall
    shardings: tuple[NamedSharding | None, ...]  # of the dynamic leaves
    mesh: Mesh | None  # what the program runs on, as far as that is one


class RewrittenProgram:
    """All that the calls of one rewritten function share.

    Attributes:
      fun: the user's function.
      name: of the program.
      options: of the rewriting.
      findings: of the last trace.
      found: the captured arrays, in the last trace.
      lifted: those that are arguments.
    """

    def __init__(self, fun: Callable, name: str, options: RewriteOptions):
        self.fun: Callable[..., Any] = fun
        self.name: str = name
        self.options: RewriteOptions = options
        self.findings: tuple[PassFinding, ...] = ()
        self.found: tuple[Capture, ...] = ()
        self.lifted: tuple[Capture, ...] = ()
        self._jit_options = _compat.JitOptions.of(fun)
        self._mesh_seen: Mesh | None = None
        self._is_warned = False
        self._agreed: set[int] = set()  # hashes of signatures, with the other processes
        self._memo = Memo(name, self._traced, self._jit_options)
        self._programs = Programs(
            name, self._jit_options, trace=self._trace, miss=self._first_sight, without_jit=fun
        )

    def serve(self, caller: Any) -> None:
        """Keeps `caller.__call__` the fastest way to call."""
        self._programs.serve(caller)

    def again(self) -> "RewrittenProgram":
        """The same, and nothing traced: what jit has in its cache tells no findings any more."""
        return RewrittenProgram(self.fun, self.name, self.options)

    def lower(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Lowered:
        bound, found = self._prepared(args, kwargs)
        return bound.lowered(self._programs.lower(bound, found, args, kwargs))

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> jax.stages.Traced:
        """The rewritten jaxpr, with the captured arrays in it."""
        found = self._find(self._trace_user(args, kwargs), args, kwargs)
        with self._programs.under_way(found):
            return self._programs.plain(_variant(found)).jitted.trace(*args, **kwargs)

    # ---- a call that the front does not know

    def _first_sight(
        self, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _compat.Answer:
        traced = self._trace_user(args, kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        if programs.is_staged() or any_tracer(leaves):
            found = self._find(traced, args, kwargs)
            if traced.routes and found.mesh is None:
                self._warn_unrouted()
            plain = self._programs.plain(_variant(found))
            return self._programs.stage(plain, traced.lifted, found, args, kwargs), None, False
        for mesh in self._meshes(self._find(traced, args, kwargs)):
            placement.check_runs(mesh.devices.flat, f"'{self.name}', rewritten,")
        try:
            return self._run(program, traced, args, kwargs)
        except ValueError as refusal:
            mesh = self.options.mesh
            moved = None if mesh is None else remesh.put_on(mesh, args, kwargs)
            if moved is None:
                raise
            del refusal
        results, _, _ = self._run(program, traced, *moved)
        return results, None, False

    def _warn_unrouted(self) -> None:
        """Warn once that custom_partitioning operations stay, if there is more than one device."""
        if self._is_warned or jax.device_count() == 1:
            return
        self._is_warned = True
        pipeline.warn_user(
            f"rewrite leaves the custom_partitioning operations of '{self.name}' as they are: in a "
            "jit, grad or vmap around it, arguments do not show their mesh. Give it by "
            "rewrite(..., mesh=mesh), or put rewrite outermost.",
            UserWarning,
        )

    def _run(
        self, program: Program, traced: _TracedCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _compat.Answer:
        bound, found = self._prepared(args, kwargs, traced)
        self._programs.watch.warn_of(traced.lifted.captures, lifted=True)
        if found.mesh is not None and jax.process_count() > 1:
            self._agree(found)
        return self._programs.run(bound, program, found, args, kwargs, self._mesh_seen)

    def _prepared(
        self, args: tuple, kwargs: dict, traced: _TracedCall | None = None
    ) -> tuple[Bound, _KnownCall]:
        traced = traced or self._trace_user(args, kwargs)
        found = self._find(traced, args, kwargs)
        mesh = found.mesh
        if mesh is None and jax.process_count() > 1:
            # One with devices of other processes too, where arrays of this one cannot be used.
            mesh = next((each for each in self._meshes(found) if each.is_multi_process), None)
        place = lambda value: _placed(value, mesh)
        return self._programs.bound(traced.lifted, mesh, place, _variant(found)), found

    def _find(self, traced: _TracedCall, args: tuple, kwargs: dict) -> _KnownCall:
        leaves = jax.tree.leaves((args, kwargs))
        lying = [
            None if isinstance(leaves[place], Tracer) else getattr(leaves[place], "sharding", None)
            for place in traced.places
        ]
        shardings = tuple(each if isinstance(each, NamedSharding) else None for each in lying)
        found = self.options.mesh or mesh_of(traced.lifted.jaxpr, shardings)
        # Under grad and vmap arguments do not say how they lie; they did when called before.
        self._mesh_seen = found or self._mesh_seen
        return _KnownCall(traced, shardings, self._mesh_seen)

    def _meshes(self, found: _KnownCall) -> list[Mesh]:
        """Those that the program runs on."""
        given = [] if self.options.mesh is None else [self.options.mesh]
        return [*given, *meshes_of(found.traced.lifted.jaxpr, found.shardings)]

    # ---- what is traced

    def _trace_user(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _TracedCall:
        """The user's function for arguments of these types; their values do not matter."""
        args, kwargs = jax.tree.map(_described, (args, kwargs))
        return self._memo.of(args, kwargs)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _TracedCall:
        """His Python runs here, once per signature."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tracer)]
        fun = _compat.inside_jit(self.fun) if jax.process_count() > 1 else self.fun
        findings: list[PassFinding] = []
        out_trees = []

        def flat(*dynamic: Any) -> list[Any]:
            filled = list(leaves)
            for place, value in zip(places, dynamic, strict=True):
                filled[place] = value
            given, keywords = jax.tree.unflatten(tree, filled)
            with pmaps_over_all_processes(self.options.mesh, findings):
                flat_output, out_tree = jax.tree.flatten(fun(*given, **keywords))
            out_trees.append(out_tree)
            return flat_output

        flat.__name__ = flat.__qualname__ = self.name
        with tracing(self.options.captures), set_mesh_explained(self.name):
            jaxpr = jax.jit(flat).trace(*[leaves[place] for place in places]).jaxpr
        check_none_local(jaxpr)
        lifted = lift(jaxpr, self.fun, self.name, self.options.captures)
        routes = self.options.partitioning == "route" and interpreter.contains(
            jaxpr, is_partitioned
        )
        paths = jax.tree.leaves_with_path((args, kwargs))
        described = {f"argument {jax.tree_util.keystr(path)}": describe(x) for path, x in paths}
        return _TracedCall(lifted, tuple(places), out_trees[-1], described, tuple(findings), routes)

    def _trace(self, captured: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What jit traces: the rewritten program."""
        found = self._programs.found()
        if found is None:
            found = self._find(self._trace_user(args, kwargs), args, kwargs)
        traced = found.traced
        values = captured or traced.lifted.values
        leaves = jax.tree.leaves((args, kwargs))
        inputs = (*values, *[leaves[place] for place in traced.places])
        passes = self._passes(found, len(values))
        results, findings = pipeline.evaluate_through(passes, traced.lifted.jaxpr, inputs)
        self.findings = (*traced.findings, *findings)
        self.found = traced.lifted.found
        self.lifted = traced.lifted.captures if captured else ()
        return jax.tree.unflatten(traced.out_tree, results)

    def _passes(self, found: _KnownCall, lifted: int) -> list[Pass]:
        options = self.options
        passes = []
        if jax.process_count() == 1:
            plan = functools.partial(remesh.plan_remesh, mesh=options.mesh)
            passes.append(Pass({"shard_map"}, plan))
        if options.partitioning == "route":
            whole = None if found.mesh is None else NamedSharding(found.mesh, P())
            in_shardings = (*[whole] * lifted, *found.shardings)
            plan = functools.partial(
                plan_partitioning, mesh=found.mesh, in_shardings=in_shardings, specs=options.specs
            )
            passes.append(Pass({"custom_partitioning"}, plan))
        if options.gathers != "keep":
            plan = functools.partial(plan_gathers, exact=options.gathers == "exact")
            passes.append(Pass(GATHERS, plan))
        return passes

    def _agree(self, found: _KnownCall) -> None:
        """With the other processes, on what runs next; see `mapping.process_calls`."""
        signature = hash((found.traced.out_tree, *found.traced.described.items()))
        if signature in self._agreed:
            return
        assert found.mesh is not None
        jaxpr, leaves = found.traced.lifted.jaxpr, dict(found.traced.described)
        for number, aval in enumerate(jaxpr.out_avals):
            leaves[f"result {number}"] = describe(aval)
        # Of the whole arrays that go in and come out.
        whole = Fingerprint(containers(found.traced.out_tree), leaves)
        # Without a collective too: what is cut over the mesh may be moved by the compiler.
        moves = process_calls.collectives(jaxpr)
        process_calls.agree_to_run("{}, rewritten", self.fun, whole, moves, found.mesh)
        self._agreed.add(signature)


@contextlib.contextmanager
def set_mesh_explained(name: str) -> Iterator[None]:
    """Raise ArgumentError if the traced function enters `jax.set_mesh`."""
    try:
        yield
    except ValueError as error:
        if "`set_mesh` can only be used outside" not in str(error):
            raise
        raise ArgumentError(
            f"'{name}' enters jax.set_mesh itself, which JAX does not trace. Enter it around the "
            "call of the rewritten function, or give the mesh to jax.shard_map."
        ) from error


def _variant(found: _KnownCall) -> Hashable:
    """On Auto axes, jit traces once for all ways that arguments are cut; a route follows them."""
    return found.shardings if found.traced.routes else None


def _described(leaf: Any) -> Any:
    """The type without its mesh, unless that is what the user wrote types with."""
    if isinstance(leaf, jax.Array):
        kind: Any = jax.typeof(leaf)
        if all(axis == AxisType.Auto for axis in kind.sharding.mesh.axis_types):
            return type_of(leaf)
    return leaf


def _placed(value: Any, mesh: Mesh | None) -> Any:
    """A captured array on every device of the program, once."""
    if lies_on_many(value):
        return put_copy(value, value.sharding)  # the user has said where
    if mesh is not None:
        return put_copy(value, NamedSharding(mesh, P()))
    # Once, and not in each call; tied to a device as before.
    is_tied = isinstance(value, jax.Array) and value.committed
    return put_copy(value, value.sharding if is_tied else None)
