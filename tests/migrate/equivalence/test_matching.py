"""Which mapped function of one run is which of another."""

from jax_dist.migrate.verify.comparison import pairs
from jax_dist.migrate.verify.evidence import RunRecord, SiteRecord


def _site(
    function: str,
    *,
    line: int = 1,
    file: str = "a.py",
    within: tuple[str, ...] = ("<module>",),
    is_mapped: bool = True,
    inside: bool = False,
    count: int = 1,
) -> SiteRecord:
    return SiteRecord(
        process=0,
        file=file,
        line=line,
        within=within,
        function=function,
        is_mapped=is_mapped,
        inside=inside,
        count=count,
    )


def _lines(
    before: list[SiteRecord], after: list[SiteRecord]
) -> tuple[list[tuple[int, int | None]], list[int]]:
    found, new = pairs(RunRecord(tuple(before)), RunRecord(tuple(after)))
    lines = [(one.line, None if other is None else other.line) for one, other in found]
    return lines, [site.line for site in new]


def test_by_name_where_lines_moved_and_the_order_changed():
    before = [_site("f", line=1), _site("g", line=2)]
    after = [_site("g", line=30), _site("f", line=40)]

    assert _lines(before, after) == ([(1, 40), (2, 30)], [])


def test_by_the_functions_around_where_the_names_are_the_same():
    before = [_site("f", line=1, within=("train",)), _site("f", line=2, within=("test",))]
    after = [_site("f", line=30, within=("test",)), _site("f", line=40, within=("train",))]

    assert _lines(before, after) == ([(1, 40), (2, 30)], [])


def test_by_order_where_all_else_is_the_same():
    before = [_site("<lambda>", line=1), _site("<lambda>", line=2)]
    after = [_site("<lambda>", line=30), _site("<lambda>", line=40)]

    assert _lines(before, after) == ([(1, 30), (2, 40)], [])


def test_a_lambda_that_got_a_name_is_the_one_that_is_left():
    before = [_site("f", line=1), _site("<lambda>", line=2)]
    after = [_site("body", line=30), _site("f", line=40)]

    assert _lines(before, after) == ([(1, 40), (2, 30)], [])


def test_of_two_and_three_alike_nobody_is_anybody():
    before = [_site("f", line=1), _site("f", line=2)]
    after = [_site("f", line=line) for line in (30, 40, 50)]

    assert _lines(before, after) == ([(1, None), (2, None)], [30, 40, 50])


def test_one_of_two_that_was_not_called_in_one_run_is_counted():
    """The run before failed after the first: the second was mapped, and never called."""
    before = [_site("f", line=1), _site("f", line=2, count=0)]
    after = [_site("f", line=30), _site("f", line=40)]

    assert _lines(before, after) == ([(1, 30)], [])


def test_one_that_is_no_longer_called_is_found_all_the_same():
    assert _lines([_site("f", line=1)], [_site("f", line=30, count=0)]) == ([(1, 30)], [])


def test_a_jit_of_the_same_name_where_nothing_is_mapped_any_more():
    before = [_site("f", line=1)]
    after = [_site("f", line=30, is_mapped=False), _site("g", line=40, is_mapped=False)]

    assert _lines(before, after) == ([(1, 30)], [])


def test_a_part_of_a_jit_is_nobody():
    """A helper maps inside the jit around it, and both have the name of the user's function."""
    before = [_site("f", line=1), _site("f", line=2, count=0)]
    after = [
        _site("f", line=30, within=("main",)),
        _site("f", line=40, within=("main",)),
        _site("f", line=50, within=("helper",), inside=True, count=0),
    ]

    assert _lines(before, after) == ([(1, 30)], [])


def test_other_files_are_others():
    assert _lines([_site("f")], [_site("f", file="b.py", line=30)]) == ([(1, None)], [30])
