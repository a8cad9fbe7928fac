"""Two runs of one mapped function, call by call and array by array: bits, types, how they relate.

Shapes: `N` is the size of the device axis, which `jax.pmap` puts first and a migration may drop;
`*s` is the rest.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jax_dist.codemod.verify.evidence import Array, CallRecord, SiteRecord, first_few
from jax_dist.codemod.verify.ledger import How, SiteComparison

_Correspondence: TypeAlias = tuple[How, float, float] | None  # None: they do not correspond


def compare(before: SiteRecord, after: SiteRecord | None, tolerance: float = 0.0) -> SiteComparison:
    """Compares the first calls.

    Args:
      before: the function as it was.
      after: the same function after the migration, if one was called.
      tolerance: how far a float may differ, relative to the largest value of its array.
    """
    found = _Found(tolerance)
    if after is None:
        found.problems[""] = "it was called before, and no mapped function like it after"
    else:
        found.calls(before, after)
    return SiteComparison(
        file=before.file,
        line=before.line,
        function=before.function,
        calls_before=before.count,
        calls_after=0 if after is None else after.count,
        compared=found.compared,
        raised=found.raised,
        devices_before=_fewest_devices(before),
        devices_after=0 if after is None else _fewest_devices(after),
        absolute=found.absolute,
        relative=found.relative,
        how=tuple(sorted(found.how)),
        problems=first_few(found.problems.values()),
        notes=first_few(found.notes),
        signatures=tuple(found.signatures.values()),
        unproved=found.unproved,
    )


class _Found:
    """Gathers what differs in the calls of one function."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance
        self.compared = self.raised = 0
        self.absolute = self.relative = 0.0
        self.how: set[How] = set()
        self.problems: dict[str, str] = {}  # by what differs: its first difference says enough
        self.notes: list[str] = []
        self.signatures: dict[str, Mapping[str, Any]] = {}  # by their text
        self.unproved = ""  # the first reason

    def calls(self, before: SiteRecord, after: SiteRecord) -> None:
        for number, (one, other) in enumerate(zip(before.calls, after.calls, strict=False), 1):
            self._call(number, one, other)
        if not after.count:
            self.problems["calls"] = "it was called before, and is not called after"
        elif len(before.calls) > len(after.calls):
            self.problems["calls"] = f"calls: {before.count} before, {after.count} after"
        elif before.count != after.count:
            self.notes.append(f"calls: {before.count} before, {after.count} after")

    def _call(self, call: int, before: CallRecord, after: CallRecord) -> None:
        if before.raised or after.raised:
            raised = (
                f"raised {before.raised or 'nothing'} before, {after.raised or 'nothing'} after"
            )
            if before.raised != after.raised:
                self._different(call, "error", raised)
            self.raised += 1
            return
        self.compared += 1
        arguments: list[tuple[Array, Array, _Correspondence]] = []
        results: list[tuple[Array, Array, _Correspondence]] = []
        given, numbers = _without_new_numbers(before.given, after.given)
        if len(before.given) == len(given):
            for one, other in _partners(before.given, given):
                arguments.append((one, other, self._array(call, f"argument{one.path}", one, other)))
        else:
            counts = f"{len(before.given)} arrays before, {len(after.given)} after"
            self.notes.append(f"the arguments were not compared: {counts}")
        if len(before.returned) == len(after.returned):
            for one, other in _partners(before.returned, after.returned):
                results.append((one, other, self._result(call, f"result{one.path}", one, other)))
        else:
            counts = f"{len(before.returned)} arrays before, {len(after.returned)} after"
            self._different(call, "result", counts)
        if unknown := next((e.dtype for e in before.returned if e.dtype.startswith("unknown")), ""):
            self.compared -= 1
            self.notes.append(f"call {call}: its result is of {unknown.split()[1]}")
        try:
            signature = _signature(before, after, arguments, results, numbers)
        except _UnlikeError as reason:
            self.unproved = self.unproved or str(reason)
        else:
            self.signatures.setdefault(json.dumps(signature, sort_keys=True), signature)

    def _result(self, call: int, what: str, before: Array, after: Array) -> _Correspondence:
        if after.devices < before.devices:
            said = f"on {before.devices} devices before, on {after.devices} after"
            self._different(call, what, said)
        if before.dtype != after.dtype:
            self._different(call, what, f"{before.dtype} before, {after.dtype} after")
            return None
        found = self._array(call, what, before, after)
        if found is not None:
            how, absolute, relative = found
            if how != "one of equal copies" and after.parts < before.parts:
                parts = f"cut into {before.parts} parts before, and into {after.parts} after"
                self._different(call, what, parts)
            self.how.add(how)
            self.absolute = max(self.absolute, absolute)
            self.relative = max(self.relative, relative)
        return found

    def _array(self, call: int, what: str, before: Array, after: Array) -> _Correspondence:
        try:
            how, absolute, relative = _difference(before, after)
        except _UnlikeError as reason:
            self._different(call, what, str(reason))
            return None
        if not relative <= self.tolerance:
            size = f"differs by up to {absolute:.3g}, {relative:.2g} times its largest value"
            if not absolute:
                size = "differs in the sign of a zero, or in the bits of a NaN"
            self._different(call, what, size + _times(before, after, how))
        return how, absolute, relative

    def _different(self, call: int, what: str, said: str) -> None:
        self.problems.setdefault(what, f"call {call}, {what}: {said}")


def _signature(
    before: CallRecord,
    after: CallRecord,
    arguments: Sequence[tuple[Array, Array, _Correspondence]],
    results: Sequence[tuple[Array, Array, _Correspondence]],
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
    if any(found is None or found[1] for _, _, found in (*arguments, *results)):
        raise _UnlikeError("its arrays are not equal to the bit")
    if [new for _, new, _ in results] != list(after.returned):
        raise _UnlikeError("its results come in another order")
    places = {path: number for number, path in enumerate(one["paths"])}
    sources: dict[str, list[Any]] = {
        new.path: [places.get(old.path), found[0]]
        for old, new, found in arguments
        if found is not None
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
        "before": one["text"],
        "after": other["text"],
        "sizes": {},
        "environment": other["environment"],
        "arguments": relation,
        "results": [found[0] for _, _, found in results if found is not None],
    }


class _UnlikeError(Exception):
    """Two arrays differ in more than their values; says how."""


def _difference(before: Array, after: Array) -> tuple[How, float, float]:
    """How two arrays correspond, and their largest difference, absolute and relative.

    Raises:
      _UnlikeError: they do not correspond; or they do not equal each other, and are too large to
        say how far they differ.
    """
    if before.archive is not None and after.archive is not None:
        one, other = before.values(), after.values()
        for how, view in _views(one, other.shape):
            return how, *_distance(view, other)
    else:  # of a large one there are digests; a row-major reshape changes no byte, so no digest
        merged = (math.prod(before.shape[:2]), *before.shape[2:])
        if after.shape in (before.shape, merged) and _digest(before) == _digest(after):
            return ("as is" if after.shape == before.shape else "device axis merged"), 0.0, 0.0
        if after.shape == before.shape[1:] and set(before.rows) == {_digest(after)}:
            return "one of equal copies", 0.0, 0.0
        if before.shape == after.shape:
            raise _UnlikeError(
                f"a large array differs: mean {before.mean} before, {after.mean} after"
            )
    raise _UnlikeError(f"{[*before.shape]} before, {[*after.shape]} after")


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


def _times(before: Array, after: Array, how: How) -> str:
    """A constant factor tells what went wrong: a sum for a mean, over all devices."""
    one, other = before.values(), after.values()
    view = dict(_views(one, other.shape))[how]
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
