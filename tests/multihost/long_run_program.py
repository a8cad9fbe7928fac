"""A job that is killed again and again, and goes on from its newest checkpoint.

python long_run_program.py FOLDER STEPS EVERY
"""

import pathlib
import sys

import jax
import numpy as np
from jax import lax

import jax_dist
from jax_dist import multihost


def update(mean: jax.Array, key: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`[5] -> [5], []`: each device's own noise, and what all of it adds up to."""
    noise = jax.random.normal(jax.random.fold_in(key, lax.axis_index("i")), mean.shape)
    moved = 0.99 * mean + scale * lax.pmean(noise, "i")
    return moved, lax.psum(moved.sum(), "i")


def run(folder: pathlib.Path, steps: int, every: int) -> tuple[int, np.ndarray]:
    """Where it started, and what came out of it, `[5]`."""
    step = jax_dist.pmap(
        update, axis_name="i", in_axes=(None, None, 0), out_axes=None, arrays="global"
    )
    scale = np.full(jax.local_device_count(), 0.1, np.float32)
    key = jax.random.key(0)
    mean = jax_dist.replicate(np.zeros(5, np.float32), jax.devices())
    with multihost.Checkpoints(folder / "checkpoints", every=every) as checkpoints:
        mean, start = checkpoints.restore(mean)
        for number in range(start + 1, steps + 1):
            mean, _ = step(mean, jax.random.fold_in(key, number), scale)
            checkpoints.save(number, mean)
    return start, np.asarray(mean)


def main() -> None:
    multihost.initialize()
    folder = pathlib.Path(sys.argv[1])
    start, mean = run(folder, *map(int, sys.argv[2:]))
    if jax.process_index() == 0:
        np.save(folder / "result.npy", mean)
    sys.stdout.write(f"rank {jax.process_index()} went from step {start} to the end\n")


if __name__ == "__main__":
    main()
