"""Transformers' own tests for one configuration of a text or an image encoder, whichever library it is from."""

import unittest

from hf.upstream import configuration_tests, modeling_tests
from torch import nn


class EncoderTester:
    """A tiny configuration and inputs for it, under the names that the tests ask for."""

    batch_size, num_hidden_layers, num_attention_heads, hidden_size = 13, 2, 4, 32
    is_training = True

    def __init__(self, config_class, settings):
        self.config_class, self.settings = config_class, settings

    def get_config(self):
        return self.config_class(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,
            **self.sizes,
            **self.settings,
        )

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), self.make_inputs()


class TextTester(EncoderTester):
    seq_length, num_choices = 7, 4
    sizes = {"vocab_size": 99, "type_vocab_size": 16}

    def make_inputs(self):
        shape = (self.batch_size, self.seq_length)
        return {
            "input_ids": modeling_tests.ids_tensor(shape, self.sizes["vocab_size"]),
            "token_type_ids": modeling_tests.ids_tensor(shape, self.sizes["type_vocab_size"]),
            "attention_mask": modeling_tests.random_attention_mask(shape),
        }


class ImageTester(EncoderTester):
    image_size, patch_size = 12, 3
    seq_length, mask_length, num_masks = 17, 16, 8  # tokens with the CLS token; patches; how many of them are masked
    sizes = {"image_size": image_size, "patch_size": patch_size}

    def make_inputs(self):
        return {"pixel_values": modeling_tests.floats_tensor((self.batch_size, 3, self.image_size, self.image_size))}


class EncoderTests(modeling_tests.ModelTesterMixin):
    """All tests; `not_applicable` names those that are skipped, with the reason."""

    not_applicable = {}
    test_can_init_all_missing_weights_before_2023 = True  # whatever year the file of the model says

    def setUp(self):
        if self._testMethodName in self.not_applicable:
            self.skipTest(self.not_applicable[self._testMethodName])
        self.model_tester = self.inputs_of(self.all_model_classes[0].config_class, self.settings)

    def test_config(self):
        sizes = {"hidden_size": 36, "num_attention_heads": 6}
        config_class = self.all_model_classes[0].config_class
        tester = configuration_tests.ConfigTester(
            self, config_class, has_text_modality=self.has_text_modality, **sizes, **self.settings
        )
        tester.run_common_tests()


class TextTests(EncoderTests):
    inputs_of = TextTester
    has_text_modality = True
    heads = (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
    )


class ImageTests(EncoderTests):
    inputs_of = ImageTester
    has_text_modality = False
    heads = ("Model", "ForImageClassification", "ForMaskedImageModeling")
    test_resize_embeddings = False  # an image has no vocabulary

    def test_model_get_set_embeddings(self):
        """As for text; only that patches are embedded by a convolution."""
        for model_class in self.all_model_classes:
            model = model_class(self.model_tester.get_config())
            embeddings = nn.Conv2d(3, self.model_tester.hidden_size, 3, stride=3)
            self.assertIsInstance(model.get_input_embeddings(), nn.Module)
            model.set_input_embeddings(embeddings)
            self.assertIs(model.get_input_embeddings(), embeddings)
            self.assertIsNone(model.get_output_embeddings())


def make_tests(name, tests, library, prefix, not_applicable=None, **settings):
    """A test case that runs `tests` over the heads of one family, with these settings of its configuration."""
    attributes = {
        "all_model_classes": tuple(getattr(library, prefix + head) for head in tests.heads),
        "settings": settings,
        "not_applicable": not_applicable or {},
    }
    return type(name, (tests, unittest.TestCase), attributes)
