"""What started this process, if it is one of many: the variables that launchers set."""

import dataclasses
from collections.abc import Iterator, Mapping

from jax_dist.doctor.facts import Facts
from jax_dist.doctor.findings import Finding, harm, note

_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


@dataclasses.dataclass(frozen=True, slots=True)
class Launcher:
    """The variables of one launcher: a rank, of how many, and where the first one is."""

    name: str
    rank: str
    size: str
    address: str = ""
    by_itself: bool = True  # jax.distributed.initialize() reads them


_LAUNCHERS = (
    Launcher("SLURM", "SLURM_PROCID", "SLURM_NTASKS"),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "MASTER_ADDR", by_itself=False),
)


def in_words(environment: Mapping[str, str]) -> str:
    """Such as "SLURM: process 0 of 4"; empty where no launcher left its variables."""
    named = ""
    for each in _LAUNCHERS:
        if each.rank in environment and each.size in environment:
            rank, size = environment[each.rank], environment[each.size]
            named = named or f"{each.name}: process {rank} of {size}"
    address = environment.get("JAX_COORDINATOR_ADDRESS")
    return ", ".join(filter(None, [named, f"coordinator {address}" if address else ""]))


def check(facts: Facts) -> Iterator[Finding]:
    """Variables that are incomplete, contradict each other, or that JAX does not read."""
    environment = facts.environment
    present = [each for each in _LAUNCHERS if each.rank in environment or each.size in environment]
    for each in present:
        yield from _incomplete(each, environment)
    yield from _unread(present, environment)
    yield from _lonely_address(present, environment)
    if present or "JAX_COORDINATOR_ADDRESS" in environment:
        yield from _proxies(environment)


def _incomplete(launcher: Launcher, environment: Mapping[str, str]) -> Iterator[Finding]:
    wanted = [name for name in (launcher.rank, launcher.size, launcher.address) if name]
    missing = [name for name in wanted if name not in environment]
    if missing:
        there = next(name for name in wanted if name in environment)
        what = f"{there} is set, and {' and '.join(missing)} is not"
        do = f"start the processes through {launcher.name}, or unset what it left behind"
        yield harm("launcher-incomplete", what, do)
        return
    rank, size = environment[launcher.rank], environment[launcher.size]
    if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
        what = f"{launcher.rank}={rank} is no process of {launcher.size}={size}"
        yield harm("launcher-rank", what, f"let {launcher.name} set both")


def _unread(present: list[Launcher], environment: Mapping[str, str]) -> Iterator[Finding]:
    alone = present and not any(each.by_itself for each in present)
    if alone and environment.get(present[0].size, "1") != "1":
        what = f"{present[0].name} started this, and jax.distributed.initialize() cannot read it"
        do = "call jax_dist.multihost.initialize(), which does"
        yield note("launcher-unread", what, do)


def _lonely_address(present: list[Launcher], environment: Mapping[str, str]) -> Iterator[Finding]:
    if "JAX_COORDINATOR_ADDRESS" in environment and not present:
        numbered = {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"} & environment.keys()
        if len(numbered) < 2:
            what = "JAX_COORDINATOR_ADDRESS is set, and nothing says which process this is of many"
            do = "pass num_processes and process_id, or start with jax-dist launch -n N"
            yield harm("no-rank", what, do)


def _proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    names = [name for name in _PROXIES if environment.get(name)]
    if names and not (environment.get("no_proxy") or environment.get("no_grpc_proxy")):
        what = f"{names[0]} is set: processes may look for their coordinator behind the proxy"
        yield note("proxy", what, "name the coordinator's host in no_proxy")
