"""`jaxformer <command>`: parse, call one function, print. Nothing heavy is imported before it is needed."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    args = _parsed(argv)
    _settle_platform()
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
    _add_overrides(sub)

    sub = command("generate", _generate, "continue prompts, or translate them with an encoder-decoder")
    sub.add_argument("path", metavar="RUN", help="a run directory or a Hugging Face directory")
    sub.add_argument("--prompt", action="append", required=True, metavar="TEXT", help="may be given several times")
    sub.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    sub.add_argument("--top-k", type=int, metavar="K")
    sub.add_argument("--top-p", type=float, metavar="P")
    sub.add_argument("--beams", type=int, default=1, metavar="N")
    sub.add_argument("--length-penalty", type=float, default=1.0, metavar="A", help="with beams; 0 for none")
    sub.add_argument("--seed", type=int, default=0)

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

    sub = command("bench", _bench, "measure training or input speed on this machine")
    sub.add_argument("what", choices=("train", "data"))
    sub.add_argument(
        "--config", metavar="CONFIG", help="a Python file with a function config(); default: as documented"
    )
    sub.add_argument("--repeats", type=int, default=5, metavar="N", help="the best of this many is reported")
    _add_overrides(sub)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="such as train.steps=200")


def _settle_platform() -> None:
    """With TPU libraries but no TPU, JAX would search for one for minutes."""
    has_tpu = Path("/dev/accel0").exists() or Path("/dev/vfio").exists()
    if "JAX_PLATFORMS" not in os.environ and find_spec("libtpu") is not None and not has_tpu:
        os.environ["JAX_PLATFORMS"] = "cpu"


def _train(args: argparse.Namespace) -> None:
    from jaxformer.config import load_run_file
    from jaxformer.train.loop import train

    train(load_run_file(args.config, args.overrides))


def _show(args: argparse.Namespace) -> None:
    from rich.console import Console

    from jaxformer.config import load_run_file
    from jaxformer.show import show

    show(load_run_file(args.config, args.overrides), Console())


def _prepare(args: argparse.Namespace) -> None:
    from jaxformer.config import load_run_file
    from jaxformer.train.workdir import prepare_run

    print(prepare_run(load_run_file(args.config, args.overrides)))


def _tokenizer(args: argparse.Namespace) -> None:
    from jaxformer.data import train_tokenizer_file

    print(train_tokenizer_file(args.input, args.vocab_size, args.algorithm, args.out))


def _evaluate(args: argparse.Namespace) -> None:
    from jaxformer.evaluate.report import evaluate, format_metrics

    print(format_metrics(evaluate(args.path, args.overrides)))


def _generate(args: argparse.Namespace) -> None:
    from jaxformer.decode.requests import generate
    from jaxformer.run import load

    outputs = generate(
        load(args.path),
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        num_beams=args.beams,
        length_penalty=args.length_penalty,
        seed=args.seed,
    )
    print("\n".join(outputs))


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
    from jaxformer.bench import bench

    print(bench(args.what, args.config, args.overrides, args.repeats))


if __name__ == "__main__":
    sys.exit(main())
