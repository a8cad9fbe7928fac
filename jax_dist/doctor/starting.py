"""Whether JAX starts at all, and computes right."""

from collections.abc import Iterator

from jax_dist.doctor.facts import Facts
from jax_dist.doctor.findings import Finding, harm

_HELP = {
    "versions": "Look at the lines above; python -m jax_dist.doctor.probe shows them whole.",
    "options": "Put right what the line names, or install jax anew.",
    "cache": "jax-dist cache doctor looks at the folder alone.",
    "devices": "JAX_PLATFORMS=cpu starts without accelerators.",
    "ways": "Report it, with the output of jax-dist doctor --json.",
    "collective": "JAX_PLATFORMS=cpu tells whether it is the devices.",
}
_HUNG = {
    "devices": "Another process may hold the devices, or the driver hangs; JAX_PLATFORMS=cpu "
    "starts without them.",
    "collective": "The devices do not reach each other; run one device alone with "
    "CUDA_VISIBLE_DEVICES=0, or set NCCL_DEBUG=INFO.",
}
_WHAT = {
    "versions": "Python does not start",
    "options": "jax cannot be imported",
    "cache": "the compilation cache cannot be looked at",
    "devices": "JAX cannot start its devices",
    "ways": "this library cannot use this jax",
    "collective": "a sum over the devices fails",
}


def check(facts: Facts) -> Iterator[Finding]:
    """The stage in which the probe ended, and whether its sum was right."""
    failed = facts.probed.failed
    if failed is not None and facts.jax is None and "versions" in facts.probed.stages:
        yield harm("no-jax", "jax is not installed for this Python", "pip install -U jax")
    elif failed is not None and facts.probed.hung:
        do = _HUNG.get(failed, "Try again with a longer --timeout.")
        yield harm("hang", f"{_WHAT[failed]}: no answer within the time", do)
    elif failed is not None:
        words = facts.probed.words or "it ended without a word"
        yield harm(f"{failed}-fail", f"{_WHAT[failed]}: {words}", _help(facts, failed))
    yield from _sum(facts)


def _help(facts: Facts, stage: str) -> str:
    asked = facts.environment.get("JAX_PLATFORMS")
    if stage == "devices" and asked:
        return f"JAX_PLATFORMS={asked} must name what is here and has its plugin; or unset it."
    return _HELP[stage]


def _sum(facts: Facts) -> Iterator[Finding]:
    found = facts.stage("collective")
    if not found:
        return
    wrong = [value for value in found["sums"] if value != found["expected"]]
    if wrong:
        what = f"a sum over {found['devices']} devices gives {wrong[0]}, not {found['expected']}"
        yield harm("wrong-sum", what, "Do not train here: look at the devices, one by one.")
