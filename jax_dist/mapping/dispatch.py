"""The call-time side of pmap: one jit, and what to do when it meets something new.

In the steady state a call is one C++ dispatch. Whatever else is wanted (arguments that belong
elsewhere, an array that jit refuses) comes back as an exception, which costs nothing until it is
raised, and is settled in Python.
"""

import collections
import dataclasses
from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from jax_dist.mapping import axes, placement, refusals
from jax_dist.mapping.attempts import Attempt, Misplaced, Replan, call_under_way, current
from jax_dist.mapping.calls import Call, Options, any_tracer, bind
from jax_dist.mapping.meshes import InnerAxis, Layout, lay_out
from jax_dist.mapping.process_calls import ProcessCalls
from jax_dist.mapping.programs import program_of
from jax_dist.mapping.region import run_mapped
from jax_dist.passes.lifting import NewCaptures

_PLACED_IN_VAIN = 10  # calls after which a donated argument that comes anew is left as given


class Dispatcher:
    """All that the decorated versions of one function with the same options share.

    Attributes:
      jitted: the program, which moves no arguments.
      dispatch: what a call goes through; one C++ call in the steady state.
    """

    def __init__(self, options: Options, fun: Callable[[], Callable]):
        """`fun` gives the function: held weakly, where this is cached on its account."""
        self._options = options
        self._fun = fun
        self._program = program_of(options, fun, self._trace, self._look)
        self.jitted: Any = self._program.call
        self._inner: tuple[InnerAxis, ...] = ()  # as the last trace found them
        self._not_fed_back: set[int | str] = set()
        self._times_placed: collections.Counter[int | str] = collections.Counter()
        self._to_place: frozenset[int | str] = frozenset()  # arguments that came misplaced
        self._twins = placement.Twins()
        self._processes: ProcessCalls | None = None
        self.dispatch: Callable = self._first_call

    def settle(self, args: tuple, kwargs: dict, refusal: ValueError | None) -> Any:
        """Makes a call that jit did not: for misplaced arguments, or what `refusal` says."""
        if refusal is not None:
            self._explain(args, kwargs, refusal)
        if self._processes is not None:
            output = self._processes.settle(args, kwargs)
            self.dispatch = self._processes.dispatch  # may have changed
            return output
        return self._place_and_call(args, kwargs)

    def lift(self, found: NewCaptures, args: tuple, kwargs: dict) -> Any:
        """Makes a call that jit did not, for its trace found captured arrays."""
        output = self._program.settle(found, args, kwargs)
        self._renew_dispatch()
        return output

    def _renew_dispatch(self) -> None:
        """Once arrays were lifted, the program is another jit object."""
        if self._processes is None and not self._to_place:
            self.dispatch = self._program.dispatch

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments; with several processes, that on whole arrays."""
        self._choose()
        if self._processes is not None:
            args, kwargs = self._processes.abstract(args, kwargs)
        with Attempt():
            return self._program.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The jaxpr as a caller sees it (`jax.make_jaxpr` asks for it): on the same arguments."""
        self._choose()
        program: Any = self._program
        if self._processes is not None and self._options.arrays == "local":
            program = self._processes.jitted_view
        with Attempt():
            return program.trace(*args, **kwargs)

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        self._choose()
        return self.dispatch(*args, **kwargs)

    def _choose(self) -> None:
        """Chooses the way of calling. Not before it is needed: it starts the backend."""
        if self.dispatch != self._first_call:
            return
        if self._options.choice.spans_processes():
            self._processes = ProcessCalls(
                self._options, self._fun, self.jitted, owner=self, inner=lambda: self._inner
            )
            self.dispatch = self._processes.dispatch
        else:
            self.dispatch = self._program.dispatch

    def _trace(self, args: tuple, kwargs: dict) -> Any:
        """What jit traces."""
        attempt = current()
        if attempt is None and self._wants_to_place():
            raise Misplaced
        call = bind(self._options, self._fun(), args, kwargs)
        output, layout = run_mapped(self._options, call, whole=True)
        if attempt is not None and attempt.owner is self and layout is not None:
            attempt.traced = True
            self._check_placement(attempt, call, layout, output)
        if self._processes is not None and layout is not None:
            self._processes.agreements.traced(args, kwargs, call, output, layout)
        return output

    def _look(self, jaxpr: ClosedJaxpr) -> None:
        """At what the trace gave: with several processes, all of them should be here with it."""
        if self._processes is None:
            return
        attempt, found = current(), call_under_way()
        if attempt is not None:
            called = attempt.owner is self
        else:
            called = found is not None and found[0] is self and not _has_tracer(*found[1:])
        self._processes.agreements.look(jaxpr, called=called)
        self.dispatch = self._processes.renewed_dispatch()

    def _wants_to_place(self) -> bool:
        """Whether the call under way has arguments that belong elsewhere."""
        found = call_under_way()
        if found is None or found[0] is not self or _has_tracer(*found[1:]):
            return False
        if self._processes is not None:
            return self._processes.wants_to_convert(*found[1:])
        return bool(self._errands(*found[1:], everything=True)[1])

    def look_again(self, args: tuple, kwargs: dict) -> None:
        """After a compile for these arguments: misplaced ones will be moved from now on.

        An array that lies on the right mesh, but is cut in another way, has the type of a right
        one: jit does not trace, compiles for it, and would reshard it in each call.
        """
        if self._processes is not None or _has_tracer(args, kwargs):
            return
        try:
            call, errands = self._errands(args, kwargs, everything=True)
        except ValueError:  # the call itself will say what is wrong
            return
        self._take_care_of({call.owners[index] for index, _, donated in errands if not donated})

    def _take_care_of(self, owners: Set[int | str]) -> None:
        if not owners <= self._to_place:
            self._to_place |= owners
            self.dispatch = self._dispatch_with_care

    def _check_placement(self, attempt: Attempt, call: Call, layout: Layout, output: Any) -> None:
        """Raises Replan if the trace shows that arguments were placed wrongly.

        Placing what is donated before the first call gives it the type that it has when it is fed
        back; a training loop then compiles once, not twice. A donated batch is not fed back.
        """
        names, sizes = layout.mesh.axis_names[1:], layout.mesh.devices.shape[1:]
        self._inner = tuple(InnerAxis(*axis) for axis in zip(names, sizes, strict=True))
        returned = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(output)}
        kept = {
            owner
            for leaf, owner in zip(call.leaves, call.owners, strict=True)
            if owner in attempt.donated and (leaf.shape, leaf.dtype) not in returned
        }
        self._not_fed_back |= kept
        if kept or (self._inner != attempt.inner and attempt.placed):
            raise Replan

    def _place_and_call(self, args: tuple, kwargs: dict) -> Any:
        while True:
            plan = self._plan(args, kwargs, everything=True)
            if _has_tracer(plan.args, plan.kwargs):  # a call on constants, inside a trace
                with Attempt():
                    return self.jitted(*args, **kwargs)
            attempt = Attempt(
                owner=self,
                inner=self._inner,
                placed=bool(plan.donated or plan.moved),
                donated=plan.donated,
            )
            try:
                with attempt:
                    output = self.jitted(*plan.args, **plan.kwargs)
            except Replan:
                continue
            break
        placement.finish_donation(plan.pairs)  # only now: a call that fails takes nothing
        self._times_placed.update(plan.donated)
        vain = {owner for owner, times in self._times_placed.items() if times >= _PLACED_IN_VAIN}
        if vain - self._not_fed_back:
            self._not_fed_back |= vain
            self._program.clear_cache()  # that signature has failed before: see attempts
        self._renew_dispatch()
        self._take_care_of(plan.moved)
        return output

    def _dispatch_with_care(self, *args: Any, **kwargs: Any) -> Any:
        """For a function whose user passes misplaced arrays: looks at those arguments first."""
        if _has_tracer(args, kwargs):
            return self.jitted(*args, **kwargs)
        plan = self._plan(args, kwargs, everything=False)
        try:
            with Attempt(self, self._inner, placed=True):
                return self.jitted(*plan.args, **plan.kwargs)
        except Replan:
            return self._place_and_call(args, kwargs)

    def _plan(self, args: tuple, kwargs: dict, *, everything: bool) -> "_Plan":
        """The call with its arguments in place."""
        call, errands = self._errands(args, kwargs, everything=everything)
        leaves, pairs, donated, moved = list(call.leaves), [], set(), set()
        for index, target, is_donated in errands:
            leaf, owner = leaves[index], call.owners[index]
            if is_donated:
                leaves[index] = jax.device_put(leaf, target)
                pairs.append((leaf, leaves[index]))
                donated.add(owner)
            else:
                leaves[index] = self._twins.move(leaf, target)
                moved.add(owner)
        new_args, new_kwargs = call.rebuild(leaves)
        return _Plan(new_args, new_kwargs, pairs, frozenset(donated), frozenset(moved))

    def _errands(
        self, args: tuple, kwargs: dict, *, everything: bool
    ) -> tuple[Call, list[tuple[int, NamedSharding, bool]]]:
        """The leaves to move, where to, and whether that is for donation.

        Misplaced ones are moved; donated ones are always put on the mesh. With `everything` false,
        only those arguments are looked at that came misplaced before.
        """
        options = self._options
        call = bind(options, self._fun(), args, kwargs)
        layout = lay_out(options.choice, call.size, self._inner, whole=True)
        errands = []
        each = enumerate(zip(call.leaves, call.axes, call.owners, strict=True))
        for index, (leaf, axis, owner) in each:
            if not placement.can_be_put(leaf) or not (everything or owner in self._to_place):
                continue
            spec = axes.spec_of_axis(axis, jnp.ndim(leaf), layout.name)
            target = NamedSharding(layout.mesh, spec)
            if everything and owner in options.donated and owner not in self._not_fed_back:
                if not placement.is_on_mesh(leaf, target):
                    errands.append((index, target, True))
            elif placement.is_misplaced(leaf, target):
                errands.append((index, target, False))
        return call, errands

    def _explain(self, args: tuple, kwargs: dict, refusal: ValueError) -> None:
        """Raises `refusal`, or a better error, unless misplaced arguments explain it."""
        options = self._options
        name = options.choice.fun_name
        if options.static and options.static[-1] >= len(args):
            raise refusals.static_argument_missing(name, options.static, len(args)) from None
        for number in options.static:
            try:
                hash(args[number])
            except TypeError:
                path = axes.argument_name(self._fun(), number)
                raise refusals.static_argument_unhashable(name, path, args[number]) from None
        is_traced = _has_tracer(args, kwargs)
        if self._processes is not None and is_traced and "incompatible devices" in str(refusal):
            raise refusals.local_array_under_trace(name) from None
        if self._processes is not None or is_traced:
            raise refusal
        try:
            _, errands = self._errands(args, kwargs, everything=True)
        except ValueError:
            raise refusal from None
        if not errands:
            raise refusal


@dataclasses.dataclass
class _Plan:
    """A call with its arguments in place."""

    args: tuple
    kwargs: dict
    pairs: list[tuple[Any, jax.Array]]  # (given, placed) leaves of donated arguments
    donated: frozenset[int | str]  # arguments they belong to
    moved: frozenset[int | str]  # arguments with misplaced arrays


def _after_event(event: str, duration_secs: float, **details: object) -> None:
    """Hears all that JAX measures."""
    del duration_secs, details
    found = call_under_way() if event == "/jax/core/compile/backend_compile_duration" else None
    if found is not None:
        dispatcher, args, kwargs = found
        dispatcher.look_again(args, kwargs)


jax.monitoring.register_event_duration_secs_listener(_after_event)


def _has_tracer(args: tuple, kwargs: dict) -> bool:
    return any_tracer(jax.tree.leaves((args, kwargs)))
