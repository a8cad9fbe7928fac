"""A jax without one of the private parts that are used: all goes on, or says what does not.

JAX needs these parts itself, so they cannot be taken out of it: the one place where they are looked
up says that they are not there.
"""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

import jax_dist
from jax_dist._compat import cache, private, processes

_COMPAT = pathlib.Path(jax_dist.__file__).parent / "_compat"
_LOOKS_UP = re.compile(r"private\.(?:find|part)\(\s*\"(?P<module>[\w.]+)\",\s*\"(?P<name>[\w.]+)\"")

# What runs without the parts: each line is right, or an UnsupportedError that names the part.
_PROGRAM = """
import io, pathlib, sys, warnings
import jax, numpy as np
from jax_dist._compat import private
from jax_dist.errors import UnsupportedError

hidden = set(sys.argv[1].split(","))
found = private.find
private.find = lambda module, name: None if f"{module}:{name}" in hidden else found(module, name)

import jax_dist
from jax import lax
from jax_dist.cache import enable
from jax_dist.commands.cli import main


def mapped():
    f = jax_dist.pmap(lambda x: x / lax.psum(x, "i"), "i")
    x = np.arange(8.0, dtype=np.float32)
    for _ in range(3):
        np.testing.assert_allclose(f(x), x / 28, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(f)(x), x / 28, rtol=1e-6)


def rewritten():
    if not jax_dist._compat.CAN_REWRITE:
        return
    table = np.ones(1000, np.float32)
    f = jax_dist.rewrite(jax.pmap(lambda x: lax.all_gather(x, "i").mean() + table.sum(), "i"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_allclose(f(np.arange(8.0, dtype=np.float32)), [1003.5] * 8)


def linted():
    file = pathlib.Path(sys.argv[2], "a.py")
    file.write_text("import jax\\nf = jax.pmap(print)\\n")
    said = io.StringIO()
    main(["lint", str(file)], out=said)
    assert "JXD001" in said.getvalue(), said.getvalue()


def missed():
    enable(sys.argv[2])
    jax.jit(lambda x: x * 3 + 1)(1.0)


def guarded():
    with jax_dist.strict():
        jax.jit(lambda x: x)


for step in (mapped, rewritten, linted, missed, guarded):
    try:
        step()
        print(step.__name__, "right")
    except UnsupportedError as error:
        assert any(each.replace(":", ".") in str(error) for each in hidden), error
        print(step.__name__, "refused")
"""


_LOOKED_UP_BY_A_VARIABLE = (
    *(f"{module}:{name}" for module, names in cache._CACHE_PARTS.items() for name in names),
    *(f"jax._src.pmap:{name}" for name in processes._PMAP_PARTS),
    "jax._src.cache_key:xla_flags_to_exclude_from_cache_key",
    "jax._src.clusters:ClusterEnv.auto_detect_unset_distributed_params",
    "jax._src.interpreters.pxla:cc_shard_arg",
    "jax._src.pjit:_get_fastpath_data",
    "jax._src.pjit:_infer_params",
    "jax._src.pjit:_pjit_call_impl_python",
    "jax.experimental.compilation_cache.compilation_cache:reset_cache",
)


def _parts() -> list[str]:
    found = []
    for file in sorted(_COMPAT.glob("*.py")):
        for each in _LOOKS_UP.finditer(file.read_text()):
            found.append(f"{each['module']}:{each['name']}")
    return sorted({*found, *_LOOKED_UP_BY_A_VARIABLE})


def _without(parts: list[str], folder: pathlib.Path) -> dict[str, str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, ",".join(parts), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(line.split() for line in ran.stdout.splitlines())


def test_this_jax_has_the_private_parts():
    """What moved in a new release is named here; without it, all that follows passes."""
    absent = [part for part in _parts() if private.find(*part.split(":")) is None]

    if jax.__version_info__ < (0, 8):  # where pmap was no `jit(shard_map)`
        of_pmap = [f"jax._src.pmap:{name}" for name in sorted(processes._PMAP_PARTS)]
        assert absent == ["jax._src.interpreters.partial_eval:trace_to_jaxpr", *of_pmap]
    else:
        assert absent == ["jax._src.pjit:_create_pjit_jaxpr"]


def test_without_all_private_parts(tmp_path: pathlib.Path):
    said = _without(_parts(), tmp_path)

    assert said["mapped"] == said["rewritten"] == said["linted"] == "right"
    assert said["missed"] == said["guarded"] == "refused"


def test_without_a_module():
    """What JAX has imported itself by then is out of the reach of others."""
    program = """
import sys, jax, jax.export, jax.extend, numpy as np
sys.modules["jax._src.interpreters.pxla"] = None
import jax_dist
np.testing.assert_array_equal(jax_dist.pmap(lambda x: x + 1)(np.zeros(1)), [1.0])
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("part", _parts())
def test_without_one(part: str, tmp_path: pathlib.Path):
    said = _without([part], tmp_path)

    assert said["mapped"] == said["rewritten"] == said["linted"] == "right"


def test_every_private_part_is_looked_up_in_one_place():
    imports = re.compile(r"^\s*(?:from|import) jax(?:\._src|lib\.)", re.MULTILINE)
    package = _COMPAT.parent
    assert [str(f) for f in package.rglob("*.py") if imports.search(f.read_text())] == []
