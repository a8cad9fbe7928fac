"""custom_partitioning: a `jax.shard_map` around the op's own lowering, cut as the compiler would.

`partition` of the op is asked here, with the shardings that Shardy chooses for the call, and no
longer in the compiler. So the program holds the op's body and no address of a Python object, and
its cache key is the same in each process.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import _codes, errors
from jax_dist.passes import equation_paths, interpreter, propagation, routes
from jax_dist.passes.equation_paths import EquationPlace, Path
from jax_dist.passes.findings import (
    Outcome,
    PassFinding,
    PassPlan,
)
from jax_dist.passes.propagation import CallLayout, Unknown
from jax_dist.passes.routes import Route

Specs: TypeAlias = Mapping[str, tuple[Any, Any]]  # name of an op: (in_specs, out_specs)

_CODE = _codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP


def plan_partitioning(
    jaxpr: ClosedJaxpr,
    *,
    mesh: Mesh | None,
    in_shardings: Sequence[NamedSharding | None],
    specs: Specs | None = None,
) -> PassPlan:
    """Routes each custom_partitioning equation of a program through `jax.shard_map`.

    Args:
      jaxpr: the program.
      mesh: what it runs on; None: the one mesh that the arguments or the program mention.
      in_shardings: one for each input of the jaxpr; None where it is not known.
      specs: by the name of an op, the specs of its operands (a sequence) and of its results (one,
        or a sequence), in place of those that the compiler would choose.

    Returns:
      The plan. It changes nothing where there is no such equation, or only one device.

    Raises:
      RewriteError: `specs` does not fit the op, or the mesh, or names an op that is not there.
    """
    sites = list(equation_paths.places(jaxpr, propagation.is_partitioned))
    if not sites:
        return PassPlan(None)
    _check_names(specs or {}, sites)
    meshes = propagation.meshes_of(jaxpr, in_shardings) if mesh is None else [mesh]
    if len(meshes) > 1:
        why = "the program uses several meshes: choose one by mesh="
        return PassPlan(None, tuple(_refused(site, why) for site in sites))
    if not meshes or meshes[0].size == 1:
        return PassPlan(None)  # there JAX puts the body of the op into the program itself
    layouts = _layouts(jaxpr, sites, meshes[0], in_shardings, specs or {})
    handlers: dict[Path, Route] = {}
    findings: list[PassFinding] = []
    for site in sites:
        if site.path not in layouts:
            continue
        try:
            handlers[site.path] = _route(site, layouts[site.path], meshes[0])
        except routes.RouteRefused as reason:
            findings.append(_refused(site, str(reason)))
        else:
            guessed = not any(in_shardings) and routes.name_of(site) not in (specs or {})
            findings += _told(site, handlers[site.path], guessed=guessed)
    if not handlers:
        return PassPlan(None, tuple(findings))
    handlers = _joined([site for site in sites if site.path in handlers], handlers)
    return PassPlan(lambda *args: equation_paths.run(jaxpr, args, handlers), tuple(findings))


def _check_names(specs: Specs, sites: Sequence[EquationPlace]) -> None:
    known = list(dict.fromkeys(routes.name_of(site) for site in sites))
    unknown = [name for name in specs if name not in known]
    if unknown:
        raise errors.RewriteError(
            errors.message(
                what="specs name operations that are not in the program",
                which=[f"{name!r}" for name in unknown],
                why=f"the custom_partitioning operations in it are {', '.join(map(repr, known))}",
                do="Name one of these: the name is that of the function that was wrapped.",
            )
        )


def _layouts(
    jaxpr: ClosedJaxpr,
    sites: Sequence[EquationPlace],
    mesh: Mesh,
    in_shardings: Sequence[NamedSharding | None],
    specs: Specs,
) -> Mapping[Path, CallLayout | Unknown]:
    """No entry: the op is left, for JAX puts its body there."""
    given: dict[Path, CallLayout | Unknown] = {}
    others: list[EquationPlace] = []
    for site in sites:
        if not routes.free_axes(site, mesh):
            continue
        if routes.name_of(site) in specs:
            given[site.path] = _given(site, specs[routes.name_of(site)], mesh)
        else:
            others.append(site)
    return given | (propagation.layouts_of(jaxpr, others, mesh, in_shardings) if others else {})


def _given(site: EquationPlace, specs: tuple[Any, Any], mesh: Mesh) -> CallLayout:
    in_specs, out_specs = specs
    results = (out_specs,) if isinstance(out_specs, P) else tuple(out_specs)
    return CallLayout(
        _fitting(site, "operands", tuple(in_specs), site.eqn.invars, mesh),
        _fitting(site, "results", results, site.eqn.outvars, mesh),
    )


def _fitting(
    site: EquationPlace, kind: str, specs: Sequence[P], atoms: Sequence[Any], mesh: Mesh
) -> tuple[P, ...]:
    problems: list[str] = []
    if len(atoms) != len(specs):
        problems.append(f"it has {len(atoms)} {kind}, and {len(specs)} specs for them")
    for atom, spec in zip(atoms, specs, strict=False):
        if len(spec) > atom.aval.ndim:
            problems.append(f"{spec} is longer than the shape {atom.aval.shape}")
        strangers = [axis for axis in routes.axes_of(spec) if axis not in mesh.shape]
        problems += [f"{spec}: the mesh {dict(mesh.shape)} has no axis {a!r}" for a in strangers]
    if problems:
        raise errors.RewriteError(
            errors.message(
                what=f"specs for the custom_partitioning op {routes.name_of(site)!r} do not fit it",
                which=problems,
                why="its partition() is asked with one spec for each operand and each result",
                do="Write specs={name: (in_specs, out_specs)}, without its static arguments.",
            )
        )
    return tuple(routes.full(spec, atom.aval.ndim) for spec, atom in zip(specs, atoms, strict=True))


def _route(site: EquationPlace, layout: CallLayout | Unknown, mesh: Mesh) -> Route:
    if isinstance(layout, Unknown):
        raise routes.RouteRefused(str(layout))
    return routes.route(site, layout, mesh)


def _joined(sites: Sequence[EquationPlace], found: Mapping[Path, Route]) -> dict[Path, Route]:
    """The routes, without the detours that the compiler sees through in its own calls only.

    A constant is there in any form; and a result that only goes to other routes, as these want it,
    need not be cut in between as the program had it.
    """
    joined = dict(found)
    for site in sites:
        for number in found[site.path].chosen.constants:
            taken = found[site.path].taken.operands[number]
            joined[site.path] = joined[site.path].with_operand(number, taken)
        for number, var in enumerate(site.eqn.outvars):
            readers = _readers(site, var, sites)
            taken = found[site.path].taken.results[number]
            if readers and all(found[p].taken.operands[n] == taken for p, n in readers):
                joined[site.path] = joined[site.path].with_result(number, taken)
                for path, operand in readers:
                    joined[path] = joined[path].with_operand(operand, taken)
    return joined


def _readers(
    site: EquationPlace, var: Var, sites: Sequence[EquationPlace]
) -> list[tuple[Path, int]]:
    """Sites beside this one, and which operand of theirs; none if anything else reads it too."""
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


def _told(site: EquationPlace, route: Route, *, guessed: bool) -> list[PassFinding]:
    around = [eqn.primitive.name for eqn in site.around]
    why = ""
    if any(name.startswith(("custom_vjp", "custom_jvp")) for name in around):
        why = "the function only: its derivative rules can be seen from around jax.grad"
    told = [_finding(site, "rewritten", str(route), why)]
    if guessed and route.is_whole_everywhere():
        name = routes.name_of(site)
        why = f"nothing tells how its operands lie: give specs={{{name!r}: (in_specs, out_specs)}}"
        told.append(_finding(site, "noted", "every device computes all of it", why))
    return told


def _refused(site: EquationPlace, why: str) -> PassFinding:
    return _finding(site, "refused", "left as it is", why)


def _finding(site: EquationPlace, outcome: Outcome, what: str, why: str) -> PassFinding:
    what = f"custom_partitioning {routes.name_of(site)!r}: {what}"
    return PassFinding(_CODE, outcome, what, why, interpreter.source_line(site.eqn))
