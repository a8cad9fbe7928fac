"""Causes of a cache miss, from what differs between two compilations of one program."""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

from jax_dist import _codes
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
_TOKEN = re.compile(r"[\w.]+")
_CONSTANT = re.compile(r"= stablehlo\.constant dense<(.*)> : (tensor<.*>)$")


@dataclasses.dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a miss, with the places where it was seen."""

    name: str
    details: tuple[str, ...] = ()  # such as "train.py:12: tensor<f32>: 0.25, then 0.75"

    def __str__(self) -> str:
        details = [f"  {detail}" for detail in self.details[:_MOST_DETAILS]]
        if len(self.details) > _MOST_DETAILS:
            details.append(f"  and {len(self.details) - _MOST_DETAILS} more")
        head = f"{_CODES.get(self.name, '')} {self.name}".lstrip()
        return "\n".join((f"{head}: {_TEXTS[self.name]}", *details))


def get_argument_types(program: dict[str, Any]) -> tuple[str, ...]:
    main = next((code for code, _ in program["lines"] if " @main(" in code), "")
    return tuple(_ARGUMENT.findall(main.partition(" -> ")[0]))


def explain(one: dict[str, Any], other: dict[str, Any]) -> tuple[Cause, ...]:
    """Return why the keys of one program differ in two runs; both as `record` writes them."""
    details: dict[str, list[str]] = collections.defaultdict(list)
    for setting, before in one["settings"].items():
        after = other["settings"][setting]
        if before != after:
            details["settings"].append(f"{setting}: {' '.join(before)}, then {' '.join(after)}")
    types = [get_argument_types(program) for program in (one, other)]
    if types[0] != types[1]:  # they go through the whole program
        details["shapes"].append(f"{', '.join(types[0])}, then {', '.join(types[1])}")
    else:
        for cause, detail in _compare(one["lines"], other["lines"]):
            details[cause].append(detail)
    return tuple(
        Cause(name, tuple(dict.fromkeys(details[name]))) for name in _TEXTS if name in details
    ) or (Cause("unknown"),)


def _compare(ones: list, others: list) -> Iterator[tuple[str, str]]:
    """Yield each difference of two programs, as the name of its cause and a detail."""
    # A line that moves changes the numbers of the values; arrays are compared below.
    plain = [
        collections.Counter(_VALUE.sub("%", _ARRAY.sub("", code)) for code, _ in lines)
        for lines in (ones, others)
    ]
    for one, other in itertools.zip_longest(ones, others, fillvalue=("nothing", "")):
        if one[0] == other[0]:
            continue
        name, detail = _classify(one[0], other[0])
        if plain[0] == plain[1] and name != "captured-array":
            name = "order"
        elif len(ones) != len(others):
            name = "unknown"
        file, _, line = (one[1] or other[1]).rpartition(":")
        yield name, f"{display_path(file)}:{line}: {detail}" if file else detail


def _classify(before: str, after: str) -> tuple[str, str]:
    """Return the cause that two lines of one place show, and what differs."""
    constants = [_CONSTANT.search(code) for code in (before, after)]
    if constants[0] and constants[1] and constants[0][2] == constants[1][2]:
        type_, before, after = constants[0][2], constants[0][1], constants[1][1]
        name = "captured-array" if re.match(r"tensor<\d", type_) else "traced-value"
        return name, f"{type_}: {_cut(before)}, then {_cut(after)}"
    if "@CustomSPMDPartitioning" in before and "@CustomSPMDPartitioning" in after:
        return "custom-partitioning", f"{_cut(before)}, then {_cut(after)}"
    if sorted(_TOKEN.findall(before)) == sorted(_TOKEN.findall(after)):
        return "order", f"{_cut(before)}, then {_cut(after)}"
    if _NAME.sub("@", before) == _NAME.sub("@", after):
        names = zip(_NAME.findall(before), _NAME.findall(after), strict=True)
        return "name", next(f"{one}, then {other}" for one, other in names if one != other)
    return "unknown", f"{_cut(before)}, then {_cut(after)}"


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
