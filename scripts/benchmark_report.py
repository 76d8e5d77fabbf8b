"""Tables and figures of what scripts/benchmark.py has measured, and the README's section about speed.

A benchmark's results are one JSON object. Under `times` and `memory` it has rows of one shape:

    {"point": {"tokens": 512, "batch": 8, …}, "reference": "BERT", "seconds": {"BERT": […], "LION-S": […]}}

The i-th seconds of two names were measured one after the other. Rows of memory have `bytes` instead, one number for
each name, null where memory did not suffice. Everything here is a function of that object.
"""

import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lion_transformers.scripts.arguments import UsageError
from lion_transformers.scripts.checkpointing import atomic_write


MARKERS = re.compile(r"<!-- benchmark: (\S+) -->\n(.*?)<!-- end of benchmark: \1 -->\n", re.DOTALL)
FIGURES = "model_cards/figures"
# What `packing` says of the documents of a point.
DOCUMENTS = ("documents", "real tokens", "real, padded", "real, packed")
# Of a point: they are on the axes of a figure; all others tell its panels apart.
AXES = ("tokens", "px", "batch", "layers", "chunk size", *DOCUMENTS)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


def paired_ratio(numerators: list[float], denominators: list[float]) -> tuple[float, float, float]:
    """Median of the ratios of pairs, and their lower and upper quartile."""
    ratios = [x / y for x, y in zip(numerators, denominators, strict=True)]
    if len(ratios) == 1:
        return (ratios[0],) * 3
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(ratios), low, high


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Exponent of the power law through points (x, y), by least squares over the longer half, two points at least."""
    points = sorted(points)
    points = points[min(len(points) // 2, len(points) - 2) :]
    return statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)).slope


def tokens_per_second(row: dict, name: str) -> float:
    point = row["point"]
    tokens = point.get("real tokens", point["batch"] * point["tokens"])
    return tokens / statistics.median(row["seconds"][name])


def bytes_per_token(row: dict, name: str) -> float | None:
    point, peak = row["point"], row["bytes"][name]
    return None if peak is None else peak / (point["batch"] * point["tokens"])


def compare_lengths(rows: list[dict], per_token: Callable[[dict, str], float | None]) -> list[tuple]:
    """How a quantity at the longest length relates to that at 512 tokens (or, if it was not measured, the shortest).

    Args:
        rows: times or memory.
        per_token: function of a row and a name.

    Returns:
        Name, the point's other keys, both lengths and the ratio, for each name but the reference that was measured at
        two lengths. Only models of as many layers are compared.
    """
    found = []
    for key, group in group_rows(rows, leave_out=("tokens", "px", "batch")):
        lengths = {row["point"]["tokens"]: row for row in group}
        first, last = 512 if 512 in lengths else min(lengths), max(lengths)
        for name in _names(group):
            if name == group[0]["reference"] or first == last:
                continue
            base, long = (per_token(lengths[length], name) for length in (first, last))
            if base and long:
                found.append((name, key, first, last, long / base))
    return found


def group_rows(rows: list[dict], leave_out: Iterable[str]) -> list[tuple[dict, list[dict]]]:
    """Rows that agree in all keys of their points but `leave_out`: pairs of these keys and the rows."""
    groups = {}
    for row in rows:
        key = {name: value for name, value in row["point"].items() if name not in leave_out}
        groups.setdefault(tuple(key.items()), (key, []))[1].append(row)
    return list(groups.values())


def _values(row):
    return row["seconds"] if "seconds" in row else row["bytes"]


def _names(rows):
    """Of everything measured, the reference first."""
    names = dict.fromkeys(name for row in rows for name in (row["reference"], *_values(row)))
    return [name for name in names if name is not None]


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def make_report(result: dict[str, Any], with_tables: bool = True) -> str:
    """Markdown: what was measured on what, the tables, and what follows from them."""
    tables = [ratio_table(result["times"]), speed_table(result["times"]), memory_table(result["memory"])]
    notes = "".join(f"- {note}\n" for note in result["notes"])
    parts = [describe(result), *(tables if with_tables else ()), notes]
    return "\n".join(part for part in parts if part)


def describe(result: dict[str, Any]) -> str:
    machine, versions, settings = result["machine"], result["versions"], result["settings"]
    where = (
        machine.get("gpu") or f"{machine['processor']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    )
    dtype = f"float32 weights under autocast to {settings['dtype']}" if settings["autocast"] else settings["dtype"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{result['title']} {where}; {dtype}; {software}.\n"


def ratio_table(rows: list[dict]) -> str:
    """Paired ratios to the reference, median (quartiles); empty where nothing is compared."""
    names = [name for name in _names(rows) if any(row["reference"] not in (None, name) for row in rows)]
    if not names:
        return ""
    header = [f"{name} / {_reference_title(rows)}" for name in names]
    table = []
    for row in rows:
        seconds, reference = row["seconds"], row["reference"]
        cells = [
            ratio_cell(seconds[name], seconds[reference]) if name in seconds and reference in seconds else "–"
            for name in names
        ]
        table.append([*_point_cells(rows, row), *cells, len(next(iter(seconds.values())))])
    return "Time, median of paired ratios (quartiles):\n\n" + markdown_table(
        [*_point_keys(rows), *header, "repetitions"], table
    )


def _reference_title(rows):
    references = dict.fromkeys(row["reference"] for row in rows if row["reference"] is not None)
    return " or ".join(references)


def ratio_cell(numerators, denominators):
    middle, low, high = paired_ratio(numerators, denominators)
    return f"{middle:.2f}" if len(numerators) == 1 else f"{middle:.2f} ({low:.2f} to {high:.2f})"


def speed_table(rows: list[dict]) -> str:
    """Of whole models; empty for others."""
    rows = [row for row in rows if "layers" in row["point"]]
    if not rows:
        return ""
    names = _names(rows)
    table = [
        [
            *_point_cells(rows, row),
            *(f"{tokens_per_second(row, name):,.0f}" if name in row["seconds"] else "–" for name in names),
        ]
        for row in rows
    ]
    tokens = "Real tokens" if "real tokens" in rows[0]["point"] else "Tokens"
    return f"{tokens} per second:\n\n" + markdown_table([*_point_keys(rows), *names], table)


def memory_table(rows: list[dict]) -> str:
    """Peaks, and their ratios to the reference's; empty where no memory was measured."""
    if not rows:
        return ""
    names = _names(rows)
    return "Peak memory, MiB (ratio):\n\n" + markdown_table(
        [*_point_keys(rows), *names],
        [[*_point_cells(rows, row), *(_memory_cell(row, name) for name in names)] for row in rows],
    )


def _memory_cell(row, name):
    if name not in row["bytes"]:
        return "–"
    peak, reference = row["bytes"][name], row["bytes"].get(row["reference"])
    if peak is None:
        return "out of memory"
    ratio = f" ({peak / reference:.3g})" if reference and name != row["reference"] else ""
    return f"{peak / 2**20:,.1f}{ratio}"


def _point_keys(rows):
    return list(dict.fromkeys(key for row in rows for key in row["point"]))


def _point_cells(rows, row):
    return [row["point"].get(key, "–") for key in _point_keys(rows)]


def markdown_table(header: list[str], rows: list[list[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------


def plot(result: dict[str, Any], file: Path) -> None:
    """Log-log curves over length (or over chunk size): a panel for each kind of time and of memory."""
    panels = [
        (rows, {"what": what, **key})
        for what in ("times", "memory")
        for key, rows in group_rows(result[what], leave_out=AXES)
    ]
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(4.6 * columns, 3.6 * lines), layout="constrained")
    for axes, (rows, key) in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=False):
        plot_panel(axes, rows, key)
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(file, format="png", dpi=150)


def plot_panel(axes, rows: list[dict], key: dict[str, Any]) -> None:
    """One curve for each name, of seconds or bytes per sequence (and layer), with the slope of its longer half."""
    over = "chunk size" if "chunk size" in rows[0]["point"] else "tokens"
    for name in _names(rows):
        points = [(row["point"][over], per_sequence(row, name)) for row in rows if _values(row).get(name) is not None]
        if points:
            exponent = f", slope {slope(points):.2f}" if over == "tokens" and len(points) > 1 else ""
            axes.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=f"{name}{exponent}")
    unit = "seconds" if key["what"] == "times" else "bytes"
    axes.set(
        title=", ".join(str(value) for name, value in key.items() if name != "what"),
        xlabel=over,
        ylabel=f"{unit} per sequence" + (" and layer" if unit == "seconds" and "layers" in rows[0]["point"] else ""),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def per_sequence(row: dict, name: str) -> float:
    """Median seconds by sequence (or document) and layer, or bytes by sequence."""
    point = row["point"]
    sequences = point.get("documents", point["batch"])
    if "bytes" in row:
        return row["bytes"][name] / sequences
    return statistics.median(row["seconds"][name]) / (sequences * point.get("layers", 1))


# ---------------------------------------------------------------------------------------------------------------------
# README
# ---------------------------------------------------------------------------------------------------------------------


def rewrite_readme(readme: Path, results: Path) -> list[str]:
    """Put tables and figures between the lines `<!-- benchmark: NAME -->` and `<!-- end of benchmark: NAME -->`.

    Args:
        readme: the file. Figures are copied to model_cards/figures beside it.
        results: folder with NAME.json, as the benchmarks write it.

    Returns:
        The names, in the order of the README.

    Raises:
        UsageError: if the file or a benchmark's are not there, there are no markers, or one is without its other.
    """
    if not readme.is_file():
        raise UsageError(f"there is no file {readme}.")
    text = readme.read_text(encoding="utf-8")
    names = [match[1] for match in MARKERS.finditer(text)]
    if not names or len(re.findall(r"<!-- (?:end of )?benchmark: ", text)) != 2 * len(names):
        raise UsageError(
            f"{readme} needs lines <!-- benchmark: NAME --> and <!-- end of benchmark: NAME --> to write between."
        )
    files = {name: results / f"{name}.json" for name in names}
    if missing := [str(file) for file in files.values() if not file.is_file()]:
        raise UsageError(f"{readme} shows what has not been measured: {', '.join(missing)} not there.")
    sections = {name: make_section(name, file, readme.parent) for name, file in files.items()}
    text = MARKERS.sub(lambda match: sections[match[1]], text)
    atomic_write(readme, lambda file: file.write_text(text, encoding="utf-8"))
    return names


def make_section(name: str, file: Path, folder: Path) -> str:
    """The README's part about a benchmark. Its figure, where it has one, is drawn in `folder`."""
    result = json.loads(file.read_text(encoding="utf-8"))
    parts = [f"<!-- benchmark: {name} -->\n{make_report(result, not result['is_brief'])}"]
    if result["has_figure"]:
        (folder / FIGURES).mkdir(parents=True, exist_ok=True)
        atomic_write(folder / FIGURES / f"{name}.png", functools.partial(plot, result))
        parts.append(f"![{result['title']}]({FIGURES}/{name}.png)\n")
    return "\n".join([*parts, f"<!-- end of benchmark: {name} -->\n"])
