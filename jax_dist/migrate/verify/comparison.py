"""The comparison of two runs, call by call, and the verdict on each place."""

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jax_dist.migrate.review import Unreached
from jax_dist.migrate.verify.runs import Call, Run

Key: TypeAlias = tuple[str, int]  # path and line of a place, before

_TAIL = 8  # lines of a failed run's errors
_RATIO = 1e-2  # factors nearer to 1 are rounding


@dataclasses.dataclass(slots=True)
class Verdict:
    """Verdict of the runs on one place."""

    path: str
    line: int
    name: str = ""  # of the mapped function
    calls: int = 0
    same: int = 0
    raised: int = 0  # calls that raised the same error in both
    difference: str = ""  # the first
    replays: int = 0  # calls of pmap that were replayed by the new step
    reason: str = ""  # of the difference, if its numbers say it
    went_back: bool = False

    def __str__(self) -> str:
        if self.difference:
            text = f"different: {self.difference}"
        elif not self.calls:
            text = "never ran"
        elif self.raised == self.calls:
            text = f"raised in all of {self.calls} calls, before and after"
        else:
            text = f"same in {self.same} of {self.calls} calls"
            text += f", {self.replays} of them on 1, 2 and all devices" if self.replays else ""
        return text + (" (it went back)" if self.went_back else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """The verdicts of one comparison."""

    command: Sequence[str]
    verdicts: Sequence[Verdict]
    problems: Sequence[str]  # of the runs as a whole
    seconds: Sequence[float]  # of each run
    review: Sequence[Unreached] = ()  # lines that touch a changed value and did not run

    @property
    def has_differences(self) -> bool:
        """Return whether the program still differs."""
        return bool(self.problems) or any(v.difference and not v.went_back for v in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return the verification as the report's JSON has it."""
        return {
            "command": list(self.command),
            "seconds": [round(seconds, 1) for seconds in self.seconds],
            "problems": list(self.problems),
            "review": [dataclasses.asdict(line) for line in self.review],
            "places": [
                {**dataclasses.asdict(verdict), "verdict": str(verdict)}
                for verdict in self.verdicts
            ],
        }

    def __str__(self) -> str:
        count = sum(bool(v.calls) and not v.difference for v in self.verdicts)
        times = ", ".join(f"{seconds:.0f} s" for seconds in self.seconds)
        lines = [
            f"{count} of {len(self.verdicts)} places same in all calls of `"
            f"{shlex.join(self.command)}` ({len(self.seconds)} runs: {times})"
        ]
        for verdict in self.verdicts:
            name = f" {verdict.name}" if verdict.name else ""
            lines.append(f"  {verdict.path}:{verdict.line}{name}: {verdict}")
        lines += [f"  {problem}" for problem in self.problems]
        return "\n".join(lines)


def compare(
    command: Sequence[str],
    before: Run,
    after: Run,
    places: Sequence[Key],
    rounded: Collection[Key] = (),
) -> Verification:
    """Compare two runs.

    Args:
      command: what was run.
      before: the run of the old program.
      after: the run of the new one.
      places: where functions are mapped, by path and line of the old text.
      rounded: those that may differ by rounding, as sums over a whole batch do.

    Returns:
      The verdicts: the first call that differs says where, and later ones follow from it.
    """
    verdicts = {key: Verdict(*key) for key in places}
    problems = list(_problems_of_runs(before, after))
    if len(before.calls) != len(after.calls) and not problems:
        problems.append(f"{len(before.calls)} processes ran before, {len(after.calls)} after")
    for olds, news in zip(before.calls, after.calls, strict=False):
        for number, (old, new) in enumerate(itertools.zip_longest(olds, news)):
            call = old or new
            key = _nearest(verdicts, call.path, call.line) if old else None
            if key is None:
                continue
            verdict = verdicts[key]
            verdict.name = verdict.name or call.name
            verdict.calls += 1
            text = _difference(old, new, number if rounded else None)
            if new is not None and new.replay is not None:
                verdict.replays += not new.replay["text"]
                if new.replay["text"] and not verdict.difference:  # it follows from no other
                    verdict.difference = f"call {number + 1}, {new.replay['text']}"
                    verdict.reason = new.replay["reason"]
                    continue
            if not text:
                verdict.same += 1
                verdict.raised += bool(old.raised)
            elif not any(other.difference for other in verdicts.values()):
                verdict.difference = f"call {number + 1}, {text}"
        if len(news) > len(olds) and not any(v.difference for v in verdicts.values()):
            problems.append(f"{len(news) - len(olds)} more calls of mapped functions after")
    if not any(verdict.difference for verdict in verdicts.values()):
        problems += _output_difference(before.output, after.output, is_rounded=bool(rounded))
    return Verification(command, list(verdicts.values()), problems, [before.seconds, after.seconds])


def _nearest(verdicts: Mapping[Key, Verdict], path: str, line: int) -> Key | None:
    """Return the place of a call: one line of it is where the function was mapped."""
    lines = [key for key in verdicts if key[0] == path and key[1] <= line]
    return max(lines, default=None, key=lambda key: key[1])


def _problems_of_runs(before: Run, after: Run) -> Iterator[str]:
    for run, when in ((before, "before"), (after, "after")):
        if run.exit_code is None:
            yield f"the run {when} was stopped by --timeout, after {run.seconds:.0f} s"
    if before.exit_code == after.exit_code:
        if before.exit_code:
            yield f"the command fails before and after, with exit code {before.exit_code}:"
            yield from _tail(before)
    elif before.exit_code is not None and after.exit_code is not None:
        yield f"exit code {before.exit_code} before, {after.exit_code} after:"
        yield from _tail(after if after.exit_code else before)


def _tail(run: Run) -> Iterator[str]:
    yield from (f"  {line}" for line in run.errors.strip().splitlines()[-_TAIL:])


def _difference(old: Call | None, new: Call | None, rounded: int | None = None) -> str:
    """Return how two calls differ; "" if they do not.

    `rounded`: the number of the call, if they may differ by rounding, which grows with it.
    """
    if old is None or new is None:
        return "it was not called after" if new is None else "it was not called before"
    if old.raised.partition(":")[0] != new.raised.partition(":")[0]:
        return f"{old.raised or 'no error'} before, {new.raised or 'no error'} after"
    if old.raised:
        return ""
    if len(old.returned) != len(new.returned):
        return f"{len(old.returned)} results before, {len(new.returned)} after"
    sides = [("result", old.returned, new.returned)]
    if len(old.given) == len(new.given):
        sides.insert(0, ("argument", old.given, new.given))
    for side, olds, news in sides:
        for one, other in zip(olds, news, strict=True):
            text = _leaf_difference(one, other)
            if text == "values differ" and rounded is not None:
                text = "" if _is_close(one, other, old, new, rounded) else text
            if text:
                return f"{side}{one['path']}: {text}{_amount(one, other, old, new)}"
    return ""


def _leaf_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return how two leaves differ; the device axis may have gone, as copies or as rows."""
    if "text" in one or "text" in other:
        return "" if one.get("text") == other.get("text") else "another value"
    if one["dtype"] != other["dtype"]:
        return f"{one['dtype']} before, {other['dtype']} after"
    if one["shape"] == other["shape"]:
        return "" if one["digest"] == other["digest"] else "values differ"
    if one["shape"][1:] == other["shape"]:  # copies
        rows, copies = one.get("rows", []), other.get("copies", [other["digest"]])
        # A program that reads the first row of a state may have put that on all devices.
        if copies == rows or {*copies} == {*rows[:1]}:
            return ""
        return "values differ" if len({*copies}) <= len({*rows}) else "the copies differ"
    if other["shape"] == [math.prod(one["shape"][:2]), *one["shape"][2:]]:  # rows
        return "" if one["digest"] == other["digest"] else "values differ"
    return f"{one['shape']} before, {other['shape']} after"


_ROUNDING = 1e-4  # of the largest element, in the first call
_GROWTH = 1.3  # from call to call


def _is_close(
    one: Mapping[str, Any], other: Mapping[str, Any], old: Call, new: Call, number: int
) -> bool:
    """Return whether two arrays differ by no more than rounding may make of them by then."""
    x, y = _arrays(one, other, old, new)
    if x is None or "float" not in one["dtype"]:
        return False
    bound = min(_ROUNDING * _GROWTH**number, 0.1) * max(float(abs(x).max()), 1e-3)
    return bool((abs(x - y) <= bound).all())


def _amount(one: Mapping[str, Any], other: Mapping[str, Any], old: Call, new: Call) -> str:
    """Return by how much two recorded arrays differ, and by which factor."""
    import numpy as np

    x, y = _arrays(one, other, old, new)
    if x is None or (x == y).all():
        return ""
    text = f" by up to {np.max(np.abs(x - y)):.3g}"
    usual = (x != 0) & np.isfinite(x) & np.isfinite(y)
    ratio = float(np.median(y[usual] / x[usual])) if usual.any() else 1.0
    return text + (f", {ratio:.4g} times what it was" if abs(ratio - 1) > _RATIO else "")


def _arrays(one: Mapping[str, Any], other: Mapping[str, Any], old: Call, new: Call) -> Any:
    """Return two recorded arrays as floats of one shape; None and None if they are not kept."""
    x, y = old.values.get(one.get("key", "")), new.values.get(other.get("key", ""))
    if x is None or y is None or x.dtype.kind not in "fiu":
        return None, None
    if x.size != y.size and x.shape[1:] != y.shape:
        return None, None
    x = x.reshape(y.shape) if x.size == y.size else x[0]  # rows, or copies
    return x.astype(float), y.astype(float)


# What differs from run to run: times, rates, addresses, names of temporary files.
_CHANGING = re.compile(
    r"0x[0-9a-f]+|\d+:\d\d(:\d\d)?([.,]\d+)?|\d{4}-\d\d-\d\d"
    r"|\d+(\.\d+)?(e[-+]?\d+)?\s*(ms|us|s|sec|secs|seconds|min|it/s|steps/s|fps|sps)\b"
    r"|/tmp/\S+|jax-dist-\S+|\x1b\[[\d;]*[A-Za-z]"
)
_TIMED = re.compile(r"time|sec\b|/s\b|sps|fps|speed|elapsed|duration|pid", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


def _output_difference(before: str, after: str, *, is_rounded: bool) -> list[str]:
    olds, news = (list(map(_masked, text.splitlines())) for text in (before, after))
    same = _is_about if is_rounded else str.__eq__
    for number, (old, new) in enumerate(itertools.zip_longest(olds, news, fillvalue="")):
        if not same(old, new):
            lines = f"{_line(before, number)} / {_line(after, number)}"
            return [f"the output differs in line {number + 1}: {lines}"]
    return []


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return repr(lines[number][:80]) if number < len(lines) else "nothing"


def _is_about(old: str, new: str) -> bool:
    """Return whether two lines differ by no more than about a hundredth of their numbers."""
    texts = (" ".join(_NUMBER.sub("*", line).split()) for line in (old, new))
    if len({*texts}) != 1:
        return False
    numbers = ([float(match[0]) for match in _NUMBER.finditer(line)] for line in (old, new))
    return all(
        math.isclose(x, y, rel_tol=_RATIO, abs_tol=_ROUNDING) for x, y in zip(*numbers, strict=True)
    )


def _masked(line: str) -> str:
    line = _CHANGING.sub("*", line)
    return _NUMBER.sub("*", line) if _TIMED.search(line) else line
