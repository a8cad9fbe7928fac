"""What rewrite and the codemod make of a pmap-era ES program does what one by hand does.

Small here: a table of 4 MB in place of 64, four pairs in place of eight.
"""

import importlib.util
import io
import os
import pathlib
import re
import subprocess
import sys
from types import ModuleType

import es_common
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jax_dist
from jax_dist.cli.main import main

_ROOT = pathlib.Path(__file__).parents[2]
_BEFORE = _ROOT / "examples" / "es_before_pmap.py"
_AFTER = _ROOT / "examples" / "es_after.py"
_NAMES = ["before", "by_hand", "migrated", "migrated_to_jax", "rewritten"]
_WARNS = "ignore::jax_dist.CapturedArrayWarning"

_compiled: list[str] = []  # the functions, one for each compilation


def _hear(event: str, seconds: float, **details: object) -> None:
    del seconds
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(str(details.get("fun_name")))


jax.monitoring.register_event_duration_secs_listener(_hear)


def tool(*arguments: str | pathlib.Path) -> str:
    out, err = io.StringIO(), io.StringIO()
    code = main([*map(str, arguments)], out=out, err=err)
    assert code < 2, err.getvalue()
    return out.getvalue()


def load(path: pathlib.Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    module.TABLE_SIZE, module.PAIRS = 1_000_000, 4
    return module


def rewritten() -> ModuleType:
    """Return the old program with `rewrite` around its function."""
    module = load(_BEFORE, "rewritten")
    make_update = module.make_update
    mesh = Mesh(np.array(jax.devices()), ("i",))
    module.make_update = lambda seed: jax_dist.rewrite(make_update(seed), mesh=mesh)
    return module


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> dict[str, ModuleType]:
    folder = tmp_path_factory.mktemp("migrated")
    to_jax_dist, to_jax = (folder / f"{name}.py" for name in ("to_jax_dist", "to_jax"))
    for path in (to_jax_dist, to_jax):
        path.write_text(_BEFORE.read_text())
    tool("lint", "--fix", "--unsafe-fixes", "--quiet", to_jax_dist)
    tool("migrate", "--write", "--quiet", to_jax_dist)
    tool("lint", "--fix", "--unsafe-fixes", "--select", "JXD301", "--quiet", to_jax)
    tool("migrate", "--to", "vendored", "--write", "--quiet", to_jax)
    return {
        "before": load(_BEFORE, "before"),
        "by_hand": load(_AFTER, "by_hand"),
        "migrated": load(to_jax_dist, "migrated"),
        "migrated_to_jax": load(to_jax, "migrated_to_jax"),
        "rewritten": rewritten(),
    }


@pytest.fixture(scope="module")
def texts(programs) -> dict[str, str]:
    """Return the StableHLO of each program."""
    texts = {}
    for name in _NAMES:
        update, args = programs[name].example_update(0, 8)
        texts[name] = update.lower(*args).as_text()
    return texts


@pytest.fixture(scope="module")
def trained(programs) -> dict[str, tuple[np.ndarray, list[float], int]]:
    """Theta, the curve, and how many programs were compiled for it."""
    results = {}
    for name in _NAMES:
        curve, before = [], len(_compiled)
        theta = programs[name].train(
            0,
            8,
            3,
            lambda _, mean_return, curve=curve: curve.append(mean_return),
            es_common.Checkpoints(),
        )
        updates = [name for name in _compiled[before:] if "update" in name]
        results[name] = np.asarray(theta), curve, len(updates)
    return results


def collectives(text: str) -> list[str]:
    """Kinds and results, such as "all_reduce 114xf32"."""
    found = re.findall(r"stablehlo\.(all_gather|all_reduce)\"(.*?)-> \(?tensor<(\S+)>", text, re.S)
    return sorted(f"{kind} {result}" for kind, _, result in found)


@pytest.mark.filterwarnings(_WARNS)
@pytest.mark.parametrize("name", _NAMES[1:])
def test_each_ends_with_the_numbers_of_the_old_one(trained, name):
    theta, curve, _ = trained["before"]

    assert theta.shape == (114,)
    assert np.abs(theta - trained[name][0]).max() <= 1e-5
    np.testing.assert_allclose(trained[name][1], curve, rtol=1e-3)  # the last bit ends an episode
    assert curve[2] > 1.2 * curve[0]  # it learns


@pytest.mark.filterwarnings(_WARNS)
def test_one_program_is_compiled_and_not_two(trained):
    counts = {name: compiled for name, (_, _, compiled) in trained.items()}

    # Plain JAX leaves the first state on one device, and what comes back lies on all.
    assert counts == {
        "before": 2,
        "by_hand": 1,
        "migrated": 1,
        "migrated_to_jax": 2,
        "rewritten": 2,
    }


@pytest.mark.filterwarnings(_WARNS)
@pytest.mark.parametrize("name", ["by_hand", "migrated", "rewritten"])
def test_the_program_holds_no_table(texts, name):
    assert len(texts["before"]) > 8_000_000  # 4 MB, two letters a byte
    assert len(texts[name]) < len(texts["before"]) / 40
    assert len(texts[name]) < 200_000


@pytest.mark.filterwarnings(_WARNS)
@pytest.mark.parametrize("name", _NAMES)
def test_the_gradient_is_reduced_and_only_scores_are_gathered(texts, name):
    gradient = "all_gather 8x114xf32" if name == "before" else "all_reduce 114xf32"

    assert sorted(collectives(texts[name])) == sorted([gradient, "all_gather 8x4x2xf32"])


def test_lint_finds_what_the_demo_shows():
    codes = re.findall(r"^\S+:(\d+):\d+: (JXD\d+)", tool("lint", _BEFORE), re.M)

    expected = ["JXD001", "JXD002", *4 * ["JXD204"], "JXD301", "JXD401"]
    assert sorted(code for _, code in codes) == expected
    assert tool("lint", "--ignore", "JXD204", _AFTER).strip() == "No findings."


@pytest.mark.slow
@pytest.mark.parametrize("path", [_BEFORE, _AFTER], ids=["before", "after"])
def test_the_script_stops_and_goes_on(path, tmp_path):
    """A run in two parts has the curve of one without a break."""
    pytest.importorskip("orbax.checkpoint")

    def curve(folder: str, *options: str) -> str:
        command = [sys.executable, "-c", _SMALL, path.stem, f"--out={tmp_path / folder}", *options]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(path.parent)]),
            "JAX_DIST_CACHE_DIR": str(tmp_path / "cache"),
        }
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert (tmp_path / folder / "learning_curve.png").stat().st_size > 10_000
        return (tmp_path / folder / "curve.csv").read_text()

    whole = curve("whole", "--generations=4")
    curve("parts", "--generations=2", "--save_every=1")
    parts = curve("parts", "--generations=4", "--save_every=1")

    assert parts == whole
    assert len(whole.splitlines()) == 5


_SMALL = """
import importlib, sys
import es_common
program = importlib.import_module(sys.argv.pop(1))
program.TABLE_SIZE, program.PAIRS = 100_000, 2
es_common.run(program.main, "small", generations=3)
"""
