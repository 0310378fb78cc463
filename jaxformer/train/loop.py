"""The training loop: from a config to a run directory.

config -> program (mesh, model, shapes, shardings, jitted step) -> data -> restore, start or init -> loop -> report
"""

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
from jaxformer.data import Tokenizer, complete_labels, load_sets, make_loader
from jaxformer.evaluate.loop import Evaluation
from jaxformer.evaluate.report import format_metrics
from jaxformer.objectives import make_objective
from jaxformer.ops.attention import record_choices
from jaxformer.run import Run
from jaxformer.rundir import RunDir
from jaxformer.sharding import global_batch
from jaxformer.topology import parse_topology
from jaxformer.train.early_stopping import EarlyStopping
from jaxformer.train.metrics import MetricWriter, peak_flops, step_flops
from jaxformer.train.program import TrainProgram, train_program
from jaxformer.train.progress import Bar, DivergedError, PhaseTimer, Recorder
from jaxformer.train.report import (
    describe_complete_run,
    describe_data,
    describe_early_stop,
    describe_kernels,
    describe_model,
    explain_divergence,
    print_report,
)
from jaxformer.train.start import complete_config, first_state
from jaxformer.train.state import TrainState
from jaxformer.train.workdir import check_workdir, copy_generation_defaults, find_or_make_tokenizer, write_run_files


def train(config: RunConfig, console: Console | None = None) -> Run:
    """Train up to `train.steps`, from the latest checkpoint if there is one; then print metrics and samples."""
    console, timer = console or Console(quiet=not hosts.is_main()), PhaseTimer()

    # ------------------------------------------------------------ config
    config.check_data()
    config = complete_labels(complete_config(config))
    resumes, run_dir = check_workdir(config), RunDir(config.workdir)

    # ------------------------------------------------------------ program: mesh, model, shardings, jitted step
    devices = jax.devices()
    if config.mesh.topology is not None:
        parse_topology(config.mesh.topology).check_devices(devices[0].device_kind, len(devices))
    program = train_program(config, devices)

    # ------------------------------------------------------------ data
    with timer.phase("data"), console.status("reading, tokenising and packing the data"):
        tokenizer = find_or_make_tokenizer(config, resumes)
        objective = make_objective(config, tokenizer)
        sets = load_sets(config.data, objective, tokenizer, run_dir.data)
    loader = make_loader(config, sets.train, objective, host=hosts.process_index(), num_hosts=hosts.process_count())
    evaluation = Evaluation(config, sets.heldout, objective, program.mesh)
    console.print(describe_data(sets))

    with Checkpoints(run_dir, config) as checkpoints, _stop_signals() as stopping:
        # -------------------------------------------------------- restore, start or init
        state, start = first_state(program, checkpoints, tokenizer)
        patience = EarlyStopping(config, checkpoints.position if start else None)
        if start >= config.train.steps or patience.stops:
            reason = patience.reason if start < config.train.steps else None
            console.print(describe_complete_run(run_dir, start, config.train.steps, reason), soft_wrap=True)
            return _make_run(program, state, tokenizer, start)
        write_run_files(config, tokenizer)  # only now, so that an invalid config leaves no run files behind
        if start == 0:
            copy_generation_defaults(config)
        console.print(describe_model(program, state, start), soft_wrap=True)

        # -------------------------------------------------------- loop
        steps, values = config.train.steps, {}
        bar = Bar(console, start, steps)
        with MetricWriter(run_dir, start) as writer, bar, jax.set_mesh(program.mesh), record_choices() as kernels:
            flops = {"step_flops": step_flops(config), "peak_flops": peak_flops(config, devices)}
            recorder = Recorder(writer, bar, log_every=config.train.log_every, **flops)
            batches = loader.iterate(start, steps)
            try:
                for step in range(start + 1, steps + 1):
                    with timer.phase("compilation" if step == start + 1 else "training"):
                        wait_start = time.perf_counter()
                        batch = global_batch(next(batches), program.mesh)
                        input_wait = time.perf_counter() - wait_start
                        state, metrics = program.step(state, batch)
                        if step == start + 1:
                            for line in describe_kernels(kernels):
                                console.print(line, soft_wrap=True, markup=False)
                        recorder.add(step, metrics, input_wait)
                        due, stops = evaluation.due(step), hosts.any_process(stopping.is_set())
                        saves = step == steps or stops or step % config.checkpoint.every == 0
                        if step == start + 1 or due or saves:
                            recorder.flush()  # raises if a step diverged, so that it is neither evaluated nor saved

                    values = {}
                    if due:
                        with timer.phase("evaluation"):
                            run = _make_run(program, state, tokenizer, step)
                            values = evaluation.measure(run, due)
                            saves |= patience.add(step, values)  # the best state so far must not be lost
                            if patience.stops:  # the end of the run, so that all metrics are due
                                values |= evaluation.measure(run, [m for m in evaluation.metrics if m not in due])
                        recorder.attach(values)
                        console.print(f"step {step}/{steps}  {format_metrics(values)}", soft_wrap=True)
                    if saves or patience.stops:
                        with timer.phase("checkpoints"):
                            checkpoints.save(step, state, config, {"step": step, **patience.history}, values)
                    if step == start + 1 or due or saves:
                        recorder.pause()  # compilation, evaluation and checkpoints do not count as training time
                    if stops or patience.stops:
                        break
            except DivergedError as error:
                raise DivergedError(explain_divergence(error, checkpoints)) from None
            finally:
                recorder.close()
                batches.close()

    # ------------------------------------------------------------ report
    run = _make_run(program, state, tokenizer, step)
    if patience.stops and step < steps:
        console.print(describe_early_stop(step, patience.reason), soft_wrap=True)
    elif step < steps:
        console.print(f"stopped at step {step}; the same command continues from there")
        return run
    if values:
        run_dir.write_evaluation(step, values)
    print_report(console, run, run_dir, timer)
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
