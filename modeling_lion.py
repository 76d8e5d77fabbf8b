"""PyTorch LION model."""

import functools
import math
from collections.abc import Callable

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN, GELUActivation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, logging
from transformers.utils.generic import can_return_tuple, maybe_autocast, merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from .attention_lion import ATTENTION_MODES, choose_mode, is_transformed, lion_attention
from .configuration_lion import LionConfig, as_pair, count_patches
from .scan_order_lion import SCAN_ORDERS, Scan, get_scan


logger = logging.get_logger(__name__)

# In tokens: of the fastest head under `decay_init="multiscale"`; that of the slowest is the length of a sequence.
SHORTEST_TIME_CONSTANT = 4.0

# Tokens that a CPU takes at once at inference through what treats each token by itself.
TOKENS_AT_ONCE = 2048

# Fewest tokens whose product with a matrix oneDNN computes faster as a convolution, which lays the matrix out anew.
# Where PyTorch's own products are no slower than oneDNN's, they are faster from here on.
TOKENS_OF_CONVOLUTION = 1024

# Features below the exponential of this are no smaller: a CPU takes long over the denormal numbers they would become.
LEAST_EXPONENT = -26.0

# In bytes: of what torch allocates on a CPU.
MEMORY_ALIGNMENT = 64

# In bytes: a little below the largest block that glibc takes from memory it has already, once one like it was freed.
LARGEST_KEPT_BLOCK = 2**25 - 2**16

# What holds decays, by decay type: their whole names, as `_keep_in_fp32_modules_strict` wants them.
FP32_MODULES = {"none": [], "fixed": ["decay_bias"], "selective": ["decay_bias_proj"]}


class LionEmbeddings(nn.Module):
    """Word, token type and, where the configuration has them, absolute position embeddings."""

    def __init__(self, config: LionConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.position_embeddings = None
        if config.position_embedding_type == "absolute":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        embeddings = inputs_embeds
        if inputs_embeds is None:
            embeddings = _look_up(self.word_embeddings, input_ids, "input_ids", "vocab_size")
        if token_type_ids is None:  # one row serves all tokens
            token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=embeddings.device)
        else:
            _check_per_token("token_type_ids", token_type_ids, embeddings.shape[:2])
        types = _look_up(self.token_type_embeddings, token_type_ids, "token_type_ids", "type_vocab_size")
        embeddings = embeddings + types
        if self.position_embeddings is not None:
            positions = self._position_ids(position_ids, embeddings)
            positions = _look_up(self.position_embeddings, positions, "position_ids", "max_position_embeddings")
            embeddings = embeddings + positions
        return self.dropout(self.norm(embeddings))  # (batch, length, hidden_size)

    def _position_ids(self, position_ids, embeddings):
        if position_ids is not None:
            return position_ids
        length, longest = embeddings.shape[1], self.position_embeddings.num_embeddings
        if length > longest:
            raise ValueError(
                f"The sequence has {length} tokens, but absolute position embeddings end at "
                f"`max_position_embeddings` = {longest}"
            )
        return torch.arange(length, device=embeddings.device)[None]


def _look_up(table: nn.Embedding, ids: torch.Tensor, name: str, size_name: str) -> torch.Tensor:
    """Rows of a table, `(*ids.shape, hidden_size)`. Nothing is read to find ids that it has no row for."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`{name}` must be int64 or int32, got {ids.dtype}")
    try:
        return table(ids)
    except IndexError:
        raise ValueError(
            f"`{name}` must be at least 0 and below `{size_name}` = {len(table.weight)}, "
            f"got values from {ids.min()} to {ids.max()}"
        ) from None


def _check_per_token(name: str, values: torch.Tensor, shape: torch.Size):
    if values.shape[-1] != shape[1] or values.shape[:-1] not in ((), (1,), shape[:1]):
        raise ValueError(f"`{name}` must be (batch, length) = {tuple(shape)}, got shape {tuple(values.shape)}")


def _check_finite(name: str, values: torch.Tensor):
    # A sum is finite only if all it sums up is, and takes a CPU one pass over them instead of four.
    if _is_free_to_read(values) and not values.sum().isfinite() and not values.isfinite().all():
        raise ValueError(f"`{name}` must be finite, got NaN or infinite values")


def _is_free_to_read(tensor: torch.Tensor) -> bool:
    """Whether looking at values neither stalls a device nor breaks a graph or a transform."""
    return tensor.device.type == "cpu" and not is_tracing(tensor) and not is_transformed()


class LionImageEmbeddings(nn.Module):
    """Patches of an image as tokens, row by row; in front of them the CLS token, where there is one."""

    def __init__(self, config: LionConfig, use_mask_token: bool = False):
        super().__init__()
        self.image_size, self.native_grid = as_pair(config.image_size), config.patch_grid
        self.patch_size = as_pair(config.patch_size)
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, self.patch_size, stride=self.patch_size)

        def token(number):
            return nn.Parameter(torch.empty(1, number, config.hidden_size))

        self.cls_token = token(1) if config.use_cls_token else None
        self.mask_token = token(1) if use_mask_token else None
        self.position_embeddings = None
        if config.position_embedding_type == "absolute":
            self.position_embeddings = token(config.use_cls_token + math.prod(self.native_grid))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.BoolTensor | None = None,
        interpolate_pos_encoding: bool | None = None,
    ) -> torch.Tensor:
        num_channels = self.projection.in_channels
        if not isinstance(pixel_values, torch.Tensor):
            raise TypeError(f"`pixel_values` must be a tensor, as image processors make, got {type(pixel_values)}")
        if pixel_values.ndim != 4 or pixel_values.shape[1] != num_channels or 0 in pixel_values.shape:
            raise ValueError(
                f"`pixel_values` must be (batch, {num_channels} channels, height, width), "
                f"got shape {tuple(pixel_values.shape)}"
            )
        if not pixel_values.is_floating_point():
            raise ValueError(
                f"`pixel_values` must be floating point, as image processors make, got {pixel_values.dtype}"
            )
        _check_finite("pixel_values", pixel_values)
        tokens = self.projection(self._pad(pixel_values).to(self.projection.weight.dtype))
        tokens = tokens.flatten(2).transpose(1, 2)  # (batch, height · width in patches, hidden_size)
        if bool_masked_pos is not None:
            tokens = self._mask(tokens, bool_masked_pos)
        if self.cls_token is not None:
            tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], 1)
        if self.position_embeddings is not None:
            tokens = tokens + self._positions(pixel_values, interpolate_pos_encoding)
        return self.dropout(tokens)  # (batch, length, hidden_size)

    def grid_of(self, pixel_values: torch.Tensor) -> tuple[int, int]:
        """Rows and columns of patches; incomplete ones at the lower and right edges count."""
        return count_patches(pixel_values.shape[-2:], self.patch_size)

    def _pad(self, pixel_values):
        """Zeros below and to the right, up to whole patches."""
        height, width = pixel_values.shape[-2:]
        return nn.functional.pad(pixel_values, (0, -width % self.patch_size[1], 0, -height % self.patch_size[0]))

    def _mask(self, tokens, bool_masked_pos):
        if self.mask_token is None:
            raise ValueError("`bool_masked_pos` needs a mask token, which LionForMaskedImageModeling has")
        if bool_masked_pos.shape != tokens.shape[:2]:
            raise ValueError(
                f"`bool_masked_pos` must be (batch, patches) = {tuple(tokens.shape[:2])}, "
                f"got shape {tuple(bool_masked_pos.shape)}"
            )
        is_masked = bool_masked_pos.bool()
        if _is_free_to_read(bool_masked_pos) and (bool_masked_pos != is_masked).any():
            raise ValueError(
                "`bool_masked_pos` must be 1 for patches that are masked and 0 for others, "
                f"got values from {bool_masked_pos.min()} to {bool_masked_pos.max()}"
            )
        return torch.where(is_masked[..., None], self.mask_token, tokens)

    def _positions(self, pixel_values, interpolate_pos_encoding):
        grid = self.grid_of(pixel_values)
        if grid == self.native_grid:
            return self.position_embeddings
        if not interpolate_pos_encoding:
            (height, width), (native_height, native_width) = pixel_values.shape[-2:], self.image_size
            raise ValueError(
                f"The image has {height}×{width} pixels, but position embeddings are those of "
                f"{native_height}×{native_width}: pass `interpolate_pos_encoding=True` to interpolate them"
            )
        cls_position, positions = self.position_embeddings.tensor_split([-math.prod(self.native_grid)], dim=1)
        positions = _at_least_float32(positions).unflatten(1, self.native_grid).permute(0, 3, 1, 2)
        positions = nn.functional.interpolate(positions, size=grid, mode="bicubic", align_corners=False)
        positions = positions.flatten(2).transpose(1, 2).to(cls_position.dtype)
        return torch.cat([cls_position, positions], 1)


class LionDecayProjection(nn.Linear):
    """Decay logits per head from each token.

    A class of its own, so that `_init_weights` is called for it: outside of Transformers' own tree that is not done
    for modules without parameters of their own, as `LionAttention` is under selective decays.
    """


class LionAttention(nn.Module):
    """Projections, decays and feature map around the operator of `attention_lion`."""

    def __init__(self, config: LionConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.direction = config.direction
        if config.direction == "alternate":
            self.direction = ("forward", "backward")[layer_idx % 2]
        self.num_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        # Row normalisation cancels any scale.
        self.scaling = 1.0 if config.normalize else self.head_dim**-0.5

        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.qkv_bias)
        # Decays stay in float32 whatever the dtype of the model: close to 1 half precision cannot tell them apart.
        # Trainer exempts from weight decay what has "bias" in its name, and so should these be.
        num_decays = len(SCAN_ORDERS[config.scan_order]) * self.num_heads
        if config.decay_type == "fixed":
            self.decay_bias = nn.Parameter(torch.empty(num_decays, dtype=torch.float32))
        elif config.decay_type == "selective":
            self.decay_bias_proj = LionDecayProjection(config.hidden_size, num_decays, dtype=torch.float32)
        self.norm = nn.LayerNorm(config.hidden_size) if config.attention_output_norm else nn.Identity()
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mode: str = "parallel",
        output_attentions: bool = False,
        scan: Scan | None = None,
        segment_ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        qkv = _linear(self.qkv_proj, hidden_states).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()  # (batch, heads, length, head_dim) each
        # Whoever watches the projection is not to see what it gave change.
        in_place = not (torch.is_grad_enabled() or is_tracing(qkv) or _is_watched(self.qkv_proj))
        dropout_p = self.config.attention_probs_dropout_prob if self.training and attn_mode == "parallel" else 0.0

        output = lion_attention(
            self._map_features(query, in_place),
            self._map_features(key, in_place),
            value,
            self._log_decay(hidden_states, scan),
            mode=attn_mode,
            chunk_size=self.config.chunk_size,
            key_mask=attention_mask,
            segment_ids=segment_ids,
            scan=scan,
            direction=self.direction,
            diagonal=self.config.diagonal,
            scale=self.scaling,
            normalize=self.config.normalize,
            dropout_p=dropout_p,
            return_weights=output_attentions,
        )
        output, weights = output if output_attentions else (output, None)
        output = output.transpose(1, 2).flatten(2)  # (batch, length, hidden_size)
        return _by_slices(self._project, [self.norm, self.out_proj], output), weights

    def _project(self, output):
        return _linear(self.out_proj, self.norm(output))

    def _map_features(self, x, in_place):
        if self.config.feature_map == "elu":
            return _EluPlusOne.apply(x) if _is_plain_graph(x) else _elu_plus_one(x, in_place)
        if self.config.feature_map == "silu":
            return _UnitSilu.apply(x) if _is_plain_graph(x) else _unit_silu(x, in_place)[0]
        return x

    def _log_decay(self, hidden_states, scan):
        """Log-decays in float32: `None`, `(heads,)` or `(batch, heads, length)`, with `scan` one for each order."""
        if self.config.decay_type == "none":
            return None
        if self.config.decay_type == "fixed":
            log_decay = nn.functional.logsigmoid(_at_least_float32(self.decay_bias))
            return log_decay if scan is None else log_decay.unflatten(0, (-1, self.num_heads))
        with maybe_autocast(hidden_states.device.type, enabled=False):
            logits = self.decay_bias_proj(hidden_states.to(self.decay_bias_proj.weight.dtype))
        log_decay = nn.functional.logsigmoid(-_at_least_float32(logits)).transpose(1, 2)  # decay 1 - σ(W x + b)
        if self.config.modality == "image" and self.config.use_cls_token:
            log_decay = nn.functional.pad(log_decay[..., 1:], (1, 0))  # the CLS token is no step of the walk
        return log_decay if scan is None else log_decay.unflatten(1, (-1, self.num_heads)).transpose(0, 1)


def _elu_plus_one(x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
    """exp(x) below 0 and x + 1 above: a CPU takes ten times as long over exp(x) - 1."""
    of_negative = x.clamp(LEAST_EXPONENT, 0.0).exp_()  # 1 where x is not negative
    return of_negative.add_(x.relu_()) if in_place else of_negative + x.relu()


class _EluPlusOne(torch.autograd.Function):
    """`_elu_plus_one` with a derivative that its values tell."""

    @staticmethod
    def forward(ctx, x):
        output = _elu_plus_one(x)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return output.clamp(max=1.0) * grad


def _unit_silu(x: torch.Tensor, in_place: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors `(…, head_dim)` of silu(x) + 0.5, divided by their norms, and those norms `(…, 1)`."""
    x = nn.functional.silu(x, inplace=in_place).add_(0.5)
    norm = x.norm(dim=-1, keepdim=True).to(x.dtype)
    return (x / norm if torch.is_grad_enabled() else x.div_(norm)), norm


class _UnitSilu(torch.autograd.Function):
    """`_unit_silu` with a derivative in a third of the passes."""

    @staticmethod
    def forward(ctx, x):
        output, norm = _unit_silu(x)
        ctx.save_for_backward(x, output, norm)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, output, norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again, by way of the norms too
            return torch.autograd.grad(_unit_silu(x)[0], x, grad, create_graph=True)
        # Results are laid out as the first factor is: as the projection's are, not as those of the operator.
        across = (output * (output * grad).sum(-1, keepdim=True)).neg_().add_(grad).div_(norm)
        return torch.ops.aten.silu_backward(across, x)


def _is_plain_graph(x: torch.Tensor) -> bool:
    """Whether gradients are recorded by autograd alone: no tracer, transform or forward mode is at work."""
    return torch.is_grad_enabled() and not is_tracing(x) and not is_transformed() and _has_no_tangent(x)


def _has_no_tangent(x: torch.Tensor) -> bool:
    return torch.autograd.forward_ad.unpack_dual(x).tangent is None


def _linear(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A linear layer, `(…, in_features)` to `(…, out_features)`; a CPU computes it by oneDNN where that is faster."""
    if not (_suits_onednn(layer, x) and _is_faster_by_onednn(x)):
        return layer(x)
    return _by_rows(_OneDNNLinear.apply if torch.is_grad_enabled() else _multiply, layer, x)


def _is_faster_by_onednn(x: torch.Tensor) -> bool:
    if _is_mkl_slow():
        return True
    few = x.shape[:-1].numel() < TOKENS_OF_CONVOLUTION
    return not torch.is_grad_enabled() and (few or x.dtype != torch.float32)


@functools.cache
def _is_mkl_slow() -> bool:
    """Whether matrices go to MKL on a processor of AMD's: there oneDNN shares a product out to the cores better."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.mkl.is_available() and "AMD" in capabilities.get("cpu_name", "")


def _by_rows(multiply, layer, x, *activation):
    output = multiply(x.reshape(-1, layer.in_features), layer.weight, layer.bias, *activation)
    return _rows(output).view(*x.shape[:-1], layer.out_features)


def _suits_onednn(layer: nn.Module, x: torch.Tensor) -> bool:
    """Whether calling the layer is nothing but a product that oneDNN has."""
    if x.device.type != "cpu" or is_tracing(x) or is_transformed() or _is_watched(layer):
        return False
    return (
        type(layer) is nn.Linear
        and type(layer.weight) is nn.Parameter  # not adapted, quantised or sharded
        and type(x) in (torch.Tensor, nn.Parameter)
        and x.dtype == layer.weight.dtype
        and torch.backends.mkldnn.is_available()
        and (x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()))
        and not torch.is_autocast_enabled("cpu")
        # For the gradient of weights inputs have to be kept, which those of a frozen layer are not.
        and (layer.weight.requires_grad or not torch.is_grad_enabled())
        and _has_no_tangent(x)
    )


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none"
) -> torch.Tensor:
    """Products of rows `(tokens, in_features)`, in new memory that is no view: `(tokens, out_features)` or its pixels.

    By the operations that torch.compile calls, with an activation of theirs in the same pass. On processors where it
    is faster than MKL, oneDNN computes many tokens still faster as a convolution over single pixels.
    """
    if len(x) < TOKENS_OF_CONVOLUTION or not _is_mkl_slow():
        return _multiply_by_onednn(x, weight, bias, activation)
    pixels = x.reshape(1, -1, 1, x.shape[1]).permute(0, 3, 1, 2)  # channels last
    geometry = [0, 0], [1, 1], [1, 1], 1  # padding, stride, dilation, groups
    return torch.ops.mkldnn._convolution_pointwise(
        pixels, weight[..., None, None], bias, *geometry, activation, [], "none"
    )  # (1, out_features, tokens, 1)


def _multiply_by_onednn(x, weight, bias=None, activation="none"):
    """`activation(x @ weight.mT + bias)`, whatever the strides of `x` and `weight`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none")


def _rows(output):
    """`(tokens, features)` of what `_multiply` gives."""
    return output if output.ndim == 2 else output.permute(0, 2, 3, 1).reshape(-1, output.shape[1])


class _OneDNNLinear(torch.autograd.Function):
    """`_multiply` with its derivative, by oneDNN where that is faster. It keeps what a linear layer keeps, its inputs
    and weights.

    The output is that of `_multiply` as it is: one that was a view could not be changed in place.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = _rows(grad)
        of_x = of_weight = nn.functional.linear
        # To be differentiated again, or batched as torch.autograd.grad can have it: oneDNN's products are neither.
        if not (torch.is_grad_enabled() or torch._C._functorch.is_legacy_batchedtensor(grad)):
            of_x = _multiply_by_onednn
            # Beyond, and in bfloat16, PyTorch's own product over all tokens takes no longer.
            if len(x) < TOKENS_OF_CONVOLUTION and x.dtype == torch.float32:
                of_weight = _multiply_by_onednn
        with maybe_autocast("cpu", enabled=False):
            return (
                of_x(grad, weight.mT) if ctx.needs_input_grad[0] else None,
                of_weight(grad.mT, x.mT) if ctx.needs_input_grad[1] else None,
                grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None,
            )


def _is_watched(*modules: nn.Module) -> bool:
    """Whether one of the modules, or one inside of them, has hooks or a forward that was put in place of its own."""
    return nn.modules.module._has_any_global_hook() or any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
        for outer in modules
        for module in outer.modules()
    )


def _by_slices(function: Callable[..., torch.Tensor], modules: list[nn.Module], *states: torch.Tensor) -> torch.Tensor:
    """A function of each token by itself, of states `(batch, length, hidden_size)`, to a result of the same shape.

    What it computes on the way can be several times as wide, and on a CPU pages that are new to the process cost more
    than what is computed in them: where no gradient needs all of it, and nobody watches the modules that compute it,
    some tokens at a time use the same.
    """
    first = states[0]
    whole = torch.is_grad_enabled() or first.device.type != "cpu" or is_tracing(first)
    if whole or first.shape[0] * first.shape[1] <= TOKENS_AT_ONCE or _is_watched(*modules):
        return function(*states)
    output = torch.empty_like(first, memory_format=torch.contiguous_format)
    slices = (x.flatten(0, 1).split(TOKENS_AT_ONCE) for x in (output, *states))
    for some_output, *some in zip(*slices, strict=True):
        some_output.copy_(function(*some))
    return output


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LionDropPath(nn.Module):
    """Drops what a residual branch adds, for whole examples (stochastic depth), and scales up what it keeps."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.p == 0 or not self.training:
            return hidden_states
        keep = torch.empty(len(hidden_states), 1, 1, device=hidden_states.device).bernoulli_(1 - self.p)
        return hidden_states * (keep / (1 - self.p)).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class LionMLP(nn.Module):
    def __init__(self, config: LionConfig):
        super().__init__()
        self.activation_fn = ACT2FN[config.hidden_act]
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._is_fused(hidden_states):
            inner = _by_rows(_multiply, self.fc1, hidden_states, "gelu")
        else:
            inner = self.activation_fn(_linear(self.fc1, hidden_states))
        return _linear(self.fc2, inner)

    def _is_fused(self, hidden_states):
        """Whether the first product and the activation can be one pass over what is four times as wide as the rest."""
        return (
            not torch.is_grad_enabled()
            and type(self.activation_fn) is GELUActivation
            and _suits_onednn(self.fc1, hidden_states)
            and not _is_watched(self.activation_fn)
        )


class LionLayer(GradientCheckpointingLayer):
    def __init__(self, config: LionConfig, layer_idx: int):
        super().__init__()
        self.norm_position = config.norm_position
        self.attention = LionAttention(config, layer_idx)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = LionMLP(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.drop_path = LionDropPath(config.drop_path_rate * layer_idx / max(config.num_hidden_layers - 1, 1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mode: str = "parallel",
        output_attentions: bool = False,
        scan: Scan | None = None,
        segment_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attention_input = self.attention_norm(hidden_states) if self.norm_position == "pre" else hidden_states
        attention_output, _ = self.attention(
            attention_input, attention_mask, attn_mode, output_attentions, scan, segment_ids
        )
        if self.drop_path.training:  # it drops whole examples
            return self._add_and_transform(hidden_states, attention_output)
        modules = [self.attention_norm, self.mlp, self.mlp_norm, self.dropout, self.drop_path]
        return _by_slices(self._add_and_transform, modules, hidden_states, attention_output)

    def _add_and_transform(self, hidden_states, attention_output):
        pre_norm = self.norm_position == "pre"
        hidden_states = hidden_states + self.drop_path(self.dropout(attention_output))
        if not pre_norm:
            hidden_states = self.attention_norm(hidden_states)
        mlp_output = self.mlp(self.mlp_norm(hidden_states) if pre_norm else hidden_states)
        hidden_states = hidden_states + self.drop_path(self.dropout(mlp_output))
        return hidden_states if pre_norm else self.mlp_norm(hidden_states)


class LionPooler(nn.Module):
    """One vector per sequence, from its first token or from the mean over its tokens (`classifier_pooling`).

    Rows into which several sequences are packed give as many vectors, row after row. As in BERT a dense layer follows
    for text, as in the paper's image models none for images.
    """

    def __init__(self, config: LionConfig):
        super().__init__()
        self.pooling = config.classifier_pooling
        is_text = config.modality == "text"
        self.dense = nn.Linear(config.hidden_size, config.hidden_size) if is_text else nn.Identity()
        self.activation = nn.Tanh() if is_text else nn.Identity()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        segment_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if segment_ids is not None:
            hidden_states, attention_mask = self._unpack(hidden_states, attention_mask, segment_ids)
        pool = self._first if self.pooling == "cls" else self._mean
        return self.activation(self.dense(pool(hidden_states, attention_mask)))  # (sequences, hidden_size)

    @staticmethod
    def _unpack(hidden_states, attention_mask, segment_ids):
        """Rows of one sequence each, padded on the right, and their mask."""
        if not is_tracing(segment_ids) and (segment_ids[:, -1] == 0).any():
            raise ValueError("A row beside packed ones has no token that is not masked, and would have no output")
        batch, length = segment_ids.shape
        rows = torch.arange(batch, device=segment_ids.device).repeat_interleave(length).view(batch, length)
        keep = torch.ones_like(segment_ids, dtype=torch.bool) if attention_mask is None else attention_mask
        sequences = torch.stack([rows, segment_ids], -1)[keep]  # (tokens, 2)
        lengths = sequences.unique_consecutive(return_counts=True, dim=0)[1]
        unpacked = nn.utils.rnn.pad_sequence(hidden_states[keep].split(lengths.tolist()), batch_first=True)
        return unpacked, torch.arange(unpacked.shape[1], device=lengths.device) < lengths[:, None]

    @staticmethod
    def _first(hidden_states, attention_mask):
        if attention_mask is None:
            return hidden_states[:, 0]
        first = attention_mask.int().argmax(-1)  # padding may be on the left
        return hidden_states[torch.arange(first.shape[0], device=first.device), first]

    @staticmethod
    def _mean(hidden_states, attention_mask):
        if attention_mask is None:
            return hidden_states.mean(1)
        # Sums of long sequences need more digits than half precision has.
        tokens = _at_least_float32(hidden_states).masked_fill(~attention_mask[..., None], 0.0)
        count = attention_mask.sum(-1, keepdim=True).clamp(min=1)
        return (tokens.sum(1) / count).to(hidden_states.dtype)


class LionPredictionHead(nn.Module):
    def __init__(self, config: LionConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation_fn = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.activation_fn(self.dense(hidden_states)))


def _keep_freed_memory():
    """Let the process use again, from layer to layer, the memory that it has freed.

    glibc gives memory back to the system above a threshold, which it sets to twice the largest block that was freed,
    up to 32 MiB. Left to the sizes that a model happens to free, each layer's memory can be given back and asked for
    anew, and pages that are new to the process cost a CPU more than what is computed in them. The block is not written
    to, so it takes no memory itself.
    """
    torch.empty(LARGEST_KEPT_BLOCK, dtype=torch.uint8, device="cpu")


@auto_docstring
class LionPreTrainedModel(PreTrainedModel):
    config: LionConfig
    base_model_prefix = "lion"
    input_modalities = ("text",)
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": LionLayer,
        "attentions": LionAttention,
    }

    def __init__(self, config: LionConfig, *inputs, **kwargs):
        config.validate()  # overrides at loading are set field by field
        if config.modality not in self.input_modalities:
            accepted = " or ".join(f'modality="{modality}"' for modality in self.input_modalities)
            raise ValueError(f'{type(self).__name__} needs a configuration with {accepted}, got "{config.modality}"')
        if config.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of {', '.join(ACT2FN)}, got {config.hidden_act!r}")
        super().__init__(config, *inputs, **kwargs)
        _keep_freed_memory()
        # Those that the model has: FSDP's wrapping by them refuses others.
        embeddings = "LionImageEmbeddings" if config.modality == "image" else "LionEmbeddings"
        self._no_split_modules = [embeddings, "LionLayer"]
        self._keep_in_fp32_modules_strict = FP32_MODULES[config.decay_type]

    @classmethod
    def _load_pretrained_model(cls, model, state_dict, checkpoint_files, *args, **kwargs):
        for file in checkpoint_files or ():
            if not str(file).endswith(".safetensors"):  # a pickle is a program
                raise ValueError(f"Weights of {cls.__name__} are read from safetensors files alone, not from {file}")
        loaded = super()._load_pretrained_model(model, state_dict, checkpoint_files, *args, **kwargs)
        for parameter in model.parameters():
            # Tensors of a file lie where they are in it. Products of others than those that torch allocates can round
            # differently, and a loaded model would not give the saved one's outputs to the last bit.
            if parameter.device.type == "cpu" and parameter.data_ptr() % MEMORY_ALIGNMENT:
                parameter.data = parameter.data.clone()
        return loaded

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, LionImageEmbeddings):
            for parameter in (module.cls_token, module.position_embeddings):
                if parameter is not None and self.config.initializer_range == 0:
                    init.zeros_(parameter)  # torch would divide by it
                elif parameter is not None:
                    init.trunc_normal_(parameter, std=self.config.initializer_range)
            if module.mask_token is not None:
                init.zeros_(module.mask_token)
        elif isinstance(module, LionAttention) and self.config.decay_type == "fixed":
            if self.config.decay_init == "paper":
                init.normal_(module.decay_bias)
            else:
                init.copy_(module.decay_bias, self._multiscale_logits())
        elif isinstance(module, LionDecayProjection) and self.config.decay_init == "multiscale":
            init.copy_(module.bias, -self._multiscale_logits())  # decays are the complement, 1 - σ(W x + b)

    def _multiscale_logits(self) -> torch.Tensor:
        """Logits, `(orders · heads,)`, of decays exp(-1 / τ) with time constants τ log-spaced over the heads."""
        is_image, heads = self.config.modality == "image", self.config.num_attention_heads
        longest = math.prod(self.config.patch_grid) if is_image else self.config.max_position_embeddings
        ratio = max(longest / SHORTEST_TIME_CONSTANT, 1.0)
        rates = torch.logspace(0, -1, heads, base=ratio, dtype=torch.float64, device="cpu") / SHORTEST_TIME_CONSTANT
        logits = -torch.log(torch.expm1(rates)).float()  # the logit of e^-r is -log(e^r - 1)
        return logits.repeat(len(SCAN_ORDERS[self.config.scan_order]))

    def set_attn_mode(self, attn_mode: str):
        """
        Choose the form in which attention is computed from now on. Results stay the same.

        Args:
            attn_mode (`str`):
                `"parallel"`, `"chunk"`, `"rnn"`, or `"auto"` to choose by length.
        """
        self.config.attn_mode = _check_attn_mode(attn_mode)


def _check_attn_mode(attn_mode: str) -> str:
    accepted = ("auto", *ATTENTION_MODES)
    if attn_mode not in accepted:
        raise ValueError(f"`attn_mode` must be one of {', '.join(map(repr, accepted))}, got {attn_mode!r}")
    return attn_mode


@auto_docstring
class LionModel(LionPreTrainedModel):
    input_modalities = ("text", "image")

    def __init__(self, config: LionConfig, add_pooling_layer: bool = True, use_mask_token: bool = False):
        r"""
        add_pooling_layer (bool, *optional*, defaults to `True`):
            Whether to add a pooling layer
        use_mask_token (`bool`, *optional*, defaults to `False`):
            Whether to use a mask token for masked image modeling.
        """
        super().__init__(config)
        if config.modality == "image":
            self.main_input_name = "pixel_values"
            self.embeddings = LionImageEmbeddings(config, use_mask_token)
        else:
            self.embeddings = LionEmbeddings(config)
        self.layers = nn.ModuleList([LionLayer(config, idx) for idx in range(config.num_hidden_layers)])
        self.final_norm = nn.Identity()
        if config.norm_position == "pre":
            self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.pooler = LionPooler(config) if add_pooling_layer else None
        self.gradient_checkpointing = False

        # Initialize weights and apply final processing
        self.post_init()

    def get_input_embeddings(self):
        return self.embeddings.projection if self.config.modality == "image" else self.embeddings.word_embeddings

    def set_input_embeddings(self, value):
        if self.config.modality == "image":
            self.embeddings.projection = value
        else:
            self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        bool_masked_pos: torch.BoolTensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attn_mode: str | None = None,
        seq_idx: torch.IntTensor | None = None,
        cu_seq_lens_q: torch.IntTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        r"""
        position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Indices of positions of each input sequence tokens in the position embeddings. At 0, and where that of the
            first token that is not masked comes again, another sequence begins: those packed into one row never see
            each other, and each has its own pooled output. (An exported program pools by rows all the same, unless it
            is given `seq_idx` or `cu_seq_lens_q`.)
        bool_masked_pos (`torch.BoolTensor` of shape `(batch_size, num_patches)`, *optional*):
            Boolean masked positions. Indicates which patches are masked (1) and which aren't (0).
        interpolate_pos_encoding (`bool`, *optional*):
            Whether to interpolate position embeddings to images of another size than `config.image_size`. Without
            position embeddings images of any size are taken as they are.
        attn_mode (`str`, *optional*):
            Form in which attention is computed in this call, instead of the configuration's: `"auto"`, `"parallel"`,
            `"chunk"` or `"rnn"`.
        seq_idx (`torch.IntTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Number of the sequence that each token of a packed row belongs to.
        cu_seq_lens_q (`torch.IntTensor` of shape `(num_sequences + 1,)`, *optional*):
            Where the sequences packed into a single row begin, and its length. `cu_seq_lens_k`, `max_length_q` and
            `max_length_k`, which kernels take beside it, must say the same.
        """
        scan = segment_ids = None
        if self.config.modality == "image":
            if pixel_values is None or input_ids is not None or inputs_embeds is not None:
                raise ValueError(
                    "You must specify pixel_values (by name), no input_ids or inputs_embeds: the model reads images"
                )
            hidden_states = self.embeddings(pixel_values, bool_masked_pos, interpolate_pos_encoding)
            grid = self.embeddings.grid_of(pixel_values)
            scan = get_scan(self.config.scan_order, *grid, self.config.use_cls_token, hidden_states.device)
            attention_mask = _key_mask(attention_mask, hidden_states.shape[:2])
        else:
            if pixel_values is not None or (input_ids is None) == (inputs_embeds is None):
                raise ValueError(
                    "You must specify exactly one of input_ids or inputs_embeds, no pixel_values: the model reads text"
                )
            _check_tensors(
                input_ids=input_ids,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                seq_idx=seq_idx,
                cu_seq_lens_q=cu_seq_lens_q,
            )
            shape = _text_shape(input_ids, inputs_embeds, self.config.hidden_size)
            attention_mask = _key_mask(attention_mask, shape)
            segment_ids = _segment_ids(shape, attention_mask, position_ids, seq_idx, cu_seq_lens_q)
            _check_lengths_of_kernels(cu_seq_lens_q, kwargs)
            if position_ids is None and segment_ids is not None:
                position_ids = _positions_in(segment_ids)
            if segment_ids is not None and not is_tracing(segment_ids) and segment_ids.max() < 2:
                segment_ids = None  # every row is one sequence
            hidden_states = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds)

        output_attentions = kwargs.get("output_attentions", self.config.output_attentions)
        ordered = segment_ids is not None or self.config.decay_type != "none" or self.config.direction != "both"
        attn_mode = self._resolve_mode(attn_mode, hidden_states.shape[1], ordered, output_attentions)
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, attn_mode, output_attentions, scan, segment_ids)
        hidden_states = self.final_norm(hidden_states)

        if self._is_exported(hidden_states) and seq_idx is None and cu_seq_lens_q is None:
            segment_ids = None  # the number of outputs must not depend on the values of positions
        pooled = self.pooler(hidden_states, attention_mask, segment_ids) if self.pooler is not None else None
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    @staticmethod
    def _is_exported(tensor: torch.Tensor) -> bool:
        return is_tracing(tensor) and (torch.compiler.is_exporting() or not torch.compiler.is_compiling())

    def _resolve_mode(self, attn_mode: str | None, length: int, ordered: bool, output_attentions: bool) -> str:
        mode = _check_attn_mode(self.config.attn_mode if attn_mode is None else attn_mode)
        if output_attentions:
            if mode in ("chunk", "rnn"):
                _warn_once(
                    f"The {mode} form has no attention maps: computing them, and the outputs, in parallel form."
                )
            return "parallel"
        if mode == "auto":
            mode = choose_mode(length, has_decay=ordered)
        if mode != "parallel" and self.training and self.config.attention_probs_dropout_prob > 0:
            _warn_once(f"The {mode} form has no attention matrix: `attention_probs_dropout_prob` is ignored in it.")
        return mode


def _check_tensors(**inputs: torch.Tensor | None):
    for name, values in inputs.items():
        if values is not None and not isinstance(values, torch.Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(values)}: give tokenizers return_tensors='pt'")


def _text_shape(input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, hidden_size: int) -> torch.Size:
    """(batch, length) of one of the two."""
    if inputs_embeds is None:
        if input_ids.ndim != 2 or 0 in input_ids.shape:
            raise ValueError(
                f"`input_ids` must be (batch, length), both at least 1, got shape {tuple(input_ids.shape)}"
            )
        return input_ids.shape
    if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != hidden_size or 0 in inputs_embeds.shape:
        raise ValueError(
            f"`inputs_embeds` must be (batch, length, hidden_size = {hidden_size}), batch and length at least 1, "
            f"got shape {tuple(inputs_embeds.shape)}"
        )
    if not inputs_embeds.is_floating_point():
        raise ValueError(f"`inputs_embeds` must be floating point, got {inputs_embeds.dtype}")
    _check_finite("inputs_embeds", inputs_embeds)
    return inputs_embeds.shape[:2]


def _key_mask(attention_mask: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """`attention_mask` as bool `(batch, length)`, or `None` where it masks nothing."""
    if attention_mask is None:
        return None
    if attention_mask.shape != shape:
        raise ValueError(
            f"`attention_mask` must be (batch, length) = {tuple(shape)}, got shape {tuple(attention_mask.shape)}"
        )
    is_real = attention_mask.bool()
    if is_tracing(attention_mask):
        return is_real  # in a traced graph no answer must be frozen
    # Both at once: a device is waited for once. To know that nothing is masked saves more than that.
    is_other, masks_nothing = torch.stack([(attention_mask != is_real).any(), is_real.all()]).tolist()
    if is_other:
        raise ValueError(
            "`attention_mask` must be 1 for tokens that take part and 0 for others, "
            f"got values from {attention_mask.min()} to {attention_mask.max()}: neither an additive mask nor one that "
            "numbers sequences is accepted"
        )
    return None if masks_nothing else is_real


def _segment_ids(
    shape: torch.Size,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    cu_seq_lens: torch.Tensor | None,
) -> torch.Tensor | None:
    """Numbers `(batch, length)` from 1 of the sequences packed into rows, or `None` where no field tells.

    Masked tokens belong to the sequence before them, whatever their fields say; in front of the first they have 0.
    """
    given = {}
    if seq_idx is not None:
        given["seq_idx"] = seq_idx
    if cu_seq_lens is not None:
        given["cu_seq_lens_q"] = _numbers_from_lengths(cu_seq_lens, shape)
    if position_ids is not None:
        given["position_ids"] = position_ids
    if not given:
        return None
    for name, values in given.items():
        _check_integers(name, values)
        _check_per_token(name, values, shape)
    first, *others = given
    begins = {
        name: _begins(values.expand(shape), attention_mask, by_position=name == "position_ids")
        for name, values in given.items()
    }
    if not is_tracing(begins[first]):
        for name in others:
            if not torch.equal(begins[first], begins[name]):
                raise ValueError(f"`{first}` and `{name}` contradict each other: sequences begin at different tokens")
    return begins[first].cumsum(-1)


def _check_integers(name: str, values: torch.Tensor):
    if values.is_floating_point() or values.dtype == torch.bool:
        raise ValueError(f"`{name}` must be integers, got {values.dtype}")


def _numbers_from_lengths(cu_seq_lens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    _check_integers("cu_seq_lens_q", cu_seq_lens)
    if cu_seq_lens.ndim != 1 or len(cu_seq_lens) < 2:
        raise ValueError(f"`cu_seq_lens_q` must be (sequences + 1,), got shape {tuple(cu_seq_lens.shape)}")
    batch, length = shape
    lengths = cu_seq_lens.diff()
    if not is_tracing(cu_seq_lens):
        is_whole = batch == 1 and cu_seq_lens[0] == 0 and cu_seq_lens[-1] == length
        if not is_whole or (lengths < 1).any():
            raise ValueError(
                f"`cu_seq_lens_q` must rise from 0 to the length of the only row, got {cu_seq_lens.tolist()} for "
                f"(batch, length) = {tuple(shape)}"
            )
    numbers = torch.arange(len(lengths), device=lengths.device)
    return numbers.repeat_interleave(lengths, output_size=length)[None]


def _check_lengths_of_kernels(cu_seq_lens: torch.Tensor | None, kwargs: dict):
    """What DataCollatorWithFlattening gives beside `cu_seq_lens_q` says the same of self-attention."""
    given = {name: kwargs.get(name) for name in ("cu_seq_lens_k", "max_length_q", "max_length_k")}
    given = {name: value for name, value in given.items() if value is not None}
    if given and cu_seq_lens is None:
        raise ValueError(f"`{next(iter(given))}` goes with `cu_seq_lens_q`, which is not given")
    if not given or not _is_free_to_read(cu_seq_lens):
        return
    keys = given.pop("cu_seq_lens_k", cu_seq_lens)
    if keys.tolist() != cu_seq_lens.tolist():
        raise ValueError(f"`cu_seq_lens_k` must be `cu_seq_lens_q`, {cu_seq_lens.tolist()}, got {keys.tolist()}")
    longest = cu_seq_lens.diff().max().item()
    for name, value in given.items():
        if value < longest:
            raise ValueError(f"`{name}` must be at least {longest}, as the longest sequence is, got {value}")


def _begins(values: torch.Tensor, attention_mask: torch.Tensor | None, by_position: bool) -> torch.Tensor:
    """Whether each token `(batch, length)` is the first one of a sequence that is not masked.

    It is where its number differs from that of the last such token before it, or, by position, at 0 and where that of
    the row's first such token comes again.
    """
    batch, length = values.shape
    places = torch.arange(length, device=values.device).expand(batch, length)
    real = torch.ones_like(places, dtype=torch.bool) if attention_mask is None else attention_mask
    if by_position:
        first = real.int().argmax(-1, keepdim=True)
        return real & ((values == 0) | (values == values.gather(-1, first)))
    seen = torch.where(real, places, -1).cummax(-1).values
    previous = nn.functional.pad(seen[:, :-1], (1, 0), value=-1)
    return real & ((previous < 0) | (values != values.gather(-1, previous.clamp(min=0))))


def _positions_in(segment_ids: torch.Tensor) -> torch.Tensor:
    """Positions of tokens in their sequences, `(batch, length)`, counted from the first that is not masked."""
    places = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    begins = nn.functional.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
    return places - (places * begins).cummax(-1).values


def _warn_once(message: str):
    if not torch.compiler.is_compiling():
        logger.warning_once(message)


@auto_docstring(
    custom_intro="""
    The Lion Model with a decoder head on top that is used for masked language modeling.
    """
)
class LionForMaskedLM(LionPreTrainedModel):
    _tied_weights_keys = {"decoder.weight": "lion.embeddings.word_embeddings.weight"}

    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.lion = LionModel(config, add_pooling_layer=False)
        self.head = LionPredictionHead(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)

        # Initialize weights and apply final processing
        self.post_init()

    def get_output_embeddings(self):
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear):
        self.decoder = new_embeddings

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Labels for computing the masked language modeling loss. Indices should be in `[-100, 0, ...,
            config.vocab_size - 1]`; tokens with index `-100` are ignored. A batch without any target has loss 0.
            With `config.sparse_prediction` the logits are those of the targets only.
        """
        outputs = self.lion(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if labels is not None:
            _check_labels(labels, hidden_states.shape[:2], self.config.vocab_size)
        if self.config.sparse_prediction and labels is not None:
            hidden_states, labels = hidden_states[labels != -100], labels[labels != -100]
        logits = self.decoder(self.head(hidden_states))  # (batch, length, vocab_size), or (targets, vocab_size)

        loss = None
        if labels is not None:
            kwargs = _count_targets(labels, kwargs)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)

        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _count_targets(labels: torch.Tensor, kwargs: dict, ignore_index: int = -100) -> dict:
    """Loss arguments with the number of targets to average over, at least 1: without any the loss is 0, not NaN."""
    count = kwargs.get("num_items_in_batch")
    count = (labels != ignore_index).sum() if count is None else torch.as_tensor(count)
    return {**kwargs, "num_items_in_batch": count.clamp(min=1).to(labels.device)}


def _check_labels(labels: torch.Tensor, shape: torch.Size, num_classes: int | None = None, name: str = "labels"):
    """Class ids of `shape`; those of whole sequences may have an axis of 1 behind it."""
    _check_tensors(**{name: labels})
    if labels.dtype != torch.int64:
        raise ValueError(f"`{name}` must be int64, got {labels.dtype}")
    if is_tracing(labels):
        return
    if labels.shape != shape and (len(shape) != 1 or labels.shape != (*shape, 1)):
        raise ValueError(f"`{name}` must be of shape {tuple(shape)}, one for each output, got {tuple(labels.shape)}")
    if num_classes is not None and _is_free_to_read(labels):
        wrong = labels[(labels != -100) & ((labels < 0) | (labels >= num_classes))]
        if len(wrong) > 0:
            raise ValueError(
                f"`{name}` must be from 0 to {num_classes - 1}, or -100 where nothing is to be predicted, "
                f"got {wrong[0]}"
            )


def _check_classification_labels(config: LionConfig, logits: torch.Tensor, labels: torch.Tensor):
    _check_tensors(labels=labels)
    problem = config.problem_type
    if problem is None and config.num_labels > 1:  # as the library tells them apart
        problem = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
    if problem == "single_label_classification":
        _check_labels(labels, logits.shape[:1], config.num_labels)
    elif not is_tracing(labels):
        if problem == "multi_label_classification" and not labels.is_floating_point():
            raise ValueError(f"`labels` must be floating point for several labels at once, got {labels.dtype}")
        if labels.shape != logits.shape and (config.num_labels > 1 or labels.shape != logits.shape[:1]):
            raise ValueError(
                f"`labels` must be (outputs, num_labels) = {tuple(logits.shape)}, got shape {tuple(labels.shape)} "
                f"of {labels.dtype} (class ids are int64)"
            )
        _check_finite("labels", labels)


def _classification_loss(
    model: LionPreTrainedModel, logits: torch.Tensor, labels: torch.Tensor, kwargs: dict
) -> torch.Tensor:
    """The library's loss by problem type, for sequences and images, `(batch, num_labels)` logits."""
    _check_classification_labels(model.config, logits, labels)
    if model.config.num_labels == 1 and model.config.problem_type != "single_label_classification":
        labels = labels.to(logits.dtype)  # regression, also to integers
    kwargs = _count_targets(labels, kwargs)
    loss = model.loss_function(labels, logits, model.config, **kwargs)
    if model.config.problem_type != "single_label_classification":
        # The library's other losses are means over this call, whatever is accumulated.
        loss = loss * (labels.numel() / kwargs["num_items_in_batch"])
    return loss


def _position_loss(logits: torch.Tensor, positions: torch.Tensor, kwargs: dict) -> torch.Tensor:
    """Cross entropy of one end of a span, `(batch, length)` logits, over the positions inside the sequence."""
    length = logits.shape[1]
    positions = positions.flatten().clamp(0, length)
    num_targets = _count_targets(positions, kwargs, ignore_index=length)["num_items_in_batch"]
    return nn.functional.cross_entropy(logits, positions, ignore_index=length, reduction="sum") / num_targets


def _classifier_dropout(config: LionConfig) -> nn.Dropout:
    p = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if p is None else p)


@auto_docstring(
    custom_intro="""
    The Lion Model with a sequence classification/regression head on top (a linear layer on top of the pooled output)
    e.g. for GLUE tasks.
    """
)
class LionForSequenceClassification(LionPreTrainedModel):
    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.lion = LionModel(config)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

        # Initialize weights and apply final processing
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        r"""
        labels (`torch.Tensor` of shape `(batch_size,)`, *optional*):
            Labels for computing the sequence classification/regression loss. If `config.num_labels == 1` a regression
            loss is computed (mean squared error), if `config.num_labels > 1` a classification loss.
        """
        outputs = self.lion(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.pooler_output))  # (batch, num_labels)

        loss = None
        if labels is not None:
            loss = _classification_loss(self, logits, labels, kwargs)

        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


@auto_docstring
class LionForMultipleChoice(LionPreTrainedModel):
    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.lion = LionModel(config)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, 1)

        # Initialize weights and apply final processing
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MultipleChoiceModelOutput:
        r"""
        input_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`):
            Indices of input sequence tokens in the vocabulary.
        token_type_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`, *optional*):
            Segment token indices to indicate first and second portions of the inputs.
        position_ids (`torch.LongTensor` of shape `(batch_size, num_choices, sequence_length)`, *optional*):
            Indices of positions of each input sequence tokens in the position embeddings.
        inputs_embeds (`torch.Tensor` of shape `(batch_size, num_choices, sequence_length, hidden_size)`, *optional*):
            Embedded tokens instead of `input_ids`.
        labels (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            Labels for computing the multiple choice classification loss. Indices should be in `[0, ...,
            num_choices - 1]`.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        _check_tensors(**inputs)
        if input_ids is not None and input_ids.ndim != 3:
            raise ValueError(f"`input_ids` must be (batch, num_choices, length), got shape {tuple(input_ids.shape)}")
        batch, num_choices = (input_ids if input_ids is not None else inputs_embeds).shape[:2]
        inputs = {name: None if tensor is None else tensor.flatten(0, 1) for name, tensor in inputs.items()}
        outputs = self.lion(**inputs, **kwargs)
        is_eager = not is_tracing(outputs.pooler_output)
        if is_eager and len(outputs.pooler_output) != batch * num_choices:
            raise ValueError("LionForMultipleChoice takes one sequence a choice, but `position_ids` begin several")
        logits = self.classifier(self.dropout(outputs.pooler_output)).view(-1, num_choices)

        loss = None
        if labels is not None:
            _check_labels(labels, logits.shape[:1], num_choices)
            num_targets = _count_targets(labels, kwargs)["num_items_in_batch"]
            loss = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_targets

        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


@auto_docstring
class LionForTokenClassification(LionPreTrainedModel):
    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.lion = LionModel(config, add_pooling_layer=False)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

        # Initialize weights and apply final processing
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        r"""
        labels (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Labels for computing the token classification loss. Indices should be in `[-100, 0, ...,
            config.num_labels - 1]`; tokens with index `-100` are ignored. A batch without any target has loss 0.
        """
        outputs = self.lion(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))  # (batch, length, num_labels)

        loss = None
        if labels is not None:
            _check_labels(labels, logits.shape[:2], self.num_labels)
            loss = self.loss_function(logits, labels, self.config, **_count_targets(labels, kwargs))

        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


@auto_docstring
class LionForQuestionAnswering(LionPreTrainedModel):
    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.lion = LionModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)

        # Initialize weights and apply final processing
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.LongTensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        r"""
        start_positions, end_positions (`torch.LongTensor` of shape `(batch_size,)`, *optional*):
            First and last token of the answer. Positions beyond the sequence are ignored; a batch without any other
            has loss 0.
        """
        outputs = self.lion(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)  # (batch, length) each

        loss = None
        if start_positions is not None and end_positions is not None:
            _check_labels(start_positions, start_logits.shape[:1], name="start_positions")
            _check_labels(end_positions, end_logits.shape[:1], name="end_positions")
            start_loss = _position_loss(start_logits, start_positions, kwargs)
            loss = (start_loss + _position_loss(end_logits, end_positions, kwargs)) / 2

        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


@auto_docstring(
    custom_intro="""
    The Lion Model with an image classification head on top (a linear layer on top of the pooled output: the final
    hidden state of the CLS token, or the mean over all tokens) e.g. for ImageNet.
    """
)
class LionForImageClassification(LionPreTrainedModel):
    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.lion = LionModel(config)
        self.dropout = _classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

        # Initialize weights and apply final processing
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        r"""
        labels (`torch.Tensor` of shape `(batch_size,)`, *optional*):
            Labels for computing the image classification/regression loss. If `config.num_labels == 1` a regression
            loss is computed (mean squared error), if `config.num_labels > 1` a classification loss.
        interpolate_pos_encoding (`bool`, *optional*):
            Whether to interpolate position embeddings to images of another size than `config.image_size`.
        """
        outputs = self.lion(pixel_values=pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        logits = self.classifier(self.dropout(outputs.pooler_output))  # (batch, num_labels)

        loss = None
        if labels is not None:
            loss = _classification_loss(self, logits, labels, kwargs)

        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


@auto_docstring(
    custom_intro="""
    The Lion Model with a decoder on top for masked image modeling, as proposed in
    [SimMIM](https://huggingface.co/papers/2111.09886): a linear layer that predicts the pixels of each patch.
    """
)
class LionForMaskedImageModeling(LionPreTrainedModel):
    main_input_name = "pixel_values"
    input_modalities = ("image",)

    def __init__(self, config: LionConfig):
        super().__init__(config)
        self.lion = LionModel(config, add_pooling_layer=False, use_mask_token=True)
        self.decoder = nn.Linear(config.hidden_size, config.num_channels * math.prod(as_pair(config.patch_size)))

        # Initialize weights and apply final processing
        self.post_init()

    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        bool_masked_pos: torch.BoolTensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedImageModelingOutput:
        r"""
        bool_masked_pos (`torch.BoolTensor` of shape `(batch_size, num_patches)`, *optional*):
            Boolean masked positions. Indicates which patches are masked (1) and which aren't (0). The loss is the mean
            absolute error over the pixels of the masked ones; without any it is 0.
        interpolate_pos_encoding (`bool`, *optional*):
            Whether to interpolate position embeddings to images of another size than `config.image_size`.
        """
        outputs = self.lion(
            pixel_values=pixel_values,
            bool_masked_pos=bool_masked_pos,
            interpolate_pos_encoding=interpolate_pos_encoding,
            **kwargs,
        )
        patches = self.decoder(outputs.last_hidden_state[:, int(self.config.use_cls_token) :])
        patches = patches.unflatten(-1, (self.config.num_channels, -1))  # (batch, patches, channels, pixels)
        reconstruction = self._assemble(patches, pixel_values)

        loss = None
        if bool_masked_pos is not None:
            masked = self._assemble(bool_masked_pos[..., None, None].bool().expand_as(patches), pixel_values)
            error = (_at_least_float32(reconstruction) - pixel_values).abs().masked_fill(~masked, 0.0)
            loss = error.sum() / masked.sum().clamp(min=1)

        return MaskedImageModelingOutput(
            loss=loss,
            reconstruction=reconstruction,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _assemble(self, patches: torch.Tensor, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images of the size of `pixel_values` from patches `(batch, patches, channels, pixels)`."""
        height, width = pixel_values.shape[-2:]
        patches = patches.unflatten(1, self.lion.embeddings.grid_of(pixel_values))
        patches = patches.unflatten(-1, self.lion.embeddings.patch_size)  # (batch, rows, columns, channels, p, q)
        return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)[..., :height, :width]


# What each Auto class builds, where the package is installed and from a saved folder alike.
AUTO_CLASSES = {
    "AutoModel": LionModel,
    "AutoModelForImageClassification": LionForImageClassification,
    "AutoModelForMaskedImageModeling": LionForMaskedImageModeling,
    "AutoModelForMaskedLM": LionForMaskedLM,
    "AutoModelForMultipleChoice": LionForMultipleChoice,
    "AutoModelForQuestionAnswering": LionForQuestionAnswering,
    "AutoModelForSequenceClassification": LionForSequenceClassification,
    "AutoModelForTokenClassification": LionForTokenClassification,
}


__all__ = [
    "AUTO_CLASSES",
    "LionForImageClassification",
    "LionForMaskedImageModeling",
    "LionForMaskedLM",
    "LionForMultipleChoice",
    "LionForQuestionAnswering",
    "LionForSequenceClassification",
    "LionForTokenClassification",
    "LionModel",
    "LionPreTrainedModel",
]
