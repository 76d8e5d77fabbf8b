"""LION model configuration."""

from difflib import get_close_matches
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import auto_docstring


@auto_docstring(checkpoint="lion-transformers/lion-s-text-base")
@strict
class LionConfig(PreTrainedConfig):
    r"""
    modality (`str`, *optional*, defaults to `"text"`):
        What the model reads. `"text"` is the BERT-like encoder of the paper (post-norm, token types).
    decay_type (`str`, *optional*, defaults to `"selective"`):
        Where decays come from: `"none"` (LION-LIT), `"fixed"` (LION-D, a learned scalar per head) or `"selective"`
        (LION-S, computed from each token, per head).
    decay_init (`str`, *optional*, defaults to `"paper"`):
        Initial decays: `"paper"` (scalars drawn from N(0, 1), gate biases of zero: every head forgets within a few
        tokens) or `"multiscale"` (time constants log-spaced over the heads, from 4 tokens to
        `max_position_embeddings`).
    attn_mode (`str`, *optional*, defaults to `"auto"`):
        Form in which the operator is computed: `"parallel"`, `"chunk"`, `"rnn"`, or `"auto"` (parallel for short
        sequences, chunk beyond). All give the same results; see `set_attn_mode`.
    chunk_size (`int`, *optional*, defaults to 64):
        Tokens per block of the chunk form.
    feature_map (`str`, *optional*):
        Map applied to queries and keys: `"identity"`, `"elu"` (elu(x) + 1) or `"silu"` ((silu(x) + ½) over its norm,
        per head). Defaults to `"identity"`, and where rows are normalised to `"elu"` without and `"silu"` with decays.
    normalize (`bool`, *optional*, defaults to `False`):
        Whether every row of the attention matrix is divided by its sum. If not, scores are divided by
        `sqrt(head_dim)`. Needs a positive feature map.
    attention_output_norm (`bool`, *optional*):
        Whether a LayerNorm stands between the operator and the output projection. Defaults to `True` for LION-LIT
        with rows that are not normalised, else to `False`.
    norm_position (`str`, *optional*, defaults to `"post"`):
        `"post"` (BERT) or `"pre"` (ViT; with a final LayerNorm after the last layer).
    position_embedding_type (`str`, *optional*):
        `"absolute"` (learned) or `"none"`. Defaults to `"absolute"` for LION-LIT and to `"none"` under decays, which
        tell positions apart and set no limit on the length.
    max_position_embeddings (`int`, *optional*, defaults to 512):
        Length of the table of absolute position embeddings; under decays only the longest initial time constant.
    qkv_bias (`bool`, *optional*, defaults to `True`):
        Whether the projections of queries, keys and values have biases.
    attention_probs_dropout_prob (`float`, *optional*, defaults to 0.0):
        Dropout on the attention matrix. Acts in the parallel form only: the others have no such matrix.
    classifier_pooling (`str`, *optional*):
        What the pooler takes: `"cls"` (the first token that is not masked) or `"mean"` (the mean over all tokens that
        are not masked). Defaults to `"cls"` for LION-LIT and to `"mean"` under decays, where the first token sees
        little of a long text.
    sparse_prediction (`bool`, *optional*, defaults to `False`):
        Whether `LionForMaskedLM` computes logits for the targets only, `(targets, vocab_size)`, when it is given
        labels. Saves most of the time and memory of the vocabulary in pretraining.

    Example:

    ```python
    >>> from lion_transformers import LionConfig, LionModel

    >>> # LION-S of BERT's base size, with random weights
    >>> configuration = LionConfig(decay_type="selective")
    >>> model = LionModel(configuration)

    >>> # Accessing the model configuration
    >>> configuration = model.config
    ```"""

    model_type = "lion"

    modality: Literal["text"] = "text"
    decay_type: Literal["none", "fixed", "selective"] = "selective"
    decay_init: Literal["paper", "multiscale"] = "paper"
    attn_mode: Literal["auto", "parallel", "chunk", "rnn"] = "auto"
    chunk_size: int = 64
    feature_map: Literal["identity", "elu", "silu"] | None = None
    normalize: bool = False
    attention_output_norm: bool | None = None
    norm_position: Literal["pre", "post"] = "post"
    position_embedding_type: Literal["absolute", "none"] | None = None
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.0
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    qkv_bias: bool = True
    pad_token_id: int | None = 0
    classifier_dropout: float | int | None = None
    classifier_pooling: Literal["cls", "mean"] | None = None
    sparse_prediction: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        self._refuse_misspelt(kwargs)
        has_decay = self.decay_type != "none"
        if self.feature_map is None:
            positive = "silu" if has_decay else "elu"
            self.feature_map = positive if self.normalize else "identity"
        if self.attention_output_norm is None:
            self.attention_output_norm = not has_decay and not self.normalize
        if self.position_embedding_type is None:
            self.position_embedding_type = "none" if has_decay else "absolute"
        if self.classifier_pooling is None:
            self.classifier_pooling = "mean" if has_decay else "cls"
        super().__post_init__(**kwargs)

    def _refuse_misspelt(self, unknown):
        """Unknown keys pass, as everywhere in Transformers, unless they are nearly the name of a field."""
        names = list(self.__dataclass_fields__)
        for key in unknown:
            if key.startswith("_") or hasattr(type(self), key):
                continue
            if matches := get_close_matches(key, names, n=1, cutoff=0.85):
                raise ValueError(f"LionConfig has no field `{key}`: did you mean `{matches[0]}`?")

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Validates the architecture of the config."""
        super().validate_architecture()
        for name in ("hidden_size", "num_attention_heads", "chunk_size", "vocab_size", "type_vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) must be a multiple of `num_attention_heads` "
                f"({self.num_attention_heads})"
            )
        if self.normalize and self.feature_map == "identity":
            raise ValueError(
                '`normalize=True` needs a positive feature map: `feature_map` must be "elu" or "silu", '
                'got "identity", under which the sum of a row can vanish'
            )


__all__ = ["LionConfig"]
