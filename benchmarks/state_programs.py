"""Optimizers in branches and loops, and meshes of several axes; `global_view.py` compiles them.

Two layers, 256 and 1024 wide; and a transformer of four layers, 128 wide. Each program is compared
to pmap on the devices that the mapped axis has: all 8, or 4 or 2 of them where a further axis cuts
what is computed.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import machine_programs
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
    rows: tuple[Tree, ...] = (_TYPE((16, 256), "float32"),) * 2  # of the batch, on one device

    @property
    def batch(self) -> tuple[Tree, ...]:
        return tuple(_TYPE((self.count, *each.shape), each.dtype) for each in self.rows)


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


def _decoder() -> Program:
    """Layers in a scan with remat; clipping and AdamW in MultiSteps, and a mean of parameters."""
    sizes = machine_programs.Sizes(4, 128, 512, 4, 65, 4)
    params, _ = machine_programs.transformer_state(sizes)
    params["places"] = _TYPE((sizes.tokens, sizes.width), "float32")
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), _ADAM), 4)
    loss_of = functools.partial(
        machine_programs.transformer_loss, heads=sizes.heads, dtype=jnp.float32
    )

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], tokens)
        updates, rest = tx.update(lax.pmean(gradient, "i"), state["tx"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        mean = jax.tree.map(lambda m, p: 0.99 * m + 0.01 * p, state["mean"], params)
        return {"params": params, "tx": rest, "mean": mean}, lax.pmean(loss, "i")

    state = {"params": params, "tx": jax.eval_shape(tx.init, params), "mean": params}
    tokens = (_TYPE((sizes.batch, sizes.tokens), "int32"),)
    return Program(
        "transformer, MultiSteps, mean, clip", step, state, {"shardings": "fsdp"}, rows=tokens
    )


def bodies() -> list[Program]:
    skips = optax.MultiSteps(_ADAM, 2, should_skip_update_fn=optax.skip_not_finite)
    return [
        _program("adamw", _ADAM),
        _program("MultiSteps(adamw, 2)", optax.MultiSteps(_ADAM, 2)),
        _program("the same, finite ones only", skips),
        _program("apply_if_finite(adamw, 3)", optax.apply_if_finite(_ADAM, 3)),
        _program("cond that skips adamw", _ADAM, _skipping),
        _program("scan of three updates", _ADAM, _thrice),
        _decoder(),
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
