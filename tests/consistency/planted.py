"""Programs whose results depend on the number of devices; the line to blame ends in `# wrong`.

Each is what somebody would write: the step of a training loop, a sampler, a stencil. The arguments
are of eight rows, or sixteen.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.sharding import PartitionSpec as P
from programs_kit import KEY, ROWS, TARGETS, WEIGHTS, Case, dense, mesh_of, squared_error

CASES: dict[str, Case] = {}


def case(*args, in_axes, out_axes=None, mesh=None):
    """Registers a function of one device, or of whole arrays with `mesh`."""

    def register(fun):
        CASES[fun.__name__] = Case(fun, args, in_axes, out_axes, mesh)
        return fun

    return register


# ---- wrong scale


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def summed_gradients_of_means(w, x, y):
    grads = jax.grad(squared_error)(w, x, y)
    grads = lax.psum(grads, "i")  # wrong
    return w - 0.1 * grads


@case(WEIGHTS, ROWS, in_axes=(None, 0))
def energy_off_by_the_devices(w, x):
    """As netket#2228: the mean over samples, of which each device holds some."""
    local = jnp.square(x @ w)
    total = lax.psum(local.sum(), "i")
    energy = lax.pmean(total / x.shape[0], "i")  # wrong
    variance = lax.pmean(jnp.mean(jnp.square(local)), "i") - lax.pmean(local.mean(), "i") ** 2
    return energy, variance


@case(ROWS, in_axes=0)
def mean_of_sums(x):
    total = jnp.sum(x * x, axis=0)
    return jnp.sqrt(lax.pmean(total, "i"))  # wrong


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def divided_by_the_rows_of_a_device(w, x, y):
    def total(w):
        return jnp.sum(jnp.square(x @ w - y))

    grads = lax.psum(jax.grad(total)(w), "i")
    grads = grads / x.shape[0]  # wrong
    return w - 0.01 * grads


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def learning_rate_scaled_by_devices(w, x, y):
    loss, grads = jax.value_and_grad(squared_error)(w, x, y)
    grads = lax.pmean(grads, "i")
    rate = 0.01 * lax.axis_size("i")
    w = w - rate * grads  # wrong
    return w, lax.pmean(loss, "i")


# ---- a collective that is missing


@case({"w": WEIGHTS, "b": np.float32(0.5)}, ROWS, TARGETS, in_axes=(None, 0, 0))
def update_from_own_gradients(params, x, y):
    def loss(params):
        return jnp.mean(jnp.square(x @ params["w"] + params["b"] - y))

    value, grads = jax.value_and_grad(loss)(params)
    value = lax.pmean(value, "i")
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)  # wrong
    return params, value


@case(WEIGHTS, np.zeros(3, np.float32), ROWS, TARGETS, in_axes=(None, None, 0, 0))
def momentum_of_own_gradients(w, m, x, y):
    grads = jax.grad(squared_error)(w, x, y)
    m = 0.9 * m + grads  # wrong
    return w - 0.1 * m, m


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def clipped_by_own_norm(w, x, y):
    grads = jax.grad(squared_error)(w, x, y)
    norm = jnp.sqrt(jnp.sum(grads * grads))  # wrong
    grads = lax.pmean(grads / jnp.maximum(norm, 1.0), "i")
    return w - 0.1 * grads


@case(ROWS, in_axes=0)
def largest_of_a_device(x):
    top = jnp.max(jnp.abs(x))  # wrong
    return {"top": top, "mean": lax.pmean(jnp.mean(x), "i")}


@case(ROWS, TARGETS, in_axes=(0, 0))
def loop_without_its_reduction(x, y):
    def step(w, _):
        grads = jax.grad(squared_error)(w, x, y)
        return w - 0.1 * grads, jnp.sum(w)  # wrong

    w, sums = lax.scan(step, jnp.ones(3), None, length=3)
    return w, sums


# ---- a collective too many


@case(ROWS, in_axes=0)
def summed_twice(x):
    total = lax.psum(jnp.sum(x, axis=0), "i")
    scaled = total * 0.5
    return lax.psum(scaled, "i")  # wrong


@case(WEIGHTS, ROWS, TARGETS, in_axes=(None, 0, 0))
def summed_by_the_loss_and_by_the_step(w, x, y):
    def loss(w):
        local = jnp.sum(jnp.square(x @ w - y))
        count = x.shape[0] * lax.axis_size("i")
        return local / count

    grads = lax.psum(jax.grad(loss)(w), "i")
    updates = jax.tree.map(lambda g: -0.1 * g, grads)
    return w + lax.psum(updates, "i")  # wrong


# ---- statistics of one device


@case(ROWS, in_axes=0)
def normalized_by_own_mean(x):
    mean = jnp.mean(x, axis=0)
    centered = x - mean  # wrong
    return centered / jnp.sqrt(lax.pmean(jnp.mean(centered**2, axis=0), "i") + 1e-5)


@case(ROWS, in_axes=0)
def softmax_over_rows(x):
    logits = x[:, 0]
    return jax.nn.softmax(logits)  # wrong


@case(TARGETS, in_axes=0)
def advantages_of_a_device(rewards):
    spread = jnp.std(rewards)  # wrong
    return (rewards - lax.pmean(jnp.mean(rewards), "i")) / (spread + 1e-6)


# ---- keys that repeat


@case(KEY, ROWS, in_axes=(None, 0))
def the_same_noise_everywhere(key, x):
    """As aimz#292."""
    return x + 0.1 * random.normal(key, x.shape)  # wrong


@case(KEY, WEIGHTS, ROWS, in_axes=(None, None, 0))
def dropout_masks_that_repeat(key, w, x):
    hidden = jnp.tanh(x * w)
    keep = random.bernoulli(key, 0.5, hidden.shape)  # wrong
    return lax.pmean(jnp.mean(jnp.where(keep, hidden / 0.5, 0.0)), "i")


# ---- the wrong axis


@case(ROWS, in_axes=0)
def gathered_along_features(x):
    everything = lax.all_gather(x, "i", axis=1, tiled=True)  # wrong
    return jnp.linalg.norm(everything, axis=0)


@case(ROWS, in_axes=None, mesh=functools.partial(mesh_of, 4, 2))
def mean_over_the_other_axis(x):
    def body(x):
        return lax.pmean(jnp.mean(x, axis=0), "model")  # wrong

    return jax.shard_map(body, in_specs=P(("data", "model")), out_specs=P(), check_vma=False)(x)


# ---- boundaries of slices


@case(ROWS, in_axes=0)
def differences_within_slices(x):
    left = jnp.roll(x, 1, axis=0)  # wrong
    return dense(x - left)
