"""Shared parts of the ES programs: flags, ranks, noise, checkpoints, curve, picture.

A program ends with `es_common.run(main, program="es_quickstart", generations=60)`, and its `main`
takes a `Session`.
"""

import contextlib
import csv
import dataclasses
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import app, flags, logging

import jax_dist

DEVICES = flags.DEFINE_integer(
    "devices", 8, "Devices to use, at most; on a CPU, how many to simulate.", lower_bound=1
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of everything random: the same seed, the same curve.")
GENERATIONS = flags.DEFINE_integer("generations", 60, "Give up after so many.", lower_bound=1)
OUT = flags.DEFINE_string("out", "out", "Folder for all that the program leaves behind.")
SAVE_EVERY = flags.DEFINE_integer(
    "save_every",
    0,
    "Save a checkpoint in --out after so many generations, and go on from the newest one that is"
    " there; 0: neither.",
    lower_bound=0,
)
CACHE = flags.DEFINE_bool(
    "cache", default=True, help="Keep compiled programs on disk: the next start is faster."
)


@dataclasses.dataclass(frozen=True)
class Session:
    """Values of the flags, ready to use."""

    devices: Sequence[jax.Device]
    seed: int
    generations: int
    out: pathlib.Path  # exists
    save_every: int  # generations; 0: never

    @property
    def where(self) -> str:
        """Return a text such as "8 x cpu"."""
        return f"{len(self.devices)} x {self.devices[0].device_kind}"


def run(main: Callable[[Session], None], *, program: str, generations: int) -> None:
    """Parse the flags and run `main` with a `Session`.

    Args:
      main: the program.
      program: its name, also of its folder in `out/`.
      generations: the default of `--generations`.
    """
    declare(program, generations)

    def main_of_argv(argv: list[str]) -> None:
        if argv[1:]:
            raise app.UsageError(f"Too many arguments: {' '.join(argv[1:])}")
        main(session())

    app.run(main_of_argv)


def declare(program: str, generations: int) -> None:
    """Set the defaults of a program, and show the flags in its `--help`."""
    flags.set_default(OUT, f"out/{program}")
    flags.set_default(GENERATIONS, generations)
    for flag in flags.FLAGS.get_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)


def session() -> Session:
    """Return the session; on a CPU, simulate the devices, which must not be in use yet."""
    logging.set_verbosity(logging.WARNING)  # jax tells which backends it does not find
    jax.config.update("jax_num_cpu_devices", DEVICES.value)  # for the CPU only
    if CACHE.value:
        jax_dist.cache.enable()
    out = pathlib.Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    devices = jax.devices()[: DEVICES.value]
    return Session(devices, SEED.value, GENERATIONS.value, out, SAVE_EVERY.value)


def centred_ranks(fitness: jax.Array) -> jax.Array:
    """Return ranks `[p] -> [p]` from -0.5, the worst, to 0.5; ties share their average rank."""
    # To rank ties by their position would be to follow noise.
    ascending = jnp.sort(fitness)
    first = jnp.searchsorted(ascending, fitness, side="left")
    after_last = jnp.searchsorted(ascending, fitness, side="right")
    return (first + after_last - 1) / (2 * (fitness.size - 1)) - 0.5


def check_redrawable(key: jax.Array) -> None:
    """Raise ValueError for a key whose noise cannot be drawn twice. The key is not consumed.

    Raises:
      ValueError: the key is of another implementation than threefry2x32.
    """
    implementation = jax.random.key_impl(key)
    if implementation != "threefry2x32":
        raise ValueError(
            f"noise cannot be drawn twice from a {implementation!r} key, whose rows depend on the"
            ' batch they are drawn in; use jax.random.key(seed, impl="threefry2x32")'
        )


def keys_of(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return keys `[p]` for numbers `[p]`, the same on every device. `key` is not consumed."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)


_COLLECTIVES = re.compile(
    r" = (.+?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")


def exchanged(hlo: str) -> dict[str, int]:
    """Return bytes of the results of a program's collectives on a device: `{"all-gather": 1024}`.

    A collective in a loop counts once.
    """
    sizes: dict[str, int] = {}
    for types, kind in _COLLECTIVES.findall(hlo):
        for dtype, shape in _ARRAY.findall(types):
            bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
            size = math.prod(int(n) for n in shape.split(",") if n)
            sizes[kind] = sizes.get(kind, 0) + size * bits // 8
    return sizes


def sent(results: dict[str, int], n_devices: int) -> float:
    """Return the bytes that a device sends for collectives with these results, on a ring."""
    rounds = {"all-reduce": 2}  # shards go round twice: to be added up, and as sums
    share = (n_devices - 1) / n_devices
    return sum(rounds.get(kind, 1) * size * share for kind, size in results.items())


def progress(first: int, generations: int) -> tqdm.tqdm:
    """Return the numbers of the generations from `first` on, with a bar on the first process."""
    return tqdm.trange(
        first,
        generations,
        initial=first,
        total=generations,
        desc="generation",
        disable=jax.process_index() != 0,
    )


class Follow(Protocol):
    """A function called after each generation with its number and scores."""

    def __call__(self, generation: int, **values: float) -> None: ...


class Checkpoints:
    """Orbax checkpoints, by the number of generations that are done.

    Args:
      manager: of Orbax; without one, nothing is saved or restored.
      every: generations from one checkpoint to the next.
    """

    def __init__(self, manager: Any = None, every: int = 1) -> None:
        self._manager, self._every = manager, every

    def restore(self, state: Any) -> tuple[Any, int]:
        """Return the newest state, placed like `state`, and its number; else `state` and 0."""
        done = self._manager.latest_step() if self._manager else None
        if done is None:
            return state, 0
        # An array that JAX has put on the first device may move; Orbax would bind it to that one.
        like = jax.tree.map(lambda x: x if x.committed else np.asarray(x), state)
        return self._manager.restore(done, args=_orbax().args.StandardRestore(like)), done

    def save(self, done: int, state: Any, *, force: bool = False) -> None:
        """Copy the state and write it in the background, if it is due."""
        if self._manager and (force or done % self._every == 0):
            self._manager.save(done, args=_orbax().args.StandardSave(state), force=True)


@contextlib.contextmanager
def checkpoints(folder: pathlib.Path, every: int, keep: int = 2) -> Iterator[Checkpoints]:
    """Open the checkpoints in `folder`, of which the newest are kept; none if `every` is 0."""
    if not every:
        yield Checkpoints()
        return
    options = _orbax().CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    with _orbax().CheckpointManager(folder.absolute(), options=options) as manager:
        yield Checkpoints(manager, every)


def _orbax() -> Any:
    import orbax.checkpoint  # only here: most runs save nothing

    return orbax.checkpoint


class Curve:
    """Scores of each generation, appended to a CSV file, which outlives an interruption.

    Args:
      path: of the file; None writes nothing, as processes other than the first should.
      done: generations of an earlier run to keep; later ones will be played again.
    """

    def __init__(self, path: pathlib.Path | None, done: int = 0) -> None:
        self._path = path
        self._rows: list[dict[str, float]] = []
        if path is None:
            return
        earlier = _rows(path)[:done] if done else []
        path.unlink(missing_ok=True)
        for row in earlier:
            self.add(**row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return one score, `[generations]`."""
        return np.array([row[name] for row in self._rows])

    def add(self, **values: float) -> None:
        """Append a generation, with the same names each time."""
        row = {name: float(value) for name, value in values.items()}
        self._rows.append(row)
        if self._path is None:
            return
        with self._path.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if len(self) == 1:
                writer.writeheader()
            writer.writerow(row)


def _rows(path: pathlib.Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [
            {name: float(value or "nan") for name, value in row.items()}  # the last may be torn
            for row in csv.DictReader(file)
        ]


class Follower:
    """A progress bar and a curve, to be called after each generation.

    Attributes:
      curve: empty until the first generation is done.
    """

    def __init__(self, session: Session):
        self.curve = Curve(None)
        self._path = session.out / "curve.csv"
        self._bar = progress(0, session.generations)  # now: the first generation takes longest

    def __call__(self, generation: int, **values: float) -> None:
        """Record a generation, numbered from 0, with the same names each time."""
        if not self.curve:
            self.curve = Curve(self._path, done=generation)
        self.curve.add(**values)
        self._bar.update(generation + 1 - self._bar.n)
        self._bar.set_postfix({name: f"{value:.1f}" for name, value in values.items()})
        if generation + 1 == self._bar.total:
            self._bar.close()


def draw_curves(
    path: pathlib.Path,
    lines: Mapping[str, np.ndarray],
    *,
    title: str,
    ylabel: str,
    goal: float | None = None,
    goal_label: str = "solved",
) -> None:
    """Draw learning curves `{label: [generations]}` into a PNG, the first one in grey.

    `goal` is the height of a dashed line.
    """
    from matplotlib.figure import Figure  # only here: of several processes, one draws
    from matplotlib.ticker import MaxNLocator

    colours = ["tab:gray", "tab:blue", "tab:red", "tab:green"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="generation", ylabel=ylabel)
    for colour, (label, values) in zip(colours, lines.items(), strict=False):
        axes.plot(np.arange(1, len(values) + 1), values, ".-", color=colour, label=label)
    if goal is not None:
        axes.axhline(goal, color="black", linestyle="--", linewidth=1, label=goal_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
