"""Reads what a merged run has written down about its places, and judges each spot by it."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jax_dist.codemod.results import PlaceResult
from jax_dist.codemod.verify import equivalence
from jax_dist.codemod.verify.ledger import LedgerEntry, Rung
from jax_dist.codemod.verify.program_text import Spot

_SHOWN = 3  # problems of one place


@dataclass
class Evidence:
    """What happened at one spot."""

    ran: bool = False
    calls: int = 0  # or values
    equal: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)  # kind, and what is said
    sides: Counter[str] = field(default_factory=Counter)  # "old", "new", "": inside of a trace
    outer: set[int] = field(default_factory=set)  # the spots whose programs it is part of
    texts: list[Mapping[str, Any]] = field(default_factory=list)  # one for each signature


@dataclass(frozen=True)
class Judgement:
    """How sure a spot is, and why."""

    rung: Rung
    calls: int = 0
    equal: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()  # by which its programs are equal
    signatures: tuple[Mapping[str, Any], ...] = ()  # the texts of these, where they prove it


def read(folder: Path) -> dict[int, Evidence]:
    """What all processes of one run wrote, by the numbers of the spots."""
    found: dict[int, Evidence] = {}
    for path in sorted(folder.glob("places-*.jsonl")):
        for event in _events(path):
            _take(found.setdefault(event["place"], Evidence()), event)
    return found


def _take(evidence: Evidence, event: Mapping[str, Any]) -> None:
    match event["event"]:
        case "ran":
            evidence.ran = True
        case "call" | "value":
            evidence.calls += 1
            evidence.equal += not event["problems"]
            number = f"{event['event']} {evidence.calls}"
            evidence.problems += [(k, f"{number}: {said}") for k, said in event["problems"]]
        case "inside":
            evidence.sides[event["side"]] += 1
            if event["of"] is not None:
                evidence.outer.add(event["of"])
        case "text":
            evidence.texts.append(event)


def judged(
    spot: Spot, found: Mapping[int, Evidence], *, lenient: bool, spots: Mapping[int, Spot]
) -> Judgement:
    """How sure a spot is.

    Args:
      spot: the place.
      found: what happened at all of them.
      lenient: whether its results may lie elsewhere than before: what puts them on devices.
      spots: all, by number.
    """
    evidence = found.get(spot.number)
    if evidence is None or not evidence.ran:
        return Judgement(Rung.NEVER_RAN)
    allowed = ("placement",) if lenient else ()
    problems = [said for kind, said in evidence.problems if kind not in allowed]
    notes = [said for kind, said in evidence.problems if kind in allowed]
    equal = evidence.calls - len({said.partition(":")[0] for said in problems})
    if problems:
        return Judgement(Rung.DIFFERENT, evidence.calls, equal, _first(problems), _first(notes))
    inside = _inside(evidence, found, spots)
    if not evidence.calls:
        return inside or Judgement(Rung.NEVER_RAN, notes=("it was made, and never called",))
    if inside is not None and inside.rung < Rung.REPLAYED:
        return Judgement(inside.rung, evidence.calls, equal, notes=inside.notes)
    replayed = Judgement(Rung.REPLAYED, evidence.calls, equal, notes=_first(notes))
    return replayed if notes else _by_text(replayed, evidence)


def _by_text(replayed: Judgement, evidence: Evidence) -> Judgement:
    """More than that its calls were equal, where the texts of its programs show it."""
    if not evidence.texts or any("why" in text for text in evidence.texts):
        return replayed
    rules: set[str] = set()
    signatures = {json.dumps(text, sort_keys=True): text for text in evidence.texts}
    try:
        for text in signatures.values():
            rules |= set(equivalence.proof(text).rules)
    except equivalence.NotProvedError as reason:
        return replace(replayed, notes=(*replayed.notes, f"its programs differ: {reason}"))
    rung = Rung.BY_RULES if rules else Rung.SAME_PROGRAM
    proved = tuple(signatures.values())
    notes = tuple(_sizes_of_one_form(proved))
    rules_ = tuple(sorted(rules))
    return replace(replayed, rung=rung, rules=rules_, signatures=proved, notes=notes)


def _sizes_of_one_form(signatures: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for name, other in (("before", "old"), ("after", "new")):
        sizes = sorted(
            {
                size
                for each in signatures
                for size, texts in each["sizes"].items()
                if [*texts] == [name]
            }
        )
        if sizes:
            yield f"on {', '.join(sizes)} of the devices only the {other} form runs"


def _inside(
    evidence: Evidence, found: Mapping[int, Evidence], spots: Mapping[int, Spot]
) -> Judgement | None:
    """What is known of a place inside of traced programs; None where it is not inside of any."""
    if not evidence.sides:
        return None
    if times := evidence.sides[""]:  # what a traced call computes is its text, and nothing else
        proof = _by_text(Judgement(Rung.REPLAYED, times, times, notes=(_LARGER,)), evidence)
        if proof.rung > Rung.REPLAYED:
            return replace(proof, notes=(_LARGER, *proof.notes))
        return Judgement(Rung.RAN, notes=proof.notes)
    if not (evidence.sides["old"] and evidence.sides["new"]):
        said = "JAX used one trace for both forms, so that they could not be told apart"
        return Judgement(Rung.RAN, notes=(said,))
    outer = [judged(spots[n], found, lenient=False, spots=spots) for n in sorted(evidence.outer)]
    lines = ", ".join(str(line) for line in sorted({spots[n].line for n in evidence.outer}))
    least = min(outer, key=lambda each: each.rung)
    if least.rung < Rung.REPLAYED:
        return Judgement(Rung.RAN, notes=(f"checked as part of line {lines}",))
    return replace(
        least,
        calls=sum(each.calls for each in outer),
        equal=sum(each.equal for each in outer),
        notes=(f"checked as part of line {lines}",),
        rules=tuple(sorted({rule for each in outer for rule in each.rules})),
        signatures=tuple(text for each in outer for text in each.signatures),
    )


def entry(place: PlaceResult, judgements: Sequence[Judgement]) -> LedgerEntry:
    """A place is as sure as the least sure of its spots."""
    return LedgerEntry(
        path=place.path,
        line=place.line,
        what=place.what,
        rung=min(each.rung for each in judgements),
        calls=sum(each.calls for each in judgements),
        equal=sum(each.equal for each in judgements),
        problems=tuple(dict.fromkeys(said for each in judgements for said in each.problems)),
        notes=tuple(dict.fromkeys(said for each in judgements for said in each.notes)),
        rules=tuple(sorted({rule for each in judgements for rule in each.rules})),
        signatures=tuple(text for each in judgements for text in each.signatures),
    )


_LARGER = "it ran only inside a larger traced function"


def _first(texts: Sequence[str]) -> tuple[str, ...]:
    different = list(dict.fromkeys(texts))
    more = len(different) - _SHOWN
    return tuple(different[:_SHOWN]) + ((f"and {more} more",) if more > 0 else ())


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    """Up to the line at which the process may have been killed."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
