"""`jf.classify`, `jf.tag` and `jf.fill_mask` against transformers, with the same tokenizer files and weights."""

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

import jaxformer as jf
from jaxformer.errors import UserError

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "the", "cat", "dog", "sat", "ran", "##s", "##ning", "on", "mat"]
SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
}


def save(directory, kind: str, **fields) -> transformers.PreTrainedModel:
    """Write a random model and a WordPiece tokenizer."""
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    backend.add_special_tokens([AddedToken(word, special=True) for word in WORDS[:5]])
    names = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{name}_token": token for name, token in names.items()}
    ).save_pretrained(directory)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.BertConfig(**SHAPE, initializer_range=0.5, **fields)).eval()
    model.save_pretrained(directory)
    return model


def encode(directory, *texts, **options):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    return tokenizer(*texts, return_tensors="pt", padding=True, return_token_type_ids=True, **options)


@pytest.fixture
def classifier(tmp_path):
    labels = {0: "bad", 1: "fair", 2: "good"}
    fields = {"id2label": labels, "label2id": {name: id for id, name in labels.items()}}
    return tmp_path, save(tmp_path, "BertForSequenceClassification", **fields), jf.load(tmp_path)


@pytest.mark.parametrize("pairs", [None, ["the mat", "the running dogs"]])
def test_labels_and_probabilities_are_those_of_transformers(classifier, pairs):
    directory, model, run = classifier
    texts = ["The cats sat on the mat", "dog"]
    with torch.no_grad():
        logits = model(**encode(directory, texts, *([] if pairs is None else [pairs]))).logits
    expected = torch.softmax(logits, -1).numpy()
    for result, row in zip(jf.classify(run, texts, pairs), expected, strict=True):
        assert [score.label for score in result] == [("bad", "fair", "good")[i] for i in np.argsort(-row)]
        np.testing.assert_allclose([score.score for score in result], np.sort(row)[::-1], atol=1e-5)


def test_predictions_do_not_depend_on_the_batch(classifier):
    _, _, run = classifier
    texts = ["the cat", "dogs ran on the mat", "sat"] * 12
    alone = [jf.classify(run, [text])[0] for text in texts[:3]]
    for i, result in enumerate(jf.classify(run, texts)):
        np.testing.assert_allclose([s.score for s in result], [s.score for s in alone[i % 3]], atol=1e-6)


def test_multi_label_and_regression(tmp_path):
    for problem, activation in (("multi_label_classification", torch.sigmoid), ("regression", lambda x: x)):
        directory = tmp_path / problem
        model = save(directory, "BertForSequenceClassification", num_labels=2, problem_type=problem)
        with torch.no_grad():
            expected = activation(model(**encode(directory, ["the cat sat"])).logits)[0].numpy()
        (result,) = jf.classify(jf.load(directory), ["the cat sat"])
        scores = {score.label: score.score for score in result}
        np.testing.assert_allclose([scores["LABEL_0"], scores["LABEL_1"]], expected, atol=1e-5)


def test_tags_are_those_of_the_first_token_of_every_word(tmp_path):
    labels = {0: "O", 1: "B-x", 2: "I-x"}
    fields = {"id2label": labels, "label2id": {name: id for id, name in labels.items()}}
    model = save(tmp_path, "BertForTokenClassification", **fields)
    words = ["the", "cats", "running", "mat"]
    encoded = encode(tmp_path, [words], is_split_into_words=True)
    with torch.no_grad():
        probabilities = torch.softmax(model(**encoded).logits[0], -1).numpy()
    word_ids = encoded.word_ids()
    first = [word_ids.index(i) for i in range(len(words))]
    (result,) = jf.tag(jf.load(tmp_path), [words])
    assert [tag.word for tag in result] == words
    assert [tag.tag for tag in result] == [labels[probabilities[i].argmax()] for i in first]
    np.testing.assert_allclose([tag.score for tag in result], probabilities[first].max(-1), atol=1e-5)
    assert jf.tag(jf.load(tmp_path), ["the cats running mat"]) == [result]


def test_a_word_without_tokens_has_no_tag(tmp_path):
    save(tmp_path, "BertForTokenClassification")
    with pytest.raises(UserError, match="the word '' of sentence 1 has no tokens in this tokenizer: remove it"):
        jf.tag(jf.load(tmp_path), ["the cat", ["the", "", "mat"]])
    with pytest.raises(UserError, match="one of them is 3"):
        jf.tag(jf.load(tmp_path), [["the", 3]])


@pytest.mark.parametrize("text", ["The [MASK] sat on the <mask>.", "[MASK]"])
def test_masks_are_filled_as_by_transformers(tmp_path, text):
    model = save(tmp_path, "BertForMaskedLM")
    encoded = encode(tmp_path, [text.replace("<mask>", "[MASK]")])
    with torch.no_grad():
        probabilities = torch.softmax(model(**encoded).logits[0], -1)[encoded["input_ids"][0] == 4].numpy()
    results = jf.fill_mask(jf.load(tmp_path), text, top_k=3)
    assert len(results) == len(probabilities)
    for result, row in zip(results, probabilities, strict=True):
        assert [filling.id for filling in result] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([filling.score for filling in result], np.sort(row)[::-1][:3], atol=1e-5)


def test_errors_say_what_the_model_can_do(classifier, tmp_path):
    _, _, run = classifier
    for call, message in (
        (
            lambda: jf.generate(run, ["a"]),
            "does not generate text; jf.classify labels texts, jf.embed returns one vector per text, "
            "jf.forward returns its logits$",
        ),
        (lambda: jf.tag(run, ["a"]), "this model labels whole texts: use jf.classify"),
        (lambda: jf.fill_mask(run, "the [MASK]"), "has no such head"),
        (lambda: jf.classify(run, "a"), r"write \['a'\]"),
        (lambda: jf.classify(run, ["a"], ["b", "c"]), "1 texts but 2 pairs"),
        (lambda: jf.classify(run, ["a", 3]), "expected a list of texts, but one of them is 3"),
        (lambda: jf.classify(run, [["a", "b"]]), r"one of them is \['a', 'b'\]"),
        (lambda: jf.classify(run, ["a"], "b"), r"got the text 'b': write \['b'\]"),
        (lambda: jf.classify(run, ["the cat " * 20]), "exceeds the model's context of 24 tokens"),
    ):
        with pytest.raises(UserError, match=message):
            call()
    save(tmp_path / "masked", "BertForMaskedLM")
    masked = jf.load(tmp_path / "masked")
    for call, message in (
        (lambda: jf.generate(masked, ["a"]), "text; jf.fill_mask predicts masked tokens, jf.embed returns one vector"),
        (lambda: jf.classify(masked, ["a"]), "no class head: train one with data.objective.kind=classify"),
        (lambda: jf.fill_mask(masked, "the cat"), "no mask in 'the cat'"),
        (lambda: jf.fill_mask(masked, "[MASK]", top_k=0), "top_k=0"),
        (lambda: jf.fill_mask(masked, ["[MASK]"]), r"expected one text, got \['\[MASK\]'\]: call it for every text"),
    ):
        with pytest.raises(UserError, match=message):
            call()
