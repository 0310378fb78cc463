"""The report of preflight as one page of text."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxformer.preflight.report import Report
from jaxformer.topology import CHIPS, topology_names

GIB = 2**30


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that announces the next compilation on standard error; a terminal also shows its time so far."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(f"{text}...", highlight=False, soft_wrap=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def announce(text: str) -> None:
            bar.reset(task, description=text, total=None)

        yield announce


def show(report: Report, console: Console) -> None:
    """Print the page."""
    if not console.is_terminal:
        console.width = 120
    console.print(Group(*_sections(report)), highlight=False)


def show_topologies(console: Console) -> None:
    """Print the names of all topologies, by chip."""
    table = Table("chip", "memory", "bf16 peak", "topologies", box=None, header_style="bold")
    for chip in CHIPS.values():
        names = ", ".join(topology_names(chip))
        table.add_row(chip.name, f"{chip.memory / GIB:.0f} GiB", f"{chip.bf16 / 1e12:.0f} TFLOP/s", names)
    console.print(table, highlight=False)


def _sections(report: Report) -> list[RenderableType]:
    sections: list[RenderableType] = [_verdict(report), _memory(report), *_attention(report)]
    if not report.compiled.ran_out_of_memory:
        sections += [_speed(report), _collectives(report)]
    if report.compiled.undersharded:
        sections.append(_undersharded(report))
    if not report.fits:
        sections.append(_suggestions(report))
    sections.append(Text(f"compiled in {report.compiled.compile_seconds:.0f} s"))
    return sections


def _verdict(report: Report) -> Text:
    compiled, config = report.compiled, report.config
    mesh = ", ".join(f"{axis}={size}" for axis, size in compiled.mesh.items() if size > 1) or "one device"
    remat = f", remat {config.train.remat}" if report.program == "train step" else ""
    answer = ("fits", "bold green") if report.fits else ("does not fit", "bold red")
    return Text.assemble(
        answer,
        f": {report.program} on {report.topology.name} ({report.topology.num_chips} chips), mesh {mesh}, batch "
        f"{config.data.batch_size} x {config.batch_layout.length}{remat}\n",
        f"peak {_gib(compiled.peak_bytes)} of {_gib(report.hbm_bytes)} per device",
    )


def _memory(report: Report) -> Table:
    table = _table("memory per device", "GiB", "of capacity")
    for kind, size in report.compiled.memory.items():
        table.add_row(kind, f"{size / GIB:.3f}", f"{size / report.hbm_bytes:.1%}")
    return table


def _attention(report: Report) -> list[Text]:
    return [Text(f"attention, {inputs}: {choice}") for inputs, choice in report.compiled.attention.items()]


def _speed(report: Report) -> Table:
    compiled, bound = report.compiled, report.roofline
    table = _table(f"roofline of one {report.program} per device", "", "seconds")
    table.add_row("hardware FLOPs", f"{compiled.flops:.3e}", f"{bound.compute_seconds:.4f}")
    table.add_row("HBM traffic", _gib(compiled.hbm_traffic), f"{bound.memory_seconds:.4f}")
    table.add_row("collectives", _gib(compiled.wire_bytes), f"{bound.network_seconds:.4f}")
    table.add_row("model FLOPs", f"{report.model_flops:.3e}", "")
    table.add_row("time at least", f"bound by {bound.bound_by}", f"{bound.step_seconds:.4f}")
    table.add_row("tokens/s per device at most", f"{report.tokens / bound.step_seconds:,.0f}", "")
    table.add_row("MFU at most", f"{report.mfu:.1%}", "")
    return table


def _collectives(report: Report) -> RenderableType:
    if not report.compiled.collectives:
        return Text("no collectives")
    table = _table("collectives", "mesh axis", "count", "GiB", "on the wire")
    for each in report.compiled.collectives:
        table.add_row(each.kind, each.axis, str(each.count), f"{each.bytes / GIB:.3f}", f"{each.wire_bytes / GIB:.3f}")
    return table


def _undersharded(report: Report) -> Table:
    table = _table("parameters that are not fully sharded", "MiB per device")
    for path, size in report.compiled.undersharded.items():
        table.add_row(path, f"{size / 2**20:.1f}")
    return table


def _suggestions(report: Report) -> RenderableType:
    if not report.suggestions:
        return Text("use fewer rows or shorter ones, shard over more devices, or choose a larger topology")
    table = _table("what was compiled instead", "topology", "peak", "")
    for each in report.suggestions:
        answer = "fits" if each.fits else "does not fit"
        table.add_row(" ".join(each.overrides), each.topology, _gib(each.peak_bytes), answer)
    if report.suggestions[-1].fits:
        return table
    return Group(table, Text("none of them fits: choose a smaller model, a shorter length or a larger topology"))


def _table(title: str, *columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(title, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"
