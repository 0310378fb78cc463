"""Config trees of earlier versions brought up to date: the only module that knows what they looked like.

`config.json` carries a `version`; files written before it had one count as version 0. A step here also runs on
the fields of a Python config, so that configs written for earlier names keep working.
"""

from typing import Any

from jaxformer.errors import UserError

VERSION = 1


def migrate(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The tree of a `config.json` without its version, in the form of today's `RunConfig`."""
    tree = dict(tree)
    version = tree.pop("version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise UserError(
            f"{where}: version = {version!r}, but this jaxformer reads versions up to {VERSION}: install a newer one"
        )
    if version < 1 and isinstance(tree.get("evaluate"), dict):
        tree["evaluate"] = metrics_from_exact_match(tree["evaluate"])
    return tree


def metrics_from_exact_match(evaluate: dict[str, Any]) -> dict[str, Any]:
    """Version 0 had `evaluate.exact_match`, a number of examples, and always measured perplexity."""
    evaluate = dict(evaluate)
    if "exact_match" not in evaluate:
        return evaluate
    num_examples = evaluate.pop("exact_match")
    metrics = list(evaluate.get("metrics", ({"kind": "perplexity"},)))
    if num_examples:
        metrics.append({"kind": "exact_match", "num_examples": num_examples})
    return evaluate | {"metrics": metrics}
