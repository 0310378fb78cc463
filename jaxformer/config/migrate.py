"""Migration of configs from earlier versions; no other module knows their format.

`config.json` has a `version`; a file without one has version 0. Renamed fields are also migrated when a Python config
uses them, so that configs written for earlier names keep working.
"""

from typing import Any

from jaxformer.errors import UserError

VERSION = 1


def migrate(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """Convert the content of a `config.json` to the fields of the current `RunConfig`, without `version`."""
    tree = dict(tree)
    version = tree.pop("version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise UserError(
            f"{where}: version = {version!r}, but this jaxformer reads versions up to {VERSION}: "
            "install a newer jaxformer"
        )
    if version < 1 and isinstance(tree.get("evaluate"), dict):
        tree["evaluate"] = metrics_from_exact_match(tree["evaluate"])
    return tree


def metrics_from_exact_match(evaluate: dict[str, Any]) -> dict[str, Any]:
    """Convert version 0's `evaluate.exact_match`, a number of examples, to `evaluate.metrics`.

    Version 0 always measured perplexity."""
    evaluate = dict(evaluate)
    if "exact_match" not in evaluate:
        return evaluate
    num_examples = evaluate.pop("exact_match")
    if not num_examples:
        return evaluate
    metrics = [{"kind": "perplexity"}] if evaluate.get("metrics") is None else evaluate["metrics"]
    return evaluate | {"metrics": [*metrics, {"kind": "exact_match", "num_examples": num_examples}]}
