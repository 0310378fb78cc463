"""Generation as the command line shows it: text as it comes, or a job from file to file with its progress."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxformer.decode.jobs import Job, count_lines, generate_file
from jaxformer.decode.requests import beam_search, check_no_sampling, generate, sampling_config, stream
from jaxformer.errors import UserError
from jaxformer.run import Run


def generate_to_terminal(
    run: Run, prompts: Sequence[str], settings: Mapping[str, Any], beams: Mapping[str, Any], batch_size: int
) -> None:
    """One prompt streams; of several, each output is printed when it and those before it are complete."""
    if len(prompts) == 1 and beams["num_beams"] == 1 and settings.get("num_samples", 1) == 1:
        for piece in stream(run, prompts[0], **settings):
            print(piece, end="", flush=True)
        print()
        return
    found = generate(run, iter(prompts), batch_size=batch_size, **beams, **settings)
    for outputs in found:
        for output in outputs if "num_samples" in settings else [outputs]:
            print(output, flush=True)


def generate_to_file(
    run: Run,
    origin: str,
    source: str,
    target: str,
    settings: Mapping[str, Any],
    beams: Mapping[str, Any],
    batch_size: int,
) -> None:
    """Answer every line of a file, and say how many had errors."""
    beam = None
    sampling_config(settings)
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size}: must be at least 1")
    if beams["num_beams"] != 1:
        check_no_sampling(beams["num_beams"], settings)
        beam = beam_search(**beams)
    columns = (TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    job, errors = Job(settings, batch_size, beam), 0
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=count_lines(source))

        def on_line(count: int, is_error: bool) -> None:
            nonlocal errors
            errors += is_error
            progress.update(task, completed=count)

        count = generate_file(run, source, target, job, origin, on_line)
    remark = f", {errors} of those just made with an error" if errors else ""
    print(f"{target}: {count} lines{remark}", file=sys.stderr)
