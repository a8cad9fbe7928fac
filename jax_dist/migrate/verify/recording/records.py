"""The records of mapped calls: how one process writes them, and how they are read.

Each process has a folder. In it, `calls.jsonl` has one line for each call, and `arrays` holds the
arrays one behind another, each as `numpy.save` writes it; of one that is too large there is only a
corner.
"""

import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_MOST_BYTES = 1 << 20  # of an array that is kept whole, or of one of its equal rows
_CORNER = 16  # elements along each dimension


class RecordedLeaf(NamedTuple):
    """One leaf of a call's arguments or results."""

    path: str  # as `jax.tree_util.keystr` writes it: "[0]['w']"
    dtype: str  # or the type of a value that is no array
    text: str | None = None  # the repr of a value that is no array
    shape: Sequence[int] = ()
    digest: str = ""  # of the bytes of the array, whatever its shape
    rows: Sequence[str] = ()  # digests of its slices along dimension 0, if they are few
    copies: Sequence[str] = ()  # digests of the copies on all devices; none if it is sharded
    offset: int | None = None  # where the array stands in the file
    # Returns the NumPy array, or a corner if it was too large; None if it is no array.
    load: Callable[[], Any] = lambda: None

    @property
    def is_keys(self) -> bool:
        """Return whether it may be the data of random keys, `[devices, 2]`; 4 words with rbg."""
        return self.dtype == "uint32" and len(self.shape) == 2 and self.shape[1] in (2, 4)


class RecordedCall(NamedTuple):
    """One recorded call of a mapped function."""

    path: str  # within the tree
    line: int  # where the function was mapped
    name: str  # of the function
    arguments: Sequence[RecordedLeaf]
    results: Sequence[RecordedLeaf]
    raised: str  # "ValueError: ..."; "" if it returned
    # {"text": how a replay differs, "reason": why}; or {"text": "", "epsilon": ..., "tolerances":
    # ...} with what `replays.replay` returns.
    replay: Mapping[str, Any] | None = None


class RecordWriter:
    """Writes the calls of this process into a new folder."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        # Both stay open until the process ends, however it does.
        self._calls = open(folder / "calls.jsonl", "a", buffering=1)  # noqa: SIM115
        self._arrays = open(folder / "arrays", "wb")  # noqa: SIM115
        self._known: dict[int, Any] = {}  # by id of an array: reference, fields, if it is whole

    def write(self, event: Mapping[str, Any]) -> None:
        """Write one call, whose arrays were described before."""
        self._arrays.flush()
        self._calls.write(json.dumps(event) + "\n")

    def describe(
        self, tree: Any, *, is_argument: bool = False, keep_all: bool = False
    ) -> list[dict[str, Any]]:
        """Write a tree's arrays, with `keep_all` large ones whole; return each leaf's fields."""
        import jax
        import numpy as np

        numbers = jax.Array | np.ndarray | np.generic | int | float | complex | bool
        leaves: list[dict[str, Any]] = []
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            reference, fields, is_whole = self._known.get(id(leaf), (lambda: None, {}, False))
            if reference() is leaf and is_whole >= keep_all:
                pass  # the program hands it on, and its elements never change
            elif isinstance(leaf, numbers):
                fields = self._describe_array(leaf, is_argument=is_argument, keep_all=keep_all)
                if isinstance(leaf, jax.Array):
                    forget = functools.partial(self._known.pop, id(leaf))  # once it is gone
                    self._known[id(leaf)] = weakref.ref(leaf, forget), fields, keep_all
            else:  # without an address, which differs from run to run
                type_name, text = type(leaf).__name__, repr(leaf)[:200]
                fields = {"dtype": type_name, "text": type_name if " at 0x" in text else text}
            leaves.append({"path": jax.tree_util.keystr(path), **fields})
        return leaves

    def _describe_array(self, leaf: Any, *, is_argument: bool, keep_all: bool) -> dict[str, Any]:
        """Write an array or number, or a corner of it; return the fields of its `RecordedLeaf`.

        Its digest is made of those of as many equal parts as there are devices, so that a batch
        [8, 4, 3] and the merged one [32, 3] have the same.
        """
        import jax
        import numpy as np

        array, copies = to_numpy(leaf)
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        if is_argument and not array.dtype.hasobject:  # jit takes float64 as float32
            dtype = jax.dtypes.canonicalize_dtype(array.dtype)
            array = array.astype(dtype, copy=False)
        device_count = jax.local_device_count()
        parts = array.reshape(device_count, -1) if array.size % device_count == 0 else [array]
        rows = _digests(array) if array.ndim > 0 and len(array) <= device_count else []
        are_rows_equal = len(rows) > 1 and len(set(rows)) == 1
        value = array[0] if are_rows_equal else array  # `_load` repeats the row
        if value.nbytes > _MOST_BYTES and not keep_all:
            value = value[(slice(_CORNER),) * value.ndim]
        offset, is_numpy_type = self._arrays.tell(), value.dtype.kind != "V"  # bfloat16 is none
        np.save(self._arrays, value if is_numpy_type else value.astype(np.float32))
        digest = hashlib.sha256("".join(_digests(parts)).encode()).hexdigest()[:16]
        fields = {"dtype": str(dtype), "shape": array.shape, "digest": digest, "rows": rows}
        return {**fields, "copies": _digests(copies), "offset": offset}


def _digests(arrays: Sequence[Any]) -> list[str]:
    """Return a hash of the bytes of each array, computed once for those equal to the first."""
    import numpy as np

    views = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    digest = lambda view: hashlib.sha256(view).hexdigest()[:16]
    first = digest(views[0]) if views else ""
    return [first if np.array_equal(view, views[0]) else digest(view) for view in views]


def read_calls(folder: Path) -> list[RecordedCall]:
    """Return the calls that the process of a folder recorded, in order: one in each line."""
    calls: list[RecordedCall] = []
    load = functools.partial(_load, folder / "arrays")
    make_leaf = lambda fields: RecordedLeaf(**fields, load=functools.partial(load, fields))
    for line in (folder / "calls.jsonl").read_text().splitlines():
        event = json.loads(line)  # {"path": "a.py", "line": 3, "arguments": [{"path": ...}], ...}
        for side in ("arguments", "results"):
            event[side] = [make_leaf(fields) for fields in event.get(side, ())]
        calls.append(RecordedCall(**{"raised": "", **event}))
    return calls


def _load(path: Path, leaf: Mapping[str, Any]) -> Any:
    """Return the array of a leaf from the file of all arrays; None if the leaf is no array."""
    import numpy as np  # only here: a migration without a run needs no NumPy

    if "offset" not in leaf:
        return None
    with open(path, "rb") as file:
        file.seek(leaf["offset"])
        array = np.load(file)
    is_row = array.ndim < len(leaf["shape"])  # only the first was written, as all are equal
    return np.broadcast_to(array, (leaf["shape"][0], *array.shape)) if is_row else array


def to_numpy(leaf: Any) -> tuple[Any, list[Any]]:
    """Return `(array, copies)` of an array or number, in NumPy.

    The copies are those of all devices, [] if it is sharded. Of an array over several processes it
    is the part of this one; of random keys it is their data.
    """
    import jax
    import numpy as np

    if not isinstance(leaf, jax.Array):
        array = np.asarray(leaf)
        return array, [array]
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
    blocks = [np.asarray(shard.data) for shard in shards]
    if leaf.is_fully_replicated:
        return blocks[0], blocks
    if not leaf.is_fully_addressable:
        return np.concatenate(blocks), []
    is_row_per_device = blocks[0].shape == (1, *leaf.shape[1:])
    if is_row_per_device and all(np.array_equal(block, blocks[0]) for block in blocks):
        return np.broadcast_to(blocks[0], leaf.shape), []  # without a copy for each device
    return np.asarray(leaf), []
