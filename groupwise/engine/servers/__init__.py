"""Inference servers as engines: vLLM and SGLang over HTTP, never taken at their word."""
