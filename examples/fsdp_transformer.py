"""A character-level transformer, written for pmap, trained with its state sharded over the devices.

    python examples/fsdp_transformer.py --devices 8
    NPROC=16 python examples/fsdp_transformer.py --devices 8 --model_parallel 2
    jax-dist launch -n 2 --cpu-devices 4 -- python examples/fsdp_transformer.py

`train_step` is a step for `jax.pmap`: each device has all parameters, takes its part of the batch,
and averages the gradients. It is trained twice, from the same parameters on the same text: under
`jax_dist.pmap`, and unchanged under `jax_dist.global_view(..., shardings="fsdp")`, where a device
keeps one part of the parameters and of Adam's two moments. The losses are the same; the picture has
them, and the memory of one device. With `--model_parallel M`, M devices share their rows, and each
computes a part of every layer; the step is unchanged again.

The text is that of the documentation. Shapes: `D` devices, `b` rows on each, `T` characters a row,
`V` different characters, `H` the width.
"""

import argparse
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

import jax_dist
from jax_dist import multihost
from jax_dist.testing import simulated_devices

ADAM = optax.adamw(1e-3)
HEADS = 8
TEXT = "\n".join(
    path.read_text(encoding="utf-8")
    for path in sorted((pathlib.Path(__file__).parents[1] / "docs").glob("*.md"))
)
LETTERS = sorted(set(TEXT))

State: TypeAlias = dict[str, Any]  # "params" and "adam"


class Size(NamedTuple):
    """A transformer's sizes."""

    layers: int
    width: int
    length: int  # T
    rows: int  # b


SIZES = {
    "10m": Size(layers=8, width=320, length=128, rows=2),
    "small": Size(layers=2, width=48, length=32, rows=2),
}


# ---- the program, as it was written for pmap


def train_step(state: State, rows: jax.Array) -> tuple[State, jax.Array]:
    """Update on one device, from its rows `[b, T + 1]`; also return the mean loss, `[]`."""
    loss, gradient = jax.value_and_grad(loss_of)(state["params"], rows)
    gradient = lax.pmean(gradient, "batch")
    update, adam = ADAM.update(gradient, state["adam"], state["params"])
    params = optax.apply_updates(state["params"], update)
    return {"params": params, "adam": adam}, lax.pmean(loss, "batch")


def loss_of(params: Any, rows: jax.Array) -> jax.Array:
    logits = forward(params, rows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def forward(params: Any, rows: jax.Array) -> jax.Array:
    """Return `[b, T] -> [b, T, V]`."""
    x = params["letters"][rows] + params["places"]
    x, _ = lax.scan(lambda x, layer: (_layer(layer, x), None), x, params["layers"])
    return _normalize(x, params["scale"]) @ params["letters"].T


def _layer(layer: Any, x: jax.Array) -> jax.Array:
    """Return `[b, T, H] -> [b, T, H]`."""
    per_head = (*x.shape[:-1], HEADS, x.shape[-1] // HEADS)
    read = _normalize(x, layer["scales"][0]) @ layer["read"]
    query, key, value = (part.reshape(per_head) for part in jnp.split(read, 3, axis=-1))
    seen = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + seen.reshape(x.shape) @ layer["write"]
    return x + jax.nn.gelu(_normalize(x, layer["scales"][1]) @ layer["up"]) @ layer["down"]


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def first_state(size: Size, seed: int) -> State:
    """Return the state without a device axis, on the host."""
    random, width, layers = np.random.default_rng(seed), size.width, size.layers

    def draw(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) / math.sqrt(shape[-2])).astype(np.float32)

    params = {
        "letters": draw(len(LETTERS), width),
        "places": draw(size.length, width),
        "scale": np.ones(width, np.float32),
        "layers": {
            "scales": np.ones((layers, 2, width), np.float32),
            "read": draw(layers, width, 3 * width),
            "write": draw(layers, width, width),
            "up": draw(layers, width, 4 * width),
            "down": draw(layers, 4 * width, width),
        },
    }
    adam = jax.tree.map(np.asarray, jax.jit(ADAM.init)(params))
    return {"params": params, "adam": adam}


def batches(size: Size, seed: int, steps: int) -> Iterator[np.ndarray]:
    """Yield the rows of this process, `[its devices, b, T + 1]`; those of all differ."""
    numbers = {letter: number for number, letter in enumerate(LETTERS)}
    text = np.array([numbers[letter] for letter in TEXT], np.int32)
    random = np.random.default_rng(seed)
    here = [device.process_index == jax.process_index() for device in jax.devices()]
    for _ in range(steps):
        starts = random.integers(len(text) - size.length - 1, size=(len(here), size.rows, 1))
        yield text[starts[np.array(here)] + np.arange(size.length + 1)]


# ---- training it, both ways


class Run(NamedTuple):
    """Measurements of one way of training."""

    losses: list[float]
    kept: int  # bytes of the state on one device, between two steps: of the arrays that live
    peak: int  # bytes on one device while the step runs: arguments and temporary ones, by XLA
    seconds: float  # of a step, the median


def train_with_pmap(size: Size, seed: int, steps: int) -> Run:
    step = jax_dist.pmap(train_step, axis_name="batch", donate_argnums=0)
    state = jax_dist.device_put_replicated(first_state(size, seed), jax.local_devices())
    return _measure(step, state, batches(size, seed, steps))


def train_sharded(size: Size, seed: int, steps: int, model_parallel: int = 1) -> Run:
    step = jax_dist.global_view(
        train_step,
        "batch",
        mesh=Mesh(np.array(jax.devices()).reshape(-1, model_parallel), ("batch", "model")),
        shardings="fsdp" if model_parallel == 1 else over_both,
        donate_argnums=0,
        out_axes=(0, None),
    )
    grouped = lambda rows: rows.reshape(-1, model_parallel * size.rows, rows.shape[-1])
    rows = (step.place_batch(grouped(batch)) for batch in batches(size, seed, steps))
    return _measure(step, step.place(first_state(size, seed), stacked=False), rows)


def over_both(path: str, leaf: jax.ShapeDtypeStruct) -> P:
    """Shard over "model" the columns of the first of two matrices, and the rows of the second."""
    match path.rsplit("/", maxsplit=1)[-1]:
        case "read" | "up":
            return P(None, "batch", "model")
        case "write" | "down":
            return P(None, "model", "batch")
    return P()


def _measure(step: Any, state: State, rows: Iterator[Any]) -> Run:
    losses, seconds, peak = [], [], 0
    for batch in rows:
        if not peak:
            memory = step.lower(state, batch).compile().memory_analysis()
            peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        start = time.perf_counter()
        state, loss = step(state, batch)
        losses.append(float(np.ravel(loss.addressable_data(0))[0]))
        seconds.append(time.perf_counter() - start)
    return Run(losses, bytes_on_one_device(state), peak, float(np.median(seconds)))


def bytes_on_one_device(state: State) -> int:
    """Return the bytes of the arrays themselves, not by their shardings."""
    first = jax.local_devices()[0]
    shards = [shard for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == first)


# ---- what is shown


def picture(runs: dict[str, Run], folder: pathlib.Path) -> pathlib.Path:
    """Draw the losses over each other, and bars for the memory."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.set(xlabel="step", ylabel="loss per character")
    right.set(ylabel="MB on one device")
    for number, (name, run) in enumerate(runs.items()):
        left.plot(run.losses, ("-", "--")[number], label=name, linewidth=2)
        heights = np.array([run.kept, run.peak]) / 1e6
        bars = right.bar(np.arange(2) + 0.4 * number, heights, 0.38, label=name)
        right.bar_label(bars, fmt="%.1f")
    right.set_xticks(np.arange(2) + 0.2, ["state, kept", "peak in a step"])
    left.legend()
    right.legend()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fsdp_transformer.png"
    figure.savefig(path, dpi=120)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="Train a transformer under pmap, and with its state sharded.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", type=int, default=0, help="simulated; 0: what is there")
    add("--size", choices=SIZES, default="10m", help="parameters: 10m, or 60,000")
    add("--steps", type=int, default=20, help="updates of the parameters")
    add("--seed", type=int, default=0, help="of parameters and drawn rows")
    add("--model_parallel", type=int, default=1, help="devices that share a layer; divides them")
    add("--out", type=pathlib.Path, default="runs/fsdp_transformer", help="of the picture")
    flags = parser.parse_args()
    if flags.devices:
        simulated_devices(flags.devices)
    multihost.initialize()
    size = SIZES[flags.size]
    options = size, flags.seed, flags.steps
    runs = {
        "pmap": train_with_pmap(*options),
        "global view": train_sharded(*options, flags.model_parallel),
    }
    if jax.process_index():
        return
    count = sum(leaf.size for leaf in jax.tree.leaves(first_state(size, 0)["params"]))
    where = f"{jax.device_count()} devices of {jax.process_count()} processes"
    print(f"{count:,} parameters on {where}")
    for name, run in runs.items():
        print(
            f"{name:<12} loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}, "
            f"state {run.kept / 1e6:.2f} MB, peak {run.peak / 1e6:.2f} MB on one device, "
            f"{run.seconds:.2f} s a step"
        )
    apart = np.abs(np.subtract(*(run.losses for run in runs.values()))).max()
    print(f"losses       at most {apart:.1e} apart")
    print(f"picture      {picture(runs, flags.out)}")


if __name__ == "__main__":
    main()
