"""`chat` and `jaxformer generate --chat`: replies to conversations in the format of the tokenizer's chat template."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

import jaxformer as jf
from jaxformer.checkpoint import Checkpoints
from jaxformer.cli import main
from jaxformer.data import HuggingFace
from jaxformer.decode.jobs import Job, generate_file
from jaxformer.decode.text import Conversation
from jaxformer.errors import UserError
from jaxformer.run import Run
from jaxformer.rundir import RunDir

TEMPLATE = """\
{{ bos_token }}{% for m in messages %}
{% if m.role not in ("system", "user", "assistant") %}{{ raise_exception("unknown role " + m.role) }}{% endif %}
<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""
USER = {"role": "user", "content": "Hi there"}
SYSTEM = {"role": "system", "content": "Be brief"}
TURNS = [USER, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Why?"}]


def make_tokenizer() -> HuggingFace:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    files = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(names)}
    return HuggingFace({name: text.encode() for name, text in files.items()})


@pytest.fixture(scope="module")
def chatty(ring_run) -> Run:
    return replace(ring_run, tokenizer=make_tokenizer())


@pytest.fixture(scope="module")
def chatty_dir(chatty, tmp_path_factory) -> Path:
    """A run directory of the same model."""
    path = tmp_path_factory.mktemp("runs") / "chatty"
    with Checkpoints(RunDir(path), chatty.config) as checkpoints:
        checkpoints.save(0, {"params": chatty.params}, chatty.config, {"step": 0})
    chatty.tokenizer.save(path)
    RunDir(path).write_config(chatty.config)
    return path


def reply(run: Run, text: str, **settings) -> str:
    """The expected reply: `generate` on the ids of the text that the template should write."""
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode(text)]
    [output] = jf.generate(run, [ids], **settings)
    return run.tokenizer.decode(output)


# ---------------------------------------------------------------- Python
def test_reply_to_one_conversation_and_to_several(chatty):
    wanted = reply(chatty, "<|user|>Hi there</s><|assistant|>", max_new_tokens=9)
    assert wanted
    assert jf.chat(chatty, [USER], max_new_tokens=9) == wanted
    whole = reply(chatty, "<|user|>Hi there</s><|assistant|>Hello</s><|user|>Why?</s><|assistant|>", max_new_tokens=9)
    assert whole != wanted
    assert jf.chat(chatty, [[USER], TURNS], max_new_tokens=9) == [wanted, whole]
    assert "".join(jf.stream(chatty, Conversation(TURNS), max_new_tokens=9)) == whole


def test_settings_are_those_of_generate(chatty):
    prompt, settings = "<|user|>Hi there</s><|assistant|>", {"max_new_tokens": 9, "temperature": 1.1, "seed": 5}
    assert jf.chat(chatty, [USER], **settings) == reply(chatty, prompt, **settings)
    beams = {"max_new_tokens": 5, "num_beams": 3}
    assert jf.chat(chatty, [USER], **beams) == reply(chatty, prompt, **beams)
    samples = jf.chat(chatty, [USER], max_new_tokens=4, temperature=1.0, num_samples=2)
    assert len(samples) == 2


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "must be a list"),
        ("Hi", "must be a list"),
        (["Hi"], "conversation 0: message 0 is 'Hi'"),
        ([[USER], [{"role": "user"}]], "conversation 1: message 0: content=None"),
        ([{"role": "tool", "content": "x"}], "conversation 0: the chat template does not accept these messages: unkn"),
    ],
    ids=str,
)
def test_errors(messages, words, chatty):
    with pytest.raises(UserError) as error:
        jf.chat(chatty, messages)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_models_without_template_or_tokenizer(ring_run):
    with pytest.raises(UserError, match="has no chat template"):
        jf.chat(ring_run, [USER])
    with pytest.raises(UserError, match="has no tokenizer, so it has no chat template"):
        jf.chat(replace(ring_run, tokenizer=None), [USER])


# ---------------------------------------------------------------- the command line
def test_prompts_are_user_messages(chatty, chatty_dir, capsys):
    arguments = ["generate", str(chatty_dir), "--chat", "--max-new-tokens", "7"]
    assert main([*arguments, "--prompt", "Hi there"]) == 0
    assert capsys.readouterr().out == jf.chat(chatty, [USER], max_new_tokens=7) + "\n"
    assert main([*arguments, "--prompt", "Hi there", "--prompt", "Why?", "--system", "Be brief"]) == 0
    wanted = jf.chat(chatty, [[SYSTEM, USER], [SYSTEM, TURNS[-1]]], max_new_tokens=7)
    assert capsys.readouterr().out == "\n".join(wanted) + "\n"


def test_system_needs_chat(chatty_dir, capsys):
    assert main(["generate", str(chatty_dir), "--prompt", "x", "--system", "y"]) == 1
    assert capsys.readouterr().err == "error: --system needs --chat\n"


def test_lines_of_a_file(chatty, tmp_path):
    lines = [
        {"messages": TURNS, "id": 7},
        {"prompt": "Hi there"},
        {"messages": [SYSTEM | {"content": "Own"}, USER]},
        {"ids": [5]},
        {"messages": "x"},
        {"messages": ["x"]},
        {"messages": [USER], "prompt": "x"},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = Job({"max_new_tokens": 5}, 4, chat=True, system="Be brief")
    generate_file(chatty, source, target, job, "chatty", lambda count, bad: None)
    results = [json.loads(line) for line in target.read_text().splitlines()]
    conversations = [[SYSTEM, *TURNS], [SYSTEM, USER], [{"role": "system", "content": "Own"}, USER]]
    assert [line["output"] for line in results[:3]] == jf.chat(chatty, conversations, max_new_tokens=5)
    assert results[0]["messages"] == TURNS
    errors = [line["error"] for line in results[3:]]
    either = 'must have either "prompt" (a text) or "messages" (a list of messages)'
    assert errors[0] == errors[3] == either
    assert errors[1] == "\"messages\" is 'x': must be a list of messages"
    assert "message 1 is 'x'" in errors[2]
    with pytest.raises(UserError, match="'chat' was"):
        generate_file(chatty, source, target, Job({"max_new_tokens": 5}, 4), "chatty", lambda count, bad: None)


def test_messages_in_a_file_need_chat(chatty, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"messages": TURNS}) + "\n")
    generate_file(chatty, source, target, Job({}, 4), "chatty", lambda count, bad: None)
    assert '"messages" needs --chat' in json.loads(target.read_text())["error"]
