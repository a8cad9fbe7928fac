"""A routed program has one key in all processes; it changes with the body of the op."""

import collections
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.rewriting

HERE = pathlib.Path(__file__).parent
OPS = ("l1norm", "layernorm", "moments")


def process(cache, *arguments):
    """Runs the programs in a fresh interpreter; `{name of program: found in the cache}`."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE)]),
        "PYTHONHASHSEED": "random",
    }
    ran = subprocess.run(
        [sys.executable, HERE / "partitioned_keys.py", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def entries(cache):
    """`{name of program: number of entries}`."""
    names = [re.match(r"jit_(\w+?)-\w+-cache$", path.name) for path in cache.iterdir()]
    return collections.Counter(name[1] for name in names if name)


@pytest.mark.thorough
def test_each_process_finds_what_the_first_one_wrote(tmp_path):
    first, second, third = (process(tmp_path) for _ in range(3))

    written = entries(tmp_path)
    assert {name: written[f"routed_{name}"] for name in OPS} == dict.fromkeys(OPS, 1)
    assert [run[f"routed_{name}"] for name in OPS for run in (first, second, third)] == [
        0,
        1,
        1,
    ] * 3
    # Without routing, the key holds an address. So this test can fail.
    assert {name: written[f"plain_{name}"] for name in OPS} == dict.fromkeys(OPS, 3)
    assert [run[f"plain_{name}"] for name in OPS for run in (first, second, third)] == [0, 0, 0] * 3


@pytest.mark.thorough
def test_another_body_has_another_key(tmp_path):
    process(tmp_path)

    changed = process(tmp_path, "other-body")

    assert (changed["routed_l1norm"], changed["routed_layernorm"]) == (0, 1)
    assert entries(tmp_path)["routed_l1norm"] == 2
