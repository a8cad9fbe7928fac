"""What the environment tells JAX and XLA."""

import difflib
import re
from collections.abc import Callable, Iterator

from jax_dist.doctor.facts import Facts
from jax_dist.doctor.findings import Finding, harm, note

_SIMULATED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_CROWDED = 4  # simulated devices for each core, from which times say little

# Variables that JAX, or this library, reads although no option has their name.
_OTHERS = frozenset(
    (
        "JAX_BACKEND_TARGET",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_COORDINATOR_BIND_ADDRESS",
        "JAX_COORDINATOR_PORT",
        "JAX_DISABLE_MOST_OPTIMIZATIONS",
        "JAX_DUMP_IR_MODES",
        "JAX_DUMP_IR_TO",
        "JAX_EXPORT_CALLING_CONVENTION_VERSION",
        "JAX_FORCE_TPU_INIT",
        "JAX_INCLUDE_DEBUG_INFO_IN_DUMPS",
        "JAX_LOCAL_DEVICE_IDS",
        "JAX_NUM_PROCESSES",
        "JAX_PARTITION_INDEX",
        "JAX_PLATFORM_NAME",
        "JAX_PROCESS_ID",
        "JAX_SERIALIZATION_VERSION",
        "JAX_SLICE_INDEX",
        "JAX_TRACER_ERROR_NUM_TRACEBACK_FRAMES",
    )
)
_REMOVED = ("JAX_PMAP_SHMAP_MERGE", "JAX_PMAP_NO_RANK_REDUCTION", "JAX_EAGER_PMAP")
_FALSE = ("", "0", "f", "false", "n", "no", "off")


def check(facts: Facts) -> Iterator[Finding]:
    """Variables that do nothing, and those that change numbers or time."""
    yield from _unknown(facts)
    for variable, says in _KNOWN.items():
        value = facts.environment.get(variable)
        if value is not None:
            yield from says(value)
    yield from _simulated(facts)


def _unknown(facts: Facts) -> Iterator[Finding]:
    options = facts.stage("options").get("names")
    if options is None:  # jax could not be imported, so nothing is known to be unknown
        return
    known = _OTHERS | {option.upper() for option in options}
    for variable in sorted(facts.environment):
        if not variable.startswith("JAX_") or variable.startswith(("JAX_DIST_", "JAX_TEST_")):
            continue
        if variable not in known:
            yield _of_unknown(variable, sorted(known))


def _of_unknown(variable: str, known: list[str]) -> Finding:
    what = f"{variable} is set, and this jax does not read it"
    if variable in _REMOVED:
        return harm("removed-option", what, f"unset {variable}; the old pmap is gone", "JXD104")
    near = difflib.get_close_matches(variable, known, n=1)
    return harm("unknown-option", what, f"did you mean {near[0]}?" if near else f"unset {variable}")


def _simulated(facts: Facts) -> Iterator[Finding]:
    match = _SIMULATED.search(facts.environment.get("XLA_FLAGS", ""))
    named = facts.environment.get("JAX_NUM_CPU_DEVICES", "")
    if match and named.isdigit() and named != match[1]:
        what = f"JAX_NUM_CPU_DEVICES={named} and XLA_FLAGS {match[0]} differ; the first counts"
        yield note("two-counts", what, "take the flag out of XLA_FLAGS")
    if facts.stage("devices").get("backend") == "cpu" and facts.devices > _CROWDED * facts.cores:
        what = f"{facts.devices} simulated devices share {facts.cores} cores"
        yield note("crowded", what, "right for tests of numbers; times say nothing")


def _pointers(value: str) -> Iterator[Finding]:
    if value.lower() not in _FALSE:
        yield harm(
            "stale-programs",
            "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY is on: after a change of a "
            "partition function, the old program is found in the cache and run",
            "unset it; jax_dist.rewrite makes such programs cacheable without it",
            "JXD402",
        )


def _no_jit(value: str) -> Iterator[Finding]:
    if value.lower() not in _FALSE:
        what = "JAX_DISABLE_JIT is on: every operation runs by itself"
        yield note("no-jit", what, "unset it, unless you look for a fault")


def _nans(value: str) -> Iterator[Finding]:
    if value.lower() not in _FALSE:
        what = "JAX_DEBUG_NANS is on: every result is fetched and looked at"
        yield note("debug-nans", what, "unset it, unless you look for a fault")


def _threefry(value: str) -> Iterator[Finding]:
    if value.lower() in _FALSE:
        what = "JAX_THREEFRY_PARTITIONABLE is off: random numbers cost communication when cut"
        yield note("threefry", what, "unset it; numbers differ from those of jax before 0.5")


def _prng(value: str) -> Iterator[Finding]:
    if value in ("rbg", "unsafe_rbg"):
        yield note(
            "prng",
            f"JAX_DEFAULT_PRNG_IMPL={value}: under vmap a key gives other numbers than alone",
            "threefry2x32, where noise is drawn twice (evolution strategies)",
        )


def _preallocation(value: str) -> Iterator[Finding]:
    if value.lower() in _FALSE:
        what = (
            "XLA_PYTHON_CLIENT_PREALLOCATE is off: memory breaks into pieces, and calls are slower"
        )
        yield note("no-preallocation", what, "unset it for training")


_KNOWN: dict[str, Callable[[str], Iterator[Finding]]] = {
    "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": _pointers,
    "JAX_DISABLE_JIT": _no_jit,
    "JAX_DEBUG_NANS": _nans,
    "JAX_THREEFRY_PARTITIONABLE": _threefry,
    "JAX_DEFAULT_PRNG_IMPL": _prng,
    "XLA_PYTHON_CLIENT_PREALLOCATE": _preallocation,
}
