"""Finetuning with Trainer and nothing else: small tasks are learnt, saved, reloaded, under the options people use."""

import numpy as np
import pytest
import torch
from modeling_checks import DECAYS, assert_close, assert_same_state, decay_parameters, relative_error
from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from lion_transformers import (
    LionConfig,
    LionForMaskedLM,
    LionForQuestionAnswering,
    LionForSequenceClassification,
    LionForTokenClassification,
)


WORDS = [f"word{number}" for number in range(20)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOKENIZER = BertTokenizer(vocab={token: i for i, token in enumerate([*SPECIAL, *WORDS, "yes", "no", "begin", "end"])})
CLS, SEP = TOKENIZER.cls_token_id, TOKENIZER.sep_token_id
YES, NO, BEGIN, END = TOKENIZER.convert_tokens_to_ids(["yes", "no", "begin", "end"])

each_decay = pytest.mark.parametrize("decay_type", DECAYS)


def tiny_config(decay_type="selective", **overrides):
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    sizes |= {"vocab_size": len(TOKENIZER), "max_position_embeddings": 40, "num_labels": 2, "chunk_size": 16}
    return LionConfig(
        decay_type=decay_type, **{**sizes, "hidden_dropout_prob": 0.0, "initializer_range": 0.1, **overrides}
    )


# ---------------------------------------------------------------------------------------------------------------------
# Tasks
# ---------------------------------------------------------------------------------------------------------------------


def texts(count, seed):
    """Words of no meaning, in different numbers."""
    generator = np.random.default_rng(seed)
    for number in range(count):
        yield number, generator, [int(i) for i in generator.integers(5, 25, size=8 + number % 5)]


def sentences(count, seed=0):
    """The label says whether "yes" or "no" occurs."""
    rows = []
    for number, generator, ids in texts(count, seed):
        ids[generator.integers(len(ids))] = (NO, YES)[number % 2]
        rows.append({"input_ids": [CLS, *ids, SEP], "labels": number % 2})
    return rows


def tagged(count, seed=0):
    """The tag of a token says whether the *next* one has an odd number: it cannot be told from the token alone."""
    rows = []
    for _, _, ids in texts(count, seed):
        tags = [following % 2 for following in ids[1:]]
        rows.append({"input_ids": [CLS, *ids, SEP], "labels": [-100, *tags, -100, -100]})
    return rows


def passages(count, seed=0):
    """The answer goes from "begin" to "end"."""
    rows = []
    for _, generator, ids in texts(count, seed):
        start, end = sorted(generator.choice(len(ids), size=2, replace=False).tolist())
        ids[start], ids[end] = BEGIN, END
        rows.append({"input_ids": [CLS, *ids, SEP], "start_positions": start + 1, "end_positions": end + 1})
    return rows


def label_accuracy(prediction):
    counted = prediction.label_ids != -100
    correct = (prediction.predictions.argmax(-1) == prediction.label_ids)[counted]
    return {"accuracy": float(correct.mean())}


def span_accuracy(prediction):
    answers = np.stack(prediction.label_ids)
    # Logits of padding, which evaluation fills up with -100, must not win.
    spans = np.stack([np.where(logits == -100, -np.inf, logits).argmax(-1) for logits in prediction.predictions])
    return {"accuracy": float((spans == answers).all(0).mean())}


TASKS = {
    "sequence classification": {
        "model_class": LionForSequenceClassification,
        "auto_class": AutoModelForSequenceClassification,
        "rows": sentences,
        "collator": DataCollatorWithPadding(TOKENIZER),
        "metrics": label_accuracy,
    },
    "token classification": {
        "model_class": LionForTokenClassification,
        "auto_class": AutoModelForTokenClassification,
        "rows": tagged,
        "collator": DataCollatorForTokenClassification(TOKENIZER),
        "metrics": label_accuracy,
    },
    "question answering": {
        "model_class": LionForQuestionAnswering,
        "auto_class": AutoModelForQuestionAnswering,
        "rows": passages,
        "collator": DataCollatorWithPadding(TOKENIZER),
        "metrics": span_accuracy,
    },
}


def new_model(task="sequence classification", decay_type="selective", **overrides):
    torch.manual_seed(0)
    return TASKS[task]["model_class"](tiny_config(decay_type, **overrides))


def make_trainer(folder, model, task="sequence classification", *, collator=None, trainer_class=Trainer, **arguments):
    defaults = {
        "output_dir": str(folder),
        "max_steps": 60,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    parts = TASKS[task]
    return trainer_class(
        model=model,
        args=TrainingArguments(**{**defaults, **arguments}),
        train_dataset=parts["rows"](192),
        eval_dataset=parts["rows"](40, seed=1),
        data_collator=collator or parts["collator"],
        compute_metrics=parts["metrics"],
        processing_class=TOKENIZER,
    )


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@each_decay
@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_learnt_saved_and_reloaded(tmp_path, task, decay_type):
    steps = 120 if task == "sequence classification" else 240
    trainer = make_trainer(tmp_path, new_model(task, decay_type), task, max_steps=steps)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_accuracy"] > 0.9
    trainer.save_model()
    for loader in (TASKS[task]["model_class"], TASKS[task]["auto_class"]):
        loaded = loader.from_pretrained(tmp_path)
        assert_same_state(loaded.state_dict(), trainer.model.state_dict())
        again = make_trainer(tmp_path, loaded, task).evaluate()
        assert again["eval_accuracy"] == metrics["eval_accuracy"]
        assert again["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Options
# ---------------------------------------------------------------------------------------------------------------------


def train_for(folder, steps=5, task="sequence classification", decay_type="selective", **arguments):
    trainer = make_trainer(folder, new_model(task, decay_type), task, max_steps=steps, **arguments)
    trainer.train()
    return trainer


@each_decay
def test_gradient_checkpointing_takes_the_same_steps(tmp_path, decay_type):
    plain = train_for(tmp_path, decay_type=decay_type)
    checkpointed = train_for(tmp_path, decay_type=decay_type, gradient_checkpointing=True)
    assert checkpointed.model.is_gradient_checkpointing and not plain.model.is_gradient_checkpointing
    assert losses_of(checkpointed) == pytest.approx(losses_of(plain), rel=1e-6)


@each_decay
def test_bf16_learns_with_decays_in_float32(tmp_path, decay_type):
    trainer = train_for(tmp_path, 120, decay_type=decay_type, bf16=True)
    assert trainer.evaluate()["eval_accuracy"] > 0.9
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    exact = losses_of(train_for(tmp_path, 2, decay_type=decay_type))
    assert losses_of(trainer)[:2] != exact[:2]
    assert losses_of(trainer)[:2] == pytest.approx(exact[:2], rel=5e-2)


@each_decay
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_takes_the_same_steps(tmp_path, decay_type, backend):
    torch.compiler.reset()
    plain = train_for(tmp_path, 3, decay_type=decay_type)
    compiled = train_for(tmp_path, 3, decay_type=decay_type, torch_compile=True, torch_compile_backend=backend)
    assert losses_of(compiled) == pytest.approx(losses_of(plain), rel=1e-4)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    """A rate that makes things worse after they got better."""
    trainer = make_trainer(
        tmp_path,
        new_model(),
        max_steps=60,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=10,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    trainer.train()
    evaluations = {e["step"]: e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e}
    best = min(evaluations, key=evaluations.get)
    assert best < 60 and trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluations[best], rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
@each_decay
def test_accumulated_losses_are_those_of_the_large_batch(tmp_path, task, decay_type):
    """Rows differ in length, so micro-batches in their numbers of targets."""
    # As in BERT the softmax over the positions of an answer takes in those of padding.
    collator = DataCollatorWithPadding(TOKENIZER, padding="max_length", max_length=16)
    collator = collator if task == "question answering" else None
    large = train_for(tmp_path, 3, task, decay_type, collator=collator)
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    small = train_for(tmp_path, 3, task, decay_type, collator=collator, **sizes)
    assert losses_of(small)[0] == pytest.approx(losses_of(large)[0], rel=1e-6)
    assert losses_of(small) == pytest.approx(losses_of(large), rel=1e-4)


class OutOfMemory(DataCollatorWithPadding):
    """As a device on which no more than six rows have room."""

    def __call__(self, rows):
        if len(rows) > 6:
            raise RuntimeError("CUDA out of memory.")
        return super().__call__(rows)


def test_a_batch_size_is_found_that_has_room(tmp_path):
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "auto_find_batch_size": True}
    trainer = make_trainer(tmp_path, new_model(), collator=OutOfMemory(TOKENIZER), max_steps=2, **sizes)
    trainer.train()
    assert trainer._train_batch_size <= 6 and trainer.state.global_step == 2


@each_decay
def test_packed_rows_take_the_steps_of_padded_ones(tmp_path, decay_type):
    padded = train_for(tmp_path, 5, "token classification", decay_type)
    packed = train_for(tmp_path, 5, "token classification", decay_type, collator=DataCollatorWithFlattening())
    assert losses_of(packed)[0] == pytest.approx(losses_of(padded)[0], rel=1e-5)
    assert losses_of(packed) == pytest.approx(losses_of(padded), rel=1e-3)


@each_decay
def test_lora_trains_the_projections_and_what_is_new(tmp_path, decay_type):
    """From a masked language model, which has neither pooler nor classifier."""
    torch.manual_seed(0)
    LionForMaskedLM(tiny_config(decay_type)).save_pretrained(tmp_path / "base")
    model = LionForSequenceClassification.from_pretrained(tmp_path / "base")
    before = {name: parameter.detach().clone() for name, parameter in model.lion.state_dict().items()}
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=4,
        target_modules=["qkv_proj", "out_proj", "fc1", "fc2"],
        modules_to_save=["pooler", "classifier"],
    )
    adapted = get_peft_model(model, lora)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert all("lora_" in name or ".modules_to_save." in name for name in trained)
    assert sum("lora_A" in name for name in trained) == 2 * 4
    trainer = make_trainer(tmp_path, adapted, max_steps=150, learning_rate=1e-2)
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] > 0.9
    base = {name.replace(".base_layer", ""): x for name, x in adapted.base_model.model.lion.state_dict().items()}
    assert all(torch.equal(base[name], x) for name, x in before.items() if "pooler" not in name)

    adapted.save_pretrained(tmp_path / "adapter")
    batch = DataCollatorWithPadding(TOKENIZER)(sentences(6, seed=2))
    torch.manual_seed(1)  # what the folder of the base lacks is drawn anew
    loaded = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = adapted.eval()(**batch).logits
        assert_close(loaded.eval()(**batch).logits, expected)
        assert_close(loaded.merge_and_unload()(**batch).logits, expected)


@pytest.mark.parametrize("decay_type", ["fixed", "selective"])
def test_decays_are_exempt_from_weight_decay(tmp_path, decay_type):
    model = new_model(decay_type=decay_type)
    names = make_trainer(tmp_path, model).get_decay_parameter_names(model)
    assert any("qkv_proj.weight" in name for name in names)
    assert not [name for name in names if name in decay_parameters(model)]


class RecordedLoss(torch.optim.SGD):
    """Keeps the gradients of its first step."""

    def step(self, closure=None):
        self.first = getattr(self, "first", None) or [p.grad.clone() for g in self.param_groups for p in g["params"]]
        return super().step(closure)


@pytest.mark.parametrize("num_labels", [1, 2], ids=["regression", "classification"])
def test_accumulated_gradients_are_those_of_the_large_batch(tmp_path, num_labels):
    first = []
    for size, steps in ((16, 1), (4, 4)):
        model = new_model(num_labels=num_labels)
        sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_grad_norm": 0.0}
        trainer = make_trainer(tmp_path, model, max_steps=1, **sizes)
        trainer.optimizer = optimizer = RecordedLoss(model.parameters(), lr=0.0)
        trainer.train()
        first.append(torch.cat([gradient.flatten() for gradient in optimizer.first]))
    assert relative_error(first[1], first[0]) < 1e-5
