"""`jaxformer <command>`: parse, call one function, print. Nothing heavy is imported before it is needed."""

import argparse
import os
import sys
from collections.abc import Sequence

from jaxformer.startup import prepare_jax


def main(argv: Sequence[str] | None = None) -> int:
    args = _parsed(argv)
    prepare_jax()
    from jaxformer.errors import UserError

    try:
        args.run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before, between and after options, which argparse alone does not allow."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word]
    if unknown or (rest and "overrides" not in args):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxformer", description="Train, evaluate and sample transformers of all three shapes in JAX."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    for name, run, help in (
        ("train", _train, "train a config, or continue it, in its workdir"),
        ("show", _show, "print the resolved config, parameters, shardings and bytes per device"),
        ("prepare", _prepare, "tokenise and pack the data once, for random access afterwards"),
    ):
        sub = command(name, run, help)
        sub.add_argument("config", metavar="CONFIG", help="a Python file with a function config()")
        _add_overrides(sub)

    sub = command("tokenizer", _tokenizer, "train a SentencePiece tokenizer on text files")
    sub.add_argument("input", metavar="INPUT", nargs="+", help="UTF-8 text files, plain or compressed")
    sub.add_argument("--vocab-size", type=int, required=True)
    sub.add_argument("--out", required=True, metavar="FILE")
    sub.add_argument("--algorithm", choices=("unigram", "bpe"), default="unigram")

    sub = command("evaluate", _evaluate, "print the held-out metrics of a run")
    sub.add_argument("path", metavar="RUN", help="a run directory or a Hugging Face directory")
    sub.add_argument("--weights", choices=("int8",), help="measure with quantized weights too, and what they lose")
    _add_overrides(sub)

    sub = command("generate", _generate, "continue prompts, or translate them with an encoder-decoder")
    sub.add_argument("path", metavar="RUN", help="a run directory or a Hugging Face directory")
    prompts = sub.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    prompts.add_argument("--input", metavar="FILE", help='JSON lines with "prompt" or "ids", and settings of their own')
    sub.add_argument("--output", metavar="FILE", help="of --input: JSON lines in the same order; a stopped job goes on")
    for name, (kind, metavar, help) in SETTINGS.items():
        sub.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=help)
    sub.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be given several times")
    sub.add_argument("--beams", type=int, default=1, metavar="N", help="beam search instead of choosing token by token")
    sub.add_argument("--length-penalty", type=float, default=1.0, metavar="A", help="with beams; 0 for none")
    sub.add_argument("--early-stopping", choices=("never", "heuristic", "exact"), default="heuristic")
    sub.add_argument("--batch-size", type=int, default=32, metavar="N", help="rows decoded together")
    sub.add_argument("--weights", choices=("int8",), help="keep matrices as whole numbers of 8 bits")
    sub.add_argument("--cache", choices=("int8",), help="keep keys and values as whole numbers of 8 bits")

    sub = command("import", _import, "make a run directory of a Hugging Face directory")
    sub.add_argument("source", metavar="HF_DIR", help="a directory with config.json and safetensors, or hf://org/name")
    sub.add_argument("path", metavar="RUN", help="the run directory to make")

    sub = command("export", _export, "make a Hugging Face directory of a run")
    sub.add_argument("path", metavar="RUN", help="a run directory")
    sub.add_argument("target", metavar="HF_DIR", help="the directory to make")
    sub.add_argument("--step", type=int, metavar="N", help="a checkpoint's step; default: the latest")
    sub.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: as imported, or float32")
    sub.add_argument("--model-type", metavar="NAME", help="such as llama; default: as imported, or whichever fits")

    sub = command("zoo", _zoo, "print the families, their published sizes and their parity with transformers")
    sub.add_argument("--markdown", action="store_true", help="as a Markdown table, the one in the README")
    sub.add_argument("--measure", action="store_true", help="measure everything anew first; needs the test extra")

    sub = command("bench", _bench, "measure training, input or decoding speed on this machine")
    sub.add_argument("what", choices=("train", "data", "decode"))
    sub.add_argument(
        "--config",
        metavar="CONFIG",
        help="of train and data: a Python file with a function config(); default: as documented",
    )
    sub.add_argument("--repeats", type=int, default=5, metavar="N", help="the best of this many is reported")
    for name, (kind, help) in CASE.items():
        sub.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=f"of decode: {help}")
    _add_overrides(sub)
    return parser


# Settings of `generate`: type, placeholder, help.
SETTINGS = {
    "max_new_tokens": (int, "N", "default 64"),
    "temperature": (float, "T", "default 0, which takes the likeliest token"),
    "top_k": (int, "K", "sample among the K likeliest tokens"),
    "top_p": (float, "P", "sample among the likeliest tokens that reach probability P"),
    "min_p": (float, "P", "sample among tokens at least P times as likely as the likeliest"),
    "typical_p": (float, "P", "sample among the most typical tokens that reach probability P"),
    "repetition_penalty": (float, "X", "above 1 makes tokens of prompt and output less likely"),
    "frequency_penalty": (float, "X", "less for every time a token was generated"),
    "presence_penalty": (float, "X", "less once for tokens that were generated"),
    "no_repeat_ngram": (int, "N", "no sequence of N tokens twice"),
    "min_new_tokens": (int, "N", "no end before"),
    "forced_first": (int, "ID", "the first token, such as a target language"),
    "num_samples": (int, "N", "outputs a prompt"),
    "log_probs": (int, "N", "with --output: note log-probabilities, also of the N likeliest tokens"),
    "seed": (int, "N", "default 0"),
}


# What `bench decode` measures instead of its documented cases: type and help.
CASE = {
    "preset": (str, "a model of the zoo, default gpt2-124m"),
    "batch": (int, "rows, default 1"),
    "prompt": (int, "tokens of each prompt, default 32"),
    "new": (int, "tokens generated, default 64"),
    "beams": (int, "default 1"),
    "weights": (str, "int8 for quantized ones"),
}


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="such as train.steps=200")


def _train(args: argparse.Namespace) -> None:
    from jaxformer.train.loop import train
    from jaxformer.train.start import load_config

    train(load_config(args.config, args.overrides))


def _show(args: argparse.Namespace) -> None:
    from rich.console import Console

    from jaxformer.show import show
    from jaxformer.train.start import load_config

    show(load_config(args.config, args.overrides), Console())


def _prepare(args: argparse.Namespace) -> None:
    from jaxformer.train.start import load_config
    from jaxformer.train.workdir import prepare_run

    print(prepare_run(load_config(args.config, args.overrides)))


def _tokenizer(args: argparse.Namespace) -> None:
    from jaxformer.data import train_tokenizer_file

    print(train_tokenizer_file(args.input, args.vocab_size, args.algorithm, args.out))


def _evaluate(args: argparse.Namespace) -> None:
    from jaxformer.evaluate.report import evaluate, format_metrics

    print(format_metrics(evaluate(args.path, args.overrides, weights=args.weights)))


def _generate(args: argparse.Namespace) -> None:
    from jaxformer.decode.jobs import generate_to_file, generate_to_terminal
    from jaxformer.errors import UserError
    from jaxformer.run import load

    if (args.input is None) != (args.output is None):
        raise UserError("--input and --output go together: prompts from one file, answers to another")
    if args.log_probs is not None and args.output is None:
        raise UserError("--log-probs: only with --input and --output")
    settings = {name: getattr(args, name) for name in (*SETTINGS, "stop") if getattr(args, name) is not None}
    beams = {"num_beams": args.beams, "length_penalty": args.length_penalty, "early_stopping": args.early_stopping}
    run = load(args.path, weights=args.weights, cache=args.cache)
    if args.input is None:
        generate_to_terminal(run, args.prompt, settings, beams, args.batch_size)
    else:
        generate_to_file(run, args.path, args.input, args.output, settings, beams, args.batch_size)


def _import(args: argparse.Namespace) -> None:
    from jaxformer.exchange import import_run

    print(import_run(args.source, args.path))


def _export(args: argparse.Namespace) -> None:
    from jaxformer.exchange import export_run

    print(export_run(args.path, args.target, step=args.step, dtype=args.dtype, model_type=args.model_type))


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
    if args.what != "decode":
        if case:
            raise UserError(f"--{next(iter(case))}: only of bench decode")
        print((bench_train if args.what == "train" else bench_data)(args.config, args.overrides, args.repeats))
        return
    if args.config is not None or args.overrides:
        raise UserError("bench decode takes no config: use --preset, --batch, --prompt, --new, --beams, --weights")
    for line in bench_decode(Case(**case) if case else None, args.repeats):
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
