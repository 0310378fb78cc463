"""Tokenizers of Hugging Face directories: `tokenizer.json`, and the files beside it that define special tokens.

Ids and texts equal those of `transformers.AutoTokenizer` (version 5). As in transformers, `add_bos_token` and
`add_eos_token` in `tokenizer_config.json` have no effect: the post-processor in `tokenizer.json` decides. A special
token that is named but has no id yet gets the next free id.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken

from jaxformer.data.tokenizer.base import MASK_TOKENS, Tokenizer, TypedIds
from jaxformer.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SIDE_FILES = (SETTINGS_FILE, SPECIAL_TOKENS_FILE, CHAT_TEMPLATE_FILE)

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Default tokens of the tokenizer classes in transformers; older directories rely on them and name no tokens.
USUAL_TOKENS = {
    "bos": ("<s>", "<bos>", "[CLS]", "<|begin_of_text|>", "<|endoftext|>"),
    "eos": ("</s>", "<eos>", "[SEP]", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]"),
}
# The order matters: it is that of `clean_up_tokenization` in transformers.
CLEAN_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class HuggingFace(Tokenizer):
    """A `tokenizer.json` with its side files.

    The side files name the special tokens. Each special id is that of the first token in its list that exists:
    * eos: eos, sep (BERT), or one of `USUAL_TOKENS` (GPT-2's files name no tokens). If there is none, `eos_id` is None
      and only the eos of the model config ends a text.
    * pad: pad, one of `USUAL_TOKENS`, or eos.
    * bos: bos, cls (BERT), one of `USUAL_TOKENS`, or pad, because T5 starts decoding with pad (arXiv:1910.10683).

    Args:
        files: file contents by name: `tokenizer.json`, and the `SIDE_FILES` that exist.
    """

    def __init__(self, files: Mapping[str, bytes]):
        self._files = {name: files[name] for name in (*SIDE_FILES, TOKENIZER_FILE) if name in files}
        self._settings = _settings(self._files)
        self._backend = _backend(self._files[TOKENIZER_FILE], self._settings)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_id = self._special_id("eos", "sep")
        self.pad_id = _first_defined(self._special_id("pad"), self.eos_id)
        self.bos_id = _first_defined(self._special_id("bos", "cls"), self.pad_id)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._encode(texts, add_special_tokens=False)

    def encode_prompt(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode prompts for a decoder, with the special tokens that the post-processor of `tokenizer.json` adds."""
        return self._encode(texts, add_special_tokens=True)

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode inputs for an encoder, with the special tokens that the post-processor of `tokenizer.json` adds."""
        return self._encode(texts, add_special_tokens=True)

    def encode_sequence(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, max_length: int | None = None
    ) -> list[TypedIds]:
        """Encode texts or pairs with the special tokens and types that the post-processor of `tokenizer.json` adds."""
        inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        if max_length is not None:
            self._backend.enable_truncation(max_length, strategy="longest_first")
        try:
            return [TypedIds(row.ids, row.type_ids) for row in self._backend.encode_batch(inputs)]
        finally:
            self._backend.no_truncation()

    def encode_masked(self, text: str) -> list[int]:
        mask = "" if self.mask_id is None else self._backend.id_to_token(self.mask_id)
        for name in MASK_TOKENS:
            text = text.replace(name, mask)
        return self.encode_source([text])[0]

    def encode_words(self, sentences: Sequence[Sequence[str]]) -> list[list[list[int]]]:
        if self._keeps_spaces:  # byte-level BPE has the space before a word in its first token
            sentences = [[f" {word}" if i else word for i, word in enumerate(words)] for words in sentences]
        rows = self._backend.encode_batch(
            [list(words) for words in sentences], is_pretokenized=True, add_special_tokens=False
        )
        encoded: list[list[list[int]]] = [[[] for _ in words] for words in sentences]
        for words, row in zip(encoded, rows, strict=True):
            for id, word in zip(row.ids, row.word_ids, strict=True):
                words[word].append(id)
        return encoded

    def tokens(self) -> list[str]:
        return [self._backend.id_to_token(id) or "" for id in range(self.vocab_size)]

    @property
    def mask_id(self) -> int | None:
        named = self._settings.get("mask_token")
        return super().mask_id if not named else self._backend.token_to_id(_content(named))

    @cached_property
    def word_starts(self) -> np.ndarray:
        if not isinstance(self._backend.model, tokenizers.models.WordPiece):
            return super().word_starts
        prefix = self._backend.model.continuing_subword_prefix
        return np.array([not token.startswith(prefix) for token in self.tokens()])

    def _with_new_tokens(self, tokens: list[str]) -> "HuggingFace":
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
        return HuggingFace(self._files | {TOKENIZER_FILE: backend.to_str().encode()})

    @property
    def _keeps_spaces(self) -> bool:
        """Whether the pre-tokenizer is byte-level and does not add a space before every word itself."""
        step = json.loads(self._files[TOKENIZER_FILE]).get("pre_tokenizer") or {}
        steps = step.get("pretokenizers", [step])
        return any(each.get("type") == "ByteLevel" and not each.get("add_prefix_space") for each in steps)

    @property
    def chat_template(self) -> str | None:
        """The template in `chat_template.jinja` or else in `tokenizer_config.json`; of several, the one for chat."""
        if CHAT_TEMPLATE_FILE in self._files:
            return _decode_utf8(self._files[CHAT_TEMPLATE_FILE], CHAT_TEMPLATE_FILE)
        return _default_template(self._settings.get("chat_template"))

    @property
    def named_tokens(self) -> dict[str, str]:
        more = self._settings.get("extra_special_tokens")
        named = {name: self._settings.get(name) for name in NAMED_TOKENS} | (more if isinstance(more, dict) else {})
        return {name: _content(token) for name, token in named.items() if token}

    def files(self) -> dict[str, bytes]:
        return dict(self._files)

    def __reduce__(self) -> tuple[type, tuple[dict[str, bytes]]]:
        return HuggingFace, (self._files,)  # pickling the backend would lose `encode_special_tokens`

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [row.ids for row in self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]

    def _decode(self, ids: list[int]) -> str:
        text = self._backend.decode(ids, skip_special_tokens=True)
        return _clean_up(text) if self._cleans_up else text

    @property
    def _cleans_up(self) -> bool:
        """Whether decoding removes spaces before punctuation; for BPE only if a second setting forces it."""
        if isinstance(self._backend.model, tokenizers.models.BPE):
            force = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
            return bool(self._settings.get("clean_up_tokenization_spaces") and self._settings.get(force))
        return bool(self._settings.get("clean_up_tokenization_spaces"))

    def _special_id(self, role: str, substitute: str | None = None) -> int | None:
        named = (self._settings.get(f"{name}_token") for name in (role, substitute))
        special = {token.content for token in self._backend.get_added_tokens_decoder().values() if token.special}
        usual = (token for token in USUAL_TOKENS[role] if token in special)
        token = next((token for token in (*named, *usual) if token), None)
        return None if token is None else self._backend.token_to_id(_content(token))


def load_huggingface(path: str | Path) -> HuggingFace:
    """Load a `tokenizer.json`, given its path or its directory, with the files beside it."""
    path = Path(path)
    path = path / TOKENIZER_FILE if path.is_dir() else path
    side = {name: path.with_name(name) for name in SIDE_FILES}
    try:
        files = {name: file.read_bytes() for name, file in side.items() if file.is_file()}
        return HuggingFace(files | {TOKENIZER_FILE: path.read_bytes()})
    except OSError as error:
        raise UserError(f"tokenizer '{path}' cannot be read ({error.strerror}): correct the path") from None
    except UserError as error:
        raise UserError(f"tokenizer '{path}': {error}") from None


# ---------------------------------------------------------------- the files
def _settings(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Read the settings from the files beside `tokenizer.json`."""
    settings = _json_object(files, SETTINGS_FILE)
    # As in transformers, special_tokens_map.json overrides only settings without `added_tokens_decoder`.
    return settings if "added_tokens_decoder" in settings else settings | _json_object(files, SPECIAL_TOKENS_FILE)


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise UserError(f"{name} is not valid JSON ({error}): fetch or save it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{name} does not hold a JSON object: fetch or save it again")
    return value


def _default_template(value: Any) -> str | None:
    """Return the chat template in the settings, or the one named "default" if there are several."""
    if value is None or isinstance(value, str):
        return value
    try:
        templates = value if isinstance(value, dict) else {named["name"]: named["template"] for named in value}
    except (TypeError, KeyError):
        raise UserError(f"{SETTINGS_FILE}: chat_template must be a string or a list of named templates") from None
    if not isinstance(templates.get("default"), str):
        raise UserError(f"{SETTINGS_FILE}: none of the chat templates {', '.join(templates)} is named 'default'")
    return templates["default"]


def _decode_utf8(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text ({error}): fetch or save it again") from None


def _backend(content: bytes, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except ValueError as error:
        raise UserError(f"not a tokenizer of the tokenizers library ({error}): name a {TOKENIZER_FILE}") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
    backend.add_tokens(list(_added_tokens(backend, settings)))
    return backend


def _added_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens that the settings name, in the order in which new tokens get their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder", {})
    for id in sorted(listed, key=int):
        known.add(listed[id]["content"])
        yield AddedToken(**listed[id])
    more = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    more = more.values() if isinstance(more, Mapping) else more
    for token in (*(settings.get(name) for name in NAMED_TOKENS), *more):
        if token and _content(token) not in known:
            known.add(_content(token))
            yield AddedToken(token, special=True) if isinstance(token, str) else _special_token(token)


def _special_token(fields: Mapping[str, Any]) -> AddedToken:
    return AddedToken(**{name: value for name, value in fields.items() if name != "__type"} | {"special": True})


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _clean_up(text: str) -> str:
    for spaced in CLEAN_UP:
        text = text.replace(spaced, spaced.strip())
    return text


def _first_defined(*ids: int | None) -> int | None:
    return next((i for i in ids if i is not None), None)
