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
from jax_dist.passes.interpreter import ELEMENTWISE, INLINED, Handler, Values


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Shard:
    """One of the parts that a value is given in."""

    dim: int  # along which they are cut
    uses: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # numbers of gathers


_Shards: TypeAlias = Mapping[Var, _Shard]
_Handlers: TypeAlias = dict[int, Handler]  # by the identity of the equation

_CHECKPOINTS = ("checkpoint", "remat2")


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

    @property
    def size(self) -> int:
        return self.mesh.shape[self.name]

    def run(self, plan: BodyPlan, args: Sequence[Any]) -> Values:
        """The results of a body: shared `[*s]`, others `[N, *s]`, as `plan.outs` says."""
        known: dict[Var, Any] = dict(zip(plan.body.invars, [*plan.consts, *args], strict=True))
        values = _Values(self, known)
        for stage in plan.stages:
            for step in stage.outside:
                self._run_outside(plan, step, values)
            if stage.island is not None:
                made = self._run_island(plan, stage.island, values)
                known.update(zip(stage.island.makes, made, strict=True))
        return [self._literal(a) if isinstance(a, Literal) else known[a] for a in plan.body.outvars]

    # ---- how values lie

    def laid(self, value: Any, spec: P) -> Any:
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

    def whole(self, value: Any) -> Any:
        """A shared value as every device needs it: gathered, if it is cut."""
        if not self.cuts_state or not jnp.ndim(value):
            return value
        return self.laid(value, P())

    def as_varying(self, value: Any, *, is_shared: bool) -> Any:
        """`[*s] -> [N, *s]`: each device its own copy."""
        if not is_shared:
            return value
        value = self.whole(value)
        return self.laid(jnp.broadcast_to(value, (self.size, *jnp.shape(value))), P(self.name))

    def _literal(self, literal: Literal) -> Any:
        (value,) = rebind.untied_literals([literal], [literal.val])
        return value

    # ---- outside

    def _run_outside(self, plan: BodyPlan, step: Step, values: "_Values") -> None:
        eqn = step.eqn
        if step.inner:
            whole = _reads_whole(step)
            operands = [
                self._literal(atom)
                if isinstance(atom, Literal)
                else (values.whole if place in whole else values.plain)(atom)
                for place, atom in enumerate(eqn.invars)
            ]
            with interpreter.located(eqn, anew=True):
                rule = {"scan": _scan, "while": _while, "cond": _cond}[eqn.primitive.name]
                outs = rule(_Forms(self, plan, eqn), step, operands)
        else:
            is_whole = self.cuts_state and self._needs_whole(eqn)
            read = values.whole if is_whole else values.plain
            operands = list(dict.fromkeys(a for a in eqn.invars if isinstance(a, Var)))
            given = [read(var) for var in operands]
            stretch = _stretch([eqn], operands, eqn.outvars)
            if self.anew:
                outs = rebind.evaluate(stretch, given, _without_constraint)
            else:
                outs = eval_jaxpr(stretch, (), *given)
            if is_whole:  # or a body in it would be cut, as its reader wants the result
                outs = [self.whole(out) for out in outs]
        values.known.update(zip(eqn.outvars, outs, strict=True))

    def _needs_whole(self, eqn: JaxprEqn) -> bool:
        """Whether an equation would give other bits on cut operands."""
        name = eqn.primitive.name
        if name in ELEMENTWISE or name in _MOVES or (self.reorders and name in _SUMS):
            return False
        bodies = interpreter.bodies(eqn)
        if bodies and name in _CONTAINERS:
            inside = [inner for body in bodies for inner in interpreter.open_jaxpr(body).eqns]
            return any(map(self._needs_whole, inside))
        return True

    # ---- islands

    def _run_island(self, plan: BodyPlan, island: Island, values: "_Values") -> Values:
        is_shared = plan.is_shared
        parts = island.parts if self.regathers else {}

        def on_device(*blocks: Any) -> Values:
            slices = [
                block if is_shared(var) else lax.squeeze(block, [0])
                for var, block in zip(island.reads, blocks, strict=True)
            ]
            outs = self._on_device(island, slices, parts)
            return [
                out if is_shared(var) else lax.expand_dims(out, [0])
                for var, out in zip(island.makes, outs, strict=True)
            ]

        def in_spec(var: Var) -> P:
            if var in parts:
                return P(*[None] * parts[var], self.name)
            return P() if is_shared(var) else P(self.name)

        def out_spec(var: Var) -> P:
            if not is_shared(var):
                return P(self.name)
            dim = island.scatters.get(var)
            return P() if dim is None else P(*[None] * dim, self.name)

        mapped = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(map(in_spec, island.reads)),
            out_specs=list(map(out_spec, island.makes)),
            # As in pmap: with types, a gradient by what is shared would be summed twice.
            check_vma=False,
        )
        is_whole = lambda var: is_shared(var) and var not in parts
        return mapped(*[(values.whole if is_whole(v) else values.plain)(v) for v in island.reads])

    def _on_device(self, island: Island, slices: Values, parts: Mapping[Var, int]) -> Values:
        body = _stretch(island.eqns, island.reads, island.makes)
        summed = functools.partial(self._summed, island)
        sums = [eqn for eqn in island.eqns if any(v in island.scatters for v in eqn.outvars)]
        bind = rebind.bind_again if self.anew_inside else interpreter.replay
        gathers = _Gathers(self.name, self._evaluate_inside, bind)
        handlers = gathers.handlers(body, {var: _Shard(dim) for var, dim in parts.items()})
        return self._evaluate_inside(body, slices, handlers | {id(eqn): summed for eqn in sums})

    def _evaluate_inside(self, jaxpr: Any, values: Sequence[Any], handlers: _Handlers) -> Values:
        """A body, with some equations handled otherwise."""
        if self.anew_inside:
            of_eqn = lambda eqn: handlers.get(id(eqn)) or _without_constraint(eqn)
            return rebind.evaluate(jaxpr, values, of_eqn)
        eqns = enumerate(interpreter.open_jaxpr(jaxpr).eqns)
        at = {place: handlers[id(eqn)] for place, eqn in eqns if id(eqn) in handlers}
        return interpreter.run(jaxpr, values, at, anew=True)

    def _summed(self, island: Island, eqn: JaxprEqn, operands: Values) -> Values:
        """A psum, of which some results are wanted cut."""
        dims = map(island.scatters.get, eqn.outvars)
        return [
            lax.psum(value, self.name)
            if dim is None
            else lax.psum_scatter(value, self.name, scatter_dimension=dim, tiled=True)
            for value, dim in zip(operands, dims, strict=True)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Values:
    """What is known while a body runs; what is gathered once is kept."""

    emitter: Emitter
    known: dict[Var, Any]
    gathered: dict[Var, Any] = dataclasses.field(default_factory=dict)

    def plain(self, var: Var) -> Any:
        return self.known[var]

    def whole(self, var: Var) -> Any:
        if var not in self.gathered:
            self.gathered[var] = self.emitter.whole(self.known[var])
        return self.gathered[var]


def _stretch(eqns: Sequence[JaxprEqn], reads: Sequence[Var], makes: Sequence[Var]) -> Jaxpr:
    effects = frozenset().union(*[eqn.effects for eqn in eqns])
    return Jaxpr((), list(reads), list(makes), eqns, effects, interpreter.unnamed())


def _without_constraint(eqn: JaxprEqn) -> Any:
    return (lambda _, values: values) if eqn.primitive.name == "sharding_constraint" else None


# On cut values these give the bits that they give on whole ones; a maximum does not, for XLA on CPU
# loses a NaN in one of the parts.
_MOVES = frozenset(
    (
        *("broadcast_in_dim", "concatenate", "copy_p", "dynamic_slice", "dynamic_update_slice"),
        *("expand_dims", "iota", "pad", "pvary", "reshape", "rev", "slice", "split", "squeeze"),
        *("stack", "tile", "transpose"),
    )
)
_SUMS = frozenset(("reduce_sum", "dot_general", "cumsum"))  # in another order, when cut
_CONTAINERS = frozenset((*INLINED, "custom_jvp_call", "custom_vjp_call"))


# ---- what islands gather


@dataclasses.dataclass(frozen=True, slots=True)
class _Gathers:
    """Runs equations that read parts, on each device."""

    name: Any  # of the mapped axis
    evaluate: Callable[[Any, Sequence[Any], _Handlers], Values]  # a body
    bind: Callable[[JaxprEqn, Values], Values]  # one equation

    def handlers(self, body: Jaxpr, parts: _Shards) -> _Handlers:
        """What to do with the equations that read parts, of which none is a result of the body."""
        return {id(eqn): self._handler(_read(eqn, parts)) for eqn in body.eqns if _read(eqn, parts)}

    def _handler(self, read: Mapping[int, _Shard]) -> Handler:
        """Of an equation that reads parts at these places."""

        def handle(eqn: JaxprEqn, values: Values) -> Values:
            inside = _parts_inside(eqn, read)
            whole = self._with_whole(eqn, values, [n for n in read if n not in inside], read)
            if not inside:
                return self.bind(eqn, whole)
            (jaxpr,) = interpreter.bodies(eqn)
            body = interpreter.open_jaxpr(jaxpr)
            parts = {body.invars[place]: part for place, part in inside.items()}
            run = lambda args: self.evaluate(jaxpr, args, self.handlers(body, parts))
            if eqn.primitive.name == "scan":
                return _gathering_scan(eqn, whole, run)
            # Evaluated in its place, a checkpoint keeps what it is for: a computation of its own.
            is_checkpoint = eqn.primitive.name in _CHECKPOINTS
            return run(lax.optimization_barrier(whole) if is_checkpoint else whole)

        return handle

    def _with_whole(
        self, eqn: JaxprEqn, values: Values, places: Sequence[int], read: Mapping[int, _Shard]
    ) -> Values:
        """The operands, those in these places gathered, but not before the others are there."""
        values = list(values)
        others = [n for n, atom in enumerate(eqn.invars) if isinstance(atom, Var) and n not in read]
        tied = [*places, *others] if places else []
        tied_values = lax.optimization_barrier(tuple(values[n] for n in tied))
        for n, value in zip(tied, tied_values, strict=True):
            values[n] = self._gathered(value, read[n]) if n in read else value
        return values

    def _gathered(self, value: Any, part: _Shard) -> Any:
        # XLA on CPU drops barriers before it looks for equal instructions for the last time, so two
        # gathers of one value differ: each has one more dimension of length 1.
        more = tuple(range(next(part.uses)))
        value = jnp.expand_dims(value, more)
        value = lax.all_gather(value, self.name, axis=part.dim + len(more), tiled=True)
        return jnp.squeeze(value, more)


def _read(eqn: JaxprEqn, parts: _Shards) -> dict[int, _Shard]:
    """The operands that are given in parts, by their places."""
    return {n: parts[a] for n, a in enumerate(eqn.invars) if isinstance(a, Var) and a in parts}


def _parts_inside(eqn: JaxprEqn, read: Mapping[int, _Shard]) -> dict[int, _Shard]:
    """The operands that the body of an equation takes in parts.

    Those of a call; and of a scan what it walks over, unless along the dimension that is cut. What
    all its turns read is gathered once, before it.
    """
    if eqn.primitive.name in (*INLINED, *_CHECKPOINTS):
        found = dict(read)
    elif eqn.primitive.name == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        first = len(layout.constants) + len(layout.carries_in)
        found = {n: _Shard(part.dim - 1) for n, part in read.items() if n >= first and part.dim}
    else:
        return {}
    body = interpreter.open_jaxpr(interpreter.bodies(eqn)[0])
    results = {atom for atom in body.outvars if isinstance(atom, Var)}
    return {place: part for place, part in found.items() if body.invars[place] not in results}


def _gathering_scan(eqn: JaxprEqn, values: Values, run: Callable[[Values], Values]) -> Values:
    layout = _compat.scan_layout(eqn.params, len(values), len(eqn.outvars))
    first, carried = len(layout.constants), len(layout.carries_in)

    def turn(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = run([*values[:first], *carry, *xs])
        return outs[:carried], outs[carried:]

    kept = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    start, walked = values[first : first + carried], values[first + carried :]
    carry, ys = lax.scan(turn, start, walked, **kept)
    return [*carry, *ys]


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

    def results(self, values: Sequence[Any], had: Sequence[bool]) -> Values:
        """What a body gives, as results."""
        return self.carried(self._changed(values, had, self.outs[: len(values)]))

    def carried(self, values: Sequence[Any]) -> Values:
        """Values that lie as the first results are wanted."""
        laid = zip(values, self.cuts[: len(values)], strict=True)
        return [x if spec is None else self.runs.laid(x, spec) for x, spec in laid]

    def _changed(
        self, values: Sequence[Any], had: Sequence[bool], wanted: Sequence[bool]
    ) -> Values:
        return [
            value if was == will else self.runs.as_varying(value, is_shared=True)
            for value, was, will in zip(values, had, wanted, strict=True)
        ]


def _scan(forms: _Forms, step: Step, values: Values) -> Values:
    (inner,), params = step.inner, step.eqn.params
    layout = _compat.scan_layout(params, len(values), len(step.eqn.outvars))
    constants, carried = len(layout.constants), len(layout.carries_in)
    values = forms.given(values, inner.ins)
    fixed, start = values[:constants], values[constants : constants + carried]
    walked = [
        x if is_shared else jnp.moveaxis(x, 1, 0)
        for x, is_shared in zip(
            values[constants + carried :], inner.ins[constants + carried :], strict=True
        )
    ]

    def body(carry: Values, xs: Values) -> tuple[Values, Values]:
        outs = forms.runs.run(inner, [*fixed, *carry, *xs])
        outs = forms.results(outs, inner.outs)
        return outs[:carried], outs[carried:]

    carry, ys = lax.scan(
        body,
        forms.carried(start),
        walked,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    of_steps = zip(ys, forms.outs[carried:], strict=True)
    return [*carry, *[y if is_shared else jnp.moveaxis(y, 0, 1) for y, is_shared in of_steps]]


def _while(forms: _Forms, step: Step, values: Values) -> Values:
    params = step.eqn.params
    plans = dict(zip(bodies_of_while(step.eqn), step.inner, strict=True))
    condition, body = plans["cond_jaxpr"], plans["body_jaxpr"]
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition = forms.given(values[:first], condition.ins[:first])
    of_body = forms.given(values[first:second], body.ins[: second - first], first)
    start = forms.given(values[second:], body.ins[second - first :], second)

    def again(carry: Values) -> Any:
        return forms.runs.run(condition, [*of_condition, *carry])[0]

    def once(carry: Values) -> Values:
        return forms.results(forms.runs.run(body, [*of_body, *carry]), body.outs)

    return lax.while_loop(again, once, forms.carried(start))


def _cond(forms: _Forms, step: Step, values: Values) -> Values:
    index, *operands = values

    def branch(plan: BodyPlan) -> Callable[..., Values]:
        return lambda *args: forms.results(forms.runs.run(plan, args), plan.outs)

    branches = [branch(plan) for plan in step.inner]
    return lax.switch(jnp.asarray(index, jnp.int32), branches, *operands)


def _reads_whole(step: Step) -> set[int]:
    """The operands that islands in the bodies read, and that do not change from turn to turn.

    They are gathered before the loop, if they are cut, and not in each turn.
    """
    eqn = step.eqn
    if eqn.primitive.name == "scan":
        layout = _compat.scan_layout(eqn.params, len(eqn.invars), len(eqn.outvars))
        offsets = {0: list(layout.constants)}
    elif eqn.primitive.name == "while":
        first, second = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        of = {"cond_jaxpr": range(first), "body_jaxpr": range(first, first + second)}
        offsets = {n: list(of[name]) for n, name in enumerate(bodies_of_while(eqn))}
    else:
        return set()
    found = set()
    for number, places in offsets.items():
        inner = step.inner[number]
        read = inner.reads_in_islands()
        inputs = inner.body.invars[len(inner.consts) :]
        found.update(place for at, place in enumerate(places) if inputs[at] in read)
    return found
