"""Sequences packed into one row: each is as if alone, in every form and in every head."""

import functools

import modeling_checks
import pytest
import torch
from modeling_checks import DECAYS, MODES, build_from, outputs_of
from transformers import DataCollatorWithFlattening

from lion_transformers import (
    LionConfig,
    LionForMaskedLM,
    LionForMultipleChoice,
    LionForQuestionAnswering,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
)


LENGTHS = (5, 1, 40, 17, 2)
FIELDS = {
    "position_ids": {},
    "seq_idx": {"return_position_ids": False, "return_seq_idx": True},
    "cu_seq_lens_q": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    "all": {"return_seq_idx": True, "return_flash_attn_kwargs": True},
    "positions from 2": {"position_ids_start": 2},
    "positions from 2, seq_idx": {"position_ids_start": 2, "return_seq_idx": True},
}
assert_close = functools.partial(modeling_checks.assert_close, tolerance=1e-9)
PER_TOKEN = (LionModel, LionForMaskedLM, LionForTokenClassification, LionForQuestionAnswering)

each_decay = pytest.mark.parametrize("decay_type", DECAYS)
each_mode = pytest.mark.parametrize("mode", MODES)


def build(cls, decay_type="selective", **overrides):
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    sizes |= {"vocab_size": 50, "max_position_embeddings": 48, "chunk_size": 16, "num_labels": 3}
    return build_from(cls, LionConfig(decay_type=decay_type, **{**sizes, **overrides}), dtype=torch.float64)


def make_sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 50, (length,), generator=generator) for length in LENGTHS]


def pack(sequences, **options):
    batch = DataCollatorWithFlattening(**options)([{"input_ids": ids} for ids in sequences])
    del batch["labels"]
    return batch


@torch.no_grad()
def outputs_alone(model, sequences, **kwargs):
    return [outputs_of(model(ids[None], **kwargs)) for ids in sequences]


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("cls", PER_TOKEN, ids=lambda cls: cls.__name__)
@each_decay
@each_mode
def test_tokens_of_a_packed_sequence_are_as_if_it_were_alone(cls, decay_type, mode, fields):
    model, sequences = build(cls, decay_type), make_sequences()
    first = 2 if "from 2" in fields else 0
    with torch.no_grad():
        packed = outputs_of(model(**pack(sequences, **FIELDS[fields]), attn_mode=mode))
        expected = [
            outputs_of(model(ids[None], position_ids=first + torch.arange(len(ids))[None])) for ids in sequences
        ]
    assert_close(packed, torch.cat(expected, 1))


@pytest.mark.parametrize("fields", ["position_ids", "seq_idx", "cu_seq_lens_q", "all"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
@each_decay
@each_mode
def test_each_packed_sequence_has_its_own_pooled_output(decay_type, mode, pooling, fields):
    model, sequences = build(LionForSequenceClassification, decay_type, classifier_pooling=pooling), make_sequences()
    with torch.no_grad():
        logits = model(**pack(sequences, **FIELDS[fields]), attn_mode=mode).logits
    assert logits.shape == (len(LENGTHS), 3)
    assert_close(logits, torch.cat(outputs_alone(model, sequences)))


@pytest.mark.parametrize("fields", ["position_ids", "seq_idx", "cu_seq_lens_q", "all"])
@pytest.mark.parametrize("cls", [*PER_TOKEN, LionForSequenceClassification], ids=lambda cls: cls.__name__)
@each_decay
@each_mode
def test_a_mask_of_ones_beside_them_changes_nothing(cls, decay_type, mode, fields):
    model, sequences = build(cls, decay_type), make_sequences()
    batch = pack(sequences, **FIELDS[fields])
    with torch.no_grad():
        packed = outputs_of(model(**batch, attention_mask=torch.ones_like(batch["input_ids"]), attn_mode=mode))
    is_pooled = cls is LionForSequenceClassification
    assert_close(packed, torch.cat(outputs_alone(model, sequences), 0 if is_pooled else 1))


@each_decay
@each_mode
@pytest.mark.parametrize("padding", [0, 3])
def test_a_row_may_begin_in_the_middle_of_a_document(decay_type, mode, padding):
    """Positions 5 to 7 of one, two documents of one token, and one of four."""
    model, ids = build(LionForSequenceClassification, decay_type), torch.arange(1, 10)[None]
    positions = torch.tensor([[5, 6, 7, 0, 0, 0, 1, 2, 3]])
    parts = [slice(0, 3), slice(3, 4), slice(4, 5), slice(5, 9)]

    def pad(x):
        return torch.nn.functional.pad(x, (padding, 0))

    with torch.no_grad():
        row = {"input_ids": pad(ids), "position_ids": pad(positions), "attention_mask": pad(torch.ones_like(ids))}
        packed = model(**row, attn_mode=mode).logits
        states = model.lion(**row, attn_mode=mode).last_hidden_state[:, padding:]
        alone = [{"input_ids": ids[:, part], "position_ids": positions[:, part]} for part in parts]
        assert_close(packed, torch.cat([model(**batch).logits for batch in alone]))
        assert_close(states, torch.cat([model.lion(**batch).last_hidden_state for batch in alone], 1))


@each_decay
@each_mode
@pytest.mark.parametrize("fields", ["position_ids", "seq_idx"])
def test_packed_rows_of_a_batch_may_be_padded(decay_type, mode, fields):
    """Two rows of two and three sequences, the first one padded on both sides and between its sequences."""
    sequences = make_sequences()
    rows = [[3, sequences[0], 2, sequences[3], 13], [sequences[1], 0, sequences[2][:36], 1, sequences[4], 0]]
    batch = {name: [] for name in ("input_ids", "attention_mask", "position_ids", "seq_idx")}
    for row in rows:
        columns = {name: [] for name in batch}
        for number, part in enumerate(row):
            is_text = isinstance(part, torch.Tensor)
            length = len(part) if is_text else part
            columns["input_ids"] += part.tolist() if is_text else [0] * length
            columns["attention_mask"] += [int(is_text)] * length
            columns["position_ids"] += range(length) if is_text else [0] * length
            columns["seq_idx"] += [number if is_text else -1] * length
        for name, values in columns.items():
            batch[name].append(values)
    batch = {name: torch.tensor(values) for name, values in batch.items() if name not in FIELDS or name == fields}
    alone = [sequences[0], sequences[3], sequences[1], sequences[2][:36], sequences[4]]
    model = build(LionForSequenceClassification, decay_type)
    with torch.no_grad():
        logits = model(**batch, attn_mode=mode).logits
        states = model.lion(**batch, attn_mode=mode).last_hidden_state[batch["attention_mask"].bool()]
    assert_close(logits, torch.cat(outputs_alone(model, alone)))
    assert_close(states, torch.cat(outputs_alone(model.lion, alone), 1)[0])


@each_decay
@each_mode
def test_gradients_are_those_of_the_sequences_alone(decay_type, mode):
    model, sequences = build(LionForSequenceClassification, decay_type), make_sequences()
    labels = torch.tensor([0, 2, 1, 1, 0])
    model(**pack(sequences), labels=labels, attn_mode=mode).loss.backward()
    packed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for ids, label in zip(sequences, labels, strict=True):
        (model(ids[None], labels=label[None]).loss / len(sequences)).backward()
    for name, gradient in packed.items():
        assert_close(gradient, model.get_parameter(name).grad)


@pytest.mark.parametrize("decay_type", DECAYS)
def test_auto_counts_packed_sequences_as_decay(decay_type, operator_calls):
    """Without decay the chunk form pays from 33 tokens on; with walks that end, only from 65."""
    model, ids = build(LionModel, decay_type), torch.arange(1, 41)[None]
    with torch.no_grad():
        model(ids, seq_idx=(ids > 20).long())
    assert {call["mode"] for call in operator_calls} == {"parallel"}


def test_one_sequence_in_a_row_is_no_pack(operator_calls):
    model, ids = build(LionModel), torch.arange(1, 9)[None].expand(2, -1)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 2, 3, 4, 5]])
    mask = torch.tensor([[1] * 8, [0, 0] + [1] * 6])
    with torch.no_grad():
        model(ids, position_ids=positions, attention_mask=mask)
        model(ids, seq_idx=torch.zeros_like(ids))
        model(ids[:1], cu_seq_lens_q=torch.tensor([0, 8]))
    assert len(operator_calls) == 6 and all(call["segment_ids"] is None for call in operator_calls)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_ids": torch.arange(8)[None]}, "`seq_idx` and `position_ids` contradict"),
        ({"position_ids": torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]])}, "`seq_idx` and `position_ids` contradict"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 8])}, "`seq_idx` and `cu_seq_lens_q` contradict"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 7])}, r"length of the only row, got \[0, 3, 7\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 3, 8])}, r"must rise from 0 .* got \[0, 5, 3, 8\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 3, 8])}, r"must rise from 0 .* got \[0, 3, 3, 8\]"),
        ({"seq_idx": torch.zeros(1, 7, dtype=torch.long)}, r"`seq_idx` must be \(batch, length\) = \(1, 8\)"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes, message):
    fields = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]),
        "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 8]),
    }
    model, ids = build(LionModel), torch.arange(1, 9)[None]
    model(ids, **fields)
    with pytest.raises(ValueError, match=message):
        model(ids, **{**fields, **changes})


def test_lengths_that_contradict_positions_are_refused():
    model, ids = build(LionModel), torch.arange(1, 9)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    model(ids, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 3, 8]))
    with pytest.raises(ValueError, match="`cu_seq_lens_q` and `position_ids` contradict"):
        model(ids, position_ids=positions, cu_seq_lens_q=torch.tensor([0, 4, 8]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cu_seq_lens_k": torch.tensor([0, 4, 8])},
            r"`cu_seq_lens_k` must be `cu_seq_lens_q`, \[0, 3, 8\], got \[0, 4",
        ),
        ({"cu_seq_lens_k": torch.tensor([0, 8])}, r"`cu_seq_lens_k` must be `cu_seq_lens_q`, \[0, 3, 8\], got \[0, 8"),
        ({"max_length_q": 4}, "`max_length_q` must be at least 5, as the longest sequence is, got 4"),
        ({"max_length_k": 4}, "`max_length_k` must be at least 5, as the longest sequence is, got 4"),
        ({"cu_seq_lens_q": None}, "`cu_seq_lens_k` goes with `cu_seq_lens_q`, which is not given"),
        (
            {"cu_seq_lens_q": None, "cu_seq_lens_k": None},
            "`max_length_q` goes with `cu_seq_lens_q`, which is not given",
        ),
    ],
)
@pytest.mark.parametrize(
    "cls", [LionModel, LionForMaskedLM, LionForSequenceClassification], ids=lambda cls: cls.__name__
)
def test_what_kernels_take_beside_lengths_must_agree_with_them(cls, changes, message):
    model, ids = build(cls), [torch.arange(1, 4), torch.arange(4, 9)]
    fields = pack(ids, return_flash_attn_kwargs=True)
    assert fields["max_length_q"] == fields["max_length_k"] == 5
    model(**fields | {"max_length_q": 6})  # a bound, which kernels take as well
    with pytest.raises(ValueError, match=message):
        model(**fields | changes)


def test_lengths_go_with_a_single_row():
    with pytest.raises(ValueError, match=r"length of the only row, got \[0, 3, 8\] for \(batch, length\) = \(2, 4\)"):
        build(LionModel)(torch.ones(2, 4, dtype=torch.long), cu_seq_lens_q=torch.tensor([0, 3, 8]))


def test_multiple_choice_takes_one_sequence_a_choice():
    ids = torch.arange(1, 17).view(1, 2, 8)
    with pytest.raises(ValueError, match="one sequence a choice"):
        build(LionForMultipleChoice)(ids, position_ids=torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(1, 2, 8))


@each_decay
@each_mode
def test_what_fields_say_of_masked_tokens_means_nothing(decay_type, mode):
    """A row padded on the left and a row with a hole, alone and beside a packed row."""
    model, sequences = build(LionForSequenceClassification, decay_type), make_sequences()
    ids = torch.stack([sequences[3][:12]] * 3)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, 5:7] = 0
    numbers = torch.where(mask == 1, 3, -1)
    numbers[2, 6:] = 4
    with torch.no_grad():
        beside = model(ids, mask, seq_idx=numbers, attn_mode=mode).logits
        for row in range(2):
            alone = {"attention_mask": mask[row : row + 1], "attn_mode": mode}
            logits = model(ids[row : row + 1], seq_idx=numbers[row : row + 1], **alone).logits
            assert_close(logits, beside[row : row + 1])
            if row == 1 or decay_type != "none":  # with a table of positions those of padding count otherwise
                assert_close(logits, model(ids[row : row + 1], **alone).logits)
        assert_close(beside[0], model(ids[:1, 4:], attn_mode=mode).logits[0])
    assert beside.shape == (4, 3)


def test_a_row_without_tokens_beside_packed_ones_is_refused_where_outputs_are_counted():
    ids, numbers = torch.ones(2, 8, dtype=torch.long), torch.tensor([[0] * 4 + [1] * 4, [0] * 8])
    mask = torch.tensor([[1] * 8, [0] * 8])
    assert build(LionForMaskedLM)(ids, mask, seq_idx=numbers).logits.isfinite().all()
    with pytest.raises(ValueError, match="has no token that is not masked"):
        build(LionForSequenceClassification)(ids, mask, seq_idx=numbers)


@each_decay
def test_a_compiled_model_keeps_packed_sequences_apart(decay_type):
    model, sequences = build(LionForMaskedLM, decay_type), make_sequences()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        logits = compiled(**pack(sequences), attn_mode="chunk").logits
    assert_close(logits, torch.cat(outputs_alone(model, sequences), 1))


@pytest.mark.parametrize("fields", ["position_ids", "seq_idx", "cu_seq_lens_q", "all"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_compiled_model_pools_each_packed_sequence(num_labels, fields):
    torch.compiler.reset()
    model, batch = (
        build(LionForSequenceClassification, num_labels=num_labels),
        pack(make_sequences(), **FIELDS[fields]),
    )
    labels = torch.tensor([0, 1, 1, 0, 1])
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        expected, output = model(**batch, labels=labels), compiled(**batch, labels=labels)
    assert output.logits.shape == (5, num_labels)
    assert_close(output.logits, expected.logits)
    assert_close(output.loss, expected.loss)
