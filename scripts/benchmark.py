"""Time and memory of LION: whole models beside BERT, ViT and ModernBERT, and the operator alone in its three forms.

    python scripts/benchmark.py model        whole models, inference and training step, beside a peer
    python scripts/benchmark.py images       LION and ViT over the size of images, in all scan orders: time and memory
    python scripts/benchmark.py memory       peak memory of whole models
    python scripts/benchmark.py flat         tokens per second of long sequences beside those of short ones
    python scripts/benchmark.py operator     the operator in each form beside softmax attention
    python scripts/benchmark.py forms        the three forms beside each other, and the crossover of "auto"
    python scripts/benchmark.py chunk-size   the chunk form by the size of its chunks: time and memory
    python scripts/benchmark.py rnn          the rnn form beside a naive loop; its memory beside the parallel form's
    python scripts/benchmark.py packing      pretraining on documents of mixed length, packed beside padded
    python scripts/benchmark.py floor        a whole model beside its matrix products alone
    python scripts/benchmark.py decay        strong decays beside weak ones: denormal numbers would show here
    python scripts/benchmark.py readme       write tables and figures of what was measured into the README

`COMMAND --help` lists the arguments. What is compared runs alternately in one process, after a round to warm up, and
is reported as the median of paired ratios with its quartiles. Models are of the paper's base size with random weights,
peers are those of Transformers with fused attention (SDPA) and the same sizes. A training step is forward, loss (the
mean of the squared last hidden states) and backward, without an optimizer. Peak memory is what a call needs beyond
weights and inputs, in a fresh process for each.

Every command writes NAME.json (machine, versions, settings, every repetition), NAME.md and, where there are curves,
NAME.png to --output_dir. `decay` exits with code 1 if a ratio reaches its limit, and does so again when the case is
measured a second time, with four times as many repetitions. Run it alone: another job on the same cores changes the
ratios.
"""

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from tqdm.auto import tqdm

from lion_transformers import LionConfig
from lion_transformers.attention_lion import ATTENTION_MODES, DIRECTIONS, choose_mode
from lion_transformers.configuration_lion import as_pair
from lion_transformers.scripts.arguments import UsageError, did_you_mean, parse_arguments, run
from lion_transformers.scripts.benchmark_arguments import (
    PASSES,
    ChunkSizeArguments,
    CommonArguments,
    DecayArguments,
    FlatArguments,
    FloorArguments,
    FormsArguments,
    ImagesArguments,
    ModelArguments,
    OperatorArguments,
    PackingArguments,
    ReadmeArguments,
    RnnArguments,
)
from lion_transformers.scripts.benchmark_cases import DECAYS, PEERS, SCAN_SUFFIXES, ModelCase, OperatorCase
from lion_transformers.scripts.benchmark_measure import (
    alternate,
    check_device,
    count_products,
    describe_machine,
    describe_versions,
    peak_memory,
    record_products,
    replay_products,
)
from lion_transformers.scripts.benchmark_packing import PackingCase
from lion_transformers.scripts.benchmark_report import (
    bytes_per_token,
    compare_lengths,
    group_rows,
    make_report,
    paired_ratio,
    plot,
    ratio_cell,
    rewrite_readme,
    tokens_per_second,
)
from lion_transformers.scripts.checkpointing import atomic_write, make_output_dir, write_json


DECAY_RATIO_LIMIT = 1.2
# How many times as many repetitions a case gets that has reached the limit.
SECOND_MEASUREMENT = 4
# Of sequences of some hundred tokens, products of the strong ones pass through all denormal numbers.
WEAK_DECAY, STRONG_DECAYS = -0.01, (-0.2, -5.0)
# The parallel form has (heads, length, length) tensors: beyond this length only the linear forms are timed.
PARALLEL_LONGEST = 4096
# Chunk sizes are compared with the default.
CHUNK_SIZE = 64
SDPA = "SDPA"


def main():
    name, arguments = parse_command(sys.argv[1:])
    _, command = COMMANDS[name]
    if name == "readme":
        command(arguments)
        return
    check_device(arguments.device)
    make_output_dir(Path(arguments.output_dir))  # not after everything has been measured
    arguments.setting.apply()
    result = command(arguments)
    finish(name, arguments, result)
    if result.failed:
        sys.exit(1)


def parse_command(argv: list[str]) -> tuple[str, Any]:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit()
    name, *argv = argv
    if name not in COMMANDS:
        raise UsageError(f"there is no command {name}{did_you_mean(name, COMMANDS, ': see --help.')}")
    arguments_type, _ = COMMANDS[name]
    (arguments,) = parse_arguments((arguments_type,), argv, description=__doc__)
    return name, arguments


def write_readme(arguments: ReadmeArguments) -> None:
    written = rewrite_readme(Path(arguments.readme), Path(arguments.output_dir))
    print(f"{arguments.readme}: {', '.join(written)}")


@dataclass
class Result:
    """What a command has measured.

    Args:
        title: says what, in one sentence.
        times, memory: rows as benchmark_report takes them.
        notes: what follows from them.
        has_figure: whether there are curves to draw.
        is_brief: whether the README has no room for the tables.
        failed: whether a limit was missed.
    """

    title: str
    times: list[dict] = field(default_factory=list)
    memory: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    has_figure: bool = True
    is_brief: bool = False
    failed: bool = False


def finish(name: str, arguments: CommonArguments, result: Result) -> None:
    """Print the tables, and write all files."""
    content = {
        "command": name,
        "settings": vars(arguments),
        "machine": describe_machine(arguments.device),
        "versions": describe_versions(),
        **asdict(result),
    }
    folder, stem = Path(arguments.output_dir), arguments.name or name
    write_json(folder / f"{stem}.json", content)
    report = make_report(content)
    atomic_write(folder / f"{stem}.md", lambda file: file.write_text(report, encoding="utf-8"))
    if result.has_figure:
        atomic_write(folder / f"{stem}.png", functools.partial(plot, content))
    print(f"{report}\nEvery repetition: {folder / stem}.json")


# ---------------------------------------------------------------------------------------------------------------------
# Whole models
# ---------------------------------------------------------------------------------------------------------------------


def benchmark_model(arguments: ModelArguments) -> Result:
    return Result(model_title(arguments, "time"), times=time_models(arguments))


def benchmark_memory(arguments: ModelArguments) -> Result:
    memory = memory_of_models(arguments)
    return Result(model_title(arguments, "peak memory"), memory=memory, notes=flat_memory(memory))


def benchmark_images(arguments: ImagesArguments) -> Result:
    times, memory = time_models(arguments), memory_of_models(arguments)
    notes = [*serpentine_cost(times), *flat_speed(times), *flat_memory(memory)]
    return Result(model_title(arguments, "time and peak memory"), times=times, memory=memory, notes=notes)


def benchmark_flat(arguments: FlatArguments) -> Result:
    """Each model on one length after the other, as many tokens of each, in turn."""
    if len(arguments.lengths) < 2:
        raise UsageError("--lengths must be several: flat compares them.")
    times = [row for name in arguments.passes for row in time_in_turn(arguments, name)]
    title = f"{model_title(arguments, 'time')} Every model takes the lengths in turn."
    return Result(title, times=times, notes=flat_speed_in_turn(times), has_figure=False)


def time_in_turn(arguments, name) -> list[dict]:
    """A row for each length; the i-th seconds of a model in two of them are a pair."""
    points = model_points(arguments)
    rows = [{"point": {**point, "pass": name}, "reference": None, "seconds": {}} for point, _ in points]
    for cases in progress(name, zip(*(cases for _, cases in points), strict=True)):
        model = max(cases, key=lambda case: case.length).build()  # its table of positions is enough for all
        calls = [replace(case, training=PASSES[name]).bind(model) for case in cases]
        for row, seconds in zip(rows, time_calls(arguments, dict(enumerate(calls))).values(), strict=True):
            row["seconds"][cases[0].label] = seconds
    return rows


def benchmark_packing(arguments: PackingArguments) -> Result:
    """The same documents packed into rows and padded to the longest of a batch, in turn."""
    models = [(point, model) for point, models in model_points(arguments) for model in models]
    times = [
        time_packing(arguments, point, PackingCase(model, arguments.documents))
        for point, model in progress("packing", models)
    ]
    title = f"{model_title(arguments, 'time')} Pretraining on documents of mixed length, packed beside padded."
    return Result(title, times=times, notes=describe_packing(times))


def time_packing(arguments, point, case):
    ways = {"padding": False, "packing": True}
    model = case.build()
    seconds = time_calls(arguments, {name: case.bind(model, packing) for name, packing in ways.items()})
    (real, padded), (_, packed) = (case.count_tokens(packing) for packing in ways.values())
    documents = {
        "documents": case.documents,
        "real tokens": real,
        "real, padded": f"{real / padded:.0%}",
        "real, packed": f"{real / packed:.0%}",
    }
    point = {"model": case.model.label, **point, "pass": "training", **documents}
    return {"point": point, "reference": "padding", "seconds": seconds}


def describe_packing(times: list[dict]) -> list[str]:
    notes = []
    for row in times:
        point, seconds = row["point"], row["seconds"]
        speed = ratio_cell(seconds["padding"], seconds["packing"])
        what = f"packing trains {speed} × as many real tokens a second as padding"
        shares = f"{point['real, packed']} of its tokens are real, with padding {point['real, padded']}"
        notes.append(f"{point['model']}, rows of {point['tokens']} tokens: {what}; {shares}.")
    return notes


def benchmark_floor(arguments: FloorArguments) -> Result:
    """Each model in turn with its matrix products alone, on the same shapes."""
    times = []
    for point, cases in progress("floor", model_points(arguments)):
        for case, name in product(cases, arguments.passes):
            case = replace(case, training=PASSES[name])
            model = case.build()
            call = case.bind(model)
            products = record_products(call, list(model.parameters()))
            calls = {"products": replay_products(products, arguments.device), "model": call}
            times.append(
                {
                    "point": {"decays": case.label, **point, "pass": name},
                    "reference": "products",
                    "seconds": time_calls(arguments, calls),
                    "products": count_products(products),
                }
            )
    products = "its matrix products alone (mm, addmm, bmm, baddbmm, and linear layers by oneDNN)"
    title = f"{model_title(arguments, 'time')} Beside each model {products}."
    return Result(title, times=times, has_figure=False)


def model_title(arguments, what):
    peer = f" beside {PEERS[arguments.peer]}" if arguments.peer != "none" else ""
    return f"{arguments.modality.capitalize()} models of {arguments.size} size{peer}: {what}."


def time_models(arguments) -> list[dict]:
    rows = []
    for point, cases in progress("time", model_points(arguments)):
        models = {case.label: case.build() for case in cases}
        for name in arguments.passes:
            calls = {case.label: replace(case, training=PASSES[name]).bind(models[case.label]) for case in cases}
            seconds = time_calls(arguments, calls)
            rows.append({"point": {**point, "pass": name}, "reference": peer_label(arguments), "seconds": seconds})
    return rows


def memory_of_models(arguments) -> list[dict]:
    rows = []
    for (point, cases), name in progress("memory", product(model_points(arguments), arguments.passes)):
        peaks = {case.label: peak_memory(replace(case, training=PASSES[name])) for case in cases}
        rows.append({"point": {**point, "pass": name}, "reference": peer_label(arguments), "bytes": peaks})
    return rows


def peer_label(arguments):
    return PEERS.get(arguments.peer)


def model_points(arguments) -> list[tuple[dict, list[ModelCase]]]:
    """What a row of a table says of its inputs and models, and the models: the peer first.

    Raises:
        UsageError: for a configuration that there cannot be.
    """
    lengths = arguments.lengths if arguments.modality == "text" else arguments.image_sizes
    layers = arguments.num_hidden_layers or [None]
    if len(layers) not in (1, len(lengths)):
        raise UsageError(f"--num_hidden_layers takes one number, or one for each of {len(lengths)} inputs.")
    patch = max(as_pair(arguments.config.get("patch_size", LionConfig.patch_size)))
    if arguments.peer == "vit" and min(lengths) < patch:
        raise UsageError(f"--image_sizes must be at least ViT's patches, {patch}, got {min(lengths)}.")
    pairs = zip(lengths, layers * len(lengths) if len(layers) == 1 else layers, strict=True)
    try:
        return [model_point(arguments, length, layers) for length, layers in pairs]
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise UsageError(f"there is no such model: {error}") from error


def fewer_layers(size, modality, layers):
    """Fields of a model with fewer layers than its size has, and with their share of its vocabulary.

    The gradient of the embeddings is of the whole vocabulary, and would weigh more than in the whole model.
    """
    whole = LionConfig.from_size(size, modality)
    share = {"vocab_size": max(1, whole.vocab_size * layers // whole.num_hidden_layers)} if modality == "text" else {}
    return {"num_hidden_layers": layers, **share}


def model_point(arguments, length, layers):
    config = {"modality": arguments.modality, "size": arguments.size, "attn_mode": arguments.attn_mode}
    if layers is not None:
        config |= fewer_layers(arguments.size, arguments.modality, layers)
    config |= arguments.config
    case = ModelCase(config, length, 1, False, arguments.setting)
    case = replace(case, batch=arguments.batch(case.tokens))
    kinds = [
        {"decay_type": decay, "scan_order": scan_order}
        for decay, scan_order in product(arguments.decays, arguments.scan_orders)
        if decay != "none" or scan_order == arguments.scan_orders[0]  # without decays the order is of no account
    ]
    cases = [replace(case, config={**config, **kind}) for kind in kinds]
    if arguments.peer != "none":
        cases = [replace(case, peer=arguments.peer), *cases]
    pixels = {"px": length} if arguments.modality == "image" else {}
    return {**pixels, "tokens": case.tokens, "batch": case.batch, "layers": case.layers}, cases


def flat_speed(times: list[dict]) -> list[str]:
    return describe_lengths(compare_lengths(times, tokens_per_second), "tokens per second")


def flat_memory(memory: list[dict]) -> list[str]:
    return describe_lengths(compare_lengths(memory, bytes_per_token), "bytes per token")


def describe_lengths(comparisons, what):
    return [
        f"{name}, {layers_of(kind)}, {kind['pass']}: {what} at {last} tokens are {ratio:.2f} × those at {first}."
        for name, kind, first, last, ratio in comparisons
    ]


def flat_speed_in_turn(times: list[dict]) -> list[str]:
    """Where lengths were measured in turn: ratios of pairs, each length's tokens per second to the shortest's."""
    notes = []
    for kind, (first, *rows) in group_rows(sorted(times, key=tokens_of), leave_out=("tokens", "batch")):
        for name, row in product(first["seconds"], rows):
            ratio = ratio_cell(seconds_per_token(first, name), seconds_per_token(row, name))
            what = f"tokens per second at {tokens_of(row)} tokens are {ratio} × those at {tokens_of(first)}"
            notes.append(f"{name}, {layers_of(kind)}, {kind['pass']}: {what}.")
    return notes


def tokens_of(row):
    return row["point"]["tokens"]


def seconds_per_token(row, name):
    return [seconds / (row["point"]["batch"] * row["point"]["tokens"]) for seconds in row["seconds"][name]]


def layers_of(point):
    return f"{point['layers']} layer{'s' * (point['layers'] > 1)}"


def serpentine_cost(times: list[dict]) -> list[str]:
    notes = []
    for row, name in product(times, DECAYS.values()):
        seconds, serpentine = row["seconds"], name + SCAN_SUFFIXES["serpentine"]
        if name in seconds and serpentine in seconds:
            ratio = ratio_cell(seconds[serpentine], seconds[name])
            notes.append(f"{serpentine} / {name}, {row['point']['px']} px, {row['point']['pass']}: {ratio}.")
    return notes


# ---------------------------------------------------------------------------------------------------------------------
# The operator alone
# ---------------------------------------------------------------------------------------------------------------------


def benchmark_operator(arguments: OperatorArguments) -> Result:
    times = []
    cases = product(arguments.decays, arguments.passes, arguments.lengths)
    for decay, name, length in progress("operator", cases):
        case = operator_case(arguments, decay, length, PASSES[name])
        forms = {**{form: form for form in forms_at(length)}, SDPA: "sdpa"}
        seconds = time_cases(arguments, {label: replace(case, form=form) for label, form in forms.items()})
        times.append({"point": operator_point(case, name), "reference": SDPA, "seconds": seconds})
    return Result(operator_title(arguments, "in each form beside softmax attention (SDPA)"), times=times)


def benchmark_forms(arguments: FormsArguments) -> Result:
    times = []
    # Without decays the order of the tokens is of no account.
    kinds = [(decay, orders) for decay in arguments.decays for orders in (1, 2) if decay != "none" or orders == 1]
    for (decay, orders), name, length in progress("forms", product(kinds, arguments.passes, arguments.lengths)):
        case = replace(operator_case(arguments, decay, length, PASSES[name]), orders=orders)
        seconds = time_cases(arguments, {form: replace(case, form=form) for form in forms_at(length)})
        times.append({"point": operator_point(case, name, orders=orders), "reference": "parallel", "seconds": seconds})
    title = operator_title(arguments, "in its three forms, with one scan order and with two (serpentine)")
    return Result(title, times=times, notes=describe_crossovers(times), is_brief=True)


def describe_crossovers(times: list[dict]) -> list[str]:
    """Up to which measured length the parallel form is faster than the chunk form, and "auto" takes it."""
    notes = []
    for point, rows in group_rows(times, leave_out=("tokens", "batch")):
        compared = {row["point"]["tokens"]: row["seconds"] for row in rows if "parallel" in row["seconds"]}
        ratios = {length: paired_ratio(s["chunk"], s["parallel"])[0] for length, s in compared.items()}
        measured = max((length for length, ratio in ratios.items() if ratio > 1), default=None)
        lengths = [row["point"]["tokens"] for row in rows]
        has_decay = point["decay"] != "none"
        auto = max((length for length in lengths if choose_mode(length, has_decay) == "parallel"), default=None)
        kind = f"decay {point['decay']}, {point['orders']} scan order{'s' * (point['orders'] > 1)}, {point['pass']}"
        notes.append(f'{kind}: parallel is faster than chunk {up_to(measured)}; "auto" takes it {up_to(auto)}.')
    return notes


def up_to(length):
    return "at no length measured" if length is None else f"up to {length} tokens"


def benchmark_chunk_size(arguments: ChunkSizeArguments) -> Result:
    times, memory = [], []
    default = f"chunks of {CHUNK_SIZE}"
    for decay, name, length in progress("chunk-size", product(arguments.decays, arguments.passes, arguments.lengths)):
        case = replace(operator_case(arguments, decay, length, PASSES[name]), form="chunk")
        cases = {size: replace(case, chunk_size=size) for size in dict.fromkeys([CHUNK_SIZE, *arguments.chunk_sizes])}
        seconds = time_cases(arguments, cases)
        peaks = {size: peak_memory(one) for size, one in cases.items()}
        for rows, key, values in ((times, "seconds", seconds), (memory, "bytes", peaks)):
            for size in arguments.chunk_sizes:
                point = operator_point(case, name, **{"chunk size": size})
                rows.append(
                    {"point": point, "reference": default, key: {default: values[CHUNK_SIZE], "chunk": values[size]}}
                )
    title = operator_title(arguments, f"in chunk form, by the size of its chunks, beside chunks of {CHUNK_SIZE}")
    return Result(title, times=times, memory=memory)


def benchmark_rnn(arguments: RnnArguments) -> Result:
    times, memory = [], []
    for length in progress("time", arguments.lengths):
        case = replace(operator_case(arguments, "selective", length, False), form="rnn", normalize=True)
        seconds = time_cases(arguments, {"naive loop": replace(case, form="naive"), "rnn": case})
        times.append({"point": operator_point(case, "inference"), "reference": "naive loop", "seconds": seconds})
    for length in progress("memory", arguments.memory_lengths):
        case = replace(operator_case(arguments, "selective", length, False), heads=1)
        peaks = {form: beyond_output(replace(case, form=form)) for form in ("parallel", "rnn")}
        memory.append({"point": operator_point(case, "inference"), "reference": "parallel", "bytes": peaks})
    title = operator_title(
        arguments,
        "in rnn form beside a loop over one direction after the other with a state and a normaliser (time), and "
        "beside the parallel form with one head (memory beyond inputs and outputs)",
    )
    return Result(title, times=times, memory=memory, has_figure=False)


def beyond_output(case: OperatorCase) -> int | None:
    """Peak memory without that of the result, which is as large as the values."""
    peak = peak_memory(case)
    size = case.batch * case.heads * case.length * case.head_dim * case.setting.weights_dtype.itemsize
    return None if peak is None else max(peak - size, 0)


def benchmark_decay(arguments: DecayArguments) -> Result:
    """Equal work, so equal time, unless denormal numbers get in the way."""
    times = []
    names = {f"log-decay {g}": g for g in (WEAK_DECAY, *STRONG_DECAYS)}
    kinds = product(ATTENTION_MODES, arguments.decays, DIRECTIONS, arguments.passes, arguments.lengths)
    for form, decay, direction, name, length in progress("decay", kinds):
        case = replace(operator_case(arguments, decay, length, PASSES[name]), form=form, direction=direction)
        cases = {label: replace(case, log_decay=g) for label, g in names.items()}
        point = {"form": form, "direction": direction, **operator_point(case, name)}
        times.append({"point": point, "reference": f"log-decay {WEAK_DECAY}", **time_decays(arguments, cases)})
    worst = {form: worst_ratio(row for row in times if row["point"]["form"] == form) for form in ATTENTION_MODES}
    notes = [f"{form}: the largest ratio is {ratio:.2f}." for form, ratio in worst.items()]
    notes.append(f"The limit is {DECAY_RATIO_LIMIT}.{describe_second_measurements(times)}")
    title = operator_title(arguments, "in each form and direction under strong decays beside weak ones")
    failed = max(worst.values()) >= DECAY_RATIO_LIMIT
    return Result(title, times=times, notes=notes, has_figure=False, is_brief=True, failed=failed)


def time_decays(arguments, cases):
    """A case that reaches the limit is measured again: noise does so once, denormal numbers every time."""
    reference, *_ = cases
    seconds = time_cases(arguments, cases)
    if worst_ratio([{"reference": reference, "seconds": seconds}]) < DECAY_RATIO_LIMIT:
        return {"seconds": seconds}
    more = replace(arguments, repetitions=SECOND_MEASUREMENT * arguments.repetitions)
    return {"seconds": time_cases(more, cases), "first seconds": seconds}


def describe_second_measurements(times):
    again = sum("first seconds" in row for row in times)
    if not again:
        return ""
    return f" Of {len(times)} cases {again} reached it at first and {'were' if again > 1 else 'was'} measured again."


def worst_ratio(times: Iterable[dict]) -> float:
    """The largest median of paired ratios to the reference."""
    return max(
        paired_ratio(seconds, row["seconds"][row["reference"]])[0]
        for row in times
        for name, seconds in row["seconds"].items()
        if name != row["reference"]
    )


def operator_case(arguments, decay, length, training):
    return OperatorCase(
        form="parallel",
        decay=decay,
        length=length,
        batch=arguments.batch(length),
        heads=arguments.heads,
        head_dim=arguments.head_dim,
        training=training,
        setting=arguments.setting,
    )


def operator_point(case, name, **kind):
    return {"decay": case.decay, **kind, "pass": name, "tokens": case.length, "batch": case.batch}


def operator_title(arguments, what):
    return f"The operator alone, {arguments.heads} heads of {arguments.head_dim}, {what}."


def forms_at(length):
    return [form for form in ATTENTION_MODES if form != "parallel" or length <= PARALLEL_LONGEST]


def time_cases(arguments, cases):
    return time_calls(arguments, {label: case.prepare() for label, case in cases.items()})


def time_calls(arguments: CommonArguments, calls: dict[str, Callable]) -> dict[str, list[float]]:
    return alternate(calls, arguments.repetitions, arguments.max_seconds, arguments.device)


def progress(name, items):
    return tqdm(list(items), desc=name)


COMMANDS = {
    "model": (ModelArguments, benchmark_model),
    "images": (ImagesArguments, benchmark_images),
    "memory": (ModelArguments, benchmark_memory),
    "operator": (OperatorArguments, benchmark_operator),
    "forms": (FormsArguments, benchmark_forms),
    "chunk-size": (ChunkSizeArguments, benchmark_chunk_size),
    "rnn": (RnnArguments, benchmark_rnn),
    "flat": (FlatArguments, benchmark_flat),
    "packing": (PackingArguments, benchmark_packing),
    "floor": (FloorArguments, benchmark_floor),
    "decay": (DecayArguments, benchmark_decay),
    "readme": (ReadmeArguments, write_readme),
}


if __name__ == "__main__":
    run(main)
