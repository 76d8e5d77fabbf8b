"""What scripts/benchmark.py measures: whole models, their peers, the operator alone."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, BertConfig, ModernBertConfig, PreTrainedConfig, PreTrainedModel, ViTConfig

from lion_transformers import LionConfig, lion_attention
from lion_transformers.scan_order_lion import get_scan
from lion_transformers.scripts.benchmark_measure import Setting


PEERS = {"bert": "BERT", "modernbert": "ModernBERT", "vit": "ViT"}
DECAYS = {"none": "LION-LIT", "fixed": "LION-D", "selective": "LION-S"}
SCAN_SUFFIXES = {"raster": "", "serpentine": "♮", "hilbert": " Hilbert"}
TINY_LENGTH = 8


@dataclass(frozen=True)
class ModelCase:
    """A base model with random weights, and how much it is given.

    Args:
        config: fields of the LION model's configuration, `modality` and `size` ("base", …) among them.
        length: tokens of a text, or pixels along each side of an image.
        batch: sequences or images.
        training: a training step instead of inference.
        setting: device and precision.
        peer: key of `PEERS`, of the model to build in LION's place.
    """

    config: dict[str, Any]
    length: int
    batch: int
    training: bool
    setting: Setting
    peer: str | None = None

    @property
    def label(self) -> str:
        if self.peer is not None:
            return PEERS[self.peer]
        return DECAYS[self.config["decay_type"]] + SCAN_SUFFIXES[self.config.get("scan_order", "raster")]

    @property
    def tokens(self) -> int:
        """In a sequence."""
        config = self.lion_config()
        if config.modality == "text":
            return self.length
        rows, columns = config.patch_grid
        return rows * columns + config.use_cls_token

    @property
    def layers(self) -> int:
        return self.lion_config().num_hidden_layers

    def lion_config(self) -> LionConfig:
        fields = {"hidden_dropout_prob": 0.0, **self.config}
        if fields["modality"] == "image":
            fields["image_size"] = self.length
        else:
            fields["max_position_embeddings"] = max(512, self.length)
        return LionConfig.from_size(**fields)

    def build(self) -> PreTrainedModel:
        torch.manual_seed(0)
        config = self.lion_config()
        attention = {}
        if self.peer is not None:
            config, attention = peer_config(self.peer, config), {"attn_implementation": "sdpa"}
        model = AutoModel.from_config(config, dtype=self.setting.weights_dtype, **attention)
        return model.to(self.setting.device)

    def bind(self, model: PreTrainedModel) -> Callable[[bool], None]:
        """A call of the model, on a tiny input or on the real one. A training step leaves no gradients behind."""
        inputs = {tiny: self._make_inputs(model.config, tiny) for tiny in (True, False)}

        def call(tiny=False):
            model.train(self.training)
            with torch.inference_mode(not self.training), self.setting.context():
                states = model(**inputs[tiny]).last_hidden_state
                if self.training:
                    states.square().mean().backward()
                    model.zero_grad(set_to_none=True)

        return call

    def prepare(self) -> Callable[[bool], None]:
        return self.bind(self.build())

    def _make_inputs(self, config, tiny):
        torch.manual_seed(1)
        batch, length, device = 1 if tiny else self.batch, self.length, self.setting.device
        if self.config["modality"] == "text":
            length = min(length, TINY_LENGTH) if tiny else length
            return {"input_ids": torch.randint(1, config.vocab_size, (batch, length), device=device)}
        length = min(length, 2 * config.patch_size) if tiny else length
        pixels = torch.randn(
            batch, config.num_channels, length, length, device=device, dtype=self.setting.weights_dtype
        )
        return {"pixel_values": pixels, "interpolate_pos_encoding": tiny}


def peer_config(peer: str, config: LionConfig) -> PreTrainedConfig:
    """The configuration of a model of Transformers with the sizes of a LION model, without dropout.

    ModernBERT's gated feed-forward has three matrices: two thirds of the width make the same number of weights.
    """
    names = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]
    sizes = {name: getattr(config, name) for name in names}
    if peer == "vit":
        image = {name: getattr(config, name) for name in ("image_size", "patch_size", "num_channels")}
        return ViTConfig(**sizes, **image, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    text = {name: getattr(config, name) for name in ("vocab_size", "max_position_embeddings", "pad_token_id")}
    if peer == "bert":
        return BertConfig(**sizes, **text, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sizes["intermediate_size"] = sizes["intermediate_size"] * 2 // 3
    return ModernBertConfig(
        **sizes, **text, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None
    )


@dataclass(frozen=True)
class OperatorCase:
    """The operator alone, or what stands in its place, on random queries, keys, values and decays.

    Args:
        form: `"parallel"`, `"chunk"`, `"rnn"`, `"sdpa"` (softmax attention) or `"naive"` (`naive_recurrence`).
        decay: `"none"`, `"fixed"` or `"selective"`.
        length, batch, heads, head_dim: sizes of queries, keys and values.
        training: with the backward pass.
        setting: device and precision.
        log_decay: every decay's logarithm.
        chunk_size, direction, normalize: of the operator.
        orders: 1, or 2 for serpentine scan orders of a grid of patches that is as square as the length allows.
    """

    form: str
    decay: str
    length: int
    batch: int
    heads: int
    head_dim: int
    training: bool
    setting: Setting
    log_decay: float = -0.05
    chunk_size: int = 64
    direction: str = "both"
    orders: int = 1
    normalize: bool = False

    def prepare(self) -> Callable[[bool], None]:
        arguments = {
            tiny: self.make_inputs(min(self.length, TINY_LENGTH) if tiny else self.length) for tiny in (True, False)
        }

        def call(tiny=False):
            inputs, grad, scan = arguments[tiny]
            with torch.inference_mode(not self.training), self.setting.context():
                output = self.compute(*inputs, scan)
                if self.training:
                    torch.autograd.grad(output, [x for x in inputs if x is not None], grad)

        return call

    def make_inputs(self, length: int) -> tuple[tuple, torch.Tensor, Any]:
        """Queries, keys, values `(batch, heads, length, head_dim)` and decays; a gradient; the scan orders."""
        torch.manual_seed(0)
        device, dtype = self.setting.device, self.setting.weights_dtype
        shape = (self.batch, self.heads, length)
        q, k, v, grad = (torch.randn(*shape, self.head_dim, device=device, dtype=dtype) for _ in range(4))
        if self.normalize:
            q, k = (nn.functional.elu(x) + 1 for x in (q, k))
        decay_shape = {"none": None, "fixed": (self.heads,), "selective": shape}[self.decay]
        log_decay = scan = None
        if self.orders > 1:
            scan = get_scan("serpentine", *grid_of(length), False, torch.device(device))
        if decay_shape is not None and self.form != "sdpa":
            axes = () if scan is None else (self.orders,)
            log_decay = torch.full((*axes, *decay_shape), self.log_decay, device=device)
        inputs = (q, k, v, log_decay)
        return tuple(x if x is None else x.requires_grad_(self.training) for x in inputs), grad, scan

    def compute(self, q, k, v, log_decay, scan=None) -> torch.Tensor:
        if self.form == "sdpa":
            return nn.functional.scaled_dot_product_attention(q, k, v)
        if self.form == "naive":
            return naive_recurrence(q, k, v, log_decay)
        return lion_attention(
            q,
            k,
            v,
            log_decay,
            mode=self.form,
            chunk_size=self.chunk_size,
            scan=scan,
            direction=self.direction,
            normalize=self.normalize,
        )


def grid_of(tokens: int) -> tuple[int, int]:
    """Rows and columns, as nearly equal as a grid of that many patches can be."""
    rows = next(rows for rows in range(isqrt(tokens), 0, -1) if tokens % rows == 0)
    return rows, tokens // rows


def naive_recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """The row-normalised operator as one writes it down first: one direction after the other, token by token.

    The state S ← e^g S + k vᵀ and the normaliser z ← e^g z + k are updated apart. As both directions count the
    diagonal, it is taken out once.

    Args:
        q, k, v: `(batch, heads, length, head_dim)`.
        log_decay: `(batch, heads, length)`.
        eps: added to the row sums.
    """
    batch, heads, length, head_dim = q.shape
    decays = log_decay.exp().to(q.dtype)
    scores = (q * k).sum(-1, keepdim=True)  # (batch, heads, length, 1)
    numerator, denominator = -scores * v, -scores
    for tokens in (range(length), range(length - 1, -1, -1)):
        state, normaliser = q.new_zeros(batch, heads, head_dim, v.shape[-1]), q.new_zeros(batch, heads, head_dim)
        decay = q.new_ones(batch, heads)  # of the token that is left
        for i in tokens:
            state = decay[..., None, None] * state + k[:, :, i, :, None] * v[:, :, i, None, :]
            normaliser = decay[..., None] * normaliser + k[:, :, i]
            numerator[:, :, i] += torch.einsum("bhd,bhde->bhe", q[:, :, i], state)
            denominator[:, :, i] += torch.einsum("bhd,bhd->bh", q[:, :, i], normaliser)[..., None]
            decay = decays[:, :, i]
    return numerator / (denominator + eps)
