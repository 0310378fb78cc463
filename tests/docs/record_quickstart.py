"""Train the quickstart and write what it prints as an image, `configs/quickstart.svg`, for the README.

    python tests/docs/record_quickstart.py [key=value ...]

The lines that only report progress are left out, so that the image stays small.
"""

import os
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from jaxformer.startup import prepare_jax

ROOT = Path(__file__).parents[2]
COMMAND = "jaxformer train configs/quickstart.py"
WIDTH = 96


def main() -> None:
    prepare_jax()
    from jaxformer.config import load_run_file
    from jaxformer.train.loop import train

    os.chdir(ROOT)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, file=nowhere, width=WIDTH)
        train(load_run_file("configs/quickstart.py", sys.argv[1:]), console)
    text = console.export_text()
    lines = [line for line in text.splitlines() if not re.search(r"tokens/s$", line)]
    write_svg([f"$ {COMMAND}", *lines], ROOT / "configs" / "quickstart.svg")


def write_svg(lines: list[str], path: Path) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, file=nowhere, width=WIDTH)
        for line in lines:
            console.print(line, markup=False, highlight=False, no_wrap=True, crop=True)
        # Without rich's web fonts: the image must not load anything.
        template = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        path.write_text(console.export_svg(title="jaxformer", code_format=template), encoding="utf-8")


if __name__ == "__main__":
    main()
