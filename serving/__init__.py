"""Serving a trained draft with SGLang: what it accepts, and how to start it."""
