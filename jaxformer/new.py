"""`jaxformer new`: a commented config to start from, with sizes that suit the data."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxformer.config import ParallelSource, TextSource
from jaxformer.data import Documents, open_source
from jaxformer.data.sources.split import is_heldout
from jaxformer.errors import UserError

MIN_DOCUMENTS = 20  # with fewer documents, the held-out part may be empty
# Vocabulary size by bytes of text (None: bytes as tokens): a larger vocabulary needs more text to train on.
VOCABULARIES = ((100_000, None), (2_000_000, 2048), (50_000_000, 8192))
LARGEST_VOCABULARY = 32_768


@dataclass(frozen=True)
class Sizes:
    """What a config for some documents should contain."""

    vocab_size: int | None
    """Size of a SentencePiece vocabulary. None: the text is too short to train one, so the tokens are bytes."""
    heldout_percent: int
    lengths: dict[str, int]
    """Tokens per row for each field of the examples, chosen so that nearly all examples fit."""


def new_language_model(name: str, files: Sequence[str]) -> str:
    """Write the config of a small decoder for these text files; return what to do next."""
    target = _target(name)
    document, documents = _choose_document(files)
    values = _shared_values(target, _choose_sizes(documents), documents[0]["text"])
    text = LANGUAGE_MODEL.format(
        title=f"A language model trained on {_names(files)}.", paths=_literal(files), document=document, **values
    )
    return _write(target, text, f"{len(documents):,} documents, one per {document}")


def new_translator(name: str, inputs: str, targets: str) -> str:
    """Write the config of a small encoder-decoder for two files of corresponding lines; return what to do next."""
    target = _target(name)
    documents = open_source(ParallelSource(inputs=inputs, targets=targets))
    sizes = _choose_sizes(documents)
    text = TRANSLATOR.format(
        title=f"An encoder-decoder trained to write {_names([targets])} from {_names([inputs])}.",
        inputs=_literal([inputs]),
        targets=_literal([targets]),
        input_length=sizes.lengths["inputs"],
        length=sizes.lengths["targets"],
        **_shared_values(target, sizes, documents[0]["inputs"]),
    )
    return _write(target, text, f"{len(documents):,} pairs")


# ---------------------------------------------------------------- choices
def _choose_document(files: Sequence[str]) -> tuple[str, Documents]:
    """The largest unit of text of which there are enough to hold some out."""
    found = {}
    for document in ("file", "paragraph", "line"):
        found[document] = open_source(TextSource(paths=tuple(files), document=document))
        if len(found[document]) >= MIN_DOCUMENTS:
            return document, found[document]
    return max(found.items(), key=lambda item: len(item[1]))


def _choose_sizes(documents: Documents) -> Sizes:
    texts = [text for example in documents for text in example.values()]
    num_bytes = sum(len(text.encode()) for text in texts)
    vocab_size = next((size for limit, size in VOCABULARIES if num_bytes < limit), LARGEST_VOCABULARY)
    num_characters = len(set().union(*map(set, texts)))
    num_words = len({word for text in texts for word in text.split()})
    while vocab_size is not None and vocab_size < 2 * num_characters + 512:  # each character is also a piece
        vocab_size *= 2
    # SentencePiece cannot find more pieces than a repetitive text has words and parts of words.
    if vocab_size is not None and vocab_size > num_words:
        vocab_size = None
    return Sizes(vocab_size, _choose_percent(documents), _choose_lengths(documents, vocab_size))


def _choose_percent(documents: Documents) -> int:
    """The smallest percentage that holds out a few examples."""
    keys = [next(iter(example.values())) for example in documents]
    for percent in (5, 10, 20, 50):
        num_heldout = sum(is_heldout(key, percent) for key in keys)
        if 0 < num_heldout < len(keys) and (num_heldout * 4 >= MIN_DOCUMENTS or percent == 50):
            return percent
    count = f"{len(keys)} example{'s' * (len(keys) != 1)}"
    raise UserError(f"the data has {count}, too few to hold some out for evaluation: use more text")


def _choose_lengths(documents: Documents, vocab_size: int | None) -> dict[str, int]:
    bytes_per_token = 1 if vocab_size is None else 2.5  # typical of small vocabularies
    lengths = {}
    for field in documents[0]:
        sizes = sorted(len(example[field].encode()) for example in documents)
        longest = sizes[int(0.99 * (len(sizes) - 1))] / bytes_per_token + 2  # bos and eos
        lengths[field] = min(max(32, 32 * -(-int(longest) // 32)), 512)
    return lengths


# ---------------------------------------------------------------- the file
def _target(name: str) -> Path:
    if not name.isprintable() or Path(name).name.removesuffix(".py") in ("", ".", "..") or name.endswith("/"):
        raise UserError(f"{name!r} is not a name for a config: use one such as mymodel or configs/mymodel.py")
    path = Path(name if name.endswith(".py") else f"{name}.py")
    if path.exists():
        raise UserError(f"'{path}' exists: choose another name, or delete it first")
    if not path.parent.is_dir():
        raise UserError(f"'{path}' cannot be written: '{path.parent}' is not a directory")
    return path


def _write(target: Path, text: str, found: str) -> str:
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"'{target}' cannot be written ({error.strerror})") from None
    return f"wrote {target} for {found}\nnext: jaxformer train {shlex.quote(str(target))}"


def _shared_values(target: Path, sizes: Sizes, example: str) -> dict[str, object]:
    """The values that both templates need."""
    if sizes.vocab_size is None:
        tokenizer, vocab_size, comment = "ByteTokenizer", 259, "UTF-8 bytes; SentencePieceTokenizer() for more text"
    else:
        tokenizer, vocab_size, comment = "SentencePieceTokenizer", sizes.vocab_size, "trained on the training data"
    prompt = _prompt(example)
    return {
        "file": shlex.quote(str(target)),
        "run": shlex.quote(f"runs/{target.stem}"),
        "tokenizer": tokenizer,
        "tokenizer_comment": comment,
        "vocab_size": vocab_size,
        "percent": sizes.heldout_percent,
        "prompt": prompt,
        "quoted_prompt": shlex.quote(prompt),
    }


def _prompt(text: str, limit: int = 50) -> str:
    """The first words of a text, without characters that would need escapes in Python."""
    words = text.translate(str.maketrans("", "", "\"\\'")).split()
    kept = [words[0][:limit]] if words else ["..."]
    for word in words[1:6]:
        if len(" ".join([*kept, word])) <= limit:
            kept.append(word)
    return " ".join(kept)


def _names(files: Sequence[str]) -> str:
    shown = ", ".join(Path(file).name for file in files[:3]) + (" and more" if len(files) > 3 else "")
    return shown.replace("\\", "/").replace('"', "'")


def _literal(texts: Sequence[str]) -> str:
    """Python source of one string, or of a tuple with one string per line."""
    quoted = [json.dumps(text, ensure_ascii=False) for text in texts]
    if len(quoted) == 1:
        return quoted[0]
    return "(\n" + "".join(f"{' ' * 20}{text},\n" for text in quoted) + f"{' ' * 16})"


# ---------------------------------------------------------------- templates
HEADER = '''"""{title}

    jaxformer train {file}
    jaxformer generate {run} --prompt {quoted_prompt}
    jaxformer evaluate {run}

Change a value here, or for one run on the command line: jaxformer train {file} data.batch_size=8
What a key means and which values it takes: jaxformer help data.batch_size
"""

from jaxformer import config as jc
'''

LANGUAGE_MODEL = f"""{HEADER}from jaxformer.models.llama import llama


def config() -> jc.RunConfig:
    return jc.RunConfig(
        model=llama(  # a decoder with rotary positions, RMSNorm and gated MLPs
            num_layers=4,  # depth
            embed_dim=192,  # width, a multiple of num_heads
            num_heads=3,  # attention heads
            mlp_dim=512,  # width of the MLPs, about 2.7 times embed_dim
            vocab_size={{vocab_size}},  # number of token ids, at least that of the tokenizer
            context_length=1024,  # longest text in tokens, also for generation
            tied=True,  # the output projection shares the token embeddings
        ),
        data=jc.DataConfig(
            train=jc.TextSource(
                paths={{paths}},  # files or globs, plain or compressed
                document="{{document}}",  # one document is a file, a paragraph or a line
            ),
            heldout=jc.HeldoutSplit(percent={{percent}}),  # documents to evaluate on, never trained on
            tokenizer=jc.{{tokenizer}}(),  # {{tokenizer_comment}}
            length=256,  # tokens per row; short documents share a row
            batch_size=8,  # rows per step
        ),
        optim=jc.OptimConfig(
            algorithm=jc.AdamW(),  # or Muon, Lion, Adafactor, Sgd
            learning_rate=3e-3,  # peak of the schedule
            schedule=jc.Cosine(warmup_steps=50),  # linear warm-up, then decay
            weight_decay=0.1,  # against overfitting
        ),
        train=jc.TrainConfig(steps=1000),  # raise it and train again to continue the run
        checkpoint=jc.CheckpointConfig(every=200),  # an interrupted run resumes from the latest one
        evaluate=jc.EvaluateConfig(
            every=200,  # steps between evaluations
            batches=16,  # held-out batches per evaluation
            prompts=("{{prompt}}",),  # continued after training
            temperature=0.8,  # 0 is greedy decoding
        ),
    )
"""

TRANSLATOR = f"""{HEADER}from jaxformer.models.vaswani import vaswani


def config() -> jc.RunConfig:
    return jc.RunConfig(
        model=vaswani(  # the original encoder-decoder transformer
            num_layers=3,  # depth of the encoder and of the decoder
            embed_dim=192,  # width, a multiple of num_heads
            num_heads=3,  # attention heads
            mlp_dim=768,  # width of the MLPs, usually 4 times embed_dim
            vocab_size={{vocab_size}},  # number of token ids, at least that of the tokenizer
            dropout=0.1,  # more for little data
        ),
        data=jc.DataConfig(
            train=jc.ParallelSource(
                inputs={{inputs}},  # files or globs; line i pairs with line i of targets
                targets={{targets}},
            ),
            heldout=jc.HeldoutSplit(percent={{percent}}),  # pairs to evaluate on, never trained on
            tokenizer=jc.{{tokenizer}}(),  # {{tokenizer_comment}}
            objective=jc.Seq2Seq(input_length={{input_length}}),  # tokens per encoder row
            length={{length}},  # tokens per decoder row; longer pairs are dropped
            batch_size=16,  # rows per step
        ),
        optim=jc.OptimConfig(
            algorithm=jc.AdamW(b2=0.98),  # or Muon, Lion, Adafactor, Sgd
            learning_rate=2e-3,  # peak of the schedule
            schedule=jc.InverseSqrt(warmup_steps=200),  # linear warm-up, then decay
        ),
        train=jc.TrainConfig(
            steps=1000,  # raise it and train again to continue the run
            label_smoothing=0.1,  # against overconfident predictions
        ),
        checkpoint=jc.CheckpointConfig(every=200),  # an interrupted run resumes from the latest one
        evaluate=jc.EvaluateConfig(
            every=200,  # steps between evaluations
            batches=16,  # held-out batches per evaluation
            metrics=(jc.Perplexity(), jc.ExactMatch(num_examples=200)),  # what to measure
            prompts=("{{prompt}}",),  # inputs to translate after training
        ),
    )
"""
