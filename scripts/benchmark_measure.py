"""How scripts/benchmark.py measures: time in turn, peak memory in a fresh process, matrix products alone."""

import ctypes
import gc
import multiprocessing
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from lion_transformers.scripts.arguments import UsageError


# A call that takes longer needs no warm-up: what a first call costs beyond a later one is lost in it.
SECONDS_WITHOUT_WARM_UP = 5.0
# glibc's parameter of that name, from malloc.h.
M_MMAP_THRESHOLD = -3
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# Products of an input and a weight, with a bias or without, and the operations that have them: convolutions are of
# single pixels, or of patches that do not overlap.
LAYERS = {"convolution": "aten", "_convolution_pointwise": "mkldnn", "_linear_pointwise": "mkldnn"}


@dataclass(frozen=True)
class Setting:
    """Where and in which precision something is computed."""

    device: str = "cpu"
    dtype: str = "float32"
    autocast: bool = False
    threads: int | None = None

    @property
    def weights_dtype(self) -> torch.dtype:
        return torch.float32 if self.autocast else getattr(torch, self.dtype)

    def apply(self) -> None:
        """Use the number of threads from now on."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)

    def context(self) -> AbstractContextManager:
        return torch.autocast(self.device, getattr(torch, self.dtype)) if self.autocast else nullcontext()


# ---------------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------------


def alternate(
    calls: dict[str, Callable[[], Any]], repetitions: int, max_seconds: float, device: str = "cpu"
) -> dict[str, list[float]]:
    """Time calls in turn, a, b, a, b, …, so that what else the machine does meets them alike.

    A first round warms up. It counts where a call of it took long (`SECONDS_WITHOUT_WARM_UP`).

    Args:
        calls: name → what to time.
        repetitions: how many rounds, at most.
        max_seconds: no further round is begun that would probably end later than this after the first began; one is
            always completed.
        device: `"cpu"` or `"cuda"`, where CUDA events take the time.

    Returns:
        Name → seconds of each round; the i-th of two names are a pair.
    """
    begin = time.perf_counter()
    rounds = [_time_round(calls, device)]
    if max(rounds[0].values()) < SECONDS_WITHOUT_WARM_UP:
        rounds = []
    seconds_per_round = time.perf_counter() - begin
    while len(rounds) < repetitions:
        if rounds and time.perf_counter() - begin + seconds_per_round > max_seconds:
            break
        rounds.append(_time_round(calls, device))
    return {name: [seconds[name] for seconds in rounds] for name in calls}


def _time_round(calls, device):
    return {name: _time(call, device) for name, call in calls.items()}


def _time(call, device):
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------


class MemoryCase(Protocol):
    """What `peak_memory` measures. It is pickled."""

    setting: Setting

    def prepare(self) -> Callable[[bool], Any]:
        """Make weights and inputs. Returns the call: on a tiny input if its argument is true, else on the real one."""


def peak_memory(case: MemoryCase) -> int | None:
    """Bytes that a call needs at its peak beyond what was there before it, measured in a fresh process.

    The process is forked from one that has imported what it takes and has computed nothing. On a CPU the peak is what
    the process has resident at most (VmHWM of /proc/self/status, which is reset before the call), less what it has
    resident before. glibc is told to give every larger tensor pages of its own, and to return them at once, so that
    freed memory neither hides an allocation nor counts as one. Libraries have set themselves up before, in a call with
    a tiny input. On a GPU the peak is what PyTorch has allocated at most, less what it has before.

    Returns:
        The bytes, `None` if the process was killed: there was not enough memory.
    """
    # Forks of this process would begin with its memory and its threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lion_transformers.scripts.benchmark_cases"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(_peak_of, case).result()
        except BrokenProcessPool:
            return None


def _peak_of(case):
    if case.setting.device == "cpu":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)
    case.setting.apply()
    call = case.prepare()
    call(True)
    gc.collect()
    if case.setting.device == "cpu":
        return _peak_on_cpu(lambda: call(False))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(False)
    return torch.cuda.max_memory_allocated() - before


def _peak_on_cpu(call):
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what is resident now
    before = _resident("VmRSS")
    call()
    return _resident("VmHWM") - before


def _resident(name):
    return 1024 * int(re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


# ---------------------------------------------------------------------------------------------------------------------
# Matrix products alone
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """A tensor of a product, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Operand":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class ProductRecorder(TorchDispatchMode):
    """Records every matrix product (mm, addmm, bmm, baddbmm, also in place, oneDNN's layers) that runs inside of it.

    Other operations that multiply, linear or matmul say, are taken apart into these first. `products` holds, in
    order, each one's name, keyword arguments, and operands: `Operand`, or the tensor itself where it lies in the
    memory of one of `weights`.
    """

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.products = []
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func.overloadpacket.__name__.rstrip("_")
        if name in PRODUCTS:
            factors = {key: value for key, value in kwargs.items() if key in ("alpha", "beta")}
            self.products.append((name, factors, [self._operand(tensor) for tensor in args]))
        elif name in LAYERS:
            options = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=True)}
            tensors = [options.pop(argument.name) for argument in func._schema.arguments[:3]]
            if "attr" in options:  # the activation that comes with it is no product
                options["attr"] = "none"
            self.products.append((name, options, [self._operand(x) for x in tensors if x is not None]))
        return func(*args, **kwargs)

    def _operand(self, tensor):
        is_weight = tensor.untyped_storage().data_ptr() in self._weights
        return tensor.detach() if is_weight else Operand.of(tensor)


def record_products(call: Callable[[], Any], weights: list[torch.Tensor]) -> list[tuple]:
    """The matrix products that a call computes, see `ProductRecorder`."""
    with ProductRecorder(weights) as recorder:
        call()
    return recorder.products


def replay_products(products: list[tuple], device: str = "cpu") -> Callable[[], None]:
    """A function that computes recorded products again, in their order, and nothing else.

    Weights are the recorded ones: a model reads each layer's from memory. All other operands, and the results but
    those of layers, are buffers that are allocated here, once, with random values, shapes, strides and types as
    recorded; operands that are alike share one.
    """
    buffers = {}

    def buffer(role, operand):
        if isinstance(operand, torch.Tensor):
            return operand
        if (role, operand) not in buffers:
            buffers[role, operand] = _random_tensor(operand, device)
        return buffers[role, operand]

    calls = []
    for name, factors, operands in products:
        tensors = [buffer(role, operand) for role, operand in enumerate(operands)]
        if name in LAYERS:
            layer = getattr(getattr(torch.ops, LAYERS[name]), name)
            calls.append((layer, [*tensors, None][:3], factors))  # a bias may be missing
        else:
            shape = (*tensors[-2].shape[:-1], tensors[-1].shape[-1])
            out = buffer("out", Operand.of(torch.empty(shape, dtype=tensors[-1].dtype, device="meta")))
            calls.append((getattr(torch, name), tensors, {**factors, "out": out}))

    @torch.no_grad()
    def replay():
        for function, tensors, kwargs in calls:
            function(*tensors, **kwargs)

    return replay


def _random_tensor(operand, device):
    reach = 1 + sum((size - 1) * stride for size, stride in zip(operand.shape, operand.stride, strict=True))
    values = torch.randn(reach, device=device).to(operand.dtype)
    return values.as_strided(operand.shape, operand.stride)


def count_products(products: list[tuple]) -> list[dict[str, Any]]:
    """Shapes of recorded products and how often each comes, the largest first."""
    counts = Counter((name, tuple(tuple(operand.shape) for operand in operands)) for name, _, operands in products)
    rows = [
        {"product": name, "shapes": [list(shape) for shape in shapes], "count": count, "multiplications": size * count}
        for (name, shapes), count in counts.items()
        for size in [_multiplications(name, shapes)]
    ]
    return sorted(rows, key=lambda row: -row["multiplications"])


def _multiplications(name, shapes):
    left, width = (shapes[0], shapes[1][0]) if name in LAYERS else (shapes[-2], shapes[-1][-1])
    return torch.Size(left).numel() * width


# ---------------------------------------------------------------------------------------------------------------------
# Machine
# ---------------------------------------------------------------------------------------------------------------------


def describe_machine(device: str) -> dict[str, Any]:
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    return {**machine, "gpu": torch.cuda.get_device_name()} if device == "cuda" else machine


def _processor():
    names = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[1] if names else platform.machine()


def describe_versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def check_device(device: str) -> None:
    """Raises `UsageError` where there is no such device, or where its memory cannot be measured."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU that PyTorch can use, and there is none.")
    if not Path("/proc/self/status").exists():
        raise UsageError("the benchmark reads /proc, which this system does not have: run it on Linux.")
