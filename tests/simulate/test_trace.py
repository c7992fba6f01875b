"""Reading traces: both kinds of files, directories of them, and errors that name the line."""

from __future__ import annotations

import json

import pytest

from kvbm.simulate.trace import TraceError, read


def line(at=0, tokens=1200, ids=(1, 2, 3), **more):
    return {"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": list(ids), **more}


def write(path, *lines):
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def test_a_mooncake_trace_has_the_full_blocks_of_each_prompt(tmp_path):
    trace = read([write(tmp_path / "t.jsonl", line(5000, 1200), line(1000, 1024, (1, 2)))])
    first, second = trace.requests
    assert (first.at, second.at, trace.seconds) == (1.0, 5.0, 4.0)
    assert (len(first.keys), len(second.keys)) == (2, 2)  # 176 tokens of the third block are missing
    assert first.keys == second.keys
    assert trace.blocks == 2 + 3
    assert not trace.is_exact


def test_whole_blocks_count_the_last_one_as_full(tmp_path):
    trace = read([write(tmp_path / "t.jsonl", line(0, 1200))], whole_blocks=True)
    assert len(trace.requests[0].keys) == 3
    assert trace.blocks == 3


def test_tenants_share_no_block(tmp_path):
    path = write(tmp_path / "t.jsonl", line(), line(cache_salt="a"), line(cache_salt="b"), line(cache_salt="a"))
    keys = [request.keys for request in read([path]).requests]
    assert keys[1] == keys[3]
    assert len({key for each in keys for key in each}) == 6


def test_hints_are_read(tmp_path):
    path = write(tmp_path / "t.jsonl", line(session_id="s", final=True, priority=-5, ttl=30.5), line())
    hinted, plain = read([path]).requests
    assert (hinted.session, hinted.final, hinted.priority, hinted.ttl) == ("s", True, -5, 30.5)
    assert (plain.session, plain.final, plain.priority, plain.ttl) == ("", False, None, None)


def test_a_directory_is_merged_by_time_on_one_clock(tmp_path):
    start = {"event": "start", "at": 0, "block_size": 16, "block_bytes": 99, "slots": {"host": 4}}
    write(tmp_path / "a.jsonl", {**start, "time": 1000.0}, line(500, 32, (1, 2)))
    write(tmp_path / "b.jsonl", {**start, "time": 999.0}, line(1000, 32, (3, 4)), line(2000, 32, (5, 6)))
    trace = read([tmp_path])
    assert [request.at for request in trace.requests] == [1.0, 1.5, 2.0]
    assert (trace.block_tokens, trace.block_bytes) == (16, 99)
    assert not trace.is_exact  # operations of two engines have no common order


def test_records_with_different_blocks_are_not_merged(tmp_path):
    for size in (16, 32):
        write(tmp_path / f"{size}.jsonl", {"event": "start", "block_size": size, "time": 1.0}, line())
    with pytest.raises(TraceError, match=r"blocks of \[16, 32\] tokens"):
        read([tmp_path])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        (json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1}), "without hash_ids"),
        (json.dumps(line(tokens=0)), "input_length is 0"),
        (json.dumps(line(tokens=2**40)), "input_length is"),
        (json.dumps(line(at=-1)), "timestamp is -1"),
        (json.dumps(line(ids=("x",))), "Expected `int`, got `str`"),
        (json.dumps(line(at="soon")), "timestamp"),
        ('{"event": "request", "hash_ids": [' + "[" * 5000, "line 2"),
        ("\udcff", "line 2"),
    ],
)
def test_a_bad_line_is_named_with_the_reason(tmp_path, text, reason):
    path = tmp_path / "t.jsonl"
    path.write_bytes(json.dumps(line()).encode() + b"\n" + text.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(TraceError, match=reason):
        read([path])


def test_files_that_are_no_trace_are_refused_by_name(tmp_path):
    with pytest.raises(TraceError, match="nowhere"):
        read([tmp_path / "nowhere"])
    with pytest.raises(TraceError, match=r"without \*.jsonl files"):
        read([tmp_path])
    with pytest.raises(TraceError, match="no request in it"):
        read([write(tmp_path / "empty.jsonl")])
