"""Generation from Python: prompts as texts, id lists or conversations in, texts or ids out.

`generate`, `chat`, `complete` and `search` validate their arguments, turn each prompt into `DecodeRequest`s, and pass
these to the scheduler or to the beam search. `decode.defaults` adds the model's defaults to the settings. Scores,
logits and embeddings are in `decode.scoring`.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxformer.decode.beam_search import BeamSearchConfig, Hypothesis, beam_search
from jaxformer.decode.defaults import complete_beams, complete_settings
from jaxformer.decode.sampling import is_integer, make_sampling_config
from jaxformer.decode.scheduler import schedule, stream_text
from jaxformer.decode.slots import Completion, DecodeRequest
from jaxformer.decode.text import (
    Conversation,
    Text,
    check_decoder,
    encode_request,
    require_tokenizer,
    sampleable_vocab_size,
)
from jaxformer.errors import UserError
from jaxformer.run import Run

BATCH_SIZE = 32  # sequences decoded together; with beam search every beam is a sequence


class Request:
    """A prompt with its own settings: `Request("Once", temperature=0.7, stop=["\\n"])`."""

    def __init__(self, prompt: Any, **settings: Any) -> None:
        self.prompt, self.settings = prompt, settings

    def __repr__(self) -> str:
        arguments = [repr(self.prompt), *(f"{name}={value!r}" for name, value in self.settings.items())]
        return f"Request({', '.join(arguments)})"


# ---------------------------------------------------------------- public functions
def generate(
    run: Run,
    prompts: Iterable[Text | Conversation | Request],
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int | None = None,
    seed: int = 0,
    *,
    batch_size: int = BATCH_SIZE,
    length_penalty: float | None = None,
    early_stopping: str | None = None,
    **settings: Any,
) -> list[Text] | list[list[Text]] | Iterator[Text]:
    """Generate an output for each prompt: the new tokens only, without eos.

    An encoder-decoder reads the prompt as its source. A text prompt gives a text, and an id list gives an id list.
    Each output depends only on its own prompt, settings and seed, not on the rest of the batch. At most `batch_size`
    sequences are decoded at a time; the other prompts wait for a free slot. If `prompts` is an iterator, the result is
    an iterator too, which reads a few batches of prompts ahead. With `num_beams` above 1, the output is the best
    hypothesis of beam search (`search` returns all of them). With `num_samples`, the result has one list of outputs per
    prompt.

    Settings that are None default to those in the model's generation_config.json. Without them, at most 64 tokens are
    generated, greedily (temperature 0, num_beams 1, length_penalty 1.0, early_stopping "heuristic").

    Args:
      settings: other fields of `SamplingConfig`, for example min_p, repetition_penalty, no_repeat_ngram, bias, banned,
        forced_first, min_new_tokens, stop, num_samples. A `Request` may override every setting except those of beam
        search.
    """
    several = "num_samples" in settings
    settings |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    beams = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
    if num_beams != 1 and (config := complete_beams(run, beams)).num_beams != 1:
        hypotheses = _decode_prompts(run, prompts, settings, batch_size, config)
        return _list_if_list((each[0].output for each in hypotheses), prompts)

    def outputs(completions: list[Completion]) -> Any:
        return [c.output for c in completions] if several or len(completions) > 1 else completions[0].output

    completions = _decode_prompts(run, prompts, settings | {"seed": seed}, batch_size)
    return _list_if_list(map(outputs, completions), prompts)


def chat(run: Run, messages: Sequence[Any], **settings: Any) -> Any:
    """Generate the reply to a conversation, formatted with the tokenizer's chat template.

    Args:
      messages: a conversation, which is a list of messages such as `{"role": "user", "content": "Hello"}`, or a list of
        conversations. The result is the text of the reply, or a list of texts.
      settings: those of `generate`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UserError(f'messages={messages!r}: must be a list such as [{{"role": "user", "content": "Hello"}}]')
    is_single = not isinstance(messages[0], Sequence) or isinstance(messages[0], str)
    conversations = [Conversation(each) for each in ([messages] if is_single else messages)]
    replies = generate(run, conversations, **settings)
    return replies[0] if is_single else replies


def complete(
    run: Run, prompts: Iterable[Text | Conversation | Request], *, batch_size: int = BATCH_SIZE, **settings: Any
) -> list[list[Completion]] | Iterator[list[Completion]]:
    """Like `generate`, but returns ids, finish reason and log-probabilities: a list of `Completion`s per prompt.

    It never uses beam search.

    Args:
      settings: fields of `SamplingConfig`. `num_samples` is the number of completions per prompt.
    """
    return _list_if_list(_decode_prompts(run, prompts, settings, batch_size), prompts)


def search(
    run: Run,
    prompts: Iterable[Text | Conversation | Request],
    max_new_tokens: int | None = None,
    *,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    convention: str = "length",
    early_stopping: str | None = None,
    batch_size: int = BATCH_SIZE,
    **settings: Any,
) -> list[list[Hypothesis]] | Iterator[list[Hypothesis]]:
    """Beam search: the `num_beams` best hypotheses of each prompt, best first.

    Settings that are None default to those in the model's generation_config.json. Without them, num_beams is 4 and the
    others have the defaults of `generate`.

    Args:
      length_penalty: exponent of the length normalisation; 0 compares sums of log-probabilities.
      convention: what sums of log-probabilities are divided by: "length" for length ** length_penalty, as in
        transformers, or "gnmt" for ((5 + length) / 6) ** length_penalty (arXiv:1609.08144).
      early_stopping: "never", "heuristic" or "exact"; transformers calls them "never", False and True.
      batch_size: number of beams decoded together.
      settings: other fields of `SamplingConfig`, except those that only affect sampling, and except stop, num_samples
        and log_probs. Filters apply to log-probabilities, as in transformers.
    """
    if num_beams is None and not (run.generation and run.generation.beams):
        num_beams = 4
    beams = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
    config = complete_beams(run, {**beams, "convention": convention})
    settings |= {"max_new_tokens": max_new_tokens}
    return _list_if_list(_decode_prompts(run, prompts, settings, batch_size, config, "search"), prompts)


def stream(run: Run, prompt: Text | Conversation | Request, **settings: Any) -> Iterator[str]:
    """Yield the text that `generate` with `num_beams=1` returns, in pieces, while it is generated.

    No piece ends inside a character."""
    check_decoder(run, "stream")
    requests = make_requests(run, prompt, settings)
    if len(requests) > 1:
        raise UserError(f"num_samples={len(requests)}: stream returns one output; use generate for several")
    require_tokenizer(run)
    return stream_text(run, requests[0])


# ---------------------------------------------------------------- from prompts to requests
def make_requests(
    run: Run, prompt: Text | Conversation | Request, settings: Mapping[str, Any], beams: BeamSearchConfig | None = None
) -> list[DecodeRequest]:
    """Validate and encode one prompt, with one request per sample. A `Request` overrides `settings`."""
    if isinstance(prompt, Request):
        prompt, settings = prompt.prompt, {**settings, **prompt.settings}
    config = make_sampling_config(complete_settings(run, settings, beams))
    config.check_tokens(sampleable_vocab_size(run))
    if beams is not None:
        beams.check_settings(config)
    if config.stop:
        require_tokenizer(run)
    ids = encode_request(run, prompt, config.max_new_tokens)
    as_text = isinstance(prompt, str | Conversation)
    return [DecodeRequest(ids, config, sample, as_text) for sample in range(config.num_samples)]


def decode(
    run: Run, requests: Iterable[Sequence[DecodeRequest]], batch_size: int, beams: BeamSearchConfig | None = None
) -> Iterator[list[Completion]] | Iterator[list[Hypothesis]]:
    """Yield the completions of each group of requests, in input order; with `beams`, the hypotheses of its request."""
    if beams is None:
        return schedule(run, requests, batch_size)
    return beam_search(run, requests, beams, batch_size)


def _decode_prompts(
    run: Run,
    prompts: Iterable[Text | Conversation | Request],
    settings: Mapping[str, Any],
    batch_size: int,
    beams: BeamSearchConfig | None = None,
    caller: str = "generate",
) -> Iterator[list[Completion]] | Iterator[list[Hypothesis]]:
    """Validates eagerly; decodes lazily."""
    check_decoder(run, caller)
    if isinstance(prompts, str | Request):
        what = "the text " if isinstance(prompts, str) else ""
        raise UserError(f"expected a list of texts or of id lists, got {what}{prompts!r}: write [{prompts!r}]")
    if not is_integer(batch_size) or batch_size < 1:
        raise UserError(f"batch_size={batch_size!r}: must be an integer >= 1")
    # Reports a bad setting even if there are no prompts.
    config = make_sampling_config(complete_settings(run, settings, beams))
    if beams is not None:
        beams.check_settings(config)

    def requests_of(i: int, prompt: Text | Conversation | Request) -> list[DecodeRequest]:
        try:
            return make_requests(run, prompt, settings, beams)
        except UserError as error:
            what = "conversation" if isinstance(prompt, Conversation) else "prompt"
            raise UserError(f"{what} {i}: {error}") from None

    requests = itertools.starmap(requests_of, enumerate(prompts))
    # An iterator may be endless, so its prompts are validated as they are read.
    return decode(run, requests if isinstance(prompts, Iterator) else list(requests), batch_size, beams)


def _list_if_list(outputs: Iterator[Any], prompts: Iterable[Any]) -> Any:
    """Collect the outputs in a list, unless the prompts are an iterator: it must not be read before it is needed."""
    return outputs if isinstance(prompts, Iterator) else list(outputs)
