"""The report: whole texts, as the user sees them, and the same as data."""

import dataclasses
import html.parser
import json
import textwrap

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jax_dist
from jax_dist._hlo import Collective, ProgramCost
from jax_dist._rewrite import rendering
from jax_dist._rewrite.pipeline import PassFinding
from jax_dist._rewrite.report import CacheVerdict, CapturedArray, Report
from jax_dist.plan import Plan, PlanRow
from jax_dist.topology import Topology

pytestmark = pytest.mark.rewriting

_STABLE = CacheVerdict(stable=True)
_BEFORE = ProgramCost(
    collectives=(
        Collective("all-gather", ("data",), 4, 1, 16_384, 12_288.0),
        Collective("all-reduce", ("data", "model"), 8, 15, 4, 7.0, "in a loop of unknown length"),
    ),
    stablehlo_bytes=2_105_000,
    constants_bytes=1_048_576,
    argument_bytes=65_536,
    output_bytes=4,
    temp_bytes=1_200_000,
)
_AFTER = ProgramCost(
    collectives=(
        Collective("all-reduce", ("data",), 4, 1, 1_024, 1_536.0),
        Collective("collective-permute", (), 2, 1, 4, 4.0, "in a branch"),
    ),
    stablehlo_bytes=2_345,
    constants_bytes=0,
    argument_bytes=1_114_112,
    output_bytes=4,
    temp_bytes=None,
)
_REPORT = Report(
    name="train_step",
    before=_BEFORE,
    after=_AFTER,
    cache_before=CacheVerdict(
        stable=False, causes=("W is part of the program. Pass it.", "And so on.")
    ),
    cache_after=_STABLE,
    findings=(
        PassFinding(
            "JXD301",
            "refused",
            "all_gather over 'data', then mul",
            "the other operand may differ between the devices along 'data', and then the sum of "
            "the products is not a product of sums",
            "train.py:40",
        ),
        PassFinding("JXD301", "rewritten", "all_gather over 'data', then mean", "", "train.py:12"),
        PassFinding("JXD303", "noted", "psum of a gradient", "it is summed already", ""),
    ),
    captured=(
        CapturedArray("W", (512, 512), "float32", 1_048_576, "train.py:3", "train.py:9", "lifted"),
        CapturedArray("self.mask", (8,), "bool", 8, "train.py:5", "", "kept"),
    ),
)


def test_the_whole_report():
    assert str(_REPORT) == textwrap.dedent("""\
        train_step: 1 rewritten, 1 refused, 1 noted, 1 array lifted, 1 array kept;
          12.4 kB -> 1.5 kB moved per step

        Rewritten
          JXD301  all_gather over 'data', then mean
                  train.py:12

        Refused
          JXD301  all_gather over 'data', then mul
                  because the other operand may differ between the devices along 'data',
                    and then the sum of the products is not a product of sums
                  train.py:40

        Noted
          JXD303  psum of a gradient
                  because it is summed already

        Captured arrays
          name       type              now      bytes
          W          float32[512,512]  lifted  1.0 MB
            captured at train.py:3, used at train.py:9
          self.mask  bool[8]           kept       8 B
            captured at train.py:5

        Collectives, per step on one device
                  kind                axes              devices  count   result    moved
          before  all-gather          data                    4      1  16.4 kB  12.3 kB
          before  all-reduce          data, model             8    15?      4 B    105 B
          after   all-reduce          data                    4      1   1.0 kB   1.5 kB
          after   collective-permute  none of the mesh        2     1*      4 B      4 B
          *  in a branch that may not be taken; counted as if it is
          ?  in a loop of unknown length; counted once

        Moved, per step from one device
          before  ████████████████████████████████████████  12.4 kB
          after   █████                                      1.5 kB

        Program, on one device
                                     before    after
          StableHLO text             2.1 MB   2.3 kB
          constants in it            1.0 MB      0 B
          arguments                 65.5 kB   1.1 MB
          results                       4 B      4 B
          peak of temporary memory   1.2 MB  unknown

        Key in the persistent cache
          before  another one in each process, or never written:
                  W is part of the program. Pass it.
                  And so on.
          after   the same in every process, as far as the program shows""")


def test_nothing_to_rewrite_is_short():
    report = Report("step", ProgramCost(), ProgramCost(), _STABLE, _STABLE)

    assert str(report) == "step: nothing to rewrite; nothing moved between devices"


def test_nothing_to_rewrite_still_says_what_moves_and_why_the_cache_misses():
    program = ProgramCost((Collective("all-reduce", ("i",), 4, 3, 64, 96.0),))
    verdict = CacheVerdict(stable=False, causes=("Its name changes.",))

    assert str(Report("step", program, program, verdict, verdict)) == textwrap.dedent("""\
        step: nothing to rewrite; 288 B moved per step

        Collectives, per step on one device
          kind        axes  devices  count  result  moved
          all-reduce  i           4      3    64 B  288 B

        Key in the persistent cache
          another one in each process, or never written:
            Its name changes.""")


def _hostile(text):
    finding = PassFinding("JXD301", "refused", text, text, text)
    captured = CapturedArray(text, (10,) * 30, text, 10**15, text, text, text)
    collective = Collective(text, (text, "j"), 10**6, 10**6, 10**12, 1e12, "in a branch")
    program = ProgramCost((collective,), *[10**15] * 5)
    verdict = CacheVerdict(stable=False, causes=(text, text))
    machine = Topology("v5e:2x2", (jax.devices()[0],), 10**15)
    rows = (
        PlanRow("v5e:2x2", text, 10**15, 10**15, program, 10**6),
        PlanRow("v5e:2x2", f"{text}2", problem=text),
    )
    plan = Plan(text, (machine,), rows)
    return Report(text, program, ProgramCost(), verdict, verdict, (finding,), (captured,), plan)


@pytest.mark.parametrize("text", ["a" * 300, "ab " * 100, "/a-b" * 75, "self.layers['w'] " * 9])
def test_no_line_is_longer_than_a_terminal(text):
    report = _hostile(text)

    assert max(map(len, str(report).splitlines())) <= 80
    assert max(map(len, str(report.plan).splitlines())) <= 80


def test_the_middle_of_a_long_name_gives_way():
    name = "self.encoder.layers[0].attention.query_projection.kernel.value"
    captured = CapturedArray(name, (512, 512), "float32", 1_048_576, "", "", "lifted")

    lines = str(dataclasses.replace(_REPORT, captured=(captured,))).splitlines()

    assert lines[lines.index("Captured arrays") + 2] == (
        "  self.encoder.layers[0]…ojection.kernel.value  float32[512,512]  lifted  1.0 MB"
    )


def test_a_hyphen_is_no_place_to_break():
    lines = list(rendering.ReportEntry("", f"{'x' * 70} all-gather").lines())

    assert lines == ["x" * 70, "all-gather"]


def test_a_small_bar_is_still_seen():
    bars = rendering.Bars((("before", 64e6, "64.0 MB"), ("after", 12.0, "12 B"), ("", 0.0, "0 B")))

    assert list(bars.lines()) == [
        "before  ████████████████████████████████████████  64.0 MB",
        "after   ▏                                            12 B",
        "                                                      0 B",
    ]


class _Tags(html.parser.HTMLParser):
    """Which tags are open; fails where one closes that is not."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.seen = set()
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data + " "


def test_the_notebook_shows_the_same_words():
    tags = _Tags(_REPORT._repr_html_())

    assert tags.open == []
    assert tags.seen == {"pre"}
    assert tags.words.strip() == str(_REPORT)


def test_the_notebook_does_not_run_what_names_say():
    text = _hostile("<script>alert('1')</script>&")._repr_html_()

    assert "<script" not in text
    assert "&lt;script&gt;alert(&#x27;1&#x27;)&lt;/script&gt;&amp;" in text


def test_what_is_lifted_and_what_is_kept():
    table, shift = np.ones((100, 100), np.float32), np.arange(3, dtype=np.float32)

    report = jax_dist.explain(lambda x: (x @ table)[:3] + shift, np.ones(100, np.float32))

    assert {each.name: each.action for each in report.captured} == {
        "table": "lifted",
        "shift": "kept",
    }


def test_at_a_prompt_it_is_the_table():
    assert repr(_REPORT) == str(_REPORT)


def test_the_data_go_through_json():
    data = _REPORT.to_dict()

    assert json.loads(json.dumps(data)) == data
    assert list(data) == [
        "name",
        "summary",
        "findings",
        "captured",
        "moved_bytes",
        "before",
        "after",
        "cache_before",
        "cache_after",
        "plan",
    ]
    assert data["moved_bytes"] == {"before": 12_393.0, "after": 1_540.0}
    assert data["findings"][1] == {
        "code": "JXD301",
        "outcome": "rewritten",
        "what": "all_gather over 'data', then mean",
        "why": "",
        "where": "train.py:12",
    }
    assert data["captured"][1]["shape"] == [8]
    assert data["before"]["collectives"][1] == {
        "kind": "all-reduce",
        "axes": ["data", "model"],
        "size": 8,
        "count": 15,
        "result_bytes": 4,
        "moved_bytes": 7.0,
        "runs": "in a loop of unknown length",
    }
    assert data["after"]["temp_bytes"] is None
    assert data["cache_before"]["causes"] == ["W is part of the program. Pass it.", "And so on."]


def _lowered(body):
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(np.ones((4, 250), np.float32))


def test_a_report_of_real_programs():
    before = _lowered(lambda x: lax.all_gather(x, "i").mean(0))
    after = _lowered(lambda x: lax.pmean(x, "i"))
    finding = PassFinding("JXD301", "rewritten", "all_gather over 'i', then mean", "", "train.py:7")

    report = Report(
        "mean",
        ProgramCost.of(before),
        ProgramCost.of(after),
        CacheVerdict.of(before),
        CacheVerdict.of(after),
        (finding,),
    )

    assert report.summary == "1 rewritten; 3.0 kB -> 1.5 kB moved per step"
    lines = str(report).splitlines()
    assert lines[6:10] == [
        "Collectives, per step on one device",
        "          kind        axes  devices  count  result   moved",
        "  before  all-gather  i           4      1  4.0 kB  3.0 kB",
        "  after   all-reduce  i           4      1  1.0 kB  1.5 kB",
    ]
    assert lines[-2:] == [
        "Key in the persistent cache",
        "  the same in every process, as far as the program shows",
    ]


def test_a_report_ends_with_the_plan():
    machine = Topology("v5e:2x2", (jax.devices()[0],) * 4, 16_911_433_728)
    rows = (PlanRow("v5e:2x2", "fsdp", needed=20_000_000_000, memory=16_911_433_728),)
    plan = Plan("step", (machine,), rows)
    report = Report("step", *[ProgramCost()] * 2, _STABLE, _STABLE, plan=plan)

    lines = [" ".join(line.split()) for line in str(report).splitlines()[2:]]
    assert lines == [
        "Plan",
        "step: It does not fit on v5e:2x2: fsdp needs least, 20.0 GB of 16.9 GB.",
        "",
        "v5e:2x2: 4 devices on 1 host, 16.9 GB for programs on each",
        "strategy on one device arguments peak sent compiled",
        "fsdp does NOT fit, by 3.1 GB 20.0 GB",
    ]
    assert report.to_dict()["plan"]["rows"][0]["fits"] is False
