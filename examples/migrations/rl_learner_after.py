"""An actor-critic whose environments live on the devices: catch what falls down a 5 x 5 board.

Each device runs several learners side by side, each with environments of its own; their gradients
are averaged over the learners of a device (the axis "batch") and over the devices ("device").
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax_dist
import numpy as np
import optax

SIZE = 5
LEARNERS = 2  # on each device
ENVS = 8  # in each learner
ROLLOUT = 8
OPTIMIZER = optax.adam(3e-3)


class EnvState(NamedTuple):
    ball_x: jax.Array
    ball_y: jax.Array
    paddle: jax.Array


class LearnerState(NamedTuple):
    params: dict
    opt_state: optax.OptState
    key: jax.Array
    env_state: EnvState


def reset(key):
    ball_x, paddle = jnp.floor(SIZE * jax.random.uniform(key, (2,))).astype(jnp.int32)
    return EnvState(ball_x, jnp.int32(0), paddle)


def step(key, state, action):
    """Drop a new ball as soon as one is down."""
    paddle = jnp.clip(state.paddle + action - 1, 0, SIZE - 1)
    moved = EnvState(state.ball_x, state.ball_y + 1, paddle)
    done = moved.ball_y == SIZE - 1
    reward = jnp.where(done, jnp.where(moved.ball_x == paddle, 1.0, -1.0), 0.0)
    state = jax.tree.map(lambda new, old: jnp.where(done, new, old), reset(key), moved)
    return state, reward, done


def observe(state):
    board = jnp.zeros((SIZE, SIZE)).at[state.ball_y, state.ball_x].set(1.0)
    return board.at[SIZE - 1, state.paddle].add(-1.0).ravel()


def init_params(key):
    keys, shapes = jax.random.split(key, 3), [(SIZE * SIZE, 32), (32, 3), (32,)]
    names = ["hidden", "policy", "value"]
    draw = lambda key, shape: 0.2 * jax.random.normal(key, shape)
    return dict(zip(names, map(draw, keys, shapes), strict=True))


def apply(params, observation):
    hidden = jax.nn.relu(observation @ params["hidden"])
    return hidden @ params["policy"], hidden @ params["value"]


def loss_fn(params, trajectory, last_value):
    observations, actions, rewards, dones = trajectory
    logits, values = apply(params, observations)

    def backwards(following, now):
        reward, done = now
        target = reward + 0.95 * jnp.where(done, 0.0, following)
        return target, target

    _, targets = jax.lax.scan(backwards, last_value, (rewards, dones), reverse=True)
    advantages = jax.lax.stop_gradient(targets - values)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], -1)[..., 0]
    critic = jnp.mean((jax.lax.stop_gradient(targets) - values) ** 2)
    return -jnp.mean(chosen * advantages) + 0.5 * critic


def get_learner_fn():
    def env_step(carry, _):
        params, env_state, key = carry
        key, action_key, step_key = jax.random.split(key, 3)
        observation = jax.vmap(observe)(env_state)
        logits, _ = apply(params, observation)
        action = jax.random.categorical(action_key, logits)
        step_keys = jax.random.split(step_key, ENVS)
        env_state, reward, done = jax.vmap(step)(step_keys, env_state, action)
        return (params, env_state, key), (observation, action, reward, done)

    def update_step(learner_state, _):
        params, opt_state, key, env_state = learner_state
        carry = (params, env_state, key)
        (_, env_state, key), trajectory = jax.lax.scan(env_step, carry, None, ROLLOUT)
        _, last_value = apply(params, jax.vmap(observe)(env_state))
        grads = jax.grad(loss_fn)(params, trajectory, last_value)
        grads = jax.lax.pmean(grads, axis_name="batch")  # over the learners of a device
        grads = jax.lax.pmean(grads, axis_name="device")  # and over the devices
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        score = jnp.sum(trajectory[2]) / jnp.maximum(1, jnp.sum(trajectory[3]))
        return LearnerState(params, opt_state, key, env_state), score

    def learner_fn(learner_state, updates):
        batched_update_step = jax.vmap(update_step, axis_name="batch")
        return jax.lax.scan(batched_update_step, learner_state, None, updates)

    return learner_fn


def learner_setup(seed, updates):
    devices = jax.device_count()
    params_key, env_key, step_key = jax.random.split(jax.random.PRNGKey(seed), 3)
    params = init_params(params_key)

    def copies(x):
        return jnp.broadcast_to(x, (devices, LEARNERS) + jnp.shape(x))

    env_keys = jax.random.split(env_key, devices * LEARNERS * ENVS)
    env_states = jax.jit(jax.vmap(reset))(env_keys)
    env_states = jax.tree.map(lambda x: x.reshape((devices, LEARNERS, ENVS)), env_states)
    step_keys = jax.random.split(step_key, devices * LEARNERS)
    step_keys = step_keys.reshape((devices, LEARNERS, -1))
    params, opt_state = jax.tree.map(copies, (params, OPTIMIZER.init(params)))
    learn_fn = get_learner_fn()
    learn = jax_dist.pmap(lambda state: learn_fn(state, updates), axis_name="device")
    return learn, LearnerState(params, opt_state, step_keys, env_states)


def run_experiment(seed=0, evaluations=6, updates=50):
    learn, learner_state = learner_setup(seed, updates)
    scores = []
    for _ in range(evaluations):
        learner_state, score = learn(learner_state)
        scores.append(float(np.mean(score)))
    params = jax.tree.map(lambda x: np.asarray(x[0, 0]), learner_state.params)
    return np.array(scores), params


if __name__ == "__main__":
    print("mean reward of a ball:", np.round(run_experiment()[0], 2))
