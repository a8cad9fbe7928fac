"""The comparison of two runs, call by call, and the verdict on each place."""

import dataclasses
import functools
import itertools
import math
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from jax_dist.migrate.review import Line
from jax_dist.migrate.verify.recording import replays
from jax_dist.migrate.verify.recording.records import RecordedCall, RecordedLeaf
from jax_dist.migrate.verify.runs import Run

Key: TypeAlias = tuple[str, int]  # path and line of a place, before

_TAIL = 8  # lines of a failed run's errors
_RATIO = 1e-2  # factors nearer to 1 are rounding
_MOST_ROUNDING = 0.1  # of the largest element of an array, after any number of calls
_FACTOR = 10.0  # by which a value may be more rounded than those that it is made of

# What differs from run to run: times, rates, addresses, names of temporary files; and positions in
# files, which jax 0.12 prints for arrays that cannot be sharded, and which a migration moves.
_CHANGING = re.compile(
    r"0x[0-9a-f]+|\.py:\d+(:\d+)?|\d+:\d\d(:\d\d)?([.,]\d+)?|\d{4}-\d\d-\d\d"
    r"|\d+(\.\d+)?(e[-+]?\d+)?\s*(ms|us|s|sec|secs|seconds|min|it/s|steps/s|fps|sps)\b"
    r"|/tmp/\S+|jax-dist-\S+|\x1b\[[\d;]*[A-Za-z]"
)
_TIMED = re.compile(r"time|sec\b|/s\b|sps|fps|speed|elapsed|duration|pid", re.IGNORECASE)
_GLOO = re.compile(r"\[Gloo\]|peer ranks|^(\[\d+\])?\s*$")  # its lines, in pieces at times
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


@dataclasses.dataclass(slots=True)
class Verdict:
    """Verdict on one place that maps a function: whether its calls are the same in both runs."""

    path: str
    line: int  # of the old text
    name: str = ""  # of the mapped function
    calls: int = 0  # in the old run
    same: int = 0  # of these, the calls that the new run made with equal values
    raised: int = 0  # of the same calls, those that raised an error in both runs
    difference: str = ""  # the first: "call 2, result: values differ by up to 14"
    replays: int = 0  # calls of pmap that gave the same when the new step was run alone
    reason: str = ""  # the likely cause in the step, if the numbers show it
    earlier: str = ""  # how it differed in the form that was tried first: "as jit, call 2, ..."
    unreduced: str = ""  # a result that has another value on each device, of which one is left

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
            if self.unreduced:  # in the old program, too
                text += f"; {self.unreduced} differs between devices: is a psum missing?"
        return text + (f" ({self.earlier})" if self.earlier else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """The verdicts of one comparison."""

    command: Sequence[str]
    verdicts: Sequence[Verdict]
    problems: Sequence[str]  # of the runs as a whole: exit codes, numbers of calls, output
    seconds: Sequence[float]  # that each run took
    review: Sequence[Line] = ()  # lines that touch a changed value and did not run
    # Where files that do not change, and that ran, use names that the runs put back in jax.
    removed: Sequence[str] = ()

    @property
    def has_differences(self) -> bool:
        """Return whether a run has a problem, or a place differs."""
        return bool(self.problems) or any(verdict.difference for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        """Return the verification as the report's JSON has it."""
        return {
            "command": list(self.command),
            "seconds": [round(seconds, 1) for seconds in self.seconds],
            "problems": list(self.problems),
            "review": [line._asdict() for line in self.review],
            "removed": list(self.removed),
            "places": [{**dataclasses.asdict(v), "verdict": str(v)} for v in self.verdicts],
        }

    def __str__(self) -> str:
        count = len([v for v in self.verdicts if v.calls and not v.difference])
        places, command = f"{count} of {len(self.verdicts)} places", shlex.join(self.command)
        times = ", ".join(f"{seconds:.0f} s" for seconds in self.seconds)
        lines = [f"{places} same in all calls of `{command}` ({len(self.seconds)} runs: {times})"]
        for verdict in self.verdicts:
            name = f" {verdict.name}" if verdict.name else ""
            lines.append(f"  {verdict.path}:{verdict.line}{name}: {verdict}")
        lines += [f"  {problem}" for problem in self.problems]
        if self.removed:
            removed = ", ".join(self.removed)
            lines.append(f"  migrate {removed}, too: the runs put back names that jax removed")
        return "\n".join(lines)


def compare(
    command: Sequence[str],
    before: Run,
    after: Run,
    places: Collection[Key],
    *,
    may_round: bool = False,
) -> Verification:
    """Compare the recorded calls of a program before and after its migration.

    The calls of each process are paired in the order they were made. Only the first difference
    is noted, as later ones may follow from it.

    Args:
      places: where functions are mapped, by path and line of the old text.
      may_round: allow rounding errors, as of sums over a whole batch instead of its parts.
    """
    verdicts = [Verdict(*place) for place in places]
    problems = list(_run_problems(before, after))
    if len(before.calls) != len(after.calls) and not problems:
        problems.append(f"{len(before.calls)} processes ran before, {len(after.calls)} after")
    for old_calls, new_calls in zip(before.calls, after.calls, strict=False):
        comparison = _ProcessComparison(verdicts, may_round=may_round)
        for number, (old, new) in enumerate(itertools.zip_longest(old_calls, new_calls)):
            if old is not None:
                comparison.judge(number, old, new)
        extra = len(new_calls) - len(old_calls)
        if extra > 0 and not any(verdict.difference for verdict in verdicts):
            problems.append(f"{extra} more calls of mapped functions after")
    if not any(verdict.difference for verdict in verdicts):
        problems += _output_problems(before, after, may_round=may_round)
    return Verification(command, verdicts, problems, [before.seconds, after.seconds])


def _run_problems(before: Run, after: Run) -> Iterator[str]:
    """Yield lines that say which run was stopped or failed, with the end of its errors."""
    for run, when in ((before, "before"), (after, "after")):
        if run.exit_code is None:
            yield f"the run {when} was stopped by --timeout, after {run.seconds:.0f} s"
    codes = before.exit_code, after.exit_code
    if None in codes or codes == (0, 0):
        return
    yield f"exit code {codes[0]} before, {codes[1]} after:"
    errors = after.errors if after.exit_code else before.errors
    yield from (f"  {line}" for line in errors.strip().splitlines()[-_TAIL:])


class _ProcessComparison:
    """The comparison of the calls of one process, in the order they were made.

    A "deviation" is the largest difference of two arrays, relative to the old one's largest
    element. Replays show what of it is rounding: runs of a step alone, on perturbed arguments.
    """

    def __init__(self, verdicts: Sequence[Verdict], *, may_round: bool):
        self._verdicts, self._may_round = verdicts, may_round
        self._perturbation = 1e-7  # of the arguments of the last replay, relative to themselves
        # By place: the deviation of each result in its replay; infinite for NaNs and bools.
        self._tolerances: dict[Key, Sequence[float]] = {}
        self._largest_deviation = 0.0  # of all results so far

    def judge(self, number: int, old: RecordedCall, new: RecordedCall | None) -> None:
        """Count a call in the verdict on its place; `new` is None if it was not made again."""
        of_file = [verdict for verdict in self._verdicts if verdict.path == old.path]
        if not of_file:
            return
        # A call has the line of `@partial(`, a place that of `jax.pmap`, which may be below it.
        verdict = min(of_file, key=lambda verdict: abs(verdict.line - old.line))
        verdict.name = verdict.name or old.name
        verdict.calls += 1
        place, replay = (verdict.path, verdict.line), None if new is None else new.replay
        if replay and not replay["text"]:  # it gave the same
            verdict.replays += 1
            self._perturbation, self._tolerances[place] = replay["epsilon"], replay["tolerances"]
        elif replay and not verdict.difference:
            # A replay starts from the arguments of the old run: no earlier call is the cause.
            verdict.difference = f"call {number + 1}, {replay['text']}"
            verdict.reason = replay["reason"]
        text = self._describe_difference(place, old, new)
        if not text:
            verdict.same += 1
            verdict.unreduced = verdict.unreduced or _find_unreduced(old, new)
            verdict.raised += bool(old.raised)
        elif not any(verdict.difference for verdict in self._verdicts):  # later ones may follow
            verdict.difference = f"call {number + 1}, {text}"

    def _describe_difference(self, place: Key, old: RecordedCall, new: RecordedCall | None) -> str:
        """Return how a call differs: "result[0]: values differ by up to 14"; "" if it does not."""
        if new is None:
            return "it was not called after"
        old_error_type, new_error_type = (call.raised.partition(":")[0] for call in (old, new))
        if old_error_type != new_error_type:
            return f"{old.raised or 'no error'} before, {new.raised or 'no error'} after"
        if old.raised:
            return ""
        if len(old.results) != len(new.results):
            return f"{len(old.results)} results before, {len(new.results)} after"
        argument_deviation = 0.0  # the largest one
        if len(old.arguments) == len(new.arguments):  # a migration may drop or add arguments
            for _, text, deviation in self._compare_leaves(old.arguments, new.arguments):
                # Arguments are made of earlier results, which may have been rounded.
                if deviation is None or deviation > _FACTOR * self._largest_deviation:
                    return f"argument{text}"
                argument_deviation = max(argument_deviation, deviation)
        for index, text, deviation in self._compare_leaves(old.results, new.results):
            if deviation is None or deviation > self._tolerance(place, index, argument_deviation):
                return f"result{text}"
            if deviation < math.inf:
                self._largest_deviation = max(self._largest_deviation, deviation)
        return ""

    def _compare_leaves(
        self, old: Sequence[RecordedLeaf], new: Sequence[RecordedLeaf]
    ) -> Iterator[tuple[int, str, float | None]]:
        """Yield `(0, "[0]: values differ by up to 1e-05", 2e-07)` for each leaf that differs.

        The last is the deviation; None where it cannot be rounding, as if the shapes differ.
        """
        for index, (old_leaf, new_leaf) in enumerate(zip(old, new, strict=True)):
            if text := _compare_leaf(old_leaf, new_leaf):
                amount, deviation = _measure_difference(old_leaf, new_leaf)
                may_round = self._may_round and text == "values differ"
                yield index, f"{old_leaf.path}: {text}{amount}", deviation if may_round else None

    def _tolerance(self, place: Key, index: int, argument_deviation: float) -> float:
        """Return the largest deviation of a call's result number `index` that may be rounding.

        It is what the replay of the step at `place` showed, and more if the call's arguments
        deviate by more than those of the replay were perturbed.
        """
        # A step of shard_map is not replayed: the most that any replay showed.
        most = max(itertools.chain(*self._tolerances.values()), default=0.0)
        tolerance = self._tolerances[place][index] if self._tolerances.get(place) else most
        if argument_deviation == 0:
            return tolerance
        scaled = tolerance * argument_deviation / self._perturbation
        # Later steps may amplify rounding more than those that were replayed, in a warm-up.
        amplified = max(scaled, _FACTOR * self._largest_deviation)
        return max(tolerance, min(amplified, _MOST_ROUNDING))


def _find_unreduced(old: RecordedCall, new: RecordedCall | None) -> str:
    """Return a result with other values on other devices, of which one is left: "result[0]"."""
    pairs = zip(old.results, new.results if new else (), strict=False)
    lost = lambda x, y: x.shape[1:] == y.shape != x.shape and len({*x.rows}) > 1 and not x.is_keys
    return next((f"result{x.path}" for x, y in pairs if lost(x, y)), "")


def _compare_leaf(old: RecordedLeaf, new: RecordedLeaf) -> str:
    """Return how an argument or result differs in the new run: "values differ"; "" if it does not.

    Without the device axis of pmap, state that was stacked as `[devices, ...]` is one replicated
    array `[...]`, and a batch `[devices, rows, ...]` is an array `[devices * rows, ...]`.
    """
    if old.text is not None or new.text is not None:
        return "" if old.text == new.text else "another value"
    if old.dtype != new.dtype:
        return f"{old.dtype} before, {new.dtype} after"
    is_merged = new.shape == [math.prod(old.shape[:2]), *old.shape[2:]]
    if old.shape[1:] == new.shape != old.shape:  # state that is no longer stacked
        old_digests, new_digests = old.rows, new.copies or [new.digest]  # of each device's copy
        # A program that reads the first row of a state may have put that on all devices.
        is_first_row = set(new_digests) == set(old_digests[:1])
        # Instead of keys for all devices a jit takes one: its results show whether it may.
        if new_digests == old_digests or is_first_row or old.is_keys:
            return ""
        has_more_values = len(set(new_digests)) > len(set(old_digests))
        return "the copies differ" if has_more_values else "values differ"
    if old.shape == new.shape or is_merged:
        return "" if old.digest == new.digest else "values differ"
    return f"{old.shape} before, {new.shape} after"


def _measure_difference(old: RecordedLeaf, new: RecordedLeaf) -> tuple[str, float]:
    """Return the difference as text and as deviation: `(" by up to 14, 8 times what it was", 0.7)`.

    The deviation is relative to the largest element of the old array; infinite if that has no
    floats, was not kept, or has another size.
    """
    x, y = old.load(), new.load()
    if x is not None and y is not None and x.shape[1:] == y.shape:  # stacked copies before
        x = x[0]
    if x is None or y is None or x.dtype.kind not in "fiu" or x.size != y.size:
        return "", math.inf
    x = x.reshape(y.shape)
    deviation = replays.largest_difference(x, y) / (replays.largest_element(x) or 1.0)
    return replays.format_difference(x, y), deviation if "float" in old.dtype else math.inf


def _output_problems(before: Run, after: Run, *, may_round: bool) -> Iterator[str]:
    """Yield "the output differs in line 3: ..." for the first line that is not the same."""
    is_same = _is_about if may_round else str.__eq__
    outputs = [run.output.splitlines() for run in (before, after)]
    if len(before.calls) > 1:  # processes: their lines come in any order, with gloo's in between
        by_words = lambda line: (_NUMBER.sub("*", _mask(line)), line)
        outputs = [sorted(itertools.filterfalse(_GLOO.search, o), key=by_words) for o in outputs]
    for number, (old, new) in enumerate(itertools.zip_longest(*outputs), 1):
        if not is_same(_mask(old or ""), _mask(new or "")):
            texts = ("nothing" if line is None else repr(line[:80]) for line in (old, new))
            yield f"the output differs in line {number}: {' / '.join(texts)}"
            return


def _mask(line: str) -> str:
    """Return a line of output with "*" for what changes from run to run, as times and addresses."""
    line = _CHANGING.sub("*", line)
    return _NUMBER.sub("*", line) if _TIMED.search(line) else line


def _is_about(old: str, new: str) -> bool:
    """Return whether two lines have the same words, and numbers that differ by at most 1 %."""
    old_words, new_words = (_NUMBER.sub("*", line).split() for line in (old, new))
    if old_words != new_words:
        return False
    numbers = ([float(match[0]) for match in _NUMBER.finditer(line)] for line in (old, new))
    is_close = functools.partial(math.isclose, rel_tol=_RATIO, abs_tol=1e-4)
    return all(map(is_close, *numbers))
