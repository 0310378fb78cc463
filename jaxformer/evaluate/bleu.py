"""BLEU and chrF of a sequence-to-sequence model on held-out pairs, computed by sacreBLEU (arXiv:1804.08771)."""

from sacrebleu.metrics import BLEU, CHRF

from jaxformer.config import Bleu
from jaxformer.evaluate.decoding import decode_pairs, heldout_pairs, max_output_length
from jaxformer.evaluate.heldout import HeldOut
from jaxformer.run import Run


def bleu(config: Bleu, run: Run, heldout: HeldOut) -> dict[str, float | str]:
    """BLEU and chrF between 0 and 100, and the signatures that say how sacreBLEU computed them."""
    pairs = heldout_pairs(config, heldout)
    outputs = decode_pairs(
        run,
        pairs,
        max_new_tokens=config.max_new_tokens or max_output_length(run),
        num_beams=config.num_beams,
        length_penalty=config.length_penalty,
        batch_size=max(config.batch_size, config.num_beams),
    )
    return corpus_scores(outputs, [pair["targets"] for pair in pairs], config.tokenize, config.lowercase)


def corpus_scores(outputs: list[str], targets: list[str], tokenize: str, lowercase: bool) -> dict[str, float | str]:
    """BLEU and chrF of outputs with one reference each, and their signatures."""
    values: dict[str, float | str] = {}
    for name, metric in (("bleu", BLEU(tokenize=tokenize, lowercase=lowercase)), ("chrf", CHRF(lowercase=lowercase))):
        values[name] = metric.corpus_score(outputs, [targets]).score
        values[f"{name}_signature"] = str(metric.get_signature())
    return values
