"""LoongForge's files: a model's YAML, and the reports of its layer benchmark."""
