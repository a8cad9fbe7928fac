"""Check of an installation: JAX's environment, a sum over all devices, the cache's directory.

JAX starts in a process of its own, because a bad flag aborts the process and devices may hang.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from typing import NamedTuple

# -P and -c: no module of the current directory is imported.
_PROBE = "import sys; sys.path.append(sys.argv[1]); from jax_dist.doctor import probe; probe()"
_CACHE = "Set JAX_DIST_CACHE_DIR to a directory that only you can write to."
_CPU = "JAX_PLATFORMS=cpu starts without accelerators."


class Diagnosis(NamedTuple):
    """Output of the process, and the problem with its remedy; None if there is none."""

    output: str
    problem: str | None


def diagnose(timeout: float) -> Diagnosis:
    """Return what `probe` prints in a fresh process, and why it failed.

    Args:
      timeout: in seconds.
    """
    command = [sys.executable, "-P", "-c", _PROBE, str(pathlib.Path(__file__).parents[1])]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            code = subprocess.call(command, stdout=output, stderr=errors, timeout=timeout)
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        errors.seek(0)
        return Diagnosis(output.read(), _problem(code, errors.read()))


def _problem(code: int | None, errors: str) -> str | None:
    if code == 0:
        return None
    if code is None:
        return f"No answer in time: another process may hold the devices. {_CPU}"
    if "No module named 'jax'" in errors:
        return "jax is not installed for this Python: pip install -U jax"
    # JAX aborts with a line of C++'s log; anything else ends with the last line of a traceback.
    aborts = re.findall(r"^F\d{4} \S+ +\d+ \S+\] (.*)", errors, re.MULTILINE)
    lines = aborts or errors.strip().splitlines() or [f"exit code {code}"]
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS"):
        for value in os.environ.get(variable, "").split():
            if value.partition("=")[0] in lines[-1]:
                return f"{lines[-1]}\nRemove or correct {value} in the variable {variable}."
    return f"{lines[-1]}\n{_CACHE if 'cache' in lines[-1].lower() else _CPU}"


def probe() -> None:
    """Print the environment, the sum over the devices and the cache; raise if one is wrong."""
    import jax
    import jax.numpy as jnp

    import jax_dist
    from jax_dist import _compat, errors

    jax.print_environment_info()
    count = jax.local_device_count()
    add = jax_dist.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
    sums = jax.device_get(add(jnp.arange(count, dtype=jnp.float32))).tolist()
    sys.stdout.write(f"psum over {count} devices: {sums[0]:g}\n")
    if sums != [float(count * (count - 1) // 2)] * count:
        raise RuntimeError(f"psum over {count} devices is wrong: {sums}. Check them one by one.")
    warnings.simplefilter("error", errors.CacheWarning)
    jax_dist.cache.enable()  # raises if others could write into the directory
    sys.stdout.write(f"cache: {_compat.config_value('jax_compilation_cache_dir')}\n")
