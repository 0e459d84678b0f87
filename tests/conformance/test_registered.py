"""Every registered plugin keeps every law of its kind; one that is not tried here is a failure."""

from __future__ import annotations

import json

from tunery.registry.conformance import JointStrategyLaws, PluginLaws, ProbeLaws, RegularizerLaws, StrategyLaws
from tunery.registry.conformance.models import VOCABULARY, workspace
from tunery.registry.conformance.workers import STAGES
from tunery.registry.loading import load_plugins

WIDE = (*PluginLaws.models, "gpt2_causal_lm", "vit_classifier")  # tied weights, Conv1D, images


FEWER = ("ddp", "zero3")  # for a second way of a plugin that is tried on every stage


class TestFull(StrategyLaws):
    plugin = "full"
    models = WIDE


class TestHead(StrategyLaws):
    plugin = "head"


class TestHeadWithoutCache(StrategyLaws):
    plugin = "head:cache=false"
    stages = FEWER


class TestLora(StrategyLaws):
    plugin = "lora:r=4,use_rslora=true"
    models = WIDE


class TestPeftVera(StrategyLaws):
    plugin = "peft:peft_type=VERA,r=4"


class TestLpFt(StrategyLaws):
    plugin = "lp_ft:head_epochs=2,head_learning_rate=0.01"
    models = ("bert_classifier", "llama_causal_lm", "vit_classifier")


class TestLpFtInEvalMode(StrategyLaws):
    plugin = "lp_ft:head_epochs=1,eval_mode=true"
    stages = FEWER


class TestSurt(StrategyLaws):
    plugin = "surt:lm_epochs=2"
    models = WIDE


class TestSurtThenHead(StrategyLaws):
    plugin = "surt:lm_epochs=1,tuning=head"
    stages = FEWER
    models = ("bert_classifier",)


class TestProxySubFm(StrategyLaws):
    plugin = "proxy_sub_fm:ratio=0.75,retained=[0],r=4,dropout=0"
    models = WIDE


class TestProxySubFmAligned(StrategyLaws):
    plugin = "proxy_sub_fm:ratio=0.5,retained=[0],r=4,dropout=0,distill_steps=3"
    stages = FEWER
    models = ("bert_classifier",)


class TestOffsite(StrategyLaws):
    plugin = "offsite:adapter_layers=[1,0],emulator_layers=0,r=4,dropout=0"


class TestOffsiteDistilled(StrategyLaws):
    plugin = "offsite:adapter_layers=[1,1],emulator_layers=2,tune=layers,distill_steps=2"
    stages = FEWER
    models = ("deep_bert_classifier",)


class TestMultiLora(JointStrategyLaws):
    plugin = "multi_lora:r=4"
    models = WIDE


class TestMultiLoraOtherWay(JointStrategyLaws):
    plugin = "multi_lora:r=4,init=gaussian,frozen=b"
    stages = FEWER


class TestL2Sp(RegularizerLaws):
    plugin = "l2_sp:alpha=0.5,beta=0.1"
    models = WIDE


class TestL2SpMean(RegularizerLaws):
    plugin = "l2_sp:alpha=5,beta=5,form=mean"
    stages = FEWER


class TestL2SpDecoupled(RegularizerLaws):
    plugin = "l2_sp:alpha=0.5,beta=0.5,form=decoupled"


class TestWeightDistance(ProbeLaws):
    plugin = "weight_distance"


class TestGaussian(ProbeLaws):
    plugin = "gaussian:gammas=[0.2,1.0],draws=2"
    models = ("bert_classifier", "gpt2_causal_lm")


class TestInterpolation(ProbeLaws):
    plugin = "interpolation:lambdas=[-0.2,0.5]"
    models = ("bert_classifier",)
    stages = ("ddp", "zero2")
    traced_stages = ("ddp", "zero1", "zero2")  # on ZeRO-3 by differences, below
    strategies = ("full",)


class TestInterpolationByDifferences(ProbeLaws):
    plugin = "interpolation:direction=fine_tuning,lambdas=[-1.0,0.5],method=finite_difference"
    models = ("llama_causal_lm",)
    stages = ("zero3",)
    traced_stages = ("zero3",)
    strategies = ("full",)


class TestHessian(ProbeLaws):
    plugin = "hessian:draws=2,iterations=1"
    stages = ("ddp", "zero2")
    traced_stages = ("ddp", "zero1", "zero2")  # on ZeRO-3 by differences, below


class TestHessianByDifferences(ProbeLaws):
    plugin = "hessian:draws=2,iterations=1,method=finite_difference,step=0.05"  # a short one is rounded
    models = ("bert_classifier",)
    stages = ("zero3",)
    traced_stages = ("zero3",)
    strategies = ("full",)


class TestHessianForward(ProbeLaws):
    plugin = "hessian:draws=2,method=forward,step=0.5"  # a short one is rounded
    models = ("bert_classifier",)
    stages = FEWER
    traced_stages = FEWER
    strategies = ("full",)


class TestFeatureDrift(ProbeLaws):
    plugin = "feature_drift"
    models = ("bert_classifier",)
    stages = ("ddp", "zero3")


class TestNoiseStability(ProbeLaws):
    plugin = "noise_stability:draws=1,sigma=0.1"
    stages = ("ddp", "zero3")
    strategies = ("full",)


class TestApoz(ProbeLaws):
    plugin = "apoz:threshold=0.1"
    stages = ("ddp", "zero3")
    strategies = ("full",)


class TestClassPerplexity(ProbeLaws):
    plugin = "class_perplexity"
    stages = ("ddp", "zero3")
    strategies = ("full",)


class TestDataPerturbation(ProbeLaws):
    plugin = "data_perturbation:leave_one_out=3,reruns=2,share=0.2"
    models = ("bert_classifier", "llama_causal_lm")
    stages = ("ddp", "zero3")
    strategies = ("head",)


class TestGradientGap(ProbeLaws):
    plugin = "gradient_gap"
    strategies = (
        "proxy_sub_fm:retained=[0],r=2,dropout=0",
        "offsite:adapter_layers=[1,0],emulator_layers=0,r=2,dropout=0",
    )


class TestMixOut(RegularizerLaws):
    plugin = "mixout:p=0.5"
    models = WIDE


class TestMixOutEveryForward(RegularizerLaws):
    plugin = "mixout:p=0.5,every=forward,mask=element"
    stages = FEWER
    stochastic = True


class TestLnsr(RegularizerLaws):
    plugin = "lnsr:sigma=0.1"


class TestMmr(RegularizerLaws):
    plugin = "mmr"
    models = ("bert_classifier", "llama_causal_lm", "vit_classifier")


class TestMmrStratified(RegularizerLaws):
    plugin = "mmr:stratified=true"
    stages = FEWER
    models = ("bert_classifier",)


class TestMHLoss(RegularizerLaws):
    plugin = "mhloss:heads=5"
    models = ("bert_classifier", "vit_classifier")


def replayed_text() -> str:
    """Write a text of token ids that the tiny models know; return its file."""
    file = workspace() / "replayed.jsonl"
    if not file.exists():
        documents = [[1 + (7 * row + 3 * column) % (VOCABULARY - 1) for column in range(17)] for row in range(40)]
        file.write_text("".join(json.dumps({"input_ids": document}) + "\n" for document in documents), encoding="utf-8")
    return str(file)


class TestReplay(RegularizerLaws):
    plugin = f"replay:data={replayed_text()},share=0.3,length=10,mask_token_id=1"
    models = ("llama_causal_lm", "bert_masked_lm")


def test_every_plugin_is_tried() -> None:
    """A new plugin of tunery needs a class above."""
    tried = {
        (laws.kind, laws.selection().name)
        for laws in globals().values()
        if isinstance(laws, type) and hasattr(laws, "plugin")
    }
    ours = {(entry.kind, entry.name) for entry in load_plugins().catalog if entry.origin.distribution == "tunery"}
    assert ours - tried == set()


def test_every_probe_is_seen_to_leave_no_trace_on_every_stage() -> None:
    """On all that it supports, whichever of its classes above that is in."""
    probes = [laws for laws in globals().values() if isinstance(laws, type) and issubclass(laws, ProbeLaws)]
    for tried in (laws for laws in probes if hasattr(laws, "plugin")):
        name = tried.selection().name
        same = [laws for laws in probes if hasattr(laws, "plugin") and laws.selection().name == name]
        traced = {stage for laws in same for stage in laws.traced_stages}
        assert {stage for stage in STAGES if tried.runs_on(stage)} <= traced, name


def test_strategies_of_several_tasks_are_tried_with_several() -> None:
    """What says it takes several tasks has the laws for it above."""
    joint = {
        entry.name for entry in load_plugins().catalog if entry.kind == "strategy" and entry.cls.supports.several_tasks
    }
    tried = {
        laws.selection().name
        for laws in globals().values()
        if isinstance(laws, type) and issubclass(laws, JointStrategyLaws) and hasattr(laws, "plugin")
    }
    assert joint == tried
