"""SplitServe Trainer: trains DSpark drafts for speculative decoding beside their target."""

__version__ = "0.1.0"
