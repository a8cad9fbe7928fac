"""A character-level language model, trained without gradients, by perturbations of low rank.

    python examples/es_eggroll.py --devices 2

Sarkar et al., "Evolution Strategies at the Hyperscale" (EGGROLL, arXiv 2511.16652), perturb each
matrix by a product of two thin ones. A layer applies that product without forming it:
`x @ W + s * (x @ L) @ R.T`. The whole population therefore shares the large multiplication by `W`,
and a pair of members costs `m + n` random numbers instead of `m * n`. Those are so few that every
device draws them again for all pairs, and the devices exchange nothing but the losses.

The numbers are signs, +1 or -1. They have the mean and the variance of the normal numbers of the
paper, and one random word gives 32 of them, so drawing costs next to nothing.

The text is that of the documentation, in 32 letters. Of ten pieces of it, eight are to learn from,
the ninth was to choose the learning rate on, and the last is for the result.

Shapes: `P` mirrored pairs (the population is twice that), `D` devices, `b` rows of text for each
pair, `T` letters that the model sees, `V` different letters, `[m, n]` a matrix, `r` the rank of its
perturbation.
"""

import dataclasses
import functools
import math
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import chex
import es_common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags
from es_common import FLAGS, check_redrawable
from jax import lax

import jax_dist

flags.DEFINE_integer("pairs", 2048, "Mirrored pairs; a multiple of 8.", lower_bound=8)
flags.DEFINE_integer("noise_rank", 1, "Of the perturbation of a matrix.", lower_bound=1)

SIGMA = 0.02  # standard deviation of each number of a perturbation
BLOCKS = 8  # a device plays whole blocks of pairs: their shape is the same on 1 to 8 devices
LETTERS = "abcdefghijklmnopqrstuvwxyz .,_`\n"
PIECE = 1000  # letters; neighbours of a page are in the same part of the text, or far apart

Params: TypeAlias = dict[str, jax.Array]  # matrices, by name; each [m, n]
Thin: TypeAlias = tuple[jax.Array, jax.Array]  # left, [m, r], and right, [n, r]
State: TypeAlias = tuple[Params, optax.OptState]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes, and how the model is trained."""

    pairs: int = 2048  # P
    rank: int = 1  # r
    rows: int = 32  # b
    length: int = 3  # T
    letter: int = 8  # numbers for each letter
    width: int = 16
    generations: int = 8000

    def __post_init__(self) -> None:
        chex.assert_is_divisible(self.pairs, BLOCKS)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        return {
            "letters": (len(LETTERS), self.letter),
            "hidden": (self.length * self.letter, self.width),
            "out": (self.width, len(LETTERS)),
        }

    @property
    def adam(self) -> optax.GradientTransformation:
        return optax.adam(optax.cosine_decay_schedule(0.01, self.generations))


# ---- the text


@functools.cache
def documentation() -> np.ndarray:
    """Return `[letters]`, as numbers: the pages in small letters, all others as a space."""
    folder = pathlib.Path(__file__).parents[1] / "docs"
    pages = (path.read_text(encoding="utf-8").lower() for path in sorted(folder.glob("*.md")))
    text = re.sub(f"[^{LETTERS}]", " ", "".join(pages))
    text = re.sub(" +", " ", re.sub("\n+", "\n", text))
    number = {letter: number for number, letter in enumerate(LETTERS)}
    return np.array([number[letter] for letter in text], np.int32)


def parts(plan: Plan, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `[letters]` to learn from, and every row of the pieces for the test, `[r, T + 1]`."""
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    seen = [piece for number, piece in enumerate(pieces) if number % 10 < 8]
    rows = np.lib.stride_tricks.sliding_window_view
    test = [rows(piece, plan.length + 1) for piece in pieces[9::10]]
    return np.concatenate(seen), np.concatenate(test)


# ---- a perturbation, applied and never formed


def signs_of(key: jax.Array, count: int) -> jax.Array:
    """Return `[count]`, each +1 or -1: 32 from a random word. The key is not consumed."""
    check_redrawable(key)
    words = jax.random.bits(key, (math.ceil(count / 32), 1), jnp.uint32)
    bits = (words >> jnp.arange(32, dtype=jnp.uint32)) & 1
    # Compiled once: without the barrier, each use would compile a generator of its own.
    return lax.optimization_barrier(2.0 * bits.astype(jnp.float32).ravel()[:count] - 1.0)


def noise_of(plan: Plan, key: jax.Array, pair: jax.Array) -> dict[str, Thin]:
    """Return the factors of one pair, the same on every device. The key is not consumed."""
    count = sum(m + n for m, n in plan.shapes.values())
    signs = signs_of(jax.random.fold_in(key, pair), count * plan.rank)
    numbers = signs.reshape(count, plan.rank)
    noise, start = {}, 0
    for name, (m, n) in plan.shapes.items():
        middle, end = start + m, start + m + n
        noise[name] = numbers[start:middle], numbers[middle:end]
        start = end
    return noise


def dense(x: jax.Array, matrix: jax.Array, thin: Thin, scale: float | jax.Array) -> jax.Array:
    """Return `[b, m], [m, n] -> [b, n]`: as `x @ (matrix + scale * left @ right.T)`."""
    left, right = thin
    return x @ matrix + (scale * (x @ left)) @ right.T


def lookup(letters: jax.Array, matrix: jax.Array, thin: Thin, scale: jax.Array) -> jax.Array:
    """Return `[b, T], [V, e] -> [b, T, e]`: rows of a perturbed matrix."""
    left, right = thin
    return matrix[letters] + (scale * left[letters]) @ right.T


def member_loss(
    params: Params, noise: dict[str, Thin], scale: float | jax.Array, rows: jax.Array
) -> jax.Array:
    """Return `[b, T + 1] -> []`: of the last letter of each row, perturbed by `scale`."""
    x = lookup(rows[:, :-1], params["letters"], noise["letters"], scale)
    x = x.reshape(len(rows), -1)  # [b, T * e]
    x = jnp.tanh(dense(x, params["hidden"], noise["hidden"], scale))
    return cross_entropy(dense(x, params["out"], noise["out"], scale), rows[:, -1])


def weighted_sum(weights: jax.Array, thin: Thin) -> jax.Array:
    """Return `[P], ([P, m, r], [P, n, r]) -> [m, n]`: over pairs and ranks, in one product."""
    left, right = thin
    return jnp.einsum("pmr,pnr->mn", weights[:, None, None] * left, right)


# ---- the same model without perturbation


def loss_of(params: Params, rows: jax.Array) -> jax.Array:
    """Return `[b, T + 1] -> []`, without a perturbation."""
    x = params["letters"][rows[:, :-1]].reshape(len(rows), -1)
    x = jnp.tanh(x @ params["hidden"])
    return cross_entropy(x @ params["out"], rows[:, -1])


def cross_entropy(logits: jax.Array, letters: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, letters).mean()


def first_params(plan: Plan, key: jax.Array) -> Params:
    """Return matrices by name. The key is consumed."""
    keys = jax.random.split(key, len(plan.shapes))
    params = {
        name: jax.random.normal(matrix_key, shape) / math.sqrt(shape[0])
        for matrix_key, (name, shape) in zip(keys, plan.shapes.items(), strict=True)
    }
    params["letters"] *= math.sqrt(len(LETTERS))  # its rows are looked up, not summed
    return params


def rows_of(plan: Plan, text: jax.Array, key: jax.Array, pair: jax.Array) -> jax.Array:
    """Return `[letters] -> [b, T + 1]`, at random places. The key is not consumed."""
    row_key = jax.random.fold_in(key, pair)
    starts = jax.random.randint(row_key, (plan.rows, 1), 0, len(text) - plan.length)
    return lax.optimization_barrier(text[starts + jnp.arange(plan.length + 1)])


# ---- one update


def generation(
    plan: Plan, state: State, text: jax.Array, key: jax.Array, pairs: jax.Array
) -> tuple[State, jax.Array]:
    """Update on one device, with its `pairs`, `[P / D]`; also return all losses, `[P, 2]`."""
    params, adam = state
    noise_key, row_key = jax.random.split(key)
    scale = SIGMA / math.sqrt(plan.rank)

    def play(pair: jax.Array) -> jax.Array:
        """Return `[2]`: both members of a pair, on the same rows."""
        noise, rows = noise_of(plan, noise_key, pair), rows_of(plan, text, row_key, pair)
        signs = jnp.array([scale, -scale])
        return jax.vmap(member_loss, in_axes=(None, None, 0, None))(params, noise, signs, rows)

    blocks = pairs.reshape(-1, plan.pairs // BLOCKS)
    local_losses = lax.map(jax.vmap(play), blocks).reshape(-1, 2)  # [P / D, 2]
    # Nothing else is ever sent.
    losses = lax.all_gather(local_losses, "devices", tiled=True)  # [P, 2]

    weights = (losses[:, 0] - losses[:, 1]) / (2 * plan.pairs * scale * plan.rank)  # [P]
    noise = jax.vmap(functools.partial(noise_of, plan, noise_key))(jnp.arange(plan.pairs))
    gradient = {name: weighted_sum(weights, thin) for name, thin in noise.items()}
    change, adam = plan.adam.update(gradient, adam)
    return (optax.apply_updates(params, change), adam), losses


# ---- training


class Program(NamedTuple):
    """A mapped update, and its first arguments."""

    update: Callable[..., tuple[State, jax.Array]]  # state, text, key, pairs
    state: State
    text: jax.Array  # [letters], what the model learns from
    test: np.ndarray  # [rows, T + 1], what it never sees
    pairs: np.ndarray  # [D, P / D]

    def run(self, state: State, key: jax.Array) -> tuple[State, jax.Array]:
        return self.update(state, self.text, key, self.pairs)


def build(plan: Plan, devices: Sequence[jax.Device], key: jax.Array) -> Program:
    """Map the update and place the arguments. The key is consumed."""
    chex.assert_is_divisible(BLOCKS, len(devices))
    update = jax_dist.pmap(
        functools.partial(generation, plan),
        axis_name="devices",
        in_axes=(None, None, None, 0),  # state, text and key are the same everywhere
        out_axes=None,
        devices=devices,
    )
    params = first_params(plan, key)
    text, test = parts(plan, documentation())
    state, placed = jax_dist.replicate(((params, plan.adam.init(params)), text), devices)
    return Program(update, state, placed, test, np.arange(plan.pairs).reshape(len(devices), -1))


def train(
    plan: Plan,
    devices: Sequence[jax.Device],
    seed: int,
    follow: es_common.Follow,
    saved: es_common.Checkpoints,
) -> tuple[Program, State]:
    build_key, key = jax.random.split(jax.random.key(seed))
    program = build(plan, devices, build_key)
    state, done = saved.restore(program.state)
    for number in range(done, plan.generations):
        state, losses = program.run(state, jax.random.fold_in(key, number))
        follow(number, loss=float(losses.mean()))
        saved.save(number + 1, state)
    return program, state


def main() -> None:
    out = es_common.prepare()
    plan = Plan(FLAGS.pairs, FLAGS.noise_rank, generations=FLAGS.generations)
    curve, start = es_common.Curve(out, plan.generations), time.process_time()
    with es_common.checkpoints(out, FLAGS.save_every) as saved:
        devices = es_common.devices()
        program, (params, _) = train(plan, devices, FLAGS.seed, curve, saved)
    seconds, losses = time.process_time() - start, curve["loss"]
    count = sum(math.prod(shape) for shape in plan.shapes.values())
    title = f"{count:,} parameters, rank {plan.rank}"
    picture = es_common.draw_curves(out, {"training": losses}, title, "loss per letter (nats)")
    test = float(jax.jit(loss_of)(jax.device_get(params), program.test))
    print(f"parameters   {count:,} on {len(devices)} x {devices[0].device_kind}")
    print(f"loss         {losses[0]:.3f} -> {losses[-1]:.3f}")
    print(f"test         {test:.3f} on text that it never saw")
    print(f"CPU time     {seconds:.1f} s, compilation included")
    print(f"picture      {picture}")


if __name__ == "__main__":
    es_common.run(main, "es_eggroll", generations=Plan.generations)
