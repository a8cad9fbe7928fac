"""A transformer on TPUs, beside GSPMD by hand; `global_view.py --on v5e:4x4` compiles it.

Each way lets the state lie in one form, and has programs of the same mathematics: the step of pmap
in the global view, also with what is gathered twice, and with narrow sums; plain `jax.jit` over all
rows, with the same shardings of the state and of the batch; and the same with constraints on what
goes from layer to layer, as one adds them where the partitioner does not find it. Bytes are those
of one device.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import machine_programs as programs
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from machine_programs import Sizes

from jax_dist import global_view
from jax_dist._hlo import ProgramCost

Tree = Any


@dataclasses.dataclass(frozen=True)
class Way:
    """A mesh, and how the state lies on it."""

    name: str
    mesh: Mesh
    mapped: tuple[str, ...]  # the axes that the batch is cut over
    rule: Callable[[str, Any], P]

    @property
    def count(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.mapped)


def ways_of(devices: list[Any], model: int) -> list[Way]:
    """Copied; in parts over all; in groups, copied over them; and with matrices cut, too."""
    count = len(devices)
    line = Mesh(np.array(devices), ("i",))
    groups = Mesh(np.array(devices).reshape(count // model, model), ("replica", "i"))
    grid = Mesh(np.array(devices).reshape(count // model, model), ("i", "model"))
    return [
        Way("replicated", line, ("i",), lambda path, leaf: P()),
        Way("fsdp", line, ("i",), functools.partial(_longest, count)),
        Way("hsdp", groups, ("replica", "i"), functools.partial(_longest, model)),
        Way("tensor", grid, ("i",), functools.partial(_as_megatron, count // model)),
    ]


def _longest(count: int, path: str, leaf: Any) -> P:
    """As shardings="fsdp" cuts."""
    del path
    fitting = [dim for dim, length in enumerate(leaf.shape) if length % count == 0]
    if not fitting or math.prod(leaf.shape) < 1024:
        return P()
    return P(*[None] * max(fitting, key=lambda dim: leaf.shape[dim]), "i")


def _as_megatron(count: int, path: str, leaf: Any) -> P:
    """The first matrix of two by columns, the second by rows; and along another dimension."""
    name = path.rsplit("/", maxsplit=1)[-1]
    if name not in ("qkv", "up", "out", "down", "words"):
        return P()
    parts: list[Any] = [None] * len(leaf.shape)
    parts[-1 if name in ("qkv", "up") else -2] = "model"
    for dim in range(len(parts) - 1, len(parts) - 3, -1):
        if parts[dim] is None and leaf.shape[dim] % count == 0:
            parts[dim] = "i"
            break
    return P(*parts)


def programs_of(
    way: Way, sizes: Sizes, rows: int | None = None
) -> Iterator[tuple[str, jax.stages.Lowered]]:
    """The programs of a way.

    Args:
      way: how the state lies.
      sizes: of the transformer.
      rows: of the batch, for the devices along a further axis together; by default as many as they
        have without one.
    """
    state = programs.transformer_state(sizes)
    here = rows or sizes.batch * way.mesh.size // way.count
    step = functools.partial(programs.transformer_step, heads=sizes.heads)
    whole = functools.partial(step, lay=lambda x: lax.with_sharding_constraint(x, P()))
    tokens = jax.ShapeDtypeStruct((way.count, here, sizes.tokens), np.int32)
    listed: list[tuple[str, Callable, dict[str, Any]]] = [("global view", step, {})]
    if way.name != "replicated":
        listed.append(("global view, regather", step, {"regather": True}))
        narrow = {"regather": True, "gradients": "narrow"}
        listed.append(("global view, narrow", step, narrow))
    if way.name == "tensor":
        listed.append(("global view, constrained", whole, {}))
    for name, used, options in listed:
        view = global_view(
            used, "i", mesh=way.mesh, mesh_axes=way.mapped, shardings=way.rule,
            out_axes=(None, None), donate_argnums=0, **options,
        )  # fmt: skip
        yield name, view.lower(state, tokens)
    for name, constrained in (("by hand", False), ("by hand, constrained", True)):
        yield name, _by_hand(way, state, sizes, tokens, constrained=constrained)


def _by_hand(
    way: Way, state: Tree, sizes: Sizes, tokens: Any, *, constrained: bool
) -> jax.stages.Lowered:
    named = lambda spec: NamedSharding(way.mesh, spec)
    path_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    of_state = jax.tree.map_with_path(
        lambda path, leaf: named(way.rule(path_of(path), leaf)), state
    )
    of_rows = named(P(way.mapped))
    lay = lambda x: lax.with_sharding_constraint(x, of_rows) if constrained else x

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        params, optimiser = state
        loss = lambda params: programs.transformer_loss(params, tokens, sizes.heads, lay)
        value, gradient = jax.value_and_grad(loss)(params)
        if constrained:
            gradient = lax.with_sharding_constraint(gradient, of_state[0])
        updates, optimiser = programs.OPTIMISER.update(gradient, optimiser, params)
        return (optax.apply_updates(params, updates), optimiser), value

    all_rows = jax.ShapeDtypeStruct((tokens.shape[0] * tokens.shape[1], sizes.tokens), np.int32)
    jitted = jax.jit(
        step,
        in_shardings=(of_state, of_rows),
        out_shardings=(of_state, named(P())),
        donate_argnums=0,
    )
    return jitted.lower(state, all_rows)


HEAD = f"  {'':12} {'':24} {'args GB':>8} {'temp GB':>8} {'peak GB':>8}  sent"


def line(way: str, name: str, lowered: jax.stages.Lowered) -> str:
    try:
        cost = ProgramCost.of(lowered)
    except jax.errors.JaxRuntimeError as error:
        return f"  {way:12} {name:24} does not fit: {str(error).splitlines()[0][:90]}"
    kinds: dict[str, int] = {}
    for each in cost.collectives:
        kinds[each.kind] = kinds.get(each.kind, 0) + each.count
    sent = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    memory = [cost.argument_bytes, cost.temp_bytes, cost.peak_bytes]
    shown = " ".join(f"{(each or 0) / 1e9:8.3f}" for each in memory)
    return f"  {way:12} {name:24} {shown}  {sent}"
