import json
import math
import os
import re
import shlex
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
from oracle import loop_attention
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_checks import fails_with

from lion_transformers import LionConfig, LionModel, modeling_lion
from lion_transformers.scripts import benchmark, benchmark_measure, benchmark_report
from lion_transformers.scripts.arguments import UsageError
from lion_transformers.scripts.benchmark_cases import ModelCase, OperatorCase, grid_of, naive_recurrence
from lion_transformers.scripts.benchmark_measure import Setting
from lion_transformers.scripts.benchmark_packing import PackingCase


ROOT = Path(__file__).parents[1]
TINY = ("--config", "hidden_size=24,num_attention_heads=2,intermediate_size=36,vocab_size=50")
TINY_OPERATOR = ("--heads", 2, "--head_dim", 4, "--repetitions", 2)
MIB = 2**20


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Run a command. Returns what it wrote as JSON."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments), "--output_dir", str(tmp_path)])
        benchmark.main()
        name = arguments[arguments.index("--name") + 1] if "--name" in arguments else arguments[0]
        return json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))

    return run


@pytest.fixture
def memory_calls(monkeypatch):
    """Cases whose memory is asked for. They run in this process, and are said to need a MiB more each time."""
    cases = []

    def peak_memory(case):
        call = case.prepare()
        call(True)
        call(False)
        cases.append(case)
        return len(cases) * MIB

    monkeypatch.setattr(benchmark, "peak_memory", peak_memory)
    return cases


def row(seconds=None, peaks=None, reference="BERT", **point):
    values = {"seconds": seconds} if peaks is None else {"bytes": peaks}
    return {
        "point": {"tokens": 512, "batch": 2, "layers": 3, "pass": "inference", **point},
        "reference": reference,
    } | values


# ---------------------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------------------


def test_ratio_is_the_median_of_pairs_with_quartiles():
    """Pairs 2, 1, 4, 3, 5; a machine that slows down half-way slows both of a pair."""
    assert benchmark_report.paired_ratio([2.0, 10.0, 40.0, 3.0, 5.0], [1.0, 10.0, 10.0, 1.0, 1.0]) == (3.0, 2.0, 4.0)
    assert benchmark_report.paired_ratio([3.0], [2.0]) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize("exponent", [1.0, 2.0, -0.5])
def test_slope_is_the_exponent_of_a_power_law(exponent):
    points = [(x, 7.0 * x**exponent) for x in (2048, 128, 8192, 512)]
    assert benchmark_report.slope(points) == pytest.approx(exponent)
    assert benchmark_report.slope(points[:2]) == pytest.approx(exponent)


def test_slope_is_that_of_the_longer_half():
    """Constant costs rule short sequences."""
    assert benchmark_report.slope([(64, 1.0), (128, 1.0), (1024, 1.0), (2048, 4.0)]) == pytest.approx(2.0)


def test_tokens_per_second_and_bytes_per_token():
    assert benchmark_report.tokens_per_second(row({"LION-S": [1.0, 2.0, 64.0]}), "LION-S") == 2 * 512 / 2.0
    assert benchmark_report.bytes_per_token(row(peaks={"LION-S": 4096}), "LION-S") == 4.0
    assert benchmark_report.bytes_per_token(row(peaks={"LION-S": None}), "LION-S") is None
    assert benchmark_report.per_sequence(row({"LION-S": [12.0]}), "LION-S") == 12.0 / (2 * 3)
    assert benchmark_report.per_sequence(row(peaks={"LION-S": 12}), "LION-S") == 6


def test_of_documents_real_tokens_count():
    """Four documents of 300 tokens in two rows of 512."""
    one = row({"padding": [4.0], "packing": [2.0]}, documents=4, **{"real tokens": 300})
    assert benchmark_report.tokens_per_second(one, "packing") == 300 / 2.0
    assert benchmark_report.per_sequence(one, "padding") == 4.0 / (4 * 3)
    assert "Real tokens per second:\n" in benchmark_report.speed_table([one])


def test_packing_is_described_by_pairs():
    shares = {"real, padded": "40%", "real, packed": "97%"}
    rows = [row({"padding": [2.0, 40.0, 3.0], "packing": [1.0, 10.0, 1.0]}, model="LION-S", **shares)]
    assert benchmark.describe_packing(rows) == [
        "LION-S, rows of 512 tokens: packing trains 3.00 (2.50 to 3.50) × as many real tokens a second as padding; "
        "97% of its tokens are real, with padding 40%."
    ]


def test_lengths_are_compared_with_512_and_among_equally_deep_models():
    """At 512 tokens 1024 tokens a second, at 2048 half of that; eight layers were measured at one length only."""
    rows = [
        row({"BERT": [9.0], "LION-S": [9.0]}, tokens=128),
        row({"BERT": [1.0], "LION-S": [1.0]}),
        row({"BERT": [1.0], "LION-S": [4.0]}, tokens=2048, batch=1),
        row({"BERT": [1.0], "LION-S": [1.0]}, tokens=8192, layers=8),
    ]
    (found,) = benchmark_report.compare_lengths(rows, benchmark_report.tokens_per_second)
    assert found == ("LION-S", {"layers": 3, "pass": "inference"}, 512, 2048, 0.5)
    assert benchmark.flat_speed(rows) == [
        "LION-S, 3 layers, inference: tokens per second at 2048 tokens are 0.50 × those at 512."
    ]


def test_lengths_in_turn_are_compared_by_pairs():
    """Twice the tokens in pairs of 2, 4, 2 times the seconds; a machine that slows down slows both of a pair."""
    rows = [
        row({"LION-S": [2.0, 40.0, 2.0]}, reference=None, tokens=2048, batch=1, layers=1),
        row({"LION-S": [1.0, 10.0, 1.0]}, reference=None, tokens=512, batch=2, layers=1),
        row({"LION-S": [7.0]}, reference=None, tokens=512, layers=1, **{"pass": "training"}),
    ]
    assert benchmark.flat_speed_in_turn(rows) == [
        "LION-S, 1 layer, inference: tokens per second at 2048 tokens are 1.00 (0.75 to 1.00) × those at 512."
    ]


def test_cost_of_the_serpentine_is_its_ratio_to_the_raster():
    times = [row({"ViT": [1.0], "LION-S": [2.0], "LION-S♮": [2.5], "LION-D": [1.0]}, reference="ViT", px=224)]
    assert benchmark.serpentine_cost(times) == ["LION-S♮ / LION-S, 224 px, inference: 1.25."]


def test_crossover_is_the_longest_length_at_which_parallel_wins(monkeypatch):
    choose_mode = lambda length, has_decay: "parallel" if length <= 256 else "chunk"  # noqa: E731
    monkeypatch.setattr(benchmark, "choose_mode", choose_mode)
    times = [
        row({"parallel": [1.0], "chunk": [ratio]}, decay="fixed", orders=2, tokens=length)
        for length, ratio in [(64, 2.0), (128, 1.1), (256, 0.7)]
    ] + [row({"chunk": [1.0]}, decay="fixed", orders=2, tokens=8192)]
    (note,) = benchmark.describe_crossovers(times)
    assert note == (
        "decay fixed, 2 scan orders, inference: parallel is faster than chunk up to 128 tokens; "
        '"auto" takes it up to 256 tokens.'
    )
    assert "at no length measured" in benchmark.describe_crossovers(times[2:])[0]


# ---------------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is told to go on."""
    now = [0.0]
    monkeypatch.setattr(benchmark_measure.time, "perf_counter", lambda: now[0])

    def taking(seconds, log=None, name=None):
        def call():
            now[0] += seconds
            if log is not None:
                log.append(name)

        return call

    return taking


def test_calls_alternate_after_a_warm_up(clock):
    log = []
    calls = {"a": clock(1.0, log, "a"), "b": clock(2.0, log, "b")}
    assert benchmark_measure.alternate(calls, 3, 1000.0) == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert log == ["a", "b"] * 4


def test_a_long_first_round_counts(clock):
    log = []
    assert benchmark_measure.alternate({"a": clock(6.0, log, "a")}, 2, 1000.0) == {"a": [6.0, 6.0]}
    assert log == ["a"] * 2


@pytest.mark.parametrize("seconds, repetitions", [(0.5, 1), (4.5, 2), (6.0, 3), (100.0, 7)])
def test_repetitions_are_those_that_fit(clock, seconds, repetitions):
    """Rounds of 1.5 s, the first to warm up; one is made in any case."""
    times = benchmark_measure.alternate({"a": clock(1.0), "b": clock(0.5)}, 7, seconds)
    assert [len(values) for values in times.values()] == [repetitions] * 2


def test_on_a_gpu_events_take_the_time(monkeypatch):
    """In milliseconds, read once the GPU is done."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def elapsed_time(self, end):
            assert log[-1] == "synchronize"
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    assert benchmark_measure.alternate({"a": lambda: log.append("a")}, 2, 1000.0, "cuda") == {"a": [0.25] * 2}
    assert log == ["record", "a", "record", "synchronize"] * 3


def test_threads_and_precision_of_a_setting():
    assert Setting(dtype="bfloat16").weights_dtype == torch.bfloat16
    assert Setting(dtype="bfloat16", autocast=True).weights_dtype == torch.float32
    with Setting(dtype="bfloat16", autocast=True).context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    threads = torch.get_num_threads()
    Setting(threads=threads + 1).apply()
    assert torch.get_num_threads() == threads + 1
    Setting(threads=threads).apply()


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allocation:
    """Holds 40 MiB at its peak. Before it more was held and freed, and 32 MiB stay all the time."""

    setting: Setting

    def prepare(self):
        weights = torch.ones(8 * MIB)
        torch.ones(32 * MIB)
        torch.ones(6 * MIB)  # from here on glibc would keep tensors up to this size in its heap

        def call(tiny):
            first = torch.ones(1 if tiny else 4 * MIB)
            kept = torch.ones(1024)
            del first  # in a heap it would leave a hole below what is kept
            return weights.sum() + kept.sum() + torch.ones(1 if tiny else 5 * MIB).add(1.0).sum()

        return call


def test_peak_memory_is_what_a_call_holds_at_most():
    assert benchmark_measure.peak_memory(Allocation(Setting())) == pytest.approx(40 * MIB, rel=0.02)


def test_layers_share_their_memory_at_inference():
    """The second one needs the first one's output beside its own; further ones add nothing."""
    two, four = (peak_of_layers(number, 4096) for number in (2, 4))
    assert four == pytest.approx(two, rel=0.02)


@pytest.mark.slow
def test_a_document_of_262144_tokens_takes_less_than_8_gib():
    """Weights of the base size take half a GiB; a tenth is left for what layers beyond the first add."""
    assert 1.1 * peak_of_layers(1, 262144) + 0.5 * 1024 * MIB < 8 * 1024 * MIB


def peak_of_layers(number, length):
    config = {"modality": "text", "size": "base", "decay_type": "selective", "attn_mode": "chunk"}
    return benchmark_measure.peak_memory(
        ModelCase({**config, "num_hidden_layers": number}, length, 1, False, Setting())
    )


def test_on_a_gpu_pytorch_knows_the_peak(monkeypatch):
    """It held 30 bytes in the tiny call, 10 are left of it, and in the real one it holds 25."""
    held = {"now": 0, "peak": 0}

    def call(tiny):
        held["peak"] = max(held["peak"], 30 if tiny else 25)
        held["now"] = 10

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(peak=held["now"]))
    case = SimpleNamespace(setting=Setting(device="cuda"), prepare=lambda: call)
    assert benchmark_measure._peak_of(case) == 25 - 10


@dataclass(frozen=True)
class Killed:
    setting: Setting

    def prepare(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_had_too_little_memory():
    assert benchmark_measure.peak_memory(Killed(Setting())) is None


def test_a_training_step_leaves_no_gradients_behind():
    """Those of the tiny call would stand in for those that the measured call allocates."""
    case = ModelCase({"modality": "text", "size": "base", **tiny_config()}, 16, 1, True, Setting())
    model = case.build()
    seen = []
    model.embeddings.word_embeddings.weight.register_hook(lambda grad: seen.append(grad.abs().sum().item()))
    case.bind(model)(True)
    assert len(seen) == 1 and seen[0] > 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_result_is_not_counted_beside_the_rnn_form(monkeypatch):
    monkeypatch.setattr(benchmark, "peak_memory", lambda case: 5000)
    case = OperatorCase("rnn", "selective", 16, 1, 2, 8, False, Setting())
    assert benchmark.beyond_output(case) == 5000 - 16 * 2 * 8 * 4


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products alone
# ---------------------------------------------------------------------------------------------------------------------


class TwoProducts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x):
        y = self.linear(x)  # (2, 4, 5)
        return torch.relu(y) @ y.mT  # (2, 4, 4)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_products_of_a_module_are_recorded(mode):
    module, x = TwoProducts(), torch.randn(2, 4, 3)
    with mode():
        products = benchmark_measure.record_products(lambda: module(x), list(module.parameters()))
    (linear, _, (bias, rows, weight)), (bmm, _, (left, right)) = products
    assert (linear, bmm) == ("addmm", "bmm")
    assert bias.data_ptr() == module.linear.bias.data_ptr() and weight.data_ptr() == module.linear.weight.data_ptr()
    assert weight.shape == (3, 5) and rows.shape == (8, 3)
    assert (left.shape, left.stride) == ((2, 4, 5), (20, 5, 1))
    assert (right.shape, right.stride, right.dtype) == ((2, 5, 4), (20, 1, 5), torch.float32)
    assert benchmark_measure.count_products([*products, products[1]]) == [
        {"product": "bmm", "shapes": [[2, 4, 5], [2, 5, 4]], "count": 2, "multiplications": 2 * 2 * 4 * 5 * 4},
        {"product": "addmm", "shapes": [[5], [8, 3], [3, 5]], "count": 1, "multiplications": 8 * 3 * 5},
    ]


@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_computed_as_convolutions_are_products(bias):
    layer, x = nn.Conv2d(3, 5, 2, stride=2, bias=bias), torch.randn(4, 3, 6, 2)
    with torch.no_grad():
        products = benchmark_measure.record_products(lambda: layer(x), list(layer.parameters()))
    again = benchmark_measure.record_products(benchmark_measure.replay_products(products), list(layer.parameters()))
    for name, options, (pixels, weight, *rest) in (*products, *again):
        assert (name, options["stride"], pixels.shape) == ("convolution", [2, 2], (4, 3, 6, 2))
        assert weight.data_ptr() == layer.weight.data_ptr() and len(rest) == bias
    assert len(products) == len(again) == 1
    (count,) = benchmark_measure.count_products(products)
    assert count["multiplications"] == (4 * 3 * 1) * (3 * 2 * 2) * 5  # patches × their values × channels


@pytest.mark.parametrize("length, name", [(20, "_linear_pointwise"), (1100, "_convolution_pointwise")])
def test_a_model_has_a_product_for_each_linear_layer(monkeypatch, length, name):
    monkeypatch.setattr(modeling_lion, "_is_mkl_slow", lambda: True)
    config = LionConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16,
        decay_type="selective", max_position_embeddings=2048,
    )  # fmt: skip
    model = LionModel(config, add_pooling_layer=False).eval()
    weights = list(model.parameters())
    with torch.inference_mode():
        products = benchmark_measure.record_products(lambda: model(torch.ones(1, length, dtype=torch.long)), weights)
        again = benchmark_measure.record_products(benchmark_measure.replay_products(products), weights)
    for recorded in (products, again):
        layers = [operands for product, _, operands in recorded if product == name]
        assert [weight.shape[0] for _, weight, _ in layers] == [24, 8, 16, 8]
        assert [weight.data_ptr() for _, weight, _ in layers] == [
            layer.weight.data_ptr()
            for block in model.layers
            for layer in (block.attention.qkv_proj, block.attention.out_proj, block.mlp.fc1, block.mlp.fc2)
        ]
    counted = {row["multiplications"] for row in benchmark_measure.count_products(products)}
    assert {length * 8 * 24, length * 8 * 16} <= counted


@pytest.mark.parametrize(
    "is_mkl_slow, length, names",
    [
        (True, 20, ["_linear_pointwise"]),
        (True, 1100, ["_linear_pointwise", "mm"]),
        (False, 20, ["addmm", "mm"]),
    ],
)
def test_a_training_step_has_two_more_products_for_each_linear_layer(monkeypatch, is_mkl_slow, length, names):
    monkeypatch.setattr(modeling_lion, "_is_mkl_slow", lambda: is_mkl_slow)
    config = LionConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16,
        decay_type="none", max_position_embeddings=2048,
    )  # fmt: skip
    model = LionModel(config, add_pooling_layer=False)
    weights, input_ids = list(model.parameters()), torch.ones(1, length, dtype=torch.long)
    forward = benchmark_measure.record_products(lambda: model(input_ids), weights)
    products = benchmark_measure.record_products(lambda: model(input_ids)[0].sum().backward(), weights)
    again = benchmark_measure.record_products(benchmark_measure.replay_products(products), weights)

    def multiplications(recorded):
        return sum(r["multiplications"] for r in benchmark_measure.count_products(recorded) if r["product"] in names)

    of_layers = length * 8 * (3 * 8 + 8 + 16 + 16)
    assert multiplications(products) - multiplications(forward) == 2 * of_layers
    assert multiplications(again) == multiplications(products)


def test_products_of_the_backward_pass_are_recorded():
    """Two for each factor that needs a gradient; the input of the linear layer needs none."""
    module, x = TwoProducts(), torch.randn(2, 4, 3)
    products = benchmark_measure.record_products(lambda: module(x).sum().backward(), list(module.parameters()))
    assert [name for name, *_ in products] == ["addmm", "bmm", "bmm", "bmm", "mm"]


def test_products_are_replayed_in_order_and_nothing_else():
    module, x = TwoProducts(), torch.randn(2, 4, 3)
    weights = list(module.parameters())
    with torch.no_grad():
        products = benchmark_measure.record_products(lambda: module(x), weights)
    again = benchmark_measure.record_products(benchmark_measure.replay_products(products), weights)
    assert [name for name, *_ in again] == ["addmm", "bmm"]
    for (_, _, before), (_, _, after) in zip(products, again, strict=True):
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_products_are_replayed_on_their_device():
    products = benchmark_measure.record_products(lambda: torch.randn(2, 3) @ torch.randn(3, 4), [])
    with DeviceSpy() as spy:
        benchmark_measure.replay_products(products, "meta")()
    assert spy.devices == {"meta"}


def test_products_in_place_and_their_factors_are_replayed():
    state, k, v = torch.randn(2, 3, 4), torch.randn(2, 3, 1), torch.randn(2, 1, 4)
    products = benchmark_measure.record_products(lambda: state.baddbmm_(k, v, beta=0.5, alpha=2.0), [state, k, v])
    before = state.clone()
    assert [(name, factors) for name, factors, _ in products] == [("baddbmm", {"beta": 0.5, "alpha": 2.0})]
    benchmark_measure.replay_products(products)()
    assert torch.equal(state, before)  # the result has a buffer of its own


# ---------------------------------------------------------------------------------------------------------------------
# What is measured
# ---------------------------------------------------------------------------------------------------------------------


def tiny_config(**fields):
    sizes = {"hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 36, "num_hidden_layers": 2}
    return {**sizes, "vocab_size": 50, **fields}


@pytest.mark.parametrize("length", [1, 17])
def test_naive_loop_is_the_operator(length):
    case = OperatorCase("naive", "selective", length, 2, 2, 4, False, Setting(), normalize=True)
    (q, k, v, _), _, _ = case.make_inputs(length)
    g = -torch.rand(2, 2, length)
    expected = loop_attention(q, k, v, g, normalize=True)
    assert (naive_recurrence(q, k, v, g) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("form", ["parallel", "chunk", "rnn", "naive"])
def test_cases_of_the_operator_compute_the_same(form):
    case = OperatorCase(form, "selective", 40, 2, 2, 4, False, Setting(), normalize=True, chunk_size=16)
    inputs, _, scan = case.make_inputs(40)
    assert (inputs[3] == -0.05).all() and scan is None
    expected = loop_attention(*inputs, normalize=True)
    assert (case.compute(*inputs) - expected).abs().max() < 1e-5


def test_the_other_computes_softmax_attention():
    case = OperatorCase("sdpa", "none", 5, 1, 2, 4, False, Setting())
    (q, k, v, _), _, _ = case.make_inputs(5)
    expected = (q @ k.mT / 2.0).softmax(-1) @ v
    assert torch.allclose(case.compute(q, k, v, None), expected, atol=1e-6)


def test_strong_and_weak_decays_differ_in_nothing_else():
    case = OperatorCase("chunk", "selective", 8, 1, 2, 4, False, Setting())
    for decay, shape in {"fixed": (2,), "selective": (1, 2, 8)}.items():
        strong, weak = (replace(case, decay=decay, log_decay=strength).make_inputs(8)[0] for strength in (-5.0, -0.01))
        assert all(torch.equal(x, y) for x, y in zip(strong[:3], weak[:3], strict=True))
        assert strong[3].shape == weak[3].shape == shape
        assert (strong[3] == -5).all() and (weak[3] == torch.tensor(-0.01)).all()


def test_two_scan_orders_walk_a_grid():
    assert [grid_of(n) for n in (12, 16, 7, 1024)] == [(3, 4), (4, 4), (1, 7), (32, 32)]
    case = OperatorCase("chunk", "fixed", 12, 1, 2, 4, False, Setting(), orders=2)
    (*_, log_decay), _, scan = case.make_inputs(12)
    assert log_decay.shape == (2, 2) and scan.order[0].tolist() == [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10, 11]


@pytest.mark.parametrize("peer", [None, "bert", "modernbert"])
def test_text_models_have_the_same_sizes(peer):
    config = {"modality": "text", "size": "base", "decay_type": "none", **tiny_config(num_hidden_layers=3)}
    case = ModelCase(config, 600, 2, False, Setting(dtype="bfloat16"), peer)
    model = case.build()
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    assert [getattr(model.config, name) for name in names] == [24, 3, 2, 50]
    assert model.config.max_position_embeddings == 600 and (case.tokens, case.layers) == (600, 3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    if peer is not None:
        assert model.config._attn_implementation == "sdpa"
    dense = [p.numel() for name, p in model.named_parameters() if p.ndim == 2 and re.search(r"layers?\.", name)]
    assert sum(dense) == 3 * (4 * 24 * 24 + 2 * 24 * 36)
    case.bind(model)(False)


class DeviceSpy(TorchDispatchMode):
    """Where tensors lie that anything is computed from; numbers may come from anywhere."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = tree_leaves((args, kwargs or {}))
        self.devices |= {x.device.type for x in found if isinstance(x, torch.Tensor) and x.ndim > 0}
        return func(*args, **(kwargs or {}))


ELSEWHERE = Setting(device="meta", dtype="bfloat16")


def model_elsewhere(modality, peer=None, **config):
    config = {"modality": modality, "size": "base", "decay_type": "selective", **tiny_config(), **config}
    return ModelCase(config, {"text": 100, "image": 48}[modality], 2, True, ELSEWHERE, peer)


@pytest.mark.parametrize(
    "case",
    [
        *[
            OperatorCase(form, "selective", 150, 2, 2, 8, True, ELSEWHERE)
            for form in ("parallel", "chunk", "rnn", "sdpa")
        ],
        OperatorCase("naive", "selective", 9, 2, 2, 8, False, ELSEWHERE),
        OperatorCase("chunk", "fixed", 150, 2, 2, 8, True, ELSEWHERE, orders=2),
        *[model_elsewhere("text", peer) for peer in (None, "bert", "modernbert")],
        *[model_elsewhere("image", peer) for peer in (None, "vit")],
        model_elsewhere("image", scan_order="serpentine"),
    ],
    ids=lambda case: getattr(case, "form", None) or f"{case.label}-{case.config['modality']}",
)
def test_everything_is_computed_on_the_device(case):
    """One that holds no data stands for a GPU."""
    call = case.prepare()
    call(True)
    call(False)  # scan orders are made once, on the CPU
    with DeviceSpy() as spy:
        call(False)
    assert spy.devices == {"meta"}


def test_image_models_see_as_many_tokens():
    config = {"modality": "image", "size": "tiny", "decay_type": "fixed", **tiny_config(), "scan_order": "serpentine"}
    case = ModelCase(config, 48, 2, False, Setting())
    assert (case.label, case.tokens) == ("LION-D♮", 10)
    for one in (case, replace(case, peer="vit")):
        model = one.build()
        states = model(torch.zeros(1, 3, 48, 48)) if one.peer else model(pixel_values=torch.zeros(1, 3, 48, 48))
        assert states.last_hidden_state.shape == (1, 10, 24)
        one.bind(model)(True)


@pytest.fixture(scope="module")
def packing_case():
    config = {"modality": "text", "size": "base", "decay_type": "selective", **tiny_config(vocab_size=300)}
    return PackingCase(ModelCase(config, 64, 4, True, Setting()), documents=64)


def test_documents_are_of_mixed_length(packing_case):
    """With [CLS] and [SEP] each fits into a row, some fill one, and half of them would leave three quarters empty."""
    lengths = [len(text) + 2 for text in packing_case.texts]
    assert len(lengths) == 64 and min(lengths) > 2 and max(lengths) == 64
    assert 20 < sum(length <= 16 for length in lengths) < 44


def test_the_same_documents_are_padded_and_packed(packing_case):
    """Padding goes to the longest of a batch of four, packing leaves next to none."""
    lengths = [len(text) + 2 for text in packing_case.texts]
    real, padded = packing_case.count_tokens(packing=False)
    assert real == sum(lengths)
    assert padded == sum(4 * max(lengths[start : start + 4]) for start in range(0, 64, 4))
    real, packed = packing_case.count_tokens(packing=True)
    assert real == sum(lengths)
    assert packed % 64 == 0 and real / packed > 0.9


def count_documents(batch):
    if "position_ids" not in batch:
        return len(batch["input_ids"])
    return int((batch["position_ids"] == 0)[batch["attention_mask"] == 1].sum())


@pytest.mark.parametrize("packing", [False, True])
def test_a_pass_trains_on_every_batch(packing_case, packing):
    """Packed documents are kept apart by positions that restart. No gradients are left behind."""
    model = packing_case.build()
    batches, steps = [], []
    model.register_forward_pre_hook(lambda _, args, kwargs: batches.append(kwargs), with_kwargs=True)
    model.get_output_embeddings().bias.register_hook(lambda grad: steps.append(grad.abs().sum().item()))
    call = packing_case.bind(model, packing)
    call()
    assert sum(count_documents(batch) for batch in batches) == 64
    assert len(steps) == len(batches) and min(steps) > 0
    assert all(("position_ids" in batch) == packing for batch in batches)
    assert all(parameter.grad is None for parameter in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------------------------------


def test_fewer_layers_have_their_share_of_the_vocabulary():
    assert benchmark.fewer_layers("base", "text", 3) == {"num_hidden_layers": 3, "vocab_size": 30522 // 4}
    assert benchmark.fewer_layers("large", "text", 6) == {"num_hidden_layers": 6, "vocab_size": 30522 // 4}
    assert benchmark.fewer_layers("base", "image", 6) == {"num_hidden_layers": 6}


def test_model_compares_every_decay_with_the_peer(bench, tmp_path, capsys):
    layers = ("--num_hidden_layers", 2, 1)
    result = bench("model", *TINY, "--lengths", 8, 32, *layers, "--tokens", 32, "--repetitions", 2, "--name", "small")
    points = [tuple(each["point"].values()) for each in result["times"]]
    assert points == [(8, 4, 2, "inference"), (8, 4, 2, "training"), (32, 1, 1, "inference"), (32, 1, 1, "training")]
    for each in result["times"]:
        assert list(each["seconds"]) == ["BERT", "LION-LIT", "LION-D", "LION-S"] and each["reference"] == "BERT"
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in each["seconds"].values())
    assert result["settings"]["lengths"] == [8, 32] and result["settings"]["dtype"] == "float32"
    assert result["versions"]["torch"] == torch.__version__
    assert result["machine"]["threads"] == torch.get_num_threads() and result["machine"]["memory_gib"] > 0
    assert result["machine"]["processor"] in Path("/proc/cpuinfo").read_text()
    assert matplotlib.image.imread(tmp_path / "small.png").std() > 0.05
    report = (tmp_path / "small.md").read_text(encoding="utf-8")
    assert report in capsys.readouterr().out
    assert (
        "| tokens | batch | layers | pass | LION-LIT / BERT | LION-D / BERT | LION-S / BERT | repetitions |" in report
    )


def test_model_of_images_in_half_precision(bench):
    options = ("--modality", "image", "--image_sizes", 32, "--num_hidden_layers", 1, "--decays", "fixed")
    result = bench("model", *TINY, *options, "--dtype", "bfloat16", "--autocast", "--repetitions", 1, "--tokens", 5)
    assert {name for each in result["times"] for name in each["seconds"]} == {"ViT", "LION-D"}
    assert result["times"][0]["point"] == {"px": 32, "tokens": 5, "batch": 1, "layers": 1, "pass": "inference"}


def test_model_beside_modernbert(bench):
    result = bench(
        "model", *TINY, "--peer", "modernbert", "--lengths", 8, "--num_hidden_layers", 1, "--repetitions", 1
    )
    assert all(list(each["seconds"])[:2] == ["ModernBERT", "LION-LIT"] for each in result["times"])


def test_model_without_peer_reports_tokens_per_second(bench, tmp_path):
    options = ("--peer", "none", "--decays", "selective", "--attn_mode", "rnn", "--num_hidden_layers", 1)
    bench("model", *TINY, *options, "--lengths", 8, "--repetitions", 1)
    report = (tmp_path / "model.md").read_text(encoding="utf-8")
    assert "Tokens per second" in report and "ratio" not in report


def test_memory_measures_a_process_for_each_point(bench, memory_calls):
    options = ("--decays", "selective", "--lengths", 16, 8, "--num_hidden_layers", 1, "--attn_mode", "chunk")
    result = bench("memory", *TINY, *options, "--tokens", 16)
    assert [(each["point"]["tokens"], each["point"]["pass"]) for each in result["memory"]] == [
        *[(16, "inference"), (16, "training"), (8, "inference"), (8, "training")]
    ]
    assert [case.label for case in memory_calls] == ["BERT", "LION-S"] * 4
    assert memory_calls[1].config["attn_mode"] == "chunk"
    assert result["memory"][1]["bytes"] == {"BERT": 3 * MIB, "LION-S": 4 * MIB}
    assert result["notes"][0] == "LION-S, 1 layer, inference: bytes per token at 16 tokens are 0.33 × those at 8."


def test_images_measure_time_and_memory_in_all_scan_orders(bench, memory_calls, tmp_path):
    options = ("--image_sizes", 32, 48, "--num_hidden_layers", 1, "--passes", "inference", "--repetitions", 1)
    result = bench("images", *TINY, *options, "--decays", "none", "selective")
    names = ["ViT", "LION-LIT", "LION-S", "LION-S♮", "LION-S Hilbert"]
    assert [list(each["seconds"]) for each in result["times"]] == [names] * 2
    assert [list(each["bytes"]) for each in result["memory"]] == [names] * 2
    assert sum("LION-S♮ / LION-S" in note for note in result["notes"]) == 2
    assert matplotlib.image.imread(tmp_path / "images.png").std() > 0.05


def test_flat_takes_the_lengths_in_turn(bench, monkeypatch, tmp_path):
    """One model for both, whose positions are enough for the longer (the table has 512 at least); as many tokens."""
    calls = []
    bind = ModelCase.bind

    def spy(case, model):
        call = bind(case, model)
        return lambda: (calls.append((case.label, case.length, case.batch, case.training, id(model))), call())

    monkeypatch.setattr(ModelCase, "bind", spy)
    result = bench("flat", *TINY, "--lengths", 8, 520, "--tokens", 520, "--num_hidden_layers", 1, "--repetitions", 2)
    names = ["LION-LIT", "LION-D", "LION-S"]
    for start, training in ((0, False), (18, True)):
        for place, name in enumerate(names):
            of_one = calls[start + 6 * place : start + 6 * place + 6]
            assert [call[:4] for call in of_one] == [(name, 8, 65, training), (name, 520, 1, training)] * 3
            assert len({model for *_, model in of_one}) == 1
    points = [tuple(each["point"].values()) for each in result["times"]]
    assert points == [
        (8, 65, 1, "inference"),
        (520, 1, 1, "inference"),
        (8, 65, 1, "training"),
        (520, 1, 1, "training"),
    ]
    assert all(
        {name: len(s) for name, s in each["seconds"].items()} == dict.fromkeys(names, 2) for each in result["times"]
    )
    assert [note.split(":")[0] for note in result["notes"][::3]] == [
        "LION-LIT, 1 layer, inference",
        "LION-LIT, 1 layer, training",
    ]
    assert "Tokens per second" in (tmp_path / "flat.md").read_text(encoding="utf-8")


def test_packing_is_compared_with_padding(bench, tmp_path):
    options = ("--config", "vocab_size=300", "--num_hidden_layers", 1, "--lengths", 32, 64, "--tokens", 128)
    result = bench("packing", *TINY, *options, "--documents", 16, "--decays", "fixed", "selective", "--repetitions", 2)
    points = [each["point"] for each in result["times"]]
    assert [(point["model"], point["tokens"], point["batch"]) for point in points] == [
        *[("LION-D", 32, 4), ("LION-S", 32, 4), ("LION-D", 64, 2), ("LION-S", 64, 2)]
    ]
    assert all(
        {name: len(s) for name, s in each["seconds"].items()} == {"padding": 2, "packing": 2}
        for each in result["times"]
    )
    assert {each["reference"] for each in result["times"]} == {"padding"} and len(result["notes"]) == 4
    assert points[0]["real tokens"] < points[2]["real tokens"] and points[0]["documents"] == 16
    assert matplotlib.image.imread(tmp_path / "packing.png").std() > 0.05
    assert "packing / padding" in (tmp_path / "packing.md").read_text(encoding="utf-8")


def test_operator_compares_every_form_with_softmax_attention(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "PARALLEL_LONGEST", 8)
    result = bench("operator", *TINY_OPERATOR, "--lengths", 8, 16, "--tokens", 16)
    assert [list(each["seconds"]) for each in result["times"][:2]] == [
        ["parallel", "chunk", "rnn", "SDPA"],
        ["chunk", "rnn", "SDPA"],
    ]
    assert len(result["times"]) == 3 * 2 * 2 and result["times"][0]["point"]["batch"] == 2
    assert (tmp_path / "operator.png").exists()


def test_forms_compares_them_by_the_number_of_scan_orders(bench, tmp_path, capsys):
    result = bench("forms", *TINY_OPERATOR, "--lengths", 8, 16, "--passes", "inference", "--tokens", 16)
    kinds = [(each["point"]["decay"], each["point"]["orders"]) for each in result["times"][::2]]
    assert kinds == [("none", 1), ("fixed", 1), ("fixed", 2), ("selective", 1), ("selective", 2)]
    assert all(set(each["seconds"]) == {"parallel", "chunk", "rnn"} for each in result["times"])
    assert (tmp_path / "forms.png").exists()
    assert capsys.readouterr().out.count("parallel is faster than chunk") == 5


def test_chunk_size_measures_time_and_memory(bench, memory_calls, tmp_path):
    options = ("--lengths", 32, "--chunk_sizes", 16, 32, "--tokens", 32)
    result = bench("chunk-size", *TINY_OPERATOR, *options)
    assert [case.chunk_size for case in memory_calls] == [64, 16, 32] * 2
    assert [each["point"]["chunk size"] for each in result["times"]] == [16, 32] * 2
    assert [each["bytes"] for each in result["memory"][:2]] == [
        {"chunks of 64": 1 * MIB, "chunk": 2 * MIB},
        {"chunks of 64": 1 * MIB, "chunk": 3 * MIB},
    ]
    assert (tmp_path / "chunk-size.png").exists()


def test_rnn_is_compared_with_a_naive_loop_and_the_parallel_form(bench, memory_calls):
    result = bench("rnn", *TINY_OPERATOR, "--lengths", 8, "--memory_lengths", 16)
    (times,), (memory,) = result["times"], result["memory"]
    assert list(times["seconds"]) == ["naive loop", "rnn"] and times["reference"] == "naive loop"
    assert [(case.form, case.length, case.heads) for case in memory_calls] == [("parallel", 16, 1), ("rnn", 16, 1)]
    assert memory["bytes"]["rnn"] == 2 * MIB - 16 * 4 * 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_naive_loop_in_low_precision(bench, memory_calls, dtype):
    bench("rnn", *TINY_OPERATOR, "--lengths", 8, "--memory_lengths", 16, "--dtype", dtype)


def test_floor_compares_models_with_their_products(bench):
    options = ("--lengths", 8, 16, "--num_hidden_layers", 2, 1, "--decays", "fixed", "--repetitions", 2)
    result = bench("floor", *TINY, *options, "--passes", "inference", "training", "--tokens", 16)
    assert [list(each["seconds"]) for each in result["times"]] == [["products", "model"]] * 4
    products = {str(each["shapes"]): each["count"] for each in result["times"][0]["products"]}
    assert products["[[16, 24], [72, 24], [72]]"] == 2  # queries, keys and values of both layers
    assert products["[[16, 24], [36, 24], [36]]"] == 2
    assert len(result["times"][1]["products"]) > len(products)


@pytest.fixture
def decay_ratios(monkeypatch):
    """Of the first measurement of the strongest decay and of the second. Repetitions that were asked for are kept."""

    def measured(first, second=None):
        asked = []

        def time_cases(arguments, cases):
            ratio = first if arguments.repetitions == 9 else second
            asked.append(arguments.repetitions)
            return dict(zip(cases, ([1.0], [1.0], [ratio]), strict=True))

        monkeypatch.setattr(benchmark, "time_cases", time_cases)
        return asked

    return measured


DECAY_CASES = 3 * 3 * 2 * 2  # forms, directions, kinds of decays, passes


def test_decay_below_its_limit(bench, decay_ratios):
    asked = decay_ratios(1.19)
    result = bench("decay")
    assert asked == [9] * DECAY_CASES and not result["failed"]
    kinds = {tuple(each["point"][key] for key in ("form", "direction", "decay", "pass")) for each in result["times"]}
    assert len(kinds) == DECAY_CASES
    assert result["notes"][-2:] == ["rnn: the largest ratio is 1.19.", "The limit is 1.2."]


def test_decay_at_its_limit_is_measured_again(bench, decay_ratios):
    """Noise: the second measurement counts, the first one is kept."""
    asked = decay_ratios(1.2, 1.1)
    result = bench("decay")
    assert asked == [9, 36] * DECAY_CASES and not result["failed"]
    assert result["times"][0]["seconds"]["log-decay -5.0"] == [1.1]
    assert result["times"][0]["first seconds"]["log-decay -5.0"] == [1.2]
    assert result["notes"][-2] == "rnn: the largest ratio is 1.10."
    assert result["notes"][-1].endswith("Of 36 cases 36 reached it at first and were measured again.")


@pytest.mark.parametrize("second", [1.2, math.inf])
def test_decay_fails_at_its_limit(bench, decay_ratios, tmp_path, second):
    decay_ratios(3.0, second)
    with pytest.raises(SystemExit, match="1"):
        bench("decay")
    assert json.loads((tmp_path / "decay.json").read_text(encoding="utf-8"))["failed"]


def test_decay_times_every_strength(bench, monkeypatch):
    monkeypatch.setattr(benchmark, "DECAY_RATIO_LIMIT", math.inf)
    result = bench("decay", *TINY_OPERATOR, "--lengths", 8)
    assert all([len(s) for s in each["seconds"].values()] == [2, 2, 2] for each in result["times"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["forms", "--repetitions", 0], "--repetitions must be greater than 0"),
        (["model", "--lengths", 8, -1], "--lengths must be greater than 0"),
        (["modle"], "there is no command modle: did you mean model"),
        (["model", "--length", 8], "unknown argument --length: did you mean lengths"),
        (["model", "--decays", "strong"], "invalid choice: 'strong'"),
        (["model", "--peer", "vit"], "--peer vit reads no texts"),
        (["model", "--modality", "image", "--peer", "bert"], "--peer bert reads no images"),
        (["model", "--num_hidden_layers", 1, 2], "one for each of 5 inputs"),
        (["model", "--size", "huge"], "there is no such model: `size` must be one of 'base'"),
        (["model", "--config", "hidden_size=7"], "(?s)there is no such model: .*must be a multiple"),
        (["model", "--config", "decay_type=none"], "decay_type is set by --decays"),
        (["model", "--name", "folder/name"], "--name must be that of a file, without folders, got 'folder/name'"),
        (["model", "--name", ""], "--name must be that of a file, without folders, got ''"),
        (
            ["model", "--modality", "image", "--image_sizes", 224, 8],
            "--image_sizes must be at least ViT's patches, 16, got 8",
        ),
        (["flat", "--lengths", 512], "--lengths must be several"),
        (["packing", *TINY], "vocab_size must be 261 at least"),
    ],
)
def test_what_cannot_be_is_refused(bench, arguments, message):
    with pytest.raises(UsageError, match=message):
        bench(*arguments)


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(benchmark, "COMMANDS", {"model": (benchmark.ModelArguments, pytest.fail)})
    error = fails_with(benchmark, monkeypatch, capsys, "model", "--output_dir", tmp_path / folder)
    assert f"error: cannot write into output_dir {tmp_path / folder}: " in error


def test_a_readme_that_is_not_there_is_refused(monkeypatch, tmp_path):
    with pytest.raises(UsageError, match=r"there is no file .*nothing\.md"):
        write_readme(monkeypatch, tmp_path / "nothing.md")


def test_without_a_gpu_cuda_is_refused(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="--device cuda needs a GPU"):
        bench("model", "--device", "cuda")


def test_commands_of_the_makefile_are_ones():
    """Every line is understood, and the README shows what `make bench` measures."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    on_gpu = re.search(r"^ON_GPU := (.*)$", text, re.MULTILINE)[1]
    parsed = {}
    for target, recipe in re.findall(r"^(bench[a-z-]*): install\n((?:\t.*\n)+)", text, re.MULTILINE):
        recipe = recipe.replace("$(ON_GPU)", on_gpu).replace("$$form", "chunk")
        lines = re.findall(r"\$\(BENCHMARK\) ([^;&|\n]*)", recipe)
        parsed[target] = [benchmark.parse_command(shlex.split(line)) for line in lines]
    assert list(parsed) == ["bench", "bench-long", "bench-gpu"] and all(parsed.values())
    assert {arguments.device for _, arguments in parsed["bench-gpu"]} == {"cuda"}
    measured = [arguments.name or name for name, arguments in parsed["bench"] if name != "readme"]
    shown = re.findall(r"^<!-- benchmark: (\S+) -->$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(set(measured)) == len(measured) and set(shown) == set(measured)


# ---------------------------------------------------------------------------------------------------------------------
# Tables, figures, README
# ---------------------------------------------------------------------------------------------------------------------


def make_result(**fields):
    return {
        "title": "Text models.",
        "settings": {"dtype": "float32", "autocast": False},
        "machine": {"processor": "Abacus", "threads": 2},
        "versions": {"torch": "2.14"},
        "times": [],
        "memory": [],
        "notes": [],
        "has_figure": False,
        "is_brief": False,
        **fields,
    }


def test_report_holds_ratios_speeds_memory_and_notes():
    result = make_result(
        times=[
            row({"BERT": [1.0, 2.0, 4.0], "LION-S": [2.0, 2.0, 2.0]}),
            row({"LION-S": [4.0]}, tokens=8192, batch=1),
        ],
        memory=[row(peaks={"BERT": 4 * MIB, "LION-S": MIB}), row(peaks={"BERT": None, "LION-S": MIB}, tokens=8192)],
        notes=["All is well."],
    )
    assert (
        benchmark_report.make_report(result)
        == """Text models. Abacus, 2 threads; float32; torch 2.14.

Time, median of paired ratios (quartiles):

| tokens | batch | layers | pass | LION-S / BERT | repetitions |
| --- | --- | --- | --- | --- | --- |
| 512 | 2 | 3 | inference | 1.00 (0.75 to 1.50) | 3 |
| 8192 | 1 | 3 | inference | – | 1 |

Tokens per second:

| tokens | batch | layers | pass | BERT | LION-S |
| --- | --- | --- | --- | --- | --- |
| 512 | 2 | 3 | inference | 512 | 512 |
| 8192 | 1 | 3 | inference | – | 2,048 |

Peak memory, MiB (ratio):

| tokens | batch | layers | pass | BERT | LION-S |
| --- | --- | --- | --- | --- | --- |
| 512 | 2 | 3 | inference | 4.0 | 1.0 (0.25) |
| 8192 | 2 | 3 | inference | out of memory | 1.0 |

- All is well.
"""
    )
    brief = benchmark_report.make_report(result, with_tables=False)
    assert brief == "Text models. Abacus, 2 threads; float32; torch 2.14.\n\n- All is well.\n"


def test_report_names_the_gpu_and_autocast():
    machine = {"processor": "Abacus", "threads": 2, "gpu": "Big GPU"}
    result = make_result(machine=machine, settings={"dtype": "bfloat16", "autocast": True})
    assert benchmark_report.describe(result) == (
        "Text models. Big GPU; float32 weights under autocast to bfloat16; torch 2.14.\n"
    )


def test_figure_has_a_panel_for_each_pass_and_slopes_in_its_legend(monkeypatch, tmp_path):
    """BERT's time is quadratic by sequence and layer, LION's linear, whatever the batches and layers."""
    panels = {}
    plot_panel = benchmark_report.plot_panel

    def spy(axes, rows, key):
        plot_panel(axes, rows, key)
        panels[key["what"], key["pass"]] = axes

    monkeypatch.setattr(benchmark_report, "plot_panel", spy)
    times = [
        row({"BERT": [n * n * b * m], "LION-S": [5.0 * n * b * m]}, tokens=n, batch=b, layers=m, **{"pass": name})
        for name in ("inference", "training")
        for n, b, m in [(128, 4, 12), (512, 1, 12), (2048, 1, 1)]
    ]
    memory = [row(peaks={"BERT": 100 * n * b, "LION-S": None}, tokens=n, batch=b) for n, b in [(128, 8), (512, 2)]]
    benchmark_report.plot(make_result(times=times, memory=memory), tmp_path / "figure.png")
    assert list(panels) == [("times", "inference"), ("times", "training"), ("memory", "inference")]
    axes = panels["times", "training"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["BERT, slope 2.00", "LION-S, slope 1.00"]
    assert axes.lines[1].get_xydata().tolist() == [[n, 5.0 * n] for n in (128, 512, 2048)]
    assert [text.get_text() for text in panels["memory", "inference"].get_legend().get_texts()] == ["BERT, slope 1.00"]
    assert matplotlib.image.imread(tmp_path / "figure.png").std() > 0.05


@pytest.fixture
def readme(tmp_path):
    file = tmp_path / "README.md"
    marked = "".join(f"<!-- benchmark: {name} -->\nold\n<!-- end of benchmark: {name} -->\n\n" for name in ("b", "a"))
    file.write_text(f"Before.\n\n{marked}After.\n", encoding="utf-8")
    return file


def write_readme(monkeypatch, readme):
    arguments = ["readme", "--readme", str(readme), "--output_dir", str(readme.parent)]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    benchmark.main()


def test_readme_gets_tables_and_figures_between_its_markers(monkeypatch, readme):
    times = [row({"BERT": [2.0], "LION-S": [1.0]}, tokens=n) for n in (128, 512)]
    curves, brief = make_result(times=times, has_figure=True), make_result(times=times, is_brief=True, notes=["Fast."])
    for name, result in {"a": curves, "b": brief}.items():
        (readme.parent / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")
    write_readme(monkeypatch, readme)
    text, figures = readme.read_text(encoding="utf-8"), readme.parent / "model_cards" / "figures"
    head = "Text models. Abacus, 2 threads; float32; torch 2.14.\n"
    assert text == (
        f"Before.\n\n<!-- benchmark: b -->\n{head}\n- Fast.\n\n<!-- end of benchmark: b -->\n\n"
        f"<!-- benchmark: a -->\n{benchmark_report.make_report(curves)}\n"
        "![Text models.](model_cards/figures/a.png)\n\n<!-- end of benchmark: a -->\n\nAfter.\n"
    )
    assert [path.name for path in figures.iterdir()] == ["a.png"]
    figure = (figures / "a.png").read_bytes()
    write_readme(monkeypatch, readme)
    assert readme.read_text(encoding="utf-8") == text and (figures / "a.png").read_bytes() == figure


def test_readme_shows_only_what_was_measured(monkeypatch, readme):
    before = readme.read_text(encoding="utf-8")
    (readme.parent / "a.json").write_text(json.dumps(make_result()), encoding="utf-8")
    with pytest.raises(UsageError, match=r"has not been measured: \S+b\.json"):
        write_readme(monkeypatch, readme)
    assert readme.read_text(encoding="utf-8") == before


@pytest.mark.parametrize(
    "text", ["None.\n", "<!-- benchmark: a -->\n", "<!-- benchmark: a -->\n<!-- end of benchmark: b -->\n"]
)
def test_readme_without_pairs_of_markers_is_refused(monkeypatch, readme, text):
    readme.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="needs lines <!-- benchmark: NAME -->"):
        write_readme(monkeypatch, readme)
