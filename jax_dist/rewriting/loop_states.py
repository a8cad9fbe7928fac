"""Which values of a loop around pmaps are cut over the mapped axis, and which are whole.

Letters: `n` is the size of the mapped axis. A value is whole where every device has all of it, or
cut along a dimension of size `n * k`, of which each device has one block, `[.., k, ..]`; `k` is 1
for what the user maps, and may be more for what JAX keeps for a gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var

from jax_dist.passes import interpreter, rebind
from jax_dist.passes.interpreter import Values
from jax_dist.passes.primitives import ELEMENTWISE, INLINED
from jax_dist.rewriting.pmap_sites import mapped_dimension, pmap_site

WHOLE: Final = None
State: TypeAlias = int | None  # the cut dimension, or WHOLE
States: TypeAlias = tuple[State, ...]
Emit: TypeAlias = Callable[[Values], Values]  # from local values to local results


class Refused(Exception):
    """Why a loop cannot run inside the mapped region."""


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """The mapped region that a loop should run in."""

    axis: str
    size: int

    def cut(self, value: Any, state: State, wanted: State) -> Any:
        """A whole value cut along a dimension, on each device; any other stays."""
        if state == wanted:
            return value
        if state is not None or wanted is None:
            raise Refused("a value that is cut over the devices is used as a whole")
        block = value.shape[wanted] // self.size
        start = lax.axis_index(self.axis) * block
        return lax.dynamic_slice_in_dim(value, start, block, axis=wanted)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What becomes of an equation: states of its results, and how to compute them."""

    states: States
    emit: Emit
    taken: States  # of the operands, as `emit` wants them


LOOPS: dict[str, Callable[["Walk", JaxprEqn, States], Step]] = {}  # by primitive


def loop(primitive: str) -> Callable[[Callable], Callable]:
    """Registers the rule for a loop inside the one that is moved."""

    def register(rule: Callable) -> Callable:
        LOOPS[primitive] = rule
        return rule

    return register


class Walk:
    """Goes through the body of a loop, equation by equation."""

    def __init__(self, region: Region):
        self.region = region
        self.wanted: dict[Var, int] = {}  # whole values that a pmap would take cut

    def states(self, jaxpr: Any, states: Sequence[State]) -> States:
        """The states of the results of a jaxpr, from those of its inputs."""
        body = interpreter.open_jaxpr(jaxpr)
        known: dict[Any, State] = dict.fromkeys(body.constvars, WHOLE)
        known.update(zip(body.invars, states, strict=True))
        for eqn in body.eqns:
            known.update(
                zip(eqn.outvars, self.step(eqn, _of(eqn.invars, known)).states, strict=True)
            )
        return _of(body.outvars, known)

    def evaluate(self, jaxpr: Any, args: Sequence[Any], states: Sequence[State]) -> Values:
        """The local results of a jaxpr, from its local inputs."""
        body = interpreter.open_jaxpr(jaxpr)
        known: dict[Any, State] = dict.fromkeys(body.constvars, WHOLE)
        known.update(zip(body.invars, states, strict=True))

        def handle(eqn: JaxprEqn, values: Values) -> Values:
            given = _of(eqn.invars, known)
            step = self.step(eqn, given)
            known.update(zip(eqn.outvars, step.states, strict=True))
            values = rebind.untied_literals(eqn.invars, values)
            return step.emit(self.cut_all(values, given, step.taken))

        handlers = dict.fromkeys(range(len(body.eqns)), handle)
        results = interpreter.run(jaxpr, args, handlers, anew=True)
        return rebind.untied_literals(body.outvars, results)

    def cut_all(self, values: Values, given: Sequence[State], wanted: Sequence[State]) -> Values:
        each = zip(values, given, wanted, strict=True)
        return [self.region.cut(value, state, want) for value, state, want in each]

    def step(self, eqn: JaxprEqn, states: States) -> Step:
        """Decides on one equation; raises Refused."""
        site = pmap_site(eqn)
        if site is not None:
            return self._pmap(eqn, states, site)
        name = eqn.primitive.name
        if name in INLINED:
            return self._call(eqn, states)
        if name in LOOPS:
            return LOOPS[name](self, eqn, states)
        if eqn.effects:
            raise Refused(f"'{name}' has an effect, which every device would have")
        if all(state is None for state in states):
            return Step(
                (WHOLE,) * len(eqn.outvars), lambda values: rebind.bind_again(eqn, values), states
            )
        if name in ELEMENTWISE:
            return self._elementwise(eqn, states)
        if name == "reduce_sum":
            return self._sum(eqn, states)
        raise Refused(f"'{name}' is applied to a value that is cut over the devices")

    def _pmap(self, eqn: JaxprEqn, states: States, site: Any) -> Step:
        if site.axis != self.region.axis:
            raise Refused("its pmaps go over several axes")
        taken = tuple(mapped_dimension(spec) for spec in eqn.params["in_specs"])
        for atom, state, want in zip(eqn.invars, states, taken, strict=True):
            if state is None:
                self.want(atom, want)
            elif want != state:
                raise Refused("a pmap takes a value in another way than it is cut")
        results = tuple(mapped_dimension(spec) for spec in eqn.params["out_specs"])
        return Step(results, lambda values: rebind.evaluate(site.body, values), taken)

    def want(self, atom: Any, dim: State) -> None:
        """Notes that a pmap would take a whole value cut along a dimension."""
        if dim is not None and isinstance(atom, Var):
            self.wanted.setdefault(atom, dim)

    def want_as(self, inner: "Walk", body: Any, atoms: Sequence[Any]) -> None:
        """Notes what the body of an equation wants, of the operands that become its inputs."""
        for var, atom in zip(inputs_of(body), atoms, strict=True):
            self.want(atom, inner.wanted.get(var, WHOLE))

    def _call(self, eqn: JaxprEqn, states: States) -> Step:
        (body,) = interpreter.bodies(eqn)
        inner = Walk(self.region)
        results = inner.states(body, states)
        self.want_as(inner, body, eqn.invars)
        return Step(results, lambda values: inner.evaluate(body, values, states), states)

    def _elementwise(self, eqn: JaxprEqn, states: States) -> Step:
        dim = one(states)
        taken = tuple(
            dim if state is None and _spans(atom, dim) else state
            for atom, state in zip(eqn.invars, states, strict=True)
        )
        return Step((dim,), lambda values: rebind.bind_again(eqn, values), taken)

    def _sum(self, eqn: JaxprEqn, states: States) -> Step:
        """Over the cut dimension, a sum of the block, and then one over the devices."""
        dim = one(states)
        axes = tuple(int(axis) for axis in eqn.params["axes"])
        if dim not in axes:
            left = dim - sum(axis < dim for axis in axes)
            return Step((left,), lambda values: rebind.bind_again(eqn, values), states)

        def emit(values: Values) -> Values:
            return [lax.psum(value, self.region.axis) for value in rebind.bind_again(eqn, values)]

        return Step((WHOLE,), emit, states)


def _of(atoms: Sequence[Any], known: dict[Any, State]) -> States:
    return tuple(WHOLE if isinstance(atom, Literal) else known[atom] for atom in atoms)


def one(states: Sequence[State]) -> int:
    """The one dimension along which operands are cut, of which there are some."""
    dims = {state for state in states if state is not None}
    if len(dims) > 1:
        raise Refused("values are combined that are cut along different dimensions")
    return dims.pop()


def _spans(atom: Any, dim: int) -> bool:
    """Whether it has a dimension that is cut in the other operands; a size of 1 is stretched."""
    shape = atom.aval.shape
    return len(shape) > dim and shape[dim] > 1


def inputs_of(body: Any) -> Sequence[Var]:
    return interpreter.open_jaxpr(body).invars
