"""`jaxformer COMMAND`: parses arguments, calls one function and prints its result; slow imports are inside commands."""

import argparse
import os
import sys
from collections.abc import Sequence

from jaxformer.startup import prepare_jax

DOES_NOT_FIT = 3
"""Exit code of a preflight whose config does not fit."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_args(argv)
    prepare_jax()
    from jaxformer.errors import UserError

    try:
        return args.run(args) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the program that reads our output, for example head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; accepts overrides before, between and after options, which argparse alone does not."""
    parser = _make_parser()
    args, rest = parser.parse_known_args(argv)
    if args.version:
        args.run = _version
    elif args.run is None:
        parser.error("the following arguments are required: COMMAND")
    elif args.verbose:
        parser.error("-v applies to --version only")
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown or (rest and "overrides" not in args):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxformer",
        description="Train, evaluate and run encoder-decoder, decoder-only and encoder-only transformers in JAX.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="with --version: also print library versions and devices"
    )
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    def command(name: str, run, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    sub = command("new", _new, "write a commented config to start from")
    sub.add_argument("name", metavar="NAME", help="the file to write; .py may be omitted")
    data = sub.add_mutually_exclusive_group(required=True)
    data.add_argument("--text", nargs="+", metavar="FILE", help="text files to train a language model on")
    data.add_argument(
        "--pairs",
        nargs=2,
        metavar=("SRC", "TGT"),
        help="files to train an encoder-decoder on; line i of SRC is the source of line i of TGT",
    )

    for name, run, help in (
        ("train", _train, "train a model from a config; resumes from the latest checkpoint in the workdir"),
        ("prepare", _prepare, "tokenize and pack the data once and store it for random access"),
    ):
        sub = command(name, run, help)
        sub.add_argument("config", metavar="CONFIG", help="a Python file that defines config()")
        _add_overrides(sub)

    sub = command("show", _show, "print the resolved config, the parameters, their shardings and the memory per device")
    sub.add_argument("path", metavar="CONFIG|RUN", help="a Python config, a run directory or a Hugging Face directory")
    _add_overrides(sub)

    sub = command("preflight", _preflight, "compile for TPUs or GPUs that are not attached: memory, collectives, speed")
    _add_preflight_arguments(sub)

    sub = command("tokenizer", _tokenizer, "train a SentencePiece tokenizer on text files")
    sub.add_argument("input", metavar="INPUT", nargs="+", help="UTF-8 text files, plain or compressed")
    sub.add_argument("--vocab-size", type=int, required=True, metavar="N", help="number of tokens in the vocabulary")
    sub.add_argument("--out", required=True, metavar="FILE", help="the tokenizer file to write")
    sub.add_argument("--algorithm", choices=("unigram", "bpe"), default="unigram", help="default: unigram")

    sub = command("evaluate", _evaluate, "compute the metrics of a run on its held-out data")
    sub.add_argument("path", metavar="RUN", help="a run directory or a Hugging Face directory")
    sub.add_argument("--weights", choices=("int8",), help="also evaluate with int8 weights and report the difference")
    _add_overrides(sub)

    sub = command("generate", _generate, "generate text from prompts; encoder-decoders read the prompt as their source")
    _add_generate_arguments(sub)

    sub = command("import", _import, "convert a Hugging Face model to a run directory")
    sub.add_argument("source", metavar="HF_DIR", help="a directory with config.json and safetensors, or hf://org/name")
    sub.add_argument("path", metavar="RUN", help="the run directory to create")

    sub = command("export", _export, "convert a run to a Hugging Face model")
    _add_export_arguments(sub)

    sub = command("average", _average, "average the parameters of several checkpoints of a run into a new run")
    sub.add_argument("path", metavar="RUN", help="a run directory")
    sub.add_argument("target", metavar="OUT", help="the run directory to create")
    which = sub.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=int, metavar="N", help="average the N latest checkpoints")
    which.add_argument(
        "--steps", type=int, nargs="+", metavar="N", help="average the checkpoints of these steps; comes after OUT"
    )

    sub = command("help", _help, "explain a config key: its type, default and meaning")
    what = sub.add_mutually_exclusive_group()
    what.add_argument("key", metavar="KEY", nargs="?", help="for example train.steps; default: list the top-level keys")
    what.add_argument("--markdown", action="store_true", help="print all keys as Markdown")

    sub = command("zoo", _zoo, "list the model families, their presets and their parity with transformers")
    sub.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    sub.add_argument("--measure", action="store_true", help="measure the parity again first; needs jaxformer[test]")

    sub = command("bench", _bench, "benchmark training, the input pipeline or decoding on this machine")
    _add_bench_arguments(sub)
    return parser


def _add_preflight_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", metavar="CONFIG", nargs="?", help="a Python file that defines config()")
    sub.add_argument(
        "--topology",
        metavar="NAME",
        help="for example v5e-256 or h100-64; `list` prints all; default: mesh.topology of the config",
    )
    sub.add_argument("--decode", action="store_true", help="compile prefill and the token step instead of training")
    sub.add_argument("--json", metavar="FILE", help="write the report as JSON; - is standard output")
    _add_overrides(sub)


def _add_generate_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("path", metavar="RUN", help="a run directory or a Hugging Face directory")
    prompts = sub.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; repeat the option for several")
    prompts.add_argument(
        "--input",
        metavar="FILE",
        help='JSON Lines with "prompt", "ids" or (with --chat) "messages"; settings are optional',
    )
    sub.add_argument("--output", metavar="FILE", help="JSON Lines in the order of --input; an interrupted job resumes")
    sub.add_argument("--chat", action="store_true", help="use the chat template; each prompt is one user message")
    sub.add_argument("--system", metavar="TEXT", help="with --chat: a system message before the prompt")
    for name, (kind, metavar, help) in SETTINGS.items():
        sub.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=help)
    sub.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="stop string: the output ends before it; repeat the option for several",
    )
    sub.add_argument(
        "--beams", type=int, metavar="N", help="beam search with N beams; default: the model's, otherwise 1 (none)"
    )
    sub.add_argument(
        "--length-penalty",
        type=float,
        metavar="A",
        help="exponent of the length normalization of beam search, 0 disables it; default: the model's, otherwise 1.0",
    )
    sub.add_argument(
        "--early-stopping",
        choices=("never", "heuristic", "exact"),
        help="when beam search stops; default: the model's, otherwise heuristic",
    )
    sub.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="sequences decoded at the same time; default: 32"
    )
    sub.add_argument("--weights", choices=("int8",), help="quantize weights to int8")
    sub.add_argument("--cache", choices=("int8",), help="quantize the KV cache to int8")


def _add_export_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("path", metavar="RUN", help="a run directory")
    sub.add_argument("target", metavar="HF_DIR", help="the directory to create")
    sub.add_argument("--step", type=int, metavar="N", help="step of the checkpoint; default: the latest")
    sub.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the weights; default: the imported dtype, otherwise float32",
    )
    sub.add_argument(
        "--model-type",
        metavar="NAME",
        help="Hugging Face model type, for example llama; default: the imported type, otherwise the first that fits",
    )
    sub.add_argument(
        "--shard-size",
        default="5GB",
        metavar="SIZE",
        help="maximum size of one weight file, for example 200MB; tensors are never split; default: 5GB",
    )


def _add_bench_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("what", choices=("train", "data", "decode"), help="what to benchmark")
    sub.add_argument(
        "--config",
        metavar="CONFIG",
        help="a Python file that defines config(); default for train: a small built-in config",
    )
    sub.add_argument(
        "--objective",
        metavar="KIND",
        help="for data, instead of --config: an objective to measure with a small built-in config, such as masked",
    )
    sub.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="number of repetitions; the best one is reported; default: 5",
    )
    for name, (kind, help) in CASE.items():
        sub.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=f"for decode: {help}")
    _add_overrides(sub)


# Settings of `generate`: type, placeholder, help. The model's defaults are those in its generation_config.json.
SETTINGS = {
    "max_new_tokens": (int, "N", "maximum number of new tokens; default: the model's, otherwise 64"),
    "temperature": (float, "T", "sampling temperature; default: the model's, otherwise 0 (greedy)"),
    "top_k": (int, "K", "sample from the K most likely tokens"),
    "top_p": (float, "P", "nucleus sampling: the smallest set of tokens with total probability P"),
    "min_p": (float, "P", "drop tokens less likely than P times the most likely token"),
    "typical_p": (float, "P", "locally typical sampling with total probability P"),
    "repetition_penalty": (
        float,
        "X",
        "penalize tokens of prompt and output; default: the model's, otherwise 1.0 (off)",
    ),
    "frequency_penalty": (float, "X", "subtract X from the logit of a token for each of its occurrences in the output"),
    "presence_penalty": (float, "X", "subtract X from the logits of tokens that occur in the output"),
    "no_repeat_ngram": (int, "N", "never repeat an n-gram of N tokens"),
    "min_new_tokens": (int, "N", "suppress EOS for the first N tokens"),
    "forced_first": (int, "ID", "id of the first output token, for example of the target language"),
    "num_samples": (int, "N", "samples per prompt; default: 1"),
    "log_probs": (int, "N", "with --output: write log-probabilities of the output and of the N most likely tokens"),
    "seed": (int, "N", "random seed; default: 0"),
}


# Options of `bench decode`, which replace its default cases: type and help.
CASE = {
    "preset": (str, "preset of the zoo; default: gpt2-124m"),
    "batch": (int, "batch size; default: 1"),
    "prompt": (int, "prompt length in tokens; default: 32"),
    "new": (int, "number of new tokens; default: 64"),
    "beams": (int, "number of beams; default: 1"),
    "weights": (str, "int8 to quantize the weights"),
}


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="config overrides, for example train.steps=200"
    )


def _version(args: argparse.Namespace) -> None:
    from importlib.metadata import version

    print(f"jaxformer {version('jaxformer')}")
    if not args.verbose:
        return
    import platform

    import jax

    for package in ("jax", "flax", "orbax-checkpoint"):
        print(f"{package} {version(package)}")
    print(f"Python {platform.python_version()}")
    devices = jax.devices()
    print(f"{len(devices)} {devices[0].device_kind} device{'s' * (len(devices) > 1)}")


def _new(args: argparse.Namespace) -> None:
    from jaxformer.new import new_language_model, new_translator

    print(new_translator(args.name, *args.pairs) if args.pairs else new_language_model(args.name, args.text))


def _help(args: argparse.Namespace) -> None:
    from jaxformer.config.reference import describe_key, format_markdown

    print(format_markdown() if args.markdown else describe_key(args.key))


def _train(args: argparse.Namespace) -> None:
    from jaxformer.train.loop import train
    from jaxformer.train.start import load_config

    train(load_config(args.config, args.overrides))


def _show(args: argparse.Namespace) -> None:
    from rich.console import Console

    from jaxformer.show import show

    show(args.path, args.overrides, Console())


def _preflight(args: argparse.Namespace) -> int:
    from rich.console import Console

    from jaxformer.errors import UserError
    from jaxformer.preflight import page
    from jaxformer.preflight.report import check_json_path, preflight, preflight_decode, write_json
    from jaxformer.train.start import load_config

    if args.topology == "list":
        page.show_topologies(Console())
        return 0
    if args.config is None:
        raise UserError("preflight needs a CONFIG, or `--topology list`")
    if args.json is not None:
        check_json_path(args.json)
    config = load_config(args.config, args.overrides)
    with page.progress() as announce:
        if args.decode:
            reports = preflight_decode(config, args.topology, announce)
        else:
            reports = [preflight(config, args.topology, announce)]
    if args.json is not None:
        write_json(reports, args.json)
    if args.json != "-":
        for report in reports:
            page.show(report, Console())
    return 0 if all(report.fits for report in reports) else DOES_NOT_FIT


def _prepare(args: argparse.Namespace) -> None:
    from jaxformer.train.start import load_config
    from jaxformer.train.workdir import prepare_run

    print(prepare_run(load_config(args.config, args.overrides)))


def _tokenizer(args: argparse.Namespace) -> None:
    from jaxformer.data import train_tokenizer_file

    print(train_tokenizer_file(args.input, args.vocab_size, args.algorithm, args.out))


def _evaluate(args: argparse.Namespace) -> None:
    from jaxformer.evaluate.report import evaluate, format_evaluation

    print(format_evaluation(evaluate(args.path, args.overrides, weights=args.weights)))


def _generate(args: argparse.Namespace) -> None:
    from jaxformer.decode.jobs import generate_to_file, generate_to_terminal, make_job
    from jaxformer.errors import UserError
    from jaxformer.run import load

    if (args.input is None) != (args.output is None):
        raise UserError("--input and --output must be given together")
    if args.log_probs is not None and args.output is None:
        raise UserError("--log-probs needs --input and --output")
    if args.system is not None and not args.chat:
        raise UserError("--system needs --chat")
    settings = {name: getattr(args, name) for name in (*SETTINGS, "stop") if getattr(args, name) is not None}
    beams = {"num_beams": args.beams, "length_penalty": args.length_penalty, "early_stopping": args.early_stopping}
    run = load(args.path, weights=args.weights, cache=args.cache)
    job = make_job(run, settings, beams, args.batch_size, chat=args.chat, system=args.system)
    if args.input is None:
        generate_to_terminal(run, args.prompt, job)
    else:
        generate_to_file(run, args.path, args.input, args.output, job)


def _import(args: argparse.Namespace) -> None:
    from jaxformer.exchange import import_run

    print(import_run(args.source, args.path))


def _export(args: argparse.Namespace) -> None:
    from jaxformer.convert.weights import parse_size
    from jaxformer.exchange import export_run

    options = {"step": args.step, "dtype": args.dtype, "model_type": args.model_type}
    print(export_run(args.path, args.target, max_bytes=parse_size(args.shard_size), **options))


def _average(args: argparse.Namespace) -> None:
    from jaxformer.average import average_run

    print(average_run(args.path, args.target, last=args.last, steps=args.steps))


def _zoo(args: argparse.Namespace) -> None:
    from rich.console import Console

    from jaxformer.zoo import table

    if args.measure:
        table.measure(Console(stderr=True))
    print(table.markdown()) if args.markdown else table.show(Console())


def _bench(args: argparse.Namespace) -> None:
    from jaxformer.bench.data import bench_data
    from jaxformer.bench.decode import Case, bench_decode
    from jaxformer.bench.train import bench_train
    from jaxformer.errors import UserError

    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: must be at least 1")
    case = {name: getattr(args, name) for name in CASE if getattr(args, name) is not None}
    if args.objective is not None and args.what != "data":
        raise UserError("--objective applies to bench data only")
    if args.what != "decode":
        if case:
            raise UserError(f"--{next(iter(case))} applies to bench decode only")
        common = (args.config, args.overrides, args.repeats)
        print(bench_train(*common) if args.what == "train" else bench_data(*common, args.objective))
        return
    if args.config is not None or args.overrides:
        raise UserError("bench decode takes no config: use --preset, --batch, --prompt, --new, --beams, --weights")
    for line in bench_decode(Case(**case) if case else None, args.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
