"""Generation from Python: prompts as texts or id lists in, texts or ids out.

`generate`, `complete` and `search` validate their arguments, turn each prompt into `DecodeRequest`s, and pass these to
the scheduler or to the beam search. Scores, logits and embeddings are in `decode.scoring`.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxformer.decode.beam_search import BeamSearchConfig, Hypothesis, beam_search
from jaxformer.decode.sampling import is_integer, make_sampling_config
from jaxformer.decode.scheduler import schedule, stream_text
from jaxformer.decode.slots import Completion, DecodeRequest
from jaxformer.decode.text import Text, check_decoder, encode_request, require_tokenizer, sampleable_vocab_size
from jaxformer.errors import UserError
from jaxformer.run import Run

BATCH_SIZE = 32  # requests, or beams, decoded together


class Request:
    """A prompt with settings of its own: `Request("Once", temperature=0.7, stop=["\\n"])`."""

    def __init__(self, prompt: Any, **settings: Any) -> None:
        self.prompt, self.settings = prompt, settings

    def __repr__(self) -> str:
        arguments = [repr(self.prompt), *(f"{name}={value!r}" for name, value in self.settings.items())]
        return f"Request({', '.join(arguments)})"


# ---------------------------------------------------------------- public functions
def generate(
    run: Run,
    prompts: Iterable[Text | Request],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    num_beams: int = 1,
    seed: int = 0,
    *,
    batch_size: int = BATCH_SIZE,
    length_penalty: float = 1.0,
    early_stopping: str = "heuristic",
    **settings: Any,
) -> list[Text] | list[list[Text]] | Iterator[Text]:
    """Continue prompts, or generate the outputs of an encoder-decoder: new tokens only, without eos.

    Texts give texts and id lists give id lists. Each output depends on its own prompt, settings and seed only. Prompts
    beyond `batch_size` wait for a slot. An iterator of prompts gives an iterator of outputs and reads a few batches
    ahead. With `num_beams` the result is the best hypothesis (`search` returns all of them). With `num_samples` the
    result is one list per prompt.

    Args:
      settings: other fields of `SamplingConfig`, such as min_p, repetition_penalty, no_repeat_ngram, bias, banned,
        forced_first, min_new_tokens, stop, num_samples. A `Request` may override any setting except those of beams.
    """
    several = "num_samples" in settings
    settings |= {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    if num_beams != 1:
        config = BeamSearchConfig(num_beams, length_penalty, early_stopping=early_stopping)
        hypotheses = _decode_prompts(run, prompts, settings, batch_size, config)
        return _list_if_list((each[0].output for each in hypotheses), prompts)

    def outputs(completions: list[Completion]) -> Any:
        return [c.output for c in completions] if several or len(completions) > 1 else completions[0].output

    completions = _decode_prompts(run, prompts, settings | {"seed": seed}, batch_size)
    return _list_if_list(map(outputs, completions), prompts)


def complete(
    run: Run, prompts: Iterable[Text | Request], *, batch_size: int = BATCH_SIZE, **settings: Any
) -> list[list[Completion]] | Iterator[list[Completion]]:
    """As `generate`, with ids, finish reason and log-probabilities: for each prompt a list of `num_samples`.

    Args:
      settings: as of `generate`, and `log_probs`.
    """
    return _list_if_list(_decode_prompts(run, prompts, settings, batch_size), prompts)


def search(
    run: Run,
    prompts: Iterable[Text | Request],
    max_new_tokens: int = 64,
    *,
    num_beams: int = 4,
    length_penalty: float = 1.0,
    convention: str = "length",
    early_stopping: str = "heuristic",
    batch_size: int = BATCH_SIZE,
    **settings: Any,
) -> list[list[Hypothesis]] | Iterator[list[Hypothesis]]:
    """Beam search: the `num_beams` best hypotheses of each prompt, best first.

    Args:
      length_penalty: exponent of the length that sums of log-probabilities are divided by; 0 compares the sums.
      convention: "length" as transformers, or "gnmt" for ((5 + length) / 6) ** penalty (arXiv:1609.08144).
      early_stopping: "never", "heuristic" or "exact", which are transformers' "never", False and True.
      batch_size: beams decoded together.
      settings: as of `generate`, except those that sample. Filters apply to log-probabilities, as in transformers.
    """
    config = BeamSearchConfig(num_beams, length_penalty, convention, early_stopping)
    settings |= {"max_new_tokens": max_new_tokens}
    return _list_if_list(_decode_prompts(run, prompts, settings, batch_size, config, "search"), prompts)


def stream(run: Run, prompt: Text | Request, **settings: Any) -> Iterator[str]:
    """The text that `generate` returns, in pieces as they are generated; no piece ends within a character."""
    check_decoder(run, "stream")
    requests = make_requests(run, prompt, settings)
    if len(requests) > 1:
        raise UserError(f"num_samples={len(requests)}: a stream is of one output, use generate for several")
    require_tokenizer(run)
    return stream_text(run, requests[0])


# ---------------------------------------------------------------- from prompts to requests
def make_requests(
    run: Run, prompt: Text | Request, settings: Mapping[str, Any], beams: BeamSearchConfig | None = None
) -> list[DecodeRequest]:
    """Validate and encode one prompt; settings of a `Request` take precedence over `settings`."""
    if isinstance(prompt, Request):
        prompt, settings = prompt.prompt, {**settings, **prompt.settings}
    config = make_sampling_config(settings)
    config.check_tokens(sampleable_vocab_size(run))
    if beams is not None:
        beams.check_settings(config)
    if config.stop:
        require_tokenizer(run)
    ids = encode_request(run, prompt, config.max_new_tokens)
    return [DecodeRequest(ids, config, sample, isinstance(prompt, str)) for sample in range(config.num_samples)]


def decode(
    run: Run, requests: Iterable[Sequence[DecodeRequest]], batch_size: int, beams: BeamSearchConfig | None = None
) -> Iterator[list[Completion]] | Iterator[list[Hypothesis]]:
    """Completions of each group of requests, in order; with `beams`, the hypotheses of its one request."""
    if beams is None:
        return schedule(run, requests, batch_size)
    return beam_search(run, requests, beams, batch_size)


def _decode_prompts(
    run: Run,
    prompts: Iterable[Text | Request],
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
        raise UserError(f"batch_size={batch_size!r}: must be a whole number of at least 1")
    config = make_sampling_config(settings)  # also if there is no prompt to find the mistake with
    if beams is not None:
        beams.check_settings(config)

    def requests_of(i: int, prompt: Text | Request) -> list[DecodeRequest]:
        try:
            return make_requests(run, prompt, settings, beams)
        except UserError as error:
            raise UserError(f"prompt {i}: {error}") from None

    requests = itertools.starmap(requests_of, enumerate(prompts))
    # An iterator may be endless, so its prompts are validated as they are read.
    return decode(run, requests if isinstance(prompts, Iterator) else list(requests), batch_size, beams)


def _list_if_list(outputs: Iterator[Any], prompts: Iterable[Any]) -> Any:
    """An iterator if the prompts are one, which must not be read before the first output is asked for; else a list."""
    return outputs if isinstance(prompts, Iterator) else list(outputs)
