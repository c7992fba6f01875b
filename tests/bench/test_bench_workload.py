"""Who asks what, and when: the multi-round workload and the replay of traces, on a clock of our own."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from kvbm.bench.client import Answer
from kvbm.bench.workload import MultiRound, Replay, Shape, TraceError, read_trace

SMALL = Shape(num_users=4, num_rounds=5, shared_system_prompt=10, user_history_prompt=20, answer_len=7, time=100)


def answer(ask, text="an answer"):
    ask.done(Answer(user=ask.user, round=ask.round, started=0, finished=0, text=text))


def drive(workload, until, answer_after=0.5, tick=0.05):
    """Lets time pass: (time, request) of everything that was sent."""
    sent, waiting = [], []
    now = 0.0
    while now < until:
        for ask in [ask for at, ask in waiting if at + answer_after <= now]:
            answer(ask)
        waiting = [(at, ask) for at, ask in waiting if at + answer_after > now]
        for ask in workload.due(now):
            sent.append((now, ask))
            waiting.append((now, ask))
        now += tick
    return sent


@pytest.mark.parametrize("qps", [0.5, 1.0, 2.0])
def test_as_many_requests_are_sent_as_were_asked_for(qps):
    sent = drive(MultiRound(SMALL, qps), 100)
    # Five questions in four gaps: a quarter more, as with LMBenchmark, which has twenty and so a twentieth more.
    assert len(sent) == pytest.approx(100 * qps * 5 / 4, rel=0.05)


def test_there_are_as_many_users_as_were_asked_for_at_any_time():
    sent = drive(MultiRound(SMALL, 1.0), 100)
    for start in range(20, 80, 8):
        users = {ask.user for at, ask in sent if start <= at < start + 8}  # two gaps
        assert 4 <= len(users) <= 6


def test_a_user_waits_the_same_time_between_questions():
    sent = drive(MultiRound(SMALL, 1.0), 100)
    times = {}
    for at, ask in sent:
        times.setdefault(ask.user, []).append(at)
    gaps = [b - a for own in times.values() for a, b in pairwise(own)]
    assert gaps
    assert all(gap == pytest.approx(4.0, abs=0.11) for gap in gaps)


def test_users_ask_as_many_questions_as_there_are_rounds_and_leave():
    sent = drive(MultiRound(SMALL, 1.0), 100)
    asked = Counter(ask.user for _, ask in sent)
    joined = [user for user, count in asked.items() if user > 4 and min(at for at, a in sent if a.user == user) < 75]
    assert joined
    assert {asked[user] for user in joined} == {5}
    assert all(ask.round <= 5 for _, ask in sent)


def test_at_the_start_it_is_as_if_it_had_been_going_on():
    rounds = [ask.round for at, ask in drive(MultiRound(SMALL, 1.0), 4.1)]
    # Users are spread over their rounds, and the first question of a new one is among them.
    assert 1 in rounds
    assert max(rounds) >= 4


def test_at_the_start_not_everybody_asks_at_once():
    times = [at for at, _ in drive(MultiRound(SMALL._replace(num_rounds=6), 1.0), 4.1)]
    assert times == pytest.approx([0, 1, 2, 3, 4], abs=0.11)


def test_a_conversation_grows_from_what_was_said():
    sent = drive(MultiRound(SMALL, 1.0), 40)
    own = [ask.prompt.messages for _, ask in sent if ask.user == 5]
    assert [len(messages) for messages in own[:3]] == [1, 3, 5]
    assert own[1][:1] == own[0]
    assert own[1][1] == {"role": "assistant", "content": "an answer"}
    assert own[2][:3] == own[1]


def test_the_first_message_has_the_lengths_that_were_asked_for():
    (_, first), *_ = drive(MultiRound(SMALL, 1.0), 1)
    text = first.prompt.messages[0]["content"]
    shared, own = text.split(f"User {first.user} has said before:")
    assert (shared.count(" hi"), own.count(" hi")) == (10, 20)
    assert first.max_tokens == 7


def test_what_users_share_is_the_same_and_what_is_theirs_is_not():
    openings = {ask.user: ask.prompt.messages[0]["content"] for _, ask in drive(MultiRound(SMALL, 2.0), 20)}
    assert len({text.split("User ")[0] for text in openings.values()}) == 1
    assert len(set(openings.values())) == len(openings)


def test_other_users_come_when_told_to_begin_elsewhere():
    first = {ask.user for _, ask in drive(MultiRound(SMALL, 1.0), 50)}
    second = {ask.user for _, ask in drive(MultiRound(SMALL, 1.0, first_user=1000), 50)}
    assert first.isdisjoint(second)
    assert len(first) == len(second)


def test_nobody_asks_before_the_last_answer_is_there():
    workload = MultiRound(SMALL, 1.0)
    sent = drive(workload, 60, answer_after=10.0)
    times = {}
    for at, ask in sent:
        times.setdefault(ask.user, []).append(at)
    assert all(b - a >= 10 for own in times.values() for a, b in pairwise(own))
    assert workload.questions_late > 5


def test_one_round_means_that_everybody_asks_once():
    sent = drive(MultiRound(SMALL._replace(num_rounds=1), 2.0), 50)
    assert len(sent) == pytest.approx(100, rel=0.05)
    assert len({ask.user for _, ask in sent}) == len(sent)


def test_when_the_time_is_over_nothing_is_due():
    workload = MultiRound(SMALL._replace(time=10), 1.0)
    assert not workload.over(9.9)
    assert workload.over(10)
    assert workload.due(10) == []


@pytest.mark.parametrize("changes", [{"num_users": 0}, {"num_rounds": 0}, {"time": 0}, {"user_history_prompt": -1}])
def test_sizes_that_make_no_sense_are_refused(changes):
    with pytest.raises(ValueError, match=f"--{next(iter(changes)).replace('_', '-')}"):
        MultiRound(SMALL._replace(**changes), 1.0)


def test_a_rate_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="--qps"):
        MultiRound(SMALL, 0)


# -- traces -----------------------------------------------------------------------------------------------------------

ROWS = [
    {"timestamp": 2000, "input_length": 1300, "output_length": 40, "hash_ids": [1, 2, 9]},
    {"timestamp": 500, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]},
    {"timestamp": 500, "input_length": 100, "output_length": 2, "hash_ids": [7]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


def test_requests_are_sent_at_their_times(trace):
    replay = Replay(read_trace(trace))
    assert replay.seconds == 1.5
    assert len(replay.due(0)) == 2
    assert replay.due(1.4) == []
    assert not replay.over(1.4)
    (last,) = replay.due(1.5)
    assert (last.max_tokens, len(last.prompt.tokens)) == (40, 1300)
    assert replay.over(1.5)


def test_a_trace_can_be_sent_faster_and_smaller(trace):
    replay = Replay(read_trace(trace), speed=3, scale=0.1)
    replay.due(0)
    (last,) = replay.due(0.5)
    assert (last.max_tokens, len(last.prompt.tokens)) == (4, 130)


def test_equal_ids_are_equal_tokens_and_other_ids_are_not(trace):
    replay = Replay(read_trace(trace))
    prompts = sorted((ask.prompt.tokens for ask in replay.due(10)), key=len)
    short, first, second = prompts
    assert first[:1024] == second[:1024]
    assert first[1024:1100] != second[1024:1100]
    assert short != first[:100]
    assert all(100 <= token < 10_000 for token in second)
    again = sorted((ask.prompt.tokens for ask in Replay(read_trace(trace)).due(10)), key=len)
    assert again == prompts


def test_a_prompt_longer_than_its_ids_is_filled_up():
    replay = Replay(read_trace_rows([{"timestamp": 0, "input_length": 700, "output_length": 1, "hash_ids": [1]}]))
    (ask,) = replay.due(0)
    assert len(ask.prompt.tokens) == 700


def read_trace_rows(rows):
    from kvbm.bench.workload import _line

    return [_line(row) for row in rows]


def test_only_the_first_requests_can_be_taken(trace):
    assert len(read_trace(trace, most=2)) == 2


def test_a_record_of_kvbm_is_a_trace(tmp_path):
    path = tmp_path / "record.jsonl"
    lines = [{"event": "start"}, {"event": "request", **ROWS[0]}, {"event": "load"}, {"event": "end"}]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert len(read_trace(path)) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no requests"),
        ("{", "line 1"),
        ("[]", "line 1"),
        ('{"timestamp": 0}', "input_length"),
        (json.dumps({**ROWS[0], "hash_ids": ["a"]}), "whole numbers"),
        (json.dumps(ROWS[0]) + "\n" + json.dumps({**ROWS[0], "timestamp": "soon"}), "line 2"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path, text, reason):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=reason):
        read_trace(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "nothing")


@pytest.mark.parametrize("options", [{"speed": 0}, {"scale": 0}, {"scale": 2}, {"vocabulary": 10}])
def test_options_of_a_replay_that_make_no_sense_are_refused(trace, options):
    with pytest.raises(ValueError, match="--speed"):
        Replay(read_trace(trace), **options)
