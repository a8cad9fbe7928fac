"""Which form a place takes, where a run has not shown enough of the one that it has."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jax_dist.migrate.results import UNPROVED, FileMigration, Form, PlaceResult

if TYPE_CHECKING:
    from jax_dist.migrate.verify.ledger import Ledger, LedgerEntry, Rung


def lacking(
    files: Sequence[FileMigration], proof: "Ledger", required: "Rung"
) -> "list[LedgerEntry]":
    """The places that are not as sure as they must be.

    Without the device axis, what differs from device to device would be lost without an error:
    there a mapped function must be proved.
    """
    from jax_dist.migrate.verify.ledger import REQUIREMENTS

    proved = REQUIREMENTS["proved"]
    mapped = {
        key(place)
        for file in files
        for place in file.outcomes
        if place.form is Form.IDIOMATIC and place.is_mapped
    }
    least = lambda entry: max(required, proved) if entry.key in mapped else required
    return [entry for entry in proof.entries if entry.rung < least(entry)]


def with_reasons(
    file: FileMigration, back: "Mapping[tuple[str, int, str], LedgerEntry]"
) -> FileMigration:
    """With what was seen of the places that are put back."""
    outcomes = []
    for each in file.outcomes:
        entry = back.get((each.path, each.line, each.what))
        if entry is not None and each.reason == UNPROVED:
            detail = next(iter((*entry.problems, *entry.notes)), "")
            more = {"reason": entry.reason, "by_hand": entry.remedy, "detail": detail}
            outcomes.append(dataclasses.replace(each, **more))
        else:
            outcomes.append(each)
    return dataclasses.replace(file, outcomes=tuple(outcomes))


def key(place: PlaceResult) -> tuple[str, int, str]:
    return place.path, place.line, place.what


def to_lower(
    lacking: "Sequence[LedgerEntry]", forms: Mapping[tuple[str, int, str], Form]
) -> "tuple[list[LedgerEntry], list[LedgerEntry]]":
    """The places that take another form now, and those of them that are put back by that.

    What differs at a place that has the last form may come from one that has not.
    """
    is_lowest = lambda each: forms.get(each.key, Form.MAPPED) <= Form.MAPPED
    if not all(map(is_lowest, lacking)):
        lacking = [each for each in lacking if not (is_lowest(each) and each.problems)]
    return [*lacking], [each for each in lacking if is_lowest(each)]


def lower(
    files: Sequence[FileMigration],
    forms: Mapping[tuple[str, int, str], Form],
    lacking: "Sequence[LedgerEntry]",
) -> Iterator[dict[tuple[str, int], Form]]:
    """Limits that have the places which lack something take another form, the fewest first."""
    wanted = {each.key: Form(forms.get(each.key, Form.MAPPED) - 1) for each in lacking}
    changed = {file.path for file in files if file.changed}
    defined = {key(e): e.defined_at for file in files for e in file.outcomes if e.defined_at}
    if all(each[0] in changed or each in defined for each in wanted):
        # What no place stands for keeps its whole file.
        named: dict[tuple[str, int], Form] = {}
        for place, form in wanted.items():
            at = place[0], place[1] if place in forms else 0
            named[at] = min(form, named.get(at, form))
            if place in defined and form is Form.LEFT:  # it changes where its name is defined
                named[defined[place]] = Form.LEFT
        yield named
        worst = min(wanted.values())
        if worst > Form.LEFT:  # what goes with mapped functions takes the form that these take
            paths = {path for path, _, _ in wanted}
            yield {(path, line): worst for path, line, _ in forms if path in paths}
    yield {(file.path, 0): Form.LEFT for file in files}  # what another file defines goes back there
