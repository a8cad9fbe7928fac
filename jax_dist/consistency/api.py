"""`check`: does a function compute the same on any number of devices? And the report on it."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_dist import _compat
from jax_dist.consistency import faults, runs
from jax_dist.consistency.evaluation import Graph, graph_of
from jax_dist.consistency.faults import Explanation, FaultOrigin, Search
from jax_dist.consistency.relations import Verdict, are_alike, verdict
from jax_dist.consistency.runs import CheckedProgram, Global, PerDevice, Reference, Several
from jax_dist.errors import ConsistencyError, UnsupportedError
from jax_dist.mapping import axes
from jax_dist.mapping.axes import Axis, AxisPrefix
from jax_dist.rewriting import rendering
from jax_dist.rewriting.rendering import counted


@dataclasses.dataclass(frozen=True, slots=True)
class Consistency:
    """Whether a function computes the same on any number of devices."""

    name: str  # of the function
    devices: tuple[int, ...]  # on which it was compared with one
    skipped: Mapping[int, str]  # on which not, and why
    verdicts: tuple[Verdict, ...]  # of each result, on each number of devices
    findings: tuple[Explanation, ...]
    notes: tuple[str, ...] = ()  # what the check could not see

    @property
    def ok(self) -> bool:
        """Whether all results were compared, and none differs by more than rounding explains."""
        return not self.findings and all(each.same and not each.undecided for each in self.verdicts)

    @property
    def summary(self) -> str:
        on = f"on {_listed(self.devices)} devices"
        wrong = {each.name for each in self.verdicts if not each.same}
        names = {each.name for each in self.verdicts}
        unsure = {each.name for each in self.verdicts if each.undecided}
        if wrong:
            of = f"{len(wrong)} of {counted(len(names), 'result')}"
            return f"it depends on the number of devices: {of} differ"
        if self.findings:
            return "results that all devices should share differ"
        if unsure:
            return f"{len(unsure)} of {counted(len(names), 'result')} undecided {on}: see below"
        return f"the same {on} as on one, {counted(len(names), 'result')} compared"

    def to_dict(self) -> dict[str, object]:
        """For machines: only dicts, lists, strings, numbers and None."""
        return {
            "name": self.name,
            "ok": self.ok,
            "summary": self.summary,
            "devices": list(self.devices),
            "skipped": {str(count): why for count, why in self.skipped.items()},
            "findings": rendering.plain(self.findings),
            "results": [
                {
                    "name": each.name,
                    "devices": each.devices,
                    "same": each.same,
                    "undecided": each.undecided,
                    "words": each.words,
                    "apart": each.apart,
                    "tolerance": each.tolerance,
                }
                for each in self.verdicts
            ],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:  # at a prompt, the table
        return str(self)

    def __str__(self) -> str:
        return rendering.as_text(f"{self.name}: {self.summary}", _sections(self))

    def _repr_html_(self) -> str:
        return rendering.as_html(f"{self.name}: {self.summary}", _sections(self))


def check(
    fun: Callable,
    *args: Any,
    axis_name: Hashable | None = None,
    in_axes: AxisPrefix = 0,
    out_axes: AxisPrefix = None,
    devices: Sequence[int] = (1, 2, 4, 8),
    mesh: Mesh | None = None,
) -> Consistency:
    """Whether a function computes the same on any number of devices; if not, from which line on.

    With `axis_name`, `fun` is what one device does, as in `shard_map`: each mapped argument is an
    array of all rows, of which each device gets its share, with all dimensions. The same arguments
    go to 1, 2, 4 and 8 devices, and the results are compared. No devices are needed for that: all
    run on one, as under `jax.vmap`.

    Without it, `fun` is a function of whole arrays, under jit or with a `shard_map` in it. What
    changes then is the mesh: that of `mesh`, or the one that the arguments lie on, is made smaller,
    set by `jax.set_mesh`, and given to `fun` if it has a parameter `mesh`.

    How far results may differ is not fixed: the function is run again with the rounding of every
    step moved, and what comes of that is the tolerance. Keys that differ between devices are no
    difference: such a device gets its rows of what one device draws.

    Args:
      fun: the function.
      *args: its arguments. Small ones will do: a few rows for each device.
      axis_name: names the mapped axis, if `fun` is what one device does.
      in_axes: which dimension of each argument is split; None for what all devices share.
      out_axes: the dimension along which the results of the devices make the whole, or a tree of
        these; None, also for one result, finds out: a result of the same shape must be the same on
        all devices.
      devices: how many, one after the other; each is compared with one device.
      mesh: whose axes a function of whole arrays names.

    Returns:
      The report: `ok`, `findings` with lines and remedies, `verdicts` of each result; text when
      printed, `to_dict()` for machines.

    Raises:
      ConsistencyError: the arguments cannot be split on any number of devices, or a function of
        whole arrays has no mesh, or one of its own.
      UnsupportedError: this jax is older than 0.10.

    >>> import jax, jax.numpy as jnp
    >>> def mean(x):
    ...     return jax.lax.psum(jnp.mean(x), "i")
    >>> report = check(mean, jnp.arange(8.0), axis_name="i", devices=(1, 2))
    >>> report.ok, report.findings[0].what
    (False, "a sum over 'i' of means: 2 times too large")
    """
    if not _compat.CAN_REWRITE:
        raise UnsupportedError(f"jax_dist.check needs jax 0.10 or later, not {jax.__version__}")
    subject = _subject(fun, args, axis_name, in_axes, mesh)
    counts = _counts(devices)
    skipped = {count: why for count in counts if (why := subject.skipped(count)) is not None}
    left = [count for count in counts if count not in skipped]
    if not left:
        raise _nothing_left(subject.name, skipped)
    leaves = jax.tree.leaves(args)
    one = subject.program(1)
    reference = runs.on_one(one, leaves)
    compared = [_compared(subject.program(count), leaves, reference, out_axes) for count in left]
    verdicts = tuple(each for of_count in compared for each in of_count.verdicts)
    axis = axis_name if isinstance(subject, PerDevice) else tuple(subject.mesh.axis_names)
    findings = _findings(compared, one, leaves, axis)
    return Consistency(subject.name, tuple(left), skipped, verdicts, findings, _notes(one, subject))


@dataclasses.dataclass(frozen=True, slots=True)
class _Compared:
    """One number of devices."""

    program: CheckedProgram
    graph: Graph
    verdicts: list[Verdict]
    drifting: list[str]  # results that only the draws make differ between the devices


def _subject(
    fun: Callable, args: tuple, axis_name: Hashable | None, in_axes: AxisPrefix, mesh: Mesh | None
) -> PerDevice | Global:
    name = _name_of(fun)
    if axis_name is not None:
        subject = PerDevice(fun, name, axis_name, in_axes, args)
        subject.check()
        return subject
    mesh = mesh or runs.mesh_of(args)
    if mesh is None:
        raise runs.refusal(
            what=f"'{name}' has no mesh to make smaller",
            which=["axis_name, mesh= are not given", "no argument has a NamedSharding"],
            why="a function of whole arrays runs on the devices of a mesh",
            do="Give axis_name='i' if the function is what one device does; else mesh=, or "
            "arguments placed by jax.device_put(x, NamedSharding(mesh, spec)).",
        )
    return Global(fun, name, mesh, args)


def _counts(devices: Sequence[int]) -> list[int]:
    counts = [count for count in dict.fromkeys(devices) if isinstance(count, int) and count > 1]
    if not counts or any(not isinstance(count, int) or count < 1 for count in devices):
        raise runs.refusal(
            what="devices= are no numbers of devices",
            which=[f"devices={tuple(devices)!r}"],
            why="each is compared with one device",
            do="Give at least one number above 1, as in devices=(1, 2, 4).",
        )
    return counts


def _nothing_left(name: str, skipped: dict[int, str]) -> ConsistencyError:
    return runs.refusal(
        what=f"'{name}' cannot be run on several devices",
        which=[f"{count} devices: {why}" for count, why in skipped.items()],
        why="the same arguments go to each number of devices",
        do="Give arguments whose rows all of them divide, and counts that are there; "
        "jax_dist.testing.simulated_devices(8) makes devices.",
    )


def _compared(
    program: CheckedProgram, leaves: Sequence[Any], reference: Reference, out_axes: AxisPrefix
) -> _Compared:
    if program.tree != reference.program.tree:
        raise _other_tree(program, reference)
    run = Several(program, leaves, reference)
    values = run.values()
    names = _names(program.tree)
    along = _out_axes(out_axes, program.tree)
    verdicts = [
        verdict(name, value, expected, axis, is_key=runs.is_key(aval))
        for name, value, expected, axis, aval in zip(
            names, values.results, reference.results, along, program.jaxpr.out_avals, strict=True
        )
    ]
    drifting = []
    if run.draws and program.mapped:
        raw = run.values(given=False).results
        drifting = [
            each.name
            for each, own, given in zip(verdicts, raw, values.results, strict=True)
            if each.same and each.relation.kind == "same"
            and are_alike(given[:, None], each.tolerance).all()
            and not are_alike(own[:, None], each.tolerance).all()
        ]  # fmt: skip
    return _Compared(program, run.graph, verdicts, drifting)


def _findings(
    compared: Sequence[_Compared], one: CheckedProgram, leaves: Sequence[Any], axis: Any
) -> tuple[Explanation, ...]:
    """What is wrong, from the run that tells most: of 4 devices, for 2 may be a size too."""
    wrong = [each for each in compared if each.drifting or any(not v.same for v in each.verdicts)]
    if not wrong:
        return ()
    several = min(wrong, key=lambda each: abs(each.program.devices - 4))
    if any(map(runs.is_too_large, (several.graph, graph_of(one.jaxpr)))):
        what = "the values of the equations are too many to be compared; give smaller arguments"
        return (Explanation("", what, "", "", "", ""),)
    reference = runs.on_one(one, leaves, everything=True)
    graph, devices = several.graph, several.program.devices
    run = Several(several.program, leaves, reference, everything=True)
    search = Search(run, run.values(), reference)
    origins = [
        (each.name, origin)
        for each, ways in zip(several.verdicts, graph.results, strict=True)
        if not each.same and (origin := search.origin(ways)) is not None
    ]
    found = [
        dataclasses.replace(faults.explain(origin, axis, devices), results=(name,))
        for name, origin in _first_ones(origins, search)
    ]
    if several.drifting:
        search = Search(run, run.values(given=False), reference)
        for each, ways in zip(several.verdicts, graph.results, strict=True):
            draw = search.first_own_draw(ways) if each.name in several.drifting else None
            if draw is not None:
                found.append(dataclasses.replace(faults.drifting(draw, axis), results=(each.name,)))
    return _merged(found)


def _first_ones(
    origins: Sequence[tuple[str, FaultOrigin]], search: Search
) -> list[tuple[str, FaultOrigin]]:
    """In program order; what only follows from another one is put down to that."""
    ordered = sorted(origins, key=lambda each: each[1].node.path)
    causes: list[FaultOrigin] = []
    result = []
    for name, origin in ordered:
        ways = frozenset().union(*origin.node.sources)
        before = {node.path for node in search.graph.reached(ways)}
        cause = next((each for each in causes if each.node.path in before), origin)
        causes.append(cause)
        result.append((name, cause))
    return result


def _merged(found: Sequence[Explanation]) -> tuple[Explanation, ...]:
    """One finding a line, with all results that it makes wrong."""
    by_line: dict[tuple[str, str], Explanation] = {}
    for each in found:
        key = (each.where, each.code)
        if key in by_line:
            results = dict.fromkeys((*by_line[key].results, *each.results))
            by_line[key] = dataclasses.replace(by_line[key], results=tuple(results))
        else:
            by_line[key] = each
    return tuple(by_line.values())


def _notes(one: CheckedProgram, subject: PerDevice | Global) -> tuple[str, ...]:
    if isinstance(subject, Global) and "shard_map" not in str(one.jaxpr):
        return (
            "no shard_map is in it: of a jit, every number of devices computes the same but for "
            "rounding",
        )
    return ()


def _names(tree: Any) -> list[str]:
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [
        "result" + jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(numbered)
    ]


def _out_axes(out_axes: AxisPrefix, tree: Any) -> tuple[Axis, ...]:
    if out_axes is None:
        return (None,) * tree.num_leaves
    output = jax.tree.unflatten(tree, [jnp.zeros(())] * tree.num_leaves)
    counts = jax.tree.map(
        lambda _, part: jax.tree.structure(part).num_leaves, out_axes, output, is_leaf=axes.is_none
    )
    spread = zip(
        jax.tree.leaves(out_axes, is_leaf=axes.is_none), jax.tree.leaves(counts), strict=True
    )
    return tuple(axis for axis, count in spread for _ in range(count))


def _other_tree(program: CheckedProgram, reference: Reference) -> ConsistencyError:
    return runs.refusal(
        what="the result has another structure on another number of devices",
        which=[
            f"{program.devices} devices: {program.tree}",
            f"one device: {reference.program.tree}",
        ],
        why="results are compared leaf by leaf",
        do="Return the same structure on any number of devices.",
    )


def _name_of(fun: Any) -> str:
    while isinstance(fun, functools.partial):
        fun = fun.func
    return getattr(fun, "__name__", type(fun).__name__)


def _sections(report: Consistency) -> Iterator[rendering.Section]:
    if report.findings:
        yield rendering.Section("Found", tuple(map(_entry, report.findings)))
    told = [each for each in report.verdicts if not each.same or each.undecided]
    if told:
        rows = tuple(
            (each.name, str(each.devices), each.words or "undecided", _number(each.apart),
             _number(each.tolerance))
            for each in told
        )  # fmt: skip
        header = ("result", "devices", "compared with one device", "apart", "rounding")
        yield rendering.Section("Results", (rendering.Table(header, rows, numbers=2),))
    notes = [
        *(f"{count} devices left out: {why}" for count, why in report.skipped.items()),
        *report.notes,
    ]
    if any(each.undecided for each in report.verdicts):
        notes.append(
            "undecided: rounding alone changes the result so much that a wrong scale could hide; "
            "check with fewer steps, or with larger numbers"
        )
    if notes:
        yield rendering.Section("Noted", tuple(rendering.ReportEntry("", note) for note in notes))


def _entry(finding: Explanation) -> rendering.ReportEntry:
    details = [f"because {finding.why}", f"do: {finding.do}"]
    if finding.results:
        details.append(f"seen in {', '.join(finding.results)}")
    label = f"{finding.where or 'line unknown'}"
    text = finding.what + (f" ({finding.code})" if finding.code else "")
    return rendering.ReportEntry("", f"{label}: {text}", tuple(details))


def _listed(counts: tuple[int, ...]) -> str:
    return " and ".join(
        part for part in (", ".join(map(str, counts[:-1])), str(counts[-1])) if part
    )


def _number(value: float) -> str:
    return f"{value:.2g}"
