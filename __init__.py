"""LION: bidirectional encoders at linear cost, as a Hugging Face Transformers model family.

Importing this package registers the family with Transformers' Auto classes, so that `AutoModel.from_pretrained`,
`pipeline` and `Trainer` work on LION folders as on any other.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .attention_lion import lion_attention
from .configuration_lion import LionConfig
from .modeling_lion import (
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

AutoConfig.register(LionConfig.model_type, LionConfig)
AutoModel.register(LionConfig, LionModel)
AutoModelForImageClassification.register(LionConfig, LionForImageClassification)
AutoModelForMaskedImageModeling.register(LionConfig, LionForMaskedImageModeling)
AutoModelForMaskedLM.register(LionConfig, LionForMaskedLM)
AutoModelForMultipleChoice.register(LionConfig, LionForMultipleChoice)
AutoModelForQuestionAnswering.register(LionConfig, LionForQuestionAnswering)
AutoModelForSequenceClassification.register(LionConfig, LionForSequenceClassification)
AutoModelForTokenClassification.register(LionConfig, LionForTokenClassification)

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
