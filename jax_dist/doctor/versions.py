"""What the jax that is installed does to code that was written for pmap."""

import dataclasses
from collections.abc import Iterator

from jax_dist.doctor.facts import Facts, Version
from jax_dist.doctor.findings import Finding, harm, note

_OLDEST: Version = (0, 7, 2)  # that jax_dist supports
_LAST_FOR_PYTHON: dict[Version, str] = {(3, 11): "0.10.2"}  # releases of jax that end with a Python


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What a version of jax changed for code with pmap."""

    since: Version
    what: str
    do: str
    rule: str = ""  # that finds it in code
    until: Version | None = None  # the first version that has it no more


CHANGES = (
    Change(
        (0, 6, 0),
        "jax.tree_map and its like are removed",
        "jax-dist lint --fix . writes jax.tree.map",
        "JXD108",
    ),
    Change(
        (0, 6, 1),
        "shard_map by hand gives gradients that are N times pmap's, unless check_vma=False",
        "jax_dist.pmap, and jax-dist migrate, keep pmap's gradients",
        "JXD303",
    ),
    Change(
        (0, 9, 0),
        "pmap inside jit, scan or grad reduces over one process only, where there are several",
        "jax-dist migrate . makes it right in every process",
        "JXD002",
    ),
    Change(
        (0, 8, 0),
        "pmap inside pmap raises 'The context mesh ... should match'",
        "jax-dist migrate . (jax_dist.pmap nests)",
        "JXD003",
    ),
    Change(
        (0, 8, 0),
        "pmap refuses arrays that lie on other devices or on another mesh",
        "jax-dist migrate . (jax_dist.pmap moves them, once)",
        "JXD001",
    ),
    Change(
        (0, 8, 0),
        "a pmap without axis_name misses the compilation cache in every run",
        "name the axis, or take jax 0.10.2",
        until=(0, 10, 2),
    ),
    Change(
        (0, 8, 0),
        "x[0] of what pmap gives sends the whole array to every device",
        "jax_dist.unreplicate takes the first slice without communication",
        "JXD203",
    ),
    Change(
        (0, 9, 0),
        "jax.make_mesh makes Explicit axes, on which shard_map refuses arrays cut otherwise",
        "jax-dist lint --fix --unsafe-fixes . writes axis_types",
        "JXD302",
    ),
    Change(
        (0, 10, 0),
        "device_put_replicated, device_put_sharded, PmapSharding and lax.pvary are removed",
        "jax-dist lint --fix . writes what takes their place",
        "JXD101",
    ),
    Change(
        (0, 10, 0),
        "jax_pmap_shmap_merge is removed: the old pmap cannot be switched on any more",
        "jax-dist lint --fix . takes it out",
        "JXD104",
    ),
    Change(
        (0, 4, 31),
        "a program with debug.print or a callback is compiled anew in every run",
        "take the callback out of the step, or take jax 0.11",
        "JXD405",
        until=(0, 11, 0),
    ),
    Change(
        (0, 12),
        "jax.make_mesh knows axis_shapes= no more; it is axis_sizes=",
        "pass it by position",
    ),
)


def check(facts: Facts) -> Iterator[Finding]:
    """Versions that do not fit together, and what this one changed."""
    jax = facts.jax
    if jax is None:
        return
    yield from _supported(facts, jax)
    yield from _plugins(facts)
    for change in CHANGES:
        if change.since <= jax and (change.until is None or jax < change.until):
            yield note("changed", change.what, change.do, change.rule)


def _supported(facts: Facts, jax: Version) -> Iterator[Finding]:
    said = facts.stage("versions")["jax"]
    if jax < _OLDEST:
        what = f"jax_dist needs jax 0.7.2 or newer, and this is {said}"
        yield harm("old-jax", what, "pip install -U jax; jax-dist lint needs no jax at all")
    last = _LAST_FOR_PYTHON.get(facts.python[:2])
    if last is not None:
        python = ".".join(map(str, facts.python[:2]))
        what = f"jax {last} is the last release for Python {python}"
        yield note("last-jax", what, "newer ones need Python 3.12")


def _plugins(facts: Facts) -> Iterator[Finding]:
    versions = facts.stage("versions")
    for name, said in versions.items():
        if name.startswith("jax-") and name.endswith("-plugin") and said != versions["jaxlib"]:
            what = f"{name} {said} stands beside jaxlib {versions['jaxlib']}"
            yield harm("plugin", what, f"pip install -U {name}=={versions['jaxlib']}")
