"""Transformers' own model tests over the whole family, and over its BERT and ViT the same way, to compare with."""

from itertools import product

import transformers
from hf.families import ImageTests, TextTests, make_tests

import lion_transformers


DECAYS = ("none", "fixed", "selective")
FORMS = ("parallel", "chunk", "rnn")

NOT_APPLICABLE = {}
NOT_APPLICABLE_TO_IMAGES = {
    **NOT_APPLICABLE,
    "test_inputs_embeds": "there are no token ids of an image that embeddings could stand for",
    "test_inputs_embeds_matches_input_ids": "there are no token ids of an image that embeddings could stand for",
}


def lion_tests():
    lion = (lion_transformers, "Lion")
    text, image = (NOT_APPLICABLE, NOT_APPLICABLE_TO_IMAGES)
    for decay_type, form in product(DECAYS, FORMS):
        settings = {"decay_type": decay_type, "attn_mode": form, "chunk_size": 3}
        suffix = f"{decay_type.title()}{form.title()}"
        yield make_tests(f"LionText{suffix}", TextTests, *lion, text, **settings)
        yield make_tests(f"LionImage{suffix}", ImageTests, *lion, image, modality="image", **settings)
    serpentine = {"modality": "image", "scan_order": "serpentine", "chunk_size": 3}
    yield make_tests(
        "LionImageSerpentineFixed", ImageTests, *lion, image, decay_type="fixed", attn_mode="chunk", **serpentine
    )
    yield make_tests(
        "LionImageSerpentineSelective", ImageTests, *lion, image, decay_type="selective", attn_mode="rnn", **serpentine
    )
    yield make_tests("LionTextDefault", TextTests, *lion, text)
    yield make_tests("LionImageDefault", ImageTests, *lion, image, modality="image")


globals().update({tests.__name__: tests for tests in lion_tests()})
Bert = make_tests("Bert", TextTests, transformers, "Bert")
ViT = make_tests("ViT", ImageTests, transformers, "ViT", encoder_stride=3)
