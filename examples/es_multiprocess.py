"""The quickstart in several processes, which may be told to leave in the middle.

    jax-dist launch -n 2 --cpu-devices 4 -- python examples/es_multiprocess.py
    python examples/es_multiprocess.py --devices 8      # the same curve, in one process

Each process plays the pairs of its own devices. All that goes between processes is the 256 scores
of a generation, 4 bytes each: every device makes the same update for itself. SIGTERM, which a
cluster sends before it takes a machine away, ends the job after the generation that all processes
are at; started again, it goes on from there, and ends with the same curve.

Shapes: `N` parameters, `P` mirrored pairs (the population is twice that), `D` devices, `L` of them
in this process.
"""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import chex
import es_common
import es_quickstart as es
import jax
import numpy as np
from absl import flags
from es_common import FLAGS

import jax_dist
from jax_dist import multihost

flags.DEFINE_integer("keep", 2, "Checkpoints to keep, the newest ones.", lower_bound=1)
flags.DEFINE_bool("bytes", default=False, help="Also print what is sent; compiles once more.")

PAIRS = 128
State: TypeAlias = tuple[jax.Array, Any]  # theta, [N], and Adam's state, on all devices


class Outcome(NamedTuple):
    """The end of a training, in one process."""

    curve: es_common.Curve  # of this start and those before; of the earlier ones in rank 0 alone
    done: int  # generations
    policy: float  # mean return of the last theta over 100 episodes
    preempted: bool


def make_generation() -> Callable[..., es.Generation]:
    """Return `es.generation` on all devices; `pairs` are those of this process."""
    return jax_dist.pmap(
        es.generation,
        axis_name="devices",
        in_axes=(None, None, None, 0),  # theta, Adam's state and the key are the same everywhere
        out_axes=None,
        arrays="global",  # the state stays where it is from one generation to the next
    )


def first_state(seed: int) -> State:
    """Return the state, the same in every process, so each can put it on its devices."""
    theta_key = jax.random.split(jax.random.key(seed), 4)[0]
    theta = 0.1 * jax.random.normal(theta_key, (es.PARAMETERS,))
    state = jax.tree.map(np.asarray, (theta, es.ADAM.init(theta)))
    return jax_dist.replicate(state, jax.devices())


def pairs_of_this_process() -> np.ndarray:
    """Return `[L, P / D]`."""
    chex.assert_is_divisible(PAIRS, jax.device_count())
    rows = np.arange(PAIRS).reshape(jax.device_count(), -1)  # [D, P / D]
    here = [device.process_index == jax.process_index() for device in jax.devices()]
    return rows[np.array(here)]


def train(seed: int, generations: int, out: pathlib.Path, save_every: int, keep: int) -> Outcome:
    """Train until theta balances, or until the job is told to leave."""
    _, key, policy_key, _ = jax.random.split(jax.random.key(seed), 4)
    run_generation, pairs = make_generation(), pairs_of_this_process()
    every = save_every or generations + 1  # never, unless told to leave
    with es_common.checkpoints(out, every, keep) as saved:
        (theta, adam), done = saved.restore(first_state(seed))
        curve = es_common.Curve(None if jax.process_index() else out, generations, done)
        policy, preempted = 0.0, False
        for number in range(done, generations):
            generation_key = jax.random.fold_in(key, number)
            theta, adam, fitness = run_generation(theta, adam, generation_key, pairs)
            on_host = np.asarray(theta)  # [N]; as it is, all devices would evaluate it
            policy = float(es.mean_return(on_host, jax.random.fold_in(policy_key, number)))
            curve(number, best=fitness.max(), mean=fitness.mean(), policy=policy)
            done = number + 1
            preempted = multihost.preempted(done)
            saved.save(done, (theta, adam), force=preempted)
            if preempted or policy >= es.SOLVED:
                break
    return Outcome(curve, done, policy, preempted)


def bytes_exchanged() -> dict[str, int]:
    """Return the bytes of the results of one generation's collectives, on one device."""
    theta, adam = first_state(0)
    lowered = make_generation().lower(theta, adam, jax.random.key(0), pairs_of_this_process())
    return es_common.exchanged(lowered.compile().as_text())


def report(outcome: Outcome, out: pathlib.Path) -> None:
    """Draw the curves and print how it ended."""
    curve, where = outcome.curve, f"{jax.process_count()} x {jax.local_device_count()} devices"
    lines = {
        "best of the population": curve["best"],
        "mean of the population": curve["mean"],
        f"theta, mean of {es.EPISODES} episodes": curve["policy"],
    }
    title = f"OpenAI ES on CartPole-v1, {where}"
    picture = es_common.draw_curves(out, lines, title, goal=es.SOLVED)
    if outcome.preempted:
        print(f"told to leave after generation {outcome.done}; start it again to go on")
    else:
        print(f"{'solved' if outcome.policy >= es.SOLVED else 'not solved'} on {where}")
    print(f"generations   {outcome.done}")
    print(f"mean return   {outcome.policy:.1f} over {es.EPISODES} episodes")
    print(f"picture       {picture}")


def main() -> None:
    out = es_common.prepare(simulate=FLAGS["devices"].present)  # else the launcher says how many
    multihost.initialize()
    outcome = train(FLAGS.seed, FLAGS.generations, out, FLAGS.save_every, FLAGS.keep)
    exchanged = bytes_exchanged() if FLAGS.bytes else {}
    if jax.process_index() == 0:
        report(outcome, out)
        for kind, size in exchanged.items():
            print(f"{kind:<13} {size} bytes in a generation")


if __name__ == "__main__":
    es_common.run(main, "es_multiprocess", generations=60, save_every=5)
