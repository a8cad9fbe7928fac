"""The guards on a GPU, in a fresh process: the other tests see simulated CPU devices only."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax_dist.guards.memory import memory_guard, memory_now
from jax_dist.guards.strict import strict

def refused(name, act, **options):
    try:
        with strict(**options):
            act()
    except RuntimeError as error:
        print(name, type(error).__name__, str(error).splitlines()[1].strip())
    else:
        print(name, "passes")

host = np.ones(4, np.float32)
base = jax.device_put(host)
new = lambda: base * 1
double = jax.jit(lambda x: 2 * x, donate_argnums=0)
unused = jax.jit(lambda s: 2 * s["w"], donate_argnums=0)
to_half = jax.jit(lambda x: x.astype(jnp.bfloat16), donate_argnums=0)
loss = jnp.float32(2.5)
double(new()), double(2.0), to_half(new()), unused({"w": new(), "b": new()})

refused("numpy argument", lambda: double(host), donation=False)
refused("number", lambda: double(2.0), donation=False)
refused("float", lambda: float(loss))
refused("asarray", lambda: np.asarray(loss))
refused("device_get", lambda: jax.device_get(loss))
refused("donated", lambda: double(new()))
refused("unused", lambda: unused({"w": new(), "b": new()}))
refused("dtype", lambda: to_half(new()))

kept, state = [], new()
with memory_guard(slack=0):
    state = double(state)
try:
    with memory_guard():
        kept.append(new())
except RuntimeError as error:
    print("kept", type(error).__name__)
"""


def run_guards(platform):
    here = str(pathlib.Path(__file__).parents[2])
    environment = {**os.environ, "JAX_PLATFORMS": platform, "XLA_FLAGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_same_is_refused_everywhere(platform):
    if platform == "cuda" and shutil.which("nvidia-smi") is None:
        pytest.skip("no GPU")

    assert run_guards(platform) == [
        "numpy argument TransferError * x is a NumPy array float32[4], 16 bytes",
        "number passes",
        "float TransferError * loss, float32[] on device 0, is read by float",
        "asarray TransferError * loss, float32[] on device 0, is read by NumPy",
        "device_get passes",
        "donated passes",
        "unused DonationError * s['b'] is float32[4], and the function does not use it",
        "dtype DonationError * x is float32[4], and the output of that shape is bfloat16[4]",
        "kept MemoryGrowthError",
    ]
