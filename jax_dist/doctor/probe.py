"""Runs in a process of its own: starting JAX may hang, or end the process.

Each stage writes one line of JSON as soon as it is through, so that what came before is known.
"""

import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

MARK = "jax-dist-doctor "  # in front of each line: start-up files of Python may print too

_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm7-plugin", "libtpu")


def main() -> None:
    """Every stage, in order; an error ends the process, and says in which stage."""
    for name, stage in STAGES.items():
        start = time.perf_counter()
        found = stage()
        seconds = round(time.perf_counter() - start, 3)
        line = json.dumps({"stage": name, "seconds": seconds, "found": found})
        sys.stdout.write(f"{MARK}{line}\n")
        sys.stdout.flush()  # what comes next may end the process


def versions() -> dict[str, Any]:
    names = ("jax", "jaxlib", "numpy", *_PLUGINS)
    found = {name: version for name in names if (version := _version(name)) is not None}
    return {"python": platform.python_version(), "executable": sys.executable, **found}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def options() -> dict[str, Any]:
    from jax_dist import _compat

    return {"names": _compat.option_names()}


def ways() -> dict[str, str]:
    """Which private paths of JAX are in use; they are tried, so the devices must run."""
    from jax_dist import _compat

    return {
        "arrays across processes": "rewrapped" if _compat.can_rewrap() else "rebuilt (slower)",
        "nested pmap": "shard_map" if _compat.NESTED_MANUAL_AXIS_INDEX else "vmap",
    }


def cache() -> dict[str, Any]:
    from jax_dist.cache import store
    from jax_dist.cache.diagnosis import doctor

    folder = store.chosen(None, os.environ)
    return {"path": folder} if store.is_url(folder) else doctor().to_dict()


def devices() -> dict[str, Any]:
    import jax

    found = jax.devices()
    return {
        "backend": jax.default_backend(),
        "count": len(found),
        "kinds": sorted({device.device_kind for device in found}),
        "processes": jax.process_count(),
        "bytes": [_bytes(device) for device in found],
    }


def _bytes(device: Any) -> int | None:
    """The memory of one device, where its backend tells."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except NotImplementedError:
        return None


def collective() -> dict[str, Any]:
    """0 + 1 + ... over all devices, through the decorator: what every program here rests on."""
    import jax
    import numpy as np

    import jax_dist

    count = jax.local_device_count()
    add = jax_dist.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    sums = np.asarray(add(np.arange(count, dtype=np.float32)))
    return {"devices": count, "sums": sums.tolist(), "expected": float(count * (count - 1) // 2)}


STAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "versions": versions,
    "options": options,
    "cache": cache,
    "devices": devices,
    "ways": ways,
    "collective": collective,
}

if __name__ == "__main__":
    if importlib.util.find_spec("jax_dist") is None:
        raise SystemExit("jax_dist is not installed for this Python")
    main()
