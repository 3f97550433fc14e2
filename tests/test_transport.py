"""The wire between server and engine: whatever is sent arrives whole, however the bytes are cut on the way."""

from __future__ import annotations

import dataclasses
import socket
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.config import EngineConfig
from tidemill.core.params import SamplingParams
from tidemill.core.step import TokenLogprob
from tidemill.engine import messages
from tidemill.engine.transport import HEADER, TYPES, FrameParser, SocketInbox, encode, socket_pair

text = st.text(max_size=20)
words = st.none() | text
ids = st.lists(st.integers(0, 2**31), max_size=8)
count = st.integers(0, 2**40)
number = st.floats(allow_nan=False)
problem = st.fixed_dictionaries({"kind": text, "message": text, "param": words, "cause": words, "fix": words})
logprob = st.builds(
    TokenLogprob, token=count, logprob=number, rank=count, top=st.lists(st.tuples(count, number), max_size=3)
)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(1, 100),
    max_tokens=st.none() | st.integers(1, 2**20),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=2),
    stop_token_ids=ids,
    seed=st.none() | st.integers(0, 2**63 - 1),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 1000), st.floats(-100, 100), max_size=3),
)
whole_numbers = {field.name: count for field in dataclasses.fields(EngineConfig) if field.type == "int"}
config = st.builds(EngineConfig, eos_ids=ids, **whole_numbers)
stats = st.builds(messages.Stats, running=count, kv_usage=st.floats(0, 1), generation_tokens=count)
output = st.builds(
    messages.SequenceOutput,
    id=text,
    token_ids=ids,
    finish=words,
    stop_reason=st.none() | st.integers(0, 2**31) | text,
    logprobs=st.none() | st.lists(logprob, max_size=2),
    prompt_logprobs=st.none() | st.lists(logprob, max_size=2),
    num_cached=count,
    problem=st.none() | problem,
)
KINDS = {
    messages.Start: st.builds(messages.Start, config),
    messages.Add: st.builds(
        messages.Add, text, ids, params, st.lists(ids, max_size=2), st.integers(-(2**40), 2**40), words
    ),
    messages.Abort: st.builds(messages.Abort, st.lists(text, max_size=4)),
    messages.Ping: st.builds(messages.Ping),
    messages.Ready: st.builds(messages.Ready, number, count),
    messages.Failed: st.builds(messages.Failed, problem),
    messages.Progress: st.builds(messages.Progress, text, count, count),
    messages.Pong: st.builds(messages.Pong),
    messages.Outputs: st.builds(messages.Outputs, st.lists(output, max_size=3), stats),
}
any_message = st.one_of(*KINDS.values())


def test_every_message_is_covered_here():
    assert set(KINDS) == set(TYPES)


@settings(deadline=None)
@given(st.lists(any_message, max_size=5), st.data())
def test_messages_arrive_whole_and_in_order_wherever_the_bytes_are_cut(sent, data):
    wire = b"".join(encode(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    parser, received = FrameParser(), []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        received += parser.feed(wire[start:end])
    assert received == sent


@settings(deadline=None, max_examples=20)
@given(any_message)
def test_byte_by_byte_nothing_comes_early(message):
    wire = encode(message)
    parser = FrameParser()
    assert all(parser.feed(wire[i : i + 1]) == [] for i in range(len(wire) - 1))
    assert parser.feed(wire[-1:]) == [message]


def test_an_inbox_waits_only_when_told_to_and_ends_with_the_other_side():
    ours, theirs = socket_pair()
    inbox = SocketInbox(theirs)
    assert inbox.take(block=False) == []
    ours.sendall(encode(messages.Abort(["1"])) + encode(messages.Abort(["2"])) + encode(messages.Abort(["3"]))[:3])
    assert inbox.take(block=True) == [messages.Abort(["1"]), messages.Abort(["2"])]
    assert inbox.take(block=False) == []
    late = threading.Timer(0.1, lambda: ours.sendall(encode(messages.Abort(["3"]))[3:]))
    late.start()
    assert inbox.take(block=True) == [messages.Abort(["3"])]
    ours.shutdown(socket.SHUT_WR)
    assert inbox.take(block=True) is None


def test_a_message_larger_than_every_buffer_passes():
    ours, theirs = socket_pair()
    large = messages.Add("long", list(range(3_000_000)), SamplingParams())
    assert len(encode(large)) > 8 * 2**20 + HEADER.size
    sender = threading.Thread(target=ours.sendall, args=(encode(large),))
    sender.start()
    assert SocketInbox(theirs).take(block=True) == [large]
    sender.join()
