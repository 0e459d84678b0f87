"""Plugins that each break one law; ``test_offenders.py`` installs them and sees the law fail."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tunery import Measurement, Probe, Regularizer, Stage, Strategy, hookimpl


class Offender:
    summary = "breaks a law"
    reference = "tunery's own tests"


# ---- strategies


class Shifted(Offender, Strategy):
    """Does not start as the base model, and says it does."""

    name = "shifted"

    def prepare(self, model, run):
        with torch.no_grad():
            list(model.parameters())[-1].add_(1.0)
        return model


class Unseeded(Offender, Strategy):
    """Draws from the machine and not from the seed."""

    name = "unseeded"
    identity_start = False

    def prepare(self, model, run):
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
        head = list(model.parameters())[-1]
        with torch.no_grad():
            head.add_(torch.randn(head.shape, generator=generator))
        return model


class Meddling(Offender, Strategy):
    """Changes a frozen weight in every forward pass, and leaves its hook in what it exports."""

    name = "meddling"

    def prepare(self, model, run):
        frozen = next(model.parameters()).requires_grad_(False)

        def meddle(module, _args):
            if module.training:
                frozen.data.add_(0.01)

        model.register_forward_pre_hook(meddle)
        return model


class Forgetful(Offender, Strategy):
    """Counts its steps where no file remembers them, and the count decides what the model answers."""

    name = "forgetful"

    def prepare(self, model, run):
        self.steps = 0

        def scale(module, _args, output):
            self.steps += module.training
            output.logits = output.logits * (1 + 0.1 * self.steps)

        model.register_forward_hook(scale)
        return model


class Local(Offender, Strategy):
    """Does something else on every rank."""

    name = "local"

    def prepare(self, model, run):
        model.classifier.register_forward_hook(lambda _module, _args, output: output * (1 + run.sharding.rank))
        return model


class Stepwise(Offender, Strategy):
    """The head first, then a PEFT adapter as well: two stages, which break no law."""

    name = "stepwise"

    def prepare(self, model, run):
        from peft import LoraConfig, get_peft_model

        targets = {"target_modules": ["query"], "modules_to_save": ["classifier"]}
        return get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=2, **targets))

    def stages(self, model, run):
        return Stage(name="head", num_train_epochs=1, learning_rate=0.01), Stage(name="adapter")

    @contextmanager
    def staged(self, model, run, stage):
        flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and "classifier" in name)
        try:
            yield model
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)


class Untidy(Stepwise):
    """Leaves the adapter frozen when the head's stage is over."""

    name = "untidy"

    @contextmanager
    def staged(self, model, run, stage):
        with super().staged(model, run, stage):
            flags = [parameter.requires_grad for parameter in model.parameters()]
            yield model
        for parameter, flag in zip(model.parameters(), flags, strict=True):
            parameter.requires_grad_(flag)


class Remembering(Stepwise):
    """Remembers the first stage where no file does, and goes on with what it remembers."""

    name = "remembering"

    @contextmanager
    def staged(self, model, run, stage):
        seen = []
        hook = model.register_forward_hook(lambda *_: seen.append(model.training))
        with super().staged(model, run, stage):
            yield model
        hook.remove()

        def scale(_module, _args, output):
            if output.loss is not None:
                output.loss = output.loss * (1 + 0.1 * len(seen))

        model.register_forward_hook(scale)


# ---- regularizers


class Penalty(Offender, Regularizer):
    """What the offenders below share: the mean square of the logits, which breaks no law."""

    def attach(self, model, run):
        pass

    def penalty(self, batch):
        return batch.outputs.logits.float().square().mean(dim=tuple(range(1, batch.outputs.logits.dim()))).mean()

    def detach(self, model):
        pass


class Lawful(Penalty):
    name = "lawful"


class Summing(Penalty):
    """Sums over the rows of a micro-batch instead of averaging."""

    name = "summing"

    def penalty(self, batch):
        return batch.outputs.logits.float().square().sum()


class OverParameters(Penalty):
    """Reads the parameters outside their modules' forward, where ZeRO-3 has taken them away."""

    name = "over_parameters"

    def attach(self, model, run):
        self.model = model

    def penalty(self, batch):
        return sum(parameter.float().square().sum() for parameter in self.model.parameters() if parameter.numel())


class Staying(Penalty):
    """Stays on the model after detach."""

    name = "staying"

    def attach(self, model, run):
        model.register_forward_hook(lambda *_: None)


class Leaky(Penalty):
    """Puts a tensor into the state_dict."""

    name = "leaky"

    def attach(self, model, run):
        model.register_buffer("leak", torch.zeros(1))

    def detach(self, model):
        del model.leak


class Restless(Penalty):
    """Draws random numbers also where it is switched off."""

    name = "restless"
    off = {"strength": 0.0}  # noqa: RUF012  # a ClassVar in the contract

    @dataclass(frozen=True, kw_only=True)
    class Config(Regularizer.Config):
        """Options.

        Attributes:
            strength: how strong it is.
        """

        strength: float = 1.0

    def penalty(self, batch):
        return self.config.strength * torch.rand(()) * super().penalty(batch)


class Idle(Penalty):
    """Does nothing."""

    name = "idle"

    def penalty(self, batch):
        return None


class Counting(Penalty):
    """Grows with every step it has seen, and forgets them when a run is resumed."""

    name = "counting"

    def attach(self, model, run):
        self.steps = 0

    def penalty(self, batch):
        self.steps += 1
        return self.steps * super().penalty(batch)


class Undocumented(Penalty):
    """Has an option that no docstring explains."""

    name = "undocumented"

    @dataclass(frozen=True, kw_only=True)
    class Config(Regularizer.Config):
        """Options."""

        mystery: int = 1


# ---- probes


class Looking(Offender, Probe):
    """What the offenders below share: it looks at the first parameter, which breaks no law."""

    name = "looking"

    def measure(self, subject) -> Iterable[Measurement]:
        parameter = next(subject.model.parameters())
        with subject.run.sharding.gathered([parameter]):
            yield Measurement(name="norm", value=parameter.detach().double().norm().item())


class Noisy(Looking):
    """Moves a weight and leaves it there."""

    name = "noisy"

    def measure(self, subject):
        parameter = list(subject.model.parameters())[-1]
        subject.run.sharding.local(parameter).add_(0.01)
        yield from super().measure(subject)


class FairWeather(Looking):
    """Tidies up as long as nothing fails."""

    name = "fair_weather"

    def measure(self, subject):
        piece = subject.run.sharding.local(list(subject.model.parameters())[-1])
        kept = piece.clone()
        piece.add_(0.01)
        yield from super().measure(subject)
        piece.copy_(kept)


class Provincial(Looking):
    """Measures this rank's piece and takes it for the whole."""

    name = "provincial"

    def measure(self, subject):
        parameter = next(subject.model.parameters())
        yield Measurement(name="norm", value=subject.run.sharding.local(parameter).double().norm().item())


class Guessing(Looking):
    """Draws from the machine."""

    name = "guessing"

    def measure(self, subject):
        yield from super().measure(subject)
        yield Measurement(name="guess", value=float(int.from_bytes(os.urandom(4))))


@hookimpl
def tunery_strategies():
    return [Shifted, Unseeded, Meddling, Forgetful, Local, Stepwise, Untidy, Remembering]


@hookimpl
def tunery_regularizers():
    return [Lawful, Summing, OverParameters, Staying, Leaky, Restless, Idle, Counting, Undocumented]


@hookimpl
def tunery_probes():
    return [Looking, Noisy, FairWeather, Provincial, Guessing]
