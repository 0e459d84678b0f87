"""What strategies share that train the fresh head alone for a time: the encoder is frozen and runs once for each row.

The encoder stays in eval mode: no dropout, fixed statistics. See :mod:`.feature_cache` for what is kept of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from .feature_cache import FeatureCache, can_cache
from .freezing import train_head_alone

if TYPE_CHECKING:
    from ..registry.context import RunContext

_caches: WeakSet[FeatureCache] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Whether, and where, what the frozen encoder says of a row is kept.

    Attributes:
        cache: run the frozen encoder once for each row and keep what the head reads of it, three vectors at most, in memory;
            the next run of the process on the same encoder finds it. Architectures whose head is not known to read so
            little run the encoder every time.
        cache_dir: a folder for the same in files, which later processes find; ranks and processes may share it.
    """

    cache: bool = True
    cache_dir: str | None = field(default=None, metadata={"recorded": False, "cache": True})

    def __post_init__(self) -> None:
        if self.cache_dir is not None and not self.cache:
            raise ValueError("option cache_dir: with cache=false nothing is kept; leave one of them out")


class HeadTuning:
    """The fresh head of a model trains alone, on cached features where that is possible, until :meth:`end`.

    Args:
        model: the plain model.
        run: the run it belongs to.
        options: of the cache.
        strategy: its name, for messages.

    Raises:
        CompatibilityError: the model has no fresh head to train.
    """

    def __init__(self, model: Any, run: RunContext, options: CacheOptions, strategy: str) -> None:
        self._hook = train_head_alone(model, run, strategy)
        self._cache: FeatureCache | None = None
        if not options.cache:
            return
        if not can_cache(model) or any(parameter.requires_grad for parameter in model.base_model.parameters()):
            kind = type(model).__name__
            run.logger.info("strategy %r runs the encoder every time: the head of %s is not known", strategy, kind)
            return
        self._cache = FeatureCache(model, run, Path(options.cache_dir) if options.cache_dir else None)
        _caches.add(self._cache)

    def end(self) -> None:
        """Take hook and cache off the model; the features are filed, and the flags stay."""
        self._hook.remove()
        if self._cache is not None:
            self._cache.remove()
            self._cache = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the encoder may change; afterwards its features are those of its new weights."""
        with nullcontext() if self._cache is None else self._cache.suspended():
            yield


def file_features(run: RunContext) -> None:
    """File the features of a run that ends, for a process that may be killed later."""
    for cache in _caches:
        if cache.run is run:
            cache.flush()
