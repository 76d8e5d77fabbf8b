"""Checkpoints of the paper's public code as models of this library.

    from lion_transformers.scripts.convert_original import convert_original_checkpoint

Only names change: every tensor is taken over as it is, and queries, keys and values are joined where ours are one.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lion_transformers import (
    LionConfig,
    LionForImageClassification,
    LionForMaskedLM,
    LionForSequenceClassification,
    LionPreTrainedModel,
)


MODEL_CLASSES = {
    "image": LionForImageClassification,
    "mlm": LionForMaskedLM,
    "sequence-classification": LionForSequenceClassification,
}

# Pattern in the name of an original tensor, and what stands in ours instead; applied one after the other.
TEXT_NAMES = {
    r"^model\.": "",
    r"^bert\.": "lion.",
    r"encoder\.layer\.": "layers.",
    r"embeddings\.LayerNorm": "embeddings.norm",
    r"attention\.self\.layer_norm": "attention.norm",
    r"attention\.self\.ai": "attention.decay_bias",
    r"attention\.self\.Wa_i": "attention.decay_bias_proj",
    r"attention\.output\.dense": "attention.out_proj",
    r"attention\.output\.LayerNorm": "attention_norm",
    r"intermediate\.dense": "mlp.fc1",
    r"output\.dense": "mlp.fc2",
    r"output\.LayerNorm": "mlp_norm",
    r"^cls\.predictions\.transform\.dense": "head.dense",
    r"^cls\.predictions\.transform\.LayerNorm": "head.norm",
    r"^cls\.predictions\.decoder": "decoder",
}
IMAGE_NAMES = {
    r"^cls_token": "lion.embeddings.cls_token",
    r"^pos_embed": "lion.embeddings.position_embeddings",
    r"^patch_embed\.proj": "lion.embeddings.projection",
    r"^blocks\.": "lion.layers.",
    r"attn\.qkv": "attention.qkv_proj",
    r"attn\.proj": "attention.out_proj",
    r"attn\.(a2?_i)$": r"attention.\1.decay_bias",
    r"attn\.(a2?_i)\.(weight|bias)": r"attention.\1.decay_bias_proj.\2",
    r"norm1": "attention_norm",
    r"norm2": "mlp_norm",
    r"^norm": "lion.final_norm",
    r"^head": "classifier",
}
# Parts whose tensors become one, in this order: projections of the text models, decays of the scan orders of images.
JOINED = {
    r"\.self\.(query|key|value)\.": (".self.query.", ".self.key.", ".self.value.", ".qkv_proj."),
    r"\.(a_i|a2_i)\.": (".a_i.", ".a2_i.", "."),
}
# The output bias under its second name, and the positions of LION-D and LION-S for text, which nothing reads.
UNUSED = re.compile(r"cls\.predictions\.bias|lion\.embeddings\.position_(ids|embeddings\.weight)")


def convert_original_checkpoint(
    state: Mapping[str, Tensor], original: Mapping[str, Any], task: str
) -> LionPreTrainedModel:
    """A model of this library with the weights and the settings of an original checkpoint.

    Args:
        state: the original's tensors by name.
        original: the original's settings: of text models `arch_type` and BERT's names, of image models `mask_type`,
            `order`, `pos_emb`, `cls_tok`, `img_size`, `patch_size`, `embed_dim`, `depth`, `num_heads`, `mlp_ratio`,
            `qkv_bias`, `num_classes`, `layer_norm_eps`.
        task: `"image"`, `"mlm"` or `"sequence-classification"`.

    Raises:
        ValueError: if tensors are missing or left over; they are named.
    """
    config = convert_image_config(original) if task == "image" else convert_text_config(original)
    model = MODEL_CLASSES[task](config)
    converted = convert_state(state, IMAGE_NAMES if task == "image" else TEXT_NAMES)
    load_all(model, converted)
    return model.eval()


def convert_text_config(original: Mapping[str, Any]) -> LionConfig:
    decay_type = {"lion-lit": "none", "lion-d": "fixed", "lion-s": "selective"}[original["arch_type"]]
    kept = {"num_labels", *LionConfig.__dataclass_fields__} - {"position_embedding_type"}
    settings = {name: value for name, value in original.items() if name in kept}
    return LionConfig(decay_type=decay_type, classifier_pooling="cls", **settings)


def convert_image_config(original: Mapping[str, Any]) -> LionConfig:
    return LionConfig(
        modality="image",
        decay_type={"Lit": "none", "Decay": "fixed", "Selective": "selective"}[original["mask_type"]],
        scan_order={"Normal": "raster", "S": "serpentine"}[original["order"]],
        position_embedding_type="absolute" if original["pos_emb"] else "none",
        # The original's models always carry a CLS token; this says whether the classifier reads it.
        pooling="cls" if original["cls_tok"] else "mean",
        image_size=original["img_size"],
        patch_size=original["patch_size"],
        hidden_size=original["embed_dim"],
        num_hidden_layers=original["depth"],
        num_attention_heads=original["num_heads"],
        intermediate_size=int(original["embed_dim"] * original["mlp_ratio"]),
        qkv_bias=original["qkv_bias"],
        num_labels=original["num_classes"],
        layer_norm_eps=original["layer_norm_eps"],
    )


def convert_state(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    converted = {}
    for name, tensor in state.items():
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        converted[name] = tensor
    for pattern, (*parts, joined) in JOINED.items():
        for name in {re.sub(pattern, parts[0], name) for name in converted if re.search(pattern, name)}:
            tensors = [converted.pop(name.replace(parts[0], part), None) for part in parts]
            converted[name.replace(parts[0], joined)] = torch.cat([t for t in tensors if t is not None])
    return converted


def load_all(model: LionPreTrainedModel, state: Mapping[str, Tensor]) -> None:
    missing, unexpected = model.load_state_dict(state, strict=False)
    unexpected = [name for name in unexpected if not UNUSED.fullmatch(name)]
    if missing or unexpected:
        found = [f"{kind} {', '.join(names)}" for kind, names in [("lacks", missing), ("has", unexpected)] if names]
        raise ValueError(f"the checkpoint does not fit its settings: it {' and '.join(found)}")
