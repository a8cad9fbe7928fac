"""Does a function compute the same on any number of devices? The comparison, and its report."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_dist import _compat
from jax_dist._pmap import axes
from jax_dist._pmap.axes import Axis, AxisPrefix
from jax_dist._pmap.placement import is_key
from jax_dist._usage import counted
from jax_dist.consistency import faults, runs
from jax_dist.consistency.faults import Explanation
from jax_dist.consistency.relations import Verdict, are_alike
from jax_dist.consistency.runs import CheckedProgram, Global, PerDevice, Reference, Several
from jax_dist.errors import ConsistencyError, UnsupportedError, refusal
from jax_dist.machines import rendering

_TOLD = ("name", "devices", "same", "undecided", "words", "apart", "tolerance")  # of a verdict


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Consistency(rendering.Printed):
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
        names = {each.name for each in self.verdicts}
        wrong = {each.name for each in self.verdicts if not each.same}
        unsure = {each.name for each in self.verdicts if each.undecided}
        results = counted(len(names), "result")
        if wrong:
            return f"it depends on the number of devices: {len(wrong)} of {results} differ"
        if self.findings:
            return "results that all devices should share differ"
        *others, last = map(str, self.devices)
        on = f"on {', '.join(others)} and {last} devices" if others else f"on {last} devices"
        if unsure:
            return f"{len(unsure)} of {results} undecided {on}: see below"
        return f"the same {on} as on one, {results} compared"

    def to_dict(self) -> dict[str, object]:
        """For machines: only dicts, lists, strings, numbers and None."""
        return {
            "name": self.name,
            "ok": self.ok,
            "summary": self.summary,
            "devices": list(self.devices),
            "skipped": {str(count): why for count, why in self.skipped.items()},
            "findings": rendering.plain(self.findings),
            "results": [{key: getattr(each, key) for key in _TOLD} for each in self.verdicts],
            "notes": list(self.notes),
        }

    @property
    def headline(self) -> str:
        return f"{self.name}: {self.summary}"

    def sections(self) -> Iterator[rendering.Section]:
        return _sections(self)


def compare_device_counts(
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
    >>> report = compare_device_counts(mean, jnp.arange(8.0), axis_name="i", devices=(1, 2))
    >>> report.ok, report.findings[0].what
    (False, "a sum over 'i' of means: 2 times too large")
    """
    if not _compat.CAN_REWRITE:
        raise UnsupportedError(
            f"compare_device_counts needs jax 0.10 or later, not {jax.__version__}"
        )
    subject = _subject(fun, args, axis_name, in_axes, mesh)
    counts = [count for count in dict.fromkeys(devices) if isinstance(count, int) and count > 1]
    if not counts or any(not isinstance(count, int) or count < 1 for count in devices):
        raise refusal(
            ConsistencyError,
            what="devices= are no numbers of devices",
            which=[f"devices={tuple(devices)!r}"],
            why="each is compared with one device",
            do="Give at least one number above 1, as in devices=(1, 2, 4).",
        )
    skipped = {count: why for count in counts if (why := subject.skipped(count)) is not None}
    left = [count for count in counts if count not in skipped]
    if not left:
        raise refusal(
            ConsistencyError,
            what=f"'{subject.name}' cannot be run on several devices",
            which=[f"{count} devices: {why}" for count, why in skipped.items()],
            why="the same arguments go to each number of devices",
            do="Give arguments whose rows all of them divide, and counts that are there; "
            "jax_dist.testing.simulated_devices(8) makes devices.",
        )
    leaves = jax.tree.leaves(args)
    one = subject.program(1)
    reference = runs.on_one(one, leaves)
    compared = [_compared(subject.program(count), leaves, reference, out_axes) for count in left]
    verdicts = tuple(each for of_count in compared for each in of_count.verdicts)
    axis = axis_name if isinstance(subject, PerDevice) else tuple(subject.mesh.axis_names)
    findings = _findings(compared, one, leaves, axis)
    notes = tuple(_copies(args, in_axes)) if findings and isinstance(subject, PerDevice) else ()
    if isinstance(subject, Global) and "shard_map" not in str(one.jaxpr):
        notes = (
            "no shard_map is in it: of a jit, every number of devices computes the same but for "
            "rounding",
        )
    return Consistency(subject.name, tuple(left), skipped, verdicts, findings, notes)


def _copies(args: tuple, in_axes: AxisPrefix) -> Iterator[str]:
    """What may explain a finding: arguments as `jax.pmap` takes them, one copy for each device."""
    given = in_axes if isinstance(in_axes, tuple | list) else [in_axes] * len(args)
    for number, (arg, axis) in enumerate(zip(args, given, strict=False)):
        leaves = [np.asarray(each) for each in jax.tree.leaves(arg) if not is_key(each)]
        if axis == 0 and leaves and all(map(_has_equal_rows, leaves)):
            yield (
                f"the rows of args[{number}] are all equal: if they are copies for the devices, "
                "give one of them, with in_axes=None at its position"
            )


def _has_equal_rows(array: np.ndarray) -> bool:
    return array.ndim > 1 and len(array) > 1 and len({row.tobytes() for row in array}) == 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Compared:
    """One number of devices."""

    program: CheckedProgram
    verdicts: list[Verdict]
    drifting: list[str]  # results that only the draws make differ between the devices


def _subject(
    fun: Callable, args: tuple, axis_name: Hashable | None, in_axes: AxisPrefix, mesh: Mesh | None
) -> PerDevice | Global:
    name = axes.function_name(fun)
    if axis_name is not None:
        subject = PerDevice(fun, name, axis_name, in_axes, args)
        subject.check()
        return subject
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    meshes = (each.mesh for each in shardings if isinstance(each, NamedSharding))
    mesh = mesh or next((each for each in meshes if isinstance(each, Mesh)), None)
    if mesh is None:
        raise refusal(
            ConsistencyError,
            what=f"'{name}' has no mesh to make smaller",
            which=["axis_name, mesh= are not given", "no argument has a NamedSharding"],
            why="a function of whole arrays runs on the devices of a mesh",
            do="Give axis_name='i' if the function is what one device does; else mesh=, or "
            "arguments placed by jax.device_put(x, NamedSharding(mesh, spec)).",
        )
    return Global(fun, name, mesh, args)


def _compared(
    program: CheckedProgram, leaves: Sequence[Any], reference: Reference, out_axes: AxisPrefix
) -> _Compared:
    one = reference.program.tree
    if program.tree != one:
        raise refusal(
            ConsistencyError,
            what="the result has another structure on another number of devices",
            which=[f"{program.devices} devices: {program.tree}", f"one device: {one}"],
            why="results are compared leaf by leaf",
            do="Return the same structure on any number of devices.",
        )
    run = Several(program, leaves, reference)
    results, _ = run.values()
    output = jax.tree.unflatten(one, [jnp.zeros(())] * one.num_leaves)
    names = ["result" + jax.tree_util.keystr(at) for at, _ in jax.tree.leaves_with_path(output)]
    along: list[Axis] = []
    extend = lambda axis, part: along.extend([axis] * jax.tree.structure(part).num_leaves)
    jax.tree.map(extend, out_axes, output, is_leaf=axes.is_none)
    judged = zip(names, results, reference.results, along, program.jaxpr.out_avals, strict=True)
    verdicts = [
        Verdict.of(name, value, expected, axis, is_key=runs.is_key(aval))
        for name, value, expected, axis, aval in judged
    ]
    drifting = []
    if run.draws and program.mapped:
        raw, _ = run.values(given=False)
        drifting = [
            each.name
            for each, own, given in zip(verdicts, raw, results, strict=True)
            if each.same and each.relation.kind == "same"
            and are_alike(given[:, None], each.tolerance).all()
            and not are_alike(own[:, None], each.tolerance).all()
        ]  # fmt: skip
    return _Compared(program, verdicts, drifting)


def _findings(
    compared: Sequence[_Compared], one: CheckedProgram, leaves: Sequence[Any], axis: Any
) -> tuple[Explanation, ...]:
    """What is wrong, from the run that tells most: of 4 devices, for 2 may be a size too."""
    wrong = [each for each in compared if each.drifting or any(not v.same for v in each.verdicts)]
    if not wrong:
        return ()
    most = min(wrong, key=lambda each: abs(each.program.devices - 4))
    return faults.explanations(most.program, one, leaves, most.verdicts, most.drifting, axis)


def _sections(report: Consistency) -> Iterator[rendering.Section]:
    if report.findings:
        yield rendering.Section("Found", tuple(map(_entry, report.findings)))
    told = [each for each in report.verdicts if not each.same or each.undecided]
    if told:
        rows = tuple(
            (each.name, str(each.devices), each.words or "undecided", f"{each.apart:.2g}",
             f"{each.tolerance:.2g}")
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
    text = finding.what + (f" ({finding.code})" if finding.code else "")
    place = f"{finding.where}: " if finding.where else ""
    return rendering.ReportEntry("", place + text, tuple(details))
