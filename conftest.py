"""Every test sees 8 simulated CPU devices, unless it starts processes of its own."""

import pathlib
import signal

import pytest

from jax_dist.testing import simulated_devices

collect_ignore_glob = ["tests/cache/programs/*"]  # programs of their own, with arguments

pytest.register_assert_rewrite("watching")  # tests/mapping/watching.py asserts for others
simulated_devices(8)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background job of a shell; the programs that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_RUNTIME = [
    pathlib.Path(__file__).parent / "tests" / name
    for name in ("cache", "doctor", "guards", "launch", "multihost")
    + ("test_docs.py", "test_error_pages.py")
]

# Their tests start programs, send signals and wait by the clock, which a busy machine upsets.
_REAL = [
    pathlib.Path(__file__).parent / "tests" / name
    for name in ("cache", "examples", "guards", "launch", "migrating", "multihost", "processes")
    + ("test_docs.py", "test_error_pages.py")
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_in(item, _RUNTIME):
            item.add_marker("runtime")
        if _is_in(item, _REAL):
            item.add_marker(pytest.mark.flaky(reruns=1))


def _is_in(item: pytest.Item, paths: list[pathlib.Path]) -> bool:
    return any(path in (item.path, *item.path.parents) for path in paths)
