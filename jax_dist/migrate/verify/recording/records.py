"""Recorded calls, read from the folder of one process; and arrays as they are recorded."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Leaf(NamedTuple):
    """One leaf of a call's arguments or results, as `calls` describes it."""

    path: str  # as `jax.tree_util.keystr` writes it: "[0]['w']"
    dtype: str  # or the type of a value that is no array
    text: str | None = None  # the repr of a value that is no array
    shape: Sequence[int] = ()
    digest: str = ""  # of the bytes of the array
    rows: Sequence[str] = ()  # digests of its slices along dimension 0, if they are few
    copies: Sequence[str] = ()  # digests of the copies on all devices, if it is replicated
    key: str = ""  # of the array in the .npz file
    array: Any = None  # the NumPy array, or a corner if it was too large; None: it is no array


class Call(NamedTuple):
    """One recorded call of a mapped function."""

    path: str  # within the tree
    line: int  # where the function was mapped
    name: str  # of the function
    given: Sequence[Leaf]  # the arguments
    returned: Sequence[Leaf]
    raised: str  # "ValueError: ..."; "" if it returned
    # {"text": how a replay differs, "reason": why}; or {"text": "", "epsilon": ..., "tolerances":
    # ...} with what `replays.replay` returns.
    replay: Mapping[str, Any] | None = None


def find_calls(folder: Path) -> list[tuple[Path, str]]:
    """Return the calls that the process of a folder recorded, in order, each for `read_call`."""
    return [(folder, line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def read_call(folder: Path, line: str) -> Call:
    """Return the call that a line of `calls.jsonl` records, with the arrays that were kept."""
    import numpy as np  # only here: a migration without a run needs no NumPy

    event = json.loads(line)
    arrays: dict[str, Any] = {}
    archive = folder / f"{event['call']}.npz"
    if archive.exists():
        with np.load(archive) as loaded:
            arrays = dict(loaded)
    given, returned = (
        [Leaf(**leaf, array=arrays.get(leaf.get("key"))) for leaf in event.get(side, ())]
        for side in ("given", "returned")
    )
    place = event["path"], event["line"], event["name"]
    return Call(*place, given, returned, event.get("raised", ""), event.get("replay"))


def to_numpy(leaf: Any) -> tuple[Any, list[Any]]:
    """Return an array or number as a NumPy array, and its copies if it is a replicated jax.Array.

    Of an array over several processes it is the part of this one; of keys it is their data.
    """
    import jax
    import numpy as np

    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf), []
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
    parts = [np.asarray(shard.data) for shard in shards]
    if leaf.is_fully_replicated:
        return parts[0], parts
    return np.asarray(leaf) if leaf.is_fully_addressable else np.concatenate(parts), []
