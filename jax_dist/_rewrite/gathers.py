"""Gathers whose result is only reduced become one reduction over devices.

Inside every shard_map, at any depth, an all_gather is deferred: it stands for its blocks until
something needs the value whole. The jaxpr is changed equation by equation; nothing is traced but
the reductions over devices, each once for its types. A gather that is needed whole stays as it was,
so the walk is repeated without it.
"""

import dataclasses
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.extend.core import Literal as LiteralAtom

from jax_dist import _codes, _compat
from jax_dist._rewrite.gather_rules import (
    Blockwise,
    Deferred,
    NeedsWhole,
    Operand,
    Reduction,
    Site,
    apply_rule,
    dimension_of,
    spell_axes,
)
from jax_dist._rewrite.interpreter import (
    Atom,
    Values,
    as_typed,
    bodies,
    call_jaxpr,
    constants,
    contains,
    equations,
    named_axes,
    open_jaxpr,
    source_line,
    with_bodies,
)
from jax_dist._rewrite.pipeline import PassFinding, PassPlan
from jax_dist._rewrite.primitive_facts import record_of
from jax_dist._rewrite.uniformity import NOWHERE, Invariance, Same

Gathers: TypeAlias = Literal["reduce", "exact", "keep"]
GATHERS = frozenset({"all_gather"})  # the primitives that the pass has something to do with

_CODE = _codes.ALL_GATHER_THEN_REDUCE
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
    findings: list[PassFinding] = []
    changed = _change_shard_maps(jaxpr, findings, exact=exact)
    found = tuple(dict.fromkeys(findings))
    if changed is jaxpr:
        return PassPlan(None, found)
    return PassPlan(lambda *inputs: call_jaxpr(changed, inputs), found)


def _change_shard_maps(jaxpr: Any, findings: list[PassFinding], *, exact: bool) -> Any:
    """Return a jaxpr with the outermost shard_maps in it changed; itself if none is."""
    body, eqns = open_jaxpr(jaxpr), []
    for eqn in body.eqns:
        if not contains_gather(eqn):
            eqns.append(eqn)
        elif _compat.name_of(eqn) == "shard_map":
            eqns.append(_change_shard_map(eqn, findings, exact=exact))
        else:
            change = lambda inner: _change_shard_maps(inner, findings, exact=exact)
            eqns.append(_with_changed_bodies(eqn, [change(inner) for inner in bodies(eqn)]))
    return _with_equations(jaxpr, eqns)


def _change_shard_map(eqn: JaxprEqn, findings: list[PassFinding], *, exact: bool) -> JaxprEqn:
    """Walk until no other gather turns out to be needed whole."""
    walk = _Walk(Invariance(), exact=exact)
    while True:
        count = len(walk.kept)
        changed = walk.shard_map(eqn, [NOWHERE] * len(eqn.invars), NOWHERE, (), {})
        if len(walk.kept) == count:
            findings += walk.findings()
            return changed if walk.made else eqn
        walk.made.clear()


def _is_gather(eqn: JaxprEqn) -> bool:
    return _compat.name_of(eqn) in GATHERS


def contains_gather(eqn: JaxprEqn) -> bool:
    return _is_gather(eqn) or any(contains(body, _is_gather) for body in bodies(eqn))


def _with_changed_bodies(eqn: JaxprEqn, changed: Sequence[Any]) -> JaxprEqn:
    """Return the equation with other bodies of the same types; itself if they are the same."""
    if all(new is old for new, old in zip(changed, bodies(eqn), strict=True)):
        return eqn
    following = iter(changed)
    return with_bodies(eqn, lambda _: next(following))


def _with_equations(
    jaxpr: Any, eqns: Sequence[JaxprEqn], outvars: Sequence[Atom] | None = None
) -> Any:
    """Return the jaxpr with other equations; itself if they are the same."""
    body = open_jaxpr(jaxpr)
    if list(map(id, eqns)) == list(map(id, body.eqns)):
        return jaxpr
    opened = body.replace(eqns=list(eqns), outvars=list(outvars or body.outvars))
    return ClosedJaxpr(opened, jaxpr.consts) if isinstance(jaxpr, ClosedJaxpr) else opened


# --- the walk over one shard_map


@dataclasses.dataclass(frozen=True, slots=True)
class _KeptGather:
    """A gather that cannot be removed, with the reason and the source line."""

    why: str  # "": it sends nothing
    where: str


@dataclasses.dataclass(slots=True)
class _Body:
    """The state of a walk over one body, and over those that are inlined into it."""

    scope: Same  # the axes of the shard_maps around it
    sizes: Mapping[Any, int]  # of these axes
    check_vma: bool  # of the innermost one
    eqns: list[JaxprEqn] = dataclasses.field(default_factory=list)
    deferred: dict[Var, Deferred] = dataclasses.field(default_factory=dict)
    # The line that made each deferred value.
    made_at: dict[Var, str] = dataclasses.field(default_factory=dict)
    renamed: dict[Var, Atom] = dataclasses.field(default_factory=dict)  # of inlined bodies
    same: dict[Var, Same] = dataclasses.field(default_factory=dict)
    equal_gathers: dict[Hashable, Site] = dataclasses.field(default_factory=dict)

    def read(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, LiteralAtom) else self.renamed.get(atom, atom)

    def deferred_of(self, atom: Atom) -> Operand:
        return None if isinstance(atom, LiteralAtom) else self.deferred.get(atom)

    def same_of(self, atom: Atom) -> Same:
        """Return the axes along which all devices hold the same."""
        return self.scope if isinstance(atom, LiteralAtom) else self.same.get(atom, NOWHERE)


class _Walk:
    """Walks over one shard_map. `kept` grows in each; the walk counts in which it did not."""

    def __init__(self, invariance: Invariance, *, exact: bool):
        self.kept: dict[Site, _KeptGather] = {}
        self.made: dict[Site, list[tuple[str, str]]] = {}  # reductions: ("reduce_sum", "psum")
        self._exact = exact
        self._invariance = invariance
        self._gathers: dict[Site, JaxprEqn] = {}
        self._traces: dict[Hashable, ClosedJaxpr] = {}

    def findings(self) -> list[PassFinding]:
        """Return what was found of each gather, in program order."""
        findings = []
        for site, eqn in sorted(self._gathers.items()):
            name, line = f"all_gather over {spell_axes(named_axes(eqn))}", source_line(eqn)
            if (kept := self.kept.get(site)) is not None:
                what = f"{name}{f' ({line})' if line else ''} is kept"
                if kept.why:
                    findings.append(PassFinding(_CODE, "refused", what, kept.why, kept.where))
            elif made := self.made.get(site):
                read = " and ".join(dict.fromkeys(primitive for primitive, _ in made))
                names = [collective for _, collective in made]
                became = " and ".join(_count(names.count(n), n) for n in dict.fromkeys(names))
                findings.append(
                    PassFinding(_CODE, "rewritten", f"{name}, {read}: {became}", "", line)
                )
        return findings

    # ---- bodies

    def shard_map(
        self, eqn: JaxprEqn, same: Sequence[Same], scope: Same, at: Site, sizes: Mapping[Any, int]
    ) -> JaxprEqn:
        """Return the shard_map with its body changed."""
        (inputs,) = self._invariance.of_body_inputs(eqn, same, scope)
        new = frozenset(eqn.params["newly_manual_axes"])
        own = {name: size for name, size in eqn.params["mesh"].shape.items() if name in new}
        scope = self._invariance.inside(eqn, scope)
        body = _Body(scope, {**sizes, **own}, eqn.params["check_vma"])
        changed = self._closed(eqn, eqn.params["jaxpr"], inputs, body, at)
        return _with_changed_bodies(eqn, [changed])

    def _closed(
        self, eqn: JaxprEqn, jaxpr: Any, same: Sequence[Same], body: _Body, at: Site
    ) -> Any:
        """Return a body that stays a body: nothing deferred enters or leaves it."""
        opened = open_jaxpr(jaxpr)
        self._equations(opened, same, body, at, "")
        for atom in opened.outvars:
            if isinstance(atom, Var) and (value := body.deferred_of(atom)) is not None:
                why = f"the gathered value leaves the {_plain_name(eqn)} whole"
                self._keep(value, why, body.made_at[atom])
        return _with_equations(jaxpr, body.eqns, list(map(body.read, opened.outvars)))

    def _equations(
        self, opened: Any, same: Sequence[Same], body: _Body, at: Site, called_at: str
    ) -> None:
        body.same |= self._invariance.facts(opened, same, body.scope)
        for place, eqn in enumerate(opened.eqns):
            self._equation(eqn, (*at, place), body, called_at)

    def _equation(self, eqn: JaxprEqn, at: Site, body: _Body, called_at: str) -> None:
        """Add what an equation becomes to `body`."""
        has_deferred = any(body.deferred_of(atom) is not None for atom in eqn.invars)
        has_gather = contains_gather(eqn)
        where = called_at or (source_line(eqn) if has_deferred or has_gather else "")
        if _compat.name_of(eqn) == "all_gather":
            self._gather(eqn, at, body, where)
        elif not has_deferred and not has_gather:
            self._copy(eqn, body)
        elif record_of(eqn).call == "inline":
            self._inline(eqn, at, body, where)
        elif has_deferred and not bodies(eqn):
            self._apply(eqn, body, where)
        else:
            self._refuse(eqn, body, _reason_of_bodies(eqn), where)
            self._copy(self._with_bodies(eqn, at, body) if has_gather else eqn, body)

    def _copy(self, eqn: JaxprEqn, body: _Body) -> None:
        """Add an equation as it is; with variables of its own, if it may be inlined twice."""
        for var in eqn.outvars:
            body.deferred.pop(var, None)
        if not body.renamed:
            body.eqns.append(eqn)
            return
        outvars = [Var(var.aval) for var in eqn.outvars]
        body.eqns.append(eqn.replace(invars=list(map(body.read, eqn.invars)), outvars=outvars))
        body.renamed.update(zip(eqn.outvars, outvars, strict=True))

    def _with_bodies(self, eqn: JaxprEqn, at: Site, body: _Body) -> JaxprEqn:
        same = [body.same_of(atom) for atom in eqn.invars]
        if _compat.name_of(eqn) == "shard_map":
            return self.shard_map(eqn, same, body.scope, at, body.sizes)
        inputs = self._invariance.of_body_inputs(eqn, same, body.scope)
        changed = [
            self._closed(
                eqn, inner, ins, _Body(body.scope, body.sizes, body.check_vma), (*at, place)
            )
            for place, (inner, ins) in enumerate(zip(bodies(eqn), inputs, strict=True))
        ]
        return _with_changed_bodies(eqn, changed)

    def _inline(self, eqn: JaxprEqn, at: Site, body: _Body, where: str) -> None:
        """Walk the body of a jit in place: deferred values go in and out of it."""
        (jaxpr,) = bodies(eqn)
        opened = open_jaxpr(jaxpr)
        is_deferred = any(body.deferred_of(atom) is not None for atom in eqn.invars)
        kept = sum(site[: len(at)] == at for site in self.kept)
        if not is_deferred and kept == sum(map(_is_gather, equations(opened))):
            self._copy(eqn, body)
            return
        for inner, outer in zip(opened.invars, eqn.invars, strict=True):
            body.renamed[inner] = body.read(outer)
            body.deferred.pop(inner, None)
            if (value := body.deferred_of(outer)) is not None:
                body.deferred[inner], body.made_at[inner] = value, where
        for var, constant in zip(opened.constvars, constants(jaxpr), strict=True):
            body.renamed[var] = LiteralAtom(constant, var.aval)
        same = [body.same_of(atom) for atom in eqn.invars]
        self._equations(opened, same, body, at, where if _is_of_jax(jaxpr) else "")
        for result, atom in zip(eqn.outvars, opened.outvars, strict=True):
            body.deferred.pop(result, None)
            if (value := body.deferred_of(atom)) is not None:
                body.deferred[result], body.made_at[result] = value, where
            else:
                body.renamed[result] = body.read(atom)

    # ---- equations

    def _gather(self, eqn: JaxprEqn, at: Site, body: _Body, where: str) -> None:
        """Defer a gather: its block is all that is needed of it."""
        (operand,), params = eqn.invars, eqn.params
        dim, tiled = int(params["all_gather_dimension"]), params["tiled"]
        axes = named_axes(eqn)
        # Equal gathers are one, so that none is kept while another is reduced.
        key = (id(body.read(operand)), axes, dim, tiled, str(params["axis_index_groups"]))
        site = body.equal_gathers.setdefault(key, at)
        self._gathers.setdefault(site, eqn)
        self._refuse(eqn, body, "all_gather needs the whole gathered value", where)
        why = _unsupported_reason(eqn)
        if why is not None:
            self.kept.setdefault(site, _KeptGather(why, where))
        if site in self.kept:
            self._copy(eqn, body)
            return
        (block,) = self._trace(
            ("block", dim, tiled),
            lambda _, values: [_block(values[0], None if tiled else dim)],
            eqn,
            [body.read(operand)],
            body,
        )
        size = params["axis_size"]
        body.deferred[eqn.outvars[0]] = Deferred(block, dim, axes, size, (site,))
        body.made_at[eqn.outvars[0]] = where

    def _apply(self, eqn: JaxprEqn, body: _Body, where: str) -> None:
        """Add an equation with deferred operands, by its rule."""
        operands = [body.deferred_of(atom) for atom in eqn.invars]
        values = [value for value in operands if value is not None]
        first = values[0]
        sites = tuple(sorted({site for value in values for site in value.sites}))
        try:
            result = apply_rule(eqn, operands, first)
            self._check_operands(eqn, operands, first, body)
        except NeedsWhole as reason:
            self._refuse(eqn, body, str(reason), where)
            self._copy(eqn, body)
            return
        atoms = []
        for place, (atom, value) in enumerate(zip(eqn.invars, operands, strict=True)):
            if value is not None:
                atoms.append(value.block)
                continue
            dim = dimension_of(eqn, place, operands, first)
            if dim >= 0:
                take = lambda _, xs, dim=dim: [first.take_block(xs[0], dim)]
                key = ("take", dim, first.axes, first.size)
                atoms += self._trace(key, take, eqn, [body.read(atom)], body)
            else:
                atoms.append(body.read(atom))
        if isinstance(result, Blockwise):
            self._add_blockwise(eqn, atoms, result, dataclasses.replace(first, sites=sites), body)
        else:
            self._add_reduction(eqn, atoms, result, first, body)
            for site in sites:
                made = (_compat.name_of(eqn), result.collective)
                self.made.setdefault(site, []).append(made)
        for var in eqn.outvars:
            body.made_at[var] = where

    def _check_operands(
        self, eqn: JaxprEqn, operands: Sequence[Operand], first: Deferred, body: _Body
    ) -> None:
        """Raise NeedsWhole if the operands cannot be taken in blocks."""
        name = _compat.name_of(eqn)
        if self._exact and _may_round(eqn):
            raise NeedsWhole("gathers='exact', and other sums may differ in the last bits")
        for value in operands:
            if value is not None and (value.axes, value.size) != (first.axes, first.size):
                raise NeedsWhole(f"{name} mixes values that are gathered in different ways")
            if value is not None and name != "dot_general" and value.dim != first.dim:
                raise NeedsWhole(f"{name} mixes values that are gathered in different ways")
        for atom, value in zip(eqn.invars, operands, strict=True):
            different = [axis for axis in first.axes if axis not in body.same_of(atom)]
            if value is None and different:
                raise NeedsWhole(
                    f"{name} mixes the gathered value with one that may differ between the devices "
                    f"of {spell_axes(different)}"
                )

    def _add_blockwise(
        self, eqn: JaxprEqn, atoms: list[Atom], result: Blockwise, first: Deferred, body: _Body
    ) -> None:
        outvars = [Var(first.aval(var.aval, result.dim)) for var in eqn.outvars]
        params = {**eqn.params, **result.params}
        body.eqns.append(eqn.replace(invars=atoms, outvars=outvars, params=params))
        for var, block in zip(eqn.outvars, outvars, strict=True):
            body.deferred[var] = dataclasses.replace(first, block=block, dim=result.dim)

    def _add_reduction(
        self, eqn: JaxprEqn, atoms: list[Atom], result: Reduction, first: Deferred, body: _Body
    ) -> None:
        (out,) = eqn.outvars
        compute = lambda eqn, values: [as_typed(result.compute(eqn, values), out)]
        key = (eqn.primitive, str(eqn.params), first.axes, _compat.varying_axes(out.aval))
        (new,) = self._trace(key, compute, eqn, atoms, body)
        body.deferred.pop(out, None)
        body.renamed[out] = new

    def _trace(
        self,
        key: Hashable,
        compute: Callable[[JaxprEqn, Values], Values],
        eqn: JaxprEqn,
        atoms: Sequence[Atom],
        body: _Body,
    ) -> list[Any]:
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
        jaxpr = self._traces[key]
        names: dict[Var, Atom] = dict(zip(jaxpr.jaxpr.invars, atoms, strict=True))
        for var, constant in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            names[var] = LiteralAtom(constant, var.aval)
        read = lambda atom: atom if isinstance(atom, LiteralAtom) else names[atom]
        for inner in jaxpr.jaxpr.eqns:
            outvars = [Var(var.aval) for var in inner.outvars]
            body.eqns.append(
                inner.replace(
                    invars=list(map(read, inner.invars)),
                    outvars=outvars,
                    source_info=eqn.source_info,
                )
            )
            names.update(zip(inner.outvars, outvars, strict=True))
        return list(map(read, jaxpr.jaxpr.outvars))

    def _refuse(self, eqn: JaxprEqn, body: _Body, why: str, where: str) -> None:
        """Keep the gathers behind all operands of an equation, which are whole from here on."""
        for atom in eqn.invars:
            if isinstance(atom, Var) and (value := body.deferred_of(atom)) is not None:
                self._keep(value, why, where)
                del body.deferred[atom]

    def _keep(self, value: Deferred, why: str, where: str) -> None:
        for site in value.sites:
            self.kept.setdefault(site, _KeptGather(why, where))


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
    if record_of(eqn).exact:
        return False
    avals: list[Any] = [var.aval for var in eqn.outvars]
    return any(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals)


def _unsupported_reason(eqn: JaxprEqn) -> str | None:
    """Return why a gather is not looked at, if it is not."""
    aval: Any = eqn.invars[0].aval
    if eqn.params["axis_size"] == 1:
        return ""
    if eqn.params["axis_index_groups"] is not None:
        return "it gathers in groups of devices"
    if _compat.is_unreduced(aval):
        return "the gathered value is of an unreduced type"
    return None


# --- names and reasons for reports


def _reason_of_bodies(eqn: JaxprEqn) -> str:
    """Return why an equation with bodies takes no deferred value."""
    record = record_of(eqn)
    if record.kind == "loop":
        return (
            f"the gather is outside the {_plain_name(eqn)} and its use inside: a reduction over "
            "devices would run in every iteration"
        )
    if record.kind == "branch":
        return (
            "the gather is outside the cond and its use inside: a reduction over devices would "
            "stand in a branch that some of them may not take"
        )
    if record.call == "ruled":
        return (
            f"{_plain_name(eqn)} has its own rule of differentiation, which is for the whole "
            "value: apply it to the block, before the gather"
        )
    return f"{_plain_name(eqn)} takes the gathered value whole: gather inside it"


def _plain_name(eqn: JaxprEqn) -> str:
    """Return the user's name: "relu" of a custom_jvp_call."""
    name, call = _compat.name_of(eqn), record_of(eqn).call
    if call == "ruled":
        return _traced_function(bodies(eqn)[0])[0] or name
    return "checkpoint" if call == "checkpoint" else "while loop" if name == "while" else name


def _traced_function(jaxpr: Any) -> tuple[str, str]:
    """Return name and file of the function that a jaxpr was traced from; "" where unknown."""
    info = open_jaxpr(jaxpr).debug_info
    return (info.func_name or "", info.func_filename or "") if info.func_src_info else ("", "")


def _is_of_jax(jaxpr: Any) -> bool:
    """Return whether it is a helper of jax itself, such as jnp.var.

    JAX traces it once, so its equations bear the line of its first caller in the process.
    """
    return _traced_function(jaxpr)[1].startswith(os.path.dirname(jax.__file__) + os.sep)


def _count(count: int, noun: str) -> str:
    return f"{'one' if count == 1 else count} {noun}{'' if count == 1 else 's'}"
