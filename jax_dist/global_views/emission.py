"""Runs a plan: shared equations on global arrays, the others in `shard_map`.

Shapes: a shared value is `[*s]`, however it lies; one that varies is `[N, *s]`, cut over the mapped
axis, so that each device has its own `[1, *s]`. The body sees `[*s]` of both.

Loops and branches run in the global view with islands in their bodies. What is carried keeps one
form: a carry that varies once varies from the start, so a shared value goes in as `[N, *s]`. A scan
walks over the first dimension, so what varies comes as `[T, N, *s]`.

A part of the state may also be gathered where it is read, and again where it is read again. A
device then does not keep all whole arrays from the forward to the backward pass; more is sent for
it. With FSDP this is called to reshard after the forward pass. A scan over stacked layers gathers
one layer in each turn.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _compat
from jax_dist.global_views.islands import BodyPlan, Island, Step
from jax_dist.global_views.uniformity import bodies_of_while
from jax_dist.passes import interpreter, rebind
from jax_dist.passes.interpreter import Atom, Handler, Values
from jax_dist.passes.primitive_facts import record_of


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """One of the parts that a value is given in."""

    dim: int  # along which they are cut
    uses: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # numbers of gathers


_Shards: TypeAlias = Mapping[Var, _Shard]
_Handlers: TypeAlias = dict[int, Handler]  # by the identity of the equation


@dataclasses.dataclass(frozen=True, slots=True)
class Emitter:
    """How plans are run: on which mesh, and how exactly."""

    mesh: Mesh
    name: Any  # of the mapped axis, and of its mesh axis
    cuts_state: bool  # whether any shared value may be cut
    regathers: bool  # whether islands gather what is cut where they read it, each time
    reorders: bool  # whether sums may be taken over cut values, in another order
    anew: bool  # whether the equations name a mesh in their types, so that they are bound again
    anew_inside: bool  # whether that is another one than islands have

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values:
        """The results of a body: shared `[*s]`, others `[N, *s]`, as `plan.outs` says."""
        known: dict[Var, Any] = dict(zip(plan.body.invars, [*plan.consts, *args], strict=True))
        values = _Values(self, known)
        for stage in plan.stages:
            for step in stage.outside:
                if step.inner:
                    outs = self._run_entered(plan, step, values)
                else:
                    outs = self._run_outside(step.eqn, values)
                known.update(zip(step.eqn.outvars, outs, strict=True))
            if stage.island is not None:
                made = self._run_island(plan, stage.island, values)
                known.update(zip(stage.island.makes, made, strict=True))
        return [values.plain(atom) for atom in plan.body.outvars]

    # ---- how values lie

    def laid(self, value: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

    def whole(self, value: Any) -> Any:
        """A shared value as every device needs it: gathered, if it is cut."""
        if not self.cuts_state or not jnp.ndim(value):
            return value
        return self.laid(value, P())

    def for_each_device(self, value: Any) -> Any:
        """`[*s] -> [N, *s]`: each device its own copy."""
        value, size = self.whole(value), self.mesh.shape[self.name]
        return self.laid(jnp.broadcast_to(value, (size, *jnp.shape(value))), P(self.name))

    # ---- outside

    def _run_entered(self, plan: BodyPlan, step: Step, values: "_Values") -> Values:
        eqn, whole = step.eqn, _reads_whole(step)
        operands = [
            values.whole(atom) if isinstance(atom, Var) and place in whole else values.plain(atom)
            for place, atom in enumerate(eqn.invars)
        ]
        rule = {"scan": _scan, "while": _while, "cond": _cond}[_compat.name_of(eqn)]
        with interpreter.located(eqn, anew=True):
            return rule(_Forms(self, plan, eqn), step, operands)

    def _run_outside(self, eqn: JaxprEqn, values: "_Values") -> Values:
        is_whole = self.cuts_state and self._needs_whole(eqn)
        operands = list(dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)))
        given = [(values.whole if is_whole else values.plain)(var) for var in operands]
        stretch = _stretch([eqn], operands, eqn.outvars)
        if self.anew:
            outs = rebind.evaluate(stretch, given, _without_constraint)
        else:
            outs = eval_jaxpr(stretch, (), *given)
        # Or a body in it would be cut, as its reader wants the result.
        return [self.whole(out) for out in outs] if is_whole else outs

    def _needs_whole(self, eqn: JaxprEqn) -> bool:
        """Whether an equation would give other bits on cut operands."""
        record = record_of(eqn)
        # A maximum of cut values loses a NaN in one of the parts, in XLA on CPU.
        if record.elementwise or record.moves:
            return False
        if self.reorders and record.sums and not record.ordered:
            return False
        bodies = interpreter.bodies(eqn)
        if bodies and record.call in ("inline", "ruled"):
            inside = [inner for body in bodies for inner in interpreter.open_jaxpr(body).eqns]
            return any(map(self._needs_whole, inside))
        return True

    # ---- islands

    def _run_island(self, plan: BodyPlan, island: Island, values: "_Values") -> Values:
        is_shared = plan.is_shared
        parts = island.parts if self.regathers else {}
        body = _stretch(island.eqns, island.reads, island.makes)
        scattered = [eqn for eqn in body.eqns if any(v in island.scatters for v in eqn.outvars)]

        def summed(eqn: JaxprEqn, operands: Values) -> Values:
            """A psum, of which some results are wanted cut."""
            dims = map(island.scatters.get, eqn.outvars)
            return [
                lax.psum(value, self.name)
                if dim is None
                else lax.psum_scatter(value, self.name, scatter_dimension=dim, tiled=True)
                for value, dim in zip(operands, dims, strict=True)
            ]

        def on_device(*blocks: Any) -> Values:
            slices = [
                block if is_shared(var) else lax.squeeze(block, [0])
                for var, block in zip(island.reads, blocks, strict=True)
            ]
            handlers = self._gathering(body, {var: _Shard(dim) for var, dim in parts.items()})
            handlers.update((id(eqn), summed) for eqn in scattered)
            outs = self._run_inside(body, slices, handlers)
            return [
                out if is_shared(var) else lax.expand_dims(out, [0])
                for var, out in zip(island.makes, outs, strict=True)
            ]

        def spec(var: Var, dim: int | None) -> P:
            if not is_shared(var):
                return P(self.name)
            return P() if dim is None else P(*[None] * dim, self.name)

        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(spec(var, parts.get(var)) for var in island.reads),
            out_specs=[spec(var, island.scatters.get(var)) for var in island.makes],
            # As in pmap: with types, a gradient by what is shared would be summed twice.
            check_vma=False,
        )
        is_whole = lambda var: is_shared(var) and var not in parts
        return mapped(*[(values.whole if is_whole(v) else values.plain)(v) for v in island.reads])

    def _run_inside(self, jaxpr: Any, values: Sequence[Any], handlers: _Handlers) -> Values:
        """A body, with some equations handled otherwise."""
        if self.anew_inside:
            of_eqn = lambda eqn: handlers.get(id(eqn)) or _without_constraint(eqn)
            return rebind.evaluate(jaxpr, values, of_eqn)
        eqns = enumerate(interpreter.open_jaxpr(jaxpr).eqns)
        at = {place: handlers[id(eqn)] for place, eqn in eqns if id(eqn) in handlers}
        return interpreter.run(jaxpr, values, at, anew=True)

    # ---- what islands gather

    def _gathering(self, body: Jaxpr, parts: _Shards) -> _Handlers:
        """What to do with the equations that read parts, of which none is a result of the body."""
        handlers: _Handlers = {}
        for eqn in body.eqns:
            read = {
                n: parts[a] for n, a in enumerate(eqn.invars) if isinstance(a, Var) and a in parts
            }
            if read:
                handlers[id(eqn)] = functools.partial(self._run_gathering, read)
        return handlers

    def _run_gathering(self, read: Mapping[int, _Shard], eqn: JaxprEqn, values: Values) -> Values:
        """An equation that reads parts at these places."""
        inside = _parts_inside(eqn, read)
        whole = self._with_whole(eqn, values, read, [n for n in read if n not in inside])
        if not inside:
            return (rebind.bind_again if self.anew_inside else interpreter.replay)(eqn, whole)
        (jaxpr,) = interpreter.bodies(eqn)
        body = interpreter.open_jaxpr(jaxpr)
        parts = {body.invars[place]: part for place, part in inside.items()}
        run = lambda args: self._run_inside(jaxpr, args, self._gathering(body, parts))
        if _compat.name_of(eqn) != "scan":
            # Evaluated in its place, a checkpoint keeps what it is for: a computation of its own.
            is_checkpoint = record_of(eqn).call == "checkpoint"
            return run(lax.optimization_barrier(whole) if is_checkpoint else whole)
        layout = _compat.scan_layout(eqn.params, len(whole), len(eqn.outvars))
        first, carried = len(layout.constants), len(layout.carries_in)

        def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
            outs = run([*whole[:first], *carry, *xs])
            return outs[:carried], outs[carried:]

        return _scanned(turn, eqn, whole[first : first + carried], whole[first + carried :])

    def _with_whole(
        self, eqn: JaxprEqn, values: Values, read: Mapping[int, _Shard], places: Sequence[int]
    ) -> Values:
        """The operands, those in these places gathered, but not before the others are there."""
        values = list(values)
        others = [n for n, atom in enumerate(eqn.invars) if isinstance(atom, Var) and n not in read]
        tied = [*places, *others] if places else []
        barred = lax.optimization_barrier(tuple(values[n] for n in tied))
        for n, value in zip(tied, barred, strict=True):
            if n in read:
                # XLA on CPU drops barriers before it looks for equal instructions for the last
                # time, so two gathers of one value differ: each has one more dimension of length 1.
                more = tuple(range(next(read[n].uses)))
                value = jnp.expand_dims(value, more)
                axis = read[n].dim + len(more)
                value = lax.all_gather(value, self.name, axis=axis, tiled=True)
                value = jnp.squeeze(value, more)
            values[n] = value
        return values


@dataclasses.dataclass(frozen=True, slots=True)
class _Values:
    """What is known while a body runs; what is gathered once is kept."""

    emitter: Emitter
    known: dict[Var, Any]
    gathered: dict[Var, Any] = dataclasses.field(default_factory=dict)

    def plain(self, atom: Atom) -> Any:
        if isinstance(atom, Literal):
            (value,) = rebind.untied_literals([atom], [atom.val])
            return value
        return self.known[atom]

    def whole(self, var: Var) -> Any:
        if var not in self.gathered:
            self.gathered[var] = self.emitter.whole(self.known[var])
        return self.gathered[var]


def _stretch(eqns: Sequence[JaxprEqn], reads: Sequence[Var], makes: Sequence[Var]) -> Jaxpr:
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    return Jaxpr((), list(reads), list(makes), eqns, effects, interpreter.unnamed())


def _without_constraint(eqn: JaxprEqn) -> Any:
    return (lambda _, values: values) if _compat.name_of(eqn) == "sharding_constraint" else None


def _scanned(turn: Callable, eqn: JaxprEqn, start: Values, walked: Values) -> Values:
    kept = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(turn, start, walked, **kept)
    return [*carry, *ys]


def _parts_inside(eqn: JaxprEqn, read: Mapping[int, _Shard]) -> dict[int, _Shard]:
    """The operands that the body of an equation takes in parts.

    Those of a call; and of a scan what it walks over, unless along the dimension that is cut. What
    all its turns read is gathered once, before it.
    """
    if record_of(eqn).call in ("inline", "checkpoint"):
        found = dict(read)
    elif _compat.name_of(eqn) == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        first = len(layout.constants) + len(layout.carries_in)
        found = {n: _Shard(part.dim - 1) for n, part in read.items() if n >= first and part.dim}
    else:
        return {}
    body = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
    results = {atom for atom in body.outvars if isinstance(atom, Var)}
    return {place: part for place, part in found.items() if body.invars[place] not in results}


# ---- loops and branches


class _Forms:
    """The forms of the operands and of the results of a loop or a branch."""

    def __init__(self, runs: Emitter, plan: BodyPlan, eqn: JaxprEqn):
        self.runs = runs
        self.ins = [plan.is_shared(atom) for atom in eqn.invars]
        self.outs = [plan.is_shared(var) for var in eqn.outvars]
        self.cuts = [plan.cuts.get(var) for var in eqn.outvars]

    def given(self, values: Sequence[Any], wanted: Sequence[bool], first: int = 0) -> Values:
        """Operands from `first` on, in the form in which a body takes them."""
        return self._changed(values, self.ins[first : first + len(values)], wanted)

    def run(self, inner: BodyPlan, args: Sequence[Any]) -> Values:
        """What a body gives, as results."""
        outs = self.runs.run(inner, args)
        return self.carried(self._changed(outs, inner.outs, self.outs[: len(outs)]))

    def carried(self, values: Sequence[Any]) -> Values:
        """Values that lie as the first results are wanted."""
        laid = zip(values, self.cuts[: len(values)], strict=True)
        return [x if spec is None else self.runs.laid(x, spec) for x, spec in laid]

    def _changed(
        self, values: Sequence[Any], had: Sequence[bool], wanted: Sequence[bool]
    ) -> Values:
        forms = zip(values, had, wanted, strict=True)
        return [x if was == will else self.runs.for_each_device(x) for x, was, will in forms]


def _scan(forms: _Forms, step: Step, values: Values) -> Values:
    (inner,) = step.inner
    layout = _compat.scan_layout(step.eqn.params, len(values), len(step.eqn.outvars))
    constants, carried = len(layout.constants), len(layout.carries_in)
    values = forms.given(values, inner.ins)
    fixed, start = values[:constants], values[constants : constants + carried]
    of_turns = zip(values[constants + carried :], inner.ins[constants + carried :], strict=True)
    walked = [x if is_shared else jnp.moveaxis(x, 1, 0) for x, is_shared in of_turns]

    def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = forms.run(inner, [*fixed, *carry, *xs])
        return outs[:carried], outs[carried:]

    outs = _scanned(turn, step.eqn, forms.carried(start), walked)
    of_turns = zip(outs[carried:], forms.outs[carried:], strict=True)
    ys = [y if is_shared else jnp.moveaxis(y, 0, 1) for y, is_shared in of_turns]
    return [*outs[:carried], *ys]


def _while(forms: _Forms, step: Step, values: Values) -> Values:
    params = step.eqn.params
    plans = dict(zip(bodies_of_while(step.eqn), step.inner, strict=True))
    condition, body = plans["cond_jaxpr"], plans["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition = forms.given(values[:first], condition.ins[:first])
    of_body = forms.given(values[first:second], body.ins[: second - first], first)
    start = forms.given(values[second:], body.ins[second - first :], second)
    return lax.while_loop(
        lambda carry: forms.runs.run(condition, [*of_condition, *carry])[0],
        lambda carry: forms.run(body, [*of_body, *carry]),
        forms.carried(start),
    )


def _cond(forms: _Forms, step: Step, values: Values) -> Values:
    index, *operands = values
    branches = [lambda *args, plan=plan: forms.run(plan, args) for plan in step.inner]
    return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)


def _reads_whole(step: Step) -> set[int]:
    """The operands that islands in the bodies read, and that do not change from turn to turn.

    They are gathered before the loop, if they are cut, and not in each turn.
    """
    eqn = step.eqn
    if _compat.name_of(eqn) == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        offsets = [list(layout.constants)]
    elif _compat.name_of(eqn) == "while":
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of = {"cond_jaxpr": range(first), "body_jaxpr": range(first, first + second)}
        offsets = [list(of[name]) for name in bodies_of_while(eqn)]
    else:
        return set()
    found = set()
    for inner, places in zip(step.inner, offsets, strict=True):
        islands = [stage.island for stage in inner.stages if stage.island is not None]
        read = {var for island in islands for var in island.reads}
        inputs = inner.body.invars[len(inner.consts) :]
        found.update(place for var, place in zip(inputs, places, strict=False) if var in read)
    return found
