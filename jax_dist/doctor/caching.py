"""The persistent compilation cache: whether its folder is sound."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jax_dist.doctor.facts import Facts
from jax_dist.doctor.findings import Finding, harm, note

# Code that others could have put there, or work that is lost. The rest costs time only.
_HARM = ("damaged", "disk full", "empty", "not a folder", "unsafe", "other CPU", "unreadable")


def check(facts: Facts) -> Iterator[Finding]:
    """What `jax-dist cache doctor` finds, in one line for each kind."""
    found = sorted(facts.stage("cache").get("findings", ()), key=lambda each: each["kind"])
    for kind, each in itertools.groupby(found, key=lambda each: each["kind"]):
        yield _of_kind(kind, list(each))


def _of_kind(kind: str, found: list[Mapping[str, Any]]) -> Finding:
    first = found[0]
    if kind == "no folder":
        do = "jax_dist.cache.enable() at the start of the program keeps what it compiles"
        return note("no-cache", f"nothing is cached in {first['where']} yet", do)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    what = f"cache, {kind}: {first['where']}{more}: {first['what']}"
    do = first["do"] if not more else "jax-dist cache doctor tells of each, and what to do"
    says = harm if kind in _HARM and not first["harmless"] else note
    return says("cache", what, do)
