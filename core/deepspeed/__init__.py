"""Bundled DeepSpeed presets: ``zero1.json``, ``zero2.json``, ``zero3.json``."""
