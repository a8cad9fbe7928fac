"""The persistent compilation cache finds our programs again, in another process."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

_PROGRAM = textwrap.dedent("""
    import functools
    import sys

    import jax
    import numpy as np

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)

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
""")


def _entries(folder: pathlib.Path, hash_seed: str) -> set[str]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder)], env=environment, check=True, timeout=120
    )
    return {path.name for path in folder.glob("*-cache")}


@pytest.mark.thorough
def test_a_second_process_writes_nothing_new(tmp_path):
    first = _entries(tmp_path, "1")
    second = _entries(tmp_path, "2")

    assert len(first) >= 6
    assert second == first
