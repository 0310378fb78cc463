"""Training from a config to a run directory; reads top to bottom.

config -> data -> mesh -> shapes -> shardings -> restore or init -> jit(step) -> loop -> report
"""

import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax
from rich.console import Console

from jaxformer.checkpoint import Checkpoints, abstract_like
from jaxformer.config import RunConfig
from jaxformer.data import Sets, load_sets, load_tokenizer, make_loader, make_tokenizer, open_source
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.evaluate.heldout import eval_step, heldout_metrics
from jaxformer.evaluate.report import decoded_metrics, format_metrics, read_evaluation, samples, write_evaluation
from jaxformer.layers import Transformer, abstract_params
from jaxformer.run import Run, make_runtime
from jaxformer.sharding import check_batch, global_batch, make_mesh
from jaxformer.train.metrics import MetricWriter, peak_flops, step_flops
from jaxformer.train.optim import make_optimizer
from jaxformer.train.progress import Bar, DivergedError, Recorder
from jaxformer.train.state import init_state, state_shardings
from jaxformer.train.step import train_step
from jaxformer.train.workdir import check_workdir, write_run_files
from jaxformer.typing import Params


def train(config: RunConfig, console: Console | None = None) -> Run:
    """Train to `train.steps`, from the latest checkpoint if the workdir has one; evaluate and show samples."""
    console = console or Console()

    # ------------------------------------------------------------ checks
    config.check_data()
    check_batch(config, jax.device_count())
    resumes = check_workdir(config)

    # ------------------------------------------------------------ data
    tokenizer, sets = _open_data(config, resumes, console)
    hosts = {"host": jax.process_index(), "num_hosts": jax.process_count()}
    loader = make_loader(config, sets.train, **hosts)
    heldout = None if sets.heldout is None else make_loader(config, sets.heldout, **hosts, train=False)

    # ------------------------------------------------------------ model, shapes, shardings
    mesh = make_mesh(config.mesh)
    model = Transformer(config.model, make_runtime(config.train, mesh.devices.flat[0].platform))
    optimizer = make_optimizer(config.optim, config.train.steps, abstract_params(config.model)[1])
    abstract = jax.eval_shape(lambda: init_state(config, optimizer))
    shardings = state_shardings(config, abstract, mesh)
    step_fn = jax.jit(
        partial(train_step, model=model, optimizer=optimizer, config=config),
        donate_argnums=0,
        out_shardings=(shardings, None),
    )
    eval_fn = jax.jit(partial(eval_step, model=model))

    workdir = Path(config.workdir)
    with Checkpoints(workdir, config.checkpoint) as checkpoints, _stop_signals() as stopping:
        # -------------------------------------------------------- restore or init
        if checkpoints.latest is not None:
            state, position = checkpoints.restore(abstract_like(abstract, shardings))
            start = position["step"]
        else:
            state, start = jax.jit(lambda: init_state(config, optimizer), out_shardings=shardings)(), 0
        if start >= config.train.steps:
            console.print(_complete(workdir, start))
            return Run(config, model, state.best_params, tokenizer, start, mesh if mesh.size > 1 else None)
        write_run_files(config, tokenizer)  # not before everything a config can get wrong has been checked
        _announce(console, config, start, state.params)

        # -------------------------------------------------------- loop
        steps, found = config.train.steps, {}
        bar = Bar(console, start, steps)
        with MetricWriter(workdir, start) as writer, bar, jax.set_mesh(mesh):
            flops = {"step_flops": step_flops(config), "peak_flops": peak_flops(config)}
            recorder = Recorder(writer, bar, log_every=config.train.log_every, **flops)
            batches = loader.iterate(start, steps)
            try:
                for step in range(start + 1, steps + 1):
                    asked = time.perf_counter()
                    batch = global_batch(next(batches), mesh)
                    waited = time.perf_counter() - asked
                    state, metrics = step_fn(state, batch)
                    recorder.add(step, metrics, waited)
                    if step == start + 1:
                        recorder.flush()
                        recorder.pause()  # compilation is not training

                    evaluates = heldout is not None and (step == steps or _due(step, config.evaluate.every))
                    if evaluates:
                        recorder.flush()
                        found = heldout_metrics(eval_fn, state.best_params, heldout, mesh, config.evaluate.batches)
                        recorder.attach(found)
                        recorder.pause()
                    if step == steps or stopping.is_set() or _due(step, config.checkpoint.every):
                        recorder.flush()  # a step that diverged must not become a checkpoint
                        loss = found["heldout_loss"] if evaluates else None
                        checkpoints.save(step, state, config, {"step": step}, loss)
                    if stopping.is_set():
                        break
            except DivergedError as error:
                raise DivergedError(_diverged(error, checkpoints)) from None
            finally:
                recorder.close()
                batches.close()

    # ------------------------------------------------------------ report
    run = Run(config, model, state.best_params, tokenizer, step, mesh if mesh.size > 1 else None)
    if step < steps:
        console.print(f"stopped at step {step}; the same command continues from there")
        return run
    if found:
        write_evaluation(workdir, step, found | decoded_metrics(run))
    _show(console, run, workdir)
    return run


def _open_data(config: RunConfig, resumes: bool, console: Console) -> tuple[Tokenizer, Sets]:
    """The tokenizer, from the workdir or made now, and the sets; nothing is written."""
    with console.status("reading, tokenising and packing the data"):
        if resumes:
            tokenizer = load_tokenizer(config.workdir)
        else:
            tokenizer = make_tokenizer(config, open_source(config.data.train))
        sets = load_sets(config, tokenizer, Path(config.workdir) / "data")
    console.print(
        f"data: {sets.train.num_tokens:,} training tokens in {len(sets.train):,} rows of {config.data.length}"
        + (f", {sets.heldout.num_tokens:,} held out" if sets.heldout is not None else "")
    )
    return tokenizer, sets


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Set on the first Ctrl-C or SIGTERM, so that a run ends with a checkpoint; a second one ends it at once."""
    stopping = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def stop(kind: int, frame: object) -> None:
        stopping.set()
        for each in kinds:
            signal.signal(each, before[each])

    for kind in kinds:
        signal.signal(kind, stop)
    try:
        yield stopping
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _announce(console: Console, config: RunConfig, start: int, params: Params) -> None:
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    where = f"continuing from step {start}" if start else "starting"
    devices = f"{jax.device_count()} {jax.devices()[0].device_kind} device{'s' * (jax.device_count() > 1)}"
    console.print(f"model: {config.model.shape}, {count:,} parameters on {devices}; {where}")


def _complete(workdir: Path, step: int) -> str:
    return (
        f"the run in {workdir} is complete at step {step}; raise train.steps to continue it, "
        f"or try: jaxformer evaluate {workdir}"
    )


def _diverged(error: DivergedError, checkpoints: Checkpoints) -> str:
    checkpoints.wait()
    last = checkpoints.latest
    kept = "there is no checkpoint yet" if last is None else f"the last good checkpoint is step {last}"
    return (
        f"{error}: training stopped, {kept} in '{checkpoints.directory}'. "
        "Lower optim.learning_rate, lengthen optim.schedule.warmup_steps or set optim.clip_norm"
    )


def _show(console: Console, run: Run, workdir: Path) -> None:
    """Metrics, samples, and what to do next."""
    evaluation = read_evaluation(workdir)
    if evaluation:
        console.print(format_metrics(evaluation), soft_wrap=True)
    for prompt, output in samples(run):
        console.rule(style="dim")
        joined = f"{prompt}{output}" if run.config.model.shape == "decoder-only" else f"{prompt} -> {output}"
        console.print(joined, markup=False, highlight=False)
    console.rule(style="dim")
    prompt = run.config.evaluate.prompts[0] if run.config.evaluate.prompts else "..."
    console.print(f"run: {workdir}   next: jaxformer generate {workdir} --prompt {shlex.quote(prompt)}", soft_wrap=True)
