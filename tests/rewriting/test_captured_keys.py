"""Programs with another key in each process: rewritten, they have the same, and are found."""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

_HERE = pathlib.Path(__file__).parent
_PROGRAMS = ("closure", "decorated", "key", "mapped", "numpy", "partitioned", "viewed")


def _process(cache: pathlib.Path, *arguments: str) -> dict[str, int]:
    """Run the programs in a fresh interpreter; `{name of program: found in the cache}`."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": str(_HERE.parents[1]),
        "PYTHONHASHSEED": "random",
    }
    command = [sys.executable, _HERE / "captured_keys.py", *arguments]
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.thorough
def test_rewritten_programs_are_found_by_the_next_process(tmp_path):
    first, second = _process(tmp_path), _process(tmp_path)

    names = [re.match(r"jit_(\w+?)-\w+-cache$", path.name) for path in tmp_path.iterdir()]
    written = collections.Counter(name[1] for name in names if name)
    assert {name: written[f"lifted_{name}"] for name in _PROGRAMS} == dict.fromkeys(_PROGRAMS, 1)
    assert {name: written[f"plain_{name}"] for name in _PROGRAMS} == dict.fromkeys(_PROGRAMS, 2)
    for name in _PROGRAMS:
        assert (first[f"lifted_{name}"], second[f"lifted_{name}"]) == (0, 1), name
        assert (first[f"plain_{name}"], second[f"plain_{name}"]) == (0, 0), name
    changed = _process(tmp_path, "other-body")  # of the custom_partitioning operation
    assert (changed["lifted_partitioned"], changed["lifted_closure"]) == (0, 1)
