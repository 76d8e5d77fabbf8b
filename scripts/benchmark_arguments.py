"""Arguments of the commands of scripts/benchmark.py."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers.hf_argparser import HfArg

from lion_transformers.scan_order_lion import SCAN_ORDERS
from lion_transformers.scripts.arguments import KeyValues, MergeKeyValues, UsageError
from lion_transformers.scripts.benchmark_cases import DECAYS
from lion_transformers.scripts.benchmark_measure import Setting


# Name: whether it is a training step.
PASSES = {"inference": False, "training": True}
# Fields of LION's configuration that other arguments set.
SET_ELSEWHERE = {
    "modality": "the command",
    "decay_type": "--decays",
    "scan_order": "--scan_orders",
    "attn_mode": "--attn_mode",
    "image_size": "--image_sizes",
    "max_position_embeddings": "--lengths",
}


def options(accepted: Iterable[str], default: Iterable[str] | None = None, *, help: str) -> dict[str, Any]:
    """What a field is that takes several of the accepted values; by default, all of them."""
    default = list(accepted if default is None else default)
    return {"default_factory": default.copy, "metadata": {"choices": list(accepted), "help": help}}


def numbers(*default: int, help: str) -> dict[str, Any]:
    return {"default_factory": list(default).copy, "metadata": {"help": help}}


@dataclass
class CommonArguments:
    output_dir: str = HfArg(default="outputs/benchmark", help="Folder for what is measured.")
    name: str | None = HfArg(default=None, help="Name of the files. Default: that of the command.")
    device: Literal["cpu", "cuda"] = HfArg(default="cpu", help="Where to compute. On cuda, events take the time.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = HfArg(
        default=None, help="Of weights and inputs. Default: float32 on cpu, bfloat16 on cuda."
    )
    autocast: bool = HfArg(default=False, help="Keep weights in float32, and compute under autocast to the dtype.")
    threads: int | None = HfArg(default=None, help="Threads on the CPU. Default: as many as PyTorch takes.")
    repetitions: int = HfArg(default=5, help="Timings of each.")
    max_seconds: float = HfArg(
        default=60.0, help="For a row of a table: as many repetitions as fit are made, one at least."
    )
    tokens: int = HfArg(default=4096, help="In a batch: it has as many sequences as fit, one at least.")

    def __post_init__(self):
        if self.name is not None and (not self.name or Path(self.name).name != self.name):
            raise UsageError(f"--name must be that of a file, without folders, got {self.name!r}.")
        self.dtype = self.dtype or {"cpu": "float32", "cuda": "bfloat16"}[self.device]
        for name, value in vars(self).items():
            values = value if isinstance(value, list) else [value]
            if any(number <= 0 for number in values if isinstance(number, int | float) and number is not False):
                raise UsageError(f"--{name} must be greater than 0.")

    @property
    def setting(self) -> Setting:
        return Setting(self.device, self.dtype, self.autocast, self.threads)

    def batch(self, length: int) -> int:
        return max(1, self.tokens // length)


@dataclass
class BaseModelArguments(CommonArguments):
    decays: list[str] = field(**options(DECAYS, help="Of the models: LION-LIT, LION-D, LION-S."))
    num_hidden_layers: list[int] | None = field(
        default=None,
        metadata={
            "help": "One number, or one for each length or image size: for long inputs fewer may do, with their share "
            "of a vocabulary. Default: all."
        },
    )
    size: str = HfArg(default="base", help="One of the paper's sizes.")
    attn_mode: Literal["auto", "parallel", "chunk", "rnn"] = HfArg(default="auto", help="Form of LION's attention.")
    config: KeyValues = field(
        default_factory=KeyValues,
        metadata={
            "action": MergeKeyValues,
            "metavar": "KEY=VALUE,…",
            "help": "Other fields of LION's configuration. The peer has the same sizes.",
        },
    )

    def __post_init__(self):
        super().__post_init__()
        for name in self.config:
            if name in SET_ELSEWHERE:
                raise UsageError(f"{name} is set by {SET_ELSEWHERE[name]}, not by --config.")


@dataclass
class ModelArguments(BaseModelArguments):
    passes: list[str] = field(**options(PASSES, help="What to measure."))
    modality: Literal["text", "image"] = HfArg(default="text", help="Text models or image models.")
    lengths: list[int] = field(**numbers(128, 512, 2048, 8192, 32768, help="Tokens of a text."))
    image_sizes: list[int] = field(**numbers(224, help="Pixels along each side of an image."))
    scan_orders: list[str] = field(**options(SCAN_ORDERS, ["raster"], help="Of image models with decays."))
    peer: Literal["bert", "vit", "modernbert", "none"] | None = HfArg(
        default=None, help="What to compare with. Default: bert for texts, vit for images."
    )

    def __post_init__(self):
        super().__post_init__()
        self.peer = self.peer or {"text": "bert", "image": "vit"}[self.modality]
        if self.peer != "none" and (self.peer == "vit") != (self.modality == "image"):
            raise UsageError(f"--peer {self.peer} reads no {self.modality}s.")


@dataclass
class ImagesArguments(BaseModelArguments):
    passes: list[str] = field(**options(PASSES, help="What to measure."))
    image_sizes: list[int] = field(**numbers(224, 512, 1024, 1536, help="Pixels along each side of an image."))
    scan_orders: list[str] = field(**options(SCAN_ORDERS, help="Of the models with decays."))
    peer: Literal["vit", "none"] = HfArg(default="vit", help="What to compare with.")
    modality = "image"


@dataclass
class BaseTextArguments(BaseModelArguments):
    """Of commands that measure LION's text models alone."""

    lengths: list[int] = field(**numbers(512, 32768, help="Tokens of a text."))
    modality, scan_orders, peer = "text", ("raster",), "none"


@dataclass
class FlatArguments(BaseTextArguments):
    passes: list[str] = field(**options(PASSES, help="What to measure."))
    tokens: int = HfArg(default=32768, help="In a batch: it has as many sequences as fit, one at least.")


@dataclass
class PackingArguments(BaseTextArguments):
    decays: list[str] = field(**options(DECAYS, ["selective"], help="Of the models: LION-LIT, LION-D, LION-S."))
    lengths: list[int] = field(**numbers(128, 512, help="Tokens of a row."))
    documents: int = HfArg(default=64, help="How many; half of them have at most a quarter of a row's tokens.")


@dataclass
class FloorArguments(BaseTextArguments):
    passes: list[str] = field(**options(PASSES, ["inference"], help="What to measure."))


@dataclass
class BaseOperatorArguments(CommonArguments):
    heads: int = HfArg(default=12, help="Attention heads.")
    head_dim: int = HfArg(default=64, help="Width of a head.")


@dataclass
class OperatorArguments(BaseOperatorArguments):
    passes: list[str] = field(**options(PASSES, help="What to measure."))
    decays: list[str] = field(**options(DECAYS, help="As LION-LIT, LION-D and LION-S have them."))
    lengths: list[int] = field(**numbers(128, 512, 2048, 8192, help="Tokens."))


@dataclass
class FormsArguments(OperatorArguments):
    lengths: list[int] = field(**numbers(32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, help="Tokens."))


@dataclass
class ChunkSizeArguments(OperatorArguments):
    chunk_sizes: list[int] = field(**numbers(16, 32, 64, 128, 256, 512, 1024, help="Tokens of a block."))
    lengths: list[int] = field(**numbers(4096, help="Tokens."))
    decays: list[str] = field(**options(DECAYS, ["selective"], help="As LION-LIT, LION-D and LION-S have them."))


@dataclass
class DecayArguments(OperatorArguments):
    decays: list[str] = field(**options(["fixed", "selective"], help="As LION-D and LION-S have them."))
    lengths: list[int] = field(**numbers(1024, help="Tokens."))
    repetitions: int = HfArg(default=9, help="Timings of each.")
    tokens: int = HfArg(default=1, help="In a batch: it has as many sequences as fit, one at least.")
    heads: int = HfArg(default=4, help="Attention heads.")


@dataclass
class RnnArguments(BaseOperatorArguments):
    lengths: list[int] = field(**numbers(1024, help="Tokens, where time is measured."))
    memory_lengths: list[int] = field(**numbers(16384, help="Tokens, where peak memory is measured, of one head."))
    tokens: int = HfArg(default=1, help="In a batch: it has as many sequences as fit, one at least.")


@dataclass
class ReadmeArguments:
    output_dir: str = HfArg(default="outputs/benchmark", help="Folder with what was measured.")
    readme: str = HfArg(default="README.md", help="File with the markers.")
