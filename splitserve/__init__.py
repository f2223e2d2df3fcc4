"""SplitServe Trainer: trains DSpark drafts for speculative decoding beside the target they serve."""

__version__ = "0.1.0"
