"""The same function as pmap, as shard_map, and with its state sharded in the global view.

The ways are compared by what each moves and what each device holds.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh

from jax_dist import _compat
from jax_dist._exceptions import text_of
from jax_dist._usage import counted
from jax_dist.machines import rendering
from jax_dist.machines.cost import ProgramCost
from jax_dist.mapping.body import type_of
from jax_dist.mapping.region import mapped_dimension
from jax_dist.passes import interpreter, rebind
from jax_dist.passes.pipeline import human_bytes
from jax_dist.passes.primitive_facts import record_of
from jax_dist.rewriting.pmap_sites import PmapSite, pmap_sites

if TYPE_CHECKING:
    from jax_dist.global_views.report import GlobalViewReport
    from jax_dist.global_views.view import GlobalView


@dataclasses.dataclass(frozen=True, slots=True)
class _Sharded:
    """A step whose state is cut over the devices, as `jax_dist.global_view` runs it."""

    state: "GlobalViewReport"  # what was found of each leaf
    program: ProgramCost


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Ways to write one function, and the program that each becomes."""

    name: str  # of the function
    # Each way with its program, or with the reason why there is none. Of equal ones, the last is
    # the simplest.
    rows: tuple[tuple[str, ProgramCost | str], ...]
    sharded: _Sharded | None = None  # the row "global view": it takes and gives other arrays

    @property
    def best(self) -> str | None:
        """The way to take: the one that moves least, and of equal ones the simplest.

        The global view is not among them: it saves memory, and its arguments are other arrays.
        """
        ways = self._moved()
        return min(reversed(ways), key=ways.__getitem__) if ways else None

    @property
    def advice(self) -> str:
        """Which way to take, in a sentence, and why."""
        ways = self._moved()
        if self.best is None:
            return "Take none of them: none compiles."
        least = ways[self.best]
        equal = [way for way, moved in ways.items() if moved == least and way != self.best]
        worse = [f"{human_bytes(moved)} with {way}" for way, moved in ways.items() if moved > least]
        against = f", against {' and '.join(worse)}" if worse else ""
        simpler = f" It moves as much as {' and '.join(equal)}, and is simpler." if equal else ""
        take = f"Take {self.best}: {human_bytes(least)} moved per step{against}.{simpler}"
        if self.sharded is None:
            return take
        state, moved = self.sharded.state, self.sharded.program.moved_bytes
        return (
            f"{take} If memory is short, shard the state with jax_dist.global_view(..., "
            f"shardings='fsdp'): a device then keeps {human_bytes(state.bytes_per_device)} of it "
            f"instead of {human_bytes(state.bytes_under_pmap)}, and {human_bytes(moved)} are moved "
            "per step."
        )

    def to_dict(self) -> dict[str, object]:
        """For machines: only dicts, lists, strings, numbers and None."""
        return {
            "name": self.name,
            "rows": [
                {
                    "way": way,
                    "moved_bytes": None if isinstance(each, str) else each.moved_bytes,
                    "program": None if isinstance(each, str) else rendering.plain(each),
                    "failed": each if isinstance(each, str) else None,
                }
                for way, each in self.rows
            ],
            "best": self.best,
            "advice": self.advice,
            "state": self.sharded.state.as_json() if self.sharded else None,
        }

    def sections(self) -> tuple[rendering.Section, ...]:
        """What both printed forms show below the advice."""
        programs = [(way, each) for way, each in self.rows if isinstance(each, ProgramCost)]
        failed = [
            rendering.ReportEntry(way, each) for way, each in self.rows if isinstance(each, str)
        ]
        sections = []
        if programs:
            header = ("", "collectives", "moved", "arguments", "temporary")
            cells = []
            for way, each in programs:
                count = sum(collective.count for collective in each.collectives)
                memory = [
                    "unknown" if size is None else human_bytes(size)
                    for size in (each.argument_bytes, each.temp_bytes)
                ]
                cells.append((way, str(count), human_bytes(each.moved_bytes), *memory))
            table = rendering.Table(header, tuple(cells), numbers=4)
            sections.append(rendering.Section("Each way, per step on one device", (table,)))
        if any(each.moved_bytes for _, each in programs):
            bars = _bars((way, each.moved_bytes) for way, each in programs)
            sections.append(rendering.Section("Moved, per step from one device", (bars,)))
        if self.sharded:
            peaks = [  # arguments and temporary memory: what lives while the step runs
                (way, each.argument_bytes + each.temp_bytes)
                for way, each in programs
                if each.argument_bytes is not None and each.temp_bytes is not None
            ]
            if peaks:
                title = "Memory at the peak, on one device"
                sections.append(rendering.Section(title, (_bars(peaks),)))
            header = ("leaf", "found", "kept as", "bytes on each")
            rows = tuple((path, *others) for path, _, *others in self.sharded.state.rows())
            table = rendering.Table(header, rows, numbers=1)
            sections.append(rendering.Section("State in the global view", (table,)))
        if failed:
            sections.append(rendering.Section("Does not compile", rendering.aligned(failed)))
        return tuple(sections)

    def __repr__(self) -> str:  # at a prompt, the table
        return str(self)

    def __str__(self) -> str:
        return rendering.as_text(self._headline(), self.sections())

    def _repr_html_(self) -> str:
        return rendering.as_html(self._headline(), self.sections())

    def _headline(self) -> str:
        return f"{self.name}, {counted(len(self.rows), 'way')} to write it. {self.advice}"

    def _moved(self) -> dict[str, int]:
        """In whole bytes, so that ways which differ by rounding are equal."""
        other = self.sharded and self.sharded.program
        programs = [(way, each) for way, each in self.rows if isinstance(each, ProgramCost)]
        return {way: round(each.moved_bytes) for way, each in programs if each is not other}


def _bars(amounts: Iterable[tuple[str, float]]) -> rendering.Bars:
    return rendering.Bars(tuple((way, amount, human_bytes(amount)) for way, amount in amounts))


def compare(
    traced: jax.stages.Traced,
    fun: Callable,
    name: str,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    programs: tuple[ProgramCost, ProgramCost],
) -> Comparison | None:
    """The ways to write a function with pmaps; None for one without.

    Args:
      traced: the function as it is.
      fun: the function.
      name: of the function.
      arguments: positional ones and keywords, as it was traced with.
      programs: as it is, and rewritten.
    """
    if not pmap_sites(traced.jaxpr):
        return None
    before, after = programs
    rows: list[tuple[str, ProgramCost | str]] = [("pmap", before), ("shard_map", after)]
    step = _mapped_step(traced)
    found = None if step is None else _in_global_view(step, fun, arguments, traced.out_info)
    if isinstance(found, _Sharded):
        return Comparison(name, (*rows, ("global view", found.program)), found)
    if found is not None:
        rows.append(("global view", found))
    return Comparison(name, tuple(rows))


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """A program that is one pmap, of the arguments as they come."""

    site: PmapSite
    consts: Sequence[Any]  # the first operands of the shard_map, which the function captured

    @property
    def in_dims(self) -> list[int | None]:
        specs = self.site.eqn.params["in_specs"][len(self.consts) :]
        return [mapped_dimension(spec) for spec in specs]

    @property
    def out_dims(self) -> list[int | None]:
        return [mapped_dimension(spec) for spec in self.site.eqn.params["out_specs"]]

    def on_one_device(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """The slices of one device, to its slices of the results."""
        blocks = [
            leaf if dim is None else jnp.expand_dims(leaf, dim)
            for leaf, dim in zip(leaves, self.in_dims, strict=True)
        ]
        outs = rebind.evaluate(self.site.body, [*self.consts, *blocks])
        return [
            out if dim is None else jnp.squeeze(out, dim)
            for out, dim in zip(outs, self.out_dims, strict=True)
        ]

    def changed_results(self) -> set[int]:
        """The result leaves that are not an argument as it came."""
        body = interpreter.open_jaxpr(self.site.body)
        made: dict[Any, Any] = {var: eqn for eqn in body.eqns for var in eqn.outvars}
        found = set()
        for place, atom in enumerate(body.outvars):
            if isinstance(atom, Literal):
                found.add(place)
                continue
            while (eqn := made.get(atom)) and _is_unit_dimension(eqn):
                atom = eqn.invars[0]
            if atom in made:
                found.add(place)
        return found


def _is_unit_dimension(eqn: JaxprEqn) -> bool:
    """Whether a dimension of length 1 comes or goes, and nothing else."""
    ends: list[Any] = [eqn.invars[0].aval, eqn.outvars[0].aval]
    before, after = ([size for size in aval.shape if size != 1] for aval in ends)
    return record_of(eqn).moves and _compat.name_of(eqn) != "transpose" and before == after


def _mapped_step(traced: jax.stages.Traced) -> _Step | None:
    """None where more is done than one pmap: then nothing says what its state is."""
    closed: ClosedJaxpr = traced.jaxpr
    while True:
        jaxpr = closed.jaxpr
        if len(jaxpr.eqns) != 1:
            return None
        (eqn,) = jaxpr.eqns
        arguments = [v for v in eqn.invars if v not in jaxpr.constvars]
        if [*arguments] != [*jaxpr.invars] or [*eqn.outvars] != [*jaxpr.outvars]:
            return None
        if (site := PmapSite.of(eqn)) is not None:
            break
        if _compat.name_of(eqn) != "jit" or len(arguments) < len(eqn.invars):
            return None
        closed = eqn.params["jaxpr"]
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    captured = [values[v] for v in eqn.invars if isinstance(v, Var) and v in values]
    if eqn.invars[len(captured) :] != arguments or interpreter.contains(
        site.body, lambda eqn: _compat.name_of(eqn) == "shard_map"
    ):
        return None
    return _Step(site, captured)


def _in_global_view(
    step: _Step, fun: Callable, arguments: tuple[tuple[Any, ...], dict[str, Any]], results: Any
) -> _Sharded | str | None:
    """The step with its state cut over the devices; a text: why not; None: nothing is cut."""
    args, kwargs = arguments
    leaves, structure = jax.tree.flatten((args, kwargs))
    if len(leaves) != len(step.in_dims):
        return None  # static arguments
    types = jax.tree.unflatten(structure, map(type_of, leaves))
    state = _state_among(step, types[0], results)
    if not state:
        return None
    dims, _ = jax.tree.unflatten(structure, step.in_dims)
    slices = [
        jax.ShapeDtypeStruct([s for n, s in enumerate(kind.shape) if n != dim], kind.dtype)
        for kind, dim in zip(jax.tree.leaves(types), step.in_dims, strict=True)
    ]
    one_device, _ = jax.tree.unflatten(structure, slices)
    given = [one_device[n] if n in state else types[0][n] for n in range(len(args))]
    # Whatever of it fails is a row of a table; the function itself runs as it is.
    try:
        view = _view(step, fun, dims, results, state)
        lowered = view.lower(*given, **types[1])
        report = view.report()
    except Exception as error:  # noqa: BLE001
        return (text_of(error).strip() or type(error).__name__).splitlines()[0]
    if report.bytes_per_device == report.bytes_under_pmap:
        return None
    return _Sharded(report, ProgramCost.of(lowered))


def _view(step: _Step, fun: Callable, dims: tuple, results: Any, state: list[int]) -> "GlobalView":
    # The only part of a report that needs the global view: a rewriting does without.
    from jax_dist.global_views.view import global_view  # noqa: PLC0415

    out_structure = jax.tree.structure(results)

    @functools.wraps(fun)
    def of_device(*args: Any, **kwargs: Any) -> Any:
        outs = step.on_one_device(jax.tree.leaves((args, kwargs)))
        return jax.tree.unflatten(out_structure, outs)

    mesh = step.site.mesh
    return global_view(
        of_device,
        step.site.axis,
        in_axes=dims,
        out_axes=jax.tree.unflatten(out_structure, step.out_dims),
        state=state,
        mesh=mesh if isinstance(mesh, Mesh) else None,
        shardings="fsdp",
        captures="allow",  # this only compares; other parts of the report name them
    )


def _state_among(step: _Step, args: tuple, results: Any) -> list[int]:
    """The positions of arguments that come back changed: tree, shapes and types are a result's."""
    numbered = jax.tree.unflatten(jax.tree.structure(results), range(len(step.out_dims)))
    parts = [(numbered, results)]
    if isinstance(results, tuple | list):
        parts += zip(numbered, results, strict=True)
    changed = step.changed_results()
    news = [(_kinds(part), any(n in changed for n in jax.tree.leaves(own))) for own, part in parts]
    found = []
    for position, arg in enumerate(args):
        new = (_kinds(arg), True)
        if new in news and jax.tree.leaves(arg):
            news.remove(new)
            found.append(position)
        elif found:
            break  # what comes back after another argument may be anything
    return found


def _kinds(tree: Any) -> tuple:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
