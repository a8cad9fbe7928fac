"""What the doctor finds, check by check, from facts that are written down here."""

import re

import pytest

from jax_dist import doctor
from jax_dist.doctor import Facts, checked

_STAGES = {
    "versions": {"python": "3.13.0", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.0"},
    "options": {"names": ["jax_enable_x64", "jax_platforms", "jax_disable_jit"]},
    "cache": {"path": "/c", "entries": 0, "bytes": 0, "unsafe": {}},
    "devices": {"backend": "cpu", "count": 8, "kinds": ["cpu"]},
    "collective": {"devices": 8, "sums": [28.0] * 8, "expected": 28.0},
}


def _facts(*, accelerators: tuple[str, ...] = (), **environment: str) -> Facts:
    return Facts(environment, _STAGES, accelerators=accelerators)


def _with(stage: str, **changed: object) -> Facts:
    stages = {**_STAGES, stage: {**_STAGES[stage], **changed}}
    return Facts({}, stages)


def _names(found) -> list[str]:
    return [each.name for each in found]


def test_nothing_is_found_where_all_is_well():
    assert checked(_facts()) == ()


def test_a_plugin_of_another_version():
    plugin = _with("versions", **{"jax-cuda13-plugin": "0.9.0"})
    same = _with("versions", **{"jax-cuda13-plugin": "0.10.2"})

    assert _names(checked(plugin)) == ["plugin"]
    assert _names(checked(same)) == []


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("JAX_PMAP_SHMAP_MERGE", "0", ["removed-option"]),
        ("JAX_ENABLE_X46", "1", ["unknown-option"]),
        ("JAX_ENABLE_X64", "1", []),
        ("JAX_DIST_CACHE_DIR", "/c", []),
        ("JAX_COORDINATOR_ADDRESS", "a:1", ["no-rank"]),  # and it is not unknown
        ("JAX_DISABLE_JIT", "1", []),
    ],
)
def test_variables(variable, value, expected):
    assert _names(checked(_facts(**{variable: value}))) == expected


def test_the_token_of_a_job_is_not_shown():
    shown = doctor._variables({"JAX_DIST_TOKEN": "secret", "JAX_NUM_CPU_DEVICES": "2"})

    assert shown == {"JAX_DIST_TOKEN": "(not shown)", "JAX_NUM_CPU_DEVICES": "2"}


def test_a_misspelt_variable_is_shown_the_right_one():
    [found] = checked(_facts(JAX_ENABLE_X46="1"))

    assert str(found) == (
        "harm: JAX_ENABLE_X46 is set, and this jax does not read it\n"
        "  help: did you mean JAX_ENABLE_X64?"
    )


def test_the_option_by_which_old_programs_run():
    name = "jax_remove_custom_partitioning_ptr_from_cache_key"
    stages = {**_STAGES, "options": {"names": [name]}}

    on, off = (Facts({name.upper(): value}, stages) for value in "10")

    assert _names(checked(on)) == ["stale-programs"]
    assert _names(checked(off)) == []


def test_hardware():
    assert _names(checked(_facts(accelerators=("NVIDIA GPU",)))) == ["unused-accelerator"]
    left_out = _facts(accelerators=("NVIDIA GPU",), JAX_PLATFORMS="cpu")
    assert _names(checked(left_out)) == []


def test_accelerators_are_seen_by_their_files(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert doctor._accelerators(tmp_path) == ()

    (tmp_path / "nvidia0").touch()
    assert doctor._accelerators(tmp_path) == ("NVIDIA GPU",)


@pytest.mark.parametrize(
    ("environment", "words", "expected"),
    [
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, "SLURM: process 1 of 4", []),
        ({"SLURM_NTASKS": "4"}, "", ["launcher-incomplete"]),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "torchrun: process 0 of 2", []),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h"}, "torchrun: process 0 of 1", []),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"},
            "Open MPI: process 2 of 2",
            ["launcher-rank"],
        ),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "coordinator h:1", ["no-rank"]),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "coordinator h:1",
            [],
        ),
    ],
)
def test_launchers(environment, words, expected):
    assert doctor._launcher(environment) == words
    assert _names(checked(_facts(**environment))) == expected


def test_a_probe_that_failed_tells_its_stage():
    until_options = {"versions": _STAGES["versions"]}
    no_jax = {"versions": {"python": "3.13.0"}}

    def found(stages, **how) -> list[str]:
        return _names(checked(Facts({}, stages, **how)))

    assert found(until_options, failed="options", words="E") == ["options-fail"]
    assert found(no_jax, failed="options", words="E") == ["no-jax"]
    assert found(_STAGES, failed="collective", hung=True) == ["hang"]


def test_a_wrong_sum_is_told():
    [found] = checked(_with("collective", sums=[28.0] * 7 + [6.0]))

    assert found.what == "a sum over 8 devices gives 6.0, not 28.0"


def test_the_cache():
    unsafe = {"/c": ("every user of this machine may write there", "chmod 700 /c")}
    (found,) = checked(_with("cache", unsafe=unsafe))

    assert str(found) == (
        "harm: what /c holds is run as code, and every user of this machine may write there\n"
        "  help: chmod 700 /c"
    )


def test_advice_is_one_line():
    facts = _facts(RANK="5", WORLD_SIZE="2", MASTER_ADDR="h", JAX_FOO="1", accelerators=("TPU",))

    found = checked(facts)

    assert len(found) == 3
    for each in found:
        assert "\n" not in each.do
        assert 10 < len(each.do) < 100
        assert re.fullmatch(r"[a-z0-9-]+", each.name)
