"""One of the demo's programs in a process of its own: train, measure, print JSON lines.

    python examples/demo_worker.py es_after.py --generations 30 --devices 8

The program is a file with `train` and `example_update`.
"""

import importlib.util
import json
import pathlib
import resource
import statistics
import time
import warnings
from types import ModuleType
from typing import Any

import es_common
import jax
import numpy as np
from absl import flags, logging
from es_common import FLAGS

import jax_dist

flags.DEFINE_string("cache_folder", None, "The compilation cache.", required=True)
flags.DEFINE_bool("explain", default=False, help="Print explain's report only.")
flags.DEFINE_bool("facts", default=True, help="Also measure the compiled program.")


def load(path: pathlib.Path) -> ModuleType:
    """Import a program from its path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def emit(event: str, **values: Any) -> None:
    """Print one JSON object on a line."""
    print(json.dumps({"event": event, **values}), flush=True)


class CompileListener:
    """Seconds that JAX spends on compilations, and programs compiled for an `update`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.updates = 0
        jax.monitoring.register_event_duration_secs_listener(self._add)

    def _add(self, event: str, seconds: float, **details: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            self.seconds += seconds
            is_program = event.endswith("backend_compile_duration")
            self.updates += is_program and "update" in str(details.get("fun_name"))


def train(program: ModuleType, generations: int, n_devices: int, seed: int) -> dict[str, Any]:
    """Train, emit each generation, and return the measurements."""
    compiles, steps, start = CompileListener(), [], time.perf_counter()

    def follow(generation: int, mean_return: float) -> None:
        nonlocal start
        steps.append(time.perf_counter() - start)
        emit("generation", number=generation + 1, seconds=sum(steps), mean_return=mean_return)
        start = time.perf_counter()

    theta = program.train(seed, n_devices, generations, follow, es_common.Checkpoints())
    return {
        "seconds": sum(steps),
        "first_step": steps[0],
        "second_step": steps[:2][-1],
        "step": statistics.median(steps[2:] or steps[-1:]),
        "compile": compiles.seconds,
        "programs": compiles.updates,
        "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # on Linux
        "theta": np.asarray(theta, float).tolist(),
    }


def measure_program(program: ModuleType, n_devices: int, seed: int) -> dict[str, Any]:
    """Return the size of the update's StableHLO and the bytes that a device sends per step."""
    update, args = program.example_update(seed, n_devices)
    lowered = update.lower(*args)
    exchanged = es_common.exchanged(lowered.compile().as_text())  # from the cache
    # Around a ring, the shards of an all-reduce go twice: to be added up, and as sums.
    rounds = exchanged.get("all-reduce", 0) + sum(exchanged.values())
    return {
        "program_size": len(lowered.as_text()),
        "exchanged": exchanged,
        "sent": rounds * (n_devices - 1) / n_devices,
    }


def main(path: str) -> None:
    warnings.simplefilter("ignore")  # lint and explain report the captured table
    jax.config.update("jax_num_cpu_devices", FLAGS.devices)
    logging.set_verbosity(logging.WARNING)
    jax_dist.cache.enable(FLAGS.cache_folder)
    program = load(pathlib.Path(path))
    if FLAGS.explain:
        update, args = program.example_update(FLAGS.seed, FLAGS.devices)
        report = jax_dist.explain(update, *args)
        emit("explained", text=str(report), report=report.to_dict())
        return
    trained = train(program, FLAGS.generations, FLAGS.devices, FLAGS.seed)
    facts = measure_program(program, FLAGS.devices, FLAGS.seed) if FLAGS.facts else {}
    emit("trained", **trained, **facts)


if __name__ == "__main__":
    es_common.run(main, "demo", generations=30)
