"""How sure a place is, by what two runs say of it: by its own calls or values, and no other ones.

Own are the calls of what is mapped at the place, or was handed on through it. What is traced as a
part of something larger is judged by its text, else as a part of that.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax_dist.migrate.results import PlaceResult
from jax_dist.migrate.verify import calls, slices
from jax_dist.migrate.verify.equivalence import NotProvedError
from jax_dist.migrate.verify.evidence import SiteRecord
from jax_dist.migrate.verify.ledger import (
    LedgerEntry,
    MigrationVerification,
    Rung,
    SiteComparison,
)

_WHERE = re.compile(r" \(line [^)]*\)")  # of the program that ran, not of the user's
_IDLE = ("it was made, and never called",)
_UNSTEADY = "what it is given or gives differs from run to run, without the migration too"
_LOST = "not all that the command did was written down"
_DRIFTED = "it is given other values than before the migration: what comes before it differs"


@dataclass(frozen=True)
class Judgement:
    """How sure a place is, and why."""

    rung: Rung
    calls: int = 0
    equal: int = 0
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()  # by which its programs are equal
    signatures: tuple[Mapping[str, Any], ...] = ()  # the texts of these, where they prove it

    def proved(self, signatures: Iterable[Mapping[str, Any]]) -> "Judgement":
        """More than that, where the texts of the programs show it.

        Args:
          signatures: the texts, as `slices.proof` takes them.
        """
        signatures = tuple(signatures)
        if not signatures:
            return self
        rules: set[str] = set()
        try:
            for each in signatures:
                rules |= set(slices.proof(each))
        except NotProvedError as reason:
            return replace(self, notes=(*self.notes, f"its programs differ: {reason}"))
        notes = list(self.notes)
        for name, form in (("before", "old"), ("after", "new")):
            sizes = [size for each in signatures for size in each["sizes"].items()]
            alone = sorted({size for size, texts in sizes if [*texts] == [name]})
            if name == "before" and len(alone) == len({size for size, _ in sizes}) > 0:
                notes.append("it takes a slice for each of all devices, and no fewer")
            elif alone:
                notes.append(f"on {', '.join(alone)} of the devices only the {form} form runs")
        return replace(
            self,
            rung=Rung.EQUAL_BY_RULES if rules else Rung.SAME_PROGRAM,
            rules=tuple(sorted(rules)),
            signatures=signatures,
            notes=tuple(notes),
        )


@dataclass(frozen=True)
class Own:
    """What belongs to one place.

    Attributes:
      ran: whether all of its expressions did.
      alone: whether one gave something that nobody records, outside of all recorded calls.
      sites: what was mapped there, before.
      values: the comparisons of what host edits gave there.
      around: what ran it as a part of its calls.
    """

    ran: bool
    alone: bool = False
    sites: Sequence[SiteRecord] = ()
    values: Sequence[SiteComparison] = ()
    around: Sequence[SiteRecord] = ()


def judged(own: Own, found: MigrationVerification, inside: Mapping[int, SiteRecord]) -> Judgement:
    """How sure a place is.

    Args:
      own: what belongs to it.
      found: what the runs say of all.
      inside: as `comparison.pairs_inside` gives them.
    """
    compared = {id(each.site): each for each in found.sites}
    mine = [compared[id(site)] for site in own.sites if id(site) in compared] + [*own.values]
    number = sum(each.calls_before for each in mine)
    equal = sum(each.equal for each in mine)
    parts = [_of_calls(each) for each in mine]
    problems = [said for each in parts for said in each.problems]
    if problems:
        return Judgement(Rung.DIFFERENT, number, equal, calls.first_few(problems))
    idle = sorted(
        what
        for site in own.sites
        for what in site.made - site.told
        if not any(what in e.told for e in own.sites if e.process != site.process)
    )
    if idle or not own.ran:
        names = dict.fromkeys(_WHERE.sub("", each) for each in idle)
        some = any(site.told for site in own.sites)
        notes = (f"never called: {', '.join(names)}",) if some else _IDLE if idle else ()
        return Judgement(Rung.NEVER_RAN, number, equal, notes=notes)
    if found.before.exit_code != 0:
        return Judgement(Rung.RAN, notes=("the command failed before the migration",))
    if not found.is_complete:
        return Judgement(Rung.RAN, number, equal, notes=(_LOST,))
    parts += [_of_part(site, inside, compared) for site in own.sites if site.traced]
    parts += [_around(own.around, compared)] if own.around else []
    if parts and not own.alone:
        return together(parts)
    if found.problems or any(each.problems for each in found.sites):
        said = found.problems or ("what is mapped around it differs",)
        return Judgement(Rung.DIFFERENT, problems=said)
    return Judgement(Rung.RAN, notes=("it has no calls or values of its own to compare",))


def _of_calls(each: SiteComparison) -> Judgement:
    """By the calls of one function or host edit."""
    number = each.calls_before - each.raised
    notes = calls.first_few([*_said_of_raised(each), *each.notes])
    if each.problems and not each.drifted:
        return Judgement(Rung.DIFFERENT, problems=each.problems)
    if each.problems or each.unsteady:  # values show nothing, but texts may
        notes = *notes, _DRIFTED if each.problems else _UNSTEADY
        nothing = Judgement(Rung.RAN, number, number, notes=notes)
        shown = nothing if each.unproved or not number else nothing.proved(each.signatures)
        if shown.rung is not Rung.RAN:
            return shown
        if each.problems:
            return Judgement(Rung.DIFFERENT, problems=each.problems)
        return replace(shown, equal=each.equal)
    if each.raised and not number:
        return Judgement(Rung.RAISED, notes=notes)
    if not number == each.equal > 0:
        return Judgement(Rung.RAN, number, each.equal, notes=notes)
    rung = Rung.REPLAYED if each.same_form else Rung.SAME_IN_TWO_RUNS
    same = Judgement(rung, number, each.equal, notes=notes)
    if each.unproved:
        return replace(same, notes=(*notes, each.unproved))
    return same.proved(each.signatures)


def _said_of_raised(each: SiteComparison) -> Iterable[str]:
    if each.raised:
        number = "1 call" if each.raised == 1 else f"{each.raised} calls"
        yield f"{number} raised the same error in both forms, and so showed nothing"


def _of_part(
    site: SiteRecord, inside: Mapping[int, SiteRecord], compared: Mapping[int, SiteComparison]
) -> Judgement:
    """By the text of what is traced as a part, else as a part of what it is traced in."""
    partner, times = inside.get(id(site)), len(site.traced)
    if partner is not None and len(partner.traced) == times:
        pairs = list(zip(site.traced, partner.traced, strict=True))
        if all("text" in each for pair in pairs for each in pair):
            texts = [calls.both(one, other, sizes=True) for one, other in pairs]
            different = {json.dumps(each): each for each in texts}
            notes = ("it ran only inside a larger traced function",)
            proof = Judgement(Rung.RAN, times, times, notes=notes).proved(different.values())
            if proof.rung > Rung.RAN:
                return proof
    return _around(site.covers, compared)


def _around(sites: Sequence[SiteRecord], compared: Mapping[int, SiteComparison]) -> Judgement:
    """As a part of what was called around it."""
    if not sites or not all(id(site) in compared for site in sites):
        return Judgement(Rung.RAN, notes=("it ran only inside a larger traced function",))
    lines = ", ".join(str(line) for line in sorted({site.line for site in sites}))
    whole = [compared[id(site)] for site in dict.fromkeys(sites)]
    least = together([_of_calls(each) for each in whole])
    if least.rung is Rung.DIFFERENT:
        said = f"it is a part of what is called in line {lines}, which differs"
        return Judgement(Rung.DIFFERENT, problems=(said,))
    notes = (f"checked as part of line {lines}",)
    if least.rung < Rung.SAME_IN_TWO_RUNS:
        return Judgement(Rung.RAN, notes=notes)
    return replace(least, notes=notes)


def entry(place: PlaceResult, judgement: Judgement) -> LedgerEntry:
    return LedgerEntry(place.path, place.line, place.what, **vars(judgement))


def together(judgements: Sequence[Judgement]) -> Judgement:
    """As sure as the least sure of them."""
    return Judgement(
        rung=min(each.rung for each in judgements),
        calls=sum(each.calls for each in judgements),
        equal=sum(each.equal for each in judgements),
        problems=tuple(dict.fromkeys(said for each in judgements for said in each.problems)),
        notes=tuple(dict.fromkeys(said for each in judgements for said in each.notes)),
        rules=tuple(sorted({rule for each in judgements for rule in each.rules})),
        signatures=tuple(text for each in judgements for text in each.signatures),
    )
