"""Says what this machine runs: versions, devices, and which private paths of JAX are in use.

Put its output into a bug report.
"""

import argparse
import json
import platform
from importlib import metadata
from typing import Any, TextIO

import jax_dist
from jax_dist.commands.exits import Exit

_PACKAGES = ("jax", "jaxlib", "numpy")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="versions and devices, for a bug report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, *, out: TextIO, err: TextIO) -> Exit:
    del err
    facts = gather()
    if options.json:
        print(json.dumps(facts, indent=2), file=out)
        return Exit.OK
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:{width}}  {value}", file=out)
    return Exit.OK


def gather() -> dict[str, str | int]:
    """Starts JAX's backend."""
    import jax  # not at the top: `--help` must not wait for it

    from jax_dist import _compat

    facts: dict[str, str | int] = {
        "python": platform.python_version(),
        "jax-dist": jax_dist.__version__,
    }
    facts |= {name: metadata.version(name) for name in _PACKAGES}
    facts["backend"] = jax.default_backend()
    facts["devices"] = jax.device_count()
    facts["kind"] = jax.devices()[0].device_kind
    facts["processes"] = jax.process_count()
    facts["arrays across processes"] = "rewrapped" if _compat.can_rewrap() else "rebuilt (slower)"
    facts["nested pmap"] = "shard_map" if _compat.NESTED_MANUAL_AXIS_INDEX else "vmap"
    return facts
