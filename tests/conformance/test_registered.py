"""Every registered plugin keeps every law of its kind."""

from __future__ import annotations

from tunery.registry.conformance import ProbeLaws, RegularizerLaws, StrategyLaws


class TestFull(StrategyLaws):
    plugin = "full"


class TestHead(StrategyLaws):
    plugin = "head"


class TestLora(StrategyLaws):
    plugin = "lora:r=4,use_rslora=true"


class TestPeftVera(StrategyLaws):
    plugin = "peft:peft_type=VERA,r=4"


class TestL2Sp(RegularizerLaws):
    plugin = "l2_sp:alpha=0.5,beta=0.1"


class TestWeightDistance(ProbeLaws):
    plugin = "weight_distance"


class TestMixOut(RegularizerLaws):
    plugin = "mixout:p=0.5"


class TestMixOutEveryForward(RegularizerLaws):
    plugin = "mixout:p=0.5,every=forward,mask=element"
    stochastic = True


class TestLnsr(RegularizerLaws):
    plugin = "lnsr:sigma=0.1"


class TestMmr(RegularizerLaws):
    plugin = "mmr"
