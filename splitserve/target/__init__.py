"""The frozen target model as a Hugging Face folder on disk."""
