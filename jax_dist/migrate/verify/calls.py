"""Two runs of one mapped function, call by call and array by array: bits, types, how they relate.

Shapes: `N` is the size of the device axis, which `jax.pmap` puts first and a migration may drop;
`*s` is the rest.
"""

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jax_dist.migrate.verify.evidence import Array, CallRecord, SiteRecord
from jax_dist.migrate.verify.ledger import How, Key, SiteComparison

_SHOWN = 3  # problems of one place
_Related: TypeAlias = tuple[Array, Array, How | None]  # before, after; None: they do not correspond


def compare(
    before: SiteRecord,
    after: SiteRecord | None,
    tolerance: float = 0.0,
    *,
    may_move: bool = False,
    ignored: Collection[Key] = (),
) -> SiteComparison:
    """Compares all calls.

    Args:
      before: the function as it was.
      after: the same function after the migration, if one was called.
      tolerance: how far a float may differ, relative to the largest value of its array.
      may_move: whether its results may lie elsewhere than before: what puts them on devices.
      ignored: what differs from run to run without the migration too, and so shows nothing.
    """
    found = _Found(tolerance, may_move=may_move, ignored=ignored)
    if after is None:
        found.problems["", "calls"] = "it was called before, and no mapped function like it after"
    else:
        found.calls(before, after)
    return SiteComparison(
        file=before.file,
        line=before.line,
        function=before.function,
        calls_before=before.count,
        calls_after=0 if after is None else after.count,
        compared=found.compared,
        equal=found.equal,
        raised=found.raised,
        devices_before=_fewest_devices(before),
        devices_after=0 if after is None else _fewest_devices(after),
        absolute=found.absolute,
        relative=found.relative,
        how=tuple(sorted(found.how)),
        problems=first_few(found.problems.values()),
        notes=first_few(found.notes),
        differing=frozenset(found.problems),
        same_form=found.same_form,
        unsteady=found.unsteady,
        signatures=tuple(found.signatures.values()),
        unproved=found.unproved,
    )


class _Found:
    """Gathers what differs in the calls of one function."""

    def __init__(self, tolerance: float, *, may_move: bool, ignored: Collection[Key]):
        self.tolerance, self.may_move, self.ignored = tolerance, may_move, ignored
        self.compared = self.equal = self.raised = 0
        self.absolute = self.relative = 0.0
        self.how: set[How] = set()
        # By what differs, and the kind of the difference: the first one says enough.
        self.problems: dict[Key, str] = {}
        self.notes: list[str] = []
        self.same_form, self.unsteady = True, False
        self.signatures: dict[str, Mapping[str, Any]] = {}  # by their text
        self.unproved = ""  # the first reason

    def calls(self, before: SiteRecord, after: SiteRecord) -> None:
        for number, (one, other) in enumerate(zip(before.calls, after.calls, strict=False), 1):
            self._differs = self._drifts = False  # the call; what it is given
            self._call(number, one, other)
        if before.count != len(before.calls):
            self.unproved = self.unproved or "not all of its calls were written down"
        seen = [call.text for call in before.calls[: len(after.calls)]]
        if any(call.text not in seen for call in before.calls):
            self.unproved = self.unproved or "not all of its programs were seen in both runs"
        calls = f"{before.count} before, {after.count} after"
        if not after.count:
            self._differing("", "calls", "it was called before, and is not called after")
        elif before.count != after.count:
            self._differing("", "calls", f"calls: {calls}")

    def _call(self, call: int, before: CallRecord, after: CallRecord) -> None:
        if before.raised or after.raised:
            if before.raised == after.raised:
                self.raised += 1
                return
            names = before.raised or "nothing", after.raised or "nothing"
            self._different(call, "error", "error", "raised {} before, {} after".format(*names))
            self.unproved = self.unproved or "it raised an error in one of the runs"
            return
        self.compared += 1
        arguments: list[_Related] = []
        results: list[_Related] = []
        given, numbers = _without_new_numbers(before.given, after.given)
        if len(before.given) == len(given):
            for one, other in _partners(before.given, given):
                arguments.append((one, other, self._array(call, f"argument{one.path}", one, other)))
        else:
            counts = f"{len(before.given)} arrays before, {len(after.given)} after"
            self.notes.append(f"the arguments were not compared: {counts}")
            self.same_form = False
        self.same_form &= all(how == "as is" for *_, how in arguments)
        self._drifts = self._differs
        if len(before.returned) == len(after.returned):
            for one, other in _partners(before.returned, after.returned):
                results.append((one, other, self._result(call, f"result{one.path}", one, other)))
        else:
            counts = f"{len(before.returned)} arrays before, {len(after.returned)} after"
            self._different(call, "result", "type", counts)
        self.same_form &= all(how == "as is" for *_, how in results)
        for one, other, how in results:
            self._placed(call, f"result{one.path}", one, other, how)
        self._around(call, before, after)
        self.equal += not self._differs
        self._sign(before, after, arguments, results, numbers)

    def _around(self, call: int, before: CallRecord, after: CallRecord) -> None:
        """What a call is beside its arrays."""
        if self.same_form:
            for number in sorted({*before.donated} ^ {*after.donated}):
                side = "before" if number in before.donated else "after"
                self._different(call, f"argument {number}", "donation", f"donated {side} only")
        unknown = [each.dtype for each in before.returned if each.dtype.startswith("unknown")]
        if None in (before.structure, after.structure):
            unknown.append("unknown structure")
        elif before.structure != after.structure:
            names = (str(each).split()[0] for each in (before.structure, after.structure))
            said = "another structure: {} before, {} after".format(*names)
            self._different(call, "result", "structure", said)
        if unknown:
            self._differs = True
            self.compared -= 1
            self.notes.append(f"call {call}: its result is of {unknown[0].split()[1]}")

    def _result(self, call: int, what: str, before: Array, after: Array) -> How | None:
        if (before.dtype, before.weak) != (after.dtype, after.weak):
            kinds = (f"{'weak ' * e.weak}{e.dtype}" for e in (before, after))
            self._different(call, what, "type", "{} before, {} after".format(*kinds))
            if before.dtype != after.dtype:
                return None
        how = self._array(call, what, before, after)
        if how is not None:
            self.how.add(how)
        return how

    def _placed(self, call: int, what: str, before: Array, after: Array, how: How | None) -> None:
        moved = self._moved(before, after, how) if how is not None else ""
        if moved and self.may_move:
            self.notes.append(f"call {call}, {what}: {moved}")
            if self.same_form:
                self.unproved = self.unproved or "its results lie elsewhere than before"
            self.same_form = False
        elif moved:
            self._different(call, what, "placement", moved)

    def _moved(self, before: Array, after: Array, how: How) -> str:
        """How a result lies elsewhere: in the same form, all must be at its place."""
        if after.devices < before.devices or (self.same_form and after.devices != before.devices):
            return f"on {before.devices} devices before, on {after.devices} after"
        cut = how != "one of equal copies" and 0 not in before.shape
        if cut and after.parts < before.parts:
            return f"cut into {before.parts} parts before, and into {after.parts} after"
        turned = self.same_form and after.placed != before.placed
        return "other slices on the devices, or another order of them" if turned else ""

    def _array(self, call: int, what: str, before: Array, after: Array) -> How | None:
        how = _relation(before, after)
        if how is None:
            shapes = f"{[*before.shape]} before, {[*after.shape]} after"
            self._different(call, what, "shape", shapes)
            return None
        if self._drifts:  # from other arguments come other results
            return how
        absolute, relative, said = _difference(before, after, how)
        if not relative <= self.tolerance:
            self._different(call, what, "value", said)
        if what.startswith("result"):
            self.absolute = max(self.absolute, absolute)
            self.relative = max(self.relative, relative)
        return how

    def _different(self, call: int, what: str, kind: str, said: str) -> None:
        self._differs = True
        self._differing(what, kind, f"call {call}, {what}: {said}")

    def _differing(self, what: str, kind: str, said: str) -> None:
        if (what, kind) in self.ignored:
            self.unsteady = True
        else:
            self.problems.setdefault((what, kind), said)

    def _sign(
        self,
        before: CallRecord,
        after: CallRecord,
        arguments: Sequence[_Related],
        results: Sequence[_Related],
        numbers: Sequence[Array],
    ) -> None:
        try:
            signature = _signature(before, after, arguments, results, numbers)
        except _UnlikeError as reason:
            self.unproved = self.unproved or str(reason)
        else:
            self.signatures.setdefault(json.dumps(signature), signature)


def _signature(
    before: CallRecord,
    after: CallRecord,
    arguments: Sequence[_Related],
    results: Sequence[_Related],
    numbers: Sequence[Array],
) -> Mapping[str, Any]:
    """The two programs of a call, and how the arrays of one came from those of the other.

    Args:
      before, after: the call.
      arguments, results: the arrays that belong together, and how they correspond.
      numbers: arguments after it that were constants of the program before.

    Raises:
      _UnlikeError: there are none, or an array is another one.
    """
    one, other = before.text or {}, after.text or {}
    if "text" not in one or "text" not in other:
        raise _UnlikeError(one.get("why") or other.get("why") or "its program was not written down")
    if any(how is None for *_, how in (*arguments, *results)):
        raise _UnlikeError("its arrays have other shapes")
    if [new for _, new, _ in results] != list(after.returned):
        raise _UnlikeError("its results come in another order")
    places = {path: number for number, path in enumerate(one["paths"])}
    sources: dict[str, list[Any]] = {
        new.path: [places.get(old.path), how] for old, new, how in arguments
    }
    kinds = dict(zip(other["paths"], (kind for _, kind in other["text"]["in"]), strict=True))
    for each in numbers:
        if (kind := kinds.get(each.path, "")).endswith("[]"):
            value = each.values().astype(kind.removesuffix("[]"))
            sources[each.path] = [f"{kind} {value.tobytes().hex()}", "a number"]
    relation = [sources.get(path, [None, ""]) for path in other["paths"]]
    own = [old for old, how in relation if how != "a number"]
    if len(one["paths"]) != len(own) or any(old is None for old in own):
        raise _UnlikeError("its programs take other arguments")
    return {
        **both(one, other, sizes=all(how == "as is" for *_, how in (*arguments, *results))),
        "arguments": relation,
        "results": [how for *_, how in results],
    }


def both(one: Mapping[str, Any], other: Mapping[str, Any], *, sizes: bool) -> dict[str, Any]:
    """Two texts as a recording has them, as `equivalence.proof` takes them.

    Args:
      one, other: before and after.
      sizes: those for other numbers of devices too.
    """
    sides = {"before": one.get("sizes", {}), "after": other.get("sizes", {})} if sizes else {}
    every = sorted({size for texts in sides.values() for size in texts}, key=int)
    return {
        "before": one["text"],
        "after": other["text"],
        "sizes": {n: {k: texts[n] for k, texts in sides.items() if n in texts} for n in every},
        "environment": other["environment"],
    }


class _UnlikeError(Exception):
    """Two calls do not correspond; says why."""


def _relation(before: Array, after: Array) -> How | None:
    """How two arrays correspond by their shapes; None where they do not."""
    if before.archive is not None and after.archive is not None:
        return next((how for how, _ in _views(before.values(), after.shape)), None)
    merged = (math.prod(before.shape[:2]), *before.shape[2:])
    if after.shape == before.shape:
        return "as is"
    if after.shape == before.shape[1:] and len({*before.rows}) == 1:
        return "one of equal copies"
    return "device axis merged" if after.shape == merged and before.shape else None


def _difference(before: Array, after: Array, how: How) -> tuple[float, float, str]:
    """The largest difference, absolute and relative, and in words.

    Of a large array there are digests; a row-major reshape changes no byte, and so no digest.
    """
    if before.archive is not None and after.archive is not None:
        view, other = dict(_views(before.values(), after.shape))[how], after.values()
        absolute, relative = _distance(view, other)
        said = f"differs by up to {absolute:.3g}, {relative:.2g} times its largest value"
        if not absolute:
            said = "differs in the sign of a zero, or in the bits of a NaN"
        return absolute, relative, said + _times(view, other)
    copied = how == "one of equal copies"
    if (before.rows[0] if copied else _digest(before)) == _digest(after):
        return 0.0, 0.0, ""
    said = f"a large array differs: mean {before.mean} before, {after.mean} after"
    return math.inf, math.inf, said


def _views(values: np.ndarray, shape: tuple[int, ...]) -> Iterator[tuple[How, np.ndarray]]:
    """The readings of `values` that have this shape.

    Equal copies have the same bits: a zero of each sign would be two.
    """
    if values.shape == shape:
        yield "as is", values
    if values.shape[1:] == shape and values.ndim and len({row.tobytes() for row in values}) == 1:
        yield "one of equal copies", values[0]
    if values.ndim > 1 and shape == (values.shape[0] * values.shape[1], *values.shape[2:]):
        yield "device axis merged", values.reshape(shape)


def _distance(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The largest difference; and relative to the largest value of `one`."""
    if one.tobytes() == other.tobytes():
        return 0.0, 0.0
    equal = (one == other) | ((one != one) & (other != other))
    if np.all(equal):  # but for the sign of a zero, or what is in a NaN
        return 0.0, math.inf
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        each = np.abs(one.astype(wide) - other.astype(wide))
    each = np.where(equal, 0.0, each)
    absolute = float(np.max(each))
    if not math.isfinite(absolute):  # a NaN or an infinity on one side only
        return math.inf, math.inf
    largest = float(np.max(np.abs(one.astype(wide)), where=np.isfinite(one), initial=0.0))
    exact = one.dtype.kind in "biu"  # rounding is no excuse
    return absolute, math.inf if exact or not largest else absolute / largest


def _digest(array: Array) -> str:
    """As the recording computes it; one of the two arrays may have been small enough to keep."""
    return array.digest or hashlib.sha256(array.values().tobytes()).hexdigest()


def _times(view: np.ndarray, other: np.ndarray) -> str:
    """A constant factor tells what went wrong: a sum for a mean, over all devices."""
    usual = (view != 0) & np.isfinite(view) & np.isfinite(other)
    if view.dtype.kind not in "f" or not np.any(usual):
        return ""
    ratios = other[usual].astype(np.float64) / view[usual].astype(np.float64)
    factor = float(np.median(ratios))
    constant = np.all(np.abs(ratios - factor) <= 1e-3 * abs(factor))
    return f": {factor:.4g} times what it was" if constant and abs(factor - 1) > 1e-2 else ""


def _without_new_numbers(
    before: Sequence[Array], after: Sequence[Array]
) -> tuple[list[Array], list[Array]]:
    """The arguments after it, and apart the numbers of Python that were static before."""
    known = {array.path for array in before}
    is_new = lambda array: (
        array.path not in known and array.dtype in ("int", "float") and array.archive is not None
    )
    return [each for each in after if not is_new(each)], [each for each in after if is_new(each)]


def _partners(before: Sequence[Array], after: Sequence[Array]) -> list[tuple[Array, Array]]:
    """By their paths, if these are the same; otherwise in their order."""
    by_path = {array.path: array for array in after}
    if {array.path for array in before} == set(by_path):
        return [(array, by_path[array.path]) for array in before]
    return list(zip(before, after, strict=True))


def _fewest_devices(site: SiteRecord) -> int:
    results = [array.devices for call in site.calls for array in call.returned]
    return min(results, default=0)


def first_few(texts: Iterable[str]) -> tuple[str, ...]:
    """Without repetition, and not too many."""
    different = list(dict.fromkeys(texts))
    more = len(different) - _SHOWN
    return tuple(different[:_SHOWN]) + ((f"and {more} more",) if more > 0 else ())
