"""What runs in each of two processes, with 4 devices each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_dist.migrate._mapped import mapped


def _own(*shape: int) -> np.ndarray:
    """Other numbers in each process."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 100 * jax.process_index()


def _step(pmap: Callable) -> Any:
    def step(state: Any, batch: Any) -> Any:
        slope = jax.grad(lambda w: jnp.sum((w * batch) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * lax.pmean(slope, "i"), "n": state["n"] + 1}

    call = pmap(step, axis_name="i", donate_argnums=0)
    state = {"w": np.ones((4, 3), np.float32), "n": np.zeros(4, np.int32)}
    for _ in range(3):
        state = call(state, _own(4, 3) / 100)
    return state


def _elsewhere(pmap: Callable) -> Any:
    call = pmap(lambda x, y: x + y, in_axes=(0, None))
    x = jax.device_put(_own(4, 2), jax.local_devices()[1])
    return call(x, jax.device_put(np.ones(2), jax.local_devices()[2]))


_TYPES = (np.int64, np.float64, np.uint8, np.bool_, np.complex128, np.float16, jnp.bfloat16)


CASES: dict[str, Callable[[Callable], Any]] = {
    "a collective and slices": lambda pmap: pmap(
        lambda x: (lax.psum(x, "i"), lax.axis_index("i") + x), "i"
    )(_own(4, 2)),
    "other dimensions": lambda pmap: pmap(lambda x: x, in_axes=1, out_axes=2)(_own(2, 4, 3)),
    "shared": lambda pmap: pmap(
        lambda x, y: (x * y, lax.psum(x, "i")), "i", in_axes=(0, None), out_axes=(0, None)
    )(_own(4, 2), 3.0),
    "keywords and None": lambda pmap: pmap(lambda x, n, *, y: (x + y, n))(_own(4), None, y=_own(4)),
    "static": lambda pmap: pmap(lambda x, n: x * n, static_broadcasted_argnums=1)(_own(4), 3),
    "a size": lambda pmap: pmap(lambda x: lax.psum(x, "i"), "i", axis_size=8)(_own(4)),
    "devices": lambda pmap: pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.devices())(_own(4)),
    "devices of its own": lambda pmap: pmap(
        lambda x: lax.psum(x, "i"), "i", devices=jax.local_devices()
    )(_own(4)),
    "keys": lambda pmap: pmap(lambda key: jax.random.uniform(key, (2,)))(
        jax.random.split(jax.random.key(jax.process_index()), 4)
    ),
    "NumPy of many types and in other orders": lambda pmap: pmap(lambda *xs: xs)(
        [_own(4, 3).astype(x) for x in _TYPES],
        *(_own(3, 4).T, _own(8, 3)[::2], np.asfortranarray(_own(4, 3))),
    ),
    "a training step": _step,
    "what lies elsewhere": _elsewhere,
}


def run() -> dict[str, Any]:
    """All cases, by jax.pmap and by mapped, and what only mapped can say."""
    return {
        "pmap": {name: as_plain(case(jax.pmap)) for name, case in CASES.items()},
        "mapped": {name: as_plain(case(mapped)) for name, case in CASES.items()},
        "fewer": _fewer(),
        "errors": _errors(),
    }


def as_plain(results: Any) -> Any:
    """Return the values, types and devices of what one process gets."""

    def plain(x: Any) -> Any:
        devices = sorted(shard.device.id for shard in x.addressable_shards)
        slices = [np.asarray(shard.data).tolist() for shard in x.addressable_shards]
        return np.shape(x), str(x.dtype), devices, slices

    return [plain(leaf) for leaf in jax.tree.leaves(results)]


def _fewer() -> dict[int, Any]:
    """Return sums over some devices of each process, with the places of these among its own."""
    own = jax.local_devices()
    found: dict[int, Any] = {}
    for size in (4, 2, 4, 1):
        sums = mapped(lambda x: lax.psum(x, "i"), "i")(_own(size))
        places = [own.index(shard.device) for shard in sums.addressable_shards]
        found[size] = sums.tolist(), places
    return found


def _errors() -> dict[str, str]:
    """Return the errors of calls that only one process could follow."""

    def f(x: Any) -> Any:
        return x * 2

    call = mapped(f)
    placed = call(_own(4))
    cases: dict[str, Callable[[], Any]] = {
        "in jit": lambda: jax.jit(call)(_own(4)),
        "in jit, of what it captures": lambda: jax.jit(lambda: call(placed))(),
        "in grad": lambda: jax.grad(lambda x: jnp.sum(call(x)))(jnp.asarray(_own(4))),
        "too many slices": lambda: call(_own(5)),
        "another size": lambda: mapped(f, axis_size=4)(_own(4)),
    }
    errors: dict[str, str] = {}
    for name, case in cases.items():
        try:
            case()
        except (ValueError, NotImplementedError) as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors
