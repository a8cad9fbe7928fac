"""Bodies that gather, each with what has to become of it: collectives counted, reasons in words.

A body takes this device's block `x`, `[2, 3]` of f32, and gives one array. The axis is `i`; on four
devices it has the size 4, on eight 8. In a case that is refused, the line that forces the gather
ends in the comment `# forces`.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Body = Callable[[jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Count:
    """Collectives in a program."""

    gathers: int = 0
    reductions: int = 0
    scatters: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    body: Body
    before: Count
    after: Count
    why: str  # of the refusal; "" where it is rewritten
    tolerance: float  # of sums in another order, relative to the largest value; 0: bit-equal
    typed: bool  # whether it can be written under check_vma=True
    differentiable: bool

    def forced_at(self) -> str:
        """The line with the comment, as a finding names it."""
        lines, first = inspect.getsourcelines(self.body)
        (place,) = [k for k, line in enumerate(lines) if line.rstrip().endswith("# forces")]
        return f"tests/passes/gather_cases.py:{first + place}"


CASES: list[Case] = []


def rewritten(
    *,
    reductions: int,
    gathers: int = 1,
    before: Count | None = None,
    tolerance: float = 1e-6,
    typed: bool = True,
    differentiable: bool = True,
) -> Callable[[Body], Body]:
    """All gathers go."""

    def register(body: Body) -> Body:
        had = before or Count(gathers=gathers)
        after = Count(reductions=reductions)
        CASES.append(
            Case(
                name=_name(body),
                body=body,
                before=had,
                after=after,
                why="",
                tolerance=tolerance,
                typed=typed,
                differentiable=differentiable,
            )
        )
        return body

    return register


def kept(
    why: str,
    *,
    before: Count = Count(gathers=1),  # noqa: B008
    after: Count | None = None,
    tolerance: float = 0.0,
    differentiable: bool = True,
    typed: bool = True,
) -> Callable[[Body], Body]:
    """Refused at the marked line; `after` if another gather goes."""

    def register(body: Body) -> Body:
        count = after or before
        CASES.append(
            Case(
                name=_name(body),
                body=body,
                before=before,
                after=count,
                why=why,
                tolerance=tolerance,
                typed=typed,
                differentiable=differentiable,
            )
        )
        return body

    return register


def _name(body: Body) -> str:
    return body.__name__.strip("_").replace("_", " ")


def gather(x: jax.Array, **options: Any) -> jax.Array:
    return lax.all_gather(x, "i", **options)


def each_device(size: int, dtype: Any = jnp.float32) -> jax.Array:
    """A weight for each device, the same on all of them, `[size]`."""
    return jnp.arange(1, size + 1, dtype=dtype) / size


# ---- sums and means


@rewritten(reductions=1)
def mean(x):
    return jnp.mean(gather(x), 0)


@rewritten(reductions=1)
def method_mean(x):
    return gather(x).mean(0)


@rewritten(reductions=1)
def tiled_and_reshaped_mean(x):
    whole = gather(x, tiled=True)
    return whole.reshape(lax.axis_size("i"), *x.shape).mean(0)


@rewritten(reductions=1)
def mean_of_all_rows(x):
    return gather(x, tiled=True).mean(0)


@rewritten(reductions=1)
def average(x):
    return jnp.average(gather(x), 0)


@rewritten(reductions=1)
def sum_(x):
    return gather(x).sum(0)


@rewritten(reductions=1)
def sum_divided(x):
    return gather(x).sum(0) / lax.axis_size("i")


@rewritten(reductions=1)
def sum_times_a_fraction(x):
    return gather(x).sum(0) * (1 / lax.axis_size("i"))


@rewritten(reductions=1)
def mean_over_devices_and_rows(x):
    return gather(x).mean((0, 1))


@rewritten(reductions=1)
def mean_over_rows_then_devices(x):
    return gather(x).mean(1).mean(0)


@rewritten(reductions=1)
def mean_of_everything(x):
    return gather(x).mean()[None]


@rewritten(reductions=1)
def mean_that_keeps_dimensions(x):
    return gather(x).mean(0, keepdims=True)


@rewritten(reductions=1)
def gather_into_the_second_dimension(x):
    return gather(x, axis=1).mean(1)


@rewritten(reductions=1)
def gather_into_the_last_dimension(x):
    return gather(x, axis=-1).mean(-1)


@rewritten(reductions=2, gathers=2)
def mean_of_a_tree(x):
    tree = {"row": x[0], "column": x[:, 0]}
    return jax.tree.map(lambda leaf: gather(leaf).mean(0), tree)


@rewritten(reductions=1, tolerance=0.0, differentiable=False)
def sum_of_integers(x):
    return gather(_integers(x)).sum(0)


@rewritten(reductions=1, differentiable=False)
def mean_of_integers(x):
    return gather(_integers(x)).mean(0)


@rewritten(reductions=1, tolerance=8e-3)
def bfloat16_mean(x):
    return gather(x.astype(jnp.bfloat16)).mean(0)


@rewritten(reductions=1, tolerance=8e-3)
def bfloat16_sum(x):
    return gather(x.astype(jnp.bfloat16)).sum(0)


@kept(
    "a sum in bfloat16 depends on the order of its terms: convert to float32 first, as jnp.sum and "
    "jnp.mean do"
)
def bfloat16_sum_without_conversion(x):
    whole = gather(x.astype(jnp.bfloat16))
    return lax.reduce_sum(whole, [0])  # forces


@kept("it gathers in groups of devices", typed=False)
def mean_in_groups(x):
    half = lax.axis_size("i") // 2
    groups = [list(range(half)), list(range(half, 2 * half))]
    return lax.all_gather(x, "i", axis_index_groups=groups).mean(0)  # forces


# ---- extremes


@rewritten(reductions=1, tolerance=0.0)
def max_(x):
    return gather(x).max(0)


@rewritten(reductions=1, tolerance=0.0)
def min_(x):
    return gather(x).min(0)


@rewritten(reductions=1, tolerance=0.0, differentiable=False)
def max_of_integers(x):
    return gather(_integers(x)).max(0)


@rewritten(reductions=1, tolerance=0.0, differentiable=False)
def max_of_booleans(x):
    return gather(x > 0).max(0)


@rewritten(reductions=1, tolerance=0.0)
def max_of_rows(x):
    return gather(x, tiled=True).max(0)


@kept("reduce_prod of the gathered dimension has no matching collective")
def product(x):
    return gather(x).prod(0)  # forces


@kept("reduce_or of the gathered dimension has no matching collective", differentiable=False)
def any_(x):
    return (gather(x) > 1).any(0)  # forces


@kept("reduce_and of the gathered dimension has no matching collective", differentiable=False)
def all_(x):
    return (gather(x) > 1).all(0)  # forces


@kept("argmax of the gathered dimension has no matching collective", differentiable=False)
def argmax(x):
    return gather(x).argmax(0)  # forces


@kept("sort needs the whole gathered value")
def sort(x):
    return jnp.sort(gather(x), 0)[0]  # forces


@kept("cumsum of the gathered dimension has no matching collective")
def running_sum(x):
    return jnp.cumsum(gather(x), 0)[-1]  # forces


@kept("reduce_window_max needs the whole gathered value")
def pooled_rows(x):
    window = (1, 1, 2)
    pooled = lax.reduce_window(gather(x), -jnp.inf, lax.max, window, (1, 1, 1), "VALID")  # forces
    return pooled.sum(0)


@kept("pad needs the whole gathered value")
def padded_rows(x):
    return jnp.pad(gather(x), [(0, 0), (1, 0), (0, 0)]).sum(0)  # forces


# ---- what is made of values that all devices share

_WITH_SUM = Count(gathers=1, reductions=1)


@rewritten(reductions=2, before=_WITH_SUM)
def times_a_solution(x):
    total = lax.psum(x, "i")
    return (gather(x) @ jnp.linalg.solve(jnp.eye(3) * 9 + total.T @ total, jnp.eye(3))).sum(0)


@rewritten(reductions=2, before=_WITH_SUM)
def times_functions(x):
    total = lax.psum(x, "i")
    return (gather(x) * jax.nn.softplus(total) * jnp.log2(jnp.square(total) + 1)).sum(0)


@rewritten(reductions=1, differentiable=False)
def times_random_integers(x):
    numbers = jax.random.randint(jax.random.key(3), x.shape, 1, 9)
    return (gather(x) * (numbers + jax.random.poisson(jax.random.key(4), 3.0, x.shape))).sum(0)


@rewritten(reductions=1)
def through_functions(x):
    return jnp.log2(1 + jnp.square(jax.nn.gelu(jnp.tanh(gather(x))))).sum(0)


@rewritten(reductions=2)  # one is of the loss, which nobody reads
def gradient_through_functions(x):
    loss = lambda x: jax.nn.gelu(jnp.tanh(x)).sum()
    return jax.grad(loss)(gather(x)).mean(0)


# ---- weights and products


@rewritten(reductions=1)
def einsum(x):
    return jnp.einsum("i...->...", gather(x))


@rewritten(reductions=1)
def einsum_with_weights(x):
    return jnp.einsum("i,i...->...", each_device(lax.axis_size("i")), gather(x))


@rewritten(reductions=1)
def tensordot(x):
    size = lax.axis_size("i")
    return jnp.tensordot(jnp.ones(size) / size, gather(x), 1)


@rewritten(reductions=1)
def average_with_weights(x):
    return jnp.average(gather(x), 0, weights=each_device(lax.axis_size("i")))


@rewritten(reductions=1)
def average_with_captured_weights(x):
    return jnp.average(gather(x), 0, weights=_CAPTURED[: lax.axis_size("i")])


@kept("dot_general mixes the gathered value with one that may differ between the devices of 'i'")
def weights_of_this_device(x):
    weights = each_device(lax.axis_size("i")) + lax.axis_index("i")
    return jnp.einsum("i,i...->...", weights, gather(x))  # forces


@rewritten(reductions=1, gathers=2)
def gathered_weights(x):
    return jnp.einsum("i,i...->...", gather(x[0, 0]), gather(x))


@rewritten(reductions=1, gathers=2)
def weighted_mean_of_gathered_weights(x):
    whole, weights = gather(x), gather(jnp.abs(x) + 1)
    return (whole * weights).sum(0)


@rewritten(reductions=1, tolerance=8e-3)
def bfloat16_product(x):
    weights = each_device(lax.axis_size("i"), jnp.bfloat16)
    return jnp.einsum("i,i...->...", weights, gather(x.astype(jnp.bfloat16)))


@rewritten(reductions=1)
def gathered_times_matrix(x):
    return (gather(x) @ _MATRIX).sum(0)


@kept("dot_general is an outer product of two gathered operands")
def gram(x):
    whole = gather(x[0])
    return (whole @ whole.T).sum(0)  # forces


@rewritten(reductions=1, gathers=2)
def masked(x):
    return jnp.where(gather(x > 0), gather(x), 0.0).sum(0)


@kept("mul mixes the gathered value with one that may differ between the devices of 'i'")
def mask_of_this_device(x):
    mask = jnp.arange(lax.axis_size("i")) == lax.axis_index("i")
    return (gather(x) * mask[:, None, None]).sum(0)  # forces


@kept("mul mixes the gathered value with one that may differ between the devices of 'i'")
def scale_of_this_device(x):
    return (gather(x) * (lax.axis_index("i") + 1.0)).sum(0)  # forces


@kept("mul mixes the gathered value with one that may differ between the devices of 'i'")
def one_row_of_this_device(x):
    return (gather(x) * x[None]).sum(0)  # forces


@rewritten(reductions=1)
def random_mask(x):
    size = lax.axis_size("i")
    mask = jax.random.bernoulli(jax.random.key(7), 0.5, (size, *x.shape))
    return (gather(x) * mask).sum(0)


@kept("mul mixes the gathered value with one that may differ between the devices of 'i'")
def random_mask_of_this_device(x):
    key = jax.random.fold_in(jax.random.key(7), lax.axis_index("i"))
    mask = jax.random.bernoulli(key, 0.5, (lax.axis_size("i"), *x.shape))
    return (gather(x) * mask).sum(0)  # forces


# ---- several reductions of one gather


@rewritten(reductions=2)
def variance(x):
    return jnp.var(gather(x), 0)


@rewritten(reductions=2)
def deviation(x):
    return jnp.std(gather(x), 0)


@rewritten(reductions=2)
def variance_of_rows(x):
    return jnp.var(gather(x, tiled=True), 0)


@rewritten(reductions=2)
def logsumexp(x):
    return jax.nn.logsumexp(gather(x), 0)


@rewritten(reductions=3)
def softmax_of_gathered(x):
    whole = gather(x)
    return (jax.nn.softmax(whole, 0) * whole).sum(0)


@rewritten(reductions=1)
def mean_of_squares(x):
    return (gather(x) ** 2).mean(0)


@rewritten(reductions=1)
def norm(x):
    return jnp.linalg.norm(gather(x), axis=0)


@kept(
    "relu has its own rule of differentiation, which is for the whole value: apply it to the "
    "block, before the gather"
)
def relu_then_mean(x):
    return jax.nn.relu(gather(x)).mean(0)  # forces


@rewritten(reductions=1)
def transposed_mean(x):
    return gather(x).transpose(2, 0, 1).mean(1)


@rewritten(reductions=1, gathers=2)
def two_gathers_side_by_side(x):
    return jnp.concatenate([gather(x), gather(2 * x)], 2).mean(0)


@rewritten(reductions=1, gathers=2)
def two_gathers_stacked(x):
    return jnp.stack([gather(x), gather(2 * x)]).mean(1)


# ---- what needs the whole value


@kept("the gathered value leaves the shard_map whole")
def mean_over_another_dimension(x):
    return gather(x).mean(1)  # forces


@kept("slice of the gathered dimension")
def first_device(x):
    return gather(x)[0]  # forces


@kept("slice of the gathered dimension")
def also_used_elsewhere(x):
    whole = gather(x)
    return whole.mean(0) + whole[1]  # forces


@kept("the gathered value leaves the shard_map whole")
def also_returned(x):
    whole = lax.all_gather(x, "i")  # forces
    return {"mean": whole.mean(0), "whole": whole}


@kept(
    "slice of the gathered dimension",
    before=Count(gathers=2),
    after=Count(gathers=1, reductions=1),
    tolerance=1e-6,
)
def two_gathers_one_kept(x):
    doubled = gather(2 * x)
    return gather(x).mean(0) + doubled[0]  # forces


@kept("slice of the gathered dimension", before=Count(gathers=2))
def equal_gathers_one_kept(x):
    return gather(x).mean(0) + gather(x)[0]  # forces


@kept("reshape merges the gathered dimension under a more major one")
def merged_under_rows(x):
    return gather(x, axis=1).reshape(-1, 3).mean(0)  # forces


@kept("dynamic_slice needs the whole gathered value")
def own_block(x):
    return gather(x)[lax.axis_index("i")]  # forces


# ---- bodies in bodies


@rewritten(reductions=1)
def inside_jit(x):
    return jax.jit(lambda x: gather(x).mean(0))(x)


@rewritten(reductions=1)
def gather_in_jit_mean_outside(x):
    return jax.jit(gather)(x).mean(0)


@rewritten(reductions=1)
def gather_outside_jit_mean_inside(x):
    return jax.jit(lambda whole: whole.mean(0))(gather(x))


@rewritten(reductions=1)
def inside_scan(x):
    def step(carry, row):
        return carry + gather(carry + row).mean(0), carry.sum()

    return lax.scan(step, x, jnp.arange(3.0))[0]


@kept(
    "the gather is outside the scan and its use inside: a reduction over devices would run in "
    "every iteration"
)
def gather_outside_scan(x):
    whole = gather(x)
    return lax.scan(lambda c, row: (c + whole.mean(0) * row, None), x, jnp.arange(3.0))[0]  # forces


@rewritten(reductions=1, differentiable=False)
def inside_while(x):
    def step(state):
        count, x = state
        return count + 1, x + gather(x).mean(0)

    return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]


@kept(
    "the gather is outside the while loop and its use inside: a reduction over devices would run "
    "in every iteration",
    differentiable=False,
)
def gather_outside_while(x):
    whole = gather(x)

    def step(state):
        count, x = state
        return count + 1, x + whole.mean(0)

    return lax.while_loop(lambda state: state[0] < 3, step, (0, x))[1]  # forces


@rewritten(reductions=2, before=Count(gathers=1, reductions=1))
def inside_cond(x):
    positive = lax.psum(x.sum(), "i") > 0
    return lax.cond(positive, lambda x: gather(x).mean(0), lambda x: x, x)


@kept(
    "the gather is outside the cond and its use inside: a reduction over devices would stand in a "
    "branch that some of them may not take",
    before=Count(gathers=1, reductions=1),
)
def gather_outside_cond(x):
    whole = gather(x)
    positive = lax.psum(x.sum(), "i") > 0
    return lax.cond(positive, lambda: whole.mean(0), lambda: x)  # forces


@rewritten(reductions=1)
def inside_checkpoint(x):
    return jax.checkpoint(lambda x: jnp.sin(gather(x).mean(0)))(x)


@rewritten(reductions=1)
def largest_inside_checkpoint(x):
    return jax.checkpoint(lambda x: jnp.sin(gather(x).max(0)))(x)


@kept("checkpoint takes the gathered value whole: gather inside it")
def gather_outside_checkpoint(x):
    whole = gather(x)
    return jax.checkpoint(lambda whole: jnp.sin(whole.mean(0)))(whole)  # forces


@rewritten(reductions=1)
def inside_vmap(x):
    return jax.vmap(lambda row: gather(row).mean(0))(x)


def _integers(x: jax.Array) -> jax.Array:
    return jnp.round(x * 100).astype(jnp.int32)


_CAPTURED = jnp.asarray(np.linspace(0.5, 2.0, 8), jnp.float32)
_MATRIX = np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(3, 2)
