"""A loop of steps that goes on from its newest checkpoint:  steps_program.py FOLDER STEPS EVERY

At its end, the start that got there makes all steps once more, without a break, to compare with.
The state depends on each step, on the noise of each device, and on the order of all sums.
"""

import os
import pathlib
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import lax

import jax_dist
from jax_dist import multihost


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def update(mean: jax.Array, key: jax.Array, scale: jax.Array) -> jax.Array:
    """`[5] -> [5]`."""
    noise = jax.random.normal(jax.random.fold_in(key, lax.axis_index("i")), mean.shape)
    return 0.99 * mean + scale * lax.pmean(noise * (1 + mean**2), "i")


def main() -> None:
    say(f"pid {os.getpid()}")
    folder, steps, every = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    multihost.initialize()
    step = jax_dist.pmap(
        update, axis_name="i", in_axes=(None, None, 0), out_axes=None, arrays="global"
    )
    scale = np.full(jax.local_device_count(), 0.1, np.float32)
    key = jax.random.key(0)
    first = jax_dist.replicate(np.zeros(5, np.float32), jax.devices())
    options = ocp.CheckpointManagerOptions(max_to_keep=1, cleanup_tmp_directories=True)
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        state, start = {"mean": first}, manager.latest_step() or 0
        if start:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))
        mean = state["mean"]
        say(f"from {start}")
        for number in range(start + 1, steps + 1):
            mean = step(mean, jax.random.fold_in(key, number), scale).block_until_ready()
            if multihost.preempted(number) or number % every == 0:
                manager.save(number, args=ocp.args.StandardSave({"mean": mean}), force=True)
            say(f"step {number}")
            time.sleep(0.005)
    undisturbed = first
    for number in range(1, steps + 1):
        undisturbed = step(undisturbed, jax.random.fold_in(key, number), scale).block_until_ready()
    if jax.process_index() == 0:
        np.save(folder / "result.npy", np.stack([undisturbed, mean]))


if __name__ == "__main__":
    main()
