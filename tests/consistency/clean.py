"""Programs that compute the same on any number of devices: nothing must be found."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.sharding import PartitionSpec as P
from programs_kit import KEY, ROWS, TARGETS, WEIGHTS, Case, dense, mesh_of, squared_error

CASES: dict[str, Case] = {}
_ZEROS = np.zeros(3, np.float32)
_BF16 = jnp.asarray(np.asarray(ROWS), jnp.bfloat16)
_IMAGES = jnp.asarray(np.sin(np.arange(8 * 6 * 6 * 2)).reshape(8, 6, 6, 2), jnp.float32)
_TOKENS = jnp.asarray(np.arange(8 * 5) * 7 % 11).reshape(8, 5)


def case(*args, in_axes, out_axes=None, mesh=None):
    def register(fun):
        CASES[fun.__name__] = Case(fun, args, in_axes, out_axes, mesh)
        return fun

    return register


# ---- training steps


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def gradient_step(w, x, y):
    loss, grads = jax.value_and_grad(squared_error)(w, x, y)
    return w - 0.1 * lax.pmean(grads, "i"), lax.pmean(loss, "i")


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def step_with_a_penalty(w, x, y):
    def loss(w):
        return squared_error(w, x, y) + 0.3 * jnp.sum(w * w)

    grads = lax.pmean(jax.grad(loss)(w), "i")
    norm = jnp.sqrt(jnp.sum(grads * grads))
    return w - 0.1 * grads / jnp.maximum(norm, 1.0)


@case(WEIGHTS, _ZEROS, _ZEROS, ROWS, TARGETS, in_axes=(None, None, None, 0, 0))
def adam(w, m, v, x, y):
    grads = lax.pmean(jax.grad(squared_error)(w, x, y), "i")
    m, v = 0.9 * m + 0.1 * grads, 0.99 * v + 0.01 * grads**2
    return w - 0.01 * (m / 0.1) / (jnp.sqrt(v / 0.01) + 1e-8), m, v


@case(ROWS, TARGETS, in_axes=(0, 0))
def many_steps(x, y):
    def step(w, rate):
        grads = lax.pmean(jax.grad(squared_error)(w, x, y), "i")
        return w - rate * grads, jnp.sum(w)

    return lax.scan(step, jnp.ones(3), jnp.linspace(0.1, 0.01, 5))


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def accumulated_gradients(w, x, y):
    def add(total, row):
        return total + jax.grad(squared_error)(w, row[0][None], row[1][None]), None

    total, _ = lax.scan(add, jnp.zeros(3), (x, y))
    return lax.psum(total, "i") / (x.shape[0] * lax.axis_size("i"))


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def newton(w, x, y):
    hessian = lax.psum(x.T @ x, "i") + 1e-3 * jnp.eye(3)
    return jnp.linalg.solve(hessian, lax.psum(x.T @ (y - x @ w), "i"))


@case({"w": WEIGHTS, "scale": _ZEROS + 1}, ROWS, TARGETS, in_axes=(None, 0, 0))
def batch_norm_over_all(params, x, y):
    def loss(params):
        mean = lax.pmean(jnp.mean(x, 0), "i")
        variance = lax.pmean(jnp.mean((x - mean) ** 2, 0), "i")
        normal = (x - mean) * lax.rsqrt(variance + 1e-5) * params["scale"]
        return jnp.mean((normal @ params["w"] - y) ** 2)

    return lax.pmean(loss(params), "i")


@case(np.full((3, 3, 2, 4), 0.1, np.float32), _IMAGES, in_axes=(None, 0))
def convolutions(kernel, images):
    def loss(kernel):
        out = lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jax.nn.relu(out).max(axis=(1, 2)))

    return jax.tree.map(lambda g: lax.pmean(g, "i"), jax.value_and_grad(loss)(kernel))


@case(np.cos(np.arange(11 * 4, dtype=np.float32)).reshape(11, 4), _TOKENS, in_axes=(None, 0))
def attention(table, tokens):
    def loss(table):
        h = table[tokens]
        scores = jnp.einsum("btd,bsd->bts", h, h) / 2.0
        mask = jnp.tril(jnp.ones((5, 5), bool))
        probs = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        logits = jnp.einsum("bts,bsd->btd", probs, h) @ table.T
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)
        return -jnp.mean(picked)

    loss, grads = jax.value_and_grad(loss)(table)
    return lax.pmean(loss, "i"), lax.pmean(grads, "i")


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def rematerialized(w, x, y):
    @jax.checkpoint
    def layer(w, h):
        return jnp.tanh(h * w)

    def loss(w):
        return jnp.mean((layer(w, layer(w, x)).sum(-1) - y) ** 2)

    return lax.pmean(jax.grad(loss)(w), "i")


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def hand_written_gradient(w, x, y):
    @jax.custom_vjp
    def clip(v):
        return v

    clip.defvjp(lambda v: (v, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))
    grads = jax.grad(lambda w: jnp.sum(clip(x @ w) * y))(w)
    return lax.psum(grads, "i")


# ---- bfloat16 and other types


@case(jnp.asarray(np.asarray(WEIGHTS), jnp.bfloat16), _BF16, in_axes=(None, 0))
def bf16_mean(w, x):
    return lax.pmean(jnp.mean(jnp.tanh(x * w), axis=0), "i")


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def bf16_inside(w, x, y):
    def loss(w):
        h = jnp.tanh(x.astype(jnp.bfloat16) * w.astype(jnp.bfloat16))
        return jnp.mean((h.sum(-1).astype(jnp.float32) - y) ** 2)

    grads = lax.pmean(jax.grad(loss)(w), "i")
    return w - 0.1 * grads


@case(_BF16, in_axes=0)
def bf16_layer_norm(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-3)


@case(_TOKENS, in_axes=0)
def counts(tokens):
    histogram = lax.psum(jnp.sum(jax.nn.one_hot(tokens, 11, dtype=jnp.int32), axis=(0, 1)), "i")
    return histogram, jnp.argmax(histogram)


@case(ROWS, in_axes=0)
def complex_spectrum(x):
    return jnp.abs(jnp.fft.fft(x, axis=1)) + lax.pmean(jnp.mean(x), "i")


# ---- collectives of all kinds


@case(ROWS, in_axes=0)
def stable_log_sum_exp(x):
    top = lax.pmax(jnp.max(x, axis=0), "i")
    return top + jnp.log(lax.psum(jnp.sum(jnp.exp(x - top), axis=0), "i"))


@case(ROWS, in_axes=0)
def local_log_sum_exp(x):
    """Each device shifts by its own maximum, and all are put right in the end."""
    own = jnp.max(x, axis=0)
    partial = jnp.sum(jnp.exp(x - own), axis=0)
    top = lax.pmax(own, "i")
    return top + jnp.log(lax.psum(partial * jnp.exp(own - top), "i"))


@case(ROWS, in_axes=0)
def whitened(x):
    everything = lax.all_gather(x, "i", tiled=True)
    rank = jnp.argsort(jnp.argsort(everything[:, 0]))
    start = lax.axis_index("i") * x.shape[0]
    own = lax.dynamic_slice_in_dim(rank, start, x.shape[0])
    return own / everything.shape[0] - 0.5


@case(ROWS, in_axes=0)
def gathered_and_reduced(x):
    rows = lax.all_gather(x, "i")
    return jnp.mean(rows, axis=(0, 1)), jnp.max(rows)


@case(ROWS, in_axes=0)
def stencil_with_neighbours(x):
    """A halo of one row from the device before, in a ring."""
    size = lax.axis_size("i")
    ring = [(k, (k + 1) % size) for k in range(size)]
    before = lax.ppermute(x[-1:], "i", ring)
    return x - jnp.concatenate([before, x[:-1]])


@case(np.arange(64, dtype=np.float32).reshape(8, 8), in_axes=0)
def transposed_by_all_to_all(x):
    return lax.all_to_all(x, "i", split_axis=1, concat_axis=0, tiled=True).T * 2.0


@case(ROWS, in_axes=0)
def scattered_sums(x):
    total = lax.psum_scatter(jnp.tile(x.sum(0), 8), "i", tiled=True)
    return lax.all_gather(total, "i", tiled=True)


@case(ROWS, in_axes=0)
def numbered_rows(x):
    start = lax.axis_index("i") * x.shape[0]
    return x * (start + jnp.arange(x.shape[0]))[:, None]


@case(WEIGHTS, ROWS, in_axes=(None, 0))
def whichever_is_larger(w, x):
    total = lax.psum(jnp.sum(x @ w), "i")
    return lax.cond(total > 0, lambda: total * w, lambda: -total * w)


@case(ROWS, in_axes=0)
def until_it_settles(x):
    def step(state):
        mean, count = state
        return 0.5 * (mean + lax.pmean(jnp.mean(x, axis=0), "i")), count + 1

    return lax.while_loop(lambda state: state[1] < 4, step, (jnp.zeros(3), 0))


# ---- random numbers


@case(KEY, ROWS, in_axes=(None, 0))
def noise_by_device(key, x):
    key = random.fold_in(key, lax.axis_index("i"))
    return x + random.normal(key, x.shape)


@case(KEY, WEIGHTS, ROWS, in_axes=(None, None, 0))
def masks_shared_on_purpose(key, w, x):
    mask = random.bernoulli(key, 0.5, w.shape)
    hidden = jnp.tanh(x * jnp.where(mask, w / 0.5, 0.0))
    return lax.pmean(jnp.mean(hidden, axis=0), "i"), random.split(key)[0]


@case(KEY, WEIGHTS, ROWS, in_axes=(None, None, 0))
def evolution_with_common_seeds(key, theta, fitness_of):
    """All devices draw the whole population, and each evaluates its own share of it."""
    population = random.normal(key, (16, 3))
    rows = fitness_of.shape[0]
    own = lax.dynamic_slice_in_dim(population, lax.axis_index("i") * rows, rows)
    scores = jnp.sum((theta + 0.1 * own) * fitness_of, axis=1)
    everyone = lax.all_gather(scores, "i", tiled=True)
    everyone = (everyone - everyone.mean()) / (everyone.std() + 1e-6)
    return theta + 0.1 * everyone @ population / 16


@case(random.split(KEY, 16), ROWS, in_axes=(0, 0))
def one_key_a_row(keys, x):
    def walk(key, row):
        steps = random.uniform(key, (4, 3))
        return lax.scan(lambda at, step: (0.9 * at + step, at.sum()), row, steps)

    return jax.vmap(walk)(keys, x)


@case(KEY, ROWS, in_axes=(None, 0))
def draws_in_a_loop(key, x):
    key = random.fold_in(key, lax.axis_index("i"))

    def step(state, number):
        noise = random.normal(random.fold_in(key, number), x.shape)
        return 0.9 * state + 0.1 * noise, jnp.mean(state, axis=1)

    last, means = lax.scan(step, x, jnp.arange(3))
    return last, means


# ---- functions of whole arrays


@case(WEIGHTS, ROWS, in_axes=None, mesh=functools.partial(mesh_of, 8))
def mapped_over_a_mesh(w, x):
    def body(w, x):
        return lax.pmean(jnp.mean(jnp.tanh(x * w), axis=0), "data")

    return jax.jit(jax.shard_map(body, in_specs=(P(), P("data")), out_specs=P()))(w, x)


@case(WEIGHTS, ROWS, in_axes=None, mesh=functools.partial(mesh_of, 4, 2))
def gradient_through_a_mesh(w, x, mesh=None):
    def body(w, x):
        return lax.psum(jnp.sum(jnp.tanh(x @ w)), ("data", "model"))

    spec = P(("data", "model"))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), spec), out_specs=P())
    return jax.grad(mapped)(w, x)


@case(ROWS, in_axes=None, mesh=functools.partial(mesh_of, 8))
def only_a_jit(x):
    return dense(x) - jnp.mean(x)
