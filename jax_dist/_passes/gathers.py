"""Gathers whose result is only reduced become one reduction over devices.

An all_gather is deferred: until something needs its result whole, only this device's block of it is
computed (a `Deferred`, see `gather_rules`). The jaxpr is changed equation by equation; nothing is
traced but the reductions over devices, each once for its types. A gather whose result is needed
whole stays as it was ("is kept"), so the walk is repeated without deferring it.
"""

import collections
import dataclasses
import os
import typing
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jax_dist import _codes, _compat
from jax_dist._passes import PassFinding, PassPlan, gather_rules, interpreter
from jax_dist._passes.gather_rules import Blockwise, Deferred, NeedsWhole
from jax_dist._passes.interpreter import Atom, Builder, Values, record_of
from jax_dist._passes.uniformity import NOWHERE, Facts, Invariance, Same, same_of

Gathers: TypeAlias = typing.Literal["reduce", "exact", "keep"]


def plan_gathers(jaxpr: ClosedJaxpr, *, exact: bool) -> PassPlan:
    """Plan which gathers of a program give way to reductions.

    Args:
      jaxpr: of the whole program, as `jax.make_jaxpr` gives it.
      exact: only where no bit of a result can change.

    Returns:
      What to evaluate instead on the same inputs, or None if nothing is to change; and what was
      rewritten or refused.
    """
    if not any(map(_is_gather, interpreter.equations(jaxpr))):
        return PassPlan(None)
    eqns = interpreter.equations(jaxpr)
    gathering = {id(eqn) for eqn in eqns if interpreter.holds(eqn, _is_gather)}
    walk = _Walk(gathering, exact=exact)
    # A walk may find that a gather has to be kept after it has replaced some of its readers. So the
    # next one starts from the original jaxpr again, until one finds no further gather to keep.
    changed, kept = jaxpr, -1
    while walk.count_kept() > kept:
        kept = walk.count_kept()
        changed = walk.rewrite(jaxpr)
    sites = walk.sites.values()
    findings = [site.finding() for site in sites if site.reason or site.reductions]
    is_changed = any(site.reductions for site in sites)
    return PassPlan(changed if is_changed else None, tuple(dict.fromkeys(findings)))


@dataclasses.dataclass(slots=True, eq=False)
class _Site:
    """One gather of the program; in a jit that is called twice, it is kept for both calls or none.

    `reductions` has, by the id of an equation that reads the gathered value, the name of its
    primitive and that of the collective in its place: ("reduce_sum", "psum").
    """

    eqn: JaxprEqn
    reductions: dict[int, tuple[str, str]] = dataclasses.field(default_factory=dict)
    reason: str = ""  # why the gather is kept, the first one; "" if it gives way
    forced_by: JaxprEqn | None = None  # the equation that keeps it

    def keep(self, reason: str, forced_by: JaxprEqn) -> None:
        """Keep the gather from the next walk on; the first reason is the one that is reported."""
        if not self.reason:
            self.reason, self.forced_by = reason, forced_by

    def finding(self) -> PassFinding:
        """Return what a report says: "all_gather over 'i', reduce_sum: one psum", or "is kept"."""
        code, line = _codes.ALL_GATHER_THEN_REDUCE, interpreter.source_line(self.eqn)
        gather = f"all_gather over {gather_rules.spell_axes(interpreter.named_axes(self.eqn))}"
        if self.forced_by is not None:
            what = f"{gather}{f' ({line})' if line else ''} is kept"
            forced_at = interpreter.source_line(self.forced_by)
            return PassFinding(code, "refused", what, self.reason, forced_at)
        primitives = dict.fromkeys(primitive for primitive, _ in self.reductions.values())
        counts = collections.Counter(collective for _, collective in self.reductions.values())
        emitted = [f"one {name}" if n == 1 else f"{n} {name}s" for name, n in counts.items()]
        what = f"{gather}, {' and '.join(primitives)}: {' and '.join(emitted)}"
        return PassFinding(code, "rewritten", what, "", line)


class _Body(Builder):
    """A body that is being changed; those of jits in it are written out in their place.

    Args:
      source: the jaxpr that is changed.
      sizes: of the axes of the shard_maps around it.
      check_vma: of the innermost of these.
    """

    def __init__(self, source: Any, sizes: Mapping[Any, int], *, check_vma: bool):
        super().__init__(source)
        self.sizes, self.check_vma = sizes, check_vma
        self.scope: Same = frozenset(sizes)
        self.facts: Facts = {}  # along which axes values of the jaxpr that is walked are the same
        # The outermost call of a function of JAX's own around it: its line is the user's.
        self.jax_call: JaxprEqn | None = None


class _Walk:
    """Repeated walks over one program; the last, which keeps no further gather, is the result.

    `gathering` has the ids of its all_gathers, and of the equations with one in a body.
    """

    def __init__(self, gathering: Collection[int], *, exact: bool):
        self.sites: dict[int, _Site] = {}  # by the id of the gather, in program order
        self._exact = exact
        self._gathering = gathering
        self._invariance = Invariance()
        self._traces: dict[Hashable, ClosedJaxpr] = {}

    def count_kept(self) -> int:
        """Return how many gathers the walks so far have found to be kept."""
        return sum(bool(site.reason) for site in self.sites.values())

    def rewrite(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """Return the program without the gathers that no walk so far has found to be kept."""
        for site in self.sites.values():
            site.reductions.clear()
        body = _Body(jaxpr, {}, check_vma=False)
        return self._change_body("program", [NOWHERE] * len(jaxpr.in_avals), body)

    def _change_body(self, name: str, inputs: Sequence[Same], body: _Body) -> Any:
        """Add the changed equations of its source to a new `body`; return the jaxpr.

        Its results keep their types, so a gather that reaches one is kept: it "leaves the scan
        whole", with "scan" as `name`. `inputs` has the axes along which each input is the same.
        """
        source = interpreter.open_jaxpr(body.source)
        self._add_equations(source, inputs, body)
        outvars = body.read_all(source.outvars)
        for number, value in enumerate(outvars):
            if isinstance(value, Deferred):
                value.keep(f"the gathered value leaves the {name} whole", value.made_by)
                outvars[number] = source.outvars[number]
        return body.finish(outvars)

    def _add_equations(self, source: Any, inputs: Sequence[Same], body: _Body) -> None:
        """Add the equations of the jaxpr `source` to `body`, with its gathers deferred.

        Of `g = all_gather x; s = sin g; r = reduce_sum s` that is `s = sin x; t = reduce_sum s; r =
        psum t`. `inputs` has the axes along which each input of `source` is the same.
        """
        body.facts = self._invariance.facts(source, inputs, body.scope)
        for eqn in source.eqns:
            operands = body.read_all(eqn.invars)
            has_gather = id(eqn) in self._gathering  # it is one, or has one in a body
            has_deferred = any(isinstance(operand, Deferred) for operand in operands)
            if not has_deferred and not has_gather:
                body.copy(eqn, operands)
            elif _is_gather(eqn):
                self._defer(eqn, operands, body)
            elif body.scope and record_of(eqn).call == "inline":
                self._inline(eqn, operands, body)
            elif not interpreter.bodies(eqn):
                try:
                    self._apply_rule(eqn, operands, body)
                except NeedsWhole as reason:
                    body.copy(eqn, self._keep_operands(eqn, operands, str(reason), body))
            else:
                why = "takes the gathered value whole: reduce before it, or gather inside"
                operands = self._keep_operands(eqn, operands, f"{_name_for_users(eqn)} {why}", body)
                body.copy(self._change_bodies(eqn, body) if has_gather else eqn, operands)

    def _change_bodies(self, eqn: JaxprEqn, body: _Body) -> JaxprEqn:
        """Return a loop, branch or shard_map of `body` with the gathers in its bodies reduced."""
        sizes, check_vma, name = body.sizes, body.check_vma, _name_for_users(eqn)
        if _compat.name_of(eqn) == "shard_map":  # collectives inside may go over its axes, too
            shape, check_vma = eqn.params["mesh"].shape, eqn.params["check_vma"]
            sizes = {**sizes, **{axis: shape[axis] for axis in eqn.params["newly_manual_axes"]}}
        operands = same_of(eqn.invars, body.facts, body.scope)
        inputs = self._invariance.body_inputs(eqn, operands, body.scope)
        inputs_of = dict(zip(map(id, interpreter.bodies(eqn)), inputs, strict=True))

        def change(inner: Any) -> Any:
            new_body = _Body(inner, sizes, check_vma=check_vma)
            return self._change_body(name, inputs_of[id(inner)], new_body)

        return interpreter.with_bodies(eqn, change)

    def _inline(self, eqn: JaxprEqn, values: Values, body: _Body) -> None:
        """Add the equations of a jit in its place: deferred `values` go in, and results out."""
        (jaxpr,) = interpreter.bodies(eqn)
        facts, jax_call = body.facts, body.jax_call
        body.jax_call = jax_call or (eqn if _is_of_jax(jaxpr) else None)
        opened = body.enter(jaxpr, values)
        self._add_equations(opened, same_of(eqn.invars, facts, body.scope), body)
        body.facts, body.jax_call = facts, jax_call
        body.env.update(zip(eqn.outvars, body.read_all(opened.outvars), strict=True))

    def _defer(self, eqn: JaxprEqn, values: Values, body: _Body) -> None:
        """Replace an all_gather by a `Deferred` of its operand; copy it if it is kept.

        Tiled, it concatenates the operands of all devices; else it stacks them, so the block gets a
        new dimension of length 1. `values` has the operand.
        """
        dim, tiled = int(eqn.params["all_gather_dimension"]), eqn.params["tiled"]
        is_nested = isinstance(values[0], Deferred)
        values = self._keep_operands(eqn, values, "all_gather needs the whole gathered value", body)
        site = self.sites.setdefault(id(eqn), _Site(eqn))
        user_eqn = body.jax_call or eqn  # the equation whose line the user knows
        if eqn.params["axis_index_groups"] is not None:
            site.keep("it gathers in groups of devices", user_eqn)
        axes, size = interpreter.named_axes(eqn), eqn.params["axis_size"]
        if site.reason or is_nested or size == 1:
            body.copy(eqn, values)
            return
        take = lambda xs: [_block_of(xs[0], None if tiled else dim)]
        (block,) = self._trace(("block", dim, tiled), take, eqn, values, body)
        body.env[eqn.outvars[0]] = Deferred(block, dim, axes, size, (site,), user_eqn)

    def _apply_rule(self, eqn: JaxprEqn, values: Values, body: _Body) -> None:
        """Add an equation with deferred (gathered) operands, by the rule of its primitive.

        It becomes the same equation on blocks, with deferred results: of `sin(g)`, the sine of each
        device's block. Or a reduction over devices, with a whole result: of a sum along the
        gathered dimension, the sum of the block and then a psum. `values` are the operands.

        Raises:
          NeedsWhole: there is no sound rule, so the gathers behind it have to be kept.
        """
        if self._exact and _may_round(eqn):
            raise NeedsWhole("gathers='exact': a sum in another order may differ in the last bits")
        operands = [value if isinstance(value, Deferred) else None for value in values]
        result = gather_rules.apply_rule(eqn, operands)
        gathered = [operand for operand in operands if operand is not None]
        blocks = self._blocks_of_operands(eqn, values, gathered[0], body)
        sites = tuple({site: None for deferred in gathered for site in deferred.sites})
        if isinstance(result, Blockwise):
            dim, axes, size = result.dim, gathered[0].axes, gathered[0].size
            outvars = [Var(gathered[0].block_type(var.aval, dim)) for var in eqn.outvars]
            params = {**eqn.params, **result.params}
            body.eqns.append(eqn.replace(invars=blocks, outvars=outvars, params=params))
            user_eqn = body.jax_call or eqn
            for var, block in zip(eqn.outvars, outvars, strict=True):
                body.env[var] = Deferred(block, dim, axes, size, sites, user_eqn)
            return
        (out,) = eqn.outvars
        out_type: Any = out.aval
        varying = _compat.varying_axes(out_type)
        compute = lambda xs: [_mark_varying(result.compute(eqn, xs), varying)]
        key = (eqn.primitive, *eqn.params.items(), gathered[0].axes, varying)
        (reduced,) = self._trace(key, compute, eqn, blocks, body)
        if reduced.aval.weak_type != out_type.weak_type:  # as of a gathered Python number
            raise NeedsWhole(f"{_compat.name_of(eqn)} over devices gives another type")
        body.env[out] = reduced
        for site in sites:
            site.reductions[id(eqn)] = _compat.name_of(eqn), result.collective

    def _blocks_of_operands(
        self, eqn: JaxprEqn, values: Values, gathered: Deferred, body: _Body
    ) -> list[Atom]:
        """Return what an equation on blocks takes in place of its operands `values`.

        A deferred operand gives its block. A whole one is sliced to this device's block: for `mul g
        w` with g gathered from 8 devices to `[8, 3]`, the weights w, `[8, 1]`, to `[1, 1]`. What
        has no dimension to slice, as 2.0, stays. `gathered` is one of the deferred operands.

        Raises:
          NeedsWhole: a whole operand may differ between devices.
        """
        blocks: list[Atom] = []
        for position, value in enumerate(values):
            if isinstance(value, Deferred):
                blocks.append(value.block)
                continue
            (same,) = same_of([eqn.invars[position]], body.facts, body.scope)
            if different := [axis for axis in gathered.axes if axis not in same]:
                raise NeedsWhole(
                    f"{_compat.name_of(eqn)} mixes the gathered value with one that may differ "
                    f"between the devices of {gather_rules.spell_axes(different)}"
                )
            dim = gather_rules.dimension_to_slice(eqn, position, gathered)
            if dim is not None:
                take = lambda xs, dim=dim: [gathered.take_block(xs[0], dim)]
                key = ("take", dim, gathered.axes, gathered.size)
                (value,) = self._trace(key, take, eqn, [value], body)
            blocks.append(value)
        return blocks

    def _trace(
        self,
        key: Hashable,
        compute: Callable[[Values], Values],
        eqn: JaxprEqn,
        atoms: Sequence[Atom],
        body: _Body,
    ) -> list[Atom]:
        """Trace `compute` on values of the types of `atoms`, and add its equations to the body.

        They get the source line of `eqn`. The trace is cached by `key`, which must tell apart all
        that `compute` closes over, and by the types and axes. Returns the atoms of the results.
        """
        avals, sizes = tuple(atom.aval for atom in atoms), list(body.sizes.items())
        trace_key = (key, avals, *sizes, body.check_vma, eqn.ctx)
        if trace_key not in self._traces:
            with eqn.ctx.manager, _compat.typed_collectives(check_vma=body.check_vma):
                self._traces[trace_key] = jax.make_jaxpr(
                    lambda *values: compute(list(values)), axis_env=sizes
                )(*avals)
        return body.add(self._traces[trace_key], atoms, source_info=eqn.source_info)

    def _keep_operands(self, eqn: JaxprEqn, values: Values, why: str, body: _Body) -> Values:
        """Mark the gathers behind the operands of an equation as kept; return the operands, whole.

        For a deferred operand that is the variable of the user's program. The result of this walk
        may lack its equation, but is thrown away: the next walk copies the gather.
        """
        for atom, value in zip(eqn.invars, values, strict=True):
            if isinstance(value, Deferred):
                value.keep(why, body.jax_call or eqn)
                body.env.pop(atom, None)
        return body.read_all(eqn.invars)


def _is_gather(eqn: JaxprEqn) -> bool:
    return eqn.primitive is lax.all_gather_p


def _block_of(value: Any, new_dimension: int | None) -> Any:
    """Return this device's block of a gathered value, with `new_dimension` of length 1 if not None.

    XLA computes in float32 between operations of a smaller type, where it fuses them. A gather
    ends that, because what is sent has been rounded; the barrier rounds the block in the same way.
    """
    if gather_rules.is_low_precision(value.dtype):
        value = lax.optimization_barrier(value)
    return value if new_dimension is None else lax.expand_dims(value, [new_dimension])


def _may_round(eqn: JaxprEqn) -> bool:
    """Return whether the last bits of a result may depend on the order of operations."""
    avals: list[Any] = [var.aval for var in eqn.outvars]
    return not record_of(eqn).exact and any(jnp.issubdtype(a.dtype, jnp.inexact) for a in avals)


def _mark_varying(value: Any, axes: frozenset[Any]) -> Any:
    """Return the value typed as varying along these axes: a psum is invariant, a gather is not."""
    missing = sorted(axes - _compat.varying_axes(jax.typeof(value)), key=str)
    return lax.pcast(value, tuple(missing), to="varying") if missing else value


def _name_for_users(eqn: JaxprEqn) -> str:
    """Return the name of an equation in the user's code: "relu" of a custom_jvp_call."""
    name, call = _compat.name_of(eqn), record_of(eqn).call
    if call == "ruled":
        return interpreter.open_jaxpr(interpreter.bodies(eqn)[0]).debug_info.func_name or name
    return "checkpoint" if call == "checkpoint" else "while loop" if name == "while" else name


def _is_of_jax(jaxpr: Any) -> bool:
    """Return whether the body of a jit is a helper of jax itself, such as jnp.var.

    JAX traces it once, so its equations bear the line of its first caller, not of this call.
    """
    file = interpreter.open_jaxpr(jaxpr).debug_info.func_filename
    return (file or "").startswith(os.path.dirname(jax.__file__) + os.sep)
