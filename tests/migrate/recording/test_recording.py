"""The recording leaves the program as it is, and writes down what happened."""

import pathlib
import textwrap

import numpy as np
import pytest
from verified_programs import recorded

from jax_dist.migrate.verify.evidence import Run, SiteRecord

pytestmark = pytest.mark.rewriting

# Asserts within itself that mapped functions behave as ever.
_HABITS = """\
import functools
import inspect
import pickle
import sys

assert "jax" not in sys.modules  # the recording waits for the program to import it
import jax
import jax.numpy as jnp
from jax import jit, pmap

assert pmap is jax.pmap and jit is jax.jit
assert pickle.loads(pickle.dumps(jax.pmap)) is jax.pmap
assert next(iter(inspect.signature(jax.pmap).parameters)) == "fun"


def double(x, *, by=2):
    "Doubles."
    return x * by


mapped = jax.pmap(double, axis_name="i")
assert (mapped.__name__, mapped.__doc__) == ("double", "Doubles.")
assert mapped.__wrapped__ is double
assert hasattr(mapped.lower(jnp.ones(8)), "compile")
jitted = jit(double, static_argnames="by")
assert isinstance(jitted, jax.stages.Wrapped)
assert jitted(jnp.ones(2), by=3).tolist() == [3, 3]


@functools.wraps(jax.pmap)
def own_pmap(*args, **kwargs):
    return jax.pmap(*args, **kwargs)


class Model:
    @functools.partial(jax.pmap, static_broadcasted_argnums=0, axis_name="i")
    def apply(self, x):
        return x + 1


assert Model().apply(jnp.zeros(8)).tolist() == [1] * 8
assert own_pmap(fun=double)(jnp.ones(8)).tolist() == [2] * 8
assert mapped(x=jnp.ones(8)).tolist() == [2] * 8

state = mapped(jnp.arange(8.0))
donating = jax.pmap(double, donate_argnums=0)
print(donating(state).tolist())
assert state.is_deleted()



def broken(x):
    raise KeyError("mine")


try:
    jax.pmap(broken)(jnp.ones(8))
except KeyError:
    print("refused")
jax.pmap(lambda key: jax.random.bits(key))(jax.random.split(jax.random.key(0), 8))
jax.pmap(lambda x: x)(jnp.ones((8, 2), jnp.bfloat16))


@jax.jit
def outer(x):
    return jax.pmap(lambda y: y + 1)(x)


outer(jnp.zeros(8))
outer(jnp.ones(8))
jax.grad(lambda x: jax.pmap(jnp.sin)(x).sum())(jnp.ones(8))
for i in range(5):
    jax.pmap(lambda x: x + i)(jnp.ones(8))
jax.pmap(lambda x: x + 1)(jnp.zeros((8, 1100, 1024)))
never = jax.pmap(jnp.cos)
"""


@pytest.fixture(scope="module")
def habits(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(_HABITS, tmp_path_factory.mktemp("habits"))


def _of_line(run: Run, text: str) -> SiteRecord:
    line = 1 + next(i for i, line in enumerate(_HABITS.splitlines()) if text in line)
    (site,) = [site for site in run.record.called if site.line == line]
    return site


def test_the_program_notices_nothing(habits: Run):
    assert habits.output.startswith("[0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0]\nrefused\n")
    assert habits.exit_code == 0
    assert habits.record.problems == ()


def test_arguments_are_copied_before_they_are_donated(habits: Run):
    (call,) = _of_line(habits, "donating = ").calls

    assert call.given[0].values().tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert call.returned[0].values().tolist() == [0, 4, 8, 12, 16, 20, 24, 28]
    assert (call.given[0].devices, call.returned[0].devices) == (8, 8)
    assert (call.given[0].parts, call.returned[0].parts) == (8, 8)


def test_a_method_is_given_its_object_and_that_is_no_array(habits: Run):
    (site,) = [site for site in habits.record.called if site.function == "Model.apply"]

    assert [array.path for array in site.calls[0].given] == ["[1]"]
    assert site.within == ("Model", "<module>")


def test_an_error_of_the_program_is_written_down(habits: Run):
    assert _of_line(habits, "jax.pmap(broken)").calls[0].raised == "KeyError"


def test_random_keys_and_small_floats(habits: Run):
    (key,) = _of_line(habits, "random.bits").calls[0].given
    (small,) = _of_line(habits, "bfloat16").calls[0].returned

    assert (key.dtype, key.shape) == ("key<fry>", (8, 2))
    assert (small.dtype, small.values().dtype) == ("bfloat16", np.float32)


def test_a_jit_in_which_something_is_mapped_counts_as_mapped(habits: Run):
    (site,) = [site for site in habits.record.called if site.function == "outer"]

    assert [call.returned[0].values().tolist() for call in site.calls] == [[1] * 8, [2] * 8]


def test_a_jit_without_anything_mapped_does_not(habits: Run):
    assert [site.function for site in habits.record.sites if not site.is_mapped] == ["double"]


def test_what_is_only_traced_and_what_is_never_called(habits: Run):
    assert [site.function for site in habits.record.hidden] == ["sin"]
    assert [site.function for site in habits.record.idle] == ["cos"]


def test_what_is_mapped_in_a_loop_is_one_site(habits: Run):
    site = _of_line(habits, "x + i")

    assert (len(site.calls), site.count) == (5, 5)
    assert [call.returned[0].values().tolist()[0] for call in site.calls] == [1, 2, 3, 4, 5]


def test_a_program_that_is_killed_leaves_what_it_did(tmp_path: pathlib.Path):
    killed = "import os, jax, jax.numpy as jnp\nf = jax.pmap(jnp.sin)\n"
    killed += "for _ in range(6):\n    f(jnp.ones(8))\nos.kill(os.getpid(), 9)\n"
    run = recorded(killed, tmp_path)

    assert run.exit_code == -9
    assert [len(site.calls) for site in run.record.called] == [6]


def test_another_sitecustomize_still_runs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sitecustomize.py").write_text("print('theirs')\n")
    monkeypatch.setenv("RECORDED_PATH", str(tmp_path))
    run = recorded("print('program')\n", tmp_path / "program")

    assert run.output == "theirs\nprogram\n"


def test_large_arrays_leave_digests(habits: Run):
    (result,) = _of_line(habits, "1100, 1024").calls[0].returned

    assert (result.archive, result.mean, result.shape) == (None, 1.0, (8, 1100, 1024))
    assert len(set(result.rows)) == 1
    assert len(result.rows) == 8


def test_what_a_function_is_given_has_the_type_in_which_it_is_traced(tmp_path: pathlib.Path):
    program = """\
        import jax, numpy as np
        jax.pmap(lambda x: x)(np.full((8, 2), 0.1))
        """
    run = recorded(textwrap.dedent(program), tmp_path)
    (call,) = run.record.called[0].calls

    assert call.given[0].dtype == "float64"
    assert call.given[0].values().dtype == np.float32


# A process that has computed should not fork: JAX has threads by then.
_FORKS = """\
import multiprocessing
import os

import jax
import numpy as np

x = np.arange(8.0)
mapped = jax.pmap(lambda x: x * 2)


def call(n):
    jax.pmap(lambda x: x + n)(x[:n])


def work():
    again = multiprocessing.Process(target=call, args=(2,))
    again.start()
    again.join()
    call(4)
    mapped(x)


if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    child = os.fork()
    if not child:
        call(8)
        os._exit(0)
    os.waitpid(child, 0)
    mapped(x)
"""


def test_forks_are_processes_of_their_own(tmp_path: pathlib.Path):
    record = recorded(_FORKS, tmp_path, timeout=60.0).record

    found = [
        (s.process, s.line, [call.given[0].shape[0] for call in s.calls]) for s in record.called
    ]
    assert found == [(0, 8, [8]), (1, 8, [8]), (1, 12, [4]), (2, 12, [2]), (3, 12, [8])]
    assert record.is_complete
    assert record.problems == ()


def test_a_program_that_may_write_no_more_goes_on_and_is_not_complete(tmp_path: pathlib.Path):
    program = """\
        import resource
        import jax, numpy as np
        mapped = jax.pmap(lambda x: x * 2)
        mapped(np.arange(8.0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        print(mapped(np.arange(4.0)).tolist())
        """
    run = recorded(textwrap.dedent(program), tmp_path)

    assert (run.exit_code, run.output) == (0, "[0.0, 2.0, 4.0, 6.0]\n")
    assert [len(site.calls) for site in run.record.called] == [1]
    assert not run.record.is_complete
