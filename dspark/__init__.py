"""The DSpark algorithm: draft model, objectives, embedded speculative decoder, export format."""
