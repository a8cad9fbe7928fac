"""The program for Ray that the documentation offers to copy, on a real cluster of two nodes."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from launching import environment

pytest.importorskip("ray")

_ROOT = pathlib.Path(__file__).parents[2]

# Two nodes of Ray on this machine, each of them a host to it.
_ON_A_CLUSTER = textwrap.dedent("""\
    import os, subprocess, sys
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    variables = {**os.environ, "RAY_ADDRESS": cluster.address}
    code = subprocess.run([sys.executable, *sys.argv[1:]], env=variables).returncode
    cluster.shutdown()
    sys.exit(code)
    """)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _ON_A_CLUSTER, str(_ROOT / "docs/launch/ray_train.py"), *command],
        env=environment(
            JAX_PLATFORMS="cpu",
            JAX_NUM_CPU_DEVICES="4",
            RAY_DEDUP_LOGS="0",
            RAY_DISABLE_IMPORT_WARNING="1",
            RAY_USAGE_STATS_ENABLED="0",
            PATH=os.environ["PATH"],
        ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_the_es_example_runs_in_a_process_on_each_host(tmp_path):
    example = str(_ROOT / "examples/es_multiprocess.py")
    ran = _run(sys.executable, example, "--generations=3", f"--out={tmp_path}")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "exit codes by rank: [0, 0]" in ran.stdout
    assert "on 2 x 4 devices" in ran.stdout
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 4


_FAILS = """\
import sys
from jax_dist import multihost
multihost.initialize()
import jax, numpy as np
total = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
np.asarray(total(np.ones(4)))
if jax.process_index() == 1: raise ValueError("the data is gone")
np.asarray(total(np.ones(4)))
"""


@pytest.mark.slow
def test_a_failure_ends_all():
    ran = _run(sys.executable, "-c", _FAILS)

    assert ran.returncode == 1
    assert "exit codes by rank: [1, 1]" in ran.stdout
    assert "rank 0: stopping because rank 1 failed with ValueError: the data is gone" in ran.stderr
