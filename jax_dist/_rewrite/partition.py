"""custom_partitioning: a `jax.shard_map` around the op's own lowering, as the compiler shards it.

`partition` of the op is asked here, with the shardings that Shardy chooses for the call, and no
longer in the compiler. So the program holds the op's body and no address of a Python object, and
its cache key is the same in each process.

The function that `partition` returns is wrapped, not the body of the op: that one is written for
global arrays, and gives other numbers on blocks.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _codes, _compat
from jax_dist._rewrite import interpreter, propagation
from jax_dist._rewrite.interpreter import Atom, EquationPlace, Values, names_of
from jax_dist._rewrite.pipeline import Outcome, PassFinding, PassPlan
from jax_dist._rewrite.propagation import CallLayout
from jax_dist.errors import ArgumentError

_Specs: TypeAlias = Mapping[str, tuple[Any, Any]]  # name of an op: (in_specs, out_specs)


@dataclasses.dataclass(frozen=True)
class _Route:
    """A shard_map in the place of a call."""

    op: str
    mesh: Mesh
    lower: Callable[..., Any]  # of blocks, in the trees of the op
    in_tree: Any
    chosen: CallLayout  # how the program shards the values of the call
    taken: CallLayout  # how partition() wants them

    def __call__(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run the op on global arrays, as the call does."""

        def body(*blocks: jax.Array) -> Values:
            return jax.tree.leaves(self.lower(*self.in_tree.unflatten(blocks)))

        body.__name__ = body.__qualname__ = self.op
        mapped = jax.shard_map(
            body,
            mesh=self.mesh if jax.sharding.get_abstract_mesh().empty else None,
            in_specs=self.taken.operands,
            out_specs=list(self.taken.results),
            check_vma=False,
        )
        # As chosen first, even if moved right after: else the rest of the program, which follows
        # the shardings of these values, would be sharded in another way than before.
        operands = self._constrain(values, self.chosen.operands, self.taken.operands)
        if _is_explicit(self.mesh):
            operands = map(self._shard, operands, self.taken.operands)
        return self._constrain(mapped(*operands), self.chosen.results, self.taken.results)

    def __str__(self) -> str:
        operands, results = (
            ", ".join(f"P({', '.join(map(repr, spec))})" for spec in specs)
            for specs in (self.taken.operands, self.taken.results)
        )
        return f"shard_map, ({operands}) -> ({results})"

    @property
    def is_whole(self) -> bool:
        """True if all values are replicated."""
        return not any(map(any, (*self.chosen.operands, *self.chosen.results)))

    def skip_detours(self, eqn: JaxprEqn, internal: Collection[int]) -> "_Route":
        """Return the route that takes and gives `internal` values as partition() wants them.

        The compiler does so as well, and makes each constant in the form that is wanted.
        """
        chosen, taken = self.chosen, self.taken
        operands = [
            there if number in chosen.constants or id(atom) in internal else here
            for number, (atom, here, there) in enumerate(
                zip(eqn.invars, chosen.operands, taken.operands, strict=True)
            )
        ]
        results = [
            there if id(var) in internal else here
            for var, here, there in zip(eqn.outvars, chosen.results, taken.results, strict=True)
        ]
        return dataclasses.replace(self, chosen=CallLayout(tuple(operands), tuple(results)))

    def _constrain(self, values: Values, chosen: Sequence[P], taken: Sequence[P]) -> Values:
        triples = zip(values, chosen, taken, strict=True)
        return [self._shard(x, spec) if spec != other else x for x, spec, other in triples]

    def _shard(self, x: jax.Array, spec: P) -> jax.Array:
        # Under jax.set_mesh, the mesh of the context is the one to name.
        is_outside = jax.sharding.get_abstract_mesh().empty
        sharding = NamedSharding(self.mesh, spec) if is_outside else spec
        if _is_explicit(self.mesh):
            return jax.sharding.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, sharding)


def plan_partitioning(
    jaxpr: ClosedJaxpr,
    *,
    mesh: Mesh | None,
    in_shardings: Sequence[NamedSharding | None],
    specs: _Specs | None = None,
) -> PassPlan:
    """Route each custom_partitioning equation of a program through `jax.shard_map`.

    Args:
      jaxpr: the program.
      mesh: what it runs on; None: the one mesh that the arguments or the program mention.
      in_shardings: one for each input of the jaxpr; None where it is not known.
      specs: by the name of an op, the specs of its operands (a sequence) and of its results (one,
        or a sequence), in place of those that the compiler would choose.

    Returns:
      The plan. It changes nothing where there is no such equation, or only one device.

    Raises:
      ArgumentError: `specs` does not fit the op, or the mesh, or names an op that is not there.
    """
    specs = specs or {}
    if not interpreter.contains(jaxpr, propagation.is_partitioned):
        return PassPlan(None)
    program = propagation.inline_jits(jaxpr)
    sites = list(interpreter.places(program, propagation.is_partitioned))
    if unknown := [name for name in specs if name not in map(_name_of, sites)]:
        raise ArgumentError(
            f"specs= names {', '.join(map(repr, unknown))}, but the custom_partitioning operations "
            f"of the program are {', '.join(map(repr, dict.fromkeys(map(_name_of, sites))))}."
        )
    meshes = propagation.meshes_of(jaxpr, in_shardings) if mesh is None else [mesh]
    if len(meshes) > 1:
        why = "the program uses several meshes: choose one by mesh="
        return PassPlan(None, tuple(_refuse(site, why) for site in sites))
    if not meshes or meshes[0].size == 1:
        return PassPlan(None)  # there JAX puts the body of the op into the program itself
    asked = [site.eqn for site in sites if _name_of(site) not in specs]
    layouts = propagation.layouts_of(program, asked, meshes[0], in_shardings)
    for site in sites:
        if _name_of(site) in specs:
            layouts[id(site.eqn)] = _given_layout(site, *specs[_name_of(site)])
    routes, findings = _routes(sites, layouts, meshes[0], specs)
    if not routes:
        return PassPlan(None, tuple(findings))
    routed = [site for site in sites if id(site.eqn) in routes]
    internal = _internal_values(routed)
    handlers = {
        id(site.eqn): routes[id(site.eqn)].skip_detours(site.eqn, internal) for site in routed
    }
    if not any(in_shardings):
        whole = [site for site in routed if routes[id(site.eqn)].is_whole]
        findings += [_note_unknown(site) for site in whole if _name_of(site) not in specs]
    evaluate = lambda *args: interpreter.run_at(program, args, lambda eqn: handlers.get(id(eqn)))
    return PassPlan(evaluate, tuple(findings))


def _routes(
    sites: Sequence[EquationPlace],
    layouts: Mapping[int, CallLayout | str],
    mesh: Mesh,
    specs: _Specs,
) -> tuple[dict[int, _Route], list[PassFinding]]:
    """Return the routes of the sites that have a layout, by the identity of their equation."""
    routes: dict[int, _Route] = {}
    findings: list[PassFinding] = []
    for site in sites:
        if id(site.eqn) not in layouts:
            continue
        try:
            route = routes[id(site.eqn)] = _route(site, layouts[id(site.eqn)], mesh)
        except (NotImplementedError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0].rstrip(":.")
            if _name_of(site) in specs:
                raise ArgumentError(f"specs= do not fit {_name_of(site)!r}: {why}.") from error
            findings.append(_refuse(site, why))
        else:
            findings.append(_finding(site, "rewritten", str(route), ""))
    return routes, findings


def _given_layout(site: EquationPlace, in_specs: Sequence[P], out_specs: Any) -> CallLayout:
    """Return the layout of `specs=`."""
    results = (out_specs,) if isinstance(out_specs, P) else tuple(out_specs)
    counts = len(in_specs), len(results)
    if counts != (len(site.eqn.invars), len(site.eqn.outvars)):
        raise ArgumentError(
            f"specs= of {_name_of(site)!r} are for {counts[0]} operands and {counts[1]} results; "
            f"it has {len(site.eqn.invars)} (without static ones) and {len(site.eqn.outvars)}."
        )
    return CallLayout(_fill(in_specs, site.eqn.invars), _fill(results, site.eqn.outvars))


def _route(site: EquationPlace, layout: CallLayout | str, mesh: Mesh) -> _Route:
    """Ask the op's `partition` how it is computed on blocks, where the call lies by `layout`.

    Raises:
      ValueError: the answer cannot be said as a shard_map, or JAX raises it, as it may a TypeError
        or a NotImplementedError.
    """
    eqn, params = site.eqn, site.eqn.params
    if any(_compat.name_of(outer) == "shard_map" for outer in site.around):
        raise ValueError("it stands in a shard_map over some of the axes only, or another mesh")
    if isinstance(layout, str):
        raise ValueError(layout)
    if not params["decode_shardings"]:
        raise ValueError("its partition() asks for XLA's own shardings (decode_shardings=False)")
    if len(set(mesh.axis_types)) > 1:
        raise ValueError("the mesh has both Auto and Explicit axes")
    wanted: list[Any] = [var.aval for var in eqn.outvars]
    if _is_explicit(mesh):  # what the types say is what the program must get back
        typed = _fill([aval.sharding.spec for aval in wanted], eqn.outvars)
        layout = dataclasses.replace(layout, results=typed)
    operands = _shapes(eqn.invars, layout.operands, mesh)
    arguments = params["in_tree"].unflatten(operands)
    results = params["out_tree"].unflatten(_shapes(eqn.outvars, layout.results, mesh))
    _, lower, out_shardings, in_shardings = params["partition"](
        *params["static_args"], mesh, arguments, results
    )
    taken = CallLayout(
        _specs_of(params["in_tree"].flatten_up_to(in_shardings), eqn.invars, mesh),
        _specs_of(params["out_tree"].flatten_up_to(out_shardings), eqn.outvars, mesh),
    )
    route = _Route(_name_of(site), mesh, lower, params["in_tree"], layout, taken)
    traced = jax.make_jaxpr(lambda *args: route(eqn, list(args)))(*operands)
    if traced.consts and any(_compat.name_of(outer) == "remat2" for outer in site.around):
        raise ValueError("its lowering captures arrays, and jax.checkpoint around it holds none")
    made: list[Any] = traced.out_avals
    for result, aval in zip(made, wanted, strict=True):
        if (result.shape, result.dtype) != (aval.shape, aval.dtype) or aval.weak_type:
            weak = "weakly typed " if aval.weak_type else ""
            raise ValueError(
                f"its lowering gives {result.dtype}{list(result.shape)}, and the operation "
                f"{weak}{aval.dtype}{list(aval.shape)}"
            )
    return route


def _shapes(atoms: Sequence[Atom], specs: Sequence[P], mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype, sharding=NamedSharding(mesh, spec))
        for atom, spec in zip(atoms, specs, strict=True)
    ]


def _specs_of(shardings: Sequence[Any], atoms: Sequence[Atom], mesh: Mesh) -> tuple[P, ...]:
    """Return what partition() returned, as specs for shard_map."""
    for sharding in shardings:
        is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        if not is_on_mesh or P.UNCONSTRAINED in sharding.spec:
            raise ValueError(f"its partition() returns {sharding}, which shard_map cannot take")
    return _fill([sharding.spec for sharding in shardings], atoms)


def _fill(specs: Sequence[P], atoms: Sequence[Atom]) -> tuple[P, ...]:
    """Return the specs in their one form: an entry a dimension, and no tuple of one."""
    filled = []
    for spec, atom in zip(specs, atoms, strict=True):
        entries = [names_of(entry) for entry in spec]
        short = [axes[0] if len(axes) == 1 else axes or None for axes in entries]
        filled.append(P(*short, *[None] * (atom.aval.ndim - len(short))))
    return tuple(filled)


def _internal_values(sites: Sequence[EquationPlace]) -> set[int]:
    """Return the ids of the variables that routed calls make, and that only routed calls read."""
    internal = set()
    for site in sites:
        neighbours = {id(other.eqn) for other in sites if other.within is site.within}
        for var in site.eqn.outvars:
            readers = [eqn for eqn in site.within.eqns if any(atom is var for atom in eqn.invars)]
            is_returned = any(atom is var for atom in site.within.outvars)
            if readers and not is_returned and all(id(eqn) in neighbours for eqn in readers):
                internal.add(id(var))
    return internal


def _name_of(site: EquationPlace) -> str:
    """Return the name of the function that the user decorated."""
    return site.eqn.params["call"].jaxpr.debug_info.func_name


def _is_explicit(mesh: Mesh) -> bool:
    return AxisType.Explicit in mesh.axis_types


def _refuse(site: EquationPlace, why: str) -> PassFinding:
    return _finding(site, "refused", "left as it is", why)


def _note_unknown(site: EquationPlace) -> PassFinding:
    how = f"give specs={{{_name_of(site)!r}: (in_specs, out_specs)}}"
    why = f"nothing tells how its operands are sharded: {how}"
    return _finding(site, "noted", "every device computes all of it", why)


def _finding(site: EquationPlace, outcome: Outcome, what: str, why: str) -> PassFinding:
    what = f"custom_partitioning {_name_of(site)!r}: {what}"
    line = interpreter.source_line(site.eqn)
    return PassFinding(_codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP, outcome, what, why, line)
