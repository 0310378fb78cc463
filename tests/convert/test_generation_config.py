"""generation_config.json: the defaults of `generate`, equal to those of transformers; kept by import and export."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import jaxformer as jf
from jaxformer.config import SpecialIds
from jaxformer.convert.generation import GENERATION_FILE, parse_generation_fields, write_generation_fields
from jaxformer.errors import UserError
from jaxformer.exchange import export_run, import_run
from jaxformer.models.llama import llama
from jaxformer.models.vaswani import vaswani

DECODER = llama(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=32)
TRANSLATOR = vaswani(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=32)
PROMPTS = [[5, 9, 20, 5, 9], [7, 30, 41]]


def set_generation(directory: Path, **fields: Any) -> None:
    """Add fields to the file that transformers wrote."""
    path = directory / GENERATION_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def their_ids(directory: Path) -> list[list[int]]:
    """Return the new tokens of transformers' `generate` without arguments, up to eos."""
    config = transformers.AutoConfig.from_pretrained(directory)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory).eval()
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        # The KV cache of transformers is sized by T5's encoder layers instead of its decoder layers, so it is off.
        [row] = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False).tolist()
        row = row[1 if config.is_encoder_decoder else len(prompt) :]
        ends = model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        rows.append(row[: next((i for i, id in enumerate(row) if id in ends), len(row))])
    return rows


# ---------------------------------------------------------------- the same output as transformers
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {"max_new_tokens": 9}),
        ("llama", {"max_new_tokens": 9, "temperature": 0.3, "top_k": 7, "do_sample": False}),
        ("llama", {"max_new_tokens": 9, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2}),
        ("llama", {"max_new_tokens": 7, "min_new_tokens": 6, "forced_eos_token_id": 2}),
        ("llama", {"max_new_tokens": 8, "suppress_tokens": [*range(20, 60)], "bad_words_ids": [[2], [70], [71]]}),
        ("llama", {"max_new_tokens": 6, "num_beams": 3, "length_penalty": 0.4, "early_stopping": True}),
        ("bart", {"max_length": 8, "min_length": 5, "forced_bos_token_id": 7, "forced_eos_token_id": 2}),
        ("bart", {"max_length": 9, "num_beams": 4, "early_stopping": "never", "bad_words_ids": [[1]]}),
    ],
    ids=str,
)
def test_defaults_give_the_output_of_transformers(name, fields, copy_sample, sample_run):
    source = copy_sample(name).path
    set_generation(source, **fields)
    outputs = jf.generate(jf.load(source), PROMPTS)
    assert outputs == their_ids(source)
    plain = jf.generate(sample_run(name), PROMPTS, fields.get("max_new_tokens", fields.get("max_length", 1) - 1))
    if len(fields) > 1 and "temperature" not in fields:
        assert outputs != plain, "the settings have an effect on this model"


def test_sampling_defaults_equal_arguments(copy_sample, sample_run):
    """With the same seed; transformers draws different random numbers, and the filters have their own parity tests."""
    source = copy_sample("llama").path
    set_generation(source, do_sample=True, temperature=1.3, top_k=30, top_p=0.9, min_p=0.01, max_new_tokens=12)
    run, plain = jf.load(source), sample_run("llama")
    settings = {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "max_new_tokens": 12}
    sampled = jf.generate(plain, PROMPTS, seed=4, **settings)
    assert jf.generate(run, PROMPTS, seed=4) == sampled != jf.generate(plain, PROMPTS, 12)
    assert [row[0].ids for row in jf.complete(run, PROMPTS, seed=4)] == sampled
    # Arguments override the defaults one by one.
    assert jf.generate(run, PROMPTS, 5, temperature=0.0) == jf.generate(plain, PROMPTS, 5)
    assert jf.generate(run, PROMPTS, temperature=None, top_k=2, seed=4) == jf.generate(
        plain, PROMPTS, seed=4, **settings | {"top_k": 2}
    )
    # Beam search does not sample.
    assert jf.generate(run, PROMPTS, num_beams=2) == jf.generate(plain, PROMPTS, 12, num_beams=2)
    assert jf.search(run, PROMPTS) == jf.search(plain, PROMPTS, 12)


def test_beam_defaults(copy_sample, sample_run):
    source = copy_sample("llama").path
    set_generation(source, num_beams=3, length_penalty=0.2, early_stopping=True, max_new_tokens=6)
    run, plain = jf.load(source), sample_run("llama")
    beams = {"length_penalty": 0.2, "early_stopping": "exact"}
    assert jf.search(run, PROMPTS) == jf.search(plain, PROMPTS, 6, num_beams=3, **beams)
    assert jf.generate(run, PROMPTS, num_beams=1) == jf.generate(plain, PROMPTS, 6)
    assert jf.search(run, PROMPTS, num_beams=2) == jf.search(plain, PROMPTS, 6, num_beams=2, **beams)
    assert [row[0].ids for row in jf.complete(run, PROMPTS)] == jf.generate(plain, PROMPTS, 6)


def test_a_lower_maximum_also_lowers_the_default_minimum(copy_sample):
    source = copy_sample("llama").path
    set_generation(source, min_new_tokens=20, max_new_tokens=30)
    run = jf.load(source)
    assert [len(row) for row in jf.generate(run, PROMPTS, 4)] == [4, 4]
    with pytest.raises(UserError, match="min_new_tokens=20"):
        jf.generate(run, PROMPTS, 4, min_new_tokens=20)


# ---------------------------------------------------------------- the message
def test_the_defaults_are_logged_once(copy_sample, caplog):
    source = copy_sample("llama").path
    set_generation(source, do_sample=True, temperature=0.7, diversity_penalty=0.0, guidance_scale=1.5, max_length=99)
    run = jf.load(source)
    with caplog.at_level(logging.WARNING):
        jf.score(run, PROMPTS)
        assert not caplog.records
        jf.generate(run, PROMPTS, 2)
        jf.generate(run, PROMPTS, 2)
    [record] = caplog.records
    assert record.getMessage() == (
        "defaults from generation_config.json: temperature=0.7 (arguments override them); fields of "
        "generation_config.json that are not supported and have no effect: guidance_scale=1.5, max_length=99"
    )


def test_a_file_with_ids_only_is_not_worth_a_message(sample_dir, caplog):
    with caplog.at_level(logging.WARNING):
        jf.generate(jf.load(sample_dir("llama")), PROMPTS, 1)
    assert not caplog.records


# ---------------------------------------------------------------- fields
@pytest.mark.parametrize(
    ("fields", "settings", "beams", "unsupported"),
    [
        ({"do_sample": True}, {"temperature": 1.0}, {}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "epsilon_cutoff": 0.1}, {}, {}, {}),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "typical_p": 1.0}, {"temperature": 1.0}, {}, {}),
        ({"do_sample": True, "eta_cutoff": 0.1}, {"temperature": 1.0}, {}, {"eta_cutoff": 0.1}),
        ({"do_sample": True, "num_beams": 2, "top_k": 5}, {}, {"num_beams": 2}, {"do_sample": True}),
        ({"length_penalty": 2.0, "early_stopping": True, "num_beam_groups": 2}, {}, {}, {}),
        ({"num_beams": 2, "early_stopping": True}, {}, {"num_beams": 2, "early_stopping": "exact"}, {}),
        ({"num_beams": 2, "early_stopping": "never"}, {}, {"num_beams": 2, "early_stopping": "never"}, {}),
        ({"num_beams": 2, "early_stopping": False}, {}, {"num_beams": 2}, {}),
        ({"num_beams": 4, "num_beam_groups": 2}, {}, {"num_beams": 4}, {"num_beam_groups": 2}),
        ({"max_length": 20, "min_length": 3}, {}, {}, {"max_length": 20, "min_length": 3}),
        ({"max_length": 20, "max_new_tokens": 5}, {"max_new_tokens": 5}, {}, {}),
        ({"forced_bos_token_id": 3}, {}, {}, {"forced_bos_token_id": 3}),
        ({"forced_eos_token_id": [3]}, {"forced_last": 3}, {}, {}),
        ({"forced_eos_token_id": [3, 4]}, {}, {}, {"forced_eos_token_id": [3, 4]}),
        ({"bad_words_ids": [[2], [4], [5, 6]]}, {"banned": [4]}, {}, {"bad_words_ids": [[5, 6]]}),
        ({"begin_suppress_tokens": [3], "stop_strings": ["x"], "max_time": None}, {}, {},
         {"begin_suppress_tokens": [3], "stop_strings": ["x"]}),
        ({"use_cache": True, "transformers_version": "5", "eos_token_id": 2, "_from_model_config": True}, {}, {}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_fields_become_settings(fields, settings, beams, unsupported):
    parsed = parse_generation_fields(fields, DECODER.replace(special=SpecialIds(eos=(2,))))
    assert (dict(parsed.settings), dict(parsed.beams), dict(parsed.unsupported)) == (settings, beams, unsupported)


def test_lengths_of_an_encoder_decoder_count_the_start_token():
    parsed = parse_generation_fields({"max_length": 20, "min_length": 3, "forced_bos_token_id": 9}, TRANSLATOR)
    assert parsed.settings == {"max_new_tokens": 19, "min_new_tokens": 2, "forced_first": 9}
    assert not parsed.unsupported


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_sample": "yes"}, "do_sample = 'yes' must be true or false"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping = 'soon' must be"),
        ({"bad_words_ids": [3]}, "bad_words_ids: 3 must be a list of token ids"),
        ({"bad_words_ids": 3}, "bad_words_ids = 3"),
        ({"suppress_tokens": ["a"]}, "suppress_tokens"),
        ({"do_sample": True, "temperature": -1.0}, "temperature=-1.0"),
        ({"no_repeat_ngram_size": 1.5}, "no_repeat_ngram=1.5"),
        ({"num_beams": 0.5}, "num_beams=0.5"),
        ({"min_new_tokens": 5, "max_new_tokens": 4}, "min_new_tokens=5"),
    ],
    ids=str,
)
def test_a_bad_file_is_named(fields, words, copy_sample):
    source = copy_sample("llama").path
    set_generation(source, **fields)
    with pytest.raises(UserError, match=r"generation_config\.json") as error:
        jf.generate(jf.load(source), PROMPTS)
    assert words in str(error.value)


def test_a_bad_argument_is_not_blamed_on_the_file(copy_sample):
    source = copy_sample("llama").path
    set_generation(source, num_beams=2, do_sample=True, temperature=0.5, max_new_tokens=3)
    with pytest.raises(UserError, match=r"^num_beams=0: must be"):
        jf.generate(jf.load(source), PROMPTS, num_beams=0)
    with pytest.raises(UserError, match=r"^temperature=-2: must be"):
        jf.generate(jf.load(source), PROMPTS, temperature=-2)


# ---------------------------------------------------------------- import and export
def test_import_and_export_keep_the_file(copy_sample, tmp_path):
    source = copy_sample("llama").path
    set_generation(source, do_sample=True, temperature=0.7, max_new_tokens=5, watermarking_config={"bias": 2.0})
    import_run(source, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    fields = json.loads((source / GENERATION_FILE).read_text())
    assert json.loads((tmp_path / "run" / GENERATION_FILE).read_text()) == fields
    assert json.loads((tmp_path / "out" / GENERATION_FILE).read_text()) == fields
    wanted = jf.generate(jf.load(source), PROMPTS, seed=3)
    for path in ("run", "out"):
        assert jf.generate(jf.load(tmp_path / path), PROMPTS, seed=3) == wanted
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert (theirs.do_sample, theirs.temperature, theirs.max_new_tokens) == (True, 0.7, 5)


def test_export_without_the_file_writes_none(copy_sample, tmp_path):
    source = copy_sample("llama").path
    (source / GENERATION_FILE).unlink()
    import_run(source, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    assert jf.load(tmp_path / "run").generation is None
    assert not (tmp_path / "out" / GENERATION_FILE).exists()


def test_export_writes_the_ids_of_the_model():
    fields = {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 99, "top_k": 5}
    special = SpecialIds(bos=1, eos=(2,))
    assert write_generation_fields(fields, DECODER.replace(special=special)) == {
        "eos_token_id": [2], "bos_token_id": 1, "top_k": 5,
    }  # fmt: skip
    changed = DECODER.replace(special=SpecialIds(bos=4, eos=(2, 7), pad=0))
    assert write_generation_fields(fields, changed) == {
        "eos_token_id": [2, 7], "bos_token_id": 4, "pad_token_id": 0, "top_k": 5,
    }  # fmt: skip
