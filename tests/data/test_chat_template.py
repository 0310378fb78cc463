"""Chat templates: token ids equal those of `apply_chat_template` in transformers; errors are one clear line."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxformer.data import Bytes, HuggingFace, load_huggingface
from jaxformer.errors import UserError

SPECIAL = (
    "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "[INST]",
    "[/INST]", "<|start_header_id|>", "<|end_header_id|>",
)  # fmt: skip

# Templates in the style of published models.
TEMPLATES = {
    "llama 3": """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%Y") %}
    {%- else %}
        {%- set date_string = "2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"]|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Year: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == "tool" or "tool_calls" in message %}
        {{- raise_exception("Tools are not available.") }}
    {%- endif %}
    {{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\\n\\n" }}
    {{- message["content"] | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}
{%- endif %}
""",
    "qwen": """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}{%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if reasoning and loop.index0 < ns.last %}{{- '<think>' + reasoning.strip('\\n') + '</think>' }}{%- endif %}
        {{- content.lstrip('\\n') }}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '\\n' + call.name + ' ' }}{{- call.arguments | tojson }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    "gemma": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' }}
{%- endif -%}
""",
    "mistral": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] not in ["user", "assistant"] %}{%- continue %}{%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {% generation %}{{- " " + message["content"]|trim + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
""",
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\\nYou are a helpful AI assistant<|im_end|>\\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    # White space around blocks, dict and HTML in tojson.
    "blocks": """\
{% for message in messages %}
  {% if message.role == "user" %}
    user: {{ dict(text=message.content, n=loop.index) | tojson(indent=1) }}
  {% endif %}
{% endfor %}
pad {{ pad_token }} unk {{ unk_token }}!
""",
}
ASK = {"role": "user", "content": "  What is <b>2 & 2</b>? é 漢字 "}
REPLY = {"role": "assistant", "content": " Four. ", "reasoning": "\nhm\n", "name": None}
CONVERSATIONS = {
    "one": [ASK],
    "system": [{"role": "system", "content": "Be brief."}, ASK],
    "turns": [ASK, REPLY, {"role": "user", "content": "And <|im_end|> 3?"}],
    "all": [{"role": "system", "content": "Be kind."}, ASK, REPLY, ASK, {"role": "assistant", "content": "x"}, ASK],
}


def save_tokenizer(directory: Path, template: Any, **settings: Any) -> Path:
    """Write a byte-level tokenizer whose post-processor adds bos, so that a second bos would show."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    fast.save_pretrained(directory, **settings)
    return directory


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_equal_those_of_transformers(name, tmp_path):
    path = save_tokenizer(tmp_path, TEMPLATES[name])
    ours, theirs = load_huggingface(path), transformers.AutoTokenizer.from_pretrained(path)
    for messages in CONVERSATIONS.values():
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
        ids = ours.encode_chat(messages)
        assert ids == wanted
        assert ids.count(ours.bos_id) <= 1
    assert any(id >= 256 for id in ids), "special tokens are tokens"


def test_messages_with_parts_and_tool_calls(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": " Hi "}, {"type": "image"}]}]
    calls = [ASK, {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": [1, "<é>"]}}]}]
    for name, messages in (("gemma", parts), ("qwen", calls)):
        path = save_tokenizer(tmp_path / name, TEMPLATES[name])
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)["input_ids"]
        assert load_huggingface(path).encode_chat(messages) == wanted


@pytest.mark.parametrize("as_file", [True, False])
def test_the_default_of_several_templates(as_file, tmp_path):
    templates = {"tool_use": "tools", "default": TEMPLATES["smollm2"]}
    path = save_tokenizer(tmp_path, templates, save_jinja_files=as_file)
    assert (path / "chat_template.jinja").exists() == as_file
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    wanted = theirs.apply_chat_template([ASK], add_generation_prompt=True, tokenize=True)["input_ids"]
    assert load_huggingface(path).encode_chat([ASK]) == wanted


def test_the_file_overrides_the_settings_and_is_kept(tmp_path):
    path = save_tokenizer(tmp_path / "a", TEMPLATES["qwen"], save_jinja_files=False)
    (path / "chat_template.jinja").write_text("file: {{ messages[0].content }}")
    tokenizer = load_huggingface(path)
    (tmp_path / "b").mkdir()
    tokenizer.save(tmp_path / "b")
    again = load_huggingface(tmp_path / "b")
    assert again.decode(again.encode_chat([{"role": "user", "content": "x"}])) == "file: x"


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "must be a list of messages"),
        ([], "must be a list of messages"),
        (["hello"], "message 0 is 'hello': must be a dict"),
        ([ASK, {"content": "x"}], "message 1: role=None: must be a string"),
        ([{"role": 3, "content": "x"}], "role=3"),
        ([{"role": "user"}], "message 0: content=None: must be a string"),
        ([{"role": "user", "content": 7}], "content=7"),
        ([{"role": "user", "content": "x", "at": {1}}], "must consist of strings, numbers, lists and dicts"),
    ],
    ids=str,
)
def test_malformed_messages(messages, words, tmp_path):
    tokenizer = load_huggingface(save_tokenizer(tmp_path, TEMPLATES["qwen"]))
    with pytest.raises(UserError) as error:
        tokenizer.encode_chat(messages)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('No ' + messages[0].role + ', please.') }}", "does not accept these messages: No user"),
        ("a\n{% if %}", "syntax error in line 2"),
        ("{{ messages[0].content + 1 }}", "failed on these messages (TypeError"),
        ("{{ nothing.of.this }}", "failed on these messages (UndefinedError: 'nothing' is undefined"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set ns = namespace(_x=1) %}", "SecurityError"),
        ("", "wrote nothing"),
    ],
    ids=str,
)
def test_a_template_that_is_missing_or_fails(template, words, tmp_path):
    tokenizer = load_huggingface(save_tokenizer(tmp_path, template))
    with pytest.raises(UserError) as error:
        tokenizer.encode_chat([ASK])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_other_tokenizers_have_no_template():
    with pytest.raises(UserError, match="no chat template"):
        Bytes().encode_chat([ASK])


@pytest.mark.parametrize("value", [3, [{"name": "x"}], [{"name": "x", "template": "y"}]], ids=str)
def test_malformed_settings(value, tmp_path):
    files = load_huggingface(save_tokenizer(tmp_path, None)).files()
    settings = json.loads(files["tokenizer_config.json"]) | {"chat_template": value}
    with pytest.raises(UserError, match=r"tokenizer_config\.json: .*chat"):
        HuggingFace(files | {"tokenizer_config.json": json.dumps(settings).encode()}).encode_chat([ASK])
