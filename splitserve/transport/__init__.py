"""Hidden states on their way from the target engine to the trainer."""
