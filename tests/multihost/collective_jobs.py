"""What the ranks run in the tests of the collectives; each returns plain data."""

import pathlib
import struct
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jobs import after_rank_0

from jax_dist import multihost


def error_of(call: Callable) -> tuple[str, str]:
    """Class and text of what it raises."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it raises is what is tested
        return type(error).__name__, str(error)
    return "no error", ""


def mesh(*names: str, shape: tuple[int, ...] = (-1,)) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)


def cut(values: np.ndarray) -> jax.Array:
    """An array over the devices of all processes."""
    sharding = NamedSharding(mesh("i"), P("i"))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


NAN = struct.unpack("<f", struct.pack("<I", 0x7FC12345))[0]  # with bits of its own


def broadcast() -> dict[str, object]:
    first = jax.process_index() == 0
    nan = np.frombuffer(struct.pack("<I", 0x7FC12345 if first else 0), np.float32)
    tree = {
        "int64": np.int64(2**40 + 1 if first else 0),
        "float64": np.float64(1 + 1e-12 if first else 0.0),
        "nan": nan,
        "bfloat16": np.full(2, 0.5 if first else 0, jnp.bfloat16),
        "bool": np.array([first, not first]),
        "key": jax.random.key(7 if first else 0),
        "keys": jax.random.split(jax.random.key(7 if first else 0), 3),
        "jax": jnp.arange(3) + (10 if first else 0),
        "text": "the first" if first else "another one, and longer",
        "bytes": b"\0\xff\0" if first else b"",
        "int": 3**50 if first else 0,
        "float": float("-inf") if first else 0.0,
        "flag": first,
        "none": None,
        "empty": np.zeros((0, 3)),
        "large": np.full((100, 1000), 2**40 + 1 if first else 0, np.int64),
    }
    found = multihost.broadcast_one_to_all(tree)
    return {
        "int64": (str(found["int64"].dtype), int(found["int64"])),
        "float64": (str(found["float64"].dtype), float(found["float64"])),
        "nan": found["nan"].view(np.uint32).tolist(),
        "bfloat16": (str(found["bfloat16"].dtype), found["bfloat16"].tolist()),
        "bool": found["bool"].tolist(),
        "key": jax.random.key_data(found["key"]).tolist(),
        "keys": found["keys"].shape,
        "jax": found["jax"].tolist(),
        "large": (found["large"].shape, int(found["large"].sum())),
        "empty": found["empty"].shape,
        **{name: found[name] for name in ("text", "bytes", "int", "float", "flag", "none")},
    }


def broadcast_from_the_last() -> object:
    rank = jax.process_index()
    return multihost.broadcast_one_to_all({"rank": rank}, is_source=rank == 1)


def broadcasts_that_fail() -> list[object]:
    rank = jax.process_index()
    give = multihost.broadcast_one_to_all
    return [
        error_of(lambda: give({"x": np.zeros(2 + rank)})),
        error_of(lambda: give({"x": np.zeros(2), "y": 1} if rank else {"x": np.zeros(2)})),
        error_of(lambda: give((1, 2) if rank else [1, 2])),
        error_of(lambda: give(1, is_source=True)),
        error_of(lambda: give(1, is_source=False)),
        error_of(lambda: give({1, 2})),
        error_of(lambda: give(cut(np.arange(4.0)))),
        error_of(lambda: give(object() if rank else 1)),
        error_of(lambda: give(cut(np.arange(4.0)) if rank else np.zeros(4, np.float32))),
        give(rank + 5),  # the job is still usable
    ]


def gather() -> dict[str, object]:
    rank = jax.process_index()
    tree = {
        "scalar": 0.5 + rank,
        "int64": np.int64(2**40 + rank),
        "array": np.arange(4.0).reshape(2, 2) + 10 * rank,
        "key": jax.random.key(rank),
        "text": "ab"[rank] * (rank + 1),
        "bytes": b"\0" * (rank + 1),
        "whole": cut(np.arange(4, dtype=np.float32)),
        "large": np.full(100_000, 2**40 + rank, np.int64),
    }
    shapes = []
    for tiled in (False, True):
        found = multihost.process_allgather(tree, tiled=tiled)
        shapes.append({name: np.shape(value) for name, value in found.items()})
    found["large"] = found["large"][[0, -1]]
    found["key"] = jax.random.key_data(found["key"])
    return {"shapes": shapes, "tiled": {name: each.tolist() for name, each in found.items()}}


def gathers_that_fail() -> list[object]:
    rank = jax.process_index()
    return [
        error_of(lambda: multihost.process_allgather({"x": np.zeros(2 + rank)})),
        error_of(lambda: multihost.process_allgather(np.zeros(2, [np.int32, np.int64][rank]))),
        error_of(lambda: multihost.process_allgather(object())),
        multihost.process_allgather(rank).tolist(),
    ]


def other_orders() -> list[object]:
    """Rank 0 broadcasts where rank 1 gathers."""
    calls = [lambda: multihost.broadcast_one_to_all(1), lambda: multihost.process_allgather(1)]
    return [error_of(calls[jax.process_index()]), multihost.process_allgather(1).tolist()]


def barriers(folder: pathlib.Path) -> list[object]:
    rank = jax.process_index()
    multihost.sync_global_devices("all is well")
    found: list[object] = [error_of(lambda: multihost.sync_global_devices(["load", "save"][rank]))]
    with after_rank_0(rank, folder / "the barrier"):
        timeout = 120.0 if rank else 1.5
        found.append(error_of(lambda: multihost.sync_global_devices("step 3", timeout=timeout)))
    multihost.sync_global_devices("after")
    return found


def equal() -> list[object]:
    rank = jax.process_index()
    same = {
        "nan": np.array([np.nan, -0.0 if rank else 0.0]),
        "float": -0.0 if rank else 0.0,
        "key": jax.random.key(3),
        "text": "a",
        "bfloat16": jnp.full(3, np.nan, jnp.bfloat16),
        "cut": cut(np.arange(4.0)),
        "none": None,
    }
    multihost.assert_equal(same)
    return [
        error_of(lambda: multihost.assert_equal({"x": np.zeros(2 + rank)}, "weights")),
        error_of(lambda: multihost.assert_equal({"x": np.arange(2) + rank, "y": 1})),
        error_of(lambda: multihost.assert_equal(float(rank))),
        error_of(lambda: multihost.assert_equal([1, 2] if rank else (1, 2))),
        error_of(lambda: multihost.assert_equal(same)),
    ]


def convert() -> list[object]:
    rank = jax.process_index()
    give = multihost.host_local_array_to_global_array
    tree = {"x": np.arange(4.0) + 4 * rank, "w": np.ones(3), "key": jax.random.key(1)}
    specs = {"x": P("i"), "w": P(), "key": P()}
    whole = give(tree, mesh("i"), specs)
    back = multihost.global_array_to_host_local_array(whole, mesh("i"), specs)
    total = jax.jit(lambda tree: tree["x"].sum() + tree["w"].sum())(whole)
    return [
        whole["x"].shape,
        np.asarray(back["x"]).tolist(),
        jax.random.key_data(back["key"]).addressable_data(0).tolist(),
        float(total),
        error_of(lambda: give(np.zeros(4 + 4 * rank), mesh("i"), P("i"))),
        error_of(lambda: give({"w": np.full(2, 1.0 + rank)}, mesh("i"), P())),
        error_of(lambda: give(np.ones(3, int), mesh("i"), P("i") if rank else P())),
    ]


def convert_partly_replicated() -> list[object]:
    """Cut over the devices of a process, the same in all of them."""
    rank = jax.process_index()
    two = mesh("process", "device", shape=(2, 2))
    give = multihost.host_local_array_to_global_array
    alike, other = np.arange(8.0), np.arange(8.0)
    other[5] += rank
    return [
        give(alike, two, P("device")).shape,
        error_of(lambda: give(other, two, P("device"), check="always")),
        give(other, two, P("device"), check=False).shape,
    ]


def convert_and_change(folder: pathlib.Path) -> list[object]:
    """The first call is right; later ones are not, or have other shapes in one process."""
    rank = jax.process_index()
    give = multihost.host_local_array_to_global_array
    give(np.ones(3), mesh("i"), P())
    found: list[object] = [
        error_of(lambda: give(np.full(3, rank), mesh("i"), P())),  # int: another signature
        error_of(lambda: give(np.full(3, 1.0 + rank), mesh("i"), P())),  # not looked at again
        error_of(lambda: give(np.full(3, 1.0 + rank), mesh("i"), P(), check="always")),
        error_of(lambda: give(np.ones(3), mesh("i"), P(), check="twice")),
    ]
    with after_rank_0(rank, folder / "the conversion"):
        convert_other = lambda: give(np.ones(5), mesh("i"), P(), timeout=1.0)
        gather_instead = lambda: multihost.process_allgather(1)  # the others have given up
        found.append(error_of(gather_instead if rank else convert_other))
    found.append(multihost.process_allgather(1).tolist())
    return found


_JOBS = (
    broadcast,
    broadcast_from_the_last,
    broadcasts_that_fail,
    gather,
    gathers_that_fail,
    other_orders,
    barriers,
    equal,
    convert,
    convert_partly_replicated,
    convert_and_change,
)
_WITH_A_FOLDER = (barriers, convert_and_change)


def everything(folder: str) -> dict[str, object]:
    """All of these, in one job: none of them spoils it for the next."""
    here = pathlib.Path(folder)
    return {job.__name__: job(here) if job in _WITH_A_FOLDER else job() for job in _JOBS}
