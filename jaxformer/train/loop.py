"""The training loop: from a config to a run directory.

config -> program (mesh, model, shapes, shardings, jitted step) -> data -> restore, start or init -> loop -> report
"""

import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from rich.console import Console

from jaxformer import hosts
from jaxformer.checkpoint import Checkpoints
from jaxformer.config import RunConfig
from jaxformer.data import Sets, Tokenizer, load_sets, make_loader
from jaxformer.evaluate.loop import Evaluation
from jaxformer.evaluate.report import format_metrics, generate_samples
from jaxformer.objectives import make_objective
from jaxformer.run import Run
from jaxformer.rundir import RunDir
from jaxformer.sharding import global_batch
from jaxformer.train.metrics import MetricWriter, peak_flops, step_flops
from jaxformer.train.program import TrainProgram, train_program
from jaxformer.train.progress import Bar, DivergedError, Recorder
from jaxformer.train.start import complete_config, first_state
from jaxformer.train.state import TrainState
from jaxformer.train.workdir import check_workdir, find_or_make_tokenizer, write_run_files


def train(config: RunConfig, console: Console | None = None) -> Run:
    """Train up to `train.steps`, from the latest checkpoint if there is one; then print metrics and samples."""
    console = console or Console(quiet=not hosts.is_main())

    # ------------------------------------------------------------ config
    config.check_data()
    config = complete_config(config)
    resumes, run_dir = check_workdir(config), RunDir(config.workdir)

    # ------------------------------------------------------------ program: mesh, model, shardings, jitted step
    devices = jax.devices()
    program = train_program(config, devices)

    # ------------------------------------------------------------ data
    with console.status("reading, tokenising and packing the data"):
        tokenizer = find_or_make_tokenizer(config, resumes)
        objective = make_objective(config, tokenizer)
        sets = load_sets(config.data, objective, tokenizer, run_dir.data)
    loader = make_loader(config, sets.train, objective, host=hosts.process_index(), num_hosts=hosts.process_count())
    evaluation = Evaluation(config, sets.heldout, objective, program.mesh)
    console.print(_describe_data(config, sets))

    with Checkpoints(run_dir, config) as checkpoints, _stop_signals() as stopping:
        # -------------------------------------------------------- restore, start or init
        state, start = first_state(program, checkpoints)
        if start >= config.train.steps:
            console.print(_complete(run_dir, start))
            return _make_run(program, state, tokenizer, start)
        write_run_files(config, tokenizer)  # only now, so that an invalid config leaves no run files behind
        console.print(_describe_model(program, state, start))

        # -------------------------------------------------------- loop
        steps, values = config.train.steps, {}
        bar = Bar(console, start, steps)
        with MetricWriter(run_dir, start) as writer, bar, jax.set_mesh(program.mesh):
            flops = {"step_flops": step_flops(config), "peak_flops": peak_flops(config, devices)}
            recorder = Recorder(writer, bar, log_every=config.train.log_every, **flops)
            batches = loader.iterate(start, steps)
            try:
                for step in range(start + 1, steps + 1):
                    wait_start = time.perf_counter()
                    batch = global_batch(next(batches), program.mesh)
                    input_wait = time.perf_counter() - wait_start
                    state, metrics = program.step(state, batch)
                    recorder.add(step, metrics, input_wait)
                    if step == start + 1:
                        recorder.flush()
                        recorder.pause()  # compile time does not count as training time

                    values = {}
                    if due := evaluation.due(step):
                        recorder.flush()
                        values = evaluation.measure(_make_run(program, state, tokenizer, step), due)
                        recorder.attach(values)
                        recorder.pause()
                    stops = hosts.any_process(stopping.is_set())
                    if step == steps or stops or step % config.checkpoint.every == 0:
                        recorder.flush()  # raises if a step diverged, so that it is not saved
                        checkpoints.save(step, state, config, {"step": step}, values)
                    if stops:
                        break
            except DivergedError as error:
                raise DivergedError(_diverged(error, checkpoints)) from None
            finally:
                recorder.close()
                batches.close()

    # ------------------------------------------------------------ report
    run = _make_run(program, state, tokenizer, step)
    if step < steps:
        console.print(f"stopped at step {step}; the same command continues from there")
        return run
    if values:
        run_dir.write_evaluation(step, values)
        console.print(format_metrics(values), soft_wrap=True)
    _show_samples(console, run, run_dir)
    return run


def _make_run(program: TrainProgram, state: TrainState, tokenizer: Tokenizer, step: int) -> Run:
    mesh = program.mesh if program.mesh.size > 1 else None
    return Run(program.config, program.model, program.inference_params(state), tokenizer, step, mesh)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets, to stop with a checkpoint; a second signal stops at once."""
    stopping = threading.Event()
    # Python allows signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    previous = {kind: signal.getsignal(kind) for kind in kinds}

    def stop(kind: int, frame: object) -> None:
        stopping.set()
        for each in kinds:
            signal.signal(each, previous[each])

    for kind in kinds:
        signal.signal(kind, stop)
    try:
        yield stopping
    finally:
        for kind in kinds:
            signal.signal(kind, previous[kind])


def _describe_data(config: RunConfig, sets: Sets) -> str:
    heldout = "" if sets.heldout is None else f", {sets.heldout.num_tokens:,} held out"
    return (
        f"data: {sets.train.num_tokens:,} training tokens in {len(sets.train):,} rows of {config.data.length}{heldout}"
    )


def _describe_model(program: TrainProgram, state: TrainState, start: int) -> str:
    trained, fixed = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state.params, state.frozen))
    frozen = f", {fixed:,} of them frozen" if fixed else ""
    start_from = program.config.train.start
    begins = "starting" if start_from is None else f"starting from {start_from.path}"
    devices = program.mesh.devices
    return (
        f"model: {program.config.model.shape}, {trained + fixed:,} parameters{frozen} on {devices.size} "
        f"{devices.flat[0].device_kind} device{'s' * (devices.size > 1)}; "
        + (f"continuing from step {start}" if start else begins)
    )


def _complete(run_dir: RunDir, step: int) -> str:
    return (
        f"the run in {run_dir} is complete at step {step}; raise train.steps to continue it, "
        f"or try: jaxformer evaluate {run_dir}"
    )


def _diverged(error: DivergedError, checkpoints: Checkpoints) -> str:
    checkpoints.wait()
    last = checkpoints.latest
    kept = "there is no checkpoint yet" if last is None else f"the last good checkpoint is step {last}"
    return (
        f"{error}: training stopped, {kept} in '{checkpoints.directory}'. "
        "Lower optim.learning_rate, lengthen optim.schedule.warmup_steps or set optim.clip_norm"
    )


def _show_samples(console: Console, run: Run, run_dir: RunDir) -> None:
    """Print sample outputs and the command to try next."""
    for prompt, output in generate_samples(run):
        console.rule(style="dim")
        joined = f"{prompt}{output}" if run.config.model.shape == "decoder-only" else f"{prompt} -> {output}"
        console.print(joined, markup=False, highlight=False)
    console.rule(style="dim")
    prompt = run.config.evaluate.prompts[0] if run.config.evaluate.prompts else "..."
    console.print(f"run: {run_dir}   next: jaxformer generate {run_dir} --prompt {shlex.quote(prompt)}", soft_wrap=True)
