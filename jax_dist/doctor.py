"""Looks at a machine, and says what it is and what may go wrong on it.

JAX starts in a process of its own, the probe, so that one that hangs, or ends its process, is a
finding too. The probe goes through stages and tells what each found; the checks read that, and the
environment, and give findings, each with its remedy.
"""

import dataclasses
import difflib
import json
import os
import pathlib
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any

import jax_dist
from jax_dist import _codes
from jax_dist.launch.ranks import run_to_end

_PREFIXES = ("JAX_", "XLA_", "CUDA_VISIBLE", "NCCL_", "TPU_", "LIBTPU_", "OMPI_COMM_WORLD_")
_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_SECRET = ("JAX_DIST_TOKEN",)  # for what is printed is pasted into issues


@dataclasses.dataclass(frozen=True, slots=True)
class _Finding:
    """One thing that does harm here: wrong numbers, no start, or work that is lost."""

    name: str  # such as "unknown-option"; scripts look for it
    what: str
    do: str  # one line
    rule: str = ""  # of the checker, such as "JXD002", which finds it in code

    def __str__(self) -> str:
        rule = f" ({self.rule})" if self.rule else ""
        return f"harm: {self.what}{rule}\n  help: {self.do}"


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """The environment, what each stage of the probe found, and how the probe ended."""

    environment: Mapping[str, str]
    stages: Mapping[str, Mapping[str, Any]]
    failed: str | None = None  # the stage that did not come to its end
    hung: bool = False  # it was stopped
    words: str = ""  # its last line, where it failed by itself
    accelerators: tuple[str, ...] = ()  # such as "NVIDIA GPU": seen by the system, not by JAX

    def stage(self, name: str) -> Mapping[str, Any]:
        """What one stage found; empty where the probe did not come so far."""
        return self.stages.get(name, {})


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is here, and what was found."""

    facts: Mapping[str, str]  # for people
    variables: Mapping[str, str]  # of the environment, those that matter
    findings: tuple[_Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"healthy": not self.findings, **dataclasses.asdict(self)}


def diagnose(timeout: float) -> Diagnosis:
    """Starts JAX in a process of its own, for `timeout` seconds, and checks what it finds."""
    facts = _probed(dict(os.environ), timeout)
    return Diagnosis(dict(_in_words(facts)), _variables(facts.environment), checked(facts))


def checked(facts: Facts) -> tuple[_Finding, ...]:
    """What all checks find."""
    checks = (_starts, _settings, _hardware, _processes, _cache)
    return tuple(finding for check in checks for finding in check(facts))


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
    if devices := facts.stage("devices"):
        noun = "device" if devices["count"] == 1 else "devices"
        kinds = ", ".join(devices["kinds"])
        yield "devices", f"{devices['count']} {noun} of {devices['backend']} ({kinds})"
    if total := facts.stage("collective"):
        right = set(total["sums"]) == {total["expected"]}
        noun = "device" if total["devices"] == 1 else "devices"
        yield "psum", f"{'right' if right else 'WRONG'} over {total['devices']} {noun}"
    yield "launcher", _launcher(facts.environment) or "none"
    if cache := facts.stage("cache"):
        if "entries" in cache:
            noun = "entry" if cache["entries"] == 1 else "entries"
            size = f"{cache['bytes'] / 1e6:.1f} MB"
            yield "cache", f"{cache['path']}: {cache['entries']} {noun}, {size}"
        else:
            yield "cache", f"{cache['path']} (not looked at: no folder)"


# --- the checks: whether JAX starts, and computes right

_FAILED = {
    "versions": "Python does not start",
    "options": "jax cannot be imported",
    "cache": "the compilation cache cannot be looked at",
    "devices": "JAX cannot start its devices",
    "collective": "a sum over the devices fails",
}
_HUNG = {
    "devices": "Another process may hold the devices, or the driver hangs; JAX_PLATFORMS=cpu "
    "starts without them.",
    "collective": "The devices do not reach each other; run one device alone with "
    "CUDA_VISIBLE_DEVICES=0, or set NCCL_DEBUG=INFO.",
}


def _starts(facts: Facts) -> Iterator[_Finding]:
    """The stage in which the probe ended, and whether its sum was right."""
    failed, versions = facts.failed, facts.stage("versions")
    if failed is not None and versions and "jax" not in versions:
        yield _Finding("no-jax", "jax is not installed for this Python", "pip install -U jax")
    elif failed is not None and facts.hung:
        do = _HUNG.get(failed, "Try again with a longer --timeout.")
        yield _Finding("hang", f"{_FAILED[failed]}: no answer within the time", do)
    elif failed is not None:
        asked = facts.environment.get("JAX_PLATFORMS")
        do = "Fix what the line names; JAX_PLATFORMS=cpu tells whether it is the devices."
        if failed == "devices" and asked:
            do = f"JAX_PLATFORMS={asked} must name what is here and has its plugin; or unset it."
        words = facts.words or "it ended without a word"
        yield _Finding(f"{failed}-fail", f"{_FAILED[failed]}: {words}", do)
    total = facts.stage("collective")
    wrong = [value for value in total.get("sums", ()) if value != total["expected"]]
    if wrong:
        what = f"a sum over {total['devices']} devices gives {wrong[0]}, not {total['expected']}"
        do = "Do not train here: look at the devices, one by one."
        yield _Finding("wrong-sum", what, do)


# --- what the environment tells JAX

# Variables that JAX, or this library, reads although no option has their name.
_OTHERS = """
    JAX_BACKEND_TARGET JAX_COORDINATOR_ADDRESS JAX_COORDINATOR_BIND_ADDRESS JAX_COORDINATOR_PORT
    JAX_DISABLE_MOST_OPTIMIZATIONS JAX_DUMP_IR_MODES JAX_DUMP_IR_TO
    JAX_EXPORT_CALLING_CONVENTION_VERSION JAX_FORCE_TPU_INIT JAX_INCLUDE_DEBUG_INFO_IN_DUMPS
    JAX_LOCAL_DEVICE_IDS JAX_NUM_PROCESSES JAX_PARTITION_INDEX JAX_PLATFORM_NAME JAX_PROCESS_ID
    JAX_SERIALIZATION_VERSION JAX_SLICE_INDEX JAX_TRACER_ERROR_NUM_TRACEBACK_FRAMES
"""
_REMOVED = ("JAX_PMAP_SHMAP_MERGE", "JAX_PMAP_NO_RANK_REDUCTION", "JAX_EAGER_PMAP")
_FALSE = ("", "0", "f", "false", "n", "no", "off")
_STALE = "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY"


def _settings(facts: Facts) -> Iterator[_Finding]:
    """Variables that do nothing, and the one by which old programs run."""
    names = facts.stage("options").get("names", ())  # none where jax could not be imported
    known = sorted({*_OTHERS.split(), *map(str.upper, names)})
    for variable in sorted(facts.environment):
        ours = variable.startswith(("JAX_DIST_", "JAX_TEST_"))
        if not names or not variable.startswith("JAX_") or ours or variable in known:
            continue
        what = f"{variable} is set, and this jax does not read it"
        near = difflib.get_close_matches(variable, known, n=1)
        if variable in _REMOVED:
            do, rule = f"unset {variable}; the old pmap is gone", _codes.REMOVED_PMAP_CONFIG
            yield _Finding("removed-option", what, do, rule)
        else:
            do = f"did you mean {near[0]}?" if near else f"unset {variable}"
            yield _Finding("unknown-option", what, do)
    if facts.environment.get(_STALE, "").lower() not in _FALSE:
        yield _Finding(
            "stale-programs",
            f"{_STALE} is on: after a change of a partition function, the old program is found in "
            "the cache and run",
            "unset it; jax_dist.rewrite makes such programs cacheable without it",
            _codes.CUSTOM_PARTITIONING_OUTSIDE_SHARD_MAP,
        )


# --- what the machine has, and what JAX makes of it

_ACCELERATORS = {  # the files by which the system shows one, and what to install for it
    "NVIDIA GPU": ("nvidia[0-9]*", "jax[cuda13]"),
    "AMD GPU": ("kfd", "jax[rocm]"),
    "TPU": ("accel[0-9]*", "jax[tpu]"),
}


def _accelerators(folder: pathlib.Path = pathlib.Path("/dev")) -> tuple[str, ...]:
    """The kinds that the system shows, whatever JAX can use."""
    return tuple(kind for kind, (files, _) in _ACCELERATORS.items() if any(folder.glob(files)))


def _hardware(facts: Facts) -> Iterator[_Finding]:
    """An accelerator that is not used, or whose plugin is of another version."""
    versions = facts.stage("versions")
    for name, version in versions.items():
        if re.fullmatch("jax-.*-plugin", name) and version != versions["jaxlib"]:
            what = f"{name} {version} stands beside jaxlib {versions['jaxlib']}"
            yield _Finding("plugin", what, f"pip install -U {name}=={versions['jaxlib']}")
    on_cpu = facts.stage("devices").get("backend") == "cpu"
    if on_cpu and facts.accelerators and not facts.environment.get("JAX_PLATFORMS"):
        kind = facts.accelerators[0]
        what = f"this machine has an {kind}, and JAX computes on the CPU"
        do = f"pip install -U '{_ACCELERATORS[kind][1]}'"
        yield _Finding("unused-accelerator", what, do)


# --- what started this process, if it is one of many

_LAUNCHERS = {  # the variables of each: its rank, of how many
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE", "MASTER_ADDR"),
}


def _launcher(environment: Mapping[str, str]) -> str:
    """Such as "SLURM: process 0 of 4"; empty where no launcher left its variables."""
    words = []
    for name, (rank, size, *_) in _LAUNCHERS.items():
        if not words and rank in environment and size in environment:
            words.append(f"{name}: process {environment[rank]} of {environment[size]}")
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        words.append(f"coordinator {address}")
    return ", ".join(words)


def _processes(facts: Facts) -> Iterator[_Finding]:
    """Variables of launchers that are incomplete, or contradict each other."""
    environment = facts.environment
    started = False
    for name, (rank, size, *more) in _LAUNCHERS.items():
        if rank not in environment and size not in environment:
            continue
        started = True
        missing = [each for each in (rank, size, *more) if each not in environment]
        first, last = environment.get(rank, ""), environment.get(size, "")
        if missing:
            there = rank if rank in environment else size
            what = f"{there} is set, and {' and '.join(missing)} is not"
            do = f"start the processes through {name}, or unset what it left behind"
            yield _Finding("launcher-incomplete", what, do)
        elif not (first.isdigit() and last.isdigit() and int(first) < int(last)):
            what = f"{rank}={first} is no process of {size}={last}"
            yield _Finding("launcher-rank", what, f"let {name} set both")
    numbered = {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID"} <= environment.keys()
    if "JAX_COORDINATOR_ADDRESS" in environment and not started and not numbered:
        what = "JAX_COORDINATOR_ADDRESS is set, and nothing says which process this is of many"
        do = "pass num_processes and process_id, or start with jax-dist launch -n N"
        yield _Finding("no-rank", what, do)


# --- the persistent compilation cache


def _cache(facts: Facts) -> Iterator[_Finding]:
    """A folder into which others could put code."""
    for folder, (why, do) in facts.stage("cache").get("unsafe", {}).items():
        yield _Finding("cache", f"what {folder} holds is run as code, and {why}", do)


# --- the probe, from outside

_MARK = "jax-dist-doctor "  # in front of each line: start-up files of Python may print too
_FATAL = re.compile(r"F\d{4} \S+ +\d+ \S+\] (.*)")  # as C++ logs before it ends the process


def _probed(environment: Mapping[str, str], timeout: float) -> Facts:
    """Runs all stages in a fresh process, which imports the same jax_dist, installed or not."""
    ours = str(pathlib.Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), ours]))
    command = [sys.executable, "-m", "jax_dist.doctor"]
    with tempfile.TemporaryDirectory(prefix="jax-dist-doctor-") as folder:
        output = pathlib.Path(folder, "output")
        code = run_to_end(command, {**environment, "PYTHONPATH": path}, output, timeout)
        written = output.read_text(errors="replace").splitlines()
    told = [line.rpartition(_MARK)[2] for line in written if _MARK in line]
    stages = {line["stage"]: line["found"] for line in map(json.loads, told)}
    failed = next((name for name in _PROBES if name not in stages), None)
    # What a person needs: the line of C++ that ended it, or else the end of the traceback.
    fatal = [match[1] for line in written if (match := _FATAL.match(line))]
    lines = [line.strip() for line in written if line.strip() and _MARK not in line]
    words = (fatal or lines or [""])[-1]
    return Facts(environment, stages, failed, code is None, words, _accelerators())


# --- the probe, from inside: each stage writes one line of JSON as soon as it is through, so that
# what came before is known where the next one hangs, or ends the process

_PACKAGES = (
    *("jax", "jaxlib", "numpy"),
    *("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu"),
)


def _probe_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "executable": sys.executable}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _probe_options() -> dict[str, Any]:
    from jax_dist import _compat

    return {"names": _compat.option_names()}


def _probe_cache() -> dict[str, Any]:
    from jax_dist._cache import folders

    folder = folders.choose("", os.environ)
    if folders.is_url(folder):
        return {"path": folder}
    path = pathlib.Path(folder)
    sizes = [entry.stat().st_size for entry in path.rglob("*-cache")]
    reason = folders.untrusted_reason(path) if path.is_dir() else None
    unsafe = {folder: (reason, f"chmod 700 {folder}, or set JAX_DIST_CACHE_DIR")} if reason else {}
    return {"path": folder, "entries": len(sizes), "bytes": sum(sizes), "unsafe": unsafe}


def _probe_devices() -> dict[str, Any]:
    import jax

    found = jax.devices()
    kinds = sorted({device.device_kind for device in found})
    return {"backend": jax.default_backend(), "count": len(found), "kinds": kinds}


def _probe_collective() -> dict[str, Any]:
    """0 + 1 + ... over all devices, through the decorator: what every program here rests on."""
    import jax
    import numpy as np

    count = jax.local_device_count()
    add = jax_dist.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    sums = np.asarray(add(np.arange(count, dtype=np.float32)))
    return {"devices": count, "sums": sums.tolist(), "expected": float(count * (count - 1) // 2)}


_PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "versions": _probe_versions,
    "options": _probe_options,
    "cache": _probe_cache,
    "devices": _probe_devices,
    "collective": _probe_collective,
}


def _probe_all() -> None:
    for name, probe in _PROBES.items():
        line = json.dumps({"stage": name, "found": probe()})
        sys.stdout.write(f"{_MARK}{line}\n")
        sys.stdout.flush()  # what comes next may end the process


if __name__ == "__main__":
    _probe_all()
