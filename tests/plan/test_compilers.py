"""Programs as the compilers of TPUs and GPUs make them, without the hardware.

BUILD.md has the commands: `-m tpu_compiler` or `-m gpu_compiler`, with `--optimised`.
"""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jax_dist
from jax_dist._hlo import HloModule
from jax_dist.plan import plan

_TPUS = [pytest.param(name, marks=pytest.mark.tpu_compiler) for name in ("v5e:2x2", "v5e:4x4")]
_GPUS = [pytest.param(name, marks=pytest.mark.gpu_compiler) for name in ("h100:1x8", "h100:2x8")]
_MACHINES = [*_TPUS, pytest.param("v5p:2x2x2", marks=pytest.mark.tpu_compiler), *_GPUS]


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


# The list: the program of jax_dist.pmap is that of jax.pmap, instruction for instruction.


def mlp_loss(params, x):
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["last"]) ** 2)


def conv_loss(kernel, x):
    layout = ("NHWC", "HWIO", "NHWC")
    out = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
    mean = lax.pmean(out.mean((0, 1, 2)), "i")  # batch norm over all devices
    square = lax.pmean((out * out).mean((0, 1, 2)), "i")
    return jnp.mean(jax.nn.relu((out - mean) * lax.rsqrt(square - mean * mean + 1e-5)) ** 2)


def attention_loss(params, tokens):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = half["words"][tokens[:, :-1]]
    past = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))

    def block(x, layer):
        q, k, v = (x @ layer[name] for name in ("q", "k", "v"))
        scores = jnp.where(past, q @ k.transpose(0, 2, 1), -1e9).astype(jnp.float32)
        return x + (jax.nn.softmax(scores).astype(x.dtype) @ v) @ layer["out"], None

    x, _ = lax.scan(jax.checkpoint(block), x, half["blocks"])
    scores = (x @ half["words"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:]).mean()


mlp_gradient = jax.value_and_grad(mlp_loss)


def accumulated(params, x):
    """Return the loss and the gradient of the MLP, summed over four parts of a batch."""
    add = lambda total, part: (jax.tree.map(jnp.add, total, mlp_gradient(params, part)), None)
    zeros = (0.0, jax.tree.map(jnp.zeros_like, params))
    return lax.scan(add, zeros, x.reshape(4, -1, x.shape[-1]))[0]


def training(gradient_of, params, batch, optimizer):
    """Return a step that averages gradients and updates the parameters, and its arguments."""

    def step(state, batch):
        params, rest = state
        loss, gradient = lax.pmean(gradient_of(params, batch), "i")
        updates, rest = optimizer.update(gradient, rest, params)
        return (optax.apply_updates(params, updates), rest), loss

    return step, [(params, jax.eval_shape(optimizer.init, params)), batch]


_TABLE = np.ones((128, 128), np.float32)  # which functions capture
_X, _X_HALF, _KEY = of(128, 128), of(128, 128, dtype=jnp.bfloat16), of(2, dtype="uint32")
_MLP = {"first": of(128, 256), "bias": of(256), "last": of(256, 128)}, of(32, 128)
_CONV = of(3, 3, 16, 16), of(2, 16, 16, 16)
_BLOCKS = {name: of(2, 256, 256) for name in ("q", "k", "v", "out")}
_TRANSFORMER = {"words": of(1024, 256), "blocks": _BLOCKS}, of(4, 129, dtype="int32")


def programs(n):
    """Return 21 programs: the function of one device, its arguments, and options of pmap."""
    ring = [(place, (place + 1) % n) for place in range(n)]
    halves = [[*range(n // 2)], [*range(n // 2, n)]]
    swap = lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True)
    scan = lambda x: lax.scan(lambda c, _: (lax.pmean(c @ c, "i"), None), x, None, length=4)[0]
    is_large = lambda x: lax.pmax(jnp.max(x), "i") > 1
    branch = lambda x: lax.cond(lax.psum(x.sum(), "i") > 0, jnp.sin, jnp.cos, x)
    key_here = lambda key: jax.random.fold_in(key, lax.axis_index("i"))
    noise = lambda key, x: lax.pmean(x + jax.random.normal(key_here(key), x.shape), "i")
    conv_gradient, attention_gradient = map(jax.value_and_grad, (conv_loss, attention_loss))
    sgd, adamw, donated = optax.sgd(0.1), optax.adamw(1e-3), {"donate_argnums": 0}
    clipping = optax.chain(optax.clip_by_global_norm(1.0), sgd)
    return {
        "psum": (lambda x: lax.psum(x, "i"), [_X], {}),
        "psum of bfloat16": (lambda x: lax.psum(x @ x, "i"), [_X_HALF], {}),
        "psum in two groups": (lambda x: lax.psum(x, "i", axis_index_groups=halves), [_X], {}),
        "pmax": (lambda x: lax.pmax(x, "i"), [_X], {}),
        "psum_scatter": (lambda x: lax.psum_scatter(x, "i", tiled=True), [of(16 * n, 128)], {}),
        "all_gather": (lambda x: jnp.sin(lax.all_gather(x, "i", tiled=True)), [_X], {}),
        "ppermute": (lambda x: lax.ppermute(x, "i", ring), [_X], {}),
        "all_to_all twice": (lambda x, w: swap(jax.nn.gelu(swap(x) @ w)), [of(n, 8, 128), _X], {}),
        "axis_index": (lambda x: x * lax.axis_index("i"), [_X], {}),
        "pmean in a scan": (scan, [_X], {}),
        "pmax as a condition": (lambda x: lax.while_loop(is_large, lambda x: x * 0.5, x), [_X], {}),
        "cond on a psum": (branch, [_X], {}),
        "random numbers of each device": (noise, [_KEY, _X], {"in_axes": (None, 0)}),
        "axes 1 in and out": (lambda x: x - lax.pmean(x, "i"), [_X], {"in_axes": 1, "out_axes": 1}),
        "a shared result": (lambda x: lax.pmean(x @ x, "i"), [_X], {"out_axes": None}),
        "SGD": (*training(mlp_gradient, *_MLP, sgd), {}),
        "SGD, donated": (*training(mlp_gradient, *_MLP, sgd), donated),
        "SGD with clipping": (*training(mlp_gradient, *_MLP, clipping), donated),
        "accumulated gradients": (*training(accumulated, *_MLP, sgd), donated),
        "convolution with batch norm": (*training(conv_gradient, *_CONV, sgd), donated),
        "a transformer, adamw": (*training(attention_gradient, *_TRANSFORMER, adamw), donated),
    }


def mapped_types(program, devices):
    """Return the arguments as pmap takes them."""
    _, args, options = program
    axes = jax.tree.broadcast(options.get("in_axes", 0), tuple(args), is_leaf=lambda x: x is None)

    def stacked(axis, leaf):
        shape = (*leaf.shape[:axis], devices, *leaf.shape[axis:])
        return leaf if axis is None else of(*shape, dtype=leaf.dtype)

    return jax.tree.map(stacked, axes, tuple(args), is_leaf=lambda x: x is None)


def compile_both(program, machine):
    """Compile a program by jax.pmap and by jax_dist.pmap."""
    types = mapped_types(program, len(machine.devices))
    options = {"axis_name": "i", "devices": machine.devices, **program[2]}
    mapped = [pmap(program[0], **options) for pmap in (jax.pmap, jax_dist.pmap)]
    return [function.lower(*types).compile() for function in mapped]


def instructions(compiled):
    """Count the instructions of an optimised program, without names and lines of the source."""
    text = re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())
    lines = [line.strip() for line in text.splitlines() if " = " in line]
    return collections.Counter(re.sub(r"%[\w.\-]+", "%", line) for line in lines)


@pytest.mark.parametrize("name", _MACHINES)
def test_21_programs_are_those_of_jax_pmap(name):
    machine = jax_dist.topology(name)
    table = programs(len(machine.devices))
    different = {}

    for title, program in table.items():
        theirs, ours = compile_both(program, machine)
        before, after = instructions(theirs), instructions(ours)
        aliases = [each.memory_analysis().alias_size_in_bytes for each in (theirs, ours)]
        assert before
        if before != after or aliases[0] != aliases[1]:
            different[title] = (before - after, after - before)

    assert (len(table), different) == (21, {})


@pytest.mark.parametrize("name", [_TPUS[0], _TPUS[1], _GPUS[0]])
def test_a_gather_that_is_only_reduced_is_gone(name):
    program = (lambda x: (lax.all_gather(x, "i") ** 2).sum(0), (_X,), {})

    theirs, ours = compile_both(program, jax_dist.topology(name))

    programs = [HloModule.parse(each.as_text()).collectives() for each in (theirs, ours)]
    kinds = [[(one.kind, one.count) for one in program] for program in programs]
    assert kinds == [[("all-gather", 1)], [("all-reduce", 1)]]
    before, after = (each.memory_analysis().peak_memory_in_bytes for each in (theirs, ours))
    assert after < 0.7 * before


@pytest.mark.tpu_compiler
def test_a_plan_says_which_strategy_fits_and_by_how_much():
    """State and gradient of 8 GiB each: a copy of both does not fit in 15.75 GiB, a part does."""
    large_step = lambda w, x: w - lax.pmean(jnp.sin(w) * x.sum(), "i")
    mapped = jax.pmap(large_step, "i", donate_argnums=0)

    types = of(4, 2**21, 1024), of(4, 8)
    found = plan(mapped, *types, on="v5e:2x2", strategies=["jax.pmap", "fsdp"])

    whole, parts = found.rows
    assert (whole.fits, whole.program, whole.needed) == (False, None, 16 * 2**30)
    assert whole.verdict == "does NOT fit, by 268.4 MB"
    assert (parts.fits, parts.needed) == (True, parts.program.peak_bytes)
    assert parts.program.argument_bytes == 2**31 + 512
    assert parts.program.alias_bytes == 2**31


@pytest.mark.parametrize("name", [_TPUS[1], _GPUS[1]])
def test_a_plan_agrees_with_the_compiler(name):
    machine = jax_dist.topology(name)
    program = programs(len(machine.devices))["SGD, donated"]

    mapped = jax.pmap(program[0], "i", donate_argnums=0)
    rows = plan(mapped, *mapped_types(program, 16), on=name).rows

    memory = compile_both(program, machine)[0].memory_analysis()
    assert [row.strategy for row in rows] == ["jax.pmap", "replicated", "fsdp", "fsdp-regather"]
    assert rows[0].program.argument_bytes == memory.argument_size_in_bytes
    assert rows[0].program.temp_bytes == memory.temp_size_in_bytes
    assert rows[0].needed == memory.peak_memory_in_bytes
    assert all(row.fits and row.memory == machine.memory for row in rows)
    assert {each.size for row in rows for each in row.program.collectives} == {16}


@pytest.mark.filterwarnings("ignore::jax_dist.errors.CapturedArrayWarning")
@pytest.mark.parametrize("name", [_TPUS[1], _GPUS[1]])
def test_several_hosts_compile_in_one_process_and_run_nothing(name):
    devices = jax_dist.topology(name).devices
    mapped = jax_dist.pmap(lambda x: lax.pmean(x @ _TABLE, "i"), "i", devices=devices)
    gradient = jax.jit(jax.grad(lambda x: (mapped(x) ** 2).sum()))
    inner = jax_dist.pmap(lambda x: lax.psum(x, ("i", "j")), "j")
    nested = jax_dist.pmap(inner, "i", devices=devices)

    for function, shape in ((mapped, (16, 128)), (gradient, (16, 128)), (nested, (8, 2, 128))):
        text = function.lower(of(*shape)).compile().as_text()
        assert {one.size for one in HloModule.parse(text).collectives()} == {16}
    with pytest.raises(NotImplementedError, match="a device of a topology: it only compiles"):
        mapped(np.ones((16, 128), np.float32))


@pytest.mark.parametrize(
    ("name", "count", "hosts", "gib"),
    [
        ("v4:2x2x1", 4, 1, 30.75),
        ("v5e-16", 16, 4, 15.75),
        ("v6e:1x1", 1, 1, 31.25),
        ("v5p:2x2x2", 8, 2, 95.74),
        ("v7x:2x2x1", 8, 1, 94.75),
    ],
)
@pytest.mark.tpu_compiler
def test_the_memory_of_a_chip_is_what_its_compiler_allows(name, count, hosts, gib):
    machine = jax_dist.topology(name)
    too_large = of(1, 2**16, 2**10, 2**10)  # 256 GiB

    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.pmap(jnp.cumsum, devices=machine.devices[:1]).lower(too_large).compile()

    assert (len(machine.devices), machine.hosts) == (count, hosts)
    assert re.search(r"exceeds available HBM \((\S+)G\)", str(raised.value))[1] == f"{gib:.2f}"
    assert machine.memory == round(gib * 2**30)
