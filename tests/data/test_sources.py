"""Sources: the examples of each kind, and the error messages for invalid files."""

import bz2
import gzip
import json
import lzma

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jaxformer.config import ArrayRecordSource, JsonlSource, MemorySource, TextSource, TsvSource
from jaxformer.data import open_source
from jaxformer.data.sources.records import open_records, write_records
from jaxformer.errors import UserError


def texts(source) -> list[str]:
    return [example["text"] for example in open_source(source)]


# ---------------------------------------------------------------- text
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["one\n two\n\n\nthree\u2028x\n"]),
        ("line", ["one", " two", "three\u2028x"]),
        ("paragraph", ["one\n two", "three\u2028x"]),
    ],
)
def test_text_documents(tmp_path, document, expected):
    (tmp_path / "a.txt").write_text("one\n two\n\n\nthree\u2028x\n", encoding="utf-8")
    assert texts(TextSource(paths=(str(tmp_path / "a.txt"),), document=document)) == expected


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", bz2.compress)])
def test_compressed_text(tmp_path, suffix, compress):
    path = tmp_path / f"a.txt.{suffix}"
    path.write_bytes(compress("héllo\n".encode()))
    assert texts(TextSource(paths=(str(path),))) == ["héllo\n"]


def test_globs_are_sorted_and_files_counted_once(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).write_text(name)
    patterns = (str(tmp_path / "**" / "*.txt"), str(tmp_path / "a.txt"))
    assert texts(TextSource(paths=patterns)) == ["a.txt", "b.txt", "sub/c.txt"]


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert texts(TextSource(paths=(str(tmp_path / "a.txt"),), document="line")) == ["one", "two"]


def test_missing_file_and_glob_without_match(tmp_path):
    for pattern in (tmp_path / "no.txt", tmp_path / "*.md"):
        with pytest.raises(UserError, match=r"no file matches .*(no\.txt|\*\.md)"):
            open_source(TextSource(paths=(str(pattern),)))


def test_directory_is_not_a_file(tmp_path):
    with pytest.raises(UserError, match="is a directory: name its files"):
        open_source(TextSource(paths=(str(tmp_path),)))


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_one_empty_file_among_good_ones(tmp_path, content):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / "b.txt").write_text(content)
    with pytest.raises(UserError, match=r"b\.txt: the file is empty"):
        open_source(TextSource(paths=(str(tmp_path / "*.txt"),)))


def test_invalid_utf8_names_line_and_offset(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff\n")
    with pytest.raises(UserError, match=r"a\.txt:2: byte 0xff at offset 9 is not valid UTF-8: convert"):
        open_source(TextSource(paths=(str(tmp_path / "a.txt"),)))


@pytest.mark.parametrize("suffix", ["gz", "xz", "bz2"])
@pytest.mark.parametrize("whole", [True, False])
def test_broken_compression(tmp_path, suffix, whole):
    compress = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}[suffix]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"plain text" if whole else compress(b"text " * 1000)[:-9])
    with pytest.raises(UserError, match=rf"a\.{suffix}: invalid or truncated \.{suffix} file"):
        open_source(TextSource(paths=(str(path),)))


# ---------------------------------------------------------------- JSON
def jsonl(tmp_path, *lines: str, **fields) -> JsonlSource:
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return JsonlSource(paths=(str(tmp_path / "a.jsonl"),), **fields)


def test_jsonl_texts_and_pairs(tmp_path):
    assert texts(jsonl(tmp_path, '{"text": "a", "x": 1}', "", '{"text": "b"}')) == ["a", "b"]
    assert list(open_source(jsonl(tmp_path, '{"en": "a", "de": "b"}', inputs="en", targets="de"))) == [
        {"inputs": "a", "targets": "b"}
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"a\.jsonl:2: not valid JSON"),
        ('"text"', r"a\.jsonl:2: expected a JSON object with named fields, found str"),
        ('{"body": "x", "id": 1}', r"a\.jsonl:2: no field 'text', .*found: 'body', 'id'"),
        ('{"inputs": "x"}', r"a\.jsonl:2: no field 'text', nor both 'inputs' and 'targets'; found: 'inputs'"),
        ('{"text": 3}', r"a\.jsonl:2: field 'text' is int, expected a string"),
        ('{"text": "\\ud800"}', r"a\.jsonl:2: field 'text' holds an unpaired surrogate"),
        ('{"inputs": "x", "targets": "y"}', r"a\.jsonl:2: has inputs and targets but the source began with text"),
    ],
)
def test_bad_json_lines(tmp_path, line, message):
    with pytest.raises(UserError, match=message):
        open_source(jsonl(tmp_path, '{"text": "good"}', line))


def test_jsonl_of_blank_texts(tmp_path):
    with pytest.raises(UserError, match=r"the jsonl source \(.*a\.jsonl\) holds no document"):
        open_source(jsonl(tmp_path, '{"text": " "}'))


# ---------------------------------------------------------------- ArrayRecord
def test_array_record_random_access_over_files(tmp_path):
    for name, values in (("a", "xy"), ("b", "z")):
        write_records(tmp_path / f"{name}.ar", [json.dumps({"text": value}).encode() for value in values])
    documents = open_source(ArrayRecordSource(paths=(str(tmp_path / "*.ar"),)))
    assert [documents[i]["text"] for i in (2, 0, 1)] == ["z", "x", "y"]
    assert [example["text"] for example in documents] == ["x", "y", "z"]


def test_bad_array_records(tmp_path):
    source = ArrayRecordSource(paths=(str(tmp_path / "a.ar"),))
    (tmp_path / "a.ar").write_bytes(b"no such thing")
    with pytest.raises(UserError, match=r"a\.ar: not a readable ArrayRecord file"):
        open_source(source)
    write_records(tmp_path / "a.ar", [b'{"text": "x"}', b"{", b'{"inputs": "x", "targets": "y"}'])
    documents = open_source(source)
    with pytest.raises(UserError, match=r"a\.ar, record 1: not valid JSON"):
        documents[1]
    with pytest.raises(UserError, match=r"a\.ar, record 2: has inputs and targets"):
        documents[2]


def test_array_record_file_without_records(tmp_path):
    ArrayRecordWriter(str(tmp_path / "a.ar"), "group_size:1").close()
    with pytest.raises(UserError, match=r"a\.ar: the file holds no records"):
        open_records(tmp_path / "a.ar")


def test_interrupted_write_leaves_no_file(tmp_path):
    def records():
        yield b"x"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_records(tmp_path / "a.ar", records())
    assert not (tmp_path / "a.ar").exists()


# ---------------------------------------------------------------- TSV and memory
def test_tsv_columns(tmp_path):
    (tmp_path / "a.tsv").write_text('1\ta "b\tc\n2\td\te\n')
    source = TsvSource(paths=(str(tmp_path / "a.tsv"),), inputs=2, targets=1)
    assert list(open_source(source)) == [{"inputs": "c", "targets": 'a "b'}, {"inputs": "e", "targets": "d"}]


def test_tsv_with_too_few_columns(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\nc d\n")
    with pytest.raises(UserError, match=r"a\.tsv:2: 1 tab-separated columns, but .* need 2"):
        open_source(TsvSource(paths=(str(tmp_path / "a.tsv"),)))


def test_empty_tsv(tmp_path):
    (tmp_path / "a.tsv").write_text("\n")
    with pytest.raises(UserError, match=r"a\.tsv: the file is empty"):
        open_source(TsvSource(paths=(str(tmp_path / "a.tsv"),)))


def test_memory():
    assert texts(MemorySource(documents=("a", " ", "b"))) == ["a", "b"]
    assert open_source(MemorySource(pairs=(("a", "b"),)))[0] == {"inputs": "a", "targets": "b"}
    with pytest.raises(UserError, match="the memory source holds no document"):
        open_source(MemorySource(documents=("\n",)))
