"""What `scripts/benchmark.py packing` measures: pretraining on documents of mixed length, packed or padded."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from accelerate.utils import send_to_device
from datasets import Dataset
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lion_transformers.scripts.arguments import UsageError
from lion_transformers.scripts.benchmark_cases import ModelCase
from lion_transformers.scripts.packing import PACKED_FEATURES
from lion_transformers.scripts.pretrain_mlm import (
    SEQUENCE_FEATURES,
    DataArguments,
    MaskedSequences,
    encode,
    predict_targets,
)
from lion_transformers.tokenization import build_character_tokenizer


SPECIAL_TOKENS = 2  # of a document: [CLS] and [SEP]


@dataclass(frozen=True)
class PackingCase:
    """One pass of scripts/pretrain_mlm.py over documents whose lengths are log-normal, with a row at most.

    Args:
        model: the model, the tokens of a row (`length`) and the rows of a batch.
        documents: how many. Half of them have at most a quarter of a row's tokens.
    """

    model: ModelCase
    documents: int

    def build(self) -> PreTrainedModel:
        """The model with its head. Raises `UsageError` for a vocabulary without the documents' characters."""
        config = self.model.lion_config()
        if config.vocab_size < len(self.tokenizer):
            raise UsageError(f"vocab_size must be {len(self.tokenizer)} at least: documents are made of bytes.")
        model = AutoModelForMaskedLM.from_config(config, dtype=self.model.setting.weights_dtype)
        return model.to(self.model.setting.device)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return build_character_tokenizer("bytes", model_max_length=self.model.length)

    @cached_property
    def texts(self) -> list[str]:
        draw = random.Random(0)
        lengths = [draw.lognormvariate(math.log(self.model.length / 4), 1.0) for _ in range(self.documents)]
        bounded = [min(max(round(length), SPECIAL_TOKENS + 1), self.model.length) for length in lengths]
        return ["".join(draw.choices("abcdefgh", k=length - SPECIAL_TOKENS)) for length in bounded]

    def load(self, packing: bool) -> DataLoader:
        """Batches of masked rows: as `--packing` makes them, or as `--line_by_line` does, with padding."""
        options = {"packing": packing, "line_by_line": not packing}
        rows = encode({"text": self.texts}, self.tokenizer, "text", self.model.length, **options)
        dataset = Dataset.from_dict(rows, features=PACKED_FEATURES if packing else SEQUENCE_FEATURES)
        masking = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=DataArguments.mlm_probability)
        padding = DataCollatorForTokenClassification(self.tokenizer)
        return DataLoader(MaskedSequences(dataset, masking), batch_size=self.model.batch, collate_fn=padding)

    def count_tokens(self, packing: bool) -> tuple[int, int]:
        """Real tokens in all batches, and all tokens."""
        masks = [batch["attention_mask"] for batch in self.load(packing)]
        return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)

    def bind(self, model: PreTrainedModel, packing: bool) -> Callable[[], None]:
        """A call that loads every batch, and computes the gradients of its loss. They are not kept."""
        batches, setting = self.load(packing), self.model.setting
        model.train()

        def call():
            for batch in batches:
                with setting.context():
                    logits, labels, _ = predict_targets(model, send_to_device(batch, setting.device))
                    F.cross_entropy(logits, labels).backward()
                model.zero_grad(set_to_none=True)

        return call
