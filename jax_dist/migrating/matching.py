"""Finds for each mapped function of one run the same one of another: lines and names may move."""

from collections.abc import Callable, Hashable, Iterable, Sequence

from jax_dist.migrating.records import Mapped

# What two must share, the surest first. At the end, only the file: a lambda that got a name.
_SHARED: tuple[Callable[[Mapped], Hashable], ...] = (
    lambda one: (one.process, one.file, one.function, one.within),
    lambda one: (one.process, one.file, one.function),
    lambda one: (one.process, one.file),
)


def pairs(
    before: Sequence[Mapped], after: Sequence[Mapped], spare: Iterable[Mapped] = ()
) -> tuple[list[tuple[Mapped, Mapped | None]], list[Mapped]]:
    """Pairs what is the same function; within what looks alike, the order of first calls decides.

    Args:
      before: the mapped functions of one run, in the order of their first calls.
      after: those of the other run.
      spare: jitted functions of the other run. One stands for a mapped function of which nothing
        else is left, and then must have the same name.

    Returns:
      Each of `before` with its partner, if it has one; and those of `after` that are left.
    """
    partner: dict[int, Mapped] = {}
    left = list(after)
    for shared in _SHARED:
        left = _pair(before, left, shared, partner)
    for shared in _SHARED[:2]:
        spare = _pair(before, spare, shared, partner)
    return [(one, partner.get(id(one))) for one in before], left


def _pair(
    before: Iterable[Mapped],
    after: Iterable[Mapped],
    shared: Callable[[Mapped], Hashable],
    partner: dict[int, Mapped],
) -> list[Mapped]:
    """Pairs groups of one size; of others, who is who would be a guess. Returns who is left."""
    ones = _groups((one for one in before if id(one) not in partner), shared)
    others = _groups(after, shared)
    left: list[Mapped] = []
    for key, group in others.items():
        if len(ones.get(key, ())) == len(group):
            partner.update((id(one), other) for one, other in zip(ones[key], group, strict=True))
        else:
            left += group
    return left


def _groups(
    those: Iterable[Mapped], shared: Callable[[Mapped], Hashable]
) -> dict[Hashable, list[Mapped]]:
    groups: dict[Hashable, list[Mapped]] = {}
    for each in those:
        groups.setdefault(shared(each), []).append(each)
    return groups
