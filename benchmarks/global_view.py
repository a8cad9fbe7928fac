"""A transformer's training step under pmap and by the global view: numbers, memory, sends, time.

    python benchmarks/global_view.py               # on 8 simulated CPU devices, some minutes
    python benchmarks/global_view.py --on v5e:4x4  # only compiled, for TPUs, with `jax[tpu]`

The function of one device is the same in each way, and so are all rows of the batch. "differs" is
the largest difference of a parameter to pmap's after all steps, of the largest number of its leaf.
Times are medians of ratios of CPU time: in each round all ways take a step, one after the other.
Memory is that of one device, from the compiled program.
"""

import argparse
import functools
import math
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

os.environ.setdefault("NPROC", "16")  # XLA for CPU needs a thread for each device that waits

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist._hlo import ProgramCost
from jax_dist.testing import simulated_devices

DEVICES = 8
OPTIMIZER = optax.adamw(1e-3)
Tree = Any
Options = dict[str, Any] | None  # of global_view; None is pmap


class Sizes(NamedTuple):
    """Those of a transformer, with adamw in float32."""

    layers: int
    width: int
    vocabulary: int
    tokens: int
    batch: int  # of one device
    dtype: Any


HEADS = 8
SMALL = Sizes(2, 256, 1024, 65, 2, jnp.float32)
LARGE = Sizes(8, 512, 8192, 1025, 8, jnp.bfloat16)  # 29 million parameters


def init_state(sizes: Sizes) -> Tree:
    layers, width, vocabulary = sizes[:3]
    shapes = {
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
        "words": (vocabulary, width),
        "places": (4096, width),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = lambda key, shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
    params = {name: draw(*each) for name, *each in zip(shapes, keys, shapes.values(), strict=True)}
    params |= {"norm1": jnp.ones((layers, width)), "norm2": jnp.ones((layers, width))}
    params["norm"] = jnp.ones(width)
    return params, OPTIMIZER.init(params)


def normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def loss_of(params: dict, tokens: jax.Array, sizes: Sizes) -> jax.Array:
    params = jax.tree.map(lambda leaf: leaf.astype(sizes.dtype), params)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    length = inputs.shape[1]
    past = jnp.tril(jnp.ones((length, length), bool))
    split = lambda x: x.reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)

    def block(x: jax.Array, layer: dict) -> tuple[jax.Array, None]:
        q, k, v = map(split, jnp.split(normalize(x, layer["norm1"]) @ layer["qkv"], 3, -1))
        scores = (q @ k.transpose(0, 1, 3, 2)) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(past, scores, -1e9).astype(jnp.float32))
        attended = (weights.astype(x.dtype) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + attended @ layer["out"]
        return x + jax.nn.gelu(normalize(x, layer["norm2"]) @ layer["up"]) @ layer["down"], None

    layers = {name: params[name] for name in ("norm1", "norm2", "qkv", "out", "up", "down")}
    x = params["words"][inputs] + params["places"][:length]
    x, _ = lax.scan(jax.checkpoint(block), x, layers)
    scores = (normalize(x, params["norm"]) @ params["words"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def train_step(state: Tree, tokens: jax.Array, sizes: Sizes) -> tuple[Tree, jax.Array]:
    params, optimizer = state
    loss, gradient = jax.value_and_grad(loss_of)(params, tokens, sizes)
    gradient, loss = lax.pmean((gradient, loss), "i")
    updates, optimizer = OPTIMIZER.update(gradient, optimizer, params)
    return (optax.apply_updates(params, updates), optimizer), loss


def ways_of(devices: Sequence[Any]) -> dict[str, Options]:
    """Return the options of `global_view` by name, None for pmap."""
    part = 2 ** (len(devices).bit_length() // 2)  # devices of a group, or of a matrix
    mesh = lambda names, *shape: Mesh(np.array(devices).reshape(shape), names)
    line, groups = mesh(("i",), -1), mesh(("replica", "i"), -1, part)
    sharded = {
        "fsdp": {"mesh": line, "shardings": "fsdp"},
        "hsdp": {"mesh": groups, "mesh_axes": groups.axis_names, "shardings": "fsdp"},
        "tensor": {"mesh": mesh(("i", "model"), -1, part), "shardings": spec_of_matrix},
    }
    regathered = {f"{name}, regather": {**ways, "regather": True} for name, ways in sharded.items()}
    return {"pmap": None, "replicated": {"mesh": line}, **sharded, **regathered}


def spec_of_matrix(path: str, leaf: Any) -> P:
    """Shard the first matrix of two by columns, the second by rows; and each also over "i"."""
    name = path.rsplit("/", maxsplit=1)[-1]
    if name not in ("qkv", "up", "out", "down", "words"):
        return P()
    last = ("i", "model") if name in ("qkv", "up") else ("model", "i")
    return P(*[None] * (leaf.ndim - 2), *last)


def make_program(options: Options, sizes: Sizes, devices: Sequence[Any]) -> Any:
    step = functools.partial(train_step, sizes=sizes)
    if options is None:
        return jax.pmap(step, "i", devices=devices, donate_argnums=0)
    return jax_dist.global_view(step, "i", out_axes=(None, None), donate_argnums=0, **options)


def types_of(options: Options, sizes: Sizes, count: int) -> tuple[Tree, jax.ShapeDtypeStruct]:
    """Return the types of the arguments; with a further axis, a slice has more rows."""
    state = jax.eval_shape(functools.partial(init_state, sizes))
    if options is None:
        stack = lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype)
        state, slices = jax.tree.map(stack, state), count
    else:
        shape = options["mesh"].shape
        slices = math.prod(shape[name] for name in options.get("mesh_axes", ("i",)))
    rows = sizes.batch * count // slices
    return state, jax.ShapeDtypeStruct((slices, rows, sizes.tokens), np.int32)


def describe(lowered: jax.stages.Lowered) -> str:
    """Return the memory of one device, and the collectives."""
    cost = ProgramCost.measure(lowered)
    kinds: dict[str, int] = {}
    for each in cost.collectives:
        kinds[each.kind] = kinds.get(each.kind, 0) + each.count
    sizes = (cost.argument_bytes, cost.temp_bytes, cost.peak_bytes)
    memory = " ".join(f"{(size or 0) / 1e9:8.4f}" for size in sizes)
    return f"{memory}  {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"


def start(program: Any, options: Options, batch: jax.ShapeDtypeStruct) -> list[Any]:
    """Return the arguments of the first step."""
    tokens = np.random.default_rng(0).integers(0, SMALL.vocabulary, batch.shape, np.int32)
    state = jax.device_get(init_state(SMALL))
    if options is None:
        return [jax.tree.map(lambda leaf: np.stack([leaf] * DEVICES), state), tokens]
    rows = program.place_batch(tokens)
    return [program.place(state, rows, stacked=False), rows]


def largest_difference(leaf: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(leaf - expected).max() / np.abs(expected).max())


def print_measured(ways: dict[str, Options], rounds: int) -> None:
    """Print a line for each way, run on simulated devices."""
    programs = {name: make_program(each, SMALL, jax.devices()) for name, each in ways.items()}
    types = {name: types_of(each, SMALL, DEVICES) for name, each in ways.items()}
    calls = {name: start(programs[name], ways[name], types[name][1]) for name in ways}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in calls.items():
            began = time.process_time()
            call[0], _ = jax.block_until_ready(programs[name](*call))
            times[name].append(time.process_time() - began)
    params = {name: jax.device_get(call[0][0]) for name, call in calls.items()}
    params["pmap"] = jax.tree.map(lambda leaf: leaf[0], params["pmap"])
    for name in ways:
        pairs = zip(times[name][1:], times["pmap"][1:], strict=True)  # the first round compiles
        ratio = statistics.median(seconds / base for seconds, base in pairs)
        apart = jax.tree.map(largest_difference, params[name], params["pmap"])
        text = describe(programs[name].lower(*types[name]))
        print(f"  {name:16} {max(jax.tree.leaves(apart)):8.0e} {ratio:6.2f} {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--on", help="a machine to compile for, such as v5e:4x4")
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    simulated_devices(DEVICES)
    devices = list(jax_dist.topology(options.on).devices) if options.on else jax.devices()
    ways = ways_of(devices)
    print(f"{options.on or f'{DEVICES} simulated devices'}, jax {jax.__version__}")
    memory = f"{'args GB':>8} {'temp GB':>8} {'peak GB':>8}  collectives"
    if options.on is None:
        print(f"  {'':16} {'differs':>8} {'time':>6} {memory}")
        print_measured(ways, options.rounds)
        return
    print(f"  {'':16} {memory}")
    for name, each in ways.items():
        program, types = make_program(each, LARGE, devices), types_of(each, LARGE, len(devices))
        print(f"  {name:16} {describe(program.lower(*types))}", flush=True)


if __name__ == "__main__":
    main()
