"""Two programs on one folder of checkpoints, drawn at random, and killed at random moments.

One of them saves each step. The other one reads on another number of devices, or would save, too.
"""

import itertools
import multiprocessing
import os
import pathlib
import random
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_dist.errors import CheckpointInUseError
from jax_dist.multihost import Checkpoints

_SIZE = 24 * 5000  # floats; cut over 1, 2, 3 or 4 devices


class Found(NamedTuple):
    """What a number of rounds have come to."""

    saves: int
    reads: int
    in_use: int  # times that a second job was told so
    kills: int
    wrong: list[str]


def _state(step: int, devices: int) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:devices]), "i")
    cut = NamedSharding(mesh, P("i"))
    here = {"host": np.full(3000, float(step)), "step": step}
    return here | {"cut": jax.device_put(np.full(_SIZE, step, np.float32), cut)}


def _values(state: dict[str, Any]) -> set[float]:
    return {float(each) for leaf in state.values() for each in np.unique(np.asarray(leaf))}


def _train(folder: pathlib.Path, devices: int, keep: int, tell: Connection) -> None:
    wait = devices != 2  # some save in the background, and know of the step before
    with Checkpoints(folder, every=1, keep=keep) as checkpoints:
        state, start = checkpoints.restore(_state(0, devices))
        tell.send(("from", start, _values(state)))
        for step in itertools.count(start + 1):
            checkpoints.save(step, _state(step, devices), wait=wait)
            if wait or step - 1 > start:
                tell.send(("saved", step if wait else step - 1, set()))


def _read(folder: pathlib.Path, devices: int, keep: int, tell: Connection) -> None:
    del keep
    while True:
        with Checkpoints(folder) as checkpoints:
            state, step = checkpoints.restore(_state(0, devices))
        tell.send(("read", step, _values(state)))


def _run(does: Callable, folder: pathlib.Path, devices: int, keep: int, tell: Connection) -> None:
    warnings.simplefilter("error", UserWarning)
    try:
        does(folder, devices, keep, tell)
    except CheckpointInUseError as error:
        tell.send(("in use", str(error), set()))
    except Exception as error:  # noqa: BLE001  # the driver says it
        tell.send(("raised", f"{type(error).__name__}: {error}", set()))


class _Program:
    """A process that tells what it does."""

    # Forked from a process that has imported all of it, and started nothing.
    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["orbax.checkpoint", "jax_dist.multihost", __name__])

    def __init__(self, does: Callable, folder: pathlib.Path, devices: int, keep: int):
        self._hears, tell = self._context.Pipe(duplex=False)
        self._process = self._context.Process(target=_run, args=(does, folder, devices, keep, tell))
        self._process.start()
        tell.close()
        self.pid = self._process.pid
        self.said: list[tuple[str, Any, set[float]]] = []

    def hear(self, *, wait: float = 0.0) -> bool:
        """Whether it has said one thing more."""
        try:
            if self._hears.poll(wait):
                self.said.append(self._hears.recv())
                return True
        except (EOFError, ConnectionError):
            pass
        return False

    def kill(self) -> None:
        """And hears what it has said before."""
        self._process.kill()
        self._process.join()
        while self.hear():
            pass
        self._hears.close()
        self._process.close()


def play(folder: pathlib.Path, *, rounds: int, seed: int) -> Found:
    """Each round goes on from where the one before was killed."""
    chance, saved, found = random.Random(seed), 0, Found(0, 0, 0, 0, [])
    for number in range(rounds):
        keep = chance.choice([1, 1, 2, 3])
        trainer = _Program(_train, folder, chance.choice([1, 2, 4]), keep)
        trainer.hear(wait=60)
        does = chance.choice([_read, _read, _train])
        other = _Program(does, folder, chance.choice([1, 2, 3, 4]), keep)
        least, heard = chance.randrange(1, 6), chance.random() < 0.8
        while trainer.hear(wait=60) and (
            len(trainer.said) < least or (heard and not (other.hear() or other.said))
        ):
            pass
        time.sleep(chance.uniform(0, 0.1))
        victims = [trainer, other]
        chance.shuffle(victims)
        victims[0].kill()
        time.sleep(chance.choice([0, 0.1, 0.3]))  # the other one is alone
        victims[1].kill()
        wrong = _wrong_of_trainer(trainer, saved) + _wrong_of_other(other, trainer, does, saved)
        told = trainer.said + other.said
        saved = max([saved, *(each[1] for each in told if each[0] in ("from", "saved"))])
        found = Found(
            found.saves + sum(each[0] == "saved" for each in told),
            found.reads + sum(each[0] == "read" for each in other.said),
            found.in_use + sum(each[0] == "in use" for each in other.said),
            found.kills + 2,
            found.wrong + [f"round {number}: {each}" for each in wrong],
        )
    return found


def _wrong_of_trainer(trainer: _Program, saved: int) -> list[str]:
    if not trainer.said or trainer.said[0][0] != "from":
        return [f"the trainer said {trainer.said[:1]}"]
    (_, start, values), *rest = trainer.said
    wrong = [] if values == {start} else [f"step {start} has the values {values}"]
    if start - saved not in (0, 1, 2):
        wrong.append(f"it began from step {start}, and {saved} was saved")
    if [each[:2] for each in rest] != [("saved", start + 1 + n) for n in range(len(rest))]:
        wrong.append(f"then it said {rest[-1]}")
    return wrong


def _wrong_of_other(other: _Program, trainer: _Program, does: Callable, saved: int) -> list[str]:
    said = other.said
    steps = [saved, *(each[1] for each in said if each[0] == "read")]
    wrong = [f"read {each}" for each in said if each[0] == "read" and each[2] != {each[1]}]
    if steps != sorted(steps):
        wrong.append(f"read steps {steps}")
    wrong += [f"said {each}" for each in said if each[0] == "from" and each[2] != {each[1]}]
    if does is _train:  # it may come when the first one has just been killed
        owner = f"process {trainer.pid} on {os.uname().nodename}, since "
        wrong += [f"said {each}" for each in said if each[0] == "in use" and owner not in each[1]]
    allowed = ("read",) if does is _read else ("in use", "from", "saved")
    return wrong + [f"said {each}" for each in said if each[0] not in allowed]
