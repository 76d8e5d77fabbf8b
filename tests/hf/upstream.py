"""Transformers' own model tests, out of the source distribution that `fetch.py` has brought.

The distribution holds the files of `tests/` and none of its folders. What these files import from the folders has a
stand-in here: no tests of exports and of generation, and values for the fields that all configurations have.
"""

import importlib
import sys
from types import ModuleType

from hf.fetch import TESTS
from transformers.models.auto import modeling_auto

import lion_transformers


PACKAGE = "transformers_tests"

# None of them the default.
CONFIG_FIELDS = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 3,
    "is_encoder_decoder": True,
    "architectures": ["AnyModel"],
    "id2label": {0: "no", 1: "yes", 2: "both"},
    "label2id": {"no": 0, "yes": 1, "both": 2},
    "problem_type": "multi_label_classification",
}
STAND_INS = {
    "exporters": {},
    "exporters.test_export": {"ExportTesterMixin": type("ExportTesterMixin", (), {})},
    "generation": {},
    "generation.test_utils": {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})},
    "utils": {},
    "utils.test_configuration_utils": {"config_common_kwargs": CONFIG_FIELDS},
}

# The tests look up in the library's own tables, by name, what a head takes and which labels it has.
TABLES = {
    "MODEL_MAPPING_NAMES": "LionModel",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "LionForMaskedLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "LionForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "LionForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "LionForQuestionAnswering",
    "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES": "LionForMultipleChoice",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "LionForImageClassification",
    "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES": "LionForMaskedImageModeling",
}


def add_package():
    if not TESTS.is_dir():
        raise ImportError(f"{TESTS} is not there: `make test-hf` fetches it")
    sys.modules[PACKAGE] = ModuleType(PACKAGE)
    sys.modules[PACKAGE].__path__ = [str(TESTS)]
    for name, contents in STAND_INS.items():
        module = sys.modules[f"{PACKAGE}.{name}"] = ModuleType(f"{PACKAGE}.{name}")
        vars(module).update(contents)


def name_heads():
    for table, head in TABLES.items():
        getattr(modeling_auto, table)[lion_transformers.LionConfig.model_type] = head


add_package()
name_heads()
configuration_tests = importlib.import_module(f"{PACKAGE}.test_configuration_common")
modeling_tests = importlib.import_module(f"{PACKAGE}.test_modeling_common")
