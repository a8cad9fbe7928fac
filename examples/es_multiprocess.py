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

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import es_common
import es_quickstart as es
import jax
import numpy as np
from absl import app, flags, logging

import jax_dist
from jax_dist import multihost

_KEEP = flags.DEFINE_integer("keep", 2, "Checkpoints to keep, the newest ones.", lower_bound=1)
_BYTES = flags.DEFINE_bool(
    "bytes", default=False, help="Also tell what goes between devices; compiles once more."
)

PAIRS = 128
State: TypeAlias = tuple[jax.Array, Any]  # theta, [N], and Adam's state, on all devices


@dataclasses.dataclass(frozen=True)
class Outcome:
    curve: es_common.Curve  # of this start and those before; empty but in rank 0
    done: int  # generations
    policy: float  # mean return of the last theta over 100 episodes
    preempted: bool


def make_generation() -> Callable[..., es.Generation]:
    """`es.generation` on all devices of all processes; `pairs` are those of this process."""
    return jax_dist.pmap(
        es.generation,
        axis_name="devices",
        in_axes=(None, None, None, 0),  # theta, Adam's state and the key are the same everywhere
        out_axes=None,
        arrays="global",  # the state stays where it is from one generation to the next
    )


def first_state(seed: int) -> State:
    """The same in every process, so each can put it on its own devices."""
    theta_key = jax.random.split(jax.random.key(seed), 4)[0]
    theta = 0.1 * jax.random.normal(theta_key, (es.PARAMETERS,))
    state = jax.tree.map(np.asarray, (theta, es.ADAM.init(theta)))
    return jax_dist.replicate(state, jax.devices())


def pairs_of_this_process() -> np.ndarray:
    """`[L, P / D]`"""
    chex.assert_is_divisible(PAIRS, jax.device_count())
    rows = np.arange(PAIRS).reshape(jax.device_count(), -1)  # [D, P / D]
    here = [device.process_index == jax.process_index() for device in jax.devices()]
    return rows[np.array(here)]


def train(seed: int, generations: int, out: pathlib.Path, save_every: int, keep: int) -> Outcome:
    """Ends when theta is seen to balance, or when the job is told to leave."""
    _, key, policy_key, _ = jax.random.split(jax.random.key(seed), 4)
    run_generation, pairs = make_generation(), pairs_of_this_process()
    is_first = jax.process_index() == 0
    every = save_every or generations + 1  # never, unless told to leave
    with es_common.checkpoints(out / "checkpoints", every, keep) as saved:
        (theta, adam), done = saved.restore(first_state(seed))
        curve = es_common.Curve(out / "curve.csv" if is_first else None, done)
        policy, preempted = 0.0, False
        for number in (progress := es_common.progress(done, generations)):
            theta, adam, fitness = run_generation(
                theta, adam, jax.random.fold_in(key, number), pairs
            )
            on_host = np.asarray(theta)  # [N]; as it is, all devices would evaluate it
            policy = float(es.mean_return(on_host, jax.random.fold_in(policy_key, number)))
            curve.add(best=fitness.max(), mean=fitness.mean(), policy=policy)
            progress.set_postfix(mean_return=f"{policy:.1f}")
            done = number + 1
            preempted = multihost.preempted(done)
            saved.save(done, (theta, adam), force=preempted)
            if preempted or policy >= es.SOLVED:
                break
    return Outcome(curve, done, policy, preempted)


def bytes_exchanged() -> dict[str, int]:
    """What the collectives of one generation give to one device, by the compiled program."""
    theta, adam = first_state(0)
    lowered = make_generation().lower(theta, adam, jax.random.key(0), pairs_of_this_process())
    return es_common.exchanged(lowered.compile().as_text())


def report(outcome: Outcome, out: pathlib.Path) -> None:
    curve, where = outcome.curve, f"{jax.process_count()} x {jax.local_device_count()} devices"
    es_common.draw_curves(
        out / "learning_curve.png",
        {
            "best of the population": curve["best"],
            "mean of the population": curve["mean"],
            "theta, mean of 100 episodes": curve["policy"],
        },
        title=f"OpenAI ES on CartPole-v1, {where}",
        ylabel="return (steps survived)",
        goal=es.SOLVED,
        goal_label="solved: 475",
    )
    if outcome.preempted:
        print(f"told to leave after generation {outcome.done}; start it again to go on")
    else:
        print(f"{'solved' if outcome.policy >= es.SOLVED else 'not solved'} on {where}")
    print(f"generations   {outcome.done}")
    print(f"mean return   {outcome.policy:.1f} over {es.EPISODES} episodes")
    print(f"picture       {out / 'learning_curve.png'}")


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"Too many arguments: {' '.join(argv[1:])}")
    logging.set_verbosity(logging.WARNING)  # jax tells which backends it does not find
    if es_common.DEVICES.present:  # else the launcher says how many a process has
        jax.config.update("jax_num_cpu_devices", es_common.DEVICES.value)
    multihost.initialize()
    if es_common.CACHE.value:
        jax_dist.cache.enable()
    out = pathlib.Path(es_common.OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    outcome = train(
        es_common.SEED.value,
        es_common.GENERATIONS.value,
        out,
        es_common.SAVE_EVERY.value,
        _KEEP.value,
    )
    exchanged = bytes_exchanged() if _BYTES.value else {}
    if jax.process_index() == 0:
        report(outcome, out)
        for kind, size in exchanged.items():
            print(f"{kind:<13} {size} bytes in a generation")


if __name__ == "__main__":
    es_common.declare("es_multiprocess", generations=60)
    flags.set_default(es_common.SAVE_EVERY, 5)
    app.run(main)
