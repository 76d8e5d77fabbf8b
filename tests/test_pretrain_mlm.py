"""scripts/pretrain_mlm.py: its arguments and recipes, its data, its arithmetic, its files, and whole runs of it."""

import functools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import accelerate.accelerator
import pytest
import torch
import training_checks
import yaml
from accelerate import Accelerator
from datasets import Dataset
from modeling_checks import assert_carries_code
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader
from training_checks import TORCHRUN, TWO_CPUS, run_and_check
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
)

import lion_transformers
from lion_transformers.scripts import checkpointing, pretrain_mlm, training
from lion_transformers.scripts.arguments import RECIPES, UsageError, parse_arguments
from lion_transformers.scripts.batching import shuffle_stream
from lion_transformers.scripts.checkpointing import (
    atomic_write,
    list_checkpoints,
    prune_checkpoints,
    publish,
    unfinished,
    write_json,
)
from lion_transformers.scripts.optimization import linear_schedule, weight_decay_groups
from lion_transformers.scripts.pretrain_mlm import (
    DataArguments,
    MaskedSequences,
    ModelArguments,
    PretrainingArguments,
    accumulate_gradients,
    count_steps,
    encode,
    evaluate,
    load_model,
    mask_once,
    train_batches,
)
from lion_transformers.scripts.training import accumulation_steps, make_accelerator


SCRIPT = Path(pretrain_mlm.__file__)
SENTENCE = "the a small big red cat dog bird fish sees likes eats in house garden"
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TINY_BERT = ["--model_type=bert", "--config", ",".join(f"{name}={value}" for name, value in TINY.items())]

pytestmark = pytest.mark.usefixtures("isolated_run")
run_script = functools.partial(training_checks.run_script, pretrain_mlm)
fails_with = functools.partial(training_checks.fails_with, pretrain_mlm)


@pytest.fixture
def tokenizer(tmp_path):
    """A word-level tokenizer of 20 tokens, saved in ./tokenizer as well."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *SENTENCE.split()]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer


@pytest.fixture
def corpus(tmp_path):
    """300 sentences in ./text.txt; half of their words follow from the others."""
    rng = random.Random(0)
    pairs = [("cat", "house"), ("dog", "garden")]
    lines = []
    for _ in range(300):
        noun, place = rng.choice(pairs)
        lines.append(f"the {rng.choice(['small', 'big', 'red'])} {noun} sees a bird in the {place}")
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    return lines


@pytest.fixture
def tiny_bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=24, max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **TINY
    )
    return BertForMaskedLM(config)


def parse(*argv):
    return parse_arguments([ModelArguments, DataArguments, PretrainingArguments], argv)


# Arguments and recipes

SIZES = {"base": (768, 12, 12, 3072, 8e-4), "large": (1024, 24, 16, 4096, 2e-4)}
DECAY_TYPES = {"lit": "none", "d": "fixed", "s": "selective"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", DECAY_TYPES)
def test_recipes_hold_the_papers_setting(size, form):
    model_args, data_args, args = parse("--recipe", f"pretrain_text_{size}_lion_{form}", "--output_dir", "out")
    hidden, layers, heads, intermediate, learning_rate = SIZES[size]
    assert model_args.model_type == "lion"
    assert model_args.config == {
        "modality": "text",
        "decay_type": DECAY_TYPES[form],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
    }
    assert model_args.pad_vocab_to_multiple_of == 8
    assert (data_args.dataset_name, data_args.dataset_config_name, data_args.streaming) == ("allenai/c4", "en", True)
    assert data_args.max_seq_length == 128
    assert (data_args.mlm_probability, data_args.eval_mlm_probability) == (0.30, 0.15)
    assert args.global_train_batch_size == 4096
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.98, 1e-6)
    assert args.weight_decay == 1e-5
    assert (args.learning_rate, args.warmup_ratio, args.final_lr_ratio) == (learning_rate, 0.06, 0.02)
    assert (args.max_steps, args.mixed_precision, args.seed) == (70_000, "bf16", 17)
    assert accumulation_steps(args.global_train_batch_size, args.per_device_train_batch_size, 8) == 4


def test_every_pretraining_recipe_is_in_the_table():
    assert {path.stem for path in RECIPES.glob("pretrain_text_*_lion_*.yaml")} == {
        f"pretrain_text_{size}_lion_{form}" for size in SIZES for form in DECAY_TYPES
    }


def test_the_command_line_overrides_the_recipe(tmp_path):
    recipe = {
        "output_dir": "from-recipe",
        "streaming": True,
        "line_by_line": False,
        "learning_rate": "8e-4",
        "max_steps": -1,
        "max_eval_samples": None,
        "train_file": ["a.txt", "b.txt"],
        "config": {"hidden_size": 64, "decay_type": "fixed", "layer_norm_eps": 1e-12, "use_x": True},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    model_args, data_args, args = parse("--recipe", "recipe.yaml")
    assert (data_args.streaming, data_args.line_by_line, data_args.max_eval_samples) == (True, False, None)
    assert (args.output_dir, args.learning_rate, args.max_steps) == ("from-recipe", 8e-4, -1)
    assert data_args.train_file == ["a.txt", "b.txt"]
    assert model_args.config == recipe["config"]

    overrides = "--streaming False --line_by_line --learning_rate 1 --train_file c.txt --output-dir x"
    configs = ["--config_overrides", "hidden_size=32,decay_init=null", "--config", "layer_norm_eps=1e-5,use_x=false"]
    model_args, data_args, args = parse(*overrides.split(), "--recipe=recipe.yaml", *configs)
    assert (data_args.streaming, data_args.line_by_line, data_args.train_file) == (False, True, ["c.txt"])
    assert (args.output_dir, args.learning_rate) == ("x", 1.0)
    assert model_args.config == {
        "hidden_size": 32,
        "decay_type": "fixed",
        "layer_norm_eps": 1e-5,
        "use_x": False,
        "decay_init": None,
    }


def test_a_recipe_of_bytes_is_no_yaml():
    Path("recipe.yaml").write_bytes(b"seed: \xff\xfe\n")
    with pytest.raises(UsageError, match=r"recipe recipe\.yaml is not YAML: "):
        parse("--output_dir", "out", "--recipe", "recipe.yaml")


@pytest.mark.parametrize(
    ("recipe", "argv", "message"),
    [
        ("learning_rat: 1", [], "unknown recipe key learning_rat: did you mean learning_rate"),
        ("max_steps: many", [], "max-steps: invalid int value: 'many'"),
        ("max_steps: 1.5", [], "max-steps: invalid int value: '1.5'"),
        ("mixed_precision: fp8", [], "mixed-precision: invalid choice: 'fp8'"),
        ("- a list", [], "must hold `argument: value` lines"),
        ("seed: [", [], "is not YAML"),
        ("seed: 1", ["--recipe", "pretrain_text_bas"], "there is no recipe pretrain_text_bas"),
        ("seed: 1", ["--learning_rat", "1"], "unknown argument --learning_rat: did you mean learning_rate"),
        ("seed: 1", ["--config", "hidden_size"], "expected key=value,key=value, got 'hidden_size'"),
        ("eval_steps: 20", ["--save_steps", "30"], "save_steps 30 is not a multiple of eval_steps 20"),
        ("logging_steps: 0", [], "logging_steps must be at least 1, got 0"),
        ("seed: 1", ["--mlm_probability", "15"], "mlm_probability must be above 0 and below 1, got 15.0"),
        ("warmup_ratio: 6", [], "warmup_ratio must be at least 0 and below 1, got 6.0"),
    ],
)
def test_wrong_arguments_are_named(recipe, argv, message):
    Path("recipe.yaml").write_text(recipe)
    with pytest.raises(UsageError) as error:
        parse("--output_dir", "out", "--recipe", "recipe.yaml", *argv)
    assert message in str(error.value)


def test_output_dir_is_required():
    with pytest.raises(UsageError, match="required: --output_dir"):
        parse("--seed", "1")


def test_help_names_every_argument(capsys):
    with pytest.raises(SystemExit) as exit:
        parse("--help")
    assert exit.value.code == 0
    help = capsys.readouterr().out
    for name in ["recipe", "config_overrides", "dataset_name", "global_train_batch_size", "report_to"]:
        assert f"--{name}" in help
    assert "--global-train-batch-size" not in help and "None" not in help


def test_accumulation_follows_from_the_global_batch():
    assert accumulation_steps(4096, 64, 8) == 8
    assert accumulation_steps(None, 64, 8) == 1
    for global_batch_size in [100, 32]:
        with pytest.raises(UsageError, match=f"{global_batch_size} is not a multiple of 64 "):
            accumulation_steps(global_batch_size, 32, 2)


def test_steps_follow_from_epochs_or_max_steps():
    data = Dataset.from_dict({"input_ids": [[1]] * 100})
    assert count_steps(PretrainingArguments("out", num_train_epochs=1.5), data, 32) == math.ceil(150 / 32)
    assert count_steps(PretrainingArguments("out", max_steps=7), data, 32) == 7
    with pytest.raises(UsageError, match="give max_steps"):
        count_steps(PretrainingArguments("out"), lambda epoch: data.to_iterable_dataset(), 32)


# Optimisation


def lion_model(decay_type):
    config = lion_transformers.LionConfig(vocab_size=24, decay_type=decay_type, **TINY)
    return lion_transformers.LionForMaskedLM(config)


@pytest.mark.parametrize("decay_type", ["none", "fixed", "selective"])
def test_every_parameter_is_in_one_weight_decay_group(decay_type):
    model = lion_model(decay_type)
    decayed, exempt = weight_decay_groups(model, 0.1)
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    ids = [id(parameter) for group in (decayed, exempt) for parameter in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(parameter) for parameter in model.parameters()}

    # By the kind of the module that owns each parameter: matrices of linear maps and embeddings are decayed.
    expected_exempt = set()
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            is_matrix = isinstance(module, torch.nn.Linear | torch.nn.Embedding) and kind == "weight"
            if not is_matrix or "gate" in name or "decay" in name:
                expected_exempt.add(id(parameter))
    assert {id(parameter) for parameter in exempt["params"]} == expected_exempt


def test_frozen_parameters_are_in_no_group(tiny_bert):
    tiny_bert.bert.embeddings.requires_grad_(False)
    grouped = [p for group in weight_decay_groups(tiny_bert, 0.1) for p in group["params"]]
    assert len(grouped) == sum(p.requires_grad for p in tiny_bert.parameters())


def test_the_gate_of_an_mlp_is_decayed():
    mlp = torch.nn.ModuleDict({"mlp": torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(2, 2)})})
    decayed, exempt = weight_decay_groups(mlp, 0.1)
    assert [parameter.shape for parameter in decayed["params"]] == [(2, 2)]
    assert [parameter.shape for parameter in exempt["params"]] == [(2,)]


def test_schedule_is_linear_with_a_floor():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=8e-4)
    schedule = linear_schedule(optimizer, 70_000, warmup_ratio=0.06, final_lr_ratio=0.02)
    at = schedule.lr_lambdas[0]
    warmup = 4200
    for step in [0, 1, 2100, 4199, 4200, 4201, 37_100, 69_999, 70_000, 70_001]:
        rising = step / warmup
        falling = 0.02 + 0.98 * max(0.0, (70_000 - step) / (70_000 - warmup))
        assert at(step) == pytest.approx(min(rising, falling), rel=1e-9)
    assert at(70_000) * 8e-4 == pytest.approx(1.6e-5)


@pytest.mark.parametrize(("steps", "expected"), [(1, [1.0, 0.0]), (2, [0.0, 1.0, 0.0])])
def test_schedule_of_very_short_runs(steps, expected):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    at = linear_schedule(optimizer, steps, warmup_ratio=0.06, final_lr_ratio=0.0).lr_lambdas[0]
    assert [at(step) for step in range(steps + 1)] == expected


# One update


def random_batch(seed, shape, num_targets):
    """Sequences of which `num_targets` tokens are to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, 20, shape, generator=generator)
    labels = torch.full(shape, -100)
    chosen = torch.randperm(labels.numel(), generator=generator)[:num_targets]
    labels.view(-1)[chosen] = torch.randint(5, 20, (num_targets,), generator=generator)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}


UNEVEN = [random_batch(seed, (2, 16), targets) for seed, targets in enumerate([1, 30, 0, 7])]


def gradients_of_one_large_batch(model, batches):
    """By hand: the model's own mean loss over everything at once."""
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    model.zero_grad()
    loss = model(**whole).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return loss.item(), gradients


@pytest.mark.parametrize("family", ["bert", "lion"])
def test_accumulated_gradients_are_those_of_one_large_batch(tiny_bert, family):
    model = tiny_bert if family == "bert" else lion_model("selective").eval()
    mean_loss, expected = gradients_of_one_large_batch(model, UNEVEN)
    accelerator = Accelerator(cpu=True)
    summed_loss, counts = accumulate_gradients(accelerator, accelerator.prepare(model), UNEVEN)
    assert counts.tolist() == [38, 4 * 2 * 16]
    assert summed_loss.item() / 38 == pytest.approx(mean_loss, rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["bert", "lion"])
def test_only_targets_are_decoded(tiny_bert, family):
    model, batch = tiny_bert if family == "bert" else lion_model("selective").eval(), random_batch(1, (2, 16), 9)
    decoded = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: decoded.append(output.shape))
    with torch.no_grad():
        expected = model(batch["input_ids"], batch["attention_mask"]).logits[batch["labels"] != -100]
        logits, labels, _ = pretrain_mlm.predict_targets(model, batch)
    assert decoded == [(2, 16, 24), (9, 24)] and labels.tolist() == batch["labels"][batch["labels"] != -100].tolist()
    torch.testing.assert_close(logits, expected)


def test_a_batch_without_targets_has_zero_loss_and_gradient(tiny_bert):
    accelerator = Accelerator(cpu=True)
    summed_loss, counts = accumulate_gradients(accelerator, tiny_bert, [random_batch(0, (2, 16), 0)] * 2)
    assert summed_loss.item() == 0 and counts.tolist() == [0, 64]
    assert all(parameter.grad.eq(0).all() for parameter in tiny_bert.parameters())


TWO_PROCESSES = """
import sys
import torch
from accelerate import Accelerator
from transformers import AutoModelForMaskedLM
from lion_transformers.scripts.pretrain_mlm import accumulate_gradients, evaluate
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
folder = sys.argv[1]
model = AutoModelForMaskedLM.from_pretrained(folder)
batches = torch.load(f"{folder}/batches.pt")
rows = [{name: value[row] for name, value in batch.items()} for batch in batches for row in range(2)]
model = accelerator.prepare(model)
loaders = [accelerator.prepare(DataLoader(rows[:7], batch_size=size)) for size in (1, 2, 3, 7)]
metrics = [evaluate(accelerator, model, loader) for loader in loaders]
splitting = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
loaders = [splitting.prepare(DataLoader(rows[:7], batch_size=size)) for size in (2, 6, 8)]
metrics += [evaluate(splitting, model, loader) for loader in loaders]
single = [each.prepare(DataLoader(rows[2:3], batch_size=2)) for each in (accelerator, splitting)]
single = [evaluate(each, model, loader) for each, loader in zip((accelerator, splitting), single)]
without = []  # targets in one process, then in both
for own in [batches[1 + accelerator.process_index], batches[2]]:
    loss, counts = accumulate_gradients(accelerator, model, [own])
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    without.append((accelerator.reduce(loss, "sum").item(), counts[0].item(), norm.item()))
    model.zero_grad()
loss, counts = accumulate_gradients(accelerator, model, batches[accelerator.process_index :: 2])
loss = accelerator.reduce(loss, "sum")
if accelerator.is_main_process:
    gradients = {name: parameter.grad for name, parameter in accelerator.unwrap_model(model).named_parameters()}
    torch.save({"gradients": gradients, "counts": counts, "loss": loss}, f"{folder}/result.pt")
    torch.save({"metrics": metrics, "single": single, "without": without}, f"{folder}/more.pt")
accelerator.end_training()
"""


def test_two_processes_compute_what_one_large_batch_does(tiny_bert, tmp_path):
    mean_loss, expected = gradients_of_one_large_batch(tiny_bert, UNEVEN)
    tiny_bert.save_pretrained(tmp_path)
    torch.save(UNEVEN, tmp_path / "batches.pt")
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    run_and_check([*TWO_CPUS, tmp_path / "two.py", tmp_path], tmp_path)

    result = torch.load(tmp_path / "result.pt")
    assert result["counts"].tolist() == [38, 128]
    assert result["loss"].item() / 38 == pytest.approx(mean_loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    # Seven sequences do not divide by two processes: none is counted twice.
    whole = {name: torch.cat([batch[name] for batch in UNEVEN])[:7] for name in UNEVEN[0]}
    more = torch.load(tmp_path / "more.pt")
    loss = tiny_bert.eval()(**whole).loss.item()
    assert len(more["metrics"]) == 7
    for metrics in more["metrics"]:  # of batches of 1, 2, 3 and 7, and of 2, 6 and 8 that processes share
        assert metrics["eval_targets"] == (whole["labels"] != -100).sum()
        assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-6)
        assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    # One sequence leaves the second process none.
    only = {name: row[2:3] for name, row in whole.items()}
    for metrics in more["single"]:
        assert metrics["eval_targets"] == (only["labels"] != -100).sum()
        assert metrics["eval_loss"] == pytest.approx(tiny_bert(**only).loss.item(), rel=1e-6)
    # A process without targets adds nothing; where none has any, nothing happens.
    mean_loss, expected = gradients_of_one_large_batch(tiny_bert, UNEVEN[1:2])
    norm = math.sqrt(sum(gradient.double().pow(2).sum().item() for gradient in expected.values()))
    assert more["without"][0] == pytest.approx((30 * mean_loss, 30, norm), rel=1e-5)
    assert more["without"][1] == (0.0, 0, 0.0)


# Data


def test_packing_joins_documents_and_cuts_full_blocks(tokenizer):
    batch = {"text": ["the cat", "", None, "  ", "a small dog"]}
    sequences = encode(batch, tokenizer, "text", max_seq_length=4, line_by_line=False)
    ids = tokenizer.convert_tokens_to_ids(["[CLS]", "the", "cat", "[SEP]", "[CLS]", "a", "small", "dog"])
    assert sequences["input_ids"] == [ids[:4], ids[4:]]  # the last [SEP] fills no block
    assert sequences["special_tokens_mask"] == [[1, 0, 0, 1], [1, 0, 0, 0]]


def test_line_by_line_truncates_and_keeps_every_document(tokenizer):
    batch = {"text": ["the cat", " ", "a small dog"]}
    sequences = encode(batch, tokenizer, "text", max_seq_length=4, line_by_line=True)
    decoded = [tokenizer.convert_ids_to_tokens(row) for row in sequences["input_ids"]]
    assert decoded == [["[CLS]", "the", "cat", "[SEP]"], ["[CLS]", "a", "small", "[SEP]"]]
    assert sequences["special_tokens_mask"] == [[1, 0, 0, 1]] * 2


def test_a_batch_of_blank_documents_gives_no_sequence(tokenizer):
    assert encode({"text": ["", None]}, tokenizer, "text", 4, False) == {"input_ids": [], "special_tokens_mask": []}


def test_evaluation_masks_are_fixed_and_leave_special_tokens(tokenizer):
    rows = 400
    batch = {
        "input_ids": [[2, *range(5, 20), 3]] * rows,
        "special_tokens_mask": [[1, *[0] * 15, 1]] * rows,
    }
    first, again = (mask_once(batch, range(rows), tokenizer, 0.15, seed=17) for _ in range(2))
    torch.manual_seed(1)
    assert first == again == mask_once(batch, range(rows), tokenizer, 0.15, seed=17)
    assert first != mask_once(batch, range(rows), tokenizer, 0.15, seed=18)
    labels, inputs = torch.tensor(first["labels"]), torch.tensor(first["input_ids"])
    originals = torch.tensor(batch["input_ids"])
    targets = labels != -100
    assert torch.equal(labels[targets], originals[targets])
    assert not targets[:, [0, -1]].any()
    assert targets[:, 1:-1].float().mean().item() == pytest.approx(0.15, abs=0.015)
    assert (inputs[targets] == tokenizer.mask_token_id).float().mean().item() == pytest.approx(0.8, abs=0.05)
    assert torch.equal(inputs[~targets], originals[~targets])


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10])
def test_evaluation_weighs_targets_whatever_the_batches(tokenizer, tiny_bert, batch_size):
    lengths = [4, 16, 9, 3, 12, 5, 7, 15, 6, 11]
    rows = [random_batch(length, (1, length), length // 3) for length in lengths]
    data = Dataset.from_list([{name: row[name][0].tolist() for name in ["input_ids", "labels"]} for row in rows])
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(data, batch_size=batch_size, collate_fn=DataCollatorForTokenClassification(tokenizer))
    tiny_bert.train()
    metrics = evaluate(accelerator, tiny_bert, accelerator.prepare(loader))
    assert tiny_bert.training

    loss, correct, targets = 0.0, 0, 0
    for row in rows:
        logits = tiny_bert(row["input_ids"]).logits[0]
        for position, label in enumerate(row["labels"][0].tolist()):
            if label != -100:
                loss -= logits[position].log_softmax(-1)[label].item()
                correct += logits[position].argmax().item() == label
                targets += 1
    assert metrics["eval_targets"] == targets == sum(length // 3 for length in lengths)
    assert metrics["eval_loss"] == pytest.approx(loss / targets, rel=1e-5)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(loss / targets), rel=1e-5)
    assert metrics["eval_masked_accuracy"] == correct / targets


@pytest.mark.parametrize("streaming", [False, True])
def test_training_batches_repeat_the_data_in_new_orders(tokenizer, streaming):
    def first_tokens(epochs):
        rows = [{"input_ids": [5 + i, 5, 5], "special_tokens_mask": [1, 1, 1]} for i in range(12)]
        data = Dataset.from_list(rows)
        masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
        sequences = MaskedSequences(data, masking)
        if streaming:
            sequences = functools.partial(shuffle_stream, data.to_iterable_dataset(), block_size=12)
        accelerator = make_accelerator(PretrainingArguments("out", report_to=["none"]))
        collator = masking if streaming else DataCollatorForTokenClassification(tokenizer)
        batches = train_batches(accelerator, sequences, collator, batch_size=4, num_workers=0, seed=17)
        return [[next(batches)["input_ids"][:, 0].tolist() for _ in range(3)] for _ in range(epochs)]

    epochs = first_tokens(3)
    assert epochs == first_tokens(3)
    orders = [[token for batch in epoch for token in batch] for epoch in epochs]
    assert all(sorted(order) == list(range(5, 17)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("streaming", [False, True])
def test_too_little_text_for_a_batch_is_refused(tokenizer, streaming):
    data = Dataset.from_list([{"input_ids": [5, 6], "special_tokens_mask": [0, 0]}] * 3)
    collator = DataCollatorForLanguageModeling(tokenizer)
    sequences = (lambda epoch: data.to_iterable_dataset()) if streaming else MaskedSequences(data, collator)
    with pytest.raises(UsageError, match="too small for one batch of 4 sequences"):
        next(train_batches(Accelerator(cpu=True), sequences, collator, batch_size=4, num_workers=0, seed=17))


# The model


def test_the_vocabulary_is_padded(tokenizer):
    model = load_model(ModelArguments("bert", config=TINY), tokenizer, 16)
    assert (len(tokenizer), model.config.vocab_size) == (20, 24)
    assert model.get_output_embeddings().weight.shape[0] == 24
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert (
        load_model(ModelArguments("bert", config=TINY, pad_vocab_to_multiple_of=1), tokenizer, 16).config.vocab_size
        == 20
    )


def test_a_vocabulary_that_is_asked_for_is_kept_or_refused(tokenizer):
    for size in [20, 50]:
        model = load_model(ModelArguments("bert", config={**TINY, "vocab_size": size}), tokenizer, 16)
        assert model.config.vocab_size == size
    with pytest.raises(UsageError, match=r"^the tokenizer has 20 tokens, the model only 19, by its vocab_size\.$"):
        load_model(ModelArguments("bert", config={**TINY, "vocab_size": 19}), tokenizer, 16)


def test_training_can_continue_from_a_model_with_a_smaller_vocabulary(tokenizer, tiny_bert, tmp_path):
    tiny_bert.resize_token_embeddings(10)
    tiny_bert.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    arguments = ModelArguments(model_name_or_path=str(tmp_path / "model"), config={"hidden_dropout_prob": 0.25})
    model = load_model(arguments, tokenizer, 16)
    assert model.config.vocab_size == 24 and model.config.hidden_dropout_prob == 0.25
    assert model.dtype == torch.float32
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(model.state_dict()[name], tiny_bert.state_dict()[name].float())


# Files


def test_a_file_is_whole_or_absent(tmp_path):
    def half(file):
        file.write_text("half")
        raise OSError("the disk is full")

    write_json(tmp_path / "results.json", {"a": 1})
    with pytest.raises(OSError, match="full"):
        atomic_write(tmp_path / "results.json", half)
    assert json.loads((tmp_path / "results.json").read_text()) == {"a": 1}
    with pytest.raises(OSError, match="full"):
        atomic_write(tmp_path / "new.json", half)
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("exists", [False, True])
def test_publishing_flushes_everything_before_the_name_appears(tmp_path, monkeypatch, exists):
    folder = tmp_path / "checkpoint-1"
    if exists:
        folder.mkdir()
        (folder / "old").write_text("")
    unfinished(folder).mkdir()
    (unfinished(folder) / "weights").write_text("new")
    events = []
    flush, replace = checkpointing._flush, os.replace
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "_flush", lambda path: (events.append(path.name), flush(path)))
        patch.setattr(os, "replace", lambda *paths: (events.append("rename"), replace(*paths)))
        publish(folder)
    last_rename = len(events) - 1 - events[::-1].index("rename")
    assert {unfinished(folder).name, "weights"} <= set(events[:last_rename])
    assert events[last_rename + 1 :] == [tmp_path.name]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert [path.name for path in folder.iterdir()] == ["weights"]


@pytest.mark.parametrize(
    ("best", "limit", "kept"),
    [(2, 2, [2, 10]), (10, 2, [5, 10]), (2, 1, [2, 10]), (10, 1, [10]), (None, 3, [2, 5, 10]), (1, 3, [1, 5, 10])],
)
def test_the_best_and_the_last_checkpoints_are_kept(tmp_path, best, limit, kept):
    for step in [1, 2, 5, 10]:
        (tmp_path / f"checkpoint-{step}").mkdir()
    prune_checkpoints(tmp_path, best, limit)
    assert list_checkpoints(tmp_path) == kept
    assert len(list(tmp_path.iterdir())) == len(kept)


# Whole runs

FILES = "--tokenizer_name tokenizer --max_seq_length 16 --train_file text.txt"
SHORT = [*FILES.split(), "--report_to", "none", "--output_dir", "out"]


def test_a_run_learns_and_leaves_every_file(tokenizer, corpus, tmp_path):
    training = "--global_train_batch_size 32 --max_steps 60 --learning_rate 1e-2 --eval_steps 20 --logging_steps 10"
    command = [sys.executable, SCRIPT, *FILES.split()]
    command = [*command, "--output_dir", "out", *TINY_BERT, *training.split()]
    stdout = run_and_check(command, tmp_path).stdout
    out = tmp_path / "out"
    results = json.loads((out / "results.json").read_text())
    assert list_checkpoints(out)[-1] == 60 and len(list_checkpoints(out)) == 2
    assert results["best"]["step"] in list_checkpoints(out)
    tokenizer_files = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith("checkpoint-")) == sorted(
        ["config.json", "model.safetensors", *tokenizer_files, "results.json", "loss_curve.png", "runs"]
    )
    events = EventAccumulator(str(next((out / "runs" / "pretrain_mlm").glob("events.out.tfevents*")).parent)).Reload()
    assert {"train/loss", "train/learning_rate", "train/tokens_per_second", "eval/loss"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 20, 40, 60]
    assert (out / "loss_curve.png").read_bytes().startswith(b"\x89PNG")

    before, after = results["before"], results["after"]
    assert (before["step"], after["step"], results["steps"]) == (0, 60, 60)
    assert before["eval_loss"] == pytest.approx(math.log(24), abs=0.3)  # knows nothing of 24 tokens
    assert after["eval_loss"] < 0.75 * before["eval_loss"]
    assert before["eval_targets"] == after["eval_targets"] > 0
    assert f"masked accuracy {after['eval_masked_accuracy']:.2%}" in stdout
    assert results["tokens"] == 60 * 32 * 16
    assert results["tokens_per_second"] > 0 and results["wall_seconds"] > 0
    assert results["arguments"]["max_steps"] == 60 and results["arguments"]["config"] == TINY
    assert results["versions"]["torch"] == torch.__version__
    losses = {entry["step"]: entry for entry in results["history"] if "loss" in entry}
    assert list(losses) == [10, 20, 30, 40, 50, 60]
    assert losses[60]["loss"] < losses[10]["loss"]
    assert losses[60]["learning_rate"] == pytest.approx(0.02 * 1e-2)

    model = AutoModelForMaskedLM.from_pretrained(out)
    assert results["model"] == {"class": type(model).__name__, "parameters": model.num_parameters()}
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tokenizer.get_vocab()
    assert model.config.vocab_size == 24
    last = AutoModelForMaskedLM.from_pretrained(out / "checkpoint-60")
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, last.state_dict()[name]), name
    state = json.loads((out / "checkpoint-60" / "trainer_state.json").read_text())
    assert state["step"] == 60 and state["history"] == results["history"]
    assert {"optimizer.bin", "random_states_0.pkl"} <= {path.name for path in (out / "checkpoint-60").iterdir()}

    # The saved model is the one that was evaluated last: the reported loss can be had again from the folder.
    continued = ["--model_name_or_path", "out", "--output_dir", "again", "--max_steps", "1"]
    run_and_check([sys.executable, SCRIPT, *FILES.split(), *continued], tmp_path)
    again = json.loads((tmp_path / "again" / "results.json").read_text())
    assert again["before"]["eval_loss"] == pytest.approx(after["eval_loss"], rel=1e-6)


def test_every_folder_of_a_run_carries_the_code_of_its_model(tokenizer, corpus, monkeypatch):
    lion = ["--config", ",".join(f"{name}={value}" for name, value in TINY.items())]
    run_script(monkeypatch, *lion, *SHORT, "--max_steps", "1")
    assert_carries_code("out")
    assert_carries_code("out/checkpoint-1")


def test_lion_is_pretrained_from_a_recipe_and_a_csv_stream(tokenizer, corpus, monkeypatch, tmp_path):
    for name, lines in {"train": corpus, "valid": corpus[:50]}.items():
        Path(f"{name}.csv").write_text("label,review\n" + "".join(f'1,"{line}"\n' for line in lines))
    recipe = {
        "model_type": "lion",
        "config": {**TINY, "decay_type": "selective"},
        "tokenizer_name": "tokenizer",
        "train_file": ["train.csv"],
        "validation_file": ["valid.csv"],
        "text_column": "review",
        "streaming": True,
        "line_by_line": True,
        "max_eval_samples": 40,
        "max_steps": 30,
        "learning_rate": "1e-2",
        "mixed_precision": "bf16",
        "eval_steps": 15,
        "report_to": ["none"],
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe))
    run_script(monkeypatch, "--recipe", "recipe.yaml", "--output_dir", "out", "--config", "decay_type=fixed")
    results = json.loads(Path("out/results.json").read_text())
    assert results["after"]["eval_loss"] < results["before"]["eval_loss"]
    assert results["arguments"]["config"]["decay_type"] == "fixed"
    model = AutoModelForMaskedLM.from_pretrained("out")
    assert type(model).__name__ == "LionForMaskedLM" and model.config.decay_type == "fixed"
    assert model.dtype == torch.float32
    assert not Path("out/runs").exists()


def test_a_run_on_two_processes(tokenizer, corpus, monkeypatch, tmp_path):
    """By `torchrun`; other runs of two are started by `accelerate launch`."""
    arguments = [*TINY_BERT, *SHORT, "--streaming", "--validation_file", "text.txt", "--max_eval_samples", "21"]
    run_script(monkeypatch, *arguments, "--max_steps", "1")
    alone = json.loads(Path("out/results.json").read_text())
    training = "--max_steps 20 --global_train_batch_size 32 --learning_rate 1e-2 --output_dir both"
    run_and_check([*TORCHRUN, SCRIPT, *arguments, *training.split()], tmp_path)
    both = json.loads(Path("both/results.json").read_text())
    assert both["before"] == pytest.approx(alone["before"], rel=1e-6)
    assert both["after"]["eval_loss"] < 0.9 * both["before"]["eval_loss"]
    assert both["tokens"] == 20 * 32 * 16
    states = {path.name for path in Path("both/checkpoint-20").iterdir()}
    assert {"random_states_0.pkl", "random_states_1.pkl", "model.safetensors", "config.json"} <= states
    weights = [AutoModelForMaskedLM.from_pretrained(folder).state_dict() for folder in ["both", "both/checkpoint-20"]]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="ACCELERATE_USE_CPU=true"):
        make_accelerator(PretrainingArguments("out"))


def test_two_runs_with_one_seed_are_equal(tokenizer, corpus, monkeypatch):
    arguments = [*TINY_BERT, *SHORT, "--max_steps", "4", "--logging_steps", "1"]
    histories = []
    for name, seed in [("a", 1), ("b", 1), ("c", 2)]:
        run_script(monkeypatch, *arguments, "--output_dir", name, "--seed", seed)
        history = json.loads(Path(name, "results.json").read_text())["history"]
        histories.append([entry.get("loss", entry.get("eval_loss")) for entry in history])
    assert histories[0] == histories[1] != histories[2]


@pytest.mark.parametrize(
    ("losses", "save_steps", "best", "kept"),
    [
        ([3.0, 2.0, 2.5, float("nan"), 4.0], 1, 2, [2, 5]),
        ([float("nan"), 3.0, 2.0, 2.5, 1.0], 1, 5, [4, 5]),
        ([1.0, 3.0, 2.0, 4.0, 5.0], 2, 2, [2, 5]),  # steps 1 and 3 were better, but are not saved
    ],
)
def test_the_best_checkpoint_is_the_one_of_the_lowest_evaluation_loss(
    tokenizer, corpus, monkeypatch, losses, save_steps, best, kept
):
    reported = iter([0.5, *losses])  # the first is from before training
    metrics = {"eval_perplexity": 1.0, "eval_masked_accuracy": 0.0, "eval_targets": 1}
    monkeypatch.setattr(pretrain_mlm, "evaluate", lambda *_: {"eval_loss": next(reported), **metrics})
    steps = ["--max_steps", "5", "--eval_steps", "1", "--save_steps", save_steps]
    run_script(monkeypatch, *TINY_BERT, *SHORT, *steps)
    assert list_checkpoints(Path("out")) == kept
    assert json.loads(Path("out/results.json").read_text())["best"] == {"step": best, "eval_loss": losses[best - 1]}


@pytest.mark.parametrize("crash_in", ["save_state", "trainer_state", "rename"])
def test_a_crash_leaves_no_half_checkpoint(tokenizer, corpus, monkeypatch, crash_in):
    """The first checkpoint survives whole; the second, in which the crash happens, has not got its name."""
    calls = []

    def crash_second_time(function):
        def wrapped(*arguments, **keywords):
            calls.append(function)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return function(*arguments, **keywords)

        return wrapped

    place = {
        "save_state": (accelerate.accelerator, "save_accelerator_state"),  # after the weights, before the optimizer
        "trainer_state": (training, "write_json"),
        "rename": (training, "publish"),
    }[crash_in]
    short_run = [*TINY_BERT, *SHORT, "--max_steps", "2", "--eval_steps", "1"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*place, crash_second_time(getattr(*place)))
        run_script(patch, *short_run)
    out = Path("out")
    assert list_checkpoints(out) == [1]
    assert unfinished(out / "checkpoint-2").is_dir()
    assert not (out / "results.json").exists() and not (out / "config.json").exists()
    AutoModelForMaskedLM.from_pretrained(out / "checkpoint-1")
    assert json.loads((out / "checkpoint-1" / "trainer_state.json").read_text())["step"] == 1

    (out / "mine.txt").write_text("not the run's")
    run_script(monkeypatch, *short_run, "--overwrite_output_dir")
    assert list_checkpoints(out) == [1, 2] and (out / "mine.txt").exists()
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_expected_failures_are_one_sentence(tokenizer, corpus, monkeypatch, capsys):
    Path("empty.txt").write_text("")
    Path("blank.txt").write_text("\n \n\n")
    Path("one.txt").write_text("the cat\n")
    Path("small.txt").write_text("the cat\na dog\n")
    Path("table.csv").write_text("review,label\nthe cat,1\na dog,0\n")
    Path("broken.jsonl").write_text('{"text": "the cat"}\n{"text": \n')
    Path("notes.pdf").write_text("x")
    tokenizer.mask_token = None
    tokenizer.save_pretrained("maskless")
    Path("occupied").mkdir()
    Path("occupied", "file").write_text("")

    def failure(*changes):
        return fails_with(monkeypatch, capsys, *TINY_BERT, *SHORT, "--max_steps", "1", *changes)

    assert "There is no file 'missing.txt'" in failure("--train_file", "missing.txt")
    assert "its name must end in .txt, .csv" in failure("--train_file", "notes.pdf")
    assert "these end in .csv, .txt" in failure("--train_file", "text.txt", "--validation_file", "table.csv")
    assert "has no column text; its columns are review, label" in failure("--train_file", "table.csv")
    assert "column label of table.csv holds int, not text" in failure(
        "--train_file", "table.csv", "--text_column", "label"
    )
    assert "'empty.txt' is empty" in failure("--train_file", "empty.txt")
    assert "one.txt has 1 rows, of which validation_split_percentage 5.0 leaves none to train on" in failure(
        "--train_file", "one.txt"
    )
    assert "too small for one sequence of 16 tokens" in failure("--train_file", "small.txt")
    assert "too small for one sequence" in failure("--train_file", "blank.txt")
    assert "cannot load broken.jsonl" in failure("--train_file", "broken.jsonl")
    assert "cannot load broken.jsonl" in failure("--train_file", "broken.jsonl", "--streaming")
    assert "give a validation_file" in failure("--streaming")
    assert "cannot load nobody/nothing" in fails_with(
        monkeypatch,
        capsys,
        *TINY_BERT,
        "--tokenizer_name",
        "tokenizer",
        "--output_dir=out",
        "--dataset_name=nobody/nothing",
    )
    assert "either a dataset_name or a train_file" in failure("--dataset_name", "allenai/c4")
    assert "a validation_file goes with a train_file" in fails_with(
        monkeypatch, capsys, *SHORT[:4], "--output_dir=out", "--dataset_name=x", "--validation_file=text.txt"
    )
    assert "has no mask_token" in failure("--tokenizer_name", "maskless")
    assert "cannot load the tokenizer nowhere" in failure("--tokenizer_name", "nowhere")
    assert "max_seq_length 16 exceeds the model's max_position_embeddings 8" in failure(
        "--config", "max_position_embeddings=8"
    )
    assert "unknown model_type lyon" in failure("--model_type", "lyon")
    assert "cannot make the model bert" in failure("--config", "num_attention_heads=5")
    assert "too small for one batch of 1000 sequences" in failure("--per_device_train_batch_size", "1000")
    assert "is not a multiple of 8 (8 per device × 1 processes)" in failure("--global_train_batch_size", "12")
    assert "occupied is not empty" in failure("--output_dir", "occupied")
    assert "one.txt is a file" in failure("--output_dir", "one.txt")
    assert "fp16" in failure("--mixed_precision", "fp16")


def test_a_failure_of_the_command_has_exit_code_2(tmp_path):
    command = [sys.executable, SCRIPT, "--output_dir", "out", "--recipe", "none-such"]
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    assert result.returncode == 2 and result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1 and "there is no recipe none-such" in result.stderr
