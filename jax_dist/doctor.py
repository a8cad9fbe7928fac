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

# Behind what is installed, so that the installed jax_dist is probed.
_PROBE = "import sys; sys.path.append(sys.argv[1]); from jax_dist.doctor import probe; probe()"
_CACHE_REMEDY = "Set JAX_DIST_CACHE_DIR to a directory that only you can write to."
_DEVICE_REMEDY = "JAX_PLATFORMS=cpu starts without accelerators."


class Diagnosis(NamedTuple):
    """The result of `diagnose`."""

    output: str  # of the process
    problem: str | None  # with its remedy; None if there is no problem


def diagnose(timeout: float) -> Diagnosis:
    """Run `probe` in a fresh process, for `timeout` seconds at most; return output and problem."""
    # -P and -c: no module of the current directory is imported in place of an installed one.
    command = [sys.executable, "-P", "-c", _PROBE, str(pathlib.Path(__file__).parents[1])]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            exit_code = subprocess.call(command, stdout=output, stderr=errors, timeout=timeout)
        except subprocess.TimeoutExpired:
            exit_code = None
        output.seek(0)
        errors.seek(0)
        return Diagnosis(output.read(), _explain_failure(exit_code, errors.read()))


def _explain_failure(exit_code: int | None, errors: str) -> str | None:
    """Return why the process failed, with a remedy, by its exit code and standard error.

    The exit code is None after a timeout; the result is None if it did not fail.
    """
    if exit_code == 0:
        return None
    if exit_code is None:
        return f"No answer in time: another process may hold the devices. {_DEVICE_REMEDY}"
    if "No module named 'jax'" in errors:
        return "jax is not installed for this Python: pip install -U jax"
    # An abort in C++ logs "F1128 10:00:00 42 file.cc:7] reason"; else there is a traceback.
    aborts = re.findall(r"^F\d{4} \S+ +\d+ \S+\] (.*)", errors, re.MULTILINE)
    lines = aborts or errors.strip().splitlines() or [f"exit code {exit_code}"]
    reason = lines[-1]
    for variable in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS"):
        for value in os.environ.get(variable, "").split():
            if value.partition("=")[0] in reason:
                return f"{reason}\nRemove or correct {value} in the variable {variable}."
    return f"{reason}\n{_CACHE_REMEDY if 'cache' in reason.lower() else _DEVICE_REMEDY}"


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
