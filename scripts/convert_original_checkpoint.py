"""Convert a checkpoint of the paper's public code into a folder that the Auto classes load.

    python scripts/convert_original_checkpoint.py --checkpoint lion_s.pt --task mlm --output_dir outputs/lion-s
    python scripts/convert_original_checkpoint.py --checkpoint tiny.pth --task image-classification \\
        --recipe train_image_tiny_lion_s_natural --output_dir outputs/lion-s-natural-tiny
    python scripts/convert_original_checkpoint.py --checkpoint lit.pth --task image-classification \\
        --num_attention_heads 3 --pooling mean --output_dir outputs/lion-lit

Text models are read from `state` → `model` in the file, image models from `model`, or from `model_ema` with
--use_ema: the averaged weights are never taken unasked, because the file does not say which of the two a published
figure is of. What the names and shapes of the tensors tell is read from them: decay type, scan order, layers, widths,
vocabulary, patches, labels, biases, norms, positions of images, and under decays the number of heads. An argument
that contradicts them stops the conversion.

What they do not tell comes from an argument, from the `config` mapping of --config or of a recipe (a YAML file of
your own or one of the training scripts' recipes, whose other keys are not looked at), and else from the paper's
models: heads of 64 without decays (if the width is a multiple of 64), the first token for text classifiers, the mean
of all tokens for images under decays, 224 pixels without position embeddings and a square with them, layer norms with
an epsilon of 1e-12 for text and 1e-6 for images, positions of text for LION-LIT only. What was assumed is printed.
Two things are asked for: the pooling of an image model without decays, and, as a BERT looks like that, whether a text
model with neither decays nor norms on the attention output is a LION at all (`--attention_output_norm false`).

Every tensor is taken over as it is (queries, keys and values are joined, as are the decays of two scan orders);
missing and unexpected ones are listed, and then nothing is written. Not here: tokenizers, which the files do not
hold; optimizer states; checkpoints of anything else.
"""

import argparse
import fnmatch
import math
import pickle
import re
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers.hf_argparser import HfArg

from lion_transformers import (
    SCAN_ORDERS,
    LionConfig,
    LionForImageClassification,
    LionForMaskedLM,
    LionForSequenceClassification,
    LionPreTrainedModel,
)
from lion_transformers.configuration_lion import as_pair
from lion_transformers.scripts import pretrain_mlm, train_image_classification
from lion_transformers.scripts.arguments import (
    KeyValues,
    MergeKeyValues,
    UsageError,
    did_you_mean,
    one_line,
    parse_arguments,
    run,
)
from lion_transformers.scripts.checkpointing import claim_output_dir, publish, publish_files, unfinished
from lion_transformers.scripts.images import (
    DEFAULT_CROP_PCT,
    AugmentationArguments,
    channel_statistics,
    make_image_processor,
)
from lion_transformers.scripts.model_card import variant_of


IMAGE_TASK = "image-classification"
MODEL_CLASSES = {
    "mlm": LionForMaskedLM,
    "sequence-classification": LionForSequenceClassification,
    IMAGE_TASK: LionForImageClassification,
}
# Arguments of the training scripts, which a recipe may hold as well.
TRAINING_ARGUMENTS = [
    pretrain_mlm.ModelArguments,
    pretrain_mlm.DataArguments,
    pretrain_mlm.PretrainingArguments,
    *(group.type for group in fields(train_image_classification.Arguments)),
]
HEAD_DIM = 64  # of all models in the paper

# Pattern in the name of one of our tensors, and what stands in the original's; applied one after the other.
TEXT_NAMES = {
    r"^lion\.": "bert.",
    r"^bert\.layers": "bert.encoder.layer",
    r"embeddings\.norm": "embeddings.LayerNorm",
    r"attention\.norm": "attention.self.layer_norm",
    r"attention\.qkv_proj": "attention.self.{projection}",
    r"attention\.decay_bias_proj": "attention.self.Wa_i",
    r"attention\.decay_bias": "attention.self.ai",
    r"attention\.out_proj": "attention.output.dense",
    r"attention_norm": "attention.output.LayerNorm",
    r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
    r"mlp_norm": "output.LayerNorm",
    r"^head\.dense": "cls.predictions.transform.dense",
    r"^head\.norm": "cls.predictions.transform.LayerNorm",
    r"^decoder": "cls.predictions.decoder",
}
IMAGE_NAMES = {
    r"^lion\.": "",
    r"^embeddings\.cls_token": "cls_token",
    r"^embeddings\.position_embeddings": "pos_embed",
    r"^embeddings\.projection": "patch_embed.proj",
    r"^layers": "blocks",
    r"attention\.qkv_proj": "attn.qkv",
    r"attention\.decay_bias(_proj)?": "attn.{order}",
    r"attention\.out_proj": "attn.proj",
    r"attention_norm": "norm1",
    r"mlp_norm": "norm2",
    r"^final_norm": "norm",
    r"^classifier": "head",
}
PROJECTIONS = ("query", "key", "value")
ORDERS = ("a_i", "a2_i")  # rows, then columns
# What DistributedDataParallel, torch.compile and Composer put in front of every name.
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.|model\.)+")
OUTPUT_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")  # one bias under two names
# Nothing computes with these; the positions only where the model has none.
UNUSED = {OUTPUT_BIASES[0], "bert.embeddings.position_ids", "bert.embeddings.position_embeddings.weight"}


@dataclass
class ConversionArguments:
    _argument_group_name = "conversion"

    checkpoint: str = field(metadata={"help": "The file: .pt of a text model, .pth of an image model."})
    output_dir: str = field(metadata={"help": "Folder for the model."})
    task: Literal[tuple(MODEL_CLASSES)] = field(metadata={"help": "What the model in the file was trained for."})
    use_ema: bool = HfArg(default=False, help="Take the averaged weights (model_ema) of an image model.")
    allow_pickle: bool = HfArg(
        default=False, help="Read a file that holds more than tensors. This can run any code: only if you trust it."
    )
    overwrite_output_dir: bool = HfArg(default=False, help="Write into output_dir even if it has files in it.")


@dataclass
class ArchitectureArguments:
    _argument_group_name = "architecture, where the tensors do not tell it"

    config: KeyValues = field(
        default_factory=KeyValues,
        metadata={
            "action": MergeKeyValues,
            "metavar": "KEY=VALUE,KEY=VALUE",
            "help": "Fields of LionConfig; the arguments below win. A mapping in a recipe.",
        },
    )
    num_attention_heads: int | None = HfArg(default=None, help=f"Default without decays: one for {HEAD_DIM} of width.")
    num_labels: int | None = HfArg(default=None, help="To check against the file.")
    decay_type: Literal["none", "fixed", "selective"] | None = HfArg(default=None, help="To check against the file.")
    pooling: Literal["cls", "mean"] | None = HfArg(
        default=None, help="What the classifier reads. Default: cls for text, mean for images under decays."
    )
    image_size: int | None = HfArg(default=None, help="Default: that of the position embeddings, or 224.")
    scan_order: Literal["raster", "serpentine"] | None = HfArg(default=None, help="To check against the file.")
    layer_norm_eps: float | None = HfArg(default=None, help="Default: 1e-12 for text, 1e-6 for images.")
    attention_output_norm: bool | None = HfArg(
        default=None, help="To check against the file; false says that a LION-LIT for text without it is no BERT."
    )
    position_embedding_type: Literal["absolute", "none"] | None = HfArg(
        default=None, help="Default: absolute for LION-LIT; for images what the file has."
    )

    def settings(self) -> dict[str, Any]:
        """Fields of LionConfig that were told."""
        arguments = {name: value for name, value in asdict(self).items() if value is not None and name != "config"}
        return {**self.config, **arguments}


@dataclass
class Conversion:
    model: LionPreTrainedModel
    assumed: dict[str, Any]  # fields of its configuration
    left_out: list[str]  # names in the file of what nothing computes with


def main(argv: Sequence[str] | None = None) -> None:
    args, architecture = parse_arguments(
        [ConversionArguments, ArchitectureArguments], argv, __doc__, other_recipe_types=TRAINING_ARGUMENTS
    )
    output_dir = Path(args.output_dir)
    claim_output_dir(output_dir, args.overwrite_output_dir)
    content = read_file(Path(args.checkpoint), args.allow_pickle)
    state = find_tensors(content, args.task, args.use_ema)
    conversion = convert_original_checkpoint(state, args.task, architecture.settings())
    save(conversion.model, output_dir)
    report(conversion, output_dir)


# The file → its tensors by name


def read_file(path: Path, allow_pickle: bool) -> Any:
    """What was saved with `torch.save`.

    Raises:
        UsageError: there is no such file, it is something else or not whole, or it needs `allow_pickle`.
    """
    if not path.is_file():
        raise UsageError(f"checkpoint {path} is {'a folder' if path.is_dir() else 'not there'}.")
    if zipfile.is_zipfile(path) and (damaged := damaged_member(path)):
        raise UsageError(f"checkpoint {path} is damaged: {damaged} in it does not have its checksum.")
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # a run's arguments, beside image models
            return torch.load(path, map_location="cpu", weights_only=not allow_pickle)
    except Exception as error:  # torch, and whatever it unpickles, raise anything
        if not allow_pickle and needs_pickle(path, error):
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise UsageError(
                f"checkpoint {path} holds more than tensors{f' ({found[1]})' if found else ''}, and reading that can"
                " run any code: if you trust the file, --allow_pickle reads it."
            ) from error
        if isinstance(error, (ImportError, AttributeError)):  # a class that is not installed here
            raise UsageError(f"cannot read checkpoint {path}: {one_line(error)}.") from error
        raise UsageError(f"cannot read checkpoint {path}: it is not what torch.save writes, or not whole.") from error


def damaged_member(path: Path) -> str | None:
    """The first part of what torch.save has written that is not what it wrote; torch does not look."""
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip()
    except zipfile.BadZipFile as error:
        return one_line(error)


def needs_pickle(path: Path, error: Exception) -> bool:
    """Whether reading failed for what is in the file; other files than torch's fail with the same error."""
    is_refusal = isinstance(error, pickle.UnpicklingError)
    return is_refusal and (zipfile.is_zipfile(path) or "Unsupported global" in str(error))


def find_tensors(content: Any, task: str, use_ema: bool) -> Mapping[str, Tensor]:
    """The tensors in what was read: at `state` → `model` for text, at `model` or `model_ema` for images.

    Raises:
        UsageError: there are none.
    """
    if use_ema and task != IMAGE_TASK:
        raise UsageError("use_ema is for image models: checkpoints of text models hold no averaged weights.")
    image_key = "model_ema" if use_ema else "model"
    keys = [image_key] if task == IMAGE_TASK else ["state", "model"]
    state = content
    for key in keys:
        state = state.get(key) if isinstance(state, Mapping) else None
    if isinstance(state, Mapping) and state and all(isinstance(x, Tensor) for x in state.values()):
        return {str(name): tensor for name, tensor in state.items()}
    averaged = " (averaged weights are there: --use_ema)" if "model" in keys and has_key(content, "model_ema") else ""
    raise UsageError(
        f"the checkpoint holds no tensors at {' → '.join(keys)}, where the paper's code puts those of"
        f" {'image' if task == IMAGE_TASK else 'text'} models{averaged}."
    )


def has_key(content: Any, key: str) -> bool:
    return isinstance(content, Mapping) and key in content


def unwrap(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names that they had before the model was wrapped."""
    unwrapped = {}
    for name, tensor in state.items():
        short = WRAPPERS.sub("", name)
        if short in unwrapped:
            raise UsageError(f"the checkpoint holds {short} twice, once as {name}.")
        unwrapped[short] = tensor
    return unwrapped


def check_values(state: Mapping[str, Tensor]) -> None:
    """Refuse what cannot be weights. Indices are whole numbers; nothing computes with them."""
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
            raise UsageError(
                f"{name} in the checkpoint is no plain tensor of numbers ({tensor.dtype}, {tensor.layout})."
            )
        if name not in UNUSED and not tensor.is_floating_point():
            raise UsageError(f"{name} in the checkpoint holds {tensor.dtype}, not floating-point numbers.")
        if not tensor.isfinite().all():
            raise UsageError(f"{name} in the checkpoint holds numbers that are not finite.")


# Tensors → model


def convert_original_checkpoint(
    state: Mapping[str, Tensor], task: str, told: Mapping[str, Any] | None = None
) -> Conversion:
    """A model of this library with the weights of an original checkpoint.

    Args:
        state: the original's tensors by name.
        task: `"mlm"`, `"sequence-classification"` or `"image-classification"`.
        told: fields of `LionConfig`; what the tensors tell need not be among them.

    Raises:
        UsageError: tensors are missing, left over or of other shapes than the settings make them, `told` contradicts
            them, or says too little.
    """
    state = unwrap(state)
    check_values(state)
    told = {LionConfig.attribute_map.get(name, name): one_side(value) for name, value in (told or {}).items()}
    read = read_image_settings(state) if task == IMAGE_TASK else read_text_settings(state, task)
    check_told(told, read, task)
    refuse_bert({**read, **told}, asserted="attention_output_norm" in told)
    assumed = assume_settings({**read, **told}, state, task)
    try:
        model = MODEL_CLASSES[task](LionConfig(**assumed, **{**read, **told}))
    # KeyError: an unknown activation; the last two: of fields that only Transformers reads.
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
        raise UsageError(f"cannot make the model: {one_line(error)}") from error
    left_out = load_tensors(model, state)
    for name in ["layer_norm_eps", "position_embedding_type", "hidden_act"]:
        if name not in {**read, **told}:
            assumed[name] = getattr(model.config, name)
    return Conversion(model.eval(), assumed, left_out)


def read_text_settings(state: Mapping[str, Tensor], task: str) -> dict[str, Any]:
    """Fields of the configuration that the names and shapes of a text model's tensors tell."""
    vocab_size, hidden_size = shape(state, "bert.embeddings.word_embeddings.weight", axes=2)
    layer = "bert.encoder.layer.*"
    settings = {
        "modality": "text",
        "scan_order": "raster",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": count_layers(state, r"bert\.encoder\.layer\.(\d+)\."),
        "intermediate_size": shape(state, f"{layer}.intermediate.dense.weight", axes=2)[0],
        "type_vocab_size": shape(state, "bert.embeddings.token_type_embeddings.weight", axes=2)[0],
        "qkv_bias": has(state, f"{layer}.attention.self.query.bias"),
        "attention_output_norm": has(state, f"{layer}.attention.self.layer_norm.*"),
        **decay_settings(state, f"{layer}.attention.self.ai", f"{layer}.attention.self.Wa_i.weight"),
    }
    if has(state, "bert.embeddings.position_embeddings.weight"):
        settings["max_position_embeddings"] = shape(state, "bert.embeddings.position_embeddings.weight", axes=2)[0]
    if task == "mlm":
        settings["tie_word_embeddings"] = same(
            state, "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
        )
    else:
        settings["num_labels"] = shape(state, "classifier.weight", axes=2)[0]
    return settings


def read_image_settings(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields of the configuration that the names and shapes of an image model's tensors tell."""
    hidden_size, num_channels, *patch = shape(state, "patch_embed.proj.weight", axes=4)
    return {
        "modality": "image",
        "patch_size": patch[0] if patch[0] == patch[1] else patch,
        "num_channels": num_channels,
        "hidden_size": hidden_size,
        "num_hidden_layers": count_layers(state, r"blocks\.(\d+)\."),
        "intermediate_size": shape(state, "blocks.*.mlp.fc1.weight", axes=2)[0],
        "qkv_bias": has(state, "blocks.*.attn.qkv.bias"),
        "attention_output_norm": False,
        "use_cls_token": has(state, "cls_token"),
        "position_embedding_type": "absolute" if has(state, "pos_embed") else "none",
        "scan_order": "serpentine" if has(state, "blocks.*.attn.a2_i*") else "raster",
        "num_labels": shape(state, "head.weight", axes=2)[0],
        **decay_settings(state, "blocks.*.attn.a_i", "blocks.*.attn.a_i.weight"),
    }


def decay_settings(state: Mapping[str, Tensor], fixed: str, selective: str) -> dict[str, Any]:
    for decay_type, pattern, axes in [("fixed", fixed, 1), ("selective", selective, 2)]:
        if has(state, pattern):
            return {"decay_type": decay_type, "num_attention_heads": shape(state, pattern, axes)[0]}
    return {"decay_type": "none"}


def has(state: Mapping[str, Tensor], pattern: str) -> bool:
    return bool(fnmatch.filter(state, pattern))


def shape(state: Mapping[str, Tensor], pattern: str, axes: int) -> torch.Size:
    """That of the first tensor with such a name."""
    names = fnmatch.filter(state, pattern)
    if not names:
        raise UsageError(f"the checkpoint is not whole, or not of this task's models: it lacks {pattern}.")
    if state[names[0]].ndim != axes:
        raise UsageError(f"{names[0]} in the checkpoint has {state[names[0]].ndim} axes, not {axes}.")
    return state[names[0]].shape


def count_layers(state: Mapping[str, Tensor], pattern: str) -> int:
    return len({match[1] for name in state if (match := re.match(pattern, name))})


def same(state: Mapping[str, Tensor], name: str, other: str) -> bool:
    """Whether two tensors are equal; one that is missing is not held against the other."""
    return name not in state or other not in state or torch.equal(state[name], state[other])


def one_side(value: Any) -> Any:
    """A square of (height, width) by its side, as it is read from the tensors."""
    is_square = isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]
    return value[0] if is_square else value


def check_told(told: Mapping[str, Any], read: Mapping[str, Any], task: str) -> None:
    useless = {"mlm": ["num_labels", "image_size"], "sequence-classification": ["image_size"], IMAGE_TASK: []}
    for name in useless[task]:
        if name in told:
            raise UsageError(f"{name} says nothing about a model for {task}.")
    fields_there_are = {"num_labels", *LionConfig.__dataclass_fields__}
    if unknown := [name for name in told if name not in fields_there_are]:
        raise UsageError(f"LionConfig has no field {unknown[0]}{did_you_mean(unknown[0], fields_there_are)}")
    wrong = [name for name, value in told.items() if name in read and value != read[name]]
    if wrong:
        told_and_read = [f"{name}={told[name]} (the tensors say {read[name]})" for name in wrong]
        raise UsageError(f"the checkpoint contradicts {', '.join(told_and_read)}.")


def refuse_bert(known: Mapping[str, Any], asserted: bool) -> None:
    """BERT's tensors have the names of a LION-LIT's that lacks the norms on the attention output."""
    plain = known["modality"] == "text" and known["decay_type"] == "none" and not known["attention_output_norm"]
    if plain and not asserted:
        raise UsageError(
            "the checkpoint has neither decays nor norms on the attention output, which is BERT and not LION: if it is"
            " a LION-LIT all the same, say --attention_output_norm false."
        )


def assume_settings(known: Mapping[str, Any], state: Mapping[str, Tensor], task: str) -> dict[str, Any]:
    """What is not known and is the same in all models of the paper."""
    assumed = {}
    if "num_attention_heads" not in known:
        assumed["num_attention_heads"] = assume_heads(known["hidden_size"])
    if task == IMAGE_TASK and "image_size" not in known:
        assumed["image_size"] = image_size_of_positions(known, state) if has(state, "pos_embed") else 224
    if task != "mlm" and "classifier_pooling" not in known:
        if task == IMAGE_TASK and known["decay_type"] == "none":
            raise UsageError(
                "nothing tells what the classifier of an image model without decays reads: say --pooling."
            )
        assumed["classifier_pooling"] = "mean" if task == IMAGE_TASK else "cls"
    return assumed


def assume_heads(hidden_size: int) -> int:
    if hidden_size % HEAD_DIM:
        raise UsageError(
            f"without decays nothing tells the number of heads, and {hidden_size} is no multiple of the paper's"
            f" {HEAD_DIM}: say --num_attention_heads."
        )
    return hidden_size // HEAD_DIM


def image_size_of_positions(known: Mapping[str, Any], state: Mapping[str, Tensor]) -> list[int]:
    """Height and width of a square grid of patches."""
    num_patches = shape(state, "pos_embed", axes=3)[1] - known["use_cls_token"]
    side = math.isqrt(num_patches)
    if side**2 != num_patches:
        raise UsageError(
            f"{num_patches} position embeddings are of no square image:"
            " say --config '{image_size: [HEIGHT, WIDTH]}'."
        )
    height, width = (side * patch for patch in as_pair(known["patch_size"]))
    return height if height == width else [height, width]


def load_tensors(model: LionPreTrainedModel, state: Mapping[str, Tensor]) -> list[str]:
    """Fill the model. Returns the names of tensors that nothing computes with.

    Raises:
        UsageError: any other tensor is missing or left over, or has another shape.
    """
    parameters = model.state_dict()
    names = {name: original_names(name, model.config) for name in parameters}
    expected = [original for originals in names.values() for original in originals]
    missing = [name for name in expected if name not in state]
    left_over = sorted(set(state) - set(expected))
    unexpected = [name for name in left_over if name not in UNUSED]
    if missing or unexpected:
        found = [f"{kind} {', '.join(names)}" for kind, names in [("lacks", missing), ("has", unexpected)] if names]
        raise UsageError(f"the checkpoint does not fit its settings: it {' and '.join(found)}.")
    if not same(state, *OUTPUT_BIASES):
        raise UsageError(f"the checkpoint has two output biases, {' and '.join(OUTPUT_BIASES)}, that differ.")
    check_shapes(parameters, names, state)
    model.load_state_dict({name: torch.cat([state[part] for part in parts]) for name, parts in names.items()})
    return left_over


def original_names(name: str, config: LionConfig) -> list[str]:
    """Names of the original tensors that one of ours is joined from, in this order."""
    for pattern, replacement in (IMAGE_NAMES if config.modality == "image" else TEXT_NAMES).items():
        name = re.sub(pattern, replacement, name)
    if "{projection}" in name:
        return [name.format(projection=projection) for projection in PROJECTIONS]
    if "{order}" in name:
        return [name.format(order=order) for order in ORDERS[: len(SCAN_ORDERS[config.scan_order])]]
    return [name]


def check_shapes(
    parameters: Mapping[str, Tensor], names: Mapping[str, list[str]], state: Mapping[str, Tensor]
) -> None:
    wrong = []
    for name, parts in names.items():
        rows, *columns = parameters[name].shape
        right = (rows // len(parts), *columns)
        wrong += [f"{part} is {tuple(state[part].shape)}, not {right}" for part in parts if state[part].shape != right]
    if wrong:
        raise UsageError(f"the checkpoint does not fit its settings: {'; '.join(wrong)}.")


# Model → folder


def save(model: LionPreTrainedModel, output_dir: Path) -> None:
    """Save the model, for images with its image processor, whole or not at all."""
    folder = output_dir.resolve()
    transformers.logging.disable_progress_bar()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished(folder), ignore_errors=True)  # of a conversion that was killed
        model.save_pretrained(unfinished(folder))
        if model.config.modality == "image":
            image_processor(model.config).save_pretrained(unfinished(folder))
        if folder.is_dir():  # whose other files stay
            publish_files(folder, folder)
        else:
            publish(folder)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write {output_dir}: {one_line(error)}.") from error
    finally:
        shutil.rmtree(unfinished(folder), ignore_errors=True)


def image_processor(config: LionConfig) -> transformers.ViTImageProcessor:
    """What evaluation does in the paper's code: resize, crop from the centre, normalise as for ImageNet."""
    mean, std = channel_statistics(AugmentationArguments(), config.num_channels, None)
    return make_image_processor(as_pair(config.image_size), mean, std, DEFAULT_CROP_PCT)


def report(conversion: Conversion, output_dir: Path) -> None:
    model, config = conversion.model, conversion.model.config
    print(
        f"{variant_of(config)} as {type(model).__name__}: {config.num_hidden_layers} layers of"
        f" {config.hidden_size}, {config.num_attention_heads} heads, {model.num_parameters():,} parameters"
    )
    if conversion.assumed:
        print(f"assumed: {', '.join(f'{name}={value}' for name, value in conversion.assumed.items())}")
    if conversion.left_out:
        print(f"left out, nothing computes with them: {', '.join(conversion.left_out)}")
    if config.modality == "image":
        if config.decay_type == "none":
            print("taken for LION-LIT: a ViT has tensors of the same names, and would not give its outputs here")
        print(f"saved with an image processor (ImageNet's statistics) in {output_dir}")
    else:
        print(f"saved in {output_dir}; the file holds no tokenizer: save the one it was trained with there too")


if __name__ == "__main__":
    run(main)
