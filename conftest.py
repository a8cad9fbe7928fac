"""Every test sees 8 simulated CPU devices, unless it starts processes of its own."""

import gc
import importlib.metadata
import os
import pathlib
import pickle
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from jax_dist.testing import simulated_devices

# Programs of their own: they have arguments, and set flags of XLA, which all tests would have then.
collect_ignore_glob = [
    "tests/cache/programs/*",
    "tests/migrate/golden/*",
    "tests/migrate/programs/*",
]

pytest.register_assert_rewrite("watching")  # tests/pmap/watching.py asserts for others
simulated_devices(8)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job of a shell; the programs that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_TESTS = pathlib.Path(__file__).parent / "tests"
_PAGES = ("test_docs.py", "test_error_pages.py")
# Their tests start programs, send signals and wait by the clock, which a busy machine upsets.
_REAL = ("cache", "examples", "launch", "migrate", "multihost", "processes", *_PAGES)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--optimised",
        action="store_true",
        help="let XLA optimise every program, as it does for users: half as slow again",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--optimised"):
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_quick_flags()])


def _quick_flags() -> list[str]:
    """For programs that run once: most of the time of the tests is XLA's, and half of that LLVM's.

    The processes that tests start inherit them.
    """
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",  # the other cores run other tests
    ]
    if Version(importlib.metadata.version("jaxlib")) < Version("0.11"):  # unknown in 0.12
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return flags


@pytest.fixture
def shared_ones() -> Callable[[tuple[int, ...]], np.ndarray]:
    """Make NumPy arrays of ones whose memory CPU devices share: it begins at a multiple of 64."""

    def make(shape: tuple[int, ...]) -> np.ndarray:
        size = 4 * int(np.prod(shape))
        memory = np.zeros(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        array = memory[start : start + size].view(np.float32).reshape(shape)
        array[:] = 1
        return array

    return make


def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are cores, for the tests that wait for processes use none of them."""
    return len(os.sched_getaffinity(0)) + 2


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Those of guards come first, where each worker begins: they take programs for compiled, and
    # other tests clear the caches of JAX for the whole process.
    items.sort(key=lambda item: item.path.parent.name != "guards")
    for item in items:
        place = item.path.relative_to(_TESTS).parts[0] if item.path.is_relative_to(_TESTS) else ""
        if place in _REAL:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """Collect garbage less often: what lives as long as the tests is looked at once, and left."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Make what takes long in one of the workers; the others wait for it, and get a copy."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base

    def made(name: str, make: Callable[[pathlib.Path], Any]) -> Any:
        folder = base / name
        done = folder / "made.pickle"
        try:
            folder.mkdir()
        except FileExistsError:
            until = time.monotonic() + 300
            while not done.exists():
                assert time.monotonic() < until, f"another worker has failed to make {name}"
                time.sleep(0.2)
            return pickle.loads(done.read_bytes())
        value = make(folder)
        unfinished = folder / "unfinished"
        unfinished.write_bytes(pickle.dumps(value))
        unfinished.replace(done)
        return value

    return made
