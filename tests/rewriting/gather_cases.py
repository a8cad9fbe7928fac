"""Bodies that gather, each with what has to become of it: reductions counted, reasons in words.

A body takes this device's block `x`, `[2, 3]` of f32, and gives arrays. The axis is `i`; on four
devices it has the size 4, on eight 8. A case that is kept is forced by the line of its lambda.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Case:
    body: Callable[[jax.Array], Any]
    reductions: int = 1  # after the pass
    gathers: int = 0  # the same
    why: str = ""  # a gather stays
    tolerance: float = 1e-6  # of sums in another order, relative to the largest value; 0: bit-equal
    typed: bool = True  # whether it can be written under check_vma=True
    differentiable: bool = True

    def forced_at(self) -> str:
        return f"tests/rewriting/gather_cases.py:{self.body.__code__.co_firstlineno}"


rewritten = Case
exact = functools.partial(Case, tolerance=0.0)


def kept(why: str, body: Callable, **fields: Any) -> Case:
    why = why if " " in why else f"{why} needs the whole gathered value"
    return Case(body=body, **{"reductions": 0, "gathers": 1, "tolerance": 0.0, **fields}, why=why)


def gather(x: jax.Array, **options: Any) -> jax.Array:
    return lax.all_gather(x, "i", **options)


def size() -> int:
    return lax.axis_size("i")


def weights(dtype: Any = jnp.float32) -> jax.Array:
    """One for each device, the same on all of them."""
    return jnp.arange(1, size() + 1, dtype=dtype) / size()


def integers(x: jax.Array) -> jax.Array:
    return jnp.round(x * 100).astype(jnp.int32)


def total(x: jax.Array) -> jax.Array:
    return lax.psum(x, "i")


def special(dtype: Any) -> jax.Array:
    """Gather a row of each device, with the extremes of every kind of number."""
    return gather(jnp.asarray(SPECIAL, dtype)[lax.axis_index("i") % 4])


def looped(step: Callable, x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))[1]


@jax.jit
def halved_mean(x: jax.Array) -> jax.Array:
    return gather(0.5 * x).mean(0)


def halves() -> list[list[int]]:
    return [list(range(size() // 2)), list(range(size() // 2, size()))]


INF, NAN = np.inf, np.nan
SPECIAL = [
    [1.0, NAN, -INF, INF, -0.0, -1.5, 6e4, 6e-8],
    [2.0, 1.0, -INF, 1.0, 0.0, -2.5, -6e4, -6e-8],
    [0.5, -INF, -INF, -INF, -0.0, -0.5, 0.0, 0.0],
    [2.0, INF, -INF, 7.0, 0.0, -9.5, 1.0, 0.0],
]
FLOATS, OTHERS = (jnp.float32, jnp.bfloat16, jnp.float16), (jnp.int8, jnp.uint8, jnp.bool_)
MATRIX = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(3, 2)
BF16 = jnp.bfloat16
DIFFERS = " mixes the gathered value with one that may differ between the devices of 'i'"
WHOLE = " takes the gathered value whole: reduce before it, or gather inside"
LEAVES = "the gathered value leaves the shard_map whole"

CASES: dict[str, Case] = {
    # ---- sums and means
    "mean": rewritten(lambda x: jnp.mean(gather(x), 0)),
    "mean of tiled": rewritten(lambda x: gather(x, tiled=True).reshape(size(), *x.shape).mean(0)),
    "mean of all rows": rewritten(lambda x: gather(x, tiled=True).mean(0)),
    "sum": rewritten(lambda x: gather(x).sum(0)),
    "mean of everything": rewritten(lambda x: gather(x).mean()[None]),
    "mean that keeps dimensions": rewritten(lambda x: gather(x).mean(0, keepdims=True)),
    "sum of integers": exact(lambda x: gather(integers(x)).sum(0), differentiable=False),
    "bfloat16 mean": rewritten(lambda x: gather(x.astype(BF16)).mean(0), tolerance=8e-3),
    "bfloat16 sum without conversion": kept(
        "reduce_sum", lambda x: lax.reduce_sum(gather(x.astype(BF16)), [0])
    ),
    "mean in groups": kept(
        "it gathers in groups of devices",
        lambda x: lax.all_gather(x, "i", axis_index_groups=halves()).mean(0),
        typed=False,
    ),
    # ---- extremes, and what has no collective
    "max": exact(lambda x: gather(x).max(0)),
    "min of turned signs": exact(lambda x: (-gather(x)).min(0)),
    "max of sines": rewritten(lambda x: jnp.sin(gather(x)).max(0)),
    "max of special numbers": exact(
        lambda x: [special(dtype).max(0) for dtype in FLOATS], 3, differentiable=False
    ),
    "min of special numbers": exact(
        lambda x: [special(dtype).min(0) for dtype in FLOATS], 3, differentiable=False
    ),
    "max of other types": exact(
        lambda x: [gather(integers(x).astype(dtype)).max(0) for dtype in OTHERS],
        3,
        differentiable=False,
    ),
    "product": kept("reduce_prod", lambda x: gather(x).prod(0)),
    "argmax": kept("argmax", lambda x: gather(x).argmax(0), differentiable=False),
    "sort": kept("sort", lambda x: jnp.sort(gather(x), 0)[0]),
    "padded rows": kept("pad", lambda x: jnp.pad(gather(x), [(0, 0), (1, 0), (0, 0)]).sum(0)),
    "max of float8": kept(
        "reduce_max",
        lambda x: gather(x.astype(jnp.float8_e4m3fn)).max(0).astype(x.dtype),
        differentiable=False,
    ),
    "max of a weak type": kept(
        "reduce_max over devices gives another type",
        lambda x: lax.reduce_max(gather(jnp.asarray(2.0)), [0]) + x,
    ),
    # ---- mixed with values that all devices share
    "own transpose": kept(
        "add mixes values that are gathered in different ways",
        lambda x: (lambda g: (g + g.transpose(1, 0, 2)).sum(0))(
            gather(jnp.ones((size(), 1)) * x[0])
        ),
    ),  # fmt: skip
    "through functions": rewritten(lambda x: jnp.square(jax.nn.gelu(jnp.tanh(gather(x)))).sum(0)),
    "scale of this device": kept(
        f"mul{DIFFERS}", lambda x: (gather(x) * (lax.axis_index("i") + 1.0)).sum(0)
    ),
    "times this device's block": kept(f"mul{DIFFERS}", lambda x: (gather(x) * x[None]).sum(0)),
    # ---- weights and products
    "einsum with weights": rewritten(lambda x: jnp.einsum("i,i...->...", weights(), gather(x))),
    "weights of this device": kept(
        f"dot_general{DIFFERS}",
        lambda x: jnp.einsum("i,i...->...", weights() + lax.axis_index("i"), gather(x)),
    ),
    "gathered weights": rewritten(lambda x: jnp.einsum("i,i...", gather(x[0, 0]), gather(x))),
    "weighted by gathered": rewritten(lambda x: (gather(x) * gather(jnp.abs(x) + 1)).sum(0)),
    "bfloat16 product": rewritten(
        lambda x: jnp.einsum("i,i...->...", weights(BF16), gather(x.astype(BF16))), tolerance=8e-3
    ),
    "times matrix": kept("dot_general", lambda x: (gather(x) @ MATRIX).sum(0)),
    "gram": kept("dot_general", lambda x: (lambda g: (g @ g.T).sum(0))(gather(x[0]))),
    "scores times long noise": kept(
        "a psum of the product would send more than the gather",
        lambda x: gather(x[0, 0]) @ jnp.ones((size(), 1000)),
    ),
    # ---- several reductions of one gather
    "variance": rewritten(lambda x: jnp.var(gather(x), 0), 2),
    "logsumexp": rewritten(lambda x: jax.nn.logsumexp(gather(x), 0), 2),
    "softmax": rewritten(lambda x: (lambda g: (jax.nn.softmax(g, 0) * g).sum(0))(gather(x)), 3),
    "mean of squares": rewritten(lambda x: (gather(x) ** 2).mean(0)),
    "norm": rewritten(lambda x: jnp.linalg.norm(gather(x), axis=0)),
    "transposed": rewritten(lambda x: gather(x).transpose(2, 0, 1).mean(1)),
    # ---- what needs the whole value
    "relu": kept(f"relu{WHOLE}", lambda x: jax.nn.relu(gather(x)).mean(0)),
    "mean over another dimension": kept(LEAVES, lambda x: gather(x).mean(1)),
    "first device": kept("slice", lambda x: gather(x)[0]),
    "own block": kept("dynamic_slice", lambda x: gather(x)[lax.axis_index("i")]),
    "also used elsewhere": kept("slice", lambda x: (lambda g: g.mean(0) + g[1])(gather(x))),
    "one of two kept": kept(
        "slice", lambda x: gather(x).mean(0) + gather(2 * x)[0], reductions=1, tolerance=1e-6
    ),
    "merged under rows": kept("reshape", lambda x: gather(x, axis=1).reshape(-1, 3).mean(0)),
    # ---- bodies in bodies
    "inside jit": rewritten(lambda x: jax.jit(lambda x: gather(x).mean(0))(x)),
    "inside a jit called twice": rewritten(lambda x: halved_mean(halved_mean(x) + x), 2),
    "inside a jit of constants": rewritten(
        lambda x: x * halved_mean(2.0) + halved_mean(3.0), 2, typed=False
    ),
    "gather in jit": rewritten(lambda x: jax.jit(gather)(x).mean(0)),
    "inside scan": rewritten(
        lambda x: lax.scan(lambda c, y: (c + gather(c + y).mean(0), None), x, jnp.arange(3.0))[0]
    ),
    "a carry that comes to differ": kept(
        f"mul{DIFFERS}",
        lambda x: lax.scan(lambda c, _: (c + x, (gather(x) * c).sum(0)), MATRIX.T, length=2)[1],
        typed=False,
    ),
    "outside scan": kept(
        f"scan{WHOLE}",
        lambda x: (lambda g: lax.scan(lambda c, y: (c + g.mean(0) * y, None), x, jnp.ones(3))[0])(
            gather(x)
        ),
    ),  # fmt: skip
    "inside while": rewritten(
        lambda x: looped(lambda x: x + gather(x).mean(0), x), differentiable=False
    ),
    "inside cond": rewritten(
        lambda x: lax.cond(total(x.sum()) > 0, lambda x: x, lambda x: gather(x).mean(0), x), 2
    ),
    "inside checkpoint": rewritten(lambda x: jax.checkpoint(lambda x: gather(x).mean(0))(x)),
    "outside checkpoint": kept(
        f"checkpoint{WHOLE}", lambda x: jax.checkpoint(lambda g: g.mean(0))(gather(x))
    ),
    "inside vmap": rewritten(lambda x: jax.vmap(lambda row: gather(row).mean(0))(x)),
}
