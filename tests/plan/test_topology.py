"""`jax_dist.topology`: names of machines, and errors for unknown ones."""

import importlib
import os
import re
import sys
import types

import jax
import pytest

import jax_dist

topology = importlib.import_module("jax_dist.topology")


@pytest.fixture
def requests(monkeypatch):
    """Record what JAX is asked for, and the environment at that time."""
    requests = []

    def get_topology_desc(**request):
        requests.append((request, dict(os.environ)))
        return types.SimpleNamespace(devices=jax.devices())

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", get_topology_desc)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    topology._load.cache_clear()
    yield requests
    topology._load.cache_clear()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v5e:4x4", {"topology_name": "v5e:4x4"}),
        ("V5litepod-8", {"topology_name": "v5e:2x4"}),
        ("v6e-1", {"topology_name": "v6e:1x1", "chips_per_host_bounds": (1, 1, 1)}),
        ("v5p:2x2", {"topology_name": "v5p:2x2x1"}),
        ("v4:2x2x4", {"topology_name": "v4:2x2x4", "chip_config_name": "megacore"}),
        ("v7x:2x2x1", {"topology_name": "tpu7x:2x2x1"}),
    ],
)
def test_a_slice_of_tpus_is_asked_for_in_the_words_of_its_compiler(name, expected, requests):
    jax_dist.topology(name)

    assert [request for request, _ in requests] == [{"platform": "tpu", **expected}]


@pytest.mark.parametrize(
    ("name", "full_name", "gib"),
    [("H100", "h100:1x8", 59.33), ("b200:2x8", "b200:2x8", 134.3), ("l4:4", "l4:1x4", 16.87)],
)
def test_gpus_are_asked_for_by_hosts_and_devices(name, full_name, gib, requests):
    machine = jax_dist.topology(name)

    ((request, _),) = requests
    chip, _, grid = full_name.partition(":")
    assert (machine.name, request["platform"]) == (full_name, "cuda")
    assert request["topology"] == f"1x{grid}"
    assert f'device_description_str: "{chip.upper()}' in request["target_config"]
    assert machine.memory / 2**30 == pytest.approx(gib, rel=1e-3)  # three quarters


def test_a_topology_is_made_once_and_the_environment_stays(requests, monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "0")  # the user's
    before = dict(os.environ)

    machine = jax_dist.topology("v5e:4x4")

    assert (machine.hosts, len(machine.devices)) == (1, 8)
    assert machine is jax_dist.topology("v5e-16")
    ((_, environment),) = requests
    assert environment == {**topology._WITHOUT_HARDWARE, **before}
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("v5:4x4", "Did you mean v5e?"),
        ("abacus", "The chips are a100, b200, h100, h200, l4, v4, v5e, v5p, v6e, v7x"),
        ("v5e", "a slice of 256 chips at most, such as v5e:4x4"),
        ("v5e:32x32", "a slice of 256 chips at most"),
        ("v5e:4x4x4", "'v5e:4x4x4' is not a machine of v5e"),
        ("v5e-5", "such as v5e:4x4"),
        ("v5p-8", "such as v5p:4x4x4"),
        ("h100:0x8", "Give h100:8, or h100:2x8 for two hosts of 8."),
        ("h100:1x2x8", "Give h100:8"),
    ],
)
def test_an_unknown_machine_is_an_error(name, line, requests):
    with pytest.raises(ValueError, match=re.escape(line)):
        jax_dist.topology(name)

    assert not requests


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("v5e:4x4", "libtpu", "tpu"), ("h100", "jax_cuda12_plugin or jax_cuda13_plugin", "cuda12")],
)
@pytest.mark.usefixtures("requests")
def test_a_missing_compiler_is_named_with_its_command(name, module, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ImportError) as raised:
        jax_dist.topology(name)

    assert f"is not installed: there is no module {module}. Run: " in str(raised.value)
    assert f"{sys.executable} -m pip install 'jax[{package}]==" in str(raised.value)
