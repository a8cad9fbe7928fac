"""What a process decides, message by message, on a clock of its own; no process is started."""

import select
import selectors
import types

import pytest

from jax_dist.multihost import job as jobs
from jax_dist.multihost.channel import Closed, Lost, Message

_BROKEN = jobs.Failed("ValueError: no", "its traceback", 3)
_TIMES = {"heartbeat_timeout": 100.0, "shutdown_timeout": 50.0}  # stopped for 35 s: given up


class _OutOfEvents(Exception):
    pass


class _Ended(Exception):
    """This process, with a text and an exit code."""


class _Channel:
    def __init__(self):
        self.sent: list[Message] = []
        self.is_closed = False
        self.comes: list[Message] | Exception = []

    def send(self, message):
        if message != jobs._Ping():
            self.sent.append(message)

    def received(self):
        if isinstance(self.comes, Exception):
            raise self.comes
        return self.comes

    def close(self):
        self.is_closed = True


class Process:
    """One process of a job. Events are seconds that pass, or `(rank, message or error)`."""

    def __init__(self, patch, rank=0, processes=3, *, fail_fast=True, has_joined=True):
        self.now, self.said, self.waits, self.stalls = 1024.0, [], [], 0
        self.leaves, self.blocked, self.stopped = False, 0.0, set()
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        for name, value in {
            "time": clock,
            "end_now": self._end_now,
            "say": lambda text, *, stacks=False: self.said.append((text, stacks)),
            "is_leaving_jax": lambda: self.leaves,
            "stack_of_main": lambda: "its stack",
            "Stall": self._stall,
            "ranks.machine_name": lambda: "here",
            "ranks.is_stopped": lambda pid: pid in self.stopped,
            "selectors": types.SimpleNamespace(DefaultSelector=lambda: self, EVENT_READ=1),
        }.items():
            patch.setattr(f"{jobs.__name__}.{name}", value)
        others = [each for each in range(processes) if each != rank] if rank == 0 else [0]
        self.channels = {other: _Channel() for other in others}
        peers = {
            other: types.SimpleNamespace(channel=channel, machine="here", pid=other)
            for other, channel in self.channels.items()
        }
        self.job = jobs.Job(
            rank, processes, peers, fail_fast=fail_fast, early_exit_timeout=lambda: 10.0, **_TIMES
        )
        if has_joined:
            self.job.has_joined = True
        self._peers = peers
        self.registered = {}
        self._events = []

    def _sleep(self, seconds):
        self.now += seconds

    def _stall(self):
        self.stalls += 1
        return types.SimpleNamespace(blocked_for=lambda: self.blocked)

    def _end_now(self, text, code, *, stacks=False):
        raise _Ended(text, code, stacks)

    # What the process sees of the selector.

    def __enter__(self):
        self.registered = {}
        return self

    def __exit__(self, *error):
        pass

    def register(self, what, events, data=None):
        self.registered[what] = selectors.SelectorKey(what, 0, events, data)

    def unregister(self, what):
        del self.registered[what]

    def select(self, timeout):
        self.waits.append(timeout)
        if select.select([self.job._woken], [], [], 0)[0]:
            return [(self.registered[self.job._woken], 1)]
        if not self._events:
            raise _OutOfEvents
        event = self._events.pop(0)
        if isinstance(event, float | int):
            self.now += event
            return []
        rank, what = event
        channel = self.channels[rank]
        channel.comes = what if isinstance(what, Exception) else [what]
        return [(self.registered[channel], 1)]

    def sees(self, *events):
        """Lets this happen, and gives what was sent since, by rank; or how this process ended."""
        for channel in self.channels.values():
            channel.sent.clear()
        self._events = list(events)
        try:
            self.job._listen()
        except _OutOfEvents:
            return {rank: each.sent[:] for rank, each in self.channels.items() if each.sent}
        except _Ended as ended:
            return ended.args


@pytest.fixture
def process(monkeypatch):
    made = []
    yield lambda *args, **options: made.append(Process(monkeypatch, *args, **options)) or made[-1]
    for each in made:
        each.job._wake.close()
        each.job._woken.close()


def _ends(culprit, text, code, *, stacks=False):
    return jobs._End(culprit, text, code, stacks)


_FAILED = "rank 1 failed with ValueError: no\nits traceback"


def test_one_fails_and_all_end_with_its_code(process):
    zero = process()
    assert zero.sees((1, _BROKEN), 0.125) == {}
    assert zero.sees(0.125) == {1: [_ends(1, _FAILED, 3)], 2: [_ends(1, _FAILED, 3)]}
    assert zero.said == [(f"rank 0: stopping because {_FAILED}", False)]
    assert zero.job.is_ending
    assert zero.sees(2.0) == {}  # the others leave first
    assert zero.sees(0.125) == ("", 3, False)


def test_rank_0_leaves_as_soon_as_the_others_have(process):
    zero = process()
    zero.sees((1, _BROKEN), 0.3)
    assert zero.sees((1, Closed()), 0.1) == {}
    assert not zero.job._may_leave.is_set()
    assert zero.sees((2, Closed()), 0.1) == ("", 3, False)


@pytest.mark.parametrize(
    ("what", "seconds"),
    [
        ("ValueError: no", 0.2),
        ("Connection closed by peer", 1.5),
        ("connection reset", 1.5),
        ("Broken pipe", 1.5),
        ("Socket closed", 1.5),
        ("the remote process is gone", 1.5),
    ],
)
def test_who_lost_a_peer_is_blamed_later_than_who_failed(process, what, seconds):
    zero = process()
    assert zero.sees((1, jobs.Failed(what, "", 3)), seconds) == {}
    assert zero.sees(0.01)[2][0].culprit == 1


def test_the_first_that_fails_is_blamed(process):
    zero = process()
    zero.sees((1, _BROKEN), 0.1)
    sent = zero.sees((2, jobs.Failed("KeyError", "", 4)), 0.15)
    assert sent[1] == sent[2] == [_ends(1, _FAILED, 3)]
    assert zero.sees((2, jobs.Failed("KeyError", "", 4)), 0.5) == {}  # the job ends once


def test_a_process_that_is_gone_after_it_said_why_is_blamed_at_once(process):
    zero = process()
    assert zero.sees((1, _BROKEN), (1, Closed())) == {2: [_ends(1, _FAILED, 3)]}
    assert zero.channels[1].is_closed
    assert zero.channels[1] not in zero.registered


def test_a_process_that_is_gone_without_a_word_ends_the_others(process):
    zero = process()
    ((end,),) = zero.sees((1, Closed()), 0.1).values()
    assert (end.culprit, end.code, end.stacks) == (1, jobs.FAILED, False)
    assert end.text.startswith("rank 1 is gone: it ended without a word")
    # A failure of another is no reason of its own.
    other = process()
    assert other.sees((2, _BROKEN), (1, Closed()))[2][0].text.startswith("rank 1 is gone")


def test_the_others_end_when_rank_0_is_gone(process):
    text, code, stacks = process(2).sees((0, Closed()))
    assert text.startswith("rank 2: stopping because rank 0 is gone: it ended without a word")
    assert (code, stacks) == (jobs.FAILED, False)
    two = process(2)
    two.sees(40.0)
    assert two.sees((0, Closed()))[0].startswith("rank 2: stopping because rank 0 is gone")


def test_who_did_not_answer_is_blamed_for_who_went_first(process):
    zero = process(processes=4)
    zero.sees(30.0, (2, jobs._Pong()), (3, jobs._Pong()), 5.5)
    (end,) = zero.sees((2, Closed()))[1]
    assert end.culprit == 1
    assert end.text.startswith("rank 1 has not answered for 36 s")
    assert "rank 2 was the first to go" in end.text
    alone = process(processes=2)
    alone.sees(40.0, (1, Closed()))
    assert alone.said[0][0].startswith("rank 0: stopping because rank 1 is gone")


def test_a_network_that_is_lost_counts_as_finished(process):
    zero = process()
    assert zero.sees((1, Lost("no route"))) == {2: [jobs._SomeFinished()]}
    assert zero.sees((2, jobs._Finished())) == {2: [jobs._SomeFinished()]}
    two = process(2)
    assert two.sees((0, Lost("no route"))) == {}
    assert two.job.finish()
    ending = process()
    ending.sees((1, _BROKEN), 0.3)
    assert ending.sees((2, Lost("no route"))) == {}


@pytest.mark.parametrize("joined", [False, True])
def test_a_job_that_does_not_fail_fast_goes_on_once_it_has_joined(process, joined):
    zero = process(fail_fast=False, has_joined=joined)
    assert bool(zero.sees((1, Closed()), 0.1)) is not joined


def test_all_finish_and_leave(process):
    zero = process()
    some = [jobs._SomeFinished()]
    assert zero.sees((1, jobs._Finished())) == {1: some, 2: some}
    zero.job._may_leave.wait = lambda: zero.sees((2, jobs._Finished()))
    assert zero.job.finish()
    assert zero.channels[1].sent == [jobs._SomeFinished(), jobs._Leave()]
    assert zero.sees((1, Closed()), (2, Closed()), 100.0) == {}  # nobody is missed any more


def test_one_that_has_finished_is_not_missed(process):
    zero = process()
    zero.sees((1, jobs._Finished()))
    assert zero.sees((1, Closed()), 1.0) == {}
    assert not zero.job.is_ending


def test_the_end_does_not_come(process):
    zero = process(processes=4)
    zero.sees((2, jobs._Finished()), 20.0, (1, jobs._Finished()))
    assert zero.sees(30.0) == {}
    ((end, _, _), *_) = zip(*zero.sees(0.5).values(), strict=True)
    assert (end.culprit, end.code) == (None, jobs.FAILED)
    assert end.text.startswith(
        "the end does not come: ranks 1-2 have waited 50 s for ranks 0 and 3 which still work."
    )


def test_one_waits_in_jax_for_one_that_has_finished(process):
    one = process(1)
    one.blocked = 10.0
    assert one.sees((0, jobs._SomeFinished()), 0.1, (0, jobs._SomeFinished())) == {}
    assert one.stalls == 1
    one.blocked = 10.5
    assert one.sees(0.1) == {0: [jobs._Stuck("its stack")]}
    assert one.sees(0.1) == {}
    zero = process()
    assert zero.sees((1, jobs._Stuck("its stack")), 0.1) == {}  # nobody has finished
    zero.sees(1.0, (2, jobs._Finished()))
    (sent, _) = zero.sees((1, jobs._Stuck("its stack"))).values()
    assert sent[0].culprit == 2
    assert sent[0].text.startswith("rank 2 has finished, and rank 1 still waits in JAX, where")
    assert "Rank 1 stands at:\nits stack\n" in sent[0].text


def test_the_first_that_has_finished_is_the_one_that_is_missed(process):
    zero = process(processes=4)
    zero.sees((3, jobs._Finished()), 1.0, (1, jobs._Finished()))
    assert (
        "rank 3 has finished (so rank 1 has), and rank 2"
        in zero.sees((2, jobs._Stuck("")))[1][0].text
    )


def test_one_that_works_or_leaves_jax_is_not_stuck(process):
    one = process(1)
    one.leaves, one.blocked = True, 20.0
    assert one.sees((0, jobs._SomeFinished()), 0.1, 0.1) == {0: [jobs._Finished()]}
    for ends in ("finish", "fail"):
        done = process(1)
        done.job.finish(wait=False) if ends == "finish" else done.job.fail("", "")
        done.blocked = 20.0
        assert done.sees((0, jobs._SomeFinished()), 0.1) == {}
        assert done.waits == [1.0] * 3


def test_one_that_is_stopped_is_given_up(process):
    zero = process()
    zero.stopped = {2}
    zero.sees(2.0)
    assert zero.sees(35.0) == {}
    zero.stopped = set()
    zero.sees(2.0)
    zero.stopped = {2}
    assert zero.sees(2.0, 35.0) == {}
    (sent, _) = zero.sees(2.0).values()
    assert sent[0].culprit == 2
    assert sent[0].text.startswith("rank 2 has been stopped for 37 s: by SIGSTOP")
    elsewhere = process()
    elsewhere.stopped = {2}
    elsewhere._peers[2].machine = "there"
    assert elsewhere.sees(2.0, 40.0, 2.0) == {}


def test_rank_0_is_stopped(process):
    two = process(2)
    two.stopped = {0}
    assert two.sees(2.0, 35.0) == {}
    assert two.sees(2.0)[0].startswith("rank 2: stopping because rank 0 has been stopped for 37 s")
    assert two.channels[0].sent == []
    done = process(2)
    done.stopped = {0}
    assert done.sees((0, jobs._Leave()), 2.0, 40.0, 2.0) == {}


def test_rank_0_asks_the_others_each_second_and_they_answer(process):
    zero = process()
    asked = []
    zero.channels[1].send = lambda message: asked.append((zero.now, message))
    zero.sees(0.5, 0.5, 0.25, 0.5, 0.75)
    assert asked == [(1025.25, jobs._Ping()), (1026.5, jobs._Ping())]
    one = process(1)
    one.channels[0].send = lambda message: asked.append((one.now, message))
    one.sees((0, jobs._Ping()), 5.0)
    assert asked[2:] == [(1024.0, jobs._Pong())]


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (0, _BROKEN),
        (0, jobs._Finished()),
        (1, jobs._SomeFinished()),
        (1, jobs._End(1, "it is over", 5, stacks=False)),
    ],
)
def test_looks_are_close_together_while_something_is_awaited(process, rank, message):
    each = process(rank)
    if isinstance(message, jobs._End):
        each.job.has_failed = True
    each.sees(1.0)
    assert set(each.waits) == {1.0}
    each.waits.clear()
    each.sees((1 - rank, message), 0.1)
    assert each.waits[0] == 1.0
    assert set(each.waits[1:]) == {0.1}
    if rank == 0:  # which is done itself, and counts the seconds
        done = process(0)
        done.job.finish(wait=False)
        done.sees(1.0, 0.1)
        assert set(done.waits[1:]) == {0.1}


@pytest.mark.parametrize(
    ("has_failed", "waits", "culprit", "ended"),
    [
        (False, False, 1, True),
        (False, False, 0, True),
        (True, False, 0, True),
        (True, False, 1, False),
        (False, True, 1, False),
    ],
)
def test_the_culprit_ends_by_itself_with_a_code_of_its_own(
    process, has_failed, waits, culprit, ended
):
    one = process(1)
    if has_failed:
        one.job.fail("ValueError", "its traceback")
    if waits:
        one.job._may_leave.wait = lambda: None
        one.job.finish()
    found = one.sees((0, _ends(culprit, "all is over", 7, stacks=True)))
    assert one.job.is_ending
    if ended:
        assert found == ("rank 1: stopping because all is over", 7, True)
        return
    told = [("rank 1: stopping because all is over", True)]
    assert one.said == ([] if has_failed else told)
    assert one.job._may_leave.is_set()
    assert one.sees((0, Closed()), 4.9) == {}
    assert one.sees(0.2) == ("", 7, False)


def test_rank_0_gives_a_culprit_that_has_finished_time_for_its_own_code(process):
    zero = process()
    zero.sees((1, jobs._Finished()))
    zero.job.end_all(1, "it is over", 5)
    assert zero.channels[2].sent[-1] == _ends(1, "it is over", 5)
    assert zero.sees(6.9) == {}
    assert zero.sees(0.2) == ("", 5, False)


def test_what_is_told_of_a_failure(process):
    one = process(1)
    one.job.fail("ValueError: no", "its traceback", 3)
    assert one.channels[0].sent == [_BROKEN]
    assert one.job.has_failed
    assert one.job.wait_until_known() == jobs.FAILED
    assert one.now == pytest.approx(1026.0, abs=0.05)
    one.sees((0, _ends(1, "it is over", 9)))
    assert not one.job.finish(wait=False)
    assert one.job.wait_until_known() == 9
    assert one.now < 1026.1
    thread = process(1)
    thread.job.fail("ValueError: no", "its traceback", in_main=False)
    assert thread.channels[0].sent == [jobs.Failed("ValueError: no", "its traceback", jobs.FAILED)]
    assert not thread.job.has_failed


def test_rank_0_waits_until_the_others_have_left(process):
    zero = process()
    zero.job.fail("ValueError: no", "its traceback", 3)
    zero.sees(0.3)
    assert zero.job.wait_until_known() == 3
    assert zero.now == pytest.approx(1026.3, abs=0.05)
    zero.job._peers.clear()
    zero.job.wait_until_known()
    assert zero.now == pytest.approx(1026.3, abs=0.05)


def test_other_messages_are_passed_on(process):
    zero, heard = process(), []
    zero.job.hear_else = lambda rank, message: heard.append((rank, message))
    zero.sees((2, Message()))
    assert heard == [(2, Message())]


def test_a_fork_lets_go_of_the_others(process, monkeypatch):
    """Else they would not see this process end while the fork lives."""
    started, forgets = [], []
    monkeypatch.setattr(jobs.threading, "Thread", lambda **options: started.append(options) or zero)
    monkeypatch.setattr(
        jobs.os, "register_at_fork", lambda *, after_in_child: forgets.append(after_in_child)
    )
    zero = process()
    zero.start = lambda: None
    zero.job.start()
    assert [each["target"] for each in started] == [zero.job._listen]
    assert zero.job.is_here()
    (forget,) = forgets
    forget()
    assert all(channel.is_closed for channel in zero.channels.values())
    zero.job.tell_all(jobs._Leave())
    assert not zero.channels[1].sent
    monkeypatch.setattr(jobs.os, "getpid", lambda: -1)
    assert not zero.job.is_here()
