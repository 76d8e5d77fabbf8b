"""What the tests of text models and of image models share: comparisons, gradients, and a layer's float64 reference."""

import json
import math
import re
from pathlib import Path

import torch
from folder_tasks import outputs_of
from oracle import loop_weights
from safetensors.torch import load_file
from torch import nn

import lion_transformers
from lion_transformers.scripts.convert_original_checkpoint import convert_original_checkpoint


GOLDEN = Path(__file__).parent / "golden"
GOLDEN_CASES = {entry["name"]: entry for entry in json.loads((GOLDEN / "manifest.json").read_text())}
GOLDEN_IMAGES = [name for name, entry in GOLDEN_CASES.items() if entry["task"] == "image"]
GOLDEN_TEXTS = [name for name in GOLDEN_CASES if name not in GOLDEN_IMAGES]
DECAYS = ("none", "fixed", "selective")
MODES = ("parallel", "chunk", "rnn")


# ---------------------------------------------------------------------------------------------------------------------
# Models and what they give
# ---------------------------------------------------------------------------------------------------------------------


def build_from(cls, config, *, seed=0, dtype=torch.float32):
    """A model in which every parameter matters: also biases, norms and the embedding of padding are random."""
    torch.manual_seed(seed)
    model = cls(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return model.to(dtype).eval()


def gradients(model, batch, **kwargs):
    """Output of a model and the gradients of a fixed random projection of it, by parameter name."""
    model.zero_grad()
    output = outputs_of(model(**batch, **kwargs))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (output * weights.to(output.dtype)).sum().backward()
    return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def decay_parameters(model):
    return {name: p for name, p in model.named_parameters() if re.search(r"attention\.decay_bias", name)}


def fill_with_constants(model):
    """Each parameter with a number of its own, exact in float32."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.fill_((i + 1) / 64)
    return model


def below(state, prefix):
    return {name.removeprefix(prefix): x for name, x in state.items() if name.startswith(prefix)}


# ---------------------------------------------------------------------------------------------------------------------
# Comparisons
# ---------------------------------------------------------------------------------------------------------------------


def relative_error(actual, expected):
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def assert_close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    assert not [name for name, x in expected.items() if not torch.equal(actual[name], x)]


def assert_carries_code(folder):
    """A folder holds the model files as they are, and its configuration names all classes in them."""
    root = Path(lion_transformers.__file__).parent
    for name in ("attention_lion.py", "configuration_lion.py", "modeling_lion.py", "scan_order_lion.py"):
        assert Path(folder, name).read_bytes() == (root / name).read_bytes(), name
    auto_map = json.loads(Path(folder, "config.json").read_text())["auto_map"]
    heads = ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice"]
    heads += ["ImageClassification", "MaskedImageModeling"]
    assert auto_map == {
        "AutoConfig": "configuration_lion.LionConfig",
        "AutoModel": "modeling_lion.LionModel",
        **{f"AutoModelFor{head}": f"modeling_lion.LionFor{head}" for head in heads},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of the public reference
# ---------------------------------------------------------------------------------------------------------------------


def golden_state(name):
    """Tensors of a checkpoint of the public reference."""
    content = torch.load(GOLDEN / GOLDEN_CASES[name]["checkpoint"], weights_only=True)
    return dict(content["model"] if name in GOLDEN_IMAGES else content["state"]["model"])


def golden_task(name):
    return "image-classification" if name in GOLDEN_IMAGES else GOLDEN_CASES[name]["task"]


def golden_settings(name):
    """What the tensors of such a checkpoint do not tell, from the reference's own options."""
    official = GOLDEN_CASES[name]["official"]
    settings = {"layer_norm_eps": official["layer_norm_eps"]}
    if name in GOLDEN_IMAGES:
        settings["pooling"] = "cls" if official["cls_tok"] else "mean"
        settings["image_size"] = official["img_size"]
    if name in ("vision_lit", "mlm_lit"):
        settings["num_attention_heads"] = 3
    return settings


def load_golden(name):
    settings = golden_settings(name)
    return convert_original_checkpoint(golden_state(name), golden_task(name), settings).model


def assert_gives_golden_outputs(model, name, mode):
    """Logits and the hidden states that the reference recorded: of every layer for images, the last for text."""
    expected = load_file(GOLDEN / f"{name}.expected.safetensors")
    if name in GOLDEN_IMAGES:
        assert_gives_golden_blocks(model, expected, mode)
        return
    batch = {key: expected[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
    real = batch["attention_mask"].bool()
    assert not real.all()
    with torch.no_grad():
        output = model(**batch, attn_mode=mode, output_hidden_states=True)
    assert_close(output.hidden_states[-1][real], expected["last_hidden_state"][real])
    rows = slice(None) if output.logits.ndim == 2 else real
    assert_close(output.logits[rows], expected["logits"][rows])


def assert_gives_golden_blocks(model, expected, mode):
    outputs = []
    hooks = [layer.register_forward_hook(lambda *args: outputs.append(args[-1])) for layer in model.lion.layers]
    with torch.no_grad():
        logits = model(expected["pixel_values"], attn_mode=mode).logits
    for hook in hooks:
        hook.remove()
    assert len(outputs) == len(expected) - 2 == 2
    for i, output in enumerate(outputs):
        assert_close(output, expected[f"block_{i}"])
    assert_close(logits, expected["logits"])


# ---------------------------------------------------------------------------------------------------------------------
# References
# ---------------------------------------------------------------------------------------------------------------------


def reference_attention(config, weights, x, keep, *, order=None, layer=0):
    """What LionAttention hands to its output projection, and its attention matrix, by the float64 loop.

    `order` holds the permutations `(orders, length)` of an image's tokens, where they have another order than their
    own.
    """

    def linear(name):
        return nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    heads = config.num_attention_heads
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in linear("qkv_proj").chunk(3, -1))
    if config.feature_map == "elu":
        q, k = (torch.where(z > 0, z + 1, z.exp()) for z in (q, k))
    elif config.feature_map == "silu":
        q, k = (z * z.sigmoid() + 0.5 for z in (q, k))
        q, k = (z / (z * z).sum(-1, keepdim=True).sqrt() for z in (q, k))
    log_decay = None
    if config.decay_type == "fixed":
        log_decay = weights["decay_bias"].sigmoid().log()
        log_decay = log_decay if order is None else list(log_decay.split(heads))
    elif config.decay_type == "selective":
        log_decay = (1 - linear("decay_bias_proj").sigmoid()).log().transpose(1, 2)
        if config.modality == "image" and config.use_cls_token:
            log_decay = log_decay * (torch.arange(x.shape[1]) > 0)
        log_decay = log_decay if order is None else list(log_decay.split(heads, 1))
    direction = config.direction
    if direction == "alternate":
        direction = "backward" if layer % 2 else "forward"
    options = {"key_mask": keep, "order": order, "direction": direction, "diagonal": config.diagonal}
    matrix = loop_weights(q, k, log_decay, **options)
    matrix = matrix / (matrix.sum(-1, keepdim=True) + 1e-6) if config.normalize else matrix / math.sqrt(q.shape[-1])
    output = (matrix @ v).transpose(1, 2).flatten(2)
    if config.attention_output_norm:
        output = nn.functional.layer_norm(
            output, output.shape[-1:], weights["norm.weight"], weights["norm.bias"], 1e-5
        )
    return output, matrix


def cross_entropy(logits, label):
    """Of one row, from its definition."""
    return (logits.double().exp().sum().log() - logits[label].double()).item()


def squared_error(logits, labels):
    pairs = zip(logits.flatten().tolist(), labels.flatten().tolist(), strict=True)
    return sum((score - label) ** 2 for score, label in pairs)


def softmax(scores):
    exponentials = [math.exp(score) for score in scores]
    return [e / sum(exponentials) for e in exponentials]
