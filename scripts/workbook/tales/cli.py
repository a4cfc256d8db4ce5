"""The command line of the bundled model's recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..common import ROOT, StepFailed, UserError

WORK = ROOT / "build" / "tales"
MODELS = ROOT / "data" / "models"
EPILOG = """\
In order: prepare (ten seconds on a CPU), train (ten minutes on one H200; any CUDA GPU, or a CPU and patience), export,
reference. Packages: pip install -r scripts/requirements.txt -r scripts/requirements-train.txt (torch and transformers
are about 5 GB; `train` and `reference` need them, `reference --quantized` does not)."""


def make_parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="scripts/tales.py",
        description="Make the bundled model `tales` from a folder of books.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    steps = top.add_subparsers(dest="step", required=True, metavar="STEP")

    prepare = steps.add_parser("prepare", help="books -> tokenizer, conversations, held-out text, token arrays")
    prepare.add_argument("--corpus", type=Path, required=True, help="folder of *.txt, blank lines between paragraphs")
    prepare.add_argument("--out", type=Path, default=WORK, help="folder to write to (default build/tales)")
    prepare.add_argument("--seed", type=int, default=1)

    train = steps.add_parser("train", help="token arrays -> weights")
    train.add_argument("--tokens", type=Path, default=WORK / "tokens.npz", help="from prepare")
    train.add_argument("--out", type=Path, default=WORK, help="folder for the weights (default build/tales)")
    train.add_argument("--seconds", type=float, default=600, help="time for all runs together (default 600)")
    train.add_argument(
        "--runs",
        nargs="+",
        default=["0.15:40", "0.25:70"],
        metavar="DROPOUT:EPOCHS",
        help="runs to make, one after the other (default 0.15:40 0.25:70); a run gets "
        "time in proportion to its epochs, and if that is too short for them its learning rate falls within that time",
    )
    train.add_argument(
        "--student",
        default="0.1:70",
        metavar="DROPOUT:EPOCHS",
        help="a last run that also learns from what the others predict, or none (default 0.1:70); "
        "of all runs the one of the lowest held-out loss is kept",
    )
    train.add_argument("--rows", type=int, default=16, help="sequences in a step (default 16)")
    train.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default 2048)")
    train.add_argument("--rate", type=float, default=2e-3, help="peak learning rate (default 0.002)")
    train.add_argument("--decay", type=float, default=0.5, help="weight decay of matrices (default 0.5)")
    train.add_argument("--seed", type=int, default=1)
    train.add_argument("--device", default="", help="cuda or cpu (default: cuda if there is one)")
    train.add_argument(
        "--compile", action="store_true", help="use torch.compile; the time it takes counts (without it if it fails)"
    )

    export = steps.add_parser("export", help="weights and tokenizer -> GGUF")
    export.add_argument("--tokenizer", type=Path, default=WORK / "tokenizer.json")
    export.add_argument("--weights", type=Path, nargs="*", help="tales-weights-0.npz, -1.npz (default: in build/tales)")
    export.add_argument("--random", type=int, metavar="SEED", help="random weights instead, to test an engine with")
    export.add_argument("--out", type=Path, default=MODELS / "tales-f16.gguf")

    reference = steps.add_parser("reference", help="GGUF -> logits and greedy tokens for the engine's tests")
    reference.add_argument("--model", type=Path, default=MODELS / "tales-f16.gguf")
    reference.add_argument("--heldout", type=Path, default=MODELS / "tales-heldout.txt")
    reference.add_argument(
        "--quantized", type=Path, metavar="FILE", help="instead: logits of this file for the prompts of --reference"
    )
    reference.add_argument("--reference", type=Path, default=MODELS / "tales-reference.gguf")
    reference.add_argument("--out", type=Path, help="file to write (default: --reference; with --quantized: none)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one step.  Returns the exit status: 0 done, 1 a step failed, 2 something asked for is not there."""
    options = make_parser().parse_args(arguments)
    try:
        if options.step == "prepare":
            from . import corpus

            corpus.prepare(options.corpus, options.out, options.seed)
        elif options.step == "train":
            from . import train

            train.train(options)
        elif options.step == "export":
            from . import export

            weights = options.weights or sorted(WORK.glob("tales-weights-*.npz"))
            export.export(options.tokenizer, weights, options.out, options.random)
        else:
            from . import reference

            if options.quantized:
                reference.write_quantized(options.quantized, options.reference, options.out)
            else:
                reference.write(options.model, options.heldout, options.out or options.reference)
    except (UserError, StepFailed) as error:
        print(f"tales: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0
