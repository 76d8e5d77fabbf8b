"""LION model configuration."""

import math
import os
import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import auto_docstring


# Sizes of the paper, by modality and name.
SIZES = {
    "text": {
        "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    },
    "image": {
        "tiny": {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768},
        "small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536},
        "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    },
}


@auto_docstring(checkpoint="lion-transformers/lion-s-text-base")
@strict
class LionConfig(PreTrainedConfig):
    r"""
    modality (`str`, *optional*, defaults to `"text"`):
        What the model reads: `"text"` (the BERT-like encoder of the paper: post-norm, token types) or `"image"` (the
        ViT-like one: pre-norm, row-normalised).
    decay_type (`str`, *optional*, defaults to `"selective"`):
        Where decays come from: `"none"` (LION-LIT), `"fixed"` (LION-D, a learned scalar per head) or `"selective"`
        (LION-S, computed from each token, per head).
    decay_init (`str`, *optional*, defaults to `"paper"`):
        Initial decays: `"paper"` (scalars drawn from N(0, 1), gate biases of zero: every head forgets within a few
        tokens) or `"multiscale"` (time constants log-spaced over the heads, from 4 tokens to
        `max_position_embeddings`, or to the number of patches of an image).
    attn_mode (`str`, *optional*, defaults to `"auto"`):
        Form in which the operator is computed: `"parallel"`, `"chunk"`, `"rnn"`, or `"auto"` (parallel for short
        sequences, chunk beyond). All give the same results; see `set_attn_mode`.
    chunk_size (`int`, *optional*, defaults to 64):
        Tokens per block of the chunk form.
    feature_map (`str`, *optional*):
        Map applied to queries and keys: `"identity"`, `"elu"` (elu(x) + 1) or `"silu"` ((silu(x) + ½) over its norm,
        per head). Defaults to `"identity"`, and where rows are normalised to `"elu"` without and `"silu"` with decays.
    normalize (`bool`, *optional*):
        Whether every row of the attention matrix is divided by its sum. If not, scores are divided by
        `sqrt(head_dim)`. Needs a positive feature map. Defaults to `False` for text and to `True` for images.
    direction (`str`, *optional*, defaults to `"both"`):
        Which way attention goes: `"both"`, or what the paper's ablation leaves of it: `"forward"` (every token sees
        what comes before it), `"backward"`, or `"alternate"` (forward and backward in turn over the layers).
    diagonal (`str`, *optional*, defaults to `"balanced"`):
        How often a token counts itself: `"balanced"` (once) or `"doubled"` (once in each direction; the paper's
        ablation again).
    attention_output_norm (`bool`, *optional*):
        Whether a LayerNorm stands between the operator and the output projection. Defaults to `True` for LION-LIT
        with rows that are not normalised, else to `False`.
    norm_position (`str`, *optional*):
        `"post"` (BERT) or `"pre"` (ViT; with a final LayerNorm after the last layer). Defaults to `"post"` for text
        and to `"pre"` for images.
    position_embedding_type (`str`, *optional*):
        `"absolute"` (learned) or `"none"`. Defaults to `"absolute"` for LION-LIT and to `"none"` under decays, which
        tell positions apart and set no limit on the length or on the size of an image.
    max_position_embeddings (`int`, *optional*, defaults to 512):
        Length of a text's table of absolute position embeddings; under decays only the longest initial time constant.
    hidden_dropout_prob (`float`, *optional*):
        Dropout on embeddings and on what every layer adds. Defaults to 0.1 for text and to 0.0 for images.
    layer_norm_eps (`float`, *optional*):
        Epsilon of the layer norms. Defaults to 1e-12 for text and to 1e-6 for images.
    drop_path_rate (`float`, *optional*, defaults to 0.0):
        Probability that the last layer's attention or feed-forward output is dropped for an example (stochastic
        depth); it rises linearly from 0 in the first layer.
    qkv_bias (`bool`, *optional*, defaults to `True`):
        Whether the projections of queries, keys and values have biases.
    attention_probs_dropout_prob (`float`, *optional*, defaults to 0.0):
        Dropout on the attention matrix. Acts in the parallel form only: the others have no such matrix.
    classifier_pooling (`str`, *optional*):
        What the pooler takes: `"cls"` (the first token that is not masked) or `"mean"` (the mean over all tokens that
        are not masked, an image's CLS token included). Defaults to `"cls"` for LION-LIT and to `"mean"` under decays,
        where the first token sees little of a long sequence, with `direction="forward"`, where it sees itself only,
        and without a CLS token. `pooling` is the same field.
    sparse_prediction (`bool`, *optional*, defaults to `False`):
        Whether `LionForMaskedLM` computes logits for the targets only, `(targets, vocab_size)`, when it is given
        labels. Saves most of the time and memory of the vocabulary in pretraining.
    use_cls_token (`bool`, *optional*, defaults to `True`):
        Whether a learned CLS token stands before the patches of an image. It is first in every scan order, its
        selective decay is 1.
    scan_order (`str`, *optional*, defaults to `"raster"`):
        Order in which decays walk over the patches of an image: `"raster"` (row by row), `"serpentine"` (rows
        left-right-left and columns down-up-down, each with its own decays: LION-D♮ and LION-S♮) or `"hilbert"` (the
        space-filling curve).

    Example:

    ```python
    >>> from lion_transformers import LionConfig, LionModel

    >>> # LION-S of BERT's base size, with random weights
    >>> configuration = LionConfig(decay_type="selective")
    >>> model = LionModel(configuration)

    >>> # LION-D♮ of the paper's small size, for images
    >>> configuration = LionConfig.from_size("small", modality="image", decay_type="fixed", scan_order="serpentine")

    >>> # Accessing the model configuration
    >>> configuration = model.config
    ```"""

    model_type = "lion"
    attribute_map = {"pooling": "classifier_pooling"}

    modality: Literal["text", "image"] = "text"
    decay_type: Literal["none", "fixed", "selective"] = "selective"
    decay_init: Literal["paper", "multiscale"] = "paper"
    attn_mode: Literal["auto", "parallel", "chunk", "rnn"] = "auto"
    chunk_size: int = 64
    feature_map: Literal["identity", "elu", "silu"] | None = None
    normalize: bool | None = None
    direction: Literal["both", "forward", "backward", "alternate"] = "both"
    diagonal: Literal["balanced", "doubled"] = "balanced"
    attention_output_norm: bool | None = None
    norm_position: Literal["pre", "post"] | None = None
    position_embedding_type: Literal["absolute", "none"] | None = None
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int | None = None
    attention_probs_dropout_prob: float | int = 0.0
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float | None = None
    drop_path_rate: float | int = 0.0
    qkv_bias: bool = True
    pad_token_id: int | None = 0
    classifier_dropout: float | int | None = None
    classifier_pooling: Literal["cls", "mean"] | None = None
    sparse_prediction: bool = False
    tie_word_embeddings: bool = True
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    use_cls_token: bool = True
    scan_order: Literal["raster", "serpentine", "hilbert"] = "raster"

    @classmethod
    def from_size(cls, size: str, modality: str = "text", **overrides) -> "LionConfig":
        """The paper's model of a named size.

        Args:
            size (`str`): `"base"` or `"large"` for text; `"tiny"`, `"small"` or `"base"` for images.
            modality (`str`, *optional*, defaults to `"text"`): `"text"` or `"image"`.
            overrides: any other field, `decay_type` and `scan_order` above all.

        Raises:
            ValueError: for a size that the modality does not have.
        """
        sizes = SIZES.get(modality, {})
        if size not in sizes:
            accepted = ", ".join(f"{name!r} ({kind})" for kind in SIZES for name in SIZES[kind])
            raise ValueError(f"`size` must be one of {accepted}, got {size!r} for modality {modality!r}")
        return cls(modality=modality, **{**sizes[size], **overrides})

    @staticmethod
    def family_auto_map() -> dict[str, str]:
        """Auto class → what it builds, by module and name: the whole family."""
        # Not at the top, where it would be circular. As this file names the others, Transformers' loader fetches them
        # along with it, and a configuration that was loaded alone can be saved with all code.
        from .modeling_lion import AUTO_CLASSES

        models = {name: f"modeling_lion.{cls.__name__}" for name, cls in AUTO_CLASSES.items()}
        return {"AutoConfig": "configuration_lion.LionConfig", **models}

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs):
        """
        Save the configuration and the code of the whole family: with it the folder loads where the library is not
        installed, in every class that fits, by `trust_remote_code=True`.

        Args:
            save_directory (`str` or `os.PathLike`):
                Folder, made if it does not exist.
            push_to_hub (`bool`, *optional*, defaults to `False`):
                Whether to upload what was saved.
            kwargs (`dict[str, Any]`, *optional*):
                As of [`~utils.PushToHubMixin.push_to_hub`]; `repo_id` defaults to the name of the folder.
        """
        family = self.family_auto_map()
        # What the user has registered stays; what leads to the family in another repository does not.
        registered = {
            name: reference
            for name, reference in (getattr(self, "auto_map", None) or {}).items()
            if str(reference).rpartition("--")[2] not in family.values()
        }
        self.auto_map = {**family, **registered}
        super().save_pretrained(save_directory)
        for file in Path(__file__).parent.glob("*_lion.py"):
            copy = Path(save_directory, file.name)
            if not (copy.exists() and copy.samefile(file)):
                shutil.copyfile(file, copy)
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def __post_init__(self, **kwargs):
        self._refuse_misspelt(kwargs)
        if "pooling" in kwargs:
            pooling = kwargs.pop("pooling")
            if self.classifier_pooling not in (None, pooling):
                raise ValueError(
                    "`pooling` and `classifier_pooling` are the same field: "
                    f'got "{pooling}" and "{self.classifier_pooling}"'
                )
            self.classifier_pooling = pooling
        self._fill_in_recipe()
        super().__post_init__(**kwargs)

    def _fill_in_recipe(self):
        """What is not set follows from modality and decay: the paper's models."""
        is_image, has_decay = self.modality == "image", self.decay_type != "none"
        if self.normalize is None:
            self.normalize = is_image
        if self.norm_position is None:
            self.norm_position = "pre" if is_image else "post"
        if self.hidden_dropout_prob is None:
            self.hidden_dropout_prob = 0.0 if is_image else 0.1
        if self.layer_norm_eps is None:
            self.layer_norm_eps = 1e-6 if is_image else 1e-12
        if self.feature_map is None:
            positive = "silu" if has_decay else "elu"
            self.feature_map = positive if self.normalize else "identity"
        if self.attention_output_norm is None:
            self.attention_output_norm = not has_decay and not self.normalize
        if self.position_embedding_type is None:
            self.position_embedding_type = "none" if has_decay else "absolute"
        if self.classifier_pooling is None:
            blind = self.direction == "forward" or (is_image and not self.use_cls_token)
            self.classifier_pooling = "mean" if has_decay or blind else "cls"

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of patches of an image of `image_size`; incomplete patches at its edges count."""
        return count_patches(as_pair(self.image_size), as_pair(self.patch_size))

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        cls._refuse_misspelt(kwargs)  # which would be dropped without a word
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def _refuse_misspelt(cls, unknown):
        """Unknown keys pass, as everywhere in Transformers, unless they are nearly the name of a field."""
        names = [*cls.__dataclass_fields__, *cls.attribute_map]
        for key in unknown:
            if key in names or key.startswith("_") or hasattr(cls, key):
                continue
            if meant := nearest_field(key, names):
                raise ValueError(f"LionConfig has no field `{key}`: did you mean `{meant}`?")

    def validate_architecture(self):
        """Part of `@strict`-powered validation. Validates the architecture of the config."""
        super().validate_architecture()
        counts = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "chunk_size"]
        for name in [*counts, "vocab_size", "type_vocab_size", "max_position_embeddings", "num_channels"]:
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
        if self.classifier_pooling not in ("cls", "mean"):  # under its other name the field is not checked when set
            raise ValueError(f'`classifier_pooling` must be "cls" or "mean", got "{self.classifier_pooling}"')
        if self.classifier_pooling == "cls" and self.direction == "forward":
            raise ValueError(
                '`classifier_pooling` must be "mean" with `direction="forward"`, in which the first token sees only '
                'itself, got "cls"'
            )
        if not 0 < self.layer_norm_eps < math.inf:
            raise ValueError(f"`layer_norm_eps` must be above 0, got {self.layer_norm_eps}")
        for name in ["hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"]:
            if not 0 <= (getattr(self, name) or 0.0) <= 1:
                raise ValueError(f"`{name}` must be from 0 to 1, got {getattr(self, name)}")
        if not 0 <= self.initializer_range < math.inf:
            raise ValueError(f"`initializer_range` must be at least 0, got {self.initializer_range}")
        if self.modality == "text" and not 0 <= (self.pad_token_id or 0) < self.vocab_size:
            raise ValueError(
                f"`pad_token_id` must be None or from 0 to `vocab_size` - 1 = {self.vocab_size - 1}, "
                f"got {self.pad_token_id}"
            )
        if not 0 <= self.drop_path_rate < 1:
            raise ValueError(f"`drop_path_rate` must be at least 0 and below 1, got {self.drop_path_rate}")
        if self.modality == "image":
            self._validate_image()
        elif self.scan_order != "raster":
            raise ValueError(f'`scan_order` must be "raster" for text, which has no grid, got "{self.scan_order}"')

    def _validate_image(self):
        for name in ("image_size", "patch_size"):
            sides = as_pair(getattr(self, name))
            if len(sides) != 2 or min(sides) < 1:
                raise ValueError(f"`{name}` must be one side or (height, width), all at least 1, got {sides}")
        if self.classifier_pooling == "cls" and not self.use_cls_token:
            raise ValueError('`classifier_pooling="cls"` needs a CLS token: `use_cls_token` must be True, got False')


def as_pair(size):
    """(height, width) of a square or rectangle."""
    return (size, size) if isinstance(size, int) else tuple(size)


def count_patches(image_size, patch_size):
    """Rows and columns of patches that cover an image, both sizes as (height, width)."""
    return tuple(-(-pixels // patch) for pixels, patch in zip(image_size, patch_size, strict=True))


def nearest_field(key, names):
    """The one of `names` that a misspelt `key` nearly is, or None."""
    return next(iter(get_close_matches(key, names, n=1, cutoff=0.85)), None)


__all__ = ["LionConfig"]
