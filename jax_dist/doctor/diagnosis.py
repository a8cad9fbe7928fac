"""Looks at a machine, and says what it is and what is wrong with it.

JAX starts in a process of its own, so that one that hangs, or ends its process, is a finding too.
"""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax_dist
from jax_dist.doctor import checks, probe
from jax_dist.doctor.facts import DoctorFinding, Facts, Probed, Weight

_PREFIXES = ("JAX_", "XLA_", "CUDA_VISIBLE", "NCCL_", "TPU_", "LIBTPU_", "OMPI_COMM_WORLD_")
_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_SECRET = ("JAX_DIST_TOKEN",)  # for what is printed is pasted into issues
_FATAL = re.compile(r"F\d{4} \S+ +\d+ \S+\] (.*)")  # as C++ logs before it ends the process


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is here, and what was found."""

    facts: Mapping[str, str]  # for people
    variables: Mapping[str, str]  # of the environment, those that matter
    findings: tuple[DoctorFinding, ...]  # harm first

    @property
    def healthy(self) -> bool:
        return all(finding.weight is not Weight.HARM for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "facts": dict(self.facts),
            "variables": dict(self.variables),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


def diagnose(environment: Mapping[str, str] | None = None, *, timeout: float = 60.0) -> Diagnosis:
    """Starts JAX in a process of its own, and checks what it finds.

    Args:
      environment: of that process; by default that of this one.
      timeout: in seconds; a JAX that takes longer to start is stopped.
    """
    environment = dict(os.environ if environment is None else environment)
    facts = Facts(
        environment=environment,
        probed=_run_probe(environment, timeout),
        accelerators=checks.accelerators(),
    )
    return Diagnosis(dict(_in_words(facts)), _variables(environment), _findings(facts))


def _findings(facts: Facts) -> tuple[DoctorFinding, ...]:
    found = [finding for check in checks.CHECKS for finding in check(facts)]
    return tuple(sorted(found, key=lambda finding: finding.weight is not Weight.HARM))


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(not shown)" if name in _SECRET else value
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES) or name in _NAMES
    }


def _in_words(facts: Facts) -> Iterator[tuple[str, str]]:
    found = dict(facts.stage("versions"))
    python = found.pop("python", "unknown")
    yield "python", f"{python} ({found.pop('executable', 'unknown')})"
    yield "jax-dist", jax_dist.__version__
    yield from found.items()
    yield from _of_devices(facts)
    yield from facts.stage("ways").items()
    yield "launcher", checks.launcher(facts.environment) or "none"
    cache = facts.stage("cache")
    if cache:
        yield "cache", _of_cache(cache)


def _of_devices(facts: Facts) -> Iterator[tuple[str, str]]:
    found = facts.stage("devices")
    if not found:
        return
    kinds = ", ".join(found["kinds"])
    noun = "device" if found["count"] == 1 else "devices"
    yield "devices", f"{found['count']} {noun} of {found['backend']} ({kinds})"
    limits = [each for each in found["bytes"] if each is not None]
    if limits:
        yield "memory", f"{min(limits) / 1e9:.1f} GB on each device"
    yield "mesh", f"Mesh('i': {found['count']}), as pmap(axis_name='i') makes it here"
    total = facts.stage("collective")
    if total:
        right = set(total["sums"]) == {total["expected"]}
        yield "psum", f"{'right' if right else 'WRONG'} over {total['devices']} {noun}"


def _of_cache(cache: Mapping[str, Any]) -> str:
    if "entries" not in cache:
        return f"{cache['path']} (not looked at: no folder)"
    noun = "entry" if cache["entries"] == 1 else "entries"
    return f"{cache['path']}: {cache['entries']} {noun}, {cache['bytes'] / 1e6:.1f} MB"


def _run_probe(environment: Mapping[str, str], timeout: float) -> Probed:
    """Runs all stages in a fresh process.

    Args:
      environment: of the process.
      timeout: in seconds, for all stages together.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", probe.__name__],
        env={**environment, "PYTHONPATH": _path(environment)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it starts can be stopped with it
    )
    try:
        out, err = child.communicate(timeout=timeout)
        hung = False
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        hung = True
    except BaseException:  # an interrupt: nothing is left behind
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return _read(out, err, hung=hung)


def _path(environment: Mapping[str, str]) -> str:
    """The probe imports the same jax_dist, installed or not."""
    ours = str(pathlib.Path(__file__).parents[2])
    before = environment.get("PYTHONPATH")
    return os.pathsep.join([before, ours]) if before else ours


def _read(out: str, err: str, *, hung: bool) -> Probed:
    lines = (line.removeprefix(probe.MARK) for line in out.splitlines() if probe.MARK in line)
    stages = {line["stage"]: line["found"] for line in map(json.loads, lines)}
    failed = next((name for name in probe.STAGES if name not in stages), None)
    words = "" if hung or failed is None else _last_words(err)
    return Probed(stages, failed, hung, words)


def _last_words(text: str) -> str:
    """What a person needs: the line of C++ that ended it, or else the end of the traceback."""
    fatal = [match[1] for line in text.splitlines() if (match := _FATAL.match(line))]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (fatal or lines or [""])[-1]
