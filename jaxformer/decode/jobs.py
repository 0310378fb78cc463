"""Generation from file to file: one JSON object a line in, one a line out, in the same order.

The output is whole lines at any moment. A job that was stopped goes on behind the last of them; what a job was asked to
do lies beside its output, so that it cannot go on as another.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.decode.batch import Row
from jaxformer.decode.beam import BeamSearch, searched
from jaxformer.decode.queue import answered, text_of
from jaxformer.decode.requests import Completion, check_no_sampling, completion, prepared
from jaxformer.errors import UserError
from jaxformer.run import Run

PASSED_ON = ("id", "prompt", "ids")  # what an output line repeats of its input line


@dataclass(frozen=True)
class Job:
    """What is done to every line; a line's own settings go before `settings`."""

    settings: Mapping[str, Any]
    batch_size: int
    beam: BeamSearch | None = None

    def as_json(self) -> dict[str, Any]:
        return {"settings": dict(self.settings), "beam": None if self.beam is None else vars(self.beam)}


@dataclass(frozen=True)
class Line:
    number: int  # in the input, from 1
    fields: Mapping[str, Any]
    rows: list[Row]
    error: str | None = None


def generate_file(
    run: Run, source: str | Path, target: str | Path, job: Job, origin: str, on_line: Callable[[int, bool], None]
) -> int:
    """Answer the lines of `source` that `target` does not answer yet; how many answers it holds then.

    Args:
      origin: where the run comes from; a job goes on with the same only.
      on_line: told after each line how many are answered, and whether this one had an error.
    """
    source, target = _existing(source), Path(target)
    if source.resolve() == target.resolve():
        raise UserError(f"--output {target}: is the input too, write somewhere else")
    _settle_job(target, {"run": origin, "step": run.step, "input": source.name, **job.as_json()})
    done = _resumed(source, target)
    count = len(done)
    with target.open("a", encoding="utf-8") as out:
        lines = _lines(run, source, job, after=done[-1] if done else 0)
        for line, answer in _answers(run, lines, job):
            known = {name: line.fields[name] for name in PASSED_ON if name in line.fields}
            fields = {"line": line.number, **known, **answer, "error": line.error}
            out.write(json.dumps(fields, ensure_ascii=False) + "\n")
            out.flush()
            count += 1
            on_line(count, line.error is not None)
    return count


def count_lines(source: str | Path) -> int:
    """How many lines there are to answer."""
    return sum(1 for _ in _numbered(_existing(source)))


def _existing(source: str | Path) -> Path:
    if not Path(source).is_file():
        raise UserError(f"--input {source}: there is no such file")
    return Path(source)


# ---------------------------------------------------------------- lines
def _lines(run: Run, source: Path, job: Job, after: int) -> Iterator[Line]:
    for number, raw in _numbered(source):
        if number <= after:
            continue
        fields: Mapping[str, Any] = {}
        try:
            fields = _parsed(raw)
            yield Line(number, fields, _rows(run, fields, job))
        except UserError as error:
            yield Line(number, fields, [], str(error))


def _numbered(source: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank."""
    with source.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, raw


def _parsed(raw: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise UserError(f"not a line of JSON in UTF-8 ({error})") from None
    if not isinstance(fields, dict):
        raise UserError('not a JSON object, such as {"prompt": "..."}')
    return fields


def _rows(run: Run, fields: Mapping[str, Any], job: Job) -> list[Row]:
    given = [name for name in ("prompt", "ids") if name in fields]
    if len(given) != 1:
        raise UserError('must have either "prompt", a text, or "ids", a list of token ids')
    prompt = fields[given[0]]
    if isinstance(prompt, str) != (given[0] == "prompt"):
        raise UserError(f'"{given[0]}" is {prompt!r}: must be {"a text" if given[0] == "prompt" else "a list of ids"}')
    own = {name: value for name, value in fields.items() if name not in PASSED_ON}
    if isinstance(own.get("bias"), dict):
        own["bias"] = {_token(name): value for name, value in own["bias"].items()}  # JSON has texts for keys only
    rows = prepared(run, prompt, {**job.settings, **own})
    if job.beam is not None:
        check_no_sampling(job.beam.num_beams, vars(rows[0].config))
    return rows


def _token(name: str) -> int | str:
    return int(name) if name.isdigit() else name


# ---------------------------------------------------------------- answers
def _answers(run: Run, lines: Iterable[Line], job: Job) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Every line with what is said of it beside its error."""
    if job.beam is not None:
        yield from _beam_answers(run, lines, job)
        return
    asked: list[Line] = []

    def rows_of(line: Line) -> list[Row]:
        asked.append(line)
        return line.rows

    for decoded in answered(run, map(rows_of, lines), job.batch_size):
        line = asked.pop(0)
        found = [completion(run, *pair, "prompt" in line.fields) for pair in zip(line.rows, decoded, strict=True)]
        yield line, _answer(found)


def _answer(found: list[Completion]) -> dict[str, Any]:
    """One completion as it is, several as lists."""
    if not found:
        return {"output": None}
    columns = {"output": [c.output for c in found], "finish": [c.finish for c in found]}
    if found[0].log_probs is not None:
        columns["log_probs"] = [[round(float(p), 6) for p in c.log_probs] for c in found]
        columns["top"] = [[[[i, round(p, 6)] for i, p in step] for step in c.top] for c in found]
    return columns if len(found) > 1 else {name: values[0] for name, values in columns.items()}


def _beam_answers(run: Run, lines: Iterable[Line], job: Job) -> Iterator[tuple[Line, dict[str, Any]]]:
    size = max(1, job.batch_size // job.beam.num_beams)
    group: list[Line] = []

    def flushed() -> Iterator[tuple[Line, dict[str, Any]]]:
        rows = [line.rows[0] for line in group if line.rows]
        found = iter(searched(run, rows, job.beam) if rows else [])
        for line in group:
            if not line.rows:
                yield line, {"output": None}
                continue
            hypotheses, scores = next(found)
            best = text_of(run, line.rows[0], hypotheses[0]) if "prompt" in line.fields else hypotheses[0]
            yield line, {"output": best, "score": round(scores[0], 6)}
        group.clear()

    for line in lines:
        group.append(line)
        if len(group) == size:
            yield from flushed()
    yield from flushed()


# ---------------------------------------------------------------- going on
def _settle_job(target: Path, job: dict[str, Any]) -> None:
    """Write down what the job is, or see that it is the one under way."""
    if not target.parent.is_dir():
        raise UserError(f"--output {target}: there is no directory '{target.parent}'")
    beside = target.with_name(target.name + ".job.json")
    if target.exists() and target.stat().st_size:
        if not beside.exists():
            raise UserError(f"--output {target}: exists and is no output of this command, write somewhere else")
        before = json.loads(beside.read_text(encoding="utf-8"))
        changed = [name for name in job if before.get(name) != json.loads(json.dumps(job[name]))]
        if changed:
            raise UserError(
                f"--output {target}: holds answers of another job, its '{changed[0]}' was {before.get(changed[0])!r}, "
                f"not {job[changed[0]]!r}: write somewhere else, or delete it"
            )
        return
    beside.write_text(json.dumps(job, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _resumed(source: Path, target: Path) -> list[int]:
    """Numbers of the lines answered so far; half a line at the end, from a machine that stopped, is dropped."""
    if not target.exists():
        return []
    content = target.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done = []
    for raw, (number, asked) in zip(whole.splitlines(), _numbered(source), strict=False):
        answer = json.loads(raw) if raw.startswith(b"{") else {}
        if answer.get("line") != number or not _repeats(answer, asked):
            raise UserError(f"--output {target}: line {len(done) + 1} does not answer line {number} of {source}")
        done.append(number)
    if len(done) != len(whole.splitlines()):
        raise UserError(f"--output {target}: holds more answers than {source} has lines")
    if len(whole) != len(content):
        with target.open("r+b") as file:
            file.truncate(len(whole))
    return done


def _repeats(answer: Mapping[str, Any], asked: bytes) -> bool:
    try:
        fields = _parsed(asked)
    except UserError:
        return answer.get("error") is not None
    return all(answer.get(name) == fields.get(name) for name in PASSED_ON)
