"""Sentence embeddings of LION models with the sentence-transformers library."""

import pytest
import torch
from datasets import Dataset

from lion_transformers import LionConfig, LionForMaskedLM
from lion_transformers.tokenization import train_wordpiece_tokenizer


sentence_transformers = pytest.importorskip("sentence_transformers")
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402


SUBJECTS = ("film", "actor", "music", "story", "ending", "camera", "script", "title")
PAIRS = {
    "anchor": [f"what did they say of the {subject} ?" for subject in SUBJECTS],
    "positive": [f"a review , and a long one , praised its {subject} above all ." for subject in SUBJECTS],
}
SENTENCES = [*PAIRS["anchor"], *PAIRS["positive"], "film", "the film " * 90]

each_decay = pytest.mark.parametrize("decay_type", ["none", "fixed", "selective"])


@pytest.fixture
def build(tmp_path):
    """A sentence transformer around a small model with random weights that was saved to a folder."""

    def build(decay_type, **kwargs):
        torch.manual_seed(0)
        tokenizer = train_wordpiece_tokenizer(SENTENCES, vocab_size=200, min_frequency=1, show_progress=False)
        tokenizer.save_pretrained(tmp_path / "model")
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = LionConfig(vocab_size=200, decay_type=decay_type, initializer_range=0.1, chunk_size=16, **sizes)
        LionForMaskedLM(config).save_pretrained(tmp_path / "model")
        transformer = Transformer(str(tmp_path / "model"), **kwargs)
        pooling = Pooling(transformer.get_embedding_dimension(), "mean")
        return SentenceTransformer(modules=[transformer, pooling], device="cpu")

    return build


def train(model, folder, *, repetitions):
    """One epoch over the pairs, each of them met `repetitions` times."""
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            str(folder),
            num_train_epochs=1,
            per_device_train_batch_size=len(SUBJECTS),
            learning_rate=3e-3,
            batch_sampler="no_duplicates",  # each batch holds every pair once
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            seed=0,
        ),
        train_dataset=Dataset.from_dict({name: texts * repetitions for name, texts in PAIRS.items()}),
        loss=MultipleNegativesRankingLoss(model),
    )
    trainer.train()


def embed(model, sentences, **kwargs):
    return model.encode(sentences, convert_to_tensor=True, show_progress_bar=False, **kwargs)


def similarities(model):
    anchors, positives = (embed(model, PAIRS[name], normalize_embeddings=True) for name in ("anchor", "positive"))
    return anchors @ positives.T


def ranking_loss(model):
    """Cross entropy of each anchor's own positive among all, at the library's scale of 20."""
    return -(20 * similarities(model)).log_softmax(-1).diagonal().mean().item()


@each_decay
def test_an_epoch_brings_pairs_together(decay_type, build, tmp_path):
    model = build(decay_type)
    own = torch.arange(len(SUBJECTS))
    before = ranking_loss(model)
    assert not torch.equal(similarities(model).argmax(-1), own)
    train(model, tmp_path / "run", repetitions=40)
    assert ranking_loss(model) < before / 2
    assert torch.equal(similarities(model).argmax(-1), own)


@each_decay
def test_embeddings_do_not_depend_on_their_batch(decay_type, build):
    model = build(decay_type)
    together = embed(model, SENTENCES, batch_size=len(SENTENCES))
    alone = torch.stack([embed(model, sentence) for sentence in SENTENCES])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_embeddings_are_means_over_tokens(build, tmp_path):
    model = build("selective")
    encoder = LionForMaskedLM.from_pretrained(tmp_path / "model").lion.eval()
    with torch.no_grad():
        hidden_states = encoder(**model.tokenizer(SENTENCES[0], return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(embed(model, SENTENCES[0]), hidden_states[0].mean(0), rtol=1e-5, atol=1e-5)


def test_saved_model_gives_the_same_embeddings(build, tmp_path):
    model = build("selective")
    expected = embed(model, SENTENCES)
    model.save(str(tmp_path / "saved"))
    assert torch.equal(embed(SentenceTransformer(str(tmp_path / "saved"), device="cpu"), SENTENCES), expected)


def test_length_is_the_tokenizers_unless_it_is_set(build):
    """Decays set no limit: a longer one is only a number."""
    model = build("selective")
    assert model.max_seq_length == model.tokenizer.model_max_length == 512
    text = "the film " * 1000
    assert torch.equal(embed(model, text), embed(model, text + "music " * 500))  # both cut
    model.max_seq_length = 4096
    long = embed(model, text)
    assert long.isfinite().all() and not torch.allclose(long, embed(model, text + "music " * 500), atol=1e-3)
    saved_length = model[0].tokenizer(text, truncation=True, max_length=4096)["input_ids"]
    assert len(saved_length) > 2000
