"""Tasks of test_saved_folder.py, each run in a process of its own that has a saved folder and nothing else of ours.

    python -I -S folder_tasks.py SITE_PACKAGES TASK ARGUMENTS …

What can be imported is what lies in SITE_PACKAGES.
"""

import sys
from pathlib import Path


def example(model):
    """A batch of one, with targets, for the head of any model."""
    import torch

    head, config = type(model).__name__, model.config
    if config.modality == "image":
        height, width = config.image_size
        batch = {"pixel_values": torch.linspace(-1, 1, 3 * height * width).reshape(1, 3, height, width)}
        if head == "LionForMaskedImageModeling":
            return batch | {
                "bool_masked_pos": torch.arange(config.patch_grid[0] * config.patch_grid[1])[None] % 2 == 0
            }
        return batch | ({"labels": torch.tensor([2])} if head == "LionForImageClassification" else {})
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    if head == "LionModel":
        return batch
    if head == "LionForQuestionAnswering":
        return batch | {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])}
    if head == "LionForMultipleChoice":
        return {name: x[:, None].expand(1, 2, 4) for name, x in batch.items()} | {"labels": torch.tensor([1])}
    return batch | {"labels": torch.tensor([2] if head == "LionForSequenceClassification" else [[0, 1, 2, 0]])}


def outputs_of(output):
    """What a model was built to give: hidden states, or what its head makes of them."""
    import torch

    for name in ("logits", "reconstruction", "last_hidden_state"):
        if name in output:
            return output[name]
    return torch.stack([output.start_logits, output.end_logits], -1)


def answer(model):
    """What a model makes of its example."""
    import torch

    with torch.no_grad():
        return outputs_of(model.eval()(**example(model)))


def load(auto_class, folder, **kwargs):
    import transformers

    return getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True, **kwargs)


def reload(source, destination):
    """Every folder `source/<Auto class>-…` is loaded, saved again, and what the model gives lies beside it."""
    from safetensors.torch import save_file

    for folder in sorted(Path(source).iterdir()):
        again = Path(destination, folder.name)
        model, info = load(folder.name.partition("-")[0], folder, output_loading_info=True)
        assert not any(info.values()), info
        model.save_pretrained(again)
        save_file({"outputs": answer(model).contiguous()}, Path(destination, f"{folder.name}.outputs"))


def every_head(folder, *auto_classes):
    """One folder into each class: the encoder is as it was, the rest new and small, and two steps of Trainer run."""
    import torch

    encoder = load("AutoModel", folder)
    for auto_class in auto_classes:
        model, info = load(auto_class, folder, num_labels=3, output_loading_info=True)
        for name, parameter in model.lion.named_parameters():
            assert name == "embeddings.mask_token" or torch.equal(parameter, encoder.get_parameter(name)), name
        assert info["missing_keys"]
        for name in info["missing_keys"]:
            new = model.get_parameter(name)
            assert new.eq(1).all() if "norm.weight" in name else new.isfinite().all() and new.abs().max() < 0.2, name
        assert answer(model).isfinite().all()
        assert train(model, f"{folder}-{auto_class}") == 2
        print(auto_class)


def train(model, output_dir):
    """Number of steps that Trainer took."""
    from transformers import Trainer, TrainingArguments

    rows = [{name: x[0] for name, x in example(model).items()}] * 4
    arguments = TrainingArguments(
        output_dir, max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none", save_strategy="no"
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return trainer.state.global_step


def configuration_alone(folder, destination):
    """Prints what a configuration leads to that was loaded and saved without any model."""
    import transformers

    load("AutoConfig", folder).save_pretrained(destination)
    model = transformers.AutoModel.from_config(load("AutoConfig", destination), trust_remote_code=True)
    print(type(model).__name__)


def without_trust(folder, *auto_classes):
    """Prints what Transformers says to someone who neither trusts the folder nor has the library."""
    import transformers

    for auto_class in auto_classes:
        try:
            getattr(transformers, auto_class).from_pretrained(folder)
        except ValueError as error:
            print("refused:", " ".join(str(error).split()))


def without_code(auto_class, folder):
    """Prints the class of a tokenizer or image processor."""
    import transformers

    # Asked for neither trust nor distrust, AutoTokenizer asks the user about the model's code, and does without it.
    print(type(getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=False)).__name__)


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    globals()[sys.argv[2]](*sys.argv[3:])
