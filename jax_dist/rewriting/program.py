"""One function being rewritten: the passes in their order, once per signature."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.mapping import agreements
from jax_dist.mapping.attempts import Misplaced, call_under_way
from jax_dist.multihost.fingerprints import Fingerprint, containers, describe
from jax_dist.passes.asking import mesh_of
from jax_dist.passes.capture_policy import Watch
from jax_dist.passes.captures import Capture
from jax_dist.passes.findings import Finding, Plan
from jax_dist.passes.gathers import plan_gathers
from jax_dist.passes.interpreter import Values
from jax_dist.passes.lifting import LiftedJit, NewCaptures, Traced
from jax_dist.passes.partitioning import plan_partitioning
from jax_dist.passes.pipeline import Pass, evaluate_through
from jax_dist.passes.primitives import GATHERS
from jax_dist.passes.rolling import plan_rolling
from jax_dist.rewriting import first_places, misplaced
from jax_dist.rewriting.arguments import Wishes
from jax_dist.rewriting.process_pmaps import check_none_local, pmaps_over_all_processes
from jax_dist.rewriting.remesh import plan_remesh


class RewrittenProgram:
    """All that the calls of one rewritten function share.

    Attributes:
      fun: the user's function.
      name: of the program.
      wishes: what the user wants of the rewriting.
      dispatch: what a call goes through; one C++ call in the steady state.
      findings: of the last trace.
      found: the captured arrays, in the last trace.
      lifted: those that are arguments.
    """

    def __init__(self, fun: Callable, name: str, wishes: Wishes):
        self.fun, self.name, self.wishes = fun, name, wishes
        self.findings: tuple[Finding, ...] = ()
        self.found: tuple[Capture, ...] = ()
        self.lifted: tuple[Capture, ...] = ()
        self._while_traced: list[Finding] = []
        self._options = _compat.jit_options(fun)
        self._watch = Watch(name, wishes.policy)
        self._mesh_seen: Mesh | None = None
        self._asked = False  # for the program only
        self._placed: set[tuple] = set()  # types for which a first state was looked for
        self._by_shardings: dict[tuple, LiftedJit] = {}
        self._jit = self._new_jit()
        self.dispatch: Callable = self._jit.dispatch

    def again(self) -> "RewrittenProgram":
        """The same, and nothing traced: what jit has in its cache tells no findings any more."""
        return RewrittenProgram(self.fun, self.name, self.wishes)

    def settle(self, unsettled: NewCaptures | Misplaced, args: tuple, kwargs: dict) -> Any:
        """Makes the call whose trace found captures that are not arguments, or wanted a move."""
        if isinstance(unsettled, NewCaptures):
            return self._jit.settle(unsettled, args, kwargs)
        if self._by_shardings:
            self._jit = self._jit_for(args, kwargs)
        return self._jit.call(*args, **kwargs)  # traced again: the mesh is part of the types

    def placed(
        self, unsettled: NewCaptures | Misplaced, args: tuple, kwargs: dict
    ) -> tuple[tuple, dict]:
        """The arguments, with a first state where the next one will lie; see `first_places`."""
        if isinstance(unsettled, NewCaptures):
            wanted = self._wanted_places(unsettled.traced, args, kwargs)
        else:
            wanted = unsettled.places
        leaves, tree = jax.tree.flatten((args, kwargs))
        for place, target in wanted.items():
            leaves[place] = jax.device_put(leaves[place], target)
        return jax.tree.unflatten(tree, leaves)

    def moved(self, refusal: ValueError, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments on the mesh; raises what jit said if that was not for where they lie."""
        mesh = self.wishes.mesh
        moved = None if mesh is None else misplaced.put_on(mesh, args, kwargs)
        if moved is None:
            raise refusal
        return moved

    def ask(self, method: str, args: tuple, kwargs: dict) -> Any:
        """`lower` or `trace`, for these arguments."""
        if self._by_shardings:
            self._jit = self._jit_for(args, kwargs)
        self._asked = True
        try:
            return getattr(self._jit, method)(*args, **kwargs)
        finally:
            self._asked = False

    def look_again(self, args: tuple, kwargs: dict) -> None:
        """After a compile (see `mapping.dispatch`): arguments are left where the user put them."""

    def _new_jit(self) -> LiftedJit:
        return LiftedJit(
            lambda: self.fun,
            self.name,
            call=self._traced_fun,
            policy=self.wishes.policy,
            watch=self._watch,
            options=self._options,
            emit=self._emit,
            place=self._place,
            changed=self._renew_dispatch,
        )

    def _renew_dispatch(self) -> None:
        if not self._by_shardings:
            self.dispatch = self._jit.dispatch

    def _traced_fun(self, *args: Any, **kwargs: Any) -> Any:
        """The user's function, as the trace calls it."""
        fun = _compat.inside_jit(self.fun) if jax.process_count() > 1 else self.fun
        self._while_traced = []
        with pmaps_over_all_processes(self.wishes.mesh, self._while_traced):
            return fun(*args, **kwargs)

    def _emit(self, traced: Traced, lifted: Sequence[Capture], inputs: Sequence[Any]) -> Values:
        """Evaluates the rewritten program in the current trace."""
        check_none_local(traced.jaxpr)
        args = self._called_with()
        types = (traced.signature[0], *traced.jaxpr.in_avals)
        if args is not None and types not in self._placed:
            self._placed.add(types)  # once: a state that always comes anew stays
            if wanted := self._wanted_places(traced, *args):
                raise Misplaced(wanted)
        shardings = self._shardings(traced)
        mesh = self._mesh(traced, shardings)
        if mesh is not None and jax.process_count() > 1:
            self._agree(traced, mesh)
        passes = self._passes(shardings, mesh, len(lifted))
        results, findings = evaluate_through(passes, traced, lifted, inputs)
        self.findings = (*self._while_traced, *findings)
        self.found, self.lifted = traced.found, tuple(lifted)
        return results

    def _wanted_places(self, traced: Traced, args: tuple, kwargs: dict) -> dict[int, NamedSharding]:
        """By number of the leaf, where it should lie and does not."""
        if jax.process_count() > 1:  # what one process holds is not the whole
            return {}
        leaves = jax.tree.leaves((args, kwargs))
        of_jit = first_places.donated_leaves(self._options, args, kwargs)
        donated = [number for number, place in enumerate(traced.places) if place in of_jit]
        found = first_places.first_places(traced.jaxpr, donated, self.wishes.mesh)
        wanted = {traced.places[number]: target for number, target in found.items()}
        return {
            place: target
            for place, target in wanted.items()
            if first_places.is_anywhere(leaves[place])
        }

    def _agree(self, traced: Traced, mesh: Mesh) -> None:
        """With the other processes, on what runs next; see `mapping.agreements`."""
        moves = agreements.collectives(traced.jaxpr)
        ranks = agreements.processes_of(mesh)
        if self._called_with() is not None:
            found = agreements.with_collectives(_fingerprint(traced), moves)
            name = f"{agreements.described(self.fun)}, rewritten"
            # Without a collective too: what is cut over the mesh may be moved by the compiler.
            agreements.agree_to_run(name, found, ranks)
        elif not self._by_shardings:
            # Traced for something else, maybe in this process alone: a call traces again.
            self._jit = self._new_jit()
            self._renew_dispatch()

    def _called_with(self) -> tuple[tuple, dict] | None:
        """The arguments, if this is traced for a call that will run now."""
        args = self._arguments()
        if args is None or self._asked:
            return None
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        return None if traced else args

    def _arguments(self) -> tuple[tuple, dict] | None:
        """Of the call of this function that is under way, if one is."""
        found = call_under_way()
        return None if found is None or found[0] is not self else found[1:]

    def _passes(
        self, shardings: Sequence[NamedSharding | None], mesh: Mesh | None, lifted: int
    ) -> list[Pass]:
        wishes = self.wishes
        passes = []
        if jax.process_count() == 1:
            passes.append(Pass({"shard_map"}, functools.partial(plan_remesh, mesh=wishes.mesh)))
        if wishes.partitioning == "route":
            whole = None if mesh is None else NamedSharding(mesh, P())
            in_shardings = (*[whole] * lifted, *shardings)
            route = functools.partial(self._route, mesh, in_shardings)
            passes.append(Pass({"custom_partitioning"}, route))
        if wishes.gathers == "reduce":
            passes.append(Pass(GATHERS, plan_gathers))
        if wishes.loops == "roll":  # last: what the others change may stand in the copies
            passes.append(Pass(None, plan_rolling))
        return passes

    def _route(
        self,
        mesh: Mesh | None,
        in_shardings: Sequence[NamedSharding | None],
        jaxpr: ClosedJaxpr,
    ) -> Plan:
        plan = plan_partitioning(
            jaxpr, mesh=mesh, in_shardings=in_shardings, specs=self.wishes.specs
        )
        if plan.evaluate is not None:
            self._follow_shardings()
        return plan

    def _shardings(self, traced: Traced) -> list[NamedSharding | None]:
        """How the dynamic leaves of the call under way lie, where that is known."""
        args = self._arguments()
        if args is None:
            return [None] * len(traced.places)
        leaves = jax.tree.leaves(args)
        return [_named_sharding(leaves[place]) for place in traced.places]

    def _place(self, traced: Traced, value: Any) -> Any:
        """Puts a captured array on every device of the program, once."""
        return _placed(value, self._mesh(traced, self._shardings(traced)))

    def _mesh(self, traced: Traced, shardings: Sequence[NamedSharding | None]) -> Mesh | None:
        """What the program runs on, as far as that is one mesh."""
        found = self.wishes.mesh or mesh_of(traced.jaxpr, shardings)
        # Under grad and vmap arguments do not say how they lie; they did when called before.
        self._mesh_seen = found or self._mesh_seen
        return self._mesh_seen

    def _follow_shardings(self) -> None:
        """From now on, arguments that are cut in another way are another signature.

        To jit they are not: on Auto axes it traces once for all of them. But the specs that a
        custom_partitioning got are those of the call that was traced.
        """
        args = self._arguments()
        if self._by_shardings or args is None:
            return
        self._by_shardings[_shardings_key(*args)] = self._jit
        self.dispatch = self._dispatch_by_shardings

    def _dispatch_by_shardings(self, *args: Any, **kwargs: Any) -> Any:
        self._jit = self._jit_for(args, kwargs)
        return self._jit.dispatch(*args, **kwargs)

    def _jit_for(self, args: tuple, kwargs: dict) -> LiftedJit:
        key = _shardings_key(args, kwargs)
        if key not in self._by_shardings:
            self._by_shardings[key] = self._new_jit()
        return self._by_shardings[key]


def _fingerprint(traced: Traced) -> Fingerprint:
    """Of the whole arrays that go in and come out."""
    tree, *given = traced.signature
    paths = jax.tree.leaves_with_path(jax.tree.unflatten(tree, given))
    leaves = {f"argument {jax.tree_util.keystr(path)}": describe(leaf) for path, leaf in paths}
    for number, aval in enumerate(traced.jaxpr.out_avals):
        leaves[f"result {number}"] = describe(aval)
    return Fingerprint(containers(traced.out_tree), leaves)


def _named_sharding(leaf: Any) -> NamedSharding | None:
    sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _shardings_key(args: tuple, kwargs: dict) -> tuple:
    return tuple(_named_sharding(leaf) for leaf in jax.tree.leaves((args, kwargs)))


def _placed(value: Any, mesh: Mesh | None) -> Any:
    if isinstance(value, jax.Array) and len(value.sharding.device_set) > 1:
        return value  # the user has said where it lies
    if mesh is not None:
        return jax.device_put(value, NamedSharding(mesh, P()))
    # NumPy arrays once, and not in each call; they are not tied to a device then.
    return value if isinstance(value, jax.Array) else jax.device_put(np.asarray(value))
