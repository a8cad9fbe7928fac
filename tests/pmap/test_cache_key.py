"""The persistent compilation cache finds our programs again, in another process."""

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import functools
import jax
import numpy as np
import jax_dist

class Scale:
    def __call__(self, x):
        return {"b": x * 2, "a": x + 1}

x = np.arange(8.0, dtype=np.float32)
jax_dist.pmap(lambda x: jax.lax.psum(x, "i"), "i")(x)
jax_dist.pmap(Scale())(x)
jax_dist.pmap(functools.partial(lambda a, x: x - a, 3.0))(x)
jax_dist.pmap(lambda s, b: s + b.sum(), donate_argnums=0)(x, x)
jax_dist.pmap(lambda x: jax_dist.pmap(lambda y: y + 1)(x))(x.reshape(4, 2))
jax_dist.pmap(lambda x: jax.lax.all_gather(x, "i").sum(), "i")(x)
"""
_SETTINGS = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "8",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}


@pytest.mark.thorough
def test_a_second_process_writes_nothing_new(tmp_path):
    written = []
    for hash_seed in "12":
        settings = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": hash_seed}
        environment = os.environ | _SETTINGS | settings
        subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, check=True, timeout=120)
        written.append({path.name for path in tmp_path.glob("*-cache")})

    first, second = written
    assert len(first) >= 6
    assert second == first
