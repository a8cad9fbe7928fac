"""Calls the mapped functions of two modules alike, in each process of a run."""

import importlib
import sys
from typing import Any

import jax
import numpy as np

_CALLS = ("alone", "shared", "by_name", "one_device_fewer", "trained", "evaluated", "on_four")


def verdicts(folder: str) -> dict[str, str]:
    """How `before.py` and `after.py` of a folder compare: by "function slices", in this process.

    "equal", "different", or who raised.
    """
    sys.path.insert(0, folder)
    modules = [importlib.import_module(name) for name in ("before", "after")]
    found = {}
    here = jax.local_device_count()
    for module in modules:
        module.OFFSET = 10 * jax.process_index()  # each process has data of its own
    for name in _CALLS:
        for slices in sorted({1, max(1, here // 2), here, here + 1, 2 * here}):
            before, after = (_outcome(getattr(module, name), slices) for module in modules)
            found[f"{name} {slices}"] = _verdict(before, after)
    return found


def _outcome(function: Any, slices: int) -> list[Any] | Exception:
    try:
        return [_held(leaf) for leaf in jax.tree.leaves(function(slices))]
    except Exception as error:  # noqa: BLE001 - any is one
        return error


def _held(leaf: Any) -> tuple[Any, ...]:
    """What this process has of an array, to the bit."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = np.stack([np.asarray(shard.data) for shard in leaf.addressable_shards])
    values = np.asarray(leaf)
    return values.shape, str(values.dtype), values.tobytes()


def _verdict(before: Any, after: Any) -> str:
    both = (("before", before), ("after", after))
    raised = [name for name, each in both if isinstance(each, Exception)]
    if raised:
        return f"raised {' and '.join(raised)}"
    return "equal" if before == after else "different"
