"""What the machine has, and what JAX makes of it."""

import pathlib
from collections.abc import Iterator

from jax_dist.doctor.facts import Facts
from jax_dist.doctor.findings import Finding, harm, note

_PATTERNS = {  # files by which the system shows an accelerator
    "NVIDIA GPU": "nvidia[0-9]*",
    "AMD GPU": "kfd",
    "TPU": "accel[0-9]*",
}
_EXTRAS = {"NVIDIA GPU": "jax[cuda13]", "AMD GPU": "jax[rocm]", "TPU": "jax[tpu]"}


def accelerators(folder: pathlib.Path = pathlib.Path("/dev")) -> tuple[str, ...]:
    """The kinds that the system shows, whatever JAX can use."""
    return tuple(kind for kind, pattern in _PATTERNS.items() if any(folder.glob(pattern)))


def check(facts: Facts) -> Iterator[Finding]:
    """An accelerator that is not used; a single device."""
    if not facts.devices:
        return
    on_cpu = facts.stage("devices")["backend"] == "cpu"
    if on_cpu and facts.accelerators:
        yield from _unused(facts)
    elif on_cpu and facts.devices == 1:
        what = "JAX has one device, so nothing is ever sent"
        do = "JAX_NUM_CPU_DEVICES=8 simulates 8; jax_dist.testing.simulated_devices in tests"
        yield note("one-device", what, do)


def _unused(facts: Facts) -> Iterator[Finding]:
    kind = facts.accelerators[0]
    asked = facts.environment.get("JAX_PLATFORMS")
    if asked:
        what = f"this machine has an {kind}, and JAX_PLATFORMS={asked} leaves it out"
        yield note("platforms", what, "unset JAX_PLATFORMS to use it")
    else:
        what = f"this machine has an {kind}, and JAX computes on the CPU"
        yield harm("unused-accelerator", what, f"pip install -U '{_EXTRAS[kind]}'")
