"""Generation for the command line: to the terminal, or as a job from one JSON Lines file to another.

A job writes one result per input line, in input order and as soon as it is complete, so that an interrupted job resumes
after the last complete line. The settings of a job are saved next to its output, and a job cannot be resumed with
different ones.
"""

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxformer.decode.api import decode, generate, make_requests, stream
from jaxformer.decode.beam_search import BeamSearchConfig, Hypothesis
from jaxformer.decode.defaults import complete_beams, complete_settings
from jaxformer.decode.sampling import make_sampling_config
from jaxformer.decode.slots import Completion, DecodeRequest
from jaxformer.decode.text import Conversation, check_decoder
from jaxformer.errors import UserError
from jaxformer.run import Run

PROMPT_FIELDS = {"prompt": "a text", "ids": "a list of token ids", "messages": "a list of messages"}
COPIED_FIELDS = ("id", *PROMPT_FIELDS)  # fields of an input line that are copied to its output line


# ---------------------------------------------------------------- called by the command line
@dataclass(frozen=True)
class Job:
    """The settings of all prompts. Settings in an input line take precedence."""

    settings: Mapping[str, Any]
    batch_size: int
    beam: BeamSearchConfig | None = None
    chat: bool = False
    """Whether prompts are formatted with the chat template; a text is then one user message."""
    system: str | None = None
    """The system message of conversations that have none."""

    def as_json(self) -> dict[str, Any]:
        # The batch size is left out: it does not change the outputs, so a job may be resumed with another one.
        return {
            "settings": dict(self.settings),
            "beam": None if self.beam is None else vars(self.beam),
            "chat": {"system": self.system} if self.chat else None,
        }

    def make_prompt(self, prompt: Any) -> Any:
        """Make a conversation of a text or of messages if this is a chat."""
        if not self.chat:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
        if self.system is not None and "system" not in roles:
            messages = [{"role": "system", "content": self.system}, *messages]
        return Conversation(messages)


def make_job(
    run: Run,
    settings: Mapping[str, Any],
    beams: Mapping[str, Any],
    batch_size: int,
    *,
    chat: bool = False,
    system: str | None = None,
) -> Job:
    """Validate the options of the command line.

    Args:
      beams: num_beams, length_penalty and early_stopping; None for the model's default.
    """
    check_decoder(run, "generate")
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size}: must be at least 1")
    beam = complete_beams(run, beams)
    beam = None if beam.num_beams == 1 else beam
    config = make_sampling_config(complete_settings(run, settings, beam))
    if beam is not None:
        beam.check_settings(config)
    return Job(settings, batch_size, beam, chat, system)


def generate_to_terminal(run: Run, prompts: Sequence[str], job: Job) -> None:
    """Print the outputs: a single one while it is generated, several in input order, each when it is complete."""
    texts, settings = [job.make_prompt(prompt) for prompt in prompts], job.settings
    if len(texts) == 1 and job.beam is None and settings.get("num_samples", 1) == 1:
        for piece in stream(run, texts[0], **settings):
            print(piece, end="", flush=True)
        print()
        return
    beams = {"num_beams": 1}
    if job.beam is not None:
        beams = {name: getattr(job.beam, name) for name in ("num_beams", "length_penalty", "early_stopping")}
    for outputs in generate(run, iter(texts), batch_size=job.batch_size, **beams, **settings):
        for output in outputs if "num_samples" in settings else [outputs]:
            print(output, flush=True)


def generate_to_file(run: Run, origin: str, source: str, target: str, job: Job) -> None:
    """Run a job with a progress bar, and print how many lines had errors."""
    columns = (TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    num_errors = 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=count_lines(source))

        def on_line(count: int, is_error: bool) -> None:
            nonlocal num_errors
            num_errors += is_error
            progress.update(task, completed=count)

        count = generate_file(run, source, target, job, origin, on_line)
    remark = f", {num_errors} of the new ones with an error" if num_errors else ""
    print(f"{target}: {count} lines{remark}", file=sys.stderr)


# ---------------------------------------------------------------- jobs
@dataclass(frozen=True)
class Line:
    """One line of the input; a line with an error has no requests."""

    number: int  # counted from 1
    fields: Mapping[str, Any]
    requests: list[DecodeRequest]
    error: str | None = None


def generate_file(
    run: Run, source: str | Path, target: str | Path, job: Job, origin: str, on_line: Callable[[int, bool], None]
) -> int:
    """Append the missing results of `source` to `target`; returns the total number of results in `target`.

    Args:
      origin: the path of the run; a job can only be resumed with the same one.
      on_line: called after each line with the number of results so far and whether this one is an error.
    """
    source, target = _existing_file(source), Path(target)
    if source.resolve() == target.resolve():
        raise UserError(f"--output {target}: is the same file as --input; choose another one")
    defaults = None if run.generation is None else dict(run.generation.settings)
    what = {"run": origin, "step": run.step, "input": source.name, "defaults": defaults or None}
    _check_or_save_job(target, {**what, **job.as_json()})
    finished = _finished_lines(source, target)
    count = len(finished)
    with target.open("a", encoding="utf-8") as out:
        lines = _read_lines(run, source, job, after=finished[-1] if finished else 0)
        for line, result in _decode_lines(run, lines, job):
            copied = {name: line.fields[name] for name in COPIED_FIELDS if name in line.fields}
            fields = {"line": line.number, **copied, **result, "error": line.error}
            out.write(json.dumps(fields, ensure_ascii=False) + "\n")
            out.flush()
            count += 1
            on_line(count, line.error is not None)
    return count


def count_lines(source: str | Path) -> int:
    """The number of lines that are not blank."""
    return sum(1 for _ in _numbered_lines(_existing_file(source)))


def _existing_file(source: str | Path) -> Path:
    if not Path(source).is_file():
        raise UserError(f"--input {source}: there is no such file")
    return Path(source)


# ---------------------------------------------------------------- input lines
def _read_lines(run: Run, source: Path, job: Job, after: int) -> Iterator[Line]:
    for number, raw in _numbered_lines(source):
        if number <= after:
            continue
        fields: Mapping[str, Any] = {}
        try:
            fields = _parse_line(raw)
            yield Line(number, fields, _line_requests(run, fields, job))
        except UserError as error:
            yield Line(number, fields, [], str(error))


def _numbered_lines(source: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, as bytes: a line that is not UTF-8 must not abort the job."""
    with source.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if raw.strip():
                yield number, raw


def _parse_line(raw: bytes) -> Mapping[str, Any]:
    try:
        fields = json.loads(raw)
    except ValueError as error:
        raise UserError(f"not valid JSON in UTF-8 ({error})") from None
    if not isinstance(fields, dict):
        raise UserError('not a JSON object; write, for example, {"prompt": "..."}')
    return fields


def _line_requests(run: Run, fields: Mapping[str, Any], job: Job) -> list[DecodeRequest]:
    present = [name for name in PROMPT_FIELDS if name in fields]
    allowed = ("prompt", "messages") if job.chat else ("prompt", "ids")
    if len(present) != 1 or present[0] not in allowed:
        words = [f'"{name}" ({PROMPT_FIELDS[name]})' for name in allowed]
        hint = '; "messages" needs --chat' if "messages" in present and not job.chat else ""
        raise UserError(f"must have either {' or '.join(words)}{hint}")
    name, prompt = present[0], fields[present[0]]
    if not isinstance(prompt, str if name == "prompt" else list):
        raise UserError(f'"{name}" is {prompt!r}: must be {PROMPT_FIELDS[name]}')
    line_settings = {name: value for name, value in fields.items() if name not in COPIED_FIELDS}
    if isinstance(line_settings.get("bias"), dict):
        # The keys of JSON objects are always strings, but token ids are integers.
        line_settings["bias"] = {
            int(key) if key.isdigit() else key: value for key, value in line_settings["bias"].items()
        }
    return make_requests(run, job.make_prompt(prompt), {**job.settings, **line_settings}, job.beam)


# ---------------------------------------------------------------- results
def _decode_lines(run: Run, lines: Iterable[Line], job: Job) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yield every line with the fields of its result, in input order, including lines with an error."""
    lines, ahead = itertools.tee(lines)  # the scheduler reads ahead of the results
    results = decode(run, (line.requests for line in ahead), job.batch_size, job.beam)
    for line, outputs in zip(lines, results, strict=True):
        yield line, _result_fields(outputs)


def _result_fields(outputs: list[Completion] | list[Hypothesis]) -> dict[str, Any]:
    """The fields of a completion, as lists if there are several; with beam search, those of the best hypothesis."""
    if not outputs:
        return {"output": None}
    if isinstance(outputs[0], Hypothesis):
        return {"output": outputs[0].output, "score": round(outputs[0].score, 6)}
    columns = {"output": [c.output for c in outputs], "finish": [c.finish for c in outputs]}
    if outputs[0].log_probs is not None:
        columns["log_probs"] = [[round(float(p), 6) for p in c.log_probs] for c in outputs]
        columns["top"] = [[[[i, round(p, 6)] for i, p in step] for step in c.top] for c in outputs]
    return columns if len(outputs) > 1 else {name: values[0] for name, values in columns.items()}


# ---------------------------------------------------------------- resuming
def _check_or_save_job(target: Path, job: dict[str, Any]) -> None:
    """Save the job next to a new output, or check that an existing output belongs to the same job."""
    if not target.parent.is_dir():
        raise UserError(f"--output {target}: there is no directory '{target.parent}'; create it first")
    job_file = target.with_name(target.name + ".job.json")
    if not target.exists() or not target.stat().st_size:
        job_file.write_text(json.dumps(job, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    if not job_file.exists():
        raise UserError(f"--output {target}: exists but was not written by this command; choose another file")
    saved = json.loads(job_file.read_text(encoding="utf-8"))
    # The new job goes through JSON as well, because tuples come back as lists.
    changed = [name for name in job if saved.get(name) != json.loads(json.dumps(job[name]))]
    if changed:
        raise UserError(
            f"--output {target}: contains results of another job, whose '{changed[0]}' was {saved.get(changed[0])!r}, "
            f"not {job[changed[0]]!r}; choose another file or delete this one"
        )


def _finished_lines(source: Path, target: Path) -> list[int]:
    """Numbers of the lines that have a result. An incomplete line at the end of the output is removed."""
    if not target.exists():
        return []
    content = target.read_bytes()
    complete = content[: content.rfind(b"\n") + 1]
    finished = []
    for raw, (number, line) in zip(complete.splitlines(), _numbered_lines(source), strict=False):
        result = json.loads(raw) if raw.startswith(b"{") else {}
        if result.get("line") != number or not _is_result_of(result, line):
            raise UserError(
                f"--output {target}: line {len(finished) + 1} is not the result of line {number} of {source}; "
                "choose another file or delete this one"
            )
        finished.append(number)
    if len(finished) != len(complete.splitlines()):
        raise UserError(
            f"--output {target}: contains more results than {source} has lines; choose another file or delete this one"
        )
    if len(complete) != len(content):  # the job was killed while writing a line
        with target.open("r+b") as file:
            file.truncate(len(complete))
    return finished


def _is_result_of(result: Mapping[str, Any], line: bytes) -> bool:
    try:
        fields = _parse_line(line)
    except UserError:
        return result.get("error") is not None
    return all(result.get(name) == fields.get(name) for name in COPIED_FIELDS)
