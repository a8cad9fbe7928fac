"""Messages of JAX that docs/errors.md lists, each with code that raises it and its fix."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_dist

x = np.arange(8.0, dtype=np.float32)  # [8]: one number for each device


@dataclasses.dataclass(frozen=True)
class Case:
    """A message, the code that raises it, and the code that does not.

    Attributes:
      message: as the page quotes it, or a heading of the page if nothing is raised.
      before: raises or warns with the message; None if JAX is silent and `after` shows both.
      after: runs.
      versions: of jax, in which `before` raises.
      also: other words for it in some version.
      is_once: whether it is a warning that a process shows once.
      processes: in how many it must run.
    """

    message: str
    before: Callable[[], object] | None
    after: Callable[[], object]
    versions: tuple[str, ...] = ("0.10.2", "0.12.0.1")
    also: str = ""
    is_once: bool = False
    processes: int = 1


CASES: list[Case] = []


def case(message: str, **options: object) -> Callable[[type], type]:
    """Add a class with `before` and `after` to the table."""

    def add(pair: type) -> type:
        CASES.append(Case(message, vars(pair).get("before"), pair.after, **options))
        return pair

    return add


@case("module 'jax' has no attribute 'tree_map'")
class _:
    def before():
        return jax.tree_map(jnp.sum, {"w": x})

    def after():
        return jax.tree.map(jnp.sum, {"w": x})


@case("jax.device_put_replicated is deprecated; use jax.device_put instead")
class _:
    def before():
        return jax.device_put_replicated(np.ones(3), jax.devices())

    def after():
        stacked = jax_dist.device_put_replicated(np.ones(3), jax.devices())
        whole = jax_dist.replicate(np.ones(3))
        assert (stacked.shape, whole.shape) == ((8, 3), (3,))


@case("jax.device_put_sharded is deprecated; use jax.device_put instead")
class _:
    def before():
        return jax.device_put_sharded([np.ones(3)] * 8, jax.devices())

    def after():
        shards = jax_dist.device_put_sharded([np.ones(3)] * 8, jax.devices())
        assert shards.shape == (8, 3)


@case("module 'jax.sharding' has no attribute 'PmapSharding'")
class _:
    def before():
        return jax.sharding.PmapSharding

    def after():
        mesh = Mesh(np.array(jax.devices()), ("i",))
        return jax.device_put(x, NamedSharding(mesh, P("i")))


@case("module 'jax.sharding' has no attribute 'PositionalSharding'")
class _:
    def before():
        return jax.sharding.PositionalSharding(jax.devices())

    def after():
        mesh = Mesh(np.array(jax.devices()), ("i",))
        return jax.device_put(x, NamedSharding(mesh, P("i")))


@case(
    "Unrecognized config option: jax_pmap_shmap_merge",
    also="'Config' object has no attribute 'jax_pmap_shmap_merge'",
)
class _:
    def before():
        jax.config.update("jax_pmap_shmap_merge", 0)

    def after():
        return jax_dist.pmap(lambda x: 2 * x)(x)


@case("cannot import name 'xla_pmap_p' from 'jax.interpreters.pxla'")
class _:
    def before():
        from jax.interpreters.pxla import xla_pmap_p

        return xla_pmap_p

    def after():
        return jax.make_jaxpr(jax_dist.pmap(lambda x: 2 * x))(x)


def on_each_device(body, **options):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), **options))(x)


@case(
    "has no attribute 'pvary'",
    also="jax.lax.pvary was deprecated in JAX v0.8.2 and removed in JAX v0.10.0",
)
class _:
    def before():
        return on_each_device(lambda x: x + lax.pvary(jnp.float32(1), "i"))

    def after():
        return on_each_device(lambda x: x + jnp.float32(1), check_vma=False)


@case("shard_map() got an unexpected keyword argument 'check_rep'")
class _:
    def before():
        return on_each_device(lambda x: 2 * x, check_rep=False)

    def after():
        return on_each_device(lambda x: 2 * x, check_vma=False)


@case("shard_map() got an unexpected keyword argument 'auto'")
class _:
    def before():
        from jax.experimental.shard_map import shard_map

        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
        body = shard_map(
            lambda x: 2 * x,
            mesh=mesh,
            in_specs=P("a"),
            out_specs=P("a"),
            auto=frozenset({"b"}),
        )
        return jax.jit(body)(x)

    def after():
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
        body = jax.shard_map(
            lambda x: 2 * x,
            mesh=mesh,
            in_specs=P("a"),
            out_specs=P("a"),
            axis_names={"a"},
        )
        return jax.jit(body)(x)


@case("jax.experimental.shard_map is deprecated in v0.8.0", is_once=True)
class _:
    def before():
        from jax.experimental.shard_map import shard_map

        mesh = Mesh(np.array(jax.devices()), ("i",))
        return shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(x)

    def after():
        return on_each_device(lambda x: 2 * x)


@case("make_mesh() got an unexpected keyword argument")
class _:
    def before():
        return jax.make_mesh(shape=(8,), axis_names=("i",))

    def after():
        return jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


@case("cannot import name 'AUTO' from 'jax.experimental.pjit'")
class _:
    def before():
        from jax.experimental.pjit import AUTO

        return AUTO

    def after():
        mesh = Mesh(np.array(jax.devices()), ("i",))
        return jax.jit(jnp.sum, in_shardings=NamedSharding(mesh, P("i")))(x)


@case("'ShapedArray' object has no attribute 'vma'")
class _:
    def before():
        return on_each_device(lambda x: x * len(jax.typeof(x).vma))

    def after():
        return on_each_device(lambda x: x * 1)


@case("with mesh: context manager has been deprecated")
class _:
    def before():
        with Mesh(np.array(jax.devices()), ("i",)):
            return jnp.sum(x)

    def after():
        with jax.set_mesh(Mesh(np.array(jax.devices()), ("i",))):
            return jnp.sum(x)


@case("jax.experimental.pjit.pjit has been deprecated")
class _:
    def before():
        from jax.experimental.pjit import pjit

        return pjit(jnp.sum)(x)

    def after():
        return jax.jit(jnp.sum)(x)


@case("No module named 'jax.experimental.maps'")
class _:
    def before():
        from jax.experimental.maps import xmap

        return xmap

    def after():
        return on_each_device(lambda x: lax.psum(x, "i") + x)


@case("Received incompatible devices for jitted computation")
class _:
    def before():
        on_all = jax.pmap(lambda x: 2 * x)(x)
        return on_all + jax.device_put(jnp.ones(8), jax.devices()[0])

    def after():
        on_all = jax_dist.pmap(lambda x: 2 * x)(x)
        first = jax_dist.unreplicate(on_all)  # lies on one device
        return on_all + jnp.ones(8), first + jax.device_put(jnp.ones(()), jax.devices()[0])


def step(w, x):
    return w + lax.pmean(x, "i")


def twice(pmap):
    mapped = pmap(step, "i")
    w = mapped(np.zeros(8, np.float32), x)[0]
    return mapped(jnp.stack([w] * 8), x)


@case("Sharding passed to jit does not match the sharding on the respective arg")
class _:
    def before():
        return twice(jax.pmap)

    def after():
        assert twice(jax_dist.pmap).tolist() == [7.0] * 8


def nested(pmap):
    inner = pmap(lambda y: lax.psum(y, "j"), "j")
    return pmap(lambda row: inner(row), "i")(x.reshape(2, 4))


@case("should match the mesh passed to shard_map")
class _:
    def before():
        return nested(jax.pmap)

    def after():
        assert nested(jax_dist.pmap).tolist() == [[6.0] * 4, [22.0] * 4]

        with jax.set_mesh(jax.make_mesh((2, 4), ("a", "b"))):
            assert jax_dist.pmap(lambda x: 2 * x)(x).shape == (8,)


@case("cannot select an axis to squeeze out which has size not equal to one")
class _:
    def before():
        return jax.pmap(lambda x: 2 * x)(np.zeros(16))

    def after():
        doubled = jax_dist.pmap(jax.vmap(lambda x: 2 * x))(np.zeros((8, 2)))
        assert doubled.shape == (8, 2)


@case("implies that array axis 0 is partitioned 8 times, but the dimension size is 4")
class _:
    def before():
        return jax.pmap(lambda x, scale: x * scale.sum())(x, np.ones(4))

    def after():
        mapped = jax_dist.pmap(lambda x, scale: x * scale.sum(), in_axes=(0, None))
        assert mapped(x, np.ones(4)).tolist() == [4.0 * k for k in range(8)]


@case("pmap requires at least one argument with a mapped axis")
class _:
    def before():
        return jax.pmap(lambda x: 2 * x)(1.0)

    def after():
        mapped = jax_dist.pmap(lambda x, _: 2 * x, in_axes=(None, 0))
        assert mapped(1.0, np.arange(8)).tolist() == [2.0] * 8


def donated(pmap):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    state = jax.device_put(x, NamedSharding(mesh, P("i")))
    new = pmap(lambda x: x + 1, axis_name="i", donate_argnums=0)(state)
    return state, new


@case("Array has been deleted with shape=float32[8]")
class _:
    def before():
        state, _ = donated(jax.pmap)
        return state + 1

    def after():
        _, new = donated(jax_dist.pmap)
        assert new.tolist() == [k + 1.0 for k in range(8)]


def doubled(mesh):
    body = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    return jax.jit(body)(x)


@case("in_specs passed to shard_map")
class _:
    def before():
        return doubled(jax.make_mesh((8,), ("i",)))

    def after():
        doubled(jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,)))
        return doubled(Mesh(np.array(jax.devices()), ("i",)))


def mean_by(body):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P()))(x)


@case("out_specs which require replication which can't be statically inferred")
class _:
    def before():
        return mean_by(lambda x: jnp.mean(lax.all_gather(x, "i")))

    def after():
        assert float(mean_by(lambda x: lax.pmean(x.sum(), "i"))) == 3.5


def total(start, x):
    return lax.scan(lambda total, _: (total + x.sum(), None), start, length=3)[0][None]


@case("carry input and carry output must have equal types, but they differ")
class _:
    def before():
        return on_each_device(lambda x: total(jnp.float32(0), x))

    def after():
        on_each_device(lambda x: total(0 * x.sum(), x))
        return on_each_device(lambda x: total(jnp.float32(0), x), check_vma=False)


@case("cond branches must have equal output types but they differ")
class _:
    def before():
        return on_each_device(lambda x: lax.cond(1 < 2, lambda: x, lambda: jnp.zeros(1)))

    def after():
        on_each_device(lambda x: lax.cond(1 < 2, lambda: x, lambda: 0 * x))
        return on_each_device(
            lambda x: lax.cond(1 < 2, lambda: x, lambda: jnp.zeros(1)),
            check_vma=False,
        )


def drawn(keys, key_specs):
    def body(key, x):
        return jax.random.gamma(key.reshape(()), x + 1)

    mesh = Mesh(np.array(jax.devices()), ("i",))
    specs = (key_specs, P("i"))
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P("i")))(keys, x)


@case("gamma requires all arguments to have matching type")
class _:
    def before():
        return drawn(jax.random.key(0), P())

    def after():
        return drawn(jax.random.split(jax.random.key(0), 8), P("i"))


def scaled(mesh):
    table = jax.device_put(x, NamedSharding(mesh, P("i")))
    body = jax.shard_map(lambda y: y + table.sum(), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    return jax.jit(body)(jax.device_put(x, NamedSharding(mesh, P("i"))))


@case("Closing over inputs to shard_map where the input is sharded on")
class _:
    def before():
        return scaled(jax.make_mesh((8,), ("i",)))

    def after():
        return scaled(Mesh(np.array(jax.devices()), ("i",)))


@case("out_specs entry which is too long to be compatible with the corresponding output")
class _:
    def before():
        return on_each_device(lambda x: x.sum())

    def after():
        assert on_each_device(lambda x: x.sum()[None]).shape == (8,)


def whole(y):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    return jax.jit(jax.shard_map(lambda y: y, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(y)


@case("argument arrays with axis sizes that are not evenly divisible")
class _:
    def before():
        return whole(np.zeros(9))

    def after():
        return whole(np.zeros(16))


@case("Found an unbound axis name: i")
class _:
    def before():
        return jax.jit(lambda x: lax.psum(x, "i"))(x)

    def after():
        assert jax_dist.pmap(lambda x: lax.psum(x, "i"), "i")(x)[0] == 28
        assert jax.jit(jnp.sum)(x) == 28


def products(mesh):
    rows = jax.device_put(x.reshape(8, 1), NamedSharding(mesh, P("i")))
    return rows @ rows.T


@case("produces an illegally sharded result")
class _:
    def before():
        return products(jax.make_mesh((8,), ("i",)))

    def after():
        return products(Mesh(np.array(jax.devices()), ("i",)))


@case("with_sharding_constraint requires a non-empty mesh in context")
class _:
    def before():
        return jax.jit(lambda x: lax.with_sharding_constraint(x, P("i")))(x)

    def after():
        sharding = NamedSharding(Mesh(np.array(jax.devices()), ("i",)), P("i"))
        return jax.jit(lambda x: lax.with_sharding_constraint(x, sharding))(x)


def half():
    return np.arange(4.0, dtype=np.float32) + 4 * jax.process_index()


def globally(fun, y):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(y)


def whole_array():
    mesh = Mesh(np.array(jax.devices()), ("i",))
    return jax_dist.shard(half(), mesh, P("i"))


@case("spans non-addressable (non process local) devices is not possible", processes=2)
class _:
    def before():
        return np.asarray(whole_array())

    def after():
        from jax.experimental import multihost_utils

        assert multihost_utils.process_allgather(whole_array(), tiled=True).tolist() == x.tolist()


@case("Gathering global non-fully-addressable arrays only supports tiled=True", processes=2)
class _:
    def before():
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(whole_array())

    def after():
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(whole_array(), tiled=True)


@case(
    "A batch of one process where the whole batch is wanted",
    also="argument arrays with axis sizes that are not evenly divisible",
    processes=2,
)
class _:
    def before():
        return globally(lambda y: 2 * y, half())

    def after():
        doubled = globally(lambda y: 2 * y, whole_array())
        assert doubled.shape == (8,)


def sums(pmap):
    total = jax.jit(pmap(lambda x: lax.psum(x, "i"), "i"))(half())
    return [shard.data.item() for shard in total.addressable_shards]


@case("jit(pmap) that reduces over one process only", versions=(), processes=2)
class _:
    def before():
        assert sums(jax.pmap) == [6.0 if jax.process_index() == 0 else 22.0] * 4

    def after():
        assert sums(jax_dist.pmap) == [28.0] * 4


def update(w, x):
    return lax.pmean(jax.grad(lambda w: jnp.sum(w * x))(w), "i")


def by_hand(**options):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    specs = dict(in_specs=(P(), P("i")), out_specs=P())
    return float(jax.jit(jax.shard_map(update, mesh=mesh, **specs, **options))(1.0, x))


@case("Gradients that are N times too large on N devices", versions=())
class _:
    def before():
        assert by_hand() == 28.0

    def after():
        assert by_hand(check_vma=False) == 3.5
        assert jax_dist.pmap(update, "i", in_axes=(None, 0))(1.0, x).tolist() == [3.5] * 8


@case("pmap(out_axes=None) of a value that differs", versions=())
class _:
    def before():
        assert jax.pmap(lambda x: x, out_axes=None)(x + 5) == 5

    def after():
        assert jax_dist.pmap(lambda x: lax.pmean(x, "i"), "i", out_axes=None)(x) == 3.5


def noise(keys):
    return jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)


def third_row(impl, batch):
    keys = jax.random.split(jax.random.key(0, impl=impl), 8)
    return noise(keys[batch])[2 - (batch.start or 0)]


@case("A key of another kind than threefry, under vmap", versions=())
class _:
    def before():
        assert not np.allclose(third_row("rbg", slice(8)), third_row("rbg", slice(1, 8)))

    def after():
        kind = "threefry2x32"
        assert np.allclose(third_row(kind, slice(8)), third_row(kind, slice(1, 8)), rtol=1e-6)


def run_in_processes() -> list[tuple[str, str]]:
    """Return, per case of several processes, the errors of `before` and `after`, or ""."""

    def error(run: Callable[[], object]) -> str:
        try:
            run()
        except BaseException as raised:  # noqa: BLE001 - which error it is, is compared
            return str(raised) or type(raised).__name__
        return ""

    return [(error(case.before), error(case.after)) for case in CASES if case.processes > 1]
