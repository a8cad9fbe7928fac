"""Gathers whose result is only reduced become one reduction over devices.

An all_gather is deferred: it stands for its blocks until something needs the value whole. The jaxpr
is changed equation by equation; nothing is traced but the reductions over devices, each once for
its types. A gather that is needed whole stays as it was, so the walk is repeated without it.
"""

import collections
import os
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jax_dist import _codes, _compat
from jax_dist._rewrite import PassFinding, PassPlan
from jax_dist._rewrite.gather_rules import (
    Blockwise,
    Deferred,
    NeedsWhole,
    apply_rule,
    dimension_to_slice,
    spell_axes,
)
from jax_dist._rewrite.interpreter import (
    Atom,
    Builder,
    Values,
    as_typed,
    bodies,
    named_axes,
    open_jaxpr,
    record_of,
    source_line,
    with_bodies,
)
from jax_dist._rewrite.uniformity import NOWHERE, Invariance, Same

Gathers: TypeAlias = typing.Literal["reduce", "exact", "keep"]

_SINGLE = 4  # bytes


def plan_gathers(jaxpr: ClosedJaxpr, *, exact: bool) -> PassPlan:
    """Plan which gathers of a program give way to reductions.

    Args:
      jaxpr: of the whole program, as `jax.make_jaxpr` gives it.
      exact: only where no bit of a result can change.

    Returns:
      What to evaluate instead on the same inputs, or None if nothing is to change; and what was
      rewritten or refused.
    """
    walk, kept, changed = _Walk(exact=exact), -1, jaxpr
    if not walk.mark(jaxpr):
        return PassPlan(None)
    while len(walk.kept) > kept:
        kept = len(walk.kept)
        changed = walk.program(jaxpr)
    return PassPlan(changed if walk.made else None, tuple(dict.fromkeys(walk.findings())))


class _Body(Builder):
    """The state of a walk over one body, and over those that are inlined into it."""

    def __init__(self, source: Any, scope: Same, sizes: Mapping[Any, int], *, check_vma: bool):
        super().__init__(source)
        self.scope = scope  # the axes of the shard_maps around it
        self.sizes = sizes  # of these axes
        self.check_vma = check_vma  # of the innermost shard_map
        self.same: dict[Var, Same] = {}
        self.call: JaxprEqn | None = None  # of a function of JAX's own: its line is for all inside

    def same_of(self, atom: Atom) -> Same:
        """Return the axes along which all devices hold the same."""
        return self.scope if isinstance(atom, Literal) else self.same.get(atom, NOWHERE)


class _Walk:
    """Walks over one program. `kept` grows in each; the walk counts in which it did not."""

    def __init__(self, *, exact: bool):
        # By gather: its number in the walk. Of those that stay, the first reason and its equation.
        self.kept: dict[int, tuple[str, JaxprEqn]] = {}
        self.made: dict[int, list[tuple[str, str]]] = {}  # reductions: ("reduce_sum", "psum")
        self._gathers: dict[int, JaxprEqn] = {}
        self._count = 0  # of the gathers so far
        self._exact = exact
        self._invariance = Invariance()
        self._traces: dict[Hashable, ClosedJaxpr] = {}
        self._gathering: set[int] = set()  # ids of equations that gather, or with one in a body

    def mark(self, jaxpr: Any) -> bool:
        """Find the equations with gathers; return whether there are any."""
        is_gather = lambda eqn: _compat.name_of(eqn) == "all_gather"
        eqns = open_jaxpr(jaxpr).eqns
        marked = [e for e in eqns if is_gather(e) or any([self.mark(body) for body in bodies(e)])]
        self._gathering.update(map(id, marked))
        return bool(marked)

    def program(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        self.made, self._count = collections.defaultdict(list), 0
        inputs = [NOWHERE] * len(jaxpr.in_avals)
        return self._closed(None, jaxpr, inputs, _Body(jaxpr, NOWHERE, {}, check_vma=False))

    def findings(self) -> list[PassFinding]:
        """Return what was found of each gather, in program order."""
        findings = []
        for number, eqn in self._gathers.items():
            name, line = f"all_gather over {spell_axes(named_axes(eqn))}", source_line(eqn)
            if number in self.kept:
                why, at = self.kept[number]
                what = f"{name}{f' ({line})' if line else ''} is kept"
                finding = ("refused", what, why, source_line(at))
            elif number in self.made:
                finding = ("rewritten", f"{name}, {_summary(self.made[number])}", "", line)
            else:  # nobody reads it
                continue
            findings.append(PassFinding(_codes.ALL_GATHER_THEN_REDUCE, *finding))
        return findings

    # ---- bodies

    def _closed(self, eqn: JaxprEqn | None, jaxpr: Any, same: Sequence[Same], body: _Body) -> Any:
        """Return a body that stays a body of `eqn`: nothing deferred enters or leaves it."""
        opened = open_jaxpr(jaxpr)
        self._equations(opened, same, body)
        outvars = []
        for atom in opened.outvars:
            value = body.read(atom)
            if isinstance(value, Deferred):
                assert eqn is not None
                why = f"the gathered value leaves the {_plain_name(eqn)} whole"
                self._keep_whole(value, why, value.made_by)
            outvars.append(atom if isinstance(value, Deferred) else value)
        return body.finish(outvars)

    def _equations(self, opened: Any, same: Sequence[Same], body: _Body) -> None:
        body.same.update(self._invariance.facts(opened, same, body.scope))
        for eqn in opened.eqns:
            has_gather = id(eqn) in self._gathering
            has_deferred = any(isinstance(body.read(atom), Deferred) for atom in eqn.invars)
            if not has_deferred and not has_gather:
                body.copy(eqn)
            elif _compat.name_of(eqn) == "all_gather":
                self._gather(eqn, body)
            elif body.scope and record_of(eqn).call == "inline":
                self._inline(eqn, body)
            elif has_deferred and not bodies(eqn):
                self._apply(eqn, body)
            else:
                why = "takes the gathered value whole: reduce before it, or gather inside"
                self._keep(eqn, body, f"{_plain_name(eqn)} {why}")
                body.copy(self._with_bodies(eqn, body) if has_gather else eqn)

    def _with_bodies(self, eqn: JaxprEqn, body: _Body) -> JaxprEqn:
        """Return an equation with its bodies changed."""
        inputs = self._invariance.of_body_inputs(
            eqn, [body.same_of(atom) for atom in eqn.invars], body.scope
        )
        scope, sizes, check_vma = body.scope, body.sizes, body.check_vma
        if _compat.name_of(eqn) == "shard_map":
            new = frozenset(eqn.params["newly_manual_axes"])
            scope = self._invariance.inside(eqn, scope)
            sizes = {**sizes, **{name: eqn.params["mesh"].shape[name] for name in new}}
            check_vma = eqn.params["check_vma"]
        following = iter(inputs)
        change = lambda inner: self._closed(
            eqn, inner, next(following), _Body(inner, scope, sizes, check_vma=check_vma)
        )
        return with_bodies(eqn, change)

    def _inline(self, eqn: JaxprEqn, body: _Body) -> None:
        """Walk the body of a jit in place: deferred values go in and out of it."""
        (jaxpr,) = bodies(eqn)
        same = [body.same_of(atom) for atom in eqn.invars]
        call = body.call
        body.call = call or (eqn if _is_of_jax(jaxpr) else None)
        with body.inline(jaxpr, list(map(body.read, eqn.invars))) as opened:
            self._equations(opened, same, body)
        body.call = call
        body.env.update(zip(eqn.outvars, map(body.read, opened.outvars), strict=True))

    # ---- equations

    def _gather(self, eqn: JaxprEqn, body: _Body) -> None:
        """Defer a gather: its block is all that is needed of it."""
        params, number, at = eqn.params, self._count, body.call or eqn
        dim, tiled = int(params["all_gather_dimension"]), params["tiled"]
        operand = body.read(eqn.invars[0])
        self._keep(eqn, body, "all_gather needs the whole gathered value")
        self._count += 1
        self._gathers[number] = eqn
        if params["axis_index_groups"] is not None:
            self.kept.setdefault(number, ("it gathers in groups of devices", at))
        if number in self.kept or isinstance(operand, Deferred) or params["axis_size"] == 1:
            body.copy(eqn)
            return
        take = lambda _, values: [_block(values[0], None if tiled else dim)]
        (block,) = self._trace(("block", dim, tiled), take, eqn, [operand], body)
        value = Deferred(block, dim, named_axes(eqn), params["axis_size"], (number,), at)
        body.env[eqn.outvars[0]] = value

    def _apply(self, eqn: JaxprEqn, body: _Body) -> None:
        """Add an equation with deferred operands, by its rule."""
        values = list(map(body.read, eqn.invars))
        operands = [value if isinstance(value, Deferred) else None for value in values]
        first = next(value for value in operands if value is not None)
        sites = tuple({site: None for value in operands if value for site in value.sites})
        try:
            if self._exact and _may_round(eqn):
                raise NeedsWhole("gathers='exact', and other sums may differ in the last bits")
            result = apply_rule(eqn, operands)
            self._check_whole_operands(eqn, operands, first, body)
        except NeedsWhole as reason:
            self._keep(eqn, body, str(reason))
            body.copy(eqn)
            return
        atoms: list[Atom] = []
        for place, value in enumerate(values):
            if isinstance(value, Deferred):
                atoms.append(value.block)
            elif (dim := dimension_to_slice(eqn, place, first)) < 0:
                atoms.append(value)
            else:
                take = lambda _, xs, dim=dim: [first.take_block(xs[0], dim)]
                key = ("take", dim, first.axes, first.size)
                atoms += self._trace(key, take, eqn, [value], body)
        if isinstance(result, Blockwise):
            outvars = [Var(first.block_type(var.aval, result.dim)) for var in eqn.outvars]
            params = {**eqn.params, **result.params} if result.params else eqn.params
            body.eqns.append(eqn.replace(invars=atoms, outvars=outvars, params=params))
            at = body.call or eqn
            for var, block in zip(eqn.outvars, outvars, strict=True):
                body.env[var] = Deferred(block, result.dim, first.axes, first.size, sites, at)
            return
        (out,) = eqn.outvars
        compute = lambda eqn, xs: [as_typed(result.compute(eqn, xs), out)]
        key = (eqn.primitive, *eqn.params.items(), first.axes, _compat.varying_axes(out.aval))
        (body.env[out],) = self._trace(key, compute, eqn, atoms, body)
        for site in sites:
            self.made[site].append((_compat.name_of(eqn), result.collective))

    def _check_whole_operands(
        self, eqn: JaxprEqn, operands: Sequence[Deferred | None], first: Deferred, body: _Body
    ) -> None:
        """Raise NeedsWhole if devices hold other values of an operand that is not gathered."""
        for atom, value in zip(eqn.invars, operands, strict=True):
            if value is None and not body.same_of(atom).issuperset(first.axes):
                different = [axis for axis in first.axes if axis not in body.same_of(atom)]
                raise NeedsWhole(
                    f"{_compat.name_of(eqn)} mixes the gathered value with one that may differ "
                    f"between the devices of {spell_axes(different)}"
                )

    def _trace(
        self,
        key: Hashable,
        compute: Callable[[JaxprEqn, Values], Values],
        eqn: JaxprEqn,
        atoms: Sequence[Atom],
        body: _Body,
    ) -> list[Atom]:
        """Add the equations of `compute` on some atoms, at the line of `eqn`.

        What it computes is traced once for each key and types.
        """
        avals = tuple(atom.aval for atom in atoms)
        key = (key, avals, tuple(body.sizes.items()), body.check_vma, eqn.ctx)
        if key not in self._traces:
            with eqn.ctx.manager, _compat.typed_collectives(check_vma=body.check_vma):
                self._traces[key] = jax.make_jaxpr(
                    lambda *values: compute(eqn, list(values)), axis_env=list(body.sizes.items())
                )(*avals)
        return body.add(self._traces[key], atoms, source_info=eqn.source_info)

    def _keep(self, eqn: JaxprEqn, body: _Body, why: str) -> None:
        """Keep the gathers behind all operands of an equation, which are whole from here on."""
        for atom in eqn.invars:
            if isinstance(value := body.read(atom), Deferred):
                self._keep_whole(value, why, body.call or eqn)
                del body.env[atom]

    def _keep_whole(self, value: Deferred, why: str, at: JaxprEqn) -> None:
        for site in value.sites:
            self.kept.setdefault(site, (why, at))


def _block(value: Any, new_dimension: int | None) -> Any:
    """Return what stands for a gathered value: the block of this device.

    XLA computes in float32 between operations of a smaller type, where it fuses them. A gather
    ends that: what is sent has been rounded. So has what stands for it.
    """
    if jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < _SINGLE:
        value = lax.optimization_barrier(value)
    return value if new_dimension is None else lax.expand_dims(value, [new_dimension])


def _may_round(eqn: JaxprEqn) -> bool:
    """Return whether the last bits of a result may depend on the order of operations."""
    avals: list[Any] = [var.aval for var in eqn.outvars]
    return not record_of(eqn).exact and any(jnp.issubdtype(a.dtype, jnp.inexact) for a in avals)


# --- names and reasons for reports


def _summary(made: Sequence[tuple[str, str]]) -> str:
    """Return "reduce_sum and reduce_max: one psum and one pmax"."""
    reads = " and ".join(dict.fromkeys(primitive for primitive, _ in made))
    counts = collections.Counter(collective for _, collective in made).items()
    names = [f"one {name}" if count == 1 else f"{count} {name}s" for name, count in counts]
    return f"{reads}: {' and '.join(names)}"


def _plain_name(eqn: JaxprEqn) -> str:
    """Return the user's name: "relu" of a custom_jvp_call."""
    name, call = _compat.name_of(eqn), record_of(eqn).call
    if call == "ruled":
        return open_jaxpr(bodies(eqn)[0]).debug_info.func_name or name
    return "checkpoint" if call == "checkpoint" else "while loop" if name == "while" else name


def _is_of_jax(jaxpr: Any) -> bool:
    """Return whether it is a helper of jax itself, such as jnp.var.

    JAX traces it once, so its equations bear the line of its first caller in the process.
    """
    file = open_jaxpr(jaxpr).debug_info.func_filename or ""
    return file.startswith(os.path.dirname(jax.__file__) + os.sep)
