"""Time the forms of the operator against each other.

    python scripts/benchmark.py decay     strong decays against weak ones: denormal numbers would show here
    python scripts/benchmark.py forms     the three forms over length: where each wins, and the crossover of "auto"

What is compared runs alternately in one process, and is reported as the median of paired ratios with their quartiles.
Each command writes a JSON file (machine, versions, every repetition) to --output_dir, `forms` also a plot; `decay`
exits with code 1 if a ratio reaches its limit. Run it alone: another job on the same cores changes the ratios.
"""

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from lion_transformers import lion_attention
from lion_transformers.scripts.arguments import UsageError, run
from lion_transformers.scripts.checkpointing import write_json


MODES = ("parallel", "chunk", "rnn")
DECAYS = ("none", "fixed", "selective")
DECAY_RATIO_LIMIT = 1.3
# The parallel form needs (heads, length, length) tensors: beyond this length only the linear forms are timed.
PARALLEL_LONGEST = 4096


def main():
    arguments = parse_arguments()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    passed = arguments.command(arguments)
    if not passed:
        sys.exit(1)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="command")
    decay = commands.add_parser("decay", help="strong decays against weak ones, in every form")
    decay.set_defaults(command=benchmark_decay, heads=4, batch_size=1)
    decay.add_argument("--length", type=int, default=4096, help="tokens (default: %(default)s)")
    forms = commands.add_parser("forms", help="the three forms over length")
    forms.set_defaults(command=benchmark_forms)
    lengths = [32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096]
    forms.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens (default: %(default)s)")
    forms.add_argument("--heads", type=int, default=12, help="attention heads (default: %(default)s)")
    forms.add_argument("--batch_size", type=int, default=1, help="sequences (default: %(default)s)")
    for command in (decay, forms):
        command.add_argument("--head_dim", type=int, default=64, help="width of a head (default: %(default)s)")
        command.add_argument("--repetitions", type=int, default=7, help="timings of each (default: %(default)s)")
        command.add_argument("--output_dir", type=Path, default=Path("outputs/benchmark"), help="default: %(default)s")
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if any(number < 1 for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)):
            raise UsageError(f"--{name} must be at least 1")
    return arguments


def benchmark_decay(arguments) -> bool:
    """Decays of -5 a step against -0.01: equal work, so equal time, unless denormal numbers get in the way."""
    rows = []
    cases = [(mode, decay, backward) for mode in MODES for decay in DECAYS[1:] for backward in (False, True)]
    for mode, decay, backward in tqdm(cases, desc="decay"):
        strong, weak = (
            make_call(mode, make_inputs(arguments, arguments.length, decay, log_decay), backward)
            for log_decay in (-5.0, -0.01)
        )
        times = alternate([strong, weak], arguments.repetitions)
        rows.append(
            {"mode": mode, "decay": decay, "pass": pass_name(backward), **paired_ratio(*times), "seconds": times}
        )
    print(f"Time at log-decay -5 over time at -0.01, {arguments.length} tokens, median (quartiles):")
    print_table(rows, ["mode", "decay", "pass", "ratio"])
    worst = max(row["median"] for row in rows)
    print(f"Largest: {worst:.2f}, limit {DECAY_RATIO_LIMIT}.")
    write_results(arguments, "decay", rows)
    return worst < DECAY_RATIO_LIMIT


def benchmark_forms(arguments) -> bool:
    rows = []
    cases = [
        (decay, length, backward)
        for decay in DECAYS
        for length in sorted(arguments.lengths)
        for backward in (False, True)
    ]
    for decay, length, backward in tqdm(cases, desc="forms"):
        inputs = make_inputs(arguments, length, decay, -0.05)
        modes = [mode for mode in MODES if mode != "parallel" or length <= PARALLEL_LONGEST]
        times = dict(
            zip(modes, alternate([make_call(m, inputs, backward) for m in modes], arguments.repetitions), strict=True)
        )
        ratio = paired_ratio(times["chunk"], times["parallel"]) if "parallel" in times else {"ratio": "-"}
        rows.append(
            {
                "decay": decay,
                "length": length,
                "pass": pass_name(backward),
                **{f"{mode} (ms)": f"{1e3 * median(times[mode]):.2f}" for mode in modes},
                "chunk / parallel": ratio["ratio"],
                "median": ratio.get("median"),
                "seconds": times,
            }
        )
    columns = ["decay", "length", "pass", *(f"{mode} (ms)" for mode in MODES), "chunk / parallel"]
    print_table(rows, columns)
    for decay in DECAYS:
        for name in ("forward", "training step"):
            print(f"{decay}, {name}: {describe_crossover(rows, decay, name)}")
    write_results(arguments, "forms", rows)
    plot_forms(rows, arguments.output_dir / "forms.png")
    return True


def describe_crossover(rows, decay, name):
    slower = [
        row["length"]
        for row in rows
        if (row["decay"], row["pass"]) == (decay, name) and row["median"] is not None and row["median"] > 1
    ]
    return f"parallel wins up to {max(slower)} tokens" if slower else "chunk wins at every length measured"


def make_inputs(arguments, length, decay, log_decay):
    """Random queries, keys and values `(batch, heads, length, head_dim)`, and decays of one strength."""
    torch.manual_seed(0)
    shape = (arguments.batch_size, arguments.heads, length)
    q, k, v = (torch.randn(*shape, arguments.head_dim) for _ in range(3))
    decays = {"none": None, "fixed": torch.full(shape[1:2], log_decay), "selective": torch.full(shape, log_decay)}
    return q, k, v, decays[decay]


def make_call(mode, inputs, backward):
    def forward():
        with torch.no_grad():
            lion_attention(*inputs, mode=mode)

    def training_step():
        leaves = [x if x is None else x.detach().requires_grad_() for x in inputs]
        lion_attention(*leaves, mode=mode).sum().backward()

    return training_step if backward else forward


def pass_name(backward):
    return "training step" if backward else "forward"


def alternate(calls, repetitions):
    """Seconds of each call, `repetitions` of each in turn, after one of each to warm up."""
    times = [[] for _ in calls]
    for repetition in range(repetitions + 1):
        for call, seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if repetition > 0:
                seconds.append(time.perf_counter() - start)
    return times


def paired_ratio(numerators, denominators):
    ratios = torch.tensor(numerators) / torch.tensor(denominators)
    low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return {"median": middle, "ratio": f"{middle:.2f} ({low:.2f} to {high:.2f})"}


def median(values):
    return torch.tensor(values).median().item()


def print_table(rows, columns):
    print("| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(row.get(column, "-")) for column in columns) + " |")


def write_results(arguments, name, rows):
    path = arguments.output_dir / f"{name}.json"
    settings = {key: value for key, value in vars(arguments).items() if key not in ("command", "output_dir")}
    write_json(path, {"settings": settings, "machine": describe_machine(), "rows": rows})
    print(f"Every repetition: {path}")


def describe_machine():
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def plot_forms(rows, path):
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, decay in zip(figure.subplots(1, len(DECAYS), sharey=True), DECAYS, strict=True):
        for mode in MODES:
            points = [
                (row["length"], median(row["seconds"][mode]))
                for row in rows
                if row["decay"] == decay and row["pass"] == "forward" and mode in row["seconds"]
            ]
            axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=mode)
        axes.set(title=f"decay_type={decay!r}", xlabel="tokens")
        axes.legend()
    figure.axes[0].set_ylabel("seconds, forward")
    figure.savefig(path, dpi=150)
    print(f"Plot: {path}")


if __name__ == "__main__":
    run(main)
