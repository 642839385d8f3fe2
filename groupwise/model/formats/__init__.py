"""Model files: Hugging Face folders, GGUF, tokenizers and their chat templates."""
