"""A/B runs of the final program: the same model with and without one switch, in turns, what the switch moved in the
trace, and a plot of both; and runs against llama-bench."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import build, engine, records, run, setup
from .common import ROOT, StepFailed, UserError, json_lines, markdown_table, one_of, read_text, say, shown
from .records import Record

RUNG = "engine_ab"  # of the records
TALES = "data/models/tales-f16.gguf"  # quantized, it stands for a larger model where there is no GPU
EMULATED_PROMPT = 12  # tokens: more than eight, so that the kernels of prompts take it
TRACED_TOKENS = 4
MOVED = 0.1  # of a time: less is noise of a trace


@dataclass(frozen=True)
class Experiment:
    """One switch and the model on which it shows."""

    variables: Mapping[str, str]
    model: str
    text: str


EXPERIMENTS = {
    "baseline": Experiment({}, "0.5b:Q4_0", "what runs without any switch: pp are prompts' kernels, tg decoding's"),
    "q40_mmvq": Experiment(
        {"LADDER_NO_Q40_MMVQ": "1"}, "0.5b:Q4_0", "Q4_0 decodes with f32 activations: tg moves, the bytes do not"
    ),
    "q80_mmvq": Experiment({"LADDER_NO_Q80_MMVQ": "1"}, "0.5b:Q8_0", "Q8_0 decodes with f32 activations"),
    "kq_mmvq": Experiment({"LADDER_NO_KQ_MMVQ": "1"}, "7b:Q4_K_M", "K-quants decode with f32 activations"),
    "mmvq_v1": Experiment(
        {"LADDER_MMVQ_V1": "1"}, "7b:Q4_K_M", "decoding reads the file's blocks instead of tiles: tg alone moves"
    ),
    "mmq_on": Experiment({"LADDER_MMQ": "1"}, "7b:Q4_K_M", "prompts in int8 whatever the gates say: pp alone moves"),
    "mmq_off": Experiment(
        {"LADDER_MMQ": "0"}, "7b:Q4_K_M", "prompts over f16 copies of the weights: 3.6 times the bytes, pp alone moves"
    ),
    "prefill_gemm": Experiment(
        {"LADDER_NO_PREFILL_GEMM": "1"}, "0.5b:Q4_0", "prompts eight rows at a time through the kernels of decoding"
    ),
    "small_m_gemm": Experiment(
        {"LADDER_SMALL_M_GEMM": "1"}, "0.5b:Q4_0", "the kernels of prompts from two rows on (see it with -p 4,8)"
    ),
    "cuda_graph": Experiment(
        {"LADDER_NO_CUDA_GRAPH": "1"}, "0.5b:Q4_0", "every kernel of a token launched by the host"
    ),
    "seed_gates": Experiment({"LADDER_GATES": "seed"}, "0.5b:Q4_0", "the seed's gates instead of the device's"),
}


def add_ab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="one of: " + ", ".join(EXPERIMENTS) + "; none lists them"
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="as scripts/ladder engine takes it (default: the experiment's)"
    )
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="tokens of prompts (512)")
    parser.add_argument("-n", "--n-gen", default="64", metavar="N,..", help="tokens to generate (64)")
    parser.add_argument("-r", "--rounds", type=run.positive, default=3, metavar="N", help="runs of each, in turns (3)")
    parser.add_argument(
        "--on",
        choices=("gpu", "emulator"),
        help="where to run (default: the GPU if there is one). The emulator has no clock: it counts launches, of the "
        "bundled model unless --model says otherwise",
    )
    parser.add_argument("--explain", action="store_true", help="only say which kernels change; runs nothing")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="a .svg or .png (default: both, in build/plots)"
    )
    parser.add_argument("--runs", type=Path, metavar="DIR", help="add the speeds to this folder, such as data/runs")
    run.add_build_options(parser)
    parser.set_defaults(do=command_ab)


def add_compare_llama(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="FILE.gguf, or SIZE:TYPE as scripts/ladder engine takes it")
    parser.add_argument("-p", "--n-prompt", default="512", metavar="N,..", help="tokens of prompts (512)")
    parser.add_argument("-n", "--n-gen", default="128", metavar="N,..", help="tokens to generate (128)")
    parser.add_argument("-r", "--rounds", type=run.positive, default=3, metavar="N", help="runs of each, in turns (3)")
    parser.add_argument("--on", choices=("gpu", "cpu"), help="where to run (default: the GPU if there is one)")
    run.add_build_options(parser)
    parser.set_defaults(do=command_compare_llama)


def changed_kernels(program: Path, file: Path, variables: Mapping[str, str]) -> list[list[str]]:
    """Matrices whose kernel the variables change, one line for those that change alike."""

    def explained(extra: Mapping[str, str]) -> list[Record]:
        done = subprocess.run(
            [str(program), "explain", str(file), "--json"],
            cwd=ROOT,
            check=False,
            text=True,
            capture_output=True,
            env={**os.environ, **extra},
        )
        if done.returncode:
            raise StepFailed(f"qwen explain ended with status {done.returncode}: {done.stderr.strip()}")
        found: list[Record] = json.loads(done.stdout)["dispatch"]
        return found

    lines: dict[tuple[str, ...], int] = {}
    for a, b in zip(explained({}), explained(variables), strict=True):
        for before, after in zip(a["at"], b["at"], strict=True):
            if (before["kernel"], before["gate"]) != (after["kernel"], after["gate"]):
                role = a["tensor"].removesuffix(".weight").split(".")[-1]
                line = (role, a["type"], str(before["nt"]), f"{before['kernel']} ({before['gate']})",
                        f"{after['kernel']} ({after['gate']})")  # fmt: skip
                lines[line] = lines.get(line, 0) + 1
    return [[f"{role} x{n}" if n > 1 else role, *rest] for (role, *rest), n in lines.items()]


def once(
    program: Path, file: Path, args: argparse.Namespace, on: str, variables: Mapping[str, str], form: str = "jsonl"
) -> list[Record]:
    """One run of `qwen bench`, a result a test."""
    words = ["bench", str(file), "--on", on, "-r", "1", "-p", args.n_prompt, "-n", args.n_gen, "-o", form]
    return json_lines(engine.output(program, words, variables), "qwen bench")


def rates_of(found: Sequence[Record]) -> dict[str, float]:
    """Test -> tokens/s, from llama-bench's fields."""
    return {f"pp{r['n_prompt']}" if r["n_prompt"] else f"tg{r['n_gen']}": float(r["avg_ts"]) for r in found}


# --- what moved in the trace ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launched:
    """Launches of one kernel with one shape, in a pass."""

    count: float
    us: float  # all of them together


# What a launch is: kernel, matrices or width, token rows.
Launch = tuple[str, str, int]
Pass = dict[Launch, Launched]


def traced(program: Path, file: Path, on: str, tokens: int, batch: int, variables: Mapping[str, str]) -> Pass:
    """A pass of `batch` tokens, as the mean of several: tokens go in pieces, with the logits of each one's last."""
    ids = ",".join(str(1 + i % 200) for i in range(tokens))
    rows = ",".join(str(i) for i in range(batch - 1, tokens, batch))
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        trace = Path(folder) / "trace.json"
        words = ["logits", str(file), "--tokens", ids, "--rows", rows, "-b", str(batch), "-c", str(tokens)]
        engine.output(program, [*words, "--on", on], {**variables, "LADDER_TRACE": str(trace)})
        return pass_of(json.loads(read_text(trace)), tokens // batch)


def pass_of(events: Sequence[Mapping[str, Any]], passes: int) -> Pass:
    """Launches by kernel and shape.  A time is the median's times the count: the first launch also loads its kernel."""
    times: dict[Launch, list[float]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X":
            continue
        a = event["args"]
        if event["cat"] == "multiply":
            roles = " + ".join(n.removesuffix(".weight").split(".")[-1] for n in a["weights"].split(" + "))
            what = f"{roles} [{a['od']}, {a['id']}]"
        else:
            what = f"rows of {a['width']}" if "width" in a else ""
        times[(event["name"], what, a["nt"])].append(event["dur"])
    return {k: Launched(len(us) / passes, statistics.median_low(us) * len(us) / passes) for k, us in times.items()}


def moved(a: Pass, b: Pass, timed: bool) -> list[Launch]:
    """Launches whose number differs, or whose time does by more than noise."""
    none = Launched(0, 0)

    def differs(launch: Launch) -> bool:
        before, after = a.get(launch, none), b.get(launch, none)
        return before.count != after.count or (timed and abs(after.us - before.us) > MOVED * max(after.us, before.us))

    return [launch for launch in {**a, **b} if differs(launch)]


def trace_table(name: str, a: Pass, b: Pass | None, timed: bool) -> str:
    """The launches of a pass, or with `b` those that moved; and the sum of all."""
    head = [name, "of", "nt", *(["launches"] if b is None else ["without", "with"])]
    if timed:
        head += ["us"] if b is None else ["us without", "us with"]
    sides = [a] if b is None else [a, b]
    shown_launches = list(a) if b is None else moved(a, b, timed)
    rows = []
    for kernel, what, nt in shown_launches:
        found = [side.get((kernel, what, nt), Launched(0, 0)) for side in sides]
        row = [kernel, what, str(nt), *(f"{f.count:g}" for f in found)]
        rows.append(row + [f"{f.us:.1f}" for f in found if timed])
    total = ["all launches", "", "", *(f"{sum(f.count for f in side.values()):g}" for side in sides)]
    rows.append(total + [f"{sum(f.us for f in side.values()):.1f}" for side in sides if timed])
    return markdown_table(head, rows, range(2, len(head)))


def ratios(a: Mapping[str, Sequence[float]], b: Mapping[str, Sequence[float]], names: tuple[str, str]) -> str:
    """Medians of both and their ratio, a test a line."""
    rows = []
    for test in a:
        if test in b:
            first, second = statistics.median(a[test]), statistics.median(b[test])
            rows.append([test, f"{first:.1f}", f"{second:.1f}", f"{second / first:.3f}"])
    return markdown_table(["test", f"{names[0]}, tokens/s", f"{names[1]}, tokens/s", "ratio"], rows, right=(1, 2, 3))


Rates = dict[str, list[float]]


def record_of(template: Record, samples: Sequence[float], name: str, switch: str) -> Record:
    """A record of one side of an experiment."""
    deviation = statistics.stdev(samples) if len(samples) > 1 else 0.0
    kept = {k: template[k] for k in ("schema", "executor", "device", "model", "test")}
    params = {**template.get("params", {}), "experiment": name, "switch": switch or "none"}
    speed = {"mean": statistics.fmean(samples), "stddev": deviation, "samples": list(samples)}
    return {**kept, "rung": RUNG, "params": params, "tokens_per_s": speed}


def switch_of(experiment: Experiment) -> str:
    return " ".join(f"{name}={value}" for name, value in experiment.variables.items())


def rows_of(found: Sequence[Record], names: Sequence[str] | None) -> list[list[str]]:
    """A row for each experiment and test that has both sides."""
    sides = {(r["params"]["experiment"], r["test"], r["params"]["switch"] != "none"): r for r in found}
    rows = []
    for name, experiment in EXPERIMENTS.items():
        if names and name not in names:
            continue
        for (_, test, switched), b in [item for item in sides.items() if item[0][0] == name]:
            a = sides.get((name, test, False))
            if a is None or not switched:
                continue
            model = f"{b['model']['size']} {b['model']['file_type']}"
            before, after = a["tokens_per_s"]["mean"], b["tokens_per_s"]["mean"]
            cells = [f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.3f}"]
            rows.append([name, switch_of(experiment), model, test, *cells])
    return rows


def command_ab(args: argparse.Namespace) -> int:
    if args.name is None:
        rows = [[name, switch_of(e), e.model, e.text] for name, e in EXPERIMENTS.items()]
        print(markdown_table(["name", "switch", "model", "what it shows"], rows))
        return 0
    if args.name not in EXPERIMENTS:
        raise one_of("experiment", args.name, EXPERIMENTS)
    if args.output is not None and args.output.suffix not in (".svg", ".png"):
        raise UserError(f"-o {args.output}: the name must end in .svg or .png")
    if not args.explain and importlib.util.find_spec("matplotlib") is None:
        setup.rerun_in_venv(sys.argv[1:])
    experiment = EXPERIMENTS[args.name]
    folder = run.prepare(args)
    on = args.on or ("gpu" if args.explain or any(c.gpu_device for c in build.chapters(folder)[:1]) else "emulator")
    program = build.built_qwen(folder, None if args.explain and build.qwen(folder).exists() else on)
    file = engine.resolve(program, args.model or model_for(experiment, on))
    print(f"{switch_of(experiment) or 'no switch'}: {experiment.text}\n")
    if experiment.variables:
        changed = changed_kernels(program, file, experiment.variables)
        head = ["matrix", "type", "nt", "without", "with"]
        print(markdown_table(head, changed, right=(2,)) if changed else "No kernel of a multiplication changes.")
    if args.explain:
        return 0
    sides = [{}, experiment.variables] if experiment.variables else [{}]
    rates, made = speeds(program, file, args, sides) if on == "gpu" else ([{}] * len(sides), [])
    if on == "gpu":
        print("\n" + (ratios(rates[0], rates[1], ("without", "with")) if len(sides) > 1 else speed_table(rates[0])))
    else:
        print("\nThe emulator has no clock: launches are counted, and no speed is measured.")
    prompt = int(args.n_prompt.split(",")[0]) if on == "gpu" else EMULATED_PROMPT
    say(f"{args.name}: traces")
    passes: dict[str, list[Pass]] = {}
    for name, tokens, batch in ((f"a prompt of {prompt}", 2 * prompt, prompt), ("a token", TRACED_TOKENS, 1)):
        passes[name] = [traced(program, file, on, tokens, batch, variables) for variables in sides]
        first, *second = passes[name]
        print("\n" + trace_table(name, first, second[0] if second else None, on == "gpu"))
    draw(args, experiment, file, rates, passes, on)
    if args.runs:
        clocks: Record = {}
        engine.add(records.annotate(made, {}, command_line(args), build.toolchain("gpu", folder), clocks), args.runs)
    return 0


def model_for(experiment: Experiment, on: str) -> str:
    return experiment.model if on == "gpu" else f"{TALES}:{experiment.model.partition(':')[2]}"


def command_line(args: argparse.Namespace) -> str:
    words = ["scripts/ladder", "ab", args.name, *(["--model", args.model] if args.model else [])]
    return shlex.join([*words, "-p", args.n_prompt, "-n", args.n_gen, "-r", str(args.rounds)])


def speeds(
    program: Path, file: Path, args: argparse.Namespace, sides: Sequence[Mapping[str, str]]
) -> tuple[list[Rates], list[Record]]:
    """Tokens/s of each side, taken in turns, and the records of both."""
    templates: list[dict[str, Record]] = [{} for _ in sides]
    rates: list[Rates] = [defaultdict(list) for _ in sides]
    for turn in range(args.rounds):
        say(f"{args.name}: round {turn + 1} of {args.rounds}")
        for side, variables in enumerate(sides):
            for found in once(program, file, args, "gpu", variables, "record"):
                templates[side][found["test"]] = found
                rates[side][found["test"]].append(found["tokens_per_s"]["mean"])
    made = []
    for side, variables in enumerate(sides):
        switch = " ".join(f"{name}={value}" for name, value in variables.items())
        made += [record_of(templates[side][test], r, args.name, switch) for test, r in rates[side].items()]
    return rates, made


def speed_table(rates: Mapping[str, Sequence[float]]) -> str:
    return markdown_table(
        ["test", "tokens/s"], [[test, f"{statistics.median(r):.1f}"] for test, r in rates.items()], right=(1,)
    )


def draw(
    args: argparse.Namespace,
    experiment: Experiment,
    file: Path,
    rates: Sequence[Rates],
    passes: Mapping[str, Sequence[Pass]],
    on: str,
) -> None:
    from . import ab_plot

    switch = switch_of(experiment)
    title = f"{args.name}: {file.stem}" + (f", without and with {switch}" if switch else "")
    figure = ab_plot.draw(title, rates, passes, on == "gpu")
    plots = ROOT / "build" / "plots"
    for target in [args.output] if args.output else [plots / f"ab-{args.name}{suffix}" for suffix in (".svg", ".png")]:
        ab_plot.save(figure, target)
        print(shown(target))


def command_compare_llama(args: argparse.Namespace) -> int:
    peer = shutil.which("llama-bench")
    if peer is None:
        raise UserError(
            "there is no llama-bench on PATH; build llama.cpp (https://github.com/ggml-org/llama.cpp) and "
            "add its folder"
        )
    folder = run.prepare(args)
    program = build.built_qwen(folder, args.on)
    file = engine.resolve(program, args.model)
    layers = "0" if args.on == "cpu" else "99"
    mine: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    for turn in range(args.rounds):
        say(f"round {turn + 1} of {args.rounds}")
        for test, rate in rates_of(once(program, file, args, args.on or "auto", {})).items():
            mine.setdefault(test, []).append(rate)
        call = [peer, "-m", str(file), "-p", args.n_prompt, "-n", args.n_gen, "-r", "1", "-ngl", layers, "-o", "jsonl"]
        done = subprocess.run(call, cwd=ROOT, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        if done.returncode:
            raise StepFailed(f"{shlex.join(call)} ended with status {done.returncode}")
        for test, rate in rates_of(json_lines(done.stdout, "llama-bench")).items():
            theirs.setdefault(test, []).append(rate)
    print(ratios(theirs, mine, ("llama-bench", "qwen bench")))
    return 0
