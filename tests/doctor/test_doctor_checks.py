"""What the doctor finds, check by check, from facts that are written down here."""

import re

import pytest

from jax_dist.doctor import checks, diagnosis
from jax_dist.doctor.facts import Facts, Probed, version

_STAGES = {
    "versions": {"python": "3.13.0", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.0"},
    "options": {"names": ["jax_enable_x64", "jax_platforms", "jax_disable_jit"]},
    "cache": {"path": "/c", "entries": 0, "bytes": 0, "findings": []},
    "devices": {"backend": "cpu", "count": 8, "kinds": ["cpu"], "processes": 1, "bytes": [None]},
    "ways": {},
    "collective": {"devices": 8, "sums": [28.0] * 8, "expected": 28.0},
}


def _facts(*, accelerators: tuple[str, ...] = (), **environment: str) -> Facts:
    return Facts(environment, Probed(_STAGES), accelerators)


def _with(stage: str, **changed: object) -> Facts:
    stages = {**_STAGES, stage: {**_STAGES[stage], **changed}}
    return Facts({}, Probed(stages), ())


def _names(found) -> list[str]:
    return [f"{each.weight}:{each.name}" for each in found]


def test_nothing_is_found_where_all_is_well():
    facts = _facts()

    for check in checks.CHECKS:
        assert list(check(facts)) == []


def test_versions_compare_as_numbers():
    assert version("0.10.2") > version("0.9.2")
    assert version("0.12.0.1") > version("0.12.0")
    assert version("0.11.0rc1") == (0, 11, 0)


def test_versions_that_do_not_fit():
    old = _with("versions", jax="0.6.2", jaxlib="0.6.2")
    plugin = _with("versions", **{"jax-cuda13-plugin": "0.9.0"})

    assert "harm:old-jax" in _names(checks.versions(old))
    assert "harm:plugin" in _names(checks.versions(plugin))


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("JAX_PMAP_SHMAP_MERGE", "0", ["harm:removed-option"]),
        ("JAX_ENABLE_X46", "1", ["harm:unknown-option"]),
        ("JAX_ENABLE_X64", "1", []),
        ("JAX_DIST_CACHE_DIR", "/c", []),
        ("JAX_COORDINATOR_ADDRESS", "a:1", []),
        ("JAX_DISABLE_JIT", "1", []),
    ],
)
def test_variables(variable, value, expected):
    assert _names(checks.variables(_facts(**{variable: value}))) == expected


def test_the_token_of_a_job_is_not_shown():
    shown = diagnosis._variables({"JAX_DIST_TOKEN": "secret", "JAX_NUM_CPU_DEVICES": "2"})

    assert shown == {"JAX_DIST_TOKEN": "(not shown)", "JAX_NUM_CPU_DEVICES": "2"}


def test_a_misspelt_variable_is_shown_the_right_one():
    [found] = checks.variables(_facts(JAX_ENABLE_X46="1"))

    assert str(found) == (
        "harm: JAX_ENABLE_X46 is set, and this jax does not read it\n"
        "  help: did you mean JAX_ENABLE_X64?"
    )


def test_the_option_by_which_old_programs_run():
    name = "jax_remove_custom_partitioning_ptr_from_cache_key"
    stages = {**_STAGES, "options": {"names": [name]}}

    on, off = (Facts({name.upper(): value}, Probed(stages), ()) for value in "10")

    assert _names(checks.variables(on)) == ["harm:stale-programs"]
    assert _names(checks.variables(off)) == []


def test_hardware():
    one = _with("devices", count=1)

    assert _names(checks.hardware(one)) == ["note:one-device"]
    assert _names(checks.hardware(_facts(accelerators=("NVIDIA GPU",)))) == [
        "harm:unused-accelerator"
    ]
    left_out = _facts(accelerators=("NVIDIA GPU",), JAX_PLATFORMS="cpu")
    assert _names(checks.hardware(left_out)) == ["note:platforms"]


def test_accelerators_are_seen_by_their_files(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert checks.accelerators(tmp_path) == ()

    (tmp_path / "nvidia0").touch()
    assert checks.accelerators(tmp_path) == ("NVIDIA GPU",)


@pytest.mark.parametrize(
    ("environment", "words", "expected"),
    [
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, "SLURM: process 1 of 4", []),
        ({"SLURM_NTASKS": "4"}, "", ["harm:launcher-incomplete"]),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"},
            "torchrun: process 0 of 2",
            ["note:launcher-unread"],
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h"}, "torchrun: process 0 of 1", []),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"},
            "Open MPI: process 2 of 2",
            ["harm:launcher-rank"],
        ),
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "coordinator h:1", ["harm:no-rank"]),
        (
            {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "coordinator h:1",
            [],
        ),
    ],
)
def test_launchers(environment, words, expected):
    assert checks.launcher(environment) == words
    assert _names(checks.launchers(_facts(**environment))) == expected


def test_a_probe_that_failed_tells_its_stage():
    until_options = {"versions": _STAGES["versions"]}
    no_jax = {"versions": {"python": "3.13.0"}}

    def found(probed: Probed, **environment: str) -> list[str]:
        return _names(checks.starts(Facts(environment, probed, ())))

    assert found(Probed(until_options, failed="options", words="E")) == ["harm:options-fail"]
    assert found(Probed(no_jax, failed="options", words="E")) == ["harm:no-jax"]
    assert found(Probed(_STAGES, failed="collective", hung=True)) == ["harm:hang"]


def test_a_wrong_sum_is_told():
    [found] = checks.starts(_with("collective", sums=[28.0] * 7 + [6.0]))

    assert found.what == "a sum over 8 devices gives 6.0, not 28.0"


def test_the_cache():
    damaged = {"kind": "damaged", "where": "/c/x", "what": "Broken.", "do": "Mend.", "fixed": ""}
    slow = {**damaged, "kind": "never repeats", "what": "Three keys."}
    found = [{**each, "harmless": False} for each in (damaged, slow, slow, slow)]

    first, second = checks.compilation_cache(_with("cache", findings=found))

    assert str(first) == "harm: cache, damaged: /c/x: Broken.\n  help: Mend."
    assert str(second) == (
        "note: cache, never repeats: /c/x (and 2 more): Three keys.\n"
        "  help: jax-dist cache doctor lists each, and what to do"
    )


def test_advice_is_one_line():
    facts = _facts(RANK="5", WORLD_SIZE="2", MASTER_ADDR="h", JAX_FOO="1", accelerators=("TPU",))

    found = [each for check in checks.CHECKS for each in check(facts)]

    assert len(found) == 4
    for each in found:
        assert "\n" not in each.do
        assert 10 < len(each.do) < 100
        assert re.fullmatch(r"[a-z0-9-]+", each.name)
