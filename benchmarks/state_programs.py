"""Optimizers in branches and loops, and meshes of several axes; `global_view.py` compiles them.

Two layers, 256 and 1024 wide. Each program is compared to pmap on the devices that the mapped axis
has: all 8, or 4 or 2 of them where a further axis cuts what is computed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from state_workloads import DEVICES, Tree

_TYPE = jax.ShapeDtypeStruct
_PARAMS = {"a": _TYPE((256, 1024), "float32"), "b": _TYPE((1024, 256), "float32")}
_ADAM = optax.adamw(1e-2)


@dataclasses.dataclass(frozen=True)
class Program:
    """A step, the types of what it starts with, and how it is to lie."""

    name: str
    step: Callable[..., tuple[Tree, Tree]]
    state: Tree  # of one device
    options: dict[str, Any]  # of global_view
    count: int = DEVICES  # along the mapped axis

    @property
    def batch(self) -> tuple[Tree, ...]:
        return (_TYPE((self.count, 16, 256), "float32"),) * 2


def _loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def _program(name: str, tx: Any, update: Callable | None = None, **more: Any) -> Program:
    """A step whose state is `(params, optimizer state)`."""
    update = update or (lambda state, gradient: _updated(tx, state, gradient))

    def step(state: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Tree]:
        loss, gradient = jax.value_and_grad(_loss)(state[0], x, y)
        return update(state, lax.pmean(gradient, "i")), lax.pmean(loss, "i")

    state = (_PARAMS, jax.eval_shape(tx.init, _PARAMS))
    return Program(name, step, state, **{"options": {"shardings": "fsdp"}, **more})


def _updated(tx: Any, state: Tree, gradient: Tree) -> Tree:
    updates, rest = tx.update(gradient, state[1], state[0])
    return optax.apply_updates(state[0], updates), rest


def _skipping(state: Tree, gradient: Tree) -> Tree:
    finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)]))
    return lax.cond(finite, lambda: _updated(_ADAM, state, gradient), lambda: state)


def _thrice(state: Tree, gradient: Tree) -> Tree:
    turn = lambda state, _: (_updated(_ADAM, state, gradient), None)
    return lax.scan(turn, state, length=3)[0]


def bodies() -> list[Program]:
    skips = optax.MultiSteps(_ADAM, 2, should_skip_update_fn=optax.skip_not_finite)
    return [
        _program("adamw", _ADAM),
        _program("MultiSteps(adamw, 2)", optax.MultiSteps(_ADAM, 2)),
        _program("the same, finite ones only", skips),
        _program("apply_if_finite(adamw, 3)", optax.apply_if_finite(_ADAM, 3)),
        _program("cond that skips adamw", _ADAM, _skipping),
        _program("scan of three updates", _ADAM, _thrice),
    ]


def _mesh(sizes: Sequence[int], names: Sequence[str]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(sizes), names)


def hsdp() -> list[Program]:
    names = ("replica", "shard")
    several = [
        {"shardings": "fsdp", "mesh": _mesh(sizes, names), "mesh_axes": names}
        for sizes in ((1, 8), (2, 4), (4, 2))
    ]
    return [
        _program(f"{dict(options['mesh'].shape)}", _ADAM, options=options) for options in several
    ]


def model() -> list[Program]:
    """The first layer by columns, the second by rows, and each over "i" besides."""

    def rule(path: str, leaf: Any) -> P:
        name = path.rsplit("/", maxsplit=1)[-1]
        return {"a": P("i", "model"), "b": P("model", "i")}.get(name, P())

    return [
        _program(
            f"{dict(mesh.shape)}",
            _ADAM,
            options={"shardings": rule, "mesh": mesh},
            count=mesh.shape["i"],
        )
        for mesh in (_mesh(sizes, ("i", "model")) for sizes in ((8, 1), (4, 2), (2, 4)))
    ]


PROGRAMS: dict[str, Callable[[], list[Program]]] = {"bodies": bodies, "hsdp": hsdp, "model": model}
