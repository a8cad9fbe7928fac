"""Programs with a persistent cache, run in fresh processes by `run`."""

import json
import logging
import os
import pathlib
import resource
import signal
import subprocess
import sys
from typing import Any


def run(folder: pathlib.Path, *, variables: dict[str, str] | None = None, **options: Any) -> dict:
    """Run this file in a fresh process, and return what it prints.

    Options: functions, enable (arguments), and die (a moment of the first write).
    """
    keep = ("JAX_", "XLA_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(keep)}
    root = str(pathlib.Path(__file__).parents[2])
    process = subprocess.run(
        [sys.executable, __file__, json.dumps({"folder": str(folder), **options})],
        env=inherited | {"PYTHONPATH": root} | (variables or {}),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )
    if "die" in options:
        return {"signal": -process.returncode}
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def main(options: dict[str, Any]) -> None:
    import jax
    import numpy as np

    from jax_dist import cache

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname}: {record.getMessage()}")
    logging.getLogger("jax_dist.cache").addHandler(handler)
    folder = cache.enable(options["folder"], **options.get("enable", {}))
    _arm(options.get("die"))
    values, errors = {}, {}
    with cache.stats() as seen:
        for place, name in enumerate(options.get("functions", ["step"])):
            try:
                result = jax.jit(_make(name, place))(np.ones((4, 4), np.float32))
                values[name] = float(np.asarray(result)[0, 0])
            except RuntimeError as error:
                errors[name] = f"{type(error).__name__}: {error}"
    hits = {name.removeprefix("jit_"): counts.hits == 1 for name, counts in seen.functions.items()}
    json.dump(
        {"folder": folder, "hits": hits, "values": values, "errors": errors, "messages": messages},
        sys.stdout,
    )


def _make(name: str, constant: int):
    """Return a function of that name; XLA cannot compile one that is called fail."""
    import jax

    def function(x):
        if name == "fail" and not os.environ.get("REPAIRED"):
            return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return jax.numpy.sin(x @ x) * 0 + constant

    function.__name__ = function.__qualname__ = name
    return function


def _arm(moment: str | None) -> None:
    """End this process by a real signal, at a moment of the first write into the cache."""
    if moment == "between the bytes":  # the kernel sends a signal after so many
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    elif moment == "before the rename":

        def kill(event: str, arguments: tuple) -> None:
            if event == "os.rename" and str(arguments[1]).endswith("-cache"):
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
