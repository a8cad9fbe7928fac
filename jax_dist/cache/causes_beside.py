"""Causes that stand beside the program: versions, devices, flags, options of the compiler."""

import re
from collections import Counter
from collections.abc import Iterator

from jax_dist.cache.cases import MOST_DETAILS, PROGRAM, Case
from jax_dist.cache.causes import Finding, finding
from jax_dist.cache.changes import Change
from jax_dist.cache.settings import (
    ALL_DEVICES,
    COMPILER_OPTION,
    DEBUG_OPTION,
    DEVICES,
    DIRECTORY_OPTIONS,
    FLAGS,
    PROCESSES,
)


def versions(case: Case) -> Iterator[Finding]:
    """First: another jax makes other programs of the same functions."""
    pairs = {name: case.differ(name) for name in ("jax", "jaxlib", "backend version")}
    details = [f"{name}: {pair[0]}, then {pair[1]}" for name, pair in pairs.items() if pair]
    if details:
        yield finding("versions", *details)
        case.explain_all()


def device_count(case: Case) -> Iterator[Finding]:
    """It changes shapes, meshes, options, and numbers such as those that a mean divides by."""
    for name, count in ((ALL_DEVICES, str), (DEVICES, _how_many), (PROCESSES, str)):
        before, after = map(count, case.differ(name) or ("", ""))
        if before != after:
            yield finding("device-count", f"{name}: {before}, then {after}")
            case.explain_all(besides=("XLA flags",))
            return


def _how_many(ids: str) -> str:
    return str(len(ids.split()))


def xla_flags(case: Case) -> Iterator[Finding]:
    pair = case.differ(FLAGS)
    if "XLA flags" not in case.components or pair is None:
        return
    before, after = (Counter(text.split()) for text in pair)
    gone, new = sorted((before - after).elements()), sorted((after - before).elements())
    yield finding(
        "xla-flags",
        *(f"{flag} only in the first" for flag in gone),
        *(f"{flag} only in the second" for flag in new),
    )
    case.explain("XLA flags")
    for flag in (*gone, *new):  # JAX also parses those that it knows into its options
        case.settings.pop(DEBUG_OPTION + flag.lstrip("-").split("=")[0], None)
    if not _options_left(case):
        case.explain("compile_options")


def _options_left(case: Case) -> bool:
    kinds = (DEBUG_OPTION, COMPILER_OPTION)
    return DEVICES in case.settings or any(name.startswith(kinds) for name in case.settings)


def directory(case: Case) -> Iterator[Finding]:
    names = [DEBUG_OPTION + name for name in DIRECTORY_OPTIONS]
    pairs = [case.settings.pop(name) for name in names if name in case.settings]
    if "compile_options" in case.components and pairs:
        yield finding("cache-directory", f"{pairs[0][0]}, then {pairs[0][1]}")
        if not _options_left(case):
            case.explain("compile_options")


def compiler_options(case: Case) -> Iterator[Finding]:
    names = [name for name in case.settings if name.startswith((COMPILER_OPTION, DEBUG_OPTION))]
    if "compile_options" not in case.components or not names:
        return
    details = [
        f"{name.split()[-1]}: {before or 'not set'}, then {after or 'not set'}"
        for name, (before, after) in ((name, case.settings.pop(name)) for name in names)
    ]
    yield finding("compiler-options", *details[:MOST_DETAILS])
    if not _options_left(case):
        case.explain("compile_options")


def device_order(case: Case) -> Iterator[Finding]:
    pair = case.differ(DEVICES)
    meshes = case.take(lambda change: is_mesh(change) and len(set(device_ids(change))) == 2)
    if pair is not None and sorted(pair[0].split()) == sorted(pair[1].split()):
        details = [f"{pair[0]}, then {pair[1]}"]
        case.explain("compile_options", "accelerator_config")
    elif meshes:
        details = [", then ".join(text or "in order" for text in device_ids(meshes[0]))]
    else:
        return
    case.take(is_about_devices)
    if PROGRAM in case.components and not case.changes:
        case.explain(PROGRAM)
    yield finding("device-order", *details)


def others(case: Case) -> Iterator[Finding]:
    """Components that are one thing each."""
    for component, name, setting in _SINGLE:
        if component in case.components:
            pair = case.differ(setting)
            yield finding(name, *([f"{pair[0]}, then {pair[1]}"] if pair else []))
            case.explain(component)


_SINGLE = (
    ("compression", "compression", "compression"),
    ("custom_hook", "custom-hook", ""),
    ("accelerator_config", "hardware", "kinds of devices"),
)


_IDS = re.compile(r"device_ids=\[([^\]]*)\]")


def device_ids(change: Change) -> tuple[str, str]:
    before, after = (_IDS.search(text) for text in (change.before, change.after))
    return before[1] if before else "", after[1] if after else ""


def is_mesh(change: Change) -> bool:
    return change.kind == "sdy.mesh" and change.what == "mesh"


def is_about_devices(change: Change) -> bool:
    return change.what.endswith(("mhlo.sharding", "replica_groups", "source_target_pairs"))
