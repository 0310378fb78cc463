"""Two tokenizers for an encoder-decoder whose source and target have different vocabularies."""

from collections.abc import Sequence

from jaxformer.data.tokenizer.base import Tokenizer

SOURCE_DIRECTORY = "source_tokenizer"  # in the directory of the target's tokenizer


class TokenizerPair(Tokenizer):
    """Encodes inputs with one tokenizer; encodes and decodes everything else with the other.

    The special ids are those of the target; inputs end with the eos of the source."""

    def __init__(self, source: Tokenizer, target: Tokenizer):
        # A pair from another directory may be combined with a new source tokenizer: only its target is used then.
        self.source, self.target = source, target.target if isinstance(target, TokenizerPair) else target
        self.vocab_size, self.source_vocab_size = self.target.vocab_size, source.source_vocab_size
        self.pad_id, self.bos_id, self.eos_id = self.target.pad_id, self.target.bos_id, self.target.eos_id

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.target.encode_batch(texts)

    def encode_prompt(self, texts: Sequence[str]) -> list[list[int]]:
        return self.target.encode_prompt(texts)

    def encode_inputs(self, texts: Sequence[str]) -> list[list[int]]:
        return self.source.encode_inputs(texts)

    def encode_source(self, texts: Sequence[str]) -> list[list[int]]:
        return self.source.encode_source(texts)

    def _decode(self, ids: list[int]) -> str:
        return self.target.decode(ids)

    def tokens(self) -> list[str]:
        return self.target.tokens()

    def files(self) -> dict[str, bytes]:
        source = {f"{SOURCE_DIRECTORY}/{name}": content for name, content in self.source.files().items()}
        return source | self.target.files()
