"""A training step under pmap, shard_map and the global view: numbers, memory, what is sent, time.

    python benchmarks/global_view.py

All in one run, on 8 simulated CPU devices, so that the ratios mean something on a busy machine.
The state is that of a network of three layers with momentum. "by hand" is FSDP as one writes it,
without the map, and so with the mean over the whole batch.

Its constants are powers of two: whether XLA rounds `a * b + c` once or twice is then the same.
"""

import re
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist import global_view
from jax_dist.testing import simulated_devices

DEVICES, ROWS, TIMES = 8, 16, 5
SIZES = {"a": (256, 1024), "b": (1024, 1024), "c": (1024, 256)}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def loss_of(params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(jax.nn.relu(x @ params["a"]) @ params["b"])
    return jnp.mean((hidden @ params["c"] - y) ** 2)


def updated(state: dict, gradient: dict) -> dict:
    moment = jax.tree.map(lambda m, g: 0.5 * m + g, state["moment"], gradient)
    params = jax.tree.map(lambda p, m: p - 0.0625 * m, state["params"], moment)
    return {"params": params, "moment": moment}


def step(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
    loss, gradient = jax.value_and_grad(loss_of)(state["params"], x, y)
    return updated(state, lax.pmean(gradient, "i")), lax.pmean(loss, "i")


def by_hand(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    loss, gradient = jax.value_and_grad(loss_of)(state["params"], x, y)
    return updated(state, gradient), loss


def initial() -> dict:
    random = np.random.default_rng(0)
    params = {
        name: (random.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)
        for name, shape in SIZES.items()
    }
    return {"params": params, "moment": jax.tree.map(np.zeros_like, params)}


def sent(text: str) -> dict[str, int]:
    """The bytes that each kind of collective gives, in a compiled program."""
    found = {}
    for kind in KINDS:
        types = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
        shapes = [shape for part in types for shape in re.findall(r"f32\[([\d,]*)\]", part)]
        total = sum(4 * int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes)
        if total:
            found[kind] = total
    return found


def measured(program: Any, state: Any, batch: tuple) -> tuple[Any, float]:
    """The state after so many steps, and the time of the fastest."""
    fastest = float("inf")
    for _ in range(TIMES):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(program(state, *batch))
        fastest = min(fastest, time.perf_counter() - start)
    return state, fastest


def ways(mesh: Mesh, batch: tuple) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """For each way, the compiled step and a state for it."""
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("i"))

    def pmapped() -> tuple[Any, Any]:
        state = jax.tree.map(lambda leaf: np.stack([leaf] * DEVICES), initial())
        state = jax.device_put(state, cut)
        return jax.pmap(step, "i", donate_argnums=0).lower(state, *batch).compile(), state

    def sharded() -> tuple[Any, Any]:
        def body(state: dict, x: jax.Array, y: jax.Array) -> tuple[dict, jax.Array]:
            return step(state, x[0], y[0])

        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(P(), P("i"), P("i")), out_specs=P(), check_vma=False
        )
        state = jax.device_put(initial(), whole)
        return jax.jit(mapped, donate_argnums=0).lower(state, *batch).compile(), state

    def viewed(**options: Any) -> Callable[[], tuple[Any, Any]]:
        def make() -> tuple[Any, Any]:
            view = global_view(step, "i", mesh=mesh, donate_argnums=0, out_axes=None, **options)
            state = view.place(initial(), *batch, stacked=False)
            return view.lower(state, *batch).compile(), state

        return make

    def written() -> tuple[Any, Any]:
        # The dimensions that "fsdp" chooses: the longest.
        one = {"a": P(None, "i"), "b": P("i"), "c": P("i")}
        own = {name: NamedSharding(mesh, spec) for name, spec in one.items()}
        shardings = {"params": own, "moment": own}
        state = jax.device_put(initial(), shardings)
        jitted = jax.jit(by_hand, donate_argnums=0, out_shardings=(shardings, whole))
        return jitted.lower(state, *batch).compile(), state

    return {
        "pmap": pmapped,
        "shard_map": sharded,
        "global view": viewed(),
        "global view, fsdp, reduce": viewed(shardings="fsdp", gradients="reduce"),
        "global view, fsdp": viewed(shardings="fsdp"),
        "fsdp by hand": written,
    }


def main() -> None:
    simulated_devices(DEVICES)
    mesh = Mesh(np.array(jax.devices()), ("i",))
    random = np.random.default_rng(1)
    batch = tuple(
        jax.device_put(
            random.normal(size=(DEVICES, ROWS, 256)).astype(np.float32),
            NamedSharding(mesh, P("i")),
        )
        for _ in range(2)
    )
    reference: dict[str, Any] = {}
    for name, make in ways(mesh, batch).items():
        program, state = make()
        held = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.device == jax.devices()[0]
        )
        memory, text = program.memory_analysis(), program.as_text()
        state, seconds = measured(program, state, batch)
        found = jax.tree.map(np.asarray, state)
        if name == "pmap":
            found = jax.tree.map(lambda leaf: leaf[0], found)
            reference = {
                "state": found,
                "seconds": seconds,
                "all": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
                "arguments": memory.argument_size_in_bytes,
            }
        apart = jax.tree.map(lambda a, b: np.abs(a - b).max(), found, reference["state"])
        total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        print(
            f"{name:26} difference {max(jax.tree.leaves(apart)):.0e}  "
            f"state held {held:>10,}  "
            f"arguments {memory.argument_size_in_bytes / reference['arguments']:.3f}  "
            f"args + temp {total / reference['all']:.2f}  "
            f"time {seconds / reference['seconds']:.2f}  {sent(text)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
