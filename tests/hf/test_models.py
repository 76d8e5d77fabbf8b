"""Transformers' own model tests over the whole family, and over its BERT and ViT the same way, to compare with.

What does not apply is skipped by the tests themselves, which look at what a model has (softmax attention that other
kernels could compute, rotary embeddings, experts, generation ...), or is named here.
"""

import functools
from itertools import product

import transformers
from hf.families import ImageTests, TextTests, make_tests

import lion_transformers


DECAYS = ("none", "fixed", "selective")
FORMS = ("parallel", "chunk", "rnn")
NOT_OF_IMAGES = {
    "test_inputs_embeds": "an image has no token ids that embeddings could stand for",
    "test_inputs_embeds_matches_input_ids": "an image has no token ids that embeddings could stand for",
}


def lion_tests():
    text = functools.partial(make_tests, tests=TextTests, library=lion_transformers, prefix="Lion")
    image = functools.partial(
        make_tests,
        tests=ImageTests,
        library=lion_transformers,
        prefix="Lion",
        not_applicable=NOT_OF_IMAGES,
        modality="image",
    )
    yield text("LionTextDefault")
    yield image("LionImageDefault")
    for decay_type, form in product(DECAYS, FORMS):
        # Several blocks and an incomplete one, in texts of 7 tokens as in images of 17.
        settings = {"decay_type": decay_type, "attn_mode": form, "chunk_size": 3}
        name = f"{decay_type.title()}{form.title()}"
        yield text(f"LionText{name}", **settings)
        yield image(f"LionImage{name}", **settings)
    serpentine = functools.partial(image, scan_order="serpentine", chunk_size=3)
    yield serpentine("LionImageSerpentineFixedChunk", decay_type="fixed", attn_mode="chunk")
    yield serpentine("LionImageSerpentineSelectiveRnn", decay_type="selective", attn_mode="rnn")


globals().update({tests.__name__: tests for tests in lion_tests()})
Bert = make_tests("Bert", TextTests, transformers, "Bert")
ViT = make_tests("ViT", ImageTests, transformers, "ViT", encoder_stride=3)
