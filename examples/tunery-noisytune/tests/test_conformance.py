"""NoisyTune keeps the laws of every strategy."""

from tunery.registry.conformance import StrategyLaws


class TestNoisyTune(StrategyLaws):
    plugin = "noisytune"
