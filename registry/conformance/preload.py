"""Imported once by the server that workers are forked from, and nowhere else: everything that takes long to import."""

from __future__ import annotations

import os

# Before the libraries look: workers run on CPU, offline, and torch has no threads that a fork would lose.
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}

from contextlib import suppress

import peft
import transformers

import tunery

from .models import MODELS

with suppress(ImportError):  # it is there where it can run
    import deepspeed

for _tiny in MODELS.values():
    getattr(transformers, _tiny.auto).from_config(_tiny.config(0.0))

__all__ = ["deepspeed", "peft", "tunery"]
_trainer = tunery.Trainer
