"""`jf.score` against the full forward pass, and against the perplexity that transformers computes."""

from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors, trainers

import jaxformer as jf
from jaxformer import Run, forward, generate, score
from jaxformer.convert import SAMPLES
from jaxformer.convert.sample import VOCAB
from jaxformer.errors import UserError

TEXTS = ["the quick brown fox", "a lazy dog sleeps on the warm roof", "jumps over"]
CORPUS = ["the quick brown fox jumps over the lazy dog while a small cat sleeps on the warm roof of my old house"] * 5
WIDTH = 48  # every reference row is padded to it, so that the full forward compiles once per model


def _expected(run: Run, row: list[int], first: int, source: list[int] | None = None) -> np.ndarray:
    """Log-probabilities of the tokens from index `first` on, from one full forward pass over the row."""
    ids, inputs = np.zeros((2, 1, WIDTH), np.int32)
    ids[0, : len(row)] = row
    more = {}
    if source is not None:
        inputs[0, : len(source)] = source
        more = {"inputs": inputs, "inputs_mask": (np.arange(WIDTH) < len(source))[None]}
    logits_TV = forward(run, ids, mask=(np.arange(WIDTH) < len(row))[None], **more)[0]
    targets = row[first:]
    return np.asarray(jax.nn.log_softmax(logits_TV, axis=-1)[np.arange(len(targets)) + first - 1, targets])


# ---------------------------------------------------------------- the full forward pass
def test_a_decoder_scores_what_its_tokenizer_returns(decoder_run):
    """One value per id; the value of bos is NaN, because no token precedes it."""
    for text, values in zip(TEXTS, score(decoder_run, TEXTS), strict=True):
        ids = [decoder_run.tokenizer.bos_id, *decoder_run.tokenizer.encode(text)]
        assert values.shape == (len(ids),)
        assert np.isnan(values[0])
        np.testing.assert_allclose(values[1:], _expected(decoder_run, ids, first=1), atol=1e-5)


def test_id_lists_are_scored_as_they_are(ring_run):
    rows = [[5, 6, 7, 8], [9], [], [1, 70, 71]]
    plain, with_bos = score(ring_run, rows), score(ring_run, rows, add_bos=True)
    for row, values, conditioned in zip(rows, plain, with_bos, strict=True):
        assert values.shape == conditioned.shape == (len(row),)
        assert values.dtype == conditioned.dtype == np.float32
        if row:
            assert np.isnan(values[0])
            np.testing.assert_allclose(values[1:], _expected(ring_run, row, first=1), atol=1e-5)
            bos_and_row = [ring_run.tokenizer.bos_id, *row]
            np.testing.assert_allclose(conditioned, _expected(ring_run, bos_and_row, first=1), atol=1e-5)


def test_an_encoder_decoder_starts_from_its_start_token(translator):
    """The start token precedes the first target token, so every token has a value; targets have no special ids."""
    sources = ["one", "two", "three words here"]
    for text, source, values in zip(TEXTS, sources, score(translator, TEXTS, sources), strict=True):
        tokenizer = translator.tokenizer
        row = [tokenizer.bos_id, *tokenizer.encode(text)]
        source_ids = [*tokenizer.encode(source), tokenizer.eos_id]
        np.testing.assert_allclose(values, _expected(translator, row, first=1, source=source_ids), atol=1e-5)


def test_scores_do_not_depend_on_the_batch(run):
    texts = ["abc", "a much longer target than the first", ""]
    inputs = ["one", "two three", "four"] if run.config.model.encoder is not None else None
    together = score(run, texts, inputs)
    for i, text in enumerate(texts):
        alone = score(run, [text], None if inputs is None else [inputs[i]])[0]
        np.testing.assert_allclose(together[i], alone, rtol=1e-5)
    assert together[2].shape == ((1,) if inputs is None else (0,))  # a decoder-only model has a value for bos


def test_the_greedy_continuation_scores_best(decoder_run):
    """The prompt is scored as `generate` reads it: no other token is more likely than the one it chooses."""
    prompt = [5, 6, 7]
    (new,) = generate(decoder_run, [prompt], 1, banned=[decoder_run.tokenizer.eos_id])
    others = [token for token in range(3, 259) if token not in new]
    best, *rest = (values[-1] for values in score(decoder_run, [[*prompt, token] for token in (*new, *others)]))
    assert best >= max(rest)


def test_score_reports_missing_and_extra_arguments(translator, decoder_run):
    with pytest.raises(UserError, match="needs inputs"):
        score(translator, ["a"])
    with pytest.raises(UserError, match="takes no inputs"):
        score(decoder_run, ["a"], ["b"])
    with pytest.raises(UserError, match="2 targets but 1 inputs"):
        score(translator, ["a", "b"], ["c"])
    with pytest.raises(UserError, match="add_bos=True: an encoder-decoder starts from its decoder start token"):
        score(translator, ["a"], ["b"], add_bos=True)


# ---------------------------------------------------------------- transformers
def _save(directory: Path, template: list[str]) -> None:
    """A tiny Llama with a tokenizer whose post-processor puts `template` around a text."""
    import transformers

    SAMPLES["llama"].save(directory)
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special))
    marks = [(token, backend.token_to_id(token)) for token in template if token != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(directory)


@pytest.fixture(scope="module", params=[["$A"], ["<s>", "$A"], ["<s>", "$A", "</s>"]], ids=" ".join)
def directory(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    _save(path, request.param)
    return path


def test_perplexity_is_that_of_transformers(directory):
    """The loss of transformers has no term for the first id of a row; with bos prepended, this first id is bos."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    run = jf.load(directory)
    plain, with_bos = score(run, TEXTS), score(run, TEXTS, add_bos=True)
    for text, values, conditioned in zip(TEXTS, plain, with_bos, strict=True):
        ids = tokenizer(text).input_ids
        assert len(values) == len(conditioned) == len(ids)
        for scores, row in ((values, ids), (conditioned, [tokenizer.bos_token_id, *ids])):
            with torch.no_grad():
                loss = model(torch.tensor([row]), labels=torch.tensor([row])).loss
            np.testing.assert_allclose(np.exp(-np.nanmean(scores)), loss.exp().item(), rtol=1e-4)
        assert np.isnan(values).tolist() == [True] + [False] * (len(ids) - 1)
        assert not np.isnan(conditioned).any()
