"""What the doctor checks: each check takes the facts and gives findings, each with its remedy."""

import dataclasses
import difflib
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax_dist import _codes
from jax_dist.doctor.facts import DoctorFinding, Facts, Version, harm, note

# ---- whether JAX starts, and computes right

_HELP = {
    "versions": "Look at the lines above; python -m jax_dist.doctor.probe shows them whole.",
    "options": "Fix what the line names, or reinstall jax.",
    "cache": "jax-dist cache doctor looks at the folder alone.",
    "devices": "JAX_PLATFORMS=cpu starts without accelerators.",
    "ways": "Report it, with the output of jax-dist doctor --json.",
    "collective": "JAX_PLATFORMS=cpu tells whether it is the devices.",
}
_HUNG = {
    "devices": "Another process may hold the devices, or the driver hangs; JAX_PLATFORMS=cpu "
    "starts without them.",
    "collective": "The devices do not reach each other; run one device alone with "
    "CUDA_VISIBLE_DEVICES=0, or set NCCL_DEBUG=INFO.",
}
_WHAT = {
    "versions": "Python does not start",
    "options": "jax cannot be imported",
    "cache": "the compilation cache cannot be looked at",
    "devices": "JAX cannot start its devices",
    "ways": "this library cannot use this jax",
    "collective": "a sum over the devices fails",
}


def starts(facts: Facts) -> Iterator[DoctorFinding]:
    """The stage in which the probe ended, and whether its sum was right."""
    failed = facts.probed.failed
    if failed is not None and facts.jax is None and "versions" in facts.probed.stages:
        yield harm("no-jax", "jax is not installed for this Python", "pip install -U jax")
    elif failed is not None and facts.probed.hung:
        do = _HUNG.get(failed, "Try again with a longer --timeout.")
        yield harm("hang", f"{_WHAT[failed]}: no answer within the time", do)
    elif failed is not None:
        words = facts.probed.words or "it ended without a word"
        yield harm(f"{failed}-fail", f"{_WHAT[failed]}: {words}", _help(facts, failed))
    yield from _sum(facts)


def _help(facts: Facts, stage: str) -> str:
    asked = facts.environment.get("JAX_PLATFORMS")
    if stage == "devices" and asked:
        return f"JAX_PLATFORMS={asked} must name what is here and has its plugin; or unset it."
    return _HELP[stage]


def _sum(facts: Facts) -> Iterator[DoctorFinding]:
    found = facts.stage("collective")
    if not found:
        return
    wrong = [value for value in found["sums"] if value != found["expected"]]
    if wrong:
        what = f"a sum over {found['devices']} devices gives {wrong[0]}, not {found['expected']}"
        yield harm("wrong-sum", what, "Do not train here: look at the devices, one by one.")


# ---- versions that do not fit together

_OLDEST: Version = (0, 7, 2)  # that jax_dist supports


def versions(facts: Facts) -> Iterator[DoctorFinding]:
    """Versions that do not fit together."""
    jax = facts.jax
    if jax is None:
        return
    if jax < _OLDEST:
        what = f"jax_dist needs jax 0.7.2 or newer, and this is {facts.stage('versions')['jax']}"
        yield harm("old-jax", what, "pip install -U jax; jax-dist lint needs no jax at all")
    yield from _plugins(facts)


def _plugins(facts: Facts) -> Iterator[DoctorFinding]:
    found = facts.stage("versions")
    for name, said in found.items():
        if name.startswith("jax-") and name.endswith("-plugin") and said != found["jaxlib"]:
            what = f"{name} {said} stands beside jaxlib {found['jaxlib']}"
            yield harm("plugin", what, f"pip install -U {name}=={found['jaxlib']}")


# ---- what the environment tells JAX

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
_STALE = "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"


def variables(facts: Facts) -> Iterator[DoctorFinding]:
    """Variables that do nothing, and the one by which old programs run."""
    yield from _unknown(facts)
    if facts.environment.get(_STALE, "").lower() not in _FALSE:
        yield harm(
            "stale-programs",
            f"{_STALE} is on: after a change of a partition function, the old program is found in "
            "the cache and run",
            "unset it; jax_dist.rewrite makes such programs cacheable without it",
            _codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP,
        )


def _unknown(facts: Facts) -> Iterator[DoctorFinding]:
    options = facts.stage("options").get("names")
    if options is None:  # jax could not be imported, so nothing is known to be unknown
        return
    known = _OTHERS | {option.upper() for option in options}
    for variable in sorted(facts.environment):
        if not variable.startswith("JAX_") or variable.startswith(("JAX_DIST_", "JAX_TEST_")):
            continue
        if variable not in known:
            yield _of_unknown(variable, sorted(known))


def _of_unknown(variable: str, known: list[str]) -> DoctorFinding:
    what = f"{variable} is set, and this jax does not read it"
    if variable in _REMOVED:
        return harm(
            "removed-option",
            what,
            f"unset {variable}; the old pmap is gone",
            _codes.REMOVED_PMAP_CONFIG,
        )
    near = difflib.get_close_matches(variable, known, n=1)
    return harm("unknown-option", what, f"did you mean {near[0]}?" if near else f"unset {variable}")


# ---- what the machine has, and what JAX makes of it

_PATTERNS = {  # files by which the system shows an accelerator
    "NVIDIA GPU": "nvidia[0-9]*",
    "AMD GPU": "kfd",
    "TPU": "accel[0-9]*",
}
_EXTRAS = {"NVIDIA GPU": "jax[cuda13]", "AMD GPU": "jax[rocm]", "TPU": "jax[tpu]"}


def accelerators(folder: pathlib.Path = pathlib.Path("/dev")) -> tuple[str, ...]:
    """The kinds that the system shows, whatever JAX can use."""
    return tuple(kind for kind, pattern in _PATTERNS.items() if any(folder.glob(pattern)))


def hardware(facts: Facts) -> Iterator[DoctorFinding]:
    """An accelerator that is not used; a single device."""
    if not facts.devices:
        return
    on_cpu = facts.stage("devices")["backend"] == "cpu"
    if on_cpu and facts.accelerators:
        yield from _unused_accelerator(facts)
    elif on_cpu and facts.devices == 1:
        what = "JAX has one device, so nothing is ever sent"
        do = "JAX_NUM_CPU_DEVICES=8 simulates 8; jax_dist.testing.simulated_devices in tests"
        yield note("one-device", what, do)


def _unused_accelerator(facts: Facts) -> Iterator[DoctorFinding]:
    kind = facts.accelerators[0]
    asked = facts.environment.get("JAX_PLATFORMS")
    if asked:
        what = f"this machine has an {kind}, and JAX_PLATFORMS={asked} leaves it out"
        yield note("platforms", what, "unset JAX_PLATFORMS to use it")
    else:
        what = f"this machine has an {kind}, and JAX computes on the CPU"
        yield harm("unused-accelerator", what, f"pip install -U '{_EXTRAS[kind]}'")


# ---- what started this process, if it is one of many


@dataclasses.dataclass(frozen=True, slots=True)
class _Launcher:
    """The variables of one launcher: a rank, of how many, and where the first one is."""

    name: str
    rank: str
    size: str
    address: str = ""
    by_itself: bool = True  # jax.distributed.initialize() reads them


_LAUNCHERS = (
    _Launcher("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "MASTER_ADDR", by_itself=False),
)


def launcher(environment: Mapping[str, str]) -> str:
    """Such as "SLURM: process 0 of 4"; empty where no launcher left its variables."""
    named = ""
    for each in _LAUNCHERS:
        if each.rank in environment and each.size in environment:
            rank, size = environment[each.rank], environment[each.size]
            named = named or f"{each.name}: process {rank} of {size}"
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    return ", ".join(filter(None, [named, f"coordinator {address}" if address else ""]))


def launchers(facts: Facts) -> Iterator[DoctorFinding]:
    """Variables that are incomplete, contradict each other, or that JAX does not read."""
    environment = facts.environment
    present = [each for each in _LAUNCHERS if each.rank in environment or each.size in environment]
    for each in present:
        yield from _incomplete(each, environment)
    yield from _unread(present, environment)
    yield from _lonely_address(present, environment)


def _incomplete(one: _Launcher, environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    wanted = [name for name in (one.rank, one.size, one.address) if name]
    missing = [name for name in wanted if name not in environment]
    if missing:
        there = next(name for name in wanted if name in environment)
        what = f"{there} is set, and {' and '.join(missing)} is not"
        do = f"start the processes through {one.name}, or unset what it left behind"
        yield harm("launcher-incomplete", what, do)
        return
    rank, size = environment[one.rank], environment[one.size]
    if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        what = f"{one.rank}={rank} is no process of {one.size}={size}"
        yield harm("launcher-rank", what, f"let {one.name} set both")


def _unread(present: list[_Launcher], environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    alone = present and not any(each.by_itself for each in present)
    if alone and environment.get(present[0].size, "1") != "1":
        what = f"{present[0].name} started this, and jax.distributed.initialize() cannot read it"
        do = "call jax_dist.multihost.initialize(), which does"
        yield note("launcher-unread", what, do)


def _lonely_address(
    present: list[_Launcher], environment: Mapping[str, str]
) -> Iterator[DoctorFinding]:
    if "JAX_COORDINATOR_ADDRESS" in environment and not present:
        numbered = {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"} & environment.keys()
        if len(numbered) < 2:
            what = "JAX_COORDINATOR_ADDRESS is set, and nothing says which process this is of many"
            do = "pass num_processes and process_id, or start with jax-dist launch -n N"
            yield harm("no-rank", what, do)


# ---- the persistent compilation cache

# Code that others could have put there, or work that is lost. The rest costs time only.
_HARM = ("damaged", "disk full", "empty", "not a folder", "unsafe", "other CPU", "unreadable")


def compilation_cache(facts: Facts) -> Iterator[DoctorFinding]:
    """What `jax-dist cache doctor` finds, in one line for each kind."""
    found = sorted(facts.stage("cache").get("findings", ()), key=lambda each: each["kind"])
    for kind, each in itertools.groupby(found, key=lambda each: each["kind"]):
        yield _of_cache_kind(kind, list(each))


def _of_cache_kind(kind: str, found: list[Mapping[str, Any]]) -> DoctorFinding:
    first = found[0]
    if kind == "no folder":
        do = "jax_dist.cache.enable() at the start of the program keeps what it compiles"
        return note("no-cache", f"nothing is cached in {first['where']} yet", do)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    what = f"cache, {kind}: {first['where']}{more}: {first['what']}"
    do = first["do"] if not more else "jax-dist cache doctor lists each, and what to do"
    says = harm if kind in _HARM and not first["harmless"] else note
    return says("cache", what, do)


CHECKS: tuple[Callable[[Facts], Iterator[DoctorFinding]], ...] = (  # in the order of the report
    starts,
    versions,
    variables,
    hardware,
    launchers,
    compilation_cache,
)
