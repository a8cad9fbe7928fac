"""The quickstart in several processes, which may be told to leave in the middle.

    jax-dist launch -n 2 --cpu-devices 4 -- python examples/es_multiprocess.py
    python examples/es_multiprocess.py --devices 8      # the same curve, in one process

Each process plays the pairs of its own devices. All that goes between processes is the 256 scores
of a generation, 4 bytes each: every device makes the same update for itself. SIGTERM, which a
cluster sends before it takes a machine away, ends the job after the generation that all processes
are at; started again, it goes on from there, and ends with the same curve.
"""

import es_common
import es_quickstart as es
import jax
from absl import flags
from es_common import FLAGS

from jax_dist import multihost

flags.DEFINE_integer("keep", 2, "Checkpoints to keep, the newest ones.", lower_bound=1)
flags.DEFINE_bool("bytes", default=False, help="Also print what is sent; compiles once more.")


def bytes_exchanged() -> dict[str, int]:
    """Return the bytes of the results of one generation's collectives, on one device."""
    devices = jax.devices()
    theta, adam, pairs = es.first_arguments(0, 128, devices)
    lowered = es.make_generation(devices).lower(theta, adam, jax.random.key(0), pairs)
    return es_common.exchanged(lowered.compile().as_text())


def main() -> None:
    out = es_common.prepare(simulate=FLAGS["devices"].present)  # else the launcher says how many
    multihost.initialize()
    result = es.train(
        FLAGS.seed,
        jax.devices(),
        FLAGS.generations,
        pairs=FLAGS.pairs,
        out=out,
        save_every=FLAGS.save_every,
        keep=FLAGS.keep,
        leave=multihost.preempted,
    )
    exchanged = bytes_exchanged() if FLAGS.bytes else {}
    if jax.process_index() == 0:
        es.report(result, out, f"{jax.process_count()} x {jax.local_device_count()} devices")
        for kind, size in exchanged.items():
            print(f"{kind:<13} {size} bytes in a generation")


if __name__ == "__main__":
    es_common.run(main, "es_multiprocess", generations=60, save_every=5)
