"""A vision-language model of SmolVLM's form whose language model has published weights."""
