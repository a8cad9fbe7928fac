"""Failed compilations are remembered, in fresh processes."""

import json
import pathlib

import jax
import pytest
from cached_program import run

from jax_dist._cache.failures import FailureRecords

RAISE, RETRY = {"failures": "raise"}, {"failures": "retry"}
RETRY_VARIABLE = {"JAX_DIST_RETRY_FAILED": "1"}


def _fail(folder: pathlib.Path, **options) -> str:
    return run(folder, functions=["fail", "step"], **options)["errors"].get("fail", "")


def _records(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.rglob("*-failed.json"))


def _age(folder: pathlib.Path, seconds: float) -> None:
    (path,) = _records(folder)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"time": record["time"] - seconds}))


def test_a_failed_compilation_raises_its_error_again(tmp_path):
    first = _fail(tmp_path, enable=RAISE)
    _age(tmp_path, 7200)
    second = _fail(tmp_path, enable=RAISE)
    (path,) = _records(tmp_path)

    assert first.startswith("JaxRuntimeError: NOT_FOUND: No FFI handler registered")
    assert second.startswith("CompilationError: Compilation of jit_fail failed 2:00:")
    assert "No FFI handler registered for no_such_target" in second
    assert f"Set JAX_DIST_RETRY_FAILED=1 or delete {path}" in second


@pytest.mark.parametrize(
    "options", [{"enable": RETRY}, {"enable": RAISE, "variables": RETRY_VARIABLE}, {}]
)
def test_it_is_compiled_again_if_asked_and_by_default(tmp_path, options):
    _fail(tmp_path, enable=RAISE)
    _age(tmp_path, 1_000_000)
    error = _fail(tmp_path, **options)
    (path,) = _records(tmp_path)

    assert error.startswith("JaxRuntimeError")
    is_new = json.loads(path.read_text())["time"] > path.stat().st_mtime - 1000
    assert is_new == bool(options)  # by default nothing is recorded


def test_an_error_that_passes_is_not_recorded(tmp_path):
    records = FailureRecords(tmp_path, retry=False)
    with pytest.raises(jax.errors.JaxRuntimeError), records.watch("step", "key"):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the service restarts")

    assert not _records(tmp_path)


def test_a_success_removes_the_record(tmp_path):
    values = run(tmp_path)["values"]
    (entry,) = tmp_path.rglob("jit_step-*-cache")
    record = entry.with_name(entry.name.removesuffix("-cache") + "-failed.json")
    entry.unlink()
    record.write_text('{"error": "busy", "time": 0, "seconds": 1}')  # as if it had failed once

    assert "busy" in run(tmp_path, enable=RAISE)["errors"]["step"]
    assert run(tmp_path, enable=RETRY)["values"] == values
    assert not record.exists()
    assert run(tmp_path, enable=RAISE)["hits"] == {"step": True}


def test_a_changed_program_and_a_damaged_record_are_compiled(tmp_path):
    _fail(tmp_path, enable=RAISE)
    assert _fail(tmp_path, enable=RAISE, variables={"REPAIRED": "1"}) == ""
    (path,) = _records(tmp_path)
    path.write_text('{"error": 1}')

    assert _fail(tmp_path, enable=RAISE).startswith("JaxRuntimeError")
    assert _fail(tmp_path, enable=RAISE).startswith("CompilationError")
