"""What the training scripts share about optimisation: weight-decay groups and learning-rate schedules."""

import math

import torch
from torch import nn
from transformers.optimization import (
    get_cosine_with_min_lr_schedule_with_warmup_lr_rate,
    get_polynomial_decay_schedule_with_warmup,
)


# Learned tokens and tables of positions of vision transformers, by the end of their names. They are parameters of
# their own there; the position embeddings of text are the weight of an embedding, which BERT decays.
EXEMPT_TOKENS = ("cls_token", "distillation_token", "mask_token", "position_embeddings")


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two optimizer groups, every trainable parameter in exactly one, tied parameters once.

    Exempt from weight decay are vectors (biases, norms), the learned tokens and positions of images, as in DeiT, and
    whatever sets LION's decays: pulling those towards zero would pull every head towards the same time constant.
    """
    groups = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            exempt = parameter.ndim < 2 or "decay_bias" in name or name.endswith(EXEMPT_TOKENS)
            groups[exempt]["params"].append(parameter)
    return groups


def linear_schedule(
    optimizer: torch.optim.Optimizer, num_training_steps: int, warmup_ratio: float, final_lr_ratio: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up from 0 to the optimizer's rate, then linear decay to `final_lr_ratio` of it at the last step."""
    # At least one step must be left for the decay, however short the run.
    num_warmup_steps = min(math.ceil(warmup_ratio * num_training_steps), num_training_steps - 1)
    return get_polynomial_decay_schedule_with_warmup(
        optimizer, num_warmup_steps, num_training_steps, lr_end=final_lr_ratio * optimizer.defaults["lr"], power=1.0
    )


def cosine_schedule(
    optimizer: torch.optim.Optimizer,
    num_training_steps: int,
    num_warmup_steps: int,
    warmup_lr: float,
    final_lr: float,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up from `warmup_lr` to the optimizer's rate, then half a cosine to `final_lr` at the last update.

    Neither goes above the optimizer's rate, which small batches can scale below them.
    """
    peak = optimizer.defaults["lr"]
    return get_cosine_with_min_lr_schedule_with_warmup_lr_rate(
        optimizer,
        # At least one step must be left for the cosine, however short the run.
        min(num_warmup_steps, num_training_steps - 1),
        num_training_steps,
        min_lr_rate=min(final_lr / peak, 1.0),
        warmup_lr_rate=min(warmup_lr / peak, 1.0),
    )
