"""Small programs, right and wrong migrations of them, and a way to run them recorded."""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence

import pytest

import jax_dist
from jax_dist.migrate.verify import sandbox
from jax_dist.migrate.verify.evidence import Run, RunRecord, SiteRecord

# Shapes: 8 devices, 4 examples each, 3 features.
TRAINING = """\
import functools

import jax
import jax.numpy as jnp
import numpy as np


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def train_step(w, x, y):
    value, grad = jax.value_and_grad(loss)(w, x, y)
    return w - 0.1 * jax.lax.pmean(grad, "batch"), jax.lax.pmean(value, "batch")


def evaluate(w, x, y):
    return jnp.abs(x @ w - y).max()


def main():
    step = jax.pmap(train_step, axis_name="batch", donate_argnums=(0,))
    measure = jax.pmap(evaluate, in_axes=(0, 0, None))
    random = np.random.default_rng(0)
    w = np.stack([np.zeros(3, np.float32)] * 8)
    for _ in range(5):
        x = random.normal(size=(8, 4, 3)).astype(np.float32)
        y = x.sum(-1)
        w, value = step(w, x, y)
    errors = measure(w, x, y[0])
    print("loss", value[0], errors.max())


if __name__ == "__main__":
    main()
"""

# What the codemod emits: a helper asks for the devices while the jit around it is traced.
WITH_SHARD_MAP = (
    (
        "\n\ndef main():",
        '''

def per_device(fun, in_axes):
    """Runs `fun` on the slice that each device holds."""

    @functools.wraps(fun)
    def body(*args):
        args = [x if axis is None else x[0] for axis, x in zip(in_axes, args)]
        return jax.tree.map(lambda x: x[None], fun(*args))

    return body


def over_devices(fun, in_specs):
    @functools.wraps(fun)
    def mapped(*args):
        mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
        specs = dict(in_specs=in_specs, out_specs=jax.sharding.PartitionSpec("batch"))
        return jax.shard_map(fun, mesh=mesh, **specs, check_vma=False)(*args)

    return mapped


def main():
    split, whole = jax.sharding.PartitionSpec("batch"), jax.sharding.PartitionSpec()''',
    ),
    (
        'jax.pmap(train_step, axis_name="batch", donate_argnums=(0,))',
        "jax.jit(over_devices(per_device(train_step, (0, 0, 0)), split), donate_argnums=(0,))",
    ),
    (
        "jax.pmap(evaluate, in_axes=(0, 0, None))",
        "jax.jit(over_devices(per_device(evaluate, (0, 0, None)), (split, split, whole)))",
    ),
)

# What an expert would write: one copy of the parameters, one global batch.
IDIOMATIC = (
    (
        "def evaluate(w, x, y):\n    return jnp.abs(x @ w - y).max()",
        """\
def evaluate(w, x, y):
    return jnp.abs(x @ w - y).max()[None]""",
    ),
    (
        '    step = jax.pmap(train_step, axis_name="batch", donate_argnums=(0,))',
        """\
    mesh = jax.sharding.Mesh(jax.devices(), ("batch",))
    split, whole = jax.sharding.PartitionSpec("batch"), jax.sharding.PartitionSpec()
    specs = dict(in_specs=(whole, split, split), out_specs=whole)
    step = jax.jit(jax.shard_map(train_step, mesh=mesh, **specs, check_vma=False))""",
    ),
    (
        "    measure = jax.pmap(evaluate, in_axes=(0, 0, None))",
        """\
    specs = dict(in_specs=(whole, split, whole), out_specs=split)
    measure = jax.jit(jax.shard_map(evaluate, mesh=mesh, **specs, check_vma=False))""",
    ),
    ("w = np.stack([np.zeros(3, np.float32)] * 8)", "w = np.zeros(3, np.float32)"),
    ("size=(8, 4, 3)).astype(np.float32)", "size=(8, 4, 3)).astype(np.float32).reshape(32, 3)"),
    ("y[0])", "y[:4])"),
    ("value[0]", "value"),
)


def changed(*replacements: tuple[str, str], source: str = TRAINING) -> str:
    """The program with each replacement made, exactly once."""
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def recorded(source: str, folder: pathlib.Path, *, timeout: float | None = 120.0) -> Run:
    """Runs a program as `train.py` of a folder of its own, on 8 simulated devices."""
    folder.mkdir(exist_ok=True)
    file = folder / "train.py"
    file.write_text(source)
    return _recorded([file], folder, timeout)


def recorded_together(sources: Mapping[str, str], folder: pathlib.Path) -> dict[str, Run]:
    """Runs programs in one process, by name: each is recorded as `train.py` of the folder."""
    folder.mkdir(exist_ok=True)
    files = {name: folder / f"train_{name}.py" for name in sources}
    for name, file in files.items():
        file.write_text(sources[name])
    every = folder / "every.py"
    every.write_text(
        "import runpy\n"
        f"for file in {[*map(str, files.values())]}:\n"
        "    runpy.run_path(file, run_name='__main__')\n"
    )
    run = _recorded([every, *files.values()], folder, 120.0)
    assert run.exit_code == 0, run.output
    train = str(folder / "train.py")
    return {
        name: Run(0, "", RunRecord(_renamed(run.record.sites, str(file), train)))
        for name, file in files.items()
    }


def _renamed(sites: Iterable[SiteRecord], old: str, new: str) -> tuple[SiteRecord, ...]:
    return tuple(dataclasses.replace(site, file=new) for site in sites if site.file == old)


def _recorded(files: Sequence[pathlib.Path], folder: pathlib.Path, timeout: float | None) -> Run:
    """Runs the first of the files of a folder."""
    with pytest.MonkeyPatch.context() as patch:
        found = [os.environ.get("RECORDED_PATH", ""), pathlib.Path(jax_dist.__file__).parents[1]]
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, found)))
        patch.chdir(folder)
        work = folder.with_name(f"{folder.name}-records-{len(list(folder.parent.iterdir()))}")
        work.mkdir()
        command = [sys.executable, str(files[0])]
        stage = sandbox.Workspace(command, work, [folder.resolve()], 8, timeout)
        return stage.recorded({}, files)
