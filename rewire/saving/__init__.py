"""Rewired models as files: a recipe of what was rewired, and the weights."""
