"""Prompts in, samples out: which tokens are trained on, in which order."""
