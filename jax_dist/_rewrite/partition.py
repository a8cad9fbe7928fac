"""custom_partitioning: a `jax.shard_map` around the op's own lowering, cut as the compiler would.

`partition` of the op is asked here, with the shardings that Shardy chooses for the call, and no
longer in the compiler. So the program holds the op's body and no address of a Python object, and
its cache key is the same in each process.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _codes, _compat
from jax_dist._rewrite import interpreter, propagation
from jax_dist._rewrite.interpreter import Atom, EquationPlace, Path, Values, names_of
from jax_dist._rewrite.pipeline import Outcome, PassFinding, PassPlan
from jax_dist._rewrite.propagation import CallLayout, Unknown
from jax_dist.errors import ArgumentError

_Specs: TypeAlias = Mapping[str, tuple[Any, Any]]  # name of an op: (in_specs, out_specs)

_CODE = _codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP


class _RouteRefused(Exception):
    """A call stays as it is; the text is the reason."""


@dataclasses.dataclass(frozen=True)
class _Route:
    """A shard_map in the place of the call; layouts have one spec for each value, of full rank."""

    op: str
    mesh: Mesh
    axes: tuple[str, ...]  # of the mesh, without those that a shard_map around it has taken
    lower: Callable[..., Any]  # of blocks, in the trees of the op
    in_tree: Any
    chosen: CallLayout  # how its values lie in the program
    taken: CallLayout  # how its partition() wants them
    check_vma: bool  # as the shard_map around it; else False: the compiler tracks no such types

    def __call__(self, eqn: JaxprEqn, values: Values) -> Values:
        """Run the op on whole arrays, as the call does."""

        def body(*blocks: jax.Array) -> Values:
            return jax.tree.leaves(self.lower(*self.in_tree.unflatten(blocks)))

        body.__name__ = body.__qualname__ = self.op
        mapped = jax.shard_map(
            body,
            mesh=self.mesh if jax.sharding.get_abstract_mesh().empty else None,
            in_specs=self.taken.operands,
            out_specs=list(self.taken.results),
            axis_names=set(self.axes),
            check_vma=self.check_vma,
        )
        # As chosen first, even if moved right after: else the rest of the program, which follows
        # what is said of its values, would be cut in another way than before.
        operands = self._pinned(values, self.chosen.operands, self.taken.operands)
        if _is_explicit(self.mesh):
            operands = map(self._placed, operands, self.taken.operands)
        results = self._pinned(mapped(*operands), self.chosen.results, self.taken.results)
        # The body may leave out an operand that varies.
        return [interpreter.as_typed(x, var) for x, var in zip(results, eqn.outvars, strict=True)]

    def __str__(self) -> str:
        operands, results = (
            ", ".join(f"P({', '.join(map(repr, spec))})" for spec in specs)
            for specs in (self.taken.operands, self.taken.results)
        )
        return f"shard_map, ({operands}) -> ({results})"

    def with_chosen(self, kind: str, number: int, spec: P) -> "_Route":
        """Return the route where one of the "operands" or "results" is sharded by `spec`."""
        specs = [*getattr(self.chosen, kind)]
        specs[number] = spec
        chosen = dataclasses.replace(self.chosen, **{kind: tuple(specs)})
        return dataclasses.replace(self, chosen=chosen)

    def _pinned(self, values: Values, chosen: Sequence[P], taken: Sequence[P]) -> Values:
        pairs = zip(values, chosen, taken, strict=True)
        return [self._placed(x, there) if there != here else x for x, there, here in pairs]

    def _placed(self, x: jax.Array, spec: P) -> jax.Array:
        # Inside a shard_map, or under jax.set_mesh, the mesh of the context knows more of its axes.
        here = jax.sharding.get_abstract_mesh().empty
        sharding = NamedSharding(self.mesh, spec) if here else spec
        place = (
            jax.sharding.reshard if _is_explicit(self.mesh) else jax.lax.with_sharding_constraint
        )
        return place(x, sharding)


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
    sites = list(interpreter.places(jaxpr, propagation.is_partitioned))
    if not sites:
        return PassPlan(None)
    _check_names(specs or {}, sites)
    meshes = propagation.meshes_of(jaxpr, in_shardings) if mesh is None else [mesh]
    if len(meshes) > 1:
        why = "the program uses several meshes: choose one by mesh="
        return PassPlan(
            None, tuple(_finding(site, "refused", "left as it is", why) for site in sites)
        )
    if not meshes or meshes[0].size == 1:
        return PassPlan(None)  # there JAX puts the body of the op into the program itself
    layouts = _layouts(jaxpr, sites, meshes[0], in_shardings, specs or {})
    handlers: dict[Path, _Route] = {}
    findings: list[PassFinding] = []
    for site in sites:
        if site.path not in layouts:
            continue
        try:
            handlers[site.path] = _route(site, layouts[site.path], meshes[0])
        except _RouteRefused as reason:
            findings.append(_finding(site, "refused", "left as it is", str(reason)))
        else:
            around = [_compat.name_of(eqn) for eqn in site.around]
            is_ruled = any(name.startswith(("custom_vjp", "custom_jvp")) for name in around)
            why = "the function only: its derivative rules can be seen from around jax.grad"
            route, name = handlers[site.path], _name_of(site)
            findings.append(_finding(site, "rewritten", str(route), why if is_ruled else ""))
            guessed = not any(in_shardings) and name not in (specs or {})
            lie = (*route.chosen.operands, *route.chosen.results)
            if guessed and not any(map(_axes_of, lie)):  # and nothing asked for that
                how = f"give specs={{{name!r}: (in_specs, out_specs)}}"
                why = f"nothing tells how its operands lie: {how}"
                findings.append(_finding(site, "noted", "every device computes all of it", why))
    if not handlers:
        return PassPlan(None, tuple(findings))
    handlers = _joined([site for site in sites if site.path in handlers], handlers)
    return PassPlan(lambda *args: interpreter.run_at(jaxpr, args, handlers), tuple(findings))


def _check_names(specs: _Specs, sites: Sequence[EquationPlace]) -> None:
    known = list(dict.fromkeys(_name_of(site) for site in sites))
    unknown = [name for name in specs if name not in known]
    if unknown:
        raise ArgumentError(
            f"specs= names {', '.join(map(repr, unknown))}, but the custom_partitioning operations "
            f"of the program are {', '.join(map(repr, known))}: the names of the wrapped functions."
        )


def _layouts(
    jaxpr: ClosedJaxpr,
    sites: Sequence[EquationPlace],
    mesh: Mesh,
    in_shardings: Sequence[NamedSharding | None],
    specs: _Specs,
) -> Mapping[Path, CallLayout | Unknown]:
    """Return how each op is sharded; no entry: it is left, for JAX puts its body there."""
    given: dict[Path, CallLayout | Unknown] = {}
    others: list[EquationPlace] = []
    for site in sites:
        if not _free_axes(site, mesh):
            continue
        if _name_of(site) in specs:
            in_specs, out_specs = specs[_name_of(site)]
            results = (out_specs,) if isinstance(out_specs, P) else tuple(out_specs)
            given[site.path] = CallLayout(
                _fitting(site, "operands", tuple(in_specs), site.eqn.invars, mesh),
                _fitting(site, "results", results, site.eqn.outvars, mesh),
            )
        else:
            others.append(site)
    return given | (propagation.layouts_of(jaxpr, others, mesh, in_shardings) if others else {})


def _fitting(
    site: EquationPlace, kind: str, specs: Sequence[P], atoms: Sequence[Any], mesh: Mesh
) -> tuple[P, ...]:
    problems: list[str] = []
    if len(atoms) != len(specs):
        problems.append(f"it has {len(atoms)} {kind}, and {len(specs)} specs for them")
    for atom, spec in zip(atoms, specs, strict=False):
        if len(spec) > atom.aval.ndim:
            problems.append(f"{spec} is longer than the shape {atom.aval.shape}")
        unknown = [axis for axis in _axes_of(spec) if axis not in mesh.shape]
        problems += [f"{spec}: the mesh {dict(mesh.shape)} has no axis {a!r}" for a in unknown]
    if problems:
        raise ArgumentError(
            f"specs= of the custom_partitioning operation {_name_of(site)!r} do not fit it: "
            f"{'; '.join(problems)}. Give (in_specs, out_specs), without its static arguments."
        )
    return tuple(_full(spec, atom.aval.ndim) for spec, atom in zip(specs, atoms, strict=True))


def _joined(sites: Sequence[EquationPlace], found: Mapping[Path, _Route]) -> dict[Path, _Route]:
    """Return the routes without the detours that the compiler sees through in its own calls only.

    A constant is there in any form; and a result that only goes to other routes, as these want it,
    need not be cut in between as the program had it.
    """
    joined = dict(found)
    for site in sites:
        for number in found[site.path].chosen.constants:
            taken = found[site.path].taken.operands[number]
            joined[site.path] = joined[site.path].with_chosen("operands", number, taken)
        for number, var in enumerate(site.eqn.outvars):
            readers = _readers(site, var, sites)
            taken = found[site.path].taken.results[number]
            if readers and all(found[p].taken.operands[n] == taken for p, n in readers):
                joined[site.path] = joined[site.path].with_chosen("results", number, taken)
                for path, operand in readers:
                    joined[path] = joined[path].with_chosen("operands", operand, taken)
    return joined


def _readers(
    site: EquationPlace, var: Var, sites: Sequence[EquationPlace]
) -> list[tuple[Path, int]]:
    """Return the sites that alone read a result, and which operand of theirs it is."""
    beside = {id(other.eqn): other.path for other in sites if other.path[:-1] == site.path[:-1]}
    reads = [
        (beside.get(id(eqn)), number)
        for eqn in site.within.eqns
        for number, atom in enumerate(eqn.invars)
        if atom is var
    ]
    is_returned = any(atom is var for atom in site.within.outvars)
    routed = [(path, number) for path, number in reads if path is not None]
    return routed if len(routed) == len(reads) and not is_returned else []


def _finding(site: EquationPlace, outcome: Outcome, what: str, why: str) -> PassFinding:
    what = f"custom_partitioning {_name_of(site)!r}: {what}"
    return PassFinding(_CODE, outcome, what, why, interpreter.source_line(site.eqn))


# --- one call of a custom_partitioning op, as a `jax.shard_map` around its own lowering
#
# The function that `partition` returns is wrapped, not the body of the op: that one is written for
# whole arrays, and gives other numbers on blocks.


def _route(site: EquationPlace, layout: CallLayout | Unknown, mesh: Mesh) -> _Route:
    """Ask the op's `partition` how it is computed on blocks, where the call lies by `layout`.

    Raises:
      _RouteRefused: the answer cannot be said as a shard_map.
    """
    if isinstance(layout, Unknown):
        raise _RouteRefused(str(layout))
    params = site.eqn.params
    axes = _free_axes(site, mesh)
    if any(eqn.params["mesh"].shape != mesh.shape for eqn in _regions(site)):
        raise _RouteRefused("it stands in a shard_map over another mesh")
    if not params["decode_shardings"]:
        raise _RouteRefused("its partition() asks for XLA's own shardings (decode_shardings=False)")
    if len(set(mesh.axis_types)) > 1:
        raise _RouteRefused("the mesh has both Auto and Explicit axes")
    operands, results = _avals(site.eqn.invars), _avals(site.eqn.outvars)
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in (*operands, *results)):
        raise _RouteRefused("one of its values is a PRNG key")
    if any(aval.weak_type for aval in results):
        raise _RouteRefused("one of its results is weakly typed")
    if _is_explicit(mesh):  # what the types say is what the program must get back
        typed = [_full(aval.sharding.spec, len(aval.shape)) for aval in results]
        layout = dataclasses.replace(layout, results=tuple(typed))
    asked = (
        params["in_tree"].unflatten(_shapes(site.eqn.invars, layout.operands, mesh)),
        params["out_tree"].unflatten(_shapes(site.eqn.outvars, layout.results, mesh)),
    )
    own_mesh, lower, made, given = params["partition"](*params["static_args"], mesh, *asked)
    if own_mesh != mesh:
        raise _RouteRefused("its partition() returns another mesh than it was given")
    taken = CallLayout(
        _specs(params["in_tree"].flatten_up_to(given), site.eqn.invars, mesh, axes),
        _specs(params["out_tree"].flatten_up_to(made), site.eqn.outvars, mesh, axes),
    )
    _check_lowering(lower, site, taken, mesh)
    checks = any(eqn.params["check_vma"] for eqn in _regions(site))
    route = _Route(_name_of(site), mesh, axes, lower, params["in_tree"], layout, taken, checks)
    if checks:
        _check_types(route, site.eqn)
    return route


def _name_of(site: EquationPlace) -> str:
    """Return the name of the function that the user decorated."""
    return site.eqn.params["call"].jaxpr.debug_info.func_name


def _free_axes(site: EquationPlace, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of the mesh that no shard_map around the call takes."""
    regions = _regions(site)
    taken = [axis for eqn in regions for axis in eqn.params["newly_manual_axes"]]
    names = regions[-1].params["mesh"].axis_names if regions else mesh.axis_names
    return tuple(axis for axis in names if axis not in taken)


def _axes_of(spec: P) -> tuple[str, ...]:
    return tuple(axis for entry in spec for axis in names_of(entry))


def _full(spec: P, rank: int) -> P:
    """Return the spec in its one form: an entry a dimension, and no tuple of one.

    >>> _full(P(("i",)), 2) == P("i", None)
    True
    """
    entries = [names_of(entry) for entry in spec]
    short = [axes[0] if len(axes) == 1 else axes or None for axes in entries]
    return P(*short, *[None] * (rank - len(short)))


def _regions(site: EquationPlace) -> list[JaxprEqn]:
    """Return the shard_maps around the call."""
    return [eqn for eqn in site.around if _compat.name_of(eqn) == "shard_map"]


def _check_lowering(
    lower: Callable[..., Any], site: EquationPlace, taken: CallLayout, mesh: Mesh
) -> None:
    """Trace it on blocks, as the compiler would before it believes what partition() returned."""
    eqn = site.eqn
    blocks = _blocks(eqn.invars, taken.operands, mesh)
    wanted = _blocks(eqn.outvars, taken.results, mesh)
    axis_env = list(mesh.shape.items())
    traced = jax.make_jaxpr(lower, axis_env=axis_env)(*eqn.params["in_tree"].unflatten(blocks))
    made = [(aval.shape, aval.dtype) for aval in traced.out_avals]
    if made != [(block.shape, block.dtype) for block in wanted]:
        names = [
            ", ".join(f"{value.dtype}{list(value.shape)}" for value in values)
            for values in (traced.out_avals, wanted)
        ]
        raise _RouteRefused(f"its lowering gives {names[0]} where its partition() says {names[1]}")
    if traced.consts and any(_compat.name_of(around) == "remat2" for around in site.around):
        raise _RouteRefused(
            "its lowering captures arrays, and jax.checkpoint around it cannot hold them"
        )


def _check_types(made: _Route, eqn: JaxprEqn) -> None:
    """Trace the route inside of a shard_map that checks types, as the one around it does."""

    def types_only(*operands: jax.Array) -> None:
        made(eqn, list(operands))

    taken = {axis for axis in made.mesh.axis_names if axis not in made.axes}
    region = jax.shard_map(
        types_only, mesh=made.mesh, in_specs=P(), out_specs=None, axis_names=taken
    )
    try:
        jax.make_jaxpr(region)(*_shapes(eqn.invars, [P()] * len(eqn.invars), made.mesh))
    except ValueError as error:
        first = str(error).partition("\n")[0].rstrip(":")
        raise _RouteRefused(f"check_vma=True of the shard_map around it: {first}") from error


def _shapes(atoms: Sequence[Atom], specs: Sequence[P], mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Return the types of whole arrays, with their shardings."""
    return [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(mesh, spec))
        for aval, spec in zip(_avals(atoms), specs, strict=True)
    ]


def _blocks(atoms: Sequence[Atom], specs: Sequence[P], mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """Return the types of what one device holds of them."""
    blocks = []
    for aval, spec in zip(_avals(atoms), specs, strict=True):
        sizes = zip(aval.shape, _cuts(spec, mesh), strict=True)
        blocks.append(jax.ShapeDtypeStruct([size // cut for size, cut in sizes], aval.dtype))
    return blocks


def _specs(
    shardings: Sequence[Any], atoms: Sequence[Atom], mesh: Mesh, axes: Sequence[str]
) -> tuple[P, ...]:
    """Return what partition() returned, as specs for shard_map."""
    specs = []
    for sharding, aval in zip(shardings, _avals(atoms), strict=True):
        if not isinstance(sharding, NamedSharding) or sharding.mesh != mesh:
            raise _RouteRefused(
                "its partition() returns shardings that are not NamedShardings of the mesh"
            )
        spec, shape = sharding.spec, aval.shape
        if P.UNCONSTRAINED in spec or spec.unreduced:
            raise _RouteRefused(f"its partition() returns {spec}, which shard_map has no word for")
        if not set(_axes_of(spec)) <= set(axes):
            raise _RouteRefused(
                f"its partition() returns {spec}, inside a shard_map over the same axis"
            )
        spec = _full(spec, len(shape))
        if any(size % cut for size, cut in zip(shape, _cuts(spec, mesh), strict=True)):
            raise _RouteRefused(f"{spec} does not cut the shape {shape} into equal blocks")
        specs.append(spec)
    return tuple(specs)


def _cuts(spec: P, mesh: Mesh) -> Iterator[int]:
    """Yield into how many blocks each dimension is split."""
    return (math.prod(mesh.shape[axis] for axis in names_of(entry)) for entry in spec)


def _avals(atoms: Sequence[Atom]) -> list[Any]:
    return [atom.aval for atom in atoms]


def _is_explicit(mesh: Mesh) -> bool:
    return AxisType.Explicit in mesh.axis_types
