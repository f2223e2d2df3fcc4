"""The draft half: DeepSpeed ranks that train the draft on states taught by the target half."""
