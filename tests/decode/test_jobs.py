"""Jobs from file to file: results in input order, errors at their line, resuming after an interrupt."""

import json
from pathlib import Path

import pytest

from jaxformer import generate, search
from jaxformer.decode import jobs
from jaxformer.decode.beam_search import BeamSearchConfig
from jaxformer.decode.jobs import Job, count_lines, generate_file
from jaxformer.errors import UserError

SETTINGS = {"max_new_tokens": 6}
LINES = [
    {"prompt": "def parse(", "id": "first"},
    {"prompt": "two words", "temperature": 0.8, "seed": 3},
    {"prompt": "x", "tempreture": 1},
    {"ids": [5, 6, 7], "max_new_tokens": 3},
    {"prompt": ["a"]},
    {"prompt": "both", "ids": [3]},
    "no object",
    {"prompt": "b" * 80},
    {"prompt": "é ü", "num_samples": 2, "temperature": 1.0},
    {"prompt": "", "log_probs": 2, "bias": {"70": 50.0}},
    *({"prompt": f"text {i}", "max_new_tokens": 1 + i % 6} for i in range(12)),
]
BAD = {
    3: "tempreture",
    5: "must be a text",
    6: "either",
    7: "not a JSON object",
    8: "context",
    23: "not valid JSON",
}


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "in.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES)
    path.write_bytes(text.encode() + b"\xff not UTF-8\n" + b"\n  \n" + b'{"prompt": "last"}')
    return path


def run_job(run, source: Path, target: Path, job: Job | None = None) -> list[dict]:
    calls = []
    job = job or Job(SETTINGS, batch_size=4)
    count = generate_file(run, source, target, job, "runs/tiny", lambda count, bad: calls.append((count, bad)))
    results = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    assert len(results) == count == count_lines(source)
    assert [bad for _, bad in calls] == [line["error"] is not None for line in results][len(results) - len(calls) :]
    return results


def test_results_are_in_input_order_and_errors_keep_their_line(decoder_run, source, tmp_path):
    results = run_job(decoder_run, source, tmp_path / "out.jsonl")
    assert [line["line"] for line in results] == [*range(1, len(LINES) + 2), len(LINES) + 4]
    for line in results:
        if line["line"] in BAD:
            assert BAD[line["line"]] in line["error"]
            assert line["output"] is None
        else:
            assert line["error"] is None
    assert results[0]["id"] == "first"
    assert results[0]["output"] == generate(decoder_run, ["def parse("], 6)[0]
    assert results[1]["output"] == generate(decoder_run, ["two words"], 6, temperature=0.8, seed=3)[0]
    assert results[3]["output"] == generate(decoder_run, [[5, 6, 7]], 3)[0]
    assert results[8]["output"] == generate(decoder_run, ["é ü"], 6, temperature=1.0, num_samples=2)[0]
    assert len(results[9]["log_probs"]) == len(results[9]["top"]) == 6
    assert results[9]["top"][0][0][0] != 70 or results[9]["output"].startswith(chr(70 - 3))


def test_an_interrupted_job_resumes_with_the_same_output(decoder_run, source, tmp_path, monkeypatch):
    whole = tmp_path / "whole.jsonl"
    run_job(decoder_run, source, whole)
    content = whole.read_bytes()
    for size in (0, 10, len(content) // 3, len(content) - 1):  # killed while writing
        (tmp_path / "out.jsonl").write_bytes(content[:size])
        (tmp_path / "out.jsonl.job.json").write_bytes((tmp_path / "whole.jsonl.job.json").read_bytes())
        run_job(decoder_run, source, tmp_path / "out.jsonl")
        assert (tmp_path / "out.jsonl").read_bytes() == content

    def interrupt(*args):
        for i, result in enumerate(decode_lines(*args)):
            if i == 5:
                raise KeyboardInterrupt
            yield result

    decode_lines, target = jobs._decode_lines, tmp_path / "stopped.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "_decode_lines", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_job(decoder_run, source, target)
    assert len(target.read_bytes().splitlines()) == 5
    assert content.startswith(target.read_bytes())
    run_job(decoder_run, source, target)
    assert target.read_bytes() == content


def test_a_job_is_not_resumed_with_other_settings(decoder_run, source, tmp_path):
    target = tmp_path / "out.jsonl"
    run_job(decoder_run, source, target)
    before = target.read_bytes()
    with pytest.raises(
        UserError, match=r"another job, whose 'settings' was .'max_new_tokens': 6., not .'max_new_tokens'"
    ):
        run_job(decoder_run, source, target, Job({"max_new_tokens": 5}, batch_size=4))
    with pytest.raises(UserError, match="another job, whose 'beam'"):
        run_job(decoder_run, source, target, Job(SETTINGS, 4, BeamSearchConfig(2)))
    source.write_text('{"prompt": "other"}\n' * 40)
    with pytest.raises(UserError, match="line 1 is not the result of line 1"):
        run_job(decoder_run, source, target)
    assert target.read_bytes() == before


def test_unusable_files_are_reported(decoder_run, source, tmp_path):
    job = Job(SETTINGS, 4)

    def generate_to(source, target):
        generate_file(decoder_run, source, target, job, "run", lambda *_: None)

    with pytest.raises(UserError, match=r"--input .*none.jsonl: there is no such file"):
        generate_to(tmp_path / "none.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="is the same file as --input"):
        generate_to(source, source)
    with pytest.raises(UserError, match="there is no directory"):
        generate_to(source, tmp_path / "none" / "out.jsonl")
    (tmp_path / "mine.txt").write_text("my own notes\n")
    with pytest.raises(UserError, match="was not written by this command"):
        generate_to(source, tmp_path / "mine.txt")
    assert (tmp_path / "mine.txt").read_text() == "my own notes\n"


def test_beam_search_writes_the_best_hypothesis_and_its_score(translator, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "one"}, {"prompt": "two", "temperature": 1.0}, {"prompt": "three", "max_new_tokens": 3}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = run_job(translator, source, target, Job(SETTINGS, 8, BeamSearchConfig(4)))
    for line, new in ((0, 6), (2, 3)):
        best = search(translator, [lines[line]["prompt"]], new)[0][0]
        assert results[line]["output"] == best.output
        assert results[line]["score"] == pytest.approx(best.score, abs=1e-5)
    assert "temperature=1.0: beam search does not support" in results[1]["error"]


def test_an_empty_input_gives_an_empty_output(decoder_run, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    assert run_job(decoder_run, tmp_path / "in.jsonl", tmp_path / "out.jsonl") == []
