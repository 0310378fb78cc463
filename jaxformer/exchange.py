"""Import of Hugging Face directories as run directories, and export of runs; both are atomic."""

import json
from pathlib import Path
from typing import Any

import jax

from jaxformer.checkpoint import Checkpoints
from jaxformer.config import ModelConfig, RunConfig, SpecialIds
from jaxformer.convert.directory import HuggingFaceDirectory
from jaxformer.convert.export import export_model
from jaxformer.convert.format import Format
from jaxformer.convert.generation import GENERATION_FILE, write_generation_fields
from jaxformer.convert.heads import head_kind
from jaxformer.convert.hub import local_directory
from jaxformer.convert.weights import DTYPES, MAX_FILE_BYTES
from jaxformer.data.tokenizer import HuggingFace, Tokenizer, check_vocabulary, huggingface_files
from jaxformer.errors import UserError
from jaxformer.run import load
from jaxformer.rundir import RunDir, new_directory, write_json
from jaxformer.word_vectors import write_run_vectors

ORIGIN = "huggingface.json"  # in an imported run: the format and the dtypes of the imported files


def import_run(source: str | Path, target: str | Path) -> str:
    """Create a run directory with the model of a Hugging Face directory as the checkpoint of step 0."""
    source, target = local_directory(source), Path(target)
    with new_directory(target) as partial:
        origin = _describe(HuggingFaceDirectory(source))
        run = load(source)
        config = run.config.model_copy(update={"workdir": str(target)})
        with Checkpoints(RunDir(partial), config) as checkpoints:
            checkpoints.save(0, {"params": run.params}, config, {"step": 0})
        if run.tokenizer is not None:
            run.tokenizer.save(partial)
        if run.generation is not None:
            write_json(partial / GENERATION_FILE, run.generation.fields)
        write_json(partial / ORIGIN, origin)
        RunDir(partial).write_config(config)
    count = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    return f"{origin['model_type']} with {count:,} parameters imported into {target}"


def export_run(
    path: str | Path,
    target: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    model_type: str | None = None,
    max_bytes: int = MAX_FILE_BYTES,
) -> str:
    """Write the model, tokenizer and decoding defaults of a run as a Hugging Face directory.

    Word vectors are written to the file `target` in the text format of word2vec instead, which gensim reads.

    Args:
      dtype: dtype of the written weights. None: that of the imported files, or float32 if the run was not imported.
      model_type: the format to write. None: that of the imported files, or the first that can represent the model.
      max_bytes: maximum size of one weight file; a larger tensor is written to a separate file.
    """
    target, origin = Path(target), _read_origin(Path(path))
    known = {known.name: known for known in DTYPES.values()}
    if dtype is not None and dtype not in known:
        raise UserError(f"dtype={dtype}: unknown dtype; there are: {', '.join(known)}")
    others = {} if dtype else {name: known[other] for name, other in origin.get("other_dtypes", {}).items()}
    run = load(path, step=step)
    if run.config.model.shape == "embedding-only":
        if dtype is not None or model_type is not None:
            raise UserError("word vectors are exported as text, not in a Hugging Face format: leave out its options")
        return write_run_vectors(run, target)
    dtype, model_type = dtype or origin.get("dtype", "float32"), model_type or origin.get("model_type")
    model, untrained = _with_trained_head(run.config)
    if not origin and run.tokenizer is not None:
        model = _with_tokenizer_ids(model, run.tokenizer)
    with new_directory(target) as partial:
        format = export_model(
            partial,
            model,
            {name: value for name, value in run.params.items() if name not in untrained},
            known[dtype],
            dtypes=others,
            model_type=model_type,
            max_bytes=max_bytes,
        )
        if run.tokenizer is not None:
            check_vocabulary(run.tokenizer, model)
            classifies = head_kind(model) in ("classes", "tags")
            files = huggingface_files(run.tokenizer, model.shape, classifies, model.embedding.num_types > 1)
            for name, content in files.items():
                (partial / name).write_bytes(content)
        if run.generation is not None:
            write_json(partial / GENERATION_FILE, write_generation_fields(run.generation.fields, model))
    note = f", without model.{untrained[0]}, which the objective did not train" if untrained else ""
    note += _tokenizer_note(format, run.tokenizer)
    return f"step {run.step} exported as {format.model_type} in {dtype} to {target}{note}"


def _with_trained_head(config: RunConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model with one head, and the names of heads left out: Hugging Face models have one head each."""
    model = config.model
    if model.head is None or model.pooler is None or config.data is None:
        return model, ()
    untrained = "pooler" if config.data.objective.head == "vocabulary" else "head"
    return model.replace(**{untrained: None}), (untrained,)


def _with_tokenizer_ids(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Fill in the special ids that the model does not set, from its tokenizer; models trained by jaxformer set none."""
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    ids = {"bos": tokenizer.bos_id, "eos": eos, "pad": tokenizer.pad_id}
    if model.shape == "encoder-decoder":
        ids["decoder_start"] = tokenizer.bos_id if model.special.bos is None else model.special.bos
    known = {name: value for name, value in dict(model.special).items() if value not in (None, ())}
    return model.model_copy(update={"special": SpecialIds(**ids | known)})


def _tokenizer_note(format: Format, tokenizer: Tokenizer | None) -> str:
    """How to load an exported tokenizer if AutoTokenizer ignores the class that its files name."""
    if format.tokenizer_class is None or tokenizer is None or isinstance(tokenizer, HuggingFace):
        return ""
    return (
        f"\nAutoTokenizer uses {format.tokenizer_class} for {format.model_type} models, which gives different ids: "
        "load the tokenizer with PreTrainedTokenizerFast.from_pretrained"
    )


def _describe(files: HuggingFaceDirectory) -> dict[str, Any]:
    """The format and dtypes of the files, which export needs to write the same files again."""
    main = files.dtype
    others = {name: dtype.name for name, dtype in files.dtypes.items() if dtype != main}
    return {"model_type": files.format.model_type, "dtype": main.name, "other_dtypes": others}


def _read_origin(path: Path) -> dict[str, Any]:
    file = path / ORIGIN
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
