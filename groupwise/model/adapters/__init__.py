"""LoRA beside layers that stay as they are, and the files of PEFT."""
