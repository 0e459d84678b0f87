"""Measurements of tunery itself and of the methods it carries."""
