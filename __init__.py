"""LION: bidirectional encoders at linear cost, as a Hugging Face Transformers model family.

Importing this package registers the family with Transformers' Auto classes, so that `AutoModel.from_pretrained`,
`pipeline` and `Trainer` work on LION folders as on any other.
"""

import transformers

from .attention_lion import lion_attention
from .configuration_lion import LionConfig
from .modeling_lion import (
    AUTO_CLASSES,
    LionForImageClassification,
    LionForMaskedImageModeling,
    LionForMaskedLM,
    LionForMultipleChoice,
    LionForQuestionAnswering,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
    LionPreTrainedModel,
)
from .scan_order_lion import SCAN_ORDERS


__version__ = "0.1.0"

transformers.AutoConfig.register(LionConfig.model_type, LionConfig)
for auto_class, model_class in AUTO_CLASSES.items():
    getattr(transformers, auto_class).register(LionConfig, model_class)

__all__ = [
    "SCAN_ORDERS",
    "LionConfig",
    "LionForImageClassification",
    "LionForMaskedImageModeling",
    "LionForMaskedLM",
    "LionForMultipleChoice",
    "LionForQuestionAnswering",
    "LionForSequenceClassification",
    "LionForTokenClassification",
    "LionModel",
    "LionPreTrainedModel",
    "lion_attention",
]
