"""What the ES programs that train one policy share: when they end, and what they keep of it."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import es_common
import jax
import numpy as np
import optax

Generation: TypeAlias = tuple[optax.Params, optax.OptState, jax.Array]  # theta, Adam, [P, 2] scores


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained policy, and how it came about."""

    theta: np.ndarray  # [N]
    best: np.ndarray  # [generations], of the population's scores
    mean: np.ndarray  # [generations], of the population's scores
    policy: np.ndarray  # [generations], mean score of theta itself over some episodes
    fresh: float  # mean score of the last theta over as many more episodes
    goal: float

    @property
    def solved(self) -> bool:
        return bool(self.policy[-1] >= self.goal) and self.fresh >= self.goal


def until_solved(
    state: tuple[Any, Any],
    run: Callable[[Any, Any, int], Generation],
    score: Callable[[np.ndarray, jax.Array], Any],
    keys: tuple[jax.Array, jax.Array],
    goal: float,
    generations: int,
    *,
    show: Callable[[float, float], dict[str, str]],
    out: pathlib.Path | None = None,
    save_every: int = 0,
) -> Result:
    """Ends when theta reaches the goal, and reaches it again in other episodes.

    Args:
      state: theta, `[N]`, and Adam's state, on the devices.
      run: makes of these and the number of a generation the next ones, and the scores.
      score: of theta with a key: its mean over some episodes.
      keys: of the episodes in each generation, and of the fresh ones.
      goal: from which mean score on it counts as solved.
      generations: gives up after so many.
      show: what the progress bar says of the score of theta, and of the best one.
      out: keeps the curve there, and checkpoints.
      save_every: generations from one checkpoint to the next; 0: none.
    """
    policy_key, fresh_key = keys
    with es_common.checkpoints(out, save_every) as saved:
        (theta, adam), done = saved.restore(state)
        curve = es_common.Curve(out and out / "curve.csv", done)
        for number in (progress := es_common.progress(done, generations)):
            theta, adam, fitness = run(theta, adam, number)
            on_host = np.asarray(theta)  # [N]; as it is, all devices would evaluate it
            policy = float(score(on_host, jax.random.fold_in(policy_key, number)))
            best = float(fitness.max())
            curve.add(best=best, mean=fitness.mean(), policy=policy)
            saved.save(number + 1, (theta, adam))
            progress.set_postfix(**show(policy, best))
            if policy >= goal:
                fresh = float(score(on_host, jax.random.fold_in(fresh_key, number)))
                if fresh >= goal:
                    break
        else:
            last_key = jax.random.fold_in(fresh_key, generations - 1)
            fresh = float(score(np.asarray(theta), last_key))
    return Result(np.asarray(theta), curve["best"], curve["mean"], curve["policy"], fresh, goal)


def keep(
    session: es_common.Session,
    result: Result,
    *,
    game: str,
    episodes: int,
    ylabel: str,
    goal_label: str,
) -> pathlib.Path:
    """Writes the policy and the learning curve into `session.out`; returns the picture's path."""
    chex.assert_tree_all_finite(result.theta)
    np.savez(session.out / "policy.npz", theta=result.theta)
    picture = session.out / "learning_curve.png"
    es_common.draw_curves(
        picture,
        {
            "best of the population": result.best,
            "mean of the population": result.mean,
            f"theta, mean of {episodes} episodes": result.policy,
        },
        title=f"OpenAI ES on {game}, seed {session.seed}, {session.where}",
        ylabel=ylabel,
        goal=result.goal,
        goal_label=goal_label,
    )
    return picture
