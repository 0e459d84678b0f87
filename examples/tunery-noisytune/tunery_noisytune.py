# SPDX-License-Identifier: Apache-2.0
"""NoisyTune: W + U(-lambda/2, lambda/2) * std(W) for every pre-trained W, then full fine-tuning (Wu et al. 2022, eq. 1)."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from tunery import Strategy, hookimpl


class NoisyTune(Strategy):
    name = "noisytune"
    summary = "full fine-tuning that starts from pre-trained weights with a little noise"
    reference = "Wu et al. 2022, NoisyTune, ACL, eq. 1"
    identity_start = False  # the noise changes the output

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """intensity: width of the noise in standard deviations of the weight it is added to (the paper's lambda)."""

        intensity: Annotated[float, Ge(0)] = 0.15

    def prepare(self, model, run):
        import torch  # not above: listing plugins stays quick

        generator = torch.Generator().manual_seed(run.seed)  # the same noise on every rank
        for name, weight in model.named_parameters():
            weight.requires_grad_(weight.is_floating_point())
            if run.is_pretrained(name) and weight.is_floating_point():
                with torch.no_grad(), run.sharding.written([weight]):  # whole, also under ZeRO-3
                    noise = torch.rand(weight.shape, generator=generator).to(weight.device) - 0.5
                    weight += (noise * self.config.intensity * weight.float().std(correction=0)).to(weight.dtype)
        return model


@hookimpl
def tunery_strategies():
    return [NoisyTune]
