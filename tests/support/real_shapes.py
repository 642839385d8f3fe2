"""The shapes of three real models: their sizes and costs are known."""

from __future__ import annotations

from dataclasses import replace

from groupwise.model.config import ModelConfig

# SmolLM2-135M
S = ModelConfig(
    family="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30,
    num_heads=9, num_kv_heads=3, head_dim=64, max_positions=8192, tied=True,
)  # fmt: skip
# Qwen2.5-1.5B
M = ModelConfig(
    family="qwen2", vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_layers=28,
    num_heads=12, num_kv_heads=2, head_dim=128, max_positions=32768, tied=True, qkv_bias=True,
)  # fmt: skip
# Qwen2.5-7B
SEVEN = replace(
    M, vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_heads=28, num_kv_heads=4,
    tied=False,
)  # fmt: skip
