"""The target engine: teaches (hidden states into the ring) and generates."""
