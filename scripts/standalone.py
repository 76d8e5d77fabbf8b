"""What the heads of a model folder give, by the code in the folder alone.

    python -P scripts/standalone.py FOLDER OUTPUT.safetensors AutoModel AutoModelForMaskedLM ...

publish.py runs this in a fresh process and compares. The tokenizer or image processor must load there too. The
module imports nothing of lion_transformers, and run as a script it sees to it that nothing else can.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig


MAX_LENGTH = 24
# File that a folder has of it: the class that loads it.
PROCESSORS = {"tokenizer_config.json": "AutoTokenizer", "preprocessor_config.json": "AutoImageProcessor"}


@torch.no_grad()
def head_outputs(folder: str, auto_classes: list[str], trust_remote_code: bool) -> dict[str, Tensor]:
    """Every tensor that the model gives in each of the Auto classes, named class.field.

    Heads that the folder has no weights for, or those of another size, are drawn from a fixed seed, so that they too
    can be compared.
    """
    loading = {"trust_remote_code": trust_remote_code, "ignore_mismatched_sizes": True}
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    outputs = {}
    for auto_class in auto_classes:
        torch.manual_seed(0)
        model = getattr(transformers, auto_class).from_pretrained(folder, **loading).eval()
        inputs = example_inputs(config, auto_class, model.dtype)
        for name, value in model(**inputs).items():
            if isinstance(value, Tensor):
                outputs[f"{auto_class}.{name}"] = value.contiguous()
    return outputs


def example_inputs(config: PreTrainedConfig, auto_class: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same for every process: two rows, one of them padded where there is padding; an image for image models."""
    generator = torch.Generator().manual_seed(0)
    if config.modality == "image":
        size = [config.image_size] * 2 if isinstance(config.image_size, int) else config.image_size
        return {"pixel_values": torch.randn(2, config.num_channels, *size, generator=generator).to(dtype)}
    length = min(MAX_LENGTH, config.max_position_embeddings)
    input_ids = torch.randint(config.vocab_size, (2, length), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, length // 2 + 1 :] = 0
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    if auto_class == "AutoModelForMultipleChoice":
        return {name: value[None] for name, value in inputs.items()}  # (batch, choices, length)
    return inputs


def load_processors(folder: str) -> None:
    """Load the tokenizer or image processor of the folder, where it has one: what does not load raises."""
    for file, auto_class in PROCESSORS.items():
        if (Path(folder) / file).is_file():
            getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True)


if __name__ == "__main__":
    sys.modules["lion_transformers"] = None  # what imports it fails
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder, output, *auto_classes = sys.argv[1:]
    load_processors(folder)
    save_file(head_outputs(folder, auto_classes, trust_remote_code=True), output)
