"""Gathers whose result is only reduced become one reduction over devices.

An all_gather is deferred: until something needs its result whole, only this device's block of it is
computed (a `DeferredGather`, see `gather_rules`). The jaxpr is changed equation by equation;
nothing is traced but the reductions over devices, each once for its types. A gather whose result is
needed whole stays as it was ("is kept"), so the walk is repeated without deferring it.
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
from jax_dist._passes.gather_rules import DeferredGather, NeedsWhole, Reduction
from jax_dist._passes.interpreter import Atom, Builder, Values, record_of
from jax_dist._passes.uniformity import NO_AXES, Axes, ReplicationAnalysis, look_up_axes

Gathers: TypeAlias = typing.Literal["reduce", "exact", "keep"]


def plan_gathers(jaxpr: ClosedJaxpr, *, exact: bool) -> PassPlan:
    """Replace the gathers of a program whose results are only reduced by reductions over devices.

    Returns the changed jaxpr, or None if there is no such gather, and the findings for a report:
    which gathers are replaced, and why others are not. If `exact`, no bit of a result changes.
    """
    if not any(map(_is_gather, interpreter.equations(jaxpr))):
        return PassPlan(None)
    gathering = {id(e) for e in interpreter.equations(jaxpr) if interpreter.holds(e, _is_gather)}
    walk = _Walk(gathering, exact=exact)
    # A walk leaves a gather out, and may find later that an equation needs its whole result. Then
    # another walk over the original jaxpr keeps it, until one finds no more gathers to keep.
    changed, count_before = walk.rewrite(jaxpr), 0
    while (count := sum(bool(site.reason) for site in walk.sites.values())) > count_before:
        changed, count_before = walk.rewrite(jaxpr), count
    sites = walk.sites.values()
    findings = [site.to_finding() for site in sites if site.reason or site.reductions]
    is_changed = any(site.reductions for site in sites)
    return PassPlan(changed if is_changed else None, tuple(dict.fromkeys(findings)))


@dataclasses.dataclass(slots=True, eq=False)
class _GatherSite:
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

    def to_finding(self) -> PassFinding:
        """Return what a report says of the gather.

        "all_gather over 'i', reduce_sum: one psum" if it was removed; else "all_gather over 'i'
        (train.py:9) is kept", with the reason and the line of the equation that needs it whole.
        """
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
    """A jaxpr that is being changed, from `source`; jits in it are replaced by their equations.

    `axis_sizes` are of the axes of the shard_maps around it, `check_vma` is of the innermost.
    """

    def __init__(self, source: Any, axis_sizes: Mapping[Any, int], *, check_vma: bool):
        super().__init__(source)
        self.axis_sizes, self.check_vma = axis_sizes, check_vma
        self.manual_axes: Axes = frozenset(axis_sizes)
        # By variable of the jaxpr that is walked: the mesh axes along which it is replicated.
        self.replicated_axes: Mapping[Any, Axes] = {}
        # The outermost call of a function of JAX's own around it: its line is the user's.
        self.jax_call: JaxprEqn | None = None

    def look_up_axes(self, atoms: Sequence[Atom]) -> list[Axes]:
        """Return for each operand of an equation the mesh axes along which it is replicated."""
        return look_up_axes(atoms, self.replicated_axes, self.manual_axes)


class _Walk:
    """Repeated walks over one program; the last, which keeps no further gather, is the result.

    `gathering` has the ids of its all_gathers, and of the equations with one in a body.
    """

    def __init__(self, gathering: Collection[int], *, exact: bool):
        self.sites: dict[int, _GatherSite] = {}  # by the id of the gather, in program order
        self._exact = exact
        self._gathering = gathering
        self._replication = ReplicationAnalysis()
        self._traces: dict[Hashable, ClosedJaxpr] = {}

    def rewrite(self, jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        """Return the program without the gathers that no walk so far has found to be kept."""
        for site in self.sites.values():
            site.reductions.clear()
        body = _Body(jaxpr, {}, check_vma=False)
        return self._change_body("program", [NO_AXES] * len(jaxpr.in_avals), body)

    def _change_body(self, name: str, inputs: Sequence[Axes], body: _Body) -> Any:
        """Return the jaxpr `body.source`, of a scan for example, with its gathers replaced.

        Its results stay whole, so a gather that is one of them is kept: "the gathered value leaves
        the scan whole", with "scan" as `name`. `inputs` has the mesh axes along which each input is
        replicated. The new equations are added to `body`, which has none so far.
        """
        source = interpreter.open_jaxpr(body.source)
        self._add_equations(source, inputs, body)
        outvars = body.read_all(source.outvars)
        for number, value in enumerate(outvars):
            if isinstance(value, DeferredGather):
                value.keep_gathers(f"the gathered value leaves the {name} whole", value.user_eqn)
                # A placeholder: this jaxpr is not used, as the next walk keeps the gather.
                outvars[number] = source.outvars[number]
        return body.finish(outvars)

    def _add_equations(self, source: Any, inputs: Sequence[Axes], body: _Body) -> None:
        """Add the equations of the jaxpr `source` to `body`, without its all_gathers.

        Each device computes with its own block `x` of the gathered value `g`, until a reduction
        needs those of all: `g = all_gather x; s = sin g; r = reduce_sum s` becomes `s = sin x; t =
        reduce_sum s; r = psum t`. Until then, `body` has a `DeferredGather` for g and s. `inputs`
        has the mesh axes along which each input of `source` is replicated.
        """
        body.replicated_axes = self._replication.analyze_values(source, inputs, body.manual_axes)
        for eqn in source.eqns:
            operands = body.read_all(eqn.invars)
            has_gather = id(eqn) in self._gathering  # it is one, or has one in a body
            if not has_gather and not any(isinstance(x, DeferredGather) for x in operands):
                body.copy(eqn, operands)
            elif _is_gather(eqn):
                self._defer_gather(eqn, operands, body)
            elif body.manual_axes and record_of(eqn).call == "inline":
                self._inline_jit(eqn, operands, body)
            elif interpreter.bodies(eqn):
                self._add_with_bodies(eqn, operands, body)
            else:
                try:
                    self._add_on_blocks(eqn, operands, body)
                except NeedsWhole as reason:
                    body.copy(eqn, self._keep_gathers(eqn, operands, str(reason), body))

    def _add_with_bodies(self, eqn: JaxprEqn, operands: Values, body: _Body) -> None:
        """Add a loop, branch or shard_map to `body`, without the gathers inside its own bodies.

        Operands that come from a gather outside are taken whole, so that gather is kept.
        """
        name = _name_for_users(eqn)
        why = f"{name} takes the gathered value whole: reduce before it, or gather inside"
        operands = self._keep_gathers(eqn, operands, why, body)
        if id(eqn) not in self._gathering:  # no gather inside
            body.copy(eqn, operands)
            return
        axis_sizes, check_vma = body.axis_sizes, body.check_vma
        if _compat.name_of(eqn) == "shard_map":  # collectives inside may go over its axes, too
            shape, check_vma = eqn.params["mesh"].shape, eqn.params["check_vma"]
            new_sizes = {axis: shape[axis] for axis in eqn.params["newly_manual_axes"]}
            axis_sizes = {**axis_sizes, **new_sizes}
        replicated = body.look_up_axes(eqn.invars)
        inputs = self._replication.analyze_body_inputs(eqn, replicated, body.manual_axes)
        inputs_of = dict(zip(map(id, interpreter.bodies(eqn)), inputs, strict=True))

        def change(inner: Any) -> Any:
            new_body = _Body(inner, axis_sizes, check_vma=check_vma)
            return self._change_body(name, inputs_of[id(inner)], new_body)

        body.copy(interpreter.with_bodies(eqn, change), operands)

    def _inline_jit(self, eqn: JaxprEqn, operands: Values, body: _Body) -> None:
        """Add the equations of a jit to `body`, so that gathered values can enter and leave it."""
        (jaxpr,) = interpreter.bodies(eqn)
        outer_axes, outer_call = body.replicated_axes, body.jax_call
        inputs = body.look_up_axes(eqn.invars)
        if outer_call is None and _is_of_jax(jaxpr):  # as jnp.var, whose call has the user's line
            body.jax_call = eqn
        opened = body.enter(jaxpr, operands)
        self._add_equations(opened, inputs, body)
        body.env.update(zip(eqn.outvars, body.read_all(opened.outvars), strict=True))
        body.replicated_axes, body.jax_call = outer_axes, outer_call

    def _defer_gather(self, eqn: JaxprEqn, operands: Values, body: _Body) -> None:
        """Leave out an all_gather: let its result be a `DeferredGather` of this device's operand.

        `all_gather(x)` on 8 devices, `[3] -> [8, 3]`, stacks the operands of all, so the block of
        each is `[1, 3]`; if it is tiled, `[3] -> [24]`, it concatenates them, and the block is x. A
        gather is copied if an earlier walk has found that its whole result is needed.
        """
        dim, tiled = int(eqn.params["all_gather_dimension"]), eqn.params["tiled"]
        is_nested = isinstance(operands[0], DeferredGather)
        why = "all_gather needs the whole gathered value"  # of another one
        operands = self._keep_gathers(eqn, operands, why, body)
        site = self.sites.setdefault(id(eqn), _GatherSite(eqn))
        user_eqn = body.jax_call or eqn  # the equation whose line the user knows
        if eqn.params["axis_index_groups"] is not None:
            site.keep("it gathers in groups of devices", user_eqn)
        axes, size = interpreter.named_axes(eqn), eqn.params["axis_size"]
        if site.reason or is_nested or size == 1:
            body.copy(eqn, operands)
            return
        make_block = lambda xs: [_make_block(xs[0], None if tiled else dim)]
        (block,) = self._add_traced(("block", dim, tiled), make_block, eqn, operands, body)
        body.env[eqn.outvars[0]] = DeferredGather(block, dim, axes, size, (site,), user_eqn)

    def _add_on_blocks(self, eqn: JaxprEqn, operands: Values, body: _Body) -> None:
        """Add an equation with a gathered operand, to run on each device's block of that.

        The rule of its primitive says how. Of g, gathered from 8 devices to `[8, 3]`, `sin g`
        becomes the sine of the block, `[1, 3]`, and its result is a `DeferredGather` again. A sum
        over the gathered dimension becomes the sum of the block and a psum; that result is whole.
        NeedsWhole is raised if no rule gives the same result, so that the gathers have to be kept.
        """
        if self._exact and _may_round(eqn):
            raise NeedsWhole("gathers='exact': a sum in another order may differ in the last bits")
        deferred = [x if isinstance(x, DeferredGather) else None for x in operands]
        rule = gather_rules.find_rule(eqn, deferred)
        gathered = [operand for operand in deferred if operand is not None]
        sites = tuple(dict.fromkeys(site for operand in gathered for site in operand.sites))
        first = gathered[0]  # the others are gathered over the same axes
        blocks = self._take_blocks(eqn, operands, first, body)
        if isinstance(rule, Reduction):
            self._add_reduction(eqn, rule, blocks, first.axes, body)
            for site in sites:
                site.reductions[id(eqn)] = _compat.name_of(eqn), rule.collective
            return
        outvars = [Var(first.block_type(var.aval, rule.dim)) for var in eqn.outvars]
        params = {**eqn.params, **rule.params}
        body.eqns.append(eqn.replace(invars=blocks, outvars=outvars, params=params))
        origin = body.jax_call or eqn
        for var, block in zip(eqn.outvars, outvars, strict=True):
            body.env[var] = DeferredGather(block, rule.dim, first.axes, first.size, sites, origin)

    def _add_reduction(
        self, eqn: JaxprEqn, rule: Reduction, blocks: Values, mesh_axes: Sequence[Any], body: _Body
    ) -> None:
        """Add a reduction of blocks and over devices, as a sum and a psum, in place of `eqn`."""
        (out,) = eqn.outvars
        out_type: Any = out.aval
        varying = _compat.varying_axes(out_type)
        compute = lambda xs: [_mark_varying(rule.compute(eqn, xs), varying)]
        key = (eqn.primitive, *eqn.params.items(), mesh_axes, varying)
        (reduced,) = self._add_traced(key, compute, eqn, blocks, body)
        if reduced.aval.weak_type != out_type.weak_type:  # as of a gathered Python number
            raise NeedsWhole(f"{_compat.name_of(eqn)} over devices gives another type")
        body.env[out] = reduced

    def _take_blocks(
        self, eqn: JaxprEqn, operands: Values, gathered: DeferredGather, body: _Body
    ) -> list[Atom]:
        """Return this device's block of each operand of an equation.

        In `mul g w`, with g gathered from 8 devices to `[8, 3]`, that is the block of g, `[1, 3]`,
        and a slice of w: `[1, 1]` of `[8, 1]`. An operand without that dimension, as 2.0, is taken
        whole. `gathered` is one of the gathered operands. NeedsWhole is raised if one that is not
        gathered may differ between devices.
        """
        blocks: list[Atom] = []
        for position, operand in enumerate(operands):
            if isinstance(operand, DeferredGather):
                blocks.append(operand.block)
                continue
            (replicated,) = body.look_up_axes([eqn.invars[position]])
            if different := [axis for axis in gathered.axes if axis not in replicated]:
                raise NeedsWhole(
                    f"{_compat.name_of(eqn)} mixes the gathered value with one that may differ "
                    f"between the devices of {gather_rules.spell_axes(different)}"
                )
            dim = gather_rules.find_dim_to_slice(eqn, position, gathered)
            if dim is not None:
                take_slice = lambda xs, dim=dim: [gathered.take_block(xs[0], dim)]
                key = ("take", dim, gathered.axes, gathered.size)
                (operand,) = self._add_traced(key, take_slice, eqn, [operand], body)
            blocks.append(operand)
        return blocks

    def _add_traced(
        self,
        key: Hashable,
        compute: Callable[[Values], Values],
        eqn: JaxprEqn,
        operands: Sequence[Atom],
        body: _Body,
    ) -> list[Atom]:
        """Add the equations of the JAX function `compute`, applied to `operands`, to `body`.

        Returns the variables of its results. The new equations get the context and source line of
        `eqn`, in whose place they are. Functions with the same `key` compute the same, so one trace
        serves all of them that have operands of the same types.
        """
        avals, axis_sizes = tuple(x.aval for x in operands), list(body.axis_sizes.items())
        trace_key = (key, avals, *axis_sizes, body.check_vma, eqn.ctx)
        if trace_key not in self._traces:
            with eqn.ctx.manager, _compat.typed_collectives(check_vma=body.check_vma):
                self._traces[trace_key] = jax.make_jaxpr(
                    lambda *values: compute(list(values)), axis_env=axis_sizes
                )(*avals)
        return body.add(self._traces[trace_key], operands, source_info=eqn.source_info)

    def _keep_gathers(self, eqn: JaxprEqn, operands: Values, why: str, body: _Body) -> Values:
        """Mark the gathers that the operands come from to be kept: `eqn` needs the whole values.

        Returns the operands, with the original variable in place of a `DeferredGather`. This walk
        computes no value for it, but its program is not used: the next walk copies the gather.
        """
        for atom, operand in zip(eqn.invars, operands, strict=True):
            if isinstance(operand, DeferredGather):
                operand.keep_gathers(why, body.jax_call or eqn)
                body.env.pop(atom, None)
        return body.read_all(eqn.invars)


def _is_gather(eqn: JaxprEqn) -> bool:
    return eqn.primitive is lax.all_gather_p


def _make_block(value: Any, new_dimension: int | None) -> Any:
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
    if call == "custom_rule":
        return interpreter.open_jaxpr(interpreter.bodies(eqn)[0]).debug_info.func_name or name
    return "checkpoint" if call == "checkpoint" else "while loop" if name == "while" else name


def _is_of_jax(jaxpr: Any) -> bool:
    """Return whether the body of a jit is a helper of jax itself, such as jnp.var.

    JAX traces it once, so its equations bear the line of its first caller, not of this call.
    """
    file = interpreter.open_jaxpr(jaxpr).debug_info.func_filename
    return (file or "").startswith(os.path.dirname(jax.__file__) + os.sep)
