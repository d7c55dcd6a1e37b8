"""The comparison of answers sees what differs, and not how tokens are grouped into events."""

from benchmarks import vllm_answers


def event(*, text="", end=None, role=None, index=0, **more):
    delta = {"content": text} | ({"role": role} if role else {})
    return {"id": "x", "choices": [{"index": index, "delta": delta, "finish_reason": end}], **more}


USAGE = {"id": "x", "choices": [], "usage": {"completion_tokens": 3}}
TOKENS = [event(role="assistant"), *(event(text=t) for t in "abc"), event(text="d", end="length")]


def test_events_may_bring_several_tokens():
    launches = [TOKENS[0], event(text="ab"), event(text="c"), event(text="d", end="length"), USAGE]
    assert vllm_answers.differences(launches, [*TOKENS, USAGE]) == {}


def test_another_end_order_or_count_is_a_difference():
    differences = vllm_answers.differences
    ended = [*TOKENS[:-1], event(text="d", end="stop"), USAGE]
    described = differences(ended, [*TOKENS, USAGE])
    assert described == {"choice 0, last: choices[0].finish_reason": "stop; vLLM length"}
    twice = [*TOKENS, TOKENS[-1], USAGE]
    assert list(differences(twice, [*TOKENS, USAGE])) == [
        "choice 0, between: choices[0].finish_reason"
    ]
    late = [event(role="assistant"), event(text="a"), event(role="assistant", index=1)]
    assert differences(late, [late[0], late[2], late[1]])["order"].startswith("role text late role")
    more = [*TOKENS, USAGE | {"usage": {"completion_tokens": 4}}]
    described = differences(more, [*TOKENS, USAGE])
    assert described == {"no choice, first: usage.completion_tokens": "4; vLLM 3"}
    assert "only vLLM's" in str(differences(TOKENS, [*TOKENS, USAGE]))


def test_fields_are_compared_and_values_that_differ_by_nature_are_not():
    ours = {
        "id": "a",
        "created": 1,
        "choices": [{"index": 0, "text": "x", "finish_reason": "stop"}],
    }
    theirs = {"id": "b", "created": 2, "choices": [{"index": 0, "text": "y"}], "metrics": None}
    described = vllm_answers.differences(ours, theirs)
    assert described == {"choices[0].finish_reason": "only ours (stop)"}


def test_each_difference_needs_a_reason():
    answer = {"id": "a", "system_fingerprint": "f", "usage": {"total_tokens": 1}}
    lines, unexplained = vllm_answers.table(
        {"chat": {"id": "a", "usage": {"total_tokens": 2}}}, {"chat": answer}
    )
    assert len(lines) == 1 and "ours has no fingerprint" in lines[0]
    assert unexplained == ["chat: usage.total_tokens: 2; vLLM 1"]


def test_requests_have_names_of_their_own():
    names = [name for name, _, _ in vllm_answers.requests()]
    assert len(names) == len(set(names)) > 60
