"""Batch files: every line has one answer, in this run or the next."""

import json

import pytest

import jspec
from jspec.server import batch, run
from jspec.server.serving import Settings
from tests.server.live import NAME


def request(index, **changes):
    body = {"model": NAME, "prompt": f"def f{index}(", "max_tokens": 8, "seed": index} | changes
    return {"custom_id": f"r{index}", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def write(path, requests):
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))


def answer_all(llm, files):
    lines = batch.read(files[0])
    return run.answer_batch(llm, Settings((NAME,)), lines, batch.Output(files[1], lines))


def answers(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["custom_id"]: line for line in lines}, len(lines)


def test_every_request_has_its_answer(llm, files):
    chat = {"model": NAME, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    more = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    write(files[0], [*map(request, range(20)), more])
    assert answer_all(llm, files) == 0
    by_id, count = answers(files[1])
    assert count == len(by_id) == 21
    for index in range(20):
        params = jspec.SamplingParams(max_tokens=8, seed=index)
        (want,) = llm.generate(f"def f{index}(", params)
        body = by_id[f"r{index}"]["response"]["body"]
        assert body["choices"][0]["text"] == want.outputs[0].text
    message = by_id["chat"]["response"]["body"]["choices"][0]["message"]
    assert message["role"] == "assistant" and by_id["chat"]["error"] is None


def test_a_bad_request_is_an_error_among_answers(llm, files):
    bad = [{"temperature": -1}, {"max_tokens": "x"}, {"model": "other"}, {"stream": True}]
    write(files[0], [request(i, **changes) for i, changes in enumerate([{}, *bad])])
    assert answer_all(llm, files) == 4
    by_id, _ = answers(files[1])
    statuses = [by_id[f"r{index}"]["response"]["status_code"] for index in range(5)]
    assert statuses == [200, 400, 400, 404, 400]
    assert by_id["r1"]["error"]["param"] == "temperature"


def test_a_run_that_ended_in_the_middle_of_a_line_goes_on(llm, files):
    write(files[0], map(request, range(12)))
    lines = batch.read(files[0])
    output = batch.Output(files[1], lines)
    write_one, count = output.write, []

    def fails(answer):
        if len(count) == 5:
            output._file.write(b'{"custom_id": "r11", "resp')  # cut in the middle
            output._file.flush()
            raise OSError("no space left")
        count.append(answer)
        write_one(answer)

    output.write = fails
    with pytest.raises(OSError, match="no space left"):
        run.answer_batch(llm, Settings((NAME,)), lines, output)
    assert not files[1].exists()
    first = [answer["id"] for answer in count]
    again = batch.Output(files[1], lines)
    assert len(again.done) == 5
    run.answer_batch(llm, Settings((NAME,)), lines, again)
    by_id, num_lines = answers(files[1])
    assert num_lines == len(by_id) == 12
    assert {answer["id"] for answer in by_id.values()} > set(first)
    assert not files[1].with_name("out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request"),
        ("{", "line 1: "),
        ("[]", "must be a JSON object"),
        ('{"custom_id": 1}', "custom_id=1"),
        ('{"custom_id": "a", "url": "/v1/files"}', "url='/v1/files' must be one of"),
        ('{"custom_id": "a", "url": "/v1/completions", "method": "GET"}', "method='GET'"),
    ],
)
def test_a_malformed_file_is_refused_before_anything_runs(files, text, words):
    files[0].write_text(text)
    with pytest.raises(ValueError, match="-i ") as error:
        batch.read(files[0])
    assert words in str(error.value)


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85"], ids=["2028", "2029", "85"])
@pytest.mark.parametrize("before", ["", "\ufeff"], ids=["plain", "bom"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_lines_end_at_line_feeds_alone_and_a_byte_order_mark_is_skipped(files, inside, before, end):
    prompts = [f"a{inside}b", "\u00a0", "c"]
    texts = (json.dumps(request(i, prompt=p), ensure_ascii=False) for i, p in enumerate(prompts))
    files[0].write_bytes((before + "".join(f"{text}{end}" for text in texts) + end).encode())
    assert [line.body["prompt"] for line in batch.read(files[0])] == prompts


def test_two_requests_with_one_name_are_refused(files):
    write(files[0], [request(1), request(1)])
    with pytest.raises(ValueError, match="line 2: custom_id='r1'"):
        batch.read(files[0])


def test_no_answer_is_overwritten_or_mixed_with_those_of_another_file(llm, files):
    write(files[0], [request(0)])
    answer_all(llm, files)
    lines = batch.read(files[0])
    with pytest.raises(ValueError, match="exists already"):
        batch.Output(files[1], lines)
    files[1].rename(files[1].with_name("out.jsonl.partial"))
    write(files[0], [request(7)])
    with pytest.raises(ValueError, match="answers to another input"):
        batch.Output(files[1], batch.read(files[0]))


def test_two_runs_do_not_write_one_file(files):
    write(files[0], [request(0)])
    lines = batch.read(files[0])
    first = batch.Output(files[1], lines)
    with pytest.raises(ValueError, match="another run"):
        batch.Output(files[1], lines)
    first.close()
    batch.Output(files[1], lines).close()
