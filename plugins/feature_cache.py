"""What a frozen encoder says of a row, computed once: in memory for the runs of a process, in files for those after it.

A row's features depend on the encoder's weights and the row alone. They are computed for one row at a time, without the pads
that its batch gave it, so that they are the same bits in whatever batch, on whatever rank and after whatever interruption;
computed in a batch they differ by rounding. Of the encoder's output only what the heads of ``READ_AT_THE_ENDS`` read is kept:
the first position, the last that is no pad, and the pooler's output.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..registry.context import RunContext

READ_AT_THE_ENDS = frozenset(
    {
        *("bert", "camembert", "distilbert", "roberta", "vit", "xlm-roberta"),
        *("gpt2", "llama", "mistral", "olmo2", "qwen2", "qwen3"),
    }
)
_CLASSES = ("ForSequenceClassification", "ForImageClassification")
_NOT_THE_ENCODERS = ("_name_or_path", "architectures", "id2label", "label2id", "problem_type", "transformers_version")
_SHOWS_MORE = ("output_hidden_states", "output_attentions", "use_cache", "past_key_values")


def can_cache(model: nn.Module) -> bool:
    """Whether the head of ``model`` is known to read nothing but the ends of the encoder's output."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return model_type in READ_AT_THE_ENDS and type(model).__name__.endswith(_CLASSES)


class FeatureCache:
    """Stands in for the forward method of a frozen encoder.

    Args:
        model: a model for which :func:`can_cache` holds; its ``base_model`` is the encoder, in eval mode when it runs.
        run: the run it belongs to.
        folder: where files are kept; ``None`` for memory alone.
    """

    def __init__(self, model: nn.Module, run: RunContext, folder: Path | None) -> None:
        self._encoder: Any = model.base_model
        self.run = run
        self._folder = folder
        self._pad_token_id = getattr(model.config, "pad_token_id", None)
        self._store: _Store | None = None
        self._install()

    def _install(self) -> None:
        vars(self._encoder)["forward"] = self.forward

    def remove(self) -> None:
        """Give the encoder its own forward method back, and write what is not in a file yet."""
        del vars(self._encoder)["forward"]
        self.flush()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the encoder has its own forward method and may change; afterwards its weights are looked at again."""
        self.remove()
        self._store = None
        try:
            yield
        finally:
            self._install()

    def flush(self) -> None:
        """Write what is not in a file yet."""
        if self._store is not None and self._folder is not None:
            self._store.write(self._folder)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder's output with zeros where no head reads."""
        config = self._encoder.config
        shows_more = any(kwargs.get(name) for name in _SHOWS_MORE)
        shows_more = shows_more or config.output_hidden_states or config.output_attentions
        if shows_more or self._encoder.training or self.run.sharding.is_perturbed:
            return type(self._encoder).forward(self._encoder, *args, **kwargs)
        if self._store is None:
            self._store = _Store.of(_digest_of(self._encoder, self.run), self._folder, self.run)
            if self._folder is not None:  # what is scored after training is filed when the run, or its process, is gone
                weakref.finalize(self, self._store.write, self._folder)
        inputs = _Inputs(args, kwargs, self._pad_token_id)
        keys = inputs.keys()
        self._encode(inputs, keys)
        return inputs.assembled([self._store.features[key] for key in keys])

    def _encode(self, inputs: _Inputs, keys: Sequence[bytes]) -> None:
        import torch

        assert self._store is not None
        missing = {key: row for row, key in enumerate(keys) if key not in self._store.features}
        # Under ZeRO-3 the encoder runs on all ranks or on none: they gather its weights together.
        more = self._most_on_any_rank(len(missing)) - len(missing) if self.run.sharding.zero_stage == 3 else 0
        with torch.no_grad():
            for key, row in [*missing.items(), *[(keys[0], 0)] * more]:
                args, kwargs = inputs.row(row)
                output = type(self._encoder).forward(self._encoder, *args, **kwargs)
                if key in missing:
                    self._store.add(key, inputs.ends(row, output).cpu())

    def _most_on_any_rank(self, count: int) -> int:
        import torch

        device = next(self._encoder.parameters()).device
        most = torch.tensor(count, device=device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        return int(most)


class _Inputs:
    """One call of an encoder, row by row; ``length`` is that of each row without the pads at its end."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], pad_token_id: int | None) -> None:
        import torch

        self.args, self.kwargs = args, kwargs
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        self.rows, self.device = len(tensors[0]), tensors[0].device
        mask = kwargs.get("attention_mask")
        ids = kwargs.get("input_ids", args[0] if args else None)
        is_text = ids is not None and not ids.is_floating_point()
        self.width = ids.shape[1] if is_text else None
        self.length = self.last = [0] * self.rows
        if is_text:
            no_pad = torch.ones_like(ids, dtype=torch.bool) if pad_token_id is None else ids != pad_token_id
            position = torch.arange(ids.shape[1], device=ids.device)
            # As transformers finds the position that a decoder classifies by.
            last = (
                torch.full_like(ids[:, 0], ids.shape[1] - 1) if pad_token_id is None else (position * no_pad).argmax(-1)
            )
            seen = no_pad if mask is None or mask.dim() != 2 else no_pad | mask.bool()
            self.last = last.tolist()
            self.length = ((position + 1) * seen).amax(-1).clamp(min=1).tolist()

    def row(self, row: int) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of a call with this row alone."""
        cut = {name: self._cut(value, row) for name, value in self.kwargs.items()}
        return [self._cut(value, row) for value in self.args], cut

    def _cut(self, value: Any, row: int) -> Any:
        import torch

        if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != self.rows:
            return value
        one = value[row : row + 1]
        return one[:, : self.length[row]] if self.width is not None and value.shape[1:2] == (self.width,) else one

    def keys(self) -> list[bytes]:
        """Return a hash of all that each row's features depend on beside the weights."""
        import torch

        kind = self.device.type
        state = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        found = []
        for row in range(self.rows):
            digest = hashlib.blake2b(repr(state).encode(), digest_size=32)
            args, kwargs = self.row(row)
            for name, value in [*enumerate(args), *sorted(kwargs.items())]:
                if isinstance(value, torch.Tensor):
                    digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
                    digest.update(_bytes(value))
                elif value is not None:
                    digest.update(f"{name}={value!r}".encode())
            found.append(digest.digest())
        return found

    def ends(self, row: int, output: Any) -> torch.Tensor:
        """Return what heads read of the output for one row, (2 or 3, D): first, last, pooled."""
        import torch

        hidden = output.last_hidden_state[0]
        parts = [hidden[0], hidden[self.last[row]]]
        pooled = getattr(output, "pooler_output", None)
        return torch.stack(parts if pooled is None else [*parts, pooled[0]])

    def assembled(self, features: Sequence[torch.Tensor]) -> Any:
        """Return an output for the whole batch: each row's features in their places."""
        import torch
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions as Output

        ends = torch.stack(list(features)).to(self.device)
        hidden = ends.new_zeros(self.rows, self.width or 1, ends.shape[-1])
        hidden[:, 0] = ends[:, 0]
        hidden[torch.arange(self.rows), torch.tensor(self.last)] = ends[:, 1]
        pooled: Any = ends[:, 2] if ends.shape[1] == 3 else None
        return Output(last_hidden_state=hidden, pooler_output=pooled)


class _Store:
    """The features of one encoder, by row. The one last used outlives its run: the next seed or head finds it."""

    recent: _Store | None = None

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.features: dict[bytes, torch.Tensor] = {}
        self._filed: dict[Path, set[bytes]] = {}  # what the files of a folder hold

    @classmethod
    def of(cls, digest: str, folder: Path | None, run: RunContext) -> _Store:
        if cls.recent is None or cls.recent.digest != digest:
            cls.recent = cls(digest)
        if folder is not None:
            cls.recent.read(folder, run)
        return cls.recent

    def add(self, key: bytes, features: torch.Tensor) -> None:
        self.features[key] = features

    def read(self, folder: Path, run: RunContext) -> None:
        """Take in the files of a folder; a damaged one is named and done without."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        for path in sorted((folder / self.digest).glob("*.safetensors")):
            try:
                content = load_file(path)
                found = dict(zip(map(bytes, content["keys"].tolist()), content["features"].unbind(0), strict=True))
            except (SafetensorError, OSError, KeyError) as error:
                run.logger.warning("the run does without the features in %s: %s", path, error)
                continue
            self.features.update(found)
            self._filed.setdefault(folder, set()).update(found)

    def write(self, folder: Path) -> None:
        """Write the features that no file of the folder has, under a temporary name that is then changed."""
        import torch
        from safetensors.torch import save_file

        filed = self._filed.setdefault(folder, set())
        fresh = sorted(self.features.keys() - filed)
        if not fresh:
            return
        content = {  # garbage may be collected anywhere: where a model is built on the meta device, say
            "keys": torch.tensor([list(key) for key in fresh], dtype=torch.uint8, device="cpu"),
            "features": torch.stack([self.features[key] for key in fresh]),
        }
        name = hashlib.blake2b(b"".join(fresh), digest_size=16).hexdigest()
        path = folder / self.digest / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(content, temporary)
        temporary.replace(path)
        filed.update(fresh)


def _digest_of(encoder: Any, run: RunContext) -> str:
    """Return a hash of all that an encoder's output depends on beside its input."""
    described = {k: v for k, v in encoder.config.to_dict().items() if k not in _NOT_THE_ENCODERS}
    kind = f"{type(encoder).__name__}{encoder.config._attn_implementation}{sorted(described.items(), key=str)}"
    digest = hashlib.blake2b(kind.encode(), digest_size=16)
    for name, value in [*encoder.named_parameters(), *encoder.named_buffers()]:
        with run.sharding.gathered([value]):
            digest.update(f"{name}{value.dtype}{tuple(value.shape)}".encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


def _bytes(value: torch.Tensor) -> bytes:
    import torch

    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
