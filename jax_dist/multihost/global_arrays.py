"""Arrays of one process as parts of arrays of all, and back, once all agree on what these are.

JAX builds the whole array from what this process has, without a look at the others. If they have
other shapes, each process believes in another array; if they have other values of a part that is
the same on all devices, each device computes with another one. Neither is ever noticed.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.errors import DisagreementError, refusal
from jax_dist.multihost.agreement import Fingerprint, agree_on
from jax_dist.multihost.collectives import TIMEOUT, as_key_of, is_key, is_whole, types
from jax_dist.multihost.ranks import do

_NAME = "host_local_array_to_global_array"
_FEW = 4  # elements that are shown, not only hashed

_agreed: set[Any] = set()  # signatures


def host_local_array_to_global_array(
    tree: Any,
    mesh: Mesh,
    specs: Any,
    *,
    check: Literal["first", "always", False] = "first",
    timeout: float = TIMEOUT,
) -> Any:
    """Makes arrays of all processes from what each of them has.

    It does what the function of this name in `jax.experimental.multihost_utils` does, and makes
    sure that the processes have arrays of the same shapes and dtypes, and the same values where a
    part of the whole array is on devices of several of them.

    Args:
      tree: of arrays that this process has.
      mesh: of the devices of all processes.
      specs: how the whole arrays are cut; a tree of `PartitionSpec` that is a prefix of `tree`.
      check: compare with the other processes at the "first" call with these shapes, which takes
        some milliseconds; "always", which finds values that differ later; or not at all.
      timeout: the seconds to wait for the others.

    Returns:
      The tree with arrays of all processes.

    Raises:
      DisagreementError: in every process: what they have does not go together.
      MissingRanksError: not all processes came in time. With check="first", one that has shapes
        that are new to it waits for the others, who may not have new ones.
      ValueError: `check` is something else, or the specs do not fit.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "i")
    >>> host_local_array_to_global_array(np.arange(8.0), mesh, P("i")).shape
    (8,)
    """
    if check not in ("first", "always", False):
        raise ValueError(f'{_NAME}: check must be "first", "always" or False, not {check!r}.')
    leaves, structure = jax.tree.flatten(tree)
    leaves = [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in leaves]
    traced = any(isinstance(leaf, Tracer) for leaf in leaves)
    if check and not traced and jax.process_count() > 1:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
        parts = [_Part(*each) for each in zip(paths, leaves, _spread(specs, tree), strict=True)]
        signature = (structure, mesh, *[(part.type, part.spec) for part in parts])
        if check == "always" or signature not in _agreed:
            _agree(mesh, parts, timeout)
            _agreed.add(signature)
    convert = multihost_utils.host_local_array_to_global_array
    return _with_data_of_keys(convert, jax.tree.unflatten(structure, leaves), mesh, specs)


def global_array_to_host_local_array(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Gives this process its own slices of arrays of all processes, as
    `jax.experimental.multihost_utils.global_array_to_host_local_array` does.

    No other process takes part.

    Args:
      tree: of arrays of all processes.
      mesh: of the devices of all processes.
      specs: how the arrays are to be cut; a tree of `PartitionSpec` that is a prefix of `tree`.

    Returns:
      The tree with arrays on the devices of this process.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "i")
    >>> x = jax.device_put(np.arange(8.0), jax.NamedSharding(mesh, P("i")))
    >>> global_array_to_host_local_array(x, mesh, P("i")).shape
    (8,)
    """
    return _with_data_of_keys(multihost_utils.global_array_to_host_local_array, tree, mesh, specs)


def _with_data_of_keys(convert: Callable, tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Typed keys as the numbers in them: on jax 0.7.2, JAX cannot convert them."""
    data = jax.tree.map(lambda leaf: jax.random.key_data(leaf) if is_key(leaf) else leaf, tree)
    return jax.tree.map(
        lambda leaf, found: as_key_of(found, leaf) if is_key(leaf) else found,
        tree,
        convert(data, mesh, specs),
    )


class _Part(NamedTuple):
    """What this process has of one array."""

    path: str
    leaf: Any
    spec: Any

    @property
    def type(self) -> str:
        return types(self.leaf)[""]

    def shared(self, mesh: Mesh) -> dict[str, str]:
        """The parts that other processes hold too, with their values in few words."""
        if is_whole(self.leaf) or not isinstance(self.spec, P):
            return {}
        host = np.asarray(jax.random.key_data(self.leaf) if is_key(self.leaf) else self.leaf)
        shape = list(host.shape)  # `[n, *s]` here is `[processes * n, *s]`, if cut over processes
        for dimension, entry in enumerate(self.spec):
            names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            for name in names:
                shape[dimension] *= mesh.shape[name] // mesh.local_mesh.shape[name]
        whole = NamedSharding(mesh, self.spec).devices_indices_map(tuple(shape))
        own = NamedSharding(mesh.local_mesh, self.spec).devices_indices_map(host.shape)
        holders: dict[str, set[int]] = {}
        for device, index in whole.items():
            holders.setdefault(str(index), set()).add(device.process_index)
        return {
            _bounds(whole[device]): _value(host[index])
            for device, index in own.items()
            if len(holders[str(whole[device])]) > 1
        }


def _agree(mesh: Mesh, parts: Sequence[_Part], timeout: float) -> None:
    marks = {}
    for part in parts:  # the repr of a spec differs by version
        spec = f"P{tuple(part.spec)}" if isinstance(part.spec, P) else part.spec
        marks[part.path] = f"{part.type} cut by {spec}"
    marks["the mesh"] = f"{dict(mesh.shape)} of devices {[each.id for each in mesh.devices.flat]}"
    agree_on(_NAME, Fingerprint("", marks), timeout=timeout)
    shared = {part.path: part.shared(mesh) for part in parts}  # raises in all, or in none
    given = agree_on(
        f"{_NAME}, values", Fingerprint("", {}), timeout=timeout, give=json.dumps(shared).encode()
    )
    # In the order of the ranks, so that all say the same.
    holders: dict[tuple[str, str], dict[str, list[int]]] = {}
    for rank, told in given.items():
        for path, held in json.loads(told).items():
            for bounds, value in held.items():
                holders.setdefault((path, bounds), {}).setdefault(value, []).append(rank)
    which = [
        f"{path or 'the array'}{bounds}: "
        + ", ".join(f"{do(ranks, 'has', 'have')} {value}" for value, ranks in values.items())
        for (path, bounds), values in holders.items()
        if len(values) > 1
    ]
    if which:
        raise refusal(
            DisagreementError,
            what=f"{_NAME}: processes have different values of the same part",
            which=which,
            why="by these specs, each of these parts is on devices of several processes",
            do="Compute it in the same way everywhere, broadcast it with "
            "jax_dist.multihost.broadcast_one_to_all, "
            "or cut that dimension over the processes.",
        )


def _spread(specs: Any, tree: Any) -> list[Any]:
    """One spec for each leaf."""
    is_spec = lambda node: isinstance(node, P)
    whole = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: spec, part), specs, tree, is_leaf=is_spec
    )
    return jax.tree.leaves(whole, is_leaf=is_spec)


def _bounds(index: tuple[slice, ...]) -> str:
    sides = ["" if side.start is None else side.start for side in index]
    ends = ["" if side.stop is None else side.stop for side in index]
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(sides, ends, strict=True))}]"


def _value(block: np.ndarray) -> str:
    if block.size <= _FEW:
        return str(block.tolist())
    return f"values with sha256 {hashlib.sha256(block.tobytes()).hexdigest()[:16]}"
