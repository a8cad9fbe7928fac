"""What can be seen of a mapped function, of jax.pmap's beside ours.

    python tests/pmap/observables.py

prints the table of differences in docs/reference/mapping.md. An observable that is not in the table
is the same for both.
"""

import contextlib
import copy
import functools
import gc
import inspect
import io
import logging
import pickle
import re
import traceback
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from watching import compiles_so_far

EIGHT = np.arange(8.0, dtype=np.float32)
_OBSERVABLES: dict[str, Callable[[Callable], Any]] = {}


def observable(title: str) -> Callable:
    """What it gives is compared: a value, or the type of the error, and the warnings."""

    def named(fun: Callable[[Callable], Any]) -> Callable:
        assert title not in _OBSERVABLES
        _OBSERVABLES[title] = fun
        return fun

    return named


def titles() -> list[str]:
    return list(_OBSERVABLES)


def observed(title: str, pmap: Callable) -> str:
    """What is seen of `pmap`, as a cell of the table."""
    with warnings.catch_warnings(record=True) as caught, io.StringIO() as printed:
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(printed):
            try:
                seen = _OBSERVABLES[title](pmap)
            except Exception as error:  # noqa: BLE001  # whatever it is, is compared
                seen = _name_of(error)
            jax.effects_barrier()
        # JAX itself prints the user's line with some errors
        lines = sorted(line for line in printed.getvalue().splitlines() if ".py:" not in line)
    cell = seen if isinstance(seen, str) else _text(seen)
    cell += "".join(f"; prints `{line}`" for line in lines)
    kinds = {each.category.__name__ for each in caught if each.category is not DeprecationWarning}
    return (cell + "".join(f"; warns: {kind}" for kind in sorted(kinds))).replace("|", "\\|")


def table(pmap: Callable) -> list[str]:
    """A row for each observable that differs."""
    rows = ((title, observed(title, jax.pmap), observed(title, pmap)) for title in titles())
    return [f"| {title} | {theirs} | {ours} |" for title, theirs, ours in rows if theirs != ours]


def _name_of(error: Exception) -> str:
    """The type as a user's `except` names it: ours are subclasses of these."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return "JaxRuntimeError"  # which has another name in jax 0.7
    kinds = (kind for kind in type(error).__mro__ if not kind.__module__.startswith("jax_dist"))
    return next(kinds).__name__


def _text(seen: Any) -> str:
    if isinstance(seen, jax.Array | np.ndarray):
        seen = np.asarray(seen).tolist()
    return f"`{seen}`"


def _message(call: Callable[[], Any]) -> str:
    """The first line of the error's message, as far as it fits."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it is, is compared
        first = re.sub(r" to <function .*", " to ...", str(error).splitlines()[0])
        return f"`{first if len(first) < 78 else first[:75] + '...'}`"
    return "no error"


def _says(call: Callable[[], Any], **words: str) -> str:
    """Which of these the error's message has."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it is, is compared
        said = [what for what, word in words.items() if re.search(word, str(error))]
        return f"{_name_of(error)}, names {' and '.join(said) or 'neither'}"
    return "no error"


def _compilations(pmap: Callable, step: Callable) -> int:
    """Of a loop, whose first state lies on one device; those that only move it are left out."""
    batch = np.ones((8, 2), np.float32)
    pmap(lambda x: x)(jnp.zeros(8))
    state = jnp.zeros(8)
    before = compiles_so_far()
    for _ in range(3):
        state = step(state, batch)
    return compiles_so_far() - before


# ---- calls and where things lie


@observable("a sum over the devices")
def _(pmap):
    return pmap(lambda x: lax.psum(x, "i"), "i")(EIGHT)


@observable("pmap inside pmap")
def _(pmap):
    inner = pmap(lambda y: lax.psum(y, ("i", "j")), "j")
    return pmap(lambda x: inner(x), "i")(EIGHT.reshape(2, 4))


@observable("pmap inside pmap, as a type")
def _(pmap):
    inner = pmap(lambda y: y[0], "j")
    return jax.eval_shape(pmap(lambda x: inner(x), "i"), np.ones((2, 4, 3))).shape


@observable("an array on another device")
def _(pmap):
    return pmap(lambda x: x + 1)(jax.device_put(EIGHT, jax.devices()[3]))


@observable("the same, donated: what becomes of the array")
def _(pmap):
    array = jax.device_put(jnp.asarray(EIGHT), jax.devices()[0])
    jax.block_until_ready(pmap(lambda x: x + 1, donate_argnums=0)(array))
    return "deleted" if array.is_deleted() else "kept"


@observable("an array on another mesh")
def _(pmap):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    spec = jax.sharding.PartitionSpec(("b", "a"))
    array = jax.device_put(EIGHT, jax.sharding.NamedSharding(mesh, spec))
    return pmap(lambda x: x + lax.axis_index("i"), "i")(array)


@observable("a call under `jax.set_mesh` of another mesh")
def _(pmap):
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))):
        return pmap(lambda x: lax.psum(x, "i"), "i")(EIGHT)


@observable("the same under `jit`")
def _(pmap):
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))):
        return jax.jit(pmap(lambda x: lax.psum(x, "i"), "i"))(EIGHT)


@observable("compilations of a loop, its first state on one device")
def _(pmap):
    return _compilations(pmap, pmap(lambda state, batch: state + batch.sum()))


@observable("the same with a donated state")
def _(pmap):
    step = pmap(lambda state, batch: state + batch.sum(), donate_argnums=0)
    return _compilations(pmap, step)


@observable("how often the Python of that loop's step runs")
def _(pmap):
    runs = []
    step = pmap(lambda state: (runs.append(1), state + 1)[1], donate_argnums=0)
    state = jnp.zeros(8)
    for _ in range(3):
        state = step(state)
    return len(runs)


@observable("the name of an axis without a name, as in `result.sharding.spec`")
def _(pmap):
    return tuple(pmap(lambda x: x)(EIGHT).sharding.spec)


@observable("the devices of a result, in order")
def _(pmap):
    result = pmap(lambda x: x, devices=jax.devices()[4:])(EIGHT[:4])
    shards = sorted(result.addressable_shards, key=lambda s: s.index[0].start or 0)
    return [shard.device.id for shard in shards]


@observable("the name of a result's axis")
def _(pmap):
    return tuple(pmap(lambda x: x, "batch")(EIGHT).sharding.spec)


@observable("weak types")
def _(pmap):
    results = pmap(lambda w, x: (1.0, w, x), in_axes=(None, 0))(2.0, EIGHT)
    return [(each.weak_type, str(each.dtype), each.shape) for each in results]


@observable("`jax.default_device` around a call")
def _(pmap):
    with jax.default_device(jax.devices()[3]):
        return sorted(each.id for each in pmap(lambda x: x)(EIGHT[:2]).devices())


@observable("x64 turned on between calls")
def _(pmap):
    double = pmap(lambda x: x * 2)
    found = [str(double(np.arange(8.0)).dtype)]
    with jax.enable_x64(True):  # noqa: FBT003
        found.append(str(double(np.arange(8.0)).dtype))
    return [*found, str(double(np.arange(8.0)).dtype)]


# ---- options


@observable("`out_axes=-1` of rows of 3: the shape")
def _(pmap):
    return pmap(lambda x: x, out_axes=-1)(np.ones((8, 3))).shape


@observable("`in_axes=[0, None]`, a list")
def _(pmap):
    return pmap(lambda x, y: x + y, in_axes=[0, None])(EIGHT, 1.0)


@observable("`in_axes=(0, 0)` behind a static argument")
def _(pmap):
    add = pmap(lambda x, y, z: y + z + x, in_axes=(0, 0), static_broadcasted_argnums=0)
    return add(1.0, EIGHT, EIGHT)


@observable("axes in a dictionary that is changed after a call")
def _(pmap):
    axes = {"x": 0}
    double = pmap(lambda batch: batch["x"] * 2, in_axes=(axes,))
    first = double({"x": EIGHT}).shape
    axes["x"] = None
    try:
        return first, double({"x": EIGHT}).shape
    except ValueError:
        return first, "nothing is mapped"


@observable("`in_axes=-1` of `[3, 8]`: the shape")
def _(pmap):
    return pmap(lambda x: x, in_axes=-1)(np.ones((3, 8))).shape


@observable("4 devices for an axis of 2")
def _(pmap):
    devices = jax.devices()[:4]
    return sorted(each.id for each in pmap(lambda x: x, devices=devices)(EIGHT[:2]).devices())


@observable("16 slices on 8 devices")
def _(pmap):
    return pmap(lambda x: x)(np.arange(16.0))


@observable("the same with `virtual=True`")
def _(pmap):
    return pmap(lambda x: lax.psum(x, "i"), "i", virtual=True)(np.arange(16.0))[0]


@observable('`@pmap(axis_name="i")`')
def _(pmap):
    return pmap(axis_name="i")(lambda x: lax.psum(x, "i"))(EIGHT)


@observable("`donate_argnums=-1`")
def _(pmap):
    return pmap(lambda x: x, donate_argnums=-1)(EIGHT)


@observable("`static_broadcasted_argnums=-1`")
def _(pmap):
    return pmap(lambda x, n: x * n, static_broadcasted_argnums=-1)(EIGHT, 2)


@observable("a static argument")
def _(pmap):
    return pmap(lambda x, n: x * n, static_broadcasted_argnums=1)(EIGHT, 2)


@observable("arguments by keyword")
def _(pmap):
    return pmap(lambda x, *, y: x * y)(EIGHT, y=EIGHT)


@observable("`out_axes=None`")
def _(pmap):
    return pmap(lambda x: lax.pmax(x, "i"), "i", out_axes=None)(EIGHT)


# ---- what is done on the way


@observable("a captured array of 1 kB")
def _(pmap):
    table = jnp.arange(256.0)
    return pmap(lambda k: table[k])(np.arange(8))


@observable("whether a captured array goes with the function")
def _(pmap):
    def made():
        table = jnp.arange(1000.0)
        pmap(lambda k: table[k])(np.arange(8))
        return weakref.ref(table)

    freed = made()
    gc.collect()
    return freed() is None


@observable("whether the function itself goes")
def _(pmap):
    def made():
        def double(x):
            return 2 * x

        pmap(double)(EIGHT)
        return weakref.ref(double)

    freed = made()
    gc.collect()
    return freed() is None


@observable("collectives of an `all_gather` that is only summed")
def _(pmap):
    mapped = pmap(lambda x: lax.all_gather(x, "i").sum(axis=0), "i")
    program = mapped.lower(np.ones((8, 3), np.float32)).compile().as_text()
    return ", ".join(sorted(set(re.findall(r"\b(all-\w+)\(", program))))


# ---- inside other transforms


@observable("under `jit` and `scan`")
def _(pmap):
    mapped = pmap(lambda x: x + lax.pmean(x, "i"), "i")
    return jax.jit(lambda x: lax.scan(lambda c, _: (mapped(c), None), x, length=2)[0])(EIGHT)


@observable("`grad` around it")
def _(pmap):
    mapped = pmap(lambda x: lax.psum(x, "i") ** 2, "i")
    return jax.grad(lambda x: mapped(x).sum())(EIGHT)


@observable("`grad` inside it")
def _(pmap):
    return pmap(jax.grad(lambda w: lax.psum(w**2, "i")), "i")(EIGHT)


@observable("`vmap` around it that has the same axis name")
def _(pmap):
    rows = EIGHT + 100 * np.arange(2.0, dtype=np.float32)[:, None]
    return jax.vmap(pmap(lambda x: lax.psum(x, "i"), "i"), axis_name="i")(rows)[:, :2]


@observable("ordered callbacks: what each device says, in order")
def _(pmap):
    from jax.experimental import io_callback

    def body(x):
        for step in range(3):
            io_callback(lambda x, step=step: heard.append((int(x), step)), None, x, ordered=True)
        return x

    heard = []
    pmap(body)(EIGHT).block_until_ready()
    jax.effects_barrier()
    return {device: [step for x, step in heard if x == device] for device in range(8)}


@observable("`jax.debug.breakpoint` inside it")
def _(pmap):
    def body(x):
        doubled = x * 2
        jax.debug.breakpoint(stdin=io.StringIO("p doubled\nc\n"), stdout=said, backend="cli")
        return doubled

    said = io.StringIO()
    pmap(body)(EIGHT[3:4]).block_until_ready()
    jax.effects_barrier()
    return said.getvalue()


@observable("`checkify` inside it")
def _(pmap):
    from jax.experimental import checkify

    def body(x):
        checkify.check(x < 7, "too big: {x}", x=x)
        return x

    return str(pmap(checkify.checkify(body))(EIGHT)[0].get())[:40]


@observable("`custom_vjp` in it")
def _(pmap):
    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (x**3, x), lambda x, cotangent: (5.0 * cotangent * x,))
    return pmap(jax.grad(cube))(EIGHT)


# ---- looking at it


@observable("attributes")
def _(pmap):
    return [name for name in dir(pmap(lambda x: x)) if not name.startswith("_")]


@observable("its class")
def _(pmap):
    return type(pmap(lambda x: x)).__name__


@observable("name, doc, signature, annotations")
def _(pmap):
    def step(x: int) -> int:
        """Adds."""
        return x + 1

    mapped = pmap(step)
    signature = str(inspect.signature(mapped))
    kept = mapped.__wrapped__ is step, mapped.__annotations__ == step.__annotations__
    return mapped.__name__, mapped.__doc__, signature, *kept


@observable("the name of the program")
def _(pmap):
    def step(x):
        return 2 * x

    found = re.search(r"module @(\w+)", pmap(step).lower(EIGHT).as_text())
    return f"`{found[1]}`"


@observable("the names of its operations")
def _(pmap):
    def step(x):
        with jax.named_scope("part"):
            return jnp.sin(x)

    program = pmap(step).lower(EIGHT).compile().as_text()
    return ", ".join(
        f"`{name}`" for name in sorted(set(re.findall(r'op_name="([^"]*sin)"', program)))
    )


@observable("what `jax.log_compiles` names")
def _(pmap):
    found = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.extend(re.findall(r"Compiling (\S+)", record.getMessage()))

    def step(x):
        return 3 * x

    logger, handler = logging.getLogger("jax"), Handler()
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            pmap(step)(EIGHT)
    finally:
        logger.removeHandler(handler)
    return ", ".join(f"`{name}`" for name in found)


@observable("the mesh that the body sees")
def _(pmap):
    found = []
    pmap(lambda x: (found.append(jax.sharding.get_abstract_mesh().axis_names), x)[1], "i")(EIGHT)
    return found[0]


@observable("the type that the body sees")
def _(pmap):
    found = []
    pmap(lambda x: (found.append(str(jax.typeof(x))), x)[1], "i")(np.ones((8, 3), np.float32))
    return found


@observable("`eval_shape`")
def _(pmap):
    found = jax.eval_shape(pmap(lambda x: {"a": x.sum()}), np.ones((8, 3)))
    return found["a"].shape


@observable("`jax.export`")
def _(pmap):
    from jax import export

    return export.export(pmap(lambda x: x * 2))(EIGHT).nr_devices


@observable("`jax.export` of `jit` of it")
def _(pmap):
    from jax import export

    return export.export(jax.jit(pmap(lambda x: x * 2)))(EIGHT).nr_devices


@observable("`cloudpickle`")
def _(pmap):
    import cloudpickle

    return pickle.loads(cloudpickle.dumps(pmap(lambda x: x * 2)))(EIGHT)


@observable("`copy.copy` and `copy.deepcopy`")
def _(pmap):
    mapped = pmap(lambda x: 2 * x)
    return copy.copy(mapped)(EIGHT)[1], copy.deepcopy(mapped)(EIGHT)[1]


@observable("what a compiled program tells of memory")
def _(pmap):
    memory = pmap(lambda x: x + 1, donate_argnums=0).lower(EIGHT).compile().memory_analysis()
    return memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes


@observable("`args_info` of what is lowered")
def _(pmap):
    table = jnp.arange(1000.0)
    mapped = pmap(lambda x, *, n, w: x * n + w + table.sum(), donate_argnums=0)
    with warnings.catch_warnings(action="ignore"):
        (args, kwargs) = mapped.lower(EIGHT, w=np.ones(8, np.int32), n=EIGHT).args_info
    float_, int_ = (jax.core.ShapedArray((8,), kind) for kind in (np.float32, np.int32))
    expected = {
        "n": jax.stages.ArgInfo(float_, donated=False),
        "w": jax.stages.ArgInfo(int_, donated=False),
    }
    return args == (jax.stages.ArgInfo(float_, donated=True),), kwargs == expected


@observable("a compiled program, called")
def _(pmap):
    return pmap(lambda x, *, y: x + y).lower(EIGHT, y=EIGHT).compile()(EIGHT, y=EIGHT)


@observable("a compiled program, called with another type, names it")
def _(pmap):
    compiled = pmap(lambda x: x + 1).lower(EIGHT).compile()
    try:
        compiled(np.arange(8))
    except TypeError as error:
        return f"`{re.search(r'[a-z_]*args.[0-9].', str(error))[0]}`"


# ---- effects and debugging


@observable("`debug.print`")
def _(pmap):
    return pmap(lambda x: (jax.debug.print("at {x}", x=x), x)[1])(EIGHT[:2])


@observable("ordered `debug.print`")
def _(pmap):
    return pmap(lambda x: (jax.debug.print("at {x}", x=x, ordered=True), x)[1])(EIGHT[:2])


@observable("`pure_callback`")
def _(pmap):
    kind = jax.ShapeDtypeStruct((), np.float32)
    return pmap(lambda x: jax.pure_callback(lambda a: np.asarray(a) * 2, kind, x))(EIGHT)


@observable("`debug_nans`")
def _(pmap):
    with jax.debug_nans(True):  # noqa: FBT003
        return pmap(lambda x: jnp.log(x - 1.0))(EIGHT)


@observable("`debug_nans` on a steady call")
def _(pmap):
    mapped = pmap(jnp.log)
    mapped(EIGHT + 1)
    with jax.debug_nans(True):  # noqa: FBT003
        return mapped(EIGHT - 1)


@observable("what the body sees under `disable_jit`")
def _(pmap):
    seen = []

    def body(x):
        seen.append("On cpu:0" in str(x))
        return x * 2

    with jax.disable_jit():
        result = np.asarray(pmap(body)(EIGHT)).tolist()
    return f"{len(seen)} time, values of each device: {seen[0]}, {result}"


@observable("`transfer_guard`: an array of NumPy")
def _(pmap):
    with jax.transfer_guard("disallow"):
        return pmap(lambda x: x + 1)(EIGHT)


@observable("`transfer_guard`: an array on the first device")
def _(pmap):
    array = jnp.asarray(EIGHT)
    with jax.transfer_guard("disallow"):
        return pmap(lambda x: x + 1)(array)


@observable("`transfer_guard`: an array on another device")
def _(pmap):
    array = jax.device_put(EIGHT, jax.devices()[3])
    with jax.transfer_guard("disallow"):
        return pmap(lambda x: x + 1)(array)


@observable("`transfer_guard`: an array in its place")
def _(pmap):
    mapped = pmap(lambda x: x + 1)
    array = mapped(mapped(EIGHT))
    with jax.transfer_guard("disallow"):
        return mapped(array)


@observable("`checking_leaks`")
def _(pmap):
    with jax.checking_leaks():
        return pmap(lambda x: lax.psum(x, "i"), "i")(EIGHT)


@observable("a tracer that leaks")
def _(pmap):
    leaked = []
    pmap(lambda x: (leaked.append(x), x)[1])(EIGHT)
    return leaked[0] + 1


@observable("a donation that no result can use")
def _(pmap):
    return pmap(lambda x: x.sum(), donate_argnums=0)(jnp.ones((8, 3)))


@observable("frames between the call and the error in its body")
def _(pmap):
    def body(x):
        raise KeyError("mine")

    try:
        pmap(body)(EIGHT)
    except KeyError as error:
        frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return len(frames) - 2


@observable("a cause or context of that error")
def _(pmap):
    def body(x):
        raise KeyError("mine")

    try:
        pmap(body)(EIGHT)
    except KeyError as error:
        return error.__cause__, error.__context__


@observable("how often a body that raises runs")
def _(pmap):
    runs = []

    def body(x):
        runs.append(1)
        raise KeyError("mine")

    with contextlib.suppress(KeyError):
        pmap(body)(EIGHT)
    return len(runs)


# ---- keys


@observable("typed keys")
def _(pmap):
    keys = jax.random.split(jax.random.key(0), 8)
    return pmap(lambda key: jax.random.bits(key))(keys)


@observable("typed keys of rbg")
def _(pmap):
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 8)
    return pmap(lambda key: jax.random.bits(key))(keys)


@observable("keys that are used twice, under `debug_key_reuse`")
def _(pmap):
    with jax.debug_key_reuse(True):  # noqa: FBT003
        keys = jax.random.split(jax.random.key(0), 8)
        return pmap(lambda key: jax.random.bits(key) + jax.random.bits(key))(keys)


# ---- mistakes


@observable("error: sizes that differ")
def _(pmap):
    call = functools.partial(pmap(lambda x, mask: x * mask), np.ones(8), np.ones(4))
    return _says(call, function="<lambda>", argument="mask")


@observable("error: no argument")
def _(pmap):
    return _message(lambda: pmap(lambda: 1)())


@observable("error: a list in the place of an array")
def _(pmap):
    return _message(lambda: pmap(lambda x: x)([1.0, 2.0]))


@observable("error: text as an argument")
def _(pmap):
    return _message(lambda: pmap(lambda x, y: x)(EIGHT, "text"))


@observable("error: text as a result")
def _(pmap):
    return _message(lambda: pmap(lambda x: "text")(EIGHT))


@observable("error: more slices than devices")
def _(pmap):
    call = functools.partial(pmap(lambda x: x), np.ones(9))
    return _says(call, function="<lambda>", devices="devices")


@observable("error: an axis that is not mapped")
def _(pmap):
    return _message(lambda: pmap(lambda x: lax.psum(x, "j"), "i")(EIGHT))


@observable("error: `in_axes` that does not fit")
def _(pmap):
    return _message(lambda: pmap(lambda x: x, in_axes=((0, 0, 0),))((EIGHT, EIGHT)))


@observable("error: `out_axes` that does not fit")
def _(pmap):
    return _message(lambda: pmap(lambda x: (x, x), out_axes=(0, 0, 0))(EIGHT))


@observable("error: a static argument by keyword")
def _(pmap):
    return _message(lambda: pmap(lambda x, n: x * n, static_broadcasted_argnums=1)(EIGHT, n=2))


if __name__ == "__main__":
    from jax_dist.testing import simulated_devices

    simulated_devices(8)
    import jax_dist

    print("\n".join(table(jax_dist.pmap)))  # noqa: T201
