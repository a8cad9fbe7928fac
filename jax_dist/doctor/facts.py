"""What is known of a machine: what the checks look at."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jax_dist.doctor.probing import Probed

Version = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """The environment, what the probe found, and what the machine has."""

    environment: Mapping[str, str]
    probed: Probed
    cores: int
    accelerators: tuple[str, ...]  # such as "NVIDIA GPU": seen by the system, not by JAX

    def stage(self, name: str) -> Mapping[str, Any]:
        """What one stage found; empty where the probe did not come so far."""
        return self.probed.stages.get(name, {})

    @property
    def jax(self) -> Version | None:
        """The version of jax; None where it is not installed."""
        text = self.stage("versions").get("jax")
        return None if text is None else version(text)

    @property
    def python(self) -> Version:
        return version(self.stage("versions").get("python", ""))

    @property
    def devices(self) -> int:
        """How many JAX sees in one process; 0 where it saw none."""
        return self.stage("devices").get("count", 0)


def version(text: str) -> Version:
    """`"0.12.0.1"` as `(0, 12, 0, 1)`, to compare; what follows the numbers is left out."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
