"""Loops around pmaps, run inside the mapped region: one region, entered and left once.

First which values of a loop are cut over the mapped axis, and which are whole; then the rules for
scan, while and cond; then the loop itself. What these cannot show sound is refused: the loop stays
as it is.

Letters: `n` is the size of the mapped axis. A value is whole where every device has all of it, or
cut along a dimension of size `n * k`, of which each device has one block, `[.., k, ..]`; `k` is 1
for what the user maps, and may be more for what JAX keeps for a gradient.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.mapping import meshes
from jax_dist.mapping.region import mapped_dimension
from jax_dist.passes import interpreter, rebind
from jax_dist.passes.interpreter import Values
from jax_dist.passes.primitive_facts import record_of
from jax_dist.rewriting.pmap_sites import PmapSite

_WHOLE: Final = None
_State: TypeAlias = int | None  # the cut dimension, or WHOLE
_States: TypeAlias = tuple[_State, ...]
_Emit: TypeAlias = Callable[[Values], Values]  # from local values to local results


class LoopRefused(Exception):
    """Why a loop cannot run inside the mapped region."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Region:
    """The mapped region that a loop should run in."""

    axis: str
    size: int

    def cut(self, value: Any, state: _State, wanted: _State) -> Any:
        """A whole value cut along a dimension, on each device; any other stays."""
        if state == wanted:
            return value
        if state is not None or wanted is None:
            raise LoopRefused("a value that is cut over the devices is used as a whole")
        block = value.shape[wanted] // self.size
        start = lax.axis_index(self.axis) * block
        return lax.dynamic_slice_in_dim(value, start, block, axis=wanted)


@dataclasses.dataclass(frozen=True, slots=True)
class _LoopStep:
    """What becomes of an equation: states of its results, and how to compute them."""

    states: _States
    emit: _Emit
    taken: _States  # of the operands, as `emit` wants them


class _LoopWalk:
    """Goes through the body of a loop, equation by equation."""

    def __init__(self, region: _Region):
        self.region = region
        self.wanted: dict[Var, int] = {}  # whole values that a pmap would take cut

    def states(self, jaxpr: Any, states: Sequence[_State]) -> _States:
        """The states of the results of a jaxpr, from those of its inputs."""
        body = interpreter.open_jaxpr(jaxpr)
        known: dict[Any, _State] = dict.fromkeys(body.constvars, _WHOLE)
        known.update(zip(body.invars, states, strict=True))
        for eqn in body.eqns:
            made = self.step(eqn, _of(eqn.invars, known)).states
            known.update(zip(eqn.outvars, made, strict=True))
        return _of(body.outvars, known)

    def evaluate(self, jaxpr: Any, args: Sequence[Any], states: Sequence[_State]) -> Values:
        """The local results of a jaxpr, from its local inputs."""
        body = interpreter.open_jaxpr(jaxpr)
        known: dict[Any, _State] = dict.fromkeys(body.constvars, _WHOLE)
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

    def cut_all(self, values: Values, given: Sequence[_State], wanted: Sequence[_State]) -> Values:
        each = zip(values, given, wanted, strict=True)
        return [self.region.cut(value, state, want) for value, state, want in each]

    def local_body(self, body: Any, states: Sequence[_State], leaving: Sequence[_State]) -> Any:
        """The body on what one device has of its inputs."""
        results, types = self.states(body, states), []
        for var, state in zip(_inputs_of(body), states, strict=True):
            aval: Any = var.aval
            sizes = {} if state is None else {state: aval.shape[state] // self.region.size}
            types.append(rebind.type_of(aval, sizes))

        def evaluate(*args: Any) -> Values:
            return self.cut_all(self.evaluate(body, args, states), results, leaving)

        return interpreter.in_form_of(body, jax.make_jaxpr(evaluate)(*types))

    def step(self, eqn: JaxprEqn, states: _States) -> _LoopStep:
        """Decides on one equation; raises LoopRefused."""
        site = PmapSite.of(eqn)
        if site is not None:
            return self._pmap(eqn, states, site)
        name, record = _compat.name_of(eqn), record_of(eqn)
        if record.call == "inline":
            return self._call(eqn, states)
        if record.kind in ("loop", "branch"):
            rule = {"scan": _scan, "while": _while, "cond": _cond}[name]
            return rule(self, eqn, states)
        if eqn.effects:
            raise LoopRefused(f"'{name}' has an effect, which every device would have")
        again: _Emit = lambda values: rebind.bind_again(eqn, values)
        if all(state is None for state in states):
            return _LoopStep((_WHOLE,) * len(eqn.outvars), again, states)
        if record.elementwise:
            dim = _one(states)
            avals: list[Any] = [atom.aval for atom in eqn.invars]
            taken = tuple(  # a whole operand is cut too, unless a size of 1 is stretched
                dim if state is None and len(aval.shape) > dim and aval.shape[dim] > 1 else state
                for aval, state in zip(avals, states, strict=True)
            )
            return _LoopStep((dim,), again, taken)
        if name == "reduce_sum":
            dim, axes = _one(states), tuple(int(axis) for axis in eqn.params["axes"])
            if dim not in axes:
                return _LoopStep((dim - sum(axis < dim for axis in axes),), again, states)
            # Over the cut dimension, a sum of the block, and then one over the devices.
            emit = lambda values: [lax.psum(value, self.region.axis) for value in again(values)]
            return _LoopStep((_WHOLE,), emit, states)
        raise LoopRefused(f"'{name}' is applied to a value that is cut over the devices")

    def _pmap(self, eqn: JaxprEqn, states: _States, site: Any) -> _LoopStep:
        if site.axis != self.region.axis:
            raise LoopRefused("its pmaps go over several axes")
        taken = tuple(mapped_dimension(spec) for spec in eqn.params["in_specs"])
        for atom, state, want in zip(eqn.invars, states, taken, strict=True):
            if state is None:
                self.want(atom, want)
            elif want != state:
                raise LoopRefused("a pmap takes a value in another way than it is cut")
        results = tuple(mapped_dimension(spec) for spec in eqn.params["out_specs"])
        return _LoopStep(results, lambda values: rebind.evaluate(site.body, values), taken)

    def want(self, atom: Any, dim: _State) -> None:
        """Notes that a pmap would take a whole value cut along a dimension."""
        if dim is not None and isinstance(atom, Var):
            self.wanted.setdefault(atom, dim)

    def want_as(self, inner: "_LoopWalk", body: Any, atoms: Sequence[Any]) -> None:
        """Notes what the body of an equation wants, of the operands that become its inputs."""
        for var, atom in zip(_inputs_of(body), atoms, strict=True):
            self.want(atom, inner.wanted.get(var, _WHOLE))

    def _call(self, eqn: JaxprEqn, states: _States) -> _LoopStep:
        (body,) = interpreter.bodies(eqn)
        inner = _LoopWalk(self.region)
        results = inner.states(body, states)
        self.want_as(inner, body, eqn.invars)
        return _LoopStep(results, lambda values: inner.evaluate(body, values, states), states)


def _of(atoms: Sequence[Any], known: dict[Any, _State]) -> _States:
    return tuple(_WHOLE if isinstance(atom, Literal) else known[atom] for atom in atoms)


def _one(states: Sequence[_State]) -> int:
    """The one dimension along which operands are cut, of which there are some."""
    dims = {state for state in states if state is not None}
    if len(dims) > 1:
        raise LoopRefused("values are combined that are cut along different dimensions")
    return dims.pop()


def _inputs_of(body: Any) -> Sequence[Var]:
    return interpreter.open_jaxpr(body).invars


# --- scan, while and cond on values of which one device has a part: the same, of smaller bodies


def _settled(
    walk: _LoopWalk,
    body: Any,
    states: list[_State],
    carries_in: Sequence[int],
    carries_out: Sequence[int],
) -> tuple[list[_State], _States]:
    """The states of a body's inputs and results, once what is carried is cut as it comes out."""
    while True:
        results = walk.states(body, states)
        changed = False
        for place, result in zip(carries_in, carries_out, strict=True):
            if states[place] is None and results[result] is not None:
                states[place] = results[result]
                changed = True
            elif results[result] not in (_WHOLE, states[place]):
                raise LoopRefused("what is carried is cut in another way after each step")
        if not changed:
            return states, results


def _scan(walk: _LoopWalk, eqn: JaxprEqn, states: _States) -> _LoopStep:
    (body,) = interpreter.bodies(eqn)
    layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
    fixed = {*layout.constants, *layout.carries_in}
    if any(state == 0 for place, state in enumerate(states) if place not in fixed):
        raise LoopRefused("the scan runs along the dimension that is cut over the devices")
    inner = _LoopWalk(walk.region)
    # What is stacked has one dimension more in front, that of the steps; in a step it is gone.
    start = [
        state if place in fixed or state is None else state - 1
        for place, state in enumerate(states)
    ]
    inside, results = _settled(inner, body, start, layout.carries_in, layout.carries_out)
    carried = dict(zip(layout.carries_out, [inside[p] for p in layout.carries_in], strict=True))
    leaving = tuple(carried.get(place, result) for place, result in enumerate(results))
    outside = tuple(_outside(state, is_fixed=place in fixed) for place, state in enumerate(inside))
    for place, (var, atom) in enumerate(zip(_inputs_of(body), eqn.invars, strict=True)):
        walk.want(atom, _outside(inner.wanted.get(var, _WHOLE), is_fixed=place in fixed))

    def emit(values: Values) -> Values:
        new = inner.local_body(body, inside, leaving)
        return interpreter.replay(rebind.without_mesh(eqn, {"jaxpr": new}), values)

    made = tuple(_outside(state, is_fixed=place in carried) for place, state in enumerate(leaving))
    return _LoopStep(made, emit, outside)


def _outside(state: _State, *, is_fixed: bool) -> _State:
    return state if is_fixed or state is None else state + 1


def _while(walk: _LoopWalk, eqn: JaxprEqn, states: _States) -> _LoopStep:
    params = eqn.params
    conds, consts = params["cond_nconsts"], params["body_nconsts"]
    carries = range(consts, len(states) - conds)
    inner = _LoopWalk(walk.region)
    start = list(states[conds:])
    inside, _ = _settled(inner, params["body_jaxpr"], start, carries, range(len(carries)))
    carried = tuple(inside[consts:])
    of_cond = (*states[:conds], *carried)
    if inner.states(params["cond_jaxpr"], of_cond) != (_WHOLE,):
        raise LoopRefused(
            "whether the loop goes on depends on a value that is cut over the devices"
        )

    def emit(values: Values) -> Values:
        bodies = {
            "body_jaxpr": inner.local_body(params["body_jaxpr"], inside, carried),
            "cond_jaxpr": inner.local_body(params["cond_jaxpr"], of_cond, (_WHOLE,)),
        }
        return interpreter.replay(rebind.without_mesh(eqn, bodies), values)

    walk.want_as(inner, params["body_jaxpr"], eqn.invars[conds:])
    return _LoopStep(carried, emit, (*states[:conds], *inside))


def _cond(walk: _LoopWalk, eqn: JaxprEqn, states: _States) -> _LoopStep:
    if states[0] is not None:
        raise LoopRefused("a branch is chosen by a value that is cut over the devices")
    inner = _LoopWalk(walk.region)
    branches = eqn.params["branches"]
    results = [inner.states(branch, states[1:]) for branch in branches]
    leaving = tuple(
        _WHOLE if all(state is None for state in each) else _one(each)
        for each in zip(*results, strict=True)
    )

    def emit(values: Values) -> Values:
        new = tuple(inner.local_body(branch, states[1:], leaving) for branch in branches)
        return interpreter.replay(rebind.without_mesh(eqn, {"branches": new}), values)

    for branch in branches:
        walk.want_as(inner, branch, eqn.invars[1:])
    return _LoopStep(leaving, emit, states)


# --- loops around pmaps, run inside the mapped region: one region, entered and left once


@dataclasses.dataclass(frozen=True, slots=True)
class LoopInside:
    """A loop that runs in the mapped region of its pmaps."""

    mesh: Mesh  # names the axis as the pmaps do
    in_specs: tuple[P, ...]
    out_specs: tuple[P, ...]
    emit: _Emit

    def evaluate(self, values: Values) -> Values:
        """On values of the whole program."""
        with meshes.context_of(self.mesh):
            return jax.shard_map(
                lambda *blocks: self.emit(list(blocks)),
                mesh=self.mesh,
                in_specs=self.in_specs,
                out_specs=list(self.out_specs),
                check_vma=False,
            )(*values)

    @classmethod
    def of(cls, eqn: JaxprEqn, mesh: Mesh, axis: str) -> "LoopInside":
        """Decides how a scan or while runs inside; the mesh names the axis as its pmaps do.

        Raises:
          LoopRefused: it cannot, with the reason.
        """
        region = _Region(axis, mesh.shape[axis])
        first = _LoopWalk(region)
        step = first.step(eqn, (_WHOLE,) * len(eqn.invars))
        if first.wanted:
            # What only pmaps take, and cut, need not be whole on every device before.
            states = tuple(
                first.wanted.get(atom) if isinstance(atom, Var) else _WHOLE for atom in eqn.invars
            )
            step = _LoopWalk(region).step(eqn, states)
        in_specs, out_specs = (
            tuple(P() if state is None else P(*[None] * state, axis) for state in states)
            for states in (step.taken, step.states)
        )
        return cls(mesh, in_specs, out_specs, step.emit)
