"""Causes of a cache miss, from what differs between two compilations of one program."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from jax_dist import _codes
from jax_dist._cache.record import Line, ProgramRecord
from jax_dist.errors import display_path

_TEXTS = {
    "settings": "The XLA flags, compiler options, devices or the cache directory differ; use the "
    "same in each run (a flag that repeats its default counts too).",
    "custom-partitioning": "A custom_partitioning operation holds the address of a Python object; "
    "let jax_dist.rewrite route it through shard_map.",
    "shapes": "The arguments have other shapes or types; pad what varies.",
    "order": "The same operations or names are in another order, as that of a set or a shuffled "
    "list; iterate in sorted order.",
    "name": "A function, mesh axis or key of a result has another name in each process; use fixed "
    "names.",
    "captured-array": "An array inside the program differs; pass it as an argument, or let "
    "jax_dist.rewrite or jax_dist.pmap lift it.",
    "traced-value": "A number inside the program differs: tracing computes it from random numbers, "
    "the time or a static argument; pass it as an array argument.",
    "host-callback": "It calls back into Python, and this jax never writes such a program; remove "
    "jax.debug.print or the callback, or use jax 0.11 or later.",
    "rank": "JAX lets only the first process write; call jax_dist.cache.enable() in each process.",
    "not-in-every-run": "One run did not compile it; make the run repeatable, unless it depends on "
    "the data.",
    "unknown": "Cause unknown; look at the lines that differ, and for a warning of JAX.",
}
_CODES = {  # of the rules of `jax-dist lint` that find a cause in the source
    "settings": _codes.CACHE_CONFIG,
    "custom-partitioning": _codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP,
    "order": _codes.UNSTABLE_TRACE_VALUE,
    "captured-array": _codes.CAPTURED_ARRAY,
    "traced-value": _codes.UNSTABLE_TRACE_VALUE,
    "host-callback": _codes.CALLBACK_NOT_CACHED,
}
_MOST_DETAILS = 3
_ARGUMENT = re.compile(r"%arg\d+: (tensor<[^>]*>+)")
_VALUE = re.compile(r"%[\w:#]+")
_NAME = re.compile(r'@[\w.]+|@"[^"]*"|"[^"]*"')
_ARRAY = re.compile(r"dense<[^>]*>(?= : tensor<\d)")
_WORD = re.compile(r"[\w.]+")
_CONSTANT = re.compile(r"= stablehlo\.constant dense<(?P<value>.*)> : (?P<type>tensor<.*>)$")


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a miss, with the places where it was seen."""

    name: str  # a key of `_TEXTS`
    details: tuple[str, ...] = ()  # such as "train.py:12: tensor<f32>: 0.25, then 0.75"

    def __str__(self) -> str:
        details = [f"  {detail}" for detail in self.details[:_MOST_DETAILS]]
        if len(self.details) > _MOST_DETAILS:
            details.append(f"  and {len(self.details) - _MOST_DETAILS} more")
        head = f"{_CODES.get(self.name, '')} {self.name}".lstrip()
        return "\n".join((f"{head}: {_TEXTS[self.name]}", *details))


def get_argument_types(program: ProgramRecord) -> tuple[str, ...]:
    """Return the argument types of a program, such as `("tensor<4x8xf32>", "tensor<i32>")`."""
    main = next((line.code for line in program.lines if " @main(" in line.code), "")
    arguments, _, _results = main.partition(" -> ")
    return tuple(_ARGUMENT.findall(arguments))


def explain(before: ProgramRecord, after: ProgramRecord) -> tuple[Cause, ...]:
    """Return why a program has different cache keys in two runs."""
    details = collections.defaultdict[str, list[str]](list)  # by cause
    for setting, old in before.settings.items():
        new = after.settings[setting]
        if old != new:
            details["settings"].append(f"{setting}: {' '.join(old)}, then {' '.join(new)}")
    old_types, new_types = get_argument_types(before), get_argument_types(after)
    if old_types != new_types:
        # Other shapes change nearly all lines of the program, so these are not compared.
        details["shapes"].append(f"{', '.join(old_types)}, then {', '.join(new_types)}")
    else:
        for cause, detail in _compare_lines(before.lines, after.lines):
            details[cause].append(detail)
    causes = [
        Cause(name, tuple(dict.fromkeys(details[name]))) for name in _TEXTS if name in details
    ]
    return tuple(causes) or (Cause("unknown"),)


def _compare_lines(before: Sequence[Line], after: Sequence[Line]) -> Iterator[tuple[str, str]]:
    """Yield the cause and the detail of each difference between two texts of a program."""
    is_reordered = _count_operations(before) == _count_operations(after)
    for old, new in itertools.zip_longest(before, after, fillvalue=Line("nothing", "")):
        if old.code == new.code:
            continue
        cause, detail = _classify(old.code, new.code)
        if is_reordered and cause != "captured-array":
            cause = "order"
        elif len(before) != len(after):
            cause = "unknown"  # an inserted line shifts the others, so unrelated ones are compared
        file, _, number = (old.source or new.source).rpartition(":")
        place = f"{display_path(file)}:{number}: " if file else ""
        yield cause, place + detail


def _count_operations(lines: Sequence[Line]) -> collections.Counter[str]:
    """Count equal lines, without the names of values (`%12`), which depend on the order."""
    return collections.Counter(_VALUE.sub("%", _ARRAY.sub("", line.code)) for line in lines)


def _classify(before: str, after: str) -> tuple[str, str]:
    """Return the probable cause of the difference between two lines of MLIR, and a detail.

    Such as `("traced-value", "tensor<f32>: 0.25, then 0.75")` of two `stablehlo.constant`.
    """
    detail = f"{_shorten(before)}, then {_shorten(after)}"
    old, new = _CONSTANT.search(before), _CONSTANT.search(after)
    if old and new and old["type"] == new["type"]:
        cause = "captured-array" if re.match(r"tensor<\d", old["type"]) else "traced-value"
        return cause, f"{old['type']}: {_shorten(old['value'])}, then {_shorten(new['value'])}"
    if "@CustomSPMDPartitioning" in before and "@CustomSPMDPartitioning" in after:
        return "custom-partitioning", detail
    if sorted(_WORD.findall(before)) == sorted(_WORD.findall(after)):
        return "order", detail
    if _NAME.sub("@", before) == _NAME.sub("@", after):  # the lines differ in names only
        for name, new_name in zip(_NAME.findall(before), _NAME.findall(after), strict=True):
            if name != new_name:
                return "name", f"{name}, then {new_name}"
    return "unknown", detail


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
