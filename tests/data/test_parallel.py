"""Pairs from two line-aligned files."""

import bz2
import gzip
import logging
import lzma

import numpy as np
import pytest

from jaxformer.config import ParallelSource, Seq2Seq, TsvSource
from jaxformer.data import Bytes, build_set, open_source
from jaxformer.errors import UserError
from jaxformer.objectives import make_objective


def write(directory, **files: str) -> list[str]:
    for name, content in files.items():
        (directory / name).write_text(content, encoding="utf-8")
    return [str(directory / name) for name in files]


# ---------------------------------------------------------------- parallel files
def test_line_i_pairs_with_line_i(tmp_path):
    en, de = write(tmp_path, en="a cat\na dog", de="eine Katze\nein Hund\n")
    assert list(open_source(ParallelSource(inputs=en, targets=de))) == [
        {"inputs": "a cat", "targets": "eine Katze"},
        {"inputs": "a dog", "targets": "ein Hund"},
    ]


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)])
def test_compressed_parallel_files(tmp_path, suffix, compress):
    (tmp_path / f"en.{suffix}").write_bytes(compress(b"one\ntwo\n"))
    (de,) = write(tmp_path, de="eins\nzwei\n")
    pairs = open_source(ParallelSource(inputs=str(tmp_path / f"en.{suffix}"), targets=de))
    assert [pair["inputs"] for pair in pairs] == ["one", "two"]


def test_globs_and_lists_pair_files_in_order(tmp_path):
    write(tmp_path, a_en="1\n", b_en="2\n", a_de="eins\n", b_de="zwei\n")
    globs = ParallelSource(inputs=str(tmp_path / "*_en"), targets=str(tmp_path / "*_de"))
    paths = [(str(tmp_path / f"a_{lang}"), str(tmp_path / f"b_{lang}")) for lang in ("en", "de")]
    lists = ParallelSource(inputs=paths[0], targets=paths[1])
    expected = [{"inputs": "1", "targets": "eins"}, {"inputs": "2", "targets": "zwei"}]
    assert open_source(globs) == open_source(lists) == expected


def test_one_target_file_may_serve_two_input_files(tmp_path):
    a, b, t = write(tmp_path, a="1\n", b="2\n", t="x\n")
    assert len(open_source(ParallelSource(inputs=(a, b), targets=(t, t)))) == 2


def test_files_of_different_length_name_both_files_and_counts(tmp_path):
    en, de, none = write(tmp_path, en="1\n2\n3\n", de="eins\nzwei\n", none="")
    with pytest.raises(UserError, match=r"/en has 3 lines but .*/de has 2:"):
        open_source(ParallelSource(inputs=en, targets=de))
    with pytest.raises(UserError, match=r"/none has 0 lines but .*/de has 2:"):
        open_source(ParallelSource(inputs=none, targets=de))
    with pytest.raises(UserError, match=r"inputs has 2 files \(en, en\) but targets has 1 \(de\)"):
        open_source(ParallelSource(inputs=(en, en), targets=de))


def test_pairs_with_an_empty_line_are_skipped_and_counted_once(tmp_path, caplog):
    en, de = write(tmp_path, en="1\n\n3\n4\n", de="eins\nzwei\n \nvier\n")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            pairs = open_source(ParallelSource(inputs=en, targets=de))
    assert [pair["targets"] for pair in pairs] == ["eins", "vier"]
    assert len(caplog.records) == 1
    assert "skipped 2 of 4 pairs because a line is empty (lines 2, 3)" in caplog.text


def test_files_without_a_complete_pair(tmp_path):
    en, de = write(tmp_path, en="\n2\n", de="eins\n\n")
    with pytest.raises(UserError, match="no line with text in both files"):
        open_source(ParallelSource(inputs=en, targets=de))


def test_rows_and_bytes_equal_those_of_the_same_pairs_in_tsv(tmp_path, make_config):
    inputs, targets = [f"number {i}" for i in range(20)], [f"Zähl {i}" * (i % 3 + 1) for i in range(20)]
    tsv = "".join(f"{i}\t{t}\n" for i, t in zip(inputs, targets, strict=True))
    en, de, pairs = write(tmp_path, en="\n".join(inputs), de="\n".join(targets), tsv=tsv)
    sets = []
    for source in (ParallelSource(inputs=en, targets=de), TsvSource(paths=pairs)):
        cfg = make_config(train=source, objective=Seq2Seq(input_length=32), length=32)
        sets.append(build_set(cfg.data, make_objective(cfg, Bytes()), "train"))
    assert sets[0].num_bytes == sets[1].num_bytes == sum(len(text.encode()) for text in targets)
    np.testing.assert_array_equal(*(s.records.read(range(len(s))) for s in sets))
