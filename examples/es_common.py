"""Shared parts of the ES programs: flags, ranks, noise, checkpoints, curve, picture.

A program ends with `es_common.run(main, "es_quickstart", generations=60)`; its `main` calls
`prepare`, and reads the flags from `absl.flags.FLAGS`.
"""

import contextlib
import csv
import itertools
import math
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from absl import app, flags, logging

import jax_dist

FLAGS = flags.FLAGS
flags.DEFINE_integer("devices", 8, "Devices, at most; on a CPU, simulated ones.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Seed of everything random: the same seed, the same curve.")
flags.DEFINE_integer("generations", 60, "Give up after so many.", lower_bound=1)
flags.DEFINE_string("out", "out", "Folder for all that the program leaves behind.")
flags.DEFINE_integer(
    "save_every",
    0,
    "Save a checkpoint in --out after so many generations, and go on from the newest one; 0: never",
    lower_bound=0,
)
flags.DEFINE_bool("cache", default=True, help="Keep compiled programs on disk, for the next start.")

Follow: TypeAlias = Callable[..., None]  # called with a generation's number, and scores by name


def run(main: Callable[..., None], program: str, **defaults: Any) -> None:
    """Parse the flags, with these defaults, and run `main`, on what is left of the command line."""
    for name, value in {"out": f"out/{program}", **defaults}.items():
        FLAGS.set_default(name, value)
    for flag in FLAGS.get_flags_for_module(__name__):  # shows it in --help
        FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    app.run(lambda argv: main(*argv[1:]))


def prepare(*, simulate: bool = True) -> pathlib.Path:
    """Set up JAX as the flags say, before it looks for devices; return the folder `--out`."""
    logging.set_verbosity(logging.WARNING)  # jax tells which backends it does not find
    if simulate:
        jax.config.update("jax_num_cpu_devices", FLAGS.devices)  # for the CPU only
    if FLAGS.cache:
        jax_dist.cache.enable()
    out = pathlib.Path(FLAGS.out)
    out.mkdir(parents=True, exist_ok=True)
    return out


def devices() -> Sequence[jax.Device]:
    """Return the devices that the flags ask for."""
    return jax.devices()[: FLAGS.devices]


# ---- the method


def centred_ranks(fitness: jax.Array) -> jax.Array:
    """Return ranks `[p] -> [p]` from -0.5, the worst, to 0.5; ties share their average rank."""
    # To rank ties by their position would be to follow noise.
    ascending = jnp.sort(fitness)
    first = jnp.searchsorted(ascending, fitness, side="left")
    after_last = jnp.searchsorted(ascending, fitness, side="right")
    return (first + after_last - 1) / (2 * (fitness.size - 1)) - 0.5


def check_redrawable(key: jax.Array) -> None:
    """Raise ValueError for a key whose noise cannot be drawn twice. The key is not consumed."""
    implementation = jax.random.key_impl(key)
    if implementation != "threefry2x32":
        raise ValueError(
            f"noise cannot be drawn twice from a {implementation!r} key, whose rows depend on the"
            ' batch they are drawn in; use jax.random.key(seed, impl="threefry2x32")'
        )


def keys_of(key: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return keys `[p]` for numbers `[p]`, the same on every device. `key` is not consumed."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)


# ---- what is sent


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


# ---- what is left behind


class Checkpoints:
    """Orbax checkpoints, by the number of generations that are done; without a manager, none."""

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
def checkpoints(out: pathlib.Path | None, every: int, keep: int = 2) -> Iterator[Checkpoints]:
    """Open the checkpoints in a folder, of which the newest are kept; none if `every` is 0."""
    if not every or out is None:
        yield Checkpoints()
        return
    options = _orbax().CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
    folder = (out / "checkpoints").absolute()
    with _orbax().CheckpointManager(folder, options=options) as manager:
        yield Checkpoints(manager, every)


def _orbax() -> Any:
    import orbax.checkpoint  # only here: most runs save nothing

    return orbax.checkpoint


class Curve:
    """Scores of each generation, as a progress bar and in `curve.csv`, which outlives a run.

    Args:
      out: the folder of the file; None writes nothing, as processes other than the first should.
      generations: the length of the bar.
      done: generations of an earlier run to keep; later ones will be played again.
    """

    def __init__(self, out: pathlib.Path | None, generations: int, done: int = 0) -> None:
        self._path = out and out / "curve.csv"
        self._rows: list[dict[str, float]] = []
        is_quiet = jax.process_index() != 0
        self._bar = tqdm.tqdm(total=generations, desc="generation", disable=is_quiet)
        self._resume(done)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> np.ndarray:
        """Return one score, `[generations]`."""
        return np.array([row[name] for row in self._rows])

    def __call__(self, generation: int, **values: float) -> None:
        """Append a generation, numbered from 0, with the same names each time."""
        if not self._rows:
            self._resume(generation)
        self._append({name: float(value) for name, value in values.items()})
        self._bar.update(generation + 1 - self._bar.n)
        self._bar.set_postfix({name: f"{value:.1f}" for name, value in values.items()})

    def _resume(self, done: int) -> None:
        if not self._path or not done:
            return
        with self._path.open(newline="") as file:
            rows = list(itertools.islice(csv.DictReader(file), done))
        for row in rows:
            self._append({name: float(value) for name, value in row.items()})

    def _append(self, row: dict[str, float]) -> None:
        self._rows.append(row)
        if self._path:
            is_first = len(self) == 1  # the file may be that of an earlier run
            with self._path.open("w" if is_first else "a", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                if is_first:
                    writer.writeheader()
                writer.writerow(row)


def draw_curves(
    out: pathlib.Path,
    lines: Mapping[str, np.ndarray],
    title: str,
    ylabel: str = "return (steps survived)",
    goal: float | None = None,
) -> pathlib.Path:
    """Draw learning curves `{label: [generations]}`, the first in grey, and the goal, dashed."""
    from matplotlib.figure import Figure  # only here: of several processes, one draws
    from matplotlib.ticker import MaxNLocator

    colors = ["tab:gray", "tab:blue", "tab:red", "tab:green"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="generation", ylabel=ylabel)
    for color, (label, values) in zip(colors, lines.items(), strict=False):
        axes.plot(np.arange(1, len(values) + 1), values, ".-", color=color, label=label)
    if goal is not None:
        label = f"solved: {goal:g}"
        axes.axhline(goal, color="black", linestyle="--", linewidth=1, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=2)
    path = out / "learning_curve.png"
    figure.savefig(path, dpi=120)
    return path


def learn(train: Callable[..., jax.Array], title: str) -> None:
    """Train a program of the migration pair; leave its policy, its curve and a picture."""
    out = prepare()
    curve = Curve(out, FLAGS.generations)
    with checkpoints(out, FLAGS.save_every) as saved:
        theta = train(FLAGS.seed, len(devices()), FLAGS.generations, curve, saved)
    np.savez(out / "policy.npz", theta=theta)
    returns = curve["mean_return"]
    picture = draw_curves(out, {"mean of the population": returns}, f"{title}, seed {FLAGS.seed}")
    print(f"mean return  {returns[-1]:.1f}")
    print(f"picture      {picture}")
