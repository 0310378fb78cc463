"""Pairs from two line-aligned text files, the usual format of translation corpora."""

import logging
from functools import cache
from pathlib import Path

from jaxformer.config import ParallelSource
from jaxformer.data.sources.examples import Documents, Example
from jaxformer.data.sources.textfiles import matched_files, read_lines
from jaxformer.errors import UserError

log = logging.getLogger(__name__)

SHOWN = 5  # line numbers in a message


def open_parallel(cfg: ParallelSource) -> Documents:
    """Pair the lines of the files; pairs with an empty side are skipped."""
    inputs, targets = matched_files(cfg.inputs), matched_files(cfg.targets)
    if len(inputs) != len(targets):
        raise UserError(
            f"inputs has {len(inputs)} files ({_names(inputs)}) but targets has {len(targets)} ({_names(targets)}): "
            "name one target file for every input file, in the same order"
        )
    return [pair for files in zip(inputs, targets, strict=True) for pair in _read_pairs(*files)]


def _read_pairs(inputs: Path, targets: Path) -> list[Example]:
    sources, translations = read_lines(inputs), read_lines(targets)
    if len(sources) != len(translations):
        raise UserError(
            f"{inputs} has {len(sources):,} lines but {targets} has {len(translations):,}: line i of one file must be "
            "the counterpart of line i of the other"
        )
    pairs, skipped = [], []
    for line, (source, target) in enumerate(zip(sources, translations, strict=True), start=1):
        if source.strip() and target.strip():
            pairs.append({"inputs": source, "targets": target})
        else:
            skipped.append(line)
    if not pairs:
        raise UserError(f"{inputs} and {targets} have no line with text in both files: add text or remove them")
    if skipped:
        _report_skipped(inputs, targets, tuple(skipped), len(sources))
    return pairs


@cache  # one run opens a source several times, for example to train the tokenizer
def _report_skipped(inputs: Path, targets: Path, skipped: tuple[int, ...], total: int) -> None:
    shown = ", ".join([*map(str, skipped[:SHOWN]), *["..."] * (len(skipped) > SHOWN)])
    log.warning(
        "%s and %s: skipped %s of %s pairs because a line is empty (line%s %s)",
        inputs,
        targets,
        f"{len(skipped):,}",
        f"{total:,}",
        "s" * (len(skipped) > 1),
        shown,
    )


def _names(paths: list[Path]) -> str:
    shown = [path.name for path in paths[:3]]
    return ", ".join(shown + ["..."] * (len(paths) > 3))
