"""Finds for each mapped function of one run the same one of another: lines and names may move."""

from collections.abc import Callable, Hashable, Iterable

from jax_dist.migrating.verify.records import Record, Site

_Key = Callable[[Site], Hashable]

# What two must share, the surest first. At the end, only the file: a lambda that got a name.
_NAMED: tuple[_Key, ...] = (
    lambda site: (site.process, site.file, site.function, site.within),
    lambda site: (site.process, site.file, site.function),
)
_IN_ONE_FILE: _Key = lambda site: (site.process, site.file)


def pairs(before: Record, after: Record) -> tuple[list[tuple[Site, Site | None]], list[Site]]:
    """Pairs what is the same function; of those that look alike, the order of making decides.

    A jit without anything mapped inside stands for a mapped function only where nothing better is
    left; it must have the same name.

    Returns:
      Each site that was called before with its partner, if it has one; and the mapped functions
      that were called after, and are nobody's partner.
    """
    partners: dict[int, Site] = {}
    # First those that were called; then, where one of two is idle in one run, all that there are.
    for ones, others, keys in (
        (before.called, after.called, _NAMED),
        ((*before.called, *before.idle), after.sites, _NAMED),
        (before.called, after.called, (_IN_ONE_FILE,)),
    ):
        for key in keys:
            taken = {id(site) for site in partners.values()}
            ones_left = [site for site in ones if id(site) not in partners]
            others_left = [site for site in others if id(site) not in taken and _is_top(site)]
            _pair(_in_order(before, ones_left), others_left, key, partners)
    taken = {id(site) for site in partners.values()}
    new = [site for site in after.called if id(site) not in taken]
    return [(site, partners.get(id(site))) for site in before.called], new


def _is_top(site: Site) -> bool:
    """Whether it is not only a part of what another site made."""
    return site.count > 0 or not site.inside


def _pair(
    ones: Iterable[Site], others: Iterable[Site], key: _Key, partners: dict[int, Site]
) -> None:
    """Pairs groups of one size; of others, who is who would be a guess."""
    groups = _groups(others, key)
    for shared, group in _groups(ones, key).items():
        partner_group = groups.get(shared, [])
        if len(partner_group) == len(group):
            partners.update(
                (id(site), partner) for site, partner in zip(group, partner_group, strict=True)
            )


def _groups(sites: Iterable[Site], key: _Key) -> dict[Hashable, list[Site]]:
    groups: dict[Hashable, list[Site]] = {}
    for site in sites:
        groups.setdefault(key(site), []).append(site)
    return groups


def _in_order(record: Record, sites: Iterable[Site]) -> list[Site]:
    wanted = {id(site) for site in sites}
    return [site for site in record.sites if id(site) in wanted]
