"""Trains with one of the demo's programs, and writes what it measures as lines of JSON.

    python examples/demo_worker.py es_after --generations 30 --devices 8

The program is a module with `train` and `example_update`; a path will do, too.
"""

import importlib.util
import json
import pathlib
import resource
import signal
import statistics
import sys
import time
import warnings
from types import ModuleType
from typing import Any

import es_common
import jax
import numpy as np
from absl import app, flags, logging

import jax_dist

_EXPLAIN = flags.DEFINE_bool("explain", default=False, help="Only say what rewrite would do.")
_CACHE_FOLDER = flags.DEFINE_string(
    "cache_folder",
    str(pathlib.Path.home() / ".cache/jax_dist"),
    "Where compiled programs are kept.",
)
_IN_TURNS = flags.DEFINE_bool(
    "in_turns", default=False, help="Say when ready for each step, and wait for a line."
)
_FACTS = flags.DEFINE_bool("facts", default=True, help="Also lower and compile it to look inside.")


def load(program: str) -> ModuleType:
    path = pathlib.Path(program)
    if not path.suffix:
        path = pathlib.Path(__file__).with_name(f"{program}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def wait_for_turn() -> None:
    """Other programs run meanwhile, and would make the next step slower."""
    if _IN_TURNS.value:
        say("ready")
        sys.stdin.readline()


class Compiles:
    """What JAX says of its compiling, from now on.

    Attributes:
      seconds: spent with tracing, lowering and compiling, for all functions together.
      updates: how many programs were compiled for a function `update`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.updates = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, seconds: float, **details: Any) -> None:
        if not event.startswith("/jax/core/compile/"):
            return
        self.seconds += seconds
        is_program = event.endswith("backend_compile_duration")
        self.updates += is_program and "update" in str(details.get("fun_name"))


def train(program: ModuleType, generations: int, n_devices: int, seed: int) -> None:
    wait_for_turn()
    compiles, start, steps = Compiles(), time.perf_counter(), []
    start_cpu = time.process_time()

    def follow(generation: int, mean_return: float) -> None:
        nonlocal start
        steps.append(time.perf_counter() - start)
        say("generation", number=generation + 1, seconds=sum(steps), mean_return=mean_return)
        wait_for_turn()
        start = time.perf_counter()

    theta = program.train(seed, n_devices, generations, follow, es_common.Checkpoints())
    say(
        "trained",
        seconds=sum(steps),
        cpu=time.process_time() - start_cpu,  # seconds
        first_step=steps[0],
        second_step=steps[:2][-1],
        step=statistics.median(steps[2:] or steps[-1:]),
        compile=compiles.seconds,
        programs=compiles.updates,
        peak_memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # as Linux has it
        theta=np.asarray(theta, float).tolist(),
    )


def facts(program: ModuleType, n_devices: int, seed: int) -> None:
    """Looks into the program; what was compiled before is in the cache."""
    wait_for_turn()
    update, args = program.example_update(seed, n_devices)
    lowered = update.lower(*args)
    exchanged = es_common.exchanged(lowered.compile().as_text())
    sent = es_common.sent(exchanged, n_devices)
    say("facts", program_size=len(lowered.as_text()), exchanged=exchanged, sent=sent)


def explain(program: ModuleType, n_devices: int, seed: int) -> None:
    update, args = program.example_update(seed, n_devices)
    report = jax_dist.explain(update, *args)
    say("explained", text=str(report), report=report.to_dict())


def main(argv: list[str]) -> None:
    warnings.simplefilter("ignore")  # lint and explain have told of the captured table
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a traceback would spoil the terminal
    jax.config.update("jax_num_cpu_devices", es_common.DEVICES.value)
    logging.set_verbosity(logging.WARNING)
    jax_dist.cache.enable(_CACHE_FOLDER.value)
    program = load(argv[1])
    n_devices, seed = es_common.DEVICES.value, es_common.SEED.value
    if _EXPLAIN.value:
        explain(program, n_devices, seed)
        return
    train(program, es_common.GENERATIONS.value, n_devices, seed)
    if _FACTS.value:
        facts(program, n_devices, seed)


if __name__ == "__main__":
    es_common.declare("demo", generations=30)
    try:
        app.run(main)
    except BrokenPipeError:  # whoever asked is gone
        sys.exit(1)
